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
//! * Tensors that are asked for at once are made in the same steps, all of them or none.
//! * If there is no room for step 3, the tensor is removed again. Nobody was told of it, and the
//!   directory is the same to the byte. What was coded anew is coded back as far as there is room.
//!   If there is no room even for the removal, the tensor is listed: it is whole, and some of its
//!   blocks stay coded as they were.
//! * A tensor is removed in this order, unless others are coded against it:
//!   1. It is marked as leaving: from then on its windows are coded block by block, and every store
//!      closes the window it goes to. Blocks of a tensor with a base are coded by themselves.
//!   2. All its windows are coded so, and all its differences.
//!   3. Its blocks are charged to nobody.
//!   4. The tables and the map forget it and its views.
//!
//!   What fails leaves it there, with windows that are coded block by block until they are written.
//! * So the tables name the tensor of every coded window and of every difference, whenever the
//!   process dies. A tensor that was being made or removed is there afterwards, unless the last
//!   step of its removal was done. Its blocks say how they are coded, and the accounts are made
//!   anew from them.
//! * Who makes or removes a tensor holds its turn from the first step to the last. Who wants its
//!   name, its range or its removal meanwhile waits for the turn, and holds nothing else.
//! * Who has a turn may wait for the kernel, which waits for those who answer it: for what it reads
//!   of a file, and writes back. So who answers the kernel never waits for a turn: it holds the
//!   thread, and the kernel a lock of the file. It asks for what can be done at once, and is told
//!   [`DeviceError::Busy`] else.

use std::{
    ops::{ControlFlow, Deref, Range},
    sync::Arc,
};

use parking_lot::RwLockWriteGuard;

use super::{
    Device, DeviceError,
    bases::is_no_base,
    charge::{Charge, hand_back, take_over},
    coding::is_current,
    device_image::Change,
};
use crate::{
    stats::Stats,
    tensor::{self, Lineage, SourceId, SourceOf, Tensor, TensorError, TensorInfo, TensorSpec, Transition},
    window::{Alias, Draft, Map, ViewInfo},
};
use lamina_codec::{
    BLOCK_BYTES,
    format::Format,
    kv::{KvError, Shape},
    view::View,
};
use lamina_store::{Store, mode::Mode};

/// Blocks whose charges are moved in one hold of the map: 0.1 ms (measured by the test of it).
pub(super) const MAX_BLOCKS_A_HOLD: u64 = 512;

/// What is done about a tensor in the way that comes or goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InTheWay {
    /// Its turn is waited for.
    Awaited,
    /// [`DeviceError::Busy`].
    Refused,
}

/// Most tensors that are made in one step.
pub const MAX_AT_ONCE: usize = 1 << 17;

/// A tensor to be made, but for its place.
pub(super) struct Checked {
    pub(super) info: TensorInfo,
    /// The place that was asked for.
    dpa: Option<u64>,
    pub(super) partition: usize,
    windows: Option<Shape>,
}

impl Device {
    /// Makes a tensor. What its range holds already stays, and is coded in the tensor's format.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`]; [`DeviceError::Store`] or [`DeviceError::Quota`] if there is no
    /// room to code what its range holds. Then it is as if nobody had asked.
    pub fn create_tensor(&self, spec: TensorSpec) -> Result<TensorInfo, DeviceError> {
        let made = self.make_tensors(vec![spec], None, InTheWay::Awaited)?;
        Ok(made[0].told())
    }

    /// As [`Self::create_tensor`], of who answers the kernel, and so waits for nobody who may wait
    /// for that.
    ///
    /// # Errors
    /// As [`Self::create_tensor`]; [`DeviceError::Busy`].
    pub fn create_tensor_now(&self, spec: TensorSpec) -> Result<TensorInfo, DeviceError> {
        let made = self.make_tensors(vec![spec], None, InTheWay::Refused)?;
        Ok(made[0].told())
    }

    /// That [`Self::create_tensor_now`] could make a tensor once those called `removed` are gone:
    /// all but whether there is room to code what its range holds.
    ///
    /// # Errors
    /// As [`Self::create_tensor_now`], and as [`Self::remove_tensor_now`].
    pub fn may_replace(&self, removed: &[String], spec: TensorSpec) -> Result<(), DeviceError> {
        let checked = self.check(spec)?;
        let map = self.map();
        let mut draft = map.draft();
        for name in removed {
            let tensor = map.tensor(name)?;
            is_no_base(tensor)?;
            if tensor.transition.turn().is_locked() {
                return Err(busy(tensor));
            }
            draft.remove_tensor(tensor);
        }
        let placed = self.place(draft.map(), &checked);
        placed.map(drop).map_err(|why| match other_in_the_way(draft.map(), checked.partition, &why) {
            Some(other) => busy(&other),
            None => why.into(),
        })
    }

