//! Block-scaled tensors at bf16: elements and their scales, each an array of its own, put together.
//!
//! The rules:
//! * Elements that follow each other in a row and share a scale are a *block* of [`Scaled`]: 32 of
//!   MX (OCP MX 1.0, 5.2), 16 of NVFP4. It has nothing to do with the device's blocks.
//! * A value is what frameworks make of it: the bf16 nearest to element · scale, ties to even. The
//!   product of an element and a power of two is exact before that; with a scale of fp8 the scale
//!   times the factor of all is rounded to binary32 first, and so is the product with the element.
//! * What is beyond the largest bf16 becomes infinity. NaN, an element's or a scale's, is the quiet
//!   NaN without sign, 0x7fc0.
//!
//! The loops are compiled for what the processor has; of fp4 and fp8 there are kernels for AVX-512.

#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod integers;

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::format::Format;

/// Elements that an MX scale is for.
pub const MX_BLOCK: usize = 32;
/// Elements that a scale of NVFP4 is for.
pub const NV_BLOCK: usize = 16;

/// The quiet NaN of bf16.
const NAN: i16 = 0x7fc0;
/// Scales by which no fp4 becomes subnormal or infinite: 0.5 has the exponent 126, 6 has 129.
const PLAIN_SCALES: RangeInclusive<u8> = 2..=252;

/// How the elements of a tensor are scaled.
#[derive(Clone, Debug)]
pub struct Scaled {
    format: Format,
    /// How many share a scale.
    block: usize,
    /// The binary32 values of all codes of elements of whole bytes.
    elements: Arc<[f32; 256]>,
    /// Those of all codes of scales, with the factor of all.
    scales: Arc<[f32; 256]>,
    /// The bf16 of all codes of fp4 times each scale, where these are no powers of two.
    rows: Arc<Rows>,
    /// Whether scales are powers of two as they are.
    powers: bool,
}

/// The bf16 of all codes of fp4, by the code of a scale.
type Rows = [[u16; 16]; 256];

impl Scaled {
    /// Elements of `format` of which [`MX_BLOCK`] share a power of two, an `e8m0`.
    ///
    /// # Panics
    /// If elements have more than eight bits, or no sign.
    pub fn mx(format: Format) -> Self {
        Self::of(format, MX_BLOCK, Format::E8m0, None)
    }

    /// Elements of `fp4_e2m1` of which [`NV_BLOCK`] share an `fp8_e4m3fn`, which `all` is a factor
    /// of.
    pub fn nvfp4(all: f32) -> Self {
        Self::of(Format::Fp4E2m1, NV_BLOCK, Format::Fp8E4m3fn, Some(all))
    }

    fn of(format: Format, block: usize, scale: Format, all: Option<f32>) -> Self {
        assert!(format.is_float() && format.bits() <= 8, "{format} is no element of a block");
        let table = |format: Format, factor: f32| {
            Arc::new(std::array::from_fn(|code| factor * widened(format, code.to_le_bytes()[0])))
        };
        let (scales, powers) = (table(scale, all.unwrap_or(1.0)), all.is_none());
        let row = |scale: f32| {
            std::array::from_fn(|code| {
                let value = widened_fp4(u32::try_from(code).unwrap_or(0)) * scale;
                u16::try_from(rounded(value)).expect("16 bits")
            })
        };
        let rows = if powers { [[0; 16]; 256] } else { scales.map(row) };
        Self { format, block, elements: table(format, 1.0), scales, rows: Arc::new(rows), powers }
    }

    /// Elements that share a scale.
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Bytes of the elements that share a scale.
    pub const fn block_bytes(&self) -> usize {
        self.block * self.format.bits() as usize / 8
    }

