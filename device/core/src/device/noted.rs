//! The accounts as they are noted for the next process, which then need not look at all entries.
//!
//! They are those gauges that follow from the entries and from who owns their blocks, in a fixed
//! order: the device's, each partition's, and each tensor's with where it lies. So they are of use
//! to a process that finds the same tensors. None are noted while a tensor is being made or
//! removed.

use std::{
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use super::{Device, accounts::Accounts, charge::Charge};
use crate::{
    partition_table::PartitionTable,
    stats::{Gauge, Stats},
    window::Map,
};
use lamina_codec::BLOCK_BYTES;
use lamina_store::{Changed, Store};

/// How long somebody who stores waits to note accounts, and how long it is not tried again then.
const PAUSE: Duration = Duration::from_millis(2);
/// Words for each tensor: where it lies, its bytes, what it is charged, its blocks that hold data.
/// Programs before had no fourth, and what they noted fits no tensors: all entries are looked at.
const OF_TENSOR: usize = 4;

/// Whether noted accounts are of these tensors.
pub(super) fn fit(noted: &[u64], stats: &Stats, partition_table: &PartitionTable, map: &Map) -> bool {
    let own = stats.of_entries().count() + partition_table.partitions.len();
    let Some((_, of_tensors)) = noted.split_at_checked(own) else { return false };
    let (of_tensors, rest) = of_tensors.as_chunks::<OF_TENSOR>();
    let noted = of_tensors.iter().map(|[dpa, length, ..]| (*dpa, *length));
    rest.is_empty() && noted.eq(map.tensors().map(|tensor| (tensor.info.dpa, tensor.info.length)))
}

impl Accounts {
    /// What is to be noted, while nobody changes a block.
    fn to_note(&self, map: &Map) -> Option<Vec<u64>> {
        if !map.tensors().all(|tensor| map.is_listed(tensor) && tensor.transition.is_standing()) {
            return None;
        }
        let own = self.stats.of_entries().map(Gauge::get);
        let partitions =
            self.partition_table.partitions.iter().map(|partition| partition.stored.load(Relaxed));
        let tensors = map.tensors().flat_map(|t| [t.info.dpa, t.info.length, t.stored.get(), t.live.get()]);
        Some(own.chain(partitions).chain(tensors).collect())
    }

    /// Goes on from what was noted, and from what became of blocks since.
    pub(super) fn go_on(&self, map: &Map, noted: &[u64], changed: &[Changed]) {
        let mut noted = noted.iter().copied();
        for (gauge, count) in self.stats.of_entries().zip(&mut noted) {
            gauge.shift(0, count);
        }
        for (partition, stored) in self.partition_table.partitions.iter().zip(&mut noted) {
            partition.stored.store(stored, Relaxed);
        }
        let of_tensors: Vec<u64> = noted.collect();
        for (tensor, [.., stored, live]) in map.tensors().zip(of_tensors.as_chunks::<OF_TENSOR>().0) {
            tensor.stored.shift(0, *stored);
            tensor.live.shift(0, *live);
        }
        for Changed { block, old, new } in changed {
            self.stats.recount(old, new);
            let (old, new) = (Charge::of(old), Charge::of(new));
            let owner = map.tensor_at(block * BLOCK_BYTES as u64);
            self.charge(owner.map(Arc::as_ref), *block, old, new);
            self.give_back(*block, new.bytes, old.bytes);
        }
    }
}

/// When accounts were noted last.
pub(super) struct LastNoted {
    /// The map they were of.
    map: Weak<Map>,
    tried: Instant,
}

impl Default for LastNoted {
    fn default() -> Self {
        Self { map: Weak::new(), tried: Instant::now() }
    }
}

impl Device {
    /// Notes what is counted for the next process, unless it would find the same already. Nobody
    /// changes a block meanwhile, for about a microsecond for each hundred tensors.
    pub fn note_accounts(&self) {
        let Some(store) = self.coded_store() else { return };
        let mut last = self.noted.lock();
        if !store.has_accounts() || !std::ptr::eq(last.map.as_ptr(), Arc::as_ptr(&self.map())) {
            self.note(store, &self.map.write(), &mut last);
        }
    }

    /// Notes them if the log of what changed since is long, unless somebody is at it, or tried a
    /// moment ago.
    pub(super) fn note_if_due(&self, store: &Store) {
        if !store.wants_accounts() {
            return;
        }
        let Some(mut last) = self.noted.try_lock().filter(|last| last.tried.elapsed() > PAUSE) else {
            return;
        };
        last.tried = Instant::now();
        if let Some(map) = self.map.try_write_for(PAUSE) {
            self.note(store, &map, &mut last);
        }
    }

    fn note(&self, store: &Store, map: &Arc<Map>, last: &mut LastNoted) {
        if let Some(accounts) = self.accounts.to_note(map) {
            store.keep_accounts(&accounts);
            last.map = Arc::downgrade(map);
        }
    }
}
