//! Writing back: making dirty pages of a window reach the device before something is computed from
//! them.
//!
//! A guest's stores to the base window sit in the host's page cache, as they would sit in a CPU's
//! caches. A view is computed from what the device holds, so the pages under it are written back
//! first. The rules:
//!
//! * Calls into our own mount are made here, on threads of their own. Such a call sleeps until a
//!   FUSE worker has answered it, so a worker that made it could wait for itself.
//! * These threads have a file table of their own ([`super::own_mount`]), which holds the standard
//!   streams and `base` and not /dev/fuse. When the process is killed while one of them sleeps, the
//!   last /dev/fuse descriptor still goes, the kernel aborts the connection, or the holder has
//!   another process answer, and the sleeper wakes and dies. With a shared table it could be
//!   neither woken nor killed.
//! * A write-back may wait for room in the device ([`super::write_backs`]), and so does who writes
//!   back it. So that nobody else does, there are more threads when all are
//!   busy, and a thread waits for no more than it was asked for.
//! * Looking whether there is anything to write back ([`dirty`]) never sleeps and may be done
//!   anywhere.
//!
//! From Linux 6.16 on the pages themselves are under writeback until the device has answered, and
//! `sync_file_range` waits for exactly the range. Before that FUSE copied dirty pages aside and
//! ended their writeback at once; there only `msync` waits for the device, for the whole file, and
//! `cachestat` cannot tell that nothing is on its way.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use parking_lot::{Condvar, Mutex};

use super::own_mount::{device_of, own_table};
use super::served_pages::PAGE_BYTES;

/// `cachestat(2)`, Linux 6.5 and newer; the same number on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;
/// Neighbouring pages are mostly dirty too, so more is begun at once than was asked for, aligned to
/// this.
const STRIDE: u64 = 256 << 10;
/// Most threads over one window; what finds all of them waiting waits too.
const MAX_THREADS: usize = 64;
/// How long a thread that is one too many stays.
const IDLE: Duration = Duration::from_secs(10);

/// How dirty pages are made to reach the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteBackWith {
    /// `sync_file_range` where the kernel waits for the device in it (Linux 6.16 and newer), else
    /// `msync`.
    #[default]
    Auto,
    /// `sync_file_range`.
    SyncFileRange,
    /// `msync`.
    Msync,
}

impl FromStr for WriteBackWith {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "sync_file_range" => Ok(Self::SyncFileRange),
            "msync" => Ok(Self::Msync),
            _ => Err(format!("{name:?} is none of auto, sync_file_range and msync")),
        }
    }
}

/// A piece of work for the threads: write back what is dirty in these base ranges, then call back.
struct Job(Vec<Range<u64>>, Done);

/// What is called, on a thread of the flusher, when a job is done.
pub(crate) type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// The threads and their queue, over one window (called `base` here, the one that is written back
/// most).
pub(crate) struct Flusher {
    shared: Arc<Shared>,
    map: Option<Arc<MmapRaw>>,
    base: File,
    /// Whether a look at the page cache can prove that a range is clean.
    can_look: bool,
}

/// What the threads share.
struct Shared {
    work: Mutex<Work>,
    /// Signalled when there is a job, or the end has come.
    queued: Condvar,
    /// Threads that stay.
    threads: usize,
}

#[derive(Default)]
struct Work {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

impl Flusher {
    /// Starts `threads` threads over `base`, the base window of `bytes` opened through the mount.
    pub(crate) fn start(base: File, bytes: u64, threads: usize, with: WriteBackWith) -> io::Result<Self> {
        let with = match with {
            WriteBackWith::Auto if writeback_waits() => WriteBackWith::SyncFileRange,
            WriteBackWith::Auto => WriteBackWith::Msync,
            chosen => chosen,
        };
        // The length is not asked for: that may be a request to the mount.
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        let mapped = || MmapOptions::new().len(bytes).map_raw(&base);
        let map = (with == WriteBackWith::Msync).then(mapped).transpose()?.map(Arc::new);
        let work = Mutex::new(Work::default());
        let shared = Arc::new(Shared { work, queued: Condvar::new(), threads: threads.max(1) });
        let can_look = with == WriteBackWith::SyncFileRange && dirty(&base, &(0..4096)).is_ok();
        tracing::debug!(?with, can_look, "flushing");
        let flusher = Self { shared, map, base, can_look };
        for _ in 0..flusher.shared.threads {
            flusher.add_thread(&mut flusher.shared.work.lock())?;
        }
        Ok(flusher)
    }

