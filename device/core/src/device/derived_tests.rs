//! Tensors that are coded against others: never read against other words than they were coded with,
//! whatever is stored, removed, killed or damaged meanwhile.

use std::{
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::AtomicBool,
};

use proptest::prelude::*;

use super::image_tests::{BLOCK, BLOCKS, agree, bytes, config, is_refused, open_as, read_all, settle};
use super::*;
use crate::{
    layout::Layout,
    tensor::{NoBase, TensorError},
};
use lamina_codec::{
    format::Format,
    kv::KvLayout,
    testing::{self, spelling},
};
use lamina_store::{
    failpoints::{Failpoints, Killed},
    snapshot::restore,
};

/// Blocks of each of the tensors here, which follow each other.
pub(super) const EACH: usize = 8;
pub(super) const NAMES: [&str; 3] = ["base", "tuned", "tuned-again"];

fn spec(name: &str, dpa: u64, length: u64, format: Format, base: Option<&str>) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        dpa: Some(dpa),
        length,
        elements: None,
        shape: Vec::new(),
        format,
        layout: Layout::Weight,
        codec: None,
        base: base.map(str::to_owned),
    }
}

/// The tensor at this place, whose base is the one before.
pub(super) fn tensor(number: usize) -> TensorSpec {
    let (at, length) = ((number * EACH * BLOCK) as u64, (EACH * BLOCK) as u64);
    spec(NAMES[number], at, length, Format::Bf16, number.checked_sub(1).map(|before| NAMES[before]))
}

pub(super) fn new_image(failpoints: &Failpoints) -> Image {
    failpoints.make_current();
    let image = Image::in_memory(config().superblock()).unwrap();
    let device = Device::open(image.clone(), &config()).unwrap();
    (0..NAMES.len()).for_each(|number| drop(device.create_tensor(tensor(number)).unwrap()));
    image
}

pub(super) fn in_memory() -> Device {
    let device = Device::new(config()).unwrap();
    (0..NAMES.len()).for_each(|number| drop(device.create_tensor(tensor(number)).unwrap()));
    device
}

/// These words, of which a few bits are others.
pub(super) fn near(words: &[u8], seed: u64) -> Vec<u8> {
    let mut near = words.to_vec();
    let start = usize::try_from(seed % 89).unwrap();
    near.iter_mut().skip(start).step_by(97).for_each(|byte| *byte ^= 1 << (seed % 8));
    near
}

pub(super) fn read(device: &Device, block: usize, count: usize) -> Vec<u8> {
    let mut out = vec![0xa5; count * BLOCK];
    device.read_base((block * BLOCK) as u64, &mut out).unwrap();
    out
}

pub(super) fn write(device: &Device, block: usize, bytes: &[u8]) {
    device.write_base((block * BLOCK) as u64, bytes).unwrap();
}

/// Blocks that are stored as differences.
pub(super) fn differences(device: &Device) -> usize {
    let blocks = 0..BLOCKS as u64;
    blocks.filter(|block| device.blocks.difference_at(*block).is_some()).count()
}

/// A device whose tensors are near to each other, and what they hold.
pub(super) fn filled(device: &Device) -> Vec<u8> {
    let base = bytes(2, EACH * BLOCK);
    let tuned = near(&base, 3);
    let again = near(&tuned, 12);
    let all = [base, tuned, again].concat();
    write(device, 0, &all);
    all
}

#[derive(Clone, Debug)]
enum Operation {
    Write {
        at: usize,
        length: usize,
        seed: u64,
    },
    /// Blocks of a derived tensor become nearly those of its base, or just those.
    Near {
        block: usize,
        count: usize,
        seed: Option<u64>,
    },
    Discard {
        at: usize,
        length: usize,
    },
    Inject {
        block: usize,
    },
    Clear {
        at: usize,
        length: usize,
    },
    /// Makes the last tensor, or removes it.
    Toggle,
    /// Stores a derived tensor by itself, if it is there.
    Detach {
        number: usize,
    },
}

