//! The segment store and its plane index (TRACE III-D, "metadata management").
//!
//! The rules:
//! * One 64-byte [`entry`] per logical block says where the block's bundle is, how its planes are
//!   stored, and checks itself. An entry of zeros is a block of zeros, so an untouched device costs
//!   nothing, whatever its capacity.
//! * Bundles live in [`segments`] of 64-byte granules and are never changed in place: a write
//!   stores a new segment, then [publishes](publication) the entry, then frees the old segment. A
//!   reader sees the old block or the new one, never a mixture.
//! * Blocks share [`STRIPES`] locks by their number. A reader holds one only while it copies stored
//!   bytes out, a writer while it decides what to replace; coding and decoding happen on copies.
//! * A store on a disk has [`checkpoint`]s, so that a crash of the host leaves what was synced. Who
//!   finds no room has one made before anything else is tried.
//! * A store is private to the process, or lies in an [`image`] that outlives it. Opening one
//!   finishes what a killed process was about to publish, and scans what the entries name.
//! * Who frees a segment *tidies up*: if free slots of its length pass their bound, it moves the
//!   segments of the emptiest chunk.
//! * A store in memory grows only as far as the [host's memory](host_memory) allows.
//! * Who finds no room may have the store [compacted](Store::compact) and try again: what tidying
//!   leaves free is given up then.
//! * The store knows blocks and bytes. What they mean is the codec's business.

mod batch;
mod cached;
pub mod cause;
pub mod checkpoint;
pub mod counters;
pub mod entry;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod failpoints;
mod fields;
mod fiemap;
mod geometry;
pub mod host_memory;
pub mod image;
mod index;
mod journal;
mod ledger;
pub mod losses;
pub mod memory;
pub mod mode;
mod publication;
mod recovery;
mod saving;
pub mod segments;
pub mod snapshot;
mod sync;
pub mod tables;
pub mod upgrade;

pub use self::ledger::{Changed, Worker};

use std::{
    io,
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use self::{
    cause::Why,
    checkpoint::Checkpoints,
    entry::{ENTRY_BYTES, Entry, Version},
    host_memory::{For, Left},
    image::Image,
    index::{Index, Watching},
    journal::Journal,
    ledger::Ledger,
    losses::Losses,
    memory::Memory,
    publication::{Held, Stripes},
    saving::Stop,
    segments::Segments,
    sync::RwLockWriteGuard,
    tables::Tables,
};
use lamina_codec::{
    BLOCK_BYTES,
    block::{Bundle, MAX_BUNDLE, Stored},
    plane::PlaneMask,
};

/// Bytes of a granule, the unit in which the store is read, written and charged: one DRAM burst,
/// one CXL.mem line.
pub const GRANULE_BYTES: usize = 64;
/// Locks over the blocks.
pub const STRIPES: usize = 1024;

/// Chunks that are emptied at once after many segments were freed together.
const MAX_TIDIED: usize = 256;

/// What the store cannot do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The address space for the store or its index cannot be had.
    #[error("cannot reserve {bytes} bytes of memory for the {what}: {source}")]
    Reserve {
        /// Which part.
        what: &'static str,
        /// Its size.
        bytes: u64,
        /// The system's answer.
        source: std::io::Error,
    },
    /// No segment is free.
    #[error(
        "the store is full: no segment of {wanted} bytes is free, {used} of {capacity} bytes are in use, and \
         of the others a reserve is for what takes the place of something; \
         discard tensors, or start a new device with a larger --store-capacity (an image keeps its own)"
    )]
    Full {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes there are.
        capacity: u64,
    },
    /// The store is in memory, and the host has too little left for it to grow.
    #[error(
        "there is no room for the {what}: {left}, and {reserve} are kept free (--memory-reserve); \
         free some on the host, or discard tensors"
    )]
    HostMemory {
        /// What needs it.
        what: &'static str,
        /// What was left.
        left: Left,
        /// What is kept free.
        reserve: u64,
    },
    /// The file system that the store is in is full.
    #[error("there is no room for the {what}: {source}; free some on the host, or discard tensors")]
    NoRoom {
        /// What needs it.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Nobody knows what the blocks of an image are.
    #[error(
        "neither of the two copies of the tables of tensors and views can be read, and without them nobody knows what the blocks of this image are; \
         it is left as it is: restore a snapshot (`lamina snapshot restore`) or a copy of it, or serve a new image"
    )]
    DamagedTables,
    /// The host crashed, and nobody knows what the image was at any moment.
    #[error(
        "the host ended without a clean stop, and {damaged} cannot be read, so what this image was at its last sync is not known; \
         it is left as it is: restore a snapshot (`lamina snapshot restore`) or a copy of it, or serve a new image"
    )]
    Crashed {
        /// What cannot be read.
        damaged: &'static str,
    },
    /// A snapshot would have kept others from storing.
    #[error(
        "the store has no room left beside what is held for the snapshot, which was given up; \
         discard what is not needed, or save it when less is written"
    )]
    GaveUpSnapshot,
    /// Tensors and views are too many to be kept.
    #[error("the tables of tensors and views take {bytes} bytes, an image keeps {most}: remove some")]
    Tables {
        /// Bytes they take.
        bytes: usize,
        /// Bytes there are.
        most: usize,
    },
    /// An index entry that does not match its own checksum.
    #[error("the index entry of block {block} is damaged: {why}")]
    Entry {
        /// The block.
        block: u64,
        /// What is wrong with it.
        why: entry::Damaged,
    },
}

