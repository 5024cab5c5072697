//! Rounding to the upper mantissa or exponent bits, element by element in a vectorisable loop.

use crate::format::Format;

/// Rounds each element of `words` to nearest even at the `mantissa` upper mantissa bits, the carry
/// running into the exponent; elements whose exponent is all ones are truncated. Bits below those
/// fetched to round by are zero already.
pub(super) fn mantissa(format: Format, mantissa: u32, words: &mut [u8]) {
    let dropped = format.mantissa_bits() - mantissa;
    if dropped == 0 {
        return;
    }
    let special = ((1 << format.exponent_bits()) - 1) << format.mantissa_bits();
    let shape = Shape { dropped, unit: 1, special };
    match format.bits() {
        4 => mantissa4(words),
        8 => mantissa8(shape, words),
        16 => mantissa16(shape, words),
        _ => mantissa32(shape, words),
    }
}

/// Rounds the exponent of each element of `words`, as a number by itself, to nearest even at its
/// `exponent` upper bits, of which it has more. Elements in which these are all ones are truncated:
/// up from there would be into the sign. So no exponent becomes all ones. The mantissa stays.
pub(super) fn exponent(format: Format, exponent: u32, words: &mut [u8]) {
    let dropped = format.exponent_bits() - exponent;
    let unit = 1 << format.mantissa_bits();
    let shape = Shape { dropped, unit, special: ((1 << exponent) - 1) * (unit << dropped) };
    match format.bits() {
        4 => exponent4(exponent, words),
        8 => exponent8(shape, words),
        16 => exponent16(shape, words),
        _ => exponent32(shape, words),
    }
}

/// Rounds two fp4 in each byte at none of their one mantissa bit. It is one step below the
/// exponent, so what has it lies half way between two exponents, and goes to the even one.
fn mantissa4(words: &mut [u8]) {
    for byte in words {
        // Exponent 1 with a mantissa, 1.5, goes up to 2; those of 0 and 2 stay, and 3 is truncated.
        let exponent = *byte >> 1 & 0x33;
        let goes_up = *byte & exponent & !(exponent >> 1) & 0x11;
        *byte = (*byte & 0xee) + (goes_up << 1);
    }
}

/// Rounds the exponents of two fp4 in each byte. Of their two bits one or none is kept. What would
/// go up from zero lies half way, and zero is even: truncation is all there is.
fn exponent4(kept: u32, words: &mut [u8]) {
    let kept = if kept == 0 { 0x99 } else { 0xdd };
    for byte in words {
        *byte &= kept;
    }
}

#[derive(Clone, Copy)]
struct Shape {
    /// Bits rounded away, at least one.
    dropped: u32,
    /// The least of them.
    unit: u32,
    /// The bits that are all ones in what is truncated.
    special: u32,
}

impl Shape {
    /// The least bit of any mantissa, known when its loop is compiled.
    fn one(self) -> u32 {
        debug_assert_eq!(self.unit, 1, "a mantissa's");
        1
    }

    fn unit(self) -> u32 {
        self.unit
    }
}

/// The loop over elements of one width. Nearest even is: add just less than half, and one more if
/// the kept part is odd.
macro_rules! rounder {
    ($name:ident, $word:ty, $unit:ident) => {
        #[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
        #[expect(
            clippy::allow_attributes,
            reason = "the attribute below is needed for one of the widths only"
        )]
        #[allow(clippy::cast_possible_truncation, reason = "the bits are those of an element")]
        fn $name(shape: Shape, words: &mut [u8]) {
            const BYTES: usize = size_of::<$word>();
            let (unit, special): ($word, $word) = (shape.$unit() as $word, shape.special as $word);
            let less_than_half = (unit << (shape.dropped - 1)) - unit;
            let kept = !((unit << (shape.dropped - 1) << 1).wrapping_sub(unit));
            for bytes in words.chunks_exact_mut(BYTES) {
                let x = <$word>::from_le_bytes(bytes.try_into().expect("an element"));
                let odd = (x >> (shape.dropped - 1) >> 1) & unit;
                let rounded = x.wrapping_add(less_than_half).wrapping_add(odd);
                let result = if x & special == special { x } else { rounded } & kept;
                bytes.copy_from_slice(&result.to_le_bytes());
            }
        }
    };
}

rounder!(mantissa8, u8, one);
rounder!(mantissa16, u16, one);
rounder!(mantissa32, u32, one);
rounder!(exponent8, u8, unit);
rounder!(exponent16, u16, unit);
rounder!(exponent32, u32, unit);
