//! The two windows of the device's memory, and the alias decoder (TRACE III-C, "precision-partitioned addressing").
//!
//! The rules:
//! * `base` is the capacity window: offset = DPA. `views` begins with the directory; views lie behind it at multiples of 2 MiB
//!   and never move while they exist.
//! * A [`Map`] is a snapshot: it is replaced, never changed, when a tensor or view comes or goes, and its directory bytes always
//!   agree with its tables.
//! * A tensor that is being made owns its range, but no directory names it. Its directory has room
//!   for it all the same, whatever is made meanwhile.
//! * Each part of a divided device has a directory, which counts from the part's own beginnings and changes only with what is in it.

mod arithmetic;

use std::{ops::Range, sync::Arc};

use lamina_abi::{DIRECTORY_BYTES, Directory, DirectoryError, TensorEntry, VIEW_ALIGN, ViewEntry};
use serde::Serialize;

pub(crate) use self::arithmetic::first_fit;
use self::arithmetic::{Geometry, Piece};
use crate::{
    counters::{Numbers, Traffic},
    division::Division,
    tensor::{Tensor, TensorError},
};
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
    pub(crate) traffic: Traffic,
    /// Where the image keeps its counters.
    pub(crate) numbers: Numbers,
}

/// Traffic, and where an image keeps its counters.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    pub(crate) traffic: Traffic,
    pub(crate) numbers: Numbers,
}

/// What lies where.
#[derive(Default)]
pub(crate) struct Map {
    /// By DPA.
    pub(crate) tensors: Vec<Arc<Tensor>>,
    /// By offset.
    pub(crate) aliases: Vec<Arc<Alias>>,
    /// By part.
    pub(crate) directories: Vec<DirectoryPages>,
}

/// The directory of one part.
#[derive(Clone, Default)]
pub(crate) struct DirectoryPages {
    pub(crate) bytes: Vec<u8>,
    pub(crate) generation: u64,
}

impl Map {
    /// The map of `tensors` and `aliases`; directories that change are one generation after those of `self`.
    pub(crate) fn successor(
        &self,
        mut tensors: Vec<Arc<Tensor>>,
        mut aliases: Vec<Arc<Alias>>,
        division: &Division,
    ) -> Result<Self, DirectoryError> {
        tensors.sort_by_key(|tensor| tensor.info.dpa);
        aliases.sort_by_key(|alias| alias.info.offset);
        let mut directories = Vec::with_capacity(division.parts.len());
        for (index, part) in division.parts.iter().enumerate() {
            let mut own: Vec<_> = tensors.iter().filter(|tensor| tensor.part == index).collect();
            let old = self.directories.get(index).cloned().unwrap_or_default();
            let of = |own: &[&Arc<Tensor>]| {
                let shown = aliases.iter().filter(|alias| alias.tensor.part == index);
                Directory {
                    generation: old.generation,
                    base_bytes: part.base.end - part.base.start,
                    views_bytes: part.views.end - part.views.start,
                    tensors: own.iter().map(|tensor| tensor_entry(tensor, division)).collect(),
                    views: shown.map(|alias| view_entry(alias, own, part.views.start)).collect(),
                }
            };
            let mut directory = of(&own);
            if own.iter().any(|tensor| !tensor.is_listed()) {
                lamina_abi::encode(&directory)?;
                own.retain(|tensor| tensor.is_listed());
                directory = of(&own);
            }
            if lamina_abi::encode(&directory)? == old.bytes {
                directories.push(old);
                continue;
            }
            directory.generation += 1;
            let bytes = lamina_abi::encode(&directory)?;
            directories.push(DirectoryPages { bytes, generation: directory.generation });
        }
        Ok(Self { tensors, aliases, directories })
    }

    /// The generation of each directory once all tensors that are being made are listed. An image
    /// keeps these, so that listing one needs no save.
    pub(crate) fn generations_to_come(&self) -> Vec<u64> {
        let making =
            |part| self.tensors.iter().filter(|tensor| tensor.part == part && !tensor.is_listed()).count();
        let directories = self.directories.iter().enumerate();
        directories.map(|(part, directory)| directory.generation + making(part) as u64).collect()
    }

    /// The tensor that owns the block at `dpa`.
    pub(crate) fn tensor_at(&self, dpa: u64) -> Option<&Arc<Tensor>> {
        let after = self.tensors.partition_point(|tensor| tensor.info.dpa <= dpa);
        self.tensors[..after].last().filter(|tensor| dpa < tensor.end())
    }

