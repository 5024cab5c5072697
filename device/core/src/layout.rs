//! Layouts: in which order a tensor's elements enter the planes (TRACE III-B, eq. 3 and 8).
//!
//! This is the one place where layouts differ. `weight` blocks enter in address order, one by one.
//! Those of `kv` tensors enter a window at a time, channel by channel where that is worth it: see
//! [`lamina_codec::kv`]. What a layout did on the way to the codec its inverse undoes on the way
//! back, but for a `kv` layout that says it is lossy: full windows of that are coded as in
//! [`lamina_codec::packkv`]. A device in the modes `plain` and `gcomp` has one layout for
//! everything, words in address order.

use serde::{Deserialize, Serialize};

use lamina_codec::{
    BlockWords, Codec, Encoder, block::Bundle, format::Format, kv::KvLayout, packkv::Packing,
};
use lamina_store::mode::Mode;

/// How a tensor's elements are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Spelled", into = "Spelled")]
pub enum Layout {
    /// Address order.
    #[default]
    Weight,
    /// Token-major rows, of which the device groups windows of tokens.
    Kv(KvLayout),
}

/// A layout as it is written: a unit variant would take any field without a word, and a program
/// that knows no lossy windows should not take such a tensor for one whose bytes come back.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
enum Spelled {
    Weight {},
    Kv(KvLayout),
    LossyKv(KvLayout),
}

impl TryFrom<Spelled> for Layout {
    type Error = &'static str;

    fn try_from(read: Spelled) -> Result<Self, Self::Error> {
        match read {
            Spelled::Weight {} => Ok(Self::Weight),
            Spelled::Kv(layout) if layout.lossy.is_none() => Ok(Self::Kv(layout)),
            Spelled::LossyKv(layout) if layout.lossy.is_some() => Ok(Self::Kv(layout)),
            Spelled::Kv(_) => Err("a layout that says how it is lossy is of the kind lossy_kv"),
            Spelled::LossyKv(_) => Err("a layout of the kind lossy_kv says how: \"lossy\": {}"),
        }
    }
}

impl From<Layout> for Spelled {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Weight => Self::Weight {},
            Layout::Kv(layout) if layout.lossy.is_some() => Self::LossyKv(layout),
            Layout::Kv(layout) => Self::Kv(layout),
        }
    }
}

impl Layout {
    /// How it is coded with loss, if somebody asked for that.
    pub const fn lossy(&self) -> Option<Packing> {
        match self {
            Self::Weight => None,
            Self::Kv(layout) => layout.lossy,
        }
    }

    /// What it is called where there is one word for it: `weight`, `kv` or `lossy kv`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Kv(KvLayout { lossy: Some(_), .. }) => "lossy kv",
            Self::Kv(_) => "kv",
        }
    }

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
            Layout::Kv(KvLayout { channels, window, stride, paged, .. }) => Self::Kv {
                channels,
                window,
                stride: stride.unwrap_or(channels),
                groups: paged.map_or(1, |paged| paged.groups),
                paged_tokens: paged.map_or(1, |paged| paged.block),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lossy_layout_is_of_a_kind_that_earlier_programs_refuse() {
        let lossy = Some("packkv:0.1,median,8".parse().unwrap());
        let layout = Layout::Kv(KvLayout { lossy, ..KvLayout::rows(64, 64) });
        let json = serde_json::to_value(layout).unwrap();
        let want = serde_json::json!({
            "kind": "lossy_kv", "channels": 64, "window": 64,
            "lossy": { "scale": 0.1_f32, "repack": "median", "pack": 8 },
        });
        assert_eq!(json, want);
        assert_eq!(serde_json::from_value::<Layout>(json).unwrap(), layout);
        let spelled = r#"{"kind":"lossy_kv","channels":64,"window":64,"lossy":"packkv:0.1,median,8"}"#;
        assert_eq!(serde_json::from_str::<Layout>(spelled).unwrap(), layout);
        for (bad, why) in [
            (r#"{"kind":"kv","channels":64,"lossy":{}}"#, "of the kind lossy_kv"),
            (r#"{"kind":"lossy_kv","channels":64}"#, "says how"),
            (r#"{"kind":"weight","lossy":{}}"#, "unknown field"),
            (r#"{"kind":"lossy_kv","channels":64,"lossy":{"scale":7}}"#, "from 0.01 to 1"),
            (r#"{"kind":"lossy_kv","channels":64,"lossy":"kivi"}"#, "packkv is the one"),
            (r#"{"kind":"lossy_kv","channels":64,"lossy":2}"#, "packkv[:SCALE"),
        ] {
            let said = serde_json::from_str::<Layout>(bad).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }
}
