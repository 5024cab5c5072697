//! What is shown of a device at one moment, and what changed since another.

use std::collections::BTreeMap;
use std::time::Duration;

use lamina_codec::format::Format;
use lamina_device::counters::Times;
use lamina_device::device::events::Event;
use lamina_device::device::poison::Poisoned;
use lamina_device::stats::{LatencyReport, PlaneReport, StatsReport, TensorReport, TrafficReport};
use serde::Serialize;

use crate::control::{Control, ServedExport, ServedStats};

/// Tensors that are named as the hottest.
const HOTTEST: usize = 12;
/// Events and poisoned blocks that are shown.
const LISTED: usize = 50;

/// What reads moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Moved {
    reads: u64,
    bytes: u64,
    stored: u64,
    /// What a plain device would have moved; null if that was not measured.
    plain: Option<u64>,
    gcomp: Option<u64>,
}

/// A tensor, with what was read of it by any way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TensorRow {
    name: String,
    format: Format,
    /// The layout's name.
    layout: &'static str,
    /// What its blocks may be differences to.
    base: Option<String>,
    codec: String,
    dpa: u64,
    length: u64,
    stored_bytes: u64,
    #[serde(flatten)]
    moved: Moved,
}

/// A view of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ViewRow {
    tensor: String,
    view: String,
    offset: u64,
    length: u64,
    bits: u32,
    planes: u32,
    #[serde(flatten)]
    moved: Moved,
}

/// A format's planes, and what they would take as they are.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FormatRow {
    format: Format,
    bits: u32,
    exponent_bits: u32,
    mantissa_bits: u32,
    /// Bytes of its tensors.
    logical_bytes: u64,
    /// Bytes of each plane in them.
    plane_bytes: u64,
    planes: Vec<PlaneReport>,
}

/// All tensors at one precision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PrecisionRow {
    /// The view's spelling, or `base`.
    view: String,
    tensors: u64,
    #[serde(flatten)]
    moved: Moved,
}

/// The KV caches of a layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct LayerRow {
    layer: u64,
    length: u64,
    stored_bytes: u64,
    #[serde(flatten)]
    moved: Moved,
}

/// What a tensor's readers moved since the last tick.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct HotRow<'s> {
    tensor: &'s str,
    bytes: u64,
    stored: u64,
}

/// How long requests of one kind took: all of them, and those since the last tick.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct LatencyRow {
    /// The window that they were for.
    window: &'static str,
    /// `read` or `write`.
    request: &'static str,
    requests: u64,
    p50_seconds: Option<f64>,
    p99_seconds: Option<f64>,
    max_seconds: Option<f64>,
    now_requests: u64,
    now_p50_seconds: Option<f64>,
    now_p99_seconds: Option<f64>,
}

/// A device at one moment.
pub(super) struct Snapshot {
    /// Without lists of tensors and views.
    stats: ServedStats,
    tensors: BTreeMap<String, TensorRow>,
    /// By tensor and spelling.
    views: BTreeMap<(String, String), ViewRow>,
    formats: Vec<FormatRow>,
    precisions: Vec<PrecisionRow>,
    layers: Vec<LayerRow>,
    guests: Vec<ServedExport>,
    poison: Vec<Poisoned>,
    events: Vec<Event>,
}

/// What a viewer is told.
#[derive(Serialize)]
pub(super) struct Update<'s> {
    /// Seconds since the one before it; null of a whole one.
    seconds: Option<f64>,
    stats: &'s ServedStats,
    formats: &'s [FormatRow],
    precisions: &'s [PrecisionRow],
    layers: &'s [LayerRow],
    guests: &'s [ServedExport],
    poison: &'s [Poisoned],
    events: &'s [Event],
    hottest: Vec<HotRow<'s>>,
    latency: Vec<LatencyRow>,
    tensors: Vec<&'s TensorRow>,
    tensors_gone: Vec<&'s str>,
    views: Vec<&'s ViewRow>,
    views_gone: Vec<&'s (String, String)>,
}

impl Moved {
    fn of(report: &TrafficReport) -> Self {
        Self {
            reads: report.reads,
            bytes: report.bytes,
            stored: report.stored_bytes_fetched,
            plain: report.plain_bytes_fetched,
            gcomp: report.gcomp_bytes_fetched,
        }
    }

