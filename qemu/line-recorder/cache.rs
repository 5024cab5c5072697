// A set of the modelled cache: its lines, the one that was used last first. The one that was not
// used for longest leaves.

use super::layout::{DIRTY, WAYS};

/// A line is touched: `key` is where it ends, with [`DIRTY`] if it is written. It is the first of
/// the set then. Gives nothing if the set had the line, or else what left the set for it, 0 if
/// there was room.
#[inline]
pub(crate) fn touch(set: &mut [u64; WAYS], key: u64) -> Option<u64> {
    let mut moved = key;
    for way in set.iter_mut() {
        let held = core::mem::replace(way, moved);
        if (held ^ key) & !DIRTY == 0 {
            set[0] |= held & DIRTY;
            return None;
        }
        moved = held;
    }
    Some(moved)
}
