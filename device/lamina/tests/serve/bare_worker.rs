//! A worker of which a test is the holder.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

/// How long a worker may take for anything.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

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
