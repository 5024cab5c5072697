//! Faults that tests ask for, in builds with debug assertions; others have nothing of this.
//!
//! The environment variable `LAMINA_FAULT` names a file. While that holds `read` or `write` and a
//! number, the handler of each such request for the byte at that offset of a base window panics.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::LazyLock;

static FILE: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("LAMINA_FAULT").map(PathBuf::from));

/// Panics if a request to do `what` with this range of a base window is to.
pub(super) fn fire(what: &str, range: &Range<u64>) {
    let Some(text) = FILE.as_ref().and_then(|file| fs::read_to_string(file).ok()) else { return };
    let at = text.trim().strip_prefix(what).and_then(|at| at.trim().parse().ok());
    assert!(at.is_none_or(|at| !range.contains(&at)), "a fault that was asked for: {text}");
}
