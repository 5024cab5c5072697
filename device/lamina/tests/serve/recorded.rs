//! `lamina trace record`: what a mount is asked becomes a trace, whose bytes are the counters'.

use std::io::{BufRead, BufReader};
use std::process::{Child, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{Rig, lamina, within};

/// Begins to record, and returns when the device does.
fn record(rig: &Rig, out: &str, more: &[&str]) -> Child {
    let api = rig.place.text("run/api.sock");
    let words = [&["trace", "record", out, "--api", &api, "--json"], more].concat();
    let mut child = lamina(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    log.read_line(&mut line).unwrap();
    assert!(line.contains("recording"), "{line}");
    child.stderr = Some(log.into_inner());
    child
}

fn interrupt(child: &Child) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
}

fn done(child: Child) -> Value {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn json(words: &[&str]) -> Value {
    let output: Output = lamina(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What the device counted of this field, for reads.
fn counted(rig: &Rig, field: &str) -> u64 {
    let requests = rig.requests();
    ["base", "views"].map(|window| requests[window][field].as_u64().unwrap()).iter().sum()
}

#[test]
fn a_trace_of_a_mount_moves_the_bytes_that_were_counted() {
    within(120, || {
        let rig = Rig::new("auto");
        let views = ["e8m3", "e8m0", "fp8_e4m3fn"].map(|spelling| rig.view(spelling));
        let fields = ["stored_bytes_fetched", "plain_bytes_fetched", "gcomp_bytes_fetched"];
        let before = fields.map(|field| counted(&rig, field));
        let trace = rig.place.text("work.trace");
        let recorded = record(&rig, &trace, &[]);
        for view in &views {
            rig.views().load(view.offset, usize::try_from(view.length).unwrap());
        }
        rig.base().load(0, 1 << 20);
        interrupt(&recorded);
        let said = done(recorded);
        assert_eq!((&said["lost"], &said["ended"]), (&0.into(), &true.into()), "{said}");
        let after = fields.map(|field| counted(&rig, field));
        let compared = json(&["compare", &trace, "--dram", "none", "--json"]);
        let read = |name: &str| {
            let designs = compared["designs"].as_array().unwrap();
            designs.iter().find(|design| design["name"] == name).unwrap()["read_bytes"].as_u64().unwrap()
        };
        assert!(after[0] > before[0] && after[1] > before[1]);
        assert_eq!(read("trace"), after[0] - before[0]);
        assert_eq!(read("plain"), after[1] - before[1]);
        // The tensors' codec is the tree's, so a generic device has LZ4, and nobody measured ZSTD.
        assert_eq!(read("gcomp-lz4"), after[2] - before[2]);
        let output = lamina(&["compare", &trace]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line =
            |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        assert!(line("gcomp-lz4: ").ends_with(" blocks measured, 0 assumed"), "{text}");
        let zstd = line("gcomp-zstd: ");
        assert!(zstd.contains("assumed: a ratio of 1.259 (bf16 weights"), "{text}");
        // The tensor is noise.
        assert!(zstd.contains("sizes of 0 blocks measured") && zstd.contains("taken as they are"), "{text}");
        assert!(line("What plain-rows and plain differ in is placement").ends_with("alone."), "{text}");
        for histogram in [" blocks by cycles ", " requests by ns "] {
            assert!(line(histogram).contains("gcomp-zstd"), "{text}");
        }
        // Lines of words are all of one time.
        assert!(
            text.lines().any(|line| line.trim_start().starts_with("71 ") && line.contains("██████████")),
            "{text}"
        );
        let shown = json(&["trace", "show", &trace, "--json"]);
        assert_eq!(shown["reads"], said["requests"]);
        let names: Vec<_> =
            shown["views"].as_array().unwrap().iter().map(|view| view["view"]["name"].as_str()).collect();
        for name in ["e8m3", "e8m0", "fp8_e4m3fn", "full"] {
            assert!(names.contains(&Some(name)), "{names:?}");
        }
        // Others get its lines, and time is modelled on it.
        let theirs = rig.place.text("theirs.txt");
        json(&["trace", "convert", &trace, &theirs, "--to", "ramulator2", "--design", "trace", "--json"]);
        let lines = std::fs::read_to_string(theirs).unwrap().lines().count() as u64;
        let entries = compared["designs"][3]["index_bytes"].as_u64().unwrap();
        assert_eq!(64 * lines, read("trace") + entries);
        let replayed = json(&["trace", "replay", &trace, "--design", "trace", "--json"]);
        assert!(replayed["designs"][0]["dram"]["latency_ns"]["p99"].as_u64() > Some(0));
    });
}

#[test]
fn a_recording_ends_by_itself_and_a_cut_one_says_what_is_whole() {
    within(120, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let [much, long, cut] = ["much", "long", "cut"].map(|name| rig.place.text(name));
        let recorded = record(&rig, &much, &["--requests", "100"]);
        // One at a time.
        let api = rig.place.text("run/api.sock");
        let second = lamina(&["trace", "record", &long, "--api", &api]).output().unwrap();
        assert!(String::from_utf8_lossy(&second.stderr).contains("one at a time"), "{second:?}");
        assert!(!std::path::Path::new(&long).exists());
        rig.views().load(view.offset, 2 << 20);
        assert_eq!(done(recorded)["requests"], 100);
        assert_eq!(json(&["trace", "show", &much, "--json"])["reads"], 100);
        // What is there is not written over.
        let again = lamina(&["trace", "record", &much, "--api", &api]).output().unwrap();
        assert!(String::from_utf8_lossy(&again.stderr).contains("cannot make"), "{again:?}");
        // A time, in which nothing happens.
        assert_eq!(done(record(&rig, &long, &["--for", "0.3"]))["requests"], 0);
        assert_eq!(json(&["trace", "show", &long, "--json"])["reads"], 0);
        let whole = std::fs::read(&much).unwrap();
        std::fs::write(&cut, &whole[..whole.len() - 17]).unwrap();
        let refused = lamina(&["trace", "show", &cut]).output().unwrap();
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && why.contains("100 requests and"), "{why}");
        assert!(why.contains("before it are whole"), "{why}");
    });
}

#[test]
fn a_trace_of_a_device_that_goes_away_opens() {
    within(120, || {
        let rig = Rig::new("auto");
        let trace = rig.place.text("work.trace");
        let recorded = record(&rig, &trace, &[]);
        rig.base().load(0, 1 << 20);
        // It is sent a moment later.
        std::thread::sleep(std::time::Duration::from_millis(800));
        rig.run.signal(Signal::SIGTERM);
        let output = recorded.wait_with_output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["ended"], false);
        let shown = json(&["trace", "show", &trace, "--json"]);
        assert_eq!(shown["bytes"], 1 << 20);
    });
}
