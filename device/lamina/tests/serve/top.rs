//! `lamina top`: one frame, and in a terminal a device that goes away and comes back.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

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
        reading.join().unwrap();

        let output =
            lamina(&["top", "--api", &place.text("run/api.sock")]).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("--once"), "{output:?}");
        let output = lamina(&["top", "--once", "--api", &place.text("nobody")]).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
    });
}

#[test]
fn a_device_that_goes_and_comes_back_is_said() {
    let script = Command::new("script").arg("--version").stdout(Stdio::null()).status();
    if !script.is_ok_and(|status| status.success()) {
        return lamina_skipped::test("there is no `script` here, which makes a terminal");
    }
    within(120, || {
        let place = Place::new();
        let run = Run::start(&mut place.serve(&["--capacity", "16M", "--store-capacity", "12M"]));
        let top = format!("{} top --api {}", env!("CARGO_BIN_EXE_lamina"), place.text("run/api.sock"));
        // A terminal that nobody looks at has no size.
        let top = format!("stty rows 40 columns 200; {top}");
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--return", "--command", &top, "/dev/null"]);
        script.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        let (pieces, seen) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = out.read(&mut bytes) {
                if pieces.send(String::from_utf8_lossy(&bytes[..length]).into_owned()).is_err() {
                    return;
                }
            }
        });
        // What was drawn since the last time.
        let until = |what: &str| {
            let (begun, mut drawn) = (Instant::now(), String::new());
            while !drawn.contains(what) {
                match seen.recv_timeout(Duration::from_millis(100)) {
                    Ok(more) => drawn.push_str(&more),
                    Err(RecvTimeoutError::Timeout) if begun.elapsed() < Duration::from_secs(30) => {}
                    Err(why) => panic!("{what} is not drawn ({why}): {drawn:?}"),
                }
            }
        };
        until("12.00");
        drop(run);
        // Cells that stay as they are are not drawn again.
        until("asking again");
        let _run = Run::start(&mut place.serve(&["--capacity", "16M", "--store-capacity", "57M"]));
        until("57");

        child.stdin.take().unwrap().write_all(b"q").unwrap();
        assert!(child.wait().unwrap().success());
    });
}
