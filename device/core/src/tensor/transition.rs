//! How far a tensor has come or gone: it is made and removed in steps, see `device::tables`.
//!
//! All of it changes only while the map is held alone, so that whoever holds the map may rely on
//! it.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;

pub(crate) struct Transition {
    turn: Mutex<()>,
    leaving: AtomicBool,
    charged_from: AtomicU64,
    charged_to: AtomicU64,
}

impl Transition {
    /// Of a tensor that is there, and charged for all its blocks.
    pub(crate) fn standing() -> Self {
        Self::new(0..u64::MAX)
    }

    /// Of a tensor that is being made, and charged for none of its blocks.
    pub(crate) fn making() -> Self {
        Self::new(0..0)
    }

    fn new(charged: Range<u64>) -> Self {
        Self {
            turn: Mutex::new(()),
            leaving: AtomicBool::new(false),
            charged_from: AtomicU64::new(charged.start),
            charged_to: AtomicU64::new(charged.end),
        }
    }

    /// Held by who makes or removes the tensor, from the first step to the last.
    pub(crate) fn turn(&self) -> &Mutex<()> {
        &self.turn
    }

    /// Whether the tensor is there and stays: neither made nor removed now.
    pub(crate) fn is_standing(&self) -> bool {
        !self.is_leaving() && self.charged() == (0..u64::MAX)
    }

    /// Whether the tensor's KV windows are coded block by block, and closed by every store, because
    /// it is about to go.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Relaxed);
    }

    /// The blocks that the tensor is charged for, counted from its first.
    pub(crate) fn charged(&self) -> Range<u64> {
        self.charged_from.load(Relaxed)..self.charged_to.load(Relaxed)
    }

    pub(crate) fn set_charged(&self, charged: Range<u64>) {
        self.charged_from.store(charged.start, Relaxed);
        self.charged_to.store(charged.end, Relaxed);
    }
}
