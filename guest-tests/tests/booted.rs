//! Booted guests on real devices: the main job in each mode, a guest that misbehaves, live counters, and a script through
//! `lamina boot`.
//!
//! These need what `./x` sets up: the guest's programs and image, a QEMU, FUSE.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Command,
    time::Duration,
};

use lamina_guest_tests::{
    bundled,
    daemon::Serve,
    job::{Job, Step},
    judge::Judge,
    programs,
    report::Report,
};

fn models() -> Vec<PathBuf> {
    bundled().expect("start the tests through ./x test")
}

fn run(job: &Job) -> Report {
    job.run(|_| {}).unwrap()
}

fn job(mode: &str, codec: &str, views: &[&str], models: Vec<PathBuf>, folder: &tempfile::TempDir) -> Job {
    Job {
        serve: Serve {
            models,
            views: views.iter().map(|&view| view.to_owned()).collect(),
            mode: mode.to_owned(),
            codec: codec.to_owned(),
            capacity: None,
            read_ahead_kb: 4,
        },
        write: None,
        hostile: false,
        limit: Duration::from_secs(300),
        console: folder.path().join("console.log"),
    }
}

fn right(report: &Report, views: usize) {
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!(report.views.len(), views);
    assert!(report.views.iter().all(|view| view.matches));
    assert!(report.guest.boot_seconds > 0.0);
    let written = report.written.as_ref().expect("a tensor was written");
    assert!(written.matches && !written.views.is_empty());
    assert!(
        report.tensors.iter().all(|tensor| tensor.base_sha256.is_some()),
        "every tensor was read through the base window"
    );
}

#[test]
fn a_guest_reads_every_view_right_and_misbehaving_hurts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let views = ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn", "e5m11", "int4"];
    let mut job = job("trace", "lz4", &views, models(), &folder);
    job.hostile = true;
    job.write = Some("layers.2.seq.3.k".to_owned());
    let report = run(&job);
    let tensors = report.tensors.len();
    right(&report, tensors * 4);
    assert_eq!(report.written.as_ref().unwrap().tensor, "layers.2.seq.3.k");
    // bf16 has no 11 mantissa bits and is no int8.
    assert_eq!(report.skipped.len(), tensors * 2);
    assert!(report.skipped.iter().any(|skipped| skipped.view == "e5m11" && skipped.why.contains("mantissa")));
    let stored = |spelling: &str| -> u64 {
        report.views.iter().filter(|view| view.view == spelling).map(|view| view.stored_bytes_fetched).sum()
    };
    assert!(stored("e8m3") < stored("full"), "a view fetches less than everything");
    assert!(report.device.stored_bytes < report.device.logical_bytes);
}

#[test]
fn the_counters_are_live_on_both_sockets_while_a_guest_runs() {
    let folder = tempfile::tempdir().unwrap();
    let job = job("trace", "zstd", &["full"], models()[..1].to_vec(), &folder);
    let (mut address, mut live, mut socket) = (None, Vec::new(), None);
    let report = job
        .run(|step| match step {
            Step::Serving(ready) => {
                address = Some(ready.tcp);
                socket = Some(ready.api.clone());
            }
            Step::Reading { number, .. } if number % 20 == 0 => {
                live.push(get(TcpStream::connect(address.unwrap()).unwrap(), "/stats"));
                live.push(get(UnixStream::connect(socket.as_ref().unwrap()).unwrap(), "/metrics"));
            }
            _ => {}
        })
        .unwrap();
    right(&report, report.tensors.len());
    assert!(live.len() >= 4);
    let reads = |text: &String| {
        let (_, rest) = text.split_once("\"views\":{\"reads\":").expect("counters of views");
        rest.split(',').next().unwrap().parse::<u64>().unwrap()
    };
    let (first, last) = (reads(&live[0]), reads(&live[live.len() - 2]));
    assert!(last > first, "{first} reads at first, {last} at last");
    assert!(live.last().unwrap().trim_end().ends_with("# EOF"), "OpenMetrics text");
}

/// The body of an answer.
fn get(mut stream: impl Read + Write, path: &str) -> String {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body.to_owned()
}

#[test]
fn lamina_boot_runs_a_script_in_a_guest_and_passes_its_status_on() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.sh");
    let text =
        "#!/bin/sh\nlamina-shim up && lamina-shim sum tok_embeddings.weight e8m3 && cat /note && exit 7\n";
    std::fs::write(&script, text).unwrap();
    let note = folder.path().join("note");
    std::fs::write(&note, "put here by the test\n").unwrap();
    let output = Command::new(programs::lamina().unwrap())
        .args(["boot", "--views", "e8m3", "--put", &format!("{}=/note", note.display())])
        .arg("--model")
        .arg(&models()[0])
        .arg("--run-dir")
        .arg(folder.path().join("run"))
        .arg("--script")
        .arg(&script)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let why = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}\n{why}");
    let want = Judge::new(&models()).unwrap().sha256("tok_embeddings.weight", "e8m3", 0).unwrap();
    assert!(said.contains(&want), "{said}");
    assert!(said.contains("put here by the test"), "{said}");
}

#[test]
fn the_baselines_give_a_guest_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let weights = models()[..1].to_vec();
    for mode in ["plain", "gcomp"] {
        let report = run(&job(mode, "lz4", &["full", "e8m3", "fp8_e5m2"], weights.clone(), &folder));
        right(&report, report.tensors.len() * 3);
        assert_eq!(report.device.mode, mode);
        let fetched: u64 = report.views.iter().map(|view| view.stored_bytes_fetched).sum();
        let plain: u64 = report.views.iter().map(|view| view.plain_bytes_fetched).sum();
        if mode == "plain" {
            assert_eq!(fetched, plain);
        }
        assert!(report.views.iter().all(|view| view.planes_fetched == 0), "words have no planes");
    }
}

#[test]
fn a_view_that_differs_from_the_reference_fails_the_run() {
    // The judge reads another model than the device: everything the guest loads must then be found wrong.
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&models()[0]).unwrap();
    std::fs::write(&model, &bytes).unwrap();
    let job = job("trace", "lz4", &["e8m3"], vec![model.clone()], &folder);
    let mut changed = false;
    let report = job
        .run(|step| {
            // Once the device has loaded it, a bit of the last tensor's last element changes in the file.
            if matches!(step, Step::Doing("booting the guest")) {
                let last = bytes.len() - 1;
                bytes[last] ^= 0x40;
                std::fs::write(&model, &bytes).unwrap();
                changed = true;
            }
        })
        .unwrap();
    assert!(changed);
    assert!(!report.good());
    let wrong = report.views.iter().filter(|view| !view.matches).count();
    assert_eq!(wrong, 1, "{:?}", report.problems);
}
