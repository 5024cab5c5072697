//! Lossy KV tensors: which windows are packed, what their tokens come back as, and what kills,
//! damage, neighbours and other tensors change of that.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use proptest::prelude::*;

use super::image_tests::{BLOCK, agree, config, open_as};
use super::*;
use crate::layout::Layout;
use lamina_codec::{
    format::Format,
    kv::{KvLayout, Shape},
    packkv::{PackedWindow, Packing},
};
use lamina_store::{
    failpoints::{Failpoints, Killed},
    mode::Mode,
};

const CHANNELS: usize = 64;
const ROW: usize = CHANNELS * 2;
const TOKENS: usize = 64;
/// Bytes of a window: two blocks.
const WINDOW: usize = ROW * TOKENS;
/// Tokens of the tensor: five windows and a half.
const ALL: usize = 5 * TOKENS + TOKENS / 2;

fn packing() -> Packing {
    "packkv:0.1,median,8".parse().unwrap()
}

fn layout(window: u32) -> KvLayout {
    KvLayout { lossy: Some(packing()), ..KvLayout::rows(u32::try_from(CHANNELS).unwrap(), window) }
}

fn lossy() -> TensorSpec {
    TensorSpec {
        name: "k".to_owned(),
        dpa: Some(4 * BLOCK as u64),
        length: (ALL * ROW) as u64,
        elements: None,
        shape: vec![ALL as u64, CHANNELS as u64],
        format: Format::Bf16,
        layout: Layout::Kv(layout(64)),
        codec: None,
        base: None,
    }
}

const DPA: u64 = 4 * BLOCK as u64;

fn in_memory() -> Device {
    let device = Device::new(DeviceConfig { open_windows: 2, ..config() }).unwrap();
    device.create_tensor(lossy()).unwrap();
    device
}

/// A token's row: channels of different sizes.
fn row(seed: u64) -> Vec<u8> {
    let noise = lamina_codec::testing::bytes(seed, CHANNELS);
    let element = |(channel, noise): (usize, &u8)| {
        let size = 1.0 + f32::from(u8::try_from(channel % 7).unwrap());
        let value = (f32::from(*noise) / 128.0 - 1.0) * size;
        [value.to_bits().to_le_bytes()[2], value.to_bits().to_le_bytes()[3]]
    };
    noise.iter().enumerate().flat_map(element).collect()
}

fn rows(from: usize, count: usize, seed: u64) -> Vec<u8> {
    (from..from + count).flat_map(|token| row(seed * 1000 + token as u64)).collect()
}

/// A row as it comes back of a packed window, whatever its neighbours are.
fn packed(row: &[u8]) -> Vec<u8> {
    let shape = Shape::new(Format::Bf16, &layout(64)).unwrap().unwrap();
    let window = row.repeat(TOKENS);
    let mut back = vec![0; WINDOW];
    let stored = shape.packer().unwrap().encode(&window).expect("a full window");
    shape.packer().unwrap().decode(&stored, &mut back).unwrap();
    back.truncate(ROW);
    back
}

fn all_packed(rows: &[u8]) -> Vec<u8> {
    rows.chunks(ROW).flat_map(packed).collect()
}

fn read(device: &Device, token: usize, count: usize) -> Vec<u8> {
    let mut out = vec![0xa5; count * ROW];
    device.read_base(DPA + (token * ROW) as u64, &mut out).unwrap();
    out
}

fn write(device: &Device, token: usize, rows: &[u8]) {
    device.write_base(DPA + (token * ROW) as u64, rows).unwrap();
}

fn flush(device: &Device) {
    device.flush(0, device.base_bytes()).unwrap();
}

/// Which windows are lossy, as their entries say.
fn are_lossy(device: &Device) -> Vec<bool> {
    let blocks = DPA / BLOCK as u64..(DPA + (ALL * ROW) as u64).div_ceil(BLOCK as u64);
    let lossy: Vec<_> = device
        .entries(blocks)
        .into_iter()
        .map(|entry| entry.place.is_some_and(|place| place.lossy))
        .collect();
    lossy
        .chunks(2)
        .map(|window| {
            assert!(window.iter().all(|lossy| *lossy == window[0]), "all of a window, or nothing: {lossy:?}");
            window[0]
        })
        .collect()
}

