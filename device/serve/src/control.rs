//! What can be asked of a served device, the same for people (the API), guests (the guest ports)
//! and programs.
//!
//! Every change goes through here rather than to the device itself, because a change may need dirty
//! pages to reach the device before it, and pages of the views window dropped after it. All of
//! these sleep on the mount: async servers call them from blocking threads.
//!
//! A control is of the whole device, in the device's offsets and names, or of one export, in those
//! of its partition: then it neither reaches nor names anything else.

use std::collections::BTreeSet;
use std::io;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use lamina_abi::DIRECTORY_BYTES;
use serde::Serialize;

use lamina_codec::BLOCK_BYTES;
use lamina_device::device::events::Event;
use lamina_device::device::poison::Poisoned;
use lamina_device::device::{Device, DeviceError, Partition};
use lamina_device::files::{self, FilesError, Loading, ModelPlan};
use lamina_device::stats::StatsReport;
use lamina_device::tensor::{TensorInfo, TensorSpec};
use lamina_device::window::ViewInfo;
use lamina_files::{FileError, Files, damaged_log, lost_by_discard};

#[cfg(doc)]
use super::Coherence;
use super::ServeError;
use super::additions::Additions;
use super::cold_pages::{ColdPages, PageCacheReport};
use super::detaching::{DetachReport, Detaching};
use super::disks::{DiskInfo, ServedDisk};
use super::export::{Export, ExportReport, Place};
use super::files::FilesReport;
use super::host_cache::HostReport;
use super::models::{Folder, MODELS, ModelReport, Models, ModelsReport};
use super::mount_point;
use super::pools::{Pools, PoolsReport};
use super::ranges::{inside, place, whole_blocks, within};
use super::settled_files::{SETTLE, settle_files};

/// Lists a folder and all in it, as who looks at the mount does.
fn list(models: &Models, folder: u64) {
    let children = models.children(folder).unwrap_or_default();
    children.iter().filter(|child| child.is_folder).for_each(|child| list(models, child.inode));
}

/// A device and, as soon as it is mounted, the exports that show it.
#[derive(Clone)]
pub struct Control {
    pub(super) device: Arc<Device>,
    /// Whose control this is: none for everything.
    pub(super) only: Option<(Partition, Place)>,
    exports: Arc<OnceLock<Vec<Arc<Export>>>>,
    /// Where the guest ports' sockets are.
    run_dir: Option<Arc<Path>>,
    disks: Arc<Mutex<Vec<Weak<dyn ServedDisk>>>>,
    models: Arc<OnceLock<Arc<Models>>>,
    /// The files, and where they are mounted.
    files: Arc<OnceLock<(Arc<Files>, PathBuf)>>,
    no_files: Arc<OnceLock<String>>,
    pools: Arc<OnceLock<Arc<Pools>>>,
    cold_pages: Arc<OnceLock<Arc<ColdPages>>>,
    /// Held while a host's access is taken away.
    revoking: Arc<Mutex<()>>,
    detaching: Arc<Detaching>,
    /// What the program adds to the API.
    pub(super) additions: Additions,
}

/// Why something asked was not done.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The mount failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A model cannot be loaded, or there is none.
    #[error(transparent)]
    Files(Box<FilesError>),
    /// A mapped file cannot be written back.
    #[error("files/ cannot be brought to the device: {0}")]
    FilesUnsettled(#[source] io::Error),
    /// There is nowhere to show models.
    #[error(
        "this device shows no models: it has no mount (yet), or it is divided among guests or shared by hosts; `lamina mount`, or `lamina serve --mount DIR` without --guest and --host, shows some"
    )]
    NoModels,
    /// A disk of one view shows a view that is not there any more.
    #[error(
        "the view {tensor},{view} that this disk shows is gone: it or its tensor was removed, or the tensor resized; serve it anew to show what there is now"
    )]
    ViewGone {
        /// The tensor.
        tensor: String,
        /// The view's spelling.
        view: String,
    },
    /// To clear this poison would lose names.
    #[error(
        "the damage at these addresses is in the log of files/, {length} bytes at {dpa:#x}: with zeros there every name after it would be lost. A snapshot from before has the names; `lamina discard {dpa} {length}` begins files/ anew, with nothing in it, when the device is started next"
    )]
    LogOfFiles {
        /// Where it begins.
        dpa: u64,
        /// Its bytes.
        length: u64,
    },
    /// To discard this would lose what files hold.
    #[error(
        "{length} bytes at {dpa:#x} are {tensor}, in which files/ keeps what it holds: remove files there. A log of them that is damaged, so that files/ is not shown, can be discarded whole"
    )]
    OfFiles {
        /// What of them it is.
        tensor: String,
        /// Where it begins.
        dpa: u64,
        /// Its bytes.
        length: u64,
    },
    /// There is no such host.
    #[error("no host {host} shares this memory; {}", there_are(hosts))]
    NoHost {
        /// The name.
        host: String,
        /// Those that share it.
        hosts: Vec<String>,
    },
    /// The host that asks may not ask any more.
    #[error(
        "the access of this host, {host}, was revoked: its stores reach nobody. When it is started anew, `lamina pool fence --undo {host}` gives it back"
    )]
    Revoked {
        /// The host.
        host: String,
    },
    /// The log of `files/` cannot be written anew.
    #[error("the log of files/ stays as it is: {0}")]
    Log(FileError),
}

