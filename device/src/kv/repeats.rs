//! Rows of a window that are equal to earlier ones. Only the others are kept; layer 0's V, which depends on the token alone, repeats whole rows, and so do rows
//! that were never written.
//!
//! As bytes: a bit for every whole row, lowest bit first, padded to whole bytes: whether it repeats. Then, for each that does, the number of the row it is
//! equal to, counted among the rows kept before it, in as many bits as the number of all kept rows less one takes; padded to whole bytes.

use super::order::Order;

/// A row that is not shorter than this is worth looking for.
const LEAST_ROW: usize = 16;
/// Rows of a window that are looked at; windows of more have very short rows.
pub const MOST_ROWS: usize = 512;
/// Bytes of the references of a window at most.
const MOST_REFERENCES: usize = MOST_ROWS * reference_bits(MOST_ROWS) / 8;

/// Which rows repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    /// For each whole row: the number of the kept row that it is or is equal to.
    of: Vec<u16>,
    /// Rows kept.
    kept: usize,
}

impl Repeats {
    /// The rows of the token-major `window` that repeat, if leaving them out is worth the list of them.
    pub fn find(order: &Order, window: &[u8]) -> Option<Self> {
        let length = order.columns * order.width;
        let rows = order.rows();
        if length < LEAST_ROW || !(2..=MOST_ROWS).contains(&rows) {
            return None;
        }
        let all = &window[order.head() * order.width..][..rows * length];
        // Mostly no two are equal.
        if !seem_to_repeat(all, length) {
            return None;
        }
        let mut table = Table { rows: all, length, slots: [NONE; SLOTS] };
        let (mut of, mut kept) = ([0; MOST_ROWS], 0);
        for (at, row) in (0..).zip(all.chunks_exact(length)) {
            of[usize::from(at)] = table.add(at, row).map_or(kept, |before| of[usize::from(before)]);
            kept += u16::from(of[usize::from(at)] == kept);
        }
        let kept = usize::from(kept);
        let of = of[..rows].to_vec();
        let repeats = Self { of, kept };
        (repeats.bytes() * 2 < (rows - kept) * length).then_some(repeats)
    }

    /// The shape of the window without the rows that repeat.
    pub fn compact_order(&self, order: &Order) -> Order {
        Order { elements: order.elements - (self.of.len() - self.kept) * order.columns, ..*order }
    }

    /// Moves the rows that are kept of the token-major `window` to its front, and what follows the rows behind them.
    pub fn compact(&self, order: &Order, window: &mut [u8]) {
        let (length, head) = (order.columns * order.width, order.head() * order.width);
        let mut kept = 0;
        let moves = (0..self.of.len()).filter_map(|row| {
            let is_kept = usize::from(self.of[row]) == kept;
            kept += usize::from(is_kept);
            is_kept.then(|| (row, kept - 1))
        });
        move_rows(&mut window[head..], length, moves);
        let end = order.elements * order.width;
        window.copy_within(head + self.of.len() * length..end, head + kept * length);
    }

    /// Undoes [`Self::compact`]; `order` is the whole window's.
    pub fn expand(&self, order: &Order, window: &mut [u8]) {
        let (length, head) = (order.columns * order.width, order.head() * order.width);
        let (kept, rows) = (head + self.kept * length, head + self.of.len() * length);
        let tail = order.elements * order.width - rows;
        window.copy_within(kept..kept + tail, rows);
        // From the last on: a kept row is never before its own place among the kept.
        let moves = self.of.iter().enumerate().rev().map(|(row, of)| (usize::from(*of), row));
        move_rows(&mut window[head..], length, moves);
    }

    /// Bytes that [`Self::write`] appends.
    fn bytes(&self) -> usize {
        self.of.len().div_ceil(8) + ((self.of.len() - self.kept) * reference_bits(self.kept)).div_ceil(8)
    }

    /// Appends the list to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let bitmap = out.len();
        out.resize(bitmap + self.of.len().div_ceil(8), 0);
        let bits = reference_bits(self.kept);
        let (mut kept, mut pending, mut held) = (0, 0_u32, 0);
        for (row, of) in self.of.iter().enumerate() {
            if usize::from(*of) == kept {
                kept += 1;
                continue;
            }
            out[bitmap + row / 8] |= 1 << (row % 8);
            pending |= u32::from(*of) << held;
            held += bits;
            while held >= 8 {
                out.push(pending.to_le_bytes()[0]);
                pending >>= 8;
                held -= 8;
            }
        }
        if held > 0 {
            out.push(pending.to_le_bytes()[0]);
        }
    }

    /// Reads the list of a window of `rows` whole rows from the front of `bytes`: the list and what is behind it; `None` if that is none.
    pub fn read(rows: usize, bytes: &[u8]) -> Option<(Self, &[u8])> {
        if rows > MOST_ROWS {
            return None;
        }
        let (bitmap, references) = bytes.split_at_checked(rows.div_ceil(8))?;
        // A word for every 64 rows; what is behind the last row does not count.
        let mut words = [0_u64; MOST_ROWS / 64];
        for ((at, word), eight) in words.iter_mut().enumerate().zip(bitmap.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..eight.len()].copy_from_slice(eight);
            *word = u64::from_le_bytes(bytes) & u64::MAX >> (64 - (rows - 64 * at).min(64));
        }
        let count = words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let total = rows - count;
        let bits = reference_bits(total);
        let (references, rest) = references.split_at_checked((count * bits).div_ceil(8))?;
        // With room behind, so that four bytes can be looked at anywhere.
        let mut roomy = [0; MOST_REFERENCES + 4];
        roomy[..references.len()].copy_from_slice(references);
        let mut of = vec![0; rows];
        let (mut kept, mut at, mut wrong) = (0, 0, false);
        // Whether a row repeats cannot be foreseen, so it is not asked.
        for (of, mut word) in of.chunks_mut(64).zip(words) {
            for of in of {
                let repeats = word & 1 == 1;
                word >>= 1;
                let four = *roomy[at / 8..].first_chunk().expect("room behind");
                let [low, high, ..] =
                    (u32::from_le_bytes(four) >> (at % 8) & ((1 << bits) - 1)).to_le_bytes();
                let reference = u16::from_le_bytes([low, high]);
                *of = if repeats { reference } else { kept };
                wrong |= repeats && reference >= kept;
                at += if repeats { bits } else { 0 };
                kept += u16::from(!repeats);
            }
        }
        if wrong {
            return None;
        }
        Some((Self { of, kept: total }, rest))
    }
}

