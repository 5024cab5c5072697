//! The coherence contract between the two windows, and what keeps it.
//!
//! The host's page cache plays the part of the CPU caches over the device, so:
//!
//! 1. **Same window: always current.** Loads of `base` see the last store to `base`, through every mapping and
//!    descriptor on the host and in every guest. There is one page cache.
//! 2. **Fresh views: always current.** A view page that is not in the page cache is computed from base bytes that include
//!    every store to `base` that was complete when the load began. The dirty base pages under it are laundered first.
//! 3. **Cached views: current after a flush.** A view page that is in the page cache may lag behind stores to `base` until
//!    they have reached the device *and* the page was invalidated. [`Coherence::flush`] is the fence: when it returns,
//!    every load of a view sees every store to the flushed base range that was complete when it was called. Stores that
//!    reach the device for another reason (the kernel's own writeback, `msync`) invalidate too, a moment later.
//! 4. **Views take no stores.** `write` to a view is refused. A store through a mapping cannot be refused; it lives in
//!    the page cache until the kernel writes the page back, then it is counted and dropped and the page invalidated.
//!    It changes nothing in the device and no other page, and after a flush, of any range, nobody sees it any more.
//! 5. **Beside the mount: as if uncached.** Disks ([`super::vhost_user`]) reach the device without the host's page cache. A
//!    read of a disk sees every store and write that was complete when it began, through whichever way; dirty base pages of the
//!    mount are laundered first. A write to a disk is seen by every load through the mount that begins after it is complete: pages
//!    of `base` and of views over it were dropped by then. Stores through the mount to a page that a disk is
//!    writing at the same moment are a race, as they are between hosts: the page is written back whole, and either may win.
//!    What the guest of a disk keeps in its own page cache is its own: after a write to the base disk it drops the pages of
//!    the views disk that it holds (`blockdev --flushbufs`) or reads them with `O_DIRECT`. The disk's flush is [`Coherence::flush`] of
//!    everything. A disk is no host: hosts that share a region see its writes as those of another host, and it sees of theirs what has
//!    reached the device.
//! 6. **Lanes: as views, but written too.** The lanes of an interleave set ([`super::lanes`]) are aliases of the base window, and for what they show 1 to 3 and 5 hold in both directions:
//!    a page of `base` or of a view that is not in the page cache includes every store to a lane that was complete when the load began, a page of a lane every store to `base`; one
//!    that is there may lag until a flush. A store to a page through `base` and one to the same page through a lane, with no flush between, are a race: pages are
//!    written back whole, and either may win.
//!
//! All of this is for one pair of files, that is one page cache, over one partition. Between *hosts*, whose page caches nobody keeps coherent, the contract of
//! [`super::host_cache`] holds instead: 1 and 4 as above, each for its own files; 2 without the laundering; 3 after a flush by the host itself.
//!
//! How: reads of views mark their pages in [`ServedPages`]; a base store that has reached the device takes the marks of
//! the view pages over it, and of those of lanes, and queues them here; one thread tells the kernel to drop them. It must be a thread of its own:
//! the kernel waits in that call for reads of the same pages that are under way, which FUSE workers have to answer.

use std::io;
use std::iter::once;
use std::ops::Range;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{DeviceError, Partition};

use super::ServeError;
use super::host_cache::HostCache;
use super::lanes::{Face, LaneRanges, Lanes, push_lane};
use super::launder::{Done, LaunderWith, Launderer};
use super::served_pages::{PAGE_BYTES, ServedPages, push};

/// Keeps the windows of one pair of files coherent.
pub struct Coherence {
    partition: Partition,
    /// The host's, if this is a host's pair.
    cache: Option<Arc<HostCache>>,
    served: ServedPages,
    /// The lanes of the base window, if it is an interleave set.
    lanes: Option<Lanes>,
    queue: Mutex<Queue>,
    /// Signalled when something was queued or the end has come.
    queued: Condvar,
    /// Signalled when a batch is through.
    drained: Condvar,
    launderer: std::sync::OnceLock<Launderer>,
    /// The same for the views window, whose dirty pages are stores to be dropped.
    scrubber: std::sync::OnceLock<Launderer>,
}