impl From<FilesError> for ControlError {
    fn from(why: FilesError) -> Self {
        Self::Files(Box::new(why))
    }
}

/// What hosts there are, for who named another.
fn there_are(hosts: &[String]) -> String {
    match hosts {
        [] => "it has no hosts, which `lamina serve --host` makes".to_owned(),
        hosts => format!("there are: {}", hosts.join(", ")),
    }
}

/// An export and the socket that its guest's control port is to be connected to.
#[derive(Clone, Debug, Serialize)]
pub struct ServedExport {
    /// The export.
    #[serde(flatten)]
    pub export: ExportReport,
    /// The socket.
    pub ctl: PathBuf,
}

/// All counters of a served device.
#[derive(Clone, Debug, Serialize)]
pub struct ServedStats {
    /// The device's.
    #[serde(flatten)]
    pub device: StatsReport,
    /// Each host's, in the order they were named; none unless hosts share the device without
    /// coherence.
    pub hosts: Vec<HostReport>,
    /// What is told of `files/`, if there are any.
    pub files: Option<FilesReport>,
    /// What the page cache holds of the mount's files, if it is bounded.
    pub page_cache: Option<PageCacheReport>,
    /// What pools on the mount tell.
    #[serde(flatten)]
    pub pools: PoolsReport,
}

/// What the mount's folders hold.
#[derive(Clone, Debug, Serialize)]
pub struct FoldersReport {
    /// Of `models/`.
    #[serde(flatten)]
    pub models: ModelsReport,
    /// Of `files/`, if there is one.
    pub files: Option<FilesReport>,
    /// Why there is none although the device has files.
    pub no_files: Option<String>,
}

impl Control {
    /// The control of a whole device that is not mounted, or not yet.
    pub fn new(device: Arc<Device>) -> Self {
        Self {
            device,
            only: None,
            exports: Arc::default(),
            run_dir: None,
            disks: Arc::default(),
            models: Arc::default(),
            files: Arc::default(),
            no_files: Arc::default(),
            pools: Arc::default(),
            cold_pages: Arc::default(),
            revoking: Arc::default(),
            detaching: Arc::default(),
            additions: Additions::default(),
        }
    }

    /// The same, which tells guests' sockets in `run_dir`: see [`Place::socket`].
    #[must_use]
    pub fn with_sockets_in(self, run_dir: &Path) -> Self {
        Self { run_dir: Some(run_dir.into()), ..self }
    }

    /// The same, with what the program adds to the API.
    #[must_use]
    pub fn with(self, additions: Additions) -> Self {
        Self { additions, ..self }
    }

    /// The control of one export: what its guest or host may ask.
    #[must_use]
    pub fn of_export(&self, partition: Partition, place: Place) -> Self {
        Self { only: Some((partition, place)), ..self.clone() }
    }

    /// Says that the device is mounted now. Once is enough: later calls and those of clones change
    /// nothing.
    pub fn mounted(&self, exports: &[Arc<Export>]) {
        self.exports.get_or_init(|| exports.to_vec());
    }

    /// Says that the mount has a folder of models. Once is enough.
    pub fn shows(&self, models: &Arc<Models>) {
        self.models.get_or_init(|| Arc::clone(models));
    }

    /// Says that the mount has files in this folder. Once is enough.
    pub fn has_files(&self, files: &Arc<Files>, folder: &Path) {
        self.files.get_or_init(|| (Arc::clone(files), folder.to_owned()));
    }

    /// Brings to the device everything that was stored into the base window and into files.
    ///
    /// # Errors
    ///
    /// As [`Control::flush`], or when a file cannot be written back.
    pub fn flush_all(&self) -> Result<(), ControlError> {
        if let Some((files, folder)) = self.files.get() {
            settle_files(files, folder, SETTLE, SETTLE, &|| ()).map_err(ControlError::FilesUnsettled)?;
        }
        self.flush(0, None)
    }

