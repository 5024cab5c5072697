//! A device in an image, killed between and within its stores, and on a disk that is full: nothing
//! that was acknowledged is lost, and no block is a mixture.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::*;
use crate::layout::Layout;
use lamina_codec::{format::Format, kv::KvLayout};
use lamina_store::{
    StoreError, Worker,
    failpoints::{Failpoints, Killed, Pages, pages},
};

pub(super) const BLOCK: usize = BLOCK_BYTES;
/// Blocks of the base window: the first half is a weight tensor's, then a KV tensor's windows, then
/// nobody's.
pub(super) const BLOCKS: usize = 48;

#[derive(Clone, Debug)]
enum Operation {
    /// Bytes from here on, made from a seed.
    Write {
        at: usize,
        length: usize,
        seed: u64,
    },
    Discard {
        at: usize,
        length: usize,
    },
    Flush,
    /// Poisons a block.
    Inject {
        block: usize,
    },
    /// Clears blocks that are poisoned.
    Clear {
        at: usize,
        length: usize,
    },
    /// Makes the KV tensor, or removes it.
    Toggle,
    View,
    /// Makes a checkpoint, if there are any.
    Sync,
}

fn operation() -> impl Strategy<Value = Operation> {
    let range = || {
        let whole = (0..BLOCKS, 1..9_usize).prop_map(|(block, count)| (block * BLOCK, count * BLOCK));
        let odd = (0..BLOCKS * BLOCK, 1..3 * BLOCK);
        let window = (0..3_usize).prop_map(|window| ((BLOCKS / 2 + 4 * window) * BLOCK, 4 * BLOCK));
        prop_oneof![2 => whole, 1 => odd, 2 => window]
            .prop_map(|(at, length)| (at, length.min(BLOCKS * BLOCK - at)))
    };
    prop_oneof![
        6 => (range(), any::<u64>()).prop_map(|((at, length), seed)| Operation::Write { at, length, seed }),
        2 => range().prop_map(|(at, length)| Operation::Discard { at, length }),
        1 => (0..BLOCKS).prop_map(|block| Operation::Inject { block }),
        1 => range().prop_map(|(at, length)| Operation::Clear { at, length }),
        1 => Just(Operation::Flush),
        1 => Just(Operation::Toggle),
        1 => Just(Operation::View),
    ]
}

fn operation_or_sync() -> impl Strategy<Value = Operation> {
    prop_oneof![9 => operation(), 1 => Just(Operation::Sync)]
}

/// Data that some codec makes smaller, some not, and some zeros.
pub(super) fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let noise = lamina_codec::testing::bytes(seed, length);
    match seed % 4 {
        0 => vec![0; length],
        1 => noise,
        _ => noise
            .iter()
            .enumerate()
            .map(|(at, byte)| if at % 2 == 0 { *byte } else { 0x3c + byte % 4 })
            .collect(),
    }
}

fn weights() -> TensorSpec {
    TensorSpec {
        name: "w".into(),
        dpa: Some(0),
        length: (BLOCKS / 2 * BLOCK) as u64,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout: Layout::Weight,
        codec: None,
        base: None,
    }
}

fn cache() -> TensorSpec {
    TensorSpec {
        name: "kv".into(),
        dpa: Some((BLOCKS / 2 * BLOCK) as u64),
        length: (BLOCKS / 4 * BLOCK) as u64,
        layout: Layout::Kv(KvLayout::rows(64, 128)),
        ..weights()
    }
}

pub(super) fn config() -> DeviceConfig {
    let config = DeviceConfig::new((BLOCKS * BLOCK) as u64, 16 << 20);
    DeviceConfig { open_windows: 2, codec: Codec::Tree, ..config }
}

fn new_image(failpoints: &Failpoints) -> Image {
    failpoints.make_current();
    with_tensors(Image::in_memory(config().superblock()).unwrap())
}

fn with_tensors(image: Image) -> Image {
    let device = Device::open(image.clone(), &config()).unwrap();
    device.create_tensor(weights()).unwrap();
    device.create_tensor(cache()).unwrap();
    image
}

/// Where an image lies that workers serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    InMemory,
    /// As if on a disk: with checkpoints, and its ledger apart.
    AsOnDisk,
    /// In a file.
    InFile,
}

const ANYWHERE: [Lies; 3] = [Lies::InMemory, Lies::AsOnDisk, Lies::InFile];

impl Lies {
    /// How many stores apart workers are killed. Files take their time.
    const fn step(self) -> usize {
        if matches!(self, Self::InFile) { 19 } else { 1 }
    }
}

