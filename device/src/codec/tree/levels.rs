//! The levels of a stream: planes to code bits and back, 64 elements a word.
//!
//! Both ways walk the code's tree level by level. Every node has a *mask*, the elements whose code passes through it; the
//! nodes of a depth are kept in code order, so leaves come first and two neighbours are siblings. Inner nodes' masks are halved by
//! the level's bits on the way down, and united on the way up. Loops run over the `W` words of a plane, which the compiler
//! makes vectors of; only [`gather`] and [`spread`] differ between the kernels.

#![expect(
    clippy::inline_always,
    clippy::cast_possible_truncation,
    clippy::needless_range_loop,
    reason = "only inlined code takes on its caller's processor features; counts and symbols of a block fit in 16 bits and 8; \
              loops over the words of several masks become vectors"
)]

use super::{
    Malformed, RARE,
    code::{Code, ESCAPE, LONGEST, SYMBOLS, WINDOW, ZERO},
};
use crate::format::Format;

/// Bytes behind a stream that are read or written with it.
pub const SLACK: usize = 16;

/// Values told apart in a block before it is given up as noise.
const MOST_VALUES: usize = 48;
/// Words of a store of masks: enough for the values or inner nodes of every format.
const STORE: usize = 4096;

/// One bit of every element.
type Mask<const W: usize> = [u64; W];

/// Where masks are kept while a block is worked on.
pub(super) struct Scratch {
    a: Vec<u64>,
    b: Vec<u64>,
    c: Vec<u64>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        let store = || vec![0; STORE];
        Self { a: store(), b: store(), c: store() }
    }
}

fn masks<const W: usize>(store: &mut [u64]) -> &mut [Mask<W>] {
    store.as_chunks_mut().0
}

/// The bits of `x` where `mask` has ones, side by side from the lowest on.
pub(crate) fn gather(mut x: u64, mut mask: u64) -> u64 {
    x &= mask;
    let mut zeros = !mask << 1;
    for round in 0..6 {
        let odd = prefix_parity(zeros);
        let moved = odd & mask;
        mask = (mask ^ moved) | moved >> (1 << round);
        let t = x & moved;
        x = (x ^ t) | t >> (1 << round);
        zeros &= !odd;
    }
    x
}

/// The lowest bits of `x` spread to where `mask` has ones.
pub(crate) fn spread(mut x: u64, mask: u64) -> u64 {
    let (mut left, mut zeros, mut rounds) = (mask, !mask << 1, [0; 6]);
    for (round, moved) in rounds.iter_mut().enumerate() {
        let odd = prefix_parity(zeros);
        *moved = odd & left;
        left = (left ^ *moved) | *moved >> (1 << round);
        zeros &= !odd;
    }
    for (round, moved) in rounds.iter().enumerate().rev() {
        x = (x & !moved) | (x << (1 << round) & moved);
    }
    x & mask
}

/// Bit `i` is the parity of bits `0..=i` of `x`.
const fn prefix_parity(mut x: u64) -> u64 {
    x ^= x << 1;
    x ^= x << 2;
    x ^= x << 4;
    x ^= x << 8;
    x ^= x << 16;
    x ^ x << 32
}

fn ones<const W: usize>(mask: &Mask<W>) -> u32 {
    mask.iter().map(|word| word.count_ones()).sum()
}

/// What the planes of a block hold: its values and which elements have them.
struct Census {
    /// Values with a mask of their own, ascending.
    values: [u8; MOST_VALUES],
    /// Their counts.
    counts: [u32; MOST_VALUES],
    /// How many.
    found: usize,
    /// Elements of other values.
    escapes: u32,
}

/// Finds the values of a block by halving its elements plane by plane. Masks go to `found`, those of rare values together to `escaped`.
#[inline(always)]
fn census<const W: usize>(
    planes: &[Mask<W>],
    stack: &mut [Mask<W>],
    found: &mut [Mask<W>],
    escaped: &mut Mask<W>,
) -> Option<Census> {
    let mut census = Census { values: [0; MOST_VALUES], counts: [0; MOST_VALUES], found: 0, escapes: 0 };
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
        } else if census.found == MOST_VALUES || census.found + 1 == found.len() {
            return None;
        } else {
            found[census.found] = stack[top];
            census.values[census.found] = value;
            census.counts[census.found] = count;
            census.found += 1;
        }
    }
    Some(census)
}

impl Census {
    /// The window of values with most elements, zeros aside, which have a symbol anyway: its first and end in `values`.
    fn window(&self) -> (usize, usize) {
        let weight = |at: usize| if self.values[at] == 0 { 0 } else { self.counts[at] };
        let (mut best, mut most) = ((0, 1), 0);
        let (mut end, mut held) = (0, 0);
        for first in 0..self.found {
            while end < self.found && usize::from(self.values[end] - self.values[first]) < WINDOW {
                held += weight(end);
                end += 1;
            }
            if held > most {
                (best, most) = ((first, end), held);
            }
            held -= weight(first);
        }
        best
    }
}

