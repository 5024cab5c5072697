//! The `lamina` program: what it serves, what it refuses, and what a killed one leaves behind.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::common::{Place, Run, Window, expected, lamina, mounted, noise, within};
use crate::deaths::worker;
use crate::stops::begin_with;

fn refused(place: &Place, more: &[&str]) -> String {
    failure(&mut place.serve(more))
}

/// What a client command says.
fn client(place: &Place, arguments: &[&str]) -> Value {
    let output = lamina(arguments).args(["--json", "--api", &place.text("run/api.sock")]).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn failure(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success() && stdout.is_empty(), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn a_reader_that_goes_ends_a_command_quietly_and_a_full_disk_is_said() {
    within(120, || {
        let place = Place::new();
        let model = place.checkpoint("w", &noise(1, 100_000));
        let mut run = Run::start(&mut place.serve(&["--model", &model, "--views", "full"]));
        let api = place.text("run/api.sock");
        let of_device = [
            vec!["stats"],
            vec!["stats", "--json"],
            vec!["tensors"],
            vec!["views"],
            vec!["guests"],
            vec!["disks"],
            vec!["events", "--json"],
            vec!["poison", "list"],
            vec!["view", "list", "--json"],
            vec!["flush", "--json"],
        ];
        let of_device = of_device.map(|words| [words, vec!["--api", &api]].concat());
        let others = [
            vec!["--help"],
            vec!["serve", "--help"],
            vec!["--version"],
            vec!["analyze", &model],
            vec!["doctor"],
            vec!["doctor", "--json"],
            vec!["completions", "bash"],
            vec!["man"],
        ];
        for words in of_device.iter().chain(&others) {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let output = lamina(words).stdout(writer).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            // As a shell says of one that SIGPIPE ended. What is read is told on standard error
            // while it is.
            assert_eq!(output.status.code(), Some(141), "{words:?}");
            assert!(said.lines().all(|line| line.starts_with("read ")), "{words:?}: {said}");

            let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            let output = lamina(words).stdout(full).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(5), "{words:?}: {said}");
            let wanted = "lamina: cannot write to standard output: No space left on device (os error 28)\n";
            let said: Vec<_> = said.lines().filter(|line| !line.starts_with("read ")).collect();
            assert_eq!(said, [wanted.trim_end()], "{words:?}");
        }
        // What is served ends like any other that fails: nothing stays behind.
        run.signal(Signal::SIGTERM);
        let log = run.log();
        assert!(run.end().success(), "{log}");
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = place.serve(&[]).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(5) && said.contains("No space left on device"), "{said}");
        assert!(!mounted(&place.path("mount")) && !place.path("mount").exists());
    });
}

#[test]
fn a_checkpoint_is_served_listed_and_flushed_and_nothing_stays_behind() {
    within(120, || {
        let place = Place::new();
        let bytes = noise(1, 100_000);
        let model = place.checkpoint("w", &bytes);
        let run = Run::start(&mut place.serve(&[
            "--model",
            &model,
            "--views",
            "full,e8m3,e5m10",
            "--tcp",
            "127.0.0.1:0",
        ]));
        assert_eq!(run.ready["base"]["bytes"], 256 << 20);
        assert_eq!((&run.ready["tensors"], &run.ready["view_count"]), (&json!(1), &json!(2)));
        assert_eq!(run.ready["skipped"][0]["view"], "e5m10");
        assert!(run.ready["tcp"].as_str().unwrap().starts_with("127.0.0.1:"));

        let mut base = Window::open(&place.path("mount/base"));
        let views = Window::open(&place.path("mount/views"));
        let made = client(&place, &["view", "add", "w", "e8m2+g2"]);
        let list = client(&place, &["views"]);
        assert_eq!(list.as_array().unwrap().len(), 3);
        assert_eq!(client(&place, &["tensors"])[0]["length"], 100_000);
        for view in list.as_array().unwrap() {
            let spelling = view["view"].as_str().unwrap();
            assert!(
                views.load(view["offset"].as_u64().unwrap(), 100_000) == expected(spelling, &bytes),
                "{spelling}"
            );
        }
        let changed = noise(2, 50_000);
        base.store(0, &changed);
        client(&place, &["flush", "--length", "50000"]);
        let at = made["offset"].as_u64().unwrap();
        assert!(views.load(at, 50_000) == expected("e8m2+g2", &changed));
        assert!(client(&place, &["stats"])["writes"]["base_writes"].as_u64().unwrap() > 0);
        for table in ["stats", "tensors", "views"] {
            let output = lamina(&[table, "--api", &place.text("run/api.sock")]).output().unwrap();
            assert!(
                output.status.success() && String::from_utf8_lossy(&output.stdout).contains('w'),
                "{table}"
            );
        }
        let output = lamina(&["stats", "--api", &place.text("run/api.sock")]).output().unwrap();
        let output = String::from_utf8_lossy(&output.stdout);
        for said in
            ["compared with gcomp by lz4", "not a 64-byte load", "read:", "of plain with index", "fills:"]
        {
            assert!(output.contains(said), "{said}: {output}");
        }

        drop((base, views));
        run.signal(Signal::SIGTERM);
        let status = run.end();
        assert!(status.success(), "{status}");
        assert!(!mounted(&place.path("mount")) && !place.path("mount").exists());
        assert_eq!(fs::read_dir(place.path("run")).unwrap().count(), 0, "no sockets");
    });
}

