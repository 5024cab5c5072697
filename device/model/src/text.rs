//! Text that comes from files.

/// A text of a file, which may be anybody's, as a terminal can show it.
pub(crate) fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
