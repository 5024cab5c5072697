//! The transpose in AVX2: 256 elements at a time (512 where bytes are joined).
//!
//! Bits move between registers as they do between words in the portable kernel: a *swap* exchanges
//! one bit of the register's number with one of the bit's place in its byte. Three swaps turn the
//! registers of eight (of int4: four) planes into those of eight elements (of int4: four pairs), or
//! back. Bytes move by unpacking: of pairs of registers, low and high, it moves the first bit of
//! the byte's place in the lane to the register's number, the other three up, and puts last the bit
//! in which the pairs differ.
//!
//! With 16 registers, and results that come two cycles after their operands, the order of
//! operations decides how many go at once: what follows is in the order found fastest, two
//! transposes by turns or registers in fours.
//!
//! Lanes are kept apart: the low ones have the first half of a step's elements. Comments give
//! numbers as bits: register, place in the lane. `e` counts elements in a group of eight, `g`
//! groups, `c` bytes of an element; of int4, `b` counts its pairs in a group.

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_blend_epi32, _mm256_castsi128_si256,
    _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_permute2x128_si256, _mm256_set1_epi8,
    _mm256_setzero_si256, _mm256_slli_epi16, _mm256_srli_epi16, _mm256_storeu_si256, _mm256_unpackhi_epi8,
    _mm256_unpacklo_epi8, _mm256_xor_si256,
};

use super::{PlaneBlock, PlaneMask, Planes, first, fold::Fold, parts_mut, select, source::Source};
use crate::{BlockWords, format::Format};

/// A step of a plane.
pub(super) type Step = [u8; 32];
/// Half a register's bytes.
pub(super) type Lane = [u8; 16];

pub(super) type Four = [__m256i; 4];
pub(super) type Eight = [__m256i; 8];
pub(super) type Sixteen = [__m256i; 16];

/// Exchanges the bit of the registers' numbers that is `D` with the bit of the places in the byte
/// that is `S`: 1, 2 or 4.
#[inline]
#[target_feature(enable = "avx2")]
fn swap<const N: usize, const D: usize, const S: i32>(v: &mut [__m256i; N]) {
    let mask = _mm256_set1_epi8(match S {
        1 => 0x55,
        2 => 0x33,
        _ => 0x0f,
    });
    for pair in 0..N / 2 {
        let a = pair / D * 2 * D + pair % D;
        // What crosses into the neighbouring byte is masked out.
        let differ = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16::<S>(v[a]), v[a + D]), mask);
        v[a + D] = _mm256_xor_si256(v[a + D], differ);
        v[a] = _mm256_xor_si256(v[a], _mm256_slli_epi16::<S>(differ));
    }
}

/// From eight planes to eight elements, or back.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(v: &mut Eight) {
    swap::<8, 4, 4>(v);
    swap::<8, 2, 2>(v);
    swap::<8, 1, 1>(v);
}

/// Unpacks the pairs of registers `D` apart.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn unpack<const N: usize, const D: usize>(v: &mut [__m256i; N]) {
    for pair in 0..N / 2 {
        let a = pair / D * 2 * D + pair % D;
        (v[a], v[a + D]) = (_mm256_unpacklo_epi8(v[a], v[a + D]), _mm256_unpackhi_epi8(v[a], v[a + D]));
    }
}

/// The step of a plane that begins at `at`.
///
/// # Safety
/// The plane has that many bytes, and 32 more.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load(plane: *const u8, at: usize) -> __m256i {
    // SAFETY: as the caller promises; the load needs no alignment.
    unsafe { _mm256_loadu_si256(plane.add(at).cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store(place: &mut Step, value: __m256i) {
    // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), value) }
}

/// Puts the lanes of two registers into the order of elements, or back: the low lanes, and the high
/// ones.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes(a: __m256i, b: __m256i) -> [__m256i; 2] {
    [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)]
}

