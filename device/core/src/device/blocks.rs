//! The middle of the line: one block in, one block out, in the device's mode.

use std::{cell::RefCell, ops::Range, sync::Arc, time::Instant};

use parking_lot::Mutex;

use super::{
    Device, DeviceConfig, DeviceError,
    charge::{self, Charge, charge_of},
    lines, poison,
};
use crate::coding::{decoder, encoder};
use crate::{layout::Layout, stats::Tally, window::Map};
use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, Form,
    block::{Bundle, MAX_BUNDLE, Stored, is_zero},
    format::Format,
    plane::{self, PlaneMask},
};
use lamina_store as store;
use lamina_store::{
    Fetched, Store, StoreError,
    entry::{Damaged, Entry},
    image::Image,
    memory::Memory,
    mode::Mode,
};

/// How often a store without room is compacted for one block: others may take what that gives.
const MOST_COMPACTIONS: u32 = 8;

/// Bytes that are expected of a block if none was fetched yet that would tell.
const UNKNOWN_BYTES: u64 = BLOCK_BYTES as u64 / 2;

/// By how many bytes more than usual a block is expected to be stored: some are longer, and to wait for the end of one takes as long as for all of it.
const MARGIN_BYTES: u64 = 256;

/// What is stored of a block, where it was fetched to. Lines of it are lines of the segment, and so copied without shifting.
#[repr(align(64))]
struct AlignedBundle([u8; MAX_BUNDLE]);

thread_local! {
    static BUNDLE: RefCell<AlignedBundle> = const { RefCell::new(AlignedBundle([0; MAX_BUNDLE])) };
}

/// For whom a block is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// A host stored into it.
    Store,
    /// A host stored into other blocks of its KV window.
    Window,
    /// The device itself: its tensor is made or removed.
    Maintenance,
}

/// Where a block is decoded to.
pub(super) struct Room<'w> {
    pub(super) words: &'w mut BlockWords,
    /// How its elements may lie there, and then how they do.
    pub(super) form: Form,
}

/// Blocks as the mode keeps them.
pub(super) struct Blocks {
    kept: Kept,
    /// A byte a block: granules that a generically compressing device would store for it.
    gcomp: Memory,
}

enum Kept {
    /// CXL-Plain: the words at their addresses.
    Flat(Flat),
    /// Coded, behind the plane index.
    Coded(Box<Store>),
}

struct Flat {
    memory: Memory,
    bytes: u64,
    /// Writers of one block take turns, so that it is counted once; readers need not.
    stripes: Vec<Mutex<()>>,
}

impl Kept {
    fn flat(memory: Memory, bytes: u64) -> Self {
        Self::Flat(Flat { memory, bytes, stripes: (0..store::STRIPES).map(|_| Mutex::new(())).collect() })
    }
}

impl Flat {
    /// Calls for every block that is not zeros, in memory that was opened.
    fn for_each_live(&self, mut found: impl FnMut(u64)) {
        let mut words = [0; BLOCK_BYTES];
        let live = self.memory.populated();
        for block in live.into_iter().flat_map(|range| range.start / BLOCK_BYTES..range.end / BLOCK_BYTES) {
            self.read(block as u64, &mut words);
            if !is_zero(&words) {
                found(block as u64);
            }
        }
    }

    fn read(&self, block: u64, words: &mut BlockWords) {
        self.memory.read(index(block) * BLOCK_BYTES, words);
    }
}

impl Blocks {
    pub(super) fn new(config: &DeviceConfig) -> Result<Self, StoreError> {
        let blocks = store::blocks(config.base_bytes);
        let kept = match config.mode {
            Mode::Plain => Kept::flat(Memory::reserve("base window", config.base_bytes)?, config.base_bytes),
            Mode::GComp | Mode::Trace => Kept::Coded(Box::new(Store::new(blocks, config.store_bytes())?)),
        };
        Ok(Self { kept, gcomp: Memory::reserve("comparison with gcomp", blocks)? })
    }

