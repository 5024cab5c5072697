//! The ledger: what the entries of a store add up to, kept in memory beside them, so that the
//! worker after one that was killed reads no index.
//!
//! It lies behind an image in memory, and in a file of its own, of memory that the holder keeps, if
//! the image is on a disk: the page cache has then all that a killed worker stored, and whatever
//! ends the holder too ends the ledger. The rules:
//! * The ledger says which segments are in use and by which block (the *occupancy*), which of them
//!   are [held](super::segments), and, as of some moment, the *accounts*: numbers that the device
//!   counts of entries, and which blocks are lost. Which units of the image have room is kept there
//!   too, by [`Memory`].
//! * A *generation* begins when accounts are written, at a moment when nothing is being changed.
//!   Its number is stored last, in one store of the processor.
//! * Before the occupancy of a segment or an entry changes, that is noted in the generation's
//!   *log*: the block, and what its entry was, or which segment is taken for it. What is let go was
//!   held: the chunk's state counts it before its bit is set, and until after that is cleared.
//! * So all that may differ from the ledger is named in the log or lies in a chunk with held
//!   segments, between whatever stores the process is killed. The next worker looks at the entries
//!   of the blocks in the log: a segment in the log is in use if one of them names it, and is held
//!   from now on if it was not free and none does; the accounts change by what became of each. To
//!   do that twice does no harm.
//! * The ledger counts for the worker right after the one that wrote it, as the holder of both
//!   numbers them. If another was between, maybe of a program that knows no ledger, if the log is
//!   full, a sync failed, or the accounts are not those of the tables, all entries are looked at.

#[path = "ledger_place.rs"]
mod place;
#[path = "ledger_takeover.rs"]
mod takeover;

use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, Release},
    fence,
};

use self::place::{CHUNKS_USED_AT, GENERATION_AT, LAST_AT, NOTED_AT, PLACES_AT, Parts, owners_before};
pub(super) use self::place::{LedgerPlace, PARTS, bits_bytes, has_failed, note_failure};
use super::{
    StoreError,
    entry::{ENTRY_BYTES, Entry},
    geometry::{CHUNK_GRANULES, MAX_GRANULES},
    memory::Memory,
};

/// Records of a log.
const LOG_RECORDS: u64 = 1 << 14;
/// Records after which a new generation should begin.
const LOG_FULL: u64 = LOG_RECORDS / 2;
/// Bytes of a record: its stamp, the block, and an entry or a segment.
const RECORD_BYTES: usize = 16 + ENTRY_BYTES;
/// Bytes of each of the two places for accounts: 700 000 tensors' and more.
const ACCOUNTS_BYTES: usize = 16 << 20;
/// Bytes of the chunks' states: see [`State`].
const STATE_BYTES: usize = 8;
/// Bytes of a chunk's map, of segments in use or held: a bit for the first granule of each.
const MAP_BYTES: usize = CHUNK_GRANULES / 8;
/// Segments of the chunks with the fewest.
const MIN_SLOTS: usize = 16;
const _: () = assert!(CHUNK_GRANULES / MAX_GRANULES < MIN_SLOTS && MIN_SLOTS * 64 == CHUNK_GRANULES);

/// What is noted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Noted {
    /// A block's entry as it was.
    Entry = 0,
    /// A segment that is taken for a block, and its granules.
    Segment = 1,
}

/// A process that serves an image, after others of the same holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// A number that no other holder has that had the image since the host was started.
    pub holder: u64,
    /// How many workers its holder had before.
    pub number: u64,
}

/// The ledger of a store.
pub(super) struct Ledger {
    memory: Memory,
    parts: Parts,
    chunks: usize,
    /// The generation that is logged; 0 if the ledger does not count any more.
    generation: AtomicU64,
    /// Whether the occupancy is not what it should be, as it found no room.
    broken: AtomicBool,
    follows: bool,
    /// Whether the store is what the ledger said.
    taken: AtomicBool,
}

/// A block whose entry may have changed since the accounts were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The block.
    pub block: u64,
    /// Its entry then, as that of zeros if it was lost.
    pub old: Entry,
    /// Its entry now, likewise.
    pub new: Entry,
}

/// What the ledger says of a store.
pub(super) struct Found {
    pub(super) accounts: Vec<u64>,
    pub(super) changed: Vec<Changed>,
    /// The blocks that are lost.
    pub(super) lost: Vec<u64>,
}

