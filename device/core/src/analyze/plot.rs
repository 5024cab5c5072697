//! The bars of the paper's Fig. 16 as an SVG file that needs nothing else: a row of panels for each
//! format and for each rounding, a panel for each codec, a bar for each plane. Below them, if KV
//! caches were asked for, those of its Fig. 15 ([`plot_layers`]).
//!
//! The ratios' axis is logarithmic from 1, where a plane is stored as it is. A plane of which
//! nothing is stored has a bar to the top, marked ∞.

use std::fmt::Write as _;

use super::plot_layers;
use super::report::{CodecReport, Figures, Report};

const PANEL: (f64, f64) = (440.0, 190.0);
const GAP: (f64, f64) = (70.0, 92.0);
const MARGIN: (f64, f64) = (58.0, 132.0);
/// Axes end at a power of two between these.
const TOP: (f64, f64) = (4.0, 256.0);

const SIGN: &str = "#d1495b";
const EXPONENT: &str = "#2e6f95";
const MANTISSA: &str = "#9aa5ad";
const LEGEND: [(&str, &str); 3] =
    [(SIGN, "sign"), (EXPONENT, "exponent (value bits of integers)"), (MANTISSA, "mantissa")];

/// What one row of panels shows.
struct Row<'a> {
    title: String,
    figures: &'a Figures,
}

/// Draws the per-plane ratios of all tensors together under `title`; `None` if nothing in the
/// report has planes.
pub fn svg(report: &Report, title: &str) -> Option<String> {
    let rows = rows(report);
    let codecs: Vec<_> = report.total.codecs.keys().copied().collect();
    if rows.is_empty() || codecs.is_empty() {
        return None;
    }
    let layers = report.kv.as_ref().map(|kv| (kv, plot_layers::extent(kv)));
    let (least, below) = layers.map_or((0.0, 0.0), |(_, extent)| extent);
    let width = (2.0 * MARGIN.0 + across(codecs.len(), PANEL.0, GAP.0)).max(least);
    let above = MARGIN.1 + across(rows.len(), PANEL.1, GAP.1) + 60.0;
    let height = above + below;
    let mut out = String::new();
    let _ = writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="11" fill="#222">
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="{x}" y="30" font-size="17" font-weight="600">{title}</text>
<text x="{x}" y="50" fill="#555">Compression ratio of each bit-plane, 4 KiB blocks, index entries not counted; logarithmic; ∞: nothing is stored</text>"##,
        x = MARGIN.0,
        title = escaped(title),
    );
    let mut x = MARGIN.0;
    for (colour, name) in LEGEND {
        let _ = writeln!(
            out,
            r#"<rect x="{x}" y="63" width="11" height="11" fill="{colour}"/><text x="{}" y="73">{name}</text>"#,
            x + 16.0
        );
        x += 40.0 + 6.3 * f64::from(u16::try_from(name.len()).unwrap_or(0));
    }
    let mut y = MARGIN.1;
    for row in &rows {
        let (mut x, top) = (MARGIN.0, axis_top(row.figures));
        for codec in &codecs {
            if let Some(figures) = row.figures.codecs.get(codec) {
                panel(&mut out, (x, y), top, &format!("{} · {codec}", row.title), row.figures, figures);
            }
            x += PANEL.0 + GAP.0;
        }
        y += PANEL.1 + GAP.1;
    }
    if let Some((kv, _)) = layers {
        plot_layers::draw(&mut out, kv, above);
    }
    out.push_str("</svg>\n");
    Some(out)
}

fn rows(report: &Report) -> Vec<Row<'_>> {
    let formats = report
        .total
        .formats
        .iter()
        .map(|format| Row { title: format!("{} as stored", format.name), figures: &format.figures });
    let rounded = report.total.rounded.iter().flat_map(|rounded| {
        [("rounded to fp8_e4m3fn", &rounded.fp8), ("rounded to int4", &rounded.int4)]
            .map(|(title, figures)| Row { title: title.to_owned(), figures })
    });
    formats.chain(rounded).filter(|row| !row.figures.planes.is_empty() && row.figures.elements > 0).collect()
}

/// The extent of `count` things of `size`, `gap` apart.
fn across(count: usize, size: f64, gap: f64) -> f64 {
    let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    count * (size + gap) - gap
}

