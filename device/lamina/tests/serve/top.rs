//! `lamina top`: one frame, and in a terminal a device that goes away and comes back.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Place, Run, lamina, noise, within};

#[test]
fn one_frame_shows_planes_views_and_tensors() {
    within(60, || {
        let place = Place::new();
        let model = place.checkpoint("model.w", &noise(1, 1 << 20));
        let _run = Run::start(&mut place.serve(&["--model", &model, "--views", "full,e8m3"]));
        let views = std::fs::File::open(place.path("mount/views")).unwrap();
        let reading = std::thread::spawn(move || {
            // While the frame is made, so that something is read in it.
            let begun = Instant::now();
            let mut page = [0; 4096];
            for at in (512..).map(|page: u64| page * 4096) {
                views.read_exact_at(&mut page, at.min(760 * 4096)).unwrap();
                if begun.elapsed() > Duration::from_secs(3) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let output = lamina(&["top", "--once", "--api", &place.text("run/api.sock")]).output().unwrap();
        let frame = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for said in
            ["lamina trace tree at", "up ", "stored by plane", "bf16", "█", "of plain", "full", "model.w"]
        {
            assert!(frame.contains(said), "{said}: {frame}");
        }
        assert!(frame.contains("1 of 1 tensors"), "{frame}");
        assert!(frame.contains("views reads p50 ") && frame.contains("base stores p50 "), "{frame}");
        let output = lamina(&["top", "--json", "--api", &place.text("run/api.sock")]).output().unwrap();
        let now: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&now["tensors"][0]["name"], &now["views"][0]["view"]),
            (&json!("model.w"), &json!("e8m3"))
        );
        assert!(now["seconds"].is_number() && now["tensors_gone"].is_null(), "{now}");
        reading.join().unwrap();

        let output =
            lamina(&["top", "--api", &place.text("run/api.sock")]).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("--once"), "{output:?}");
        let output = lamina(&["top", "--once", "--api", &place.text("nobody")]).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
    });
}

/// A command in a terminal.
struct Terminal {
    child: Child,
    drawn: Receiver<String>,
}

impl Terminal {
    /// None where nothing makes one.
    fn run(command: &str) -> Option<Self> {
        let script = Command::new("script").arg("--version").stdout(Stdio::null()).status();
        if !script.is_ok_and(|status| status.success()) {
            lamina_skipped::test("there is no `script` here, which makes a terminal");
            return None;
        }
        // A terminal that nobody looks at has no size.
        let command = format!("stty rows 40 columns 200; echo process $$.; exec {command}");
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--return", "--command", &command, "/dev/null"]);
        script.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        let (pieces, drawn) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = out.read(&mut bytes) {
                if pieces.send(String::from_utf8_lossy(&bytes[..length]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Some(Self { child, drawn })
    }

    /// What was drawn since the last time, until there is this in it.
    fn until(&self, what: &str) -> String {
        let (begun, mut drawn) = (Instant::now(), String::new());
        while !drawn.contains(what) {
            match self.drawn.recv_timeout(Duration::from_millis(100)) {
                Ok(more) => drawn.push_str(&more),
                Err(RecvTimeoutError::Timeout) if begun.elapsed() < Duration::from_secs(30) => {}
                Err(why) => panic!("{what} is not drawn ({why}): {drawn:?}"),
            }
        }
        drawn
    }
}

#[test]
fn a_device_that_goes_and_comes_back_is_said() {
    within(120, || {
        let place = Place::new();
        let top = format!("{} top --api {}", env!("CARGO_BIN_EXE_lamina"), place.text("run/api.sock"));
        let run = Run::start(&mut place.serve(&["--capacity", "16M", "--store-capacity", "12M"]));
        let Some(mut terminal) = Terminal::run(&top) else { return };
        terminal.until("12.00");
        drop(run);
        // Cells that stay as they are are not drawn again.
        terminal.until("asking again");
        let _run = Run::start(&mut place.serve(&["--capacity", "16M", "--store-capacity", "57M"]));
        terminal.until("57");

        terminal.child.stdin.take().unwrap().write_all(b"q").unwrap();
        assert!(terminal.child.wait().unwrap().success());
    });
}

#[test]
fn who_is_told_to_end_leaves_the_terminal_as_it_was() {
    const OTHER_SCREEN: &str = "\x1b[?1049h";
    const BACK: &str = "\x1b[?1049l";
    within(120, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "16M", "--store-capacity", "12M"]));
        let top = format!("{} top --api {}", env!("CARGO_BIN_EXE_lamina"), place.text("run/api.sock"));
        let Some(mut terminal) = Terminal::run(&top) else { return };
        let begun = terminal.until("12.00");
        assert!(begun.contains(OTHER_SCREEN) && !begun.contains(BACK), "{begun:?}");
        let process = begun.split_once("process ").unwrap().1.split_once('.').unwrap().0;
        let process = rustix::process::Pid::from_raw(process.parse().unwrap()).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
        terminal.until(BACK);
        assert!(terminal.child.wait().unwrap().success());
    });
}
