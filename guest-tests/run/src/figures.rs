//! Numbers as the reports' tables have them.

/// A ratio, or a dash where there is none.
pub(crate) fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.3}"))
}

/// A share of the whole, or a dash of nothing.
#[expect(clippy::cast_precision_loss, reason = "a percentage to be looked at")]
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "–".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

/// A line of what comes from a file or a guest, without what a terminal would obey.
pub(crate) fn shown(line: &str) -> String {
    line.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
