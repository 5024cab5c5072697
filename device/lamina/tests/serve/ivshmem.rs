//! Mailboxes, from the side of a QEMU and its guest.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lamina_abi::mailbox::{
    ANSWER_AT, ANSWER_LENGTH_AT, ANSWER_NUMBER_AT, ANSWER_TOTAL_AT, DEVICE_PEER, GUEST_PEER, MAILBOX_MAGIC,
    REQUEST_AT, REQUEST_BYTES, REQUEST_FROM_AT, REQUEST_LENGTH_AT, REQUEST_NUMBER_AT,
};
use nix::sys::signal::Signal;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

use crate::common::{Rig, eventually, within};
use crate::deaths::kill_worker;

/// A QEMU that has been told everything, with the hands of its guest.
struct Guest {
    stream: UnixStream,
    memory: File,
    bell: File,
    rung: File,
    number: u64,
}

/// A message of an ivshmem server.
fn message(stream: &UnixStream) -> (i64, Option<OwnedFd>) {
    let mut bytes = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(stream.as_fd(), &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(received.bytes, 8);
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    (i64::from_le_bytes(bytes), descriptor)
}

impl Guest {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let next = |number: i64, with: bool| {
            let (found, descriptor) = message(&stream);
            assert_eq!((found, descriptor.is_some()), (number, with));
            descriptor.map(File::from)
        };
        next(0, false);
        next(GUEST_PEER.into(), false);
        let memory = next(-1, true).unwrap();
        let bell = next(DEVICE_PEER.into(), true).unwrap();
        let rung = next(GUEST_PEER.into(), true).unwrap();
        let mut magic = [0; 8];
        memory.read_exact_at(&mut magic, 0).unwrap();
        assert_eq!(magic, MAILBOX_MAGIC);
        Self { stream, memory, bell, rung, number: 0 }
    }

    fn set(&self, at: u64, value: u64) {
        self.memory.write_all_at(&value.to_le_bytes(), at).unwrap();
    }

    fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, at).unwrap();
        u64::from_le_bytes(bytes)
    }

    fn ring(&self) {
        rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Makes a request with this length, and returns the piece that answers it.
    fn exchange(&mut self, text: &[u8], length: u64, from: u64) -> Vec<u8> {
        self.number += 1;
        self.memory.write_all_at(text, REQUEST_AT).unwrap();
        self.set(REQUEST_LENGTH_AT, length);
        self.set(REQUEST_FROM_AT, from);
        self.set(REQUEST_NUMBER_AT, self.number);
        self.ring();
        eventually("an answer", || self.get(ANSWER_NUMBER_AT) == self.number);
        let mut piece = vec![0; usize::try_from(self.get(ANSWER_LENGTH_AT)).unwrap()];
        self.memory.read_exact_at(&mut piece, ANSWER_AT).unwrap();
        piece
    }

    fn ask(&mut self, request: &Value) -> Value {
        let text = request.to_string();
        let mut answer = self.exchange(text.as_bytes(), text.len() as u64, 0);
        while (answer.len() as u64) < self.get(ANSWER_TOTAL_AT) {
            let more = self.exchange(b"", 0, answer.len() as u64);
            assert!(!more.is_empty());
            answer.extend(more);
        }
        serde_json::from_slice(&answer).unwrap()
    }

    fn refused(&mut self, text: &[u8], length: u64) -> String {
        let answer: Value = serde_json::from_slice(&self.exchange(text, length, 0)).unwrap();
        assert_eq!(answer["ok"], false);
        answer["error"].as_str().unwrap().to_owned()
    }
}

/// A device, and the socket of its mailboxes.
fn start() -> (Rig, PathBuf) {
    let rig = Rig::prepared(|place, command| {
        command.arg("--ivshmem").arg(place.path("mailbox.sock"));
    });
    let socket = rig.place.path("mailbox.sock");
    (rig, socket)
}

#[test]
fn a_guest_without_a_serial_port_flushes_makes_views_and_is_rung_back() {
    within(120, || {
        let (rig, socket) = start();
        let mut guest = Guest::connect(&socket);
        assert_eq!(guest.ask(&json!({ "op": "tensors" }))["tensors"][0]["name"], "t");
        let mut count = [0; 8];
        guest.rung.read_exact(&mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);

        let view = guest.ask(&json!({ "op": "view", "tensor": "t", "spelling": "full" }));
        let offset = view["view"]["offset"].as_u64().unwrap();
        let base = File::options().write(true).open(rig.base_path()).unwrap();
        let views = File::open(rig.place.path("mount/views")).unwrap();
        let mut bytes = rig.bytes.clone();
        let mut shown = vec![0; bytes.len()];
        views.read_exact_at(&mut shown, offset).unwrap();
        assert!(shown == bytes);
        base.write_all_at(b"from the guest", 4000).unwrap();
        bytes[4000..4014].copy_from_slice(b"from the guest");
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        views.read_exact_at(&mut shown, offset).unwrap();
        assert!(shown == bytes);

        // Another guest has a mailbox of its own.
        let mut other = Guest::connect(&socket);
        assert_eq!(other.ask(&json!({ "op": "views" }))["views"], json!([view["view"]]));
        drop(other);
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
    });
}

#[test]
fn a_guest_that_breaks_the_rules_gets_an_error_and_may_go_on() {
    within(120, || {
        let (rig, socket) = start();
        let mut guest = Guest::connect(&socket);
        for length in [REQUEST_BYTES + 1, 1 << 20, u64::from(u32::MAX), u64::MAX] {
            let why = guest.refused(b"{\"op\":\"flush\"}", length);
            assert!(why.contains(&length.to_string()) && why.contains("65536"), "{why}");
        }
        for text in [&b"  \t "[..], b"\n", b"{\"op\":\"flush\"}\n{\"op\":\"flush\"}"] {
            let why = guest.refused(text, text.len() as u64);
            assert!(why.contains("one line"), "{why}");
        }
        assert!(guest.refused(b"\xff\xfe{", 3).contains("no request"));
        assert!(guest.refused(b"{\"op\":\"format\"}", 15).contains("format"));
        let past = json!({ "op": "flush", "offset": u64::MAX, "length": 1 }).to_string();
        assert!(guest.refused(past.as_bytes(), past.len() as u64).contains("pass the end"));
        // More of an answer than there is, is nothing.
        for from in [1 << 20, u64::MAX] {
            assert_eq!(guest.exchange(b"", 0, from), b"");
        }
        // The doorbell alone asks for nothing.
        for _ in 0..1000 {
            guest.ring();
        }
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        // Its QEMU may not make the mailbox shorter, and may say what it likes.
        assert!(guest.memory.set_len(0).is_err());
        let silent: Vec<_> = (0..4).map(|_| Guest::connect(&socket)).collect();
        std::io::Write::write_all(&mut guest.stream, b"what is this").unwrap();
        drop((guest, silent));
        assert_eq!(Guest::connect(&socket).ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        rig.run.signal(Signal::SIGTERM);
        assert!(rig.run.end().success());
        assert!(!socket.exists());
    });
}

#[test]
fn a_workers_death_does_not_reach_the_guest() {
    within(120, || {
        let (rig, socket) = start();
        let mut guest = Guest::connect(&socket);
        for _ in 0..5 {
            kill_worker(&rig.run);
            assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        }
    });
}
