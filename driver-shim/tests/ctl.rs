//! The control port against devices that behave well and badly.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixListener,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use common::{device, refusal, willing_device};
use lamina_shim::{Ctl, CtlError, ctl, sysfs::Tree};
use tempfile::TempDir;

fn socket() -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("ctl");
    (dir, path)
}

#[test]
fn a_refusal_carries_the_devices_words() {
    let (_dir, path) = socket();
    device(&path, |_, stream| stream.write_all(b"{\"ok\":false,\"error\":\"no such tensor\"}\n").unwrap());
    let mut ctl = Ctl::open(&path).unwrap();
    let error = ctl.create_view("w", "e9m9").unwrap_err();
    assert_eq!(error.to_string(), "the device refused \"view\": no such tensor");
    // A refusal is an answer: the connection stays in step.
    assert!(matches!(ctl.stats(), Err(CtlError::Refused { .. })));
}

#[test]
fn a_file_that_is_no_port_is_refused_and_stays_as_it_is() {
    let dir = TempDir::new().unwrap();
    let [file, pipe] = ["weights.bin", "pipe"].map(|name| dir.path().join(name));
    let bytes = vec![0x5a; 4096];
    fs::write(&file, &bytes).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    for (path, kind) in [(&file, "regular file"), (&pipe, "pipe")] {
        let error = Ctl::open(path).and_then(|mut ctl| ctl.stats()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "cannot open the control port {}: it is a {kind}, not a port or a socket",
                path.display()
            )
        );
    }
    assert!(fs::read(&file).unwrap() == bytes, "the file was written to");
}

#[test]
fn a_reply_in_pieces_is_one_reply() {
    let (_dir, path) = socket();
    device(&path, |_, stream| {
        for piece in [&b"{\"ok\""[..], b":true,\"a\":", b"[1,2]}", b"\n"] {
            stream.write_all(piece).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
    });
    assert_eq!(Ctl::open(&path).unwrap().stats().unwrap()["a"][1], 2);
}

#[test]
fn a_silent_device_is_given_up_on() {
    let (_dir, path) = socket();
    device(&path, |_, _| {});
    let mut ctl = Ctl::open(&path).unwrap();
    ctl.set_timeout(Duration::from_millis(50));
    let start = Instant::now();
    assert!(matches!(ctl.flush(None), Err(CtlError::Timeout { .. })));
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(ctl.failed());
}

#[test]
fn a_device_that_takes_no_requests_is_given_up_on() {
    let (_dir, path) = socket();
    let _listener = UnixListener::bind(&path).unwrap();
    let mut ctl = Ctl::open(&path).unwrap();
    ctl.set_timeout(Duration::from_millis(50));
    let huge = serde_json::json!({ "op": "flush", "padding": "x".repeat(4 << 20) });
    assert!(matches!(ctl.request(&huge), Err(CtlError::Timeout { .. })));
}

#[test]
fn replies_to_a_killed_program_are_not_taken_for_ones_own() {
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).unwrap();
    let device = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
        // The end of one reply, a whole one, and, when the first request is already there, one that
        // took long.
        stream.write_all(b"rue}\n{\"ok\":true,\"of\":1}\n").unwrap();
        assert_eq!(lines.next().unwrap(), "");
        let sync = lines.next().unwrap();
        thread::sleep(Duration::from_millis(30));
        stream.write_all(b"{\"ok\":false,\"error\":\"of another\"}\n").unwrap();
        stream.write_all(refusal(&sync).as_bytes()).unwrap();
        for of in ["stats", "flush"] {
            assert!(lines.next().unwrap().contains(of));
            stream.write_all(format!("{{\"ok\":true,\"of\":\"{of}\"}}\n").as_bytes()).unwrap();
        }
    });
    let mut ctl = Ctl::open(&path).unwrap();
    assert_eq!(ctl.stats().unwrap()["of"], "stats");
    assert_eq!(ctl.flush(None).unwrap()["of"], "flush");
    device.join().unwrap();
}

#[test]
fn nonsense_is_named() {
    for (reply, says) in
        [("hello\n", "hello"), ("[1]\n", "[1]"), ("{\"ok\":1}\n", "\"ok\":1"), ("\n", "no JSON object")]
    {
        let (_dir, path) = socket();
        device(&path, move |_, stream| stream.write_all(reply.as_bytes()).unwrap());
        let mut ctl = Ctl::open(&path).unwrap();
        let error = ctl.stats().unwrap_err();
        assert!(matches!(error, CtlError::Reply { .. }) && error.to_string().contains(says), "{error}");
        assert!(ctl.failed());
    }
}

