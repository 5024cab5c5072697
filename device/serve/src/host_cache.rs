//! A host's own cache of a region that several hosts share, as CXL 2.0 leaves them: each with its
//! caches, and nothing that keeps these coherent.
//!
//! The contract. A *host* has its own export of the shared region, so its own page cache, and
//! behind that this cache:
//!
//! 1. **A host sees its own stores, always**, through every mapping and descriptor of its own base
//!    file.
//! 2. **Nobody else sees them before a flush.** [`HostCache::write_back`] brings the lines of 64
//!    bytes that a range touches to the device, if the host stored other bytes into them than it
//!    was given; lines that it left alone are not written. So hosts that store into different lines
//!    of a page lose nothing, and of two that store into the same line the later flush wins. The
//!    kernel's own write-backs end here: they are no flush.
//! 3. **A host sees others' stores only in what it does not hold.** A page that it holds stays as
//!    it is, whatever the device holds by now, until it is invalidated. Then what the host stored
//!    into it is written back, as `clflush` does, and its next load reads the device.
//! 4. **The cache is bounded**, like a processor's. A page that falls out is written back and
//!    dropped, at any time, so nobody may rely on a store *not* having reached the device, nor on a
//!    page still being held.
//! 5. **Views show what has reached the device** when they are computed, the host's own stores
//!    included only after its flush. A view page that is held stays as it is until this host
//!    flushes base bytes under it, or invalidates them. The directory is never stale.
//! 6. A line that is stored with the bytes it was given is no store: it is not written back.
//! 7. If the process that serves the device dies, the cache dies with it, as a host's does that
//!    loses power: what hosts stored, that had left their page caches and was not flushed, is lost,
//!    and no flush says so. What their page caches hold is written back and dropped at once, held
//!    against what the device has by then: in such a page all lines that differ from the device are
//!    taken for the host's, also those that another host has changed since this one was given them.
//!    `pages_unknown` counts these pages.
//! 8. **Access can be revoked**, by another host or whoever runs the device. When
//!    [`HostCache::revoke`] returns, no store of the host reaches the device any more, flushed or
//!    not, however late it comes; what it held is forgotten. Its loads are poison (0xff) as soon as
//!    its page cache has dropped its pages. This outlives the process that serves the device.
//!
//! How: the page cache may drop and write back whenever it likes, so this remembers for each page
//! that the host was given what bytes these were, and, if the host wrote it back, what bytes it has
//! now. Reads of such a page give the host's own bytes again. To drop a page it is first marked as
//! *leaving*, then the page cache drops it (which may write it back once more), then it is merged
//! into the device and forgotten; a read that comes in between, of a page that the kernel has
//! dropped, merges at once and is given the device's bytes.
//!
//! A read that needs room waits until the oldest pages have been dropped. The page cache drops a
//! page only when no read of it is under way, so a read never waits while a range that it touches
//! is being dropped, nor if the host holds any of its pages.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use lamina_device::counters;
use lamina_device::counters::{Place, Scope, Section};
use lamina_device::device::poison::PATTERN;
use lamina_device::device::{DeviceError, Partition};

use self::access::{Access, State};
use super::ServeError;

mod access;

/// Bytes of a page, the unit that a host is given and holds.
const PAGE: usize = 4096;
/// Bytes of a line, the unit that is merged.
const LINE: usize = 64;
/// Locks over the pages.
const SHARDS: u64 = 16;

/// A page's bytes.
type Bytes = Box<[u8; PAGE]>;

/// What a host holds of a shared region.
pub struct HostCache {
    partition: Partition,
    /// Pages by number.
    shards: Vec<Mutex<BTreeMap<u64, Page>>>,
    /// Pages in the order in which the host was given them first.
    order: Mutex<Order>,
    held: AtomicUsize,
    most: usize,
    room: Mutex<Room>,
    /// Signalled when somebody waits for room, or the end has come.
    crowded: Condvar,
    access: Access,
    /// Held while access changes.
    changing: Mutex<()>,
    counters: Counters,
}

/// Who waits for room.
#[derive(Default)]
struct Room {
    /// What each wants to read, and what is called when it may.
    waiting: Vec<(Range<u64>, Then)>,
    /// Ranges that are being dropped.
    dropping: Vec<Range<u64>>,
    closed: bool,
}

