//! Where files may lie: *slabs*, hidden tensors that files share, each for bytes of one class.
//!
//! * What no file has of a slab holds nothing. What a file had is discarded before another gets it.
//! * A slab is made when no other has room, as large as all of its class together, where the device
//!   holds nothing; one that no file uses is removed. What it leaves free is of no use to other
//!   classes. So the first of a class is a thousandth of all, and none has more than a quarter of
//!   what is left, if what is wanted is not more.
//! * Which parts are free is written nowhere: it is what no extent names. An extent may reach from
//!   one slab into the next.
//! * The *reserve* is a tensor of filler, random bytes. A full store takes no record, not even that
//!   a file is removed; then the reserve goes, and comes again as far as there is room. If that is
//!   not enough, the [log](super::log) is begun anew in the room that it keeps itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use lamina_codec::BLOCK_BYTES;
use lamina_codec::format::Format;
use lamina_device::device::{Device, DeviceError, Places};
use lamina_device::layout::Layout;
use lamina_device::tensor::{TensorError, TensorSpec};

use super::class::Class;
use super::error::FileError;
use super::extents::Piece;

/// What the names of all tensors of the file system begin with. No model can be called so.
const NAMES: &str = "/.lamina/files/";
pub(crate) const RESERVE: &str = "/.lamina/files/reserve";
const RESERVE_BYTES: u64 = 64 << 10;
/// Bytes of the first slab of a class at least and at most.
const FIRST: Range<u64> = 64 << 10..16 << 20;
/// Bytes of the largest slab.
const LARGEST: u64 = 1 << 30;

/// A tensor that files share.
struct Slab {
    name: String,
    class: Class,
    range: Range<u64>,
}

/// Free ranges of the slabs of a class.
#[derive(Default)]
struct Free {
    /// Where each ends.
    by_start: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
}

/// All slabs.
pub(crate) struct Space {
    device: Arc<Device>,
    slabs: Vec<Slab>,
    free: BTreeMap<String, Free>,
    /// What could not be discarded, and so is not free yet.
    stuck: Vec<Range<u64>>,
    /// Bytes that slabs may have together.
    limit: u64,
    /// Bytes that they have.
    taken: u64,
    next: u64,
}

impl Free {
    fn insert(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.by_length.insert((range.end - range.start, range.start));
            self.by_start.insert(range.start, range.end);
        }
    }

    fn remove(&mut self, range: &Range<u64>) {
        self.by_start.remove(&range.start);
        self.by_length.remove(&(range.end - range.start, range.start));
    }

    /// Adds what touches others of the same slab, in one with them.
    fn give(&mut self, range: Range<u64>, slab: &Range<u64>) -> Range<u64> {
        let mut range = range;
        let before = self.by_start.range(..range.start).next_back().map(|(start, end)| *start..*end);
        if let Some(before) = before.filter(|before| before.end == range.start && before.start >= slab.start)
        {
            self.remove(&before);
            range.start = before.start;
        }
        let behind = self.by_start.get(&range.end).map(|end| range.end..*end);
        if let Some(behind) = behind.filter(|behind| behind.start < slab.end) {
            self.remove(&behind);
            range.end = behind.end;
        }
        self.insert(range.clone());
        range
    }

    /// Takes at most `length` bytes, whole units, from the beginning of a free range.
    fn take(&mut self, range: &Range<u64>, length: u64) -> (u64, u64) {
        let length = length.min(range.end - range.start);
        self.remove(range);
        self.insert(range.start + length..range.end);
        (range.start, length)
    }
}

impl Space {
    /// The slabs that the device has, of which files lie in `used`.
    pub(crate) fn open(device: &Arc<Device>, limit: u64, used: &[Range<u64>]) -> Result<Self, FileError> {
        let mut space = Self {
            device: Arc::clone(device),
            slabs: Vec::new(),
            free: BTreeMap::new(),
            stuck: Vec::new(),
            limit,
            taken: 0,
            next: 0,
        };
        for name in device.hidden_tensors() {
            let Some((number, class)) = slab_of(&name) else { continue };
            let Some((dpa, length)) = device.place_of(&name) else { continue };
            space.next = space.next.max(number.saturating_add(1));
            space.taken += length;
            space.slabs.push(Slab { class, range: dpa..dpa.saturating_add(length), name: name.clone() });
        }
        space.slabs.sort_by_key(|slab| slab.range.start);
        let mut used: Vec<_> = used.iter().flat_map(|range| space.parts(range)).collect();
        used.sort_by_key(|range| range.start);
        let mut rest = used.into_iter().peekable();
        let mut free = Vec::new();
        for slab in &space.slabs {
            let mut at = slab.range.start;
            while let Some(range) = rest.next_if(|range| range.start < slab.range.end) {
                if range.start < at || range.end > slab.range.end {
                    let why =
                        format!("bytes {:#x} to {:#x} are of no file, or of two", range.start, range.end);
                    return Err(FileError::Damaged { why });
                }
                free.push(at..range.start);
                at = range.end;
            }
            free.push(at..slab.range.end);
        }
        if let Some(range) = rest.next() {
            return Err(FileError::Damaged { why: format!("bytes at {:#x} are in no slab", range.start) });
        }
        free.retain(|range| !range.is_empty());
        // A process that died may have left something there.
        space.give(free);
        Ok(space)
    }

