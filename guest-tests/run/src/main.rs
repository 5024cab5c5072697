//! `./x run`: the main job, for a person or a script.

use std::{
    io::{IsTerminal, stderr},
    path::PathBuf,
    process::ExitCode,
    sync::atomic::Ordering,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use lamina_guest::Omit;
use lamina_llama::Policy;
use lamina_run::{
    bundled, bundled_file,
    daemon::Serve,
    decode::{
        Compared, Decode,
        gguf::{self, Converted},
    },
    handoff::Handoff,
    interrupt::{INTERRUPTED, heed},
    job::{Job, On, Step},
    log_to_stderr,
    ram::{self, Ram},
    report::write_json,
};

/// The views of the main job.
const VIEWS: &str = "full,e8m3,e8m3+g2,e8m3+g2:packed,e8m0,fp8_e4m3fn,fp8_e5m2";
/// The views of a decoder's weights: each is a reading of the whole text.
const WEIGHT_VIEWS: &str = "full,e8m3+g2,fp8_e4m3fn,e8m1+g2,e8m0+g2";
/// The same of a model in a GGUF file, on the host.
const LARGER_VIEWS: &str = "full,e8m3,e8m3+g2,e8m2,e8m1,fp8_e4m3fn+g4";
/// The policies of the paper's Table II, scaled to a history of a few pages. For FP8 and FP4 stand
/// views with their mantissas, three bits and one, in the tensor's own container, so that a page
/// stays what the host fetches at once.
const POLICIES: [&str; 8] = [
    "full",
    "window:64",
    "top:2",
    "top:2=full,1=e8m3+g2,1=e8m1+g2",
    "top:2=full,2=e8m3+g2",
    "packkv:0.05",
    "packkv:0.1",
    "packkv:0.2",
];
/// Table II as it is, pages ranked for each head, and for comparison the best of all heads
/// together.
const LARGER_POLICIES: [&str; 9] = [
    "full",
    "window:64",
    "quest:5",
    "quest:5=full,3=e8m3+g2,2=e8m1+g2",
    "quest:5=full,5=e8m3+g2",
    "top:5",
    "packkv:0.05",
    "packkv:0.1",
    "packkv:0.2",
];
/// How a text begins that a model in a GGUF file writes.
const PROMPT: &str = "Once upon a time";
/// Tokens of a text that such a model judges.
const TEXT_TOKENS: usize = 512;

/// Loads real tensors into the device, boots a guest that reads them in every view, and checks
/// every byte.
///
/// The guest is an unmodified Linux that sees the device as CXL Type-3 memory. It reads each tensor
/// through the base window and in each view by plain loads, writes one tensor by stores, and reads
/// it back. Each hash is held against an independent reference computed from the model file. With
/// the workload `decode` it runs a language model whose weights and KV cache are on the device, and
/// every logit is held against a run in ordinary memory. With the workload `ram` the base window is
/// the guest's memory: processes run on it, pages are demoted and swapped to it, and what real
/// programs' memory is stored in is told. The exit status is 0 only if everything was right.
#[derive(Debug, Parser)]
#[command(
    name = "./x run",
    bin_name = "./x run",
    version,
    after_help = "\
Examples:
  ./x run
  ./x run --model model.safetensors --views full,e8m3,fp8_e4m3fn
  ./x run --mode gcomp --json
  ./x run --workload ram
  ./x run --workload handoff
  ./x run --workload handoff --omit payload-flush
  ./x run --workload decode
  ./x run --workload decode --model smollm2
  ./x run --workload decode --model smollm2 --on host
  ./x run --workload decode --views full,e8m2 --policy window:64 --policy top:3=full,*=e8m1 --prompt 'Tom had a dog'

Views: full · eXmY keeps X exponent and Y mantissa bits · +gN rounds with N more bits fetched · +dN rounds the exponent so ·
:packed packs the elements · bf16 fp8_e4m3fn fp8_e5m2 fp6_e3m2 fp6_e2m3 fp4_e2m1 convert · int4 int2 of int8, int2 of int4. Views that a tensor's format cannot give are skipped and listed.

Policies of the KV cache: full · window:N reads the last N tokens · top:K the K best pages · top:K=VIEW,K=VIEW,… the K best in one view, the next in
another; * for a count takes the rest · quest: in place of top: ranks the pages for each head · packkv:SCALE packs full windows with loss, in
steps of SCALE of what a token's values span.

Models of a decoder: a safetensors file in bf16 with its shape in the metadata, as the bundled one · a GGUF file of a Llama with GPT-2's
vocabulary, whose tensors become bf16 · smollm2, which is SmolLM2-135M (98 MB, Apache-2.0), fetched once. A model in a GGUF file writes a text in the
guest; --on host judges one as well."
)]
struct Cli {
    /// What the guest does, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST", default_value = "views")]
    workload: Vec<Workload>,
    /// Who does it: a guest, or its program on the host, by the mount
    #[arg(long, value_enum, default_value = "guest", value_name = "WHO")]
    on: Who,
    /// A safetensors file; may be given more than once. Of the workload decode a GGUF file or
    /// smollm2, too [default: a bundled 260 K-parameter model and its KV cache]
    #[arg(long = "model", value_name = "FILE")]
    models: Vec<PathBuf>,
    #[arg(long, value_delimiter = ',', value_name = "LIST", help = format!(
        "Views to make and read, separated by commas; a decoder reads its weights in each [default: {VIEWS}; of a decoder {WEIGHT_VIEWS}]"
    ))]
    views: Vec<String>,
    /// The device: trace (bit-planes), gcomp (compressed words) or plain (words)
    #[arg(long, default_value = "trace", value_parser = ["trace", "gcomp", "plain"])]
    mode: String,
    /// The codec
    #[arg(long, default_value = "tree", value_parser = ["lz4", "zstd", "tree"])]
    codec: String,
    /// Bytes of the base window, for example 1G [default: fitting, a multiple of 256M]
    #[arg(long, value_name = "BYTES")]
    capacity: Option<String>,
    /// KiB the host reads when a page is missing; 4 reads exactly that page
    #[arg(long, default_value_t = 4, value_name = "KIB")]
    read_ahead_kb: u32,
    /// Count the base window as N devices, 2 to 8, interleaved by chunks of 2 MiB, and report what
    /// each moves (workloads views and decode)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=8))]
    devices: Option<u32>,
    #[command(flatten)]
    decode: DecodeArgs,
    /// Leave out a call each time, which must be caught: payload-flush or payload-invalidate
    /// (workload handoff)
    #[arg(long, value_parser = omit, value_name = "CALL")]
    omit: Option<Omit>,
    /// Tokens of a block that is handed over (workload handoff)
    #[arg(long, default_value_t = 16, value_name = "N")]
    block_tokens: usize,
    /// The tensor that the guest writes [default: the first by name]
    #[arg(long, value_name = "TENSOR")]
    write: Option<String>,
    /// Have the guest misbehave too: store into a view, reach past ends
    #[arg(long)]
    hostile: bool,
    /// Seconds the guest may take
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    timeout: u64,
    /// Where the report and the guest's console go
    #[arg(long, default_value = "target/run", value_name = "DIR")]
    out: PathBuf,
    /// Print the report as JSON rather than as a table
    #[arg(long)]
    json: bool,
}

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Workload {
    /// Reads every tensor in every view, and writes one
    Views,
    /// Runs a language model on the device
    Decode,
    /// One guest computes a prompt's KV cache, another goes on with it, through a pool in memory
    /// that is not coherent between them
    Handoff,
    /// Uses the base window as memory, by the kernel's own tools, and swaps to it
    Ram,
}

