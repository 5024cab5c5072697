// Where pages of the guest are, remembered for as long as that holds.

use super::layout::PAGE;

/// Pages that are remembered of a processor.
const REMEMBERED: usize = 512;
/// Bits of a page's number in a key; the generation is above them.
const PAGE_BITS: u32 = 52;
/// Generations that a key tells apart, from 1 on.
const GENERATIONS: u64 = 1 << (64 - PAGE_BITS);

/// A page of the guest that was looked up.
#[derive(Clone, Copy)]
struct Remembered {
    key: u64,
    /// Where it is, if that is in a range that is watched; else 0.
    place: u64,
}

const NONE: Remembered = Remembered { key: 0, place: 0 };

/// What a processor's thread knows of its pages. A mapping holds until the processor changes its
/// tables; whether a page is watched, until other ranges are.
pub(crate) struct Pages {
    /// Counts changes of the tables, where keys have it.
    generation: u64,
    /// The count of the ranges that were watched when these were looked up.
    ranges: u64,
    remembered: [Remembered; REMEMBERED],
}

impl Pages {
    /// All zeros. [`Pages::forget`] comes before all else.
    pub(crate) const fn new() -> Self {
        Self { generation: 0, ranges: 0, remembered: [NONE; REMEMBERED] }
    }

    /// Where a page is remembered, and by what key.
    #[inline]
    fn slot(&self, address: u64) -> (usize, u64) {
        let page = address / PAGE as u64;
        ((page ^ page >> 9) as usize % REMEMBERED, page | self.generation)
    }

    /// Where the page of this address is, or 0 if it is not watched; none if that is not known of
    /// these ranges.
    #[inline]
    pub(crate) fn find(&self, address: u64, ranges: u64) -> Option<u64> {
        let (slot, key) = self.slot(address);
        let remembered = &self.remembered[slot];
        (remembered.key == key && self.ranges == ranges).then_some(remembered.place)
    }

    /// Remembers what [`Pages::find`] did not know. `ranges` is the count from before it was looked
    /// up: of ranges that changed meanwhile nothing is believed.
    pub(crate) fn remember(&mut self, address: u64, place: u64, ranges: u64) {
        if self.ranges != ranges {
            self.forget();
            self.ranges = ranges;
        }
        let (slot, key) = self.slot(address);
        self.remembered[slot] = Remembered { key, place };
    }

    /// Drops all.
    pub(crate) fn forget(&mut self) {
        self.generation += 1 << PAGE_BITS;
        if self.generation >> PAGE_BITS == GENERATIONS - 1 {
            self.generation = 1 << PAGE_BITS;
            self.remembered.fill(NONE);
        }
    }
}
