//! Tensors and views that come and go.

use std::sync::Arc;

use super::{Device, DeviceError, sources::SourceOf};
use crate::{
    BLOCK_BYTES,
    mode::Mode,
    stats::Gauge,
    store,
    tensor::{self, Tensor, TensorError, TensorInfo, TensorSpec},
    view::View,
    window::{Alias, Counted, Map, ViewInfo},
};

impl Device {
    /// Makes a tensor. What its range holds already stays, and is coded in the tensor's format.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] or [`DeviceError::Directory`], and then nothing changed.
    pub fn create_tensor(&self, spec: TensorSpec) -> Result<TensorInfo, DeviceError> {
        self.make_tensor(spec, SourceOf::default())
    }

    pub(super) fn make_tensor(&self, spec: TensorSpec, source: SourceOf) -> Result<TensorInfo, DeviceError> {
        let (elements, shape) = tensor::check(&spec)?;
        let windows = tensor::windows(&spec)?.filter(|_| self.config.mode == Mode::Trace);
        let mut guard = self.map.write();
        let part = self.division.of_name(&spec.name)?;
        let dpa = self.place(&guard, &spec, part)?;
        let TensorSpec { name, length, format, layout, codec, .. } = spec;
        let codec = codec.unwrap_or(self.config.codec);
        let info = TensorInfo { name, dpa, length, elements, shape, format, layout, codec };
        let Counted { traffic, numbers } = self.new_traffic();
        let stored = Gauge::default();
        let tensor = Arc::new(Tensor { info: info.clone(), part, windows, stored, traffic, numbers, source });
        let mut tensors = guard.tensors.clone();
        tensors.push(tensor.clone());
        let next = self.successor(&guard, tensors, guard.aliases.clone())?;
        self.keep(&next)?;
        // Whatever the range holds is opaque so far; usually nothing is, and then a large tensor costs no scan.
        let populated = self.stats.opaque_blocks.get() > 0;
        if populated {
            self.move_charges(&guard, &next, &tensor);
        }
        *guard = Arc::new(next);
        drop(guard);
        if populated {
            if let Some(shape) = tensor.windows {
                self.code_windows(&tensor, shape)?;
                return Ok(info);
            }
            for block in owned(&tensor) {
                // A write may have come first and followed the new map already; then this only codes the block again.
                self.recode(&self.map.read(), block)?;
            }
        }
        Ok(info)
    }

    /// Forgets a tensor and its views. Its bytes stay, readable through the base window.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none of this name. A KV tensor's windows are coded block by block first: [`DeviceError::Store`] if there is no room
    /// for that, [`DeviceError::Damaged`] if one cannot be read; then it stays.
    pub fn remove_tensor(&self, name: &str) -> Result<(), DeviceError> {
        let mut guard = self.map.write();
        let tensor = guard.tensor(name)?.clone();
        let tensors = guard.tensors.iter().filter(|other| !Arc::ptr_eq(other, &tensor)).cloned().collect();
        let aliases =
            guard.aliases.iter().filter(|alias| !Arc::ptr_eq(&alias.tensor, &tensor)).cloned().collect();
        let next = self.successor(&guard, tensors, aliases)?;
        if let Some(shape) = tensor.windows {
            self.uncode_windows(&guard, &tensor, shape)?;
        }
        self.keep(&next)?;
        self.move_charges(&guard, &next, &tensor);
        *guard = Arc::new(next);
        Ok(())
    }

