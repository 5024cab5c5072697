//! CRCs by the processor's instruction, which takes a word or two a cycle but three cycles for each: parts of the bytes are taken side by side.

use std::arch::x86_64::{
    _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64,
};

use super::{BEHIND, MOST};

/// What is to be added to the CRC of `words` words if those before them have the CRC `before`.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn passed(before: u64, words: usize) -> u64 {
    let factors = (_mm_cvtsi64_si128(before.cast_signed()), _mm_cvtsi64_si128(i64::from(BEHIND[words])));
    let product = _mm_clmulepi64_si128::<0>(factors.0, factors.1);
    _mm_crc32_u64(0, _mm_cvtsi128_si64(product).cast_unsigned())
}

/// Parts of a run of bytes that is about as long as a stream is.
const PARTS: usize = 6;
/// Words of each, for a stream of 2048 elements and of twice as many.
const SHORT: usize = 16;
const LONG: usize = 2 * SHORT;

#[target_feature(enable = "sse4.2,pclmulqdq")]
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    let is_in = |words: usize| (8 * (PARTS - 1) * words + 4..=8 * PARTS * words).contains(&bytes.len());
    match () {
        () if is_in(SHORT) => of_six::<SHORT>(bytes),
        () if is_in(LONG) => of_six::<LONG>(bytes),
        () => of_any(bytes),
    }
}

/// Of six parts of so many words, the first of which may lack words before it, but not all: in as many steps however many they are, so that the processor need not guess.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn of_six<const WORDS: usize>(bytes: &[u8]) -> u32 {
    let (all, _) = bytes.as_chunks();
    // Zeros before the first one change nothing if it is they that the CRC begins with, and not ones: these are added to the first bytes.
    let mut padded = [[[0; 8]; WORDS]; 2];
    padded[1] = *all.first_chunk().expect("more than a part");
    padded[1][0] = (u64::from_le_bytes(padded[1][0]) ^ u64::from(u32::MAX)).to_le_bytes();
    let behind = bytes.len() - 8 * (PARTS - 1) * WORDS;
    let first: &[[u8; 8]; WORDS] =
        padded.as_flattened().as_flattened()[behind..].as_chunks().0.first_chunk().expect("a part's zeros");
    let others: &[[[u8; 8]; WORDS]; PARTS - 1] =
        bytes[behind..].as_chunks().0.as_chunks().0.first_chunk().expect("all parts but one");
    let [mut one, mut two, mut three, mut four, mut five, mut six] = [0; PARTS];
    for at in 0..WORDS {
        one = _mm_crc32_u64(one, u64::from_le_bytes(first[at]));
        two = _mm_crc32_u64(two, u64::from_le_bytes(others[0][at]));
        three = _mm_crc32_u64(three, u64::from_le_bytes(others[1][at]));
        four = _mm_crc32_u64(four, u64::from_le_bytes(others[2][at]));
        five = _mm_crc32_u64(five, u64::from_le_bytes(others[3][at]));
        six = _mm_crc32_u64(six, u64::from_le_bytes(others[4][at]));
    }
    let crc = passed(one, 5 * WORDS) ^ passed(two, 4 * WORDS) ^ passed(three, 3 * WORDS);
    let crc = crc ^ passed(four, 2 * WORDS) ^ passed(five, WORDS) ^ six;
    #[expect(clippy::cast_possible_truncation, reason = "the instruction gives 32 bits")]
    let crc = crc as u32;
    !crc
}

#[target_feature(enable = "sse4.2,pclmulqdq")]
fn of_any(bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut crc = u64::from(u32::MAX);
    let mut words = words;
    while words.len() >= 6 {
        let part = (words.len() / 3).min(MOST);
        let (a, others) = words.split_at(part);
        let (b, others) = others.split_at(part);
        let (c, others) = others.split_at(part);
        let (mut of_b, mut of_c) = (0, 0);
        for ((a, b), c) in a.iter().zip(b).zip(c) {
            crc = _mm_crc32_u64(crc, u64::from_le_bytes(*a));
            of_b = _mm_crc32_u64(of_b, u64::from_le_bytes(*b));
            of_c = _mm_crc32_u64(of_c, u64::from_le_bytes(*c));
        }
        crc = passed(crc, 2 * part) ^ passed(of_b, part) ^ of_c;
        words = others;
    }
    for word in words {
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(*word));
    }
    #[expect(clippy::cast_possible_truncation, reason = "the instruction gives 32 bits")]
    let crc = rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte));
    !crc
}
