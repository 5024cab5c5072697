//! What blocks are charged.

use crate::{stats::Stats, tensor::Tensor};
use lamina_codec::{BLOCK_BYTES, block::Bundle};
use lamina_store as store;
use lamina_store::entry::{Entry, Place};

/// For whom a block is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// A host stored into it.
    Store,
    /// A host stored into other blocks of its KV window.
    Window,
    /// The device itself: its tensor is made or removed.
    Maintenance,
}

/// What a block is charged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Charge {
    pub(super) live: bool,
    pub(super) bypass: bool,
    pub(super) bytes: u64,
}

impl Charge {
    pub(super) fn of(entry: &Entry) -> Self {
        let bypass = entry.place.as_ref().is_some_and(Place::is_bypass);
        Self { live: entry.place.is_some(), bypass, bytes: entry.charged() }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Of a block that is kept as it is.
    pub(super) fn flat(live: bool) -> Self {
        Self { live, bypass: false, bytes: if live { BLOCK_BYTES as u64 } else { 0 } }
    }
}

/// What a block is charged for `bundle`.
pub(super) fn charge_of(bundle: &Bundle) -> u64 {
    bundle.stored.as_ref().map_or(0, |stored| store::charged(stored.bytes()))
}

/// Charges `tensor` for what nobody was charged for.
pub(super) fn take_over(stats: &Stats, tensor: &Tensor, charge: Charge) {
    stats.opaque_stored.shift(charge.bytes, 0);
    stats.opaque_blocks.shift(charge.live.into(), 0);
    tensor.stored.shift(0, charge.bytes);
    tensor.live.shift(0, charge.live.into());
}

/// Takes from `tensor` what it was charged for.
pub(super) fn hand_back(stats: &Stats, tensor: &Tensor, charge: Charge) {
    tensor.stored.shift(charge.bytes, 0);
    tensor.live.shift(charge.live.into(), 0);
    stats.opaque_stored.shift(0, charge.bytes);
    stats.opaque_blocks.shift(0, charge.live.into());
}
