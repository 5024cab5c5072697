//! Rounding to the upper mantissa bits, element by element in a vectorisable loop.

use crate::format::Format;

/// Rounds each element of `words` to nearest even at the `mantissa` upper mantissa bits, the carry
/// running into the exponent; elements whose exponent is all ones are truncated. Bits below those
/// fetched to round by are zero already.
pub(super) fn round(format: Format, mantissa: u32, words: &mut [u8]) {
    let dropped = format.mantissa_bits() - mantissa;
    if dropped == 0 {
        return;
    }
    let shape = Shape { dropped, exponent: ((1 << format.exponent_bits()) - 1) << format.mantissa_bits() };
    match format.bits() {
        4 => round4(words),
        8 => round8(shape, words),
        16 => round16(shape, words),
        _ => round32(shape, words),
    }
}

/// Rounds two fp4 in each byte at none of their one mantissa bit. It is one step below the
/// exponent, so what has it lies half way between two exponents, and goes to the even one.
fn round4(words: &mut [u8]) {
    for byte in words {
        // Exponent 1 with a mantissa, 1.5, goes up to 2; those of 0 and 2 stay, and 3 is truncated.
        let exponent = *byte >> 1 & 0x33;
        let goes_up = *byte & exponent & !(exponent >> 1) & 0x11;
        *byte = (*byte & 0xee) + (goes_up << 1);
    }
}

#[derive(Clone, Copy)]
struct Shape {
    /// Mantissa bits rounded away, at least one.
    dropped: u32,
    /// The exponent's bits.
    exponent: u32,
}

/// The loop over elements of one width. Nearest even is: add just less than half, and one more if
/// the kept part is odd.
macro_rules! rounder {
    ($name:ident, $word:ty) => {
        #[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
        #[expect(
            clippy::allow_attributes,
            reason = "the attribute below is needed for one of the widths only"
        )]
        #[allow(clippy::cast_possible_truncation, reason = "the exponent's bits fit the element")]
        fn $name(shape: Shape, words: &mut [u8]) {
            const BYTES: usize = size_of::<$word>();
            let exponent = shape.exponent as $word;
            let less_than_half = ((1 as $word) << (shape.dropped - 1)) - 1;
            let kept = !(((1 as $word) << (shape.dropped - 1) << 1).wrapping_sub(1));
            for bytes in words.chunks_exact_mut(BYTES) {
                let x = <$word>::from_le_bytes(bytes.try_into().expect("an element"));
                let odd = (x >> (shape.dropped - 1) >> 1) & 1;
                let rounded = x.wrapping_add(less_than_half).wrapping_add(odd);
                let special = x & exponent == exponent;
                let result = if special { x } else { rounded } & kept;
                bytes.copy_from_slice(&result.to_le_bytes());
            }
        }
    };
}

rounder!(round8, u8);
rounder!(round16, u16);
rounder!(round32, u32);
