//! `lamina-loads`: loads of a tensor, one after the other or of lines at random, and nothing else.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use lamina_shim::{Lamina, OpenOptions};
use vm_memory::VolatileMemory;

/// Loads eight bytes at a time, and says how many bytes a second the line took in each round.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// The tensor
    tensor: String,
    /// Its view; `base` is the base window
    view: String,
    /// Load one word of each of so many lines at random, instead of all words
    #[arg(long, value_name = "LINES")]
    random: Option<u64>,
    /// Rounds; each loads as often as fits into a tenth of a second, and at least once
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Load once in each round, however quick that is
    #[arg(long)]
    once: bool,
}

/// Bytes of a line.
const LINE: usize = 64;
/// A round loads as often as fits into this.
const MIN_MEASURED: Duration = Duration::from_millis(100);

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let lamina = Lamina::open(&OpenOptions::from_env())?;
    let span = lamina.span(&cli.tensor, &cli.view)?;
    let memory = span.volatile();
    let words = memory.get_array_ref::<u64>(0, span.len() / 8).context("the tensor's words")?;
    let lines = span.len() / LINE;
    ensure!(lines > 0, "{} has no whole line", cli.tensor);
    let mut state = 1_u64;
    let mut pass = || match cli.random {
        None => (0..words.len()).fold(0, |sum, index| sum ^ words.load(index)),
        Some(count) => (0..count).fold(0, |sum, _| {
            // Knuth's multiplier; the upper bits are the random ones.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let line = usize::try_from(state >> 33).unwrap_or(0) % lines;
            sum ^ words.load(line * (LINE / 8))
        }),
    };
    let bytes = cli.random.map_or(words.len() as u64, |count| count) * 8;
    for round in 0..cli.rounds {
        let (begun, mut passes) = (Instant::now(), 0);
        while passes == 0 || !cli.once && begun.elapsed() < MIN_MEASURED {
            black_box(pass());
            passes += 1;
        }
        let seconds = begun.elapsed().as_secs_f64();
        println!("loads {round}: {} bytes in {seconds:.9} s", bytes * passes);
    }
    Ok(())
}
