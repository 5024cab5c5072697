//! The device divided: which partitions are asked for, and what each is charged.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, Release},
};

use lamina_abi::{DIRECTORY_BYTES, VIEW_ALIGN};
use lamina_codec::BLOCK_BYTES;

use super::{DeviceConfig, DeviceError};
use crate::partition_table::{PartitionState, PartitionTable};

/// Most partitions of a device: the logical devices that CXL 2.0 lets a device have.
pub const MAX_PARTITIONS: usize = 16;
/// Longest name of a partition, in bytes.
pub const MAX_PARTITION_NAME_BYTES: usize = 32;

impl DeviceConfig {
    /// The partitions that it asks for.
    pub(super) fn partition_table(&self) -> Result<PartitionTable, DeviceError> {
        if self.partitions.is_empty() {
            let (base, views) = (0..self.base_bytes, 0..self.views_bytes);
            return Ok(PartitionTable {
                partitions: vec![PartitionState { base, views, ..PartitionState::default() }],
                divided: false,
                freed: AtomicU64::new(0),
            });
        }
        if self.partitions.len() > MAX_PARTITIONS {
            return Err(DeviceError::Partitions { count: self.partitions.len() });
        }
        let mut partitions: Vec<PartitionState> = Vec::new();
        let (mut base, mut views) = (0_u64, 0_u64);
        for partition in &self.partitions {
            let name = &partition.name;
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
            if name.is_empty() || name.len() > MAX_PARTITION_NAME_BYTES || !name.chars().all(fits) {
                return Err(DeviceError::PartitionName { name: name.chars().take(64).collect() });
            }
            if partitions.iter().any(|partition| partition.name == *name) {
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
            partitions.push(PartitionState {
                name: name.clone(),
                base: base..base_end,
                views: views..views_end,
                quota: partition.quota_bytes,
                ..PartitionState::default()
            });
            (base, views) = (base_end, views_end);
        }
        for (what, bytes, sum) in
            [("a base window", self.base_bytes, base), ("a views window", self.views_bytes, views)]
        {
            if bytes != sum {
                return Err(DeviceError::Size { what, bytes, rule: "it is its partitions' together" });
            }
        }
        Ok(PartitionTable { partitions, divided: true, freed: AtomicU64::new(0) })
    }
}

impl PartitionTable {
    /// Charges the partition of `block` `new` bytes in place of `old`, before they are stored.
    ///
    /// # Errors
    /// [`DeviceError::Quota`] if that is more than before and more than the quota; nothing is
    /// charged then.
    pub(crate) fn account(&self, block: u64, old: u64, new: u64) -> Result<(), DeviceError> {
        self.try_account(block, old, new).inspect_err(|_| {
            let partition = &self.partitions[self.of_block(block)];
            if partition.quota_refusals.get() == 0 {
                let (stored, quota) = (partition.stored.load(Relaxed), partition.quota);
                tracing::warn!(guest = partition.name, stored, ?quota, "the quota is used up; writes fail");
            }
            partition.quota_refusals.add(1);
        })
    }

    /// As [`Self::account`], of what is tried otherwise if it is refused: so it is not counted.
    ///
    /// # Errors
    /// As [`Self::account`].
    pub(crate) fn try_account(&self, block: u64, old: u64, new: u64) -> Result<(), DeviceError> {
        if !self.divided {
            return Ok(());
        }
        let partition = &self.partitions[self.of_block(block)];
        let quota = partition.quota.filter(|_| new > old).unwrap_or(u64::MAX);
        let charged = |stored: u64| stored.saturating_sub(old).checked_add(new);
        let fits = |stored| charged(stored).filter(|after| *after <= quota);
        match partition.stored.fetch_update(Relaxed, Relaxed, fits) {
            Ok(_) => {
                if new < old {
                    self.freed.fetch_add(1, Release);
                }
                Ok(())
            }
            Err(stored) => {
                let (partition, wanted) = (partition.name.clone(), new - old);
                Err(DeviceError::Quota { partition, stored, wanted, quota })
            }
        }
    }

    /// Takes back what [`Self::account`] charged.
    pub(crate) fn unaccount(&self, block: u64, old: u64, new: u64) {
        if self.divided {
            let stored = &self.partitions[self.of_block(block)].stored;
            // Less than a moment ago is never refused.
            let _ = stored.fetch_update(Relaxed, Relaxed, |now| Some((now + old).saturating_sub(new)));
            self.freed.fetch_add(1, Release);
        }
    }
}
