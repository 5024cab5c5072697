//! The whole device against a plain array and the reference.

use lamina_abi::DIRECTORY_BYTES;
use proptest::prelude::*;

use super::*;
use crate::layout::Layout;
use lamina_codec::{
    format::Format,
    kv::{KvLayout, Preset},
    testing::spelling,
};

const BASE: u64 = 40 * 4096;

fn device(mode: Mode, codec: Codec) -> Device {
    let config = DeviceConfig::new(BASE, 64 << 20);
    // Few enough that tests run into the bounds.
    Device::new(DeviceConfig { mode, codec, open_windows: 2, decoded_bytes: 40 << 10, ..config }).unwrap()
}

fn spec(name: &str, dpa: Option<u64>, length: u64, format: Format) -> TensorSpec {
    TensorSpec::new(name, dpa, length, format)
}

/// Bytes that look like `format`'s values more or less, the same for the same seed.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    (0..length)
        .map(|at| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let noise = state.to_be_bytes()[0];
            match seed % 4 {
                0 => noise,
                1 => 0,
                2 if at % 2 == 1 => 0x3c | noise & 0x83,
                _ => [0, 1, 0x80, 0xff, 0x7f, 0x7c][usize::from(noise % 6)],
            }
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Operation {
    Write { at: u64, length: u64, seed: u64 },
    Discard { at: u64, length: u64 },
    Tensor { name: u8, dpa: Option<u64>, length: u64, format: Format, codec: Option<Codec>, layout: Layout },
    Flush { at: u64, length: u64 },
    Remove { name: u8 },
    View { name: u8, spelling: String },
    Read { at: u64, length: u64 },
    ReadView { pick: prop::sample::Index, from: prop::sample::Index, length: u64 },
}

/// Half of the tensors are KV caches, of windows of one to a few blocks.
fn layout() -> impl Strategy<Value = Layout> {
    let stride = prop_oneof![3 => Just(None), 1 => (0_u32..5).prop_map(Some)];
    let rows = (prop::sample::select(vec![1_u32, 16, 33, 64, 100, 900]), 1_u32..=128, stride).prop_map(
        |(channels, window, padding)| {
            let stride = padding.map(|padding| channels + padding);
            KvLayout { stride, ..KvLayout::rows(channels, window) }
        },
    );
    let paged = (1_u32..40).prop_map(|window| KvLayout::preset(Preset::HndKv, 2, 16, 8, window).unwrap());
    prop_oneof![4 => Just(Layout::Weight), 3 => rows.prop_map(Layout::Kv), 1 => paged.prop_map(Layout::Kv)]
}

fn operation() -> impl Strategy<Value = Operation> {
    let at = || prop_oneof![(0..BASE), (0..BASE / 4096).prop_map(|block| block * 4096)];
    let length = || prop_oneof![Just(4096_u64), Just(16_384), 0_u64..20_000];
    let codec = prop::option::of(prop::sample::select(Codec::ALL.to_vec()));
    let format = prop::sample::select(Format::ALL.to_vec());
    let dpa = prop::option::of((0..BASE / 4096).prop_map(|block| block * 4096));
    prop_oneof![
        6 => (at(), length(), any::<u64>()).prop_map(|(at, length, seed)| Operation::Write { at, length, seed }),
        1 => (at(), length()).prop_map(|(at, length)| Operation::Discard { at, length }),
        3 => (0_u8..6, dpa, length(), format, codec, layout()).prop_map(|(name, dpa, length, format, codec, layout)| {
            Operation::Tensor { name, dpa, length: length / 4 * 4, format, codec, layout }
        }),
        1 => (at(), length()).prop_map(|(at, length)| Operation::Flush { at, length }),
        1 => (0_u8..6).prop_map(|name| Operation::Remove { name }),
        4 => (0_u8..6, spelling()).prop_map(|(name, spelling)| Operation::View { name, spelling }),
        2 => (at(), length()).prop_map(|(at, length)| Operation::Read { at, length }),
        6 => (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1_u64..9000)
            .prop_map(|(pick, from, length)| Operation::ReadView { pick, from, length }),
    ]
}

/// The bytes of a view by the reference, from the array.
fn want(array: &[u8], tensor: &TensorInfo, spelling: &str) -> Vec<u8> {
    let format = tensor.format.name().parse().unwrap();
    let start = usize::try_from(tensor.dpa).unwrap();
    let full = &array[start..start + usize::try_from(tensor.length).unwrap()];
    lamina_reference::view_bytes(format, spelling, full, tensor.elements).unwrap()
}

fn check_view(
    device: &Device,
    array: &[u8],
    info: &ViewInfo,
    range: Range<u64>,
) -> Result<(), TestCaseError> {
    let tensor = device.tensors().into_iter().find(|tensor| tensor.name == info.tensor).unwrap();
    let want = want(array, &tensor, &info.view);
    prop_assert_eq!(want.len() as u64, info.length);
    let mut got = vec![0xa5; usize::try_from(range.end - range.start).unwrap()];
    device.read_views(info.offset + range.start, &mut got).unwrap();
    let (start, end) = (usize::try_from(range.start).unwrap(), usize::try_from(range.end).unwrap());
    prop_assert!(got == want[start..end], "{:?} of {:?}", info, tensor);
    Ok(())
}

fn run(device: &Device, operations: Vec<Operation>) -> Result<(), TestCaseError> {
    let size = usize::try_from(BASE).unwrap();
    let mut array = vec![0_u8; size];
    for operation in operations {
        match operation {
            Operation::Write { at, length, seed } => {
                let data = pattern(seed, usize::try_from(length).unwrap());
                let fits = at + length <= BASE;
                prop_assert_eq!(device.write_base(at, &data).is_ok(), fits);
                if fits {
                    array[usize::try_from(at).unwrap()..][..data.len()].copy_from_slice(&data);
                }
            }
            Operation::Discard { at, length } => {
                if device.discard(at, length).is_ok() {
                    let at = usize::try_from(at).unwrap();
                    array[at..at + usize::try_from(length).unwrap()].fill(0);
                }
            }
            Operation::Flush { at, length } => {
                prop_assert_eq!(device.flush(at, length).is_ok(), at + length <= BASE);
            }
            Operation::Tensor { name, dpa, length, format, codec, layout } => {
                let spec = TensorSpec { layout, codec, ..spec(&format!("t{name}"), dpa, length, format) };
                let before = device.tensors();
                if let Ok(info) = device.create_tensor(spec) {
                    prop_assert!(info.dpa + info.length <= BASE);
                    for other in before {
                        let clear =
                            info.dpa + info.length <= other.dpa || other.dpa + other.length <= info.dpa;
                        prop_assert!(clear, "{:?} over {:?}", info, other);
                    }
                } else {
                    prop_assert_eq!(before, device.tensors());
                }
            }
            Operation::Remove { name } => {
                let _ = device.remove_tensor(&format!("t{name}"));
            }
            Operation::View { name, spelling } => {
                let name = format!("t{name}");
                let tensor = device.tensors().into_iter().find(|tensor| tensor.name == name);
                let gives = tensor.is_some_and(|tensor| {
                    lamina_reference::planes(tensor.format.name().parse().unwrap(), &spelling).is_ok()
                });
                prop_assert_eq!(device.create_view(&name, &spelling).is_ok(), gives, "{} {}", name, spelling);
            }
            Operation::Read { at, length } => {
                let mut got = vec![0xa5; usize::try_from(length).unwrap()];
                if device.read_base(at, &mut got).is_ok() {
                    prop_assert!(got == array[usize::try_from(at).unwrap()..][..got.len()]);
                }
            }
            Operation::ReadView { pick, from, length } => {
                let views: Vec<_> = device.views().into_iter().filter(|view| view.length > 0).collect();
                if views.is_empty() {
                    continue;
                }
                let info = pick.get(&views);
                let from = from.index(usize::try_from(info.length).unwrap()) as u64;
                check_view(device, &array, info, from..(from + length).min(info.length))?;
            }
        }
    }
    let mut all = vec![0xa5; size];
    device.read_base(0, &mut all).unwrap();
    prop_assert!(all == array);
    for info in device.views() {
        check_view(device, &array, &info, 0..info.length)?;
    }
    device.flush(0, BASE).unwrap();
    prop_assert_eq!(device.stats().kv_windows.open, 0);
    device.read_base(0, &mut all).unwrap();
    prop_assert!(all == array);
    for info in device.views() {
        check_view(device, &array, &info, 0..info.length)?;
    }
    agree(device, &array)
}

/// The gauges agree with each other and with what is stored.
fn agree(device: &Device, array: &[u8]) -> Result<(), TestCaseError> {
    let report = device.stats();
    let live = array.chunks_exact(4096).filter(|block| block.iter().any(|byte| *byte != 0)).count() as u64;
    // A window's coded blocks are not its own blocks.
    let windows =
        device.mode() == Mode::Trace && device.tensors().iter().any(|t| matches!(t.layout, Layout::Kv(_)));
    prop_assert!(windows || report.blocks.live == live);
    let live = report.blocks.live;
    let planes: u64 = report
        .planes
        .iter()
        .map(|plane| plane.raw_bytes + plane.lz4_bytes + plane.zstd_bytes + plane.tree_bytes)
        .sum();
    let words =
        report.blocks.words_raw_bytes + report.blocks.words_lz4_bytes + report.blocks.words_zstd_bytes;
    if device.mode() != Mode::Plain {
        prop_assert_eq!(device.blocks.used_bytes(), report.device.stored_bytes);
        let exact = planes + words + report.blocks.heads_bytes;
        prop_assert!(exact <= report.device.stored_bytes);
        prop_assert!(report.device.stored_bytes <= exact + live * (64 + 64));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn trace_is_an_array_with_views(codec in prop::sample::select(Codec::ALL.to_vec()), operations in prop::collection::vec(operation(), 1..50)) {
        run(&device(Mode::Trace, codec), operations)?;
    }

    #[test]
    fn gcomp_gives_the_same_bytes(codec in prop::sample::select(Codec::ALL.to_vec()), operations in prop::collection::vec(operation(), 1..40)) {
        run(&device(Mode::GComp, codec), operations)?;
    }

    #[test]
    fn plain_gives_the_same_bytes(operations in prop::collection::vec(operation(), 1..40)) {
        run(&device(Mode::Plain, Codec::Lz4), operations)?;
    }

    #[test]
    fn what_depends_on_what_is_known_both_ways(
        format in prop::sample::select(Format::ALL.to_vec()), spelling in spelling(), length in 4_u64..30_000,
        at in any::<prop::sample::Index>(),
    ) {
        let device = device(Mode::Trace, Codec::Lz4);
        let tensor = device.create_tensor(spec("t", Some(8192), length / 4 * 4, format)).unwrap();
        let Ok(view) = device.create_view("t", &spelling) else { return Ok(()) };
        let mut before = vec![0; usize::try_from(view.length).unwrap()];
        device.read_views(view.offset, &mut before).unwrap();
        let byte = tensor.dpa + at.index(usize::try_from(tensor.length).unwrap()) as u64;
        device.write_base(byte, &[0xff]).unwrap();
        let mut after = before.clone();
        device.read_views(view.offset, &mut after).unwrap();
        for changed in (0..view.length).filter(|at| before[usize::try_from(*at).unwrap()] != after[usize::try_from(*at).unwrap()]) {
            let over = device.views_over_base(byte, 1);
            prop_assert!(over.iter().any(|range| range.contains(&(view.offset + changed))), "{:?}", over);
            let under = device.base_under_views(view.offset + changed, 1);
            prop_assert!(under.iter().any(|range| range.contains(&byte)), "{:?}", under);
        }
    }
}

/// A device with one bf16 tensor of small values, written.
fn weights(mode: Mode) -> (Device, Vec<u8>) {
    let device = device(mode, Codec::Lz4);
    device.create_tensor(spec("w", None, 64 << 10, Format::Bf16)).unwrap();
    let mut state = 1_u32;
    let bytes: Vec<u8> = (0..32 << 10)
        .flat_map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value =
                f32::from(i16::from_le_bytes([state.to_le_bytes()[2], state.to_le_bytes()[3]])) / 300_000.0;
            value.to_le_bytes()[2..].to_vec()
        })
        .collect();
    device.write_base(0, &bytes).unwrap();
    (device, bytes)
}

