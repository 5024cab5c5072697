//! Encoding by a 3+3 code, in three stages: two levels of all elements, two of those
//! that go on, and the last ones of the few that are left.
//!
//! Values are what is moved together between the stages, so that those that are escaped are at hand
//! in the end: they all come that far. A value's bits are those of its mark
//! ([`super::super::encode`]), whose ones also tell whether it goes on.

use std::arch::x86_64::{
    __m512i, _mm512_cmpeq_epi8_mask, _mm512_movepi8_mask, _mm512_set1_epi8, _mm512_test_epi8_mask, _pext_u64,
};

use super::{
    super::{
        super::{
            Scratch,
            bits::Writer,
            code::{Coder, ESCAPE, ZERO},
            whole::PLANE,
        },
        STEP,
        decode::ELEMENTS,
        encode::{Level, Marks, PIECE, push},
        first, load,
    },
    ABOVE, SECOND, THIRD,
};

/// Vectors of the last stage.
const LAST: usize = THIRD / STEP;
/// A value's bits on each level, in its mark.
const BITS: [u8; 7] = [0x80, 0x40, 0x20, 0x10, 8, 4, 2];
/// What a mark has ones in if its value goes on behind the fifth level, and behind the sixth.
const BEHIND_FIFTH: u8 = 3;
const BEHIND_SIXTH: u8 = 1;

/// Which marks have ones among `bits`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn with(marks: __m512i, bits: u8) -> u64 {
    _mm512_test_epi8_mask(marks, _mm512_set1_epi8(bits.cast_signed()))
}

