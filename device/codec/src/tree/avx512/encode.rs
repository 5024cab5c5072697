//! Encoding: every element is its *mark*, its code from the highest bit on and behind it a one, and
//! loses a bit on each level.
//!
//! The levels down to the first that has leaves have all elements, whose bits are whole words at
//! known places. Then those that go on are moved together, and have their bits side by side; once
//! they are few they stay where they are, and each level's bits are taken from those still going
//! on: short passes one after the other would mostly wait for each other.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_cmpeq_epi8_mask, _mm512_loadu_si512, _mm512_mask_add_epi8,
    _mm512_mask_blend_epi8, _mm512_maskz_compress_epi8, _mm512_maskz_expand_epi8, _mm512_min_epu8,
    _mm512_movepi8_mask, _mm512_permutexvar_epi8, _mm512_set1_epi8, _mm512_setzero_si512, _mm512_sub_epi8,
    _mm512_test_epi8_mask, _mm512_test_epi64_mask, _mm512_testn_epi8_mask, _pext_u64,
};

use super::super::{
    END, MAX_ELEMENTS, SLACK, Scratch,
    bits::Writer,
    code::{Code, Coder, ESCAPE, LONGEST, SLOTS, SYMBOLS, WINDOW, ZERO},
};
use super::{STEP, first, load, store, store_at, three_and_three};

/// Vectors whose elements stay where they are.
const FEW: usize = 4;
/// Vectors that are looked at together.
const EIGHT: usize = 8;
/// The scratch's level that has the values of what is escaped.
const ESCAPED: usize = 1;
/// Bytes of escapes that are copied together.
pub(super) const PIECE: usize = SLACK;

/// A code to encode by; as [`Coder::new`].
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
pub(in super::super) fn coder(code: Code) -> Coder {
    let mut lengths = [0; STEP];
    lengths[..SYMBOLS].copy_from_slice(&code.lengths);
    let lengths = load(&lengths);
    let (mut marks, mut next, mut counts) = (_mm512_setzero_si512(), 0_u32, [0; LONGEST]);
    for (level, (ranks, count)) in RANKS.iter().zip(&mut counts).enumerate() {
        let these = _mm512_cmpeq_epi8_mask(lengths, _mm512_set1_epi8(level as i8 + 1));
        let first = _mm512_set1_epi8(((2 * next + 1) << (LONGEST - 1 - level)) as i8);
        marks = _mm512_mask_add_epi8(marks, these, _mm512_maskz_expand_epi8(these, load(ranks)), first);
        *count = these.count_ones() as u8;
        next = 2 * (next + these.count_ones());
    }
    let header = code.header();
    let mut coder = Coder { code, header, marks: [0; SLOTS], counts };
    store(&mut coder.marks, marks);
    coder
}

/// For each level, the codes that are the first one and those after it, without the first one, as
/// far up as in a mark.
const RANKS: [[u8; STEP]; LONGEST] = {
    let mut ranks = [[0; STEP]; LONGEST];
    let mut level = 0;
    while level < LONGEST {
        let mut at = 0;
        while at < STEP {
            ranks[level][at] = (at << (LONGEST - level)) as u8;
            at += 1;
        }
        level += 1;
    }
    ranks
};

/// See [`super::super::compact::levels`].
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(in super::super) fn levels(values: &[u8], coder: &Coder, out: &mut [u8], scratch: &mut Scratch) -> usize {
    if let Some(end) = three_and_three::encode::levels(values, coder, out, scratch) {
        return end;
    }
    let whole = coder.first_level() + 1;
    let at = coder.write(out);
    let behind = at + whole * (values.len() / 8);
    let rows = out[at..behind].as_chunks_mut().0.as_chunks_mut().0;
    let count = match (whole, coder.marks[ZERO] > 0) {
        (1, false) => first_levels::<1, false>(values, coder, rows, scratch),
        (2, false) => first_levels::<2, false>(values, coder, rows, scratch),
        (3, false) => first_levels::<3, false>(values, coder, rows, scratch),
        (1, true) => first_levels::<1, true>(values, coder, rows, scratch),
        (2, true) => first_levels::<2, true>(values, coder, rows, scratch),
        (3, true) => first_levels::<3, true>(values, coder, rows, scratch),
        (4, _) => first_levels::<4, true>(values, coder, rows, scratch),
        (5, _) => first_levels::<5, true>(values, coder, rows, scratch),
        (6, _) => first_levels::<6, true>(values, coder, rows, scratch),
        _ => first_levels::<LONGEST, true>(values, coder, rows, scratch),
    };
    let mut writer = Writer::new(out, behind);
    other_levels(count, coder.longest().saturating_sub(whole), &mut writer, scratch);
    let at = writer.finish();
    let escapes = escapes(values, scratch);
    // Whole pieces fit behind.
    let pieces = out[at..].as_chunks_mut::<PIECE>().0.iter_mut();
    let escaped = scratch.levels[ESCAPED].as_chunks().0;
    pieces.zip(escaped).take(escapes.div_ceil(PIECE)).for_each(|(piece, escaped)| *piece = *escaped);
    at + escapes
}

