//! The levels of a stream in plain Rust: what every kernel must give.
//!
//! Codes and values are worked on as planes, 64 elements a word: plane `k` of the codes is bit `k`
//! of every element's code, zero where the code has ended. A level of the stream is a plane's bits
//! of the elements that are still *alive*, gathered, and is spread back to them. Which elements are
//! alive, is known a plane at a time: to an encoder because marks have a one behind the code, to a
//! decoder because codes are canonical, so that those ending on a level are the ones below a limit.
//! Codes and values are found from each other leaf by leaf, for all elements at once.
//!
//! Loops run over the `W` words of a plane, which the compiler makes vectors of.

use super::{
    Malformed,
    bits::{Writer, gather, read, spread},
    code::{Code, Coder, ESCAPE, LONGEST, Leaves, WINDOW, ZERO},
    plan::Census,
};
use crate::plane;

/// One bit of every element.
type Plane<const W: usize> = [u64; W];

/// Bytes of the longest plane.
pub(super) const MAX_PLANE: usize = 1024;
/// The planes of a block's values, each in the front of its array.
pub(super) type ValuePlanes = [[u8; MAX_PLANE]; 8];
/// Words of a plane of the format with the shortest elements, whose values have at most four bits.
const OF_NIBBLES: usize = 128;

/// What the values of a block are, or `None` if they are too many.
pub(super) fn census(values: &[u8]) -> Option<Census> {
    // Four histograms, so that equal neighbours need not wait for each other.
    let mut counts = [[0_u16; 256]; 4];
    if values.len() == 64 * OF_NIBBLES {
        for eight in values.as_chunks::<8>().0 {
            let pairs = pairs(*eight);
            counts.iter_mut().zip(pairs).for_each(|(counts, pair)| counts[usize::from(pair)] += 1);
        }
        counts = values_of_pairs(&counts);
    } else {
        for four in values.as_chunks::<4>().0 {
            counts.iter_mut().zip(four).for_each(|(counts, value)| counts[usize::from(*value)] += 1);
        }
    }
    let mut all = [0_u16; 256];
    for counts in &counts {
        all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    }
    let mut census = Census::new();
    for (upper, counts) in (0..16).zip(all.as_chunks::<16>().0) {
        // Most blocks have few values, which lie together.
        if *counts != [0; 16] {
            for (lower, count) in (0..16).zip(counts) {
                census.add(upper << 4 | lower, (*count).into())?;
            }
        }
    }
    Some(census)
}

/// Eight values of four bits as four bytes, the first of a pair in the low half.
fn pairs(values: [u8; 8]) -> [u8; 4] {
    let values = u64::from_le_bytes(values);
    let [a, _, b, _, c, _, d, _] = (values | values >> 4).to_le_bytes();
    [a, b, c, d]
}

/// From how often there are pairs to how often there are values.
fn values_of_pairs(counts: &[[u16; 256]; 4]) -> [[u16; 256]; 4] {
    let mut of_values = [[0; 256]; 4];
    for counts in counts {
        for (pair, count) in counts.iter().enumerate() {
            of_values[0][pair % 16] += count;
            of_values[1][pair / 16] += count;
        }
    }
    of_values
}

/// The bits of `values`, the highest first.
fn split<const W: usize>(values: &[u8]) -> [Plane<W>; 8] {
    let mut bytes = [[0; MAX_PLANE]; 8];
    plane::split_bytes(values, bytes.each_mut().map(|plane| &mut plane[..8 * W]));
    std::array::from_fn(|plane| {
        std::array::from_fn(|word| u64::from_le_bytes(bytes[7 - plane].as_chunks().0[word]))
    })
}

