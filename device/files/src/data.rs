//! What files hold.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;

use lamina_codec::BLOCK_BYTES;

use super::class::Class;
use super::error::FileError;
use super::extents::{Piece, held};
use super::parts::cuts;
use super::state::{Change, MAX_SIZE, Meta};
use super::{Caller, Core, Files, now, space};

/// Bytes of a block.
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Most bytes that a growing file is given beforehand.
const MAX_AHEAD: u64 = 32 << 20;
/// Bytes that are copied at once.
const PIECE: u64 = 1 << 20;

/// By which way the kernel brings what is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A `write`, which leaves its bytes in the page cache too.
    Cached,
    /// A `write` past the page cache: `O_DIRECT`.
    Direct,
    /// Pages that are written back.
    WrittenBack,
}

impl Files {
    /// Fills `out` from `offset` on: how many bytes there were. `cached` says that the kernel keeps
    /// them, and may be stored into there.
    ///
    /// # Errors
    /// What the device says.
    pub fn read(&self, inode: u64, offset: u64, out: &mut [u8], cached: bool) -> Result<usize, FileError> {
        let gate = self.gate(inode)?;
        let _shared = gate.read();
        let (pieces, count) = {
            let mut core = self.core.lock();
            let node = core.state.file(inode)?;
            let end = node.meta.size.min(offset.saturating_add(out.len() as u64));
            if end <= offset {
                return Ok(0);
            }
            let pieces = node.extents.pieces(&(offset..end));
            if cached {
                core.live(inode).cached = true;
            }
            (pieces, index(end - offset))
        };
        for Piece { at, length, dpa } in pieces {
            let out = &mut out[index(at - offset)..index(at - offset + length)];
            match dpa {
                Some(dpa) => self.device.read_base(dpa, out)?,
                None => out.fill(0),
            }
        }
        self.read.fetch_add(count as u64, std::sync::atomic::Ordering::Relaxed);
        Ok(count)
    }

    /// Stores `data` at `offset`: how many bytes of it. What is written back from a mapping never
    /// makes a file larger, unless the kernel keeps writes too: then that says how large a file is,
    /// and when it was modified.
    ///
    /// # Errors
    /// [`FileError::is_no_room`] if none could be stored; what the device says.
    pub fn write(&self, inode: u64, offset: u64, data: &[u8], way: Way) -> Result<usize, FileError> {
        let gate = self.gate(inode)?;
        if data.is_empty() {
            return Ok(0);
        }
        let wanted = offset.checked_add(data.len() as u64).filter(|end| *end <= MAX_SIZE);
        let end = wanted.ok_or(FileError::TooLarge { bytes: offset })?;
        {
            let _shared = gate.read();
            let size = self.core.lock().state.file(inode)?.meta.size;
            if end <= size || way == Way::WrittenBack && !self.write_cache {
                let data = &data[..index(size.saturating_sub(offset)).min(data.len())];
                return self.store(inode, offset, data, way);
            }
        }
        let _alone = gate.write();
        self.clean(inode)?;
        let stored = self.store(inode, offset, data, way);
        let mut core = self.core.lock();
        let whole = matches!(stored, Ok(count) if count == data.len());
        let done = offset + *stored.as_ref().unwrap_or(&0) as u64;
        let mut meta = core.meta(inode)?;
        // A write that did not come to its end has left something behind the file's.
        core.live(inode).clean = whole;
        if done > meta.size && stored.is_ok() {
            meta.size = done;
            let recorded =
                self.commit(&mut core, vec![Change::Put { inode, meta }], Caller::default(), false);
            if let Err(why) = recorded {
                core.live(inode).clean = false;
                return Err(why);
            }
        }
        stored
    }

