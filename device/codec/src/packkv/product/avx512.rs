//! Packs of four tokens with AVX-512 VBMI: sixteen at a time, of channels that follow each other in
//! one round.
//!
//! The rules:
//! * Sixteen packs take at most 448 bits, and so lie in 64 bytes that are loaded at once.
//! * A word of 64 bits is for two packs that follow each other: they take at most 56 bits and begin
//!   in its first byte. `vpermb` fetches its bytes, and `vpmultishiftqb` takes from it eight bytes
//!   that begin at any bit: a level each, once what is above its length is cleared.
//! * Levels come out channel by channel, four tokens of each. Channels behind the last sixteen are
//!   left to the other kernels.

use std::arch::x86_64::{
    __m128, __m512, __m512i, _mm_loadu_ps, _mm_loadu_si128, _mm512_add_epi8, _mm512_and_si512,
    _mm512_broadcast_f32x4, _mm512_castsi512_si128, _mm512_cmpgt_epu8_mask, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_extracti32x4_epi32, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_max_epu8, _mm512_multishift_epi64_epi8, _mm512_or_si512, _mm512_permutex2var_epi64,
    _mm512_permutexvar_epi8, _mm512_permutexvar_ps, _mm512_set1_epi8, _mm512_set1_epi64, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_slli_epi16, _mm512_srli_epi64, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_sub_epi64, _mm512_zextsi128_si512,
};
use std::ops::Range;

use super::{PackedSide, TOKENS, avx2};

/// Packs that are looked up at once.
const PACKS: usize = 16;
/// Tokens of a pack.
const PACK: usize = 4;
/// The number of none of them.
const NO_PACK: u8 = 16;
/// Rounds of a block.
const ROUNDS: usize = TOKENS / PACK;

// Places are loaded as they are.
const _: () = assert!(size_of::<usize>() == 8);

/// What a byte of levels takes from where, for all 64 of them.
struct Tables {
    /// Which of sixteen packs it is of.
    pack: [u8; 64],
    /// Of a word's second pack, which pack is the first; else one that is none.
    before: [u8; 64],
    /// Four times a length and a token of a pack: bits before the token's.
    steps: [u8; 64],
    /// A length: its bits. By lanes of sixteen.
    masks: [u8; 64],
    /// Its place in its word.
    place: [u8; 64],
    /// The lowest byte of its word. By lanes of sixteen.
    lowest: [u8; 64],
    /// Which token of its pack it is of.
    token: [u8; 64],
    /// Levels token by token, sixteen channels of each.
    by_token: [u8; 64],
    /// Where 8 of 16 numbers of 64 bits are that are for the first packs of words.
    firsts: [u64; 8],
}

static TABLES: Tables = {
    let mut all = Tables {
        pack: [0; 64],
        before: [NO_PACK; 64],
        steps: [0; 64],
        masks: [0; 64],
        place: [0; 64],
        lowest: [0; 64],
        token: [0; 64],
        by_token: [0; 64],
        firsts: [0, 2, 4, 6, 8, 10, 12, 14],
    };
    let mut byte: u8 = 0;
    while byte < 64 {
        let at = byte as usize;
        all.pack[at] = byte / 4;
        if byte % 8 >= 4 {
            all.before[at] = byte / 8 * 2;
        }
        if at < 32 {
            all.steps[at] = (byte / 4) * (byte % 4);
        }
        if !byte.is_multiple_of(16) && byte % 16 < 8 {
            all.masks[at] = u8::MAX >> (8 - byte % 16);
        }
        all.place[at] = byte % 8;
        all.lowest[at] = byte % 16 / 8 * 8;
        all.token[at] = byte % 4;
        all.by_token[at] = byte % 16 * 4 + byte / 16;
        byte += 1;
    }
    all
};

/// Each of sixteen lanes four times, in four registers.
static FOUR_TIMES: [[u32; 16]; 4] = {
    let mut all = [[0; 16]; 4];
    let mut lane = 0;
    while lane < 64 {
        all[lane as usize / 16][lane as usize % 16] = lane / 4;
        lane += 1;
    }
    all
};

