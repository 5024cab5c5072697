//! What a sample of a block's values tells of a code: how much it takes for them, and how little any could.
//!
//! To count all values takes a fifth of the time that coding by a kept code does. The rules:
//!
//! * A sample is [`RUNS`] runs of [`RUN`] values, as far from each other as the block allows, so that what is in the block by rows or columns is in it too.
//! * Values are told apart within a window below the largest, and zero. If many others are among them, it does not tell enough.
//! * It only decides by which code a block is written. Codes are made of all values, and what is written is exact.

use super::code::{Costs, ESCAPE, SYMBOLS, WINDOW, ZERO};

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
    /// The sum of [`times_log2`] of all these.
    pub own: u32,
}

/// The runs of a block's values.
pub(super) fn runs(values: &[u8]) -> impl Iterator<Item = &[u8; RUN]> {
    values.chunks_exact(values.len() / RUNS).map(|part| part.first_chunk().expect("a run of each part"))
}

impl Sample {
    /// Of a block's values.
    pub(super) fn of(values: &[u8]) -> Self {
        let largest = runs(values).flatten().copied().max().unwrap_or(0);
        let mut sample =
            Self { low: Self::low(largest), counts: [0; WINDOW], zeros: 0, others: 0, most: 0, own: 0 };
        for value in runs(values).flatten() {
            match (value, value.wrapping_sub(sample.low)) {
                (0, _) => sample.zeros += 1,
                (_, place) if usize::from(place) < WINDOW => sample.counts[usize::from(place)] += 1,
                _ => sample.others += 1,
            }
        }
        sample.most = sample.all().into_iter().max().unwrap_or(0);
        sample.own = sample.all().into_iter().map(times_log2).sum();
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
    pub(super) fn cost(&self, costs: &Costs) -> u32 {
        let values = self.counts.iter().zip(&costs.values[usize::from(self.low)..]);
        values.map(|(count, cost)| u32::from(*count) * u32::from(*cost)).sum::<u32>()
            + self.cost_outside(costs)
    }

    /// The bits that the values outside the window take by a code.
    pub(super) fn cost_outside(&self, costs: &Costs) -> u32 {
        u32::from(self.zeros) * u32::from(costs.values[0]) + u32::from(self.others) * u32::from(costs.escape)
    }

    /// The bits that it takes at least by any code that escapes what is not told apart, or a few more or less.
    ///
    /// It is the entropy, but for the values that are so frequent that they have a code of one bit among those that are left.
    pub(super) fn least(&self) -> u32 {
        let (mut left, mut bits) = (SAMPLE_COUNT, 8 * u32::from(self.others));
        if !is_frequent(self.most, left) {
            return bits + times_log2(left).saturating_sub(self.own) / PARTS;
        }
        let (mut counts, mut most, mut own) = (self.all(), self.most, self.own);
        while most < left && is_frequent(most, left) {
            bits += u32::from(left);
            left -= most;
            own -= times_log2(most);
            if let Some(count) = counts.iter_mut().find(|count| **count == most) {
                *count = 0;
            }
            most = counts.into_iter().max().unwrap_or(0);
        }
        bits + times_log2(left).saturating_sub(own) / PARTS
    }
}

/// Whether what is so many of those left has a code of one bit.
const fn is_frequent(count: u16, left: u16) -> bool {
    5 * count as u32 >= 2 * left as u32
}

/// Parts of a bit that logarithms are counted in.
pub(super) const PARTS: u32 = 4;
/// Counts below this have a product each; of others every [`STEP`]th has, and between them products lie on a line.
pub(super) const FINE: usize = 64;
pub(super) const STEP: usize = 8;

/// A count of at most [`SAMPLE`] times its logarithm to the base 2, nearly; of 0 it is 0.
#[expect(clippy::cast_possible_truncation, reason = "below 8")]
pub(super) fn times_log2(count: u16) -> u32 {
    let count = usize::from(count);
    let product = TIMES_LOG2.fine.get(count).copied().unwrap_or_else(|| {
        let (at, rest) = (count / STEP % FINE, (count % STEP) as u16);
        TIMES_LOG2.coarse[at] + ((TIMES_LOG2.steps[at] * rest) >> STEP.ilog2())
    });
    product.into()
}

/// Counts times their logarithms, in [`PARTS`], as words of a few registers.
pub(super) struct TimesLog2 {
    /// Of the counts from 0 on.
    pub fine: [u16; FINE],
    /// Of multiples of [`STEP`], that of [`SAMPLE`] at 0.
    pub coarse: [u16; FINE],
    /// From each of these to the next.
    pub steps: [u16; FINE],
}

#[expect(clippy::cast_possible_truncation, reason = "products are below 2^15")]
pub(super) static TIMES_LOG2: TimesLog2 = {
    let mut table = TimesLog2 { fine: [0; FINE], coarse: [0; FINE], steps: [0; FINE] };
    let mut at = 1;
    while at <= FINE {
        if at < FINE {
            table.fine[at] = product(at) as u16;
        }
        table.coarse[at % FINE] = product(STEP * at) as u16;
        table.steps[at % FINE] = (product(STEP * (at + 1)) - product(STEP * at)) as u16;
        at += 1;
    }
    table
};

/// A count times its logarithm to the base 2, in [`PARTS`].
const fn product(count: usize) -> u64 {
    // The logarithm in 2^−16: first whole bits, then one for each squaring, of a number from 1 to 2 in 2^−30.
    let whole = count.ilog2();
    let (mut x, mut logarithm) = ((count as u64) << 30 >> whole, whole as u64);
    let mut bit = 0;
    while bit < 16 {
        x = (x * x) >> 30;
        let is_two = x >> 31;
        logarithm = logarithm << 1 | is_two;
        x >>= is_two;
        bit += 1;
    }
    (count as u64 * logarithm * PARTS as u64 + (1 << 15)) >> 16
}