/// The marks of values, the highest bits first, and which elements have the escape's or none.
fn mark_planes<const W: usize>(values: &[Plane<W>], coder: &Coder) -> ([Plane<W>; 8], Plane<W>) {
    let mut marks = [[0; W]; 8];
    let mut escaped = [u64::MAX; W];
    let symbols = (0..WINDOW).filter(|symbol| coder.code.lengths[*symbol] > 0);
    let own = symbols.map(|symbol| (coder.code.value(symbol), coder.marks[symbol]));
    let zero = Some((0, coder.marks[ZERO])).filter(|(_, mark)| *mark > 0);
    for (value, mark) in own.chain(zero) {
        let elements = equal(values, value);
        escaped.iter_mut().zip(&elements).for_each(|(escaped, element)| *escaped &= !element);
        add(&mut marks, mark, &elements);
    }
    add(&mut marks, coder.marks[ESCAPE], &escaped);
    (marks, escaped)
}

/// Gives `elements` the ones of `bits`, the highest bit in the first plane.
fn add<const W: usize>(planes: &mut [Plane<W>], bits: u8, elements: &Plane<W>) {
    for (_, plane) in planes.iter_mut().rev().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1) {
        plane.iter_mut().zip(elements).for_each(|(plane, element)| *plane |= element);
    }
}

/// The elements that have these bits in planes, the highest bit in the first.
fn equal<const W: usize>(planes: &[Plane<W>], bits: u8) -> Plane<W> {
    let mut equal = [u64::MAX; W];
    for (number, plane) in planes.iter().enumerate() {
        let flip = if bits >> (planes.len() - 1 - number) & 1 == 1 { 0 } else { u64::MAX };
        equal.iter_mut().zip(plane).for_each(|(equal, word)| *equal &= word ^ flip);
    }
    equal
}

/// How many elements each word has.
fn counts<const W: usize>(plane: &Plane<W>) -> [u32; W] {
    plane.map(u64::count_ones)
}

fn ones<const W: usize>(plane: &Plane<W>) -> usize {
    counts(plane).iter().sum::<u32>() as usize
}

/// The numbers of the elements in a plane.
fn elements<const W: usize>(plane: &Plane<W>) -> impl Iterator<Item = usize> {
    plane.iter().enumerate().flat_map(|(word, bits)| {
        let mut left = *bits;
        std::iter::from_fn(move || {
            let element = (left != 0).then(|| 64 * word + left.trailing_zeros() as usize);
            left &= left.wrapping_sub(1);
            element
        })
    })
}

/// Writes the stream of `values` by their code: its bytes.
pub(super) fn levels(values: &[u8], coder: &Coder, out: &mut [u8]) -> usize {
    match values.len() / 64 {
        16 => levels_of::<16>(values, coder, out),
        32 => levels_of::<32>(values, coder, out),
        64 => levels_of::<64>(values, coder, out),
        _ => levels_of::<OF_NIBBLES>(values, coder, out),
    }
}

fn levels_of<const W: usize>(values: &[u8], coder: &Coder, out: &mut [u8]) -> usize {
    let planes = split::<W>(values);
    let (planes, escaped) = mark_planes(&planes[if W == OF_NIBBLES { 4 } else { 0 }..], coder);
    // What is left of each mark behind a level.
    let mut alive = planes;
    for level in (1..LONGEST).rev() {
        let (upper, lower) = alive.split_at_mut(level + 1);
        upper[level].iter_mut().zip(&lower[0]).for_each(|(upper, lower)| *upper |= lower);
    }

    let at = coder.write(out);
    let mut writer = Writer::new(out, at);
    for (level, (bits, alive)) in planes.iter().zip(&alive[1..]).enumerate() {
        for ((bits, alive), count) in bits.iter().zip(alive).zip(counts(alive)) {
            if level == 0 {
                writer.push(*bits, 64);
            } else if *alive != 0 {
                writer.push(gather(*bits, *alive), count);
            }
        }
    }
    let mut at = writer.finish();
    for element in elements(&escaped) {
        out[at] = values[element];
        at += 1;
    }
    at
}

