//! The folder `models/` of the mount: files of models, as they were loaded and at other precisions.
//!
//! | path | shows |
//! |---|---|
//! | `models/NAME/FILE` | the file, to the bit |
//! | `models/NAME/STEM@VIEW.EXT` | the checkpoint `STEM.EXT` at a view or by a map |
//! | `models/NAME@VIEW/…` | the whole model so: checkpoints at the view, other files as they are |
//! | `models/NAME@VIEW.EXT` | the only checkpoint of a model |
//!
//! The rules:
//! * Everything is read-only: EROFS.
//! * A file at a precision is there when it is asked for by its name. Folders list what was
//!   configured or asked for. What is held of such files is [bounded](looked_at).
//! * An inode's number says what it is ([`number`]), so that every process that serves the mount
//!   knows it.
//! * What a file shows is what has reached the device. Its pages stay in the page cache until it is
//!   opened after something was stored to the base window, or its model is removed.

mod fs;
mod looked_at;
mod number;
mod report;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

use lamina_device::device::Device;
use lamina_device::files::{
    self, FileEntry, FileLayout, FilesError, Loading, Matrices, Model, ModelPlan, Precision,
};
use lamina_device::load::{LoadError, Progress};
use lamina_device::model::FileKind;

use super::invalidations::Invalidations;

pub(super) use self::fs::{Child, is_ours};
use self::looked_at::{LookedAt, Shown};
pub(super) use self::number::MODELS;
pub use self::report::{FileReport, LoadingReport, ModelReport, ModelsReport, ViewReport};

/// What the folder is called.
pub(super) const FOLDER: &str = "models";

/// The models of a device, as files.
pub struct Models {
    device: Arc<Device>,
    folders: RwLock<BTreeMap<String, Arc<Folder>>>,
    /// Those whose removal failed: nobody is shown them, and to remove them again goes on with it.
    half_removed: Mutex<BTreeMap<String, Arc<Folder>>>,
    /// Files that were looked at.
    looked_at: Mutex<LookedAt>,
    /// What is held for readers of files at bf16.
    matrices: Arc<Matrices>,
    /// Held by who loads or removes a model.
    turn: Mutex<()>,
    loading: Mutex<Option<LoadingReport>>,
    stopping: AtomicBool,
    /// Inodes of which the kernel is to drop the pages, if anybody tells it.
    gone: OnceLock<Invalidations>,
}

/// A model's folder.
pub(super) struct Folder {
    pub(super) model: Model,
    /// The folder itself, then what is in it, by path.
    pub(super) entries: Vec<Entry>,
}

/// A file or a folder.
pub(super) struct Entry {
    pub(super) parent: usize,
    pub(super) name: String,
    /// The number of the file in the manifest.
    pub(super) file: Option<usize>,
}

impl Folder {
    fn new(model: Model) -> Self {
        let mut entries = vec![Entry { parent: 0, name: model.manifest.name.clone(), file: None }];
        let mut folders: BTreeMap<String, usize> = BTreeMap::from([(String::new(), 0)]);
        for (number, file) in model.manifest.files.iter().enumerate() {
            let (path, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
            let mut parent = 0;
            let mut inside = String::new();
            for part in path.split('/').filter(|part| !part.is_empty()) {
                inside = if inside.is_empty() { part.to_owned() } else { format!("{inside}/{part}") };
                parent = *folders.entry(inside.clone()).or_insert_with(|| {
                    entries.push(Entry { parent, name: part.to_owned(), file: None });
                    entries.len() - 1
                });
            }
            entries.push(Entry { parent, name: name.to_owned(), file: Some(number) });
        }
        Self { model, entries }
    }

    /// What is in one of its folders.
    pub(super) fn children(&self, parent: usize) -> impl Iterator<Item = (usize, &Entry)> {
        self.entries.iter().enumerate().skip(1).filter(move |(_, entry)| entry.parent == parent)
    }

    /// The file that an entry is.
    pub(super) fn file(&self, entry: usize) -> Option<&FileEntry> {
        self.model.manifest.files.get(self.entries.get(entry)?.file?)
    }

    /// Its checkpoints, by entry.
    pub(super) fn checkpoints(&self) -> impl Iterator<Item = (usize, &FileEntry)> {
        let files = (0..self.entries.len()).filter_map(|entry| Some((entry, self.file(entry)?)));
        files.filter(|(_, file)| file.kind != FileKind::Other)
    }
}

impl Models {
    /// The models that `device` holds. What was loaded or removed by half is removed; what cannot
    /// be is logged.
    pub fn open(device: Arc<Device>) -> Self {
        let held = files::held(&device);
        let folders =
            held.into_iter().map(|model| (model.manifest.name.clone(), Arc::new(Folder::new(model))));
        Self {
            folders: RwLock::new(folders.collect()),
            half_removed: Mutex::default(),
            device,
            looked_at: Mutex::default(),
            matrices: Arc::default(),
            turn: Mutex::default(),
            loading: Mutex::default(),
            stopping: AtomicBool::new(false),
            gone: OnceLock::new(),
        }
    }