type Then = Box<dyn FnOnce() + Send>;

impl Room {
    /// Whether a read of `range` may wait.
    fn may_wait(&self, range: &Range<u64>) -> bool {
        !self.closed && !self.dropping.iter().any(|dropped| overlap(dropped, range))
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[derive(Default)]
struct Order {
    pages: BTreeMap<u64, u64>,
    next: u64,
}

/// A page that the host holds.
struct Page {
    /// The device's bytes as the host was given them, with what it has flushed since.
    given: Bytes,
    /// What it wrote back, if that is anything else.
    now: Option<Bytes>,
    leaving: bool,
    /// Its place in the order.
    place: u64,
}

counters! {
    struct Counters for HostNow<'_> {}

    /// What a host's cache reports of itself.
    #[derive(PartialEq, Eq)]
    pub struct HostReport by report {
        reported {
            /// The host.
            name: String = |_, given| given.name.to_owned();
            /// Whether its access was revoked.
            revoked: bool = |_, given| given.revoked;
        }
        counted {
            /// Pages that a host was given from the device.
            pages_given: Counter => pages_given "given_pages" Count;
            /// Pages that its page cache wrote back, into its cache.
            pages_written: Counter => pages_written "written_pages" Count;
            /// Lines of 64 bytes merged into the device: those that differed from what it was
            /// given.
            lines_merged: Counter => lines_merged "merged_lines" Count;
            /// Pages dropped to make space.
            pages_evicted: Counter => pages_evicted "evicted_pages" Count;
            /// Pages dropped because the host invalidated them.
            pages_invalidated: Counter => pages_invalidated "invalidated_pages" Count;
            /// Pages that it wrote back without holding them, held against what the device had by
            /// then.
            pages_unknown: Counter => pages_unknown "unknown_pages" Count;
            /// Pages that it wrote back when its access was revoked: dropped.
            pages_refused: Counter => pages_refused "refused_pages" Count;
        }
        computed {
            /// Bytes of the pages that a host may hold.
            cache_bytes: u64 = Gauge "cache" Bytes, |_, given| given.cache_bytes;
            /// Bytes of the pages that it holds.
            held_bytes: u64 = Gauge "held" Bytes, |_, given| given.held_bytes;
        }
    }
}

/// What a report needs besides the counters.
struct HostNow<'a> {
    name: &'a str,
    revoked: bool,
    cache_bytes: u64,
    held_bytes: u64,
}

/// The figures of hosts.
pub const SECTION: Section = Section {
    title: "hosts",
    scope: Scope::Host,
    places: &[Place::list("/hosts")],
    labels: &[("host", "name")],
    prefix: "host_",
    of: "",
    figures: HostReport::FIGURES,
};

impl HostCache {
    /// An empty cache over `partition` that holds up to `bytes`, at least a page.
    pub fn new(partition: Partition, bytes: u64) -> Self {
        Self {
            partition,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            order: Mutex::default(),
            held: AtomicUsize::new(0),
            most: usize::try_from(bytes / PAGE as u64).unwrap_or(usize::MAX).max(1),
            room: Mutex::default(),
            crowded: Condvar::new(),
            access: Access::new(None),
            changing: Mutex::default(),
            counters: Counters::default(),
        }
    }

    /// The same, of a host whose access is revoked while there is a file `mark`.
    #[must_use]
    pub(super) fn marked_by(self, mark: Option<PathBuf>) -> Self {
        Self { access: Access::new(mark), ..self }
    }

