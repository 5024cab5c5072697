//! The map: what lies where, by address and by name.
//!
//! The rules:
//! * A map is a snapshot: it is replaced, never changed, when a tensor or view comes or goes. It is
//!   made of trees that it shares with the one before, so a change costs the same however many
//!   tensors there are.
//! * Who owns a block is found [in constant time](super::chunks).
//! * A tensor that is being made owns its range, but no directory names it.
//! * A directory is one generation after the one before for each map that changed what is told in
//!   it, and is encoded when it is read first.

use std::{
    cmp::Ordering,
    ops::Range,
    sync::{Arc, OnceLock},
};

use imbl::{OrdMap, OrdSet};
use lamina_abi::{DIRECTORY_BYTES, VIEW_ALIGN};

use super::{Alias, chunks::Chunks, directory, gaps::Gaps};
use crate::{
    partition_table::PartitionTable,
    tensor::{Tensor, TensorError},
};
use lamina_codec::BLOCK_BYTES;
use lamina_store as store;

/// Where something begins and ends, and its number: those of no length share their place with the
/// next one.
type Place = (u64, u64, u64);

/// What lies where.
#[derive(Clone)]
pub(crate) struct Map {
    owners: Chunks<Tensor>,
    by_dpa: OrdMap<Place, Arc<Tensor>>,
    by_name: OrdSet<ByName>,
    /// Those that are coded by windows.
    windowed: OrdMap<Place, Arc<Tensor>>,
    /// The numbers of those that people are not told of yet, with their partitions.
    unlisted: OrdMap<u64, usize>,
    aliases: OrdMap<Place, Arc<Alias>>,
    /// By the number of the tensor, then by the offset.
    aliases_of: OrdMap<(u64, Place), Arc<Alias>>,
    /// What is free of each partition's windows.
    base_gaps: Vec<Gaps>,
    view_gaps: Vec<Gaps>,
    directories: Vec<Arc<DirectoryPages>>,
    /// The number of the next tensor or view.
    next: u64,
}

/// The directory of one partition.
#[derive(Default)]
pub(crate) struct DirectoryPages {
    pub(crate) generation: u64,
    bytes: OnceLock<Vec<u8>>,
}

/// A map that is being made after another.
pub(crate) struct Draft {
    map: Map,
    /// The partitions whose directories change.
    changed: Vec<bool>,
}

/// A tensor, in the order of names.
#[derive(Clone)]
struct ByName(Arc<Tensor>);

impl Map {
    /// Of a device that has nothing yet; the directories are of these generations, or of none.
    pub(crate) fn new(partition_table: &PartitionTable, generations: &[u64]) -> Self {
        let partitions = &partition_table.partitions;
        let end = partitions.iter().map(|partition| partition.base.end).max().unwrap_or(0);
        let directory = |partition| DirectoryPages {
            generation: generations.get(partition).copied().unwrap_or(0),
            bytes: OnceLock::new(),
        };
        Self {
            owners: Chunks::new(store::blocks(end)),
            by_dpa: OrdMap::new(),
            by_name: OrdSet::new(),
            windowed: OrdMap::new(),
            unlisted: OrdMap::new(),
            aliases: OrdMap::new(),
            aliases_of: OrdMap::new(),
            base_gaps: partitions.iter().map(|partition| Gaps::new(partition.base.clone())).collect(),
            view_gaps: partitions
                .iter()
                .map(|partition| Gaps::new(partition.views.start + DIRECTORY_BYTES..partition.views.end))
                .collect(),
            directories: (0..partitions.len()).map(|partition| Arc::new(directory(partition))).collect(),
            next: 0,
        }
    }

    /// Begins the map behind this one.
    pub(crate) fn draft(&self) -> Draft {
        Draft { map: self.clone(), changed: vec![false; self.directories.len()] }
    }

