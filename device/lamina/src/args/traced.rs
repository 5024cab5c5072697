//! Arguments of what is done with traces.

use std::path::PathBuf;

use clap::{Arg, Args, Subcommand, ValueEnum};

use super::values::{element_bits, takes_negative, whole};
use super::{Client, bytes};

/// Replay one trace through plain, gcomp and trace devices: bytes, fills, link, activations,
/// energy, latency of the same work. All of it is modelled.
#[derive(Debug, Args)]
#[command(after_help = "\
Designs: plain and plain-rows (words), gcomp-lz4 and gcomp-zstd (coded blocks of words), trace (planes in bundles, as stored),
trace-planes (planes in rows of their own, the paper's Fig. 10).

Where bytes lie is a part of each design, and counts for much in activations, energy and latency: plain spreads the lines of a block over
all channels and bank groups, and trace-planes over a row a plane, which activates many rows and is fast; plain-rows, gcomp and trace have
a block in a row of one bank, or in two, which activates few and is slow. What plain-rows saves of plain is placement; what gcomp and
trace save of plain-rows is not.

Examples:
  The same work on all six:
      lamina compare work.trace
  What compression saves, and what placement does:
      lamina compare work.trace --design plain,plain-rows,trace --pace recorded
  Bytes and link only, which is fast:
      lamina compare work.trace --dram none --design plain,trace
  Another index cache:
      lamina compare work.trace --index-entries 8192 --index-ways 8")]
pub(crate) struct Compare {
    #[command(flatten)]
    pub(crate) traced: Traced,
    /// The designs.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "plain,plain-rows,gcomp-lz4,gcomp-zstd,trace,trace-planes",
        value_name = "LIST"
    )]
    pub(crate) design: Vec<String>,
    #[command(flatten)]
    pub(crate) replayed: Replayed,
    /// Print JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A trace that is read.
#[derive(Debug, Args)]
pub(crate) struct Traced {
    /// The trace.
    #[arg(value_name = "TRACE")]
    pub(crate) file: PathBuf,
    /// Take a trace that was cut short as far as it is whole: that of a recorder that was killed,
    /// or whose disk was full.
    #[arg(long)]
    pub(crate) cut: bool,
}

/// How a trace is replayed.
#[derive(Debug, Args)]
#[command(mut_args(takes_negative))]
pub(crate) struct Replayed {
    /// The module: ddr5-4800, ddr5-5600, ddr5-6400, a TOML file as docs/ddr5.toml, or `none` to
    /// leave timing out.
    #[arg(long, default_value = "ddr5-4800", value_name = "NAME|FILE|none")]
    pub(crate) dram: String,
    /// Bursts under way at once.
    #[arg(long, default_value_t = 64, value_name = "REGISTERS", value_parser = whole::<usize, 1, 4096>)]
    pub(crate) mshr: usize,
    /// The link: gen5x8, gen5x16, gen6x8 or gen6x16.
    #[arg(long, default_value = "gen5x16", value_name = "NAME")]
    pub(crate) link: String,
    /// Nanoseconds that the link adds to a load [default: 70, of Pond, ASPLOS 2023, section 2].
    #[arg(long, value_name = "NS")]
    pub(crate) link_latency: Option<f64>,
    /// Entries of the index cache.
    #[arg(long, default_value_t = 32_768, value_name = "ENTRIES", value_parser = whole::<u32, 1, { 1 << 26 }>)]
    pub(crate) index_entries: u32,
    /// Entries of a set of it.
    #[arg(long, default_value_t = 1, value_name = "WAYS", value_parser = whole::<u32, 1, 256>)]
    pub(crate) index_ways: u32,
    /// Which entry of a set goes.
    #[arg(long, value_enum, default_value = "lru")]
    pub(crate) index_policy: Replacement,
    /// Decoded blocks that are kept for the next line.
    #[arg(long, default_value_t = 8, value_name = "BLOCKS", value_parser = whole::<usize, 0, 4096>)]
    pub(crate) buffer: usize,
    /// When requests come: as soon as a register is free, or when they were recorded.
    #[arg(long, value_enum, default_value = "full")]
    pub(crate) pace: Paced,
    /// Bits of an element of blocks that the trace says nothing of.
    #[arg(long, default_value_t = 16, value_name = "BITS", value_parser = element_bits)]
    pub(crate) assume_bits: u32,
    /// Ratios of such blocks: words by lz4, words by zstd, planes.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1.0,1.259,1.34",
        value_name = "LZ4,ZSTD,TRACE",
        allow_hyphen_values = true
    )]
    pub(crate) assume_ratios: Vec<f64>,
}

