//! One bank: its row, and the bursts that wait for it.
//!
//! Bursts are queued as runs: lines of one row that follow each other and came together. What is
//! read of a bundle is such a run, of dozens of lines, and costs as much as one line.

use std::collections::VecDeque;

use super::Place;
use super::profile::Timing;

/// Younger bursts of its bank that a burst lets pass, because they hit the open row.
const MAX_PASSED_IN_BANK: u32 = 16;
/// The row of a bank that has none open.
pub(super) const CLOSED: u32 = u32::MAX;

/// Bursts of one row, a column each. Of the channel's bursts they came one behind the other.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub row: u32,
    /// The column of the first; the others' follow.
    pub column: u32,
    pub count: u32,
    pub write: bool,
    /// Bursts that came to the channel before the first.
    pub order: u64,
    pub tag: u64,
    /// When the first came. It alone can be kept from its turn by that: when another's turn comes,
    /// one before it in its row was served after it came.
    pub admitted: u64,
}

pub(super) struct Bank {
    /// Its place, but for row and column.
    pub place: Place,
    pub rank: usize,
    pub group: usize,
    pub row: u32,
    /// Whether its row was opened and nothing read or written since.
    pub fresh: bool,
    pub opened: u64,
    pub activate: u64,
    pub precharge: u64,
    pub column: u64,
    pub queue: VecDeque<Run>,
    /// The run whose first burst is next.
    pub pick: usize,
    passed: u32,
    /// Which of the channel's wants is its own, if it has a queue.
    pub want: usize,
}

impl Bank {
    /// Closed, and nothing waits for it.
    pub(super) fn new(place: Place) -> Self {
        Self {
            place,
            rank: place.rank as usize,
            group: place.group as usize,
            row: CLOSED,
            fresh: false,
            opened: 0,
            activate: 0,
            precharge: 0,
            column: 0,
            queue: VecDeque::new(),
            pick: 0,
            passed: 0,
            want: 0,
        }
    }

    /// Queues a run, and says whether another is next now.
    #[inline]
    pub(super) fn add(&mut self, run: Run) -> bool {
        let before = self.pick;
        self.queue.push_back(run);
        self.choose();
        self.pick != before
    }

    /// The run to which the channel's burst of that order belongs, if it is the last of its run and
    /// waits.
    #[inline]
    pub(super) fn last(&mut self, order: u64) -> Option<&mut Run> {
        self.queue.back_mut().filter(|run| run.order + u64::from(run.count) == order + 1)
    }

    /// Chooses the run that is next: the oldest that hits the open row, unless the oldest of all
    /// let enough bursts pass.
    #[inline]
    fn choose(&mut self) {
        self.pick = 0;
        if self.row == CLOSED || self.passed >= MAX_PASSED_IN_BANK {
            return;
        }
        self.pick = self.queue.iter().position(|run| run.row == self.row).unwrap_or(0);
    }

    /// Opens the row that is wanted, and gives it.
    #[inline]
    pub(super) fn open(&mut self, at: u64, t: &Timing) -> u32 {
        let row = self.queue[self.pick].row;
        (self.row, self.fresh, self.opened) = (row, true, at);
        self.column = at + t.rcd;
        self.precharge = at + t.ras;
        self.activate = at + t.ras + t.rp;
        self.choose();
        row
    }

    /// Closes the row, and gives the cycles that it was open.
    #[inline]
    pub(super) fn close(&mut self, at: u64, t: &Timing) -> u64 {
        self.row = CLOSED;
        self.activate = self.activate.max(at + t.rp);
        self.passed = 0;
        self.choose();
        at - self.opened
    }

    /// Takes so many bursts of the run that is next: more than one only of the oldest.
    #[inline]
    pub(super) fn take(&mut self, count: u32) -> Run {
        self.passed = if self.pick == 0 { 0 } else { self.passed + 1 };
        self.fresh = false;
        let run = &mut self.queue[self.pick];
        let taken = Run { count, ..*run };
        run.column += count;
        run.count -= count;
        run.order += u64::from(count);
        if run.count == 0 {
            self.queue.remove(self.pick);
            self.choose();
        } else if self.passed >= MAX_PASSED_IN_BANK {
            self.pick = 0;
        }
        taken
    }
}
