//! The order of a window's elements: token-major as the host writes them, channel-major as they are coded (TRACE eq. 3).
//!
//! The rules:
//! * A window is a run of elements of which element `i` is of column `(first + i) mod columns`. Rows may so be cut at both ends; the columns
//!   are a row's channels and, behind them, its padding.
//! * Channel-major order is: by column, then by row. It is a permutation, so it has an inverse, whatever the bytes.
//! * Whole rows go through [`turn`], tiles of 8-byte words whose elements are exchanged as a matrix is transposed; cut rows and what does not fill a
//!   tile go element by element.
//! * Kernels ([`Kernel`]) are one source, compiled for each processor.

use std::ops::Range;

use super::kernel::Kernel;

/// The shape of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Bytes of an element: 1, 2 or 4.
    pub width: usize,
    /// Elements of a row, padding included.
    pub columns: usize,
    /// The column of the first element.
    pub first: usize,
    /// All elements.
    pub elements: usize,
}

impl Order {
    /// Elements of the row that is cut at its beginning, none if the window begins with a whole row.
    pub fn head(&self) -> usize {
        if self.first == 0 { 0 } else { self.elements.min(self.columns - self.first) }
    }

    /// Whole rows.
    pub fn rows(&self) -> usize {
        (self.elements - self.head()) / self.columns
    }

    /// Elements of the row that is cut at its end.
    fn tail(&self) -> usize {
        (self.elements - self.head()) % self.columns
    }

    /// Where the elements of `column` begin in channel-major order. That of `columns` is the window's end.
    pub fn start(&self, column: usize) -> usize {
        column * self.rows() + column.saturating_sub(self.first).min(self.head()) + column.min(self.tail())
    }

    /// Whether the row cut at its beginning has this column.
    fn in_head(&self, column: usize) -> bool {
        (self.first..self.first + self.head()).contains(&column)
    }