/// Decodes to the planes of as many values, the lowest bit's first, which are zero; see
/// [`super::Kernel::decode_block`].
pub(super) fn decode(
    stream: &[u8],
    length: usize,
    largest: usize,
    values: usize,
    planes: &mut ValuePlanes,
) -> Result<(), Malformed> {
    match values / 64 {
        16 => decode_of::<16>(stream, length, largest, planes),
        32 => decode_of::<32>(stream, length, largest, planes),
        64 => decode_of::<64>(stream, length, largest, planes),
        _ => decode_of::<OF_NIBBLES>(stream, length, largest, planes),
    }
}

fn decode_of<const W: usize>(
    stream: &[u8],
    length: usize,
    largest: usize,
    out: &mut ValuePlanes,
) -> Result<(), Malformed> {
    let code = Code::parse(stream, length, largest)?;
    let Leaves { values: leaf_values, count, longest, escape } = code.leaves();
    let mut planes = [[0; W]; LONGEST];
    let mut alive = [u64::MAX; W];
    let mut escaped = [0; W];
    let mut of_values = [[0; W]; 8];
    let (mut leaf, mut first) = (0, 0);
    let mut at = 8 * Code::header_bytes(code.window);
    for (level, leaves) in count.into_iter().enumerate().take(longest) {
        let counts = counts(&alive);
        let end = at + counts.iter().sum::<u32>() as usize;
        if end > 8 * length {
            return Err(Malformed::Level { level, end, bits: 8 * length });
        }
        for ((word, alive), count) in planes[level].iter_mut().zip(&alive).zip(counts) {
            if level == 0 {
                *word = read(stream, at);
            } else if *alive != 0 {
                *word = spread(read(stream, at), *alive);
            }
            at += count as usize;
        }
        // Codes that end here are those from `first` to below `limit`; the last level's are all.
        let limit = first + leaves;
        let planes = &planes[..=level];
        for (node, code) in (0..).zip(first..limit) {
            let elements = equal(planes, code);
            if escape == Some((level, node)) {
                escaped = elements;
            } else {
                add(&mut of_values, leaf_values[leaf], &elements);
            }
            leaf += 1;
        }
        if leaves > 0 && level + 1 < longest {
            for (alive, below) in alive.iter_mut().zip(below(planes, limit)) {
                *alive &= !below;
            }
        }
        first = limit << 1;
    }
    let at = at.div_ceil(8);
    let end = at + ones(&escaped);
    if end != length {
        return Err(Malformed::Escapes { end, length });
    }

    for (bytes, plane) in out.iter_mut().zip(of_values.iter().rev()).take(bits_of(largest)) {
        bytes.as_chunks_mut().0.iter_mut().zip(plane).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    }
    for (element, value) in elements(&escaped).zip(&stream[at..length]) {
        if usize::from(*value) > largest {
            return Err(Malformed::Escaped { value: *value, largest });
        }
        for (bit, plane) in out.iter_mut().enumerate().take(bits_of(largest)) {
            plane[element / 8] |= (value >> bit & 1) << (element % 8);
        }
    }
    Ok(())
}

/// Bits of the largest value.
const fn bits_of(largest: usize) -> usize {
    (usize::BITS - largest.leading_zeros()) as usize
}

/// The elements whose bits in planes, the first one's the highest, are below `limit`, which has no
/// more bits.
fn below<const W: usize>(planes: &[Plane<W>], limit: u8) -> Plane<W> {
    let (mut below, mut equal) = ([0; W], [u64::MAX; W]);
    for (number, plane) in planes.iter().enumerate() {
        let words = below.iter_mut().zip(&mut equal).zip(plane);
        if limit >> (planes.len() - 1 - number) & 1 == 1 {
            for ((below, equal), word) in words {
                *below |= *equal & !word;
                *equal &= word;
            }
        } else {
            words.for_each(|((_, equal), word)| *equal &= !word);
        }
    }
    below
}
