//! Poison: whoever injects, clears and writes a block at once, its entry and the list agree
//! whenever nobody holds it, and no write that came after a loss is taken back.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use loom::thread;

use crate::losses::Losses;
use crate::publication::Stripes;

/// The entry of a poisoned block, and of one that was cleared. Others are versions.
const POISON: usize = 99;
const ZEROS: usize = 0;

/// A store of one block.
struct Store {
    stripes: Stripes,
    losses: Losses<()>,
    entry: AtomicUsize,
}

impl Store {
    fn new() -> Arc<Self> {
        let store = Self { stripes: Stripes::new(1), losses: Losses::new(), entry: AtomicUsize::new(1) };
        Arc::new(store)
    }

    /// Writes the whole block.
    fn write(&self, version: usize) {
        let held = self.stripes.hold(0);
        self.losses.publish(held, 0..1, || self.entry.store(version, Relaxed), |_| None);
    }

    fn inject(&self) {
        let held = self.stripes.hold(0);
        self.losses.publish(held, 0..1, || self.entry.store(POISON, Relaxed), |_| Some(()));
    }

    /// Clears what is listed, if it still is poisoned when it is held.
    fn clear(&self) {
        for block in self.losses.listed_in(0..1) {
            let held = self.stripes.hold(block);
            if self.entry.load(Relaxed) == POISON {
                self.losses.publish(held, 0..1, || self.entry.store(ZEROS, Relaxed), |_| None);
            }
        }
    }

    /// The entry, with which the list agrees.
    fn look(&self) -> usize {
        self.stripes.read(0, || {
            let entry = self.entry.load(Relaxed);
            assert_eq!(self.losses.lists(0), entry == POISON, "the list says otherwise of {entry}");
            entry
        })
    }
}

/// Runs these at once.
fn at_once<const N: usize>(store: &Arc<Store>, all: [fn(&Store); N]) {
    let threads = all.map(|act| {
        let store = Arc::clone(store);
        thread::spawn(move || act(&store))
    });
    store.look();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn clearing_takes_no_write_that_came_meanwhile() {
    loom::model(|| {
        let store = Store::new();
        store.inject();
        at_once(&store, [Store::clear, |store| store.write(2)]);
        assert_eq!(store.look(), 2);
    });
}

#[test]
fn a_block_is_listed_if_and_only_if_its_entry_is_poison() {
    loom::model(|| {
        let store = Store::new();
        at_once(&store, [Store::inject, |store| store.write(2)]);
        let entry = store.look();
        assert!(entry == 2 || entry == POISON);
        assert_eq!(store.losses.since(0).0.len(), 1, "each loss is logged");
    });
}

#[test]
fn a_loss_while_another_is_cleared_stays_listed() {
    loom::model(|| {
        let store = Store::new();
        store.inject();
        at_once(
            &store,
            [Store::clear, |store| {
                store.write(2);
                store.inject();
            }],
        );
        let entry = store.look();
        assert!(entry == POISON || entry == ZEROS, "{entry}");
        assert_eq!(store.losses.since(0).0.len(), 2);
    });
}