impl Ledger {
    /// Whether what the last process noted counts.
    pub(super) fn follows(&self) -> bool {
        self.follows && self.generation.load(Relaxed) > 0
    }

    /// Whether the store is what the ledger said when it was opened.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Relaxed)
    }

    /// Whether a new generation should begin.
    pub(super) fn is_full(&self) -> bool {
        let counts = self.generation.load(Relaxed) > 0;
        !self.broken.load(Relaxed) && (!counts || self.word(NOTED_AT) >= LOG_FULL)
    }

    /// Whether to begin one would change nothing.
    pub(super) fn is_fresh(&self) -> bool {
        let counts = self.generation.load(Relaxed) > 0;
        self.broken.load(Relaxed) || counts && self.word(NOTED_AT) == 0
    }

    /// Says that the ledger does not count, and will not as long as this process lives.
    pub(super) fn break_off(&self) {
        self.broken.store(true, Relaxed);
        self.give_up();
    }

    /// Says that the ledger does not count.
    pub(super) fn give_up(&self) {
        self.generation.store(0, Relaxed);
        self.memory.write(GENERATION_AT, &0_u64.to_le_bytes());
    }

    /// Begins a generation: these are the accounts of a store of which nobody changes anything, and
    /// its lost blocks.
    pub(super) fn begin(&self, accounts: &[u64], lost: &[u64]) {
        let bytes: Vec<u8> = accounts.iter().chain(lost).flat_map(|word| word.to_le_bytes()).collect();
        // Into the place that the generation which still counts does not use: a process that died
        // here may have left a number out.
        let next = self.word(LAST_AT) + 1;
        let next = next + u64::from(next % 2 == self.word(GENERATION_AT) % 2);
        let place = usize::from(next % 2 == 1);
        let at = self.parts.accounts + place * ACCOUNTS_BYTES;
        if self.broken.load(Relaxed) {
            return;
        }
        if bytes.len() > ACCOUNTS_BYTES || self.memory.ensure(at..at + bytes.len()).is_err() {
            return self.break_off();
        }
        self.memory.write(at, &bytes);
        let header = [accounts.len() as u64, lost.len() as u64, check(&bytes, next)];
        for (number, word) in header.into_iter().enumerate() {
            self.memory.write(PLACES_AT[place] + 8 * number, &word.to_le_bytes());
        }
        self.memory.write(LAST_AT, &next.to_le_bytes());
        fence(Release);
        // From here on records of the generation before are none.
        self.memory.write(GENERATION_AT, &next.to_le_bytes());
        fence(Release);
        self.memory.write(NOTED_AT, &0_u64.to_le_bytes());
        self.generation.store(next, Relaxed);
    }
}

impl Ledger {
    /// Notes that the entry of `block`, which is `entry`, is about to change.
    pub(super) fn note_entry(&self, block: u64, entry: &[u8; ENTRY_BYTES]) {
        self.note(Noted::Entry, block, entry);
    }

    fn note_segment(&self, block: u64, granule: usize, length: usize) {
        let mut body = [0; ENTRY_BYTES];
        body[..8].copy_from_slice(&(granule as u64).to_le_bytes());
        body[8..16].copy_from_slice(&(length as u64).to_le_bytes());
        self.note(Noted::Segment, block, &body);
    }

    fn note(&self, what: Noted, block: u64, body: &[u8; ENTRY_BYTES]) {
        let generation = self.generation.load(Relaxed);
        if generation == 0 {
            return;
        }
        let number = self.memory.number(NOTED_AT).fetch_add(1, Relaxed);
        let at = usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(RECORD_BYTES);
        let at = self.parts.log.saturating_add(at);
        if number >= LOG_RECORDS || self.memory.ensure(at..at + RECORD_BYTES).is_err() {
            return self.give_up();
        }
        self.memory.write(at + 8, &block.to_le_bytes());
        self.memory.write(at + 16, body);
        fence(Release);
        self.memory.write(at, &stamp(generation, what).to_le_bytes());
        fence(Release);
    }

    /// Notes that a segment of `length` granules is in use by `block` from now on.
    pub(super) fn occupy(&self, length: usize, granule: usize, block: u64) {
        self.note_segment(block, granule, length);
        self.unless_broken(|| self.take(length, granule, block));
    }

