//! The two windows of the device's memory, and the alias decoder (TRACE III-C,
//! "precision-partitioned addressing").
//!
//! The rules:
//! * `base` is the capacity window: offset = DPA. `views` begins with the directory; views lie
//!   behind it at multiples of 2 MiB and never move while they exist.
//! * What lies where is said by a [`Map`].
//! * Each part of a divided device has a directory, which counts from the part's own beginnings and
//!   changes only with what is in it.

mod arithmetic;
mod chunks;
mod directory;
mod gaps;
mod map;

use std::{ops::Range, sync::Arc};

use serde::Serialize;

use self::arithmetic::{Geometry, Piece};
pub(crate) use self::{
    gaps::Gaps,
    map::{Draft, Map},
};
use crate::{counters::Counted, tensor::Tensor};
use lamina_codec::{BLOCK_BYTES, view::View};

/// A view that there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ViewInfo {
    /// The tensor's name.
    pub tensor: String,
    /// The view's spelling.
    pub view: String,
    /// Where it begins in the views window.
    pub offset: u64,
    /// Its bytes.
    pub length: u64,
    /// Its elements.
    pub elements: u64,
    /// Bits of an element.
    pub bits: u32,
    /// A stored value x stands for x·2^`scale_exp`.
    pub scale_exp: i32,
    /// Planes it selects in each block.
    pub planes: u32,
}

/// A view at its place in the aperture.
pub(crate) struct Alias {
    pub(crate) tensor: Arc<Tensor>,
    pub(crate) view: View,
    pub(crate) info: ViewInfo,
    pub(crate) traffic: Arc<Counted>,
    /// Unlike that of any other tensor or view since the device was opened.
    pub(crate) number: u64,
}

impl Alias {
    /// The view `view` of `tensor` at `offset`.
    pub(crate) fn new(
        (tensor, number): (Arc<Tensor>, u64),
        view: View,
        (offset, length): (u64, u64),
        traffic: Arc<Counted>,
    ) -> Self {
        let info = ViewInfo {
            tensor: tensor.info.name.clone(),
            offset,
            length,
            elements: tensor.info.elements,
            bits: view.bits(),
            scale_exp: view.scale_exp(),
            planes: view.mask().count(),
            view: view.to_string(),
        };
        Self { tensor, view, info, traffic, number }
    }

    /// Whether it shows all of `range` of the views window.
    pub(crate) fn shows(&self, range: &Range<u64>) -> bool {
        let info = &self.info;
        info.offset <= range.start && range.end <= info.offset + info.length
    }

    /// How its elements lie beside its tensor's.
    fn geometry(&self) -> Geometry {
        let format = self.view.format();
        Geometry {
            width: format.bits().into(),
            bits: self.view.bits().into(),
            block_elements: format.block_elements(),
        }
    }

    /// The pieces of its tensor that bytes `range` of the view need, a block each.
    pub(crate) fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = Piece> {
        self.geometry().pieces(range)
    }

    /// The bytes of block `block` of the tensor that belong to bytes `range` of the view:
    /// neighbouring ranges of the view have neighbouring ones, even where an element is cut.
    pub(crate) fn words_of(&self, block: u64, range: &Range<u64>) -> Range<usize> {
        self.geometry().words_of(block, range)
    }

    /// The base range that bytes `range` of the view depend on.
    pub(crate) fn base_under(&self, range: Range<u64>) -> Option<Range<u64>> {
        let mut blocks = self.pieces(range).map(|piece| piece.block);
        let first = blocks.next()?;
        let last = blocks.last().unwrap_or(first);
        let at = |block: u64| self.tensor.info.dpa + block * BLOCK_BYTES as u64;
        Some(at(first)..at(last + 1))
    }

    /// The range of the views window that shows any of `base`.
    pub(crate) fn over(&self, base: &Range<u64>) -> Option<Range<u64>> {
        let tensor = &self.tensor.info;
        let start = base.start.max(tensor.dpa).checked_sub(tensor.dpa)?;
        let end = base.end.min(tensor.dpa + tensor.length).checked_sub(tensor.dpa)?;
        let shown = self.geometry().over(start..end, self.info.length)?;
        Some(self.info.offset + shown.start..self.info.offset + shown.end)
    }
}
