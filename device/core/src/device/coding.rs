//! The coding of a region: how the bytes of one owner become stored blocks, and how they come back.
//!
//! The rules:
//! * The map says who owns a range. [`Region::of`] is the one place that says which coding its
//!   owner has; whoever reads or stores asks the [`Coding`] and does not look at formats or
//!   windows.
//! * A coding knows blocks, accounts and staging. It knows no map: who calls one that changes what
//!   is stored holds the map, so that the owner stays the owner.
//! * What a read finds is told forward, as [`FetchError`]. Only the device, which has the map, says
//!   what becomes of it.

use std::{ops::Range, sync::Arc};

use super::{
    Device, DeviceError, against::Against, blockwise::Blockwise, derived::Kindred, scratch::Request,
    windows::KvWindows,
};
use crate::{
    tensor::{Tensor, TensorInfo},
    window::Map,
};
use lamina_codec::{BLOCK_BYTES, BlockWords, Codec, format::Format, plane::PlaneMask, view::View};
use lamina_store::{StoreError, cause::Why, entry::Entry};

/// How the bytes of a region are coded.
pub(super) trait Coding {
    /// Whether what is stored of a block can be read only as its owner's: then the map is held for
    /// a read. So it is of KV windows, those of one block too, and of differences to a base.
    fn needs_owner(&self) -> bool;

    /// Decodes the planes in `wanted.mask` of one block to `words`, all others zero. If it
    /// [needs its owner](Self::needs_owner), the caller holds the map.
    fn read(
        &self,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<ReadFrom, FetchError>;

    /// Stores bytes from the start of `data` on at base offset `at`, as many as are coded at once,
    /// and adds them to `done`, also if there is an error behind them.
    fn write(&self, at: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError>;

    /// Stores `pieces` of one block, each at its place in it.
    fn write_pieces(
        &self,
        block: u64,
        pieces: &[(usize, &[u8])],
        done: &mut usize,
    ) -> Result<(), DeviceError>;

    /// Forgets bytes from the start of `range` on, as many as are coded together, and adds them to
    /// `done`, also if there is an error then.
    fn discard(&self, range: Range<u64>, done: &mut u64) -> Result<(), DeviceError>;

    /// Codes what is staged of the unit that holds `block`: whether anything was.
    fn close(&self, block: u64) -> Result<bool, DeviceError>;

    /// Codes the unit that holds `block` anew, if it holds data.
    fn recode(&self, block: u64) -> Result<(), DeviceError>;

    /// Codes the unit that holds `block` so that it can be read when its owner is gone.
    fn release(&self, block: u64) -> Result<(), DeviceError>;

    /// Finds out what is lost with damaged entries of the unit that holds `block`: the first block
    /// behind the unit.
    fn recover(&self, block: u64) -> Result<u64, DeviceError>;

    /// Poisons those of `blocks` that are of the first one's unit: the first block behind these.
    fn poison(&self, blocks: Range<u64>, why: &Why) -> Result<u64, DeviceError>;

    /// Makes zeros of those of `blocks` that are of the first one's unit and are poisoned: the
    /// first block behind these.
    fn clear_poison(&self, blocks: Range<u64>) -> Result<u64, DeviceError>;
}

/// What is wanted of one block.
pub(super) struct Wanted<'a> {
    pub(super) block: u64,
    /// The block that the request wants next, if any: it is prefetched meanwhile.
    pub(super) next: Option<u64>,
    pub(super) mask: PlaneMask,
    /// Bytes that the reader takes.
    pub(super) inside: Range<usize>,
    /// Bytes that hold what it asked for.
    pub(super) requested: &'a [Range<usize>],
    /// Whether what is decoded besides `inside` is kept for the next reader.
    pub(super) keep: bool,
    /// The view that asks, if it is one.
    pub(super) view: Option<&'a View>,
    /// Whether the request asks for this block for the first time.
    pub(super) first: bool,
}

/// What a read was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadFrom {
    /// What is stored of the block, or staged.
    Content,
    /// Nothing is stored of the block. It is zeros, unless it is of a KV window by now, which may
    /// have coded its bytes into other blocks.
    Nothing,
    /// What is stored of the block, which is the difference to its owner's base.
    Difference,
}

/// Why a block was not read.
#[derive(Debug)]
pub(super) enum FetchError {
    /// The map that says how the block is coded is out of date. Ask again with the one that there
    /// is now.
    Stale,
    /// What is stored for the block does not check, or belongs to another coding.
    Damaged {
        /// What it was read by, if that can be read.
        entry: Option<Box<Entry>>,
        why: DeviceError,
    },
    /// Another error.
    Failed(DeviceError),
}

impl From<DeviceError> for FetchError {
    fn from(why: DeviceError) -> Self {
        Self::Failed(why)
    }
}

impl From<StoreError> for FetchError {
    fn from(why: StoreError) -> Self {
        Self::Failed(why.into())
    }
}

/// A range of one owner, and how it is coded.
pub(super) enum Region<'d> {
    /// Blocks by themselves: weights, and memory that no tensor owns.
    Blocks(Blockwise<'d>),
    /// Likewise, of a tensor that is coded against another, or that another is coded against.
    Kindred(Kindred<'d>),
    /// Windows of a KV tensor.
    Kv(KvWindows<'d>),
}

impl<'d> Region<'d> {
    /// The region of `owner`, nobody's if there is none.
    pub(super) fn of(device: &'d Device, owner: Option<&'d Arc<Tensor>>) -> Self {
        let blocks = &device.blocks;
        match owner {
            None => Self::Blocks(Blockwise::opaque(blocks, device.config.codec)),
            Some(tensor) => match &tensor.windows {
                None if tensor.lineage.base().is_some() || tensor.lineage.is_base() => {
                    Self::Kindred(Kindred::new(blocks, tensor))
                }
                None => Self::Blocks(Blockwise::new(blocks, tensor, Class::of(&tensor.info))),
                Some(shape) => Self::Kv(KvWindows::new(&device.windows, tensor, shape)),
            },
        }
    }

    pub(super) fn coding(&self) -> &(dyn Coding + 'd) {
        match self {
            Self::Blocks(blocks) => blocks,
            Self::Kindred(blocks) => blocks,
            Self::Kv(windows) => windows,
        }
    }

    pub(super) fn needs_owner(&self) -> bool {
        self.coding().needs_owner()
    }

    /// Whether its blocks are coded together.
    pub(super) const fn is_windowed(&self) -> bool {
        matches!(self, Self::Kv(_))
    }
}

/// How a block by itself is coded.
#[derive(Clone, Copy)]
pub(super) struct Class<'a> {
    pub(super) format: Format,
    pub(super) codec: Codec,
    /// What it may be stored as the difference to.
    pub(super) base: Option<&'a Against<'a>>,
    /// Whether it is to be stored by itself even so.
    pub(super) by_itself: bool,
}

impl Class<'_> {
    /// Of a tensor without a base.
    pub(super) const fn of(info: &TensorInfo) -> Self {
        Self { format: info.format, codec: info.codec, base: None, by_itself: true }
    }
}

/// The tensor that owns `block`.
pub(super) fn owner(map: &Map, block: u64) -> Option<&Arc<Tensor>> {
    map.tensor_at(block * BLOCK_BYTES as u64)
}

/// Whether `block` is still part of `tensor`, as it was when the caller looked it up.
pub(super) fn is_current(map: &Map, tensor: &Arc<Tensor>, block: u64) -> bool {
    owner(map, block).is_some_and(|owner| Arc::ptr_eq(owner, tensor))
}
