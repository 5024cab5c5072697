//! The transpose in AVX2 with GFNI: 256 elements at a time.
//!
//! Bytes move as in AVX2's kernel, by unpacking with lanes kept apart (a step of fp32's split begins with a change of lanes instead), but `gf2p8affineqb` transposes the 8×8 bit matrix in each quadword, as in
//! AVX-512's: to join, a byte of each of eight planes is brought together in a quadword, the matrix is transposed, and bytes are brought together
//! to elements; to split is that backwards. The instruction takes a matrix's rows from the quadword's last byte on, so planes (joining)
//! and elements (splitting) are in descending order in a quadword.
//!
//! Comments give numbers as bits: register, place in the lane. `g` counts groups of eight elements, `e` elements in a group and `p` planes, `k` these
//! backwards, `c` bytes of an element; of int4, `b` counts a group's pairs of elements and `n` the two of a pair.

use std::arch::x86_64::{
    __m256i, _mm_storeu_si128, _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_gf2p8affine_epi64_epi8, _mm256_or_si256, _mm256_permutevar8x32_epi32,
    _mm256_set1_epi64x, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_shuffle_epi32,
    _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpacklo_epi8,
    _mm256_unpacklo_epi16,
};

use super::{
    PlaneBlock, PlaneMask, Planes,
    avx2::{
        Eight, Four, Lane, Sixteen, Step, fold, fours, joins, load, load_lanes, load_words, splits, store,
        store_words, two_rounds, unpack,
    },
    first,
    fold::Fold,
    parts_mut, select,
    source::Source,
};
use crate::{BlockWords, format::Format};

/// Byte `j` is `1 << j`.
const IDENTITY: u64 = 0x8040_2010_0804_0201;

/// Transposes the matrices in the quadwords: bit `i` of the result's byte `j` is bit `j` of byte `7 − i`, if byte `j` of `select` is `1 << j`.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn transpose(matrices: __m256i, select: u64) -> __m256i {
    _mm256_gf2p8affine_epi64_epi8::<0>(_mm256_set1_epi64x(select.cast_signed()), matrices)
}

/// Brings steps of eight planes together: registers of a byte of each element, g3 g2 g1, g0 e2 e1 e0.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn bytes_of<const FOLD: bool>(load: impl Fn(usize) -> __m256i) -> Eight {
    let mut v = [_mm256_setzero_si256(); 8];
    for (plane, v) in v.iter_mut().enumerate() {
        *v = load(plane);
    }
    if FOLD {
        fold(&mut v);
    }
    v.reverse(); // k2 k1 k0, g3 g2 g1 g0
    unpack::<8, 4>(&mut v); // g3 k1 k0, g2 g1 g0 k2
    unpack::<8, 2>(&mut v); // g3 g2 k0, g1 g0 k2 k1
    unpack::<8, 1>(&mut v); // g3 g2 g1, g0 k2 k1 k0
    for v in &mut v {
        *v = transpose(*v, IDENTITY);
    }
    v
}

/// Joins planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes.
#[inline]
#[target_feature(enable = "avx2,gfni")]
unsafe fn join_8<const FOLD: bool>(planes: impl Source<8>, words: &mut [u8]) {
    for (step, words) in words.as_chunks_mut::<256>().0.iter_mut().enumerate() {
        // SAFETY: the steps before this one and this one take 32 bytes of a plane for 256 of the words.
        store_words(words, &bytes_of::<FOLD>(|bit| unsafe { load(planes.plane(bit), 32 * step) }));
    }
}

/// Brings low and high bytes of elements together: g3 g2 g1 g0, e2 e1 e0 c.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn pairs_of(low: impl Fn(usize) -> __m256i, high: impl Fn(usize) -> __m256i) -> Sixteen {
    let (low, high) = (bytes_of::<false>(low), bytes_of::<false>(high));
    let mut v = [_mm256_setzero_si256(); 16];
    for g in 0..8 {
        v[2 * g] = _mm256_unpacklo_epi8(low[g], high[g]);
        v[2 * g + 1] = _mm256_unpackhi_epi8(low[g], high[g]);
    }
    v
}

/// Joins planes of 16 bits.
///
/// # Safety
/// Each plane has 256 bytes.
#[target_feature(enable = "avx2,gfni")]
unsafe fn join_16(planes: impl Source<16>, words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<512>().0.iter_mut().enumerate() {
        // SAFETY: there are eight steps.
        let pairs = pairs_of(
            |bit| unsafe { load(planes.plane(bit), 32 * step) },
            |bit| unsafe { load(planes.plane(8 + bit), 32 * step) },
        );
        store_words(words, &pairs);
    }
}

