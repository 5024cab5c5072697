//! The signs of a channel-major block: a plane in which whole channels lean to one side, or change side seldom.
//!
//! A stream has two parts:
//!
//! 1. Four bits for every *segment*, 128 signs (16 bytes of the plane), the first in the lower half of the first byte: its *mode*. 0 is raw; otherwise
//!    it is 1 + 3·s + k, where groups have 4, 8 or 16 bits for s = 0, 1, 2, and the bits are for k = 0 the signs, for k = 1 the signs inverted, for
//!    k = 2 each sign XOR the one before it (the first of a segment: itself).
//! 2. A bit string, lowest bit first, padded with zeros to whole bytes: for every 8 bytes of the plane, as a little-endian word, the 64 bits of a raw segment;
//!    otherwise a bit for each group, whether it has ones, and then the groups that have, both from the lowest on.
//!
//! The rules:
//! * The encoder takes the shortest mode of each segment. A stream that would not be shorter than asked for is not made.
//! * Decoding never trusts the bytes: it ends with the plane or a reason, and reads nothing past the stream.

#![expect(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "only inlined code takes on its caller's processor features; loops over the words of several arrays become vectors"
)]

use crate::format::Format;

/// Words of a segment.
const SEGMENT: usize = 2;
/// Words of the longest plane.
const MOST_WORDS: usize = 128;
/// Bits of a group, by the mode's s.
const GROUPS: [u32; 3] = [4, 8, 16];
/// Modes but raw.
const MODES: usize = 3 * GROUPS.len();

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

/// Codes the sign plane of a block of `format` into the front of `out`, if that takes less than `limit` bytes: how many.
///
/// # Panics
/// If `plane` is no plane of this format, or `out` is shorter than it.
pub fn encode(format: Format, plane: &[u8], limit: usize, out: &mut [u8]) -> Option<usize> {
    assert_eq!(plane.len(), format.plane_bytes(), "a plane of {format}");
    assert!(out.len() >= plane.len(), "room for the stream");
    #[cfg(target_arch = "x86_64")]
    if has_bmi2() {
        // SAFETY: the processor has these features.
        return unsafe { encode_bmi2(plane, limit, out) };
    }
    encode_by(plane, limit, out, gather)
}

/// Decodes the stream `stream` to the sign plane of a block of `format`.
///
/// # Errors
/// [`Malformed`] when the bytes are no stream; `plane` is then undefined.
///
/// # Panics
/// If `plane` is no plane of this format.
pub fn decode(format: Format, stream: &[u8], plane: &mut [u8]) -> Result<(), Malformed> {
    assert_eq!(plane.len(), format.plane_bytes(), "a plane of {format}");
    #[cfg(target_arch = "x86_64")]
    if has_bmi2() {
        // SAFETY: the processor has these features.
        return unsafe { decode_bmi2(stream, plane) };
    }
    decode_by(stream, plane, spread)
}

#[cfg(target_arch = "x86_64")]
fn has_bmi2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("popcnt")
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