/// Blocks whose segments were moved together, and their bytes.
#[derive(Default)]
struct Moved {
    blocks: AtomicU64,
    bytes: AtomicU64,
}

/// The store of one device.
pub struct Store {
    index: Index,
    segments: Segments,
    journal: Option<Journal>,
    stripes: Stripes,
    losses: Losses<Why>,
    /// Segments freed so far.
    freed: AtomicU64,
    moved: Moved,
    /// Who compacts; the others wait for what that gives.
    compacting: Mutex<()>,
    /// Who makes checkpoints, if there are any.
    checkpoints: OnceLock<Checkpoints>,
    /// Checkpoints that were made for lack of room.
    forced: AtomicU64,
    /// The snapshot that is being saved.
    saving: Mutex<Option<Arc<Stop>>>,
    /// What is noted for the next process, if it is.
    ledger: Option<Arc<Ledger>>,
    /// Held while segments are moved that no write of the caller's moves: see
    /// [`Store::keep_accounts`].
    moving: parking_lot::RwLock<()>,
}

/// What was found when a store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Changes that a killed process had begun to publish, and that were finished.
    pub replayed: usize,
    /// Blocks that are poisoned, or whose entries are damaged: they cannot be read until they are
    /// written.
    pub damaged: Vec<u64>,
}

/// What the accounts of a store that was opened are made of.
#[derive(Debug)]
pub enum Basis<T> {
    /// What was made of all its blocks that hold data.
    Found(Vec<T>),
    /// What was noted.
    Noted {
        /// The accounts as they were [kept](Store::keep_accounts) last.
        accounts: Vec<u64>,
        /// The blocks that may have changed since, each once.
        changed: Vec<Changed>,
    },
}

/// What a read took from the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// The block's entry.
    pub entry: Entry,
    /// The planes that were selected; none of a block of zeros.
    pub mask: PlaneMask,
    /// Granules that they touch, in bytes.
    pub bytes: u64,
}

/// A bundle that is in the store and that no entry names yet. One that is neither installed nor
/// given back is lost.
#[must_use]
pub struct Prepared {
    place: Option<entry::Place>,
    /// Why there is none, of a block that is to be poisoned.
    lost: Option<Why>,
}

/// As long as this is there, what some blocks give back is kept for them. Who has it is the only
/// one who stores into them.
#[must_use]
pub struct KeptRoom<'a> {
    store: &'a Store,
}

impl Drop for KeptRoom<'_> {
    fn drop(&mut self) {
        self.store.segments.keep_no_more();
    }
}

/// A block that is being replaced: its stripe is held, so nobody else reads or writes it.
pub struct Replace<'a> {
    store: &'a Store,
    block: u64,
    old: Entry,
    held: Held<RwLockWriteGuard<'a, ()>>,
}

impl StoreError {
    /// Whether there was no room for what was to be stored, wherever.
    pub const fn is_no_room(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::NoRoom { .. } | Self::HostMemory { .. })
    }
}

impl Store {
    /// A store for `blocks` blocks with room for `segment_bytes` of bundles, or for as many as
    /// entries can name. Nothing of either is touched yet.
    ///
    /// # Errors
    /// [`StoreError::Reserve`].
    pub fn new(blocks: u64, segment_bytes: u64) -> Result<Self, StoreError> {
        let version = Version::default();
        let bytes = Segments::bytes(segment_bytes.min(version.max_store_bytes()));
        let index = Index::new(Memory::reserve("plane index", Index::bytes(blocks))?, version, blocks);
        let segments =
            Segments::new(Memory::reserve("segment store", bytes)?, bytes, None, segments::WARM_ON_DISK);
        Ok(Self::of(index, segments, None, None))
    }

