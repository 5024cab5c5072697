//! The block service: one block in, one block out, in the device's mode.
//!
//! The rules:
//! * It owns what is stored: the store of a device that codes, the memory of one that does not.
//! * It knows blocks, their classes and their owners' accounts. Which block has which owner is the
//!   caller's to say.
//! * Stores of whole blocks that follow each other are coded by several threads, and published in
//!   order, some at a time: the same stores in the same order lie at the same places.

use std::{ops::Range, sync::Arc, time::Instant};

use parking_lot::{Mutex, MutexGuard};

use super::{
    DeviceConfig, DeviceError,
    accounts::{Accounts, Written},
    against::Theirs,
    by_index,
    charge::{By, Charge, charge_of},
    coding::{Class, FetchError, ReadFrom, Wanted},
    decoded::{Decoded, DecodedFrom},
    lines,
    observers::{Fetch, partial_lines},
    parallel, poison,
    scratch::{AlignedBundle, Pool, Request, Scratch},
};
use crate::{difference, layout::Layout, stats::Tally, tensor::Tensor};
use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE, Stored, is_zero},
    format::Format,
    plane::{self, PlaneMask},
};
use lamina_store as store;
use lamina_store::{
    Basis, Fetched, Replace, Store, StoreError,
    cause::Why,
    entry::{Damaged, Entry, Place},
    image::Image,
    memory::Memory,
    mode::Mode,
};

/// How often a store without room is compacted for one block: others may take what that gives.
const MAX_COMPACTIONS: u32 = 8;

/// Bytes that are expected of a block if none was fetched yet that would tell.
const UNKNOWN_BYTES: u64 = BLOCK_BYTES as u64 / 2;

/// By how many bytes more than usual a block is expected to be stored: some are longer, and to wait
/// for the end of one takes as long as for all of it.
const MARGIN_BYTES: u64 = 256;

/// Blocks that are coded together while the map is held: about a millisecond on two cores. Who
/// wants to change the map waits as long. Waking another thread costs little beside.
pub(super) const MAX_BATCH: usize = 256;

/// Blocks that a thread codes at a time, and that are published together: so many that one look for
/// space and one for the counters cost little beside, so few that who reads one of them hardly
/// waits.
const PUBLISHED: usize = 32;

/// Blocks that a thread copies at a time: to wake one takes as long as to copy so many. Far fewer
/// than stripes.
const COPIED: usize = 32;

/// The service of blocks.
pub(super) struct BlockService {
    mode: Mode,
    backing: Backing,
    /// What was decoded and not yet read, of blocks and KV windows.
    pub(super) decoded: Mutex<Decoded>,
    pub(super) pool: Pool,
    pub(super) accounts: Arc<Accounts>,
}

/// Where blocks are, by the device's mode.
pub(super) enum Backing {
    /// CXL-Plain: the words at their addresses.
    Flat(Box<Flat>),
    /// Coded, behind the plane index.
    Coded(Box<Store>),
}

pub(super) struct Flat {
    memory: Memory,
    bytes: u64,
    /// A byte a block: whether it holds anything but zeros, so that nothing is read to know it.
    live: Memory,
    /// Writers of one block take turns, so that it is counted once; readers need not.
    stripes: Vec<Mutex<()>>,
}

impl Flat {
    fn new(memory: Memory, bytes: u64) -> Result<Self, StoreError> {
        let live = Memory::reserve("which blocks hold data", store::blocks(bytes))?;
        Ok(Self { memory, bytes, live, stripes: (0..store::STRIPES).map(|_| Mutex::new(())).collect() })
    }

    /// Calls for every block that is not zeros, in memory that was opened.
    fn for_each_live(&self, mut found: impl FnMut(u64)) {
        let mut words = [0; BLOCK_BYTES];
        let live = self.memory.populated();
        for block in live.into_iter().flat_map(|range| range.start / BLOCK_BYTES..range.end / BLOCK_BYTES) {
            self.read(block as u64, &mut words);
            if !is_zero(&words) {
                self.set_live(block as u64, true);
                found(block as u64);
            }
        }
    }