    fn add_thread(&self, work: &mut Work) -> io::Result<()> {
        work.threads.retain(|thread| !thread.is_finished());
        let (shared, number, map) = (Arc::clone(&self.shared), self.base.as_raw_fd(), self.map.clone());
        let run = move || run(&shared, number, map.as_deref());
        work.threads.push(thread::Builder::new().name("flusher".into()).spawn(run)?);
        Ok(())
    }

    /// Whether any of these base ranges may have dirty pages. Never sleeps.
    pub(crate) fn needed(&self, ranges: &[Range<u64>]) -> bool {
        ranges
            .iter()
            .any(|range| !range.is_empty() && (!self.can_look || dirty(&self.base, range).unwrap_or(true)))
    }

    /// The first byte of this range whose page may be dirty, or its end. Never sleeps.
    pub(crate) fn first_dirty(&self, range: Range<u64>) -> u64 {
        let (mut from, mut to) = (range.start, range.end);
        if !self.needed(std::slice::from_ref(&range)) {
            return to;
        }
        // Before `from` nothing is dirty, and something is before `to`: halves, and of pages, which
        // are dirty whole.
        while to - from > PAGE_BYTES {
            let middle = (from + (to - from) / 2).next_multiple_of(PAGE_BYTES);
            if middle >= to {
                break;
            }
            if self.needed(std::slice::from_ref(&(from..middle))) {
                to = middle;
            } else {
                from = middle;
            }
        }
        from
    }

    /// Whether the page cache may hold pages of this range, dirty or not. Never sleeps.
    pub(crate) fn cached(&self, range: &Range<u64>) -> bool {
        !range.is_empty() && found(&self.base, range).map_or(true, |found| found.cached + found.writeback > 0)
    }

    /// Whether the page cache is known to hold pages of this range. Never sleeps.
    pub(crate) fn surely_cached(&self, range: &Range<u64>) -> bool {
        is_cached(&self.base, range)
    }

    /// The device number of the file system that the window is on.
    pub(crate) fn mount_number(&self) -> Option<u64> {
        device_of(&self.base).ok()
    }

    /// Writes back the ranges on another thread and calls `done` there. Never sleeps.
    pub(crate) fn write_back(&self, ranges: Vec<Range<u64>>, done: Done) {
        let mut work = self.shared.work.lock();
        if work.closed {
            drop(work);
            return done(Err(io::Error::from_raw_os_error(libc::ESHUTDOWN)));
        }
        work.jobs.push_back(Job(ranges, done));
        if work.idle < work.jobs.len()
            && work.threads.len() < MAX_THREADS
            && let Err(why) = self.add_thread(&mut work)
        {
            tracing::warn!("no more flushers than there are: {why}");
        }
        drop(work);
        self.shared.queued.notify_one();
    }

