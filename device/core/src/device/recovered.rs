//! What a thread finds in an image that is opened, before it is charged to tensors and told to the
//! counters: one step for many blocks.

use std::sync::Arc;

use super::charge::Charge;
use crate::{
    stats::{Holdings, Stats},
    tensor::Tensor,
    window::Map,
};
use lamina_codec::BLOCK_BYTES;
use lamina_store::entry::Entry;

/// What was found so far.
#[derive(Default)]
pub(super) struct Recovered {
    holdings: Holdings,
    live: u64,
    /// Of them, those no tensor covers, and what they are charged.
    opaque: (u64, u64),
    /// The tensor of the last block, and of its blocks that are not told to it yet how many hold
    /// data, and what they are charged.
    owner: Option<Arc<Tensor>>,
    owned: (u64, u64),
}

impl Recovered {
    /// A block was found.
    pub(super) fn found(&mut self, map: &Map, block: u64, entry: &Entry, charge: &Charge) {
        self.holdings.add(entry);
        self.live += u64::from(charge.live);
        let dpa = block * BLOCK_BYTES as u64;
        let owns = |tensor: &Arc<Tensor>| (tensor.info.dpa..tensor.end()).contains(&dpa);
        if !self.owner.as_ref().is_some_and(owns) {
            self.leave();
            self.owner = map.tensor_at(dpa).cloned();
        }
        if self.owner.is_some() {
            self.owned = (self.owned.0 + u64::from(charge.live), self.owned.1 + charge.bytes);
        } else {
            self.opaque = (self.opaque.0 + u64::from(charge.live), self.opaque.1 + charge.bytes);
        }
    }

    fn leave(&mut self) {
        if let Some(tensor) = self.owner.take() {
            let (live, stored) = std::mem::take(&mut self.owned);
            tensor.live.shift(0, live);
            tensor.stored.shift(0, stored);
        }
    }

    /// Charges and counts it all.
    pub(super) fn settle(mut self, stats: &Stats) {
        self.leave();
        stats.found(&self.holdings);
        stats.live_blocks.shift(0, self.live);
        stats.opaque_blocks.shift(0, self.opaque.0);
        stats.opaque_stored.shift(0, self.opaque.1);
    }
}
