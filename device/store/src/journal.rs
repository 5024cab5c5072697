//! The journal: why a kill between two stores leaves no index entry half written and no KV window
//! half new.
//!
//! The rules:
//! * Before entries are written into the index, they are written here as a *record*: the first
//!   block, how many, a CRC-32C of all, and the entries. Its count is stored last and makes it
//!   valid. Once the index has them, the count goes back to 0.
//! * An image that is opened writes the entries of every valid record into the index: the change
//!   happened, or it did not.
//! * There is a record for each stripe of blocks, whose lock its writer holds, and
//!   [`WINDOW_RECORDS`] for KV windows, which wait for one to be free.
//! * Nothing is written here before the index is [watched](Index::watch): an image that was left
//!   cleanly says first that it is no more, as what its disk has of a record is replayed otherwise,
//!   and what the record names may not be there. Who waits for a record does so before that, as
//!   checkpoints wait for who watches.

use parking_lot::{Condvar, Mutex};

use super::{
    STRIPES, StoreError,
    entry::ENTRY_BYTES,
    index::Index,
    memory::Memory,
    publication::{forget, record},
};
use lamina_codec::kv::MAX_BLOCKS;

/// KV windows that may be published at once.
const WINDOW_RECORDS: usize = 16;
/// Bytes of a record before its entries.
const HEADER_BYTES: usize = 64;
/// Bytes of a stripe's record.
const BLOCK_RECORD: usize = HEADER_BYTES + ENTRY_BYTES;
/// Bytes of a window's record.
const WINDOW_RECORD: usize = HEADER_BYTES + MAX_BLOCKS * ENTRY_BYTES;
/// Bytes of the journal.
pub(super) const BYTES: u64 = (STRIPES * BLOCK_RECORD + WINDOW_RECORDS * WINDOW_RECORD) as u64;

/// The journal of an image.
pub(super) struct Journal {
    memory: Memory,
    /// Windows' records that nobody uses.
    free: Mutex<Vec<usize>>,
    freed: Condvar,
}

/// A window's record that is taken, and not valid yet.
#[must_use]
pub(super) struct WindowRecord(usize);

/// A valid record. Its change is in the index when it is [ended](Journal::end).
#[must_use]
pub(super) struct Record {
    at: usize,
    window: Option<usize>,
}

impl Journal {
    /// The journal in `memory`, whose records all have room now.
    pub(super) fn new(memory: Memory) -> Result<Self, StoreError> {
        memory.ensure(0..usize::try_from(BYTES).expect("a few MiB"))?;
        Ok(Self { memory, free: Mutex::new((0..WINDOW_RECORDS).collect()), freed: Condvar::new() })
    }

    /// Writes what every valid record says into `index`: how many there were.
    pub(super) fn replay(&self, index: &Index) -> Result<usize, StoreError> {
        let mut replayed = 0;
        for (at, most) in records() {
            if let Some((first, entries)) = self.read(at, most) {
                let watch = index.watch();
                for (block, entry) in (first..index.blocks()).zip(&entries) {
                    index.ensure(block..block + 1)?;
                    index.put(&watch, block, entry);
                }
                replayed += 1;
            }
            self.set_count(at, 0);
        }
        Ok(replayed)
    }

    /// Makes no record valid.
    pub(super) fn forget_all(&self) {
        records().for_each(|(at, _)| self.set_count(at, 0));
    }

    /// Records the entry of one block, whose stripe the caller holds.
    pub(super) fn begin(&self, block: u64, entry: &[u8; ENTRY_BYTES]) -> Record {
        let stripe = usize::try_from(block % STRIPES as u64).expect("less than STRIPES");
        let record = Record { at: stripe * BLOCK_RECORD, window: None };
        self.write(record.at, block, std::slice::from_ref(entry));
        record
    }

    /// Takes a record for a window; waits for one to be free.
    pub(super) fn take_window(&self) -> WindowRecord {
        let mut free = self.free.lock();
        loop {
            if let Some(window) = free.pop() {
                return WindowRecord(window);
            }
            self.freed.wait(&mut free);
        }
    }

    /// Records the entries of blocks from `first` on, at most [`MAX_BLOCKS`].
    pub(super) fn begin_window(
        &self,
        WindowRecord(window): WindowRecord,
        first: u64,
        entries: &[[u8; ENTRY_BYTES]],
    ) -> Record {
        let record = Record { at: window_record(window), window: Some(window) };
        self.write(record.at, first, entries);
        record
    }

    /// Forgets a record whose change is in the index.
    pub(super) fn end(&self, Record { at, window }: Record) {
        forget(|count| self.set_count(at, count));
        if let Some(window) = window {
            self.free.lock().push(window);
            self.freed.notify_one();
        }
    }

    fn write(&self, at: usize, first: u64, entries: &[[u8; ENTRY_BYTES]]) {
        let check = check(first, entries);
        let body = || {
            self.memory.write(at + 8, &first.to_le_bytes());
            self.memory.write(at + 16, &u64::from(check).to_le_bytes());
            self.memory.write(at + HEADER_BYTES, entries.as_flattened());
        };
        record(body, |count| self.set_count(at, count), entries.len() as u64);
    }

    fn read(&self, at: usize, most: usize) -> Option<(u64, Vec<[u8; ENTRY_BYTES]>)> {
        let word = |at| {
            let mut word = [0; 8];
            self.memory.read(at, &mut word);
            u64::from_le_bytes(word)
        };
        let (count, first, stored) = (word(at), word(at + 8), word(at + 16));
        let count = usize::try_from(count).ok().filter(|count| (1..=most).contains(count))?;
        let mut entries = vec![[0; ENTRY_BYTES]; count];
        self.memory.read(at + HEADER_BYTES, entries.as_flattened_mut());
        (u64::from(check(first, &entries)) == stored).then_some((first, entries))
    }

    fn set_count(&self, at: usize, count: u64) {
        self.memory.write(at, &count.to_le_bytes());
    }
}

/// Where every record is, and how many entries it may have.
fn records() -> impl Iterator<Item = (usize, usize)> {
    let windows = (0..WINDOW_RECORDS).map(|record| (window_record(record), MAX_BLOCKS));
    (0..STRIPES).map(|stripe| (stripe * BLOCK_RECORD, 1)).chain(windows)
}

fn window_record(record: usize) -> usize {
    STRIPES * BLOCK_RECORD + record * WINDOW_RECORD
}

fn check(first: u64, entries: &[[u8; ENTRY_BYTES]]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&first.to_le_bytes()), entries.as_flattened())
}
