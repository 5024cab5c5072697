//! What blocks are charged, and to whom.

use crate::{stats::Stats, tensor::Tensor, window::Map};
use lamina_codec::{BLOCK_BYTES, block::Bundle};
use lamina_store as store;
use lamina_store::entry::Entry;

/// What a block is charged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Charge {
    pub(super) live: bool,
    pub(super) bypass: bool,
    pub(super) bytes: u64,
}

impl Charge {
    pub(super) fn of(entry: &Entry) -> Self {
        let bypass = entry.place.as_ref().is_some_and(|place| place.stored.is_bypass());
        Self { live: entry.place.is_some(), bypass, bytes: entry.charged() }
    }

    /// Its bytes.
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

/// Moves the charge of `block` from `old` to `new` in the account of who is charged for it by
/// `map`.
pub(super) fn charge(stats: &Stats, map: &Map, block: u64, old: Charge, new: Charge) {
    stats.live_blocks.shift(old.live.into(), new.live.into());
    let owner = map.tensor_at(block * BLOCK_BYTES as u64);
    if let Some(tensor) = owner.filter(|tensor| tensor.is_charged(block)) {
        tensor.stored.shift(old.bytes, new.bytes);
    } else {
        stats.opaque_stored.shift(old.bytes, new.bytes);
        stats.opaque_blocks.shift(old.live.into(), new.live.into());
    }
}

/// Charges `tensor` for what nobody was charged for.
pub(super) fn take_over(stats: &Stats, tensor: &Tensor, charge: Charge) {
    stats.opaque_stored.shift(charge.bytes, 0);
    stats.opaque_blocks.shift(charge.live.into(), 0);
    tensor.stored.shift(0, charge.bytes);
}

/// Takes from `tensor` what it was charged for.
pub(super) fn hand_back(stats: &Stats, tensor: &Tensor, charge: Charge) {
    tensor.stored.shift(charge.bytes, 0);
    stats.opaque_stored.shift(0, charge.bytes);
    stats.opaque_blocks.shift(0, charge.live.into());
}
