//! Tensors that give up their bases, which takes its time: how far each of them is, and their end
//! when the device is stopped.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use serde::Serialize;

use super::control::{Control, ControlError};
use lamina_device::files::FilesError;
use lamina_device::tensor::TensorInfo;

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
struct Job<'d> {
    detaching: &'d Detaching,
    number: u64,
}

impl Detaching {
    fn begin(&self, name: &str, total: u64) -> Job<'_> {
        let number = self.last.fetch_add(1, Relaxed);
        let report = DetachReport { name: name.to_owned(), bytes: 0, total };
        self.jobs.lock().insert(number, report);
        Job { detaching: self, number }
    }
}

impl Job<'_> {
    fn tell(&self, bytes: u64) -> ControlFlow<()> {
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

impl Control {
    /// Stores a tensor by itself, so that it has no base. One that has none stays as it is.
    ///
    /// # Errors
    ///
    /// When there is no such tensor, or no room; then it has its base.
    pub fn detach_tensor(&self, name: &str) -> Result<TensorInfo, ControlError> {
        let info = self.tensor(name)?;
        self.detach(name, &[info]).map(|mut detached| detached.remove(0))
    }

    /// The same, of all tensors of a model that have a base: these.
    ///
    /// # Errors
    ///
    /// When there is no such model, or no room; then some have their bases.
    pub fn detach_model(&self, name: &str) -> Result<Vec<TensorInfo>, ControlError> {
        let unknown = || FilesError::Unknown { name: name.to_owned() };
        let model = self.models()?.folder(name).ok_or_else(unknown)?;
        let tensors = model.model.manifest.tensors().filter_map(|tensor| self.tensor(tensor).ok());
        let derived: Vec<_> = tensors.filter(|tensor| tensor.base.is_some()).collect();
        self.detach(name, &derived)
    }

    fn detach(&self, name: &str, tensors: &[TensorInfo]) -> Result<Vec<TensorInfo>, ControlError> {
        let job = self.detaching.begin(name, tensors.iter().map(|tensor| tensor.length).sum());
        let mut before = 0;
        let mut detached = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let progress = |bytes| job.tell(before + bytes);
            detached.push(match &self.only {
                Some((partition, _)) => partition.detach_tensor(&tensor.name, progress)?,
                None => self.device.detach_tensor(&tensor.name, progress)?,
            });
            before += tensor.length;
        }
        Ok(detached)
    }

    /// What is being detached, in the order that was asked.
    pub fn detaching(&self) -> Vec<DetachReport> {
        self.detaching.jobs.lock().values().cloned().collect()
    }

    /// Ends what is being detached: it has its base then.
    pub fn stop_detaching(&self) {
        self.detaching.stopping.store(true, Relaxed);
    }
}
