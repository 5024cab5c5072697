//! What the bytes of a file are, as its attributes say.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use lamina_codec::BLOCK_BYTES;
use lamina_codec::format::Format;
use lamina_codec::kv::{KvLayout, Shape};
use lamina_codec::packkv::Packing;
use lamina_device::layout::Layout;

use super::error::FileError;

/// The attribute that says the format of elements.
pub(crate) const FORMAT: &[u8] = b"user.lamina.format";
/// The attribute that says the layout of a KV cache.
pub(crate) const KV: &[u8] = b"user.lamina.kv";
/// The attribute that says how a KV cache is coded with loss.
pub(crate) const LOSSY: &[u8] = b"user.lamina.lossy";
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

    /// What attributes say, of which `attribute` knows the values. A layout without a format is one
    /// of bf16; bytes without a layout may be weights, and are not coded with loss.
    pub(crate) fn new<'a>(attribute: impl Fn(&[u8]) -> Option<&'a [u8]>) -> Result<Self, FileError> {
        let [format, kv, lossy] = [FORMAT, KV, LOSSY].map(attribute);
        let text = |bytes| {
            std::str::from_utf8(bytes)
                .map(str::trim)
                .map_err(|_| FileError::Invalid { what: "a format or a layout is text" })
        };
        let mut kv = kv.map(|kv| Ok::<_, FileError>(KvLayout::from_str(text(kv)?)?)).transpose()?;
        if let Some(lossy) = lossy {
            let what = "user.lamina.lossy is for KV caches: set user.lamina.kv first";
            let kv = kv.as_mut().ok_or(FileError::Invalid { what })?;
            kv.lossy = Some(Packing::from_str(text(lossy)?)?);
        }
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

    /// A format, and behind it a layout, as a part of a file is said to be: `bf16 1024,128`. What
    /// is kept with loss is a whole file.
    pub(crate) fn of_text(text: &str) -> Result<Self, FileError> {
        let (format, kv) = text.split_once(' ').map_or((text, None), |(format, kv)| (format, Some(kv)));
        let class = Self::new(|name| match name {
            FORMAT => Some(format.as_bytes()),
            KV => kv.map(str::as_bytes),
            _ => None,
        })?;
        class.without_loss()
    }

    /// Refuses what is kept with loss.
    pub(crate) fn without_loss(self) -> Result<Self, FileError> {
        if self.kv.is_some_and(|kv| kv.lossy.is_some()) {
            return Err(FileError::Invalid { what: "a part of a file is not kept with loss" });
        }
        Ok(self)
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

    fn class(attributes: &[(&[u8], &str)]) -> Result<Class, FileError> {
        Class::new(|name| {
            let found = attributes.iter().find(|(named, _)| *named == name);
            found.map(|(_, value)| value.as_bytes())
        })
    }

    #[test]
    fn attributes_say_what_bytes_are() {
        assert_eq!(class(&[]).unwrap(), Class::OPAQUE);
        let bf16 = class(&[(FORMAT, "bf16")]).unwrap();
        assert_eq!((bf16.format(), bf16.layout(), bf16.unit()), (Format::Bf16, Layout::Weight, 4096));
        let kv = class(&[(KV, "1024,64")]).unwrap();
        assert_eq!((kv.format(), kv.unit()), (Format::Bf16, 1024 * 64 * 2));
        // 100 rows of 96 bytes are less than three blocks; after as many windows as that takes, a
        // row begins.
        let odd = class(&[(FORMAT, "fp16"), (KV, "48,100")]).unwrap();
        assert_eq!((odd.unit() % 96, odd.unit() % (3 * 4096)), (0, 0));
        let lossy = class(&[(KV, "1024,64"), (LOSSY, "packkv:0.2")]).unwrap();
        assert_eq!(lossy.layout().lossy().unwrap().to_string(), "packkv:0.2,greedy,8");
        for class in [Class::OPAQUE, bf16, kv, odd, lossy] {
            assert_eq!(serde_json::from_str::<Class>(&class.key()).unwrap(), class);
        }
        for refused in [
            &[(FORMAT, "bf17")][..],
            &[(KV, "0,5")],
            &[(KV, "x")],
            &[(FORMAT, "\u{e9}")],
            // Of what may be weights, of no whole windows, of another coding.
            &[(LOSSY, "packkv")],
            &[(FORMAT, "bf16"), (LOSSY, "packkv")],
            &[(KV, "20,64"), (LOSSY, "packkv")],
            &[(KV, "64,64"), (LOSSY, "kivi")],
        ] {
            assert_eq!(class(refused).unwrap_err().errno(), libc::EINVAL);
        }
        assert_eq!(Class::of_text("bf16 1024,64").unwrap(), kv);
        assert_eq!(Class::of_text("bf16").unwrap(), bf16);
        for refused in ["", "bf17", "bf16 ", "bf16 1024 64", "bf16 1024,64,lossy=packkv"] {
            assert_eq!(Class::of_text(refused).unwrap_err().errno(), libc::EINVAL, "{refused}");
        }
    }
}
