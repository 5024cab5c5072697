//! Images on a disk that is full: what has room keeps it, and what finds none takes none.

use std::{
    fs::{self, File},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::fs::{FallocateFlags, fallocate};

use super::{
    image_tests::{BLOCK, BLOCKS, again, bytes, config, new_image, read_all, with_tensors},
    *,
};
use lamina_store::{StoreError, failpoints::Failpoints, snapshot};

/// Bytes that room is given in.
const UNIT: u64 = 64 << 10;

fn open(image: Image) -> Result<Device, DeviceError> {
    Device::open(image, &config())
}

#[test]
fn what_has_room_needs_none_when_it_is_opened_again() {
    let failpoints = Failpoints::none();
    failpoints.make_current();
    let folder = tempfile::tempdir().unwrap();
    let image = Image::create(&folder.path().join("image"), config().superblock()).unwrap();
    if image.is_in_memory() {
        return lamina_skipped::test("a tmpfs does not say where a file has room");
    }
    let device = open(with_tensors(image.clone())).unwrap();
    let model = bytes(2, BLOCKS * BLOCK);
    device.write_base(0, &model).unwrap();
    for is_clean in [false, true] {
        if is_clean {
            open(again(&image)).unwrap().sync_last().unwrap();
        }
        failpoints.limit_space(0);
        let found = open(again(&image)).map(|device| read_all(&device));
        failpoints.limit_space(i64::MAX);
        assert!(found.unwrap() == model);
    }
}

#[test]
fn an_image_gets_checkpoints_or_goes_without_and_the_disk_has_their_room_back() {
    let failpoints = Failpoints::none();
    let device = open(new_image(&failpoints)).unwrap();
    let model = bytes(2, BLOCKS * BLOCK);
    device.write_base(0, &model).unwrap();
    device.flush(0, device.base_bytes()).unwrap();
    let mut stream = Vec::new();
    device.save(&mut stream).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut refused, mut without) = (0, 0);
    for room in 0.. {
        let file = tempfile::tempfile_in(&folder).unwrap();
        snapshot::fill(&mut &*stream, &file).unwrap();
        file.sync_all().unwrap();
        let length = || file.metadata().unwrap().len();
        let found = || Image::from_file(file.try_clone().unwrap(), Path::new("restored")).unwrap().unwrap();
        let image = found();
        if image.is_in_memory() {
            return lamina_skipped::test("a tmpfs does not say where a file has room");
        }
        let [_, _, counters, journal, ..] = image.parts();
        let before = (length(), image.allocated_bytes().unwrap());
        // Whoever opens it needs these.
        let needed =
            (journal.end - journal.start).next_multiple_of(UNIT) + (counters.end - counters.start).min(UNIT);
        failpoints.limit_space(room);
        let opened = open(image.clone());
        failpoints.limit_space(i64::MAX);
        file.sync_all().unwrap();
        match opened {
            Ok(device) => {
                assert!(read_all(&device) == model);
                drop(device);
                if found().superblock().checkpoints {
                    break;
                }
                without += 1;
            }
            Err(DeviceError::Store(StoreError::NoRoom { what, .. })) => {
                assert_eq!(without, 0, "with room for {room} units there is none for the {what}");
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
        let allocated = image.allocated_bytes().unwrap();
        assert_eq!(length(), before.0, "with room for {room} units");
        assert!(allocated <= before.1 + needed, "{room} units: {allocated}, {before:?}");
        // What is left is an image that gets them when there is room.
        assert!(read_all(&open(found()).unwrap()) == model);
        assert!(found().superblock().checkpoints);
    }
    assert!(refused > 1 && without > 3, "{refused} refused, {without} without checkpoints");
}

/// A small file system of XFS in a file, mounted.
struct Xfs {
    folder: tempfile::TempDir,
}

impl Xfs {
    /// Or why there is none here.
    fn new() -> Result<Self, String> {
        if std::env::var_os("LAMINA_LONG").is_none() {
            return Err("it mounts a file system: LAMINA_LONG".to_owned());
        }
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        // The least that mkfs.xfs makes.
        File::create(&disk).unwrap().set_len(300 << 20).unwrap();
        fs::create_dir(folder.path().join("mount")).unwrap();
        run(Command::new("mkfs.xfs").arg("-q").arg(&disk))?;
        let xfs = Self { folder };
        run(Command::new("mount").args(["-o", "loop"]).args([&disk, &xfs.path("")]))?;
        Ok(xfs)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("mount").join(name)
    }

    /// Takes all the room that there is.
    fn fill(&self) {
        let file = File::create(self.path("filler")).unwrap();
        let (mut at, mut step) = (0, 64 << 20);
        while step >= 4096 {
            match fallocate(&file, FallocateFlags::empty(), at, step) {
                Ok(()) => at += step,
                Err(why) => {
                    assert_eq!(why, rustix::io::Errno::NOSPC);
                    step /= 2;
                }
            }
        }
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").arg(self.path("")));
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let out = command.output().map_err(|why| format!("{}: {why}", command.get_program().display()))?;
    let said = || String::from_utf8_lossy(&out.stderr).trim().to_owned();
    out.status.success().then_some(()).ok_or_else(said)
}

#[test]
fn an_image_on_xfs_is_opened_again_when_that_is_full_and_says_whether_it_shares_blocks() {
    let xfs = match Xfs::new() {
        Ok(xfs) => xfs,
        Err(why) => return lamina_skipped::test(why),
    };
    Failpoints::none().make_current();
    let (path, copy) = (xfs.path("image"), xfs.path("copy"));
    let device = open(with_tensors(Image::create(&path, config().superblock()).unwrap())).unwrap();
    let model = bytes(2, BLOCKS * BLOCK);
    device.write_base(0, &model).unwrap();
    device.sync().unwrap();
    drop(device);
    xfs.fill();
    let image = Image::open(&path).unwrap().unwrap();
    // It asks for blocks that are there already, which is what this test is about.
    let why = fallocate(image.file().as_fd(), FallocateFlags::KEEP_SIZE, 0, UNIT).unwrap_err();
    assert_eq!(why, rustix::io::Errno::NOSPC);
    for _ in 0..2 {
        let device = open(again(&image)).unwrap();
        assert!(read_all(&device) == model);
        device.sync_last().unwrap();
    }
    fs::remove_file(xfs.path("filler")).unwrap();
    assert_eq!(image.loses_room(), None);
    run(Command::new("cp").arg("--reflink=never").args([&path, &copy])).unwrap();
    assert_eq!(image.loses_room(), None);
    run(Command::new("cp").arg("--reflink=always").args([&path, &copy])).unwrap();
    for image in [&image, &Image::open(&copy).unwrap().unwrap()] {
        assert!(image.loses_room().unwrap().contains("shares blocks"));
    }
}
