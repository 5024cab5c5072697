//! The transpose in AVX2: 256 elements at a time.
//!
//! Bits move between registers as they do between words in the portable kernel: a *swap* exchanges one bit of the register's number with one
//! of the bit's place in its byte. Three swaps turn the registers of eight (of int4: four) planes into those of eight elements (of int4: four
//! pairs), or back. Bytes move by unpacking: of pairs of registers, low and high, it moves the first bit of the byte's place in
//! the lane to the register's number, the other three up, and puts last the bit in which the pairs differ.
//!
//! Lanes are kept apart: the low ones have the first half of a step's elements. Comments give numbers as bits: register, place in the lane.
//! `e` counts elements in a group of eight, `g` groups, `c` bytes of an element; of int4, `b` counts its pairs in a group.

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_and_si256, _mm256_castsi128_si256,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_inserti128_si256, _mm256_loadu_si256,
    _mm256_set1_epi8, _mm256_setzero_si256, _mm256_slli_epi16, _mm256_srli_epi16, _mm256_storeu_si256,
    _mm256_unpackhi_epi8, _mm256_unpacklo_epi8, _mm256_xor_si256,
};

use super::{PlaneBlock, Planes, fold::Fold, parts, parts_mut};
use crate::{BlockWords, format::Format};

/// A step of a plane.
type Step = [u8; 32];
/// Half a register's bytes.
type Half = [u8; 16];

type Four = [__m256i; 4];
type Eight = [__m256i; 8];
type Sixteen = [__m256i; 16];

/// Exchanges the bit of the registers' numbers that is `D` with the bit of the places in the byte that is `S`: 1, 2 or 4.
#[inline]
#[target_feature(enable = "avx2")]
fn swap<const N: usize, const D: usize, const S: i32>(v: &mut [__m256i; N]) {
    let mask = _mm256_set1_epi8(match S {
        1 => 0x55,
        2 => 0x33,
        _ => 0x0f,
    });
    for pair in 0..N / 2 {
        let a = pair / D * 2 * D + pair % D;
        // What crosses into the neighbouring byte is masked out.
        let differ = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16::<S>(v[a]), v[a + D]), mask);
        v[a + D] = _mm256_xor_si256(v[a + D], differ);
        v[a] = _mm256_xor_si256(v[a], _mm256_slli_epi16::<S>(differ));
    }
}

/// From eight planes to eight elements, or back.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(v: &mut Eight) {
    swap::<8, 4, 4>(v);
    swap::<8, 2, 2>(v);
    swap::<8, 1, 1>(v);
}

/// Unpacks the pairs of registers `D` apart.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack<const N: usize, const D: usize>(v: &mut [__m256i; N]) {
    for pair in 0..N / 2 {
        let a = pair / D * 2 * D + pair % D;
        (v[a], v[a + D]) = (_mm256_unpacklo_epi8(v[a], v[a + D]), _mm256_unpackhi_epi8(v[a], v[a + D]));
    }
}