/// Moves rows of `length` bytes, each from one place among them to another, in order.
#[inline]
fn move_rows(rows: &mut [u8], length: usize, moves: impl Iterator<Item = (usize, usize)>) {
    // To call for the copy of a row takes longer than to copy a short one.
    match length {
        32 => move_short(rows.as_chunks_mut::<32>().0, moves),
        64 => move_short(rows.as_chunks_mut::<64>().0, moves),
        128 => move_short(rows.as_chunks_mut::<128>().0, moves),
        _ => moves.for_each(|(from, to)| rows.copy_within(from * length..(from + 1) * length, to * length)),
    }
}

/// As [`move_rows`], of rows of a length that is known.
#[inline]
fn move_short<const LENGTH: usize>(rows: &mut [[u8; LENGTH]], moves: impl Iterator<Item = (usize, usize)>) {
    moves.for_each(|(from, to)| rows[to] = rows[from]);
}

/// No row.
const NONE: u16 = u16::MAX;
/// Slots for rows: twice as many as there may be, so that few come to one that is taken.
const SLOTS: usize = 2 * MOST_ROWS;

/// Whether some row seems to be equal to an earlier one, by what the rows mix to. It does not look at rows, so it misses two that are equal if another came to their slot between them: in a window of 128 that
/// happens to one pair in some twenty. If there is none, it seldom seems so.
fn seem_to_repeat(all: &[u8], length: usize) -> bool {
    match length {
        // Of rows of a length that is known here, it is not asked whether they have ends.
        32 => some_seem_equal(all.as_chunks::<32>().0.iter().map(|row| mixed(row))),
        64 => some_seem_equal(all.as_chunks::<64>().0.iter().map(|row| mixed(row))),
        128 => some_seem_equal(all.as_chunks::<128>().0.iter().map(|row| mixed(row))),
        _ => some_seem_equal(all.chunks_exact(length).map(mixed)),
    }
}

/// As [`seem_to_repeat`], by what the rows mix to.
#[inline]
fn some_seem_equal(rows: impl Iterator<Item = u64>) -> bool {
    let mut last = [0_u16; SLOTS];
    rows.fold(false, |found, mixed| {
        let [_, _, _, _, tag @ .., _, _] = mixed.to_le_bytes();
        // No slot has an odd one before a row comes to it.
        let tag = u16::from_le_bytes(tag) | 1;
        found | (std::mem::replace(&mut last[slot(mixed)], tag) == tag)
    })
}

/// The rows of a window, to be found by what they are.
struct Table<'a> {
    rows: &'a [u8],
    /// Bytes of a row.
    length: usize,
    /// Each has the first row that leads to it; one that is taken leads to the next.
    slots: [u16; SLOTS],
}

impl Table<'_> {
    /// Adds `row`, number `at`, unless there is an equal one: that.
    fn add(&mut self, at: u16, row: &[u8]) -> Option<u16> {
        let mut slot = slot(mixed(row));
        while self.slots[slot] != NONE {
            let before = self.slots[slot];
            if self.rows[usize::from(before) * self.length..][..self.length] == *row {
                return Some(before);
            }
            slot = (slot + 1) % SLOTS;
        }
        self.slots[slot] = at;
        None
    }
}

/// Both ends of a row mixed: what comes first is best mixed.
#[inline]
fn mixed(row: &[u8]) -> u64 {
    let (first, last) = (row.first_chunk().expect("8 bytes"), row.last_chunk().expect("8 bytes"));
    let (first, last) = (u64::from_le_bytes(*first), u64::from_le_bytes(*last));
    first.wrapping_add(last.rotate_left(29)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The slot that a row which mixes to this leads to.
#[inline]
fn slot(mixed: u64) -> usize {
    usize::try_from(mixed >> (u64::BITS - SLOTS.ilog2())).expect("fewer than slots")
}

/// Bits that number one of `kept` rows.
const fn reference_bits(kept: usize) -> usize {
    if kept < 2 { 0 } else { (kept - 1).ilog2() as usize + 1 }
}
