//! KV windows: staged while they are written, coded when they are closed, decoded when they are read (TRACE III-B).
//!
//! The rules:
//! * A store into a KV tensor goes to its *open* window, the paper's staging buffer (eq. 4): the window's bytes as the host sees them. Opening a window decodes what it
//!   holds; closing it codes and publishes it. Until then the store keeps what it had, so whatever fails, nothing is lost.
//! * A window is closed by [`Device::flush`], when all of it was written anew, when some of it was discarded, or when [`open_windows`](super::DeviceConfig::open_windows) are open and another one has to be: then
//!   the least recently written one goes first and the writer waits for it, which is counted as back-pressure.
//! * Everything about a window happens under its lock: a reader sees a window before a store or after it, coded or open, never a mixture. All its
//!   blocks are stored before the first of them is published.
//! * The windows of a tensor that is leaving are coded block by block and closed by every store:
//!   see `tables`.
//! * Locks are taken in this order: the map, a window's, then the tables' and the store's. No two windows' locks are held together.
//! * A window of which stored blocks are damaged is *recovered* by whoever decodes it: its blocks
//!   that have bytes in these are lost and poisoned, and it is coded anew in address order, where
//!   each block stands alone. So who decodes a window knows which blocks of it are lost, and who
//!   publishes one says so.
//! * An open window keeps which of its blocks are lost. A store of part of one is refused, a store
//!   of all of it ends that.
//! * What a window decoded to is kept for its next reader ([`super::decoded`]), and forgotten when the window is opened or published.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use super::{
    Device, DeviceError,
    blocks::By,
    charge::{Charge, charge_of},
    decoded::Decoded,
    poison::{self, Cause},
    staged::{Found, Place},
    windowed,
};
use crate::{
    stats::{Tally, WindowsNow},
    tensor::Tensor,
    window::Map,
};
use lamina_codec::{
    BLOCK_BYTES, BlockWords,
    block::{BlockError, Bundle, MAX_BUNDLE, Stored},
    kv::{self, BlockSet, Coding, Shape, WindowDecoder},
    plane::{self, PlaneMask},
};
use lamina_store as store;
use lamina_store::{Store, StoreError, cause::Why, entry};

/// Locks over the windows.
const STRIPES: usize = 1024;

/// What there is of windows besides the store.
pub(super) struct Windows {
    stripes: Vec<Mutex<()>>,
    staging: Mutex<Staging>,
    /// Most windows that may be open in one part of the device: its share, so that no part waits for another's.
    most: usize,
    parts: usize,
    pub(super) decoded: Mutex<Decoded>,
}

#[derive(Default)]
struct Staging {
    /// By the number of their first block.
    open: BTreeMap<u64, Arc<Open>>,
    /// Windows that are being opened, by part.
    opening: Vec<usize>,
    /// Bytes of all of them.
    bytes: u64,
    clock: u64,
}

/// An open window.
struct Open {
    /// When it was written last.
    written: AtomicU64,
    staged: Mutex<Staged>,
}

/// What an open window holds. Only who holds the window's lock asks for it, so nobody waits.
struct Staged {
    bytes: Vec<u8>,
    /// Where the image keeps them too.
    place: Option<Place>,
    /// Which of its blocks were written whole since it was opened.
    fresh: Vec<bool>,
    /// Which of its blocks are lost.
    lost: BlockSet,
    /// Which of its blocks were written at all.
    touched: Vec<bool>,
}

/// Who has a window published.
#[derive(Clone, Copy)]
enum Origin<'a> {
    /// All of it was stored by a host.
    All,
    /// These of its blocks were.
    Some(&'a [bool]),
    /// The device, which codes it anew. Some of its blocks a host may have written before.
    Anew(&'a [bool]),
}

impl Origin<'_> {
    /// For whom block `at` of the window is coded.
    fn by(self, at: usize) -> By {
        match self {
            Self::All => By::Store,
            Self::Some(touched) if touched[at] => By::Store,
            Self::Some(_) => By::Window,
            Self::Anew(touched) if touched.get(at) == Some(&true) => By::Store,
            Self::Anew(_) => By::Maintenance,
        }
    }
}

impl Staged {
    /// How many of `length` bytes from `at` on can be written: up to a lost block that is not
    /// written whole.
    fn writable(&self, at: usize, length: usize) -> usize {
        let end = at + length;
        let refuses = |block: &usize| {
            let whole = at <= block * BLOCK_BYTES && (block + 1) * BLOCK_BYTES <= end;
            self.lost.has(*block) && !whole
        };
        let refused = (at / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)).find(refuses);
        refused.map_or(length, |block| (block * BLOCK_BYTES).saturating_sub(at))
    }

    fn content(&self) -> Content<'_> {
        Content { bytes: &self.bytes, lost: self.lost, why: None, origin: Origin::Some(&self.touched) }
    }
}

/// What a window holds: its bytes, and which of its blocks are lost, whose bytes are the pattern of
/// poison.
struct Whole {
    bytes: Vec<u8>,
    lost: BlockSet,
    /// Which of its blocks a host has written since they were coded; none if it is empty.
    touched: Vec<bool>,
}