/// Who does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Who {
    /// An unmodified Linux in QEMU
    Guest,
    /// A process
    Host,
}

impl From<Who> for On {
    fn from(who: Who) -> Self {
        match who {
            Who::Guest => Self::Guest,
            Who::Host => Self::Host,
        }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Workload decode")]
struct DecodeArgs {
    #[arg(long = "policy", value_name = "POLICY", help = format!(
        "How the KV cache is read; may be given more than once [default: {}; of a model in a GGUF file {}]",
        POLICIES.join(" and "), LARGER_POLICIES.join(" and ")
    ))]
    policies: Vec<Policy>,
    #[arg(long, value_name = "TEXT", help = format!(
        "How the text that is written begins [default: nothing; of a model in a GGUF file {PROMPT:?}]"
    ))]
    prompt: Option<String>,
    /// Tokens it has at most [default: 256; of a model in a GGUF file 64]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// How freely tokens are chosen; 0 takes the likeliest
    #[arg(long, default_value_t = 0.0, value_parser = temperature, value_name = "T")]
    temperature: f32,
    /// Decides what is chosen
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// The text that is judged, for its perplexity [default: a bundled short story; of a model in a
    /// GGUF file a bundled essay, on the host alone]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of it that are judged [default: all that the model can take; of a model in a GGUF
    /// file 512]
    #[arg(long, value_name = "N")]
    text_tokens: Option<usize>,
    /// The vocabulary, as llama2.c keeps it [default: that of the model]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Tokens from one flush of the KV cache to the next
    #[arg(long, default_value_t = 16, value_name = "N")]
    flush_every: usize,
    /// Tokens of a page of the KV cache [default: what a 4 KiB block of the device holds of a K or
    /// V tensor]
    #[arg(long, value_name = "N")]
    page_tokens: Option<usize>,
    /// Tokens of a KV window, which is coded as a whole, up to 256 [default: those of a page]
    #[arg(long, value_name = "N")]
    window_tokens: Option<usize>,
    /// Tokens of the judged text that go through the model together, for which weights are loaded
    /// once [default: 1; of a model in a GGUF file as many as are flushed together]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Let the host keep from step to step what it has fetched [default: each step loads anew, as
    /// if the model were larger than every cache; a model in a GGUF file is kept]
    #[arg(long)]
    keep_cache: bool,
    /// Write the K and V of the judged text, everything in full, to a new safetensors file, as
    /// `lamina analyze` and `lamina reproduce` read it
    #[arg(long, value_name = "FILE")]
    save_kv: Option<PathBuf>,
}

