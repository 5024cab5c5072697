//! Tensors: named ranges of the base window whose elements the device understands.
//!
//! The rules:
//! * A tensor begins at a multiple of 4096 bytes and shares no block with another, so that a block
//!   has one format.
//! * The bytes between a tensor's end and its last block's belong to it: they are ordinary memory
//!   that no view shows.
//! * Its length is exactly what its elements take.

mod lineage;
mod transition;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use serde::{Deserialize, Serialize};

pub use self::lineage::MAX_BASES;
pub(crate) use self::lineage::{Derived, Lineage};
pub(crate) use self::transition::Transition;
use crate::{
    counters::{Counted, Gauge},
    layout::Layout,
};
use lamina_codec::{
    BLOCK_BYTES, Codec,
    format::Format,
    kv::{KvError, Shape},
};
use lamina_store as store;
use lamina_store::mode::Mode;

/// What the names of tensors have in them that no list names: they hold what files are besides
/// tensors.
pub(crate) const HIDDEN: &str = "/.lamina/";
/// Longest name of a tensor, in bytes.
pub const MAX_NAME_BYTES: usize = 4096;

/// A tensor to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Its name, unique on the device.
    pub name: String,
    /// Where it begins in the base window; the first place it fits if not given.
    #[serde(default)]
    pub dpa: Option<u64>,
    /// Its length in bytes.
    pub length: u64,
    /// Its elements; all that the length holds if not given.
    #[serde(default)]
    pub elements: Option<u64>,
    /// Its shape, outermost dimension first; one dimension of all elements if empty.
    #[serde(default)]
    pub shape: Vec<u64>,
    /// The format of its elements.
    pub format: Format,
    /// Their order.
    #[serde(default)]
    pub layout: Layout,
    /// The codec of its planes; the device's if not given.
    #[serde(default)]
    pub codec: Option<Codec>,
    /// The name of a tensor that its blocks may be stored as differences to.
    #[serde(default)]
    pub base: Option<String>,
}

impl TensorSpec {
    /// A tensor of so many bytes of a format, as weights lie: what else may be said is as where it
    /// is not given.
    pub fn new(name: impl Into<String>, dpa: Option<u64>, length: u64, format: Format) -> Self {
        Self {
            name: name.into(),
            dpa,
            length,
            elements: None,
            shape: Vec::new(),
            format,
            layout: Layout::default(),
            codec: None,
            base: None,
        }
    }
}

/// A tensor that there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Where it begins in the base window.
    pub dpa: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its elements.
    pub elements: u64,
    /// Its shape, outermost dimension first.
    pub shape: Vec<u64>,
    /// The format of its elements.
    pub format: Format,
    /// Their order.
    pub layout: Layout,
    /// The codec of its planes.
    pub codec: Codec,
    /// The tensor that its blocks may be stored as differences to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

