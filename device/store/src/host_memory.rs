//! The host's memory, when the store lies in it: what is left, and what the store leaves free.
//!
//! Pages of a store in memory cannot be dropped, and few hosts swap as much. Where they run out,
//! Linux ends processes. So the store stops before that. The rules:
//!
//! * Before index, comparison or segments grow by a unit, it is asked how much is [`Left`]. Below a
//!   *reserve* nothing grows: that is no room, like a store that is full.
//! * The lower half of the reserve is nobody's. From the upper half, what takes no more than before
//!   is rewritten, and segments are moved together.
//! * Write-backs that wait for room are copies, which are memory: while no more than the reserve is
//!   left, all of them may take a quarter of it.
//! * It is not looked each time. One look allows growth by an eighth of what it found above the
//!   reserve, at most [`MAX_GRANTED`], and one that found too little holds for a moment
//!   ([`HOLDS`]), so that a thousand write-backs that wait do not ask a thousand times.
//! * Where it cannot be found out how much is left, nothing is held back. An image on a disk is not
//!   concerned.

mod groups;
mod linux;

use std::{
    fmt, fs, io,
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

pub use self::linux::{Left, Linux};
use super::StoreError;

/// What room is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum For {
    /// Something that takes more than before.
    More,
    /// Something that takes the place of at least as much, or moves.
    NoMore,
}

/// The most that is kept free if nobody says otherwise.
pub const MAX_RESERVE: u64 = 256 << 20;
/// The part of all memory that is kept free where that is less.
pub const RESERVE_PART: u64 = 16;
/// Most bytes of growth that one look allows.
pub const MAX_GRANTED: u64 = 4 << 20;
/// How long a look that found too little holds.
pub const HOLDS: Duration = Duration::from_millis(10);

/// Finds out how much memory is left, if that can be known.
type Look = dyn Fn() -> Option<Left> + Send + Sync;

/// The host's memory as a device in it sees it.
pub struct HostMemory {
    look: Box<Look>,
    reserve: u64,
    holds: Duration,
    /// Bytes that may be taken without another look.
    granted: AtomicU64,
    /// Bytes that the last look found.
    last: AtomicU64,
    /// The last look, if it found no more than the reserve, and when that was.
    short: Mutex<Option<(Instant, Left)>>,
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("reserve", &self.reserve)
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

impl HostMemory {
    /// Memory of which `reserve` bytes are kept free; `look` tells how much is left.
    pub fn new(reserve: u64, look: impl Fn() -> Option<Left> + Send + Sync + 'static) -> Self {
        Self {
            look: Box::new(look),
            reserve,
            holds: Duration::ZERO,
            granted: AtomicU64::new(0),
            last: AtomicU64::new(u64::MAX),
            short: Mutex::new(None),
        }
    }

    /// This host's, and the reserve that suits it if none is given.
    pub fn of_this_host(reserve: Option<u64>) -> Self {
        let host = Linux::at(Path::new("/"));
        let reserve = reserve.unwrap_or_else(|| host.total().map_or(0, usual_reserve));
        let memory = match reported() {
            Some(reported) => Self::new(reserve, reported),
            None => Self::new(reserve, move || host.left()),
        };
        Self { holds: HOLDS, ..memory }
    }

    /// Bytes that are kept free; 0 if nothing is.
    pub fn reserve(&self) -> u64 {
        self.reserve
    }

    /// Bytes that are left now, if that can be known.
    pub fn left(&self) -> Option<u64> {
        self.ask().map(|left| left.bytes)
    }

    /// Bytes that were left when it was last looked.
    pub fn last(&self) -> u64 {
        self.last.load(Relaxed)
    }

    /// Takes memory for growth by `bytes` of `what`.
    pub(super) fn take(&self, bytes: u64, what: &'static str, wanted: For) -> Result<(), StoreError> {
        if self.reserve == 0 {
            return Ok(());
        }
        if self.granted.fetch_update(Relaxed, Relaxed, |granted| granted.checked_sub(bytes)).is_ok() {
            return Ok(());
        }
        let Some(left) = self.lately() else { return Ok(()) };
        let floor = match wanted {
            For::More => self.reserve,
            For::NoMore => self.reserve / 2,
        };
        if left.bytes < floor.saturating_add(bytes) {
            return Err(StoreError::HostMemory { what, left, reserve: self.reserve });
        }
        let above = left.bytes.saturating_sub(self.reserve.saturating_add(bytes));
        self.granted.store((above / 8).min(MAX_GRANTED), Relaxed);
        Ok(())
    }

    /// Whether so many bytes more may be copied to wait for room, besides `waiting`.
    pub fn can_wait(&self, waiting: u64, bytes: u64) -> bool {
        // One may always wait.
        let most = || waiting == 0 || waiting.saturating_add(bytes) <= self.reserve / 4;
        self.reserve == 0
            || self.lately().is_none_or(|left| left.bytes >= self.reserve.saturating_add(bytes))
            || most()
    }