    /// The runs of elements `range` in channel-major order that are of one column each, in order.
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut at = range.start;
        // No column has fewer elements than there are whole rows.
        let mut column = self.column_of(at);
        std::iter::from_fn(move || {
            while at < range.end {
                let end = self.start(column + 1).min(range.end);
                let start = at;
                column += 1;
                if end > start {
                    at = end;
                    return Some(start..end);
                }
            }
            None
        })
    }

    /// The column that holds the element at this place of the channel-major order.
    fn column_of(&self, at: usize) -> usize {
        let (mut low, mut high) = (0, self.columns);
        while low + 1 < high {
            let middle = usize::midpoint(low, high);
            if self.start(middle) <= at {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Puts the token-major window `from` into channel-major order.
    ///
    /// # Panics
    /// If the two are not as long as the window.
    pub fn channel_major(&self, from: &[u8], to: &mut [u8]) {
        Kernel::best().channel_major(self, from, to);
    }

    /// Puts the channel-major window `from` back into token-major order.
    ///
    /// # Panics
    /// If the two are not as long as the window.
    pub fn token_major(&self, from: &[u8], to: &mut [u8]) {
        Kernel::best().token_major(self, from, to);
    }
}

/// Words of 8 bytes side by side in a tile.
const LANES: usize = 8;

/// Rows of a tile, of which elements of `W` bytes use the first 8 / W.
type Tile<const L: usize> = [[u64; L]; 8];

/// In each lane: element `j` of row `i` becomes element `i` of row `j`.
#[inline(always)]
fn turn<const W: usize, const L: usize>(tile: &mut Tile<L>) {
    let mut apart = 4 / W;
    while apart > 0 {
        let shift = apart * W * 8;
        let lower = u64::MAX / ((1 << shift) + 1);
        for i in (0..8 / W).filter(|i| i & apart == 0) {
            for lane in 0..L {
                let t = (tile[i][lane] >> shift ^ tile[i + apart][lane]) & lower;
                tile[i + apart][lane] ^= t;
                tile[i][lane] ^= t << shift;
            }
        }
        apart /= 2;
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The whole rows of columns `columns`, a tile of `L` words a row at a time, forwards.
#[inline(always)]
fn tiles_forward<const W: usize, const L: usize>(
    order: &Order,
    columns: Range<usize>,
    from: &[u8],
    to: &mut [u8],
) {
    let (deep, head, rows) = (8 / W, order.head(), order.rows());
    for left in columns.step_by(deep * L) {
        let starts: [[usize; L]; 8] = std::array::from_fn(|j| {
            std::array::from_fn(|lane| {
                let column = left + lane * deep + j.min(deep - 1);
                (order.start(column) + usize::from(order.in_head(column))) * W
            })
        });
        for row in (0..rows - rows % deep).step_by(deep) {
            let mut tile = [[0; L]; 8];
            for (i, words) in tile[..deep].iter_mut().enumerate() {
                let at = (head + (row + i) * order.columns + left) * W;
                let bytes = &from[at..at + 8 * L];
                for (lane, word) in words.iter_mut().enumerate() {
                    *word = self::word(bytes, lane * 8);
                }
            }
            turn::<W, L>(&mut tile);
            for (words, starts) in tile[..deep].iter().zip(&starts) {
                for (word, start) in words.iter().zip(starts) {
                    to[start + row * W..][..8].copy_from_slice(&word.to_le_bytes());
                }
            }
        }
    }
}

/// As [`tiles_forward`], backwards.
#[inline(always)]
fn tiles_backward<const W: usize, const L: usize>(
    order: &Order,
    columns: Range<usize>,
    from: &[u8],
    to: &mut [u8],
) {
    let (deep, head, rows) = (8 / W, order.head(), order.rows());
    for left in columns.step_by(deep * L) {
        let starts: [[usize; L]; 8] = std::array::from_fn(|j| {
            std::array::from_fn(|lane| {
                let column = left + lane * deep + j.min(deep - 1);
                (order.start(column) + usize::from(order.in_head(column))) * W
            })
        });
        for row in (0..rows - rows % deep).step_by(deep) {
            let mut tile = [[0; L]; 8];
            for (words, starts) in tile[..deep].iter_mut().zip(&starts) {
                for (word, start) in words.iter_mut().zip(starts) {
                    *word = self::word(from, start + row * W);
                }
            }
            turn::<W, L>(&mut tile);
            for (i, words) in tile[..deep].iter().enumerate() {
                let at = (head + (row + i) * order.columns + left) * W;
                let bytes = &mut to[at..at + 8 * L];
                for (lane, word) in words.iter().enumerate() {
                    bytes[lane * 8..][..8].copy_from_slice(&word.to_le_bytes());
                }
            }
        }
    }
}

/// Where each element that no tile holds is, in token-major and in channel-major order, in elements.
#[inline(always)]
fn each_left_over(order: &Order, deep: usize, mut each: impl FnMut(usize, usize)) {
    let (head, rows, columns) = (order.head(), order.rows(), order.columns);
    for at in 0..head {
        each(at, order.start(order.first + at));
    }
    let (tiled_rows, tiled_columns) = (rows - rows % deep, columns - columns % deep);
    let mut row_part = |column: usize, rows: Range<usize>| {
        let start = order.start(column) + usize::from(order.in_head(column));
        for row in rows {
            each(head + row * columns + column, start + row);
        }
    };
    for column in 0..columns {
        row_part(column, if column < tiled_columns { tiled_rows } else { 0 }..rows);
    }
    let before = head + rows * columns;
    for column in 0..order.tail() {
        each(before + column, order.start(column + 1) - 1);
    }
}

/// Columns in whole tiles of [`LANES`] words a row.
const fn wide<const W: usize>(order: &Order) -> usize {
    order.columns - order.columns % (8 / W * LANES)
}

#[inline(always)]
fn forward<const W: usize>(order: &Order, from: &[u8], to: &mut [u8]) {
    let (deep, wide) = (8 / W, wide::<W>(order));
    tiles_forward::<W, LANES>(order, 0..wide, from, to);
    tiles_forward::<W, 1>(order, wide..order.columns - order.columns % deep, from, to);
    each_left_over(order, deep, |token, channel| {
        to[channel * W..][..W].copy_from_slice(&from[token * W..][..W]);
    });
}

#[inline(always)]
fn backward<const W: usize>(order: &Order, from: &[u8], to: &mut [u8]) {
    let (deep, wide) = (8 / W, wide::<W>(order));
    tiles_backward::<W, LANES>(order, 0..wide, from, to);
    tiles_backward::<W, 1>(order, wide..order.columns - order.columns % deep, from, to);
    each_left_over(order, deep, |token, channel| {
        to[token * W..][..W].copy_from_slice(&from[channel * W..][..W]);
    });
}

/// [`Order::channel_major`], to be compiled for a processor.
#[inline(always)]
pub(super) fn channel_major(order: &Order, from: &[u8], to: &mut [u8]) {
    let bytes = order.elements * order.width;
    assert!(from.len() == bytes && to.len() == bytes, "a window of {bytes} bytes");
    match order.width {
        1 => forward::<1>(order, from, to),
        2 => forward::<2>(order, from, to),
        _ => forward::<4>(order, from, to),
    }
}

/// [`Order::token_major`], to be compiled for a processor.
#[inline(always)]
pub(super) fn token_major(order: &Order, from: &[u8], to: &mut [u8]) {
    let bytes = order.elements * order.width;
    assert!(from.len() == bytes && to.len() == bytes, "a window of {bytes} bytes");
    match order.width {
        1 => backward::<1>(order, from, to),
        2 => backward::<2>(order, from, to),
        _ => backward::<4>(order, from, to),
    }
}
