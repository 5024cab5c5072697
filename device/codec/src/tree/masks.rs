//! The levels of a stream in masks of 64 elements a word, for processors with BMI2's `pdep` and
//! `pext`.
//!
//! Both ways walk the code's tree level by level. Every node has a *mask*, the elements whose code
//! passes through it; the nodes of a depth are in code order, so leaves come first and two
//! neighbours are siblings. Inner nodes' masks are halved by the bits of each decode level, and
//! united on the walk back. Loops run over the `W` words of a plane, which the compiler makes
//! vectors of.

#![expect(
    clippy::inline_always,
    clippy::cast_possible_truncation,
    reason = "only inlined code takes on its caller's processor features; counts and symbols of a block fit in 16 bits and 8"
)]

use std::arch::x86_64::{_pdep_u64, _pext_u64};

pub(super) use super::bits::read;
use super::{
    Malformed, RARE, Scratch,
    bits::Writer,
    code::{Code, ESCAPE, LONGEST, MAX_HEADER, SYMBOLS},
    plan::{Census, MAX_VALUES, Plan},
};
use crate::plane;

/// Words of a store of masks: enough for the values or inner nodes of every format.
pub(super) const STORE: usize = 4096;

/// One bit of every element.
type Mask<const W: usize> = [u64; W];

fn masks<const W: usize>(store: &mut [u64]) -> &mut [Mask<W>] {
    store.as_chunks_mut().0
}

fn ones<const W: usize>(mask: &Mask<W>) -> u32 {
    mask.iter().map(|word| word.count_ones()).sum()
}

/// Finds the values of a block by halving its elements plane by plane. Masks go to `found`, those
/// of rare values together to `escaped`.
#[inline(always)]
fn census<const W: usize>(
    planes: &[Mask<W>],
    stack: &mut [Mask<W>],
    found: &mut [Mask<W>],
    escaped: &mut Mask<W>,
) -> Option<Census> {
    let mut census = Census::new();
    // Depth, value so far and count of the masks on the stack.
    let mut nodes = [(0_usize, 0_u8, 0_u32); 9];
    let mut top = 1;
    stack[0] = [u64::MAX; W];
    nodes[0].2 = 64 * W as u32;
    while top > 0 {
        top -= 1;
        let (mut depth, mut value, mut count) = nodes[top];
        while depth < planes.len() && count >= RARE {
            let plane = &planes[depth];
            let (below, above) = stack.split_at_mut(top + 1);
            let (mask, upper) = (&mut below[top], &mut above[0]);
            depth += 1;
            value <<= 1;
            let mut set = 0;
            for w in 0..W {
                upper[w] = mask[w] & plane[w];
                set += upper[w].count_ones();
            }
            if set == count {
                value |= 1;
            } else if set > 0 {
                // The upper half waits below the lower one, which goes on.
                for (mask, upper) in mask.iter_mut().zip(upper.iter_mut()) {
                    (*mask, *upper) = (*upper, *mask ^ *upper);
                }
                nodes[top] = (depth, value | 1, set);
                top += 1;
                count -= set;
            }
        }
        if count < RARE {
            escaped.iter_mut().zip(&stack[top]).for_each(|(all, these)| *all |= these);
            census.escapes += count;
        } else if census.found == MAX_VALUES || census.found + 1 == found.len() {
            return None;
        } else {
            found[census.found] = stack[top];
            census.values[census.found] = value;
            census.counts[census.found] = count as u16;
            census.found += 1;
        }
    }
    Some(census)
}

/// The lowest `count` bits of `elements` as planes, most significant first.
#[inline(always)]
fn split<const W: usize>(elements: &[u8], count: usize, planes: &mut [Mask<W>]) {
    let mut bytes = [[[0; 8]; W]; 8];
    plane::split_bytes(elements, bytes.each_mut().map(|plane| plane.as_flattened_mut()));
    for (plane, bytes) in planes[..count].iter_mut().rev().zip(&bytes) {
        for (word, bytes) in plane.iter_mut().zip(bytes) {
            *word = u64::from_le_bytes(*bytes);
        }
    }
}

