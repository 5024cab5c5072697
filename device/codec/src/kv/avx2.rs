//! Whole rows to channels and back in AVX2: [tiles](super::tiles) of two squares.

use std::{
    arch::x86_64::{
        __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_castsi128_si256, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_setzero_si256,
        _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpackhi_epi32,
        _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
    },
    ops::Range,
};

use super::{
    order::Order,
    tiles::{check, starts, tops, turn},
};

/// Bytes of a register, and so of a row in a tile.
const ROW: usize = 32;
/// Columns of a tile.
pub(super) const fn wide<const W: usize>() -> usize {
    ROW / W
}

turn!(
    "avx2",
    __m256i,
    [_mm256_unpacklo_epi8, _mm256_unpackhi_epi8],
    [_mm256_unpacklo_epi16, _mm256_unpackhi_epi16],
    [_mm256_unpacklo_epi32, _mm256_unpackhi_epi32]
);

/// Whole tiles of `columns`, forwards. `N` is 16 / `W`, the rows of a tile.
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
    check::<W, N>(order, &columns, wide::<W>(), from.len(), to.len());
    for left in columns.step_by(wide::<W>()) {
        let starts = starts::<W>(cut, left, wide::<W>());
        for row in tops(cut.rows, N) {
            let mut tile = [_mm256_setzero_si256(); N];
            let first = (cut.head + left) * W + row * length;
            for (i, register) in tile.iter_mut().enumerate() {
                // SAFETY: `row + i` is a whole row, and the 32 bytes from `left` on are in it, as
                // was checked. The load needs no alignment.
                *register = unsafe { _mm256_loadu_si256(from.as_ptr().add(first + i * length).cast()) };
            }
            turn::<W, N>(&mut tile);
            for (column, register) in tile.iter().enumerate() {
                let low = _mm256_castsi256_si128(*register);
                let high = _mm256_extracti128_si256::<1>(*register);
                // SAFETY: the whole rows' elements of a column are side by side inside the window,
                // and those of rows `row` to `row + N` take 16 bytes. The stores need no alignment.
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
    check::<W, N>(order, &columns, wide::<W>(), from.len(), to.len());
    for left in columns.step_by(wide::<W>()) {
        let starts = starts::<W>(cut, left, wide::<W>());
        for row in tops(cut.rows, N) {
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
