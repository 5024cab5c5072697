//! Guests that see the device as disks, with nothing of ours in them: no driver, no CXL.
//!
//! Each test runs in every QEMU at hand that will do: the one that `lamina` itself would take for
//! CXL (11.1 or newer), and the host's own, if that is another one. Which they were is printed.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use lamina_qemu::find::Install;
use lamina_qemu::topology::vhost_user::OLDEST_QEMU;
use lamina_qemu::version::OLDEST;
use lamina_qemu::{Attach, BootConfig, GuestFile, Qemu, VhostUser, boot};
use lamina_run::{bundled, disks::Disks, judge::Judge};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

/// What every script begins with: the disks by their serial numbers.
const PROLOGUE: &str = r#"#!/bin/sh
fail() { echo "FAILED: $*"; exit 1; }
disk() {
    for block in /sys/block/vd*; do
        [ "$(cat "$block/serial")" = "$1" ] && echo "/dev/${block##*/}"
    done
}
base=$(disk lamina-base)
views=$(disk lamina-views)
[ -b "$base" ] && [ -b "$views" ] || fail "no disks"
sum() { head -c "$2" "$1" | sha256sum | cut -c1-64; }
"#;

/// The QEMUs to run in.
fn qemus() -> Vec<PathBuf> {
    let path = |qemu: Qemu| match qemu.install {
        Install::Host(path) | Install::Root(path) => path,
    };
    let newest = Qemu::find(OLDEST, true).unwrap();
    println!("QEMU {} at {:?}", newest.version, newest.install);
    let mut all = vec![path(newest)];
    let search = std::env::var_os("PATH").unwrap_or_default();
    let host = std::env::split_paths(&search).map(|folder| folder.join(lamina_qemu::find::PROGRAM));
    match host.into_iter().find(|path| path.is_file()).map(|path| Qemu::probe(&path, OLDEST_QEMU)) {
        Some(Ok(qemu)) => {
            println!("the host's QEMU {} at {:?}", qemu.version, qemu.install);
            let host = path(qemu);
            if !all.contains(&host) {
                all.push(host);
            }
        }
        Some(Err(why)) => println!("the host's QEMU will not do: {why}"),
        None => println!("the host has no QEMU of its own"),
    }
    all
}

/// Boots a guest on these disks with a script, hands its lines on, and returns them.
fn run(
    sockets: Vec<PathBuf>,
    qemu: &Path,
    script: &str,
    files: Vec<GuestFile>,
    mut on_line: impl FnMut(&str),
) -> Vec<String> {
    let mut config = BootConfig::attached(Attach::VhostUser(VhostUser { disks: sockets, queues: 2 }));
    config.programs = vec![GuestFile::script("/run.sh", format!("{PROLOGUE}{script}\nexit 0\n"))];
    config.programs.extend(files);
    config.run = Some("/run.sh".into());
    config.qemu = Some(qemu.to_owned());
    let (sender, lines) = mpsc::channel();
    let guest = boot(&config, move |line| sender.send(line.to_owned()).unwrap_or_default()).unwrap();
    let mut seen = Vec::new();
    while let Ok(line) = lines.recv_timeout(LIMIT) {
        println!("{line}");
        on_line(&line);
        seen.push(line);
    }
    let outcome = guest.wait(Some(LIMIT)).unwrap();
    assert_eq!(outcome.status, Some(0), "{seen:#?}");
    seen
}

/// The value of the line `name value`.
fn reported<'l>(lines: &'l [String], name: &str) -> &'l str {
    let found = lines.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("the guest did not tell {name}: {lines:#?}"))
}

/// The static program that reads a device through a mapping.
fn mapcat(folder: &Path) -> GuestFile {
    let output = folder.join("mapcat");
    let status = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition=2024", "-O", "-Ctarget-feature=+crt-static", "--target=x86_64-unknown-linux-gnu"])
        .arg("-o")
        .arg(&output)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/guest/mapcat.rs"))
        .status()
        .unwrap();
    assert!(status.success());
    GuestFile::program("/bin/mapcat", output)
}

