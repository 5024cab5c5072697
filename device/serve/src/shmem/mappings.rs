//! What is mapped where in the region.
//!
//! Mappings do not overlap, and one is taken away as it was made: whole.

use std::collections::BTreeMap;

use lamina_abi::shmem::PAGE;

/// Why a mapping cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Offset, length or place are no multiples of a page, or the length is 0.
    Malformed,
    /// The range passes the end of the window, or the place that of the region.
    Range,
    /// Something is mapped there.
    Overlap,
    /// There are as many as there may be.
    Full,
    /// There is no such mapping.
    Unknown,
}

/// What is mapped, by place.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    /// Length, and whether it can be stored to.
    at: BTreeMap<u64, (u64, bool)>,
}

impl Mappings {
    /// Checks that a range of a window with `window` bytes may be mapped at a place of a region
    /// with `region` bytes, which has room for `most` mappings.
    pub(super) fn check(
        &self,
        (offset, length): (u64, u64),
        window: u64,
        at: u64,
        region: u64,
        most: usize,
    ) -> Result<(), Wrong> {
        if length == 0 || [offset, length, at].iter().any(|number| number % PAGE != 0) {
            return Err(Wrong::Malformed);
        }
        let within = |from: u64, bytes: u64| from.checked_add(length).is_some_and(|end| end <= bytes);
        if !within(offset, window) || !within(at, region) {
            return Err(Wrong::Range);
        }
        // Both ends fit the region.
        let before = self.at.range(..at + length).next_back();
        if before.is_some_and(|(place, (bytes, _))| place + bytes > at) {
            return Err(Wrong::Overlap);
        }
        if self.at.len() >= most {
            return Err(Wrong::Full);
        }
        Ok(())
    }

    /// Notes a mapping that was checked and made.
    pub(super) fn made(&mut self, at: u64, length: u64, writable: bool) {
        self.at.insert(at, (length, writable));
    }

    /// The mapping with just this place and length: whether it can be stored to.
    pub(super) fn find(&self, at: u64, length: u64) -> Result<bool, Wrong> {
        match self.at.get(&at) {
            Some((found, writable)) if *found == length => Ok(*writable),
            _ => Err(Wrong::Unknown),
        }
    }

    /// Forgets a mapping.
    pub(super) fn gone(&mut self, at: u64) {
        self.at.remove(&at);
    }

    /// Forgets all mappings, and tells them: place, length, and whether it could be stored to.
    pub(super) fn take(&mut self) -> impl Iterator<Item = (u64, u64, bool)> {
        std::mem::take(&mut self.at).into_iter().map(|(at, (length, writable))| (at, length, writable))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: u64 = 1 << 20;
    const REGION: u64 = 4 << 20;

    #[test]
    fn what_is_no_mapping_is_refused() {
        let mut mappings = Mappings::default();
        let check =
            |mappings: &Mappings, offset, length, at| mappings.check((offset, length), WINDOW, at, REGION, 8);
        assert_eq!(check(&mappings, 0, WINDOW, REGION - WINDOW), Ok(()));
        for (offset, length, at) in [(0, 0, 0), (1, PAGE, 0), (0, PAGE - 1, 0), (0, PAGE, 4095)] {
            assert_eq!(check(&mappings, offset, length, at), Err(Wrong::Malformed), "{offset} {length} {at}");
        }
        let huge = u64::MAX - PAGE + 1;
        for (offset, length, at) in [
            (WINDOW, PAGE, 0),
            (0, WINDOW + PAGE, 0),
            (0, PAGE, REGION),
            (huge, PAGE, 0),
            (PAGE, huge, 0),
            (0, PAGE, huge),
        ] {
            assert_eq!(check(&mappings, offset, length, at), Err(Wrong::Range), "{offset} {length} {at}");
        }
        mappings.made(8 * PAGE, 4 * PAGE, true);
        for (length, at) in [(9, 0), (20, 0), (1, 8), (1, 11), (4, 11)] {
            assert_eq!(check(&mappings, 0, length * PAGE, at * PAGE), Err(Wrong::Overlap), "{length} {at}");
        }
        assert_eq!(check(&mappings, 0, 8 * PAGE, 0), Ok(()));
        assert_eq!(check(&mappings, 0, PAGE, 12 * PAGE), Ok(()));
        assert_eq!(mappings.check((0, PAGE), WINDOW, 0, REGION, 1), Err(Wrong::Full));
        assert_eq!(mappings.check((0, PAGE), WINDOW, 0, REGION, 2), Ok(()));
        for (at, length) in [(8, 3), (8, 5), (9, 3), (0, 4)] {
            assert_eq!(mappings.find(at * PAGE, length * PAGE), Err(Wrong::Unknown));
        }
        assert_eq!(mappings.find(8 * PAGE, 4 * PAGE), Ok(true));
        assert_eq!(mappings.take().collect::<Vec<_>>(), [(8 * PAGE, 4 * PAGE, true)]);
        assert_eq!(check(&mappings, 0, PAGE, 8 * PAGE), Ok(()));
    }

    proptest! {
        #[test]
        fn mappings_never_overlap(requested in proptest::collection::vec((0..64_u64, 1..16_u64, any::<bool>()), 1..60)) {
            let mut mappings = Mappings::default();
            let mut taken = [None; 80];
            for (at, length, remove) in requested {
                let (start, bytes) = (at * PAGE, length * PAGE);
                let pages = usize::try_from(at).unwrap()..usize::try_from(at + length).unwrap();
                if remove {
                    let whole = taken[pages.clone()].iter().all(|owner| *owner == Some((at, length)))
                        && taken.iter().filter(|owner| **owner == Some((at, length))).count() == pages.len();
                    prop_assert_eq!(mappings.find(start, bytes).is_ok(), whole);
                    if whole {
                        mappings.gone(start);
                        taken[pages].fill(None);
                    }
                } else {
                    let free = taken[pages.clone()].iter().all(Option::is_none);
                    let checked = mappings.check((0, bytes), WINDOW, start, REGION, usize::MAX);
                    prop_assert_eq!(checked, if free { Ok(()) } else { Err(Wrong::Overlap) });
                    if free {
                        mappings.made(start, bytes, false);
                        taken[pages].fill(Some((at, length)));
                    }
                }
            }
        }
    }
}
