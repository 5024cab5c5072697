//! Loading a checkpoint into the device: a tensor for each of the file's, its bytes, then the views
//! asked for.
//!
//! The rules:
//!
//! * Tensors are placed by the device, at the first place they fit. One that has no elements is
//!   skipped by name.
//! * Bytes are copied in pieces of [`PIECE`], so that a file larger than memory can be loaded. A
//!   thread reads ahead, and each piece is coded on all cores. Pieces are stored in order: the same
//!   checkpoint is stored in the same places each time.
//! * Views are made after the bytes are in. A view that a tensor's format cannot give is skipped
//!   and reported; one that no format at all can give is a mistake and refused before anything is
//!   loaded.
//! * Which tensors are KV caches is said by [`KvRule`]s, the first that matches; see
//!   [`KvRule::by_name`].
//! * Each tensor names the checkpoint it is of, and the image says of that when it is there whole.
//!   What is to become of a checkpoint whose tensors the device has already, or has tensors of the
//!   names of, is [decided](decide) before anything changes.

mod decide;
mod heeded;
mod open;
mod pieces;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lamina_abi::VIEW_ALIGN;
use serde::Serialize;
use wildmatch::WildMatch;

pub use self::decide::{Decision, Held, carry_out, decide, drop_unfinished};
pub(crate) use self::decide::{drop_tensor, drop_tensor_by, is_no_base, same_source};
pub use self::heeded::{unheeded, unmatched};
pub use self::open::open;
pub(crate) use self::pieces::source_of;
use self::pieces::{Contents, stamp_of, store_each};
use crate::device::{Device, DeviceError, MAX_AT_ONCE, Places, Source, SourceId};
use crate::layout::Layout;
use crate::model::{ModelError, ModelFile, ModelTensor};
use crate::tensor::{Tensor, TensorError, TensorInfo, TensorSpec};
use crate::window::ViewInfo;
use lamina_codec::BLOCK_BYTES;
use lamina_codec::format::{Format, UnknownFormat};
use lamina_codec::kv::{self, KvError, KvLayout};
use lamina_codec::view::{View, ViewError};

/// Bytes that a thread copies at once, a multiple of the block. The digests of contents that images
/// keep are of such pieces.
pub const PIECE: u64 = 1 << 20;
/// Tokens of a KV window if a rule does not say (n in TRACE eq. 3).
pub const KV_WINDOW: u32 = kv::WINDOW;

/// What to load a checkpoint as.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Spellings of the views to make of every tensor that can give them.
    pub views: Vec<String>,
    /// Which tensors are KV caches; the first rule that matches counts.
    pub kv: Vec<KvRule>,
    /// Formats of tensors by name pattern, in place of the file's; the first that matches counts.
    pub formats: Vec<FormatRule>,
    /// The partition that the tensors go to; on a device that is not divided, none.
    pub partition: Option<String>,
    /// What the tensors' names begin with besides, for example `model/`.
    pub within: Option<String>,
    /// What tensors are stored as differences to, by their names on the device.
    pub bases: BTreeMap<String, String>,
    /// Whether tensors of the checkpoint's names are removed, with what they hold, and what is
    /// stored outside tensors may be written over.
    pub replace: bool,
}

/// A rule by which tensors are KV caches.
#[derive(Clone, Debug, PartialEq)]
pub struct KvRule {
    pattern: WildMatch,
    /// Their layout; rows as long as the tensor's last dimension if not given.
    layout: Option<KvLayout>,
}

/// A rule by which tensors have another format than the file says, for example packed 4-bit
/// integers in a `U8` tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct FormatRule {
    pattern: WildMatch,
    format: Format,
}

