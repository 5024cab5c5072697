//! Pages of one file that were discarded while the page cache may still hold what they held.
//!
//! The kernel keeps a page until it is told to drop it, and may write it back until then. What
//! comes so of a page that was discarded is older than the discard, or was stored while that was
//! under way: it is *not* stored. A page that the kernel has read, or that was written whole, since
//! the discard is another one; what comes of that is newer, and is stored. So:
//!
//! * A page is marked when the device has dropped it, and until then written back as ever: a
//!   discard that fails in the middle takes nothing of what it did not reach.
//! * The mark goes when the page is read or written whole, and when the kernel has let go of the
//!   old one.
//! * Dropping and marking are one step to every read and write of the file: see [`Gate`].
//!
//! Of a page that is discarded in part the old bytes are taken out of what comes, in the same way,
//! until the kernel has let go of it. Where the kernel itself zeroes the part (a hole punched
//! through the mount), nothing is marked: a store into the part at the same moment is a race.

use std::ops::Range;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::flusher::Flusher;
use super::invalidations::join_touching;
use super::served_pages::{PAGE_BYTES, ServedPages};

/// How often the kernel is asked to let go of a page that is stored into at just that moment.
const MAX_ROUNDS: usize = 1000;

/// Held by everybody who reads or writes the device for the page cache, and alone by who drops
/// something.
pub(super) type Gate = RwLock<()>;
/// A read or write under way.
pub(super) type Reading<'a> = RwLockReadGuard<'a, ()>;

/// The marks of one file.
pub(super) struct DroppedPages {
    /// Whole pages that the kernel is told to let go of.
    requested: ServedPages,
    /// Whole pages that the kernel lets go of by itself, nobody knows when.
    punched: ServedPages,
    /// Parts of pages that the kernel is told to let go of.
    parts: Mutex<Vec<Range<u64>>>,
}

/// Who sees to it that the kernel lets go of what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LetGo {
    /// Whoever discards tells it to.
    Requested,
    /// It punched a hole.
    ByItself,
}

impl DroppedPages {
    /// Of a file of so many bytes, in which nothing is marked.
    pub(super) fn new(bytes: u64) -> Self {
        Self { requested: ServedPages::new(bytes), punched: ServedPages::new(bytes), parts: Mutex::default() }
    }

    /// The device has dropped a range. The gate is held alone.
    pub(super) fn mark(&self, range: &Range<u64>, let_go: LetGo) {
        let whole = whole_pages(range);
        if let_go == LetGo::ByItself {
            return self.punched.mark(whole);
        }
        let ends = if whole.is_empty() {
            [range.clone(), 0..0]
        } else {
            [range.start..whole.start, whole.end..range.end]
        };
        self.parts.lock().extend(ends.into_iter().filter(|part| !part.is_empty()));
        self.requested.mark(whole);
    }

    /// The kernel reads pages that touch a range: it has none there. The gate is held.
    pub(super) fn read(&self, range: &Range<u64>) {
        self.written(&pages_of(range));
    }

    /// A range is written. The gate is held.
    pub(super) fn written(&self, range: &Range<u64>) {
        let whole = whole_pages(range);
        self.punched.take(whole.clone(), &mut Vec::new());
        self.requested.take(whole, &mut Vec::new());
        self.take_parts(range);
    }

    /// The kernel was told to let go of what it had of a range, and has.
    pub(super) fn forget(&self, range: &Range<u64>) {
        self.requested.take(whole_pages(range), &mut Vec::new());
        self.take_parts(range);
    }

    /// The whole pages of a range that are not to be stored.
    pub(super) fn pages(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut pages = self.requested.marked(range.clone());
        pages.append(&mut self.punched.marked(range.clone()));
        join_touching(&mut pages);
        pages
    }

    /// The parts of other pages that are not to be stored.
    pub(super) fn parts(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let parts = self.parts.lock();
        parts.iter().filter(|part| part.start < range.end && range.start < part.end).cloned().collect()
    }

    /// Has the kernel let go of a range of the file by `invalidate`. It keeps a page that is stored
    /// into while it does: one that was discarded must not stay, for it would be written back some
    /// day.
    pub(super) fn invalidate(
        &self,
        range: &Range<u64>,
        flusher: Option<&Flusher>,
        invalidate: &mut impl FnMut(&Range<u64>),
    ) {
        invalidate(range);
        for _ in 0..MAX_ROUNDS {
            let mut old = self.pages(range);
            old.extend(self.parts(range).into_iter().map(|part| pages_of(&part)));
            old.retain(|pages| flusher.is_some_and(|file| file.surely_cached(pages)));
            if old.is_empty() {
                return;
            }
            old.iter().for_each(&mut *invalidate);
        }
        // What is stored into them is worth more than that they were discarded.
        tracing::warn!(?range, "discarded pages are stored into all the time, and keep what they held");
        self.read(range);
    }

    fn take_parts(&self, range: &Range<u64>) {
        let mut parts = self.parts.lock();
        if parts.is_empty() {
            return;
        }
        let left =
            |part: Range<u64>| [part.start..part.end.min(range.start), part.start.max(range.end)..part.end];
        *parts = parts.drain(..).flat_map(left).filter(|part| !part.is_empty()).collect();
    }
}

/// The pages that a range touches.
fn pages_of(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES)
}

/// The whole pages of a range.
fn whole_pages(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(PAGE_BYTES);
    start..(range.end / PAGE_BYTES * PAGE_BYTES).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(pages: &DroppedPages) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let all = 0..1 << 20;
        (pages.pages(&all), pages.parts(&all))
    }

    #[test]
    fn a_page_is_marked_until_there_is_another_in_its_place() {
        for let_go in [LetGo::Requested, LetGo::ByItself] {
            let pages = DroppedPages::new(1 << 20);
            pages.mark(&(100..5 * 4096 + 200), let_go);
            // Read, and written whole or in part.
            pages.read(&(2 * 4096 + 5..2 * 4096 + 6));
            pages.written(&(3 * 4096..4 * 4096 + 4095));
            assert_eq!(marks(&pages).0, [4096..2 * 4096, 4 * 4096..5 * 4096]);
            // The kernel lets go of what it was told to; what it punched it may have long
            // afterwards.
            pages.forget(&(0..1 << 20));
            let left: &[_] =
                if let_go == LetGo::Requested { &[] } else { &[4096..2 * 4096, 4 * 4096..5 * 4096] };
            assert_eq!(marks(&pages).0, left);
        }
    }

    #[test]
    fn parts_are_marked_where_the_kernel_does_not_zero_them_itself() {
        let pages = DroppedPages::new(1 << 20);
        for range in [10..20, 4000..9000] {
            pages.mark(&range, LetGo::ByItself);
        }
        assert_eq!(marks(&pages), (std::iter::once(4096..8192).collect(), Vec::new()));
        pages.mark(&(10..20), LetGo::Requested);
        pages.mark(&(4000..9000), LetGo::Requested);
        assert_eq!(marks(&pages).1, [10..20, 4000..4096, 8192..9000]);
        pages.written(&(15..4010));
        pages.read(&(8192..8193));
        assert_eq!(marks(&pages).1, [10..15, 4010..4096]);
        pages.forget(&(0..1 << 20));
        assert_eq!(marks(&pages).1, []);
    }
}