#[test]
fn what_a_killed_run_leaves_is_cleared_by_the_next() {
    within(120, || {
        let place = Place::new();
        let run = Run::start(&mut place.serve(&["--capacity", "16M"]));
        let mut base = Window::open(&place.path("mount/base"));
        base.store(0, &noise(1, 100_000));
        // A worker that hears of the holder's end unmounts.
        let worker = Pid::from_raw(worker(run.child.id()));
        kill(worker, Signal::SIGSTOP).unwrap();
        run.signal(Signal::SIGKILL);
        kill(worker, Signal::SIGKILL).unwrap();
        assert_eq!(run.end().signal(), Some(9));
        assert!(mounted(&place.path("mount")) && place.path("run/api.sock").exists(), "something is left");

        let mut next = Run::start(&mut place.serve(&["--capacity", "16M"]));
        assert_eq!(Window::open(&place.path("mount/base")).load(0, 4), [0; 4]);
        client(&place, &["stats"]);
        next.signal(Signal::SIGINT);
        let log = next.log();
        assert!(log.contains("clearing the mount that a killed run left"), "{log}");
        assert!(next.end().success());
        drop(base);
    });
}

/// Killed while view reads wait for base pages to be written back, over and over.
#[test]
fn a_run_killed_under_load_dies_and_is_cleared() {
    within(180, || {
        let place = Place::new();
        let model = place.checkpoint("w", &noise(1, 8 << 20));
        for round in 0..4 {
            let run = Run::start(&mut place.serve(&["--model", &model, "--views", "full"]));
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                for thread in 0..4_u64 {
                    let place = &place;
                    scope.spawn(move || {
                        let base = fs::OpenOptions::new().write(true).open(place.path("mount/base")).unwrap();
                        let views = fs::File::open(place.path("mount/views")).unwrap();
                        let mut bytes = noise(thread, 4096);
                        // By read and write: a load from a dead mount would be a SIGBUS. Ends with
                        // the mount.
                        for at in (0..).map(|step: u64| (step * 7 + thread) % 2000 * 4096) {
                            let read = views.read_exact_at(&mut bytes, (2 << 20) + at);
                            if read.is_err() || base.write_all_at(&bytes, at).is_err() {
                                return;
                            }
                        }
                    });
                }
                let (window, stopping) = (Window::open(&place.path("mount/base")), &stop);
                let storing = scope.spawn(move || {
                    let mut base = window;
                    for page in (0..2000).cycle().take_while(|_| !stopping.load(Ordering::Relaxed)) {
                        base.store(page * 4096, &[1]);
                    }
                    base
                });
                thread::sleep(Duration::from_millis(300 + 50 * round));
                // No more stores, but what was stored is still dirty when the run is killed.
                stop.store(true, Ordering::Relaxed);
                let base = storing.join().unwrap();
                run.signal(Signal::SIGKILL);
                drop(base);
            });
            assert_eq!(run.end().signal(), Some(9), "round {round}");
        }
        let run = Run::start(&mut place.serve(&["--model", &model]));
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
    });
}

#[test]
fn a_second_run_on_the_same_mount_or_sockets_is_refused_by_name() {
    within(60, || {
        let place = Place::new();
        let run = Run::start(&mut place.serve(&["--capacity", "16M"]));
        let why = refused(&place, &["--capacity", "16M"]);
        assert!(why.contains("api.sock") && why.contains("--run-dir"), "{why}");
        let mut other = lamina(&[
            "serve",
            "--capacity",
            "16M",
            "--mount",
            &place.text("mount"),
            "--run-dir",
            &place.text("run2"),
        ]);
        let refused = failure(&mut other);
        assert!(
            refused.contains("mounted already") && refused.contains(&run.child.id().to_string()),
            "{refused}"
        );
        client(&place, &["stats"]);
    });
}