    /// Says who looks at pools on the mount. Once is enough.
    pub(super) fn has_pools(&self, pools: &Arc<Pools>) {
        self.pools.get_or_init(|| Arc::clone(pools));
    }

    /// Says who bounds the page cache. Once is enough.
    pub(super) fn is_bounded_by(&self, cold_pages: &Arc<ColdPages>) {
        self.cold_pages.get_or_init(|| Arc::clone(cold_pages));
    }

    /// Says why the mount has no folder of files although the device has some. Once is enough.
    pub fn has_no_files(&self, why: &str) {
        self.no_files.get_or_init(|| why.to_owned());
    }

    /// What the mount's folders hold.
    ///
    /// # Errors
    ///
    /// [`ControlError::NoModels`] where there is none.
    pub fn folders(&self) -> Result<FoldersReport, ControlError> {
        let files = self.files.get().map(|(files, _)| FilesReport::of(files));
        let models = self.models()?;
        let mut report = models.report();
        let lacks = |folder: &Arc<Folder>| {
            let manifest = &folder.model.manifest;
            let told = report.models.iter().filter(|told| told.name == manifest.name);
            let told = told.flat_map(|told| &told.files).flat_map(|file| &file.views);
            let told: BTreeSet<_> = told.map(|view| view.view.as_str()).collect();
            manifest.precisions().iter().any(|precision| !told.contains(precision.to_string().as_str()))
        };
        // What folders show from the beginning is told of, also if nobody has listed them.
        if models.folders().iter().any(lacks) {
            list(models, MODELS);
            report = models.report();
        }
        Ok(FoldersReport { models: report, files, no_files: self.no_files.get().cloned() })
    }

    /// The models, where there is a folder of them.
    ///
    /// # Errors
    ///
    /// [`ControlError::NoModels`] where there is none.
    pub fn models(&self) -> Result<&Arc<Models>, ControlError> {
        self.models.get().ok_or(ControlError::NoModels)
    }

    /// Loads what is at `path` as the model `name`, unless it is given up meanwhile.
    ///
    /// # Errors
    ///
    /// What is wrong with it, or why the device does not take it; then nothing of it stays.
    pub fn load_model(
        &self,
        path: &Path,
        name: &str,
        loading: &Loading,
        is_given_up: impl Fn() -> bool + Sync,
    ) -> Result<ModelReport, ControlError> {
        let models = self.models()?;
        // What was stored into the window and waits in the page cache shows where there is room.
        self.flush(0, None)?;
        let loaded = |dpa: u64, length: u64| {
            self.exports_over(&(dpa..dpa + length)).into_iter().try_for_each(|(export, part)| {
                let seen = export.coherence().written_beside(part.start, part.end - part.start);
                seen.map_err(|why| FilesError::Manifest { name: name.to_owned(), why: why.to_string() })
            })
        };
        let report = models.load(path, name, loading, is_given_up, loaded, self.dropping(name));
        // A load that failed had tensors for a while, too.
        let changed = self.directories_changed(&[0], &[]);
        let report = report?;
        changed?;
        Ok(report)
    }

    /// The model `name` that the device holds already, if what is at `path` is that, to be shown as
    /// it is.
    ///
    /// # Errors
    ///
    /// That there is none, or what is another.
    pub fn keep_model(
        &self,
        path: &Path,
        name: &str,
        loading: &Loading,
    ) -> Result<ModelReport, ControlError> {
        let models = self.models()?;
        let unknown = || FilesError::Unknown { name: name.to_owned() };
        let folder = models.folder(name).ok_or_else(unknown)?;
        let plan = ModelPlan::open(path, name)?;
        files::check_kept(&self.device, &folder.model, &plan, loading, |_| ControlFlow::Continue(()))?;
        let kept = models.report().models.into_iter().find(|model| model.name == name);
        Ok(kept.ok_or_else(unknown)?)
    }

    /// Removes a model and what it holds.
    ///
    /// # Errors
    ///
    /// If there is none of the name, or the device cannot remove it.
    pub fn remove_model(&self, name: &str) -> Result<(), ControlError> {
        let removed = self.models()?.remove(name, self.dropping(name));
        // A removal that failed may have come to some of its tensors.
        let changed = self.directories_changed(&[0], &[]);
        removed?;
        changed
    }

