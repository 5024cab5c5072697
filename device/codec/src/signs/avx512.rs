//! Signs with AVX-512, nibble by nibble: groups of all sizes are whole nibbles, so the bit string
//! is the nibbles that are there, side by side.
//!
//! In a register a nibble is a byte, and which of 64 nibbles are there is a mask: a compress moves
//! them together, an expand moves them apart. All else is done for eight words, four segments, at a
//! time, or for the flags of sixteen segments.

use std::arch::x86_64::{
    __m256i, __m512i, _mm_cvtsi128_si64, _mm_loadu_si128, _mm256_setzero_si256, _mm256_storeu_si256,
    _mm512_add_epi64, _mm512_and_si512, _mm512_bslli_epi128, _mm512_castsi256_si512, _mm512_castsi512_si256,
    _mm512_clmulepi64_epi128, _mm512_cmpeq_epi32_mask, _mm512_cmpgt_epu8_mask, _mm512_cmpgt_epu64_mask,
    _mm512_cmplt_epu64_mask, _mm512_cvtepi16_epi8, _mm512_cvtepi64_epi8, _mm512_cvtepu8_epi16,
    _mm512_cvtepu8_epi32, _mm512_extracti64x4_epi64, _mm512_gf2p8affine_epi64_epi8, _mm512_inserti64x4,
    _mm512_loadu_si512, _mm512_maddubs_epi16, _mm512_mask_blend_epi64, _mm512_mask_gf2p8affine_epi64_epi8,
    _mm512_mask_mov_epi32, _mm512_mask_mov_epi64, _mm512_mask_xor_epi64, _mm512_maskz_compress_epi8,
    _mm512_maskz_expand_epi8, _mm512_maskz_mov_epi8, _mm512_maskz_mov_epi64, _mm512_min_epu64,
    _mm512_movepi8_mask, _mm512_multishift_epi64_epi8, _mm512_or_si512, _mm512_permutexvar_epi32,
    _mm512_popcnt_epi64, _mm512_reduce_add_epi64, _mm512_sad_epu8, _mm512_set1_epi8, _mm512_set1_epi16,
    _mm512_set1_epi32, _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_shuffle_epi32,
    _mm512_slli_epi16, _mm512_slli_epi64, _mm512_srai_epi64, _mm512_srli_epi64, _mm512_storeu_si512,
    _mm512_sub_epi64, _mm512_subs_epu16, _mm512_test_epi8_mask, _mm512_unpacklo_epi64, _mm512_xor_si512,
    _pdep_u64, _pext_u64,
};

use super::{MANY_ONES, MAX_MODE, MAX_WORDS, Malformed, SEGMENT, flag_bytes, lowest, mode_bytes, promises};

/// Bytes of a register, and nibbles of half of one.
const LINE: usize = 64;
/// Segments of a register of words.
const SEGMENTS: usize = LINE / (8 * SEGMENT);
/// Segments whose flags are worked on together.
const SIXTEEN: usize = 16;
/// Bytes behind a stream that are looked at.
const BEHIND: usize = LINE;
/// More bytes than any stream has.
const MAX_STREAM: usize = 2 * MAX_WORDS * 8;
/// The lower half of every byte.
const NIBBLE: i8 = 0x0f;
/// The first word of every segment.
const FIRST: u8 = 0x55;

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; LINE]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_at(bytes: &[u8], at: usize) -> __m512i {
    load(bytes[at..].first_chunk().expect("a register's bytes"))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; LINE], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
}

/// In every word, what both words of its segment have together.
#[inline]
#[target_feature(enable = "avx512f")]
fn together(counts: __m512i) -> __m512i {
    _mm512_add_epi64(counts, _mm512_shuffle_epi32::<0b01_00_11_10>(counts))
}

/// In every second word of a segment the first one's `word`, zeros in the first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn from_before(word: __m512i) -> __m512i {
    _mm512_bslli_epi128::<8>(word)
}

