//! The last levels of few elements, in place: each level's bits are spread over the elements still
//! alive. Short stages one after the other would mostly wait for each other.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_cmpge_epu8_mask, _mm512_mask_add_epi8, _mm512_mask_cmpeq_epi8_mask,
    _mm512_mask_cmpge_epu8_mask, _mm512_mask_sub_epi8, _mm512_set1_epi8, _mm512_setzero_si512,
    _mm512_sub_epi8, _pdep_u64,
};

use super::super::{Malformed, masks::read};
use super::{
    bits::{aligned, store_words},
    first,
    walk::Cursor,
};

/// Takes `alive` elements of `N` vectors, that have come to `x`, down all the rest of the levels.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi2")]
pub(super) fn few<const N: usize>(
    cursor: &mut Cursor<'_>,
    mut alive: usize,
    mut x: [__m512i; N],
) -> Result<[__m512i; N], Malformed> {
    let one = _mm512_set1_epi8(-1);
    // Down to the first level with leaves all are alive, and their bits lie side by side.
    let mut bits = [0; 8];
    while cursor.level < cursor.longest {
        let above = _mm512_set1_epi8(cursor.leaves.cast_signed());
        let at = cursor.step(alive)?;
        store_words(&mut bits, aligned(cursor.stream, at));
        for (x, bits) in x.iter_mut().zip(bits) {
            let y = _mm512_add_epi8(*x, _mm512_sub_epi8(*x, above));
            *x = _mm512_mask_sub_epi8(y, bits, y, one);
        }
        if cursor.count[cursor.level - 1] > 0 {
            break;
        }
    }
    let leaves = _mm512_set1_epi8(cursor.leaves.cast_signed());
    let mut goes_on = [0; N];
    let mut left = alive;
    alive = 0;
    for (x, goes_on) in x.iter().zip(&mut goes_on) {
        *goes_on = _mm512_cmpge_epu8_mask(*x, leaves) & first(left);
        alive += goes_on.count_ones() as usize;
        left = left.saturating_sub(super::STEP);
    }
    while cursor.level < cursor.longest {
        let above = _mm512_set1_epi8(cursor.leaves.cast_signed());
        let mut at = cursor.step(alive)?;
        let leaves = _mm512_set1_epi8(cursor.leaves.cast_signed());
        alive = 0;
        for (x, goes_on) in x.iter_mut().zip(&mut goes_on) {
            let count = goes_on.count_ones() as usize;
            let bytes = cursor.stream[at / 8..].first_chunk().expect("eight bytes");
            let mut bits = u64::from_le_bytes(*bytes) >> (at % 8);
            if count > 57 {
                bits = read(cursor.stream, at);
            }
            let bits = _pdep_u64(bits, *goes_on);
            at += count;
            *x = _mm512_mask_add_epi8(*x, *goes_on, *x, _mm512_sub_epi8(*x, above));
            *x = _mm512_mask_sub_epi8(*x, bits, *x, one);
            *goes_on = _mm512_mask_cmpge_epu8_mask(*goes_on, *x, leaves);
            alive += goes_on.count_ones() as usize;
        }
    }
    Ok(x)
}

/// Which of `alive` elements have come to `leaf`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn at<const N: usize>(x: &[__m512i; N], alive: usize, leaf: __m512i) -> [u64; N] {
    std::array::from_fn(|index| {
        _mm512_mask_cmpeq_epi8_mask(first(alive.saturating_sub(index * super::STEP)), x[index], leaf)
    })
}

/// Elements that have all come to one node.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn all<const N: usize>(node: u8) -> [__m512i; N] {
    let mut x = [_mm512_setzero_si512(); N];
    x.fill(_mm512_set1_epi8(node.cast_signed()));
    x
}