    /// The blocks that lie in `image`; `found` is told what each one that holds data is charged, by several threads.
    pub(super) fn open<T: Default + Send>(
        image: &Image,
        found: impl Fn(&mut T, u64, &Entry, &Charge) + Sync,
    ) -> Result<(Self, Vec<T>), StoreError> {
        let superblock = image.superblock();
        let mut all = Vec::new();
        let kept = if superblock.mode == Mode::Plain {
            let kept = Kept::flat(image.segments()?, superblock.base_bytes);
            if let Kept::Flat(flat) = &kept {
                let mut live = T::default();
                flat.for_each_live(|block| found(&mut live, block, &Entry::default(), &Charge::flat(true)));
                all.push(live);
            }
            kept
        } else {
            let begun = Instant::now();
            let told = |all: &mut T, block, entry: &Entry| found(all, block, entry, &Charge::of(entry));
            let (store, opened, stock) = Store::open(image, told)?;
            all = stock;
            tracing::debug!(threads = all.len(), took = ?begun.elapsed(), "stock is taken");
            if opened != store::Opened::default() {
                let (replayed, poisoned) = (opened.replayed, opened.damaged.len());
                tracing::info!(replayed, poisoned, "the store is as the last process left it");
            }
            Kept::Coded(Box::new(store))
        };
        Ok((Self { kept, gcomp: image.gcomp()? }, all))
    }

    /// Makes sure that these blocks can be written.
    pub(super) fn ensure(&self, blocks: Range<u64>) -> Result<(), StoreError> {
        let (start, end) = (index(blocks.start), index(blocks.end));
        self.gcomp.ensure(start..end)?;
        match &self.kept {
            Kept::Flat(flat) => flat.memory.ensure(start * BLOCK_BYTES..end * BLOCK_BYTES),
            Kept::Coded(_) => Ok(()),
        }
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        match &self.kept {
            Kept::Flat(flat) => flat.bytes,
            Kept::Coded(store) => store.capacity_bytes(),
        }
    }

    #[cfg(test)]
    pub(super) fn used_bytes(&self) -> u64 {
        match &self.kept {
            Kept::Flat(flat) => flat.bytes,
            Kept::Coded(store) => store.used_bytes(),
        }
    }

    /// The first of these blocks that may hold anything, some that follow one another.
    pub(super) fn touched(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        match &self.kept {
            Kept::Flat(flat) => {
                let bytes = index(blocks.start) * BLOCK_BYTES..index(blocks.end) * BLOCK_BYTES;
                let found = flat.memory.touched(bytes)?;
                Some((found.start / BLOCK_BYTES) as u64..(found.end / BLOCK_BYTES) as u64)
            }
            Kept::Coded(store) => store.touched(blocks),
        }
    }

    fn gcomp_granules(&self, block: u64) -> u8 {
        let mut granules = [0];
        self.gcomp.read(index(block), &mut granules);
        granules[0]
    }

    fn set_gcomp_granules(&self, block: u64, granules: u8) {
        self.gcomp.write(index(block), &[granules]);
    }
}

impl Device {
    /// The words that the planes in `mask` of `block` give, all other planes zero, counted in `tally`; the pattern of poison if they are damaged. `false` if the block is
    /// part of a KV window that the caller's map does not know yet, or was until now.
    pub(super) fn fetch(
        &self,
        block: u64,
        format: Format,
        mask: PlaneMask,
        words: &mut BlockWords,
        tally: &mut Tally,
    ) -> Result<bool, DeviceError> {
        let mut room = Room { words, form: Form::Words };
        self.fetch_before(block, None, format, mask, &mut room, tally)
    }

    /// As [`Self::fetch`], to `room`, for a reader who wants `next` next, if any: it is [expected](Store::expect) meanwhile, as far as it is like what the request has fetched so far.
    pub(super) fn fetch_before(
        &self,
        block: u64,
        next: Option<u64>,
        format: Format,
        mask: PlaneMask,
        room: &mut Room<'_>,
        tally: &mut Tally,
    ) -> Result<bool, DeviceError> {
        let expected = tally.stored.checked_div(tally.blocks).unwrap_or(UNKNOWN_BYTES);
        tally.blocks += 1;
        self.add_gcomp(block, tally);
        let store = match &self.blocks.kept {
            Kept::Flat(flat) => {
                // By definition of this mode.
                (tally.stored, tally.stored_of) = (tally.plain, tally.plain_of);
                flat.read(block, room.words);
                clear_outside(format, mask, room.words);
                room.form = Form::Words;
                return Ok(true);
            }
            Kept::Coded(store) => store,
        };
        // A block that is kept in another format than its tensor's, or as words, gives its planes only whole.
        let select = |stored: &Stored| if fits(stored, format) { mask } else { PlaneMask(u32::MAX) };
        // In two parts: asked for all lines at once, the processor does little else until most have
        // come (measured by the benchmark disk/read/base).
        let half = (expected / 2).next_multiple_of(store::GRANULE_BYTES as u64);
        let expect = |bytes: Range<u64>| {
            if let Some(next) = next {
                store.expect(next, bytes);
            }
        };
        BUNDLE.with_borrow_mut(|AlignedBundle(bundle)| {
            expect(0..half);
            self.touch_index(block, tally);
            let fetched = match store.fetch(block, select, bundle) {
                Ok(fetched) => fetched,
                Err(why) => return self.show_poison(block, None, why.into(), format, mask, room),
            };
            expect(half..expected + MARGIN_BYTES);
            match self.decode(block, &fetched, format, mask, bundle, room, tally) {
                Err(why) => {
                    let entry = Some(&fetched.entry);
                    self.show_poison(block, entry, why, format, mask, room)
                }
                decoded => decoded,
            }
        })
    }