fn value(word: &[u8]) -> f64 {
    f32::from_le_bytes([0, 0, word[0], word[1]]).into()
}

/// That a row came back within half a step, and half of the last bit of bf16.
fn check_bound(was: &[u8], back: &[u8]) {
    let values = || was.chunks(2).map(value);
    let (least, most) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max));
    let step = ((most - least) * 0.1).max(least.abs().max(most.abs()) / 32767.0) * (1.0 + 1.0 / 128.0);
    for (was, back) in values().zip(back.chunks(2).map(value)) {
        assert!((was - back).abs() <= step / 2.0 * (1.0 + 1e-6) + back.abs() / 256.0, "{was} {back} {step}");
    }
}

#[test]
fn tokens_are_exact_until_their_window_is_full_and_within_the_bound_then() {
    for step in [1, 3, 64, 65, 200] {
        let device = in_memory();
        let view = device.create_view("k", "e8m3").unwrap();
        let data = rows(0, ALL, 1);
        let mut token = 0;
        while token < ALL {
            let next = (token + step).min(ALL);
            write(&device, token, &data[token * ROW..next * ROW]);
            token = next;
            if step == 1 && token % 13 > 0 {
                continue;
            }
            flush(&device);
            let (full, now) = (token / TOKENS * TOKENS, read(&device, 0, token));
            assert!(now[full * ROW..] == data[full * ROW..token * ROW], "the raw tail is exact");
            assert!(now[..full * ROW] == all_packed(&data[..full * ROW]));
            for (was, back) in data.chunks(ROW).zip(now.chunks(ROW)) {
                check_bound(was, back);
            }
            let lossy: Vec<_> = (0..6).map(|window| (window + 1) * TOKENS <= token).collect();
            assert_eq!(are_lossy(&device), lossy);
            let mut shown = vec![0; token * ROW];
            device.read_views(view.offset, &mut shown).unwrap();
            let of = lamina_reference::Format::Bf16;
            let want = lamina_reference::view_bytes(of, "e8m3", &now, (token * CHANNELS) as u64).unwrap();
            assert!(shown == want, "a view is one of what comes back");
        }
        let stats = device.stats();
        assert!(stats.kv_windows.packed >= 5, "{:?}", stats.kv_windows);
        // Five of its windows and a half are at less than 5 bits an element, and 32 for each token.
        let stored = stats.tensors[0].stored_bytes;
        assert!(stored < (ALL * ROW) as u64 * 7 / 16, "{stored} of {}", ALL * ROW);
    }
}

#[test]
fn the_same_windows_have_the_same_bytes_however_they_came() {
    let [one, other] = [in_memory(), in_memory()];
    let data = rows(0, ALL, 2);
    write(&one, 0, &data);
    for token in (0..ALL).rev() {
        write(&other, token, &data[token * ROW..][..ROW]);
    }
    flush(&one);
    flush(&other);
    for window in 0..6 {
        let [one, other] = [&one, &other].map(|device| device.packed_window("k", window).unwrap());
        assert_eq!((one.is_some(), &one), (window < 5, &other));
        if let Some(bytes) = one {
            let packed = PackedWindow::new(&bytes).unwrap();
            assert_eq!((packed.channels(), packed.groups().len()), (CHANNELS, 1));
        }
    }
    let why = one.packed_window("k", 6).unwrap_err().to_string();
    assert!(why.contains("there are 6 windows"), "{why}");
}

