//! When data will be there, and so registers free again.

use std::collections::VecDeque;
use std::hint::select_unpredictable;

/// Times that follow each other by the same number of cycles.
#[derive(Clone, Copy)]
struct Series {
    first: u64,
    step: u64,
    count: u32,
}

/// Without any, its first is the end of time.
const NONE: Series = Series { first: u64::MAX, step: 0, count: 0 };

/// When a channel's data will be there. It has one data bus, so they are in order.
pub(super) struct Finishes {
    front: Series,
    behind: VecDeque<Series>,
}

impl Finishes {
    /// Without any.
    pub(super) fn new() -> Self {
        Self { front: NONE, behind: VecDeque::new() }
    }

    /// Adds so many, at `first` and each `step` later.
    #[inline]
    pub(super) fn add(&mut self, first: u64, step: u64, count: u32) {
        let series = Series { first, step, count };
        if self.front.count == 0 {
            self.front = series;
        } else {
            self.behind.push_back(series);
        }
    }

    /// Adds so many more behind those that were added last, of which there is one.
    #[inline]
    pub(super) fn extend(&mut self, count: u32) {
        self.behind.back_mut().unwrap_or(&mut self.front).count += count;
    }

    /// Takes back so many of those that were added last.
    #[inline]
    pub(super) fn cut(&mut self, count: u32) {
        let is_front = self.behind.is_empty();
        let last = self.behind.back_mut().unwrap_or(&mut self.front);
        last.count -= count;
        if last.count > 0 {
            return;
        }
        if is_front {
            self.front = NONE;
        } else {
            self.behind.pop_back();
        }
    }

    /// The first, or the end of time.
    #[inline]
    pub(super) fn first(&self) -> u64 {
        self.front.first
    }

    /// How many are among the first of these and another's, until a time and at most so many. There
    /// may be more where a series ends. The first is not later than that time.
    #[inline]
    pub(super) fn merged(&self, other: Option<&Self>, until: u64, most: u32) -> [u32; 2] {
        let (mut one, mut two) = (self.front, other.map_or(NONE, |other| other.front));
        let [of_one, of_two] = [one.count, two.count];
        let mut left = most;
        loop {
            let is_one = one.first <= two.first;
            let (step, taken) = (select_unpredictable(is_one, one.step, 0), u32::from(is_one));
            one.first += step;
            one.count -= taken;
            two.first += select_unpredictable(is_one, 0, two.step);
            two.count -= 1 - taken;
            left -= 1;
            let is_over = one.count == 0 || (two.count == 0 && of_two > 0);
            if left == 0 || is_over || one.first.min(two.first) > until {
                return [of_one - one.count, of_two - two.count];
            }
        }
    }

    /// Takes so many away of the first series, and gives the last of them.
    #[inline]
    pub(super) fn pop(&mut self, count: u32) -> u64 {
        let last = self.front.first + self.front.step * u64::from(count - 1);
        if count == self.front.count {
            self.front = self.behind.pop_front().unwrap_or(NONE);
        } else {
            self.front.first = last + self.front.step;
            self.front.count -= count;
        }
        last
    }

    /// Takes all away.
    pub(super) fn clear(&mut self) {
        self.front = NONE;
        self.behind.clear();
    }
}
