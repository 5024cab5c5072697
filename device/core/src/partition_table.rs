//! The device divided: which partition of both windows belongs to whom, and what it may store.
//!
//! The rules:
//! * There is always at least one partition. The partitions lie one behind the other and fill both
//!   windows; each partition's views range begins with a directory of its own.
//! * An undivided device has one partition without a name, and counts nothing for it apart. The
//!   tensors of a divided one are called by their partition: `partition/tensor`.
//! * A quota bounds what a partition's blocks are charged in the store. What it refuses is refused
//!   before anything is stored; what takes no more than before never is.
//! * Every block, KV window, tensor and view belongs to one partition, and so does the room for
//!   open KV windows: whatever one partition does, another's writes are neither refused nor coded
//!   because of it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{
    counters,
    counters::{
        Compared,
        Slot::{First, Later},
        Traffic, TrafficReport,
    },
    tensor::TensorError,
};
use lamina_codec::BLOCK_BYTES;
use lamina_store as store;

/// The partitions of a device.
pub(crate) struct PartitionTable {
    pub(crate) partitions: Vec<PartitionState>,
    /// Whether the partitions have names.
    pub(crate) divided: bool,
    /// How often a partition was charged less than before.
    pub(crate) freed: AtomicU64,
}

counters! {
    /// One partition and what is counted of it.
    pub(crate) struct PartitionState for Compared {
        pub(crate) name: String;
        /// Its place in the base window.
        pub(crate) base: Range<u64>;
        /// Its place in the views window.
        pub(crate) views: Range<u64>;
        pub(crate) quota: Option<u64>;
        /// What its blocks are charged; counted on a divided device only, like all that follows.
        pub(crate) stored: AtomicU64;
        pub(crate) base_reads: Traffic, at First(0), Later(0);
        pub(crate) view_reads: Traffic, at First(7), Later(4);
    }

    /// One partition of a divided device.
    pub struct PartitionReport by report {
        reported {
            /// Its name.
            name: String = |it, _| it.name.clone();
            /// Where its base window begins on the device; 0 where its guest is told.
            dpa: u64 = |it, _| it.base.start;
            /// Requests by window.
            requests: PartitionRequests = |it, given| it.requests(given);
            /// What writes did.
            writes: PartitionWrites = |it, given| it.writes(given);
        }
        counted {
            /// Writes of blocks or KV windows that a partition's quota refused.
            quota_refusals: Counter at First(14) => quota_refusals "_quota_refusals" Count;
        }
        computed {
            /// Bytes of a partition's base window.
            capacity_bytes: u64 = Gauge "" Bytes, |it, _| it.base.end - it.base.start;
            /// Bytes of its views window.
            views_capacity_bytes: u64 = Gauge "_views" Bytes, |it, _| it.views.end - it.views.start;
            /// Bytes that its blocks may be charged; null without a bound.
            quota_bytes: Option<u64> = Gauge "_quota" Bytes, |it, _| it.quota;
            /// Bytes that its blocks are charged in the store.
            stored_bytes: u64 = Gauge "_stored" Bytes, |it, _| it.stored.load(Relaxed);
        }
    }

    /// Requests of a partition by window.
    pub struct PartitionRequests by requests {
        reported {
            /// Reads of its base window.
            base: TrafficReport = |it, given| it.base_reads.report(given);
            /// Reads of its views.
            views: TrafficReport = |it, given| it.view_reads.report(given);
        }
        counted {
            /// Reads of the directory.
            directory_reads: Counter at First(15) => directory_reads "directory_reads" Count;
            /// Stores into the views window, which have no effect.
            refused_view_stores: Counter at First(19) => refused_view_stores "refused_view_stores" Count;
            /// Bytes of stores into the views window.
            refused_view_bytes: Counter at First(20) => refused_view_bytes "refused_view_store" Bytes;
        }
    }

    /// What writes to a partition did.
    pub struct PartitionWrites by writes {
        counted {
            /// Write requests: write-backs of dirty pages and direct writes.
            base_writes: Counter at First(16) => base_writes "base_writes" Count;
            /// Bytes of write-backs and direct writes.
            base_written_bytes: Counter at First(17) => base_written_bytes "base_written" Bytes;
            /// Blocks coded.
            blocks_written: Counter at First(18) => blocks_written "written_blocks" Count;
        }
    }
}

impl PartitionTable {
    /// The partition that holds base offset `at`.
    pub(crate) fn of_base(&self, at: u64) -> &PartitionState {
        let after = self.partitions.partition_point(|partition| partition.base.start <= at);
        &self.partitions[after.saturating_sub(1)]
    }

    /// The number of the partition that holds block `block`.
    pub(crate) fn of_block(&self, block: u64) -> usize {
        let at = block.saturating_mul(BLOCK_BYTES as u64);
        self.partitions.partition_point(|partition| partition.base.start <= at).saturating_sub(1)
    }

    /// The partition that a tensor's name says it belongs to.
    pub(crate) fn of_name(&self, name: &str) -> Result<usize, TensorError> {
        if !self.divided {
            return Ok(0);
        }
        let (partition, own) = name.split_once('/').unwrap_or(("", name));
        let partition =
            self.partitions.iter().position(|found| found.name == partition).ok_or_else(|| {
                let partitions = self
                    .partitions
                    .iter()
                    .map(|partition| partition.name.as_str())
                    .collect::<Vec<_>>()
                    .join(", ");
                TensorError::NoPartition { name: name.to_owned(), partitions }
            })?;
        if own.is_empty() {
            return Err(TensorError::Name { name: name.to_owned(), length: name.len() });
        }
        Ok(partition)
    }

    /// Charges the partition of a block for what it is found to hold when a device is opened.
    pub(crate) fn found(&self, block: u64, bytes: u64) {
        if self.divided {
            self.partitions[self.of_block(block)].stored.fetch_add(bytes, Relaxed);
        }
    }

    /// A tensor's name without its partition's.
    pub(crate) fn own_name<'a>(&self, name: &'a str) -> &'a str {
        if self.divided { name.split_once('/').map_or(name, |(_, own)| own) } else { name }
    }
}

impl PartitionState {
    pub(crate) fn blocks(&self) -> Range<u64> {
        store::blocks(self.base.start)..store::blocks(self.base.end)
    }
}
