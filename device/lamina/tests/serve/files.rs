//! `files/` as programs meet it: what a file system promises, other people's tests of that, and
//! workers that die meanwhile.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use nix::fcntl::{FallocateFlags, OFlag, RenameFlags, fallocate, renameat2};
use nix::sys::signal::Signal;
use nix::sys::statvfs::statvfs;
use nix::unistd::{Whence, lseek};
use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};
use serde_json::Value;

use crate::common::{Place, Rig, Run, eventually, lamina, noise, within};
use crate::deaths::{deaths, kill_worker};

/// A device with room for files.
fn device(more: &[&str]) -> Rig {
    let place = Place::new();
    let usual = ["--capacity", "256M", "--views-capacity", "16M", "--views", "", "--files", "128M"];
    let mut command = place.serve(&[&usual, more].concat());
    let run = Run::start(command.env("RUST_LOG", "error"));
    Rig { run, place, bytes: Vec::new() }
}

/// Does something to the files of a device to which writes go through, and to those of one whose
/// writes wait in the page cache, as the second argument says.
fn each_way(test: impl Fn(&Rig, bool)) {
    test(&device(&[]), false);
    test(&device(&["--write-cache"]), true);
}

fn folder(rig: &Rig) -> PathBuf {
    rig.place.path("mount/files")
}

fn number<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> Result<(), nix::Error> {
    let here = File::open("/").unwrap();
    renameat2(&here, from, &here, to, flags)
}

#[test]
fn names_are_as_on_a_local_disk() {
    within(120, || {
        each_way(|rig, waits| {
            let at = |name: &str| folder(rig).join(name);
            fs::write(at("a"), b"one").unwrap();
            fs::create_dir(at("d")).unwrap();
            assert_eq!(number(File::options().write(true).create_new(true).open(at("a"))), nix::libc::EEXIST);
            assert_eq!(number(fs::create_dir(at("d"))), nix::libc::EEXIST);
            assert_eq!(number(fs::remove_dir(at("a"))), nix::libc::ENOTDIR);
            assert_eq!(number(fs::read(at("no"))), nix::libc::ENOENT);
            assert_eq!(number(fs::write(at(&"x".repeat(256)), b"")), nix::libc::ENAMETOOLONG);
            fs::write(at(&"x".repeat(255)), b"").unwrap();
            fs::remove_file(at(&"x".repeat(255))).unwrap();
            // A name of any bytes.
            let odd = folder(rig).join(std::ffi::OsStr::from_bytes(b"\xff\x01 \n"));
            fs::write(&odd, b"odd").unwrap();
            assert_eq!(fs::read(&odd).unwrap(), b"odd");
            fs::remove_file(odd).unwrap();

            fs::rename(at("a"), at("d/b")).unwrap();
            assert_eq!(number(fs::remove_dir(at("d"))), nix::libc::ENOTEMPTY);
            assert_eq!(number(fs::rename(at("d"), at("d/e"))), nix::libc::EINVAL);
            fs::write(at("c"), b"two").unwrap();
            assert_eq!(rename(&at("c"), &at("d/b"), RenameFlags::RENAME_NOREPLACE), Err(nix::Error::EEXIST));
            rename(&at("c"), &at("d/b"), RenameFlags::RENAME_EXCHANGE).unwrap();
            assert_eq!(
                (fs::read(at("c")).unwrap(), fs::read(at("d/b")).unwrap()),
                (b"one".to_vec(), b"two".to_vec())
            );
            // Whoever has what was replaced open still has it.
            let mut replaced = File::open(at("d/b")).unwrap();
            fs::rename(at("c"), at("d/b")).unwrap();
            let mut text = String::new();
            replaced.read_to_string(&mut text).unwrap();
            assert_eq!((text.as_str(), replaced.metadata().unwrap().nlink()), ("two", 0));

            fs::hard_link(at("d/b"), at("l")).unwrap();
            assert_eq!(fs::metadata(at("l")).unwrap().nlink(), 2);
            assert_eq!(fs::metadata(at("l")).unwrap().ino(), fs::metadata(at("d/b")).unwrap().ino());
            fs::remove_file(at("d/b")).unwrap();
            assert_eq!(
                (fs::read(at("l")).unwrap(), fs::metadata(at("l")).unwrap().nlink()),
                (b"one".to_vec(), 1)
            );
            symlink("d/../l", at("s")).unwrap();
            assert_eq!(fs::read_link(at("s")).unwrap(), Path::new("d/../l"));
            assert_eq!(fs::read(at("s")).unwrap(), b"one");
            assert_eq!(number(fs::hard_link(at("d"), at("e"))), nix::libc::EPERM);

            let open = File::options().read(true).write(true).open(at("l")).unwrap();
            fs::remove_file(at("l")).unwrap();
            open.write_all_at(b"more", 3).unwrap();
            let mut held = [0; 7];
            open.read_exact_at(&mut held, 0).unwrap();
            assert_eq!(&held, b"onemore");
            drop(open);

            nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
            let fifo = File::options().read(true).write(true).open(at("fifo")).unwrap();
            (&fifo).write_all(b"x").unwrap();
            (&fifo).read_exact(&mut [0]).unwrap();
            // Many names, listed in pieces, removed meanwhile.
            for index in 0..1500 {
                File::create(at(&format!("d/{index}"))).unwrap();
            }
            let mut seen = 0;
            for entry in fs::read_dir(at("d")).unwrap() {
                fs::remove_file(entry.unwrap().path()).unwrap();
                seen += 1;
            }
            assert_eq!(seen, 1500);
            fs::remove_dir(at("d")).unwrap();
            let mut names: Vec<_> =
                fs::read_dir(folder(rig)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, ["fifo", "s"]);
            // What others show stays as it is.
            let outside = rig.place.path("mount");
            for refused in [
                number(fs::create_dir(outside.join("x"))),
                number(fs::hard_link(outside.join("base"), at("base"))),
                number(fs::rename(at("s"), outside.join("s"))),
                number(fs::remove_dir(folder(rig))),
            ] {
                // The folder is one that something is mounted on, if writes wait.
                let known = [nix::libc::EROFS, nix::libc::EXDEV, nix::libc::EBUSY];
                assert!(known[..if waits { 3 } else { 2 }].contains(&refused), "{refused}");
            }
        });
    });
}