    /// Bytes that files may take together.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that no file takes of what all may.
    pub(crate) fn free_bytes(&self) -> u64 {
        let free: u64 =
            self.free.values().flat_map(|free| free.by_length.iter().map(|(length, _)| *length)).sum();
        self.limit.saturating_sub(self.taken) + free
    }

    /// Takes places of `length` bytes together, whole units; the first at `hint` if that is free.
    pub(crate) fn take(
        &mut self,
        class: &Class,
        length: u64,
        hint: Option<u64>,
    ) -> Result<Vec<(u64, u64)>, FileError> {
        let (key, unit) = (class.key(), class.unit());
        let (mut places, mut left) = (Vec::new(), length);
        if let Some(at) = hint
            && let Some(free) = self.free.get_mut(&key)
            && let Some(end) = free.by_start.get(&at).copied()
        {
            let place = free.take(&(at..end), left);
            left -= place.1;
            places.push(place);
        }
        while left > 0 {
            let free = self.free.entry(key.clone()).or_default();
            let best = free.by_length.range((left, 0)..).next().copied();
            if best.is_none() {
                match self.make_slab(class, left, unit) {
                    Ok(true) => continue,
                    Ok(false) => {}
                    Err(why) => {
                        self.put_back(&places);
                        return Err(why);
                    }
                }
            }
            let free = self.free.entry(key.clone()).or_default();
            let Some((long, at)) = best.or_else(|| free.by_length.last().copied()) else {
                let (wanted, limit) = (length, self.limit);
                self.put_back(&places);
                return Err(FileError::NoAddress { wanted, limit });
            };
            let place = free.take(&(at..at + long), left);
            left -= place.1;
            places.push(place);
        }
        Ok(places)
    }

    /// Puts back what was taken and not used. A slab that was made for it goes: one small file in
    /// it would keep all of its addresses from the other classes.
    pub(crate) fn put_back(&mut self, places: &[(u64, u64)]) {
        for (at, length) in places {
            if let Some((slab, true)) = self.free_part(*at..*at + length) {
                self.drop_slab(slab);
            }
        }
    }

    /// Notes a part of a slab as free: which slab, and whether all of it is.
    fn free_part(&mut self, part: Range<u64>) -> Option<(usize, bool)> {
        let at = self.slabs.iter().position(|slab| slab.range.contains(&part.start))?;
        let slab = &self.slabs[at];
        let now = self.free.entry(slab.class.key()).or_default().give(part, &slab.range);
        Some((at, now == slab.range))
    }

    /// Bytes of the first slab of a class.
    fn first(&self) -> u64 {
        (self.limit / 1024).clamp(FIRST.start, FIRST.end)
    }

    /// Gives back what could not be given before.
    pub(crate) fn give_stuck(&mut self) {
        let stuck = std::mem::take(&mut self.stuck);
        self.give(stuck);
    }

    /// Makes a slab, if there is a place for one.
    fn make_slab(&mut self, class: &Class, wanted: u64, unit: u64) -> Result<bool, FileError> {
        let before = self.stuck_bytes();
        self.give_stuck();
        if self.stuck_bytes() < before {
            return Ok(true);
        }
        if self.limit.saturating_sub(self.taken) < wanted {
            self.drop_empty(class);
        }
        let of_class: u64 = self
            .slabs
            .iter()
            .filter(|slab| slab.class == *class)
            .map(|slab| slab.range.end - slab.range.start)
            .sum();
        let most = self.limit.saturating_sub(self.taken);
        let mut length = of_class.clamp(self.first(), LARGEST).min(most / 4).max(wanted).min(most);
        loop {
            length -= length % unit;
            if length == 0 {
                return Ok(false);
            }
            let name = format!("{NAMES}{}/{}", self.next, class.key());
            match place_of_nothing(&self.device, &name, length)? {
                Some(dpa) => {
                    self.next += 1;
                    match make_tensor(&self.device, &name, dpa, length, class.format(), class.layout()) {
                        // Somebody else took the place meanwhile, and may wait for who asks this.
                        Err(DeviceError::Busy { .. } | DeviceError::Tensor(TensorError::Overlap { .. })) => {
                            continue;
                        }
                        made => made?,
                    }
                    self.taken += length;
                    let range = dpa..dpa + length;
                    self.free.entry(class.key()).or_default().insert(range.clone());
                    self.slabs.push(Slab { name, class: *class, range });
                    return Ok(true);
                }
                None => length /= 2,
            }
        }
    }

