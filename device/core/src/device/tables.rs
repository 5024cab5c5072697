//! Tensors and views that come and go.
//!
//! The rules:
//! * The map is held alone for bounded steps only: to look at the tables and change them, or to
//!   move the charges of at most [`MAX_BLOCKS_A_HOLD`] blocks from one account to another. Blocks
//!   and KV windows are coded while it is held for reading, one block or window at a time.
//! * What was never written is passed over without a look at each block.
//! * A tensor is made in this order:
//!   1. The tables and the map take it up. It owns its range, and stores are coded as it says.
//!      Nobody is told of it yet.
//!   2. Its blocks are charged to it.
//!   3. What its range holds is coded anew.
//!   4. Lists and the directory name it. This cannot fail.
//!
//!   Over a range that holds nothing this is one step.
//! * If there is no room for step 3, the tensor is removed again. Nobody was told of it, and the
//!   directory is the same to the byte. What was coded anew is coded back as far as there is room.
//!   If there is no room even for the removal, the tensor is listed: it is whole, and some of its
//!   blocks stay coded as they were.
//! * A tensor is removed in this order:
//!   1. It is marked as leaving: from then on its windows are coded block by block, and every store
//!      closes the window it goes to.
//!   2. All its windows are coded so.
//!   3. Its blocks are charged to nobody.
//!   4. The tables and the map forget it and its views.
//!
//!   What fails leaves it there, with windows that are coded block by block until they are written.
//! * So the tables name the tensor of every coded window, whenever the process dies. A tensor that
//!   was being made or removed is there afterwards, unless the last step of its removal was done.
//!   Its blocks say how they are coded, and the accounts are made anew from them.
//! * Who makes or removes a tensor holds its turn from the first step to the last. Who wants its
//!   name, its range or its removal meanwhile waits for the turn, and holds nothing else.

use std::{
    ops::{Deref, Range},
    sync::Arc,
};

use parking_lot::RwLockWriteGuard;

use super::{
    Device, DeviceError,
    charge::{Charge, hand_back, take_over},
    coding::is_current,
};
use crate::{
    stats::{Gauge, Stats},
    tensor::{self, SourceOf, Tensor, TensorError, TensorInfo, TensorSpec, Transition},
    window::{Alias, Counted, Map, ViewInfo},
};
use lamina_codec::{BLOCK_BYTES, view::View};
use lamina_store::mode::Mode;

/// Blocks whose charges are moved in one hold of the map: 0.1 ms (measured by the test of it).
pub(super) const MAX_BLOCKS_A_HOLD: u64 = 512;

impl Device {
    /// Makes a tensor. What its range holds already stays, and is coded in the tensor's format.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`], [`DeviceError::Directory`]; [`DeviceError::Store`] or
    /// [`DeviceError::Quota`] if there is no room to code what its range holds. Then it is as if
    /// nobody had asked.
    pub fn create_tensor(&self, spec: TensorSpec) -> Result<TensorInfo, DeviceError> {
        self.make_tensor(spec, SourceOf::default())
    }

    pub(super) fn make_tensor(&self, spec: TensorSpec, source: SourceOf) -> Result<TensorInfo, DeviceError> {
        let (elements, shape) = tensor::check(&spec)?;
        let windows = tensor::windows(&spec)?.filter(|_| self.config.mode == Mode::Trace);
        let part = self.accounts.division.of_name(&spec.name)?;
        let (guard, dpa) = self.place_free(&spec, part)?;
        let TensorSpec { name, length, format, layout, codec, .. } = spec;
        let codec = codec.unwrap_or(self.config.codec);
        let info = TensorInfo { name, dpa, length, elements, shape, format, layout, codec };
        let Counted { traffic, numbers } = self.new_traffic();
        let (stored, transition) = (Gauge::default(), Transition::making());
        let tensor =
            Tensor { info: info.clone(), part, windows, stored, traffic, numbers, source, transition };
        let tensor = Arc::new(tensor);
        let _turn = tensor.transition.turn().lock();
        // Usually the range holds nothing.
        let is_empty = self.blocks.touched(tensor.blocks()).is_none();
        if is_empty {
            tensor.transition.set_charged(0..u64::MAX);
            tensor.transition.set_listed();
        }
        let mut tensors = guard.tensors.clone();
        tensors.push(tensor.clone());
        let next = self.successor(&guard, tensors, guard.aliases.clone())?;
        self.keep(&next)?;
        replace(guard, next);
        if is_empty {
            return Ok(info);
        }
        self.charge_to(&tensor);
        let mut reached = tensor.blocks().start;
        if let Err(why) = self.code_anew(&tensor, &mut reached) {
            match self.unmake(&tensor) {
                Ok(()) => {
                    self.code_back(&tensor, reached);
                    return Err(why);
                }
                Err(also) => tracing::warn!(
                    tensor = info.name,
                    "not all of it is coded anew: {why}; nor back as it was: {also}"
                ),
            }
        }
        self.list(&tensor);
        Ok(info)
    }

