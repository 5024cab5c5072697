//! Fig. 15, and Fig. 13 of CXL-NDP: KV caches layer by layer.

use std::collections::BTreeMap;

use lamina_device::analyze::Report;
use lamina_device::analyze::layers::place;

use super::book::{How, Paper, Row, Section};
use super::chart::{Across, Chart, Kind, Look, Series};
use super::found::Found;
use super::stored::{NO_CACHE, saved};

/// TRACE, Fig. 15, of Llama 3.1 8B, by zstd: WikiText and BookSum, of words (gcomp) and of trace.
const WORDS: [f64; 2] = [1.21, 1.33];
const TRACE: [f64; 2] = [1.81, 1.88];
/// What trace saves, and how far its ratio by zstd is above that of words: percent.
const SAVED: [f64; 2] = [44.8, 46.9];
const ABOVE: [f64; 2] = [50.3, 41.7];
/// The same of the layer that is best.
const BEST: [(&str, [f64; 2]); 2] = [("zstd", [2.69, 2.10]), ("lz4", [2.31, 1.93])];

/// Bytes of a layer before, and by what codes it.
#[derive(Default)]
struct Layer {
    before: f64,
    after: BTreeMap<String, f64>,
}

/// Layers of a report, K and V together.
fn layers(report: &Report) -> BTreeMap<u64, Layer> {
    let mut layers = BTreeMap::<u64, Layer>::new();
    for tensor in &report.tensors {
        let layer = layers.entry(place(&tensor.name).0.unwrap_or(0)).or_default();
        #[expect(clippy::cast_precision_loss, reason = "exact up to 8 PiB")]
        let before = tensor.figures.logical_bytes as f64;
        layer.before += before;
        let words = tensor.word_major.iter().map(|(codec, ratio)| {
            (
                format!(
                    "words, \
            {codec}"
                ),
                *ratio,
            )
        });
        let planes = tensor.figures.codecs.iter().map(|(codec, coded)| ((*codec).to_owned(), coded.ratio));
        for (name, ratio) in words.chain(planes) {
            *layer.after.entry(name).or_default() += ratio.map_or(0.0, |ratio| before / ratio);
        }
    }
    layers
}

/// The layers' ratios by one coding.
fn ratios(layers: &BTreeMap<u64, Layer>, name: &str) -> Vec<Option<f64>> {
    let ratio =
        |layer: &Layer| layer.after.get(name).filter(|after| **after > 0.0).map(|after| layer.before / after);
    layers.values().map(ratio).collect()
}

fn source(found: &Found) -> String {
    let Some(caches) = &found.caches else { return NO_CACHE.to_owned() };
    let of_llama = found.llama.as_ref().and_then(|llama| llama.cached(&caches.names)).unwrap_or_default();
    format!(
        "Measured in this run on {}, a cache of {}, all metadata but index entries counted.{of_llama} \
            It is not Llama 3.1 8B's, which is not at hand, so the paper's two texts stand beside one \
            number.",
        caches.names, caches.layout
    )
}

/// A ratio of all layers together.
fn total(report: &Report, codec: &str) -> Option<f64> {
    report.total.codecs.get(codec).and_then(|total| total.ratio)
}

fn beside(what: &str, papers: [f64; 2], ours: Option<f64>) -> [Row; 2] {
    in_unit(what, ("×", 2), papers, ours)
}