#[test]
fn attributes_are_as_on_a_local_disk() {
    within(120, || {
        each_way(|rig, _| {
            let at = folder(rig).join("a");
            fs::write(&at, noise(1, 10_000)).unwrap();
            fs::set_permissions(&at, fs::Permissions::from_mode(0o4640)).unwrap();
            assert_eq!(fs::metadata(&at).unwrap().mode(), 0o104_640);
            let then = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
            File::open(&at).unwrap().set_modified(then).unwrap();
            assert_eq!(fs::metadata(&at).unwrap().modified().unwrap(), then);
            // A write is later than that, and who copies times is believed.
            OpenOptions::new().append(true).open(&at).unwrap().write_all(b"x").unwrap();
            assert!(fs::metadata(&at).unwrap().modified().unwrap() > then);
            assert_eq!(fs::metadata(&at).unwrap().len(), 10_001);
            OpenOptions::new().append(true).open(&at).unwrap().sync_all().unwrap();
            // What the kernel has of attributes may be a second old.
            eventually("its blocks", || fs::metadata(&at).unwrap().blocks() == 3 * 8);

            let mut value = [0; 100];
            setxattr(&at, "user.mine", b"value", XattrFlags::empty()).unwrap();
            assert_eq!(getxattr(&at, "user.mine", &mut value).unwrap(), 5);
            assert_eq!(setxattr(&at, "user.mine", b"v", XattrFlags::CREATE), Err(rustix::io::Errno::EXIST));
            setxattr(&at, "user.lamina.format", b"bf16", XattrFlags::empty()).unwrap();
            let length = listxattr(&at, &mut value).unwrap();
            let names: Vec<_> = value[..length].split(|byte| *byte == 0).map(<[u8]>::to_vec).collect();
            assert!(
                names.contains(&b"user.mine".to_vec()) && !names.contains(&b"user.lamina.ratio".to_vec())
            );
            let length = getxattr(&at, "user.lamina.stored", &mut value).unwrap();
            let stored: u64 = std::str::from_utf8(&value[..length]).unwrap().parse().unwrap();
            assert!((1..20_000).contains(&stored), "{stored}");
            assert_eq!(
                setxattr(&at, "user.lamina.format", b"bf17", XattrFlags::empty()),
                Err(rustix::io::Errno::INVAL)
            );
            removexattr(&at, "user.mine").unwrap();
            assert_eq!(getxattr(&at, "user.mine", &mut value), Err(rustix::io::Errno::NODATA));
            assert_eq!(fs::read(&at).unwrap()[..10_000], noise(1, 10_000));

            let stat = statvfs(&folder(rig)).unwrap();
            assert_eq!(stat.blocks() * stat.fragment_size(), 128 << 20);
            assert!(stat.blocks_free() > stat.blocks() / 2 && stat.files_free() > 1000);
        });
    });
}

