//! Ranges of one window that the kernel is to drop from its page cache, in turn.
//!
//! The kernel waits in that call for requests of the same pages that are under way, so the thread
//! that makes it can be none that answers them, and each window has one of its own.

use std::ops::Range;

use parking_lot::{Condvar, Mutex};

use super::ServeError;
use super::served_pages::push;

/// The queue of a window.
#[derive(Default)]
pub(super) struct Invalidations {
    queue: Mutex<Queue>,
    /// Signalled when something was queued or the end has come.
    queued: Condvar,
    /// Signalled when a batch is through.
    drained: Condvar,
}

#[derive(Default)]
struct Queue {
    ranges: Vec<Range<u64>>,
    /// Batches of which these are the next: what is queued now is through when `batches_done`
    /// exceeds it.
    batch: u64,
    batches_done: u64,
    closed: bool,
}

impl Invalidations {
    /// Queues ranges.
    pub(super) fn queue(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut ranges = ranges.into_iter().peekable();
        if ranges.peek().is_none() {
            return;
        }
        let mut queue = self.queue.lock();
        ranges.for_each(|range| push(&mut queue.ranges, range));
        drop(queue);
        self.queued.notify_one();
    }

    /// Waits until everything that was queued before is invalidated.
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub(super) fn drain(&self) -> Result<(), ServeError> {
        let mut queue = self.queue.lock();
        // What was taken last is under way; what is queued is the batch after it.
        let batch = if queue.ranges.is_empty() { queue.batch } else { queue.batch + 1 };
        while queue.batches_done < batch {
            if queue.closed {
                return Err(ServeError::Closing);
            }
            self.drained.wait(&mut queue);
        }
        Ok(())
    }

    /// Calls `invalidate` for everything that is queued, until [`Self::close`].
    pub(super) fn run_until_closed(&self, mut invalidate: impl FnMut(&Range<u64>)) {
        let mut batch = Vec::new();
        loop {
            let mut queue = self.queue.lock();
            while queue.ranges.is_empty() && !queue.closed {
                self.queued.wait(&mut queue);
            }
            if queue.closed {
                return;
            }
            std::mem::swap(&mut queue.ranges, &mut batch);
            queue.batch += 1;
            let number = queue.batch;
            drop(queue);
            join_touching(&mut batch);
            batch.drain(..).for_each(|range| invalidate(&range));
            self.queue.lock().batches_done = number;
            self.drained.notify_all();
        }
    }

    /// Ends invalidating; whoever waits gets [`ServeError::Closing`].
    pub(super) fn close(&self) {
        self.queue.lock().closed = true;
        self.queued.notify_all();
        self.drained.notify_all();
    }
}

/// Sorts ranges and joins those that touch or overlap.
pub(super) fn join_touching(ranges: &mut Vec<Range<u64>>) {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, kept| {
        let joins = next.start <= kept.end;
        if joins {
            kept.end = kept.end.max(next.end);
        }
        joins
    });
}

#[cfg(test)]
mod tests {
    use super::join_touching;

    #[test]
    fn touching_ranges_become_one() {
        let mut ranges = vec![8..12, 0..4, 4..6, 20..30, 22..24];
        join_touching(&mut ranges);
        assert_eq!(ranges, vec![0..6, 8..12, 20..30]);
    }
}