#[test]
fn an_endless_reply_is_cut_off() {
    let (_dir, path) = socket();
    device(&path, |_, stream| while stream.write_all(&[b'x'; 1 << 12]).is_ok() {});
    let error = Ctl::open(&path).unwrap().stats().unwrap_err();
    assert!(matches!(error, CtlError::TooLong { bound: ctl::MAX_REPLY, .. }), "{error}");
}

#[test]
fn a_device_that_goes_away_is_noticed() {
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).unwrap();
    let mut ctl = Ctl::open(&path).unwrap();
    ctl.set_timeout(Duration::from_millis(200));
    drop(listener.accept().unwrap());
    drop(listener);
    assert!(matches!(ctl.stats(), Err(CtlError::Closed { .. })));
}

#[test]
fn a_request_is_made_again_when_the_devices_worker_was_replaced() {
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).unwrap();
    let device = thread::spawn(move || {
        let mut requests = Vec::new();
        for last in [false, true] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            assert_eq!(lines.next().unwrap(), "");
            let sync = lines.next().unwrap();
            stream.write_all(refusal(&sync).as_bytes()).unwrap();
            requests.push(lines.next().unwrap());
            if last {
                stream.write_all(b"{\"ok\":true,\"answered\":2}\n").unwrap();
            } else {
                // Killed in the middle of its answer.
                stream.write_all(b"{\"ok\":tr").unwrap();
            }
        }
        requests
    });
    let reply = Ctl::open(&path).unwrap().flush(Some((0, 4096))).unwrap();
    assert_eq!(reply["answered"], 2);
    let requests = device.join().unwrap();
    assert!(
        requests.len() == 2 && requests[0] == requests[1] && requests[0].contains("flush"),
        "{requests:?}"
    );
}

#[test]
fn a_long_request_is_made_again_too_when_the_devices_worker_dies_over_it() {
    let patience = Duration::from_secs(1);
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).unwrap();
    let device = thread::spawn(move || {
        for last in [false, false, true] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            assert_eq!(lines.next().unwrap(), "");
            let sync = lines.next().unwrap();
            stream.write_all(refusal(&sync).as_bytes()).unwrap();
            lines.next().unwrap();
            if last {
                stream.write_all(b"{\"ok\":true,\"answered\":2}\n").unwrap();
            } else {
                thread::sleep(2 * patience);
            }
        }
    });
    let mut ctl = Ctl::open(&path).unwrap();
    ctl.set_patience(patience);
    assert_eq!(ctl.flush(Some((0, 4096))).unwrap()["answered"], 2);
    device.join().unwrap();
}

#[test]
fn only_a_request_that_was_sent_says_that_it_is_made_again() {
    let (_dir, path) = socket();
    let listener = UnixListener::bind(&path).unwrap();
    let device = thread::spawn(move || {
        let mut requests = Vec::new();
        // It goes before the request comes, then behind that.
        for connection in 0..3 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            assert_eq!(lines.next().unwrap(), "");
            let sync = lines.next().unwrap();
            if connection == 0 {
                continue;
            }
            stream.write_all(refusal(&sync).as_bytes()).unwrap();
            let request: serde_json::Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
            requests.push(request["again"] == true);
            if connection == 2 {
                stream.write_all(b"{\"ok\":true}\n").unwrap();
            }
        }
        requests
    });
    Ctl::open(&path).unwrap().remove_tensor("w").unwrap();
    assert_eq!(device.join().unwrap(), [false, true]);
}

#[test]
fn the_port_is_found_by_name_with_and_without_udev() {
    let dir = TempDir::new().unwrap();
    let tree = Tree::at(dir.path(), None);
    assert!(matches!(Ctl::find(&tree), Err(CtlError::NoPort { .. })));
    for (port, name) in [("vport1p1", "org.other"), ("vport1p2", "org.lamina.ctl")] {
        let class = dir.path().join("sys/class/virtio-ports").join(port);
        fs::create_dir_all(&class).unwrap();
        fs::write(class.join("name"), format!("{name}\n")).unwrap();
    }
    fs::create_dir_all(dir.path().join("dev")).unwrap();
    let node = dir.path().join("dev/vport1p2");
    willing_device(&node);
    assert_eq!(ctl::port(&tree, ctl::CTL_PORT).unwrap(), node);
    Ctl::find(&tree).unwrap().flush(None).unwrap();

    let link = dir.path().join("dev/virtio-ports/org.lamina.ctl");
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("../vport1p2", &link).unwrap();
    assert_eq!(ctl::port(&tree, ctl::CTL_PORT).unwrap(), link);
}
