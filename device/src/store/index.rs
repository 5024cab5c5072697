//! The plane index: one entry a block, in device memory.

use super::{
    StoreError,
    entry::{ENTRY_BYTES, Entry},
    memory::Memory,
};

/// All entries of a device, in block order. The caller holds the block's stripe.
pub(super) struct Index {
    memory: Memory,
}

impl Index {
    pub(super) fn new(blocks: u64) -> Result<Self, StoreError> {
        let bytes = blocks.saturating_mul(ENTRY_BYTES as u64);
        Ok(Self { memory: Memory::reserve("plane index", bytes)? })
    }

    pub(super) fn get(&self, block: u64) -> Result<Entry, StoreError> {
        let mut bytes = [0; ENTRY_BYTES];
        self.memory.read(at(block), &mut bytes);
        Entry::decode(&bytes).map_err(|why| StoreError::Entry { block, why })
    }

    pub(super) fn set(&self, block: u64, entry: &Entry) {
        self.memory.write(at(block), &entry.encode());
    }
}

fn at(block: u64) -> usize {
    usize::try_from(block)
        .ok()
        .and_then(|block| block.checked_mul(ENTRY_BYTES))
        .expect("a block of this device")
}