    /// Notes that a segment is free. It is in the log, as the one of an entry that was replaced, or
    /// as one that was taken and is given back; or it was held.
    pub(super) fn vacate(&self, granule: usize) {
        self.unless_broken(|| {
            let chunk = granule / CHUNK_GRANULES;
            let State { length, used, held } = self.state(chunk);
            self.set_bit(self.parts.maps, granule, false)?;
            let was_held = held > 0 && self.has_bit(self.parts.held, granule);
            if was_held {
                self.set_bit(self.parts.held, granule, false)?;
            }
            let held = held - usize::from(was_held);
            self.write_state(chunk, State { length, used: used.saturating_sub(1), held })
        });
    }

    /// Notes that a segment is held, which no entry names any more. It is in the log, as the one of
    /// an entry that was replaced, unless this store was opened without the ledger.
    pub(super) fn hold(&self, granule: usize) {
        self.unless_broken(|| {
            let chunk = granule / CHUNK_GRANULES;
            let state = self.state(chunk);
            // First, so that who follows looks at the chunk.
            self.write_state(chunk, State { held: state.held + 1, ..state })?;
            self.set_bit(self.parts.held, granule, true)
        });
    }

    /// Writes to the occupancy; it counts no more if there is no room.
    fn unless_broken(&self, write: impl FnOnce() -> Result<(), StoreError>) {
        if !self.broken.load(Relaxed) && write().is_err() {
            self.break_off();
        }
    }

    fn take(&self, length: usize, granule: usize, block: u64) -> Result<(), StoreError> {
        let chunk = granule / CHUNK_GRANULES;
        self.use_chunk(chunk);
        self.write_owner(length, granule, block)?;
        self.set_bit(self.parts.maps, granule, true)?;
        let state = self.state(chunk);
        self.write_state(chunk, State { length, used: state.used + 1, ..state })
    }

    /// Says that a chunk was used.
    fn use_chunk(&self, chunk: usize) {
        let used = chunk as u64 + 1;
        if self.word(CHUNKS_USED_AT) < used {
            self.memory.write(CHUNKS_USED_AT, &used.to_le_bytes());
        }
    }

    fn write_owner(&self, length: usize, granule: usize, block: u64) -> Result<(), StoreError> {
        let at = self.owner_at(granule / CHUNK_GRANULES, length, granule % CHUNK_GRANULES / length);
        self.memory.ensure(at..at + 8)?;
        self.memory.write(at, &block.to_le_bytes());
        Ok(())
    }

    /// Sets or clears the bit of a granule in the maps from `maps` on.
    fn set_bit(&self, maps: usize, granule: usize, is: bool) -> Result<(), StoreError> {
        let (at, bit) = bit_at(maps, granule);
        self.memory.ensure(at..at + 8)?;
        let bits = self.word(at);
        let bits = if is { bits | bit } else { bits & !bit };
        self.memory.write(at, &bits.to_le_bytes());
        Ok(())
    }

    fn has_bit(&self, maps: usize, granule: usize) -> bool {
        let (at, bit) = bit_at(maps, granule);
        self.read_word(at) & bit != 0
    }

    fn write_state(&self, chunk: usize, state: State) -> Result<(), StoreError> {
        let at = self.state_at(chunk);
        self.memory.ensure(at..at + STATE_BYTES)?;
        self.memory.write(at, &state.word().to_le_bytes());
        Ok(())
    }

    /// Writes all of a chunk that was found, while the ledger does not count: its slots that are in
    /// use, and the block of each slot.
    pub(super) fn adopt(
        &self,
        chunk: usize,
        length: usize,
        slots: impl Iterator<Item = usize>,
        blocks: &[u64],
    ) {
        let (mut map, mut used) = ([0; MAP_BYTES], 0);
        for slot in slots {
            map[slot * length / 8] |= 1 << (slot * length % 8);
            used += 1;
        }
        let owners: Vec<u8> = blocks.iter().flat_map(|block| block.to_le_bytes()).collect();
        self.unless_broken(|| {
            self.use_chunk(chunk);
            let all = [(self.owner_at(chunk, length, 0), &owners[..]), (self.map_at(chunk), &map)];
            for (at, bytes) in all {
                self.memory.ensure(at..at + bytes.len())?;
                self.memory.write(at, bytes);
            }
            self.write_state(chunk, State { length, used, held: 0 })
        });
    }