    /// The turn to write `block`.
    fn turn(&self, block: u64) -> MutexGuard<'_, ()> {
        self.stripes[by_index(block % store::STRIPES as u64)].lock()
    }

    fn is_live(&self, block: u64) -> bool {
        let mut live = [0];
        self.live.read(by_index(block), &mut live);
        live != [0]
    }

    fn set_live(&self, block: u64, live: bool) {
        self.live.write(by_index(block), &[live.into()]);
    }

    /// Stores `pieces` of a block, whose turn the caller has.
    fn write(&self, block: u64, pieces: &[(usize, &[u8])]) {
        for (inside, data) in pieces {
            self.memory.write(by_index(block) * BLOCK_BYTES + inside, data);
        }
    }

    /// Whether `block`, which `was` live, is so when `pieces` are stored. It is read only if zeros
    /// are stored into parts of it.
    fn becomes_live(&self, block: u64, was: bool, pieces: &[(usize, &[u8])]) -> bool {
        if !pieces.iter().all(|(_, data)| is_zero(data)) {
            return true;
        }
        if !was || pieces.iter().any(|(_, data)| data.len() == BLOCK_BYTES) {
            return false;
        }
        let mut words = [0; BLOCK_BYTES];
        self.read(block, &mut words);
        for (inside, data) in pieces {
            words[*inside..inside + data.len()].copy_from_slice(data);
        }
        !is_zero(&words)
    }

    fn read(&self, block: u64, words: &mut BlockWords) {
        self.memory.read(by_index(block) * BLOCK_BYTES, words);
    }
}

impl Backing {
    pub(super) fn new(config: &DeviceConfig) -> Result<Self, StoreError> {
        Ok(match config.mode {
            Mode::Plain => Self::Flat(Box::new(Flat::new(
                Memory::reserve("base window", config.base_bytes)?,
                config.base_bytes,
            )?)),
            Mode::GComp | Mode::Trace => {
                Self::Coded(Box::new(Store::new(store::blocks(config.base_bytes), config.store_bytes())?))
            }
        })
    }

    /// The blocks that lie in `image`. If accounts are noted there that `fit`, nothing else is
    /// looked at; else `found` is told what each block that holds data is charged, by several
    /// threads.
    pub(super) fn open<T: Default + Send>(
        image: &Image,
        fit: impl FnOnce(&[u64]) -> bool,
        found: impl Fn(&mut T, u64, &Entry, &Charge) + Sync,
    ) -> Result<(Self, Basis<T>), StoreError> {
        let superblock = image.superblock();
        if superblock.mode == Mode::Plain {
            let flat = Flat::new(image.segments()?, superblock.base_bytes)?;
            let mut live = T::default();
            flat.for_each_live(|block| found(&mut live, block, &Entry::default(), &Charge::flat(true)));
            return Ok((Self::Flat(Box::new(flat)), Basis::Found(vec![live])));
        }
        let begun = Instant::now();
        let reported = |all: &mut T, block, entry: &Entry| found(all, block, entry, &Charge::of(entry));
        let (store, opened, basis) = Store::open(image, fit, reported)?;
        let took = begun.elapsed();
        match &basis {
            Basis::Found(by) => tracing::debug!(threads = by.len(), ?took, "all entries were looked at"),
            Basis::Noted { changed, .. } => {
                tracing::debug!(entries = changed.len(), ?took, "what was noted was read");
            }
        }
        if opened != store::Opened::default() {
            let (replayed, poisoned) = (opened.replayed, opened.damaged.len());
            tracing::info!(replayed, poisoned, "the store is as the last process left it");
        }
        Ok((Self::Coded(Box::new(store)), basis))
    }
}

impl BlockService {
    pub(super) fn new(config: &DeviceConfig, backing: Backing, accounts: Arc<Accounts>) -> Self {
        let decoded = Mutex::new(Decoded::new(config.decoded_bytes));
        Self { mode: config.mode, backing, decoded, pool: Pool::default(), accounts }
    }

    /// Makes sure that these blocks can be written.
    pub(super) fn ensure(&self, blocks: Range<u64>) -> Result<(), StoreError> {
        self.accounts.observers.ensure(blocks.clone())?;
        match &self.backing {
            Backing::Flat(flat) => {
                flat.memory.ensure(by_index(blocks.start) * BLOCK_BYTES..by_index(blocks.end) * BLOCK_BYTES)
            }
            Backing::Coded(_) => Ok(()),
        }
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        match &self.backing {
            Backing::Flat(flat) => flat.bytes,
            Backing::Coded(store) => store.capacity_bytes(),
        }
    }

    #[cfg(test)]
    pub(super) fn used_bytes(&self) -> u64 {
        match &self.backing {
            Backing::Flat(flat) => flat.bytes,
            Backing::Coded(store) => store.used_bytes(),
        }
    }

