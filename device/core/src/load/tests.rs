use std::io::Write;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::device::DeviceConfig;
use lamina_codec::kv::KvLayout;

/// A checkpoint of these tensors: name, dtype, shape, bytes.
pub(crate) fn checkpoint(tensors: &[(&str, &str, &[u64], Vec<u8>)]) -> (tempfile::NamedTempFile, ModelFile) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let place = [data.len(), data.len() + bytes.len()];
        header.insert(
            (*name).to_owned(),
            serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": place }),
        );
        data.extend_from_slice(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.write_all(&data).unwrap();
    let model = ModelFile::open(file.path()).unwrap();
    (file, model)
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_le_bytes()[3]
    };
    (0..bytes).map(next).collect()
}

fn device() -> Device {
    Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap()
}

fn views(list: &[&str]) -> LoadOptions {
    let views = list.iter().map(|&view| view.to_owned()).collect();
    LoadOptions { views, kv: KvRule::by_name().to_vec(), ..LoadOptions::default() }
}

fn on(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn every_byte_arrives_where_the_device_placed_it() {
    // Longer than a piece, and not a whole number of blocks.
    let bytes = [noise(2 * (3 << 20) + 10), noise(34)];
    let (_file, model) = checkpoint(&[
        ("w", "BF16", &[(bytes[0].len() / 2) as u64], bytes[0].clone()),
        ("x", "BF16", &[17], bytes[1].clone()),
    ]);
    let device = device();
    let seen = AtomicU64::new(0);
    let loaded = load_model(&device, &model, &views(&["full"]), |progress| {
        seen.fetch_max(progress.bytes, Ordering::Relaxed);
        on(progress)
    })
    .unwrap();
    assert_eq!(seen.into_inner(), (bytes[0].len() + bytes[1].len()) as u64);
    for (tensor, bytes) in loaded.tensors.iter().zip(&bytes) {
        assert_eq!(tensor.dpa % 4096, 0);
        let mut found = vec![0; bytes.len()];
        device.read_base(tensor.dpa, &mut found).unwrap();
        assert!(found == *bytes, "{}", tensor.name);
    }
    assert_eq!((loaded.views.len(), loaded.skipped.len()), (2, 0));
}

#[test]
fn what_a_format_cannot_give_is_skipped_with_a_reason_and_the_rest_made() {
    let (_file, model) = checkpoint(&[
        ("half", "F16", &[8], noise(16)),
        ("bytes", "U8", &[5], noise(5)),
        ("none", "F32", &[0, 3], Vec::new()),
    ]);
    let loaded = load_model(&device(), &model, &views(&["full", "e8m3"]), on).unwrap();
    let made: Vec<_> = loaded.views.iter().map(|view| (view.tensor.as_str(), view.view.as_str())).collect();
    assert_eq!(made, [("half", "full"), ("bytes", "full")]);
    let skipped: Vec<_> =
        loaded.skipped.iter().map(|skip| (skip.tensor.as_str(), skip.view.as_str())).collect();
    assert_eq!(skipped, [("half", "e8m3"), ("bytes", "e8m3"), ("none", "full"), ("none", "e8m3")]);
    assert!(loaded.skipped[0].why.contains("5 exponent bits"), "{}", loaded.skipped[0].why);
}

#[test]
fn a_view_that_no_format_gives_is_refused_before_anything_is_loaded() {
    let (_file, model) = checkpoint(&[("w", "F16", &[8], noise(16))]);
    let device = device();
    let refused = load_model(&device, &model, &views(&["full", "e9m3"]), on).unwrap_err();
    assert!(matches!(refused, LoadError::View(_)) && refused.to_string().contains("e9m3"), "{refused}");
    assert_eq!(device.tensors(), []);
}

#[test]
fn caches_are_recognised_by_name_and_by_rule() {
    let (_file, model) = checkpoint(&[
        ("layer.0.k", "BF16", &[4, 6], noise(48)),
        ("layer.0.kv_cache", "BF16", &[24], noise(48)),
        ("flat.v", "BF16", &[24], noise(48)),
        ("weight", "BF16", &[4, 6], noise(48)),
    ]);
    let mut options = views(&[]);
    options.kv.insert(0, "*_cache=8,64".parse().unwrap());
    let loaded = load_model(&device(), &model, &options, on).unwrap();
    let layouts: Vec<_> = loaded.tensors.iter().map(|tensor| tensor.layout).collect();
    let kv = |channels, window| Layout::Kv(KvLayout::rows(channels, window));
    assert_eq!(layouts, [kv(6, 128), kv(8, 64), Layout::Weight, Layout::Weight]);
}

#[test]
fn a_rule_says_what_a_layout_can_say() {
    for layout in
        ["64", "64,32", "64,stride=80", "64,64,lossy=packkv:0.1,none,4", "64,64,stride=64,lossy=packkv"]
    {
        let rule: KvRule = format!("a=b,*={layout}").parse().unwrap();
        assert_eq!(rule.layout, Some(layout.parse().unwrap()), "{layout}");
        assert!(rule.pattern.matches("a=b,c") && !rule.pattern.matches("c"), "{layout}");
    }
}

#[test]
fn a_format_rule_overrides_the_file() {
    let (_file, model) = checkpoint(&[("q", "U8", &[2, 8], noise(16))]);
    let options = LoadOptions { formats: vec!["q=int4".parse().unwrap()], ..views(&["full"]) };
    let loaded = load_model(&device(), &model, &options, on).unwrap();
    assert_eq!((loaded.tensors[0].format, loaded.tensors[0].elements), (Format::Int4, 32));
}

#[test]
fn a_rule_that_is_none_is_refused_by_name() {
    for rule in ["", "x", "=3", "x=", "x=1,", "x=1,2,3", "x=-1"] {
        assert!(rule.parse::<KvRule>().is_err(), "{rule}");
    }
    for rule in ["", "x", "=int4", "x=int3"] {
        assert!(rule.parse::<FormatRule>().is_err(), "{rule}");
    }
}

#[test]
fn a_checkpoint_that_does_not_fit_is_an_error_with_the_numbers() {
    let (_file, model) = checkpoint(&[("w", "BF16", &[4096], noise(8192))]);
    let device = Device::new(DeviceConfig::new(4096, 4 << 20)).unwrap();
    let refused = load_model(&device, &model, &views(&[]), on).unwrap_err().to_string();
    assert!(refused.contains("8192") && refused.contains("4096"), "{refused}");
}

#[test]
fn a_checkpoint_is_stored_in_the_same_places_each_time() {
    // What compresses well, less and not at all, so that segments are of many lengths.
    let (mixed, plain) = (noise(6 << 20), noise(5 << 20));
    let mixed = mixed.iter().enumerate().map(|(at, byte)| byte >> (at >> 12 & 7)).collect();
    let (_file, model) = checkpoint(&[
        ("a", "BF16", &[3 << 20], mixed),
        ("empty", "BF16", &[0], Vec::new()),
        ("layers.0.k_cache", "BF16", &[100, 3000], noise(600_000)),
        ("b", "BF16", &[(5 << 20) / 2], plain),
    ]);
    let stored = || {
        let device = device();
        load_model(&device, &model, &views(&["full"]), on).unwrap();
        device.entries(0..(12 << 20) / 4096)
    };
    let first = stored();
    assert!(first.iter().filter(|entry| entry.place.is_some()).count() > 2700);
    for _ in 0..5 {
        assert!(stored() == first);
    }
}

#[test]
fn loading_stops_when_told() {
    let (_file, model) = checkpoint(&[("w", "BF16", &[4 << 20], noise(8 << 20))]);
    let calls = AtomicUsize::new(0);
    let stopped = load_model(&device(), &model, &views(&[]), |_| {
        calls.fetch_add(1, Ordering::Relaxed);
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(LoadError::Stopped)));
    assert_eq!(calls.into_inner(), 1, "nothing is stored behind");
}

#[test]
fn a_device_of_the_needed_size_holds_the_checkpoint() {
    let (_file, model) = checkpoint(&[("a", "BF16", &[3000], noise(6000)), ("b", "F32", &[10], noise(40))]);
    let options = views(&["full", "e8m3:packed"]);
    let views = views_needed(&model, &options) + lamina_abi::DIRECTORY_BYTES;
    let device = Device::new(DeviceConfig::new(base_needed(&model), views)).unwrap();
    assert_eq!(load_model(&device, &model, &options, on).unwrap().views.len(), 4);
}

#[test]
fn a_load_stores_nothing_where_its_tensor_was_removed() {
    let bytes = noise(3 << 20);
    let (_file, model) = checkpoint(&[("w", "U8", &[bytes.len() as u64], bytes)]);
    let mine = vec![7; 3 << 20];
    for name in ["mine", "w"] {
        let device = device();
        let first = AtomicUsize::new(0);
        let refused = load_model(&device, &model, &views(&["full"]), |progress| {
            if first.fetch_add(1, Ordering::Relaxed) == 0 {
                let dpa = device.tensor("w").unwrap().dpa;
                device.remove_tensor("w").unwrap();
                let spec = TensorSpec::new(name, Some(dpa), mine.len() as u64, Format::Opaque);
                device.create_tensor(spec).unwrap();
                device.write_base(dpa, &mine).unwrap();
            }
            on(progress)
        });
        assert!(matches!(refused, Err(LoadError::Gone { tensor }) if tensor == "w"));
        let mut found = vec![0; mine.len()];
        device.read_base(device.tensor(name).unwrap().dpa, &mut found).unwrap();
        assert!(found == mine, "{name}");
        assert_eq!(device.views(), []);
    }
}

#[test]
fn a_checkpoint_is_not_whole_without_a_tensor_that_was_removed_behind_it() {
    let tensor = |name| (name, "U8", &[1_u64 << 20][..], noise(1 << 20));
    let (_file, model) = checkpoint(&[tensor("first"), tensor("second")]);
    let device = device();
    let refused = load_model(&device, &model, &views(&[]), |progress| {
        if progress.tensor == "second" {
            device.remove_tensor("first").unwrap();
        }
        on(progress)
    });
    assert!(matches!(refused, Err(LoadError::Gone { tensor }) if tensor == "first"));
}