/// Appends bit strings to bytes.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
    pending: u64,
    held: u32,
}

impl Writer<'_> {
    /// Appends the lowest `count` bits of `bits`, whose others are zero.
    #[inline(always)]
    fn push(&mut self, bits: u64, count: u32) {
        let low = self.pending | bits << self.held;
        self.out[self.at..self.at + 8].copy_from_slice(&low.to_le_bytes());
        let high = (bits >> 1) >> (63 - self.held);
        self.held += count;
        let full = self.held >= 64;
        self.pending = if full { high } else { low };
        self.at += if full { 8 } else { 0 };
        self.held &= 63;
    }

    /// Pads to a whole byte; where the next one goes.
    fn finish(self) -> usize {
        self.out[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
        self.at + (self.held as usize).div_ceil(8)
    }
}

#[inline(always)]
fn encode<const W: usize>(
    planes: &[u8],
    out: &mut [u8],
    scratch: &mut Scratch,
    gather: impl Fn(u64, u64) -> u64,
) -> Option<usize> {
    let Scratch { a, b, c } = scratch;
    let (words, found) = (masks::<W>(a), masks::<W>(b));
    let count = planes.len() / (8 * W);
    let (values, mut inner) = words.split_at_mut(count);
    for (word, bytes) in values.as_flattened_mut().iter_mut().zip(planes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let (levels, mut parents) = masks::<W>(c).split_at_mut(2 * LONGEST);
    let mut escaped = [0; W];
    let census = census(values, parents, found, &mut escaped)?;
    if census.found == 0 {
        return None;
    }

    // Values get symbols, or are escaped after all.
    let (first, end) = census.window();
    let low = census.values[first];
    let mut counts = [0; SYMBOLS];
    let mut place = [0_u8; SYMBOLS];
    let mut escapes = census.escapes;
    for at in 0..census.found {
        let symbol = match census.values[at] {
            value if (first..end).contains(&at) => usize::from(value - low),
            0 => ZERO,
            _ => {
                escaped.iter_mut().zip(&found[at]).for_each(|(all, these)| *all |= these);
                escapes += census.counts[at];
                continue;
            }
        };
        counts[symbol] = census.counts[at];
        place[symbol] = at as u8;
    }
    counts[ESCAPE] = escapes;
    place[ESCAPE] = census.found as u8;
    found[census.found] = escaped;
    if counts.iter().filter(|count| **count > 0).count() < 2 {
        return None;
    }
    let code = Code::build(low, usize::from(census.values[end - 1] - low) + 1, &counts);
    let header = Code::header_bytes(code.window);
    let bits: usize =
        counts.iter().zip(&code.lengths).map(|(count, length)| *count as usize * usize::from(*length)).sum();
    let length = header + bits.div_ceil(8) + escapes as usize;
    if length >= planes.len() {
        return None;
    }

    // Up the tree: two nodes make one, the second one's elements have the level's bit.
    let canonical = code.canonical();
    let mut leaves: usize = canonical.count.iter().sum();
    let mut nodes = 0;
    for level in (0..canonical.longest).rev() {
        let count = canonical.count[level + 1];
        leaves -= count;
        let (alive, bits) = (2 * level, 2 * level + 1);
        levels[bits] = [0; W];
        levels[alive] = [0; W];
        let (up, down) = levels.split_at_mut(bits);
        let (alive, bits) = (&mut up[alive], &mut down[0]);
        let pairs = usize::midpoint(count, nodes);
        let node = |at: usize| {
            if at < count {
                &found[usize::from(place[usize::from(canonical.order[leaves + at])])]
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

    out[..header].copy_from_slice(&code.header()[..header]);
    let mut writer = Writer { out, at: header, pending: 0, held: 0 };
    for word in levels[1] {
        writer.push(word, 64);
    }
    for level in 1..canonical.longest {
        let (alive, bits) = (levels[2 * level], levels[2 * level + 1]);
        for w in 0..W {
            writer.push(gather(bits[w], alive[w]), alive[w].count_ones());
        }
    }
    let mut at = writer.finish();
    for (w, escaped) in escaped.iter().enumerate() {
        let mut left = *escaped;
        while left != 0 {
            let bit = left.trailing_zeros();
            out[at] = values.iter().fold(0, |value, plane| value << 1 | (plane[w] >> bit & 1) as u8);
            at += 1;
            left &= left - 1;
        }
    }
    debug_assert_eq!(at, length);
    Some(length)
}

/// 64 bits of `bytes` from bit `at` on.
#[inline(always)]
fn read(bytes: &[u8], at: usize) -> u64 {
    let window: &[u8; 9] = bytes[at / 8..at / 8 + 9].try_into().expect("nine bytes");
    let low = u64::from_le_bytes(*window.first_chunk().expect("eight of nine"));
    let shift = at % 8;
    low >> shift | u64::from(window[8]) << 1 << (63 - shift)
}

#[inline(always)]
fn decode<const W: usize>(
    stream: &[u8],
    length: usize,
    planes: &mut [u8],
    scratch: &mut Scratch,
    spread: impl Fn(u64, u64) -> u64,
) -> Result<(), Malformed> {
    let count = planes.len() / (8 * W);
    let largest = (1 << count) - 1;
    let code = Code::parse(stream, length, largest)?;
    let canonical = code.canonical();

    // Planes start as if every element had the most frequent value, and are flipped where they differ.
    let base = canonical.order[..2].iter().find(|symbol| usize::from(**symbol) != ESCAPE);
    let base = code.value(usize::from(*base.expect("a complete code has two symbols")));
    let Scratch { a, b, c } = scratch;
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
    for level in 0..canonical.longest {
        let end = at + ones(&alive) as usize;
        if end > 8 * length {
            return Err(Malformed::Level { level, end, bits: 8 * length });
        }
        for w in 0..W {
            bits[w] = spread(read(stream, at), alive[w]);
            at += alive[w].count_ones() as usize;
        }
        let leaves = canonical.count[level + 1];
        alive = [0; W];
        for (node, parent) in nodes[..inner].iter().enumerate() {
            for (child, flip) in [(2 * node, u64::MAX), (2 * node + 1, 0)] {
                if child >= leaves {
                    let mask = &mut next[child - leaves];
                    for w in 0..W {
                        mask[w] = parent[w] & (bits[w] ^ flip);
                        alive[w] |= mask[w];
                    }
                    continue;
                }
                let symbol = usize::from(canonical.order[leaf]);
                leaf += 1;
                if symbol == ESCAPE {
                    for w in 0..W {
                        escaped[w] = parent[w] & (bits[w] ^ flip);
                    }
                    continue;
                }
                let mut differs = code.value(symbol) ^ base;
                while differs != 0 {
                    let plane = &mut values[count - 1 - differs.trailing_zeros() as usize];
                    for w in 0..W {
                        plane[w] ^= parent[w] & (bits[w] ^ flip);
                    }
                    differs &= differs - 1;
                }
            }
        }
        inner = 2 * inner - leaves;
        std::mem::swap(&mut nodes, &mut next);
    }

    let mut at = at.div_ceil(8);
    let end = at + ones(&escaped) as usize;
    if end != length {
        return Err(Malformed::Escapes { end, length });
    }
    for (w, escaped) in escaped.iter().enumerate() {
        let mut left = *escaped;
        while left != 0 {
            let value = stream[at];
            if usize::from(value) > largest {
                return Err(Malformed::Escaped { value, largest });
            }
            for (bit, plane) in values.iter_mut().rev().enumerate() {
                plane[w] ^= u64::from((value ^ base) >> bit & 1) << left.trailing_zeros();
            }
            at += 1;
            left &= left - 1;
        }
    }
    for (bytes, word) in planes.as_chunks_mut().0.iter_mut().zip(values.as_flattened()) {
        *bytes = word.to_le_bytes();
    }
    Ok(())
}

/// Encodes with these features and this way of gathering, for the words that the format's planes have.
macro_rules! encode_for {
    ($format:expr, $planes:expr, $out:expr, $scratch:expr, $gather:expr) => {
        match $format.plane_bytes() / 8 {
            16 => encode::<16>($planes, $out, $scratch, $gather),
            32 => encode::<32>($planes, $out, $scratch, $gather),
            64 => encode::<64>($planes, $out, $scratch, $gather),
            _ => encode::<128>($planes, $out, $scratch, $gather),
        }
    };
}

/// As [`encode_for`], the way back.
macro_rules! decode_for {
    ($format:expr, $stream:expr, $length:expr, $planes:expr, $scratch:expr, $spread:expr) => {
        match $format.plane_bytes() / 8 {
            16 => decode::<16>($stream, $length, $planes, $scratch, $spread),
            32 => decode::<32>($stream, $length, $planes, $scratch, $spread),
            64 => decode::<64>($stream, $length, $planes, $scratch, $spread),
            _ => decode::<128>($stream, $length, $planes, $scratch, $spread),
        }
    };
}

pub(super) fn encode_portable(
    format: Format,
    planes: &[u8],
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Option<usize> {
    encode_for!(format, planes, out, scratch, gather)
}

pub(super) fn decode_portable(
    format: Format,
    stream: &[u8],
    length: usize,
    planes: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    decode_for!(format, stream, length, planes, scratch, spread)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn encode_bmi2(
    format: Format,
    planes: &[u8],
    out: &mut [u8],
    scratch: &mut Scratch,
) -> Option<usize> {
    encode_for!(format, planes, out, scratch, |x, mask| std::arch::x86_64::_pext_u64(x, mask))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn decode_bmi2(
    format: Format,
    stream: &[u8],
    length: usize,
    planes: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    decode_for!(format, stream, length, planes, scratch, |x, mask| std::arch::x86_64::_pdep_u64(x, mask))
}
