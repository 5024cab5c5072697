//! Signs with AVX-512: eight words, four segments, side by side wherever words do not wait for each other; their bits go and come by BMI2's `pext` and `pdep`.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi64, _mm512_and_si512, _mm512_bslli_epi128, _mm512_cmpgt_epu64_mask,
    _mm512_cmplt_epu64_mask, _mm512_loadu_si512, _mm512_mask_blend_epi64, _mm512_mask_mov_epi64,
    _mm512_mask_xor_epi64, _mm512_maskz_mov_epi64, _mm512_min_epu64, _mm512_or_si512, _mm512_popcnt_epi64,
    _mm512_set1_epi64, _mm512_shuffle_epi32, _mm512_slli_epi64, _mm512_srai_epi64, _mm512_srli_epi64,
    _mm512_storeu_si512, _mm512_sub_epi64, _mm512_xor_si512, _pdep_u64, _pext_u64,
};

use super::{GROUPS, MOST_ONES, MOST_WORDS, Malformed, SEGMENT, WAYS, lowest, mode_bytes, nine_at};

/// Words of a register.
const STEP: usize = 8;
/// Segments of a register.
const SEGMENTS: usize = STEP / SEGMENT;
/// The first word of every segment.
const FIRST: u8 = 0x55;
/// Bytes of the flags of the longest plane, and of a word behind them.
const MOST_FLAGS: usize = MOST_WORDS / SEGMENT * 4 + 8;

#[target_feature(enable = "avx512f")]
fn load(words: &[u64; STEP]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn store(words: &mut [u64; STEP], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), value) };
}

/// The words of a plane's part.
fn words(bytes: &[u8; 8 * STEP]) -> [u64; STEP] {
    std::array::from_fn(|word| u64::from_le_bytes(bytes.as_chunks().0[word]))
}

/// In every word, what both words of its segment have together.
#[target_feature(enable = "avx512f")]
fn together(counts: __m512i) -> __m512i {
    _mm512_add_epi64(counts, _mm512_shuffle_epi32::<0b01_00_11_10>(counts))
}

/// In every second word of a segment the first one's `word`, zeros in the first.
#[target_feature(enable = "avx512f,avx512bw")]
fn from_before(word: __m512i) -> __m512i {
    _mm512_bslli_epi128::<8>(word)
}

