//! The element formats: their names and how many bits each field has.

use std::fmt;
use std::str::FromStr;

/// An element format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision: 8 exponent and 23 mantissa bits.
    Fp32,
    /// IEEE half precision: 5 exponent and 10 mantissa bits.
    Fp16,
    /// The upper half of single precision: 8 exponent and 7 mantissa bits.
    Bf16,
    /// 4 exponent and 3 mantissa bits, no infinity; only all ones below the sign is NaN.
    Fp8E4m3fn,
    /// 5 exponent and 2 mantissa bits, with infinities and NaNs as in IEEE formats.
    Fp8E5m2,
    /// Two's complement byte.
    Int8,
    /// Two's complement nibble, two to a byte, low nibble first.
    Int4,
    /// 2 exponent bits and 1 mantissa bit, all values finite; two to a byte, low nibble first.
    Fp4E2m1,
    /// 3 exponent and 2 mantissa bits, all values finite; the lower six bits of a byte.
    Fp6E3m2,
    /// 2 exponent and 3 mantissa bits, all values finite; the lower six bits of a byte.
    Fp6E2m3,
    /// 8 exponent bits and nothing else; all ones is NaN.
    E8m0,
    /// Bytes of unknown meaning; an element is a byte.
    Opaque,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 12] = [
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
        Self::Opaque,
    ];

    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3fn => "fp8_e4m3fn",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Fp4E2m1 => "fp4_e2m1",
            Self::Fp6E3m2 => "fp6_e3m2",
            Self::Fp6E2m3 => "fp6_e2m3",
            Self::E8m0 => "e8m0",
            Self::Opaque => "opaque",
        }
    }

    /// Bits that an element takes.
    pub fn bits(self) -> u32 {
        match self {
            Self::Fp32 => 32,
            Self::Fp16 | Self::Bf16 => 16,
            Self::Fp8E4m3fn
            | Self::Fp8E5m2
            | Self::Fp6E3m2
            | Self::Fp6E2m3
            | Self::E8m0
            | Self::Int8
            | Self::Opaque => 8,
            Self::Int4 | Self::Fp4E2m1 => 4,
        }
    }

    /// Bits of the exponent; 0 for what has no sign and mantissa beside it.
    pub fn exponent_bits(self) -> u32 {
        match self {
            Self::Fp32 | Self::Bf16 => 8,
            Self::Fp16 | Self::Fp8E5m2 => 5,
            Self::Fp8E4m3fn => 4,
            Self::Fp6E3m2 => 3,
            Self::Fp4E2m1 | Self::Fp6E2m3 => 2,
            Self::Int8 | Self::Int4 | Self::E8m0 | Self::Opaque => 0,
        }
    }

    /// Stored bits of the mantissa; 0 for what is not a float.
    pub fn mantissa_bits(self) -> u32 {
        match self {
            Self::Fp32 => 23,
            Self::Fp16 => 10,
            Self::Bf16 => 7,
            Self::Fp8E4m3fn | Self::Fp6E2m3 => 3,
            Self::Fp8E5m2 | Self::Fp6E3m2 => 2,
            Self::Fp4E2m1 => 1,
            Self::Int8 | Self::Int4 | Self::E8m0 | Self::Opaque => 0,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no format has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no format; there are fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2, int8, int4, fp4_e2m1, fp6_e3m2, fp6_e2m3, e8m0 \
     and opaque"
)]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| UnknownFormat(name.into()))
    }
}
