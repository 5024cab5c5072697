//! KV windows: staged while they are written, coded when they are closed, decoded when they are
//! read (TRACE III-B).
//!
//! The rules:
//! * A store into a KV tensor goes to its *open* window, the paper's staging buffer (eq. 4): the
//!   window's bytes as the host sees them. Opening a window decodes what it holds; closing it codes
//!   and publishes it. Until then the store keeps what it had, so whatever fails, nothing is lost.
//! * A window is closed by [`Device::flush`](super::Device::flush), when all of it was written
//!   anew, when some of it was discarded, or when
//!   [`open_windows`](super::DeviceConfig::open_windows) are open and another one has to be: then
//!   the least recently written one goes first and the writer waits for it, which is counted as
//!   back-pressure.
//! * Everything about a window happens under its lock: a reader sees a window before a store or
//!   after it, coded or open, never a mixture. All its blocks are stored before the first of them
//!   is published.
//! * Windows that one request stores whole are coded by several threads before they are locked, and
//!   published in order.
//! * Who calls holds the map, so that a window's tensor stays. Staging knows no map: an open window
//!   knows its tensor.
//! * The windows of a tensor that is leaving are coded block by block and closed by every store:
//!   see `tables`.
//! * Locks are taken in this order: the map, a window's, then the tables' and the store's. No two
//!   windows' locks are held together.
//! * A window of which stored blocks are damaged is *recovered* by whoever decodes it: its blocks
//!   that have bytes in these are lost and poisoned, and it is coded anew in address order, where
//!   each block stands alone. So who decodes a window knows which blocks of it are lost, and who
//!   publishes one says so.
//! * An open window keeps which of its blocks are lost. A store of part of one is refused, a store
//!   of all of it ends that.
//! * A full window of a lossy tensor is [packed]. All else here is as for any other.
//! * What a window decoded to is kept for its next reader ([`super::decoded`]), and forgotten when
//!   the window is opened or published.

mod decode;
mod packed;
mod publish;

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use super::{
    DeviceConfig, DeviceError,
    accounts::Accounts,
    blocks::{BlockService, MAX_BATCH},
    charge::By,
    coding::{Coding, FetchError, ReadFrom, Wanted},
    observers::Change,
    parallel, poison,
    scratch::Request,
    staged::{Found, Place, StagedPlaces},
};
use crate::{
    stats::{Tally, WindowsNow},
    tensor::Tensor,
    window::Map,
};
use lamina_codec::{
    BLOCK_BYTES, BlockWords,
    kv::{self, BlockSet, Shape},
    plane::{self, PlaneMask},
};
use lamina_store as store;
use lamina_store::{Store, StoreError, cause::Why, entry};

/// Locks over the windows.
const STRIPES: usize = 1024;

/// The staging of KV windows: what there is of them besides stored blocks.
pub(super) struct KvStaging {
    blocks: Arc<BlockService>,
    accounts: Arc<Accounts>,
    /// Where the image keeps what is staged, if there is one.
    places: Option<StagedPlaces>,
    stripes: Vec<Mutex<()>>,
    staging: Mutex<Staging>,
    /// Most windows that may be open in one partition of the device: its share, so that no
    /// partition waits for another's.
    most: usize,
}

#[derive(Default)]
struct Staging {
    /// By the number of their first block.
    open: BTreeMap<u64, Arc<Open>>,
    /// Windows that are being opened, by partition.
    opening: Vec<usize>,
    /// Bytes of all of them.
    bytes: u64,
    clock: u64,
}

/// An open window.
struct Open {
    tensor: Arc<Tensor>,
    span: Span,
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

/// One window of a tensor. Who has one holds the map.
#[derive(Clone, Copy)]
struct KvWindow<'t> {
    tensor: &'t Arc<Tensor>,
    shape: &'t Shape,
    span: Span,
}

impl<'t> KvWindow<'t> {
    fn of(tensor: &'t Arc<Tensor>, shape: &'t Shape, block: u64) -> Self {
        Self { tensor, shape, span: Span::of(tensor, shape, block) }
    }

    /// Where block `block` of the device is in it.
    fn at(&self, block: u64) -> usize {
        usize::try_from(block - self.span.first).expect("inside the window")
    }
}

/// The windows of one tensor.
pub(super) struct KvWindows<'d> {
    staging: &'d KvStaging,
    tensor: &'d Arc<Tensor>,
    shape: &'d Shape,
}

impl<'d> KvWindows<'d> {
    pub(super) fn new(staging: &'d KvStaging, tensor: &'d Arc<Tensor>, shape: &'d Shape) -> Self {
        Self { staging, tensor, shape }
    }

    fn window(&self, block: u64) -> KvWindow<'d> {
        KvWindow::of(self.tensor, self.shape, block)
    }
}