    /// Puts the bf16 of whole blocks of elements, of which each has one of `scales`, into `out`.
    ///
    /// # Panics
    /// If there are not as many scales as blocks, or `out` has not two bytes for each element.
    pub fn to_bf16(&self, elements: &[u8], scales: &[u8], out: &mut [u8]) {
        let bytes = self.block_bytes();
        assert_eq!((elements.len(), out.len()), (scales.len() * bytes, scales.len() * 2 * self.block));
        #[cfg(target_arch = "x86_64")]
        if avx512::is_available() {
            let table = &self.scales;
            // SAFETY: the processor has AVX-512F and BW.
            unsafe {
                match self.format {
                    Format::Fp4E2m1 if self.powers => {
                        return avx512::powers_to_bf16(table, scales, elements, out);
                    }
                    Format::Fp4E2m1 => {
                        return avx512::nibbles_to_bf16(&self.rows, scales, elements, out);
                    }
                    // And VBMI, where this asks for it.
                    Format::Fp8E4m3fn | Format::Fp8E5m2 if avx512::has_bytes_looked_up() => {
                        return avx512::fp8_to_bf16_in_pairs(self.format, table, scales, elements, out);
                    }
                    Format::Fp8E4m3fn | Format::Fp8E5m2 => {
                        return avx512::fp8_to_bf16(self.format, table, scales, elements, out);
                    }
                    _ => {}
                }
            }
        }
        self.to_bf16_portably(elements, scales, out);
    }

    /// As [`Self::to_bf16`], in plain Rust.
    fn to_bf16_portably(&self, elements: &[u8], scales: &[u8], out: &mut [u8]) {
        if !self.format.is_nibble() {
            bytes_to_bf16(&self.elements, &self.scales, scales, elements, out);
        } else if self.powers {
            powers_to_bf16(&self.scales, scales, elements, out);
        } else {
            nibbles_to_bf16(&self.scales, scales, elements, out);
        }
    }
}

/// The value of a code, exactly. What a byte has above a sign does not count.
pub(crate) fn widened(format: Format, code: u8) -> f32 {
    let (exponent_bits, mantissa_bits) = (format.exponent_bits(), format.mantissa_bits());
    let all_ones = (1_u32 << exponent_bits) - 1;
    let code = u32::from(code);
    let exponent = code >> mantissa_bits & all_ones;
    let mantissa = code & ((1 << mantissa_bits) - 1);
    if format == Format::E8m0 {
        // Bits of binary32; 2^−127 is a subnormal.
        return match exponent {
            0 => f32::from_bits(1 << 22),
            0xff => f32::NAN,
            exponent => f32::from_bits(exponent << 23),
        };
    }
    let special = exponent == all_ones;
    let magnitude = match format {
        Format::Fp8E4m3fn if special && mantissa == 7 => f32::NAN,
        Format::Fp8E5m2 if special && mantissa > 0 => f32::NAN,
        Format::Fp8E5m2 if special => f32::INFINITY,
        _ => {
            // As bits of binary32 the exponent is too small by the difference of the biases; the
            // product makes subnormals normal too.
            let bits = (exponent << mantissa_bits | mantissa) << (23 - mantissa_bits);
            let bias = all_ones / 2;
            f32::from_bits(bits) * f32::from_bits((254 - bias) << 23)
        }
    };
    let sign = format.sign_plane().map_or(0, |sign| code >> sign & 1);
    if sign == 1 { -magnitude } else { magnitude }
}

/// Two fp4 of a byte, each in the low bits of 16.
#[expect(
    clippy::inline_always,
    reason = "it must become part of the loop that is compiled for each processor"
)]
#[inline(always)]
const fn apart(byte: u8) -> u32 {
    let byte = byte as u32;
    byte & 0x0f | (byte & 0xf0) << 12
}

/// The value of a binary16, exactly.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
pub fn widen_fp16(word: u16) -> f32 {
    let magnitude = u32::from(word & 0x7fff) << 13;
    // As bits of a binary32 the exponent is 112 too small; a product with 2^112 also makes
    // subnormals normal.
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = magnitude | 0x7f80_0000;
    let bits = if magnitude >= 0x0f80_0000 { special } else { finite };
    f32::from_bits(bits | u32::from(word & 0x8000) << 16)
}

