//! The lanes of an interleave set: files beside `base`, one for each CXL memory device of the set, each an alias of its part of the base window.
//!
//! What is kept here is what [`super::coherence`] needs to know of them: which of their pages, and
//! of `base`, the host may hold, and who writes back and drops them. No two
//! lanes show the same byte, so they need nothing of each other.

use std::io;
use std::iter::once;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lamina_abi::Interleave;

use lamina_device::device::Partition;

use super::ServeError;
use super::coherence::needed;
use super::dropped_pages::{Gate, LetGo};
use super::flusher::Flusher;
use super::invalidations::Invalidations;
use super::served_pages::{PAGE_BYTES, ServedPages};
use super::write_backs::WriteBacks;

/// What a file of an export shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFile {
    /// The base window.
    Base,
    /// The views window.
    Views,
    /// A lane of the base window.
    Lane(u32),
}

/// The lanes of an export.
pub(super) struct Lanes {
    set: Interleave,
    /// Pages of `base` that the host may hold.
    base: ServedPages,
    each: Vec<Lane>,
}

struct Lane {
    bytes: u64,
    /// Pages of it that the host may hold.
    served: ServedPages,
    flusher: OnceLock<Flusher>,
    /// Pages of it to be dropped.
    stale: Invalidations,
    write_backs: WriteBacks,
}

/// Ranges of each lane, by its number.
pub(super) type LaneRanges = Vec<(u32, Vec<Range<u64>>)>;

impl Lanes {
    /// The lanes of the base window of a whole device. `patience` is how long a write-back may wait for room.
    pub(super) fn new(set: Interleave, whole: &Partition, patience: Duration, gate: &Arc<Gate>) -> Self {
        let base_bytes = whole.base_bytes();
        let lane = |lane| {
            let bytes = set.before(lane, base_bytes);
            Lane {
                bytes,
                served: ServedPages::new(bytes),
                flusher: OnceLock::new(),
                stale: Invalidations::default(),
                write_backs: WriteBacks::new(
                    whole.clone(),
                    ExportFile::Lane(lane),
                    patience,
                    Arc::clone(gate),
                ),
            }
        };
        Self { set, base: ServedPages::new(base_bytes), each: (0..set.ways()).map(lane).collect() }
    }

    /// Their numbers.
    pub(super) fn numbers(&self) -> Range<u32> {
        0..self.set.ways()
    }

    /// Bytes of a lane; none of one that there is not.
    pub(super) fn bytes(&self, lane: u32) -> u64 {
        self.each.get(lane as usize).map_or(0, |lane| lane.bytes)
    }

    /// Starts writing back: `start` starts it through the next lane, of so many bytes, with so many
    /// threads.
    pub(super) fn start_flushing(
        &self,
        mut start: impl FnMut(u64, usize) -> io::Result<Flusher>,
    ) -> io::Result<()> {
        for lane in &self.each {
            let again = |_| io::Error::other("flushing was started before");
            lane.flusher.set(start(lane.bytes, 1)?).map_err(again)?;
        }
        Ok(())
    }

    /// Who writes back a lane.
    pub(super) fn flusher(&self, lane: u32) -> Option<&Flusher> {
        self.each.get(lane as usize)?.flusher.get()
    }

    /// Says that pages of `base` are about to be computed for the page cache, or are in it.
    pub(super) fn serving_base(&self, range: Range<u64>) {
        self.base.mark(range);
    }

    /// The same of a lane.
    pub(super) fn serving(&self, lane: u32, range: Range<u64>) {
        if let Some(lane) = self.each.get(lane as usize) {
            lane.served.mark(range);
        }
    }

    /// The ranges of `base` that a range of a lane shows. Granules smaller than a page share all pages under them, and are taken as one range.
    pub(super) fn under(&self, lane: u32, range: &Range<u64>) -> Vec<Range<u64>> {
        let end = range.end.min(self.bytes(lane));
        if range.start >= end {
            return Vec::new();
        }
        if self.set.granule() < PAGE_BYTES {
            let (first, last) = (self.set.region_of(lane, range.start), self.set.region_of(lane, end - 1));
            return once(first..last + 1).collect();
        }
        self.set.pieces(lane, range.start..end).collect()
    }

    /// The ranges of the lanes that show any of these ranges of `base`.
    pub(super) fn over(&self, base: &[Range<u64>]) -> LaneRanges {
        let of = |lane| {
            let parts = base.iter().map(|range| self.set.lane_range(lane, range));
            (lane, parts.filter(|part| !part.is_empty()).collect())
        };
        self.numbers().map(of).collect()
    }

