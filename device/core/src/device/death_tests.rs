//! Workers that are killed: the next one goes on by what they noted, counts as if it had looked at
//! all entries, and frees nothing that a checkpoint names.

use std::{
    collections::BTreeSet,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    image_tests::{
        BLOCK, BLOCKS, again, agree, bytes, config, file_of, new_image, open_as, open_of, read_all, stored,
        weights, with_tensors,
    },
    *,
};
use lamina_codec::format::Format;
use lamina_store::{
    StoreError, Worker,
    failpoints::{Failpoints, Killed, Pages, pages},
    host_memory::HostMemory,
};

/// Where an image lies that workers serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lies {
    InMemory,
    /// As if on a disk: with checkpoints, and its ledger apart.
    AsOnDisk,
    /// In a file.
    InFile,
}

pub(super) const ANYWHERE: [Lies; 3] = [Lies::InMemory, Lies::AsOnDisk, Lies::InFile];

impl Lies {
    /// How many stores apart workers are killed. Files take their time.
    const fn step(self) -> usize {
        if matches!(self, Self::InFile) { 19 } else { 1 }
    }
}

/// An image that workers serve, one after another.
pub(super) struct Served {
    pub(super) failpoints: Failpoints,
    image: Image,
    ledger: Option<std::fs::File>,
}

impl Served {
    pub(super) fn new(lies: Lies) -> Self {
        let failpoints = Failpoints::none();
        failpoints.make_current();
        let folder = tempfile::tempdir().unwrap();
        let superblock = config().superblock();
        let image = match lies {
            Lies::InMemory => Image::in_memory(superblock).unwrap(),
            Lies::AsOnDisk => Image::in_memory(superblock).unwrap().on_disk(),
            Lies::InFile => Image::create(&folder.path().join("image"), superblock).unwrap().on_disk(),
        };
        let ledger = (lies != Lies::InMemory).then(|| Image::new_ledger().unwrap());
        if ledger.is_some() {
            failpoints.set_synced(Pages::new());
        }
        Self { failpoints, image: with_tensors(image), ledger }
    }

    /// The image as a process finds it that opens it.
    fn image(&self) -> Image {
        match &self.ledger {
            Some(ledger) => {
                again(&self.image).beside(ledger.try_clone().unwrap(), HostMemory::of_this_host(Some(0)))
            }
            None => self.image.clone(),
        }
    }

    /// The device as this worker of a holder finds it.
    pub(super) fn open_as(&self, number: u64) -> Device {
        open_as(&self.image(), number)
    }

    /// The device as somebody finds it who looks at all entries.
    pub(super) fn look(&self) -> Device {
        Device::open(self.image(), &config()).unwrap()
    }

    /// Opens it as this worker, which is killed at store number `stores`: whether it was.
    fn is_killed_opening(&self, number: u64, stores: i64) -> bool {
        self.failpoints.kill_after(stores);
        let opened = catch_unwind(AssertUnwindSafe(|| self.open_as(number)));
        self.failpoints.kill_after(i64::MAX);
        match opened {
            Ok(_) => false,
            Err(why) => {
                assert!(why.is::<Killed>(), "it died of something else");
                true
            }
        }
    }
}

/// All that is stored can be given back, so every segment is somebody's, held or free.
pub(super) fn can_be_emptied(device: &Device) {
    device.discard(0, device.base_bytes()).unwrap();
    device.flush(0, device.base_bytes()).unwrap();
    device.sync().unwrap();
    assert_eq!((device.blocks.used_bytes(), device.coded_store().unwrap().held_segments()), (0, Vec::new()));
}

/// Whatever a checkpoint names that a crash of the host may leave is in use or held: the last one
/// that is on the disk, and the last one.
pub(super) fn keeps_what_checkpoints_name(device: &Device, failpoints: &Failpoints) {
    let image = device.image().unwrap();
    let parts = image.parts();
    let is = pages(image.file());
    let segments = |part: &Range<u64>| {
        let bytes = is.range(part.start / 4096..part.end.div_ceil(4096)).flat_map(|(_, bytes)| bytes);
        let entries: Vec<u8> = bytes.copied().collect();
        let named = entries.as_chunks().0.iter().filter_map(|entry| {
            let place = Entry::decode(image.superblock().version, entry).ok()?.place?;
            let granules = place.stored.bytes().div_ceil(64);
            (granules > 0).then_some((usize::try_from(place.segment).unwrap(), granules))
        });
        named.collect::<BTreeSet<_>>()
    };
    let mut kept = segments(&parts[6]);
    kept.extend(device.coded_store().unwrap().held_segments());
    for pages in [&is, &failpoints.last_synced()] {
        // A header is magic, check of what follows, number and more; one cut short is none.
        let number = |page: &Vec<u8>| {
            let word = |at: usize| u64::from_le_bytes(*page[at..].first_chunk().unwrap());
            let checks = word(8) == u64::from(crc32c::crc32c(&page[16..48]));
            (page.starts_with(b"LAMCHECK") && checks).then(|| word(16))
        };
        let copies = [3, 4].map(|page| pages.get(&page).and_then(number));
        let last = usize::from(copies[1] > copies[0]);
        if copies[last].is_some() {
            let lacking: Vec<_> = segments(&parts[11 + last]).difference(&kept).copied().collect();
            assert_eq!(lacking, [], "a checkpoint names segments that are free");
        }
    }
}