/// Ranges to invalidate.
#[derive(Default)]
struct Queue {
    /// Of the views window.
    ranges: Vec<Range<u64>>,
    /// Of the base window.
    base_ranges: Vec<Range<u64>>,
    /// Of its lanes.
    lane_ranges: LaneRanges,
    /// Batches of which these are the next: what is queued now is through when `batches_done` exceeds it.
    batch: u64,
    batches_done: u64,
    closed: bool,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.base_ranges.is_empty() && self.lane_ranges.is_empty()
    }
}

/// Ranges to launder before something is computed from the bytes under them.
#[derive(Debug, Default)]
pub(super) struct Laundry {
    /// Of the base window.
    base: Vec<Range<u64>>,
    /// Of its lanes.
    lanes: LaneRanges,
}

impl Coherence {
    pub(super) fn new(partition: Partition, cache: Option<Arc<HostCache>>) -> Self {
        Self {
            served: ServedPages::new(partition.views_bytes()),
            // A set is a whole device, and no host's.
            lanes: partition.device().set().map(|set| Lanes::new(set, partition.base_bytes())),
            partition,
            cache,
            queue: Mutex::default(),
            queued: Condvar::new(),
            drained: Condvar::new(),
            launderer: std::sync::OnceLock::new(),
            scrubber: std::sync::OnceLock::new(),
        }
    }

    pub(super) fn lanes(&self) -> Option<&Lanes> {
        self.lanes.as_ref()
    }

    /// Starts laundering through `base` and `views`, the two windows opened through the mount.
    pub(super) fn start_laundering(
        &self,
        base: std::fs::File,
        views: std::fs::File,
        threads: usize,
        with: LaunderWith,
    ) -> io::Result<()> {
        let again = |_| io::Error::other("laundering was started before");
        self.launderer.set(Launderer::start(base, threads, with)?).map_err(again)?;
        self.scrubber.set(Launderer::start(views, 1, with)?).map_err(again)
    }

    /// The explicit fence: afterwards every load of a view sees every store to these base bytes that was complete before.
    ///
    /// `length` may pass the end of the window. Sleeps; never call it from a FUSE worker.
    ///
    /// # Errors
    ///
    /// When the device refused a dirty page, or the mount is going away.
    pub fn flush(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        let end = offset.saturating_add(length).min(self.partition.base_bytes());
        if offset < end {
            let flushed = self.launder_and_wait(self.all_over(once(offset..end).collect()));
            flushed.map_err(|source| ServeError::Flush { offset, length, source })?;
            if let Some(cache) = &self.cache {
                self.merging(|changed| cache.write_back(offset..end, changed))?;
            }
        }
        let whole = 0..self.partition.views_bytes();
        if self.scrubber.get().is_some_and(|views| views.needed(std::slice::from_ref(&whole))) {
            let scrubbed = on(&self.scrubber, |views, done| views.launder(once(whole).collect(), done));
            scrubbed.map_err(|source| ServeError::Flush { offset, length, source })?;
        }
        self.drain()
    }

    /// Drops what the host holds of these base bytes, and of the views over them: its next loads are the device's bytes. What the host stored into the pages that the range touches and did not flush
    /// is written back first. Between windows that are coherent there is nothing to drop. Sleeps like [`Self::flush`].
    ///
    /// # Errors
    ///
    /// When the device cannot store what has to be written back, which then stays, or the mount is going away.
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

