//! From what a block holds to how it is coded: which values get symbols, the code, and how long the
//! stream will be.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::inline_always,
    reason = "symbols are below 64, counts below 2^14; only inlined code takes on its caller's processor features"
)]

use super::{
    RARE,
    code::{Code, ESCAPE, Ranked, SYMBOLS, WINDOW, ZERO, times_log2},
};

/// Elements of a block of bf16, and bytes of its exponents' planes.
pub(super) const BF16: usize = 2048;
/// Bits for 64 elements that a 3+3 code may take more than the best code.
pub(super) const SPARE: u32 = 5;

/// Values told apart in a block before it is given up as noise.
pub(super) const MAX_VALUES: usize = 48;

/// What a block holds.
#[derive(Clone, Debug)]
pub(super) struct Census {
    /// Values that occur [`RARE`] times or more, ascending.
    pub values: [u8; MAX_VALUES],
    /// Their counts.
    pub counts: [u16; MAX_VALUES],
    /// How many.
    pub found: usize,
    /// Elements of other values.
    pub escapes: u32,
}

/// How a block is coded.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The code of its symbols.
    pub code: Code,
    /// The symbol of each value in the census.
    pub symbols: [u8; MAX_VALUES],
    /// Bytes of the stream.
    pub length: usize,
}

impl Census {
    pub(super) const fn new() -> Self {
        Self { values: [0; MAX_VALUES], counts: [0; MAX_VALUES], found: 0, escapes: 0 }
    }

    /// Counts `count` elements of `value`, which is larger than those before it; `None` if these
    /// are too many values.
    pub(super) fn add(&mut self, value: u8, count: u32) -> Option<()> {
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

    /// About the bytes of a stream without its header: those of the best code's bits, which are a
    /// little more than entropy, and what is escaped.
    pub(super) fn entropy_bytes(&self) -> usize {
        let (mut all, mut terms) = (self.escapes, times_log2(self.escapes.max(1)));
        for count in &self.counts[..self.found] {
            all += u32::from(*count);
            terms += times_log2((*count).into());
        }
        let bits = (times_log2(all) - terms).max(0.0) as usize;
        bits.div_ceil(8) + self.escapes as usize
    }

    /// The values and how often they occur.
    fn found(&self) -> impl Iterator<Item = (u8, u32)> {
        self.values.into_iter().zip(self.counts.map(u32::from)).take(self.found)
    }

    /// The window of values with most elements, zeros aside, which have a symbol anyway: its first
    /// and end in `values`.
    #[inline(always)]
    fn window(&self) -> (usize, usize) {
        if usize::from(self.values[self.found - 1] - self.values[0]) < WINDOW {
            return (0, self.found);
        }
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
    /// The plan for a block of which this is the census, or `None` if its stream would not be
    /// shorter than `raw` bytes or has a single value.
    #[inline(always)]
    pub(super) fn new(census: &Census, raw: usize) -> Option<Self> {
        if census.found == 0 {
            return None;
        }
        let (first, end) = census.window();
        let low = census.values[first];
        let mut counts = [0; SYMBOLS];
        let mut symbols = [0; MAX_VALUES];
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

/// The code that symbols get which occur so often, and the bits that they take: the best one, but
/// for bf16 a 3+3 code if that takes little more, as it is decoded and encoded quicker.
#[inline(always)]
fn best(low: u8, window: usize, counts: &[u32; SYMBOLS], raw: usize) -> (Code, u32) {
    let ranked = Ranked::of(counts);
    let elements: u32 = counts.iter().sum();
    let is_bf16 = raw == BF16 && elements as usize == BF16;
    let quicker = is_bf16.then(|| Code::three_and_three(low, window, &ranked)).flatten();
    let quicker = quicker.map(|code| (code.bits(counts), code));
    let spare = SPARE * elements / 64;
    // Mostly the entropy, which is found at once, tells that it takes little more than the best.
    let quicker = match quicker {
        Some((bits, code)) if bits <= ranked.least_bits() + spare => return (code, bits),
        other => other,
    };
    let code = Code::build(low, window, &ranked);
    let bits = code.bits(counts);
    match quicker {
        Some((more, quicker)) if more <= bits + spare => (quicker, more),
        _ => (code, bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of so many symbols, the first ones the most frequent, of as many elements as a block
    /// of bf16 has.
    fn counts(of: &[u32]) -> [u32; SYMBOLS] {
        let mut counts = [0; SYMBOLS];
        counts[..of.len()].copy_from_slice(of);
        counts[0] += 2048 - of.iter().sum::<u32>();
        counts
    }

    #[test]
    fn a_three_and_three_code_is_complete_and_has_its_leaves_where_they_belong() {
        let fibonacci = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610];
        for used in 2..=16 {
            let even = vec![2048 / used; used as usize];
            let steep: Vec<_> =
                fibonacci.into_iter().rev().skip(15_usize.saturating_sub(used as usize)).collect();
            for counts in [counts(&even), counts(&steep)] {
                let used = counts.iter().filter(|count| **count > 0).count();
                let code = Code::three_and_three(100, 16, &Ranked::of(&counts));
                assert_eq!(code.is_some(), (8..=14).contains(&used), "{used}");
                let Some(code) = code else { continue };
                let (_, count) = code.canonical();
                assert_eq!(count[..4], [0, 3, 0, 3], "{used}");
                let parts: usize =
                    code.lengths.iter().filter(|length| **length > 0).map(|length| 128 >> length).sum();
                assert_eq!(parts, 128, "{used}");
                assert!(
                    counts.iter().zip(&code.lengths).all(|(count, length)| (*count > 0) == (*length > 0))
                );
                // What is more frequent has no longer code.
                for (a, b) in (0..used).flat_map(|a| (0..used).map(move |b| (a, b))) {
                    assert!(
                        counts[a] <= counts[b] || code.lengths[a] <= code.lengths[b],
                        "{a} {b}: {code:?}"
                    );
                }
            }
        }
        let mut escaped = counts(&[300, 290, 280, 270, 260, 250, 20, 10, 5]);
        assert!(Code::three_and_three(100, 16, &Ranked::of(&escaped)).is_some());
        escaped[ESCAPE] = std::mem::take(&mut escaped[3]);
        assert_eq!(Code::three_and_three(100, 16, &Ranked::of(&escaped)), None);
    }

    #[test]
    fn a_three_and_three_code_is_taken_where_it_costs_little() {
        let is_three_and_three = |counts: &[u32; SYMBOLS], raw| {
            let (code, bits) = best(100, 16, counts, raw);
            assert_eq!(bits, code.bits(counts));
            Some(code) == Code::three_and_three(100, 16, &Ranked::of(counts))
        };
        // As of weights: the best code takes 2 bits for two, and 3 for three.
        let mut weights = counts(&[640, 500, 330, 290, 140, 80, 40, 15, 8, 5]);
        let ranked = Ranked::of(&weights);
        let [best_bits, more] =
            [Code::build(100, 16, &ranked), Code::three_and_three(100, 16, &ranked).unwrap()]
                .map(|code| code.bits(&weights));
        assert!(more > best_bits && more <= best_bits + SPARE * 2048 / 64, "{best_bits} {more}");
        assert!(is_three_and_three(&weights, BF16));
        // Other formats have other lengths.
        assert!(!is_three_and_three(&weights, BF16 / 2));
        // One that half of all have: a code of one bit is far better.
        weights = counts(&[1200, 300, 200, 150, 90, 50, 30, 15, 8, 5]);
        assert!(!is_three_and_three(&weights, BF16));
    }
}
