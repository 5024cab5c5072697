//! A block of bf16 taken apart to values and planes, and its planes put to their places: what is to
//! be known of them is found in registers.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi64, _mm512_alignr_epi64, _mm512_cmpge_epu64_mask, _mm512_cmple_epu64_mask,
    _mm512_mask_xor_epi64, _mm512_min_epu64, _mm512_permutex2var_epi8, _mm512_popcnt_epi64,
    _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_i64x2, _mm512_srli_epi16,
    _mm512_testn_epi64_mask, _mm512_unpackhi_epi64, _mm512_unpacklo_epi64, _mm512_xor_si512,
};

use super::{
    super::whole::{BESIDE, PLANE, STEPS},
    STEP, load, store,
};
use crate::{
    BlockWords,
    check::gfni::{check_of_rows, fold},
    plane::avx512::planes_beside,
};

/// Takes a block apart to values and the planes beside the exponent's, most significant first.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(in super::super) fn take_apart(
    words: &BlockWords,
    values: &mut [u8],
    planes: &mut [[u8; PLANE]; BESIDE],
) {
    let low_bytes = load(&LOW_BYTES);
    for (pair, values) in words.as_chunks::<{ 2 * STEP }>().0.iter().zip(values.as_chunks_mut().0) {
        let [a, b] = [0, 1].map(|line| _mm512_srli_epi16::<7>(load(&pair.as_chunks().0[line])));
        store(values, _mm512_permutex2var_epi8(a, low_bytes, b));
    }
    for (step, words) in words.as_chunks().0.iter().enumerate() {
        for (plane, line) in planes.iter_mut().rev().zip(planes_beside(words)) {
            store(&mut plane.as_chunks_mut().0[step], line);
        }
    }
}

/// Copies planes to their places and finds their checks: which are noise, unless a plane below the
/// signs that has as many ones as noise repeats a word.
#[target_feature(enable = "avx512f,avx512bw,avx512vpopcntdq,gfni")]
pub(in super::super) fn place(
    planes: &[[u8; PLANE]; BESIDE],
    places: &mut [&mut [u8; PLANE]; BESIDE],
    their_checks: &mut [u16; BESIDE],
) -> Option<u8> {
    let [mut checks, mut ones] = [[_mm512_setzero_si512(); BESIDE]; 2];
    let all = _mm512_set1_epi64(-1);
    // Words of signs that are the one before, and whether any of the other planes has such a word.
    let (mut repeats, mut least) = (0, all);
    for (index, (((plane, place), check), ones)) in
        planes.iter().zip(places).zip(&mut checks).zip(&mut ones).enumerate()
    {
        let lines: [__m512i; STEPS] = std::array::from_fn(|line| load(&plane.as_chunks().0[line]));
        for (place, line) in place.as_chunks_mut().0.iter_mut().zip(lines) {
            store(place, line);
        }
        *check = check_of_rows(lines);
        let [a, b, c, d] = lines.map(|line| _mm512_popcnt_epi64(line));
        *ones = _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
        // How each word differs from the one behind it; the last one has none.
        let [a, b, c, d] = lines;
        let differ = |line, next| _mm512_xor_si512(line, _mm512_alignr_epi64::<1>(next, line));
        let last = _mm512_mask_xor_epi64(all, 0x7f, d, _mm512_alignr_epi64::<1>(d, d));
        let differ = [differ(a, b), differ(b, c), differ(c, d), last];
        if index == 0 {
            // Whole channels have one sign.
            let [a, b, c, d] = differ.map(|words| u32::from(_mm512_testn_epi64_mask(words, words)));
            repeats = (a | b << 8 | c << 16 | d << 24).count_ones() as usize;
        } else {
            let [a, b, c, d] = differ;
            least = _mm512_min_epu64(least, _mm512_min_epu64(_mm512_min_epu64(a, b), _mm512_min_epu64(c, d)));
        }
    }
    let ones = sums(&ones);
    let few = _mm512_set1_epi64(2 * PLANE as i64);
    let many = _mm512_set1_epi64(6 * PLANE as i64);
    let mut even = _mm512_cmpge_epu64_mask(ones, few) & _mm512_cmple_epu64_mask(ones, many);
    if repeats > PLANE / 64 {
        even &= !1;
    }
    let unclear = _mm512_testn_epi64_mask(least, least) > 0 && even & !1 > 0;
    *their_checks = fold(&checks);
    (!unclear).then_some(even)
}

/// The sums of the words of each register.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums(of: &[__m512i; 8]) -> __m512i {
    let two = |at: usize| {
        let (a, b) = (of[at], of[at + 1]);
        _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    };
    // Lanes of the first operand, then of the second: even ones and odd ones.
    let four = |a, b| {
        _mm512_add_epi64(
            _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b),
            _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b),
        )
    };
    four(four(two(0), two(2)), four(two(4), two(6)))
}

/// The places of the low bytes of the words in two registers.
const LOW_BYTES: [u8; STEP] = {
    let mut places = [0; STEP];
    let mut at = 0;
    while at < STEP {
        places[at] = 2 * at as u8;
        at += 1;
    }
    places
};
