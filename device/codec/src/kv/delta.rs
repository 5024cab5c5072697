//! Exponents as differences from a base (TRACE eq. 5): δ = β − e, with β the largest exponent of
//! the elements of one channel in one block, or in one window.
//!
//! The rules:
//! * e and β are exponent *fields*, plain numbers: 0 for zeros and subnormals, all ones for
//!   infinities and NaN. As no e is larger than β, δ is never negative and fits the field, so any
//!   bit pattern comes back. Sign and mantissa are not touched.
//! * One infinity or NaN makes β all ones, which costs that channel there some gain and nothing
//!   else.
//! * The same subtraction leads back: e = β − δ. From damaged bytes it gives some field, never a
//!   panic.

#![expect(clippy::inline_always, reason = "only inlined code takes on its caller's processor features")]

use std::ops::Range;

use super::kernel::Kernel;
use crate::{BlockWords, format::Format};

/// Where the exponent is in an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes of the element.
    width: usize,
    /// Its lowest bit.
    pub(super) shift: u32,
    /// Its bits, in place.
    pub(super) mask: u32,
}

/// Differences of whole columns, to be made while a window is put in channel-major order.
#[derive(Debug)]
pub struct ColumnBases<'a> {
    /// The exponents.
    pub field: Field,
    /// They receive the base of each column.
    pub bases: &'a mut [u8],
}

/// Differences of whole columns, to be undone while a window is put back in order.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The exponents.
    pub field: Field,
    /// The base of each column.
    pub bases: &'a [u8],
    /// The bits of an element that count; the others become zero.
    pub keep: u32,
}

impl Field {
    /// The exponent of `format`, if it has one beside a sign, and elements of whole bytes.
    pub const fn of(format: Format) -> Option<Self> {
        if !format.is_float() || format.is_nibble() {
            return None;
        }
        let mask = ((1 << format.exponent_bits()) - 1) << format.mantissa_bits();
        Some(Self { width: format.bits() as usize / 8, shift: format.mantissa_bits(), mask })
    }
}

/// Turns the exponents of `words`, those of a block or of some channels, into differences: `runs`
/// are the elements of each run of one channel, from the first element on. `bases` receive a base
/// each.
///
/// # Panics
/// If there are not as many bases as runs, or the runs are more than the words.
pub(super) fn subtract(field: Field, runs: &[u16], words: &mut [u8], bases: &mut [u8]) {
    Kernel::best().subtract(field, runs, words, bases);
}

/// Undoes [`subtract`].
///
/// # Panics
/// If there are not as many bases as runs, or the runs are more than the block.
pub(super) fn restore(field: Field, runs: &[u16], bases: &[u8], words: &mut BlockWords) {
    Kernel::best().restore(field, runs, bases, words);
}

/// The loops over the elements of one width.
macro_rules! of_width {
    ($name:ident, $word:ty) => {
        #[expect(clippy::allow_attributes, reason = "the attribute below is needed for some widths only")]
        #[allow(clippy::cast_possible_truncation, reason = "a field fits its element, and a base a byte")]
        mod $name {
            use super::{Columns, Field};

            const BYTES: usize = size_of::<$word>();

            #[inline(always)]
            fn load(element: &[u8; BYTES]) -> $word {
                <$word>::from_le_bytes(*element)
            }

            // Lengths are not given: where the compiler knows one it unrolls the loop, and then
            // gathers words one by one.
            #[inline(always)]
            fn replace(run: &mut [[u8; BYTES]], mask: $word, base: $word) {
                for element in run {
                    let word = load(element);
                    let exponent = base.wrapping_sub(word & mask) & mask;
                    *element = (word & !mask | exponent).to_le_bytes();
                }
            }

            #[inline(always)]
            pub(super) fn subtract(field: Field, runs: &[u16], words: &mut [u8], bases: &mut [u8]) {
                let mask = field.mask as $word;
                let mut left = words.as_chunks_mut::<BYTES>().0;
                for (length, base) in runs.iter().zip(bases) {
                    let (run, rest) = left.split_at_mut((*length).into());
                    left = rest;
                    let largest = run.iter().fold(0, |most: $word, element| most.max(load(element) & mask));
                    replace(run, mask, largest);
                    *base = (largest >> field.shift) as u8;
                }
            }

            #[inline(always)]
            pub(super) fn restore(field: Field, runs: &[u16], bases: &[u8], words: &mut [u8]) {
                let mask = field.mask as $word;
                let mut left = words.as_chunks_mut::<BYTES>().0;
                for (length, base) in runs.iter().zip(bases) {
                    let (run, rest) = left.split_at_mut((*length).into());
                    left = rest;
                    replace(run, mask, (<$word>::from(*base) << field.shift) & mask);
                }
            }

            #[inline(always)]
            pub(super) fn restore_row(deltas: &Columns<'_>, bases: &[u8], row: &mut [u8]) {
                let (field, keep) = (deltas.field, deltas.keep as $word);
                let mask = field.mask as $word;
                for (element, base) in row.as_chunks_mut::<BYTES>().0.iter_mut().zip(bases) {
                    let word = load(element);
                    let exponent = (<$word>::from(*base) << field.shift).wrapping_sub(word & mask) & mask;
                    *element = ((word & !mask | exponent) & keep).to_le_bytes();
                }
            }
        }
    };
}

of_width!(bytes1, u8);
of_width!(bytes2, u16);
of_width!(bytes4, u32);

/// [`subtract`], to be compiled for a processor.
#[inline(always)]
pub(super) fn subtract_any(field: Field, runs: &[u16], words: &mut [u8], bases: &mut [u8]) {
    assert_eq!(runs.len(), bases.len(), "a base for each run");
    match field.width {
        1 => bytes1::subtract(field, runs, words, bases),
        2 => bytes2::subtract(field, runs, words, bases),
        _ => bytes4::subtract(field, runs, words, bases),
    }
}

/// [`restore`], to be compiled for a processor.
#[inline(always)]
pub(super) fn restore_any(field: Field, runs: &[u16], bases: &[u8], words: &mut BlockWords) {
    assert_eq!(runs.len(), bases.len(), "a base for each run");
    match field.width {
        1 => bytes1::restore(field, runs, bases, words),
        2 => bytes2::restore(field, runs, bases, words),
        _ => bytes4::restore(field, runs, bases, words),
    }
}

/// Undoes the differences of `columns` in rows of a token-major window, which follow each other in
/// `rows`, `length` bytes each; to be compiled for a processor.
#[inline(always)]
pub(super) fn restore_rows_any(deltas: &Columns<'_>, columns: Range<usize>, length: usize, rows: &mut [u8]) {
    let (width, bases) = (deltas.field.width, &deltas.bases[columns.clone()]);
    for row in rows.chunks_exact_mut(length) {
        let row = &mut row[columns.start * width..columns.end * width];
        match width {
            1 => bytes1::restore_row(deltas, bases, row),
            2 => bytes2::restore_row(deltas, bases, row),
            _ => bytes4::restore_row(deltas, bases, row),
        }
    }
}
