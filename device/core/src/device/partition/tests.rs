//! Guests on one device, each against a device of its own: what one does or asks never shows at the
//! other.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::{DeviceConfig, PartitionConfig, poison};
use super::*;
use crate::layout::Layout;
use lamina_codec::{format::Format, kv::KvLayout};
use lamina_store::mode::Mode;

const BASE: u64 = 24 * 4096;
const VIEWS: u64 = 16 << 20;

fn part(name: &str, quota: Option<u64>) -> PartitionConfig {
    PartitionConfig { name: name.to_owned(), base_bytes: BASE, views_bytes: VIEWS, quota_bytes: quota }
}

fn divided(mode: Mode, parts: &[PartitionConfig]) -> Vec<Partition> {
    let config = DeviceConfig { mode, open_windows: 4, ..DeviceConfig::divided(parts.to_vec()) };
    Partition::all(&Arc::new(Device::new(config).unwrap()))
}

fn two(mode: Mode, quota: Option<u64>) -> [Partition; 2] {
    divided(mode, &[part("a", quota), part("b", None)]).try_into().ok().unwrap()
}

fn spec(name: &str, dpa: Option<u64>, length: u64, layout: Layout) -> TensorSpec {
    let name = name.to_owned();
    TensorSpec {
        name,
        dpa,
        length,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout,
        codec: None,
        base: None,
    }
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[5]
    };
    (0..length).map(next).collect()
}

fn base_of(partition: &Partition) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(partition.base_bytes()).unwrap()];
    partition.read_base(0, &mut bytes).unwrap();
    bytes
}

fn directory_of(partition: &Partition) -> lamina_abi::Directory {
    let mut bytes = vec![0; 2 << 20];
    partition.read_views(0, &mut bytes).unwrap();
    lamina_abi::decode(&bytes).unwrap()
}

fn report(partition: &Partition) -> PartitionReport {
    partition.stats().partition().unwrap().clone()
}

#[test]
fn a_guest_can_neither_reach_nor_name_anothers() {
    let [a, b] = two(Mode::Trace, None);
    a.create_tensor(spec("secret", None, 8192, Layout::Weight)).unwrap();
    a.create_view("secret", "full").unwrap();
    a.write_base(0, &noise(1, 8192)).unwrap();
    // Whatever b says, in names or in numbers, it is told of nothing that is not its own.
    for name in ["secret", "a/secret", "../a/secret", "/a/secret", "b/../a/secret", ""] {
        let said = b.create_view(name, "full").unwrap_err().to_string();
        assert_eq!(said, format!("no tensor is called {name:?}"));
    }
    for at in [BASE, BASE - 1, u64::MAX, u64::MAX - BASE, BASE.wrapping_neg()] {
        let mut bytes = [0; 2];
        for said in [
            b.read_base(at, &mut bytes).unwrap_err(),
            b.write_base(at, &bytes).unwrap_err(),
            b.discard(at, 2).unwrap_err(),
            b.flush(at, 2).unwrap_err(),
        ] {
            assert!(said.to_string().ends_with("the base window, 98304 bytes"), "{said}");
        }
        let said = b.read_views(VIEWS - 1, &mut bytes).unwrap_err().to_string();
        assert!(said.ends_with("16777216 bytes"), "{said}");
    }
    for dpa in [BASE, BASE - 4096, u64::MAX - 4095] {
        let said = b.create_tensor(spec("t", Some(dpa), 8192, Layout::Weight)).unwrap_err().to_string();
        assert!(said.starts_with("t: 8192 bytes") && said.ends_with("98304 bytes"), "{said}");
    }
    assert!(base_of(&b).iter().all(|byte| *byte == 0));
    assert_eq!((b.tensors(), b.views()), (Vec::new(), Vec::new()));
    let directory = directory_of(&b);
    assert_eq!((directory.generation, directory.tensors.len(), directory.views.len()), (1, 0, 0));
    assert_eq!((directory.base_bytes, directory.views_bytes), (BASE, VIEWS));
    let reported = serde_json::to_string(&b.stats()).unwrap();
    assert!(!reported.contains("secret") && report(&b).stored_bytes == 0, "{reported}");
    assert_eq!(report(&b).requests.base.reads, 1, "its own read of its window");

    // The same name, at the same place, with other bytes: both are right.
    b.create_tensor(spec("secret", Some(0), 4096, Layout::Weight)).unwrap();
    b.write_base(0, &noise(2, 4096)).unwrap();
    let view = b.create_view("secret", "e8m3").unwrap();
    assert_eq!((view.tensor.as_str(), view.offset), ("secret", 2 << 20));
    let mut shown = vec![0; 4096];
    b.read_views(view.offset, &mut shown).unwrap();
    let reference =
        lamina_reference::view_bytes(lamina_reference::Format::Bf16, "e8m3", &noise(2, 4096), 2048);
    assert!(shown == reference.unwrap());
    a.read_views(2 << 20, &mut shown).unwrap();
    assert!(shown == noise(1, 8192)[..4096]);
    assert_eq!(directory_of(&a).tensor("secret").unwrap().length, 8192);
    assert_eq!(directory_of(&b).tensor("secret").unwrap().dpa, 0);
    assert_eq!(
        b.device().tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
        ["a/secret", "b/secret"]
    );
}

