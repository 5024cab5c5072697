//! The prefix code of a stream: from counts to lengths, lengths to canonical order, and both to the
//! header and back.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::inline_always,
    reason = "symbols and lengths are below 64, counts below 2^14, fields are cut to 3 bits on purpose; \
              only inlined code takes on its caller's processor features"
)]

use super::Malformed;

/// The longest code.
pub(super) const LONGEST: usize = 7;
/// Values that the header can give codes to.
pub(super) const WINDOW: usize = 32;
/// The symbol of the value 0, where the window does not hold it.
pub(super) const ZERO: usize = WINDOW;
/// The symbol of all values without a code.
pub(super) const ESCAPE: usize = WINDOW + 1;
/// All symbols.
pub(super) const SYMBOLS: usize = WINDOW + 2;
/// A table of all symbols, rounded up to a vector.
pub(super) const SLOTS: usize = 64;

/// Parts that a complete code uses.
const PARTS: usize = 1 << LONGEST;
/// Header bits before the window's lengths.
pub(super) const FIXED_BITS: usize = 19;
/// Bytes of the longest header.
pub(super) const MAX_HEADER: usize = 16;

/// A code by its lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Code {
    /// The value of symbol 0.
    pub low: u8,
    /// Values in the window, 1 to [`WINDOW`].
    pub window: usize,
    /// By symbol; 0 is no code.
    pub lengths: [u8; SYMBOLS],
}

/// The leaves of a code's tree, level by level and in each level in code order, as a level's nodes
/// are.
pub(super) struct Leaves {
    /// Their values; what stands at the escape's place or behind the last one is meaningless.
    pub values: [u8; 2 * SLOTS],
    /// How many each level has.
    pub count: [u8; LONGEST],
    /// Levels.
    pub longest: usize,
    /// Level and number of the escape.
    pub escape: Option<(usize, u8)>,
}

/// A code to encode by.
#[derive(Clone)]
pub(super) struct Coder {
    /// The code.
    pub code: Code,
    /// Its header, and zeros.
    pub header: [u8; MAX_HEADER],
    /// By symbol its *mark*, its code from the highest bit on and behind it a one; 0 is no code.
    pub marks: [u8; SLOTS],
    /// How many codes have each length, 1 first.
    pub counts: [u8; LONGEST],
}

impl Leaves {
    /// The level of the first leaf.
    pub(super) fn first_level(&self) -> usize {
        self.count.iter().position(|count| *count > 0).unwrap_or(0)
    }
}

impl Coder {
    /// For a code.
    pub(super) fn new(code: Code) -> Self {
        let (order, count) = code.canonical();
        let (mut at, mut next) = (0, 0_u16);
        let mut marks = [0; SLOTS];
        for (level, count) in count.into_iter().enumerate() {
            for symbol in &order[at..at + usize::from(count)] {
                marks[usize::from(*symbol)] = ((2 * next + 1) << (LONGEST - 1 - level)) as u8;
                next += 1;
            }
            at += usize::from(count);
            next *= 2;
        }
        Self { header: code.header(), code, marks, counts: count }
    }

    /// Writes the header to the front of `out`, where [`MAX_HEADER`] bytes are: the bytes it takes.
    pub(super) fn write(&self, out: &mut [u8]) -> usize {
        out[..MAX_HEADER].copy_from_slice(&self.header);
        Code::header_bytes(self.code.window)
    }

    /// Whether it is a 3+3 code.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_three_and_three(&self) -> bool {
        self.counts[..4] == [0, 3, 0, 3]
    }

    /// Levels of the code.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn longest(&self) -> usize {
        self.counts.iter().rposition(|count| *count > 0).map_or(0, |level| level + 1)
    }

    /// The first level that has leaves.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn first_level(&self) -> usize {
        self.counts.iter().position(|count| *count > 0).unwrap_or(0)
    }
}

impl Code {
    /// The best code of at most [`LONGEST`] bits for these symbols, two or more, or nearly so.
    pub(super) fn build(low: u8, window: usize, ranked: &Ranked) -> Self {
        let mut lengths = [0; SYMBOLS];
        huffman(ranked, &mut lengths);
        Self { low, window, lengths }
    }