#[inline(always)]
fn encode_by(plane: &[u8], limit: usize, out: &mut [u8], gather: impl Fn(u64, u64) -> u64) -> Option<usize> {
    let count = plane.len() / 8;
    let mut signs = [0_u64; MOST_WORDS];
    for (word, bytes) in signs.iter_mut().zip(plane.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let mut changes = [0; MOST_WORDS];
    for w in 0..count {
        let before = if w % SEGMENT == 0 { 0 } else { signs[w - 1] >> 63 };
        changes[w] = signs[w] ^ (signs[w] << 1 | before);
    }
    // Bits that each mode takes in each word.
    let mut costs = [[0_u32; MOST_WORDS]; MODES];
    for (mode, costs) in costs.iter_mut().enumerate() {
        let bits = GROUPS[mode / 3];
        let words = if mode % 3 == 2 { &changes } else { &signs };
        let invert = if mode % 3 == 1 { u64::MAX } else { 0 };
        for w in 0..count {
            costs[w] = 64 / bits + bits * occupied(words[w] ^ invert, bits).count_ones();
        }
    }
    let mut modes = [0_u8; MOST_WORDS / SEGMENT];
    let mut total = 0;
    for (segment, best) in modes[..count / SEGMENT].iter_mut().enumerate() {
        let mut least = 128;
        for (mode, costs) in (1..).zip(&costs) {
            let cost = costs[segment * SEGMENT] + costs[segment * SEGMENT + 1];
            if cost < least {
                (least, *best) = (cost, mode);
            }
        }
        total += least as usize;
    }
    let length = mode_bytes(count) + total.div_ceil(8);
    if length >= limit.min(plane.len()) {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(modes[..count / SEGMENT].chunks(2)) {
        *byte = pair[0] | pair.get(1).map_or(0, |upper| upper << 4);
    }
    let mut writer = Writer { out: &mut out[mode_bytes(count)..length], at: 0, pending: 0, held: 0 };
    for w in 0..count {
        let Some(mode) = usize::from(modes[w / SEGMENT]).checked_sub(1) else {
            writer.push(signs[w], 64);
            continue;
        };
        let bits = GROUPS[mode / 3];
        let word = [signs[w], !signs[w], changes[w]][mode % 3];
        let groups = occupied(word, bits);
        writer.push(gather(groups, lowest(bits)), 64 / bits);
        // A group's lowest bit, times the group's ones.
        writer.push(gather(word, groups * ((1 << bits) - 1)), groups.count_ones() * bits);
    }
    writer.finish();
    Some(length)
}

#[inline(always)]
fn decode_by(stream: &[u8], plane: &mut [u8], spread: impl Fn(u64, u64) -> u64) -> Result<(), Malformed> {
    let count = plane.len() / 8;
    let length = stream.len();
    let Some((modes, bits)) = stream.split_at_checked(mode_bytes(count)) else {
        return Err(Malformed::Length { end: mode_bytes(count), length });
    };
    let mut reader = Reader { bytes: bits, at: 0 };
    let mut before = 0;
    for (w, out) in plane.as_chunks_mut().0.iter_mut().enumerate() {
        let segment = w / SEGMENT;
        let mode = modes[segment / 2] >> (segment % 2 * 4) & 15;
        let word = match usize::from(mode) {
            0 => reader.take(64),
            found if found > MODES => return Err(Malformed::Mode { segment, mode }),
            found => {
                let bits = GROUPS[(found - 1) / 3];
                let groups = spread(reader.take(64 / bits), lowest(bits));
                let word =
                    spread(reader.take(groups.count_ones() * bits), groups.wrapping_mul((1 << bits) - 1));
                match (found - 1) % 3 {
                    0 => word,
                    1 => !word,
                    _ => {
                        let before = if w % SEGMENT == 0 { 0 } else { before };
                        prefix_parity(word) ^ 0_u64.wrapping_sub(before)
                    }
                }
            }
        };
        before = word >> 63;
        *out = word.to_le_bytes();
    }
    let end = mode_bytes(count) + reader.at.div_ceil(8);
    if end == length { Ok(()) } else { Err(Malformed::Length { end, length }) }
}

/// The bits of `x` where `mask` has ones, side by side from the lowest on: what the instruction `pext` does.
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

/// Appends bit strings to bytes that have just the room.
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
    bytes: &'a [u8],
    /// The bit that is next, which may be past the bytes.
    at: usize,
}

impl Reader<'_> {
    /// The next `count` bits, at most 64.
    #[inline(always)]
    fn take(&mut self, count: u32) -> u64 {
        let (byte, bit) = (self.at / 8, self.at % 8);
        self.at += count as usize;
        let sixteen = match self.bytes.get(byte..byte + 9) {
            Some(bytes) => {
                let low = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
                u128::from(bytes[8]) << 64 | u128::from(low)
            }
            None => {
                let mut padded = [0; 16];
                let rest = self.bytes.get(byte..).unwrap_or_default();
                let rest = &rest[..rest.len().min(9)];
                padded[..rest.len()].copy_from_slice(rest);
                u128::from_le_bytes(padded)
            }
        };
        let kept = if count == 64 { u64::MAX } else { (1 << count) - 1 };
        #[expect(clippy::cast_possible_truncation, reason = "the bits wanted are the lowest")]
        let low = (sixteen >> bit) as u64;
        low & kept
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Planes from noise to long runs, segment by segment.
    fn plane(format: Format) -> impl Strategy<Value = Vec<u8>> {
        let segment = prop_oneof![
            any::<[u8; 16]>(),
            Just([0; 16]),
            Just([0xff; 16]),
            (any::<u8>(), 0_usize..16).prop_map(|(byte, at)| {
                let mut segment = [0; 16];
                segment[at] = byte;
                segment
            }),
            (any::<u8>(), 0_usize..16).prop_map(|(byte, at)| {
                let mut segment = [0xff; 16];
                segment[at] = byte;
                segment
            }),
            (0_usize..16).prop_map(|at| std::array::from_fn(|byte| if byte < at { 0 } else { 0xff })),
        ];
        prop::collection::vec(segment, format.plane_bytes() / 16).prop_map(|segments| segments.concat())
    }

    fn floats() -> impl Strategy<Value = (Format, Vec<u8>)> {
        let formats: Vec<_> = Format::ALL.into_iter().filter(|format| format.is_float()).collect();
        prop::sample::select(formats).prop_flat_map(|format| (Just(format), plane(format)))
    }

    proptest! {
        #[test]
        fn signs_come_back_by_every_kernel((format, plane) in floats(), limit in 0_usize..600) {
            let mut out = vec![0xa5; 512];
            let mut slow = vec![0x5a; 512];
            let length = encode(format, &plane, limit, &mut out);
            prop_assert_eq!(length, encode_by(&plane, limit, &mut slow, gather));
            let Some(length) = length else { return Ok(()) };
            prop_assert!(length < limit && length < plane.len());
            prop_assert_eq!(&out[..length], &slow[..length]);
            let mut back = vec![0xa5; plane.len()];
            decode(format, &out[..length], &mut back).unwrap();
            prop_assert_eq!(&back, &plane);
            back.fill(0xa5);
            decode_by(&out[..length], &mut back, spread).unwrap();
            prop_assert_eq!(&back, &plane);
        }

        #[test]
        fn any_bytes_decode_to_a_plane_or_a_reason(
            (format, _) in floats(), stream in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let mut plane = vec![0; format.plane_bytes()];
            let mut same = plane.clone();
            let by_best = decode(format, &stream, &mut plane);
            prop_assert_eq!(&by_best, &decode_by(&stream, &mut same, spread));
            if by_best.is_ok() {
                prop_assert_eq!(plane, same);
            }
        }
    }

    #[test]
    fn channels_that_lean_take_few_bytes() {
        let lean: Vec<u8> = (0..256).map(|byte| if byte / 16 % 2 == 0 { 0 } else { 0xff }).collect();
        let mut out = [0; 256];
        // Eight bytes of modes, and a bit for every 16 signs.
        assert_eq!(encode(Format::Bf16, &lean, 256, &mut out), Some(8 + 16));
        let noise: Vec<u8> =
            (0..256_u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13).to_le_bytes()[0]).collect();
        assert_eq!(encode(Format::Bf16, &noise, 256, &mut out), None);
    }
}