/// The same, to be published.
#[derive(Clone, Copy)]
struct Content<'a> {
    bytes: &'a [u8],
    lost: BlockSet,
    /// Why blocks are lost that are not listed yet.
    why: Option<&'a Why>,
    origin: Origin<'a>,
}

impl<'a> Content<'a> {
    /// Nothing of it is lost.
    fn whole(bytes: &'a [u8]) -> Self {
        Self { bytes, lost: BlockSet::default(), why: None, origin: Origin::All }
    }
}

impl Whole {
    /// Shows the pattern where blocks are lost, of planes in `mask`.
    fn show_lost(&mut self, shape: &Shape, mask: PlaneMask) {
        for block in self.lost.iter() {
            let words = &mut self.bytes.as_chunks_mut().0[block];
            *words = [poison::PATTERN; BLOCK_BYTES];
            if mask != PlaneMask::all(shape.format()) {
                plane::clear_outside(shape.format(), mask, words);
            }
        }
    }
}

/// A window of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    /// The number of its first block, on the device.
    first: u64,
    /// Blocks before it in its tensor.
    before: u64,
    blocks: usize,
}

impl Span {
    /// The window of `tensor` that holds block `block`.
    fn of(tensor: &Tensor, shape: &Shape, block: u64) -> Self {
        let begin = store::blocks(tensor.info.dpa);
        let size = shape.blocks() as u64;
        let before = (block - begin) / size * size;
        let first = begin + before;
        let blocks = size.min(store::blocks(tensor.end()) - first);
        Self { first, before, blocks: usize::try_from(blocks).expect("at most a window's blocks") }
    }

    fn range(&self) -> Range<u64> {
        let block = BLOCK_BYTES as u64;
        self.first * block..(self.first + self.blocks as u64) * block
    }

    fn bytes(&self) -> usize {
        self.blocks * BLOCK_BYTES
    }

    /// The numbers of its blocks.
    fn numbers(&self) -> Range<u64> {
        self.first..self.first + self.blocks as u64
    }
}

thread_local! {
    static BUNDLES: RefCell<Vec<Bundle>> = const { RefCell::new(Vec::new()) };
}

impl Windows {
    pub(super) fn new(most: usize, decoded_bytes: usize, parts: usize) -> Self {
        Self {
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            staging: Mutex::new(Staging { opening: vec![0; parts], ..Staging::default() }),
            most: (most / parts).max(1),
            parts,
            decoded: Mutex::new(Decoded::new(decoded_bytes)),
        }
    }

    /// What there is now.
    pub(super) fn now(&self) -> WindowsNow {
        let staging = self.staging.lock();
        WindowsNow {
            open: staging.open.len() as u64,
            max_open: (self.most * self.parts) as u64,
            staged_bytes: staging.bytes,
            decoded_bytes: self.decoded.lock().bytes() as u64,
        }
    }

    fn stripe(&self, span: &Span) -> &Mutex<()> {
        &self.stripes[usize::try_from(span.first % STRIPES as u64).expect("less than STRIPES")]
    }

    fn find(&self, span: &Span) -> Option<Arc<Open>> {
        self.staging.lock().open.get(&span.first).cloned()
    }

    /// The first blocks of the windows that are open among these.
    fn open_in(&self, blocks: Range<u64>) -> Vec<u64> {
        self.staging.lock().open.range(blocks).map(|(first, _)| *first).collect()
    }

    /// Takes a place in part `part`, which has these blocks, for a window to be opened, or else names its open one that was written least recently.
    fn take_place(&self, part: usize, blocks: Range<u64>) -> Result<(), Option<u64>> {
        let mut staging = self.staging.lock();
        let open = staging.open.range(blocks);
        if open.clone().count() + staging.opening[part] < self.most {
            staging.opening[part] += 1;
            return Ok(());
        }
        let oldest = open.min_by_key(|(_, open)| open.written.load(Relaxed));
        Err(oldest.map(|(first, _)| *first))
    }

    /// Gives back a place that was taken in part `part`, with the window opened there, if it was.
    fn fill_place(&self, part: usize, span: &Span, open: Option<Open>) -> Option<Arc<Open>> {
        let mut staging = self.staging.lock();
        staging.opening[part] -= 1;
        let open = Arc::new(open?);
        staging.bytes += span.bytes() as u64;
        staging.open.insert(span.first, open.clone());
        Some(open)
    }

    fn tick(&self) -> u64 {
        let mut staging = self.staging.lock();
        staging.clock += 1;
        staging.clock
    }
}

/// The parts of `range` that lie in one block each.
fn by_block(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
    blocks.map(move |block| {
        let whole = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
        whole.start.max(range.start)..whole.end.min(range.end)
    })
}

/// Whether `block` is still part of `tensor`, as it was when the caller looked it up.
pub(super) fn is_current(map: &Map, tensor: &Arc<Tensor>, block: u64) -> bool {
    map.tensor_at(block * BLOCK_BYTES as u64).is_some_and(|owner| Arc::ptr_eq(owner, tensor))
}

