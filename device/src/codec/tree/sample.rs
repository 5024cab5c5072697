//! What a sample of a block's values tells of a code: how much it takes for them, and how little any could.
//!
//! To count all values takes a fifth of the time that coding by a kept code does. The rules:
//!
//! * A sample is [`RUNS`] runs of [`RUN`] values, as far from each other as the block allows, so that what is in the block by rows or columns is in it too.
//! * Values are told apart within a window below the largest, and zero. If many others are among them, it does not tell enough.
//! * It only decides by which code a block is written. Codes are made of all values, and what is written is exact.

use super::code::{Coder, ESCAPE, SYMBOLS, WINDOW, ZERO};

/// Runs of values that are looked at.
pub(super) const RUNS: usize = 32;
/// Values of a run.
pub(super) const RUN: usize = 16;
/// Values of a sample.
pub(super) const SAMPLE: usize = RUNS * RUN;
#[expect(clippy::cast_possible_truncation, reason = "512")]
const SAMPLE_COUNT: u16 = SAMPLE as u16;
/// Of so many values one may be none of those that are told apart.
const OTHERS: usize = 16;

/// What a sample holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// The first value of the window, at least 1.
    pub low: u8,
    /// How often it and those after it occur.
    pub counts: [u16; WINDOW],
    /// How often the value 0 does.
    pub zeros: u16,
    /// And all others.
    pub others: u16,
    /// The most of all these.
    pub most: u16,
}

/// The runs of a block's values.
pub(super) fn runs(values: &[u8]) -> impl Iterator<Item = &[u8; RUN]> {
    values.chunks_exact(values.len() / RUNS).map(|part| part.first_chunk().expect("a run of each part"))
}

impl Sample {
    /// Of a block's values.
    pub(super) fn of(values: &[u8]) -> Self {
        let largest = runs(values).flatten().copied().max().unwrap_or(0);
        let mut sample = Self { low: Self::low(largest), counts: [0; WINDOW], zeros: 0, others: 0, most: 0 };
        for value in runs(values).flatten() {
            match (value, value.wrapping_sub(sample.low)) {
                (0, _) => sample.zeros += 1,
                (_, place) if usize::from(place) < WINDOW => sample.counts[usize::from(place)] += 1,
                _ => sample.others += 1,
            }
        }
        sample.most = sample.all().into_iter().max().unwrap_or(0);
        sample
    }

    /// Where the window begins.
    #[expect(clippy::cast_possible_truncation, reason = "a window is less than 256 values")]
    pub(super) const fn low(largest: u8) -> u8 {
        let low = largest.saturating_sub(WINDOW as u8 - 1);
        if low == 0 { 1 } else { low }
    }

    /// Whether it tells enough to choose a code by: more than one value, and few that are not told apart.
    pub(super) fn tells(&self) -> bool {
        self.most < SAMPLE_COUNT && usize::from(self.others) <= SAMPLE / OTHERS
    }

    /// All counts.
    fn all(&self) -> [u16; SYMBOLS] {
        let mut all = [0; SYMBOLS];
        all[..WINDOW].copy_from_slice(&self.counts);
        [all[ZERO], all[ESCAPE]] = [self.zeros, self.others];
        all
    }

    /// The bits that it takes by a code.
    pub(super) fn cost(&self, coder: &Coder) -> u32 {
        let values = (self.low..=u8::MAX).zip(self.counts);
        values.map(|(value, count)| u32::from(count) * u32::from(coder.cost(value))).sum::<u32>()
            + self.cost_outside(coder)
    }

    /// The bits that the values outside the window take by a code.
    pub(super) fn cost_outside(&self, coder: &Coder) -> u32 {
        u32::from(self.zeros) * u32::from(coder.zero_cost)
            + u32::from(self.others) * u32::from(Coder::escape_cost(&coder.code))
    }

    /// The bits that it takes at least by any code that escapes what is not told apart, or a few more or less.
    ///
    /// It is the entropy, but for the values that are so frequent that they have a code of one bit among those that are left.
    pub(super) fn least(&self) -> u32 {
        let (mut counts, mut most) = (self.all(), self.most);
        let (mut left, mut bits) = (SAMPLE_COUNT, 8 * u32::from(self.others));
        while most < left && 5 * u32::from(most) >= 2 * u32::from(left) {
            bits += u32::from(left);
            left -= most;
            if let Some(count) = counts.iter_mut().find(|count| **count == most) {
                *count = 0;
            }
            most = counts.into_iter().max().unwrap_or(0);
        }
        let own: u32 = counts.into_iter().map(times_log2).sum();
        bits + times_log2(left).saturating_sub(own) / PARTS
    }
}

/// Parts of a bit that logarithms are counted in.
const PARTS: u32 = 256;

/// A count of at most [`SAMPLE`] times its logarithm to the base 2; of 0 it is 0.
fn times_log2(count: u16) -> u32 {
    TIMES_LOG2[usize::from(count) % TIMES_LOG2.len()]
}

/// As long that a remainder finds its entries.
#[expect(clippy::cast_possible_truncation, reason = "products are below 2^22")]
static TIMES_LOG2: [u32; 2 * SAMPLE] = {
    let mut products = [0; 2 * SAMPLE];
    let mut count = 1;
    while count <= SAMPLE {
        // The logarithm in parts of a bit, rounded down: first whole bits, then one of a part for each squaring, of a number from 1 to 2 in 2^−30.
        let whole = count.ilog2();
        let (mut x, mut logarithm) = ((count as u64) << 30 >> whole, whole as usize);
        let mut parts = 1;
        while parts < PARTS {
            x = (x * x) >> 30;
            let is_two = x >> 31;
            logarithm = logarithm << 1 | is_two as usize;
            x >>= is_two;
            parts *= 2;
        }
        products[count] = (count * logarithm) as u32;
        count += 1;
    }
    products
};