/// An image that workers serve, one after another.
struct Served {
    failpoints: Failpoints,
    image: Image,
    ledger: Option<std::fs::File>,
}

impl Served {
    fn new(lies: Lies) -> Self {
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
            Some(ledger) => again(&self.image).beside(ledger.try_clone().unwrap()),
            None => self.image.clone(),
        }
    }

    /// The device as this worker of a holder finds it.
    fn open_as(&self, number: u64) -> Device {
        open_as(&self.image(), number)
    }

    /// The device as somebody finds it who looks at all entries.
    fn look(&self) -> Device {
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
fn can_be_emptied(device: &Device) {
    device.discard(0, device.base_bytes()).unwrap();
    device.flush(0, device.base_bytes()).unwrap();
    device.sync().unwrap();
    assert_eq!((device.blocks.used_bytes(), device.coded_store().unwrap().held_segments()), (0, Vec::new()));
}

/// Whatever a checkpoint names that a crash of the host may leave is in use or held: the last one
/// that is on the disk, and the last one.
fn keeps_what_checkpoints_name(device: &Device, failpoints: &Failpoints) {
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
        named.collect::<std::collections::BTreeSet<_>>()
    };
    let mut kept = segments(&parts[6]);
    kept.extend(device.coded_store().unwrap().held_segments());
    for pages in [&is, &failpoints.last_synced()] {
        // A header begins with a word that only one has; its number is the third.
        let number = |page: &Vec<u8>| {
            let number = page.starts_with(b"LAMCHECK").then(|| page[16..24].first_chunk().copied());
            number.flatten().map(u64::from_le_bytes)
        };
        let copies = [3, 4].map(|page| pages.get(&page).and_then(number));
        let last = usize::from(copies[1] > copies[0]);
        if copies[last].is_some() {
            let lacking: Vec<_> = segments(&parts[11 + last]).difference(&kept).copied().collect();
            assert_eq!(lacking, [], "a checkpoint names segments that are free");
        }
    }
}

/// Whether a block is poisoned, as nothing else here is made so.
fn is_lost(block: &[u8]) -> bool {
    block.iter().all(|byte| *byte == poison::PATTERN)
}

/// Where an operation changes what `before` holds, and to what.
fn range_of(operation: &Operation, before: &[u8]) -> Option<(usize, Vec<u8>)> {
    match operation {
        Operation::Inject { block } => Some((block * BLOCK, vec![poison::PATTERN; BLOCK])),
        Operation::Clear { at, length } => {
            let from = at / BLOCK * BLOCK;
            let mut blocks = before[from..(at + length).next_multiple_of(BLOCK)].to_vec();
            blocks.chunks_mut(BLOCK).filter(|block| is_lost(block)).for_each(|block| block.fill(0));
            Some((from, blocks))
        }
        Operation::Write { at, length, seed } => Some((*at, bytes(*seed, *length))),
        Operation::Discard { at, length } => Some((*at, vec![0; *length])),
        _ => None,
    }
}

fn perform(device: &Device, operation: &Operation) -> Result<(), DeviceError> {
    match operation {
        Operation::Write { at, length, seed } => device.write_base(*at as u64, &bytes(*seed, *length)),
        Operation::Discard { at, length } => device.discard(*at as u64, *length as u64),
        Operation::Inject { block } => device.inject_poison((block * BLOCK) as u64, 1),
        Operation::Clear { at, length } => device.clear_poison(*at as u64, *length as u64),
        Operation::Flush => device.flush(0, device.base_bytes()),
        Operation::Toggle if device.tensors().len() == 2 => device.remove_tensor("kv"),
        Operation::Toggle => device.create_tensor(cache()).map(drop),
        Operation::View => device.create_view("w", "e8m3").map(drop),
        Operation::Sync => {
            device.sync().unwrap();
            Ok(())
        }
    }
}

pub(super) fn read_all(device: &Device) -> Vec<u8> {
    let mut all = vec![0xa5; BLOCKS * BLOCK];
    device.read_base(0, &mut all).unwrap();
    let lost: Vec<_> = all.chunks(BLOCK).enumerate().filter(|(_, words)| is_lost(words)).collect();
    let listed: Vec<_> = device.poison().iter().map(|poisoned| poisoned.dpa / BLOCK as u64).collect();
    assert!(lost.iter().map(|(block, _)| *block as u64).eq(listed.iter().copied()), "{listed:?} are listed");
    all
}

