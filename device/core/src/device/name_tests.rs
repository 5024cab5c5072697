//! The namespace: against a list that is searched from its beginning, and of many tensors at once.

use lamina_abi::{DIRECTORY_BYTES, Directory, VIEW_ALIGN};
use proptest::prelude::*;

use super::*;
use crate::{layout::Layout, tensor::TensorError};
use lamina_codec::{format::Format, testing::bytes as noise};
use lamina_store::image::Image;

const BLOCK: u64 = BLOCK_BYTES as u64;
const BASE: u64 = 6 << 20;
const VIEWS: u64 = 32 << 20;

fn spec(name: &str, dpa: Option<u64>, length: u64) -> TensorSpec {
    TensorSpec::new(name, dpa, length, Format::Bf16)
}

fn directory(device: &Device) -> Directory {
    let mut bytes = vec![0; usize::try_from(DIRECTORY_BYTES).unwrap()];
    device.read_views(0, &mut bytes).unwrap();
    lamina_abi::decode(&bytes).unwrap()
}

/// A device as a list: name, DPA, length and views of each tensor, a view by its spelling and
/// offset.
#[derive(Clone, Debug, Default, PartialEq)]
struct List(Vec<Listed>);

type Listed = (String, u64, u64, Vec<(String, u64)>);

impl List {
    fn owner(&self, dpa: u64) -> Option<&str> {
        let owns = |dpa: u64, at: u64, length: u64| (at..at + length.next_multiple_of(BLOCK)).contains(&dpa);
        self.0.iter().find(|(_, at, length, _)| owns(dpa, *at, *length)).map(|(name, ..)| &**name)
    }

    /// The lowest place in the shortest gap of blocks that has so many.
    fn fit(&self, blocks: u64) -> Option<u64> {
        let free: Vec<_> = (0..BASE / BLOCK).map(|block| self.owner(block * BLOCK).is_none()).collect();
        let mut gaps = Vec::new();
        let mut at = 0;
        while at < free.len() {
            let length = free[at..].iter().take_while(|free| **free).count();
            gaps.push((length as u64, at as u64));
            at += length.max(1);
        }
        gaps.retain(|(length, _)| *length >= blocks);
        gaps.iter().min().map(|(_, at)| at * BLOCK)
    }

