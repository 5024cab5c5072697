//! Packs with AVX-512 and BMI2: `pdep` gives each level a byte, and sixteen are multiplied at a
//! time.

use std::arch::x86_64::{
    __m512, _mm_set_epi64x, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_reduce_add_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps, _pdep_u64,
};
use std::ops::Range;

use super::{OCTETS, PackedSide, TOKENS};

/// Pairs of octets of a channel.
const PAIRS: usize = OCTETS / 2;

/// See [`super::dot`]. Each pair of octets has a register, so that no sum waits for the one before.
#[target_feature(enable = "avx2,fma,bmi2,avx512f")]
pub(super) fn dot<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    query: &[f32],
    sums: &mut [f32; TOKENS],
) {
    let mut all = [_mm512_setzero_ps(); PAIRS];
    for (channel, query) in channels.zip(query) {
        let query = _mm512_set1_ps(*query);
        for (pair, all) in all.iter_mut().enumerate() {
            *all = _mm512_fmadd_ps(levels::<PACK>(side, channel, pair), query, *all);
        }
    }
    for (sums, all) in sums.as_chunks_mut().0.iter_mut().zip(all) {
        store(sums, all);
    }
}

/// See [`super::weigh`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f")]
pub(super) fn weigh<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    scaled: &[f32; TOKENS],
    out: &mut [f32],
) {
    let mut weights = [_mm512_setzero_ps(); PAIRS];
    for (weight, scaled) in weights.iter_mut().zip(scaled.as_chunks().0) {
        *weight = load(scaled);
    }
    for (channel, out) in channels.zip(out) {
        let mut sum = _mm512_setzero_ps();
        for (pair, weight) in weights.iter().enumerate() {
            sum = _mm512_fmadd_ps(levels::<PACK>(side, channel, pair), *weight, sum);
        }
        *out += _mm512_reduce_add_ps(sum);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f")]
fn levels<const PACK: usize>(side: &PackedSide<'_>, channel: usize, pair: usize) -> __m512 {
    let octet = |octet| side.octet::<PACK>(channel, octet, |word, mask| _pdep_u64(word, mask)).cast_signed();
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x(octet(2 * pair + 1), octet(2 * pair))))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(from: &[f32; 16]) -> __m512 {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [f32; 16], value: __m512) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) };
}