    /// Has the page cache and the host's own drop the base pages that `ranges` touch: how many went.
    pub(super) fn drop_pages(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        asked: bool,
    ) -> Result<u64, ServeError> {
        let Some(cache) = &self.cache else { return Ok(0) };
        let mut ranges: Vec<_> = ranges
            .into_iter()
            .map(|range| range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES))
            .collect();
        join_touching(&mut ranges);
        cache.dropping(&ranges);
        let dropped = self.drop_leaving(cache, &ranges, asked);
        cache.dropped(&ranges);
        dropped
    }

    fn drop_leaving(&self, cache: &HostCache, ranges: &[Range<u64>], asked: bool) -> Result<u64, ServeError> {
        for range in ranges {
            cache.leave(range.clone());
        }
        // First, and on threads that a kill can end: see `launder`.
        let laundered = on(&self.launderer, |base, done| base.launder(ranges.to_vec(), done));
        laundered.map_err(|source| ServeError::Flush { offset: 0, length: 0, source })?;
        let mut queue = self.lock();
        queue.base_ranges.extend(ranges.iter().cloned());
        drop(queue);
        self.queued.notify_one();
        self.drain()?;
        let mut went = 0;
        self.merging(|changed| {
            ranges.iter().try_for_each(|range| cache.left(range.clone(), changed).map(|pages| went += pages))
        })?;
        cache.count_dropped(went, asked);
        Ok(went)
    }

    /// Has a host's cache merge into the device, and drops this host's view pages over what changed, even if not all could be merged.
    fn merging(
        &self,
        merge: impl FnOnce(&mut Vec<Range<u64>>) -> Result<(), DeviceError>,
    ) -> Result<(), ServeError> {
        let mut changed = Vec::new();
        let merged = merge(&mut changed);
        for range in changed {
            self.changed(Face::Base, range.start, range.end - range.start);
        }
        Ok(merged?)
    }

    /// Drops the base bytes of a range: they read as zero afterwards, in views too. Sleeps like [`Self::flush`].
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, or the mount is going away.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        let window = self.partition.base_bytes();
        let end = offset.checked_add(length).filter(|&end| end <= window);
        let Some(end) = end else { return Err(ServeError::PastEnd { offset, length, window }) };
        if offset < end {
            if self.lanes.is_some() {
                // What they have of it must not come back.
                self.settle_range(offset, length)?;
            }
            let dropped = on(&self.launderer, |base, done| base.punch(offset..end, done));
            dropped.map_err(|source| ServeError::Discard { offset, length, source })?;
        }
        self.drain()
    }

    /// Drops the given ranges of the views window from the page cache and returns when they are gone: for the directory
    /// and for views that were made or removed. Sleeps like [`Self::flush`].
    ///
    /// # Errors
    ///
    /// When the mount is going away.
    pub fn views_changed(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Result<(), ServeError> {
        let mut taken = Vec::new();
        for range in ranges {
            self.served.take(range, &mut taken);
        }
        self.queue(taken);
        self.drain()
    }

    /// What to launder before this range of a file is computed, if anything is dirty. Never sleeps.
    pub(super) fn laundry(&self, face: Face, offset: u64, length: u64) -> Option<Laundry> {
        if self.cache.is_some() {
            return None;
        }
        let range = offset..offset.saturating_add(length);
        let laundry = match (face, &self.lanes) {
            (Face::Views, _) => self.dirty_of(self.partition.base_under_views(offset, length)),
            (Face::Base, None) => return None,
            (Face::Base, Some(lanes)) => {
                let end = range.end.min(self.partition.base_bytes());
                let range = offset.min(end)..end;
                Laundry { base: Vec::new(), lanes: lanes.dirty_over(std::slice::from_ref(&range)) }
            }
            (Face::Lane(lane), lanes) => {
                let under = lanes.as_ref().map_or_else(Vec::new, |lanes| lanes.under(lane, &range));
                Laundry { lanes: Vec::new(), ..self.dirty_of(under) }
            }
        };
        (!laundry.base.is_empty() || !laundry.lanes.is_empty()).then_some(laundry)
    }

    /// These ranges of the base window and the lanes over them, as far as they may have dirty pages. Never sleeps.
    fn dirty_of(&self, base: Vec<Range<u64>>) -> Laundry {
        let lanes = self.lanes.as_ref().map_or_else(Vec::new, |lanes| lanes.dirty_over(&base));
        let needed = self.launderer.get().is_some_and(|launderer| launderer.needed(&base));
        Laundry { base: if needed { base } else { Vec::new() }, lanes }
    }

    /// These ranges of the base window and the lanes over them.
    fn all_over(&self, base: Vec<Range<u64>>) -> Laundry {
        let lanes = self.lanes.as_ref().map_or_else(Vec::new, |lanes| lanes.over(&base));
        Laundry { base, lanes }
    }

    /// Brings dirty base pages of a range to the device. Sleeps like [`Self::flush`].
    pub(super) fn settle_range(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        let end = offset.saturating_add(length).min(self.partition.base_bytes());
        if offset < end { self.settle_ranges(once(offset..end).collect()) } else { Ok(()) }
    }

    /// Brings dirty base pages under a range of the views window to the device. Sleeps like [`Self::flush`].
    pub(super) fn settle_under_views(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        self.settle_ranges(self.partition.base_under_views(offset, length))
    }

    fn settle_ranges(&self, ranges: Vec<Range<u64>>) -> Result<(), ServeError> {
        let Some(offset) = ranges.first().map(|range| range.start) else { return Ok(()) };
        let end = ranges.last().map_or(offset, |range| range.end);
        self.launder_and_wait(self.dirty_of(ranges)).map_err(|source| ServeError::Flush {
            offset,
            length: end.saturating_sub(offset),
            source,
        })
    }

    fn launder_and_wait(&self, laundry: Laundry) -> io::Result<()> {
        let (done, answer) = mpsc::channel();
        self.launder(laundry, Box::new(move |result| drop(done.send(result))));
        answer.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
    }

    /// Says that base bytes in the device were changed beside the mount, and returns when the page cache shows them. Sleeps like
    /// [`Self::flush`].
    pub(super) fn written_beside(&self, offset: u64, length: u64) -> Result<(), ServeError> {
        self.changed(Face::Base, offset, length);
        let range = offset..offset.saturating_add(length);
        if self.launderer.get().is_some_and(|base| base.cached(&range)) {
            push(&mut self.lock().base_ranges, range);
            self.queued.notify_one();
        }
        self.drain()
    }

    /// The device number of the mounted file system.
    pub(super) fn mount_number(&self) -> Option<u64> {
        self.launderer.get().and_then(Launderer::mount_number)
    }

    /// Launders elsewhere, then calls `done` there. Never sleeps.
    pub(super) fn launder(&self, laundry: Laundry, done: Done) {
        let of_lanes = laundry.lanes.into_iter().filter(|(_, ranges)| !ranges.is_empty());
        let launderer = |lane| self.lanes.as_ref().and_then(|lanes| lanes.launderer(lane));
        let mut jobs: Vec<_> =
            of_lanes.filter_map(|(lane, ranges)| Some((launderer(lane)?, ranges))).collect();
        jobs.extend(
            self.launderer.get().filter(|_| !laundry.base.is_empty()).map(|base| (base, laundry.base)),
        );
        if jobs.is_empty() {
            return done(Ok(()));
        }
        let all = Arc::new(Mutex::new((jobs.len(), Ok(()), Some(done))));
        for (launderer, ranges) in jobs {
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
            launderer.launder(ranges, Box::new(one_done));
        }
    }

    /// Says that pages of a file are about to be computed for the page cache, or are in it already.
    pub(super) fn serving(&self, face: Face, offset: u64, length: u64) {
        let range = offset..offset.saturating_add(length);
        match (face, &self.lanes) {
            (Face::Views, _) => self.served.mark(range),
            (Face::Base, Some(lanes)) => lanes.serving_base(range),
            (Face::Lane(lane), Some(lanes)) => lanes.serving(lane, range),
            (Face::Base | Face::Lane(_), None) => {}
        }
    }

    /// Says that bytes in the device have changed, of the base window or through one of its lanes.
    pub(super) fn changed(&self, face: Face, offset: u64, length: u64) {
        let range = offset..offset.saturating_add(length);
        let (base, of_lanes, base_pages) = match (face, &self.lanes) {
            (Face::Views, _) | (Face::Lane(_), None) => return,
            (Face::Base, None) => (vec![range], Vec::new(), Vec::new()),
            (Face::Base, Some(lanes)) => {
                let end = range.end.min(self.partition.base_bytes());
                let taken = lanes.take_over(&(offset.min(end)..end));
                (vec![range], taken, Vec::new())
            }
            (Face::Lane(lane), Some(lanes)) => {
                let under = lanes.under(lane, &range);
                let taken = lanes.take_base(&under);
                (under, Vec::new(), taken)
            }
        };
        let mut taken = Vec::new();
        for range in base {
            for range in self.partition.views_over_base(range.start, range.end - range.start) {
                self.served.take(range, &mut taken);
            }
        }
        if !base_pages.is_empty() || !of_lanes.is_empty() {
            let mut queue = self.lock();
            for range in base_pages {
                push(&mut queue.base_ranges, range);
            }
            for (lane, range) in of_lanes {
                push_lane(&mut queue.lane_ranges, lane, range);
            }
            drop(queue);
            self.queued.notify_one();
        }
        self.queue(taken);
    }

    /// Says that the page cache holds bytes for the views window that the device did not give.
    pub(super) fn views_soiled(&self, offset: u64, length: u64) {
        self.queue(once(offset..offset.saturating_add(length)));
    }

    /// Says that nobody knows any more what the page cache was given: of the views, of a host's base window, and of one with lanes and of these.
    pub(super) fn forgotten(&self) {
        self.views_soiled(0, self.partition.views_bytes());
        if self.cache.is_some() || self.lanes.is_some() {
            let mut queue = self.lock();
            queue.base_ranges.push(0..self.partition.base_bytes());
            if let Some(lanes) = &self.lanes {
                let whole = |lane| (lane, once(0..lanes.bytes(lane)).collect());
                queue.lane_ranges = lanes.numbers().map(whole).collect();
            }
            drop(queue);
            self.queued.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut ranges = ranges.into_iter().peekable();
        if ranges.peek().is_none() {
            return;
        }
        let mut queue = self.lock();
        for range in ranges {
            push(&mut queue.ranges, range);
        }
        drop(queue);
        self.queued.notify_one();
    }

    /// Waits until everything queued by now is invalidated.
    fn drain(&self) -> Result<(), ServeError> {
        let mut queue = self.lock();
        let mine = if queue.is_empty() { queue.batch } else { queue.batch + 1 };
        while queue.batches_done < mine {
            if queue.closed {
                return Err(ServeError::Closing);
            }
            queue = self.drained.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// The invalidator: hands batches of ranges to `invalidate` until [`Self::close`].
    pub(super) fn invalidate_until_closed(&self, mut invalidate: impl FnMut(Face, &Range<u64>)) {
        let (mut batch, mut base_batch) = (Vec::new(), Vec::new());
        loop {
            let mut queue = self.lock();
            while queue.is_empty() && !queue.closed {
                queue = self.queued.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            if queue.closed {
                return;
            }
            std::mem::swap(&mut queue.ranges, &mut batch);
            std::mem::swap(&mut queue.base_ranges, &mut base_batch);
            let of_lanes = std::mem::take(&mut queue.lane_ranges);
            queue.batch += 1;
            let number = queue.batch;
            drop(queue);
            for (face, batch) in [(Face::Base, &mut base_batch), (Face::Views, &mut batch)] {
                join_touching(batch);
                batch.drain(..).for_each(|range| invalidate(face, &range));
            }
            for (lane, mut ranges) in of_lanes {
                join_touching(&mut ranges);
                for range in ranges {
                    invalidate(Face::Lane(lane), &range);
                }
            }
            self.lock().batches_done = number;
            self.drained.notify_all();
        }
    }

    /// Ends laundering and invalidating; whoever waits gets [`ServeError::Closing`].
    pub(super) fn close(&self) {
        if let Some(cache) = &self.cache {
            cache.close();
        }
        for launderer in [&self.launderer, &self.scrubber].into_iter().filter_map(|launderer| launderer.get())
        {
            launderer.stop();
        }
        if let Some(lanes) = &self.lanes {
            lanes.stop();
        }
        self.lock().closed = true;
        self.queued.notify_all();
        self.drained.notify_all();
    }

    /// Brings every dirty base page to the device, for at most `patience`.
    pub(super) fn settle(&self, patience: Duration) {
        let (done, answer) = mpsc::channel();
        let everything = self.all_over(once(0..self.partition.base_bytes()).collect());
        let started = Instant::now();
        self.launder(everything, Box::new(move |result| drop(done.send(result))));
        match answer.recv_timeout(patience) {
            Ok(Ok(())) => match self.merge_all() {
                Ok(()) => tracing::debug!(seconds = started.elapsed().as_secs_f64(), "stores settled"),
                Err(why) => tracing::warn!("a host's stores are lost: {why}"),
            },
            Ok(Err(why)) => tracing::warn!("stores may be lost: {why}"),
            Err(_) => {
                tracing::warn!("stores may be lost: writing them back took over {} s", patience.as_secs());
            }
        }
    }
}

impl Coherence {
    /// Merges all that a host stored.
    fn merge_all(&self) -> Result<(), DeviceError> {
        let Some(cache) = &self.cache else { return Ok(()) };
        cache.write_back(0..self.partition.base_bytes(), &mut Vec::new())
    }
}

/// Has a launderer do something and waits for it.
fn on(launderer: &std::sync::OnceLock<Launderer>, start: impl FnOnce(&Launderer, Done)) -> io::Result<()> {
    let launderer = launderer.get().ok_or(io::ErrorKind::NotConnected)?;
    let (done, answer) = mpsc::channel();
    start(launderer, Box::new(move |result| drop(done.send(result))));
    answer.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
}

/// Sorts ranges and joins those that touch or overlap.
fn join_touching(ranges: &mut Vec<Range<u64>>) {
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
