//! What a ledger says of a store when the next worker opens it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering::Relaxed,
};

use super::{
    ACCOUNTS_BYTES, Changed, Found, LOG_RECORDS, Ledger, MAP_BYTES, NOTED_AT, Noted, PLACES_AT, RECORD_BYTES,
    State, check, stamp,
};
use crate::{
    GRANULE_BYTES, StoreError,
    entry::{ENTRY_BYTES, Entry, Version},
    geometry::{CHUNK_GRANULES, MAX_GRANULES},
    index::Index,
};

/// A bit for the first granule of each segment of a chunk.
type Map = [u64; MAP_BYTES / 8];

/// A chunk of which it is found out what is in use.
struct Doubted {
    was: State,
    /// Granules of each segment; 0 if none is known to be in use.
    length: usize,
    /// Segments in use as the ledger says, and those that are held of them.
    map: Map,
    held: Map,
    /// Segments in the log that are in use, and by no entry that was looked at.
    dead: Map,
    /// Segments that entries name, each with its block.
    named: Vec<(usize, u64)>,
}

impl Doubted {
    /// Doubts a segment: it is in the log.
    fn doubt(&mut self, granule: usize) {
        let (word, bit) = place(granule);
        self.dead[word] |= self.map[word] & !self.held[word] & bit;
    }

    /// Says that the entry of `block` names a segment of `length` granules: whether it can.
    fn name(&mut self, granule: usize, length: usize, block: u64) -> bool {
        if self.length != 0 && self.length != length
            || !fits(granule, length)
            || self.named.iter().any(|(named, _)| *named == granule)
        {
            return false;
        }
        self.length = length;
        self.named.push((granule, block));
        true
    }

    /// What is in use and what is held, now that all entries in question were looked at.
    fn settle(mut self) -> Settled {
        let (mut map, mut held) = (self.map, self.held);
        for (granule, _) in &self.named {
            let (word, bit) = place(*granule);
            map[word] |= bit;
            held[word] &= !bit;
            self.dead[word] &= !bit;
        }
        for granule in ones(&self.dead) {
            let (word, bit) = place(granule);
            if self.length > 0 && fits(granule, self.length) {
                held[word] |= bit;
            } else {
                map[word] &= !bit;
            }
        }
        for (held, map) in held.iter_mut().zip(map) {
            // It was being let go.
            *held &= map;
        }
        let count = |map: &Map| map.iter().map(|word| word.count_ones() as usize).sum();
        let state = State { length: self.length, used: count(&map), held: count(&held) };
        Settled { state, map, held, was: self }
    }
}

/// What a chunk is.
struct Settled {
    state: State,
    map: Map,
    held: Map,
    was: Doubted,
}

/// What a log says.
#[derive(Default)]
struct Logged {
    /// The blocks in it, each with its entry before, if that may have changed.
    before: BTreeMap<u64, Option<Entry>>,
    /// First granules of segments that may have been taken or freed.
    doubtful: Vec<usize>,
}

impl Ledger {
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

    /// What the log says, if it can be.
    fn read_log(&self, index: &Index, version: Version) -> Option<Logged> {
        let mut logged = Logged::default();
        for (what, block, body) in self.noted() {
            if block >= index.blocks() {
                return None;
            }
            match what {
                Noted::Entry => {
                    let old = Entry::decode(version, &body).unwrap_or_default();
                    logged.doubtful.extend(self.segment_of(&old).map(|(granule, _)| granule));
                    logged.before.entry(block).or_default().get_or_insert(old);
                }
                Noted::Segment => {
                    let granule = u64::from_le_bytes(*body.first_chunk().expect("eight bytes"));
                    let granule = usize::try_from(granule).ok();
                    logged.doubtful.push(granule.filter(|at| at / CHUNK_GRANULES < self.chunks)?);
                    logged.before.entry(block).or_default();
                }
            }
        }
        Some(logged)
    }