#[test]
fn a_view_fetches_only_its_planes() {
    let (device, _) = weights(Mode::Trace);
    let read = |spelling: &str| {
        let info = device.create_view("w", spelling).unwrap();
        let before = device.stats().requests.views;
        device.read_views(info.offset, &mut vec![0; usize::try_from(info.length).unwrap()]).unwrap();
        let after = device.stats().requests.views;
        (
            after.planes_fetched - before.planes_fetched,
            after.stored_bytes_fetched - before.stored_bytes_fetched,
            after.plain_bytes_fetched.unwrap() - before.plain_bytes_fetched.unwrap(),
        )
    };
    let full = read("full");
    let e8m3 = read("e8m3");
    let guard = read("e8m3+g2");
    let exponent_guard = read("e4m3+d2");
    let sign = read("e0m0");
    assert_eq!([full.0, e8m3.0, guard.0, sign.0], [16 * 16, 16 * 12, 16 * 14, 16]);
    assert_eq!(exponent_guard.0, 16 * 10);
    assert!(sign.1 < e8m3.1 && e8m3.1 < guard.1 && guard.1 < full.1, "{sign:?} {e8m3:?} {guard:?} {full:?}");
    // Four raw mantissa planes of 256 bytes in each of 16 blocks are what e8m3 leaves out, give or
    // take a shared granule.
    assert!((full.1 - e8m3.1).abs_diff(16 * 4 * 256) <= 16 * 64);
    assert_eq!([full.2, e8m3.2, guard.2, sign.2], [64 << 10; 4]);
}