#[test]
fn a_device_that_ends_leaves_the_sockets_of_another_in_the_place_of_its_own() {
    within(60, || {
        let place = Place::new();
        let first = Run::start(&mut place.serve(&["--capacity", "16M"]));
        fs::remove_dir_all(place.path("run")).unwrap();
        let (mount, run) = (place.text("mount2"), place.text("run"));
        let words = ["serve", "--json", "--capacity", "16M", "--mount", &mount, "--run-dir", &run];
        let second = Run::start(&mut lamina(&words));
        let sockets = || fs::read_dir(place.path("run")).unwrap().count();
        let made = sockets();
        first.signal(Signal::SIGTERM);
        assert!(first.end().success());
        assert_eq!(sockets(), made);
        client(&place, &["stats"]);
        second.signal(Signal::SIGTERM);
        assert!(second.end().success());
        assert_eq!(sockets(), 0);
    });
}

#[test]
fn an_image_larger_than_files_may_be_is_said() {
    within(60, || {
        let place = Place::new();
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -f 1000 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_lamina"), "serve"]);
        command.args(["--mount", &place.text("mount"), "--run-dir", &place.text("run")]);
        command.args(["--capacity", "256M", "--image", &place.text("image")]);
        begin_with(&mut command, Signal::SIGXFSZ, SigHandler::SigDfl);
        let Output { status, stderr, .. } = command.output().unwrap();
        let said = String::from_utf8_lossy(&stderr);
        assert_eq!(status.code(), Some(5), "{status}: {said}");
        let wanted = format!("cannot use the image {}: File too large", place.text("image"));
        assert!(said.contains(&wanted), "{said}");
    });
}

#[test]
fn bad_arguments_are_refused_with_the_reason() {
    within(120, || {
        let place = Place::new();
        fs::create_dir(place.path("full")).unwrap();
        fs::write(place.path("full/precious"), "x").unwrap();
        fs::write(place.path("broken"), "not a checkpoint").unwrap();
        let large = place.checkpoint("w", &noise(1, 100_000));
        let cases: [(&[&str], &str); 12] = [
            (&["--capacity", "12"], "4096"),
            (&["--capacity", "1Q"], "no size"),
            (&["--capacity", "16M", "--views-capacity", "1M"], "2 MiB"),
            (&["--mode", "fast"], "trace, gcomp and plain"),
            (&["--codec", "gzip"], "lz4, zstd and tree"),
            (&["--model", "/nonexistent/model"], "/nonexistent/model"),
            (&["--model", &place.text("broken")], "broken"),
            (&["--model", &large, "--capacity", "64K"], "--capacity"),
            (&["--model", &large, "--views", "e9m9"], "e9m9"),
            (&["--model", &large, "--kv", "x"], "PATTERN=CHANNELS"),
            (&["--capacity", "16M", "--tcp", "0.0.0.0:0"], "loopback"),
            (&["--capacity", "16M", "--threads", "0"], "1 to 64"),
        ];
        for (arguments, word) in cases {
            let why = refused(&place, arguments);
            assert!(why.contains(word), "{arguments:?}: {why}");
            assert!(!mounted(&place.path("mount")) && !place.path("mount").exists(), "{arguments:?}");
        }
        let mut onto = lamina(&[
            "serve",
            "--capacity",
            "16M",
            "--mount",
            &place.text("full"),
            "--run-dir",
            &place.text("run"),
        ]);
        let refused = failure(&mut onto);
        assert!(refused.contains("precious"), "{refused}");
        let refused = failure(&mut lamina(&["stats", "--api", &place.text("nobody")]));
        assert!(refused.contains("nobody") && refused.contains("lamina serve"), "{refused}");
    });
}

#[test]
fn a_large_device_starts_at_once_and_small() {
    within(60, || {
        let place = Place::new();
        let started = Instant::now();
        let run = Run::start(&mut place.serve(&["--capacity", "64G"]));
        let seconds = started.elapsed().as_secs_f64();
        let status = fs::read_to_string(format!("/proc/{}/status", run.child.id())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim();
        let kib: u64 = resident.trim_end_matches(" kB").parse().unwrap();
        assert!(seconds < 1.0, "{seconds} s");
        assert!(kib < 100 << 10, "{kib} KiB");
        let mut base = Window::open(&place.path("mount/base"));
        base.store((64 << 30) - 4, b"last");
        assert_eq!(base.read((64 << 30) - 4, 4), b"last");
        client(&place, &["flush"]);
        drop(base);
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
    });
}
