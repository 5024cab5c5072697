//! What is known of a device: updates, put together.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Deserialize;
use serde_json::Value;

/// What reads moved.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct Moved {
    pub(super) reads: u64,
    pub(super) bytes: u64,
    pub(super) stored: u64,
    pub(super) plain: Option<u64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct TensorRow {
    pub(super) name: String,
    pub(super) format: String,
    pub(super) length: u64,
    pub(super) stored_bytes: u64,
    #[serde(flatten)]
    pub(super) moved: Moved,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct PlaneRow {
    pub(super) plane: u32,
    raw_bytes: u64,
    lz4_bytes: u64,
    zstd_bytes: u64,
    tree_bytes: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct FormatRow {
    pub(super) format: String,
    pub(super) bits: u32,
    pub(super) exponent_bits: u32,
    pub(super) mantissa_bits: u32,
    pub(super) logical_bytes: u64,
    pub(super) plane_bytes: u64,
    pub(super) planes: Vec<PlaneRow>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct PrecisionRow {
    pub(super) view: String,
    pub(super) tensors: u64,
    #[serde(flatten)]
    pub(super) moved: Moved,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct LayerRow {
    pub(super) layer: u64,
    pub(super) length: u64,
    pub(super) stored_bytes: u64,
}

/// How long requests of one kind took.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct LatencyRow {
    pub(super) window: String,
    pub(super) request: String,
    pub(super) requests: u64,
    pub(super) p50_seconds: Option<f64>,
    pub(super) p99_seconds: Option<f64>,
    pub(super) now_requests: u64,
    pub(super) now_p50_seconds: Option<f64>,
    pub(super) now_p99_seconds: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct EventRow {
    pub(super) text: String,
}

#[derive(Clone, Debug, Deserialize)]
struct HotRow {
    tensor: String,
    bytes: u64,
}

/// One update, as `GET /live` sends it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Update {
    seconds: Option<f64>,
    stats: Value,
    formats: Vec<FormatRow>,
    precisions: Vec<PrecisionRow>,
    layers: Vec<LayerRow>,
    events: Vec<EventRow>,
    hottest: Vec<HotRow>,
    // A device that was not upgraded yet does not tell it.
    #[serde(default)]
    latency: Vec<LatencyRow>,
    tensors: Vec<TensorRow>,
    tensors_gone: Vec<String>,
}

/// A whole update and the one behind it as one that is whole and has what is now.
pub(super) fn joined(mut whole: Value, mut tick: Value) -> Value {
    let rows = |update: &mut Value, list: &str| match update[list].take() {
        Value::Array(rows) => rows,
        _ => Vec::new(),
    };
    let is_whole = tick["seconds"].is_null();
    for (list, gone, key) in
        [("tensors", "tensors_gone", &["name"][..]), ("views", "views_gone", &["tensor", "view"])]
    {
        let (changed, gone) = (rows(&mut tick, list), rows(&mut tick, gone));
        let is = |row: &Value, other: &Value| key.iter().all(|field| row[field] == other[field]);
        let is_gone = |row: &Value| {
            gone.iter().any(|gone| {
                let parts = gone.as_array().map_or(std::slice::from_ref(gone), Vec::as_slice);
                key.iter().zip(parts).all(|(field, part)| row[field] == *part)
            })
        };
        let mut all = rows(&mut whole, list);
        all.retain(|row| !is_whole && !is_gone(row) && !changed.iter().any(|other| is(row, other)));
        all.extend(changed);
        all.sort_by(|one, other| {
            let of = |row: &Value| key.iter().map(|field| row[field].to_string()).collect::<Vec<_>>();
            of(one).cmp(&of(other))
        });
        tick[list] = all.into();
    }
    if let Some(fields) = tick.as_object_mut() {
        fields.retain(|field, _| !field.ends_with("_gone"));
    }
    tick
}

/// What is known.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) stats: Value,
    pub(super) formats: Vec<FormatRow>,
    /// Each with what it moved a second, read and fetched.
    pub(super) precisions: Vec<(PrecisionRow, [f64; 2])>,
    pub(super) layers: Vec<LayerRow>,
    pub(super) events: Vec<EventRow>,
    pub(super) latency: Vec<LatencyRow>,
    pub(super) tensors: BTreeMap<String, TensorRow>,
    /// Bytes a second, of those that were read most.
    pub(super) hottest: BTreeMap<String, f64>,
    /// Since when the device is gone, and why.
    pub(super) gone: Option<(Instant, String)>,
}

impl Seen {
    /// Takes an update in.
    #[expect(clippy::cast_precision_loss, reason = "rates to be looked at")]
    pub(super) fn take(&mut self, update: Update) {
        let Update { seconds, stats, formats, precisions, layers, events, hottest, .. } = update;
        let (latency, tensors, tensors_gone) = (update.latency, update.tensors, update.tensors_gone);
        let per_second = |bytes: u64| seconds.filter(|s| *s > 0.0).map_or(0.0, |s| bytes as f64 / s);
        let former = std::mem::take(&mut self.precisions);
        let rates = |row: &PrecisionRow| {
            let before = former.iter().find(|(before, _)| before.view == row.view)?.0.moved;
            let bytes = row.moved.bytes.checked_sub(before.bytes)?;
            Some([per_second(bytes), per_second(row.moved.stored.checked_sub(before.stored)?)])
        };
        self.precisions = precisions
            .into_iter()
            .map(|row| (rates(&row).unwrap_or_default(), row))
            .map(|(rates, row)| (row, rates))
            .collect();
        self.hottest = hottest.into_iter().map(|row| (row.tensor, per_second(row.bytes))).collect();
        if seconds.is_none() {
            self.tensors.clear();
        }
        self.tensors.extend(tensors.into_iter().map(|row| (row.name.clone(), row)));
        for name in tensors_gone {
            self.tensors.remove(&name);
        }
        (self.stats, self.formats, self.layers, self.events) = (stats, formats, layers, events);
        self.latency = latency;
        self.gone = None;
    }

    /// Takes in that the device is gone.
    pub(super) fn gone(&mut self, why: &anyhow::Error) {
        let since = self.gone.take().map_or_else(Instant::now, |(since, _)| since);
        self.gone = Some((since, crate::out::reason(why)));
    }

    /// A number of the counters, by its JSON pointer.
    pub(super) fn number(&self, pointer: &str) -> u64 {
        self.stats.pointer(pointer).and_then(Value::as_u64).unwrap_or(0)
    }

    /// A text of the counters.
    pub(super) fn text(&self, pointer: &str) -> &str {
        self.stats.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }
}

impl PlaneRow {
    pub(super) fn stored(&self) -> u64 {
        [self.raw_bytes, self.lz4_bytes, self.zstd_bytes, self.tree_bytes].iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn update(seconds: Option<f64>, bytes: u64, tensors: &[(&str, u64)], gone: &[&str]) -> Update {
        let moved = json!({ "reads": 1, "bytes": bytes, "stored": bytes / 2, "plain": null, "gcomp": null });
        let mut view = moved.clone();
        (view["view"], view["tensors"]) = ("e8m3".into(), 1.into());
        let row = |(name, bytes): &(&str, u64)| {
            let mut row = moved.clone();
            (row["name"], row["format"]) = ((*name).into(), "bf16".into());
            (row["length"], row["stored_bytes"]) = ((*bytes).into(), (*bytes).into());
            row
        };
        serde_json::from_value(json!({
            "seconds": seconds,
            "stats": { "device": { "mode": "trace", "stored_bytes": 7 } },
            "formats": [],
            "precisions": [view],
            "layers": [],
            "events": [],
            "hottest": [{ "tensor": "a", "bytes": bytes, "stored": 1 }],
            "tensors": tensors.iter().map(row).collect::<Vec<_>>(),
            "tensors_gone": gone,
        }))
        .unwrap()
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "whole numbers, which are exact")]
    fn updates_are_put_together_and_rates_are_per_second() {
        let mut seen = Seen::default();
        seen.take(update(None, 100, &[("a", 1), ("b", 2)], &[]));
        assert_eq!(seen.precisions[0].1, [0.0, 0.0]);
        seen.take(update(Some(2.0), 300, &[("b", 3), ("c", 4)], &["a"]));
        assert_eq!(seen.precisions[0].1, [100.0, 50.0]);
        assert_eq!(seen.hottest["a"], 150.0);
        let stored: Vec<_> = seen.tensors.values().map(|row| (&*row.name, row.stored_bytes)).collect();
        assert_eq!(stored, [("b", 3), ("c", 4)]);
        assert_eq!((seen.number("/device/stored_bytes"), seen.text("/device/mode")), (7, "trace"));
        seen.gone(&anyhow::anyhow!("one"));
        let since = seen.gone.as_ref().unwrap().0;
        seen.gone(&anyhow::anyhow!("two"));
        assert_eq!(seen.gone.as_ref().unwrap(), &(since, "two".to_owned()));
        // Another device, or the same after it was away.
        seen.take(update(None, 5, &[("z", 9)], &[]));
        assert!(seen.gone.is_none() && seen.tensors.len() == 1 && seen.precisions[0].1 == [0.0, 0.0]);
    }

    #[test]
    fn what_changed_is_joined_to_what_was() {
        let row = |name: &str, bytes: u64| json!({ "name": name, "bytes": bytes });
        let view = |tensor: &str, view: &str| json!({ "tensor": tensor, "view": view });
        let whole = json!({
            "seconds": null, "tensors": [row("a", 1), row("b", 1), row("c", 1)], "tensors_gone": [],
            "views": [view("a", "full"), view("a", "e8m3")], "views_gone": [], "hottest": [],
        });
        let tick = json!({
            "seconds": 1.0, "tensors": [row("d", 2), row("b", 2)], "tensors_gone": ["c"],
            "views": [], "views_gone": [["a", "e8m3"]], "hottest": [1],
        });
        let now = joined(whole.clone(), tick);
        let wanted = json!({
            "seconds": 1.0, "tensors": [row("a", 1), row("b", 2), row("d", 2)],
            "views": [view("a", "full")], "hottest": [1],
        });
        assert_eq!(now, wanted);
        let other = json!({ "seconds": null, "tensors": [row("z", 1)], "tensors_gone": [], "views": [] });
        assert_eq!(joined(whole, other)["tensors"], json!([row("z", 1)]));
    }
}
