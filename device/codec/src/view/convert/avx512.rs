//! bf16 to fp8 by tables in registers of AVX-512, 64 elements a step.
//!
//! A magnitude is rounded to so many bits of its mantissa as the target has for its exponent: all
//! that have normals, one fewer for every binade below these, down to the one of which everything
//! but its least value, a tie, is the smallest subnormal. Where one of these roundings goes up, a
//! new *class* of mantissas begins; there are [`CLASSES`]. So three tables do:
//!
//! 1. By the exponent, its distance from the largest of which all is zero: the bits of the target's
//!    exponent, less one, and in the lower three bits a *region*, which tells how many bits of the
//!    mantissa go.
//! 2. By the mantissa: the number of its class, times [`REGIONS`].
//! 3. By the sum of region and class: the significand, rounded, less the region. Added to the first
//!    it is the magnitude, but for what exceeds the largest finite one.
//!
//! NaN is rare: whether there was an exponent like that is asked at the end, and what they are is
//! put in then.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_and_si512, _mm512_cmpeq_epi8_mask, _mm512_loadu_si512, _mm512_max_epu8,
    _mm512_min_epu8, _mm512_permutex2var_epi8, _mm512_permutexvar_epi8, _mm512_set1_epi8,
    _mm512_setzero_si512, _mm512_slli_epi16, _mm512_storeu_si512, _mm512_subs_epu8,
    _mm512_ternarylogic_epi32,
};

use super::Target;

/// Elements of a step.
const STEP: usize = 64;
/// bf16's mantissa bits.
const MANTISSA: u32 = 7;
/// Mantissas.
const MANTISSAS: usize = 1 << MANTISSA;
/// Most bits that a significand loses: one more than would leave its upper bit.
const MAX_LOST: u32 = MANTISSA + 1;
/// Classes of mantissas.
const CLASSES: usize = 17;
/// Numbers that regions may have.
const REGIONS: u8 = 6;
/// That of values that are zero.
const ZERO: u8 = 5;
/// The bits of a region.
const REGION: u8 = 7;

/// A significand of bf16 that ends with `mantissa`, without its last `lost` bits, rounded to
/// nearest even.
const fn rounded(mantissa: usize, lost: u32) -> u8 {
    let significand = MANTISSAS + mantissa;
    let odd = significand >> lost & 1;
    ((significand + (1 << (lost - 1)) - 1 + odd) >> lost).to_le_bytes()[0]
}

/// The number of each mantissa's class, times [`REGIONS`], and the least mantissa of each class.
const fn classes() -> ([u8; MANTISSAS], [usize; CLASSES]) {
    let (mut numbers, mut least) = ([0; MANTISSAS], [0; CLASSES]);
    let (mut class, mut mantissa) = (0, 1);
    while mantissa < MANTISSAS {
        let mut lost = MAX_LOST - 4;
        while lost <= MAX_LOST {
            if rounded(mantissa, lost) != rounded(mantissa - 1, lost) {
                class += 1;
                least[class] = mantissa;
                break;
            }
            lost += 1;
        }
        numbers[mantissa] = class.to_le_bytes()[0] * REGIONS;
        mantissa += 1;
    }
    assert!(class + 1 == CLASSES, "the classes there are");
    (numbers, least)
}

static CLASS: [u8; MANTISSAS] = classes().0;

/// The tables of a target.
struct Tables {
    exponents: [u8; STEP],
    rounded: [u8; 2 * STEP],
    /// Exponents below that of the smallest normal value that are not zero.
    subnormal: u32,
}

impl Tables {
    /// Those of a target of so many mantissa bits.
    const fn new(mantissa: u32) -> Self {
        let lost = MANTISSA - mantissa;
        // A region of normals is 0 in the bits below the exponent, one of subnormals how many bits
        // more they lose.
        let subnormal = MAX_LOST - lost;
        let (mut exponents, mut sums) = ([ZERO; STEP], [0; 2 * STEP]);
        let mut distance = 1;
        while distance < STEP {
            let normal = distance.saturating_sub(subnormal as usize);
            exponents[distance] = if normal == 0 {
                subnormal.to_le_bytes()[0] + 1 - distance.to_le_bytes()[0]
            } else {
                // What is as large as that exceeds the largest, whichever it is.
                let most = MANTISSAS >> mantissa;
                ((if normal < most { normal } else { most } - 1) << mantissa).to_le_bytes()[0]
            };
            distance += 1;
        }
        let least = classes().1;
        let mut at = 0;
        while at < CLASSES * REGIONS as usize {
            let (class, region) = (at / REGIONS as usize, (at % REGIONS as usize).to_le_bytes()[0]);
            let more = (region & ((1 << mantissa) - 1)) as u32;
            sums[at] = if more == 0 {
                rounded(least[class], lost)
            } else if more <= subnormal && region != ZERO {
                rounded(least[class], lost + more).wrapping_sub(region)
            } else {
                0_u8.wrapping_sub(region)
            };
            at += 1;
        }
        Self { exponents, rounded: sums, subnormal }
    }
}

static E4M3: Tables = Tables::new(3);
static E5M2: Tables = Tables::new(2);

/// Every other byte of two registers, from byte `first` on.
const fn every_other(first: u8) -> [u8; STEP] {
    let mut index = [0; STEP];
    let mut lane = 0;
    while lane < STEP {
        index[lane] = 2 * lane.to_le_bytes()[0] + first;
        lane += 1;
    }
    index
}

