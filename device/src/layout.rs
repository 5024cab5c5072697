//! Layouts: in which order a tensor's elements enter the planes (TRACE III-B, eq. 3 and 8).
//!
//! This is the one place where layouts differ. A block passes through [`Layout::encode`] on its way to the codec, and whatever the
//! layout did there its inverse must undo on the way back. `weight` blocks enter in address order. `kv` tensors are
//! described (channels, window) and for now enter in address order too, so both layouts share the identity as inverse.

use serde::{Deserialize, Serialize};

use crate::{
    BlockWords,
    codec::{Codec, block::Bundle},
    format::Format,
    mode::Mode,
};

/// How a tensor's elements are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Layout {
    /// Address order.
    #[default]
    Weight,
    /// Token-major rows of `channels` elements; the device groups `window` tokens (n in eq. 3).
    Kv {
        /// Elements of a token's row.
        channels: u32,
        /// Tokens of a window.
        window: u32,
    },
}

impl Layout {
    /// Codes one block of a tensor of this layout for a device of this mode.
    pub fn encode(self, mode: Mode, format: Format, codec: Codec, words: &BlockWords, bundle: &mut Bundle) {
        match (mode, self) {
            (Mode::Plain | Mode::GComp, _) => bundle.encode_words(codec, words),
            (Mode::Trace, Self::Weight | Self::Kv { .. }) => bundle.encode(format, codec, words),
        }
    }
}

impl From<Layout> for lamina_abi::Layout {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Weight => Self::Weight,
            Layout::Kv { channels, window } => Self::Kv { channels, window },
        }
    }
}