    /// Gives the pattern of poison for a block that could not be read by its entry, if it has one,
    /// because it is damaged. `false` as [`Self::fetch`].
    fn show_poison(
        &self,
        block: u64,
        entry: Option<&Entry>,
        why: DeviceError,
        format: Format,
        mask: PlaneMask,
        room: &mut Room<'_>,
    ) -> Result<bool, DeviceError> {
        if !Self::is_damage(&why) {
            return Err(why);
        }
        if !self.found_damage(block, entry, &why) {
            return Ok(false);
        }
        self.stats.damaged_reads.add(1);
        room.form = Form::Words;
        room.words.fill(poison::PATTERN);
        clear_outside(format, mask, room.words);
        Ok(true)
    }

    /// The words that the planes in `mask` give of a block that was fetched to `bundle`. `false` as [`Self::fetch`].
    #[expect(clippy::too_many_arguments, reason = "what was fetched, and what is wanted of it")]
    pub(super) fn decode(
        &self,
        block: u64,
        fetched: &Fetched,
        format: Format,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        room: &mut Room<'_>,
        tally: &mut Tally,
    ) -> Result<bool, DeviceError> {
        self.add_stored(block, fetched.bytes, tally);
        let Some(place) = &fetched.entry.place else {
            // In either form.
            room.words.fill(0);
            return Ok(true);
        };
        if place.stored.head_bytes() > 0 {
            let map = self.map.read_recursive();
            let owner = map.tensor_at(block * BLOCK_BYTES as u64);
            if owner.is_some_and(|tensor| tensor.windows.is_some()) {
                return Ok(false);
            }
            // Its tensor may have been removed since it was fetched, and it was coded anew then. None is removed while the map is held.
            let now = self.coded_store().and_then(|store| store.entry(block).ok());
            if now.as_ref() != Some(&fetched.entry) {
                return Ok(false);
            }
            // An image may say anything.
            let value = place.stored.head_bytes() as u64;
            let why = Damaged::Field { field: "head of a block outside KV windows", value };
            return Err(StoreError::Entry { block, why }.into());
        }
        let fits = fits(&place.stored, format);
        let form = if fits { room.form } else { Form::Words };
        room.form = decoder()
            .block_to(&place.stored, fetched.mask, bundle, form, room.words)
            .map_err(|why| DeviceError::Damaged { block, why })?;
        tally.planes += planes_of(&place.stored, fetched.mask);
        if !fits {
            clear_outside(format, mask, room.words);
        }
        Ok(true)
    }

    /// As [`Self::fetch`], for a reader who wants bytes `inside` of the block: the rest is kept for the next one.
    pub(super) fn fetch_part(
        &self,
        block: u64,
        format: Format,
        inside: Range<usize>,
        mask: PlaneMask,
        words: &mut BlockWords,
        tally: &mut Tally,
    ) -> Result<bool, DeviceError> {
        let store = self.coded_store().filter(|_| self.config.mode == Mode::Trace);
        let Some(store) = store.filter(|_| inside != (0..BLOCK_BYTES)) else {
            return self.fetch(block, format, mask, words, tally);
        };
        // If the block is written meanwhile, its entry is another one, and what is kept under this one is not found.
        let Ok(entry) = store.entry(block) else { return self.fetch(block, format, mask, words, tally) };
        if let Some(kept) = self.windows.decoded.lock().take(block, mask, &inside, Some(&entry)) {
            words.copy_from_slice(&kept);
            return Ok(true);
        }
        let found = self.fetch(block, format, mask, words, tally)?;
        if found {
            let words = Arc::new(words.to_vec());
            self.windows.decoded.lock().keep(block, mask, inside, words, Some(entry));
        }
        Ok(found)
    }