#[test]
fn a_converted_view_is_the_same_whichever_way_its_blocks_come() {
    let (_, mut bytes) = weights(Mode::Trace);
    // Here and there what is no finite value, and zeros.
    let special = [0x7fc1_u16, 0xff80, 0x8000, 0x7f80, 0xffff, 0].into_iter().cycle();
    for (word, special) in bytes[8192..].as_chunks_mut().0.iter_mut().step_by(400).zip(special).take(30) {
        *word = special.to_le_bytes();
    }
    for codec in Codec::ALL {
        let device = device(Mode::Trace, codec);
        device.create_tensor(spec("w", Some(0), (64 << 10) - 2000, Format::Bf16)).unwrap();
        device.write_base(0, &bytes).unwrap();
        for spelling in
            ["fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fn+g4@-5", "fp8_e5m2+g0@3", "e8m3:packed", "e4m3+d2"]
        {
            let info = device.create_view("w", spelling).unwrap();
            for range in [0..info.length, 0..8192, 1..7000, 2048..6144, 5000..info.length] {
                check_view(&device, &bytes, &info, range).unwrap();
            }
        }
    }
}

#[test]
fn a_read_of_nothing_gives_nothing_wherever_it_begins() {
    let (device, _) = weights(Mode::Trace);
    for spelling in ["full", "e8m3:packed", "fp8_e4m3fn"] {
        let info = device.create_view("w", spelling).unwrap();
        for offset in info.offset..info.offset + 8192 {
            device.read_views(offset, &mut []).unwrap();
        }
    }
    device.read_base(4097, &mut []).unwrap();
    let views = device.stats().requests.views;
    assert_eq!((views.bytes, views.planes_fetched), (0, 0));
}

