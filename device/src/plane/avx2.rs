//! The transpose in AVX2: 256 elements at a time.
//!
//! Eight planes of 32 bytes are an 8×8 bit matrix at each byte position. Three rounds of swaps between registers transpose all
//! 32 matrices at once; then register `i` holds, at byte `g`, one byte of element `8g + i`, and three rounds of unpacking put
//! the elements in order. The way forward is the same steps backwards.

#![expect(
    clippy::many_single_char_names,
    clippy::needless_range_loop,
    reason = "registers of a network are numbered and lettered, not named"
)]

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_and_si256, _mm256_castsi128_si256,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_inserti128_si256, _mm256_loadu_si256,
    _mm256_maddubs_epi16, _mm256_packus_epi16, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_setr_epi8,
    _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_slli_epi64, _mm256_srli_epi16, _mm256_srli_epi64,
    _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpackhi_epi32,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
    _mm256_unpacklo_epi64, _mm256_xor_si256,
};

use super::{PlaneBlock, Planes, fold::Fold, plane_range};
use crate::{BLOCK_BYTES, BlockWords, format::Format};

/// Bytes of a plane in one step.
const STEP: usize = 32;
/// Elements in one step.
const ELEMENTS: usize = STEP * 8;

type Eight = [__m256i; 8];

/// Transposes the 8×8 bit matrices that the bytes of eight registers form: bit `i` of register `b` becomes bit `b` of register `i`.
#[target_feature(enable = "avx2")]
fn transpose_bits(v: &mut Eight) {
    swap_bits::<1>(v, _mm256_set1_epi8(0x55));
    swap_bits::<2>(v, _mm256_set1_epi8(0x33));
    swap_bits::<4>(v, _mm256_set1_epi8(0x0f));
}

/// One round: in each pair of registers `S` apart, swaps the first one's bits with `S` in their number for the second one's without.
#[target_feature(enable = "avx2")]
fn swap_bits<const S: i32>(v: &mut Eight, mask: __m256i) {
    let s = S.unsigned_abs() as usize;
    for x in (0..8).filter(|x| x & s == 0) {
        // Bits that cross into the neighbouring byte are masked out.
        let t = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi64::<S>(v[x]), v[x + s]), mask);
        v[x + s] = _mm256_xor_si256(v[x + s], t);
        v[x] = _mm256_xor_si256(v[x], _mm256_slli_epi64::<S>(t));
    }
}

/// Register `i`, byte `g` → element `8g + i`: register `k` then holds bytes `16k..16k + 16` in its low half and 128 further on in its high half.
#[target_feature(enable = "avx2")]
fn interleave(v: &Eight) -> Eight {
    let mut bytes = [_mm256_setzero_si256(); 8];
    for pair in 0..4 {
        bytes[pair] = _mm256_unpacklo_epi8(v[2 * pair], v[2 * pair + 1]);
        bytes[pair + 4] = _mm256_unpackhi_epi8(v[2 * pair], v[2 * pair + 1]);
    }
    let mut out = bytes;
    for half in 0..2 {
        let [a, b, c, d] = [bytes[4 * half], bytes[4 * half + 1], bytes[4 * half + 2], bytes[4 * half + 3]];
        let (ab_low, ab_high) = (_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi16(c, d), _mm256_unpackhi_epi16(c, d));
        out[4 * half] = _mm256_unpacklo_epi32(ab_low, cd_low);
        out[4 * half + 1] = _mm256_unpackhi_epi32(ab_low, cd_low);
        out[4 * half + 2] = _mm256_unpacklo_epi32(ab_high, cd_high);
        out[4 * half + 3] = _mm256_unpackhi_epi32(ab_high, cd_high);
    }
    out
}

/// Undoes [`interleave`].
#[target_feature(enable = "avx2")]
fn deinterleave(v: &Eight) -> Eight {
    // Each half register holds bytes 0..8 of two groups: bring the same byte of both together.
    let pairs = _mm256_setr_epi8(
        0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14,
        7, 15,
    );
    let v: Eight = v.map(|register| _mm256_shuffle_epi8(register, pairs));
    // Now an 8×8 transpose of 16-bit pairs in each half.
    let mut words = v;
    for pair in 0..4 {
        words[2 * pair] = _mm256_unpacklo_epi16(v[2 * pair], v[2 * pair + 1]);
        words[2 * pair + 1] = _mm256_unpackhi_epi16(v[2 * pair], v[2 * pair + 1]);
    }
    let mut quads = v;
    for half in 0..2 {
        let [a, b, c, d] = [words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]];
        quads[4 * half] = _mm256_unpacklo_epi32(a, c);
        quads[4 * half + 1] = _mm256_unpackhi_epi32(a, c);
        quads[4 * half + 2] = _mm256_unpacklo_epi32(b, d);
        quads[4 * half + 3] = _mm256_unpackhi_epi32(b, d);
    }
    let mut out = v;
    for i in 0..4 {
        out[2 * i] = _mm256_unpacklo_epi64(quads[i], quads[i + 4]);
        out[2 * i + 1] = _mm256_unpackhi_epi64(quads[i], quads[i + 4]);
    }
    out
}

