//! Checks with AVX-512 and GFNI: a row is a register, and the processor multiplies in the field.

use std::arch::x86_64::{
    __m128i, __m512i, __mmask64, _mm_storeu_si128, _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm_xor_si128,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi512_si256,
    _mm512_extracti64x4_epi64, _mm512_gf2p8mul_epi8, _mm512_loadu_si512, _mm512_maskz_loadu_epi8,
    _mm512_set1_epi8, _mm512_setzero_si512, _mm512_ternarylogic_epi64, _mm512_unpackhi_epi8,
    _mm512_unpackhi_epi16, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi8,
    _mm512_unpacklo_epi16, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64, _mm512_xor_si512,
};

use super::{COEFFICIENTS, ROW, Span, times_alpha};

/// Planes whose sums are folded together.
const EIGHT: usize = 8;
/// The rows of a plane of 16-bit elements, which most are.
const ROWS: usize = 4;

#[target_feature(enable = "avx512f,avx512bw,gfni")]
pub(super) fn checks(bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
    for (planes, checks) in planes.chunks(EIGHT).zip(checks.chunks_mut(EIGHT)) {
        let mut sums = [_mm512_setzero_si512(); EIGHT];
        for (sums, plane) in sums.iter_mut().zip(planes).filter(|(_, plane)| plane.length > 0) {
            *sums = self::sums(&bundle[plane.range()]);
        }
        let folded = fold(&sums);
        checks.copy_from_slice(&folded[..checks.len()]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,gfni")]
pub(super) fn differ(bundle: &[u8], planes: &[Span], checks: &[u16]) -> u32 {
    let mut differ = 0;
    let mut sums = [_mm512_setzero_si512(); EIGHT];
    let (mut numbers, mut stored, mut count) = ([0; EIGHT], [0; EIGHT], 0);
    for (number, (plane, check)) in planes.iter().zip(checks).enumerate() {
        if plane.length == 0 {
            differ |= u32::from(*check != 0) << number;
            continue;
        }
        sums[count] = self::sums(&bundle[plane.range()]);
        (numbers[count], stored[count]) = (number, *check);
        count += 1;
        if count == EIGHT {
            differ |= unequal(&sums, &stored, &numbers);
            count = 0;
        }
    }
    if count > 0 {
        // What is left of planes before is of no account.
        sums[count..].fill(_mm512_setzero_si512());
        stored[count..].fill(0);
        differ |= unequal(&sums, &stored, &numbers);
    }
    differ
}

/// Which planes have other sums than was stored, by their numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn unequal(sums: &[__m512i; EIGHT], stored: &[u16; EIGHT], numbers: &[usize; EIGHT]) -> u32 {
    let found = fold(sums);
    if found == *stored {
        return 0;
    }
    (0..EIGHT).fold(0, |differ, at| differ | u32::from(found[at] != stored[at]) << numbers[at])
}

/// The sums of a plane: pairs of bytes, whose sums are the check.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn sums(plane: &[u8]) -> __m512i {
    match plane.as_chunks().0.try_into() {
        Ok(rows) if plane.len() == ROWS * ROW => sums_of_four(rows),
        _ => sums_of_any(plane),
    }
}

/// The sums of four rows: with coefficients for each there is nothing to wait for.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn sums_of_four(rows: &[[u8; ROW]; ROWS]) -> __m512i {
    check_of_rows([0, 1, 2, 3].map(|row| load(&rows[row])))
}

/// The sums of a plane of 16-bit elements that is in registers, to be folded.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
pub(in super::super) fn check_of_rows([a, b, c, d]: [__m512i; ROWS]) -> __m512i {
    let weigh = |row: usize, bytes| _mm512_gf2p8mul_epi8(bytes, load(&OF_ROWS[row]));
    let sum = _mm512_xor_si512(add(a, b, c), d);
    let weighted = _mm512_xor_si512(add(weigh(0, a), weigh(1, b), weigh(2, c)), weigh(3, d));
    pairs(sum, weighted)
}

/// The sums of a plane of any length.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn sums_of_any(plane: &[u8]) -> __m512i {
    let (rows, rest) = plane.as_chunks();
    let last = if rest.is_empty() { _mm512_setzero_si512() } else { load_part(rest) };
    let (mut sum, mut weighted) = (last, last);
    let alpha = _mm512_set1_epi8(3);
    for row in rows.iter().rev() {
        let row = load(row);
        sum = _mm512_xor_si512(sum, row);
        weighted = _mm512_xor_si512(_mm512_gf2p8mul_epi8(weighted, alpha), row);
    }
    pairs(sum, _mm512_gf2p8mul_epi8(weighted, load(&COEFFICIENTS)))
}

