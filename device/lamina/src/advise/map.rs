//! The file that says which tensor gets which precision, as `--map` reads it.

use std::ops::Range;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use crate::made_file;

/// A tensor, or rows of it, at a precision.
pub(crate) struct Rule<'a> {
    pub(crate) name: &'a str,
    pub(crate) rows: Option<&'a Range<usize>>,
    pub(crate) view: &'a str,
}

#[derive(Serialize)]
struct Map<'a> {
    tensor: Vec<Written<'a>>,
}

#[derive(Serialize)]
struct Written<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<String>,
    view: &'a str,
}

/// Writes it; what no rule names stays full.
pub(crate) fn write<'a>(path: &Path, rules: impl Iterator<Item = Rule<'a>>) -> Result<()> {
    let rows = |rows: &Range<usize>| format!("{}..{}", rows.start, rows.end);
    let written = rules.map(|rule| Written { name: rule.name, rows: rule.rows.map(rows), view: rule.view });
    let text = toml::to_string(&Map { tensor: written.collect() })?;
    made_file::write(path, text.as_bytes())
}
