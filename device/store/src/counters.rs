//! Counters that outlive the process: numbers in an image, each added to in one atomic step.
//!
//! Those of the device come first, in the order in which they are [taken](Counters::take); those of
//! tensors and views follow, and are told by number in the tables. A number is given again when
//! nobody counts there any more, and not before, so that a reader of a removed tensor counts
//! nothing of another's.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use super::{StoreError, image::Image, memory::Memory};

/// Numbers that an image has room for.
const MAX_COUNTERS: usize = 1 << 20;
/// Of them, those of the device itself.
const OF_DEVICE: usize = 4096;
/// Bytes of a number.
const EACH: usize = 8;
/// Bytes of the counters.
pub(super) const BYTES: u64 = (MAX_COUNTERS * EACH) as u64;

/// Makes room for the counters of a device that has no tensors.
pub(super) fn make_room(image: &Image) -> Result<(), StoreError> {
    image.counters()?.ensure(0..OF_DEVICE * EACH)
}

/// All counters of an image.
#[derive(Debug)]
pub struct Counters {
    memory: Arc<Memory>,
    device: AtomicUsize,
    others: AtomicUsize,
    /// Those that were given back: the first of each, by how many they are.
    free: Mutex<BTreeMap<usize, Vec<usize>>>,
}

/// One number.
#[derive(Clone, Debug)]
pub struct Kept {
    memory: Arc<Memory>,
    at: usize,
}

impl Counters {
    /// The counters of `image`; all at zero for the first process of a run. Numbers below `taken`
    /// belong to tensors and views.
    ///
    /// # Errors
    /// [`StoreError`] if they cannot be mapped.
    pub fn open(image: &Image, first_process: bool, taken: usize) -> Result<Self, StoreError> {
        let memory = image.counters()?;
        let others = taken.max(OF_DEVICE);
        memory.ensure(0..others.min(MAX_COUNTERS) * EACH)?;
        let counters = Self {
            memory: Arc::new(memory),
            device: AtomicUsize::new(0),
            others: AtomicUsize::new(others),
            free: Mutex::default(),
        };
        if first_process {
            for number in 0..others.min(MAX_COUNTERS) {
                counters.clear(number);
            }
        }
        Ok(counters)
    }

    /// The device's next number.
    pub fn take(&self) -> Option<Kept> {
        let number = self.device.fetch_add(1, Relaxed);
        (number < OF_DEVICE).then(|| self.kept(number))
    }

    /// `count` numbers at zero for a tensor or a view: the first. `None` if there are no more; they
    /// are then counted in the process alone.
    pub fn take_others(&self, count: usize) -> Option<usize> {
        let free = self.free.lock().get_mut(&count).and_then(Vec::pop);
        let first = if let Some(first) = free {
            first
        } else {
            let taken = |others: usize| others.checked_add(count).filter(|end| *end <= MAX_COUNTERS);
            self.others.fetch_update(Relaxed, Relaxed, taken).ok()?
        };
        let end = first + count;
        if self.memory.ensure(first * EACH..end * EACH).is_err() {
            self.give_others(first, count);
            return None;
        }
        (first..end).for_each(|number| self.clear(number));
        Some(first)
    }

    /// Gives `count` numbers from `first` on back, where nobody counts any more.
    pub fn give_others(&self, first: usize, count: usize) {
        // An image may say anything.
        let end = first.checked_add(count).filter(|end| *end <= self.others.load(Relaxed).min(MAX_COUNTERS));
        if first < OF_DEVICE || end.is_none() {
            return;
        }
        self.free.lock().entry(count).or_default().push(first);
    }

    /// The number that was told as `number`, if there is such.
    pub fn kept_others(&self, number: usize) -> Option<Kept> {
        (number < self.others.load(Relaxed).min(MAX_COUNTERS)).then(|| self.kept(number))
    }

    fn clear(&self, number: usize) {
        self.memory.write(number * EACH, &[0; EACH]);
    }

    fn kept(&self, number: usize) -> Kept {
        Kept { memory: Arc::clone(&self.memory), at: number * EACH }
    }
}

impl Kept {
    /// Counts `n` more.
    pub fn add(&self, n: u64) {
        self.memory.number(self.at).fetch_add(n, Relaxed);
    }

    /// What was counted in this run, by all processes.
    pub fn get(&self) -> u64 {
        self.memory.number(self.at).load(Relaxed)
    }
}
