//! A frame.

use indicatif::{BinaryBytes, HumanCount};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table};
use serde_json::Value;

use super::seen::{FormatRow, LatencyRow, LayerRow, Seen, TensorRow};
use super::{Sort, Wanted};
use crate::args::ApiAt;
use crate::table::duration;

/// Columns that the texts beside a bar of planes take.
const BESIDE: u16 = 24;
/// What stands between two of a line.
const BETWEEN: &str = " · ";
/// Lines of events.
const EVENTS: usize = 3;
/// Views and formats that have lines; the page has all.
const MAX_VIEWS: usize = 8;
const MAX_FORMATS: usize = 4;
const MAX_POOLS: usize = 3;

/// Draws what is seen.
pub(super) fn draw(frame: &mut Frame<'_>, seen: &Seen, wanted: &mut Wanted, api: &ApiAt) {
    let lines = |rows: usize| u16::try_from(rows).unwrap_or(u16::MAX);
    let formats = seen.formats.len().min(MAX_FORMATS);
    let views = seen.precisions.iter().filter(|(row, _)| row.moved.reads > 0).count().min(MAX_VIEWS);
    let pools = pool_lines(&seen.stats);
    let layers = if seen.layers.is_empty() { 0 } else { 3 };
    let head = head_lines(seen, api, usize::from(frame.area().width));
    let areas = Layout::vertical([
        Constraint::Length(lines(head.len())),
        Constraint::Length(if formats > 0 { lines(2 * formats) + 1 } else { 0 }),
        Constraint::Length(if views > 0 { lines(views) + 2 } else { 0 }),
        Constraint::Length(layers),
        Constraint::Length(lines(pools.len())),
        Constraint::Min(5),
        Constraint::Length(lines(seen.events.len().min(EVENTS))),
        Constraint::Length(1),
    ]);
    let [top, planes, traffic, kv, pooled, tensors, events, keys] = areas.areas(frame.area());
    frame.render_widget(Paragraph::new(head), top);
    draw_planes(frame, planes, seen);
    draw_views(frame, traffic, seen);
    if layers > 0 {
        draw_layers(frame, kv, seen);
    }
    frame.render_widget(Paragraph::new(pools), pooled);
    draw_tensors(frame, tensors, seen, wanted);
    let last = seen.events.iter().rev().take(EVENTS).rev();
    frame.render_widget(
        Paragraph::new(last.map(|event| Line::from(shown(&event.text))).collect::<Vec<_>>()),
        events,
    );
    let help = if wanted.writing {
        format!("filter: {}▏  Enter keeps it, Esc clears it", wanted.filter)
    } else {
        format!("q ends · / filters · s sorts (by {}) · ↑ ↓ PgUp PgDn Home End", wanted.sort.name())
    };
    frame.render_widget(Paragraph::new(help.dim()), keys);
}

fn head_lines(seen: &Seen, api: &ApiAt, columns: usize) -> Vec<Line<'static>> {
    let bytes = |pointer: &str| BinaryBytes(seen.number(pointer)).to_string();
    // A host may not tell.
    let left = seen.stats.pointer("/device/host_memory_left_bytes").and_then(Value::as_u64);
    let left = left.map_or_else(|| "–".to_owned(), |bytes| BinaryBytes(bytes).to_string());
    let state = match &seen.gone {
        Some((since, why)) => {
            format!("no answer for {} s ({why}); asking again", since.elapsed().as_secs()).red().bold()
        }
        None if seen.stats.is_null() => "connecting…".dim(),
        None => {
            format!("up {} s", seen.stats["device"]["uptime_seconds"].as_f64().unwrap_or(0.0).floor()).into()
        }
    };
    let title = format!("lamina {} {} at {api}  ", seen.text("/device/mode"), seen.text("/device/codec"));
    let (read, fetched) = seen
        .precisions
        .iter()
        .fold((0.0, 0.0), |(read, fetched), (_, [one, other])| (read + one, fetched + other));
    let ratio =
        seen.stats["device"]["ratio"].as_f64().map_or("–".to_owned(), |ratio| format!("{ratio:.3}"));
    let poisoned = seen.number("/requests/poisoned_blocks");
    let refused = seen.number("/write_backs/refused");
    let trouble = format!(
        "{} blocks poisoned, {} write-backs wait for space, {} were refused",
        HumanCount(poisoned),
        HumanCount(seen.number("/write_backs/waiting")),
        HumanCount(refused)
    );
    let mut lines = vec![
        Line::from(vec![title.bold(), state]),
        Line::from(format!(
            "{} written, stored in {} of {}, ratio {ratio}; {left} of the host's memory left",
            bytes("/device/written_bytes"),
            bytes("/device/stored_bytes"),
            bytes("/device/store_capacity_bytes"),
        )),
        Line::from(format!("now {} read, {} fetched", rate(read), rate(fetched))),
    ];
    lines.extend(latency(&seen.latency, columns).into_iter().map(Line::from));
    lines.push(Line::from(if poisoned + refused > 0 { trouble.red() } else { trouble.into() }));
    lines
}

