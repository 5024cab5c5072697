//! What a device keeps in its image besides blocks: the tables of tensors and views, and staged KV
//! windows.
//!
//! The rules:
//! * A change of the tables is saved before it takes effect, so that who is told of it can rely on
//!   it. What is saved is what changed.
//! * Tables are [changes](Change) in order. One that says everything is the first of them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use lamina_abi::{DIRECTORY_BYTES, VIEW_ALIGN};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Device, DeviceConfig, DeviceError, bases, sources::Source};
use crate::{
    counters::{Counted, Numbers, Slots, Traffic},
    layout::Layout,
    partition_table::PartitionTable,
    tensor::{
        self, Lineage, NoBase, SourceId, SourceOf, Tensor, TensorError, TensorInfo, TensorSpec, Transition,
    },
    window::{Alias, Map},
};
use lamina_codec::{BLOCK_BYTES, Codec, format::Format, view::View};
use lamina_store::{
    counters::Counters,
    entry::Version,
    image::Image,
    mode::Mode,
    tables::{Found, Tables},
};

/// An image, and what the device itself keeps in it: all that is not the store's.
pub(super) struct DeviceImage {
    image: Image,
    tables: Arc<Tables>,
    counters: Arc<Counters>,
    /// Paths of checkpoints that were loaded whole, for earlier programs.
    pub(super) loaded: Mutex<BTreeSet<String>>,
    pub(super) sources: Mutex<BTreeMap<SourceId, Source>>,
    /// What the files that sources were consisted of, for who shows them again.
    pub(super) files: Mutex<BTreeMap<SourceId, String>>,
    /// Whether counters have numbers that the tables do not say yet.
    renumbered: bool,
}

/// The tables as a program before this saved them whole, and as they are taken from an image.
#[derive(Default, Deserialize)]
#[cfg_attr(test, derive(Serialize))]
struct Saved {
    /// Of the directory of each partition.
    generations: Vec<u64>,
    tensors: Vec<SavedTensor>,
    views: Vec<SavedView>,
    loaded: BTreeSet<String>,
    #[serde(default)]
    sources: BTreeMap<SourceId, Source>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    files: BTreeMap<SourceId, String>,
}

/// A change of the tables as it is saved: what goes, then what comes.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    /// Of the directory of each partition, after the change.
    generations: Vec<u64>,
    /// Names of tensors that go, with their views.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    removed: Vec<String>,
    /// Views that go: tensor and spelling.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    removed_views: Vec<(String, String)>,
    /// Tensors that come, or that are otherwise from now on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<SavedTensor>,
    /// Views that come.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    views: Vec<SavedView>,
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    loaded: BTreeSet<String>,
    /// Sources of which this is known from now on.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    sources: BTreeMap<SourceId, Source>,
    /// Files that sources were; an empty text is none from now on.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    files: BTreeMap<SourceId, String>,
}

#[derive(Serialize, Deserialize)]
struct SavedTensor {
    name: String,
    dpa: u64,
    length: u64,
    /// All that the length holds if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    elements: Option<u64>,
    /// One dimension if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shape: Vec<u64>,
    format: Format,
    #[serde(default, skip_serializing_if = "SavedLayout::is_usual")]
    layout: SavedLayout,
    codec: Codec,
    counters: Option<usize>,
    /// Those that came later; an older program's image does not say.
    #[serde(default)]
    later_counters: Option<usize>,
    /// What it was loaded from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<SourceId>,
}

/// A tensor's layout, or that it is coded against another: a kind of layout that a program which
/// does not know differences refuses.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum SavedLayout {
    Derived(SavedBase),
    Own(Layout),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
enum SavedBase {
    Derived { base: String },
}

impl Default for SavedLayout {
    fn default() -> Self {
        Self::Own(Layout::default())
    }
}

impl SavedLayout {
    fn of(layout: Layout, base: Option<String>) -> Self {
        base.map_or(Self::Own(layout), |base| Self::Derived(SavedBase::Derived { base }))
    }

    fn is_usual(&self) -> bool {
        matches!(self, Self::Own(layout) if *layout == Layout::default())
    }

