//! Segments: runs of 64-byte granules that hold bundles.
//!
//! The rules:
//! * Memory is handed out in chunks of [`CHUNK_GRANULES`]. A chunk holds segments of one length
//!   only, so freeing never leaves gaps of odd sizes; when its last segment goes, the chunk is free
//!   for any length again.
//! * A segment belongs to the entry that names it. The caller holds the stripe of that entry's
//!   block, so nobody writes a segment that somebody reads.
//! * Which segments are in use is nowhere written down but in the entries: a store that is opened
//!   [claims](Claims) what they name.
//! * Free slots of one length are at most a quarter of that length's slots, or [`SLACK_CHUNKS`]
//!   chunks if that is more, once the store has [tidied](super::Store) up: the bound of
//!   fragmentation.
//! * The last chunks are a [`reserve`] for bundles that take the place of others at least as long,
//!   and for those that are moved: a full store can be rewritten and tidied up. The bound: moving
//!   can leave each length one chunk that is not full, so a reserve of a chunk for each length is
//!   never used up by rewriting.
//! * What [some blocks](kept) give back may be kept for them.
//! * A segment that is freed may still be named by a copy of the index: then it is [held](held),
//!   and counts as in use where chunks are counted.
//! * A bundle without bytes (every plane constant) takes no segment; its place is granule 0 and is
//!   never looked at.

mod allocator;
mod chunks;
mod claims;
mod held;
mod kept;

use std::{ops::Range, sync::Arc};

use parking_lot::Mutex;

use self::allocator::Allocator;
pub(super) use self::claims::{Claimed, Claims};
pub use super::geometry::CHUNK_GRANULES;
pub(super) use super::geometry::MAX_GRANULES;
use lamina_codec::block::MAX_BUNDLE;

use super::{
    GRANULE_BYTES, StoreError, geometry::chunks_in, host_memory::For, ledger::Ledger, memory::Memory,
    memory::UNIT_BYTES,
};

/// A checkpoint should be made when more than this part of the store is held.
const HELD_PART: u64 = 8;
/// Free chunks that keep their room for the next segments, of a store in memory, 64 MiB, and in a
/// file. To make room in memory costs more than to code what goes there.
pub(super) const WARM_IN_MEMORY: usize = 1024;
pub(super) const WARM_ON_DISK: usize = 64;
/// Segments that are let go at once.
const LET_GO: usize = 256;
/// Chunks of one length that may be free in it, however few of that length there are.
pub const SLACK_CHUNKS: usize = 2;

/// Chunks, of so many, that only [`For::NoMore`] may open: a 32nd, and one for each length where
/// that is not more than an eighth.
pub(super) fn reserve(chunks: usize) -> usize {
    (chunks / 32).max(MAX_GRANULES.min(chunks / 8))
}

/// All segments of a device.
pub struct Segments {
    memory: Memory,
    allocator: Mutex<Allocator>,
}

impl Segments {
    /// Bytes of memory for at least `bytes` of segments.
    pub(super) fn bytes(bytes: u64) -> u64 {
        bytes.max(1).checked_next_multiple_of(UNIT_BYTES as u64).unwrap_or(u64::MAX)
    }

    /// No segments yet in `memory`, of `bytes`. The ledger is told of each from now on. So many
    /// free chunks keep their room.
    pub(super) fn new(memory: Memory, bytes: u64, ledger: Option<Arc<Ledger>>, warm: usize) -> Self {
        Self { memory, allocator: Mutex::new(Allocator::new(chunks_in(bytes), ledger, warm)) }
    }

    /// What the ledger says is in use or held, and everything else is free.
    pub(super) fn take_over(&self, ledger: &Arc<Ledger>) {
        self.allocator.lock().take_over(ledger);
    }

    /// Stores `bytes` in a segment of their own, for `block`: its first granule.
    pub(super) fn store(&self, bytes: &[u8], block: u64, what: For) -> Result<u64, StoreError> {
        let mut granule = 0;
        self.store_all(std::iter::once((block, bytes)), what, |found| granule = found)?;
        Ok(granule)
    }

