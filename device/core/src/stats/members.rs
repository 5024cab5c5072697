//! What each of several devices moved, where one region is interleaved over them.
//!
//! The rules:
//! * Words belong to the device whose granule holds them. What is stored for a block belongs to the
//!   devices that hold its words, in equal parts: a granule smaller than a block leaves each device
//!   as much of it.
//! * A request counts once at each device that holds some of what it asks for or of what is fetched
//!   for it.
//! * Only the rates are *modelled*, from what a device is taken to move in a second, and their
//!   names say so. The busiest device moves that, the others in proportion. The region gives its
//!   host the plain bytes that were read and written in the time that the busiest needs.

use lamina_abi::Interleave;

use crate::{
    counters,
    counters::{Counter, Slot::First, Slots, Tally, ratio},
    figures,
};
use lamina_codec::BLOCK_BYTES;

/// GB/s that a device is taken to move unless told otherwise: what Beluga (SIGMOD 2026, section
/// 5.3) measures of each CXL memory device of its pool.
pub const USUAL_BANDWIDTH: f64 = 22.5;

/// A region interleaved over devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interleaving {
    /// Which of them holds what.
    pub interleave: Interleave,
    /// GB/s that each is taken to move.
    pub bandwidth: f64,
}

/// The devices and what is counted of them.
#[derive(Debug)]
pub(crate) struct Members {
    interleaving: Interleaving,
    all: Vec<Member>,
}

counters! {
    struct Member for Moved {}

    /// One of the devices.
    #[derive(PartialEq)]
    pub struct MemberReport by report {
        reported {
            /// Its number, from 0.
            device: u32 = |_, given| given.device;
        }
        counted {
            /// Read requests for which a device was asked.
            reads: Counter at First(0) => reads "interleaved_reads" Count;
            /// Bytes it would have fetched for them without compression or planes, in whole lines.
            plain_fetched: Counter at First(1) => plain_bytes_fetched "interleaved_plain_fetched" Bytes;
            /// Stored bytes it fetched.
            stored_fetched: Counter at First(2) => stored_bytes_fetched "interleaved_stored_fetched" Bytes;
            /// Write requests for which it was asked.
            writes: Counter at First(3) => writes "interleaved_writes" Count;
            /// Bytes of those write requests.
            written: Counter at First(4) => written_bytes "interleaved_written" Bytes;
            /// Bytes it stored for them.
            stored_written: Counter at First(5) => stored_bytes_written "interleaved_stored_written" Bytes;
        }
        computed {
            /// Modelled: GB/s that it would move while the busiest device moves all it can; null
            /// while nothing was moved.
            modelled_gbs: Option<f64> = Gauge "modelled_interleaved" Rate, |it, given| given.rate(it.moved());
        }
    }
}

figures! {
    /// A region interleaved over devices.
    #[derive(PartialEq)]
    pub struct InterleaveReport {
        reported {
            /// `software`, in chunks of 2 MiB, or `hardware`, a CXL interleave set.
            by: &'static str;
            /// Each device.
            devices: Vec<MemberReport>;
        }
        figures {
            /// Devices that the region is interleaved over.
            ways: u32 = Gauge "interleave_ways" Count;
            /// Bytes of a granule.
            granule_bytes: u64 = Gauge "interleave_granule" Bytes;
            /// Bytes that the busiest device moved, fetched and stored, over the mean of all; null
            /// while nothing was moved.
            imbalance: Option<f64> = Gauge "interleave_imbalance" Ratio;
            /// Modelled: GB/s that a device is taken to move.
            modelled_device_gbs: f64 = Gauge "modelled_device" Rate;
            /// Modelled: GB/s of plain bytes that the region would give while its busiest device
            /// moves that; null while nothing was moved.
            modelled_region_gbs: Option<f64> = Gauge "modelled_region" Rate;
        }
    }
}

/// What a device's rate is modelled by.
struct Moved {
    device: u32,
    /// Bytes that the busiest device moved.
    busiest: u64,
    /// GB/s that it is taken to move.
    bandwidth: f64,
}

