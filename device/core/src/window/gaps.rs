//! What is free of a window: its gaps by address and by length, so that a place is found without a
//! look at what is taken.
//!
//! A place is the lowest one in the shortest gap that it fits: what is given back is used again
//! before what never was used.

use std::ops::Range;

use imbl::{OrdMap, OrdSet};

/// The gaps of a range. Cloned in one step.
#[derive(Clone, Debug)]
pub(crate) struct Gaps {
    all: Range<u64>,
    /// Where each ends.
    by_start: OrdMap<u64, u64>,
    /// Length and start of each.
    by_length: OrdSet<(u64, u64)>,
}

impl Gaps {
    /// Of a range that is all free.
    pub(crate) fn new(range: Range<u64>) -> Self {
        let (by_start, by_length) = (OrdMap::new(), OrdSet::new());
        let mut gaps = Self { all: range.clone(), by_start, by_length };
        gaps.insert(range);
        gaps
    }

    /// Where `length` bytes, at least one, fit best; the length of the longest gap if nowhere.
    pub(crate) fn fit(&self, length: u64) -> Result<u64, u64> {
        let found = self.by_length.get_next(&(length, 0)).map(|(_, start)| *start);
        found.ok_or_else(|| self.by_length.get_max().map_or(0, |(length, _)| *length))
    }

    /// The gap that `at` is in.
    pub(crate) fn around(&self, at: u64) -> Option<Range<u64>> {
        let (start, end) = self.by_start.get_prev(&at)?;
        (at < *end).then_some(*start..*end)
    }

    /// Takes `range`, as far as it is free.
    pub(crate) fn take(&mut self, range: &Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let gap = match self.around(at) {
                Some(gap) => gap,
                None => match self.by_start.get_next(&at) {
                    Some((start, end)) if *start < range.end => *start..*end,
                    _ => return,
                },
            };
            self.remove(&gap);
            self.insert(gap.start..gap.start.max(range.start));
            self.insert(range.end.min(gap.end)..gap.end);
            at = gap.end;
        }
    }

    /// Gives back a range that was taken, as far as it is inside.
    pub(crate) fn give(&mut self, range: &Range<u64>) {
        let mut gap = range.start.max(self.all.start)..range.end.min(self.all.end);
        if gap.is_empty() {
            return;
        }
        if let Some((start, end)) = self.by_start.get_prev(&gap.start).map(|(start, end)| (*start, *end))
            && end == gap.start
        {
            self.remove(&(start..end));
            gap.start = start;
        }
        if let Some(end) = self.by_start.get(&gap.end).copied() {
            self.remove(&(gap.end..end));
            gap.end = end;
        }
        self.insert(gap);
    }

    fn insert(&mut self, gap: Range<u64>) {
        if !gap.is_empty() {
            self.by_length.insert((gap.end - gap.start, gap.start));
            self.by_start.insert(gap.start, gap.end);
        }
    }

    fn remove(&mut self, gap: &Range<u64>) {
        self.by_start.remove(&gap.start);
        self.by_length.remove(&(gap.end - gap.start, gap.start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 60;

    /// Runs of `false`, in order.
    fn gaps_of(taken: &[bool]) -> Vec<Range<u64>> {
        let mut gaps: Vec<Range<u64>> = Vec::new();
        for (at, _) in (0..).zip(taken).filter(|(_, taken)| !**taken) {
            match gaps.last_mut() {
                Some(gap) if gap.end == at => gap.end += 1,
                _ => gaps.push(at..at + 1),
            }
        }
        gaps
    }

    proptest! {
        #[test]
        fn gaps_are_what_is_not_taken(
            steps in prop::collection::vec((0..BYTES, 1..20_usize, any::<bool>()), 0..60),
        ) {
            let (mut gaps, mut taken) = (Gaps::new(0..BYTES as u64), [false; BYTES]);
            for (start, length, give) in steps {
                let range = start..(start + length).min(BYTES);
                let as_reported = range.start as u64..range.end as u64;
                if !give {
                    gaps.take(&as_reported);
                    taken[range].fill(true);
                } else if taken[range.clone()].iter().all(|taken| *taken) {
                    gaps.give(&as_reported);
                    taken[range].fill(false);
                }
                let want = gaps_of(&taken);
                let reported: Vec<_> = gaps.by_start.iter().map(|(start, end)| *start..*end).collect();
                prop_assert_eq!(&reported, &want);
                let mut lengths: Vec<_> = want.iter().map(|gap| (gap.end - gap.start, gap.start)).collect();
                lengths.sort_unstable();
                prop_assert_eq!(gaps.by_length.iter().copied().collect::<Vec<_>>(), lengths.clone());
                let longest = lengths.last().map_or(0, |(length, _)| *length);
                for length in 1..=BYTES as u64 {
                    let best = lengths.iter().find(|gap| gap.0 >= length).map(|gap| gap.1);
                    prop_assert_eq!(gaps.fit(length), best.ok_or(longest));
                }
                for at in 0..BYTES as u64 {
                    prop_assert_eq!(gaps.around(at), want.iter().find(|gap| gap.contains(&at)).cloned());
                }
            }
        }
    }
}
