//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use lamina::codec::Codec;
use lamina::load::{FormatRule, KvRule};
use lamina::mode::Mode;

/// A CXL Type-3 memory device in user space: tensors as compressed bit-planes, precision views by address alias.
#[derive(Debug, Parser)]
#[command(
    version,
    propagate_version = true,
    after_help = "\
Examples:
  Serve 256 MiB with a checkpoint in it and two reduced views of every tensor that can give them:
      lamina serve --capacity 256M --mount /tmp/lamina --model model.safetensors --views full,e8m3,fp8_e4m3fn
  Look at it, from another terminal:
      lamina views
      lamina stats
  Make one more view while it runs:
      lamina view add model.layers.0.self_attn.q_proj.weight e8m3+g2:packed
  Make stores to the base window visible in every view:
      lamina flush"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Serve),
    /// Show the counters of a device that is being served.
    Stats(Client),
    /// List the tensors of a device that is being served.
    Tensors(Client),
    /// List the views of a device that is being served.
    Views(Client),
    /// Make and list views.
    #[command(subcommand)]
    View(View),
    Flush(Flush),
}

/// Serve a device: mount its two windows, load checkpoints, answer the API and guests, until SIGINT or SIGTERM.
///
/// The mount shows two files: `base`, the capacity window, and `views`, the aperture with the directory and all views. Give
/// both to QEMU as memory-backend-file with share=on. A line on standard output says when they are ready.
#[derive(Debug, Args)]
#[command(after_help = "\
Sizes take K, M, G and T (powers of 1024). QEMU's CXL windows are multiples of 256M.

Views: full · eXmY keeps X exponent and Y mantissa bits · +gN rounds with N more bits fetched · :packed packs the elements ·
bf16 fp8_e4m3fn fp8_e5m2 convert · int4 int2 of int8. A view that a tensor's format cannot give is skipped and listed.")]
pub(crate) struct Serve {
    /// Bytes of the base window [default: what the checkpoints take, at least 256M].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) capacity: Option<u64>,
    /// Bytes of the views window [default: the capacity, or more if the views take more].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) views_capacity: Option<u64>,
    /// The directory to mount on; made if it is missing.
    #[arg(long, value_name = "DIR")]
    pub(crate) mount: PathBuf,
    /// The device: trace (bit-planes), gcomp (compressed words) or plain (words).
    #[arg(long, default_value_t, value_name = "MODE")]
    pub(crate) mode: Mode,
    /// The codec: lz4, zstd or tree.
    #[arg(long, default_value_t, value_name = "CODEC")]
    pub(crate) codec: Codec,
    /// A safetensors file to load; may be given more than once.
    #[arg(long = "model", value_name = "FILE")]
    pub(crate) models: Vec<PathBuf>,
    /// Views to make of every tensor, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "full", value_name = "LIST")]
    pub(crate) views: Vec<String>,
    /// Tensors that are KV caches, by name pattern; those named *.k and *.v with two dimensions are without being told.
    #[arg(long, value_name = "PATTERN=CHANNELS[,WINDOW]")]
    pub(crate) kv: Vec<KvRule>,
    /// Tensors that have another format than the file says, by name pattern.
    #[arg(long, value_name = "PATTERN=FORMAT")]
    pub(crate) format: Vec<FormatRule>,
    /// Where the sockets are made: api.sock and ctl.sock.
    #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Serve the API on this loopback address too; port 0 takes any free port.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) tcp: Option<SocketAddr>,
    /// KiB read when a page is missing; 4 reads exactly that page, more is faster for sequential reads.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=1024), value_name = "KIB")]
    pub(crate) read_ahead_kb: u32,
    /// Threads that answer the mount [default: one for each core, at least 2].
    #[arg(long, value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Print the ready line as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What all client commands take.
#[derive(Clone, Debug, Args)]
pub(crate) struct Client {
    /// The API's socket.
    #[arg(long, default_value_os_t = run_dir().join("api.sock"), value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum View {
    /// Make a view of a tensor, for example `lamina view add lm_head.weight e8m3+g2`.
    Add {
        /// The tensor's name.
        tensor: String,
        /// The view's spelling.
        spelling: String,
        #[command(flatten)]
        client: Client,
    },
    /// List the views.
    List(Client),
}

/// Make every store to the base window visible in every view: the coherence fence.
///
/// Views are computed from what has reached the device. Stores sit in the host's page cache until the kernel writes them
/// back; this writes them back now and drops stale view pages.
#[derive(Debug, Args)]
pub(crate) struct Flush {
    /// Where the range begins in the base window.
    #[arg(long, value_parser = bytes, default_value = "0", value_name = "BYTES")]
    pub(crate) offset: u64,
    /// Its bytes [default: to the window's end].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) length: Option<u64>,
    #[command(flatten)]
    pub(crate) client: Client,
}

/// The directory for sockets when none is named: the user's own runtime directory, or one of this user's in /tmp.
fn run_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir).join("lamina"),
        _ if nix::unistd::geteuid().is_root() => PathBuf::from("/run/lamina"),
        _ => std::env::temp_dir().join(format!("lamina-{}", nix::unistd::geteuid())),
    }
}

/// A size: decimal or 0x-hexadecimal, or decimal with K, M, G or T for powers of 1024 (KiB and so on are taken too).
fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write for example 4096, 0x1000, 256M or 64G");
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| wrong());
    }
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than 64 bits can count"))
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=64) => Ok(threads),
        _ => Err(format!("{text:?} is no number of threads from 1 to 64")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_as_documented() {
        for (text, value) in [
            ("0", 0),
            ("4096", 4096),
            ("0x1000", 4096),
            ("256M", 256 << 20),
            ("64G", 64 << 30),
            ("1KiB", 1024),
        ] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "256MB", "99999999999999999999", "99999999T", "0x"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
