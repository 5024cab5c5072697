//! Whoever models hardware, told of the same events as the device's own
//! [observers](super::observers).
//!
//! The rules:
//! * One event for each part of a block that a request moves. It is made where the observers' is,
//!   and only if somebody watches.
//! * A watcher sees, and changes nothing. It is called while a request waits, by many threads at a
//!   time: it keeps the event for later, and drops it rather than wait.

use std::fmt::Debug;
use std::ops::Range;

use super::charge::By;
use super::observers::{Change, Fetch};
use crate::stats::ModelledReport;
use lamina_codec::BLOCK_BYTES;

/// What of one block was moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The block's number in the base window.
    pub block: u64,
    /// Bytes of it that were asked for, or that a host stored; none of a block that was moved for
    /// others of its KV window.
    pub asked: Range<u16>,
    /// Bytes that this device fetched or stored for it, if it did either now.
    pub stored: Option<u16>,
    /// Whether it was stored into.
    pub write: bool,
}

/// Who is told what requests move.
pub trait Watcher: Debug + Send + Sync {
    /// This was moved. Returns at once.
    fn moved(&self, moved: Moved);

    /// What it makes of all so far; a design each.
    fn report(&self) -> Vec<ModelledReport>;
}

/// A number that is at most a bundle's.
fn short(bytes: u64) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

fn within(part: &Range<usize>) -> Range<u16> {
    short(part.start as u64)..short(part.end as u64)
}

/// Tells of a block that was fetched.
pub(super) fn fetched(watcher: &dyn Watcher, fetch: &Fetch<'_>) {
    let mut stored = fetch.stored.map(short);
    for part in fetch.requested {
        watcher.moved(Moved { block: fetch.block, asked: within(part), stored: stored.take(), write: false });
    }
    if stored.is_some() {
        watcher.moved(Moved { block: fetch.block, asked: 0..0, stored, write: false });
    }
}

/// Tells of a block that was stored into, when it is coded: what is staged was moved by nobody yet.
/// What the device does for its own sake is not told.
pub(super) fn stored(watcher: &dyn Watcher, change: &Change<'_>) {
    let Some(coded) = change.coded.as_ref().filter(|coded| coded.by != By::Maintenance) else { return };
    let mut stored = Some(short(coded.charge.bytes));
    for part in change.parts {
        watcher.moved(Moved { block: change.block, asked: within(part), stored: stored.take(), write: true });
    }
    if stored.is_some() {
        // Of a KV window nobody knows any more which bytes of a block a host stored: all, then.
        let asked = if coded.by == By::Store { 0..short(BLOCK_BYTES as u64) } else { 0..0 };
        watcher.moved(Moved { block: change.block, asked, stored, write: true });
    }
}
