//! What other people's software meets on the mount: files that behave like disks, and say why where
//! they do not.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::{Whence, lseek64};
use serde_json::{Value, json};

use crate::common::{BASE, BOTH, Rig, TENSOR, noise, within};

/// Runs a tool: what it says if it fails.
fn run(tool: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(tool).args(arguments).env("LC_ALL", "C").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

fn number<T: std::fmt::Debug>(refused: io::Result<T>) -> i32 {
    refused.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn opening_with_truncation_keeps_size_bytes_and_dirty_pages() {
    for with in BOTH {
        within(120, move || {
            let mut rig = Rig::new(with);
            let view = rig.view("full");
            let (mut base, path) = (rig.base(), rig.base_path());
            let stored = noise(11, 9000);
            base.store(70_000, &stored);
            rig.bytes[70_000..79_000].copy_from_slice(&stored);
            // Nothing was written back yet: the kernel's pages are all there is of it.
            drop(File::create(&path).unwrap());
            drop(OpenOptions::new().write(true).truncate(true).open(&path).unwrap());
            assert_eq!(fs::metadata(&path).unwrap().len(), BASE);
            assert!(base.load(0, TENSOR) == rig.bytes, "{with}");
            assert!(rig.views().load(view.offset, TENSOR) == rig.bytes, "{with}");

            let file = rig.place.path("file");
            let (text, target) = (file.to_str().unwrap(), path.to_str().unwrap());
            for (round, at) in [(21, 50_000), (22, 300_000)] {
                let bytes = noise(round, at);
                fs::write(&file, &bytes).unwrap();
                base.store(at as u64 + 8192, b"dirty");
                rig.bytes[at + 8192..at + 8197].copy_from_slice(b"dirty");
                if round == 21 {
                    run("cp", &[text, target]).unwrap();
                } else {
                    run("sh", &["-c", "cat \"$0\" > \"$1\"", text, target]).unwrap();
                }
                rig.bytes[..at].copy_from_slice(&bytes);
                assert!(base.load(0, TENSOR) == rig.bytes, "{round} {with}");
            }
            run("dd", &[&format!("if={text}"), &format!("of={target}"), "bs=4k"]).unwrap();
            rig.flush(0, BASE);
            assert!(rig.views().load(view.offset, TENSOR) == rig.bytes, "{with}");
        });
    }
}

#[test]
fn a_disk_image_is_converted_onto_a_window_and_back() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        lamina_skipped::test("qemu-img is missing");
        return;
    }
    within(120, || {
        let rig = Rig::new("auto");
        let (image, back) = (rig.place.text("disk.qcow2"), rig.place.text("back.raw"));
        let (raw, path) = (rig.place.text("disk.raw"), rig.base_path());
        let (path, mut bytes) = (path.to_str().unwrap(), vec![0; usize::try_from(BASE).unwrap()]);
        bytes[1 << 20..3 << 20].copy_from_slice(&noise(5, 2 << 20));
        fs::write(&raw, &bytes).unwrap();
        run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &image]).unwrap();
        run("qemu-img", &["convert", "-n", "-f", "qcow2", "-O", "raw", &image, path]).unwrap();
        assert!(fs::read(path).unwrap() == bytes, "zeros of the image over the tensor, too");
        run("qemu-img", &["convert", "-f", "raw", "-O", "raw", path, &back]).unwrap();
        assert!(fs::read(&back).unwrap() == bytes);
        // What it makes anew it first cuts to nothing, and then leaves out zeros.
        assert!(
            run("qemu-img", &["create", "-f", "raw", path, "32M"]).unwrap_err().contains("not permitted")
        );
        assert!(fs::read(path).unwrap() == bytes);
    });
}

