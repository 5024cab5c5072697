//! Folding the sign of integers: y = x XOR (x >> B−1), all but the sign bit.
//!
//! Folded, small values of either sign have zero upper bits, as sign and magnitude would give, but no value is special:
//! the fold is its own inverse, and the upper bits of y give exactly the upper bits of x, that is x >> n.

use crate::{BlockWords, format::Format};

/// Folds the sign of every element; does nothing to formats that are not integers.
pub fn fold(format: Format, words: &mut BlockWords) {
    match format {
        Format::Int8 => words.iter_mut().for_each(|x| *x ^= if *x & 0x80 == 0 { 0 } else { 0x7f }),
        Format::Int4 => words.iter_mut().for_each(|x| *x ^= (*x >> 3 & 0x11) * 7),
        _ => {}
    }
}

/// Undoes [`fold`], which is its own inverse.
pub fn unfold(format: Format, words: &mut BlockWords) {
    fold(format, words);
}