#[test]
fn the_baselines_fetch_whole_words_for_a_view() {
    for mode in [Mode::Plain, Mode::GComp] {
        let (device, bytes) = weights(mode);
        let info = device.create_view("w", "e8m3").unwrap();
        let mut got = vec![0; bytes.len()];
        device.read_views(info.offset, &mut got).unwrap();
        assert_eq!(
            got,
            lamina_reference::view_bytes(lamina_reference::Format::Bf16, "e8m3", &bytes, 32 << 10).unwrap()
        );
        let moved = device.stats().requests.views;
        assert_eq!(moved.planes_fetched, 0);
        assert_eq!(moved.plain_bytes_fetched, Some(64 << 10));
        assert_eq!(
            moved.stored_bytes_fetched,
            if mode == Mode::Plain { 64 << 10 } else { moved.gcomp_bytes_fetched.unwrap() }
        );
    }
}

#[test]
fn a_packed_page_in_the_middle_fetches_just_its_blocks() {
    let (device, _) = weights(Mode::Trace);
    let info = device.create_view("w", "e8m3:packed").unwrap();
    device.read_views(info.offset + 4096, &mut [0; 4096]).unwrap();
    // Bytes 4096..8192 of 12-bit elements are elements 2730..5462: blocks 1 and 2.
    assert_eq!(device.stats().requests.views.blocks, 2);
    assert_eq!(device.base_under_views(info.offset + 4096, 4096), vec![4096..12_288]);
}

#[test]
fn a_request_past_its_window_is_refused_with_the_bound() {
    let device = device(Mode::Trace, Codec::Lz4);
    let message = device.read_base(BASE - 1, &mut [0; 2]).unwrap_err().to_string();
    assert_eq!(message, format!("2 bytes at {:#x} pass the end of the base window, {BASE} bytes", BASE - 1));
    assert!(device.write_base(u64::MAX, &[1]).is_err());
    assert!(device.read_views(u64::MAX - 1, &mut [0; 4]).is_err());
    assert!(device.discard(BASE, 1).is_err());
    assert_eq!(device.stats().blocks.live, 0);
}

