//! The plane index: one entry a block, in device memory.

use std::ops::Range;

use super::{
    StoreError,
    entry::{self, ENTRY_BYTES, Entry},
    memory::Memory,
};

/// How many entries behind one that is looked at are brought into the processor's caches.
const AHEAD: usize = 4;

/// All entries of a device, in block order. The caller holds the block's stripe.
pub(super) struct Index {
    memory: Memory,
    blocks: u64,
}

impl Index {
    pub(super) fn new(memory: Memory, blocks: u64) -> Self {
        Self { memory, blocks }
    }

    /// The bytes that the entries of so many blocks take.
    pub(super) fn bytes(blocks: u64) -> u64 {
        blocks.saturating_mul(ENTRY_BYTES as u64)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn get(&self, block: u64) -> Result<Entry, StoreError> {
        Entry::decode(&self.raw(block)).map_err(|why| StoreError::Entry { block, why })
    }

    /// The segment that the entry of `block` names if it is intact, without holding the stripe; entries behind it come into the processor's caches.
    pub(super) fn glance(&self, block: u64) -> Option<u64> {
        let at = at(block);
        self.memory.expect(at + AHEAD * ENTRY_BYTES, ENTRY_BYTES);
        self.memory.glance(at).map(entry::segment_of)
    }

    /// The entry's bytes, whatever they are.
    pub(super) fn raw(&self, block: u64) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        self.memory.read(at(block), &mut bytes);
        bytes
    }

    /// Whether `block` holds nothing, and its entry takes no room yet.
    pub(super) fn is_hole(&self, block: u64) -> bool {
        let range = at(block)..at(block + 1);
        self.memory.may_be_hole(range) && self.raw(block) == [0; ENTRY_BYTES]
    }

    /// The first of these blocks whose entries may be anything but zeros, some that follow one another.
    pub(super) fn touched(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        let found = self.memory.touched(at(blocks.start)..at(blocks.end))?;
        Some((found.start / ENTRY_BYTES) as u64..(found.end / ENTRY_BYTES) as u64)
    }

    /// Makes sure that the entries of these blocks can be written.
    pub(super) fn ensure(&self, blocks: Range<u64>) -> Result<(), StoreError> {
        self.memory.ensure(at(blocks.start)..at(blocks.end))
    }

    /// Writes an entry, for which there is room.
    pub(super) fn put(&self, block: u64, entry: &[u8; ENTRY_BYTES]) {
        self.memory.write(at(block), entry);
    }

    /// Ranges of blocks whose entries may be anything but zeros.
    pub(super) fn populated(&self) -> Vec<Range<u64>> {
        let block = |at: usize| (at / ENTRY_BYTES) as u64;
        let ranges = self.memory.populated();
        ranges.into_iter().map(|range| block(range.start)..block(range.end).min(self.blocks)).collect()
    }
}

fn at(block: u64) -> usize {
    usize::try_from(block)
        .ok()
        .and_then(|block| block.checked_mul(ENTRY_BYTES))
        .expect("a block of this device")
}
