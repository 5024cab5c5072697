//! Write-backs: dirty pages of a base window, or of a target of one, that the kernel brings to the
//! device, and what becomes of those for which there is no room.
//!
//! A store through a mapping is over long before its page is written back, so an error tells nobody
//! of it: the store is lost. The rules:
//!
//! * A write-back that finds no room (the store, a quota, the host's disk or memory is full)
//!   *waits*: it is kept unanswered and holds no thread. Its pages stay in the page cache, where
//!   loads find them.
//! * It is tried again soon after anything was freed
//!   ([`Device::freed`](lamina_device::device::Device::freed)), and every [`TICK`] for what others
//!   free on the host.
//! * Once it has waited as long as it may, it is refused with ENOSPC, counted, and an event names
//!   what is lost. So is at once what finds [`MAX_BYTES`] waiting already, or as much as the host's
//!   memory [lets wait](lamina_device::device::Device::can_wait), and what still waits when the
//!   mount is taken down.
//! * What was discarded needs no room: its pages are taken out of the write-backs that wait, and of
//!   those that come of pages that the kernel had before ([`super::dropped_pages`]). A discard
//!   never waits for the room that it makes.
//! * A process that dies has not answered; the kernel gives the request to the next one, where it
//!   waits anew.
//!
//! Nothing else waits, but who asks for what waits: a flush or `fsync` of its range, the first load
//! of a view over it, another store into the same page; and what has the kernel write back all of
//! the window first: a hole punched through the mount, and a process that unmaps the window or
//! ends. A discard of a part of a write-back that finds no room even then waits for that, too,
//! because the kernel drops none of its pages before. On kernels before 6.16 every flush waits, for
//! they have no flush of a range.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use lamina_device::device::{DeviceError, Partition};

use super::dropped_pages::{DroppedPages, Gate};
use super::export_file::ExportFile;

/// Bytes of a file's write-backs that may wait: each is a copy of pages that the host keeps as
/// well.
pub const MAX_BYTES: usize = 256 << 20;
/// How often those that wait are tried again if nothing was freed.
pub const TICK: Duration = Duration::from_millis(100);
/// How often it is looked whether anything was freed, while something waits.
const LOOK: Duration = Duration::from_millis(5);
/// How many times as long as all were tried it rests then, if that is more.
const REST: u32 = 4;

/// How a write-back is answered: with its bytes, or an error number.
pub(super) type Answer = Result<u32, i32>;

/// Where an answer goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    /// The descriptor that the request came from.
    pub(super) channel: usize,
    /// The request's number.
    pub(super) unique: u64,
}

/// The write-backs of one file.
pub(super) struct WriteBacks {
    partition: Partition,
    /// The target that the file is; the base window if none.
    target: Option<u32>,
    max_wait: Duration,
    most_bytes: usize,
    state: Mutex<State>,
    /// Signalled when there may be something to try again.
    changed: Condvar,
    gate: Arc<Gate>,
    dropped: DroppedPages,
}

#[derive(Default)]
struct State {
    waiting: Vec<Arc<Mutex<Waiting>>>,
    /// Bytes of those.
    bytes: usize,
    /// Whether to try at once.
    again: bool,
    /// Whether nobody may wait any more.
    hurry: bool,
    closed: bool,
}

/// A write-back that waits. Who tries it or takes bytes out of it holds its lock, which is taken
/// after the state's.
struct Waiting {
    asker: Asker,
    offset: u64,
    bytes: Vec<u8>,
    /// Bytes that are stored.
    done: usize,
    since: Instant,
    answered: bool,
}