    /// Makes tensors that people asked for, all of them or none: as [`Self::create_tensor`], of
    /// each.
    ///
    /// # Errors
    /// As [`Self::create_tensor`], of the first that cannot be; [`TensorError::Hidden`];
    /// [`DeviceError::TooMany`] for more than [`MAX_AT_ONCE`].
    pub fn create_tensors(&self, specs: Vec<TensorSpec>) -> Result<Vec<TensorInfo>, DeviceError> {
        let names = specs.iter().flat_map(|spec| std::iter::once(&spec.name).chain(&spec.base));
        names.into_iter().try_for_each(|name| tensor::is_not_hidden(name))?;
        let made = self.make_tensors(specs, None, InTheWay::Awaited)?;
        Ok(made.iter().map(|tensor| tensor.told()).collect())
    }

    pub(super) fn make_tensors(
        &self,
        specs: Vec<TensorSpec>,
        source: Option<SourceId>,
        in_the_way: InTheWay,
    ) -> Result<Vec<Arc<Tensor>>, DeviceError> {
        if specs.len() > MAX_AT_ONCE {
            return Err(DeviceError::TooMany { count: specs.len() });
        }
        let checked = specs.into_iter().map(|spec| self.check(spec)).collect::<Result<Vec<_>, _>>()?;
        let (guard, mut draft, tensors) = self.place_all(&checked, source, in_the_way)?;
        // Usually the ranges hold nothing.
        let is_empty = |tensor: &Tensor| self.blocks.touched(tensor.blocks()).is_none();
        let are_empty = tensors.iter().all(|tensor| is_empty(tensor));
        let turns: Vec<_> = if are_empty {
            for tensor in &tensors {
                tensor.transition.set_charged(0..u64::MAX);
            }
            Vec::new()
        } else {
            tensors.iter().map(|tensor| tensor.transition.turn().lock()).collect()
        };
        if are_empty {
            for tensor in &tensors {
                draft.list(tensor);
            }
        }
        let next = draft.finish();
        self.keep(&next, Change::made(&tensors))?;
        tensors.iter().for_each(Tensor::join_base);
        replace(guard, next);
        if are_empty {
            drop(turns);
            return Ok(tensors);
        }
        for tensor in &tensors {
            self.charge_to(tensor);
        }
        let mut reached = Vec::with_capacity(tensors.len());
        let coded = tensors.iter().try_for_each(|tensor| {
            let mut came_to = tensor.blocks().start;
            let coded = self.code_anew(tensor, &mut came_to);
            reached.push(came_to);
            coded
        });
        if let Err(why) = coded {
            match self.unmake(&tensors) {
                Ok(_) => {
                    tensors.iter().zip(reached).for_each(|(tensor, to)| self.code_back(tensor, to));
                    return Err(why);
                }
                Err(also) => tracing::warn!(
                    tensor = tensors[0].info.name,
                    tensors = tensors.len(),
                    "not all is coded anew: {why}; nor back as it was: {also}"
                ),
            }
        }
        self.list(&tensors);
        drop(turns);
        Ok(tensors)
    }

    /// Whether it can have tensors of the format: an image of version 1 has not all.
    pub fn holds(&self, format: Format) -> bool {
        self.coded_store().is_none_or(|store| store.holds(format))
    }

    /// Checks all of `spec` but its place.
    pub(super) fn check(&self, spec: TensorSpec) -> Result<Checked, TensorError> {
        let (elements, shape) = tensor::check(&spec)?;
        if !self.holds(spec.format) {
            return Err(TensorError::Version { name: spec.name, format: spec.format });
        }
        let windows = tensor::windows(&spec)?.filter(|_| self.config.mode == Mode::Trace);
        self.check_lossy(&spec)?;
        let partition = self.accounts.partition_table.of_name(&spec.name)?;
        let TensorSpec { name, dpa, length, format, layout, codec, base, .. } = spec;
        let codec = codec.unwrap_or(self.config.codec);
        let info = TensorInfo { name, dpa: 0, length, elements, shape, format, layout, codec, base };
        Ok(Checked { info, dpa, partition, windows })
    }

