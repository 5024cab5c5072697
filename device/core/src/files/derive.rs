//! Which tensors of a model are stored as differences to those of another.
//!
//! A tensor is matched by its name in the file, its format and its shape. What does not match is
//! stored by itself, and told.

use std::collections::{BTreeMap, btree_map::Entry};

use serde::Serialize;

use super::FilesError;
use super::load::options_of;
use super::manifest::Model;
use super::plan::ModelPlan;
use crate::device::Device;
use crate::load::{LoadOptions, full_name, spec};
use crate::model::ModelFile;
use crate::tensor::{HIDDEN, TensorError, TensorSpec};

/// A tensor of a model with a base that is stored by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Apart {
    /// The tensor, as the file calls it.
    pub tensor: String,
    /// Why.
    pub why: String,
}

/// The bases of a model's tensors, by the names of both on the device.
#[derive(Clone, Default)]
pub(super) struct Bases(pub(super) BTreeMap<String, String>);

impl Bases {
    /// Those that `base` has for the tensors of `plan`, and the tensors it has none for.
    pub(super) fn of(
        device: &Device,
        base: &Model,
        plan: &ModelPlan,
    ) -> Result<(Self, Vec<Apart>), FilesError> {
        let model = &base.manifest.name;
        device.holds_differences().map_err(|why| FilesError::Base { base: model.clone(), why })?;
        let named = names(base);
        let (mut bases, mut apart) = (BTreeMap::new(), Vec::new());
        for file in &plan.files {
            let options = options_of(file, Self::default());
            for tensor in file.loaded().tensors().iter().filter(|tensor| tensor.length > 0) {
                let spec = spec(tensor, &options);
                // Files that are passed through are small, and nobody asked about them.
                if spec.name.contains(HIDDEN) {
                    continue;
                }
                match found(device, &named, &file.path, &tensor.name, &spec) {
                    Ok(base) => {
                        bases.insert(spec.name, base);
                    }
                    Err(why) => apart.push(Apart { tensor: tensor.name.clone(), why }),
                }
            }
        }
        if bases.is_empty() {
            return Err(FilesError::NothingDerived { name: plan.name.clone(), base: model.clone() });
        }
        Ok((Self(bases), apart))
    }
}

/// The bases of the tensors of a checkpoint that is loaded as `options` say, by the names of both
/// on the device: the tensors of the same names that another was loaded as, as `base` says. With
/// the tensors that have none.
pub fn checkpoint_bases(
    device: &Device,
    file: &ModelFile,
    options: &LoadOptions,
    base: &LoadOptions,
) -> (BTreeMap<String, String>, Vec<Apart>) {
    let (mut bases, mut apart) = (BTreeMap::new(), Vec::new());
    for tensor in file.tensors().iter().filter(|tensor| tensor.length > 0) {
        let spec = spec(tensor, options);
        match fitting(device, &full_name(&tensor.name, base), &spec) {
            Ok(base) => drop(bases.insert(spec.name, base)),
            Err(why) => apart.push(Apart { tensor: tensor.name.clone(), why }),
        }
    }
    (bases, apart)
}

/// The tensors of a model by the name of their file, or of any, and by their own: what they are
/// called on the device. Nothing where two are called so.
fn names(model: &Model) -> BTreeMap<(Option<&str>, &str), Option<&str>> {
    let mut names = BTreeMap::new();
    let manifest = &model.manifest;
    for file in &manifest.files {
        let prefixes = [format!("{}/{}/", manifest.name, file.path), format!("{}/", manifest.name)];
        for full in file.extents.iter().flat_map(|extent| extent.of.tensors()) {
            let own = prefixes.iter().find_map(|prefix| full.strip_prefix(prefix.as_str())).unwrap_or(full);
            for of in [Some(file.path.as_str()), None] {
                match names.entry((of, own)) {
                    Entry::Vacant(entry) => drop(entry.insert(Some(full))),
                    Entry::Occupied(mut entry) => drop(entry.insert(None)),
                }
            }
        }
    }
    names
}

/// The base of a tensor that is to be made, or why there is none.
fn found(
    device: &Device,
    named: &BTreeMap<(Option<&str>, &str), Option<&str>>,
    file: &str,
    tensor: &str,
    spec: &TensorSpec,
) -> Result<String, String> {
    let of_file = || named.get(&(Some(file), tensor)).copied().flatten();
    let base = match named.get(&(None, tensor)) {
        None => return Err("the base has no tensor of this name".to_owned()),
        Some(of_any) => of_any.or_else(of_file).ok_or("the base has two tensors of this name")?,
    };
    fitting(device, base, spec)
}

/// The tensor called `base`, if one that is to be made can be stored as differences to it, or why
/// not.
fn fitting(device: &Device, base: &str, spec: &TensorSpec) -> Result<String, String> {
    let is = device.tensor(base).map_err(|why| why.to_string())?;
    if is.shape != spec.shape {
        let shape = |shape: &[u64]| shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
        return Err(format!("the base's is {}, this one {}", shape(&is.shape), shape(&spec.shape)));
    }
    match device.may_derive(&TensorSpec { base: Some(base.to_owned()), ..spec.clone() }) {
        Ok(()) => Ok(base.to_owned()),
        Err(TensorError::Base { why, .. }) => Err(why.to_string()),
        Err(why) => Err(why.to_string()),
    }
}
