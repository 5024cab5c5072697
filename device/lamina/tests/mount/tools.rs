//! Other people's programs on `files/`: what copies, archives, converts and verifies.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};

use crate::common::{Place, noise};
use crate::life::worker_of;

/// Whether a program is there; the test says so if it is not.
fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        lamina_skipped::part(format_args!("{tool} is not installed"));
    }
    found
}

/// Runs it in a folder: what it says, or what it says of its failure.
fn run(folder: &Path, words: &[&str]) -> Result<String, String> {
    let output = Command::new(words[0]).args(&words[1..]).current_dir(folder).env("LC_ALL", "C").output();
    let output = output.unwrap_or_else(|why| panic!("{words:?}: {why}"));
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(said) } else { Err(said) }
}

/// A folder with files, folders, links and holes in it.
fn tree(at: &Path) {
    fs::create_dir_all(at.join("d/e")).unwrap();
    fs::write(at.join("small"), b"text").unwrap();
    fs::write(at.join("d/large"), noise(1, 3 << 20)).unwrap();
    fs::write(at.join("d/e/empty"), b"").unwrap();
    fs::hard_link(at.join("small"), at.join("d/again")).unwrap();
    symlink("../small", at.join("d/link")).unwrap();
    let holes = fs::File::create(at.join("holes")).unwrap();
    holes.set_len(5 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, &noise(2, 70_000), 2 << 20).unwrap();
    let then = std::time::SystemTime::UNIX_EPOCH + Duration::new(1_500_000_000, 123_456_789);
    holes.set_modified(then).unwrap();
}

/// A place with a tree, and a device with `files/`.
fn place() -> Place {
    let place = Place::new();
    place.mount(&["--capacity", "512M", "--files", "256M"]);
    tree(&place.path("tree"));
    place
}

fn same(place: &Place, copy: &str) {
    run(&place.path("."), &["diff", "-r", "--no-dereference", "tree", copy]).unwrap();
    let (one, two) = (place.path("tree"), place.path(copy));
    for name in ["small", "d/large", "d/e/empty", "holes"] {
        let told = |folder: &Path| {
            let of = fs::metadata(folder.join(name)).unwrap();
            (of.mode(), of.size(), of.mtime(), of.mtime_nsec())
        };
        assert_eq!(told(&one), told(&two), "{name}");
    }
}

#[test]
fn what_copies_and_archives_brings_all_there_and_back() {
    let place = place();
    let here = place.path(".");
    let ours = "m/files/copy";
    run(&here, &["cp", "-a", "tree", ours]).unwrap();
    same(&place, ours);
    let of = fs::metadata(place.path("m/files/copy/small")).unwrap();
    assert_eq!(of.nlink(), 2, "a hard link is one");
    let holes = fs::metadata(place.path("m/files/copy/holes")).unwrap();
    assert!(holes.blocks() * 512 < 1 << 20, "holes stay holes: {} blocks", holes.blocks());
    run(&here, &["cp", "-a", ours, "back"]).unwrap();
    same(&place, "back");

    run(&here, &["tar", "--format=posix", "-cSf", "m/files/tree.tar", "tree"]).unwrap();
    fs::create_dir(place.path("m/files/out")).unwrap();
    run(&here, &["tar", "-xpSf", "m/files/tree.tar", "-C", "m/files/out"]).unwrap();
    same(&place, "m/files/out/tree");

    if has("rsync") {
        run(&here, &["rsync", "-aH", "--inplace", "tree/", "m/files/synced"]).unwrap();
        same(&place, "m/files/synced");
        fs::write(place.path("tree/d/large"), [noise(1, 1 << 20), noise(9, 2 << 20)].concat()).unwrap();
        // It may be of the same second, and is as long as before: only its bytes tell.
        run(&here, &["rsync", "-aHc", "--inplace", "--no-whole-file", "tree/", "m/files/synced"]).unwrap();
        same(&place, "m/files/synced");
        let said = run(&here, &["rsync", "-aHin", "tree/", "m/files/synced"]).unwrap();
        assert_eq!(said, "", "nothing is left to be done");
    }
    run(&here, &["rm", "-r", "m/files/copy", "m/files/out", "m/files/tree.tar"]).unwrap();
    // It says what a person expects of what is none of its.
    let said = run(&here, &["cp", "-a", "tree", "m/tree"]).unwrap_err();
    assert!(said.contains("Read-only file system"), "{said}");
    let said = run(&here, &["mv", "m/files", "m/other"]).unwrap_err();
    assert!(said.contains("Read-only file system"), "{said}");
}

