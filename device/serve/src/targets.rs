//! The targets of an interleave set: files beside `base`, one for each CXL memory device of the
//! set, each an alias of its part of the base window.
//!
//! What is kept here is what [`super::coherence`] needs to know of them: which of their pages, and
//! of `base`, the host may hold, and who writes back and drops them. No two
//! targets show the same byte, so they need nothing of each other.

use std::io;
use std::iter::once;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lamina_abi::Interleave;

use lamina_device::device::Partition;

use super::ServeError;
use super::dropped_pages::{Gate, LetGo};
use super::export_file::ExportFile;
use super::flusher::{Flusher, needed};
use super::invalidations::Invalidations;
use super::served_pages::{PAGE_BYTES, ServedPages};
use super::write_backs::WriteBacks;

/// The targets of an export.
pub(super) struct Targets {
    set: Interleave,
    /// Pages of `base` that the host may hold.
    base: ServedPages,
    each: Vec<Target>,
}

struct Target {
    bytes: u64,
    /// Pages of it that the host may hold.
    served: ServedPages,
    flusher: OnceLock<Flusher>,
    /// Pages of it to be dropped.
    stale: Invalidations,
    write_backs: WriteBacks,
}

/// Ranges of each target, by its number.
pub(super) type TargetRanges = Vec<(u32, Vec<Range<u64>>)>;

impl Targets {
    /// The targets of the base window of a whole device. `max_wait` is how long a write-back may
    /// wait for room.
    pub(super) fn new(set: Interleave, whole: &Partition, max_wait: Duration, gate: &Arc<Gate>) -> Self {
        let base_bytes = whole.base_bytes();
        let target = |target| {
            let bytes = set.before(target, base_bytes);
            Target {
                bytes,
                served: ServedPages::new(bytes),
                flusher: OnceLock::new(),
                stale: Invalidations::default(),
                write_backs: WriteBacks::new(
                    whole.clone(),
                    ExportFile::Target(target),
                    max_wait,
                    Arc::clone(gate),
                ),
            }
        };
        Self { set, base: ServedPages::new(base_bytes), each: (0..set.ways()).map(target).collect() }
    }

    pub(super) fn numbers(&self) -> Range<u32> {
        0..self.set.ways()
    }

    /// Bytes of a target; none of one that there is not.
    pub(super) fn bytes(&self, target: u32) -> u64 {
        self.each.get(target as usize).map_or(0, |target| target.bytes)
    }

    /// Starts writing back: `start` starts it through the next target, of so many bytes, with so
    /// many threads.
    pub(super) fn start_flushing(
        &self,
        mut start: impl FnMut(u64, usize) -> io::Result<Flusher>,
    ) -> io::Result<()> {
        for target in &self.each {
            let again = |_| io::Error::other("flushing was started before");
            target.flusher.set(start(target.bytes, 1)?).map_err(again)?;
        }
        Ok(())
    }

    /// Who writes back a target.
    pub(super) fn flusher(&self, target: u32) -> Option<&Flusher> {
        self.each.get(target as usize)?.flusher.get()
    }

    /// Says that pages of `base` are about to be computed for the page cache, or are in it.
    pub(super) fn serving_base(&self, range: Range<u64>) {
        self.base.mark(range);
    }

    /// The same of a target.
    pub(super) fn serving(&self, target: u32, range: Range<u64>) {
        if let Some(target) = self.each.get(target as usize) {
            target.served.mark(range);
        }
    }

    /// The ranges of `base` that a range of a target shows. Granules smaller than a page share all
    /// pages under them, and are taken as one range.
    pub(super) fn under(&self, target: u32, range: &Range<u64>) -> Vec<Range<u64>> {
        let end = range.end.min(self.bytes(target));
        if range.start >= end {
            return Vec::new();
        }
        if self.set.granule() < PAGE_BYTES {
            let (first, last) =
                (self.set.region_of(target, range.start), self.set.region_of(target, end - 1));
            return once(first..last + 1).collect();
        }
        self.set.pieces(target, range.start..end).collect()
    }

    /// The ranges of the targets that show any of these ranges of `base`.
    pub(super) fn over(&self, base: &[Range<u64>]) -> TargetRanges {
        let of = |target| {
            let parts = base.iter().map(|range| self.set.target_range(target, range));
            (target, parts.filter(|part| !part.is_empty()).collect())
        };
        self.numbers().map(of).collect()
    }

    /// Of the targets over these ranges of `base`, those that may have dirty pages there. Never
    /// sleeps.
    pub(super) fn dirty_over(&self, base: &[Range<u64>]) -> TargetRanges {
        let mut over = self.over(base);
        over.retain(|(target, ranges)| needed(&self.each[*target as usize].flusher, ranges));
        over
    }

    /// Takes the marks of the pages of `base` that touch these ranges: the ranges that had one.
    pub(super) fn take_base(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        for range in ranges {
            self.base.take(range.clone(), &mut taken);
        }
        taken
    }

    /// Takes the marks of the targets' pages over a range of `base`: the ranges that had one.
    fn take_over(&self, base: &Range<u64>) -> TargetRanges {
        let mut all = Vec::new();
        for (target, ranges) in self.over(std::slice::from_ref(base)) {
            let mut taken = Vec::new();
            for range in ranges {
                self.each[target as usize].served.take(range, &mut taken);
            }
            if !taken.is_empty() {
                all.push((target, taken));
            }
        }
        all
    }

