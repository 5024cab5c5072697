//! The arithmetic of addresses and aliases: which elements bytes of a view show, and where these
//! lie in the tensor.
//!
//! Element e of a tensor has bits [e·width, (e + 1)·width) of the tensor and bits [e·bits, (e +
//! 1)·bits) of the view. What is asked for is answered in groups of eight elements, which take
//! whole bytes in both: `width` bytes of the tensor and `bits` of the view. Nothing here knows
//! devices, and the tests try every range of small geometries.

use std::ops::Range;

/// How the elements of a view lie beside those of its tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    /// Bits of an element in the tensor.
    pub(super) width: u64,
    /// Bits of an element in the view.
    pub(super) bits: u64,
    /// Elements of a block, a multiple of eight.
    pub(super) block_elements: u64,
}

/// The place of a piece of an alias in its tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The block, counted from the tensor's first.
    pub(crate) block: u64,
    /// Elements of the block, multiples of eight.
    pub(crate) elements: Range<usize>,
    /// Where the piece begins in the view, in bytes.
    pub(crate) offset: u64,
}

impl Geometry {
    /// The pieces that bytes `range` of the view need, a block each.
    pub(super) fn pieces(self, range: Range<u64>) -> impl Iterator<Item = Piece> {
        let bits = self.bits;
        // Groups of eight elements take `bits` whole bytes.
        let groups = range.start / bits..range.end.div_ceil(bits);
        let per_block = self.block_elements / 8;
        let blocks = groups.start / per_block..groups.end.div_ceil(per_block);
        blocks.map(move |block| {
            let first = (block * per_block).max(groups.start);
            let last = ((block + 1) * per_block).min(groups.end);
            let inside = |group: u64| {
                usize::try_from((group - block * per_block) * 8).expect("at most a block's elements")
            };
            Piece { block, elements: inside(first)..inside(last), offset: first * bits }
        })
    }

    /// The bytes of block `block` that belong to bytes `range` of the view: neighbouring ranges
    /// have neighbouring ones.
    pub(super) fn words_of(self, block: u64, range: &Range<u64>) -> Range<usize> {
        let block_bytes = self.block_elements / 8 * self.bits;
        let inside = |at: u64| {
            let at = at.saturating_sub(block * block_bytes).min(block_bytes);
            usize::try_from(at * self.width / self.bits).expect("at most a block")
        };
        inside(range.start)..inside(range.end)
    }

    /// The bytes of a view of `length` bytes that show any of `bytes` of the tensor.
    pub(super) fn over(self, bytes: Range<u64>, length: u64) -> Option<Range<u64>> {
        if bytes.start >= bytes.end {
            return None;
        }
        // Whole groups of eight elements, so that packed elements at the edges are included.
        let from = bytes.start / self.width * self.bits;
        let to = (bytes.end.div_ceil(self.width) * self.bits).min(length);
        Some(from..to).filter(|range| !range.is_empty())
    }
}

#[cfg(test)]
mod tests;
