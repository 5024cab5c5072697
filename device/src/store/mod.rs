//! The segment store and its plane index (TRACE III-D, "metadata management").
//!
//! The rules:
//! * One 64-byte [`entry`] per logical block says where the block's bundle is, how its planes are stored, and checks itself.
//!   An entry of zeros is a block of zeros, so an untouched device costs nothing, whatever its capacity.
//! * Bundles live in [`segments`] of 64-byte granules and are never changed in place: a write stores a new segment, then
//!   publishes the entry, then frees the old segment. A reader sees the old block or the new one, never a mixture.
//! * Blocks share [`STRIPES`] locks by their number. A reader holds one only while it copies stored bytes out, a writer while it
//!   decides what to replace; coding and decoding happen on copies.
//! * The store knows blocks and bytes. What they mean is the codec's business.

pub mod entry;
mod fields;
mod index;
pub(crate) mod memory;
pub mod segments;

use parking_lot::{RwLock, RwLockWriteGuard};

use self::{entry::Entry, index::Index, segments::Segments};
use crate::{
    BLOCK_BYTES,
    codec::block::{Bundle, MAX_BUNDLE, Stored},
    plane::PlaneMask,
};

/// Bytes of a granule, the unit in which the store is read, written and charged: one DRAM burst, one CXL.mem line.
pub const GRANULE_BYTES: usize = 64;
/// Locks over the blocks.
pub const STRIPES: usize = 1024;

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
        "the store is full: no segment of {wanted} bytes is free, {used} of {capacity} bytes are in use; \
         discard tensors or start with a larger --store-capacity"
    )]
    Full {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes there are.
        capacity: u64,
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

/// The store of one device.
pub struct Store {
    index: Index,
    segments: Segments,
    stripes: Vec<RwLock<()>>,
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

/// A bundle that is in the store and that no entry names yet. One that is neither installed nor given back is lost.
#[must_use]
pub struct Prepared {
    place: Option<entry::Place>,
}

/// A block that is being replaced: its stripe is held, so nobody else reads or writes it.
pub struct Replace<'a> {
    store: &'a Store,
    block: u64,
    old: Entry,
    _stripe: RwLockWriteGuard<'a, ()>,
}

impl Store {
    /// A store for `blocks` blocks with room for `segment_bytes` of bundles. Nothing of either is touched yet.
    ///
    /// # Errors
    /// [`StoreError::Reserve`].
    pub fn new(blocks: u64, segment_bytes: u64) -> Result<Self, StoreError> {
        Ok(Self {
            index: Index::new(blocks)?,
            segments: Segments::new(segment_bytes)?,
            stripes: (0..STRIPES).map(|_| RwLock::new(())).collect(),
        })
    }

    /// Copies out what `select` wants of `block`: its entry, and the bytes of those planes at their places in `bundle`.
    ///
    /// # Errors
    /// [`StoreError::Entry`].
    ///
    /// # Panics
    /// If `block` is past the device.
    pub fn fetch(
        &self,
        block: u64,
        select: impl FnOnce(&Stored) -> PlaneMask,
        bundle: &mut [u8; MAX_BUNDLE],
    ) -> Result<Fetched, StoreError> {
        let _stripe = self.stripe(block).read();
        let entry = self.index.get(block)?;
        Ok(self.copy(entry, select, bundle))
    }

    /// The entry of `block`.
    ///
    /// # Errors
    /// [`StoreError::Entry`].
    pub fn entry(&self, block: u64) -> Result<Entry, StoreError> {
        let _stripe = self.stripe(block).read();
        self.index.get(block)
    }

    /// Takes hold of `block` to replace it.
    ///
    /// # Errors
    /// [`StoreError::Entry`]; [`Store::replace_damaged`] makes such a block writable again.
    pub fn replace(&self, block: u64) -> Result<Replace<'_>, StoreError> {
        let stripe = self.stripe(block).write();
        let old = self.index.get(block)?;
        Ok(Replace { store: self, block, old, _stripe: stripe })
    }

    /// Takes hold of a block whose entry is damaged, to replace it whole. Its segment, which nothing names any more, is lost.
    pub fn replace_damaged(&self, block: u64) -> Replace<'_> {
        let stripe = self.stripe(block).write();
        let old = self.index.get(block).unwrap_or_default();
        Replace { store: self, block, old, _stripe: stripe }
    }

    /// Stores `bundle` without publishing it, so that several can be published knowing that all are there.
    ///
    /// # Errors
    /// [`StoreError::Full`].
    pub fn prepare(&self, bundle: &Bundle) -> Result<Prepared, StoreError> {
        let place = match &bundle.stored {
            None => None,
            Some(stored) => {
                let segment = self.segments.store(bundle.bytes())?;
                Some(entry::Place { segment, stored: stored.clone() })
            }
        };
        Ok(Prepared { place })
    }

    /// Frees what [`Store::prepare`] took.
    pub fn give_back(&self, Prepared { place }: Prepared) {
        if let Some(place) = place {
            self.segments.free(place.segment, place.stored.bytes());
        }
    }

    /// Bytes of segments in use.
    pub fn used_bytes(&self) -> u64 {
        self.segments.used_bytes()
    }

    /// Bytes of segments there may be.
    pub fn capacity_bytes(&self) -> u64 {
        self.segments.capacity_bytes()
    }

    fn stripe(&self, block: u64) -> &RwLock<()> {
        // Neighbouring blocks take different stripes: a sequential reader and a writer behind it do not meet.
        &self.stripes[usize::try_from(block % STRIPES as u64).expect("less than STRIPES")]
    }

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
    #[cfg(test)]
    pub(crate) fn flip_bit(&self, block: u64, bit: usize) {
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

    /// Stores `bundle` as the block's new content: segment, then entry, then the old segment is freed.
    ///
    /// # Errors
    /// [`StoreError::Full`]; the old block then stays as it was.
    pub fn publish(self, bundle: &Bundle) -> Result<Entry, StoreError> {
        let prepared = self.store.prepare(bundle)?;
        Ok(self.install(prepared))
    }

    /// Publishes what was prepared as the block's new content: the entry, then the old segment is freed.
    pub fn install(self, Prepared { place }: Prepared) -> Entry {
        let Self { store, block, old, _stripe } = self;
        let new = Entry { epoch: old.epoch.wrapping_add(1), place };
        store.index.set(block, &new);
        if let Some(place) = &old.place {
            store.segments.free(place.segment, place.stored.bytes());
        }
        new
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