    fn stuck_bytes(&self) -> u64 {
        self.stuck.iter().map(|range| range.end - range.start).sum()
    }

    /// Gives back what files had and was discarded, or discards it now.
    pub(crate) fn give(&mut self, ranges: Vec<Range<u64>>) {
        for range in ranges {
            if let Err(why) = discard(&self.device, &range) {
                tracing::warn!("a place of no file any more is not free yet: {why}");
                self.stuck.push(range);
                continue;
            }
            for part in self.parts(&range) {
                let Some((at, true)) = self.free_part(part) else { continue };
                let Slab { class, range, .. } = &self.slabs[at];
                // A small one stays for the next file.
                let is_small = range.end - range.start <= self.first();
                if *class != Class::OPAQUE || self.slabs.len() > 1 || !is_small {
                    self.drop_slab(at);
                }
            }
        }
    }

    /// A range in parts, each of which lies in one slab or begins in none.
    fn parts(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut parts, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let slab = self.slabs.iter().find(|slab| slab.range.contains(&at));
            let end = slab.map_or(range.end, |slab| slab.range.end.min(range.end));
            parts.push(at..end);
            at = end;
        }
        parts
    }

    /// Removes slabs of other classes in which nothing lies: this one needs their addresses.
    fn drop_empty(&mut self, needed: &Class) {
        for at in (0..self.slabs.len()).rev() {
            let Slab { class, range, .. } = &self.slabs[at];
            if class == needed {
                continue;
            }
            let free = self.free.get(&class.key()).and_then(|free| free.by_start.get(&range.start));
            if free == Some(&range.end) {
                self.drop_slab(at);
            }
        }
    }

    /// Removes a slab that is all free.
    fn drop_slab(&mut self, at: usize) {
        let slab = &self.slabs[at];
        if let Err(why) = self.device.remove_tensor_now(&slab.name) {
            tracing::debug!("an empty slab stays: {why}");
            return;
        }
        if let Some(free) = self.free.get_mut(&slab.class.key()) {
            free.remove(&slab.range);
        }
        self.taken = self.taken.saturating_sub(slab.range.end - slab.range.start);
        self.slabs.swap_remove(at);
    }

    /// The names of the slabs of a range, and which part of each it is.
    pub(crate) fn slabs_of(&self, range: &Range<u64>) -> Vec<(String, Range<u64>)> {
        let parts = self.parts(range).into_iter().filter_map(|part| {
            let slab = self.slabs.iter().find(|slab| slab.range.contains(&part.start))?;
            Some((slab.name.clone(), part.start - slab.range.start..part.end - slab.range.start))
        });
        parts.collect()
    }
}

impl Space {
    /// Whether a place lies in slabs of this class alone.
    pub(crate) fn is_of(&self, class: &Class, range: &Range<u64>) -> bool {
        self.classes_of(range).iter().all(|(of, _)| of == class)
    }

    /// The classes of a range, and which part of it each is of.
    pub(crate) fn classes_of(&self, range: &Range<u64>) -> Vec<(Class, Range<u64>)> {
        let parts = self.parts(range).into_iter().filter_map(|part| {
            let slab = self.slabs.iter().find(|slab| slab.range.contains(&part.start))?;
            Some((slab.class, part))
        });
        parts.collect()
    }

    /// What of some pieces comes out even with their slabs' units, which alone may be given to
    /// others. Of slabs of `own` all of it: the caller saw to that.
    pub(crate) fn whole(&self, own: &Class, pieces: &[Piece]) -> Vec<Piece> {
        let mut found = Vec::new();
        for Piece { at, length, dpa } in pieces {
            let Some(dpa) = *dpa else { continue };
            for part in self.parts(&(dpa..dpa + length)) {
                let Some(slab) = self.slabs.iter().find(|slab| slab.range.contains(&part.start)) else {
                    continue;
                };
                let unit = if slab.class == *own { 1 } else { slab.class.unit() };
                let first = slab.range.start + (part.start - slab.range.start).next_multiple_of(unit);
                let last = part.end - (part.end - slab.range.start) % unit;
                if first < last {
                    found.push(Piece { at: at + (first - dpa), length: last - first, dpa: Some(first) });
                }
            }
        }
        found
    }
}

