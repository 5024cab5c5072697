//! The command line: parsing, and what a failure looks like.
//!
//! A closed standard output (`lamina-shim cat … | head`) ends the program quietly; every other
//! failure is one line on standard error and status 1.

mod bytes;
mod names;
mod show;

use std::{
    io::{self, IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, ensure};
use clap::{Args, Parser, Subcommand};
use lamina_abi::TensorEntry;
use lamina_shim::{Access, Lamina, OpenOptions, UpOptions, open_ctl, sysfs::Tree, up};

/// Lamina from inside a guest: brings up its CXL memory, and reads tensors and their views by plain
/// loads.
///
/// A Lamina device shows up as two CXL memory devices: the base window holds the tensors at full
/// precision, the views window begins with a directory and holds reduced-precision aliases of the
/// same tensors. Reading a view makes the device fetch only the bit-planes that the view needs.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
A first session, as root in the guest:
  lamina-shim up                          make regions and /dev/daxN.0
  lamina-shim list                        what the device holds
  lamina-shim sum layers.0.wq e8m3        load a view and hash it
  lamina-shim cat layers.0.wq e8m3 | hexdump -C | head
  lamina-shim map layers.0.wq e8m3        where to mmap it yourself
  lamina-shim write layers.0.wq < new.bin store through the base window ...
  lamina-shim flush                       ... and make views show it
  lamina-shim tensor add mine --length 64M --format bf16
  lamina-shim view add mine e8m3          a view of it; `view rm`, `tensor rm` end them

Views: `base` is the tensor itself, the only one to write; `full` the same through the views window; `e8m3` keeps
sign, 8 exponent and 3 mantissa bits; `e8m3+g2` rounds; `e8m3:packed` packs; bf16, fp8_e4m3fn, int4, ... convert."
)]
struct Cli {
    #[command(flatten)]
    paths: Paths,
    #[command(subcommand)]
    command: Command,
}

/// Where the windows are.
#[derive(Args, Debug)]
struct Paths {
    /// The base window: a devdax node or a file [default: found through sysfs]
    #[arg(long, global = true, env = "LAMINA_BASE", value_name = "PATH")]
    base: Option<PathBuf>,
    /// The views window: a devdax node or a file [default: found through sysfs]
    #[arg(long, global = true, env = "LAMINA_VIEWS", value_name = "PATH")]
    views: Option<PathBuf>,
    /// The control port or socket [default: the virtio port org.lamina.ctl, or the mailbox of a PCI
    /// device]
    #[arg(long, global = true, env = "LAMINA_CTL", value_name = "PATH")]
    ctl: Option<PathBuf>,
}

impl Paths {
    fn options(&self) -> OpenOptions {
        OpenOptions {
            base: self.base.clone(),
            views: self.views.clone(),
            ctl: self.ctl.clone(),
            ..OpenOptions::from_env()
        }
    }

    fn open(&self) -> anyhow::Result<Lamina> {
        Ok(Lamina::open(&self.options())?)
    }