fn was_noted(device: &Device) -> bool {
    device.coded_store().unwrap().was_noted()
}

/// What a device says of what it holds.
fn reported(device: &Device) -> ((serde_json::Value, Vec<u64>, u64), Vec<u64>) {
    (stored(device), device.poison().iter().map(|poisoned| poisoned.dpa).collect())
}

#[test]
fn the_worker_after_a_kill_at_any_store_counts_as_if_it_had_looked_at_all_entries() {
    ANYWHERE.into_iter().for_each(kill_at_any_store);
}

fn kill_at_any_store(lies: Lies) {
    let at = |block: usize| (block * BLOCK) as u64;
    let work = |device: &Device| -> Result<(), DeviceError> {
        device.write_base(at(1), &bytes(6, 3 * BLOCK))?;
        device.write_base(at(2), &bytes(5, BLOCK))?;
        device.discard(at(0), 2 * BLOCK as u64)?;
        device.write_base(at(BLOCKS / 2), &bytes(7, 4 * BLOCK))?;
        device.flush(0, device.base_bytes())?;
        device.inject_poison(at(BLOCKS / 2 + 1), 1)?;
        device.inject_poison(at(BLOCKS - 2), 1)?;
        device.clear_poison(at(3), at(2))?;
        device.note_accounts();
        device.write_base(at(BLOCKS - 2), &bytes(10, 2 * BLOCK))?;
        // Lets go of what was replaced before, and the last of it is replaced again.
        device.sync().unwrap();
        device.write_base(at(BLOCKS - 2), &bytes(11, 2 * BLOCK))?;
        device.discard(at(BLOCKS / 2), at(4))
    };
    let mut kills = 0;
    for stores in (1..).step_by(lies.step()) {
        let served = Served::new(lies);
        let failpoints = &served.failpoints;
        let device = served.open_as(0);
        assert!(!was_noted(&device));
        device.write_base(0, &bytes(2, BLOCKS / 2 * BLOCK)).unwrap();
        device.sync().unwrap();
        device.write_base(at(5), &bytes(3, 4 * BLOCK)).unwrap();
        device.inject_poison(at(3), 1).unwrap();
        device.note_accounts();
        device.write_base(at(BLOCKS - 6), &bytes(3, 3 * BLOCK)).unwrap();
        failpoints.kill_after(stores);
        let done = catch_unwind(AssertUnwindSafe(|| work(&device)));
        failpoints.kill_after(i64::MAX);
        if let Err(why) = &done {
            assert!(why.is::<Killed>(), "it died of something else");
            kills += 1;
        }
        // Not forgotten, which leaves mappings: a process has only so many. What ends its values
        // stores nothing.
        drop(device);
        let next = served.open_as(1);
        assert!(was_noted(&next), "all entries are looked at after a kill at store {stores}");
        assert_eq!(reported(&next), reported(&served.look()), "{lies:?}: a kill at store {stores}");
        keeps_what_checkpoints_name(&next, failpoints);
        can_be_emptied(&next);
        if let Ok(done) = done {
            done.unwrap();
            break;
        }
    }
    assert!(kills * lies.step() > 100, "{kills} kills");
}

#[test]
fn two_workers_that_are_killed_as_they_take_over_change_nothing() {
    ANYWHERE.into_iter().for_each(kill_twice_taking_over);
}

fn kill_twice_taking_over(lies: Lies) {
    let left_by_a_kill = || {
        let served = Served::new(lies);
        let failpoints = &served.failpoints;
        let device = served.open_as(0);
        device.write_base(0, &bytes(2, 8 * BLOCK)).unwrap();
        device.sync().unwrap();
        // Holds what a checkpoint names, and what the log does not.
        device.write_base(6 * BLOCK as u64, &bytes(3, 2 * BLOCK)).unwrap();
        device.note_accounts();
        device.write_base(0, &bytes(1, 2 * BLOCK)).unwrap();
        // Killed before what it replaced is held.
        failpoints.kill_after(18);
        let write = || device.write_base((4 * BLOCK) as u64, &bytes(6, 6 * BLOCK)).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(write)).is_err());
        failpoints.kill_after(i64::MAX);
        drop(device);
        served
    };
    let is_killed = |stores: i64| left_by_a_kill().is_killed_opening(1, stores);
    let mut most = 1;
    while is_killed(2 * most) {
        most *= 2;
    }
    let all = (most..2 * most).collect::<Vec<_>>().partition_point(|stores| is_killed(*stores));
    let all = most + i64::try_from(all).unwrap();
    // Before these it makes the journal empty, record by record.
    for first in ((all - 100).max(1)..all).step_by(lies.step()) {
        for second in [first - 2, first - 1, first, first + 1] {
            let served = left_by_a_kill();
            assert!(served.is_killed_opening(1, first));
            served.is_killed_opening(2, second);
            let device = served.open_as(3);
            assert_eq!(reported(&device), reported(&served.look()), "killed at {first}, then at {second}");
            keeps_what_checkpoints_name(&device, &served.failpoints);
            can_be_emptied(&device);
        }
    }
}

