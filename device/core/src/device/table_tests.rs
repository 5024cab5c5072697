//! Tensors that come and go over memory that holds data, while others write and read it, and while
//! room runs out.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lamina_abi::DIRECTORY_BYTES;

use super::*;
use crate::layout::Layout;
use lamina_codec::{format::Format, kv::KvLayout, testing::bytes as noise};
use lamina_store::{StoreError, failpoints::Failpoints, image::Image};

const BLOCK: u64 = BLOCK_BYTES as u64;

fn spec(name: &str, dpa: u64, length: u64, format: Format, layout: Layout) -> TensorSpec {
    let (name, dpa, codec) = (name.to_owned(), Some(dpa), None);
    TensorSpec { name, dpa, length, elements: None, shape: Vec::new(), format, layout, codec, base: None }
}

fn weights(name: &str, dpa: u64, length: u64) -> TensorSpec {
    spec(name, dpa, length, Format::Bf16, Layout::Weight)
}

fn cache(name: &str, dpa: u64, length: u64) -> TensorSpec {
    spec(name, dpa, length, Format::Bf16, Layout::Kv(KvLayout::rows(64, 128)))
}

/// Rows of 64 bf16 channels, of which each has its own size: a KV window of them is coded channel
/// by channel.
fn rows(seed: u64, length: u64) -> Vec<u8> {
    let noise = noise(seed * 5, usize::try_from(length).unwrap());
    let element = |(at, noise): (usize, &[u8])| {
        let exponent = 90 + u16::try_from(at % 64 * 37 % 29).unwrap() + u16::from(noise[1] & 3);
        (exponent << 7 | u16::from(noise[0] >> 1) | u16::from(noise[1] & 0x80) << 8).to_le_bytes()
    };
    noise.chunks(2).enumerate().flat_map(element).collect()
}

/// Bytes that a word codec makes much smaller than planes: noise that repeats, but at no whole
/// number of elements.
fn repeats(seed: u64, length: u64) -> Vec<u8> {
    let period = noise(seed, 77);
    (0..usize::try_from(length).unwrap()).map(|at| period[at % 77]).collect()
}

fn read(device: &Device, offset: u64, length: u64) -> Vec<u8> {
    let mut out = vec![0xa5; usize::try_from(length).unwrap()];
    device.read_base(offset, &mut out).unwrap();
    out
}

/// That every account is the sum of what its blocks are charged.
fn accounts_are_exact(device: &Device) {
    let map = device.map();
    let (mut live, mut opaque, mut stored) = (0, (0, 0), vec![(0, 0); map.tensors().count()]);
    for block in 0..device.base_bytes() / BLOCK {
        let charge = device.charged(block);
        live += u64::from(charge.live);
        match map.tensors().position(|t| (t.info.dpa..t.end()).contains(&(block * BLOCK))) {
            Some(at) => stored[at] = (stored[at].0 + u64::from(charge.live), stored[at].1 + charge.bytes()),
            None => opaque = (opaque.0 + u64::from(charge.live), opaque.1 + charge.bytes()),
        }
    }
    let reported: Vec<_> = map.tensors().map(|tensor| (tensor.live.get(), tensor.stored.get())).collect();
    assert_eq!(reported, stored);
    let stats = &device.accounts.stats;
    let reported = (stats.live_blocks.get(), stats.opaque_blocks.get(), stats.opaque_stored.get());
    assert_eq!(reported, (live, opaque.0, opaque.1));
    if device.coded_store().is_some() {
        assert_eq!(device.blocks.used_bytes(), opaque.1 + stored.iter().map(|(_, bytes)| bytes).sum::<u64>());
    }
}

/// What can be told of a device's tensors: lists, directory, and what everybody is charged.
fn reported(device: &Device) -> (Vec<TensorInfo>, Vec<ViewInfo>, Vec<u8>, serde_json::Value) {
    let mut directory = vec![0; usize::try_from(DIRECTORY_BYTES).unwrap()];
    device.read_views(0, &mut directory).unwrap();
    let stats = serde_json::to_value(device.stats()).unwrap();
    let mut charged = serde_json::json!([stats["device"], stats["blocks"], stats["tensors"], stats["views"]]);
    charged[0]["uptime_seconds"] = 0.into();
    charged[0]["host_memory_left_bytes"] = 0.into();
    (device.tensors(), device.views(), directory, charged)
}