impl Coding for KvWindows<'_> {
    fn needs_owner(&self) -> bool {
        true
    }

    fn read(
        &self,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<ReadFrom, FetchError> {
        self.staging.read(&self.window(wanted.block), wanted, words, request).map(|()| ReadFrom::Content)
    }

    fn write(&self, at: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        let window = self.window(at / BLOCK_BYTES as u64);
        let span = window.span;
        let inside = usize::try_from(at - span.range().start).expect("inside the window");
        if inside == 0 && data.len() >= span.bytes() {
            return self.write_whole(window, data, done);
        }
        let data = &data[..data.len().min(span.bytes() - inside)];
        *done += self.staging.write_open(&window, inside, data)?;
        if self.tensor.is_leaving() {
            self.staging.close(&window)?;
        }
        Ok(())
    }

    fn write_pieces(
        &self,
        block: u64,
        pieces: &[(usize, &[u8])],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        for (inside, piece) in pieces {
            // A block lies in one window.
            self.write(block * BLOCK_BYTES as u64 + *inside as u64, piece, done)?;
        }
        Ok(())
    }

    fn discard(&self, range: Range<u64>, done: &mut u64) -> Result<(), DeviceError> {
        let staging = self.staging;
        let window = self.window(range.start / BLOCK_BYTES as u64);
        let whole = window.span.range();
        let end = range.end.min(whole.end);
        let length = usize::try_from(end - range.start).expect("inside the window");
        if length == window.span.bytes() {
            let _lock = staging.stripe(&window.span).lock();
            let is_hole = |block| staging.store().is_hole(block);
            if staging.find(&window.span).is_none() && window.span.numbers().all(is_hole) {
                *done += end - range.start;
                return Ok(());
            }
            staging.publish(&window, Content::whole(&vec![0; length]), None)?;
            staging.drop_open(&window.span);
            *done += end - range.start;
        } else {
            let at = usize::try_from(range.start - whole.start).expect("inside the window");
            let written = staging.write_open(&window, at, &vec![0; length])?;
            // Staged, it reads as zeros, whether there is room to code it or not.
            *done += written as u64;
            staging.close(&window)?;
        }
        Ok(())
    }

    fn close(&self, block: u64) -> Result<bool, DeviceError> {
        self.staging.close(&self.window(block))
    }

    fn recode(&self, block: u64) -> Result<(), DeviceError> {
        self.staging.recode(&self.window(block))
    }

    fn release(&self, block: u64) -> Result<(), DeviceError> {
        self.staging.uncode(&self.window(block))
    }

    fn recover(&self, block: u64) -> Result<u64, DeviceError> {
        let window = self.window(block);
        self.staging.recover_if_closed(&window)?;
        Ok(window.span.numbers().end)
    }

    fn poison(&self, blocks: Range<u64>, why: &Why) -> Result<u64, DeviceError> {
        let window = self.window(blocks.start);
        self.staging.change_lost(&window, blocks, why, |whole, block| whole.lost.insert(block))
    }

    fn clear_poison(&self, blocks: Range<u64>) -> Result<u64, DeviceError> {
        let why =
            Why::new(poison::Cause::Damaged, "it was lost before another block of its window was cleared");
        let window = self.window(blocks.start);
        self.staging.change_lost(&window, blocks, &why, |whole, block| {
            if whole.lost.remove(block) {
                whole.bytes.as_chunks_mut::<BLOCK_BYTES>().0[block].fill(0);
                // Zeros are stored there, by whoever clears it.
                whole.touched.resize(whole.bytes.len() / BLOCK_BYTES, false);
                whole.touched[block] = true;
            }
        })
    }
}

impl KvWindows<'_> {
    /// Stores the windows that `data` has whole from `first` on, as many as are coded together.
    fn write_whole(&self, first: KvWindow<'_>, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        let staging = self.staging;
        let most = (MAX_BATCH / self.shape.blocks()).max(parallel::threads());
        let mut windows = Vec::new();
        let (mut rest, mut block) = (data, first.span.first);
        while windows.len() < most && block < self.tensor.blocks().end {
            let window = self.window(block);
            let Some((bytes, after)) = rest.split_at_checked(window.span.bytes()) else { break };
            windows.push((window, bytes));
            (rest, block) = (after, window.span.numbers().end);
        }
        let pieces = windows.iter().map(|(window, bytes)| (window, *bytes));
        let code = |(window, bytes)| (window, bytes, staging.encode(window, bytes, None));
        parallel::in_order(pieces, code, |(window, bytes, coded)| {
            let _lock = staging.stripe(&window.span).lock();
            staging.publish_coded(window, Content::whole(bytes), &coded)?;
            staging.drop_open(&window.span);
            *done += bytes.len();
            Ok(())
        })
    }
}