    /// Says that from now on somebody is told of files whose pages are to go.
    pub(super) fn begin_dropping(&self) {
        self.gone.get_or_init(Invalidations::default);
    }

    /// Tells `drop` of files whose pages are to go, by inode, until [`Self::end_dropping`].
    pub(super) fn drop_until_ended(&self, mut drop: impl FnMut(u64)) {
        if let Some(gone) = self.gone.get() {
            gone.run_until_closed(|inodes| inodes.clone().for_each(&mut drop));
        }
    }

    /// Says that nobody is told any more: the mount is going away.
    pub(super) fn end_dropping(&self) {
        if let Some(gone) = self.gone.get() {
            gone.close();
        }
    }

    /// Loads what is at `path` as the model `name`, unless it is given up meanwhile. `loaded` is
    /// told of each range of the base window (DPA and bytes) that was written, before anybody sees
    /// the model, and `drop` of those that go again if that fails.
    ///
    /// # Errors
    ///
    /// What is wrong with it, or why the device does not take it; then nothing of it stays.
    pub(super) fn load(
        &self,
        path: &Path,
        name: &str,
        loading: &Loading,
        is_given_up: impl Fn() -> bool + Sync,
        loaded: impl Fn(u64, u64) -> Result<(), FilesError>,
        drop: impl Fn(u64, u64) -> Result<(), FilesError>,
    ) -> Result<ModelReport, FilesError> {
        let _turn = self.turn.lock();
        if is_given_up() {
            return Err(LoadError::Stopped.into());
        }
        let plan = ModelPlan::open(path, name)?;
        let reported = |now: Progress<'_>| {
            *self.loading.lock() =
                Some(LoadingReport { name: name.to_owned(), bytes: now.bytes, total: now.total });
            if self.stopping.load(Ordering::Relaxed) || is_given_up() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let model = files::load(&self.device, &plan, loading, reported);
        *self.loading.lock() = None;
        let (model, apart) = model?;
        let told = model.places(&self.device).into_iter().try_for_each(|(dpa, length)| loaded(dpa, length));
        if let Err(why) = told {
            // It is whole by now, and the next start would show it.
            if let Err(also) = files::remove(&self.device, &model, drop) {
                tracing::error!("{name} is to be removed again: {also}");
                self.half_removed.lock().insert(name.to_owned(), Arc::new(Folder::new(model)));
            }
            return Err(why);
        }
        let folder = Arc::new(Folder::new(model));
        self.folders.write().insert(name.to_owned(), Arc::clone(&folder));
        let left_out = plan.left_out().to_vec();
        Ok(ModelReport { apart, left_out, ..self.report_of(&folder) })
    }

    /// Removes a model. `drop` is told of each range of the base window before it goes.
    ///
    /// # Errors
    ///
    /// If there is none of the name, or the device cannot remove it: then nobody sees it any more,
    /// and it can be removed again.
    pub(super) fn remove(
        &self,
        name: &str,
        drop: impl Fn(u64, u64) -> Result<(), FilesError>,
    ) -> Result<(), FilesError> {
        let _turn = self.turn.lock();
        let unknown = || FilesError::Unknown { name: name.to_owned() };
        let half = self.half_removed.lock().get(name).cloned();
        let folder = self.folder(name).or(half).ok_or_else(unknown)?;
        files::may_go(&self.device, &folder.model)?;
        self.folders.write().remove(name);
        let removed = files::remove(&self.device, &folder.model, drop);
        {
            let mut half_removed = self.half_removed.lock();
            match &removed {
                Ok(()) => half_removed.remove(name),
                Err(_) => half_removed.insert(name.to_owned(), Arc::clone(&folder)),
            };
        }
        let id = folder.model.manifest.id;
        let mut gone = self.looked_at.lock().forget(id);
        self.matrices.clear();
        gone.extend((0..folder.entries.len()).filter_map(|entry| number::of(id, entry, 0)));
        gone.sort_unstable();
        gone.dedup();
        if let Some(kernel) = self.gone.get() {
            kernel.queue(gone.into_iter().map(|inode| inode..inode + 1));
            // Pages go with the mount.
            let _ = kernel.drain();
        }
        removed
    }

