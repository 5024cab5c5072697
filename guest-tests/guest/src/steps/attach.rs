//! What an attachment gives: loads, cold and warm, stores and flushes, beside loads from the
//! guest's ordinary memory.
//!
//! * All are of the same words, eight bytes at a time: a copy would measure the processor's string
//!   instructions too, which an emulating QEMU does byte by byte.
//! * Each pass adds up what it loads, and the sum has to be that of the bytes that were stored
//!   last.
//! * Stored are the tensor's own values, each time moved by a block, so that the device codes what
//!   it coded before.
//! * What takes longer than its limit takes in fewer bytes instead.

use std::{
    fs::File,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use lamina_shim::{Access, BASE, Lamina, Location, Span, Window, sysfs::Tree};
use vm_memory::{VolatileMemory, VolatileSlice};

use super::{swap::disk, vm};
use crate::{AttachBench, DiskPlaces, Event, Measure, Report, report::console};

/// The view that is loaded.
const VIEW: &str = "full";
/// Warm loads are repeated for so long.
const MIN_MEASURED: Duration = Duration::from_millis(100);
/// Words between two looks at the clock.
const STRETCH: usize = 8192;
/// Bytes by which values are moved from one round to the next.
const MOVE: usize = 4096;

/// A tensor as an attachment shows it.
trait Way {
    /// Drops whatever is cached of the view.
    fn forget(&mut self) -> anyhow::Result<()>;
    fn view(&self) -> anyhow::Result<Span<'_>>;
    /// The tensor itself.
    fn base(&self) -> anyhow::Result<Span<'_>>;
    /// Brings stores into the first `bytes` of it to the view.
    fn flush(&mut self, bytes: u64) -> anyhow::Result<()>;
}

/// Measures a device whose windows are memory.
pub(super) fn of_memory(lamina: &Lamina, bench: &AttachBench, report: &mut Report) -> anyhow::Result<()> {
    let (view, base) = (lamina.locate(&bench.tensor, VIEW)?, lamina.locate(&bench.tensor, BASE)?);
    run(&mut Memory { lamina, view, base }, bench, report)
}

/// Measures a device that is two disks.
pub(super) fn of_disks(
    tree: &Tree,
    places: &DiskPlaces,
    bench: &AttachBench,
    report: &mut Report,
) -> anyhow::Result<()> {
    let base = PathBuf::from(disk(tree, "lamina-base")?);
    let view = PathBuf::from(format!("{}{}", disk(tree, "lamina-views")?, places.partition));
    let disks = &mut Disks {
        tree,
        places,
        base: Window::open(&base, Access::ReadWrite, tree)?,
        syncs: File::open(&base).with_context(|| format!("cannot open {}", base.display()))?,
        shown: Some(Window::open(&view, Access::Read, tree)?),
        view,
    };
    run(disks, bench, report)
}

/// Windows that are memory.
struct Memory<'l> {
    lamina: &'l Lamina,
    view: Location,
    base: Location,
}

impl Way for Memory<'_> {
    fn forget(&mut self) -> anyhow::Result<()> {
        self.lamina.ctl()?.evict(&[(self.view.offset, self.view.bytes)])?;
        Ok(())
    }

    fn view(&self) -> anyhow::Result<Span<'_>> {
        Ok(self.lamina.span(&self.view.tensor, VIEW)?)
    }

    fn base(&self) -> anyhow::Result<Span<'_>> {
        Ok(self.lamina.span(&self.base.tensor, BASE)?)
    }

    fn flush(&mut self, bytes: u64) -> anyhow::Result<()> {
        Ok(self.lamina.flush(Some((self.base.offset, bytes)))?)
    }
}

/// Disks, mapped.
struct Disks<'p> {
    tree: &'p Tree,
    places: &'p DiskPlaces,
    base: Window,
    /// The base disk, to be synchronized.
    syncs: File,
    view: PathBuf,
    shown: Option<Window>,
}

impl Way for Disks<'_> {
    fn forget(&mut self) -> anyhow::Result<()> {
        // The kernel keeps pages that are mapped.
        self.shown = None;
        vm::run("blockdev", &["--flushbufs", &self.view.to_string_lossy()])?;
        self.shown = Some(Window::open(&self.view, Access::Read, self.tree)?);
        Ok(())
    }

    fn view(&self) -> anyhow::Result<Span<'_>> {
        Ok(self.shown.as_ref().context("the view is not mapped")?.span(0, self.places.bytes)?)
    }

    fn base(&self) -> anyhow::Result<Span<'_>> {
        Ok(self.base.span(self.places.offset, self.places.bytes)?)
    }

    fn flush(&mut self, _: u64) -> anyhow::Result<()> {
        Ok(self.syncs.sync_data()?)
    }
}

