//! Memory whose every word is known.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
};

/// Words of a page.
const PAGE_WORDS: usize = 512;
/// Bytes that are always a mapping of their own: the allocator keeps no more than 32 MiB for later.
const MAPPING: usize = 33 << 20;
/// Bytes whose unmapping has the processor forget all translations: the kernel names up to 33 pages
/// one by one.
const MANY_PAGES: usize = 64 * 8 * PAGE_WORDS;

/// Memory whose every word is known, and no two the same.
pub struct Known {
    words: Vec<u64>,
}

impl Known {
    /// So many bytes, rounded down to pages, all of them stored.
    ///
    /// # Errors
    /// When there is no such memory.
    pub fn filled(bytes: u64) -> anyhow::Result<Self> {
        let count = usize::try_from(bytes / 8)? / PAGE_WORDS * PAGE_WORDS;
        let mut words = Vec::new();
        words.try_reserve_exact(count)?;
        words.extend((0..count as u64).map(word));
        Ok(Self { words })
    }

    /// Where it is, and its bytes.
    pub fn place(&self) -> (usize, usize) {
        (self.words.as_ptr().addr(), 8 * self.words.len())
    }

    /// Words that are not what was stored.
    pub fn wrong(&self) -> usize {
        let words = black_box(&self.words);
        (0..).zip(words).filter(|(index, found)| **found != word(*index)).count()
    }

    /// Reads a word of each page of the first `bytes`, over and over until it is `over`.
    ///
    /// The kernel learns of an access when the processor looks the page up in its tables, and an
    /// emulated processor keeps what it has found there until it is told to forget it. So it is
    /// told between rounds, by giving memory back; if that is in huge pages, they are too few to do
    /// so.
    pub fn touch(&self, bytes: u64, over: &AtomicBool) {
        let count = usize::try_from(bytes / 8).unwrap_or(usize::MAX).min(self.words.len());
        while !over.load(Ordering::Relaxed) {
            let mut given_back = Vec::with_capacity(MAPPING);
            given_back.resize(MANY_PAGES, 1_u8);
            drop(black_box(given_back));
            let words = black_box(&self.words[..count]);
            for word in words.iter().step_by(PAGE_WORDS) {
                black_box(*word);
            }
        }
    }
}

fn word(index: u64) -> u64 {
    (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_that_changed_is_counted() {
        let mut known = Known::filled(3 * 4096 + 100).unwrap();
        assert_eq!((known.place().1, known.wrong()), (3 * 4096, 0));
        known.words[0] ^= 1;
        known.words[1535] = 0;
        known.words.swap(600, 601);
        assert_eq!(known.wrong(), 4);
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        assert!(Known::filled(u64::MAX).is_err());
    }
}
