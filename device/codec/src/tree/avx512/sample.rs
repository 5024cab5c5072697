//! Samples of values, and what a code takes for them.

use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_max_epu8, _mm_max_epu16, _mm_min_epu8,
    _mm_minpos_epu16, _mm_set1_epi8, _mm_srli_epi16, _mm_xor_si128, _mm256_add_epi32, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_max_epu8, _mm256_max_epu16, _mm256_permute2x128_si256, _mm256_set_m128i,
    _mm256_setzero_si256, _mm256_storeu_si256, _mm512_add_epi8, _mm512_add_epi16, _mm512_add_epi32,
    _mm512_adds_epu8, _mm512_and_si512, _mm512_castsi128_si512, _mm512_castsi256_si512,
    _mm512_castsi512_si256, _mm512_cmplt_epu16_mask, _mm512_cvtepi64_epi16, _mm512_extracti64x4_epi64,
    _mm512_gf2p8affine_epi64_epi8, _mm512_inserti32x4, _mm512_inserti64x4, _mm512_loadu_si512,
    _mm512_madd_epi16, _mm512_mask_blend_epi16, _mm512_max_epu8, _mm512_min_epu8, _mm512_mullo_epi16,
    _mm512_permutex2var_epi16, _mm512_permutexvar_epi8, _mm512_popcnt_epi8, _mm512_reduce_add_epi32,
    _mm512_sad_epu8, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_shuffle_epi8, _mm512_srli_epi16, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_testn_epi8_mask,
    _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::{
    super::{
        code::{Costs, WINDOW},
        kept::MOST_CODES,
        sample::{FINE, RUN, RUNS, SAMPLE, STEP as LOG_STEP, Sample, TIMES_LOG2},
    },
    STEP, TOGETHER, load,
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

/// As [`Sample::of`], and what the sample takes by some codes, as [`Sample::cost`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bitalg,gfni,popcnt")]
pub(in super::super) fn sample(values: &[u8], costs: &[Costs; MOST_CODES]) -> (Sample, [u32; MOST_CODES]) {
    let apart = values.len() / RUNS;
    let mut vectors = [_mm512_setzero_si512(); VECTORS];
    for (vector, part) in vectors.iter_mut().zip(values.chunks_exact(4 * apart)) {
        let run = |number: usize| load_run(part[number * apart..].first_chunk().expect("a run of each part"));
        let four = _mm512_castsi128_si512(run(0));
        let four = _mm512_inserti32x4::<1>(four, run(1));
        let four = _mm512_inserti32x4::<2>(four, run(2));
        *vector = _mm512_inserti32x4::<3>(four, run(3));
    }
    let (mut most, mut least) = (_mm512_setzero_si512(), _mm512_set1_epi8(-1));
    for vector in vectors {
        (most, least) = (_mm512_max_epu8(most, vector), _mm512_min_epu8(least, vector));
    }
    let zeros = if _mm512_testn_epi8_mask(least, least) == 0 {
        0
    } else {
        vectors.iter().map(|vector| _mm512_testn_epi8_mask(*vector, *vector).count_ones()).sum()
    };
    let largest = largest(most);
    let low = Sample::low(largest);
    let upper = largest.saturating_sub(low) as usize >= SIXTEEN;
    let lower = |from: [__m128i; 2]| _mm256_set_m128i(from[1], from[0]);
    let upper = if upper { lower(sixteen(&vectors, low + SIXTEEN as u8)) } else { _mm256_setzero_si256() };
    let lower = lower(sixteen(&vectors, low));
    let counts = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper);

    let ones = _mm512_set1_epi16(1);
    let told = _mm512_reduce_add_epi32(_mm512_madd_epi16(counts, ones)).cast_unsigned() as u16 + zeros as u16;
    let (zeros, others) = (zeros as u16, SAMPLE as u16 - told);
    // The instruction finds the least word.
    let most = _mm256_max_epu16(lower, upper);
    let most = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
    let least = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi8(-1)));
    let most = others.max(zeros).max(!_mm_cvtsi128_si32(least).cast_unsigned() as u16);
    let products = _mm512_madd_epi16(times_log2(counts), ones);
    let own = _mm512_reduce_add_epi32(products).cast_unsigned();
    let own = own + super::super::sample::times_log2(zeros) + super::super::sample::times_log2(others);
    let mut sample = Sample { low, counts: [0; WINDOW], zeros, others, most, own };
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(sample.counts.as_mut_ptr().cast(), counts) };

    let products = costs.each_ref().map(|costs| {
        let costs: &[u16; WINDOW] =
            costs.values[usize::from(low)..].first_chunk().expect("values up to the last");
        // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
        _mm512_madd_epi16(unsafe { _mm512_loadu_si512(costs.as_ptr().cast()) }, counts)
    });
    let mut bits = [0; MOST_CODES];
    // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(bits.as_mut_ptr().cast(), sums(&products)) };
    if zeros + others > 0 {
        bits.iter_mut().zip(costs).for_each(|(bits, costs)| *bits += sample.cost_outside(costs));
    }
    (sample, bits)
}

