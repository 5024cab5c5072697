//! Somebody else's test: fsx, the file system exerciser, on the file of the base window.
//!
//! It reads, writes, maps, flushes, invalidates and punches holes at random places of random
//! lengths, and compares every byte it reads with a copy of its own. `LAMINA_LONG` makes that a
//! million operations for each device; the seeds are the same at every run. fsx never unmaps what
//! it mapped to read, and the kernel bounds a process's mappings, so those are made by one process
//! after another, each with a seed of its own.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use lamina_qemu::recipe;
use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, within};
use crate::deaths::{deaths, kill_worker};

/// Bytes of the device, small enough for operations to meet each other's bytes.
const CAPACITY: u64 = 2 << 20;

/// Truncating and allocating are not for memory; a mapped write is written back by `msync`, by
/// `fsync`, or later by the kernel.
const CONFIG: &str = "\
blockmode = true
nomsyncafterwrite = NOMSYNC
[opsize]
min = 1
max = 20000
[weights]
read = 10
write = 10
mapread = 10
mapwrite = 10
truncate = 0
invalidate = 1
fsync = 0.3
fdatasync = 0.3
punch_hole = 2
sendfile = 2
posix_fadvise = 1
copy_file_range = 2
";

/// The same of a file that may have any size.
const CONFIG_OF_FILE: &str = "\
flen = 400000
[opsize]
min = 1
max = 20000
[weights]
read = 10
write = 10
mapread = 10
mapwrite = 10
truncate = 5
invalidate = 1
fsync = 0.3
fdatasync = 0.3
punch_hole = 2
sendfile = 2
posix_fadvise = 1
copy_file_range = 2
posix_fallocate = 1
";

/// The program, built once in a cache.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| recipe::run("fsx").unwrap().join("fsx"));

fn long() -> bool {
    std::env::var_os("LAMINA_LONG").is_some()
}

/// How many operations.
pub(crate) fn operations(short: u64) -> u64 {
    if long() { 1_000_000 } else { short }
}

/// A test's time, in seconds.
pub(crate) fn limit() -> u64 {
    if long() { 3600 } else { 180 }
}

/// A device of its own, without a tensor.
fn device() -> Rig {
    let place = Place::new();
    let capacity = CAPACITY.to_string();
    let mut command = place.serve(&["--capacity", &capacity, "--views-capacity", "16M", "--views", ""]);
    // Nobody reads its log here, and hundreds of deaths would fill the pipe.
    let run = Run::start(command.env("RUST_LOG", "error"));
    Rig { run, place, bytes: Vec::new() }
}

/// Operations of one process, a fifth of which leave a mapping behind.
const SLICE: u64 = 100_000;

/// Runs operations on a file that may have any size; `folder` takes what is said of it.
pub(crate) fn on_file(folder: &Path, file: &Path, seed: u64, operations: u64) {
    let config = folder.join("fsx.toml");
    std::fs::write(&config, CONFIG_OF_FILE).unwrap();
    for (slice, done) in (0..operations).step_by(usize::try_from(SLICE).unwrap()).enumerate() {
        let (count, seed) = (SLICE.min(operations - done), seed * 1000 + slice as u64);
        let output = Command::new(PROGRAM.as_path())
            .args(["-N", &count.to_string(), "-S", &seed.to_string(), "-f"])
            .arg(&config)
            .arg("-P")
            .arg(folder)
            .arg(file)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        let tail: Vec<_> = why.lines().rev().take(60).collect();
        assert!(output.status.success(), "fsx with seed {seed}: {}\n{tail:#?}", output.status);
    }
}