fn model() -> PathBuf {
    bundled().expect("start the tests through ./x test").remove(0)
}

fn start(model: &Path) -> Disks {
    let views = "full,e8m3,e8m3+g2:packed,fp8_e4m3fn";
    Disks::start(&["--model", model.to_str().unwrap(), "--views", views]).unwrap()
}

#[test]
fn a_guest_without_a_driver_reads_base_and_every_view_right() {
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge::new(&[model()]).unwrap();
    for qemu in qemus() {
        let disks = start(&model());
        let shown: Vec<_> =
            disks.ready.disks[1].partitions.iter().filter(|partition| !partition.view.is_empty()).collect();
        assert_eq!(shown.len(), judge.names().count() * 4);
        let mut script = String::new();
        for partition in &shown {
            let number = partition.number;
            writeln!(script, "echo \"view{number} $(sum ${{views}}{number} {})\"", partition.length).unwrap();
        }
        let tensors = disks.tensors().unwrap();
        for (n, tensor) in tensors.as_array().unwrap().iter().enumerate() {
            let (dpa, length) = (tensor["dpa"].as_u64().unwrap(), tensor["length"].as_u64().unwrap());
            writeln!(
                script,
                "echo \"base{n} $(tail -c +{} $base | head -c {length} | sha256sum | cut -c1-64)\"",
                dpa + 1
            )
            .unwrap();
        }
        // Through a mapping; where nothing was read before; and the names that a guest with udev
        // would make links of.
        let packed = shown.iter().find(|partition| partition.view.ends_with(":packed")).unwrap();
        let (number, length) = (packed.number, packed.length);
        write!(
            script,
            "echo 3 >/proc/sys/vm/drop_caches; blockdev --flushbufs ${{views}}{number}\n\
             echo \"mapped $(mapcat ${{views}}{number} {length} | sha256sum | cut -c1-64)\"\n\
             echo \"name $(sed -n 's/^PARTNAME=//p' /sys/class/block/${{views##*/}}{number}/uevent)\"\n\
             echo \"queues $(ls /sys/block/${{base##*/}}/mq | wc -l)\"\n\
             echo \"read-only $(cat /sys/block/${{views##*/}}/ro)\"\n\
             dd if=/dev/zero of=$views bs=4096 count=1 seek=600 oflag=direct 2>/dev/null && fail 'a view was written'\n"
        )
        .unwrap();
        let lines = run(disks.sockets(), &qemu, &script, vec![mapcat(folder.path())], |_| {});
        for partition in &shown {
            let want = judge.sha256(&partition.tensor, &partition.view, 0).unwrap();
            let number = partition.number;
            assert_eq!(
                reported(&lines, &format!("view{number}")),
                want,
                "{} {}",
                partition.tensor,
                partition.view
            );
        }
        for (n, tensor) in tensors.as_array().unwrap().iter().enumerate() {
            let name = tensor["name"].as_str().unwrap();
            assert_eq!(
                reported(&lines, &format!("base{n}")),
                judge.sha256(name, "base", 0).unwrap(),
                "{name}"
            );
        }
        let want = judge.sha256(&packed.tensor, &packed.view, 0).unwrap();
        assert_eq!(reported(&lines, "mapped"), want);
        assert_eq!(reported(&lines, "name"), packed.name);
        assert_eq!((reported(&lines, "queues"), reported(&lines, "read-only")), ("2", "1"));
        disks.stop().unwrap();
    }
}