/// The nibbles of half a register's bytes, each in the lower half of a byte, the lower one of each
/// byte first; the upper halves are anything.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(bytes: __m256i) -> __m512i {
    let words = _mm512_cvtepu8_epi16(bytes);
    _mm512_or_si512(words, _mm512_slli_epi16::<4>(words))
}

/// The [`nibbles`] of the first half of a register or the second.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn of_half(bytes: __m512i, half: usize) -> __m512i {
    nibbles(if half == 0 { _mm512_castsi512_si256(bytes) } else { _mm512_extracti64x4_epi64::<1>(bytes) })
}

/// Nibbles, a byte each, as half as many bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn packed(nibbles: __m512i) -> __m256i {
    _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(nibbles, _mm512_set1_epi16(0x1001)))
}

/// What the signs of a register's segments are like.
#[derive(Clone, Copy)]
struct Counted {
    signs: __m512i,
    /// Each sign XOR the one before it.
    changes: __m512i,
    /// In which words the changes have the fewest ones,
    turn: u8,
    /// and in which the inverted signs have.
    invert: u8,
    /// How many fewer ones than [`MANY_ONES`] these are, if fewer, in both words of a segment.
    fewer: __m512i,
}

/// What is chosen for the segments of a register.
struct Chosen {
    /// The words to be written.
    words: __m512i,
    /// The lowest bit of every nibble of them that is there.
    there: __m512i,
    /// The modes, four bits each, the first in the lowest.
    modes: u16,
    /// The bits that a segment takes, in both of its words.
    bits: __m512i,
}

/// As [`super::Fewest::of`], of four segments.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vpopcntdq")]
fn counted(signs: __m512i) -> Counted {
    let before = from_before(_mm512_srli_epi64::<63>(signs));
    let changes = _mm512_xor_si512(signs, _mm512_or_si512(_mm512_slli_epi64::<1>(signs), before));
    let ones = together(_mm512_popcnt_epi64(signs));
    let turns = together(_mm512_popcnt_epi64(changes));
    let fewer = _mm512_min_epu64(ones, _mm512_sub_epi64(_mm512_set1_epi64(128), ones));
    let turn = _mm512_cmplt_epu64_mask(turns, fewer);
    let invert = _mm512_cmpgt_epu64_mask(ones, _mm512_set1_epi64(64)) & !turn;
    let fewest = _mm512_min_epu64(fewer, turns);
    let fewer = _mm512_subs_epu16(_mm512_set1_epi64(MANY_ONES.into()), fewest);
    Counted { signs, changes, turn, invert, fewer }
}