#[test]
fn the_errors_of_a_partition_are_in_its_own_terms() {
    let [_, b] = two(Mode::Trace, None);
    b.create_tensor(spec("one", Some(4096), 4096, Layout::Weight)).unwrap();
    let refused = |spec| b.create_tensor(spec).unwrap_err().to_string();
    assert_eq!(refused(spec("one", None, 2, Layout::Weight)), "there is a tensor called \"one\" already");
    assert_eq!(
        refused(spec("two", Some(4096), 2, Layout::Weight)),
        "two: 2 bytes at DPA 0x1000 overlap one at 0x1000, 4096 bytes"
    );
    assert_eq!(refused(spec("two", Some(8), 2, Layout::Weight)), "two: DPA 0x8 is not a multiple of 4096");
    let full = refused(spec("two", None, BASE, Layout::Weight));
    assert!(full.contains("98304 bytes (largest gap 90112)"), "{full}");
    // Beside --guest there is no --capacity.
    assert!(full.contains("--guest NAME=BYTES"), "{full}");
    assert!(
        refused(spec("", None, 2, Layout::Weight)).contains("\"\" cannot name a tensor"),
        "an empty name"
    );
    let said = b.create_view("one", "e9m3").unwrap_err().to_string();
    assert!(said.starts_with("tensor one: "), "{said}");
    b.write_base(4096, &noise(5, 4096)).unwrap();
    b.device().flip_stored_bit(BASE / 4096 + 1, 9);
    let said = b.write_base(4096, &[0; 64]).unwrap_err().to_string();
    assert!(said.starts_with("block 1 (DPA 0x1000) is damaged"), "{said}");
}

#[test]
fn the_devices_own_names_say_the_partition() {
    let [a, b] = two(Mode::Trace, None);
    let device = Arc::clone(a.device());
    let refused = |spec| device.create_tensor(spec).unwrap_err().to_string();
    for name in ["t", "c/t", "/t"] {
        assert!(refused(spec(name, None, 2, Layout::Weight)).contains("of a, b"), "{name}");
    }
    let outside = refused(spec("b/t", Some(0), 4096, Layout::Weight));
    assert_eq!(outside, "b/t: 4096 bytes at DPA 0x0 are not in its partition, 0x18000 to 0x30000");
    let across = refused(spec("a/t", Some(BASE - 4096), 8192, Layout::Weight));
    assert!(across.contains("not in its partition"), "{across}");
    let made = device.create_tensor(spec("b/t", None, 4096, Layout::Weight)).unwrap();
    assert_eq!(made.dpa, BASE);
    assert_eq!((a.tensors().len(), b.tensors()[0].name.as_str(), b.tensors()[0].dpa), (0, "t", 0));
}

#[test]
fn what_cannot_be_divided_so_is_refused() {
    let device = |parts: &[PartitionConfig]| Device::new(DeviceConfig::divided(parts.to_vec())).map(drop);
    let said = |parts: &[PartitionConfig]| device(parts).unwrap_err().to_string();
    for name in ["", "A", "a/b", "a b", "ä", &"x".repeat(33)] {
        assert!(said(&[part(name, None)]).contains("cannot name a partition"), "{name}");
    }
    assert!(said(&[part("a", None), part("a", None)]).contains("two partitions are called a"));
    let many: Vec<_> = (0..17).map(|n| part(&format!("g{n}"), None)).collect();
    assert!(said(&many).contains("at most 16"));
    assert!(device(&many[..16]).is_ok());
    for base_bytes in [0, 4095, u64::MAX - 4095] {
        let odd = PartitionConfig { base_bytes, ..part("b", None) };
        assert!(device(&[part("a", None), odd]).is_err(), "{base_bytes}");
    }
    assert!(device(&[PartitionConfig { views_bytes: 0, ..part("a", None) }]).is_err());
    for views_bytes in [2 << 20, (4 << 20) + 4096] {
        assert!(
            said(&[PartitionConfig { views_bytes, ..part("a", None) }]).contains("2 MiB"),
            "{views_bytes}"
        );
    }
    let config = DeviceConfig { base_bytes: 2 * BASE, ..DeviceConfig::divided(vec![part("a", None)]) };
    assert!(Device::new(config).err().unwrap().to_string().contains("its partitions' together"));
}