/// By values their marks, but for zeros that have a symbol of their own.
pub(super) struct Marks {
    low: __m512i,
    table: __m512i,
    /// The mark of what is escaped.
    pub(super) escape: __m512i,
}

impl Marks {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn of(coder: &Coder) -> Self {
        let by_symbol = load(&coder.marks);
        let escape = _mm512_set1_epi8(coder.marks[ESCAPE].cast_signed());
        // What has no code, and all that is outside the window, is escaped.
        let coded = _mm512_test_epi8_mask(by_symbol, by_symbol) & (u64::MAX >> (STEP - WINDOW));
        let table = _mm512_mask_blend_epi8(coded, escape, by_symbol);
        Self { low: _mm512_set1_epi8(coder.code.low.cast_signed()), table, escape }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) fn get(&self, values: __m512i) -> __m512i {
        // A value below the window wraps around to a symbol that has no code.
        let last = _mm512_set1_epi8(SLOTS as i8 - 1);
        _mm512_permutexvar_epi8(_mm512_min_epu8(_mm512_sub_epi8(values, self.low), last), self.table)
    }
}

/// Writes the levels that have all elements, `LEVELS` of them, to `rows`: how many elements go on.
/// Their marks are moved together to the scratch's first level; which elements are escaped is noted
/// in its masks. The value 0 may have a symbol of its own with `ZEROS`.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
fn first_levels<const LEVELS: usize, const ZEROS: bool>(
    values: &[u8],
    coder: &Coder,
    mut rows: &mut [[[u8; 8]; EIGHT]],
    scratch: &mut Scratch,
) -> usize {
    let vectors = values.as_chunks::<STEP>().0.as_chunks::<EIGHT>().0;
    let mut rows: [&mut [[[u8; 8]; EIGHT]]; LEVELS] = std::array::from_fn(|_| {
        let (row, others) = std::mem::take(&mut rows).split_at_mut(vectors.len());
        rows = others;
        row
    });
    let by_value = Marks::of(coder);
    let marks = &coder.marks;
    let zero = _mm512_set1_epi8(if marks[ZERO] > 0 { marks[ZERO] } else { marks[ESCAPE] }.cast_signed());
    let zeros = if marks[ZERO] > 0 { u64::MAX } else { 0 };
    let below_end = _mm512_set1_epi8(!END.cast_signed());

    let Scratch { levels: [level, ..], masks: [masks, ..], .. } = scratch;
    let level: &mut Level = level.first_chunk_mut().expect("a level holds all elements");
    let masks = &mut masks.as_chunks_mut::<EIGHT>().0[..vectors.len()];
    let mut going_on = 0;
    for (index, (vectors, escaping)) in vectors.iter().zip(masks).enumerate() {
        let mut rows = rows.each_mut().map(|row| &mut row[index]);
        for (at, values) in vectors.iter().enumerate() {
            let values = load(values);
            let mut marks = by_value.get(values);
            if ZEROS {
                marks = _mm512_mask_blend_epi8(_mm512_testn_epi8_mask(values, values) & zeros, marks, zero);
            }
            escaping[at] = _mm512_cmpeq_epi8_mask(marks, by_value.escape);
            for row in &mut rows {
                row[at] = _mm512_movepi8_mask(marks).to_le_bytes();
                marks = _mm512_add_epi8(marks, marks);
            }
            going_on += push(level, going_on, _mm512_test_epi8_mask(marks, below_end), marks);
        }
    }
    going_on
}

/// Moves the values of what is escaped together, in the scratch: how many they are.
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
fn escapes(values: &[u8], scratch: &mut Scratch) -> usize {
    let vectors = values.as_chunks::<STEP>().0.as_chunks::<EIGHT>().0;
    let Scratch { levels, masks: [masks, ..], .. } = scratch;
    let escaped: &mut Level = levels[ESCAPED].first_chunk_mut().expect("a level holds all elements");
    let masks = &masks.as_chunks::<EIGHT>().0[..vectors.len()];
    let mut escapes = 0;
    // Few vectors have any.
    for (masks, vectors) in masks.as_chunks().0.iter().zip(vectors.as_chunks::<2>().0) {
        let mut left = any(masks);
        let (masks, vectors) = (masks.as_flattened(), vectors.as_flattened());
        while left != 0 {
            let index = left.trailing_zeros() as usize;
            escapes += push(escaped, escapes, masks[index], load(&vectors[index]));
            left &= left - 1;
        }
    }
    escapes
}