/// As [`super::Fewest::choose`].
#[inline]
#[target_feature(enable = "bmi2,avx512f,avx512bw,avx512vpopcntdq")]
fn choose(counted: Counted) -> Chosen {
    let Counted { signs, changes, turn, invert, .. } = counted;
    let whole = _mm512_set1_epi64(128);
    let words = _mm512_mask_xor_epi64(signs, invert, signs, _mm512_set1_epi64(-1));
    let words = _mm512_mask_mov_epi64(words, turn, changes);
    let kind = _mm512_maskz_mov_epi64(invert, _mm512_set1_epi64(1));
    let kind = _mm512_mask_mov_epi64(kind, turn, _mm512_set1_epi64(2));

    // The lowest bit of the groups of 4, 8 and 16 bits that have ones.
    let joined = _mm512_or_si512(words, _mm512_srli_epi64::<1>(words));
    let joined = _mm512_or_si512(joined, _mm512_srli_epi64::<2>(joined));
    let every = |bits| _mm512_set1_epi64(lowest(bits).cast_signed());
    let fours = _mm512_and_si512(joined, every(4));
    let eights = _mm512_and_si512(_mm512_or_si512(fours, _mm512_srli_epi64::<4>(fours)), every(8));
    let sixteens = _mm512_and_si512(_mm512_or_si512(eights, _mm512_srli_epi64::<8>(eights)), every(16));
    // What they take, and their nibbles.
    let count = |groups| together(_mm512_popcnt_epi64(groups));
    let sixteens_twice = _mm512_or_si512(sixteens, _mm512_slli_epi64::<8>(sixteens));
    let twice = |groups| _mm512_or_si512(groups, _mm512_slli_epi64::<4>(groups));
    let sizes = [
        (_mm512_slli_epi64::<2>(count(fours)), 32, fours),
        (_mm512_slli_epi64::<3>(count(eights)), 16, twice(eights)),
        (_mm512_slli_epi64::<4>(count(sixteens)), 8, twice(sixteens_twice)),
    ];
    // The shortest of them and raw.
    let (mut bits, mut there, mut mode) = (whole, every(4), _mm512_setzero_si512());
    for (size, (groups, flags, nibbles)) in (0..).zip(sizes) {
        let cost = _mm512_add_epi64(groups, _mm512_set1_epi64(flags));
        let shorter = _mm512_cmplt_epu64_mask(cost, bits);
        bits = _mm512_mask_mov_epi64(bits, shorter, cost);
        there = _mm512_mask_mov_epi64(there, shorter, nibbles);
        mode = _mm512_mask_mov_epi64(mode, shorter, _mm512_add_epi64(kind, _mm512_set1_epi64(1 + 3 * size)));
    }
    let coded = _mm512_cmpgt_epu64_mask(mode, _mm512_setzero_si512());
    let modes = _mm_cvtsi128_si64(_mm512_cvtepi64_epi8(mode)).cast_unsigned();
    // Both words of a segment have its mode.
    let modes = _pext_u64(modes, 0x000f_000f_000f_000f) as u16;
    Chosen { words: _mm512_mask_blend_epi64(coded, signs, words), there, modes, bits }
}

/// As [`super::encode_by`]; `out` has [`super::SLACK`] bytes behind the plane's length.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq")]
pub(super) fn encode(plane: &[u8], limit: usize, out: &mut [u8]) -> Option<usize> {
    match plane.len() / LINE {
        2 => encode_lines::<2>(plane, limit, out),
        4 => encode_lines::<4>(plane, limit, out),
        8 => encode_lines::<8>(plane, limit, out),
        _ => encode_lines::<16>(plane, limit, out),
    }
}