    fn open_writable(&self) -> anyhow::Result<Lamina> {
        Ok(Lamina::open(&OpenOptions { base_access: Access::ReadWrite, ..self.options() })?)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the CXL regions and the devdax nodes; can be repeated
    Up {
        /// Give the base window to the kernel as memory of a NUMA node of its own, instead of a
        /// node to map
        #[arg(long)]
        system_ram: bool,
        /// Use only this memory device (give it twice, e.g. --memdev mem0 --memdev mem1)
        #[arg(long = "memdev", value_name = "memN")]
        memdevs: Vec<String>,
        /// Seconds to wait for the kernel to show the devices
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3600))]
        wait: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List tensors and their views
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Write the bytes of a view to standard output
    Cat {
        #[command(flatten)]
        view: Which,
        /// First byte
        #[arg(long, default_value_t = 0)]
        offset: u64,
        /// Bytes [default: to the end]
        #[arg(long)]
        length: Option<u64>,
    },
    /// Print the SHA-256 of the bytes as they were loaded
    Sum {
        /// The tensor [default with --all: every tensor]
        #[arg(required_unless_present = "all")]
        tensor: Option<String>,
        /// The view [default: base]
        view: Option<String>,
        /// Every view of the tensor, or of all tensors
        #[arg(long, conflicts_with = "view")]
        all: bool,
    },
    /// Print what a program needs to mmap a view itself
    Map {
        /// The tensor [default: every tensor]
        tensor: Option<String>,
        /// The view [default: every view]
        view: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Store standard input into a tensor, through the base window
    Write {
        /// The tensor
        tensor: String,
        /// First byte
        #[arg(long, default_value_t = 0)]
        offset: u64,
    },
    /// Make stores to the base window visible to reads of views
    Flush {
        /// First byte in the base window
        #[arg(long, requires = "length")]
        offset: Option<u64>,
        /// Bytes [default: everything]
        #[arg(long, requires = "offset")]
        length: Option<u64>,
    },
    /// Drop what this host holds, where hosts share a region without coherence: later loads see
    /// what others flushed
    Invalidate {
        /// First byte in the base window
        #[arg(long, requires = "length")]
        offset: Option<u64>,
        /// Bytes [default: everything]
        #[arg(long, requires = "offset")]
        length: Option<u64>,
    },
    /// Make, resize and remove tensors in this guest's partition of the device
    #[command(subcommand)]
    Tensor(names::Tensor),
    /// Make and remove views of tensors; `view TENSOR SPELLING` makes one too
    View(names::View),
    /// Print the device's counters, as JSON
    Stats,
}

#[derive(Args, Debug)]
struct Which {
    /// The tensor
    tensor: String,
    /// The view
    #[arg(default_value = lamina_shim::BASE)]
    view: String,
}

/// Runs the program.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("LAMINA_LOG").unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed as well; then there is nobody to tell.
            let _ = writeln!(io::stderr(), "lamina-shim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    let paths = &cli.paths;
    match &cli.command {
        Command::Up { system_ram, memdevs, wait, json } => {
            let options = UpOptions {
                system_ram: *system_ram,
                memdevs: memdevs.clone(),
                wait: Duration::from_secs(*wait),
            };
            show::attached(&up(&Tree::system(), &options)?, *json)
        }
        Command::List { json } => show::list(&paths.open()?, *json),
        Command::Cat { view, offset, length } => {
            bytes::cat(&paths.open()?, &view.tensor, &view.view, *offset, *length)
        }
        Command::Sum { tensor, view, all } => {
            bytes::sum(&paths.open()?, tensor.as_deref(), view.as_deref(), *all)
        }
        Command::Map { tensor, view, json } => {
            show::map(&paths.open()?, tensor.as_deref(), view.as_deref(), *json)
        }
        Command::Write { tensor, offset } => bytes::write(&paths.open_writable()?, tensor, *offset),
        Command::Flush { offset, length } => {
            open_ctl(&Tree::system(), paths.ctl.as_deref())?.flush(offset.zip(*length))?;
            Ok(())
        }
        Command::Invalidate { offset, length } => {
            open_ctl(&Tree::system(), paths.ctl.as_deref())?.invalidate(offset.zip(*length))?;
            Ok(())
        }
        Command::Tensor(command) => {
            names::tensor(&mut open_ctl(&Tree::system(), paths.ctl.as_deref())?, command)
        }
        Command::View(command) => names::view(&mut open_ctl(&Tree::system(), paths.ctl.as_deref())?, command),
        Command::Stats => {
            let reply = open_ctl(&Tree::system(), paths.ctl.as_deref())?.stats()?;
            line(&serde_json::to_string_pretty(reply.get("stats").unwrap_or(&reply))?)
        }
    }
}

/// All tensors, for what is of no use with some of them.
fn all(lamina: &Lamina) -> anyhow::Result<&[TensorEntry]> {
    let directory = lamina.directory();
    ensure!(
        !directory.is_incomplete,
        "the directory has no room for all tensors and views, and no control port tells of the others: name the \
         tensor and its view, or give --ctl (LAMINA_CTL)"
    );
    Ok(&directory.tensors)
}

/// Prints a line.
fn line(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout().lock(), "{text}").context("standard output")
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}