/// Whether part of a poisoned block was to be written.
pub(super) fn is_refused(done: &Result<(), DeviceError>) -> bool {
    matches!(
        done,
        Err(DeviceError::Store(StoreError::Entry { why: lamina_store::entry::Damaged::Poison, .. }))
    )
}

/// What a device says it stores is what a process that finds its image counts.
pub(super) fn agree(device: &Device) {
    let found = Device::open(device.image().unwrap().clone(), &config()).unwrap();
    assert_eq!(stored(device), stored(&found));
}

fn stored(device: &Device) -> (serde_json::Value, Vec<u64>, u64) {
    let stats = device.stats();
    let tensors: Vec<_> = stats.tensors.iter().map(|tensor| tensor.stored_bytes).collect();
    (serde_json::to_value(&stats.blocks).unwrap(), tensors, device.blocks.used_bytes())
}

/// Each block of `found` is the one of `before` or the one of `after`; `found` is what holds from
/// now on.
pub(super) fn settle(before: &mut Vec<u8>, after: &[u8], found: Vec<u8>) {
    for (block, found) in found.chunks(BLOCK).enumerate() {
        let at = block * BLOCK..(block + 1) * BLOCK;
        assert!(found == &before[at.clone()] || found == &after[at], "block {block} is neither old nor new");
    }
    *before = found;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_kill_between_any_two_stores_loses_nothing(
        operations in prop::collection::vec((operation_or_sync(), prop_oneof![0..40_i64, 0..400_i64]), 1..40),
        lies in prop::sample::select(&ANYWHERE[..]),
    ) {
        let served = Served::new(lies);
        let failpoints = &served.failpoints;
        let mut model = vec![0; BLOCKS * BLOCK];
        let mut workers = 0..;
        let mut open = || served.open_as(workers.next().unwrap());
        let mut device = open();
        for (operation, stores) in operations {
            let mut after = model.clone();
            if let Some((at, data)) = range_of(&operation, &model) {
                after[at..at + data.len()].copy_from_slice(&data);
            }
            failpoints.kill_after(stores);
            let done = catch_unwind(AssertUnwindSafe(|| perform(&device, &operation)));
            failpoints.kill_after(i64::MAX);
            match done {
                Ok(done) if is_refused(&done) => settle(&mut model, &after, read_all(&device)),
                Ok(done) => {
                    done.unwrap();
                    model = after;
                    prop_assert!(read_all(&device) == model);
                }
                Err(why) => {
                    prop_assert!(why.is::<Killed>(), "it died of something else");
                    // Nothing of the killed process goes on, not even what ends its values.
                    std::mem::forget(device);
                    // The next one may be killed while it opens the image, too.
                    failpoints.kill_after(stores);
                    let opened = catch_unwind(AssertUnwindSafe(&mut open));
                    failpoints.kill_after(i64::MAX);
                    device = opened.unwrap_or_else(|why| {
                        assert!(why.is::<Killed>(), "it died of something else");
                        open()
                    });
                    settle(&mut model, &after, read_all(&device));
                }
            }
            prop_assert_eq!(stored(&device), stored(&served.look()));
            keeps_what_checkpoints_name(&device, failpoints);
        }
        drop(device);
        let device = open();
        prop_assert!(read_all(&device) == model);
        device.flush(0, device.base_bytes()).unwrap();
        prop_assert_eq!(stored(&device), stored(&served.look()));
        prop_assert!(read_all(&device) == model);
        can_be_emptied(&device);
    }

    #[test]
    fn a_full_disk_is_an_error_and_loses_nothing(
        operations in prop::collection::vec((operation(), 0..3_i64), 1..40),
    ) {
        let failpoints = Failpoints::none();
        let image = new_image(&failpoints);
        let mut model = vec![0; BLOCKS * BLOCK];
        let device = Device::open(image.clone(), &config()).unwrap();
        for (operation, room) in operations {
            let mut after = model.clone();
            if let Some((at, data)) = range_of(&operation, &model) {
                after[at..at + data.len()].copy_from_slice(&data);
            }
            failpoints.limit_space(room);
            let done = perform(&device, &operation);
            failpoints.limit_space(i64::MAX);
            match done {
                Ok(()) => model = after,
                done if is_refused(&done) => settle(&mut model, &after, read_all(&device)),
                Err(DeviceError::Store(StoreError::NoRoom { .. })) => settle(&mut model, &after, read_all(&device)),
                Err(other) => panic!("{other}"),
            }
            prop_assert!(read_all(&device) == model);
        }
        drop(device);
        let device = Device::open(image, &config()).unwrap();
        prop_assert!(read_all(&device) == model);
    }
}

