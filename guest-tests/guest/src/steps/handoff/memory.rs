//! The region's memory as a side of a handoff has it: counted, and with a call left out.

use std::fs::OpenOptions;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use lamina_pool::mem::{Call, CxlMem, Hosted, LINE, Map, MemError, Part, Port, Revoke};
use lamina_shim::{Ctl, CtlError, Lamina, Role};
use serde_json::{Value, json};

use crate::{Calls, HandoffPlan, Omit};

/// Lines that a record has at most. What is longer is a block's.
const RECORD: u64 = 2 * LINE;

/// The control port, as the pool asks it.
#[derive(Clone)]
pub(super) struct Device(Arc<Mutex<Ctl>>);

impl Device {
    pub(super) fn open(lamina: &Lamina) -> Result<Self, lamina_shim::Error> {
        Ok(Self(Arc::new(Mutex::new(lamina.ctl()?))))
    }

    fn ask(&self, request: &Value) -> Result<(), MemError> {
        let mut ctl = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = ctl.request(request);
        asked
            .map(drop)
            .map_err(|why: CtlError| MemError::Port { request: request.to_string(), why: why.to_string() })
    }
}

impl Port for Device {
    fn request(&self, op: &'static str, at: u64, length: u64) -> Result<(), MemError> {
        self.ask(&json!({ "op": op, "offset": at, "length": length }))
    }
}

impl Revoke for Device {
    fn revoke(&self, host: &str) -> Result<(), MemError> {
        self.ask(&json!({ "op": "revoke", "host": host }))
    }
}

/// The pool's part of the region.
pub(super) struct Region {
    part: Part<Hosted<Device>>,
    omit: Option<Omit>,
    flushes: AtomicU64,
    invalidations: AtomicU64,
    fences: AtomicU64,
}

impl Region {
    pub(super) fn open(lamina: &Lamina, device: &Device, plan: &HandoffPlan) -> anyhow::Result<Self> {
        let window = lamina.window(Role::Base)?;
        let path = window.path();
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        let map = Map::new(&file, path, Some(window.bytes()))?;
        let (start, bytes) = plan.pool;
        let part = Part::new(Hosted::new(map, device.clone()), start, bytes)?;
        let [flushes, invalidations, fences] = Default::default();
        Ok(Self { part, omit: plan.omit, flushes, invalidations, fences })
    }

    /// Holds all lines, as a processor may that has prefetched them.
    pub(super) fn hold_all(&self) -> Result<(), MemError> {
        let mut page = [0; 4096];
        for at in (0..self.part.bytes()).step_by(page.len()) {
            self.part.load(at, &mut page)?;
        }
        Ok(())
    }

    pub(super) fn calls(&self) -> Calls {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Calls { flushes: of(&self.flushes), invalidations: of(&self.invalidations), fences: of(&self.fences) }
    }
}

impl CxlMem for Region {
    fn bytes(&self) -> u64 {
        self.part.bytes()
    }

    fn coherent(&self) -> bool {
        false
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.part.load(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.part.store(at, from)
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        if from.len() as u64 > RECORD && self.omit == Some(Omit::PayloadFlush) {
            return self.part.store(at, from);
        }
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.part.ntstore(at, from)
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.part.flush(at, length)
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.invalidations.fetch_add(1, Ordering::Relaxed);
        self.part.invalidate(at, length)
    }

    fn fence(&self) -> Result<(), MemError> {
        self.fences.fetch_add(1, Ordering::Relaxed);
        self.part.fence()
    }

    fn wants(&self, _: &'static Location<'static>, call: Call, _: u64, length: u64) -> bool {
        let left_out = self.omit == Some(Omit::PayloadInvalidate) && call == Call::Invalidate;
        !left_out || length <= RECORD
    }
}
