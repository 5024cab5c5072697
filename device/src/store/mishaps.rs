//! What tests make happen to an image: the process is killed in the middle of a store, or the disk is full.

use std::{
    cell::RefCell,
    io,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
};

use nix::fcntl::FallocateFlags;

/// What a kill unwinds with.
#[derive(Debug)]
pub(crate) struct Killed;

/// Mishaps that are to come, for every image that is opened while they are [`current`].
#[derive(Clone, Debug)]
pub(crate) struct Mishaps {
    /// Stores until the kill, which cuts the last one short.
    stores: Arc<AtomicI64>,
    /// Units of room until the disk is full.
    room: Arc<AtomicI64>,
}

/// More units than any disk has.
pub(crate) const UNLIMITED: i64 = i64::MAX / 2;

thread_local! {
    static CURRENT: RefCell<Mishaps> = RefCell::new(Mishaps::none());
}

/// The mishaps of images that this thread opens now.
pub(super) fn current() -> Mishaps {
    CURRENT.with_borrow(Clone::clone)
}

impl Mishaps {
    /// Nothing happens.
    pub(crate) fn none() -> Self {
        Self { stores: Arc::new(AtomicI64::new(i64::MAX)), room: Arc::new(AtomicI64::new(UNLIMITED)) }
    }

    /// Opens images with these from now on.
    pub(crate) fn make_current(&self) {
        CURRENT.set(self.clone());
    }

    /// Kills at store number `stores` from now on.
    pub(crate) fn kill_after(&self, stores: i64) {
        self.stores.store(stores, Relaxed);
    }

    /// Lets so many more units of room be made.
    pub(crate) fn limit_room(&self, units: i64) {
        self.room.store(units, Relaxed);
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

    /// Dies, if the store before was the last.
    pub(super) fn strike(&self) {
        if self.stores.load(Relaxed) <= 0 {
            std::panic::resume_unwind(Box::new(Killed));
        }
    }

    pub(super) fn allocated(&self, flags: FallocateFlags) -> io::Result<()> {
        if flags.contains(FallocateFlags::FALLOC_FL_PUNCH_HOLE) {
            self.room.fetch_add(1, Relaxed);
            return Ok(());
        }
        if self.room.fetch_update(Relaxed, Relaxed, |room| (room > 0).then(|| room - 1)).is_ok() {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }
}
