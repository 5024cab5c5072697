//! Rows of a window that are equal to earlier ones. Only the others are kept; layer 0's V, which
//! depends on the token alone, repeats whole rows, and so do rows that were never written.
//!
//! As bytes: a bit for every whole row, lowest bit first, padded to whole bytes: whether it
//! repeats. Then, for each that does, the number of the row it is equal to, counted among the rows
//! kept before it, in as many bits as the number of all kept rows less one takes; padded to whole
//! bytes.

#![expect(clippy::inline_always, reason = "only inlined code takes on its caller's processor features")]

use super::{kernel::Kernel, order::Order};

/// A row that is not shorter than this is worth looking for.
const MIN_ROW: usize = 16;
/// Rows of a window that are looked at; windows of more have very short rows.
pub(super) const MAX_ROWS: usize = 512;
/// Bytes of the references of a window at most.
const MAX_REFERENCES: usize = MAX_ROWS * reference_bits(MAX_ROWS) / 8;

/// Which rows repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Repeats {
    /// For each whole row: the number of the kept row that it is or is equal to.
    of: Vec<u16>,
    /// Which rows repeat, the first in the lowest bit.
    repeat: [u64; MAX_ROWS / 64],
    /// Rows kept.
    kept: usize,
}

impl Repeats {
    /// The rows of the token-major `window` that repeat, if leaving them out is worth the list of
    /// them.
    pub(crate) fn find(order: &Order, window: &[u8]) -> Option<Self> {
        let length = order.columns * order.width;
        let rows = order.rows();
        if length < MIN_ROW || !(2..=MAX_ROWS).contains(&rows) {
            return None;
        }
        let all = &window[order.head() * order.width..][..rows * length];
        let mut repeats = Self::default();
        Kernel::best().find_repeats(length, all, &mut repeats);
        (repeats.kept > 0 && repeats.bytes() * 2 < (rows - repeats.kept) * length).then_some(repeats)
    }

    /// The shape of the window without the rows that repeat.
    pub(crate) fn compact_order(&self, order: &Order) -> Order {
        order.without_rows(self.of.len() - self.kept)
    }

    /// Copies the token-major `window` but for the rows that repeat to the front of `to`, which is
    /// no shorter; what is behind is undefined then.
    pub(crate) fn compact(&self, order: &Order, window: &[u8], to: &mut [u8]) {
        let (length, head) = (order.columns * order.width, order.head() * order.width);
        let (rows, end) = (head + self.of.len() * length, order.elements * order.width);
        to[..head].copy_from_slice(&window[..head]);
        Kernel::best().keep_rows(length, self, &window[head..rows], &mut to[head..rows]);
        let kept = head + self.kept * length;
        to[kept..kept + end - rows].copy_from_slice(&window[rows..end]);
    }

    /// Undoes [`Self::compact`] in place; `order` is the whole window's.
    pub(crate) fn expand(&self, order: &Order, window: &mut [u8]) {
        let (length, head) = (order.columns * order.width, order.head() * order.width);
        let (kept, rows) = (head + self.kept * length, head + self.of.len() * length);
        let tail = order.elements * order.width - rows;
        window.copy_within(kept..kept + tail, rows);
        Kernel::best().spread_rows(length, self, &mut window[head..rows]);
    }

    /// Bytes that [`Self::write`] appends.
    fn bytes(&self) -> usize {
        self.of.len().div_ceil(8) + ((self.of.len() - self.kept) * reference_bits(self.kept)).div_ceil(8)
    }

