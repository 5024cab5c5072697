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
    let (name, format, layout) = (name.to_owned(), Format::Bf16, Layout::Weight);
    TensorSpec { name, dpa, length, elements: None, shape: Vec::new(), format, layout, codec: None }
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
        let told = directory(device);
        prop_assert!(!told.is_incomplete);
        let named: Vec<_> = told.tensors.iter().map(|is| (is.name.clone(), is.dpa, is.length)).collect();
        prop_assert_eq!(&named, &tensors);
        let tensor_of = |at: u32| told.tensors[usize::try_from(at).unwrap()].name.clone();
        let shown: Vec<_> =
            told.views.iter().map(|is| (is.offset, tensor_of(is.tensor), is.spelling.clone())).collect();
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
    let told = directory(&device);
    assert!(told.is_incomplete && told.tensors.len() > 10_000 && told.views.len() == 100);
    assert_eq!(told.view(&name(COUNT - 1), "full").unwrap().length, BLOCK);
    assert!(told.tensors.is_sorted_by_key(|tensor| tensor.dpa));
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