    /// Stores bytes of a file whose gate the caller holds.
    fn store(&self, inode: u64, offset: u64, data: &[u8], way: Way) -> Result<usize, FileError> {
        let range = offset..offset + data.len() as u64;
        if range.is_empty() {
            return Ok(0);
        }
        let written_back = way == Way::WrittenBack;
        let pieces = {
            let mut core = self.core.lock();
            self.map(&mut core, inode, &range)?;
            // Before the kernel hears that its pages hold what the file does: from then on somebody
            // may store into them, and nobody reads the file for that.
            let live = core.live(inode);
            match way {
                Way::Direct => {}
                Way::Cached => live.written = true,
                // Others of its pages wait.
                Way::WrittenBack => live.cached = true,
            }
            core.state.file(inode)?.extents.pieces(&range)
        };
        let mut stored = 0;
        for Piece { at, length, dpa } in pieces {
            let data = &data[index(at - offset)..index(at - offset + length)];
            // Nothing takes a place away from who holds the gate.
            let Some(dpa) = dpa else { break };
            let mut done = 0;
            let written = self.device.write_back(dpa, data, &mut done);
            stored += done;
            match written {
                Ok(()) => {}
                // Of what is written back the kernel hears an error, and not how much was stored.
                Err(why) if why.is_no_room() && stored > 0 && !written_back => break,
                Err(why) => return Err(why.into()),
            }
        }
        if !(written_back && self.write_cache) {
            self.core.lock().live(inode).modified = Some(now());
        }
        self.written.fetch_add(stored as u64, std::sync::atomic::Ordering::Relaxed);
        Ok(stored)
    }

    /// Has every hole of a range of a file lie somewhere, and records that.
    fn map(&self, core: &mut Core, inode: u64, range: &Range<u64>) -> Result<(), FileError> {
        let node = core.state.file(inode)?;
        let class = node.class();
        let unit = class.unit();
        let units = range.start / unit * unit..range.end.next_multiple_of(unit);
        let holes: Vec<_> =
            node.extents.pieces(&units).into_iter().filter(|piece| piece.dpa.is_none()).collect();
        if holes.is_empty() {
            return Ok(());
        }
        let (mapped, mut hint) = node.extents.end();
        let (mut changes, mut taken) = (Vec::new(), Vec::new());
        for hole in holes {
            let follows = hole.at == mapped;
            let grows = follows && hole.at + hole.length == units.end;
            let more = if grows { ahead(units.end, unit) } else { 0 };
            let places = match core.space.take(&class, hole.length + more, hint.filter(|_| follows)) {
                Err(FileError::NoAddress { .. }) => self.take(core, &class, hole.length),
                places => places,
            };
            let places = match places {
                Ok(places) => places,
                Err(why) => {
                    core.space.put_back(&taken);
                    return Err(why);
                }
            };
            let mut at = hole.at;
            for (dpa, length) in places {
                changes.push(Change::Map { inode, at, dpa, length });
                at += length;
                hint = Some(dpa + length);
                taken.push((dpa, length));
            }
        }
        let mapped = self.commit(core, changes, Caller::default(), false);
        mapped.inspect_err(|_| core.space.put_back(&taken))
    }

    /// Places of `length` bytes together. If no address is left for that, files give back what they
    /// were given beforehand.
    pub(crate) fn take(
        &self,
        core: &mut Core,
        class: &Class,
        length: u64,
    ) -> Result<Vec<(u64, u64)>, FileError> {
        match core.space.take(class, length, None) {
            Err(FileError::NoAddress { .. }) => {
                self.trim(core)?;
                core.space.take(class, length, None)
            }
            places => places,
        }
    }

    /// Takes from all files what they were given beforehand.
    fn trim(&self, core: &mut Core) -> Result<(), FileError> {
        let (mut changes, mut freed, mut gates) = (Vec::new(), Vec::new(), Vec::new());
        for (inode, node) in core.state.nodes() {
            let from = node.meta.size.next_multiple_of(node.class().unit());
            let (end, _) = node.extents.end();
            let gate = core.live.get(&inode).map(|live| Arc::clone(&live.gate)).unwrap_or_default();
            // Who holds a gate may be about to store there.
            if from < end
                && let Some(alone) = gate.try_write_arc()
            {
                let (cut, free) = cuts(core, inode, &(from..end))?;
                freed.extend(free);
                changes.extend(cut);
                gates.push(alone);
            }
        }
        if !changes.is_empty() {
            self.commit(core, changes, Caller::default(), true)?;
            core.space.give(freed);
        }
        Ok(())
    }