/// Which entry of a set goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Replacement {
    /// The one that was not used for longest.
    Lru,
    /// The one that came first.
    Fifo,
    /// Any.
    Random,
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Paced {
    /// As soon as a register is free.
    Full,
    /// When they were recorded.
    Recorded,
}

/// Record, show, replay and convert traces of what was asked of a device.
#[derive(Debug, Subcommand)]
pub(crate) enum Trace {
    Record(Record),
    /// Say what a trace holds.
    Show {
        #[command(flatten)]
        traced: Traced,
        /// Print so many of its requests, too.
        #[arg(long, default_value_t = 0, value_name = "REQUESTS")]
        requests: u64,
        /// Print JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Replay a trace through one design, and say how fast that went.
    Replay {
        #[command(flatten)]
        traced: Traced,
        /// The design.
        #[arg(long, default_value = "trace")]
        design: String,
        #[command(flatten)]
        replayed: Box<Replayed>,
        /// Print JSON instead of tables.
        #[arg(long)]
        json: bool,
    },
    Convert(Box<Convert>),
}

/// Record what is asked of a device that is being served, and what it fetches for that.
///
/// Until Ctrl-C, unless it is said how long or how much. A device that is not recorded does nothing
/// for this; while it is, requests that come faster than they can be written down are lost, and the
/// trace says how many.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Ten seconds of what a guest does:
      lamina trace record work.trace --for 10
      lamina compare work.trace
  The first million requests that reach another device:
      lamina trace record work.trace --requests 1000000 --api 127.0.0.1:7070")]
pub(crate) struct Record {
    /// The trace, a new file.
    #[arg(value_name = "OUT")]
    pub(crate) file: PathBuf,
    /// Seconds after which it ends.
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) duration: Option<f64>,
    /// Requests after which it ends.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,
    #[command(flatten)]
    pub(crate) client: Client,
}

/// A time that a recording may take: up to a year.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=31_536_000.0).contains(seconds));
    seconds.ok_or_else(|| "it must be seconds, from 0 to 31536000".to_owned())
}

/// Make of a trace one for DRAMSim3 or Ramulator 2, or of one of theirs a trace of lines.
///
/// What is exported are the lines of 64 bytes that a design moves in its DRAM, index entries and
/// all. With --pace recorded they have the cycles of the module (--dram) at which they were asked
/// for, else the numbers of their requests. Cycles that are imported are the module's, too, and are
/// kept to the nanosecond.
#[derive(Debug, Args)]
#[command(
    mut_args(of_a_direction),
    after_help = "\
Examples:
      lamina trace convert work.trace work.dramsim3 --to dramsim3 --design trace --pace recorded
      lamina trace convert theirs.txt theirs.trace --from ramulator2 --device 64G && lamina compare theirs.trace"
)]
pub(crate) struct Convert {
    /// What is read.
    #[arg(value_name = "IN")]
    pub(crate) from_file: PathBuf,
    /// What is written, a new file.
    #[arg(value_name = "OUT")]
    pub(crate) to_file: PathBuf,
    /// Whose form OUT has.
    #[arg(long, value_enum, conflicts_with = "from", required_unless_present = "from")]
    pub(crate) to: Option<Other>,
    /// Whose form IN has.
    #[arg(long, value_enum)]
    pub(crate) from: Option<Other>,
    /// Export a trace that was cut short as far as it is whole.
    #[arg(long)]
    pub(crate) cut: bool,
    /// The design whose lines are exported.
    #[arg(long, default_value = "plain")]
    pub(crate) design: String,
    /// Bytes of the device that an imported trace is of.
    #[arg(long, value_parser = bytes, default_value = "64G", value_name = "BYTES")]
    pub(crate) device: u64,
    /// Bits of an element of an imported trace.
    #[arg(long, default_value_t = 16, value_parser = element_bits)]
    pub(crate) bits: u32,
    /// How an exported trace is replayed: the module is where its lines lie, and whose cycles it
    /// has.
    #[command(flatten)]
    pub(crate) replayed: Box<Replayed>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Refuses with `--from` what only an export heeds, and with `--to` what only an import does.
fn of_a_direction(argument: Arg) -> Arg {
    match argument.get_id().as_str() {
        "from_file" | "to_file" | "from" | "to" | "dram" | "json" => argument,
        "device" | "bits" => argument.conflicts_with("to"),
        _ => argument.conflicts_with("from"),
    }
}

/// Whose form a trace has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Other {
    /// `0x1F40 READ 120`
    Dramsim3,
    /// `LD 0x1F40`, the front end `LoadStoreTrace`
    Ramulator2,
}

