//! The order of a window's elements: token-major as the host writes them, channel-major as they are
//! coded (TRACE eq. 3).
//!
//! The rules:
//! * A window is a run of elements of which element `i` is of column `(first + i) mod columns`.
//!   Rows may so be cut at both ends; the columns are a row's channels and, behind them, its
//!   padding.
//! * Channel-major order is: by column, then by row. It is a permutation, so it has an inverse,
//!   whatever the bytes.
//! * Whole rows go in tiles that are transposed as matrices, by the kernel ([`Kernel`]) of the
//!   processor; cut rows and what does not fill a tile go element by element.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512, tiles::tiled_rows};
use super::{
    delta::{ColumnBases, Columns},
    kernel::Kernel,
};
use crate::BLOCK_BYTES;

/// Columns whose differences are made in one call, which by itself takes longer than a short
/// column.
const AT_ONCE: usize = 64;

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
    /// How they are cut in rows: to find that takes a division, and it is asked for often.
    cut: Cut,
}

/// Which columns blocks have of a channel-major window of whole rows. To find them anew for every
/// block would take as long as to read its bases.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByColumns {
    /// All of them.
    columns: usize,
    /// Elements of a column.
    rows: usize,
    /// Elements of every block but the last.
    per_block: usize,
    /// The columns in every such block if these are whole columns, or else none.
    whole: usize,
}

impl ByColumns {
    /// The columns of which block `block` has elements.
    pub(super) fn of(&self, block: usize) -> Range<usize> {
        let Self { columns, rows, per_block, whole } = *self;
        let (start, end) = if whole > 0 {
            (block * whole, (block + 1) * whole)
        } else {
            (block * per_block / rows, ((block + 1) * per_block).div_ceil(rows))
        };
        start.min(columns)..end.min(columns)
    }

    /// Whether the block before has a part of its first column.
    pub(super) fn begins_cut(&self, block: usize) -> bool {
        let start = block * self.per_block;
        self.whole == 0 && start < self.columns * self.rows && !start.is_multiple_of(self.rows)
    }

    /// Whether differences can be made of whole columns: they are no longer than a block.
    pub(super) fn fit_blocks(&self) -> bool {
        self.rows <= self.per_block
    }
}

/// A window cut in whole rows and what is before and behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// The column of the first element.
    first: usize,
    /// Elements of the row that is cut at the beginning.
    pub(super) head: usize,
    /// Whole rows.
    pub(super) rows: usize,
    /// Elements of the row that is cut at the end.
    tail: usize,
}

impl Cut {
    /// Where the elements of `column` begin in channel-major order. That of the columns' number is
    /// the window's end.
    fn start(&self, column: usize) -> usize {
        column * self.rows + column.saturating_sub(self.first).min(self.head) + column.min(self.tail)
    }

    /// Where those of its elements that are in whole rows begin.
    pub(super) fn rows_start(&self, column: usize) -> usize {
        let in_head = (self.first..self.first + self.head).contains(&column);
        self.start(column) + usize::from(in_head)
    }
}

impl Order {
    /// The order of a window of so many `elements` of `width` bytes in rows of so many `columns`,
    /// which begins in column `first`.
    pub fn new(width: usize, columns: usize, first: usize, elements: usize) -> Self {
        let head = if first == 0 { 0 } else { elements.min(columns - first) };
        let whole = elements - head;
        let cut = Cut { first, head, rows: whole / columns, tail: whole % columns };
        Self { width, columns, first, elements, cut }
    }

    /// The same with so many rows left out.
    #[must_use]
    pub(super) fn without_rows(&self, rows: usize) -> Self {
        let cut = Cut { rows: self.cut.rows - rows, ..self.cut };
        Self { elements: self.elements - rows * self.columns, cut, ..*self }
    }

    pub(super) fn cut(&self) -> &Cut {
        &self.cut
    }

    /// Elements of the row that is cut at its beginning, none if the window begins with a whole
    /// row.
    pub fn head(&self) -> usize {
        self.cut.head
    }

    /// Whole rows.
    pub fn rows(&self) -> usize {
        self.cut.rows
    }

