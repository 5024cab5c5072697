//! Targets against memory that deals granules out one by one.

use proptest::prelude::*;

use super::*;
use crate::{
    device::{DeviceConfig, TensorSpec},
    layout::Layout,
    stats::Interleaving,
};
use lamina_codec::{Codec, format::Format, kv::KvLayout};

const BASE: usize = 64 << 10;
const SETS: [&str; 13] = [
    "2x256", "2x512", "2x1K", "2x2K", "2x4K", "2x8K", "2x16K", "4x256", "4x512", "4x1K", "4x2K", "4x4K",
    "4x8K",
];

/// A device with a bf16 tensor, one that is coded by KV windows, and memory that is neither.
fn device(set: &str, mode: Mode) -> Device {
    let interleaving = Interleaving { interleave: set.parse().unwrap(), bandwidth: 1.0 };
    let device = Device::new(DeviceConfig {
        mode,
        codec: Codec::Tree,
        interleaving: Some(interleaving),
        ..DeviceConfig::new(BASE as u64, 8 << 20)
    });
    let device = device.unwrap();
    let spec = |name: &str, dpa: usize, layout| TensorSpec {
        name: name.to_owned(),
        dpa: Some(dpa as u64),
        length: 20 << 10,
        elements: None,
        shape: vec![160, 64],
        format: Format::Bf16,
        layout,
        codec: None,
        base: None,
    };
    device.create_tensor(spec("w", 4096, Layout::Weight)).unwrap();
    device.create_tensor(spec("k", 28 << 10, Layout::Kv(KvLayout::rows(64, 64)))).unwrap();
    device.create_view("w", "e8m3").unwrap();
    device
}

/// Where a target's bytes lie, granule by granule.
fn places(set: Interleave, target: u32) -> Vec<usize> {
    let granule = usize::try_from(set.granule()).unwrap();
    let dealt = (0..BASE / granule).filter(|number| number % set.ways() as usize == target as usize);
    dealt.flat_map(|number| number * granule..(number + 1) * granule).collect()
}

#[derive(Clone, Debug)]
enum Step {
    WriteTarget(u32, usize, usize, u8),
    WriteBase(usize, usize, u8),
    ReadTarget(u32, usize, usize),
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0_usize..BASE, prop_oneof![1_usize..300, 1_usize..9000]);
    prop_oneof![
        4 => (0_u32..4, place(), any::<u8>()).prop_map(|(target, (at, length), with)| Step::WriteTarget(target, at, length, with)),
        2 => (place(), any::<u8>()).prop_map(|((at, length), with)| Step::WriteBase(at, length, with)),
        3 => (0_u32..4, place()).prop_map(|(target, (at, length))| Step::ReadTarget(target, at, length)),
        1 => Just(Step::Flush),
    ]
}

/// Bytes that look like floats more than noise does.
fn bytes(length: usize, with: u8) -> Vec<u8> {
    (0..length)
        .map(|at| if at % 2 == 0 { with.wrapping_add(at.to_le_bytes()[0] % 61) } else { 0x3f })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn targets_are_the_region_dealt_out(set in prop::sample::select(&SETS[..]), mode in prop::sample::select(&[Mode::Trace, Mode::GComp, Mode::Plain][..]), steps in prop::collection::vec(step(), 1..30)) {
        let device = device(set, mode);
        let set = device.set().unwrap();
        let target_bytes = BASE / set.ways() as usize;
        let mut model = vec![0; BASE];
        for step in steps {
            match step {
                Step::WriteTarget(target, at, length, with) => {
                    let (target, at) = (target % set.ways(), at % target_bytes);
                    let data = bytes(length.min(target_bytes - at), with);
                    device.write_target(target, at as u64, &data).unwrap();
                    for (place, byte) in places(set, target)[at..].iter().zip(data) {
                        model[*place] = byte;
                    }
                }
                Step::WriteBase(at, length, with) => {
                    let data = bytes(length.min(BASE - at), with);
                    device.write_base(at as u64, &data).unwrap();
                    model[at..at + data.len()].copy_from_slice(&data);
                }
                Step::ReadTarget(target, at, length) => {
                    let (target, at) = (target % set.ways(), at % target_bytes);
                    let mut found = vec![0; length.min(target_bytes - at)];
                    device.read_target(target, at as u64, &mut found).unwrap();
                    let want: Vec<u8> = places(set, target)[at..at + found.len()].iter().map(|at| model[*at]).collect();
                    prop_assert!(found == want);
                }
                Step::Flush => device.flush(0, BASE as u64).unwrap(),
            }
        }
        let mut found = vec![0; BASE];
        device.read_base(0, &mut found).unwrap();
        prop_assert!(found == model);
        let view = device.views().remove(0);
        let mut found = vec![0; 20 << 10];
        device.read_views(view.offset, &mut found).unwrap();
        let want = model[4096..24 << 10].chunks(2).flat_map(|word| [word[0] & 0xf0, word[1]]);
        prop_assert!(found.into_iter().eq(want));
    }
}

