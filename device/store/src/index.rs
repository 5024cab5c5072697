//! The plane index: one entry a block, in device memory, and copies of it as it was at some moment.
//!
//! A copy is made of pages of [`PAGE_BYTES`]. At the moment itself those that have to be copied are
//! *frozen*; each is copied by who changes it first, or by who makes the copy.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed, Release},
    },
};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::{
    StoreError, checkpoint,
    checkpoint::Head,
    entry::{ENTRY_BYTES, Entry, Version},
    image::Image,
    memory::Memory,
};

/// How many entries behind one that is looked at are brought into the processor's caches.
const AHEAD: usize = 4;
/// Bytes of a page that is copied whole.
pub(super) const PAGE_BYTES: usize = 4096;

/// All entries of a device, in block order. The caller holds the block's stripe.
pub(super) struct Index {
    memory: Memory,
    /// What its entries are of.
    version: Version,
    blocks: u64,
    /// Who is told before anything changes, and the index of each checkpoint, if there are any.
    checkpoints: Option<(Arc<Head>, [Arc<Memory>; 2])>,
    watching: RwLock<Watching>,
}

/// Who has to see a change. It is held for reading by who changes entries, all those that belong
/// together at once, and for writing at the moment that a copy shows.
pub(super) struct Watching {
    /// Pages that changed since each checkpoint was made.
    changed: Option<[Pages; 2]>,
    /// What is copied.
    checkpoint: Option<Arc<Frozen>>,
    snapshot: Option<Arc<Frozen>>,
}

/// A copy that is being made.
pub(super) struct Frozen {
    /// Pages that are not copied yet. No one changes them.
    left: Pages,
    /// Held while a page is copied.
    copying: Mutex<()>,
    copy: Arc<Memory>,
}

/// A set of pages; takes memory only where there are some.
struct Pages(Memory);

impl Pages {
    fn new(blocks: u64) -> Result<Self, StoreError> {
        let pages = Index::bytes(blocks).div_ceil(PAGE_BYTES as u64);
        Ok(Self(Memory::reserve("pages of the plane index", pages.div_ceil(64).max(1) * 8)?))
    }

    fn add(&self, page: usize) {
        let (word, bit) = (self.0.number(page / 64 * 8), 1 << (page % 64));
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Relaxed);
        }
    }

    fn has(&self, page: usize) -> bool {
        self.0.number(page / 64 * 8).load(Acquire) & 1 << (page % 64) != 0
    }

    fn remove(&self, page: usize) {
        self.0.number(page / 64 * 8).fetch_and(!(1 << (page % 64)), Release);
    }

    fn fill(&self) {
        (0..self.0.bytes()).step_by(8).for_each(|at| self.0.number(at).store(u64::MAX, Relaxed));
    }

    fn add_all(&self, range: Range<usize>) {
        (range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES)).for_each(|page| self.add(page));
    }

    fn all(&self) -> impl Iterator<Item = usize> {
        (0..self.0.bytes() / 8).flat_map(|word| {
            let bits = self.0.number(word * 8).load(Relaxed);
            (0..64).filter(move |bit| bits & 1 << bit != 0).map(move |bit| word * 64 + bit)
        })
    }
}

impl Frozen {
    /// Copies a page, if nobody has yet.
    fn keep(&self, index: &Memory, page: usize) {
        if !self.left.has(page) {
            return;
        }
        let _one = self.copying.lock();
        if self.left.has(page) {
            let (mut is, mut was) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
            let at = page * PAGE_BYTES;
            let bytes = PAGE_BYTES.min(index.bytes() - at);
            index.read(at, &mut is[..bytes]);
            self.copy.read(at, &mut was[..bytes]);
            // Nobody writes to a disk what is there.
            if is != was {
                self.copy.write(at, &is[..bytes]);
            }
            self.left.remove(page);
        }
    }
}

impl Index {
    /// An index in `memory` that nobody makes checkpoints of.
    pub(super) fn new(memory: Memory, version: Version, blocks: u64) -> Self {
        let watching = Watching { changed: None, checkpoint: None, snapshot: None };
        Self { memory, version, blocks, checkpoints: None, watching: RwLock::new(watching) }
    }

    /// The index of an image. Each of its pages may differ from that of a checkpoint.
    pub(super) fn open(image: &Image, blocks: u64) -> Result<Self, StoreError> {
        let mut index = Self::new(image.index()?, image.superblock().version, blocks);
        let Some(head) = image.head() else { return Ok(index) };
        let copies = image.copies()?;
        checkpoint::ensure_copies(&index.memory, &copies)?;
        let changed = [Pages::new(blocks)?, Pages::new(blocks)?];
        for (changed, copy) in changed.iter().zip(&copies) {
            index.memory.all_touched().chain(copy.all_touched()).for_each(|range| changed.add_all(range));
        }
        index.watching.get_mut().changed = Some(changed);
        index.checkpoints = Some((head, copies.map(Arc::new)));
        Ok(index)
    }

    /// The bytes that the entries of so many blocks take.
    pub(super) fn bytes(blocks: u64) -> u64 {
        blocks.saturating_mul(ENTRY_BYTES as u64)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn get(&self, block: u64) -> Result<Entry, StoreError> {
        Entry::decode(self.version, &self.raw(block)).map_err(|why| StoreError::Entry { block, why })
    }

    /// The segment that the entry of `block` names if it is intact, without holding the stripe;
    /// entries behind it come into the processor's caches.
    pub(super) fn glance(&self, block: u64) -> Option<u64> {
        let at = at(block);
        self.memory.prefetch(at + AHEAD * ENTRY_BYTES, ENTRY_BYTES);
        self.memory.glance(at).map(|word| self.version.segment(word))
    }

    /// The version of its entries.
    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// The entry's bytes, whatever they are.
    pub(super) fn raw(&self, block: u64) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        self.memory.read(at(block), &mut bytes);
        bytes
    }

