//! Element formats: how many bits, which of them are sign, exponent and mantissa, and what a plane
//! of them is.
//!
//! Plane `i` of a block is bit `i` of every element (TRACE eq. 2), so a format's fields are ranges
//! of planes: sign on top, then the exponent, then the mantissa. Integer formats have a sign and
//! value bits; `opaque` bytes have no planes at all and are stored as words.

use std::{fmt, str::FromStr};

use crate::BLOCK_BYTES;

/// An element format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Format {
    /// Bytes of no known format.
    Opaque = 0,
    /// IEEE 754 binary32.
    Fp32 = 1,
    /// IEEE 754 binary16.
    Fp16 = 2,
    /// The upper half of binary32.
    Bf16 = 3,
    /// 1-4-3, no infinity, one NaN.
    Fp8E4m3fn = 4,
    /// 1-5-2, with infinity.
    Fp8E5m2 = 5,
    /// Two's complement.
    Int8 = 6,
    /// Two's complement, two to a byte, low nibble first.
    Int4 = 7,
}

/// A name that is no format's.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("no format is called {name:?}; formats are {}", Format::ALL.map(Format::name).join(", "))]
pub struct UnknownFormat {
    /// The name.
    pub name: String,
}

impl Format {
    /// Every format, `ALL[f as usize] == f`.
    pub const ALL: [Self; 8] = [
        Self::Opaque,
        Self::Fp32,
        Self::Fp16,
        Self::Bf16,
        Self::Fp8E4m3fn,
        Self::Fp8E5m2,
        Self::Int8,
        Self::Int4,
    ];

    /// The name used everywhere: command line, API, directory.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Opaque => "opaque",
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3fn => "fp8_e4m3fn",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bits of an element, B in the paper; 8 for `opaque`.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Fp32 => 32,
            Self::Fp16 | Self::Bf16 => 16,
            Self::Opaque | Self::Fp8E4m3fn | Self::Fp8E5m2 | Self::Int8 => 8,
            Self::Int4 => 4,
        }
    }

    /// Exponent bits, E in the paper; 0 where there is no exponent.
    pub const fn exponent_bits(self) -> u32 {
        match self {
            Self::Fp32 | Self::Bf16 => 8,
            Self::Fp16 | Self::Fp8E5m2 => 5,
            Self::Fp8E4m3fn => 4,
            Self::Opaque | Self::Int8 | Self::Int4 => 0,
        }
    }

    /// Mantissa bits, M in the paper; 0 where there is no mantissa.
    pub const fn mantissa_bits(self) -> u32 {
        if self.is_float() { self.bits() - 1 - self.exponent_bits() } else { 0 }
    }

    /// Whether elements have sign, exponent and mantissa.
    pub const fn is_float(self) -> bool {
        self.exponent_bits() > 0
    }

    /// Planes a block of this format has: B, or none for `opaque`.
    pub const fn planes(self) -> usize {
        match self {
            Self::Opaque => 0,
            other => other.bits() as usize,
        }
    }

    /// Bytes of one plane of a block, 4096 / B.
    pub const fn plane_bytes(self) -> usize {
        BLOCK_BYTES / self.bits() as usize
    }

    /// Elements in a block, m = 32768 / B.
    pub const fn block_elements(self) -> u64 {
        (BLOCK_BYTES * 8) as u64 / self.bits() as u64
    }

    /// Elements that `bytes` hold when every bit of them is used.
    pub const fn elements_in(self, bytes: u64) -> u64 {
        match self {
            Self::Int4 => bytes.saturating_mul(2),
            other => bytes / (other.bits() as u64 / 8),
        }
    }

    /// Bytes that `elements` take, the last one filled up; `None` past 2^64.
    pub const fn bytes_for(self, elements: u64) -> Option<u64> {
        match self {
            Self::Int4 => Some(elements.div_ceil(2)),
            other => elements.checked_mul(other.bits() as u64 / 8),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| UnknownFormat { name: name.to_owned() })
    }
}

impl serde::Serialize for Format {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Format {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_fill_the_element() {
        for format in Format::ALL.into_iter().filter(|f| f.is_float()) {
            assert_eq!(1 + format.exponent_bits() + format.mantissa_bits(), format.bits(), "{format}");
        }
    }

    #[test]
    fn names_and_numbers_are_read_back() {
        for (index, format) in Format::ALL.into_iter().enumerate() {
            assert_eq!(format.name().parse(), Ok(format));
            assert_eq!(format as usize, index);
            assert_eq!(format.plane_bytes() * format.bits() as usize, BLOCK_BYTES);
        }
        assert!("fp64".parse::<Format>().unwrap_err().to_string().contains("bf16"));
    }
}
