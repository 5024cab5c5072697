//! The planes' fields of an entry: length codes as narrow as their format allows, then checks of 16
//! bits, in one bit string whose first bit is the lowest of the first byte. The planes of a plane
//! tree have no fields; those of the others stand side by side.
//!
//! Widths are known to the compiler, so that loops over fields unroll to shifts by constants, and
//! everything about a field is done while it is in a register: fields stored one by one cannot be
//! loaded as vectors until the stores are through.

use lamina_codec::{
    block::{MAX_CHECKS, StoredPlanes},
    format::Format,
};

/// Words of a bit string: at least an entry's, and one that may be looked at behind them.
pub(super) const WORDS: usize = 9;

/// Bits of a length code: enough for the plane's length + 1.
const fn length_bits(format: Format) -> usize {
    (format.plane_bytes() + 1).ilog2() as usize + 1
}

/// The length code of a plane of ones, the largest there is.
pub(super) fn ones_code(format: Format) -> u16 {
    u16::try_from(format.plane_bytes() + 1).expect("at most 1025")
}

/// The fields of an entry.
pub(super) struct Fields {
    /// The entry, and a word of zeros.
    pub(super) words: [u64; WORDS],
    /// The next field's first bit.
    pub(super) at: usize,
}

impl Fields {
    /// Takes the fields of `planes`, whose format and stream are known: the largest length code.
    /// The planes are nonsense if that is more than [`ones_code`].
    pub(super) fn take(mut self, planes: &mut StoredPlanes) -> u16 {
        let largest = match planes.format.bits() {
            32 => self.take_lengths::<{ length_bits(Format::Fp32) }>(planes),
            16 => self.take_lengths::<{ length_bits(Format::Bf16) }>(planes),
            8 => self.take_lengths::<{ length_bits(Format::Int8) }>(planes),
            _ => self.take_lengths::<{ length_bits(Format::Int4) }>(planes),
        };
        if planes.format.planes() <= MAX_CHECKS {
            for range in planes.single() {
                let (fours, rest) = planes.checks[range].as_chunks_mut::<4>();
                for four in fours {
                    let bits = self.take_bits(64);
                    *four = std::array::from_fn(|at| low_bits::<16>(bits >> (16 * at)));
                }
                for check in rest {
                    *check = low_bits::<16>(self.take_bits(16));
                }
            }
        }
        largest
    }

    fn take_lengths<const WIDTH: usize>(&mut self, planes: &mut StoredPlanes) -> u16 {
        let ones_code = ones_code(planes.format);
        let (mut largest, mut ones) = (0, 0);
        for range in planes.single() {
            let mut bit = 1_u64 << range.start;
            // As many fields as 64 bits hold.
            for lengths in planes.lengths[range].chunks_mut(64 / WIDTH) {
                let mut bits = self.take_bits(lengths.len() * WIDTH);
                for length in lengths {
                    let code = low_bits::<WIDTH>(bits);
                    bits >>= WIDTH;
                    largest = largest.max(code);
                    let is_ones = code == ones_code;
                    ones |= if is_ones { bit } else { 0 };
                    *length = if is_ones { 0 } else { code };
                    bit <<= 1;
                }
            }
        }
        planes.ones = u32::try_from(ones).expect("32 planes at most");
        largest
    }

    /// The next bits, `count` of them followed by others.
    fn take_bits(&mut self, count: usize) -> u64 {
        let (word, shift) = (self.at / 64 % (WORDS - 1), self.at % 64);
        self.at += count;
        self.words[word] >> shift | self.words[word + 1] << 1 << (63 - shift)
    }

    /// Puts the fields of `planes`: the entry.
    pub(super) fn put(mut self, planes: &StoredPlanes) -> [u64; WORDS] {
        match planes.format.bits() {
            32 => self.put_lengths::<{ length_bits(Format::Fp32) }>(planes),
            16 => self.put_lengths::<{ length_bits(Format::Bf16) }>(planes),
            8 => self.put_lengths::<{ length_bits(Format::Int8) }>(planes),
            _ => self.put_lengths::<{ length_bits(Format::Int4) }>(planes),
        }
        if planes.format.planes() <= MAX_CHECKS {
            for range in planes.single() {
                for checks in planes.checks[range].chunks(4) {
                    let bits = checks.iter().rev().fold(0, |bits, check| bits << 16 | u64::from(*check));
                    self.put_bits(bits, 16 * checks.len());
                }
            }
        }
        self.words
    }

    fn put_lengths<const WIDTH: usize>(&mut self, planes: &StoredPlanes) {
        let ones_code = u64::from(ones_code(planes.format));
        for range in planes.single() {
            let mut ones = u64::from(planes.ones) >> range.start;
            for lengths in planes.lengths[range].chunks(64 / WIDTH) {
                let mut bits = 0;
                for (index, length) in lengths.iter().enumerate().rev() {
                    let code = if ones >> index & 1 == 1 { ones_code } else { u64::from(*length) };
                    bits = bits << WIDTH | code;
                }
                ones >>= lengths.len();
                self.put_bits(bits, lengths.len() * WIDTH);
            }
        }
    }

    fn put_bits(&mut self, bits: u64, count: usize) {
        let (word, shift) = (self.at / 64 % (WORDS - 1), self.at % 64);
        self.at += count;
        self.words[word] |= bits << shift;
        self.words[word + 1] |= bits >> 1 >> (63 - shift);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a field has 16 bits at most")]
fn low_bits<const WIDTH: usize>(bits: u64) -> u16 {
    (bits & ((1 << WIDTH) - 1)) as u16
}