static LOWER: [u8; STEP] = every_other(0);
static UPPER: [u8; STEP] = every_other(1);

/// Whether this processor has what is needed here.
pub(super) fn is_available() -> bool {
    cfg!(not(feature = "portable"))
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vbmi")
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; STEP]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; STEP], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
}

/// A table of 128 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(table: &[u8; 2 * STEP]) -> [__m512i; 2] {
    let (halves, _) = table.as_chunks();
    [load(&halves[0]), load(&halves[1])]
}

/// What the conversion needs in registers.
#[derive(Clone, Copy)]
struct Lanes {
    /// The largest exponent of which all is zero.
    zero: __m512i,
    exponents: __m512i,
    classes: [__m512i; 2],
    rounded: [__m512i; 2],
    /// The largest finite magnitude.
    most: __m512i,
}

impl Lanes {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(target: Target, scale: i32) -> Self {
        let tables = if target.mantissa == 3 { &E4M3 } else { &E5M2 };
        // Scales, at most 64 either way, leave it far from either end of bf16's exponents.
        let zero = target.rebias.cast_signed() + scale - tables.subnormal.cast_signed();
        Self {
            zero: byte(u8::try_from(zero).expect("an exponent")),
            exponents: load(&tables.exponents),
            classes: halves(&CLASS),
            rounded: halves(&tables.rounded),
            most: byte(target.most.to_le_bytes()[0]),
        }
    }

    /// Magnitudes of values with these exponents, by bytes of which the lower seven bits are their
    /// mantissas.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn magnitudes(self, exponents: __m512i, mantissas: __m512i) -> __m512i {
        let distance = _mm512_min_epu8(_mm512_subs_epu8(exponents, self.zero), byte(63));
        let exponents = _mm512_permutexvar_epi8(distance, self.exponents);
        let class = _mm512_permutex2var_epi8(self.classes[0], mantissas, self.classes[1]);
        let place = _mm512_add_epi8(class, _mm512_and_si512(exponents, byte(REGION)));
        let rounded = _mm512_permutex2var_epi8(self.rounded[0], place, self.rounded[1]);
        _mm512_min_epu8(_mm512_add_epi8(exponents, rounded), self.most)
    }

    /// Converts a step of words: the values, and their exponents.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn of_words(self, words: &[u8; 2 * STEP]) -> [__m512i; 2] {
        let [first, second] = halves(words);
        let mantissas = _mm512_permutex2var_epi8(first, load(&LOWER), second);
        let signs = _mm512_permutex2var_epi8(first, load(&UPPER), second);
        let [first, second] = [_mm512_slli_epi16::<1>(first), _mm512_slli_epi16::<1>(second)];
        let exponents = _mm512_permutex2var_epi8(first, load(&UPPER), second);
        [signed(signs, self.magnitudes(exponents, mantissas)), exponents]
    }
}

/// Magnitudes with the signs that are the uppermost bits of `signs`.
#[inline]
#[target_feature(enable = "avx512f")]
fn signed(signs: __m512i, magnitudes: __m512i) -> __m512i {
    // (signs & 0x80) | magnitudes.
    _mm512_ternarylogic_epi32::<0xea>(signs, byte(0x80), magnitudes)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn byte(value: u8) -> __m512i {
    _mm512_set1_epi8(value.cast_signed())
}

/// Puts the bf16 values in `words`, each divided by 2^`scale`, into `out` as the 8-bit format
/// `target`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn bf16_to_8(target: Target, scale: i32, words: &[u8], out: &mut [u8]) {
    let lanes = Lanes::new(target, scale);
    let mut largest = _mm512_setzero_si512();
    let (pairs, last_words) = words.as_chunks();
    let (outs, last_out) = out.as_chunks_mut();
    for (pair, out) in pairs.iter().zip(outs) {
        let [converted, exponents] = lanes.of_words(pair);
        store(out, converted);
        largest = _mm512_max_epu8(largest, exponents);
    }
    if !last_words.is_empty() {
        let (mut pair, mut last) = ([0; 2 * STEP], [0; STEP]);
        pair[..last_words.len()].copy_from_slice(last_words);
        let [converted, exponents] = lanes.of_words(&pair);
        store(&mut last, converted);
        last_out.copy_from_slice(&last[..last_out.len()]);
        largest = _mm512_max_epu8(largest, exponents);
    }
    if may_be_nan(largest) {
        let words = words.as_chunks().0.iter();
        put_nan(
            target,
            words.map(|[lower, upper]| [upper << 1 | lower >> 7, upper & 0x80 | lower & 0x7f]),
            out,
        );
    }
}

/// Whether one of these largest exponents is NaN's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn may_be_nan(largest: __m512i) -> bool {
    _mm512_cmpeq_epi8_mask(largest, byte(u8::MAX)) != 0
}

/// Puts in what is NaN of `values`, an exponent each and a sign above a mantissa.
#[cold]
fn put_nan(target: Target, values: impl Iterator<Item = [u8; 2]>, out: &mut [u8]) {
    let [nan, ..] = target.nan.to_le_bytes();
    for ([exponent, rest], out) in values.zip(out) {
        if exponent == u8::MAX && rest & 0x7f > 0 {
            *out = rest & 0x80 | nan;
        }
    }
}