    fn add(&mut self, other: Self) {
        let sum = |one: Option<u64>, other: Option<u64>| Some(one.unwrap_or(0).saturating_add(other?));
        self.reads = self.reads.saturating_add(other.reads);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.stored = self.stored.saturating_add(other.stored);
        self.plain = sum(self.plain, other.plain);
        self.gcomp = sum(self.gcomp, other.gcomp);
    }
}

impl Snapshot {
    /// What `control` is of, now.
    pub(super) fn of(control: &Control) -> Self {
        let mut stats = control.stats();
        let StatsReport { tensors, views, planes, .. } = &mut stats.device;
        let (tensors, views) = (std::mem::take(tensors), std::mem::take(views));
        let formats = formats(planes, &tensors);
        let mut tensors: BTreeMap<_, _> =
            tensors.into_iter().map(|tensor| (tensor.name.clone(), TensorRow::of(tensor))).collect();
        let mut precisions = BTreeMap::new();
        let mut base = Moved::default();
        for tensor in tensors.values() {
            base.add(tensor.moved);
        }
        let all = tensors.len() as u64;
        precisions.insert("base".to_owned(), PrecisionRow { view: "base".into(), tensors: all, moved: base });
        let mut rows = BTreeMap::new();
        for view in views {
            let moved = Moved::of(&view.traffic);
            let info = view.info;
            if let Some(tensor) = tensors.get_mut(&info.tensor) {
                tensor.moved.add(moved);
            }
            let precision = precisions.entry(info.view.clone()).or_insert_with(|| PrecisionRow {
                view: info.view.clone(),
                tensors: 0,
                moved: Moved::default(),
            });
            precision.tensors += 1;
            precision.moved.add(moved);
            let key = (info.tensor.clone(), info.view.clone());
            let (offset, length) = (info.offset, info.length);
            let (bits, planes) = (info.bits, info.planes);
            let (tensor, view) = (info.tensor, info.view);
            rows.insert(key, ViewRow { tensor, view, offset, length, bits, planes, moved });
        }
        let mut poison = control.poison();
        poison.truncate(LISTED);
        let mut events = control.events();
        events.drain(..events.len().saturating_sub(LISTED));
        Self {
            layers: layers(tensors.values()),
            stats,
            tensors,
            views: rows,
            formats,
            precisions: precisions.into_values().collect(),
            guests: control.served_exports(),
            poison,
            events,
        }
    }

    /// All of it.
    pub(super) fn whole(&self) -> Update<'_> {
        self.update(None, Vec::new())
    }

    /// What is different from what was so long ago.
    pub(super) fn since<'s>(&'s self, last: &'s Self, ago: Duration) -> Update<'s> {
        let moved = |tensor: &'s TensorRow| {
            let before = last.tensors.get(&tensor.name)?.moved;
            let bytes = tensor.moved.bytes.checked_sub(before.bytes).filter(|bytes| *bytes > 0)?;
            let stored = tensor.moved.stored.saturating_sub(before.stored);
            Some(HotRow { tensor: &tensor.name, bytes, stored })
        };
        let mut hottest: Vec<_> = self.tensors.values().filter_map(moved).collect();
        hottest.sort_by(|one, other| (other.bytes, one.tensor).cmp(&(one.bytes, other.tensor)));
        hottest.truncate(HOTTEST);
        let mut update = self.update(Some(ago.as_secs_f64()), hottest);
        let latencies = self.stats.device.latency.iter().zip(&last.stats.device.latency);
        update.latency = latencies.map(|(now, last)| LatencyRow::of(now, Some(last))).collect();
        update.tensors.retain(|tensor| last.tensors.get(&tensor.name) != Some(tensor));
        let known = |view: &ViewRow| last.views.get(&(view.tensor.clone(), view.view.clone())) == Some(view);
        update.views.retain(|view| !known(view));
        let gone = last.tensors.keys().filter(|name| !self.tensors.contains_key(*name));
        update.tensors_gone = gone.map(String::as_str).collect();
        update.views_gone = last.views.keys().filter(|key| !self.views.contains_key(key)).collect();
        update
    }

    fn update<'s>(&'s self, seconds: Option<f64>, hottest: Vec<HotRow<'s>>) -> Update<'s> {
        Update {
            seconds,
            stats: &self.stats,
            formats: &self.formats,
            precisions: &self.precisions,
            layers: &self.layers,
            guests: &self.guests,
            poison: &self.poison,
            events: &self.events,
            hottest,
            latency: self.stats.device.latency.iter().map(|all| LatencyRow::of(all, None)).collect(),
            tensors: self.tensors.values().collect(),
            tensors_gone: Vec::new(),
            views: self.views.values().collect(),
            views_gone: Vec::new(),
        }
    }
}