/// A rule that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// Not of the form.
    #[error(
        "{rule:?} is no rule: write PATTERN=CHANNELS or PATTERN=CHANNELS,WINDOW, for example '*_cache=1024,128'"
    )]
    Kv {
        /// What was given.
        rule: String,
    },
    /// The pattern is followed by no layout.
    #[error("PATTERN=CHANNELS: {0}")]
    KvLayout(#[from] KvError),
    /// Not of the form.
    #[error("{rule:?} is no rule: write PATTERN=FORMAT, for example '*.qweight=int4'")]
    Format {
        /// What was given.
        rule: String,
    },
    /// No such format.
    #[error(transparent)]
    UnknownFormat(#[from] UnknownFormat),
}

impl KvRule {
    /// The rules that hold without being asked for: two-dimensional tensors whose name ends in `.k`
    /// or `.v`.
    pub fn by_name() -> [Self; 2] {
        ["*.k", "*.v"].map(|pattern| Self { pattern: WildMatch::new(pattern), layout: None })
    }

    fn layout(&self, tensor: &ModelTensor) -> Option<Layout> {
        if !self.pattern.matches(&tensor.name) {
            return None;
        }
        let layout = match (self.layout, tensor.shape.as_slice()) {
            (Some(layout), _) => layout,
            (None, &[_, channels]) => KvLayout::rows(u32::try_from(channels).ok()?, KV_WINDOW),
            (None, _) => return None,
        };
        Some(Layout::Kv(layout))
    }
}

impl FromStr for KvRule {
    type Err = RuleError;

    /// `PATTERN=LAYOUT`, see [`KvLayout`]; `*` in the pattern stands for anything.
    fn from_str(rule: &str) -> Result<Self, RuleError> {
        // A name may have a `=`, and so may a layout, behind a comma.
        let named = [",lossy=", ",stride="].into_iter();
        let (name, more) = named.fold((rule, ""), |(name, more), part| match name.rfind(part) {
            Some(at) => (&name[..at], &rule[at..]),
            None => (name, more),
        });
        let split = name.rsplit_once('=').filter(|(pattern, _)| !pattern.is_empty());
        let (pattern, layout) = split.ok_or_else(|| RuleError::Kv { rule: rule.to_owned() })?;
        let layout = format!("{layout}{more}");
        Ok(Self { pattern: WildMatch::new(pattern), layout: Some(layout.parse()?) })
    }
}

impl FromStr for FormatRule {
    type Err = RuleError;

    /// `PATTERN=FORMAT`; `*` in the pattern stands for anything.
    fn from_str(rule: &str) -> Result<Self, RuleError> {
        match rule.rsplit_once('=') {
            Some((pattern, format)) if !pattern.is_empty() => {
                Ok(Self { pattern: WildMatch::new(pattern), format: format.parse()? })
            }
            _ => Err(RuleError::Format { rule: rule.to_owned() }),
        }
    }
}

/// What came of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Loaded {
    /// The tensors made, in the file's order.
    pub tensors: Vec<TensorInfo>,
    /// The views made.
    pub views: Vec<ViewInfo>,
    /// What was not made.
    pub skipped: Vec<Skipped>,
}

/// A view that was asked for and not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The tensor.
    pub tensor: String,
    /// The view's spelling.
    pub view: String,
    /// Why not.
    pub why: String,
}

/// Where loading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The tensor that is being loaded.
    pub tensor: &'a str,
    /// Bytes loaded so far, of all tensors.
    pub bytes: u64,
    /// Bytes of all tensors.
    pub total: u64,
}

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device refuses a tensor, its bytes or a view.
    #[error("cannot load {tensor}: {source}")]
    Device {
        /// The tensor.
        tensor: String,
        /// Why.
        source: DeviceError,
    },
    /// No format gives the view.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The caller's progress function said so.
    #[error("loading was stopped")]
    Stopped,
    /// The device has a tensor of the name that is not the checkpoint's.
    #[error(
        "{} and the image both have a tensor {tensor}; the image's was {held}. Nothing was changed: --replace removes the \
         image's tensors of the file's names, with all they hold, and loads the file; or leave out the file, or name another \
         --image",
        file.display()
    )]
    Held {
        /// The tensor.
        tensor: String,
        /// What is known of the one that is there.
        held: Held,
        /// The checkpoint.
        file: PathBuf,
    },
    /// Two checkpoints have tensors of one name.
    #[error("{} and {} both have a tensor {tensor}; load one of them", one.display(), other.display())]
    Twice {
        /// The tensor.
        tensor: String,
        /// A checkpoint.
        one: PathBuf,
        /// Another one.
        other: PathBuf,
    },
    /// Somebody changed a tensor while its checkpoint was loaded.
    #[error("{tensor} was removed or resized while it was loaded")]
    Gone {
        /// The tensor.
        tensor: String,
    },
    /// The file was written while it was read.
    #[error("{} changed while it was loaded; load it again when it is whole", file.display())]
    Changing {
        /// The checkpoint.
        file: PathBuf,
    },
    /// The image is not on the disk.
    #[error("what was loaded from {} cannot be brought to the image's disk: {source}", file.display())]
    Sync {
        /// The checkpoint.
        file: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It fits only where something is stored.
    #[error(
        "{} fits only where something is stored that is no tensor's (there is room for it from DPA {dpa:#x} on). Nothing was \
         changed: discard what is not needed (`lamina discard`), or write over it with --replace",
        file.display()
    )]
    NoEmptyPlace {
        /// The checkpoint.
        file: PathBuf,
        /// The first place where it fits.
        dpa: u64,
    },
}

/// Bytes of the base window that the tensors of `model` take in a fresh device.
pub fn base_needed(model: &ModelFile) -> u64 {
    model
        .tensors()
        .iter()
        .fold(0, |sum, tensor| sum.saturating_add(tensor.length.next_multiple_of(BLOCK_BYTES as u64)))
}

