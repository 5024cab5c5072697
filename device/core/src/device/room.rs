//! Room: what a server needs to know that has write-backs wait for it.
//!
//! The order in which a store fills up, or the host's memory that it is in: events at
//! [`LEVELS`](super::events::LEVELS) and [`MEMORY_LEVELS`](super::events::MEMORY_LEVELS); then what
//! takes more than before finds no room, and a server may have it wait; what is refused in the end
//! is counted and is an event that names it. What is stored is never harmed, can be read, written
//! again in its place, and discarded.

use std::sync::atomic::Ordering;

use super::{Device, DeviceError, Window, events::is_scarce};
use lamina_codec::BLOCK_BYTES;
use lamina_store::{KeptRoom, host_memory::HostMemory, image::Image, memory::UNIT_BYTES};

/// What a file system says of its room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that can be stored, as they are stored.
    pub bytes: u64,
    /// Bytes of those that nothing takes.
    pub free: u64,
    /// Bytes of those for which the host has memory, too.
    pub available: u64,
}

impl Device {
    /// How much room there is.
    pub fn space(&self) -> Space {
        let (bytes, used) = if let Some(store) = self.coded_store() {
            let (held, all) = store.chunks();
            (all.saturating_mul(UNIT_BYTES as u64), held.saturating_mul(UNIT_BYTES as u64))
        } else {
            (self.base_bytes(), self.accounts.stats.live_blocks.get().saturating_mul(BLOCK_BYTES as u64))
        };
        let free = bytes.saturating_sub(used);
        let host = self.host_memory().filter(|host| host.reserve() > 0);
        let left = host.map_or(u64::MAX, |host| host.last().saturating_sub(host.reserve()));
        Space { bytes, free, available: free.min(left) }
    }

    /// As [`Device::write_base`], for what is tried again: `done` says how many bytes of `data` are
    /// stored already, and how many are afterwards, whatever is returned.
    ///
    /// # Errors
    /// As [`Device::write_base`].
    pub fn write_back(&self, offset: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        self.inside(Window::Base, offset, data.len() as u64)?;
        let written = self.write_pieces(offset, data, done);
        self.events.note(&written, self.look());
        written
    }

