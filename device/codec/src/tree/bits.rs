//! Bits of 64 elements, a word, and of streams: appended, read, gathered and spread.
//!
//! Where a mask has ones, the bits of a word are *gathered* to its lower end, and *spread* from
//! there: BMI2's `pext` and `pdep`. Here they are done byte by byte with tables. A byte of a mask
//! with `n` ones has a row for each of the 2ⁿ bytes that it gives or takes, 3⁸ in all; so the
//! tables stay in the first-level cache.

#![expect(
    clippy::inline_always,
    clippy::cast_possible_truncation,
    reason = "only inlined code takes on its caller's processor features; rows and counts of a byte fit in 16 bits and 8"
)]

/// Rows of a table, rounded up so that no index is out of bounds.
const ROWS: usize = 3_usize.pow(8).next_power_of_two();

/// How far up a byte's ones are counted, in what is known of its rows. Below is the number of the
/// first.
const COUNT: u32 = 16;

/// By the byte of a mask, its rows to spread.
static SPREAD_ROWS: [u32; 256] = {
    let mut rows = [0; 256];
    let (mut mask, mut first) = (0_usize, 0);
    while mask < 256 {
        rows[mask] = mask.count_ones() << COUNT | first;
        first += 1 << mask.count_ones();
        mask += 1;
    }
    rows
};

/// By row, the lowest bits of its number in the mask's rows, spread.
static SPREAD: [u8; ROWS] = {
    let mut spread = [0; ROWS];
    let mut mask = 0;
    while mask < 256 {
        let rows = SPREAD_ROWS[mask] as usize;
        let mut bits = 0;
        while bits < 1 << (rows >> COUNT) {
            let (mut left, mut at) = (mask, 0);
            while left != 0 {
                if bits >> at & 1 == 1 {
                    spread[(rows + bits) % ROWS] |= 1 << left.trailing_zeros();
                }
                left &= left - 1;
                at += 1;
            }
            bits += 1;
        }
        mask += 1;
    }
    spread
};

/// By the byte of a mask, its digits taken as a number in base 3: the row to gather is that, and
/// that of the bits under the mask.
static GATHER_ROWS: [u32; 256] = {
    let mut rows = [0; 256];
    let mut byte = 0_usize;
    while byte < 256 {
        let mut bit = 8;
        while bit > 0 {
            bit -= 1;
            rows[byte] = 3 * rows[byte] + (byte as u32 >> bit & 1);
        }
        rows[byte] |= byte.count_ones() << COUNT;
        byte += 1;
    }
    rows
};

/// By row, its bits gathered.
static GATHER: [u8; ROWS] = {
    let mut gather = [0; ROWS];
    let mut mask = 0;
    while mask < 256 {
        let rows = SPREAD_ROWS[mask] as usize;
        let mut bits = 0;
        while bits < 1 << (rows >> COUNT) {
            let under = SPREAD[(rows + bits) % ROWS] as usize;
            gather[(GATHER_ROWS[mask] + GATHER_ROWS[under]) as usize % ROWS] = bits as u8;
            bits += 1;
        }
        mask += 1;
    }
    gather
};

/// The bits of `bits` where `mask` has ones, gathered to the lower end.
#[inline(always)]
pub(super) fn gather(bits: u64, mask: u64) -> u64 {
    let under = bits & mask;
    let (mut gathered, mut held) = (0, 0);
    for byte in (0..64).step_by(8) {
        let rows = GATHER_ROWS[usize::from((mask >> byte) as u8)];
        let row = rows + GATHER_ROWS[usize::from((under >> byte) as u8)];
        gathered |= u64::from(GATHER[row as usize % ROWS]) << held;
        held += rows >> COUNT;
    }
    gathered
}

/// The lowest bits of `bits`, spread to where `mask` has ones.
#[inline(always)]
pub(super) fn spread(bits: u64, mask: u64) -> u64 {
    let (mut spread, mut bits) = (0, bits);
    for byte in (0..64).step_by(8) {
        let rows = SPREAD_ROWS[usize::from((mask >> byte) as u8)];
        let ones = rows >> COUNT;
        let row = rows as usize + (bits as usize & ((1 << ones) - 1));
        spread |= u64::from(SPREAD[row % ROWS]) << byte;
        bits >>= ones;
    }
    spread
}

/// Appends bit strings to bytes.
pub(super) struct Writer<'a> {
    /// Where they are appended to, a word at a time.
    words: &'a mut [[u8; 8]],
    /// The byte that the first of these begins with.
    start: usize,
    /// Whole words that are written.
    full: usize,
    pending: u64,
    held: u32,
}

impl<'a> Writer<'a> {
    /// Appends from byte `at` of `out` on.
    pub(super) fn new(out: &'a mut [u8], at: usize) -> Self {
        Self { words: out[at..].as_chunks_mut().0, start: at, full: 0, pending: 0, held: 0 }
    }

    /// Appends the lowest `count` bits of `bits`, whose others are zero. A word is written where
    /// the next bit goes.
    #[inline(always)]
    pub(super) fn push(&mut self, bits: u64, count: u32) {
        let low = self.pending | bits << self.held;
        self.words[self.full] = low.to_le_bytes();
        let high = (bits >> 1) >> (63 - self.held);
        self.held += count;
        let full = self.held >= 64;
        self.pending = if full { high } else { low };
        self.full += usize::from(full);
        self.held &= 63;
    }

    /// Where whole words of `count` bits can be written, if the next bit begins a word.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn words(&mut self, count: usize) -> Option<&mut [[u8; 8]]> {
        (self.held == 0).then(|| &mut self.words[self.full..][..count.div_ceil(64)])
    }

    /// Goes on behind `count` bits that were written to [`Self::words`], with zeros behind them.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn take_words(&mut self, count: usize) {
        self.full += count / 64;
        self.held = (count % 64) as u32;
        self.pending = if self.held > 0 { u64::from_le_bytes(self.words[self.full]) } else { 0 };
    }

    /// Pads to a whole byte; where the next one goes.
    pub(super) fn finish(self) -> usize {
        self.words[self.full] = self.pending.to_le_bytes();
        self.start + 8 * self.full + self.held.div_ceil(8) as usize
    }
}

/// 64 bits of `bytes` from bit `at` on.
#[inline(always)]
pub(super) fn read(bytes: &[u8], at: usize) -> u64 {
    let window: &[u8; 9] = bytes[at / 8..at / 8 + 9].try_into().expect("nine bytes");
    let low = u64::from_le_bytes(*window.first_chunk().expect("eight of nine"));
    let shift = at % 8;
    low >> shift | u64::from(window[8]) << 1 << (63 - shift)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_are_gathered_and_spread(bits in any::<u64>(), mask in any::<u64>(), narrow in any::<u64>()) {
            for mask in [mask, mask & narrow, mask | narrow, 0, u64::MAX] {
                let (mut gathered, mut spread_out, mut at) = (0, 0, 0);
                for bit in (0..64).filter(|bit| mask >> bit & 1 == 1) {
                    gathered |= (bits >> bit & 1) << at;
                    spread_out |= (bits >> at & 1) << bit;
                    at += 1;
                }
                prop_assert_eq!(gather(bits, mask), gathered);
                prop_assert_eq!(spread(bits, mask), spread_out);
            }
        }
    }
}
