//! Checks with AVX-512 and GFNI: a row is a register, and the processor multiplies in the field.

use std::arch::x86_64::{
    __m512i, __mmask64, _mm_cvtsi128_si64, _mm_unpackhi_epi64, _mm_xor_si128, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi512_si256, _mm512_extracti64x4_epi64,
    _mm512_gf2p8mul_epi8, _mm512_loadu_si512, _mm512_maskz_loadu_epi8, _mm512_set1_epi8,
    _mm512_setzero_si512, _mm512_unpackhi_epi8, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32,
    _mm512_unpacklo_epi8, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32, _mm512_xor_si512,
};

use super::{COEFFICIENTS, ROW, Span};

/// Planes whose sums are folded together.
const FOUR: usize = 4;

#[target_feature(enable = "avx512f,avx512bw,gfni")]
pub(super) fn checks(bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
    for (planes, checks) in planes.chunks(FOUR).zip(checks.chunks_mut(FOUR)) {
        let four = four(bundle, planes).to_le_bytes();
        for (check, bytes) in checks.iter_mut().zip(four.as_chunks().0) {
            *check = u16::from_le_bytes(*bytes);
        }
    }
}

#[target_feature(enable = "bmi1,avx512f,avx512bw,gfni")]
pub(super) fn differ(bundle: &[u8], planes: &[Span], checks: &[u16]) -> u32 {
    // Of planes without bytes only the check has to be looked at, and many have none.
    let (mut left, mut differ) = (0_u32, 0);
    for (at, (plane, check)) in planes.iter().zip(checks).enumerate() {
        left |= u32::from(plane.length > 0) << at;
        differ |= u32::from(plane.length == 0 && *check != 0) << at;
    }
    while left != 0 {
        let (mut four, mut numbers, mut stored) = ([Span::default(); FOUR], [0; FOUR], 0);
        for (at, (plane, number)) in four.iter_mut().zip(&mut numbers).enumerate() {
            if left != 0 {
                *number = left.trailing_zeros() as usize;
                *plane = planes[*number];
                stored |= u64::from(checks[*number]) << (16 * at);
                left &= left - 1;
            }
        }
        let unequal = self::four(bundle, &four) ^ stored;
        if unequal != 0 {
            for (at, bytes) in unequal.to_le_bytes().as_chunks().0.iter().enumerate() {
                differ |= u32::from(*bytes != [0; 2]) << numbers[at];
            }
        }
    }
    differ
}

/// The checks of four planes, or fewer, the first in the lowest bits; zero for those that are not there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn four(bundle: &[u8], planes: &[Span]) -> u64 {
    let sums = |plane: Option<&Span>| match plane {
        Some(plane) if plane.length > 0 => sums(&bundle[plane.range()]),
        _ => _mm512_setzero_si512(),
    };
    let [a, b, c, d] = [0, 1, 2, 3].map(|at| planes.get(at));
    fold(sums(a), sums(b), sums(c), sums(d))
}

/// The sums of a plane: pairs of bytes, whose sums are the check.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn sums(plane: &[u8]) -> __m512i {
    // A loop of its own for the raw planes of 16-bit formats.
    if let Ok(rows) = plane.as_chunks::<ROW>().0.try_into()
        && plane.len() == 4 * ROW
    {
        let rows: &[[u8; ROW]; 4] = rows;
        return sums_of(rows, _mm512_setzero_si512());
    }
    let (rows, rest) = plane.as_chunks();
    sums_of(rows, if rest.is_empty() { _mm512_setzero_si512() } else { load_part(rest) })
}

/// The sums of rows and a last one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn sums_of(rows: &[[u8; ROW]], last: __m512i) -> __m512i {
    let (mut sum, mut weighted) = (last, last);
    let alpha = _mm512_set1_epi8(3);
    for row in rows.iter().rev() {
        let row = load(row);
        sum = _mm512_xor_si512(sum, row);
        weighted = _mm512_xor_si512(_mm512_gf2p8mul_epi8(weighted, alpha), row);
    }
    let weighted = _mm512_gf2p8mul_epi8(weighted, load(&COEFFICIENTS));
    _mm512_xor_si512(_mm512_unpacklo_epi8(sum, weighted), _mm512_unpackhi_epi8(sum, weighted))
}

/// The sum of the pairs of each register, the first in the lowest bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fold(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> u64 {
    let ab = _mm512_xor_si512(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
    let cd = _mm512_xor_si512(_mm512_unpacklo_epi16(c, d), _mm512_unpackhi_epi16(c, d));
    let all = _mm512_xor_si512(_mm512_unpacklo_epi32(ab, cd), _mm512_unpackhi_epi32(ab, cd));
    let half = _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    let half = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    _mm_cvtsi128_si64(_mm_xor_si128(half, _mm_unpackhi_epi64(half, half))).cast_unsigned()
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
