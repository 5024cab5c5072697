//! Traffic that is counted in an image, at numbers that are given back when nobody counts there.

use std::{ops::Deref, sync::Arc};

use super::{Numbers, Traffic};
use lamina_store::counters::Counters;

/// Traffic, and where an image keeps its counters. These are used again when nobody counts there
/// any more.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    pub(crate) traffic: Traffic,
    pub(crate) numbers: Numbers,
    pub(crate) counters: Option<Arc<Counters>>,
}

impl Deref for Counted {
    type Target = Traffic;

    fn deref(&self) -> &Traffic {
        &self.traffic
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Some(counters) = &self.counters else { return };
        let Numbers { first, later } = self.numbers;
        for (first, count) in [(first, Traffic::COUNTERS), (later, Traffic::LATER_COUNTERS)] {
            if let Some(first) = first {
                counters.give_others(first, count);
            }
        }
    }
}