/// The bf16 of a binary32, nearest even.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
const fn rounded(value: f32) -> u32 {
    let bits = value.to_bits();
    let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    if value.is_nan() { NAN.cast_unsigned() as u32 } else { nearest }
}

/// The binary32 of an fp4 in the low four bits of `code`.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
const fn widened_fp4(code: u32) -> f32 {
    let magnitude = code & 7;
    // Normal values have their fields in binary32's places. 0.5 is the only subnormal.
    let normal = (magnitude << 22) + (126 << 23);
    let bits = match magnitude {
        0 => 0,
        1 => 126 << 23,
        _ => normal,
    };
    f32::from_bits(bits | (code & 8) << 28)
}

/// Powers of two: where no result is subnormal or infinite, the scale is added to the exponent, of
/// two elements at a time.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn powers_to_bf16(table: &[f32; 256], scales: &[u8], elements: &[u8], out: &mut [u8]) {
    const BYTES: usize = MX_BLOCK / 2;
    let blocks = elements.as_chunks::<BYTES>().0.iter();
    for ((block, scale), out) in blocks.zip(scales).zip(out.as_chunks_mut::<{ 2 * MX_BLOCK }>().0) {
        let out = out.as_chunks_mut::<4>().0;
        if !PLAIN_SCALES.contains(scale) {
            let scale = table[usize::from(*scale)];
            for (byte, out) in block.iter().zip(out) {
                let byte = u32::from(*byte);
                let (low, high) = (widened_fp4(byte) * scale, widened_fp4(byte >> 4) * scale);
                *out = (rounded(low) | rounded(high) << 16).to_le_bytes();
            }
            continue;
        }
        let exponent = (u32::from(*scale) - 1) << 7;
        let exponents = exponent | exponent << 16;
        for (byte, out) in block.iter().zip(out) {
            let pair = apart(*byte);
            let [one, two, four] = [pair, pair >> 1, pair >> 2];
            let subnormal = one & !two & !four & 0x0001_0001;
            let some = ((one | two | four) & 0x0001_0001) * 0xffff;
            let magnitudes = ((pair & 0x0007_0007) << 6) + exponents - (subnormal << 6);
            *out = (magnitudes & some | (pair & 0x0008_0008) << 12).to_le_bytes();
        }
    }
}

/// Scales of any value.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn nibbles_to_bf16(table: &[f32; 256], scales: &[u8], elements: &[u8], out: &mut [u8]) {
    const BYTES: usize = NV_BLOCK / 2;
    let blocks = elements.as_chunks::<BYTES>().0.iter();
    for ((block, scale), out) in blocks.zip(scales).zip(out.as_chunks_mut::<{ 2 * NV_BLOCK }>().0) {
        let scale = table[usize::from(*scale)];
        for (byte, out) in block.iter().zip(out.as_chunks_mut::<4>().0) {
            let byte = u32::from(*byte);
            let (low, high) = (widened_fp4(byte) * scale, widened_fp4(byte >> 4) * scale);
            *out = (rounded(low) | rounded(high) << 16).to_le_bytes();
        }
    }
}

/// Elements of a byte each.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn bytes_to_bf16(values: &[f32; 256], table: &[f32; 256], scales: &[u8], elements: &[u8], out: &mut [u8]) {
    let blocks = elements.as_chunks::<MX_BLOCK>().0.iter();
    for ((block, scale), out) in blocks.zip(scales).zip(out.as_chunks_mut::<{ 2 * MX_BLOCK }>().0) {
        let scale = table[usize::from(*scale)];
        for (code, out) in block.iter().zip(out.as_chunks_mut::<2>().0) {
            let [low, high, ..] = rounded(values[usize::from(*code)] * scale).to_le_bytes();
            *out = [low, high];
        }
    }
}

