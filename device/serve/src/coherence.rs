//! The coherence contract between the two windows, and what keeps it.
//!
//! The host's page cache plays the part of the CPU caches over the device, so:
//!
//! 1. **Same window: always current.** Loads of `base` see the last store to `base`, through every
//!    mapping and descriptor on the host and in every guest. There is one page cache.
//! 2. **Fresh views: always current.** A view page that is not in the page cache is computed from
//!    base bytes that include every store to `base` that was complete when the load began. The
//!    dirty base pages under it are written back first.
//! 3. **Cached views: current after a flush.** A view page that is in the page cache may lag behind
//!    stores to `base` until they have reached the device *and* the page was invalidated.
//!    [`Coherence::flush`] is the fence: when it returns, every load of a view sees every store to
//!    the flushed base range that was complete when it was called. Stores that reach the device for
//!    another reason (the kernel's own writeback, `msync`) invalidate too, a moment later.
//! 4. **Views take no stores.** `write` to a view is refused. A store through a mapping cannot be
//!    refused, for QEMU maps views writable and a guest's loads need that mapping; it lives in the
//!    page cache until the kernel writes the page back, then it is counted and dropped and the page
//!    invalidated. The write-back fails with EROFS, which the next `msync` or `fsync` of each
//!    descriptor that was open tells. It changes nothing in the device and no other page, and after
//!    a flush, of any range, nobody sees it any more.
//! 5. **Beside the mount: as if uncached.** Disks ([`super::vhost_user`]) reach the device without
//!    the host's page cache. A read of a disk sees every store and write that was complete when it
//!    began, through whichever way; dirty base pages of the mount are written back first. A write
//!    to a disk is seen by every load through the mount that begins after it is complete: pages of
//!    `base` and of views over it were dropped by then. Stores through the mount to a page that a
//!    disk is writing at the same moment are a race, as they are between hosts: the page is written
//!    back whole, and either may win. What the guest of a disk keeps in its own page cache is its
//!    own: after a write to the base disk it drops the pages of the views disk that it holds
//!    (`blockdev --flushbufs`) or reads them with `O_DIRECT`. The disk's flush is
//!    [`Coherence::flush`] of everything. A disk is no host: hosts that share a region see its
//!    writes as those of another host, and it sees of theirs what has reached the device.
//! 6. **Targets: as views, but written too.** The targets of an interleave set ([`super::targets`])
//!    are aliases of the base window, and for what they show 1 to 3 and 5 hold in both directions:
//!    a page of `base` or of a view that is not in the page cache includes every store to a target
//!    that was complete when the load began, a page of a target every store to `base`; one that is
//!    there may lag until a flush. A store to a page through `base` and one to the same page
//!    through a target, with no flush between, are a race: pages are written back whole, and either
//!    may win.
//!
//! All of this is for one export, that is one page cache, over one partition. Between *hosts*,
//! whose page caches nobody keeps coherent, the contract of
//! [`super::host_cache`] holds instead: 1 and 4 as above, each for its own files; 2 without the
//! writing back; 3 after a flush by the host itself.
//!
//! A discard drops each page at one moment while it is under way; loads then find zeros, and stores
//! after that stay: see [`super::dropped_pages`]. One that fails has dropped what its error says,
//! and nothing behind it.
//!
//! A store for which the device has no room is one that is not complete there, for as long as it
//! may wait: see [`super::write_backs`].
//!
//! How: reads of views mark their pages in [`ServedPages`]; a base store that has reached the
//! device takes the marks of the view pages over it, and of those of targets, and queues them; one
//! thread for each file tells the kernel to drop them: see [`Invalidations`].

use std::io;
use std::iter::once;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use lamina_device::device::{DeviceError, Partition};

use super::ServeError;
use super::dropped_pages::{Gate, LetGo, Reading};
use super::export_file::ExportFile;
use super::flusher::{Done, Flusher, WriteBackWith, needed};
use super::host_cache::HostCache;
use super::invalidations::{Invalidations, join_touching};
use super::served_pages::{PAGE_BYTES, ServedPages};
use super::targets::{TargetRanges, Targets};
use super::write_backs::{Answer, Asker, WriteBacks};