/// Why a tensor cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TensorError {
    /// The name is empty, too long or has control characters.
    #[error(
        "{name:?} cannot name a tensor: 1 to {MAX_NAME_BYTES} bytes without control characters, this has {length}"
    )]
    Name {
        /// The name, its first 64 characters.
        name: String,
        /// Its length in bytes.
        length: usize,
    },
    /// The name is one of the device's own.
    #[error("{name:?} cannot name a tensor: names with `{HIDDEN}` in them are the device's own")]
    Hidden {
        /// The name.
        name: String,
    },
    /// Another tensor has the name.
    #[error("there is a tensor called {name:?} already")]
    Exists {
        /// The name.
        name: String,
    },
    /// No tensor has the name.
    #[error("no tensor is called {name:?}")]
    Unknown {
        /// The name.
        name: String,
    },
    /// It does not begin at a block.
    #[error("{name}: DPA {dpa:#x} is not a multiple of {BLOCK_BYTES}")]
    Unaligned {
        /// The tensor.
        name: String,
        /// Where it would begin.
        dpa: u64,
    },
    /// It ends past the base window.
    #[error("{name}: {length} bytes at DPA {dpa:#x} pass the base window's {capacity} bytes")]
    PastCapacity {
        /// The tensor.
        name: String,
        /// Where it would begin.
        dpa: u64,
        /// Its length.
        length: u64,
        /// Bytes of the base window.
        capacity: u64,
    },
    /// It belongs to no partition of a divided device.
    #[error("{name:?} names no partition: tensors of this device are called PARTITION/NAME, of {partitions}")]
    NoPartition {
        /// The name.
        name: String,
        /// The partitions there are.
        partitions: String,
    },
    /// It does not lie in the partition that it is named after.
    #[error("{name}: {length} bytes at DPA {dpa:#x} are not in its partition, {start:#x} to {end:#x}")]
    OutsidePartition {
        /// The tensor.
        name: String,
        /// Where it would begin.
        dpa: u64,
        /// Its length.
        length: u64,
        /// Where the partition begins.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// It would share a block with another.
    #[error("{name}: {length} bytes at DPA {dpa:#x} overlap {other} at {other_dpa:#x}, {other_length} bytes")]
    Overlap {
        /// The tensor.
        name: String,
        /// Where it would begin.
        dpa: u64,
        /// Its length.
        length: u64,
        /// The tensor in the way.
        other: String,
        /// Where that begins.
        other_dpa: u64,
        /// Its length.
        other_length: u64,
    },
    /// No gap is large enough.
    #[error(
        "{name}: no {length} bytes are free in the base window of {capacity} bytes (largest gap {largest}); \
         start with a larger --capacity, or for a partition with a larger --guest NAME=BYTES or --shared"
    )]
    NoRoom {
        /// The tensor.
        name: String,
        /// Its length.
        length: u64,
        /// Bytes of the base window.
        capacity: u64,
        /// The largest gap.
        largest: u64,
    },
    /// Length, elements and shape do not agree.
    #[error(
        "{name}: {what} is {value}, which does not fit {elements} elements of {format} in {length} bytes"
    )]
    Size {
        /// The tensor.
        name: String,
        /// What disagrees.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The elements.
        elements: u64,
        /// Their format.
        format: Format,
        /// The length.
        length: u64,
    },
    /// Dimensions of a shape whose product no number of 64 bits holds.
    #[error("{name}: {what} passes {} elements, more than any tensor has", u64::MAX)]
    Overflow {
        /// The tensor.
        name: String,
        /// What passes them.
        what: &'static str,
    },
    /// The bytes behind it are not free.
    #[error(
        "{name}: {length} bytes do not fit at DPA {dpa:#x}, where {free} bytes are free to where {behind} begins"
    )]
    NotFree {
        /// The tensor.
        name: String,
        /// Its length to be.
        length: u64,
        /// Where it begins.
        dpa: u64,
        /// Bytes from there on that it may have.
        free: u64,
        /// What begins behind them: a tensor, or nothing more.
        behind: String,
    },
    /// A format that entries of the image's version have no number for.
    #[error(
        "{name}: an image of version 1 has no blocks of {format}; `lamina image upgrade` makes it one of version 2"
    )]
    Version {
        /// The tensor.
        name: String,
        /// The format of its elements.
        format: Format,
    },
    /// It cannot be coded against that tensor.
    #[error("{name} cannot be stored as the difference to {base}: {why}")]
    Base {
        /// The tensor.
        name: String,
        /// What was to be its base.
        base: String,
        /// Why not.
        why: NoBase,
    },
    /// Others are coded against it.
    #[error(
        "{name} is the base of {}: detach or remove what is derived from it before it is removed or resized",
        shown(derived)
    )]
    IsBase {
        /// The tensor.
        name: String,
        /// Names of those.
        derived: Vec<String>,
    },
    /// It is coded against another, which is as long.
    #[error(
        "{name} is stored as the difference to {base} and is as long as that: it cannot be resized before it is \
         detached"
    )]
    IsDerived {
        /// The tensor.
        name: String,
        /// Its base.
        base: String,
    },
    /// A KV layout that cannot be.
    #[error("{name}: {why}")]
    Kv {
        /// The tensor.
        name: String,
        /// Why not.
        why: KvError,
    },
}

/// Names that an error has of many.
const SHOWN: usize = 8;

fn shown(names: &[String]) -> String {
    let first = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// Why a tensor cannot be the base of another.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NoBase {
    /// No tensor has the name.
    #[error("no tensor is called that")]
    Unknown,
    /// It is about to be removed, or to have no base.
    #[error("that is being removed or detached")]
    Leaving,
    /// Their elements are not the same.
    #[error("that has {theirs} elements of {their_format}, this {own} of {own_format}")]
    Elements {
        /// The base's elements.
        theirs: u64,
        /// Their format.
        their_format: Format,
        /// The tensor's.
        own: u64,
        /// Their format.
        own_format: Format,
    },
    /// KV windows are coded together.
    #[error("KV caches are coded by windows, and neither have bases nor are such")]
    Kv,
    /// Another guest would decide over what it stores.
    #[error("that is in another partition")]
    Partition,
    /// Too many bases follow each other.
    #[error("that has {MAX_BASES} bases behind it already, and no tensor has more")]
    Depth,
    /// The device codes no planes.
    #[error("a device of mode {mode} stores no differences")]
    Mode {
        /// The device's mode.
        mode: Mode,
    },
    /// Entries of the image cannot say that a block is a difference.
    #[error("an image of version 1 has no differences; `lamina image upgrade` makes it one of version 2")]
    Version,
}

/// A tensor and what is counted about it.
pub(crate) struct Tensor {
    /// As it was made; [`Tensor::told`] has the base that it has now.
    pub(crate) info: TensorInfo,
    /// The partition of the device that it lies in.
    pub(crate) partition: usize,
    /// Its windows, if the device codes it by windows.
    pub(crate) windows: Option<Shape>,
    /// Bytes its blocks are charged in the store.
    pub(crate) stored: Arc<Gauge>,
    /// Its blocks that hold data.
    pub(crate) live: Arc<Gauge>,
    /// Reads through the base window.
    pub(crate) traffic: Arc<Counted>,
    /// The checkpoint it was loaded from.
    pub(crate) source: SourceOf,
    pub(crate) transition: Transition,
    pub(crate) lineage: Lineage,
    /// Unlike that of any other tensor or view since the device was opened.
    pub(crate) number: u64,
}

