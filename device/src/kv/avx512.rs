//! Whole rows to channels and back in AVX-512: as [`super::avx2`], with tiles of four squares. On the way back differences can be undone, a register for the bases of as many columns.

use std::{
    arch::x86_64::{
        __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128, _mm512_and_si512,
        _mm512_andnot_si512, _mm512_castsi128_si512, _mm512_castsi512_si128, _mm512_extracti32x4_epi32,
        _mm512_inserti32x4, _mm512_loadu_si512, _mm512_or_si512, _mm512_set1_epi8, _mm512_set1_epi16,
        _mm512_set1_epi32, _mm512_setzero_si512, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_epi16,
        _mm512_sub_epi32, _mm512_unpackhi_epi8, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32,
        _mm512_unpacklo_epi8, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32,
    },
    ops::Range,
};

use super::{
    delta::Columns,
    order::{Cut, Order},
};

/// Bytes of a register, and so of a row in a tile.
const ROW: usize = 64;
/// Columns of a tile.
pub(super) const fn wide<const W: usize>() -> usize {
    ROW / W
}

/// Transposes the four squares of a tile.
#[target_feature(enable = "avx512f,avx512bw")]
fn turn<const W: usize, const N: usize>(tile: &mut [__m512i; N]) {
    for _ in 0..N.ilog2() {
        let before = *tile;
        for i in 0..N / 2 {
            let (a, b) = (before[i], before[i + N / 2]);
            (tile[2 * i], tile[2 * i + 1]) = match W {
                1 => (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)),
                2 => (_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)),
                _ => (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)),
            };
        }
    }
}

/// Where the whole rows of the columns of a tile begin in channel-major order, in bytes.
fn starts<const W: usize>(cut: &Cut, left: usize) -> [usize; ROW] {
    let (mut starts, wide) = ([0; ROW], wide::<W>());
    let (first, last) = (cut.rows_start(left), cut.rows_start(left + wide - 1));
    // Unless rows are cut, columns are equally far apart.
    let even = last - first == (wide - 1) * cut.rows;
    for (at, start) in starts[..wide].iter_mut().enumerate() {
        *start = if even { first + at * cut.rows } else { cut.rows_start(left + at) } * W;
    }
    starts
}

/// Whole tiles of `columns`, forwards: as many rows as they have. `N` is 16 / `W`, the rows of a tile.
///
/// # Panics
/// If the two are not as long as the window, or the columns are not whole tiles of it.
#[target_feature(enable = "avx512f,avx512bw")]
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
            let mut tile = [_mm512_setzero_si512(); N];
            let first = (cut.head + left) * W + row * length;
            for i in 2 * N..3 * N {
                _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(first + i * length).cast());
            }
            for (i, register) in tile.iter_mut().enumerate() {
                // SAFETY: `row + i` is a whole row, and the 64 bytes from `left` on are in it, as was checked. The load needs no alignment.
                *register = unsafe { _mm512_loadu_si512(from.as_ptr().add(first + i * length).cast()) };
            }
            turn::<W, N>(&mut tile);
            for (column, register) in tile.iter().enumerate() {
                let squares = [
                    _mm512_castsi512_si128(*register),
                    _mm512_extracti32x4_epi32::<1>(*register),
                    _mm512_extracti32x4_epi32::<2>(*register),
                    _mm512_extracti32x4_epi32::<3>(*register),
                ];
                for (square, rows) in squares.into_iter().enumerate() {
                    let at = starts[square * N + column] + row * W;
                    // SAFETY: the whole rows' elements of a column are side by side inside the window, and those of rows `row` to `row + N` take 16 bytes. The
                    // store needs no alignment.
                    unsafe { _mm_storeu_si128(to.as_mut_ptr().add(at).cast(), rows) };
                }
            }
        }
    }
}

