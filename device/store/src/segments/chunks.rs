//! What is known of each chunk: a table with room for all chunks of a store that takes memory only
//! near those that were used.
//!
//! An image may name segments anywhere in a store of terabytes, and what that costs is in
//! proportion to the segments named.

use std::{
    cell::OnceCell,
    ops::{Index, IndexMut, Range},
    sync::Arc,
};

use bitvec::prelude::{BitArray, Lsb0};

use super::CHUNK_GRANULES;
use crate::ledger::{Ledger, State};

/// Chunks of a page of the table.
const PAGE_CHUNKS: usize = 64;

/// A bit for each slot that a chunk can have.
pub(super) type Slots = BitArray<[u64; CHUNK_GRANULES / 64], Lsb0>;

/// A chunk and its segments.
#[derive(Clone, Default)]
pub(super) struct Chunk {
    /// Granules of each of its segments; 0 while free.
    pub(super) length: usize,
    pub(super) used: usize,
    /// Slots in use.
    pub(super) slots: Slots,
    /// Slots taken since the last cut, if that is still [`Self::epoch`].
    pub(super) young: Slots,
    /// The cut that `young` is of.
    pub(super) epoch: u64,
    /// By slot: the block whose segment it is.
    pub(super) blocks: Vec<u64>,
    /// Its list, and its place there.
    pub(super) listed: Option<(usize, usize)>,
    /// Being emptied: not to be listed.
    pub(super) held_back: bool,
}

impl Chunk {
    pub(super) const fn capacity(&self) -> usize {
        CHUNK_GRANULES / self.length
    }

    /// Notes that a slot was taken behind cut `epoch`.
    pub(super) fn is_born(&mut self, slot: usize, epoch: u64) {
        if self.epoch != epoch {
            (self.epoch, self.young) = (epoch, Slots::ZERO);
        }
        self.young.set(slot, true);
    }

    /// Whether no cut came since a slot was taken, so that no copy of the index names it.
    pub(super) fn is_young(&self, slot: usize, epoch: u64) -> bool {
        self.epoch == epoch && self.young[slot]
    }

    pub(super) fn first_free(&self) -> usize {
        self.slots.first_zero().expect("a listed chunk has a free slot")
    }

    /// First granules and blocks of its segments.
    pub(super) fn segments(&self, index: usize) -> Vec<(u64, u64)> {
        let granule = |slot: usize| (index * CHUNK_GRANULES + slot * self.length) as u64;
        self.owners().map(|(slot, block)| (granule(slot), block)).collect()
    }

    /// Slots in use, and the block of each.
    pub(super) fn owners(&self) -> impl Iterator<Item = (usize, u64)> {
        self.slots.iter_ones().map(|slot| (slot, self.blocks[slot]))
    }
}

/// Chunks that are looked at together.
type Page = Box<[Chunk; PAGE_CHUNKS]>;

/// All chunks of a store. One that was not [made](Chunks::make) is free and cannot be asked for.
pub(super) struct Chunks {
    pages: Vec<OnceCell<Page>>,
    count: usize,
    /// What says of chunks what they are that were not made.
    ledger: Option<Arc<Ledger>>,
}

impl Chunks {
    pub(super) fn new(count: usize) -> Self {
        Self { pages: Vec::new(), count, ledger: None }
    }

    /// Chunks there may be.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The first `used` chunks are what the ledger says.
    pub(super) fn lie_in(&mut self, ledger: Arc<Ledger>, used: usize) {
        self.pages.resize_with(used.div_ceil(PAGE_CHUNKS), OnceCell::new);
        self.ledger = Some(ledger);
    }

    fn page(&self, page: usize) -> &Page {
        self.pages[page].get_or_init(|| {
            let first = page * PAGE_CHUNKS;
            let chunk =
                |at: usize| self.ledger.as_ref().map_or_else(Chunk::default, |l| chunk(l, first + at));
            Box::new(std::array::from_fn(chunk))
        })
    }

    /// The chunk `index`, which is made if it was not.
    pub(super) fn make(&mut self, index: usize) -> &mut Chunk {
        let page = index / PAGE_CHUNKS;
        if page >= self.pages.len() {
            self.pages.resize_with(page + 1, OnceCell::new);
        }
        &mut self[index]
    }

    /// Runs of free chunks, in order.
    pub(super) fn free_runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        let mut add = |run: Range<usize>| match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ if run.is_empty() => {}
            _ => runs.push(run),
        };
        for (first, page) in (0..).step_by(PAGE_CHUNKS).zip(&self.pages) {
            let end = self.count.min(first + PAGE_CHUNKS);
            match page.get() {
                None => add(first..end),
                Some(page) => {
                    for (index, _) in (first..end).zip(page.iter()).filter(|(_, chunk)| chunk.length == 0) {
                        add(index..index + 1);
                    }
                }
            }
        }
        add(self.count.min(self.pages.len() * PAGE_CHUNKS)..self.count);
        runs
    }

    /// The chunks that hold segments.
    pub(super) fn in_use(&self) -> Vec<usize> {
        let pages = (0..).step_by(PAGE_CHUNKS).zip(&self.pages);
        let made = pages.filter_map(|(first, page)| Some((first, page.get()?)));
        let chunks = made.flat_map(|(first, page)| (first..).zip(page.iter()));
        chunks.filter(|(_, chunk)| chunk.length > 0).map(|(index, _)| index).collect()
    }
}

impl Index<usize> for Chunks {
    type Output = Chunk;

    fn index(&self, index: usize) -> &Chunk {
        &self.page(index / PAGE_CHUNKS)[index % PAGE_CHUNKS]
    }
}

impl IndexMut<usize> for Chunks {
    fn index_mut(&mut self, index: usize) -> &mut Chunk {
        self.page(index / PAGE_CHUNKS);
        let page = self.pages[index / PAGE_CHUNKS].get_mut().expect("as above");
        &mut page[index % PAGE_CHUNKS]
    }
}

/// A chunk as the ledger says it is.
fn chunk(ledger: &Ledger, index: usize) -> Chunk {
    let State { length, used, .. } = ledger.state(index);
    if length == 0 {
        return Chunk::default();
    }
    let (mut slots, mut blocks) = (Slots::ZERO, vec![0; CHUNK_GRANULES / length]);
    for (slot, block) in ledger.segments(index, length) {
        slots.set(slot, true);
        blocks[slot] = block;
    }
    Chunk { length, used, slots, blocks, ..Chunk::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_far_away_costs_only_its_own_page() {
        let mut chunks = Chunks::new(1 << 24);
        assert_eq!(chunks.free_runs(), vec![0..1 << 24; 1]);
        for index in [3, 4, (1 << 24) - 1] {
            chunks.make(index).length = 1;
        }
        assert_eq!(chunks.pages.iter().filter(|page| page.get().is_some()).count(), 2);
        assert_eq!(chunks.free_runs(), [0..3, 5..(1 << 24) - 1]);
        assert_eq!(chunks.in_use(), [3, 4, (1 << 24) - 1]);
    }
}