    fn split(self) -> (Layout, Option<String>) {
        match self {
            Self::Derived(SavedBase::Derived { base }) => (Layout::default(), Some(base)),
            Self::Own(layout) => (layout, None),
        }
    }
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

impl DeviceImage {
    /// What `image` keeps, and the map its tables give.
    pub(super) fn open(
        image: Image,
        config: &DeviceConfig,
        partition_table: &PartitionTable,
    ) -> Result<(Self, Map), DeviceError> {
        let (tables, found) = Tables::open(&image)?;
        if image.head().is_some() && found == Found::Nothing {
            // Checkpoints have tables, and an image with checkpoints always does.
            tables.rewrite(&Change::default().bytes())?;
        }
        let saved = Saved::from(found)?;
        let loaded = Mutex::new(saved.loaded.clone());
        let sources = Mutex::new(saved.sources.clone());
        let files = Mutex::new(saved.files.clone());
        let renumbered = saved.is_older();
        let counters = Counters::open(&image, config.first_process, saved.counters_end())?;
        let counters = Arc::new(counters);
        let map = restore(saved, config, partition_table, &counters)?;
        link_bases(&map, config.mode, image.superblock().version)?;
        Ok((Self { image, tables: Arc::new(tables), counters, loaded, sources, files, renumbered }, map))
    }

    pub(super) fn image(&self) -> &Image {
        &self.image
    }

    pub(super) fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }
}

impl Change {
    /// Tensors that come. What is known of their sources is said too.
    pub(super) fn made(tensors: &[Arc<Tensor>]) -> Self {
        Self { tensors: tensors.iter().map(saved_tensor).collect(), ..Self::default() }
    }

    /// Tensors that go.
    pub(super) fn removed(tensors: &[Arc<Tensor>]) -> Self {
        let removed = tensors.iter().map(|tensor| tensor.info.name.clone()).collect();
        Self { removed, ..Self::default() }
    }

    /// A view that comes.
    pub(super) fn view(alias: &Arc<Alias>) -> Self {
        Self { views: vec![saved_view(alias)], ..Self::default() }
    }

    /// A view that goes.
    pub(super) fn removed_view(alias: &Alias) -> Self {
        let removed_views = vec![(alias.info.tensor.clone(), alias.info.view.clone())];
        Self { removed_views, ..Self::default() }
    }

    /// A source of which this is known from now on.
    pub(super) fn source(id: SourceId, source: Source) -> Self {
        Self { sources: BTreeMap::from([(id, source)]), ..Self::default() }
    }

    /// The file that a source was, or none if empty.
    pub(super) fn file(id: SourceId, file: String) -> Self {
        Self { files: BTreeMap::from([(id, file)]), ..Self::default() }
    }

    /// A checkpoint that was loaded whole.
    pub(super) fn loaded(checkpoint: &str) -> Self {
        Self { loaded: BTreeSet::from([checkpoint.to_owned()]), ..Self::default() }
    }

    fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and names")
    }
}

fn saved_tensor(tensor: &Arc<Tensor>) -> SavedTensor {
    let TensorInfo { name, dpa, length, elements, shape, format, layout, codec, base } = tensor.told();
    SavedTensor {
        name,
        dpa,
        length,
        elements: Some(elements).filter(|elements| *elements != format.elements_in(length)),
        shape: if shape == [elements] { Vec::new() } else { shape },
        format,
        layout: SavedLayout::of(layout, base),
        codec,
        counters: tensor.traffic.numbers.first,
        later_counters: tensor.traffic.numbers.later,
        source: tensor.source.get(),
    }
}

fn saved_view(alias: &Arc<Alias>) -> SavedView {
    SavedView {
        tensor: alias.info.tensor.clone(),
        view: alias.info.view.clone(),
        offset: alias.info.offset,
        counters: alias.traffic.numbers.first,
        later_counters: alias.traffic.numbers.later,
    }
}

impl Device {
    /// Saves what changes with `map`, if there is an image to save it in.
    pub(super) fn keep(&self, map: &Map, mut change: Change) -> Result<(), DeviceError> {
        let Some(image) = &self.image else { return Ok(()) };
        change.generations = map.generations_to_come();
        let named: BTreeSet<_> = change.tensors.iter().filter_map(|tensor| tensor.source).collect();
        let sources = image.sources.lock();
        change.sources.extend(named.into_iter().filter_map(|id| Some((id, sources.get(&id)?.clone()))));
        drop(sources);
        Ok(image.tables.append(&change.bytes(), || image.all(map).bytes())?)
    }

    /// Saves the tables of `map` whole, likewise.
    pub(super) fn keep_all(&self, map: &Map) -> Result<(), DeviceError> {
        let Some(image) = &self.image else { return Ok(()) };
        Ok(image.tables.rewrite(&image.all(map).bytes())?)
    }
}

impl DeviceImage {
    /// What says everything.
    fn all(&self, map: &Map) -> Change {
        let sources = Device::sources_in(map, &self.sources.lock());
        let mut files = self.files.lock().clone();
        files.retain(|id, _| sources.contains_key(id));
        Change {
            files,
            generations: map.generations_to_come(),
            tensors: map.tensors().map(saved_tensor).collect(),
            views: map.aliases().map(saved_view).collect(),
            loaded: self.loaded.lock().clone(),
            sources,
            ..Change::default()
        }
    }
}

