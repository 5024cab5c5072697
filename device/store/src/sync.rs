//! The locks and fences that publication is made of. Its models run the same code with loom's.

pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};

pub(super) use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
