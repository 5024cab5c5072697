//! Checks in plain Rust: shifts and masks that work on all bytes of a word.

use super::{COEFFICIENTS, ROW, Span, last_row};

/// The lowest bit of every byte.
const ONES: u64 = 0x0101_0101_0101_0101;
/// Words of a row.
const WORDS: usize = ROW / 8;
/// Words whose bytes get their coefficients one by one; the others are folded onto them before.
const LAST: usize = 2;

type Words<const N: usize> = [u64; N];

pub(super) fn checks(bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
    for (plane, check) in planes.iter().zip(checks) {
        *check = one(bundle, *plane);
    }
}

pub(super) fn differ(bundle: &[u8], planes: &[Span], checks: &[u16]) -> u32 {
    let mut differ = 0;
    for (at, (plane, check)) in planes.iter().zip(checks).enumerate() {
        differ |= u32::from(one(bundle, *plane) != *check) << at;
    }
    differ
}

fn one(bundle: &[u8], plane: Span) -> u16 {
    if plane.length == 0 {
        return 0;
    }
    let (rows, rest) = bundle[plane.range()].as_chunks::<ROW>();
    let mut sum = [0; WORDS];
    if !rest.is_empty() {
        let mut spare = [0; ROW];
        let (row, mask) = last_row(bundle, plane, &mut spare);
        sum = and(words(row), words(mask));
    }
    let mut weighted = sum;
    for row in rows.iter().rev() {
        let row = words(row);
        sum = add(sum, row);
        weighted = add(times_alpha(weighted), row);
    }
    // A row's upper half has e 4 more than its lower half, the upper half of that 8 more: α⁴ =
    // x⁴ + 1.
    let [a, b] = halves::<WORDS, 4>(weighted);
    let [a, b] = halves::<4, LAST>(add(a, times_alpha4(b)));
    let weighted = add(a, times_alpha4(times_alpha4(b)));
    let sum = sum.iter().fold(0, |sum, word| sum ^ word);
    u16::from_le_bytes([fold(sum), fold(weigh(weighted))])
}

/// The sum of words times the coefficients of their bytes.
fn weigh(words: Words<LAST>) -> u64 {
    let mut sum = [0; LAST];
    for (bit, coefficients) in WEIGHTS.iter().enumerate() {
        for w in 0..LAST {
            let set = words[w] >> bit & ONES;
            // 255 where the bit is set: no borrow passes the byte.
            sum[w] ^= ((set << 8).wrapping_sub(set)) & coefficients[w];
        }
    }
    sum[0] ^ sum[1]
}

/// For each bit of a byte: what it adds, if set, by its place in the words that were not folded,
/// which are the first and the second of a row.
const WEIGHTS: [Words<LAST>; 8] = {
    let mut weights = [[0; LAST]; 8];
    let mut at = 0;
    while at < 8 * LAST {
        let mut product = COEFFICIENTS[at];
        let mut bit = 0;
        while bit < 8 {
            weights[bit][at / 8] |= (product as u64) << (8 * (at % 8));
            product = product << 1 ^ if product >> 7 == 1 { 0x1b } else { 0 };
            bit += 1;
        }
        at += 1;
    }
    weights
};

fn words(row: &[u8; ROW]) -> Words<WORDS> {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(row.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

fn add<const N: usize>(mut a: Words<N>, b: Words<N>) -> Words<N> {
    for w in 0..N {
        a[w] ^= b[w];
    }
    a
}

fn and<const N: usize>(mut a: Words<N>, b: Words<N>) -> Words<N> {
    for w in 0..N {
        a[w] &= b[w];
    }
    a
}

fn halves<const N: usize, const H: usize>(words: Words<N>) -> [Words<H>; 2] {
    [0, H].map(|start| std::array::from_fn(|w| words[start + w]))
}

/// Every byte times α = x + 1.
fn times_alpha<const N: usize>(mut words: Words<N>) -> Words<N> {
    for word in &mut words {
        let high = *word & (0x80 * ONES);
        // 127 where the highest bit is set: no borrow passes the byte.
        let carry = high.wrapping_sub(high >> 7) & (0x1b * ONES);
        *word ^= (*word ^ high) << 1 ^ carry;
    }
    words
}

/// Every byte times α⁴ = x⁴ + 1.
fn times_alpha4<const N: usize>(mut words: Words<N>) -> Words<N> {
    for word in &mut words {
        let carry = *word >> 4 & (0x0f * ONES);
        let carry = carry ^ carry << 1;
        *word ^= (*word & (0x0f * ONES)) << 4 ^ carry ^ carry << 3;
    }
    words
}

/// The sum of a word's bytes.
fn fold(mut word: u64) -> u8 {
    word ^= word >> 32;
    word ^= word >> 16;
    word ^= word >> 8;
    word.to_le_bytes()[0]
}
