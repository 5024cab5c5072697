//! Values in another format: divide by a power of two, round to nearest even, saturate.
//!
//! The words come with every plane outside the view's mask zero; that truncated value is what is
//! converted. Infinities saturate to the largest finite value like everything else beyond it; NaN
//! becomes the target's quiet NaN with its sign, as `ml_dtypes` casts it, and the largest value
//! with its sign where the target has no NaN.
//!
//! Every source value is a binary32 value, and so is its product with the scale, exactly, unless it
//! is so large that it saturates or so small that every target rounds it to zero. So the loops work
//! on binary32, without branches, and vectorise. bf16 to fp8, which is what is asked for most, is
//! looked up in tables where there are registers for them ([`avx512`]).

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::{
    format::Format,
    scaled::{widen_fp16, widened},
};

/// Elements that are converted at once to be put two to a byte.
const AT_ONCE: usize = 64;

/// Converts elements of one format to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Converter {
    from: Format,
    to: Format,
    target: Target,
    scale: i32,
    /// 2^−scale.
    factor: f32,
}

/// What the arithmetic needs to know of a target.
#[derive(Clone, Copy, Debug)]
struct Target {
    /// Bits of binary32's mantissa that it lacks.
    dropped: u32,
    /// Its mantissa bits.
    mantissa: u32,
    /// How much binary32's exponent bias exceeds its own.
    rebias: u32,
    /// Bits of its smallest normal value in binary32.
    smallest_normal: u32,
    /// The binary32 value whose last mantissa bit is its smallest subnormal value; adding it rounds
    /// to that.
    magic: f32,
    /// The largest finite magnitude, in its own bits.
    most: u32,
    nan: u32,
    /// Where its sign is.
    sign: u32,
}

impl Converter {
    pub(super) fn new(from: Format, to: Format, scale: i32) -> Self {
        let (most, nan) = match to {
            Format::Bf16 => (0x7f7f, 0x7fc0),
            Format::Fp8E4m3fn => (0x7e, 0x7f),
            Format::Fp8E5m2 => (0x7b, 0x7e),
            Format::Fp6E3m2 | Format::Fp6E2m3 => (0x1f, 0x1f),
            Format::Fp4E2m1 => (7, 7),
            other => unreachable!("no view converts to {other}"),
        };
        let bias = (1 << (to.exponent_bits() - 1)) - 1;
        let mantissa = to.mantissa_bits();
        let rebias = 127 - bias;
        // bf16 has binary32's exponents: its subnormals round like its normals, and nothing is
        // below its range.
        let smallest_normal = if rebias == 0 { 0 } else { (rebias + 1) << 23 };
        let magic = f32::from_bits((rebias + 1 + 23 - mantissa) << 23);
        let target = Target {
            dropped: 23 - mantissa,
            mantissa,
            rebias,
            smallest_normal,
            magic,
            most,
            nan,
            sign: to.sign_plane().expect("a float"),
        };
        Self { from, to, target, scale, factor: 2_f32.powi(-scale) }
    }

    /// Puts the converted elements of `words` into `out`, which holds just those.
    pub(super) fn convert(&self, words: &[u8], out: &mut [u8]) {
        if !self.to.is_nibble() {
            return self.convert_whole(words, out);
        }
        let width = self.from.bits() as usize / 8;
        for (words, out) in words.chunks(AT_ONCE * width).zip(out.chunks_mut(AT_ONCE / 2)) {
            let mut elements = [0; AT_ONCE];
            self.convert_whole(words, &mut elements[..words.len() / width]);
            for ([low, high], out) in elements.as_chunks().0.iter().zip(out) {
                *out = low | high << 4;
            }
        }
    }

    /// As [`Self::convert`], to elements of whole bytes.
    fn convert_whole(&self, words: &[u8], out: &mut [u8]) {
        let bytes = if self.target.sign > 7 { 2 } else { 1 };
        match (self.from, bytes) {
            (Format::Fp32, 2) => fp32_to_16(self.target, self.factor, words, out),
            (Format::Fp32, _) => fp32_to_8(self.target, self.factor, words, out),
            (Format::Bf16, _) => self.bf16_to_8(words, out),
            (Format::Fp16, 2) => fp16_to_16(self.target, self.factor, words, out),
            (Format::Fp16, _) => fp16_to_8(self.target, self.factor, words, out),
            (Format::Fp8E4m3fn, _) => fp8_e4m3fn_to_8(self.target, self.factor, words, out),
            (Format::Fp8E5m2, _) => fp8_e5m2_to_8(self.target, self.factor, words, out),
            (Format::Fp6E3m2, _) => fp6_e3m2_to_8(self.target, self.factor, words, out),
            (Format::Fp6E2m3, _) => fp6_e2m3_to_8(self.target, self.factor, words, out),
            (other, _) => unreachable!("no view converts from {other}"),
        }
    }