#[test]
fn names_cannot_be_made_removed_or_changed() {
    within(60, || {
        let rig = Rig::new("auto");
        let (mount, base) = (rig.place.path("mount"), rig.base_path());
        let (new, file) = (mount.join("new"), rig.place.path("file"));
        fs::write(&file, "x").unwrap();
        assert_eq!(number(File::create(&new)), libc::EROFS);
        assert_eq!(number(File::create_new(&new)), libc::EROFS);
        assert_eq!(number(File::create_new(&base)), libc::EEXIST);
        assert_eq!(number(fs::create_dir(&new)), libc::EROFS);
        assert_eq!(number(fs::remove_file(&base)), libc::EROFS);
        assert_eq!(number(fs::remove_file(&new)), libc::ENOENT);
        assert_eq!(number(fs::rename(&base, &new)), libc::EROFS);
        assert_eq!(number(fs::rename(&base, mount.join("views"))), libc::EROFS);
        assert_eq!(number(fs::rename(&file, &base)), libc::EXDEV);
        assert_eq!(number(fs::hard_link(&base, &new)), libc::EROFS);
        assert_eq!(number(symlink(&base, &new)), libc::EROFS);
        assert_eq!(mknod(&new, SFlag::S_IFIFO, Mode::S_IRUSR, 0), Err(Errno::EROFS));
        let unnamed = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(&mount);
        assert_eq!(number(unnamed), libc::EOPNOTSUPP);
        assert_eq!(set_attribute(&base), libc::EOPNOTSUPP);
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        for (tool, arguments) in [
            ("touch", vec![text(&new)]),
            ("rm", vec!["-f".to_owned(), text(&base)]),
            ("mkdir", vec![text(&new)]),
            ("cp", vec![text(&file), text(&new)]),
            ("mv", vec![text(&base), text(&new)]),
            ("ln", vec!["-s".to_owned(), text(&base), text(&new)]),
        ] {
            let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
            let said = run(tool, &arguments).unwrap_err();
            assert!(said.contains("Read-only file system"), "{tool}: {said}");
        }
        assert!(rig.base().load(0, TENSOR) == rig.bytes);
    });
}

/// The error number of setting an extended attribute.
fn set_attribute(path: &Path) -> i32 {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let (name, value) = (c"user.x", [0_u8; 1]);
    // SAFETY: three pointers to live values, and the length of the last.
    let set = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), 1, 0) };
    assert_eq!(set, -1);
    Errno::last_raw()
}

#[test]
fn attributes_may_be_set_to_what_they_are() {
    within(60, || {
        let rig = Rig::new("auto");
        let (path, base) = (rig.base_path(), rig.base());
        let was = fs::metadata(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        chown(&path, Some(was.uid()), Some(was.gid())).unwrap();
        base.file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        run("touch", &[path.to_str().unwrap()]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), was.modified().unwrap(), "forgotten");
        for mode in [0o644, 0o4600, 0] {
            assert_eq!(
                number(fs::set_permissions(&path, Permissions::from_mode(mode))),
                libc::EPERM,
                "{mode:o}"
            );
        }
        assert_eq!(fs::metadata(&path).unwrap().mode(), was.mode());
        if nix::unistd::geteuid().is_root() {
            assert_eq!(number(chown(&path, Some(was.uid() + 1), None)), libc::EPERM);
        }
    });
}

#[test]
fn what_passes_the_end_is_written_as_far_as_the_end() {
    within(60, || {
        let rig = Rig::new("auto");
        let (base, path) = (rig.base(), rig.base_path());
        let last = BASE - 5000;
        assert_eq!(base.file.write_at(&noise(3, 9000), last).unwrap(), 5000);
        assert_eq!(base.load(last, 5000), noise(3, 9000)[..5000]);
        assert_eq!(number(base.file.write_at(&[1; 16], BASE)), libc::ENOSPC);
        assert_eq!(number(base.file.write_at(&[1; 16], BASE + (1 << 20))), libc::ENOSPC);
        let of = format!("of={}", path.display());
        let dd = ["if=/dev/zero", &of, "bs=1M", "seek=31", "count=3", "conv=notrunc"];
        let said = run("dd", &dd).unwrap_err();
        assert!(said.contains("No space left on device") && said.contains("1+0 records out"), "{said}");
        assert_eq!((base.load(last, 5000), fs::metadata(&path).unwrap().len()), (vec![0; 5000], BASE));
    });
}