    /// The first of these blocks that may hold anything, some that follow one another.
    pub(super) fn touched(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        match &self.backing {
            Backing::Flat(flat) => {
                let bytes = by_index(blocks.start) * BLOCK_BYTES..by_index(blocks.end) * BLOCK_BYTES;
                let found = flat.memory.touched(bytes)?;
                Some((found.start / BLOCK_BYTES) as u64..(found.end / BLOCK_BYTES) as u64)
            }
            Backing::Coded(store) => store.touched(blocks),
        }
    }

    /// The store, if the mode codes.
    pub(super) fn store(&self) -> Option<&Store> {
        match &self.backing {
            Backing::Flat(_) => None,
            Backing::Coded(store) => Some(store),
        }
    }

    /// What `block` is charged now.
    pub(super) fn charged(&self, block: u64) -> Charge {
        match &self.backing {
            Backing::Flat(flat) => Charge::flat(flat.is_live(block)),
            // A damaged block is charged nothing.
            Backing::Coded(store) => {
                store.entry(block).map_or_else(|_| Charge::default(), |entry| Charge::of(&entry))
            }
        }
    }

    /// Fetches a block that is coded by itself. If the reader wants only a part of it, the rest is
    /// kept for the next one.
    pub(super) fn read(
        &self,
        class: Class<'_>,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<ReadFrom, FetchError> {
        let (block, mask, inside) = (wanted.block, wanted.mask, &wanted.inside);
        let store = self.store().filter(|_| self.mode == Mode::Trace && wanted.keep);
        let Some(store) = store.filter(|_| *inside != (0..BLOCK_BYTES)) else {
            return self.fetch(class, wanted, words, request).map(|entry| read_from(entry.as_ref()));
        };
        let now = store.entry(block).ok();
        let take = |now| self.decoded.lock().take(block, mask, inside, &DecodedFrom::Block(now));
        let kept = now.clone().and_then(take);
        if let Some(kept) = kept {
            let fetch = Fetch {
                block,
                requested: wanted.requested,
                stored: None,
                by_itself: false,
                format: class.format,
                codec: class.codec,
                view: wanted.view,
                planes: mask,
                entry: None,
            };
            self.accounts.observers.fetched(&fetch, &mut request.tally);
            words.copy_from_slice(&kept);
            return Ok(read_from(now.as_ref()));
        }
        let entry = self.fetch(class, wanted, words, request)?;
        let from = read_from(entry.as_ref());
        let Some(entry) = entry else { return Ok(from) };
        let words = Arc::new(words.to_vec());
        self.decoded.lock().keep(block, mask, inside.clone(), words, DecodedFrom::Block(entry));
        Ok(from)
    }

    /// Fetches a block, and prefetches the next one that the request wants as far as it is like
    /// what was fetched so far: the entry that it was fetched by, if the mode has any.
    fn fetch(
        &self,
        class: Class<'_>,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<Option<Entry>, FetchError> {
        let Wanted { block, next, mask, requested, view, first, .. } = *wanted;
        let Class { format, codec, .. } = class;
        let Request { scratch, tally } = request;
        let scratch = &mut **scratch;
        let observers = &self.accounts.observers;
        let expected = tally.stored.checked_div(tally.blocks).unwrap_or(UNKNOWN_BYTES);
        tally.blocks += 1;
        let reported = |stored, planes, entry: Option<&Entry>, tally: &mut Tally| {
            tally.stored += stored;
            let (stored, by_itself) = (Some(stored), first);
            let fetch = Fetch { block, requested, stored, by_itself, format, codec, view, planes, entry };
            observers.fetched(&fetch, tally);
        };
        let store = match &self.backing {
            Backing::Flat(flat) => {
                // By definition of this mode.
                reported(requested.iter().map(lines).sum(), mask, None, tally);
                flat.read(block, words);
                clear_outside(format, mask, words);
                return Ok(None);
            }
            Backing::Coded(store) => store,
        };
        // A block that is kept in another format than its tensor's, or as words, gives its planes
        // only whole.
        let select = |stored: &Stored| if fits(stored, format) { mask } else { PlaneMask(u32::MAX) };
        // In two parts: asked for all lines at once, the processor does little else until most have
        // come.
        let half = (expected / 2).next_multiple_of(store::GRANULE_BYTES as u64);
        let prefetch = |bytes: Range<u64>| {
            if let Some(next) = next {
                store.prefetch(next, bytes);
            }
        };
        prefetch(0..half);
        let Scratch { fetched: AlignedBundle(bundle), decoder, .. } = &mut *scratch;
        let fetched = match store.fetch(block, select, bundle) {
            Ok(fetched) => fetched,
            Err(why) => {
                reported(0, mask, None, tally);
                return Err(damaged(None, why.into()));
            }
        };
        prefetch(half..expected + MARGIN_BYTES);
        reported(fetched.bytes, fetched.mask, Some(&fetched.entry), tally);
        match decode(decoder, block, &fetched, format, mask, bundle, words) {
            Ok(planes) => {
                tally.planes += planes;
                Ok(Some(fetched.entry))
            }
            Err(why) => Err(damaged(Some(fetched.entry), why)),
        }
    }

