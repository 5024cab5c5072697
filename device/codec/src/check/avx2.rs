//! Checks in AVX2: a row is two registers, and what is multiplied by a constant is looked up, half
//! a byte at a time.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_and_si128, _mm_cvtsi128_si64, _mm_loadu_si128, _mm_set1_epi8, _mm_shuffle_epi8,
    _mm_srli_epi16, _mm_srli_si128, _mm_xor_si128, _mm256_add_epi8, _mm256_and_si256, _mm256_castsi256_si128,
    _mm256_cmpgt_epi8, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_set1_epi8, _mm256_setzero_si256,
    _mm256_xor_si256,
};

use super::{ROW, Span, last_row, times_alpha};

/// For both halves of a byte: what each of their values times a constant is.
type Table = [[u8; 16]; 2];

/// The tables of α^4, which is what the upper half of a row's words has more than the lower one,
/// then of what the halves of those have, and so on to single bytes.
const TABLES: [Table; 6] = [table(4), table(8), table(16), table(128), table(64), table(32)];

const fn table(exponent: usize) -> Table {
    let mut table = [[0; 16]; 2];
    let mut value = 0;
    while value < 16 {
        let mut products = [value, value << 4];
        let mut power = 0;
        while power < exponent {
            products = [times_alpha(products[0]), times_alpha(products[1])];
            power += 1;
        }
        table[0][value as usize] = products[0];
        table[1][value as usize] = products[1];
        value += 1;
    }
    table
}

#[target_feature(enable = "avx2")]
pub(super) fn checks(bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
    for (plane, check) in planes.iter().zip(checks) {
        *check = one(bundle, *plane);
    }
}

#[target_feature(enable = "avx2")]
pub(super) fn differ(bundle: &[u8], planes: &[Span], checks: &[u16]) -> u32 {
    let mut differ = 0;
    for (at, (plane, check)) in planes.iter().zip(checks).enumerate() {
        differ |= u32::from(one(bundle, *plane) != *check) << at;
    }
    differ
}

#[inline]
#[target_feature(enable = "avx2")]
fn one(bundle: &[u8], plane: Span) -> u16 {
    if plane.length == 0 {
        return 0;
    }
    let (rows, rest) = bundle[plane.range()].as_chunks::<ROW>();
    let mut sum = [_mm256_setzero_si256(); 2];
    if !rest.is_empty() {
        let mut spare = [0; ROW];
        let (row, mask) = last_row(bundle, plane, &mut spare);
        let (row, mask) = (load(row), load(mask));
        sum = [_mm256_and_si256(row[0], mask[0]), _mm256_and_si256(row[1], mask[1])];
    }
    let mut weighted = sum;
    for row in rows.iter().rev() {
        let row = load(row);
        for half in 0..2 {
            sum[half] = _mm256_xor_si256(sum[half], row[half]);
            weighted[half] = _mm256_xor_si256(by_alpha(weighted[half]), row[half]);
        }
    }
    let sum = _mm256_xor_si256(sum[0], sum[1]);
    let sum = _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let (low, high) = (
        _mm_xor_si128(_mm256_castsi256_si128(weighted[0]), times::<0>(_mm256_castsi256_si128(weighted[1]))),
        _mm_xor_si128(
            _mm256_extracti128_si256::<1>(weighted[0]),
            times::<0>(_mm256_extracti128_si256::<1>(weighted[1])),
        ),
    );
    let weighted = _mm_xor_si128(low, times::<1>(high));
    let weighted = _mm_xor_si128(weighted, times::<2>(_mm_srli_si128::<8>(weighted)));
    let weighted = _mm_xor_si128(weighted, times::<3>(_mm_srli_si128::<4>(weighted)));
    let weighted = _mm_xor_si128(weighted, times::<4>(_mm_srli_si128::<2>(weighted)));
    let weighted = _mm_xor_si128(weighted, times::<5>(_mm_srli_si128::<1>(weighted)));
    let sum = _mm_cvtsi128_si64(_mm_xor_si128(sum, _mm_srli_si128::<8>(sum)));
    let sum = sum ^ sum >> 32;
    let sum = sum ^ sum >> 16;
    u16::from_le_bytes([(sum ^ sum >> 8).to_le_bytes()[0], _mm_cvtsi128_si64(weighted).to_le_bytes()[0]])
}

/// Every byte times α.
#[inline]
#[target_feature(enable = "avx2")]
fn by_alpha(v: __m256i) -> __m256i {
    let carry = _mm256_and_si256(_mm256_cmpgt_epi8(_mm256_setzero_si256(), v), _mm256_set1_epi8(0x1b));
    _mm256_xor_si256(v, _mm256_xor_si256(_mm256_add_epi8(v, v), carry))
}

/// Every byte times the constant of a table.
#[inline]
#[target_feature(enable = "avx2")]
fn times<const T: usize>(v: __m128i) -> __m128i {
    let nibble = _mm_set1_epi8(15);
    let [low, high] = [load_table(&TABLES[T][0]), load_table(&TABLES[T][1])];
    _mm_xor_si128(
        _mm_shuffle_epi8(low, _mm_and_si128(v, nibble)),
        _mm_shuffle_epi8(high, _mm_and_si128(_mm_srli_epi16::<4>(v), nibble)),
    )
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_table(table: &[u8; 16]) -> __m128i {
    // SAFETY: the array has the register's 16 bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(table.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(row: &[u8; ROW]) -> [__m256i; 2] {
    let [low, high]: &[[u8; 32]; 2] = row.as_chunks().0.try_into().expect("two halves");
    // SAFETY: each array has a register's 32 bytes, and the loads need no alignment.
    unsafe { [_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())] }
}
