//! Ctrl-C during the main job, or a terminal that is closed: nothing of it is left.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use lamina_run::programs;
use rustix::process::{Pid, Signal, kill_process};

/// How long things may take.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn an_interrupted_job_leaves_nothing_behind() {
    interrupted(&[Signal::INT]);
    // The shell's, and the kernel's.
    interrupted(&[Signal::HUP, Signal::HUP]);
}

/// Sends these to a job that boots a guest.
fn interrupted(signals: &[Signal]) {
    let folder = tempfile::tempdir().unwrap();
    // Who starts the tests may have them ignored.
    let mut job = Command::new("env");
    job.arg("--default-signal=HUP,INT").arg(programs::host("lamina-run").unwrap());
    job.env("TMPDIR", folder.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut job = job.spawn().unwrap();
    // QEMU has begun, or is about to.
    let begun = Instant::now();
    while !entries(folder.path()).iter().any(|name| name.starts_with("lamina-guest-")) {
        assert!(
            job.try_wait().unwrap().is_none() && begun.elapsed() < LIMIT,
            "the job does not boot a guest"
        );
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_secs(1));
    for signal in signals {
        kill_process(Pid::from_child(&job), *signal).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
    let output = job.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted; the device and the guest have ended"), "{said}");
    assert_eq!(entries(folder.path()), Vec::<String>::new(), "{said}");
}

fn entries(folder: &Path) -> Vec<String> {
    let all = fs::read_dir(folder).unwrap();
    all.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}