#[test]
fn bytes_are_as_on_a_local_disk() {
    within(120, || {
        each_way(|rig, waits| {
            let at = folder(rig).join("a");
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&at).unwrap();
            // Holes and data.
            file.write_all_at(&noise(2, 5000), 1 << 20).unwrap();
            let whence = |offset, whence| lseek(file.as_fd(), offset, whence);
            // Where data is that waits, the kernel does not say: everywhere.
            let (hole, data) = if waits { ((1 << 20) + 5000, 0) } else { (0, 1 << 20) };
            assert_eq!(whence(0, Whence::SeekHole), Ok(hole));
            assert_eq!(whence(0, Whence::SeekData), Ok(data));
            assert_eq!(whence((1 << 20) + 5000, Whence::SeekData), Err(nix::Error::ENXIO));
            assert!(file.metadata().unwrap().blocks() <= 2 * 8);
            // A mapping is the file.
            file.set_len((1 << 20) + 8192).unwrap();
            // SAFETY: nobody makes the file shorter while this is mapped.
            let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
            map[100..104].copy_from_slice(b"here");
            let mut read = [0; 4];
            file.read_exact_at(&mut read, 100).unwrap();
            assert_eq!(&read, b"here");
            file.write_all_at(b"there", 200).unwrap();
            assert_eq!(&map[200..205], b"there");
            assert_eq!(map[(1 << 20)..][..5000], noise(2, 5000));
            assert_eq!(whence(0, Whence::SeekData), Ok(0), "a page that may be dirty is data");
            map.flush().unwrap();
            drop(map);
            // Past the page cache.
            let direct = File::options()
                .read(true)
                .write(true)
                .custom_flags(OFlag::O_DIRECT.bits())
                .open(&at)
                .unwrap();
            let mut page = memmap2::MmapMut::map_anon(8192).unwrap();
            direct.read_exact_at(&mut page[..4096], 0).unwrap();
            assert_eq!((&page[100..104], &page[200..205]), (b"here".as_slice(), b"there".as_slice()));
            page[..4096].fill(7);
            direct.write_all_at(&page[..4096], 4096).unwrap();
            file.read_exact_at(&mut read, 4096).unwrap();
            assert_eq!(read, [7; 4]);

            fallocate(
                &file,
                FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE,
                101,
                4096,
            )
            .unwrap();
            let mut punched = [1; 4200];
            file.read_exact_at(&mut punched, 0).unwrap();
            assert_eq!((punched[100], punched[4197]), (b'h', 7));
            assert!(punched[101..4197].iter().all(|byte| *byte == 0));
            fallocate(&file, FallocateFlags::empty(), 0, 3 << 20).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 3 << 20);
            fallocate(&file, FallocateFlags::FALLOC_FL_ZERO_RANGE, 0, 4 << 20).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 4 << 20);
            assert!(fs::read(&at).unwrap().iter().all(|byte| *byte == 0));
            // Cut off and grown again, it is zeros.
            file.write_all_at(&noise(3, 9000), 0).unwrap();
            file.set_len(5000).unwrap();
            file.set_len(9000).unwrap();
            let mut wanted = noise(3, 5000);
            wanted.resize(9000, 0);
            assert!(fs::read(&at).unwrap() == wanted);
            // Two who append.
            let append = || OpenOptions::new().append(true).open(&at).unwrap();
            let (mut one, mut two) = (append(), append());
            one.write_all(b"1").unwrap();
            two.write_all(b"2").unwrap();
            one.write_all(b"3").unwrap();
            assert_eq!(fs::read(&at).unwrap()[9000..], *b"123");
            assert_eq!(fs::write(&at, b"new").map(|()| fs::read(&at).unwrap()).unwrap(), b"new");
            // Holes cost nothing, as far as the kernel counts.
            file.write_all_at(b"x", 1 << 62).unwrap();
            assert_eq!(file.metadata().unwrap().len(), (1 << 62) + 1);
            file.set_len(3).unwrap();
            assert_eq!(fs::read(&at).unwrap(), b"new");
            assert_eq!(number(file.write_all_at(b"x", u64::MAX / 2)), nix::libc::EINVAL);
            file.sync_all().unwrap();
            file.sync_data().unwrap();
        });
    });
}