#[test]
fn what_writes_raw_bytes_finds_the_end_where_there_is_one() {
    let place = place();
    let here = place.path(".");
    let dd = |words: &[&str]| run(&here, &[&["dd", "status=none"], words].concat());
    dd(&["if=tree/d/large", "of=m/files/raw", "bs=4k"]).unwrap();
    dd(&["if=tree/d/large", "of=m/files/raw", "bs=64k", "seek=80", "oflag=direct"]).unwrap();
    run(&here, &["cmp", "-n", "3145728", "tree/d/large", "m/files/raw"]).unwrap();
    run(&here, &["cmp", "-i", "0:5242880", "tree/d/large", "m/files/raw"]).unwrap();
    run(&here, &["truncate", "-s", "1000", "m/files/raw"]).unwrap();
    run(&here, &["cmp", "-n", "1000", "tree/d/large", "m/files/raw"]).unwrap();
    run(&here, &["truncate", "-s", "1G", "m/files/raw"]).unwrap();
    assert_eq!(fs::metadata(place.path("m/files/raw")).unwrap().len(), 1 << 30);
    run(&here, &["truncate", "-s", "0", "m/files/raw"]).unwrap();
    // As a disk says it: files have 256 MiB of address here, and the window its own size.
    let said = dd(&["if=/dev/urandom", "of=m/files/raw", "bs=1M", "count=300"]).unwrap_err();
    assert!(said.contains("No space left on device"), "{said}");
    fs::remove_file(place.path("m/files/raw")).unwrap();
    let said = dd(&["if=tree/small", "of=m/base", "bs=1M", "seek=512", "conv=notrunc"]).unwrap_err();
    assert!(said.contains("No space left on device"), "{said}");
    run(&here, &["cp", "tree/d/large", "m/files/after"]).unwrap();
    run(&here, &["cmp", "tree/d/large", "m/files/after"]).unwrap();

    if has("qemu-img") {
        run(&here, &["qemu-img", "convert", "-O", "qcow2", "tree/holes", "m/files/disk.qcow2"]).unwrap();
        run(&here, &["qemu-img", "check", "m/files/disk.qcow2"]).unwrap();
        run(&here, &["qemu-img", "compare", "m/files/disk.qcow2", "tree/holes"]).unwrap();
        run(&here, &["qemu-img", "convert", "-O", "raw", "m/files/disk.qcow2", "m/files/disk.raw"]).unwrap();
        run(&here, &["cmp", "m/files/disk.raw", "tree/holes"]).unwrap();
        run(&here, &["qemu-img", "resize", "-f", "raw", "m/files/disk.raw", "64M"]).unwrap();
    }
}

#[test]
fn fio_finds_what_it_wrote_while_workers_are_killed() {
    if Command::new("fio").arg("--version").output().is_err() {
        lamina_skipped::test("fio is not installed");
        return;
    }
    let place = Place::new();
    let told = place.mount(&["--capacity", "512M", "--files", "256M"]);
    let holder = told["pid"].as_u64().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut deaths = 0;
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(700));
                if let Some(worker) = worker_of(holder) {
                    kill(worker, Signal::SIGKILL).unwrap();
                    deaths += 1;
                }
            }
            assert!(deaths > 2, "{deaths} deaths");
        });
        for (name, more) in [
            ("buffered", &["--rw=randwrite", "--bsrange=4k-64k"][..]),
            ("direct", &["--rw=randwrite", "--bs=8k", "--direct=1"]),
            ("mapped", &["--rw=randwrite", "--bs=4k", "--ioengine=mmap"]),
            ("grows", &["--rw=write", "--bs=24k", "--fsync=50", "--create_on_open=1"]),
        ] {
            let (job, output) = (format!("--name={name}"), format!("--filename={name}"));
            let usual = [
                "fio",
                &job,
                &output,
                "--size=12m",
                "--loops=2",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_dump=0",
                "--do_verify=1",
                "--randseed=7",
            ];
            let ended = run(&place.path("m/files"), &[&usual, more].concat());
            done.store(ended.is_err() || name == "grows", Ordering::Relaxed);
            let said = ended.unwrap_or_else(|why| panic!("{name}: {why}"));
            assert!(said.contains("err= 0"), "{name}: {said}");
        }
    });
}