/// Tokens of a page of a larger model's cache, as in Quest.
const PAGE_TOKENS: usize = 16;
/// Tokens of its KV windows.
const WINDOW_TOKENS: usize = 64;

impl DecodeArgs {
    /// The bundled model's job, or that of `larger`, which came out of a GGUF file.
    fn decode(self, views: &[String], on: Who, larger: Option<&Converted>) -> Result<Decode> {
        let judges = larger.is_none() || on == Who::Host || self.text.is_some();
        let (all_views, all_policies) = match larger {
            None => (WEIGHT_VIEWS, &POLICIES[..]),
            Some(_) => (LARGER_VIEWS, &LARGER_POLICIES[..]),
        };
        let policies =
            || all_policies.iter().map(|policy| policy.parse()).collect::<Result<Vec<Policy>, _>>();
        let text = match (self.text, larger) {
            (Some(text), _) => Some(text),
            (None, None) => Some(bundled_file("story.txt")?),
            (None, Some(_)) => judges.then(|| bundled_file("essay.txt")).transpose()?,
        };
        let tokenizer = match (self.tokenizer, larger) {
            (Some(tokenizer), _) => tokenizer,
            (None, None) => bundled_file("tok512.bin")?,
            (None, Some(larger)) => larger.tokenizer.clone(),
        };
        let of_larger = |value: usize| larger.map(|_| value);
        let prompt = if larger.is_some() { PROMPT } else { "" };
        Ok(Decode {
            views: if views.is_empty() {
                all_views.split(',').map(str::to_owned).collect()
            } else {
                views.to_vec()
            },
            policies: if self.policies.is_empty() { policies()? } else { self.policies },
            prompt: self.prompt.unwrap_or_else(|| prompt.to_owned()),
            tokens: self.tokens.or(of_larger(64)).unwrap_or(256),
            temperature: self.temperature,
            seed: self.seed,
            text,
            text_tokens: self.text_tokens.or(of_larger(TEXT_TOKENS)),
            compared: if larger.is_some() { Compared::InFull } else { Compared::All },
            tokenizer,
            flush_every: self.flush_every,
            page_tokens: self.page_tokens.or(of_larger(PAGE_TOKENS)),
            window_tokens: self.window_tokens.or(of_larger(WINDOW_TOKENS)),
            batch: self.batch.or(of_larger(self.flush_every)).unwrap_or(1),
            keep_cache: self.keep_cache || larger.is_some(),
            save_kv: self.save_kv,
        })
    }
}