    /// Chunks that were ever used are before this one.
    pub(super) fn chunks_used(&self) -> usize {
        usize::try_from(self.word(CHUNKS_USED_AT)).unwrap_or(usize::MAX).min(self.chunks)
    }

    /// Forgets whose segments are whose: that is found anew.
    pub(super) fn vacate_all(&self) {
        for (chunk, state) in self.states().into_iter().enumerate() {
            self.unless_broken(|| {
                for maps in [Some(self.parts.maps), Some(self.parts.held).filter(|_| state.held > 0)] {
                    if let Some(at) = maps.map(|maps| maps + chunk * MAP_BYTES) {
                        self.memory.ensure(at..at + MAP_BYTES)?;
                        self.memory.write(at, &[0; MAP_BYTES]);
                    }
                }
                self.write_state(chunk, State::default())
            });
        }
    }

    /// What all chunks are that were ever used.
    pub(super) fn states(&self) -> Vec<State> {
        let mut bytes = vec![0; self.chunks_used() * STATE_BYTES];
        self.memory.read(self.parts.states, &mut bytes);
        bytes.as_chunks().0.iter().map(|word| State::of(u64::from_le_bytes(*word))).collect()
    }

    /// What a chunk is.
    pub(super) fn state(&self, chunk: usize) -> State {
        State::of(self.read_word(self.state_at(chunk)))
    }

    /// The slots of a chunk of segments of `length` that are in use, each with its block.
    pub(super) fn segments(&self, chunk: usize, length: usize) -> Vec<(usize, u64)> {
        let slots = self.slots(self.parts.maps, chunk, length);
        slots.map(|slot| (slot, self.read_word(self.owner_at(chunk, length, slot)))).collect()
    }

    /// The slots of a chunk of segments of `length` that are held.
    pub(super) fn held(&self, chunk: usize, length: usize) -> impl Iterator<Item = usize> {
        self.slots(self.parts.held, chunk, length)
    }

    fn slots(&self, maps: usize, chunk: usize, length: usize) -> impl Iterator<Item = usize> + use<> {
        let mut map = [0; MAP_BYTES];
        self.memory.read(maps + chunk * MAP_BYTES, &mut map);
        (0..CHUNK_GRANULES / length)
            .filter(move |slot| map[slot * length / 8] >> (slot * length % 8) & 1 == 1)
    }

    fn map_at(&self, chunk: usize) -> usize {
        self.parts.maps + chunk * MAP_BYTES
    }

    fn state_at(&self, chunk: usize) -> usize {
        self.parts.states + chunk * STATE_BYTES
    }

    fn owner_at(&self, chunk: usize, length: usize, slot: usize) -> usize {
        let slots = (CHUNK_GRANULES / length).next_power_of_two().max(MIN_SLOTS);
        self.parts.owners + owners_before(self.chunks, slots) + (chunk * slots + slot) * 8
    }

    /// A word that has room.
    fn word(&self, at: usize) -> u64 {
        self.memory.number(at).load(Relaxed)
    }

    /// A word that need not have room.
    fn read_word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        self.memory.read(at, &mut word);
        u64::from_le_bytes(word)
    }
}

/// The word of maps from `maps` on where a granule's bit is, and the bit.
fn bit_at(maps: usize, granule: usize) -> (usize, u64) {
    (maps + granule / 64 * 8, 1 << (granule % 64))
}

/// What a chunk is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// Granules of each of its segments; 0 while it is free.
    pub(super) length: usize,
    /// Segments in use, those that are held among them.
    pub(super) used: usize,
    /// Segments that are held, or are about to be.
    pub(super) held: usize,
}

impl State {
    fn of(word: u64) -> Self {
        let part = |shift: u32, most: usize| {
            usize::try_from(word >> shift & 0xffff).map_or(most, |part| part.min(most))
        };
        Self { length: part(0, MAX_GRANULES), used: part(16, CHUNK_GRANULES), held: part(32, CHUNK_GRANULES) }
    }

    fn word(self) -> u64 {
        let Self { length, used, held } = if self.used == 0 { Self::default() } else { self };
        length as u64 | (used as u64) << 16 | (held as u64) << 32
    }
}

/// What says that accounts are whole, and of this generation.
fn check(accounts: &[u8], generation: u64) -> u64 {
    crc32c::crc32c_append(crc32c::crc32c(accounts), &generation.to_le_bytes()).into()
}

fn stamp(generation: u64, what: Noted) -> u64 {
    generation << 1 | what as u64
}
