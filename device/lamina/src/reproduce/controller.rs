//! Table V, Figs. 22 and 23, and Figs. 11 and 12 and Table V of CXL-NDP: the controller.

use anyhow::Result;
use lamina_model::controller::{Design, GHZ, Stored, TABLE_V};
use lamina_model::dram::{Access, Dram, Place, Profile};

use super::book::{How, Paper, Row, Section};
use super::chart::{Across, Chart, Kind, Look, Series};
use super::found::{Found, best};

const DESIGNS: [Design; 3] = [Design::Plain, Design::Gcomp, Design::Trace];
const STAGES: &str = "Modelled: the stages are the paper's, and what its totals have beside them is \
    one lump, so the totals agree by construction. What is ours is what follows of them for other \
    ratios, and for entries that the index cache does not hold.";

fn cycles(number: u64) -> f64 {
    u32::try_from(number).map_or(f64::MAX, f64::from)
}

/// TRACE, Table V: parts of the area, of plain, gcomp and trace.
const AREA: [(&str, [Option<f64>; 3]); 7] = [
    ("PHY", [Some(3.50), Some(3.50), Some(3.50)]),
    ("codec", [None, Some(1.92), Some(1.92)]),
    ("codec SRAM", [None, Some(0.62), Some(0.62)]),
    ("metadata", [Some(0.21), Some(0.42), Some(0.83)]),
    ("scheduler", [Some(0.02), Some(0.02), Some(0.03)]),
    ("transpose", [None, None, Some(0.06)]),
    ("other", [Some(0.18), Some(0.18), Some(0.18)]),
];

/// Table V.
pub(super) fn table_v(_: &Found) -> Section {
    let source = "Area and power are the paper's (ASAP7, 7 nm, 2 GHz, 0.7 V), and not obtainable \
        here: that takes its RTL and a synthesis. Cycles are of its stages, and agree by construction.";
    let mut section = Section::new(Paper::Trace, "Table V", "What the hardware costs", source);
    for of in TABLE_V {
        let name = of.design.name();
        section.rows.extend([
            Row::quoted(format!("{name}: area"), "mm²", 2, of.area_mm2),
            Row::quoted(format!("{name}: power"), "W", 1, of.power_w),
            Row::new(format!("{name}: load to use"), "cycles", 0, Some(cycles(of.cycles)))
                .ours(How::Fitted, Some(cycles(of.design.cycles(Stored::Coded(1.5), true)))),
        ]);
    }
    for (part, areas) in AREA {
        for (of, area) in TABLE_V.iter().zip(areas) {
            section.rows.extend(
                area.map(|area| Row::quoted(format!("{}: {part}", of.design.name()), "mm²", 2, area)),
            );
        }
    }
    let series =
        (1..).zip(AREA).map(|(colour, (part, areas))| Series::named(part, colour, Look::Solid, areas));
    section.chart(Chart {
        title: "Area, quoted".to_owned(),
        kind: Kind::Stacked,
        right: "design",
        across: Across::Names(DESIGNS.map(|design| design.name().to_owned()).to_vec()),
        up: "mm²",
        log: false,
        series: series.collect(),
    })
}

/// TRACE, Fig. 22 and its text: cycles of stages, by design.
const PRINTED: [(&str, &[(&str, f64)]); 3] = [
    ("plain", &[("front end", 3.0), ("index", 2.0), ("scheduler", 8.0), ("DRAM window", 58.0)]),
    ("gcomp", &[("above plain, not divided", 13.0)]),
    ("trace", &[("front end", 5.0), ("index", 2.0), ("scheduler", 10.0)]),
];

