//! What tests make happen to an image: the process is killed in the middle of a store, or the disk
//! is full.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering::Relaxed},
    },
};

use nix::{
    fcntl::FallocateFlags,
    unistd::{Whence, lseek},
};
use parking_lot::Mutex;

/// What a kill unwinds with.
#[derive(Debug)]
pub struct Killed;

/// Failpoints that are to come, for every image that is opened while they are [`current`].
#[derive(Clone, Debug)]
pub struct Failpoints {
    /// Stores until the kill, which cuts the last one short.
    stores: Arc<AtomicI64>,
    /// Units of space until the disk is full.
    space: Arc<AtomicI64>,
    /// Boots of the host.
    boots: Arc<AtomicI64>,
    /// Files as they were when they were synced last, and whether syncs fail.
    synced: Arc<Mutex<Option<Pages>>>,
    broken: Arc<AtomicBool>,
    /// Pages that syncs which failed left out, as they were: the system takes them for written.
    /// None of one of zeros.
    lost: Arc<Mutex<BTreeMap<u64, Option<Vec<u8>>>>>,
    syncs: Arc<AtomicI64>,
}

/// Pages of a file that are not zeros, by number.
pub type Pages = BTreeMap<u64, Vec<u8>>;

/// What is in a file.
pub fn pages(file: &File) -> Pages {
    let mut pages = Pages::new();
    let (mut at, end) = (0, file.metadata().unwrap().len());
    while at < end {
        let Ok(data) = lseek(file.as_fd(), at.cast_signed(), Whence::SeekData) else { break };
        let hole = lseek(file.as_fd(), data, Whence::SeekHole).unwrap().unsigned_abs();
        for page in data.unsigned_abs() / PAGE..hole.min(end).div_ceil(PAGE) {
            let mut bytes = vec![0; usize::try_from(PAGE).unwrap()];
            let length = usize::try_from(end - page * PAGE).unwrap_or(usize::MAX).min(bytes.len());
            file.read_exact_at(&mut bytes[..length], page * PAGE).unwrap();
            if bytes.iter().any(|byte| *byte != 0) {
                pages.insert(page, bytes);
            }
        }
        at = hole;
    }
    pages
}

const PAGE: u64 = 4096;

thread_local! {
    static CURRENT: RefCell<Failpoints> = RefCell::new(Failpoints::none());
}

/// The failpoints of images that this thread opens now.
pub(super) fn current() -> Failpoints {
    CURRENT.with_borrow(Clone::clone)
}

impl Failpoints {
    /// Nothing happens.
    pub fn none() -> Self {
        let never = || Arc::new(AtomicI64::new(i64::MAX));
        Self {
            stores: never(),
            space: never(),
            boots: Arc::default(),
            synced: Arc::default(),
            broken: Arc::default(),
            lost: Arc::default(),
            syncs: Arc::default(),
        }
    }

    /// Boots the host again.
    pub fn boot(&self) {
        self.boots.fetch_add(1, Relaxed);
    }

    pub(super) fn boots(&self) -> i64 {
        self.boots.load(Relaxed)
    }

    /// Says what is on the disk.
    pub fn set_synced(&self, pages: Pages) {
        self.lost.lock().clear();
        *self.synced.lock() = Some(pages);
    }

    /// Syncs so far.
    pub fn syncs(&self) -> i64 {
        self.syncs.load(Relaxed)
    }

    /// What was synced last.
    pub fn last_synced(&self) -> Pages {
        self.synced.lock().clone().unwrap_or_default()
    }

    /// Has syncs fail, or succeed.
    pub fn break_syncs(&self, broken: bool) {
        self.broken.store(broken, Relaxed);
    }

    /// A file is being synced.
    pub(super) fn synced(&self, file: &File) -> io::Result<()> {
        // It may die before anything of it is on the disk.
        self.stored();
        let mut synced = self.synced.lock();
        let is_broken = self.broken.load(Relaxed);
        if let Some(synced) = &mut *synced {
            let (mut is, mut lost) = (pages(file), self.lost.lock());
            if is_broken {
                let all: BTreeSet<u64> = synced.keys().chain(is.keys()).copied().collect();
                let left_out = all.into_iter().filter(|page| synced.get(page) != is.get(page));
                lost.extend(left_out.map(|page| (page, is.get(&page).cloned())));
            } else {
                // Written since, they are written.
                lost.retain(|page, bytes| is.get(page) == bytes.as_ref());
                for page in lost.keys() {
                    is.remove(page);
                    is.extend(synced.remove(page).map(|bytes| (*page, bytes)));
                }
                *synced = is;
            }
        }
        if is_broken {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.syncs.fetch_add(1, Relaxed);
        Ok(())
    }

    /// These bytes of a file were written, maybe as they were.
    pub(super) fn wrote(&self, bytes: Range<u64>) {
        self.lost.lock().retain(|page, _| !(bytes.start / PAGE..bytes.end.div_ceil(PAGE)).contains(page));
    }

    /// Opens images with these from now on.
    pub fn make_current(&self) {
        CURRENT.set(self.clone());
    }

    /// Kills at store number `stores` from now on.
    pub fn kill_after(&self, stores: i64) {
        self.stores.store(stores, Relaxed);
    }

    /// Lets so many more units of space be made.
    pub fn limit_space(&self, units: i64) {
        self.space.store(units, Relaxed);
    }

    /// What of `data` is still stored.
    pub(super) fn written<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        match self.stores.fetch_sub(1, Relaxed) {
            // Eight bytes at an aligned address are one store of the processor.
            1 if data.len() == 8 => &[],
            1 => &data[..data.len() / 2],
            _ => data,
        }
    }

    /// Counts a change that cannot be cut short, and dies if it was the last.
    pub(super) fn stored(&self) {
        self.stores.fetch_sub(1, Relaxed);
        self.fire();
    }

    /// Dies, if the store before was the last.
    pub(super) fn fire(&self) {
        if self.stores.load(Relaxed) <= 0 {
            std::panic::resume_unwind(Box::new(Killed));
        }
    }

    pub(super) fn allocated(&self, flags: FallocateFlags) -> io::Result<()> {
        if flags.contains(FallocateFlags::FALLOC_FL_PUNCH_HOLE) {
            let _ = self.space.fetch_update(Relaxed, Relaxed, |space| Some(space.saturating_add(1)));
            return Ok(());
        }
        if self.space.fetch_update(Relaxed, Relaxed, |space| (space > 0).then(|| space - 1)).is_ok() {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }
}