    /// Stores, and if there is no room compacts the store and stores again, as long as that gives
    /// anything. No stripe of the store may be held.
    pub(super) fn compacting<T>(&self, store: impl Fn() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let mut left = MAX_COMPACTIONS;
        loop {
            let stored = store();
            let no_room = matches!(&stored, Err(DeviceError::Store(why)) if why.is_no_room());
            if !no_room || left == 0 || !self.store().is_some_and(Store::compact) {
                return stored;
            }
            left -= 1;
        }
    }

    /// Stores `pieces` of `block` of `owner`, each at its place in it, all at once.
    pub(super) fn write(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        block: u64,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), DeviceError> {
        if let (Backing::Coded(_), [(0, data)]) = (&self.backing, pieces)
            && let Ok(words) = <&BlockWords>::try_from(*data)
        {
            let mut bundle = Bundle::new();
            self.encode(class, &Theirs::of(class, block)?, words, &mut bundle);
            return self.write_whole(owner, class, block, words, &bundle);
        }
        self.compacting(|| self.write_parts(owner, class, block, pieces))
    }

    /// Stores whole blocks from `first` on, at most [`MAX_BATCH`], and adds those that are stored
    /// to `done`: coded by as many threads as there are, published in order.
    pub(super) fn write_all(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        first: u64,
        blocks: &[BlockWords],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        if let Backing::Flat(flat) = &self.backing {
            return self.write_all_flat(flat, owner, class, first, blocks, done);
        }
        let mut scratch = self.pool.take();
        let bundles = &mut scratch.bundles;
        if bundles.len() < blocks.len() {
            bundles.resize_with(blocks.len(), Bundle::new);
        }
        let bundles = &mut bundles[..blocks.len()];
        let groups = blocks.chunks(PUBLISHED).zip(bundles.chunks_mut(PUBLISHED)).enumerate();
        let code = |(group, (blocks, bundles))| {
            let first = first + (group * PUBLISHED) as u64;
            (first, blocks, self.encode_all(class, first, blocks, bundles))
        };
        let publish = |(first, blocks, bundles)| {
            if self.publish_together(owner, class, first, blocks, bundles).is_ok() {
                *done += size_of_val(blocks);
                return Ok(());
            }
            // One by one some of them fit, or the store is compacted until they do.
            for ((block, words), bundle) in (first..).zip(blocks).zip(bundles) {
                self.write_whole(owner, class, block, words, bundle)?;
                *done += BLOCK_BYTES;
            }
            Ok(())
        };
        parallel::in_order(groups, code, publish)
    }

    /// Publishes `bundles`, which are `blocks` coded, as the content of these blocks, or nothing if
    /// there is no room for all.
    fn publish_together(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        first: u64,
        blocks: &[BlockWords],
        bundles: &[Bundle],
    ) -> Result<(), DeviceError> {
        let Backing::Coded(store) = &self.backing else { unreachable!("only what is coded has bundles") };
        self.ensure(first..first + blocks.len() as u64)?;
        let admit = |before, after| self.accounts.reserve_together(first, before, after);
        let changes = store.replace_all(first, bundles, admit)?;
        let mut tally = Tally::default();
        let written = (first..).zip(blocks).map(|(block, words)| (block, words, By::Store));
        let parts = std::slice::from_ref(&(0..BLOCK_BYTES));
        self.accounts.written_together(owner, class.codec, parts, &changes, written, &mut tally);
        self.accounts.stats.count_for_write(0, 0, &tally);
        Ok(())
    }

