//! Loading and removing models, so that at no moment anything is there by half for those who read.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use twox_hash::xxhash3_128::Hasher;

use super::FilesError;
use super::checkpoints;
use super::derive::{Apart, Bases};
use super::manifest::{Found, Literals, MARK, Manifest, Model, model_of, read, tensor_name};
use super::map::PrecisionMap;
use super::plan::{ModelPlan, PlannedFile};
use crate::device::{Device, DeviceError, Places};
use crate::load::{
    KvRule, LoadError, LoadOptions, Progress, drop_tensor, drop_tensor_by, is_no_base, load_from, source_of,
};
use crate::tensor::{Tensor, TensorError, TensorSpec};
use lamina_codec::format::Format;

/// Bits of a model's number.
const ID_BITS: u32 = 20;

/// How a model is loaded, and shown.
#[derive(Clone, Debug, Default)]
pub struct Loading {
    /// The precisions that lists show.
    pub views: Vec<String>,
    /// Maps of precisions, by name.
    pub maps: BTreeMap<String, PrecisionMap>,
    /// A model of the device: tensors that it has too are stored as differences to its.
    pub base: Option<String>,
}

/// The models that the device holds. What was not loaded whole, or not removed whole, is removed
/// first. What cannot be removed, and a manifest that cannot be read, is logged and not shown: the
/// other models are.
pub fn held(device: &Device) -> Vec<Model> {
    let mut models = Vec::new();
    for tensor in device.hidden_tensors().iter().filter(|tensor| model_of(tensor).is_some()) {
        match read(device, tensor) {
            Ok(Found::Whole(model)) => models.push(*model),
            Ok(Found::Unfinished(model)) => {
                tracing::warn!(
                    "{} was not loaded whole: what there was of it is removed",
                    model.manifest.name
                );
                if let Err(why) = remove(device, &model, discard(device)) {
                    tracing::error!(
                        "what there is of {} stays until the next start: {why}",
                        model.manifest.name
                    );
                }
            }
            Ok(Found::Blank) => {
                if let Err(why) = drop_tensor(device, tensor) {
                    tracing::error!("what is left of a manifest stays until the next start: {why}");
                }
            }
            Err(why) => tracing::error!("a model is not shown: {why}"),
        }
    }
    models.extend(checkpoints::held(device));
    models
}

/// Discards what of a model nobody was shown.
fn discard(device: &Device) -> impl Fn(u64, u64) -> Result<(), FilesError> {
    |dpa, length| Ok(device.discard(dpa, length)?)
}