#[test]
fn a_quota_refuses_what_passes_it_and_nothing_else() {
    for mode in [Mode::Trace, Mode::GComp, Mode::Plain] {
        let quota = 6 * 4160;
        let [a, b] = two(mode, Some(quota));
        let mut written = 0;
        let refused = loop {
            match a.write_base(written * 4096, &noise(written, 4096)) {
                Ok(()) => written += 1,
                Err(why) => break why,
            }
        };
        assert!(refused.is_no_room(), "{refused}");
        assert!(
            refused.to_string().starts_with("a: ") && refused.to_string().contains("24960 bytes"),
            "{refused}"
        );
        assert_eq!(written, 6, "{mode}");
        let full = report(&a);
        assert!(full.stored_bytes <= quota && full.quota_refusals == 1);
        assert_eq!(full.stored_bytes, a.device().stats().device.stored_bytes);
        // What was there is there; the same again, less, and nothing at all are taken.
        for block in 0..6 {
            let mut bytes = vec![0; 4096];
            a.read_base(block * 4096, &mut bytes).unwrap();
            assert_eq!(bytes, noise(block, 4096));
        }
        a.write_base(0, &noise(99, 4096)).unwrap();
        a.write_base(4096, &[0; 4096]).unwrap();
        a.write_base(7 * 4096, &noise(7, 4096)).unwrap();
        a.discard(0, BASE).unwrap();
        assert_eq!(report(&a).stored_bytes, 0, "{mode}");
        a.write_base(0, &noise(1, 6 * 4096)).unwrap();
        // The neighbour never notices.
        b.write_base(0, &noise(3, usize::try_from(BASE).unwrap())).unwrap();
        assert_eq!(report(&b).quota_refusals, 0);
        assert!(base_of(&b) == noise(3, usize::try_from(BASE).unwrap()));
    }
}

#[test]
fn kv_windows_that_a_quota_refuses_stay_staged_and_take_no_room_from_the_neighbour() {
    let [a, b] = two(Mode::Trace, Some(0));
    let layout = Layout::Kv(KvLayout::rows(32, 128)); // Windows of two blocks.
    for guest in [&a, &b] {
        guest.create_tensor(spec("k", None, BASE, layout)).unwrap();
    }
    let (one, other) = (noise(1, 64), noise(2, 64));
    // Two windows fill the share; a third has nowhere to go, for none of the open ones may be
    // stored.
    a.write_base(0, &one).unwrap();
    a.write_base(8192, &one).unwrap();
    assert!(matches!(a.write_base(16384, &one).unwrap_err(), DeviceError::Quota { .. }));
    assert!(matches!(a.flush(0, BASE).unwrap_err(), DeviceError::Quota { .. }));
    for window in 0..12 {
        b.write_base(window * 8192, &other).unwrap();
    }
    b.flush(0, BASE).unwrap();
    for window in 0..12 {
        let mut bytes = [0; 64];
        b.read_base(window * 8192, &mut bytes).unwrap();
        assert_eq!(bytes[..], other);
    }
    let mut bytes = [0; 64];
    a.read_base(8192, &mut bytes).unwrap();
    assert_eq!(bytes[..], one, "what was staged is not lost");
    assert_eq!(report(&a).stored_bytes, 0);
    assert_eq!(report(&b).stored_bytes, b.device().stats().device.stored_bytes);
}

#[test]
fn an_undivided_device_is_its_own_partition() {
    let device = Arc::new(Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap());
    let whole = Partition::named(&device, "").unwrap();
    whole.create_tensor(spec("a/b", Some(8192), 4096, Layout::Weight)).unwrap();
    assert_eq!(device.tensors(), whole.tensors());
    assert_eq!((whole.base(), whole.views_window(), whole.quota_bytes()), (0..BASE, 0..VIEWS, None));
    assert!(matches!(whole.stats(), PartitionStats::Whole(_)) && device.stats().partitions.is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, length: u64, seed: u64 },
    Discard { at: u64, length: u64 },
    Tensor { name: u8, length: u64, kv: bool },
    Remove { name: u8 },
    View { name: u8, packed: bool },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BASE, 0..3 * 4096_u64);
    prop_oneof![
        4 => (range(), any::<u64>()).prop_map(|((at, length), seed)| Step::Write { at, length, seed }),
        1 => range().prop_map(|(at, length)| Step::Discard { at, length }),
        2 => (0..3_u8, 1..4 * 2048_u64, any::<bool>())
            .prop_map(|(name, length, kv)| Step::Tensor { name, length: 2 * length, kv }),
        1 => (0..3_u8).prop_map(|name| Step::Remove { name }),
        2 => (0..3_u8, any::<bool>()).prop_map(|(name, packed)| Step::View { name, packed }),
        1 => Just(Step::Flush),
    ]
}

