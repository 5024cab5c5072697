// A set of the modelled cache: eight ways, least recently used first out.

use super::layout::{DIRTY, WAYS};

/// What is known of a set besides its lines. All zeros is a set without lines.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Ways {
    /// A byte of each line, a way from the lowest byte on: most sets are told apart from a line by
    /// these, without a look at theirs.
    marks: u64,
    /// The ways in the order of their last use, the newest in the lowest byte; [`FIRST`] is taken
    /// out of it.
    order: u64,
}

/// The order that 0 stands for.
const FIRST: u64 = 0x0706_0504_0302_0100;
const EACH: u64 = 0x0101_0101_0101_0101;

/// What a touch of a line left.
pub(crate) struct Touched {
    /// The line as the set has it: where it ends, and [`DIRTY`].
    pub(crate) line: u64,
    /// Nothing if the set had the line, or else what left the set for it, 0 if a way was free.
    pub(crate) gone: Option<u64>,
}

/// At least the bytes of `bytes` that are zero, as their highest bits.
#[inline]
const fn zeros(bytes: u64) -> u64 {
    bytes.wrapping_sub(EACH) & !bytes & EACH << 7
}

impl Ways {
    /// A line is touched: `key` is where it ends, with [`DIRTY`] if it is written. The set has
    /// `lines`.
    #[inline]
    pub(crate) fn touch(&mut self, lines: &mut [u64; WAYS], key: u64) -> Touched {
        let mark = (key >> 6).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
        let order = self.order ^ FIRST;
        let mut same = zeros(self.marks ^ (mark * EACH));
        while same != 0 {
            let way = u64::from(same.trailing_zeros() / 8);
            let line = &mut lines[way as usize % WAYS];
            if (*line ^ key) & !DIRTY == 0 {
                *line |= key;
                // The ways that were used since move by one.
                let at = zeros(order ^ (way * EACH)).trailing_zeros() / 8;
                let since = (1 << (8 * at)) - 1;
                let moved = order & since;
                let rest = order & !((since << 8) | 0xff);
                self.order = (rest | (moved << 8) | way) ^ FIRST;
                return Touched { line: *line, gone: None };
            }
            same &= same - 1;
        }
        let way = order >> 56;
        self.order = ((order << 8) | way) ^ FIRST;
        let shift = 8 * way;
        self.marks = (self.marks & !(0xff << shift)) | (mark << shift);
        let gone = core::mem::replace(&mut lines[way as usize % WAYS], key);
        Touched { line: key, gone: Some(gone) }
    }
}