    /// Makes a view of a tensor, or finds it if it is there.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`], [`DeviceError::View`], [`DeviceError::NoRoomForView`] or [`DeviceError::Directory`], and then nothing changed.
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, DeviceError> {
        let mut guard = self.map.write();
        let tensor = guard.tensor(tensor)?.clone();
        let name = &tensor.info.name;
        let view = View::parse(tensor.info.format, spelling)
            .map_err(|why| DeviceError::View { tensor: name.clone(), why })?;
        let spelling = view.to_string();
        let same = |alias: &&Arc<Alias>| Arc::ptr_eq(&alias.tensor, &tensor) && alias.info.view == spelling;
        if let Some(alias) = guard.aliases.iter().find(same) {
            return Ok(alias.info.clone());
        }
        let no_room = |length, largest| DeviceError::NoRoomForView {
            tensor: name.clone(),
            view: spelling.clone(),
            length,
            largest,
        };
        let length = view.bytes_for(tensor.info.elements).ok_or_else(|| no_room(u64::MAX, 0))?;
        let offset = guard
            .free_view(length, &self.division.parts[tensor.part].views)
            .map_err(|largest| no_room(length, largest))?;
        let alias = Arc::new(Alias::new(tensor, view, offset, length, self.new_traffic()));
        let info = alias.info.clone();
        let mut aliases = guard.aliases.clone();
        aliases.push(alias);
        let next = self.successor(&guard, guard.tensors.clone(), aliases)?;
        self.keep(&next)?;
        *guard = Arc::new(next);
        Ok(info)
    }

    /// Every tensor, by DPA.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        self.map().tensors.iter().map(|tensor| tensor.info.clone()).collect()
    }

    /// Every view, by offset.
    pub fn views(&self) -> Vec<ViewInfo> {
        self.map().aliases.iter().map(|alias| alias.info.clone()).collect()
    }

    /// Whether this view still is where it was made.
    pub fn has_view(&self, view: &ViewInfo) -> bool {
        let map = self.map();
        let at = map.aliases.partition_point(|alias| alias.info.offset < view.offset);
        // Views of no length share their place with the next one.
        map.aliases[at..]
            .iter()
            .take_while(|alias| alias.info.offset == view.offset)
            .any(|alias| alias.info == *view)
    }

    fn successor(
        &self,
        map: &Map,
        tensors: Vec<Arc<Tensor>>,
        aliases: Vec<Arc<Alias>>,
    ) -> Result<Map, DeviceError> {
        Ok(map.successor(tensors, aliases, &self.division)?)
    }

    /// Where the tensor goes.
    fn place(&self, map: &Map, spec: &TensorSpec, part: usize) -> Result<u64, TensorError> {
        let TensorSpec { name, length, .. } = spec;
        let part = &self.division.parts[part].base;
        let (length, capacity) = (*length, part.end - part.start);
        if map.tensor(name).is_ok() {
            return Err(TensorError::Exists { name: name.clone() });
        }
        let Some(dpa) = spec.dpa else {
            return map.free_base(length, part).map_err(|largest| TensorError::NoRoom {
                name: name.clone(),
                length,
                capacity,
                largest,
            });
        };
        if !dpa.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(TensorError::Unaligned { name: name.clone(), dpa });
        }
        let end = dpa.checked_add(length).filter(|end| *end <= self.config.base_bytes);
        let Some(end) = end else {
            let capacity = self.config.base_bytes;
            return Err(TensorError::PastCapacity { name: name.clone(), dpa, length, capacity });
        };
        if dpa < part.start || end > part.end {
            let (name, start, end) = (name.clone(), part.start, part.end);
            return Err(TensorError::OutsidePartition { name, dpa, length, start, end });
        }
        match map.tensors.iter().find(|other| dpa < other.end() && other.info.dpa < end) {
            None => Ok(dpa),
            Some(other) => Err(TensorError::Overlap {
                name: name.clone(),
                dpa,
                length,
                other: other.info.name.clone(),
                other_dpa: other.info.dpa,
                other_length: other.info.length,
            }),
        }
    }

    /// Moves the charges of the blocks of `tensor` from their owner in `from` to their owner in `to`.
    fn move_charges(&self, from: &Map, to: &Map, tensor: &Tensor) {
        for block in owned(tensor) {
            let charge = self.charged(block);
            self.charge(from, block, charge, super::charge::Charge::default());
            self.charge(to, block, super::charge::Charge::default(), charge);
        }
    }
}

/// The blocks of a tensor.
fn owned(tensor: &Tensor) -> std::ops::Range<u64> {
    store::blocks(tensor.info.dpa)..store::blocks(tensor.end())
}