    /// Takes no more jobs and waits until those taken are done.
    pub(crate) fn stop(&self) {
        let mut work = self.shared.work.lock();
        work.closed = true;
        let threads = std::mem::take(&mut work.threads);
        drop(work);
        self.shared.queued.notify_all();
        for thread in threads {
            // A panic in a job was logged by the panic hook and has nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// Whether any of these ranges may have dirty pages. Never sleeps.
pub(super) fn needed(flusher: &OnceLock<Flusher>, ranges: &[Range<u64>]) -> bool {
    match flusher.get() {
        Some(flusher) => flusher.needed(ranges),
        // Nobody can look yet.
        None => ranges.iter().any(|range| !range.is_empty()),
    }
}

impl Shared {
    /// The next job, or `None` if the thread is to end.
    fn next(&self) -> Option<Job> {
        let mut work = self.work.lock();
        loop {
            if let Some(job) = work.jobs.pop_front() {
                return Some(job);
            }
            if work.closed {
                return None;
            }
            work.idle += 1;
            let waited = self.queued.wait_for(&mut work, IDLE);
            work.idle -= 1;
            if waited.timed_out() && work.jobs.is_empty() && work.idle >= self.threads {
                return None;
            }
        }
    }
}

/// A flusher thread. `base` stays valid: the thread's own table keeps it open, and until there is
/// one [`Flusher`] does,
/// which joins its threads before it goes.
fn run(shared: &Shared, base: RawFd, map: Option<&MmapRaw>) {
    if let Err(why) = own_table(base) {
        tracing::warn!(
            "flusher keeps the shared file table ({why}); kill -9 may leave it asleep until the next start"
        );
    }
    while let Some(Job(ranges, done)) = shared.next() {
        done(ranges.iter().try_for_each(|range| write_back(base, map, range)));
    }
}

/// Writes back what is dirty in `range` and waits until the device has it.
fn write_back(base: RawFd, map: Option<&MmapRaw>, range: &Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let wide = range.start / STRIDE * STRIDE..range.end.next_multiple_of(STRIDE);
    if let Some(map) = map {
        let start = usize::try_from(wide.start).unwrap_or(usize::MAX).min(map.len());
        let end = usize::try_from(wide.end).unwrap_or(usize::MAX).min(map.len());
        return map.flush_range(start, end - start);
    }
    sync(base, &wide, libc::SYNC_FILE_RANGE_WRITE)?;
    let and_wait =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync(base, range, and_wait)
}

fn sync(base: RawFd, range: &Range<u64>, flags: u32) -> io::Result<()> {
    let (start, length) = (signed(range.start)?, signed(range.end - range.start)?);
    // SAFETY: takes no pointers; a bad descriptor or range is an error.
    let result = unsafe { libc::sync_file_range(base, start, length, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn signed(value: u64) -> io::Result<i64> {
    i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Whether the page cache may hold pages of this range of a file that the device does not have.
/// Never sleeps.
pub(super) fn may_be_dirty(file: &File, range: &Range<u64>) -> bool {
    if range.is_empty() {
        return false;
    }
    let may_be = |found: Found| found.dirty + found.writeback > 0 || !writeback_waits() && found.cached > 0;
    found(file, range).map_or(true, may_be)
}

/// Whether the page cache holds pages of `range` that are dirty or on their way to the device.
/// Never sleeps.
fn dirty(base: &File, range: &Range<u64>) -> io::Result<bool> {
    found(base, range).map(|found| found.dirty + found.writeback > 0)
}

/// The kernel's `struct cachestat`, in pages.
#[derive(Default)]
#[repr(C)]
struct Found {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether the page cache is known to hold pages of this range of a file. Never sleeps.
pub(super) fn is_cached(file: &File, range: &Range<u64>) -> bool {
    !range.is_empty() && found(file, range).is_ok_and(|found| found.cached + found.writeback > 0)
}

/// Bytes that the page cache is known to hold of this range of a file. Never sleeps.
pub(super) fn cached_bytes(file: &File, range: &Range<u64>) -> u64 {
    if range.is_empty() {
        return 0;
    }
    found(file, range).map_or(0, |found| (found.cached + found.writeback) * PAGE_BYTES)
}

/// Writes back what is dirty in a range of a file, and waits until the kernel has done that.
pub(super) fn write_out(file: &File, range: &Range<u64>) -> io::Result<()> {
    write_back(file.as_raw_fd(), None, range)
}

/// What the page cache holds of `range`. Never sleeps.
fn found(base: &File, range: &Range<u64>) -> io::Result<Found> {
    /// The kernel's `struct cachestat_range`.
    #[repr(C)]
    struct Requested {
        offset: u64,
        length: u64,
    }
    let requested = Requested { offset: range.start, length: range.end - range.start };
    let mut found = Found::default();
    // SAFETY: both pointers are to live values laid out as the kernel's structures.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, base.as_raw_fd(), &raw const requested, &raw mut found, 0) };
    if result == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

/// Whether this kernel keeps FUSE pages under writeback until the device has answered: Linux 6.16
/// and newer.
fn writeback_waits() -> bool {
    let Ok(system) = nix::sys::utsname::uname() else { return false };
    let release = system.release().to_string_lossy();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 16)
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.stop();
    }
}