/// Holes with dirty pages that are passed over for one answer.
const MAX_HOLES: usize = 64;
/// Bytes that are discarded at once: reads and writes of the window wait so long.
const DISCARD_STEP: u64 = 2 << 20;

/// Keeps the windows of one export coherent.
pub struct Coherence {
    partition: Partition,
    /// The host's, if this is a host's export.
    cache: Option<Arc<HostCache>>,
    served: ServedPages,
    /// The targets of the base window, if it is an interleave set.
    targets: Option<Targets>,
    /// Pages of the base window to be dropped.
    base: Invalidations,
    /// Pages of the views window to be dropped.
    views: Invalidations,
    write_backs: WriteBacks,
    gate: Arc<Gate>,
    /// Held by who discards and tells the kernel.
    discarding: Mutex<()>,
    /// Requests that the kernel wrote pages back with.
    came: AtomicU64,
    flusher: std::sync::OnceLock<Flusher>,
    /// What is to be written back as soon as that can be done; `None` from then on. A worker
    /// process answers requests before it has opened the files to write back by, and those may be
    /// of views over pages that were dirty before it came.
    early: Mutex<Option<Vec<(DirtyRanges, Done)>>>,
    /// The same for the views window, whose dirty pages are stores to be dropped.
    scrubber: std::sync::OnceLock<Flusher>,
}

/// Ranges to write back before something is computed from the bytes under them.
#[derive(Debug, Default)]
pub(super) struct DirtyRanges {
    /// Of the base window.
    base: Vec<Range<u64>>,
    /// Of its targets.
    targets: TargetRanges,
}

impl Coherence {
    /// `max_wait` is how long a write-back may wait for room.
    pub(super) fn new(partition: Partition, cache: Option<Arc<HostCache>>, max_wait: Duration) -> Self {
        let gate = Arc::new(Gate::default());
        Self {
            served: ServedPages::new(partition.views_bytes()),
            // A set is a whole device, and no host's.
            targets: partition.device().set().map(|set| Targets::new(set, &partition, max_wait, &gate)),
            write_backs: WriteBacks::new(partition.clone(), ExportFile::Base, max_wait, Arc::clone(&gate)),
            gate,
            discarding: Mutex::default(),
            came: AtomicU64::new(0),
            partition,
            cache,
            base: Invalidations::default(),
            views: Invalidations::default(),
            flusher: std::sync::OnceLock::new(),
            early: Mutex::new(Some(Vec::new())),
            scrubber: std::sync::OnceLock::new(),
        }
    }

    pub(super) fn targets(&self) -> Option<&Targets> {
        self.targets.as_ref()
    }

    /// Starts writing back through the files, opened through the mount: `base`, `views`, and the
    /// targets in order. Over the first there are so many `threads`.
    pub(super) fn start_flushing(
        &self,
        files: Vec<std::fs::File>,
        threads: usize,
        with: WriteBackWith,
    ) -> io::Result<()> {
        let again = |_| io::Error::other("flushing was started before");
        let mut files = files.into_iter();
        let mut start = |bytes, threads| {
            Flusher::start(files.next().ok_or(io::ErrorKind::InvalidInput)?, bytes, threads, with)
        };
        let base = start(self.partition.base_bytes(), threads)?;
        self.scrubber.set(start(self.partition.views_bytes(), 1)?).map_err(again)?;
        if let Some(targets) = &self.targets {
            targets.start_flushing(start)?;
        }
        self.flusher.set(base).map_err(again)?;
        let early = self.early.lock().unwrap_or_else(PoisonError::into_inner).take();
        early.into_iter().flatten().for_each(|(dirty_ranges, done)| self.flush_pages(dirty_ranges, done));
        Ok(())
    }

