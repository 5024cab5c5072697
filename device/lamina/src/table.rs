//! Tables that commands print, and what stands in them.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use indicatif::{BinaryBytes, HumanCount};
use serde_json::Value;

/// A table of which the first columns are text and the others numbers.
pub(crate) fn new_table(head: &[&str], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(head);
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(crate) fn size(value: &Value) -> String {
    value.as_u64().map_or_else(|| "–".to_owned(), |bytes| BinaryBytes(bytes).to_string())
}

pub(crate) fn count(value: &Value) -> String {
    value.as_u64().map_or_else(|| "–".to_owned(), |count| HumanCount(count).to_string())
}

pub(crate) fn address(value: &Value) -> String {
    value.as_u64().map_or_else(|| "–".to_owned(), |address| format!("{address:#x}"))
}

/// Seconds, with the unit that fits.
pub(crate) fn duration(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 1e-6 => (s * 1e9, "ns"),
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = [10.0, 100.0, f64::INFINITY].iter().position(|bound| number < *bound).unwrap_or(2);
    format!("{number:.*} {unit}", 2 - digits)
}

pub(crate) fn ratio(value: &Value) -> String {
    value.as_f64().map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.3}"))
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_three_digits_and_a_unit() {
        for (seconds, text) in [
            (0.0, "0.00 ns"),
            (2.56e-7, "256 ns"),
            (1.28e-6, "1.28 µs"),
            (4.096e-5, "41.0 µs"),
            (3.2e-2, "32.0 ms"),
            (17.0, "17.0 s"),
            (1234.5, "1234 s"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