impl Saved {
    /// What an image's tables say.
    fn from(found: Found) -> Result<Self, DeviceError> {
        let broken = |why: serde_json::Error| DeviceError::Image { why: why.to_string() };
        match found {
            Found::Nothing => Ok(Self::default()),
            Found::Text(text) => serde_json::from_slice(&text).map_err(broken),
            Found::Records(records) => {
                let mut folded = Folded::default();
                for record in records {
                    folded.change(serde_json::from_slice(&record).map_err(broken)?)?;
                }
                Ok(folded.into())
            }
        }
    }
}

/// Changes, one after the other.
#[derive(Default)]
struct Folded {
    saved: Saved,
    tensors: HashMap<String, SavedTensor>,
    views: HashMap<String, Vec<SavedView>>,
}

impl Folded {
    fn change(&mut self, change: Change) -> Result<(), DeviceError> {
        let broken = |what: &str, name: &str| DeviceError::Image {
            why: format!("{what} {name:?} goes that never came"),
        };
        self.saved.generations = change.generations;
        for name in change.removed {
            self.tensors.remove(&name).ok_or_else(|| broken("a tensor", &name))?;
            self.views.remove(&name);
        }
        for (tensor, view) in change.removed_views {
            let views = self.views.entry(tensor).or_default();
            let at = views.iter().position(|is| is.view == view);
            views.swap_remove(at.ok_or_else(|| broken("a view", &view))?);
        }
        for tensor in change.tensors {
            self.tensors.insert(tensor.name.clone(), tensor);
        }
        for view in change.views {
            let views = self.views.entry(view.tensor.clone()).or_default();
            views.retain(|is| is.view != view.view);
            views.push(view);
        }
        self.saved.loaded.extend(change.loaded);
        self.saved.sources.extend(change.sources);
        self.saved.files.extend(change.files);
        Ok(())
    }
}