    pub(super) fn read_bytes(&self, at: usize, out: &mut [u8]) {
        self.memory.read(at, out);
    }

    /// Whether `block` holds nothing, and its entry takes no room yet.
    pub(super) fn is_hole(&self, block: u64) -> bool {
        let range = at(block)..at(block + 1);
        self.memory.may_be_hole(range) && self.raw(block) == [0; ENTRY_BYTES]
    }

    /// The first of these blocks whose entries may be anything but zeros, some that follow one
    /// another.
    pub(super) fn touched(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        let found = self.memory.touched(at(blocks.start)..at(blocks.end))?;
        Some((found.start / ENTRY_BYTES) as u64..(found.end / ENTRY_BYTES) as u64)
    }

    /// The first block from `block` on whose entry may take room; those before it hold nothing.
    pub(super) fn hole_end(&self, block: u64) -> u64 {
        (self.memory.hole_end(at(block)) / ENTRY_BYTES) as u64
    }

    /// Makes sure that the entries of these blocks can be written, and copied.
    pub(super) fn ensure(&self, blocks: Range<u64>) -> Result<(), StoreError> {
        let range = at(blocks.start)..at(blocks.end);
        if let Some((_, copies)) = &self.checkpoints {
            copies.iter().try_for_each(|copy| copy.ensure(range.clone()))?;
        }
        self.memory.ensure(range)
    }

    /// Says that entries are about to change: until this is dropped, all that are put belong
    /// together.
    pub(super) fn watch(&self) -> RwLockReadGuard<'_, Watching> {
        let watching = self.watching.read();
        if let Some((head, _)) = &self.checkpoints {
            head.touch();
        }
        watching
    }

    /// Writes an entry, for which there is room.
    pub(super) fn put(&self, watching: &Watching, block: u64, entry: &[u8; ENTRY_BYTES]) {
        let page = at(block) / PAGE_BYTES;
        let copies = [&watching.checkpoint, &watching.snapshot];
        copies.into_iter().flatten().for_each(|frozen| frozen.keep(&self.memory, page));
        for changed in watching.changed.iter().flatten() {
            changed.add(page);
        }
        self.memory.write(at(block), entry);
    }

    /// Begins to make the index of checkpoint `copy` what this is when `now` runs: no entry is
    /// being changed then.
    pub(super) fn freeze<T>(&self, copy: usize, now: impl FnOnce() -> T) -> Result<T, StoreError> {
        let (_, copies) = self.checkpoints.as_ref().expect("only an image with checkpoints has them made");
        let none = Pages::new(self.blocks)?;
        let mut watching = self.watching.write();
        let changed = watching.changed.as_mut().expect("as above");
        let left = std::mem::replace(&mut changed[copy], none);
        let frozen = Frozen { left, copying: Mutex::new(()), copy: Arc::clone(&copies[copy]) };
        watching.checkpoint = Some(Arc::new(frozen));
        Ok(now())
    }

    /// Ends what [`Self::freeze`] began.
    pub(super) fn thaw(&self) {
        let frozen = self.watching.read().checkpoint.clone();
        if let Some(frozen) = frozen {
            frozen.left.all().for_each(|page| frozen.keep(&self.memory, page));
        }
        self.watching.write().checkpoint = None;
    }

    /// Ranges of blocks whose entries may be anything but zeros.
    pub(super) fn populated(&self) -> Vec<Range<u64>> {
        let block = |at: usize| (at / ENTRY_BYTES) as u64;
        let ranges = self.memory.populated();
        ranges.into_iter().map(|range| block(range.start)..block(range.end).min(self.blocks)).collect()
    }

    /// Keeps what the index is when `now` runs, for a snapshot, until that
    /// [ends](Self::end_snapshot).
    pub(super) fn begin_snapshot<T>(&self, now: impl FnOnce() -> T) -> Result<(Arc<Frozen>, T), StoreError> {
        let left = Pages::new(self.blocks)?;
        let copy = Memory::reserve("snapshot of the plane index", Self::bytes(self.blocks))?;
        // To find out which have anything would take as long as there are, and everybody would
        // wait.
        left.fill();
        let mut watching = self.watching.write();
        let frozen = Arc::new(Frozen { left, copying: Mutex::new(()), copy: Arc::new(copy) });
        watching.snapshot = Some(Arc::clone(&frozen));
        Ok((frozen, now()))
    }

    /// The bytes from `at` on as they were when the snapshot began, of whole pages or to the end.
    pub(super) fn read_snapshot(&self, frozen: &Frozen, at: usize, out: &mut [u8]) {
        for (page, out) in (at / PAGE_BYTES..).zip(out.chunks_mut(PAGE_BYTES)) {
            let _one = frozen.copying.lock();
            let from = if frozen.left.has(page) { &self.memory } else { &*frozen.copy };
            from.read(page * PAGE_BYTES, out);
            // Nobody needs it any more.
            frozen.left.remove(page);
        }
    }

    pub(super) fn end_snapshot(&self) {
        self.watching.write().snapshot = None;
    }

    /// Where the index may have something, in bytes.
    pub(super) fn populated_bytes(&self) -> Vec<Range<usize>> {
        self.memory.populated()
    }
}

fn at(block: u64) -> usize {
    usize::try_from(block)
        .ok()
        .and_then(|block| block.checked_mul(ENTRY_BYTES))
        .expect("a block of this device")
}