/// Undoes [`split`].
#[inline(always)]
fn join<const W: usize>(planes: &[Mask<W>], elements: &mut [u8]) {
    let mut bytes = [[[0; 8]; W]; 8];
    for (plane, bytes) in planes.iter().rev().zip(&mut bytes) {
        for (word, bytes) in plane.iter().zip(bytes) {
            *bytes = word.to_le_bytes();
        }
    }
    plane::join_bytes(&bytes.each_ref().map(|plane| plane.as_flattened()), elements);
}

/// What the values of a block are; see [`census`].
#[inline(always)]
pub(super) fn count<const W: usize>(elements: &[u8], planes: usize, scratch: &mut Scratch) -> Option<Census> {
    let [a, b, c] = &mut scratch.masks;
    let values = &mut masks::<W>(a)[..planes];
    split(elements, planes, values);
    census(values, masks::<W>(c), masks::<W>(b), &mut [0; W])
}

#[inline(always)]
fn encode<const W: usize>(
    elements: &[u8],
    count: usize,
    out: &mut [u8],
    scratch: &mut Scratch,
    gather: impl Fn(u64, u64) -> u64,
) -> Option<usize> {
    let [a, b, c] = &mut scratch.masks;
    let (words, found) = (masks::<W>(a), masks::<W>(b));
    let (values, mut inner) = words.split_at_mut(count);
    split(elements, count, values);
    let (levels, mut parents) = masks::<W>(c).split_at_mut(2 * LONGEST);
    let mut escaped = [0; W];
    let census = census(values, parents, found, &mut escaped)?;
    let plan = Plan::new(&census, count * 8 * W)?;

    // Which mask a symbol has; values without one are escaped after all.
    let mut place = [0_u8; SYMBOLS];
    for (at, symbol) in plan.symbols[..census.found].iter().enumerate() {
        if usize::from(*symbol) == ESCAPE {
            escaped.iter_mut().zip(&found[at]).for_each(|(all, these)| *all |= these);
        }
        place[usize::from(*symbol)] = at as u8;
    }
    place[ESCAPE] = census.found as u8;
    found[census.found] = escaped;

    // Up the tree: two nodes make one, the second one's elements have the level's bit.
    let (order, counts) = plan.code.canonical();
    let mut leaves: usize = counts.iter().map(|count| usize::from(*count)).sum();
    let mut nodes = 0;
    let longest = plan.code.longest();
    for level in (0..longest).rev() {
        let count = usize::from(counts[level]);
        leaves -= count;
        let (alive, bits) = (2 * level, 2 * level + 1);
        levels[bits] = [0; W];
        levels[alive] = [0; W];
        let (up, down) = levels.split_at_mut(bits);
        let (alive, bits) = (&mut up[alive], &mut down[0]);
        let pairs = usize::midpoint(count, nodes);
        let node = |at: usize| {
            if at < count {
                &found[usize::from(place[usize::from(order[leaves + at])])]
            } else {
                &inner[at - count]
            }
        };
        for (pair, parent) in parents[..pairs].iter_mut().enumerate() {
            let (left, right) = (node(2 * pair), node(2 * pair + 1));
            for w in 0..W {
                parent[w] = left[w] | right[w];
                bits[w] |= right[w];
                alive[w] |= left[w] | right[w];
            }
        }
        std::mem::swap(&mut inner, &mut parents);
        nodes = pairs;
    }

    out[..MAX_HEADER].copy_from_slice(&plan.code.header());
    let at = Code::header_bytes(plan.code.window);
    let mut writer = Writer::new(out, at);
    for word in levels[1] {
        writer.push(word, 64);
    }
    for level in 1..longest {
        let (alive, bits) = (levels[2 * level], levels[2 * level + 1]);
        for w in 0..W {
            writer.push(gather(bits[w], alive[w]), alive[w].count_ones());
        }
    }
    let mut at = writer.finish();
    for (w, escaped) in escaped.iter().enumerate() {
        let mut left = *escaped;
        while left != 0 {
            out[at] = elements[64 * w + left.trailing_zeros() as usize];
            at += 1;
            left &= left - 1;
        }
    }
    debug_assert_eq!(at, plan.length);
    Some(at)
}