    /// The explicit fence: afterwards every load of a view sees every store to these base bytes
    /// that was complete before.
    ///
    /// `length` may pass the end of the window. Sleeps; never call it from a FUSE worker.
    ///
    /// # Errors
    ///
    /// When the device refused a dirty page, or the mount is going away.
    pub fn flush(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        let end = offset.saturating_add(length).min(self.partition.base_bytes());
        if offset < end {
            let flushed = self.flush_pages_and_wait(self.all_over(once(offset..end).collect()));
            flushed.map_err(|source| ServeError::Flush { offset, length, source })?;
            if let Some(cache) = &self.cache {
                self.merging(|changed| cache.write_back(offset..end, changed))?;
            }
        }
        let whole = 0..self.partition.views_bytes();
        if self.scrubber.get().is_some_and(|views| views.needed(std::slice::from_ref(&whole))) {
            let scrub =
                || on(&self.scrubber, |views, done| views.write_back(once(whole.clone()).collect(), done));
            // That stores are refused is what was wanted, and who made them is told by a descriptor
            // of their own. The first refusal may be of one that was on its way before, and hide
            // one more.
            let refused = |why: &io::Error| why.raw_os_error() == Some(libc::EROFS);
            let again =
                |done: io::Result<()>| done.or_else(|why| if refused(&why) { scrub() } else { Err(why) });
            let scrubbed = again(again(scrub())).or_else(|why| if refused(&why) { Ok(()) } else { Err(why) });
            scrubbed.map_err(|source| ServeError::Flush { offset, length, source })?;
        }
        self.drain()
    }

    /// Drops what the host holds of these base bytes, and of the views over them: its next loads
    /// are the device's bytes. What the host stored into the pages that the range touches and did
    /// not flush is written back first. Between windows that are coherent there is nothing to drop.
    /// Sleeps like [`Self::flush`].
    ///
    /// # Errors
    ///
    /// When the device cannot store what has to be written back, which then stays, or the mount is
    /// going away.
    pub fn invalidate(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        if self.cache.is_none() {
            return Ok(());
        }
        let end = offset.saturating_add(length).min(self.partition.base_bytes());
        if offset < end {
            self.drop_pages(once(offset..end), true)?;
            let over = self.partition.views_over_base(offset, end - offset);
            self.views_changed(over)?;
        }
        Ok(())
    }

    /// Takes a host's access to the region away: see [`super::host_cache`]. When this returns, none
    /// of its stores reaches the device any more. Its loads are poison after [`Self::drop_all`].
    /// Those who are coherent have nothing that could be taken.
    ///
    /// # Errors
    ///
    /// When the next process could not be told; then nothing is revoked.
    pub(super) fn revoke(&self) -> Result<(), ServeError> {
        self.cache.as_ref().map_or(Ok(()), |cache| cache.revoke().map_err(ServeError::Revoke))
    }

    /// Gives a host its access back, as if it had been started anew.
    ///
    /// # Errors
    ///
    /// When the mount is going away, or the next process could not be told.
    pub(super) fn admit(&self) -> Result<(), ServeError> {
        let Some(cache) = &self.cache else { return Ok(()) };
        cache.admit(|| self.drop_all())
    }

    /// Has the page cache drop all pages of a host that was revoked. Sleeps like [`Self::flush`].
    ///
    /// # Errors
    ///
    /// When the mount is going away, or a page could not be written back; all are dropped still.
    pub(super) fn drop_all(&self) -> Result<(), ServeError> {
        let Some(cache) = &self.cache else { return Ok(()) };
        let whole = std::slice::from_ref(&(0..self.partition.base_bytes())).to_vec();
        cache.dropping(&whole);
        // First, as in `drop_leaving`. What comes of it is refused by the cache.
        let written_back = on(&self.flusher, |base, done| base.write_back(whole.clone(), done));
        self.base.queue(whole.iter().cloned());
        let views = self.views_changed(once(0..self.partition.views_bytes()));
        let drained = self.drain();
        cache.dropped(&whole);
        written_back.map_err(|source| ServeError::Flush { offset: 0, length: 0, source })?;
        views.and(drained)
    }