    /// Stores the bytes of each block in a segment of their own and tells their first granules in
    /// order, or stores nothing.
    pub(super) fn store_all<'b>(
        &self,
        blocks: impl Iterator<Item = (u64, &'b [u8])> + Clone,
        what: For,
        mut told: impl FnMut(u64),
    ) -> Result<(), StoreError> {
        let room =
            |chunk: usize, what| self.memory.ensure_anew(chunk * UNIT_BYTES..(chunk + 1) * UNIT_BYTES, what);
        let mut taken = Vec::with_capacity(blocks.size_hint().0);
        let mut allocator = self.allocator.lock();
        for (block, bytes) in blocks.clone() {
            let length = granules(bytes.len());
            let granule = if length == 0 { Ok(Some(0)) } else { allocator.take(length, block, what, room) };
            let full = |allocator: &Allocator| StoreError::Full {
                wanted: (length * GRANULE_BYTES) as u64,
                used: allocator.used_bytes(),
                capacity: allocator.capacity_bytes(),
            };
            match granule.and_then(|granule| granule.ok_or_else(|| full(&allocator))) {
                Ok(granule) => taken.push(granule),
                Err(why) => {
                    for ((_, bytes), granule) in blocks.zip(taken) {
                        self.give_back_to(&mut allocator, granule, bytes.len());
                    }
                    return Err(why);
                }
            }
        }
        drop(allocator);
        for ((_, bytes), granule) in blocks.zip(taken) {
            if !bytes.is_empty() {
                self.memory.write(granule * GRANULE_BYTES, bytes);
            }
            told(granule as u64);
        }
        Ok(())
    }

    /// No claims yet on the segments, when a store is opened.
    pub(super) fn claims(&self) -> Claims {
        Claims::new(self.allocator.lock().most_chunks())
    }

    /// What was claimed is in use, and everything else free from now on.
    pub(super) fn claimed(&self, claims: Claims) {
        let mut allocator = self.allocator.lock();
        allocator.vacate_ledger();
        claims.into_chunks().for_each(|chunk| allocator.adopt(chunk));
        allocator.list_all();
    }

    /// Frees segments that hold bundles of so many bytes, which no entry names any more.
    pub(super) fn free(&self, segments: impl Iterator<Item = (u64, usize)>) -> Freed {
        let mut allocator = self.allocator.lock();
        let mut lengths = [false; MAX_GRANULES + 1];
        for (segment, bytes) in segments {
            let length = granules(bytes);
            if length > 0 {
                allocator.free(index(segment), length, |chunk| self.memory.release(chunk));
                lengths[length] = true;
            }
        }
        let untidy = (1..=MAX_GRANULES).filter(|length| lengths[*length] && allocator.is_untidy(*length));
        Freed {
            untidy: untidy.collect(),
            much_held: allocator.kept_bytes() > allocator.capacity_bytes() / HELD_PART,
        }
    }

    /// Frees the segments that hold bundles of so many bytes, which no entry ever named.
    pub(super) fn give_back(&self, segments: impl Iterator<Item = (u64, usize)>) {
        let mut allocator = self.allocator.lock();
        segments.for_each(|(segment, bytes)| self.give_back_to(&mut allocator, index(segment), bytes));
    }

    fn give_back_to(&self, allocator: &mut Allocator, granule: usize, bytes: usize) {
        let length = granules(bytes);
        if length > 0 {
            allocator.give_back(granule, length, |chunk| self.memory.release(chunk));
        }
    }

    /// From now on a segment that is freed is held until a checkpoint was made; so are these.
    pub(super) fn make_checkpoints(&self, held: &[(u64, usize)]) {
        let mut allocator = self.allocator.lock();
        allocator.held().checkpointed(0);
        for (segment, bytes) in held {
            allocator.hold(index(*segment), granules(*bytes));
        }
    }

    /// Notes that the index is copied as it is now: the number of this cut. No entry is being
    /// changed.
    pub(super) fn cut(&self) -> u64 {
        self.allocator.lock().held().cut()
    }

    /// Notes that a checkpoint was made of this cut.
    pub(super) fn checkpointed(&self, cut: u64) {
        self.allocator.lock().held().checkpointed(cut);
    }

    /// Notes that a snapshot is being saved of this cut, or none.
    pub(super) fn snapshot(&self, cut: Option<u64>) {
        self.allocator.lock().held().snapshot(cut);
    }

    /// Frees what need not be held any more: how many segments that were.
    pub(super) fn let_go(&self) -> usize {
        let mut all = 0;
        loop {
            // Others take segments meanwhile.
            let mut allocator = self.allocator.lock();
            let some =
                (0..LET_GO).take_while(|_| allocator.let_go(|chunk| self.memory.release(chunk))).count();
            all += some;
            if some < LET_GO {
                allocator.put_emptied_back();
                return all;
            }
        }
    }

    /// From now on what these blocks give back is kept for them.
    pub(super) fn keep(&self, blocks: Vec<Range<u64>>) {
        self.allocator.lock().kept().open(blocks);
    }

    /// What they give back from now on is everybody's.
    pub(super) fn keep_no_more(&self) {
        self.allocator.lock().kept().close();
    }

