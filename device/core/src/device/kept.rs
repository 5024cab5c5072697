//! What a device keeps in its image besides blocks: the tables of tensors and views, and staged KV windows.
//!
//! The tables are saved before a change of them takes effect, so that who is told of it can rely on it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use lamina_abi::{DIRECTORY_BYTES, VIEW_ALIGN};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Device, DeviceConfig, DeviceError, sources::Source};
use crate::{
    counters::{Gauge, Numbers, Traffic},
    division::Division,
    tensor::{self, SourceId, SourceOf, Tensor, TensorInfo, Transition},
    window::{Alias, Counted, DirectoryPages, Map},
};
use lamina_codec::{BLOCK_BYTES, view::View};
use lamina_store::{counters::Counters, image::Image, tables::Tables};

/// The parts of the image that are not the store's.
pub(super) struct Kept {
    image: Image,
    tables: Arc<Tables>,
    counters: Counters,
    /// Paths of checkpoints that were loaded whole, for earlier programs.
    pub(super) loaded: Mutex<BTreeSet<String>>,
    pub(super) sources: Mutex<BTreeMap<SourceId, Source>>,
    /// Whether counters have numbers that the tables do not say yet.
    renumbered: bool,
}

/// The tables as they are saved.
#[derive(Default, Serialize, Deserialize)]
struct Saved {
    /// Of the directory of each part.
    generations: Vec<u64>,
    tensors: Vec<SavedTensor>,
    views: Vec<SavedView>,
    loaded: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    sources: BTreeMap<SourceId, Source>,
}

#[derive(Serialize, Deserialize)]
struct SavedTensor {
    #[serde(flatten)]
    info: TensorInfo,
    /// Its counters.
    counters: Option<usize>,
    /// Those that came later; an older program's image does not say.
    #[serde(default)]
    later_counters: Option<usize>,
    /// What it was loaded from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<SourceId>,
}

#[derive(Serialize, Deserialize)]
struct SavedView {
    tensor: String,
    view: String,
    offset: u64,
    counters: Option<usize>,
    #[serde(default)]
    later_counters: Option<usize>,
}

impl Kept {
    /// What `image` keeps, and the map its tables give.
    pub(super) fn open(
        image: Image,
        config: &DeviceConfig,
        division: &Division,
    ) -> Result<(Self, Map), DeviceError> {
        let (tables, text) = Tables::open(&image)?;
        let broken = |why: serde_json::Error| DeviceError::Image { why: why.to_string() };
        if image.head().is_some() && text.is_none() {
            // Checkpoints have tables, and an image with checkpoints always does.
            tables.save(&serde_json::to_vec(&Saved::default()).expect("nothing"))?;
        }
        let saved: Saved =
            text.map_or_else(|| Ok(Saved::default()), |text| serde_json::from_slice(&text).map_err(broken))?;
        let loaded = Mutex::new(saved.loaded.clone());
        let sources = Mutex::new(saved.sources.clone());
        let renumbered = saved.is_older();
        let counters = Counters::open(&image, config.first_process, saved.counters_end())?;
        let map = restore(saved, config, division, &counters)?;
        Ok((Self { image, tables: Arc::new(tables), counters, loaded, sources, renumbered }, map))
    }

    pub(super) fn image(&self) -> &Image {
        &self.image
    }

    pub(super) fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }
}

impl Device {
    /// Saves the tables of `map`, if there is an image to save them in.
    pub(super) fn keep(&self, map: &Map) -> Result<(), DeviceError> {
        let Some(kept) = &self.kept else { return Ok(()) };
        let view = |alias: &Arc<Alias>| SavedView {
            tensor: alias.info.tensor.clone(),
            view: alias.info.view.clone(),
            offset: alias.info.offset,
            counters: alias.numbers.first,
            later_counters: alias.numbers.later,
        };
        let tensor = |tensor: &Arc<Tensor>| SavedTensor {
            info: tensor.info.clone(),
            counters: tensor.numbers.first,
            later_counters: tensor.numbers.later,
            source: tensor.source.get(),
        };
        let saved = Saved {
            generations: map.generations_to_come(),
            tensors: map.tensors.iter().map(tensor).collect(),
            views: map.aliases.iter().map(view).collect(),
            loaded: kept.loaded.lock().clone(),
            sources: Self::sources_in(map, &kept.sources.lock()),
        };
        let text = serde_json::to_vec(&saved).expect("numbers and names");
        Ok(kept.tables.save(&text)?)
    }
}

impl Saved {
    /// Behind the last counter of a tensor or view.
    fn counters_end(&self) -> usize {
        let first = self.numbers().filter_map(|(first, _)| Some(first?.saturating_add(Traffic::COUNTERS)));
        let later =
            self.numbers().filter_map(|(_, later)| Some(later?.saturating_add(Traffic::LATER_COUNTERS)));
        first.chain(later).max().unwrap_or(0)
    }

    /// Whether there are counters without those that came later.
    fn is_older(&self) -> bool {
        self.numbers().any(|(first, later)| first.is_some() && later.is_none())
    }

    fn numbers(&self) -> impl Iterator<Item = (Option<usize>, Option<usize>)> {
        let tensors = self.tensors.iter().map(|tensor| (tensor.counters, tensor.later_counters));
        tensors.chain(self.views.iter().map(|view| (view.counters, view.later_counters)))
    }
}