    fn of(index: Index, segments: Segments, journal: Option<Journal>, ledger: Option<Arc<Ledger>>) -> Self {
        Self {
            index,
            segments,
            journal,
            stripes: Stripes::new(STRIPES),
            losses: Losses::new(),
            freed: AtomicU64::new(0),
            moved: Moved::default(),
            compacting: Mutex::new(()),
            checkpoints: OnceLock::new(),
            forced: AtomicU64::new(0),
            saving: Mutex::new(None),
            ledger,
            moving: parking_lot::RwLock::new(()),
        }
    }

    /// The store that lies in `image`. If it has a ledger, and the accounts there are those of the
    /// caller (`accept`), the entries are what the ledger says. Else all of them are looked at, and
    /// `found` is told of every block that holds data, by several threads, of which each makes
    /// something of its own of what it is told.
    ///
    /// # Errors
    /// [`StoreError::Reserve`], [`StoreError::NoRoom`].
    pub fn open<T: Default + Send>(
        image: &Image,
        accept: impl FnOnce(&[u64]) -> bool,
        found: impl Fn(&mut T, u64, &Entry) + Sync,
    ) -> Result<(Self, Opened, Basis<T>), StoreError> {
        let superblock = image.superblock();
        let bytes = superblock.store_bytes / memory::UNIT_BYTES as u64 * memory::UNIT_BYTES as u64;
        let index = Index::open(image, blocks(superblock.base_bytes))?;
        let ledger = image.ledger()?.map(Arc::new);
        // Others may have need of a file system's room; of memory only when it is scarce.
        let warm = if image.is_anonymous() { segments::WARM_IN_MEMORY } else { segments::WARM_ON_DISK };
        let segments = Segments::new(image.segments()?, bytes, ledger.clone(), warm);
        let store = Self::of(index, segments, Some(Journal::new(image.journal()?)?), ledger);
        let mut opened = Opened::default();
        if let Some(journal) = &store.journal {
            opened.replayed = journal.replay(&store.index)?;
        }
        if let Some(ledger) = store.ledger.as_ref().filter(|ledger| ledger.follows())
            && let Some(ledger::Found { accounts, changed, lost }) =
                ledger.take_over(&store.index, store.index.version(), accept)
        {
            store.segments.take_over(ledger);
            if image.head().is_some() {
                store.segments.make_checkpoints(&[]);
            }
            store.segments.let_go();
            for block in &lost {
                store.losses.note(*block, Why::found());
            }
            opened.damaged = lost;
            return Ok((store, opened, Basis::Noted { accounts, changed }));
        }
        if let Some(ledger) = &store.ledger {
            ledger.give_up();
        }
        let claims = store.segments.claims();
        let (all, damaged) = recovery::scan(&store.index, &claims, found);
        let held = recovery::scan_checkpoints(&store.index, &claims, image)?;
        store.segments.claimed(claims);
        if image.head().is_some() {
            store.segments.make_checkpoints(&held);
        }
        for block in &damaged {
            store.losses.note(*block, Why::found());
        }
        opened.damaged = damaged;
        Ok((store, opened, Basis::Found(all)))
    }

    /// Copies out what `select` wants of `block`: its entry, and the bytes of those planes at their
    /// places in `bundle`.
    ///
    /// # Errors
    /// [`StoreError::Entry`].
    ///
    /// # Panics
    /// If `block` is past the device.
    #[inline]
    pub fn fetch(
        &self,
        block: u64,
        select: impl FnOnce(&Stored) -> PlaneMask,
        bundle: &mut [u8; MAX_BUNDLE],
    ) -> Result<Fetched, StoreError> {
        self.stripes.read(block, || Ok(self.copy(self.index.get(block)?, select, bundle)))
    }

    /// Prefetches `bytes` of the segment of `block`, and the entries behind its own: a hint, never
    /// an error. A block that changes meanwhile makes it fetch something else, which nobody uses.
    #[inline]
    pub fn prefetch(&self, block: u64, bytes: Range<u64>) {
        if let Some(segment) = self.index.glance(block) {
            self.segments.prefetch(segment, bytes);
        }
    }

