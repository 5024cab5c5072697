//! The bars of the paper's Fig. 15: a panel for each side, a group of bars for each layer, a bar
//! for each codec, and for generic compression of the words.

use std::fmt::Write as _;

use super::layers::{KvReport, LayerReport};

/// Height of a panel, and what is above it.
const PANEL: (f64, f64) = (170.0, 70.0);
const LEFT: f64 = 58.0;
/// Width of a bar and what is between two layers.
const BAR: f64 = 13.0;
const BETWEEN: f64 = 14.0;
const OWN: [&str; 3] = ["#2e6f95", "#5fa3c7", "#123b52"];
const WORDS: [&str; 2] = ["#c9ced2", "#9aa5ad"];

/// A bar: its colour, its name and its ratio.
type Bar = (&'static str, String, Option<f64>);

fn bars(layer: &LayerReport) -> Vec<Bar> {
    let own = layer.ratios.iter().zip(OWN.into_iter().cycle());
    let own = own.map(|((codec, ratio), colour)| (colour, (*codec).to_owned(), *ratio));
    let words = layer.word_major.iter().zip(WORDS.into_iter().cycle());
    let words = words.map(|((codec, ratio), colour)| (colour, format!("word-major {codec}"), *ratio));
    own.chain(words).collect()
}

/// The sides there are, in order.
fn sides(kv: &KvReport) -> Vec<&'static str> {
    let mut sides: Vec<_> = kv.layers.iter().map(|layer| layer.side).collect();
    sides.sort_unstable();
    sides.dedup();
    sides
}

fn float(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Width and height of the drawing.
pub(super) fn extent(kv: &KvReport) -> (f64, f64) {
    let most = |side: &str| kv.layers.iter().filter(|layer| layer.side == side).count();
    let layers = sides(kv).into_iter().map(most).max().unwrap_or(0);
    let group = kv.layers.first().map_or(0, |layer| bars(layer).len());
    let width = 2.0 * LEFT + float(layers) * (float(group) * BAR + BETWEEN);
    (width.max(640.0), 40.0 + float(sides(kv).len()) * (PANEL.0 + PANEL.1))
}

/// Draws it below `y`.
pub(super) fn draw(out: &mut String, kv: &KvReport, mut y: f64) {
    let Some(first) = kv.layers.first() else { return };
    let mut x = LEFT;
    let _ = writeln!(
        out,
        r#"<text x="{x}" y="{}" font-size="15" font-weight="600">KV caches layer by layer, {}</text>"#,
        y + 14.0,
        kv.layout
    );
    for (colour, name, _) in bars(first) {
        let _ = writeln!(
            out,
            r#"<rect x="{x}" y="{}" width="11" height="11" fill="{colour}"/><text x="{}" y="{}">{name}</text>"#,
            y + 24.0,
            x + 16.0,
            y + 34.0
        );
        x += 40.0 + 6.3 * float(name.len());
    }
    y += 40.0;
    for side in sides(kv) {
        panel(out, kv, side, y + PANEL.1 - 24.0);
        y += PANEL.0 + PANEL.1;
    }
}

/// One side, its upper edge at `y`. The ratios' axis begins at 0.
fn panel(out: &mut String, kv: &KvReport, side: &str, y: f64) {
    let layers: Vec<_> = kv.layers.iter().filter(|layer| layer.side == side).collect();
    let ratios = layers.iter().flat_map(|layer| bars(layer)).filter_map(|(_, _, ratio)| ratio);
    let top = ratios.fold(1.0, f64::max).min(8.0).ceil();
    let _ =
        writeln!(out, r#"<text x="{LEFT}" y="{}" font-size="13" font-weight="600">{side}</text>"#, y - 8.0);
    let width = extent(kv).0 - 2.0 * LEFT;
    let mut tick = 0.0;
    while tick <= top {
        let at = y + PANEL.0 - tick / top * PANEL.0;
        let _ = writeln!(
            out,
            r##"<line x1="{LEFT}" x2="{}" y1="{at:.1}" y2="{at:.1}" stroke="#e3e6e8"/><text x="{}" y="{:.1}" text-anchor="end" fill="#555">{tick}×</text>"##,
            LEFT + width,
            LEFT - 6.0,
            at + 4.0
        );
        tick += if top > 3.0 { 1.0 } else { 0.5 };
    }
    let mut x = LEFT + BETWEEN / 2.0;
    for layer in layers {
        let (bars, bottom) = (bars(layer), y + PANEL.0);
        let name = layer.layer.map_or_else(|| "–".to_owned(), |layer| layer.to_string());
        let middle = x + float(bars.len()) * BAR / 2.0;
        let _ = writeln!(
            out,
            r#"<text x="{middle:.1}" y="{:.1}" text-anchor="middle">{name}</text>"#,
            bottom + 15.0
        );
        for (colour, codec, ratio) in bars {
            let height = ratio.unwrap_or(top).min(top) / top * PANEL.0;
            let value = ratio.map_or_else(|| "∞".to_owned(), |ratio| format!("{ratio:.2}"));
            let exact = ratio.map_or_else(|| "nothing stored".to_owned(), |ratio| format!("{ratio:.4}"));
            let (up, centre) = (bottom - height, x + BAR / 2.0);
            let _ = writeln!(
                out,
                r##"<rect x="{x:.1}" y="{up:.1}" width="{:.1}" height="{height:.1}" fill="{colour}"><title>layer {name} {side}, {codec}: {exact}</title></rect>
<text x="{centre:.1}" y="{:.1}" font-size="7.5" fill="#444" dy="2.6" transform="rotate(-90 {centre:.1} {:.1})">{value}</text>"##,
                BAR * 0.86,
                up - 3.0,
                up - 3.0
            );
            x += BAR;
        }
        x += BETWEEN;
    }
}
