//! The levels of a stream, 64 elements at a time: as [`super::compact`], with AVX-512's compress and expand.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "numbers of a block's levels, values and symbols fit in a byte"
)]

mod decode;
mod encode;
mod table;

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_add_epi64, _mm512_cmplt_epu8_mask, _mm512_gf2p8affine_epi64_epi8,
    _mm512_loadu_si512, _mm512_maskz_permutexvar_epi8, _mm512_max_epu8, _mm512_permutexvar_epi8,
    _mm512_popcnt_epi8, _mm512_sad_epu8, _mm512_set1_epi8, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_sub_epi8, _mm512_testn_epi8_mask,
};

pub(super) use self::{
    decode::{decode, decode_bf16},
    encode::{encode, levels, sample},
    table::Table,
};
use super::{
    MOST_ELEMENTS, Scratch,
    code::{LONGEST, WINDOW},
    masks,
    plan::Census,
};

/// Elements worked on at a time.
const STEP: usize = 64;
/// Bytes that a decoder looks at, however long it is told the stream is: header, levels and escapes.
pub(super) const MOST_STREAM: usize = 16 + MOST_ELEMENTS * LONGEST / 8 + MOST_ELEMENTS;

#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; STEP]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn load_at(bytes: &[u8], at: usize) -> __m512i {
    load(bytes[at..at + STEP].try_into().expect("a step"))
}

#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; STEP], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
}

#[target_feature(enable = "avx512f")]
fn store_at(bytes: &mut [u8], at: usize, value: __m512i) {
    store((&mut bytes[at..at + STEP]).try_into().expect("a step"), value);
}

/// The lowest `count` bits, all if it is more than 64.
fn first(count: usize) -> u64 {
    if count >= STEP { u64::MAX } else { (1 << count) - 1 }
}

/// What the values of a block are. Those within 32 of the largest are counted eight values at a time: as one-hot bytes, of which eight make a
/// matrix of bits, whose columns' ones are what there is of each value. Zeros are counted apart; blocks with yet others are left to [`masks`].
#[target_feature(
    enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512bitalg,avx512vpopcntdq,gfni"
)]
fn census(values: &[u8], planes: usize, scratch: &mut Scratch) -> Option<Census> {
    let chunks = values.as_chunks::<STEP>().0;
    let (mut largest, mut zeros) = (_mm512_setzero_si512(), 0);
    for chunk in chunks {
        let chunk = load(chunk);
        largest = _mm512_max_epu8(largest, chunk);
        zeros += _mm512_testn_epi8_mask(chunk, chunk).count_ones();
    }
    let mut lanes = [0; STEP];
    store(&mut lanes, largest);
    let largest = lanes.into_iter().max().unwrap_or(0);
    let low = largest.saturating_sub(WINDOW as u8 - 1).max(1);

    let mut counts = [0_u64; WINDOW];
    let mut left = values.len() as u64 - u64::from(zeros);
    // Eight values that are counted together are eight rows of ones; the others have no row.
    let one_hot = load(&ONE_HOT);
    let together = load(&TOGETHER);
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    for (eight, counts) in counts.as_chunks_mut::<8>().0.iter_mut().enumerate().rev() {
        if left == 0 {
            break;
        }
        let first = _mm512_set1_epi8(low.wrapping_add(8 * eight as u8).cast_signed());
        let mut sums = _mm512_setzero_si512();
        // A byte holds the ones of 31 times eight elements.
        for chunks in chunks.chunks(16) {
            let mut ones = _mm512_setzero_si512();
            for chunk in chunks {
                let value = _mm512_sub_epi8(load(chunk), first);
                let here = _mm512_cmplt_epu8_mask(value, _mm512_set1_epi8(8));
                let rows = _mm512_maskz_permutexvar_epi8(here, value, one_hot);
                let columns = _mm512_gf2p8affine_epi64_epi8::<0>(identity, rows);
                ones = _mm512_add_epi8(ones, _mm512_popcnt_epi8(columns));
            }
            sums = _mm512_add_epi64(
                sums,
                _mm512_sad_epu8(_mm512_permutexvar_epi8(together, ones), _mm512_setzero_si512()),
            );
        }
        // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_si512(counts.as_mut_ptr().cast(), sums) };
        left -= counts.iter().sum::<u64>();
    }
    if left > 0 {
        return match chunks.len() {
            16 => masks::count::<16>(values, planes, scratch),
            32 => masks::count::<32>(values, planes, scratch),
            64 => masks::count::<64>(values, planes, scratch),
            _ => masks::count::<128>(values, planes, scratch),
        };
    }
    let mut census = Census::new();
    census.tell(0, zeros)?;
    // Up to a bound: where the window ends with the largest value, an open range would step past it.
    for (value, count) in (low..=u8::MAX).zip(counts) {
        census.tell(value, count as u32)?;
    }
    Some(census)
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