/// Bytes of the views window that the views of `model` take in a fresh device, the directory not
/// counted.
pub fn views_needed(model: &ModelFile, options: &LoadOptions) -> u64 {
    let bytes = model.tensors().iter().map(|tensor| spec(tensor, options)).flat_map(|spec| {
        options.views.iter().filter_map(move |spelling| {
            let bytes = View::parse(spec.format, spelling).ok()?.bytes_for(spec.elements?)?;
            bytes.checked_next_multiple_of(VIEW_ALIGN)
        })
    });
    bytes.fold(0, u64::saturating_add)
}

/// Loads all tensors of `model`, telling `progress` after each piece, which may stop it.
///
/// # Errors
///
/// When a view's spelling is none, the file cannot be read, or the device has no room; what was
/// loaded until then stays.
pub fn load_model(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<Loaded, LoadError> {
    for spelling in &options.views {
        spelled(spelling)?;
    }
    let places = places(device, model, options, &BTreeSet::new(), &mut Vec::new())?;
    let source = device.note_source(source_of(model));
    load_from(device, model, options, &places, source, progress, &mut Vec::new())
}

/// As [`load_model`], whose tensors name `source`; those that were made are added to `all_made`.
pub(crate) fn load_from(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    places: &[u64],
    source: SourceId,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
    all_made: &mut Vec<Arc<Tensor>>,
) -> Result<Loaded, LoadError> {
    for remark in model.remarks() {
        tracing::warn!("{}: {remark}", model.path().display());
    }
    let reported = Reported::new(model, &progress);
    let mut contents = Contents::new();
    let mut loaded = Loaded::default();
    let first = all_made.len();
    create(device, model, options, places, source, all_made)?;
    let made = &all_made[first..];
    let mut rest = made.iter().peekable();
    // By the tensor's number, which those without elements have too.
    let by_number: Vec<_> =
        model.tensors().iter().map(|tensor| rest.next_if(|_| tensor.length > 0)).collect();
    contents.add(&store_each(model, &reported, |number, at, bytes| {
        let (tensor, made) = (&model.tensors()[number], by_number[number].expect("it has elements"));
        let mut stored = device.write_tensor(made, at, bytes);
        if at + bytes.len() as u64 == tensor.length {
            stored = stored.and_then(|whole| device.flush(made.info.dpa, tensor.length).map(|()| whole));
        }
        match stored {
            Ok(true) => Ok(()),
            Ok(false) => Err(LoadError::Gone { tensor: made.info.name.clone() }),
            Err(source) => Err(LoadError::Device { tensor: tensor.name.clone(), source }),
        }
    })?);
    let mut infos = made.iter().map(|tensor| tensor.told());
    for tensor in model.tensors() {
        if tensor.length == 0 {
            let skipped = |view: &String| skipped(tensor, view, "the tensor has no elements".to_owned());
            loaded.skipped.extend(options.views.iter().map(skipped));
            continue;
        }
        let failed = |source| LoadError::Device { tensor: tensor.name.clone(), source };
        let info = infos.next().expect("one for each that has elements");
        for spelling in &options.views {
            if let Err(why) = View::parse(info.format, spelling) {
                loaded.skipped.push(skipped(tensor, spelling, why.to_string()));
                continue;
            }
            let view = device.create_view(&info.name, spelling).map_err(failed)?;
            // Two spellings may name one view.
            if !loaded.views.contains(&view) {
                loaded.views.push(view);
            }
        }
        loaded.tensors.push(info);
    }
    let now = model.now()?;
    if pieces::told_apart(model.opened(), &now) {
        return Err(LoadError::Changing { file: model.path().into() });
    }
    if let Some(gone) = all_made.iter().find(|tensor| !device.has_tensor(tensor)) {
        return Err(LoadError::Gone { tensor: gone.info.name.clone() });
    }
    // What a crash of the host leaves is not whole either.
    device.sync().map_err(|source| LoadError::Sync { file: model.path().into(), source })?;
    let whole = Source { contents: Some(contents.digest()), stamp: stamp_of(&now), ..source_of(model) };
    device.set_source(source, whole).map_err(|why| LoadError::of(model, why))?;
    Ok(loaded)
}

/// Makes the tensors of `model` that have elements at their places, as many at once as can be, and
/// adds them to `made`.
fn create(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    places: &[u64],
    source: SourceId,
    made: &mut Vec<Arc<Tensor>>,
) -> Result<(), LoadError> {
    let with_elements = model.tensors().iter().filter(|tensor| tensor.length > 0);
    let specs = with_elements.zip(places);
    let specs: Vec<_> = specs
        .map(|(tensor, dpa)| TensorSpec { dpa: Some(*dpa), ..held_as(device, spec(tensor, options)) })
        .collect();
    for specs in specs.chunks(MAX_AT_ONCE) {
        let some = device.create_tensors_from(specs.to_vec(), source);
        made.extend(some.map_err(|why| LoadError::of(model, why))?);
    }
    Ok(())
}

/// A tensor as the device can have it: bytes, where its image has no number for the format.
fn held_as(device: &Device, spec: TensorSpec) -> TensorSpec {
    if device.holds(spec.format) {
        return spec;
    }
    let why = TensorError::Version { name: spec.name.clone(), format: spec.format };
    tracing::warn!("{why}; kept as bytes");
    TensorSpec { elements: None, shape: Vec::new(), format: Format::Opaque, ..spec }
}

impl LoadError {
    /// The device refuses what is about all of a checkpoint.
    fn of(model: &ModelFile, source: DeviceError) -> Self {
        Self::Device { tensor: model.path().display().to_string(), source }
    }
}

/// Who is told how far reading a checkpoint is.
struct Reported<'a> {
    progress: &'a (dyn Fn(Progress<'_>) -> ControlFlow<()> + Sync),
    bytes: AtomicU64,
    total: u64,
}