#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq")]
fn encode_lines<const LINES: usize>(plane: &[u8], limit: usize, out: &mut [u8]) -> Option<usize> {
    let plane: &[[u8; LINE]; LINES] = plane.as_chunks().0.try_into().expect("a plane of so many lines");
    let (packed_modes, out) = out.split_at_mut(mode_bytes(LINES * LINE / 8));
    let mut all_counted = [counted(_mm512_setzero_si512()); LINES];
    let mut fewer = _mm512_setzero_si512();
    for (line, bytes) in all_counted.iter_mut().zip(plane) {
        *line = counted(load(bytes));
        fewer = _mm512_add_epi64(fewer, line.fewer);
    }
    // Each segment's is in both of its words.
    let fewer = _mm512_reduce_add_epi64(fewer).cast_unsigned() as u32 / SEGMENT as u32;
    if !promises(fewer, LINES * SEGMENTS) {
        return None;
    }
    // The nibbles that are there, a byte each. What is stored behind them is zeros. Only at the end
    // it shows whether all is short enough.
    let mut all = [[0_u8; 2 * LINE]; LINES];
    let all = all.as_flattened_mut();
    let (mut flags, mut count, mut total) = (0, 0, _mm512_setzero_si512());
    for (counted, packed_modes) in all_counted.into_iter().zip(packed_modes.as_chunks_mut().0) {
        let chosen = choose(counted);
        total = _mm512_add_epi64(total, chosen.bits);
        *packed_modes = chosen.modes.to_le_bytes();
        let mut modes = usize::from(chosen.modes);
        for half in 0..2 {
            let (words, there) = (of_half(chosen.words, half), of_half(chosen.there, half));
            let there = _mm512_test_epi8_mask(there, _mm512_set1_epi8(1));
            let here = _mm512_and_si512(words, _mm512_set1_epi8(NIBBLE));
            let place = all[count..].first_chunk_mut().expect("room for nibbles that are all there");
            store(place, _mm512_maskz_compress_epi8(there, here));
            count += there.count_ones() as usize;
            // Both segments' at once: a mask in two parts would go by way of memory.
            let (first, second) = (FLAGS[modes % SIXTEEN], FLAGS[modes / SIXTEEN % SIXTEEN]);
            let which = _pext_u64(there, first.0 | second.0 << 32);
            out[flags..flags + 8].copy_from_slice(&which.to_le_bytes());
            flags += first.1 + second.1;
            modes /= SIXTEEN * SIXTEEN;
        }
    }
    let total = _mm512_reduce_add_epi64(total).cast_unsigned() as usize / SEGMENT;
    let length = packed_modes.len() + total.div_ceil(8);
    if length >= limit.min(LINES * LINE) {
        return None;
    }
    let (nibbles, _) = all.as_chunks();
    for (index, nibbles) in nibbles[..count.div_ceil(LINE)].iter().enumerate() {
        let out: &mut [u8; LINE / 2] =
            out[flags + index * LINE / 2..].first_chunk_mut().expect("room behind");
        // SAFETY: the array has the register's 32 bytes, and the store needs no alignment.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), packed(load(nibbles))) };
    }
    Some(length)
}

/// By mode: a nibble of each group, and the bytes of the flags.
const FLAGS: [(u64, usize); SIXTEEN] = {
    let mut flags = [(0, 0); SIXTEEN];
    let mut mode = 0;
    while mode <= MAX_MODE {
        let bytes = flag_bytes(mode);
        // A bit of a nibble for each of a group's.
        let nibbles = match bytes {
            0 => 0,
            bytes => lowest(4 / bytes as u32) & u32::MAX as u64,
        };
        flags[mode as usize] = (nibbles, bytes);
        mode += 1;
    }
    flags
};

/// As [`super::decode_by`] of the first `length` of `bytes`, of which any may be looked at.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,vpclmulqdq,gfni")]
pub(super) fn decode(bytes: &[u8], length: usize, plane: &mut [u8]) -> Result<(), Malformed> {
    if bytes.len() >= length + BEHIND {
        return decode_roomy(bytes, length, plane);
    }
    let mut roomy = [0; MAX_STREAM + BEHIND];
    let copied = length.min(MAX_STREAM);
    roomy[..copied].copy_from_slice(&bytes[..copied]);
    decode_roomy(&roomy, length, plane)
}

