//! What a request carries from station to station: where it fetches to, and what it has moved so
//! far.
//!
//! Scratch is taken from a pool when a request begins and goes back when it ends: nothing of one
//! request is left for the next.

use std::ops::{Deref, DerefMut};

use parking_lot::Mutex;

use crate::stats::Tally;
use lamina_codec::{
    Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE},
};

/// What is stored of a block, where it was fetched to. Lines of it are lines of the segment, and so
/// copied without shifting.
#[repr(align(64))]
pub(super) struct AlignedBundle(pub(super) [u8; MAX_BUNDLE]);

/// Buffers of one request or of one thread that codes for it.
pub(super) struct Scratch {
    pub(super) fetched: AlignedBundle,
    /// What is coded together.
    pub(super) bundles: Vec<Bundle>,
    pub(super) encoder: Encoder,
    pub(super) decoder: Decoder,
}

impl Scratch {
    fn new() -> Self {
        Self {
            fetched: AlignedBundle([0; MAX_BUNDLE]),
            bundles: Vec::new(),
            encoder: Encoder::new(),
            decoder: Decoder::new(),
        }
    }
}

/// Scratch that no request uses.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Box<Scratch>>>);

impl Pool {
    pub(super) fn take(&self) -> Taken<'_> {
        let free = self.0.lock().pop();
        Taken { pool: self, scratch: Some(free.unwrap_or_else(|| Box::new(Scratch::new()))) }
    }
}

/// Scratch in use.
pub(super) struct Taken<'p> {
    pool: &'p Pool,
    scratch: Option<Box<Scratch>>,
}

impl Deref for Taken<'_> {
    type Target = Scratch;

    fn deref(&self) -> &Scratch {
        self.scratch.as_ref().expect("there until it is dropped")
    }
}

impl DerefMut for Taken<'_> {
    fn deref_mut(&mut self) -> &mut Scratch {
        self.scratch.as_mut().expect("there until it is dropped")
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(scratch) = self.scratch.take() {
            self.pool.0.lock().push(scratch);
        }
    }
}

/// A request on its way.
pub(super) struct Request<'p> {
    pub(super) scratch: Taken<'p>,
    /// What it moved for the block at hand, and before it for the same owner.
    pub(super) tally: Tally,
}

impl<'p> Request<'p> {
    pub(super) fn new(pool: &'p Pool) -> Self {
        Self { scratch: pool.take(), tally: Tally::default() }
    }
}