impl Device {
    /// The planes in `mask` of one block of a KV tensor, all others zero, of which the reader wants bytes `inside`. `false` if the tensor is no more, and then the
    /// caller's map is out of date.
    pub(super) fn fetch_from_window(
        &self,
        tensor: &Arc<Tensor>,
        block: u64,
        inside: Range<usize>,
        mask: PlaneMask,
        words: &mut BlockWords,
        tally: &mut Tally,
    ) -> Result<bool, DeviceError> {
        let map = self.map.read();
        let Some(shape) = tensor.windows.as_ref().filter(|_| is_current(&map, tensor, block)) else {
            return Ok(false);
        };
        let span = Span::of(tensor, shape, block);
        let at = usize::try_from(block - span.first).expect("inside the window") * BLOCK_BYTES;
        let wanted = at + inside.start..at + inside.end;
        let windows = &self.windows;
        let lock = windows.stripe(&span).lock();
        if let Some(open) = windows.find(&span) {
            tally.staged_blocks += 1;
            let staged = open.staged.lock();
            words.copy_from_slice(&staged.bytes[at..at + BLOCK_BYTES]);
            self.stats.damaged_reads.add(staged.lost.has(at / BLOCK_BYTES).into());
            drop(staged);
            drop(lock);
            if mask != PlaneMask::all(shape.format()) {
                plane::clear_outside(shape.format(), mask, words);
            }
            return Ok(true);
        }
        let kept = {
            let mut decoded = windows.decoded.lock();
            // A generic device keeps as well what it decoded of a block and did not give.
            let has_block = decoded.gave(span.first, mask, &(at..at + BLOCK_BYTES));
            let kept = decoded.take(span.first, mask, &wanted, None);
            if kept.is_none() || !has_block {
                self.add_gcomp(block, tally);
            }
            kept
        };
        let decoded = if let Some(kept) = kept {
            self.stats.windows_reused.add(1);
            self.stats.damaged_reads.add(self.store().losses().lists(block).into());
            kept
        } else {
            let decoded = match self.decode_window(shape, &span, mask, tally) {
                Err(why) if Self::is_damage(&why) => {
                    let whole = self.recover_window(&map, tensor, shape, &span, &why)?;
                    self.stats.damaged_reads.add(whole.lost.has(at / BLOCK_BYTES).into());
                    words.copy_from_slice(&whole.bytes[at..at + BLOCK_BYTES]);
                    plane::clear_outside(shape.format(), mask, words);
                    return Ok(true);
                }
                decoded => decoded?,
            };
            self.stats.windows_decoded.add(1);
            self.stats.damaged_reads.add(decoded.lost.has(at / BLOCK_BYTES).into());
            let decoded = Arc::new(decoded.bytes);
            windows.decoded.lock().keep(span.first, mask, wanted, decoded.clone(), None);
            decoded
        };
        drop(lock);
        words.copy_from_slice(&decoded[at..at + BLOCK_BYTES]);
        Ok(true)
    }

    /// Decodes a window from the store. Damage is an error, but of poisoned blocks of a window in
    /// address order, which are lost. The caller holds its lock.
    fn decode_window(
        &self,
        shape: &Shape,
        span: &Span,
        mask: PlaneMask,
        tally: &mut Tally,
    ) -> Result<Whole, DeviceError> {
        let store = self.store();
        let mut out = Vec::with_capacity(span.bytes());
        let (mut lost, mut poisoned) = (BlockSet::default(), None);
        let mut decoder = WindowDecoder::new(shape, span.before, span.blocks, mask, &mut out);
        let mut bundle = [0; MAX_BUNDLE];
        for at in 0..span.blocks {
            let block = span.first + at as u64;
            self.touch_index(block, tally);
            tally.blocks += 1;
            let fetched = store.fetch(block, |stored| decoder.wanted(stored), &mut bundle);
            let fetched = match fetched {
                Err(why @ StoreError::Entry { why: entry::Damaged::Poison, .. }) => {
                    lost.insert(at);
                    poisoned = Some(why);
                    continue;
                }
                fetched => fetched?,
            };
            self.add_stored(block, fetched.bytes, tally);
            let Some(place) = &fetched.entry.place else { continue };
            tally.planes += super::blocks::planes_of(&place.stored, fetched.mask);
            decoder
                .add(at, &place.stored, fetched.mask, &bundle)
                .map_err(|why| DeviceError::Damaged { block, why })?;
        }
        if let Some(why) = poisoned.filter(|_| decoder.transformed() == Some(true)) {
            return Err(why.into());
        }
        decoder.finish();
        let mut whole = Whole { bytes: out, lost, touched: Vec::new() };
        whole.show_lost(shape, mask);
        Ok(whole)
    }