impl Tensor {
    /// What is told of it: with the base that it has now.
    pub(crate) fn told(&self) -> TensorInfo {
        TensorInfo { base: self.base_name(), ..self.info.clone() }
    }

    /// The name of the base that it has now.
    pub(crate) fn base_name(&self) -> Option<String> {
        self.lineage.base().map(|base| base.info.name.clone())
    }

    /// Where its last block ends.
    pub(crate) fn end(&self) -> u64 {
        self.info.dpa + self.info.length.next_multiple_of(BLOCK_BYTES as u64)
    }

    /// The numbers of its blocks, on the device.
    pub(crate) fn blocks(&self) -> Range<u64> {
        Self::blocks_of(&self.info)
    }

    /// Likewise of one that is to be.
    pub(crate) fn blocks_of(info: &TensorInfo) -> Range<u64> {
        let first = store::blocks(info.dpa);
        first..first.saturating_add(info.length.div_ceil(BLOCK_BYTES as u64))
    }

    /// Whether that is this one, resized or not.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.stored, &other.stored)
    }

    /// Whether nobody is ever told of it.
    pub(crate) fn is_hidden(&self) -> bool {
        self.info.name.contains(HIDDEN)
    }

    /// Whether it is about to go.
    pub(crate) fn is_leaving(&self) -> bool {
        self.transition.is_leaving()
    }

    /// Whether it is charged for `block`, which is one of its own.
    pub(crate) fn is_charged(&self, block: u64) -> bool {
        self.transition.charged().contains(&(block - self.blocks().start))
    }
}

/// Refuses a name by which people would make, or derive from, what is hidden from them.
pub(crate) fn is_not_hidden(name: &str) -> Result<(), TensorError> {
    if name.contains(HIDDEN) { Err(TensorError::Hidden { name: name.to_owned() }) } else { Ok(()) }
}

/// Checks all of `spec` but its place: its elements and its shape.
pub(crate) fn check(spec: &TensorSpec) -> Result<(u64, Vec<u64>), TensorError> {
    let TensorSpec { name, length, format, .. } = spec;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        return Err(TensorError::Name { name: name.chars().take(64).collect(), length: name.len() });
    }
    let elements = spec.elements.unwrap_or_else(|| format.elements_in(*length));
    let size = |what, value| {
        let name = name.clone();
        TensorError::Size { name, what, value, elements, format: *format, length: *length }
    };
    if format.bytes_for(elements) != Some(*length) {
        return Err(size("the length", *length));
    }
    let shape = if spec.shape.is_empty() { vec![elements] } else { spec.shape.clone() };
    let product = product_of(name, "the product of the shape", &shape)?;
    if product != elements {
        return Err(size("the product of the shape", product));
    }
    Ok((elements, shape))
}

/// The product of dimensions of `name`'s shape, which are `what`.
pub(crate) fn product_of(name: &str, what: &'static str, dimensions: &[u64]) -> Result<u64, TensorError> {
    let product = dimensions.iter().try_fold(1_u64, |product, dimension| product.checked_mul(*dimension));
    product.ok_or_else(|| TensorError::Overflow { name: name.to_owned(), what })
}

/// Why a tensor of partition `partition` cannot be coded against `base`, if so.
pub(crate) fn refused_base(info: &TensorInfo, partition: usize, base: &Tensor) -> Option<NoBase> {
    let of = &base.info;
    if info.layout != Layout::Weight || of.layout != Layout::Weight {
        return Some(NoBase::Kv);
    }
    if (of.format, of.length, of.elements) != (info.format, info.length, info.elements) {
        let (theirs, own) = (of.elements, info.elements);
        let (their_format, own_format) = (of.format, info.format);
        return Some(NoBase::Elements { theirs, their_format, own, own_format });
    }
    if base.partition != partition {
        return Some(NoBase::Partition);
    }
    (base.lineage.bases().take(MAX_BASES).count() == MAX_BASES).then_some(NoBase::Depth)
}

/// The windows of `spec`, if it is a KV tensor of elements that can be put in order.
pub(crate) fn windows(spec: &TensorSpec) -> Result<Option<Shape>, TensorError> {
    match &spec.layout {
        Layout::Weight => Ok(None),
        Layout::Kv(layout) => {
            Shape::new(spec.format, layout).map_err(|why| TensorError::Kv { name: spec.name.clone(), why })
        }
    }
}

/// The number of a source in an image. None is 0.
pub type SourceId = u64;

/// Which source a tensor names, if any.
#[derive(Debug, Default)]
pub(crate) struct SourceOf(AtomicU64);

impl SourceOf {
    pub(crate) fn new(id: Option<SourceId>) -> Self {
        Self(AtomicU64::new(id.unwrap_or(0)))
    }

    /// Names another; 0 is none. The one before.
    pub(crate) fn swap(&self, id: SourceId) -> SourceId {
        self.0.swap(id, Relaxed)
    }

    pub(crate) fn get(&self) -> Option<SourceId> {
        Some(self.0.load(Relaxed)).filter(|id| *id != 0)
    }
}
