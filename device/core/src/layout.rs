//! Layouts: in which order a tensor's elements enter the planes (TRACE III-B, eq. 3 and 8).
//!
//! This is the one place where layouts differ. `weight` blocks enter in address order, one by one.
//! Those of `kv` tensors enter a window at a time, channel by channel where that is worth it: see
//! [`lamina_codec::kv`]. What a layout did on the way to the codec its inverse undoes on the way
//! back. A device in the modes `plain` and `gcomp` has one layout for everything, words in address
//! order.

use serde::{Deserialize, Serialize};

use lamina_codec::{BlockWords, Codec, Encoder, block::Bundle, format::Format, kv::KvLayout};
use lamina_store::mode::Mode;

/// How a tensor's elements are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", from = "Strict")]
pub enum Layout {
    /// Address order.
    #[default]
    Weight,
    /// Token-major rows, of which the device groups windows of tokens.
    Kv(KvLayout),
}

/// A layout as it is read: a unit variant would take any field without a word.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
enum Strict {
    Weight {},
    Kv(KvLayout),
}

impl From<Strict> for Layout {
    fn from(read: Strict) -> Self {
        match read {
            Strict::Weight {} => Self::Weight,
            Strict::Kv(layout) => Self::Kv(layout),
        }
    }
}

impl Layout {
    /// Codes one block in address order for a device of this mode: any block but those of a `kv`
    /// tensor in the mode `trace`.
    pub fn encode_block(
        encoder: &mut Encoder,
        mode: Mode,
        format: Format,
        codec: Codec,
        words: &BlockWords,
        bundle: &mut Bundle,
    ) {
        match mode {
            Mode::Plain | Mode::GComp => encoder.words(codec, words, bundle),
            Mode::Trace => encoder.block(format, codec, words, bundle),
        }
    }
}

impl From<Layout> for lamina_abi::Layout {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Weight => Self::Weight,
            Layout::Kv(KvLayout { channels, window, stride, paged }) => Self::Kv {
                channels,
                window,
                stride: stride.unwrap_or(channels),
                groups: paged.map_or(1, |paged| paged.groups),
                paged_tokens: paged.map_or(1, |paged| paged.block),
            },
        }
    }
}
