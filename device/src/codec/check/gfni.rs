//! Checks with AVX-512 and GFNI: a row is a register, and the processor multiplies in the field.

use std::arch::x86_64::{
    __m128i, __m512i, __mmask64, _mm_cvtsi128_si64, _mm_unpackhi_epi64, _mm_xor_si128,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi512_si256,
    _mm512_extracti64x4_epi64, _mm512_gf2p8mul_epi8, _mm512_loadu_si512, _mm512_maskz_loadu_epi8,
    _mm512_set1_epi8, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8, _mm512_xor_si512,
};

use super::{COEFFICIENTS, ROW, Span};

#[target_feature(enable = "avx512f,avx512bw,gfni")]
pub(super) fn checks(bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
    let coefficients = load(&COEFFICIENTS);
    for (plane, check) in planes.iter().zip(checks) {
        *check = if plane.length == 0 { 0 } else { one(&bundle[plane.range()], coefficients) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn one(plane: &[u8], coefficients: __m512i) -> u16 {
    let (rows, rest) = plane.as_chunks::<ROW>();
    let mut sum = load_part(rest);
    let mut weighted = sum;
    let alpha = _mm512_set1_epi8(3);
    for row in rows.iter().rev() {
        let row = load(row);
        sum = _mm512_xor_si512(sum, row);
        weighted = _mm512_xor_si512(_mm512_gf2p8mul_epi8(weighted, alpha), row);
    }
    fold(sum, _mm512_gf2p8mul_epi8(weighted, coefficients))
}

/// The sum of the bytes of `a`, and that of the bytes of `b` above it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fold(a: __m512i, b: __m512i) -> u16 {
    // Bytes of both in turn, so that both are folded at once.
    let pairs = _mm512_xor_si512(_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
    let half = _mm256_xor_si256(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64::<1>(pairs));
    let half: __m128i = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    let word = _mm_cvtsi128_si64(_mm_xor_si128(half, _mm_unpackhi_epi64(half, half))).cast_unsigned();
    let word = word ^ word >> 32;
    let [low, high, ..] = (word ^ word >> 16).to_le_bytes();
    u16::from_le_bytes([low, high])
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(row: &[u8; ROW]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
}

/// A row that ends early, with zeros for what is missing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_part(part: &[u8]) -> __m512i {
    debug_assert!(part.len() < ROW, "a whole row is no part");
    let mask: __mmask64 = (1 << (part.len() % ROW)) - 1;
    // SAFETY: the mask has a bit for each byte of the slice, and bytes outside a mask are not touched.
    unsafe { _mm512_maskz_loadu_epi8(mask, part.as_ptr().cast()) }
}
