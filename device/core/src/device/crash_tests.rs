//! Hosts that crash: a device in an image on a disk is what it was at the last sync, whatever was
//! killed before.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::{
    death_tests::{can_be_emptied, keeps_what_checkpoints_name},
    image_tests::{
        BLOCK, BLOCKS, again, bytes, cache, config, file_of, is_refused, operation, perform, range_of,
        read_all, settle, stored, weights,
    },
    *,
};
use lamina_store::{
    Worker,
    failpoints::{Failpoints, Pages, pages},
    host_memory::HostMemory,
};

/// What chance decides.
fn roll(seed: &mut u64, sides: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*seed >> 33).unwrap() % sides
}

/// An image on a host that crashes.
struct Host {
    failpoints: Failpoints,
    image: Image,
    /// The ledger, and which worker is the next one of this boot.
    ledger: std::fs::File,
    worker: u64,
    /// What its file was at some moments since it was synced last, and how often it was synced
    /// then.
    versions: (i64, Vec<Pages>),
}

impl Host {
    fn new() -> Self {
        let failpoints = Failpoints::none();
        failpoints.make_current();
        let image = Image::in_memory(config().superblock()).unwrap().on_disk();
        failpoints.set_synced(pages(image.file()));
        let ledger = Image::new_ledger().unwrap();
        Self { failpoints, image, ledger, worker: 0, versions: (0, Vec::new()) }
    }

    /// The device as the next worker finds it.
    fn open_next(&mut self) -> Device {
        let worker = Worker { holder: 7, number: self.worker };
        let config = DeviceConfig { worker: Some(worker), first_process: self.worker == 0, ..config() };
        self.worker += 1;
        Device::open(
            again(&self.image).beside(self.ledger.try_clone().unwrap(), HostMemory::of_this_host(Some(0))),
            &config,
        )
        .unwrap()
    }

    fn open(&self) -> Device {
        Device::open(again(&self.image), &config()).unwrap()
    }

    /// Notes what the file is now.
    fn note(&mut self) {
        let syncs = self.failpoints.syncs();
        if self.versions.0 != syncs {
            self.versions = (syncs, Vec::new());
        }
        self.versions.1.push(pages(self.image.file()));
    }

    /// Crashes: of each page some version since the last sync is on the disk. The host comes up
    /// again.
    fn crash(&mut self, seed: &mut u64) {
        self.note();
        let mut versions = std::mem::take(&mut self.versions.1);
        versions.push(self.failpoints.last_synced());
        let all: std::collections::BTreeSet<u64> = versions.iter().flat_map(Pages::keys).copied().collect();
        // Often most pages are of one version.
        let usual = roll(seed, versions.len() + 1);
        let mut left = Pages::new();
        for page in all {
            let from =
                if usual < versions.len() && roll(seed, 4) > 0 { usual } else { roll(seed, versions.len()) };
            if let Some(bytes) = versions[from].get(&page) {
                left.insert(page, bytes.clone());
            }
        }
        self.crash_to(left);
    }

    /// Crashes: `left` is on the disk. The host comes up again.
    fn crash_to(&mut self, left: Pages) {
        let length = self.image.file().metadata().unwrap().len();
        let file = file_of(&left, length);
        self.versions.1.clear();
        self.failpoints.boot();
        self.failpoints.set_synced(left);
        (self.ledger, self.worker) = (Image::new_ledger().unwrap(), 0);
        self.image = Image::from_file(file, std::path::Path::new("crashed")).unwrap().unwrap().on_disk();
    }
}