    /// Every tensor, by DPA.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Arc<Tensor>> {
        self.by_dpa.values()
    }

    /// Every tensor that people are told of, by DPA.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &Arc<Tensor>> {
        self.tensors().filter(|tensor| self.is_listed(tensor))
    }

    /// Every tensor that begins in `range`, by DPA.
    pub(crate) fn tensors_from(&self, range: Range<u64>) -> impl Iterator<Item = &Arc<Tensor>> {
        self.by_dpa.range((range.start, 0, 0)..(range.end, 0, 0)).map(|(_, tensor)| tensor)
    }

    /// The tensors of a partition that people are told of, by DPA.
    pub(crate) fn listed_in(
        &self,
        partition: usize,
        partition_table: &PartitionTable,
    ) -> impl Iterator<Item = &Arc<Tensor>> {
        let Range { start, end } = partition_table.partitions[partition].base.clone();
        let found = self.by_dpa.range((start, 0, 0)..=(end, u64::MAX, u64::MAX));
        let own = found.map(|(_, tensor)| tensor).filter(move |tensor| tensor.partition == partition);
        own.filter(|tensor| self.is_listed(tensor))
    }

    /// The views of a partition, by offset.
    pub(crate) fn aliases_of_partition(
        &self,
        partition: usize,
        partition_table: &PartitionTable,
    ) -> impl Iterator<Item = &Arc<Alias>> {
        let Range { start, end } = partition_table.partitions[partition].views.clone();
        let found = self.aliases.range((start, 0, 0)..=(end, u64::MAX, u64::MAX));
        found.map(|(_, alias)| alias).filter(move |alias| alias.tensor.partition == partition)
    }

    /// Every view, by offset.
    pub(crate) fn aliases(&self) -> impl Iterator<Item = &Arc<Alias>> {
        self.aliases.values()
    }

    /// Every view of a tensor, by offset.
    pub(crate) fn aliases_of(&self, tensor: &Tensor) -> impl Iterator<Item = &Arc<Alias>> {
        let (first, last) = ((tensor.number, (0, 0, 0)), (tensor.number + 1, (0, 0, 0)));
        self.aliases_of.range(first..last).map(|(_, alias)| alias)
    }

    /// Whether people are told of a tensor.
    pub(crate) fn is_listed(&self, tensor: &Tensor) -> bool {
        !tensor.is_hidden() && !self.unlisted.contains_key(&tensor.number)
    }

    /// Whether this very tensor is there.
    pub(crate) fn has(&self, tensor: &Arc<Tensor>) -> bool {
        self.by_dpa.get(&tensor.place()).is_some_and(|is| Arc::ptr_eq(is, tensor))
    }

    /// The tensor that owns the block at `dpa`.
    pub(crate) fn tensor_at(&self, dpa: u64) -> Option<&Arc<Tensor>> {
        self.owners.owner(dpa / BLOCK_BYTES as u64)
    }

    /// A place behind `dpa` up to which every block has the owner of the one there, or nobody.
    pub(crate) fn owner_end(&self, dpa: u64) -> u64 {
        let (_, end) = self.owners.look(dpa / BLOCK_BYTES as u64);
        end.saturating_mul(BLOCK_BYTES as u64)
    }

    /// The first tensor coded by windows of which a block is in `range`.
    pub(crate) fn windowed_in(&self, range: &Range<u64>) -> Option<&Arc<Tensor>> {
        let before = self.windowed.get_prev(&(range.start, u64::MAX, u64::MAX));
        let before = before.filter(|(_, tensor)| tensor.end() > range.start);
        let next = || self.windowed.get_next(&(range.start, 0, 0));
        let (_, tensor) = before.or_else(next)?;
        (tensor.info.dpa < range.end && tensor.end() > range.start).then_some(tensor)
    }

    /// The tensor of this name.
    pub(crate) fn tensor(&self, name: &str) -> Result<&Arc<Tensor>, TensorError> {
        let found = self.by_name.get_next(name).filter(|found| found.0.info.name == name);
        found.map(|found| &found.0).ok_or_else(|| TensorError::Unknown { name: name.to_owned() })
    }

    /// The tensor of this name that people are told of.
    pub(crate) fn listed_tensor(&self, name: &str) -> Result<&Arc<Tensor>, TensorError> {
        let found = self.tensor(name).ok().filter(|tensor| self.is_listed(tensor));
        found.ok_or_else(|| TensorError::Unknown { name: name.to_owned() })
    }

    /// The aliases that `range` of the views window touches.
    pub(crate) fn aliases_in(&self, range: &Range<u64>) -> impl Iterator<Item = &Arc<Alias>> {
        let before = self.aliases.get_prev(&(range.start, u64::MAX, u64::MAX));
        let before = before.filter(|((_, end, _), _)| *end > range.start).map(|((start, ..), _)| *start);
        let from = (before.unwrap_or(range.start), 0, 0);
        let (start, end) = (range.start, range.end);
        let found = self.aliases.range(from..).map(|(_, alias)| alias);
        found.skip_while(move |alias| alias.end() <= start).take_while(move |alias| alias.info.offset < end)
    }

    /// The aliases of the tensors that have a block in `range` of the base window.
    pub(crate) fn aliases_over(&self, range: Range<u64>) -> impl Iterator<Item = &Arc<Alias>> {
        let before = self.tensor_at(range.start).filter(|tensor| tensor.info.dpa < range.start);
        before.into_iter().chain(self.tensors_from(range)).flat_map(|tensor| self.aliases_of(tensor))
    }

    /// Where `length` bytes fit best in a partition of the base window, or the longest gap.
    pub(crate) fn free_base(
        &self,
        length: u64,
        partition: usize,
        partition_table: &PartitionTable,
    ) -> Result<u64, u64> {
        if length == 0 {
            return Ok(partition_table.partitions[partition].base.start);
        }
        let gaps = &self.base_gaps[partition];
        length.checked_next_multiple_of(BLOCK_BYTES as u64).map_or_else(|| gaps.fit(length), |b| gaps.fit(b))
    }

    /// Where `length` bytes fit best in a partition of the views window behind the directory, or
    /// the longest gap.
    pub(crate) fn free_view(
        &self,
        length: u64,
        partition: usize,
        partition_table: &PartitionTable,
    ) -> Result<u64, u64> {
        if length == 0 {
            return Ok(partition_table.partitions[partition].views.start + DIRECTORY_BYTES);
        }
        self.view_gaps[partition].fit(length)
    }

    /// Bytes that are free of a partition of the views window from `offset` on.
    pub(crate) fn free_view_at(&self, offset: u64, partition: usize) -> u64 {
        self.view_gaps[partition].around(offset).map_or(0, |gap| gap.end - offset)
    }

    /// What is free of each partition of the base window.
    pub(crate) fn base_gaps(&self) -> &[Gaps] {
        &self.base_gaps
    }

    /// The first tensor that owns a block in `range`.
    pub(crate) fn owner_in(&self, range: &Range<u64>) -> Option<&Arc<Tensor>> {
        let bytes = BLOCK_BYTES as u64;
        let (mut block, end) = (range.start / bytes, range.end.div_ceil(bytes));
        while block < end {
            match self.owners.look(block) {
                (Some(owner), _) => return Some(owner),
                (None, behind) => block = behind,
            }
        }
        None
    }

    /// The bytes of a partition's directory; what is behind them is zeros.
    pub(crate) fn directory(&self, partition: usize, partition_table: &PartitionTable) -> &[u8] {
        let pages = &self.directories[partition];
        pages.bytes.get_or_init(|| directory::encode(self, partition, pages.generation, partition_table))
    }

    /// The generation of each directory once all tensors that are being made are listed. An image
    /// keeps these, so that listing one needs no save.
    pub(crate) fn generations_to_come(&self) -> Vec<u64> {
        let making = |partition| self.unlisted.values().filter(|of| **of == partition).count() as u64;
        let directories = self.directories.iter().enumerate();
        directories.map(|(partition, pages)| pages.generation + making(partition)).collect()
    }
}

