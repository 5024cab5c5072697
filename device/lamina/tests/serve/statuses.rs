//! What the program ends with, `lamina doctor`, completions and manual pages.

use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Place, Run, lamina, within};

fn status(words: &[&str]) -> i32 {
    let Output { status, stderr, .. } = lamina(words).output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(!said.contains("panicked"), "{words:?}: {said}");
    assert!(status.success() || !said.is_empty(), "{words:?} says nothing");
    status.code().unwrap()
}

#[test]
fn failures_of_each_kind_end_with_a_status_of_their_own() {
    within(120, || {
        let place = Place::new();
        let api = place.text("run/api.sock");
        let nobody = place.text("nobody.sock");
        let broken = place.text("broken.toml");
        fs::write(&broken, "[device]\nx = 1\n").unwrap();
        // Somebody answers who is no device.
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap().to_string();
        let answering = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut stream, _) = other.accept().unwrap();
            let _ = stream.read(&mut [0; 1024]);
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").unwrap();
        });
        let run = Run::start(&mut place.serve(&["--capacity", "16M"]));
        let (missing, run_dir) = (place.text("missing"), place.text("run"));
        let statuses: &[(i32, &[&str])] = &[
            (0, &["stats", "--api", &api]),
            (0, &["--help"]),
            (1, &["mount", &place.text("a"), &place.text("a/b")]),
            (1, &["boot", "--base", &broken, "--views-file", &broken]),
            (2, &["serve"]),
            (2, &["no-such-command"]),
            (2, &["completions", "tcsh"]),
            (2, &["boot", "--base", &broken, "--views-file", &missing, "--image", &missing]),
            (2, &["boot", "--topology", &broken]),
            (2, &["boot", "--topology", &broken, "--cpus", "1"]),
            (3, &["stats", "--api", &nobody]),
            (3, &["tensors", "--api", "127.0.0.1:1"]),
            (3, &["stats", "--api", &address]),
            (3, &["upgrade", "--run-dir", &missing]),
            (3, &["snapshot", "save", &place.text("snapshot"), "--run-dir", &missing]),
            (3, &["ls", &missing]),
            (3, &["umount", &missing]),
            (4, &["tensor", "rm", "nobody", "--api", &api]),
            (4, &["view", "add", "nobody", "full", "--api", &api]),
            (4, &["flush", "--offset", "1T", "--api", &api]),
            (4, &["upgrade", &missing, "--run-dir", &run_dir]),
            (5, &["boot", "--topology", &missing]),
            (5, &["analyze", &missing]),
            (5, &["snapshot", "restore", &missing, &place.text("image")]),
            (5, &["man", "--out", &format!("{api}/below-a-socket")]),
        ];
        for (wanted, words) in statuses {
            assert_eq!(status(words), *wanted, "{words:?}");
        }
        answering.join().unwrap();
        drop(run);
        // A snapshot that nobody took leaves no file.
        assert!(!place.path("snapshot").exists());
    });
}

#[test]
fn the_help_names_every_status() {
    let output = lamina(&["--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for said in ["Exit statuses:", "   3  no device answers there", " 141  ", "lamina doctor", "Examples:"] {
        assert!(help.contains(said), "{said}: {help}");
    }
}

#[test]
fn the_doctor_says_what_is_there_and_ends_by_the_worst_of_it() {
    within(60, || {
        let output = lamina(&["doctor", "--json"]).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let wanted = match report["verdict"].as_str().unwrap() {
            "ok" => 0,
            "limited" => 6,
            "missing" => 7,
            other => panic!("{other}"),
        };
        assert_eq!(output.status.code(), Some(wanted), "{report}");
        let findings = report["findings"].as_array().unwrap();
        for what in ["FUSE", "kernel", "rights", "QEMU", "KVM", "processor", "memory", "descriptors"] {
            let found = findings.iter().find(|finding| finding["what"] == what);
            let found = found.unwrap_or_else(|| panic!("{what}: {report}"));
            assert!(["ok", "limited", "missing"].contains(&found["verdict"].as_str().unwrap()), "{found}");
            assert!(!found["found"].as_str().unwrap().is_empty(), "{found}");
            assert!(!found["means"].as_str().unwrap().is_empty(), "{found}");
        }

        // Where nothing is, that is said, with the command.
        let place = Place::new();
        fs::create_dir(place.path("open")).unwrap();
        fs::set_permissions(place.path("open"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let mut command = lamina(&["doctor"]);
        // `lamina` below it is what the sockets would be in.
        fs::rename(place.path("open"), place.path("lamina")).unwrap();
        command
            .env("XDG_RUNTIME_DIR", place.path(""))
            .env("PATH", "")
            .env("LAMINA_CACHE", place.path("cache"));
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(7), "{said}");
        for part in ["chmod go-w", "mmdebstrap", "no qemu-system-x86_64 in PATH", "What mends it:"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    });
}

#[test]
fn completions_and_manual_pages_are_whole() {
    within(60, || {
        for (shell, mark) in
            [("bash", "complete -F"), ("zsh", "#compdef lamina"), ("fish", "complete -c lamina")]
        {
            let output = lamina(&["completions", shell]).output().unwrap();
            let script = String::from_utf8(output.stdout).unwrap();
            assert!(script.contains(mark) && script.contains("memory-reserve"), "{shell}");
            if shell == "bash" && Command::new("bash").arg("--version").stdout(Stdio::null()).status().is_ok()
            {
                // It is longer than an argument may be.
                let file = tempfile::NamedTempFile::new().unwrap();
                fs::write(file.path(), &script).unwrap();
                assert!(Command::new("bash").arg("-n").arg(file.path()).status().unwrap().success());
            }
        }
        let place = Place::new();
        let pages = place.text("man");
        assert!(lamina(&["man", "--out", &pages]).status().unwrap().success());
        for page in ["lamina.1", "lamina-serve.1", "lamina-tensor-add.1", "lamina-doctor.1"] {
            let text = fs::read_to_string(place.path("man").join(page)).unwrap();
            assert!(text.contains(".TH") && text.contains(".SH NAME"), "{page}");
        }
        let output = lamina(&["man"]).output().unwrap();
        assert!(String::from_utf8(output.stdout).unwrap().contains("Exit statuses:"));
    });
}

#[test]
fn help_and_completions_are_there_at_once() {
    within(60, || {
        for words in [&["--help"][..], &["completions", "bash"], &["completions", "zsh"]] {
            let took = |_| {
                let begun = Instant::now();
                assert!(lamina(words).stdout(Stdio::null()).status().unwrap().success());
                begun.elapsed()
            };
            // The quickest, for other tests run beside it. It is not optimised; what asks or waits
            // for something takes longer than a person fails to notice.
            let least = (0..20).map(took).min().unwrap();
            assert!(least < Duration::from_millis(50), "{words:?} takes {least:?}");
        }
    });
}