fn in_unit(
    what: &str,
    (unit, places): (&'static str, usize),
    papers: [f64; 2],
    ours: Option<f64>,
) -> [Row; 2] {
    let row = |text: &str, paper| {
        Row::new(format!("{what}: {text}"), unit, places, Some(paper)).ours(How::Measured, ours)
    };
    [row("WikiText", papers[0]), row("BookSum", papers[1])]
}

fn chart(title: &str, layers: &BTreeMap<u64, Layer>, series: Vec<Series>) -> Chart {
    Chart {
        title: title.to_owned(),
        kind: Kind::Bars,
        right: "layer",
        across: Across::Names(layers.keys().map(u64::to_string).collect()),
        up: "ratio",
        log: false,
        series,
    }
}

/// Fig. 15.
pub(super) fn fig_15(found: &Found) -> Section {
    let caches = found.caches.as_ref();
    let mut section =
        Section::new(Paper::Trace, "Fig. 15", "Lossless ratios of KV caches, layer by layer", source(found));
    let trace = caches.and_then(|caches| total(&caches.report, "zstd"));
    let words = caches.and_then(|caches| caches.report.total.word_major.get("zstd").copied().flatten());
    let above = trace.zip(words).map(|(trace, words)| 100.0 * (trace / words - 1.0));
    for (what, papers, ours) in [("words (gcomp)", WORDS, words), ("trace", TRACE, trace)] {
        section = section.rows(beside(&format!("{what}, zstd"), papers, ours));
    }
    section = section.rows(in_unit("trace, zstd, saved", ("%", 1), SAVED, saved(trace))).rows(in_unit(
        "trace's ratio above that of words, zstd",
        ("%", 1),
        ABOVE,
        above,
    ));
    let of_layers = caches.map(|caches| layers(&caches.report)).unwrap_or_default();
    for (codec, papers) in BEST {
        let ours = ratios(&of_layers, codec).into_iter().flatten().reduce(f64::max);
        section = section.rows(beside(&format!("best layer, {codec}"), papers, ours));
    }
    let tree = caches.and_then(|caches| total(&caches.report, "tree"));
    section = section.rows([Row::new("this device's plane tree", "×", 2, None).ours(How::Measured, tree)]);
    if let Some(stored) =
        found.decoded.as_ref().and_then(|decoded| decoded.kv_ratio.map(|ratio| (ratio, &decoded.model)))
    {
        let what = format!(
            "{}'s own, as the device stored it while the model wrote a \
            text",
            stored.1
        );
        section = section.rows([Row::new(what, "×", 2, None).ours(How::Measured, Some(stored.0))]);
    }
    if !of_layers.is_empty() {
        let names = ["words, lz4", "words, zstd", "lz4", "zstd", "tree"];
        let series = names
            .into_iter()
            .enumerate()
            .map(|(colour, name)| Series::named(name, colour, Look::Solid, ratios(&of_layers, name)));
        section = section.chart(chart("Ratio by layer, K and V together", &of_layers, series.collect()));
    }
    section
        .note("The paper's ratios give 49.6 and 41.4 % above those of words, where it prints 50.3 and 41.7.")
}

/// CXL-NDP's Fig. 13.
pub(super) fn ndp_fig_13(found: &Found) -> Section {
    let caches = found.caches.as_ref();
    let mut section = Section::new(
        Paper::Ndp,
        "Fig. 13",
        "KV caches: bit-planes alone against bit-planes of channels",
        source(found),
    );
    let baseline = caches.and_then(|caches| total(&caches.planes, "zstd"));
    let proposed = caches.and_then(|caches| total(&caches.report, "zstd"));
    section = section.rows(beside("bit-planes alone, zstd", WORDS, baseline));
    section = section.rows(beside("grouped by channels, zstd", TRACE, proposed));
    if let Some(caches) = caches {
        let (of_planes, of_windows) = (layers(&caches.planes), layers(&caches.report));
        let series = vec![
            Series::named("bit-planes alone, zstd", 0, Look::Solid, ratios(&of_planes, "zstd")),
            Series::named("grouped by channels, zstd", 3, Look::Solid, ratios(&of_windows, "zstd")),
        ];
        section = section.chart(chart("Ratio by layer, zstd", &of_planes, series));
    }
    let words = caches.and_then(|caches| caches.report.total.word_major.get("zstd").copied().flatten());
    let here = words.zip(baseline).map_or_else(String::new, |(words, planes)| {
        format!(" Here words by zstd give {words:.2}, and bit-planes without grouping {planes:.2}.")
    });
    section.note(format!(
        "CXL-NDP says that its 1.21 and 1.33 are of bit-planes without grouping; TRACE, Fig. 15, \
            prints the same two numbers for words by zstd.{here}"
    ))
}
