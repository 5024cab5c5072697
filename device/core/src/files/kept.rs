//! A model that is to be loaded onto a device that has one of its name: whether it is that one.

use std::ops::ControlFlow;

use super::manifest::{FileEntry, Model};
use super::plan::{ModelPlan, PlannedFile};
use super::{FilesError, Loading, Precision};
use crate::device::{Device, Source};
use crate::load::{LoadError, Progress, same_source};
use crate::tensor::SourceId;

/// Refuses a `plan` that is not the `model` as that was loaded, and a `loading` that asks for
/// another base or for precisions that it has not. A file is read where its times do not tell that
/// it is the same, and `progress` is told of that.
///
/// # Errors
///
/// What is another, or why a file cannot be read.
pub fn check_kept(
    device: &Device,
    model: &Model,
    plan: &ModelPlan,
    loading: &Loading,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<(), FilesError> {
    let manifest = &model.manifest;
    let refused = |why: String| Err(FilesError::Kept { name: manifest.name.clone(), why });
    let sources = device.sources_of_tensors();
    let source_of = |held: &FileEntry| -> Option<(SourceId, Source)> {
        let mut tensors = held.extents.iter().flat_map(|extent| extent.of.tensors());
        let id = tensors.find_map(|name| sources.get(name).copied().flatten())?;
        Some((id, device.source(id)?))
    };
    for file in &plan.files {
        let path = file.file.path().display();
        let held = manifest.files.iter().find(|held| held.path == file.path);
        let Some((id, source)) = held.and_then(source_of) else {
            let has_bytes = file.loaded().tensors().iter().any(|tensor| tensor.length > 0);
            if held.is_some_and(|held| !has_bytes && held.bytes == file.file.opened().len()) {
                continue;
            }
            let loaded = manifest.files.iter().find_map(source_of).map(|(_, source)| source.path);
            let loaded = loaded.unwrap_or_else(|| "no file that the image knows".to_owned());
            return refused(format!("{path} is not of it, which was loaded from {loaded}"));
        };
        match now(file, &source, &progress)? {
            Some(now) if now == source => {}
            Some(now) => device.set_source(id, now)?,
            None => return refused(format!("{path} is not {} as that was loaded", source.path)),
        }
    }
    if let Some(more) =
        manifest.files.iter().find(|held| plan.files.iter().all(|file| file.path != held.path))
    {
        return refused(format!("it has {}, which is not among the files to load", more.path));
    }
    let has = manifest.precisions();
    let lacks = |view: &&String| {
        *view != "full" && Precision::parse(view, &manifest.maps).is_none_or(|view| !has.contains(&view))
    };
    if let Some(view) = loading.views.iter().find(lacks) {
        return refused(format!("{view} is not among the views that it was loaded with"));
    }
    if let Some((map, _)) = loading.maps.iter().find(|(name, map)| manifest.maps.get(*name) != Some(map)) {
        return refused(format!("it was not loaded with this map {map}"));
    }
    match &loading.base {
        Some(base) if manifest.base.as_ref() != Some(base) => {
            refused(format!("it was not loaded as the difference to {base}"))
        }
        _ => Ok(()),
    }
}

/// What is to be said from now on of the source that a file is; nothing if it is another. Its
/// elements may lie on the device as in the file, or apart.
fn now(
    file: &PlannedFile,
    source: &Source,
    progress: &(impl Fn(Progress<'_>) -> ControlFlow<()> + Sync),
) -> Result<Option<Source>, LoadError> {
    let now = same_source(file.loaded(), source, progress)?;
    if now.is_some() || std::ptr::eq(file.loaded(), &raw const file.file) {
        return Ok(now);
    }
    same_source(&file.file, source, progress)
}