    /// Drops a range of the base window that a model was in.
    fn dropping(&self, name: &str) -> impl Fn(u64, u64) -> Result<(), FilesError> {
        move |dpa, length| {
            let length = length.next_multiple_of(BLOCK_BYTES as u64);
            let wrong =
                |why: ControlError| FilesError::Manifest { name: name.to_owned(), why: why.to_string() };
            self.discard(dpa, length).map_err(wrong)
        }
    }

    /// The exports that this control is of, once they are mounted.
    pub fn exports(&self) -> Vec<&Arc<Export>> {
        let all = self.exports.get().map(Vec::as_slice).unwrap_or_default();
        let is_mine =
            |export: &&Arc<Export>| self.only.as_ref().is_none_or(|(_, place)| export.place() == place);
        all.iter().filter(is_mine).collect()
    }

    /// The device numbers of the mounts of this control: of the windows, and of the device's files
    /// if they have one of their own, which others may answer later or not any more.
    pub(super) fn mount_numbers(&self) -> io::Result<Vec<u64>> {
        let windows = self.exports().first().and_then(|export| export.coherence().mount_number());
        windows.map_or(Ok(Vec::new()), mount_point::numbers_beside)
    }

    /// The exports, each with its guest's socket.
    pub fn served_exports(&self) -> Vec<ServedExport> {
        let run_dir = self.run_dir.as_deref().unwrap_or(Path::new(""));
        let served = |export: &Arc<Export>| ServedExport {
            export: export.report(),
            ctl: run_dir.join(export.place().socket()),
        };
        self.exports().into_iter().map(served).collect()
    }

