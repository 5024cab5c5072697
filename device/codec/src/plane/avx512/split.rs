//! Splitting words: joining, backwards.

use std::{
    arch::x86_64::{
        __m512i, _mm256_storeu_si256, _mm512_castsi512_si256, _mm512_extracti64x4_epi64,
        _mm512_multishift_epi64_epi8, _mm512_or_si512, _mm512_permutex2var_epi8, _mm512_set1_epi8,
        _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_storeu_si512,
        _mm512_ternarylogic_epi64,
    },
    hint::black_box,
};

use super::{Eight, Line, line, load, store, transpose, unpack};
use crate::{
    BlockWords,
    format::Format,
    plane::{PlaneBlock, fold::Fold, parts_mut},
};

/// For splitting bytes: byte `p` of the transposed matrices is plane `p`, folded with the sign if
/// `fold`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn planes_of_bytes(fold: bool) -> __m512i {
    let select = if fold { 0x80c0_a090_8884_8281_u64 } else { 0x8040_2010_0804_0201 };
    _mm512_set1_epi64(select.cast_signed())
}

/// Takes apart eight lines in which the quadwords are a byte of each of eight planes, of eight
/// groups: a line of each plane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn scatter(v: &Eight) -> Eight {
    // Groups are numbered by the register r2 r1 r0, the lane, and s. r2 r1 r0, s p2 p1 p0
    let v = unpack::<8, 4>(*v); // s r1 r0, p2 p1 p0 r2
    let v = unpack::<8, 2>(v); // s p2 r0, p1 p0 r2 r1
    let v = unpack::<8, 1>(v); // s p2 p1, p0 r2 r1 r0
    let even = line!(group => (group & 1) << 6 | (group >> 1 & 3) << 4 | group >> 3);
    let odd = line!(group => (group & 1) << 6 | (group >> 1 & 3) << 4 | 8 | group >> 3);
    let mut planes = v;
    for plane in 0..8 {
        let order = if plane % 2 == 0 { even } else { odd };
        planes[plane] = _mm512_permutex2var_epi8(v[plane / 2], order, v[4 + plane / 2]);
    }
    planes
}

/// Splits into planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes, and nothing else uses them meanwhile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn split_8(fold: bool, words: &[u8], planes: [*mut u8; 8]) {
    let select = planes_of_bytes(fold);
    let descending = line!(at => at & 15 ^ 7);
    for (step, words) in words.as_chunks::<512>().0.iter().enumerate() {
        let mut v = [_mm512_setzero_si512(); 8];
        for (v, line) in v.iter_mut().zip(words.as_chunks().0) {
            *v = transpose(_mm512_shuffle_epi8(load(line), descending), select);
        }
        let v = scatter(&v);
        for bit in 0..8 {
            // SAFETY: the steps before this one and this one take 64 bytes of a plane for 512 of
            // the words.
            unsafe { _mm512_storeu_si512(planes[bit].add(64 * step).cast(), v[bit]) };
        }
    }
}

/// Takes apart 16 lines of 16-bit elements: a line of each plane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn scatter_16(words: &[__m512i; 16]) -> [Eight; 2] {
    let select = planes_of_bytes(false);
    let low = line!(at => 2 * (at ^ 7));
    let high = line!(at => 2 * (at ^ 7) + 1);
    let [mut v, mut w] = [[_mm512_setzero_si512(); 8]; 2];
    for r in 0..8 {
        let (a, b) = (words[2 * r], words[2 * r + 1]);
        v[r] = transpose(_mm512_permutex2var_epi8(a, low, b), select);
        w[r] = transpose(_mm512_permutex2var_epi8(a, high, b), select);
    }
    [scatter(&v), scatter(&w)]
}

/// Takes the planes beside the exponent's out of 16 lines of bf16: a line of each, the lowest bit's
/// first and the sign's last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(crate) fn planes_beside(words: &[u8; 1024]) -> Eight {
    let select = planes_of_bytes(false);
    let low = line!(at => 2 * (at ^ 7));
    let high = line!(at => 2 * (at ^ 7) + 1);
    let sign = _mm512_set1_epi8(i8::MIN);
    let mut v = [_mm512_setzero_si512(); 8];
    for (v, pair) in v.iter_mut().zip(words.as_chunks::<128>().0) {
        let [a, b] = [0, 1].map(|line| load(&pair.as_chunks().0[line]));
        let (low, high) = (_mm512_permutex2var_epi8(a, low, b), _mm512_permutex2var_epi8(a, high, b));
        // Of the first operand's ones the second, of its zeros the third.
        *v = transpose(_mm512_ternarylogic_epi64::<0xca>(sign, high, low), select);
    }
    scatter(&v)
}

/// Splits into planes of 16 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_16(words: &BlockWords, planes: &mut [[Line; 4]; 16]) {
    for (step, words) in words.as_chunks::<1024>().0.iter().enumerate() {
        let lines: &[Line; 16] = words.as_chunks().0.try_into().expect("16 lines");
        let mut v = [_mm512_setzero_si512(); 16];
        for k in 0..16 {
            v[k] = load(&lines[k]);
        }
        let [v, w] = scatter_16(&v);
        for bit in 0..8 {
            store(&mut planes[15 - bit][step], v[bit]);
            store(&mut planes[7 - bit][step], w[bit]);
        }
    }
}

/// Writes a register's lower half to `lower` and its upper one to `upper`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn store_halves(lower: &mut [u8; 32], upper: &mut [u8; 32], value: __m512i) {
    // SAFETY: the arrays have half of a register's bytes, and the stores need no alignment.
    unsafe {
        _mm256_storeu_si256(lower.as_mut_ptr().cast(), _mm512_castsi512_si256(value));
        _mm256_storeu_si256(upper.as_mut_ptr().cast(), _mm512_extracti64x4_epi64::<1>(value));
    }
}

