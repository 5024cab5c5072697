//! How fast warm pages are read: pages that the guest already maps, so that nothing but loads happens.

use std::time::{Duration, Instant};

use anyhow::ensure;
use lamina_shim::{BASE, Lamina};

use crate::{Event, Report, WarmBench, report::console};

/// Bytes loaded at a time, few enough that the private copy stays in the processor's cache.
const CHUNK: usize = 32 << 10;
/// A measurement reads the tensor as often as fits into this time, and at least once.
const LEAST: Duration = Duration::from_millis(100);

pub(super) fn run(lamina: &Lamina, bench: &WarmBench, report: &mut Report) -> anyhow::Result<()> {
    let span = lamina.span(&bench.tensor, BASE)?;
    ensure!(!span.is_empty(), "{} has no bytes to measure with", bench.tensor);
    let mut buffer = vec![0; CHUNK];
    let mut once = || -> anyhow::Result<()> {
        let mut done = 0;
        while done < span.len() {
            let count = CHUNK.min(span.len() - done);
            span.load(done as u64, &mut buffer[..count])?;
            std::hint::black_box(&buffer);
            done += count;
        }
        Ok(())
    };
    once()?;
    for repeat in 0..bench.repeats {
        let start = Instant::now();
        let mut bytes = 0;
        while bytes == 0 || start.elapsed() < LEAST {
            once()?;
            bytes += span.len() as u64;
        }
        let seconds = start.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate for a person; 2^53 bytes are never read here")]
        let bytes_per_second = bytes as f64 / seconds;
        console(&format!(
            "warm read {repeat} of {}: {:.1} MiB/s",
            bench.tensor,
            bytes_per_second / 1_048_576.0
        ));
        report.send(&Event::WarmRead {
            tensor: bench.tensor.clone(),
            repeat,
            bytes,
            seconds,
            bytes_per_second,
        });
    }
    Ok(())
}
