//! `files/` and a tmpfs beside it are asked the same, and say the same: what is done, what is
//! refused and with which number, what is there afterwards, and which times change.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::UtimensatFlags;
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::common::Place;

/// What is asked, of paths below the place where it is asked.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Opened, written to if it may be, and read.
    Open(&'static str, OFlags, u32),
    Mkdir(&'static str, u32),
    Mknod(&'static str, FileType, u32),
    Rmdir(&'static str),
    Unlink(&'static str),
    Rename(&'static str, &'static str, RenameFlags),
    Link(&'static str, &'static str, AtFlags),
    Symlink(&'static str, &'static str),
    Readlink(&'static str),
    Chmod(&'static str, u32),
    Chown(&'static str, Option<u32>, Option<u32>, AtFlags),
    Times(&'static str, (i64, i64), UtimensatFlags),
    Truncate(&'static str, i64),
    Resize(&'static str, u64),
    Allocate(&'static str, FallocateFlags, u64, u64),
    Write(&'static str, u64, usize),
    Stat(&'static str, AtFlags),
    List(&'static str),
}

use Step::*;

/// A name of 256 bytes, one more than there may be, and one of 255.
const LONG: &str = concat!(
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
);

fn long() -> &'static str {
    LONG.split_at(255).0
}

fn here(root: &Path, path: &str) -> PathBuf {
    // Not `join`, which drops what is not there, such as a slash at the end.
    let mut text = root.as_os_str().to_owned();
    text.push("/");
    text.push(path);
    text.into()
}

fn errno<T>(done: std::io::Result<T>) -> Result<T, Errno> {
    done.map_err(|why| Errno::from_io_error(&why).expect("a number"))
}

fn of_nix<T>(done: nix::Result<T>) -> Result<T, Errno> {
    done.map_err(|why| Errno::from_raw_os_error(why as i32))
}

/// Opened to be written to. Of a FIFO that nobody reads, that is refused.
fn opened_to_write(path: &Path) -> Result<File, Errno> {
    rustix::fs::open(path, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()).map(File::from)
}

/// What may be seen of an inode.
fn seen(of: &fs::Metadata) -> String {
    let size = if of.is_dir() { 0 } else { of.len() };
    let device = if of.file_type().is_char_device() { of.rdev() } else { 0 };
    format!("{:o} {} links, {}:{}, {size} bytes, device {device}", of.mode(), of.nlink(), of.uid(), of.gid())
}

/// Does it: what is seen of that, or the number of the refusal.
fn done(root: &Path, step: Step) -> Result<String, Errno> {
    let at = |path| here(root, path);
    let nothing = |()| String::new();
    match step {
        Open(path, flags, mode) => {
            let opened = rustix::fs::open(at(path), flags | OFlags::NONBLOCK, Mode::from_raw_mode(mode))?;
            let mut file = File::from(opened);
            let written = errno(file.write(b"text")).map_err(|why| why.to_string());
            let mut text = Vec::new();
            let read = errno(file.read_to_end(&mut text)).map_err(|why| why.to_string());
            Ok(format!("{written:?} {read:?} {}", seen(&errno(file.metadata())?)))
        }
        Mkdir(path, mode) => rustix::fs::mkdir(at(path), Mode::from_raw_mode(mode)).map(nothing),
        Mknod(path, kind, mode) => {
            let device = if kind == FileType::CharacterDevice { rustix::fs::makedev(1, 3) } else { 0 };
            rustix::fs::mknodat(CWD, at(path), kind, Mode::from_raw_mode(mode), device).map(nothing)
        }
        Rmdir(path) => rustix::fs::rmdir(at(path)).map(nothing),
        Unlink(path) => rustix::fs::unlink(at(path)).map(nothing),
        Rename(old, new, flags) => rustix::fs::renameat_with(CWD, at(old), CWD, at(new), flags).map(nothing),
        Link(old, new, flags) => rustix::fs::linkat(CWD, at(old), CWD, at(new), flags).map(nothing),
        Symlink(target, path) => rustix::fs::symlink(target, at(path)).map(nothing),
        Readlink(path) => rustix::fs::readlink(at(path), []).map(|target| format!("{target:?}")),
        Chmod(path, mode) => rustix::fs::chmod(at(path), Mode::from_raw_mode(mode)).map(nothing),
        Chown(path, user, group, flags) => {
            let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
            let flags = nix::fcntl::AtFlags::from_bits_truncate(flags.bits().cast_signed());
            of_nix(nix::unistd::fchownat(AT_FDCWD, &at(path), user, group, flags)).map(nothing)
        }
        Times(path, (seconds, nanoseconds), flags) => {
            let time = TimeSpec::new(seconds, nanoseconds);
            of_nix(nix::sys::stat::utimensat(AT_FDCWD, &at(path), &time, &time, flags))?;
            let of = match flags {
                UtimensatFlags::FollowSymlink => fs::metadata(at(path)),
                UtimensatFlags::NoFollowSymlink => fs::symlink_metadata(at(path)),
            };
            let now = of.map(|of| (of.mtime(), of.mtime_nsec()));
            Ok(if nanoseconds < 1_000_000_000 { format!("{now:?}") } else { String::new() })
        }
        Truncate(path, size) => of_nix(nix::unistd::truncate(&at(path), size)).map(nothing),
        Resize(path, size) => {
            opened_to_write(&at(path)).and_then(|file| rustix::fs::ftruncate(&file, size)).map(nothing)
        }
        Allocate(path, flags, offset, length) => {
            let file = opened_to_write(&at(path))?;
            rustix::fs::fallocate(&file, flags, offset, length).map(nothing)
        }
        Write(path, offset, length) => {
            let file = opened_to_write(&at(path))?;
            errno(std::os::unix::fs::FileExt::write_at(&file, &vec![7; length], offset))
                .map(|written| written.to_string())
        }
        Stat(path, flags) => {
            rustix::fs::statat(CWD, at(path), flags)?;
            let of = if flags.is_empty() { fs::metadata(at(path)) } else { fs::symlink_metadata(at(path)) };
            errno(of).map(|of| seen(&of))
        }
        List(path) => {
            let mut names: Vec<_> = errno(fs::read_dir(at(path)))?
                .map(|entry| entry.map(|entry| (entry.file_name(), entry.file_type().unwrap())))
                .collect::<Result<_, _>>()
                .unwrap();
            names.sort_by(|one, other| one.0.cmp(&other.0));
            Ok(format!("{names:?}"))
        }
    }
}

/// All that is there: by path, what is seen of it and what it holds.
fn all(root: &Path) -> BTreeMap<PathBuf, (String, Vec<u8>)> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![PathBuf::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).unwrap() {
            let inside = folder.join(entry.unwrap().file_name());
            let path = root.join(&inside);
            let of = fs::symlink_metadata(&path).unwrap();
            let held = match () {
                () if of.is_file() => fs::read(&path).unwrap(),
                () if of.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                () => Vec::new(),
            };
            if of.is_dir() {
                folders.push(inside.clone());
            }
            found.insert(inside, (seen(&of), held));
        }
    }
    found
}

/// A place in `files/`, and one in a tmpfs.
fn places(place: &Place) -> Option<(PathBuf, tempfile::TempDir)> {
    const TMPFS: i64 = 0x0102_1994;
    let there = rustix::fs::statfs("/dev/shm").is_ok_and(|of| of.f_type == TMPFS);
    let other = there.then(|| tempfile::tempdir_in("/dev/shm").ok()).flatten();
    let Some(other) = other else {
        lamina_skipped::test("no tmpfs at /dev/shm to compare with");
        return None;
    };
    place.mount(&["--capacity", "128M", "--files", "64M"]);
    let ours = place.path("m/files/here");
    fs::create_dir(&ours).unwrap();
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(other.path(), fs::Permissions::from_mode(0o755)).unwrap();
    Some((ours, other))
}

/// Asks both the same, and notes what they say if that differs.
fn same(ours: &Path, other: &Path, step: Step, different: &mut Vec<String>) {
    let (one, two) = (done(ours, step), done(other, step));
    if one != two {
        different.push(format!("{step:?}: {one:?}, and a tmpfs {two:?}"));
    }
}

/// Notes what is there in one place and not, or otherwise, in the other.
fn alike(ours: &Path, other: &Path, when: &str, different: &mut Vec<String>) {
    let (one, two) = (all(ours), all(other));
    let paths = one.keys().chain(two.keys()).filter(|path| one.get(*path) != two.get(*path));
    different.extend(paths.map(|path| {
        let told = |all: &BTreeMap<PathBuf, (String, Vec<u8>)>| all.get(path).map(|(seen, _)| seen.clone());
        format!("{} after {when}: {:?}, and on a tmpfs {:?}", path.display(), told(&one), told(&two))
    }));
}

const RW: OFlags = OFlags::RDWR;
const NOT: AtFlags = AtFlags::SYMLINK_NOFOLLOW;

#[test]
fn each_refusal_has_the_number_that_a_tmpfs_gives() {
    let place = Place::new();
    let Some((ours, other)) = places(&place) else { return };
    let mut different = Vec::new();
    let none = AtFlags::empty();
    let follow = UtimensatFlags::FollowSymlink;
    let replace = RenameFlags::empty();
    let made = [
        Mkdir("d", 0o755),
        Mkdir("d/full", 0o750),
        Mkdir("empty", 0o2775),
        Mkdir("empty/inherits", 0o700),
        Mkdir("sticky", 0o1777),
        Open("f", RW | OFlags::CREATE | OFlags::EXCL, 0o644),
        Open("d/full/f", RW | OFlags::CREATE, 0o6755),
        Open("empty/f", RW | OFlags::CREATE, 0o666),
        Symlink("f", "to-f"),
        Symlink("d", "to-d"),
        Symlink("nothing", "to-nothing"),
        Symlink("loop", "loop"),
        Symlink("/", "to-root"),
        Symlink("", "no-target"),
        Mknod("fifo", FileType::Fifo, 0o600),
        Mknod("socket", FileType::Socket, 0o600),
        Mknod("null", FileType::CharacterDevice, 0o600),
        Mknod("plain", FileType::RegularFile, 0o640),
        Mknod("f", FileType::Fifo, 0o600),
        Link("f", "d/second", none),
        Open(long(), RW | OFlags::CREATE, 0o600),
    ];
    for step in made {
        same(&ours, other.path(), step, &mut different);
    }
    let long_path: &'static str = Box::leak("x/".repeat(2100).into_boxed_str());
    let paths = [
        "f",
        "f/",
        "f/x",
        "d",
        "d/",
        "d/full",
        "d/full/f",
        "d/full/f/..",
        "empty",
        "empty/.",
        "empty/..",
        ".",
        "",
        "nothing",
        "nothing/",
        "nothing/x",
        "to-f",
        "to-f/",
        "to-d",
        "to-d/",
        "to-d/full",
        "to-nothing",
        "to-nothing/",
        "loop",
        "loop/x",
        "fifo",
        "socket",
        "plain",
        "d/second",
        LONG,
        "d/full/../second",
        long_path,
    ];
    let flags = [
        OFlags::RDONLY,
        OFlags::WRONLY,
        RW,
        OFlags::RDONLY | OFlags::DIRECTORY,
        RW | OFlags::DIRECTORY,
        OFlags::RDONLY | OFlags::NOFOLLOW,
        RW | OFlags::CREATE | OFlags::EXCL,
        OFlags::PATH,
        OFlags::PATH | OFlags::NOFOLLOW,
        OFlags::RDONLY | OFlags::CREATE | OFlags::DIRECTORY,
        OFlags::WRONLY | OFlags::APPEND,
    ];
    let follows = AtFlags::SYMLINK_FOLLOW;
    for path in paths {
        for flags in flags {
            // Nobody answers at the other end of a socket or a FIFO.
            if path != "fifo" || !flags.contains(OFlags::WRONLY) {
                same(&ours, other.path(), Open(path, flags, 0o644), &mut different);
            }
            // What it made is no part of what follows.
            let _ = (fs::remove_file(here(&ours, "nothing")), fs::remove_file(other.path().join("nothing")));
        }
        for step in [
            Stat(path, none),
            Stat(path, NOT),
            List(path),
            Readlink(path),
            Truncate(path, -1),
            Link(path, "f", none),
            Link(path, "nothing/x", none),
            Link(path, "f/x", none),
            Link(path, LONG, follows),
            Symlink("x", path),
            Mkdir("d", 0o755),
            Mknod("d/full", FileType::Socket, 0o600),
            Chmod(path, 0o7777),
            Chown(path, None, None, none),
            Chown(path, Some(5), Some(6), NOT),
            Chown(path, Some(0), Some(0), NOT),
            Times(path, (1_000_000_000, 5), follow),
            Times(path, (1, 1_000_000_000), follow),
            Times(path, (-5, 999_999_999), UtimensatFlags::NoFollowSymlink),
            Rename(path, "f/x", replace),
            Rename(path, "nothing/x", replace),
            Rename(path, LONG, replace),
            Rename(path, ".", replace),
            Rename(path, "d/..", replace),
            Rename(path, path, replace),
            Rename(path, path, RenameFlags::NOREPLACE),
            Rename(path, path, RenameFlags::EXCHANGE),
            Rename(path, "nothing", RenameFlags::EXCHANGE),
            Rename(path, "f", RenameFlags::NOREPLACE),
            Rename("nothing", path, replace),
            Rename("d", path, RenameFlags::NOREPLACE | RenameFlags::EXCHANGE),
            Rename("f", path, RenameFlags::NOREPLACE),
            Rename("to-d", "empty/x", RenameFlags::EXCHANGE),
            Write(path, 0, 0),
            Allocate(path, FallocateFlags::empty(), 0, 0),
            Allocate(path, FallocateFlags::empty(), 1 << 62, 1 << 62),
            Allocate(path, FallocateFlags::PUNCH_HOLE, 0, 10),
        ] {
            same(&ours, other.path(), step, &mut different);
            let _ = (fs::remove_file(here(&ours, "nothing")), fs::remove_file(other.path().join("nothing")));
        }
        alike(&ours, other.path(), path, &mut different);
    }
    for step in [
        Rmdir("d"),
        Rmdir("f"),
        Rmdir("to-d"),
        Rmdir("d/full/."),
        Rmdir("d/full/.."),
        Rmdir("."),
        Rmdir("nothing"),
        Rmdir("loop/x"),
        Unlink("d"),
        Unlink("to-d/"),
        Unlink("f/"),
        Unlink("nothing"),
        Unlink("."),
        Unlink(LONG),
        Rename("d", "d/full", replace),
        Rename("d", "d/full/x", replace),
        Rename("d/full", "d", replace),
        Rename("empty", "d", replace),
        Rename("d", "empty", replace),
        Rename("f", "d", replace),
        Rename("d", "f", replace),
        Rename("d", "to-d", replace),
        Rename("f", "d/second", replace),
        Rename("d", "d/full/x", RenameFlags::EXCHANGE),
        Rename("d/full", "d", RenameFlags::EXCHANGE),
        Rename("d/full", "f", RenameFlags::EXCHANGE),
        Stat("d", NOT),
        Rename("f", "empty/inherits", RenameFlags::EXCHANGE),
        Stat("empty", NOT),
        Unlink("to-nothing"),
        Unlink("fifo"),
        Rmdir("sticky"),
        Open("new/", RW | OFlags::CREATE, 0o600),
        Open("empty/g", RW | OFlags::CREATE, 0o2770),
        Chown("empty/g", Some(7), Some(8), none),
        Chmod("empty/g", 0o6777),
        Write("empty/g", 0, 10),
        Stat("empty/g", none),
        Chmod("empty/g", 0o6777),
        Truncate("empty/g", 3),
        Stat("empty/g", none),
        Chmod("empty/g", 0o6777),
        Chown("empty/g", Some(9), None, none),
        Stat("empty/g", none),
        Resize("empty/g", 1 << 40),
        Stat("empty/g", none),
        Resize("empty/g", 0),
        Open("empty/g", OFlags::WRONLY | OFlags::TRUNC, 0),
    ] {
        same(&ours, other.path(), step, &mut different);
    }
    alike(&ours, other.path(), "all", &mut different);
    assert!(different.is_empty(), "{different:#?}");
}

/// A plain generator.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % end
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

#[test]
fn whatever_is_asked_in_whatever_order_is_as_on_a_tmpfs() {
    const PATHS: [&str; 14] =
        ["a", "b", "c", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/f", "l", "l/a", "l/e", "a/x", "d/.."];
    let place = Place::new();
    let Some((ours, other)) = places(&place) else { return };
    let mut different = Vec::new();
    let mut chance = Chance(0x2545_f491_4f6c_dd1d);
    let replace = RenameFlags::empty();
    let (keep, exchange) = (RenameFlags::NOREPLACE, RenameFlags::EXCHANGE);
    for turn in 0..12_000 {
        let (path, to) = (chance.of(&PATHS), chance.of(&PATHS));
        let mode = chance.of(&[0o644, 0o600, 0o755, 0o4755, 0o2755, 0o1777, 0o2770]);
        let create = RW | OFlags::CREATE;
        let flags = [create, create | OFlags::EXCL, create | OFlags::TRUNC, RW | OFlags::APPEND];
        let at = chance.of(&[0_u32, 1, 100, 4095, 4096, 5000, 8192, 70_000, 300_000]);
        let length = chance.of(&[1_usize, 10, 4096, 5000, 66_000]);
        let step = match chance.below(22) {
            0..=3 => Open(path, chance.of(&flags), mode),
            4 | 5 => Mkdir(path, mode),
            6 => Rmdir(path),
            7 => Unlink(path),
            8..=10 => Rename(path, to, chance.of(&[replace, replace, keep, exchange])),
            11 => Link(path, to, AtFlags::empty()),
            12 => Symlink(chance.of(&["d", "a", "l", "nothing"]), path),
            13 => Chmod(path, mode),
            14 => Chown(path, chance.of(&[None, Some(3)]), chance.of(&[None, Some(4)]), NOT),
            15 => Truncate(path, at.into()),
            16 | 17 => Write(path, at.into(), length),
            18 => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let flags = [hole, FallocateFlags::empty(), FallocateFlags::KEEP_SIZE];
                Allocate(path, chance.of(&flags), at.into(), length as u64)
            }
            19 => Stat(path, NOT),
            20 => List(path),
            _ => Readlink(path),
        };
        same(&ours, other.path(), step, &mut different);
        assert!(different.is_empty(), "after {turn} steps, {different:#?}");
        if turn % 200 == 0 {
            assert_eq!(all(&ours), all(other.path()), "after {turn} steps, the last of them {step:?}");
        }
    }
    assert_eq!(all(&ours), all(other.path()));
}

/// When something was modified and changed.
fn times(root: &Path, path: &str) -> Option<[(i64, i64); 2]> {
    let of = fs::symlink_metadata(here(root, path)).ok()?;
    Some([(of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec())])
}

#[test]
fn each_request_changes_the_times_that_it_changes_on_a_tmpfs() {
    let place = Place::new();
    let Some((ours, other)) = places(&place) else { return };
    let mut different = Vec::new();
    let (none, replace) = (AtFlags::empty(), RenameFlags::empty());
    let watched = ["", "d", "e", "d/f", "d/g", "d/l", "e/f", "e/x"];
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for step in [
        Mkdir("d", 0o755),
        Mkdir("e", 0o755),
        Open("d/f", RW | OFlags::CREATE, 0o644),
        Open("d/f", OFlags::RDONLY, 0),
        Symlink("f", "d/l"),
        Link("d/f", "d/g", none),
        Link("d/f", "d/g", none),
        Chmod("d/f", 0o600),
        Chmod("d/f", 0o600),
        Chown("d/f", Some(1), Some(1), none),
        Chown("d/f", None, None, none),
        Write("d/f", 0, 10),
        Write("d/f", 100, 10_000),
        Write("d/f", 0, 0),
        Truncate("d/f", 5),
        Truncate("d/f", 5),
        Resize("d/f", 5),
        Resize("d/f", 50_000),
        Open("d/f", OFlags::WRONLY | OFlags::TRUNC, 0),
        Allocate("d/f", FallocateFlags::empty(), 0, 10_000),
        Allocate("d/f", hole, 0, 5000),
        Times("d/f", (1000, 0), UtimensatFlags::FollowSymlink),
        Rename("d/f", "e/f", replace),
        Rename("e/f", "e/x", replace),
        Rename("d/g", "e/x", replace),
        Open("d/h", RW | OFlags::CREATE, 0o644),
        Rename("d/h", "e/x", RenameFlags::EXCHANGE),
        Rename("d/h", "d/l", replace),
        Mkdir("d/i", 0o755),
        Rename("d/i", "e/f", replace),
        Unlink("e/x"),
        Rmdir("e/f"),
        Unlink("d/l"),
    ] {
        let before = watched.map(|path| (times(&ours, path), times(other.path(), path)));
        std::thread::sleep(Duration::from_millis(15));
        same(&ours, other.path(), step, &mut different);
        for (path, (one, two)) in watched.into_iter().zip(before) {
            let changed = |now: Option<[(i64, i64); 2]>, before: Option<[(i64, i64); 2]>| {
                now.zip(before).map(|(now, before)| [now[0] != before[0], now[1] != before[1]])
            };
            let found = changed(times(&ours, path), one);
            let wanted = changed(times(other.path(), path), two);
            if found != wanted {
                different
                    .push(format!("modified, changed of {path:?} by {step:?}: {found:?} for {wanted:?}"));
            }
        }
    }
    assert!(different.is_empty(), "{different:#?}");
}