fn operation() -> impl Strategy<Value = Operation> {
    let all = NAMES.len() * EACH;
    let range = move || {
        let whole = (0..all, 1..9_usize).prop_map(|(block, count)| (block * BLOCK, count * BLOCK));
        let odd = (0..all * BLOCK, 1..3 * BLOCK);
        prop_oneof![2 => whole, 1 => odd].prop_map(move |(at, length)| (at, length.min(all * BLOCK - at)))
    };
    prop_oneof![
        4 => (range(), any::<u64>()).prop_map(|((at, length), seed)| Operation::Write { at, length, seed }),
        6 => (EACH..all, 1..9_usize, prop::option::of(any::<u64>())).prop_map(move |(block, count, seed)| {
            Operation::Near { block, count: count.min(EACH - block % EACH), seed }
        }),
        1 => range().prop_map(|(at, length)| Operation::Discard { at, length }),
        1 => (0..all).prop_map(|block| Operation::Inject { block }),
        1 => range().prop_map(|(at, length)| Operation::Clear { at, length }),
        1 => Just(Operation::Toggle),
        1 => (1..NAMES.len()).prop_map(|number| Operation::Detach { number }),
    ]
}

/// Where an operation changes what `before` holds, and to what.
fn change(operation: &Operation, before: &[u8]) -> Option<(usize, Vec<u8>)> {
    match operation {
        Operation::Write { at, length, seed } => Some((*at, bytes(*seed, *length))),
        Operation::Near { block, count, seed } => {
            let base = &before[(block - EACH) * BLOCK..][..count * BLOCK];
            Some((block * BLOCK, seed.map_or_else(|| base.to_vec(), |seed| near(base, seed))))
        }
        Operation::Discard { at, length } => Some((*at, vec![0; *length])),
        Operation::Inject { block } => Some((block * BLOCK, vec![poison::PATTERN; BLOCK])),
        Operation::Clear { at, length } => {
            let from = at / BLOCK * BLOCK;
            let mut blocks = before[from..(at + length).next_multiple_of(BLOCK)].to_vec();
            let lost = blocks.chunks_mut(BLOCK).filter(|block| block.iter().all(|byte| *byte == 0xff));
            lost.for_each(|block| block.fill(0));
            Some((from, blocks))
        }
        Operation::Toggle | Operation::Detach { .. } => None,
    }
}

