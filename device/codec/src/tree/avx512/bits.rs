//! Bits of a stream, wherever they begin, 512 at a time.

use std::arch::x86_64::{
    __m512i, _mm512_andnot_si512, _mm512_max_epi64, _mm512_set_epi64, _mm512_set1_epi64,
    _mm512_setzero_si512, _mm512_shrdv_epi64, _mm512_sllv_epi64, _mm512_storeu_si512, _mm512_sub_epi64,
};

use super::{STEP, load};

/// 512 bits of `stream` from bit `at` on.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi2")]
pub(super) fn aligned(stream: &[u8], at: usize) -> __m512i {
    let shift = _mm512_set1_epi64((at % 8) as i64);
    let bytes: &[u8; STEP + 8] = stream[at / 8..].first_chunk().expect("as many bytes behind it");
    let [here, behind] =
        [0, 8].map(|from| load(bytes[from..][..STEP].try_into().expect("a register's bytes")));
    _mm512_shrdv_epi64(here, behind, shift)
}

/// Ones for the first `count` of 512 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn before(count: usize) -> __m512i {
    let places = _mm512_set_epi64(448, 384, 320, 256, 192, 128, 64, 0);
    let here = _mm512_sub_epi64(_mm512_set1_epi64(count as i64), places);
    let ones = _mm512_set1_epi64(-1);
    _mm512_andnot_si512(_mm512_sllv_epi64(ones, _mm512_max_epi64(here, _mm512_setzero_si512())), ones)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store_words(words: &mut [u64], value: __m512i) {
    let words: &mut [u64; 8] = words.first_chunk_mut().expect("a register's words");
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), value) };
}