#[inline(always)]
fn decode<const W: usize>(
    stream: &[u8],
    length: usize,
    count: usize,
    elements: &mut [u8],
    scratch: &mut Scratch,
    spread: impl Fn(u64, u64) -> u64,
) -> Result<(), Malformed> {
    let largest = (1 << count) - 1;
    let code = Code::parse(stream, length, largest)?;
    let leaves = code.leaves();

    // Planes start as if every element had the most frequent value, and are flipped where they
    // differ.
    let base = leaves.values[usize::from(leaves.escape == Some((leaves.first_level(), 0)))];
    let [a, b, c] = &mut scratch.masks;
    let (values, c) = masks::<W>(c).split_at_mut(count);
    let (bits, _) = c.split_first_mut().expect("room for eight planes more");
    for (bit, plane) in values.iter_mut().rev().enumerate() {
        *plane = [if base >> bit & 1 == 1 { u64::MAX } else { 0 }; W];
    }

    let (mut nodes, mut next) = (masks::<W>(a), masks::<W>(b));
    let (mut alive, mut escaped) = ([u64::MAX; W], [0; W]);
    nodes[0] = alive;
    let mut inner = 1;
    let mut leaf = 0;
    let mut at = 8 * Code::header_bytes(code.window);
    for level in 0..leaves.longest {
        let end = at + ones(&alive) as usize;
        if end > 8 * length {
            return Err(Malformed::Level { level, end, bits: 8 * length });
        }
        for w in 0..W {
            bits[w] = spread(read(stream, at), alive[w]);
            at += alive[w].count_ones() as usize;
        }
        let count_here = usize::from(leaves.count[level]);
        alive = [0; W];
        for (node, parent) in nodes[..inner].iter().enumerate() {
            for (child, flip) in [(2 * node, u64::MAX), (2 * node + 1, 0)] {
                if child >= count_here {
                    let mask = &mut next[child - count_here];
                    for w in 0..W {
                        mask[w] = parent[w] & (bits[w] ^ flip);
                        alive[w] |= mask[w];
                    }
                    continue;
                }
                if leaves.escape == Some((level, child as u8)) {
                    for w in 0..W {
                        escaped[w] = parent[w] & (bits[w] ^ flip);
                    }
                    continue;
                }
                let mut differs = leaves.values[leaf + child] ^ base;
                while differs != 0 {
                    let plane = &mut values[count - 1 - differs.trailing_zeros() as usize];
                    for w in 0..W {
                        plane[w] ^= parent[w] & (bits[w] ^ flip);
                    }
                    differs &= differs - 1;
                }
            }
        }
        leaf += count_here;
        inner = 2 * inner - count_here;
        std::mem::swap(&mut nodes, &mut next);
    }

    let mut at = at.div_ceil(8);
    let end = at + ones(&escaped) as usize;
    if end != length {
        return Err(Malformed::Escapes { end, length });
    }
    join(values, elements);
    for (w, escaped) in escaped.iter().enumerate() {
        let mut left = *escaped;
        while left != 0 {
            let value = stream[at];
            if usize::from(value) > largest {
                return Err(Malformed::Escaped { value, largest });
            }
            elements[64 * w + left.trailing_zeros() as usize] = value;
            at += 1;
            left &= left - 1;
        }
    }
    Ok(())
}

/// See [`super::Kernel::encode_block`]; `count` planes are coded.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn encode_bmi2(
    elements: &[u8],
    count: usize,
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Option<usize> {
    let gather = |x, mask| _pext_u64(x, mask);
    match elements.len() / 64 {
        16 => encode::<16>(elements, count, out, scratch, gather),
        32 => encode::<32>(elements, count, out, scratch, gather),
        64 => encode::<64>(elements, count, out, scratch, gather),
        _ => encode::<128>(elements, count, out, scratch, gather),
    }
}

/// See [`super::Kernel::decode_block`]; `count` planes are coded.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn decode_bmi2(
    stream: &[u8],
    length: usize,
    count: usize,
    elements: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    let spread = |x, mask| _pdep_u64(x, mask);
    match elements.len() / 64 {
        16 => decode::<16>(stream, length, count, elements, scratch, spread),
        32 => decode::<32>(stream, length, count, elements, scratch, spread),
        64 => decode::<64>(stream, length, count, elements, scratch, spread),
        _ => decode::<128>(stream, length, count, elements, scratch, spread),
    }
}
