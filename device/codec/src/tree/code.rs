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
/// A table of all symbols, rounded up to a vector.
pub(super) const SLOTS: usize = 64;

/// Parts that a complete code uses.
const PARTS: usize = 1 << LONGEST;
/// Header bits before the window's lengths.
pub(super) const FIXED_BITS: usize = 19;
/// Bytes that any header has room in.
pub(super) const MOST_HEADER: usize = 16;

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

/// The leaves of a code's tree, level by level and in each level in code order, as a level's nodes are.
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
    pub header: [u8; MOST_HEADER],
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

    /// Writes the header to the front of `out`, where [`MOST_HEADER`] bytes are: the bytes it takes.
    pub(super) fn write(&self, out: &mut [u8]) -> usize {
        out[..MOST_HEADER].copy_from_slice(&self.header);
        Code::header_bytes(self.code.window)
    }

    /// Whether it is a code in threes.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_in_threes(&self) -> bool {
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
    /// The best code of at most [`LONGEST`] bits for these counts, at least two of which are not zero, or nearly so.
    pub(super) fn build(low: u8, window: usize, counts: &[u32; SYMBOLS]) -> Self {
        let (sorted, used) = rarest_first(counts);
        let mut lengths = [0; SYMBOLS];
        huffman(&sorted[..used], LONGEST, &mut lengths);
        Self { low, window, lengths }
    }

    /// The best code *in threes* for these counts, or nearly so: the three most frequent symbols have two bits, the next three four, and the others more. `None` if these are not two to eight, or the escape is not
    /// one of them.
    /// Behind two levels all that go on have come to one node, and so again behind two more, which a decoder is made for.
    pub(super) fn in_threes(low: u8, window: usize, counts: &[u32; SYMBOLS]) -> Option<Self> {
        let (sorted, used) = rarest_first(counts);
        let others = used.checked_sub(2 * 3).filter(|others| (2..=1 << (LONGEST - 4)).contains(others))?;
        let (others, often) = sorted[..used].split_at(others);
        if often.iter().any(|(_, symbol)| *symbol == ESCAPE) {
            return None;
        }
        let mut lengths = [0; SYMBOLS];
        huffman(others, LONGEST - 4, &mut lengths);
        lengths.iter_mut().filter(|length| **length > 0).for_each(|length| *length += 4);
        for (at, (_, symbol)) in often.iter().enumerate() {
            lengths[*symbol] = if at < 3 { 4 } else { 2 };
        }
        Some(Self { low, window, lengths })
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
    pub(super) fn header(&self) -> [u8; MOST_HEADER] {
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

/// How often each symbol occurs that does, the rarest first, and how many these are.
fn rarest_first(counts: &[u32; SYMBOLS]) -> ([(u32, usize); SYMBOLS], usize) {
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
    (sorted, used)
}

/// The lengths of the best code of at most `longest` bits for two symbols or more, the rarest first, or nearly so.
fn huffman(sorted: &[(u32, usize)], longest: usize, lengths: &mut [u8; SYMBOLS]) {
    let (used, all) = (sorted.len(), 1 << longest);
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
        let length = usize::from(depth[parent[at]] + 1).min(longest);
        lengths[*symbol] = length as u8;
        parts += all >> length;
    }
    // Codes cut to the limit use too much: lengthen the rarest that can be, then give back what is left over.
    while parts > all {
        let (_, symbol) = sorted
            .iter()
            .find(|(_, symbol)| usize::from(lengths[*symbol]) < longest)
            .expect("so many symbols have room");
        lengths[*symbol] += 1;
        parts -= all >> lengths[*symbol];
    }
    while parts < all {
        for (_, symbol) in sorted.iter().rev() {
            let length = lengths[*symbol];
            if length > 1 && parts + (all >> length) <= all {
                parts += all >> length;
                lengths[*symbol] -= 1;
            }
        }
    }
}
