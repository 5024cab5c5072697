//! Poison as the host and its guests meet it: a pattern in the windows, and a list.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, lamina, within};
use crate::deaths::kill_worker;

#[test]
fn poison_shows_in_cached_pages_and_views_and_a_store_of_the_block_clears_it() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let (mut base, views) = (rig.base(), rig.views());
        // In the page cache, and mapped.
        assert!(base.load(4096, 4096) == rig.bytes[4096..8192]);
        let shown = rig.expected("e8m3");
        assert!(views.load(view.offset + 4096, 4096) == shown[4096..8192]);
        let api = rig.place.text("run/api.sock");
        let done = lamina(&["poison", "inject", "0x1000", "--api", &api]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(base.load(4096, 4096).iter().all(|byte| *byte == 0xff));
        assert!(base.load(8192, 4096) == rig.bytes[8192..12288], "only the block");
        assert!(views.load(view.offset + 4096, 4096) == [0xf0, 0xff].repeat(2048));
        let listed = rig.ask("GET", "/poison", &Value::Null);
        assert_eq!(listed.as_array().unwrap().len(), 1);
        assert_eq!(
            (&listed[0]["dpa"], &listed[0]["tensor"], &listed[0]["cause"]),
            (&json!(4096), &json!("t"), &json!("injected"))
        );
        let table = lamina(&["poison", "list", "--api", &api]).output().unwrap();
        assert!(String::from_utf8_lossy(&table.stdout).contains("0x1000"));
        // The host's cache writes back whole pages: the block is whole again.
        base.store(4096, &rig.bytes[4096..8192]);
        rig.flush(4096, 4096);
        assert!(views.load(view.offset + 4096, 4096) == shown[4096..8192]);
        assert_eq!(rig.ask("GET", "/poison", &Value::Null), json!([]));
        let stats = rig.requests();
        assert_eq!((&stats["poison_events"], &stats["poisoned_blocks"]), (&json!(1), &json!(0)));
    });
}

/// A monitor as QEMU's, for as long as this process lives: the DPAs that it is told of.
pub(crate) fn monitor(socket: &Path) -> mpsc::Receiver<u64> {
    let (reported, dpas) = mpsc::channel();
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // Who is told may die at any time.
            if writeln!(stream, "{}", json!({ "QMP": {} })).is_err() {
                continue;
            }
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let Ok(line) = line else { break };
                // A line may break off.
                let Ok(command) = serde_json::from_str::<Value>(&line) else { break };
                if command["execute"] == "cxl-inject-poison"
                    && reported.send(command["arguments"]["start"].as_u64().unwrap()).is_err()
                {
                    return;
                }
                if writeln!(stream, "{}", json!({ "return": {} })).is_err() {
                    break;
                }
            }
        }
    });
    dpas
}

#[test]
fn a_monitor_in_the_run_dir_is_told_of_each_poisoning_once_whichever_worker_tells() {
    within(60, || {
        let rig = Rig::new("auto");
        let inject = |dpa: u64| rig.ask("POST", "/poison/inject", &json!({ "offset": dpa, "length": 4096 }));
        let dpas = monitor(&rig.place.path("run").join("qmp.sock"));
        let next = || dpas.recv_timeout(Duration::from_secs(50)).unwrap();
        inject(0);
        inject(4096);
        assert_eq!([next(), next()], [0, 4096]);
        // When the second was told, the holder knew of the first.
        kill_worker(&rig.run);
        inject(8192);
        let first = next();
        let last = if first == 4096 { next() } else { first };
        assert_eq!(last, 8192);
    });
}

#[test]
fn a_monitor_that_waits_for_the_device_is_told_of_what_its_image_has_poisoned() {
    within(60, || {
        let place = Place::new();
        let image = place.text("image");
        let serve = || Run::start(&mut place.serve(&["--capacity", "256M", "--image", &image]));
        let run = serve();
        let api = place.text("run/api.sock");
        assert!(lamina(&["poison", "inject", "0x1000", "--api", &api]).status().unwrap().success());
        drop(run);
        let dpas = monitor(&place.path("run").join("qmp.sock"));
        let run = serve();
        assert_eq!(dpas.recv_timeout(Duration::from_secs(50)), Ok(4096));
        drop(run);
    });
}

#[test]
fn cleared_poison_is_zeros_and_bad_ranges_are_refused() {
    within(60, || {
        let rig = Rig::new("auto");
        let range = |offset: u64| json!({ "offset": offset, "length": 4096 });
        rig.ask("POST", "/poison/inject", &range(0));
        rig.ask("POST", "/poison/clear", &range(0));
        assert_eq!(rig.base().load(0, 4096), [0; 4096]);
        let (status, body) = rig.try_ask("POST", "/poison/inject", &range(32 << 20));
        assert!(status == 422 && body["error"].as_str().unwrap().contains("pass"), "{status} {body}");
    });
}
