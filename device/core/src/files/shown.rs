//! How each tensor of a file is shown at a precision.

use std::ops::Range;
use std::sync::Arc;

use super::expand::Together;
use super::layout::Shows;
use super::manifest::Model;
use super::packed::Packed;
use super::{FilesError, Precision};
use crate::device::Device;
use crate::model::ModelTensor;
use crate::model::checkpoint::Checkpoint;
use lamina_codec::format::Format;
use lamina_codec::view::Kind;

/// A tensor, and how it is shown.
pub(super) struct Shown<'a> {
    pub(super) tensor: &'a ModelTensor,
    /// The format that it is converted to.
    pub(super) target: Option<Format>,
    /// Its pieces: bytes in the file, and what they show.
    pub(super) parts: Vec<(u64, Shows)>,
    given: bool,
}

impl<'a> Shown<'a> {
    pub(super) fn new(
        device: &Device,
        model: &Model,
        format: &dyn Checkpoint,
        tensor: &'a ModelTensor,
        name: Option<&'a str>,
        precision: &Precision,
    ) -> Result<Self, FilesError> {
        let mut shown = Self { tensor, target: None, parts: Vec::new(), given: false };
        let Some(name) = name else { return Ok(shown) };
        let (rows, wanted) = wanted(model, tensor, precision);
        let full = Arc::new(device.view_of(name, "full")?);
        let row = tensor.length / rows;
        let whole_rows = row * rows == tensor.length;
        let mut at = 0;
        for (range, spelling) in wanted {
            // What the tensor's format cannot give stays full.
            let Ok(view) = device.view_of(name, spelling) else { continue };
            let whole = range == (0..rows);
            if let Kind::Converted { target, .. } = view.view().kind() {
                // A tensor that was loaded in another format than the file's has other elements.
                let same = view.format().name() == tensor.format;
                if whole && same && format.can_say(tensor, target) {
                    (shown.target, shown.given) = (Some(target), true);
                    shown.parts = vec![(view.bytes(), Shows::View(Arc::new(view), 0))];
                    return Ok(shown);
                }
                continue;
            }
            if view.bytes() != tensor.length || (!whole && !whole_rows) {
                continue;
            }
            let (start, end) = if whole { (0, tensor.length) } else { (range.start * row, range.end * row) };
            if start > at {
                shown.parts.push((start - at, Shows::View(Arc::clone(&full), at)));
            }
            shown.parts.push((end - start, Shows::View(Arc::new(view), start)));
            shown.given = true;
            at = end;
        }
        if at < tensor.length {
            shown.parts.push((tensor.length - at, Shows::View(full, at)));
        }
        Ok(shown)
    }

    /// A block-scaled tensor put together.
    pub(super) fn expanded(
        whole: &'a ModelTensor,
        expanded: &Arc<dyn Together>,
        target: Option<Format>,
    ) -> Self {
        let parts = vec![(expanded.bytes(), Shows::Expanded(Arc::clone(expanded)))];
        Self { tensor: whole, target, parts, given: true }
    }

    /// A tensor that lies otherwise on the device, all of it as it is.
    pub(super) fn whole(tensor: &'a ModelTensor, shows: &Shows) -> Self {
        let parts = vec![(tensor.length, shows.clone())];
        Self { tensor, target: None, parts, given: false }
    }

    /// A tensor that is packed where it is read, at a precision if that is one for all of it.
    pub(super) fn packed(
        device: &Device,
        model: &Model,
        tensor: &'a ModelTensor,
        full: &Arc<Packed>,
        name: Option<&str>,
        precision: &Precision,
    ) -> Self {
        let (rows, wanted) = wanted(model, tensor, precision);
        let masked = match (name, &wanted[..]) {
            (Some(name), [(range, spelling)]) if *range == (0..rows) => device.view_of(name, spelling).ok(),
            _ => None,
        };
        let masked = masked.and_then(|view| Packed::new(view, tensor.length));
        let mut shown = Self::whole(tensor, &Shows::Packed(Arc::clone(full)));
        if let Some(masked) = masked {
            (shown.parts, shown.given) = (vec![(tensor.length, Shows::Packed(Arc::new(masked)))], true);
        }
        shown
    }

    /// Whether it lies on the device: a tensor without elements does not.
    pub(super) fn is_held(&self) -> bool {
        !self.parts.is_empty()
    }

    pub(super) fn is_given(&self) -> bool {
        self.given
    }
}

/// The rows of a tensor, and the views of some of them that a precision asks for, in order.
fn wanted<'p>(
    model: &'p Model,
    tensor: &ModelTensor,
    precision: &'p Precision,
) -> (u64, Vec<(Range<u64>, &'p str)>) {
    let rows = tensor.shape.first().copied().unwrap_or(1).max(1);
    let wanted = match precision {
        Precision::View(_, spelling) => vec![(0..rows, spelling.as_str())],
        Precision::Map(map) => {
            let map = model.manifest.maps.get(map);
            map.map_or_else(Vec::new, |map| map.views_of(&tensor.name, &tensor.shape))
        }
    };
    (rows, wanted)
}