/// Opens an image as this worker of a holder.
pub(super) fn open_as(image: &Image, number: u64) -> Device {
    open_of(image, Worker { holder: 7, number })
}

fn open_of(image: &Image, worker: Worker) -> Device {
    Device::open(image.clone(), &DeviceConfig { worker: Some(worker), ..config() }).unwrap()
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
    let device = served.open_as(1);
    assert!(!was_noted(&device));
    std::mem::forget(device);
    // That one heard of no failure.
    assert!(was_noted(&served.open_as(2)));
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
        std::mem::forget(store.begin_saving(device.kept.as_ref().unwrap().tables()).unwrap());
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
        let image = again(&image).beside(ledger.try_clone().unwrap());
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

#[test]
fn tables_and_views_are_found_again() {
    let image = new_image(&Failpoints::none());
    let device = Device::open(image.clone(), &config()).unwrap();
    let view = device.create_view("w", "e8m3").unwrap();
    device.write_base(0, &bytes(2, 4 * BLOCK)).unwrap();
    let read = |device: &Device| {
        let mut out = vec![0xa5; 4 * BLOCK];
        device.read_views(view.offset, &mut out).unwrap();
        out
    };
    let (tensors, shown) = (device.tensors(), read(&device));
    drop(device);
    let device = Device::open(image, &config()).unwrap();
    assert_eq!((device.tensors(), device.views()), (tensors, vec![view.clone()]));
    assert!(read(&device) == shown);
}

#[test]
fn poison_and_damage_outlive_the_process() {
    let image = new_image(&Failpoints::none());
    let device = Device::open(image.clone(), &config()).unwrap();
    let data = bytes(2, BLOCKS * BLOCK);
    device.write_base(0, &data).unwrap();
    device.inject_poison(BLOCK as u64, 1).unwrap();
    drop(device);
    let device = Device::open(image, &config()).unwrap();
    let found = read_all(&device);
    assert!(found[..BLOCK] == data[..BLOCK] && found[BLOCK..2 * BLOCK] == [poison::PATTERN; BLOCK]);
    assert!(found[2 * BLOCK..] == data[2 * BLOCK..]);
    let poison = device.poison();
    assert_eq!((poison.len(), poison[0].dpa, poison[0].cause), (1, BLOCK as u64, poison::Cause::Found));
    device.write_base(0, &data).unwrap();
    assert!(read_all(&device) == data && device.poison().is_empty());
    agree(&device);
}

#[test]
fn blocks_of_windows_that_no_table_knows_are_damaged() {
    let image = new_image(&Failpoints::none());
    let device = Device::open(image.clone(), &config()).unwrap();
    let at = BLOCKS / 2 * BLOCK;
    // Channels that differ in size, so that the window is coded with its exponents' differences.
    let element = |n: usize| {
        (u16::try_from(90 + n % 64 % 30).unwrap() << 7 | u16::try_from(n % 128).unwrap()).to_le_bytes()
    };
    let rows: Vec<u8> = (0..4 * BLOCK / 2).flat_map(element).collect();
    device.write_base(at as u64, &rows).unwrap();
    device.flush(0, device.base_bytes()).unwrap();
    assert!(device.stats().blocks.heads_bytes > 0);
    drop(device);
    let nothing = r#"{"generations":[9],"tensors":[],"views":[],"loaded":[]}"#;
    lamina_store::tables::Tables::replace(&image, nothing.as_bytes()).unwrap();
    let device = Device::open(image, &config()).unwrap();
    let found = read_all(&device);
    assert_eq!(found[at..at + BLOCK], [poison::PATTERN; BLOCK]);
    assert!(!device.poison().is_empty());
}

/// The image of a program that did not know the later counters: number n of it says 1000 + n.
fn older_image(config: &DeviceConfig, others: Range<usize>, tables: &str) -> Image {
    let image = Image::in_memory(config.superblock()).unwrap();
    let counters = lamina_store::counters::Counters::open(&image, false, others.end).unwrap();
    for number in 0..OLDER_COUNTERS as u64 {
        counters.take().unwrap().add(1000 + number);
    }
    for number in others {
        counters.kept_others(number).unwrap().add(1000 + number as u64);
    }
    lamina_store::tables::Tables::replace(&image, tables.as_bytes()).unwrap();
    image
}

/// Counters of an undivided device before any were added: of its one part, then its own, then two
/// interleaved devices'.
const OLDER_COUNTERS: usize = 21 + 40 + 12;

#[test]
fn counters_of_an_older_image_lie_where_they_lay() {
    let interleaving = crate::stats::Interleaving { interleave: "2x256".parse().unwrap(), bandwidth: 1.0 };
    let config = DeviceConfig { interleaving: Some(interleaving), first_process: false, ..config() };
    let tables = r#"{"generations":[3],"tensors":[{"name":"w","dpa":0,"length":8192,"elements":4096,"shape":[4096],
        "format":"bf16","layout":{"kind":"weight"},"codec":"lz4","counters":4096}],
        "views":[{"tensor":"w","view":"full","offset":2097152,"counters":4103}],"loaded":[]}"#;
    let image = older_image(&config, 4096..4110, tables);
    let reported = |device: &Device| serde_json::to_value(device.stats()).unwrap();
    let device = Device::open(image.clone(), &config).unwrap();
    let stats = reported(&device);
    let traffic = |stats: &serde_json::Value, first: u64| {
        for (at, name) in (first..).zip([
            "reads",
            "bytes",
            "blocks",
            "planes_fetched",
            "stored_bytes_fetched",
            "plain_bytes_fetched",
            "gcomp_bytes_fetched",
        ]) {
            assert_eq!(stats[name], 1000 + at, "{name}");
        }
        for name in ["index_bytes_fetched", "gcomp_index_bytes_fetched", "staged_blocks", "staged_bytes"] {
            assert_eq!(stats[name], 0, "{name}");
        }
    };
    traffic(&stats["requests"]["base"], 21);
    traffic(&stats["requests"]["views"], 28);
    traffic(&stats["tensors"][0]["base"], 4096);
    traffic(&stats["views"][0], 4103);
    for (pointer, number) in [
        ("/windows/coded_plain", 35),
        ("/requests/directory_reads", 38),
        ("/writes/blocks_written", 41),
        ("/index/hits", 50),
        ("/index/misses", 51),
        ("/kv_windows/opened", 52),
        ("/device/panics", 57),
        ("/write_backs/refused_bytes", 60),
        ("/interleave/devices/0/reads", 61),
        ("/interleave/devices/1/stored_bytes_written", 72),
    ] {
        assert_eq!(*stats.pointer(pointer).unwrap(), 1000 + number, "{pointer}");
    }
    for pointer in ["/index/bytes_written", "/reads_for_writes/reads", "/maintenance/recoded_blocks"] {
        assert_eq!(*stats.pointer(pointer).unwrap(), 0, "{pointer}");
    }
    // What is counted now is counted in its own place, and the next process goes on from it.
    device.read_base(0, &mut [0; BLOCK]).unwrap();
    device.read_views(2 << 20, &mut [0; 2 * BLOCK]).unwrap();
    device.write_base(0, &[7; 64]).unwrap();
    let mut before = reported(&device);
    assert_eq!(before["tensors"][0]["base"]["index_bytes_fetched"], 64);
    assert_eq!(before["views"][0]["index_bytes_fetched"], 64, "the first block's entry is held");
    assert_eq!(before["views"][0]["reads"], 1000 + 4103 + 1);
    assert_eq!(before["requests"]["views"]["gcomp_index_bytes_fetched"], 64);
    assert_eq!(before["reads_for_writes"]["reads"], 1);
    assert_eq!(before["requests"]["base_fills"][0]["fills"], 1);
    assert_eq!(before["requests"]["view_fills"][1]["fills"], 1);
    drop(device);
    let mut after = reported(&Device::open(image.clone(), &config).unwrap());
    let mut requests = Vec::new();
    for stats in [&mut before, &mut after] {
        stats["device"]["uptime_seconds"].take();
        // An image does not keep it.
        let latency = stats["latency"].take();
        let counts = latency.as_array().unwrap().iter().map(|row| row["seconds"]["count"].clone());
        requests.push(counts.collect::<Vec<_>>());
    }
    assert_eq!(requests, [[1, 1, 1], [0, 0, 0]]);
    assert_eq!(before, after);
    // A run that begins counts from zero.
    let first = DeviceConfig { first_process: true, ..config };
    let stats = reported(&Device::open(image, &first).unwrap());
    assert_eq!(stats["views"][0]["index_bytes_fetched"], 0);
    assert_eq!(stats["requests"]["view_fills"][1]["fills"], 0);
    assert_eq!(stats["tensors"][0]["base"]["reads"], 0);
}