/// Joins planes of 32 bits.
///
/// # Safety
/// Each plane has 128 bytes.
#[target_feature(enable = "avx2,gfni")]
unsafe fn join_32(planes: impl Source<32>, words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<1024>().0.iter_mut().enumerate() {
        // SAFETY: there are four steps.
        let low = pairs_of(
            |bit| unsafe { load(planes.plane(bit), 32 * step) },
            |bit| unsafe { load(planes.plane(8 + bit), 32 * step) },
        );
        // SAFETY: as above.
        let high = pairs_of(
            |bit| unsafe { load(planes.plane(16 + bit), 32 * step) },
            |bit| unsafe { load(planes.plane(24 + bit), 32 * step) },
        );
        let mut v = [_mm256_setzero_si256(); 32];
        for g in 0..16 {
            v[2 * g] = _mm256_unpacklo_epi16(low[g], high[g]);
            v[2 * g + 1] = _mm256_unpackhi_epi16(low[g], high[g]);
        } // g3 g2 g1 g0 e2, e1 e0 c1 c0
        store_words(words, &v);
    }
}

joins!("avx2,gfni");

/// Joins planes of four bits.
///
/// # Safety
/// Each plane has 1024 bytes.
#[target_feature(enable = "avx2,gfni")]
unsafe fn join_4<const FOLD: bool>(planes: impl Source<4>, words: &mut BlockWords) {
    // A matrix has two groups: nibbles of the second are the low half of its columns, of the first the high half. Byte b of a
    // group wants elements 2b and 2b + 1 of that group, so half of each byte is taken from the matrix with its groups exchanged.
    let from_straight = _mm256_set1_epi64x(0x0f0f_0f0f_f0f0_f0f0_u64.cast_signed());
    for (step, words) in words.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        // SAFETY: there are 32 steps.
        let mut v: Four = std::array::from_fn(|plane| unsafe { load(planes.plane(plane), 32 * step) });
        if FOLD {
            fold(&mut v);
        }
        v.reverse(); // k1 k0, g3 g2 g1 g0
        unpack::<4, 2>(&mut v); // g3 k0, g2 g1 g0 k1
        unpack::<4, 1>(&mut v); // g3 g2, g1 g0 k1 k0
        for v in &mut v {
            let straight = transpose(*v, 0x4010_0401_8020_0802);
            let exchanged = transpose(_mm256_shuffle_epi32::<0b10_11_00_01>(*v), 0x8020_0802_4010_0401);
            *v = _mm256_or_si256(
                _mm256_and_si256(from_straight, straight),
                _mm256_andnot_si256(from_straight, exchanged),
            );
        }
        store_words(words, &v);
    }
}

/// For splitting bytes: byte `p` of the transposed matrices is plane `p`, folded with the sign if `fold`.
const fn planes_of_bytes(fold: bool) -> u64 {
    if fold { 0x80c0_a090_8884_8281 } else { IDENTITY }
}

/// Puts the bytes of each lane in the order of `PLACES`, its hexadecimal digits, the last byte's first.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn shuffle<const PLACES: u64>(v: __m256i) -> __m256i {
    let places = const {
        let mut places: Step = [0; 32];
        let mut at = 0;
        while at < 32 {
            places[at] = (PLACES >> (at % 16 * 4)).to_le_bytes()[0] & 15;
            at += 1;
        }
        places
    };
    // SAFETY: there are 32 bytes.
    _mm256_shuffle_epi8(v, unsafe { load(places.as_ptr(), 0) })
}

/// Splits into planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes, and nothing else uses them meanwhile.
#[inline]
#[target_feature(enable = "avx2,gfni")]
unsafe fn split_8<const FOLD: bool>(words: &[u8], planes: [*mut u8; 8]) {
    for (step, words) in words.as_chunks::<256>().0.iter().enumerate() {
        let mut v: Eight = load_words(words.as_chunks().0); // g3 g2 g1, g0 e2 e1 e0
        for v in &mut v {
            *v = transpose(shuffle::<0x89ab_cdef_0123_4567>(*v), planes_of_bytes(FOLD));
        } // g3 g2 g1, g0 p2 p1 p0
        unpack::<8, 4>(&mut v); // g0 g2 g1, p2 p1 p0 g3
        unpack::<8, 2>(&mut v); // g0 p2 g1, p1 p0 g3 g2
        unpack::<8, 1>(&mut v); // g0 p2 p1, p0 g3 g2 g1
        unpack::<8, 4>(&mut v); // p0 p2 p1, g3 g2 g1 g0
        for plane in 0..8 {
            // SAFETY: the steps before this one and this one take 32 bytes of a plane for 256 of the words.
            unsafe {
                _mm256_storeu_si256(planes[plane].add(32 * step).cast(), v[4 * (plane % 2) + plane / 2]);
            }
        }
    }
}