    /// All tensors.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        self.only.as_ref().map_or_else(|| self.device.tensors(), |(partition, _)| partition.tensors())
    }

    /// All views.
    pub fn views(&self) -> Vec<ViewInfo> {
        self.only.as_ref().map_or_else(|| self.device.views(), |(partition, _)| partition.views())
    }

    /// All disks that are being served, in the order they were made.
    pub fn disks(&self) -> Vec<DiskInfo> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        disks.iter().filter_map(Weak::upgrade).map(|disk| disk.info()).collect()
    }

    /// Says that a disk is being served.
    pub(super) fn served(&self, disk: &Arc<dyn ServedDisk>) {
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        disks.retain(|disk| disk.strong_count() > 0);
        disks.push(Arc::downgrade(disk));
    }

    /// All counters of the device.
    pub fn stats(&self) -> ServedStats {
        let hosts = self.exports().into_iter().filter_map(|export| export.host_report()).collect();
        let files = self.files.get().map(|(files, _)| FilesReport::of(files));
        let pools = self.pools.get().map(|pools| pools.report()).unwrap_or_default();
        let page_cache = self.cold_pages.get().map(|cold| cold.report());
        ServedStats { device: self.device.stats(), hosts, files, page_cache, pools }
    }

    /// The counters that this control is of: of the whole device, or of a partition and, of a host,
    /// its cache's.
    pub fn own_stats(&self) -> serde_json::Value {
        let Some((partition, _)) = &self.only else { return serde_json::json!(self.stats()) };
        let mut stats = serde_json::json!(partition.stats());
        if let Some(host) = self.exports().first().and_then(|export| export.host_report()) {
            stats["host"] = serde_json::json!(host);
        }
        stats
    }

    /// Makes a tensor over bytes that keep their values.
    ///
    /// # Errors
    ///
    /// When the device refuses it, for example for lack of room.
    pub fn create_tensor(&self, spec: TensorSpec) -> Result<TensorInfo, ControlError> {
        let made = self.create_tensors(vec![spec])?;
        Ok(made.into_iter().next().expect("one for one"))
    }

    /// Makes tensors over bytes that keep their values, all of them or none.
    ///
    /// # Errors
    ///
    /// When the device refuses one of them.
    pub fn create_tensors(&self, specs: Vec<TensorSpec>) -> Result<Vec<TensorInfo>, ControlError> {
        let made = match &self.only {
            Some((partition, _)) => partition.create_tensors(specs)?,
            None => self.device.create_tensors(specs)?,
        };
        let start = self.base().start;
        let dpas: Vec<_> = made.iter().map(|tensor| start + tensor.dpa).collect();
        self.directories_changed(&dpas, &[])?;
        Ok(made)
    }

    /// Removes a tensor and its views; its bytes stay.
    ///
    /// # Errors
    ///
    /// When there is no such tensor.
    pub fn remove_tensor(&self, name: &str) -> Result<(), ControlError> {
        let dpa = self.base().start + self.tensor(name)?.dpa;
        let views = match &self.only {
            Some((partition, _)) => partition.remove_tensor_with_views(name)?,
            None => self.device.remove_tensor_with_views(name)?,
        };
        self.directories_changed(&[dpa], &self.places(&views))
    }

    /// Makes a tensor longer or shorter where it is; what is cut off stays, as bytes of nobody.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, or the bytes behind it or behind one of its views are not
    /// free.
    pub fn resize_tensor(&self, name: &str, length: u64) -> Result<TensorInfo, ControlError> {
        let (tensor, views) = match &self.only {
            Some((partition, _)) => partition.resize_tensor_with_views(name, length)?,
            None => self.device.resize_tensor_with_views(name, length)?,
        };
        let mut shown = self.places(&views);
        shown.extend(self.shown_of(name));
        self.directories_changed(&[self.base().start + tensor.dpa], &shown)?;
        Ok(tensor)
    }

    /// Stores a tensor by itself, so that it has no base. One that has none stays as it is.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, or no room; then it has its base.
    pub fn detach_tensor(&self, name: &str) -> Result<TensorInfo, ControlError> {
        let info = self.tensor(name)?;
        self.detach(name, &[info]).map(|mut detached| detached.remove(0))
    }

    /// The same, of all tensors of a model that have a base: these.
    ///
    /// # Errors
    ///
    /// When there is no such model, or no room; then some have their bases.
    pub fn detach_model(&self, name: &str) -> Result<Vec<TensorInfo>, ControlError> {
        let unknown = || FilesError::Unknown { name: name.to_owned() };
        let model = self.models()?.folder(name).ok_or_else(unknown)?;
        let tensors = model.model.manifest.tensors().filter_map(|tensor| self.tensor(tensor).ok());
        let derived: Vec<_> = tensors.filter(|tensor| tensor.base.is_some()).collect();
        self.detach(name, &derived)
    }

    fn detach(&self, name: &str, tensors: &[TensorInfo]) -> Result<Vec<TensorInfo>, ControlError> {
        let job = self.detaching.begin(name, tensors.iter().map(|tensor| tensor.length).sum());
        let mut before = 0;
        let mut detached = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let progress = |bytes| job.tell(before + bytes);
            detached.push(match &self.only {
                Some((partition, _)) => partition.detach_tensor(&tensor.name, progress)?,
                None => self.device.detach_tensor(&tensor.name, progress)?,
            });
            before += tensor.length;
        }
        Ok(detached)
    }

    /// What is being detached, in the order that was asked.
    pub fn detaching(&self) -> Vec<DetachReport> {
        self.detaching.reports()
    }

    /// Ends what is being detached: it has its base then.
    pub fn stop_detaching(&self) {
        self.detaching.stop();
    }

    /// Makes a view.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, its format cannot give the view, or the views window is full.
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, ControlError> {
        let view = match &self.only {
            Some((partition, _)) => partition.create_view(tensor, spelling)?,
            None => self.device.create_view(tensor, spelling)?,
        };
        self.view_changed(&view)?;
        Ok(view)
    }

    /// Removes a view: what it was. Its place reads as zeros until another comes there.
    ///
    /// # Errors
    ///
    /// When there is no such view.
    pub fn remove_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, ControlError> {
        let view = match &self.only {
            Some((partition, _)) => partition.remove_view(tensor, spelling)?,
            None => self.device.remove_view(tensor, spelling)?,
        };
        self.view_changed(&view)?;
        Ok(view)
    }

    /// The tensor of this name.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorInfo, ControlError> {
        Ok(match &self.only {
            Some((partition, _)) => partition.tensor(name)?,
            None => self.device.tensor(name)?,
        })
    }

    /// What is stored of a window of a lossy tensor, none if that is exact.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, or it is not lossy or has not so many windows.
    pub fn packed_window(&self, name: &str, window: u64) -> Result<Option<Vec<u8>>, ControlError> {
        Ok(match &self.only {
            Some((partition, _)) => partition.packed_window(name, window)?,
            None => self.device.packed_window(name, window)?,
        })
    }

    /// Drops a view that came or went, and the directory, from all page caches.
    fn view_changed(&self, view: &ViewInfo) -> Result<(), ControlError> {
        let start = self.views_window().start;
        let Range { start: from, end } = place(view);
        // A view is in the partition that its place is in.
        let part = Partition::all(&self.device)
            .into_iter()
            .find(|part| part.views_window().contains(&(start + from)))
            .map_or(0, |part| part.base().start);
        self.directories_changed(&[part], std::slice::from_ref(&(start + from..start + end)))
    }

    /// Where a tensor's views are in the device's views window.
    fn shown_of(&self, name: &str) -> Vec<Range<u64>> {
        self.places(&match &self.only {
            Some((partition, _)) => partition.views_of(name),
            None => self.device.views_of(name),
        })
    }

    /// Where views of this control are in the device's views window.
    fn places(&self, views: &[ViewInfo]) -> Vec<Range<u64>> {
        let start = self.views_window().start;
        views.iter().map(place).map(|range| start + range.start..start + range.end).collect()
    }

    /// The coherence fence over `length` bytes of the base window, to its end if not given: see
    /// [`Coherence::flush`]. What it brings to the device is coded then: see [`Device::flush`]. Of
    /// a host: writes back what it stored there.
    ///
    /// # Errors
    ///
    /// When the range begins past the end, or dirty pages cannot be written back.
    pub fn flush(&self, offset: u64, length: Option<u64>) -> Result<(), ControlError> {
        let range = self.range(offset, length)?;
        for (export, part) in self.exports_over(&range) {
            export.coherence().flush(part.start, part.end - part.start)?;
        }
        let length = range.end - range.start;
        match &self.only {
            Some((partition, _)) => partition.flush(range.start - partition.base().start, length)?,
            None => self.device.flush(range.start, length)?,
        }
        // What a host whose access went meanwhile had stored was dropped, and not flushed.
        self.may_ask()
    }

    /// Drops what a host holds of `length` bytes of the base window, to its end if not given: see
    /// [`Coherence::invalidate`]. Others are coherent and hold nothing that would have to be
    /// dropped.
    ///
    /// # Errors
    ///
    /// When the range begins past the end, or what the host stored there cannot be written back.
    pub fn invalidate(&self, offset: u64, length: Option<u64>) -> Result<(), ControlError> {
        let range = self.range(offset, length)?;
        for (export, part) in self.exports_over(&range) {
            export.coherence().invalidate(part.start, part.end - part.start)?;
        }
        self.may_ask()
    }

    /// Drops base bytes: they read as zero afterwards. A host that holds some of them keeps what it
    /// holds.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, or touches what `files/` keeps.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        let range = self.range(offset, Some(length))?;
        let lost = lost_by_discard(&self.device, &range, self.files.get().is_some());
        if let Some((tensor, dpa, length)) = lost {
            return Err(ControlError::OfFiles { tensor, dpa, length });
        }
        for partition in Partition::all(&self.device) {
            let Some(part) = inside(&partition, &range) else { continue };
            let length = part.end - part.start;
            let coherent = self
                .exports()
                .into_iter()
                .find(|export| export.cache().is_none() && export.partition().base() == partition.base());
            match coherent {
                Some(export) => export.coherence().discard(part.start, length)?,
                None => partition.discard(part.start, length)?,
            }
        }
        Ok(())
    }

    /// Takes a host's access to the region away. What it asked before may still be done, but no
    /// flush of it succeeds any more. When this returns, none of its stores reaches the
    /// device any more, and its loads are poison. Of a host's control, those can be named with
    /// which it shares the region.
    ///
    /// # Errors
    ///
    /// When there is no such host, the asking one's access was revoked, or the mount is going away.
    pub fn revoke(&self, host: &str) -> Result<(), ControlError> {
        let export = self.host(host)?;
        {
            // Of two hosts that revoke each other one is first, and the other has no say any more.
            let _one_by_one = self.revoking.lock().unwrap_or_else(PoisonError::into_inner);
            self.may_ask()?;
            export.coherence().revoke()?;
        }
        export.coherence().drop_all()?;
        tracing::warn!(host, by = self.place().map(Place::name), "a host's access is revoked");
        Ok(())
    }

    /// Gives a host its access back: it begins as one that holds nothing.
    ///
    /// # Errors
    ///
    /// When there is no such host, or the mount is going away.
    pub fn admit(&self, host: &str) -> Result<(), ControlError> {
        self.host(host)?.coherence().admit()?;
        tracing::info!(host, "a host's access is given back");
        Ok(())
    }

    /// Refuses whatever is asked by a host whose access was revoked.
    ///
    /// # Errors
    ///
    /// [`ControlError::Revoked`].
    pub(super) fn may_ask(&self) -> Result<(), ControlError> {
        if self.only.is_none() {
            return Ok(());
        }
        let revoked = |export: &&Arc<Export>| export.cache().is_some_and(|cache| cache.is_revoked());
        match self.exports().into_iter().find(revoked) {
            Some(export) => Err(ControlError::Revoked { host: export.place().name().to_owned() }),
            None => Ok(()),
        }
    }

    /// The export of a host, of those that share the region that this control is of.
    fn host(&self, name: &str) -> Result<&Arc<Export>, ControlError> {
        let shares = |export: &&Arc<Export>| {
            let base = export.partition().base();
            export.cache().is_some() && self.only.as_ref().is_none_or(|(own, _)| own.base() == base)
        };
        let hosts = || self.exports.get().into_iter().flatten().filter(shares);
        hosts().find(|export| export.place().name() == name).ok_or_else(|| ControlError::NoHost {
            host: name.to_owned(),
            hosts: hosts().map(|export| export.place().name().to_owned()).collect(),
        })
    }

    /// The last events.
    pub fn events(&self) -> Vec<Event> {
        self.device.events()
    }

    /// The poisoned blocks.
    pub fn poison(&self) -> Vec<Poisoned> {
        self.device.poison()
    }

    /// Poisons every block that a base range touches: what it held is lost.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, or the device keeps no checks.
    pub fn inject_poison(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        let blocks = whole_blocks(offset, length);
        self.change_base(&blocks, |device| device.inject_poison(offset, length))
    }

    /// Clears the poison of a base range: its poisoned blocks read as zero afterwards. A log of
    /// `files/` that is damaged there is written anew.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, or a damaged log is not served.
    pub fn clear_poison(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        let blocks = whole_blocks(offset, length);
        // What is served knows what its log said.
        if let Some((dpa, length)) = damaged_log(&self.device, &blocks) {
            let (files, _) = self.files.get().ok_or(ControlError::LogOfFiles { dpa, length })?;
            files.renew_log().map_err(ControlError::Log)?;
        }
        self.change_base(&blocks, |device| device.clear_poison(offset, length))
    }

    /// Drops ranges (offset, length) of the views window from the page cache of its export: loads
    /// of them go to the device again, as they would from behind a cache that is smaller than what
    /// is read. What passes the window's end is ignored.
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub fn evict(&self, ranges: impl IntoIterator<Item = (u64, u64)>) -> Result<(), ControlError> {
        let Some((partition, _)) = &self.only else { return Ok(()) };
        let end = partition.views_bytes();
        let clipped = |(offset, length): (u64, u64)| offset.min(end)..offset.saturating_add(length).min(end);
        let ranges: Vec<_> = ranges.into_iter().map(clipped).collect();
        for export in self.exports() {
            export.coherence().views_changed(ranges.iter().cloned())?;
        }
        Ok(())
    }

    /// Whose partition of the device this control is of, if it is a guest's or a host's.
    pub(super) fn place(&self) -> Option<&Place> {
        self.only.as_ref().map(|(_, place)| place)
    }

    /// This control's base window as a range of the device's.
    pub(super) fn base(&self) -> Range<u64> {
        self.only.as_ref().map_or(0..self.device.base_bytes(), |(partition, _)| partition.base())
    }

    /// This control's views window as a range of the device's.
    pub(super) fn views_window(&self) -> Range<u64> {
        self.only.as_ref().map_or(0..self.device.views_bytes(), |(partition, _)| partition.views_window())
    }

    /// Whether there is still this view, of this control's.
    pub(super) fn has_view(&self, view: &ViewInfo) -> bool {
        match &self.only {
            Some((partition, _)) => partition.views().contains(view),
            None => self.device.has_view(view),
        }
    }

    /// A range of this control's base window as one of the device's.
    pub(super) fn range(&self, offset: u64, length: Option<u64>) -> Result<Range<u64>, ServeError> {
        let window = self.base();
        let bytes = window.end - window.start;
        within(&window, offset, length.unwrap_or(bytes.saturating_sub(offset)))
    }

    /// A range of this control's views window as one of the device's.
    pub(super) fn views_range(&self, offset: u64, length: u64) -> Result<Range<u64>, ServeError> {
        within(&self.views_window(), offset, length)
    }

    /// This control's exports over `range` of the device's base window, each with the part it has
    /// of it, in its own offsets.
    fn exports_over(&self, range: &Range<u64>) -> Vec<(&Arc<Export>, Range<u64>)> {
        let exports = self.exports().into_iter();
        exports.filter_map(|export| Some((export, inside(export.partition(), range)?))).collect()
    }

    /// Drops the directories of the partitions that have these DPAs, and these ranges of the
    /// device's views window, from all page caches.
    fn directories_changed(&self, dpas: &[u64], views: &[Range<u64>]) -> Result<(), ControlError> {
        // All that show the partition, whoever asked.
        for export in self.exports.get().into_iter().flatten() {
            let base = export.partition().base();
            // A tensor of no length may lie at the very end.
            if dpas.iter().any(|dpa| base.contains(dpa) || base.end == *dpa) {
                let Range { start, end } = export.partition().views_window();
                let own = views.iter().filter(|view| (start..end).contains(&view.start));
                let own = own.map(|view| view.start - start..view.end - start);
                export.coherence().views_changed(std::iter::once(0..DIRECTORY_BYTES).chain(own))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use lamina_codec::{format::Format, kv::KvLayout};
    use lamina_device::device::DeviceConfig;
    use lamina_device::layout::Layout;
    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::fuse::{Mount, MountOptions};
    use crate::held_mount::fuse_present;
    use crate::mount_point::MountPoint;

    /// What the page cache has of the first page of a directory, or is given when it has nothing.
    fn directory(views: &File) -> Vec<u8> {
        let mut page = vec![0; 4096];
        views.read_exact_at(&mut page, 0).unwrap();
        page
    }

    #[test]
    fn a_view_that_was_made_while_its_tensor_went_shows_nothing_of_that() {
        const LENGTH: usize = 8 << 20;
        if let Err(why) = fuse_present() {
            return lamina_skipped::test(why);
        }
        let folder = tempfile::tempdir().unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        let point = MountPoint::prepare(&folder.path().join("mount")).unwrap();
        let mount = Mount::new(&device, point, &MountOptions::default()).unwrap();
        let control = Control::new(device);
        mount.tell(&control);
        let base = File::options().write(true).open(mount.base_path()).unwrap();
        let views = File::open(mount.views_path()).unwrap();
        let noise = lamina_codec::testing::bytes(7, LENGTH);
        let layout = Layout::Kv(KvLayout::rows(256, 128));
        let spec = TensorSpec { layout, ..TensorSpec::new("kv", Some(0), LENGTH as u64, Format::Bf16) };
        let mut page = vec![0; 4096];
        for _ in 0..100 {
            control.create_tensor(spec.clone()).unwrap();
            base.write_all_at(&noise, 0).unwrap();
            control.flush(0, None).unwrap();
            let seen = std::thread::scope(|scope| {
                // Its windows are coded block by block first.
                let removing = scope.spawn(|| control.remove_tensor("kv"));
                std::thread::sleep(Duration::from_millis(2));
                let view = control.create_view("kv", "full").ok();
                if let Some(view) = &view {
                    views.read_exact_at(&mut page, view.offset).unwrap();
                }
                removing.join().unwrap().unwrap();
                view
            });
            let Some(view) = seen else { continue };
            assert!(control.views().is_empty() && control.tensors().is_empty());
            let is_seen = page == noise[..4096];
            views.read_exact_at(&mut page, view.offset).unwrap();
            assert!(page.iter().all(|byte| *byte == 0), "what is gone shows");
            if is_seen {
                return;
            }
        }
        panic!("no view was made and read before its tensor was gone");
    }

    #[test]
    fn a_directory_names_nothing_of_a_model_whose_load_failed() {
        if let Err(why) = fuse_present() {
            return lamina_skipped::test(why);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let noise = lamina_codec::testing::bytes(5, 48 << 20);
        let length = noise.len();
        let header = format!(
            r#"{{"weight":{{"dtype":"BF16","shape":[{}],"data_offsets":[0,{length}]}}}}"#,
            length / 2
        );
        let start = (header.len() as u64).to_le_bytes();
        fs::write(&path, [&start[..], header.as_bytes(), &noise].concat()).unwrap();
        let config = DeviceConfig { store_bytes: Some(34 << 20), ..DeviceConfig::new(64 << 20, 8 << 20) };
        let device = Arc::new(Device::new(config).unwrap());
        let point = MountPoint::prepare(&folder.path().join("mount")).unwrap();
        let mount = Mount::new(&device, point, &MountOptions::default()).unwrap();
        let control = Control::new(device);
        mount.tell(&control);
        let views = File::open(mount.views_path()).unwrap();
        let is_named = |page: &[u8]| page.windows(8).any(|bytes| bytes == b"m/weight");
        let loaded = std::thread::scope(|scope| {
            let loading = scope.spawn(|| control.load_model(&path, "m", &Loading::default(), || false));
            let mut seen = false;
            while !seen && !loading.is_finished() {
                // So that the device is asked.
                fadvise(&views, 0, None, Advice::DontNeed).unwrap();
                seen = is_named(&directory(&views));
            }
            assert!(seen, "its tensor is there for a while");
            loading.join().unwrap()
        });
        let why = loaded.unwrap_err().to_string();
        assert!(why.contains("full") && control.tensors().is_empty(), "{why}");
        assert!(!is_named(&directory(&views)));
    }
}
