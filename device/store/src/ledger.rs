//! The ledger: what the entries of a store in memory add up to, kept beside them, so that the
//! worker after one that was killed reads no index.
//!
//! The rules:
//! * The ledger says which segments are in use and by which block (the *occupancy*), and, as of
//!   some moment, the *accounts*: numbers that the device counts of entries, and which blocks are
//!   lost. Which units of the image have room is kept there too, by [`Memory`].
//! * A *generation* begins when accounts are written, at a moment when nothing is being changed.
//!   Its number is stored last, in one store of the processor.
//! * Before the occupancy of a segment or an entry changes, that is noted in the generation's
//!   *log*: the block, and what its entry was, or which segment is taken for it.
//! * So all that may differ from the ledger is named in the log, between whatever stores the
//!   process is killed. The next worker looks at the entries of the blocks in the log: a segment in
//!   the log is in use if one of them names it, and the accounts change by what became of each. To
//!   do that twice does no harm.
//! * The ledger counts for the worker right after the one that wrote it, as the holder of both
//!   numbers them. If another was between, maybe of a program that knows no ledger, if the log is
//!   full, or the accounts are not those of the tables, all entries are looked at.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, Release},
            fence,
        },
    },
};

use nix::fcntl::{FallocateFlags, fallocate};

use super::{
    StoreError,
    entry::{ENTRY_BYTES, Entry, Version},
    geometry::{CHUNK_GRANULES, MAX_GRANULES},
    index::Index,
    memory::{BitsAt, Memory, UNIT_BYTES},
};
use crate::GRANULE_BYTES;

const MAGIC: u64 = u64::from_le_bytes(*b"LAMLEDG\x01");
/// Records of a log.
const LOG_RECORDS: u64 = 1 << 14;
/// Records after which a new generation should begin.
const LOG_FULL: u64 = LOG_RECORDS / 2;
/// Bytes of a record: its stamp, the block, and an entry or a segment.
const RECORD_BYTES: usize = 16 + ENTRY_BYTES;
/// Bytes of each of the two places for accounts: 700 000 tensors' and more.
const ACCOUNTS_BYTES: usize = 16 << 20;
/// Bytes of the chunks' states: the length of a chunk's segments, and how many are in use.
const STATE_BYTES: usize = 8;
/// Bytes of a chunk's map: a bit for the first granule of each segment in use.
const MAP_BYTES: usize = CHUNK_GRANULES / 8;
/// Segments of the chunks with the fewest.
const MIN_SLOTS: usize = 16;
const _: () = assert!(CHUNK_GRANULES / MAX_GRANULES < MIN_SLOTS && MIN_SLOTS * 64 == CHUNK_GRANULES);

// Words of the header.
const MAGIC_AT: usize = 0;
const WORKER_AT: usize = 8;
/// The generation; 0 if the ledger does not count.
const GENERATION_AT: usize = 16;
/// Records that were begun.
const NOTED_AT: usize = 24;
/// Chunks that were ever used are before this one.
const CHUNKS_USED_AT: usize = 32;
const BLOCKS_AT: usize = 40;
const CHUNKS_AT: usize = 48;
/// The last generation that there was.
const LAST_AT: usize = 56;
/// Of both places for accounts: words of the accounts, lost blocks, CRC-32C of both and of the
/// generation.
const PLACES_AT: [usize; 2] = [64, 128];
const HOLDER_AT: usize = 192;
/// Of each part of the image: 1 once its bits say what there is.
const BITS_KNOWN_AT: [usize; 3] = [200, 208, 216];
const HEADER_BYTES: usize = 4096;

/// What is noted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Noted {
    /// A block's entry as it was.
    Entry = 0,
    /// A segment that is taken for a block, and its granules.
    Segment = 1,
}

/// Where the parts are, from the ledger's beginning on.
#[derive(Clone, Debug)]
struct Parts {
    accounts: usize,
    log: usize,
    states: usize,
    maps: usize,
    owners: usize,
    bits: usize,
    end: usize,
}

