//! Snapshots of a device: saved, restored, killed on the way, damaged.

use std::panic::catch_unwind;

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use lamina_store::{
    failpoints::{Failpoints, Killed},
    image::{Image, ImageError},
    snapshot::{SnapshotError, restore, unfinished},
};

use super::{Device, DeviceConfig};

/// A device with some data, and its snapshot in a file.
fn saved(folder: &Path) -> (Device, PathBuf) {
    let config = DeviceConfig::new(8 << 20, 16 << 20);
    let device = Device::open(Image::in_memory(config.superblock()).unwrap(), &config).unwrap();
    for at in [0, 5 << 20, (8 << 20) - 4096] {
        device.write_base(at, &lamina_codec::testing::bytes(at, 4096)).unwrap();
    }
    let path = folder.join("snapshot");
    let bytes = device.save(&mut File::create(&path).unwrap()).unwrap();
    let length = path.metadata().unwrap().len();
    assert!(bytes > 3 * 4096 && length < 16 << 20, "{bytes} bytes of data in {length}");
    (device, path)
}

#[test]
fn a_restored_device_is_the_one_that_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (device, path) = saved(folder.path());
    let to = folder.path().join("image");
    restore(&path, &to).unwrap();
    let config = DeviceConfig::new(0, 0);
    let restored = Device::open(Image::open(&to).unwrap().unwrap(), &config).unwrap();
    let all = |device: &Device| {
        let mut all = vec![0; 8 << 20];
        device.read_base(0, &mut all).unwrap();
        all
    };
    assert!(all(&device) == all(&restored));
    let twice = restore(&path, &to).unwrap_err().to_string();
    assert!(twice.contains("exists"), "{twice}");
}

#[test]
fn a_restore_that_is_killed_leaves_nothing_and_what_it_leaves_hinders_none() {
    let folder = tempfile::tempdir().unwrap();
    let (device, path) = saved(folder.path());
    let mut wanted = vec![0; 8 << 20];
    device.read_base(0, &mut wanted).unwrap();
    let to = folder.path().join("image");
    let failpoints = Failpoints::none();
    failpoints.make_current();
    let (mut killed, mut whole) = (0, false);
    for stores in 1.. {
        // What the one before left is there still.
        failpoints.kill_after(stores);
        let restored = catch_unwind(|| restore(&path, &to));
        failpoints.kill_after(i64::MAX);
        let is_whole = |what: &str| {
            let device = Device::open(Image::open(&to).unwrap().unwrap(), &DeviceConfig::new(0, 0));
            let mut found = vec![0; 8 << 20];
            device.unwrap().read_base(0, &mut found).unwrap();
            assert!(found == wanted, "{what} at store {stores} leaves another device");
        };
        match restored {
            Err(why) => {
                assert!(why.is::<Killed>(), "it died of something else");
                killed += 1;
                if to.exists() {
                    is_whole("a kill");
                    std::fs::remove_file(&to).unwrap();
                    whole = true;
                }
            }
            Ok(restored) => {
                restored.unwrap();
                is_whole("no kill");
                break;
            }
        }
    }
    // The length, each extent, and the name.
    assert!(killed > 5 && whole, "{killed} kills");
    assert!(!unfinished(&to).exists());
}

#[test]
fn two_restores_to_one_name_do_not_meet() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let to = folder.path().join("image");
    let other = File::create(unfinished(&to)).unwrap();
    other.lock().unwrap();
    assert!(matches!(restore(&path, &to), Err(SnapshotError::Image(ImageError::Busy { .. }))));
    assert!(unfinished(&to).exists(), "it is the other's");
    drop(other);
    restore(&path, &to).unwrap();
}

#[test]
fn a_restore_that_waited_for_another_leaves_what_that_made() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let to = folder.path().join("image");
    let mut other = File::create(unfinished(&to)).unwrap();
    other.lock().unwrap();
    let why = std::thread::scope(|scope| {
        let waits = scope.spawn(|| restore(&path, &to).unwrap_err());
        // Time to open the other's file.
        std::thread::sleep(std::time::Duration::from_millis(100));
        other.write_all(b"whole").unwrap();
        std::fs::rename(unfinished(&to), &to).unwrap();
        drop(other);
        waits.join().unwrap()
    });
    assert!(std::fs::read(&to).unwrap() == b"whole", "{why}");
    assert!(!unfinished(&to).exists());
}

#[test]
fn a_damaged_or_cut_snapshot_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let whole = std::fs::read(&path).unwrap();
    let to = folder.path().join("image");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let why = restore(&path, &to).unwrap_err();
        assert!(!to.exists() && !unfinished(&to).exists());
        let SnapshotError::Damaged { why, .. } = why else { panic!("{why}") };
        why
    };
    // 16 bytes, then extents: a head of 24 bytes and what it says; the last is a head alone.
    let first = u64::from_le_bytes(*whole[24..].first_chunk().unwrap());
    let at = u64::from_le_bytes(*whole[16..].first_chunk().unwrap());
    let extent = format!("the extent of {first} bytes at {at:#x}");
    for (cut, part) in [
        (0, "its first 16 bytes"),
        (7, "its first 16 bytes"),
        (16, "the head of extent 1"),
        (30, "the head of extent 1"),
        (40, &extent),
        (41, &extent),
    ] {
        assert_eq!(refused(&whole[..cut]), format!("it ends early, in {part}"));
    }
    for cut in [whole.len() / 2, whole.len() - 1] {
        assert!(refused(&whole[..cut]).starts_with("it ends early, in the "), "{cut}");
    }
    for at in [0, 17, 26, 33, 60, whole.len() / 2, whole.len() - 3] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        refused(&damaged);
    }
}