#[test]
fn a_worker_that_is_killed_before_it_knows_what_there_is_leaves_that_to_the_next() {
    let kills = |lies: Lies| (1..40).step_by(lies.step()).map(move |stores| (lies, stores));
    for (lies, stores) in ANYWHERE.into_iter().flat_map(kills) {
        let served = Served::new(lies);
        let device = served.look();
        device.write_base(0, &bytes(2, 8 * BLOCK)).unwrap();
        drop(device);
        assert!(served.is_killed_opening(0, stores));
        let device = served.open_as(1);
        assert_eq!(device.blocks.touched(0..8), Some(0..8), "a kill at store {stores}");
        assert_eq!(stored(&device), stored(&served.look()));
    }
}

#[test]
fn what_another_worker_noted_does_not_count() {
    ANYWHERE.into_iter().for_each(count_what_others_noted);
}

fn count_what_others_noted(lies: Lies) {
    let served = Served::new(lies);
    let open_as = |number| served.open_as(number);
    let device = open_as(4);
    device.write_base(0, &bytes(2, 4 * BLOCK)).unwrap();
    device.note_accounts();
    let wanted = reported(&device);
    drop(device);
    for (worker, noted) in [(5, true), (6, true), (6, false), (8, false), (9, true)] {
        let device = open_as(worker);
        assert_eq!((was_noted(&device), reported(&device)), (noted, wanted.clone()), "worker {worker}");
    }
    let device = open_of(&served.image(), Worker { holder: 8, number: 10 });
    assert!(!was_noted(&device));
    // A tensor more than the accounts know, and one more write that the log has.
    let device = open_as(10);
    device
        .create_tensor(TensorSpec {
            name: "t".into(),
            dpa: Some((BLOCKS / 4 * 3 * BLOCK) as u64),
            length: 4096,
            ..weights()
        })
        .unwrap();
    std::mem::forget(device);
    let device = open_as(11);
    assert!(!was_noted(&device));
    device.write_base(0, &bytes(6, 4 * BLOCK)).unwrap();
    std::mem::forget(device);
    let device = open_as(12);
    assert!(was_noted(&device));
    assert_eq!(stored(&device), stored(&served.look()));
}

#[test]
fn what_the_disk_may_have_lost_does_not_count() {
    let served = Served::new(Lies::AsOnDisk);
    let device = served.open_as(0);
    device.write_base(0, &bytes(2, 4 * BLOCK)).unwrap();
    served.failpoints.break_syncs(true);
    assert!(device.sync().is_err());
    served.failpoints.break_syncs(false);
    device.note_accounts();
    std::mem::forget(device);
    // The kernel tells of a failure once: those that follow have it from the holder's memory.
    for worker in 1..4 {
        let device = served.open_as(worker);
        assert!(!was_noted(&device));
        device.write_base(0, &bytes(3, BLOCK)).unwrap();
        assert!(device.sync().is_err());
        device.note_accounts();
        std::mem::forget(device);
    }
    // Whoever is started with all processes gone finds what the page cache has, and no later sync
    // by itself brings it to the disk.
    let device = Device::open(again(&served.image), &config()).unwrap();
    device.write_base(0, &bytes(6, BLOCK)).unwrap();
    device.sync().unwrap();
    let wanted = read_all(&device);
    let left = file_of(&served.failpoints.last_synced(), served.image.file().metadata().unwrap().len());
    served.failpoints.boot();
    let left = Image::from_file(left, std::path::Path::new("left")).unwrap().unwrap().on_disk();
    assert!(read_all(&Device::open(left, &config()).unwrap()) == wanted);
}