    fn agrees(&self, device: &Device) -> Result<(), TestCaseError> {
        let mut want = self.0.clone();
        want.sort_by_key(|(_, dpa, ..)| *dpa);
        let tensors: Vec<_> = device.tensors().into_iter().map(|is| (is.name, is.dpa, is.length)).collect();
        let listed: Vec<_> =
            want.iter().map(|(name, dpa, length, _)| (name.clone(), *dpa, *length)).collect();
        prop_assert_eq!(&tensors, &listed);
        let of = |(name, _, _, views): &Listed| {
            views.iter().map(|(view, offset)| (*offset, name.clone(), view.clone())).collect::<Vec<_>>()
        };
        let mut shown: Vec<_> = want.iter().flat_map(of).collect();
        shown.sort();
        let views: Vec<_> = device.views().into_iter().map(|is| (is.offset, is.tensor, is.view)).collect();
        prop_assert_eq!(&views, &shown);
        let map = device.map();
        for block in 0..BASE / BLOCK {
            let owner = map.tensor_at(block * BLOCK).map(|tensor| &*tensor.info.name);
            prop_assert_eq!(owner, self.owner(block * BLOCK), "{}", block);
        }
        let reported = directory(device);
        prop_assert!(!reported.is_incomplete);
        let named: Vec<_> = reported.tensors.iter().map(|is| (is.name.clone(), is.dpa, is.length)).collect();
        prop_assert_eq!(&named, &tensors);
        let tensor_of = |at: u32| reported.tensors[usize::try_from(at).unwrap()].name.clone();
        let shown: Vec<_> =
            reported.views.iter().map(|is| (is.offset, tensor_of(is.tensor), is.spelling.clone())).collect();
        prop_assert_eq!(&shown, &views);
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Make { names: Vec<u8>, at: Option<u64>, blocks: u64 },
    Remove(u8),
    View(u8, bool),
    RemoveView(u8, bool),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let blocks = BASE / BLOCK;
    let make = (prop::collection::vec(0_u8..12, 1..4), prop::option::of(0..blocks + 2), 1..blocks / 3);
    let step = prop_oneof![
        4 => make.prop_map(|(names, at, blocks)| Step::Make { names, at, blocks }),
        2 => (0_u8..12).prop_map(Step::Remove),
        3 => (0_u8..12, any::<bool>()).prop_map(|(name, full)| Step::View(name, full)),
        2 => (0_u8..12, any::<bool>()).prop_map(|(name, full)| Step::RemoveView(name, full)),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..40)
}

const fn spelling(full: bool) -> &'static str {
    if full { "full" } else { "e8m3" }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn names_and_places_are_those_of_a_list(steps in steps()) {
        let config = DeviceConfig::new(BASE, VIEWS);
        let image = Image::in_memory(config.superblock()).unwrap();
        let mut device = Device::open(image.clone(), &config).unwrap();
        let mut list = List::default();
        for step in steps {
            let before = (list.clone(), directory(&device).generation);
            let find = |list: &List, name: u8| list.0.iter().position(|is| is.0 == format!("t{name}"));
            match step {
                Step::Make { names, at, blocks } => {
                    let length = blocks * BLOCK;
                    let specs: Vec<_> =
                        names.iter().map(|name| spec(&format!("t{name}"), at.map(|at| at * BLOCK), length)).collect();
                    let mut next = Some(list.clone());
                    for one in &specs {
                        next = next.and_then(|mut next| {
                            let dpa = one.dpa.or_else(|| next.fit(blocks))?;
                            let free = dpa + length <= BASE
                                && (0..blocks).all(|block| next.owner(dpa + block * BLOCK).is_none())
                                && next.0.iter().all(|is| is.0 != one.name);
                            next.0.push((one.name.clone(), dpa, length, Vec::new()));
                            free.then_some(next)
                        });
                    }
                    let made = device.create_tensors(specs);
                    prop_assert_eq!(made.is_ok(), next.is_some(), "{:?}", made);
                    list = next.unwrap_or(list);
                }
                Step::Remove(name) => {
                    let at = find(&list, name);
                    prop_assert_eq!(device.remove_tensor(&format!("t{name}")).is_ok(), at.is_some());
                    at.map(|at| list.0.remove(at));
                }
                Step::View(name, full) => {
                    let made = device.create_view(&format!("t{name}"), spelling(full));
                    let Some(at) = find(&list, name) else {
                        prop_assert!(made.is_err());
                        continue;
                    };
                    let Ok(made) = made else { continue };
                    prop_assert!(made.offset.is_multiple_of(VIEW_ALIGN));
                    prop_assert!(device.has_view(&made));
                    if !list.0[at].3.contains(&(made.view.clone(), made.offset)) {
                        list.0[at].3.push((made.view, made.offset));
                    }
                }
                Step::RemoveView(name, full) => {
                    let at = find(&list, name);
                    let removed = device.remove_view(&format!("t{name}"), spelling(full));
                    let view = at.and_then(|at| {
                        let of = list.0[at].3.iter().position(|(view, _)| view == spelling(full))?;
                        Some(list.0[at].3.remove(of))
                    });
                    let shown = removed.as_ref().ok().map(|view| (view.view.clone(), view.offset));
                    prop_assert_eq!(shown, view);
                    prop_assert!(removed.is_err() || !device.has_view(&removed.unwrap()));
                }
                Step::Reopen => {
                    drop(device);
                    device = Device::open(image.clone(), &config).unwrap();
                    // The content is as before; the number is of another process.
                    list.agrees(&device)?;
                    continue;
                }
            }
            let generation = directory(&device).generation;
            prop_assert_eq!(generation, before.1 + u64::from(list != before.0));
            list.agrees(&device)?;
        }
        for tensor in device.tensors() {
            device.remove_tensor(&tensor.name).unwrap();
        }
        // All of both windows is one gap again.
        device.create_tensor(spec("all", None, BASE)).unwrap();
        prop_assert_eq!(device.create_view("all", "full").unwrap().offset, DIRECTORY_BYTES);
    }
}