fn run(way: &mut dyn Way, bench: &AttachBench, report: &mut Report) -> anyhow::Result<()> {
    let limit = Duration::from_millis(bench.limit_ms);
    let words = way.base()?.len() / 8;
    ensure!(words >= STRETCH, "{} has too few bytes to measure with", bench.tensor);
    let mut held = vec![0; 8 * words];
    way.base()?.load(0, &mut held)?;
    // The first round only warms up.
    for round in 0..=bench.rounds {
        let mut reported = |what, bytes: usize, time: Duration| {
            let (bytes, seconds) = (bytes as u64, time.as_secs_f64());
            if let Some(round) = round.checked_sub(1) {
                report.send(&Event::Measured { what, round, bytes, seconds });
            }
        };
        let loads =
            |what, slice: VolatileSlice<'_>, least, held: &[u8], reported: &mut dyn FnMut(_, _, _)| {
                let loaded = load(slice, least, limit)?;
                let expected = sum(&held[..8 * loaded.words]);
                ensure!(loaded.sum == expected, "{what:?}: the words loaded are not those that were stored");
                reported(what, loaded.bytes, loaded.time);
                Ok(())
            };
        let mut copy = held.clone();
        copy.rotate_left(MOVE);
        let start = Instant::now();
        let stored = 8 * store(way.base()?.volatile(), &copy, limit)?;
        way.flush(stored as u64)?;
        reported(Measure::Stored, stored, start.elapsed());
        held[..stored].copy_from_slice(&copy[..stored]);

        way.forget()?;
        loads(Measure::Cold, way.view()?.volatile(), Duration::ZERO, &held, &mut reported)?;
        loads(Measure::Warm, way.view()?.volatile(), MIN_MEASURED, &held, &mut reported)?;
        copy.copy_from_slice(&held);
        loads(
            Measure::Ordinary,
            VolatileSlice::from(copy.as_mut_slice()),
            MIN_MEASURED,
            &held,
            &mut reported,
        )?;
        loads(Measure::Base, way.base()?.volatile(), MIN_MEASURED, &held, &mut reported)?;

        let start = Instant::now();
        way.flush(stored as u64)?;
        reported(Measure::Flush, 0, start.elapsed());
        console(&format!("round {round} of {}", bench.rounds));
    }
    Ok(())
}

/// What a measurement loaded.
struct Loaded {
    /// Words from the beginning on, in each of its passes.
    words: usize,
    sum: u64,
    /// Bytes of all passes.
    bytes: usize,
    time: Duration,
}

/// Loads words in turn until the end or `limit`, again and again for `least`.
fn load(slice: VolatileSlice<'_>, least: Duration, limit: Duration) -> anyhow::Result<Loaded> {
    let words = slice.get_array_ref::<u64>(0, slice.len() / 8).context("the tensor's words")?;
    let start = Instant::now();
    let mut loaded = Loaded { words: words.len(), sum: 0, bytes: 0, time: Duration::ZERO };
    loop {
        let (mut at, mut sum) = (0, 0_u64);
        while at < loaded.words && (at == 0 || start.elapsed() < limit) {
            let end = (at + STRETCH).min(loaded.words);
            sum = (at..end).fold(sum, |sum, index| sum.wrapping_add(words.load(index)));
            at = end;
        }
        loaded.bytes += 8 * at;
        loaded.time = start.elapsed();
        if loaded.bytes == 8 * at {
            (loaded.words, loaded.sum) = (at, sum);
        } else {
            ensure!(sum == loaded.sum || at < loaded.words, "loads of the same words differ");
        }
        if loaded.time >= least.min(limit) {
            return Ok(loaded);
        }
    }
}

/// Stores the words of `from` in turn until the end or `limit`: how many.
fn store(slice: VolatileSlice<'_>, from: &[u8], limit: Duration) -> anyhow::Result<usize> {
    let words = slice.get_array_ref::<u64>(0, from.len() / 8).context("the tensor's words")?;
    let start = Instant::now();
    let mut at = 0;
    for stretch in from.chunks(8 * STRETCH) {
        for word in words_of(stretch) {
            words.store(at, word);
            at += 1;
        }
        if start.elapsed() >= limit {
            break;
        }
    }
    Ok(at)
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word))
}

/// The sum of the words in `bytes`.
fn sum(bytes: &[u8]) -> u64 {
    words_of(bytes).fold(0, u64::wrapping_add)
}