/// See [`super::fit`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vbmi")]
pub(super) fn fit(side: &PackedSide<'_>, channels: Range<usize>, most: u8) -> bool {
    let (whole, rest) = divided(channels);
    let mut largest = _mm512_setzero_si512();
    for round in 0..ROUNDS {
        for channel in whole.clone().step_by(PACKS) {
            largest = _mm512_max_epu8(largest, levels(side, round, channel));
        }
    }
    let above = _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(most.cast_signed()));
    above == 0 && avx2::fit::<PACK>(side, rest, most)
}

/// See [`super::unpack`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vbmi")]
pub(super) fn unpack(side: &PackedSide<'_>, channels: Range<usize>, values: &mut [u8]) {
    let (whole, rest) = divided(channels);
    for (round, tokens) in side.order.places().chunks_exact(PACK).enumerate() {
        for channel in whole.clone().step_by(PACKS) {
            let levels = _mm512_permutexvar_epi8(bytes(&TABLES.by_token), levels(side, round, channel));
            let mut rows = [[0; PACKS]; PACK];
            // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
            unsafe { _mm512_storeu_si512(rows.as_mut_ptr().cast(), levels) };
            for (token, row) in tokens.iter().zip(rows) {
                values[usize::from(*token) * side.channels + channel..][..PACKS].copy_from_slice(&row);
            }
        }
    }
    avx2::unpack::<PACK>(side, rest, values);
}

/// See [`super::dot`]. Each round has a register, whose lanes are tokens of four channels.
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vbmi")]
pub(super) fn dot(side: &PackedSide<'_>, channels: Range<usize>, query: &[f32], sums: &mut [f32; TOKENS]) {
    let (whole, rest) = divided(channels);
    let (of_whole, of_rest) = query.as_chunks::<PACKS>();
    let mut all = [_mm512_setzero_ps(); ROUNDS];
    for (channel, query) in whole.step_by(PACKS).zip(of_whole) {
        let query = each_four_times(query);
        for (round, sum) in all.iter_mut().enumerate() {
            for (levels, query) in numbers(levels(side, round, channel)).into_iter().zip(query) {
                *sum = _mm512_fmadd_ps(levels, query, *sum);
            }
        }
    }
    if !rest.is_empty() {
        avx2::dot::<PACK>(side, rest, of_rest, sums);
    }
    for (sums, all) in sums.as_chunks_mut::<PACK>().0.iter_mut().zip(all) {
        let lanes = lanes(all);
        for (token, sum) in sums.iter_mut().enumerate() {
            *sum += (lanes[token] + lanes[4 + token]) + (lanes[8 + token] + lanes[12 + token]);
        }
    }
}

/// See [`super::weigh`]. Each four channels have a register, whose lanes are their tokens.
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vbmi")]
pub(super) fn weigh(side: &PackedSide<'_>, channels: Range<usize>, scaled: &[f32; TOKENS], out: &mut [f32]) {
    let (whole, rest) = divided(channels);
    let (of_whole, of_rest) = out.as_chunks_mut::<PACKS>();
    for (channel, out) in whole.step_by(PACKS).zip(of_whole) {
        let mut sums = [_mm512_setzero_ps(); PACKS / 4];
        for (round, scaled) in scaled.as_chunks().0.iter().enumerate() {
            let weights = _mm512_broadcast_f32x4(four(scaled));
            for (sum, levels) in sums.iter_mut().zip(numbers(levels(side, round, channel))) {
                *sum = _mm512_fmadd_ps(levels, weights, *sum);
            }
        }
        for (out, sum) in out.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
            for (out, [a, b, c, d]) in out.iter_mut().zip(lanes(sum).as_chunks().0) {
                *out += (a + b) + (c + d);
            }
        }
    }
    if !rest.is_empty() {
        avx2::weigh::<PACK>(side, rest, scaled, of_rest);
    }
}

/// Channels by sixteen, and those behind them.
fn divided(channels: Range<usize>) -> (Range<usize>, Range<usize>) {
    let end = channels.start + channels.len() / PACKS * PACKS;
    (channels.start..end, end..channels.end)
}