/// Splits 16 lines into planes of 32 bits, a half line of each: if `HIGH` the last 16 planes, else
/// the first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_half_32<const HIGH: bool>(lines: &[Line; 16], step: usize, planes: &mut [[[u8; 32]; 4]; 32]) {
    // Bytes c1 c0 of elements g4 … g0 e2 e1 e0: register g4 … g1, lane and place g0 e2, e1 e0 c1
    // c0. Of c1, the planes' upper bit, one is taken; lanes become c0 g4.
    let order = line!(at => (at >> 4 & 1) << 6 | (at & 15 ^ 7) << 2 | at >> 5);
    let order = _mm512_or_si512(order, _mm512_set1_epi8(if HIGH { 2 } else { 0 }));
    // So that what was loaded for the other half is not kept on the stack.
    let lines = black_box(lines);
    let mut v = [_mm512_setzero_si512(); 8];
    for k in 0..8 {
        let bytes = _mm512_permutex2var_epi8(load(&lines[k]), order, load(&lines[8 + k]));
        v[k] = transpose(bytes, planes_of_bytes(false));
    } // g3 g2 g1, g0 p2 p1 p0
    let v = unpack::<8, 4>(v); // g0 g2 g1, p2 p1 p0 g3
    let v = unpack::<8, 2>(v); // g0 p2 g1, p1 p0 g3 g2
    let v = unpack::<8, 1>(v); // g0 p2 p1, p0 g3 g2 g1
    let v = unpack::<8, 4>(v); // p0 p2 p1, g3 g2 g1 g0
    let (upper, lower) = planes.split_at_mut(16);
    let [upper, lower] = if HIGH { upper } else { lower }.as_chunks_mut::<8>().0 else {
        unreachable!("they are two bytes")
    };
    for plane in 0..8 {
        let v = v[4 * (plane % 2) + plane / 2];
        store_halves(&mut lower[7 - plane][step], &mut upper[7 - plane][step], v);
    }
}

/// Splits into planes of 32 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_32(words: &BlockWords, planes: &mut [[[u8; 32]; 4]; 32]) {
    for (step, words) in words.as_chunks::<1024>().0.iter().enumerate() {
        let lines: &[Line; 16] = words.as_chunks().0.try_into().expect("16 lines");
        split_half_32::<false>(lines, step, planes);
        split_half_32::<true>(lines, step, planes);
    }
}

/// Splits into planes of four bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_4(fold: bool, words: &BlockWords, planes: &mut [[Line; 16]; 4]) {
    let select = if fold { 0x80c0_a090_080c_0a09_u64 } else { 0x8040_2010_0804_0201 };
    let select = _mm512_set1_epi64(select.cast_signed());
    // Rows have an element of the first group in the low half and one of the second in the high
    // half.
    let low = _mm512_set1_epi64(0x0004_080c_1014_181c);
    let high = _mm512_set1_epi64(0x1c20_2428_2c30_3438);
    let nibble = _mm512_set1_epi64(0x0f0f_0f0f_0f0f_0f0f);
    let even = line!(group => (group & 1) << 6 | (group >> 2 & 3) << 4 | (group >> 4) << 1 | group >> 1 & 1);
    let odd =
        line!(group => (group & 1) << 6 | (group >> 2 & 3) << 4 | 8 | (group >> 4) << 1 | group >> 1 & 1);
    for (step, words) in words.as_chunks::<256>().0.iter().enumerate() {
        let mut v = [_mm512_setzero_si512(); 4];
        for (v, line) in v.iter_mut().zip(words.as_chunks().0) {
            let line = load(line);
            let (a, b) = (_mm512_multishift_epi64_epi8(low, line), _mm512_multishift_epi64_epi8(high, line));
            *v = transpose(_mm512_ternarylogic_epi64::<0xca>(nibble, a, b), select);
        } // r1 r0, g1 g0 p1 p0
        let v = unpack::<4, 2>(v); // g1 r0, g0 p1 p0 r1
        let v = unpack::<4, 1>(v); // g1 g0, p1 p0 r1 r0
        let v = unpack::<4, 2>(v); // p1 g0, p0 r1 r0 g1
        for plane in 0..4 {
            let order = if plane % 2 == 0 { even } else { odd };
            let (a, b) = (v[plane & 2], v[plane & 2 | 1]);
            store(&mut planes[3 - plane][step], _mm512_permutex2var_epi8(a, order, b));
        }
    }
}

/// Splits words into planes; see [`super::split`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(in crate::plane) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    let fold = Fold::of(format) != Fold::No;
    match format.bits() {
        4 => split_4(fold, words, parts_mut(planes)),
        8 => {
            let planes = parts_mut::<8, 512, 1>(planes).each_mut();
            let planes = std::array::from_fn(|plane| planes[7 - plane].as_mut_ptr().cast());
            // SAFETY: the planes have 512 bytes each, and the pointers are all that knows them.
            unsafe { split_8(fold, words, planes) }
        }
        16 => split_16(words, parts_mut(planes)),
        _ => split_32(words, parts_mut(planes)),
    }
}

/// Splits bytes into planes; see [`super::split_bytes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(in crate::plane) fn split_bytes(bytes: &[u8], planes: [&mut [u8]; 8]) {
    let planes = planes.map(|plane| plane[..bytes.len() / 8].as_mut_ptr());
    // SAFETY: that asserted the planes' lengths, and the pointers are all that knows them.
    unsafe { split_8(false, bytes, planes) }
}