#[cfg(test)]
impl Space {
    /// Whether all that is free comes out even with its slab's units.
    pub(crate) fn is_even(&self) -> bool {
        let mut free = self.free.values().flat_map(|free| &free.by_start);
        free.all(|(start, end)| {
            let slab = self.slabs.iter().find(|slab| slab.range.contains(start));
            slab.is_some_and(|slab| {
                let unit = slab.class.unit();
                let begin = slab.range.start;
                (start - begin).is_multiple_of(unit) && (end - begin).is_multiple_of(unit)
            })
        })
    }
}

/// Discards a range of the device, if it holds anything.
pub(crate) fn discard(device: &Device, range: &Range<u64>) -> Result<(), DeviceError> {
    let mut at = range.start;
    while at < range.end {
        at = device.next_data(at..range.end);
        if at < range.end {
            let mut done = 0;
            device.discard_step(at, range.end - at, 64 << 20, &mut done)?;
            at += done.max(1);
        }
    }
    Ok(())
}

/// Bytes that are stored of a range of a slab.
pub(crate) fn stored(device: &Device, slab: &str, range: Range<u64>) -> Result<u64, FileError> {
    let view = device.view_of(slab, "full")?;
    Ok(device.stored_of(&view, range)?)
}

/// A place for a tensor in which nothing is stored.
pub(crate) fn place_of_nothing(device: &Device, name: &str, length: u64) -> Result<Option<u64>, DeviceError> {
    match device.places_for(&[(name.to_owned(), length)], &BTreeSet::new(), &[]) {
        Ok(Places::Empty(places)) => Ok(places.first().copied()),
        Ok(Places::Stored(_)) | Err(DeviceError::Tensor(TensorError::NoRoom { .. })) => Ok(None),
        Err(why) => Err(why),
    }
}

/// Makes a hidden tensor. Requests of the kernel wait for it, so it waits for none of those who may
/// wait for the kernel.
pub(crate) fn make_tensor(
    device: &Device,
    name: &str,
    dpa: u64,
    length: u64,
    format: Format,
    layout: Layout,
) -> Result<(), DeviceError> {
    let spec = TensorSpec { layout, ..TensorSpec::new(name.to_owned(), Some(dpa), length, format) };
    device.create_tensor_now(spec).map(drop)
}

/// The number and the class of a slab of this name.
fn slab_of(name: &str) -> Option<(u64, Class)> {
    let (number, key) = name.strip_prefix(NAMES)?.split_once('/')?;
    Some((number.parse().ok()?, serde_json::from_str(key).ok()?))
}

/// Whether files have slabs.
pub(crate) fn has_slabs(device: &Device) -> bool {
    device.hidden_tensors().iter().any(|name| slab_of(name).is_some())
}

/// The first tensor of the file system's own that touches this range: its name, DPA and bytes.
pub(crate) fn tensor_in(device: &Device, range: &Range<u64>) -> Option<(String, u64, u64)> {
    let own = device.hidden_tensors().into_iter().filter(|name| name.starts_with(NAMES));
    own.filter_map(|name| device.place_of(&name).map(|(dpa, length)| (name, dpa, length)))
        .find(|(_, dpa, length)| *dpa < range.end && range.start < dpa + length)
}

/// The name of a tensor of the file system's own.
pub(crate) fn named(what: &str) -> String {
    format!("{NAMES}{what}")
}

/// Takes the reserve up, as far as there is room. It is no error if there is none.
pub(crate) fn fill_reserve(device: &Device) {
    let dpa = match device.place_of(RESERVE) {
        Some((dpa, _)) => dpa,
        None => match place_of_nothing(device, RESERVE, RESERVE_BYTES) {
            Ok(Some(dpa)) => {
                let made = make_tensor(device, RESERVE, dpa, RESERVE_BYTES, Format::Opaque, Layout::Weight);
                if made.is_err() {
                    return;
                }
                dpa
            }
            _ => return,
        },
    };
    let (end, block) = (dpa + RESERVE_BYTES, BLOCK_BYTES as u64);
    let mut at = device.next_hole(dpa..end);
    while at < end {
        if let Err(why) = device.write_base(at, &filler(at, block)) {
            tracing::debug!("no room for all of the reserve: {why}");
            return;
        }
        at = device.next_hole(at + block..end);
    }
}

/// Bytes that take as much as they have, others for each `seed`.
pub(crate) fn filler(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    let words = (0..length / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// Gives the reserve up: whether there was any of it.
pub(crate) fn drop_reserve(device: &Device) -> bool {
    let Some((dpa, _)) = device.place_of(RESERVE) else { return false };
    let end = dpa + RESERVE_BYTES;
    device.next_data(dpa..end) < end && device.discard(dpa, RESERVE_BYTES).is_ok()
}