    /// Makes zeros of what lies behind the end of a file whose gate the caller holds alone.
    fn clean(&self, inode: u64) -> Result<(), FileError> {
        let ranges = {
            let mut core = self.core.lock();
            if core.live(inode).clean {
                return Ok(());
            }
            let node = core.state.file(inode)?;
            let (size, (end, _)) = (node.meta.size, node.extents.end());
            node.extents.pieces(&(size..end.max(size)))
        };
        for Piece { length, dpa, .. } in ranges {
            if let Some(dpa) = dpa {
                space::discard(&self.device, &(dpa..dpa + length))?;
            }
        }
        self.core.lock().live(inode).clean = true;
        Ok(())
    }

    /// Makes a file longer or shorter, and tells `meta` of what else is to change in the same step.
    pub(crate) fn resize(
        &self,
        inode: u64,
        size: u64,
        meta: impl FnOnce(&mut Meta),
    ) -> Result<(), FileError> {
        if size > MAX_SIZE {
            return Err(FileError::TooLarge { bytes: size });
        }
        let gate = self.gate(inode)?;
        let _alone = gate.write();
        self.resize_alone(inode, size, meta)
    }

    /// As [`Self::resize`], of who holds the gate alone.
    fn resize_alone(&self, inode: u64, size: u64, meta: impl FnOnce(&mut Meta)) -> Result<(), FileError> {
        let before = self.core.lock().state.file(inode)?.meta.size;
        if size > before {
            self.clean(inode)?;
        }
        let mut core = self.core.lock();
        let mut now_is = core.meta(inode)?;
        now_is.size = size;
        if size != before {
            let now = now();
            (now_is.times[1], now_is.times[2]) = (now, now);
        }
        meta(&mut now_is);
        let mut changes = vec![Change::Put { inode, meta: now_is }];
        let mut freed = Vec::new();
        if size < before {
            let node = core.state.file(inode)?;
            let from = size.next_multiple_of(node.class().unit());
            let (end, _) = node.extents.end();
            if from < end {
                let (cut, free) = cuts(&core, inode, &(from..end))?;
                freed = free;
                changes.extend(cut);
            }
        }
        self.commit(&mut core, changes, Caller::default(), size <= before)?;
        if size < before {
            core.live(inode).clean = false;
        }
        drop(core);
        self.free_alone(freed);
        if size < before
            && let Err(why) = self.clean(inode)
        {
            // It is tried again before the file grows.
            tracing::debug!("what was cut off is not zeros yet: {why}");
        }
        Ok(())
    }

    /// Makes zeros of a range of a file, up to its end.
    ///
    /// # Errors
    /// What the device says.
    pub fn punch(&self, inode: u64, range: &Range<u64>) -> Result<(), FileError> {
        let gate = self.gate(inode)?;
        let _alone = gate.write();
        let (freed, rest) = {
            let mut core = self.core.lock();
            let node = core.state.file(inode)?;
            let range = range.start..range.end.min(node.meta.size.next_multiple_of(BLOCK));
            if range.is_empty() {
                return Ok(());
            }
            let unit = node.class().unit();
            let whole = range.start.next_multiple_of(unit)..range.end / unit * unit;
            let mut freed = Vec::new();
            if whole.start < whole.end {
                let (cut, free) = cuts(&core, inode, &whole)?;
                if !free.is_empty() {
                    // One piece that becomes two takes more room for good.
                    let splits = cut.len() > 1 || core.state.file(inode)?.extents.splits(&whole);
                    self.commit(&mut core, cut, Caller::default(), !splits)?;
                }
                freed = free;
            }
            core.live(inode).modified = Some(now());
            (freed, core.state.file(inode)?.extents.pieces(&range))
        };
        self.free_alone(freed);
        for range in held(&rest) {
            space::discard(&self.device, &range)?;
        }
        Ok(())
    }

