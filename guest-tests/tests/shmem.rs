//! Guests that have what they ask for mapped into the shared memory of a virtio device, with the driver of ours.

mod script;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

use lamina_guest_tests::judge::Judge;
use lamina_guest_tests::programs;
use lamina_qemu::recipe;

use script::{VIEWS, WRITTEN, boot, model, new, read_and_write, right, sum, told};

const PROLOGUE: &str = r#"#!/bin/sh
fail() { echo "FAILED: $*"; dmesg | tail -20; exit 1; }
[ -z "$(ls /sys/bus/cxl/devices 2>/dev/null)" ] || fail "there is CXL"
[ -z "$(ls /sys/class/virtio-ports 2>/dev/null)" ] || fail "there is a serial port"
[ ! -e /dev/lamina0 ] || fail "the driver is there already"
lamina-shim up || fail up
[ -c /dev/lamina0 ] || fail "no driver"
"#;

#[test]
fn a_guest_maps_what_it_wants_reads_writes_and_flushes_and_is_refused_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge::new(&[model()]).unwrap();
    let mut script = PROLOGUE.to_owned();
    script.push_str(&read_and_write(&judge));
    writeln!(script, "lamina-ioctls {WRITTEN} e8m3 || fail ioctls").unwrap();
    writeln!(script, "lamina-shim view {WRITTEN} e8m1 >/dev/null || fail view").unwrap();
    sum(&mut script, "made", WRITTEN, "e8m1");
    script.push_str(
        "lamina-shim flush --offset 18446744073709551615 --length 1 2>/why && fail 'flushed past the end'\n\
         grep -q 'pass the end' /why || fail \"$(cat /why)\"\n\
         for n in 1 2 3 4 5 6; do lamina-shim flush || echo 'FAILED: a flush' & done; wait\n\
         echo \"stats $(lamina-shim stats | grep -c '\"base_writes\"')\"\n\
         rmmod lamina || fail 'the driver stays'\n\
         [ ! -e /dev/lamina0 ] || fail 'its file stays'\n\
         lamina-shim up || fail 'up again'\n",
    );
    sum(&mut script, "again", WRITTEN, "full");
    script.push_str("dmesg | grep -E 'WARNING|BUG|Call Trace' && fail 'the kernel complains'\n");
    let put = new(folder.path(), &judge);
    let program = format!("{}=/bin/lamina-ioctls", programs::guest("lamina-ioctls").unwrap().display());
    let (model, run) = (model(), folder.path().join("run"));
    let options = [
        "--attach",
        "shmem",
        "--model",
        model.to_str().unwrap(),
        "--views",
        &VIEWS.join(","),
        "--put",
        &put,
        "--put",
        &program,
        "--run-dir",
        run.to_str().unwrap(),
    ];
    let said = boot(folder.path(), &script, &options);
    right(&said, &judge);
    assert_eq!(told(&said, "made"), judge.sha256(WRITTEN, "e8m1", 1000).unwrap());
    assert_eq!(told(&said, "stats"), "1");
    assert_eq!(told(&said, "again"), judge.sha256(WRITTEN, "full", 1000).unwrap());
}

#[test]
fn the_driver_is_written_in_the_kernels_style() {
    let kbuild = recipe::run("kbuild").unwrap();
    let folder = recipe::root().join("driver-shim/kernel");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.retain(|path| path.extension().is_some());
    assert!(files.len() >= 6, "{files:?}");
    let checker = kbuild.join("scripts/checkpatch.pl");
    let output =
        Command::new("perl").arg(checker).args(["--no-tree", "--strict", "--file"]).args(&files).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