    /// Has the targets' pages over a range of `base` dropped, which has changed in the device.
    pub(super) fn base_changed(&self, base: Range<u64>) {
        for (target, taken) in self.take_over(&base) {
            self.each[target as usize].stale.queue(taken);
        }
    }

    /// Has the targets' pages over a range of `base` dropped as far as the host holds any.
    pub(super) fn drop_cached(&self, base: &Range<u64>) {
        for (target, ranges) in self.over(std::slice::from_ref(base)) {
            let target = &self.each[target as usize];
            let Some(flusher) = target.flusher.get() else { continue };
            target.stale.queue(ranges.into_iter().filter(|range| flusher.cached(range)));
        }
    }

    /// Has all of the targets' pages dropped.
    pub(super) fn forgotten(&self) {
        self.each.iter().for_each(|target| target.stale.queue(once(0..target.bytes)));
    }

    /// Waits until everything of the targets that was queued by now is invalidated.
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub(super) fn drain(&self) -> Result<(), ServeError> {
        self.each.iter().try_for_each(|target| target.stale.drain())
    }

    /// Hands ranges of a target that the kernel is to drop to `invalidate`, until [`Self::close`].
    pub(super) fn invalidate_until_closed(&self, target: u32, mut invalidate: impl FnMut(&Range<u64>)) {
        if let Some(target) = self.each.get(target as usize) {
            target.stale.run_until_closed(|range| {
                target.write_backs.dropped().invalidate(range, target.flusher.get(), &mut invalidate);
            });
        }
    }

    /// The write-backs of a target.
    pub(super) fn write_backs(&self, target: u32) -> Option<&WriteBacks> {
        Some(&self.each.get(target as usize)?.write_backs)
    }

    /// The device has dropped a range of `base`: see
    /// [`DroppedPages::mark`](super::dropped_pages::DroppedPages::mark).
    pub(super) fn mark_dropped(&self, base: &Range<u64>, let_go: LetGo) {
        self.each_over(base, |target, range| target.write_backs.dropped().mark(&range, let_go));
    }

    /// Takes what was dropped out of what waits.
    pub(super) fn take_out_dropped(&self) {
        self.each.iter().for_each(|target| target.write_backs.take_out_dropped());
    }

    /// The kernel has let go of what it had of a range of `base` in the targets.
    pub(super) fn forget_dropped(&self, base: &Range<u64>) {
        self.each_over(base, |target, range| target.write_backs.dropped().forget(&range));
    }

    fn each_over(&self, base: &Range<u64>, mut call: impl FnMut(&Target, Range<u64>)) {
        for (number, target) in self.numbers().zip(&self.each) {
            let range = self.set.target_range(number, base);
            if !range.is_empty() {
                call(target, range);
            }
        }
    }

    /// Has no write-back wait any more.
    pub(super) fn hurry(&self) {
        self.each.iter().for_each(|target| target.write_backs.hurry());
    }

    /// Ends writing back and invalidating.
    pub(super) fn close(&self) {
        self.each.iter().filter_map(|target| target.flusher.get()).for_each(Flusher::stop);
        for target in &self.each {
            target.write_backs.close();
            target.stale.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamina_device::device::{Device, DeviceConfig};

    fn targets(set: Interleave, bytes: u64) -> Targets {
        let device = Arc::new(Device::new(DeviceConfig::new(bytes, 4 << 20)).unwrap());
        Targets::new(set, &Partition::first(device), Duration::ZERO, &Arc::default())
    }

    #[test]
    fn what_a_page_of_a_target_shows_is_found_from_both_sides() {
        let bytes = 64 << 10;
        for set in ["2x256", "2x4K", "2x16K", "4x1K", "4x8K"] {
            let set: Interleave = set.parse().unwrap();
            let targets = targets(set, bytes);
            for target in targets.numbers() {
                for page in (0..targets.bytes(target)).step_by(4096) {
                    let under = targets.under(target, &(page..page + 4096));
                    let shown: Vec<u64> = set.pieces(target, page..page + 4096).flatten().collect();
                    assert!(
                        shown.iter().all(|at| under.iter().any(|range| range.contains(at))),
                        "{set} {target} {page}"
                    );
                    let pages = under.iter().flat_map(|range| range.start / 4096..range.end.div_ceil(4096));
                    let needed = shown.iter().map(|at| at / 4096).collect::<std::collections::BTreeSet<_>>();
                    assert!(pages.eq(needed), "{set} {target} {page}: no page that it does not show");
                    for at in shown {
                        let byte = |at| -> Vec<Range<u64>> { once(at..at + 1).collect() };
                        let over = targets.over(&byte(at));
                        assert_eq!(over[target as usize], (target, byte(set.before(target, at))));
                    }
                }
                assert!(targets.under(target, &(targets.bytes(target)..u64::MAX)).is_empty());
            }
        }
    }

    #[test]
    fn a_page_is_dropped_once_where_the_other_side_changed() {
        let targets = targets("2x256".parse().unwrap(), 64 << 10);
        targets.serving_base(0..16384);
        targets.serving(1, 4096..8192);
        assert!(targets.take_base(&targets.under(0, &(0..4096))).into_iter().eq(once(0..8192)));
        assert_eq!(targets.take_base(&targets.under(1, &(0..4096))), []);
        assert_eq!(targets.take_over(&(8192..8193)), [], "target 0 has that byte");
        assert_eq!(targets.take_over(&(8192 + 256..8192 + 257)), [(1, once(4096..8192).collect())]);
        assert_eq!(targets.take_over(&(0..16384)), []);
    }
}