#[test]
fn what_a_guest_writes_and_syncs_changes_the_views_and_what_it_discards_is_free() {
    const OPAQUE: u64 = 128 << 20;
    let judge = Judge::new(&[model()]).unwrap();
    for qemu in qemus() {
        let disks = start(&model());
        let tensors = disks.tensors().unwrap();
        let name = "tok_embeddings.weight";
        let tensor = tensors.as_array().unwrap().iter().find(|tensor| tensor["name"] == name).unwrap();
        let (dpa, length) = (tensor["dpa"].as_u64().unwrap(), tensor["length"].as_u64().unwrap());
        let live = |stats: &Value| stats["device"]["logical_bytes"].as_u64().unwrap();
        let before = live(&disks.stats().unwrap());
        let rotated = GuestFile::data("/new", judge.full(name, 1000).unwrap());
        let mut script = format!(
            "dd if=/new of=$base bs=4096 seek={} conv=notrunc,fsync 2>/dev/null || fail write\n",
            dpa / 4096
        );
        for view in ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn"] {
            let partition = disks.partition(name, view).unwrap();
            let (number, length) = (partition.number, partition.length);
            // Once as it was, which the guest's own page cache then holds; dropped, it is read
            // anew.
            writeln!(
                script,
                "blockdev --flushbufs ${{views}}{number}; echo \"{view} $(sum ${{views}}{number} {length})\""
            )
            .unwrap();
        }
        write!(
            script,
            "echo 'stores begin'; dd if=/dev/urandom of=$base bs=1M count=8 seek={at} conv=fsync 2>/dev/null || fail write\n\
             echo stored; sleep 2\n\
             blkdiscard -o {OPAQUE} -l {} $base || fail discard\n\
             echo \"zeros $(dd if=$base bs=1M skip={at} count=8 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c)\"\n",
            8 << 20,
            at = OPAQUE >> 20,
        )
        .unwrap();
        // The device's counters are read while the guest sleeps.
        let mut stored = 0;
        let lines = run(disks.sockets(), &qemu, &script, vec![rotated], |line| {
            if line == "stored" {
                stored = live(&disks.stats().unwrap());
            }
        });
        for view in ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn"] {
            assert_eq!(
                reported(&lines, view),
                judge.sha256(name, view, 1000).unwrap(),
                "{view} of {length} bytes"
            );
        }
        assert_eq!(reported(&lines, "zeros"), "0");
        assert_eq!(stored, before + (8 << 20));
        let after = disks.stats().unwrap();
        assert_eq!(live(&after), before);
        assert!(after["writes"]["discarded_blocks"].as_u64().unwrap() >= 2048, "{after:#}");
        disks.stop().unwrap();
    }
}

#[test]
fn a_guest_does_not_notice_that_its_disks_were_killed_and_came_back() {
    let judge = Judge::new(&[model()]).unwrap();
    for qemu in qemus() {
        let mut disks = start(&model());
        let name = "tok_embeddings.weight";
        let partition = disks.partition(name, "full").unwrap();
        let (number, length) = (partition.number, partition.length);
        let want = judge.sha256(name, "full", 0).unwrap();
        // The stores go where no tensor is: what was stored before the kill is not what this test
        // is about.
        let script = format!(
            "n=0\n\
             while [ $n -lt 60 ]; do\n\
                 found=$(dd if=${{views}}{number} bs=64k iflag=direct 2>/dev/null | head -c {length} | sha256sum | cut -c1-64)\n\
                 [ \"$found\" = {want} ] || fail \"read $n: $found\"\n\
                 dd if=/dev/zero of=$base bs=64k count=4 seek=$((2048 + n * 4)) oflag=direct 2>/dev/null || fail \"write $n\"\n\
                 n=$((n + 1))\n\
                 [ $((n % 10)) -eq 0 ] && echo \"round $n\"\n\
             done\n\
             dmesg | grep -i 'i/o error' && fail 'the kernel noticed'\n\
             echo 'all read'"
        );
        let mut killed = 0;
        let lines = run(disks.sockets(), &qemu, &script, Vec::new(), |line| {
            if line.starts_with("round") && killed < 4 {
                disks.kill_and_start_again().unwrap();
                killed += 1;
            }
        });
        assert_eq!(killed, 4);
        assert!(lines.iter().any(|line| line == "all read"));
        disks.stop().unwrap();
    }
}