/// What happens to a device on a host that crashes.
#[derive(Clone, Debug)]
enum Fate {
    Nothing,
    /// It is flushed and synced.
    Sync,
    /// The process is killed so many stores later.
    Killed(i64),
    /// The host crashes so many stores later.
    Crashed(i64),
    /// The process is killed so many stores after a sync began.
    KilledInSync(i64),
    /// The host crashes so many stores after a sync began.
    CrashedInSync(i64),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        8 => Just(Fate::Nothing),
        3 => Just(Fate::Sync),
        2 => (0..100_i64).prop_map(Fate::Killed),
        2 => (0..100_i64).prop_map(Fate::Crashed),
        2 => (0..60_i64).prop_map(Fate::KilledInSync),
        2 => (0..60_i64).prop_map(Fate::CrashedInSync),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn after_a_crash_of_the_host_the_device_is_what_it_was_at_the_last_sync(
        operations in prop::collection::vec((operation(), fate()), 1..50),
        mut seed in any::<u64>(),
    ) {
        let mut host = Host::new();
        let mut device = host.open_next();
        device.create_tensor(weights()).unwrap();
        device.create_tensor(cache()).unwrap();
        device.sync().unwrap();
        let all = |device: &Device| (read_all(device), device.tensors(), device.views());
        let mut model = vec![0; BLOCKS * BLOCK];
        // What a crash may leave: more than one since a sync was cut short.
        let mut synced = vec![all(&device)];
        for (operation, fate) in operations {
            let mut after = model.clone();
            if let Some((at, data)) = range_of(&operation, &model) {
                after[at..at + data.len()].copy_from_slice(&data);
            }
            let stores = match &fate {
                Fate::Killed(stores) | Fate::Crashed(stores) => *stores,
                _ => i64::MAX,
            };
            if roll(&mut seed, 3) == 0 {
                device.note_accounts();
            }
            host.failpoints.kill_after(stores);
            let done = catch_unwind(AssertUnwindSafe(|| perform(&device, &operation)));
            host.failpoints.kill_after(i64::MAX);
            match done {
                Ok(done) if is_refused(&done) => settle(&mut model, &after, read_all(&device)),
                Ok(done) => {
                    done.unwrap();
                    model = after.clone();
                    prop_assert!(read_all(&device) == model);
                }
                Err(_) => {}
            }
            host.note();
            let in_sync = match fate {
                Fate::Sync => Some(i64::MAX),
                Fate::KilledInSync(stores) | Fate::CrashedInSync(stores) => Some(stores),
                _ => None,
            };
            if let Some(stores) = in_sync {
                device.flush(0, device.base_bytes()).unwrap();
                synced.push(all(&device));
                host.failpoints.kill_after(stores);
                let done = catch_unwind(AssertUnwindSafe(|| device.sync().unwrap()));
                host.failpoints.kill_after(i64::MAX);
                if done.is_ok() {
                    synced = vec![all(&device)];
                }
                host.note();
            }
            match fate {
                Fate::Nothing | Fate::Sync => {}
                // Nothing of the killed process goes on, not even what ends its values.
                Fate::Killed(_) | Fate::KilledInSync(_) => {
                    std::mem::forget(std::mem::replace(&mut device, host.open_next()));
                    settle(&mut model, &after, read_all(&device));
                    prop_assert_eq!(stored(&device), stored(&host.open()));
                    keeps_what_checkpoints_name(&device, &host.failpoints);
                }
                Fate::Crashed(_) | Fate::CrashedInSync(_) => {
                    host.crash(&mut seed);
                    std::mem::forget(std::mem::replace(&mut device, host.open_next()));
                    let found = all(&device);
                    prop_assert!(synced.contains(&found), "it is not what it was at the last sync");
                    model = found.0.clone();
                    synced = vec![found];
                    agree_after_crash(&device);
                }
            }
        }
        device.flush(0, device.base_bytes()).unwrap();
        can_be_emptied(&device);
    }
}

#[test]
fn a_process_that_is_killed_in_a_sync_leaves_a_checkpoint_whatever_the_next_one_does() {
    // The host crashes as the next process makes its first checkpoint, of which each page may be on
    // the disk or not.
    let mut unfinished = 0;
    for (first, second) in (1..40).flat_map(|first| (1..40).step_by(7).map(move |second| (first, second))) {
        let mut host = Host::new();
        let device = host.open_next();
        device.write_base(0, &bytes(2, 4 * BLOCK)).unwrap();
        device.sync().unwrap();
        let mut states = vec![read_all(&device)];
        device.write_base(0, &bytes(3, 4 * BLOCK)).unwrap();
        let killed = |device: &Device, host: &Host, stores| {
            host.failpoints.kill_after(stores);
            let done = catch_unwind(AssertUnwindSafe(|| device.sync().unwrap()));
            host.failpoints.kill_after(i64::MAX);
            done.is_err()
        };
        states.push(read_all(&device));
        if !killed(&device, &host, first) {
            break;
        }
        unfinished += 1;
        drop(device);
        host.note();
        let device = host.open_next();
        device.write_base(0, &bytes(6, 4 * BLOCK)).unwrap();
        states.push(read_all(&device));
        killed(&device, &host, second);
        drop(device);
        let (file, synced) = (pages(host.image.file()), host.failpoints.last_synced());
        for mut seed in 0..5 {
            host.image = Image::from_file(
                file_of(&file, host.image.file().metadata().unwrap().len()),
                std::path::Path::new("left"),
            )
            .unwrap()
            .unwrap()
            .on_disk();
            host.failpoints.set_synced(synced.clone());
            host.crash(&mut seed);
            let found = read_all(&host.open());
            assert!(states.contains(&found), "killed at {first}, crashed at {second}");
        }
    }
    assert!(unfinished > 30, "{unfinished} syncs were cut short");
}