#[test]
fn the_file_system_has_the_stores_room_and_the_window_takes_what_is_stored() {
    within(60, || {
        let rig = Rig::new("auto");
        let (base, path) = (rig.base(), rig.base_path());
        let room = || {
            let stat = nix::sys::statvfs::statvfs(&path).unwrap();
            let bytes = |blocks: u64| blocks * stat.fragment_size();
            (bytes(stat.blocks()), bytes(stat.blocks_free()), bytes(stat.blocks_available()))
        };
        let taken = || {
            // The kernel asks again after a while.
            std::thread::sleep(std::time::Duration::from_millis(1100));
            fs::metadata(&path).unwrap().blocks() * 512
        };
        let (all, free, available) = room();
        assert!(free < all && available <= free, "{free} of {all}, {available}");
        let before = taken();
        let stored = rig.ask("GET", "/stats", &Value::Null)["device"]["stored_bytes"].as_u64().unwrap();
        assert_eq!(before, stored.next_multiple_of(512));
        base.file.write_all_at(&noise(9, 8 << 20), 16 << 20).unwrap();
        let (all_after, free_after, _) = room();
        let gone = free - free_after;
        assert_eq!(all_after, all);
        assert!((8 << 20..9 << 20).contains(&gone), "{gone}");
        assert!((8 << 20..9 << 20).contains(&(taken() - before)));
        rig.ask("POST", "/discard", &json!({ "offset": 0, "length": BASE }));
        assert_eq!(taken(), 4096, "never none, for pages may be dirty");
    });
}

/// Whether the kernel says exactly which pages are dirty: Linux 6.16 and newer.
fn looks() -> bool {
    let system = nix::sys::utsname::uname().unwrap();
    let release = system.release().to_string_lossy().into_owned();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 16)
}

#[test]
fn what_holds_nothing_is_a_hole_and_what_is_dirty_is_none() {
    if !looks() {
        lamina_skipped::test("holes need Linux 6.16, which says exactly which pages are dirty");
        return;
    }
    within(120, || {
        let rig = Rig::new("auto");
        let mut base = rig.base();
        let file = base.file.try_clone().unwrap();
        let seek = |whence, at: u64| {
            lseek64(file.as_fd(), i64::try_from(at).unwrap(), whence).map(i64::cast_unsigned)
        };
        let end = (TENSOR as u64).next_multiple_of(4096);
        assert_eq!((seek(Whence::SeekData, 0), seek(Whence::SeekHole, 0)), (Ok(0), Ok(end)));
        assert_eq!((seek(Whence::SeekData, 4097), seek(Whence::SeekHole, end)), (Ok(4097), Ok(end)));
        assert_eq!(
            (seek(Whence::SeekData, end), seek(Whence::SeekHole, BASE)),
            (Err(Errno::ENXIO), Err(Errno::ENXIO))
        );

        // In the page cache alone.
        let (one, other) = (20_u64 << 20, (25 << 20) + 3 * 4096);
        base.store(one + 10, b"dirty");
        base.store(other + 4090, b"dirty too");
        assert_eq!(seek(Whence::SeekData, end), Ok(one));
        assert_eq!(seek(Whence::SeekData, one + 4096), Ok(other));
        assert_eq!(seek(Whence::SeekHole, end), Ok(end));
        assert!(seek(Whence::SeekHole, one).unwrap() > one);
        let (copy, path) = (rig.place.path("copy"), rig.base_path());
        for how in ["auto", "always"] {
            let sparse = format!("--sparse={how}");
            run("cp", &[&sparse, path.to_str().unwrap(), copy.to_str().unwrap()]).unwrap();
            assert!(fs::read(&copy).unwrap() == fs::read(&path).unwrap(), "{how}");
            assert!(fs::metadata(&copy).unwrap().blocks() * 512 < BASE / 2, "{how}");
        }
        rig.flush(0, BASE);
        assert_eq!((seek(Whence::SeekData, end), seek(Whence::SeekHole, one)), (Ok(one), Ok(one + 4096)));
        assert_eq!(
            (seek(Whence::SeekData, one + 4096), seek(Whence::SeekHole, other)),
            (Ok(other), Ok(other + 8192))
        );
        rig.ask("POST", "/discard", &json!({ "offset": one, "length": 4096 }));
        assert_eq!(seek(Whence::SeekData, end), Ok(other));
        // Zeros that are written store nothing.
        file.write_all_at(&[0; 8192], other).unwrap();
        assert_eq!(seek(Whence::SeekData, end), Err(Errno::ENXIO));
    });
}

