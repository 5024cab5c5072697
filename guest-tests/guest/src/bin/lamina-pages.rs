//! `lamina-pages`: a process that keeps memory whose every word is known, and says whether it still
//! is what it was.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::bail;
use clap::Parser;
use lamina_guest::Known;

/// Fills memory with known words and checks it, as it is told on standard input.
///
/// `fill`, the first line, is answered by `ready ADDRESS BYTES`; `check` by `wrong N`, the words
/// that are not what was stored; `touch` by `touching`, and from then on the hot part is read all
/// the time. It ends with its input.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Bytes to fill
    bytes: u64,
    /// Bytes of them, the first, that `touch` reads
    #[arg(long, default_value_t = 0)]
    hot: u64,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let mut reported = io::stdin().lines();
    match reported.next().transpose()?.as_deref() {
        Some("fill") => {}
        other => bail!("the first line is to be `fill`, not {other:?}"),
    }
    let known = Known::filled(cli.bytes)?;
    let (address, bytes) = known.place();
    say(&format!("ready {address} {bytes}"))?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let obey = || {
            for line in reported {
                match line?.as_str() {
                    "check" => say(&format!("wrong {}", known.wrong()))?,
                    "touch" => {
                        scope.spawn(|| known.touch(cli.hot, &over));
                        say("touching")?;
                    }
                    other => bail!("{other:?} is neither `check` nor `touch`"),
                }
            }
            Ok(())
        };
        let done = obey();
        over.store(true, Ordering::Relaxed);
        done
    })
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