    /// Gives back the room that free chunks kept.
    pub(super) fn cool(&self) {
        self.allocator.lock().cool(|chunk| self.memory.release(chunk));
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn held_segments(&self) -> Vec<(usize, usize)> {
        self.allocator.lock().held().all()
    }

    /// Bytes that are held.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.allocator.lock().kept_bytes()
    }

    /// The segments of the emptiest chunk of this length in granules, each with its block, if there
    /// are too many free slots of that length. The chunk takes no more segments until it was
    /// [put back](Segments::put_back).
    pub(super) fn untidy(&self, length: usize) -> Option<Untidy> {
        self.allocator.lock().untidy(length)
    }

    /// As [`Self::untidy`], of any length.
    pub(super) fn any_untidy(&self) -> Option<Untidy> {
        let mut allocator = self.allocator.lock();
        (1..=MAX_GRANULES).find_map(|length| allocator.untidy(length))
    }

    /// The segments of the chunk that is emptied most cheaply to have one more, if there are free
    /// slots of its length for all of them; it is held back as by [`Self::untidy`].
    pub(super) fn sparse(&self) -> Option<Untidy> {
        self.allocator.lock().sparse()
    }

    /// Lets the chunk be used again, if there is anything left in it; `moved` says that all of it
    /// was moved.
    pub(super) fn put_back(&self, untidy: &Untidy, moved: bool) {
        self.allocator.lock().put_back(untidy.chunk, moved);
    }

    pub(super) fn read(&self, segment: u64, at: usize, out: &mut [u8]) {
        self.memory.read(index(segment) * GRANULE_BYTES + at, out);
    }

    /// Prefetches `bytes` of a segment: a hint, never an error. There need be no such segment.
    pub(super) fn prefetch(&self, segment: u64, bytes: Range<u64>) {
        let length = bytes.end.min(MAX_BUNDLE as u64).saturating_sub(bytes.start);
        let at = segment.checked_mul(GRANULE_BYTES as u64).and_then(|at| at.checked_add(bytes.start));
        if let (Some(Ok(at)), Ok(length)) = (at.map(usize::try_from), usize::try_from(length)) {
            self.memory.prefetch(at, length);
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn write(&self, segment: u64, at: usize, data: &[u8]) {
        self.memory.write(index(segment) * GRANULE_BYTES + at, data);
    }

    /// Bytes of segments in use.
    pub fn used_bytes(&self) -> u64 {
        self.allocator.lock().used_bytes()
    }

    /// Bytes of chunks that hold segments.
    pub fn held_bytes(&self) -> u64 {
        self.allocator.lock().held_bytes()
    }

    /// Chunks that hold segments, and all that may without the reserve.
    pub(super) fn chunks(&self) -> (u64, u64) {
        let allocator = self.allocator.lock();
        let chunk = UNIT_BYTES as u64;
        let usable = allocator.capacity_bytes() - allocator.reserved_bytes();
        (allocator.held_bytes() / chunk, usable / chunk)
    }

    /// Bytes there may be.
    pub fn capacity_bytes(&self) -> u64 {
        self.allocator.lock().capacity_bytes()
    }
}

/// What it led to that segments were freed.
pub(super) struct Freed {
    /// Lengths in granules of which there are too many free slots.
    pub(super) untidy: Vec<usize>,
    /// Whether so much is held that a checkpoint should be made.
    pub(super) much_held: bool,
}

/// A chunk to be emptied.
pub(super) struct Untidy {
    chunk: usize,
    /// First granules and blocks.
    pub(super) segments: Vec<(u64, u64)>,
}

fn granules(bytes: usize) -> usize {
    bytes.div_ceil(GRANULE_BYTES)
}

fn index(segment: u64) -> usize {
    usize::try_from(segment).expect("a segment of this store")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_says_how_large_the_reserve_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operation.md");
        let document = std::fs::read_to_string(path).unwrap();
        for (store, kept) in [(8, 1), (32, 4), (256, 8)] {
            let chunks = |mib: usize| (mib << 20) / UNIT_BYTES;
            assert_eq!(reserve(chunks(store)), chunks(kept), "of {store}M");
            assert!(document.contains(&format!("of {store}M {kept} MiB")), "of {store}M");
        }
        let most = format!("at most {MAX_GRANULES} chunks of {} KiB", UNIT_BYTES >> 10);
        assert!(document.contains(&most) && document.contains("beyond 130 MiB a 32nd"), "{most}");
        let turn = (130 << 20) / UNIT_BYTES;
        assert!(reserve(turn) == MAX_GRANULES && reserve(turn + 32) > MAX_GRANULES);
    }
}