#[test]
fn a_window_written_meanwhile_is_never_copied_without_a_store() {
    if !looks() {
        lamina_skipped::test("holes need Linux 6.16, which says exactly which pages are dirty");
        return;
    }
    within(120, || {
        let rig = Rig::new("auto");
        let (mut base, file) = (rig.base(), File::open(rig.base_path()).unwrap());
        // Each round a page of a hole is stored into; whether it is still dirty, on its way or
        // stored, it is found.
        for round in 0..300_u64 {
            let at = (8 << 20) + round * 7 % 4000 * 4096;
            base.store(at, &round.to_le_bytes());
            base.store(at + 8, b"x");
            if round % 3 == 0 {
                let (begin, length) = (i64::try_from(at).unwrap(), 4096);
                // SAFETY: takes no pointers.
                let begun =
                    unsafe { libc::sync_file_range(fd(&file), begin, length, libc::SYNC_FILE_RANGE_WRITE) };
                assert_eq!(begun, 0);
            }
            assert_eq!(
                lseek64(file.as_fd(), i64::try_from(at).unwrap(), Whence::SeekData),
                Ok(i64::try_from(at).unwrap())
            );
            let before = i64::try_from(at - 4096 * 3).unwrap();
            assert!(lseek64(file.as_fd(), before, Whence::SeekData).unwrap() <= i64::try_from(at).unwrap());
        }
    });
}

fn fd(file: &File) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

#[test]
fn the_ratio_is_of_what_was_written() {
    within(60, || {
        let rig = Rig::new("auto");
        let device = || rig.ask("GET", "/stats", &Value::Null)["device"].clone();
        let before = device();
        let blocks = (TENSOR as u64).next_multiple_of(4096);
        assert_eq!((&before["logical_bytes"], &before["written_bytes"]), (&json!(TENSOR), &json!(blocks)));
        let tensor = json!({ "name": "declared", "dpa": 8 << 20, "length": 16 << 20, "format": "bf16" });
        rig.ask("POST", "/tensors", &tensor);
        let declared = device();
        assert_eq!(declared["logical_bytes"], json!(TENSOR + (16 << 20)));
        for same in ["written_bytes", "stored_bytes", "ratio"] {
            assert_eq!(declared[same], before[same], "{same}");
        }
        let ratio = |device: &Value| {
            let of = |name: &str| device[name].as_f64().unwrap();
            (of("ratio") - of("written_bytes") / of("stored_bytes")).abs() < 1e-9
        };
        rig.base().file.write_all_at(&noise(4, 1 << 20), 8 << 20).unwrap();
        let written = device();
        assert_eq!(written["written_bytes"], json!(blocks + (1 << 20)));
        assert!(ratio(&before) && ratio(&written), "{before} {written}");
        rig.ask("POST", "/discard", &json!({ "offset": 8 << 20, "length": 1 << 20 }));
        assert_eq!(device()["written_bytes"], before["written_bytes"]);
    });
}
