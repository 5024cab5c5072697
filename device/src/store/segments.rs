//! Segments: runs of 64-byte granules that hold bundles.
//!
//! The rules:
//! * Memory is handed out in chunks of [`CHUNK_GRANULES`]. A chunk holds segments of one length only, so freeing never leaves
//!   gaps of odd sizes; when its last segment goes, the chunk is free for any length again.
//! * A segment belongs to the entry that names it. The caller holds the stripe of that entry's block, so nobody writes a
//!   segment that somebody reads.
//! * A bundle without bytes (every plane constant) takes no segment; its place is granule 0 and is never looked at.

use parking_lot::Mutex;

use super::{GRANULE_BYTES, StoreError, memory::Memory};
use crate::codec::block::MAX_BUNDLE;

/// Granules of a chunk: 64 KiB.
pub const CHUNK_GRANULES: usize = 1024;
/// Granules of the longest segment.
const MOST_GRANULES: usize = MAX_BUNDLE.div_ceil(GRANULE_BYTES);

/// All segments of a device.
pub struct Segments {
    memory: Memory,
    allocator: Mutex<Allocator>,
}

struct Allocator {
    chunks: Vec<Chunk>,
    most_chunks: usize,
    /// Chunks that hold nothing.
    free: Vec<usize>,
    /// By length in granules: chunks of that length with a slot to spare.
    partial: Vec<Vec<usize>>,
    used_granules: u64,
}

#[derive(Clone, Default)]
struct Chunk {
    /// Granules of each of its segments; 0 while free.
    length: usize,
    used: usize,
    /// Slots in use, a bit each.
    slots: [u64; CHUNK_GRANULES / 64],
    /// Its place in `partial[length]`, if there.
    listed: Option<usize>,
}

impl Segments {
    pub(super) fn new(bytes: u64) -> Result<Self, StoreError> {
        let chunk_bytes = (CHUNK_GRANULES * GRANULE_BYTES) as u64;
        let bytes = bytes.max(1).checked_next_multiple_of(chunk_bytes).unwrap_or(u64::MAX);
        let memory = Memory::reserve("segment store", bytes)?;
        let allocator = Allocator {
            chunks: Vec::new(),
            most_chunks: usize::try_from(bytes / chunk_bytes).expect("the reservation succeeded"),
            free: Vec::new(),
            partial: vec![Vec::new(); MOST_GRANULES + 1],
            used_granules: 0,
        };
        Ok(Self { memory, allocator: Mutex::new(allocator) })
    }

    /// Stores `bytes` in a segment of their own: its first granule.
    pub(super) fn store(&self, bytes: &[u8]) -> Result<u64, StoreError> {
        let length = bytes.len().div_ceil(GRANULE_BYTES);
        if length == 0 {
            return Ok(0);
        }
        let mut allocator = self.allocator.lock();
        let granule = allocator.take(length).ok_or_else(|| StoreError::Full {
            wanted: (length * GRANULE_BYTES) as u64,
            used: allocator.used_granules * GRANULE_BYTES as u64,
            capacity: self.capacity_of(&allocator),
        })?;
        drop(allocator);
        self.memory.write(granule * GRANULE_BYTES, bytes);
        Ok(granule as u64)
    }

    /// Frees the segment that holds a bundle of `bytes`.
    pub(super) fn free(&self, segment: u64, bytes: usize) {
        let length = bytes.div_ceil(GRANULE_BYTES);
        if length > 0 {
            self.allocator.lock().give_back(index(segment), length);
        }
    }

    pub(super) fn read(&self, segment: u64, at: usize, out: &mut [u8]) {
        self.memory.read(index(segment) * GRANULE_BYTES + at, out);
    }

    #[cfg(test)]
    pub(super) fn write(&self, segment: u64, at: usize, data: &[u8]) {
        self.memory.write(index(segment) * GRANULE_BYTES + at, data);
    }

    /// Bytes of segments in use.
    pub fn used_bytes(&self) -> u64 {
        self.allocator.lock().used_granules * GRANULE_BYTES as u64
    }

    /// Bytes there may be.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_of(&self.allocator.lock())
    }

    #[expect(clippy::unused_self, reason = "reads as a property of the segments")]
    fn capacity_of(&self, allocator: &Allocator) -> u64 {
        (allocator.most_chunks * CHUNK_GRANULES * GRANULE_BYTES) as u64
    }
}

impl Allocator {
    fn take(&mut self, length: usize) -> Option<usize> {
        let index = match self.partial[length].last() {
            Some(index) => *index,
            None => self.open(length)?,
        };
        let chunk = &mut self.chunks[index];
        let slot = chunk.first_free();
        chunk.slots[slot / 64] |= 1 << (slot % 64);
        chunk.used += 1;
        if chunk.used == chunk.capacity() {
            self.unlist(index);
        }
        self.used_granules += length as u64;
        Some(index * CHUNK_GRANULES + slot * length)
    }

    fn give_back(&mut self, granule: usize, length: usize) {
        let index = granule / CHUNK_GRANULES;
        let chunk = &mut self.chunks[index];
        assert_eq!(chunk.length, length, "a segment is freed with the length it was taken with");
        let slot = granule % CHUNK_GRANULES / length;
        let bit = 1 << (slot % 64);
        assert_ne!(chunk.slots[slot / 64] & bit, 0, "a segment is freed once");
        chunk.slots[slot / 64] &= !bit;
        chunk.used -= 1;
        self.used_granules -= length as u64;
        if chunk.used == 0 {
            self.unlist(index);
            self.chunks[index].length = 0;
            self.free.push(index);
        } else if chunk.listed.is_none() {
            self.list(index);
        }
    }

    /// Makes a free chunk one of segments of `length`.
    fn open(&mut self, length: usize) -> Option<usize> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.chunks.len() < self.most_chunks => {
                self.chunks.push(Chunk::default());
                self.chunks.len() - 1
            }
            None => return None,
        };
        self.chunks[index].length = length;
        self.list(index);
        Some(index)
    }

    fn list(&mut self, index: usize) {
        let list = &mut self.partial[self.chunks[index].length];
        self.chunks[index].listed = Some(list.len());
        list.push(index);
    }

    fn unlist(&mut self, index: usize) {
        if let Some(at) = self.chunks[index].listed.take() {
            let list = &mut self.partial[self.chunks[index].length];
            list.swap_remove(at);
            if let Some(moved) = list.get(at) {
                self.chunks[*moved].listed = Some(at);
            }
        }
    }
}

impl Chunk {
    const fn capacity(&self) -> usize {
        CHUNK_GRANULES / self.length
    }

    fn first_free(&self) -> usize {
        let word =
            self.slots.iter().position(|word| *word != u64::MAX).expect("a listed chunk has a free slot");
        word * 64 + self.slots[word].trailing_ones() as usize
    }
}

fn index(segment: u64) -> usize {
    usize::try_from(segment).expect("a segment of this store")
}