fn perform(
    device: &Device,
    operation: &Operation,
    change: Option<&(usize, Vec<u8>)>,
) -> Result<(), DeviceError> {
    match (operation, change) {
        (Operation::Write { .. } | Operation::Near { .. }, Some((at, data))) => {
            device.write_base(*at as u64, data)
        }
        (Operation::Discard { at, length }, _) => device.discard(*at as u64, *length as u64),
        (Operation::Inject { block }, _) => device.inject_poison((block * BLOCK) as u64, 1),
        (Operation::Clear { at, length }, _) => device.clear_poison(*at as u64, *length as u64),
        (Operation::Detach { number }, _) => {
            match device.detach_tensor(NAMES[*number], |_| ControlFlow::Continue(())) {
                Err(DeviceError::Tensor(TensorError::Unknown { .. })) => Ok(()),
                detached => detached.map(drop),
            }
        }
        _ if device.tensors().len() == NAMES.len() => device.remove_tensor(NAMES[2]),
        _ => device.create_tensor(tensor(2)).map(drop),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_kill_between_any_two_stores_leaves_each_block_against_the_words_it_was_coded_with(
        operations in prop::collection::vec((operation(), prop_oneof![0..60_i64, 0..500_i64]), 1..30),
    ) {
        let failpoints = Failpoints::none();
        let image = new_image(&failpoints);
        let mut workers = 0..;
        let mut open = || open_as(&image, workers.next().unwrap());
        let mut device = open();
        let mut model = vec![0; BLOCKS * BLOCK];
        let all = filled(&device);
        model[..all.len()].copy_from_slice(&all);
        prop_assert!(differences(&device) > EACH);
        for (operation, stores) in operations {
            let mut after = model.clone();
            let mut change = change(&operation, &model);
            if let Some((at, data)) = &mut change {
                // What shows as poison is told apart by that alone.
                if !matches!(operation, Operation::Inject { .. } | Operation::Clear { .. }) {
                    let full = |block: &&mut [u8]| block.iter().all(|byte| *byte == 0xff);
                    data.chunks_mut(BLOCK).filter(full).for_each(|block| block.fill(1));
                }
                after[*at..*at + data.len()].copy_from_slice(data);
            }
            failpoints.kill_after(stores);
            let done = catch_unwind(AssertUnwindSafe(|| perform(&device, &operation, change.as_ref())));
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
                    std::mem::forget(device);
                    device = open();
                    settle(&mut model, &after, read_all(&device));
                }
            }
            agree(&device);
        }
        drop(device);
        let device = Device::open(image, &config()).unwrap();
        prop_assert!(read_all(&device) == model);
        // Everything can be given back: no segment was lost on the way.
        device.discard(0, device.base_bytes()).unwrap();
        prop_assert_eq!(device.blocks.used_bytes(), 0);
    }

    /// The tensor beside has the same words and no base.
    #[test]
    fn every_view_of_a_derived_tensor_is_that_of_its_words(
        format in prop::sample::select(Format::ALL.to_vec()),
        codec in prop::sample::select(Codec::ALL.to_vec()),
        seeds in prop::collection::vec((any::<u64>(), any::<bool>()), 5),
        odd in 0_u64..BLOCK as u64 / 4,
        spellings in prop::collection::vec(spelling(), 1..6),
        reads in prop::collection::vec((any::<prop::sample::Index>(), 1_usize..9000), 1..8),
    ) {
        let config = DeviceConfig { decoded_bytes: 16 << 10, views_bytes: 64 << 20, ..config() };
        let device = Device::new(config).unwrap();
        let length = (seeds.len() * BLOCK) as u64 - 4 * odd;
        let (base, own, beside) = (0, 8 * BLOCK as u64, 16 * BLOCK as u64);
        let with = |spec: TensorSpec| TensorSpec { codec: Some(codec), ..spec };
        device.create_tensor(with(spec("base", base, length, format, None))).unwrap();
        device.create_tensor(with(spec("own", own, length, format, Some("base")))).unwrap();
        device.create_tensor(with(spec("beside", beside, length, format, None))).unwrap();
        let of_base: Vec<u8> = seeds.iter().flat_map(|(seed, _)| bytes(seed | 2, BLOCK)).collect();
        let words: Vec<u8> = seeds.iter().zip(of_base.chunks(BLOCK)).flat_map(|((seed, is_near), theirs)| {
            if *is_near { near(theirs, *seed) } else { testing::bytes(*seed, BLOCK) }
        }).collect();
        let length = usize::try_from(length).unwrap();
        device.write_base(base, &of_base[..length]).unwrap();
        device.write_base(own, &words[..length]).unwrap();
        device.write_base(beside, &words[..length]).unwrap();
        for (at, count) in &reads {
            let at = at.index(length);
            let mut found = vec![0xa5; (*count).min(length - at)];
            device.read_base(own + at as u64, &mut found).unwrap();
            prop_assert!(found == words[at..][..found.len()], "{} bytes at {at}", found.len());
        }
        for spelling in &spellings {
            let Ok(view) = device.create_view("own", spelling) else { continue };
            let other = device.create_view("beside", spelling).unwrap();
            for (at, count) in &reads {
                let all = usize::try_from(view.length).unwrap();
                let at = at.index(all);
                let mut found = [vec![0xa5; (*count).min(all - at)], vec![0x5a; (*count).min(all - at)]];
                device.read_views(view.offset + at as u64, &mut found[0]).unwrap();
                device.read_views(other.offset + at as u64, &mut found[1]).unwrap();
                prop_assert!(found[0] == found[1], "{spelling} at {at}");
            }
        }
    }
}

