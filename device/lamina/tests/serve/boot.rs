//! `lamina boot` when it ends early: what was stored stays, and nothing else of it does. A shell
//! plays QEMU's part.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill};
use nix::unistd::Pid;

use crate::common::{Place, Run, eventually, lamina, mounted, noise, within};
use crate::stops::begin_with;

/// What QEMU's part is to do when asked for its version.
const VERSION: &str = "echo QEMU emulator version 11.1.0";

/// A boot with a guest image that no QEMU reads, a QEMU that does `version` and then `work`, and a
/// folder of its own for temporary files.
fn boot(place: &Place, version: &str, work: &str) -> Command {
    for folder in ["tmp", "guest", "bin"] {
        fs::create_dir_all(place.path(folder)).unwrap();
    }
    for file in ["release", "vmlinuz", "initramfs.img", "script"] {
        fs::write(place.path("guest").join(file), "6.12.0\n").unwrap();
    }
    let qemu = place.text("bin/qemu");
    let script = format!("#!/bin/sh\nif [ \"$1\" = --version ]; then {version}; exit; fi\n{work}\n");
    // Written by another process: what this one has open, one that another test starts has open too
    // for a moment, and then it cannot be run.
    let write = "printf %s \"$1\" >\"$0\" && chmod 700 \"$0\"";
    assert!(Command::new("sh").args(["-c", write, &qemu, &script]).status().unwrap().success());
    let mut command = lamina(&["boot", "--run-dir", &place.text("run"), "--image", &place.text("image")]);
    command.args(["--capacity", "256M", "--views-capacity", "256M", "--files", "8M", "--accel", "tcg"]);
    command.env("TMPDIR", place.path("tmp")).env("LAMINA_CACHE", place.path("cache"));
    command.env("LAMINA_QEMU", qemu).env("LAMINA_GUEST_IMAGE", place.path("guest"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn script(place: &Place, command: &mut Command) -> Child {
    command.arg("--script").arg(place.path("guest/script")).spawn().unwrap()
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

/// The same; a terminal's end is told twice, by the shell and then by the kernel.
fn signal_as_terminal(child: &Child, by: Signal) {
    signal(child, by);
    if by == Signal::SIGHUP {
        thread::sleep(Duration::from_millis(2));
        signal(child, by);
    }
}

/// What a boot says that is to fail, within some time.
fn failure(mut child: Child, limit: Duration) -> String {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > limit {
            child.kill().unwrap();
            panic!("it does not end within {limit:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

fn left(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The mount of a boot, once there is one.
fn mount(place: &Place) -> PathBuf {
    let mut found = None;
    eventually("a mount", || {
        let mounts = left(&place.path("tmp")).into_iter().map(|folder| folder.join("mount"));
        found = mounts.into_iter().find(|mount| mount.join("files").is_dir());
        found.is_some()
    });
    found.unwrap()
}

/// Makes sure that the image has this file.
fn has(place: &Place, name: &str, bytes: &[u8]) {
    let run = Run::start(&mut place.serve(&["--image", &place.text("image")]));
    assert!(fs::read(place.path("mount/files").join(name)).unwrap() == bytes, "{name} is lost");
    drop(run);
}

#[test]
fn a_boot_that_fails_or_is_ended_keeps_what_is_stored_and_leaves_nothing_else() {
    within(240, || {
        let (place, bytes) = (Place::new(), noise(8, 1 << 20));
        let mut child;
        for by in [Signal::SIGTERM, Signal::SIGHUP] {
            let mut command = boot(&place, VERSION, "exec sleep 300");
            begin_with(&mut command, Signal::SIGHUP, SigHandler::SigDfl);
            child = script(&place, &mut command);
            let files = mount(&place).join("files");
            fs::write(files.join(by.as_str()), &bytes).unwrap();
            // QEMU may not have been started yet: either way it ends.
            thread::sleep(Duration::from_secs(1));
            signal_as_terminal(&child, by);
            let said = failure(child, Duration::from_secs(60));
            assert!(said.contains(&format!("ended by {by}")) && !said.contains("SIGKILL"), "{said}");
            assert_eq!([left(&place.path("tmp")), left(&place.path("run"))].concat(), Vec::<PathBuf>::new());
            has(&place, by.as_str(), &bytes);
        }
        for (qemu, reason) in [("exit 3", "QEMU ended with exit status: 3"), ("", "before its program ended")]
        {
            child = script(&place, &mut boot(&place, VERSION, qemu));
            let said = failure(child, Duration::from_secs(60));
            assert!(said.contains(reason), "{said}");
            assert_eq!(left(&place.path("tmp")), Vec::<PathBuf>::new());
        }
        child = script(&place, boot(&place, VERSION, "").env("LAMINA_QEMU", "/nonexistent"));
        failure(child, Duration::from_secs(60));
        assert_eq!(left(&place.path("tmp")), Vec::<PathBuf>::new());
        has(&place, "SIGHUP", &bytes);
    });
}

#[test]
fn a_boot_that_is_killed_leaves_no_mount() {
    within(120, || {
        let place = Place::new();
        let mut child = script(&place, &mut boot(&place, VERSION, "exec sleep 300"));
        let mount = mount(&place);
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("no mount", || !mounted(&mount));
    });
}

#[test]
fn a_signal_ends_a_boot_that_loads_and_one_whose_qemu_says_nothing() {
    within(240, || {
        let place = Place::new();
        let model = place.checkpoint("t", &noise(9, 192 << 20));
        let started = place.path("started");
        for by in [Signal::SIGTERM, Signal::SIGHUP] {
            let mut command = boot(&place, VERSION, &format!("touch {}; exec sleep 300", started.display()));
            begin_with(&mut command, Signal::SIGHUP, SigHandler::SigDfl);
            let child = script(&place, command.args(["--model", &model]));
            eventually("a load", || place.path("run/api.sock").exists());
            signal_as_terminal(&child, by);
            let said = failure(child, Duration::from_secs(60));
            assert!(said.contains(&format!("ended by {by}")), "{said}");
            assert!(!started.exists(), "a guest was started");
            assert_eq!([left(&place.path("tmp")), left(&place.path("run"))].concat(), Vec::<PathBuf>::new());
        }

        let child = script(&place, &mut boot(&place, "exec sleep 300", ""));
        mount(&place);
        thread::sleep(Duration::from_secs(1));
        signal(&child, Signal::SIGINT);
        let said = failure(child, Duration::from_secs(15));
        assert!(said.contains("ended by SIGINT"), "{said}");
    });
}

/// A terminal: our end, and the one for a process.
fn terminal() -> (File, File) {
    let (mut ours, mut theirs) = (-1, -1);
    let (none, how, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
    // SAFETY: two numbers are written, and nothing else is asked for.
    assert_eq!(unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, how, size) }, 0);
    // SAFETY: both are open, and nobody else's.
    unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) }
}

/// Whether a terminal gives lines, and shows what is typed.
fn is_cooked(terminal: &File) -> bool {
    let mut found = std::mem::MaybeUninit::<libc::termios>::uninit();
    // SAFETY: it is filled where that succeeds.
    let found = unsafe {
        assert_eq!(libc::tcgetattr(terminal.as_raw_fd(), found.as_mut_ptr()), 0);
        found.assume_init()
    };
    found.c_lflag & (libc::ICANON | libc::ECHO) == libc::ICANON | libc::ECHO
}

#[test]
fn a_boot_with_a_shell_that_is_ended_leaves_the_terminal_as_it_was() {
    within(120, || {
        let place = Place::new();
        let (ours, theirs) = terminal();
        assert!(is_cooked(&ours));
        let mut command = boot(&place, VERSION, "stty raw -echo; exec sleep 300");
        let mut child = command.stdin(theirs.try_clone().unwrap()).spawn().unwrap();
        eventually("a raw terminal", || !is_cooked(&ours));
        signal(&child, Signal::SIGTERM);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!child.wait().unwrap().success(), "{said}");
        assert!(is_cooked(&ours), "{said}");
        drop(theirs);
    });
}