#[test]
fn more_tensors_than_a_directory_names_are_made_at_once_and_listed() {
    const COUNT: u64 = 30_000;
    let config = DeviceConfig::new(COUNT * BLOCK, 1 << 30);
    let image = Image::in_memory(config.superblock()).unwrap();
    let device = Device::open(image.clone(), &config).unwrap();
    let name = |number: u64| format!("model.layers.{number}.self_attn.q_proj.weight");
    let made = device.create_tensors((0..COUNT).map(|at| spec(&name(at), None, BLOCK)).collect()).unwrap();
    assert_eq!(device.tensors(), made);
    // The last ones by address have views, and so a place in the directory.
    for number in COUNT - 100..COUNT {
        device.create_view(&name(number), "full").unwrap();
    }
    let reported = directory(&device);
    assert!(reported.is_incomplete && reported.tensors.len() > 10_000 && reported.views.len() == 100);
    assert_eq!(reported.view(&name(COUNT - 1), "full").unwrap().length, BLOCK);
    assert!(reported.tensors.is_sorted_by_key(|tensor| tensor.dpa));
    drop(device);
    let device = Device::open(image, &config).unwrap();
    assert_eq!((device.tensors(), device.views().len()), (made, 100));
    // With room for all again it says nothing of the kind.
    for number in 0..20_000 {
        device.remove_tensor(&name(number)).unwrap();
    }
    assert!(!directory(&device).is_incomplete);
}

#[test]
fn of_tensors_that_are_made_at_once_one_that_cannot_be_leaves_none() {
    let device = Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap();
    let data = noise(7, usize::try_from(BASE).unwrap());
    device.write_base(0, &data).unwrap();
    device.create_tensor(spec("old", Some(BASE / 2), BLOCK)).unwrap();
    let before = (device.tensors(), directory(&device));
    let good = || (0..50).map(|at| spec(&format!("t{at}"), None, BLOCK));
    let bad = [
        spec("old", None, BLOCK),
        spec("t7", None, BLOCK),
        spec("", None, BLOCK),
        spec("odd", None, BLOCK + 1),
        spec("far", Some(BASE), BLOCK),
        spec("far", Some(u64::MAX - 4095), BLOCK),
        spec("long", None, BASE),
        spec("over", Some(BASE / 2), BLOCK),
        spec("askew", Some(5), BLOCK),
    ];
    for bad in bad {
        let refused = device.create_tensors(good().chain([bad.clone()]).collect());
        assert!(matches!(refused, Err(DeviceError::Tensor(_))), "{bad:?}: {refused:?}");
        assert_eq!((device.tensors(), directory(&device)), before, "{bad:?}");
    }
    let many = vec![spec("t", None, BLOCK); MAX_AT_ONCE + 1];
    assert!(matches!(device.create_tensors(many), Err(DeviceError::TooMany { .. })));
    assert_eq!(device.create_tensors(Vec::new()).unwrap(), []);
    assert_eq!(device.create_tensors(good().collect()).unwrap().len(), 50);
    assert_eq!(directory(&device).generation, before.1.generation + 1);
    let mut found = vec![0; data.len()];
    device.read_base(0, &mut found).unwrap();
    assert!(found == data);
}

#[test]
fn a_view_that_is_removed_is_zeros_and_its_place_is_used_again() {
    let device = Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap();
    device.create_tensor(spec("t", Some(0), BASE)).unwrap();
    device.write_base(0, &noise(9, usize::try_from(BASE).unwrap())).unwrap();
    let (one, other) = (device.create_view("t", "full").unwrap(), device.create_view("t", "e8m3").unwrap());
    let read = |at| {
        let mut out = vec![0xa5; 64];
        device.read_views(at, &mut out).unwrap();
        out
    };
    let shown = read(other.offset);
    assert_eq!(device.remove_view("t", "full").unwrap(), one);
    assert!(read(one.offset).iter().all(|byte| *byte == 0) && shown.iter().any(|byte| *byte != 0));
    assert_eq!(read(other.offset), shown);
    let gone = device.remove_view("t", "full").unwrap_err();
    assert!(matches!(&gone, DeviceError::UnknownView { view, .. } if view == "full"), "{gone}");
    assert!(matches!(device.remove_view("t", "e99"), Err(DeviceError::View { .. })));
    let unknown = device.remove_view("u", "full");
    assert!(matches!(unknown, Err(DeviceError::Tensor(TensorError::Unknown { .. }))));
    assert_eq!(device.create_view("t", "full").unwrap(), one);
}

