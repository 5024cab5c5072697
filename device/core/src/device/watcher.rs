//! Whoever models hardware or records its work, told of the same events as the device's own
//! [observers](super::observers).
//!
//! The rules:
//! * One event for each part of a block that a request moves. It is made where the observers' is,
//!   and only if somebody watches.
//! * A watcher sees, and changes nothing. It is called while a request waits, by many threads at a
//!   time: it keeps what it wants for later, and drops it rather than wait.
//! * Some watch from the beginning, others for a while. While nobody does, an event costs one load.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::charge::By;
use super::observers::{Change, Fetch};
use crate::stats::ModelledReport;
use lamina_codec::{BLOCK_BYTES, Codec, format::Format, plane::PlaneMask, view::View};
use lamina_store::entry::Entry;

/// What of one block was moved.
#[derive(Clone, Debug)]
pub struct Moved<'a> {
    /// The block's number in the base window.
    pub block: u64,
    /// Bytes of it that were asked for, or that a host stored; none of a block that was moved for
    /// others of its KV window, or read because a part of it was stored.
    pub asked: Range<u16>,
    /// Bytes that this device fetched or stored for it, if it did either now.
    pub stored: Option<u16>,
    /// Whether a device that codes each block by itself fetches or codes it now.
    pub by_itself: bool,
    /// Whether it was stored into.
    pub write: bool,
    /// The format of the elements there.
    pub format: Format,
    /// The view that was read, if it was one.
    pub view: Option<&'a View>,
    /// The planes that were fetched or stored.
    pub planes: PlaneMask,
    /// The entry that it was fetched by or is stored as, if it was either and the mode has entries.
    pub entry: Option<&'a Entry>,
    /// What a generic device stores for the block then, if observers measure it.
    pub as_words: Option<AsWords>,
}

/// A block as a generic device stores it: its words, compressed whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsWords {
    /// Bytes, whole granules; 0 if all of the words are zeros.
    pub bytes: u16,
    /// The codec of the block's owner, which compresses words as it does
    /// [single planes](Codec::generic_name).
    pub codec: Codec,
}

/// Who is told what requests move.
pub trait Watcher: Debug + Send + Sync {
    /// This was moved. Returns at once.
    fn moved(&self, moved: &Moved<'_>);

    /// What it makes of all so far; a design each.
    fn report(&self) -> Vec<ModelledReport>;
}

/// Everybody who watches.
pub(super) struct Watchers {
    /// Whether there is anybody.
    any: AtomicBool,
    all: RwLock<Vec<Arc<dyn Watcher>>>,
}

impl Watchers {
    pub(super) fn new(first: Option<Arc<dyn Watcher>>) -> Self {
        Self { any: AtomicBool::new(first.is_some()), all: RwLock::new(first.into_iter().collect()) }
    }

    pub(super) fn add(&self, watcher: Arc<dyn Watcher>) {
        let mut all = self.all.write();
        all.push(watcher);
        self.any.store(true, Ordering::Relaxed);
    }

    /// Takes a watcher away: when this returns, nobody tells it anything any more.
    pub(super) fn remove(&self, watcher: &Arc<dyn Watcher>) {
        let mut all = self.all.write();
        all.retain(|other| !Arc::ptr_eq(other, watcher));
        self.any.store(!all.is_empty(), Ordering::Relaxed);
    }

    /// Whether anybody watches. Who begins to may miss what goes on at that moment.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn each(&self, tell: impl Fn(&dyn Watcher)) {
        if self.any() {
            self.all.read().iter().for_each(|watcher| tell(&**watcher));
        }
    }
}

/// A number that is at most a bundle's.
pub(super) fn short(bytes: u64) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

fn within(part: &Range<usize>) -> Range<u16> {
    short(part.start as u64)..short(part.end as u64)
}

/// Tells of a block that was fetched.
pub(super) fn fetched(watcher: &dyn Watcher, fetch: &Fetch<'_>, as_words: Option<AsWords>) {
    let mut moved = Moved {
        block: fetch.block,
        asked: 0..0,
        stored: fetch.stored.map(short),
        by_itself: fetch.by_itself,
        write: false,
        format: fetch.format,
        view: fetch.view,
        planes: fetch.planes,
        entry: fetch.entry,
        as_words,
    };
    for part in fetch.requested {
        moved.asked = within(part);
        watcher.moved(&moved);
        moved = Moved { stored: None, by_itself: false, entry: None, ..moved };
    }
    if moved.stored.is_some() || moved.by_itself {
        watcher.moved(&moved);
    }
}

/// Tells of a block that was stored into, when it is coded: what is staged was moved by nobody yet,
/// but a generic device has read what a part of is stored. What this device does for its own sake
/// is not told. A generic device stores the block as `before`, then as `after`.
pub(super) fn stored(
    watcher: &dyn Watcher,
    change: &Change<'_>,
    before: Option<AsWords>,
    after: Option<AsWords>,
) {
    if change.coded.as_ref().is_some_and(|coded| coded.by == By::Maintenance) {
        return;
    }
    let mut moved = Moved {
        block: change.block,
        asked: 0..0,
        stored: None,
        by_itself: false,
        write: false,
        format: Format::Opaque,
        view: None,
        planes: PlaneMask(u32::MAX),
        entry: None,
        as_words: before,
    };
    let (entry, by_itself) = (change.read, change.is_partial());
    if entry.is_some() || by_itself {
        let stored = entry.map(|read| short(read.charged()));
        watcher.moved(&Moved { stored, by_itself, entry, ..moved.clone() });
    }
    let Some(coded) = &change.coded else { return };
    let by_itself = coded.by == By::Store;
    let (stored, entry) = (Some(short(coded.charge.bytes)), coded.entry);
    moved = Moved { stored, by_itself, write: true, entry, as_words: after, ..moved };
    for part in change.parts {
        moved.asked = within(part);
        watcher.moved(&moved);
        moved = Moved { stored: None, by_itself: false, entry: None, ..moved };
    }
    if moved.stored.is_some() {
        // Of a KV window nobody knows any more which bytes of a block a host stored: all, then.
        moved.asked = if by_itself { 0..short(BLOCK_BYTES as u64) } else { 0..0 };
        watcher.moved(&moved);
    }
}