    /// That a tensor that is to be lossy can be here.
    fn check_lossy(&self, spec: &TensorSpec) -> Result<(), TensorError> {
        let why = match self.config.mode {
            _ if spec.layout.lossy().is_none() => return Ok(()),
            mode @ (Mode::Plain | Mode::GComp) => format!("a device in the mode {mode} codes no windows"),
            Mode::Trace if self.coded_store().is_some_and(Store::has_lossy) => return Ok(()),
            Mode::Trace => "an image of version 1 has no lossy blocks; `lamina image upgrade` makes it one \
                            of version 2"
                .to_owned(),
        };
        Err(TensorError::Kv { name: spec.name.clone(), why: KvError::Lossy { why } })
    }

    /// Forgets a tensor and its views. Its bytes stay, readable through the base window.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none of this name. A KV tensor's windows are coded block
    /// by block first, and what is stored as differences by itself: [`DeviceError::Store`] if there
    /// is no room for that; then it stays. So does one that others are coded against.
    pub fn remove_tensor(&self, name: &str) -> Result<(), DeviceError> {
        self.remove_tensor_with_views(name).map(drop)
    }

    /// As [`Self::remove_tensor`]: the views that went with it, also those that came when it was
    /// leaving already.
    ///
    /// # Errors
    /// As [`Self::remove_tensor`].
    pub fn remove_tensor_with_views(&self, name: &str) -> Result<Vec<ViewInfo>, DeviceError> {
        self.drop_tensor(name, |_, _| Ok(()))
    }

    /// As [`Self::remove_tensor_with_views`], of who answers the kernel, and so waits for nobody
    /// who may wait for that.
    ///
    /// # Errors
    /// As [`Self::remove_tensor`]; [`DeviceError::Busy`].
    pub fn remove_tensor_now(&self, name: &str) -> Result<Vec<ViewInfo>, DeviceError> {
        let find = |map: &Map| Ok(map.tensor(name)?.clone());
        self.in_turn(find, InTheWay::Refused, |tensor| self.empty_and_drop(tensor, |_, _| Ok(())))
    }

    /// Forgets a tensor and its views, and has `empty` discard what it holds, DPA and bytes: after
    /// nothing can be derived from it any more, and before its windows are coded block by block,
    /// for which a full store has no room. The views that went with it.
    ///
    /// # Errors
    /// As [`Self::remove_tensor`]; what `empty` says. Then it stays, with what it still holds.
    pub fn drop_tensor<E: From<DeviceError>>(
        &self,
        name: &str,
        empty: impl FnOnce(u64, u64) -> Result<(), E>,
    ) -> Result<Vec<ViewInfo>, E> {
        let find = |map: &Map| Ok(map.tensor(name)?.clone());
        self.in_turn(find, InTheWay::Awaited, |tensor| self.empty_and_drop(tensor, empty))
    }

    /// As [`Self::drop_tensor`], of one that was made so: resized since or not, and not another of
    /// its name. One that is gone needs nothing.
    ///
    /// # Errors
    /// As [`Self::drop_tensor`].
    pub(crate) fn drop_made(&self, made: &Tensor) -> Result<(), DeviceError> {
        let find = |map: &Map| {
            let found = map.tensor(&made.info.name).ok().filter(|found| found.is_same(made));
            found.cloned().ok_or_else(|| TensorError::Unknown { name: made.info.name.clone() })
        };
        let empty = |dpa, length: u64| self.discard(dpa, length.next_multiple_of(BLOCK_BYTES as u64));
        match self.in_turn(find, InTheWay::Awaited, |tensor| self.empty_and_drop(tensor, empty)) {
            Ok(_) | Err(DeviceError::Tensor(TensorError::Unknown { .. })) => Ok(()),
            Err(why) => Err(why),
        }
    }

    /// Forgets a tensor whose turn the caller has, when `empty` has discarded what it holds.
    fn empty_and_drop<E: From<DeviceError>>(
        &self,
        tensor: &Arc<Tensor>,
        empty: impl FnOnce(u64, u64) -> Result<(), E>,
    ) -> Result<Vec<ViewInfo>, E> {
        let tensors = std::slice::from_ref(tensor);
        self.leave(tensors)?;
        let dropped = empty(tensor.info.dpa, tensor.info.length);
        dropped.and_then(|()| Ok(self.unmake(tensors)?)).inspect_err(|_| self.stay(tensor))
    }