/// As [`super::encode_by`]; `out` has room for a word behind the plane's length.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vpopcntdq")]
pub(super) fn encode(plane: &[u8], limit: usize, out: &mut [u8]) -> Option<usize> {
    let mut all_words = [[0_u64; STEP]; MOST_WORDS / STEP];
    let mut all_groups = all_words;
    let mut modes = [0_u8; MOST_WORDS / SEGMENT];
    let parts = plane.as_chunks::<{ 8 * STEP }>().0;
    let mut total = _mm512_set1_epi64(0);
    for (part, bytes) in parts.iter().enumerate() {
        let signs = load(&words(bytes));
        let before = from_before(_mm512_srli_epi64::<63>(signs));
        let changes = _mm512_xor_si512(signs, _mm512_or_si512(_mm512_slli_epi64::<1>(signs), before));
        let whole = _mm512_set1_epi64(128);
        let ones = together(_mm512_popcnt_epi64(signs));
        let turns = together(_mm512_popcnt_epi64(changes));
        let fewer = _mm512_min_epu64(ones, _mm512_sub_epi64(whole, ones));
        let turn = _mm512_cmplt_epu64_mask(turns, fewer);
        let invert = _mm512_cmpgt_epu64_mask(ones, _mm512_set1_epi64(64)) & !turn;
        let few =
            !_mm512_cmpgt_epu64_mask(_mm512_min_epu64(fewer, turns), _mm512_set1_epi64(i64::from(MOST_ONES)));
        let bits = _mm512_mask_xor_epi64(signs, invert, signs, _mm512_set1_epi64(-1));
        let bits = _mm512_mask_mov_epi64(bits, turn, changes);
        let kind = _mm512_mask_mov_epi64(
            _mm512_maskz_mov_epi64(invert, _mm512_set1_epi64(1)),
            turn,
            _mm512_set1_epi64(2),
        );
        // The shortest of raw and the three sizes of groups.
        let mut least = whole;
        let mut mode = _mm512_set1_epi64(0);
        let mut taken = _mm512_set1_epi64(lowest(16).cast_signed());
        let two = _mm512_or_si512(bits, _mm512_srli_epi64::<1>(bits));
        let mut spread = _mm512_or_si512(two, _mm512_srli_epi64::<2>(two));
        for (size, group) in (0..).zip(GROUPS) {
            if size == 1 {
                spread = _mm512_or_si512(spread, _mm512_srli_epi64::<4>(spread));
            } else if size == 2 {
                spread = _mm512_or_si512(spread, _mm512_srli_epi64::<8>(spread));
            }
            let groups = _mm512_and_si512(spread, _mm512_set1_epi64(lowest(group).cast_signed()));
            let count = together(_mm512_popcnt_epi64(groups));
            let scaled = match group {
                4 => _mm512_slli_epi64::<2>(count),
                8 => _mm512_slli_epi64::<3>(count),
                _ => _mm512_slli_epi64::<4>(count),
            };
            let cost = _mm512_add_epi64(scaled, _mm512_set1_epi64(i64::from(128 / group)));
            let shorter = _mm512_cmplt_epu64_mask(cost, least) & few;
            least = _mm512_mask_mov_epi64(least, shorter, cost);
            taken = _mm512_mask_mov_epi64(taken, shorter, groups);
            let this = _mm512_add_epi64(kind, _mm512_set1_epi64(1 + 3 * size));
            mode = _mm512_mask_mov_epi64(mode, shorter, this);
        }
        let coded = _mm512_cmpgt_epu64_mask(mode, _mm512_set1_epi64(0));
        total = _mm512_add_epi64(total, least);
        store(&mut all_words[part], _mm512_mask_blend_epi64(coded, signs, bits));
        store(&mut all_groups[part], taken);
        let mut found = [0; STEP];
        store(&mut found, mode);
        for (mode, pair) in modes[part * SEGMENTS..].iter_mut().zip(found.as_chunks::<SEGMENT>().0) {
            *mode = pair[0] as u8;
        }
    }
    let mut totals = [0; STEP];
    store(&mut totals, total);
    // Both words of a segment have its bits.
    let total = totals.into_iter().sum::<u64>() as usize / SEGMENT;
    let before = mode_bytes(plane.len() / 8);
    let length = before + total.div_ceil(8);
    if length >= limit.min(plane.len()) {
        return None;
    }
    let modes = &modes[..SEGMENTS * parts.len()];
    for (out, modes) in out.chunks_exact_mut(4).zip(modes.as_chunks().0) {
        let packed = _pext_u64(u64::from_le_bytes(*modes), NIBBLES) as u32;
        out.copy_from_slice(&packed.to_le_bytes());
    }
    let flag_length = modes.iter().map(|mode| WAYS[usize::from(*mode)].flags).sum::<usize>();
    let mut flags = [0; MOST_FLAGS];
    let (mut flags_at, mut at, mut held, mut pending) = (0, before + flag_length, 0, 0_u64);
    let pairs = all_words.as_flattened().as_chunks().0.iter().zip(all_groups.as_flattened().as_chunks().0);
    for (mode, (words, groups)) in modes.iter().zip(pairs) {
        let way = &WAYS[usize::from(*mode)];
        let mut which = 0_u64;
        for w in 0..SEGMENT {
            let (word, groups): (&[u64; SEGMENT], &[u64; SEGMENT]) = (words, groups);
            which |= _pext_u64(groups[w], way.lowest) << (w as u32 * way.groups);
            let mask = groups[w].wrapping_mul(way.ones);
            let bits = _pext_u64(word[w], mask);
            let low = pending | bits << held;
            out[at..at + 8].copy_from_slice(&low.to_le_bytes());
            let high = (bits >> 1) >> (63 - held);
            held += mask.count_ones();
            let full = held >= 64;
            pending = if full { high } else { low };
            at += if full { 8 } else { 0 };
            held &= 63;
        }
        flags[flags_at..flags_at + 4].copy_from_slice(&(which as u32).to_le_bytes());
        flags_at += way.flags;
    }
    out[at..at + 8].copy_from_slice(&pending.to_le_bytes());
    out[before..before + flag_length].copy_from_slice(&flags[..flag_length]);
    Some(length)
}

