//! Tables I and IV, Fig. 16: what codecs make of weights, and of KV caches as words.

use std::fmt::Write as _;

use lamina_device::analyze::report::Figures;

use super::book::{How, Paper, Row, Section};
use super::chart::{Across, Chart, Kind, Look, Series};
use super::found::{Found, Weights};

/// TRACE, Table I (CXL-NDP, Table II): models, and what lz4 and zstd save of weights and of KV.
const MODELS: [&str; 5] = ["Llama 3.1 8B", "Gemma 2 2B", "Mistral 7B", "OPT 13B", "Mixtral 8x7B"];
const WEIGHTS: [(&str, [f64; 5]); 2] =
    [("lz4", [0.0, 11.5, 0.0, 0.0, 18.0]), ("zstd", [20.6, 23.0, 17.3, 19.4, 21.3])];
const KV: [(&str, [f64; 5]); 2] = [("lz4", [0.0; 5]), ("zstd", [6.5, 2.9, 0.9, 2.0, 3.8])];

/// TRACE, Table IV (CXL-NDP, Table IV): model, and of bf16, fp8 and int4 the ratio, and what is
/// saved of that precision and of bf16.
const LOSSLESS: [(&str, [[f64; 3]; 3]); 4] = [
    ("Llama 3.1 8B", [[1.34, 25.2, 25.2], [1.09, 8.3, 54.1], [1.01, 0.9, 75.2]]),
    ("Llama 3.1 70B", [[1.34, 25.6, 25.6], [1.10, 9.3, 54.6], [1.02, 2.1, 75.5]]),
    ("Mixtral 8x7B", [[1.32, 24.4, 24.4], [1.09, 8.0, 54.1], [1.01, 1.2, 75.3]]),
    ("LLaMA-MoE 3.5B", [[1.33, 24.9, 24.9], [1.11, 9.9, 54.9], [1.02, 1.6, 75.4]]),
];

/// What is missing of a run without weights.
pub(super) const NO_WEIGHTS: &str = "No weights were at hand: give a checkpoint with --model.";
/// The same of caches.
pub(super) const NO_CACHE: &str = "No KV cache was at hand: give one with --cache.";
const OTHERS: &str = "The paper's models are not at hand, so no row is the same model's.";

const SMALL: &str = "The plane tree makes int4 larger where tensors are small: a block that a tensor \
    does not fill is padded with zeros, and the tree takes about 1 KiB for it, of a norm of 64 weights as well.";

/// Percent that a ratio saves.
pub(super) fn saved(ratio: Option<f64>) -> Option<f64> {
    ratio.map(|ratio| 100.0 * (1.0 - 1.0 / ratio))
}

fn source_of(weights: Option<&Weights>) -> String {
    weights.map_or_else(
        || NO_WEIGHTS.to_owned(),
        |weights| format!("Measured in this run on {}, blocks of 4 KiB. {OTHERS}", weights.names),
    )
}

