//! From what a block holds to how it is coded: which values get symbols, the code, and how long the stream will be.

#![expect(clippy::cast_possible_truncation, reason = "symbols are below 64, counts below 2^14")]

use super::{
    RARE,
    code::{Code, ESCAPE, SYMBOLS, WINDOW, ZERO},
};

/// Bits for 64 elements that a code in threes may take more than the best code.
const SPARE: u32 = 5;

/// Values told apart in a block before it is given up as noise.
pub(super) const MOST_VALUES: usize = 48;

/// What a block holds.
#[derive(Clone, Debug)]
pub(super) struct Census {
    /// Values that occur [`RARE`] times or more, ascending.
    pub values: [u8; MOST_VALUES],
    /// Their counts.
    pub counts: [u16; MOST_VALUES],
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
        self.counts[self.found] = count as u16;
        self.found += 1;
        Some(())
    }

    /// Values that are told apart, those that are escaped counted as one.
    pub(super) fn symbols(&self) -> usize {
        self.found + usize::from(self.escapes > 0)
    }

    /// The values and how often they occur.
    fn found(&self) -> impl Iterator<Item = (u8, u32)> {
        self.values.into_iter().zip(self.counts.map(u32::from)).take(self.found)
    }

    /// The window of values with most elements, zeros aside, which have a symbol anyway: its first and end in `values`.
    fn window(&self) -> (usize, usize) {
        let weight = |at: usize| if self.values[at] == 0 { 0 } else { u32::from(self.counts[at]) };
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
        for (at, (value, count)) in census.found().enumerate() {
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
        let window = usize::from(census.values[end - 1] - low) + 1;
        let (code, bits) = best(low, window, &counts, raw);
        let length = Code::header_bytes(window) + (bits as usize).div_ceil(8) + escapes as usize;
        (length < raw).then_some(Self { code, symbols, length })
    }
}

/// The code that symbols get which occur so often, and the bits that they take. Where values are bytes, as the exponents of bf16 are, it is in threes if that takes little more: it is decoded quicker.
fn best(low: u8, window: usize, counts: &[u32; SYMBOLS], raw: usize) -> (Code, u32) {
    let code = Code::build(low, window, counts);
    let bits = code.bits(counts);
    let elements: u32 = counts.iter().sum();
    if raw != elements as usize {
        return (code, bits);
    }
    let in_threes = Code::in_threes(low, window, counts).map(|code| (code.bits(counts), code));
    match in_threes {
        Some((more, in_threes)) if more <= bits + SPARE * elements / 64 => (in_threes, more),
        _ => (code, bits),
    }
}
