//! Why blocks are poisoned.

use std::sync::Arc;

use serde::Serialize;

/// Why a block is poisoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Stored bytes that it needs did not check.
    Damaged,
    /// Somebody asked for it.
    Injected,
    /// It was poisoned when the image was opened.
    Found,
}

/// The same, and what was found.
#[derive(Clone, Debug)]
pub(crate) struct Why {
    pub(crate) cause: Cause,
    pub(crate) text: Arc<str>,
}

impl Why {
    pub(crate) fn new(cause: Cause, text: &str) -> Self {
        Self { cause, text: text.into() }
    }

    pub(crate) fn found() -> Self {
        Self::new(Cause::Found, "it was poisoned when the image was opened")
    }
}
