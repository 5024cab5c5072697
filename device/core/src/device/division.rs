//! The device divided: which part of both windows belongs to whom, and what it may store.
//!
//! The rules:
//! * There is always at least one part. The parts lie one behind the other and fill both windows; each part's views range begins with a directory of its own.
//! * An undivided device has one part without a name, and counts nothing for it apart. The tensors of a divided one are called by their part: `part/tensor`.
//! * A quota bounds what a part's blocks are charged in the store. What it refuses is refused before anything is stored; what takes no more than before never is.
//! * Every block, KV window, tensor and view belongs to one part, and so does the room for open KV windows: whatever one part does, another's writes are neither
//!   refused nor coded because of it.

use std::ops::Range;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, Release},
};

use lamina_abi::{DIRECTORY_BYTES, VIEW_ALIGN};

use super::{Device, DeviceConfig, DeviceError};
use crate::{
    stats::{Counter, Traffic},
    tensor::TensorError,
};
use lamina_codec::BLOCK_BYTES;
use lamina_store as store;

/// Most partitions of a device: the logical devices that CXL 2.0 lets a device have.
pub const MOST_PARTITIONS: usize = 16;
/// Longest name of a partition, in bytes.
pub const MOST_PARTITION_NAME_BYTES: usize = 32;

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
    /// The parts that `config` asks for.
    pub(super) fn new(config: &DeviceConfig) -> Result<Self, DeviceError> {
        if config.partitions.is_empty() {
            let (base, views) = (0..config.base_bytes, 0..config.views_bytes);
            return Ok(Self {
                parts: vec![Part { base, views, ..Part::default() }],
                divided: false,
                freed: AtomicU64::new(0),
            });
        }
        if config.partitions.len() > MOST_PARTITIONS {
            return Err(DeviceError::Partitions { count: config.partitions.len() });
        }
        let mut parts: Vec<Part> = Vec::new();
        let (mut base, mut views) = (0_u64, 0_u64);
        for partition in &config.partitions {
            let name = &partition.name;
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
            if name.is_empty() || name.len() > MOST_PARTITION_NAME_BYTES || !name.chars().all(fits) {
                return Err(DeviceError::PartitionName { name: name.chars().take(64).collect() });
            }
            if parts.iter().any(|part| part.name == *name) {
                return Err(DeviceError::PartitionTwice { name: name.clone() });
            }
            let size = |what, bytes, rule| DeviceError::Size { what, bytes, rule };
            if partition.base_bytes == 0 || !partition.base_bytes.is_multiple_of(BLOCK_BYTES as u64) {
                let rule = "a partition's is a multiple of 4096 bytes above zero";
                return Err(size("a base window", partition.base_bytes, rule));
            }
            if partition.views_bytes <= DIRECTORY_BYTES || !partition.views_bytes.is_multiple_of(VIEW_ALIGN) {
                let rule = "a partition's is a multiple of 2 MiB, and more than the directory's 2 MiB";
                return Err(size("a views window", partition.views_bytes, rule));
            }
            let past = || size("all partitions together", u64::MAX, "they fit 64 bits");
            let ends = (base.checked_add(partition.base_bytes), views.checked_add(partition.views_bytes));
            let (Some(base_end), Some(views_end)) = ends else { return Err(past()) };
            parts.push(Part {
                name: name.clone(),
                base: base..base_end,
                views: views..views_end,
                quota: partition.quota_bytes,
                ..Part::default()
            });
            (base, views) = (base_end, views_end);
        }
        for (what, bytes, sum) in
            [("a base window", config.base_bytes, base), ("a views window", config.views_bytes, views)]
        {
            if bytes != sum {
                return Err(DeviceError::Size { what, bytes, rule: "it is its partitions' together" });
            }
        }
        Ok(Self { parts, divided: true, freed: AtomicU64::new(0) })
    }

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
    pub(super) fn of_name(&self, name: &str) -> Result<usize, TensorError> {
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
    pub(super) fn found(&self, block: u64, bytes: u64) {
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
    pub(super) fn counters(&mut self) -> impl Iterator<Item = &mut Counter> {
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
    pub(super) fn later_counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        self.base_reads.later_counters().into_iter().chain(self.view_reads.later_counters())
    }

    /// Its blocks.
    pub(super) fn blocks(&self) -> Range<u64> {
        store::blocks(self.base.start)..store::blocks(self.base.end)
    }
}

impl Device {
    /// The part to count for a request to base offset `at`, if parts are counted.
    pub(super) fn counted_part(&self, at: u64) -> Option<&Part> {
        self.division.divided.then(|| self.division.of_base(at))
    }

    /// Charges the part of `block` `new` bytes in place of `old`, before they are stored.
    ///
    /// # Errors
    /// [`DeviceError::Quota`] if that is more than before and more than the quota; nothing is charged then.
    pub(super) fn account(&self, block: u64, old: u64, new: u64) -> Result<(), DeviceError> {
        if !self.division.divided {
            return Ok(());
        }
        let part = &self.division.parts[self.division.of_block(block)];
        let quota = part.quota.filter(|_| new > old).unwrap_or(u64::MAX);
        let charged = |stored: u64| stored.saturating_sub(old).checked_add(new);
        let fits = |stored| charged(stored).filter(|after| *after <= quota);
        match part.stored.fetch_update(Relaxed, Relaxed, fits) {
            Ok(_) => {
                if new < old {
                    self.division.freed.fetch_add(1, Release);
                }
                Ok(())
            }
            Err(stored) => {
                if part.quota_refusals.get() == 0 {
                    tracing::warn!(guest = part.name, stored, quota, "the quota is used up; writes fail");
                }
                part.quota_refusals.add(1);
                let (partition, wanted) = (part.name.clone(), new - old);
                Err(DeviceError::Quota { partition, stored, wanted, quota })
            }
        }
    }

    /// Takes back what [`Self::account`] charged.
    pub(super) fn unaccount(&self, block: u64, old: u64, new: u64) {
        if self.division.divided {
            let stored = &self.division.parts[self.division.of_block(block)].stored;
            // Less than a moment ago is never refused.
            let _ = stored.fetch_update(Relaxed, Relaxed, |now| Some((now + old).saturating_sub(new)));
            self.division.freed.fetch_add(1, Release);
        }
    }
}