/// `top` is where the axis ends.
fn panel(
    out: &mut String,
    (x, y): (f64, f64),
    top: f64,
    title: &str,
    figures: &Figures,
    codec: &CodecReport,
) {
    let number = |ratio: Option<f64>| ratio.map_or_else(|| "∞".to_owned(), |ratio| format!("{ratio:.3}×"));
    let limit = figures
        .entropy_limit
        .map_or_else(String::new, |limit| format!("· entropy limit {}", number(Some(limit))));
    let (width, height) = PANEL;
    let rise = |ratio: f64| (ratio.clamp(1.0, top).log2() / top.log2()) * height;
    let _ = writeln!(
        out,
        r##"<text x="{x}" y="{}" font-size="13" font-weight="600">{title}: {} <tspan font-weight="400" fill="#555">{limit}</tspan></text>"##,
        y - 30.0,
        number(codec.ratio)
    );
    let mut tick = 1.0;
    while tick <= top {
        let at = y + height - rise(tick);
        let _ = writeln!(
            out,
            r##"<line x1="{x}" x2="{}" y1="{at:.1}" y2="{at:.1}" stroke="{}"/><text x="{}" y="{:.1}" text-anchor="end" fill="#555">{tick}×</text>"##,
            x + width,
            if tick > 1.0 { "#e3e6e8" } else { "#888" },
            x - 6.0,
            at + 4.0
        );
        tick *= 2.0;
    }
    let slot = width / f64::from(u32::try_from(codec.plane_ratios.len()).unwrap_or(1).max(1));
    let mut left = x;
    for (name, ratio) in figures.planes.iter().zip(&codec.plane_ratios) {
        bar(out, name, *ratio, (left, slot), (y, rise(ratio.unwrap_or(top)).max(2.0)));
        left += slot;
    }
}

/// One bar with its value above and its plane's name below. `slot` is its left edge and width, `up`
/// the panel's upper edge and the bar's height.
fn bar(out: &mut String, name: &str, ratio: Option<f64>, slot: (f64, f64), up: (f64, f64)) {
    let colour = match name.as_bytes().first() {
        Some(b's') => SIGN,
        Some(b'm') => MANTISSA,
        _ => EXPONENT,
    };
    let (bottom, middle) = (up.0 + PANEL.1, slot.0 + slot.1 / 2.0);
    let value = match ratio {
        None => "∞".to_owned(),
        Some(ratio) if ratio >= 999.5 => format!("{:.0}k", (ratio / 1000.0).max(1.0)),
        Some(ratio) if ratio >= 99.95 => format!("{ratio:.0}"),
        Some(ratio) if ratio >= 9.995 => format!("{ratio:.1}"),
        Some(ratio) => format!("{ratio:.2}"),
    };
    let exact = ratio.map_or_else(|| "nothing stored".to_owned(), |ratio| format!("{ratio:.4}"));
    let _ = writeln!(
        out,
        r#"<rect x="{:.1}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{colour}"><title>{name}: {exact}</title></rect>"#,
        slot.0 + slot.1 * 0.12,
        bottom - up.1,
        slot.1 * 0.76,
        up.1
    );
    // Narrow bars have their texts upright.
    let narrow = slot.1 < 20.0;
    let size = if narrow { 7.5 } else { 9.5 };
    let mut label = |at: f64, anchor: &str, size: f64, text: &str| {
        let turn = if narrow {
            format!(r#" dy="2.6" transform="rotate(-90 {middle:.1} {at:.1})""#)
        } else {
            String::new()
        };
        let anchor = if narrow { anchor } else { "middle" };
        let _ = writeln!(
            out,
            r##"<text x="{middle:.1}" y="{at:.1}" font-size="{size}" fill="#444" text-anchor="{anchor}"{turn}>{text}</text>"##
        );
    };
    label(bottom - up.1 - 4.0, "start", size, &value);
    label(bottom + if narrow { 5.0 } else { 15.0 }, "end", size + 1.0, name);
}

/// The power of two that no finite bar of any codec passes, within [`TOP`].
fn axis_top(figures: &Figures) -> f64 {
    let ratios = figures.codecs.values().flat_map(|codec| codec.plane_ratios.iter().flatten().copied());
    ratios.fold(TOP.0, f64::max).log2().ceil().exp2().min(TOP.1)
}

/// Text for XML, without the characters that XML cannot have.
fn escaped(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .map(|c| match c {
            '&' => "&amp;".to_owned(),
            '<' => "&lt;".to_owned(),
            '>' => "&gt;".to_owned(),
            c => c.to_string(),
        })
        .collect()
}
