//! Whole rows to channels and back in AVX2: tiles of 16 / W rows of two halves, each half a square matrix that is transposed in its half of the registers.
//!
//! One step takes register `i` and the one half of all further, and interleaves their elements: the lower halves' to register `2i`, the upper ones' to `2i + 1`. As a number, an
//! element's place (row, then column) turns by one bit; after as many steps as a row has bits, row and column have changed places.

use std::{
    arch::x86_64::{
        __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_castsi128_si256, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_setzero_si256,
        _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpackhi_epi32,
        _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
    },
    ops::Range,
};

use super::order::{Cut, Order};

/// Bytes of a register, and so of a row in a tile.
const ROW: usize = 32;
/// Columns of a tile.
pub(super) const fn wide<const W: usize>() -> usize {
    ROW / W
}

/// Transposes both halves of a tile.
#[target_feature(enable = "avx2")]
fn turn<const W: usize, const N: usize>(tile: &mut [__m256i; N]) {
    for _ in 0..N.ilog2() {
        let before = *tile;
        for i in 0..N / 2 {
            let (a, b) = (before[i], before[i + N / 2]);
            (tile[2 * i], tile[2 * i + 1]) = match W {
                1 => (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)),
                2 => (_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)),
                _ => (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)),
            };
        }
    }
}

/// Where the whole rows of the columns of a tile begin in channel-major order, in bytes.
fn starts<const W: usize>(cut: &Cut, left: usize) -> [usize; ROW] {
    let mut starts = [0; ROW];
    for (at, start) in starts[..wide::<W>()].iter_mut().enumerate() {
        *start = cut.rows_start(left + at) * W;
    }
    starts
}

/// Whole tiles of `columns`, forwards: as many rows as they have. `N` is 16 / `W`, the rows of a tile.
///
/// # Panics
/// If the two are not as long as the window, or the columns are not whole tiles of it.
#[target_feature(enable = "avx2")]
pub(super) fn forward<const W: usize, const N: usize>(
    order: &Order,
    columns: Range<usize>,
    from: &[u8],
    to: &mut [u8],
) {
    let (cut, length) = (order.cut(), order.columns * W);
    check::<W, N>(order, &columns, from.len(), to.len());
    for left in columns.step_by(wide::<W>()) {
        let starts = starts::<W>(&cut, left);
        for row in (0..cut.rows - cut.rows % N).step_by(N) {
            let mut tile = [_mm256_setzero_si256(); N];
            let first = (cut.head + left) * W + row * length;
            for (i, register) in tile.iter_mut().enumerate() {
                // SAFETY: `row + i` is a whole row, and the 32 bytes from `left` on are in it, as was checked. The load needs no alignment.
                *register = unsafe { _mm256_loadu_si256(from.as_ptr().add(first + i * length).cast()) };
            }
            turn::<W, N>(&mut tile);
            for (column, register) in tile.iter().enumerate() {
                let low = _mm256_castsi256_si128(*register);
                let high = _mm256_extracti128_si256::<1>(*register);
                // SAFETY: the whole rows' elements of a column are side by side inside the window, and those of rows `row` to `row + N` take 16 bytes. The stores
                // need no alignment.
                unsafe {
                    _mm_storeu_si128(to.as_mut_ptr().add(starts[column] + row * W).cast(), low);
                    _mm_storeu_si128(to.as_mut_ptr().add(starts[column + N] + row * W).cast(), high);
                }
            }
        }
    }
}

/// As [`forward`], backwards.
///
/// # Panics
/// As [`forward`].
#[target_feature(enable = "avx2")]
pub(super) fn backward<const W: usize, const N: usize>(
    order: &Order,
    columns: Range<usize>,
    from: &[u8],
    to: &mut [u8],
) {
    let (cut, length) = (order.cut(), order.columns * W);
    check::<W, N>(order, &columns, from.len(), to.len());
    for left in columns.step_by(wide::<W>()) {
        let starts = starts::<W>(&cut, left);
        for row in (0..cut.rows - cut.rows % N).step_by(N) {
            let mut tile = [_mm256_setzero_si256(); N];
            for (column, register) in tile.iter_mut().enumerate() {
                // SAFETY: as in `forward`, what is stored there is loaded here.
                let (low, high) = unsafe {
                    (
                        _mm_loadu_si128(from.as_ptr().add(starts[column] + row * W).cast()),
                        _mm_loadu_si128(from.as_ptr().add(starts[column + N] + row * W).cast()),
                    )
                };
                *register = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            }
            turn::<W, N>(&mut tile);
            let first = (cut.head + left) * W + row * length;
            for (i, register) in tile.iter().enumerate() {
                // SAFETY: as in `forward`, what is loaded there is stored here.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().add(first + i * length).cast(), *register) };
            }
        }
    }
}

/// What the kernels rely on: both sides are the window, and the columns are whole tiles inside its rows.
fn check<const W: usize, const N: usize>(order: &Order, columns: &Range<usize>, from: usize, to: usize) {
    let bytes = order.elements * order.width;
    assert!(order.width == W && W * N == 16, "elements of {} bytes", order.width);
    assert!(from == bytes && to == bytes, "a window of {bytes} bytes");
    let whole = columns.len().is_multiple_of(wide::<W>());
    assert!(whole && columns.start <= columns.end && columns.end <= order.columns, "tiles of {columns:?}");
}