/// As [`forward`], backwards; differences in `deltas` are undone.
///
/// # Panics
/// As [`forward`], or if there are fewer bases than columns.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn backward<const W: usize, const N: usize>(
    order: &Order,
    columns: Range<usize>,
    deltas: Option<&Columns<'_>>,
    from: &[u8],
    to: &mut [u8],
) {
    let (cut, length) = (order.cut(), order.columns * W);
    check::<W, N>(order, &columns, from.len(), to.len());
    let [mask, keep] = deltas.map_or([0, u32::MAX], |deltas| [deltas.field.mask, deltas.keep]);
    let [mask, keep] = [mask, keep].map(|bits| every::<W>(bits));
    let rest = _mm512_andnot_si512(mask, keep);
    let exponent = _mm512_and_si512(mask, keep);
    for left in columns.step_by(wide::<W>()) {
        let starts = starts::<W>(&cut, left);
        let bases = deltas.map(|deltas| bases::<W>(deltas, left));
        for row in (0..cut.rows - cut.rows % N).step_by(N) {
            let mut tile = [_mm512_setzero_si512(); N];
            for (column, register) in tile.iter_mut().enumerate() {
                let squares: [_; 4] = std::array::from_fn(|square| {
                    let at = starts[square * N + column] + row * W;
                    // SAFETY: as in `forward`, what is stored there is loaded here.
                    unsafe { _mm_loadu_si128(from.as_ptr().add(at).cast()) }
                });
                let two = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(squares[0]), squares[1]);
                let three = _mm512_inserti32x4::<2>(two, squares[2]);
                *register = _mm512_inserti32x4::<3>(three, squares[3]);
            }
            turn::<W, N>(&mut tile);
            let first = (cut.head + left) * W + row * length;
            for (i, register) in tile.iter().enumerate() {
                let mut row = *register;
                if let Some(bases) = bases {
                    let delta = _mm512_and_si512(row, mask);
                    let restored = match W {
                        1 => _mm512_sub_epi8(bases, delta),
                        2 => _mm512_sub_epi16(bases, delta),
                        _ => _mm512_sub_epi32(bases, delta),
                    };
                    row = _mm512_or_si512(_mm512_and_si512(restored, exponent), _mm512_and_si512(row, rest));
                }
                // SAFETY: as in `forward`, what is loaded there is stored here.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(first + i * length).cast(), row) };
            }
        }
    }
}

/// These bits in every element.
#[expect(clippy::cast_possible_truncation, reason = "an element has no more bits")]
#[target_feature(enable = "avx512f,avx512bw")]
fn every<const W: usize>(bits: u32) -> __m512i {
    match W {
        1 => _mm512_set1_epi8((bits as u8).cast_signed()),
        2 => _mm512_set1_epi16((bits as u16).cast_signed()),
        _ => _mm512_set1_epi32(bits.cast_signed()),
    }
}

/// The bases of the columns from `left` on, each at its element's exponent.
#[target_feature(enable = "avx512f,avx512bw")]
fn bases<const W: usize>(deltas: &Columns<'_>, left: usize) -> __m512i {
    let mut row = [0_u8; ROW];
    let bases = &deltas.bases[left..left + wide::<W>()];
    for (element, base) in row.as_chunks_mut::<W>().0.iter_mut().zip(bases) {
        *element = *(u32::from(*base) << deltas.field.shift).to_le_bytes().first_chunk().expect("4 at most");
    }
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
}

/// What the kernels rely on: both sides are the window, and the columns are whole tiles inside its rows.
fn check<const W: usize, const N: usize>(order: &Order, columns: &Range<usize>, from: usize, to: usize) {
    let bytes = order.elements * order.width;
    assert!(order.width == W && W * N == 16, "elements of {} bytes", order.width);
    assert!(from == bytes && to == bytes, "a window of {bytes} bytes");
    let whole = columns.len().is_multiple_of(wide::<W>());
    assert!(whole && columns.start <= columns.end && columns.end <= order.columns, "tiles of {columns:?}");
}