    /// The best *3+3 code* for these symbols: the three most frequent have two bits, the next three
    /// four, the others more. `None` if the others are not two to eight, or the escape is not one
    /// of them.
    ///
    /// Behind two levels all elements that go on have come to one node, and so again behind two
    /// more, which decoders are made for.
    pub(super) fn three_and_three(low: u8, window: usize, ranked: &Ranked) -> Option<Self> {
        let others = ranked.used.checked_sub(6)?;
        let [first, second] = BELOW.get(others.wrapping_sub(2))?;
        let bits = |below: &[u8]| -> u32 {
            ranked.counts.iter().zip(below).map(|(count, length)| count * u32::from(*length)).sum()
        };
        let below = if bits(second) < bits(first) { second } else { first };
        let mut lengths = [0; SYMBOLS];
        for (symbol, length) in ranked.symbols.iter().zip(*below) {
            lengths[usize::from(*symbol)] = 4 + length;
        }
        for (at, symbol) in ranked.symbols[others..ranked.used].iter().enumerate() {
            lengths[usize::from(*symbol)] = if at < 3 { 4 } else { 2 };
        }
        (ranked.symbols[others..ranked.used].iter().all(|symbol| usize::from(*symbol) != ESCAPE))
            .then_some(Self { low, window, lengths })
    }

    /// Bits that symbols take which occur so often.
    pub(super) fn bits(&self, counts: &[u32; SYMBOLS]) -> u32 {
        counts.iter().zip(&self.lengths).map(|(count, length)| count * u32::from(*length)).sum()
    }

    /// Bytes of the header.
    pub(super) const fn header_bytes(window: usize) -> usize {
        (FIXED_BITS + 3 * window).div_ceil(8)
    }

    /// The header, and zeros behind it.
    pub(super) fn header(&self) -> [u8; MAX_HEADER] {
        let mut bits = u128::from(self.low)
            | (self.window as u128 - 1) << 8
            | u128::from(self.lengths[ZERO]) << 13
            | u128::from(self.lengths[ESCAPE]) << 16;
        for (symbol, length) in self.lengths[..self.window].iter().enumerate() {
            bits |= u128::from(*length) << (FIXED_BITS + 3 * symbol);
        }
        bits.to_le_bytes()
    }

    /// Reads a header; `stream` has 16 bytes or more, of which `length` are the stream's.
    pub(super) fn parse(stream: &[u8], length: usize, largest: usize) -> Result<Self, Malformed> {
        let bits = u128::from_le_bytes(stream[..16].try_into().expect("16 bytes"));
        let [low, head, ..] = bits.to_le_bytes();
        let window = usize::from(head & 31) + 1;
        let header = Self::header_bytes(window);
        if header > length {
            return Err(Malformed::Header { header, length });
        }
        let last = usize::from(low) + window - 1;
        if last > largest {
            return Err(Malformed::Window { last, largest });
        }
        let field = |at: usize| (bits >> at) as u8 & 7;
        let mut lengths = [0; SYMBOLS];
        lengths[ZERO] = field(13);
        lengths[ESCAPE] = field(16);
        for (symbol, length) in lengths[..window].iter_mut().enumerate() {
            *length = field(FIXED_BITS + 3 * symbol);
        }
        if lengths[ZERO] > 0 && low == 0 {
            return Err(Malformed::TwoZeros);
        }
        let used = lengths.iter().filter(|length| **length > 0).map(|length| PARTS >> length).sum();
        if used != PARTS {
            return Err(Malformed::Incomplete { used });
        }
        Ok(Self { low, window, lengths })
    }

    /// The symbols in code order, and how many have each length, shortest first.
    pub(super) fn canonical(&self) -> ([u8; SYMBOLS], [u8; LONGEST]) {
        let mut count = [0; LONGEST + 1];
        self.lengths.iter().for_each(|length| count[usize::from(*length)] += 1);
        count[0] = 0;
        let mut next = [0; LONGEST + 1];
        for length in 1..=LONGEST {
            next[length] = next[length - 1] + count[length - 1];
        }
        let mut order = [0; SYMBOLS];
        for (symbol, length) in self.lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            let at = &mut next[usize::from(*length)];
            order[usize::from(*at)] = symbol as u8;
            *at += 1;
        }
        let [_, count @ ..] = count;
        (order, count)
    }

    /// Bits of the longest code.
    pub(super) fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0).into()
    }

    /// What a decoder goes by.
    pub(super) fn leaves(&self) -> Leaves {
        let (order, count) = self.canonical();
        let mut leaves = Leaves { values: [0; 2 * SLOTS], count, longest: 0, escape: None };
        let mut first = 0;
        for (level, count) in count.iter().enumerate().filter(|(_, count)| **count > 0) {
            for node in 0..*count {
                let at = first + usize::from(node);
                match usize::from(order[at]) {
                    ESCAPE => leaves.escape = Some((level, node)),
                    symbol => leaves.values[at] = self.value(symbol),
                }
            }
            first += usize::from(*count);
            leaves.longest = level + 1;
        }
        leaves
    }

    /// The value of a symbol that is not the escape.
    pub(super) fn value(&self, symbol: usize) -> u8 {
        if symbol == ZERO { 0 } else { self.low + symbol as u8 }
    }
}