    fn encode_all<'b>(
        &self,
        class: Class<'_>,
        first: u64,
        blocks: &[BlockWords],
        bundles: &'b mut [Bundle],
    ) -> &'b [Bundle] {
        let encoder = &mut self.pool.take().encoder;
        for ((block, words), bundle) in (first..).zip(blocks).zip(&mut *bundles) {
            // What cannot be read is nothing to differ from.
            let theirs = Theirs::of(class, block).unwrap_or_default();
            self.encode_beside(encoder, class, &theirs, words, bundle);
        }
        bundles
    }

    fn encode(&self, class: Class<'_>, theirs: &Theirs, words: &BlockWords, bundle: &mut Bundle) {
        self.encode_beside(&mut self.pool.take().encoder, class, theirs, words, bundle);
    }

    /// Codes `words`, as the difference to `theirs` if that takes fewer granules: whoever reads it
    /// then fetches those too.
    fn encode_beside(
        &self,
        encoder: &mut Encoder,
        class: Class<'_>,
        theirs: &Theirs,
        words: &BlockWords,
        bundle: &mut Bundle,
    ) {
        Layout::encode_block(encoder, self.mode, class.format, class.codec, words, bundle);
        if let Theirs::Words(theirs) = theirs
            && !class.by_itself
        {
            difference::encode_if_shorter(encoder, class.format, class.codec, words, theirs, bundle);
        }
    }

    /// The words of a block, of which `bundle` is stored. `theirs` is what its owner's base holds
    /// there.
    fn decode_whole(
        &self,
        block: u64,
        place: &Place,
        theirs: &Theirs,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<(), DeviceError> {
        self.pool
            .take()
            .decoder
            .block(&place.stored, PlaneMask(u32::MAX), bundle, words)
            .map_err(|why| DeviceError::Damaged { block, why })?;
        match theirs {
            _ if !place.difference => Ok(()),
            Theirs::Words(theirs) => {
                difference::xor(words, theirs);
                Ok(())
            }
            Theirs::Lost(why) => Err(DeviceError::BaseLost { block, why: why.clone() }),
            Theirs::Nothing => Err(no_base(block)),
        }
    }

    /// The entry of `block`, if it is a difference.
    pub(super) fn difference_at(&self, block: u64) -> Option<Entry> {
        let entry = self.store()?.entry(block).ok()?;
        entry.place.as_ref().is_some_and(|place| place.difference).then_some(entry)
    }

    /// What becomes of a read of `block` that is a difference and whose owner has no base.
    pub(super) fn without_base(&self, block: u64) -> FetchError {
        match self.difference_at(block) {
            Some(entry) => FetchError::Damaged { entry: Some(Box::new(entry)), why: no_base(block) },
            None => FetchError::Stale,
        }
    }

    /// The same where words are kept as they are: copied by as many threads as there are.
    fn write_all_flat(
        &self,
        flat: &Flat,
        owner: Option<&Tensor>,
        class: Class<'_>,
        first: u64,
        blocks: &[BlockWords],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        self.ensure(first..first + blocks.len() as u64)?;
        // The first block that was refused. What is stored behind it is not counted as stored, and
        // may be stored again.
        let refused: Mutex<Option<(usize, DeviceError)>> = Mutex::new(None);
        parallel::for_each(blocks.chunks(COPIED).enumerate(), |(run, blocks)| {
            let at = run * COPIED;
            if self.write_run(flat, owner, class.codec, first + at as u64, blocks).is_ok() {
                return;
            }
            // Some of them may fit the quota.
            for (at, words) in (at..).zip(blocks) {
                let Err(why) = self.write(owner, class, first + at as u64, &[(0, words)]) else { continue };
                let mut refused = refused.lock();
                if refused.as_ref().is_none_or(|(before, _)| at < *before) {
                    *refused = Some((at, why));
                }
                break;
            }
        });
        let (stored, why) = refused.into_inner().map_or((blocks.len(), Ok(())), |(at, why)| (at, Err(why)));
        *done += stored * BLOCK_BYTES;
        why
    }

    /// Stores a run of at most [`COPIED`] blocks, all of it or nothing.
    fn write_run(
        &self,
        flat: &Flat,
        owner: Option<&Tensor>,
        codec: Codec,
        first: u64,
        blocks: &[BlockWords],
    ) -> Result<(), DeviceError> {
        // Stripes are taken in the order of blocks. Where a run goes from the last stripe to the
        // first, nobody who holds one of the first wants one of the last: no run is so long.
        let turns: Vec<_> = (first..).zip(blocks).map(|(block, _)| flat.turn(block)).collect();
        let charges = |(block, words): (u64, &BlockWords)| {
            (Charge::flat(flat.is_live(block)), Charge::flat(!is_zero(words)))
        };
        let charges: Vec<_> = (first..).zip(blocks).map(charges).collect();
        let sum = |which: fn(&(Charge, Charge)) -> u64| charges.iter().map(which).sum::<u64>();
        self.accounts.reserve(first, sum(|(old, _)| old.bytes), sum(|(_, new)| new.bytes))?;
        flat.memory.write_pages(by_index(first) * BLOCK_BYTES, blocks.as_flattened());
        for ((block, words), (old, new)) in (first..).zip(blocks).zip(charges) {
            flat.set_live(block, new.live);
            let mut tally = Tally::default();
            let by = By::Store;
            let written = Written { block, words, codec, old, new, by, entry: None, read: None };
            self.accounts.written(owner, std::slice::from_ref(&(0..BLOCK_BYTES)), &written, &mut tally);
            self.accounts.stats.count_for_write(0, 0, &tally);
        }
        drop(turns);
        Ok(())
    }

    /// Publishes `bundle`, which is `words` coded, as the content of `block`. Nothing of what was
    /// there is read.
    fn write_whole(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        block: u64,
        words: &BlockWords,
        bundle: &Bundle,
    ) -> Result<(), DeviceError> {
        let Backing::Coded(store) = &self.backing else { unreachable!("only what is coded has bundles") };
        self.ensure(block..block + 1)?;
        let (old, new) = self.compacting(|| {
            let replace = match store.replace(block) {
                Ok(replace) => replace,
                // Nothing of the damaged block is needed: this write mends it.
                Err(StoreError::Entry { .. }) => store.replace_damaged(block),
                Err(other) => return Err(other.into()),
            };
            self.publish(block, replace, bundle)
        })?;
        let mut tally = Tally::default();
        let entry = Some(&new);
        let (old, new) = (Charge::of(&old), Charge::of(&new));
        let written =
            Written { block, words, codec: class.codec, old, new, by: By::Store, entry, read: None };
        self.accounts.written(owner, std::slice::from_ref(&(0..BLOCK_BYTES)), &written, &mut tally);
        self.accounts.stats.count_for_write(0, 0, &tally);
        Ok(())
    }

    /// Stores `pieces` of `block`, which is read first.
    fn write_parts(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        block: u64,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), DeviceError> {
        self.ensure(block..block + 1)?;
        let mut words = [0; BLOCK_BYTES];
        let change = |words: &mut BlockWords| {
            for (inside, data) in pieces {
                words[*inside..inside + data.len()].copy_from_slice(data);
            }
        };
        let parts: Vec<_> = pieces.iter().map(|(inside, data)| *inside..inside + data.len()).collect();
        // What has to be read first, which is counted when the block is written.
        let mut tally = Tally::default();
        let (charges, entries) = match &self.backing {
            Backing::Flat(flat) => {
                let _turn = flat.turn(block);
                // By definition of this mode.
                tally.stored = parts.iter().filter(|part| part.len() < BLOCK_BYTES).map(partial_lines).sum();
                let was = flat.is_live(block);
                let (before, after) =
                    (Charge::flat(was), Charge::flat(flat.becomes_live(block, was, pieces)));
                self.accounts.reserve(block, before.bytes, after.bytes)?;
                flat.write(block, pieces);
                flat.set_live(block, after.live);
                if self.accounts.observers.are_on() {
                    // Only they want to know what it holds.
                    flat.read(block, &mut words);
                }
                ((before, after), None)
            }
            Backing::Coded(store) => {
                // Before the block is held.
                let theirs = Theirs::of(class, block)?;
                let replace = store.replace(block)?;
                let mut old = [0; MAX_BUNDLE];
                replace.fetch_old(&mut old);
                add_old(replace.old(), &mut tally);
                if let Some(place) = &replace.old().place {
                    let decoded = self.decode_whole(block, place, &theirs, &old, &mut words);
                    if let Err(why) = decoded {
                        let entry = replace.old().clone();
                        drop(replace);
                        self.lose_damaged(owner, block, Some(&entry), &why);
                        return Err(why);
                    }
                }
                change(&mut words);
                let mut bundle = Bundle::new();
                self.encode(class, &theirs, &words, &mut bundle);
                let (old, new) = self.publish(block, replace, &bundle)?;
                ((Charge::of(&old), Charge::of(&new)), Some((old, new)))
            }
        };
        let written = Written {
            block,
            words: &words,
            codec: class.codec,
            old: charges.0,
            new: charges.1,
            by: By::Store,
            entry: entries.as_ref().map(|(_, new)| new),
            read: entries.as_ref().map(|(old, _)| old),
        };
        let read = (tally.blocks, tally.stored) != (0, 0);
        self.accounts.written(owner, &parts, &written, &mut tally);
        let bytes = if read { parts.iter().map(|part| part.len() as u64).sum() } else { 0 };
        self.accounts.stats.count_for_write(u64::from(bytes > 0), bytes, &tally);
        Ok(())
    }

    /// Codes `block` anew as `class` says, if it holds data. A damaged one is poisoned.
    pub(super) fn recode(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        block: u64,
    ) -> Result<(), DeviceError> {
        self.compacting(|| self.recode_once(owner, class, block))
    }

    fn recode_once(&self, owner: Option<&Tensor>, class: Class<'_>, block: u64) -> Result<(), DeviceError> {
        let Backing::Coded(store) = &self.backing else { return Ok(()) };
        // Before the block is held.
        let theirs = Theirs::of(class, block)?;
        let replace = match store.replace(block) {
            // It stays poisoned.
            Err(StoreError::Entry { .. }) => return Ok(()),
            replace => replace?,
        };
        let Some(place) = &replace.old().place else { return Ok(()) };
        let (mut bytes, mut words, mut bundle) = ([0; MAX_BUNDLE], [0; BLOCK_BYTES], Bundle::new());
        replace.fetch_old(&mut bytes);
        let mut tally = Tally::default();
        add_old(replace.old(), &mut tally);
        if let Err(why) = self.decode_whole(block, place, &theirs, &bytes, &mut words) {
            let entry = replace.old().clone();
            drop(replace);
            self.lose_damaged(owner, block, Some(&entry), &why);
            return Ok(());
        }
        self.encode(class, &theirs, &words, &mut bundle);
        let (old, new) = self.publish(block, replace, &bundle)?;
        let (codec, by, entry) = (class.codec, By::Maintenance, Some(&new));
        let (old, new) = (Charge::of(&old), Charge::of(&new));
        let written = Written { block, words: &words, codec, old, new, by, entry, read: None };
        self.accounts.written(owner, &[], &written, &mut tally);
        self.accounts.stats.count_for_maintenance(1, &tally);
        Ok(())
    }

    fn publish(
        &self,
        block: u64,
        replace: Replace<'_>,
        bundle: &Bundle,
    ) -> Result<(Entry, Entry), DeviceError> {
        let old = replace.old().clone();
        let (before, after) = (old.charged(), charge_of(bundle));
        self.accounts.reserve(block, before, after)?;
        let new = replace.publish(bundle).inspect_err(|_| self.accounts.give_back(block, before, after))?;
        self.accounts.stats.replaced(&old, &new);
        Ok((old, new))
    }

    /// Makes zeros of a block by itself, if it is poisoned.
    pub(super) fn clear_poison(
        &self,
        owner: Option<&Tensor>,
        class: Class<'_>,
        block: u64,
    ) -> Result<(), DeviceError> {
        let Some(store) = self.store() else { return Ok(()) };
        // Since it was listed somebody may have written it.
        let Some(replace) = store.replace_if_damaged(block) else { return Ok(()) };
        replace.publish(&Bundle::new())?;
        self.accounts.stats.index_written.add(1);
        let nothing = Charge::default();
        let words = &[0; BLOCK_BYTES];
        let (old, new, by) = (nothing, nothing, By::Store);
        let written = Written { block, words, codec: class.codec, old, new, by, entry: None, read: None };
        let mut tally = Tally::default();
        self.accounts.written(owner, &[], &written, &mut tally);
        self.accounts.stats.count_index(&tally);
        Ok(())
    }

    /// Poisons a block by itself, if its entry is `meant`.
    pub(super) fn lose(
        &self,
        owner: Option<&Tensor>,
        block: u64,
        why: &Why,
        meant: impl FnOnce(Option<&Entry>) -> bool,
    ) -> Result<(), DeviceError> {
        let Some(store) = self.store() else { return Ok(()) };
        let known = store.losses().lists(block);
        let Some(old) = store.poison(block, why, meant)? else { return Ok(()) };
        self.accounts.stats.replaced(&old, &Entry::default());
        let before = Charge::of(&old);
        self.accounts.give_back(block, 0, before.bytes());
        self.accounts.charge(owner, block, before, Charge::default());
        self.decoded.lock().forget(block);
        if !known {
            poison::say_lost(block, why);
        }
        Ok(())
    }

    /// Poisons a block that was found damaged by this entry, or has none that can be read: whether
    /// it still is what was found. If it was written meanwhile it is another one, and stays.
    pub(super) fn lose_damaged(
        &self,
        owner: Option<&Tensor>,
        block: u64,
        entry: Option<&Entry>,
        why: &DeviceError,
    ) -> bool {
        let why = Why::new(poison::Cause::Damaged, &why.to_string());
        let mut is_meant = true;
        let meant = |now: Option<&Entry>| {
            is_meant = now == entry;
            is_meant
        };
        if let Err(full) = self.lose(owner, block, &why, meant) {
            // What was read had an entry, so there is room for one; who reads it next finds the
            // same.
            tracing::warn!(block, "a damaged block is not poisoned: {full}");
        }
        is_meant
    }

    /// Flips a stored bit, for tests of what notices it.
    #[cfg(test)]
    pub(super) fn flip_stored_bit(&self, block: u64, bit: usize) {
        match &self.backing {
            Backing::Coded(store) => store.flip_bit(block, bit),
            Backing::Flat(..) => panic!("a plain device keeps no checks"),
        }
    }
}

