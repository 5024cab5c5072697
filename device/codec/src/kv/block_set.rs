//! Sets of a window's blocks.

use super::shape::MAX_BLOCKS;

/// Some of a window's blocks, by their numbers in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSet([u64; MAX_BLOCKS / 64]);

impl BlockSet {
    /// The first `count` blocks.
    ///
    /// # Panics
    /// If these are more than [`MAX_BLOCKS`].
    pub fn first(count: usize) -> Self {
        let mut all = Self::default();
        (0..count).for_each(|block| all.insert(block));
        all
    }

    /// Adds a block.
    ///
    /// # Panics
    /// If a window has no such block.
    pub const fn insert(&mut self, block: usize) {
        self.0[block / 64] |= 1 << (block % 64);
    }

    /// Takes a block out: whether it was in.
    pub const fn remove(&mut self, block: usize) -> bool {
        let was_in = self.has(block);
        if was_in {
            self.0[block / 64] &= !(1 << (block % 64));
        }
        was_in
    }

    /// Whether it has a block.
    pub const fn has(&self, block: usize) -> bool {
        block < MAX_BLOCKS && self.0[block / 64] >> (block % 64) & 1 == 1
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Its blocks, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_BLOCKS).filter(move |block| self.has(*block))
    }

    /// As it is stored: bit k mod 64 of word ⌊k / 64⌋ is block k.
    pub const fn words(&self) -> [u64; MAX_BLOCKS / 64] {
        self.0
    }

    /// What is stored so.
    pub const fn from_words(words: [u64; MAX_BLOCKS / 64]) -> Self {
        Self(words)
    }
}