    /// The entry of `block`.
    ///
    /// # Errors
    /// [`StoreError::Entry`].
    pub fn entry(&self, block: u64) -> Result<Entry, StoreError> {
        self.stripes.read(block, || self.index.get(block))
    }

    /// Whether `block` holds nothing and never did, so that to say so would only take room.
    pub fn is_hole(&self, block: u64) -> bool {
        self.index.is_hole(block)
    }

    /// The first of these blocks that may hold anything, some that follow one another. The others
    /// are passed over without a look at each.
    pub fn touched(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        self.index.touched(blocks)
    }

    /// The first of these blocks that may hold anything but zeros, or their end. When `most`
    /// entries were looked at, the next one counts as one that does.
    pub fn next_data(&self, blocks: Range<u64>, most: u64) -> u64 {
        let (mut block, mut looked) = (blocks.start, 0);
        while block < blocks.end {
            let behind = self.index.hole_end(block);
            if behind > block {
                block = behind;
                continue;
            }
            if looked == most || !self.is_zeros(block) {
                return block;
            }
            (block, looked) = (block + 1, looked + 1);
        }
        blocks.end
    }

    /// The first of these blocks that is zeros, or their end; nothing if it is not among the first
    /// `most`, and there are more.
    pub fn next_hole(&self, blocks: Range<u64>, most: u64) -> Option<u64> {
        let end = blocks.end.min(blocks.start.saturating_add(most));
        let found = (blocks.start..end).find(|block| self.is_zeros(*block));
        found.or_else(|| (end == blocks.end).then_some(end))
    }

    /// Whether nothing is stored for `block`, so that it is zeros.
    fn is_zeros(&self, block: u64) -> bool {
        self.entry(block).is_ok_and(|entry| entry.place.is_none())
    }

    /// Ranges of blocks that may hold anything, of a store in an image.
    pub fn populated(&self) -> Vec<std::ops::Range<u64>> {
        self.index.populated()
    }

