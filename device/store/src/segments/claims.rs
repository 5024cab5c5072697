//! Claims: which segments the entries name, found out by several threads at once when a store is
//! opened.
//!
//! A slot is taken in one atomic step. A chunk is what the first claim in it makes it; whoever
//! claims a slot of another length, or one that is taken, is refused.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{CHUNK_GRANULES, MAX_GRANULES, chunks};
use crate::GRANULE_BYTES;

/// Chunks of a group: a store that is mostly empty has few groups, and an image that names chunks
/// far apart costs little for each.
const GROUP: usize = 64;

/// What was claimed so far.
pub(crate) struct Claims {
    groups: Vec<OnceLock<Group>>,
    most_chunks: usize,
}

type Group = Box<[OnceLock<Slots>]>;

/// The slots of a chunk.
struct Slots {
    /// Granules of each.
    length: usize,
    /// Those taken, a bit each.
    taken: [AtomicU64; CHUNK_GRANULES / 64],
    /// By slot: the block that has it.
    blocks: Box<[AtomicU64]>,
}

/// A chunk with claims.
pub(super) struct Claimants {
    pub(super) chunk: usize,
    pub(super) length: usize,
    pub(super) slots: chunks::Slots,
    pub(super) blocks: Vec<u64>,
}

/// Whether an entry's segment could be claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claimed {
    Yes,
    /// Another entry has it, or part of it.
    Twice,
    /// There can be no such segment.
    Nowhere,
}

impl Claims {
    pub(super) fn new(most_chunks: usize) -> Self {
        let groups = (0..most_chunks.div_ceil(GROUP)).map(|_| OnceLock::new()).collect();
        Self { groups, most_chunks }
    }

    /// Takes the segment that `block`'s entry names.
    pub(crate) fn claim(&self, segment: u64, bytes: usize, block: u64) -> Claimed {
        let length = bytes.div_ceil(GRANULE_BYTES);
        if length == 0 {
            return Claimed::Yes;
        }
        let Ok(granule) = usize::try_from(segment) else { return Claimed::Nowhere };
        let (chunk, inside) = (granule / CHUNK_GRANULES, granule % CHUNK_GRANULES);
        let slot = inside / length;
        let possible = length <= MAX_GRANULES && inside % length == 0 && slot < CHUNK_GRANULES / length;
        if chunk >= self.most_chunks || !possible {
            return Claimed::Nowhere;
        }
        let group = self.groups[chunk / GROUP].get_or_init(|| (0..GROUP).map(|_| OnceLock::new()).collect());
        let slots = group[chunk % GROUP].get_or_init(|| Slots::new(length));
        let bit = 1 << (slot % 64);
        if slots.length != length || slots.taken[slot / 64].fetch_or(bit, Relaxed) & bit != 0 {
            return Claimed::Twice;
        }
        slots.blocks[slot].store(block, Relaxed);
        Claimed::Yes
    }

    /// The chunks that have claims, in their order.
    pub(super) fn into_chunks(self) -> impl Iterator<Item = Claimants> {
        let groups = self.groups.into_iter().enumerate();
        let groups = groups.filter_map(|(group, chunks)| Some((group, chunks.into_inner()?)));
        let chunks = groups.flat_map(|(group, chunks)| {
            chunks.into_iter().enumerate().map(move |(chunk, slots)| (group * GROUP + chunk, slots))
        });
        chunks.filter_map(|(chunk, slots)| {
            let Slots { length, taken, blocks } = slots.into_inner()?;
            let slots = chunks::Slots::new(taken.map(AtomicU64::into_inner));
            let blocks = blocks.into_iter().map(AtomicU64::into_inner).collect();
            Some(Claimants { chunk, length, slots, blocks })
        })
    }
}

impl Slots {
    fn new(length: usize) -> Self {
        let blocks = (0..CHUNK_GRANULES / length).map(|_| AtomicU64::new(0)).collect();
        Self { length, taken: [const { AtomicU64::new(0) }; CHUNK_GRANULES / 64], blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_taken_once_and_where_there_is_one() {
        let claims = Claims::new(3);
        let chunk = CHUNK_GRANULES as u64;
        assert_eq!(claims.claim(chunk, 2 * GRANULE_BYTES - 5, 7), Claimed::Yes);
        assert_eq!(claims.claim(chunk, 2 * GRANULE_BYTES, 8), Claimed::Twice);
        assert_eq!(claims.claim(chunk + 2, 2 * GRANULE_BYTES, 9), Claimed::Yes);
        // Of another length than the chunk's; inside of a slot; behind the last slot; past the
        // store; too long.
        assert_eq!(claims.claim(chunk + 6, 3 * GRANULE_BYTES, 10), Claimed::Twice);
        assert_eq!(claims.claim(chunk + 5, 2 * GRANULE_BYTES, 10), Claimed::Nowhere);
        assert_eq!(claims.claim(chunk - 1, 3 * GRANULE_BYTES, 10), Claimed::Nowhere);
        assert_eq!(claims.claim(3 * chunk, GRANULE_BYTES, 10), Claimed::Nowhere);
        assert_eq!(claims.claim(0, (MAX_GRANULES + 1) * GRANULE_BYTES, 10), Claimed::Nowhere);
        assert_eq!(claims.claim(u64::MAX, 0, 10), Claimed::Yes);
        let chunks: Vec<_> = claims.into_chunks().collect();
        let [Claimants { chunk: 1, length: 2, slots, blocks }] = &chunks[..] else { panic!("one chunk") };
        assert!(slots.iter_ones().eq(0..2));
        assert_eq!((&blocks[..2], blocks.len()), (&[7, 9][..], CHUNK_GRANULES / 2));
    }

    #[test]
    fn of_all_who_claim_a_slot_at_once_one_gets_it() {
        let claims = Claims::new(1);
        let won: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let claim = |block| {
                let claims = &claims;
                move || {
                    let all = 0..CHUNK_GRANULES as u64;
                    all.filter(|slot| claims.claim(*slot, 1, block) == Claimed::Yes).collect()
                }
            };
            let threads: Vec<_> = (1..=4).map(|block| scope.spawn(claim(block))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(won.iter().map(Vec::len).sum::<usize>(), CHUNK_GRANULES);
        let chunk = claims.into_chunks().next().unwrap();
        for (block, slots) in (1..).zip(won) {
            assert!(slots.iter().all(|slot| chunk.blocks[usize::try_from(*slot).unwrap()] == block));
        }
    }
}