/// A line for each pool, for the first of them.
fn pool_lines(stats: &Value) -> Vec<Line<'static>> {
    let pools = stats["pools"].as_array().map_or(&[][..], Vec::as_slice);
    let line = |pool: &Value| {
        let number = |name: &str| pool[name].as_u64().unwrap_or(0);
        // What nobody counted yet is null.
        let counted =
            |name: &str| pool[name].as_u64().map_or("–".to_owned(), |n| HumanCount(n).to_string());
        let bytes = pool["ready_bytes"].as_u64().map_or("–".to_owned(), |n| BinaryBytes(n).to_string());
        let part = |name: &str| {
            pool[name].as_f64().map_or("–".to_owned(), |part| format!("{:.1} %", 100.0 * part))
        };
        let ratio = pool["ratio"].as_f64().map_or("–".to_owned(), |ratio| format!("{ratio:.3}"));
        Line::from(format!(
            "pool {}: {} nodes, {} blocks, {} objects of {bytes}, ratio {ratio}; hits {}, {} evicted",
            shown(pool["name"].as_str().unwrap_or_default()),
            number("nodes"),
            counted("blocks"),
            counted("objects"),
            part("hit_rate"),
            HumanCount(number("evictions")),
        ))
    };
    pools.iter().take(MAX_POOLS).map(line).collect()
}

/// How long requests take now, or took in all where there are none now: as many lines as that takes
/// in so many columns.
fn latency(rows: &[LatencyRow], columns: usize) -> Vec<String> {
    let time = |seconds: Option<f64>| seconds.map_or("–".to_owned(), duration);
    let rows = rows.iter().filter(|row| row.requests > 0).map(|row| {
        let (p50, p99, when) = match row.now_requests {
            0 => (row.p50_seconds, row.p99_seconds, "in all"),
            _ => (row.now_p50_seconds, row.now_p99_seconds, "now"),
        };
        let request = if row.request == "write" { "stores" } else { "reads" };
        format!("{} {request} p50 {} p99 {} {when}", shown(&row.window), time(p50), time(p99))
    });
    let mut lines: Vec<String> = Vec::new();
    for row in rows {
        match lines.last_mut() {
            Some(line) if line.chars().count() + BETWEEN.chars().count() + row.chars().count() <= columns => {
                line.extend([BETWEEN, &row]);
            }
            _ => lines.push(row),
        }
    }
    if lines.is_empty() {
        lines.push("latency: nothing was asked for yet".to_owned());
    }
    lines
}

