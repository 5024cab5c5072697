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
pub struct Why {
    /// What became of the block.
    pub cause: Cause,
    /// What was found, for people.
    pub text: Arc<str>,
}

impl Why {
    /// A cause and what was found.
    pub fn new(cause: Cause, text: &str) -> Self {
        Self { cause, text: text.into() }
    }

    /// Of a block that was poisoned before this process began.
    pub fn found() -> Self {
        Self::new(Cause::Found, "it was poisoned when the image was opened")
    }
}
