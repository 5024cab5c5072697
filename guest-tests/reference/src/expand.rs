//! Block-scaled tensors at bf16: elements and scales, each a tensor of its own, put together.
//!
//! A block is `size` elements that follow each other in a row and share a scale. An element of the
//! result is the bf16 nearest to element · scale, ties to even. What is beyond the largest bf16 by
//! half a step or more is infinity, as it is where frameworks convert. NaN, of either, is the quiet
//! NaN without sign, 0x7fc0.
//!
//! | scales | the scale of a block |
//! |---|---|
//! | [`Scales::Powers`] | the `e8m0` of the block; the product is exact |
//! | [`Scales::Fp8`] | the `fp8_e4m3fn` of the block times one fp32, rounded to fp32 |
//!
//! With fp8 scales the product with the element is rounded to fp32 as well, before bf16.

use std::cmp::Ordering;

use crate::{Format, element, stream};

/// What the scales of blocks are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales<'a> {
    /// Of MX: an `e8m0` a block.
    Powers(&'a [u8]),
    /// Of NVFP4: an `fp8_e4m3fn` a block, and one fp32 for all.
    Fp8(&'a [u8], f32),
}

/// The bf16 of `count` elements of `format`, in blocks of `size` elements.
///
/// # Panics
/// If there are fewer elements or scales than that.
pub fn expanded(format: Format, elements: &[u8], count: u64, size: u64, scales: Scales<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    for index in 0..count {
        let x = element::value(format, stream::read(elements, index, format.bits()));
        let code = |scales: &[u8]| {
            u32::from(scales[usize::try_from(index / size).expect("the scales are in memory")])
        };
        let product = match scales {
            Scales::Powers(scales) => x * element::value(Format::E8m0, code(scales)),
            Scales::Fp8(scales, all) => {
                let scale = to_single(element::value(Format::Fp8E4m3fn, code(scales)) * f64::from(all));
                // A product of two singles is exact in double precision.
                f64::from(to_single(x * f64::from(scale)))
            }
        };
        out.extend(to_bf16(product).to_le_bytes());
    }
    out
}

#[expect(clippy::cast_possible_truncation, reason = "to round is what it is for")]
fn to_single(number: f64) -> f32 {
    number as f32
}

/// The code of the nearest bf16, from the table of all values.
fn to_bf16(number: f64) -> u16 {
    if number.is_nan() {
        return 0x7fc0;
    }
    let sign = if number.is_sign_negative() { 0x8000 } else { 0 };
    let of = |code: u16| element::value(Format::Bf16, u32::from(code));
    // The largest code whose value is not above the number.
    let (mut below, mut behind) = (0_u16, 0x7f80);
    while behind - below > 1 {
        let middle = u16::midpoint(below, behind);
        if of(middle) <= number.abs() { below = middle } else { behind = middle }
    }
    // Behind the largest comes what would be the next number, where infinity is.
    let next = if behind == 0x7f80 { 2_f64.powi(128) } else { of(behind) };
    let half = f64::midpoint(of(below), next);
    let up = match number.abs().total_cmp(&half) {
        Ordering::Less => false,
        Ordering::Equal => below % 2 == 1,
        Ordering::Greater => true,
    };
    sign | if up { behind } else { below }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_to_the_nearest_bf16() {
        for (number, code) in [
            (0.0, 0),
            (-0.0, 0x8000),
            (1.0, 0x3f80),
            (-1.5, 0xbfc0),
            (1.0 + 1.0 / 256.0, 0x3f80),  // a tie, to even
            (1.0 + 3.0 / 256.0, 0x3f82),  // a tie, up to even
            (1.0 + 1.01 / 256.0, 0x3f81), // above a tie
            (2_f64.powi(-133), 1),
            (2_f64.powi(-134), 0),
            (1.5 * 2_f64.powi(-133), 2),
            (255.0 * 2_f64.powi(120), 0x7f7f),
            (255.5 * 2_f64.powi(120), 0x7f80), // a tie between the largest and 2^128
            (255.4 * 2_f64.powi(120), 0x7f7f),
            (6.0 * 2_f64.powi(127), 0x7f80),
            (f64::INFINITY, 0x7f80),
            (f64::NEG_INFINITY, 0xff80),
            (f64::NAN, 0x7fc0),
            (-f64::NAN, 0x7fc0),
        ] {
            assert_eq!(to_bf16(number), code, "{number}");
        }
    }

    #[test]
    fn an_element_is_multiplied_by_the_scale_of_its_block() {
        // 0.5 1 1.5 2, −6 of low nibbles first; 2^1 for two elements, 2^−1, NaN.
        let elements = [0x21, 0x43, 0x0f];
        let shown = expanded(Format::Fp4E2m1, &elements, 5, 2, Scales::Powers(&[128, 126, 255]));
        let want = [0x3f80_u16, 0x4000, 0x3f40, 0x3f80, 0x7fc0];
        assert_eq!(shown, want.iter().flat_map(|code| code.to_le_bytes()).collect::<Vec<_>>());
        // 1.5 of fp8 and 0.25.
        let shown = expanded(Format::Fp4E2m1, &elements, 1, 16, Scales::Fp8(&[0x3c], 0.25));
        assert_eq!(shown, 0x3e40_u16.to_le_bytes());
    }
}