#[test]
fn tensors_that_cannot_be_are_refused_by_name() {
    let device = device(Mode::Trace, Codec::Lz4);
    let refusal = |spec: TensorSpec| device.create_tensor(spec).unwrap_err().to_string();
    device.create_tensor(spec("a", Some(4096), 5000, Format::Opaque)).unwrap();
    assert!(refusal(spec("a", None, 4, Format::Bf16)).contains("already"));
    assert!(refusal(spec("b", Some(8192), 4, Format::Bf16)).contains("overlap a at 0x1000, 5000 bytes"));
    assert!(refusal(spec("b", Some(100), 4, Format::Bf16)).contains("multiple of 4096"));
    assert!(refusal(spec("b", Some(BASE - 4096), 8192, Format::Bf16)).contains("pass the base window"));
    assert!(refusal(spec("b", Some(u64::MAX - 4095), 4096, Format::Bf16)).contains("pass the base window"));
    assert!(refusal(spec("b", None, 3, Format::Bf16)).contains("does not fit 1 elements of bf16 in 3 bytes"));
    assert!(refusal(spec("b", None, BASE, Format::Bf16)).contains("largest gap"));
    assert!(refusal(spec("", None, 4, Format::Bf16)).contains("cannot name a tensor"));
    assert!(refusal(spec("a\nb", None, 4, Format::Bf16)).contains("cannot name a tensor"));
    let kv = Layout::Kv(KvLayout::rows(0, 128));
    assert!(refusal(TensorSpec { layout: kv, ..spec("b", None, 4, Format::Bf16) }).contains("kv layout"));
    let shape = vec![u64::MAX, 2];
    let refused = refusal(TensorSpec { shape, ..spec("b", None, 4, Format::Bf16) });
    assert!(refused.contains("the product of the shape passes 18446744073709551615"), "{refused}");
    assert!(device.create_view("nobody", "full").unwrap_err().to_string().contains("no tensor"));
}

#[test]
fn a_window_of_views_that_is_full_says_so() {
    let device = Device::new(DeviceConfig::new(BASE, 6 << 20)).unwrap();
    device.create_tensor(spec("a", None, 4096, Format::Bf16)).unwrap();
    device.create_view("a", "full").unwrap();
    device.create_view("a", "e8m3").unwrap();
    let message = device.create_view("a", "e8m2").unwrap_err().to_string();
    assert!(message.contains("--views-capacity"), "{message}");
    assert_eq!(device.views().len(), 2);
}

#[test]
fn a_damaged_block_is_poisoned_and_a_rewrite_mends_it() {
    let (device, bytes) = weights(Mode::Trace);
    let view = device.create_view("w", "e8m3").unwrap();
    device.flip_stored_bit(3, 5);
    let read = |at: u64| {
        let mut out = vec![0; 4096];
        device.read_base(at, &mut out).unwrap();
        out
    };
    assert_eq!(read(3 * 4096), [0xff; 4096], "the pattern of poison");
    assert_eq!(read(4 * 4096), bytes[4 * 4096..5 * 4096]);
    let mut shown = vec![0; 4096];
    device.read_views(view.offset + 3 * 4096, &mut shown).unwrap();
    assert_eq!(shown, [0xf0, 0xff].repeat(2048), "sign, 8 exponent and 3 mantissa planes of the pattern");
    let poison = device.poison();
    assert_eq!((poison.len(), poison[0].dpa, poison[0].cause), (1, 3 * 4096, poison::Cause::Damaged));
    assert_eq!(poison[0].tensor.as_deref(), Some("w"));
    assert!(device.write_base(3 * 4096 + 8, &[1; 8]).is_err(), "part of a poisoned block cannot be written");
    device.write_base(3 * 4096, &bytes[..4096]).unwrap();
    assert_eq!(read(3 * 4096), bytes[..4096]);
    assert_eq!(device.poison(), []);
    let requests = device.stats().requests;
    assert_eq!((requests.damaged_reads, requests.poisoned_blocks, requests.poison_events), (2, 0, 1));
}

#[test]
fn a_damaged_block_is_the_pattern_whatever_form_it_would_have() {
    let device = device(Mode::Trace, Codec::Tree);
    let (_, bytes) = weights(Mode::Trace);
    device.create_tensor(spec("w", Some(0), 64 << 10, Format::Bf16)).unwrap();
    device.write_base(0, &bytes).unwrap();
    let view = device.create_view("w", "fp8_e4m3fn").unwrap();
    device.flip_stored_bit(3, 5);
    let mut shown = vec![0; 2048];
    device.read_views(view.offset + 3 * 2048, &mut shown).unwrap();
    assert_eq!(shown, [0xff; 2048]);
}