    /// Forgets a tensor and its views. Its bytes stay, readable through the base window.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none of this name. A KV tensor's windows are coded block
    /// by block first: [`DeviceError::Store`] if there is no room for that; then it stays.
    pub fn remove_tensor(&self, name: &str) -> Result<(), DeviceError> {
        loop {
            let tensor = self.map().tensor(name)?.clone();
            let _turn = tensor.transition.turn().lock();
            // It may have gone while somebody else had the turn.
            if self.map().tensors.iter().any(|is| Arc::ptr_eq(is, &tensor)) {
                return self.unmake(&tensor).inspect_err(|_| {
                    let _alone = self.alone();
                    tensor.transition.set_leaving(false);
                });
            }
        }
    }

    /// Makes a view of a tensor, or finds it if it is there.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`], [`DeviceError::View`], [`DeviceError::NoRoomForView`] or
    /// [`DeviceError::Directory`], and then nothing changed.
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, DeviceError> {
        let guard = self.alone();
        let tensor = guard.listed(tensor)?.clone();
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
            .free_view(length, &self.accounts.division.parts[tensor.part].views)
            .map_err(|largest| no_room(length, largest))?;
        let alias = Arc::new(Alias::new(tensor, view, offset, length, self.new_traffic()));
        let info = alias.info.clone();
        let mut aliases = guard.aliases.clone();
        aliases.push(alias);
        let next = self.successor(&guard, guard.tensors.clone(), aliases)?;
        self.keep(&next)?;
        replace(guard, next);
        Ok(info)
    }

