//! The prefix code of a stream: from counts to lengths, lengths to canonical order, and both to the header and back.

#![expect(
    clippy::cast_possible_truncation,
    reason = "symbols and lengths are below 64, fields are cut to 3 bits on purpose"
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

/// Parts that a complete code uses.
const PARTS: usize = 1 << LONGEST;
/// Header bits before the window's lengths.
const FIXED_BITS: usize = 19;

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

/// Symbols in the order of their codes.
pub(super) struct Canonical {
    /// The symbols; those behind the last one are meaningless.
    pub order: [u8; SYMBOLS],
    /// How many have this length.
    pub count: [usize; LONGEST + 1],
    /// The longest length.
    pub longest: usize,
}

impl Code {
    /// The best code of at most [`LONGEST`] bits for these counts, at least two of which are not zero, or nearly so.
    pub(super) fn build(low: u8, window: usize, counts: &[u32; SYMBOLS]) -> Self {
        let mut lengths = [0; SYMBOLS];
        // Rarest first.
        let mut sorted = [(0, 0); SYMBOLS];
        let mut used = 0;
        for (symbol, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let mut at = used;
            while at > 0 && sorted[at - 1].0 > *count {
                sorted[at] = sorted[at - 1];
                at -= 1;
            }
            sorted[at] = (*count, symbol);
            used += 1;
        }
        let sorted = &sorted[..used];
        // Huffman with two queues: leaves in order, inner nodes in the order they are made.
        let mut weight = [0_u32; SYMBOLS];
        let mut parent = [0_usize; 2 * SYMBOLS];
        let (mut leaf, mut inner) = (0, 0);
        for made in 0..used - 1 {
            for _ in 0..2 {
                let take_leaf = leaf < used && (inner >= made || sorted[leaf].0 <= weight[inner]);
                let (node, of) =
                    if take_leaf { (leaf, sorted[leaf].0) } else { (SYMBOLS + inner, weight[inner]) };
                if take_leaf {
                    leaf += 1;
                } else {
                    inner += 1;
                }
                parent[node] = made;
                weight[made] += of;
            }
        }
        let mut depth = [0_u8; SYMBOLS];
        for node in (0..used - 2).rev() {
            depth[node] = depth[parent[SYMBOLS + node]] + 1;
        }
        let mut parts = 0;
        for (at, (_, symbol)) in sorted.iter().enumerate() {
            let length = usize::from(depth[parent[at]] + 1).min(LONGEST);
            lengths[*symbol] = length as u8;
            parts += PARTS >> length;
        }
        // Codes cut to the limit use too much: lengthen the rarest that can be, then give back what is left over.
        while parts > PARTS {
            let (_, symbol) = sorted
                .iter()
                .find(|(_, symbol)| usize::from(lengths[*symbol]) < LONGEST)
                .expect("34 symbols fit in 7 bits");
            lengths[*symbol] += 1;
            parts -= PARTS >> lengths[*symbol];
        }
        while parts < PARTS {
            for (_, symbol) in sorted.iter().rev() {
                let length = lengths[*symbol];
                if length > 1 && parts + (PARTS >> length) <= PARTS {
                    parts += PARTS >> length;
                    lengths[*symbol] -= 1;
                }
            }
        }
        Self { low, window, lengths }
    }

    /// Bytes of the header.
    pub(super) const fn header_bytes(window: usize) -> usize {
        (FIXED_BITS + 3 * window).div_ceil(8)
    }

    /// The header; its first [`Self::header_bytes`] count.
    pub(super) fn header(&self) -> [u8; 16] {
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

    /// The symbols in code order.
    pub(super) fn canonical(&self) -> Canonical {
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
            order[*at] = symbol as u8;
            *at += 1;
        }
        let longest = (1..=LONGEST).rev().find(|length| count[*length] > 0).unwrap_or(0);
        Canonical { order, count, longest }
    }

    /// The value of a symbol that is not the escape.
    pub(super) fn value(&self, symbol: usize) -> u8 {
        if symbol == ZERO { 0 } else { self.low + symbol as u8 }
    }
}