impl Moved {
    #[expect(clippy::cast_precision_loss, reason = "figures to be looked at; exact to 2^53 bytes")]
    fn rate(&self, bytes: u64) -> Option<f64> {
        (self.busiest > 0).then(|| self.bandwidth * bytes as f64 / self.busiest as f64)
    }
}

impl Member {
    /// Bytes that it fetched and stored.
    fn moved(&self) -> u64 {
        self.stored_fetched.get() + self.stored_written.get()
    }

    fn count_write(&self, bytes: u64) {
        self.writes.add(u64::from(bytes > 0));
        self.written.add(bytes);
    }
}

impl Members {
    pub(crate) fn new(interleaving: Interleaving) -> Self {
        let all = (0..interleaving.interleave.ways()).map(|_| Member::default()).collect();
        Self { interleaving, all }
    }

    /// Their counters, in an order that images keep.
    pub(crate) fn counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        self.all.iter_mut().flat_map(Slots::counters)
    }

    /// Adds the words that `length` bytes from `inside` of `block` on touch, in lines of 64 bytes.
    pub(crate) fn add_plain(&self, block: u64, inside: usize, length: usize, tally: &mut Tally) {
        if length == 0 {
            return;
        }
        let begin = block * BLOCK_BYTES as u64;
        let start = begin + (inside / 64 * 64) as u64;
        let end = begin + (inside + length).next_multiple_of(64) as u64;
        for (target, share) in (0..).zip(&mut tally.plain_of[..self.all.len()]) {
            let part = self.interleaving.interleave.target_range(target, &(start..end));
            *share += part.end - part.start;
        }
    }

    /// Adds what was fetched of the bytes that are stored for `block`.
    pub(crate) fn add_stored(&self, block: u64, bytes: u64, tally: &mut Tally) {
        self.share(block, bytes, |target, part| tally.stored_of[target] += part);
    }

    /// Counts a read request.
    pub(crate) fn count_read(&self, tally: &Tally) {
        for (target, member) in self.all.iter().enumerate() {
            let (plain, stored) = (tally.plain_of[target], tally.stored_of[target]);
            member.reads.add(u64::from(plain + stored > 0));
            member.plain_fetched.add(plain);
            member.stored_fetched.add(stored);
        }
    }

    /// Counts a write request for these bytes of the region.
    pub(crate) fn count_write(&self, region: &std::ops::Range<u64>) {
        for (target, member) in (0..).zip(&self.all) {
            let part = self.interleaving.interleave.target_range(target, region);
            member.count_write(part.end - part.start);
        }
    }

    /// Counts a write request for so many bytes of one target.
    pub(crate) fn count_target_write(&self, target: u32, bytes: u64) {
        if let Some(member) = self.all.get(target as usize) {
            member.count_write(bytes);
        }
    }

    /// Counts what was stored for `block`.
    pub(crate) fn count_stored(&self, block: u64, bytes: u64) {
        self.share(block, bytes, |target, part| self.all[target].stored_written.add(part));
    }

    /// Gives each device that holds words of `block` its part of `bytes`, a multiple of 64.
    fn share(&self, block: u64, bytes: u64, mut give: impl FnMut(usize, u64)) {
        let interleave = self.interleaving.interleave;
        let begin = block * BLOCK_BYTES as u64;
        // Granules and ways are powers of two where a block has more than one granule, so all parts
        // are equal.
        let targets = (BLOCK_BYTES as u64 / interleave.granule()).clamp(1, u64::from(interleave.ways()));
        for granule in 0..targets {
            give(interleave.target_of(begin + granule * interleave.granule()) as usize, bytes / targets);
        }
    }

    pub(crate) fn report(&self) -> InterleaveReport {
        let Interleaving { interleave, bandwidth } = self.interleaving;
        let moved = self.all.iter().map(Member::moved);
        let (busiest, sum) = (moved.clone().max().unwrap_or(0), moved.sum());
        let given = |device| Moved { device, busiest, bandwidth };
        let plain = self.all.iter().map(|member| member.plain_fetched.get() + member.written.get()).sum();
        InterleaveReport {
            by: if interleave.is_set() { "hardware" } else { "software" },
            ways: interleave.ways(),
            granule_bytes: interleave.granule(),
            imbalance: ratio(busiest * self.all.len() as u64, sum),
            modelled_device_gbs: bandwidth,
            modelled_region_gbs: given(0).rate(plain),
            devices: (0..).zip(&self.all).map(|(device, member)| member.report(&given(device))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::MAX_MEMBERS;

    fn members(interleave: Interleave) -> Members {
        Members::new(Interleaving { interleave, bandwidth: 10.0 })
    }

    #[test]
    fn a_block_belongs_to_those_who_hold_its_words() {
        for (set, block, holders) in [
            ("2x256", 5, &[0, 1][..]),
            ("4x1K", 5, &[0, 1, 2, 3]),
            ("4x2K", 0, &[0, 1]),
            ("4x2K", 1, &[2, 3]),
            ("2x4K", 5, &[1]),
            ("4x4K", 6, &[2]),
            ("2x8K", 1, &[0]),
            ("2x8K", 2, &[1]),
        ] {
            let members = members(set.parse().unwrap());
            let mut tally = Tally::default();
            members.add_stored(block, 640, &mut tally);
            let held: Vec<_> = (0..MAX_MEMBERS).filter(|target| tally.stored_of[*target] > 0).collect();
            assert_eq!((held.as_slice(), tally.stored_of.iter().sum()), (holders, 640_u64), "{set} {block}");
            assert!(holders.iter().all(|target| tally.stored_of[*target] == 640 / holders.len() as u64));
        }
        let chunks = members(Interleave::chunks(3).unwrap());
        let mut tally = Tally::default();
        chunks.add_stored(511, 64, &mut tally);
        chunks.add_stored(512, 128, &mut tally);
        chunks.add_stored(3 * 512, 256, &mut tally);
        assert_eq!(tally.stored_of[..3], [320, 128, 0]);
    }

    #[test]
    fn words_are_counted_in_lines_where_they_lie() {
        let members = members("2x256".parse().unwrap());
        let mut tally = Tally::default();
        members.add_plain(1, 250, 10, &mut tally);
        members.add_plain(1, 4095, 1, &mut tally);
        members.add_plain(1, 300, 0, &mut tally);
        assert_eq!(tally.plain_of[..2], [64, 64 + 64]);
    }

    #[test]
    fn the_model_is_bound_by_the_busiest() {
        let members = members(Interleave::chunks(2).unwrap());
        let none = members.report();
        assert_eq!((none.imbalance, none.modelled_region_gbs), (None, None));
        let mut tally = Tally::default();
        members.add_plain(0, 0, 4096, &mut tally);
        members.add_plain(512, 0, 4096, &mut tally);
        members.add_stored(0, 3072, &mut tally);
        members.add_stored(512, 1024, &mut tally);
        members.count_read(&tally);
        members.count_write(&((2 << 20)..(2 << 20) + 4096));
        members.count_stored(512, 512);
        let reported = members.report();
        assert_eq!((reported.by, reported.ways, reported.granule_bytes), ("software", 2, 2 << 20));
        assert_eq!(
            reported.devices.iter().map(|each| (each.reads, each.writes)).collect::<Vec<_>>(),
            [(1, 0), (1, 1)]
        );
        // 3072 and 1536 bytes were moved for 12 KiB.
        assert_eq!(reported.imbalance, Some(3072.0 / 2304.0));
        assert_eq!(
            reported.devices.iter().map(|each| each.modelled_gbs).collect::<Vec<_>>(),
            [Some(10.0), Some(5.0)]
        );
        assert_eq!(reported.modelled_region_gbs, Some(40.0));
    }
}