/// The bytes at one position of 256 elements, from the planes that hold their bits.
#[target_feature(enable = "avx2")]
fn join_position(planes: &[&[u8]], position: usize, bits: usize, at: usize) -> Eight {
    let mut v = [_mm256_setzero_si256(); 8];
    for (bit, register) in v.iter_mut().take(bits).enumerate() {
        let plane: &[u8; STEP] =
            planes[position * 8 + bit][at..at + STEP].try_into().expect("a step of the plane");
        // SAFETY: the array has the register's 32 bytes, and the load needs no alignment.
        *register = unsafe { _mm256_loadu_si256(plane.as_ptr().cast()) };
    }
    transpose_bits(&mut v);
    interleave(&v)
}

/// Writes a register's halves to `low` and `high` of `out`.
#[target_feature(enable = "avx2")]
fn store_halves(out: &mut [u8], low: usize, high: usize, value: __m256i) {
    let halves = [(low, _mm256_castsi256_si128(value)), (high, _mm256_extracti128_si256::<1>(value))];
    for (at, half) in halves {
        let place: &mut [u8; 16] = (&mut out[at..at + 16]).try_into().expect("16 bytes");
        // SAFETY: the array has the half register's 16 bytes, and the store needs no alignment.
        unsafe { _mm_storeu_si128(place.as_mut_ptr().cast(), half) };
    }
}

/// Reads a register's halves from `low` and `high` of `words`.
#[target_feature(enable = "avx2")]
fn load_halves(words: &[u8], low: usize, high: usize) -> __m256i {
    let half = |at: usize| {
        let place: &[u8; 16] = words[at..at + 16].try_into().expect("16 bytes");
        // SAFETY: the array has the half register's 16 bytes, and the load needs no alignment.
        unsafe { _mm_loadu_si128(place.as_ptr().cast()) }
    };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(half(low)), half(high))
}

/// Puts planes together to words; see [`super::join`].
#[target_feature(enable = "avx2")]
pub(super) fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
    let width = format.bits() as usize;
    for (step, out) in words.chunks_exact_mut(ELEMENTS * width / 8).enumerate() {
        let at = step * STEP;
        match width {
            4 => {
                let bytes = join_position(planes, 0, 4, at);
                // Two nibbles to a byte, the first one low: first + 16 · second.
                let weigh = _mm256_set1_epi16(0x1001);
                for k in 0..4 {
                    let [a, b] = [bytes[2 * k], bytes[2 * k + 1]].map(|v| _mm256_maddubs_epi16(v, weigh));
                    store_halves(out, 16 * k, 64 + 16 * k, _mm256_packus_epi16(a, b));
                }
            }
            8 => join_step(planes, at, out),
            16 => {
                let (low, high) = (join_position(planes, 0, 8, at), join_position(planes, 1, 8, at));
                for k in 0..8 {
                    let (first, second) =
                        (_mm256_unpacklo_epi8(low[k], high[k]), _mm256_unpackhi_epi8(low[k], high[k]));
                    store_halves(out, 32 * k, 256 + 32 * k, first);
                    store_halves(out, 32 * k + 16, 256 + 32 * k + 16, second);
                }
            }
            _ => {
                let bytes = [0, 1, 2, 3].map(|position| join_position(planes, position, 8, at));
                for k in 0..8 {
                    let (low, high) = (
                        [
                            _mm256_unpacklo_epi8(bytes[0][k], bytes[1][k]),
                            _mm256_unpackhi_epi8(bytes[0][k], bytes[1][k]),
                        ],
                        [
                            _mm256_unpacklo_epi8(bytes[2][k], bytes[3][k]),
                            _mm256_unpackhi_epi8(bytes[2][k], bytes[3][k]),
                        ],
                    );
                    for half in 0..2 {
                        let place = 64 * k + 32 * half;
                        store_halves(out, place, 512 + place, _mm256_unpacklo_epi16(low[half], high[half]));
                        store_halves(
                            out,
                            place + 16,
                            512 + place + 16,
                            _mm256_unpackhi_epi16(low[half], high[half]),
                        );
                    }
                }
            }
        }
    }
    unfold(format, words);
}

/// Joins 256 bytes.
#[target_feature(enable = "avx2")]
fn join_step(planes: &[&[u8]], at: usize, out: &mut [u8]) {
    let bytes = join_position(planes, 0, 8, at);
    for (k, register) in bytes.into_iter().enumerate() {
        store_halves(out, 16 * k, 128 + 16 * k, register);
    }
}

