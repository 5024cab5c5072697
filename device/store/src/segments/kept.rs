//! Room that is kept for some blocks while their caller moves what they hold about: what they give
//! back nobody else takes, and they take it again, also of a store that is full.
//!
//! * It is counted in chunks, as segments of a length take parts of one, so what is given back
//!   and what is taken again come out even whatever the lengths are. What takes more than before
//!   has to leave it free, in addition to the reserve.
//! * So these blocks never take more of the reserve than blocks that are rewritten do.
//! * When the caller is done, nothing stays kept. What the blocks took in place of segments that
//!   are not free yet stays a debt, which these settle when they are freed, however late.

use std::ops::Range;

use super::CHUNK_GRANULES;

/// A chunk.
const CHUNK: i64 = 1 << 32;

#[derive(Default)]
pub(super) struct Kept {
    blocks: Vec<Range<u64>>,
    /// Whether the caller is at it.
    open: bool,
    /// What the blocks may take, in parts of a chunk. Less than nothing where segments were
    /// replaced and are not free yet.
    left: i64,
}

/// What a segment takes of a chunk.
#[expect(clippy::cast_possible_wrap, reason = "a chunk has 1024 granules")]
const fn part(length: usize) -> i64 {
    CHUNK / (CHUNK_GRANULES / length) as i64
}

impl Kept {
    /// From now on what these blocks give back is kept for them.
    pub(super) fn open(&mut self, blocks: Vec<Range<u64>>) {
        (self.blocks, self.open) = (blocks, true);
    }

    /// What they give back from now on is everybody's.
    pub(super) fn close(&mut self) {
        (self.left, self.open) = (self.left.min(0), false);
    }

    fn is_of(&self, block: u64) -> bool {
        self.open && self.has(block)
    }

    fn has(&self, block: u64) -> bool {
        self.blocks.iter().any(|blocks| blocks.contains(&block))
    }

    /// Whether a segment of the block may be taken of what is kept.
    pub(super) fn covers(&self, block: u64, length: usize) -> bool {
        self.left >= part(length) && self.is_of(block)
    }

    /// Chunks that a segment of the block has to leave free.
    pub(super) fn chunks_beside(&self, block: u64) -> usize {
        if self.left <= 0 || self.is_of(block) {
            return 0;
        }
        usize::try_from((self.left + CHUNK - 1) / CHUNK).unwrap_or(usize::MAX)
    }

    /// A segment of the block was taken; `paid` says that it had room of its own.
    pub(super) fn taken(&mut self, block: u64, length: usize, paid: bool) {
        if self.is_of(block) {
            // What had room of its own used up what was too little for it.
            self.left = if paid { self.left.min(0) } else { self.left - part(length) };
        }
    }

    /// A segment of the block was freed.
    pub(super) fn freed(&mut self, block: u64, length: usize) {
        if self.is_of(block) {
            self.left += part(length);
        } else if self.left < 0 && self.has(block) {
            self.left = (self.left + part(length)).min(0);
        }
    }
}