/// The words that the planes in `mask` give of a block that was fetched to `bundle`: how many
/// planes were decoded.
fn decode(
    decoder: &mut Decoder,
    block: u64,
    fetched: &Fetched,
    format: Format,
    mask: PlaneMask,
    bundle: &[u8; MAX_BUNDLE],
    words: &mut BlockWords,
) -> Result<u64, DeviceError> {
    let Some(place) = &fetched.entry.place else {
        words.fill(0);
        return Ok(0);
    };
    if place.stored.is_of_window() {
        // It is of a KV window. Who has the map knows whether there is one, or an image says
        // anything.
        let value = place.stored.head_bytes() as u64;
        let why = Damaged::Field { field: "head of a block outside KV windows", value };
        return Err(StoreError::Entry { block, why }.into());
    }
    decoder
        .block(&place.stored, fetched.mask, bundle, words)
        .map_err(|why| DeviceError::Damaged { block, why })?;
    if !fits(&place.stored, format) {
        clear_outside(format, mask, words);
    }
    Ok(planes_of(&place.stored, fetched.mask))
}

/// What is stored of a block that has such an entry, or none.
fn read_from(entry: Option<&Entry>) -> ReadFrom {
    match entry.map(|entry| &entry.place) {
        Some(None) => ReadFrom::Nothing,
        Some(Some(place)) if place.difference => ReadFrom::Difference,
        _ => ReadFrom::Content,
    }
}

