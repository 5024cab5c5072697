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
    tensors: Vec<TensorRow>,
    tensors_gone: Vec<String>,
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
        let Update { seconds, stats, formats, precisions, layers, events, hottest, tensors, tensors_gone } =
            update;
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
        self.gone = None;
    }

    /// Takes in that the device is gone.
    pub(super) fn gone(&mut self, why: &anyhow::Error) {
        let since = self.gone.take().map_or_else(Instant::now, |(since, _)| since);
        self.gone = Some((since, format!("{why:#}")));
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
}
