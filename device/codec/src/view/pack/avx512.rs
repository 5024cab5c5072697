//! Packing in AVX-512: each step takes a register of elements and works out the part of the stream
//! that they fill.
//!
//! First the kept bits of each 32-bit lane are closed up, run by run of the mask; whatever the
//! format, a lane then has `c` of them. A *unit* is 16 bits of the stream, again in a lane. It
//! begins at bit `o` of what some lane `i` has: it is that shifted right by `o`, and what the `k`th
//! lane behind it has, shifted left by `k·c − o`. What is past the unit is cut off.

use std::arch::x86_64::{
    __m256i, __m512i, _mm_cvtsi32_si128, _mm256_storeu_si256, _mm512_add_epi32, _mm512_and_si512,
    _mm512_cvtepi32_epi16, _mm512_loadu_si512, _mm512_mullo_epi32, _mm512_or_si512, _mm512_permutexvar_epi32,
    _mm512_set1_epi32, _mm512_setr_epi32, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_sllv_epi32,
    _mm512_srl_epi32, _mm512_srli_epi32, _mm512_srlv_epi32, _mm512_sub_epi32,
};

/// Most runs of ones that a mask of 32 bits has.
const MAX_RUNS: usize = 16;
/// Bits of a unit.
const UNIT: u32 = 16;
/// Bytes that are worked out at once: a unit in each of 16 lanes.
const BYTES: usize = 32;

/// Whether this processor has what is needed here.
pub(super) fn is_available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

/// One run of the mask: which bits, and how far they move down.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub(super) bits: u32,
    pub(super) shift: u32,
}

/// The runs of ones in `keep`, and how many.
pub(super) fn runs(mut keep: u32) -> ([Run; MAX_RUNS], usize) {
    let mut runs = [Run { bits: 0, shift: 0 }; MAX_RUNS];
    let (mut count, mut to) = (0, 0);
    while keep != 0 {
        let from = keep.trailing_zeros();
        // The carry of this addition ends at the zero above the run.
        let bits = keep & !keep.wrapping_add(1 << from);
        runs[count] = Run { bits, shift: from - to };
        to += bits.count_ones();
        count += 1;
        keep &= !bits;
    }
    (runs, count)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; BYTES], value: __m256i) {
    // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), value) };
}

/// Packs the bits in `keep`, of which there are some, of every four bytes of `words`; they fill
/// `stream`.
#[target_feature(enable = "avx512f")]
pub(super) fn pack(keep: u32, words: &[u8], stream: &mut [u8]) {
    let count = keep.count_ones();
    let (runs, run_count) = runs(keep);
    let runs = &runs[..run_count];
    // Lanes behind a unit's first one that may reach into it.
    let behind = (count - 1 + UNIT - 1) / count;
    let places = (count as usize).div_ceil(UNIT as usize);
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let count_in_lanes = _mm512_set1_epi32(count.cast_signed());
    // bit / count is bit · ⌈2^16 / count⌉ / 2^16 for the bits there are, fewer than 512.
    let reciprocal = _mm512_set1_epi32((1_u32 << 16).div_ceil(count).cast_signed());
    let [mut first, mut offset] = [[_mm512_setzero_si512(); 2]; 2];
    for (place, unit) in [lanes, _mm512_add_epi32(lanes, _mm512_set1_epi32(16))].into_iter().enumerate() {
        let bit = _mm512_slli_epi32::<4>(unit);
        first[place] = _mm512_srli_epi32::<16>(_mm512_mullo_epi32(bit, reciprocal));
        offset[place] = _mm512_sub_epi32(bit, _mm512_mullo_epi32(first[place], count_in_lanes));
    }
    let mut at = 0;
    for words in words.chunks(64) {
        let x = if let Ok(words) = words.try_into() {
            load(words)
        } else {
            let mut rest = [0; 64];
            rest[..words.len()].copy_from_slice(words);
            load(&rest)
        };
        let mut closed = _mm512_setzero_si512();
        for run in runs {
            let bits = _mm512_and_si512(x, _mm512_set1_epi32(run.bits.cast_signed()));
            let moved = _mm512_srl_epi32(bits, _mm_cvtsi32_si128(run.shift.cast_signed()));
            closed = _mm512_or_si512(closed, moved);
        }
        for place in 0..places {
            let mut lane = first[place];
            let mut units = _mm512_srlv_epi32(_mm512_permutexvar_epi32(lane, closed), offset[place]);
            let mut shift = _mm512_sub_epi32(_mm512_setzero_si512(), offset[place]);
            for _ in 0..behind {
                lane = _mm512_add_epi32(lane, _mm512_set1_epi32(1));
                shift = _mm512_add_epi32(shift, count_in_lanes);
                let next = _mm512_sllv_epi32(_mm512_permutexvar_epi32(lane, closed), shift);
                units = _mm512_or_si512(units, next);
            }
            let units = _mm512_cvtepi32_epi16(units);
            let to = stream.get_mut(at + place * BYTES..).unwrap_or_default();
            if let Some(to) = to.first_chunk_mut() {
                store(to, units);
            } else {
                let mut last = [0; BYTES];
                store(&mut last, units);
                to.copy_from_slice(&last[..to.len()]);
            }
        }
        at += 2 * count as usize;
    }
}
