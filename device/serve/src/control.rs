//! What can be asked of a served device, the same for people (the API), guests (the guest ports) and programs.
//!
//! Every change goes through here rather than to the device itself, because a change may need dirty pages to reach the
//! device before it, and pages of the views window dropped after it. All of these sleep on the mount: async servers call
//! them from blocking threads.
//!
//! A control is of the whole device, in the device's offsets and names, or of one pair of files, in those of its partition: then it neither reaches nor names anything else.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use lamina_abi::DIRECTORY_BYTES;
use serde::Serialize;

use lamina_codec::BLOCK_BYTES;
use lamina_device::device::events::Event;
use lamina_device::device::poison::Poisoned;
use lamina_device::device::{Device, DeviceError, Partition};
use lamina_device::files::{FilesError, Loading};
use lamina_device::stats::StatsReport;
use lamina_device::tensor::{TensorInfo, TensorSpec};
use lamina_device::window::ViewInfo;

#[cfg(doc)]
use super::Coherence;
use super::ServeError;
use super::disks::{DiskInfo, ServedDisk};
use super::host_cache::HostReport;
use super::models::{ModelReport, Models};
use super::pair::{Pair, PairReport, Place};

/// A device and, as soon as it is mounted, the pairs of files that show it.
#[derive(Clone)]
pub struct Control {
    pub(super) device: Arc<Device>,
    /// Whose control this is: none for everything.
    only: Option<(Partition, Place)>,
    pairs: Arc<OnceLock<Vec<Arc<Pair>>>>,
    /// Where the guest ports' sockets are.
    run_dir: Option<Arc<Path>>,
    disks: Arc<Mutex<Vec<Weak<dyn ServedDisk>>>>,
    models: Arc<OnceLock<Arc<Models>>>,
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
    /// There is nowhere to show models.
    #[error("this device shows no models: it is not mounted (yet), divided among guests, or shared by hosts")]
    NoModels,
}

impl From<FilesError> for ControlError {
    fn from(why: FilesError) -> Self {
        Self::Files(Box::new(why))
    }
}

/// A pair of files and the socket that its guest's control port is to be connected to.
#[derive(Clone, Debug, Serialize)]
pub struct Seat {
    /// The pair.
    #[serde(flatten)]
    pub pair: PairReport,
    /// The socket.
    pub ctl: PathBuf,
}

/// All counters of a served device.
#[derive(Clone, Debug, Serialize)]
pub struct ServedStats {
    /// The device's.
    #[serde(flatten)]
    pub device: StatsReport,
    /// Each host's, in the order they were named; none unless hosts share the device without coherence.
    pub hosts: Vec<HostReport>,
}

impl Control {
    /// The control of a whole device that is not mounted, or not yet.
    pub fn new(device: Arc<Device>) -> Self {
        let (disks, models) = (Arc::default(), Arc::default());
        Self { device, only: None, pairs: Arc::default(), run_dir: None, disks, models }
    }

    /// The same, which tells guests' sockets in `run_dir`: see [`Place::socket`].
    #[must_use]
    pub fn with_sockets_in(self, run_dir: &Path) -> Self {
        Self { run_dir: Some(run_dir.into()), ..self }
    }

    /// The control of one pair of files: what its guest or host may ask.
    #[must_use]
    pub fn of_pair(&self, partition: Partition, place: Place) -> Self {
        Self { only: Some((partition, place)), ..self.clone() }
    }

    /// Says that the device is mounted now. Once is enough: later calls and those of clones change nothing.
    pub fn mounted(&self, pairs: &[Arc<Pair>]) {
        self.pairs.get_or_init(|| pairs.to_vec());
    }

    /// Says that the mount has a folder of models. Once is enough.
    pub fn shows(&self, models: &Arc<Models>) {
        self.models.get_or_init(|| Arc::clone(models));
    }

    /// The models, where there is a folder of them.
    ///
    /// # Errors
    ///
    /// [`ControlError::NoModels`] where there is none.
    pub fn models(&self) -> Result<&Arc<Models>, ControlError> {
        self.models.get().ok_or(ControlError::NoModels)
    }

    /// Loads what is at `path` as the model `name`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, or why the device does not take it; then nothing of it stays.
    pub fn load_model(
        &self,
        path: &Path,
        name: &str,
        loading: &Loading,
    ) -> Result<ModelReport, ControlError> {
        let models = self.models()?;
        // What was stored into the window and waits in the page cache shows where there is room.
        self.flush(0, None)?;
        let loaded = |dpa: u64, length: u64| {
            self.pairs_over(&(dpa..dpa + length)).into_iter().try_for_each(|(pair, part)| {
                let seen = pair.coherence().written_beside(part.start, part.end - part.start);
                seen.map_err(|why| FilesError::Manifest { name: name.to_owned(), why: why.to_string() })
            })
        };
        let report = models.load(path, name, loading, loaded)?;
        self.directory_changed(0, &mut std::iter::empty())?;
        Ok(report)
    }