/// Reads a register's low lane from `words[k]`, its high one from as far into the second half.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_lanes(words: &[Lane], k: usize) -> __m256i {
    let (low, high) = (&words[k], &words[words.len() / 2 + k]);
    // SAFETY: the arrays have a lane's 16 bytes, and the loads need no alignment.
    let (low, high) =
        unsafe { (_mm_loadu_si128(low.as_ptr().cast()), _mm_loadu_si128(high.as_ptr().cast())) };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
}

/// Reads `N` registers as [`load_lanes`] does each.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_words<const N: usize>(words: &[Lane]) -> [__m256i; N] {
    let mut v = [_mm256_setzero_si256(); N];
    for (k, v) in v.iter_mut().enumerate() {
        *v = load_lanes(words, k);
    }
    v
}

/// Writes registers as [`load_words`] reads them.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_words<const N: usize>(words: &mut [u8], v: &[__m256i; N]) {
    let words = words.as_chunks_mut::<32>().0;
    for k in 0..N / 2 {
        let [low, high] = lanes(v[2 * k], v[2 * k + 1]);
        store(&mut words[k], low);
        store(&mut words[N / 2 + k], high);
    }
}

/// The same without shuffles: registers are stored whole where their low lanes go and then where
/// their high ones go, in an order in which what the other lane overwrote is written next.
#[inline]
#[target_feature(enable = "avx2")]
fn store_words_twice<const N: usize>(words: &mut [u8], v: &[__m256i; N]) {
    let mut put = |lane: usize, value| {
        store(words[16 * lane..].first_chunk_mut().expect("as many words as registers"), value);
    };
    for (k, register) in v[..N - 1].iter().enumerate() {
        put(k, *register);
    }
    for k in (1..N).rev() {
        put(N + k - 1, v[k]);
    }
    put(N - 1, _mm256_blend_epi32::<0xf0>(v[N - 1], v[0]));
}

/// Adds the sign's plane, the last, to the others.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn fold<const N: usize>(v: &mut [__m256i; N]) {
    for plane in 0..N - 1 {
        v[plane] = _mm256_xor_si256(v[plane], v[N - 1]);
    }
}

/// [`transpose`] twice, by turns: while the ones wait for what they need, the others go on.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_both(v: &mut Eight, w: &mut Eight) {
    swap::<8, 4, 4>(v);
    swap::<8, 4, 4>(w);
    swap::<8, 2, 2>(v);
    swap::<8, 2, 2>(w);
    swap::<8, 1, 1>(v);
    swap::<8, 1, 1>(w);
}

/// The steps that begin at `at` of eight planes from `FIRST` on.
///
/// # Safety
/// The planes have that many bytes, and 32 more.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_eight<const N: usize, const FIRST: usize>(planes: impl Source<N>, at: usize) -> Eight {
    let mut v = [_mm256_setzero_si256(); 8];
    for (bit, v) in v.iter_mut().enumerate() {
        // SAFETY: as the caller promises.
        *v = unsafe { load(planes.plane(FIRST + bit), at) };
    }
    v
}

/// Joins planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn join_8<const FOLD: bool>(planes: impl Source<8>, words: &mut [u8]) {
    for (step, words) in words.as_chunks_mut::<512>().0.iter_mut().enumerate() {
        let [mut v, mut w] = [[_mm256_setzero_si256(); 8]; 2];
        for bit in 0..8 {
            // SAFETY: the steps before these two and these take 64 bytes of a plane for 512 of the
            // words.
            unsafe {
                v[bit] = load(planes.plane(bit), 64 * step);
                w[bit] = load(planes.plane(bit), 64 * step + 32);
            }
        }
        if FOLD {
            fold(&mut v);
            fold(&mut w);
        }
        transpose_both(&mut v, &mut w); // e2 e1 e0, g3 g2 g1 g0
        unpack::<8, 4>(&mut v);
        unpack::<8, 4>(&mut w); // g3 e1 e0, g2 g1 g0 e2
        unpack::<8, 2>(&mut v);
        unpack::<8, 2>(&mut w); // g3 g2 e0, g1 g0 e2 e1
        unpack::<8, 1>(&mut v);
        unpack::<8, 1>(&mut w); // g3 g2 g1, g0 e2 e1 e0
        let (first, second) = words.split_at_mut(256);
        store_words(first, &v);
        store_words(second, &w);
    }
}