    /// Keeps what these ranges (offset, length) of whole blocks give back for them, also of a full
    /// store, until what is returned is dropped: nobody else who waits for room takes it. There is
    /// one of these at a time, and who has it is the only one who stores into the ranges. A device
    /// that does not code has room for all it has an address for.
    pub fn keep_room(&self, ranges: &[(u64, u64)]) -> Option<KeptRoom<'_>> {
        let blocks = ranges.iter().map(|(at, length)| {
            let end = at.saturating_add(*length);
            at / BLOCK_BYTES as u64..end.div_ceil(BLOCK_BYTES as u64)
        });
        Some(self.coded_store()?.keep_room(blocks.collect()))
    }

    /// A number that changes whenever there may be room that was not there before, but for what
    /// others than this device gave back to the host.
    pub fn freed(&self) -> u64 {
        let quotas = self.accounts.partition_table.freed.load(Ordering::Acquire);
        self.coded_store().map_or(0, lamina_store::Store::freed).wrapping_add(quotas)
    }

    /// Says that write-backs of so many bytes wait for room from now on, or no more.
    pub fn write_back_waits(&self, bytes: u64, waits: bool) {
        let one = |waits: bool| if waits { (0, 1) } else { (1, 0) };
        let (old, new) = one(waits);
        self.accounts.stats.write_backs_waiting.shift(old, new);
        self.accounts.stats.write_backs_waiting_bytes.shift(old * bytes, new * bytes);
        self.accounts.stats.write_backs_waited.add(new);
    }

    /// Says that a write-back was refused: what was stored at `offset` of the base window is lost.
    pub fn write_back_refused(&self, offset: u64, length: u64, why: &str) {
        let guest = if self.accounts.partition_table.divided {
            self.accounts.partition_table.of_base(offset).name.as_str()
        } else {
            ""
        };
        self.stores_lost(offset..offset.saturating_add(length), length, guest, why);
    }

    /// The same of what was stored at `offset` of a target.
    pub fn write_back_target_refused(&self, target: u32, offset: u64, length: u64, why: &str) {
        let Some(set) = self.set() else { return };
        let end = set.region_of(target, offset.saturating_add(length));
        self.stores_lost(
            set.region_of(target, offset)..end,
            length,
            &format!("interleave target {target}"),
            why,
        );
    }

    /// `bytes` of `range` are lost, which are of `whom`.
    fn stores_lost(&self, range: std::ops::Range<u64>, bytes: u64, whom: &str, why: &str) {
        self.accounts.stats.write_backs_refused.add(1);
        self.accounts.stats.write_backs_refused_bytes.add(bytes);
        self.events.lost(range, bytes, whom, why);
    }

    /// Whether so many bytes more may be copied to wait for room: the host's memory, if that is
    /// what lacks, has little left.
    pub fn can_wait(&self, bytes: u64) -> bool {
        let waiting = self.accounts.stats.write_backs_waiting_bytes.get();
        self.host_memory().is_none_or(|host| host.can_wait(waiting, bytes))
    }

    /// Looks at how full the store is: whether anything may take more than before.
    pub(super) fn look(&self) -> bool {
        let mut room = true;
        if let Some(store) = self.coded_store() {
            let (held, all) = store.chunks();
            self.events.look(held, all);
            self.note_if_due(store);
            room = held < all;
        }
        if let Some(host) = self.host_memory().filter(|host| host.reserve() > 0) {
            self.events.look_at_memory(host.last(), host.reserve());
            if let Some(store) = self.coded_store().filter(|_| is_scarce(host.last(), host.reserve())) {
                store.give_room_back();
            }
            room &= host.last() > host.reserve();
        }
        room
    }

    /// Looks at the host's memory: what is left, if that is known, and the reserve.
    pub(super) fn look_at_memory(&self) -> (Option<u64>, u64) {
        let Some(host) = self.host_memory() else { return (None, 0) };
        let left = host.left();
        self.look();
        (left, host.reserve())
    }

    /// The host's memory, if the device lies in it and was told.
    fn host_memory(&self) -> Option<&HostMemory> {
        self.image().and_then(Image::host_memory)
    }
}

#[cfg(test)]
mod tests {
    use crate::device::{Device, DeviceConfig};
    use lamina_codec::testing::bytes;

    /// A block that takes `granules` of 64 bytes, from 2 to 64.
    fn block(seed: u64, granules: usize) -> Vec<u8> {
        let mut block = bytes(5 * seed, 4096);
        if granules < 64 {
            block[granules * 64 - 40..].fill(0);
        }
        block
    }

    #[test]
    fn a_full_store_can_be_rewritten_whatever_lengths_its_blocks_get() {
        let config = DeviceConfig { store_bytes: Some(34 << 20), ..DeviceConfig::new(64 << 20, 8 << 20) };
        let device = Device::new(config).unwrap();
        let mut lengths = Vec::new();
        while device.write_base(lengths.len() as u64 * 4096, &block(1, 64)).is_ok() {
            lengths.push(64);
        }
        let (held, usable) = device.coded_store().unwrap().chunks();
        let all = device.stats().device.store_capacity_bytes >> 16;
        assert_eq!((held, usable, all), (all - 65, all - 65, 544));
        for round in 0..4_u64 {
            for (at, length) in (0_u64..).zip(&mut lengths) {
                // Every length there is, each no longer than what was there.
                let wanted = 2 + usize::from(bytes(5 * (at * 7 + round + 1), 8)[7]) % (*length - 1);
                *length = if round == 0 { 64 } else { wanted.min(*length) };
                let written = device.write_base(at * 4096, &block(at + round, *length));
                written.unwrap_or_else(|why| panic!("round {round}, block {at}, {length} granules: {why}"));
                // What takes more than before fills up what that leaves, as far as it may.
                if round == 1 && at % 8 == 0 {
                    let _ = device.write_base((8192 + 4096 + at) * 4096, &block(at, 33));
                }
            }
        }
        let mut found = vec![0; 4096];
        for (at, length) in (0..).zip(&lengths) {
            device.read_base(at * 4096, &mut found).unwrap();
            assert!(found == block(at + 3, *length), "block {at}");
        }
    }
}