/// How often each of sixteen values occurs: as one-hot bytes, of which eight make a matrix of bits, whose columns' ones are what there is of each value.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bitalg,gfni,popcnt")]
fn sixteen(vectors: &[__m512i; VECTORS], low: u8) -> [__m128i; 2] {
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    let together = load(&TOGETHER);
    let low = _mm512_set1_epi8(low.cast_signed());
    // Only the sixteen stay below 0x80, and a shuffle gives zero for what does not.
    let reach = _mm512_set1_epi8(i8::MAX - (SIXTEEN as i8 - 1));
    let mut ones = [_mm512_setzero_si512(); 2];
    for vector in vectors {
        let places = _mm512_adds_epu8(_mm512_sub_epi8(*vector, low), reach);
        for (ones, one_hot) in ones.iter_mut().zip([load(&FIRST), load(&SECOND)]) {
            let columns = _mm512_gf2p8affine_epi64_epi8::<0>(identity, _mm512_shuffle_epi8(one_hot, places));
            *ones = _mm512_add_epi8(*ones, _mm512_popcnt_epi8(columns));
        }
    }
    ones.map(|ones| {
        let sums = _mm512_sad_epu8(_mm512_permutexvar_epi8(together, ones), _mm512_setzero_si512());
        _mm512_cvtepi64_epi16(sums)
    })
}

/// [`times_log2`](super::super::sample::times_log2) of the words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn times_log2(counts: __m512i) -> __m512i {
    let of = |table: &[u16; FINE], at| {
        let [a, b] = [0, WINDOW].map(|half| {
            let half: &[u16; WINDOW] = table[half..].first_chunk().expect("two halves");
            // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
            unsafe { _mm512_loadu_si512(half.as_ptr().cast()) }
        });
        // It looks at the six lowest bits.
        _mm512_permutex2var_epi16(a, at, b)
    };
    let coarse = _mm512_srli_epi16::<{ LOG_STEP.ilog2() }>(counts);
    let rest = _mm512_and_si512(counts, _mm512_set1_epi16(LOG_STEP as i16 - 1));
    let more =
        _mm512_srli_epi16::<{ LOG_STEP.ilog2() }>(_mm512_mullo_epi16(of(&TIMES_LOG2.steps, coarse), rest));
    let products = _mm512_add_epi16(of(&TIMES_LOG2.coarse, coarse), more);
    let is_fine = _mm512_cmplt_epu16_mask(counts, _mm512_set1_epi16(FINE as i16));
    _mm512_mask_blend_epi16(is_fine, products, of(&TIMES_LOG2.fine, counts))
}

/// The sums of the words of four bytes of each register.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums(of: &[__m512i; MOST_CODES]) -> __m256i {
    let two = |at: usize| {
        let (a, b) = (of[at], of[at + 1]);
        _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
    };
    let four = |at: usize| {
        let (a, b) = (two(at), two(at + 2));
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    };
    let halves = |four| _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64::<1>(four));
    let (a, b) = (halves(four(0)), halves(four(4)));
    let (even, odd) = (_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b));
    _mm256_add_epi32(even, odd)
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
