//! Readers, writers and tidying: who reads a block finds its old bundle or its new one, and nobody
//! writes a segment that somebody reads.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::publication::Stripes;

/// No segment is free.
struct Full;

/// A store of two blocks and some segments more. A bundle is the number of its block and a version.
struct Store {
    stripes: Stripes,
    /// By block: its segment.
    index: [AtomicUsize; 2],
    segments: Vec<UnsafeCell<(u64, u64)>>,
    free: Mutex<Vec<usize>>,
}

// SAFETY: loom checks each access of a segment against all others, which is what these models are
// for.
unsafe impl Sync for Store {}
// SAFETY: as above.
unsafe impl Send for Store {}

impl Store {
    fn new() -> Arc<Self> {
        Self::with_free(1)
    }

    fn with_free(free: usize) -> Arc<Self> {
        let bundles = [(0, 0), (1, 0)].into_iter().chain(std::iter::repeat_n((9, 9), free));
        Arc::new(Self {
            stripes: Stripes::new(2),
            index: [AtomicUsize::new(0), AtomicUsize::new(1)],
            segments: bundles.map(UnsafeCell::new).collect(),
            free: Mutex::new((2..2 + free).collect()),
        })
    }

    fn at(&self, block: u64) -> &AtomicUsize {
        &self.index[usize::try_from(block).unwrap()]
    }

    fn take(&self) -> Result<usize, Full> {
        self.free.lock().unwrap().pop().ok_or(Full)
    }

    fn give_back(&self, segment: usize) {
        self.free.lock().unwrap().push(segment);
    }

    fn load(&self, segment: usize) -> (u64, u64) {
        // SAFETY: loom fails the model if anybody writes it meanwhile.
        self.segments[segment].with(|bundle| unsafe { *bundle })
    }

    fn store(&self, segment: usize, bundle: (u64, u64)) {
        // SAFETY: loom fails the model if anybody reads or writes it meanwhile.
        self.segments[segment].with_mut(|place| unsafe { *place = bundle });
    }

    fn read(&self, block: u64) -> (u64, u64) {
        self.stripes.read(block, || self.load(self.at(block).load(Relaxed)))
    }

    /// Writes a version, unless there is no segment for it.
    fn write(&self, block: u64, version: u64) {
        let held = self.stripes.hold(block);
        let old = self.at(block).load(Relaxed);
        let Ok(new) = self.take() else { return };
        self.store(new, (block, version));
        held.publish(|| self.at(block).store(new, Relaxed));
        self.give_back(old);
    }

    /// Writes a version of both blocks, whose bundles are stored before either is held.
    fn write_both(&self, version: u64) {
        let Ok(first) = self.take() else { return };
        let Ok(second) = self.take() else { return self.give_back(first) };
        self.store(first, (0, version));
        self.store(second, (1, version));
        let held = self.stripes.hold_all(0..2);
        let old = [0, 1].map(|block| self.at(block).load(Relaxed));
        held.publish(|| {
            self.at(0).store(first, Relaxed);
            self.at(1).store(second, Relaxed);
        });
        for segment in old {
            self.give_back(segment);
        }
    }

    /// Whether each segment is either free or named by one block.
    fn has_all_segments(&self) -> bool {
        let mut segments = self.free.lock().unwrap().clone();
        segments.extend(self.index.iter().map(|at| at.load(Relaxed)));
        segments.sort_unstable();
        segments.into_iter().eq(0..self.segments.len())
    }

    /// Moves a block's bundle from `segment` elsewhere, if it is still there.
    fn shift(&self, block: u64, segment: usize) {
        let copy = || {
            if self.at(block).load(Relaxed) != segment {
                return Ok(None);
            }
            let new = self.take()?;
            self.store(new, self.load(segment));
            Ok(Some(new))
        };
        let put = |new: &usize| self.at(block).store(*new, Relaxed);
        // Without room it stays where it is.
        let _: Result<(), Full> = self.stripes.shift(block, copy, put, |_| self.give_back(segment));
    }
}

#[test]
fn a_reader_finds_the_old_bundle_or_the_new_one_while_segments_change_hands() {
    loom::model(|| {
        let store = Store::new();
        let writers = [(0, 1), (1, 2)].map(|(block, version)| {
            let store = Arc::clone(&store);
            thread::spawn(move || store.write(block, version))
        });
        let (block, version) = store.read(0);
        assert!(block == 0 && version <= 1, "a bundle of block {block}, version {version}");
        for writer in writers {
            writer.join().unwrap();
        }
        assert_eq!(store.read(0).0, 0);
        assert_eq!(store.read(1).0, 1);
    });
}

#[test]
fn tidying_moves_what_is_there_and_no_more() {
    loom::model(|| {
        let store = Store::new();
        let (tidier, writer) = (Arc::clone(&store), Arc::clone(&store));
        let tidier = thread::spawn(move || tidier.shift(0, 0));
        let writer = thread::spawn(move || writer.write(0, 1));
        let (block, version) = store.read(0);
        assert!(block == 0 && version <= 1, "a bundle of block {block}, version {version}");
        tidier.join().unwrap();
        writer.join().unwrap();
        assert_eq!(store.read(0).0, 0);
        assert!(store.has_all_segments(), "a segment is lost or has two owners");
    });
}

#[test]
fn blocks_stored_together_are_each_read_whole_while_one_of_them_is_stored_by_itself() {
    loom::model(|| {
        let store = Store::with_free(3);
        let (both, one) = (Arc::clone(&store), Arc::clone(&store));
        let both = thread::spawn(move || both.write_both(1));
        let one = thread::spawn(move || one.write(1, 2));
        let (block, version) = store.read(1);
        assert!(block == 1 && version <= 2, "a bundle of block {block}, version {version}");
        both.join().unwrap();
        one.join().unwrap();
        assert_eq!((store.read(0), store.read(1).0), ((0, 1), 1));
        assert!(store.has_all_segments(), "a segment is lost or has two owners");
    });
}

#[test]
fn windows_that_overlap_do_not_wait_for_each_other_for_ever() {
    loom::model(|| {
        let stripes = Arc::new(Stripes::new(3));
        let other = Arc::clone(&stripes);
        let other = thread::spawn(move || other.hold_all(2..4).publish(|| ()));
        stripes.hold_all(0..3).publish(|| ());
        other.join().unwrap();
    });
}
