//! The arguments of `lamina pool`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use lamina_codec::format::Format;
use lamina_codec::kv::KvLayout;

use super::Client;
use super::values::{bytes, kv_layout, pool_bytes};

/// Keep objects and blocks of KV caches in a file that processes share by loads and stores.
///
/// FILE is a file of the mount, any other file, or a devdax. Every command attaches as a node of
/// its own, and takes over what a node that died has left.
#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Make an empty pool, in a file that holds nothing.
    Create {
        /// The file. It is made if it is not there.
        file: PathBuf,
        /// Bytes of a file that is made, with K, M, G or T; a file that is there has its own.
        #[arg(long, value_parser = pool_bytes, default_value = "256M")]
        size: u64,
        /// Processes that may be attached at a time.
        #[arg(long, default_value_t = 16)]
        nodes: u32,
        /// Also in a file that holds something, which is lost, or in a devdax, of which nobody
        /// knows.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        holds: Holds,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// List objects.
    Ls(PoolAt),
    /// Tell what the pool holds.
    Stat(PoolAt),
    /// Store an object, in place of one of that name.
    Put {
        /// The pool.
        file: PathBuf,
        /// The object's name.
        name: String,
        /// What it shall hold; standard input if it is not given.
        from: Option<PathBuf>,
        #[command(flatten)]
        holds: Holds,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print an object's bytes.
    Get {
        /// The pool.
        file: PathBuf,
        /// The object's name.
        name: String,
        /// Where its bytes go; standard output if it is not given.
        to: Option<PathBuf>,
        /// Print JSON, where standard output is not for the bytes.
        #[arg(long, requires = "to")]
        json: bool,
    },
    /// Remove objects.
    Rm {
        /// The pool.
        file: PathBuf,
        /// The objects' names.
        #[arg(required = true)]
        names: Vec<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take a host's access to its region away, or give it back.
    ///
    /// For a host that shares a region without coherence (`lamina serve --host`) and that is taken
    /// for dead: when this returns, none of its stores reaches the device any more, however late it
    /// goes on, and its loads are poison. A pool's nodes ask for the same by themselves. A process
    /// that shares a file with others needs none of this: end it.
    #[command(after_help = "\
Examples:
  Of a host that hangs, so that the others may have what it held:
      lamina pool fence one
  When it was started anew:
      lamina pool fence --undo one")]
    Fence {
        /// The host's name, as `lamina guests` lists it.
        host: String,
        /// Give it back: the host begins as one that holds nothing.
        #[arg(long)]
        undo: bool,
        #[command(flatten)]
        client: Client,
    },
    /// Serve the index of the pool's blocks, for nodes that ask instead of looking themselves.
    ///
    /// One node serves at a time; when it dies, clients wait for the next some seconds before they
    /// fail, and nothing of the index is lost. This runs until it is interrupted.
    Serve(PoolAt),
    Replay(Box<PoolReplay>),
    /// Verify everything, also while others use the pool. It fails if something does not hold.
    Check {
        /// Drop what does not check, and take back what is nobody's.
        #[arg(long)]
        repair: bool,
        #[command(flatten)]
        at: PoolAt,
    },
}

/// A pool, and how to print.
#[derive(Debug, Args)]
pub(crate) struct PoolAt {
    /// The pool.
    pub(crate) file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What the objects of a pool are, or one of them.
#[derive(Debug, Args)]
pub(crate) struct Holds {
    /// In a mount: the format of the elements, as which the device codes them [default with --kv:
    /// bf16].
    #[arg(long)]
    pub(crate) format: Option<Format>,
    /// In a mount: it is KV caches, written as for `lamina analyze --kv`.
    #[arg(long, value_parser = rows, value_name = "CHANNELS[,WINDOW]")]
    pub(crate) kv: Option<Rows>,
}

/// A layout, and how it was written.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) layout: KvLayout,
    pub(crate) text: String,
}

fn rows(text: &str) -> Result<Rows, String> {
    Ok(Rows { layout: kv_layout(text)?, text: text.to_owned() })
}

/// Send a trace's requests through a shared pool and through caches of each node: what is hit, and
/// what it would mean.
///
/// Hits and evictions are measured: the prefix cache of the pool does them, with 64 bytes in place
/// of each block. Times are *modelled*: a node computes what was not hit, one request after
/// another, and fetches what was; devices answer in the order in which they are asked.
#[derive(Debug, Args)]
#[command(after_help = "\
TRACE is one of Mooncake's (JSON lines with timestamp, input_length, hash_ids) or Azure's (CSV). Azure's say nothing of what prompts
share, so nothing is hit. A prefix-affine router sends a request to the node that was sent most of its prompt before, if that is more than
half of it; any other sends it to the node with the least to compute.

Defaults of what is modelled: the GPU's path to the pool 26 GB/s, a device's 22.5, others' load 15 (Beluga, 5.3); the path to a node's
own memory 55.4 GB/s (the same, a GPU's PCIe); prefill at half of 148 TFLOP/s (an H20). The ratio is that of real KV caches of small models.

Examples:
  As published, on 16 nodes:
      lamina pool replay conversation_trace.jsonl --plot replay.svg
  Less memory, another model:
      lamina pool replay conversation_trace.jsonl --memory 1T --model qwen3-32b")]
pub(crate) struct PoolReplay {
    /// The trace.
    pub(crate) trace: PathBuf,
    /// Nodes that prefill.
    #[arg(long, default_value_t = 16)]
    pub(crate) nodes: usize,
    /// Bytes for KV caches in all, with K, M, G or T: of the pool, or of all nodes together.
    #[arg(long, value_parser = bytes, default_value = "4T")]
    pub(crate) memory: u64,
    /// The LLM: a preset, a config.json or a TOML file, see `lamina model --help`.
    #[arg(long, default_value = "llama-3.1-8b", value_name = "MODEL")]
    pub(crate) model: String,
    /// How much smaller the device stores KV: the pool holds so many times more.
    #[arg(long, default_value_t = 1.45)]
    pub(crate) ratio: f64,
    /// Devices of the pool.
    #[arg(long, default_value_t = 8)]
    pub(crate) devices: u32,
    /// GB/s of a device.
    #[arg(long, default_value_t = 22.5, value_name = "GB/S")]
    pub(crate) device_gbs: f64,
    /// GB/s between a node and the pool.
    #[arg(long, default_value_t = 26.0, value_name = "GB/S")]
    pub(crate) pool_gbs: f64,
    /// GB/s between a node and its own memory.
    #[arg(long, default_value_t = 55.4, value_name = "GB/S")]
    pub(crate) local_gbs: f64,
    /// GB/s that others take of one device, in the rows that say so.
    #[arg(long, default_value_t = 15.0, value_name = "GB/S")]
    pub(crate) background: f64,
    /// A node's prefill, in TFLOP/s.
    #[arg(long, default_value_t = 74.0, value_name = "TFLOP/S")]
    pub(crate) tflops: f64,
    /// Requests of the trace's beginning; all unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) requests: Option<usize>,
    /// Times that requests come faster than in the trace.
    #[arg(long, default_value_t = 1.0, value_name = "TIMES")]
    pub(crate) speed: f64,
    /// Draw time to first token and hits into an SVG file.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