    /// Removes a model and what it holds.
    ///
    /// # Errors
    ///
    /// If there is none of the name, or the device cannot remove it.
    pub fn remove_model(&self, name: &str) -> Result<(), ControlError> {
        let dropped = |dpa: u64, length: u64| {
            let length = length.next_multiple_of(BLOCK_BYTES as u64);
            let wrong =
                |why: ControlError| FilesError::Manifest { name: name.to_owned(), why: why.to_string() };
            self.discard(dpa, length).map_err(wrong)
        };
        self.models()?.remove(name, dropped)?;
        self.directory_changed(0, &mut std::iter::empty())
    }

    /// The pairs of files that this control is of, once they are mounted.
    pub fn pairs(&self) -> Vec<&Arc<Pair>> {
        let all = self.pairs.get().map(Vec::as_slice).unwrap_or_default();
        let is_mine = |pair: &&Arc<Pair>| self.only.as_ref().is_none_or(|(_, place)| pair.place() == place);
        all.iter().filter(is_mine).collect()
    }

    /// The pairs of files, each with its guest's socket.
    pub fn seats(&self) -> Vec<Seat> {
        let run_dir = self.run_dir.as_deref().unwrap_or(Path::new(""));
        let seat = |pair: &Arc<Pair>| Seat { pair: pair.report(), ctl: run_dir.join(pair.place().socket()) };
        self.pairs().into_iter().map(seat).collect()
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
        let hosts = self.pairs().into_iter().filter_map(|pair| pair.host_report()).collect();
        ServedStats { device: self.device.stats(), hosts }
    }

