//! bf16 to fp8 in 16-bit lanes of AVX-512, 64 elements a step.
//!
//! Let `E` be the bf16 exponent of the target's smallest normal, the scale included: the 64 scales there are leave it far from either end of
//! bf16's exponents. A magnitude at or above it, less `E − 1` in the exponent's place, is the target's with more mantissa bits; one below it
//! is a significand to be shifted right by `E` less its exponent. The significand is the lesser of the two just where it is not wanted, so
//! their maximum is the answer, but for its last bits. It is shifted so that the answer's last bit is a lane's bit 8 (a subnormal too small to round
//! to anything is shifted out), and rounded: bytes 1 of the lanes are the magnitudes then.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi16, _mm512_and_si512, _mm512_cmpgt_epu16_mask, _mm512_loadu_si512,
    _mm512_mask_blend_epi16, _mm512_mask_sub_epi16, _mm512_max_epi16, _mm512_min_epi16, _mm512_min_epu16,
    _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_sllv_epi16, _mm512_srli_epi16,
    _mm512_storeu_si512, _mm512_sub_epi16, _mm512_ternarylogic_epi32, _mm512_test_epi16_mask,
};

use super::Target;

/// Elements of a step.
const STEP: usize = 64;
/// bf16's mantissa bits.
const MANTISSA: u32 = 7;
/// bf16's infinity.
const INFINITY: i16 = 0x7f80;
/// The upper byte of every lane of two registers.
const UPPER: [u8; STEP] = {
    let mut index = [0; STEP];
    let mut lane = 0;
    while lane < STEP {
        index[lane] = 2 * lane.to_le_bytes()[0] + 1;
        lane += 1;
    }
    index
};

/// Whether this processor has what is needed here.
pub(super) fn is_available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vbmi")
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; 64], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
}

/// What the lanes' arithmetic needs to know of a target.
#[derive(Clone, Copy)]
struct Lanes {
    /// What is taken from a normal magnitude.
    below_normals: __m512i,
    /// What a magnitude's exponent exceeds the shift to the left by.
    below_shifts: __m512i,
    /// The largest shift to the left, that of normals.
    most_shift: __m512i,
    /// The largest finite magnitude before that shift.
    most: __m512i,
    nan: __m512i,
}

impl Lanes {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(target: Target, scale: i32) -> Self {
        let all = |value: i32| _mm512_set1_epi16(i16::try_from(value).expect("of 16 bits"));
        let normal = target.rebias.cast_signed() + 1 + scale;
        // Bits of a normal's mantissa that the target lacks.
        let dropped = MANTISSA - target.mantissa;
        let most_shift = (u8::BITS - dropped).cast_signed();
        Self {
            below_normals: all((normal - 1) << MANTISSA),
            below_shifts: all(normal - most_shift),
            most_shift: all(most_shift),
            most: all((target.most << dropped).cast_signed()),
            nan: all((target.nan << u8::BITS).cast_signed()),
        }
    }

    /// Magnitudes of the values in `words`, in the upper bytes of their lanes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn magnitudes(self, words: __m512i) -> __m512i {
        let all = |value| _mm512_set1_epi16(value);
        let magnitude = _mm512_and_si512(words, all(0x7fff));
        let exponent = _mm512_srli_epi16::<MANTISSA>(magnitude);
        // A negative shift counts as one of more bits than there are, which leaves nothing.
        let shift = _mm512_min_epi16(self.most_shift, _mm512_sub_epi16(exponent, self.below_shifts));
        // (words & 0x7f) | 0x80. A bf16 subnormal has no such upper bit, but is shifted out.
        let significand = _mm512_ternarylogic_epi32::<0xea>(words, all(0x7f), all(0x80));
        let value = _mm512_max_epi16(_mm512_sub_epi16(magnitude, self.below_normals), significand);
        let value = _mm512_sllv_epi16(_mm512_min_epu16(value, self.most), shift);
        // Nearest even: add just less than half, and one more if the kept part is odd.
        let odd = _mm512_test_epi16_mask(value, all(0x100));
        let rounded = _mm512_add_epi16(value, all(0x7f));
        let rounded = _mm512_mask_sub_epi16(rounded, odd, rounded, all(-1));
        let is_nan = _mm512_cmpgt_epu16_mask(magnitude, all(INFINITY));
        _mm512_mask_blend_epi16(is_nan, rounded, self.nan)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn convert(self, first: &[u8; 64], second: &[u8; 64], out: &mut [u8; STEP]) {
        let (first, second) = (load(first), load(second));
        let upper = load(&UPPER);
        let signs = _mm512_permutex2var_epi8(first, upper, second);
        let magnitudes = _mm512_permutex2var_epi8(self.magnitudes(first), upper, self.magnitudes(second));
        // (signs & 0x80) | magnitudes.
        store(out, _mm512_ternarylogic_epi32::<0xea>(signs, _mm512_set1_epi8(i8::MIN), magnitudes));
    }
}

/// Puts the bf16 values in `words`, each divided by 2^`scale`, into `out` as the 8-bit format `target`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn bf16_to_8(target: Target, scale: i32, words: &[u8], out: &mut [u8]) {
    let lanes = Lanes::new(target, scale);
    let (pairs, last_words) = words.as_chunks::<{ 2 * STEP }>();
    let (outs, last_out) = out.as_chunks_mut();
    for (pair, out) in pairs.iter().zip(outs) {
        let ([first, second], []) = pair.as_chunks() else { unreachable!("two halves") };
        lanes.convert(first, second, out);
    }
    if !last_words.is_empty() {
        let mut pair = [[0; STEP]; 2];
        pair.as_flattened_mut()[..last_words.len()].copy_from_slice(last_words);
        let mut out = [0; STEP];
        lanes.convert(&pair[0], &pair[1], &mut out);
        last_out.copy_from_slice(&out[..last_out.len()]);
    }
}