    /// The runs of elements `range` in channel-major order that are of one column each, in order.
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (order, cut, mut at) = (*self, self.cut, range.start);
        let mut column = self.column_of(&cut, at);
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            if cut.start(column + 1) <= at {
                // Of a row longer than the window there may be many columns without elements.
                column = order.column_of(&cut, at);
            }
            let start = at;
            at = cut.start(column + 1).min(range.end);
            column += 1;
            Some(start..at)
        })
    }

    /// The lengths of the runs in block `block` of the channel-major window, in place of what is in
    /// `runs`.
    pub(super) fn block_runs(&self, block: usize, runs: &mut Vec<u16>) {
        runs.clear();
        let cut = self.cut();
        let Range { start, end } = self.elements_of(block);
        if let Some(columns) = self.by_columns() {
            let (rows, columns) = (cut.rows, columns.of(block));
            let small = |count: usize| u16::try_from(count).expect("at most a block");
            runs.resize(columns.len(), small(rows.min(end - start)));
            // Of the first column and the last one a part may be in other blocks.
            if let [first, .., last] = &mut runs[..] {
                let of_first = (columns.start + 1) * rows - start;
                let of_last = end - (columns.end - 1) * rows;
                (*first, *last) = (small(of_first), small(of_last));
            }
            return;
        }
        runs.extend(self.runs(start..end).map(|run| u16::try_from(run.len()).expect("at most a block")));
    }

    /// The elements in block `block` of the channel-major window.
    fn elements_of(&self, block: usize) -> Range<usize> {
        let per_block = BLOCK_BYTES / self.width;
        let end = ((block + 1) * per_block).min(self.elements);
        (block * per_block).min(end)..end
    }

    /// Which columns blocks of the channel-major window have, if whole rows are all there is.
    pub(super) fn by_columns(&self) -> Option<ByColumns> {
        let Cut { head, rows, tail, .. } = self.cut;
        if head > 0 || tail > 0 || rows == 0 {
            return None;
        }
        let per_block = BLOCK_BYTES >> self.width.ilog2();
        // A power of two, which has no other divisors.
        let whole = if rows.is_power_of_two() { per_block >> rows.ilog2() } else { 0 };
        Some(ByColumns { columns: self.columns, rows, per_block, whole })
    }

    /// The column that holds the element at this place of the channel-major order.
    fn column_of(&self, cut: &Cut, at: usize) -> usize {
        let (mut low, mut high) = (0, self.columns);
        while low + 1 < high {
            let middle = usize::midpoint(low, high);
            if cut.start(middle) <= at {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Puts the token-major window `from` into channel-major order, and makes `deltas` on the way
    /// if asked to.
    ///
    /// # Panics
    /// If the two are not as long as the window, or differences are asked for and it has elements
    /// that are in no whole row, columns longer than a block, or more of them than bases.
    pub fn channel_major(&self, deltas: Option<ColumnBases<'_>>, from: &[u8], to: &mut [u8]) {
        Kernel::best().channel_major(self, deltas, from, to);
    }

    /// Puts the channel-major window `from` back into token-major order, and undoes `deltas` on the
    /// way if there are any.
    ///
    /// # Panics
    /// If the two are not as long as the window, or it has differences and elements that are in no
    /// whole row or columns without a base.
    pub fn token_major(&self, deltas: Option<&Columns<'_>>, from: &[u8], to: &mut [u8]) {
        Kernel::best().token_major(self, deltas, from, to);
    }
}

/// Which rows and columns tiles do.
#[derive(Clone, Copy)]
struct Tiled {
    rows: usize,
    columns: usize,
}

/// In a tile of words of 8 bytes, as many as elements in a word: element `j` of word `i` becomes
/// element `i` of word `j`.
fn turn<const W: usize>(tile: &mut [u64; 8]) {
    let mut apart = 4 / W;
    while apart > 0 {
        let shift = apart * W * 8;
        let lower = u64::MAX / ((1 << shift) + 1);
        for i in (0..8 / W).filter(|i| i & apart == 0) {
            let t = (tile[i] >> shift ^ tile[i + apart]) & lower;
            tile[i + apart] ^= t;
            tile[i] ^= t << shift;
        }
        apart /= 2;
    }
}

/// A tile's words, in token-major and in channel-major order: where each begins, in bytes.
fn each_tile<const W: usize>(order: &Order, mut each: impl FnMut(&[usize], &[usize])) -> Tiled {
    let (deep, cut) = (8 / W, order.cut());
    let columns = if cut.rows == 0 { 0 } else { order.columns };
    let tiled = Tiled { rows: cut.rows - cut.rows % deep, columns: columns - columns % deep };
    for left in (0..tiled.columns).step_by(deep) {
        for row in (0..tiled.rows).step_by(deep) {
            let token: [usize; 8] =
                std::array::from_fn(|i| (cut.head + (row + i) * order.columns + left) * W);
            let channel: [usize; 8] = std::array::from_fn(|j| {
                let column = left + j.min(deep - 1);
                (cut.rows_start(column) + row) * W
            });
            each(&token[..deep], &channel[..deep]);
        }
    }
    tiled
}

fn copy_tile<const W: usize>(from: &[u8], at: &[usize], to: &mut [u8], places: &[usize]) {
    let mut tile = [0; 8];
    for (word, at) in tile.iter_mut().zip(at) {
        *word = u64::from_le_bytes(from[*at..at + 8].try_into().expect("8 bytes"));
    }
    turn::<W>(&mut tile);
    for (word, place) in tile.iter().zip(places) {
        to[*place..place + 8].copy_from_slice(&word.to_le_bytes());
    }
}

/// Where each element that no tile holds is, in token-major and in channel-major order, in
/// elements.
fn each_left_over(order: &Order, tiled: Tiled, mut each: impl FnMut(usize, usize)) {
    let (cut, columns) = (order.cut(), order.columns);
    for at in 0..cut.head {
        each(at, cut.start(order.first + at));
    }
    let left = if tiled.rows == cut.rows { tiled.columns } else { 0 };
    let columns_left = if cut.rows == 0 { 0..0 } else { left..columns };
    for column in columns_left {
        let start = cut.rows_start(column);
        for row in if column < tiled.columns { tiled.rows } else { 0 }..cut.rows {
            each(cut.head + row * columns + column, start + row);
        }
    }
    let before = cut.head + cut.rows * columns;
    for column in 0..cut.tail {
        each(before + column, cut.start(column + 1) - 1);
    }
}

/// Columns of a window that are whole tiles of so many, from `from` on: none without whole rows, as
/// a row may be very long.
#[cfg(target_arch = "x86_64")]
fn tiles(order: &Order, from: usize, wide: usize) -> Range<usize> {
    let end = if order.rows() == 0 { from } else { order.columns };
    from..end - (end - from) % wide
}

fn forward<const W: usize, const N: usize>(
    kernel: Kernel,
    order: &Order,
    mut deltas: Option<ColumnBases<'_>>,
    from: &[u8],
    to: &mut [u8],
) {
    // Of these columns the differences are made.
    let mut done = 0;
    let tiled = match kernel {
        Kernel::Portable => each_tile::<W>(order, |token, channel| copy_tile::<W>(from, token, to, channel)),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 | Kernel::Avx512 => {
            let (rows, mut columns) = (tiled_rows(order.rows(), N), 0..0);
            if kernel == Kernel::Avx512 {
                columns = tiles(order, 0, avx512::wide::<W>());
                // A base is known when all rows were seen.
                let deltas = deltas.as_mut().filter(|_| rows == order.rows());
                done = if deltas.is_some() { columns.end } else { 0 };
                // SAFETY: the processor has what the kernel needs, as the caller made sure.
                unsafe { avx512::forward::<W, N>(order, columns.clone(), deltas, from, to) };
            }
            columns = tiles(order, columns.end, avx2::wide::<W>());
            // SAFETY: both kernels are there only if the processor has AVX2, as the caller made
            // sure.
            unsafe { avx2::forward::<W, N>(order, columns.clone(), from, to) };
            Tiled { rows, columns: columns.end }
        }
    };
    each_left_over(order, tiled, |token, channel| {
        to[channel * W..][..W].copy_from_slice(&from[token * W..][..W]);
    });
    if let Some(ColumnBases { field, bases }) = deltas {
        let runs = [u16::try_from(order.rows()).expect("at most a block"); AT_ONCE];
        let length = (order.rows() * W).max(1);
        let columns = to.get_mut(done * length..).unwrap_or_default().chunks_mut(AT_ONCE * length);
        for (columns, bases) in columns.zip(bases[done..order.columns].chunks_mut(AT_ONCE)) {
            kernel.subtract(field, &runs[..bases.len()], columns, bases);
        }
    }
}

fn backward<const W: usize, const N: usize>(
    kernel: Kernel,
    order: &Order,
    deltas: Option<&Columns<'_>>,
    from: &[u8],
    to: &mut [u8],
) {
    // Of these rows and columns the differences are undone.
    let mut done = Tiled { rows: 0, columns: 0 };
    let tiled = match kernel {
        Kernel::Portable => each_tile::<W>(order, |token, channel| copy_tile::<W>(from, channel, to, token)),
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 | Kernel::Avx512 => {
            let (rows, mut columns) = (tiled_rows(order.rows(), N), 0..0);
            if kernel == Kernel::Avx512 {
                columns = tiles(order, 0, avx512::wide::<W>());
                // SAFETY: as in `forward`.
                unsafe { avx512::backward::<W, N>(order, columns.clone(), deltas, from, to) };
                done = Tiled { rows, columns: columns.end };
            }
            columns = tiles(order, columns.end, avx2::wide::<W>());
            // SAFETY: as in `forward`.
            unsafe { avx2::backward::<W, N>(order, columns.clone(), from, to) };
            Tiled { rows, columns: columns.end }
        }
    };
    each_left_over(order, tiled, |token, channel| {
        to[token * W..][..W].copy_from_slice(&from[channel * W..][..W]);
    });
    if let Some(deltas) = deltas {
        let length = order.columns * W;
        let (upper, lower) = to.split_at_mut(done.rows * length);
        if done.columns < order.columns {
            kernel.restore_rows(deltas, done.columns..order.columns, length, upper);
        }
        kernel.restore_rows(deltas, 0..order.columns, length, lower);
    }
}

/// [`Order::channel_major`] by a kernel that the processor has.
pub(super) fn channel_major(
    kernel: Kernel,
    order: &Order,
    deltas: Option<ColumnBases<'_>>,
    from: &[u8],
    to: &mut [u8],
) {
    let (bytes, cut) = (order.elements * order.width, order.cut());
    assert!(from.len() == bytes && to.len() == bytes, "a window of {bytes} bytes");
    if let Some(deltas) = &deltas {
        assert!(cut.head == 0 && cut.tail == 0, "differences of whole rows");
        assert!(deltas.bases.len() >= order.columns, "a base for each column");
    }
    match order.width {
        1 => forward::<1, 16>(kernel, order, deltas, from, to),
        2 => forward::<2, 8>(kernel, order, deltas, from, to),
        _ => forward::<4, 4>(kernel, order, deltas, from, to),
    }
}

/// [`Order::token_major`] by a kernel that the processor has.
pub(super) fn token_major(
    kernel: Kernel,
    order: &Order,
    deltas: Option<&Columns<'_>>,
    from: &[u8],
    to: &mut [u8],
) {
    let (bytes, cut) = (order.elements * order.width, order.cut());
    assert!(from.len() == bytes && to.len() == bytes, "a window of {bytes} bytes");
    if let Some(deltas) = deltas {
        assert!(cut.head == 0 && cut.tail == 0, "differences of whole rows");
        assert!(deltas.bases.len() >= order.columns, "a base for each column");
    }
    match order.width {
        1 => backward::<1, 16>(kernel, order, deltas, from, to),
        2 => backward::<2, 8>(kernel, order, deltas, from, to),
        _ => backward::<4, 4>(kernel, order, deltas, from, to),
    }
}