/// Model weights of elastic precision: planes fetched against words, energy and time of DRAM.
#[derive(Debug, Args)]
#[command(
    after_help = "\
Examples:
  The paper's Figs. 18 to 21 beside ours:
      lamina elastic --paper
  Experts of a bf16 model, half of them at 8 bits, a quarter not used:
      lamina elastic --mix 16:0.25,8:0.5,0:0.25 --weights 46.7e9
  A map, a line a head or neuron: its weights and its bits:
      lamina elastic --map heads.txt
  A map as `lamina mount --map` reads it, on the weights it is for:
      lamina elastic --map small.toml --model model.safetensors
  A line an expert: its weights and a router's score, with thresholds that CXL-NDP (section II-C) gives as an example
  for a block's precision (MoDE's Router 1; it prints none for an expert's):
      lamina elastic --scores experts.txt",
    mut_args(takes_negative)
)]
pub(crate) struct Elastic {
    /// Bits and the part of all chunks that has them; of 0 bits nothing is fetched.
    #[arg(long, default_value = "16:0.5,8:0.5", value_name = "BITS:PART,…", allow_hyphen_values = true)]
    pub(crate) mix: String,
    /// Chunks and their bits, instead of a mix.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mix", "chunk", "sample"])]
    pub(crate) map: Option<PathBuf>,
    /// A checkpoint or a folder of some, for whose tensors the map is; only their sizes are read.
    #[arg(long, value_name = "MODEL", requires = "map")]
    pub(crate) model: Option<PathBuf>,
    /// Chunks and a score of each from 0 to 1, instead of a mix.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mix", "map", "chunk", "sample"])]
    pub(crate) scores: Option<PathBuf>,
    /// Above which score a chunk has how many bits; at or below the last it is skipped.
    #[arg(
        long,
        default_value = "0.8:16,0.6:12,0.4:8,0.2:4",
        value_name = "SCORE:BITS,…",
        requires = "scores"
    )]
    pub(crate) thresholds: String,
    /// Bits of a weight as it is stored.
    #[arg(long, default_value_t = 16, value_name = "BITS", value_parser = element_bits)]
    pub(crate) base: u32,
    /// Weights of a chunk: an expert, a head, a neuron.
    #[arg(long, default_value_t = 65_536, value_name = "WEIGHTS", value_parser = whole::<u64, 1, { 1 << 24 }>)]
    pub(crate) chunk: u64,
    /// Weights that are sampled, of each kind of a mix.
    #[arg(long, default_value_t = 1 << 20, value_name = "WEIGHTS", value_parser = whole::<u64, 1, { 1 << 24 }>)]
    pub(crate) sample: u64,
    /// Weights of the whole model: says how long its load takes.
    #[arg(long, value_name = "WEIGHTS")]
    pub(crate) weights: Option<f64>,
    /// The module: ddr5-4800, ddr5-5600 or ddr5-6400.
    #[arg(long, default_value = "ddr5-4800", value_name = "NAME")]
    pub(crate) dram: String,
    /// Print the paper's savings beside ours, and nothing else.
    #[arg(
        long,
        conflicts_with_all = ["mix", "map", "model", "scores", "thresholds", "base", "chunk", "sample", "weights"]
    )]
    pub(crate) paper: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}
