//! Where the bytes of a file lie on the device.

use std::collections::BTreeMap;
use std::ops::Range;

/// Pieces of a file, by where they begin in it: DPA and length. They do not overlap, and pieces
/// that follow each other in both places are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extents(BTreeMap<u64, (u64, u64)>);

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it begins in the file.
    pub(crate) at: u64,
    pub(crate) length: u64,
    /// Where it lies; nowhere if it is a hole.
    pub(crate) dpa: Option<u64>,
}

/// Where pieces lie that lie somewhere.
pub(crate) fn held(pieces: &[Piece]) -> Vec<Range<u64>> {
    pieces.iter().filter_map(|piece| piece.dpa.map(|dpa| dpa..dpa + piece.length)).collect()
}

impl Extents {
    /// Takes up a piece where nothing is.
    pub(crate) fn insert(&mut self, at: u64, dpa: u64, length: u64) {
        let (mut at, mut dpa, mut length) = (at, dpa, length);
        if let Some((before, (from, long))) = self.before(at)
            && before + long == at
            && from + long == dpa
        {
            self.0.remove(&before);
            (at, dpa, length) = (before, from, long + length);
        }
        if let Some((from, long)) = self.0.get(&(at + length)).copied()
            && dpa + length == from
        {
            self.0.remove(&(at + length));
            length += long;
        }
        self.0.insert(at, (dpa, length));
    }

    /// Forgets where a range lies: the places that are free by that.
    pub(crate) fn cut(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut freed = Vec::new();
        for Piece { at, length, dpa } in self.pieces(range) {
            let Some(dpa) = dpa else { continue };
            let (start, (from, long)) = self.before(at + length - 1).unwrap_or((at, (dpa, length)));
            self.0.remove(&start);
            if start < at {
                self.0.insert(start, (from, at - start));
            }
            let end = at + length;
            if end < start + long {
                self.0.insert(end, (from + (end - start), start + long - end));
            }
            freed.push(dpa..dpa + length);
        }
        freed
    }

    /// Whether a piece reaches over both ends of a range.
    pub(crate) fn splits(&self, range: &Range<u64>) -> bool {
        let piece = self.before(range.start);
        piece.is_some_and(|(start, (_, length))| start < range.start && start + length > range.end)
    }

    /// The pieces and holes of a range, in order.
    pub(crate) fn pieces(&self, range: &Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        let first = self.before(range.start).map_or(range.start, |(start, _)| start);
        for (start, (dpa, length)) in self.0.range(first..range.end.max(first)) {
            let (from, to) = ((*start).max(range.start), (start + length).min(range.end));
            if from >= to {
                continue;
            }
            if at < from {
                pieces.push(Piece { at, length: from - at, dpa: None });
            }
            pieces.push(Piece { at: from, length: to - from, dpa: Some(dpa + (from - start)) });
            at = to;
        }
        if at < range.end {
            pieces.push(Piece { at, length: range.end - at, dpa: None });
        }
        pieces
    }

    /// All pieces: where each begins, its DPA and its length.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.0.iter().map(|(at, (dpa, length))| (*at, *dpa, *length))
    }

    /// Where the last piece ends in the file, and on the device.
    pub(crate) fn end(&self) -> (u64, Option<u64>) {
        let last = self.0.last_key_value();
        last.map_or((0, None), |(at, (dpa, length))| (at + length, Some(dpa + length)))
    }

    /// Bytes of the pieces in a range.
    pub(crate) fn bytes_in(&self, range: &Range<u64>) -> u64 {
        self.pieces(range).iter().filter(|piece| piece.dpa.is_some()).map(|piece| piece.length).sum()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The last piece that begins at `at` or before.
    fn before(&self, at: u64) -> Option<(u64, (u64, u64))> {
        self.0.range(..=at).next_back().map(|(start, place)| (*start, *place))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn extents_are_what_a_table_of_bytes_says(
            steps in prop::collection::vec((0..60_u64, 1..20_u64, any::<bool>()), 0..60),
        ) {
            let (mut extents, mut table, mut next) = (Extents::default(), [None; 80], 1000);
            for (at, length, cut) in steps {
                let range = at..at + length;
                if cut {
                    let freed: Vec<u64> = extents.cut(&range).into_iter().flatten().collect();
                    let held: Vec<u64> = range.clone().filter_map(|at| table[usize::try_from(at).unwrap()]).collect();
                    prop_assert_eq!(freed, held);
                    range.for_each(|at| table[usize::try_from(at).unwrap()] = None);
                } else {
                    for hole in extents.pieces(&range).into_iter().filter(|piece| piece.dpa.is_none()) {
                        extents.insert(hole.at, next, hole.length);
                        for at in 0..hole.length {
                            table[usize::try_from(hole.at + at).unwrap()] = Some(next + at);
                        }
                        // What follows may touch, or not.
                        next += hole.length + u64::from(length % 2 == 0);
                    }
                }
                for range in [0..80, at..at + length, 7..31] {
                    let told: Vec<Option<u64>> = extents
                        .pieces(&range)
                        .iter()
                        .flat_map(|piece| (0..piece.length).map(|at| piece.dpa.map(|dpa| dpa + at)))
                        .collect();
                    let want: Vec<_> = range.map(|at| table[usize::try_from(at).unwrap()]).collect();
                    prop_assert_eq!(told, want);
                }
                let lengths: u64 = extents.all().map(|(_, _, length)| length).sum();
                prop_assert_eq!(lengths, extents.bytes_in(&(0..80)));
            }
        }
    }
}
