//! Folding the sign of integers: y = x XOR (x >> B−1), all but the sign bit.
//!
//! Folded, small values of either sign have zero upper bits, as sign and magnitude would give, but
//! no value is special: the fold is its own inverse, and the upper bits of y give exactly the upper
//! bits of x, that is x >> n.
//!
//! In planes: the sign's is added to every other one, XOR. So the kernels fold on the way, without
//! a pass of its own.

use crate::format::Format;

/// Which integers a word is full of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    /// None: nothing is folded.
    No,
    /// int8.
    Bytes,
    /// int4.
    Nibbles,
}

impl Fold {
    pub(super) const fn of(format: Format) -> Self {
        match format {
            Format::Int8 => Self::Bytes,
            Format::Int4 => Self::Nibbles,
            _ => Self::No,
        }
    }

    /// Folds the elements of a word, or unfolds them: it is the same.
    pub(super) const fn word(self, x: u64) -> u64 {
        match self {
            Self::No => x,
            Self::Bytes => x ^ ((x >> 7 & 0x0101_0101_0101_0101) * 0x7f),
            Self::Nibbles => x ^ ((x >> 3 & 0x1111_1111_1111_1111) * 7),
        }
    }
}
