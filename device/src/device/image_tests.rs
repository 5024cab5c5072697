//! A device in an image, killed between and within its stores, and on a disk that is full: nothing that was acknowledged is lost, and
//! no block is a mixture.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::*;
use crate::{
    format::Format,
    kv::KvLayout,
    layout::Layout,
    store::{
        StoreError,
        mishaps::{Killed, Mishaps},
    },
};

const BLOCK: usize = BLOCK_BYTES;
/// Blocks of the base window: the first half is a weight tensor's, then a KV tensor's windows, then nobody's.
const BLOCKS: usize = 48;

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
    /// Makes the KV tensor, or removes it.
    Toggle,
    View,
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
        1 => Just(Operation::Flush),
        1 => Just(Operation::Toggle),
        1 => Just(Operation::View),
    ]
}

/// Data that some codec makes smaller, some not, and some zeros.
fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let noise = crate::kv::tests::bytes(seed, length);
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

fn config() -> DeviceConfig {
    let config = DeviceConfig::new((BLOCKS * BLOCK) as u64, 16 << 20);
    DeviceConfig { open_windows: 2, codec: Codec::Tree, ..config }
}

fn new_image(mishaps: &Mishaps) -> Image {
    mishaps.make_current();
    let image = Image::in_memory(config().superblock()).unwrap();
    let device = Device::open(image.clone(), &config()).unwrap();
    device.create_tensor(weights()).unwrap();
    device.create_tensor(cache()).unwrap();
    image
}

fn range_of(operation: &Operation) -> Option<(usize, Vec<u8>)> {
    match operation {
        Operation::Write { at, length, seed } => Some((*at, bytes(*seed, *length))),
        Operation::Discard { at, length } => Some((*at, vec![0; *length])),
        _ => None,
    }
}

fn perform(device: &Device, operation: &Operation) -> Result<(), DeviceError> {
    match operation {
        Operation::Write { at, length, seed } => device.write_base(*at as u64, &bytes(*seed, *length)),
        Operation::Discard { at, length } => device.discard(*at as u64, *length as u64),
        Operation::Flush => device.flush(0, device.base_bytes()),
        Operation::Toggle if device.tensors().len() == 2 => device.remove_tensor("kv"),
        Operation::Toggle => device.create_tensor(cache()).map(drop),
        Operation::View => device.create_view("w", "e8m3").map(drop),
    }
}

fn read_all(device: &Device) -> Vec<u8> {
    let mut all = vec![0xa5; BLOCKS * BLOCK];
    device.read_base(0, &mut all).unwrap();
    all
}

/// What a device says it stores is what a process that finds its image counts.
fn agree(device: &Device) {
    let found = Device::open(device.image().unwrap().clone(), &config()).unwrap();
    let stored = |device: &Device| {
        let stats = device.stats();
        let tensors: Vec<_> = stats.tensors.iter().map(|tensor| tensor.stored_bytes).collect();
        (serde_json::to_value(&stats.blocks).unwrap(), tensors, device.blocks.used_bytes())
    };
    assert_eq!(stored(device), stored(&found));
}

