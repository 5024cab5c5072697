//! More levels of a first stage behind which two nodes are left: the bits of the elements that go
//! on are spread to where these elements are among all.
//!
//! That takes less than to move elements together that are half of all, and it goes on as long as
//! two nodes are left. So what comes of it is a stage of rows, as where one node is left at once.

use std::arch::x86_64::_pdep_u64;

use super::super::{Malformed, code::LONGEST, masks::read};
use super::{
    MASKS,
    stage::{GoesOn, Rows},
    table,
    walk::Cursor,
};

/// Levels of such a stage at most.
const MAX_LEVELS: usize = 4;

/// How a code's levels are spread.
pub(super) struct Spread {
    /// Levels of the first stage.
    pub levels: usize,
    /// By the bits that an element has on them, zeros for those that it does not have: its leaf.
    pub leaves: [u8; 1 << MAX_LEVELS],
}

impl Spread {
    /// For a code with so many leaves on each level, if there is something to spread: behind two
    /// levels with two leaves two nodes are left, and then two again, or one.
    pub(super) fn of(count: [u8; LONGEST]) -> Option<Self> {
        let [0, 2, others @ ..] = &count else { return None };
        let levels = 3 + others.iter().take_while(|count| **count == 2).count();
        if levels > MAX_LEVELS || count[levels - 1] != 3 {
            return None;
        }
        let mut leaves = [0; 1 << MAX_LEVELS];
        for (bits, leaf) in leaves.iter_mut().enumerate().take(1 << levels) {
            *leaf = table::leaf(count, 0..levels, bits);
        }
        Some(Self { levels, leaves })
    }
}

/// Brings the rows of `root`, two levels that were gone through and have two leaves, to `rows`, and
/// the levels behind them down to `levels`, spread. Which go on have all come to one node: how many
/// they are.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt")]
pub(super) fn spread(
    cursor: &mut Cursor<'_>,
    root: &Rows<'_>,
    levels: usize,
    rows: &mut [[[u8; 8]; MASKS]; LONGEST],
    goes_on: &mut GoesOn,
) -> Result<usize, Malformed> {
    let vectors = root.pitch;
    for (level, row) in rows[..2].iter_mut().enumerate() {
        row[..vectors].copy_from_slice(&root.bits[level * vectors..][..vectors]);
    }
    // All that have a one on the first level are at a node, which the second tells.
    let mut alive = 0;
    for ((mask, _), bits) in goes_on.words().zip(&rows[0][..vectors]) {
        *mask = u64::from_le_bytes(*bits);
        alive += mask.count_ones() as usize;
    }
    for level in 2..levels {
        let mut at = cursor.step(alive)?;
        alive = 0;
        let (above, row) = rows[..=level].split_at_mut(level);
        let nodes = &above[level - 1][..vectors];
        for (((mask, before), node), row) in goes_on.words().zip(nodes).zip(&mut row[0]) {
            let count = mask.count_ones() as usize;
            let bytes = cursor.stream[at / 8..].first_chunk().expect("eight bytes");
            let mut bits = u64::from_le_bytes(*bytes) >> (at % 8);
            if count > 57 {
                bits = read(cursor.stream, at);
            }
            let bits = _pdep_u64(bits, *mask);
            *row = bits.to_le_bytes();
            at += count;
            // Two leaves are those of the first node, a third one is the second's first.
            let third = if level + 1 == levels { bits } else { u64::MAX };
            *mask &= u64::from_le_bytes(*node) & third;
            *before = alive as u64;
            alive += mask.count_ones() as usize;
        }
    }
    Ok(alive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_told_by_their_bits() {
        let spread = Spread::of([0, 2, 2, 3, 2, 0, 0]).expect("two nodes, twice");
        assert_eq!(spread.levels, 4);
        // 00 and 01; 100 and 101; 1100, 1101 and 1110.
        for (bits, leaf) in [(0b0000, 0), (0b0100, 1), (0b1000, 2), (0b1010, 3)] {
            assert_eq!(spread.leaves[bits], leaf, "{bits:#b}");
        }
        assert_eq!(&spread.leaves[0b1100..0b1111], &[4, 5, 6]);
    }

    #[test]
    fn other_codes_are_not_spread() {
        for count in
            [[0, 3, 1, 1, 2, 0, 0], [0, 2, 1, 6, 0, 0, 0], [0, 2, 4, 0, 0, 0, 0], [0, 2, 2, 2, 3, 2, 0]]
        {
            assert!(Spread::of(count).is_none(), "{count:?}");
        }
    }
}