impl Draft {
    /// What it is so far.
    pub(crate) fn map(&self) -> &Map {
        &self.map
    }

    /// The number of a tensor or view that is to be made.
    pub(crate) fn number(&mut self) -> u64 {
        self.map.next += 1;
        self.map.next
    }

    /// Adds a tensor whose range is free, listed or not.
    pub(crate) fn add_tensor(&mut self, tensor: &Arc<Tensor>, is_listed: bool) {
        let map = &mut self.map;
        map.owners.set(&tensor.blocks(), Some(tensor));
        map.base_gaps[tensor.partition].take(&(tensor.info.dpa..tensor.end()));
        map.by_dpa.insert(tensor.place(), Arc::clone(tensor));
        map.by_name.insert(ByName(Arc::clone(tensor)));
        if tensor.windows.is_some() {
            map.windowed.insert(tensor.place(), Arc::clone(tensor));
        }
        if tensor.is_hidden() {
            return;
        }
        if is_listed {
            self.changed[tensor.partition] = true;
        } else {
            map.unlisted.insert(tensor.number, tensor.partition);
        }
    }

    /// Removes a tensor and its views.
    pub(crate) fn remove_tensor(&mut self, tensor: &Arc<Tensor>) {
        let aliases: Vec<_> = self.map.aliases_of(tensor).cloned().collect();
        for alias in &aliases {
            self.remove_alias(alias);
        }
        let map = &mut self.map;
        map.owners.set(&tensor.blocks(), None);
        map.base_gaps[tensor.partition].give(&(tensor.info.dpa..tensor.end()));
        map.by_dpa.remove(&tensor.place());
        map.by_name.remove(tensor.info.name.as_str());
        map.windowed.remove(&tensor.place());
        if map.unlisted.remove(&tensor.number).is_none() && !tensor.is_hidden() {
            self.changed[tensor.partition] = true;
        }
    }