    /// Whether there are tables of what it converts to.
    fn has_tables(&self) -> bool {
        matches!(self.to, Format::Fp8E4m3fn | Format::Fp8E5m2)
    }

    fn bf16_to_8(&self, words: &[u8], out: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if self.has_tables() && avx512::is_available() {
            // SAFETY: the processor has AVX-512F, BW and VBMI.
            return unsafe { avx512::bf16_to_8(self.target, self.scale, words, out) };
        }
        bf16_to_8(self.target, self.factor, words, out);
    }
}

impl Target {
    /// `value · factor` in this format, whatever `value` is.
    #[expect(
        clippy::inline_always,
        reason = "it must become part of the loop that is compiled for each processor"
    )]
    #[inline(always)]
    fn round(self, value: f32, factor: f32) -> u32 {
        let sign = value.to_bits() >> 31 << self.sign;
        let scaled = (value * factor).to_bits() & 0x7fff_ffff;
        let is_nan = value.to_bits() & 0x7fff_ffff > 0x7f80_0000;
        // Nearest even of a normal: add just less than half, and one more if the kept part is odd.
        let odd = scaled >> self.dropped & 1;
        let normal = (scaled + ((1 << (self.dropped - 1)) - 1) + odd) >> self.dropped;
        let normal = normal.wrapping_sub(self.rebias << self.mantissa);
        // Of a subnormal: the addition rounds, and its last bits are the answer.
        let subnormal = (f32::from_bits(scaled) + self.magic).to_bits().wrapping_sub(self.magic.to_bits());
        let magnitude = if scaled < self.smallest_normal { subnormal } else { normal };
        sign | if is_nan { self.nan } else { magnitude.min(self.most) }
    }
}

/// The loop from one source to one width of target.
macro_rules! converter {
    ($name:ident, $word:ty, $out:ty, $widen:expr) => {
        #[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
        #[expect(clippy::cast_possible_truncation, reason = "targets have no more bits than that")]
        fn $name(target: Target, factor: f32, words: &[u8], out: &mut [u8]) {
            let words = words.chunks_exact(size_of::<$word>());
            for (word, out) in words.zip(out.chunks_exact_mut(size_of::<$out>())) {
                let word = <$word>::from_le_bytes(word.try_into().expect("an element"));
                let converted = target.round(($widen)(word), factor) as $out;
                out.copy_from_slice(&converted.to_le_bytes());
            }
        }
    };
}

converter!(fp32_to_16, u32, u16, f32::from_bits);
converter!(fp32_to_8, u32, u8, f32::from_bits);
converter!(bf16_to_8, u16, u8, |word: u16| f32::from_bits(u32::from(word) << 16));
converter!(fp16_to_16, u16, u16, widen_fp16);
converter!(fp16_to_8, u16, u8, widen_fp16);
converter!(fp8_e4m3fn_to_8, u8, u8, |word| widened(Format::Fp8E4m3fn, word));
converter!(fp8_e5m2_to_8, u8, u8, |word| widened(Format::Fp8E5m2, word));
converter!(fp6_e3m2_to_8, u8, u8, |word| widened(Format::Fp6E3m2, word));
converter!(fp6_e2m3_to_8, u8, u8, |word| widened(Format::Fp6E2m3, word));

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::{super::spelling::MAX_SCALE, *};

    #[cfg(feature = "portable")]
    #[test]
    fn nothing_is_looked_up_in_registers_in_plain_rust() {
        assert!(!avx512::is_available());
    }

    #[test]
    fn tables_convert_every_bf16_at_every_scale_as_binary32_does() {
        if !avx512::is_available() {
            return;
        }
        let words: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let [mut want, mut got] = [vec![0; 1 << 16], vec![0; 1 << 16]];
        for to in [Format::Fp8E4m3fn, Format::Fp8E5m2] {
            for scale in -MAX_SCALE..=MAX_SCALE {
                let converter = Converter::new(Format::Bf16, to, scale);
                bf16_to_8(converter.target, converter.factor, &words, &mut want);
                // SAFETY: the processor has AVX-512F, BW and VBMI.
                unsafe { avx512::bf16_to_8(converter.target, scale, &words, &mut got) };
                let differs = want.iter().zip(&got).position(|(want, got)| want != got);
                assert_eq!(differs, None, "{to}@{scale}");
            }
        }
    }

    #[test]
    fn elements_of_a_last_step_that_is_not_full_are_converted() {
        // The last ones are NaN.
        let words: Vec<u8> = (0x3c00..0x3c78_u16).chain(0x7f80..0x7ff8).flat_map(u16::to_le_bytes).collect();
        let converter = Converter::new(Format::Bf16, Format::Fp8E4m3fn, 0);
        for elements in (0..=words.len() / 2).step_by(8) {
            let [mut want, mut got] = [vec![0; elements], vec![0; elements]];
            bf16_to_8(converter.target, converter.factor, &words[..2 * elements], &mut want);
            converter.convert(&words[..2 * elements], &mut got);
            assert_eq!(got, want);
        }
    }
}