#[test]
fn what_is_equal_to_its_base_stores_nothing_and_what_is_far_is_stored_by_itself() {
    let device = in_memory();
    let base = bytes(2, EACH * BLOCK);
    write(&device, 0, &base);
    write(&device, EACH, &base);
    let stored = |name: &str| device.stats().tensors.into_iter().find(|is| is.name == name).unwrap();
    assert_eq!((differences(&device), stored("tuned").stored_bytes), (EACH, 0));
    assert_eq!(stored("tuned").base_tensor.as_deref(), Some("base"));
    assert!(read(&device, EACH, EACH) == base);
    let stats = device.stats();
    assert_eq!(stats.requests.differences_read, EACH as u64);
    assert!(stats.requests.base_bytes_fetched >= 2 * stored("base").stored_bytes, "to code and to read");
    // The base's bytes are among those of the read.
    assert_eq!(stats.requests.base.stored_bytes_fetched, stored("base").stored_bytes);
    let noise = testing::bytes(7, EACH * BLOCK);
    write(&device, EACH, &noise);
    assert_eq!(differences(&device), 0);
    assert!(read(&device, EACH, EACH) == noise);
    // Zeros are no difference, whatever the base holds.
    device.discard((EACH * BLOCK) as u64, (EACH * BLOCK) as u64).unwrap();
    assert_eq!((differences(&device), stored("tuned").stored_bytes), (0, 0));
    assert!(read(&device, EACH, EACH) == vec![0; EACH * BLOCK]);
}

#[test]
fn a_view_of_a_difference_fetches_its_planes_of_both() {
    let device = in_memory();
    filled(&device);
    let fetched = |spelling: &str| {
        let view = device.create_view("tuned", spelling).unwrap();
        device.read_views(view.offset, &mut vec![0; usize::try_from(view.length).unwrap()]).unwrap();
        let report = device.stats().views.into_iter().find(|is| is.info.view == view.view).unwrap();
        (report.traffic.stored_bytes_fetched, report.traffic.planes_fetched)
    };
    let (full, planes) = fetched("full");
    let (upper, fewer) = fetched("e8m1");
    assert_eq!(planes, 2 * 16 * EACH as u64);
    assert_eq!(fewer, 2 * 10 * EACH as u64);
    assert!(upper < full, "{upper} of {full}");
}

#[test]
fn a_store_into_the_base_leaves_what_is_derived_as_it_was() {
    let device = in_memory();
    let all = filled(&device);
    let before = differences(&device);
    assert!(before > EACH);
    // A part of a block, a block, several, none of them; through the middle of the chain too.
    for (at, length) in [(5, 100), (2 * BLOCK, BLOCK), (4 * BLOCK, 3 * BLOCK), (9 * BLOCK + 1, 2 * BLOCK)] {
        device.write_base(at as u64, &testing::bytes(at as u64, length)).unwrap();
        let found = read(&device, 2 * EACH, EACH);
        assert!(found == all[2 * EACH * BLOCK..], "after {length} bytes at {at}");
    }
    let of_second = read(&device, EACH, EACH);
    assert!(of_second[2 * BLOCK - 1..] != all[(EACH + 2) * BLOCK - 1..2 * EACH * BLOCK]);
    assert!(of_second[..BLOCK] == all[EACH * BLOCK..][..BLOCK]);
    assert!(differences(&device) < before);
    device.discard(0, (EACH * BLOCK) as u64).unwrap();
    assert!(read(&device, EACH, EACH) == of_second);
    assert!(read(&device, 2 * EACH, EACH) == all[2 * EACH * BLOCK..]);
}

#[test]
fn a_base_is_neither_removed_nor_resized_and_says_for_whom() {
    let device = in_memory();
    let all = filled(&device);
    for refused in [
        device.remove_tensor("base"),
        device.resize_tensor("base", 4096).map(drop),
        crate::load::drop_tensor(&device, "base").map_err(|why| match why {
            crate::load::LoadError::Device { source, .. } => source,
            other => panic!("{other}"),
        }),
    ] {
        let Err(DeviceError::Tensor(why @ TensorError::IsBase { .. })) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            why.to_string(),
            "base is the base of tuned: detach or remove what is derived from it before it is removed or resized"
        );
    }
    let refused = device.resize_tensor("tuned-again", 4096);
    assert!(matches!(refused, Err(DeviceError::Tensor(TensorError::IsDerived { .. }))), "{refused:?}");
    assert!(read(&device, 0, 3 * EACH) == all);
    // What was derived is whole when the tensor is gone, and the base free.
    device.remove_tensor("tuned-again").unwrap();
    device.remove_tensor("tuned").unwrap();
    assert_eq!(differences(&device), 0);
    assert!(read(&device, 0, 3 * EACH) == all);
    device.resize_tensor("base", 4096).unwrap();
    device.remove_tensor("base").unwrap();
    device.discard(0, (3 * EACH * BLOCK) as u64).unwrap();
    assert_eq!(device.blocks.used_bytes(), 0);
}

