//! Saving a snapshot of a store that goes on: what it was at one moment.
//!
//! * The moment is a cut, as of a [checkpoint](super::checkpoint): the index as it was is kept page
//!   by page as it changes, and segments that are freed are held until the snapshot is saved. So
//!   nobody who stores waits for who reads the snapshot, however slowly that is, and damage that is
//!   found meanwhile does not move what is saved.
//! * If the store has no room left while segments are held, the snapshot is given up: it is told so
//!   where it reads next.

use std::{io, os::unix::fs::FileExt, sync::Arc};

use parking_lot::RwLock;

use super::{
    Store, StoreError,
    image::Image,
    index::Frozen,
    tables::{Tables, Text},
};

/// Whether a snapshot was given up. Held for reading while it reads what is held for it.
pub(super) struct Stop(RwLock<bool>);

/// A snapshot that is being saved.
pub struct Saving<'s> {
    store: &'s Store,
    stop: Arc<Stop>,
    index: Arc<Frozen>,
    /// The tables.
    pub(super) text: Text,
}

impl Store {
    /// Begins a snapshot of what the store and `tables` are now.
    ///
    /// # Errors
    /// `ResourceBusy` while another is being saved, or what the system says.
    pub fn begin_saving(&self, tables: &Tables) -> io::Result<Saving<'_>> {
        let stop = Arc::new(Stop(RwLock::new(false)));
        let mut saving = self.saving.lock();
        if saving.is_some() {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another snapshot is being saved"));
        }
        let cut = || {
            self.segments.snapshot(Some(self.segments.cut()));
            tables.last().text.clone()
        };
        let (index, text) = self.index.begin_snapshot(cut).map_err(io::Error::other)?;
        *saving = Some(Arc::clone(&stop));
        drop(saving);
        Ok(Saving { store: self, stop, index, text })
    }

    /// Gives up the snapshot that is being saved, if there is one.
    pub(super) fn stop_saving(&self) {
        let Some(stop) = self.saving.lock().clone() else { return };
        *stop.0.write() = true;
        self.end_saving(&stop);
    }

    fn end_saving(&self, which: &Arc<Stop>) {
        let mut saving = self.saving.lock();
        // Another may have begun since this one was given up.
        if saving.as_ref().is_some_and(|saving| Arc::ptr_eq(saving, which)) {
            self.index.end_snapshot();
            self.segments.snapshot(None);
            *saving = None;
        }
    }
}

impl Saving<'_> {
    /// Has `read` read what is held for the snapshot.
    fn held<T>(&self, read: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let stopped = self.stop.0.read();
        if *stopped {
            let why = StoreError::GaveUpSnapshot;
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        read()
    }

    /// Bytes of the index, from whole pages on.
    pub(super) fn read_index(&self, at: usize, out: &mut [u8]) -> io::Result<()> {
        self.held(|| {
            self.store.index.read_snapshot(&self.index, at, out);
            Ok(())
        })
    }

    /// Bytes of the image at `at`, where the segments are.
    pub(super) fn read_segments(&self, image: &Image, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.held(|| image.file().read_exact_at(out, at))
    }

    /// Where the index may have something.
    pub(super) fn index_ranges(&self) -> Vec<std::ops::Range<usize>> {
        self.store.index.populated_bytes()
    }
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.store.end_saving(&self.stop);
        self.store.let_go();
    }
}
