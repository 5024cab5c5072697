//! Checkpoints that were loaded as tensors of their own names, as models: what is in none of their
//! tensors lies with the device's tables, and nothing of it in the base window.
//!
//! * Such a model is there as long as all its tensors are, and name the source they were loaded
//!   from.
//! * What a header takes is bounded: a checkpoint with a longer one is tensors only.

use std::fmt::Write as _;
use std::sync::Arc;

use super::FilesError;
use super::load::free_id;
use super::manifest::{Content, Literals, Manifest, Model, decode, tensor_name};
use super::plan::{entry, is_bad};
use super::precision::spelled;
use crate::device::{Device, Source};
use crate::load::{LoadOptions, drop_tensor_by, full_name, is_no_base};
use crate::model::{ModelFile, sixes};
use crate::tensor::SourceId;

/// Bytes of a manifest as it is kept, at most: an eighth of what the tables have room for.
const MAX_KEPT: usize = 4 << 20;
/// Bytes of a manifest, at most.
const MAX_BYTES: usize = 64 << 20;
/// How the manifest is compressed.
const LEVEL: i32 = 3;

/// Keeps what `file` has besides its tensors, which were loaded as `options` say, so that it is
/// shown as the model `name`, or as `name-2` and so on where that is taken, loaded against the
/// model `base`. One that is kept already stays.
///
/// # Errors
///
/// When it cannot be read any more, has too much besides its tensors, or the device has no room.
pub fn keep_checkpoint(
    device: &Device,
    file: &ModelFile,
    options: &LoadOptions,
    name: &str,
    base: Option<&str>,
) -> Result<(), FilesError> {
    let of = |tensor: &str| device.sources_of_tensors().get(&full_name(tensor, options)).copied().flatten();
    let first = file.tensors().iter().find(|tensor| tensor.length > 0);
    let Some(id) = first.and_then(|tensor| of(&tensor.name)) else { return Ok(()) };
    if device.files().contains_key(&id) {
        return Ok(());
    }
    let file_name = file.path().file_name().map(|name| name.to_string_lossy().into_owned());
    let file_name = file_name.filter(|name| !is_bad(name)).unwrap_or_else(|| name.to_owned());
    if is_bad(name) {
        return Err(FilesError::Name { what: "model", name: name.to_owned() });
    }
    let held = held(device);
    let is_taken = |name: &String| {
        device.place_of(&tensor_name(name)).is_some() || held.iter().any(|model| model.manifest.name == *name)
    };
    let names = (2_u64..).map(|number| format!("{name}-{number}"));
    let name = std::iter::once(name.to_owned()).chain(names).find(|name| !is_taken(name)).unwrap_or_default();
    let mut literals = Vec::new();
    let within = full_name("", options);
    let files = vec![entry(&file_name, file, &within, &mut literals)?];
    let views = options.views.iter().filter(|view| spelled(view).is_ok()).cloned().collect();
    let (own, maps) = (free_id(device, &name), std::collections::BTreeMap::new());
    let manifest = Manifest { name, id: own, files, views, maps, base: base.map(str::to_owned) };
    let bytes = zstd::bulk::compress(&manifest.encode(&literals)?, LEVEL)
        .map_err(|why| manifest.wrong(why.to_string()))?;
    if bytes.len() > MAX_KEPT {
        let why = format!("its header takes {} bytes compressed, at most {MAX_KEPT} are kept", bytes.len());
        return Err(manifest.wrong(why));
    }
    Ok(device.set_file(id, text_of(&bytes))?)
}

/// The models that are kept so, whose tensors are all there.
pub(super) fn held(device: &Device) -> Vec<Model> {
    let files = device.files();
    if files.is_empty() {
        return Vec::new();
    }
    let sources = device.sources_of_tensors();
    let is_whole = |id: SourceId, manifest: &Manifest| {
        let extents = manifest.files.iter().flat_map(|file| &file.extents);
        let is_there = |name: &String, bytes: Option<u64>| {
            let length = device.place_of(name).map(|(_, length)| length);
            sources.get(name) == Some(&Some(id)) && length.is_some() && length == bytes
        };
        extents.into_iter().all(|extent| match &extent.of {
            Content::Tensor(name) => is_there(name, Some(extent.length)),
            Content::Sixes(name) => is_there(name, sixes::elements(extent.length)),
            Content::Literal(_) | Content::Woven(_) => true,
        })
    };
    let read = |(id, text): (SourceId, String)| match model_of(id, &text) {
        Ok(model) if is_whole(id, &model.manifest) => Some(model),
        Ok(model) => {
            tracing::debug!("{} has lost tensors, and is not shown", model.manifest.name);
            None
        }
        Err(why) => {
            tracing::error!("what a checkpoint had besides its tensors cannot be used: {why}");
            None
        }
    };
    files.into_iter().filter_map(read).collect()
}

fn model_of(id: SourceId, text: &str) -> Result<Model, String> {
    let bytes = bytes_of(text).ok_or("it is no text of bytes")?;
    let bytes = zstd::bulk::decompress(&bytes, MAX_BYTES).map_err(|why| why.to_string())?;
    let (manifest, begin) = decode(&bytes)?;
    Ok(Model { manifest, literals: Literals::Tables(id, Arc::from(&bytes[begin..])) })
}

/// Removes a checkpoint: its source first says that it is not whole, so that an interrupted removal
/// is gone through with when the device is started again.
pub(super) fn remove(
    device: &Device,
    id: SourceId,
    manifest: &Manifest,
    drop: impl Fn(u64, u64) -> Result<(), FilesError>,
) -> Result<(), FilesError> {
    let sources = device.sources_of_tensors();
    let own: Vec<_> = manifest.tensors().filter(|name| sources.get(*name) == Some(&Some(id))).collect();
    own.iter().try_for_each(|tensor| is_no_base(device, tensor))?;
    if let Some(source) = device.source(id) {
        device.set_source(id, Source { contents: None, ..source })?;
    }
    own.iter().try_for_each(|tensor| drop_tensor_by(device, tensor, &drop))?;
    Ok(device.set_file(id, String::new())?)
}

fn text_of(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes_of(text: &str) -> Option<Vec<u8>> {
    let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let byte = |[upper, lower]: &[u8; 2]| Some(digit(*upper)? << 4 | digit(*lower)?);
    rest.is_empty().then(|| pairs.iter().map(byte).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_text_and_back() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes_of(&text_of(&bytes)), Some(bytes));
        for none in ["0", "0g", "é", "+1"] {
            assert_eq!(bytes_of(none), None, "{none}");
        }
        assert!(model_of(1, "00").is_err() && model_of(1, "x").is_err());
    }
}
