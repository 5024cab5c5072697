//! The signs of a channel-major block: a plane in which whole channels lean to one side, or change
//! side seldom.
//!
//! A stream has three parts:
//!
//! 1. Four bits for every *segment*, 128 signs (16 bytes of the plane), the first in the lower half
//!    of the first byte: its *mode*. 0 is raw; otherwise it is 1 + 3·s + k, where groups have 4, 8
//!    or 16 bits for s = 0, 1, 2, and the bits are for k = 0 the signs, for k = 1 the signs
//!    inverted, for k = 2 each sign XOR the one before it (the first of a segment: itself).
//! 2. For every segment that is not raw a bit for each of its groups, from the lowest of the first
//!    byte on: whether it has ones. These are 4, 2 or 1 bytes.
//! 3. A bit string, lowest bit first, padded with zeros to whole bytes: the 128 bits of every raw
//!    segment, and the groups of the others that have ones.
//!
//! The rules:
//! * The encoder takes the k that leaves the fewest ones in a segment, and then the s that is
//!   shortest. A stream that would not be shorter than asked for is not made, nor is one of a plane
//!   whose segments have so many ones that little is likely to be saved (`promises`): most signs
//!   are noise, and to see that takes a part of the time.
//! * Decoding never trusts the bytes: it ends with the plane or a reason, whatever is behind the
//!   stream.
//! * Kernels ([`Kernel`]) give the same streams and the same reasons.

#![expect(
    clippy::inline_always,
    clippy::cast_possible_truncation,
    reason = "only inlined code takes on its caller's processor features; a word's number and a group's bits are small"
)]

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod tests;

use crate::{format::Format, kernel::kernels};

/// Words of a segment.
const SEGMENT: usize = 2;
/// Words of the longest plane.
const MAX_WORDS: usize = 128;
/// Bytes of it.
pub(crate) const MAX_PLANE: usize = 8 * MAX_WORDS;
/// Bits of a group, by the mode's s.
const GROUPS: [u32; 3] = [4, 8, 16];
/// Bytes behind a plane's length that an encoder may write to.
pub(crate) const SLACK: usize = 32;
/// The highest mode.
const MAX_MODE: u8 = 9;
/// A segment with as many ones as this at least, whatever way they are counted, mostly is raw: its
/// groups are not empty. For each one fewer it saves about two bits.
const MANY_ONES: u32 = 38;

/// How a mode is read.
struct Way {
    /// Bits of a group.
    bits: u32,
    /// Groups of a word.
    groups: u32,
    /// The lowest bit of every group.
    lowest: u64,
    /// The bits of one group.
    ones: u64,
    /// Bytes of the segment's flags.
    flags: usize,
    /// All ones if the words are inverted.
    invert: u64,
    /// All ones if the words are changes.
    changes: u64,
}

/// By mode.
const WAYS: [Way; MAX_MODE as usize + 1] = {
    let mut ways = [const { way(0) }; MAX_MODE as usize + 1];
    let mut mode = 0;
    while mode < ways.len() {
        ways[mode] = way(mode);
        mode += 1;
    }
    ways
};

const fn way(mode: usize) -> Way {
    let (size, kind) = if mode == 0 { (GROUPS.len() - 1, 0) } else { ((mode - 1) / 3, (mode - 1) % 3) };
    let bits = GROUPS[size];
    Way {
        bits,
        groups: 64 / bits,
        lowest: lowest(bits),
        ones: (1 << bits) - 1,
        flags: flag_bytes(mode as u8),
        invert: if kind == 1 { u64::MAX } else { 0 },
        changes: if kind == 2 { u64::MAX } else { 0 },
    }
}

/// Why bytes are no stream of signs.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Malformed {
    /// A mode that there is not.
    #[error("segment {segment} has mode {mode}")]
    Mode {
        /// The segment.
        segment: usize,
        /// Its mode.
        mode: u8,
    },
    /// The signs end elsewhere.
    #[error("the signs take {end} bytes of {length}")]
    Length {
        /// Where they end, or more than the length if past it.
        end: usize,
        /// Where they should.
        length: usize,
    },
}

/// Bytes of the modes.
const fn mode_bytes(words: usize) -> usize {
    (words / SEGMENT).div_ceil(2)
}

kernels! {
    /// A way to code and decode.
    pub(crate) enum Kernel {
        /// Plain Rust.
        Portable,
        /// BMI2's `pdep` and `pext`, word by word.
        Bmi2: ["avx2", "bmi2", "popcnt"],
        /// AVX-512 with VBMI2's compress and expand of nibbles.
        Avx512: [
            "avx2", "bmi1", "bmi2", "popcnt", "avx512f", "avx512bw", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq",
            "vpclmulqdq", "gfni"
        ],
    }
}