    /// Bytes that a generically compressing device would fetch of `block`.
    pub(super) fn gcomp_bytes(&self, block: u64) -> u64 {
        u64::from(self.blocks.gcomp_granules(block)) * store::GRANULE_BYTES as u64
    }

    /// Adds what a generically compressing device fetches of `block`, and of its index.
    pub(super) fn add_gcomp(&self, block: u64, tally: &mut Tally) {
        tally.gcomp += self.gcomp_bytes(block);
        self.touch_gcomp_index(block, tally);
    }

    /// Looks for the entry of `block` in the modelled cache of entries.
    pub(super) fn touch_index(&self, block: u64, tally: &mut Tally) {
        let hit = self.index_cache.touch(block);
        *(if hit { &mut tally.index_hits } else { &mut tally.index_misses }) += 1;
    }

    /// The same in GComp's.
    pub(super) fn touch_gcomp_index(&self, block: u64, tally: &mut Tally) {
        if self.config.compare_gcomp {
            let hit = self.gcomp_index_cache.touch(block);
            *(if hit { &mut tally.gcomp_index_hits } else { &mut tally.gcomp_index_misses }) += 1;
        }
    }

    /// Adds what devices that keep a block by itself read to store `length` bytes at `inside` of
    /// `block`: a plain one the lines that are stored in part, GComp the whole block. Of which it
    /// looks for the entry anyway.
    pub(super) fn add_partial_store(&self, block: u64, inside: usize, length: usize, tally: &mut Tally) {
        if length > 0 && length < BLOCK_BYTES {
            tally.plain += partial_lines(inside, length);
            tally.gcomp += self.gcomp_bytes(block);
        }
    }

    /// The store, if the mode codes.
    pub(super) fn coded_store(&self) -> Option<&Store> {
        match &self.blocks.kept {
            Kept::Flat(_) => None,
            Kept::Coded(store) => Some(store),
        }
    }

    /// Stores, and if there is no room compacts the store and stores again, as long as that gives anything. No stripe of the store may be held.
    pub(super) fn compacting<T>(&self, store: impl Fn() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let mut left = MOST_COMPACTIONS;
        loop {
            let stored = store();
            let no_room = matches!(&stored, Err(DeviceError::Store(why)) if why.is_no_room());
            if !no_room || left == 0 || !self.coded_store().is_some_and(Store::compact) {
                return stored;
            }
            left -= 1;
        }
    }

    /// Writes `pieces` of `block`, each at its place in it, all at once. The caller holds `map`, and so who owns the block.
    pub(super) fn write_block(
        &self,
        map: &Map,
        block: u64,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), DeviceError> {
        self.compacting(|| self.write_block_once(map, block, pieces))
    }

    fn write_block_once(&self, map: &Map, block: u64, pieces: &[(usize, &[u8])]) -> Result<(), DeviceError> {
        let owner = map.tensor_at(block * BLOCK_BYTES as u64);
        let (format, codec) = owner
            .map_or((Format::Opaque, self.config.codec), |tensor| (tensor.info.format, tensor.info.codec));
        self.blocks.ensure(block..block + 1)?;
        let mut words = [0; BLOCK_BYTES];
        let mut bundle = Bundle::new();
        let change = |words: &mut BlockWords| {
            for (inside, data) in pieces {
                words[*inside..inside + data.len()].copy_from_slice(data);
            }
        };
        let whole = pieces.iter().any(|(_, data)| data.len() == BLOCK_BYTES);
        // What has to be read first, which is counted when the block is written.
        let mut tally = Tally::default();
        self.touch_gcomp_index(block, &mut tally);
        for (inside, data) in pieces {
            self.add_partial_store(block, *inside, data.len(), &mut tally);
        }
        // It is fetched once for all pieces.
        tally.gcomp = tally.gcomp.min(self.gcomp_bytes(block));
        let (old, new) = match &self.blocks.kept {
            Kept::Flat(flat) => {
                let _turn = flat.stripes[index(block % store::STRIPES as u64)].lock();
                // By definition of this mode.
                tally.stored = tally.plain;
                flat.read(block, &mut words);
                let before = Charge::flat(!is_zero(&words));
                change(&mut words);
                let after = Charge::flat(!is_zero(&words));
                self.account(block, before.bytes, after.bytes)?;
                for (inside, data) in pieces {
                    flat.memory.write(index(block) * BLOCK_BYTES + inside, data);
                }
                (before, after)
            }
            Kept::Coded(store) if whole => {
                self.touch_index(block, &mut tally);
                change(&mut words);
                Layout::encode_block(self.config.mode, format, codec, &words, &mut bundle);
                let replace = match store.replace(block) {
                    Ok(replace) => replace,
                    // Nothing of the damaged block is needed: this write mends it.
                    Err(StoreError::Entry { .. }) => store.replace_damaged(block),
                    Err(other) => return Err(other.into()),
                };
                self.publish(block, replace, &bundle)?
            }
            Kept::Coded(store) => {
                let replace = store.replace(block)?;
                let mut old = [0; MAX_BUNDLE];
                replace.fetch_old(&mut old);
                self.add_old(block, replace.old(), &mut tally);
                if let Some(place) = &replace.old().place {
                    let all = PlaneMask(u32::MAX);
                    let decoded = decoder().block(&place.stored, all, &old, &mut words);
                    if let Err(why) = decoded {
                        let (why, entry) = (DeviceError::Damaged { block, why }, replace.old().clone());
                        drop(replace);
                        self.found_damage(block, Some(&entry), &why);
                        return Err(why);
                    }
                }
                change(&mut words);
                Layout::encode_block(self.config.mode, format, codec, &words, &mut bundle);
                self.publish(block, replace, &bundle)?
            }
        };
        let bytes: usize = pieces.iter().map(|(_, data)| data.len()).sum();
        let bytes = if whole || (tally.blocks, tally.stored) == (0, 0) { 0 } else { bytes as u64 };
        self.stats.count_for_write(u64::from(bytes > 0), bytes, &tally);
        self.written(map, block, codec, &words, (old, new), By::Store);
        Ok(())
    }