/// A step of each of `N` planes.
#[inline]
#[target_feature(enable = "avx2")]
fn load_planes<'a, const N: usize>(step_of: impl Fn(usize) -> &'a Step) -> [__m256i; N] {
    let mut v = [_mm256_setzero_si256(); N];
    for (bit, v) in v.iter_mut().enumerate() {
        // SAFETY: the array has the register's 32 bytes, and the load needs no alignment.
        *v = unsafe { _mm256_loadu_si256(step_of(bit).as_ptr().cast()) };
    }
    v
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(place: &mut Step, value: __m256i) {
    // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), value) }
}

/// Registers of which one has its low lane at `FIRST` of the first half of `words`, the high lane as far into the second half,
/// the next one's `STRIDE` lanes on.
#[inline]
#[target_feature(enable = "avx2")]
fn load_words<const N: usize, const FIRST: usize, const STRIDE: usize>(words: &[u8]) -> [__m256i; N] {
    let (low, high) = words.as_chunks::<16>().0.split_at(N * STRIDE);
    let mut v = [_mm256_setzero_si256(); N];
    for k in 0..N {
        let (low, high): (&Half, &Half) = (&low[FIRST + k * STRIDE], &high[FIRST + k * STRIDE]);
        // SAFETY: the arrays have a lane's 16 bytes, and the loads need no alignment.
        let (low, high) =
            unsafe { (_mm_loadu_si128(low.as_ptr().cast()), _mm_loadu_si128(high.as_ptr().cast())) };
        v[k] = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
    }
    v
}

/// Writes registers as [`load_words`] reads them.
#[inline]
#[target_feature(enable = "avx2")]
fn store_words<const N: usize, const FIRST: usize, const STRIDE: usize>(words: &mut [u8], v: &[__m256i; N]) {
    let (low, high) = words.as_chunks_mut::<16>().0.split_at_mut(N * STRIDE);
    for k in 0..N {
        let (low, high): (&mut Half, &mut Half) =
            (&mut low[FIRST + k * STRIDE], &mut high[FIRST + k * STRIDE]);
        // SAFETY: the arrays have a lane's 16 bytes, and the stores need no alignment.
        unsafe {
            _mm_storeu_si128(low.as_mut_ptr().cast(), _mm256_castsi256_si128(v[k]));
            _mm_storeu_si128(high.as_mut_ptr().cast(), _mm256_extracti128_si256::<1>(v[k]));
        }
    }
}

/// Adds the sign's plane, the last, to the others.
#[inline]
#[target_feature(enable = "avx2")]
fn fold<const N: usize>(v: &mut [__m256i; N]) {
    for plane in 0..N - 1 {
        v[plane] = _mm256_xor_si256(v[plane], v[N - 1]);
    }
}

/// Joins planes of eight bits.
#[inline]
#[target_feature(enable = "avx2")]
fn join_8<const FOLD: bool>(planes: &[&[Step]; 8], words: &mut [u8]) {
    for (step, words) in words.as_chunks_mut::<256>().0.iter_mut().enumerate() {
        let mut v: Eight = load_planes(|bit| &planes[bit][step]);
        if FOLD {
            fold(&mut v);
        }
        transpose(&mut v); // e2 e1 e0, g3 g2 g1 g0
        unpack::<8, 4>(&mut v); // g3 e1 e0, g2 g1 g0 e2
        unpack::<8, 2>(&mut v); // g3 g2 e0, g1 g0 e2 e1
        unpack::<8, 1>(&mut v); // g3 g2 g1, g0 e2 e1 e0
        store_words::<8, 0, 1>(words, &v);
    }
}

/// Joins planes of 16 bits.
#[target_feature(enable = "avx2")]
fn join_16(planes: &[&[Step; 8]; 16], words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<512>().0.iter_mut().enumerate() {
        let mut v = [_mm256_setzero_si256(); 16];
        let mut low: Eight = load_planes(|bit| &planes[bit][step]);
        transpose(&mut low);
        let mut high: Eight = load_planes(|bit| &planes[8 + bit][step]);
        transpose(&mut high);
        for e in 0..8 {
            (v[2 * e], v[2 * e + 1]) = (low[e], high[e]);
        } // e2 e1 e0 c, g3 g2 g1 g0
        words_in_order(&mut v); // g3 g2 g1 g0, e2 e1 e0 c
        store_words::<16, 0, 1>(words, &v);
    }
}

/// Four rounds of unpacking: the registers' number becomes the place in the lane, and that the register's number.
#[inline]
#[target_feature(enable = "avx2")]
fn words_in_order(v: &mut Sixteen) {
    unpack::<16, 8>(v);
    unpack::<16, 4>(v);
    unpack::<16, 2>(v);
    unpack::<16, 1>(v);
}

/// Joins planes of 32 bits.
#[target_feature(enable = "avx2")]
fn join_32(planes: &[&[Step; 4]; 32], words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<1024>().0.iter_mut().enumerate() {
        let mut c: [Eight; 4] = [
            load_planes(|bit| &planes[bit][step]),
            load_planes(|bit| &planes[8 + bit][step]),
            load_planes(|bit| &planes[16 + bit][step]),
            load_planes(|bit| &planes[24 + bit][step]),
        ];
        transpose(&mut c[0]);
        transpose(&mut c[1]);
        transpose(&mut c[2]);
        transpose(&mut c[3]);
        join_half_32::<0>(&c, words);
        join_half_32::<1>(&c, words);
    }
}

/// Puts the four bytes of the elements together whose e2 is `E2`.
#[inline]
#[target_feature(enable = "avx2")]
fn join_half_32<const E2: usize>(c: &[Eight; 4], words: &mut [u8]) {
    let mut v = [_mm256_setzero_si256(); 16];
    for k in 0..16 {
        v[k] = c[k % 4][4 * E2 + k / 4];
    } // e1 e0 c1 c0, g3 g2 g1 g0
    words_in_order(&mut v); // g3 g2 g1 g0, e1 e0 c1 c0
    store_words::<16, E2, 2>(words, &v);
}

/// Joins planes of four bits.
#[target_feature(enable = "avx2")]
fn join_4<const FOLD: bool>(planes: &[&[Step; 32]; 4], words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let mut v: Four = load_planes(|bit| &planes[bit][step]); // p1 p0, with bits b1 b0 n, n the nibble
        if FOLD {
            fold(&mut v);
        }
        swap::<4, 1, 1>(&mut v); // p1 n, with bits b1 b0 p0
        swap::<4, 2, 2>(&mut v); // b0 n, with bits b1 p1 p0
        swap::<4, 1, 4>(&mut v); // b0 b1, with bits n p1 p0; g3 g2 g1 g0
        unpack::<4, 1>(&mut v); // b0 g3, g2 g1 g0 b1
        unpack::<4, 2>(&mut v); // g2 g3, g1 g0 b1 b0
        v.swap(1, 2);
        store_words::<4, 0, 1>(words, &v);
    }
}