    /// Every tensor, by DPA.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        self.map()
            .tensors
            .iter()
            .filter(|tensor| tensor.is_listed())
            .map(|tensor| tensor.info.clone())
            .collect()
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
        Ok(map.successor(tensors, aliases, &self.accounts.division)?)
    }

    /// Where the tensor goes.
    fn place(&self, map: &Map, spec: &TensorSpec, part: usize) -> Result<u64, TensorError> {
        let TensorSpec { name, length, .. } = spec;
        let part = &self.accounts.division.parts[part].base;
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

    /// Where the tensor goes, and the map, in which nobody else can take that place. Waits for
    /// tensors in the way that come or go.
    fn place_free(&self, spec: &TensorSpec, part: usize) -> Result<(Alone<'_>, u64), DeviceError> {
        loop {
            let guard = self.alone();
            let why = match self.place(&guard, spec, part) {
                Ok(dpa) => return Ok((guard, dpa)),
                Err(why) => why,
            };
            let Some(busy) = in_the_way(&guard, part, &why) else { return Err(why.into()) };
            drop(guard);
            drop(busy.transition.turn().lock());
        }
    }

    /// Holds the map alone.
    fn alone(&self) -> Alone<'_> {
        Alone {
            map: self.map.write(),
            #[cfg(test)]
            _hold: super::holds::Hold::begin(),
        }
    }

    /// Removes a tensor whose turn the caller has. If that fails it is there as before, but marked
    /// as leaving.
    fn unmake(&self, tensor: &Arc<Tensor>) -> Result<(), DeviceError> {
        {
            let _alone = self.alone();
            tensor.transition.set_leaving(true);
        }
        // Every store that did not know of it is done.
        if let Some(shape) = &tensor.windows {
            self.uncode_windows(tensor, shape)?;
        }
        self.charge_nobody(tensor);
        self.forget_closed(tensor).inspect_err(|_| self.charge_to(tensor))
    }

    /// The last steps of a removal. Every store closes a window that is leaving, so one that is
    /// open holds a store that found no room: it finds some now, or the tensor stays.
    fn forget_closed(&self, tensor: &Arc<Tensor>) -> Result<(), DeviceError> {
        while !self.forget(tensor)? {
            if let Some(shape) = &tensor.windows {
                self.uncode_windows(tensor, shape)?;
            }
        }
        Ok(())
    }

    /// Forgets a tensor, if none of its windows is open: whether it did.
    fn forget(&self, tensor: &Arc<Tensor>) -> Result<bool, DeviceError> {
        let guard = self.alone();
        if self.has_open_windows(tensor) {
            return Ok(false);
        }
        let stays = |is: &&Arc<Tensor>| !Arc::ptr_eq(is, tensor);
        let tensors = guard.tensors.iter().filter(stays).cloned().collect();
        let aliases = guard.aliases.iter().filter(|alias| stays(&&alias.tensor)).cloned().collect();
        let next = self.successor(&guard, tensors, aliases)?;
        #[cfg(test)]
        super::holds::may_fail(super::holds::Step::Forget)?;
        self.keep(&next)?;
        replace(guard, next);
        Ok(true)
    }

    /// The last step of making a tensor: people are told of it.
    fn list(&self, tensor: &Tensor) {
        let guard = self.alone();
        tensor.transition.set_leaving(false);
        tensor.transition.set_listed();
        let next = guard.successor(guard.tensors.clone(), guard.aliases.clone(), &self.accounts.division);
        replace(guard, next.expect("every directory since it was begun had room for it"));
    }

    /// Codes what the range of a new tensor holds as it says, and tells how far that came.
    fn code_anew(&self, tensor: &Arc<Tensor>, reached: &mut u64) -> Result<(), DeviceError> {
        if let Some(shape) = &tensor.windows {
            return self.code_windows(tensor, shape, reached);
        }
        while let Some(touched) = self.blocks.touched(*reached..tensor.blocks().end) {
            for block in touched {
                *reached = block + 1;
                let map = self.map.read();
                if !is_current(&map, tensor, block) {
                    return Ok(());
                }
                // A store may have come first; then this only codes the block again.
                self.recode(&map, block)?;
            }
        }
        Ok(())
    }

    /// Codes blocks up to `reached` of a tensor that was not made as nobody's blocks are coded, as
    /// far as there is room.
    fn code_back(&self, tensor: &Tensor, reached: u64) {
        let mut at = tensor.blocks().start;
        while let Some(touched) = self.blocks.touched(at..reached) {
            at = touched.end;
            for block in touched {
                let map = self.map.read();
                if map.tensor_at(block * BLOCK_BYTES as u64).is_some() {
                    return;
                }
                if let Err(why) = self.recode(&map, block) {
                    tracing::debug!(block, "it stays coded as the tensor was: {why}");
                }
            }
        }
    }

    /// Charges a tensor for what its blocks hold, which nobody is charged for.
    fn charge_to(&self, tensor: &Tensor) {
        let set_charged = |passed| tensor.transition.set_charged(0..passed);
        self.move_charges(tensor, take_over, set_charged);
    }

    /// Charges nobody for what the blocks of a tensor hold, which it is charged for.
    fn charge_nobody(&self, tensor: &Tensor) {
        let set_charged = |passed| tensor.transition.set_charged(passed..u64::MAX);
        self.move_charges(tensor, hand_back, set_charged);
    }

    /// Moves the charges of a tensor's blocks by `one`, and has `passed` know after each step how
    /// many blocks are behind it.
    fn move_charges(&self, tensor: &Tensor, one: impl Fn(&Stats, &Tensor, Charge), passed: impl Fn(u64)) {
        let Range { start, end } = tensor.blocks();
        let mut at = start;
        while at < end {
            let _alone = self.alone();
            let mut left = MAX_BLOCKS_A_HOLD;
            while left > 0 && at < end {
                let touched = self.blocks.touched(at..end).unwrap_or(end..end);
                at = touched.end.min(touched.start + left);
                left -= at - touched.start;
                (touched.start..at).for_each(|block| one(&self.accounts.stats, tensor, self.charged(block)));
            }
            passed(at - start);
            #[cfg(test)]
            super::holds::moved(MAX_BLOCKS_A_HOLD - left);
        }
    }
}

/// The map, held alone.
struct Alone<'a> {
    map: RwLockWriteGuard<'a, Arc<Map>>,
    #[cfg(test)]
    _hold: super::holds::Hold,
}

impl Deref for Alone<'_> {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.map
    }
}

/// Puts `next` in the map's place. The map before is dropped when nobody waits for that.
fn replace(mut alone: Alone<'_>, next: Map) {
    let before = std::mem::replace(&mut *alone.map, Arc::new(next));
    drop(alone);
    drop(before);
}

/// The tensor that is being made or removed and because of which another cannot be made now.
fn in_the_way(map: &Map, part: usize, why: &TensorError) -> Option<Arc<Tensor>> {
    let named = |name: &String| map.tensor(name).ok().filter(|tensor| tensor.transition.turn().is_locked());
    match why {
        TensorError::Exists { name } | TensorError::Overlap { other: name, .. } => named(name),
        TensorError::NoRoom { .. } => {
            map.tensors.iter().find(|is| is.part == part && is.transition.turn().is_locked())
        }
        _ => None,
    }
    .cloned()
}