impl WriteBacks {
    /// Write-backs of what `which` shows of `partition`, none of which waits for room longer than
    /// `max_wait`.
    pub(super) fn new(partition: Partition, which: ExportFile, max_wait: Duration, gate: Arc<Gate>) -> Self {
        let target = if let ExportFile::Target(target) = which { Some(target) } else { None };
        Self {
            gate,
            // As long as a target, and more.
            dropped: DroppedPages::new(partition.base_bytes()),
            partition,
            target,
            max_wait,
            most_bytes: MAX_BYTES,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Stores what the kernel writes back: the answer, or nothing if it waits. `stored` is told of
    /// every range that was stored.
    pub(super) fn take(
        &self,
        asker: Asker,
        offset: u64,
        bytes: &mut [u8],
        stored: impl Fn(Range<u64>),
    ) -> Option<Answer> {
        let mut done = 0;
        let why = match self.store(offset, bytes, &mut done, stored) {
            Ok(answer) => return Some(answer),
            Err(why) => why,
        };
        let mut state = self.state.lock();
        let left = if state.hurry || state.closed {
            "the mount is taken down"
        } else if self.max_wait.is_zero() {
            "nothing may wait"
        } else if state.bytes + bytes.len() > self.most_bytes
            || !self.partition.device().can_wait(bytes.len() as u64)
        {
            "too much waits already"
        } else {
            self.partition.device().write_back_waits(bytes.len() as u64, true);
            state.bytes += bytes.len();
            let (bytes, since) = (bytes.to_vec(), Instant::now());
            let waiting = Waiting { asker, offset, bytes, done, since, answered: false };
            state.waiting.push(Arc::new(Mutex::new(waiting)));
            self.changed.notify_one();
            return None;
        };
        drop(state);
        Some(self.refuse(offset, bytes.len(), done, left, &why))
    }

    /// Tries again what waits, and answers it in the end, until [`Self::close`].
    pub(super) fn retry_until_closed(&self, stored: impl Fn(Range<u64>), answer: impl Fn(Asker, Answer)) {
        let (mut seen, mut last, mut rest) = (0, Instant::now(), LOOK);
        loop {
            let mut state = self.state.lock();
            while state.waiting.is_empty() && !state.closed {
                self.changed.wait(&mut state);
            }
            if state.closed {
                return;
            }
            if !state.again && !state.hurry {
                self.changed.wait_for(&mut state, rest);
            }
            let (again, hurry) = (std::mem::take(&mut state.again), state.hurry);
            let waiting = state.waiting.clone();
            drop(state);
            let (freed, now) = (self.partition.device().freed(), Instant::now());
            if !again && !hurry && freed == seen && now - last < TICK {
                continue;
            }
            (seen, last) = (freed, now);
            for one in &waiting {
                self.retry(&mut one.lock(), hurry, &stored, &answer);
            }
            let mut state = self.state.lock();
            state.waiting.retain(|one| !one.lock().answered);
            state.bytes = state.waiting.iter().map(|one| one.lock().bytes.len()).sum();
            rest = LOOK.max(now.elapsed() * REST);
        }
    }

    fn retry(
        &self,
        one: &mut Waiting,
        hurry: bool,
        stored: &impl Fn(Range<u64>),
        answer: &impl Fn(Asker, Answer),
    ) {
        let Waiting { asker, offset, bytes, done, since, .. } = one;
        let tried = catch_unwind(AssertUnwindSafe(|| self.store(*offset, bytes, done, stored)));
        let outcome = match tried {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) if !hurry && since.elapsed() < self.max_wait => return,
            Ok(Err(why)) => {
                let left = if hurry { "the mount is taken down" } else { "none was made in time" };
                self.refuse(*offset, bytes.len(), *done, left, &why)
            }
            Err(_) => {
                tracing::error!(offset, "a write-back that waited made the device panic; answering EIO");
                Err(libc::EIO)
            }
        };
        self.partition.device().write_back_waits(bytes.len() as u64, false);
        one.answered = true;
        answer(*asker, outcome);
    }

    /// Stores what is not stored yet and was not discarded: the answer, or why there is no room.
    fn store(
        &self,
        offset: u64,
        bytes: &mut [u8],
        done: &mut usize,
        stored: impl Fn(Range<u64>),
    ) -> Result<Answer, DeviceError> {
        let _nothing_is_dropped = self.gate.read();
        let range = offset..offset + bytes.len() as u64;
        for part in self.dropped.parts(&range) {
            clear(offset, bytes, &part);
        }
        let before = *done;
        let written = self.store_all_but(&self.dropped.pages(&range), offset, bytes, done);
        if *done > before {
            stored(offset + before as u64..offset + *done as u64);
        }
        match written {
            Ok(()) => Ok(u32::try_from(bytes.len()).map_err(|_| libc::EINVAL)),
            Err(why) if why.is_no_room() => Err(why),
            Err(why) => {
                tracing::error!(offset, bytes = bytes.len(), "write-back failed: {why}");
                Ok(Err(libc::EIO))
            }
        }
    }

    /// Stores what is left of `bytes` but for some pages, and moves `done` over both.
    fn store_all_but(
        &self,
        pages: &[Range<u64>],
        offset: u64,
        bytes: &[u8],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        let inside =
            |at: u64| usize::try_from(at.saturating_sub(offset)).unwrap_or(usize::MAX).min(bytes.len());
        let ends = pages.iter().map(|page| inside(page.start)..inside(page.end));
        for skipped in ends.chain(std::iter::once(bytes.len()..bytes.len())) {
            if *done < skipped.start {
                let (at, piece) = (offset + *done as u64, &bytes[*done..skipped.start]);
                let mut stored = 0;
                let written = match self.target {
                    None => self.partition.write_back(at, piece, &mut stored),
                    Some(target) => self.partition.device().write_back_target(target, at, piece, &mut stored),
                };
                *done += stored;
                written?;
            }
            *done = skipped.end.max(*done);
        }
        Ok(())
    }

    /// Gives a write-back up, of which `done` bytes are stored.
    fn refuse(&self, offset: u64, length: usize, done: usize, left: &str, why: &DeviceError) -> Answer {
        let (at, length) = (offset + done as u64, (length - done) as u64);
        let why = format!("no room, and {left}: {why}");
        let device = self.partition.device();
        match self.target {
            None => device.write_back_refused(self.partition.base().start + at, length, &why),
            Some(target) => device.write_back_target_refused(target, at, length, &why),
        }
        Err(libc::ENOSPC)
    }

    /// What is discarded of the file.
    pub(super) fn dropped(&self) -> &DroppedPages {
        &self.dropped
    }

    /// Takes what was discarded out of every write-back that waits; what is left of one is tried at
    /// once.
    pub(super) fn take_out_dropped(&self) {
        let mut state = self.state.lock();
        let waiting = state.waiting.clone();
        state.again |= !waiting.is_empty();
        drop(state);
        for one in waiting {
            let Waiting { offset, bytes, .. } = &mut *one.lock();
            for part in self.dropped.parts(&(*offset..*offset + bytes.len() as u64)) {
                clear(*offset, bytes, &part);
            }
        }
        self.changed.notify_one();
    }

    /// Has everything that waits be tried once more and answered, and nothing wait any more.
    pub(super) fn hurry(&self) {
        self.state.lock().hurry = true;
        self.changed.notify_one();
    }

    /// Ends [`Self::retry_until_closed`]: nobody waits for an answer any more.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_one();
    }
}

/// Zeroes what `bytes`, which lie at `offset`, have of `range`.
fn clear(offset: u64, bytes: &mut [u8], range: &Range<u64>) {
    let end = offset + bytes.len() as u64;
    let (start, end) = (range.start.max(offset), range.end.min(end));
    if start < end {
        let inside = |at: u64| usize::try_from(at - offset).expect("inside the bytes");
        bytes[inside(start)..inside(end)].fill(0);
    }
}

#[cfg(test)]
mod tests;
