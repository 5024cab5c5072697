//! Views: a plain function of a tensor's full-precision bytes, given by fetching only the planes it
//! needs (TRACE III-C).
//!
//! The rules:
//! * A view's bytes depend on the tensor's bytes and the view's spelling, on nothing else: not on
//!   what was fetched, not on the mode, not on how the block is stored.
//! * [`View::mask`] names the planes a view needs (eq. 6, guard planes added); [`View::render`]
//!   sees words in which all other planes are zero.
//! * A view never looks at values to decide what to fetch.
//! * What a format cannot give is refused by name ([`ViewError`]).

mod convert;
mod pack;
mod render;
mod round;
mod spelling;

use std::fmt;

use self::convert::Converter;
pub use self::spelling::ViewError;
pub use crate::scaled::widen_fp16;
use crate::{format::Format, plane::PlaneMask};

/// Guard planes a converted view fetches unless its spelling says otherwise.
pub const DEFAULT_GUARD: u32 = 2;

/// What a view shows of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every plane.
    Full,
    /// Sign, the `exponent` upper exponent planes and the `mantissa` upper mantissa planes: top(rE,
    /// rM; dE, dM).
    Top {
        /// Exponent planes kept, rE.
        exponent: u32,
        /// Exponent planes fetched beyond these to round the exponent by, dE; 0 truncates it.
        exponent_guard: u32,
        /// Mantissa planes kept, rM.
        mantissa: u32,
        /// Mantissa planes fetched beyond these for rounding, dM; 0 truncates.
        guard: u32,
        /// A stream of 1 + rE + rM bits an element rather than the tensor's container.
        packed: bool,
    },
    /// The value in a standard format, x / 2^scale rounded to nearest even and saturated. Of
    /// elements of a block-scaled tensor this keeps the scales as they are: the power of two is one
    /// for all.
    Converted {
        /// The format shown.
        target: Format,
        /// Mantissa planes fetched beyond the target's.
        guard: u32,
        /// Exponent of the power of two by which values are divided.
        scale: i32,
    },
    /// The upper `bits` of an integer of B bits: x >> (B − bits).
    Integer {
        /// Bits kept: 4 or 2.
        bits: u32,
    },
}

/// A view of a tensor of one format.
#[derive(Clone, Debug)]
pub struct View {
    format: Format,
    kind: Kind,
    mask: PlaneMask,
    bits: u32,
    converter: Option<Converter>,
}

impl View {
    /// The view that `spelling` names, of a tensor of `format`.
    ///
    /// # Errors
    /// [`ViewError`] when there is no such view, or the format cannot give it.
    pub fn parse(format: Format, spelling: &str) -> Result<Self, ViewError> {
        let kind = spelling::parse(format, spelling)?;
        let all_exponent = format.exponent_bits();
        let (mask, bits) = match kind {
            Kind::Full => (PlaneMask::all(format), format.bits()),
            Kind::Top { exponent, exponent_guard, mantissa, guard, packed } => (
                top(format, exponent + exponent_guard, mantissa.saturating_add(guard)),
                if packed { 1 + exponent + mantissa } else { format.bits() },
            ),
            Kind::Converted { target, guard, .. } => {
                (top(format, all_exponent, target.mantissa_bits().saturating_add(guard)), target.bits())
            }
            Kind::Integer { bits } => (uppermost(format, bits), bits),
        };
        let converter = match kind {
            Kind::Converted { target, scale, .. } => Some(Converter::new(format, target, scale)),
            _ => None,
        };
        Ok(Self { format, kind, mask, bits, converter })
    }

    /// The tensor's format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// What it shows.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The planes it needs.
    pub fn mask(&self) -> PlaneMask {
        self.mask
    }

    /// Bits of an element in the view.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// A stored value x stands for x·2^scale.
    pub fn scale_exp(&self) -> i32 {
        match self.kind {
            Kind::Converted { scale, .. } => scale,
            _ => 0,
        }
    }

    /// Bytes that `elements` take in the view, the last one filled up with zero bits.
    pub fn bytes_for(&self, elements: u64) -> Option<u64> {
        // Eight elements take `bits` bytes: no product here passes what the answer itself would.
        let rest = (elements % 8 * u64::from(self.bits)).div_ceil(8);
        (elements / 8).checked_mul(self.bits.into())?.checked_add(rest)
    }
}

/// The sign plane, the upper `exponent` exponent planes and the upper `mantissa` mantissa planes
/// (as many as there are) of a floating format: eq. 6.
fn top(format: Format, exponent: u32, mantissa: u32) -> PlaneMask {
    let (all, sign) = (format.mantissa_bits(), format.sign_plane().expect("a float"));
    let upper = |count: u32, end: u32| ((1_u32 << count) - 1) << (end - count);
    PlaneMask(1 << sign | upper(exponent, sign) | upper(mantissa.min(all), all))
}

/// The `count` uppermost planes of an integer format.
fn uppermost(format: Format, count: u32) -> PlaneMask {
    PlaneMask(((1 << count) - 1) << (format.bits() - count))
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Full => f.write_str("full"),
            Self::Top { exponent, exponent_guard, mantissa, guard, packed } => {
                write!(f, "e{exponent}m{mantissa}")?;
                if exponent_guard > 0 {
                    write!(f, "+d{exponent_guard}")?;
                }
                if guard > 0 {
                    write!(f, "+g{guard}")?;
                }
                if packed { f.write_str(":packed") } else { Ok(()) }
            }
            Self::Converted { target, guard, scale } => {
                write!(f, "{target}")?;
                if guard != DEFAULT_GUARD {
                    write!(f, "+g{guard}")?;
                }
                if scale == 0 { Ok(()) } else { write!(f, "@{scale}") }
            }
            Self::Integer { bits } => write!(f, "int{bits}"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
