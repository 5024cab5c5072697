//! Which slots of which chunks are in use, and by which block.
//!
//! Chunks of one length that have free slots are listed by how full they are. New segments go to
//! the fullest, tidying empties the emptiest.

use std::{ops::Range, sync::Arc};

use super::{
    CHUNK_GRANULES, For, MAX_GRANULES, SLACK_CHUNKS, Untidy,
    chunks::{Chunk, Chunks},
    claims::Claimants,
    held::Held,
    kept::Kept,
    reserve,
};
use crate::{
    GRANULE_BYTES, StoreError,
    ledger::{Ledger, State},
};

/// Lists of a length's chunks: the first is the emptiest.
const LISTS: usize = 8;

pub(super) struct Allocator {
    chunks: Chunks,
    /// Chunks that hold nothing and did before: those that kept their room, which are taken first,
    /// and the others.
    warm: Vec<usize>,
    cold: Vec<usize>,
    /// Chunks that may keep their room.
    most_warm: usize,
    /// Runs of chunks that never held anything, the first of them last.
    unopened: Vec<Range<usize>>,
    /// Chunks that hold segments.
    held_chunks: usize,
    /// By length in granules.
    lengths: Vec<Length>,
    used_granules: u64,
    held: Held,
    /// Chunks of which all was moved elsewhere, and that take nothing more until what is held in
    /// them is let go.
    emptied: Vec<usize>,
    kept: Kept,
    /// Who is told of each segment that is taken or freed.
    ledger: Option<Arc<Ledger>>,
}

/// What there is of one length.
#[derive(Clone, Default)]
struct Length {
    /// Slots of its chunks.
    slots: usize,
    used: usize,
    /// Chunks with a slot to spare, by how full they are.
    partial: [Vec<usize>; LISTS],
}

impl Allocator {
    pub(super) fn new(most_chunks: usize, ledger: Option<Arc<Ledger>>, most_warm: usize) -> Self {
        let lengths = vec![Length::default(); MAX_GRANULES + 1];
        let chunks = Chunks::new(most_chunks);
        let unopened = chunks.free_runs();
        Self {
            chunks,
            warm: Vec::new(),
            cold: Vec::new(),
            most_warm,
            unopened,
            held_chunks: 0,
            lengths,
            used_granules: 0,
            held: Held::default(),
            emptied: Vec::new(),
            kept: Kept::default(),
            ledger,
        }
    }

    /// Takes over what the ledger says is in use or held. Chunks without a free slot are looked at
    /// when somebody needs them.
    pub(super) fn take_over(&mut self, ledger: &Arc<Ledger>) {
        let states = ledger.states();
        self.chunks.lie_in(Arc::clone(ledger), states.len());
        let unopened = states.len()..self.chunks.count();
        self.unopened = Some(unopened).filter(|run| !run.is_empty()).into_iter().collect();
        for (index, State { length, used, held }) in states.into_iter().enumerate().rev() {
            if length == 0 {
                self.cold.push(index);
                continue;
            }
            if held > 0 {
                let granule = |slot| index * CHUNK_GRANULES + slot * length;
                ledger.held(index, length).for_each(|slot| self.held.add(granule(slot), length));
            }
            self.held_chunks += 1;
            self.used_granules += (used * length) as u64;
            self.lengths[length].slots += CHUNK_GRANULES / length;
            self.lengths[length].used += used;
            if used < CHUNK_GRANULES / length {
                self.relist(index);
            }
        }
    }

    /// Has the ledger forget all, before it is told of what was found.
    pub(super) fn vacate_ledger(&self) {
        if let Some(ledger) = &self.ledger {
            ledger.vacate_all();
        }
    }

    pub(super) fn most_chunks(&self) -> usize {
        self.chunks.count()
    }

    pub(super) fn used_bytes(&self) -> u64 {
        (self.used_granules - self.held.granules) * GRANULE_BYTES as u64
    }

