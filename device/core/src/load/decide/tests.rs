use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::device::{DeviceConfig, PartitionConfig, text_of};
use crate::load::tests::checkpoint;
use crate::load::{KvRule, stamp_of};
use lamina_store::failpoints::{Failpoints, Killed};
use lamina_store::image::Image;
use lamina_store::tables::Tables;

const LENGTH: usize = 312 * 128;

fn config() -> DeviceConfig {
    DeviceConfig::new(1 << 20, 16 << 20)
}

fn image() -> Image {
    Image::in_memory(config().superblock()).unwrap()
}

fn device(image: &Image) -> Device {
    Device::open(image.clone(), &config()).unwrap()
}

fn bytes(seed: u64) -> Vec<u8> {
    lamina_codec::testing::bytes(seed, LENGTH)
}

/// A checkpoint of a weight `w` and a cache `l.k`, and its file, which must be kept.
fn model(seed: u64) -> (tempfile::NamedTempFile, PathBuf) {
    let (file, model) = checkpoint(&[
        ("w", "BF16", &[LENGTH as u64 / 2], bytes(seed)),
        ("l.k", "BF16", &[LENGTH as u64 / 128, 64], bytes(seed + 1)),
    ]);
    let path = model.path().to_owned();
    (file, path)
}

fn options(replace: bool) -> LoadOptions {
    LoadOptions { kv: KvRule::by_name().to_vec(), replace, ..LoadOptions::default() }
}