#[test]
fn a_tensor_removed_and_made_again_otherwise_while_it_is_coded_keeps_its_bytes() {
    const BYTES: u64 = 16 << 20;
    let device = Device::new(DeviceConfig::new(BYTES, 64 << 20)).unwrap();
    let data = rows(1, BYTES);
    device.write_base(0, &data).unwrap();
    for round in 0..3 {
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.store(true, Ordering::Release);
                device.create_tensor(weights("first", 0, BYTES)).unwrap();
            });
            scope.spawn(|| {
                while !begun.load(Ordering::Acquire) || device.remove_tensor("first").is_err() {
                    std::thread::yield_now();
                }
                // Where the first has not come to yet.
                device.create_tensor(cache("second", BYTES / 4 * 3, BYTES / 4)).unwrap();
            });
        });
        assert!(read(&device, 0, BYTES) == data, "round {round}");
        assert_eq!(device.poison(), []);
        accounts_are_exact(&device);
        device.remove_tensor("second").unwrap();
        assert!(read(&device, 0, BYTES) == data, "round {round}");
        accounts_are_exact(&device);
    }
}

#[test]
fn tensors_come_and_go_in_all_layouts_under_writers_and_readers() {
    come_and_go(Mode::Trace, 60);
    come_and_go(Mode::GComp, 10);
    come_and_go(Mode::Plain, 10);
}

