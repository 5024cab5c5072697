//! What of a window `base` is somebody's: the folder of files, models, tensors.
//!
//! A pool takes all of its window. Whoever is about to make one asks by the attribute [`HOLDS`] of
//! the file, and makes none where anything else lies. The tensors of a pool that is there are not
//! told: another takes its place.

use std::collections::BTreeSet;
use std::ffi::CStr;

use lamina_device::device::Partition;

use super::files;
use super::models;
use super::tree::Tree;
use super::window_parts;

/// The attribute of a window `base` that names what lies in it; there is none where nothing does.
pub(super) const HOLDS: &CStr = c"user.lamina.holds";
/// What the names of the tensors begin with that files lie in.
const OF_FILES: &str = "/.lamina/files/";
/// Of more than these only how many there are is told.
const NAMED: usize = 4;

/// What lies in a partition, in words.
pub(super) fn held(tree: &Tree, partition: &Partition) -> Option<String> {
    let (device, base) = (partition.device(), partition.base());
    let is_inside = |(dpa, _): (u64, u64)| base.contains(&dpa);
    let is_here = |name: &str| device.place_of(name).is_some_and(is_inside);
    let mut held = Vec::new();
    if device.hidden_tensors().iter().any(|name| name.starts_with(OF_FILES) && is_here(name)) {
        held.push(format!("{}/", files::FOLDER));
    }
    let mut of_models = BTreeSet::new();
    for folder in tree.models().map(|models| models.folders()).unwrap_or_default() {
        let places = folder.model.places(device).into_iter().filter(|place| is_inside(*place));
        let before = of_models.len();
        of_models.extend(places.map(|(dpa, _)| dpa));
        if of_models.len() > before {
            held.push(format!("{}/{}", models::FOLDER, folder.model.manifest.name));
        }
    }
    let others = partition.tensors().into_iter().filter(|tensor| {
        !tensor.name.starts_with(window_parts::TENSOR) && !of_models.contains(&(base.start + tensor.dpa))
    });
    held.extend(others.map(|tensor| format!("the tensor {}", tensor.name)));
    if held.is_empty() {
        return None;
    }
    let more = held.len().saturating_sub(NAMED);
    held.truncate(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(held.join(", ") + &more)
}
