//! A device in an image, killed between and within its stores, and on a disk that is full: nothing
//! that was acknowledged is lost, and no block is a mixture.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::{
    death_tests::{ANYWHERE, Served, can_be_emptied, keeps_what_checkpoints_name},
    *,
};
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
pub(super) enum Operation {
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

pub(super) fn operation() -> impl Strategy<Value = Operation> {
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

pub(super) fn weights() -> TensorSpec {
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

pub(super) fn cache() -> TensorSpec {
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

pub(super) fn new_image(failpoints: &Failpoints) -> Image {
    failpoints.make_current();
    with_tensors(Image::in_memory(config().superblock()).unwrap())
}

pub(super) fn with_tensors(image: Image) -> Image {
    let device = Device::open(image.clone(), &config()).unwrap();
    device.create_tensor(weights()).unwrap();
    device.create_tensor(cache()).unwrap();
    image
}

/// Whether a block is poisoned, as nothing else here is made so.
fn is_lost(block: &[u8]) -> bool {
    block.iter().all(|byte| *byte == poison::PATTERN)
}

/// Where an operation changes what `before` holds, and to what.
pub(super) fn range_of(operation: &Operation, before: &[u8]) -> Option<(usize, Vec<u8>)> {
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

pub(super) fn perform(device: &Device, operation: &Operation) -> Result<(), DeviceError> {
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

pub(super) fn stored(device: &Device) -> (serde_json::Value, Vec<u64>, u64) {
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

pub(super) fn open_of(image: &Image, worker: Worker) -> Device {
    Device::open(image.clone(), &DeviceConfig { worker: Some(worker), ..config() }).unwrap()
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
pub(super) fn file_of(pages: &Pages, length: u64) -> std::fs::File {
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
pub(super) fn again(image: &Image) -> Image {
    let file = image.file().try_clone().unwrap();
    Image::from_file(file, std::path::Path::new("again")).unwrap().unwrap().on_disk()
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