#[test]
fn maintenance_is_counted_apart() {
    let device = Device::new(config()).unwrap();
    let reported = |device: &Device| serde_json::to_value(device.stats()).unwrap();
    device.write_base(0, &bytes(2, 4 * BLOCK)).unwrap();
    // Channels of very different sizes, so that the window is coded by them.
    let noise = bytes(1, 2 * BLOCK);
    let channels = (0_u8..64).cycle().zip(&noise).flat_map(|(channel, noise)| [*noise, 0x20 + channel % 32]);
    let channels: Vec<u8> = channels.collect();
    device.write_base((BLOCKS / 2 * BLOCK) as u64, &channels).unwrap();
    let stored = device.stats().device.stored_bytes;
    let before = reported(&device);
    device.create_tensor(weights()).unwrap();
    device.create_tensor(cache()).unwrap();
    let after = reported(&device);
    assert_eq!(after["kv_windows"]["coded_plain"], 0);
    assert_eq!(before["writes"], after["writes"], "nobody stored anything");
    assert_eq!(before["reads_for_writes"], after["reads_for_writes"]);
    let maintenance = &after["maintenance"];
    assert_eq!(maintenance["recoded_blocks"], 8);
    assert_eq!(maintenance["stored_bytes_fetched"], stored);
    assert_eq!(maintenance["stored_bytes_written"], device.stats().device.stored_bytes);
    assert_eq!(maintenance["index_bytes_fetched"], 0, "all their entries are held");
    let written = |stats: &serde_json::Value| stats["index"]["bytes_written"].as_u64().unwrap();
    assert_eq!(written(&after) - written(&before), 8 * 64);
    // Each is read and coded again as the windows go.
    device.remove_tensor("kv").unwrap();
    assert_eq!(reported(&device)["maintenance"]["recoded_blocks"], 12);
    assert_eq!(before["writes"], reported(&device)["writes"]);
}

