//! What can be asked of a served device, the same for people (the API), guests (the guest port) and programs.
//!
//! Every change goes through here rather than to the device itself, because a change may need dirty pages to reach the
//! device before it, and pages of the views window dropped after it. All of these sleep on the mount: async servers call
//! them from blocking threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use lamina_abi::DIRECTORY_BYTES;

use crate::BLOCK_BYTES;
use crate::device::events::Event;
use crate::device::poison::Poisoned;
use crate::device::{Device, DeviceError};
use crate::stats::StatsReport;
use crate::tensor::{TensorInfo, TensorSpec};
use crate::window::ViewInfo;

use super::vhost_user::{Disk, DiskInfo};
use super::{Coherence, ServeError};

/// A device and, as soon as it is mounted, what keeps its windows coherent.
#[derive(Clone)]
pub struct Control {
    pub(super) device: Arc<Device>,
    pub(super) coherence: Arc<OnceLock<Arc<Coherence>>>,
    disks: Arc<Mutex<Vec<Weak<Disk>>>>,
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
}

impl Control {
    /// The control of a device that is not mounted, or not yet.
    pub fn new(device: Arc<Device>) -> Self {
        Self { device, coherence: Arc::default(), disks: Arc::default() }
    }

    /// Says that the device is mounted now. Once is enough: later calls and those of clones change nothing.
    pub fn mounted(&self, coherence: &Arc<Coherence>) {
        self.coherence.get_or_init(|| Arc::clone(coherence));
    }

    /// All tensors.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        self.device.tensors()
    }

    /// All views.
    pub fn views(&self) -> Vec<ViewInfo> {
        self.device.views()
    }

    /// All disks that are being served, in the order they were made.
    pub fn disks(&self) -> Vec<DiskInfo> {
        let disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        disks.iter().filter_map(Weak::upgrade).map(|disk| disk.info()).collect()
    }

    /// Says that a disk is being served.
    pub(super) fn served(&self, disk: &Arc<Disk>) {
        let mut disks = self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        disks.retain(|disk| disk.strong_count() > 0);
        disks.push(Arc::downgrade(disk));
    }

    /// All counters.
    pub fn stats(&self) -> StatsReport {
        self.device.stats()
    }

    /// Makes a tensor over bytes that keep their values.
    ///
    /// # Errors
    ///
    /// When the device refuses it, for example for lack of room.
    pub fn create_tensor(&self, spec: TensorSpec) -> Result<TensorInfo, ControlError> {
        let tensor = self.device.create_tensor(spec)?;
        self.directory_changed([])?;
        Ok(tensor)
    }

    /// Removes a tensor and its views; its bytes stay.
    ///
    /// # Errors
    ///
    /// When there is no such tensor.
    pub fn remove_tensor(&self, name: &str) -> Result<(), ControlError> {
        let shown: Vec<_> =
            self.views().into_iter().filter(|view| view.tensor == name).map(|view| place(&view)).collect();
        self.device.remove_tensor(name)?;
        self.directory_changed(shown)
    }

    /// Makes a view.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, its format cannot give the view, or the views window is full.
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, ControlError> {
        let view = self.device.create_view(tensor, spelling)?;
        self.directory_changed([place(&view)])?;
        Ok(view)
    }

    /// The coherence fence over `length` bytes of the base window, to its end if not given: see [`Coherence::flush`]. What it brings to the device is coded then:
    /// see [`Device::flush`].
    ///
    /// # Errors
    ///
    /// When the range begins past the end, or dirty pages cannot be written back.
    pub fn flush(&self, offset: u64, length: Option<u64>) -> Result<(), ControlError> {
        let window = self.device.base_bytes();
        let length = length.unwrap_or(window.saturating_sub(offset));
        if offset.checked_add(length).is_none_or(|end| end > window) {
            return Err(ServeError::PastEnd { offset, length, window }.into());
        }
        self.coherence.get().map_or(Ok(()), |coherence| coherence.flush(offset, length))?;
        Ok(self.device.flush(offset, length)?)
    }

    /// Drops base bytes: they read as zero afterwards.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        match self.coherence.get() {
            Some(coherence) => Ok(coherence.discard(offset, length)?),
            None => Ok(self.device.discard(offset, length)?),
        }
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
        self.beside(offset, length, |device| device.inject_poison(offset, length))
    }

    /// Clears the poison of a base range: its poisoned blocks read as zero afterwards.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end.
    pub fn clear_poison(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        self.beside(offset, length, |device| device.clear_poison(offset, length))
    }

    /// Changes blocks of a base range in the device, and drops what the page cache held of them.
    fn beside(
        &self,
        offset: u64,
        length: u64,
        change: impl FnOnce(&Device) -> Result<(), DeviceError>,
    ) -> Result<(), ControlError> {
        let Some(coherence) = self.coherence.get() else { return Ok(change(&self.device)?) };
        coherence.settle_range(offset, length)?;
        let changed = change(&self.device);
        let block = BLOCK_BYTES as u64;
        let first = offset / block * block;
        coherence.written_beside(
            first,
            offset.saturating_add(length).saturating_sub(first).next_multiple_of(block),
        )?;
        Ok(changed?)
    }

    /// Drops ranges (offset, length) of the views window from the page cache: loads of them go to the device again, as they would
    /// from behind a cache that is smaller than what is read. What passes the window's end is ignored.
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub fn evict(&self, ranges: impl IntoIterator<Item = (u64, u64)>) -> Result<(), ControlError> {
        let Some(coherence) = self.coherence.get() else { return Ok(()) };
        let end = self.device.views_bytes();
        let clipped = |(offset, length): (u64, u64)| offset.min(end)..offset.saturating_add(length).min(end);
        Ok(coherence.views_changed(ranges.into_iter().map(clipped))?)
    }

    fn directory_changed(&self, views: impl IntoIterator<Item = Range<u64>>) -> Result<(), ControlError> {
        let Some(coherence) = self.coherence.get() else { return Ok(()) };
        Ok(coherence.views_changed(std::iter::once(0..DIRECTORY_BYTES).chain(views))?)
    }
}

/// A view's place in the views window.
fn place(view: &ViewInfo) -> Range<u64> {
    view.offset..view.offset + view.length
}
