//! `lamina analyze`: tables, JSON or a drawing of what the device would make of checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::{BinaryBytes, HumanCount};
use lamina_codec::Codec;
use lamina_codec::format::Format;
use lamina_codec::kv::KvLayout;
use lamina_device::analyze::derived::{DerivedReport, DerivedSums, derived};
use lamina_device::analyze::layers::KvReport;
use lamina_device::analyze::packkv::{PackKvReport, Scales, packkv};
use lamina_device::analyze::report::{Figures, RoundedReport};
use lamina_device::analyze::{AnalyzeOptions, Report, plot};
use lamina_device::layout::Layout;
use lamina_device::model::ModelFile;
use serde::Serialize;

use crate::args::Analyze;
use crate::made_file;
use crate::meter::Meter;
use crate::out;
use crate::table::new_table;

/// Analyses and prints. Blocks until it is done.
pub(crate) fn analyze(args: &Analyze) -> Result<()> {
    let open = |paths: &[PathBuf]| {
        paths.iter().map(|path| ModelFile::open(path).map(ModelFile::spread)).collect::<Result<Vec<_>, _>>()
    };
    let models = open(&args.files)?;
    if let Some(plot) = &args.plot {
        can_draw(plot, args.files.iter().chain(&args.base), &models)?;
    }
    // Tables tell what is exact; what a layout's loss would make is told as by --packkv.
    let kv = args.kv.map(|kv| KvLayout { lossy: None, ..kv });
    let lossy = args.kv.and_then(|kv| kv.lossy);
    let scales = args.packkv.or(lossy.map(|lossy| Scales { k: lossy.scale, v: lossy.scale }));
    let options = AnalyzeOptions { codecs: args.codec.0.clone(), kv };
    let meter = Meter::new("read");
    let report = lamina_device::analyze::analyze(&models, &options, |progress| {
        meter.show(&progress);
        ControlFlow::Continue(())
    });
    meter.finish();
    let report = report?;
    let bases = open(&args.base)?;
    let with_base = if bases.is_empty() {
        None
    } else {
        let meter = Meter::new("compared");
        let usual = Codec::default();
        let codec = options.codecs.iter().find(|codec| **codec == usual).or(options.codecs.first());
        let codec = codec.copied().unwrap_or(usual);
        let report = derived(&models, &bases, codec, |progress| {
            meter.show(&progress);
            ControlFlow::Continue(())
        });
        meter.finish();
        Some(report?)
    };
    let packkv = match (scales, kv) {
        (Some(scales), Some(kv)) => {
            let meter = Meter::new("packed");
            let report = packkv(&models, kv, scales, |progress| {
                meter.show(&progress);
                ControlFlow::Continue(())
            });
            meter.finish();
            Some(report?)
        }
        _ => None,
    };
    if let Some(path) = &args.plot {
        let svg = plot::svg(&report, &title(&args.files)).context("no tensor has bit-planes to draw")?;
        made_file::write(path, svg.as_bytes())?;
    }
    let mut text = Vec::new();
    if args.json {
        let printed = Printed { report: &report, packkv: packkv.as_ref(), derived: with_base.as_ref() };
        serde_json::to_writer_pretty(&mut text, &printed)?;
        writeln!(text)?;
    } else {
        print(&mut text, &report, &options, models.len() > 1)?;
        if let Some(packkv) = &packkv {
            print_packkv(&mut text, packkv)?;
        }
        if let Some(derived) = &with_base {
            print_derived(&mut text, derived)?;
        }
    }
    Ok(out::text(&text)?)
}

/// What `--json` prints.
#[derive(Serialize)]
struct Printed<'r> {
    #[serde(flatten)]
    report: &'r Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    packkv: Option<&'r PackKvReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    derived: Option<&'r DerivedReport>,
}

/// Refuses, before minutes of work, what could not be drawn or would write over a checkpoint.
fn can_draw<'p>(plot: &Path, read: impl Iterator<Item = &'p PathBuf>, models: &[ModelFile]) -> Result<()> {
    made_file::check("--plot", plot, read.map(PathBuf::as_path))?;
    let mut tensors = models.iter().flat_map(ModelFile::tensors);
    if !tensors.any(|tensor| tensor.length > 0 && tensor.format != Format::Opaque.name()) {
        bail!("nothing to draw: no tensor in the files has elements and bit-planes");
    }
    Ok(())
}

fn title(files: &[impl AsRef<Path>]) -> String {
    let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    match files {
        [file] => name(file.as_ref()),
        [first, .., last] => {
            format!("{} … {} ({} files)", name(first.as_ref()), name(last.as_ref()), files.len())
        }
        [] => String::new(),
    }
}

