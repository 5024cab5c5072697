//! KV caches layer by layer (TRACE Fig. 15): what the device makes of K and of V, beside generic
//! compression of the same bytes.
//!
//! A tensor's layer is the number behind `layer` or `layers` in its name (`layers.3.seq.0.k`), or
//! else the first number there is; its side is `k` or `v` where a part of the name says so. Tensors
//! of one layer and side are added up; means over layers are of their ratios.

use std::collections::BTreeMap;

use serde::Serialize;

use super::report::TensorReport;
use crate::layout::Layout;
use lamina_codec::kv::KvLayout;

/// The caches of the analysed files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvReport {
    /// The layout they have.
    pub layout: KvLayout,
    /// Each layer and side.
    pub layers: Vec<LayerReport>,
    /// The geometric mean of the ratios of all cache tensors, by codec.
    pub geometric_mean: BTreeMap<&'static str, Option<f64>>,
    /// The same of generic compression, by codec.
    pub word_major_geometric_mean: BTreeMap<&'static str, Option<f64>>,
}

/// The caches of one layer and side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// The layer's number; none if no name tells.
    pub layer: Option<u64>,
    /// `k`, `v`, or `kv` where the name does not tell.
    pub side: &'static str,
    /// Tensors added up.
    pub tensors: usize,
    /// Their bytes.
    pub logical_bytes: u64,
    /// By codec: bytes before to bytes after, all metadata but index entries counted.
    pub ratios: BTreeMap<&'static str, Option<f64>>,
    /// Ratios of lz4 and zstd over words.
    pub word_major: BTreeMap<&'static str, Option<f64>>,
}

impl KvReport {
    /// The layers of those of `tensors` that are caches of this layout.
    pub(super) fn new(layout: KvLayout, tensors: &[TensorReport]) -> Self {
        let caches: Vec<_> = tensors.iter().filter(|tensor| matches!(tensor.layout, Layout::Kv(_))).collect();
        let mut groups = BTreeMap::<_, Vec<&TensorReport>>::new();
        for tensor in &caches {
            groups.entry(place(&tensor.name)).or_default().push(tensor);
        }
        let layers =
            groups.into_iter().map(|((layer, side), tensors)| LayerReport::new(layer, side, &tensors));
        let own = |tensor: &&TensorReport| -> Vec<_> {
            tensor.figures.codecs.iter().map(|(name, codec)| (*name, codec.ratio)).collect()
        };
        let words = |tensor: &&TensorReport| -> Vec<_> {
            tensor.word_major.iter().map(|(name, ratio)| (*name, *ratio)).collect()
        };
        Self {
            layout,
            layers: layers.collect(),
            geometric_mean: geometric_means(caches.iter().map(own)),
            word_major_geometric_mean: geometric_means(caches.iter().map(words)),
        }
    }
}

impl LayerReport {
    fn new(layer: Option<u64>, side: &'static str, tensors: &[&TensorReport]) -> Self {
        let logical_bytes = tensors.iter().map(|tensor| tensor.figures.logical_bytes).sum();
        let mut stored = BTreeMap::<_, f64>::new();
        let mut words = BTreeMap::<_, f64>::new();
        for tensor in tensors {
            for (name, codec) in &tensor.figures.codecs {
                *stored.entry(*name).or_default() += super::report::float(codec.stored_bytes);
            }
            for (name, ratio) in &tensor.word_major {
                let bytes =
                    ratio.map_or(0.0, |ratio| super::report::float(tensor.figures.logical_bytes) / ratio);
                *words.entry(*name).or_default() += bytes;
            }
        }
        let ratios = |stored: BTreeMap<&'static str, f64>| {
            let ratio =
                |(name, bytes)| (name, super::report::short(super::report::ratio(logical_bytes, bytes)));
            stored.into_iter().map(ratio).collect()
        };
        Self {
            layer,
            side,
            tensors: tensors.len(),
            logical_bytes,
            ratios: ratios(stored),
            word_major: ratios(words),
        }
    }
}

/// The geometric mean by name; none where a ratio is.
fn geometric_means(
    tensors: impl Iterator<Item = Vec<(&'static str, Option<f64>)>>,
) -> BTreeMap<&'static str, Option<f64>> {
    let mut sums = BTreeMap::<_, (Option<f64>, u64)>::new();
    for (name, ratio) in tensors.flatten() {
        let (sum, count) = sums.entry(name).or_insert((Some(0.0), 0));
        *sum = sum.and_then(|sum| Some(sum + ratio?.ln()));
        *count += 1;
    }
    let mean = |(sum, count): (Option<f64>, u64)| sum.map(|sum| (sum / super::report::float(count)).exp());
    sums.into_iter().map(|(name, sum)| (name, super::report::short(mean(sum)))).collect()
}

/// A tensor's layer and side.
pub fn place(name: &str) -> (Option<u64>, &'static str) {
    let parts: Vec<_> =
        name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty()).collect();
    let behind = parts.windows(2).find(|pair| matches!(pair[0], "layer" | "layers"));
    let named = behind.and_then(|pair| pair[1].parse().ok());
    let layer = named.or_else(|| parts.iter().find_map(|part| part.parse().ok()));
    let side = parts.iter().rev().find_map(|part| match *part {
        "k" | "key" | "keys" => Some("k"),
        "v" | "value" | "values" => Some("v"),
        _ => None,
    });
    (layer, side.unwrap_or("kv"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_layer_and_side() {
        assert_eq!(place("layers.3.seq.0.k"), (Some(3), "k"));
        assert_eq!(place("past_key_values.11.value"), (Some(11), "v"));
        assert_eq!(place("model.layers.7.attn.kv_cache"), (Some(7), "kv"));
        assert_eq!(place("cache"), (None, "kv"));
    }
}
