//! Encoding: every element is its *mark*, its code from the highest bit on and behind it a one, and loses a bit on each level.
//!
//! The levels down to the first that has leaves have all elements, whose bits are whole words at known places. Then those that go on are moved together; once
//! they are few they stay where they are, and each level's bits are taken from those still going on: short passes one after the other would mostly wait for each other.

use std::arch::x86_64::{
    _mm512_add_epi8, _mm512_cmpeq_epi8_mask, _mm512_cmpneq_epi8_mask, _mm512_loadu_si512,
    _mm512_mask_add_epi8, _mm512_mask_blend_epi8, _mm512_maskz_compress_epi8, _mm512_maskz_expand_epi8,
    _mm512_min_epu8, _mm512_movepi8_mask, _mm512_permutexvar_epi8, _mm512_set1_epi8, _mm512_setzero_si512,
    _mm512_sub_epi8, _mm512_test_epi8_mask, _mm512_test_epi64_mask, _mm512_testn_epi8_mask, _pext_u64,
};

use super::super::{
    END, Scratch,
    bits::Writer,
    code::{Code, Coder, ESCAPE, LONGEST, SLOTS, SYMBOLS, WINDOW, ZERO},
};
use super::{STEP, first, load, load_at, store, store_at};

/// Vectors whose elements stay where they are.
const FEW: usize = 8;

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
    let escape = _mm512_set1_epi8(Coder::escape_cost(&code).cast_signed());
    let coded = _mm512_test_epi8_mask(lengths, lengths) & (u64::MAX >> (STEP - WINDOW));
    let costs = _mm512_mask_blend_epi8(coded, escape, lengths);
    let zero_cost = Coder::zero_cost(&code);
    let mut coder = Coder { code, marks: [0; SLOTS], costs: [0; SLOTS], zero_cost, counts };
    store(&mut coder.marks, marks);
    store(&mut coder.costs, costs);
    coder
}

