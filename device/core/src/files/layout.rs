//! What a file shows at each of its bytes: as it was loaded, or at another precision.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::expand::{self, Converted, Expanded, ExpandedIntegers, Matrices, Together};
use super::manifest::{Content, FileEntry, Literals, Model};
use super::packed::Packed;
use super::shown::Shown;
use super::woven::Woven;
use super::{FilesError, Precision, config};
use crate::device::{Device, DeviceError, TensorView};
use crate::model::ReadAt;
use crate::model::checkpoint::{self, Checkpoint};
use crate::model::{FileKind, ModelError, ModelTensor, Scheme, scaled};
use lamina_codec::format::Format;
use lamina_codec::view::{Kind, View};

/// A file, ready to be read.
pub struct FileLayout {
    bytes: u64,
    /// By place, without gaps.
    segments: Vec<Segment>,
    /// Tensors that are shown at the precision that was asked for, and those that are not.
    given: usize,
    kept: usize,
}

/// What was read of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Bytes given.
    pub bytes: u64,
    /// Stored bytes fetched for that.
    pub stored: u64,
}

struct Segment {
    start: u64,
    length: u64,
    shows: Shows,
}

#[derive(Clone)]
pub(super) enum Shows {
    /// These bytes, from there on.
    Bytes(Arc<[u8]>, usize),
    /// Zeros.
    Padding,
    /// What the manifest keeps, from there on.
    Literal(Arc<TensorView>, u64),
    /// A view of a tensor, from there on.
    View(Arc<TensorView>, u64),
    /// All of a block-scaled tensor, put together.
    Expanded(Arc<dyn Together>),
    /// All of a tensor that lies in strands.
    Woven(Arc<Woven>),
    /// All of a tensor that lies with one element in a byte.
    Packed(Arc<Packed>),
}

impl FileLayout {
    /// A file of a model as it was loaded.
    ///
    /// # Errors
    ///
    /// When a tensor of it is no more.
    pub fn new(device: &Device, model: &Model, file: &FileEntry) -> Result<Self, FilesError> {
        let mut layout = Self { bytes: 0, segments: Vec::new(), given: 0, kept: 0 };
        for extent in &file.extents {
            let shows = match &extent.of {
                Content::Literal(at) => match &model.literals {
                    Literals::Tensor(view, begin) => {
                        Shows::Literal(Arc::clone(view), begin.saturating_add(*at))
                    }
                    Literals::Tables(_, bytes) => {
                        let end = at.checked_add(extent.length).filter(|end| *end <= bytes.len() as u64);
                        let wrong = || model.manifest.wrong(format!("{} has parts that it lacks", file.path));
                        end.ok_or_else(wrong)?;
                        Shows::Bytes(Arc::clone(bytes), usize::try_from(*at).unwrap_or(usize::MAX))
                    }
                },
                Content::Tensor(name) => Shows::View(Arc::new(device.view_of(name, "full")?), 0),
                Content::Sixes(name) => {
                    let packed = Packed::new(device.view_of(name, "full")?, extent.length);
                    let wrong = || format!("{name} has not the elements of {} bytes", extent.length);
                    Shows::Packed(Arc::new(packed.ok_or_else(|| model.manifest.wrong(wrong()))?))
                }
                Content::Woven(strands) => {
                    let woven = Woven::new(device, strands, extent.length)?;
                    Shows::Woven(Arc::new(woven.map_err(|why| model.manifest.wrong(why))?))
                }
            };
            layout.push(extent.length, shows);
        }
        layout.kept = file.extents.iter().filter(|extent| !matches!(extent.of, Content::Literal(_))).count();
        if layout.bytes == file.bytes {
            Ok(layout)
        } else {
            let why = format!("the parts of {} have {} bytes, not {}", file.path, layout.bytes, file.bytes);
            Err(FilesError::Manifest { name: model.manifest.name.clone(), why })
        }
    }