    /// Appends the list to `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.bytes();
        for (word, rows) in self.repeat.iter().zip(self.of.chunks(64)) {
            out.extend_from_slice(&word.to_le_bytes()[..rows.len().div_ceil(8)]);
        }
        let bits = reference_bits(self.kept);
        let mut at = out.len();
        // Eight bytes a time, whatever of them counts.
        out.resize(end + 8, 0);
        let (mut pending, mut held) = (0, 0);
        for (mut repeat, of) in self.repeat.into_iter().zip(self.of.chunks(64)) {
            while repeat != 0 {
                pending |= u64::from(of[repeat.trailing_zeros() as usize]) << held;
                held += bits;
                out[at..at + 8].copy_from_slice(&pending.to_le_bytes());
                at += held / 8;
                pending >>= held / 8 * 8;
                held %= 8;
                repeat &= repeat - 1;
            }
        }
        out.truncate(end);
    }

    /// Reads the list of a window of `rows` whole rows from the front of `bytes`: the list and what
    /// is behind it; `None` if that is none.
    pub(crate) fn read(rows: usize, bytes: &[u8]) -> Option<(Self, &[u8])> {
        if rows > MAX_ROWS {
            return None;
        }
        let (bitmap, references) = bytes.split_at_checked(rows.div_ceil(8))?;
        // A word for every 64 rows; what is behind the last row does not count.
        let mut repeat = [0_u64; MAX_ROWS / 64];
        for ((at, word), eight) in repeat.iter_mut().enumerate().zip(bitmap.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..eight.len()].copy_from_slice(eight);
            *word = u64::from_le_bytes(bytes) & u64::MAX >> (64 - (rows - 64 * at).min(64));
        }
        let count = repeat.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let total = rows - count;
        let bits = reference_bits(total);
        let (references, rest) = references.split_at_checked((count * bits).div_ceil(8))?;
        // With room behind, so that four bytes can be looked at anywhere.
        let mut roomy = [0; MAX_REFERENCES + 4];
        roomy[..references.len()].copy_from_slice(references);
        let mut of = vec![0; rows];
        let (mut kept, mut at, mut wrong) = (0, 0, false);
        // Whether a row repeats cannot be foreseen, so it is not asked.
        for (of, mut word) in of.chunks_mut(64).zip(repeat) {
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
        Some((Self { of, repeat, kept: total }, rest))
    }
}

/// Calls a function of rows of `$length` bytes, which short ones have as a constant: to call for
/// the comparison or the copy of such a row would take longer than that itself.
macro_rules! by_length {
    ($function:ident($length:ident $(, $argument:expr)*)) => {
        match $length {
            32 => $function::<32>(32 $(, $argument)*),
            64 => $function::<64>(64 $(, $argument)*),
            128 => $function::<128>(128 $(, $argument)*),
            _ => $function::<0>($length $(, $argument)*),
        }
    };
}

/// [`Kernel::find_repeats`] by any processor.
#[inline(always)]
pub(super) fn find_any(length: usize, rows: &[u8], repeats: &mut Repeats) {
    by_length!(find(length, rows, repeats));
}

/// [`Kernel::keep_rows`] by any processor.
#[inline(always)]
pub(super) fn keep_any(length: usize, repeats: &Repeats, from: &[u8], to: &mut [u8]) {
    by_length!(keep(length, repeats, from, to));
}

/// [`Kernel::spread_rows`] by any processor.
#[inline(always)]
pub(super) fn spread_any(length: usize, repeats: &Repeats, rows: &mut [u8]) {
    by_length!(spread(length, repeats, rows));
}