/// Joins planes of 16 bits.
///
/// # Safety
/// Each plane has 256 bytes.
#[target_feature(enable = "avx2")]
unsafe fn join_16(planes: impl Source<16>, words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<512>().0.iter_mut().enumerate() {
        // SAFETY: there are eight steps.
        let [mut low, mut high] =
            unsafe { [load_eight::<_, 0>(planes, 32 * step), load_eight::<_, 8>(planes, 32 * step)] };
        transpose_both(&mut low, &mut high);
        // e2 e1 e0 c, g3 g2 g1 g0
        let v = in_order(|k| if k % 2 == 0 { low[k / 2] } else { high[k / 2] }); // g3 g2 g1 g0, e2 e1 e0 c
        store_words_twice(words, &v);
    }
}

/// Joins planes of 32 bits.
///
/// # Safety
/// Each plane has 128 bytes.
#[target_feature(enable = "avx2")]
unsafe fn join_32(planes: impl Source<32>, words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<1024>().0.iter_mut().enumerate() {
        // SAFETY: there are four steps.
        let mut c = unsafe {
            [
                load_eight::<_, 0>(planes, 32 * step),
                load_eight::<_, 8>(planes, 32 * step),
                load_eight::<_, 16>(planes, 32 * step),
                load_eight::<_, 24>(planes, 32 * step),
            ]
        };
        transpose(&mut c[0]);
        transpose(&mut c[1]);
        transpose(&mut c[2]);
        transpose(&mut c[3]);
        let low = in_order(|k| c[k % 4][k / 4]); // of e2 = 0: g3 g2 g1 g0, e1 e0 c1 c0
        let high = in_order(|k| c[k % 4][4 + k / 4]);
        let mut v = [_mm256_setzero_si256(); 32];
        for g in 0..16 {
            (v[2 * g], v[2 * g + 1]) = (low[g], high[g]);
        } // g3 g2 g1 g0 e2, e1 e0 c1 c0
        store_words(words, &v);
    }
}

/// What joins by functions of each width, for the features `$features`.
macro_rules! joins {
    ($features:literal) => {
        /// Puts planes together to words; see [`super::join`].
        #[target_feature(enable = $features)]
        pub(super) fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
            // SAFETY: `first` has asserted the planes' lengths.
            unsafe {
                match (format.bits(), Fold::of(format)) {
                    (4, Fold::No) => join_4::<false>(first(planes, 1024), words),
                    (4, _) => join_4::<true>(first(planes, 1024), words),
                    (8, Fold::No) => join_8::<false>(first(planes, 512), words),
                    (8, _) => join_8::<true>(first(planes, 512), words),
                    (16, _) => join_16(first(planes, 256), words),
                    _ => join_32(first(planes, 128), words),
                }
            }
        }

        /// Puts planes of a block together to words; see [`super::join_block`].
        #[target_feature(enable = $features)]
        pub(super) fn join_block(
            format: Format,
            mask: PlaneMask,
            block: &PlaneBlock,
            words: &mut BlockWords,
        ) {
            if !mask.covers(PlaneMask::all(format)) {
                return join(format, &select(format, mask, block), words);
            }
            // SAFETY: a block has all bytes of its planes.
            unsafe {
                match (format.bits(), Fold::of(format)) {
                    (4, Fold::No) => join_4::<false>(block, words),
                    (4, _) => join_4::<true>(block, words),
                    (8, Fold::No) => join_8::<false>(block, words),
                    (8, _) => join_8::<true>(block, words),
                    (16, _) => join_16(block, words),
                    _ => join_32(block, words),
                }
            }
        }

        /// Puts planes together to bytes; see [`super::join_bytes`].
        #[target_feature(enable = $features)]
        pub(super) fn join_bytes(planes: &[&[u8]; 8], bytes: &mut [u8]) {
            // SAFETY: `first` has asserted the planes' lengths.
            unsafe { join_8::<false>(first(planes, bytes.len() / 8), bytes) }
        }
    };
}

