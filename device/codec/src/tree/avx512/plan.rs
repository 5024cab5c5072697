//! From what a block holds to its code, with counts in a register: as [`Plan::new`], which takes as
//! long as all else of a block.
//!
//! A symbol's rank is the number of those that are rarer, and its length in a 3+3 code is looked up
//! by that. Mostly entropy is enough to see that such a code is near the best.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "a block's bits are below 2^15, and not negative"
)]

use std::arch::x86_64::{
    __m512i, _mm256_loadu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_cmpgt_epu32_mask,
    _mm512_cmple_epu32_mask, _mm512_cvtepu16_epi32, _mm512_cvtepu32_ps, _mm512_getexp_ps, _mm512_getmant_ps,
    _mm512_loadu_si512, _mm512_mask_add_epi32, _mm512_mask_mov_epi32, _mm512_maskz_mov_epi32,
    _mm512_maskz_mul_ps, _mm512_mul_ps, _mm512_mullo_epi32, _mm512_or_si512, _mm512_permutexvar_epi32,
    _mm512_reduce_add_epi32, _mm512_reduce_add_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::super::{
    code::{BELOW, Code, ESCAPE, LOG2, Ranked, SYMBOLS, WINDOW},
    plan::{BF16, Census, MAX_VALUES, Plan, SPARE},
};

/// A number for each symbol.
type Numbers = [u32; 16];

/// See [`Plan::new`], to which blocks of more than 16 symbols, or of values far apart, are left.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw")]
pub(in super::super) fn plan(census: &Census, raw: usize) -> Option<Plan> {
    let Census { found, escapes, .. } = *census;
    let used = found + usize::from(escapes > 0);
    if found == 0 || !(2..=PLACES.len()).contains(&used) {
        return Plan::new(census, raw);
    }
    let (low, last) = (census.values[0], census.values[found - 1]);
    let window = usize::from(last - low) + 1;
    if window > WINDOW {
        return Plan::new(census, raw);
    }
    // What is escaped is the last symbol.
    let counts: &[u16; 16] = census.counts.first_chunk().expect("more values");
    // SAFETY: the array has the register's 32 bytes, and the load needs no alignment.
    let counts = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(counts.as_ptr().cast()) });
    let counts = _mm512_maskz_mov_epi32(((1_u32 << found) - 1) as u16, counts);
    let counts = if escapes > 0 {
        _mm512_mask_mov_epi32(counts, 1 << found, _mm512_set1_epi32(escapes.cast_signed()))
    } else {
        counts
    };
    let ranks = ranks(counts, used);
    let symbol = |place: usize| if place < found { usize::from(census.values[place] - low) } else { ESCAPE };

    let quicker = three_and_three(counts, ranks, used, raw).filter(|(lengths, _)| {
        let above = _mm512_cmple_epu32_mask(*lengths, _mm512_set1_epi32(4));
        escapes == 0 || above >> found & 1 == 0
    });
    let spare = SPARE * BF16 as u32 / 64;
    let is_near = quicker.is_some_and(|(_, bits)| bits <= least_bits(counts, used) + spare);
    let mut best = None;
    if !is_near {
        let mut places = [0; 16];
        store(&mut places, ranks);
        let mut ranked = Ranked::none(used);
        for (place, rank) in places.into_iter().enumerate().take(used) {
            let count = if place < found { census.counts[place].into() } else { escapes };
            ranked.set(rank as usize, symbol(place), count);
        }
        let code = Code::build(low, window, &ranked);
        let bits = ranked.bits(&code);
        if quicker.is_none_or(|(_, more)| more > bits + spare) {
            best = Some((code, bits));
        }
    }
    let (code, bits) = match (best, quicker) {
        (Some(best), _) => best,
        (None, Some((by_place, bits))) => {
            let mut of = [0; 16];
            store(&mut of, by_place);
            let mut lengths = [0; SYMBOLS];
            for (place, length) in of.into_iter().enumerate().take(used) {
                lengths[symbol(place)] = length as u8;
            }
            (Code { low, window, lengths }, bits)
        }
        (None, None) => unreachable!("without a quicker code there is the best"),
    };
    let length = Code::header_bytes(window) + (bits as usize).div_ceil(8) + escapes as usize;
    let mut symbols = [0; MAX_VALUES];
    for (symbol, value) in symbols.iter_mut().zip(census.values).take(found) {
        *symbol = value - low;
    }
    (length < raw).then_some(Plan { code, symbols, length })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(numbers: &Numbers) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(numbers.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(numbers: &mut Numbers, value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(numbers.as_mut_ptr().cast(), value) };
}