    /// Has people be told of a tensor.
    pub(crate) fn list(&mut self, tensor: &Tensor) {
        if self.map.unlisted.remove(&tensor.number).is_some() {
            self.changed[tensor.partition] = true;
        }
    }

    /// Adds a view whose range is free.
    pub(crate) fn add_alias(&mut self, alias: &Arc<Alias>) {
        let partition = alias.tensor.partition;
        self.map.view_gaps[partition].take(&alias.taken());
        self.map.aliases.insert(alias.place(), Arc::clone(alias));
        self.map.aliases_of.insert((alias.tensor.number, alias.place()), Arc::clone(alias));
        self.changed[partition] = true;
    }

    /// Removes a view.
    pub(crate) fn remove_alias(&mut self, alias: &Arc<Alias>) {
        let partition = alias.tensor.partition;
        self.map.aliases.remove(&alias.place());
        self.map.aliases_of.remove(&(alias.tensor.number, alias.place()));
        self.map.view_gaps[partition].give(&alias.taken());
        self.changed[partition] = true;
    }

    /// The map made.
    pub(crate) fn finish(self) -> Map {
        let Self { mut map, changed } = self;
        for (pages, _) in map.directories.iter_mut().zip(changed).filter(|(_, changed)| *changed) {
            *pages = Arc::new(DirectoryPages { generation: pages.generation + 1, bytes: OnceLock::new() });
        }
        map
    }

    /// The map made, of which every directory is a generation later.
    pub(crate) fn finish_all(self) -> Map {
        let changed = self.changed.iter().map(|_| true).collect();
        Self { changed, ..self }.finish()
    }
}

impl Tensor {
    fn place(&self) -> Place {
        (self.info.dpa, self.end(), self.number)
    }
}

impl Alias {
    fn place(&self) -> Place {
        (self.info.offset, self.end(), self.number)
    }

    /// Where it ends.
    fn end(&self) -> u64 {
        self.info.offset + self.info.length
    }

    /// What it takes of the views window: the next one begins at a multiple of [`VIEW_ALIGN`].
    fn taken(&self) -> Range<u64> {
        self.info.offset..self.end().next_multiple_of(VIEW_ALIGN)
    }
}

impl std::borrow::Borrow<str> for ByName {
    fn borrow(&self) -> &str {
        &self.0.info.name
    }
}

impl PartialEq for ByName {
    fn eq(&self, other: &Self) -> bool {
        self.0.info.name == other.0.info.name
    }
}

impl Eq for ByName {}

impl PartialOrd for ByName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.info.name.cmp(&other.0.info.name)
    }
}
