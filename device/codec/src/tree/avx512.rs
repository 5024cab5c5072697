//! The levels of a stream, 64 elements at a time: as [`super::compact`], with AVX-512's compress
//! and expand.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "numbers of a block's levels, values and symbols fit in a byte"
)]

mod bits;
mod decode;
mod encode;
mod few;
mod plan;
mod stage;
mod table;
mod three_and_three;
mod walk;
mod whole;

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm256_set_m128i, _mm512_add_epi8, _mm512_add_epi64, _mm512_castsi128_si512,
    _mm512_castsi256_si512, _mm512_cmpge_epu16_mask, _mm512_cvtepi64_epi16, _mm512_gf2p8affine_epi64_epi8,
    _mm512_inserti64x4, _mm512_loadu_si512, _mm512_madd_epi16, _mm512_maskz_compress_epi8,
    _mm512_maskz_compress_epi16, _mm512_maskz_mov_epi16, _mm512_max_epu8, _mm512_min_epu8,
    _mm512_permutexvar_epi8, _mm512_popcnt_epi8, _mm512_reduce_add_epi32, _mm512_reduce_add_epi64,
    _mm512_sad_epu8, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_sub_epi8, _mm512_testn_epi8_mask,
};

pub(super) use self::{
    decode::{Decoder, decode, decode_bf16},
    encode::{coder, levels},
    plan::plan,
    whole::{place, take_apart},
};
use super::{
    MAX_ELEMENTS, RARE, Scratch,
    code::{LONGEST, WINDOW},
    compact, masks,
    plan::Census,
};

/// Elements worked on at a time.
const STEP: usize = 64;
/// Words of a stage's masks.
const MASKS: usize = MAX_ELEMENTS / STEP;
/// Bytes of a stage's elements, and of a register behind them.
const BUFFER: usize = MAX_ELEMENTS + STEP;
/// Bytes that a decoder looks at, however long it is told the stream is: header, levels and
/// escapes.
const MAX_STREAM: usize = 16 + MAX_ELEMENTS * LONGEST / 8 + MAX_ELEMENTS;

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; STEP]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// The first bytes of a register.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_first(bytes: &[u8; 16]) -> __m512i {
    // SAFETY: the array has the 16 bytes, and the load needs no alignment.
    _mm512_castsi128_si512(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_at(bytes: &[u8], at: usize) -> __m512i {
    load(bytes[at..at + STEP].try_into().expect("a step"))
}

/// As [`load_at`], of as many bytes as a stage has at most.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_in(bytes: &[u8; BUFFER], at: usize) -> __m512i {
    assert!(at <= BUFFER - STEP, "a register");
    load_at(bytes, at)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; STEP], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_at(bytes: &mut [u8], at: usize, value: __m512i) {
    store((&mut bytes[at..at + STEP]).try_into().expect("a step"), value);
}

/// As [`store_at`], of as many bytes as a stage has at most.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_in(bytes: &mut [u8; BUFFER], at: usize, value: __m512i) {
    assert!(at <= BUFFER - STEP, "a register");
    store_at(bytes, at, value);
}

/// The lowest `count` bits, all if it is more than 64.
#[inline]
fn first(count: usize) -> u64 {
    if count >= STEP { u64::MAX } else { (1 << count) - 1 }
}