    /// What is left, or was a moment ago if that was too little.
    fn lately(&self) -> Option<Left> {
        let short = self.short.lock().as_ref().filter(|(at, _)| at.elapsed() < self.holds).cloned();
        short.map_or_else(|| self.ask(), |(_, left)| Some(left))
    }

    fn ask(&self) -> Option<Left> {
        let left = (self.look)();
        self.last.store(left.as_ref().map_or(u64::MAX, |left| left.bytes), Relaxed);
        let short = left.clone().filter(|left| left.bytes <= self.reserve);
        *self.short.lock() = short.map(|left| (Instant::now(), left));
        left
    }
}

/// What is kept free of so much memory.
fn usual_reserve(total: u64) -> u64 {
    (total / RESERVE_PART).min(MAX_RESERVE)
}

/// What a test says that is left, in builds with debug assertions: the environment variable
/// `LAMINA_MEMORY_LEFT` names a file with the number.
fn reported() -> Option<impl Fn() -> Option<Left> + Send + Sync> {
    let file = std::env::var_os("LAMINA_MEMORY_LEFT").filter(|_| cfg!(debug_assertions))?;
    let read = move || fs::read_to_string(&file)?.trim().parse().map_err(io::Error::other);
    Some(move || read().ok().map(|bytes| Left { bytes, group: None }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Memory of which as much is left as the number says.
    fn memory(reserve: u64, left: u64) -> (HostMemory, Arc<AtomicU64>) {
        let bytes = Arc::new(AtomicU64::new(left));
        let reported = Arc::clone(&bytes);
        (HostMemory::new(reserve, move || Some(Left { bytes: reported.load(Relaxed), group: None })), bytes)
    }

    #[test]
    fn growth_stops_at_the_reserve_and_what_takes_no_more_at_half_of_it() {
        let (memory, left) = memory(1000, 1100);
        let take = |wanted| memory.take(100, "segment store", wanted);
        assert!(take(For::More).is_ok() && memory.last() == 1100);
        left.store(1099, Relaxed);
        let why = take(For::More).unwrap_err().to_string();
        assert!(why.contains("of the host's memory 1099 bytes are left, and 1000 are kept free"), "{why}");
        for (bytes, fits) in [(600, true), (599, false)] {
            left.store(bytes, Relaxed);
            assert_eq!((take(For::NoMore).is_ok(), take(For::More).is_ok()), (fits, false), "{bytes}");
        }
        left.store(5000, Relaxed);
        assert!(take(For::More).is_ok());
        let (none, _) = self::memory(0, 0);
        assert!(none.take(1 << 40, "segment store", For::More).is_ok() && none.can_wait(1 << 40, 1 << 40));
        let unknown = HostMemory::new(1000, || None);
        assert!(unknown.take(1 << 40, "segment store", For::More).is_ok() && unknown.left().is_none());
    }

    #[test]
    fn one_look_allows_an_eighth_of_what_it_found_and_never_much() {
        let (memory, left) = memory(1000, 1000 + 100 + 800);
        assert!(memory.take(100, "segment store", For::More).is_ok());
        left.store(0, Relaxed);
        assert!(memory.take(100, "segment store", For::More).is_ok(), "that was allowed before");
        assert!(memory.take(100, "segment store", For::More).is_err());
        left.store(1 << 40, Relaxed);
        assert!(memory.take(100, "segment store", For::More).is_ok());
        left.store(0, Relaxed);
        assert!(memory.take(MAX_GRANTED, "segment store", For::NoMore).is_ok());
        assert!(memory.take(1, "segment store", For::NoMore).is_err());
    }

    #[test]
    fn a_look_that_found_too_little_holds_for_a_moment() {
        let (memory, left) = memory(1000, 500);
        let memory = HostMemory { holds: Duration::from_secs(3600), ..memory };
        assert!(memory.take(100, "segment store", For::More).is_err());
        left.store(5000, Relaxed);
        assert!(memory.take(100, "segment store", For::More).is_err());
        assert_eq!(memory.left(), Some(5000), "who wants to know looks");
        assert!(memory.take(100, "segment store", For::More).is_ok());
    }

    #[test]
    fn copies_that_wait_take_a_quarter_of_the_reserve_and_one_may_always() {
        let (memory, left) = memory(1000, 1100);
        assert!(memory.can_wait(1 << 30, 100));
        left.store(0, Relaxed);
        assert!(memory.can_wait(200, 50) && !memory.can_wait(200, 51) && memory.can_wait(0, 1 << 20));
    }

    #[test]
    fn the_usual_reserve_is_a_part_of_small_memory_and_bounded_for_large() {
        assert_eq!(usual_reserve(200 << 20), (200 << 20) / 16);
        assert_eq!((usual_reserve(4 << 30), usual_reserve(1 << 40)), (256 << 20, 256 << 20));
    }
}