#[test]
fn a_full_disk_says_so_and_takes_nothing_away() {
    within(180, || {
        // Less room in the store than there are addresses.
        let rig = device(&["--store-capacity", "48M"]);
        let at = folder(&rig).join("a");
        let mut file = File::create(&at).unwrap();
        let piece = noise(4, 1 << 20);
        let mut written = 0_u64;
        let why = loop {
            match file.write(&piece) {
                Ok(count) => written += count as u64,
                Err(why) => break why,
            }
        };
        assert_eq!(why.kind(), ErrorKind::StorageFull);
        assert!(written > 20 << 20, "{written}");
        let held = fs::read(&at).unwrap();
        assert_eq!(held.len() as u64, written);
        assert!(held.chunks(1 << 20).all(|held| *held == piece[..held.len()]));
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&piece).unwrap();
        drop(file);
        fs::remove_file(&at).unwrap();
        fs::write(&at, &piece).unwrap();
        assert!(fs::read(&at).unwrap() == piece);
    });
}

#[test]
fn a_full_disk_is_told_when_what_waits_is_written_back() {
    within(180, || {
        let rig = device(&["--store-capacity", "48M", "--write-cache"]);
        let at = folder(&rig).join("a");
        let fill = || {
            // The kernel tells a moment later that nobody has what was removed open any more.
            let mut created = None;
            eventually("a file is created", || {
                created = File::create(&at).ok();
                created.is_some()
            });
            let (file, piece, mut done) = (created.unwrap(), noise(4, 1 << 20), 0);
            // The kernel may begin to write back meanwhile, and never takes a whole write back.
            while done < 80 << 20
                && let Ok(count) = (&file).write(&piece)
            {
                done += count;
            }
            file
        };
        assert_eq!(fill().sync_all().unwrap_err().kind(), ErrorKind::StorageFull);
        fs::remove_file(&at).unwrap();
        let closed = nix::unistd::close(std::os::fd::OwnedFd::from(fill()));
        assert_eq!(closed, Err(nix::Error::ENOSPC));
        fs::remove_file(&at).unwrap();
        fs::write(&at, noise(4, 1 << 20)).unwrap();
        File::open(&at).unwrap().sync_all().unwrap();
        assert!(fs::read(&at).unwrap() == noise(4, 1 << 20));
    });
}

#[test]
fn what_was_synced_is_whole_where_room_ends_within_a_write_back() {
    within(180, || {
        let rig = device(&["--store-capacity", "48M", "--write-cache"]);
        let at = |number: u64| folder(&rig).join(format!("f{number}"));
        let mut synced = 0;
        loop {
            let file = File::create_new(at(synced)).unwrap();
            let written = (&file).write_all(&noise(synced, 300_000));
            if written.and_then(|()| file.sync_all()).is_err() {
                break;
            }
            synced += 1;
        }
        assert!(synced > 60, "{synced}");
        for number in 0..synced {
            let file = File::open(at(number)).unwrap();
            nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED)
                .unwrap();
            assert!(fs::read(at(number)).unwrap() == noise(number, 300_000), "f{number} of {synced}");
        }
    });
}