#[test]
fn a_rewritten_token_changes_no_other_and_nothing_drifts() {
    let device = in_memory();
    let data = rows(0, ALL, 3);
    write(&device, 0, &data);
    flush(&device);
    let before = read(&device, 0, ALL);
    for (turn, token) in [5, 63, 64, 5, 200].into_iter().enumerate() {
        let new = row(9_000 + turn as u64);
        write(&device, token, &new);
        flush(&device);
        assert!(read(&device, token, 1) == packed(&new), "it is packed as any other");
    }
    let untouched = |now: &[u8]| {
        let mut rows = now.chunks(ROW).zip(before.chunks(ROW)).enumerate();
        rows.all(|(token, (now, before))| [5, 63, 64, 200].contains(&token) || now == before)
    };
    assert!(untouched(&read(&device, 0, ALL)));
    // A host writes back what it read.
    let now = read(&device, 0, ALL);
    for _ in 0..3 {
        write(&device, 0, &now);
        flush(&device);
        assert!(read(&device, 0, ALL) == now);
        device.remove_tensor("k").unwrap();
        assert!(are_lossy(&device).iter().all(|lossy| !lossy), "nobody's blocks stand alone");
        assert!(read(&device, 0, ALL) == now);
        device.create_tensor(lossy()).unwrap();
        assert!(are_lossy(&device)[..5].iter().all(|lossy| *lossy));
        device.resize_tensor("k", (3 * TOKENS * ROW) as u64).unwrap();
        device.resize_tensor("k", (ALL * ROW) as u64).unwrap();
        assert!(read(&device, 0, ALL) == now);
        device.inject_poison(DPA + WINDOW as u64, 1).unwrap();
        assert!(read(&device, TOKENS + 32, 32) == now[(TOKENS + 32) * ROW..2 * TOKENS * ROW]);
        write(&device, TOKENS, &now[TOKENS * ROW..][..BLOCK]);
        flush(&device);
        assert!(read(&device, 0, ALL) == now && are_lossy(&device)[1]);
    }
}

#[test]
fn what_is_not_finite_comes_back_and_changes_nothing_of_its_neighbours() {
    let device = in_memory();
    let clean = rows(0, ALL, 4);
    let mut data = clean.clone();
    let put = |data: &mut [u8], token: usize, channel: usize, word: u16| {
        data[token * ROW + channel * 2..][..2].copy_from_slice(&word.to_le_bytes());
    };
    // Quiet and signalling NaN with payloads, both infinities; a whole row of NaN; -0.
    for (token, word) in [(0, 0x7fc1_u16), (7, 0x7f81), (63, 0x7f80), (64, 0xff80), (70, 0xffff)] {
        put(&mut data, token, 3, word);
    }
    (0..CHANNELS).for_each(|channel| put(&mut data, 9, channel, 0x7fc0));
    write(&device, 0, &data);
    flush(&device);
    assert!(are_lossy(&device)[..5].iter().all(|lossy| *lossy));
    let now = read(&device, 0, ALL);
    for token in 0..5 * TOKENS {
        let (was, now) = (&data[token * ROW..][..ROW], &now[token * ROW..][..ROW]);
        if [0, 7, 9, 63, 64, 70].contains(&token) {
            assert!(now == was, "token {token} is kept as it was");
        } else {
            assert!(now == packed(&clean[token * ROW..][..ROW]), "token {token}");
        }
    }
}

#[test]
fn readers_see_a_window_before_it_is_packed_or_after() {
    let device = in_memory();
    let done = AtomicBool::new(false);
    let versions = [5_u64, 6].map(|seed| rows(0, TOKENS, seed));
    let packed: Vec<_> = versions.iter().map(|data| all_packed(data)).collect();
    write(&device, 0, &versions[0]);
    let known: Vec<_> = versions.iter().chain(&packed).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    for block in 0..2 {
                        let mut now = vec![0; BLOCK];
                        device.read_base(DPA + (block * BLOCK) as u64, &mut now).unwrap();
                        // Rows are written one by one, so each is of one version or the other.
                        for (at, row) in now.chunks(ROW).enumerate() {
                            let at = block * BLOCK + at * ROW..block * BLOCK + (at + 1) * ROW;
                            assert!(known.iter().any(|known| known[at.clone()] == *row));
                        }
                    }
                }
            });
        }
        for turn in 0..60 {
            let data = &versions[turn % 2];
            for token in 0..TOKENS {
                write(&device, token, &data[token * ROW..][..ROW]);
            }
            flush(&device);
        }
        done.store(true, Relaxed);
    });
    assert!(read(&device, 0, TOKENS) == packed[1]);
}

