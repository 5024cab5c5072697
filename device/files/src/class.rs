//! What the bytes of a file are, as its attributes say.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use lamina_codec::BLOCK_BYTES;
use lamina_codec::format::Format;
use lamina_codec::kv::{KvLayout, Shape};
use lamina_device::layout::Layout;

use super::error::FileError;
use super::state::Node;

/// The attribute that says the format of elements.
pub(crate) const FORMAT: &[u8] = b"user.lamina.format";
/// The attribute that says the layout of a KV cache.
pub(crate) const KV: &[u8] = b"user.lamina.kv";
/// Most bytes of a unit: rows that do not come out even with windows may be coded less well.
const MAX_UNIT: u64 = 64 << 20;

/// What bytes are: a format, and a layout if they are a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Class {
    format: Format,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    kv: Option<KvLayout>,
}

impl Class {
    /// Bytes of which nothing is known.
    pub(crate) const OPAQUE: Self = Self { format: Format::Opaque, kv: None };

    /// What attributes say. A layout without a format is one of bf16.
    pub(crate) fn new(format: Option<&[u8]>, kv: Option<&[u8]>) -> Result<Self, FileError> {
        let text = |bytes| {
            std::str::from_utf8(bytes)
                .map(str::trim)
                .map_err(|_| FileError::Invalid { what: "a format or a layout is text" })
        };
        let kv = kv.map(|kv| Ok::<_, FileError>(KvLayout::from_str(text(kv)?)?)).transpose()?;
        let format = match format {
            Some(format) => Format::from_str(text(format)?)?,
            None if kv.is_some() => Format::Bf16,
            None => Format::Opaque,
        };
        if let Some(kv) = &kv {
            Shape::new(format, kv)?;
        }
        Ok(Self { format, kv })
    }

    /// What the attributes of an inode say.
    pub(crate) fn of(node: &Node) -> Self {
        let attribute = |name| node.attributes.get(name).map(Vec::as_slice);
        // They were checked when they were set.
        Self::new(attribute(FORMAT), attribute(KV)).unwrap_or(Self::OPAQUE)
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    pub(crate) fn layout(&self) -> Layout {
        self.kv.map_or(Layout::Weight, Layout::Kv)
    }

    /// Bytes that lie together, in the file and on the device: a block, or KV windows up to one
    /// that begins with a row as the first did.
    pub(crate) fn unit(&self) -> u64 {
        let block = BLOCK_BYTES as u64;
        let Some(kv) = &self.kv else { return block };
        let Ok(Some(shape)) = Shape::new(self.format, kv) else { return block };
        let window = shape.blocks() as u64 * block;
        let row = u64::from(kv.stride.unwrap_or(kv.channels)) * u64::from(self.format.bits()) / 8;
        let even = window / gcd(window, row.max(1)) * row.max(1);
        if even <= MAX_UNIT { even } else { window }
    }

    /// How it is written in the name of a tensor.
    pub(crate) fn key(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_say_what_bytes_are() {
        assert_eq!(Class::new(None, None).unwrap(), Class::OPAQUE);
        let bf16 = Class::new(Some(b"bf16"), None).unwrap();
        assert_eq!((bf16.format(), bf16.layout(), bf16.unit()), (Format::Bf16, Layout::Weight, 4096));
        let kv = Class::new(None, Some(b"1024,64")).unwrap();
        assert_eq!((kv.format(), kv.unit()), (Format::Bf16, 1024 * 64 * 2));
        // 100 rows of 96 bytes are less than three blocks; after as many windows as that takes, a
        // row begins.
        let odd = Class::new(Some(b"fp16"), Some(b"48,100")).unwrap();
        assert_eq!((odd.unit() % 96, odd.unit() % (3 * 4096)), (0, 0));
        for class in [Class::OPAQUE, bf16, kv, odd] {
            assert_eq!(serde_json::from_str::<Class>(&class.key()).unwrap(), class);
        }
        for (format, kv) in
            [(Some("bf17"), None), (None, Some("0,5")), (None, Some("x")), (Some("\u{e9}"), None)]
        {
            let refused = Class::new(format.map(str::as_bytes), kv.map(str::as_bytes)).unwrap_err();
            assert_eq!(refused.errno(), libc::EINVAL);
        }
    }
}