    /// What the store is, if `accept` takes the accounts and the log makes sense; the occupancy
    /// says so too from now on. Whatever of the log was in use and is not any more is held.
    pub(crate) fn take_over(
        &self,
        index: &Index,
        version: Version,
        accept: impl FnOnce(&[u64]) -> bool,
    ) -> Option<Found> {
        let (accounts, lost) = self.accounts().filter(|(accounts, _)| accept(accounts))?;
        let Logged { before, doubtful } = self.read_log(index, version)?;
        let mut chunks: BTreeMap<usize, Doubted> = BTreeMap::new();
        for granule in doubtful {
            let chunk = granule / CHUNK_GRANULES;
            chunks.entry(chunk).or_insert_with(|| self.doubted(chunk)).doubt(granule);
        }
        let mut lost: BTreeSet<u64> = lost.into_iter().collect();
        let mut changed = Vec::new();
        for (block, old) in before {
            let new = index.get(block);
            if new.is_err() {
                lost.insert(block)
            } else {
                lost.remove(&block)
            };
            let new = new.unwrap_or_default();
            if let Some((granule, length)) = self.segment_of(&new) {
                let chunk = granule / CHUNK_GRANULES;
                let doubted = chunks.entry(chunk).or_insert_with(|| self.doubted(chunk));
                if !doubted.name(granule, length, block) {
                    return None;
                }
            }
            if let Some(old) = old {
                changed.push(Changed { block, old, new });
            }
        }
        // A killed process may have been about to free one that was held.
        for (chunk, state) in self.states().into_iter().enumerate() {
            if state.held > 0 && !chunks.contains_key(&chunk) {
                self.settle(chunk, self.doubted(chunk)).ok()?;
            }
        }
        for (chunk, doubted) in chunks {
            self.settle(chunk, doubted).ok()?;
        }
        self.taken.store(true, Relaxed);
        Some(Found { accounts, changed, lost: lost.into_iter().collect() })
    }

    /// The segment that an entry names, if there is one: its first granule, and how many.
    fn segment_of(&self, entry: &Entry) -> Option<(usize, usize)> {
        let place = entry.place.as_ref()?;
        let length = place.stored.bytes().div_ceil(GRANULE_BYTES);
        let granule = usize::try_from(place.segment).ok()?;
        let inside = granule / CHUNK_GRANULES < self.chunks && length <= MAX_GRANULES;
        (length > 0 && inside).then_some((granule, length))
    }

    fn doubted(&self, chunk: usize) -> Doubted {
        let was = self.state(chunk);
        let map = |maps| {
            let mut bytes = [0; MAP_BYTES];
            self.memory.read(maps + chunk * MAP_BYTES, &mut bytes);
            std::array::from_fn(|word| {
                u64::from_le_bytes(*bytes[word * 8..].first_chunk().expect("eight bytes"))
            })
        };
        let (map, held) = (map(self.parts.maps), map(self.parts.held));
        Doubted { was, length: was.length, map, held, dead: Map::default(), named: Vec::new() }
    }

    /// Writes what became of a chunk. Cut short, it is found out again: what is in use is still
    /// named, and what is held was in use.
    fn settle(&self, chunk: usize, doubted: Doubted) -> Result<(), StoreError> {
        let Settled { state, map, held, was } = doubted.settle();
        for (granule, block) in &was.named {
            self.write_owner(state.length, *granule, *block)?;
        }
        if held != was.held {
            let most = state.held.max(was.was.held).max(1);
            self.write_state(chunk, State { used: state.used.max(1), held: most, ..state })?;
        }
        for (maps, is, was) in [(self.parts.held, held, was.held), (self.parts.maps, map, was.map)] {
            for word in (0..is.len()).filter(|word| is[*word] != was[*word]) {
                let at = maps + chunk * MAP_BYTES + word * 8;
                self.memory.ensure(at..at + 8)?;
                self.memory.write(at, &is[word].to_le_bytes());
            }
        }
        if self.state(chunk) != state {
            self.write_state(chunk, state)?;
        }
        Ok(())
    }
}

/// Where in a chunk's map the bit of a granule is: the word, and the bit in it.
fn place(granule: usize) -> (usize, u64) {
    (granule % CHUNK_GRANULES / 64, 1 << (granule % 64))
}

/// Whether a segment of `length` granules can begin there.
fn fits(granule: usize, length: usize) -> bool {
    let inside = granule % CHUNK_GRANULES;
    inside.is_multiple_of(length) && inside / length < CHUNK_GRANULES / length
}

/// The granules of a map's bits.
fn ones(map: &Map) -> impl Iterator<Item = usize> + use<> {
    let map = *map;
    (0..CHUNK_GRANULES).filter(move |granule| map[granule / 64] >> (granule % 64) & 1 == 1)
}
