//! Where tensors' bytes came from: the checkpoints that an image's tensors were loaded from, kept
//! with its tables.
//!
//! * A tensor that was loaded names its source from the moment it is made; one that was made
//!   otherwise has none.
//! * A source whose contents are not known was not loaded whole: what its tensors hold is nobody's
//!   data yet.
//! * A source is kept as long as a tensor names it, and so is what its file consisted of. That is
//!   an opaque text here.
//! * An earlier program knows none of this. It kept the paths of what was loaded whole, and these
//!   are kept on for it; what it made has no source.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{Device, DeviceError, device_image::Change, tables::InTheWay};
use crate::{
    tensor::{SourceId, Tensor, TensorError, TensorSpec},
    window::{Gaps, Map},
};
use lamina_codec::BLOCK_BYTES;
use lamina_store as store;

/// A checkpoint, as told apart from others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The path it was found at last.
    pub path: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// Digest of its header, which names its tensors.
    pub header: String,
    /// Digest of its tensors' bytes as they were loaded; none as long as they are not all there.
    pub contents: Option<String>,
    /// By what the system tells that the file has not been touched since; none if it could not have
    /// told.
    pub stamp: Option<Stamp>,
}

/// What the system changes when a file is written, or another put in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The file system.
    pub device: u64,
    /// The file in it.
    pub inode: u64,
    /// When its bytes were last written: seconds and nanoseconds.
    pub modified: (i64, i64),
    /// When anything about it was last changed.
    pub changed: (i64, i64),
}

/// Where new tensors would lie: the DPA of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Places {
    /// Where nothing is stored, as far as the mode can tell.
    Empty(Vec<u64>),
    /// Where they fit, but not all without something that is stored there and is no tensor's.
    Stored(Vec<u64>),
}

impl Device {
    /// Notes a checkpoint, so that tensors can name it. Without an image nothing is noted, and the
    /// number is 0.
    pub fn note_source(&self, source: Source) -> SourceId {
        let Some(image) = &self.image else { return 0 };
        let mut sources = image.sources.lock();
        let id = sources.keys().next_back().map_or(1, |last| last + 1);
        sources.insert(id, source);
        id
    }

    /// Makes tensors that name a source, all of them or none: see [`Device::create_tensors`].
    ///
    /// # Errors
    /// As [`Device::create_tensors`].
    pub(crate) fn create_tensors_from(
        &self,
        specs: Vec<TensorSpec>,
        id: SourceId,
    ) -> Result<Vec<Arc<Tensor>>, DeviceError> {
        self.make_tensors(specs, Some(id), InTheWay::Awaited)
    }

    /// Every tensor's name, with the source it names.
    pub fn sources_of_tensors(&self) -> BTreeMap<String, Option<SourceId>> {
        let map = self.map();
        map.tensors().map(|tensor| (tensor.info.name.clone(), tensor.source.get())).collect()
    }

    /// What is known of a source.
    pub fn source(&self, id: SourceId) -> Option<Source> {
        self.image.as_ref()?.sources.lock().get(&id).cloned()
    }

    /// Has these tensors name a source, all of them at once.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if one of them is not there, [`DeviceError::Store`] if there is no
    /// room to say so. Then each names what it did.
    pub fn set_source_of(&self, tensors: &BTreeSet<String>, id: SourceId) -> Result<(), DeviceError> {
        let map = self.map.write();
        let tensors = tensors.iter().map(|name| map.tensor(name)).collect::<Result<Vec<_>, _>>()?;
        let before: Vec<_> = tensors.iter().map(|tensor| tensor.source.swap(id)).collect();
        let tensors: Vec<_> = tensors.into_iter().cloned().collect();
        self.keep(&map, Change::made(&tensors)).inspect_err(|_| {
            for (tensor, before) in tensors.iter().zip(before) {
                tensor.source.swap(before);
            }
        })
    }

    /// Says what is known of a source by now.
    ///
    /// # Errors
    /// [`DeviceError::Store`] if there is no room to say so. Then what was said before stays.
    pub fn set_source(&self, id: SourceId, source: Source) -> Result<(), DeviceError> {
        let Some(image) = &self.image else { return Ok(()) };
        let map = self.map.write();
        let before = image.sources.lock().insert(id, source.clone());
        self.keep(&map, Change::source(id, source)).inspect_err(|_| {
            let mut sources = image.sources.lock();
            match before {
                Some(before) => sources.insert(id, before),
                None => sources.remove(&id),
            };
        })
    }

    /// The files that sources were, for which [`Device::set_file`] was called.
    pub fn files(&self) -> BTreeMap<SourceId, String> {
        self.image.as_ref().map(|image| image.files.lock().clone()).unwrap_or_default()
    }