/// A process that serves an image, after others of the same holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// A number that no other holder has that had the image since the host was started.
    pub holder: u64,
    /// How many workers its holder had before.
    pub number: u64,
}

/// Where a ledger lies, and whether what it says counts for this process.
#[derive(Clone, Debug)]
pub(super) struct LedgerPlace {
    start: u64,
    parts: Parts,
    chunks: usize,
    follows: bool,
    /// Where the bits of parts of the image are.
    bits: [BitsAt; 3],
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

impl LedgerPlace {
    /// Finds or makes the ledger of `worker`, behind the `end` of an image in memory with so many
    /// blocks and chunks, and with parts of these sizes of which it keeps bits.
    pub(super) fn open(
        file: &Arc<File>,
        end: u64,
        (blocks, chunks): (u64, usize),
        parts: &[u64; 3],
        worker: Worker,
    ) -> Result<Self, StoreError> {
        let places = Parts::of(chunks, parts);
        let length = end + places.end as u64;
        let no_room = |source| StoreError::NoRoom { what: "ledger", source };
        if file.metadata().map_err(no_room)?.len() < length {
            file.set_len(length).map_err(no_room)?;
        }
        let header = Memory::part("ledger", file, end, HEADER_BYTES as u64, None)?;
        let word = |at| header.number(at).load(Relaxed);
        header.ensure(0..HEADER_BYTES)?;
        let sizes = [(BLOCKS_AT, blocks), (CHUNKS_AT, chunks as u64)];
        let same = word(MAGIC_AT) == MAGIC && sizes.iter().all(|(at, size)| word(*at) == *size);
        let follows =
            same && word(HOLDER_AT) == worker.holder && word(WORKER_AT).checked_add(1) == Some(worker.number);
        if !follows {
            header.write(MAGIC_AT, &0_u64.to_le_bytes());
            let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let range = (end + HEADER_BYTES as u64, (places.end - HEADER_BYTES) as u64);
            fallocate(file.as_fd(), hole, signed(range.0), signed(range.1))
                .map_err(|why| no_room(why.into()))?;
            let zeros = [GENERATION_AT, NOTED_AT, CHUNKS_USED_AT, LAST_AT].into_iter().chain(BITS_KNOWN_AT);
            for (at, size) in sizes.into_iter().chain(zeros.map(|at| (at, 0))) {
                header.write(at, &size.to_le_bytes());
            }
        }
        // A store into the bits takes no room then.
        let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(file.as_fd(), keep, signed(end + places.bits as u64), signed(all_bits_bytes(parts)))
            .map_err(|why| no_room(why.into()))?;
        let mut next = end + places.bits as u64;
        let bits = std::array::from_fn(|part| {
            let offset = next;
            next += 2 * bits_bytes(parts[part]);
            // Who made them may have died meanwhile.
            let known = word(BITS_KNOWN_AT[part]) == 1;
            BitsAt { offset, known, known_at: end + BITS_KNOWN_AT[part] as u64 }
        });
        fence(Release);
        header.write(HOLDER_AT, &worker.holder.to_le_bytes());
        header.write(WORKER_AT, &worker.number.to_le_bytes());
        header.write(MAGIC_AT, &MAGIC.to_le_bytes());
        Ok(Self { start: end, parts: places, chunks, follows, bits })
    }

    /// Where the bits of part number `part` are.
    pub(super) fn bits(&self, part: usize) -> BitsAt {
        self.bits[part]
    }