impl Kernel {
    /// Codes the sign plane of a block of `format` into the front of `out`, if that takes less than
    /// `limit` bytes and the plane has not so many ones that it is not tried: how many. If not,
    /// what is in `out` is undefined.
    ///
    /// # Panics
    /// If the kernel is not available, `plane` is no plane of this format, or `out` has not
    /// [`SLACK`] more than it.
    pub(crate) fn encode(self, format: Format, plane: &[u8], limit: usize, out: &mut [u8]) -> Option<usize> {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert_eq!(plane.len(), format.plane_bytes(), "a plane of {format}");
        assert!(out.len() >= plane.len() + SLACK, "the output buffer holds the stream");
        match self {
            Self::Portable => encode_by(plane, limit, out, gather),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { encode_bmi2(plane, limit, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::encode(plane, limit, out) },
        }
    }

    /// Decodes the first `length` of `bytes`, a stream, to the sign plane of a block of `format`.
    /// Bytes behind it may be looked at, and may be anything.
    ///
    /// # Errors
    /// [`Malformed`] when the bytes are no stream; `plane` is then undefined.
    ///
    /// # Panics
    /// If the kernel is not available, `plane` is no plane of this format, or there are fewer
    /// bytes.
    pub(crate) fn decode(
        self,
        format: Format,
        bytes: &[u8],
        length: usize,
        plane: &mut [u8],
    ) -> Result<(), Malformed> {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert_eq!(plane.len(), format.plane_bytes(), "a plane of {format}");
        match self {
            Self::Portable => decode_by(&bytes[..length], plane, spread),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { decode_bmi2(&bytes[..length], plane) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::decode(bytes, length, plane) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi2,popcnt")]
fn encode_bmi2(plane: &[u8], limit: usize, out: &mut [u8]) -> Option<usize> {
    encode_by(plane, limit, out, |x, mask| std::arch::x86_64::_pext_u64(x, mask))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi2,popcnt")]
fn decode_bmi2(stream: &[u8], plane: &mut [u8]) -> Result<(), Malformed> {
    decode_by(stream, plane, |x, mask| std::arch::x86_64::_pdep_u64(x, mask))
}

/// Bytes that say which groups of a segment of this mode have ones.
const fn flag_bytes(mode: u8) -> usize {
    match mode {
        0 => 0,
        1..4 => 4,
        4..7 => 2,
        _ => 1,
    }
}

/// The lowest bit of every group of `bits`.
const fn lowest(bits: u32) -> u64 {
    u64::MAX / ((1 << bits) - 1)
}

/// Groups of `bits` that have ones: a one in the lowest bit of each.
#[inline(always)]
fn occupied(mut x: u64, bits: u32) -> u64 {
    let mut step = 1;
    while step < bits {
        x |= x >> step;
        step *= 2;
    }
    x & lowest(bits)
}

/// Whether a stream of so many segments is likely to save more than its modes take. `fewer` is the
/// sum, over those that have fewer ones than [`MANY_ONES`], of how many fewer.
const fn promises(fewer: u32, segments: usize) -> bool {
    // Two bits for each one, four for each mode.
    2 * fewer as usize > 4 * segments
}

/// The way to count a segment that leaves the fewest ones.
struct Fewest {
    kind: u8,
    /// The words that are written if the segment is not raw.
    words: [u64; SEGMENT],
    ones: u32,
}

impl Fewest {
    #[inline(always)]
    fn of(signs: [u64; SEGMENT]) -> Self {
        let changes: [u64; SEGMENT] = std::array::from_fn(|w| {
            let before = if w == 0 { 0 } else { signs[w - 1] >> 63 };
            signs[w] ^ (signs[w] << 1 | before)
        });
        let (ones, turns) = (count(signs), count(changes));
        if turns < ones.min(128 - ones) {
            Self { kind: 2, words: changes, ones: turns }
        } else if ones <= 64 {
            Self { kind: 0, words: signs, ones }
        } else {
            Self { kind: 1, words: signs.map(|word| !word), ones: 128 - ones }
        }
    }

    /// The mode of the segment, the bits that it takes, and the words that they are of.
    #[inline(always)]
    fn choose(&self, signs: [u64; SEGMENT]) -> (u8, u32, [u64; SEGMENT]) {
        let (mut mode, mut least) = (0, 128);
        // The fewest ones are in the fewest groups, nearly always.
        for (size, bits) in (0..).zip(GROUPS) {
            let cost = 128 / bits + bits * count(self.words.map(|word| occupied(word, bits)));
            if cost < least {
                (mode, least) = (1 + 3 * size + self.kind, cost);
            }
        }
        (mode, least, if mode == 0 { signs } else { self.words })
    }
}

/// Ones of a segment.
#[inline(always)]
fn count(words: [u64; SEGMENT]) -> u32 {
    words.into_iter().map(u64::count_ones).sum()
}

#[inline(always)]
fn encode_by(plane: &[u8], limit: usize, out: &mut [u8], gather: impl Fn(u64, u64) -> u64) -> Option<usize> {
    let mut words = [[0_u64; SEGMENT]; MAX_WORDS / SEGMENT];
    let mut modes = [0_u8; MAX_WORDS / SEGMENT];
    let (segments, _) = plane.as_chunks::<{ 8 * SEGMENT }>();
    let mut total = 0;
    let signs =
        |segment: usize| std::array::from_fn(|w| u64::from_le_bytes(segments[segment].as_chunks().0[w]));
    let fewest = |segment: usize| Fewest::of(signs(segment));
    let fewer = (0..segments.len()).map(|segment| MANY_ONES.saturating_sub(fewest(segment).ones)).sum();
    if !promises(fewer, segments.len()) {
        return None;
    }
    for segment in 0..segments.len() {
        let bits;
        (modes[segment], bits, words[segment]) = fewest(segment).choose(signs(segment));
        total += bits as usize;
    }
    let (modes, words) = (&modes[..segments.len()], &words[..segments.len()]);
    let before = mode_bytes(plane.len() / 8);
    let length = before + total.div_ceil(8);
    if length >= limit.min(plane.len()) {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(modes.chunks(2)) {
        *byte = pair[0] | pair.get(1).map_or(0, |upper| upper << 4);
    }
    let flags = modes.iter().map(|mode| flag_bytes(*mode)).sum::<usize>();
    let (flags, bits) = out[before..length].split_at_mut(flags);
    let mut writer = Writer { flags, out: bits, at: 0, pending: 0, held: 0 };
    for (mode, words) in modes.iter().zip(words) {
        match mode {
            0 => words.iter().for_each(|word| writer.push(*word, 64)),
            1..4 => writer.push_groups::<4>(words, &gather),
            4..7 => writer.push_groups::<8>(words, &gather),
            _ => writer.push_groups::<16>(words, &gather),
        }
    }
    writer.finish();
    Some(length)
}

#[inline(always)]
fn decode_by(stream: &[u8], plane: &mut [u8], spread: impl Fn(u64, u64) -> u64) -> Result<(), Malformed> {
    let length = stream.len();
    let count = plane.len() / (8 * SEGMENT);
    let ends = |end| Malformed::Length { end, length };
    let before = mode_bytes(plane.len() / 8);
    let (packed, rest) = stream.split_at_checked(before).ok_or(ends(before))?;
    let mut modes = [0_u8; MAX_WORDS / SEGMENT];
    let mut flags = 0;
    for (segment, mode) in modes[..count].iter_mut().enumerate() {
        *mode = packed[segment / 2] >> (segment % 2 * 4) & 15;
        if *mode > MAX_MODE {
            return Err(Malformed::Mode { segment, mode: *mode });
        }
        flags += flag_bytes(*mode);
    }
    let (flags, bits) = rest.split_at_checked(flags).ok_or(ends(before + flags))?;
    let flag_length = flags.len();
    let mut reader = Reader { flags, bytes: bits, at: 0 };
    for (mode, out) in modes[..count].iter().zip(plane.as_chunks_mut::<{ 8 * SEGMENT }>().0) {
        // No branches: modes follow each other as they like.
        let way = &WAYS[usize::from(*mode)];
        let flags = reader.take_flags(way);
        let mut last = 0_u64;
        for (w, bytes) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let groups = spread(flags >> (w as u32 * way.groups) & ((1 << way.groups) - 1), way.lowest);
            let word = spread(reader.take(groups.count_ones() * way.bits), groups.wrapping_mul(way.ones));
            let changed = prefix_parity(word) ^ 0_u64.wrapping_sub(last);
            let word = (word & !way.changes | changed & way.changes) ^ way.invert;
            last = word >> 63;
            *bytes = word.to_le_bytes();
        }
    }
    let end = before + flag_length + reader.at.div_ceil(8);
    if end == length { Ok(()) } else { Err(ends(end)) }
}

/// The bits of `x` where `mask` has ones, side by side from the lowest on: what the instruction
/// `pext` does.
fn gather(mut x: u64, mut mask: u64) -> u64 {
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

/// The lowest bits of `x` spread to where `mask` has ones: what the instruction `pdep` does.
fn spread(mut x: u64, mask: u64) -> u64 {
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

/// Appends bit strings to a buffer of just their length.
struct Writer<'a> {
    /// Where the next flags go.
    flags: &'a mut [u8],
    out: &'a mut [u8],
    at: usize,
    pending: u64,
    held: u32,
}

impl Writer<'_> {
    /// Appends words whose groups of `BITS` are mostly empty.
    #[inline(always)]
    fn push_groups<const BITS: u32>(&mut self, words: &[u64; SEGMENT], gather: &impl Fn(u64, u64) -> u64) {
        let mut flags = 0;
        for (w, word) in words.iter().enumerate() {
            let groups = occupied(*word, BITS);
            flags |= gather(groups, lowest(BITS)) << (w as u32 * 64 / BITS);
            // A group's lowest bit, times the group's ones.
            self.push(gather(*word, groups * ((1 << BITS) - 1)), groups.count_ones() * BITS);
        }
        let length = 16 / BITS as usize;
        let (now, later) = std::mem::take(&mut self.flags).split_at_mut(length);
        now.copy_from_slice(&flags.to_le_bytes()[..length]);
        self.flags = later;
    }

    /// Appends the lowest `count` bits of `bits`, whose others are zero.
    #[inline(always)]
    fn push(&mut self, bits: u64, count: u32) {
        let low = self.pending | bits << self.held;
        let high = (bits >> 1) >> (63 - self.held);
        self.held += count;
        self.pending = low;
        if self.held >= 64 {
            self.out[self.at..self.at + 8].copy_from_slice(&low.to_le_bytes());
            self.at += 8;
            self.held -= 64;
            self.pending = high;
        }
    }

    fn finish(self) {
        let left = (self.held as usize).div_ceil(8);
        self.out[self.at..].copy_from_slice(&self.pending.to_le_bytes()[..left]);
    }
}

/// Takes bit strings from bytes; zeros behind them.
struct Reader<'a> {
    /// The flags that are next.
    flags: &'a [u8],
    bytes: &'a [u8],
    /// The bit that is next, which may be past the bytes.
    at: usize,
}

impl Reader<'_> {
    /// The next segment's flags; its mode's bytes of them are there.
    #[inline(always)]
    fn take_flags(&mut self, way: &Way) -> u64 {
        let flags = match self.flags.first_chunk::<4>() {
            Some(four) => u32::from_le_bytes(*four),
            None => self.flags.iter().rev().fold(0, |flags, byte| flags << 8 | u32::from(*byte)),
        };
        self.flags = &self.flags[way.flags..];
        let flags = if way.flags == 0 { u64::MAX } else { u64::from(flags) };
        flags & ((1 << (SEGMENT as u32 * way.groups)) - 1)
    }

    /// The next `count` bits, at most 64.
    #[inline(always)]
    fn take(&mut self, count: u32) -> u64 {
        let (byte, bit) = (self.at / 8, self.at % 8);
        self.at += count as usize;
        let (low, high) = nine_at(self.bytes, byte);
        let bits = low >> bit | u64::from(high) << 1 << (63 - bit);
        bits & u64::MAX.checked_shr(64 - count).unwrap_or(0)
    }
}

/// Eight bytes of `bytes` from the one at `at` on as a word, and the ninth; zeros behind the last.
#[inline(always)]
fn nine_at(bytes: &[u8], at: usize) -> (u64, u8) {
    match bytes.get(at..at + 9) {
        Some(bytes) => nine(bytes),
        None => last(bytes, at),
    }
}

/// As [`nine_at`], where fewer than nine are left.
#[cold]
fn last(bytes: &[u8], at: usize) -> (u64, u8) {
    let mut padded = [0; 9];
    let rest = bytes.get(at..).unwrap_or_default();
    padded[..rest.len()].copy_from_slice(rest);
    nine(&padded)
}

/// The first eight bytes as a word, and the ninth.
#[inline(always)]
fn nine(bytes: &[u8]) -> (u64, u8) {
    (u64::from_le_bytes(bytes.as_chunks().0[0]), bytes[8])
}