    /// Says what the file that a source was consisted of; an empty text says nothing any more.
    ///
    /// # Errors
    /// [`DeviceError::Store`] if there is no room to say so. Then what was said before stays.
    pub fn set_file(&self, id: SourceId, file: String) -> Result<(), DeviceError> {
        let Some(image) = &self.image else { return Ok(()) };
        let map = self.map.write();
        let set = |file: Option<String>| {
            let mut files = image.files.lock();
            match file.filter(|file| !file.is_empty()) {
                Some(file) => files.insert(id, file),
                None => files.remove(&id),
            }
        };
        let before = set(Some(file.clone()));
        self.keep(&map, Change::file(id, file)).inspect_err(|_| drop(set(before)))
    }

    /// Whether an earlier program noted that the checkpoint of this name was loaded whole.
    pub fn was_loaded(&self, checkpoint: &str) -> bool {
        self.image.as_ref().is_some_and(|image| image.loaded.lock().contains(checkpoint))
    }

    /// Notes for an earlier program that the checkpoint of this name was loaded whole.
    ///
    /// # Errors
    /// [`DeviceError::Store`] if there is no room to say so.
    pub fn set_loaded(&self, checkpoint: &str) -> Result<(), DeviceError> {
        let map = self.map.write();
        if let Some(image) = &self.image {
            image.loaded.lock().insert(checkpoint.to_owned());
        }
        self.keep(&map, Change::loaded(checkpoint))
    }

    /// Where new tensors of these names and lengths would lie, once `removed` are gone and `taken`
    /// are others': where nothing is stored, or else wherever there is room.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] for the first that has no place, or whose name no partition of the
    /// device has.
    pub fn places_for(
        &self,
        wanted: &[(String, u64)],
        removed: &BTreeSet<String>,
        taken: &[Range<u64>],
    ) -> Result<Places, DeviceError> {
        let map = self.map();
        let mut gaps = map.base_gaps().to_vec();
        for tensor in removed.iter().filter_map(|name| map.tensor(name).ok()) {
            gaps[tensor.partition].give(&(tensor.info.dpa..tensor.end()));
        }
        take(&mut gaps, taken);
        let anywhere = self.first_places(wanted, gaps.clone())?;
        let stored = self.stored_outside(&map);
        if stored.is_empty() {
            return Ok(Places::Empty(anywhere));
        }
        take(&mut gaps, &stored);
        Ok(match self.first_places(wanted, gaps) {
            Ok(empty) => Places::Empty(empty),
            Err(_) => Places::Stored(anywhere),
        })
    }

    /// Places for what is wanted, one after the other, in what is free of each partition.
    fn first_places(&self, wanted: &[(String, u64)], mut gaps: Vec<Gaps>) -> Result<Vec<u64>, DeviceError> {
        let mut places = Vec::with_capacity(wanted.len());
        for (name, length) in wanted {
            let number = self.accounts.partition_table.of_name(name)?;
            let partition = &self.accounts.partition_table.partitions[number].base;
            let bytes = length.checked_next_multiple_of(BLOCK_BYTES as u64).unwrap_or(u64::MAX);
            let dpa = if bytes == 0 { Ok(partition.start) } else { gaps[number].fit(bytes) };
            let dpa = dpa.map_err(|largest| {
                let capacity = partition.end - partition.start;
                TensorError::NoRoom { name: name.clone(), length: *length, capacity, largest }
            })?;
            gaps[number].take(&(dpa..dpa + bytes));
            places.push(dpa);
        }
        Ok(places)
    }

    /// The ranges outside of tensors where anything is stored, or poisoned; none of a mode that
    /// cannot tell.
    fn stored_outside(&self, map: &Map) -> Vec<Range<u64>> {
        let Some(store) = self.coded_store() else { return Vec::new() };
        if self.accounts.stats.opaque_blocks.get() == 0 && self.poison_now().0 == 0 {
            return Vec::new();
        }
        let all = 0..store::blocks(self.config.base_bytes);
        let candidates =
            if self.image.is_some() { store.populated() } else { std::iter::once(all).collect() };
        let (mut found, bytes) = (Vec::new(), BLOCK_BYTES as u64);
        for range in candidates {
            let mut block = range.start;
            while block < range.end {
                if let Some(tensor) = map.tensor_at(block * bytes) {
                    block = store::blocks(tensor.end());
                    continue;
                }
                if !store.entry(block).is_ok_and(|entry| entry.place.is_none()) {
                    push(&mut found, block * bytes..(block + 1) * bytes);
                }
                block += 1;
            }
        }
        found
    }

    /// The sources that tensors of `map` name, as they are saved.
    pub(super) fn sources_in(map: &Map, all: &BTreeMap<SourceId, Source>) -> BTreeMap<SourceId, Source> {
        let named = map.tensors().filter_map(|tensor| tensor.source.get());
        named.filter_map(|id| Some((id, all.get(&id)?.clone()))).collect()
    }
}

/// Takes ranges from the gaps of all partitions.
fn take(gaps: &mut [Gaps], ranges: &[Range<u64>]) {
    for gaps in gaps {
        for range in ranges {
            gaps.take(range);
        }
    }
}

/// Adds a range to a list, as one with the last where they touch.
fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}
