//! Whole rows to channels and back in AVX-512: [tiles](super::tiles) of four squares. On the way
//! back differences can be undone, a register for the bases of as many columns.

use std::{
    arch::x86_64::{
        __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_storeu_si128, _mm512_and_si512,
        _mm512_castsi128_si512, _mm512_castsi256_si512, _mm512_castsi512_si128, _mm512_castsi512_si256,
        _mm512_cvtepi16_epi8, _mm512_cvtepi32_epi8, _mm512_cvtepu8_epi16, _mm512_cvtepu8_epi32,
        _mm512_extracti32x4_epi32, _mm512_inserti32x4, _mm512_loadu_si512, _mm512_max_epu8, _mm512_max_epu16,
        _mm512_max_epu32, _mm512_or_si512, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32,
        _mm512_setzero_si512, _mm512_sll_epi16, _mm512_sll_epi32, _mm512_srl_epi16, _mm512_srl_epi32,
        _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_epi16, _mm512_sub_epi32, _mm512_ternarylogic_epi64,
        _mm512_unpackhi_epi8, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32, _mm512_unpacklo_epi8,
        _mm512_unpacklo_epi16, _mm512_unpacklo_epi32,
    },
    ops::Range,
};

use super::{
    delta::{ColumnBases, Columns, Field},
    order::{Cut, Order},
    shape::WINDOW,
    tiles::{check, starts, tops, turn},
};

/// Bytes of a register, and so of a row in a tile.
const ROW: usize = 64;
/// Columns of a tile.
pub(super) const fn wide<const W: usize>() -> usize {
    ROW / W
}
turn!(
    "avx512f,avx512bw",
    __m512i,
    [_mm512_unpacklo_epi8, _mm512_unpackhi_epi8],
    [_mm512_unpacklo_epi16, _mm512_unpackhi_epi16],
    [_mm512_unpacklo_epi32, _mm512_unpackhi_epi32]
);

/// Calls `$strip` with where the whole rows of the columns from `$left` on begin in channel-major
/// order, in bytes, as a function of the column in the tile.
macro_rules! with_starts {
    ($W:ident, $cut:expr, $left:expr, |$starts:ident| $strip:expr) => {{
        let (cut, left, wide): (&Cut, usize, usize) = ($cut, $left, wide::<$W>());
        let (first, last) = (cut.rows_start(left), cut.rows_start(left + wide - 1));
        // Unless rows are cut, columns are equally far apart; where windows have the usual number
        // of rows, the distance is known here.
        let (first_at, apart) = (first * $W, cut.rows * $W);
        if last - first != (wide - 1) * cut.rows {
            let starts = starts::<$W>(cut, left, wide);
            let $starts = |column: usize| starts[column];
            $strip
        } else if apart == WINDOW as usize * $W {
            let $starts = |column: usize| first_at + column * (WINDOW as usize * $W);
            $strip
        } else {
            let $starts = |column: usize| first_at + column * apart;
            $strip
        }
    }};
}

/// Whole tiles of `columns`, forwards. `N` is 16 / `W`, the rows of a tile. Differences are made of
/// them if there are `deltas`, and then there is a tile's rows at least.
///
/// # Panics
/// If the two are not as long as the window, the columns are not whole tiles of it, or there are
/// fewer bases than columns.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn forward<const W: usize, const N: usize>(
    order: &Order,
    columns: Range<usize>,
    mut deltas: Option<&mut ColumnBases<'_>>,
    from: &[u8],
    to: &mut [u8],
) {
    let (cut, length) = (order.cut(), order.columns * W);
    check::<W, N>(order, &columns, wide::<W>(), from.len(), to.len());
    for left in columns.step_by(wide::<W>()) {
        let first = (cut.head + left) * W;
        let load = |row: usize| {
            // SAFETY: it is a whole row, and the 64 bytes from `left` on are in it, as was checked.
            // The load needs no alignment.
            unsafe { _mm512_loadu_si512(from.as_ptr().add(first + row * length).cast()) }
        };
        with_starts!(W, cut, left, |starts| {
            if let Some(ColumnBases { field, bases }) = &mut deltas {
                let mask = every::<W>(field.mask);
                let largest = largest::<W>(cut.rows, |row| _mm512_and_si512(load(row), mask));
                store_bases::<W>(*field, largest, &mut bases[left..][..wide::<W>()]);
                let largest = _mm512_or_si512(largest, below::<W>(*field));
                let difference = |row: usize| {
                    let elements = load(row);
                    // Of the first operand's ones the second, of its zeros the third.
                    _mm512_ternarylogic_epi64::<0xca>(mask, minus::<W>(largest, elements), elements)
                };
                // SAFETY: the whole rows' elements of a column are side by side inside the window,
                // and those of the rows that a tile has are what is stored.
                unsafe { forward_strip::<W, N>(cut.rows, difference, starts, to.as_mut_ptr()) }
            } else {
                // SAFETY: as above.
                unsafe { forward_strip::<W, N>(cut.rows, load, starts, to.as_mut_ptr()) }
            }
        });
    }
}