    /// Does `what` with the tensor that `find` finds, in its turn.
    pub(super) fn in_turn<T, E: From<DeviceError>>(
        &self,
        find: impl Fn(&Map) -> Result<Arc<Tensor>, TensorError>,
        in_the_way: InTheWay,
        what: impl FnOnce(&Arc<Tensor>) -> Result<T, E>,
    ) -> Result<T, E> {
        loop {
            let tensor = find(&self.map()).map_err(DeviceError::from)?;
            let turn = tensor.transition.turn();
            let turn = match in_the_way {
                InTheWay::Awaited => Some(turn.lock()),
                InTheWay::Refused => turn.try_lock(),
            };
            let _turn = turn.ok_or_else(|| busy(&tensor))?;
            // It may have gone while somebody else had the turn.
            if self.map().has(&tensor) {
                return what(&tensor);
            }
        }
    }

    /// Says that a tensor that was leaving stays.
    pub(super) fn stay(&self, tensor: &Tensor) {
        let _alone = self.alone();
        tensor.transition.set_leaving(false);
    }

    /// Marks tensors as leaving, unless others are coded against them.
    fn leave(&self, tensors: &[Arc<Tensor>]) -> Result<(), DeviceError> {
        let _alone = self.alone();
        tensors.iter().try_for_each(|tensor| is_no_base(tensor))?;
        for tensor in tensors {
            tensor.transition.set_leaving(true);
        }
        Ok(())
    }

    /// Makes a view of a tensor, or finds it if it is there.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`], [`DeviceError::View`] or [`DeviceError::NoRoomForView`], and then
    /// nothing changed.
    pub fn create_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, DeviceError> {
        let guard = self.alone();
        let tensor = guard.listed_tensor(tensor)?.clone();
        let (view, found) = find_view(&guard, &tensor, spelling)?;
        if let Some(alias) = found {
            return Ok(alias.info.clone());
        }
        let no_room = |length, largest| DeviceError::NoRoomForView {
            tensor: tensor.info.name.clone(),
            view: view.to_string(),
            length,
            largest,
        };
        let length = view.bytes_for(tensor.info.elements).ok_or_else(|| no_room(u64::MAX, 0))?;
        let offset = guard
            .free_view(length, tensor.partition, &self.accounts.partition_table)
            .map_err(|largest| no_room(length, largest))?;
        let mut draft = guard.draft();
        let number = draft.number();
        let alias = Arc::new(Alias::new((tensor, number), view, (offset, length), self.new_traffic()));
        draft.add_alias(&alias);
        let next = draft.finish();
        self.keep(&next, Change::view(&alias))?;
        replace(guard, next);
        Ok(alias.info.clone())
    }

    /// Forgets a view: what it was. Its place in the views window is free, and reads as zeros.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] or [`DeviceError::View`] if there cannot be such, and
    /// [`DeviceError::UnknownView`] if there is none.
    pub fn remove_view(&self, tensor: &str, spelling: &str) -> Result<ViewInfo, DeviceError> {
        let guard = self.alone();
        let tensor = guard.listed_tensor(tensor)?.clone();
        let (view, found) = find_view(&guard, &tensor, spelling)?;
        let Some(alias) = found else {
            let tensor = tensor.info.name.clone();
            return Err(DeviceError::UnknownView { tensor, view: view.to_string() });
        };
        let mut draft = guard.draft();
        draft.remove_alias(&alias);
        let next = draft.finish();
        self.keep(&next, Change::removed_view(&alias))?;
        replace(guard, next);
        Ok(alias.info.clone())
    }

    /// Makes a tensor longer or shorter where it is, with its outermost dimension. What is cut off
    /// stays, as bytes of nobody that are coded as they were; what comes to it stays too.
    ///
    /// A KV tensor's windows are coded anew.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none of this name, if it cannot have this length, or if
    /// what is behind it is not free; [`DeviceError::NoRoomForView`] if what is behind one of its
    /// views is not; [`DeviceError::Store`] if there is no room to code its windows. Then it is as
    /// it was.
    pub fn resize_tensor(&self, name: &str, length: u64) -> Result<TensorInfo, DeviceError> {
        self.resize_tensor_with_views(name, length).map(|(tensor, _)| tensor)
    }

    /// As [`Self::resize_tensor`]: the tensor, and its views as they were until then.
    ///
    /// # Errors
    /// As [`Self::resize_tensor`].
    pub fn resize_tensor_with_views(
        &self,
        name: &str,
        length: u64,
    ) -> Result<(TensorInfo, Vec<ViewInfo>), DeviceError> {
        let find = |map: &Map| Ok(map.listed_tensor(name)?.clone());
        self.in_turn(find, InTheWay::Awaited, |tensor| self.resize(tensor, length))
    }