    /// The counters that this control is of: of the whole device, or of a partition and, of a host, its cache's.
    pub fn own_stats(&self) -> serde_json::Value {
        let Some((partition, _)) = &self.only else { return serde_json::json!(self.stats()) };
        let mut stats = serde_json::json!(partition.stats());
        if let Some(host) = self.pairs().first().and_then(|pair| pair.host_report()) {
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
        let tensor = self.device.create_tensor(spec)?;
        self.directory_changed(tensor.dpa, &mut std::iter::empty())?;
        Ok(tensor)
    }

    /// Removes a tensor and its views; its bytes stay.
    ///
    /// # Errors
    ///
    /// When there is no such tensor.
    pub fn remove_tensor(&self, name: &str) -> Result<(), ControlError> {
        let shown = self.device.views();
        let tensors = self.device.tensors();
        self.device.remove_tensor(name)?;
        let dpa = tensors.iter().find(|tensor| tensor.name == name).map_or(0, |tensor| tensor.dpa);
        let mut shown = shown.iter().filter(|view| view.tensor == name).map(place);
        self.directory_changed(dpa, &mut shown)
    }

    /// Makes a view.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, its format cannot give the view, or the views window is full.
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, ControlError> {
        let (view, base, views) = if let Some((partition, _)) = &self.only {
            let view = partition.create_view(tensor, spelling)?;
            (view, partition.base().start, partition.views_window().start)
        } else {
            let view = self.device.create_view(tensor, spelling)?;
            let tensors = self.device.tensors();
            let dpa = tensors.iter().find(|made| made.name == view.tensor).map_or(0, |made| made.dpa);
            (view, dpa, 0)
        };
        let shown = place(&view);
        self.directory_changed(base, &mut std::iter::once(views + shown.start..views + shown.end))?;
        Ok(view)
    }

    /// The coherence fence over `length` bytes of the base window, to its end if not given: see [`Coherence::flush`]. What it brings to the device is coded then:
    /// see [`Device::flush`]. Of a host: writes back what it stored there.
    ///
    /// # Errors
    ///
    /// When the range begins past the end, or dirty pages cannot be written back.
    pub fn flush(&self, offset: u64, length: Option<u64>) -> Result<(), ControlError> {
        let range = self.range(offset, length)?;
        for (pair, part) in self.pairs_over(&range) {
            pair.coherence().flush(part.start, part.end - part.start)?;
        }
        let length = range.end - range.start;
        match &self.only {
            Some((partition, _)) => partition.flush(range.start - partition.base().start, length)?,
            None => self.device.flush(range.start, length)?,
        }
        Ok(())
    }

    /// Drops what a host holds of `length` bytes of the base window, to its end if not given: see [`Coherence::invalidate`]. Others are coherent and hold
    /// nothing that would have to be dropped.
    ///
    /// # Errors
    ///
    /// When the range begins past the end, or what the host stored there cannot be written back.
    pub fn invalidate(&self, offset: u64, length: Option<u64>) -> Result<(), ControlError> {
        let range = self.range(offset, length)?;
        for (pair, part) in self.pairs_over(&range) {
            pair.coherence().invalidate(part.start, part.end - part.start)?;
        }
        Ok(())
    }

    /// Drops base bytes: they read as zero afterwards. A host that holds some of them keeps what it holds.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        let range = self.range(offset, Some(length))?;
        for partition in Partition::all(&self.device) {
            let Some(part) = inside(&partition, &range) else { continue };
            let length = part.end - part.start;
            let coherent = self
                .pairs()
                .into_iter()
                .find(|pair| pair.cache().is_none() && pair.partition().base() == partition.base());
            match coherent {
                Some(pair) => pair.coherence().discard(part.start, length)?,
                None => partition.discard(part.start, length)?,
            }
        }
        Ok(())
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

    /// Clears the poison of a base range: its poisoned blocks read as zero afterwards.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end.
    pub fn clear_poison(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        let blocks = whole_blocks(offset, length);
        self.change_base(&blocks, |device| device.clear_poison(offset, length))
    }

    /// Drops ranges (offset, length) of the views window from the page cache of its pair: loads of them go to the device again, as they would
    /// from behind a cache that is smaller than what is read. What passes the window's end is ignored.
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub fn evict(&self, ranges: impl IntoIterator<Item = (u64, u64)>) -> Result<(), ControlError> {
        let Some((partition, _)) = &self.only else { return Ok(()) };
        let end = partition.views_bytes();
        let clipped = |(offset, length): (u64, u64)| offset.min(end)..offset.saturating_add(length).min(end);
        let ranges: Vec<_> = ranges.into_iter().map(clipped).collect();
        for pair in self.pairs() {
            pair.coherence().views_changed(ranges.iter().cloned())?;
        }
        Ok(())
    }

    /// Whose part of the device this control is of, if it is a guest's or a host's.
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

    /// This control's pairs over `range` of the device's base window, each with the part it has of it, in its own offsets.
    fn pairs_over(&self, range: &Range<u64>) -> Vec<(&Arc<Pair>, Range<u64>)> {
        let pairs = self.pairs().into_iter();
        pairs.filter_map(|pair| Some((pair, inside(pair.partition(), range)?))).collect()
    }

    /// Drops the directory of the partition that has `dpa`, and these ranges of the device's views window, from all page caches.
    fn directory_changed(
        &self,
        dpa: u64,
        views: &mut dyn Iterator<Item = Range<u64>>,
    ) -> Result<(), ControlError> {
        let views: Vec<_> = views.collect();
        // All that show the partition, whoever asked.
        for pair in self.pairs.get().into_iter().flatten() {
            let base = pair.partition().base();
            // A tensor of no length may lie at the very end.
            if base.contains(&dpa) || base.end == dpa {
                let start = pair.partition().views_window().start;
                let own = views.iter().filter(|view| view.start >= start);
                let own = own.map(|view| view.start - start..view.end - start);
                pair.coherence().views_changed(std::iter::once(0..DIRECTORY_BYTES).chain(own))?;
            }
        }
        Ok(())
    }
}

/// What a partition has of `range` of the device's base window, in its own offsets. An empty range lies where it begins.
pub(super) fn inside(partition: &Partition, range: &Range<u64>) -> Option<Range<u64>> {
    common(&partition.base(), range)
}

/// The part of `range` that lies in `window`, in offsets of that. An empty range lies where it begins.
pub(super) fn common(window: &Range<u64>, range: &Range<u64>) -> Option<Range<u64>> {
    let (start, end) = (range.start.max(window.start), range.end.min(window.end));
    (start < end || (start == end && range.is_empty())).then(|| start - window.start..end - window.start)
}

/// What lies `offset` behind the beginning of `window`, if all of its `length` bytes are inside.
fn within(window: &Range<u64>, offset: u64, length: u64) -> Result<Range<u64>, ServeError> {
    let bytes = window.end - window.start;
    match offset.checked_add(length) {
        Some(end) if end <= bytes => Ok(window.start + offset..window.start + end),
        _ => Err(ServeError::PastEnd { offset, length, window: bytes }),
    }
}

/// The blocks that a base range touches, as a range of bytes.
fn whole_blocks(offset: u64, length: u64) -> Range<u64> {
    let block = BLOCK_BYTES as u64;
    let end = offset.saturating_add(length);
    offset / block * block..end.checked_next_multiple_of(block).unwrap_or(u64::MAX)
}

/// A view's place in the views window.
fn place(view: &ViewInfo) -> Range<u64> {
    view.offset..view.offset + view.length
}
