//! What a device refuses, or cannot do.

use super::{MAX_AT_ONCE, MAX_OPEN_WINDOWS, MAX_PARTITION_NAME_BYTES, MAX_PARTITIONS, Window};
use crate::tensor::TensorError;
use lamina_codec::{BLOCK_BYTES, block::BlockError, view::ViewError};
use lamina_store::StoreError;

/// What the device refuses, or cannot do.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A window size that cannot be.
    #[error("{what} of {bytes} bytes: {rule}")]
    Size {
        /// Which size.
        what: &'static str,
        /// The size.
        bytes: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// A request past the end of a window.
    #[error("{length} bytes at {offset:#x} pass the end of the {window} window, {size} bytes")]
    PastWindow {
        /// The window.
        window: Window,
        /// Where the request begins.
        offset: u64,
        /// Its length.
        length: u64,
        /// Bytes of the window.
        size: u64,
    },
    /// A number of KV windows that cannot be.
    #[error("{windows} KV windows that may be open; such a device has from {least} to {MAX_OPEN_WINDOWS}")]
    OpenWindows {
        /// How many were asked for.
        windows: u64,
        /// The fewest: one for each partition.
        least: u64,
    },
    /// Too many partitions.
    #[error("{count} partitions; a device has at most {MAX_PARTITIONS}")]
    Partitions {
        /// How many were asked for.
        count: usize,
    },
    /// A partition's name that cannot be.
    #[error(
        "{name:?} cannot name a partition: 1 to {MAX_PARTITION_NAME_BYTES} lower-case letters, digits, `-` and `_`"
    )]
    PartitionName {
        /// The name, its first 64 characters.
        name: String,
    },
    /// Two partitions of one name.
    #[error("two partitions are called {name}")]
    PartitionTwice {
        /// The name.
        name: String,
    },
    /// A partition's quota is used up.
    #[error(
        "{partition}: {wanted} more bytes pass the quota of {quota} bytes, of which {stored} are used; \
         discard what is not needed"
    )]
    Quota {
        /// The partition.
        partition: String,
        /// Bytes that its blocks are charged.
        stored: u64,
        /// Bytes wanted besides.
        wanted: u64,
        /// The quota.
        quota: u64,
    },
    /// The store is full, told to a partition: how full it is says what the others store.
    #[error("the store is full")]
    Full,
    /// The store cannot.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Stored bytes are damaged.
    #[error("block {block} (DPA {:#x}) is damaged: {why}", block * BLOCK_BYTES as u64)]
    Damaged {
        /// The block.
        block: u64,
        /// What is wrong.
        why: BlockError,
    },
    /// A block is the difference to one of its tensor's base that is lost.
    #[error("block {block} (DPA {:#x}) is lost: {why}", block * BLOCK_BYTES as u64)]
    BaseLost {
        /// The block.
        block: u64,
        /// Whose difference to what it is, and why that is lost.
        why: String,
    },
    /// A tensor that cannot be, or is not.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A view that cannot be.
    #[error("tensor {tensor}: {why}")]
    View {
        /// The tensor.
        tensor: String,
        /// Why not.
        why: ViewError,
    },
    /// No gap of the views window is large enough.
    #[error(
        "tensor {tensor}: view {view} takes {length} bytes, the largest gap of the views window is {largest}; \
         start a new device with a larger --views-capacity (an image keeps its own), or for a guest's partition with --guest NAME=BYTES,views=BYTES"
    )]
    NoRoomForView {
        /// The tensor.
        tensor: String,
        /// The view.
        view: String,
        /// Bytes it takes.
        length: u64,
        /// The largest gap.
        largest: u64,
    },
    /// A plain device has no checks, and so no poison.
    #[error("a device of mode plain keeps no checks and no poison")]
    Plain,
    /// An image that no device made, or whose tables are damaged.
    #[error("the image's tables of tensors and views cannot be used: {why}")]
    Image {
        /// What is wrong.
        why: String,
    },
    /// A view that there is not.
    #[error("tensor {tensor} has no view {view}")]
    UnknownView {
        /// The tensor.
        tensor: String,
        /// The view's spelling.
        view: String,
    },
    /// What cannot be done now, and the asking one cannot wait.
    #[error("tensor {tensor} is being made, changed or removed; ask again when that is over")]
    Busy {
        /// The tensor.
        tensor: String,
    },
    /// What takes its time was stopped before its end.
    #[error("{tensor} keeps its base: the device was stopped before all of it was coded by itself")]
    Stopped {
        /// The tensor.
        tensor: String,
    },
    /// Too many tensors at once.
    #[error("{count} tensors at once; at most {MAX_AT_ONCE} are made in one step")]
    TooMany {
        /// How many were asked for.
        count: usize,
    },
}

impl DeviceError {
    /// Whether there was no room for what was written: the store is full, or a quota is used up.
    pub const fn is_no_room(&self) -> bool {
        matches!(self, Self::Quota { .. } | Self::Full)
            || matches!(self, Self::Store(why) if why.is_no_room())
    }
}
