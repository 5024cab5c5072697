//! Boots the real guest image in the real QEMU, on two ordinary sparse files.
//!
//! Needs what the recipes in `images/` need; they unpack QEMU and the guest image first if they are
//! not in the cache.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lamina_qemu::{BootConfig, BootError, GuestFile, Port, boot};

const WINDOW: u64 = 256 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Two memory files in a folder, each beginning with 16 bytes that name it.
fn windows(folder: &Path) -> (PathBuf, PathBuf) {
    let make = |name: &str| {
        let path = folder.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(WINDOW).unwrap();
        file.write_all_at(format!("the host's {name:5}").as_bytes(), 0).unwrap();
        path
    };
    (make("base"), make("views"))
}

/// The static program that the guest pokes its memory with.
fn build_poke(folder: &Path) -> PathBuf {
    let output = folder.join("poke");
    let status = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args([
            "--edition=2024",
            "-O",
            "-Ctarget-feature=+crt-static",
            "--target=x86_64-unknown-linux-gnu",
            "-o",
        ])
        .arg(&output)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/qemu/guest/poke.rs"))
        .status()
        .unwrap();
    assert!(status.success());
    output
}

fn found(path: &Path, offset: u64, length: usize) -> String {
    let mut bytes = vec![0; length];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_guest_loads_and_stores_both_windows_as_cxl_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (base, views) = windows(folder.path());
    let report = folder.path().join("report");
    let mut config = BootConfig::new(&base, WINDOW, &views, WINDOW);
    config.programs = vec![
        GuestFile::program("/bin/poke", build_poke(folder.path())),
        GuestFile::script("/run.sh", include_str!("guest/regions.sh")),
    ];
    config.run = Some("/run.sh".into());
    config.report = Some(Port::File(report.clone()));
    // The device's part on the control port: answers the guest's line.
    let socket = folder.path().join("ctl");
    let listener = UnixListener::bind(&socket).unwrap();
    config.ctl_socket = Some(socket);
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        writeln!(&stream, "answer to {}", line.trim_end()).unwrap();
        stream
    });

    let (lines, console) = mpsc::channel();
    let guest = boot(&config, move |line| lines.send(line.to_owned()).unwrap_or_default()).unwrap();
    let mut seen = Vec::new();
    while let Ok(line) = console.recv_timeout(LIMIT) {
        println!("{line}");
        seen.push(line);
        if seen.last().is_some_and(|line| line == "stored") {
            break;
        }
    }
    assert!(guest.is_running(), "the guest ended early: {:?}", guest.wait(Some(LIMIT)));
    // While QEMU runs: both windows are mapped, and none of its memory is advised to use huge
    // pages.
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.pid().unwrap())).unwrap();
    assert!(smaps.contains("/base\n") && smaps.contains("/views\n"), "the windows are not mapped");
    let advised =
        |line: &str| line.starts_with("VmFlags:") && line.split_whitespace().any(|flag| flag == "hg");
    assert!(!smaps.lines().any(advised), "QEMU's advice for huge pages came through");

    let outcome = guest.wait(Some(LIMIT)).unwrap();
    assert_eq!(outcome.status, Some(7));
    println!("booted in {:.1} s, ended after {:.1} s", outcome.boot_seconds.unwrap(), outcome.seconds);
    for expected in [
        "serial 0x4c616d696e610000 bytes 268435456",
        "serial 0x4c616d696e610001 bytes 268435456",
        "control: answer to {\"ask\":1}",
        "read \"the host's base \"",
        "read \"the host's views\"",
    ] {
        assert!(seen.iter().any(|line| line == expected), "{expected}: {seen:#?}");
    }
    assert_eq!(found(&base, 8192, 27), "stored in base by the guest");
    assert_eq!(found(&views, 12288, 28), "stored in views by the guest");
    // Attaching, making regions and probing touch nothing: only the pages named above are there.
    for path in [&base, &views] {
        let bytes = std::fs::metadata(path).unwrap().blocks() * 512;
        assert!(bytes <= 64 << 10, "{} holds {bytes} bytes", path.display());
    }
    let reported = std::fs::read_to_string(report).unwrap();
    assert!(reported.contains(&guest.prepared().image.release), "{reported}");
}

#[test]
fn the_extra_programs_run_in_a_guest_that_asks_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let (base, views) = windows(folder.path());
    let mut config = BootConfig::new(base, WINDOW, views, WINDOW);
    let script = "#!/bin/sh\nfio --version && stress-ng --version && numactl --hardware && numastat && memtester 1M 1 && exit 9\n";
    config.programs = vec![GuestFile::script("/run.sh", script)];
    config.run = Some("/run.sh".into());
    config.extras = true;
    let outcome = boot(&config, |line| println!("{line}")).unwrap().wait(Some(LIMIT)).unwrap();
    assert_eq!(outcome.status, Some(9));
}

#[test]
fn a_guest_kernel_that_panics_is_reported_with_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let (base, views) = windows(folder.path());
    let mut config = BootConfig::new(base, WINDOW, views, WINDOW);
    config.programs = vec![GuestFile::script("/run.sh", "#!/bin/sh\necho c >/proc/sysrq-trigger\n")];
    config.run = Some("/run.sh".into());
    let error = boot(&config, |_| {}).unwrap().wait(Some(LIMIT)).unwrap_err();
    assert!(
        matches!(&error, BootError::Unfinished { console } if console.contains("Kernel panic")),
        "{error}"
    );
}

#[test]
fn an_option_that_qemu_refuses_is_reported_in_its_words() {
    let folder = tempfile::tempdir().unwrap();
    let (base, views) = windows(folder.path());
    let mut config = BootConfig::new(base, WINDOW, views, WINDOW);
    config.run = Some("/run.sh".into());
    config.extra_args = vec!["-device".into(), "no-such-device".into()];
    let error = boot(&config, |_| {}).unwrap().wait(Some(LIMIT)).unwrap_err();
    assert!(matches!(&error, BootError::Qemu { stderr, .. } if stderr.contains("no-such-device")), "{error}");
}
