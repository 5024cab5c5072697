//! A worker under a holder of an earlier version, which `lamina upgrade` put there: what that says
//! is understood, and it is told nothing that it does not know.
//!
//! The test is the holder, and says what holders said before they kept what guests were told of
//! poison.

use std::fs;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use lamina_device::device::DeviceConfig;
use lamina_serve::claim;
use lamina_store::image::Image;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::common::{Place, answer, request, within};
use crate::poison::monitor;

/// How long a worker may take for anything.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A worker, and the holder's end of its life line.
pub(crate) struct Worker {
    child: Child,
    line: UnixStream,
}

impl Worker {
    /// Started by the command that starts a device.
    pub(crate) fn start(mut serve: Command) -> Self {
        let (line, theirs) = UnixStream::pair().unwrap();
        line.set_read_timeout(Some(TIMEOUT)).unwrap();
        serve.env("LAMINA_WORKER", "1").stdin(OwnedFd::from(theirs));
        Self { child: serve.spawn().unwrap(), line }
    }

    pub(crate) fn order(&self, order: &Value, descriptors: &[BorrowedFd<'_>]) {
        let text = order.to_string();
        let length = u32::try_from(text.len()).unwrap().to_le_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let sent = sendmsg(&self.line, &[IoSlice::new(&length)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(4));
        (&self.line).write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn word(&self) -> Value {
        let mut length = [0; 4];
        (&self.line).read_exact(&mut length).unwrap();
        let mut text = vec![0; u32::from_le_bytes(length) as usize];
        (&self.line).read_exact(&mut text).unwrap();
        serde_json::from_slice(&text).unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_monitor_that_an_older_holder_names_is_told_of_poison_and_the_holder_is_not() {
    within(120, || {
        let place = Place::new();
        fs::create_dir(place.path("run")).unwrap();
        let image = Image::in_memory(DeviceConfig::new(16 << 20, 64 << 20).superblock()).unwrap();
        let [api, ctl] = ["run/api.sock", "run/ctl.sock"].map(|name| claim(&place.path(name)).unwrap());
        let reported = monitor(&place.path("monitor.sock"));
        let worker = Worker::start(place.serve(&[]));
        let open = json!({ "Open": {
            "image": "memory", "first": true, "deaths": 0, "careful": false, "ctl": [place.text("run/ctl.sock")],
            "tcp": false,
        } });
        worker.order(&open, &[image.file().as_fd(), api.as_fd(), ctl.as_fd()]);
        assert_eq!(worker.word(), "Loaded");
        let serve = json!({ "Serve": { "mount": null, "qmp": place.text("monitor.sock"), "disks": [] } });
        worker.order(&serve, &[]);
        assert_eq!(worker.word()["Ready"]["ready"], true);
        let asker = UnixStream::connect(place.path("run/api.sock")).unwrap();
        let block = json!({ "offset": 4096, "length": 4096 }).to_string();
        let (status, _, body) = answer(asker, &request("POST", "/poison/inject", &block));
        assert!((200..300).contains(&status), "{status} {body}");
        assert_eq!(reported.recv_timeout(TIMEOUT), Ok(4096));
        // It ends when the monitor has answered, and has said nothing in between.
        worker.order(&json!("Stop"), &[]);
        assert_eq!(worker.word(), "Stopped");
    });
}
