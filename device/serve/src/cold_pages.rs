//! A bound on what the host keeps decoded: pages of the mount's files leave the page cache when
//! there are more than that.
//!
//! * What is in the page cache is there decoded, beside what the device stores. With a bound the
//!   host needs little more memory than what is stored takes.
//! * One thread looks at all files each [`PACE`], and where there is too much has the kernel write
//!   back and drop [`PART`]s of them, those first that were filled longest ago: a part of which
//!   pages came since it was looked at last is young again. Loads through a mapping of what is
//!   there are seen by nobody. A part that is in use comes back when it is dropped, and then stays.
//! * The kernel takes a page out of all mappings, writes it back if somebody has stored into it
//!   meanwhile, and drops it then. Whoever loads it again asks the device.
//! * A store that the device refuses for want of space is told once, by `msync` and an event. The
//!   kernel has its page clean then, and it may be dropped: it is lost sooner than without a bound.
//! * The bound is one on average: whoever stores quicker than pages are written back has more for
//!   that long. A host of several that are not coherent has a bound of its own.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use lamina_device::counters::{Place, Scope, Section};
use lamina_device::figures;
use lamina_files::Files;

use super::export::Export;
use super::files::inode_of;
use super::flusher::{cached_bytes, write_out};
use super::own_mount::own_table;
use super::tree::Tree;

/// How often it is looked at least, and how many times as long as a look takes is waited for the
/// next: of many files each is opened.
const PACE: Duration = Duration::from_millis(100);
const SELDOM: u32 = 10;
/// How often it is asked which files there are.
const LISTED: Duration = Duration::from_secs(1);
/// Bytes that are dropped together.
const PART: u64 = 1 << 20;
/// Bytes that are looked at together: nothing of most of a large file is there.
const WIDE: u64 = 256 * PART;

figures! {
    /// What is told of the page cache of the mount's files, if it is bounded.
    pub struct PageCacheReport {
        figures {
            /// Bytes of the files that the host's page cache may hold.
            limit_bytes: u64 = Gauge "limit" Bytes;
            /// Bytes that it held when it was looked at last.
            held_bytes: u64 = Gauge "held" Bytes;
            /// Bytes that were dropped because there were too many, since the worker began.
            dropped_bytes: u64 = Counter "dropped" Bytes;
            /// Bytes that were to be dropped and stayed, because they could not be written back or
            /// were stored into just then.
            stayed_bytes: u64 = Counter "stayed" Bytes;
        }
    }
}

/// The figures of the page cache.
pub(super) const SECTION: Section = Section {
    title: "page cache",
    scope: Scope::Device,
    places: &[Place::at("/page_cache")],
    labels: &[],
    prefix: "page_cache_",
    of: "",
    figures: PageCacheReport::FIGURES,
};

/// Who sees to it that the page cache holds no more than it may.
pub(super) struct ColdPages {
    limit: u64,
    held: AtomicU64,
    dropped: AtomicU64,
    stayed: AtomicU64,
    closed: Mutex<bool>,
    changed: Condvar,
}

/// A file of the mount, and what was seen of its parts.
struct Seen {
    inode: u64,
    path: PathBuf,
    bytes: u64,
    /// By where they begin: bytes that were there, and the look in which the last of them came.
    parts: BTreeMap<u64, (u64, u64)>,
}