    /// Ends what is being loaded, and waits until it has been removed.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        std::mem::drop(self.turn.lock());
    }

    /// The folder of a name.
    pub(super) fn folder(&self, name: &str) -> Option<Arc<Folder>> {
        self.folders.read().get(name).cloned()
    }

    /// The folder of a model's number.
    pub(super) fn numbered(&self, id: u32) -> Option<Arc<Folder>> {
        self.folders.read().values().find(|folder| folder.model.manifest.id == id).cloned()
    }

    pub(super) fn folders(&self) -> Vec<Arc<Folder>> {
        self.folders.read().values().cloned().collect()
    }

    /// A file, ready to be read; none if no tensor of it can be shown at the precision.
    pub(super) fn shown(
        &self,
        folder: &Folder,
        entry: usize,
        precision: Option<&Precision>,
        inode: u64,
    ) -> Result<Option<Arc<Shown>>, FilesError> {
        if let Ok(shown) = self.looked_at.lock().find(inode) {
            return Ok(shown);
        }
        let Some(file) = folder.file(entry) else { return Ok(None) };
        let layout = match precision {
            None => FileLayout::new(&self.device, &folder.model, file),
            Some(precision) => FileLayout::at(&self.device, &folder.model, file, precision, &self.matrices),
        };
        let layout = match layout {
            Ok(layout) => Some(layout),
            Err(why @ FilesError::NothingGiven { .. }) => {
                tracing::info!("{}: {why}", folder.model.manifest.name);
                None
            }
            Err(why) => return Err(why),
        };
        let stays = precision.is_none_or(|precision| folder.model.manifest.precisions().contains(precision));
        Ok(self.looked_at.lock().add(inode, layout, stays))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicUsize;

    use lamina_device::device::DeviceConfig;

    use super::*;

    fn no_drop(_: u64, _: u64) -> Result<(), FilesError> {
        unreachable!("nothing fails")
    }

    #[test]
    fn who_reads_a_file_that_is_removed_gets_its_bytes_or_an_error() {
        const BYTES: usize = 256 << 10;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{BYTES}],"data_offsets":[0,{BYTES}]}}}}"#);
        let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        let whole = [&head[..], &lamina_codec::testing::bytes(1, BYTES)].concat();
        fs::write(&path, &whole).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let models = Models::open(Arc::clone(&device));
        for round in 0..100 {
            models.load(&path, "m", &Loading::default(), || false, |_, _| Ok(()), no_drop).unwrap();
            let inode = models.find(models.find(MODELS, "m").unwrap(), "m.safetensors").unwrap();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let mut found = vec![0; whole.len()];
                        while models.read(inode, 0, &mut found).is_ok() {
                            assert!(found == whole, "round {round}");
                        }
                    });
                }
                models.remove("m", |dpa, length| Ok(device.discard(dpa, length)?)).unwrap();
            });
        }
    }

    #[test]
    fn a_removal_that_failed_can_be_gone_through_with() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let header = br#"{"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}"#;
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[7; 16]].concat()).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let models = Models::open(Arc::clone(&device));
        let load = || models.load(&path, "m", &Loading::default(), || false, |_, _| Ok(()), no_drop);
        load().unwrap();
        let refused = |_, _| Err(FilesError::Unknown { name: "room".to_owned() });
        for _ in 0..2 {
            models.remove("m", refused).unwrap_err();
            assert!(models.folder("m").is_none(), "by half it is shown to nobody");
            assert!(matches!(load(), Err(FilesError::Exists { .. })));
        }
        models.remove("m", |dpa, length| Ok(device.discard(dpa, length)?)).unwrap();
        assert!(device.tensors().is_empty() && device.hidden_tensors().is_empty());
        assert!(matches!(models.remove("m", refused), Err(FilesError::Unknown { name }) if name == "m"));
        load().unwrap();
        assert!(models.folder("m").is_some());
    }

    #[test]
    fn of_a_load_that_fails_after_its_last_byte_nothing_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let header = br#"{"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}"#;
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[7; 16]].concat()).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let models = Models::open(Arc::clone(&device));
        let refused = |_, _| Err(FilesError::Unknown { name: "room".to_owned() });
        let drop = |dpa, length| Ok(device.discard(dpa, length)?);
        for _ in 0..2 {
            let failed = models.load(&path, "m", &Loading::default(), || false, refused, drop).unwrap_err();
            assert!(matches!(failed, FilesError::Unknown { name } if name == "room"));
            assert!(models.folder("m").is_none());
            assert!(device.tensors().is_empty() && device.hidden_tensors().is_empty());
        }
        models.load(&path, "m", &Loading::default(), || false, |_, _| Ok(()), no_drop).unwrap();
        models.remove("m", |dpa, length| Ok(device.discard(dpa, length)?)).unwrap();
        assert!(device.tensors().is_empty() && device.hidden_tensors().is_empty());
    }

    #[test]
    fn a_load_that_is_given_up_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let header = br#"{"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}"#;
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[7; 16]].concat()).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let models = Models::open(Arc::clone(&device));
        // At once, and while it is loaded.
        for patience in 0..2 {
            let asked = AtomicUsize::new(0);
            let is_given_up = || asked.fetch_add(1, Ordering::Relaxed) >= patience;
            let loaded = models.load(&path, "m", &Loading::default(), is_given_up, |_, _| Ok(()), no_drop);
            assert!(matches!(loaded, Err(FilesError::Load(why)) if matches!(*why, LoadError::Stopped)));
            assert!(device.tensors().is_empty() && device.hidden_tensors().is_empty());
        }
    }

    #[test]
    fn precisions_that_somebody_asks_for_are_held_within_a_bound_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let header = br#"{"w":{"dtype":"BF16","shape":[4096],"data_offsets":[0,8192]}}"#;
        let head = [&(header.len() as u64).to_le_bytes()[..], header].concat();
        fs::write(&path, [head, lamina_codec::testing::bytes(1, 8192)].concat()).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let models = Models::open(Arc::clone(&device));
        let views = ["e8m3", "e8m1"].map(str::to_owned).to_vec();
        models
            .load(&path, "m", &Loading { views, ..Loading::default() }, || false, |_, _| Ok(()), no_drop)
            .unwrap();
        let at = models.find(MODELS, "m").unwrap();
        let names = (1..=8).flat_map(|e| (0..=6).flat_map(move |m| (0..6).map(move |g| (e, m, g))));
        let names = names.map(|(e, m, g)| format!("m@e{e}m{m}+d{}+g{g}.safetensors", 8 - e));
        let found: Vec<_> = names.filter_map(|name| models.find(at, &name).ok()).collect();
        let read = |inode| {
            let mut bytes = vec![0; usize::try_from(models.bytes(inode).unwrap()).unwrap()];
            models.read(inode, 0, &mut bytes).unwrap();
            bytes
        };
        let first: Vec<_> = found.iter().map(|inode| read(*inode)).collect();
        assert!(found.len() > 100, "{}", found.len());
        // Those that are configured, and the file as it is.
        models.children(at).unwrap();
        assert!(models.looked_at.lock().held() <= looked_at::MAX_ASKED + 3);
        assert!(found.iter().zip(&first).all(|(inode, bytes)| read(*inode) == *bytes));
        assert!(models.looked_at.lock().held() <= looked_at::MAX_ASKED + 3);
        // All are listed, in the order that a listing goes on by, and what was read is counted on.
        let listed: Vec<_> = models.children(at).unwrap().iter().map(|child| child.inode).collect();
        assert!(listed.is_sorted() && found.iter().all(|inode| listed.contains(inode)));
        let views = models.report().models.remove(0).files.remove(0).views;
        let counted = views.iter().filter(|view| view.view.contains("+g1"));
        assert!(counted.clone().count() > 10 && counted.clone().all(|view| view.read >= 2 * 8192));
        let attribute = models.attribute(found[0], "user.lamina.read").unwrap();
        assert!(String::from_utf8(attribute).unwrap().parse::<u64>().unwrap() >= 2 * 8192);
        models.remove("m", |dpa, length| Ok(device.discard(dpa, length)?)).unwrap();
        assert_eq!(models.looked_at.lock().held(), 0);
    }
}