    /// Adds that all of what `old` names was read to code `block` anew.
    fn add_old(&self, block: u64, old: &Entry, tally: &mut Tally) {
        self.touch_index(block, tally);
        tally.blocks += 1;
        tally.stored += old.charged();
        if let Some(place) = &old.place {
            tally.planes += planes_of(&place.stored, PlaneMask(u32::MAX));
        }
    }

    /// Counts that `block` was written with `words`, and charges its owner.
    pub(super) fn written(
        &self,
        map: &Map,
        block: u64,
        codec: Codec,
        words: &BlockWords,
        (old, new): (Charge, Charge),
        by: By,
    ) {
        let stats = &self.stats;
        if by == By::Maintenance {
            stats.recoded_blocks.add(1);
            stats.recoded_bytes.add(new.bytes);
        } else {
            stats.blocks_written.add(1);
            stats.zero_blocks_written.add(u64::from(!new.live));
            stats.bypass_blocks_written.add(u64::from(new.bypass));
            stats.stored_bytes_written.add(new.bytes);
        }
        if let Some(members) = &self.members {
            members.count_stored(block, new.bytes);
        }
        if let Some(part) = self.counted_part(block * BLOCK_BYTES as u64).filter(|_| by != By::Maintenance) {
            part.blocks_written.add(1);
        }
        // The others' words are what they were, so GComp has nothing to do for them.
        if self.config.compare_gcomp && by == By::Store {
            let granules = gcomp_granules(self.config.mode, codec, words, &new);
            stats.gcomp_bytes_written.add(u64::from(granules) * store::GRANULE_BYTES as u64);
            stats.gcomp_index_written.add(1);
            self.blocks.set_gcomp_granules(block, granules);
        }
        self.charge(map, block, old, new);
    }

    /// Codes `block` anew as its owner's blocks are coded, if it holds data and is not part of a KV
    /// window. The caller holds `map`, and so who owns the block. A damaged one is poisoned.
    pub(super) fn recode(&self, map: &Map, block: u64) -> Result<(), DeviceError> {
        self.compacting(|| self.recode_once(map, block))
    }

