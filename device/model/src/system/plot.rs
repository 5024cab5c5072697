//! Tokens a second against context, as an SVG file that needs nothing else and as text.

use std::fmt::Write as _;

use super::{Accounting, Report};
use crate::number::float;

const AREA: (f64, f64) = (680.0, 320.0);
const MARGIN: (f64, f64) = (64.0, 84.0);
/// Of the designs, in their order.
const COLOURS: [&str; 3] = ["#9aa5ad", "#d1495b", "#2e6f95"];

/// The name of an accounting, as reports say it.
fn name(accounting: Accounting) -> &'static str {
    match accounting {
        Accounting::AsPrinted => "as printed",
        Accounting::DeviceOnly => "device side only",
    }
}

/// The highest rate that is shown.
fn top(report: &Report) -> f64 {
    let rates = report.designs.iter().flat_map(|design| &design.points);
    let rates = rates.filter_map(|point| point.tokens_per_second);
    rates.fold(0.0, f64::max).max(1e-3) * 1.1
}

/// Where a context lies between the first and the last, by its logarithm.
fn across(report: &Report, context: u64) -> f64 {
    let contexts = || report.designs.iter().flat_map(|design| &design.points).map(|point| point.context);
    let first = float(contexts().min().unwrap_or(1)).ln();
    let last = float(contexts().max().unwrap_or(2)).ln();
    if last > first { (float(context).ln() - first) / (last - first) } else { 0.5 }
}

fn tokens(context: u64) -> String {
    if context >= 1024 && context.is_multiple_of(1024) {
        format!("{}k", context / 1024)
    } else {
        context.to_string()
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Draws a report. A rate that nothing bounds is at the top.
pub fn svg(report: &Report) -> String {
    let (width, height) = (AREA.0 + 2.0 * MARGIN.0, AREA.1 + MARGIN.1 + 56.0);
    let top = top(report);
    let x = |context| MARGIN.0 + AREA.0 * across(report, context);
    let y = |rate: f64| MARGIN.1 + AREA.1 * (1.0 - rate.min(top) / top);
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="11" fill="#222">
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="{left}" y="28" font-size="17" font-weight="600">{title}: tokens/s against context</text>
<text x="{left}" y="46" fill="#555">Modelled, {accounting}; {source}</text>
"##,
        left = MARGIN.0,
        title = escaped(&report.shape.name),
        accounting = name(report.accounting),
        source = escaped(report.source),
    );
    for step in 0..=4 {
        let rate = top * f64::from(step) / 4.0;
        let _ = writeln!(
            out,
            r##"<line x1="{}" x2="{}" y1="{y}" y2="{y}" stroke="#ddd"/><text x="{}" y="{}" text-anchor="end">{rate:.1}</text>"##,
            MARGIN.0,
            MARGIN.0 + AREA.0,
            MARGIN.0 - 6.0,
            y(rate) + 4.0,
            y = y(rate),
        );
    }
    for point in report.designs.first().map(|design| &design.points[..]).unwrap_or_default() {
        let _ = writeln!(
            out,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            x(point.context),
            MARGIN.1 + AREA.1 + 18.0,
            tokens(point.context)
        );
    }
    let mut legend = MARGIN.0;
    for (design, colour) in report.designs.iter().zip(COLOURS) {
        let points: Vec<_> = design
            .points
            .iter()
            .map(|point| format!("{:.1},{:.1}", x(point.context), y(point.tokens_per_second.unwrap_or(top))))
            .collect();
        let _ = writeln!(
            out,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>
<rect x="{legend}" y="58" width="11" height="11" fill="{colour}"/><text x="{}" y="68">{} (KV {:.2}, weights {:.2})</text>"#,
            points.join(" "),
            legend + 16.0,
            design.ratios.design,
            design.ratios.kv,
            design.ratios.weights,
        );
        legend += 200.0;
    }
    out.push_str("</svg>\n");
    out
}

/// Rows and columns of the drawing as text.
const TEXT: (usize, usize) = (16, 64);

/// Draws a report as text: the designs are `p`, `g` and `t`; where they meet the last is seen.
pub fn terminal(report: &Report) -> String {
    let (rows, columns) = TEXT;
    let top = top(report);
    let mut cells = vec![vec![' '; columns]; rows];
    // The nearest column or row of a part from 0 to 1.
    let nearest = |part: f64, count: usize| {
        (0..count).min_by(|a, b| {
            let off = |at: usize| (float(at as u64) / float(count as u64 - 1) - part).abs();
            off(*a).total_cmp(&off(*b))
        })
    };
    for design in &report.designs {
        let mark = design.ratios.design.chars().next().unwrap_or('?');
        for point in &design.points {
            let height = point.tokens_per_second.map_or(1.0, |rate| rate.min(top) / top);
            let at = (nearest(1.0 - height, rows), nearest(across(report, point.context), columns));
            if let (Some(row), Some(column)) = at {
                cells[row][column] = mark;
            }
        }
    }
    let mut out = format!("tokens/s against context, modelled {}\n", name(report.accounting));
    for (row, cells) in cells.iter().enumerate() {
        let rate = top * (1.0 - float(row as u64) / float(rows as u64 - 1));
        let _ = writeln!(out, "{rate:8.2} |{}", cells.iter().collect::<String>().trim_end());
    }
    let contexts = report.designs.first().map(|design| &design.points[..]).unwrap_or_default();
    let ends = [contexts.first(), contexts.last()].map(|point| point.map(|point| tokens(point.context)));
    let [first, last] = ends.map(Option::unwrap_or_default);
    let _ = writeln!(out, "         +{}", "-".repeat(columns));
    let _ = writeln!(out, "          {first}{last:>width$}", width = columns - first.len());
    out
}