/// As [`decode`], with [`BEHIND`] bytes behind the stream, or behind [`MAX_STREAM`] of it.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,vpclmulqdq,gfni")]
fn decode_roomy(bytes: &[u8], length: usize, plane: &mut [u8]) -> Result<(), Malformed> {
    let ends = |end| Malformed::Length { end, length };
    let (segments, before) = (plane.len() / (8 * SEGMENT), mode_bytes(plane.len() / 8));
    if before > length {
        return Err(ends(before));
    }
    let low_half = _mm512_set1_epi8(NIBBLE);
    let modes = _mm512_and_si512(nibbles(_mm512_castsi512_si256(load_at(bytes, 0))), low_half);
    // Behind the last segment stands the mode of no flags.
    let modes = _mm512_maskz_mov_epi8(u64::MAX >> (LINE - segments), modes);
    let wrong = _mm512_cmpgt_epu8_mask(modes, _mm512_set1_epi8(MAX_MODE.cast_signed()));
    if wrong != 0 {
        let segment = wrong.trailing_zeros() as usize;
        return Err(Malformed::Mode { segment, mode: bytes[segment / 2] >> (segment % 2 * 4) & 15 });
    }
    let ways = _mm512_shuffle_epi8(load(&WAYS), modes);
    let inverted = _mm512_movepi8_mask(ways);
    let changes = _mm512_test_epi8_mask(ways, _mm512_set1_epi8(CHANGES.cast_signed()));
    let flags = _mm512_sad_epu8(_mm512_and_si512(ways, low_half), _mm512_setzero_si512());
    let flags_end = before + _mm512_reduce_add_epi64(flags).cast_unsigned() as usize;
    if flags_end > length {
        return Err(ends(flags_end));
    }
    let mut mode_bytes = [0; LINE];
    store(&mut mode_bytes, modes);
    // Which nibbles are there, two segments a word.
    let mut masks = [0_u64; MAX_WORDS / (2 * SEGMENT)];
    let mut flags_at = before;
    for (modes, masks) in
        mode_bytes.as_chunks::<SIXTEEN>().0[..segments.div_ceil(SIXTEEN)].iter().zip(masks.as_chunks_mut().0)
    {
        let taken;
        (*masks, taken) = there(modes, load_at(bytes, flags_at));
        flags_at += taken;
    }
    let masks = &masks[..segments / 2];
    let count = masks.iter().map(|mask| mask.count_ones() as usize).sum::<usize>();
    let end = flags_end + count.div_ceil(2);
    if end != length {
        return Err(ends(end));
    }
    let apart = load(&APART);
    let mut at = 2 * flags_end;
    for (line, (out, masks)) in
        plane.as_chunks_mut::<LINE>().0.iter_mut().zip(masks.as_chunks::<2>().0).enumerate()
    {
        let mut halves = [_mm256_setzero_si256(); 2];
        for (half, mask) in halves.iter_mut().zip(masks) {
            // A word has eight nibbles, from its lowest bit on or the fifth.
            let here = _mm512_permutexvar_epi32(apart, load_at(bytes, at / 2));
            let here = _mm512_multishift_epi64_epi8(load(&PLACES[at % 2]), here);
            at += mask.count_ones() as usize;
            *half = packed(_mm512_maskz_expand_epi8(*mask, _mm512_and_si512(here, low_half)));
        }
        let word = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(halves[0]), halves[1]);
        // A bit for each segment becomes one for each of its words.
        let words_of = |segments: u64| {
            let first = _pdep_u64(segments >> (SEGMENTS * line), FIRST.into()) as u8;
            first | first << 1
        };
        let changed = prefix_parity(word);
        let last = from_before(_mm512_srai_epi64::<63>(_mm512_maskz_mov_epi64(FIRST, changed)));
        let word = _mm512_mask_xor_epi64(word, words_of(changes), changed, last);
        let word = _mm512_mask_xor_epi64(word, words_of(inverted), word, _mm512_set1_epi64(-1));
        store(out, word);
    }
    Ok(())
}

/// Which nibbles of sixteen segments of these modes are there, by the flags at the front of a line,
/// and the bytes of these.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2,gfni")]
fn there(modes: &[u8; SIXTEEN], flags: __m512i) -> ([u64; SIXTEEN / 2], usize) {
    // SAFETY: the array has the register's 16 bytes, and the load needs no alignment.
    let modes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(modes.as_ptr().cast()) });
    let present = _mm512_permutexvar_epi32(modes, load(&PRESENT));
    let taken = _mm512_movepi8_mask(present);
    let fours = _mm512_maskz_expand_epi8(taken, flags);
    // A flag becomes two or four: their byte is brought to where they are, and then each byte takes
    // its part of it.
    let twice = _mm512_shuffle_epi8(fours, load(&TWO_EACH));
    let eights = _mm512_gf2p8affine_epi64_epi8::<0>(twice, spread(2, 0));
    let eights = _mm512_mask_gf2p8affine_epi64_epi8::<0>(eights, ONE_OF_FOUR * 0b1010, twice, spread(2, 1));
    let four_times = _mm512_shuffle_epi8(fours, load(&FOUR_EACH));
    let mut sixteens = _mm512_gf2p8affine_epi64_epi8::<0>(four_times, spread(4, 0));
    for part in 1..4 {
        let these = ONE_OF_FOUR << part;
        sixteens = _mm512_mask_gf2p8affine_epi64_epi8::<0>(sixteens, these, four_times, spread(4, part));
    }
    let has = |bytes| _mm512_cmpeq_epi32_mask(present, _mm512_set1_epi32(bytes));
    let there = _mm512_mask_mov_epi32(fours, has(0), _mm512_set1_epi32(-1));
    let there = _mm512_mask_mov_epi32(there, has(0xffff), eights);
    let there = _mm512_mask_mov_epi32(there, has(0xff), sixteens);
    let mut words = [0; LINE / 8];
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), there) };
    (words, taken.count_ones() as usize)
}

