//! Held segments: freed, but a copy of the index may name them, so nobody may write them yet.
//!
//! Copies show the index at *cuts*, which are counted. What was freed before a cut is not named by
//! its copy. So a segment waits until a checkpoint was made of a cut that came after it was freed,
//! and until no snapshot is being saved of a cut that came before.

use std::collections::VecDeque;

/// Segments that wait, in the order in which they were freed.
#[derive(Default)]
pub(super) struct Held {
    /// Cuts so far.
    pub(super) epoch: u64,
    /// The cut of the last checkpoint that was made, if checkpoints are made.
    checkpoint: Option<u64>,
    /// The cut of the snapshot that is being saved.
    snapshot: Option<u64>,
    /// Cuts before each was freed, its first granule and its granules.
    segments: VecDeque<(u64, usize, usize)>,
    pub(super) granules: u64,
}

impl Held {
    /// Whether anything has to be held.
    pub(super) const fn holds(&self) -> bool {
        self.checkpoint.is_some() || self.snapshot.is_some()
    }

    pub(super) fn add(&mut self, granule: usize, length: usize) {
        self.segments.push_back((self.epoch, granule, length));
        self.granules += length as u64;
    }

    /// Takes the first segment that need not be held any more.
    pub(super) fn next(&mut self) -> Option<(usize, usize)> {
        let (freed, granule, length) = *self.segments.front()?;
        if [self.checkpoint, self.snapshot].into_iter().flatten().any(|cut| freed >= cut) {
            return None;
        }
        self.segments.pop_front();
        self.granules -= length as u64;
        Some((granule, length))
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn all(&self) -> Vec<(usize, usize)> {
        self.segments.iter().map(|(_, granule, length)| (*granule, *length)).collect()
    }

    /// Notes a cut: its number.
    pub(super) fn cut(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    /// A checkpoint was made of this cut; 0 before the first.
    pub(super) fn checkpointed(&mut self, cut: u64) {
        self.checkpoint = Some(cut);
    }

    /// A snapshot is being saved of this cut, or none.
    pub(super) fn snapshot(&mut self, cut: Option<u64>) {
        self.snapshot = cut;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn let_go(held: &mut Held) -> Vec<usize> {
        std::iter::from_fn(|| held.next()).map(|(granule, _)| granule).collect()
    }

    #[test]
    fn a_segment_is_held_until_a_checkpoint_that_came_after_it_was_freed() {
        let mut held = Held::default();
        assert!(!held.holds());
        held.checkpointed(0);
        held.add(1, 2);
        assert!(held.holds() && held.granules == 2);
        assert!(let_go(&mut held).is_empty());
        let cut = held.cut();
        held.add(2, 3);
        // Nothing before it is on the disk.
        assert!(let_go(&mut held).is_empty());
        held.checkpointed(cut);
        assert_eq!(let_go(&mut held), [1]);
        let cut = held.cut();
        held.checkpointed(cut);
        assert_eq!((let_go(&mut held), held.granules), (vec![2], 0));
    }

    #[test]
    fn a_snapshot_holds_what_was_freed_since_it_began_whatever_checkpoints_are_made() {
        let mut held = Held::default();
        held.checkpointed(0);
        held.add(1, 1);
        let snapshot = held.cut();
        held.snapshot(Some(snapshot));
        held.add(2, 1);
        for _ in 0..2 {
            let cut = held.cut();
            held.checkpointed(cut);
        }
        assert_eq!(let_go(&mut held), [1]);
        held.snapshot(None);
        assert_eq!(let_go(&mut held), [2]);
    }
}