fn omit(text: &str) -> Result<Omit, String> {
    let names = || Omit::ALL.map(Omit::name).join(" or ");
    let found = Omit::ALL.into_iter().find(|omit| omit.name() == text);
    found.ok_or_else(|| format!("{text:?} is no call that can be left out: {}", names()))
}

fn temperature(text: &str) -> Result<f32, String> {
    let given = text.parse().ok().filter(|t: &f32| t.is_finite() && *t >= 0.0);
    given.ok_or_else(|| {
        format!("{text:?} is no temperature: give a number from 0 up, 1 for what the model says")
    })
}

fn main() -> ExitCode {
    log_to_stderr();
    let cli = Cli::parse();
    let interrupted = match heed() {
        Ok(interrupted) => interrupted,
        Err(why) => {
            eprintln!("error: signals cannot be caught: {why}");
            return ExitCode::from(2);
        }
    };
    match run(cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // What ran was told to end, and says so.
        Err(_) if interrupted.load(Ordering::Relaxed) => {
            eprintln!("interrupted; the device and the guest have ended");
            ExitCode::from(INTERRUPTED)
        }
        Err(why) => {
            eprintln!("error: {why:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> Result<bool> {
    if cli.workload.contains(&Workload::Handoff) {
        return hand_off(cli);
    }
    ensure!(cli.omit.is_none(), "--omit is for --workload handoff, which was not asked for");
    let (views, decodes) =
        (cli.workload.contains(&Workload::Views), cli.workload.contains(&Workload::Decode));
    ensure!(
        decodes || cli.decode.policies.is_empty(),
        "--policy is for --workload decode, which was not asked for"
    );
    ensure!(
        views || decodes || cli.models.is_empty(),
        "--model is for the workloads views and decode, which were not asked for"
    );
    ensure!(
        cli.on == Who::Guest || !cli.workload.contains(&Workload::Ram),
        "--on host is for the workloads views and decode: memory is the guest's"
    );
    let mut given = cli.models;
    let larger = if decodes { convert(&mut given)? } else { None };
    let models = match (given.is_empty(), views) {
        (false, _) => given,
        (true, true) => bundled()?,
        // A decoder makes a KV cache of its own.
        (true, false) => bundled()?[..1].to_vec(),
    };
    let list = |default: &str| match cli.views.as_slice() {
        [] => default.split(',').map(str::to_owned).collect(),
        given => given.to_vec(),
    };
    let limit = Duration::from_secs(cli.timeout);
    let console = cli.out.join("console.log");
    let ram = cli.workload.contains(&Workload::Ram).then(|| Ram {
        serve: Serve {
            models: Vec::new(),
            views: Vec::new(),
            kv: Vec::new(),
            mode: cli.mode.clone(),
            codec: cli.codec.clone(),
            capacity: cli.capacity.clone(),
            devices: None,
            read_ahead_kb: cli.read_ahead_kb,
        },
        limit,
        console: cli.out.join("console-ram.log"),
        plan: ram::plan(),
        swap: ram::swap(),
    });
    let decode = decodes.then(|| cli.decode.decode(&cli.views, cli.on, larger.as_ref())).transpose()?;
    std::fs::create_dir_all(&cli.out)
        .with_context(|| format!("cannot make the folder {}", cli.out.display()))?;
    let job = Job {
        serve: Serve {
            models,
            views: if views { list(VIEWS) } else { Vec::new() },
            kv: Vec::new(),
            mode: cli.mode,
            codec: cli.codec,
            capacity: cli.capacity,
            read_ahead_kb: cli.read_ahead_kb,
            devices: cli.devices,
        },
        on: cli.on.into(),
        views,
        decode,
        ram,
        write: cli.write,
        hostile: cli.hostile,
        limit,
        console,
    };
    let mut meter = Meter::new();
    let report = job.run(|step| meter.show(&step))?;
    meter.finish();
    let path = cli.out.join("report.json");
    report.write(&path).with_context(|| format!("cannot write {}", path.display()))?;
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{}\nreport  {}", report.to_text(), path.display());
    }
    Ok(report.good())
}

/// The prompt that is handed over unless another is given.
const HANDED_OVER: &str = "Once upon a time, there was a little girl named Lily. She loved to play in the park \
    with her dog. One day, Lily found a big red ball under a tree. She wanted to show it to her mom";

fn hand_off(cli: Cli) -> Result<bool> {
    ensure!(
        cli.workload.as_slice() == [Workload::Handoff],
        "the workload handoff has two guests and is done alone: run the others by themselves"
    );
    let mut models = cli.models;
    let larger = convert(&mut models)?;
    ensure!(models.len() <= 1, "--workload handoff takes one model, and {} are given", models.len());
    let model = models.pop().map_or_else(|| Ok::<_, anyhow::Error>(bundled()?.swap_remove(0)), Ok)?;
    std::fs::create_dir_all(&cli.out)
        .with_context(|| format!("cannot make the folder {}", cli.out.display()))?;
    let tokenizer = match (cli.decode.tokenizer, &larger) {
        (Some(tokenizer), _) => tokenizer,
        (None, Some(larger)) => larger.tokenizer.clone(),
        (None, None) => bundled_file("tok512.bin")?,
    };
    let handoff = Handoff {
        model,
        tokenizer,
        prompt: cli.decode.prompt.unwrap_or_else(|| HANDED_OVER.to_owned()),
        tokens: cli.decode.tokens.unwrap_or(128),
        block_tokens: cli.block_tokens,
        omit: cli.omit,
        on: cli.on.into(),
        limit: Duration::from_secs(cli.timeout),
        consoles: cli.out.clone(),
    };
    let mut meter = Meter::new();
    let report = handoff.run(|step| meter.show(&step))?;
    meter.finish();
    let path = cli.out.join("report.json");
    write_json(&report, &path).with_context(|| format!("cannot write {}", path.display()))?;
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{}\nreport  {}", report.to_text(), path.display());
    }
    Ok(report.good())
}

/// Makes a model in a GGUF file ready, if one is among `models`, and puts what came of it in its
/// place.
fn convert(models: &mut [PathBuf]) -> Result<Option<Converted>> {
    for model in models {
        if let Some(path) = gguf::named(model)? {
            eprintln!("run: making bf16 of {}", path.display());
            let converted = gguf::convert(&path)?;
            model.clone_from(&converted.checkpoint);
            return Ok(Some(converted));
        }
    }
    Ok(None)
}

/// Progress: a line that changes on a terminal, a line now and then elsewhere.
struct Meter {
    bar: Option<ProgressBar>,
    /// The tenth of the pass that was told last.
    reported: usize,
}

impl Meter {
    fn new() -> Self {
        let style = ProgressStyle::with_template("{spinner} {bar:30} {pos}/{len} {wide_msg}");
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, reported: 0 }
    }

    fn show(&mut self, step: &Step<'_>) {
        match (&self.bar, step) {
            (_, Step::Serving(ready)) => {
                let live = format!(
                    "run: live at http://{}/ (/stats, /metrics) and {}",
                    ready.tcp,
                    ready.api.display()
                );
                self.bar.as_ref().map_or_else(|| eprintln!("{live}"), |bar| bar.println(&live));
            }
            (Some(bar), Step::Doing(what)) => bar.set_message((*what).to_owned()),
            (Some(bar), Step::Reading { number, of, tensor, view }) => {
                bar.set_length(*of as u64);
                bar.set_position(*number as u64);
                bar.set_message(format!("{tensor} {view}"));
            }
            (Some(bar), Step::Decoding { number, of, weights, policy }) => {
                bar.set_length(*of as u64);
                bar.set_position(*number as u64);
                bar.set_message(format!("decoding, weights {weights}, KV {policy}"));
            }
            (None, Step::Doing(what)) => eprintln!("run: {what}"),
            (None, Step::Decoding { number, of, weights, policy }) => {
                eprintln!("run: decoding text {number} of {of}: weights {weights}, KV {policy}");
            }
            (None, Step::Reading { number, of, tensor, view }) => {
                let tenth = number * 10 / of;
                if tenth != self.reported || *number == 1 {
                    self.reported = tenth;
                    eprintln!("run: reading view {number} of {of}: {tensor} {view}");
                }
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
