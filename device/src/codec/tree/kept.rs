//! The codes of blocks before, kept for the blocks that follow.
//!
//! The blocks of a tensor are much alike, or of a few kinds, and to make a code takes as long as to code a block with it. So some codes are kept. The rules:
//!
//! * A block's values are counted. They are coded by the kept code that takes least for them, unless that takes more than the least that any code could by what it took for
//!   the block that it was made for and a bit for [`TOLERANCE`] elements. Then the block gets a code of its own, which is kept in place of the oldest.
//! * The format knows nothing of it: every stream has its code with it.

use super::code::Coder;
use crate::format::Format;

/// One bit more for so many elements is well enough.
const TOLERANCE: u32 = 24;
/// Codes that are kept.
const MOST_CODES: usize = 6;

/// Codes that are kept, if any: all for blocks of one format.
pub struct Kept {
    codes: [Option<Made>; MOST_CODES],
    format: Option<Format>,
    /// The newest code's place.
    newest: usize,
}

/// A code, and what it took more than the least for the block that it was made for, in bits.
struct Made {
    coder: Coder,
    more: u32,
}

impl Kept {
    /// None.
    pub const fn none() -> Self {
        Self { codes: [const { None }; MOST_CODES], format: None, newest: 0 }
    }

    /// The code that takes least for a block of `elements` of `format`, if that is well enough: by what each takes, and any at `least`.
    pub(super) fn best(
        &self,
        format: Format,
        elements: usize,
        least: u32,
        cost: impl Fn(&Coder) -> u32,
    ) -> Option<&Coder> {
        if self.format != Some(format) {
            return None;
        }
        let codes = self.codes.iter().flatten().map(|made| (cost(&made.coder), made));
        let (cost, made) = codes.min_by_key(|(cost, _)| *cost)?;
        let elements = u32::try_from(elements).expect("a block's elements");
        (cost <= least + made.more + elements / TOLERANCE).then_some(&made.coder)
    }

    /// Keeps a code that took this many bits `more` than the least.
    pub(super) fn keep(&mut self, format: Format, coder: Coder, more: u32) {
        if self.format != Some(format) {
            *self = Self { format: Some(format), ..Self::none() };
        }
        self.newest = (self.newest + 1) % MOST_CODES;
        self.codes[self.newest] = Some(Made { coder, more });
    }
}