/// No open window is left, and what is stored is what is counted.
fn agree_after_crash(device: &Device) {
    assert_eq!(device.stats().kv_windows.open, 0);
    let tensors: u64 = device.stats().tensors.iter().map(|tensor| tensor.stored_bytes).sum();
    assert!(tensors <= device.blocks.used_bytes());
}

#[test]
fn a_full_store_is_synced_to_be_rewritten_and_a_crash_leaves_whole_blocks() {
    let mut host = Host::new();
    let config = DeviceConfig { store_bytes: Some(8 << 20), ..DeviceConfig::new(16 << 20, 16 << 20) };
    host.image = Image::in_memory(config.superblock()).unwrap().on_disk();
    let device = Device::open(host.image.clone(), &config).unwrap();
    let block = |at: u64, round: u64| lamina_codec::testing::bytes(5 * (at * 64 + round + 1), BLOCK);
    let mut blocks = 0;
    while device.write_base(blocks * BLOCK as u64, &block(blocks, 0)).is_ok() {
        blocks += 1;
    }
    device.sync().unwrap();
    let made = |device: &Device| device.coded_store().unwrap().checkpoints_made();
    let (before, _) = made(&device);
    for round in 1..4 {
        for at in 0..blocks {
            device.write_base(at * BLOCK as u64, &block(at, round)).unwrap();
        }
    }
    let (after, forced) = made(&device);
    assert!(blocks > 500 && after > before + 3 && forced > 3, "{blocks} {before} {after} {forced}");
    // Each made room for as much as may be held.
    assert!(forced < 3 * blocks / 50, "{forced} syncs for {blocks} blocks");
    for mut seed in 0..8 {
        host.note();
        let (failpoints, image, versions) =
            (host.failpoints.clone(), host.image.clone(), host.versions.clone());
        let synced = failpoints.last_synced();
        host.crash(&mut seed);
        let device = Device::open(host.image.clone(), &config).unwrap();
        let mut found = vec![0; BLOCK];
        for at in 0..blocks {
            device.read_base(at * BLOCK as u64, &mut found).unwrap();
            assert!((0..4).any(|round| found == block(at, round)), "block {at} is no version of it");
        }
        assert!(device.poison().is_empty());
        drop(device);
        (host.image, host.versions) = (image, versions);
        failpoints.set_synced(synced);
    }
}

#[test]
fn an_image_that_is_left_cleanly_is_taken_as_it_is_until_it_changes() {
    let mut host = Host::new();
    let device = host.open();
    device.create_tensor(weights()).unwrap();
    device.create_tensor(cache()).unwrap();
    device.write_base(0, &bytes(5, BLOCKS * BLOCK)).unwrap();
    // Stays staged: it is no part of a checkpoint.
    device.write_base((BLOCKS / 2 * BLOCK) as u64, &[9; 100]).unwrap();
    let model = read_all(&device);
    device.sync_last().unwrap();
    drop(device);
    let mut seed = 3;
    host.crash(&mut seed);
    let device = host.open();
    assert!(read_all(&device) == model && device.stats().kv_windows.open == 1);
    // Who changes it afterwards says so before anything is on the disk.
    let syncs = host.failpoints.syncs();
    // First of all into the window that is open still.
    device.write_base((BLOCKS / 2 * BLOCK) as u64 + 50, &[7; 50]).unwrap();
    assert_eq!(host.failpoints.syncs(), syncs + 1);
    device.write_base(5, &bytes(7, 3 * BLOCK)).unwrap();
    assert_eq!(host.failpoints.syncs(), syncs + 1);
    host.crash(&mut seed);
    let again = host.open();
    let found = read_all(&again);
    let window = BLOCKS / 2 * BLOCK..BLOCKS / 2 * BLOCK + 100;
    assert!(found[..window.start] == model[..window.start] && found[window.end..] == model[window.end..]);
    assert_eq!((found[window.clone()] == model[window], again.stats().kv_windows.open), (false, 0));
}