    fn recode_once(&self, map: &Map, block: u64) -> Result<(), DeviceError> {
        let Kept::Coded(store) = &self.blocks.kept else { return Ok(()) };
        let owner = map.tensor_at(block * BLOCK_BYTES as u64);
        if owner.is_some_and(|tensor| tensor.windows.is_some()) {
            return Ok(());
        }
        let (format, codec) = owner
            .map_or((Format::Opaque, self.config.codec), |tensor| (tensor.info.format, tensor.info.codec));
        let replace = match store.replace(block) {
            // It stays poisoned.
            Err(StoreError::Entry { .. }) => return Ok(()),
            replace => replace?,
        };
        let Some(place) = &replace.old().place else { return Ok(()) };
        let (mut bytes, mut words, mut bundle) = ([0; MAX_BUNDLE], [0; BLOCK_BYTES], Bundle::new());
        replace.fetch_old(&mut bytes);
        let mut tally = Tally::default();
        self.add_old(block, replace.old(), &mut tally);
        let all = PlaneMask(u32::MAX);
        if let Err(why) = decoder().block(&place.stored, all, &bytes, &mut words) {
            let entry = replace.old().clone();
            drop(replace);
            self.found_damage(block, Some(&entry), &DeviceError::Damaged { block, why });
            return Ok(());
        }
        Layout::encode_block(self.config.mode, format, codec, &words, &mut bundle);
        let (old, new) = self.publish(block, replace, &bundle)?;
        self.stats.count_for_maintenance(1, &tally);
        self.stats.recoded_blocks.add(1);
        self.stats.recoded_bytes.add(new.bytes);
        self.charge(map, block, old, new);
        Ok(())
    }

    /// What `block` is charged now.
    pub(super) fn charged(&self, block: u64) -> Charge {
        match &self.blocks.kept {
            Kept::Flat(flat) => {
                let mut words = [0; BLOCK_BYTES];
                flat.read(block, &mut words);
                Charge::flat(!is_zero(&words))
            }
            // A damaged block is charged nothing.
            Kept::Coded(store) => {
                store.entry(block).map_or_else(|_| Charge::default(), |entry| Charge::of(&entry))
            }
        }
    }

    /// Moves the charge of `block` from `old` to `new` in its owner's account.
    pub(super) fn charge(&self, map: &Map, block: u64, old: Charge, new: Charge) {
        charge::charge(&self.stats, map, block, old, new);
    }

    fn publish(
        &self,
        block: u64,
        replace: store::Replace<'_>,
        bundle: &Bundle,
    ) -> Result<(Charge, Charge), DeviceError> {
        let old = replace.old().clone();
        let (before, after) = (old.charged(), charge_of(bundle));
        self.account(block, before, after)?;
        let new = replace.publish(bundle).inspect_err(|_| self.unaccount(block, before, after))?;
        self.stats.replaced(&old, &new);
        Ok((Charge::of(&old), Charge::of(&new)))
    }

    /// Flips a stored bit, for tests of what notices it.
    #[cfg(test)]
    pub(crate) fn flip_stored_bit(&self, block: u64, bit: usize) {
        match &self.blocks.kept {
            Kept::Coded(store) => store.flip_bit(block, bit),
            Kept::Flat(..) => panic!("a plain device keeps no checks"),
        }
    }
}

fn index(block: u64) -> usize {
    usize::try_from(block).expect("a block of this device")
}

/// Whether `stored` has planes of `format`, so that some can be had without the others.
fn fits(stored: &Stored, format: Format) -> bool {
    matches!(stored, Stored::Planes(planes) if planes.format == format)
}

/// Bytes of the lines of 64 bytes that `length` bytes from `inside` of a block on fill in part.
fn partial_lines(inside: usize, length: usize) -> u64 {
    let filled = ((inside + length) / 64).saturating_sub(inside.div_ceil(64)) * 64;
    lines(inside, length) - filled as u64
}

/// Zeroes the planes that are not in `mask`, if there are planes.
fn clear_outside(format: Format, mask: PlaneMask, words: &mut BlockWords) {
    if format != Format::Opaque {
        plane::clear_outside(format, mask, words);
    }
}

/// Planes that a fetch of `mask` selected; none of words.
pub(super) fn planes_of(stored: &Stored, mask: PlaneMask) -> u64 {
    match stored {
        Stored::Planes(planes) => u64::from((mask.0 & PlaneMask::all(planes.format).0).count_ones()),
        Stored::Words { .. } => 0,
    }
}

/// Granules that a generically compressing device stores for `words`.
fn gcomp_granules(mode: Mode, codec: Codec, words: &BlockWords, new: &Charge) -> u8 {
    let bytes = match mode {
        _ if is_zero(words) => 0,
        Mode::GComp => new.bytes,
        Mode::Plain | Mode::Trace => {
            let mut out = [0; BLOCK_BYTES];
            let compressed = encoder().bytes(codec, words, &mut out);
            store::charged(compressed.unwrap_or(BLOCK_BYTES))
        }
    };
    u8::try_from(bytes / store::GRANULE_BYTES as u64).expect("at most 64 granules")
}