#[test]
fn blocks_that_are_moved_are_counted_apart() {
    let size = 4 << 20;
    let config =
        DeviceConfig { store_bytes: Some(size), codec: Codec::Lz4, ..DeviceConfig::new(size, 16 << 20) };
    let device = Device::new(config).unwrap();
    // Blocks of which every other one is dropped leave chunks half empty.
    let blocks = 600;
    for block in 0..blocks {
        device.write_base((block * BLOCK) as u64, &bytes(2 + 4 * block as u64, BLOCK)).unwrap();
    }
    for block in (0..blocks).step_by(2) {
        device.discard((block * BLOCK) as u64, BLOCK as u64).unwrap();
    }
    let before = device.stats();
    let mut moved = 0;
    while device.coded_store().unwrap().compact() {
        moved += 1;
    }
    let after = device.stats();
    let blocks = after.maintenance.moved_blocks - before.maintenance.moved_blocks;
    let bytes = after.maintenance.moved_bytes - before.maintenance.moved_bytes;
    assert!(after.maintenance.moved_blocks > 0, "{moved} chunks");
    assert_eq!(after.index.bytes_written - before.index.bytes_written, 64 * blocks);
    assert!(bytes >= 64 * blocks && bytes <= 4096 * blocks && bytes.is_multiple_of(64));
    assert_eq!(serde_json::to_value(&before.writes).unwrap(), serde_json::to_value(&after.writes).unwrap());
}