#[test]
fn a_window_is_not_recorded_before_an_image_that_was_left_cleanly_says_that_it_is_no_more() {
    let mut host = Host::new();
    let device = host.open();
    device.create_tensor(cache()).unwrap();
    let at = (BLOCKS / 2 * BLOCK) as u64;
    device.write_base(at, &bytes(5, 4 * BLOCK)).unwrap();
    let model = read_all(&device);
    device.sync_last().unwrap();
    drop(device);
    let mut left = host.failpoints.last_synced();
    let device = host.open();
    let syncs = host.failpoints.syncs();
    // Whole, so that it is not staged first.
    device.write_base(at, &bytes(7, 4 * BLOCK)).unwrap();
    assert_eq!((host.failpoints.syncs(), device.stats().kv_windows.open), (syncs + 1, 0));
    // The journal as it was when that was to be on the disk may be the first that is.
    let journal = device.image().unwrap().parts()[3].clone();
    let journal = journal.start / 4096..journal.end.div_ceil(4096);
    left.retain(|page, _| !journal.contains(page));
    left.extend(host.failpoints.last_synced().into_iter().filter(|(page, _)| journal.contains(page)));
    drop(device);
    host.crash_to(left);
    let device = host.open();
    assert!(read_all(&device) == model && device.poison().is_empty());
}

#[test]
fn a_sync_that_fails_is_said_once_and_no_later_one_says_that_all_is_well() {
    let host = Host::new();
    let device = host.open();
    device.write_base(0, &bytes(5, BLOCK)).unwrap();
    host.failpoints.break_syncs(true);
    assert!(device.sync().is_err());
    host.failpoints.break_syncs(false);
    for _ in 0..3 {
        let why = device.sync_last().unwrap_err().to_string();
        assert!(why.contains("a sync before failed"), "{why}");
    }
    let events = device.events();
    assert_eq!(events.iter().map(|event| event.kind).collect::<Vec<_>>(), [events::Kind::NotSynced]);
    // The process goes on, and so does the next one.
    device.write_base(0, &bytes(6, BLOCK)).unwrap();
    drop(device);
    assert!(read_all(&host.open())[..BLOCK] == bytes(6, BLOCK));
}

#[test]
fn what_a_failed_sync_left_out_is_brought_to_the_disk_by_the_next_holder() {
    let mut host = Host::new();
    let device = host.open_next();
    device.create_tensor(cache()).unwrap();
    device.write_base(0, &bytes(5, 8 * BLOCK)).unwrap();
    device.sync().unwrap();
    device.write_base(0, &bytes(6, BLOCKS * BLOCK)).unwrap();
    let fail = |host: &Host, device: &Device| {
        host.failpoints.break_syncs(true);
        assert!(device.sync().is_err());
        host.failpoints.break_syncs(false);
    };
    fail(&host, &device);
    device.write_base(BLOCK as u64, &bytes(7, BLOCK)).unwrap();
    let model = read_all(&device);
    drop(device);
    // The same holder's workers go on, and bring nothing to the disk.
    let device = host.open_next();
    assert!(device.sync_last().is_err() && read_all(&device) == model);
    drop(device);
    // The disk fails another holder too.
    (host.ledger, host.worker) = (Image::new_ledger().unwrap(), 0);
    host.failpoints.break_syncs(true);
    let device = host.open_next();
    host.failpoints.break_syncs(false);
    assert!(device.sync_last().is_err() && read_all(&device) == model);
    drop(device);
    (host.ledger, host.worker) = (Image::new_ledger().unwrap(), 0);
    let device = host.open_next();
    assert!(read_all(&device) == model);
    device.sync_last().unwrap();
    drop(device);
    host.crash_to(host.failpoints.last_synced());
    let syncs = host.failpoints.syncs();
    let device = host.open_next();
    assert!(read_all(&device) == model && device.poison().is_empty());
    // It was left cleanly, and nothing had to be brought to the disk.
    assert_eq!(host.failpoints.syncs(), syncs);
}

