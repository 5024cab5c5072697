//! A partition as its guest sees it: a device of its own.
//!
//! The rules:
//! * Offsets, DPAs and tensors' names are the partition's own, counted from its beginnings. What
//!   lies outside is refused with the partition's bounds, and no name reaches a tensor of another.
//! * What is told, errors included, names nothing outside: it is what an undivided device of this
//!   size would say.
//! * It holds nothing. Blocks, tensors and counters are the device's; this only translates and
//!   checks.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use super::{Device, DeviceError, Space, TensorInfo, TensorSpec, ViewInfo, Window, poison::Poisoned};
use crate::partition_table::PartitionState;
use crate::{
    stats::{PartitionReport, StatsReport, TensorReport, ViewReport},
    tensor::TensorError,
};
use lamina_codec::BLOCK_BYTES;
use lamina_store::{Store, StoreError};

/// A partition of a device, or all of one that is not divided.
#[derive(Clone)]
pub struct Partition {
    device: Arc<Device>,
    index: usize,
}

/// What a partition tells of itself.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum PartitionStats {
    /// An undivided device: everything.
    Whole(Box<StatsReport>),
    /// A partition: what is its own.
    Own(Box<OwnReport>),
}

/// A partition, as its guest is told.
#[derive(Clone, Debug, Serialize)]
pub struct OwnReport {
    /// What is counted of it.
    #[serde(flatten)]
    pub partition: PartitionReport,
    /// Its tensors, by DPA.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorReport>,
    /// Its views, by offset.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub views: Vec<ViewReport>,
}

impl Partition {
    /// All partitions of `device`, by DPA; of one that is not divided, the whole.
    pub fn all(device: &Arc<Device>) -> Vec<Self> {
        (0..device.accounts.partition_table.partitions.len())
            .map(|index| Self { device: Arc::clone(device), index })
            .collect()
    }

    /// The first partition of `device`; of one that is not divided, the whole.
    pub fn first(device: Arc<Device>) -> Self {
        Self { device, index: 0 }
    }

    /// The partition of this name; the nameless one of a device that is not divided.
    pub fn named(device: &Arc<Device>, name: &str) -> Option<Self> {
        Self::all(device).into_iter().find(|partition| partition.name() == name)
    }

    fn state(&self) -> &PartitionState {
        &self.device.accounts.partition_table.partitions[self.index]
    }

    /// Its name; empty if the device is not divided.
    pub fn name(&self) -> &str {
        &self.state().name
    }

    /// The device it is of.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its place in the device's base window.
    pub fn base(&self) -> Range<u64> {
        self.state().base.clone()
    }

    /// Its place in the device's views window.
    pub fn views_window(&self) -> Range<u64> {
        self.state().views.clone()
    }

    /// Bytes of its base window.
    pub fn base_bytes(&self) -> u64 {
        self.state().base.end - self.state().base.start
    }

    /// Bytes of its views window.
    pub fn views_bytes(&self) -> u64 {
        self.state().views.end - self.state().views.start
    }

    /// As [`Device::next_data`].
    pub fn next_data(&self, range: Range<u64>) -> u64 {
        let start = self.state().base.start;
        self.device.next_data(range.start + start..range.end + start) - start
    }

    /// As [`Device::next_hole`].
    pub fn next_hole(&self, range: Range<u64>) -> u64 {
        let start = self.state().base.start;
        self.device.next_hole(range.start + start..range.end + start) - start
    }

    /// Bytes that its blocks take in the store.
    pub fn stored_bytes(&self) -> u64 {
        if self.device.accounts.partition_table.divided {
            self.state().stored.load(Relaxed)
        } else {
            self.device.coded_store().map_or(self.base_bytes(), Store::used_bytes)
        }
    }

    /// As [`Device::space`], within its quota.
    pub fn space(&self) -> Space {
        let space = self.device.space();
        let Some(quota) = self.quota_bytes() else { return space };
        let free = quota.saturating_sub(self.stored_bytes());
        Space { bytes: quota, free, available: free.min(space.available) }
    }

    /// Bytes its blocks may be charged, if there is a bound.
    pub fn quota_bytes(&self) -> Option<u64> {
        self.state().quota
    }

    /// As [`Device::read_base`].
    ///
    /// # Errors
    /// As [`Device::read_base`].
    pub fn read_base(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.at(Window::Base, offset, out.len() as u64)?;
        self.device.read_base(at, out).map_err(|why| self.own(why))
    }

