//! Several guests on one device, each with files and a control socket of its own.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::common::{Guest, Place, Run, Window, expected, lamina, noise, request, within};
use crate::deaths::kill_worker;
use crate::disk_driver::{DISCARD, Driver, FLUSH, IN, IOERR, OK, OUT};

/// A device for guests.
struct Rig {
    run: Run,
    place: Place,
}

impl Rig {
    fn new(more: &[&str]) -> Self {
        let place = Place::new();
        let run = Run::start(place.serve(more).args(["--views", ""]));
        Self { run, place }
    }

    fn export_of(&self, name: &str) -> &Value {
        let exports = self.run.ready["guests"].as_array().unwrap();
        exports.iter().find(|export| export["name"] == name).unwrap()
    }

    fn window(&self, name: &str, window: &str) -> Window {
        Window::open(&PathBuf::from(self.export_of(name)[window]["path"].as_str().unwrap()))
    }

    fn guest(&self, name: &str) -> Guest {
        Guest::connect(self.export_of(name)["ctl"].as_str().unwrap())
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let stream = std::os::unix::net::UnixStream::connect(self.place.path("run/api.sock")).unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, _, answer) = crate::common::answer(stream, &request(method, path, &body));
        (status, serde_json::from_str(&answer).unwrap_or(Value::String(answer)))
    }
}

fn refused(guest: &mut Guest, request: &Value) -> String {
    let answer = guest.ask(request);
    assert_eq!(answer["ok"], false, "{answer}");
    answer["error"].as_str().unwrap().to_owned()
}