    /// Has a range of a file have an address, and the file reach to its end if it `grows`.
    ///
    /// # Errors
    /// [`FileError::is_no_room`] if the store has less room than that.
    pub fn allocate(&self, inode: u64, range: &Range<u64>, grows: bool) -> Result<(), FileError> {
        if range.end > MAX_SIZE {
            return Err(FileError::TooLarge { bytes: range.end });
        }
        let gate = self.gate(inode)?;
        let _alone = gate.write();
        self.clean(inode)?;
        let size = {
            let mut core = self.core.lock();
            let node = core.state.file(inode)?;
            let holes = |range: &Range<u64>| {
                let holes = node.extents.pieces(range).into_iter().filter(|piece| piece.dpa.is_none());
                holes.map(|piece| piece.length).sum::<u64>()
            };
            let unit = node.class().unit();
            let places = holes(&(range.start / unit * unit..range.end.next_multiple_of(unit)));
            let (bytes, limit) = (holes(range), self.device.space().available);
            if bytes > limit {
                return Err(FileError::NoAddress { wanted: bytes, limit });
            }
            // What cannot fit is not begun.
            if places > core.space.free_bytes() {
                core.space.give_stuck();
                self.trim(&mut core)?;
            }
            let limit = core.space.free_bytes();
            if places > limit {
                return Err(FileError::NoAddress { wanted: places, limit });
            }
            self.map(&mut core, inode, range)?;
            core.state.file(inode)?.meta.size
        };
        if grows && range.end > size { self.resize_alone(inode, range.end, |_| ()) } else { Ok(()) }
    }

    /// The next byte from `offset` on that may be anything but zero, or of a hole.
    ///
    /// # Errors
    /// [`FileError::NothingBehind`] if there is none.
    pub fn seek(&self, inode: u64, offset: u64, data: bool) -> Result<u64, FileError> {
        let gate = self.gate(inode)?;
        let _shared = gate.read();
        let (size, pieces, is_stored_into) = {
            let mut core = self.core.lock();
            let node = core.state.file(inode)?;
            let size = node.meta.size;
            if offset >= size {
                return Err(FileError::NothingBehind { offset });
            }
            let pieces = node.extents.pieces(&(offset..size));
            // What is not written back yet may be anywhere.
            let live = core.live(inode);
            if live.cached && live.writable {
                return Ok(if data { offset } else { size });
            }
            (size, pieces, live.written && live.writable)
        };
        for Piece { at, length, dpa } in pieces {
            let found = match dpa {
                None if data => continue,
                None => return Ok(at),
                // Whatever of it was zeros may be none any more.
                Some(_) if is_stored_into => {
                    if data {
                        0
                    } else {
                        length
                    }
                }
                Some(dpa) if data => self.device.next_data(dpa..dpa + length) - dpa,
                Some(dpa) => self.device.next_hole(dpa..dpa + length) - dpa,
            };
            if found < length {
                return Ok((at + found).min(size));
            }
        }
        if data { Err(FileError::NothingBehind { offset }) } else { Ok(size) }
    }

    /// Bytes that are stored of a file.
    ///
    /// # Errors
    /// What the device says.
    pub fn stored(&self, inode: u64) -> Result<u64, FileError> {
        let gate = self.gate(inode)?;
        let _shared = gate.read();
        let mut places = Vec::new();
        {
            let core = self.core.lock();
            let node = core.state.file(inode)?;
            for (at, dpa, length) in node.extents.all() {
                let length = length.min(node.meta.size.saturating_sub(at));
                places.extend(core.space.slabs_of(&(dpa..dpa + length)));
            }
        }
        let mut stored = 0;
        for (slab, range) in places {
            stored += space::stored(&self.device, &slab, range)?;
        }
        Ok(stored)
    }