fn come_and_go(mode: Mode, rounds: u64) {
    const BLOCKS: u64 = 96;
    let config = DeviceConfig {
        mode,
        open_windows: 3,
        decoded_bytes: 64 << 10,
        ..DeviceConfig::new(BLOCKS * BLOCK, 64 << 20)
    };
    let device = Device::new(config).unwrap();
    let data = rows(2, BLOCKS * BLOCK);
    device.write_base(0, &data).unwrap();
    // Each of two writers has every other stretch of three blocks, which is no whole number of
    // windows.
    let (done, arrays) = (AtomicBool::new(false), [0, 1].map(|_| parking_lot::Mutex::new(data.clone())));
    let mine = |writer: u64, at: u64| (at / BLOCK / 3) % 2 == writer;
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let (device, done, array) = (&device, &done, &arrays[usize::try_from(writer).unwrap()]);
            scope.spawn(move || {
                let mut array = array.lock();
                let mut round = 0;
                while !done.load(Ordering::Relaxed) {
                    round += 1;
                    let seeds = noise(round * 7 + writer, 24);
                    let place = u64::from(seeds[9]) * 256 + u64::from(seeds[17]);
                    let stretch = place % (BLOCKS / 6) * 6 + 3 * writer;
                    let begin = stretch * BLOCK + u64::from(seeds[3] & 3) * u64::from(seeds[5]) * 16;
                    let most = (stretch + 3) * BLOCK - begin;
                    let length = if seeds[7] & 1 == 0 { most } else { 1 + place % most };
                    let bytes = rows(round, length.next_multiple_of(2));
                    let bytes = &bytes[..usize::try_from(length).unwrap()];
                    let at = usize::try_from(begin).unwrap();
                    if seeds[11].trailing_zeros() >= 4 {
                        device.discard(begin, length).unwrap();
                        array[at..at + bytes.len()].fill(0);
                    } else {
                        device.write_base(begin, bytes).unwrap();
                        array[at..at + bytes.len()].copy_from_slice(bytes);
                    }
                    let from = stretch * BLOCK;
                    let (at, want) = (usize::try_from(from).unwrap(), usize::try_from(3 * BLOCK).unwrap());
                    assert!(
                        read(device, from, 3 * BLOCK) == array[at..at + want],
                        "round {round} at {from:#x}"
                    );
                    if round % 17 == 0 {
                        device.flush(from, 3 * BLOCK).unwrap();
                    }
                }
            });
        }
        // Views of whatever is there: what they show moves, but reading them neither fails nor
        // hangs.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for tensor in device.tensors() {
                    let Ok(view) = device.create_view(&tensor.name, "full") else { continue };
                    device
                        .read_views(view.offset, &mut vec![0; usize::try_from(view.length).unwrap()])
                        .unwrap();
                }
            }
        });
        let finished = AtomicU64::new(0);
        std::thread::scope(|makers| {
            for maker in 0..2_u64 {
                let (device, finished) = (&device, &finished);
                makers.spawn(move || {
                    for round in 0..rounds {
                        let name = format!("t{}", (round + maker) % 3);
                        let (dpa, length) = [(0, 96), (0, 50), (7, 41), (50, 46), (33, 4)]
                            [usize::try_from((round * 3 + maker * 2) % 5).unwrap()];
                        let layout = match (round + maker) % 4 {
                            0 => Layout::Weight,
                            1 => Layout::Kv(KvLayout::rows(64, 128)),
                            2 => Layout::Kv(KvLayout::rows(100, 50)),
                            _ => Layout::Kv(KvLayout::rows(64, 32)),
                        };
                        let format = if round % 5 == 0 { Format::Fp32 } else { Format::Bf16 };
                        match device.create_tensor(spec(&name, dpa * BLOCK, length * BLOCK, format, layout)) {
                            Ok(_) | Err(DeviceError::Tensor(_)) => {}
                            Err(other) => panic!("{other}"),
                        }
                        for name in ["t0", "t1", "t2"].iter().skip(usize::from(round % 2 == 0)) {
                            match device.remove_tensor(name) {
                                Ok(()) | Err(DeviceError::Tensor(_)) => {}
                                Err(other) => panic!("{other}"),
                            }
                        }
                    }
                    finished.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        done.store(true, Ordering::Relaxed);
        assert_eq!(finished.load(Ordering::Relaxed), 2);
    });
    let arrays = arrays.map(parking_lot::Mutex::into_inner);
    let check = || {
        for (at, byte) in (0_u64..).zip(read(&device, 0, BLOCKS * BLOCK)) {
            let array = &arrays[usize::from(mine(1, at))];
            assert_eq!(byte, array[usize::try_from(at).unwrap()], "at {at:#x}");
        }
        accounts_are_exact(&device);
    };
    device.flush(0, BLOCKS * BLOCK).unwrap();
    check();
    for name in device.tensors().into_iter().map(|tensor| tensor.name) {
        device.remove_tensor(&name).unwrap();
    }
    assert_eq!(device.stats().blocks.heads_bytes, 0);
    assert_eq!(device.poison(), []);
    check();
}

/// A device that is full, and whose first blocks take many times more when they are coded in
/// planes.
fn full(image: Option<&Image>, config: &DeviceConfig) -> (Device, Vec<u8>) {
    let device =
        image.map_or_else(|| Device::new(config.clone()), |image| Device::open(image.clone(), config));
    let device = device.unwrap();
    let mut data = repeats(3, 96 * BLOCK);
    device.write_base(0, &data).unwrap();
    data.resize(usize::try_from(device.base_bytes()).unwrap(), 0);
    let mut block = 96;
    loop {
        let bytes = noise(block * 5, BLOCK_BYTES);
        match device.write_base(block * BLOCK, &bytes) {
            Ok(()) => data[usize::try_from(block * BLOCK).unwrap()..][..BLOCK_BYTES].copy_from_slice(&bytes),
            Err(DeviceError::Store(StoreError::Full { .. }) | DeviceError::Quota { .. }) => break,
            Err(other) => panic!("{other}"),
        }
        block += 1;
    }
    (device, data)
}

#[test]
fn a_creation_that_finds_no_room_while_it_codes_is_as_if_never_asked() {
    let config = DeviceConfig {
        store_bytes: Some(2 << 20),
        codec: Codec::Lz4,
        ..DeviceConfig::new(4 << 20, 64 << 20)
    };
    for kept in [false, true] {
        for make in [weights, cache] {
            let image = kept.then(|| Image::in_memory(config.superblock()).unwrap());
            let (device, data) = full(image.as_ref(), &config);
            device.create_tensor(weights("other", 3 << 20, 4096)).unwrap();
            device.create_view("other", "e8m3").unwrap();
            let before = reported(&device);
            let why = device.create_tensor(make("t", 0, 96 * BLOCK)).unwrap_err();
            assert!(matches!(why, DeviceError::Store(StoreError::Full { .. })), "{why}");
            assert_eq!(reported(&device), before);
            assert!(read(&device, 0, data.len() as u64) == data);
            accounts_are_exact(&device);
            // The name and the place are free, and a tensor that fits comes there.
            device.create_tensor(spec("t", 0, 96 * BLOCK, Format::Opaque, Layout::Weight)).unwrap();
            device.remove_tensor("t").unwrap();
            assert!(read(&device, 0, data.len() as u64) == data);
            let tensors = device.tensors();
            drop(device);
            let Some(image) = image else { continue };
            let device = Device::open(image, &config).unwrap();
            assert_eq!(device.tensors(), tensors);
            assert!(read(&device, 0, data.len() as u64) == data);
            accounts_are_exact(&device);
        }
    }
}

#[test]
fn a_creation_that_the_quota_stops_is_as_if_never_asked() {
    let partition = |name: &str, quota_bytes| PartitionConfig {
        name: name.to_owned(),
        base_bytes: 2 << 20,
        views_bytes: 8 << 20,
        quota_bytes,
    };
    let partitions = vec![partition("a", Some(64 << 10)), partition("b", None)];
    let config = DeviceConfig { codec: Codec::Lz4, partitions, ..DeviceConfig::new(4 << 20, 16 << 20) };
    for make in [weights, cache] {
        let (device, data) = full(None, &config);
        let before = reported(&device);
        let why = device.create_tensor(make("a/t", 0, 96 * BLOCK)).unwrap_err();
        assert!(matches!(why, DeviceError::Quota { .. }), "{why}");
        assert_eq!(reported(&device), before);
        assert!(read(&device, 0, data.len() as u64) == data);
        accounts_are_exact(&device);
    }
}

#[test]
fn a_creation_that_finds_no_room_at_any_step_is_as_if_never_asked() {
    for make in [weights, cache] {
        let mut refused = 0;
        for room in 0.. {
            let failpoints = Failpoints::none();
            failpoints.make_current();
            let config = DeviceConfig { codec: Codec::Lz4, ..DeviceConfig::new(4 << 20, 64 << 20) };
            let image = Image::in_memory(config.superblock()).unwrap();
            let device = Device::open(image.clone(), &config).unwrap();
            let mut data = repeats(3, 64 * BLOCK);
            data.extend(rows(4, 32 * BLOCK));
            device.write_base(0, &data).unwrap();
            let before = reported(&device);
            failpoints.limit_space(room);
            let made = device.create_tensor(make("t", 0, 96 * BLOCK));
            failpoints.limit_space(i64::MAX);
            assert!(read(&device, 0, data.len() as u64) == data, "with room for {room}");
            accounts_are_exact(&device);
            let is_made = made.is_ok();
            if let Err(why) = made {
                assert!(matches!(&why, DeviceError::Store(why) if why.is_no_room()), "{why}");
                // What was coded anew takes what it takes, if there is no room to code it back.
                let now = reported(&device);
                assert!((now.0, now.1, now.2) == (before.0, before.1, before.2), "with room for {room}");
                refused += 1;
            }
            drop(device);
            let device = Device::open(image, &config).unwrap();
            assert_eq!(device.tensors().len(), usize::from(is_made), "with room for {room}");
            assert!(read(&device, 0, data.len() as u64) == data, "with room for {room}");
            accounts_are_exact(&device);
            if is_made {
                break;
            }
        }
        assert!(refused > 2, "{refused}");
    }
    Failpoints::none().make_current();
}

#[test]
fn a_kv_tensor_with_poisoned_windows_can_be_removed() {
    const WINDOW: u64 = 4 * BLOCK;
    let device = Device::new(DeviceConfig::new(1 << 20, 64 << 20)).unwrap();
    let tensor = device.create_tensor(cache("kv", 0, 8 * WINDOW)).unwrap();
    let data = rows(6, tensor.length);
    device.write_base(0, &data).unwrap();
    // One that somebody poisoned and that was read since, one that nobody has read, and one that is
    // damaged.
    device.inject_poison(WINDOW + BLOCK, 1).unwrap();
    assert!(read(&device, WINDOW + BLOCK, BLOCK).iter().all(|byte| *byte == poison::PATTERN));
    device.inject_poison(3 * WINDOW + 2 * BLOCK, 1).unwrap();
    device.flip_stored_bit(5 * 4 + 1, 20);
    device.remove_tensor("kv").unwrap();
    assert_eq!(device.tensors(), []);
    let found = read(&device, 0, tensor.length);
    let lost: Vec<_> = device.poison().iter().map(|poisoned| poisoned.dpa).collect();
    for sure in [WINDOW + BLOCK, 3 * WINDOW + 2 * BLOCK, 5 * WINDOW + BLOCK] {
        assert!(lost.contains(&sure), "{lost:x?}");
    }
    for at in (0..tensor.length).step_by(BLOCK_BYTES) {
        let here = usize::try_from(at).unwrap()..usize::try_from(at + BLOCK).unwrap();
        if lost.contains(&at) {
            assert!([1, 3, 5].contains(&(at / WINDOW)), "{at:#x} was not damaged");
            assert!(found[here].iter().all(|byte| *byte == poison::PATTERN), "{at:#x}");
        } else {
            assert!(found[here.clone()] == data[here], "{at:#x}");
        }
    }
    accounts_are_exact(&device);
    // What is lost is written again as any other.
    device.write_base(0, &data).unwrap();
    assert!(read(&device, 0, tensor.length) == data && device.poison().is_empty());
    accounts_are_exact(&device);
}

#[test]
fn a_tensor_over_holes_takes_no_memory_of_the_index() {
    use std::os::unix::fs::MetadataExt;
    for make in [weights, cache] {
        let config = DeviceConfig::new(4 << 30, 64 << 20);
        let image = Image::in_memory(config.superblock()).unwrap();
        let file = image.file().try_clone().unwrap();
        let device = Device::open(image, &config).unwrap();
        let tables = || {
            for _ in 0..2 {
                device.create_tensor(make("small", 0, BLOCK)).unwrap();
                device.remove_tensor("small").unwrap();
            }
        };
        tables();
        let data = rows(7, 8 * BLOCK);
        device.write_base(1 << 30, &data).unwrap();
        let taken = || file.metadata().unwrap().blocks() * 512;
        // What is stored may be stored elsewhere, in chunks of other lengths, but nothing more.
        let (before, most) = (taken(), 4 << 20);
        device.create_tensor(make("large", 0, 4 << 30)).unwrap();
        assert!(taken() <= before + most, "{} {before}", taken());
        assert!(read(&device, 1 << 30, data.len() as u64) == data);
        device.remove_tensor("large").unwrap();
        assert!(taken() <= before + most, "{} {before}", taken());
        assert!(read(&device, 1 << 30, data.len() as u64) == data);
    }
}

#[test]
fn the_map_is_held_alone_for_bounded_steps_whatever_the_size() {
    const MAX_WAIT: std::time::Duration = std::time::Duration::from_millis(2);
    const HELD: u64 = 256 << 20;
    let config = DeviceConfig::new(5 << 30, 64 << 20);
    let image = Image::in_memory(config.superblock()).unwrap();
    let device = Device::open(image, &config).unwrap();
    // Somewhere in the first 4 GiB, and everywhere in what is behind them.
    device.write_base(3 << 30, &rows(8, 16 * BLOCK)).unwrap();
    let data = rows(9, 1 << 20);
    (0..HELD >> 20).for_each(|at| device.write_base((4 << 30) + (at << 20), &data).unwrap());
    for (make, dpa, length) in [
        (weights as fn(&str, u64, u64) -> TensorSpec, 0, 4 << 30),
        (cache, 0, 4 << 30),
        (weights, 4 << 30, HELD),
        (cache, 4 << 30, HELD),
    ] {
        let longest = [0; 3].map(|_| {
            holds::longest();
            device.create_tensor(make("t", dpa, length)).unwrap();
            device.remove_tensor("t").unwrap();
            let (longest, blocks) = holds::longest();
            assert!((1..=tables::MAX_BLOCKS_A_HOLD).contains(&blocks), "{blocks}");
            longest
        });
        let mut sorted = longest;
        sorted.sort_unstable();
        assert!(sorted[1] < MAX_WAIT, "{longest:?} for {length} bytes");
    }
    let at = HELD / 2 + (4 << 30);
    assert!(read(&device, at, 1 << 20) == data);
}

#[test]
fn a_removal_that_fails_leaves_the_tensor_as_it_was() {
    const BYTES: u64 = 64 * BLOCK;
    let device = Device::new(DeviceConfig::new(1 << 20, 64 << 20)).unwrap();
    device.create_tensor(cache("kv", 0, BYTES)).unwrap();
    let view = device.create_view("kv", "e8m3").unwrap();
    let data = rows(10, BYTES);
    device.write_base(0, &data).unwrap();
    device.write_base(5, &data[5..10]).unwrap();
    for step in [holds::Step::Uncode, holds::Step::Forget] {
        let mut directory = vec![0; usize::try_from(DIRECTORY_BYTES).unwrap()];
        device.read_views(0, &mut directory).unwrap();
        holds::fail(Some(step));
        assert!(matches!(device.remove_tensor("kv"), Err(DeviceError::Full)));
        holds::fail(None);
        let (tensors, views, now, _) = reported(&device);
        assert_eq!((tensors.len(), views, now), (1, vec![view.clone()], directory), "{step:?}");
        assert!(read(&device, 0, BYTES) == data);
        accounts_are_exact(&device);
        // It is staged and coded as before.
        device.write_base(0, &data).unwrap();
        device.write_base(100, &data[100..200]).unwrap();
        let stats = device.stats();
        assert!(stats.blocks.heads_bytes > 0 && stats.kv_windows.open == 1, "{step:?}");
    }
    device.remove_tensor("kv").unwrap();
    assert!(read(&device, 0, BYTES) == data);
    accounts_are_exact(&device);
}

#[test]
fn a_creation_that_cannot_be_undone_stands() {
    let config = DeviceConfig {
        store_bytes: Some(2 << 20),
        codec: Codec::Lz4,
        ..DeviceConfig::new(4 << 20, 64 << 20)
    };
    let image = Image::in_memory(config.superblock()).unwrap();
    let (device, mut data) = full(Some(&image), &config);
    // Windows that are coded before one is not.
    let smaller = rows(11, 8 * BLOCK);
    device.discard(96 * BLOCK, 32 * BLOCK).unwrap();
    data[96 * BLOCK_BYTES..128 * BLOCK_BYTES].fill(0);
    device.write_base(0, &smaller).unwrap();
    data[..smaller.len()].copy_from_slice(&smaller);
    holds::fail(Some(holds::Step::Uncode));
    let codec = Some(Codec::Tree);
    let made = device.create_tensor(TensorSpec { codec, ..cache("kv", 0, 96 * BLOCK) });
    holds::fail(None);
    made.unwrap();
    let (tensors, _, directory, _) = reported(&device);
    assert_eq!(tensors.len(), 1);
    assert!(lamina_abi::decode(&directory).unwrap().tensors[0].name == "kv");
    assert!(device.stats().blocks.heads_bytes > 0);
    assert!(read(&device, 0, data.len() as u64) == data);
    accounts_are_exact(&device);
    drop(device);
    let device = Device::open(image, &config).unwrap();
    assert_eq!(device.tensors(), tensors);
    assert!(read(&device, 0, data.len() as u64) == data);
    accounts_are_exact(&device);
}

#[test]
fn who_cannot_wait_is_told_of_a_tensor_in_the_way_and_nothing_changes() {
    let device = Device::new(DeviceConfig::new(1 << 20, 16 << 20)).unwrap();
    device.create_tensor(weights("goes", 0, 8 * BLOCK)).unwrap();
    device.write_base(0, &noise(1, 8 * BLOCK_BYTES)).unwrap();
    let is_busy = |why: &DeviceError| matches!(why, DeviceError::Busy { tensor } if tensor == "goes");
    device
        .drop_tensor("goes", |dpa, length| -> Result<(), DeviceError> {
            for spec in [weights("over", 4 * BLOCK, 8 * BLOCK), weights("goes", 32 * BLOCK, BLOCK)] {
                let why = device.create_tensor_now(spec).unwrap_err();
                assert!(is_busy(&why), "{why}");
            }
            assert!(is_busy(&device.remove_tensor_now("goes").unwrap_err()));
            device.create_tensor_now(weights("beside", 8 * BLOCK, BLOCK))?;
            device.remove_tensor_now("beside")?;
            device.discard(dpa, length)
        })
        .unwrap();
    assert!(device.tensors().is_empty());
    device.create_tensor_now(weights("over", 4 * BLOCK, 8 * BLOCK)).unwrap();
    let why = device.create_tensor_now(weights("two", 0, 8 * BLOCK)).unwrap_err();
    assert!(matches!(why, DeviceError::Tensor(crate::tensor::TensorError::Overlap { .. })), "{why}");
    device.remove_tensor_now("over").unwrap();
    accounts_are_exact(&device);
}