impl<'a> Reported<'a> {
    fn new(model: &ModelFile, progress: &'a (dyn Fn(Progress<'_>) -> ControlFlow<()> + Sync)) -> Self {
        let total = model.tensors().iter().map(|tensor| tensor.length).sum();
        Self { progress, bytes: AtomicU64::new(0), total }
    }

    /// So many more bytes of a tensor are read.
    fn read(&self, tensor: &str, bytes: u64) -> Result<(), LoadError> {
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let reported = (self.progress)(Progress { tensor, bytes, total: self.total });
        if reported.is_break() { Err(LoadError::Stopped) } else { Ok(()) }
    }
}

/// Where a checkpoint's tensors are to lie once `removed` are gone: where nothing is stored and
/// which is not `taken`, unless what is stored may be written over. They are taken then.
fn places(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    removed: &BTreeSet<String>,
    taken: &mut Vec<Range<u64>>,
) -> Result<Vec<u64>, LoadError> {
    let wanted = model.tensors().iter().filter(|tensor| tensor.length > 0);
    let wanted: Vec<_> = wanted.map(|tensor| (full_name(&tensor.name, options), tensor.length)).collect();
    let places = device.places_for(&wanted, removed, taken).map_err(|why| LoadError::of(model, why))?;
    let places = match places {
        Places::Stored(places) if !options.replace => {
            let (file, dpa) = (model.path().into(), places.first().copied().unwrap_or(0));
            return Err(LoadError::NoEmptyPlace { file, dpa });
        }
        Places::Empty(places) | Places::Stored(places) => places,
    };
    let ends = wanted.iter().map(|(_, length)| length.next_multiple_of(BLOCK_BYTES as u64));
    taken.extend(places.iter().zip(ends).map(|(dpa, length)| *dpa..dpa + length));
    Ok(places)
}

fn skipped(tensor: &ModelTensor, view: &str, why: String) -> Skipped {
    Skipped { tensor: tensor.name.clone(), view: view.to_owned(), why }
}

/// Refuses a spelling that no format gives.
fn spelled(spelling: &str) -> Result<(), ViewError> {
    let given = Format::ALL.into_iter().any(|format| View::parse(format, spelling).is_ok());
    // fp32 has the most planes, so its refusal says most.
    if given { Ok(()) } else { View::parse(Format::Fp32, spelling).map(drop) }
}

/// What a checkpoint's tensor is called on the device.
pub(crate) fn full_name(tensor: &str, options: &LoadOptions) -> String {
    let within = options.within.as_deref().unwrap_or_default();
    match &options.partition {
        Some(partition) => format!("{partition}/{within}{tensor}"),
        None => format!("{within}{tensor}"),
    }
}

pub(crate) fn spec(tensor: &ModelTensor, options: &LoadOptions) -> TensorSpec {
    let rule = options.formats.iter().find(|rule| rule.pattern.matches(&tensor.name));
    let format = match rule {
        Some(rule) => rule.format,
        None => tensor.format.parse().unwrap_or(Format::Opaque),
    };
    let layout = options.kv.iter().find_map(|rule| rule.layout(tensor)).unwrap_or_default();
    let elements = format.elements_in(tensor.length);
    // Under another format, or as bytes, the file's shape counts other elements than the device
    // does.
    let fits = tensor.shape.iter().try_fold(1_u64, |product, &n| product.checked_mul(n)) == Some(elements);
    let name = full_name(&tensor.name, options);
    let base = options.bases.get(&name).cloned();
    TensorSpec {
        name,
        dpa: None,
        length: tensor.length,
        elements: Some(elements),
        shape: if fits { tensor.shape.clone() } else { Vec::new() },
        format,
        layout,
        codec: None,
        base,
    }
}

#[cfg(test)]
pub(crate) mod tests;