#[test]
fn files_are_there_when_the_image_is_opened_again() {
    within(180, || {
        let place = Place::new();
        let image = place.text("image");
        let words = ["--capacity", "256M", "--views-capacity", "16M", "--views", "", "--image", &image];
        let with_files = [&words[..], &["--files", "128M"]].concat();
        let run = Run::start(&mut place.serve(&with_files));
        let at = |name: &str| place.path("mount/files").join(name);
        fs::create_dir(at("d")).unwrap();
        fs::write(at("d/kept"), noise(5, 3 << 20)).unwrap();
        let open = File::create(at("gone")).unwrap();
        open.write_all_at(&noise(6, 1 << 20), 0).unwrap();
        fs::remove_file(at("gone")).unwrap();
        File::open(at("d/kept")).unwrap().sync_all().unwrap();
        // All processes are killed at once.
        let worker = crate::deaths::worker(run.child.id());
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), Signal::SIGSTOP).unwrap();
        run.signal(Signal::SIGKILL);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), Signal::SIGKILL).unwrap();
        run.end();
        drop(open);
        Place::let_go(Path::new(&image));
        // Without the option they are shown, too.
        let run = Run::start(&mut place.serve(&words));
        assert!(fs::read(at("d/kept")).unwrap() == noise(5, 3 << 20));
        assert_eq!(fs::read_dir(place.path("mount/files")).unwrap().count(), 1);
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
    });
}

#[test]
fn stores_into_a_file_that_stays_open_are_there_after_a_stop() {
    within(180, || {
        for (worker_dies, waits) in [(false, false), (true, false), (false, true), (true, true)] {
            let place = Place::new();
            let image = place.text("image");
            let words = ["--capacity", "256M", "--views-capacity", "16M", "--views", "", "--image", &image];
            let words = [&words[..], &["--files", "128M"]].concat();
            let more: &[_] = if waits { &["--write-cache"] } else { &[] };
            let run = Run::start(&mut place.serve(&[&words[..], more].concat()));
            let at = |name: &str| place.path("mount/files").join(name);
            fs::create_dir(at("d")).unwrap();
            // Neither synced nor closed.
            let written = File::create_new(at("d/written")).unwrap();
            (&written).write_all(&noise(8, 3 << 20)).unwrap();
            let file = File::options().read(true).write(true).create_new(true).open(at("d/mapped")).unwrap();
            file.set_len(1 << 20).unwrap();
            // SAFETY: nobody else changes the file; after the device's end it is not touched.
            let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
            map.copy_from_slice(&noise(7, 1 << 20));
            if worker_dies {
                kill_worker(&run);
                // Another one answers.
                fs::write(at("other"), "x").unwrap();
            }
            run.signal(Signal::SIGTERM);
            assert!(run.end().success());
            drop((map, file, written));
            let run = Run::start(&mut place.serve(&words));
            let which = format!("worker dies: {worker_dies}, writes wait: {waits}");
            assert!(fs::read(at("d/mapped")).unwrap() == noise(7, 1 << 20), "{which}");
            assert!(fs::read(at("d/written")).unwrap() == noise(8, 3 << 20), "{which}");
            run.signal(Signal::SIGTERM);
            assert!(run.end().success());
        }
    });
}

/// A stop that ends well has kept everything, also if a worker had just died.
#[test]
fn a_stop_between_two_workers_keeps_what_waits_or_says_that_it_does_not() {
    within(240, || {
        let mut kept = 0;
        for attempt in 0..12 {
            let place = Place::new();
            let image = place.text("image");
            let words = ["--capacity", "256M", "--views-capacity", "16M", "--views", "", "--image", &image];
            let words = [&words[..], &["--files", "128M"]].concat();
            let more: &[_] = if attempt % 2 == 1 { &["--write-cache"] } else { &[] };
            let run = Run::start(&mut place.serve(&[&words[..], more].concat()));
            let path = place.path("mount/files/a");
            let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            file.set_len(1 << 20).unwrap();
            // SAFETY: nobody else changes the file; after the device's end it is not touched.
            let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
            map.copy_from_slice(&noise(attempt, 1 << 20));
            // Before one that follows several which died at once, the holder waits a moment.
            for _ in 0..4 {
                let worker = nix::unistd::Pid::from_raw(crate::deaths::worker(run.child.id()));
                let _ = nix::sys::signal::kill(worker, Signal::SIGUSR1);
                thread::sleep(Duration::from_millis(attempt % 4));
            }
            thread::sleep(Duration::from_millis(8 * attempt));
            run.signal(Signal::SIGTERM);
            let well = run.end().success();
            drop((map, file));
            Place::let_go(Path::new(&image));
            let run = Run::start(&mut place.serve(&words));
            if well {
                assert!(fs::read(&path).unwrap() == noise(attempt, 1 << 20), "attempt {attempt}");
                kept += 1;
            }
            run.signal(Signal::SIGTERM);
            assert!(run.end().success());
        }
        assert!(kept > 0, "no stop ended well");
    });
}