#[test]
fn a_damaged_piece_loses_its_window_and_no_other() {
    let device = in_memory();
    let data = rows(0, ALL, 7);
    write(&device, 0, &data);
    flush(&device);
    let before = read(&device, 0, ALL);
    device.flip_stored_bit(DPA / BLOCK as u64 + 3, 77);
    let now = read(&device, 0, ALL);
    assert!(now[WINDOW..2 * WINDOW].iter().all(|byte| *byte == poison::PATTERN));
    assert!(now[..WINDOW] == before[..WINDOW] && now[2 * WINDOW..] == before[2 * WINDOW..]);
    let listed: Vec<_> = device.poison().iter().map(|poisoned| poisoned.dpa).collect();
    assert_eq!(listed, [DPA + WINDOW as u64, DPA + (WINDOW + BLOCK) as u64]);
    // Written anew it is as any other.
    write(&device, TOKENS, &data[WINDOW..2 * WINDOW]);
    flush(&device);
    assert!(read(&device, 0, ALL) == before && device.poison().is_empty());
}

#[test]
fn what_cannot_be_lossy_is_refused_with_the_reason() {
    let refused = |mode: Mode, spec: TensorSpec| {
        let device = Device::new(DeviceConfig { mode, ..config() }).unwrap();
        let why = device.create_tensor(spec).unwrap_err().to_string();
        assert!(device.tensors().is_empty());
        why
    };
    let of = |layout: KvLayout| TensorSpec { layout: Layout::Kv(layout), ..lossy() };
    for (why, spec) in [
        ("bf16 and fp16, not for int8", TensorSpec { format: Format::Int8, shape: Vec::new(), ..lossy() }),
        ("of 32 tokens of 128 bytes it is not, one of 64 tokens is", of(layout(32))),
        ("one of 64 tokens is", of(layout(100))),
        ("no window of up to 256 tokens is", of(KvLayout { channels: 20, ..layout(64) })),
        ("pads rows", of(KvLayout { stride: Some(96), ..layout(64) })),
        (
            "paged",
            of(KvLayout {
                lossy: Some(packing()),
                ..KvLayout::preset(lamina_codec::kv::Preset::Hnd, 2, 32, 16, 64).unwrap()
            }),
        ),
    ] {
        let said = refused(Mode::Trace, spec);
        assert!(said.contains("k: lossy coding: ") && said.contains(why), "{said}");
    }
    for mode in [Mode::GComp, Mode::Plain] {
        let said = refused(mode, lossy());
        assert!(said.contains(&format!("in the mode {mode} codes no windows")), "{said}");
    }
    let device = in_memory();
    device
        .create_tensor(TensorSpec {
            name: "w".into(),
            dpa: Some(20 * BLOCK as u64),
            layout: Layout::Weight,
            ..lossy()
        })
        .unwrap();
    let why = device.packed_window("w", 0).unwrap_err().to_string();
    assert!(why.contains("w: lossy coding: it was not asked for"), "{why}");
}

#[derive(Clone, Debug)]
enum Operation {
    Write {
        token: usize,
        count: usize,
        seed: u64,
    },
    Discard {
        token: usize,
        count: usize,
    },
    Flush,
    /// Removes the tensor, or makes it.
    Toggle,
    Resize {
        tokens: usize,
    },
}

fn operation() -> impl Strategy<Value = Operation> {
    let range = || {
        let any = (0..ALL, 1..3 * TOKENS);
        let window = (0..5_usize).prop_map(|window| (window * TOKENS, TOKENS));
        prop_oneof![2 => any, 1 => window].prop_map(|(token, count)| (token, count.min(ALL - token)))
    };
    prop_oneof![
        6 => (range(), 0..1000_u64).prop_map(|((token, count), seed)| Operation::Write { token, count, seed }),
        1 => range().prop_map(|(token, count)| Operation::Discard { token, count }),
        2 => Just(Operation::Flush),
        1 => Just(Operation::Toggle),
        1 => (1..6_usize).prop_map(|windows| Operation::Resize { tokens: windows * TOKENS }),
    ]
}