#[inline(always)]
fn find<const LENGTH: usize>(length: usize, rows: &[u8], repeats: &mut Repeats) {
    let length = if LENGTH > 0 { LENGTH } else { length };
    // Mostly no two are equal.
    let mut firsts = Firsts::none();
    rows.chunks_exact(length).for_each(|row| firsts.tell(row));
    if !firsts.seem_to_repeat {
        return;
    }
    let row = |at: usize| &rows[at * length..][..length];
    let Repeats { of, repeat, kept: total } = repeats;
    of.resize(rows.len() / length, 0);
    let (mut slots, mut kept, mut at) = ([NONE; SLOTS], 0, 0);
    for (word, start) in repeat.iter_mut().zip((0..of.len()).step_by(64)) {
        let mut bits = 0;
        for bit in 0..(of.len() - start).min(64) {
            // Each slot has the first row that leads to it. If it is free, a row comes to itself;
            // whether it repeats cannot be foreseen, so it is not asked.
            let mut slot = slot(mixed_ends(row(at)));
            let mut before = usize::from(slots[slot]).min(at);
            while row(before) != row(at) {
                slot = (slot + 1) % SLOTS;
                before = usize::from(slots[slot]).min(at);
            }
            slots[slot] = u16::try_from(before).expect("fewer rows");
            bits |= u64::from(before != at) << bit;
            // The number of the row itself, or of the one before that it is equal to.
            of[at] = kept;
            of[at] = of[before];
            kept += u16::from(before == at);
            at += 1;
        }
        *word = bits;
    }
    *total = kept.into();
}

#[inline(always)]
fn keep<const LENGTH: usize>(length: usize, repeats: &Repeats, from: &[u8], to: &mut [u8]) {
    let length = if LENGTH > 0 { LENGTH } else { length };
    let mut kept = 0;
    for (row, of) in from.chunks_exact(length).zip(&repeats.of) {
        // One that repeats is written over by the next.
        to[kept * length..][..length].copy_from_slice(row);
        kept += usize::from(usize::from(*of) == kept);
    }
}

#[inline(always)]
fn spread<const LENGTH: usize>(length: usize, repeats: &Repeats, rows: &mut [u8]) {
    let length = if LENGTH > 0 { LENGTH } else { length };
    // From the last on: a kept row is never before its own place among the kept.
    for (row, of) in repeats.of.iter().enumerate().rev() {
        let of = usize::from(*of);
        rows.copy_within(of * length..of * length + length, row * length);
    }
}

/// No row.
const NONE: u16 = u16::MAX;
/// Slots for rows: twice as many as there may be, so that few come to one that is taken.
const SLOTS: usize = 2 * MAX_ROWS;

/// How rows begin, to see whether some row seems to be equal to an earlier one. It misses two that
/// are equal if another came to their slot between them: in a window of 128 that happens to one
/// pair in some twenty. If there is none, it seldom seems so but where rows begin alike, or one
/// with zeros.
struct Firsts {
    /// What else is known of the last row that came to a slot.
    last: [u16; SLOTS],
    seem_to_repeat: bool,
}

impl Firsts {
    #[inline(always)]
    const fn none() -> Self {
        Self { last: [0; SLOTS], seem_to_repeat: false }
    }

    /// Tells of one more row.
    #[inline(always)]
    fn tell(&mut self, row: &[u8]) {
        let first = row.first_chunk().expect("8 bytes");
        let mixed = mixed(u64::from_le_bytes(*first));
        let [_, _, _, _, tag @ .., _, _] = mixed.to_le_bytes();
        let tag = u16::from_le_bytes(tag);
        self.seem_to_repeat |= std::mem::replace(&mut self.last[slot(mixed)], tag) == tag;
    }
}

/// Mixes both ends of a row.
#[inline(always)]
fn mixed_ends(row: &[u8]) -> u64 {
    let [first, last] =
        [row.first_chunk(), row.last_chunk()].map(|eight| u64::from_le_bytes(*eight.expect("8 bytes")));
    mixed(first.wrapping_add(last.rotate_left(29)))
}

/// Mixes a word: what comes first is best mixed.
#[inline(always)]
fn mixed(word: u64) -> u64 {
    word.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The slot of a row that begins with what mixes to this, or has such ends.
#[inline(always)]
fn slot(mixed: u64) -> usize {
    usize::try_from(mixed >> (u64::BITS - SLOTS.ilog2())).expect("fewer than slots")
}

/// Bits that number one of `kept` rows.
const fn reference_bits(kept: usize) -> usize {
    if kept < 2 { 0 } else { (kept - 1).ilog2() as usize + 1 }
}