#[test]
fn bases_that_cannot_be_are_refused() {
    let device = in_memory();
    let (at, length) = ((3 * EACH * BLOCK) as u64, (EACH * BLOCK) as u64);
    let why = |spec: TensorSpec| match device.create_tensor(spec) {
        Err(DeviceError::Tensor(TensorError::Base { why, .. })) => why,
        other => panic!("{other:?}"),
    };
    let of = |base| spec("x", at, length, Format::Bf16, Some(base));
    assert_eq!(why(of("nobody")), NoBase::Unknown);
    assert_eq!(why(of("x")), NoBase::Unknown);
    let other = why(TensorSpec { format: Format::Fp16, ..of("base") });
    assert!(matches!(other, NoBase::Elements { own_format: Format::Fp16, .. }), "{other}");
    assert!(matches!(why(TensorSpec { length: length - 2, ..of("base") }), NoBase::Elements { .. }));
    let layout = Layout::Kv(KvLayout::rows(64, 128));
    assert_eq!(why(TensorSpec { layout, ..of("base") }), NoBase::Kv);
    device.create_tensor(TensorSpec { layout, name: "kv".into(), base: None, ..of("") }).unwrap();
    let behind = at + length;
    assert_eq!(why(TensorSpec { dpa: Some(behind), ..of("kv") }), NoBase::Kv);
    // The chain has three bases at most.
    device
        .create_tensor(TensorSpec { name: "third".into(), dpa: Some(behind), ..of("tuned-again") })
        .unwrap();
    assert_eq!(why(TensorSpec { dpa: Some(behind + length), ..of("third") }), NoBase::Depth);
    for mode in [Mode::Plain, Mode::GComp] {
        let device = Device::new(DeviceConfig { mode, ..config() }).unwrap();
        device.create_tensor(tensor(0)).unwrap();
        let refused = device.create_tensor(tensor(1)).unwrap_err().to_string();
        assert!(refused.contains(&format!("a device of mode {mode} stores no differences")), "{refused}");
    }
}

#[test]
fn what_is_a_difference_to_a_lost_block_is_lost_and_never_something_else() {
    let device = in_memory();
    let all = filled(&device);
    let lost = |device: &Device| device.poison().iter().map(|is| is.dpa / BLOCK as u64).collect::<Vec<_>>();
    device.flip_stored_bit(1, 3);
    // The tensor behind it in the chain is found lost first.
    assert!(read(&device, 2 * EACH + 1, 1) == vec![poison::PATTERN; BLOCK]);
    assert!(read(&device, 2 * EACH, 1) == all[2 * EACH * BLOCK..][..BLOCK]);
    let why = device.poison().into_iter().next().unwrap().why;
    assert!(why.contains("tuned-again has the difference to tuned there"), "{why}");
    assert!(read(&device, EACH + 1, 1) == vec![poison::PATTERN; BLOCK]);
    assert!(read(&device, 1, 1) == vec![poison::PATTERN; BLOCK]);
    assert_eq!(lost(&device), [1, EACH as u64 + 1, 2 * EACH as u64 + 1]);
    // Nobody read this one before its base is stored anew.
    device.flip_stored_bit(2, 3);
    write(&device, 2, &bytes(6, BLOCK));
    assert!(read(&device, 2, 1) == bytes(6, BLOCK));
    assert!(read(&device, EACH + 2, 1) == vec![poison::PATTERN; BLOCK]);
    // Stored anew it is by itself, whatever the base is.
    write(&device, EACH + 1, &bytes(7, BLOCK));
    assert!(read(&device, EACH + 1, 1) == bytes(7, BLOCK));
    assert!(device.blocks.difference_at(EACH as u64 + 1).is_none());
    // A part of what is lost cannot be stored.
    assert!(device.write_base(((EACH + 2) * BLOCK) as u64, &[1]).is_err());
    // Poison that is injected takes nothing else with it.
    device.inject_poison((3 * BLOCK) as u64, 1).unwrap();
    assert!(read(&device, EACH + 3, 1) == all[(EACH + 3) * BLOCK..][..BLOCK]);
}