/// Fig. 22.
pub(super) fn fig_22(_: &Found) -> Section {
    let mut section = Section::new(Paper::Trace, "Fig. 22", "The stages of a load", STAGES);
    let mut stages: [Vec<Option<f64>>; 5] = Default::default();
    for quoted in TABLE_V {
        let (design, of) = (quoted.design, quoted.design.stages());
        let whole = design.cycles(Stored::Coded(1.5), true);
        let exposed = whole - of.front - of.index - of.schedule - of.window;
        let lengths = [of.front, of.index, of.schedule, of.window, exposed];
        stages.iter_mut().zip(lengths).for_each(|(stage, length)| stage.push(Some(cycles(length))));
        let name = design.name();
        section.rows.extend([
            // Table V's.
            Row::new(format!("{name}: load to use"), "cycles", 0, Some(cycles(quoted.cycles)))
                .ours(How::Fitted, Some(cycles(whole)))
                .again(),
            Row::new(format!("{name}: load to use"), "ns", 1, Some(cycles(quoted.cycles) / GHZ))
                .ours(How::Fitted, Some(cycles(whole) / GHZ))
                .again(),
            Row::new(format!("{name}: entry not in the index cache"), "cycles", 0, None)
                .ours(How::Modelled, Some(cycles(design.cycles(Stored::Coded(1.5), false)))),
        ]);
    }
    for (name, printed) in PRINTED {
        let part = |(part, of)| Row::quoted(format!("{name}: {part}"), "cycles", 0, of);
        section.rows.extend(printed.iter().copied().map(part));
    }
    let names =
        ["front end", "index", "scheduler", "DRAM window", "codec and bookkeeping (the rest of the total)"];
    let series = (1..)
        .zip(names)
        .zip(stages)
        .map(|((colour, name), values)| Series::named(name, colour, Look::Solid, values));
    section.chart(Chart {
        title: "Cycles from load to use, entry in the cache, ratio 1.5".to_owned(),
        kind: Kind::Stacked,
        right: "design",
        across: Across::Names(DESIGNS.map(|design| design.name().to_owned()).to_vec()),
        up: "cycles at 2 GHz",
        log: false,
        series: series.collect(),
    })
    .note(
        "gcomp's 13 cycles above plain are of finding blocks and of codec bookkeeping, and the paper does \
            not divide them; decompression, it says, is hidden.",
    )
    .note(
        "The paper's stages of trace are 5 + 2 + 10 + 58, with gcomp's 13 they are 88, and its total is 89: \
            its reasons for 5 cycles above gcomp come to 4. The one that is left is with the 13 here.",
    )
}

/// Fig. 23.
pub(super) fn fig_23(found: &Found) -> Section {
    let mut section = Section::new(Paper::Trace, "Fig. 23", "Cycles of a load against the ratio", STAGES);
    let at = |stored: Stored| cycles(Design::Trace.cycles(stored, true));
    for (what, stored, paper) in [
        ("ratio 1.5", Stored::Coded(1.5), Some(89.0)),
        ("ratio 3", Stored::Coded(3.0), Some(85.0)),
        ("bypassed block", Stored::Bypass, Some(76.0)),
        ("block of zeros, which needs its entry only", Stored::Nothing, None),
    ] {
        let how = if paper.is_some() { How::Fitted } else { How::Modelled };
        let row = Row::new(what, "cycles", 0, paper).ours(how, Some(at(stored)));
        // Table V has the cycles at a ratio of 1.5.
        section.rows.push(if what == "ratio 1.5" { row.again() } else { row });
    }
    let mut here = Vec::new();
    let reports = [found.weights.as_ref().map(|of| &of.report), found.caches.as_ref().map(|of| &of.report)];
    for (what, report) in ["weights", "KV"].into_iter().zip(reports) {
        let codecs = report.into_iter().flat_map(|report| report.total.codecs.values());
        if let Some(ratio) = best(codecs.map(|codec| codec.ratio)) {
            let row = Row::new(format!("the {what} at hand, ratio {ratio:.2}"), "cycles", 0, None);
            section.rows.push(row.ours(How::Modelled, Some(at(Stored::Coded(ratio)))));
            here.push([ratio, at(Stored::Coded(ratio))]);
        }
    }
    let ratios = (4..=16).map(|quarter| f64::from(quarter) / 4.0);
    let ticks = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0];
    section
        .chart(Chart {
            title: "trace: cycles from load to use".to_owned(),
            kind: Kind::Lines,
            right: "ratio",
            across: Across::Numbers {
                log: false,
                ticks: ticks.map(|ratio| (ratio, format!("{ratio}"))).to_vec(),
            },
            up: "cycles at 2 GHz",
            log: false,
            series: vec![
                Series::new(
                    "modelled",
                    2,
                    Look::Solid,
                    ratios.map(|ratio| [ratio, at(Stored::Coded(ratio))]),
                ),
                Series::new("printed in the paper", 1, Look::Marks, [[1.5, 89.0], [3.0, 85.0]]),
                Series::new("the files at hand", 4, Look::Marks, here),
            ],
        })
        .note(
            "The paper has two points. Between and beyond them cycles are taken to be linear in one \
                over the ratio.",
        )
}

/// Nanoseconds in which a module moves these lines.
fn moved(profile: &Profile, write: bool, places: impl Iterator<Item = Place>) -> Result<f64> {
    let mut dram = Dram::new(profile, 64)?;
    let mut done = Vec::new();
    for place in places {
        dram.push(&Access { at: 0, place, write, tag: 0 });
        dram.take_done(&mut done);
        done.clear();
    }
    Ok(profile.ns(dram.finish()?.cycles))
}

fn with_channels(profile: &Profile, channels: u32) -> Profile {
    let mut profile = profile.clone();
    profile.geometry.channels = channels;
    profile
}

