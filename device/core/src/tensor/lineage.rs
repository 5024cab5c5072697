//! Which tensor another is coded against: its base, and who is derived from it.
//!
//! The rules:
//! * A base outlives what is derived from it: it is neither removed nor made longer or shorter
//!   before.
//! * Both directions change only while the map is held alone, so that whoever holds the map may
//!   rely on them. A tensor gets a base once, and may give it up once.
//! * What a tensor's blocks hold does not change while its list of derived tensors is locked for
//!   reading ([`Lineage::steady`]): who stores into it [locks it for writing](Lineage::derived_mut)
//!   if it is not empty. Locks are taken from derived tensors to their bases.

use std::sync::{
    Arc, OnceLock, Weak,
    atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::Tensor;

/// Bases that follow each other behind a tensor: its base, the base's base, and one more. A read of
/// a block fetches at most one block of each.
pub const MAX_BASES: usize = 3;

/// The tensors that are derived from one.
pub(crate) type Derived = Vec<Weak<Tensor>>;

/// A tensor's base, and what is derived from it.
#[derive(Default)]
pub(crate) struct Lineage {
    base: OnceLock<Arc<Tensor>>,
    /// Whether the base was given up, so that it is none any more.
    detached: AtomicBool,
    derived: RwLock<Derived>,
    /// How many are derived, for who does not want the lock.
    count: AtomicUsize,
}

impl Lineage {
    /// Of a tensor with this base, or none.
    pub(crate) fn of(base: Option<Arc<Tensor>>) -> Self {
        let lineage = Self::default();
        if let Some(base) = base {
            lineage.set_base(base);
        }
        lineage
    }

    /// Gives a tensor that has no base this one.
    pub(crate) fn set_base(&self, base: Arc<Tensor>) {
        assert!(self.base.set(base).is_ok(), "a tensor is given a base once");
    }

    /// The tensor that its tensor is coded against.
    pub(crate) fn base(&self) -> Option<&Arc<Tensor>> {
        // Who sees that it was given up sees what was coded by itself before that.
        self.base.get().filter(|_| !self.detached.load(Acquire))
    }

    /// Has the tensor have no base any more, or have it again. The map is held alone, and none of
    /// its blocks is a difference.
    pub(crate) fn set_detached(&self, detached: bool) {
        self.detached.store(detached, Release);
    }

    /// Its bases, the nearest first. Tables of an image may go round in a circle, so that this may
    /// not end before they are checked.
    pub(crate) fn bases(&self) -> impl Iterator<Item = &Arc<Tensor>> {
        std::iter::successors(self.base(), |tensor| tensor.lineage.base())
    }

    /// Whether any tensor is derived from it.
    pub(crate) fn is_base(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// Keeps what the tensor's blocks hold as it is.
    pub(crate) fn steady(&self) -> RwLockReadGuard<'_, Derived> {
        self.derived.read()
    }

    /// What is derived from it, if anything is, for who changes what its blocks hold. The caller
    /// holds the map, so that nothing is added meanwhile.
    pub(crate) fn derived_mut(&self) -> Option<RwLockWriteGuard<'_, Derived>> {
        self.is_base().then(|| self.derived.write())
    }

    /// The names of what is derived from it.
    pub(crate) fn names(&self) -> Vec<String> {
        let derived = self.derived.read();
        derived.iter().filter_map(Weak::upgrade).map(|tensor| tensor.info.name.clone()).collect()
    }
}

impl Tensor {
    /// Has its base know of it. The map is held alone.
    pub(crate) fn join_base(self: &Arc<Self>) {
        if let Some(base) = self.lineage.base() {
            let mut derived = base.lineage.derived.write();
            derived.push(Arc::downgrade(self));
            base.lineage.count.store(derived.len(), Relaxed);
        }
    }

    /// Has its base forget it, also one that it gave up. The map is held alone.
    pub(crate) fn leave_base(self: &Arc<Self>) {
        if let Some(base) = self.lineage.base.get() {
            let mut derived = base.lineage.derived.write();
            derived.retain(|tensor| tensor.as_ptr() != Arc::as_ptr(self));
            base.lineage.count.store(derived.len(), Relaxed);
        }
    }
}