/// Puts planes together to bytes; see [`super::join_bytes`].
#[target_feature(enable = "avx2")]
pub(super) fn join_bytes(planes: &[&[u8]; 8], bytes: &mut [u8]) {
    for (step, out) in bytes.chunks_exact_mut(ELEMENTS).enumerate() {
        join_step(planes, step * STEP, out);
    }
}

/// Folds integers, or unfolds them.
#[target_feature(enable = "avx2")]
fn unfold(format: Format, words: &mut BlockWords) {
    let fold = Fold::of(format);
    if fold != Fold::No {
        for word in words.as_chunks_mut().0 {
            *word = fold.word(u64::from_le_bytes(*word)).to_le_bytes();
        }
    }
}

/// Splits bytes into planes; see [`super::split_bytes`].
#[target_feature(enable = "avx2")]
pub(super) fn split_bytes(bytes: &[u8], mut planes: [&mut [u8]; 8]) {
    for (step, words) in bytes.chunks_exact(ELEMENTS).enumerate() {
        let mut v = [_mm256_setzero_si256(); 8];
        for k in 0..8 {
            v[k] = load_halves(words, 16 * k, 128 + 16 * k);
        }
        let mut v = deinterleave(&v);
        transpose_bits(&mut v);
        for (plane, register) in planes.iter_mut().zip(v) {
            let place: &mut [u8; STEP] =
                (&mut plane[step * STEP..][..STEP]).try_into().expect("a step of the plane");
            // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
            unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), register) };
        }
    }
}

/// Writes the planes that the bytes at one position of 256 elements form.
#[target_feature(enable = "avx2")]
fn split_position(
    format: Format,
    bytes: &Eight,
    position: usize,
    bits: usize,
    at: usize,
    planes: &mut PlaneBlock,
) {
    let mut v = deinterleave(bytes);
    transpose_bits(&mut v);
    for (bit, register) in v.into_iter().take(bits).enumerate() {
        let start = plane_range(format, position * 8 + bit).start + at;
        let place: &mut [u8; STEP] =
            (&mut planes[start..start + STEP]).try_into().expect("a step of the plane");
        // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
        unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), register) };
    }
}

/// Splits words into planes; see [`super::split`].
#[target_feature(enable = "avx2")]
pub(super) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    let mut words = *words;
    unfold(format, &mut words);
    let width = format.bits() as usize;
    let zero = _mm256_setzero_si256();
    let low_byte = _mm256_set1_epi16(0xff);
    for (step, words) in words.chunks_exact(ELEMENTS * width / 8).enumerate() {
        let at = step * STEP;
        let mut positions = [[zero; 8]; 4];
        match width {
            4 => {
                let nibble = _mm256_set1_epi8(0x0f);
                for k in 0..4 {
                    let pairs = load_halves(words, 16 * k, 64 + 16 * k);
                    let (first, second) = (
                        _mm256_and_si256(pairs, nibble),
                        _mm256_and_si256(_mm256_srli_epi16::<4>(pairs), nibble),
                    );
                    positions[0][2 * k] = _mm256_unpacklo_epi8(first, second);
                    positions[0][2 * k + 1] = _mm256_unpackhi_epi8(first, second);
                }
            }
            8 => {
                for k in 0..8 {
                    positions[0][k] = load_halves(words, 16 * k, 128 + 16 * k);
                }
            }
            16 => {
                for k in 0..8 {
                    let a = load_halves(words, 32 * k, 256 + 32 * k);
                    let b = load_halves(words, 32 * k + 16, 256 + 32 * k + 16);
                    positions[0][k] =
                        _mm256_packus_epi16(_mm256_and_si256(a, low_byte), _mm256_and_si256(b, low_byte));
                    positions[1][k] =
                        _mm256_packus_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
                }
            }
            _ => {
                // The four bytes of an element side by side → each with its own kind: 4×4 in each group of four elements.
                let gather = _mm256_setr_epi8(
                    0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10,
                    14, 3, 7, 11, 15,
                );
                for k in 0..8 {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|quarter| {
                        let place = 64 * k + 16 * quarter;
                        _mm256_shuffle_epi8(load_halves(words, place, 512 + place), gather)
                    });
                    let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                    let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                    positions[0][k] = _mm256_unpacklo_epi64(ab_low, cd_low);
                    positions[1][k] = _mm256_unpackhi_epi64(ab_low, cd_low);
                    positions[2][k] = _mm256_unpacklo_epi64(ab_high, cd_high);
                    positions[3][k] = _mm256_unpackhi_epi64(ab_high, cd_high);
                }
            }
        }
        for (position, bytes) in positions.iter().take(width.div_ceil(8)).enumerate() {
            split_position(format, bytes, position, width.min(8), at, planes);
        }
    }
}

const _: () =
    assert!(BLOCK_BYTES.is_multiple_of(ELEMENTS * 4), "a block is whole steps of the widest format");
