//! The codes of blocks before, kept for the blocks that follow.
//!
//! Counting a block's values and making a code of them takes as long as all the rest of coding it, and the blocks of a tensor are much alike, or of a few
//! kinds. So some codes are kept. The rules:
//!
//! * A block is first coded by the kept code that takes least for a sample of its elements. What is written then shows how well the code fits
//!   ([`Tally::loss`](super::plan::Tally::loss)): if that is worse than for the block that the code was made for by more than a bit for
//!   [`TOLERANCE`] elements, or the stream is not shorter than the planes, the block gets a code of its own, which is kept in place of the oldest.
//! * After [`MOST_USES`] blocks a code is forgotten in any case, for not all that fits badly shows.
//! * The format knows nothing of it: every stream has its code with it.

use super::{Kernel, code::Coder, plan::Written};
use crate::format::Format;

/// One bit more for so many elements is well enough.
const TOLERANCE: usize = 32;
/// Blocks that a code is used for besides its own.
const MOST_USES: u32 = 31;
/// Codes that are kept.
const MOST_CODES: usize = 6;

/// Codes that are kept, if any: all for blocks of one format.
pub struct Kept {
    codes: [Option<Made>; MOST_CODES],
    format: Option<Format>,
    /// The oldest code's place.
    oldest: usize,
}

/// A code, and what it was made for.
struct Made {
    coder: Coder,
    loss: u32,
    uses: u32,
}

impl Kept {
    /// None.
    pub const fn none() -> Self {
        Self { codes: [const { None }; MOST_CODES], format: None, oldest: 0 }
    }

    /// The place of the code that takes least, if there is one for blocks of `format`.
    fn best(&self, kernel: Kernel, format: Format, values: &[u8]) -> Option<usize> {
        if self.format != Some(format) {
            return None;
        }
        let codes = self.codes.iter().enumerate();
        let codes = codes.filter_map(|(place, made)| made.as_ref().map(|made| (place, made)));
        codes.min_by_key(|(_, made)| kernel.sample(values, &made.coder)).map(|(place, _)| place)
    }
}

impl Kernel {
    /// Codes values by a code that is kept if that does nearly as well as their own, or else by that, which is kept.
    pub(super) fn encode_kept(
        self,
        format: Format,
        values: &[u8],
        kept: &mut Kept,
        out: &mut [u8],
    ) -> Option<usize> {
        if let Some(place) = kept.best(self, format, values)
            && let Some(made) = &mut kept.codes[place]
        {
            let most = made.loss + u32::try_from(values.len() / TOLERANCE).expect("a block's elements");
            if let Some(written) = self.levels(format, values, &made.coder, most, out) {
                made.uses += 1;
                if made.uses >= MOST_USES {
                    kept.codes[place] = None;
                }
                return Some(written.length);
            }
        }
        let (coder, Written { length, loss }) = self.make(format, values, out)?;
        if let Some(coder) = coder {
            if kept.format != Some(format) {
                *kept = Kept { format: Some(format), ..Kept::none() };
            }
            let place = kept.codes.iter().position(Option::is_none).unwrap_or_else(|| {
                kept.oldest = (kept.oldest + 1) % MOST_CODES;
                kept.oldest
            });
            kept.codes[place] = Some(Made { coder, loss, uses: 0 });
        }
        Some(length)
    }
}