/// Splits into planes of 16 bits.
#[target_feature(enable = "avx2,gfni")]
fn split_16(words: &BlockWords, planes: &mut [[Step; 8]; 16]) {
    for (step, words) in words.as_chunks::<512>().0.iter().enumerate() {
        let words = words.as_chunks().0; // g3 g2 g1 g0, e2 e1 e0 c
        let planes_of = |v| transpose(shuffle::<0x1357_9bdf_0246_8ace>(v), IDENTITY); // g3 g2 g1 g0, c p2 p1 p0
        let v = fours(|k| planes_of(load_lanes(words, k)));
        for (first, four) in v.as_chunks().0.iter().enumerate() {
            let four = two_rounds(*four); // c p2 p1 p0, g3 g2 g1 g0
            for plane in 0..4 {
                store(&mut planes[15 - 4 * first - plane][step], four[plane]);
            }
        }
    }
}

/// Writes a register's low lane to `low` and its high one to `high`.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn store_lanes(low: &mut Lane, high: &mut Lane, value: __m256i) {
    // SAFETY: the arrays have a lane's 16 bytes, and the stores need no alignment.
    unsafe {
        _mm_storeu_si128(low.as_mut_ptr().cast(), _mm256_castsi256_si128(value));
        _mm_storeu_si128(high.as_mut_ptr().cast(), _mm256_extracti128_si256::<1>(value));
    }
}

/// Splits into planes of 32 bits.
#[target_feature(enable = "avx2,gfni")]
fn split_32(words: &BlockWords, planes: &mut [[Lane; 8]; 32]) {
    // A register is a group, its lanes the halves: e2, e1 e0 c1 c0. The lanes become those of c1.
    let lanes_of_bytes = _mm256_setr_epi32(4, 0, 5, 1, 6, 2, 7, 3);
    for (step, words) in words.as_chunks::<512>().0.iter().enumerate() {
        let groups: &[Step; 16] = words.as_chunks().0.try_into().expect("16 groups");
        let v = fours(|g| {
            // SAFETY: a step is a register's 32 bytes.
            let v = unsafe { load(groups[g].as_ptr(), 0) };
            let v = shuffle::<0x37bf_26ae_159d_048c>(v); // e2, c1 c0 e1 e0
            let v = _mm256_permutevar8x32_epi32(v, lanes_of_bytes); // c1, c0 e2 e1 e0
            transpose(v, IDENTITY) // g3 g2 g1 g0, c0 p2 p1 p0
        });
        for (first, four) in v.as_chunks().0.iter().enumerate() {
            let four = two_rounds(*four); // c0 p2 p1 p0, g3 g2 g1 g0
            let (high, low) = planes.split_at_mut(16);
            for (plane, v) in four.into_iter().enumerate() {
                let at = 15 - 4 * first - plane;
                store_lanes(&mut low[at][step], &mut high[at][step], v);
            }
        }
    }
}

/// Puts two registers' low nibbles into one, the first's low there, and their high nibbles into the other.
///
/// To shift nibbles by the instruction that transposes takes as many operations as to exchange them where they differ (`swap`), but fewer one behind the other.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn nibbles_of(a: __m256i, b: __m256i) -> [__m256i; 2] {
    let lower = _mm256_set1_epi64x(0x0f0f_0f0f_0f0f_0f0f);
    let by = |v, matrix| _mm256_gf2p8affine_epi64_epi8::<0>(v, _mm256_set1_epi64x(matrix));
    let (up, down) = (by(b, 0x0102_0408), by(a, 0x1020_4080_0000_0000));
    [_mm256_or_si256(_mm256_and_si256(lower, a), up), _mm256_or_si256(_mm256_andnot_si256(lower, b), down)]
}

/// Splits into planes of four bits.
#[target_feature(enable = "avx2,gfni")]
fn split_4<const FOLD: bool>(words: &BlockWords, planes: &mut [[Step; 32]; 4]) {
    // Rows have elements of two groups, which g3 tells apart: quadwords become p1 p0 g3.
    let select = if FOLD { 0x8008_c00c_a00a_9009 } else { 0x8008_4004_2002_1001 };
    for (step, words) in words.as_chunks::<128>().0.iter().enumerate() {
        let mut v: Four = load_words(words.as_chunks().0); // g3 g2, g1 g0 b1 b0
        for v in &mut v {
            *v = shuffle::<0xcdef_89ab_4567_0123>(*v);
        }
        let ([low, high], [low_behind, high_behind]) = (nibbles_of(v[0], v[2]), nibbles_of(v[1], v[3]));
        v = [high, high_behind, low, low_behind]; // n g2, g1 g0 b1 b0
        unpack::<4, 2>(&mut v); // g1 g2, g0 b1 b0 n
        for v in &mut v {
            *v = transpose(*v, select);
        } // g1 g2, g0 p1 p0 g3
        unpack::<4, 1>(&mut v); // g1 g0, p1 p0 g3 g2
        unpack::<4, 2>(&mut v); // p1 g0, p0 g3 g2 g1
        unpack::<4, 1>(&mut v); // p1 p0, g3 g2 g1 g0
        for plane in 0..4 {
            store(&mut planes[3 - plane][step], v[plane]);
        }
    }
}

splits!("avx2,gfni");