    /// Resizes a tensor whose turn the caller has.
    fn resize(&self, old: &Arc<Tensor>, length: u64) -> Result<(TensorInfo, Vec<ViewInfo>), DeviceError> {
        is_no_base(old)?;
        let TensorInfo { name, dpa, format, layout, codec, base, .. } = old.told();
        if let Some(base) = base {
            return Err(TensorError::IsDerived { name, base }.into());
        }
        let shape = resized(&old.info, length)?;
        let spec = TensorSpec {
            name,
            dpa: Some(dpa),
            length,
            elements: None,
            shape,
            format,
            layout,
            codec: Some(codec),
            base: None,
        };
        let Checked { info, partition, windows, .. } = self.check(spec)?;
        let info = TensorInfo { dpa, ..info };
        let (before, after) = (old.blocks(), Tensor::blocks_of(&info));
        {
            let _alone = self.alone();
            old.transition.set_leaving(true);
        }
        let (guard, next, new, views) = match self.replace_resized(old, &info, partition, windows) {
            Ok(replaced) => replaced,
            Err(why) => {
                // What was charged to nobody meanwhile is charged to it again.
                self.charge_from(old, old.transition.charged().end.min(before.end - before.start));
                self.stay(old);
                self.code_windows_of(old);
                return Err(why);
            }
        };
        let _turn = new.transition.turn().lock();
        replace(guard, next);
        self.charge_from(&new, before.end.min(after.end) - after.start);
        // What it held is coded as before, unless by windows; if there is no room for the rest, it
        // stays as it was.
        let mut reached = if windows.is_some() { after.start } else { before.end.min(after.end) };
        if let Err(why) = self.code_anew(&new, &mut reached) {
            tracing::warn!(tensor = info.name, "not all of it is coded anew: {why}");
        }
        Ok((info, views))
    }

    /// The map with a tensor of another length in place of `old`, saved, and the views of `old`.
    fn replace_resized(
        &self,
        old: &Arc<Tensor>,
        info: &TensorInfo,
        partition: usize,
        windows: Option<Shape>,
    ) -> Result<(Alone<'_>, Map, Arc<Tensor>, Vec<ViewInfo>), DeviceError> {
        let (before, after) = (old.blocks(), Tensor::blocks_of(info));
        let kept = after.end.min(before.end) - before.start;
        self.free_behind(&self.map(), old, info)?;
        loop {
            self.uncode(std::slice::from_ref(old))?;
            self.charge_nobody_from(old, kept);
            let guard = self.alone();
            if self.has_open_windows(old) {
                continue;
            }
            self.free_behind(&guard, old, info)?;
            // Somebody may have derived a tensor from it meanwhile.
            is_no_base(old)?;
            let mut draft = guard.draft();
            let views: Vec<_> = guard.aliases_of(old).cloned().collect();
            let new = Arc::new(Tensor {
                info: info.clone(),
                partition,
                windows,
                stored: Arc::clone(&old.stored),
                live: Arc::clone(&old.live),
                traffic: Arc::clone(&old.traffic),
                source: SourceOf::new(old.source.get()),
                transition: Transition::making(),
                lineage: Lineage::default(),
                number: draft.number(),
            });
            new.transition.set_charged(0..kept);
            draft.remove_tensor(old);
            draft.add_tensor(&new, true);
            for view in &views {
                let length = view.view.bytes_for(info.elements).unwrap_or(u64::MAX);
                let offset = view.info.offset;
                let free = draft.map().free_view_at(offset, partition);
                if length > free {
                    let (tensor, view) = (info.name.clone(), view.info.view.clone());
                    return Err(DeviceError::NoRoomForView { tensor, view, length, largest: free });
                }
                let (number, view_of) = (draft.number(), view.view.clone());
                let traffic = Arc::clone(&view.traffic);
                let alias = Alias::new((new.clone(), number), view_of, (offset, length), traffic);
                draft.add_alias(&Arc::new(alias));
            }
            let next = draft.finish();
            self.keep(&next, Change::made(std::slice::from_ref(&new)))?;
            let views = views.iter().map(|view| view.info.clone()).collect();
            return Ok((guard, next, new, views));
        }
    }

