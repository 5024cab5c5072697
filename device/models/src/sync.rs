//! Loom's locks and fences, called as the store's are.

use loom::sync::RwLockReadGuard;
pub(crate) use loom::sync::RwLockWriteGuard;
pub(crate) use loom::sync::atomic::{Ordering, fence};

/// A lock that no panic poisons.
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect("no thread panics")
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect("no thread panics")
    }
}