joins!("avx2");

/// Joins planes of four bits.
///
/// # Safety
/// Each plane has 1024 bytes.
#[target_feature(enable = "avx2")]
unsafe fn join_4<const FOLD: bool>(planes: impl Source<4>, words: &mut BlockWords) {
    for (step, words) in words.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        // SAFETY: there are 32 steps.
        let mut v: Four = std::array::from_fn(|plane| unsafe { load(planes.plane(plane), 32 * step) }); // p1 p0, with bits b1 b0 n, n the nibble
        if FOLD {
            fold(&mut v);
        }
        swap::<4, 1, 1>(&mut v); // p1 n, with bits b1 b0 p0
        swap::<4, 2, 2>(&mut v); // b0 n, with bits b1 p1 p0
        swap::<4, 1, 4>(&mut v); // b0 b1, with bits n p1 p0; g3 g2 g1 g0
        unpack::<4, 1>(&mut v); // b0 g3, g2 g1 g0 b1
        unpack::<4, 2>(&mut v); // g2 g3, g1 g0 b1 b0
        v.swap(1, 2);
        store_words_twice(words, &v);
    }
}

/// The first two of four rounds of unpacking for sixteen registers. They are asked for in fours, so
/// that few are at hand at once.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn fours(register: impl Fn(usize) -> __m256i) -> Sixteen {
    let mut v = [_mm256_setzero_si256(); 16];
    for k in 0..4 {
        [v[k], v[4 + k], v[8 + k], v[12 + k]] =
            two_rounds([register(k), register(4 + k), register(8 + k), register(12 + k)]);
    }
    v
}

/// Two rounds of unpacking four registers, the last two of four after [`fours`]: in all, the
/// registers' number becomes the place in the lane, and that the register's number.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn two_rounds(mut v: Four) -> Four {
    unpack::<4, 2>(&mut v);
    unpack::<4, 1>(&mut v);
    v
}

/// All four rounds for sixteen registers.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(register: impl Fn(usize) -> __m256i) -> Sixteen {
    let mut v = fours(register);
    for four in v.as_chunks_mut().0 {
        *four = two_rounds(*four);
    }
    v
}

/// Splits into planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes, and nothing else uses them meanwhile.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn split_8<const FOLD: bool>(words: &[u8], planes: [*mut u8; 8]) {
    for (step, words) in words.as_chunks::<256>().0.iter().enumerate() {
        let mut v: Eight = load_words(words.as_chunks().0); // g3 g2 g1, g0 e2 e1 e0
        unpack::<8, 4>(&mut v); // g0 g2 g1, e2 e1 e0 g3
        unpack::<8, 2>(&mut v); // g0 e2 g1, e1 e0 g3 g2
        unpack::<8, 1>(&mut v); // g0 e2 e1, e0 g3 g2 g1
        unpack::<8, 4>(&mut v); // e0 e2 e1, g3 g2 g1 g0
        let mut v = [v[0], v[4], v[1], v[5], v[2], v[6], v[3], v[7]];
        transpose(&mut v);
        if FOLD {
            fold(&mut v);
        }
        for bit in 0..8 {
            // SAFETY: the steps before this one and this one take 32 bytes of a plane for 256 of
            // the words.
            unsafe { _mm256_storeu_si256(planes[bit].add(32 * step).cast(), v[bit]) };
        }
    }
}

/// Splits into planes of 16 bits.
#[target_feature(enable = "avx2")]
fn split_16(words: &BlockWords, planes: &mut [[Step; 8]; 16]) {
    for (step, words) in words.as_chunks::<512>().0.iter().enumerate() {
        let words = words.as_chunks().0; // g3 g2 g1 g0, e2 e1 e0 c
        let v = in_order(|k| load_lanes(words, k)); // e2 e1 e0 c, g3 g2 g1 g0
        for c in 0..2 {
            let mut v = [v[c], v[2 + c], v[4 + c], v[6 + c], v[8 + c], v[10 + c], v[12 + c], v[14 + c]];
            transpose(&mut v);
            for bit in 0..8 {
                store(&mut planes[15 - 8 * c - bit][step], v[bit]);
            }
        }
    }
}