    /// Has the page cache and the host's own drop the base pages that `ranges` touch: how many
    /// went.
    pub(super) fn drop_pages(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        requested: bool,
    ) -> Result<u64, ServeError> {
        let Some(cache) = &self.cache else { return Ok(0) };
        let mut ranges: Vec<_> = ranges
            .into_iter()
            .map(|range| range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES))
            .collect();
        join_touching(&mut ranges);
        cache.dropping(&ranges);
        let dropped = self.drop_leaving(cache, &ranges, requested);
        cache.dropped(&ranges);
        dropped
    }

    fn drop_leaving(
        &self,
        cache: &HostCache,
        ranges: &[Range<u64>],
        requested: bool,
    ) -> Result<u64, ServeError> {
        for range in ranges {
            cache.leave(range.clone());
        }
        // First, and on threads that a kill can end: see `write_back`.
        let written_back = on(&self.flusher, |base, done| base.write_back(ranges.to_vec(), done));
        written_back.map_err(|source| ServeError::Flush { offset: 0, length: 0, source })?;
        self.base.queue(ranges.iter().cloned());
        self.drain()?;
        let mut went = 0;
        self.merging(|changed| {
            ranges.iter().try_for_each(|range| cache.left(range.clone(), changed).map(|pages| went += pages))
        })?;
        cache.count_dropped(went, requested);
        Ok(went)
    }

    /// Has a host's cache merge into the device, and drops this host's view pages over what
    /// changed, even if not all could be merged.
    fn merging(
        &self,
        merge: impl FnOnce(&mut Vec<Range<u64>>) -> Result<(), DeviceError>,
    ) -> Result<(), ServeError> {
        let mut changed = Vec::new();
        let merged = merge(&mut changed);
        for range in changed {
            self.changed(ExportFile::Base, range.start, range.end - range.start);
        }
        Ok(merged?)
    }

    /// Drops the base bytes of a range: they read as zero afterwards, in views too. Sleeps like
    /// [`Self::flush`], but never for room: what is stored in the range and has not reached the
    /// device needs none.
    ///
    /// Each page is dropped at one moment, when the kernel lets go of it: what is stored into it
    /// later stays. See [`super::dropped_pages`].
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, the device cannot drop a part of a block, or the
    /// mount is going away. What lies behind the bytes that the error says are dropped is as it
    /// was.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        let window = self.partition.base_bytes();
        let end = offset.checked_add(length).filter(|&end| end <= window);
        let Some(end) = end else { return Err(ServeError::PastEnd { offset, length, window }) };
        let mut at = offset;
        while at < end {
            // Another's end must not take this one's marks.
            let _one_by_one = self.discarding.lock().unwrap_or_else(PoisonError::into_inner);
            let (gone, dropped) = self.drop_step(&(at..end), LetGo::Requested);
            at = gone.end;
            self.write_backs.take_out_dropped();
            self.targets.iter().for_each(Targets::take_out_dropped);
            let let_go = self.written_beside(gone.start, gone.end - gone.start);
            self.write_backs.dropped().forget(&gone);
            self.targets.iter().for_each(|targets| targets.forget_dropped(&gone));
            let_go?;
            dropped.map_err(|source| ServeError::Discard {
                offset,
                length,
                done: gone.end - offset,
                source,
            })?;
        }
        Ok(())
    }

    /// Drops the base bytes of a range for the kernel, which lets go of the pages itself when all
    /// are dropped. Never sleeps on the mount.
    pub(super) fn punch(&self, range: Range<u64>) -> Result<(), DeviceError> {
        let mut at = range.start;
        while at < range.end {
            let (gone, dropped) = self.drop_step(&(at..range.end), LetGo::ByItself);
            at = gone.end;
            self.changed(ExportFile::Base, gone.start, gone.end - gone.start);
            if let Some(targets) = &self.targets {
                targets.drop_cached(&gone);
            }
            if let Err(why) = dropped {
                // Then it does not.
                self.base.queue(once(range.start..at).filter(|gone| !gone.is_empty()));
                return Err(why);
            }
        }
        Ok(())
    }

    /// Has the device drop the beginning of a range, and marks what it dropped: which that is.
    fn drop_step(&self, range: &Range<u64>, let_go: LetGo) -> (Range<u64>, Result<(), DeviceError>) {
        let _alone = self.gate.write();
        let (length, mut done) = (range.end - range.start, 0);
        let dropped = self.partition.discard_step(range.start, length, DISCARD_STEP, &mut done);
        let gone = range.start..range.start + done;
        self.write_backs.dropped().mark(&gone, let_go);
        self.targets.iter().for_each(|targets| targets.mark_dropped(&gone, let_go));
        (gone, dropped)
    }

    /// The kernel reads a range of a file: nothing is dropped as long as this is held. Among those
    /// who read past the page cache are some who have not dropped what they had there, but they
    /// cannot be told from others: a read through a descriptor that was opened with `O_DIRECT` may
    /// be for a mapping of it.
    pub(super) fn reading(&self, which: ExportFile, offset: u64, length: u64) -> Reading<'_> {
        let gate = self.gate.read();
        if let Some(write_backs) = self.write_backs(which) {
            write_backs.dropped().read(&(offset..offset.saturating_add(length)));
        }
        gate
    }

    /// A range of a file is written through the page cache: nothing is dropped as long as this is
    /// held.
    pub(super) fn writing(&self, which: ExportFile, offset: u64, length: u64) -> Reading<'_> {
        let gate = self.gate.read();
        if let Some(write_backs) = self.write_backs(which) {
            write_backs.dropped().written(&(offset..offset.saturating_add(length)));
        }
        gate
    }

    /// Stores what the kernel writes back of a file: the answer, or nothing if it waits for room.
    /// Never sleeps on the mount.
    pub(super) fn write_back(
        &self,
        which: ExportFile,
        asker: Asker,
        offset: u64,
        bytes: &mut [u8],
    ) -> Option<Answer> {
        let Some(write_backs) = self.write_backs(which) else { return Some(Err(libc::EBADF)) };
        self.came.fetch_add(1, Ordering::Relaxed);
        // What is written back stays in the page cache.
        self.serving(which, offset, bytes.len() as u64);
        write_backs.take(asker, offset, bytes, |stored| {
            self.changed(which, stored.start, stored.end - stored.start);
        })
    }

    /// Tries write-backs of a file that wait again, and answers them in the end, until
    /// [`Self::close`].
    pub(super) fn retry_until_closed(&self, which: ExportFile, answer: impl Fn(Asker, Answer)) {
        let stored = |stored: Range<u64>| self.changed(which, stored.start, stored.end - stored.start);
        if let Some(write_backs) = self.write_backs(which) {
            write_backs.retry_until_closed(stored, answer);
        }
    }

    fn write_backs(&self, which: ExportFile) -> Option<&WriteBacks> {
        match which {
            ExportFile::Base => Some(&self.write_backs),
            ExportFile::Views => None,
            ExportFile::Target(target) => self.targets.as_ref()?.write_backs(target),
        }
    }

    /// Drops the given ranges of the views window from the page cache and returns when they are
    /// gone: for the directory and for views that were made or removed. Sleeps like
    /// [`Self::flush`].
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub fn views_changed(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Result<(), ServeError> {
        self.drop_views_soon(ranges);
        self.views.drain()
    }

    /// [`Self::views_changed`] of who answers the kernel, and so does not wait until it has dropped
    /// them.
    pub(super) fn drop_views_soon(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut taken = Vec::new();
        for range in ranges {
            self.served.take(range, &mut taken);
        }
        self.views.queue(taken);
    }

    /// What to write back before this range of a file is computed, if anything is dirty. Never
    /// sleeps.
    pub(super) fn dirty_ranges(&self, which: ExportFile, offset: u64, length: u64) -> Option<DirtyRanges> {
        if self.cache.is_some() {
            return None;
        }
        let range = offset..offset.saturating_add(length);
        let dirty_ranges = match (which, &self.targets) {
            (ExportFile::Views, _) => self.dirty_of(self.partition.base_under_views(offset, length)),
            (ExportFile::Base, None) => return None,
            (ExportFile::Base, Some(targets)) => {
                let end = range.end.min(self.partition.base_bytes());
                let range = offset.min(end)..end;
                DirtyRanges { base: Vec::new(), targets: targets.dirty_over(std::slice::from_ref(&range)) }
            }
            (ExportFile::Target(target), targets) => {
                let under = targets.as_ref().map_or_else(Vec::new, |targets| targets.under(target, &range));
                DirtyRanges { targets: Vec::new(), ..self.dirty_of(under) }
            }
        };
        (!dirty_ranges.base.is_empty() || !dirty_ranges.targets.is_empty()).then_some(dirty_ranges)
    }

    /// These ranges of the base window and the targets over them, as far as they may have dirty
    /// pages. Never sleeps.
    fn dirty_of(&self, base: Vec<Range<u64>>) -> DirtyRanges {
        let targets = self.targets.as_ref().map_or_else(Vec::new, |targets| targets.dirty_over(&base));
        let needed = needed(&self.flusher, &base);
        DirtyRanges { base: if needed { base } else { Vec::new() }, targets }
    }

    /// These ranges of the base window and the targets over them.
    fn all_over(&self, base: Vec<Range<u64>>) -> DirtyRanges {
        let targets = self.targets.as_ref().map_or_else(Vec::new, |targets| targets.over(&base));
        DirtyRanges { base, targets }
    }

    /// Brings dirty base pages of a range to the device. Sleeps like [`Self::flush`].
    pub(super) fn settle_range(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        let end = offset.saturating_add(length).min(self.partition.base_bytes());
        if offset < end { self.settle_ranges(once(offset..end).collect()) } else { Ok(()) }
    }

    /// Brings dirty base pages under a range of the views window to the device. Sleeps like
    /// [`Self::flush`].
    pub(super) fn settle_under_views(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        self.settle_ranges(self.partition.base_under_views(offset, length))
    }

    fn settle_ranges(&self, ranges: Vec<Range<u64>>) -> Result<(), ServeError> {
        let Some(offset) = ranges.first().map(|range| range.start) else { return Ok(()) };
        if self.cache.is_some() || self.flusher.get().is_none() {
            return Ok(());
        }
        let length = ranges.last().map_or(offset, |range| range.end).saturating_sub(offset);
        let settled = self.flush_pages_and_wait(self.dirty_of(ranges));
        settled.map_err(|source| ServeError::Flush { offset, length, source })
    }

    fn flush_pages_and_wait(&self, dirty_ranges: DirtyRanges) -> io::Result<()> {
        self.flusher.get().ok_or(io::ErrorKind::NotConnected)?;
        let (done, answer) = mpsc::channel();
        self.flush_pages(dirty_ranges, Box::new(move |result| drop(done.send(result))));
        answer.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
    }

    /// Says that base bytes in the device were changed beside the mount, and returns when the page
    /// cache shows them. Sleeps like [`Self::flush`].
    pub(super) fn written_beside(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        self.changed(ExportFile::Base, offset, length);
        let range = offset..offset.saturating_add(length);
        if self.flusher.get().is_some_and(|base| base.cached(&range)) {
            self.base.queue(once(range.clone()));
        }
        if let Some(targets) = &self.targets {
            targets.drop_cached(&range);
        }
        self.base.drain()?;
        self.drain()
    }

    /// The device number of the mounted file system.
    pub(super) fn mount_number(&self) -> Option<u64> {
        self.flusher.get().and_then(Flusher::mount_number)
    }

    /// Writes back elsewhere, then calls `done` there. Never sleeps.
    pub(super) fn flush_pages(&self, dirty_ranges: DirtyRanges, done: Done) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(early) = &mut *early {
            return early.push((dirty_ranges, done));
        }
        drop(early);
        let of_targets = dirty_ranges.targets.into_iter().filter(|(_, ranges)| !ranges.is_empty());
        let flusher = |target| self.targets.as_ref().and_then(|targets| targets.flusher(target));
        let mut jobs: Vec<_> =
            of_targets.filter_map(|(target, ranges)| Some((flusher(target)?, ranges))).collect();
        jobs.extend(
            self.flusher
                .get()
                .filter(|_| !dirty_ranges.base.is_empty())
                .map(|base| (base, dirty_ranges.base)),
        );
        if jobs.is_empty() {
            let closed = || io::Error::from_raw_os_error(libc::ESHUTDOWN);
            return done(self.flusher.get().map(drop).ok_or_else(closed));
        }
        let all = Arc::new(Mutex::new((jobs.len(), Ok(()), Some(done))));
        for (flusher, ranges) in jobs {
            let all = Arc::clone(&all);
            let one_done = move |result: io::Result<()>| {
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                let (left, so_far, done) = &mut *all;
                *left -= 1;
                if so_far.is_ok() {
                    *so_far = result;
                }
                if let Some(done) = done.take_if(|_| *left == 0) {
                    let result = std::mem::replace(so_far, Ok(()));
                    drop(all);
                    done(result);
                }
            };
            flusher.write_back(ranges, Box::new(one_done));
        }
    }

    /// Says that pages of a file are about to be computed for the page cache, or are in it already.
    pub(super) fn serving(&self, which: ExportFile, offset: u64, length: u64) {
        let range = offset..offset.saturating_add(length);
        match (which, &self.targets) {
            (ExportFile::Views, _) => self.served.mark(range),
            (ExportFile::Base, Some(targets)) => targets.serving_base(range),
            (ExportFile::Target(target), Some(targets)) => targets.serving(target, range),
            (ExportFile::Base | ExportFile::Target(_), None) => {}
        }
    }

    /// Says that bytes in the device have changed, of the base window or through one of its
    /// targets.
    pub(super) fn changed(&self, which: ExportFile, offset: u64, length: u64) {
        let range = offset..offset.saturating_add(length);
        let base = match (which, &self.targets) {
            (ExportFile::Views, _) | (ExportFile::Target(_), None) => return,
            (ExportFile::Base, None) => vec![range],
            (ExportFile::Base, Some(targets)) => {
                targets.base_changed(offset..range.end.min(self.partition.base_bytes()));
                vec![range]
            }
            (ExportFile::Target(target), Some(targets)) => {
                let under = targets.under(target, &range);
                self.base.queue(targets.take_base(&under));
                under
            }
        };
        let mut taken = Vec::new();
        for range in base {
            for range in self.partition.views_over_base(range.start, range.end - range.start) {
                self.served.take(range, &mut taken);
            }
        }
        self.views.queue(taken);
    }

    /// Says that the page cache holds bytes for the views window that the device did not give.
    pub(super) fn views_soiled(&self, offset: u64, length: u64) {
        self.views.queue(once(offset..offset.saturating_add(length)));
    }

    /// Says that nobody knows any more what the page cache was given: of the views, of a host's
    /// base window, and of one with targets and of these.
    pub(super) fn forgotten(&self) {
        self.views_soiled(0, self.partition.views_bytes());
        if self.cache.is_some() || self.targets.is_some() {
            self.base.queue(once(0..self.partition.base_bytes()));
        }
        if let Some(targets) = &self.targets {
            targets.forgotten();
        }
    }

    /// Waits until everything queued by now is invalidated: of the views, of what a host holds, and
    /// of a set.
    fn drain(&self) -> Result<(), ServeError> {
        if self.cache.is_some() || self.targets.is_some() {
            self.base.drain()?;
        }
        if let Some(targets) = &self.targets {
            targets.drain()?;
        }
        self.views.drain()
    }

    /// Hands ranges of a file that the kernel is to drop to `invalidate`, until [`Self::close`].
    pub(super) fn invalidate_until_closed(&self, which: ExportFile, mut invalidate: impl FnMut(&Range<u64>)) {
        match (which, &self.targets) {
            (ExportFile::Base, _) => self.base.run_until_closed(|range| {
                self.write_backs.dropped().invalidate(range, self.flusher.get(), &mut invalidate);
            }),
            (ExportFile::Views, _) => self.views.run_until_closed(invalidate),
            (ExportFile::Target(target), Some(targets)) => {
                targets.invalidate_until_closed(target, invalidate);
            }
            (ExportFile::Target(_), None) => {}
        }
    }

    /// The first byte of the base window from `from` on, inside it, that may be anything but zero,
    /// or its end. What may be dirty in the page cache is no hole, and of files with targets or a
    /// host's cache nothing is: who looks for the data in a file must never miss a store. Never
    /// sleeps.
    pub(super) fn next_data(&self, from: u64) -> u64 {
        let end = self.partition.base_bytes();
        if self.cache.is_some() || self.targets.is_some() {
            return from;
        }
        let found = self.partition.next_data(from..end);
        let first = self.flusher.get().map_or(from, |base| base.first_dirty(from..found));
        // What was dirty before, and is not any more, has reached the device since it was looked
        // at.
        self.partition.next_data(from..first)
    }

    /// The first byte of the base window from `from` on, inside it, where a hole begins, or its
    /// end. A hole of which anything may be dirty counts as data. Never sleeps.
    pub(super) fn next_hole(&self, mut from: u64) -> u64 {
        let end = self.partition.base_bytes();
        if self.cache.is_some() || self.targets.is_some() {
            return end;
        }
        for _ in 0..MAX_HOLES {
            from = self.partition.next_hole(from..end);
            if from == end || self.next_data(from) > from {
                return from;
            }
            from = self.partition.next_data(from..end);
        }
        end
    }

    /// Ends writing back and invalidating; whoever waits gets [`ServeError::Closing`].
    pub(crate) fn close(&self) {
        if let Some(cache) = &self.cache {
            cache.close();
        }
        let early = self.early.lock().unwrap_or_else(PoisonError::into_inner).take();
        for (_, done) in early.into_iter().flatten() {
            done(Err(io::Error::from_raw_os_error(libc::ESHUTDOWN)));
        }
        for flusher in [&self.flusher, &self.scrubber].into_iter().filter_map(|flusher| flusher.get()) {
            flusher.stop();
        }
        if let Some(targets) = &self.targets {
            targets.close();
        }
        self.write_backs.close();
        self.base.close();
        self.views.close();
    }

    /// Brings every dirty base page to the device, and gives up only if for as long as `max_wait`
    /// none comes. What finds no room is given up: it is listed as lost. `goes_on` is told each
    /// `pace` in which pages came.
    ///
    /// # Errors
    ///
    /// When stores may be lost that no list has.
    pub(super) fn settle(&self, max_wait: Duration, pace: Duration, goes_on: &dyn Fn()) -> io::Result<()> {
        self.write_backs.hurry();
        if let Some(targets) = &self.targets {
            targets.hurry();
        }
        if self.flusher.get().is_none() {
            return Ok(());
        }
        let (done, answer) = mpsc::channel();
        let everything = self.all_over(once(0..self.partition.base_bytes()).collect());
        let started = Instant::now();
        self.flush_pages(everything, Box::new(move |result| drop(done.send(result))));
        let (mut came, mut last) = (self.came.load(Ordering::Relaxed), Instant::now());
        let settled = loop {
            let settled = answer.recv_timeout(pace.min(max_wait));
            let now = self.came.load(Ordering::Relaxed);
            if now != came {
                (came, last) = (now, Instant::now());
                goes_on();
            }
            if !matches!(settled, Err(mpsc::RecvTimeoutError::Timeout)) || last.elapsed() >= max_wait {
                break settled;
            }
        };
        match settled {
            Ok(Ok(())) => {
                self.merge_all().map_err(|why| io::Error::other(format!("a host's are lost: {why}")))?;
                tracing::debug!(seconds = started.elapsed().as_secs_f64(), "stores settled");
            }
            Ok(Err(why)) => {
                tracing::warn!("stores may be lost: {why}");
                if self.cache.is_some() {
                    self.merge_all()
                        .map_err(|also| io::Error::other(format!("a host's are lost: {also}")))?;
                    return Err(why);
                }
            }
            Err(_) => {
                let why = format!("none was written back for {} s", max_wait.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
        Ok(())
    }
}

impl Coherence {
    /// Merges all that a host stored.
    fn merge_all(&self) -> Result<(), DeviceError> {
        let Some(cache) = &self.cache else { return Ok(()) };
        cache.write_back(0..self.partition.base_bytes(), &mut Vec::new())
    }
}

/// Has a flusher do something and waits for it.
fn on(flusher: &std::sync::OnceLock<Flusher>, start: impl FnOnce(&Flusher, Done)) -> io::Result<()> {
    let flusher = flusher.get().ok_or(io::ErrorKind::NotConnected)?;
    let (done, answer) = mpsc::channel();
    start(flusher, Box::new(move |result| drop(done.send(result))));
    answer.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
}

#[cfg(test)]
mod tests;
