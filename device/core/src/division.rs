//! The device divided: which part of both windows belongs to whom, and what it may store.
//!
//! The rules:
//! * There is always at least one part. The parts lie one behind the other and fill both windows; each part's views range begins with a directory of its own.
//! * An undivided device has one part without a name, and counts nothing for it apart. The tensors of a divided one are called by their part: `part/tensor`.
//! * A quota bounds what a part's blocks are charged in the store. What it refuses is refused before anything is stored; what takes no more than before never is.
//! * Every block, KV window, tensor and view belongs to one part, and so does the room for open KV windows: whatever one part does, another's writes are neither
//!   refused nor coded because of it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{
    counters::{Counter, Traffic},
    tensor::TensorError,
};
use lamina_codec::BLOCK_BYTES;
use lamina_store as store;

/// The parts of a device.
pub(crate) struct Division {
    pub(crate) parts: Vec<Part>,
    /// Whether the parts have names.
    pub(crate) divided: bool,
    /// How often a part was charged less than before.
    pub(crate) freed: AtomicU64,
}

/// One part and what is counted of it.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) name: String,
    /// Its place in the base window.
    pub(crate) base: Range<u64>,
    /// Its place in the views window.
    pub(crate) views: Range<u64>,
    pub(crate) quota: Option<u64>,
    /// What its blocks are charged; counted on a divided device only, like all that follows.
    pub(crate) stored: AtomicU64,
    pub(crate) quota_refusals: Counter,
    pub(crate) base_reads: Traffic,
    pub(crate) view_reads: Traffic,
    pub(crate) directory_reads: Counter,
    pub(crate) base_writes: Counter,
    pub(crate) base_written_bytes: Counter,
    pub(crate) blocks_written: Counter,
    pub(crate) refused_view_stores: Counter,
    pub(crate) refused_view_bytes: Counter,
}

impl Division {
    /// The part that holds base offset `at`.
    pub(crate) fn of_base(&self, at: u64) -> &Part {
        let after = self.parts.partition_point(|part| part.base.start <= at);
        &self.parts[after.saturating_sub(1)]
    }

    /// The number of the part that holds block `block`.
    pub(crate) fn of_block(&self, block: u64) -> usize {
        let at = block.saturating_mul(BLOCK_BYTES as u64);
        self.parts.partition_point(|part| part.base.start <= at).saturating_sub(1)
    }

    /// The part that a tensor's name says it belongs to.
    pub(crate) fn of_name(&self, name: &str) -> Result<usize, TensorError> {
        if !self.divided {
            return Ok(0);
        }
        let (part, own) = name.split_once('/').unwrap_or(("", name));
        let part = self.parts.iter().position(|found| found.name == part).ok_or_else(|| {
            let partitions = self.parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>().join(", ");
            TensorError::NoPartition { name: name.to_owned(), partitions }
        })?;
        if own.is_empty() {
            return Err(TensorError::Name { name: name.to_owned(), length: name.len() });
        }
        Ok(part)
    }

    /// Charges the part of a block for what it is found to hold when a device is opened.
    pub(crate) fn found(&self, block: u64, bytes: u64) {
        if self.divided {
            self.parts[self.of_block(block)].stored.fetch_add(bytes, Relaxed);
        }
    }

    /// A tensor's name without its part's.
    pub(crate) fn own_name<'a>(&self, name: &'a str) -> &'a str {
        if self.divided { name.split_once('/').map_or(name, |(_, own)| own) } else { name }
    }
}

impl Part {
    /// Its counters, in an order that images keep.
    pub(crate) fn counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        let single = [
            &mut self.quota_refusals,
            &mut self.directory_reads,
            &mut self.base_writes,
            &mut self.base_written_bytes,
            &mut self.blocks_written,
            &mut self.refused_view_stores,
            &mut self.refused_view_bytes,
        ];
        self.base_reads.counters().into_iter().chain(self.view_reads.counters()).chain(single)
    }

    /// Those that came later, likewise.
    pub(crate) fn later_counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        self.base_reads.later_counters().into_iter().chain(self.view_reads.later_counters())
    }

    /// Its blocks.
    pub(crate) fn blocks(&self) -> Range<u64> {
        store::blocks(self.base.start)..store::blocks(self.base.end)
    }
}
