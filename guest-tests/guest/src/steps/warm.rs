//! How fast warm pages are read: pages that the guest already maps, so that nothing but loads
//! happens.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use lamina_shim::{BASE, Lamina};
use vm_memory::VolatileMemory;

use crate::{Event, Report, WarmBench, report::console};

/// A measurement reads the tensor as often as fits into this time, and at least once.
const MIN_MEASURED: Duration = Duration::from_millis(100);

pub(super) fn run(lamina: &Lamina, bench: &WarmBench, report: &mut Report) -> anyhow::Result<()> {
    let span = lamina.span(&bench.tensor, BASE)?;
    ensure!(span.len() >= 8, "{} has too few bytes to measure with", bench.tensor);
    // Eight bytes a load, and nothing else: a copy would measure the processor's string
    // instructions too, which an emulating QEMU does byte by byte.
    let memory = span.volatile();
    let words = memory.get_array_ref::<u64>(0, span.len() / 8).context("the tensor's words")?;
    let once = || {
        black_box((0..words.len()).fold(0, |sum, index| sum ^ words.load(index)));
    };
    once();
    for repeat in 0..bench.repeats {
        let start = Instant::now();
        let mut bytes = 0;
        while bytes == 0 || start.elapsed() < MIN_MEASURED {
            once();
            bytes += 8 * words.len() as u64;
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
