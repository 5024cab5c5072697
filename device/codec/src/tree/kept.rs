//! The codes of blocks before, kept for the blocks that follow.
//!
//! The blocks of a tensor are much alike, or of a few kinds, and to make a code takes as long as to code a block with it. So some codes are kept. The rules:
//!
//! * A block is coded by the kept code that takes least for a [`Sample`] of its values, unless that takes more than the least that any code could by what it took for
//!   the block that it was made for and a bit for [`TOLERANCE`] values. Then the block gets a code of its own, which is kept in place of the oldest.
//! * Blocks of bf16 in address order may take [`SPARE`] more by a code in threes, which is quicker, than by another. In windows, where as much was lost by it as gained, they may not.
//! * Blocks of the same channels in the windows of a cache have a place, where they are alike even more. What was chosen for one of them is used untried
//!   for up to [`UNTRIED`] blocks that come there after it, as long as their streams are as long as its was, within a part in [`DRIFT`].
//! * The format knows nothing of it: every stream has its code with it.

use super::{
    code::{Coder, Costs},
    plan::SPARE,
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
/// What a code in threes may take more than another for a sample.
#[expect(clippy::cast_possible_truncation, reason = "fewer than a sample's values")]
const MORE_IN_THREES: u32 = SPARE * SAMPLE as u32 / 64;
/// Codes that are kept.
pub(super) const MOST_CODES: usize = 8;
/// Blocks in the same place, one after another, that are coded untried.
pub(super) const UNTRIED: u8 = 7;
/// How much longer or shorter their streams may be.
const DRIFT: usize = 16;
/// Places that are told apart.
const PLACES: usize = 128;

/// What a block is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Within {
    /// In a tensor, or a part of it, whose blocks are in address order.
    Tensor,
    /// In a window; blocks of the same number, if it has one, are of the same channels.
    Window(Option<usize>),
}

/// Codes that are kept, if any: all for blocks of one format.
pub struct Kept {
    codes: [Option<Coder>; MOST_CODES],
    /// What values take by each.
    costs: [Costs; MOST_CODES],
    /// What each took more than the least for a sample of the block that it was made for, in bits.
    more: [u32; MOST_CODES],
    /// What each has to take less than one in threes to be used instead: nothing if it is one.
    dearer: [u32; MOST_CODES],
    format: Option<Format>,
    /// Where the newest code is.
    newest: usize,
    /// Where the code is that was used last.
    last: usize,
    /// What was chosen last in each place.
    chosen: [Option<Chosen>; PLACES],
    /// What the next block is part of.
    within: Within,
}

/// What was chosen for a block by a sample.
#[derive(Clone, Copy)]
struct Chosen {
    /// Where the code is.
    code: usize,
    /// Bytes of the block's stream.
    length: usize,
    /// Blocks that were coded by it untried.
    untried: u8,
}

impl Kept {
    /// None.
    pub const fn none() -> Self {
        Self {
            codes: [const { None }; MOST_CODES],
            costs: [Costs::UNKNOWN; MOST_CODES],
            more: [0; MOST_CODES],
            dearer: [0; MOST_CODES],
            format: None,
            newest: 0,
            last: 0,
            chosen: [None; PLACES],
            within: Within::Tensor,
        }
    }

    /// Says what the next blocks are part of.
    pub(crate) const fn set_within(&mut self, within: Within) {
        self.within = within;
    }

    /// The place of the next block, if it has one.
    const fn place(&self) -> Option<usize> {
        match self.within {
            Within::Window(Some(place)) => Some(place % PLACES),
            Within::Window(None) | Within::Tensor => None,
        }
    }

    /// The code at `at`, which was named before.
    pub(super) fn code(&self, at: usize) -> &Coder {
        self.codes[at].as_ref().expect("a code that is kept")
    }

    /// Where the code is that is to be used untried, if there is one.
    pub(super) fn untried(&self, format: Format) -> Option<usize> {
        let chosen = self.chosen[self.place()?].filter(|chosen| chosen.untried < UNTRIED)?;
        (self.format == Some(format)).then_some(chosen.code)
    }

    /// Whether a stream of this length, written by the code of [`Self::untried`], is as long as it was to be.
    pub(super) fn is_as_before(&mut self, length: usize) -> bool {
        let Some(chosen) = self.place().and_then(|place| self.chosen[place].as_mut()) else { return false };
        chosen.untried += 1;
        length.abs_diff(chosen.length) <= chosen.length / DRIFT
    }

    /// What values take by each code that is kept for blocks of any format; more than any where there is none.
    pub(super) const fn costs(&self) -> &[Costs; MOST_CODES] {
        &self.costs
    }

    /// Where the code is that takes least for a sample of a block of `format`, or a little more in threes, if that is well enough: by what each takes.
    pub(super) fn best(
        &mut self,
        format: Format,
        sample: &Sample,
        costs: &[u32; MOST_CODES],
    ) -> Option<usize> {
        if self.format != Some(format) || !sample.tells() {
            return None;
        }
        let dearer = if self.within == Within::Tensor { self.dearer } else { [0; MOST_CODES] };
        let prices: [u32; MOST_CODES] = std::array::from_fn(|at| costs[at] + dearer[at]);
        let least = sample.least();
        // Where the one in threes is not well enough, another may be.
        [&prices, costs].into_iter().find_map(|prices| {
            let lowest = *prices.iter().min()?;
            if prices[self.last] > lowest + ALIKE {
                self.last = prices.iter().position(|price| *price == lowest)?;
            }
            (costs[self.last] <= least + self.more[self.last] + ENOUGH).then_some(self.last)
        })
    }

    /// Notes that the code which [`Self::best`] gave, or [`Self::keep`] got, has made a stream of this length.
    pub(super) fn choose(&mut self, length: usize) {
        if let Some(place) = self.place() {
            self.chosen[place] = Some(Chosen { code: self.last, length, untried: 0 });
        }
    }

    /// Keeps a code, by which a sample of the block that it was made for takes this many bits.
    pub(super) fn keep(&mut self, format: Format, coder: Coder, sample: &Sample) {
        if self.format != Some(format) {
            *self = Self { format: Some(format), within: self.within, ..Self::none() };
        }
        self.newest = (self.newest + 1) % MOST_CODES;
        self.last = self.newest;
        // Who had the code that goes chooses anew.
        for chosen in &mut self.chosen {
            *chosen = chosen.filter(|chosen| chosen.code != self.newest);
        }
        self.costs[self.newest] = Costs::of(&coder.code);
        let is_slower = format == Format::Bf16 && !coder.is_in_threes();
        self.dearer[self.newest] = if is_slower { MORE_IN_THREES } else { 0 };
        self.more[self.newest] = sample.cost(&self.costs[self.newest]).saturating_sub(sample.least());
        self.codes[self.newest] = Some(coder);
    }
}
