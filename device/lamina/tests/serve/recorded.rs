//! `lamina trace record`: what a mount is asked becomes a trace, whose bytes are the counters'.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{Rig, eventually, lamina, within};

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
        std::thread::sleep(Duration::from_millis(800));
        rig.run.signal(Signal::SIGTERM);
        let output = recorded.wait_with_output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["ended"], false);
        let shown = json(&["trace", "show", &trace, "--json"]);
        assert_eq!(shown["bytes"], 1 << 20);
    });
}

/// A device that is asked for a trace sends this much of one, refuses to end it, and goes on if it
/// `stands` still.
fn refusing(socket: &std::path::Path, trace: Vec<u8>, stands: bool) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let (mut asked, _) = listener.accept().unwrap();
        let mut head = BufReader::new(asked.try_clone().unwrap()).lines();
        while !head.next().unwrap().unwrap().is_empty() {}
        asked.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").unwrap();
        asked.write_all(&trace).unwrap();
        let (mut ends, _) = listener.accept().unwrap();
        if stands {
            std::thread::sleep(Duration::from_secs(60));
        }
        let why = r#"{"error":"no trace is being recorded"}"#;
        write!(ends, "HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{why}", why.len()).unwrap();
    });
}

/// A recording of `rig` with something in it, as it comes from the device.
fn something(rig: &Rig, path: &str) -> Vec<u8> {
    let recorded = record(rig, path, &[]);
    rig.base().load(0, 1 << 20);
    interrupt(&recorded);
    assert!(done(recorded)["requests"].as_u64() > Some(0));
    std::fs::read(path).unwrap()
}

/// Whether a trace that is not ended has requests in it, by what is said of it.
fn holds_some(cut: &str) -> bool {
    let shown = lamina(&["trace", "show", cut]).output().unwrap();
    let why = String::from_utf8_lossy(&shown.stderr).into_owned();
    why.contains("before it are whole") && !why.contains(" 0 requests")
}

#[test]
fn a_recording_is_kept_however_it_ends() {
    within(120, || {
        let rig = Rig::new("auto");
        let [whole, refused, stuck, full, killed] =
            ["whole", "refused", "stuck", "full", "killed"].map(|name| rig.place.text(name));
        let trace = something(&rig, &whole);
        let at = |socket: &std::path::Path, out: &str| {
            let mut recorder = lamina(&["trace", "record", out, "--json", "--api", socket.to_str().unwrap()]);
            let mut child = recorder.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
            assert!(line.contains("recording"), "{line}");
            child
        };
        // Somebody else has ended it; a device that stands still, and who is interrupted twice.
        for (out, stands) in [(&refused, false), (&stuck, true)] {
            let socket = rig.place.path(&format!("{out}.sock"));
            refusing(&socket, trace.clone(), stands);
            let recorder = at(&socket, out);
            std::thread::sleep(Duration::from_millis(500));
            interrupt(&recorder);
            if stands {
                std::thread::sleep(Duration::from_millis(500));
                interrupt(&recorder);
            }
            recorder.wait_with_output().unwrap();
            assert!(std::fs::read(out).unwrap() == trace, "{out}");
        }
        // A file that cannot become longer.
        let api = rig.place.text("run/api.sock");
        let limited = format!(
            "trap '' XFSZ; ulimit -f 2; exec {} trace record {full} --api {api}",
            env!("CARGO_BIN_EXE_lamina")
        );
        let mut child = Command::new("bash").args(["-c", &limited]).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(log.next().unwrap().contains("recording"));
        // What is sent in one piece is in the file whole or not at all.
        rig.base().load(2 << 20, 64 << 10);
        eventually("a first request is in the file", || holds_some(&full));
        rig.views().load(rig.view("e8m3").offset, 2 << 20);
        let said: Vec<_> = log.collect();
        assert!(!child.wait().unwrap().success());
        assert!(said.concat().contains("what came before is in it; --cut reads it"), "{said:?}");
        // A recorder that is killed, of a device that has nothing more to say.
        let mut recorder = record(&rig, &killed, &[]);
        rig.base().load(1 << 20, 1 << 20);
        // It is sent a moment later.
        eventually("something is recorded", || {
            std::fs::metadata(&killed).is_ok_and(|file| file.len() > 1000)
        });
        recorder.kill().unwrap();
        recorder.wait().unwrap();
        assert!(holds_some(&full) && holds_some(&killed));
        let begun = Instant::now();
        let next = rig.place.text("next");
        loop {
            let second = lamina(&["trace", "record", &next, "--for", "0.1", "--api", &api]).output().unwrap();
            if second.status.success() {
                break;
            }
            let why = String::from_utf8_lossy(&second.stderr).into_owned();
            assert!(why.contains("DELETE /trace ends it"), "{why}");
            assert!(begun.elapsed() < Duration::from_secs(30), "{why}");
            std::thread::sleep(Duration::from_millis(200));
        }
    });
}
