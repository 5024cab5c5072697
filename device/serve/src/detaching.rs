//! Tensors that give up their bases, which takes its time: how far each of them is, and their end
//! when the device is stopped.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use serde::Serialize;

/// What is being detached.
#[derive(Default)]
pub(super) struct Detaching {
    jobs: Mutex<BTreeMap<u64, DetachReport>>,
    last: AtomicU64,
    stopping: AtomicBool,
}

/// How far detaching is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DetachReport {
    /// The tensor or the model.
    pub name: String,
    /// Bytes that are stored by themselves.
    pub bytes: u64,
    /// Bytes of all that is detached.
    pub total: u64,
}

/// One of them. It is listed until this is dropped.
pub(super) struct Job<'d> {
    detaching: &'d Detaching,
    number: u64,
}

impl Detaching {
    /// Lists one, of which nothing is done.
    pub(super) fn begin(&self, name: &str, total: u64) -> Job<'_> {
        let number = self.last.fetch_add(1, Relaxed);
        let report = DetachReport { name: name.to_owned(), bytes: 0, total };
        self.jobs.lock().insert(number, report);
        Job { detaching: self, number }
    }

    /// What is being detached, in the order that was asked.
    pub(super) fn reports(&self) -> Vec<DetachReport> {
        self.jobs.lock().values().cloned().collect()
    }

    /// Has all of them end.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Relaxed);
    }
}

impl Job<'_> {
    /// Says how far it is: whether it goes on.
    pub(super) fn tell(&self, bytes: u64) -> ControlFlow<()> {
        if let Some(job) = self.detaching.jobs.lock().get_mut(&self.number) {
            job.bytes = bytes;
        }
        if self.detaching.stopping.load(Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.detaching.jobs.lock().remove(&self.number);
    }
}