/// What is stored of each format by plane, below what it would take as it is.
fn draw_planes(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let most = seen.formats.iter().map(|row| row.logical_bytes).max().unwrap_or(0).max(1);
    let wide = area.width.saturating_sub(BESIDE);
    let mut lines = vec![Line::from("stored by plane, below as it is".dim())];
    for row in seen.formats.iter().take(MAX_FORMATS) {
        let stored: Vec<_> = row.planes.iter().map(|plane| (plane.plane, plane.stored())).collect();
        let as_it_is: Vec<_> = (0..row.bits).rev().map(|plane| (plane, row.plane_bytes)).collect();
        let sum: u64 = stored.iter().map(|(_, bytes)| bytes).sum();
        for (what, parts, all) in [(row.format.as_str(), as_it_is, row.logical_bytes), ("", stored, sum)] {
            let mut spans = vec![Span::from(format!("{what:<10} {:>11} ", BinaryBytes(all).to_string()))];
            spans.extend(bar(row, &parts, most, wide));
            lines.push(Line::from(spans));
        }
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// A bar of planes, with the highest first. Its end is where the sum is, whatever is rounded
/// before.
fn bar(format: &FormatRow, parts: &[(u32, u64)], most: u64, wide: u16) -> Vec<Span<'static>> {
    let column = |bytes: u64| u128::from(bytes) * u128::from(wide) / u128::from(most);
    let (mut sum, mut at) = (0_u64, 0);
    let mut spans = Vec::new();
    for (number, (plane, bytes)) in parts.iter().enumerate() {
        sum = sum.saturating_add(*bytes);
        let end = column(sum);
        let colour = if format.exponent_bits == 0 || *plane < format.mantissa_bits {
            Color::Yellow
        } else if *plane < format.mantissa_bits + format.exponent_bits {
            Color::Blue
        } else {
            Color::Magenta
        };
        let block = if number % 2 == 0 { "█" } else { "▓" };
        let columns = usize::try_from(end - at).unwrap_or(0);
        spans.push(Span::styled(block.repeat(columns), Style::new().fg(colour)));
        at = end;
    }
    spans
}

fn draw_views(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let mut busy: Vec<_> = seen.precisions.iter().filter(|(row, _)| row.moved.reads > 0).collect();
    busy.sort_by(|(_, one), (_, other)| other[0].total_cmp(&one[0]));
    let rows = busy.into_iter().take(MAX_VIEWS).map(|(row, [read, fetched])| {
        Row::new([
            shown(&row.view),
            HumanCount(row.tensors).to_string(),
            HumanCount(row.moved.reads).to_string(),
            rate(*read),
            rate(*fetched),
            BinaryBytes(row.moved.stored).to_string(),
            of_plain(row.moved.stored, row.moved.plain),
        ])
    });
    let wide = [18, 9, 14, 14, 14, 14, 9].map(Constraint::Length);
    let head = Row::new(["view", "tensors", "reads", "read now", "fetched now", "fetched", "of plain"]).dim();
    frame.render_widget(Table::new(rows, wide).header(head), area);
}

fn draw_layers(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let ratios: Vec<_> = layer_ratios(&seen.layers);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    let title = format!(
        "KV ratio, layers {} to {}, at most {most:.2}",
        seen.layers.first().map_or(0, |row| row.layer),
        seen.layers.last().map_or(0, |row| row.layer)
    );
    frame.render_widget(
        Sparkline::default().block(Block::new().title(title.dim())).data(drawn(&ratios)),
        area,
    );
}

/// The ratio of each layer in its place: zero of one of which nothing is stored.
fn layer_ratios(layers: &[LayerRow]) -> Vec<f64> {
    layers.iter().map(|row| ratio(row.length, row.stored_bytes).unwrap_or(0.0)).collect()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small share, drawn")]
fn drawn(ratios: &[f64]) -> Vec<u64> {
    ratios.iter().map(|ratio| (ratio * 100.0) as u64).collect()
}

fn draw_tensors(frame: &mut Frame<'_>, area: Rect, seen: &Seen, wanted: &mut Wanted) {
    let filter = wanted.filter.to_lowercase();
    let now = |row: &TensorRow| seen.hottest.get(&row.name).copied().unwrap_or(0.0);
    let mut rows: Vec<_> =
        seen.tensors.values().filter(|row| row.name.to_lowercase().contains(&filter)).collect();
    rows.sort_by(|one, other| match wanted.sort {
        Sort::Now => now(other).total_cmp(&now(one)).then(other.moved.bytes.cmp(&one.moved.bytes)),
        Sort::Read => other.moved.bytes.cmp(&one.moved.bytes),
        Sort::Stored => other.stored_bytes.cmp(&one.stored_bytes),
        Sort::Ratio => {
            let of = |row: &TensorRow| ratio(row.length, row.stored_bytes).unwrap_or(0.0);
            of(other).total_cmp(&of(one))
        }
        Sort::Name => one.name.cmp(&other.name),
    });
    let space = usize::from(area.height.saturating_sub(2));
    wanted.from = wanted.from.min(rows.len().saturating_sub(space));
    let title =
        format!(" {} of {} tensors ", HumanCount(rows.len() as u64), HumanCount(seen.tensors.len() as u64));
    let right = |text: String| Cell::from(Line::from(text).right_aligned());
    let lines = rows.iter().skip(wanted.from).take(space).map(|row| {
        Row::new([
            Cell::from(shown(&row.name)),
            Cell::from(row.format.clone()),
            right(BinaryBytes(row.length).to_string()),
            right(BinaryBytes(row.stored_bytes).to_string()),
            right(ratio(row.length, row.stored_bytes).map_or("–".into(), |ratio| format!("{ratio:.3}"))),
            right(HumanCount(row.moved.reads).to_string()),
            right(rate(now(row))),
            right(of_plain(row.moved.stored, row.moved.plain)),
        ])
    });
    let wide = [12, 11, 11, 7, 12, 13, 9].map(Constraint::Length);
    let wide = [&[Constraint::Min(16)], &wide[..]].concat();
    let head = ["bytes", "stored", "ratio", "reads", "read now", "of plain"].map(|text| right(text.into()));
    let head = [Cell::from("tensor"), Cell::from("format")].into_iter().chain(head);
    let table = Table::new(lines, wide).header(Row::new(head).dim());
    frame.render_widget(table.block(Block::new().borders(Borders::TOP).title(title)), area);
}

#[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at")]
fn ratio(of: u64, over: u64) -> Option<f64> {
    (over > 0).then(|| of as f64 / over as f64)
}

fn of_plain(stored: u64, plain: Option<u64>) -> String {
    plain
        .and_then(|plain| ratio(stored, plain))
        .map_or("–".into(), |share| format!("{:.1} %", 100.0 * share))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; it saturates")]
fn rate(bytes: f64) -> String {
    if bytes < 1.0 { "–".to_owned() } else { format!("{}/s", BinaryBytes(bytes as u64)) }
}

/// A text of the device, of which a terminal gets no control characters.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bars_are_as_long_as_their_sum_whatever_is_rounded() {
        let format = FormatRow {
            format: "bf16".into(),
            bits: 16,
            exponent_bits: 8,
            mantissa_bits: 7,
            logical_bytes: 1600,
            plane_bytes: 100,
            planes: Vec::new(),
        };
        let parts: Vec<_> = (0..16).rev().map(|plane| (plane, 100)).collect();
        for wide in [0, 1, 7, 16, 100] {
            let spans = bar(&format, &parts, 1600, wide);
            assert_eq!(spans.iter().map(Span::width).sum::<usize>(), usize::from(wide));
        }
        let spans = bar(&format, &parts, 3200, 32);
        let colours: Vec<_> = spans.iter().map(|span| span.style.fg.unwrap()).collect();
        assert_eq!(colours[0], Color::Magenta);
        assert!(colours[1..9].iter().all(|colour| *colour == Color::Blue));
        assert!(colours[9..].iter().all(|colour| *colour == Color::Yellow));
        assert!(bar(&format, &[(15, u64::MAX), (14, u64::MAX)], u64::MAX, 10).len() == 2);
    }

    #[test]
    fn latency_is_that_of_now_or_of_all() {
        let row = |window: &str, request: &str, requests, now_requests| LatencyRow {
            window: window.into(),
            request: request.into(),
            requests,
            p50_seconds: Some(5e-6),
            p99_seconds: Some(4e-5),
            now_requests,
            now_p50_seconds: (now_requests > 0).then_some(2e-3),
            now_p99_seconds: None,
        };
        assert_eq!(latency(&[row("base", "read", 0, 0)], 80), ["latency: nothing was asked for yet"]);
        let rows = [row("base", "read", 9, 1), row("views", "read", 0, 0), row("base", "write", 7, 0)];
        let (one, other) = ("base reads p50 2.00 ms p99 – now", "base stores p50 5.00 µs p99 40.0 µs in all");
        let both = format!("{one} · {other}");
        assert_eq!(latency(&rows, both.chars().count()).join("\n"), both);
        // No number loses its unit at the end of a line.
        assert_eq!(latency(&rows, both.chars().count() - 1), [one, other]);
    }

    #[test]
    fn a_layer_of_which_nothing_is_stored_keeps_its_place() {
        let row = |layer, stored_bytes| LayerRow { layer, length: 300, stored_bytes };
        assert_eq!(layer_ratios(&[row(0, 200), row(1, 0), row(2, 100)]), [1.5, 0.0, 3.0]);
    }

    #[test]
    fn names_bring_no_control_characters() {
        assert_eq!(shown("a\u{1b}[2Jb\n"), "a[2Jb");
    }

    fn texts(stats: &Value) -> Vec<String> {
        pool_lines(stats).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_pool_has_a_line_and_many_have_the_first() {
        let pool = json!({ "name": "files/p\u{1b}", "nodes": 2, "blocks": 1234, "objects": 5, "ready_bytes": 3 << 20,
            "ratio": 1.5, "hit_rate": 0.25, "evictions": 7 });
        let line = "2 nodes, 1,234 blocks, 5 objects of 3.00 MiB, ratio 1.500; hits 25.0 %, 7 evicted";
        let told = texts(&json!({ "pools": [pool] }));
        assert!(
            told.len() == 1 && told[0].starts_with("pool files/p") && told[0].ends_with(line),
            "{told:?}"
        );
        assert!(!told[0].contains('\u{1b}'), "{told:?}");
        // What is not known yet, and what a device without pools tells.
        let none = json!({ "name": "base", "ratio": null, "hit_rate": null });
        let line = "pool base: 0 nodes, – blocks, – objects of –, ratio –; hits –, 0 evicted";
        assert_eq!(texts(&json!({ "pools": vec![none; MAX_POOLS + 1] })), vec![line; MAX_POOLS]);
        assert!(texts(&json!({})).is_empty() && texts(&Value::Null).is_empty());
    }
}
