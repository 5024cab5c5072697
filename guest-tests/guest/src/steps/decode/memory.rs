//! A model's weights and its KV cache as memory on the device.

use std::ops::Range;

use anyhow::ensure;
use lamina_llama::{Config, Element, KvMemory, Memory, Policy, Slot, Source, Weight};
use lamina_shim::{BASE, Ctl, Error, Lamina, Location, Role, Span};
use serde_json::Value;

/// What the host caches and evicts as a whole.
const PAGE: u64 = 4096;

/// Offset and length in the views window.
type Place = (u64, u64);

/// The weights in one view.
pub(in crate::steps) struct WeightMemory<'w> {
    lamina: &'w Lamina,
    roles: Vec<Role>,
    places: Vec<Place>,
}

impl<'w> WeightMemory<'w> {
    /// The tensors of a model of this shape.
    pub(in crate::steps) fn open(
        lamina: &'w Lamina,
        config: &Config,
        view: &str,
        element: &Element,
    ) -> anyhow::Result<Self> {
        let mut opened = Self { lamina, roles: Vec::new(), places: Vec::new() };
        for weight in Weight::all(config) {
            let (rows, columns) = weight.shape(config);
            let (_, bytes) = element.extent(0, rows * columns);
            let (_, location) = tensor(lamina, &weight.name(), view, bytes)?;
            opened.roles.push(location.window);
            opened.places.push((location.offset, location.bytes));
        }
        Ok(opened)
    }

    /// Where they are in the views window.
    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }
}

impl Memory for WeightMemory<'_> {
    type Error = Error;

    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Error> {
        let (start, length) = self.places[index];
        let span = self.lamina.window(self.roles[index])?.span(start, length)?;
        Ok(span.load(offset as u64, into)?)
    }
}

/// A view of the cache's tensors, and where each is in the views window.
struct View<'w> {
    element: Element,
    tensors: Vec<(Span<'w>, Place)>,
}

/// The KV cache.
pub(super) struct CacheMemory<'w> {
    ctl: Ctl,
    channels: usize,
    base: Vec<Span<'w>>,
    /// The part of the base window that holds all of it: offset and length.
    held: (u64, u64),
    views: Vec<View<'w>>,
    evicted_each_step: Option<Vec<Place>>,
}

impl<'w> CacheMemory<'w> {
    /// The tensors of a cache for a model of this shape, and the views of them that `policy` reads.
    pub(super) fn open(
        lamina: &'w Lamina,
        config: &Config,
        cache: &str,
        policy: &Policy,
    ) -> anyhow::Result<Self> {
        let (channels, seq_len) = (config.kv_dim(), config.seq_len);
        let mut base = Vec::new();
        let (mut start, mut end) = (u64::MAX, 0);
        for slot in Slot::all(config) {
            let (span, location) = tensor(lamina, &slot.name(cache), BASE, 2 * channels * seq_len)?;
            base.push(span);
            (start, end) = (start.min(location.offset), end.max(location.offset + location.bytes));
        }
        let mut views = Vec::new();
        for view in policy.views() {
            let element = Element::of(&view)?;
            let (_, bytes) = element.extent(0, channels * seq_len);
            let tensors = Slot::all(config).into_iter().map(|slot| {
                let (span, location) = tensor(lamina, &slot.name(cache), &view, bytes)?;
                Ok((span, (location.offset, location.bytes)))
            });
            let tensors = tensors.collect::<anyhow::Result<_>>()?;
            views.push(View { element, tensors });
        }
        let held = (start, end - start);
        Ok(Self { ctl: lamina.ctl()?, channels, base, held, views, evicted_each_step: None })
    }

    /// Empties the cache: what an earlier sequence has left becomes zeros, which the device keeps
    /// in no space.
    pub(super) fn clear(&mut self) -> Result<(), Error> {
        for span in &self.base {
            span.store(0, &vec![0; span.len()])?;
        }
        self.ctl.flush(Some(self.held))?;
        Ok(())
    }

    /// Has the host forget what is in its page cache of these places and of the whole cache's
    /// views.
    pub(super) fn evict(&mut self, places: &[Place]) -> Result<(), Error> {
        let views = self.views.iter().flat_map(|view| view.tensors.iter().map(|(_, place)| *place));
        let all: Vec<Place> = places.iter().copied().chain(views).collect();
        self.ctl.evict(&all)?;
        Ok(())
    }

    /// From now on, has the host forget at the end of each step what it has read of these places
    /// and of the cache.
    pub(super) fn evict_each_step(&mut self, places: Vec<Place>) {
        self.evicted_each_step = Some(places);
    }

    /// The device's counters.
    pub(super) fn stats(&mut self) -> Result<Value, Error> {
        Ok(self.ctl.stats()?["stats"].take())
    }
}

impl KvMemory for CacheMemory<'_> {
    type Error = Error;

    fn store(&mut self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.base[slot.index()].store(offset as u64, bytes)?)
    }

    fn load(&mut self, slot: Slot, source: Source, offset: usize, into: &mut [u8]) -> Result<(), Error> {
        let span = match source {
            Source::Base => &self.base[slot.index()],
            Source::View(view) => &self.views[view].tensors[slot.index()].0,
        };
        Ok(span.load(offset as u64, into)?)
    }

    fn flush(&mut self, _: Range<usize>) -> Result<(), Error> {
        // The tensors lie side by side and only their stored pages are dirty: one request for all.
        self.ctl.flush(Some(self.held))?;
        Ok(())
    }

    fn end_step(&mut self, flushed: usize) -> Result<(), Error> {
        let Some(weights) = &self.evicted_each_step else { return Ok(()) };
        // Pages that are being filled are left alone: to show them anew, the device would have to
        // take in what is not flushed.
        let filled = self.views.iter().flat_map(|view| {
            let (_, bytes) = view.element.extent(0, flushed * self.channels);
            let bytes = bytes as u64 / PAGE * PAGE;
            view.tensors.iter().map(move |(_, (offset, length))| (*offset, bytes.min(*length)))
        });
        let places: Vec<Place> = weights.iter().copied().chain(filled.filter(|place| place.1 > 0)).collect();
        self.ctl.evict(&places)?;
        Ok(())
    }
}

/// The memory of (tensor, view), which must have at least `bytes` bytes.
fn tensor<'w>(
    lamina: &'w Lamina,
    name: &str,
    view: &str,
    bytes: usize,
) -> anyhow::Result<(Span<'w>, Location)> {
    let location = lamina.locate(name, view)?;
    let needed = bytes as u64;
    ensure!(
        location.bytes >= needed,
        "{view} of {name} has {} bytes; the model needs {needed}",
        location.bytes
    );
    Ok((lamina.span(name, view)?, location))
}