/// Of each count the number of those that are rarer, or as frequent and before it. Those behind
/// `used` are the most frequent.
#[inline]
#[target_feature(enable = "avx512f")]
fn ranks(counts: __m512i, used: usize) -> __m512i {
    let places = load(&PLACES);
    let keys = _mm512_or_si512(_mm512_slli_epi32::<4>(counts), places);
    let keys = _mm512_mask_mov_epi32(_mm512_set1_epi32(-1), ((1_u32 << used) - 1) as u16, keys);
    let (mut ranks, mut turned, one) = (_mm512_setzero_si512(), places, _mm512_set1_epi32(1));
    for _ in 1..PLACES.len() {
        turned = _mm512_add_epi32(turned, one);
        let rarer = _mm512_cmpgt_epu32_mask(keys, _mm512_permutexvar_epi32(turned, keys));
        ranks = _mm512_mask_add_epi32(ranks, rarer, ranks, one);
    }
    ranks
}

/// The lengths of the best 3+3 code for a block of bf16, and the bits that all elements take.
#[inline]
#[target_feature(enable = "avx512f")]
fn three_and_three(counts: __m512i, ranks: __m512i, used: usize, raw: usize) -> Option<(__m512i, u32)> {
    let [first, second] = LENGTHS.get(used.wrapping_sub(8))?;
    if raw != BF16 || _mm512_reduce_add_epi32(counts) != BF16 as i32 {
        return None;
    }
    let [first, second] = [first, second].map(|by_rank| _mm512_permutexvar_epi32(ranks, load(by_rank)));
    let [bits, fewer] = [first, second]
        .map(|lengths| _mm512_reduce_add_epi32(_mm512_mullo_epi32(counts, lengths)).cast_unsigned());
    Some(if fewer < bits { (second, fewer) } else { (first, bits) })
}

/// As [`Ranked::least_bits`] of a block of bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn least_bits(counts: __m512i, used: usize) -> u32 {
    let numbers = _mm512_cvtepu32_ps(counts);
    let m = _mm512_sub_ps(_mm512_getmant_ps::<0, 0>(numbers), _mm512_set1_ps(1.0));
    let more = _mm512_sub_ps(_mm512_set1_ps(LOG2[0]), _mm512_mul_ps(_mm512_set1_ps(LOG2[1]), m));
    let more = _mm512_mul_ps(more, _mm512_mul_ps(m, _mm512_sub_ps(_mm512_set1_ps(1.0), m)));
    let log2 = _mm512_add_ps(_mm512_getexp_ps(numbers), _mm512_add_ps(m, more));
    let terms = _mm512_reduce_add_ps(_mm512_maskz_mul_ps(((1_u32 << used) - 1) as u16, numbers, log2));
    let least = (BF16 * BF16.ilog2() as usize) as f32 - terms - 0.5;
    least.max(0.0) as u32
}

/// By rank the lengths of 3+3 codes of 8 to 14 symbols; see [`BELOW`].
const LENGTHS: [[Numbers; 2]; BELOW.len()] = {
    let mut lengths = [[[2; 16]; 2]; BELOW.len()];
    let mut more = 0;
    while more < BELOW.len() {
        let mut way = 0;
        while way < 2 {
            let below = BELOW[more][way];
            let mut rank = 0;
            while rank < below.len() + 3 {
                lengths[more][way][rank] = if rank < below.len() { 4 + below[rank] as u32 } else { 4 };
                rank += 1;
            }
            way += 1;
        }
        more += 1;
    }
    lengths
};

const PLACES: Numbers = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::Kernel;

    /// A block's counts of values that follow each other, most of them of a few.
    fn census() -> impl Strategy<Value = Census> {
        let weights = prop::collection::vec((1_u32..64, 0_u32..6), 2..18);
        (weights, 0_u32..40, any::<u8>()).prop_map(|(weights, escapes, low)| {
            let mut counts: Vec<_> = weights.iter().map(|(weight, power)| weight << power).collect();
            let sum: u32 = counts.iter().sum();
            for count in &mut counts {
                *count = *count * 1900 / sum;
            }
            let most = counts.iter().position(|count| Some(count) == counts.iter().max()).unwrap();
            counts[most] += 2048 - escapes - counts.iter().sum::<u32>();
            let mut census = Census::new();
            census.escapes = escapes;
            let low = low.min(230);
            for (value, count) in (low..).zip(counts) {
                census.add(value, count).expect("few values");
            }
            census
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2048))]

        #[test]
        fn plans_are_those_of_plain_rust(census in census(), raw in prop::sample::select(vec![BF16, 1280])) {
            if !Kernel::Avx512.is_available() {
                return Ok(());
            }
            // SAFETY: the processor has the kernel's features.
            let got = unsafe { plan(&census, raw) };
            prop_assert!(got == Plan::new(&census, raw), "{census:?}");
        }
    }
}