#[test]
fn images_with_tables_of_nonsense_are_refused() {
    let refused = |text: &str| {
        let image = new_image(&Failpoints::none());
        lamina_store::tables::Tables::replace(&image, text.as_bytes()).unwrap();
        Device::open(image, &config()).err().expect("it is nonsense").to_string()
    };
    let tensor = |name: &str, dpa: u64| {
        format!(
            r#"{{"name":"{name}","dpa":{dpa},"length":8192,"elements":4096,"shape":[4096],"format":"bf16","layout":{{"kind":"weight"}},"codec":"lz4"}}"#
        )
    };
    let tables = |tensors: &[String], views: &str| {
        format!(r#"{{"generations":[1],"tensors":[{}],"views":[{views}],"loaded":[]}}"#, tensors.join(","))
    };
    assert!(refused("{}").contains("tables"));
    assert!(refused(&tables(&[tensor("a", 1 << 40)], "")).contains("lies at DPA"));
    assert!(refused(&tables(&[tensor("a", 0), tensor("b", 4096)], "")).contains("overlap"));
    let view = r#"{"tensor":"b","view":"e8m3","offset":2097152}"#;
    assert!(refused(&tables(&[tensor("a", 0)], view)).contains("none of the tensors"));
    let view = r#"{"tensor":"a","view":"e8m3","offset":18446744073709551615}"#;
    assert!(refused(&tables(&[tensor("a", 0)], view)).contains("lies at"));
    // Bases that are not there, that are others, or that go round in a circle.
    let against = |name: &str, dpa: u64, base: &str| {
        let kind = format!(r#""kind":"derived","base":"{base}""#);
        tensor(name, dpa).replace(r#""kind":"weight""#, &kind)
    };
    assert!(refused(&tables(&[against("a", 0, "b")], "")).contains("no tensor is called that"));
    let other = tensor("b", 8192).replace("bf16", "fp16");
    assert!(refused(&tables(&[against("a", 0, "b"), other], "")).contains("that has 4096 elements of fp16"));
    let circle = [against("a", 0, "b"), against("b", 8192, "a")];
    assert!(refused(&tables(&circle, "")).contains("no tensor has more"));
    assert!(refused(&tables(&[against("a", 0, "a")], "")).contains("no tensor has more"));
}

#[test]
fn what_several_threads_find_is_counted_as_it_was() {
    // Blocks far from each other, so that their entries lie in parts of the index that are looked
    // at each by itself.
    let (far, count) = (8 << 20, 48_u64);
    let config = DeviceConfig { codec: Codec::Tree, ..DeviceConfig::new(far * count, 64 << 20) };
    let image = Image::in_memory(config.superblock()).unwrap();
    let device = Device::open(image.clone(), &config).unwrap();
    let tensor = |name: &str, dpa, format| TensorSpec {
        name: name.into(),
        dpa: Some(dpa),
        length: 16 * far,
        format,
        ..weights()
    };
    device.create_tensor(tensor("a", 0, Format::Bf16)).unwrap();
    device.create_tensor(tensor("b", 20 * far, Format::Fp32)).unwrap();
    for place in 0..count {
        device.write_base(place * far, &bytes(place, 5 * BLOCK)).unwrap();
    }
    device.inject_poison(3 * far, 1).unwrap();
    let reported = |device: &Device| {
        let mut stats = serde_json::to_value(device.stats()).unwrap();
        let reported = ["device", "blocks", "tensors"].map(|part| stats[part].take());
        let used = device.blocks.used_bytes();
        let mut text = serde_json::to_value((reported, used)).unwrap();
        text[0][0]["uptime_seconds"] = 0.into();
        text
    };
    let before = reported(&device);
    assert!(before[1].as_u64().unwrap() > 0, "{before}");
    drop(device);
    let device = Device::open(image, &config).unwrap();
    assert_eq!(reported(&device), before);
    assert_eq!(device.poison().len(), 1);
    let mut found = vec![0; 5 * BLOCK];
    device.read_base(7 * far, &mut found).unwrap();
    assert_eq!(found, bytes(7, 5 * BLOCK));
}

/// A file with these pages.
fn file_of(pages: &Pages, length: u64) -> std::fs::File {
    use std::os::unix::fs::FileExt as _;
    let file = nix::sys::memfd::memfd_create("crashed", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    file.set_len(length).unwrap();
    for (page, bytes) in pages {
        file.write_all_at(bytes, page * 4096).unwrap();
    }
    file
}

/// An image as who opens it next finds it.
fn again(image: &Image) -> Image {
    let file = image.file().try_clone().unwrap();
    Image::from_file(file, std::path::Path::new("again")).unwrap().unwrap().on_disk()
}

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
        Device::open(again(&self.image).beside(self.ledger.try_clone().unwrap()), &config).unwrap()
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
        let length = self.image.file().metadata().unwrap().len();
        let file = file_of(&left, length);
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
    device.write_base(0, &bytes(7, 3 * BLOCK)).unwrap();
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

#[test]
fn an_image_with_both_tables_damaged_is_refused_and_left_as_it_is() {
    for is_on_disk in [false, true] {
        let failpoints = Failpoints::none();
        let image = new_image(&failpoints);
        let image = if is_on_disk { image.on_disk() } else { image };
        let device = Device::open(image.clone(), &config()).unwrap();
        device.write_base(0, &bytes(5, BLOCKS * BLOCK)).unwrap();
        drop(device);
        let image = if is_on_disk { again(&image) } else { image };
        let [_, tables, ..] = image.parts();
        for place in [tables.start, tables.start + (tables.end - tables.start) / 2] {
            std::os::unix::fs::FileExt::write_all_at(image.file(), b"!", place + 64).unwrap();
        }
        let before = pages(image.file());
        let why = Device::open(image.clone(), &config()).err().expect("it was tensors'").to_string();
        assert!(why.contains("neither of the two copies") && why.contains("snapshot restore"), "{why}");
        assert!(before == pages(image.file()));
    }
}

/// Stores while a snapshot is taken from it.
struct Meanwhile<'d, F> {
    stream: Vec<u8>,
    device: &'d Device,
    store: F,
}

impl<F: FnMut(&Device, usize)> std::io::Write for Meanwhile<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        (self.store)(self.device, self.stream.len());
        self.stream.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn restored(stream: &[u8], config: &DeviceConfig) -> Device {
    let file = file_of(&Pages::new(), 0);
    lamina_store::snapshot::fill(&mut &*stream, &file).unwrap();
    Device::open(Image::from_file(file, std::path::Path::new("restored")).unwrap().unwrap(), config).unwrap()
}

#[test]
fn a_snapshot_is_of_one_moment_and_nobody_who_stores_waits_for_who_reads_it() {
    for is_on_disk in [false, true] {
        let image = new_image(&Failpoints::none());
        let image = if is_on_disk { image.on_disk() } else { image };
        let device = Device::open(image, &config()).unwrap();
        device.write_base(0, &bytes(5, BLOCKS * BLOCK)).unwrap();
        device.flush(0, device.base_bytes()).unwrap();
        let (model, tensors) = (read_all(&device), device.tensors());
        let mut round = 0;
        // All that may happen, between any two of its writes.
        let store = |device: &Device, _: usize| {
            round += 1;
            device.write_base(0, &bytes(8 * round + 2, BLOCKS * BLOCK)).unwrap();
            device.inject_poison(round % 24 * BLOCK as u64, 1).unwrap();
            device.flip_stored_bit((round + 7) % 24, 100);
            assert!(read_all(device).len() == BLOCKS * BLOCK);
            perform(device, &Operation::Toggle).unwrap();
            device.discard(((round + 5) % 24) * BLOCK as u64, 3 * BLOCK as u64).unwrap();
            device.sync().unwrap();
        };
        let mut out = Meanwhile { stream: Vec::new(), device: &device, store };
        device.save(&mut out).unwrap();
        let stream = out.stream;
        assert!(round > 10);
        let copy = restored(&stream, &config());
        assert!(read_all(&copy) == model);
        assert_eq!((copy.tensors(), copy.poison()), (tensors, Vec::new()));
        // Nothing is held any more, and there is another one.
        device.sync().unwrap();
        device.discard(0, device.base_bytes()).unwrap();
        device.flush(0, device.base_bytes()).unwrap();
        device.sync().unwrap();
        assert_eq!(device.blocks.used_bytes(), 0);
        assert!(device.save(&mut Vec::new()).is_ok());
    }
}

#[test]
fn a_snapshot_that_would_keep_others_from_storing_is_given_up() {
    for is_on_disk in [false, true] {
        Failpoints::none().make_current();
        let config = DeviceConfig { store_bytes: Some(8 << 20), ..DeviceConfig::new(16 << 20, 16 << 20) };
        let image = Image::in_memory(config.superblock()).unwrap();
        let image = if is_on_disk { image.on_disk() } else { image };
        let device = Device::open(image, &config).unwrap();
        let block = |at: u64, round: u64| lamina_codec::testing::bytes(5 * (at * 64 + round + 1), BLOCK);
        let blocks = 1500;
        let fill = |round| {
            for at in 0..blocks {
                device.write_base(at * BLOCK as u64, &block(at, round)).unwrap();
            }
        };
        fill(0);
        let mut round = 0;
        let store = |_: &Device, _: usize| {
            if round < 4 {
                round += 1;
                fill(round);
            }
        };
        let mut out = Meanwhile { stream: Vec::new(), device: &device, store };
        let why = device.save(&mut out).unwrap_err().to_string();
        assert!(why.contains("was given up"), "{why}");
        let mut found = vec![0; BLOCK];
        for at in 0..blocks {
            device.read_base(at * BLOCK as u64, &mut found).unwrap();
            assert!(found == block(at, 4), "block {at}");
        }
        // There is room for another one when it is taken at once.
        assert!(device.save(&mut Vec::new()).is_ok());
    }
}
