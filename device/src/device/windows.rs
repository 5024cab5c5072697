//! KV windows: staged while they are written, coded when they are closed, decoded when they are read (TRACE III-B).
//!
//! The rules:
//! * A store into a KV tensor goes to its *open* window, the paper's staging buffer (eq. 4): the window's bytes as the host sees them. Opening a window decodes what it
//!   holds; closing it codes and publishes it. Until then the store keeps what it had, so whatever fails, nothing is lost.
//! * A window is closed by [`Device::flush`], when all of it was written anew, when some of it was discarded, or when [`DeviceConfig::open_windows`] are open and another one has to be: then
//!   the least recently written one goes first and the writer waits for it, which is counted as back-pressure.
//! * Everything about a window happens under its lock: a reader sees a window before a store or after it, coded or open, never a mixture. All its
//!   blocks are stored before the first of them is published.
//! * The windows of a tensor that is leaving are coded block by block and closed by every store: see `tables`.
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
    charge::{Charge, charge_of},
    decoded::Decoded,
    poison,
    staged::{Found, Place},
};
use crate::{
    BLOCK_BYTES, BlockWords,
    codec::block::{Bundle, MAX_BUNDLE, Stored},
    kv::{self, Coding, Shape, WindowDecoder},
    plane::{self, PlaneMask},
    stats::{Tally, report::WindowsNow},
    store::{self, Store},
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
        tally.gcomp += self.gcomp_bytes(block);
        if let Some(open) = windows.find(&span) {
            words.copy_from_slice(&open.staged.lock().bytes[at..at + BLOCK_BYTES]);
            drop(lock);
            if mask != PlaneMask::all(shape.format()) {
                plane::clear_outside(shape.format(), mask, words);
            }
            return Ok(true);
        }
        let kept = windows.decoded.lock().take(span.first, mask, &wanted, None);
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
            self.touch_index(block);
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
            self.publish_window(map, tensor, shape, &span, data, None)?;
            self.drop_open(&span);
            return Ok(length);
        }
        self.write_open(map, tensor, shape, &span, at, data)?;
        if tensor.is_leaving() {
            self.close(map, tensor, shape, &span)?;
        }
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
            self.publish_window(map, tensor, shape, &span, &vec![0; length], None)?;
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
            let open = match windows.find(span) {
                Some(open) => open,
                None => match windows.take_place(tensor.part, self.division.parts[tensor.part].blocks()) {
                    Ok(()) => self.open_window(tensor, shape, span)?,
                    Err(oldest) => {
                        drop(lock);
                        self.make_room(map, oldest)?;
                        continue;
                    }
                },
            };
            open.written.store(windows.tick(), Relaxed);
            let mut staged = open.staged.lock();
            staged.bytes[at..at + data.len()].copy_from_slice(data);
            if let (Some(place), Some(kept)) = (&staged.place, &self.kept) {
                kept.staged.write(place, at, data);
            }
            for block in at.div_ceil(BLOCK_BYTES)..(at + data.len()) / BLOCK_BYTES {
                staged.fresh[block] = true;
            }
            // If there is no room for it, it stays staged, and whoever closes it is told.
            if staged.fresh.iter().all(|fresh| *fresh)
                && self.publish_window(map, tensor, shape, span, &staged.bytes, None).is_ok()
            {
                drop(staged);
                self.drop_open(span);
            }
            return Ok(());
        }
    }

    /// Opens a window for which a place was taken. The caller holds its lock.
    fn open_window(&self, tensor: &Tensor, shape: &Shape, span: &Span) -> Result<Arc<Open>, DeviceError> {
        let windows = &self.windows;
        // What a store has to read first is no host's read: it is not counted as one.
        let bytes = self.decode_window(shape, span, PlaneMask::all(shape.format()), &mut Tally::default());
        let bytes = match bytes {
            Err(why) if Self::is_damage(&why) => {
                self.found_window_damage(span.numbers(), &why);
                Ok(vec![poison::PATTERN; span.bytes()])
            }
            bytes => bytes,
        };
        let staged = bytes.and_then(|bytes| {
            let place = self.kept.as_ref().map(|kept| kept.staged.take(span.first, &bytes)).transpose()?;
            Ok(Staged { bytes, place, fresh: vec![false; span.blocks] })
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
            let staged = Staged { bytes, place: Some(place), fresh: vec![false; span.blocks] };
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
        self.publish_window(map, tensor, shape, span, &open.staged.lock().bytes, None)?;
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

    /// Codes `bytes` as a window, as `coding` says or as is best, and publishes all its blocks, or none if the store is full. The caller holds the window's lock.
    fn publish_window(
        &self,
        map: &Map,
        tensor: &Tensor,
        shape: &Shape,
        span: &Span,
        bytes: &[u8],
        coding: Option<Coding>,
    ) -> Result<(), DeviceError> {
        let store = self.store();
        // What leaves can be read without it from the moment that it is looked at.
        let coding = coding.or_else(|| tensor.is_leaving().then_some(Coding::Plain));
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
        for ((block, (old, new)), words) in (span.first..).zip(&changes).zip(bytes.as_chunks().0) {
            self.stats.replaced(old, new);
            self.written(map, block, codec, words, Charge::of(old), Charge::of(new));
        }
        let stats = &self.stats;
        stats.windows_coded[coded.coding as usize].add(1);
        stats.repeated_rows.add(coded.repeated_rows as u64);
        Ok(())
    }

    /// What a window's blocks are charged before and after `bundles` take their place. The caller holds the window's lock.
    fn window_charges(&self, span: &Span, bundles: &[Bundle]) -> (u64, u64) {
        let before = span.numbers().map(|block| self.charged(block).bytes).sum();
        (before, bundles.iter().map(charge_of).sum())
    }

    /// Codes the windows of a tensor that is being made, where they hold data, and tells how far that
    /// came. The map is held for one at a time.
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
        let all = PlaneMask::all(shape.format());
        match self.decode_window(shape, span, all, &mut Tally::default()) {
            // Its blocks stay as they are, each by itself: who reads the lost one finds it.
            Err(why) if Self::is_damage(&why) => Ok(()),
            bytes => self.publish_window(&map, tensor, shape, span, &bytes?, None),
        }
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
        let open = self.windows.find(span).map(|open| open.staged.lock().bytes.clone());
        let bytes = match open {
            Some(bytes) => bytes,
            None if self.holds(span, |stored| stored.head_bytes() > 0) => {
                let all = PlaneMask::all(shape.format());
                match self.decode_window(shape, span, all, &mut Tally::default()) {
                    Err(why) if Self::is_damage(&why) => {
                        self.found_window_damage(span.numbers(), &why);
                        return Ok(());
                    }
                    bytes => bytes?,
                }
            }
            None => return Ok(()),
        };
        #[cfg(test)]
        super::holds::may_fail(super::holds::Step::Uncode)?;
        self.publish_window(&map, tensor, shape, span, &bytes, Some(Coding::Plain))?;
        self.drop_open(span);
        Ok(())
    }

    /// Drops the open windows of a tensor that has left, while the map is held alone. Every store
    /// closes such a window, so one that is open holds a store that was refused.
    pub(super) fn drop_windows(&self, tensor: &Tensor) {
        let Some(shape) = &tensor.windows else { return };
        for first in self.windows.open_in(tensor.blocks()) {
            self.drop_open(&Span::of(tensor, shape, first));
        }
    }

    /// Whether any block of a window holds something, stored in such a way. What is poisoned holds nothing.
    fn holds(&self, span: &Span, in_such_a_way: impl Fn(&Stored) -> bool) -> bool {
        let place = |block| self.store().entry(block).ok()?.place;
        span.numbers().filter_map(place).any(|place| in_such_a_way(&place.stored))
    }

    /// The store of a device that has KV windows.
    fn store(&self) -> &Store {
        self.coded_store().expect("only devices that code have windows")
    }
}