impl From<Folded> for Saved {
    fn from(folded: Folded) -> Self {
        let Folded { mut saved, tensors, views } = folded;
        saved.tensors = tensors.into_values().collect();
        saved.tensors.sort_unstable_by(|one, other| (one.dpa, &one.name).cmp(&(other.dpa, &other.name)));
        saved.views = views.into_values().flatten().collect();
        saved.views.sort_unstable_by(|one, other| (one.offset, &one.view).cmp(&(other.offset, &other.view)));
        // Only those that are named count.
        let named: BTreeSet<_> = saved.tensors.iter().filter_map(|tensor| tensor.source).collect();
        saved.sources.retain(|id, _| named.contains(id));
        saved.files.retain(|id, file| named.contains(id) && !file.is_empty());
        saved
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

impl DeviceImage {
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
    pub(super) fn new_traffic(&self) -> Arc<Counted> {
        let Some(image) = &self.image else { return Arc::default() };
        let first = image.counters.take_others(Traffic::COUNTERS);
        traffic(&image.counters, Numbers { first, later: None })
    }
}

/// Traffic whose counters have these numbers; those that came later get new ones if they have none.
fn traffic(counters: &Arc<Counters>, Numbers { first, later }: Numbers) -> Arc<Counted> {
    let mut traffic = Traffic::default();
    let later = later.or_else(|| first.and_then(|_| counters.take_others(Traffic::LATER_COUNTERS)));
    let number = |first: Option<usize>, at: usize| counters.kept_others(first?.checked_add(at)?);
    for (at, counter) in traffic.counters().into_iter().enumerate() {
        counter.keep(number(first, at));
    }
    for (at, counter) in traffic.later_counters().into_iter().enumerate() {
        counter.keep(number(later, at));
    }
    let counters = Some(Arc::clone(counters));
    Arc::new(Counted { traffic, numbers: Numbers { first, later }, counters })
}

/// Changes of a directory that no device comes near to; what counts them has as much room behind.
const MAX_CHANGES: u64 = u64::MAX / 2;

/// The map of saved tables. They are checked like any other input: the image may come from
/// anywhere.
fn restore(
    saved: Saved,
    config: &DeviceConfig,
    partition_table: &PartitionTable,
    counters: &Arc<Counters>,
) -> Result<Map, DeviceError> {
    let broken = |why: String| DeviceError::Image { why };
    if let Some(generation) = saved.generations.iter().find(|generation| **generation > MAX_CHANGES) {
        return Err(broken(format!("a directory is said to have changed {generation} times")));
    }
    let mut draft = Map::new(partition_table, &saved.generations).draft();
    for saved_tensor in saved.tensors {
        let SavedTensor { name, dpa, length, elements, shape, format, layout, codec, .. } = saved_tensor;
        let (first, later) = (saved_tensor.counters, saved_tensor.later_counters);
        let source = saved_tensor.source;
        let (layout, base) = layout.split();
        let (at, by) = (Some(dpa), Some(codec));
        let spec = TensorSpec { name, dpa: at, length, elements, shape, format, layout, codec: by, base };
        let (elements, shape) = tensor::check(&spec)?;
        let windows = tensor::windows(&spec)?.filter(|_| config.mode == Mode::Trace);
        let TensorSpec { name, base, .. } = spec;
        let info = TensorInfo { name, dpa, length, elements, shape, format, layout, codec, base };
        let partition = partition_table.of_name(&info.name)?;
        let own = &partition_table.partitions[partition].base;
        let end = info.length.checked_next_multiple_of(BLOCK_BYTES as u64);
        let end = end.and_then(|length| info.dpa.checked_add(length)).filter(|end| *end <= own.end);
        let inside = end.filter(|_| info.dpa >= own.start && info.dpa.is_multiple_of(BLOCK_BYTES as u64));
        let Some(end) = inside else {
            return Err(broken(format!("{} lies at DPA {:#x}, {} bytes", info.name, info.dpa, info.length)));
        };
        if let Some(unknown) = source.filter(|id| !saved.sources.contains_key(id)) {
            return Err(broken(format!("{} is of source {unknown}, of which nothing is said", info.name)));
        }
        if draft.map().tensor(&info.name).is_ok() {
            return Err(broken(format!("two tensors are called {}", info.name)));
        }
        if let Some(other) = draft.map().owner_in(&(info.dpa..end)) {
            let at = other.info.dpa.max(info.dpa);
            return Err(broken(format!("two tensors overlap at {at:#x}")));
        }
        let traffic = traffic(counters, Numbers { first, later });
        let tensor = Tensor {
            info,
            partition,
            windows,
            stored: Arc::default(),
            live: Arc::default(),
            traffic,
            source: SourceOf::new(source),
            transition: Transition::standing(),
            lineage: Lineage::default(),
            number: draft.number(),
        };
        draft.add_tensor(&Arc::new(tensor), true);
    }
    for SavedView { tensor: name, view, offset, counters: first, later_counters: later } in saved.views {
        let tensor = draft.map().tensor(&name).cloned();
        let tensor = tensor
            .map_err(|_| broken(format!("view {view} is of {name:?}, which is none of the tensors")))?;
        let view = View::parse(tensor.info.format, &view)
            .map_err(|why| DeviceError::View { tensor: name.clone(), why })?;
        let length = view.bytes_for(tensor.info.elements);
        let own = &partition_table.partitions[tensor.partition].views;
        let fits = |length: &u64| {
            offset.is_multiple_of(VIEW_ALIGN)
                && offset >= own.start + DIRECTORY_BYTES
                && offset.checked_add(*length).is_some_and(|end| end <= own.end)
        };
        let length = length.filter(fits);
        let length = length.ok_or_else(|| broken(format!("view {view} of {name} lies at {offset:#x}")))?;
        if let Some(other) = draft.map().aliases_in(&(offset..offset + length)).next() {
            let at = other.info.offset.max(offset);
            return Err(broken(format!("two views overlap at {at:#x}")));
        }
        let traffic = traffic(counters, Numbers { first, later });
        let number = draft.number();
        draft.add_alias(&Arc::new(Alias::new((tensor, number), view, (offset, length), traffic)));
    }
    Ok(draft.finish_all())
}

/// Gives the tensors of saved tables their bases. The tables may name any, and any image have them.
fn link_bases(map: &Map, mode: Mode, version: Version) -> Result<(), TensorError> {
    let refused = |info: &TensorInfo, base: &String, why| TensorError::Base {
        name: info.name.clone(),
        base: base.clone(),
        why,
    };
    let derived = || map.tensors().filter_map(|tensor| Some((tensor, tensor.info.base.as_ref()?)));
    for (tensor, name) in derived() {
        bases::may_have(mode, version).map_err(|why| refused(&tensor.info, name, why))?;
        let base = map.tensor(name).map_err(|_| refused(&tensor.info, name, NoBase::Unknown))?;
        tensor.lineage.set_base(base.clone());
        tensor.join_base();
    }
    // Bases that go round in a circle have no end, and so too many follow each other.
    for (tensor, name) in derived() {
        let base = tensor.lineage.base().expect("it was given one");
        let why = tensor::refused_base(&tensor.info, tensor.partition, base);
        if let Some(why) = why {
            return Err(refused(&tensor.info, name, why));
        }
    }
    Ok(())
}

/// What an image's tables say, as a program before this saved it.
#[cfg(test)]
pub(crate) fn text_of(image: &Image) -> serde_json::Value {
    let (_, found) = Tables::open(image).unwrap();
    serde_json::to_value(Saved::from(found).unwrap()).unwrap()
}