#[test]
fn a_difference_of_nobody_is_damage() {
    let device = in_memory();
    let all = filled(&device);
    // As an image may say that nobody wrote.
    let mut bundle = lamina_codec::block::Bundle::new();
    lamina_codec::Encoder::new().difference(Format::Bf16, Codec::Tree, &[3; BLOCK], &mut bundle);
    for block in [1, 3 * EACH as u64] {
        device.coded_store().unwrap().replace(block).unwrap().publish(&bundle).unwrap();
        let at = usize::try_from(block).unwrap();
        assert!(read(&device, at, 1) == vec![poison::PATTERN; BLOCK]);
    }
    assert!(read(&device, EACH, 1) == all[EACH * BLOCK..][..BLOCK]);
}

#[test]
fn an_image_and_a_snapshot_have_bases_and_older_programs_refuse_them() {
    let image = new_image(&Failpoints::none());
    let device = Device::open(image.clone(), &config()).unwrap();
    let all = filled(&device);
    let text = text_of(&image);
    let saved = text["tensors"].as_array().unwrap();
    let layout = |name: &str| &saved.iter().find(|is| is["name"] == name).unwrap()["layout"];
    assert_eq!(*layout("tuned"), serde_json::json!({ "kind": "derived", "base": "base" }));
    // What such a program knows of layouts.
    assert!(serde_json::from_value::<Layout>(layout("tuned").clone()).is_err());
    let folder = tempfile::tempdir().unwrap();
    let (snapshot, path) = (folder.path().join("s"), folder.path().join("i"));
    device.save(&mut std::fs::File::create(&snapshot).unwrap()).unwrap();
    restore(&snapshot, &path).unwrap();
    let opened = Device::open(Image::open(&path).unwrap().unwrap(), &config()).unwrap();
    drop(device);
    let reopened = Device::open(image, &config()).unwrap();
    for device in [opened, reopened] {
        assert!(read(&device, 0, 3 * EACH) == all);
        assert_eq!(device.tensor("tuned-again").unwrap().base.as_deref(), Some("tuned"));
        assert!(device.remove_tensor("base").is_err());
        assert!(differences(&device) > EACH);
        write(&device, 0, &bytes(3, EACH * BLOCK));
        assert!(read(&device, EACH, 2 * EACH) == all[EACH * BLOCK..]);
    }
}

#[test]
fn who_reads_while_the_base_is_stored_and_tensors_come_and_go_reads_what_was_stored() {
    let device = in_memory();
    let all = filled(&device);
    let ended = AtomicBool::new(false);
    let of = |number: usize| all[number * EACH * BLOCK..][..EACH * BLOCK].to_vec();
    std::thread::scope(|scope| {
        for number in [1, 2] {
            let (device, ended, of) = (&device, &ended, &of);
            scope.spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    assert!(read(device, number * EACH, EACH) == of(number), "{}", NAMES[number]);
                }
            });
        }
        let (device, ended, all) = (&device, &ended, &all);
        scope.spawn(move || {
            let _ends = Ends(ended);
            for round in 0..60_u64 {
                // Stored anew, the derived ones are differences again.
                write(device, 0, &all[..EACH * BLOCK]);
                write(device, EACH, &all[EACH * BLOCK..]);
                write(device, usize::try_from(round).unwrap() % EACH, &testing::bytes(round, BLOCK));
                if round % 3 == 0 {
                    device.remove_tensor("tuned-again").unwrap();
                    device.create_tensor(tensor(2)).unwrap();
                    assert!(device.remove_tensor("base").is_err());
                }
            }
        });
    });
}

/// Has others end too, whatever ends this one.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