#[test]
fn an_image_whose_last_sync_failed_was_not_left_cleanly() {
    for mut seed in 0..20 {
        let mut host = Host::new();
        let device = host.open();
        device.create_tensor(cache()).unwrap();
        device.write_base(0, &bytes(5, BLOCKS * BLOCK)).unwrap();
        let model = read_all(&device);
        device.sync().unwrap();
        // Nothing but that it is left cleanly is to be brought to the disk.
        host.failpoints.break_syncs(true);
        assert!(device.sync_last().is_err());
        host.note();
        device.write_base(0, &bytes(6, 20 * BLOCK)).unwrap();
        device.flush(0, device.base_bytes()).unwrap();
        drop(device);
        host.failpoints.break_syncs(false);
        host.crash(&mut seed);
        let device = host.open();
        assert!(read_all(&device) == model && device.poison().is_empty(), "seed {seed}");
    }
}

#[test]
fn an_image_of_the_version_before_gets_checkpoints_when_it_is_opened() {
    let mut host = Host::new();
    host.image = Image::in_memory(config().superblock()).unwrap();
    let device = Device::open(host.image.clone(), &config()).unwrap();
    device.create_tensor(weights()).unwrap();
    device.write_base(0, &bytes(5, BLOCKS * BLOCK)).unwrap();
    let model = read_all(&device);
    device.sync().unwrap();
    assert_eq!((host.failpoints.syncs(), device.coded_store().unwrap().checkpoints_made()), (0, (0, 0)));
    drop(device);
    let superblock = |image: &Image| {
        let mut page = [0; 4096];
        std::os::unix::fs::FileExt::read_exact_at(image.file(), &mut page, 0).unwrap();
        String::from_utf8_lossy(&page[16..]).into_owned()
    };
    assert!(!superblock(&host.image).contains("checkpoints"));
    host.image = host.image.clone().on_disk();
    let device = Device::open(host.image.clone(), &config()).unwrap();
    assert!(read_all(&device) == model && device.tensors().len() == 1);
    // What a program of that version does not know, it refuses.
    assert!(superblock(&host.image).contains(r#""checkpoints":true"#));
    device.write_base(0, &bytes(6, BLOCKS * BLOCK)).unwrap();
    host.failpoints.set_synced(pages(host.image.file()));
    host.crash(&mut 1);
    let device = host.open();
    assert!(read_all(&device) == model && device.tensors().len() == 1);
    drop(device);
    // The crash may have torn the first superblock as it was written.
    std::os::unix::fs::FileExt::write_all_at(host.image.file(), &[0xee; 2048], 2048).unwrap();
    let file = host.image.file().try_clone().unwrap();
    let image = Image::from_file(file, std::path::Path::new("torn")).unwrap().unwrap();
    assert!(read_all(&Device::open(image, &config()).unwrap()) == model);
}

#[test]
fn a_crashed_image_without_a_checkpoint_that_can_be_read_is_refused_and_left_as_it_is() {
    let mut host = Host::new();
    let device = host.open();
    device.write_base(0, &bytes(5, BLOCK)).unwrap();
    device.sync().unwrap();
    drop(device);
    for header in [12 << 10, 16 << 10] {
        std::os::unix::fs::FileExt::write_all_at(host.image.file(), &[1; 64], header).unwrap();
    }
    host.failpoints.set_synced(pages(host.image.file()));
    // The page cache still has all of it.
    assert!(read_all(&host.open())[..BLOCK] == bytes(5, BLOCK));
    for header in [12 << 10, 16 << 10] {
        std::os::unix::fs::FileExt::write_all_at(host.image.file(), &[1; 64], header).unwrap();
    }
    host.failpoints.set_synced(pages(host.image.file()));
    host.crash(&mut 1);
    let before = pages(host.image.file());
    let why =
        Device::open(again(&host.image), &config()).err().expect("nothing says what it was").to_string();
    assert!(why.contains("checkpoints cannot be read") && why.contains("snapshot restore"), "{why}");
    assert_eq!(before, pages(host.image.file()));
}