#[test]
fn guests_have_what_is_theirs_and_nothing_of_each_other() {
    within(60, || {
        let place = Place::new();
        let bytes = noise(7, 70_000);
        let model = place.checkpoint("weights", &bytes);
        let alice = format!("alice=8M,views=16M,model={model}");
        let run = Run::start(&mut place.serve(&[
            "--guest",
            &alice,
            "--guest",
            "bob=4M,views=8M",
            "--views",
            "e8m3",
        ]));
        let rig = Rig { run, place };
        let mut alice = rig.guest("alice");
        let mut bob = rig.guest("bob");
        for (name, base, views) in [("alice", 8 << 20, 16 << 20), ("bob", 4 << 20, 8 << 20)] {
            let export = rig.export_of(name);
            assert_eq!((&export["kind"], &export["base"]["bytes"]), (&json!("guest"), &json!(base)));
            for (window, bytes) in [("base", base), ("views", views)] {
                let path = export[window]["path"].as_str().unwrap();
                assert!(path.ends_with(&format!("mount/guests/{name}/{window}")), "{path}");
                assert_eq!(fs::metadata(path).unwrap().len(), bytes);
            }
        }
        let mut names: Vec<_> =
            fs::read_dir(rig.place.path("mount")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["guests"], "no file shows everything");
        assert!(rig.run.ready["base"].is_null() && rig.run.ready["ctl"].is_null());
        assert_eq!(rig.ask("GET", "/guests", &Value::Null).1, rig.run.ready["guests"]);

        // Alice's, by its own name and place, and shown to her alone.
        let tensor = &alice.ask(&json!({ "op": "tensors" }))["tensors"][0];
        assert_eq!((&tensor["name"], &tensor["dpa"]), (&json!("weights"), &json!(0)));
        let view = alice.ask(&json!({ "op": "views" }))["views"][0].clone();
        assert_eq!((&view["tensor"], &view["offset"]), (&json!("weights"), &json!(2 << 20)));
        let (mut base, views) = (rig.window("alice", "base"), rig.window("alice", "views"));
        assert!(base.load(0, bytes.len()) == bytes);
        assert!(views.load(2 << 20, bytes.len()) == expected("e8m3", &bytes));
        let directory = lamina_abi::decode(&views.load(0, 2 << 20)).unwrap();
        assert_eq!((directory.base_bytes, directory.tensors[0].name.as_str()), (8 << 20, "weights"));

        for list in ["tensors", "views"] {
            assert_eq!(bob.ask(&json!({ "op": list }))[list], json!([]));
        }
        for name in ["weights", "alice/weights", "../alice/weights", "bob/../alice/weights"] {
            let said = refused(&mut bob, &json!({ "op": "view", "tensor": name, "spelling": "full" }));
            assert_eq!(said, format!("no tensor is called {name:?}"));
        }
        let (mut other, shown) = (rig.window("bob", "base"), rig.window("bob", "views"));
        assert!(other.load(0, 4 << 20).iter().all(|byte| *byte == 0));
        let directory = lamina_abi::decode(&shown.load(0, 2 << 20)).unwrap();
        assert_eq!((directory.generation, directory.tensors.len()), (1, 0));
        assert!(shown.load(2 << 20, 6 << 20).iter().all(|byte| *byte == 0));
        for op in ["flush", "invalidate"] {
            let said = refused(&mut bob, &json!({ "op": op, "offset": 4 << 20, "length": 1 }));
            assert!(said.ends_with("the base window, which has 4194304 bytes"), "{said}");
        }

        // Stores at one place of both windows are two stores.
        base.store(100, b"alice's");
        other.store(100, b"bob's");
        assert_eq!(bob.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        assert_eq!(alice.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        assert_eq!((base.load(100, 7), other.load(100, 5)), (b"alice's".to_vec(), b"bob's".to_vec()));
        let mut stored = bytes.clone();
        stored[100..107].copy_from_slice(b"alice's");
        assert!(views.load(2 << 20, bytes.len()) == expected("e8m3", &stored));

        // Each is told its own counters; the operator everything, under the partitions' names.
        let reported = bob.ask(&json!({ "op": "stats" }));
        assert!(
            !reported.to_string().contains("alice") && !reported.to_string().contains("weights"),
            "{reported}"
        );
        assert_eq!(reported["stats"]["capacity_bytes"], 4 << 20);
        assert_eq!(reported["stats"]["writes"]["blocks_written"], 1);
        let reported = alice.ask(&json!({ "op": "stats" }));
        assert_eq!(reported["stats"]["tensors"][0]["name"], "weights");
        let stats = rig.ask("GET", "/stats", &Value::Null).1;
        assert_eq!(stats["tensors"][0]["name"], "alice/weights");
        let stored = |at: usize| stats["partitions"][at]["stored_bytes"].as_u64().unwrap();
        assert!(stored(0) > 0 && stored(1) > 0);
        assert_eq!(stats["device"]["stored_bytes"], stored(0) + stored(1));
        let metrics = rig.ask("GET", "/metrics", &Value::Null).1;
        let line = format!("lamina_partition_stored_bytes{{partition=\"bob\"}} {}", stored(1));
        assert!(metrics.as_str().unwrap().contains(&line), "{metrics}");
        let table = lamina(&["stats", "--api", &rig.place.text("run/api.sock")]).output().unwrap();
        assert!(String::from_utf8(table.stdout).unwrap().contains("bob"));
    });
}

#[test]
fn a_guests_disks_show_its_own_part_and_end_where_it_ends() {
    within(120, || {
        let place = Place::new();
        let bytes = noise(8, 64 << 10);
        let model = place.checkpoint("weights", &bytes);
        let disks = place.path("disks");
        // Others' parts lie before and behind it.
        let bob = format!("bob=4M,views=8M,model={model},disks={}", disks.display());
        let serve = ["--guest", "alice=4M,views=8M", "--guest", &bob, "--guest", "carol=4M,views=8M"];
        let run = Run::start(place.serve(&serve).args(["--views", "e8m3"]));
        let rig = Rig { run, place };
        let reported = rig.run.ready["disks"].as_array().unwrap();
        assert!(reported.len() == 2 && reported.iter().all(|disk| disk["guest"] == "bob"), "{reported:?}");
        assert_eq!(reported[0]["bytes"], 4 << 20);
        let partition = &reported[1]["partitions"][1];
        assert_eq!(partition["name"], "weights:e8m3");

        let (mut base, mut views) =
            (Driver::connect(&disks.join("base.sock")), Driver::connect(&disks.join("views.sock")));
        let shown = |views: &mut Driver| views.read(partition["offset"].as_u64().unwrap(), bytes.len());
        assert!(base.read(0, bytes.len()) == bytes);
        assert!(shown(&mut views) == expected("e8m3", &bytes));
        let end = (4 << 20) / 512;
        for (kind, sector, out, room) in
            [(IN, end, vec![], 512), (OUT, end, vec![1; 512], 0), (IN, end - 1, vec![], 1024)]
        {
            assert_eq!(base.request(kind, sector, &out, room).0, IOERR);
        }

        // Its files and its disks are the same bytes, and nobody else's change.
        let new = noise(9, bytes.len());
        base.write(0, &new);
        base.write((4 << 20) - 512, &[3; 512]);
        assert_eq!(base.request(FLUSH, 0, &[], 0).0, OK);
        assert!(rig.window("bob", "base").load(0, new.len()) == new);
        assert!(shown(&mut views) == expected("e8m3", &new));
        rig.window("bob", "base").store(1 << 20, b"by its file");
        assert_eq!(&base.read(1 << 20, 512)[..11], b"by its file");
        for name in ["alice", "carol"] {
            assert!(rig.window(name, "base").load(0, 4 << 20).iter().all(|byte| *byte == 0), "{name}");
        }
        let discard =
            [&0_u64.to_le_bytes()[..], &u32::try_from(end).unwrap().to_le_bytes(), &[0; 4]].concat();
        rig.window("carol", "base").store(0, b"carol's");
        assert_eq!(base.request(DISCARD, 0, &discard, 0).0, OK);
        assert!(base.read(0, 1 << 20).iter().all(|byte| *byte == 0));
        assert_eq!(rig.window("carol", "base").load(0, 7), b"carol's");
    });
}

#[test]
fn what_the_operator_does_for_one_guest_shows_at_that_one() {
    within(60, || {
        let rig = Rig::new(&[
            "--guest",
            "a=4M,views=8M",
            "--guest",
            "b=4M,views=8M",
            "--shared",
            "4M",
            "--views-capacity",
            "8M",
        ]);
        let directory = |window: &Window| lamina_abi::decode(&window.load(0, 2 << 20)).unwrap();
        let windows = ["a", "b"].map(|name| rig.window(name, "views"));
        let shared = Window::open(&rig.place.path("mount/views"));
        let before = windows.each_ref().map(directory);
        let tensor = json!({ "name": "b/t", "length": 8192, "format": "bf16" });
        let (status, made) = rig.ask("POST", "/tensors", &tensor);
        assert_eq!((status, &made["dpa"]), (201, &json!(4 << 20)));
        rig.ask("POST", "/views", &json!({ "tensor": "b/t", "spelling": "full" }));
        assert_eq!(directory(&windows[0]), before[0]);
        assert_eq!(directory(&windows[1]).view("t", "full").unwrap().offset, 2 << 20);
        let mut base = rig.window("b", "base");
        base.store(0, &noise(1, 8192));
        // The fence and the discard of the whole device reach every guest's pages.
        assert_eq!(rig.ask("POST", "/flush", &json!({})).0, 200);
        assert!(windows[1].load(2 << 20, 8192) == noise(1, 8192));
        let discard = json!({ "offset": (4 << 20) + 4096, "length": 4096 });
        assert_eq!(rig.ask("POST", "/discard", &discard).0, 200);
        assert!(base.load(0, 8192) == [noise(1, 8192)[..4096].to_vec(), vec![0; 4096]].concat());
        assert_eq!(
            rig.ask("POST", "/tensors", &json!({ "name": "t", "length": 2, "format": "bf16" })).0,
            422
        );
        assert_eq!(rig.ask("DELETE", "/tensors/b/t", &json!({})).0, 204);
        assert!(directory(&windows[1]).tensors.is_empty());
        // What is shared is at the root, and is nobody's else.
        assert_eq!(rig.run.ready["base"]["bytes"], 4 << 20);
        rig.ask("POST", "/tensors", &json!({ "name": "shared/s", "length": 64, "format": "int8" }));
        assert!(directory(&shared).tensor("s").is_some());
        let mut root = Guest::connect(rig.run.ready["ctl"].as_str().unwrap());
        assert_eq!(root.ask(&json!({ "op": "tensors" }))["tensors"][0]["name"], "s");
    });
}

#[test]
fn a_guest_beyond_its_quota_is_told_and_the_others_never_notice() {
    within(60, || {
        let rig = Rig::new(&[
            "--guest",
            "small=4M,views=8M,quota=64K",
            "--guest",
            "other=4M,views=8M",
            "--full-wait",
            "0",
        ]);
        let (mut small, mut other) = (rig.window("small", "base"), rig.window("other", "base"));
        let mut guest = rig.guest("small");
        small.store(0, &noise(1, 15 * 4096));
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        small.store(1 << 20, &noise(2, 64 << 10));
        let said = refused(&mut guest, &json!({ "op": "flush" }));
        assert!(said.contains("No space left"), "{said}");
        let stats = guest.ask(&json!({ "op": "stats" }))["stats"].clone();
        assert!(stats["quota_refusals"].as_u64().unwrap() > 0, "{stats}");
        assert!(stats["stored_bytes"].as_u64().unwrap() <= 64 << 10);
        assert_eq!(stats["quota_bytes"], 64 << 10);
        let written = small.file_write_error(2 << 20, &noise(3, 4096));
        assert_eq!(written, Some(libc::ENOSPC));
        other.store(0, &noise(4, 1 << 20));
        assert_eq!(rig.guest("other").ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        assert!(other.load(0, 1 << 20) == noise(4, 1 << 20));
        // With less stored there is room again.
        let (status, _) = rig.ask("POST", "/discard", &json!({ "offset": 0, "length": 4 << 20 }));
        assert_eq!(status, 200);
        small.store(0, &noise(5, 8192));
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        assert!(small.load(0, 8192) == noise(5, 8192));
    });
}

#[test]
fn guests_keep_what_is_theirs_when_the_worker_dies() {
    within(60, || {
        let rig = Rig::new(&["--guest", "a=4M,views=8M,quota=1M", "--guest", "b=4M,views=8M"]);
        let mut windows = ["a", "b"].map(|name| rig.window(name, "base"));
        rig.ask("POST", "/tensors", &json!({ "name": "a/t", "length": 8192, "format": "bf16" }));
        for (seed, window) in (1..).zip(&mut windows) {
            window.store(0, &noise(seed, 8192));
        }
        for _ in 0..3 {
            kill_worker(&rig.run);
            for (seed, (name, window)) in (1..).zip(["a", "b"].into_iter().zip(&windows)) {
                assert_eq!(rig.guest(name).ask(&json!({ "op": "flush" })), json!({ "ok": true }));
                assert!(window.load(0, 8192) == noise(seed, 8192));
            }
        }
        assert_eq!(rig.guest("a").ask(&json!({ "op": "tensors" }))["tensors"][0]["name"], "t");
        assert_eq!(rig.guest("b").ask(&json!({ "op": "tensors" }))["tensors"], json!([]));
        let stats = rig.guest("a").ask(&json!({ "op": "stats" }))["stats"].clone();
        assert_eq!((&stats["quota_bytes"], &stats["name"]), (&json!(1 << 20), &json!("a")));
    });
}

#[test]
fn a_guest_whose_monitor_somebody_has_is_not_booted_again() {
    within(60, || {
        let rig = Rig::new(&["--guest", "a=256M,views=256M"]);
        let (run, socket) = (rig.place.text("run"), rig.place.path("run/qmp-a.sock"));
        let monitor = UnixListener::bind(&socket).unwrap();
        let output = lamina(&["boot", "--guest", "a", "--run-dir", &run]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("a is booted already"), "{said}");
        drop(monitor);
    });
}

#[test]
fn a_guest_that_is_not_there_cannot_be_booted() {
    within(60, || {
        let rig = Rig::new(&["--guest", "a=4M,views=8M", "--guest", "b=4M,views=8M"]);
        let run = rig.place.text("run");
        let output = lamina(&["boot", "--guest", "c", "--run-dir", &run]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("no guest or host \"c\"; it has: a, b"), "{said}");
        let output = lamina(&["guests", "--api", &rig.place.text("run/api.sock")]).output().unwrap();
        let table = String::from_utf8(output.stdout).unwrap();
        assert!(table.contains("guests/a/base") && table.contains("ctl-b.sock"), "{table}");
    });
}
