// The ring of a processor, as the recorder writes it.

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use super::layout::{GROUP, PAGE, RECORD, counter};

/// Where the records of a processor go. One thread writes.
///
/// The clock is read once a group: to read it takes longer than to make a record. No group spans
/// two takings of its reader, so that a guest that touches a line now and then has its times, too.
pub(crate) struct Ring {
    /// The processor's part of the file; null without one.
    part: *mut u64,
    words: u64,
    /// Words that were written.
    head: u64,
    /// How far the reader was when the group began.
    seen_tail: u64,
}

impl Ring {
    /// Without a part nothing may be pushed.
    pub(crate) const fn none() -> Self {
        Self { part: ptr::null_mut(), words: 0, head: 0, seen_tail: 0 }
    }

    /// # Safety
    /// `part` is a part of a file whose rings have so many words, mapped for as long as this lives.
    /// Nobody else writes to the ring.
    pub(crate) const unsafe fn new(part: *mut u64, words: u64) -> Self {
        Self { part, words, head: 0, seen_tail: 0 }
    }

    pub(crate) const fn is_none(&self) -> bool {
        self.part.is_null()
    }

    /// # Safety
    /// `word` is below the words of the page of counters and the ring, and there is a part.
    #[inline]
    unsafe fn word(&self, word: usize) -> &AtomicU64 {
        // SAFETY: it is within the mapping and aligned. Both sides use atomics.
        unsafe { AtomicU64::from_ptr(self.part.add(word)) }
    }

    /// Writes the next word.
    ///
    /// # Safety
    /// The reader has read what was there, and there is a part.
    #[inline]
    unsafe fn put(&mut self, value: u64) {
        let at = PAGE / 8 + (self.head & (self.words - 1)) as usize;
        // SAFETY: the ring lies behind the page of counters.
        unsafe { self.word(at) }.store(value, Ordering::Relaxed);
        self.head += 1;
    }

    /// Appends a record, or counts it as lost. `ticks` is the clock.
    ///
    /// # Safety
    /// There is a part.
    #[inline]
    pub(crate) unsafe fn push(&mut self, record: u64, ticks: impl FnOnce() -> u64) {
        // SAFETY: as the caller's. In a group that was begun there is room.
        unsafe {
            let tail = self.word(counter::TAIL).load(Ordering::Acquire);
            if (self.head.is_multiple_of(GROUP as u64) || tail != self.seen_tail) && !self.begin(tail, ticks)
            {
                return;
            }
            self.put(record | RECORD);
            self.word(counter::HEAD).store(self.head, Ordering::Release);
        }
    }

    /// Begins a group, or counts a record as lost.
    ///
    /// # Safety
    /// There is a part.
    unsafe fn begin(&mut self, tail: u64, ticks: impl FnOnce() -> u64) -> bool {
        // SAFETY: as the caller's. There was room for all of the group before.
        unsafe {
            while !self.head.is_multiple_of(GROUP as u64) {
                self.put(0);
            }
            self.seen_tail = tail;
            if self.head.wrapping_sub(tail) > self.words - GROUP as u64 {
                let lost = self.word(counter::LOST);
                lost.store(lost.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                return false;
            }
            self.put(ticks());
            true
        }
    }
}