/// The same of rows of so many lines that are read, with so many channels.
fn rows_read(profile: &Profile, channels: u32, rows: &[u64]) -> Result<f64> {
    let profile = with_channels(profile, channels);
    let columns = u64::from(profile.geometry.columns);
    let mut next = 0;
    let starts = rows.iter().map(|lines| {
        let start = next;
        next += lines.next_multiple_of(columns);
        (start, *lines)
    });
    let starts: Vec<_> = starts.collect();
    // A line of each row in turn: the rows lie in different banks, and channels.
    let lines = 0..rows.iter().copied().max().unwrap_or(0);
    let of_rows = lines.flat_map(|line| {
        let rows = starts.iter().filter(move |(_, lines)| line < *lines);
        rows.map(move |(start, _)| start + line)
    });
    moved(&profile, false, of_rows.map(|line| profile.geometry.by_row(line)))
}

/// The same of lines that follow each other, over all bank groups, and are written.
fn lines_written(profile: &Profile, channels: u32, lines: u64) -> Result<f64> {
    let profile = with_channels(profile, channels);
    moved(&profile, true, (0..lines).map(|line| profile.geometry.by_line(line)))
}

/// Lines that `bytes` take at a ratio.
fn lines(bytes: f64, ratio: f64) -> u64 {
    // At most a few thousand.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
    let lines = (bytes / ratio.max(0.5) / 64.0).ceil() as u64;
    lines
}

/// CXL-NDP, Fig. 11: bits, and totals of lz4 and zstd.
const READS: [(usize, [f64; 2]); 2] = [(5, [398.0, 373.0]), (10, [718.0, 673.0])];
/// The same: the shortest burst and the longest.
const BURSTS: [f64; 2] = [295.0, 640.0];
const CODECS: [&str; 2] = ["lz4", "zstd"];

/// CXL-NDP's Fig. 11.
pub(super) fn ndp_fig_11(found: &Found) -> Result<Section> {
    let profile = &found.profile;
    let source = format!(
        "Modelled: the planes of 8192 bf16 weights, each in a row of its own, read by the DRAM \
            model ({}). Nothing else is in it.",
        profile.name
    );
    let mut section = Section::new(Paper::Ndp, "Fig. 11", "Reading 16 KB of weights", source);
    let figures = found.weights.as_ref().and_then(|weights| weights.report.total.formats.first());
    for ((bits, totals), burst) in READS.into_iter().zip(BURSTS) {
        let raw = vec![lines(1024.0, 1.0); bits];
        for (channels, paper) in [(1, Some(burst)), (profile.geometry.channels, None)] {
            let of = if channels == 1 { "one channel".to_owned() } else { format!("{channels} channels") };
            let what = format!("{bits} bits: DRAM burst, planes as they are, {of}");
            let row = Row::new(what, "ns", 0, paper);
            section.rows.push(row.ours(How::Modelled, Some(rows_read(profile, channels, &raw)?)));
        }
        for (codec, total) in CODECS.into_iter().zip(totals) {
            if let Some(coded) = figures.and_then(|format| format.figures.codecs.get(codec)) {
                let planes = coded.plane_ratios.iter().take(bits);
                let rows: Vec<_> =
                    planes.map(|ratio| ratio.map_or(0, |ratio| lines(1024.0, ratio))).collect();
                let what =
                    format!("{bits} bits: DRAM burst, planes coded by {codec} as those at hand, one channel");
                let row = Row::new(what, "ns", 0, None);
                section.rows.push(row.ours(How::Modelled, Some(rows_read(profile, 1, &rows)?)));
            }
            section.rows.push(Row::new(format!("{bits} bits, {codec}: total"), "ns", 0, Some(total)));
        }
    }
    let codec = [("lz4: decompression", 4.0), ("zstd: decompression", 7.5), ("reassembly", 5.0)];
    Ok(section
        .rows(codec.map(|(what, ns)| Row::quoted(what, "ns", 1, ns)))
        .note(
            "The paper says that bursts span 295 to 640 ns; these are taken to be those of 5 and of 10 bits. \
                Of ours, one channel and planes that are not coded come nearest.",
        )
        .note(
            "The totals are not obtainable. The paper calls them bound by the burst, with codec and \
                reassembly hidden, and does not say what fills the rest; hiding is not modelled here. Its \
                zstd is 6 % faster than its lz4, which planes as they are cannot show: that takes coded ones.",
        ))
}

/// CXL-NDP, Fig. 12: codec, total of a window, and the write in it.
const WRITES: [(&str, f64, f64); 2] = [("lz4", 5095.0, 5733.0), ("zstd", 4976.0, 5523.0)];