impl LatencyRow {
    fn of(all: &LatencyReport, last: Option<&LatencyReport>) -> Self {
        let now = last.map(|last| all.times.since(&last.times));
        let quantile = |part| now.as_ref()?.quantile(part);
        Self {
            window: all.window,
            request: all.request,
            requests: all.times.count(),
            p50_seconds: all.p50_seconds,
            p99_seconds: all.p99_seconds,
            max_seconds: all.max_seconds,
            now_requests: now.as_ref().map_or(0, Times::count),
            now_p50_seconds: quantile(0.5),
            now_p99_seconds: quantile(0.99),
        }
    }
}

impl TensorRow {
    fn of(report: TensorReport) -> Self {
        Self {
            layout: report.layout.name(),
            base: report.base_tensor,
            codec: report.codec.to_string(),
            moved: Moved::of(&report.base),
            name: report.name,
            format: report.format,
            dpa: report.dpa,
            length: report.logical_bytes,
            stored_bytes: report.stored_bytes,
        }
    }
}

/// The formats that have planes, the one with the most bytes first.
fn formats(planes: &[PlaneReport], tensors: &[TensorReport]) -> Vec<FormatRow> {
    let mut formats: Vec<FormatRow> = Vec::new();
    for plane in planes {
        if let Some(row) = formats.last_mut().filter(|row| row.format == plane.format) {
            row.planes.push(plane.clone());
            continue;
        }
        let of_format = tensors.iter().filter(|tensor| tensor.format == plane.format);
        let logical_bytes: u64 = of_format.map(|tensor| tensor.logical_bytes).sum();
        formats.push(FormatRow {
            format: plane.format,
            bits: plane.format.bits(),
            exponent_bits: plane.format.exponent_bits(),
            mantissa_bits: plane.format.mantissa_bits(),
            logical_bytes,
            plane_bytes: logical_bytes / u64::from(plane.format.bits()),
            planes: vec![plane.clone()],
        });
    }
    formats.sort_by_key(|row| std::cmp::Reverse(row.logical_bytes));
    formats
}

/// The KV caches by the first number in their names, in its order.
fn layers<'t>(tensors: impl Iterator<Item = &'t TensorRow>) -> Vec<LayerRow> {
    let mut layers: BTreeMap<u64, LayerRow> = BTreeMap::new();
    for tensor in tensors.filter(|tensor| tensor.layout.ends_with("kv")) {
        let Some(layer) = layer(&tensor.name) else { continue };
        let row = layers.entry(layer).or_insert_with(|| LayerRow { layer, ..LayerRow::default() });
        row.length = row.length.saturating_add(tensor.length);
        row.stored_bytes = row.stored_bytes.saturating_add(tensor.stored_bytes);
        row.moved.add(tensor.moved);
    }
    layers.into_values().collect()
}

/// The first part of a name that is a number: 3 of `model.layers.3.k` and of `cache_3.v`.
fn layer(name: &str) -> Option<u64> {
    name.split(|c: char| !c.is_ascii_alphanumeric()).find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::layer;

    #[test]
    fn a_layer_is_the_first_number_in_a_name() {
        for (name, number) in [
            ("model.layers.3.k", Some(3)),
            ("cache_11.v", Some(11)),
            ("blk.0.attn_k.1", Some(0)),
            ("cache.k", None),
            ("k2", None),
            ("a/99999999999999999999999/b", None),
            ("", None),
        ] {
            assert_eq!(layer(name), number, "{name}");
        }
    }
}
