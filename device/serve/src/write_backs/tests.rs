//! Write-backs on a device that nobody mounts: who waits, what wakes it, and what a discard leaves
//! of it.

use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use super::*;
use crate::dropped_pages::LetGo;
use lamina_device::device::{Device, DeviceConfig, PartitionConfig, events::Kind};

const PAGE: usize = 4096;
const LONG: Duration = Duration::from_secs(3600);

/// A device that is full, its write-backs, and what they answer.
struct Rig {
    device: Arc<Device>,
    write_backs: Arc<WriteBacks>,
    answers: Receiver<(u64, Answer)>,
    retrying: Option<JoinHandle<()>>,
    /// Pages that are stored: noise of their number.
    filled: u64,
}

/// Noise: pages that all take the same room.
fn page(seed: u64) -> Vec<u8> {
    lamina_codec::testing::bytes(5 * (seed + 1), PAGE)
}

impl Rig {
    fn new(config: DeviceConfig, max_wait: Duration, most_bytes: usize) -> Self {
        Self::of(ExportFile::Base, config, max_wait, most_bytes)
    }

    fn of(which: ExportFile, config: DeviceConfig, max_wait: Duration, most_bytes: usize) -> Self {
        let device = Arc::new(Device::new(config).unwrap());
        let partition = Partition::first(Arc::clone(&device));
        let mut filled = 0;
        while partition.write_base(filled * PAGE as u64, &page(filled)).is_ok() {
            filled += 1;
        }
        let gate = Arc::default();
        let write_backs =
            Arc::new(WriteBacks { most_bytes, ..WriteBacks::new(partition, which, max_wait, gate) });
        let (answer, answers) = channel();
        let retrying = Arc::clone(&write_backs);
        let retrying = std::thread::spawn(move || {
            retrying
                .retry_until_closed(|_| {}, |asker, reported| answer.send((asker.unique, reported)).unwrap());
        });
        Self { device, write_backs, answers, retrying: Some(retrying), filled }
    }

    fn full(max_wait: Duration) -> Self {
        let config = DeviceConfig { store_bytes: Some(4 << 20), ..DeviceConfig::new(64 << 20, 8 << 20) };
        Self::new(config, max_wait, MAX_BYTES)
    }

    fn take(&self, unique: u64, page_number: u64, mut bytes: Vec<u8>) -> Option<Answer> {
        let asker = Asker { channel: 0, unique };
        self.write_backs.take(asker, page_number * PAGE as u64, &mut bytes, |_| {})
    }

    /// Marks pages as discarded, as they are in the device when nobody else is let in.
    fn drop_pages(&self, pages: Range<u64>) {
        let range = pages.start * PAGE as u64..pages.end * PAGE as u64;
        let alone = self.write_backs.gate.write();
        if self.write_backs.target.is_none() {
            self.device.discard(range.start, range.end - range.start).unwrap();
        }
        self.write_backs.dropped.mark(&range, LetGo::Requested);
        drop(alone);
        self.write_backs.take_out_dropped();
    }

    fn answered(&self) -> (u64, Answer) {
        self.answers.recv_timeout(Duration::from_secs(60)).expect("an answer")
    }

    fn read(&self, page_number: u64) -> Vec<u8> {
        let mut out = vec![0; PAGE];
        self.device.read_base(page_number * PAGE as u64, &mut out).unwrap();
        out
    }

    fn counts(&self) -> (u64, u64, u64) {
        let report = self.device.stats().write_backs;
        (report.waiting, report.waited, report.refused)
    }