/// The lower half of every byte.
const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// As [`super::decode_by`] of the first `length` of `bytes`, of which any may be looked at.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw")]
pub(super) fn decode(bytes: &[u8], length: usize, plane: &mut [u8]) -> Result<(), Malformed> {
    let ends = |end| Malformed::Length { end, length };
    let before = mode_bytes(plane.len() / 8);
    let stream = &bytes[..length];
    let packed = stream.get(..before).ok_or(ends(before))?;
    let mut modes = [0_u8; MOST_WORDS / SEGMENT];
    for (modes, packed) in modes.as_chunks_mut().0.iter_mut().zip(packed.as_chunks().0) {
        *modes = _pdep_u64(u32::from_le_bytes(*packed).into(), NIBBLES).to_le_bytes();
    }
    let modes = &modes[..plane.len() / (8 * SEGMENT)];
    let mut flags = 0;
    for (segment, mode) in modes.iter().enumerate() {
        let way = WAYS.get(usize::from(*mode)).ok_or(Malformed::Mode { segment, mode: *mode })?;
        flags += way.flags;
    }
    let (mut flags_at, mut at) = (before, 8 * (before + flags));
    if before + flags > length {
        return Err(ends(before + flags));
    }
    for (out, modes) in
        plane.as_chunks_mut::<{ 8 * STEP }>().0.iter_mut().zip(modes.as_chunks::<SEGMENTS>().0)
    {
        let mut words = [0; STEP];
        let (mut invert, mut changes) = (0_u8, 0_u8);
        for (segment, (mode, pair)) in modes.iter().zip(words.as_chunks_mut::<SEGMENT>().0).enumerate() {
            let way = &WAYS[usize::from(*mode)];
            // What follows the flags is not looked at further down.
            let flags = nine_at(bytes, flags_at).0 | way.all;
            flags_at += way.flags;
            invert |= (way.invert as u8 & 3) << (SEGMENT * segment);
            changes |= (way.changes as u8 & 3) << (SEGMENT * segment);
            for (w, word) in pair.iter_mut().enumerate() {
                let groups = _pdep_u64(flags >> (w as u32 * way.groups), way.lowest);
                let mask = groups.wrapping_mul(way.ones);
                let (low, high) = nine_at(bytes, at / 8);
                let bits = low >> (at % 8) | u64::from(high) << 1 << (63 - at % 8);
                *word = _pdep_u64(bits, mask);
                at += mask.count_ones() as usize;
            }
        }
        let word = load(&words);
        let changed = prefix_parity(word);
        let last = from_before(_mm512_srai_epi64::<63>(_mm512_maskz_mov_epi64(FIRST, changed)));
        let word = _mm512_mask_xor_epi64(word, changes, changed, last);
        let word = _mm512_mask_xor_epi64(word, invert, word, _mm512_set1_epi64(-1));
        // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), word) };
    }
    let end = at.div_ceil(8);
    if end == length { Ok(()) } else { Err(ends(end)) }
}

/// As [`super::prefix_parity`], of every word.
#[target_feature(enable = "avx512f")]
fn prefix_parity(x: __m512i) -> __m512i {
    let x = _mm512_xor_si512(x, _mm512_slli_epi64::<1>(x));
    let x = _mm512_xor_si512(x, _mm512_slli_epi64::<2>(x));
    let x = _mm512_xor_si512(x, _mm512_slli_epi64::<4>(x));
    let x = _mm512_xor_si512(x, _mm512_slli_epi64::<8>(x));
    let x = _mm512_xor_si512(x, _mm512_slli_epi64::<16>(x));
    _mm512_xor_si512(x, _mm512_slli_epi64::<32>(x))
}