    /// The same file at another precision. Readers of it share the matrices that are held.
    ///
    /// # Errors
    ///
    /// [`FilesError::NothingGiven`] if no tensor of it can be shown so.
    pub fn at(
        device: &Device,
        model: &Model,
        file: &FileEntry,
        precision: &Precision,
        matrices: &Arc<Matrices>,
    ) -> Result<Self, FilesError> {
        let nothing = |first: Option<&ModelTensor>| FilesError::NothingGiven {
            file: file.path.clone(),
            precision: precision.to_string(),
            tensor: first.map(|tensor| (tensor.name.clone(), tensor.dtype.clone())),
        };
        let format = checkpoint::of_kind(file.kind).ok_or_else(|| nothing(None))?;
        let full = Self::new(device, model, file)?;
        let path = Path::new(&file.path);
        let header = format.read(path, &Stored { device, layout: &full }, file.bytes)?;
        let names = named(&header.tensors, file);
        let wholes = match precision {
            Precision::View(kind, spelling) if file.kind == FileKind::Safetensors => {
                let view = (*kind, spelling.as_str());
                expanded(device, model, &header.tensors, &names, view, matrices)?
            }
            _ => Wholes::new(),
        };
        let mut all = Vec::with_capacity(header.tensors.len());
        let mut tensors = Vec::with_capacity(header.tensors.len());
        for (number, (tensor, name)) in names.iter().enumerate() {
            let shown = match wholes.get(&number) {
                Some(Some((whole, expanded))) => {
                    all.push(whole.clone());
                    Shown::expanded(whole, expanded, precision.target())
                }
                // It is in another one.
                Some(None) => continue,
                None => {
                    all.push((*tensor).clone());
                    match full.whole_at(tensor.offset).filter(|_| tensor.length > 0) {
                        Some(Shows::Packed(packed)) => {
                            Shown::packed(device, model, tensor, packed, *name, precision)
                        }
                        Some(woven) => Shown::whole(tensor, woven),
                        None => Shown::new(device, model, format, tensor, *name, precision)?,
                    }
                }
            };
            tensors.push(shown);
        }
        let given = tensors.iter().filter(|tensor| tensor.is_given()).count();
        if given == 0 {
            return Err(nothing(header.tensors.first()));
        }
        let kept = tensors.iter().filter(|tensor| tensor.is_held()).count() - given;
        let mut layout = if tensors.iter().any(|tensor| tensor.target.is_some()) {
            let mut raw = vec![0; usize::try_from(header.data_start).unwrap_or(0)];
            full.read(device, 0, &mut raw)?;
            rewritten(format, path, &raw, &all, &tensors, &notes(&tensors, precision, kept))?
        } else {
            full.masked(&tensors)
        };
        (layout.given, layout.kept) = (given, kept);
        Ok(layout)
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Tensors that are shown at the precision that was asked for, and those that stay full.
    pub fn shown(&self) -> (usize, usize) {
        (self.given, self.kept)
    }

    /// Fills `out` from `offset` on, which does not pass the end.
    ///
    /// # Errors
    ///
    /// As [`Device::read_view_of`].
    pub fn read(&self, device: &Device, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let first = self.segments.partition_point(|segment| segment.start + segment.length <= offset);
        let end = offset.saturating_add(out.len() as u64);
        for segment in self.segments[first..].iter().take_while(|segment| segment.start < end) {
            let range = segment.start.max(offset)..(segment.start + segment.length).min(end);
            let inside = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
            let out = &mut out[inside(range.start - offset)..inside(range.end - offset)];
            let from = range.start - segment.start;
            match &segment.shows {
                Shows::Bytes(bytes, at) => out.copy_from_slice(&bytes[at + inside(from)..][..out.len()]),
                Shows::Padding => out.fill(0),
                Shows::Literal(view, at) | Shows::View(view, at) => {
                    device.read_view_of(view, at + from, out)?;
                }
                Shows::Expanded(expanded) => expanded.read(device, from, out)?,
                Shows::Woven(woven) => woven.read(device, from, out)?,
                Shows::Packed(packed) => packed.read(device, from, out)?,
            }
        }
        Ok(())
    }

    /// What was read of its tensors so far.
    pub fn traffic(&self) -> Read {
        self.views().fold(Read::default(), |sum, view| {
            let (bytes, stored) = view.read_and_fetched();
            Read { bytes: sum.bytes + bytes, stored: sum.stored + stored }
        })
    }

    /// Bytes that the store is charged for the tensors that it shows.
    pub fn charged(&self) -> u64 {
        self.views().map(|view| view.charged()).sum()
    }

    /// Bytes that are stored of what it shows: those that reading all of it once fetches.
    ///
    /// # Errors
    ///
    /// As [`Device::stored_of`].
    pub fn stored(&self, device: &Device) -> Result<u64, DeviceError> {
        let mut sum = 0;
        for segment in &self.segments {
            match &segment.shows {
                Shows::Literal(view, at) | Shows::View(view, at) => {
                    sum += device.stored_of(view, *at..at + segment.length)?;
                }
                Shows::Expanded(expanded) => {
                    for view in expanded.views().into_iter().flatten() {
                        sum += device.stored_of(view, 0..view.bytes())?;
                    }
                }
                Shows::Woven(woven) => {
                    for view in woven.views() {
                        sum += device.stored_of(view, 0..view.bytes())?;
                    }
                }
                Shows::Packed(packed) => {
                    sum += device.stored_of(packed.view(), 0..packed.view().bytes())?;
                }
                Shows::Bytes(..) | Shows::Padding => {}
            }
        }
        Ok(sum)
    }

    /// The views of its tensors; pieces of one that follow each other count once.
    fn views(&self) -> impl Iterator<Item = &Arc<TensorView>> {
        let mut before: Option<&Arc<TensorView>> = None;
        self.segments.iter().flat_map(move |segment| match &segment.shows {
            Shows::View(view, _) if !before.is_some_and(|before| Arc::ptr_eq(before, view)) => {
                before = Some(view);
                vec![view]
            }
            Shows::Expanded(expanded) => expanded.views().into_iter().flatten().collect(),
            Shows::Woven(woven) => woven.views().collect(),
            Shows::Packed(packed) => vec![packed.view()],
            _ => Vec::new(),
        })
    }

    /// What lies otherwise on the device than in the file, if that begins at `start`.
    fn whole_at(&self, start: u64) -> Option<&Shows> {
        let found = self.segments.binary_search_by_key(&start, |segment| segment.start).ok()?;
        let shows = &self.segments[found].shows;
        matches!(shows, Shows::Woven(_) | Shows::Packed(_)).then_some(shows)
    }

    fn push(&mut self, length: u64, shows: Shows) {
        if length > 0 {
            self.segments.push(Segment { start: self.bytes, length, shows });
            self.bytes = self.bytes.saturating_add(length);
        }
    }

    /// The same with tensors that have the same dtype and size.
    fn masked(self, tensors: &[Shown<'_>]) -> Self {
        let mut layout = Self { bytes: 0, segments: Vec::new(), given: 0, kept: 0 };
        let mut tensors = tensors.iter().filter(|tensor| tensor.is_held());
        let mut next = tensors.next();
        for segment in self.segments {
            match next {
                Some(shown) if shown.tensor.offset == segment.start => {
                    layout.push_tensor(shown);
                    next = tensors.next();
                }
                _ => layout.push(segment.length, segment.shows),
            }
        }
        layout
    }

    fn push_tensor(&mut self, shown: &Shown<'_>) {
        for (length, shows) in &shown.parts {
            self.push(*length, shows.clone());
        }
    }
}

/// The tensors of a header, each with its name on the device; one without elements has none.
fn named<'a>(tensors: &'a [ModelTensor], file: &'a FileEntry) -> Vec<(&'a ModelTensor, Option<&'a str>)> {
    let mut at = 0_u64;
    let begins: BTreeMap<u64, &str> = file
        .extents
        .iter()
        .filter_map(|extent| {
            let begin = at;
            at = at.saturating_add(extent.length);
            match &extent.of {
                Content::Tensor(name) | Content::Sixes(name) => Some((begin, name.as_str())),
                Content::Literal(_) | Content::Woven(_) => None,
            }
        })
        .collect();
    let name = |tensor: &ModelTensor| begins.get(&tensor.offset).copied().filter(|_| tensor.length > 0);
    tensors.iter().map(|tensor| (tensor, name(tensor))).collect()
}

/// Tensors that are parts of block-scaled ones, by number: the one whose elements it is, put
/// together, or nothing.
type Wholes = BTreeMap<usize, Option<(ModelTensor, Arc<dyn Together>)>>;

/// The block-scaled tensors that can be shown put together in a view, whose kind and spelling these
/// are.
fn expanded(
    device: &Device,
    model: &Model,
    tensors: &[ModelTensor],
    names: &[(&ModelTensor, Option<&str>)],
    (kind, spelling): (Kind, &str),
    matrices: &Arc<Matrices>,
) -> Result<Wholes, FilesError> {
    let mut wholes = Wholes::new();
    let Kind::Converted { target, .. } = kind else { return Ok(wholes) };
    let of_gptq = LazyCell::new(|| config::more_zeros(device, model));
    for found in scaled::find(tensors).0 {
        let Some(whole) = found.whole.as_ref().filter(|_| expand::expands(kind, found.scheme)) else {
            continue;
        };
        let elements = &tensors[found.elements];
        let format = elements.element_format();
        let name = |part: usize| names[part].1;
        let parts = [name(found.elements), name(found.scales), found.third.and_then(name)];
        let expanded: Result<Arc<dyn Together>, String> = match found.scheme {
            Scheme::Gptq | Scheme::Awq => {
                let parts = [parts[0], parts[1], parts[2], found.fourth.and_then(name)];
                let scale = tensors[found.scales].format.parse().unwrap_or(Format::Opaque);
                let more = if found.scheme == Scheme::Gptq { *of_gptq } else { 0 };
                ExpandedIntegers::new(device, found.scheme, whole, (scale, more), parts, matrices)?
                    .map(|integers| Arc::new(integers) as _)
            }
            _ => Expanded::new(device, &found, whole, format, parts, matrices)?
                .map(|expanded| Arc::new(expanded) as _),
        };
        // The whole as a tensor of bf16, which is what is converted further, if anything is.
        let (name, shape) = (whole.name.clone(), whole.shape.clone());
        let shown = expanded.and_then(|expanded| {
            let (dtype, length) = ("BF16".to_owned(), expanded.bytes());
            let whole = ModelTensor { name, dtype, shape, format: "bf16", length, ..elements.clone() };
            if target == Format::Bf16 {
                return Ok((whole, expanded));
            }
            let view = View::parse(Format::Bf16, spelling).map_err(|why| format!("{}: {why}", whole.name))?;
            Ok((whole, Arc::new(Converted::new(expanded, view)) as _))
        });
        match shown {
            Ok(shown) => {
                wholes.extend(found.parts().map(|part| (part, None)));
                wholes.insert(found.elements, Some(shown));
            }
            Err(why) => tracing::warn!("{why}: it stays in its parts"),
        }
    }
    Ok(wholes)
}

/// What a header has a place to say about the precision.
fn notes(tensors: &[Shown<'_>], precision: &Precision, kept: usize) -> Vec<(&'static str, String)> {
    let mut notes = vec![("lamina.view", precision.to_string())];
    if let Precision::View(Kind::Converted { scale, .. }, _) = precision
        && *scale != 0
    {
        notes.push(("lamina.scale_exp", scale.to_string()));
    }
    if kept > 0 {
        let all = tensors.iter().filter(|tensor| tensor.is_held()).count();
        notes.push(("lamina.kept", format!("{kept} of {all} tensors are full")));
    }
    notes
}

/// The file with a header of its own.
fn rewritten(
    format: &dyn Checkpoint,
    path: &Path,
    raw: &[u8],
    all: &[ModelTensor],
    tensors: &[Shown<'_>],
    notes: &[(&str, String)],
) -> Result<FileLayout, ModelError> {
    let targets: Vec<_> = tensors.iter().map(|tensor| tensor.target).collect();
    let rewritten = format.rewrite(path, raw, all, &targets, notes)?;
    let mut layout = FileLayout { bytes: 0, segments: Vec::new(), given: 0, kept: 0 };
    layout.push(rewritten.header.len() as u64, Shows::Bytes(rewritten.header.into(), 0));
    for (index, begin) in rewritten.order {
        layout.push(begin.saturating_sub(layout.bytes), Shows::Padding);
        layout.push_tensor(&tensors[index]);
    }
    layout.push(rewritten.bytes.saturating_sub(layout.bytes), Shows::Padding);
    Ok(layout)
}

/// A file that the device holds.
struct Stored<'a> {
    device: &'a Device,
    layout: &'a FileLayout,
}

impl ReadAt for Stored<'_> {
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > self.layout.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.layout.read(self.device, offset, out).map_err(io::Error::other)
    }
}