/// CXL-NDP's Fig. 12.
pub(super) fn ndp_fig_12(found: &Found) -> Result<Section> {
    /// K and V of 32 tokens in a layer of Llama 3.1 8B, bf16.
    const BYTES: f64 = 32.0 * 2048.0 * 2.0;
    let profile = &found.profile;
    let source = "Modelled: K and V of 32 tokens in one layer of Llama 3.1 8B, 128 KiB, written \
        by one channel of the DRAM model. The paper does not say which bytes its window has; this \
        is one reading, at the ratio of the cache at hand, or as they are.";
    let mut section = Section::new(Paper::Ndp, "Fig. 12", "Writing a window of KV", source);
    for (codec, total, write) in WRITES {
        let ratio = found.caches.as_ref().and_then(|caches| caches.report.total.codecs.get(codec)?.ratio);
        let ns = lines_written(profile, 1, lines(BYTES, ratio.unwrap_or(1.0)))?;
        let what = ratio.map_or_else(|| "as it is".to_owned(), |ratio| format!("at {ratio:.2}"));
        section.rows.extend([
            Row::new(format!("{codec}: DRAM write, {what}"), "ns", 0, Some(write))
                .ours(How::Modelled, Some(ns)),
            Row::quoted(format!("{codec}: the whole pipeline"), "ns", 0, total),
        ]);
    }
    let quoted = [
        ("lz4: the whole pipeline, a token", 1, 159.2),
        ("zstd: the whole pipeline, a token", 1, 155.5),
        ("transpose", 0, 1024.0),
        ("delta", 0, 51.0),
        ("compression, least", 0, 32.0),
        ("compression, most", 0, 60.0),
    ];
    Ok(section
        .rows(quoted.map(|(what, places, ns)| Row::quoted(what, "ns", places, ns)))
        .note("The paper's totals are less than the write that is a part of them. It does not say how."))
}

/// CXL-NDP, Table V: codec, bits of a block, mm² and mW of a lane, the same of 32 lanes.
const SILICON: [(&str, u32, [f64; 4]); 6] = [
    ("lz4", 16384, [0.05669, 696.515, 1.81413, 2228.846]),
    ("lz4", 32768, [0.07557, 885.258, 2.41811, 2832.826]),
    ("lz4", 65536, [0.15106, 1640.233, 4.83403, 5248.745]),
    ("zstd", 16384, [0.08357, 1363.715, 2.67429, 4363.886]),
    ("zstd", 32768, [0.10245, 1552.458, 3.27827, 4967.866]),
    ("zstd", 65536, [0.17794, 2307.433, 5.69419, 7384.785]),
];

/// CXL-NDP's Table V.
pub(super) fn ndp_table_v(_: &Found) -> Section {
    let source = "The paper's, and not obtainable here: 32 lanes at 2 GHz and 7 nm, of 512 Gb/s each.";
    let section = Section::new(Paper::Ndp, "Table V", "What the codecs cost in silicon", source);
    let columns = [
        ("area of a lane", "mm²", 5),
        ("power of a lane", "mW", 3),
        ("area of 32 lanes", "mm²", 5),
        ("power of 32 lanes", "mW", 3),
    ];
    section
        .rows(SILICON.into_iter().flat_map(|(codec, bits, numbers)| {
            columns.into_iter().zip(numbers).map(move |((what, unit, places), number)| {
                Row::quoted(format!("{codec}, blocks of {bits} bits: {what}"), unit, places, number)
            })
        }))
        .rows([Row::quoted("each: throughput of a lane", "Gb/s", 0, 512.0)])
        .note("32 times the power of a lane is about ten times that of 32 lanes. The paper does not say why.")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: a line is 64 bytes at 19.2 GB/s, and rows of one channel follow each other.
    #[test]
    fn a_channel_moves_lines_no_faster_than_its_pins() {
        let profile = Profile::named("ddr5-4800").unwrap();
        let one = rows_read(&profile, 1, &[128; 8]).unwrap();
        assert!(one > 1024.0 * 64.0 / 19.2 && one < 1.4 * 1024.0 * 64.0 / 19.2, "{one}");
        assert!(rows_read(&profile, 4, &[128; 8]).unwrap() < 0.5 * one);
        assert!(rows_read(&profile, 1, &[0, 1]).unwrap() < 200.0);
        let written = lines_written(&profile, 1, 1024).unwrap();
        assert!(written > 1024.0 * 64.0 / 19.2 && written < 1.4 * 1024.0 * 64.0 / 19.2, "{written}");
        assert_eq!((lines(1024.0, 1.0), lines(1024.0, 3.0), lines(1.0, 1e9)), (16, 6, 1));
    }
}