    /// As [`Device::write_base`].
    ///
    /// # Errors
    /// As [`Device::write_base`], and [`DeviceError::Quota`].
    pub fn write_base(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        let at = self.at(Window::Base, offset, data.len() as u64)?;
        self.device.write_base(at, data).map_err(|why| self.own(why))
    }

    /// As [`Device::write_back`].
    ///
    /// # Errors
    /// As [`Device::write_back`], and [`DeviceError::Quota`].
    pub fn write_back(&self, offset: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        let at = self.at(Window::Base, offset, data.len() as u64)?;
        self.device.write_back(at, data, done).map_err(|why| self.own(why))
    }

    /// As [`Device::read_views`].
    ///
    /// # Errors
    /// As [`Device::read_views`].
    pub fn read_views(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.at(Window::Views, offset, out.len() as u64)?;
        self.device.read_views(at, out).map_err(|why| self.own(why))
    }

    /// As [`Device::discard`].
    ///
    /// # Errors
    /// As [`Device::discard`], and [`DeviceError::Quota`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.discard_step(offset, length, u64::MAX, &mut 0)
    }

    /// As [`Device::discard_step`].
    ///
    /// # Errors
    /// As [`Self::discard`].
    pub fn discard_step(
        &self,
        offset: u64,
        length: u64,
        step: u64,
        done: &mut u64,
    ) -> Result<(), DeviceError> {
        let at = self.at(Window::Base, offset, length)?;
        self.device.discard_step(at, length, step, done).map_err(|why| self.own(why))
    }

    /// As [`Device::flush`].
    ///
    /// # Errors
    /// As [`Device::flush`], and [`DeviceError::Quota`].
    pub fn flush(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let at = self.at(Window::Base, offset, length)?;
        self.device.flush(at, length).map_err(|why| self.own(why))
    }

    /// Counts a store into the views window, which has no effect on the device.
    pub fn count_refused_view_store(&self, bytes: u64) {
        self.device.count_refused_view_store(bytes);
        self.state().refused_view_stores.add(1);
        self.state().refused_view_bytes.add(bytes);
    }

    /// The ranges of its base window that a read of this range of its views window depends on.
    pub fn base_under_views(&self, offset: u64, length: u64) -> Vec<Range<u64>> {
        let Some(range) = clipped(&self.state().views, offset, length) else { return Vec::new() };
        let under = self.device.base_under_views(range.start, range.end - range.start);
        relative(under, self.state().base.start)
    }

    /// The ranges of its views window that show any of this range of its base window.
    pub fn views_over_base(&self, offset: u64, length: u64) -> Vec<Range<u64>> {
        let Some(range) = clipped(&self.state().base, offset, length) else { return Vec::new() };
        let over = self.device.views_over_base(range.start, range.end - range.start);
        relative(over, self.state().views.start)
    }

    /// Makes a tensor in it; see [`Device::create_tensor`].
    ///
    /// # Errors
    /// As [`Device::create_tensor`].
    pub fn create_tensor(&self, spec: TensorSpec) -> Result<TensorInfo, DeviceError> {
        let made = self.create_tensors(vec![spec])?;
        Ok(made.into_iter().next().expect("one for one"))
    }

    /// Makes tensors in it, all of them or none; see [`Device::create_tensors`].
    ///
    /// # Errors
    /// As [`Device::create_tensors`].
    pub fn create_tensors(&self, specs: Vec<TensorSpec>) -> Result<Vec<TensorInfo>, DeviceError> {
        let specs = specs.into_iter().map(|spec| self.full_spec(spec));
        let specs = specs.collect::<Result<Vec<_>, _>>()?;
        let made = self.device.create_tensors(specs).map_err(|why| self.own(why))?;
        Ok(made.into_iter().map(|tensor| self.own_tensor(tensor)).collect())
    }

    /// Makes a tensor in it, and waits for nobody; see [`Device::create_tensor_now`].
    ///
    /// # Errors
    /// As [`Device::create_tensor_now`].
    pub fn create_tensor_now(&self, spec: TensorSpec) -> Result<TensorInfo, DeviceError> {
        let made = self.device.create_tensor_now(self.full_spec(spec)?);
        made.map(|tensor| self.own_tensor(tensor)).map_err(|why| self.own(why))
    }

    /// See [`Device::may_replace`].
    ///
    /// # Errors
    /// As [`Device::may_replace`].
    pub fn may_replace(&self, removed: &[String], spec: TensorSpec) -> Result<(), DeviceError> {
        let removed: Vec<_> = removed.iter().map(|name| self.full_name(name)).collect();
        self.device.may_replace(&removed, self.full_spec(spec)?).map_err(|why| self.own(why))
    }

    /// What the device is asked for if one of its own is.
    fn full_spec(&self, spec: TensorSpec) -> Result<TensorSpec, TensorError> {
        let (start, capacity) = (self.state().base.start, self.base_bytes());
        if let Some(dpa) = spec.dpa
            && dpa.checked_add(spec.length).is_none_or(|end| end > capacity)
        {
            let (name, length) = (spec.name, spec.length);
            return Err(TensorError::PastCapacity { name, dpa, length, capacity });
        }
        let dpa = spec.dpa.map(|dpa| start + dpa);
        let base = spec.base.as_ref().map(|base| self.full_name(base));
        Ok(TensorSpec { name: self.full_name(&spec.name), dpa, base, ..spec })
    }

    /// Removes a view of one of its tensors: see [`Device::remove_view`].
    ///
    /// # Errors
    /// As [`Device::remove_view`].
    pub fn remove_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, DeviceError> {
        let removed = self.device.remove_view(&self.full_name(tensor), spelling);
        removed.map(|view| self.own_view(view)).map_err(|why| self.own(why))
    }

    /// Removes one of its tensors: see [`Device::remove_tensor`].
    ///
    /// # Errors
    /// As [`Device::remove_tensor`].
    pub fn remove_tensor(&self, name: &str) -> Result<(), DeviceError> {
        self.remove_tensor_with_views(name).map(drop)
    }

    /// Removes one of its tensors: see [`Device::remove_tensor_with_views`].
    ///
    /// # Errors
    /// As [`Device::remove_tensor`].
    pub fn remove_tensor_with_views(&self, name: &str) -> Result<Vec<ViewInfo>, DeviceError> {
        let views = self.device.remove_tensor_with_views(&self.full_name(name));
        views.map(|views| self.own_views(views)).map_err(|why| self.own(why))
    }

    /// Removes one of its tensors, and waits for nobody; see [`Device::remove_tensor_now`].
    ///
    /// # Errors
    /// As [`Device::remove_tensor_now`].
    pub fn remove_tensor_now(&self, name: &str) -> Result<Vec<ViewInfo>, DeviceError> {
        let views = self.device.remove_tensor_now(&self.full_name(name));
        views.map(|views| self.own_views(views)).map_err(|why| self.own(why))
    }

    /// Gives up the base of one of its tensors: see [`Device::detach_tensor`].
    ///
    /// # Errors
    /// As [`Device::detach_tensor`].
    pub fn detach_tensor(
        &self,
        name: &str,
        progress: impl Fn(u64) -> ControlFlow<()>,
    ) -> Result<TensorInfo, DeviceError> {
        let detached = self.device.detach_tensor(&self.full_name(name), progress);
        detached.map(|tensor| self.own_tensor(tensor)).map_err(|why| self.own(why))
    }

    /// Makes one of its tensors longer or shorter: see [`Device::resize_tensor`].
    ///
    /// # Errors
    /// As [`Device::resize_tensor`].
    pub fn resize_tensor(&self, name: &str, length: u64) -> Result<TensorInfo, DeviceError> {
        self.resize_tensor_with_views(name, length).map(|(tensor, _)| tensor)
    }

    /// Makes one of its tensors longer or shorter: see [`Device::resize_tensor_with_views`].
    ///
    /// # Errors
    /// As [`Device::resize_tensor`].
    pub fn resize_tensor_with_views(
        &self,
        name: &str,
        length: u64,
    ) -> Result<(TensorInfo, Vec<ViewInfo>), DeviceError> {
        let resized = self.device.resize_tensor_with_views(&self.full_name(name), length);
        resized
            .map(|(tensor, views)| (self.own_tensor(tensor), self.own_views(views)))
            .map_err(|why| self.own(why))
    }

    /// Its tensor of this name.
    ///
    /// # Errors
    /// As [`Device::tensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorInfo, DeviceError> {
        let found = self.device.tensor(&self.full_name(name));
        found.map(|tensor| self.own_tensor(tensor)).map_err(|why| self.own(why))
    }

    /// What is stored of a window of one of its tensors.
    ///
    /// # Errors
    /// As [`Device::packed_window`].
    pub fn packed_window(&self, tensor: &str, window: u64) -> Result<Option<Vec<u8>>, DeviceError> {
        self.device.packed_window(&self.full_name(tensor), window).map_err(|why| self.own(why))
    }

    /// Every view of one of its tensors, by offset; none if there is no such tensor.
    pub fn views_of(&self, tensor: &str) -> Vec<ViewInfo> {
        self.own_views(self.device.views_of(&self.full_name(tensor)))
    }

    /// Makes a view of one of its tensors, or finds it if it is there.
    ///
    /// # Errors
    /// As [`Device::create_view`].
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, DeviceError> {
        let made = self.device.create_view(&self.full_name(tensor), spelling);
        made.map(|view| self.own_view(view)).map_err(|why| self.own(why))
    }

    /// Its poisoned blocks, by DPA.
    pub fn poison(&self) -> Vec<Poisoned> {
        self.own_poison(self.device.poison())
    }

    /// Its poisonings behind event `event`, as [`Device::poisonings`] has them.
    pub fn poisonings(&self, event: u64) -> (Vec<Poisoned>, u64) {
        let (all, missed) = self.device.poisonings(event);
        (self.own_poison(all), missed)
    }

    fn own_poison(&self, mut own: Vec<Poisoned>) -> Vec<Poisoned> {
        let base = &self.state().base;
        own.retain(|poisoned| base.contains(&poisoned.dpa));
        for poisoned in &mut own {
            poisoned.dpa -= base.start;
            poisoned.tensor = poisoned.tensor.take().map(|name| self.own_name(&name));
        }
        own
    }

    /// Its tensors, by DPA.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let map = self.device.map();
        let own = map.listed_in(self.index, &self.device.accounts.partition_table);
        own.map(|tensor| self.own_tensor(tensor.told())).collect()
    }

    /// Its views, by offset.
    pub fn views(&self) -> Vec<ViewInfo> {
        let map = self.device.map();
        let own = map.aliases_of_partition(self.index, &self.device.accounts.partition_table);
        own.map(|alias| self.own_view(alias.info.clone())).collect()
    }

    /// What is counted of it: of an undivided device everything.
    pub fn stats(&self) -> PartitionStats {
        let all = self.device.stats();
        if !self.device.accounts.partition_table.divided {
            return PartitionStats::Whole(Box::new(all));
        }
        let map = self.device.map();
        let mine = |name: &str| map.tensor(name).is_ok_and(|tensor| tensor.partition == self.index);
        let mut own = OwnReport {
            // Where it lies on the device is the device's business.
            partition: PartitionReport { dpa: 0, ..all.partitions[self.index].clone() },
            tensors: all.tensors.into_iter().filter(|tensor| mine(&tensor.name)).collect(),
            views: all.views.into_iter().filter(|view| mine(&view.info.tensor)).collect(),
        };
        for tensor in &mut own.tensors {
            tensor.name = self.device.accounts.partition_table.own_name(&tensor.name).to_owned();
            tensor.base_tensor = tensor.base_tensor.take().map(|base| self.own_name(&base));
            tensor.dpa -= self.state().base.start;
        }
        for view in &mut own.views {
            view.info = self.own_view(view.info.clone());
        }
        PartitionStats::Own(Box::new(own))
    }

    /// The offset on the device of a request, if it lies inside the partition.
    fn at(&self, window: Window, offset: u64, length: u64) -> Result<u64, DeviceError> {
        let range = match window {
            Window::Base => &self.state().base,
            Window::Views => &self.state().views,
        };
        let size = range.end - range.start;
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(range.start + offset),
            _ => Err(DeviceError::PastWindow { window, offset, length, size }),
        }
    }

    fn full_name(&self, name: &str) -> String {
        if self.device.accounts.partition_table.divided {
            format!("{}/{name}", self.name())
        } else {
            name.to_owned()
        }
    }

    fn own_name(&self, name: &str) -> String {
        self.device.accounts.partition_table.own_name(name).to_owned()
    }

    fn own_tensor(&self, tensor: TensorInfo) -> TensorInfo {
        let dpa = tensor.dpa - self.state().base.start;
        let base = tensor.base.as_ref().map(|base| self.own_name(base));
        TensorInfo { name: self.own_name(&tensor.name), dpa, base, ..tensor }
    }

    fn own_view(&self, view: ViewInfo) -> ViewInfo {
        let offset = view.offset - self.state().views.start;
        ViewInfo { tensor: self.own_name(&view.tensor), offset, ..view }
    }

    fn own_views(&self, views: Vec<ViewInfo>) -> Vec<ViewInfo> {
        views.into_iter().map(|view| self.own_view(view)).collect()
    }

    /// A refusal in the partition's own terms.
    fn own(&self, why: DeviceError) -> DeviceError {
        if !self.device.accounts.partition_table.divided {
            return why;
        }
        let start = self.state().base.start;
        match why {
            DeviceError::Tensor(why) => DeviceError::Tensor(self.own_tensor_error(why)),
            DeviceError::View { tensor, why } => DeviceError::View { tensor: self.own_name(&tensor), why },
            DeviceError::NoRoomForView { tensor, view, length, largest } => {
                DeviceError::NoRoomForView { tensor: self.own_name(&tensor), view, length, largest }
            }
            DeviceError::UnknownView { tensor, view } => {
                DeviceError::UnknownView { tensor: self.own_name(&tensor), view }
            }
            DeviceError::Stopped { tensor } => DeviceError::Stopped { tensor: self.own_name(&tensor) },
            DeviceError::Busy { tensor } => DeviceError::Busy { tensor: self.own_name(&tensor) },
            DeviceError::Damaged { block, why } => {
                DeviceError::Damaged { block: block - start / BLOCK_BYTES as u64, why }
            }
            // Why has the names and numbers of the whole device.
            DeviceError::BaseLost { block, .. } => DeviceError::BaseLost {
                block: block - start / BLOCK_BYTES as u64,
                why: "it is the difference to a block of its tensor's base that is lost".to_owned(),
            },
            DeviceError::Store(StoreError::Entry { block, why }) => {
                StoreError::Entry { block: block - start / BLOCK_BYTES as u64, why }.into()
            }
            // How full the store is says what the others have stored.
            DeviceError::Store(
                StoreError::Full { .. }
                | StoreError::NoRoom { .. }
                | StoreError::HostMemory { .. }
                | StoreError::Tables { .. },
            ) => DeviceError::Full,
            other => other,
        }
    }

    fn own_tensor_error(&self, why: TensorError) -> TensorError {
        use TensorError as E;
        let start = self.state().base.start;
        let own = |name: String| self.own_name(&name);
        match why {
            E::Name { name, length } => {
                let prefix = self.name().len() + 1;
                E::Name { name: own(name), length: length.saturating_sub(prefix) }
            }
            E::Hidden { name } => E::Hidden { name: own(name) },
            E::Exists { name } => E::Exists { name: own(name) },
            E::Unknown { name } => E::Unknown { name: own(name) },
            E::Unaligned { name, dpa } => E::Unaligned { name: own(name), dpa: dpa - start },
            E::NoRoom { name, length, capacity, largest } => {
                E::NoRoom { name: own(name), length, capacity, largest }
            }
            E::Overlap { name, dpa, length, other, other_dpa, other_length } => E::Overlap {
                name: own(name),
                dpa: dpa - start,
                length,
                other: own(other),
                other_dpa: other_dpa - start,
                other_length,
            },
            E::Size { name, what, value, elements, format, length } => {
                E::Size { name: own(name), what, value, elements, format, length }
            }
            E::Overflow { name, what } => E::Overflow { name: own(name), what },
            E::NotFree { name, length, dpa, free, behind } => {
                let (name, dpa, behind) = (own(name), dpa - start, own(behind));
                E::NotFree { name, length, dpa, free, behind }
            }
            E::Kv { name, why } => E::Kv { name: own(name), why },
            E::Version { name, format } => E::Version { name: own(name), format },
            E::Base { name, base, why } => E::Base { name: own(name), base: own(base), why },
            E::IsBase { name, derived } => {
                E::IsBase { name: own(name), derived: derived.into_iter().map(own).collect() }
            }
            E::IsDerived { name, base } => E::IsDerived { name: own(name), base: own(base) },
            // Names and places are checked before the device sees them.
            E::PastCapacity { name, .. } | E::NoPartition { name, .. } | E::OutsidePartition { name, .. } => {
                E::Unknown { name: own(name) }
            }
        }
    }
}

impl PartitionStats {
    /// What is counted of a partition, if this is one.
    pub fn partition(&self) -> Option<&PartitionReport> {
        match self {
            Self::Whole(_) => None,
            Self::Own(own) => Some(&own.partition),
        }
    }
}

/// The part of a request that lies in `range`, as offsets of the device.
fn clipped(range: &Range<u64>, offset: u64, length: u64) -> Option<Range<u64>> {
    let start = range.start.saturating_add(offset);
    let end = start.saturating_add(length).min(range.end);
    (start < end).then_some(start..end)
}

/// Ranges of a window as counted from `start` of it.
fn relative(ranges: Vec<Range<u64>>, start: u64) -> Vec<Range<u64>> {
    // What a partition's views show lies in it, but for the rest of a last block that the window
    // does not have.
    ranges.into_iter().map(|range| range.start - start..range.end - start).collect()
}

#[cfg(test)]
mod tests;