fn print(out: &mut impl Write, report: &Report, options: &AnalyzeOptions, many_files: bool) -> Result<()> {
    let codecs: Vec<_> = options.codecs.iter().map(|codec| codec.name()).collect();
    print_tensors(out, report, &codecs, many_files)?;
    if !report.scaled.is_empty() {
        print_scaled(out, report, &codecs)?;
    }
    for remark in &report.remarks {
        writeln!(out, "{}", shown(remark))?;
    }
    if let Some(kv) = &report.kv {
        print_layers(out, kv, report, &codecs)?;
    }
    for format in report.total.formats.iter().filter(|format| !format.figures.planes.is_empty()) {
        writeln!(
            out,
            "\nPlanes of {} ({}), most significant first; ∞: nothing is stored",
            format.name,
            count(format.figures.elements)
        )?;
        print_planes(out, &format.figures, &codecs)?;
    }
    writeln!(out, "\nSavings; rounded values come from fp32, fp16 and bf16 tensors")?;
    let mut table =
        new_table(&["values", "codec", "ratio", "limit", "of limit", "lossless", "total vs bf16"], 2);
    let mut add = |name: &str, figures: &Figures| {
        for codec in &codecs {
            let coded = &figures.codecs[codec];
            table.add_row([
                name.to_owned(),
                (*codec).to_owned(),
                ratio_of(figures.logical_bytes, coded.ratio),
                ratio(figures.entropy_limit),
                percent(coded.of_limit),
                percent(coded.savings),
                percent(coded.savings_vs_bf16),
            ]);
        }
    };
    for format in &report.total.formats {
        add(format.name.name(), &format.figures);
    }
    if let Some(rounded) = &report.total.rounded {
        add("rounded to fp8", &rounded.fp8);
        add(&format!("rounded to int4, groups of {}", rounded.int4_group), &rounded.int4);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

fn print_tensors(out: &mut impl Write, report: &Report, codecs: &[&str], many_files: bool) -> Result<()> {
    writeln!(out, "Ratios at 4 KiB blocks; word: whole words coded (GComp); of limit: the best codec's\n")?;
    let mut head = vec!["tensor", "format", "elements", "bytes"];
    head.extend(codecs);
    let word: Vec<_> = report.total.word_major.keys().map(|codec| format!("word {codec}")).collect();
    head.extend(word.iter().map(String::as_str));
    head.extend(["limit", "of limit", "fp8", "int4"]);
    let mut table = new_table(&head, 2);
    let of = if many_files {
        told_apart(report.tensors.iter().map(|tensor| tensor.file.as_str()))
    } else {
        BTreeMap::new()
    };
    for tensor in &report.tensors {
        let figures = &tensor.figures;
        let name = shown(&tensor.name);
        let mut row = vec![
            of.get(tensor.file.as_str()).map_or_else(|| name.clone(), |file| format!("{file}: {name}")),
            format!("{}{}", tensor.format, if matches!(tensor.layout, Layout::Kv(_)) { " kv" } else { "" }),
            count(figures.elements),
            BinaryBytes(figures.logical_bytes).to_string(),
        ];
        row.extend(codecs.iter().map(|codec| ratio_of(figures.logical_bytes, figures.codecs[codec].ratio)));
        row.extend(tensor.word_major.values().map(|word| ratio_of(figures.logical_bytes, *word)));
        row.push(ratio(figures.entropy_limit));
        row.push(percent(best(figures.codecs.values().map(|codec| codec.of_limit))));
        row.extend(best_rounded(tensor.rounded.as_ref()));
        table.add_row(row);
    }
    let total = &report.total;
    let mut row = vec![
        "total".to_owned(),
        String::new(),
        count(report.tensors.iter().map(|tensor| tensor.figures.elements).sum()),
        BinaryBytes(total.logical_bytes).to_string(),
    ];
    row.extend(codecs.iter().map(|codec| ratio_of(total.logical_bytes, total.codecs[codec].ratio)));
    row.extend(total.word_major.values().map(|word| ratio_of(total.logical_bytes, *word)));
    row.push(ratio(total.entropy_limit));
    row.push(percent(best(total.codecs.values().map(|codec| codec.of_limit))));
    row.extend(best_rounded(total.rounded.as_ref()));
    table.add_row(row);
    writeln!(out, "{table}")?;
    Ok(())
}

/// What a value of block-scaled tensors takes.
fn print_scaled(out: &mut impl Write, report: &Report, codecs: &[&str]) -> Result<()> {
    writeln!(out, "\nBlock-scaled tensors: bits of a value, scales and all other parts counted")?;
    let mut head = vec!["scheme", "tensors", "values", "elements", "scales", "bits"];
    head.extend(codecs);
    let mut table = new_table(&head, 1);
    let bits = |bits: Option<f64>| bits.map_or_else(|| "–".to_owned(), |bits| format!("{bits:.3}"));
    for scaled in &report.scaled {
        let mut row = vec![
            scaled.scheme.to_owned(),
            count(scaled.tensors),
            count(scaled.values),
            BinaryBytes(scaled.element_bytes).to_string(),
            BinaryBytes(scaled.scale_bytes).to_string(),
            bits(scaled.bits),
        ];
        row.extend(codecs.iter().map(|codec| bits(scaled.codecs[codec])));
        table.add_row(row);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

/// KV caches as in the paper's Fig. 15, and how they were coded.
fn print_layers(out: &mut impl Write, kv: &KvReport, report: &Report, codecs: &[&str]) -> Result<()> {
    let caches: usize = kv.layers.iter().map(|layer| layer.tensors).sum();
    writeln!(
        out,
        "\nKV layer by layer: {caches} caches of {}; bases and all other metadata counted",
        kv.layout
    )?;
    let mut head = vec!["layer", "side", "caches", "bytes"];
    head.extend(codecs);
    let word: Vec<_> = kv.word_major_geometric_mean.keys().map(|codec| format!("word {codec}")).collect();
    head.extend(word.iter().map(String::as_str));
    let mut table = new_table(&head, 2);
    for layer in &kv.layers {
        let mut row = vec![
            layer.layer.map_or_else(|| "–".to_owned(), |layer| layer.to_string()),
            layer.side.to_owned(),
            layer.tensors.to_string(),
            BinaryBytes(layer.logical_bytes).to_string(),
        ];
        let ratios = codecs.iter().map(|codec| &layer.ratios[codec]).chain(layer.word_major.values());
        row.extend(ratios.map(|ratio| ratio_of(layer.logical_bytes, *ratio)));
        table.add_row(row);
    }
    let mut row = vec!["mean".to_owned(), String::new(), caches.to_string(), "geometric".to_owned()];
    let means = codecs.iter().map(|codec| &kv.geometric_mean[codec]);
    let means = means.chain(kv.word_major_geometric_mean.values());
    row.extend(means.map(|mean| ratio(*mean)));
    table.add_row(row);
    writeln!(out, "{table}")?;
    for codec in codecs {
        let windows = report.tensors.iter().filter_map(|tensor| tensor.figures.codecs[codec].windows);
        let [mut plain, mut channels, mut deltas, mut repeated] = [0; 4];
        for windows in windows {
            plain += windows.plain;
            channels += windows.channels;
            deltas += windows.deltas;
            repeated += windows.repeated_rows;
        }
        writeln!(
            out,
            "{codec}: {deltas} windows channel by channel with exponent differences, {channels} channel by channel, {plain} in address \
             order; {repeated} repeated rows left out"
        )?;
    }
    Ok(())
}

/// PackKV's Tables I, II and V at one pair of scales, and KIVI beside them.
fn print_packkv(out: &mut impl Write, packkv: &PackKvReport) -> Result<()> {
    let PackKvReport { pairs, unpaired, blocks, tokens_left, k, v, ways } = packkv;
    writeln!(
        out,
        "\nPackKV, lossy: {pairs} pairs of K and V, {blocks} blocks of 64 tokens; ratios to 16 bits an element, as the paper \
         counts and with all that is stored"
    )?;
    let mut table = new_table(&["order", "pack", "K paper", "K all", "V paper", "V all", "both, all"], 2);
    for way in ways {
        let ratios = [way.k_paper, way.k_counted, way.v_paper, way.v_counted, way.counted];
        table.add_row([way.repack.to_owned(), way.pack.to_string()].into_iter().chain(ratios.map(ratio)));
    }
    let kivi = [k.kivi_ratio, None, v.kivi_ratio, None, None].map(ratio);
    let bits = format!("{} and {} bits", k.kivi_bits, v.kivi_bits);
    table.add_row(["KIVI".to_owned(), bits].into_iter().chain(kivi));
    writeln!(out, "{table}")?;
    writeln!(
        out,
        "Steps of {} of a token's range in K, {} in V: errors of {} and {} of the values (root mean square). KIVI at the same \
         steps; its K, in groups of a channel, is more exact.",
        k.scale,
        v.scale,
        percent(k.error),
        percent(v.error)
    )?;
    if *tokens_left > 0 {
        writeln!(out, "{tokens_left} tokens behind the last whole blocks are in no ratio.")?;
    }
    if !unpaired.is_empty() {
        writeln!(out, "{} caches have no other side and are left out.", unpaired.len())?;
    }
    Ok(())
}

/// What tensors take with a base.
fn print_derived(out: &mut impl Write, report: &DerivedReport) -> Result<()> {
    let DerivedReport { codec, tensors, apart, total } = report;
    writeln!(
        out,
        "\nWith a base, {codec}: ratios of bytes to whole granules; differences: blocks stored so, equal: to the base's"
    )?;
    let mut table =
        new_table(&["tensor", "format", "bytes", "alone", "derived", "blocks", "differences", "equal"], 2);
    let mut add = |name: String, format: &str, sums: &DerivedSums| {
        table.add_row([
            name,
            format.to_owned(),
            BinaryBytes(sums.logical_bytes).to_string(),
            ratio_of(sums.logical_bytes, sums.alone_ratio),
            ratio_of(sums.logical_bytes, sums.derived_ratio),
            count(sums.blocks),
            count(sums.differences),
            count(sums.equal),
        ]);
    };
    for tensor in tensors.iter().chain(apart) {
        add(shown(&tensor.name), tensor.format.name(), &tensor.sums);
    }
    add("total".to_owned(), "", total);
    writeln!(out, "{table}")?;
    if !apart.is_empty() {
        writeln!(
            out,
            "{} tensors are none of the base's by name, dtype and shape: they are alone.",
            apart.len()
        )?;
    }
    Ok(())
}

fn print_planes(out: &mut impl Write, figures: &Figures, codecs: &[&str]) -> Result<()> {
    let mut table = new_table(&[&["plane"], codecs].concat(), 1);
    for (index, plane) in figures.planes.iter().enumerate() {
        let ratios = codecs.iter().map(|codec| {
            figures.codecs[codec].plane_ratios[index]
                .map_or_else(|| "∞".to_owned(), |ratio| format!("{ratio:.3}"))
        });
        table.add_row([plane.clone()].into_iter().chain(ratios));
    }
    writeln!(out, "{table}")?;
    Ok(())
}

/// The files' names, each with as many of the directories above it as tell it from the others.
fn told_apart<'p>(paths: impl Iterator<Item = &'p str>) -> BTreeMap<&'p str, String> {
    let paths: BTreeSet<_> = paths.collect();
    let last = |path: &str, parts: usize| {
        let all: Vec<_> = Path::new(path).components().collect();
        all[all.len().saturating_sub(parts)..].iter().collect::<PathBuf>()
    };
    let name = |path: &str| {
        let is_told = |parts: &usize| {
            paths.iter().filter(|other| last(other, *parts) == last(path, *parts)).count() == 1
        };
        // A file that is named twice in different words is told by neither.
        let parts = (1..=Path::new(path).components().count()).find(is_told);
        shown(&parts.map_or_else(|| path.to_owned(), |parts| last(path, parts).display().to_string()))
    };
    paths.iter().map(|path| (*path, name(path))).collect()
}

/// What comes from a file, without what a terminal would obey.
fn shown(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// The best ratios of fp8 and of int4.
fn best_rounded(rounded: Option<&RoundedReport>) -> [String; 2] {
    let best = |figures: &Figures| best(figures.codecs.values().map(|codec| codec.ratio));
    [rounded.and_then(|rounded| best(&rounded.fp8)), rounded.and_then(|rounded| best(&rounded.int4))]
        .map(ratio)
}

fn best(figures: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    figures.flatten().reduce(f64::max)
}

fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.3}"))
}

/// A ratio without a number is one to nothing if there were bytes.
fn ratio_of(bytes: u64, of: Option<f64>) -> String {
    if of.is_none() && bytes > 0 { "∞".to_owned() } else { ratio(of) }
}

fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "–".to_owned(), |part| format!("{:.1} %", 100.0 * part))
}

fn count(count: u64) -> String {
    HumanCount(count).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_name_are_told_by_the_directories_above_them() {
        let told = |paths: &[&str]| told_apart(paths.iter().copied()).into_values().collect::<Vec<_>>();
        assert_eq!(
            told(&["/m/a/model.gguf", "/m/b/model.gguf", "/m/b/model.gguf"]),
            ["a/model.gguf", "b/model.gguf"]
        );
        assert_eq!(told(&["/m/a/one", "/m/a/two"]), ["one", "two"]);
        assert_eq!(told(&["/m/a/x/one", "/n/a/x/one", "/n/two"]), ["m/a/x/one", "n/a/x/one", "two"]);
        assert_eq!(told(&["./one", "one"]), ["./one", "one"]);
        assert_eq!(told(&["a/one", "one"]), ["a/one", "one"]);
        assert_eq!(told(&["a\u{1b}[2J/one", "b/one"]), ["a\\u{1b}[2J/one", "b/one"]);
    }
}