/// That a block is a difference whose owner has no base.
pub(super) fn no_base(block: u64) -> DeviceError {
    let why = Damaged::Field { field: "difference of a block without a base", value: 1 };
    StoreError::Entry { block, why }.into()
}

/// Damage is told apart from other errors.
fn damaged(entry: Option<Entry>, why: DeviceError) -> FetchError {
    if poison::is_damage(&why) {
        FetchError::Damaged { entry: entry.map(Box::new), why }
    } else {
        FetchError::Failed(why)
    }
}

/// Adds that all of what `old` names was read to code its block anew.
fn add_old(old: &Entry, tally: &mut Tally) {
    tally.blocks += 1;
    tally.stored += old.charged();
    if let Some(place) = &old.place {
        tally.planes += planes_of(&place.stored, PlaneMask(u32::MAX));
    }
}

/// Whether `stored` has planes of `format`, so that some can be had without the others.
pub(super) fn fits(stored: &Stored, format: Format) -> bool {
    matches!(stored, Stored::Planes(planes) if planes.format == format)
}

/// Zeroes the planes that are not in `mask`, if there are planes.
pub(super) fn clear_outside(format: Format, mask: PlaneMask, words: &mut BlockWords) {
    if format != Format::Opaque {
        plane::clear_outside(format, mask, words);
    }
}

/// Planes that a fetch of `mask` selected; none of words.
pub(super) fn planes_of(stored: &Stored, mask: PlaneMask) -> u64 {
    match stored {
        Stored::Planes(planes) => u64::from((mask.0 & PlaneMask::all(planes.format).0).count_ones()),
        Stored::Words { .. } | Stored::Packed { .. } => 0,
    }
}
