//! The levels of a stream, element by element: what every kernel must give, in plain Rust.
//!
//! A level's elements lie side by side in element order, as their bits do in the stream; those whose code goes on are moved together
//! for the next level, so the work is in proportion to the bits.

use super::{
    END, Malformed, Scratch,
    code::{Code, Coder, ESCAPE, Leaves, SLOTS},
    plan::Census,
};

/// What the values of a block are, or `None` if they are too many.
pub(super) fn census(values: &[u8]) -> Option<Census> {
    // Four histograms, so that equal neighbours need not wait for each other.
    let mut counts = [[0_u16; 256]; 4];
    for four in values.as_chunks::<4>().0 {
        counts.iter_mut().zip(four).for_each(|(counts, value)| counts[usize::from(*value)] += 1);
    }
    let mut census = Census::new();
    for value in 0..=u8::MAX {
        census.tell(value, counts.iter().map(|counts| u32::from(counts[usize::from(value)])).sum())?;
    }
    Some(census)
}

/// The highest bits of eight bytes, the first one's lowest.
fn tops(bytes: [u8; 8]) -> u8 {
    ((u64::from_le_bytes(bytes) & 0x8080_8080_8080_8080) >> 7)
        .wrapping_mul(0x0102_0408_1020_4080)
        .to_be_bytes()[0]
}

/// Writes the stream of `values` by a code, which may be another block's: its bytes, or `None` if it would not be shorter than `raw` or a value
/// has no code.
pub(super) fn levels(
    values: &[u8],
    raw: usize,
    coder: &Coder,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Option<usize> {
    let marks = coder.by_value();
    let level = &mut scratch.levels[0][..values.len() + 8];
    level.iter_mut().zip(values).for_each(|(mark, value)| *mark = marks[usize::from(*value)]);
    let escape = coder.marks[ESCAPE];
    let escapes: usize = level[..values.len()].iter().map(|mark| usize::from(*mark == escape)).sum();
    if escapes > 0 && escape == 0 {
        return None;
    }

    let mut at = coder.code.write(out);
    let (mut pending, mut held, mut count) = (0_u32, 0, values.len());
    while count > 0 {
        if at + count.div_ceil(8) >= raw {
            return None;
        }
        let mut going_on = 0;
        for start in (0..count).step_by(8) {
            // What lies behind the last element was left there by the level before.
            let marks: [u8; 8] = level[start..start + 8].try_into().expect("eight");
            let here = (count - start).min(8);
            let bits = u32::from(tops(marks)) & ((1 << here) - 1);
            pending |= bits << held;
            out[at..at + 2].copy_from_slice(&pending.to_le_bytes()[..2]);
            held += here;
            at += held / 8;
            pending >>= held & 8;
            held %= 8;
            for mark in &marks[..here] {
                level[going_on] = mark << 1;
                going_on += usize::from(mark << 1 != END);
            }
        }
        count = going_on;
    }
    at += usize::from(held > 0);
    if at + escapes >= raw {
        return None;
    }
    if escapes > 0 {
        for value in values.iter().filter(|value| marks[usize::from(**value)] == escape) {
            out[at] = *value;
            at += 1;
        }
    }
    Some(at)
}

/// Decodes to `values`; see [`super::decode`].
pub(super) fn decode(
    stream: &[u8],
    length: usize,
    largest: usize,
    values: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    let code = Code::parse(stream, length, largest)?;
    let Leaves { values: leaf_values, count, longest, escape } = code.leaves();
    // An element that is not yet decoded: its number, and below it that of its node among the nodes of its level, leaves first.
    let alive = &mut scratch.elements[..values.len()];
    (0..).zip(&mut *alive).for_each(|(number, element)| *element = number << 8);
    let mut alive = alive.len();

    let mut at = 8 * Code::header_bytes(code.window);
    let (mut first_leaf, mut escapes) = (0, 0);
    for (level, leaves) in count.into_iter().enumerate().take(longest) {
        let end = at + alive;
        if end > 8 * length {
            return Err(Malformed::Level { level, end, bits: 8 * length });
        }
        let leaves = u32::from(leaves);
        let of_leaves: &[u8; SLOTS] =
            leaf_values[first_leaf..].first_chunk().expect("room behind the leaves");
        let escape = escape.filter(|escape| escape.0 == level).map_or(NO_NODE, |escape| u32::from(escape.1));
        let mut going_on = 0;
        for start in (0..alive).step_by(8) {
            let bits = (at + start) / 8;
            let mut bits =
                u32::from(u16::from_le_bytes([stream[bits], stream[bits + 1]])) >> ((at + start) % 8);
            for place in start..(start + 8).min(alive) {
                let element = scratch.elements[place];
                let (number, node) = ((element >> 8) as usize, (element & 0xff) * 2 + (bits & 1));
                bits >>= 1;
                // Of those that go on this is overwritten later: which they are cannot be foreseen.
                values[number] = of_leaves[node as usize % SLOTS];
                scratch.elements[going_on] = (element & !0xff).wrapping_add(node).wrapping_sub(leaves);
                going_on += usize::from(node >= leaves);
                if escape != NO_NODE {
                    scratch.escaped[escapes] = number;
                    escapes += usize::from(node == escape);
                }
            }
        }
        first_leaf += leaves as usize;
        alive = going_on;
        at = end;
    }
    let at = at.div_ceil(8);
    if at + escapes != length {
        return Err(Malformed::Escapes { end: at + escapes, length });
    }
    for (place, value) in scratch.escaped.iter().zip(&stream[at..length]) {
        if usize::from(*value) > largest {
            return Err(Malformed::Escaped { value: *value, largest });
        }
        values[*place] = *value;
    }
    Ok(())
}

/// No node has this number.
const NO_NODE: u32 = u32::MAX;