impl KvStaging {
    pub(super) fn new(
        config: &DeviceConfig,
        blocks: Arc<BlockService>,
        accounts: Arc<Accounts>,
        places: Option<StagedPlaces>,
    ) -> Self {
        let partitions = accounts.partition_table.partitions.len();
        Self {
            blocks,
            places,
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            staging: Mutex::new(Staging { opening: vec![0; partitions], ..Staging::default() }),
            most: (config.open_windows / partitions).max(1),
            accounts,
        }
    }

    /// What there is now.
    pub(super) fn now(&self) -> WindowsNow {
        let staging = self.staging.lock();
        WindowsNow {
            open: staging.open.len() as u64,
            max_open: (self.most * self.accounts.partition_table.partitions.len()) as u64,
            staged_bytes: staging.bytes,
            decoded_bytes: self.blocks.decoded.lock().bytes() as u64,
        }
    }

    fn stripe(&self, span: &Span) -> &Mutex<()> {
        &self.stripes[usize::try_from(span.first % STRIPES as u64).expect("less than STRIPES")]
    }

    fn find(&self, span: &Span) -> Option<Arc<Open>> {
        self.staging.lock().open.get(&span.first).cloned()
    }

    /// The first blocks of the windows that are open among these.
    pub(super) fn open_in(&self, blocks: Range<u64>) -> Vec<u64> {
        self.staging.lock().open.range(blocks).map(|(first, _)| *first).collect()
    }

    /// The first blocks of the windows that are open and hold any of `range` of the base window.
    pub(super) fn open_over(&self, range: &Range<u64>) -> Vec<u64> {
        let block = BLOCK_BYTES as u64;
        // A window that begins before the range may reach into it.
        let from = (range.start / block).saturating_sub(kv::MAX_BLOCKS as u64);
        let staging = self.staging.lock();
        let open = staging.open.range(from..range.end.div_ceil(block));
        open.filter(|(_, open)| open.span.range().end > range.start).map(|(first, _)| *first).collect()
    }

    /// Takes a place in a partition, which has these blocks, for a window to be opened,
    /// or else names its open one that was written least recently.
    fn take_place(&self, partition: usize, blocks: Range<u64>) -> Result<(), Option<Arc<Open>>> {
        let mut staging = self.staging.lock();
        let open = staging.open.range(blocks);
        if open.clone().count() + staging.opening[partition] < self.most {
            staging.opening[partition] += 1;
            return Ok(());
        }
        let oldest = open.min_by_key(|(_, open)| open.written.load(Relaxed));
        Err(oldest.map(|(_, open)| open.clone()))
    }