    fn intact(&self, pages: Range<u64>) {
        pages.for_each(|at| assert!(self.read(at) == page(at), "page {at}"));
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.write_backs.close();
        let ended = self.retrying.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

#[test]
fn what_finds_no_room_waits_until_something_is_freed() {
    let rig = Rig::full(LONG);
    let free = rig.filled + 1;
    // Six pages in one request: some of them may find room, and are not stored twice.
    let many: Vec<u8> = (0..6).flat_map(|at| page(1000 + at)).collect();
    assert_eq!(rig.take(1, free, many.clone()), None);
    assert_eq!(rig.counts(), (1, 1, 0));
    assert_eq!(rig.take(2, 0, page(0)), Some(Ok(4096)), "a page in place of itself goes through");
    assert_eq!(rig.take(3, rig.filled + 100, vec![0; PAGE]), Some(Ok(4096)), "and so do zeros");
    rig.device.discard(64 * PAGE as u64, 64 * PAGE as u64).unwrap();
    assert_eq!(rig.answered(), (1, Ok(6 * 4096)));
    assert_eq!(rig.counts(), (0, 1, 0));
    assert!((0..6).flat_map(|at| rig.read(free + at)).eq(many));
    rig.intact(0..64);
    rig.intact(128..rig.filled);
}

#[test]
fn what_waited_too_long_or_may_not_wait_is_refused_and_told() {
    let rig = Rig::full(Duration::from_millis(1));
    let at = rig.filled + 1;
    let began = Instant::now();
    assert_eq!(rig.take(1, at, page(1)), None);
    assert_eq!(rig.answered(), (1, Err(libc::ENOSPC)));
    assert!(began.elapsed() >= Duration::from_millis(1));
    assert_eq!(rig.counts(), (0, 1, 1));
    let event = rig.device.events().pop().unwrap();
    assert_eq!(event.kind, Kind::StoresLost);
    assert!(
        event.text.contains(&format!("4096 bytes that were stored at DPA {:#x}", at * 4096)),
        "{event:?}"
    );
    rig.intact(0..rig.filled);
    drop(rig);

    let rig = Rig::full(Duration::ZERO);
    assert_eq!(rig.take(1, rig.filled + 1, page(1)), Some(Err(libc::ENOSPC)));
    assert_eq!(rig.counts(), (0, 0, 1));
    drop(rig);

    let rig = Rig::full(LONG);
    assert_eq!(rig.take(1, rig.filled + 1, page(1)), None);
    rig.write_backs.hurry();
    assert_eq!(rig.answered(), (1, Err(libc::ENOSPC)));
    assert_eq!(rig.take(2, rig.filled + 1, page(1)), Some(Err(libc::ENOSPC)));
    assert_eq!(rig.counts(), (0, 1, 2));
}

#[test]
fn no_more_wait_than_may() {
    let config = DeviceConfig { store_bytes: Some(4 << 20), ..DeviceConfig::new(64 << 20, 8 << 20) };
    let rig = Rig::new(config, LONG, 2 * PAGE);
    let at = rig.filled + 1;
    assert_eq!(rig.take(1, at, [page(1), page(2)].concat()), None);
    assert_eq!(rig.take(2, at + 2, page(3)), Some(Err(libc::ENOSPC)));
    rig.device.discard(0, 8 * PAGE as u64).unwrap();
    assert_eq!(rig.answered(), (1, Ok(8192)));
    assert_eq!(rig.counts(), (0, 1, 1));
}

#[test]
fn a_discard_takes_its_bytes_out_and_waits_for_no_room() {
    let rig = Rig::full(LONG);
    let at = rig.filled + 1;
    let both = [page(1), page(2)].concat();
    assert_eq!(rig.take(1, at, both.clone()), None);
    assert_eq!(rig.take(2, at + 2, page(3)), None);
    // The second is discarded whole; of the first, the second page further down.
    rig.drop_pages(at + 2..at + 3);
    assert_eq!(rig.answered(), (2, Ok(4096)));
    // What the kernel still has of it is dropped too.
    assert_eq!(rig.take(3, at + 2, page(4)), Some(Ok(4096)));
    assert!(rig.read(at + 2).iter().all(|byte| *byte == 0));
    // Not so what is stored into the page once it was read again, though the discard is not over.
    rig.write_backs.dropped.read(&((at + 2) * PAGE as u64..(at + 2) * PAGE as u64 + 1));
    assert_eq!(rig.take(4, at + 2, page(5)), None, "it is stored again, and waits");
    rig.drop_pages(at + 1..at + 2);
    rig.device.discard(0, 64 * PAGE as u64).unwrap();
    let mut answers = [rig.answered(), rig.answered()];
    answers.sort_by_key(|answer| answer.0);
    assert_eq!(answers, [(1, Ok(8192)), (4, Ok(4096))]);
    assert!(rig.read(at) == page(1) && rig.read(at + 1).iter().all(|byte| *byte == 0));
    assert!(rig.read(at + 2) == page(5));
}

#[test]
fn what_finds_no_room_in_a_quota_waits_for_that_partition() {
    let part = |name: &str, quota_bytes| PartitionConfig {
        name: name.to_owned(),
        base_bytes: 4 << 20,
        views_bytes: 8 << 20,
        quota_bytes,
    };
    let config = DeviceConfig::divided(vec![part("small", Some(256 << 10)), part("other", None)]);
    let rig = Rig::new(config, LONG, MAX_BYTES);
    assert_eq!(rig.take(1, rig.filled, page(1)), None);
    let other = Partition::named(&rig.device, "other").unwrap();
    other.write_base(0, &page(9)).unwrap();
    other.discard(0, PAGE as u64).unwrap();
    Partition::first(Arc::clone(&rig.device)).discard(0, PAGE as u64).unwrap();
    assert_eq!(rig.answered(), (1, Ok(4096)));
    assert!(rig.read(rig.filled) == page(1));
}

#[test]
fn what_finds_no_room_by_a_target_waits_too_and_what_is_lost_of_it_is_told() {
    let full = |max_wait| {
        let interleaving =
            Some(lamina_device::stats::Interleaving { interleave: "2x256".parse().unwrap(), bandwidth: 1.0 });
        let config = DeviceConfig::new(64 << 20, 8 << 20);
        let config = DeviceConfig { store_bytes: Some(4 << 20), interleaving, ..config };
        Rig::of(ExportFile::Target(1), config, max_wait, MAX_BYTES)
    };
    let rig = full(LONG);
    // A page of a target lies in two blocks.
    let at = rig.filled / 2 + 1;
    let many: Vec<u8> = (0..6).flat_map(|at| page(1000 + at)).collect();
    assert_eq!(rig.take(1, at, many.clone()), None);
    assert_eq!(rig.counts(), (1, 1, 0));
    rig.drop_pages(at + 5..at + 6);
    rig.device.discard(0, 64 * PAGE as u64).unwrap();
    assert_eq!(rig.answered(), (1, Ok(6 * 4096)));
    let mut found = vec![0; 6 * PAGE];
    rig.device.read_target(1, at * PAGE as u64, &mut found).unwrap();
    assert!(found[..5 * PAGE] == many[..5 * PAGE] && found[5 * PAGE..].iter().all(|byte| *byte == 0));
    rig.intact(64..rig.filled);
    drop(rig);

    let rig = full(Duration::ZERO);
    for unique in 0..2 {
        assert_eq!(rig.take(unique, rig.filled / 2 + 1 + unique, page(1)), Some(Err(libc::ENOSPC)));
    }
    let event = rig.device.events().pop().unwrap();
    let dpa = (rig.filled / 2 + 1) * 2 * PAGE as u64 + 256;
    let reported = format!("8192 bytes of interleave target 1 that were stored at DPA {dpa:#x} are lost");
    assert!(event.kind == Kind::StoresLost && event.text.contains(&reported), "{event:?}");
    assert_eq!(rig.counts(), (0, 0, 2));
}

#[test]
fn a_part_that_was_discarded_is_taken_out_and_the_rest_stored() {
    let rig = Rig::full(LONG);
    rig.device.discard(0, 64 * PAGE as u64).unwrap();
    rig.write_backs.dropped.mark(&(100..PAGE as u64 + 200), LetGo::Requested);
    let many: Vec<u8> = (0..3).flat_map(page).collect();
    assert_eq!(rig.take(1, 0, many.clone()), Some(Ok(3 * 4096)));
    let mut expected = many;
    expected[100..PAGE + 200].fill(0);
    assert!((0..3).flat_map(|at| rig.read(at)).eq(expected));
}

#[test]
fn pages_between_discarded_ones_are_stored() {
    let rig = Rig::full(LONG);
    rig.device.discard(0, 64 * PAGE as u64).unwrap();
    for gone in [0..1, 3..5, 7..8] {
        rig.drop_pages(gone);
    }
    let many: Vec<u8> = (0..8).flat_map(|at| page(at + 1)).collect();
    assert_eq!(rig.take(1, 0, many), Some(Ok(8 * 4096)));
    for at in 0..8 {
        let expected = if [1, 2, 5, 6].contains(&at) { page(at + 1) } else { vec![0; PAGE] };
        assert!(rig.read(at) == expected, "page {at}");
    }
}
