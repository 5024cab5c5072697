//! Packs with AVX2 and BMI2: `pdep` gives each level a byte, and eight are multiplied at a time.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_add_ss, _mm_cvtsi64_si128, _mm_cvtss_f32, _mm_movehdup_ps, _mm_movehl_ps,
    _mm256_add_ps, _mm256_castps256_ps128, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_extractf128_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _pdep_u64,
};
use std::ops::Range;

use super::{OCTETS, PackedSide, TOKENS};

/// See [`super::fit`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub(super) fn fit<const PACK: usize>(side: &PackedSide<'_>, channels: Range<usize>, most: u8) -> bool {
    super::fit::<PACK>(side, channels, most, |word, mask| _pdep_u64(word, mask))
}

/// See [`super::unpack`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub(super) fn unpack<const PACK: usize>(side: &PackedSide<'_>, channels: Range<usize>, values: &mut [u8]) {
    super::unpack::<PACK>(side, channels, values, |word, mask| _pdep_u64(word, mask));
}

/// See [`super::dot`]. Each octet has a register, so that no sum waits for the one before.
#[target_feature(enable = "avx2,fma,bmi2")]
pub(super) fn dot<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    query: &[f32],
    sums: &mut [f32; TOKENS],
) {
    let mut all = [_mm256_setzero_ps(); OCTETS];
    for (channel, query) in channels.zip(query) {
        let query = _mm256_set1_ps(*query);
        for (octet, all) in all.iter_mut().enumerate() {
            *all = _mm256_fmadd_ps(levels::<PACK>(side, channel, octet), query, *all);
        }
    }
    for (sums, all) in sums.as_chunks_mut().0.iter_mut().zip(all) {
        store(sums, all);
    }
}

/// See [`super::weigh`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub(super) fn weigh<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    scaled: &[f32; TOKENS],
    out: &mut [f32],
) {
    let mut weights = [_mm256_setzero_ps(); OCTETS];
    for (weight, scaled) in weights.iter_mut().zip(scaled.as_chunks().0) {
        *weight = load(scaled);
    }
    for (channel, out) in channels.zip(out) {
        // Two, so that a sum waits for every other one.
        let mut sums = [_mm256_setzero_ps(); 2];
        for (octet, weight) in weights.iter().enumerate() {
            let sum = &mut sums[octet % 2];
            *sum = _mm256_fmadd_ps(levels::<PACK>(side, channel, octet), *weight, *sum);
        }
        *out += sum(_mm256_add_ps(sums[0], sums[1]));
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,bmi2")]
fn levels<const PACK: usize>(side: &PackedSide<'_>, channel: usize, octet: usize) -> __m256 {
    let levels = side.octet::<PACK>(channel, octet, |word, mask| _pdep_u64(word, mask));
    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(levels.cast_signed())))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum(all: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(from: &[f32; 8]) -> __m256 {
    // SAFETY: the array has the register's 32 bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(to: &mut [f32; 8], value: __m256) {
    // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) };
}