    /// Gives the host what it holds, or what the device has.
    ///
    /// # Errors
    /// As [`Partition::read_base`].
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, out.len())?;
        pieces(offset, out.len(), |page, inside, done| {
            let mut pages = self.shard(page).lock();
            let length = inside.len();
            if self.access.state() == State::Revoked {
                out[done..done + length].fill(PATTERN);
                return Ok(());
            }
            let held = self.give(&mut pages, page)?;
            let bytes = held.now.as_ref().unwrap_or(&held.given);
            out[done..done + length].copy_from_slice(&bytes[inside]);
            Ok(())
        })
    }

    /// Takes what the host stored: from its page cache, or by `write`. The device does not change.
    ///
    /// # Errors
    /// As [`Partition::read_base`], for a page that it does not hold.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, data.len())?;
        pieces(offset, data.len(), |page, inside, done| {
            let mut pages = self.shard(page).lock();
            // While revoked it holds none.
            if !pages.contains_key(&page) && self.access.state() != State::Granted {
                self.counters.pages_refused.add(1);
                return Ok(());
            }
            if !pages.contains_key(&page) {
                self.counters.pages_unknown.add(1);
                self.insert(&mut pages, page)?;
            }
            self.counters.pages_written.add(1);
            let Some(held) = pages.get_mut(&page) else { return Ok(()) };
            let length = inside.len();
            held.now.get_or_insert_with(|| held.given.clone())[inside]
                .copy_from_slice(&data[done..done + length]);
            if held.now.as_ref() == Some(&held.given) {
                held.now = None;
            }
            Ok(())
        })
    }

    /// Takes the host's access away, and forgets what it held. Its page cache may hold pages still,
    /// which [`Coherence::revoke`](super::Coherence::revoke) drops.
    ///
    /// # Errors
    ///
    /// When the next process could not be told of it; access is as it was then.
    pub(super) fn revoke(&self) -> io::Result<()> {
        let _alone = self.changing.lock();
        self.access.revoke()?;
        self.forget();
        Ok(())
    }

    /// Forgets all pages. Who had the lock of a page before this is done with it; who has it
    /// afterwards finds none.
    fn forget(&self) {
        for shard in &self.shards {
            let mut pages = shard.lock();
            let mut order = self.order.lock();
            for page in pages.values() {
                order.pages.remove(&page.place);
            }
            self.held.fetch_sub(pages.len(), Ordering::Relaxed);
            pages.clear();
        }
    }

    /// Gives the host its access back, as to a host that was started anew: `drop_all` has its page
    /// cache drop all pages, of which those that it held while revoked are poison.
    ///
    /// # Errors
    ///
    /// When `drop_all` fails, or the next process could not be told; it is revoked then.
    pub(super) fn admit(&self, drop_all: impl FnOnce() -> Result<(), ServeError>) -> Result<(), ServeError> {
        let _alone = self.changing.lock();
        if self.access.state() == State::Granted {
            return Ok(());
        }
        self.access.begin_return();
        let granted = drop_all().and_then(|()| self.access.grant().map_err(ServeError::Revoke));
        if granted.is_err() {
            self.access.end_return();
            self.forget();
        }
        granted
    }

    /// Whether the host's access was revoked, and is not given back yet.
    pub fn is_revoked(&self) -> bool {
        self.access.state() != State::Granted
    }

    /// Whether what the host loads is poison.
    pub(super) fn is_poison(&self) -> bool {
        self.access.state() == State::Revoked
    }

    /// Merges the lines that `range` touches into the device, where the host stored into them, and
    /// adds the ranges that changed to `changed`.
    ///
    /// # Errors
    /// As [`Partition::write_base`]; what was not merged stays the host's.
    pub fn write_back(&self, range: Range<u64>, changed: &mut Vec<Range<u64>>) -> Result<(), DeviceError> {
        self.each(&range, |page, held| {
            let start = page * PAGE as u64;
            let end = start + PAGE as u64;
            let inside = range.start.max(start) - start..range.end.min(end) - start;
            self.merge(page, held, inside, changed)
        })
    }

    /// Marks the pages that `range` touches as leaving. The page cache must drop them next.
    pub fn leave(&self, range: Range<u64>) {
        // This cannot fail: nothing is stored.
        let _ = self.each(&range, |_, held| {
            held.leaving = true;
            Ok(())
        });
    }

    /// Forgets the pages that `range` touches and that are leaving, after merging them. Says how
    /// many went.
    ///
    /// # Errors
    /// As [`Self::write_back`]; such a page stays.
    pub fn left(&self, range: Range<u64>, changed: &mut Vec<Range<u64>>) -> Result<u64, DeviceError> {
        let (mut went, mut failure) = (0, Ok(()));
        for page in self.pages_of(&range) {
            let mut pages = self.shard(page).lock();
            let Some(held) = pages.get_mut(&page).filter(|held| held.leaving) else { continue };
            match self.merge(page, held, 0..PAGE as u64, changed) {
                Ok(()) => {
                    let place = held.place;
                    pages.remove(&page);
                    self.order.lock().pages.remove(&place);
                    self.held.fetch_sub(1, Ordering::Relaxed);
                    went += 1;
                }
                Err(why) => {
                    held.leaving = false;
                    failure = Err(why);
                }
            }
        }
        failure.map(|()| went)
    }

    /// Counts pages that were dropped for the host's asking, or for room.
    pub fn count_dropped(&self, pages: u64, requested: bool) {
        let counter = if requested { &self.counters.pages_invalidated } else { &self.counters.pages_evicted };
        counter.add(pages);
    }

    /// Whether a read can be answered now: there is room, or it is of pages that the host holds
    /// already, for which nobody may be made to wait.
    pub fn has_room(&self, offset: u64, length: u64) -> bool {
        self.held.load(Ordering::Relaxed) < self.most || {
            let pages = offset / PAGE as u64..offset.saturating_add(length).div_ceil(PAGE as u64);
            pages.into_iter().any(|page| self.shard(page).lock().contains_key(&page))
        }
    }

    /// Calls `then` when there may be room for a read of `range`, or at once if it may not wait.
    pub fn wait_for_room(&self, range: Range<u64>, then: Box<dyn FnOnce() + Send>) {
        let mut room = self.room.lock();
        if !room.may_wait(&range) {
            drop(room);
            return then();
        }
        room.waiting.push((range, then));
        self.crowded.notify_one();
    }

    /// Says that the page cache is to drop `ranges`: reads of them wait no more until
    /// [`Self::dropped`].
    pub fn dropping(&self, ranges: &[Range<u64>]) {
        let mut room = self.room.lock();
        room.dropping.extend_from_slice(ranges);
        let waiting = std::mem::take(&mut room.waiting);
        let (stay, go): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(range, _)| room.may_wait(range));
        room.waiting = stay;
        drop(room);
        for (_, then) in go {
            then();
        }
    }

    /// Says that the page cache has dropped `ranges`.
    pub fn dropped(&self, ranges: &[Range<u64>]) {
        let mut room = self.room.lock();
        for range in ranges {
            if let Some(at) = room.dropping.iter().position(|dropping| dropping == range) {
                room.dropping.swap_remove(at);
            }
        }
    }

    /// Makes room whenever somebody waits for it, until [`Self::close`]: `drop_pages` drops ranges,
    /// and says how many pages went.
    pub fn make_room_until_closed(&self, mut drop_pages: impl FnMut(Vec<Range<u64>>) -> u64) {
        loop {
            let mut room = self.room.lock();
            while room.waiting.is_empty() && !room.closed {
                self.crowded.wait(&mut room);
            }
            let closed = room.closed;
            drop(room);
            if !closed && self.held.load(Ordering::Relaxed) >= self.most {
                let batch = self.oldest((self.most / 8).max(1));
                if drop_pages(batch) == 0 {
                    tracing::debug!("nothing that a host holds could be dropped; its cache grows");
                }
            }
            let waiting = std::mem::take(&mut self.room.lock().waiting);
            for (_, then) in waiting {
                then();
            }
            if closed {
                return;
            }
        }
    }

    /// Lets everybody who waits go, and whoever comes.
    pub fn close(&self) {
        self.room.lock().closed = true;
        self.crowded.notify_all();
    }

    /// What there is to tell of it.
    pub fn report(&self, name: &str) -> HostReport {
        let bytes = |pages: usize| (pages as u64).saturating_mul(PAGE as u64);
        let held_bytes = bytes(self.held.load(Ordering::Relaxed));
        let revoked = self.is_revoked();
        self.counters.report(&HostNow { name, revoked, cache_bytes: bytes(self.most), held_bytes })
    }

    /// The pages held longest, so many at most.
    fn oldest(&self, count: usize) -> Vec<Range<u64>> {
        let pages: Vec<u64> = self.order.lock().pages.values().copied().take(count).collect();
        pages.into_iter().map(|page| page * PAGE as u64..(page + 1) * PAGE as u64).collect()
    }

    fn shard(&self, page: u64) -> &Mutex<BTreeMap<u64, Page>> {
        &self.shards[usize::try_from(page % SHARDS).expect("less than SHARDS")]
    }

    /// Refuses what passes the window's end before anything of it is done.
    fn check(&self, offset: u64, length: usize) -> Result<(), DeviceError> {
        let (window, size, length) =
            (lamina_device::device::Window::Base, self.partition.base_bytes(), length as u64);
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(()),
            _ => Err(DeviceError::PastWindow { window, offset, length, size }),
        }
    }

    /// The page as the host is to have it: as it holds it, or the device's.
    fn give<'a>(&self, pages: &'a mut BTreeMap<u64, Page>, page: u64) -> Result<&'a mut Page, DeviceError> {
        if let Some(held) = pages.get_mut(&page)
            && held.leaving
        {
            held.leaving = false;
            // What cannot be merged stays the host's: it sees its own stores, and others' later.
            if self.merge(page, held, 0..PAGE as u64, &mut Vec::new()).is_ok() {
                self.partition.read_base(page * PAGE as u64, &mut held.given[..])?;
                self.counters.pages_given.add(1);
            }
        } else if !pages.contains_key(&page) {
            self.insert(pages, page)?;
        }
        Ok(pages.get_mut(&page).expect("held by now"))
    }

    /// Takes a page from the device.
    fn insert(&self, pages: &mut BTreeMap<u64, Page>, page: u64) -> Result<(), DeviceError> {
        let mut given: Bytes = Box::new([0; PAGE]);
        self.partition.read_base(page * PAGE as u64, &mut given[..])?;
        self.counters.pages_given.add(1);
        let mut order = self.order.lock();
        let place = order.next;
        order.next += 1;
        order.pages.insert(place, page);
        drop(order);
        pages.insert(page, Page { given, now: None, leaving: false, place });
        self.held.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Merges the lines that bytes `inside` of a page touch.
    fn merge(
        &self,
        page: u64,
        held: &mut Page,
        inside: Range<u64>,
        changed: &mut Vec<Range<u64>>,
    ) -> Result<(), DeviceError> {
        let Page { given, now: Some(now), .. } = held else { return Ok(()) };
        let line = |at: u64| usize::try_from(at.min(PAGE as u64)).expect("inside a page");
        let (mut at, end) = (line(inside.start) / LINE * LINE, line(inside.end).next_multiple_of(LINE));
        let differs = |given: &Bytes, at: usize| now[at..at + LINE] != given[at..at + LINE];
        while at < end {
            if !differs(given, at) {
                at += LINE;
                continue;
            }
            let mut run = at + LINE;
            while run < end && differs(given, run) {
                run += LINE;
            }
            let offset = page * PAGE as u64 + at as u64;
            self.partition.write_base(offset, &now[at..run])?;
            given[at..run].copy_from_slice(&now[at..run]);
            self.counters.lines_merged.add(((run - at) / LINE) as u64);
            super::served_pages::push(changed, offset..offset + (run - at) as u64);
            at = run;
        }
        if now == given {
            held.now = None;
        }
        Ok(())
    }

    /// The pages held that `range` touches, in order.
    fn pages_of(&self, range: &Range<u64>) -> Vec<u64> {
        if range.is_empty() {
            return Vec::new();
        }
        let numbers = range.start / PAGE as u64..range.end.div_ceil(PAGE as u64);
        let mut pages: Vec<u64> = Vec::new();
        for shard in &self.shards {
            pages.extend(shard.lock().range(numbers.clone()).map(|(page, _)| *page));
        }
        pages.sort_unstable();
        pages
    }

    fn each(
        &self,
        range: &Range<u64>,
        mut visit: impl FnMut(u64, &mut Page) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        for page in self.pages_of(range) {
            if let Some(held) = self.shard(page).lock().get_mut(&page) {
                visit(page, held)?;
            }
        }
        Ok(())
    }
}

/// Calls `visit` for each page that `length` bytes from `offset` on touch: its number, the bytes of
/// it, and how many came before.
fn pieces(
    offset: u64,
    length: usize,
    mut visit: impl FnMut(u64, Range<usize>, usize) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let mut done = 0;
    while done < length {
        let at = offset + done as u64;
        let start = usize::try_from(at % PAGE as u64).expect("inside a page");
        let end = (start + length - done).min(PAGE);
        visit(at / PAGE as u64, start..end, done)?;
        done += end - start;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