#[test]
fn a_stop_that_finds_no_room_for_what_waits_says_so() {
    within(120, || {
        let rig = device(&["--store-capacity", "48M", "--write-cache"]);
        let file = File::create(folder(&rig).join("a")).unwrap();
        let piece = noise(4, 1 << 20);
        for _ in 0..80 {
            // The kernel may have begun to write back, and say so.
            let _ = (&file).write(&piece);
        }
        rig.run.signal(Signal::SIGTERM);
        assert!(!rig.run.end().success());
    });
}

#[test]
fn a_snapshot_has_what_a_mapping_of_a_file_has() {
    within(120, || {
        let rig = device(&[]);
        let file = File::options().read(true).write(true).create_new(true).open(folder(&rig).join("a"));
        let file = file.unwrap();
        file.set_len(1 << 20).unwrap();
        // SAFETY: nobody else changes the file.
        let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        map.copy_from_slice(&noise(9, 1 << 20));
        let (saved, image) = (rig.place.text("saved"), rig.place.text("image"));
        let done = |words: &[&str]| assert!(lamina(words).status().unwrap().success());
        done(&["snapshot", "save", &saved, "--run-dir", &rig.place.text("run")]);
        done(&["snapshot", "restore", &saved, &image]);
        let other = Place::new();
        let run = Run::start(&mut other.serve(&["--image", &image]));
        assert!(fs::read(other.path("mount/files/a")).unwrap() == noise(9, 1 << 20));
        drop((map, run));
    });
}

/// What one thread does to a folder of its own, of which it knows everything.
fn load(folder: &Path, seed: u64, stop: &AtomicBool, done: &AtomicU64) {
    let mut state = seed;
    let mut next = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut known: std::collections::BTreeMap<u64, Vec<u8>> = std::collections::BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let (name, other) = (next(6), next(6));
        let path = |name: u64| folder.join(format!("f{name}"));
        match next(10) {
            0..5 => {
                let (at, bytes) = (next(200_000), noise(next(1000), usize::try_from(next(60_000)).unwrap()));
                let file = File::options().write(true).create(true).truncate(false).open(path(name)).unwrap();
                file.write_all_at(&bytes, at).unwrap();
                let held = known.entry(name).or_default();
                let at = usize::try_from(at).unwrap();
                if !bytes.is_empty() {
                    held.resize(held.len().max(at + bytes.len()), 0);
                    held[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
            5 => {
                let created = File::create_new(path(name));
                assert_eq!(created.is_ok(), !known.contains_key(&name), "{created:?}");
                known.entry(name).or_default();
            }
            6 => {
                let renamed = fs::rename(path(name), path(other));
                assert_eq!(renamed.is_ok(), known.contains_key(&name), "{renamed:?}");
                if let Some(held) = known.remove(&name) {
                    known.insert(other, held);
                }
            }
            7 => {
                let removed = fs::remove_file(path(name));
                assert_eq!(removed.is_ok(), known.remove(&name).is_some(), "{removed:?}");
            }
            8 => {
                let within = folder.join(format!("d{name}"));
                fs::create_dir(&within).unwrap();
                fs::remove_dir(&within).unwrap();
            }
            _ => {
                if let Some(held) = known.get_mut(&name) {
                    let size = next(200_000);
                    File::options().write(true).open(path(name)).unwrap().set_len(size).unwrap();
                    held.resize(usize::try_from(size).unwrap(), 0);
                }
            }
        }
        if let Some(held) = known.get(&other) {
            assert!(fs::read(path(other)).unwrap() == *held, "f{other} of {seed}");
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    // What is in the page cache is no proof.
    for (name, held) in &known {
        let file = File::open(folder.join(format!("f{name}"))).unwrap();
        file.sync_all().unwrap();
        nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        assert!(fs::read(folder.join(format!("f{name}"))).unwrap() == *held, "f{name} of {seed} at the end");
    }
    assert_eq!(fs::read_dir(folder).unwrap().count(), known.len());
}

#[test]
fn nobody_loses_a_byte_or_a_name_while_workers_are_killed() {
    within(240, || {
        each_way(|rig, _| {
            let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
            thread::scope(|scope| {
                for seed in 1..=3 {
                    let own = folder(rig).join(format!("t{seed}"));
                    fs::create_dir(&own).unwrap();
                    let (stop, done) = (&stop, &done);
                    scope.spawn(move || load(&own, seed, stop, done));
                }
                for kill in 0..12 {
                    thread::sleep(Duration::from_millis(60 + kill * 37 % 240));
                    kill_worker(&rig.run);
                }
                eventually("a worker", || rig.try_ask_quietly("/stats"));
                stop.store(true, Ordering::Relaxed);
            });
            let (deaths, done) = (deaths(rig), done.load(Ordering::Relaxed));
            println!("{deaths} deaths, {done} operations");
            assert!(deaths > 3 && done > 30, "{deaths} deaths, {done} operations");
            let stats = rig.ask("GET", "/stats", &Value::Null);
            assert!(stats["files"]["inodes"].as_u64().unwrap() >= 4, "{}", stats["files"]);
            assert_eq!(stats["requests"]["damaged_reads"], 0);
        });
    });
}

/// Runs operations of fsx on a file each, of several files at once.
fn exercise(rig: &Rig, operations: u64, format: Option<&[u8]>) {
    thread::scope(|scope| {
        for seed in 1..=3_u64 {
            let path = folder(rig).join(format!("fsx{seed}"));
            File::create(&path).unwrap();
            if let Some(format) = format {
                setxattr(&path, "user.lamina.format", format, XattrFlags::empty()).unwrap();
            }
            let said = rig.place.path(&format!("fsx{seed}"));
            fs::create_dir(&said).unwrap();
            scope.spawn(move || crate::exerciser::on_file(&said, &path, seed, operations));
        }
    });
}

#[test]
fn fsx_finds_no_wrong_byte_in_several_files() {
    within(crate::exerciser::limit(), || {
        let rig = device(&[]);
        exercise(&rig, crate::exerciser::operations(6_000), None);
    });
}

#[test]
fn fsx_finds_no_wrong_byte_in_files_of_a_format_while_workers_are_killed() {
    within(crate::exerciser::limit(), || {
        each_way(|rig, _| {
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for kill in 0_u64.. {
                        thread::sleep(Duration::from_millis(100 + kill * 37 % 240));
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        kill_worker(&rig.run);
                    }
                });
                exercise(rig, crate::exerciser::operations(3_000), Some(b"bf16"));
                stop.store(true, Ordering::Relaxed);
            });
            eventually("a worker", || rig.try_ask_quietly("/stats"));
            assert!(deaths(rig) > 1);
        });
    });
}

