//! What a device keeps in its image besides blocks: the tables of tensors and views, and staged KV windows.
//!
//! The tables are saved before a change of them takes effect, so that who is told of it can rely on it.

use std::{ops::Range, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Device, DeviceConfig, DeviceError, Division, staged::StagedPlaces};
use crate::{
    BLOCK_BYTES,
    stats::{Gauge, Traffic},
    store::{image::Image, tables::Tables},
    tensor::{self, Tensor, TensorInfo},
    view::View,
    window::{Alias, DirectoryPages, Map},
};

/// The parts of the image that are not the store's.
pub(super) struct Kept {
    image: Image,
    tables: Tables,
    pub(super) staged: StagedPlaces,
}

/// The tables as they are saved.
#[derive(Serialize, Deserialize)]
struct Saved {
    /// Of the directory of each part.
    generations: Vec<u64>,
    tensors: Vec<TensorInfo>,
    views: Vec<SavedView>,
}

#[derive(Serialize, Deserialize)]
struct SavedView {
    tensor: String,
    view: String,
    offset: u64,
}

impl Kept {
    /// What `image` keeps, and the map its tables give.
    pub(super) fn open(
        image: Image,
        config: &DeviceConfig,
        division: &Division,
    ) -> Result<(Self, Map), DeviceError> {
        let (tables, text) = Tables::open(&image)?;
        let map = text.map_or_else(
            || Ok(Map::default().successor(Vec::new(), Vec::new(), division)?),
            |text| restore(&text, config, division),
        )?;
        let staged = StagedPlaces::open(&image)?;
        Ok((Self { image, tables, staged }, map))
    }

    pub(super) fn image(&self) -> &Image {
        &self.image
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
        };
        let saved = Saved {
            generations: map.directories.iter().map(|directory| directory.generation).collect(),
            tensors: map.tensors.iter().map(|tensor| tensor.info.clone()).collect(),
            views: map.aliases.iter().map(view).collect(),
        };
        let text = serde_json::to_vec(&saved).expect("numbers and names");
        Ok(kept.tables.save(&text)?)
    }
}

/// The map of saved tables. They are checked like any other input: the image may come from anywhere.
fn restore(text: &[u8], config: &DeviceConfig, division: &Division) -> Result<Map, DeviceError> {
    let broken = |why: String| DeviceError::Image { why };
    let saved: Saved = serde_json::from_slice(text).map_err(|why| broken(why.to_string()))?;
    let mut tensors: Vec<Arc<Tensor>> = Vec::with_capacity(saved.tensors.len());
    for info in saved.tensors {
        let spec = info.spec();
        tensor::check(&spec)?;
        let windows = tensor::windows(&spec)?.filter(|_| config.mode == crate::mode::Mode::Trace);
        let part = division.of_name(&info.name)?;
        let own = &division.parts[part].base;
        let end = info.length.checked_next_multiple_of(BLOCK_BYTES as u64);
        let end = end.and_then(|length| info.dpa.checked_add(length)).filter(|end| *end <= own.end);
        if end.is_none() || info.dpa < own.start || !info.dpa.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(broken(format!("{} lies at DPA {:#x}, {} bytes", info.name, info.dpa, info.length)));
        }
        let tensor = Tensor { info, part, windows, stored: Gauge::default(), traffic: Traffic::default() };
        tensors.push(Arc::new(tensor));
    }
    tensors.sort_by_key(|tensor| tensor.info.dpa);
    apart("tensors", tensors.iter().map(|tensor| tensor.info.dpa..tensor.end())).map_err(broken)?;
    let mut aliases = Vec::with_capacity(saved.views.len());
    for SavedView { tensor: name, view, offset } in saved.views {
        let tensor = tensors.iter().find(|tensor| tensor.info.name == name).cloned();
        let tensor = tensor
            .ok_or_else(|| broken(format!("view {view} is of {name:?}, which is none of the tensors")))?;
        let view = View::parse(tensor.info.format, &view)
            .map_err(|why| DeviceError::View { tensor: name.clone(), why })?;
        let length = view.bytes_for(tensor.info.elements);
        let own = &division.parts[tensor.part].views;
        let fits = |length: &u64| {
            offset >= own.start && offset.checked_add(*length).is_some_and(|end| end <= own.end)
        };
        let length = length.filter(fits);
        let length = length.ok_or_else(|| broken(format!("view {view} of {name} lies at {offset:#x}")))?;
        aliases.push(Arc::new(Alias::new(tensor, view, offset, length)));
    }
    aliases.sort_by_key(|alias| alias.info.offset);
    apart("views", aliases.iter().map(|alias| alias.info.offset..alias.info.offset + alias.info.length))
        .map_err(broken)?;
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