/// Loads a model, telling `progress` after each piece, which may stop it. What was made until an
/// error is removed again. With a base, the tensors that are stored by themselves are told too.
///
/// # Errors
///
/// What is wrong with the model, or why the device does not take it.
pub fn load(
    device: &Device,
    plan: &ModelPlan,
    loading: &Loading,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<(Model, Vec<Apart>), FilesError> {
    let own = tensor_name(&plan.name);
    if device.place_of(&own).is_some()
        || checkpoints::held(device).iter().any(|model| model.manifest.name == plan.name)
    {
        return Err(FilesError::Exists { name: plan.name.clone() });
    }
    // The file as it is is there anyway.
    let views: Vec<_> = loading.views.iter().filter(|view| *view != "full").cloned().collect();
    plan.check(&views, &loading.maps)?;
    if let Some(remark) = plan.configuration_remark() {
        tracing::warn!("{}: {remark}", plan.name);
    }
    let (bases, apart) = match &loading.base {
        Some(base) => Bases::of(device, &held_by_name(device, base)?, plan)?,
        None => (Bases::default(), Vec::new()),
    };
    let (mut manifest, literals) = plan.manifest(free_id(device, &plan.name), &views, &loading.maps)?;
    manifest.base.clone_from(&loading.base);
    let bytes = manifest.encode(&literals)?;
    drop(literals);
    let tensors = plan.files.iter().flat_map(|file| {
        let tensors = file.loaded().tensors().iter().filter(|tensor| tensor.length > 0);
        tensors.map(|tensor| (format!("{}{}", file.within, tensor.name), tensor.length))
    });
    let wanted: Vec<_> = std::iter::once((own.clone(), bytes.len() as u64)).chain(tensors).collect();
    let mut seen = device.sources_of_tensors();
    if let Some((name, _)) = wanted.iter().find(|(name, _)| seen.remove(name).is_some()) {
        let source = TensorError::Exists { name: name.clone() };
        return Err(DeviceError::from(source).into());
    }
    let places = match device.places_for(&wanted, &BTreeSet::new(), &[])? {
        Places::Empty(places) => places,
        Places::Stored(places) => {
            let file = plan.files.first().map(|file| file.file.path().to_owned()).unwrap_or_default();
            let dpa = places.first().copied().unwrap_or(0);
            return Err(LoadError::NoEmptyPlace { file, dpa }.into());
        }
    };
    let mut made = Vec::new();
    let loaded = write(device, &own, places[0], &bytes)
        .and_then(|()| load_files(device, plan, &places[1..], &bases, &progress, &mut made))
        .and_then(|()| mark(device, &own, true))
        .and_then(|()| whole(device, &own));
    loaded.map(|model| (model, apart)).inspect_err(|_| {
        if let Err(why) = take_back(device, &own, &made) {
            tracing::error!("what was loaded of {} stays until the next start: {why}", plan.name);
        }
    })
}

/// Removes what was made for a model: not what others made of the same names when it was gone.
fn take_back(device: &Device, own: &str, made: &[Arc<Tensor>]) -> Result<(), FilesError> {
    let there: Vec<_> = made.iter().filter(|tensor| device.has_made(tensor)).collect();
    there.iter().try_for_each(|tensor| is_no_base(device, &tensor.info.name))?;
    if device.place_of(own).is_some() {
        mark(device, own, false)?;
    }
    there.iter().try_for_each(|tensor| device.drop_made(tensor))?;
    drop_tensor_by(device, own, discard(device))
}

/// The model of this name that the device holds.
fn held_by_name(device: &Device, name: &str) -> Result<Model, FilesError> {
    let found = match device.place_of(&tensor_name(name)) {
        Some(_) => match read(device, &tensor_name(name))? {
            Found::Whole(model) => Some(*model),
            Found::Unfinished(_) | Found::Blank => None,
        },
        None => checkpoints::held(device).into_iter().find(|model| model.manifest.name == name),
    };
    found.ok_or_else(|| FilesError::Unknown { name: name.to_owned() })
}

/// How the tensors of a file are loaded.
pub(super) fn options_of(file: &PlannedFile, bases: Bases) -> LoadOptions {
    let (within, kv) = (Some(file.within.clone()), KvRule::by_name().to_vec());
    LoadOptions { within, kv, bases: bases.0, ..LoadOptions::default() }
}

fn load_files(
    device: &Device,
    plan: &ModelPlan,
    mut places: &[u64],
    bases: &Bases,
    progress: &(impl Fn(Progress<'_>) -> ControlFlow<()> + Sync),
    made: &mut Vec<Arc<Tensor>>,
) -> Result<(), FilesError> {
    let total = plan.tensor_bytes();
    let mut before = 0;
    for file in &plan.files {
        let count = file.loaded().tensors().iter().filter(|tensor| tensor.length > 0).count();
        let (own, rest) = places.split_at(count);
        places = rest;
        if count == 0 {
            continue;
        }
        let options = options_of(file, bases.clone());
        let reported =
            |now: Progress<'_>| progress(Progress { bytes: before + now.bytes, total, tensor: now.tensor });
        let source = device.note_source(source_of(&file.file));
        load_from(device, file.loaded(), &options, own, source, reported, made)?;
        before += file.loaded().tensors().iter().map(|tensor| tensor.length).sum::<u64>();
    }
    Ok(())
}

/// Removes a model: first its mark, so that an interrupted removal is gone through with, then its
/// tensors, which `drop` discards (DPA and bytes) before they go, then its manifest.
///
/// # Errors
///
/// When the device cannot remove them.
pub fn remove(
    device: &Device,
    model: &Model,
    drop: impl Fn(u64, u64) -> Result<(), FilesError>,
) -> Result<(), FilesError> {
    match &model.literals {
        Literals::Tensor(..) => remove_tensors(device, &model.manifest, drop),
        Literals::Tables(id, _) => checkpoints::remove(device, *id, &model.manifest, drop),
    }
}

/// That a model can be removed: no tensor is coded against one of its own.
///
/// # Errors
///
/// Which are.
pub fn may_go(device: &Device, model: &Model) -> Result<(), FilesError> {
    let mut tensors = loaded(device, &model.manifest).into_iter();
    let Some(refused) = tensors.find_map(|tensor| is_no_base(device, tensor).err()) else { return Ok(()) };
    let LoadError::Device { source: DeviceError::Tensor(TensorError::IsBase { derived, .. }), .. } = &refused
    else {
        return Err(refused.into());
    };
    let Some(derived) = derived.first() else { return Err(refused.into()) };
    let name = model.manifest.name.clone();
    let has = |other: &Model| other.manifest.tensors().any(|tensor| tensor == derived);
    if let Some(Model { manifest: Manifest { name: derived, .. }, .. }) =
        whole_models(device).into_iter().find(has)
    {
        let (remedy, removes) = (format!("--model {derived}"), format!("rm {derived}"));
        return Err(FilesError::IsBase { name, derived, remedy, removes });
    }
    let (remedy, removes) = (derived.clone(), format!("tensor rm {derived}"));
    Err(FilesError::IsBase { name, derived: format!("the tensor {derived}"), remedy, removes })
}

/// The models that are there whole. Nothing is removed.
fn whole_models(device: &Device) -> Vec<Model> {
    let tensors = device.hidden_tensors();
    let own = tensors.iter().filter(|tensor| model_of(tensor).is_some());
    let whole = own.filter_map(|tensor| match read(device, tensor) {
        Ok(Found::Whole(model)) => Some(*model),
        _ => None,
    });
    whole.chain(checkpoints::held(device)).collect()
}

/// The tensors of a model that are there as they were loaded. They name their source: what does
/// not, somebody made when the model's was removed.
fn loaded<'m>(device: &Device, manifest: &'m Manifest) -> Vec<&'m str> {
    let sources = device.sources_of_tensors();
    let was_loaded =
        |name: &&str| device.image().is_none() || sources.get(*name).is_some_and(Option::is_some);
    manifest.tensors().filter(was_loaded).collect()
}

fn remove_tensors(
    device: &Device,
    manifest: &Manifest,
    drop: impl Fn(u64, u64) -> Result<(), FilesError>,
) -> Result<(), FilesError> {
    let own = tensor_name(&manifest.name);
    let tensors = loaded(device, manifest);
    tensors.iter().try_for_each(|tensor| is_no_base(device, tensor))?;
    if device.place_of(&own).is_some() {
        mark(device, &own, false)?;
    }
    tensors.into_iter().chain([own.as_str()]).try_for_each(|tensor| drop_tensor_by(device, tensor, &drop))
}

/// A number that no model has.
pub(super) fn free_id(device: &Device, name: &str) -> u32 {
    let taken: BTreeSet<u32> = device
        .hidden_tensors()
        .iter()
        .filter(|tensor| model_of(tensor).is_some())
        .filter_map(|tensor| match read(device, tensor) {
            Ok(Found::Whole(model) | Found::Unfinished(model)) => Some(model.manifest.id),
            _ => None,
        })
        .chain(checkpoints::held(device).into_iter().map(|model| model.manifest.id))
        .collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // By the time, so that one that was removed is not taken for another that came later.
    let from = Hasher::oneshot(format!("{name} {now}").as_bytes());
    let ids = (0_u128..).map(|n| from.wrapping_add(n) % (1 << ID_BITS));
    let mut ids = ids.map(|id| u32::try_from(id).unwrap_or(0));
    ids.find(|id| *id != 0 && !taken.contains(id)).unwrap_or(1)
}

/// Makes the tensor of a manifest and fills it.
fn write(device: &Device, own: &str, dpa: u64, bytes: &[u8]) -> Result<(), FilesError> {
    let length = bytes.len() as u64;
    let spec = TensorSpec {
        name: own.to_owned(),
        dpa: Some(dpa),
        length,
        elements: Some(length),
        shape: Vec::new(),
        format: Format::Opaque,
        layout: crate::layout::Layout::default(),
        codec: None,
        base: None,
    };
    device.create_tensor(spec)?;
    // What of an earlier one lies there must not be taken for this one.
    device.discard(dpa, length.next_multiple_of(lamina_codec::BLOCK_BYTES as u64))?;
    device.write_base(dpa, bytes)?;
    Ok(())
}

/// Says whether all tensors of a model are there, and brings that to the disk.
fn mark(device: &Device, own: &str, whole: bool) -> Result<(), FilesError> {
    let (dpa, _) = device.place_of(own).unwrap_or_default();
    let synced = |source| LoadError::Sync { file: own.into(), source };
    // What it says must not be on the disk before what it is said of.
    device.sync().map_err(synced)?;
    device.write_base(dpa + MARK, &[u8::from(whole)])?;
    device.sync().map_err(synced)?;
    Ok(())
}

fn whole(device: &Device, own: &str) -> Result<Model, FilesError> {
    match read(device, own)? {
        Found::Whole(model) => Ok(*model),
        Found::Unfinished(_) | Found::Blank => {
            let name = model_of(own).unwrap_or(own).to_owned();
            Err(FilesError::Manifest { name, why: "it changed while it was written".to_owned() })
        }
    }
}

impl Model {
    /// The ranges of the base window that it takes: DPA and bytes of each tensor.
    pub fn places(&self, device: &Device) -> Vec<(u64, u64)> {
        let tensors = self.manifest.tensors().filter_map(|tensor| device.place_of(tensor));
        let own = match &self.literals {
            Literals::Tensor(view, _) => Some(view.base()),
            Literals::Tables(..) => None,
        };
        tensors.chain(own).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceConfig;
    use crate::load::tests::checkpoint;
    use lamina_codec::testing::bytes;

    #[test]
    fn what_cannot_be_removed_at_a_start_stays_and_the_other_models_are_shown() {
        let device = Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for (name, seed) in [("half", 1), ("whole", 2)] {
            let path = folder.path().join(format!("{name}.safetensors"));
            let tensors = [("w", "BF16", &[4096_u64][..], bytes(seed, 8192))];
            std::fs::copy(checkpoint(&tensors).0.path(), &path).unwrap();
            let plan = ModelPlan::open(&path, name).unwrap();
            load(&device, &plan, &Loading::default(), |_| ControlFlow::Continue(())).unwrap();
        }
        // Removed by half, and by then somebody has derived a tensor from one of its own.
        mark(&device, &tensor_name("half"), false).unwrap();
        let info = device.tensor("half/w").unwrap();
        let derived = TensorSpec {
            name: "mine".to_owned(),
            dpa: None,
            length: info.length,
            elements: None,
            shape: Vec::new(),
            format: info.format,
            layout: info.layout,
            codec: None,
            base: Some(info.name),
        };
        device.create_tensor(derived).unwrap();
        let names =
            || -> Vec<String> { held(&device).into_iter().map(|model| model.manifest.name).collect() };
        assert_eq!(names(), ["whole"]);
        let mut found = vec![0; 8192];
        device.read_base(info.dpa, &mut found).unwrap();
        assert!(found == bytes(1, 8192));
        // When it may go, the next start removes it.
        device.detach_tensor("mine", |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(names(), ["whole"]);
        assert!(device.tensor("half/w").is_err() && device.place_of(&tensor_name("half")).is_none());
    }

    #[test]
    fn a_load_whose_tensors_were_removed_leaves_what_others_made_there_and_nothing_of_its_own() {
        let device = Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap();
        let tensor = |name, seed| (name, "U8", &[2_u64 << 20][..], bytes(seed, 2 << 20));
        let (file, _) = checkpoint(&[tensor("first", 1), tensor("second", 2), tensor("third", 3)]);
        let plan = ModelPlan::open(file.path(), "m").unwrap();
        let begun = std::sync::atomic::AtomicBool::new(false);
        let mine = |name: &str, was: &str| {
            let dpa = device.tensor(was).unwrap().dpa;
            device.remove_tensor(was).unwrap();
            device.create_tensor(TensorSpec::new(name, Some(dpa), 2 << 20, Format::Opaque)).unwrap();
            device.write_base(dpa, &bytes(9, 2 << 20)).unwrap();
        };
        let refused = load(&device, &plan, &Loading::default(), |_| {
            if !begun.swap(true, std::sync::atomic::Ordering::Relaxed) {
                mine("m/first", "m/first");
                mine("mine", "m/second");
                device.resize_tensor("m/third", 1 << 20).unwrap();
            }
            ControlFlow::Continue(())
        });
        assert!(refused.is_err() && held(&device).is_empty() && device.hidden_tensors().is_empty());
        let tensors = device.tensors();
        assert_eq!(tensors.iter().map(|tensor| &tensor.name).collect::<Vec<_>>(), ["m/first", "mine"]);
        for tensor in tensors {
            let mut found = vec![0; 2 << 20];
            device.read_base(tensor.dpa, &mut found).unwrap();
            assert!(found == bytes(9, 2 << 20), "{}", tensor.name);
        }
    }

    #[test]
    fn what_others_made_of_a_models_names_is_not_removed_with_it() {
        let config = DeviceConfig::new(64 << 20, 64 << 20);
        let image = lamina_store::image::Image::in_memory(config.superblock()).unwrap();
        let device = Device::open(image, &config).unwrap();
        let tensor = |name, seed| (name, "U8", &[8192_u64][..], bytes(seed, 8192));
        let (file, _) = checkpoint(&[tensor("first", 1), tensor("second", 2)]);
        let plan = ModelPlan::open(file.path(), "m").unwrap();
        for is_half in [true, false] {
            let (model, _) =
                load(&device, &plan, &Loading::default(), |_| ControlFlow::Continue(())).unwrap();
            device.remove_tensor("m/first").unwrap();
            let mine = TensorSpec::new("m/first", None, 8192, Format::Opaque);
            let mine = device.create_tensor(mine).unwrap();
            device.write_base(mine.dpa, &bytes(9, 8192)).unwrap();
            if is_half {
                mark(&device, &tensor_name("m"), false).unwrap();
                assert!(held(&device).is_empty());
            } else {
                remove(&device, &model, discard(&device)).unwrap();
            }
            assert_eq!(device.tensors(), std::slice::from_ref(&mine));
            assert_eq!(device.place_of(&tensor_name("m")), None);
            let mut found = vec![0; 8192];
            device.read_base(mine.dpa, &mut found).unwrap();
            assert!(found == bytes(9, 8192));
            device.remove_tensor("m/first").unwrap();
            device.discard(mine.dpa, 8192).unwrap();
        }
    }

    #[test]
    fn what_a_kill_left_of_a_manifest_is_removed_and_a_damaged_one_stays() {
        let device = Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap();
        let names: Vec<String> = (0..200).map(|n| format!("model.layers.{n}.weight")).collect();
        let tensor = |name| (name, "BF16", &[8_u64][..], bytes(1, 16));
        let tensors: Vec<_> = names.iter().map(|name| tensor(name.as_str())).collect();
        let (file, _) = checkpoint(&tensors);
        let plan = ModelPlan::open(file.path(), "m").unwrap();
        let loaded = || load(&device, &plan, &Loading::default(), |_| ControlFlow::Continue(()));
        let own = tensor_name("m");
        let block = lamina_codec::BLOCK_BYTES as u64;
        let (model, _) = loaded().unwrap();
        let (dpa, length) = device.place_of(&own).unwrap();
        assert!(length > 3 * block, "it is cut between blocks");
        let mut whole = vec![0; usize::try_from(length).unwrap()];
        device.read_base(dpa, &mut whole).unwrap();
        // Damaged, and its model was whole: nobody knows what is lost.
        device.discard(dpa + block, block).unwrap();
        assert!(held(&device).is_empty() && device.place_of(&own).is_some());
        device.write_base(dpa, &whole).unwrap();
        assert_eq!(held(&device).len(), 1);
        remove_tensors(&device, &model.manifest, discard(&device)).unwrap();
        whole[usize::try_from(MARK).unwrap()] = 0;
        let cut = usize::try_from(2 * block).unwrap();
        for left in [0..cut, cut..whole.len(), 0..0] {
            write(&device, &own, dpa, &vec![0; whole.len()]).unwrap();
            device.write_base(dpa + left.start as u64, &whole[left]).unwrap();
            assert!(held(&device).is_empty());
            assert_eq!(device.place_of(&own), None);
            assert!(device.next_data(dpa..dpa + length) >= dpa + length);
        }
        loaded().unwrap();
    }
}