#[test]
fn a_ledger_that_finds_no_room_does_not_count() {
    let (mut counted, mut broken) = (0, 0);
    for units in 0..60 {
        let served = Served::new(Lies::AsOnDisk);
        let device = served.open_as(0);
        device.note_accounts();
        served.failpoints.limit_space(units);
        for block in 0..BLOCKS {
            // The store may be what finds none.
            let done = device.write_base((block * BLOCK) as u64, &bytes(block as u64, BLOCK));
            assert!(matches!(done, Ok(()) | Err(DeviceError::Store(StoreError::NoRoom { .. }))), "{done:?}");
        }
        device.note_accounts();
        std::mem::forget(device);
        served.failpoints.limit_space(i64::MAX);
        let next = served.open_as(1);
        *(if was_noted(&next) { &mut counted } else { &mut broken }) += 1;
        assert_eq!(reported(&next), reported(&served.look()), "{units} units");
        can_be_emptied(&next);
    }
    assert!(counted > 0 && broken > 0, "{counted} counted, {broken} did not");
}

#[test]
fn what_is_held_for_a_snapshot_is_free_when_the_process_is_gone_that_saved_it() {
    for lies in [Lies::InMemory, Lies::AsOnDisk] {
        let served = Served::new(lies);
        let device = served.open_as(0);
        device.write_base(0, &bytes(2, 8 * BLOCK)).unwrap();
        device.sync().unwrap();
        let store = device.coded_store().unwrap();
        // It ends with the process and not before.
        std::mem::forget(store.begin_saving(device.image.as_ref().unwrap().tables()).unwrap());
        device.write_base(0, &bytes(3, 4 * BLOCK)).unwrap();
        device.note_accounts();
        device.write_base(4 * BLOCK as u64, &bytes(6, 4 * BLOCK)).unwrap();
        assert!(!store.held_segments().is_empty());
        drop(device);
        let device = served.open_as(1);
        assert!(was_noted(&device), "{lies:?}");
        assert_eq!(stored(&device), stored(&served.look()));
        let held = device.coded_store().unwrap().held_segments();
        assert_eq!(held.is_empty(), lies == Lies::InMemory, "{held:?}");
        keeps_what_checkpoints_name(&device, &served.failpoints);
        can_be_emptied(&device);
    }
}

#[test]
fn what_is_held_is_known_to_the_next_worker_however_much_it_is() {
    let config = DeviceConfig { codec: Codec::Lz4, ..DeviceConfig::new(256 << 20, 16 << 20) };
    let failpoints = Failpoints::none();
    failpoints.make_current();
    let image = Image::in_memory(config.superblock()).unwrap().on_disk();
    let ledger = Image::new_ledger().unwrap();
    let open = |number| {
        let image = again(&image).beside(ledger.try_clone().unwrap(), HostMemory::of_this_host(Some(0)));
        let worker = Some(Worker { holder: 7, number });
        Device::open(image, &DeviceConfig { worker, ..config.clone() }).unwrap()
    };
    drop(Device::open(image.clone(), &config).unwrap());
    let device = open(0);
    let blocks = 16_000;
    let fill = |device: &Device, round: u64| {
        for block in 0..blocks {
            device.write_base(block * BLOCK as u64, &bytes(1 + 4 * (block + round), BLOCK)).unwrap();
        }
    };
    let held = |device: &Device| device.coded_store().unwrap().held_segments().len();
    fill(&device, 0);
    device.sync().unwrap();
    // More than a log has room for.
    fill(&device, 1);
    let count = held(&device);
    assert!(count > 10_000, "{count} segments are held");
    std::mem::forget(device);
    let device = open(1);
    assert_eq!((was_noted(&device), held(&device)), (true, count));
    // Nor does it take of them before there is another checkpoint.
    fill(&device, 2);
    keeps_what_checkpoints_name(&device, &failpoints);
    device.sync().unwrap();
    std::mem::forget(device);
    let device = open(2);
    assert_eq!((was_noted(&device), held(&device)), (true, 0));
    can_be_emptied(&device);
}

#[test]
fn a_log_that_is_full_makes_the_next_worker_look_at_all_entries_or_is_begun_anew() {
    let image = new_image(&Failpoints::none());
    let device = open_as(&image, 0);
    // With none to note accounts meanwhile.
    let store = device.coded_store().unwrap();
    for round in 0..20_000_u64 {
        let mut bundle = lamina_codec::block::Bundle::new();
        lamina_codec::Encoder::new().block(
            Format::Opaque,
            Codec::Lz4,
            &[u8::try_from(round % 250).unwrap() + 1; BLOCK],
            &mut bundle,
        );
        store.replace(BLOCKS as u64 - 1).unwrap().publish(&bundle).unwrap();
    }
    std::mem::forget(device);
    let device = open_as(&image, 1);
    assert!(!was_noted(&device));
    for round in 0..10_000_u64 {
        device
            .write_base(((BLOCKS - 2) * BLOCK) as u64, &[u8::try_from(round % 250).unwrap() + 1; BLOCK])
            .unwrap();
    }
    std::mem::forget(device);
    let device = open_as(&image, 2);
    assert!(was_noted(&device));
    agree(&device);
}