    /// Keeps what these blocks give back for them, also of a full store, until what is returned is
    /// dropped. There is one of these at a time.
    pub fn keep_room(&self, blocks: Vec<Range<u64>>) -> KeptRoom<'_> {
        self.segments.keep(blocks);
        KeptRoom { store: self }
    }

    /// Gives back the room that freed segments kept, where memory is scarce.
    pub fn give_room_back(&self) {
        self.segments.cool();
    }

    /// Takes hold of `block` to replace it.
    ///
    /// # Errors
    /// [`StoreError::Entry`]; [`Store::replace_damaged`] makes such a block writable again.
    /// [`StoreError::NoRoom`], [`StoreError::HostMemory`].
    pub fn replace(&self, block: u64) -> Result<Replace<'_>, StoreError> {
        self.index.ensure(block..block + 1)?;
        let held = self.stripes.hold(block);
        let old = self.index.get(block)?;
        Ok(Replace { store: self, block, old, held })
    }

    /// Takes hold of a block whose entry is damaged, to replace it whole. Its segment, which
    /// nothing names any more, is lost.
    pub fn replace_damaged(&self, block: u64) -> Replace<'_> {
        let held = self.stripes.hold(block);
        let old = self.index.get(block).unwrap_or_default();
        Replace { store: self, block, old, held }
    }

    /// Takes hold of a block to replace it, if its entry is poison or damaged.
    pub fn replace_if_damaged(&self, block: u64) -> Option<Replace<'_>> {
        let held = self.stripes.hold(block);
        self.index.get(block).is_err().then(|| Replace { store: self, block, old: Entry::default(), held })
    }

    /// Stores `bundle` for `block` without publishing it, so that several can be published knowing
    /// that all are there. `no_more` says that they take the place of at least as many bytes.
    ///
    /// # Errors
    /// [`StoreError::Full`], [`StoreError::NoRoom`], [`StoreError::HostMemory`].
    pub fn prepare(&self, block: u64, bundle: &Bundle, no_more: bool) -> Result<Prepared, StoreError> {
        let mut prepared = self.prepare_all(block, std::slice::from_ref(bundle), no_more)?;
        Ok(prepared.remove(0))
    }

    /// As [`Self::prepare`], for blocks from `first` on: all of them or none.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_all(
        &self,
        first: u64,
        bundles: &[Bundle],
        no_more: bool,
    ) -> Result<Vec<Prepared>, StoreError> {
        self.index.ensure(first..first + bundles.len() as u64)?;
        let what = if no_more { For::NoMore } else { For::More };
        let mut prepared = Vec::with_capacity(bundles.len());
        let bytes = (first..).zip(bundles.iter().map(Bundle::bytes));
        let mut rest = bundles.iter();
        self.segments.store_all(bytes, what, |segment| {
            let place = rest.next().and_then(|bundle| {
                let difference = bundle.difference;
                Some(entry::Place { difference, ..entry::Place::new(segment, bundle.stored.clone()?) })
            });
            prepared.push(Prepared { place, lost: None });
        })?;
        Ok(prepared)
    }

    /// What poisons `block` when it is published with others.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`], [`StoreError::HostMemory`].
    pub fn prepare_lost(&self, block: u64, why: Why) -> Result<Prepared, StoreError> {
        self.index.ensure(block..block + 1)?;
        Ok(Prepared { place: None, lost: Some(why) })
    }

    /// Publishes what was prepared as the content of blocks from `first` on, at most
    /// [`kv::MAX_BLOCKS`](lamina_codec::kv::MAX_BLOCKS), all of it or nothing even if the process
    /// is
    /// killed: old and new entries, as those of zeros if they are poisoned now. Nobody else
    /// replaces these blocks meanwhile. Damaged ones are mended.
    pub fn install_all(&self, first: u64, prepared: Vec<Prepared>) -> Vec<(Entry, Entry)> {
        let blocks = first..first + prepared.len() as u64;
        let held = self.stripes.hold_all(blocks.clone());
        let change = |(block, Prepared { place, lost }): (u64, Prepared)| {
            // Nothing of a damaged block is needed any more; its segment, which nothing names, is
            // lost.
            let old = self.index.get(block).unwrap_or_default();
            let new = old.next(self.index.version(), place);
            if lost.is_some() { ((old, Entry::default()), lost) } else { ((old, new), lost) }
        };
        let (changes, lost): (Vec<_>, Vec<_>) = blocks.clone().zip(prepared).map(change).unzip();
        let entries: Vec<_> = changes
            .iter()
            .zip(&lost)
            .map(|((_, new), lost)| if lost.is_some() { entry::POISON } else { self.encode(new) })
            .collect();
        let put = || {
            if let Some(ledger) = &self.ledger {
                blocks.clone().for_each(|block| ledger.note_entry(block, &self.index.raw(block)));
            }
            let taken = self.journal.as_ref().map(|journal| (journal, journal.take_window()));
            let watch = self.index.watch();
            let record =
                taken.map(|(journal, taken)| (journal, journal.begin_window(taken, first, &entries)));
            for (block, entry) in (first..).zip(&entries) {
                self.index.put(&watch, block, entry);
            }
            drop(watch);
            if let Some((journal, record)) = record {
                journal.end(record);
            }
        };
        let lost_at = |block| lost[usize::try_from(block - first).expect("one of these")].clone();
        self.losses.publish(held, blocks.clone(), put, lost_at);
        self.free(changes.iter().map(|(old, _)| old));
        changes
    }

    /// The blocks that are poisoned, and that were.
    pub fn losses(&self) -> &Losses<Why> {
        &self.losses
    }

    /// Gives up what `block` holds, if its entry is `meant`, or none that can be read: it says that
    /// it is poisoned then. `None` if nothing was done; else the entry before, as that of zeros if
    /// it was damaged.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`], [`StoreError::HostMemory`]: of a block that never held anything, for
    /// its entry.
    pub fn poison(
        &self,
        block: u64,
        why: &Why,
        meant: impl FnOnce(Option<&Entry>) -> bool,
    ) -> Result<Option<Entry>, StoreError> {
        self.index.ensure(block..block + 1)?;
        let held = self.stripes.hold(block);
        let old = self.index.get(block).ok();
        if !meant(old.as_ref()) {
            return Ok(None);
        }
        let put = || self.put(block, &entry::POISON);
        self.losses.publish(held, block..block + 1, put, |_| Some(why.clone()));
        let old = old.unwrap_or_default();
        self.free(std::iter::once(&old));
        Ok(Some(old))
    }

    /// Frees the segments of entries that are no more, and tidies up if that leaves too many free
    /// slots. The caller holds no stripe.
    fn free<'e>(&self, old: impl Iterator<Item = &'e Entry>) {
        let mut places = old.filter_map(|old| old.place.as_ref()).peekable();
        if places.peek().is_none() {
            return;
        }
        let segments = places.map(|place| (place.segment, place.stored.bytes()));
        let segments::Freed { untidy, much_held } = self.segments.free(segments);
        if let Some(checkpoints) = self.checkpoints.get().filter(|_| much_held) {
            checkpoints.want();
        }
        for length in untidy {
            // Each leaves fewer free slots; the bound is for what others free meanwhile.
            for _ in 0..MAX_TIDIED {
                let Some(untidy) = self.segments.untidy(length) else { break };
                self.empty(&untidy);
            }
        }
        self.freed.fetch_add(1, Ordering::Release);
    }

    /// Empties a chunk that is held back: whether all could be moved.
    fn empty(&self, untidy: &segments::Untidy) -> bool {
        let moved = untidy.segments.iter().all(|(segment, block)| self.shift(*block, *segment).is_ok());
        self.segments.put_back(untidy, moved);
        moved
    }

    /// Moves segments together until a chunk is free, if any can be freed so: then it is worth to
    /// try again what found no room. The caller holds no stripe.
    pub fn compact(&self) -> bool {
        let _one = self.compacting.lock();
        if self.stop_holding() {
            return true;
        }
        let moved = self.segments.sparse().is_some_and(|sparse| self.empty(&sparse));
        // What was moved may be held where it was.
        self.stop_holding() || moved
    }

    /// Frees what is held for copies of the index: has a checkpoint made, and gives up the snapshot
    /// that is being saved if that does not do. Whether anything was freed.
    fn stop_holding(&self) -> bool {
        if self.segments.kept_bytes() == 0 {
            return false;
        }
        if let Some(checkpoints) = self.checkpoints.get() {
            self.forced.fetch_add(1, Ordering::Relaxed);
            if let Err(why) = self.unless_failed(checkpoints.make(self)) {
                tracing::error!("what was freed since the last sync stays held: {why}");
            }
        }
        if self.let_go() {
            return true;
        }
        self.stop_saving();
        self.let_go()
    }

    /// Frees what need not be held any more, and tidies up: whether there was anything.
    fn let_go(&self) -> bool {
        let _moving = self.moving.read();
        if self.segments.let_go() == 0 {
            return false;
        }
        self.freed.fetch_add(1, Ordering::Release);
        // Each leaves fewer free slots; the bound is for what others free meanwhile.
        for _ in 0..MAX_TIDIED {
            let Some(untidy) = self.segments.any_untidy() else { break };
            self.empty(&untidy);
        }
        true
    }

    /// Whether it was opened by what the process before noted, without a look at all entries.
    pub fn was_noted(&self) -> bool {
        self.ledger.as_ref().is_some_and(|ledger| ledger.is_taken())
    }

    /// Whether accounts should be kept again soon, so that the next process has little to look at.
    pub fn wants_accounts(&self) -> bool {
        self.ledger.as_ref().is_some_and(|ledger| ledger.is_full())
    }

    /// Whether nothing changed since accounts were kept, or they need not be kept.
    pub fn has_accounts(&self) -> bool {
        self.ledger.as_ref().is_none_or(|ledger| ledger.is_fresh())
    }

    /// Keeps what the caller counts of the blocks for the next process. Nobody else uses the store
    /// but to read.
    pub fn keep_accounts(&self, accounts: &[u64]) {
        let Some(ledger) = &self.ledger else { return };
        let _moving = self.moving.write();
        let lost = self.losses.listed().into_iter().map(|loss| loss.block);
        let lost: Vec<_> = lost.filter(|block| self.index.get(*block).is_err()).collect();
        ledger.begin(accounts, &lost);
    }

    /// Has checkpoints be made of this store and `tables`, if its image has them or is to have
    /// them.
    ///
    /// # Errors
    /// [`StoreError::Reserve`], [`StoreError::NoRoom`].
    pub fn keep_checkpoints(&self, image: &Image, tables: &Arc<Tables>) -> Result<(), StoreError> {
        if let Some(checkpoints) = Checkpoints::open(image, self, tables)? {
            let _ = self.checkpoints.set(checkpoints);
            self.let_go();
        }
        Ok(())
    }

    /// Makes a checkpoint of what the store is now, if it has any; `last` says that nothing is to
    /// change any more.
    pub fn checkpoint(&self, last: bool) -> Option<io::Result<()>> {
        let checkpoints = self.checkpoints.get()?;
        let made = if last { checkpoints.make_last(self) } else { checkpoints.make(self) };
        self.let_go();
        Some(self.unless_failed(made))
    }

    /// Whether a checkpoint was made. If not, what the disk gives back of the image may be older
    /// than what was noted of it.
    fn unless_failed(&self, made: io::Result<()>) -> io::Result<()> {
        made.inspect_err(|_| {
            if let Some(ledger) = &self.ledger {
                // Not while a generation begins, which would count after all.
                let _moving = self.moving.read_recursive();
                ledger.break_off();
            }
        })
    }

    /// Waits until a checkpoint should be made because much is held, or for so long.
    pub fn wait_to_checkpoint(&self, most: Option<Duration>) {
        match self.checkpoints.get() {
            Some(checkpoints) => checkpoints.wait(most),
            None => std::thread::sleep(most.unwrap_or(Duration::from_secs(60))),
        }
    }

    /// Checkpoints that this process made, and those of them that were made for lack of room.
    pub fn checkpoints_made(&self) -> (u64, u64) {
        let made = self.checkpoints.get().map_or(0, Checkpoints::made);
        (made, self.forced.load(Ordering::Relaxed))
    }

    /// A number that rises whenever a segment is freed.
    pub fn freed(&self) -> u64 {
        self.freed.load(Ordering::Acquire)
    }

    /// Moves a block's bundle from `segment` elsewhere, if it is still there. The reader of a block
    /// sees it before or after.
    fn shift(&self, block: u64, segment: u64) -> Result<(), StoreError> {
        let copy = || {
            let Ok(Entry { epoch, place }) = self.index.get(block) else { return Ok(None) };
            let Some(place) = place.filter(|place| place.segment == segment) else { return Ok(None) };
            let mut bytes = [0; MAX_BUNDLE];
            let bytes = &mut bytes[..place.stored.bytes()];
            self.segments.read(segment, 0, bytes);
            let moved = entry::Place { segment: self.segments.store(bytes, block, For::NoMore)?, ..place };
            Ok(Some((bytes.len(), Entry { epoch, place: Some(moved) })))
        };
        let put = |(_, entry): &(usize, Entry)| self.put(block, &self.encode(entry));
        self.stripes.shift(block, copy, put, |(bytes, _)| {
            self.segments.free(std::iter::once((segment, *bytes)));
            self.moved.blocks.fetch_add(1, Ordering::Relaxed);
            self.moved.bytes.fetch_add(charged(*bytes), Ordering::Relaxed);
        })
    }

    /// Blocks whose segments were moved together since this was asked last, and their bytes.
    pub fn take_moved(&self) -> (u64, u64) {
        let Moved { blocks, bytes } = &self.moved;
        (blocks.swap(0, Ordering::Relaxed), bytes.swap(0, Ordering::Relaxed))
    }

    /// Writes a block's entry, whole even if the process is killed. The caller holds its stripe.
    fn put(&self, block: u64, entry: &[u8; ENTRY_BYTES]) {
        self.put_watched(&self.index.watch(), block, entry);
    }

    /// As [`Self::put`], of a block whose entry changes together with others.
    fn put_watched(&self, watching: &Watching, block: u64, entry: &[u8; ENTRY_BYTES]) {
        if let Some(ledger) = &self.ledger {
            ledger.note_entry(block, &self.index.raw(block));
        }
        let record = self.journal.as_ref().map(|journal| (journal, journal.begin(block, entry)));
        self.index.put(watching, block, entry);
        if let Some((journal, record)) = record {
            journal.end(record);
        }
    }

    /// An entry's bytes, in the version of this store.
    fn encode(&self, entry: &Entry) -> [u8; ENTRY_BYTES] {
        entry.encode(self.index.version())
    }

    /// What is held for copies of the index: first granules, and how many.
    #[cfg(any(test, feature = "testing"))]
    pub fn held_segments(&self) -> Vec<(usize, usize)> {
        self.segments.held_segments()
    }

    /// Frees what [`Store::prepare`] took.
    pub fn give_back(&self, prepared: impl IntoIterator<Item = Prepared>) {
        let places = prepared.into_iter().filter_map(|prepared| prepared.place);
        self.segments.give_back(places.map(|place| (place.segment, place.stored.bytes())));
    }

    /// Whether its entries can say that a block is lossy; see [`Version::has_lossy`].
    pub fn has_lossy(&self) -> bool {
        self.index.version().has_lossy()
    }

    /// Whether its entries have a number for the format; see [`Version::holds`].
    pub fn holds(&self, format: lamina_codec::format::Format) -> bool {
        self.index.version().holds(format)
    }

    /// The version of its entries.
    pub fn version(&self) -> Version {
        self.index.version()
    }

    /// Bytes of segments in use.
    pub fn used_bytes(&self) -> u64 {
        self.segments.used_bytes()
    }

    /// Bytes of memory that segments hold, free slots between them included.
    pub fn held_bytes(&self) -> u64 {
        self.segments.held_bytes()
    }

    /// Chunks of memory that hold segments, and all that may, without the reserve for what takes no
    /// more than before.
    pub fn chunks(&self) -> (u64, u64) {
        self.segments.chunks()
    }

    /// Whether there is room for so many bytes more, whatever they are and however they are coded:
    /// chunks for the longest segments, and one for each length.
    pub fn has_room(&self, bytes: u64) -> bool {
        let (held, all) = self.segments.chunks();
        let longest = segments::MAX_GRANULES;
        let each = (segments::CHUNK_GRANULES / longest) as u64;
        all.saturating_sub(held) >= blocks(bytes).div_ceil(each) + longest as u64
    }

    /// Bytes of segments there may be.
    pub fn capacity_bytes(&self) -> u64 {
        self.segments.capacity_bytes()
    }

    #[inline]
    fn copy(
        &self,
        entry: Entry,
        select: impl FnOnce(&Stored) -> PlaneMask,
        bundle: &mut [u8; MAX_BUNDLE],
    ) -> Fetched {
        let Some(place) = &entry.place else { return Fetched { entry, ..Fetched::default() } };
        let mask = select(&place.stored);
        let mut granules = 0;
        let mut last = None;
        place.stored.runs(mask, |run| {
            let (first, end) = (run.start / GRANULE_BYTES, run.end.div_ceil(GRANULE_BYTES));
            // Two runs may share a granule, which is fetched once.
            granules += end - first - usize::from(last == Some(first));
            last = Some(end - 1);
            self.segments.read(place.segment, run.start, &mut bundle[run]);
        });
        Fetched { entry, mask, bytes: (granules * GRANULE_BYTES) as u64 }
    }

    /// Flips one stored bit of `block`, for tests of what notices it.
    #[cfg(any(test, feature = "testing"))]
    pub fn flip_bit(&self, block: u64, bit: usize) {
        let entry = self.index.get(block).expect("an intact entry");
        let place = entry.place.expect("a stored block");
        let mut byte = [0];
        self.segments.read(place.segment, bit / 8, &mut byte);
        byte[0] ^= 1 << (bit % 8);
        self.segments.write(place.segment, bit / 8, &byte);
    }
}

