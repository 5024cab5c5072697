//! Accounts: what is counted, and who is charged what.
//!
//! Everything that is told of a device comes from here. The block service and the staging of KV
//! windows charge and count as they publish; requests are counted when they are complete.

use std::ops::Range;

use super::{
    DeviceError,
    charge::{By, Charge},
    observers::{Change, Coded, Observers},
};
use crate::{
    partition_table::{PartitionState, PartitionTable},
    stats::{Holdings, Stats, Tally, Traffic},
    tensor::Tensor,
};
use lamina_codec::{BLOCK_BYTES, BlockWords, Codec};
use lamina_store::entry::Entry;

/// The accounts of a device.
pub(super) struct Accounts {
    pub(super) stats: Stats,
    /// The partitions of the device, their quotas, and what is counted of each.
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
    /// What it is stored as, if the mode has entries.
    pub(super) entry: Option<&'a Entry>,
    /// What all of it was read by, if it was read before.
    pub(super) read: Option<&'a Entry>,
}

impl Accounts {
    /// The partition to count for a request to base offset `at`, if partitions are counted.
    pub(super) fn counted_partition(&self, at: u64) -> Option<&PartitionState> {
        self.partition_table.divided.then(|| self.partition_table.of_base(at))
    }

    /// Charges the partition of `block` `new` bytes in place of `old`, before they are stored.
    ///
    /// # Errors
    /// [`DeviceError::Quota`] if that is more than before and more than the quota; nothing is
    /// charged then.
    pub(super) fn reserve(&self, block: u64, old: u64, new: u64) -> Result<(), DeviceError> {
        self.partition_table.account(block, old, new)
    }

    /// As [`Self::reserve`], of blocks that are stored one by one if they are refused together.
    ///
    /// # Errors
    /// As [`Self::reserve`], but the refusal is not counted.
    pub(super) fn reserve_together(&self, first: u64, old: u64, new: u64) -> Result<(), DeviceError> {
        self.partition_table.try_account(first, old, new)
    }

    /// Takes back what [`Self::reserve`] charged.
    pub(super) fn give_back(&self, block: u64, old: u64, new: u64) {
        self.partition_table.unaccount(block, old, new);
    }

    /// Moves the charge of `block` from `old` to `new` in the account of `owner`, who has it by the
    /// map.
    pub(super) fn charge(&self, owner: Option<&Tensor>, block: u64, old: Charge, new: Charge) {
        let stats = &self.stats;
        stats.live_blocks.shift(old.live.into(), new.live.into());
        if let Some(tensor) = owner.filter(|tensor| tensor.is_charged(block)) {
            tensor.stored.shift(old.bytes, new.bytes);
            tensor.live.shift(old.live.into(), new.live.into());
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
        let Written { block, words, codec, old, new, by, entry, read } = *written;
        let stats = &self.stats;
        if by == By::Maintenance {
            stats.recoded_blocks.add(1);
            stats.recoded_bytes.add(new.bytes);
        } else {
            stats.blocks_written.add(1);
            stats.zero_blocks_written.add(u64::from(!new.live));
            stats.bypass_blocks_written.add(u64::from(new.bypass));
            stats.stored_bytes_written.add(new.bytes);
            if let Some(partition) = self.counted_partition(block * BLOCK_BYTES as u64) {
                partition.blocks_written.add(1);
            }
        }
        let coded = Some(Coded { words, charge: new, by, entry });
        self.observers.stored(&Change { block, codec, parts, coded, read }, stats, tally);
        self.charge(owner, block, old, new);
    }

    /// Counts blocks of one owner that were published together, and charges him: each counter and
    /// gauge is told once. `parts` of each of them a host stored.
    pub(super) fn written_together<'w>(
        &self,
        owner: Option<&Tensor>,
        codec: Codec,
        parts: &[Range<usize>],
        changes: &[(Entry, Entry)],
        blocks: impl Iterator<Item = (u64, &'w BlockWords, By)>,
        tally: &mut Tally,
    ) {
        let stats = &self.stats;
        let mut holdings = Holdings::default();
        let (mut stored, mut recoded) = (Sums::default(), Sums::default());
        let (mut owned, mut opaque) = (Shift::default(), Shift::default());
        for ((block, words, by), (old, new)) in blocks.zip(changes) {
            holdings.shift(old, new);
            let entry = Some(new);
            let (old, new) = (Charge::of(old), Charge::of(new));
            if by == By::Maintenance { &mut recoded } else { &mut stored }.add(block, new);
            let is_charged = owner.is_some_and(|tensor| tensor.is_charged(block));
            if is_charged { &mut owned } else { &mut opaque }.add(old, new);
            let coded = Some(Coded { words, charge: new, by, entry });
            self.observers.stored(&Change { block, codec, parts, coded, read: None }, stats, tally);
        }
        stats.index_written.add(changes.len() as u64);
        stats.found(&holdings);
        stats.recoded_blocks.add(recoded.blocks);
        stats.recoded_bytes.add(recoded.bytes);
        stats.blocks_written.add(stored.blocks);
        stats.zero_blocks_written.add(stored.zeros);
        stats.bypass_blocks_written.add(stored.bypass);
        stats.stored_bytes_written.add(stored.bytes);
        if let Some(partition) =
            stored.first.and_then(|block| self.counted_partition(block * BLOCK_BYTES as u64))
        {
            partition.blocks_written.add(stored.blocks);
        }
        stats.live_blocks.add(owned.live + opaque.live);
        if let Some(tensor) = owner {
            tensor.stored.add(owned.bytes);
            tensor.live.add(owned.live);
        }
        stats.opaque_stored.add(opaque.bytes);
        stats.opaque_blocks.add(opaque.live);
    }

    /// Counts a read of a window that gave `bytes`.
    pub(super) fn count_read(&self, window: &Traffic, bytes: u64, tally: &Tally) {
        window.count(bytes, tally);
        self.stats.count_index(tally);
        self.observers.read(tally);
    }
}

/// What blocks were published as.
#[derive(Default)]
struct Sums {
    /// One of them, if there are any: all are of one partition.
    first: Option<u64>,
    blocks: u64,
    zeros: u64,
    bypass: u64,
    bytes: u64,
}

impl Sums {
    fn add(&mut self, block: u64, new: Charge) {
        self.first = Some(block);
        self.blocks += 1;
        self.zeros += u64::from(!new.live);
        self.bypass += u64::from(new.bypass);
        self.bytes += new.bytes;
    }
}

/// By how much the charge of an account changes.
#[derive(Default)]
struct Shift {
    live: i64,
    bytes: i64,
}

impl Shift {
    fn add(&mut self, old: Charge, new: Charge) {
        self.live += i64::from(new.live) - i64::from(old.live);
        self.bytes += new.bytes.cast_signed() - old.bytes.cast_signed();
    }
}