    /// The ledger there.
    pub(super) fn ledger(&self, file: &Arc<File>) -> Result<Ledger, StoreError> {
        let bytes = self.parts.bits as u64;
        let memory = Memory::part("ledger", file, self.start, bytes, None)?;
        let generation = memory.number(GENERATION_AT).load(Relaxed);
        let generation = AtomicU64::new(if self.follows { generation } else { 0 });
        let Self { parts, chunks, follows, .. } = self.clone();
        Ok(Ledger {
            memory,
            parts,
            chunks,
            generation,
            broken: AtomicBool::new(false),
            follows,
            taken: AtomicBool::new(false),
        })
    }
}

impl Parts {
    fn of(chunks: usize, parts: &[u64; 3]) -> Self {
        let mut end = HEADER_BYTES;
        let mut next = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(UNIT_BYTES);
            start
        };
        let _header = next(0);
        let accounts = next(2 * ACCOUNTS_BYTES);
        let log = next(usize::try_from(LOG_RECORDS).expect("a few thousand") * RECORD_BYTES);
        let states = next(chunks * STATE_BYTES);
        let maps = next(chunks * MAP_BYTES);
        // Chunks of 16, 32, … 1024 segments lie apart, each kind with room for all.
        let owners = next(owners_before(chunks, CHUNK_GRANULES * 2));
        let bits = next(usize::try_from(all_bits_bytes(parts)).expect("less than the parts"));
        Self { accounts, log, states, maps, owners, bits, end }
    }
}

/// Bytes of bits for the units of a part.
pub(super) fn bits_bytes(part: u64) -> u64 {
    // Whole pages, as they are mapped.
    part.div_ceil(UNIT_BYTES as u64 * 8).max(1).next_multiple_of(4096)
}

/// Bytes of the bits of all parts, of which each has two sets.
fn all_bits_bytes(parts: &[u64; 3]) -> u64 {
    parts.iter().map(|part| 2 * bits_bytes(*part)).sum()
}

