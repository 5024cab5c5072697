//! `./x bench`: the benchmarks.

use std::{io::stderr, path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};
use lamina_guest_tests::{
    bench::{mount::Mount, start, warm::Warm},
    bundled,
};

/// Measures the device, each thing beside its peer in the same run.
#[derive(Debug, Parser)]
#[command(name = "./x bench", version)]
struct Cli {
    #[command(subcommand)]
    what: Option<What>,
    /// A safetensors file whose bf16 values are read; may be given more than once [default: the bundled ones]
    #[arg(long = "model", value_name = "FILE", global = true)]
    models: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum What {
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
    /// Starting an empty device, by its capacity
    Start {
        /// Rounds, of which the median counts
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("LAMINA_LOG").unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(stderr)
        .init();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let models = if cli.models.is_empty() { bundled()? } else { cli.models };
    let all = [
        What::Start { rounds: 5 },
        What::Mount { mib: 96, rounds: 5, read_ahead_kb: 1024 },
        What::Warm { mib: 64, boots: 2, reads: 15 },
    ];
    for what in cli.what.map_or_else(|| all.to_vec(), |what| vec![what]) {
        match what {
            What::Mount { mib, rounds, read_ahead_kb } => {
                eprintln!("bench: cold sequential reads of {mib} MiB from the mount, {rounds} rounds");
                let mount = Mount { models: models.clone(), bytes: mib << 20, rounds, read_ahead_kb };
                println!(
                    "cold sequential reads of {mib} MiB of bf16, read-ahead {read_ahead_kb} KiB, medians of {rounds}; views in bytes of their elements' bf16\n{}\n",
                    mount.run()?
                );
            }
            What::Warm { mib, boots, reads } => {
                eprintln!("bench: warm reads of {mib} MiB in a guest, {boots} boots of each");
                let warm = Warm { models: models.clone(), bytes: mib << 20, boots, reads };
                println!(
                    "warm reads of {mib} MiB in a guest, medians of {boots} boots of {reads} reads\n{}\n",
                    warm.run()?
                );
            }
            What::Start { rounds } => {
                eprintln!("bench: starting empty devices, {rounds} rounds");
                println!("starting an empty device, medians of {rounds}\n{}\n", start::run(rounds)?);
            }
        }
    }
    Ok(())
}