impl Kept {
    /// The device's own counters.
    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether counters have numbers that the tables do not say yet.
    pub(super) fn renumbered(&self) -> bool {
        self.renumbered
    }
}

impl Device {
    /// Traffic of a new tensor or view.
    pub(super) fn new_traffic(&self) -> Counted {
        let Some(kept) = &self.kept else { return Counted::default() };
        let first = kept.counters.take_others(Traffic::COUNTERS);
        traffic(&kept.counters, Numbers { first, later: None })
    }
}

/// Traffic whose counters have these numbers; those that came later get new ones if they have none.
fn traffic(counters: &Counters, Numbers { first, later }: Numbers) -> Counted {
    let mut traffic = Traffic::default();
    let later = later.or_else(|| first.and_then(|_| counters.take_others(Traffic::LATER_COUNTERS)));
    let number = |first: Option<usize>, at: usize| counters.kept_others(first?.checked_add(at)?);
    for (at, counter) in traffic.counters().into_iter().enumerate() {
        counter.keep(number(first, at));
    }
    for (at, counter) in traffic.later_counters().into_iter().enumerate() {
        counter.keep(number(later, at));
    }
    Counted { traffic, numbers: Numbers { first, later } }
}

/// Changes of a directory that no device comes near to; what counts them has as much room behind.
const MOST_CHANGES: u64 = u64::MAX / 2;

/// The map of saved tables. They are checked like any other input: the image may come from anywhere.
fn restore(
    saved: Saved,
    config: &DeviceConfig,
    division: &Division,
    counters: &Counters,
) -> Result<Map, DeviceError> {
    let broken = |why: String| DeviceError::Image { why };
    let mut tensors: Vec<Arc<Tensor>> = Vec::with_capacity(saved.tensors.len());
    for SavedTensor { info, counters: first, later_counters: later, source } in saved.tensors {
        let spec = info.spec();
        tensor::check(&spec)?;
        let windows = tensor::windows(&spec)?.filter(|_| config.mode == lamina_store::mode::Mode::Trace);
        let part = division.of_name(&info.name)?;
        let own = &division.parts[part].base;
        let end = info.length.checked_next_multiple_of(BLOCK_BYTES as u64);
        let end = end.and_then(|length| info.dpa.checked_add(length)).filter(|end| *end <= own.end);
        if end.is_none() || info.dpa < own.start || !info.dpa.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(broken(format!("{} lies at DPA {:#x}, {} bytes", info.name, info.dpa, info.length)));
        }
        if let Some(unknown) = source.filter(|id| !saved.sources.contains_key(id)) {
            return Err(broken(format!("{} is of source {unknown}, of which nothing is said", info.name)));
        }
        let source = SourceOf::new(source);
        let Counted { traffic, numbers } = traffic(counters, Numbers { first, later });
        let stored = Gauge::default();
        let transition = Transition::standing();
        let tensor = Tensor { info, part, windows, stored, traffic, numbers, source, transition };
        tensors.push(Arc::new(tensor));
    }
    tensors.sort_by_key(|tensor| tensor.info.dpa);
    let mut names = BTreeSet::new();
    if let Some(twice) = tensors.iter().find(|tensor| !names.insert(&tensor.info.name)) {
        return Err(broken(format!("two tensors are called {}", twice.info.name)));
    }
    apart("tensors", tensors.iter().map(|tensor| tensor.info.dpa..tensor.end())).map_err(broken)?;
    let mut aliases = Vec::with_capacity(saved.views.len());
    for SavedView { tensor: name, view, offset, counters: first, later_counters: later } in saved.views {
        let tensor = tensors.iter().find(|tensor| tensor.info.name == name).cloned();
        let tensor = tensor
            .ok_or_else(|| broken(format!("view {view} is of {name:?}, which is none of the tensors")))?;
        let view = View::parse(tensor.info.format, &view)
            .map_err(|why| DeviceError::View { tensor: name.clone(), why })?;
        let length = view.bytes_for(tensor.info.elements);
        let own = &division.parts[tensor.part].views;
        let fits = |length: &u64| {
            offset.is_multiple_of(VIEW_ALIGN)
                && offset >= own.start + DIRECTORY_BYTES
                && offset.checked_add(*length).is_some_and(|end| end <= own.end)
        };
        let length = length.filter(fits);
        let length = length.ok_or_else(|| broken(format!("view {view} of {name} lies at {offset:#x}")))?;
        let traffic = traffic(counters, Numbers { first, later });
        aliases.push(Arc::new(Alias::new(tensor, view, offset, length, traffic)));
    }
    aliases.sort_by_key(|alias| alias.info.offset);
    apart("views", aliases.iter().map(|alias| alias.info.offset..alias.info.offset + alias.info.length))
        .map_err(broken)?;
    if let Some(generation) = saved.generations.iter().find(|generation| **generation > MOST_CHANGES) {
        return Err(broken(format!("a directory is said to have changed {generation} times")));
    }
    let generations = saved.generations.into_iter();
    let directories =
        generations.map(|generation| DirectoryPages { generation, bytes: Vec::new() }).collect();
    Ok(Map { directories, ..Map::default() }.successor(tensors, aliases, division)?)
}

/// That ranges in order do not overlap.
fn apart(what: &str, ranges: impl Iterator<Item = Range<u64>>) -> Result<(), String> {
    let mut end = 0;
    for range in ranges {
        if range.start < end {
            return Err(format!("two {what} overlap at {:#x}", range.start));
        }
        end = range.end;
    }
    Ok(())
}
