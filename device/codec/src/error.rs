//! What is wrong with a bundle.

use crate::{Undecodable, signs, tree};

/// Why a bundle does not give its planes back.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BlockError {
    /// A plane's bytes do not match their check.
    #[error("plane {plane} has check {computed:#06x}, stored was {stored:#06x}")]
    PlaneCheck {
        /// The plane.
        plane: usize,
        /// What the bytes give.
        computed: u16,
        /// What was stored.
        stored: u16,
    },
    /// The words do not match their checksum.
    #[error("the block's words have CRC-32C {computed:#010x}, stored was {stored:#010x}")]
    WordsCheck {
        /// What the bytes give.
        computed: u32,
        /// What was stored.
        stored: u32,
    },
    /// The plane tree's stream does not match its checksum.
    #[error("the plane tree has CRC-32C {computed:#010x}, stored was {stored:#010x}")]
    TreeCheck {
        /// What the bytes give.
        computed: u32,
        /// What was stored.
        stored: u32,
    },
    /// The head's bytes do not match their check.
    #[error("the head has check {computed:#06x}, stored was {stored:#06x}")]
    HeadCheck {
        /// What the bytes give.
        computed: u16,
        /// What was stored.
        stored: u16,
    },
    /// A head that matches its check says what no head says.
    #[error("the head's {what} is {value}")]
    Head {
        /// What.
        what: &'static str,
        /// Its value.
        value: usize,
    },
    /// A block of a transformed window that does not fit the others or the window's shape.
    #[error("the block does not fit its window: {what}")]
    Window {
        /// What does not fit.
        what: &'static str,
    },
    /// A stream of signs that matches its check does not decode.
    #[error("the signs do not decode: {0}")]
    Signs(#[from] signs::Malformed),
    /// Bytes that match their check do not decode.
    #[error(transparent)]
    Undecodable(#[from] Undecodable),
    /// A stream that matches its check is no plane tree.
    #[error("the plane tree does not decode: {0}")]
    Tree(#[from] tree::Malformed),
}