#[test]
fn a_set_read_target_by_target_fetches_each_block_once() {
    for set in SETS {
        let device = device(set, Mode::Trace);
        let set = device.set().unwrap();
        device.write_base(0, &bytes(BASE, 9)).unwrap();
        device.flush(0, BASE as u64).unwrap();
        let before = device.stats();
        device.read_base(0, &mut vec![0; BASE]).unwrap();
        let whole = device.stats();
        let mut page = [0; 4096];
        for at in (0..BASE as u64 / u64::from(set.ways())).step_by(4096) {
            for target in 0..set.ways() {
                device.read_target(target, at, &mut page).unwrap();
            }
        }
        let targets = device.stats();
        let stored = |from: &crate::stats::StatsReport, to: &crate::stats::StatsReport| {
            let fetched = |stats: &crate::stats::StatsReport| {
                (stats.requests.base.stored_bytes_fetched, stats.requests.base.plain_bytes_fetched.unwrap())
            };
            (fetched(to).0 - fetched(from).0, fetched(to).1 - fetched(from).1)
        };
        assert_eq!(stored(&before, &whole).1, BASE as u64);
        assert_eq!(stored(&whole, &targets), stored(&before, &whole), "{set}");
        // And each device moved its part of it.
        let reported = targets.interleave.unwrap();
        assert_eq!(reported.by, "hardware");
        let sum =
            |field: fn(&crate::stats::MemberReport) -> u64| reported.devices.iter().map(field).sum::<u64>();
        assert_eq!(
            sum(|each| each.stored_bytes_fetched),
            targets.requests.base.stored_bytes_fetched,
            "{set}"
        );
        assert_eq!(sum(|each| each.plain_bytes_fetched), 2 * BASE as u64, "{set}");
        assert_eq!(sum(|each| each.written_bytes), BASE as u64);
        assert_eq!(sum(|each| each.stored_bytes_written), targets.writes.stored_bytes_written, "{set}");
        // One request for everything, and then one for each page of each target, which asks its own
        // device at least.
        let pages = BASE as u64 / 4096 / u64::from(set.ways());
        assert!(reported.devices.iter().all(|each| each.reads > pages), "{set}: {:?}", reported.devices);
    }
}

#[test]
fn targets_end_where_they_end() {
    let device = device("4x4K", Mode::Trace);
    let target = BASE as u64 / 4;
    let mut page = [0; 4096];
    device.read_target(3, target - 4096, &mut page).unwrap();
    for (number, offset) in [(3, target - 4095), (0, target), (0, u64::MAX), (4, 0), (u32::MAX, 0)] {
        let read = device.read_target(number, offset, &mut page);
        assert!(matches!(read, Err(DeviceError::PastWindow { .. })), "{number} {offset}");
        let written = device.write_target(number, offset, &page);
        assert!(matches!(written, Err(DeviceError::PastWindow { .. })), "{number} {offset}");
    }
    let alone = Device::new(DeviceConfig::new(BASE as u64, 8 << 20)).unwrap();
    assert!(alone.read_target(0, 0, &mut page).is_err());
    let chunks = Interleaving { interleave: Interleave::chunks(2).unwrap(), bandwidth: 1.0 };
    let chunked = DeviceConfig { interleaving: Some(chunks), ..DeviceConfig::new(8 << 20, 8 << 20) };
    assert!(Device::new(chunked).unwrap().read_target(0, 0, &mut page).is_err());
}

#[test]
fn a_set_that_granules_do_not_fill_is_refused() {
    let over = |interleave| {
        let interleaving = Some(Interleaving { interleave, bandwidth: 1.0 });
        Device::new(DeviceConfig { interleaving, ..DeviceConfig::new(20 << 10, 8 << 20) })
    };
    let why = over("4x4K".parse().unwrap()).err().unwrap().to_string();
    assert!(why.contains("granule times the ways"), "{why}");
    // Chunks need not come out even.
    assert!(over(Interleave::chunks(3).unwrap()).is_ok());
}
