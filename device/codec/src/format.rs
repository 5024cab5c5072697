//! Element formats: how many bits, which of them are sign, exponent and mantissa, and what a plane
//! of them is.
//!
//! Plane `i` of a block is bit `i` of every element (TRACE eq. 2), so a format's fields are ranges
//! of planes: sign on top, then the exponent, then the mantissa. Integer formats have a sign and
//! value bits; `opaque` bytes have no planes at all and are stored as words.
//!
//! A format is a line of the table. Floats of six bits lie in a byte each, as `ml_dtypes` and NumPy
//! keep them: four of them in three bytes would not fill a block, and an element would be in two.
//! The two planes above the sign are zeros and take no bytes.

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
    /// 1-2-1, every value finite, two to a byte, low nibble first (OCP MX 1.0, 5.3.3).
    Fp4E2m1 = 8,
    /// 1-3-2, every value finite, one in the low six bits of a byte (OCP MX 1.0, 5.3.2).
    Fp6E3m2 = 9,
    /// 1-2-3, every value finite, one in the low six bits of a byte (OCP MX 1.0, 5.3.2).
    Fp6E2m3 = 10,
    /// A power of two, 2^(x − 127), without sign; 0xff is NaN (OCP MX 1.0, 5.4.1).
    E8m0 = 11,
}

/// What a format is: a line of the table.
struct Row {
    name: &'static str,
    /// Bits of an element where it lies, which may be more than it has.
    bits: u32,
    exponent: u32,
    mantissa: u32,
    /// The bit of a float's sign.
    sign: Option<u32>,
}

impl Row {
    /// What is no float.
    const fn integer(name: &'static str, bits: u32) -> Self {
        Self { name, bits, exponent: 0, mantissa: 0, sign: None }
    }

    /// A float in `bits` bits, its fields in the lowest.
    const fn float(name: &'static str, bits: u32, exponent: u32, mantissa: u32) -> Self {
        Self { name, bits, exponent, mantissa, sign: Some(exponent + mantissa) }
    }
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
    pub const ALL: [Self; 12] = [
        Self::Opaque,
        Self::Fp32,
        Self::Fp16,
        Self::Bf16,
        Self::Fp8E4m3fn,
        Self::Fp8E5m2,
        Self::Int8,
        Self::Int4,
        Self::Fp4E2m1,
        Self::Fp6E3m2,
        Self::Fp6E2m3,
        Self::E8m0,
    ];

    const fn row(self) -> Row {
        match self {
            Self::Opaque => Row::integer("opaque", 8),
            Self::Fp32 => Row::float("fp32", 32, 8, 23),
            Self::Fp16 => Row::float("fp16", 16, 5, 10),
            Self::Bf16 => Row::float("bf16", 16, 8, 7),
            Self::Fp8E4m3fn => Row::float("fp8_e4m3fn", 8, 4, 3),
            Self::Fp8E5m2 => Row::float("fp8_e5m2", 8, 5, 2),
            Self::Int8 => Row::integer("int8", 8),
            Self::Int4 => Row::integer("int4", 4),
            Self::Fp4E2m1 => Row::float("fp4_e2m1", 4, 2, 1),
            Self::Fp6E3m2 => Row::float("fp6_e3m2", 8, 3, 2),
            Self::Fp6E2m3 => Row::float("fp6_e2m3", 8, 2, 3),
            Self::E8m0 => Row { name: "e8m0", bits: 8, exponent: 8, mantissa: 0, sign: None },
        }
    }

    /// The name used everywhere: command line, API, directory.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Bits that an element takes, B in the paper; 8 for `opaque`, and for a float of six bits,
    /// whose upper two are zeros.
    pub const fn bits(self) -> u32 {
        self.row().bits
    }

    /// Exponent bits, E in the paper; 0 where there is no exponent.
    pub const fn exponent_bits(self) -> u32 {
        self.row().exponent
    }

    /// Mantissa bits, M in the paper; 0 where there is no mantissa.
    pub const fn mantissa_bits(self) -> u32 {
        self.row().mantissa
    }

    /// The plane of a float's sign: the uppermost that its elements use.
    pub const fn sign_plane(self) -> Option<u32> {
        self.row().sign
    }

    /// Whether elements have sign, exponent and mantissa.
    pub const fn is_float(self) -> bool {
        self.sign_plane().is_some()
    }

    /// Whether a byte holds two elements.
    pub const fn is_nibble(self) -> bool {
        self.bits() == 4
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
        if self.is_nibble() { bytes.saturating_mul(2) } else { bytes / (self.bits() as u64 / 8) }
    }

    /// Bytes that `elements` take, the last one filled up; `None` past 2^64.
    pub const fn bytes_for(self, elements: u64) -> Option<u64> {
        if self.is_nibble() {
            Some(elements.div_ceil(2))
        } else {
            elements.checked_mul(self.bits() as u64 / 8)
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
            let used = 1 + format.exponent_bits() + format.mantissa_bits();
            assert_eq!(format.sign_plane(), Some(used - 1), "{format}");
            let name = format.name();
            let width = if name.starts_with("fp6") { 6 } else { format.bits() };
            assert_eq!(used, width, "{format}");
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
