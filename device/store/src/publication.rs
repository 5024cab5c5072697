//! Publication: in which order a block's entry, its segment and its record in the journal change,
//! and who waits for whom.
//!
//! The rules:
//! * Blocks share locks, *stripes*, by their number. Who reads a block holds its stripe while it
//!   copies stored bytes out; who changes its entry holds it alone.
//! * A new segment is stored before the entry that names it is put, and the old one is freed after
//!   the stripe was let go. Tidying, which moves a bundle, looks whether its segment is still the
//!   block's, moves, puts and frees without letting go.
//! * Who changes several blocks takes their stripes in the stripes' order.
//! * An entry is recorded before it is put, and the record is forgotten afterwards: what a killed
//!   process leaves is whole in one of the two.
//!
//! Nothing here knows what an entry or a segment is. `device/models` runs this file in every order
//! that threads and memory allow.

use std::ops::Range;

use super::sync::{Ordering, RwLock, RwLockWriteGuard, fence};

/// Locks over the blocks.
pub(super) struct Stripes(Vec<RwLock<()>>);

/// The stripes of blocks that nobody else reads or changes.
pub(super) struct Held<Guard>(Guard);

impl Stripes {
    pub(super) fn new(count: usize) -> Self {
        Self((0..count).map(|_| RwLock::new(())).collect())
    }

    /// Looks at a block that nobody changes meanwhile.
    pub(super) fn read<T>(&self, block: u64, look: impl FnOnce() -> T) -> T {
        let _stripe = self.0[self.number(block)].read();
        look()
    }

    /// Takes hold of a block.
    pub(super) fn hold(&self, block: u64) -> Held<RwLockWriteGuard<'_, ()>> {
        Held(self.0[self.number(block)].write())
    }

    /// Takes hold of blocks, no more than there are stripes.
    pub(super) fn hold_all(&self, blocks: Range<u64>) -> Held<Vec<RwLockWriteGuard<'_, ()>>> {
        let mut numbers: Vec<_> = blocks.map(|block| self.number(block)).collect();
        // So that two of these never wait for each other.
        numbers.sort_unstable();
        Held(numbers.into_iter().map(|number| self.0[number].write()).collect())
    }

    /// Moves a block's bundle: `copy` stores it elsewhere if it is where it was, `put` has the
    /// entry name the copy, `free` frees where it was.
    pub(super) fn shift<T, E>(
        &self,
        block: u64,
        copy: impl FnOnce() -> Result<Option<T>, E>,
        put: impl FnOnce(&T),
        free: impl FnOnce(&T),
    ) -> Result<(), E> {
        let _stripe = self.0[self.number(block)].write();
        if let Some(copied) = copy()? {
            put(&copied);
            free(&copied);
        }
        Ok(())
    }

    fn number(&self, block: u64) -> usize {
        // Neighbouring blocks take different stripes: a sequential reader and a writer behind it do
        // not meet.
        usize::try_from(block % self.0.len() as u64).expect("less than a number of locks")
    }
}

impl<Guard> Held<Guard> {
    /// Has `put` change the entries, and lets go. What the old ones named can be freed then.
    pub(super) fn publish<T>(self, put: impl FnOnce() -> T) -> T {
        let done = put();
        drop(self.0);
        done
    }
}

/// Makes a record of what `body` writes; it is valid once it has its count.
pub(super) fn record(body: impl FnOnce(), set_count: impl FnOnce(u64), count: u64) {
    body();
    fence(Ordering::Release);
    set_count(count);
    fence(Ordering::Release);
}

/// Forgets a record, whose entries were put.
pub(super) fn forget(set_count: impl FnOnce(u64)) {
    fence(Ordering::Release);
    set_count(0);
}