/// A device in an image with a tensor of rows, and bytes on both sides of its end.
fn with_rows(layout: Layout, blocks: u64) -> (Device, Image, Vec<u8>) {
    let config = DeviceConfig::new(BASE, VIEWS);
    let image = Image::in_memory(config.superblock()).unwrap();
    let device = Device::open(image.clone(), &config).unwrap();
    let shape = vec![blocks * BLOCK / 128, 64];
    let rows = TensorSpec { shape, layout, ..spec("t", Some(BLOCK), blocks * BLOCK) };
    device.create_tensor(rows).unwrap();
    let data = noise(11, usize::try_from(BASE).unwrap());
    device.write_base(0, &data).unwrap();
    device.flush(0, BASE).unwrap();
    (device, image, data)
}

fn read(device: &Device) -> Vec<u8> {
    let mut found = vec![0; usize::try_from(BASE).unwrap()];
    device.read_base(0, &mut found).unwrap();
    found
}

/// That what tensors and nobody are charged is what their blocks hold.
fn accounts_agree(device: &Device) {
    let (mut opaque, map) = (0, device.map());
    let mut stored: std::collections::BTreeMap<_, _> =
        map.tensors().map(|tensor| (tensor.info.name.clone(), (0, 0))).collect();
    for block in 0..BASE / BLOCK {
        let charge = device.charged(block);
        match map.tensor_at(block * BLOCK) {
            Some(tensor) => {
                let (live, stored) = stored.get_mut(&tensor.info.name).unwrap();
                *live += u64::from(charge.live);
                *stored += charge.bytes();
            }
            None => opaque += charge.bytes(),
        }
    }
    for tensor in map.tensors() {
        let held = (tensor.live.get(), tensor.stored.get());
        assert_eq!(held, stored[&tensor.info.name], "{}", tensor.info.name);
    }
    assert_eq!(device.accounts.stats.opaque_stored.get(), opaque);
}

#[test]
fn a_tensor_is_resized_where_it_is_and_no_byte_changes() {
    for layout in [Layout::Weight, Layout::Kv(lamina_codec::kv::KvLayout::rows(64, 128))] {
        let (device, image, data) = with_rows(layout, 40);
        let view = device.create_view("t", "e8m3").unwrap();
        let reads = |device: &Device| device.stats().tensors[0].base.reads;
        read(&device);
        let before = reads(&device);
        for blocks in [10, 11, 300, 299, 1, 700, 700, 40] {
            let generation = directory(&device).generation;
            let shown_before = device.views();
            let (resized, views) = device.resize_tensor_with_views("t", blocks * BLOCK).unwrap();
            assert_eq!(views, shown_before);
            assert_eq!((resized.dpa, resized.length), (BLOCK, blocks * BLOCK));
            assert_eq!(resized.shape, [blocks * BLOCK / 128, 64]);
            assert_eq!(device.tensors(), std::slice::from_ref(&resized));
            assert_eq!(directory(&device).generation, generation + 1);
            let shown = device.views()[0].clone();
            assert_eq!((shown.offset, shown.length), (view.offset, resized.length));
            assert!(read(&device) == data, "{blocks} {layout:?}");
            accounts_agree(&device);
            // The view shows all of it, as one that was made of it does.
            let mut found = vec![0; usize::try_from(shown.length).unwrap()];
            device.read_views(shown.offset, &mut found).unwrap();
            let own = &data[BLOCK_BYTES..][..found.len()];
            let elements = own.len() as u64 / 2;
            let want = lamina_reference::view_bytes(lamina_reference::Format::Bf16, "e8m3", own, elements);
            assert!(found == want.unwrap(), "{blocks} {layout:?}");
        }
        assert!(reads(&device) > before);
        let reported = (device.tensors(), device.views());
        drop(device);
        let device = Device::open(image, &DeviceConfig::new(BASE, VIEWS)).unwrap();
        assert_eq!((device.tensors(), device.views()), reported);
        assert!(read(&device) == data);
        accounts_agree(&device);
    }
}