/// The sums side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs(sum: __m512i, weighted: __m512i) -> __m512i {
    _mm512_xor_si512(_mm512_unpacklo_epi8(sum, weighted), _mm512_unpackhi_epi8(sum, weighted))
}

/// The sum of three.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0x96>(a, b, c)
}

/// The sum of the pairs of each register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in super::super) fn fold(sums: &[__m512i; EIGHT]) -> [u16; EIGHT] {
    let pair = |at: usize| {
        let (a, b) = (sums[at], sums[at + 1]);
        _mm512_xor_si512(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b))
    };
    let four = |at: usize| {
        let (a, b) = (pair(at), pair(at + 2));
        _mm512_xor_si512(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
    };
    let (a, b) = (four(0), four(4));
    let all = _mm512_xor_si512(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let half = _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    store(_mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half)))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(value: __m128i) -> [u16; EIGHT] {
    let mut lanes = [0; EIGHT];
    // SAFETY: the array has the register's 16 bytes, and the store needs no alignment.
    unsafe { _mm_storeu_si128(lanes.as_mut_ptr().cast(), value) };
    lanes
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(row: &[u8; ROW]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
}

/// A row that ends early, with zeros for what is missing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_part(part: &[u8]) -> __m512i {
    debug_assert!(part.len() < ROW, "a whole row is no part");
    let mask: __mmask64 = (1 << (part.len() % ROW)) - 1;
    // SAFETY: the mask has a bit for each byte of the slice, and bytes outside a mask are not
    // touched.
    unsafe { _mm512_maskz_loadu_epi8(mask, part.as_ptr().cast()) }
}

/// The sums of eight planes of four rows, added up as [`gathered`](crate::plane::avx512::gathered)
/// brings the rows together.
pub(crate) struct Sums {
    sum: __m512i,
    weighted: __m512i,
}

impl Sums {
    /// Of nothing.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn new() -> Self {
        Self { sum: _mm512_setzero_si512(), weighted: _mm512_setzero_si512() }
    }

    /// Adds row number `row` of all planes: register `w` has their words `w`, byte by byte.
    #[inline]
    #[target_feature(enable = "avx512f,gfni")]
    pub(crate) fn add(&mut self, row: usize, words: &[__m512i; EIGHT]) {
        let word = |word: usize| words[word];
        self.sum = add(add(self.sum, word(0), word(1)), word(2), word(3));
        self.sum = add(add(self.sum, word(4), word(5)), word(6), word(7));
        let weigh = |word: usize| _mm512_gf2p8mul_epi8(words[word], load(&OF_WORDS[word]));
        let weighted = add(add(word(0), weigh(1), weigh(2)), weigh(3), weigh(4));
        let weighted = _mm512_xor_si512(add(weighted, weigh(5), weigh(6)), weigh(7));
        let power = _mm512_set1_epi8(OF_ROWS[row][0].cast_signed());
        self.weighted = _mm512_xor_si512(self.weighted, _mm512_gf2p8mul_epi8(weighted, power));
    }

    /// The planes' checks, that of the last plane first.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    pub(crate) fn checks(self) -> [u16; EIGHT] {
        let weighted = _mm512_gf2p8mul_epi8(self.weighted, load(&OF_BYTES));
        let both = _mm512_xor_si512(
            _mm512_unpacklo_epi64(self.sum, weighted),
            _mm512_unpackhi_epi64(self.sum, weighted),
        );
        let half = _mm256_xor_si256(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both));
        let sums = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
        store(_mm_unpacklo_epi8(sums, _mm_unpackhi_epi64(sums, sums)))
    }
}

/// The coefficients of the words of a row, each for all of a register.
static OF_WORDS: [[u8; ROW]; EIGHT] = {
    let mut words = [[0; ROW]; EIGHT];
    let mut word = 0;
    while word < EIGHT {
        words[word] = [COEFFICIENTS[8 * word]; ROW];
        word += 1;
    }
    words
};

/// The coefficients of the bytes of a word, a quadword each.
static OF_BYTES: [u8; ROW] = {
    let mut bytes = [0; ROW];
    let mut byte = 0;
    while byte < ROW {
        bytes[byte] = COEFFICIENTS[byte / 8];
        byte += 1;
    }
    bytes
};

/// The coefficients of the bytes of four rows.
static OF_ROWS: [[u8; ROW]; ROWS] = {
    let mut rows = [COEFFICIENTS; ROWS];
    let mut row = 1;
    while row < ROWS {
        let mut byte = 0;
        while byte < ROW {
            rows[row][byte] = times_alpha(rows[row - 1][byte]);
            byte += 1;
        }
        row += 1;
    }
    rows
};
