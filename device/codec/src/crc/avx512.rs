//! CRCs by products of four lanes at once.
//!
//! The bytes are rows of four lines of a register each; before the first byte, zeros fill up the first row, which change nothing. A lane of 128 bits is moved on by a product for each of its words, and what it
//! comes to is added; so the four lines of a row are moved on to the next, then all to the last of them, its lanes to the last of these, and of that the instruction for CRCs makes the remainder.

use std::arch::x86_64::{
    __m512i, _bzhi_u64, _mm_crc32_u64, _mm_cvtsi128_si64, _mm_extract_epi64, _mm_xor_si128,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi512_si256,
    _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64, _mm512_loadu_si512, _mm512_maskz_loadu_epi8,
    _mm512_maskz_mov_epi64, _mm512_setzero_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

use super::{BEHIND, sse42};

/// Bytes of a line.
const LINE: usize = 64;
/// Words of a line.
const WORDS: usize = LINE / 8;
/// Lines of a row.
const LINES: usize = 4;
/// Bytes of a row.
const ROW: usize = LINES * LINE;
/// Bytes from which on rows are worth while.
const LEAST: usize = 96;
/// Bytes that the ones which a CRC begins with are added to.
const ONES: usize = 4;

/// These ones, with a row of zeros before them and behind.
static BEGINNING: [u8; 2 * ROW + ONES] = {
    let mut bytes = [0; 2 * ROW + ONES];
    let mut at = 0;
    while at < ONES {
        bytes[ROW + at] = 0xff;
        at += 1;
    }
    bytes
};

/// What moves both words of each lane on over so many words.
const fn over(words: [usize; 4]) -> [u64; WORDS] {
    let mut factors = [0; WORDS];
    let mut lane = 0;
    while lane < words.len() {
        // The first word is before the second.
        if words[lane] > 0 {
            factors[2 * lane] = BEHIND[words[lane] + 1] as u64;
            factors[2 * lane + 1] = BEHIND[words[lane]] as u64;
        }
        lane += 1;
    }
    factors
}

/// Over so many lines.
const fn over_lines(lines: usize) -> [u64; WORDS] {
    over([lines * WORDS; 4])
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words(words: &[u64; WORDS]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn line(bytes: &[u8], at: usize) -> __m512i {
    let line: &[u8; LINE] = bytes[at..].first_chunk().expect("a line's bytes");
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

/// The products of `line`'s lanes by `factors`: of each one's first word, and of its second.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn products(line: __m512i, factors: &[u64; WORDS]) -> [__m512i; 2] {
    let factors = words(factors);
    [_mm512_clmulepi64_epi128::<0x00>(line, factors), _mm512_clmulepi64_epi128::<0x11>(line, factors)]
}

/// A sum without carries.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum([a, b]: [__m512i; 2], c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0x96>(a, b, c)
}

/// See [`super::crc32c`].
#[target_feature(enable = "sse4.2,pclmulqdq,bmi2,avx512f,avx512bw,vpclmulqdq")]
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    let rows = bytes.len().saturating_sub(1) / ROW;
    let (first, others) = bytes.split_at(bytes.len() - rows * ROW);
    // Few words take less by themselves. Where the first row has fewer bytes than there are ones, these would be in two rows.
    if bytes.len() < LEAST || first.len() < ONES {
        return sse42::crc32c(bytes);
    }
    let before = ROW - first.len();
    let mut lines = [_mm512_setzero_si512(); LINES];
    for (number, to) in lines.iter_mut().enumerate() {
        let at = LINE * number;
        let there = !_bzhi_u64(u64::MAX, u32::try_from(before.saturating_sub(at)).expect("at most a row"));
        let from = first.as_ptr().wrapping_add(at).wrapping_sub(before);
        // SAFETY: of the line, no more is read than what is behind the zeros, which are before the first byte; the row ends with `first`.
        let found = unsafe { _mm512_maskz_loadu_epi8(there, from.cast()) };
        *to = _mm512_xor_si512(found, line(&BEGINNING, ROW - before + at));
    }
    for row in others.as_chunks::<ROW>().0 {
        for (number, to) in lines.iter_mut().enumerate() {
            *to = sum(products(*to, const { &over_lines(LINES) }), line(row, LINE * number));
        }
    }
    let [a, b, c, d] = lines;
    let first = sum(products(a, const { &over_lines(3) }), d);
    let [third, fourth] = products(c, const { &over_lines(1) });
    let second = sum(products(b, const { &over_lines(2) }), third);
    let last = sum([first, second], fourth);
    // Of the last lane, which nothing is behind, the products are nothing.
    let lanes = products(last, const { &over([6, 4, 2, 0]) });
    let lanes = sum(lanes, _mm512_maskz_mov_epi64(0b1100_0000, last));
    let halves = _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    let lane = _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
    let crc = _mm_crc32_u64(0, _mm_cvtsi128_si64(lane).cast_unsigned());
    let crc = _mm_crc32_u64(crc, _mm_extract_epi64::<1>(lane).cast_unsigned());
    #[expect(clippy::cast_possible_truncation, reason = "the instruction gives 32 bits")]
    let crc = crc as u32;
    !crc
}