/// Table I.
pub(super) fn table_i(found: &Found) -> Section {
    let (weights, caches) = (found.weights.as_ref(), found.caches.as_ref());
    let names = [weights.map(|weights| &weights.names), caches.map(|caches| &caches.names)];
    let names: Vec<_> = names.into_iter().flatten().map(String::as_str).collect();
    let source = if names.is_empty() {
        format!("{NO_WEIGHTS} {NO_CACHE}")
    } else {
        format!(
            "Measured in this run on {}: words in blocks of 4 KiB. {OTHERS}",
            names.join(
                " \
            and "
            )
        )
    };
    let mut section = Section::new(
        Paper::Trace,
        "Table I",
        "What lz4 and zstd save of words as they \
            are",
        source,
    );
    let mut names: Vec<_> = MODELS.iter().map(|name| (*name).to_owned()).collect();
    names.push("here".to_owned());
    let mut series = Vec::new();
    let sides = [
        ("weights", WEIGHTS, weights.map(|weights| &weights.report)),
        ("KV", KV, caches.map(|caches| &caches.report)),
    ];
    for (side, printed, report) in sides {
        for (codec, papers) in printed {
            let ours = report.and_then(|report| saved(report.total.word_major.get(codec).copied().flatten()));
            section = section.rows(MODELS.iter().zip(papers).map(|(model, paper)| {
                let what = format!("{side}, {codec}: {model}");
                Row::new(what, "%", 1, Some(paper)).ours(How::Measured, ours)
            }));
            let values = papers.into_iter().map(Some).chain([ours]);
            let name = format!("{side}, {codec}");
            series.push(Series::named(name, series.len() + 1, Look::Solid, values));
        }
    }
    let chart = Chart {
        title: "Saved of words: the paper's models, and the one here".to_owned(),
        kind: Kind::Bars,
        right: "model",
        across: Across::Names(names),
        up: "% saved",
        log: false,
        series,
    };
    section.chart(chart).note("CXL-NDP, Table II, has the same numbers.").note(
        "The paper's Fig. 15 has zstd save 24.8 % (1.33) of the KV of Llama 3.1 8B on BookSum as \
            words; this table says 6.5 %. It does not say what differs.",
    )
}

/// Table IV.
pub(super) fn table_iv(found: &Found) -> Section {
    let weights = found.weights.as_ref();
    let own = weights
        .and_then(|weights| weights.report.total.formats.iter().find(|format| format.name.name() == "bf16"));
    let rounded = weights.and_then(|weights| weights.report.total.rounded.as_ref());
    let mut source = source_of(weights);
    let missing = [
        (own.is_none(), "No tensor of them is bf16"),
        (rounded.is_none(), "No tensor of them is rounded here to fp8 and int4"),
    ];
    for (_, why) in missing.iter().filter(|(missing, _)| *missing && weights.is_some()) {
        let _ = write!(source, " {why}, so these rows were not run.");
    }
    let mut section = Section::new(
        Paper::Trace,
        "Table IV",
        "Lossless ratios of weights in bit-planes, and savings against bf16",
        source,
    );
    let figures = [own.map(|own| &own.figures), rounded.map(|all| &all.fp8), rounded.map(|all| &all.int4)];
    let ours = |codec: &'static str, figures: Option<&Figures>| {
        figures.and_then(|all| all.codecs.get(codec)).cloned()
    };
    for (number, precision) in ["bf16", "fp8", "int4"].into_iter().enumerate() {
        let coded = ours("zstd", figures[number]);
        for (model, printed) in LOSSLESS {
            let [ratio, lossless, total] = printed[number];
            let what = format!("{precision}, zstd: {model}");
            let ours = coded.as_ref().and_then(|coded| coded.ratio);
            let of_bf16 = coded.as_ref().and_then(|coded| coded.savings_vs_bf16).map(|part| 100.0 * part);
            section = section.rows([
                Row::new(&what, "×", 2, Some(ratio)).ours(How::Measured, ours),
                Row::new(format!("{what}, saved of {precision}"), "%", 1, Some(lossless))
                    .ours(How::Measured, saved(ours)),
            ]);
            if precision != "bf16" {
                section = section.rows([Row::new(format!("{what}, saved of bf16"), "%", 1, Some(total))
                    .ours(How::Measured, of_bf16)]);
            }
        }
        let tree = ours("tree", figures[number]).and_then(|coded| coded.ratio);
        let limit = figures[number].and_then(|figures| figures.entropy_limit);
        section = section.rows([
            Row::new(format!("{precision}, this device's plane tree"), "×", 3, None)
                .ours(How::Measured, tree),
            Row::new(format!("{precision}, limit by the exponent's entropy"), "×", 3, None)
                .ours(How::Measured, limit),
        ]);
        if precision == "int4" && tree.is_some_and(|tree| tree < 1.0) {
            section = section.note(SMALL);
        }
    }
    let across = ["bf16", "fp8", "int4"].map(str::to_owned).to_vec();
    let mut series: Vec<_> = (0..)
        .zip(LOSSLESS)
        .map(|(colour, (model, printed))| {
            Series::named(
                format!("{model} (paper)"),
                colour,
                Look::Dashed,
                printed.map(|[ratio, ..]| Some(ratio)),
            )
        })
        .collect();
    for (colour, codec) in [(4, "lz4"), (5, "zstd"), (6, "tree")] {
        let values = figures.map(|figures| ours(codec, figures).and_then(|coded| coded.ratio));
        series.push(Series::named(format!("here, {codec}"), colour, Look::Solid, values));
    }
    let chart = Chart {
        title: "Ratios of weights in bit-planes".to_owned(),
        kind: Kind::Bars,
        right: "precision",
        across: Across::Names(across),
        up: "ratio",
        log: false,
        series,
    };
    section
        .chart(chart)
        .note(
            "fp8 and int4 are rounded from the same weights here (fp8 by a power of two, int4 \
                symmetric in groups of 128), where the paper has AutoFP8 and GPTQ.",
        )
        .note("CXL-NDP, Table IV, has the same numbers.")
}