/// The tiles of a strip of columns, of which `load` gives the rows and `starts` tells where they
/// belong.
///
/// # Safety
/// Behind each start is room for `rows` elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn forward_strip<const W: usize, const N: usize>(
    rows: usize,
    load: impl Fn(usize) -> __m512i,
    starts: impl Fn(usize) -> usize,
    to: *mut u8,
) {
    for row in tops(rows, N) {
        let mut tile = [_mm512_setzero_si512(); N];
        for (i, register) in tile.iter_mut().enumerate() {
            *register = load(row + i);
        }
        turn::<W, N>(&mut tile);
        for (column, register) in tile.into_iter().enumerate() {
            let squares = [
                _mm512_castsi512_si128(register),
                _mm512_extracti32x4_epi32::<1>(register),
                _mm512_extracti32x4_epi32::<2>(register),
                _mm512_extracti32x4_epi32::<3>(register),
            ];
            for (square, rows) in squares.into_iter().enumerate() {
                let at = starts(square * N + column) + row * W;
                // SAFETY: as the caller promises, for these `N` rows take 16 bytes. The store
                // needs no alignment.
                unsafe { _mm_storeu_si128(to.add(at).cast(), rows) };
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
    check::<W, N>(order, &columns, wide::<W>(), from.len(), to.len());
    for left in columns.step_by(wide::<W>()) {
        let first = (cut.head + left) * W;
        let mut store = |row: usize, elements: __m512i| {
            // SAFETY: it is a whole row, and the 64 bytes from `left` on are in it, as was checked.
            // The store needs no alignment.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(first + row * length).cast(), elements) };
        };
        let from = from.as_ptr();
        with_starts!(W, cut, left, |starts| {
            if let Some(deltas) = deltas {
                let [mask, keep] = [deltas.field.mask, deltas.keep].map(|bits| every::<W>(bits));
                let bases = load_bases::<W>(deltas.field, &deltas.bases[left..][..wide::<W>()]);
                let bases = _mm512_or_si512(bases, below::<W>(deltas.field));
                // As forwards.
                let undone =
                    |elements| _mm512_ternarylogic_epi64::<0xca>(mask, minus::<W>(bases, elements), elements);
                // Mostly all planes are wanted.
                if deltas.keep << (32 - 8 * W) == u32::MAX << (32 - 8 * W) {
                    let whole = |row, elements| store(row, undone(elements));
                    // SAFETY: the whole rows' elements of a column are side by side inside the
                    // window.
                    unsafe { backward_strip::<W, N>(cut.rows, from, starts, whole) };
                } else {
                    let kept = |row, elements| store(row, _mm512_and_si512(undone(elements), keep));
                    // SAFETY: as above.
                    unsafe { backward_strip::<W, N>(cut.rows, from, starts, kept) };
                }
            } else {
                // SAFETY: as above.
                unsafe { backward_strip::<W, N>(cut.rows, from, starts, store) };
            }
        });
    }
}

/// The tiles of a strip of columns, of which `starts` tells where they are and `store` takes the
/// rows.
///
/// # Safety
/// Behind each start are `rows` elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn backward_strip<const W: usize, const N: usize>(
    rows: usize,
    from: *const u8,
    starts: impl Fn(usize) -> usize,
    mut store: impl FnMut(usize, __m512i),
) {
    for row in tops(rows, N) {
        let mut tile = [_mm512_setzero_si512(); N];
        for (column, register) in tile.iter_mut().enumerate() {
            let squares: [_; 4] = std::array::from_fn(|square| {
                let at = starts(square * N + column) + row * W;
                // SAFETY: as the caller promises, for `N` rows take 16 bytes. The load needs no
                // alignment.
                unsafe { _mm_loadu_si128(from.add(at).cast()) }
            });
            let two = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(squares[0]), squares[1]);
            let three = _mm512_inserti32x4::<2>(two, squares[2]);
            *register = _mm512_inserti32x4::<3>(three, squares[3]);
        }
        turn::<W, N>(&mut tile);
        for (i, register) in tile.into_iter().enumerate() {
            store(row + i, register);
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

/// Ones below the exponents: what is subtracted from them borrows nothing from these.
#[target_feature(enable = "avx512f,avx512bw")]
fn below<const W: usize>(field: Field) -> __m512i {
    every::<W>((1 << field.shift) - 1)
}

/// The larger of each two elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn larger<const W: usize>(a: __m512i, b: __m512i) -> __m512i {
    match W {
        1 => _mm512_max_epu8(a, b),
        2 => _mm512_max_epu16(a, b),
        _ => _mm512_max_epu32(a, b),
    }
}

/// The largest of each column's elements in so many rows: first of every fourth row, so that
/// comparisons wait less for each other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn largest<const W: usize>(rows: usize, row: impl Fn(usize) -> __m512i) -> __m512i {
    let mut four = [_mm512_setzero_si512(); 4];
    for start in (0..rows / 4 * 4).step_by(4) {
        for (at, largest) in four.iter_mut().enumerate() {
            *largest = larger::<W>(*largest, row(start + at));
        }
    }
    let [a, b, c, d] = four;
    let largest = larger::<W>(larger::<W>(a, b), larger::<W>(c, d));
    (rows / 4 * 4..rows).fold(largest, |largest, at| larger::<W>(largest, row(at)))
}

/// The elements of one less those of the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn minus<const W: usize>(a: __m512i, b: __m512i) -> __m512i {
    match W {
        1 => _mm512_sub_epi8(a, b),
        2 => _mm512_sub_epi16(a, b),
        _ => _mm512_sub_epi32(a, b),
    }
}

/// Bases as many as columns of a tile, each at its element's exponent, to bytes.
#[target_feature(enable = "avx512f,avx512bw")]
fn store_bases<const W: usize>(field: Field, at_exponents: __m512i, bases: &mut [u8]) {
    let shift = _mm_cvtsi32_si128(field.shift.cast_signed());
    // Of bytes in pairs the lower ones get nothing from the upper ones, which have zeros below
    // their exponents.
    let bytes = match W {
        1 => _mm512_srl_epi16(at_exponents, shift),
        2 => _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srl_epi16(at_exponents, shift))),
        _ => _mm512_castsi128_si512(_mm512_cvtepi32_epi8(_mm512_srl_epi32(at_exponents, shift))),
    };
    let mut row = [0_u8; ROW];
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), bytes) };
    bases[..wide::<W>()].copy_from_slice(&row[..wide::<W>()]);
}

/// Back again.
#[target_feature(enable = "avx512f,avx512bw")]
fn load_bases<const W: usize>(field: Field, bases: &[u8]) -> __m512i {
    let mut row = [0_u8; ROW];
    row[..wide::<W>()].copy_from_slice(&bases[..wide::<W>()]);
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    let bytes = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
    let shift = _mm_cvtsi32_si128(field.shift.cast_signed());
    match W {
        1 => _mm512_sll_epi16(_mm512_and_si512(bytes, every::<W>(0xff >> field.shift)), shift),
        2 => _mm512_sll_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes)), shift),
        _ => _mm512_sll_epi32(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(bytes)), shift),
    }
}