/// A database that is written, made smaller, and asked whether it is whole; then the same by a log
/// of its own.
const DATABASE: &str = "
import sqlite3, sys
for mode in ('DELETE', 'WAL', 'TRUNCATE'):
    d = sqlite3.connect(sys.argv[1] + mode)
    d.execute('PRAGMA journal_mode=' + mode)
    d.execute('CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB)')
    for i in range(30):
        with d:
            d.executemany('INSERT INTO t (v) VALUES (randomblob(?))', [(j * 37 % 3000,) for j in range(40)])
        with d:
            d.execute('DELETE FROM t WHERE k % 3 = ?', (i % 3,))
    total = d.execute('SELECT count(*), sum(length(v)) FROM t').fetchone()
    d.execute('VACUUM')
    d.close()
    d = sqlite3.connect(sys.argv[1] + mode)
    assert d.execute('PRAGMA integrity_check').fetchone() == ('ok',)
    assert d.execute('SELECT count(*), sum(length(v)) FROM t').fetchone() == total
print('ok')
";

#[test]
fn sqlite_finds_its_databases_whole() {
    if !Command::new("python3").args(["-c", "import sqlite3"]).status().is_ok_and(|status| status.success()) {
        return lamina_skipped::test("there is no python3 with sqlite3");
    }
    within(240, || {
        each_way(|rig, _| {
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(300));
                        kill_worker(&rig.run);
                    }
                });
                let database = folder(rig).join("db");
                let output = Command::new("python3").args(["-c", DATABASE]).arg(database).output().unwrap();
                stop.store(true, Ordering::Relaxed);
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(said.ends_with("ok\n"), "{said}{}", String::from_utf8_lossy(&output.stderr));
            });
        });
    });
}