#[test]
fn a_tensor_that_cannot_be_resized_is_as_it_was() {
    for layout in [Layout::Weight, Layout::Kv(lamina_codec::kv::KvLayout::rows(64, 128))] {
        let (device, _, data) = with_rows(layout, 40);
        device.create_tensor(spec("behind", Some(60 * BLOCK), BLOCK)).unwrap();
        device.create_view("t", "full").unwrap();
        device.create_view("behind", "full").unwrap();
        let reported = || (device.tensors(), device.views(), directory(&device));
        let before = reported();
        let refused = |length| {
            let why = device.resize_tensor("t", length).unwrap_err().to_string();
            assert_eq!(reported(), before, "{why}");
            assert!(read(&device) == data);
            accounts_agree(&device);
            why
        };
        let free = 59 * BLOCK;
        let why = refused(60 * BLOCK);
        assert!(why.contains(&format!("{free} bytes are free to where behind begins")), "{why}");
        assert!(refused(u64::MAX / 4096 * 4096).contains("do not fit"));
        assert!(refused(40 * BLOCK + 2).contains("a row of the shape"));
        assert!(refused(40 * BLOCK + 1).contains("row") || refused(40 * BLOCK + 1).contains("length"));
        assert!(device.resize_tensor("u", BLOCK).unwrap_err().to_string().contains("no tensor"));
        device.remove_tensor("behind").unwrap();
        device.create_tensor(spec("last", None, BLOCK)).unwrap();
        device.create_view("last", "full").unwrap();
        // The view of the other lies right behind the tensor's own.
        let why = device.resize_tensor("t", 2 << 20 | BLOCK).unwrap_err();
        assert!(matches!(&why, DeviceError::NoRoomForView { largest: VIEW_ALIGN, .. }), "{why}");
        accounts_agree(&device);
        assert!(read(&device) == data);
    }
}

#[test]
fn an_empty_tensor_that_lies_in_another_does_not_grow() {
    let device = Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap();
    device.create_tensor(spec("w", Some(40 * BLOCK), 2 * BLOCK)).unwrap();
    device.resize_tensor("w", 0).unwrap();
    device.create_tensor(spec("x", Some(39 * BLOCK), 16 * BLOCK)).unwrap();
    match device.resize_tensor("w", BLOCK) {
        Err(DeviceError::Tensor(TensorError::NotFree { free: 0, behind, .. })) => assert_eq!(behind, "x"),
        other => panic!("{other:?}"),
    }
    device.remove_tensor("w").unwrap();
    assert_eq!(device.tensors().len(), 1);
}

#[test]
fn an_empty_tensor_whose_rows_are_larger_than_any_stays_empty() {
    let device = Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap();
    let shape = vec![0, 1 << 40, 1 << 40];
    let made = device.create_tensor(TensorSpec { shape, ..spec("z", None, 0) }).unwrap();
    assert_eq!(device.resize_tensor("z", 0).unwrap().shape, made.shape);
    let why = device.resize_tensor("z", BLOCK).unwrap_err().to_string();
    assert!(why.contains("a row of the shape passes 18446744073709551615 elements"), "{why}");
}

#[test]
fn a_program_that_makes_fills_views_and_frees_ends_where_it_began() {
    let rounds = if std::env::var_os("LAMINA_LONG").is_some() { 10_000 } else { 300 };
    let config = DeviceConfig { mode: Mode::Trace, ..DeviceConfig::new(BASE, VIEWS) };
    let image = Image::in_memory(config.superblock()).unwrap();
    let device = Device::open(image.clone(), &config).unwrap();
    device.create_tensor(spec("stays", Some(0), 8 * BLOCK)).unwrap();
    device.create_view("stays", "e8m3").unwrap();
    device.write_base(0, &noise(1, BLOCK_BYTES)).unwrap();
    let round = |number: u64| {
        let name = format!("round.{number}");
        let layout = match number % 3 {
            0 => Layout::Kv(lamina_codec::kv::KvLayout::rows(64, 128)),
            _ => Layout::Weight,
        };
        let length = (1 + number % 50) * BLOCK;
        let made = device.create_tensor(TensorSpec { layout, ..spec(&name, None, length) }).unwrap();
        device.write_base(made.dpa, &noise(number, usize::try_from(length).unwrap())).unwrap();
        device.flush(made.dpa, length).unwrap();
        let view = device.create_view(&name, "e8m3:packed").unwrap();
        device.create_view(&name, "full").unwrap();
        device.read_views(view.offset, &mut [0; 4096]).unwrap();
        device.read_base(made.dpa, &mut [0; 4096]).unwrap();
        let longer = device.resize_tensor(&name, length + BLOCK).unwrap();
        device.remove_view(&name, "full").unwrap();
        device.remove_tensor(&name).unwrap();
        device.discard(longer.dpa, longer.length).unwrap();
    };
    let state = || {
        let reported = directory(&device);
        let stats = serde_json::to_value(device.stats()).unwrap();
        let is = &stats["device"];
        let stored = [&is["stored_bytes"], &is["index_bytes"], &is["written_bytes"]].map(Clone::clone);
        // Tables, counters and journal; the store's own parts are told by what is stored.
        (reported.tensors, reported.views, stored, stats["blocks"].clone(), parts(&image))
    };
    // Whatever is made once and kept.
    (0..150).for_each(round);
    let before = state();
    (0..rounds).for_each(round);
    assert_eq!(state(), before);
}