#[cfg(test)]
mod tests {
    use lamina_reference::{Format as Slow, Scales, expanded};
    use proptest::prelude::*;

    use super::*;
    use crate::testing;

    fn slow(format: Format) -> Slow {
        format.name().parse().unwrap()
    }

    fn fast(scaled: &Scaled, elements: &[u8], scales: &[u8]) -> Vec<u8> {
        let mut out = vec![0xa5; scales.len() * 2 * scaled.block()];
        scaled.to_bf16(elements, scales, &mut out);
        let mut plain = vec![0xa5; out.len()];
        scaled.to_bf16_portably(elements, scales, &mut plain);
        assert!(plain == out, "plain Rust gives other values");
        // Where there is VBMI, the kernel that does without it has only single blocks left.
        #[cfg(target_arch = "x86_64")]
        if avx512::is_available() && matches!(scaled.format, Format::Fp8E4m3fn | Format::Fp8E5m2) {
            // SAFETY: the processor has AVX-512F and BW.
            unsafe { avx512::fp8_to_bf16(scaled.format, &scaled.scales, scales, elements, &mut plain) };
            assert!(plain == out, "without VBMI there are other values");
        }
        out
    }

    const OF_MX: [Format; 5] =
        [Format::Fp4E2m1, Format::Fp6E3m2, Format::Fp6E2m3, Format::Fp8E4m3fn, Format::Fp8E5m2];

    #[test]
    fn every_element_with_every_power_is_what_the_reference_says() {
        for format in OF_MX {
            let scaled = Scaled::mx(format);
            let codes: Vec<u8> = (0..=u8::MAX).collect();
            let blocks = codes.len() / scaled.block_bytes();
            let count = (blocks * MX_BLOCK) as u64;
            for scale in 0..=u8::MAX {
                let scales = vec![scale; blocks];
                let want = expanded(slow(format), &codes, count, MX_BLOCK as u64, Scales::Powers(&scales));
                assert!(fast(&scaled, &codes, &scales) == want, "{format} times 2^{scale} − 127");
            }
        }
    }

    #[test]
    fn every_element_with_every_fp8_is_what_the_reference_says() {
        // One of a checkpoint's size, and what overflows, vanishes, is none, and none at all.
        let factors = [1.0, 1.0 / 2688.0, 3e38, 1e-38, 1.4e-45, 0.0, -0.7, f32::INFINITY, f32::NAN];
        for all in factors {
            let scaled = Scaled::nvfp4(all);
            let codes: Vec<u8> = (0..8).map(|pair| (2 * pair) | ((2 * pair + 1) << 4)).collect();
            for scale in 0..=u8::MAX {
                let want = expanded(Slow::Fp4E2m1, &codes, 16, NV_BLOCK as u64, Scales::Fp8(&[scale], all));
                assert!(fast(&scaled, &codes, &[scale]) == want, "{scale:#x} times {all}");
            }
        }
    }

    proptest! {
        #[test]
        fn many_blocks_are_what_the_reference_says(
            seed: u64, blocks in 0_usize..70, which in 0_usize..6, factor: u32,
            scales in prop::collection::vec(any::<u8>(), 70),
        ) {
            let (scales, all) = (&scales[..blocks], f32::from_bits(factor));
            let scaled = OF_MX.get(which).map_or_else(|| Scaled::nvfp4(all), |format| Scaled::mx(*format));
            let elements = testing::bytes(seed, blocks * scaled.block_bytes());
            let (count, size) = ((blocks * scaled.block()) as u64, scaled.block() as u64);
            let slow_scales = if which < 5 { Scales::Powers(scales) } else { Scales::Fp8(scales, all) };
            let want = expanded(slow(scaled.format), &elements, count, size, slow_scales);
            prop_assert!(fast(&scaled, &elements, scales) == want);
        }
    }
}
