//! What becomes of a checkpoint on a device that may hold tensors of its names already.
//!
//! | the device's tensors of these names | the checkpoint |
//! |---|---|
//! | none | is loaded |
//! | loaded from this file, not touched since | is there: nothing is read but its header |
//! | loaded from a file of this size and header | is read and compared with what was loaded: there if it is the same, wherever it lies now, else refused |
//! | loaded by an earlier version from this path | is compared with what they hold: there if it is the same, else refused |
//! | anything else | is refused |
//! | any, and `replace` | is loaded after they were removed |
//!
//! A checkpoint that has a tensor of one of the device's own names is refused first.
//!
//! * A checkpoint that is there is not loaded again, whatever was stored into its tensors since,
//!   and tensors of it that were removed stay so.
//! * What was not loaded whole was never served, and is nobody's: [`drop_unfinished`] removes it
//!   first. Tensors that are replaced become such at one stroke, so an interrupted replacement is
//!   gone through with by the next load.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use super::pieces::{Contents, each_piece, source_of, stamp_of, told_apart};
use super::{LoadError, LoadOptions, Loaded, Progress, Reported, full_name, load_from, places, spelled};
use crate::device::{Device, DeviceError, Source, SourceId};
use crate::model::ModelFile;
use crate::tensor::{TensorError, is_not_hidden};
use lamina_codec::BLOCK_BYTES;

/// What becomes of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is loaded, after some tensors were removed.
    Load {
        /// These.
        replacing: BTreeSet<String>,
        /// Where its tensors go: the DPA of each that has elements.
        places: Vec<u64>,
    },
    /// It is there.
    Keep {
        /// The source that its tensors name, and what is known of it now.
        source: Option<(SourceId, Source)>,
    },
    /// It is there, and its tensors are to say so.
    Adopt {
        /// Their names.
        tensors: BTreeSet<String>,
        /// Digest of what they hold.
        contents: String,
    },
}

/// What is known of a tensor in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// It was loaded from another checkpoint.
    Other {
        /// Its path then.
        path: String,
    },
    /// It was loaded from a file like this one, with other bytes.
    Changed {
        /// Its path then.
        path: String,
        /// Whether that is where this one is.
        here: bool,
    },
    /// An earlier version loaded it from this path, and it holds other bytes now.
    Old,
    /// It was made by hand, or nothing is known of it.
    Unknown,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other { path } => write!(f, "loaded from {path}, another checkpoint"),
            Self::Changed { here: true, .. } => f.write_str("loaded from there before the file changed"),
            Self::Changed { path, .. } => {
                write!(f, "loaded from {path}, whose header is the same and whose contents are not")
            }
            Self::Old => f.write_str(
                "loaded from there by an earlier version of Lamina, and holds other bytes: it or the file was changed since",
            ),
            Self::Unknown => f.write_str("loaded from no file that the image knows"),
        }
    }
}

/// The tensors of checkpoints that were not loaded whole are removed, with what they hold: the
/// paths of those checkpoints. One that others are coded against stays, and is logged.
///
/// # Errors
///
/// When the device cannot remove them.
pub fn drop_unfinished(device: &Device) -> Result<BTreeSet<String>, LoadError> {
    let mut paths = BTreeSet::new();
    for (tensor, source) in device.sources_of_tensors() {
        let Some(source) = source.and_then(|id| device.source(id)) else { continue };
        if source.contents.is_none() {
            match drop_tensor(device, &tensor) {
                Err(LoadError::Device {
                    source: DeviceError::Tensor(why @ TensorError::IsBase { .. }),
                    ..
                }) => {
                    tracing::error!("what was loaded of {} by half stays: {why}", source.path);
                }
                dropped => dropped?,
            }
            paths.insert(source.path);
        }
    }
    Ok(paths)
}

/// Removes a tensor and what it holds. Interrupted, the rest can be removed later.
pub(crate) fn drop_tensor(device: &Device, name: &str) -> Result<(), LoadError> {
    match drop_tensor_by(device, name, |dpa, length| device.discard(dpa, length)) {
        Ok(()) => Ok(()),
        Err(source) => Err(LoadError::Device { tensor: name.to_owned(), source }),
    }
}

