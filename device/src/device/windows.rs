//! KV windows: staged while they are written, coded when they are closed, decoded when they are read (TRACE III-B).
//!
//! The rules:
//! * A store into a KV tensor goes to its *open* window, the paper's staging buffer (eq. 4): the window's bytes as the host sees them. Opening a window decodes what it
//!   holds; closing it codes and publishes it. Until then the store keeps what it had, so whatever fails, nothing is lost.
//! * A window is closed by [`Device::flush`], when all of it was written anew, when some of it was discarded, or when [`DeviceConfig::open_windows`] are open and another one has to be: then
//!   the least recently written one goes first and the writer waits for it, which is counted as back-pressure.
//! * Everything about a window happens under its lock: a reader sees a window before a store or after it, coded or open, never a mixture. All its
//!   blocks are stored before the first of them is published.
//! * Locks are taken in this order: the map, a window's, then the tables' and the store's. No two windows' locks are held together.
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
    poison,
    staged::{Found, Place},
};
use crate::{
    BLOCK_BYTES, BlockWords,
    codec::block::{Bundle, MAX_BUNDLE},
    kv::{self, Coding, Shape, WindowDecoder},
    plane::{self, PlaneMask},
    stats::{Tally, report::WindowsNow},
    store::{self, Store, StoreError},
    tensor::Tensor,
    window::Map,
};

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
    /// Which of its blocks were written at all.
    touched: Vec<bool>,
}

/// What becomes of a window that is published.
#[derive(Clone, Copy)]
enum Stored<'a> {
    /// All of it was stored by a host.
    All,
    /// These of its blocks were.
    Some(&'a [bool]),
    /// It is coded anew, by this way if any is said.
    Anew(Option<Coding>),
}

