//! Samples of values, and what a code takes for them.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_max_epu8, _mm_max_epu16, _mm_min_epu8,
    _mm_minpos_epu16, _mm_set1_epi8, _mm_setzero_si128, _mm_srli_epi16, _mm_storeu_si128, _mm_xor_si128,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_max_epu8, _mm512_add_epi8, _mm512_add_epi64,
    _mm512_adds_epu8, _mm512_castsi128_si512, _mm512_castsi512_si256, _mm512_cvtepi64_epi16,
    _mm512_cvtepu8_epi16, _mm512_extracti64x4_epi64, _mm512_gf2p8affine_epi64_epi8, _mm512_inserti32x4,
    _mm512_loadu_si512, _mm512_madd_epi16, _mm512_max_epu8, _mm512_min_epu8, _mm512_permutexvar_epi8,
    _mm512_popcnt_epi8, _mm512_reduce_add_epi32, _mm512_reduce_add_epi64, _mm512_sad_epu8, _mm512_set1_epi8,
    _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_sub_epi8, _mm512_testn_epi8_mask,
};

use super::{
    super::{
        code::{Coder, SLOTS, WINDOW},
        kept::MOST_CODES,
        sample::{RUN, RUNS, SAMPLE, Sample},
    },
    COUNTING, STEP, TOGETHER, load,
};

/// Values that are counted together.
const SIXTEEN: usize = 16;
/// Vectors of a sample.
const VECTORS: usize = SAMPLE / STEP;

#[inline]
#[target_feature(enable = "avx512f")]
fn load_run(run: &[u8; RUN]) -> __m128i {
    // SAFETY: the array has the register's 16 bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(run.as_ptr().cast()) }
}

/// As [`Sample::of`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bitalg,gfni,popcnt")]
pub(in super::super) fn sample(values: &[u8]) -> Sample {
    let apart = values.len() / RUNS;
    let mut vectors = [_mm512_setzero_si512(); VECTORS];
    for (vector, part) in vectors.iter_mut().zip(values.chunks_exact(4 * apart)) {
        let run = |number: usize| load_run(part[number * apart..].first_chunk().expect("a run of each part"));
        let four = _mm512_castsi128_si512(run(0));
        let four = _mm512_inserti32x4::<1>(four, run(1));
        let four = _mm512_inserti32x4::<2>(four, run(2));
        *vector = _mm512_inserti32x4::<3>(four, run(3));
    }
    count(&vectors)
}

/// Counts sixteen values at a time: as one-hot bytes, of which eight make a matrix of bits, whose columns' ones are what there is of each value.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bitalg,gfni,popcnt")]
fn count(vectors: &[__m512i; VECTORS]) -> Sample {
    let (mut most, mut zeros) = (_mm512_setzero_si512(), 0);
    for vector in vectors {
        most = _mm512_max_epu8(most, *vector);
        zeros += _mm512_testn_epi8_mask(*vector, *vector).count_ones();
    }
    let largest = largest(most);
    let low = Sample::low(largest);
    let mut sample = Sample { low, counts: [0; WINDOW], zeros: zeros as u16, others: 0, most: 0 };
    let mut most = _mm_setzero_si128();

    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    let together = load(&TOGETHER);
    let [first, second] = [load(&FIRST), load(&SECOND)];
    let mut left = SAMPLE as u16 - sample.zeros;
    let upper = usize::from(largest.saturating_sub(low)) / SIXTEEN;
    for (group, counts) in sample.counts.as_chunks_mut::<SIXTEEN>().0[..=upper].iter_mut().enumerate().rev() {
        if left == 0 {
            break;
        }
        let low = _mm512_set1_epi8(low.wrapping_add((SIXTEEN * group) as u8).cast_signed());
        // Only the sixteen stay below 0x80, and a shuffle gives zero for what does not.
        let reach = _mm512_set1_epi8(i8::MAX - (SIXTEEN as i8 - 1));
        let mut ones = [_mm512_setzero_si512(); 2];
        for vector in vectors {
            let places = _mm512_adds_epu8(_mm512_sub_epi8(*vector, low), reach);
            for (ones, one_hot) in ones.iter_mut().zip([first, second]) {
                let columns =
                    _mm512_gf2p8affine_epi64_epi8::<0>(identity, _mm512_shuffle_epi8(one_hot, places));
                *ones = _mm512_add_epi8(*ones, _mm512_popcnt_epi8(columns));
            }
        }
        let sums =
            ones.map(|ones| _mm512_sad_epu8(_mm512_permutexvar_epi8(together, ones), _mm512_setzero_si512()));
        left -= _mm512_reduce_add_epi64(_mm512_add_epi64(sums[0], sums[1])).cast_unsigned() as u16;
        for (counts, sums) in counts.as_chunks_mut().0.iter_mut().zip(sums) {
            let sums = _mm512_cvtepi64_epi16(sums);
            most = _mm_max_epu16(most, sums);
            *counts = words(sums);
        }
    }
    sample.others = left;
    // The instruction finds the least word.
    let least = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi8(-1)));
    sample.most = left.max(sample.zeros).max(!_mm_cvtsi128_si32(least).cast_unsigned() as u16);
    sample
}

/// The largest byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn largest(bytes: __m512i) -> u8 {
    let half = _mm256_max_epu8(_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64::<1>(bytes));
    let quarter = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    // The instruction finds the least word.
    let inverted = _mm_xor_si128(quarter, _mm_set1_epi8(-1));
    let least = _mm_minpos_epu16(_mm_min_epu8(inverted, _mm_srli_epi16::<8>(inverted)));
    !_mm_cvtsi128_si32(least).cast_unsigned() as u8
}

/// What each code takes, as [`Sample::cost`]; more than any if there is none.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(in super::super) fn costs(sample: &Sample, codes: &[Option<Coder>; MOST_CODES]) -> [u32; MOST_CODES] {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    let counts = unsafe { _mm512_loadu_si512(sample.counts.as_ptr().cast()) };
    let values = _mm512_add_epi8(load(&COUNTING), _mm512_set1_epi8(sample.low.cast_signed()));
    let mut costs = [u32::MAX; MOST_CODES];
    for (cost, coder) in costs.iter_mut().zip(codes) {
        let Some(coder) = coder else { continue };
        let symbols = _mm512_sub_epi8(values, _mm512_set1_epi8(coder.code.low.cast_signed()));
        let symbols = _mm512_min_epu8(symbols, _mm512_set1_epi8(SLOTS as i8 - 1));
        let bits = _mm512_permutexvar_epi8(symbols, load(&coder.costs));
        let bits = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bits));
        let sums = _mm512_madd_epi16(bits, counts);
        *cost = _mm512_reduce_add_epi32(sums).cast_unsigned() + sample.cost_outside(coder);
    }
    costs
}

#[inline]
#[target_feature(enable = "sse2")]
fn words(register: __m128i) -> [u16; 8] {
    let mut words = [0; 8];
    // SAFETY: the array has the register's 16 bytes, and the store needs no alignment.
    unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), register) };
    words
}

/// One-hot bytes of the first eight of sixteen, and of the others.
const FIRST: [u8; STEP] = one_hot(0);
const SECOND: [u8; STEP] = one_hot(8);

/// For each place of a shuffle, a one at the place of its number, counted from `first` on: eight numbers have one.
const fn one_hot(first: usize) -> [u8; STEP] {
    let mut rows = [0; STEP];
    let mut at = 0;
    while at < STEP {
        let number = at % 16;
        if number / 8 == first / 8 {
            rows[at] = 1 << (number % 8);
        }
        at += 1;
    }
    rows
}