/// The same, where `empty` discards whole blocks from a DPA on. A tensor that others are coded
/// against, by then too, is not emptied.
pub(crate) fn drop_tensor_by<E: From<DeviceError>>(
    device: &Device,
    name: &str,
    empty: impl FnOnce(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    if device.place_of(name).is_none() {
        return Ok(());
    }
    let whole_blocks = |dpa, length: u64| empty(dpa, length.next_multiple_of(BLOCK_BYTES as u64));
    device.drop_tensor(name, whole_blocks).map(drop)
}

/// That no tensor is coded against the one of this name.
pub(crate) fn is_no_base(device: &Device, name: &str) -> Result<(), LoadError> {
    device.is_no_base(name).map_err(|source| LoadError::Device { tensor: name.to_owned(), source })
}

/// Decides what becomes of checkpoints, in their order. Files that have to be compared are read,
/// and `progress` told of that. Changes nothing.
///
/// # Errors
///
/// When one of them may not be loaded, or cannot be.
pub fn decide(
    device: &Device,
    loads: &[(ModelFile, LoadOptions)],
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<Vec<Decision>, LoadError> {
    let mut named: BTreeMap<String, (&Path, String)> = BTreeMap::new();
    let mut decisions = Vec::with_capacity(loads.len());
    for (model, options) in loads {
        options.views.iter().try_for_each(|spelling| spelled(spelling))?;
        let path = source_of(model).path;
        for tensor in names(model, options) {
            is_not_hidden(&tensor).map_err(|why| LoadError::of(model, why.into()))?;
            if let Some((other, _)) = named.get(&tensor).filter(|(_, other)| *other != path) {
                return Err(LoadError::Twice { tensor, one: (*other).into(), other: model.path().into() });
            }
            named.insert(tensor, (model.path(), path.clone()));
        }
    }
    let mut seen = BTreeSet::new();
    let mut place = Placing::default();
    for (model, options) in loads {
        // The same file again.
        if !seen.insert((source_of(model).path, &options.partition)) {
            decisions.push(Decision::Keep { source: None });
            continue;
        }
        decisions.push(decide_one(device, model, options, &mut place, &progress)?);
    }
    Ok(decisions)
}

/// What checkpoints that were decided on make free, and take.
#[derive(Default)]
struct Placing {
    removed: BTreeSet<String>,
    taken: Vec<Range<u64>>,
}

fn decide_one(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    placing: &mut Placing,
    progress: &(dyn Fn(Progress<'_>) -> ControlFlow<()> + Sync),
) -> Result<Decision, LoadError> {
    let names = names(model, options);
    let there: BTreeMap<String, Option<SourceId>> =
        device.sources_of_tensors().into_iter().filter(|(name, _)| names.contains(name)).collect();
    if there.is_empty() || options.replace {
        let replacing: BTreeSet<_> = there.into_keys().collect();
        replacing.iter().try_for_each(|tensor| is_no_base(device, tensor))?;
        placing.removed.extend(replacing.iter().cloned());
        let places = places(device, model, options, &placing.removed, &mut placing.taken)?;
        return Ok(Decision::Load { replacing, places });
    }
    let reported = Reported::new(model, progress);
    let file = source_of(model);
    let held =
        |tensor: &str, held| LoadError::Held { tensor: tensor.into(), held, file: model.path().into() };
    let mut sources = BTreeMap::new();
    for (tensor, id) in &there {
        let source = id.and_then(|id| Some((id, device.source(id)?)));
        if let Some((id, source)) = source {
            if source.contents.is_none() || (source.bytes, &source.header) != (file.bytes, &file.header) {
                return Err(held(tensor, Held::Other { path: source.path }));
            }
            sources.insert(id, (tensor, source));
        } else if !device.was_loaded(&old_name(&file, options)) {
            return Err(held(tensor, Held::Unknown));
        }
    }
    let Some((id, (tensor, source))) = sources.pop_first() else {
        let contents =
            compare(device, model, options, &reported)?.map_err(|tensor| held(&tensor, Held::Old))?;
        return Ok(Decision::Adopt { tensors: there.into_keys().collect(), contents });
    };
    let other = there.iter().find(|(_, of)| **of != Some(id));
    if let Some((tensor, of)) = other {
        let other =
            of.and_then(|of| device.source(of)).map_or(Held::Unknown, |of| Held::Other { path: of.path });
        return Err(held(tensor, other));
    }
    let Some(now) = same(model, &source, &reported)? else {
        let here = source.path == file.path;
        return Err(held(tensor, Held::Changed { path: source.path, here }));
    };
    Ok(Decision::Keep { source: Some((id, now)) })
}

/// What is to be said from now on of the `source` that a checkpoint is; nothing if it is another.
/// It is read where its times do not tell, and `progress` is told of that.
///
/// # Errors
///
/// When it cannot be read.
pub(crate) fn same_source(
    model: &ModelFile,
    source: &Source,
    progress: &(dyn Fn(Progress<'_>) -> ControlFlow<()> + Sync),
) -> Result<Option<Source>, LoadError> {
    let file = source_of(model);
    if (source.bytes, &source.header) != (file.bytes, &file.header) {
        return Ok(None);
    }
    same(model, source, &Reported::new(model, progress))
}

/// The same of one whose size and header are the source's.
fn same(model: &ModelFile, source: &Source, reported: &Reported<'_>) -> Result<Option<Source>, LoadError> {
    let file = source_of(model);
    let stamp = stamp_of(model.opened());
    if stamp.is_some() && stamp == source.stamp {
        return Ok(Some(Source { path: file.path, ..source.clone() }));
    }
    let contents = Contents::of_file(model, reported)?;
    if Some(&contents) != source.contents.as_ref() {
        return Ok(None);
    }
    let now = model.now()?;
    let stamp = if told_apart(model.opened(), &now) { None } else { stamp_of(&now) };
    Ok(Some(Source { contents: Some(contents), stamp, ..file }))
}

/// Does what was [decided](decide), telling `progress` of what is loaded as
/// [`load_model`](super::load_model) does.
///
/// # Errors
///
/// As [`load_model`](super::load_model); what was loaded until then stays unfinished.
pub fn carry_out(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    decision: Decision,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<Loaded, LoadError> {
    let refused = |why: DeviceError| LoadError::of(model, why);
    let file = source_of(model);
    match decision {
        Decision::Keep { source: None } => {}
        Decision::Keep { source: Some((id, source)) } => {
            if device.source(id).as_ref() != Some(&source) {
                device.set_source(id, source).map_err(refused)?;
            }
        }
        Decision::Adopt { tensors, contents } => {
            let id = device.note_source(Source { contents: Some(contents), ..file });
            device.set_source_of(&tensors, id).map_err(refused)?;
        }
        Decision::Load { replacing, places } => {
            let id = device.note_source(file.clone());
            device.set_source_of(&replacing, id).map_err(refused)?;
            replacing.iter().try_for_each(|tensor| drop_tensor(device, tensor))?;
            let loaded = load_from(device, model, options, &places, id, progress, &mut Vec::new())?;
            device.set_loaded(&old_name(&file, options)).map_err(refused)?;
            return Ok(loaded);
        }
    }
    Ok(Loaded::default())
}

/// The names of its tensors on the device.
fn names(model: &ModelFile, options: &LoadOptions) -> BTreeSet<String> {
    let tensors = model.tensors().iter().filter(|tensor| tensor.length > 0);
    tensors.map(|tensor| full_name(&tensor.name, options)).collect()
}

/// What an earlier program noted a checkpoint by that it had loaded.
fn old_name(file: &Source, options: &LoadOptions) -> String {
    match &options.partition {
        Some(partition) => format!("{partition}:{}", file.path),
        None => file.path.clone(),
    }
}

/// The digest of a checkpoint's contents if the device has just these, or the name of the first
/// tensor that it does not have so.
fn compare(
    device: &Device,
    model: &ModelFile,
    options: &LoadOptions,
    reported: &Reported<'_>,
) -> Result<Result<String, String>, LoadError> {
    let there: BTreeMap<_, _> =
        device.tensors().into_iter().map(|tensor| (tensor.name, (tensor.dpa, tensor.length))).collect();
    let mut contents = Contents::new();
    for tensor in model.tensors().iter().filter(|tensor| tensor.length > 0) {
        let name = full_name(&tensor.name, options);
        let Some((dpa, _)) = there.get(&name).filter(|(_, length)| *length == tensor.length) else {
            return Ok(Err(name));
        };
        let same = each_piece(model, tensor, reported, |at, bytes| {
            let mut found = vec![0; bytes.len()];
            let read = device.read_base(dpa + at, &mut found);
            read.map_err(|source| LoadError::Device { tensor: name.clone(), source })?;
            Ok((found == bytes).then(|| Contents::of_piece(bytes)))
        })?;
        match same.into_iter().collect::<Option<Vec<_>>>() {
            Some(pieces) => contents.add(&pieces),
            None => return Ok(Err(name)),
        }
    }
    Ok(Ok(contents.digest()))
}

#[cfg(test)]
mod tests;
