//! What the kernels that transpose tiles have in common: the steps of a transpose, where a tile's
//! columns are, and what is checked before memory is touched.
//!
//! A tile is 16 / W rows of a register each, in which squares of as many columns stand side by
//! side; each square is a matrix that is transposed in its part of the registers.
//!
//! One step takes register `i` and the one half of all further, and interleaves their elements: the
//! lower halves' to register `2i`, the upper ones' to `2i + 1`. As a number, an element's place
//! (row, then column) turns by one bit; after as many steps as a row has bits, row and column have
//! changed places.
//!
//! Where rows are not whole tiles, the last tile begins so much earlier, and what it has of the one
//! before is done twice, to the same end. Fewer rows than a tile has are none.

use std::ops::Range;

use super::order::{Cut, Order};

/// Columns of the widest tile.
const MAX_WIDE: usize = 64;

/// Declares `turn`, which transposes the squares of a tile of `$register`s, by the instructions
/// that interleave lower and upper halves of bytes, of words, and of doublewords.
macro_rules! turn {
    ($features:literal, $register:ty, [$low8:path, $high8:path], [$low16:path, $high16:path], [$low32:path, $high32:path]) => {
        /// Transposes the squares of a tile.
        #[inline]
        #[target_feature(enable = $features)]
        fn turn<const W: usize, const N: usize>(tile: &mut [$register; N]) {
            for _ in 0..N.ilog2() {
                let before = *tile;
                for i in 0..N / 2 {
                    let (a, b) = (before[i], before[i + N / 2]);
                    (tile[2 * i], tile[2 * i + 1]) = match W {
                        1 => ($low8(a, b), $high8(a, b)),
                        2 => ($low16(a, b), $high16(a, b)),
                        _ => ($low32(a, b), $high32(a, b)),
                    };
                }
            }
        }
    };
}

pub(super) use turn;

/// The rows that tiles of `tall` rows do.
pub(super) const fn tiled_rows(rows: usize, tall: usize) -> usize {
    if rows < tall { 0 } else { rows }
}

/// The first rows of the tiles of `tall` rows that do all rows.
#[inline]
pub(super) fn tops(rows: usize, tall: usize) -> impl Iterator<Item = usize> {
    let last = rows.checked_sub(tall);
    let end = last.map_or(0, |last| last + 1);
    (0..end).step_by(tall).chain(last.filter(move |last| !last.is_multiple_of(tall)))
}

/// Where the whole rows of `wide` columns from `left` on begin in channel-major order, in bytes.
#[inline]
pub(super) fn starts<const W: usize>(cut: &Cut, left: usize, wide: usize) -> [usize; MAX_WIDE] {
    let mut starts = [0; MAX_WIDE];
    for (at, start) in starts[..wide].iter_mut().enumerate() {
        *start = cut.rows_start(left + at) * W;
    }
    starts
}

/// What the kernels rely on: both sides are the window, and the columns are whole tiles of `wide`
/// columns inside its rows.
///
/// # Panics
/// If it is not so.
pub(super) fn check<const W: usize, const N: usize>(
    order: &Order,
    columns: &Range<usize>,
    wide: usize,
    from: usize,
    to: usize,
) {
    let bytes = order.elements * order.width;
    assert!(order.width == W && W * N == 16, "elements of {} bytes", order.width);
    assert!(from == bytes && to == bytes, "a window of {bytes} bytes");
    let whole = columns.len().is_multiple_of(wide);
    assert!(whole && columns.start <= columns.end && columns.end <= order.columns, "tiles of {columns:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_do_all_rows_and_none_that_is_not_there() {
        for tall in [4, 8, 16] {
            for rows in 0..70 {
                let mut done = vec![false; rows];
                for top in tops(rows, tall) {
                    done[top..top + tall].fill(true);
                }
                let count = done.iter().filter(|done| **done).count();
                assert_eq!(count, tiled_rows(rows, tall), "{rows} {tall}");
                assert_eq!(tops(rows, tall).count(), count.div_ceil(tall));
            }
        }
    }
}