/// Splits into planes of 32 bits.
#[target_feature(enable = "avx2")]
fn split_32(words: &BlockWords, planes: &mut [[Step; 4]; 32]) {
    for (step, words) in words.as_chunks::<1024>().0.iter().enumerate() {
        let words = words.as_chunks().0;
        let v = in_order(|g| load_lanes(words, 2 * g)); // of e2 = 0: e1 e0 c1 c0, g3 g2 g1 g0
        let w = in_order(|g| load_lanes(words, 2 * g + 1));
        for c in 0..4 {
            let mut v = [v[c], v[4 + c], v[8 + c], v[12 + c], w[c], w[4 + c], w[8 + c], w[12 + c]];
            transpose(&mut v);
            for bit in 0..8 {
                store(&mut planes[31 - 8 * c - bit][step], v[bit]);
            }
        }
    }
}

/// Splits into planes of four bits.
#[target_feature(enable = "avx2")]
fn split_4<const FOLD: bool>(words: &BlockWords, planes: &mut [[Step; 32]; 4]) {
    for (step, words) in words.as_chunks::<128>().0.iter().enumerate() {
        let mut v: Four = load_words(words.as_chunks().0); // g3 g2, g1 g0 b1 b0
        unpack::<4, 2>(&mut v); // g1 g2, g0 b1 b0 g3
        unpack::<4, 1>(&mut v); // g1 g0, b1 b0 g3 g2
        unpack::<4, 2>(&mut v); // b1 g0, b0 g3 g2 g1
        unpack::<4, 1>(&mut v); // b1 b0, g3 g2 g1 g0; with bits n p1 p0
        swap::<4, 2, 4>(&mut v); // n b0, with bits b1 p1 p0
        swap::<4, 1, 2>(&mut v); // n p1, with bits b1 b0 p0
        swap::<4, 2, 1>(&mut v); // p0 p1, with bits b1 b0 n
        v.swap(1, 2);
        if FOLD {
            fold(&mut v);
        }
        for plane in 0..4 {
            store(&mut planes[3 - plane][step], v[plane]);
        }
    }
}

/// What splits by the functions above, for the features `$features`.
macro_rules! splits {
    ($features:literal) => {
        /// Splits words into planes; see [`super::split`].
        #[target_feature(enable = $features)]
        pub(super) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
            match (format.bits(), Fold::of(format)) {
                (4, Fold::No) => split_4::<false>(words, parts_mut(planes)),
                (4, _) => split_4::<true>(words, parts_mut(planes)),
                (8, fold) => {
                    let planes = parts_mut::<8, 512, 1>(planes).each_mut();
                    let planes = std::array::from_fn(|plane| planes[7 - plane].as_mut_ptr().cast());
                    // SAFETY: the planes have 512 bytes each, and the pointers are all that knows
                    // them.
                    unsafe {
                        match fold {
                            Fold::No => split_8::<false>(words, planes),
                            _ => split_8::<true>(words, planes),
                        }
                    }
                }
                (16, _) => split_16(words, parts_mut(planes)),
                _ => split_32(words, parts_mut(planes)),
            }
        }

        /// Splits bytes into planes; see [`super::split_bytes`].
        #[target_feature(enable = $features)]
        pub(super) fn split_bytes(bytes: &[u8], planes: [&mut [u8]; 8]) {
            let planes = planes.map(|plane| plane[..bytes.len() / 8].as_mut_ptr());
            // SAFETY: that asserted the planes' lengths, and the pointers are all that knows them.
            unsafe { split_8::<false>(bytes, planes) }
        }
    };
}

splits!("avx2");