/// What symbols below the fourth level of a 3+3 code have there, the rarest first, for two to eight
/// of them: all that three levels of a tree allow, the first if both take as much.
pub(super) const BELOW: [[&[u8]; 2]; 7] = [
    [&[1, 1]; 2],
    [&[2, 2, 1]; 2],
    [&[2, 2, 2, 2], &[3, 3, 2, 1]],
    [&[3, 3, 2, 2, 2], &[3, 3, 3, 3, 1]],
    [&[3, 3, 3, 3, 2, 2]; 2],
    [&[3, 3, 3, 3, 3, 3, 2]; 2],
    [&[3; 8]; 2],
];

/// A logarithm's polynomial: between 1 and 2, less 1, it adds at most m (1 − m) (first − second m)
/// to m.
pub(super) const LOG2: [f32; 2] = [0.442_7, 0.164];

/// The symbols that occur, the rarest first, of those as frequent the first ones first.
pub(super) struct Ranked {
    /// How often each occurs; behind the last one more than any.
    counts: [u32; SLOTS],
    symbols: [u8; SLOTS],
    /// How many there are.
    pub(super) used: usize,
}

impl Ranked {
    /// Ranks by comparing each with each: a sort would mispredict most of its branches.
    #[inline(always)]
    pub(super) fn of(counts: &[u32; SYMBOLS]) -> Self {
        // Symbols are below 64 and counts below 2^14, so both fit in a key.
        let mut keys = [i32::MAX; SLOTS];
        let mut used = 0;
        for (symbol, count) in counts.iter().enumerate() {
            keys[used] = (count << 6 | symbol as u32).cast_signed();
            used += usize::from(*count > 0);
        }
        keys[used] = i32::MAX;
        let sorted = if used <= 16 { sorted::<16>(&keys) } else { sorted::<SLOTS>(&keys) };
        let counts = sorted.map(|key| if key == i32::MAX { u32::MAX } else { key.cast_unsigned() >> 6 });
        Self { counts, symbols: sorted.map(|key| key as u8 & 63), used }
    }

    /// For so many, which are to be [set](Self::set).
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn none(used: usize) -> Self {
        Self { counts: [u32::MAX; SLOTS], symbols: [0; SLOTS], used }
    }

    /// Says which symbol has a rank.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn set(&mut self, rank: usize, symbol: usize, count: u32) {
        self.symbols[rank % SLOTS] = symbol as u8;
        self.counts[rank % SLOTS] = count;
    }

    /// Bits that they take by a code.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn bits(&self, code: &Code) -> u32 {
        let ranked = self.counts.iter().zip(&self.symbols).take(self.used);
        ranked.map(|(count, symbol)| count * u32::from(code.lengths[usize::from(*symbol)])).sum()
    }

    /// No more bits than any prefix code takes for these, together a power of two: the entropy,
    /// less a little.
    #[inline(always)]
    pub(super) fn least_bits(&self) -> u32 {
        let (mut all, mut terms) = (0, 0.0);
        for count in &self.counts[..self.used] {
            all += count;
            terms += times_log2(*count);
        }
        // Half a bit is more than all that was rounded.
        (times_log2(all) - terms - 0.5).max(0.0) as u32
    }
}

/// At least `count` times its binary logarithm, and at most a 200th of `count` more. Powers of two
/// are exact.
#[inline(always)]
pub(super) fn times_log2(count: u32) -> f32 {
    let bits = (count as f32).to_bits();
    let exponent = (bits >> 23).cast_signed() - 127;
    // 1 to 2, less 1.
    let m = f32::from_bits(bits & 0x7f_ffff | 0x3f80_0000) - 1.0;
    count as f32 * (exponent as f32 + m + m * (1.0 - m) * (LOG2[0] - LOG2[1] * m))
}