/// For each level, the codes that are the first one and those after it, without the first one, as far up as in a mark.
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
pub(in super::super) fn levels(
    values: &[u8],
    raw: usize,
    coder: &Coder,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Option<usize> {
    let Coder { code, marks, .. } = coder;
    let whole = 1 + coder.counts.iter().position(|count| *count > 0).unwrap_or(0);
    let bytes = values.len() / 8;
    let at = code.write(out);
    let behind = at + whole * bytes;
    if behind >= raw {
        return None;
    }
    let rows = out[at..behind].as_chunks_mut().0;
    let (mut going_on, escapes) = match (whole, marks[ZERO] > 0) {
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
    // Without an escape, what would be escaped has no code.
    if escapes > 0 && marks[ESCAPE] == 0 {
        return None;
    }

    let end = _mm512_set1_epi8(END.cast_signed());
    let mut writer = Writer::new(out, behind);
    let [level, escaped, ..] = &mut scratch.levels;
    while going_on > FEW * STEP {
        let count = going_on;
        if writer.at + count.div_ceil(8) >= raw {
            return None;
        }
        going_on = 0;
        for start in (0..count).step_by(STEP) {
            let marks = load_at(level, start);
            let bits = _mm512_movepi8_mask(marks) & first(count - start);
            writer.push(bits, (count - start).min(STEP) as u32);
            let rest = _mm512_add_epi8(marks, marks);
            let goes_on = _mm512_cmpneq_epi8_mask(rest, end) & first(count - start);
            // Never ahead of what was just loaded.
            store_at(level, going_on, _mm512_maskz_compress_epi8(goes_on, rest));
            going_on += goes_on.count_ones() as usize;
        }
    }
    let mut goes_on: [u64; FEW] = std::array::from_fn(|index| first(going_on.saturating_sub(index * STEP)));
    let vectors = going_on.div_ceil(STEP);
    while going_on > 0 {
        if writer.at + going_on.div_ceil(8) >= raw {
            return None;
        }
        going_on = 0;
        for (marks, goes_on) in level.as_chunks_mut().0[..vectors].iter_mut().zip(&mut goes_on) {
            let x = load(marks);
            writer.push(_pext_u64(_mm512_movepi8_mask(x), *goes_on), goes_on.count_ones());
            let rest = _mm512_add_epi8(x, x);
            *goes_on &= _mm512_cmpneq_epi8_mask(rest, end);
            going_on += goes_on.count_ones() as usize;
            store(marks, rest);
        }
    }
    let at = writer.finish();
    if at + escapes >= raw {
        return None;
    }
    out[at..at + escapes].copy_from_slice(&escaped[..escapes]);
    Some(at + escapes)
}

/// Writes the levels that have all elements, `LEVELS` of them, to `rows`: how many elements go on, and how many are escaped. The marks of the first are
/// moved together to the scratch's first level, the values of the others to its second. The value 0 may have a symbol of its own with `ZEROS`.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
fn first_levels<const LEVELS: usize, const ZEROS: bool>(
    values: &[u8],
    coder: &Coder,
    mut rows: &mut [[u8; 8]],
    scratch: &mut Scratch,
) -> (usize, usize) {
    let vectors = &values.as_chunks::<STEP>().0[..values.len() / STEP];
    let mut rows: [&mut [[u8; 8]]; LEVELS] = std::array::from_fn(|_| {
        let (row, others) = std::mem::take(&mut rows).split_at_mut(vectors.len());
        rows = others;
        row
    });
    let Coder { code, marks, .. } = coder;
    let by_symbol = load(marks);
    let escape = _mm512_set1_epi8(marks[ESCAPE].cast_signed());
    // What has no code, and all that is outside the window, is escaped; zeros outside may have a code of their own.
    let coded = _mm512_test_epi8_mask(by_symbol, by_symbol) & (u64::MAX >> (STEP - WINDOW));
    let table = _mm512_mask_blend_epi8(coded, escape, by_symbol);
    let zero = _mm512_set1_epi8(if marks[ZERO] > 0 { marks[ZERO] } else { marks[ESCAPE] }.cast_signed());
    let zeros = if marks[ZERO] > 0 { u64::MAX } else { 0 };
    let low = _mm512_set1_epi8(code.low.cast_signed());
    let last = _mm512_set1_epi8(SLOTS as i8 - 1);
    let end = _mm512_set1_epi8(END.cast_signed());

    let Scratch { levels: [level, escaped, ..], masks: [masks, ..], .. } = scratch;
    let masks = &mut masks[..vectors.len()];
    let (mut going_on, mut escapes) = (0, 0);
    for (index, (values, escaping)) in vectors.iter().zip(&mut *masks).enumerate() {
        let values = load(values);
        // A value below the window wraps around to a symbol that would pass the largest value, or to none.
        let symbols = _mm512_min_epu8(_mm512_sub_epi8(values, low), last);
        let mut marks = _mm512_permutexvar_epi8(symbols, table);
        if ZEROS {
            marks = _mm512_mask_blend_epi8(_mm512_testn_epi8_mask(values, values) & zeros, marks, zero);
        }
        *escaping = _mm512_cmpeq_epi8_mask(marks, escape);
        for row in &mut rows {
            row[index] = _mm512_movepi8_mask(marks).to_le_bytes();
            marks = _mm512_add_epi8(marks, marks);
        }
        let goes_on = _mm512_cmpneq_epi8_mask(marks, end);
        store_at(level, going_on, _mm512_maskz_compress_epi8(goes_on, marks));
        going_on += goes_on.count_ones() as usize;
    }
    // Few vectors have any.
    for (masks, vectors) in masks.as_chunks::<8>().0.iter().zip(vectors.as_chunks::<8>().0) {
        // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
        let eight = unsafe { _mm512_loadu_si512(masks.as_ptr().cast()) };
        let mut left = _mm512_test_epi64_mask(eight, eight);
        while left != 0 {
            let index = left.trailing_zeros() as usize;
            store_at(escaped, escapes, _mm512_maskz_compress_epi8(masks[index], load(&vectors[index])));
            escapes += masks[index].count_ones() as usize;
            left &= left - 1;
        }
    }
    (going_on, escapes)
}