/// Bytes that tables and counters take of an image's file.
fn parts(image: &Image) -> u64 {
    use rustix::fs::{SeekFrom, seek};
    let [_, tables, counters, ..] = image.parts();
    let of = |part: Range<u64>| {
        let (mut at, mut bytes) = (part.start, 0);
        while let Ok(data) = seek(image.file(), SeekFrom::Data(at)) {
            if data >= part.end {
                break;
            }
            at = seek(image.file(), SeekFrom::Hole(data)).unwrap().min(part.end);
            bytes += at - data;
        }
        bytes
    };
    of(tables) + of(counters)
}

#[test]
fn a_view_without_a_place_shows_what_one_with_a_place_does() {
    for layout in [Layout::Weight, Layout::Kv(lamina_codec::kv::KvLayout::rows(64, 128))] {
        let (device, _, _) = with_rows(layout, 40);
        for spelling in ["full", "e8m3", "e8m3:packed", "fp8_e4m3fn"] {
            let before = (device.views(), directory(&device));
            let unlisted = device.view_of("t", spelling).unwrap();
            assert_eq!((device.views(), directory(&device)), before);
            let listed = device.create_view("t", spelling).unwrap();
            assert_eq!(ViewInfo { offset: 0, ..listed.clone() }, *unlisted.info());
            let end = listed.length;
            for (from, to) in [(0, end), (1, 2), (4095, 12_290), (end - 1, end), (end, end)] {
                let mut found = vec![0; usize::try_from(to - from).unwrap()];
                let mut want = found.clone();
                device.read_view_of(&unlisted, from, &mut found).unwrap();
                device.read_views(listed.offset + from, &mut want).unwrap();
                assert!(found == want, "{spelling} {from}..{to} {layout:?}");
            }
            for from in [end, u64::MAX] {
                let past = device.read_view_of(&unlisted, from, &mut [0]);
                assert!(matches!(past, Err(DeviceError::PastWindow { .. })));
            }
        }
        let unlisted = device.view_of("t", "full").unwrap();
        device.remove_tensor("t").unwrap();
        let gone = device.read_view_of(&unlisted, 0, &mut [0]);
        assert!(matches!(gone, Err(DeviceError::Tensor(TensorError::Unknown { .. }))));
        assert!(device.view_of("t", "full").is_err());
    }
}

#[test]
fn names_of_the_device_itself_are_refused_whoever_asks() {
    let own = r#"/.lamina/files/7/{"format":"bf16"}"#;
    let whole = Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap();
    let part = |name: &str| PartitionConfig {
        name: name.to_owned(),
        base_bytes: BASE,
        views_bytes: VIEWS,
        quota_bytes: None,
    };
    let divided = Device::new(DeviceConfig::divided(vec![part("a"), part("b")])).unwrap();
    let a = Partition::named(&Arc::new(divided), "a").unwrap();
    let based = |name| TensorSpec { base: Some(name), ..spec("mine", None, BLOCK) };
    let hidden = |refused: Result<Vec<TensorInfo>, DeviceError>, as_named: &str| {
        let Err(DeviceError::Tensor(TensorError::Hidden { name })) = refused else { panic!("{refused:?}") };
        assert_eq!(name, as_named);
    };
    for name in [own, "m/.lamina/manifest"] {
        hidden(whole.create_tensors(vec![spec("mine", None, BLOCK), spec(name, None, BLOCK)]), name);
        hidden(whole.create_tensors(vec![based(name.to_owned())]), name);
        hidden(a.create_tensors(vec![spec(name, None, BLOCK)]), name);
    }
    // Its partition's name comes before it.
    hidden(a.create_tensors(vec![spec(&own[1..], None, BLOCK)]), &own[1..]);
    assert_eq!((whole.tensors().len(), a.tensors().len()), (0, 0));
    whole.create_tensors(vec![spec(&own[1..], None, BLOCK)]).unwrap();
}
