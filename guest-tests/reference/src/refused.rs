//! Why a view cannot be given: the view, the format and the bound that stands against it.

use crate::Format;

/// Why a format cannot give a view.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The text is no view's spelling.
    #[error(
        "{view:?} is no view; a view is spelled full, e8m3, e4m3+d2, e8m3+g2, e8m3:packed, bf16, fp8_e4m3fn, fp8_e5m2, \
         fp6_e3m2, fp6_e2m3, fp4_e2m1 (these six also +g4, all but bf16 also @-3), int4 or int2, with numbers without leading zeros"
    )]
    Spelling {
        /// The text.
        view: String,
    },
    /// More exponent bits than the format has.
    #[error("{view}: {format} has {has} exponent bits")]
    ExponentBits {
        /// The view's spelling.
        view: String,
        /// The tensor's format.
        format: Format,
        /// The exponent bits it has.
        has: u32,
    },
    /// More guards of an exponent than the paper has.
    #[error("{view}: an exponent has at most 2 guards")]
    ExponentGuards {
        /// The view's spelling.
        view: String,
    },
    /// More mantissa bits than the format has.
    #[error("{view}: {format} has {has} mantissa bits")]
    MantissaBits {
        /// The view's spelling.
        view: String,
        /// The tensor's format.
        format: Format,
        /// The mantissa bits it has.
        has: u32,
    },
    /// Sign, exponent and mantissa planes of something that is not a float.
    #[error("{view}: {format} has no exponent")]
    NoExponent {
        /// The view's spelling.
        view: String,
        /// The tensor's format.
        format: Format,
    },
    /// Rounding carries into the exponent, so it needs all of it.
    #[error("{view}: rounding needs all {needs} exponent bits of {format}")]
    GuardsNeedExponent {
        /// The view's spelling.
        view: String,
        /// The tensor's format.
        format: Format,
        /// The exponent bits that must be kept.
        needs: u32,
    },
    /// The view is converted from other formats only.
    #[error("{view}: {format} cannot be converted so; this view is made from {from}")]
    Conversion {
        /// The view's spelling.
        view: String,
        /// The tensor's format.
        format: Format,
        /// The formats that give the view.
        from: &'static str,
    },
    /// A scale exponent out of range.
    #[error("{view}: the scale exponent of a view of {format} is at least -64 and at most 64")]
    Scale {
        /// The view's spelling.
        view: String,
        /// The tensor's format.
        format: Format,
    },
    /// The bytes are not as many as the elements fill.
    #[error("{elements} elements of {format} fill {wanted} bytes, but there are {found}")]
    Length {
        /// The tensor's format.
        format: Format,
        /// The elements there should be.
        elements: u64,
        /// The bytes they fill.
        wanted: u128,
        /// The bytes there are.
        found: usize,
    },
}
