//! Which pages of the views window the host may hold in its page cache.
//!
//! One bit a 4 KiB page, set *before* a page's bytes are computed and taken *after* the base bytes
//! under it have changed, with a sequentially consistent fence between the two steps on either
//! side. So a reader and a writer that meet on a page cannot both miss the other: either the writer
//! sees the bit and the page is invalidated, or the reader computes the page from the new bytes.
//! The bits of 128 MiB of window are allocated when its first page is read.

use std::array;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes of a page, the unit that is served and invalidated.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Words of bits in a chunk, the unit of allocation.
const CHUNK_WORDS: usize = 512;

type Chunk = Box<[AtomicU64; CHUNK_WORDS]>;

/// One bit for each page of the views window.
#[derive(Debug)]
pub(crate) struct ServedPages {
    chunks: Vec<OnceLock<Chunk>>,
}

impl ServedPages {
    /// A bitmap for a window of `bytes`, all clear.
    pub(crate) fn new(bytes: u64) -> Self {
        let chunks = bytes.div_ceil(PAGE_BYTES * 64 * CHUNK_WORDS as u64);
        Self { chunks: (0..chunks).map(|_| OnceLock::new()).collect() }
    }

    /// Notes that the pages touching `range` are about to be computed.
    pub(crate) fn mark(&self, range: Range<u64>) {
        for (word, mask) in words(range) {
            let Some(chunk) = self.chunk(word) else { break };
            let bits = &chunk.get_or_init(|| Box::new(array::from_fn(|_| AtomicU64::new(0))))[within(word)];
            bits.fetch_or(mask, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// Clears the bits of the pages touching `range` and adds the byte ranges of those that were
    /// set to `taken`.
    pub(crate) fn take(&self, range: Range<u64>, taken: &mut Vec<Range<u64>>) {
        fence(Ordering::SeqCst);
        for (word, mask) in words(range) {
            let Some(chunk) = self.chunk(word) else { break };
            let Some(chunk) = chunk.get() else { continue };
            let bits = &chunk[within(word)];
            // Most stores hit pages that no view was read from: look before taking the cache line.
            if bits.load(Ordering::SeqCst) & mask == 0 {
                continue;
            }
            push_pages(taken, word, bits.fetch_and(!mask, Ordering::SeqCst) & mask);
        }
    }

    /// The byte ranges of the pages touching `range` whose bits are set.
    pub(crate) fn marked(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut marked = Vec::new();
        for (word, mask) in words(range) {
            let Some(chunk) = self.chunk(word) else { break };
            let Some(chunk) = chunk.get() else { continue };
            push_pages(&mut marked, word, chunk[within(word)].load(Ordering::SeqCst) & mask);
        }
        marked
    }

    fn chunk(&self, word: u64) -> Option<&OnceLock<Chunk>> {
        self.chunks.get(usize::try_from(word / CHUNK_WORDS as u64).ok()?)
    }
}

/// Adds the byte ranges of the pages whose bits are set in a word.
fn push_pages(ranges: &mut Vec<Range<u64>>, word: u64, mut set: u64) {
    while set != 0 {
        let low = set.trailing_zeros();
        let run = (set >> low).trailing_ones();
        let first = (word * 64 + u64::from(low)) * PAGE_BYTES;
        push(ranges, first..first + u64::from(run) * PAGE_BYTES);
        set &= u64::MAX.checked_shl(low + run).unwrap_or(0);
    }
}

/// A word's place in its chunk.
fn within(word: u64) -> usize {
    usize::try_from(word % CHUNK_WORDS as u64).expect("below CHUNK_WORDS")
}

/// Adds a range to a list, as one with the last when they touch.
pub(crate) fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// The words of the bitmap under a byte range, each with the mask of the pages meant.
fn words(range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let first = range.start / PAGE_BYTES;
    let end = if range.is_empty() { first } else { range.end.div_ceil(PAGE_BYTES) };
    (first / 64..end.div_ceil(64)).filter_map(move |word| {
        let low = first.max(word * 64) - word * 64;
        let high = end.min(word * 64 + 64).checked_sub(word * 64)?;
        (low < high).then(|| (word, (u64::MAX << low) & (u64::MAX >> (64 - high))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn taken(pages: &ServedPages, range: Range<u64>) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        pages.take(range, &mut taken);
        taken
    }

    #[test]
    fn a_page_is_taken_once() {
        let pages = ServedPages::new(1 << 20);
        pages.mark(4096..4097);
        assert_eq!(taken(&pages, 0..1 << 20), vec![4096..8192]);
        assert_eq!(taken(&pages, 0..1 << 20), vec![]);
    }

    #[test]
    fn runs_join_across_words() {
        let pages = ServedPages::new(1 << 20);
        pages.mark(10 * 4096..140 * 4096);
        assert_eq!(taken(&pages, 0..1 << 20), vec![10 * 4096..140 * 4096]);
    }

    #[test]
    fn an_empty_range_and_one_past_the_end_are_nothing() {
        let pages = ServedPages::new(1 << 20);
        pages.mark(4096..4096);
        pages.mark((1 << 30)..(1 << 30) + 1);
        assert_eq!(taken(&pages, 0..u64::MAX / 2), vec![]);
    }

    proptest! {
        #[test]
        fn taken_is_what_was_marked(marks in prop::collection::vec((0_u64..300, 1_u64..100), 0..20), cut in (0_u64..300, 0_u64..300)) {
            let pages = ServedPages::new(400 * PAGE_BYTES);
            let mut model = vec![false; 400];
            for (first, count) in marks {
                pages.mark(first * PAGE_BYTES..(first + count) * PAGE_BYTES);
                for page in first..first + count {
                    model[usize::try_from(page).unwrap()] = true;
                }
            }
            let cut = cut.0.min(cut.1)..cut.0.max(cut.1);
            let marked = pages.marked(cut.start * PAGE_BYTES..cut.end * PAGE_BYTES);
            prop_assert_eq!(&marked, &pages.marked(cut.start * PAGE_BYTES..cut.end * PAGE_BYTES));
            let all = taken(&pages, cut.start * PAGE_BYTES..cut.end * PAGE_BYTES);
            prop_assert_eq!(&marked, &all);
            for range in all {
                pages.mark(range);
            }
            let found: Vec<u64> = taken(&pages, cut.start * PAGE_BYTES..cut.end * PAGE_BYTES)
                .into_iter().flat_map(|range| (range.start / PAGE_BYTES)..(range.end / PAGE_BYTES)).collect();
            let expected: Vec<u64> = cut.filter(|&page| model[usize::try_from(page).unwrap()]).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