/// What the values of a block are. Those within 32 of the largest are counted eight values at a
/// time: as one-hot bytes, of which eight make a matrix of bits, whose columns' ones are what there
/// is of each value. Zeros are counted apart; blocks with yet others are left to [`masks`].
#[target_feature(
    enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512bitalg,avx512vpopcntdq,gfni"
)]
pub(super) fn census(values: &[u8], planes: usize, scratch: &mut Scratch) -> Option<Census> {
    let chunks = values.as_chunks::<STEP>().0;
    let (mut largest, mut least) = (_mm512_setzero_si512(), _mm512_set1_epi8(-1));
    for chunk in chunks {
        let chunk = load(chunk);
        largest = _mm512_max_epu8(largest, chunk);
        least = _mm512_min_epu8(least, chunk);
    }
    let mut zeros = 0;
    if _mm512_testn_epi8_mask(least, least) != 0 {
        for chunk in chunks {
            let chunk = load(chunk);
            zeros += _mm512_testn_epi8_mask(chunk, chunk).count_ones();
        }
    }
    let [largest, least] = [largest, least].map(|register| {
        let mut lanes = [0; STEP];
        store(&mut lanes, register);
        lanes
    });
    let largest = largest.into_iter().max().unwrap_or(0);
    let least = least.into_iter().min().unwrap_or(0);
    // An index is cut to six bits, by which such values differ.
    let are_near = least > 0 && usize::from(largest - least) < STEP;
    let low = largest.saturating_sub(WINDOW as u8 - 1).max(1);

    let mut counts = [_mm512_setzero_si512(); WINDOW / 8];
    let mut left = values.len() as u64 - u64::from(zeros);
    let together = load(&TOGETHER);
    // What is left mostly is among the first 16, which are looked for together.
    for (sixteen, counts) in counts.as_chunks_mut::<2>().0.iter_mut().enumerate().rev() {
        if left == 0 {
            break;
        }
        let firsts = [0, 8].map(|more| low.wrapping_add(16 * sixteen as u8 + more));
        // A byte holds the ones of 31 times eight elements.
        for chunks in chunks.chunks(16) {
            let ones = if are_near { ones::<true>(chunks, firsts) } else { ones::<false>(chunks, firsts) };
            for (counts, ones) in counts.iter_mut().zip(ones) {
                let sums = _mm512_sad_epu8(_mm512_permutexvar_epi8(together, ones), _mm512_setzero_si512());
                *counts = _mm512_add_epi64(*counts, sums);
            }
        }
        left -= counts.iter().map(|counts| _mm512_reduce_add_epi64(*counts).cast_unsigned()).sum::<u64>();
    }
    if left > 0 {
        return match chunks.len() {
            16 => masks::count::<16>(values, planes, scratch),
            32 => masks::count::<32>(values, planes, scratch),
            64 => masks::count::<64>(values, planes, scratch),
            128 => masks::count::<128>(values, planes, scratch),
            // A part of a block.
            _ => compact::census(values),
        };
    }
    let mut census = Census::new();
    census.add(0, zeros)?;
    let [a, b, c, d] = counts.map(|counts| _mm512_cvtepi64_epi16(counts));
    let [a, b] = [_mm256_set_m128i(b, a), _mm256_set_m128i(d, c)];
    let counts = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
    let often = _mm512_cmpge_epu16_mask(counts, _mm512_set1_epi16(RARE as i16));
    let rare = _mm512_maskz_mov_epi16(!often, counts);
    census.escapes += _mm512_reduce_add_epi32(_mm512_madd_epi16(rare, _mm512_set1_epi16(1))).cast_unsigned();
    let numbers = _mm512_add_epi8(_mm512_set1_epi8(low.cast_signed()), load(&COUNTING));
    let (mut values, mut words) = ([0; STEP], [0; STEP]);
    store(&mut values, _mm512_maskz_compress_epi8(often.into(), numbers));
    store(&mut words, _mm512_maskz_compress_epi16(often, counts));
    census.values[census.found..][..WINDOW].copy_from_slice(&values[..WINDOW]);
    for (count, word) in census.counts[census.found..].iter_mut().zip(words.as_chunks().0) {
        *count = u16::from_le_bytes(*word);
    }
    census.found += often.count_ones() as usize;
    Some(census)
}

/// How many elements of each eight have one of eight values, twice: a byte for each eight and
/// value. Eight elements are eight rows of ones, and what is not among the values has no row. If
/// values are `NEAR`, their low six bits tell them apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bitalg,gfni")]
fn ones<const NEAR: bool>(chunks: &[[u8; STEP]], firsts: [u8; 2]) -> [__m512i; 2] {
    let firsts = firsts.map(|first| _mm512_set1_epi8(first.cast_signed()));
    let (one_hot, none) = (load(&ONE_HOT), _mm512_set1_epi8(STEP as i8 - 1));
    let tables = firsts.map(|first| {
        if NEAR { _mm512_permutexvar_epi8(_mm512_sub_epi8(load(&COUNTING), first), one_hot) } else { one_hot }
    });
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    let mut ones = [_mm512_setzero_si512(); 2];
    for chunk in chunks {
        let chunk = load(chunk);
        for ((ones, first), table) in ones.iter_mut().zip(firsts).zip(tables) {
            let at = if NEAR { chunk } else { _mm512_min_epu8(_mm512_sub_epi8(chunk, first), none) };
            let columns = _mm512_gf2p8affine_epi64_epi8::<0>(identity, _mm512_permutexvar_epi8(at, table));
            *ones = _mm512_add_epi8(*ones, _mm512_popcnt_epi8(columns));
        }
    }
    ones
}

/// The numbers from 0 on.
const COUNTING: [u8; STEP] = {
    let mut numbers = [0; STEP];
    let mut at = 0;
    while at < STEP {
        numbers[at] = at as u8;
        at += 1;
    }
    numbers
};

/// A one at the place of its number, for the first eight numbers.
const ONE_HOT: [u8; STEP] = {
    let mut rows = [0; STEP];
    let mut at = 0;
    while at < 8 {
        rows[at] = 1 << at;
        at += 1;
    }
    rows
};

/// Byte `i` of all eight words side by side.
const TOGETHER: [u8; STEP] = {
    let mut places = [0; STEP];
    let mut at = 0;
    while at < STEP {
        places[at] = (at % 8 * 8 + at / 8) as u8;
        at += 1;
    }
    places
};
