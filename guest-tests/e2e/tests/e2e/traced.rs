//! Traces of booted guests: what a device is asked while one works, and the lines that one touches.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use lamina_guest::{Event, Plan};
use lamina_qemu::{Qemu, version::OLDEST};
use lamina_run::{
    bundled,
    daemon::{Daemon, Serve},
    programs,
    visit::Visit,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The tensor that is loaded: 64 KiB.
const TENSOR: &str = "tok_embeddings.weight";
const LINES: u64 = 1024;

/// What `lamina` prints as JSON.
fn json(words: &[&str]) -> Value {
    let output = Command::new(programs::lamina().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What a design does with a trace.
fn replayed(trace: &str) -> impl Fn(&str, &str) -> u64 {
    let compared = json(&["compare", trace, "--dram", "none", "--json"]);
    move |design, field| {
        let designs = compared["designs"].as_array().unwrap();
        designs.iter().find(|found| found["name"] == design).unwrap()[field].as_u64().unwrap()
    }
}

#[test]
fn a_trace_of_a_booted_guest_moves_the_bytes_that_were_counted() {
    let folder = tempfile::tempdir().unwrap();
    let device = Daemon::start_observed(&Serve {
        models: bundled().unwrap(),
        views: ["full", "e8m3", "fp8_e4m3fn"].map(str::to_owned).to_vec(),
        kv: Vec::new(),
        mode: "trace".to_owned(),
        codec: "tree".to_owned(),
        capacity: None,
        read_ahead_kb: 4,
        devices: None,
    })
    .unwrap();
    let counted = |field: &str| {
        let stats = device.stats().unwrap();
        let of = |window: &str| stats.pointer(&format!("/requests/{window}/{field}")).unwrap().as_u64();
        of("base").unwrap() + of("views").unwrap()
    };
    let fields = ["stored_bytes_fetched", "plain_bytes_fetched", "gcomp_bytes_fetched"];
    let before = fields.map(counted);
    let trace = folder.path().join("work.trace").display().to_string();
    let mut recorder = Command::new(programs::lamina().unwrap())
        .args(["trace", "record", &trace, "--json", "--api"])
        .arg(&device.ready.api)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(recorder.stderr.take().unwrap());
    let mut line = String::new();
    log.read_line(&mut line).unwrap();
    assert!(line.contains("recording"), "{line}");
    let visit = Visit {
        plan: Plan { tensors: Some(vec![TENSOR.to_owned()]), ..Plan::default() },
        files: Vec::new(),
        limit: Duration::from_secs(300),
        console: folder.path().join("console.log"),
        cpus: 2,
    };
    let mut reads = 0;
    visit
        .make(&device.ready, |event, _| {
            reads += u32::from(matches!(event, Event::View { .. }));
            Ok(())
        })
        .unwrap();
    kill_process(Pid::from_child(&recorder), Signal::INT).unwrap();
    recorder.stderr = Some(log.into_inner());
    let output = recorder.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&said["lost"], &said["ended"]), (&0.into(), &true.into()), "{said}");
    let after = fields.map(counted);
    assert!(reads >= 4 && after[0] > before[0] && after[1] > before[1], "{reads} {before:?} {after:?}");
    let of = replayed(&trace);
    assert_eq!(of("trace", "read_bytes"), after[0] - before[0]);
    assert_eq!(of("plain", "read_bytes"), after[1] - before[1]);
    assert_eq!((of("gcomp-lz4", "read_bytes"), of("gcomp-lz4", "assumed")), (after[2] - before[2], 0));
    device.stop().unwrap();
}

/// Boots a guest that loads the tensor, and records the lines.
fn lines(folder: &Path, loads: &str) -> String {
    let (script, trace) = (folder.join("loads.sh"), folder.join("lines.trace"));
    // The windows are looked for five times a second.
    let text = format!("lamina-shim up && sleep 2 && lamina-loads {TENSOR} base --once {loads}\n");
    std::fs::write(&script, text).unwrap();
    let put = format!("{}=/bin/lamina-loads", programs::guest("lamina-loads").unwrap().display());
    let output = Command::new(programs::lamina().unwrap())
        .args(["boot", "--put", &put, "--lines-cache", "4K", "--model"])
        .arg(&bundled().unwrap()[0])
        .arg("--run-dir")
        .arg(folder.join("run"))
        .arg("--script")
        .arg(&script)
        .arg("--record-lines")
        .arg(&trace)
        .output()
        .unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{why}", String::from_utf8_lossy(&output.stdout));
    assert!(why.contains("behind a modelled cache of 4.00 KiB a processor; 0 lost"), "{why}");
    trace.display().to_string()
}

#[test]
fn single_lines_at_random_are_worse_by_planes_and_whole_tensors_better() {
    let qemu = Qemu::find(OLDEST, true).unwrap();
    if !qemu.has_plugins().unwrap() {
        return lamina_skipped::test("this QEMU takes no plug-ins");
    }
    let [random, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let random = lines(random.path(), "--random 4000");
    let shown = json(&["trace", "show", &random, "--json"]);
    assert_eq!((&shown["seen"], &shown["lost"]), (&"lines".into(), &0.into()));
    let reads = shown["reads"].as_u64().unwrap();
    // Of 1024 lines the cache holds 64, and the guest's own loads are a few.
    assert!((3500..5000).contains(&reads), "{reads}");
    let of = replayed(&random);
    let (plain, trace) = (of("plain", "read_bytes"), of("trace", "read_bytes"));
    assert!(trace > 5 * plain, "{trace} bytes by planes, {plain} as words");
    // Layouts are the device's own.
    assert_eq!(of("trace", "assumed"), 0);
    let whole = lines(whole.path(), "");
    let of = replayed(&whole);
    let (plain, trace) = (of("plain", "read_bytes"), of("trace", "read_bytes"));
    assert!(plain >= 64 * LINES && trace < plain, "{trace} bytes by planes, {plain} as words");
    assert_eq!(of("trace", "assumed"), 0);
}

#[test]
fn a_guest_with_more_processors_than_lines_are_recorded_of_is_refused() {
    let qemu = Qemu::find(OLDEST, true).unwrap();
    if !qemu.has_plugins().unwrap() {
        return lamina_skipped::test("this QEMU takes no plug-ins");
    }
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("nothing.sh");
    std::fs::write(&script, "true\n").unwrap();
    let output = Command::new(programs::lamina().unwrap())
        .args(["boot", "--cpus", "2", "--capacity", "256M", "--run-dir"])
        .arg(folder.path().join("run"))
        .arg("--script")
        .arg(&script)
        .arg("--record-lines")
        .arg(folder.path().join("lines.trace"))
        .args(["--", "-smp", "4"])
        .output()
        .unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    let says = "lines are recorded of 2 processors, and the guest may have 4: give --cpus 4";
    assert!(!output.status.success() && why.contains(says), "{}\n{why}", output.status);
}