    /// Codes what a file holds as another class, and makes `change` with that in one step.
    pub(crate) fn recode(
        &self,
        caller: Caller,
        inode: u64,
        class: &Class,
        change: Change,
    ) -> Result<(), FileError> {
        let gate = self.gate(inode)?;
        let _alone = gate.write();
        let (size, pieces, old) = {
            let core = self.core.lock();
            let node = core.state.file(inode)?;
            (node.meta.size, node.extents.pieces(&(0..node.meta.size)), node.extents.end().0)
        };
        let held_now: Vec<_> = pieces.iter().filter(|piece| piece.dpa.is_some()).collect();
        let unit = class.unit();
        let mut wanted: Vec<Range<u64>> = Vec::new();
        for piece in &held_now {
            let range = piece.at / unit * unit..(piece.at + piece.length).next_multiple_of(unit);
            match wanted.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => wanted.push(range),
            }
        }
        let (mut changes, mut taken, mut to) = (Vec::new(), Vec::new(), super::extents::Extents::default());
        if old > 0 {
            changes.push(Change::Cut { inode, at: 0, length: old });
        }
        for range in wanted {
            let places = self.take(&mut self.core.lock(), class, range.end - range.start);
            let places = places.inspect_err(|_| self.core.lock().space.put_back(&taken))?;
            let mut at = range.start;
            for (dpa, length) in places {
                changes.push(Change::Map { inode, at, dpa, length });
                to.insert(at, dpa, length);
                taken.push((dpa, length));
                at += length;
            }
        }
        let copied = held_now.iter().try_for_each(|piece| self.copy(piece, &to));
        let recorded = copied.and_then(|()| {
            let mut core = self.core.lock();
            let meta = core.meta(inode)?;
            let freed: Vec<_> = super::places_of(core.state.file(inode)?);
            changes.push(change);
            changes.push(Change::Put { inode, meta: Meta { size, ..meta } });
            self.commit(&mut core, changes, caller, false)?;
            // What lies behind the end was not copied.
            core.live(inode).clean = true;
            Ok(freed)
        });
        let freed = match recorded {
            Ok(freed) => freed,
            Err(why) => {
                let taken = taken.into_iter().map(|(dpa, length)| dpa..dpa + length).collect();
                self.free_alone(taken);
                return Err(why);
            }
        };
        self.free_alone(freed);
        Ok(())
    }

    /// Copies a piece of a file to where it is to lie. What of it is lost reads as a pattern, and
    /// would be that from then on: it is refused.
    pub(crate) fn copy(&self, piece: &Piece, to: &super::extents::Extents) -> Result<(), FileError> {
        let Some(from) = piece.dpa else { return Ok(()) };
        let mut bytes = vec![0; index(PIECE)];
        let end = from + piece.length;
        let mut at = self.device.next_data(from..end);
        while at < end {
            let length = PIECE.min(end - at);
            let bytes = &mut bytes[..index(length)];
            self.device.read_base(at, bytes)?;
            let inside = piece.at + (at - from);
            // Damage is found by reading.
            if let Some(lost) = self.device.first_poison(&(at..at + length)) {
                return Err(FileError::Lost { at: inside + (lost - at), length: BLOCK });
            }
            for part in to.pieces(&(inside..inside + length)) {
                let part_bytes = &bytes[index(part.at - inside)..index(part.at - inside + part.length)];
                if let Some(dpa) = part.dpa {
                    self.device.write_base(dpa, part_bytes)?;
                }
            }
            at = self.device.next_data(at + length..end.max(at + length));
        }
        Ok(())
    }

    /// What who moves bytes of an inode holds.
    pub(crate) fn gate(&self, inode: u64) -> Result<Arc<RwLock<()>>, FileError> {
        let mut core = self.core.lock();
        core.state.node(inode)?;
        Ok(Arc::clone(&core.live(inode).gate))
    }
}

/// Bytes that a file of `size` is given beforehand: a quarter of it, so that it lies in few pieces.
/// They take an address and nothing of the store.
fn ahead(size: u64, unit: u64) -> u64 {
    let chunk = (size / 4).min(MAX_AHEAD);
    if chunk < unit { 0 } else { chunk / unit * unit }
}

/// A number of bytes that a buffer has, or more than any has.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
