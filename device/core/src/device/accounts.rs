//! Accounts: what is counted, and who is charged what.
//!
//! Everything that is told of a device comes from here. The block service and the staging of KV windows charge and count as they
//! publish; requests are counted when they are complete.

use std::ops::Range;

use super::{
    DeviceError,
    charge::{By, Charge},
    observers::{Change, Coded, Observers},
};
use crate::{
    partition_table::{Part, PartitionTable},
    stats::{Stats, Tally, Traffic},
    tensor::Tensor,
};
use lamina_codec::{BLOCK_BYTES, BlockWords, Codec};

/// The accounts of a device.
pub(super) struct Accounts {
    pub(super) stats: Stats,
    /// The parts of the device, their quotas, and what is counted of each.
    pub(super) partition_table: PartitionTable,
    pub(super) observers: Observers,
}

/// A block that was published.
pub(super) struct Written<'a> {
    pub(super) block: u64,
    pub(super) words: &'a BlockWords,
    pub(super) codec: Codec,
    pub(super) old: Charge,
    pub(super) new: Charge,
    pub(super) by: By,
}

impl Accounts {
    /// The part to count for a request to base offset `at`, if parts are counted.
    pub(super) fn counted_part(&self, at: u64) -> Option<&Part> {
        self.partition_table.divided.then(|| self.partition_table.of_base(at))
    }

    /// Charges the part of `block` `new` bytes in place of `old`, before they are stored.
    ///
    /// # Errors
    /// [`DeviceError::Quota`] if that is more than before and more than the quota; nothing is charged then.
    pub(super) fn reserve(&self, block: u64, old: u64, new: u64) -> Result<(), DeviceError> {
        self.partition_table.account(block, old, new)
    }

    /// Takes back what [`Self::reserve`] charged.
    pub(super) fn give_back(&self, block: u64, old: u64, new: u64) {
        self.partition_table.unaccount(block, old, new);
    }

    /// Moves the charge of `block` from `old` to `new` in the account of `owner`, who has it by the map.
    pub(super) fn charge(&self, owner: Option<&Tensor>, block: u64, old: Charge, new: Charge) {
        let stats = &self.stats;
        stats.live_blocks.shift(old.live.into(), new.live.into());
        if let Some(tensor) = owner.filter(|tensor| tensor.is_charged(block)) {
            tensor.stored.shift(old.bytes, new.bytes);
        } else {
            stats.opaque_stored.shift(old.bytes, new.bytes);
            stats.opaque_blocks.shift(old.live.into(), new.live.into());
        }
    }

    /// Counts a block that was published with `parts` that a host stored, and charges its owner.
    pub(super) fn written(
        &self,
        owner: Option<&Tensor>,
        parts: &[Range<usize>],
        written: &Written<'_>,
        tally: &mut Tally,
    ) {
        let Written { block, words, codec, old, new, by } = *written;
        let stats = &self.stats;
        if by == By::Maintenance {
            stats.recoded_blocks.add(1);
            stats.recoded_bytes.add(new.bytes);
        } else {
            stats.blocks_written.add(1);
            stats.zero_blocks_written.add(u64::from(!new.live));
            stats.bypass_blocks_written.add(u64::from(new.bypass));
            stats.stored_bytes_written.add(new.bytes);
            if let Some(part) = self.counted_part(block * BLOCK_BYTES as u64) {
                part.blocks_written.add(1);
            }
        }
        let coded = Some(Coded { words, codec, charge: new, by });
        self.observers.stored(&Change { block, parts, coded }, stats, tally);
        self.charge(owner, block, old, new);
    }

    /// Counts a read of a window that gave `bytes`.
    pub(super) fn count_read(&self, window: &Traffic, bytes: u64, tally: &Tally) {
        window.count(bytes, tally);
        self.stats.count_index(tally);
        self.observers.read(tally);
    }
}