/// Planes of `figures` by zstd, for a chart.
fn planes(title: String, figures: &Figures) -> Chart {
    let series = figures.codecs.iter().zip(3..).map(|((codec, coded), colour)| {
        // A plane of which nothing is stored is drawn to the top.
        let values = coded.plane_ratios.iter().map(|ratio| Some(ratio.unwrap_or(1024.0).min(1024.0)));
        Series::named(*codec, colour, Look::Solid, values)
    });
    Chart {
        title,
        kind: Kind::Bars,
        right: "plane, most significant first",
        across: Across::Names(figures.planes.clone()),
        up: "ratio",
        log: true,
        series: series.collect(),
    }
}

/// Fig. 16.
pub(super) fn fig_16(found: &Found) -> Section {
    let (weights, caches) = (found.weights.as_ref(), found.caches.as_ref());
    let names = [weights.map(|weights| weights.names.as_str()), caches.map(|caches| caches.names.as_str())];
    let names: Vec<_> = names.into_iter().flatten().collect();
    let source = if names.is_empty() {
        format!("{NO_WEIGHTS} {NO_CACHE}")
    } else {
        format!(
            "Measured in this run on {}, blocks of 4 KiB; the paper prints bars and no numbers.",
            names.join(" and ")
        )
    };
    let mut section = Section::new(Paper::Trace, "Fig. 16", "Ratios plane by plane", source);
    let rounded = weights.and_then(|weights| weights.report.total.rounded.as_ref());
    let own = |report: &lamina_device::analyze::Report| {
        report.total.formats.first().map(|format| format.figures.clone())
    };
    let all = [
        ("weights as they are", weights.and_then(|weights| own(&weights.report))),
        ("weights rounded to fp8", rounded.map(|rounded| rounded.fp8.clone())),
        ("weights rounded to int4", rounded.map(|rounded| rounded.int4.clone())),
        ("KV, by windows", caches.and_then(|caches| own(&caches.report))),
    ];
    for (name, figures) in all {
        let Some(figures) = figures.filter(|figures| !figures.planes.is_empty()) else { continue };
        section = section.chart(planes(format!("{name}: ratio of each plane"), &figures));
        let top = figures.codecs.get("zstd").map(|coded| &coded.plane_ratios);
        let exponents = figures.planes.iter().zip(top.into_iter().flatten());
        let most =
            exponents.filter(|(plane, _)| plane.starts_with('e')).map(|(_, ratio)| ratio.unwrap_or(1024.0));
        if let Some(most) = most.reduce(f64::max) {
            let row = Row::new(format!("{name}: best exponent plane, zstd"), "×", 1, None);
            section = section.rows([row.ours(How::Measured, Some(most))]);
        }
    }
    section.note(
        "A byte that several planes share is charged to them in equal parts. A plane of which \
            nothing is stored is drawn as 1024. The same as CXL-NDP, Fig. 14.",
    )
}