    /// All that a window holds, from the store, recovered if it is damaged. The caller holds its
    /// lock.
    fn load_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        tally: &mut Tally,
    ) -> Result<Whole, DeviceError> {
        match self.decode_window(shape, span, PlaneMask::all(shape.format()), tally) {
            Err(why) if Self::is_damage(&why) => self.recover_window(map, tensor, shape, span, &why),
            whole => whole,
        }
    }

    /// All that a window holds, from the store, to be coded anew. The caller holds its lock.
    fn load_for_maintenance(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
    ) -> Result<Whole, DeviceError> {
        let mut tally = Tally::default();
        let whole = self.load_window(map, tensor, shape, span, &mut tally)?;
        self.stats.count_for_maintenance(1, &tally);
        Ok(whole)
    }

    /// All that a window holds, open or not. The caller holds its lock.
    fn whole_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
    ) -> Result<Whole, DeviceError> {
        let Some(open) = self.windows.find(span) else {
            return self.load_for_maintenance(map, tensor, shape, span);
        };
        let staged = open.staged.lock();
        let (bytes, touched) = (staged.bytes.clone(), staged.touched.clone());
        Ok(Whole { bytes, lost: staged.lost, touched })
    }

    /// What can be decoded of a window that is damaged as `found` says; it is published so, and
    /// lists what is lost. The caller holds its lock.
    fn recover_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        found: &DeviceError,
    ) -> Result<Whole, DeviceError> {
        let mut whole = self.decode_what_can_be(shape, span)?;
        whole.show_lost(shape, PlaneMask::all(shape.format()));
        let why = Why::new(Cause::Damaged, &found.to_string());
        let content = Content {
            bytes: &whole.bytes,
            lost: whole.lost,
            why: Some(&why),
            origin: Origin::Anew(&whole.touched),
        };
        if let Err(full) = self.publish_window(map, tensor, shape, span, content, None) {
            // It stays as it is, and whoever decodes it finds the same.
            let first = span.first;
            tracing::warn!("what is left of the window at block {first} stays where it is: {full}");
            for block in whole.lost.iter().map(|at| first + at as u64) {
                if self.store().losses().note(block, why.clone()) {
                    poison::say_lost(block, &why);
                }
            }
        }
        Ok(whole)
    }

    /// The bytes of a damaged window that do not depend on damaged stored blocks, and which blocks
    /// are lost with these. The caller holds its lock.
    fn decode_what_can_be(&self, shape: &Shape, span: &Span) -> Result<Whole, DeviceError> {
        let store = self.store();
        let all = PlaneMask::all(shape.format());
        let (mut gone, mut bytes, mut bundle) = (BlockSet::default(), Vec::new(), [0; MAX_BUNDLE]);
        // How the blocks were coded that are gone, as far as their entries say so, and whether
        // there are some that do not say it.
        let (mut was_transformed, mut contradict, mut unknown) = (None, false, false);
        // Each round but the last finds further blocks that are gone.
        let (coded, lost) = loop {
            let mut decoder = WindowDecoder::new(shape, span.before, span.blocks, all, &mut bytes);
            let before = gone;
            let mut misfits = false;
            for at in (0..span.blocks).filter(|at| !before.has(*at)) {
                let block = span.first + at as u64;
                let fetched = match store.fetch(block, |stored| decoder.wanted(stored), &mut bundle) {
                    Err(StoreError::Entry { why, .. }) => {
                        gone.insert(at);
                        unknown |= why != entry::Damaged::Poison;
                        continue;
                    }
                    fetched => fetched?,
                };
                let Some(place) = &fetched.entry.place else { continue };
                match decoder.add(at, &place.stored, fetched.mask, &bundle) {
                    Ok(()) => {}
                    Err(BlockError::Window { .. }) => misfits = true,
                    Err(_) => {
                        gone.insert(at);
                        let transformed = place.stored.head_bytes() > 0;
                        contradict |= was_transformed.is_some_and(|before| before != transformed);
                        was_transformed = Some(transformed);
                    }
                }
            }
            if gone != before {
                continue;
            }
            contradict |= misfits;
            let coded = decoder.transformed().or(was_transformed);
            let transformed = coded == Some(true);
            // The first block names the rows that repeat.
            let in_doubt = transformed && gone.has(0);
            let lost = decoder.finish_without(&gone, transformed && !in_doubt);
            contradict |= in_doubt || was_transformed.is_some_and(|was| was != transformed);
            break (coded, lost);
        };
        // If nothing says how the window was coded, any of its blocks may have had bytes in one
        // that is gone. Poison that stands alone is of a window in address order.
        let all_lost = contradict || (unknown && coded.is_none());
        let lost = if all_lost { BlockSet::first(span.blocks) } else { lost };
        Ok(Whole { bytes, lost, touched: Vec::new() })
    }

    /// Stores `data` at `offset` of the base window, up to the end of the window there or to a
    /// block that is lost and not written whole: how many bytes that are.
    pub(super) fn stage(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, DeviceError> {
        let span = Span::of(tensor, shape, offset / BLOCK_BYTES as u64);
        let at = usize::try_from(offset - span.range().start).expect("inside the window");
        let length = data.len().min(span.bytes() - at);
        let data = &data[..length];
        if length == span.bytes() {
            let _lock = self.windows.stripe(&span).lock();
            self.publish_window(map, tensor, shape, &span, Content::whole(data), None)?;
            self.drop_open(&span);
            return Ok(length);
        }
        let written = self.write_open(map, tensor, shape, &span, at, data)?;
        if tensor.is_leaving() {
            self.close(map, tensor, shape, &span)?;
        }
        Ok(written)
    }

    /// Forgets bytes from the start of `range` on, up to its end or the end of the window there,
    /// and counts them in `done`.
    pub(super) fn discard_in_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        range: Range<u64>,
        done: &mut u64,
    ) -> Result<(), DeviceError> {
        let span = Span::of(tensor, shape, range.start / BLOCK_BYTES as u64);
        let window = span.range();
        let end = range.end.min(window.end);
        let length = usize::try_from(end - range.start).expect("inside the window");
        if length == span.bytes() {
            let _lock = self.windows.stripe(&span).lock();
            let is_hole = |block| self.store().is_hole(block);
            if self.windows.find(&span).is_none() && span.numbers().all(is_hole) {
                *done += end - range.start;
                return Ok(());
            }
            self.publish_window(map, tensor, shape, &span, Content::whole(&vec![0; length]), None)?;
            self.drop_open(&span);
            *done += end - range.start;
        } else {
            let at = usize::try_from(range.start - window.start).expect("inside the window");
            let written = self.write_open(map, tensor, shape, &span, at, &vec![0; length])?;
            // Staged, it reads as zeros, whether there is room to code it or not.
            *done += written as u64;
            self.close(map, tensor, shape, &span)?;
        }
        Ok(())
    }

    /// Writes `data` at `at` of a window, which is opened if it is not, up to a block that is lost
    /// and not written whole: how many bytes that are. If it is the first one, that is an error.
    fn write_open(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        at: usize,
        data: &[u8],
    ) -> Result<usize, DeviceError> {
        let windows = &self.windows;
        loop {
            let lock = windows.stripe(span).lock();
            let mut tally = Tally::default();
            let found = windows.find(span);
            let was_open = found.is_some();
            let open = match found {
                Some(open) => open,
                None => match windows.take_place(tensor.part, self.division.parts[tensor.part].blocks()) {
                    Ok(()) => self.open_window(map, tensor, shape, span, &mut tally)?,
                    Err(oldest) => {
                        drop(lock);
                        self.make_room(map, oldest)?;
                        continue;
                    }
                },
            };
            open.written.store(windows.tick(), Relaxed);
            let mut staged = open.staged.lock();
            let data = &data[..staged.writable(at, data.len())];
            if data.is_empty() {
                drop(staged);
                if !was_open {
                    self.drop_open(span);
                }
                let block = span.first + (at / BLOCK_BYTES) as u64;
                return Err(StoreError::Entry { block, why: entry::Damaged::Poison }.into());
            }
            let opened = u64::from(tally.blocks > 0);
            for part in by_block(at..at + data.len()) {
                let number = part.start / BLOCK_BYTES;
                if !std::mem::replace(&mut staged.touched[number], true) {
                    let inside = part.start % BLOCK_BYTES;
                    let block = span.first + number as u64;
                    self.add_partial_store(block, inside, part.len(), &mut tally);
                    if part.len() < BLOCK_BYTES {
                        self.touch_gcomp_index(block, &mut tally);
                    }
                }
            }
            self.stats.count_for_write(opened, opened * data.len() as u64, &tally);
            staged.bytes[at..at + data.len()].copy_from_slice(data);
            if let (Some(place), Some(kept)) = (&staged.place, &self.kept) {
                kept.staged.write(place, at, data);
            }
            let mut mended = false;
            for block in at.div_ceil(BLOCK_BYTES)..(at + data.len()) / BLOCK_BYTES {
                staged.fresh[block] = true;
                if staged.lost.remove(block) {
                    mended = true;
                    self.store().losses().mended(span.first + block as u64);
                }
            }
            if let (Some(place), Some(kept)) = (&staged.place, self.kept.as_ref().filter(|_| mended)) {
                kept.staged.set_lost(place, &staged.lost);
            }
            // If there is no room for it, it stays staged, and whoever closes it is told.
            if staged.fresh.iter().all(|fresh| *fresh)
                && self.publish_window(map, tensor, shape, span, staged.content(), None).is_ok()
            {
                drop(staged);
                self.drop_open(span);
            }
            return Ok(data.len());
        }
    }

    /// Opens a window for which a place was taken. The caller holds its lock.
    fn open_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        tally: &mut Tally,
    ) -> Result<Arc<Open>, DeviceError> {
        let windows = &self.windows;
        let staged =
            self.load_window(map, tensor, shape, span, tally).and_then(|Whole { bytes, lost, .. }| {
                let kept = self.kept.as_ref();
                let place = kept.map(|kept| kept.staged.take(span.first, &bytes, &lost)).transpose()?;
                let (fresh, touched) = (vec![false; span.blocks], vec![false; span.blocks]);
                Ok(Staged { bytes, place, fresh, lost, touched })
            });
        let staged = staged.inspect_err(|_| drop(windows.fill_place(tensor.part, span, None)))?;
        windows.decoded.lock().forget(span.first);
        self.stats.windows_opened.add(1);
        let open = Open { written: AtomicU64::new(windows.tick()), staged: Mutex::new(staged) };
        Ok(windows.fill_place(tensor.part, span, Some(open)).expect("an open window"))
    }

    /// Lets an open window go. The caller holds its lock.
    fn drop_open(&self, span: &Span) {
        let mut staging = self.windows.staging.lock();
        let Some(open) = staging.open.remove(&span.first) else { return };
        staging.bytes -= span.bytes() as u64;
        let place = open.staged.lock().place.take();
        if let (Some(place), Some(kept)) = (place, &self.kept) {
            kept.staged.let_go(place);
        }
    }

    /// Opens the windows again that were open when the image was left.
    pub(super) fn reopen_windows(&self) {
        let Some(kept) = &self.kept else { return };
        let map = self.map.read();
        for Found { place, first, mut bytes, lost } in kept.staged.found() {
            let tensor = map.tensor_at(first.saturating_mul(BLOCK_BYTES as u64));
            let shape = tensor.and_then(|tensor| tensor.windows.as_ref());
            let span = tensor.zip(shape).map(|(tensor, shape)| Span::of(tensor, shape, first));
            // Its tensor may have been removed, which published the window before; and an image may say anything.
            let fits =
                |span: &Span| span.first == first && span.bytes() == bytes.len() && self.has_place_for(first);
            let Some(span) = span.filter(fits) else {
                kept.staged.let_go(place);
                continue;
            };
            // The entries are of before the window was opened.
            let losses = self.store().losses();
            for (at, words) in bytes.as_chunks_mut().0.iter_mut().enumerate() {
                if lost.has(at) {
                    *words = [poison::PATTERN; BLOCK_BYTES];
                    losses.note(first + at as u64, Why::found());
                } else {
                    losses.mended(first + at as u64);
                }
            }
            // Which blocks were written nobody knows any more.
            let (fresh, touched) = (vec![false; span.blocks], vec![true; span.blocks]);
            let staged = Staged { bytes, place: Some(place), fresh, lost, touched };
            let open = Open { written: AtomicU64::new(self.windows.tick()), staged: Mutex::new(staged) };
            let mut staging = self.windows.staging.lock();
            staging.bytes += span.bytes() as u64;
            staging.open.insert(first, Arc::new(open));
        }
    }

    /// Recovers the windows that have entries that do not check, so that all that is lost with
    /// these is listed.
    pub(super) fn recover_windows(&self) -> Result<(), DeviceError> {
        let Some(store) = self.coded_store() else { return Ok(()) };
        let map = self.map.read();
        let mut behind = 0;
        for block in store.losses().listed_in(0..u64::MAX) {
            let Some((tensor, shape)) =
                windowed(&map, block * BLOCK_BYTES as u64).filter(|_| block >= behind)
            else {
                continue;
            };
            let span = Span::of(tensor, shape, block);
            behind = span.numbers().end;
            let _lock = self.windows.stripe(&span).lock();
            if self.windows.find(&span).is_none() {
                self.load_for_maintenance(&map, tensor, shape, &span)?;
            }
        }
        Ok(())
    }

    /// Poisons those of `blocks` that are of the first one's window: the first block behind these.
    /// What else is staged of it is published.
    pub(super) fn poison_in_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        blocks: Range<u64>,
        why: &Why,
    ) -> Result<u64, DeviceError> {
        self.change_lost(map, tensor, shape, blocks, why, |whole, block| whole.lost.insert(block))
    }

    /// Makes zeros of those of `blocks` that are of the first one's window and are lost: the first
    /// block behind these.
    pub(super) fn clear_in_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        blocks: Range<u64>,
    ) -> Result<u64, DeviceError> {
        let why = Why::new(Cause::Damaged, "it was lost before another block of its window was cleared");
        self.change_lost(map, tensor, shape, blocks, &why, |whole, block| {
            if whole.lost.remove(block) {
                whole.bytes.as_chunks_mut::<BLOCK_BYTES>().0[block].fill(0);
                // Zeros are stored there, by whoever clears it.
                whole.touched.resize(whole.bytes.len() / BLOCK_BYTES, false);
                whole.touched[block] = true;
            }
        })
    }

    /// Changes which of `blocks` that are of the first one's window are lost, and publishes it if
    /// that is others then: the first block behind these.
    fn change_lost(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        blocks: Range<u64>,
        why: &Why,
        change: impl Fn(&mut Whole, usize),
    ) -> Result<u64, DeviceError> {
        let span = Span::of(tensor, shape, blocks.start);
        let end = blocks.end.min(span.numbers().end);
        let _lock = self.windows.stripe(&span).lock();
        let mut whole = self.whole_window(map, tensor, shape, &span)?;
        let before = whole.lost;
        for block in blocks.start..end {
            change(&mut whole, usize::try_from(block - span.first).expect("inside the window"));
        }
        if whole.lost != before {
            whole.show_lost(shape, PlaneMask::all(shape.format()));
            let content = Content {
                bytes: &whole.bytes,
                lost: whole.lost,
                why: Some(why),
                origin: Origin::Anew(&whole.touched),
            };
            self.publish_window(map, tensor, shape, &span, content, None)?;
            self.drop_open(&span);
        }
        // What could not be decoded once, and was listed without being published, may be decoded
        // now.
        let is_there = |block: &u64| !whole.lost.has(usize::try_from(block - span.first).expect("inside"));
        (blocks.start..end).filter(is_there).for_each(|block| self.store().losses().mended(block));
        Ok(end)
    }

    /// Whether a window that begins at block `first` is not open and may be.
    fn has_place_for(&self, first: u64) -> bool {
        let part = &self.division.parts[self.division.of_block(first)];
        let staging = self.windows.staging.lock();
        !staging.open.contains_key(&first) && staging.open.range(part.blocks()).count() < self.windows.most
    }

    /// Closes the open window that begins at `oldest`, so that another can be opened; waits if every place is only being filled.
    fn make_room(&self, map: &Map, oldest: Option<u64>) -> Result<(), DeviceError> {
        let Some(first) = oldest else {
            std::thread::yield_now();
            return Ok(());
        };
        let Some(tensor) = map.tensor_at(first * BLOCK_BYTES as u64) else { return Ok(()) };
        let Some(shape) = &tensor.windows else { return Ok(()) };
        let closed = self.close(map, tensor, shape, &Span::of(tensor, shape, first))?;
        self.stats.windows_forced.add(closed.into());
        Ok(())
    }

    /// Codes a window and publishes it, if it is open: whether it was.
    fn close(&self, map: &Map, tensor: &Tensor, shape: &Shape, span: &Span) -> Result<bool, DeviceError> {
        let _lock = self.windows.stripe(span).lock();
        let Some(open) = self.windows.find(span) else { return Ok(false) };
        self.publish_window(map, tensor, shape, span, open.staged.lock().content(), None)?;
        self.drop_open(span);
        Ok(true)
    }

    /// Closes every open window that holds any of `range` of the base window.
    pub(super) fn close_windows(&self, range: Range<u64>) -> Result<(), DeviceError> {
        let block = BLOCK_BYTES as u64;
        // A window that begins before the range may reach into it.
        let from = (range.start / block).saturating_sub(kv::MOST_BLOCKS as u64);
        let firsts: Vec<u64> = {
            let staging = self.windows.staging.lock();
            staging.open.range(from..range.end.div_ceil(block)).map(|(first, _)| *first).collect()
        };
        for first in firsts {
            let map = self.map.read();
            let Some(tensor) = map.tensor_at(first * block) else { continue };
            let Some(shape) = &tensor.windows else { continue };
            let span = Span::of(tensor, shape, first);
            if span.range().end > range.start {
                self.close(&map, tensor, shape, &span)?;
            }
        }
        Ok(())
    }

    /// Codes a window as `coding` says or as is best, in address order if blocks of it are lost,
    /// and publishes all its blocks, or none if the store is full. The caller holds the window's
    /// lock.
    fn publish_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        content: Content<'_>,
        coding: Option<Coding>,
    ) -> Result<(), DeviceError> {
        let Content { bytes, lost, why, origin } = content;
        let coding = if lost.is_empty() { coding } else { Some(Coding::Plain) };
        let since_before = || Why::new(Cause::Damaged, "it was lost before its window was coded anew");
        let why = why.cloned().unwrap_or_else(since_before);
        let mut new: Vec<_> = lost.iter().map(|at| span.first + at as u64).collect();
        new.retain(|block| !self.store().losses().lists(*block));
        let store = self.store();
        // What leaves can be read without it from the moment that it is looked at.
        let coding = coding.or_else(|| tensor.is_leaving().then_some(Coding::Plain));
        self.blocks.ensure(span.first..span.first + span.blocks as u64)?;
        let codec = tensor.info.codec;
        let (coded, prepared) = BUNDLES.with_borrow_mut(|bundles| {
            let coded = kv::encode(shape, span.before, codec, bytes, coding, bundles);
            let bundles = &bundles[..span.blocks];
            let (before, after) = self.window_charges(span, bundles, &lost);
            self.account(span.first, before, after)?;
            let mut prepared = Vec::with_capacity(span.blocks);
            for (at, (block, bundle)) in (span.first..).zip(bundles).enumerate() {
                let prepare = || {
                    if lost.has(at) {
                        return Ok(store.prepare_lost(block, why.clone())?);
                    }
                    Ok(store.prepare(block, bundle, after <= before)?)
                };
                match self.compacting(prepare) {
                    Ok(one) => prepared.push(one),
                    Err(full) => {
                        for one in prepared {
                            store.give_back(one);
                        }
                        self.unaccount(span.first, before, after);
                        return Err(full);
                    }
                }
            }
            Ok((coded, prepared))
        })?;
        self.windows.decoded.lock().forget(span.first);
        let changes = store.install_all(span.first, prepared);
        let mut tally = Tally::default();
        for (at, ((old, new), words)) in changes.iter().zip(bytes.as_chunks().0).enumerate() {
            let (block, by) = (span.first + at as u64, origin.by(at));
            self.touch_index(block, &mut tally);
            if by == By::Store {
                self.touch_gcomp_index(block, &mut tally);
            }
            self.stats.replaced(old, new);
            if lost.has(at) {
                self.charge(map, block, Charge::of(old), Charge::default());
            } else {
                self.written(map, block, codec, words, (Charge::of(old), Charge::of(new)), by);
            }
        }
        for block in new {
            poison::say_lost(block, &why);
        }
        let stats = &self.stats;
        match origin {
            Origin::Anew(_) => stats.count_for_maintenance(0, &tally),
            Origin::All | Origin::Some(_) => stats.count_for_write(0, 0, &tally),
        }
        stats.windows_coded(coded.coding).add(1);
        stats.repeated_rows.add(coded.repeated_rows as u64);
        Ok(())
    }

    /// What a window's blocks are charged before and after `bundles` take their place. The caller holds the window's lock.
    fn window_charges(&self, span: &Span, bundles: &[Bundle], lost: &BlockSet) -> (u64, u64) {
        let before = span.numbers().map(|block| self.charged(block).bytes).sum();
        let kept = bundles.iter().enumerate().filter(|(at, _)| !lost.has(*at));
        (before, kept.map(|(_, bundle)| charge_of(bundle)).sum())
    }

    /// Codes the windows of a tensor that is being made, where they hold data, and tells how far
    /// that came. The map is held for one at a time.
    pub(super) fn code_windows(
        &self,
        tensor: &Arc<Tensor>,
        shape: &Shape,
        reached: &mut u64,
    ) -> Result<(), DeviceError> {
        let blocks = tensor.blocks();
        while let Some(touched) = self.blocks.touched((*reached).max(blocks.start)..blocks.end) {
            let span = Span::of(tensor, shape, touched.start);
            *reached = span.numbers().end;
            self.code_window(tensor, shape, &span)?;
        }
        Ok(())
    }

    fn code_window(&self, tensor: &Arc<Tensor>, shape: &Shape, span: &Span) -> Result<(), DeviceError> {
        let map = self.map.read();
        if !is_current(&map, tensor, span.first) {
            return Ok(());
        }
        let _lock = self.windows.stripe(span).lock();
        if self.windows.find(span).is_some() || !self.holds(span, |_| true) {
            return Ok(());
        }
        let Whole { bytes, lost, touched } = self.load_for_maintenance(&map, tensor, shape, span)?;
        let content = Content { bytes: &bytes, lost, why: None, origin: Origin::Anew(&touched) };
        self.publish_window(&map, tensor, shape, span, content, None)
    }

    /// Codes the windows of a tensor that is leaving block by block, so that its blocks can be read
    /// without it. The map is held for one at a time. What is lost stays poisoned.
    pub(super) fn uncode_windows(&self, tensor: &Arc<Tensor>, shape: &Shape) -> Result<(), DeviceError> {
        let blocks = tensor.blocks();
        // An open one may hold what the store has nothing of yet.
        for first in self.windows.open_in(blocks.clone()) {
            self.uncode_window(tensor, shape, &Span::of(tensor, shape, first))?;
        }
        let mut at = blocks.start;
        while let Some(touched) = self.blocks.touched(at..blocks.end) {
            let span = Span::of(tensor, shape, touched.start);
            at = span.numbers().end;
            self.uncode_window(tensor, shape, &span)?;
        }
        Ok(())
    }

    fn uncode_window(&self, tensor: &Arc<Tensor>, shape: &Shape, span: &Span) -> Result<(), DeviceError> {
        let map = self.map.read();
        let _lock = self.windows.stripe(span).lock();
        let is_open = self.windows.find(span).is_some();
        if !is_open && !self.holds(span, |stored| stored.head_bytes() > 0) {
            return Ok(());
        }
        let Whole { bytes, lost, touched } = self.whole_window(&map, tensor, shape, span)?;
        #[cfg(test)]
        super::holds::may_fail(super::holds::Step::Uncode)?;
        let content = Content { bytes: &bytes, lost, why: None, origin: Origin::Anew(&touched) };
        self.publish_window(&map, tensor, shape, span, content, Some(Coding::Plain))?;
        self.drop_open(span);
        Ok(())
    }

    /// Whether any window of a tensor is open.
    pub(super) fn has_open_windows(&self, tensor: &Tensor) -> bool {
        tensor.windows.is_some() && self.windows.open_in(tensor.blocks()).into_iter().next().is_some()
    }

    /// Whether any block of a window holds something, stored in such a way. What is poisoned holds
    /// nothing, and what is damaged has yet to be recovered.
    fn holds(&self, span: &Span, in_such_a_way: impl Fn(&Stored) -> bool) -> bool {
        span.numbers().any(|block| match self.store().entry(block) {
            Ok(entry) => entry.place.is_some_and(|place| in_such_a_way(&place.stored)),
            Err(StoreError::Entry { why: entry::Damaged::Poison, .. }) => false,
            Err(_) => true,
        })
    }

    /// The store of a device that has KV windows.
    fn store(&self) -> &Store {
        self.coded_store().expect("only devices that code have windows")
    }
}