fn on(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// What a run of the program does with these checkpoints before it serves.
fn start_all(device: &Device, paths: &[&Path], options: &LoadOptions) -> Result<Vec<Decision>, LoadError> {
    drop_unfinished(device)?;
    let loads: Vec<_> = paths.iter().map(|path| (ModelFile::open(path).unwrap(), options.clone())).collect();
    let decisions = decide(device, &loads, on)?;
    for ((model, options), decision) in loads.iter().zip(&decisions) {
        carry_out(device, model, options, decision.clone(), on)?;
    }
    Ok(decisions)
}

fn start(device: &Device, path: &Path, replace: bool) -> Result<Decision, LoadError> {
    start_all(device, &[path], &options(replace)).map(|all| all.into_iter().next().unwrap())
}

fn holds(device: &Device, tensor: &str) -> Vec<u8> {
    let info = device.tensors().into_iter().find(|info| info.name == tensor).unwrap();
    let mut found = vec![0; usize::try_from(info.length).unwrap()];
    device.read_base(info.dpa, &mut found).unwrap();
    found
}

#[track_caller]
fn assert_holds(device: &Device, seed: u64) {
    assert!(holds(device, "w") == bytes(seed) && holds(device, "l.k") == bytes(seed + 1));
}

fn kept(decision: &Decision) -> bool {
    matches!(decision, Decision::Keep { source: Some(_) })
}

fn refused(device: &Device, path: &Path) -> String {
    let before = device.tensors();
    let why = start(device, path, false).unwrap_err();
    assert!(matches!(why, LoadError::Held { .. }), "{why}");
    assert_eq!(device.tensors(), before);
    let why = why.to_string();
    assert!(why.contains("--replace") && why.contains(path.to_str().unwrap()), "{why}");
    why
}

/// The image's tables as an earlier program would have left them.
fn tables_without_sources(image: &Image) {
    let mut saved = text_of(image);
    assert!(saved["sources"].is_object() && saved["tensors"][0]["source"].is_u64(), "{saved}");
    saved.as_object_mut().unwrap().remove("sources");
    for tensor in saved["tensors"].as_array_mut().unwrap() {
        tensor.as_object_mut().unwrap().remove("source");
    }
    Tables::replace(image, saved.to_string().as_bytes()).unwrap();
}

#[test]
fn a_checkpoint_is_known_again_wherever_it_lies_and_keeps_what_was_stored_into_it() {
    let image = image();
    let (_file, path) = model(1);
    assert!(matches!(start(&device(&image), &path, false), Ok(Decision::Load { .. })));
    let stored = b"a guest's";
    {
        let device = device(&image);
        let info = device.tensors().into_iter().find(|info| info.name == "w").unwrap();
        device.write_base(info.dpa + 100, stored).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy");
    fs::copy(&path, &copy).unwrap();
    let moved = folder.path().join("moved");
    for path in [&path, &copy, &moved, &path] {
        if path == &moved {
            fs::rename(&copy, &moved).unwrap();
        }
        let device = device(&image);
        assert!(kept(&start(&device, path, false).unwrap()), "{}", path.display());
        let mut expected = bytes(1);
        expected[100..100 + stored.len()].copy_from_slice(stored);
        assert!(holds(&device, "w") == expected && holds(&device, "l.k") == bytes(2));
    }
    // Asked for, the file's bytes come back.
    let device = device(&image);
    start(&device, &path, true).unwrap();
    assert_holds(&device, 1);
}

#[test]
fn another_checkpoint_of_the_same_names_is_refused_with_both_names_or_replaces_it_on_purpose() {
    let image = image();
    let ((_a, first), (_b, second)) = (model(1), model(3));
    start(&device(&image), &first, false).unwrap();
    let why = refused(&device(&image), &second);
    assert!(why.contains(first.to_str().unwrap()), "{why}");
    assert_holds(&device(&image), 1);
    let Decision::Load { replacing, .. } = start(&device(&image), &second, true).unwrap() else {
        panic!("it was asked for")
    };
    assert_eq!(replacing.len(), 2);
    assert_holds(&device(&image), 3);
    // The first is not there any more, whatever was noted of it once.
    let why = refused(&device(&image), &first);
    assert!(why.contains(second.to_str().unwrap()), "{why}");
    assert!(kept(&start(&device(&image), &second, false).unwrap()));
    assert_holds(&device(&image), 3);
}

#[test]
fn other_tensors_of_a_name_are_refused_too() {
    let image = image();
    let (_file, path) = model(1);
    let made = device(&image);
    let spec = crate::tensor::TensorSpec {
        name: "w".into(),
        dpa: None,
        length: 4096,
        elements: None,
        shape: Vec::new(),
        format: lamina_codec::format::Format::Bf16,
        layout: crate::layout::Layout::Weight,
        codec: None,
        base: None,
    };
    made.create_tensor(spec.clone()).unwrap();
    let why = refused(&made, &path);
    assert!(why.contains("no file"), "{why}");
    start(&made, &path, true).unwrap();
    // One that took a removed one's name is not of the file.
    made.remove_tensor("w").unwrap();
    made.create_tensor(spec).unwrap();
    drop(made);
    refused(&device(&image), &path);
}

#[test]
fn a_file_that_changed_in_place_is_refused() {
    let image = image();
    let (mut file, path) = model(1);
    start(&device(&image), &path, false).unwrap();
    let times = fs::metadata(&path).unwrap();
    let change = |file: &mut tempfile::NamedTempFile, byte: u8| {
        file.as_file_mut().seek(SeekFrom::End(-1)).unwrap();
        file.as_file_mut().write_all(&[byte]).unwrap();
        // As who hides a change would.
        file.as_file().set_modified(times.modified().unwrap()).unwrap();
    };
    let last = *bytes(2).last().unwrap();
    change(&mut file, !last);
    let why = refused(&device(&image), &path);
    assert!(why.contains("before the file changed"), "{why}");
    let (_copy, other) = {
        let copy = tempfile::NamedTempFile::new().unwrap();
        fs::copy(&path, copy.path()).unwrap();
        let path = copy.path().to_owned();
        (copy, path)
    };
    let why = refused(&device(&image), &other);
    assert!(why.contains("contents are not") && why.contains(path.to_str().unwrap()), "{why}");
    change(&mut file, last);
    assert!(kept(&start(&device(&image), &path, false).unwrap()));
    assert_holds(&device(&image), 1);
}

#[test]
fn a_file_that_was_not_touched_is_not_read_again() {
    let (image, (_file, path)) = (image(), model(1));
    // Until its times would tell of a change.
    while stamp_of(&fs::metadata(&path).unwrap()).is_none() {
        std::thread::sleep(Duration::from_millis(100));
    }
    start(&device(&image), &path, false).unwrap();
    let read = |path: &Path| {
        let read = AtomicU64::new(0);
        let device = device(&image);
        let loads = [(ModelFile::open(path).unwrap(), options(false))];
        let decided = decide(&device, &loads, |progress| {
            read.fetch_max(progress.bytes, Ordering::Relaxed);
            on(progress)
        });
        let decision = decided.unwrap().pop().unwrap();
        assert!(kept(&decision));
        carry_out(&device, &loads[0].0, &loads[0].1, decision, on).unwrap();
        read.into_inner()
    };
    assert_eq!(read(&path), 0);
    // Touched, it is read once, and known by its new times from then on.
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    while stamp_of(&fs::metadata(&path).unwrap()).is_none() {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!([read(&path), read(&path)], [2 * LENGTH as u64, 0]);
}

#[test]
fn a_file_that_changes_while_it_is_loaded_is_no_checkpoint() {
    let (image, (mut file, path)) = (image(), model(1));
    let loads = [(ModelFile::open(&path).unwrap(), options(false))];
    let loaded = device(&image);
    let decision = decide(&loaded, &loads, on).unwrap().pop().unwrap();
    file.as_file_mut().seek(SeekFrom::End(-1)).unwrap();
    file.as_file_mut().write_all(&[7]).unwrap();
    let why = carry_out(&loaded, &loads[0].0, &loads[0].1, decision, on).unwrap_err();
    assert!(matches!(why, LoadError::Changing { .. }), "{why}");
    drop(loaded);
    let device = device(&image);
    assert_eq!(drop_unfinished(&device).unwrap().len(), 1);
    assert!(device.tensors().is_empty());
}

#[test]
fn a_load_that_was_interrupted_is_none_and_another_may_take_its_place() {
    for finish in [1, 3] {
        let image = image();
        let ((_a, first), (_b, second)) = (model(1), model(3));
        let loads = [(ModelFile::open(&first).unwrap(), options(false))];
        let loaded = device(&image);
        let decision = decide(&loaded, &loads, on).unwrap().pop().unwrap();
        let stopped = carry_out(&loaded, &loads[0].0, &loads[0].1, decision, |progress| {
            if progress.bytes == progress.total { ControlFlow::Break(()) } else { on(progress) }
        });
        assert!(matches!(stopped, Err(LoadError::Stopped)));
        assert_eq!(loaded.tensors().len(), 2);
        drop(loaded);
        let next = device(&image);
        let path = if finish == 1 { &first } else { &second };
        assert!(matches!(start(&next, path, false), Ok(Decision::Load { .. })));
        assert_holds(&next, finish);
    }
}

#[test]
fn a_kill_between_any_two_stores_of_a_replacement_leaves_one_checkpoint_or_none() {
    let ((_a, first), (_b, second)) = (model(1), model(3));
    let (mut olds, mut nones, mut news) = (0, 0, 0);
    for step in 0.. {
        let failpoints = Failpoints::none();
        failpoints.make_current();
        let image = image();
        start(&device(&image), &first, false).unwrap();
        // Near the beginning and the end each store, and some of those between.
        let stores = if step < 40 { step } else { 40 + (step - 40) * 23 };
        let replaced = device(&image);
        failpoints.kill_after(stores);
        let done = catch_unwind(AssertUnwindSafe(|| start(&replaced, &second, true)));
        failpoints.kill_after(i64::MAX);
        let killed = done.as_ref().is_err_and(|why| why.is::<Killed>());
        assert!(killed || done.is_ok(), "it died of something else");
        std::mem::forget(replaced);
        if !killed {
            done.unwrap().unwrap();
        }
        let found = device(&image);
        drop_unfinished(&found).unwrap();
        if found.tensors().is_empty() {
            nones += 1;
            // Nothing is in the way of either.
            assert!(matches!(start(&found, &second, false), Ok(Decision::Load { .. })));
            assert_holds(&found, 3);
        } else if start(&found, &first, false).is_ok_and(|decision| kept(&decision)) {
            olds += 1;
            assert_holds(&found, 1);
        } else {
            news += 1;
            assert!(kept(&start(&found, &second, false).unwrap()));
            assert_holds(&found, 3);
        }
        if !killed {
            break;
        }
    }
    Failpoints::none().make_current();
    assert!(olds > 0 && nones > 10 && news > 0, "{olds} {nones} {news}");
}

#[test]
fn a_full_store_in_the_middle_of_a_load_can_be_gone_on_from() {
    let failpoints = Failpoints::none();
    failpoints.make_current();
    let (image, (_file, path)) = (image(), model(1));
    let mut failures = 0;
    for room in 0..400 {
        let next = device(&image);
        failpoints.limit_space(room);
        let done = start(&next, &path, failures % 2 == 1);
        failpoints.limit_space(i64::MAX);
        if done.is_ok() {
            break;
        }
        failures += 1;
    }
    Failpoints::none().make_current();
    assert!(failures > 3, "{failures}");
    let last = device(&image);
    assert!(drop_unfinished(&last).unwrap().is_empty());
    assert_holds(&last, 1);
}

#[test]
fn tables_of_an_earlier_version_are_believed_where_the_bytes_agree() {
    let (_file, path) = model(1);
    for changed in [false, true] {
        let image = image();
        start(&device(&image), &path, false).unwrap();
        if changed {
            device(&image).write_base(5000, b"a guest's").unwrap();
        }
        tables_without_sources(&image);
        let old = device(&image);
        assert!(old.sources_of_tensors().values().all(Option::is_none));
        if changed {
            let why = refused(&old, &path);
            assert!(why.contains("earlier version"), "{why}");
            continue;
        }
        assert!(matches!(start(&old, &path, false), Ok(Decision::Adopt { .. })));
        drop(old);
        let device = device(&image);
        assert!(kept(&start(&device, &path, false).unwrap()));
        assert_holds(&device, 1);
    }
}

#[test]
fn tables_that_name_a_source_that_they_do_not_have_are_refused() {
    let (image, (_file, path)) = (image(), model(1));
    start(&device(&image), &path, false).unwrap();
    let mut saved = text_of(&image);
    saved["sources"] = json!({});
    Tables::replace(&image, saved.to_string().as_bytes()).unwrap();
    let why = Device::open(image, &config()).err().expect("it is nonsense").to_string();
    assert!(why.contains("source 1"), "{why}");
}

#[test]
fn what_is_stored_outside_tensors_is_not_written_over_unasked() {
    let image = image();
    let ((_a, first), (_b, second)) = (model(1), model(3));
    device(&image).write_base(20 << 12, b"a guest's").unwrap();
    start(&device(&image), &first, false).unwrap();
    let device = device(&image);
    let mut found = [0; 9];
    device.read_base(20 << 12, &mut found).unwrap();
    assert_eq!(&found, b"a guest's");
    assert_holds(&device, 1);
    for tensor in ["w", "l.k"] {
        device.remove_tensor(tensor).unwrap();
    }
    // What removed tensors held counts as well, until it is discarded.
    for block in [50_u64, 100, 150, 200, 250] {
        device.write_base(block << 12, b"a guest's").unwrap();
    }
    device.write_base(0, &vec![1; 256 << 12]).unwrap();
    let why = start(&device, &second, false).unwrap_err();
    assert!(matches!(why, LoadError::NoEmptyPlace { dpa: 0, .. }), "{why}");
    assert!(why.to_string().contains("--replace") && device.tensors().is_empty(), "{why}");
    device.discard(0, 64 << 12).unwrap();
    start(&device, &second, false).unwrap();
    assert_holds(&device, 3);
    let mut found = vec![0; 192 << 12];
    device.read_base(64 << 12, &mut found).unwrap();
    assert!(found == vec![1; 192 << 12]);
    device.write_base(0, &vec![1; 64 << 12]).unwrap();
    for tensor in ["w", "l.k"] {
        device.remove_tensor(tensor).unwrap();
    }
    start(&device, &first, true).unwrap();
    assert_holds(&device, 1);
}

#[test]
fn several_checkpoints_are_decided_on_before_one_of_them_changes_anything() {
    let image = image();
    let ((_a, first), (_b, second)) = (model(1), model(3));
    let (_c, apart) = checkpoint(&[("apart", "BF16", &[4], bytes(5)[..8].to_vec())]);
    let all = |paths: &[&Path], replace| start_all(&device(&image), paths, &options(replace));
    let twice = all(&[&first, &second], true).unwrap_err();
    assert!(matches!(&twice, LoadError::Twice { .. }) && twice.to_string().contains("l.k"), "{twice}");
    // The same file twice is one.
    assert_eq!(all(&[&first, &first], false).unwrap()[1], Decision::Keep { source: None });
    let why = all(&[apart.path(), &second], false).unwrap_err();
    assert!(matches!(why, LoadError::Held { .. }), "{why}");
    assert_eq!(device(&image).tensors().len(), 2);
    // One replaces, the other takes none of the places.
    all(&[&second, apart.path()], true).unwrap();
    assert_holds(&device(&image), 3);
    assert!(holds(&device(&image), "apart") == bytes(5)[..8]);
}

#[test]
fn a_replacement_that_does_not_fit_replaces_nothing() {
    let (image, (_a, first)) = (image(), model(1));
    start(&device(&image), &first, false).unwrap();
    let (_b, large) = checkpoint(&[("w", "BF16", &[1 << 19], vec![1; 1 << 20])]);
    let why = start(&device(&image), large.path(), true).unwrap_err().to_string();
    assert!(why.contains("1048576"), "{why}");
    assert_holds(&device(&image), 1);
}

#[test]
fn partitions_have_checkpoints_of_their_own() {
    let part = |name: &str| PartitionConfig {
        name: name.into(),
        base_bytes: 256 << 10,
        views_bytes: 8 << 20,
        quota_bytes: None,
    };
    let config = DeviceConfig::divided(vec![part("a"), part("b")]);
    let image = Image::in_memory(config.superblock()).unwrap();
    let ((_a, first), (_b, second)) = (model(1), model(3));
    let of = |partition: &str| LoadOptions { partition: Some(partition.into()), ..options(false) };
    let open = || Device::open(image.clone(), &config).unwrap();
    start_all(&open(), &[&first], &of("a")).unwrap();
    start_all(&open(), &[&second], &of("b")).unwrap();
    let device = open();
    for (path, partition, seed) in [(&first, "a", 1), (&second, "b", 3)] {
        assert!(kept(&start_all(&device, &[path], &of(partition)).unwrap()[0]));
        assert!(holds(&device, &format!("{partition}/w")) == bytes(seed));
    }
    let why = start_all(&device, &[&first], &of("b")).unwrap_err();
    assert!(why.to_string().contains("b/") && why.to_string().contains(second.to_str().unwrap()), "{why}");
}

#[test]
fn a_checkpoint_with_a_name_of_the_device_itself_is_refused() {
    let device = device(&image());
    let (_file, model) = checkpoint(&[("/.lamina/files/log0", "U8", &[4096], vec![1; 4096])]);
    let refused = start_all(&device, &[model.path()], &options(true)).unwrap_err().to_string();
    assert!(refused.contains("the device's own"), "{refused}");
    assert!(device.tensors().is_empty() && device.hidden_tensors().is_empty());
}