    /// That the bytes behind a tensor that it is to have are nobody's.
    fn free_behind(&self, map: &Map, old: &Tensor, info: &TensorInfo) -> Result<(), TensorError> {
        let own = &self.accounts.partition_table.partitions[old.partition].base;
        let end = info.length.checked_next_multiple_of(BLOCK_BYTES as u64);
        let end = end.and_then(|length| info.dpa.checked_add(length)).unwrap_or(u64::MAX);
        let other = map.owner_in(&(old.end()..end.min(own.end).max(old.end())));
        let (behind, begins) = match other {
            Some(other) => (other.info.name.clone(), other.info.dpa),
            None => ("nothing more".to_owned(), own.end),
        };
        if end <= begins {
            return Ok(());
        }
        let (name, length, dpa) = (info.name.clone(), info.length, info.dpa);
        // A tensor of no bytes has none of its own: another's may lie on both sides of its place.
        let free = begins.saturating_sub(dpa);
        Err(TensorError::NotFree { name, length, dpa, free, behind })
    }

    /// Codes the windows of a tensor that were coded block by block, as far as there is room.
    fn code_windows_of(&self, tensor: &Arc<Tensor>) {
        if tensor.windows.is_some()
            && let Err(why) = self.code_anew(tensor, &mut tensor.blocks().start.clone())
        {
            tracing::debug!(tensor = tensor.info.name, "its windows stay coded block by block: {why}");
        }
    }

    /// Charges a tensor for what its blocks hold from the one numbered `first` of it on, for which
    /// nobody is charged.
    fn charge_from(&self, tensor: &Tensor, first: u64) {
        let Range { start, end } = tensor.blocks();
        self.move_charges(tensor, start + first..end, take_over, |passed| {
            tensor.transition.set_charged(0..passed);
        });
        let _alone = self.alone();
        tensor.transition.set_charged(0..u64::MAX);
    }

    /// Charges nobody for what the blocks of a tensor hold from the one numbered `first` of it on.
    fn charge_nobody_from(&self, tensor: &Tensor, first: u64) {
        let Range { start, end } = tensor.blocks();
        // From the last one on: those before are charged to it all the while.
        let mut behind = end.min(start.saturating_add(tensor.transition.charged().end));
        while behind > start + first {
            let from = behind.saturating_sub(MAX_BLOCKS_A_HOLD).max(start + first);
            let _alone = self.alone();
            for block in self.blocks_touched(from..behind) {
                hand_back(&self.accounts.stats, tensor, self.charged(block));
            }
            tensor.transition.set_charged(0..from - start);
            behind = from;
        }
    }

    /// The blocks of a range that may hold something.
    fn blocks_touched(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        let mut at = range.start;
        let found = std::iter::from_fn(move || {
            let touched = self.blocks.touched(at..range.end)?;
            at = touched.end;
            Some(touched)
        });
        found.flatten()
    }