/// Each block of `found` is the one of `before` or the one of `after`; `found` is what holds from now on.
fn settle(before: &mut Vec<u8>, after: &[u8], found: Vec<u8>) {
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
        operations in prop::collection::vec((operation(), prop_oneof![0..40_i64, 0..400_i64]), 1..40),
    ) {
        let mishaps = Mishaps::none();
        let image = new_image(&mishaps);
        let mut model = vec![0; BLOCKS * BLOCK];
        let mut device = Device::open(image.clone(), &config()).unwrap();
        for (operation, stores) in operations {
            let mut after = model.clone();
            if let Some((at, data)) = range_of(&operation) {
                after[at..at + data.len()].copy_from_slice(&data);
            }
            mishaps.kill_after(stores);
            let done = catch_unwind(AssertUnwindSafe(|| perform(&device, &operation)));
            mishaps.kill_after(i64::MAX);
            match done {
                Ok(done) => {
                    done.unwrap();
                    model = after;
                    prop_assert!(read_all(&device) == model);
                }
                Err(why) => {
                    prop_assert!(why.is::<Killed>(), "it died of something else");
                    // Nothing of the killed process goes on, not even what ends its values.
                    std::mem::forget(device);
                    device = Device::open(image.clone(), &config()).unwrap();
                    settle(&mut model, &after, read_all(&device));
                }
            }
            agree(&device);
        }
        drop(device);
        let device = Device::open(image, &config()).unwrap();
        prop_assert!(read_all(&device) == model);
        device.flush(0, device.base_bytes()).unwrap();
        agree(&device);
        prop_assert!(read_all(&device) == model);
        // Everything can be given back: no segment was lost on the way.
        device.discard(0, device.base_bytes()).unwrap();
        device.flush(0, device.base_bytes()).unwrap();
        prop_assert_eq!(device.blocks.used_bytes(), 0);
    }

    #[test]
    fn a_full_disk_is_an_error_and_loses_nothing(
        operations in prop::collection::vec((operation(), 0..3_i64), 1..40),
    ) {
        let mishaps = Mishaps::none();
        let image = new_image(&mishaps);
        let mut model = vec![0; BLOCKS * BLOCK];
        let device = Device::open(image.clone(), &config()).unwrap();
        for (operation, room) in operations {
            let mut after = model.clone();
            if let Some((at, data)) = range_of(&operation) {
                after[at..at + data.len()].copy_from_slice(&data);
            }
            mishaps.limit_room(room);
            let done = perform(&device, &operation);
            mishaps.limit_room(i64::MAX);
            match done {
                Ok(()) => model = after,
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

#[test]
fn tables_and_views_are_found_again() {
    let image = new_image(&Mishaps::none());
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
    let image = new_image(&Mishaps::none());
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
    let image = new_image(&Mishaps::none());
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
    crate::store::tables::Tables::open(&image).unwrap().0.save(nothing.as_bytes()).unwrap();
    let device = Device::open(image, &config()).unwrap();
    let found = read_all(&device);
    assert_eq!(found[at..at + BLOCK], [poison::PATTERN; BLOCK]);
    assert!(!device.poison().is_empty());
}

/// The image of a program that did not know the later counters: number n of it says 1000 + n.
fn older_image(config: &DeviceConfig, others: Range<usize>, tables: &str) -> Image {
    let image = Image::in_memory(config.superblock()).unwrap();
    let counters = crate::store::counters::Counters::open(&image, false, others.end).unwrap();
    for number in 0..OLDER_COUNTERS as u64 {
        counters.take().unwrap().add(1000 + number);
    }
    for number in others {
        counters.kept_others(number).unwrap().add(1000 + number as u64);
    }
    crate::store::tables::Tables::open(&image).unwrap().0.save(tables.as_bytes()).unwrap();
    image
}

/// Counters of an undivided device before any were added: of its one part, then its own, then two interleaved devices'.
const OLDER_COUNTERS: usize = 21 + 40 + 12;

#[test]
fn counters_of_an_older_image_lie_where_they_lay() {
    let interleaving = crate::stats::Interleaving { interleave: "2x256".parse().unwrap(), bandwidth: 1.0 };
    let config = DeviceConfig { interleaving: Some(interleaving), first_process: false, ..config() };
    let tables = r#"{"generations":[3],"tensors":[{"name":"w","dpa":0,"length":8192,"elements":4096,"shape":[4096],
        "format":"bf16","layout":{"kind":"weight"},"codec":"lz4","counters":4096}],
        "views":[{"tensor":"w","view":"full","offset":2097152,"counters":4103}],"loaded":[]}"#;
    let image = older_image(&config, 4096..4110, tables);
    let told = |device: &Device| serde_json::to_value(device.stats()).unwrap();
    let device = Device::open(image.clone(), &config).unwrap();
    let stats = told(&device);
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
        ("/windows/opened", 52),
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
    let mut before = told(&device);
    assert_eq!(before["tensors"][0]["base"]["index_bytes_fetched"], 64);
    assert_eq!(before["views"][0]["index_bytes_fetched"], 64, "the first block's entry is held");
    assert_eq!(before["views"][0]["reads"], 1000 + 4103 + 1);
    assert_eq!(before["requests"]["views"]["gcomp_index_bytes_fetched"], 64);
    assert_eq!(before["reads_for_writes"]["reads"], 1);
    assert_eq!(before["requests"]["base_fills"][0]["fills"], 1);
    assert_eq!(before["requests"]["view_fills"][1]["fills"], 1);
    drop(device);
    let mut after = told(&Device::open(image.clone(), &config).unwrap());
    for stats in [&mut before, &mut after] {
        stats["device"]["uptime_seconds"].take();
    }
    assert_eq!(before, after);
    // A run that begins counts from zero.
    let first = DeviceConfig { first_process: true, ..config };
    let stats = told(&Device::open(image, &first).unwrap());
    assert_eq!(stats["views"][0]["index_bytes_fetched"], 0);
    assert_eq!(stats["requests"]["view_fills"][1]["fills"], 0);
    assert_eq!(stats["tensors"][0]["base"]["reads"], 0);
}

#[test]
fn maintenance_is_counted_apart() {
    let device = Device::new(config()).unwrap();
    let told = |device: &Device| serde_json::to_value(device.stats()).unwrap();
    let both = [0, BLOCKS / 2 * BLOCK];
    for at in both {
        device.write_base(at as u64, &bytes(2, 4 * BLOCK)).unwrap();
    }
    let stored = device.stats().device.stored_bytes;
    let before = told(&device);
    device.create_tensor(weights()).unwrap();
    device.create_tensor(cache()).unwrap();
    let after = told(&device);
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
    assert_eq!(told(&device)["maintenance"]["recoded_blocks"], 12);
    assert_eq!(before["writes"], told(&device)["writes"]);
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
        let image = new_image(&Mishaps::none());
        crate::store::tables::Tables::open(&image).unwrap().0.save(text.as_bytes()).unwrap();
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
}

#[test]
fn what_several_threads_find_is_counted_as_it_was() {
    // Blocks far from each other, so that their entries lie in parts of the index that are looked at each by itself.
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
    let told = |device: &Device| {
        let mut stats = serde_json::to_value(device.stats()).unwrap();
        let told = ["device", "blocks", "tensors"].map(|part| stats[part].take());
        let used = device.blocks.used_bytes();
        let mut text = serde_json::to_value((told, used)).unwrap();
        text[0][0]["uptime_seconds"] = 0.into();
        text
    };
    let before = told(&device);
    assert!(before[1].as_u64().unwrap() > 0, "{before}");
    drop(device);
    let device = Device::open(image, &config).unwrap();
    assert_eq!(told(&device), before);
    assert_eq!(device.poison().len(), 1);
    let mut found = vec![0; 5 * BLOCK];
    device.read_base(7 * far, &mut found).unwrap();
    assert_eq!(found, bytes(7, 5 * BLOCK));
}