impl Stored<'_> {
    /// For whom block `at` of the window is coded.
    fn by(self, at: usize) -> By {
        match self {
            Self::All => By::Store,
            Self::Some(touched) if touched[at] => By::Store,
            Self::Some(_) => By::Window,
            Self::Anew(_) => By::Maintenance,
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

/// The windows of a tensor, first to last.
fn spans(tensor: &Tensor, shape: Shape) -> impl Iterator<Item = Span> {
    let blocks = store::blocks(tensor.info.dpa)..store::blocks(tensor.end());
    blocks.step_by(shape.blocks()).map(move |block| Span::of(tensor, &shape, block))
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
            most_open: (self.most * self.parts) as u64,
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
fn is_current(map: &Map, tensor: &Arc<Tensor>, block: u64) -> bool {
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
            words.copy_from_slice(&open.staged.lock().bytes[at..at + BLOCK_BYTES]);
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
            kept
        } else {
            let decoded = match self.decode_window(shape, &span, mask, tally) {
                Err(why) if Self::is_damage(&why) => {
                    self.stats.damaged_reads.add(1);
                    self.found_window_damage(span.numbers(), &why);
                    words.fill(poison::PATTERN);
                    plane::clear_outside(shape.format(), mask, words);
                    return Ok(true);
                }
                decoded => Arc::new(decoded?),
            };
            self.stats.windows_decoded.add(1);
            windows.decoded.lock().keep(span.first, mask, wanted, decoded.clone(), None);
            decoded
        };
        drop(lock);
        words.copy_from_slice(&decoded[at..at + BLOCK_BYTES]);
        Ok(true)
    }

    /// Decodes a window from the store. The caller holds its lock.
    fn decode_window(
        &self,
        shape: &Shape,
        span: &Span,
        mask: PlaneMask,
        tally: &mut Tally,
    ) -> Result<Vec<u8>, DeviceError> {
        let store = self.store();
        let mut out = Vec::with_capacity(span.bytes());
        let mut decoder = WindowDecoder::new(shape, span.before, span.blocks, mask, &mut out);
        let mut bundle = [0; MAX_BUNDLE];
        for at in 0..span.blocks {
            let block = span.first + at as u64;
            self.touch_index(block, tally);
            tally.blocks += 1;
            let fetched = store.fetch(block, |stored| decoder.wanted(stored), &mut bundle);
            let fetched = fetched?;
            self.add_stored(block, fetched.bytes, tally);
            let Some(place) = &fetched.entry.place else { continue };
            tally.planes += super::blocks::planes_of(&place.stored, fetched.mask);
            decoder
                .add(at, &place.stored, fetched.mask, &bundle)
                .map_err(|why| DeviceError::Damaged { block, why })?;
        }
        decoder.finish();
        Ok(out)
    }

    /// Stores `data` at `offset` of the base window, up to the end of the window there: how many bytes that are.
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
            self.publish_window(map, tensor, shape, &span, data, Stored::All)?;
            self.drop_open(&span);
            return Ok(length);
        }
        self.write_open(map, tensor, shape, &span, at, data)?;
        Ok(length)
    }

    /// Forgets bytes from the start of `range` on, up to its end or the end of the window there, and counts them in `done`.
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
            self.publish_window(map, tensor, shape, &span, &vec![0; length], Stored::All)?;
            self.drop_open(&span);
            *done += end - range.start;
        } else {
            let at = usize::try_from(range.start - window.start).expect("inside the window");
            self.write_open(map, tensor, shape, &span, at, &vec![0; length])?;
            // Staged, it reads as zeros, whether there is room to code it or not.
            *done += end - range.start;
            self.close(map, tensor, shape, &span)?;
        }
        Ok(())
    }

    /// Writes `data` at `at` of a window, which is opened if it is not.
    fn write_open(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        at: usize,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        let windows = &self.windows;
        loop {
            let lock = windows.stripe(span).lock();
            let mut tally = Tally::default();
            let open = match windows.find(span) {
                Some(open) => open,
                None => match windows.take_place(tensor.part, self.division.parts[tensor.part].blocks()) {
                    Ok(()) => self.open_window(tensor, shape, span, &mut tally)?,
                    Err(oldest) => {
                        drop(lock);
                        self.make_room(map, oldest)?;
                        continue;
                    }
                },
            };
            open.written.store(windows.tick(), Relaxed);
            let mut staged = open.staged.lock();
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
            for block in at.div_ceil(BLOCK_BYTES)..(at + data.len()) / BLOCK_BYTES {
                staged.fresh[block] = true;
            }
            // If there is no room for it, it stays staged, and whoever closes it is told.
            if staged.fresh.iter().all(|fresh| *fresh)
                && self
                    .publish_window(map, tensor, shape, span, &staged.bytes, Stored::Some(&staged.touched))
                    .is_ok()
            {
                drop(staged);
                self.drop_open(span);
            }
            return Ok(());
        }
    }

    /// Opens a window for which a place was taken. The caller holds its lock.
    fn open_window(
        &self,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        tally: &mut Tally,
    ) -> Result<Arc<Open>, DeviceError> {
        let windows = &self.windows;
        let bytes = self.decode_window(shape, span, PlaneMask::all(shape.format()), tally);
        let bytes = match bytes {
            Err(why) if Self::is_damage(&why) => {
                self.found_window_damage(span.numbers(), &why);
                Ok(vec![poison::PATTERN; span.bytes()])
            }
            bytes => bytes,
        };
        let staged = bytes.and_then(|bytes| {
            let place = self.kept.as_ref().map(|kept| kept.staged.take(span.first, &bytes)).transpose()?;
            let (fresh, touched) = (vec![false; span.blocks], vec![false; span.blocks]);
            Ok(Staged { bytes, place, fresh, touched })
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
        for Found { place, first, bytes } in kept.staged.found() {
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
            // Which blocks were written nobody knows any more.
            let (fresh, touched) = (vec![false; span.blocks], vec![true; span.blocks]);
            let staged = Staged { bytes, place: Some(place), fresh, touched };
            let open = Open { written: AtomicU64::new(self.windows.tick()), staged: Mutex::new(staged) };
            let mut staging = self.windows.staging.lock();
            staging.bytes += span.bytes() as u64;
            staging.open.insert(first, Arc::new(open));
        }
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
        let staged = open.staged.lock();
        self.publish_window(map, tensor, shape, span, &staged.bytes, Stored::Some(&staged.touched))?;
        drop(staged);
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

    /// Codes `bytes` as a window, as `stored` says or as is best, and publishes all its blocks, or none if the store is full. The caller holds the window's lock.
    fn publish_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        bytes: &[u8],
        stored: Stored<'_>,
    ) -> Result<(), DeviceError> {
        let store = self.store();
        let coding = if let Stored::Anew(coding) = stored { coding } else { None };
        self.blocks.ensure(span.first..span.first + span.blocks as u64)?;
        let codec = tensor.info.codec;
        let (coded, prepared) = BUNDLES.with_borrow_mut(|bundles| {
            let coded = kv::encode(shape, span.before, codec, bytes, coding, bundles);
            let bundles = &bundles[..span.blocks];
            let (before, after) = self.window_charges(span, bundles);
            self.account(span.first, before, after)?;
            let mut prepared = Vec::with_capacity(span.blocks);
            for (block, bundle) in (span.first..).zip(bundles) {
                match self.compacting(|| Ok(store.prepare(block, bundle, after <= before)?)) {
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
            let (block, by) = (span.first + at as u64, stored.by(at));
            self.touch_index(block, &mut tally);
            if by == By::Store {
                self.touch_gcomp_index(block, &mut tally);
            }
            self.stats.replaced(old, new);
            self.written(map, block, codec, words, (Charge::of(old), Charge::of(new)), by);
        }
        let stats = &self.stats;
        match stored {
            Stored::Anew(_) => stats.count_for_maintenance(0, &tally),
            Stored::All | Stored::Some(_) => stats.count_for_write(0, 0, &tally),
        }
        stats.windows_coded[coded.coding as usize].add(1);
        stats.repeated_rows.add(coded.repeated_rows as u64);
        Ok(())
    }

    /// What a window's blocks are charged before and after `bundles` take their place. The caller holds the window's lock.
    fn window_charges(&self, span: &Span, bundles: &[Bundle]) -> (u64, u64) {
        let before = span.numbers().map(|block| self.charged(block).bytes).sum();
        (before, bundles.iter().map(charge_of).sum())
    }

    /// Codes the windows of a tensor that was just made, where they hold data.
    pub(super) fn code_windows(&self, tensor: &Arc<Tensor>, shape: Shape) -> Result<(), DeviceError> {
        for span in spans(tensor, shape) {
            let map = self.map.read();
            if !is_current(&map, tensor, span.first) {
                return Ok(());
            }
            let _lock = self.windows.stripe(&span).lock();
            if self.windows.find(&span).is_some() || !self.holds_data(&span)? {
                continue;
            }
            let all = PlaneMask::all(shape.format());
            let mut tally = Tally::default();
            let bytes = self.decode_window(&shape, &span, all, &mut tally)?;
            self.stats.count_for_maintenance(1, &tally);
            self.publish_window(&map, tensor, &shape, &span, &bytes, Stored::Anew(None))?;
        }
        Ok(())
    }

    /// Codes the windows of a tensor block by block, so that its blocks can be read without it. The caller keeps everybody from the map.
    pub(super) fn uncode_windows(&self, map: &Map, tensor: &Tensor, shape: Shape) -> Result<(), DeviceError> {
        for span in spans(tensor, shape) {
            let _lock = self.windows.stripe(&span).lock();
            let bytes = match self.windows.find(&span) {
                Some(open) => open.staged.lock().bytes.clone(),
                None if self.holds_data(&span)? => {
                    let mut tally = Tally::default();
                    let all = PlaneMask::all(shape.format());
                    let bytes = self.decode_window(&shape, &span, all, &mut tally)?;
                    self.stats.count_for_maintenance(1, &tally);
                    bytes
                }
                None => continue,
            };
            self.publish_window(map, tensor, &shape, &span, &bytes, Stored::Anew(Some(Coding::Plain)))?;
            self.drop_open(&span);
        }
        Ok(())
    }

    fn holds_data(&self, span: &Span) -> Result<bool, DeviceError> {
        for block in span.first..span.first + span.blocks as u64 {
            match self.store().entry(block) {
                Ok(entry) if entry.place.is_some() => return Ok(true),
                // What is poisoned stays so.
                Err(StoreError::Entry { .. }) => return Ok(false),
                Ok(_) => {}
                Err(other) => return Err(other.into()),
            }
        }
        Ok(false)
    }

    /// The store of a device that has KV windows.
    fn store(&self) -> &Store {
        self.coded_store().expect("only devices that code have windows")
    }
}
