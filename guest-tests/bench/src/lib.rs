//! The project's benchmarks: each prints medians of several rounds, and stands beside its peer
//! measured in the same run.
//!
//! Rounds of the things compared alternate, so that a noisy machine disturbs all of them alike.
//! What is to be read from a table is its ratios.

pub mod attach;
pub mod codec;
mod cpu;
pub mod deaths;
pub mod files;
pub mod model;
pub mod models;
pub mod mount;
pub mod packkv;
pub mod pool;
mod processes;
pub mod publish;
pub mod start;
pub mod store;
pub mod tile;
pub mod vhost;
pub mod warm;

use comfy_table::{CellAlignment, Table, presets::UTF8_HORIZONTAL_ONLY};

/// The middle of some measurements.
///
/// # Panics
/// If there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

/// A table whose first column is text and whose others are numbers.
pub fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_header(head);
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

/// Bytes per second in GB/s.
#[expect(clippy::cast_precision_loss, reason = "a rate to be looked at")]
pub fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}
