//! A device from one file, as systemd starts it, and the files for that.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;

use crate::common::{Place, Run, lamina, within};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[test]
fn one_file_is_a_daemon_that_says_when_it_is_ready_and_comes_back_with_its_image() {
    within(120, || {
        let place = Place::new();
        let text = fs::read_to_string(root().join("docs/lamina.toml")).unwrap();
        let text = text.replace("/run/lamina/mount", "mount").replace("/run/lamina", "run");
        let text =
            text.replace("/var/lib/lamina/", "").replace("\"4G\"", "\"64M\"").replace("\"3G\"", "\"48M\"");
        fs::write(place.path("lamina.toml"), text).unwrap();
        let notified = UnixDatagram::bind(place.path("notify")).unwrap();
        notified.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let file = place.text("lamina.toml");
        let serve = || {
            let mut command = lamina(&["serve", "--json", "--topology", &file]);
            command.env("NOTIFY_SOCKET", place.path("notify"));
            command
        };
        let api = place.text("run/api.sock");
        let run = Run::start(&mut serve());
        let mut said = [0; 64];
        let length = notified.recv(&mut said).unwrap();
        assert_eq!(&said[..length], b"READY=1");
        assert_eq!(run.ready["base"]["path"], json!(place.path("mount/base")));
        assert_eq!(run.ready["base"]["bytes"], 64 << 20);
        let add = ["tensor", "add", "w", "--length", "1M", "--format", "bf16", "--api", &api];
        assert!(lamina(&add).stdout(Stdio::null()).status().unwrap().success());
        // A worker that is started anew has the options, whatever became of the file.
        fs::write(&file, "[device]\nno-such-key = 1\n").unwrap();
        assert!(
            lamina(&["upgrade", "--run-dir", &place.text("run")])
                .stdout(Stdio::null())
                .status()
                .unwrap()
                .success()
        );
        run.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(run.end().success());
        // As the unit says, a wrong file is not tried again.
        assert_eq!(serve().stderr(Stdio::null()).status().unwrap().code(), Some(2));
        assert!(place.path("device.image").exists());
    });
}

#[test]
fn systemd_takes_the_unit() {
    let unit = fs::read_to_string(root().join("docs/lamina.service")).unwrap();
    assert!(unit.contains("ExecStart=/usr/bin/lamina serve --topology /etc/lamina/lamina.toml\n"));
    let place = Place::new();
    let path = place.path("lamina.service");
    fs::write(&path, unit.replace("/usr/bin/lamina", env!("CARGO_BIN_EXE_lamina"))).unwrap();
    let mut command = Command::new("systemd-analyze");
    // Other units of the host, and manual pages, are not ours to judge.
    let checked = command.args(["verify", "--man=no", "--recursive-errors=no"]).arg(&path).output();
    let Ok(checked) = checked else { return lamina_skipped::test("there is no systemd-analyze here") };
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && !said.contains("lamina.service"), "{said}");
}

#[test]
fn the_container_copies_what_was_built() {
    let file = fs::read_to_string(root().join("images/Containerfile")).unwrap();
    let stages: Vec<_> = file.lines().filter_map(|line| line.strip_prefix("FROM ")).collect();
    assert_eq!(stages.len(), 2, "{stages:?}");
    assert!(stages[0].ends_with(" AS build"));
    for line in file.lines().filter_map(|line| line.strip_prefix("COPY --from=build ")) {
        let (from, to) = line.split_once(' ').unwrap();
        assert!(file.contains(&format!("{from} ")) && to.starts_with("/usr/"), "{line}");
        assert!(file.matches(from).count() > 1, "nobody makes {from}");
    }
    // What it runs is there.
    for words in [&["doctor", "--help"][..], &["man", "--help"], &["completions", "bash"]] {
        assert!(lamina(words).stdout(Stdio::null()).status().unwrap().success(), "{words:?}");
    }
}