    /// Of the lanes over these ranges of `base`, those that may have dirty pages there. Never sleeps.
    pub(super) fn dirty_over(&self, base: &[Range<u64>]) -> LaneRanges {
        let mut over = self.over(base);
        over.retain(|(lane, ranges)| needed(&self.each[*lane as usize].flusher, ranges));
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

    /// Takes the marks of the lanes' pages over a range of `base`: the ranges that had one.
    fn take_over(&self, base: &Range<u64>) -> LaneRanges {
        let mut all = Vec::new();
        for (lane, ranges) in self.over(std::slice::from_ref(base)) {
            let mut taken = Vec::new();
            for range in ranges {
                self.each[lane as usize].served.take(range, &mut taken);
            }
            if !taken.is_empty() {
                all.push((lane, taken));
            }
        }
        all
    }

    /// Has the lanes' pages over a range of `base` dropped, which has changed in the device.
    pub(super) fn base_changed(&self, base: Range<u64>) {
        for (lane, taken) in self.take_over(&base) {
            self.each[lane as usize].stale.queue(taken);
        }
    }

    /// Has the lanes' pages over a range of `base` dropped as far as the host holds any.
    pub(super) fn drop_cached(&self, base: &Range<u64>) {
        for (lane, ranges) in self.over(std::slice::from_ref(base)) {
            let lane = &self.each[lane as usize];
            let Some(flusher) = lane.flusher.get() else { continue };
            lane.stale.queue(ranges.into_iter().filter(|range| flusher.cached(range)));
        }
    }

    /// Has all of the lanes' pages dropped.
    pub(super) fn forgotten(&self) {
        self.each.iter().for_each(|lane| lane.stale.queue(once(0..lane.bytes)));
    }

    /// Waits until everything of the lanes that was queued by now is invalidated.
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub(super) fn drain(&self) -> Result<(), ServeError> {
        self.each.iter().try_for_each(|lane| lane.stale.drain())
    }

    /// Hands ranges of a lane that the kernel is to drop to `invalidate`, until [`Self::close`].
    pub(super) fn invalidate_until_closed(&self, lane: u32, mut invalidate: impl FnMut(&Range<u64>)) {
        if let Some(lane) = self.each.get(lane as usize) {
            lane.stale.run_until_closed(|range| {
                lane.write_backs.dropped().invalidate(range, lane.flusher.get(), &mut invalidate);
            });
        }
    }

    /// The write-backs of a lane.
    pub(super) fn write_backs(&self, lane: u32) -> Option<&WriteBacks> {
        Some(&self.each.get(lane as usize)?.write_backs)
    }

    /// The device has dropped a range of `base`: see
    /// [`DroppedPages::mark`](super::dropped_pages::DroppedPages::mark).
    pub(super) fn mark_dropped(&self, base: &Range<u64>, let_go: LetGo) {
        self.each_over(base, |lane, range| lane.write_backs.dropped().mark(&range, let_go));
    }

    /// Takes what was dropped out of what waits.
    pub(super) fn take_out_dropped(&self) {
        self.each.iter().for_each(|lane| lane.write_backs.take_out_dropped());
    }

    /// The kernel has let go of what it had of a range of `base` in the lanes.
    pub(super) fn forget_dropped(&self, base: &Range<u64>) {
        self.each_over(base, |lane, range| lane.write_backs.dropped().forget(&range));
    }

    fn each_over(&self, base: &Range<u64>, mut call: impl FnMut(&Lane, Range<u64>)) {
        for (number, lane) in self.numbers().zip(&self.each) {
            let range = self.set.lane_range(number, base);
            if !range.is_empty() {
                call(lane, range);
            }
        }
    }

    /// Has no write-back wait any more.
    pub(super) fn hurry(&self) {
        self.each.iter().for_each(|lane| lane.write_backs.hurry());
    }

    /// Ends writing back and invalidating.
    pub(super) fn close(&self) {
        self.each.iter().filter_map(|lane| lane.flusher.get()).for_each(Flusher::stop);
        for lane in &self.each {
            lane.write_backs.close();
            lane.stale.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamina_device::device::{Device, DeviceConfig};

    fn lanes(set: Interleave, bytes: u64) -> Lanes {
        let device = Arc::new(Device::new(DeviceConfig::new(bytes, 4 << 20)).unwrap());
        Lanes::new(set, &Partition::first(device), Duration::ZERO, &Arc::default())
    }

    #[test]
    fn what_a_page_of_a_lane_shows_is_found_from_both_sides() {
        let bytes = 64 << 10;
        for set in ["2x256", "2x4K", "2x16K", "4x1K", "4x8K"] {
            let set: Interleave = set.parse().unwrap();
            let lanes = lanes(set, bytes);
            for lane in lanes.numbers() {
                for page in (0..lanes.bytes(lane)).step_by(4096) {
                    let under = lanes.under(lane, &(page..page + 4096));
                    let shown: Vec<u64> = set.pieces(lane, page..page + 4096).flatten().collect();
                    assert!(
                        shown.iter().all(|at| under.iter().any(|range| range.contains(at))),
                        "{set} {lane} {page}"
                    );
                    let pages = under.iter().flat_map(|range| range.start / 4096..range.end.div_ceil(4096));
                    let needed = shown.iter().map(|at| at / 4096).collect::<std::collections::BTreeSet<_>>();
                    assert!(pages.eq(needed), "{set} {lane} {page}: no page that it does not show");
                    for at in shown {
                        let byte = |at| -> Vec<Range<u64>> { once(at..at + 1).collect() };
                        let over = lanes.over(&byte(at));
                        assert_eq!(over[lane as usize], (lane, byte(set.before(lane, at))));
                    }
                }
                assert!(lanes.under(lane, &(lanes.bytes(lane)..u64::MAX)).is_empty());
            }
        }
    }

    #[test]
    fn a_page_is_dropped_once_where_the_other_side_changed() {
        let lanes = lanes("2x256".parse().unwrap(), 64 << 10);
        lanes.serving_base(0..16384);
        lanes.serving(1, 4096..8192);
        assert!(lanes.take_base(&lanes.under(0, &(0..4096))).into_iter().eq(once(0..8192)));
        assert_eq!(lanes.take_base(&lanes.under(1, &(0..4096))), []);
        assert_eq!(lanes.take_over(&(8192..8193)), [], "lane 0 has that byte");
        assert_eq!(lanes.take_over(&(8192 + 256..8192 + 257)), [(1, once(4096..8192).collect())]);
        assert_eq!(lanes.take_over(&(0..16384)), []);
    }
}