/// The first `N` planes, `STEPS` steps each.
fn whole<'a, const N: usize, const STEPS: usize>(planes: &Planes<'a>) -> [&'a [Step; STEPS]; N] {
    std::array::from_fn(|plane| planes[plane].as_chunks().0.first_chunk().expect("every format's planes"))
}

/// Puts planes together to words; see [`super::join`].
#[target_feature(enable = "avx2")]
pub(super) fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
    match (format.bits(), Fold::of(format)) {
        (4, Fold::No) => join_4::<false>(&whole(planes), words),
        (4, _) => join_4::<true>(&whole(planes), words),
        (8, Fold::No) => join_8::<false>(&parts(planes, 512), words),
        (8, _) => join_8::<true>(&parts(planes, 512), words),
        (16, _) => join_16(&whole(planes), words),
        _ => join_32(&whole(planes), words),
    }
}

/// Puts planes together to bytes; see [`super::join_bytes`].
#[target_feature(enable = "avx2")]
pub(super) fn join_bytes(planes: &[&[u8]; 8], bytes: &mut [u8]) {
    join_8::<false>(&parts(planes, bytes.len() / 8), bytes);
}

/// Splits into planes of eight bits.
#[inline]
#[target_feature(enable = "avx2")]
fn split_8<const FOLD: bool>(words: &[u8], planes: &mut [&mut [Step]; 8]) {
    for (step, words) in words.as_chunks::<256>().0.iter().enumerate() {
        let mut v = load_words::<8, 0, 1>(words); // g3 g2 g1, g0 e2 e1 e0
        unpack::<8, 4>(&mut v); // g0 g2 g1, e2 e1 e0 g3
        unpack::<8, 2>(&mut v); // g0 e2 g1, e1 e0 g3 g2
        unpack::<8, 1>(&mut v); // g0 e2 e1, e0 g3 g2 g1
        unpack::<8, 4>(&mut v); // e0 e2 e1, g3 g2 g1 g0
        let mut v = [v[0], v[4], v[1], v[5], v[2], v[6], v[3], v[7]];
        transpose(&mut v);
        if FOLD {
            fold(&mut v);
        }
        for bit in 0..8 {
            store(&mut planes[bit][step], v[bit]);
        }
    }
}

