//! Values in another format: divide by a power of two, round to nearest even, saturate.
//!
//! The words come with every plane outside the view's mask zero; that truncated value is what is converted. Infinities saturate to the largest
//! finite value like everything else beyond it; NaN becomes the target's quiet NaN with its sign, as `ml_dtypes` casts it.

use std::sync::Arc;

use crate::{format::Format, plane::PlaneMask};

/// Bits of an input that are looked up in a table rather than computed.
const MOST_INDEX_BITS: u32 = 16;

/// Converts elements of one format, truncated to one mask, to another format.
#[derive(Clone, Debug)]
pub(super) struct Converter {
    rule: Rule,
    /// Results by the upper bits of the element, where those are few.
    table: Option<Arc<[u16]>>,
    /// Lower bits that the mask leaves zero.
    dropped: u32,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    from: Fields,
    to: Fields,
    /// The largest finite magnitude of the target.
    most: u32,
    nan: u32,
    scale: i32,
}

#[derive(Clone, Copy, Debug)]
struct Fields {
    exponent: u32,
    mantissa: u32,
    bias: i32,
}

impl Converter {
    pub(super) fn new(from: Format, to: Format, scale: i32, mask: PlaneMask) -> Self {
        let (most, nan) = match to {
            Format::Bf16 => (0x7f7f, 0x7fc0),
            Format::Fp8E4m3fn => (0x7e, 0x7f),
            Format::Fp8E5m2 => (0x7b, 0x7e),
            other => unreachable!("no view converts to {other}"),
        };
        let rule = Rule { from: Fields::of(from), to: Fields::of(to), most, nan, scale };
        let dropped = mask.0.trailing_zeros();
        let index_bits = from.bits() - dropped;
        let table = (index_bits <= MOST_INDEX_BITS).then(|| {
            (0..1_u32 << index_bits)
                .map(|upper| {
                    u16::try_from(rule.apply(upper << dropped)).expect("targets have 16 bits at most")
                })
                .collect()
        });
        Self { rule, table, dropped }
    }

    /// The element `bits` in the target format.
    pub(super) fn apply(&self, bits: u32) -> u32 {
        match &self.table {
            Some(table) => table[(bits >> self.dropped) as usize].into(),
            None => self.rule.apply(bits),
        }
    }
}

impl Fields {
    fn of(format: Format) -> Self {
        let exponent = format.exponent_bits();
        Self { exponent, mantissa: format.mantissa_bits(), bias: (1 << (exponent - 1)) - 1 }
    }
}

impl Rule {
    fn apply(&self, bits: u32) -> u32 {
        let Self { from, to, most, nan, scale } = *self;
        let sign = (bits >> (from.exponent + from.mantissa) & 1) << (to.exponent + to.mantissa);
        let field = bits >> from.mantissa & ((1 << from.exponent) - 1);
        let mantissa = bits & ((1 << from.mantissa) - 1);
        if field == (1 << from.exponent) - 1 {
            // Sources are IEEE formats: all ones is infinity or NaN.
            return sign | if mantissa == 0 { most } else { nan };
        }
        // The value is significand · 2^unit.
        let significand = u64::from(if field == 0 { mantissa } else { mantissa | 1 << from.mantissa });
        if significand == 0 {
            return sign;
        }
        let unit = field.max(1).cast_signed() - from.bias - from.mantissa.cast_signed() - scale;
        let leading = unit + significand.ilog2().cast_signed();
        // The target's unit at this magnitude; below its normal range that of its subnormals.
        let binade = leading.max(1 - to.bias);
        let shift = binade - to.mantissa.cast_signed() - unit;
        let rounded = if shift > 0 {
            round_half_even(significand, shift.unsigned_abs())
        } else {
            // At most the target's mantissa wider than a one-bit significand: no overflow.
            significand << shift.unsigned_abs()
        };
        // A carry out of the mantissa moves on to the exponent by itself; a normal value's own leading bit counts as one there.
        let exponent = (binade - (1 - to.bias)).unsigned_abs();
        let magnitude = (u64::from(exponent) << to.mantissa) + rounded;
        sign | u32::try_from(magnitude).map_or(most, |magnitude| magnitude.min(most))
    }
}

/// `value` / 2^`shift`, to the nearest integer, ties to even. `shift` is at least 1.
fn round_half_even(value: u64, shift: u32) -> u64 {
    if shift > 63 {
        return 0; // the significand has 24 bits: less than half
    }
    let (quotient, rest, half) = (value >> shift, value & ((1 << shift) - 1), 1 << (shift - 1));
    quotient + u64::from(rest > half || (rest == half && quotient & 1 == 1))
}