/// The first `N` keys in ascending order; the same ones more than once only if they are the
/// largest.
#[inline(always)]
fn sorted<const N: usize>(keys: &[i32; SLOTS]) -> [i32; SLOTS] {
    let keys: &[i32; N] = keys.first_chunk().expect("no more keys than slots");
    let mut sorted = [i32::MAX; SLOTS];
    for key in keys {
        let rank: i32 = keys.iter().map(|other| i32::from(other < key)).sum();
        sorted[rank as usize % SLOTS] = *key;
    }
    sorted
}

/// The lengths of the best code of at most [`LONGEST`] bits for two symbols or more, or nearly so.
fn huffman(ranked: &Ranked, lengths: &mut [u8; SYMBOLS]) {
    let Ranked { counts, symbols, used } = ranked;
    let used = *used;
    // Two queues: leaves in order, inner nodes in the order they are made. Which one is next cannot
    // be foreseen, so nothing branches on it: both get the parent, and the one not taken gets
    // another when its turn comes.
    let mut weight = [u32::MAX; SLOTS];
    let (mut leaf_parent, mut inner_parent) = ([0_u8; SLOTS], [0_u8; SLOTS]);
    let (mut leaf, mut inner) = (0, 0);
    for made in 0..used - 1 {
        let mut sum = 0;
        for _ in 0..2 {
            let (of_leaf, of_inner) = (counts[leaf % SLOTS], weight[inner % SLOTS]);
            leaf_parent[leaf % SLOTS] = made as u8;
            inner_parent[inner % SLOTS] = made as u8;
            sum += of_leaf.min(of_inner);
            let takes_leaf = usize::from(of_leaf <= of_inner);
            leaf += takes_leaf;
            inner += 1 - takes_leaf;
        }
        weight[made % SLOTS] = sum;
    }
    let mut depth = [0_u8; SLOTS];
    for node in (0..used - 2).rev() {
        depth[node % SLOTS] = depth[usize::from(inner_parent[node % SLOTS]) % SLOTS] + 1;
    }
    let all = PARTS;
    let mut parts = 0;
    for (symbol, parent) in symbols[..used].iter().zip(&leaf_parent) {
        let length = usize::from(depth[usize::from(*parent) % SLOTS] + 1).min(LONGEST);
        lengths[usize::from(*symbol)] = length as u8;
        parts += all >> length;
    }
    // Codes cut to the limit use too much: lengthen the rarest that can be, then give back what is
    // left over.
    while parts > all {
        let symbol = symbols[..used]
            .iter()
            .find(|symbol| usize::from(lengths[usize::from(**symbol)]) < LONGEST)
            .expect("so many symbols have room");
        let length = &mut lengths[usize::from(*symbol)];
        *length += 1;
        parts -= all >> *length;
    }
    while parts < all {
        for symbol in symbols[..used].iter().rev() {
            let length = &mut lengths[usize::from(*symbol)];
            if *length > 1 && parts + (all >> *length) <= all {
                parts += all >> *length;
                *length -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn entropy_is_no_more_than_any_code_takes(counts in prop::collection::vec(1_u32..3000, 2..SYMBOLS)) {
            let mut all = [0; SYMBOLS];
            all[..counts.len()].copy_from_slice(&counts);
            let sum: u32 = all.iter().sum();
            all[0] += sum.next_power_of_two() - sum;
            let counts = &all[..counts.len()];
            let total = f64::from(sum.next_power_of_two());
            let entropy: f64 = counts.iter().map(|count| -f64::from(*count) * (f64::from(*count) / total).log2()).sum();
            let least = f64::from(Ranked::of(&all).least_bits());
            prop_assert!(least <= entropy && least >= entropy - total / 100.0 - 2.0, "{least} {entropy}");
            let code = Code::build(0, WINDOW, &Ranked::of(&all));
            prop_assert!(f64::from(code.bits(&all)) >= least);
        }

        #[test]
        fn symbols_are_ranked_by_counts_and_then_by_number(counts in prop::collection::vec(0_u32..6, SYMBOLS)) {
            let mut want: Vec<_> = (0..SYMBOLS).filter(|symbol| counts[*symbol] > 0).collect();
            want.sort_by_key(|symbol| counts[*symbol]);
            let ranked = Ranked::of(counts.first_chunk().unwrap());
            prop_assert_eq!(ranked.used, want.len());
            for (at, symbol) in want.into_iter().enumerate() {
                prop_assert_eq!((usize::from(ranked.symbols[at]), ranked.counts[at]), (symbol, counts[symbol]));
            }
        }
    }
}