/// Which of some words are not zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn any(words: &[[u64; EIGHT]; 2]) -> u32 {
    let [low, high] = words.each_ref().map(|eight| {
        // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
        let eight = unsafe { _mm512_loadu_si512(eight.as_ptr().cast()) };
        u32::from(_mm512_test_epi64_mask(eight, eight))
    });
    low | high << EIGHT
}

/// Marks of one level, or values.
pub(super) type Level = [u8; MAX_ELEMENTS + STEP];

/// Puts the marks, or values, that go on behind others, and zeros behind them: how many they are.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
pub(super) fn push(level: &mut Level, at: usize, goes_on: u64, marks: __m512i) -> usize {
    store_at(level, at % MAX_ELEMENTS, _mm512_maskz_compress_epi8(goes_on, marks));
    goes_on.count_ones() as usize
}

/// Writes `levels` levels, or those before the first without elements, of which the first has the
/// `count` marks that the scratch's first level has.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi2")]
fn other_levels(mut count: usize, mut levels: usize, writer: &mut Writer<'_>, scratch: &mut Scratch) {
    let below_end = _mm512_set1_epi8(!END.cast_signed());
    let Scratch { levels: [from, _, to, words, ..], masks: [_, bits, ones], .. } = scratch;
    let mut from: &mut Level = from.first_chunk_mut().expect("a level holds all elements");
    let mut to: &mut Level = to.first_chunk_mut().expect("a level holds all elements");
    while count > FEW * STEP {
        // Zeros neither have a one nor go on.
        store_at(from, count, _mm512_setzero_si512());
        let marks = &from.as_chunks().0[..count.div_ceil(STEP)];
        let going_on = if let Some(words) = writer.words(count) {
            let going_on = next_level(marks, words, to);
            writer.take_words(count);
            going_on
        } else {
            let words = &mut words.as_chunks_mut().0[..marks.len()];
            let going_on = next_level(marks, words, to);
            for (start, word) in (0..count).step_by(STEP).zip(words) {
                writer.push(u64::from_le_bytes(*word), (count - start).min(STEP) as u32);
            }
            going_on
        };
        (count, levels) = (going_on, levels - 1);
        std::mem::swap(&mut from, &mut to);
    }
    // What each vector has of each level.
    let bits: &mut [[u64; FEW]; LONGEST] =
        bits.as_chunks_mut().0.first_chunk_mut().expect("words for all levels");
    let ones: &mut [[u64; FEW]; LONGEST] =
        ones.as_chunks_mut().0.first_chunk_mut().expect("words for all levels");
    let (bits, ones) = (&mut bits[..levels], &mut ones[..levels]);
    let vectors = count.div_ceil(STEP).min(FEW);
    for (at, marks) in from.as_chunks().0[..vectors].iter().enumerate() {
        let mut marks = load(marks);
        let mut goes_on = first(count - at * STEP);
        for (bits, ones) in bits.iter_mut().zip(&mut *ones) {
            bits[at] = _pext_u64(_mm512_movepi8_mask(marks), goes_on);
            ones[at] = goes_on.count_ones().into();
            marks = _mm512_add_epi8(marks, marks);
            goes_on &= _mm512_test_epi8_mask(marks, below_end);
        }
    }
    for (bits, ones) in bits.iter().zip(ones) {
        for (bits, ones) in bits[..vectors].iter().zip(ones) {
            writer.push(*bits, *ones as u32);
        }
    }
}

/// Writes a level's bits to words: how many of its marks, which are moved together to the next
/// level, go on.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
fn next_level(marks: &[[u8; STEP]], words: &mut [[u8; 8]], to: &mut Level) -> usize {
    let below_end = _mm512_set1_epi8(!END.cast_signed());
    let mut going_on = 0;
    for (marks, word) in marks.iter().zip(words) {
        let marks = load(marks);
        *word = _mm512_movepi8_mask(marks).to_le_bytes();
        let rest = _mm512_add_epi8(marks, marks);
        going_on += push(to, going_on, _mm512_test_epi8_mask(rest, below_end), rest);
    }
    going_on
}