impl Replace<'_> {
    /// The entry as it was.
    pub fn old(&self) -> &Entry {
        &self.old
    }

    /// Copies the whole old block out, as [`Store::fetch`] does.
    pub fn fetch_old(&self, bundle: &mut [u8; MAX_BUNDLE]) -> Fetched {
        self.store.copy(self.old.clone(), |_| PlaneMask(u32::MAX), bundle)
    }

    /// Stores `bundle` as the block's new content: segment, then entry, then the old segment is
    /// freed. If it takes no more than the old one, it may take of the reserve.
    ///
    /// # Errors
    /// [`StoreError::Full`], [`StoreError::NoRoom`], [`StoreError::HostMemory`]; the old block then
    /// stays as it was.
    pub fn publish(self, bundle: &Bundle) -> Result<Entry, StoreError> {
        let bytes = bundle.stored.as_ref().map_or(0, Stored::bytes);
        let no_more = charged(bytes) <= self.old.charged();
        let Prepared { place, .. } = self.store.prepare(self.block, bundle, no_more)?;
        let Self { store, block, old, held } = self;
        let new = old.next(store.index.version(), place);
        store.losses.publish(held, block..block + 1, || store.put(block, &store.encode(&new)), |_| None);
        store.free(std::iter::once(&old));
        Ok(new)
    }
}

/// Bytes that a bundle of this length is charged: whole granules.
pub const fn charged(bytes: usize) -> u64 {
    (bytes.div_ceil(GRANULE_BYTES) * GRANULE_BYTES) as u64
}

/// Blocks of a window of `bytes`.
pub const fn blocks(bytes: u64) -> u64 {
    bytes / BLOCK_BYTES as u64
}

#[cfg(test)]
mod tests;
