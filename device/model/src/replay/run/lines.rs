//! Lines that a design moves: where they lie, and what DRAM does with them.

use std::ops::Range;

use super::{Run, Way};
use crate::dram::Access;
use crate::trace::text::LineAccess;

impl Run {
    /// Where a block's bundle of so many lines lies: where it is `known` to, or behind all others
    /// when it is new or grew.
    pub(super) fn segment(&mut self, number: u64, count: u64, known: Option<u64>) -> u64 {
        if let Some(first) = known {
            return first;
        }
        if !self.takes_lines() {
            return 0;
        }
        let next = self.next_line;
        let held = self.segments.entry(number).or_insert((next, 0));
        if held.1 < count {
            *held = (next, count);
            self.next_line += count;
        }
        held.0
    }

    /// Whether anybody asks where lines lie. A replay for bytes and link only counts them.
    fn takes_lines(&self) -> bool {
        self.dram.is_some() || self.exported.is_some()
    }

    /// Moves lines, and gives their bytes.
    #[inline]
    pub(super) fn bursts(&mut self, lines: Range<u64>, way: Way, write: bool) -> u64 {
        let bytes = 64 * (lines.end - lines.start);
        if self.takes_lines() {
            self.take(lines, way, write);
        }
        bytes
    }

    /// Has whoever asks for lines take these.
    fn take(&mut self, lines: Range<u64>, way: Way, write: bool) {
        if let Some(exported) = &mut self.exported {
            let cycle = self.now;
            exported.extend(lines.clone().map(|line| LineAccess { address: line * 64, write, cycle }));
        }
        let mut first = lines.start;
        while first < lines.end && self.dram.is_some() {
            first += self.run(first..lines.end, way, write);
        }
    }

    /// Has DRAM move the first of these lines and those behind it in its row, and gives how many.
    #[inline]
    fn run(&mut self, lines: Range<u64>, way: Way, write: bool) -> u64 {
        let (Some(dram), Some(profile)) = (&mut self.dram, &self.options.dram) else { return 0 };
        let g = &profile.geometry;
        let (place, in_row) = match way {
            Way::ByLine => (g.by_line(lines.start), 1),
            Way::ByRow => {
                let place = g.by_row(lines.start);
                (place, g.columns - place.column)
            }
        };
        let count = u32::try_from(lines.end - lines.start).unwrap_or(u32::MAX).min(in_row);
        let tag = self.first + self.open.len() as u64 - 1;
        let begun = dram.push_run(&Access { at: self.now, place, write, tag }, count);
        if let Some(open) = self.open.back_mut() {
            open.begin.get_or_insert(begun);
            open.left += count;
        }
        if dram.finished() > 1024 {
            self.collect();
        }
        u64::from(count)
    }

    /// Tells the requests under way what was finished.
    fn collect(&mut self) {
        let Some(dram) = &mut self.dram else { return };
        self.done.clear();
        dram.take_done(&mut self.done);
        for done in &self.done {
            let at = usize::try_from(done.tag - self.first).unwrap_or(usize::MAX);
            if let Some(open) = self.open.get_mut(at) {
                open.left -= done.count;
                open.end = open.end.max(done.finished);
            }
        }
    }

    /// The request has no more bursts. Counts those that are finished.
    pub(super) fn settle(&mut self) {
        let Some(open) = self.open.back_mut() else { return };
        open.complete = true;
        self.collect();
        let Some(profile) = &self.options.dram else { return };
        while let Some(open) = self.open.front().filter(|open| open.complete && open.left == 0) {
            if let Some(begin) = open.begin {
                let ns = profile.ns(open.end.saturating_sub(begin));
                self.latency.add(crate::number::ceil(ns));
            }
            self.open.pop_front();
            self.first += 1;
        }
    }
}