impl ColdPages {
    pub(super) fn new(limit: u64) -> Self {
        let count = || AtomicU64::new(0);
        Self {
            limit,
            held: count(),
            dropped: count(),
            stayed: count(),
            closed: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    pub(super) fn report(&self) -> PageCacheReport {
        PageCacheReport {
            limit_bytes: self.limit,
            held_bytes: self.held.load(Relaxed),
            dropped_bytes: self.dropped.load(Relaxed),
            stayed_bytes: self.stayed.load(Relaxed),
        }
    }

    pub(super) fn close(&self) {
        *self.closed.lock() = true;
        self.changed.notify_all();
    }

    /// Looks until it is closed. `invalidate` has the kernel drop a range of an inode; `notices` is
    /// the descriptor that it does so by.
    pub(super) fn keep_until_closed(
        &self,
        tree: &Tree,
        mount: &std::path::Path,
        notices: RawFd,
        invalidate: impl Fn(u64, &Range<u64>),
    ) {
        if let Err(why) = own_table(notices) {
            tracing::warn!("who bounds the page cache keeps the shared file table: {why}");
        }
        let mut seen: Vec<Seen> = Vec::new();
        let mut listed: Option<Instant> = None;
        let mut pace = PACE;
        for look in 1.. {
            {
                let mut closed = self.closed.lock();
                self.changed.wait_while_for(&mut closed, |closed| !*closed, pace);
                if *closed {
                    return;
                }
            }
            if listed.is_none_or(|at| at.elapsed() >= LISTED) {
                listed = Some(Instant::now());
                let mut known: BTreeMap<u64, Seen> = seen.drain(..).map(|file| (file.inode, file)).collect();
                seen.extend(files_of(tree, mount).map(|(inode, path)| {
                    let parts = known.remove(&inode).map(|file| file.parts).unwrap_or_default();
                    Seen { inode, path, bytes: 0, parts }
                }));
            }
            let began = Instant::now();
            self.look(look, &mut seen, &invalidate);
            pace = PACE.max(began.elapsed() * SELDOM);
        }
    }

    fn look(&self, look: u64, seen: &mut [Seen], invalidate: &impl Fn(u64, &Range<u64>)) {
        // Opened each time: who holds a file open keeps what was removed.
        let mut open = Vec::new();
        let mut held = 0;
        for (number, file) in seen.iter_mut().enumerate() {
            let Ok(opened) = File::open(&file.path) else { continue };
            let Ok(metadata) = opened.metadata() else { continue };
            file.bytes = metadata.len();
            let cached = cached_bytes(&opened, &(0..file.bytes));
            held += cached;
            open.push((number, opened, cached));
        }
        self.held.store(held, Relaxed);
        if held <= self.limit {
            return;
        }
        let mut oldest = Vec::new();
        for (number, opened, _) in open.iter().filter(|(.., cached)| *cached > 0) {
            let file = &mut seen[*number];
            file.look(opened, look);
            let of = |(at, (bytes, came)): (&u64, &(u64, u64))| (*came, *number, *at, *bytes);
            oldest.extend(file.parts.iter().map(of));
        }
        oldest.sort_unstable_by_key(|part| Reverse(*part));
        // Some more than must go, so that not each look has to.
        let wanted = self.limit - self.limit / 8;
        while held > wanted
            && let Some((_, number, at, bytes)) = oldest.pop()
        {
            let Some((_, opened, _)) = open.iter().find(|(of, ..)| *of == number) else { continue };
            let range = at..(at + PART).min(seen[number].bytes);
            // Here, where it may sleep; what is stored after that the kernel writes back itself.
            let went = if write_out(opened, &range).is_ok() {
                invalidate(seen[number].inode, &range);
                bytes.saturating_sub(cached_bytes(opened, &range))
            } else {
                0
            };
            held = held.saturating_sub(went);
            self.dropped.fetch_add(went, Relaxed);
            self.stayed.fetch_add(bytes - went, Relaxed);
            seen[number].parts.remove(&at);
        }
        self.held.store(held, Relaxed);
    }
}

impl Seen {
    /// Looks at all parts of which something is there.
    fn look(&mut self, opened: &File, look: u64) {
        let mut now = BTreeMap::new();
        let mut wide = 0;
        while wide < self.bytes {
            let end = (wide + WIDE).min(self.bytes);
            if cached_bytes(opened, &(wide..end)) > 0 {
                let parts = (0..).map(|part| wide + part * PART).take_while(|at| *at < end);
                for at in parts {
                    let bytes = cached_bytes(opened, &(at..(at + PART).min(end)));
                    if bytes > 0 {
                        let before = self.parts.get(&at).copied();
                        let came = before.filter(|(had, _)| *had >= bytes).map_or(look, |(_, came)| came);
                        now.insert(at, (bytes, came));
                    }
                }
            }
            wide = end;
        }
        self.parts = now;
    }
}

/// The files whose pages are bounded: of exports that are coherent, and in `files/` those that
/// the kernel knows.
fn files_of<'t>(tree: &'t Tree, mount: &std::path::Path) -> impl Iterator<Item = (u64, PathBuf)> + use<'t> {
    let files = mount.join(super::files::FOLDER);
    let coherent = tree.exports().iter().filter(|export| export.cache().is_none());
    let of_export = move |export: &'t Arc<Export>| {
        let paths = [export.base_path(), export.views_path()].into_iter().chain(export.target_paths());
        export.files().zip(paths).filter_map(|(which, path)| Some((tree.inode_of(export, which)?, path)))
    };
    let in_files = tree.files().map(|files| Files::known(files)).unwrap_or_default();
    coherent.flat_map(of_export).chain(
        in_files
            .into_iter()
            .map(move |file| (inode_of(file.inode), files.join(OsStr::from_bytes(&file.path)))),
    )
}