    /// What is kept for some blocks.
    pub(super) fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }

    /// What is held of it.
    pub(super) fn held(&mut self) -> &mut Held {
        &mut self.held
    }

    /// Bytes of segments that are held.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.held.granules * GRANULE_BYTES as u64
    }

    pub(super) fn held_bytes(&self) -> u64 {
        (self.held_chunks * CHUNK_GRANULES * GRANULE_BYTES) as u64
    }

    /// Chunks that are kept for what takes no more than before.
    pub(super) fn reserved_bytes(&self) -> u64 {
        (reserve(self.chunks.count()) * CHUNK_GRANULES * GRANULE_BYTES) as u64
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        (self.chunks.count() * CHUNK_GRANULES * GRANULE_BYTES) as u64
    }

    /// A slot of `length` for `block`: its first granule, or `None` if there is none. `room` makes
    /// room for a chunk.
    pub(super) fn take(
        &mut self,
        length: usize,
        block: u64,
        what: For,
        room: impl FnOnce(usize, For) -> Result<(), StoreError>,
    ) -> Result<Option<usize>, StoreError> {
        let what = if self.kept.covers(block, length) { For::NoMore } else { what };
        if what == For::More && !self.has_room_for_more(length, self.kept.chunks_beside(block)) {
            return Ok(None);
        }
        let fullest = self.lengths[length].partial.iter().rev().find_map(|list| list.last().copied());
        let index = match fullest {
            Some(index) => index,
            None => match self.open(length, what, room)? {
                Some(index) => index,
                None => return Ok(None),
            },
        };
        let slot = self.chunks[index].first_free();
        self.occupy(index, slot, block);
        self.kept.taken(block, length, what == For::More);
        self.relist(index);
        Ok(Some(index * CHUNK_GRANULES + slot * length))
    }

    /// Takes over what was claimed of a chunk, each once.
    pub(super) fn adopt(&mut self, Claimants { chunk: index, length, slots, blocks }: Claimants) {
        let used = slots.count_ones();
        self.lengths[length].slots += CHUNK_GRANULES / length;
        self.lengths[length].used += used;
        self.used_granules += (used * length) as u64;
        self.held_chunks += 1;
        let chunk = Chunk { length, used, slots, blocks, ..Chunk::default() };
        if let Some(ledger) = &self.ledger {
            ledger.adopt(index, length, chunk.slots.iter_ones(), &chunk.blocks);
        }
        *self.chunks.make(index) = chunk;
    }

    /// Lists every chunk, after claims.
    pub(super) fn list_all(&mut self) {
        self.unopened = self.chunks.free_runs();
        self.unopened.reverse();
        for index in self.chunks.in_use() {
            self.relist(index);
        }
    }

    /// Frees a slot, now or when no copy of the index can name it any more. `release` gives a
    /// chunk's room back.
    pub(super) fn free(&mut self, granule: usize, length: usize, release: impl FnOnce(usize)) {
        let chunk = &self.chunks[granule / CHUNK_GRANULES];
        assert_eq!(chunk.length, length, "a segment is freed with the length it was taken with");
        let is_young = chunk.is_young(granule % CHUNK_GRANULES / length, self.held.epoch);
        if is_young || !self.held.holds() {
            self.give_back(granule, length, release);
        } else {
            self.hold(granule, length);
        }
    }

    /// Keeps a slot that a copy of the index may name, and no entry does.
    pub(super) fn hold(&mut self, granule: usize, length: usize) {
        self.held.add(granule, length);
        if let Some(ledger) = &self.ledger {
            ledger.hold(granule);
        }
    }

    /// Frees a slot that was held until now, if there is one: whether there was.
    pub(super) fn let_go(&mut self, release: impl FnOnce(usize)) -> bool {
        let Some((granule, length)) = self.held.next() else { return false };
        self.give_back(granule, length, release);
        true
    }

    /// Frees a slot. `release` gives a chunk's room back.
    pub(super) fn give_back(&mut self, granule: usize, length: usize, release: impl FnOnce(usize)) {
        let index = granule / CHUNK_GRANULES;
        let chunk = &mut self.chunks[index];
        assert_eq!(chunk.length, length, "a segment is freed with the length it was taken with");
        let slot = granule % CHUNK_GRANULES / length;
        assert!(chunk.slots[slot], "a segment is freed once");
        chunk.slots.set(slot, false);
        chunk.used -= 1;
        self.used_granules -= length as u64;
        self.lengths[length].used -= 1;
        self.kept.freed(chunk.blocks[slot], length);
        if let Some(ledger) = &self.ledger {
            ledger.vacate(granule);
        }
        if chunk.used == 0 {
            self.unlist(index);
            self.lengths[length].slots -= CHUNK_GRANULES / length;
            self.chunks[index] = Chunk::default();
            self.held_chunks -= 1;
            if self.warm.len() < self.most_warm {
                self.warm.push(index);
            } else {
                release(index);
                self.cold.push(index);
            }
        } else {
            self.relist(index);
        }
    }

    /// Has free chunks keep no room: `release` gives it back.
    pub(super) fn cool(&mut self, release: impl Fn(usize)) {
        self.warm.iter().for_each(|index| release(*index));
        self.cold.append(&mut self.warm);
    }

    /// Whether there are too many free slots of a length.
    pub(super) fn is_untidy(&self, length: usize) -> bool {
        let Length { slots, used, .. } = self.lengths[length];
        let slack = SLACK_CHUNKS * (CHUNK_GRANULES / length);
        slots - used > slack.max(slots / 4)
    }

    pub(super) fn untidy(&mut self, length: usize) -> Option<Untidy> {
        if self.is_untidy(length) { self.hold_back(length) } else { None }
    }

    /// As [`Self::untidy`], of the length with most to gain: there are free slots for all that is
    /// in the chunk.
    pub(super) fn sparse(&mut self) -> Option<Untidy> {
        let gain = |length: &usize| {
            let Length { slots, used, .. } = self.lengths[*length];
            (slots - used) / (CHUNK_GRANULES / length)
        };
        let length = (1..=MAX_GRANULES).max_by_key(gain).filter(|length| gain(length) > 0)?;
        self.hold_back(length)
    }

    /// Takes the emptiest chunk of a length out of use.
    fn hold_back(&mut self, length: usize) -> Option<Untidy> {
        let chunk = *self.lengths[length].partial.iter().find_map(|list| list.first())?;
        self.unlist(chunk);
        self.chunks[chunk].held_back = true;
        Some(Untidy { chunk, segments: self.chunks[chunk].segments(chunk) })
    }

    /// Lets a chunk be used again that was held back, if it is not one of which all was moved and
    /// held.
    pub(super) fn put_back(&mut self, index: usize, moved: bool) {
        if moved && self.held.holds() && self.chunks[index].length > 0 {
            self.emptied.push(index);
            return;
        }
        self.chunks[index].held_back = false;
        if self.chunks[index].length > 0 {
            self.relist(index);
        }
    }

    /// Lets chunks be used again in which something is left.
    pub(super) fn put_emptied_back(&mut self) {
        for index in std::mem::take(&mut self.emptied) {
            self.put_back(index, false);
        }
    }

    /// Chunks that hold nothing.
    fn left(&self) -> usize {
        self.chunks.count() - self.held_chunks
    }

    /// Whether the reserve and so many chunks would be left if one more segment of `length` were
    /// taken and then all were moved together.
    fn has_room_for_more(&self, length: usize, beside: usize) -> bool {
        let reserved = reserve(self.chunks.count()) + beside;
        self.left() > reserved || {
            let packed = |length: usize, more: usize| {
                (self.lengths[length].used + more).div_ceil(CHUNK_GRANULES / length)
            };
            let all: usize = (1..=MAX_GRANULES).map(|of| packed(of, usize::from(of == length))).sum();
            all <= self.chunks.count().saturating_sub(reserved)
        }
    }

    fn occupy(&mut self, index: usize, slot: usize, block: u64) {
        let chunk = &mut self.chunks[index];
        chunk.slots.set(slot, true);
        chunk.blocks[slot] = block;
        chunk.is_born(slot, self.held.epoch);
        chunk.used += 1;
        self.used_granules += chunk.length as u64;
        self.lengths[chunk.length].used += 1;
        if let Some(ledger) = &self.ledger {
            ledger.occupy(chunk.length, index * CHUNK_GRANULES + slot * chunk.length, block);
        }
    }

    /// Makes a free chunk one of segments of `length`.
    fn open(
        &mut self,
        length: usize,
        what: For,
        room: impl FnOnce(usize, For) -> Result<(), StoreError>,
    ) -> Result<Option<usize>, StoreError> {
        if what == For::More && self.left() <= reserve(self.chunks.count()) {
            return Ok(None);
        }
        let unopened = self.unopened.last().map(|run| run.start);
        let free = self.warm.last().or(self.cold.last()).copied();
        let Some(index) = free.or(unopened) else { return Ok(None) };
        room(index, what)?;
        if self.warm.pop().or_else(|| self.cold.pop()).is_none()
            && let Some(run) = self.unopened.last_mut()
        {
            run.start += 1;
            if run.start >= run.end {
                self.unopened.pop();
            }
        }
        self.assign(index, length);
        Ok(Some(index))
    }

    fn assign(&mut self, index: usize, length: usize) {
        let slots = CHUNK_GRANULES / length;
        self.held_chunks += 1;
        let chunk = self.chunks.make(index);
        chunk.length = length;
        chunk.blocks.resize(slots, 0);
        self.lengths[length].slots += slots;
    }

    /// Puts a chunk into the list where it belongs.
    fn relist(&mut self, index: usize) {
        let chunk = &self.chunks[index];
        let list = (chunk.used < chunk.capacity() && !chunk.held_back)
            .then(|| chunk.used * LISTS / chunk.capacity());
        if list == chunk.listed.map(|(list, _)| list) {
            return;
        }
        self.unlist(index);
        if let Some(list) = list {
            let partial = &mut self.lengths[self.chunks[index].length].partial[list];
            self.chunks[index].listed = Some((list, partial.len()));
            partial.push(index);
        }
    }

    fn unlist(&mut self, index: usize) {
        if let Some((list, at)) = self.chunks[index].listed.take() {
            let partial = &mut self.lengths[self.chunks[index].length].partial[list];
            partial.swap_remove(at);
            if let Some(moved) = partial.get(at) {
                self.chunks[*moved].listed = Some((list, at));
            }
        }
    }
}