/// The first of every four bytes.
const ONE_OF_FOUR: u64 = 0x1111_1111_1111_1111;

/// A matrix that makes of a byte's bits `times` each, and of these takes the byte number `part`.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread(times: u32, part: u32) -> __m512i {
    // The instruction takes the first bit's row from the last byte.
    let row = |to: u32| 1_u64 << ((8 * part + to) / times) << (8 * (7 - to));
    _mm512_set1_epi64((0..8).map(row).sum::<u64>().cast_signed())
}

/// As [`super::prefix_parity`], of every word.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn prefix_parity(x: __m512i) -> __m512i {
    let ones = _mm512_set1_epi64(-1);
    let (first, second) =
        (_mm512_clmulepi64_epi128::<0x00>(x, ones), _mm512_clmulepi64_epi128::<0x01>(x, ones));
    _mm512_unpacklo_epi64(first, second)
}

/// In [`WAYS`]: the words are changes, or inverted; below it, the bytes of the flags.
const CHANGES: u8 = 0x40;
const INVERTED: u8 = 0x80;

/// A line by the number of its byte.
const fn line(bytes: [u8; SIXTEEN]) -> [u8; LINE] {
    let mut line = [0; LINE];
    let mut at = 0;
    while at < LINE {
        line[at] = bytes[at % SIXTEEN];
        at += 1;
    }
    line
}

/// By mode, in each lane.
static WAYS: [u8; LINE] = {
    let mut ways = [0; SIXTEEN];
    let mut mode = 0;
    while mode <= MAX_MODE {
        let way = &super::WAYS[mode as usize];
        let changes = if way.changes > 0 { CHANGES } else { 0 };
        ways[mode as usize] = way.flags as u8 | changes | if way.invert > 0 { INVERTED } else { 0 };
        mode += 1;
    }
    line(ways)
};

/// By mode, in four bytes: ones for those of the flags.
static PRESENT: [u8; LINE] = {
    let mut present = [0; LINE];
    let mut at = 0;
    while at < LINE {
        let mode = at / 4;
        if mode <= MAX_MODE as usize && at % 4 < flag_bytes(mode as u8) {
            present[at] = 0xff;
        }
        at += 1;
    }
    present
};

/// Of every four bytes the first two twice, and the first four times.
static TWO_EACH: [u8; LINE] = line([0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13]);
static FOUR_EACH: [u8; LINE] = line([0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]);

/// Four bytes and the four behind them for each word.
static APART: [u8; LINE] = {
    let mut places = [0; LINE];
    let mut at = 0;
    while at < LINE / 4 {
        places[4 * at] = at.div_ceil(2) as u8;
        at += 1;
    }
    places
};

/// Where in such a word its eight nibbles begin, if the first is at its lowest bit or at the fifth.
static PLACES: [[u8; LINE]; 2] = [
    line([0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28]),
    line([4, 8, 12, 16, 20, 24, 28, 32, 4, 8, 12, 16, 20, 24, 28, 32]),
];