    /// Gives back a place that was taken in a partition, with the window opened there, if
    /// it was.
    fn fill_place(&self, partition: usize, span: &Span, open: Option<Open>) -> Option<Arc<Open>> {
        let mut staging = self.staging.lock();
        staging.opening[partition] -= 1;
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

    /// Writes `data` at `at` of a window, which is opened if it is not, up to a block that is lost
    /// and not written whole: how many bytes that are. If it is the first one, that is an error.
    fn write_open(&self, window: &KvWindow<'_>, at: usize, data: &[u8]) -> Result<usize, DeviceError> {
        let KvWindow { tensor, span, .. } = window;
        let accounts = &self.accounts;
        loop {
            let lock = self.stripe(span).lock();
            let mut tally = Tally::default();
            let found = self.find(span);
            let was_open = found.is_some();
            let open = match found {
                Some(open) => open,
                None => {
                    match self.take_place(
                        tensor.partition,
                        accounts.partition_table.partitions[tensor.partition].blocks(),
                    ) {
                        Ok(()) => self.open(window, &mut tally)?,
                        Err(oldest) => {
                            drop(lock);
                            self.make_room(oldest.as_deref())?;
                            continue;
                        }
                    }
                }
            };
            open.written.store(self.tick(), Relaxed);
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
                    let part = inside..inside + part.len();
                    let parts = std::slice::from_ref(&part);
                    let change = Change { block, codec: tensor.info.codec, parts, coded: None, read: None };
                    accounts.observers.stored(&change, &accounts.stats, &mut tally);
                }
            }
            accounts.stats.count_for_write(opened, opened * data.len() as u64, &tally);
            staged.bytes[at..at + data.len()].copy_from_slice(data);
            if let (Some(place), Some(places)) = (&staged.place, &self.places) {
                places.write(place, at, data);
            }
            let mut mended = false;
            for block in at.div_ceil(BLOCK_BYTES)..(at + data.len()) / BLOCK_BYTES {
                staged.fresh[block] = true;
                if staged.lost.remove(block) {
                    mended = true;
                    self.store().losses().mended(span.first + block as u64);
                }
            }
            if let (Some(place), Some(places)) = (&staged.place, self.places.as_ref().filter(|_| mended)) {
                places.set_lost(place, &staged.lost);
            }
            // If there is no room for it, it stays staged, and whoever closes it is told.
            if staged.fresh.iter().all(|fresh| *fresh) && self.publish(window, staged.content(), None).is_ok()
            {
                drop(staged);
                self.drop_open(span);
            }
            return Ok(data.len());
        }
    }

    /// Opens a window for which a place was taken. The caller holds its lock.
    fn open(&self, window: &KvWindow<'_>, tally: &mut Tally) -> Result<Arc<Open>, DeviceError> {
        let KvWindow { tensor, span, .. } = window;
        let staged = self.load(window, tally).and_then(|Whole { bytes, lost, .. }| {
            let take = |places: &StagedPlaces| places.take(span.first, &bytes, &lost);
            let place = self.places.as_ref().map(take).transpose()?;
            let (fresh, touched) = (vec![false; span.blocks], vec![false; span.blocks]);
            Ok(Staged { bytes, place, fresh, lost, touched })
        });
        let staged = staged.inspect_err(|_| drop(self.fill_place(tensor.partition, span, None)))?;
        self.blocks.decoded.lock().forget(span.first);
        self.accounts.stats.windows_opened.add(1);
        let open = self.opened(window, staged);
        Ok(self.fill_place(tensor.partition, span, Some(open)).expect("an open window"))
    }

    fn opened(&self, window: &KvWindow<'_>, staged: Staged) -> Open {
        let (tensor, written) = (window.tensor.clone(), AtomicU64::new(self.tick()));
        Open { tensor, span: window.span, written, staged: Mutex::new(staged) }
    }

    /// Lets an open window go. The caller holds its lock.
    fn drop_open(&self, span: &Span) {
        let mut staging = self.staging.lock();
        let Some(open) = staging.open.remove(&span.first) else { return };
        staging.bytes -= span.bytes() as u64;
        let place = open.staged.lock().place.take();
        if let (Some(place), Some(places)) = (place, &self.places) {
            places.let_go(place);
        }
    }

    /// Closes the open window `oldest`, so that another can be opened; waits if every place is only
    /// being filled.
    fn make_room(&self, oldest: Option<&Open>) -> Result<(), DeviceError> {
        let Some(oldest) = oldest else {
            std::thread::yield_now();
            return Ok(());
        };
        let Some(shape) = &oldest.tensor.windows else { return Ok(()) };
        let closed = self.close(&KvWindow { tensor: &oldest.tensor, shape, span: oldest.span })?;
        self.accounts.stats.windows_forced.add(closed.into());
        Ok(())
    }

    /// Codes a window and publishes it, if it is open: whether it was.
    fn close(&self, window: &KvWindow<'_>) -> Result<bool, DeviceError> {
        let _lock = self.stripe(&window.span).lock();
        let Some(open) = self.find(&window.span) else { return Ok(false) };
        self.publish(window, open.staged.lock().content(), None)?;
        self.drop_open(&window.span);
        Ok(true)
    }

    /// Opens the windows again that were open when the image was left.
    pub(super) fn reopen(&self, map: &Map) {
        let Some(places) = &self.places else { return };
        for Found { place, first, mut bytes, lost } in places.found() {
            let tensor = map.tensor_at(first.saturating_mul(BLOCK_BYTES as u64));
            let window =
                tensor.and_then(|tensor| Some(KvWindow::of(tensor, tensor.windows.as_ref()?, first)));
            // Its tensor may have been removed, which published the window before; and an image may
            // say anything.
            let fits = |KvWindow { span, .. }: &KvWindow<'_>| {
                span.first == first && span.bytes() == bytes.len() && self.has_place_for(first)
            };
            let Some(window) = window.filter(fits) else {
                places.let_go(place);
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
            let span = window.span;
            // Which blocks were written nobody knows any more.
            let (fresh, touched) = (vec![false; span.blocks], vec![true; span.blocks]);
            let open = self.opened(&window, Staged { bytes, place: Some(place), fresh, lost, touched });
            let mut staging = self.staging.lock();
            staging.bytes += span.bytes() as u64;
            staging.open.insert(first, Arc::new(open));
        }
    }

    /// Whether a window that begins at block `first` is not open and may be.
    fn has_place_for(&self, first: u64) -> bool {
        let partition_table = &self.accounts.partition_table;
        let partition = &partition_table.partitions[partition_table.of_block(first)];
        let staging = self.staging.lock();
        !staging.open.contains_key(&first) && staging.open.range(partition.blocks()).count() < self.most
    }

    /// Whether any window of a tensor is open.
    pub(super) fn has_open(&self, tensor: &Tensor) -> bool {
        tensor.windows.is_some() && !self.open_in(tensor.blocks()).is_empty()
    }

    /// The store of a device that has KV windows.
    fn store(&self) -> &Store {
        self.blocks.store().expect("only devices that code have windows")
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