#[test]
fn poison_is_injected_listed_and_cleared() {
    let (device, bytes) = weights(Mode::Trace);
    let stored = device.stats().device.stored_bytes;
    device.inject_poison(4096 + 7, 4096).unwrap();
    let listed: Vec<_> =
        device.poison().iter().map(|poison| (poison.dpa, poison.cause, poison.event)).collect();
    assert_eq!(listed, [(4096, poison::Cause::Injected, 1), (8192, poison::Cause::Injected, 2)]);
    assert!(device.stats().device.stored_bytes < stored, "what is lost takes no room");
    let mut out = vec![0; 4 * 4096];
    device.read_base(0, &mut out).unwrap();
    assert!(out[4096..3 * 4096].iter().all(|byte| *byte == 0xff) && out[..4096] == bytes[..4096]);
    // Only what is poisoned is cleared.
    device.clear_poison(0, 2 * 4096).unwrap();
    device.read_base(0, &mut out).unwrap();
    assert!(
        out[..4096] == bytes[..4096]
            && out[4096..2 * 4096] == [0; 4096]
            && out[2 * 4096..3 * 4096] == [0xff; 4096]
    );
    assert_eq!(device.poison().len(), 1);
    assert!(matches!(device.inject_poison(BASE, 1), Err(DeviceError::PastWindow { .. })));
    let (plain, _) = weights(Mode::Plain);
    assert!(matches!(plain.inject_poison(0, 1), Err(DeviceError::Plain)));
}

#[test]
fn an_empty_device_of_64_gib_takes_no_memory_to_speak_of() {
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = resident();
    for mode in [Mode::Trace, Mode::Plain] {
        let device = Device::new(DeviceConfig { mode, ..DeviceConfig::new(64 << 30, 64 << 30) }).unwrap();
        device.create_tensor(spec("all", None, 64 << 30, Format::Bf16)).unwrap();
        device.create_view("all", "e8m3:packed").unwrap();
        let mut word = [1; 8];
        device.read_base(40 << 30, &mut word).unwrap();
        assert_eq!(word, [0; 8]);
    }
    assert!(resident() < before + (100 << 10), "{} KiB more", resident() - before);
}

#[test]
fn the_directory_is_read_by_loads() {
    let (device, _) = weights(Mode::Trace);
    let view = device.create_view("w", "fp8_e4m3fn@-4").unwrap();
    let mut bytes = vec![0; usize::try_from(DIRECTORY_BYTES).unwrap()];
    device.read_views(0, &mut bytes).unwrap();
    let directory = lamina_abi::decode(&bytes).unwrap();
    assert_eq!((directory.base_bytes, directory.views_bytes), (BASE, 64 << 20));
    let found = directory.view("w", "fp8_e4m3fn@-4").unwrap();
    assert_eq!((found.offset, found.length, found.scale_exp), (view.offset, view.length, -4));
    assert!(view.offset.is_multiple_of(2 << 20));
    assert_eq!(directory.tensors[0].shape, "32768");
}

#[test]
fn a_packed_view_read_page_by_page_fetches_each_block_once() {
    let (device, _) = weights(Mode::Trace);
    let info = device.create_view("w", "e8m3:packed").unwrap();
    let (mut whole, mut pages) = (vec![0; usize::try_from(info.length).unwrap()], Vec::new());
    device.read_views(info.offset, &mut whole).unwrap();
    let once = device.stats().requests.views;
    for at in (0..info.length).step_by(4096) {
        let mut page = [0; 4096];
        device.read_views(info.offset + at, &mut page).unwrap();
        pages.extend_from_slice(&page);
    }
    assert!(pages[..whole.len()] == whole);
    let paged = device.stats().requests.views;
    assert_eq!(paged.stored_bytes_fetched, 2 * once.stored_bytes_fetched);
    // What was kept is not served once the block is another one.
    device.read_views(info.offset, &mut [0; 4096]).unwrap();
    device.write_base(4096, &[0x3f; 4096]).unwrap();
    let mut page = [0; 4096];
    device.read_views(info.offset + 4096, &mut page).unwrap();
    let mut again = [0; 4096];
    device.read_views(info.offset + 4096, &mut again).unwrap();
    assert!(page == again && page != pages[4096..8192]);
}
