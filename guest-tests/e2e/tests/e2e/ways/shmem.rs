//! Guests that have what they ask for mapped into the shared memory of a virtio device, with the
//! driver of ours.

use std::path::PathBuf;
use std::process::Command;

use lamina_qemu::recipe;
use lamina_run::judge::Judge;
use lamina_run::programs;

use super::script::{ROTATION, WRITTEN, model, reads_writes_and_asks, reported, sum, without_cxl};

/// What every script begins with: that the driver is not there before it is asked for.
pub(crate) fn prologue() -> String {
    without_cxl("[ ! -e /dev/lamina0 ] || fail 'the driver is there already'\n")
}

#[test]
fn a_guest_maps_what_it_wants_reads_writes_and_flushes_and_is_refused_what_is_wrong() {
    let judge = Judge::new(&[model()]).unwrap();
    let mut script = format!(
        "[ -c /dev/lamina0 ] || fail 'no driver'\n\
         lamina-ioctls {WRITTEN} e8m3 || fail ioctls\n\
         lamina-loads {WRITTEN} base --rounds 1000000 >/tmp/loads &\n\
         loads=$!\n\
         until [ -s /tmp/loads ]; do kill -0 $loads || fail loads; sleep 1; done\n\
         device=$(ls /sys/bus/virtio/drivers/lamina | grep virtio)\n\
         echo $device >/sys/bus/virtio/drivers/lamina/unbind\n\
         wait $loads\n\
         [ $? = 135 ] || fail 'no SIGBUS from a device that is gone'\n\
         echo $device >/sys/bus/virtio/drivers/lamina/bind\n\
         lamina-shim up || fail 'up after bind'\n\
         rmmod lamina || fail 'the driver stays'\n\
         [ ! -e /dev/lamina0 ] || fail 'its file stays'\n\
         lamina-shim up || fail 'up again'\n"
    );
    sum(&mut script, "again", WRITTEN, "full");
    script.push_str("dmesg | grep -E 'WARNING|BUG|Call Trace' && fail 'the kernel complains'\n");
    let [ioctls, loads] = ["lamina-ioctls", "lamina-loads"]
        .map(|name| format!("{}=/bin/{name}", programs::guest(name).unwrap().display()));
    let said = reads_writes_and_asks("shmem", &prologue(), &script, &[&ioctls, &loads], &judge);
    assert_eq!(reported(&said, "again"), judge.sha256(WRITTEN, "full", ROTATION).unwrap());
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