/// The levels of sixteen channels from `channel` on, in a round: four tokens of each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn levels(side: &PackedSide<'_>, round: usize, channel: usize) -> __m512i {
    let packs = round * side.channels + channel..round * side.channels + channel + PACKS;
    let heads = &side.heads;
    let at: &[usize; PACKS] = heads.at[packs.clone()].try_into().expect("sixteen");
    let length = sixteen(heads.length[packs.clone()].try_into().expect("sixteen"));
    let least = sixteen(heads.least[packs].try_into().expect("sixteen"));
    let from = at[0] / 8;
    let payload = match side.packs.get(from..).and_then(<[u8]>::first_chunk) {
        Some(payload) => bytes(payload),
        None => end(side.packs.get(from..).unwrap_or_default()),
    };

    // Where words begin: the byte, and the bit in it.
    let [low, high] = places(at);
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    let firsts = unsafe { _mm512_loadu_si512(TABLES.firsts.as_ptr().cast()) };
    let begin = _mm512_set1_epi64((8 * from).cast_signed() as i64);
    let begins = _mm512_sub_epi64(_mm512_permutex2var_epi64(low, firsts, high), begin);
    let lowest = bytes(&TABLES.lowest);
    let first_bytes = _mm512_shuffle_epi8(_mm512_srli_epi64::<3>(begins), lowest);
    let words = _mm512_permutexvar_epi8(_mm512_add_epi8(first_bytes, bytes(&TABLES.place)), payload);
    let bits = _mm512_shuffle_epi8(_mm512_and_si512(begins, _mm512_set1_epi64(7)), lowest);

    // Behind that the bits of the pack before and of the tokens before. No byte carries into
    // another: lengths have three bits.
    let lengths = _mm512_permutexvar_epi8(bytes(&TABLES.pack), length);
    let before = _mm512_slli_epi16::<2>(_mm512_permutexvar_epi8(bytes(&TABLES.before), length));
    let step = _mm512_or_si512(_mm512_slli_epi16::<2>(lengths), bytes(&TABLES.token));
    let steps = _mm512_permutexvar_epi8(step, bytes(&TABLES.steps));
    let places = _mm512_add_epi8(_mm512_add_epi8(bits, before), steps);

    let masks = _mm512_shuffle_epi8(bytes(&TABLES.masks), lengths);
    let above = _mm512_and_si512(_mm512_multishift_epi64_epi8(places, words), masks);
    _mm512_add_epi8(above, _mm512_permutexvar_epi8(bytes(&TABLES.pack), least))
}

/// Fewer than 64 bytes, and zeros behind them.
#[cold]
#[target_feature(enable = "avx512f")]
fn end(rest: &[u8]) -> __m512i {
    let mut all = [0; 64];
    all[..rest.len()].copy_from_slice(rest);
    bytes(&all)
}

/// Bytes as numbers, sixteen a register.
#[inline]
#[target_feature(enable = "avx512f")]
fn numbers(levels: __m512i) -> [__m512; 4] {
    [
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(levels))),
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<1>(levels))),
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<2>(levels))),
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<3>(levels))),
    ]
}

/// Each of sixteen numbers four times, as the levels of a channel lie.
#[inline]
#[target_feature(enable = "avx512f")]
fn each_four_times(query: &[f32; PACKS]) -> [__m512; 4] {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    let query = unsafe { _mm512_loadu_ps(query.as_ptr()) };
    // SAFETY: as above.
    FOUR_TIMES.map(|lanes| _mm512_permutexvar_ps(unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }, query))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bytes(from: &[u8; 64]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn sixteen(from: &[u8; 16]) -> __m512i {
    // SAFETY: the array has the register's 16 bytes, and the load needs no alignment.
    _mm512_zextsi128_si512(unsafe { _mm_loadu_si128(from.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn places(from: &[usize; PACKS]) -> [__m512i; 2] {
    let [low, high] = from.as_chunks::<8>().0 else { unreachable!("sixteen are two times eight") };
    // SAFETY: each half has the register's 64 bytes, and the load needs no alignment.
    [low, high].map(|half| unsafe { _mm512_loadu_si512(half.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f")]
fn four(from: &[f32; 4]) -> __m128 {
    // SAFETY: the array has the register's 16 bytes, and the load needs no alignment.
    unsafe { _mm_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(of: __m512) -> [f32; 16] {
    let mut lanes = [0.0; 16];
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), of) };
    lanes
}