    /// Every tensor, by DPA.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        self.map().listed().map(|tensor| tensor.told()).collect()
    }

    /// Whether this very tensor is there, as it was made.
    pub(crate) fn has_tensor(&self, tensor: &Arc<Tensor>) -> bool {
        self.map().has(tensor)
    }

    /// Whether it is there, resized or not.
    pub(crate) fn has_made(&self, tensor: &Tensor) -> bool {
        self.map().tensor(&tensor.info.name).is_ok_and(|found| found.is_same(tensor))
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorInfo, DeviceError> {
        Ok(self.map().listed_tensor(name)?.told())
    }

    /// Every view, by offset.
    pub fn views(&self) -> Vec<ViewInfo> {
        self.map().aliases().map(|alias| alias.info.clone()).collect()
    }

    /// Every view of a tensor, by offset; none if there is no such tensor.
    pub fn views_of(&self, tensor: &str) -> Vec<ViewInfo> {
        let map = self.map();
        let Ok(tensor) = map.listed_tensor(tensor) else { return Vec::new() };
        map.aliases_of(tensor).map(|alias| alias.info.clone()).collect()
    }

    /// Whether this view still is where it was made.
    pub fn has_view(&self, view: &ViewInfo) -> bool {
        let map = self.map();
        let tensor = map.tensor(&view.tensor);
        tensor.is_ok_and(|tensor| map.aliases_of(tensor).any(|alias| alias.info == *view))
    }

    /// Where a tensor goes in `map`.
    fn place(&self, map: &Map, Checked { info, dpa, partition, .. }: &Checked) -> Result<u64, TensorError> {
        let TensorInfo { name, length, .. } = info;
        let own = &self.accounts.partition_table.partitions[*partition].base;
        let (length, capacity) = (*length, own.end - own.start);
        if map.tensor(name).is_ok() {
            return Err(TensorError::Exists { name: name.clone() });
        }
        let Some(dpa) = *dpa else {
            return map
                .free_base(length, *partition, &self.accounts.partition_table)
                .map_err(|largest| TensorError::NoRoom { name: name.clone(), length, capacity, largest });
        };
        if !dpa.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(TensorError::Unaligned { name: name.clone(), dpa });
        }
        let end = dpa.checked_add(length).filter(|end| *end <= self.config.base_bytes);
        let Some(end) = end else {
            let capacity = self.config.base_bytes;
            return Err(TensorError::PastCapacity { name: name.clone(), dpa, length, capacity });
        };
        if dpa < own.start || end > own.end {
            let (name, start, end) = (name.clone(), own.start, own.end);
            return Err(TensorError::OutsidePartition { name, dpa, length, start, end });
        }
        match map.owner_in(&(dpa..end)) {
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

    /// Puts tensors where they go, listed to nobody yet, in a map behind the one that is held.
    fn place_all(
        &self,
        checked: &[Checked],
        source: Option<SourceId>,
        in_the_way: InTheWay,
    ) -> Result<(Alone<'_>, Draft, Vec<Arc<Tensor>>), DeviceError> {
        'again: loop {
            let guard = self.alone();
            let mut draft = guard.draft();
            let mut tensors = Vec::with_capacity(checked.len());
            for one in checked {
                match self.place(draft.map(), one) {
                    Ok(dpa) => {
                        let base = self.base_of(&guard, one)?;
                        tensors.push(self.put(&mut draft, one, dpa, source, base));
                    }
                    Err(why) => {
                        let Some(other) = other_in_the_way(&guard, one.partition, &why) else {
                            return Err(why.into());
                        };
                        drop(guard);
                        if in_the_way == InTheWay::Refused {
                            return Err(busy(&other));
                        }
                        drop(other.transition.turn().lock());
                        continue 'again;
                    }
                }
            }
            return Ok((guard, draft, tensors));
        }
    }

    fn put(
        &self,
        draft: &mut Draft,
        checked: &Checked,
        dpa: u64,
        source: Option<SourceId>,
        base: Option<Arc<Tensor>>,
    ) -> Arc<Tensor> {
        let Checked { info, partition, windows, .. } = checked;
        let tensor = Arc::new(Tensor {
            info: TensorInfo { dpa, ..info.clone() },
            partition: *partition,
            windows: *windows,
            stored: Arc::default(),
            live: Arc::default(),
            traffic: self.new_traffic(),
            source: SourceOf::new(source),
            transition: Transition::making(),
            lineage: Lineage::of(base),
            number: draft.number(),
        });
        draft.add_tensor(&tensor, false);
        tensor
    }

    /// Holds the map alone.
    pub(super) fn alone(&self) -> Alone<'_> {
        Alone {
            map: self.map.write(),
            #[cfg(test)]
            _hold: super::holds::Hold::begin(),
        }
    }

    /// Removes tensors whose turns the caller has. If that fails they are there as before, but
    /// marked as leaving.
    fn unmake(&self, tensors: &[Arc<Tensor>]) -> Result<Vec<ViewInfo>, DeviceError> {
        self.leave(tensors)?;
        // Every store that did not know of it is done.
        self.uncode(tensors)?;
        for tensor in tensors {
            self.charge_nobody(tensor);
        }
        self.forget_closed(tensors).inspect_err(|_| tensors.iter().for_each(|tensor| self.charge_to(tensor)))
    }

    /// Codes their windows block by block, and their differences by themselves.
    fn uncode(&self, tensors: &[Arc<Tensor>]) -> Result<(), DeviceError> {
        let mut derived = tensors.iter().filter(|tensor| tensor.lineage.base().is_some());
        derived.try_for_each(|tensor| self.uncode_differences(tensor, |_| ControlFlow::Continue(())))?;
        let windowed = tensors.iter().filter_map(|tensor| Some((tensor, tensor.windows.as_ref()?)));
        windowed.into_iter().try_for_each(|(tensor, shape)| self.uncode_windows(tensor, shape))
    }

    /// The last steps of a removal. Every store closes a window that is leaving, so one that is
    /// open holds a store that found no room: it finds some now, or the tensors stay.
    fn forget_closed(&self, tensors: &[Arc<Tensor>]) -> Result<Vec<ViewInfo>, DeviceError> {
        loop {
            if let Some(views) = self.forget(tensors)? {
                return Ok(views);
            }
            self.uncode(tensors)?;
        }
    }

    /// Forgets tensors and their views, which it gives, if none of their windows is open.
    fn forget(&self, tensors: &[Arc<Tensor>]) -> Result<Option<Vec<ViewInfo>>, DeviceError> {
        let guard = self.alone();
        if tensors.iter().any(|tensor| self.has_open_windows(tensor)) {
            return Ok(None);
        }
        let views = tensors.iter().flat_map(|tensor| guard.aliases_of(tensor));
        let views = views.map(|alias| alias.info.clone()).collect();
        let mut draft = guard.draft();
        for tensor in tensors {
            draft.remove_tensor(tensor);
        }
        let next = draft.finish();
        #[cfg(test)]
        super::holds::may_fail(super::holds::Step::Forget)?;
        self.keep(&next, Change::removed(tensors))?;
        tensors.iter().for_each(Tensor::leave_base);
        replace(guard, next);
        Ok(Some(views))
    }

    /// The last step of making tensors: people are told of them.
    fn list(&self, tensors: &[Arc<Tensor>]) {
        let guard = self.alone();
        let mut draft = guard.draft();
        for tensor in tensors {
            tensor.transition.set_leaving(false);
            draft.list(tensor);
        }
        let next = draft.finish();
        replace(guard, next);
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
        self.move_charges(tensor, tensor.blocks(), take_over, set_charged);
    }

    /// Charges nobody for what the blocks of a tensor hold, which it is charged for.
    fn charge_nobody(&self, tensor: &Tensor) {
        let set_charged = |passed| tensor.transition.set_charged(passed..u64::MAX);
        self.move_charges(tensor, tensor.blocks(), hand_back, set_charged);
    }

    /// Moves the charges of a tensor's blocks by `one`, and has `passed` know after each step how
    /// many blocks are behind it.
    fn move_charges(
        &self,
        tensor: &Tensor,
        Range { start: mut at, end }: Range<u64>,
        one: impl Fn(&Stats, &Tensor, Charge),
        passed: impl Fn(u64),
    ) {
        let start = tensor.blocks().start;
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
pub(super) struct Alone<'a> {
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

/// The shape of a tensor with another length: its outermost dimension is another.
fn resized(info: &TensorInfo, length: u64) -> Result<Vec<u64>, TensorError> {
    let Some((_, inner)) = info.shape.split_first().filter(|(_, inner)| !inner.is_empty()) else {
        return Ok(Vec::new());
    };
    let elements = info.format.elements_in(length);
    if elements == info.elements {
        // Also that of a tensor of no elements, whose rows may be larger than any.
        return Ok(info.shape.clone());
    }
    let what = "a row of the shape";
    let row = tensor::product_of(&info.name, what, inner)?;
    match elements.checked_rem(row) {
        Some(0) => Ok([&[elements / row], inner].concat()),
        _ => Err(TensorError::Size {
            name: info.name.clone(),
            what,
            value: row,
            elements,
            format: info.format,
            length,
        }),
    }
}

/// The view of a tensor with this spelling, and where it is if it is there.
fn find_view(map: &Map, tensor: &Tensor, spelling: &str) -> Result<(View, Option<Arc<Alias>>), DeviceError> {
    let view = View::parse(tensor.info.format, spelling)
        .map_err(|why| DeviceError::View { tensor: tensor.info.name.clone(), why })?;
    let spelling = view.to_string();
    let found = map.aliases_of(tensor).find(|alias| alias.info.view == spelling).cloned();
    Ok((view, found))
}

fn busy(tensor: &Tensor) -> DeviceError {
    DeviceError::Busy { tensor: tensor.info.name.clone() }
}

/// The tensor that is being made or removed and because of which another cannot be made now.
fn other_in_the_way(map: &Map, partition: usize, why: &TensorError) -> Option<Arc<Tensor>> {
    let named = |name: &String| map.tensor(name).ok().filter(|tensor| tensor.transition.turn().is_locked());
    match why {
        TensorError::Exists { name } | TensorError::Overlap { other: name, .. } => named(name),
        TensorError::NoRoom { .. } => {
            map.tensors().find(|is| is.partition == partition && is.transition.turn().is_locked())
        }
        _ => None,
    }
    .cloned()
}