/// Writes the stream of a block of 2048 values, as [`super::super::encode::levels`] does, if the
/// code is a 3+3 one, has an escape on its last levels and no zeros of their own, and what
/// goes on fits in the buffers. `None` if not. With so few that go on it is shorter than any such
/// block's planes.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(in super::super) fn levels(
    values: &[u8],
    coder: &Coder,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Option<usize> {
    let escape_is_below = usize::from(coder.code.lengths[ESCAPE]) > ABOVE;
    if !coder.is_three_and_three() || !escape_is_below || coder.marks[ZERO] > 0 {
        return None;
    }
    let values: &[[u8; STEP]; ELEMENTS / STEP] = values.as_chunks().0.try_into().ok()?;
    let marks = Marks::of(coder);
    let at = coder.write(out);
    let [second, third, escaped, _] = &mut scratch.levels;
    let second: &mut Level = second.first_chunk_mut().expect("a level holds all elements");
    let third: &mut Level = third.first_chunk_mut().expect("a level holds all elements");
    let escaped: &mut Level = escaped.first_chunk_mut().expect("a level holds all elements");

    let (rows, behind) = out[at..].split_first_chunk_mut::<{ 2 * PLANE }>().expect("two levels");
    let (row, next) = rows.split_at_mut(PLANE);
    let mut alive = 0;
    for ((values, first), second_bits) in values.iter().zip(row.as_chunks_mut().0).zip(next.as_chunks_mut().0)
    {
        let values = load(values);
        let marks = marks.get(values);
        let bits = [_mm512_movepi8_mask(marks), with(marks, BITS[1])];
        (*first, *second_bits) = (bits[0].to_le_bytes(), bits[1].to_le_bytes());
        alive += push(second, alive, bits[0] & bits[1], values);
    }
    if alive > SECOND {
        return None;
    }

    let mut fourth = [0; SECOND / STEP + 1];
    let vectors = second.as_chunks().0[..alive.div_ceil(STEP)].iter();
    let words = behind.as_chunks_mut().0.iter_mut().zip(&mut fourth);
    let mut left = 0;
    for ((index, values), (word, fourth)) in vectors.enumerate().zip(words) {
        let values = load(values);
        let marks = marks.get(values);
        let here = first(alive - STEP * index);
        let bits = [with(marks, BITS[2]) & here, with(marks, BITS[3]) & here];
        *word = bits[0].to_le_bytes();
        *fourth = bits[1];
        left += push(third, left, bits[0] & bits[1], values);
    }
    if left > THIRD {
        return None;
    }
    // The fourth level begins in the middle of a byte.
    let (byte, shift) = (alive / 8, alive % 8);
    let words = behind[byte..].as_chunks_mut().0;
    let mut before = u64::from(words[0][0]) & ((1 << shift) - 1);
    for (word, bits) in words.iter_mut().zip(&fourth[..=alive.div_ceil(STEP)]) {
        *word = (bits << shift | before).to_le_bytes();
        before = (bits >> 1) >> (63 - shift);
    }

    let (byte, shift) = (2 * alive / 8, 2 * alive % 8);
    let mut writer = Writer::new(behind, byte);
    writer.take_words(shift);
    let (mut bits, mut counts) = ([[0; LAST]; 3], [[0; LAST]; 3]);
    let vectors = left.div_ceil(STEP);
    let mut escapes = 0;
    for (index, values) in third.as_chunks().0[..vectors].iter().enumerate() {
        let values = load(values);
        let marks_here = marks.get(values);
        let here = first(left - STEP * index);
        let goes_on = [here, with(marks_here, BEHIND_FIFTH) & here, with(marks_here, BEHIND_SIXTH) & here];
        for level in 0..3 {
            bits[level][index] = _pext_u64(with(marks_here, BITS[ABOVE + level]), goes_on[level]);
            counts[level][index] = goes_on[level].count_ones();
        }
        let is_escaped = _mm512_cmpeq_epi8_mask(marks_here, marks.escape) & here;
        escapes += push(escaped, escapes, is_escaped, values);
    }
    for (bits, counts) in bits.iter().zip(&counts) {
        for (bits, count) in bits[..vectors].iter().zip(counts) {
            writer.push(*bits, *count);
        }
    }
    let start = writer.finish();
    // Whole pieces fit behind.
    let pieces = behind[start..].as_chunks_mut::<PIECE>().0.iter_mut();
    pieces.zip(escaped.as_chunks().0).take(escapes.div_ceil(PIECE)).for_each(|(to, piece)| *to = *piece);
    Some(at + 2 * PLANE + start + escapes)
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use super::{
        super::super::{
            super::{Kernel, MAX_ELEMENTS, SLACK, code::Code, masks, tests::codes::three_and_three},
            encode,
        },
        *,
    };
    use crate::lines::Lines;

    /// What is written by the code of a stream for its values, straight and in whatever way, over
    /// what was there, and what was to be.
    fn written(last: &[u8], escape: usize, going_on: [usize; 2]) -> [Option<Vec<u8>>; 3] {
        let (stream, values) = three_and_three(last, escape, going_on);
        let padded = [&stream[..], &[0; 16]].concat();
        let coder = Coder::new(Code::parse(&padded, stream.len(), u8::MAX.into()).expect("a code"));
        let mut scratch = Scratch {
            levels: std::array::from_fn(|_| Lines::new(MAX_ELEMENTS + 64)),
            masks: std::array::from_fn(|_| Lines::new(masks::STORE)),
        };
        scratch.levels.iter_mut().for_each(|level| level.fill(0xa5));
        let mut out = vec![0xa5; ELEMENTS + SLACK];
        // SAFETY: the processor has the kernel's features, as those who call this have seen.
        let length = unsafe { levels(&values, &coder, &mut out, &mut scratch) };
        let straight = length.map(|length| out[..length].to_vec());
        if stream.len() >= ELEMENTS {
            return [straight, None, None];
        }
        // SAFETY: as above.
        let length = unsafe { encode::levels(&values, &coder, &mut out, &mut scratch) };
        [straight, Some(out[..length].to_vec()), Some(stream)]
    }

    #[test]
    fn streams_are_written_as_the_format_says_straight_if_what_goes_on_fits() {
        if !Kernel::Avx512.is_available() {
            return;
        }
        // Around whole words and vectors, and beyond the buffers.
        let second = (0..=SECOND + STEP).step_by(STEP / 2);
        let second = second.flat_map(|second| [0, 1, 7, 29, 30, 31].map(|more| second + more));
        for second in second.chain(once(ELEMENTS)) {
            for third in [0, 1, 63, 64, 65, 128, 131, 256, 257].into_iter().filter(|third| *third <= second) {
                for (last, escape) in [(&[5, 6, 7, 7][..], 9), (&[6; 4], 7), (&[5, 7, 7, 7, 7], 6)] {
                    let [straight, any, stream] = written(last, escape, [second, third]);
                    assert!(any == stream, "{last:?} {escape} {second} {third}");
                    if second > SECOND || third > THIRD {
                        assert_eq!(straight, None, "{second} {third}");
                    } else {
                        assert!(straight == stream, "{last:?} {escape} {second} {third}");
                    }
                }
            }
        }
    }
}