fn perform(device: &Device, operation: &Operation) -> Result<(), DeviceError> {
    let is_there = !device.tensors().is_empty();
    let at = |token: usize| DPA + (token * ROW) as u64;
    match operation {
        Operation::Write { token, count, seed } => {
            device.write_base(at(*token), &rows(*token, *count, *seed))
        }
        Operation::Discard { token, count } => device.discard(at(*token), (count * ROW) as u64),
        Operation::Flush => device.flush(0, device.base_bytes()),
        Operation::Toggle if is_there => device.remove_tensor("k"),
        Operation::Toggle => device.create_tensor(lossy()).map(drop),
        Operation::Resize { tokens } if is_there => {
            device.resize_tensor("k", (tokens * ROW) as u64).map(drop)
        }
        Operation::Resize { .. } => Ok(()),
    }
}

fn after(operation: &Operation, before: &[u8]) -> Vec<u8> {
    let mut after = before.to_vec();
    let (token, data) = match operation {
        Operation::Write { token, count, seed } => (*token, rows(*token, *count, *seed)),
        Operation::Discard { token, count } => (*token, vec![0; count * ROW]),
        _ => return after,
    };
    after[token * ROW..][..data.len()].copy_from_slice(&data);
    after
}

/// Each token is one of these versions, as it was written or as it comes back packed. What it is
/// holds from now on: it never becomes anything else by itself.
fn settle(device: &Device, versions: &[&[u8]]) -> Vec<u8> {
    let now = read(device, 0, ALL);
    for (token, row) in now.chunks(ROW).enumerate() {
        let was = || versions.iter().map(|version| &version[token * ROW..][..ROW]);
        let is_zero = |row: &[u8]| row.iter().all(|byte| *byte == 0);
        let known = was().any(|was| was == row || !is_zero(was) && packed(was) == row);
        assert!(known, "token {token} is what nobody stored");
    }
    now
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_kill_between_any_two_stores_leaves_every_token_as_it_was_or_is_to_be(
        operations in prop::collection::vec((operation(), prop_oneof![0..60_i64, Just(i64::MAX)]), 1..24),
    ) {
        let failpoints = Failpoints::none();
        failpoints.make_current();
        let image = Image::in_memory(config().superblock()).unwrap();
        Device::open(image.clone(), &config()).unwrap().create_tensor(lossy()).unwrap();
        let mut workers = 0..;
        let mut open = || open_as(&image, workers.next().unwrap());
        let mut device = open();
        let mut model = vec![0; ALL * ROW];
        for (operation, stores) in operations {
            let after = after(&operation, &model);
            failpoints.kill_after(stores);
            let done = catch_unwind(AssertUnwindSafe(|| perform(&device, &operation)));
            failpoints.kill_after(i64::MAX);
            model = match done {
                Ok(done) => {
                    done.unwrap();
                    settle(&device, &[&after])
                }
                Err(why) => {
                    prop_assert!(why.is::<Killed>(), "it died of something else");
                    std::mem::forget(device);
                    device = open();
                    settle(&device, &[&model, &after])
                }
            };
            agree(&device);
        }
        flush(&device);
        model = settle(&device, &[&model]);
        drop(device);
        let device = Device::open(image, &config()).unwrap();
        prop_assert!(read(&device, 0, ALL) == model);
        device.discard(0, device.base_bytes()).unwrap();
        flush(&device);
        prop_assert_eq!(device.blocks.used_bytes(), 0);
    }
}

#[test]
fn a_snapshot_and_the_image_it_is_restored_to_are_lossy_where_the_device_is() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::open(Image::in_memory(config().superblock()).unwrap(), &config()).unwrap();
    device.create_tensor(lossy()).unwrap();
    write(&device, 0, &rows(0, ALL, 8));
    flush(&device);
    let (snapshot, to) = (folder.path().join("snapshot"), folder.path().join("image"));
    device.save(&mut std::fs::File::create(&snapshot).unwrap()).unwrap();
    snapshot::restore(&snapshot, &to).unwrap();
    let restored = Device::open(Image::open(&to).unwrap().unwrap(), &DeviceConfig::new(0, 0)).unwrap();
    assert!(read(&restored, 0, ALL) == read(&device, 0, ALL));
    assert_eq!((are_lossy(&restored), restored.tensors()), (are_lossy(&device), device.tensors()));
}
