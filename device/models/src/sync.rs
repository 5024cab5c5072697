//! Loom's locks and fences, called as the store's are.

pub(crate) use loom::sync::RwLockWriteGuard;
pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering, fence};
use loom::sync::{MutexGuard, RwLockReadGuard};

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

/// As [`RwLock`].
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no thread panics")
    }
}