    /// The end of what the owner of the block at `dpa` has from there on, or of what nobody has.
    pub(crate) fn owner_end(&self, dpa: u64) -> u64 {
        let after = self.tensors.partition_point(|tensor| tensor.info.dpa <= dpa);
        let next = self.tensors.get(after).map_or(u64::MAX, |tensor| tensor.info.dpa);
        self.tensor_at(dpa).map_or(next, |tensor| next.min(tensor.end()))
    }

    /// The tensor of this name.
    pub(crate) fn tensor(&self, name: &str) -> Result<&Arc<Tensor>, TensorError> {
        self.tensors
            .iter()
            .find(|tensor| tensor.info.name == name)
            .ok_or_else(|| TensorError::Unknown { name: name.to_owned() })
    }

    /// The tensor of this name that people are told of.
    pub(crate) fn listed(&self, name: &str) -> Result<&Arc<Tensor>, TensorError> {
        self.tensor(name)
            .ok()
            .filter(|tensor| tensor.is_listed())
            .ok_or_else(|| TensorError::Unknown { name: name.to_owned() })
    }

    /// The aliases that `range` of the views window touches.
    pub(crate) fn aliases_in(&self, range: &Range<u64>) -> impl Iterator<Item = &Arc<Alias>> {
        let first =
            self.aliases.partition_point(|alias| alias.info.offset + alias.info.length <= range.start);
        let end = range.end;
        self.aliases[first..].iter().take_while(move |alias| alias.info.offset < end)
    }

    /// The first place in `part` of the base window where `length` bytes fit, or the largest gap.
    pub(crate) fn free_base(&self, length: u64, part: &Range<u64>) -> Result<u64, u64> {
        let inside = self.tensors.iter().filter(|tensor| part.contains(&tensor.info.dpa));
        let taken = inside.map(|tensor| tensor.info.dpa..tensor.end());
        first_fit(part.start, part.end, BLOCK_BYTES as u64, length, taken)
    }

    /// The first place in `part` of the views window where `length` bytes fit behind the directory, or the largest gap.
    pub(crate) fn free_view(&self, length: u64, part: &Range<u64>) -> Result<u64, u64> {
        let inside = self.aliases.iter().filter(|alias| part.contains(&alias.info.offset));
        let taken = inside.map(|alias| alias.info.offset..alias.info.offset + alias.info.length);
        first_fit(part.start + DIRECTORY_BYTES, part.end, VIEW_ALIGN, length, taken)
    }
}

impl Alias {
    /// The view `view` of `tensor` at `offset`.
    pub(crate) fn new(tensor: Arc<Tensor>, view: View, offset: u64, length: u64, traffic: Counted) -> Self {
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
        let Counted { traffic, numbers } = traffic;
        Self { tensor, view, info, traffic, numbers }
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

    /// The bytes of block `block` of the tensor that belong to bytes `range` of the view: neighbouring ranges of the view have neighbouring ones, even where an
    /// element is cut.
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

fn tensor_entry(tensor: &Tensor, division: &Division) -> TensorEntry {
    let info = &tensor.info;
    TensorEntry {
        name: division.own_name(&info.name).to_owned(),
        shape: info.shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x"),
        format: info.format.name().to_owned(),
        dpa: info.dpa - division.parts[tensor.part].base.start,
        length: info.length,
        elements: info.elements,
        layout: info.layout.into(),
    }
}

/// The entry of `alias` in the directory of the part whose tensors are `tensors` and whose views begin at `start`.
fn view_entry(alias: &Alias, tensors: &[&Arc<Tensor>], start: u64) -> ViewEntry {
    // Tensors of no length share their DPA with the next one: from the first at this DPA on, the one that is meant.
    let first = tensors.partition_point(|tensor| tensor.info.dpa < alias.tensor.info.dpa);
    let index =
        first + tensors[first..].iter().take_while(|tensor| !Arc::ptr_eq(tensor, &alias.tensor)).count();
    ViewEntry {
        tensor: u32::try_from(index).expect("far fewer fit a directory"),
        spelling: alias.info.view.clone(),
        offset: alias.info.offset - start,
        length: alias.info.length,
        elements: alias.info.elements,
        bits: alias.info.bits,
        scale_exp: alias.info.scale_exp,
    }
}
