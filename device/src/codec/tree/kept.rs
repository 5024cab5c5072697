//! The codes of blocks before, kept for the blocks that follow.
//!
//! The blocks of a tensor are much alike, or of a few kinds, and to make a code takes as long as to code a block with it. So some codes are kept. The rules:
//!
//! * A block is coded by the kept code that takes least for a [`Sample`] of its values, unless that takes more than the least that any code could by what it took for
//!   the block that it was made for and a bit for [`TOLERANCE`] values. Then the block gets a code of its own, which is kept in place of the oldest.
//! * The format knows nothing of it: every stream has its code with it.

use super::{
    code::{Coder, Costs},
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
    /// What values take by each.
    costs: [Costs; MOST_CODES],
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
        Self {
            codes: [const { None }; MOST_CODES],
            costs: [Costs::UNKNOWN; MOST_CODES],
            more: [0; MOST_CODES],
            format: None,
            newest: 0,
            last: 0,
        }
    }

    /// What values take by each code that is kept for blocks of any format; more than any where there is none.
    pub(super) const fn costs(&self) -> &[Costs; MOST_CODES] {
        &self.costs
    }

    /// The code that takes least for a sample of a block of `format`, if that is well enough: by what each takes.
    pub(super) fn best(
        &mut self,
        format: Format,
        sample: &Sample,
        costs: &[u32; MOST_CODES],
    ) -> Option<&Coder> {
        if self.format != Some(format) || !sample.tells() {
            return None;
        }
        let least = *costs.iter().min()?;
        if costs[self.last] > least + ALIKE {
            self.last = costs.iter().position(|cost| *cost == least)?;
        }
        let enough = sample.least() + self.more[self.last] + ENOUGH;
        self.codes[self.last].as_ref().filter(|_| costs[self.last] <= enough)
    }

    /// Keeps a code, by which a sample of the block that it was made for takes this many bits.
    pub(super) fn keep(&mut self, format: Format, coder: Coder, sample: &Sample) {
        if self.format != Some(format) {
            *self = Self { format: Some(format), ..Self::none() };
        }
        self.newest = (self.newest + 1) % MOST_CODES;
        self.last = self.newest;
        self.costs[self.newest] = Costs::of(&coder.code);
        self.more[self.newest] = sample.cost(&self.costs[self.newest]).saturating_sub(sample.least());
        self.codes[self.newest] = Some(coder);
    }
}
