//! From what a block holds to how it is coded: which values get symbols, the code, and how long the stream will be; and back from what was
//! written to how well the code did.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "symbols are below 64, counts below 2^14, losses are not negative"
)]

use super::{
    RARE,
    code::{Code, ESCAPE, LONGEST, SYMBOLS, WINDOW, ZERO},
};

/// Values told apart in a block before it is given up as noise.
pub(super) const MOST_VALUES: usize = 48;

/// What a block holds.
#[derive(Clone)]
pub(super) struct Census {
    /// Values that occur [`RARE`] times or more, ascending.
    pub values: [u8; MOST_VALUES],
    /// Their counts.
    pub counts: [u32; MOST_VALUES],
    /// How many.
    pub found: usize,
    /// Elements of other values.
    pub escapes: u32,
}

/// How a block is coded.
pub(super) struct Plan {
    /// The code of its symbols.
    pub code: Code,
    /// The symbol of each value in the census.
    pub symbols: [u8; MOST_VALUES],
    /// Bytes of the stream.
    pub length: usize,
}

impl Census {
    pub(super) const fn new() -> Self {
        Self { values: [0; MOST_VALUES], counts: [0; MOST_VALUES], found: 0, escapes: 0 }
    }

    /// Counts `count` elements of `value`, which is larger than those before it; `None` if these are too many values.
    pub(super) fn tell(&mut self, value: u8, count: u32) -> Option<()> {
        if count < RARE {
            self.escapes += count;
            return Some(());
        }
        *self.values.get_mut(self.found)? = value;
        self.counts[self.found] = count;
        self.found += 1;
        Some(())
    }

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

impl Plan {
    /// The plan for a block of which this is the census, or `None` if its stream would not be shorter than `raw` bytes or
    /// has a single value.
    pub(super) fn new(census: &Census, raw: usize) -> Option<Self> {
        if census.found == 0 {
            return None;
        }
        let (first, end) = census.window();
        let low = census.values[first];
        let mut counts = [0; SYMBOLS];
        let mut symbols = [0; MOST_VALUES];
        let mut escapes = census.escapes;
        for (at, (value, count)) in census.values.iter().zip(census.counts).take(census.found).enumerate() {
            let symbol = match value {
                value if (first..end).contains(&at) => usize::from(value - low),
                0 => ZERO,
                _ => {
                    escapes += count;
                    symbols[at] = ESCAPE as u8;
                    continue;
                }
            };
            counts[symbol] = count;
            symbols[at] = symbol as u8;
        }
        counts[ESCAPE] = escapes;
        if counts.iter().filter(|count| **count > 0).count() < 2 {
            return None;
        }
        let code = Code::build(low, usize::from(census.values[end - 1] - low) + 1, &counts);
        let bits: u32 =
            counts.iter().zip(&code.lengths).map(|(count, length)| count * u32::from(*length)).sum();
        let length = Code::header_bytes(code.window) + (bits as usize).div_ceil(8) + escapes as usize;
        (length < raw).then_some(Self { code, symbols, length })
    }
}

/// A stream that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    /// Its bytes.
    pub length: usize,
    /// See [`Tally::loss`].
    pub loss: u32,
}

/// What a stream's levels hold.
pub(super) struct Tally {
    /// Elements of each.
    pub alive: [u32; LONGEST],
    /// Those of them that have a one.
    pub ones: [u32; LONGEST],
    /// Elements whose value stands behind the levels.
    pub escapes: u32,
}

impl Tally {
    pub(super) const fn new() -> Self {
        Self { alive: [0; LONGEST], ones: [0; LONGEST], escapes: 0 }
    }

    /// About how many bits the levels have more than they need, as far as their sums show, and the bits of the escapes.
    ///
    /// A code fits a block if on each level ones are as many as zeros, and if each length takes the part of the elements that its codes take of all
    /// codes, of which `codes` have each. Of what fits worse, this is the first term of the entropy that is missing, which grows with the square.
    #[inline]
    pub(super) fn loss(&self, codes: [u8; LONGEST]) -> u32 {
        let mut part = self.alive[0] as f32;
        let mut loss = self.imbalance();
        for (level, codes) in codes.into_iter().enumerate() {
            part /= 2.0;
            let leaves = self.alive[level] - self.alive.get(level + 1).copied().unwrap_or(0);
            let wanted = part * f32::from(codes);
            loss += missing(leaves as f32 - wanted, wanted);
        }
        loss
    }

    /// The part of [`Self::loss`] that ones and zeros make, of the levels that are there, and the escapes.
    #[inline]
    pub(super) fn imbalance(&self) -> u32 {
        let mut loss = 8 * self.escapes;
        for (alive, ones) in self.alive.into_iter().zip(self.ones) {
            let alive = alive as f32;
            loss += missing(2.0 * ones as f32 - alive, alive);
        }
        loss
    }
}

/// The bits that are missing if there are `more` than `wanted`.
#[inline]
fn missing(more: f32, wanted: f32) -> u32 {
    // Half of it, in bits.
    (more * more / wanted.max(1.0) * (0.5 * std::f32::consts::LOG2_E)) as u32
}