/// Bytes of the owners of all chunks with room for fewer than `slots` segments, a power of two.
const fn owners_before(chunks: usize, slots: usize) -> usize {
    chunks * (slots - MIN_SLOTS) * 8
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
    fn break_off(&self) {
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

    /// Notes that a segment is in use by `block` from now on.
    pub(super) fn occupy(&self, chunk: &State, granule: usize, block: u64) {
        self.note_segment(block, granule, chunk.length);
        if self.write_slot(chunk, granule, Some(block)).is_err() {
            self.break_off();
        }
    }

    /// Notes that a segment is free. It is in the log: as the one of an entry that was replaced, or
    /// as one that was taken and is given back.
    pub(super) fn vacate(&self, chunk: &State, granule: usize) {
        if self.write_slot(chunk, granule, None).is_err() {
            self.break_off();
        }
    }

    /// Writes the state of the chunk of a segment, and whose that is.
    fn write_slot(&self, state: &State, granule: usize, owner: Option<u64>) -> Result<(), StoreError> {
        let (chunk, inside) = (granule / CHUNK_GRANULES, granule % CHUNK_GRANULES);
        let used = chunk as u64 + 1;
        if self.word(CHUNKS_USED_AT) < used {
            self.memory.write(CHUNKS_USED_AT, &used.to_le_bytes());
        }
        let map = self.map_at(chunk) + inside / 64 * 8;
        self.memory.ensure(map..map + 8)?;
        let bit = 1 << (inside % 64);
        let bits = self.word(map);
        if let Some(block) = owner {
            let at = self.owner_at(chunk, state.length, inside / state.length);
            self.memory.ensure(at..at + 8)?;
            self.memory.write(at, &block.to_le_bytes());
            self.memory.write(map, &(bits | bit).to_le_bytes());
        } else {
            self.memory.write(map, &(bits & !bit).to_le_bytes());
        }
        self.write_state(chunk, state)
    }

    fn write_state(&self, chunk: usize, state: &State) -> Result<(), StoreError> {
        let at = self.state_at(chunk);
        self.memory.ensure(at..at + STATE_BYTES)?;
        let length = if state.used == 0 { 0 } else { state.length };
        let word = length as u64 | (state.used as u64) << 32;
        self.memory.write(at, &word.to_le_bytes());
        Ok(())
    }

    /// Writes all of a chunk that was found: its segments' slots and owners.
    pub(super) fn adopt(&self, chunk: usize, length: usize, owners: impl Iterator<Item = (usize, u64)>) {
        let mut state = State { length, used: 0 };
        for (slot, block) in owners {
            state.used += 1;
            if self.write_slot(&state, chunk * CHUNK_GRANULES + slot * length, Some(block)).is_err() {
                return self.break_off();
            }
        }
    }

    /// Chunks that were ever used are before this one.
    pub(super) fn chunks_used(&self) -> usize {
        usize::try_from(self.word(CHUNKS_USED_AT)).unwrap_or(usize::MAX).min(self.chunks)
    }

    /// Forgets whose segments are whose: that is found anew.
    pub(super) fn vacate_all(&self) {
        for (chunk, state) in self.states().into_iter().enumerate() {
            let map = self.map_at(chunk)..self.map_at(chunk) + MAP_BYTES;
            let written = self.memory.ensure(map.clone()).and_then(|()| {
                self.memory.write(map.start, &[0; MAP_BYTES]);
                if state.length > 0 { self.write_state(chunk, &State { used: 0, ..state }) } else { Ok(()) }
            });
            if written.is_err() {
                return self.break_off();
            }
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
        let mut map = [0; MAP_BYTES];
        self.memory.read(self.map_at(chunk), &mut map);
        let is_used = |slot: &usize| map[slot * length / 8] >> (slot * length % 8) & 1 == 1;
        let used = (0..CHUNK_GRANULES / length).filter(is_used);
        used.map(|slot| (slot, self.read_word(self.owner_at(chunk, length, slot)))).collect()
    }

    fn state_at(&self, chunk: usize) -> usize {
        self.parts.states + chunk * STATE_BYTES
    }

    fn map_at(&self, chunk: usize) -> usize {
        self.parts.maps + chunk * MAP_BYTES
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

    /// The accounts of this generation, and its lost blocks; `None` if they do not check.
    fn accounts(&self) -> Option<(Vec<u64>, Vec<u64>)> {
        let generation = self.generation.load(Relaxed);
        let place = usize::from(generation % 2 == 1);
        let word = |number: usize| self.word(PLACES_AT[place] + 8 * number);
        let words = |number| usize::try_from(word(number)).ok().filter(|words| *words <= ACCOUNTS_BYTES / 8);
        let (accounts, lost) = (words(0)?, words(1)?);
        let all = (accounts + lost) * 8;
        if all > ACCOUNTS_BYTES {
            return None;
        }
        let mut bytes = vec![0; all];
        self.memory.read(self.parts.accounts + place * ACCOUNTS_BYTES, &mut bytes);
        if check(&bytes, generation) != word(2) {
            return None;
        }
        let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut words: Vec<_> = words.collect();
        let lost = words.split_off(accounts);
        Some((words, lost))
    }

    /// What was noted in this generation, in order: what, the block, and what of it.
    fn noted(&self) -> Vec<(Noted, u64, [u8; ENTRY_BYTES])> {
        let generation = self.generation.load(Relaxed);
        let count = self.word(NOTED_AT).min(LOG_RECORDS);
        let records = 0..usize::try_from(count).expect("a few thousand");
        let record = |number: usize| {
            let mut record = [0; RECORD_BYTES];
            self.memory.read(self.parts.log + number * RECORD_BYTES, &mut record);
            let word = |at: usize| u64::from_le_bytes(*record[at..].first_chunk().expect("eight bytes"));
            let what = [Noted::Entry, Noted::Segment];
            let what = what.into_iter().find(|what| stamp(generation, *what) == word(0))?;
            Some((what, word(8), *record[16..].first_chunk().expect("an entry")))
        };
        records.filter_map(record).collect()
    }

    /// What the store is, if `accept` takes the accounts; the occupancy says so too from now on.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`], which cannot be where the process before had room.
    pub(super) fn take_over(
        &self,
        index: &Index,
        version: Version,
        accept: impl FnOnce(&[u64]) -> bool,
    ) -> Result<Option<Found>, StoreError> {
        let Some((accounts, lost)) = self.accounts().filter(|(accounts, _)| accept(accounts)) else {
            return Ok(None);
        };
        let mut before: BTreeMap<u64, Option<Entry>> = BTreeMap::new();
        let mut doubtful = Vec::new();
        let granules = |entry: &Entry| {
            let place = entry.place.as_ref()?;
            let length = place.stored.bytes().div_ceil(GRANULE_BYTES);
            let granule = usize::try_from(place.segment).ok()?;
            let inside = granule / CHUNK_GRANULES < self.chunks && length <= MAX_GRANULES;
            (length > 0 && inside).then_some((granule, length))
        };
        for (what, block, body) in self.noted() {
            if block >= index.blocks() {
                return Ok(None);
            }
            match what {
                Noted::Entry => {
                    let old = Entry::decode(version, &body).unwrap_or_default();
                    doubtful.extend(granules(&old).map(|(granule, _)| granule));
                    before.entry(block).or_default().get_or_insert(old);
                }
                Noted::Segment => {
                    let granule = u64::from_le_bytes(*body.first_chunk().expect("eight bytes"));
                    let granule = usize::try_from(granule).ok();
                    let Some(granule) = granule.filter(|at| at / CHUNK_GRANULES < self.chunks) else {
                        return Ok(None);
                    };
                    doubtful.push(granule);
                    before.entry(block).or_default();
                }
            }
        }
        // No doubtful segment is in use, but those that entries name.
        let mut chunks: BTreeMap<usize, State> = BTreeMap::new();
        for granule in doubtful {
            let chunk = granule / CHUNK_GRANULES;
            chunks.entry(chunk).or_insert_with(|| self.state(chunk));
            let map = self.map_at(chunk) + granule % CHUNK_GRANULES / 64 * 8;
            self.memory.ensure(map..map + 8)?;
            let bits = self.word(map) & !(1 << (granule % 64));
            self.memory.write(map, &bits.to_le_bytes());
        }
        let mut lost: std::collections::BTreeSet<u64> = lost.into_iter().collect();
        let mut changed = Vec::new();
        for (block, old) in before {
            let new = index.get(block);
            if new.is_err() {
                lost.insert(block)
            } else {
                lost.remove(&block)
            };
            let new = new.unwrap_or_default();
            if let Some((granule, length)) = granules(&new) {
                let chunk = granule / CHUNK_GRANULES;
                let state = State { length, ..self.state(chunk) };
                chunks.insert(chunk, state);
                self.write_slot(&state, granule, Some(block))?;
            }
            if let Some(old) = old {
                changed.push(Changed { block, old, new });
            }
        }
        for (chunk, state) in chunks {
            let mut map = [0; MAP_BYTES];
            self.memory.read(self.map_at(chunk), &mut map);
            let used = map.iter().map(|byte| byte.count_ones() as usize).sum();
            self.write_state(chunk, &State { used, ..state })?;
        }
        self.taken.store(true, Relaxed);
        Ok(Some(Found { accounts, changed, lost: lost.into_iter().collect() }))
    }
}

/// What a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// Granules of each of its segments; 0 while it is free.
    pub(super) length: usize,
    /// Segments in use.
    pub(super) used: usize,
}

impl State {
    fn of(word: u64) -> Self {
        let half = |word: u64| usize::try_from(word & u64::from(u32::MAX)).expect("32 bits");
        let (length, used) = (half(word), half(word >> 32));
        Self { length: length.min(MAX_GRANULES), used: used.min(CHUNK_GRANULES) }
    }
}

/// What says that accounts are whole, and of this generation.
fn check(accounts: &[u8], generation: u64) -> u64 {
    crc32c::crc32c_append(crc32c::crc32c(accounts), &generation.to_le_bytes()).into()
}

fn stamp(generation: u64, what: Noted) -> u64 {
    generation << 1 | what as u64
}

fn signed(at: u64) -> i64 {
    i64::try_from(at).expect("an image's size is checked")
}
