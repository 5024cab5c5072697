//! Bit-plane disaggregation (TRACE III-A, eq. 1 and 2): a block of words as planes, and planes as words again.
//!
//! The rules:
//! * Plane `i` holds bit `i` of every element; element `j` is bit `j % 8` of the plane's byte `j / 8`.
//! * A [`PlaneBlock`] holds all planes of a block one behind the other, most significant first, each
//!   [`Format::plane_bytes`] long: 4096 bytes in all, whatever the format.
//! * Integers are folded first ([`fold`]), so that small values of either sign have zero upper planes.
//! * [`join`] with a [`PlaneMask`] treats every other plane as zero and need not have it: the bytes of planes outside the
//!   mask are never looked at.

pub mod fold;
mod portable;

use crate::{BLOCK_BYTES, BlockWords, format::Format};

/// The planes of a block, most significant first.
pub type PlaneBlock = [u8; BLOCK_BYTES];

/// A set of planes: bit `i` stands for plane `i`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlaneMask(pub u32);

impl PlaneMask {
    /// Every plane of a format.
    pub const fn all(format: Format) -> Self {
        match format.planes() {
            32 => Self(u32::MAX),
            planes => Self((1 << planes) - 1),
        }
    }

    /// Whether plane `plane` is in the set.
    pub const fn has(self, plane: usize) -> bool {
        self.0 >> plane & 1 == 1
    }

    /// How many planes the set has.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }
}

/// Where plane `plane` lies in a [`PlaneBlock`].
pub const fn plane_range(format: Format, plane: usize) -> std::ops::Range<usize> {
    let bytes = format.plane_bytes();
    let start = (format.planes() - 1 - plane) * bytes;
    start..start + bytes
}

/// Splits `words` into planes.
///
/// # Panics
/// If the format is `opaque`, which has no planes.
pub fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    let mut folded = *words;
    fold::fold(format, &mut folded);
    portable::split(format, &folded, planes);
}

/// Puts the planes in `mask` together to words; bits of other planes come from zero.
///
/// For integers the prefix of planes in `mask` gives the arithmetic shift's bits and, below them, the sign's.
///
/// # Panics
/// If the format is `opaque`, which has no planes.
pub fn join(format: Format, mask: PlaneMask, planes: &PlaneBlock, words: &mut BlockWords) {
    portable::join(format, mask, planes, words);
    fold::unfold(format, words);
}

/// Clears every bit of `words` that lies in a plane outside `mask`: what a word-major device does to serve a view.
///
/// Integers keep their unfolded bits, so that a prefix of planes has zeros below it where [`join`] has the sign's bits; their views look at neither.
pub fn clear_outside(format: Format, mask: PlaneMask, words: &mut BlockWords) {
    let [a, b, c, d] = match format.bits() {
        32 => mask.0,
        16 => mask.0 << 16 | mask.0,
        8 => mask.0 * 0x0101_0101,
        _ => mask.0 * 0x1111_1111,
    }
    .to_le_bytes();
    for word in words.chunks_exact_mut(4) {
        word.iter_mut().zip([a, b, c, d]).for_each(|(byte, keep)| *byte &= keep);
    }
}

#[cfg(test)]
mod tests;
