// What the recorder keeps of a processor, and what it does with an access of a window.

use core::ptr;

use super::cache;
use super::layout::{DIRTY, PAGE, SIZE_SHIFT, WAYS, WRITE, cache_word};
use super::pages::Pages;
use super::ring::Ring;

/// Where no guest has a line: no canonical address.
const NOWHERE: u64 = 1 << 63;

/// The last access of a kind: a load or a store, of so many bytes.
#[derive(Clone, Copy)]
struct Recent {
    /// Where the guest has its line, as long as that is the newest of its set; else [`NOWHERE`].
    line: u64,
    set: u64,
    /// Where in a line such an access begins at the latest, if it is to be within the line.
    last_start: u64,
    /// The access as QEMU says it, and what that is: the logarithm of its bytes, and whether it is
    /// a store.
    access: u32,
    shift: u32,
    is_store: bool,
}

impl Recent {
    /// All zeros.
    const NONE: Self = Self { line: 0, set: 0, last_start: 0, access: 0, shift: 0, is_store: false };

    #[inline]
    fn is_again(&self, access: u32, address: u64) -> bool {
        address.wrapping_sub(self.line) <= self.last_start && self.access == access
    }
}

/// What is kept of a processor. What each access needs is in one line of the host's cache.
#[repr(C, align(64))]
pub(crate) struct Processor {
    /// The last accesses of two kinds: a loop loads here and stores there.
    recents: [Recent; 2],
    /// The line that was touched last, as the cache has it.
    last: u64,
    /// Sets of the cache, and where they are; 0 without one.
    sets: u64,
    lines: *mut [u64; WAYS],
    ring: Ring,
    pub(crate) pages: Pages,
}

impl Processor {
    /// One without a part. All zeros, so that a library of many takes no room in its file.
    /// [`Processor::forget`] comes before all else.
    pub(crate) const fn new() -> Self {
        Self {
            recents: [Recent::NONE; 2],
            last: 0,
            sets: 0,
            lines: ptr::null_mut(),
            ring: Ring::none(),
            pages: Pages::new(),
        }
    }

    /// Gives it its part of the file.
    ///
    /// # Safety
    /// The part has a ring of so many words and so many sets, and is mapped for as long as this
    /// lives. Until the guest has ended only its reader looks at the ring, and nobody at the sets.
    pub(crate) unsafe fn take_part(&mut self, part: *mut u64, words: u64, sets: u64) {
        // SAFETY: as the caller's.
        unsafe {
            self.ring = Ring::new(part, words);
            self.sets = sets;
            self.lines = part.add(cache_word(words as usize)).cast();
        }
    }

    pub(crate) fn has_part(&self) -> bool {
        !self.ring.is_none()
    }

    /// Drops what it remembers of where the guest has its pages.
    pub(crate) fn forget(&mut self) {
        for recent in &mut self.recents {
            recent.line = NOWHERE;
        }
        self.pages.forget();
    }

    /// Whether this is a line that was touched last, or last but one, by an access of the same
    /// kind: then nothing of the cache changes.
    #[inline]
    pub(crate) fn is_again(&self, access: u32, address: u64) -> bool {
        let [recent, before] = &self.recents;
        recent.is_again(access, address) || before.is_again(access, address)
    }

    /// Bytes of a window are touched: through the cache, if there is one. `guest` is where the
    /// guest has them, and `place` where that page is. `kind` says what an access is, the logarithm
    /// of its bytes and whether it is a store; `ticks` is the clock.
    ///
    /// # Safety
    /// It has a part.
    #[inline]
    pub(crate) unsafe fn touch(
        &mut self,
        access: u32,
        guest: u64,
        place: u64,
        kind: fn(u32) -> (u32, bool),
        ticks: fn() -> u64,
    ) {
        if self.recents[0].access != access || access == 0 {
            self.turn_to(access, kind);
        }
        let Recent { shift, is_store, last_start, .. } = self.recents[0];
        let address = place | (guest % PAGE as u64);
        if self.sets == 0 {
            let write = if is_store { WRITE } else { 0 };
            // SAFETY: there is a part.
            unsafe { self.ring.push(write | (u64::from(shift) << SIZE_SHIFT) | address, ticks) };
            return;
        }
        let start = address % 64;
        // SAFETY: there are a part and a cache.
        let set = unsafe { self.line(address - start + 64, is_store, ticks) };
        if start <= last_start {
            (self.recents[0].line, self.recents[0].set) = (guest & !63, set);
            return;
        }
        // What lies in two lines; within a page, as the next one may be elsewhere.
        let last = address + (1 << shift.min(6)) - 1;
        if last ^ address < PAGE as u64 {
            // SAFETY: as above.
            unsafe { self.line((last & !63) + 64, is_store, ticks) };
        }
    }

    /// Has the first of the recent accesses be one of this kind.
    #[inline(never)]
    fn turn_to(&mut self, access: u32, kind: fn(u32) -> (u32, bool)) {
        self.recents.swap(0, 1);
        if self.recents[0].access != access || access == 0 {
            let (shift, is_store) = kind(access);
            let (shift, last_start) = (shift.min(12), 64 - (1 << shift.min(6)));
            self.recents[0] = Recent { line: NOWHERE, set: 0, last_start, access, shift, is_store };
        }
    }

    /// A line is touched: where it ends, and whether it is written. Gives its set.
    ///
    /// # Safety
    /// It has a part, and a cache.
    #[inline]
    unsafe fn line(&mut self, end: u64, is_store: bool, ticks: fn() -> u64) -> u64 {
        let (line, key) = (end >> 6, end | (u64::from(is_store) * DIRTY));
        let set = (line ^ (line >> 16)) & (self.sets - 1);
        // Loads follow each other within a line.
        if self.last != key && self.last != key | DIRTY {
            // SAFETY: as the caller's.
            unsafe { self.other_line(set, key, ticks) };
        }
        set
    }

    /// # Safety
    /// It has a part, and a cache, and the set is of that.
    unsafe fn other_line(&mut self, set: u64, key: u64, ticks: fn() -> u64) {
        const LINE: u64 = 6 << SIZE_SHIFT;
        for recent in &mut self.recents {
            if recent.set == set {
                recent.line = NOWHERE;
            }
        }
        // SAFETY: as the caller's, and of [`Processor::take_part`]'s.
        unsafe {
            let lines = &mut *self.lines.add(set as usize);
            let gone = cache::touch(lines, key);
            self.last = lines[0];
            if let Some(gone) = gone {
                self.ring.push(LINE | ((key & !DIRTY) - 64), ticks);
                if gone & DIRTY != 0 {
                    self.ring.push(WRITE | LINE | ((gone & !DIRTY) - 64), ticks);
                }
            }
        }
    }
}
