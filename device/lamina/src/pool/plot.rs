//! Time to first token and hits of a replayed trace, as an SVG file that needs nothing else.

use std::fmt::Write as _;

use lamina_model::float;

use super::replay::Report;

const LEFT: f64 = 330.0;
const WIDE: f64 = 420.0;
const ROW: f64 = 24.0;
const TOP: f64 = 64.0;
/// Of caches, in their order.
const COLOURS: [&str; 4] = ["#9aa5ad", "#6b7780", "#2e6f95", "#2a9d8f"];

/// Draws a report: a bar a row, as long as the mean time, and a mark at the median.
pub(super) fn svg(report: &Report) -> String {
    let rows = &report.modelled;
    let longest = rows.iter().map(|row| row.times.ttft_mean.max(row.times.ttft_p50)).fold(1e-9, f64::max);
    let height = TOP + ROW * float(rows.len() as u64) + 40.0;
    let width = LEFT + WIDE + 200.0;
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="11" fill="#222">
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="16" y="26" font-size="16" font-weight="600">Time to first token (modelled): mean, and a mark at the median</text>
<text x="16" y="44" fill="#555">Behind each row the time that one request in 100 exceeds, and the part of tokens that was hit (measured)</text>
"##
    );
    for (number, row) in rows.iter().enumerate() {
        let y = TOP + ROW * float(number as u64);
        let of =
            report.measured.iter().position(|measured| measured.caches == row.caches).unwrap_or_default();
        let hit = report.measured.get(of).map_or(0.0, |measured| 100.0 * measured.hit_rate);
        let long = |seconds: f64| WIDE * seconds / longest;
        let (mean, median, most) = (row.times.ttft_mean, row.times.ttft_p50, row.times.ttft_p99);
        let _ = writeln!(
            out,
            r##"<text x="{x}" y="{text}" text-anchor="end">{caches}; {memory}</text><rect x="{LEFT}" y="{bar}" width="{mean_wide:.1}" height="14" fill="{colour}"><title>{caches}; {memory}: mean {mean:.2} s, 99 of 100 {most:.2} s, {hit:.1} % hit</title></rect><path d="M{mark:.1} {bar}v14" stroke="#222" stroke-width="2"/><text x="{end:.1}" y="{text}">{mean:.2} s, one in 100 {most:.1} s, {hit:.0} % hit</text>"##,
            x = LEFT - 8.0,
            text = y + 15.0,
            bar = y + 4.0,
            caches = row.caches,
            memory = row.memory,
            mean_wide = long(mean),
            colour = COLOURS[of % COLOURS.len()],
            mark = LEFT + long(median),
            end = LEFT + long(mean.max(median)) + 6.0,
        );
    }
    out.push_str("</svg>\n");
    out
}
