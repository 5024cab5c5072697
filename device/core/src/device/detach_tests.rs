//! Tensors that give up their bases, and bases that nobody derives from while they go.

use std::{
    cell::RefCell,
    ops::ControlFlow,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use super::derived_tests::{
    EACH, NAMES, differences, filled, in_memory, near, new_image, read, tensor, write,
};
use super::image_tests::{BLOCK, agree, bytes, config};
use super::*;
use crate::tensor::{NoBase, TensorError};
use lamina_store::failpoints::Failpoints;

const ALL: usize = EACH * BLOCK;

fn on(_: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn base_of(device: &Device, name: &str) -> Option<String> {
    device.tensor(name).unwrap().base
}

#[test]
fn a_tensor_that_is_detached_keeps_its_words_its_views_and_what_is_derived_from_it() {
    let image = new_image(&Failpoints::none());
    let device = Device::open(image.clone(), &config()).unwrap();
    let words = filled(&device);
    let view = device.create_view("tuned", "e8m3").unwrap();
    let shown = |device: &Device| {
        let mut found = vec![0; usize::try_from(view.length).unwrap()];
        device.read_views(view.offset, &mut found).unwrap();
        found
    };
    let (before, of_file) = (shown(&device), device.view_of("tuned", "full").unwrap());
    let told = RefCell::new(Vec::new());
    let detached = device.detach_tensor("tuned", |bytes| {
        told.borrow_mut().push(bytes);
        on(bytes)
    });
    assert_eq!(detached.unwrap(), device.tensor("tuned").unwrap());
    assert!(told.borrow().is_sorted() && told.borrow().last() == Some(&(ALL as u64)), "{told:?}");
    let right = |device: &Device| {
        assert_eq!((base_of(device, "tuned"), base_of(device, NAMES[2])), (None, Some("tuned".into())));
        assert!(read(device, 0, 3 * EACH) == words);
        assert!(shown(device) == before);
        assert!(differences(device) > 0 && differences(device) <= EACH);
        agree(device);
    };
    right(&device);
    let mut found = vec![0; ALL];
    device.read_view_of(&of_file, 0, &mut found).unwrap();
    assert!(found == words[ALL..2 * ALL]);
    assert_eq!(device.stats().tensors[1].base_tensor, None);
    // Asked again there is nothing to do.
    assert_eq!(device.detach_tensor("tuned", on).unwrap().base, None);
    assert!(device.detach_tensor("nobody", on).is_err());
    drop((device, of_file));
    let device = Device::open(image.clone(), &config()).unwrap();
    right(&device);
    // The base goes, what was detached stores what it is told, and is a base as before.
    device.remove_tensor("base").unwrap();
    device.discard(0, ALL as u64).unwrap();
    assert!(read(&device, EACH, 2 * EACH) == words[ALL..]);
    write(&device, EACH, &near(&words[ALL..2 * ALL], 40));
    assert!(read(&device, 2 * EACH, EACH) == words[2 * ALL..]);
    assert!(matches!(
        device.remove_tensor("tuned"),
        Err(DeviceError::Tensor(TensorError::IsBase { derived, .. })) if derived == [NAMES[2]]
    ));
    device.resize_tensor("tuned", ALL as u64 / 2).unwrap_err();
    device.detach_tensor(NAMES[2], on).unwrap();
    assert_eq!(differences(&device), 0);
    device.resize_tensor("tuned", ALL as u64 / 2).unwrap();
    drop(device);
    let device = Device::open(image, &config()).unwrap();
    assert!(read(&device, 2 * EACH, EACH) == words[2 * ALL..]);
    agree(&device);
}

#[test]
fn what_is_stopped_has_its_base_and_is_gone_on_with() {
    let device = in_memory();
    let words = filled(&device);
    let refused = device.detach_tensor("tuned", |_| ControlFlow::Break(()));
    assert!(matches!(refused, Err(DeviceError::Stopped { .. })), "{refused:?}");
    assert_eq!(base_of(&device, "tuned").as_deref(), Some("base"));
    assert!(read(&device, 0, 3 * EACH) == words);
    // It stays as it was: what is stored next is a difference again.
    write(&device, EACH, &words[ALL..2 * ALL]);
    assert!(device.blocks.difference_at(EACH as u64).is_some());
    device.detach_tensor("tuned", on).unwrap();
    assert_eq!(base_of(&device, "tuned"), None);
    assert!(read(&device, 0, 3 * EACH) == words);
}

#[test]
fn loads_and_stores_go_on_while_a_tensor_is_detached() {
    let device = Device::open(new_image(&Failpoints::none()), &config()).unwrap();
    filled(&device);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let stores = |block: usize, seed: u64| {
            let device = &device;
            let done = &done;
            scope.spawn(move || {
                let mut last = Vec::new();
                for round in 0.. {
                    last = near(&bytes(2, ALL), seed + round);
                    write(device, block, &last);
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    assert!(read(device, block, EACH) == last);
                }
                last
            })
        };
        let threads = [stores(0, 1), stores(EACH, 100_000), stores(2 * EACH, 200_000)];
        for _ in 0..20 {
            device.detach_tensor(NAMES[2], on).unwrap();
            device.remove_tensor(NAMES[2]).unwrap();
            device.create_tensor(tensor(2)).unwrap();
        }
        device.detach_tensor("tuned", on).unwrap();
        done.store(true, Ordering::Relaxed);
        for (number, thread) in threads.into_iter().enumerate() {
            let last = thread.join().unwrap();
            assert!(read(&device, number * EACH, EACH) == last, "{number}");
        }
    });
    device.detach_tensor(NAMES[2], on).unwrap();
    assert_eq!(differences(&device), 0);
    agree(&device);
}

#[test]
fn a_base_that_goes_is_not_emptied_under_what_is_derived_from_it() {
    let device = in_memory();
    let words = filled(&device);
    // Derived before: it is not emptied.
    let kept =
        device.drop_tensor("base", |_, _| -> Result<_, DeviceError> { panic!("it holds what others need") });
    assert!(matches!(kept, Err(DeviceError::Tensor(TensorError::IsBase { .. }))), "{kept:?}");
    assert!(read(&device, 0, 3 * EACH) == words);
    device.remove_tensor(NAMES[2]).unwrap();
    device.remove_tensor("tuned").unwrap();
    // Meanwhile: nothing is derived from what is being emptied.
    let refused = RefCell::new(None);
    let before = device.create_view("base", "full").unwrap();
    let late = RefCell::new(None);
    let views = device
        .drop_tensor("base", |dpa, length| {
            *refused.borrow_mut() = Some(device.create_tensor(tensor(1)));
            *late.borrow_mut() = Some(device.create_view("base", "e8m0")?);
            device.discard(dpa, length)
        })
        .unwrap();
    assert_eq!(views, [before, late.into_inner().unwrap()], "what came meanwhile goes too");
    assert!(device.views().is_empty());
    assert!(matches!(
        refused.into_inner(),
        Some(Err(DeviceError::Tensor(TensorError::Base { why: NoBase::Leaving, .. })))
    ));
    assert!(device.tensor("base").is_err());
    assert!(read(&device, 0, EACH) == vec![0; ALL]);
    // What cannot be emptied stays, and may be derived from again.
    device.create_tensor(tensor(0)).unwrap();
    let failed = device.drop_tensor("base", |_, _| Err(DeviceError::Full));
    assert!(matches!(failed, Err(DeviceError::Full)), "{failed:?}");
    device.create_tensor(tensor(1)).unwrap();
}
