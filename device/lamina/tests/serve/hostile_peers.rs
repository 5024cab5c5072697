//! Peers that take what they can: connections by the thousand, requests without an end, answers
//! never read, users who have no business here.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::iter;
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, answer, noise, request, within};

/// Connections made one after the other.
const MANY: usize = 2000;

/// A device with a tensor that is served on TCP too.
fn rig() -> Rig {
    let place = Place::new();
    let bytes = noise(7, 1 << 20);
    let model = place.checkpoint("t", &bytes);
    let arguments = ["--capacity", "32M", "--views-capacity", "64M", "--views", "", "--model", &model];
    let run = Run::start(place.serve(&arguments).args(["--tcp", "127.0.0.1:0"]));
    Rig { run, place, bytes }
}

fn tcp(rig: &Rig) -> TcpStream {
    let stream = TcpStream::connect(rig.run.ready["tcp"].as_str().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn unix(rig: &Rig) -> UnixStream {
    let stream = UnixStream::connect(rig.place.path("run/api.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Somebody who asks is answered. Among so many others a connection may have to give way before its
/// request has arrived; who asks again gets through.
fn answered(rig: &Rig) {
    assert!((0..10).any(|_| asks(tcp(rig))), "no answer on TCP");
    assert!((0..10).any(|_| asks(unix(rig))), "no answer on the Unix socket");
}

fn asks(mut stream: impl Read + Write) -> bool {
    let mut answer = String::new();
    let requested = stream.write_all(request("GET", "/stats", "").as_bytes());
    requested.is_ok() && stream.read_to_string(&mut answer).is_ok() && answer.starts_with("HTTP/1.1 200")
}

/// Descriptors that the device's worker has open.
fn descriptors(rig: &Rig) -> usize {
    crate::deaths::descriptors(crate::deaths::worker(rig.run.child.id()))
}

/// The largest memory that the device's worker ever had, in KiB, without what it shares.
fn anonymous_kib(rig: &Rig) -> u64 {
    let worker = crate::deaths::worker(rig.run.child.id());
    let status = std::fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn slow_and_silent_connections_keep_nobody_out() {
    within(120, || {
        let rig = rig();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            // More than there are places, on both listeners, each a byte of its header at a time;
            // those that are closed come again.
            scope.spawn(|| {
                let head = b"GET /stats HTTP/1.1\r\nX: ";
                let mut open: Vec<(TcpStream, UnixStream)> = Vec::new();
                let mut sent = 0;
                while !done.load(Ordering::Relaxed) {
                    while open.len() < 100 {
                        open.push((tcp(&rig), unix(&rig)));
                    }
                    let byte = [head.get(sent).copied().unwrap_or(b'x')];
                    open.retain_mut(|(tcp, unix)| {
                        tcp.write_all(&byte).is_ok() && unix.write_all(&byte).is_ok()
                    });
                    sent += 1;
                    thread::sleep(Duration::from_millis(50));
                }
            });
            for _ in 0..20 {
                answered(&rig);
                thread::sleep(Duration::from_millis(20));
            }
            done.store(true, Ordering::Relaxed);
        });
        answered(&rig);
    });
}

#[test]
fn peers_that_never_take_their_answers_are_dropped() {
    within(180, || {
        let rig = rig();
        let requested = request("GET", "/metrics", "").replace("Connection: close\r\n", "").repeat(2000);
        let mut deaf = Vec::new();
        for _ in 0..70 {
            let stream = unix(&rig);
            stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
            // As much as the device takes before it waits for its answers to be taken.
            let mut left = requested.as_bytes();
            while let Ok(taken) = (&stream).write(left) {
                left = &left[taken..];
                if left.is_empty() {
                    break;
                }
            }
            deaf.push(stream);
        }
        answered(&rig);
        drop(deaf);
        answered(&rig);
    });
}

#[test]
fn thousands_of_connections_come_and_go_and_leave_nothing() {
    within(180, || {
        let rig = rig();
        answered(&rig);
        let before = descriptors(&rig);
        for round in 0..MANY {
            match round % 4 {
                // Gone at once; half a request; a request whose sender is gone; a request, and its
                // answer from a half-closed connection.
                0 => drop(tcp(&rig)),
                1 => tcp(&rig).write_all(b"POST /flush HTTP/1.1\r\nHost: loc").unwrap(),
                2 => unix(&rig).write_all(request("GET", "/stats", "").as_bytes()).unwrap(),
                _ => {
                    let mut stream = tcp(&rig);
                    stream.write_all(request("GET", "/tensors", "").as_bytes()).unwrap();
                    stream.shutdown(Shutdown::Write).unwrap();
                    let mut said = String::new();
                    stream.read_to_string(&mut said).unwrap();
                    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
                }
            }
        }
        answered(&rig);
        crate::common::eventually("closed connections", || descriptors(&rig) <= before + 4);
        assert_eq!(crate::deaths::deaths(&rig), 0);
    });
}

#[test]
fn a_guest_that_floods_its_port_waits_for_its_own_answers_and_disturbs_nobody() {
    const REQUESTS: usize = 20_000;
    within(180, || {
        let rig = rig();
        let ctl = rig.run.ready["ctl"].as_str().unwrap().to_owned();
        let flood = UnixStream::connect(&ctl).unwrap();
        let mut sending = flood.try_clone().unwrap();
        let sender = thread::spawn(move || {
            let lines = ["{\"op\":\"stats\"}\n", "{\"op\":\"flush\"}\n", "{\"op\":\"nonsense\"}\n", "\n"];
            for number in 0..REQUESTS {
                sending.write_all(lines[number % 4].as_bytes()).unwrap();
            }
            // The end of a line that never ends.
            sending.write_all(&vec![b'['; 1 << 20]).unwrap();
            sending.write_all(b"\n").unwrap();
        });
        let before = anonymous_kib(&rig);
        for _ in 0..10 {
            answered(&rig);
            let mut other = BufReader::new(UnixStream::connect(&ctl).unwrap());
            other.get_mut().write_all(b"{\"op\":\"tensors\"}\n").unwrap();
            let mut line = String::new();
            other.read_line(&mut line).unwrap();
            let reported: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(reported["tensors"][0]["name"], "t");
        }
        let after = anonymous_kib(&rig);
        assert!(after < before + (64 << 10), "a flood took {before} to {after} KiB");
        // Nothing is lost: each request has its answer, in order.
        let mut answers = BufReader::new(flood);
        for number in (0..REQUESTS).filter(|number| number % 4 != 3) {
            let mut line = String::new();
            answers.read_line(&mut line).unwrap();
            let reported: Value = serde_json::from_str(&line).unwrap();
            assert_eq!(reported["ok"], json!(number % 4 != 2), "request {number}");
            assert_eq!(reported["stats"].is_object(), number % 4 == 0, "request {number}");
        }
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert!(line.contains("65536 bytes"), "{line}");
        sender.join().unwrap();
        answered(&rig);
    });
}

#[test]
fn what_a_guest_may_not_do_is_no_request_on_its_port() {
    within(60, || {
        let rig = rig();
        let mut port = BufReader::new(UnixStream::connect(rig.run.ready["ctl"].as_str().unwrap()).unwrap());
        // All that the API can do and a guest must not.
        for requested in [
            json!({ "op": "discard", "offset": 0, "length": 4096 }),
            json!({ "op": "tensor", "name": "u", "length": 2, "format": "bf16" }),
            json!({ "op": "remove", "name": "t" }),
            json!({ "op": "poison", "offset": 0, "length": 4096 }),
            json!({ "op": "inject", "offset": 0, "length": 4096 }),
            json!({ "op": "clear", "offset": 0, "length": 4096 }),
            json!({ "op": "snapshot", "path": "/etc/passwd" }),
            json!({ "op": "upgrade", "path": "/bin/sh" }),
        ] {
            writeln!(port.get_mut(), "{requested}").unwrap();
            let mut line = String::new();
            port.read_line(&mut line).unwrap();
            let reported: Value = serde_json::from_str(&line).unwrap();
            assert!(
                reported["ok"] == false && reported["error"].as_str().unwrap().contains("no request"),
                "{reported}"
            );
        }
        // HTTP is not spoken here.
        port.get_mut().write_all(request("GET", "/stats", "").as_bytes()).unwrap();
        let mut line = String::new();
        port.read_line(&mut line).unwrap();
        assert!(line.contains("no request"), "{line}");
        let tensors = rig.ask("GET", "/tensors", &Value::Null);
        assert_eq!(tensors.as_array().unwrap().len(), 1);
        assert!(rig.base().load(0, rig.bytes.len()) == rig.bytes);
    });
}

#[test]
fn the_sockets_are_their_owners_and_loopback_answers_no_other_host() {
    within(60, || {
        let rig = rig();
        for name in ["run/api.sock", "run/ctl.sock"] {
            let mode = std::fs::metadata(rig.place.path(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{name} is open to others: {mode:o}");
        }
        // Nobody reaches it by another address of this host, not even this user.
        let port = rig.run.ready["tcp"].as_str().unwrap().rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let listening: Vec<&str> =
            sockets.lines().filter(|line| line.contains(&format!(":{port:04X} 00000000:0000 0A"))).collect();
        assert_eq!(listening.len(), 1, "{listening:?}");
        assert!(listening[0].contains("0100007F:"), "{listening:?}");
        // What a page that rebound its name, or a proxy, would send.
        for host in ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", ""] {
            let requested = request("GET", "/stats", "").replace("Host: localhost", &format!("Host: {host}"));
            let (status, _, body) = answer(tcp(&rig), &requested);
            assert!((400..=403).contains(&status) && !body.contains("device"), "{host:?}: {status} {body}");
        }
        // Only what the API's table names is there.
        for path in ["/../etc/passwd", "//", "/stats/", "/debug", "/shutdown", "/files", "/%2e%2e/"] {
            let (status, _, _) = answer(tcp(&rig), &request("GET", path, ""));
            assert_eq!(status, 404, "{path}");
        }
    });
}

#[test]
fn the_holder_waits_for_nobody_who_does_not_ask_or_does_not_listen() {
    within(120, || {
        let rig = rig();
        let connect = || {
            let asker = UnixStream::connect(rig.place.path("run/holder.sock"))?;
            let timeout = Some(Duration::from_secs(60));
            asker.set_read_timeout(timeout).and_then(|()| asker.set_write_timeout(timeout))?;
            Ok::<_, io::Error>(asker)
        };
        let ask = |program: &str| {
            let mut asker = connect()?;
            let text = json!({ "Upgrade": program }).to_string();
            let length = u32::try_from(text.len()).unwrap().to_le_bytes();
            asker.write_all(&[&length, text.as_bytes()].concat())?;
            Ok::<_, io::Error>(asker)
        };
        let reported = |program: &str| {
            let mut asker = ask(program)?;
            let mut length = [0; 4];
            asker.read_exact(&mut length)?;
            let mut text = vec![0; u32::from_le_bytes(length) as usize];
            asker.read_exact(&mut text)?;
            Ok::<_, io::Error>(serde_json::from_slice::<Value>(&text).unwrap())
        };
        let _silent = connect().unwrap();
        // It is refused by its name, which is more than a socket takes that nobody reads. Who had
        // no processor for as long as the holder waits asks again.
        let name = "x".repeat(8 << 20);
        let _deaf = iter::repeat_with(|| ask(&name)).find_map(Result::ok).unwrap();
        // That one may be looked at still.
        let refusals = iter::repeat_with(|| reported("/bin/true")).filter_map(Result::ok);
        let mut refusals = refusals.map(|answer| answer["Upgraded"]["Err"].as_str().unwrap().to_owned());
        let refusal = refusals.find(|why| !why.contains("another upgrade is being made")).unwrap();
        assert!(refusal.contains("/bin/true is no lamina"), "{refusal}");
    });
}