/// Does it; the answer, errors and all, as text.
fn perform(partition: &Partition, step: &Step) -> String {
    let end = |at: u64, length: u64| length.min(BASE + 2 - at);
    match step {
        Step::Write { at, length, seed } => {
            let bytes = noise(*seed, usize::try_from(end(*at, *length)).unwrap());
            format!("{:?}", partition.write_base(*at, &bytes))
        }
        Step::Discard { at, length } => format!("{:?}", partition.discard(*at, end(*at, *length))),
        Step::Tensor { name, length, kv } => {
            let layout = if *kv { Layout::Kv(KvLayout::rows(32, 64)) } else { Layout::Weight };
            format!("{:?}", partition.create_tensor(spec(&name.to_string(), None, *length, layout)))
        }
        Step::Remove { name } => {
            let removed = partition.device().remove_tensor(&partition.full_name(&name.to_string()));
            format!("{:?}", removed.map_err(|why| partition.own(why)))
        }
        Step::View { name, packed } => {
            let spelling = if *packed { "e8m3:packed" } else { "full" };
            format!("{:?}", partition.create_view(&name.to_string(), spelling))
        }
        Step::Flush => format!("{:?}", partition.flush(0, BASE)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Two guests on one device do as two devices do, answer for answer and byte for byte.
    #[test]
    fn guests_of_one_device_are_devices_of_their_own(steps in prop::collection::vec((any::<bool>(), step()), 1..40)) {
        let guests = two(Mode::Trace, None);
        let alone = [0, 1].map(|_| {
            let config = DeviceConfig { open_windows: 2, ..DeviceConfig::new(BASE, VIEWS) };
            Partition::named(&Arc::new(Device::new(config).unwrap()), "").unwrap()
        });
        for (second, step) in &steps {
            let who = usize::from(*second);
            prop_assert_eq!(perform(&guests[who], step), perform(&alone[who], step), "{:?}", step);
        }
        let mut stored = 0;
        for (guest, alone) in guests.iter().zip(&alone) {
            prop_assert!(base_of(guest) == base_of(alone));
            prop_assert_eq!(directory_of(guest), directory_of(alone));
            prop_assert_eq!((guest.tensors(), guest.views()), (alone.tensors(), alone.views()));
            for view in guest.views() {
                let mut shown = [0, 1].map(|_| vec![0; usize::try_from(view.length).unwrap()]);
                guest.read_views(view.offset, &mut shown[0]).unwrap();
                alone.read_views(view.offset, &mut shown[1]).unwrap();
                prop_assert!(shown[0] == shown[1]);
                let under = guest.base_under_views(view.offset, view.length);
                prop_assert_eq!(under, alone.base_under_views(view.offset, view.length));
            }
            prop_assert_eq!(guest.views_over_base(0, BASE), alone.views_over_base(0, BASE));
            let (here, there) = (report(guest).stored_bytes, alone.device().stats().device.stored_bytes);
            // What a thread coded before makes a little difference to what it stores.
            prop_assert!(here.abs_diff(there) <= (there / 20).max(128), "{} and {}", here, there);
            stored += here;
        }
        prop_assert_eq!(stored, guests[0].device().stats().device.stored_bytes);
    }
}

#[test]
fn a_base_is_a_guests_own_and_named_in_its_terms() {
    let [a, b] = two(Mode::Trace, None);
    let of = |name: &str, base: Option<&str>| {
        let base = base.map(str::to_owned);
        TensorSpec { base, ..spec(name, None, 8192, Layout::Weight) }
    };
    a.create_tensor(of("w", None)).unwrap();
    let made = a.create_tensor(of("t", Some("w"))).unwrap();
    assert_eq!(made.base.as_deref(), Some("w"));
    let PartitionStats::Own(own) = a.stats() else { panic!("the device is divided") };
    assert_eq!(own.tensors[1].base_tensor.as_deref(), Some("w"));
    let refused = |done: Result<TensorInfo, DeviceError>| done.unwrap_err().to_string();
    assert!(a.remove_tensor("w").unwrap_err().to_string().starts_with("w is the base of t: "));
    assert!(refused(a.resize_tensor("t", 4096)).starts_with("t is stored as the difference to w "));
    assert!(refused(b.create_tensor(of("t", Some("w")))).ends_with("to w: no tensor is called that"));
    let across = a.device.create_tensor(of("b/t", Some("a/w")));
    assert!(refused(across).ends_with("that is in another partition"));
    // What is lost of the base is lost of what is derived.
    let bytes = noise(1, 8192);
    a.write_base(0, &bytes).unwrap();
    a.write_base(8192, &bytes).unwrap();
    a.device.flip_stored_bit(0, 5);
    let mut found = vec![0; 4096];
    a.read_base(8192, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == poison::PATTERN));
    let poisoned = a.poison();
    assert!(poisoned.iter().any(|is| is.dpa == 8192 && is.why.contains("difference")), "{poisoned:?}");
}