/// Splits into planes of 16 bits.
#[target_feature(enable = "avx2")]
fn split_16(words: &BlockWords, planes: &mut [[Step; 8]; 16]) {
    for (step, words) in words.as_chunks::<512>().0.iter().enumerate() {
        let mut v = load_words::<16, 0, 1>(words); // g3 g2 g1 g0, e2 e1 e0 c
        words_in_order(&mut v); // e2 e1 e0 c, g3 g2 g1 g0
        for c in 0..2 {
            let mut v = [v[c], v[2 + c], v[4 + c], v[6 + c], v[8 + c], v[10 + c], v[12 + c], v[14 + c]];
            transpose(&mut v);
            for bit in 0..8 {
                store(&mut planes[15 - 8 * c - bit][step], v[bit]);
            }
        }
    }
}

/// Splits into planes of 32 bits.
#[target_feature(enable = "avx2")]
fn split_32(words: &BlockWords, planes: &mut [[Step; 4]; 32]) {
    for (step, words) in words.as_chunks::<1024>().0.iter().enumerate() {
        let mut v = load_words::<16, 0, 2>(words); // of e2 = 0: g3 g2 g1 g0, e1 e0 c1 c0
        words_in_order(&mut v); // e1 e0 c1 c0, g3 g2 g1 g0
        let mut w = load_words::<16, 1, 2>(words);
        words_in_order(&mut w);
        for c in 0..4 {
            let mut v = [v[c], v[4 + c], v[8 + c], v[12 + c], w[c], w[4 + c], w[8 + c], w[12 + c]];
            transpose(&mut v);
            for bit in 0..8 {
                store(&mut planes[31 - 8 * c - bit][step], v[bit]);
            }
        }
    }
}

/// Splits into planes of four bits.
#[target_feature(enable = "avx2")]
fn split_4<const FOLD: bool>(words: &BlockWords, planes: &mut [[Step; 32]; 4]) {
    for (step, words) in words.as_chunks::<128>().0.iter().enumerate() {
        let mut v = load_words::<4, 0, 1>(words); // g3 g2, g1 g0 b1 b0
        unpack::<4, 2>(&mut v); // g1 g2, g0 b1 b0 g3
        unpack::<4, 1>(&mut v); // g1 g0, b1 b0 g3 g2
        unpack::<4, 2>(&mut v); // b1 g0, b0 g3 g2 g1
        unpack::<4, 1>(&mut v); // b1 b0, g3 g2 g1 g0; with bits n p1 p0
        swap::<4, 2, 4>(&mut v); // n b0, with bits b1 p1 p0
        swap::<4, 1, 2>(&mut v); // n p1, with bits b1 b0 p0
        swap::<4, 2, 1>(&mut v); // p0 p1, with bits b1 b0 n
        v.swap(1, 2);
        if FOLD {
            fold(&mut v);
        }
        for plane in 0..4 {
            store(&mut planes[3 - plane][step], v[plane]);
        }
    }
}

/// Splits words into planes; see [`super::split`].
#[target_feature(enable = "avx2")]
pub(super) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    match (format.bits(), Fold::of(format)) {
        (4, Fold::No) => split_4::<false>(words, parts_mut(planes)),
        (4, _) => split_4::<true>(words, parts_mut(planes)),
        (8, fold) => {
            let mut planes = parts_mut::<8, 16, 32>(planes).each_mut().map(|plane| &mut plane[..]);
            planes.reverse();
            match fold {
                Fold::No => split_8::<false>(words, &mut planes),
                _ => split_8::<true>(words, &mut planes),
            }
        }
        (16, _) => split_16(words, parts_mut(planes)),
        _ => split_32(words, parts_mut(planes)),
    }
}

/// Splits bytes into planes; see [`super::split_bytes`].
#[target_feature(enable = "avx2")]
pub(super) fn split_bytes(bytes: &[u8], planes: [&mut [u8]; 8]) {
    split_8::<false>(bytes, &mut planes.map(|plane| plane.as_chunks_mut().0));
}
