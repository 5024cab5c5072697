//! The codes of blocks before, kept for the blocks that follow.
//!
//! The blocks of a tensor are much alike, or of a few kinds, and to make a code takes as long as to code a block with it. So some codes are kept. The rules:
//!
//! * A block is coded by the kept code that takes least for a [`Sample`] of its values, unless that takes more than the least that any code could by what it took for
//!   the block that it was made for and a bit for [`TOLERANCE`] values. Then the block gets a code of its own, which is kept in place of the oldest.
//! * The format knows nothing of it: every stream has its code with it.

use super::{
    code::Coder,
    sample::{SAMPLE, Sample},
};
use crate::format::Format;

/// One bit more for so many values is well enough.
const TOLERANCE: usize = 24;
/// What a code may take more than the least for a sample.
#[expect(clippy::cast_possible_truncation, reason = "fewer than a sample's values")]
const ENOUGH: u32 = (SAMPLE / TOLERANCE) as u32;
/// How much more a code may take than another and still be used as it was for the block before: the processor foresees what it did then.
const ALIKE: u32 = 4;
/// Codes that are kept.
pub(super) const MOST_CODES: usize = 8;

/// Codes that are kept, if any: all for blocks of one format.
pub struct Kept {
    codes: [Option<Coder>; MOST_CODES],
    /// What each took more than the least for a sample of the block that it was made for, in bits.
    more: [u32; MOST_CODES],
    format: Option<Format>,
    /// The newest code's place.
    newest: usize,
    /// The place of the code that was used last.
    last: usize,
}

impl Kept {
    /// None.
    pub const fn none() -> Self {
        Self { codes: [const { None }; MOST_CODES], more: [0; MOST_CODES], format: None, newest: 0, last: 0 }
    }

    /// The code that takes least for a sample of a block of `format`, if that is well enough: by what each takes, as `costs` tells of them.
    pub(super) fn best(
        &mut self,
        format: Format,
        sample: &Sample,
        costs: impl FnOnce(&[Option<Coder>; MOST_CODES]) -> [u32; MOST_CODES],
    ) -> Option<&Coder> {
        if self.format != Some(format) || !sample.tells() {
            return None;
        }
        let costs = costs(&self.codes);
        let least = costs.into_iter().min()?;
        if costs[self.last] > least.saturating_add(ALIKE) {
            self.last = costs.iter().position(|cost| *cost == least)?;
        }
        let enough = sample.least() + self.more[self.last] + ENOUGH;
        self.codes[self.last].as_ref().filter(|_| costs[self.last] <= enough)
    }

    /// Keeps a code that took this many bits `more` than the least.
    pub(super) fn keep(&mut self, format: Format, coder: Coder, more: u32) {
        if self.format != Some(format) {
            *self = Self { format: Some(format), ..Self::none() };
        }
        self.newest = (self.newest + 1) % MOST_CODES;
        self.last = self.newest;
        self.codes[self.newest] = Some(coder);
        self.more[self.newest] = more;
    }
}