/// Runs operations, and does something over and over meanwhile.
fn exercise(rig: &Rig, seed: u64, operations: u64, msync: bool, mut meanwhile: impl FnMut()) {
    let folder = rig.place.path("fsx");
    std::fs::create_dir(&folder).unwrap();
    let config = folder.join("fsx.toml");
    std::fs::write(&config, CONFIG.replace("NOMSYNC", if msync { "false" } else { "true" })).unwrap();
    for (slice, done) in (0..operations).step_by(usize::try_from(SLICE).unwrap()).enumerate() {
        let (count, seed) = (SLICE.min(operations - done), seed * 1000 + slice as u64);
        let mut child = Command::new(PROGRAM.as_path())
            .args(["-N", &count.to_string(), "-S", &seed.to_string(), "-f"])
            .arg(&config)
            .arg("-P")
            .arg(&folder)
            .arg(rig.base_path())
            .stdin(Stdio::null())
            .stdout(File::create(folder.join("said")).unwrap())
            .stderr(File::create(folder.join("why")).unwrap())
            .spawn()
            .unwrap();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => meanwhile(),
            }
        };
        let read = |name| String::from_utf8_lossy(&std::fs::read(folder.join(name)).unwrap()).into_owned();
        let (said, why) = (read("said"), read("why"));
        let start =
            (0..=why.len().saturating_sub(4000)).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0);
        let tail = &why[start..];
        assert!(status.success(), "fsx with seed {seed}: {status}\n{said}\n{tail}");
        println!("fsx: {count} operations with seed {seed}, {}", said.trim());
    }
}

/// Nothing to do meanwhile.
fn wait() {
    thread::sleep(Duration::from_millis(10));
}

/// The counters agree with what happened, and nothing is damaged.
fn judge(rig: &Rig, operations: u64) {
    let stats = rig.ask("GET", "/stats", &Value::Null);
    let number = |path: &str| stats.pointer(path).unwrap().as_u64().unwrap();
    assert_eq!(number("/requests/damaged_reads"), 0);
    assert_eq!(number("/requests/poison_events"), 0);
    assert!(number("/requests/base/reads") > 0 && number("/writes/base_writes") > operations / 10, "{stats}");
    assert!(number("/writes/base_written_bytes") >= number("/writes/base_writes"), "{stats}");
    assert!(number("/writes/discarded_blocks") > 0, "holes were punched: {stats}");
    println!("requests {}, writes {}", stats["requests"]["base"], stats["writes"]);
    // What fsx left is what the device gives to somebody who asks it anew: fsx compared it at
    // random, here is all of it twice.
    rig.flush(0, CAPACITY);
    let file = |path: &Path| std::fs::read(path).unwrap();
    let cached = file(&rig.base_path());
    drop_cache(&rig.base_path());
    assert!(file(&rig.base_path()) == cached, "the device has other bytes than the page cache had");
}

fn drop_cache(path: &Path) {
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
    let file = File::open(path).unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

#[test]
fn fsx_finds_no_wrong_byte_in_memory_that_no_tensor_covers() {
    within(limit(), || {
        let rig = device();
        let operations = operations(20_000);
        exercise(&rig, 1, operations, true, wait);
        judge(&rig, operations);
    });
}

#[test]
fn fsx_finds_no_wrong_byte_in_tensors() {
    within(limit(), || {
        let rig = device();
        // A weight that ends inside a block, and a cache whose rows are padded; between and behind
        // them lies what is neither.
        let weight = json!({ "name": "w", "dpa": 0, "length": (700 << 10) + 6, "format": "bf16" });
        let layout = json!({ "kind": "kv", "channels": 48, "window": 64, "stride": 64 });
        let cache = json!({
            "name": "cache.k", "dpa": 768 << 10, "length": 640 << 10, "shape": [5 << 10, 64], "format": "bf16", "layout": layout
        });
        rig.ask("POST", "/tensors", &weight);
        rig.ask("POST", "/tensors", &cache);
        let operations = operations(12_000);
        exercise(&rig, 2, operations, false, wait);
        judge(&rig, operations);
        let windows = rig.ask("GET", "/stats", &Value::Null)["kv_windows"]["opened"].as_u64().unwrap();
        assert!(windows > 0, "the cache was written");
    });
}

#[test]
fn fsx_finds_no_wrong_byte_while_workers_are_killed() {
    within(limit(), || {
        let rig = device();
        let weight = json!({ "name": "w", "dpa": 0, "length": 1 << 20, "format": "bf16" });
        rig.ask("POST", "/tensors", &weight);
        let operations = operations(12_000);
        let mut killed = 0;
        exercise(&rig, 3, operations, true, || {
            thread::sleep(Duration::from_millis(60 + killed * 37 % 240));
            kill_worker(&rig.run);
            killed += 1;
        });
        crate::common::eventually("a worker", || rig.try_ask_quietly("/stats"));
        let deaths = deaths(&rig);
        println!("{deaths} deaths");
        assert!(deaths > 3, "{deaths} deaths");
        judge(&rig, operations);
    });
}
