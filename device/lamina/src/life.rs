//! The life line between the holder and its worker: messages both ways, with descriptors, and the
//! news of either's death.
//!
//! It is a pair of sockets, of which the worker gets one as its standard input, and takes it away
//! from there. A message is its length (four bytes, to which the descriptors are attached) and
//! JSON. When all threads of a worker that share its descriptors are gone, the holder reads the end
//! of the file: from then on nothing of it touches the image. When the holder is gone, so does the
//! worker.
//!
//! Who asks the holder something on its own socket speaks the same, but is waited for until a
//! deadline only ([`send_by`], [`receive_by`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lamina_serve::Shows;
use lamina_serve::qmp::Reported;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The environment variable that makes a process a worker.
pub(crate) const WORKER: &str = "LAMINA_WORKER";
/// Most descriptors of a message (the kernel's bound).
const MAX_DESCRIPTORS: usize = 253;
/// Most bytes of a message.
const MAX_BYTES: usize = 64 << 20;

/// What the holder says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Open the image, and load the checkpoints if that was not done. Descriptors: the image, the
    /// API's socket, the guests' sockets, the API's TCP socket if there is one, and memory for the
    /// ledger if there is some.
    Open {
        /// The image's name.
        image: PathBuf,
        /// Whether this is the first worker on it in this run.
        first: bool,
        /// Workers that ended before it.
        deaths: u64,
        /// Those of them that an upgrade ended; a holder of an earlier version does not tell them.
        #[serde(default)]
        replaced: u64,
        /// Whether a handler's panic is to be survived: the last workers died soon.
        careful: bool,
        /// The guests' sockets, in the order of the exports.
        ctl: Vec<PathBuf>,
        tcp: bool,
        /// A holder of an earlier version has no memory for a ledger.
        #[serde(default)]
        ledger: bool,
    },
    /// Answer. Descriptors: the mount's for requests and for notices, then the disks' sockets.
    Serve {
        /// Where it is mounted, if it is, and threads to answer with.
        mount: Option<(PathBuf, usize)>,
        /// What guests were told of poison by workers before, by the monitor socket; a holder of an
        /// earlier version does not want to know.
        #[serde(default, rename = "told")]
        reported: Option<BTreeMap<PathBuf, Reported>>,
        /// Whether the holder wants to know that stopping goes on; one of an earlier version does
        /// not.
        #[serde(default)]
        paced: bool,
        /// A monitor socket that only a holder of an earlier version tells of.
        #[serde(default)]
        qmp: Option<PathBuf>,
        disks: Vec<Disk>,
        /// Whether [`Order::ServeFiles`] follows.
        #[serde(default)]
        files: bool,
    },
    /// Answer the mount of the files too, which lies in the other. Descriptors: for requests and
    /// for notices.
    ServeFiles {
        /// The connection's number, if it is known.
        minor: Option<String>,
        /// Whether a worker answered it before.
        answered: bool,
    },
    /// Write a snapshot to the file whose descriptor comes along.
    Save,
    /// Bring everything to the image and end.
    Stop,
}

/// A disk that is to be served.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Disk {
    pub(crate) socket: PathBuf,
    /// What it shows.
    pub(crate) shows: Shows,
    /// The guest whose partition it shows that of; everything if not given.
    pub(crate) guest: Option<String>,
}

/// What the worker says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Word {
    /// The device is open and holds the checkpoints.
    Loaded,
    /// It answers; what can be told of it.
    Ready(Box<Ready>),
    /// What it told a guest of poison, at which monitor socket.
    #[serde(rename = "Told")]
    Reported(PathBuf, Reported),
    /// It was told to save a snapshot: its bytes of data, or why there is none.
    Saved(Result<u64, String>),
    /// It was told to stop, has not yet, and goes on with it.
    Stopping,
    /// It was told to stop, and has.
    Stopped,
    /// It cannot; why.
    Failed(String),
}

/// What may be asked of the holder, on its socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Go on with another program, or with this one's as it is now.
    Upgrade(Option<PathBuf>),
    /// Have a snapshot written to the file whose descriptor comes along.
    Save,
    /// Bring everything to the image, and take the device away.
    Stop,
}

/// What the holder answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Another program does the work.
    Upgraded(Result<Box<Ready>, String>),
    /// A snapshot has so many bytes of data.
    Saved(Result<u64, String>),
    /// The device is being stopped.
    Stopping,
}

/// What can be told of a device that is ready: the ready line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Always true: what a script waits for.
    #[serde(rename = "ready")]
    pub(crate) is: bool,
    /// The holder.
    pub(crate) pid: u32,
    pub(crate) worker: u32,
    pub(crate) mode: String,
    pub(crate) codec: String,
    /// The windows of the export at the mount's root, if there is one.
    pub(crate) base: Option<WindowFile>,
    pub(crate) views: Option<WindowFile>,
    /// The folder of files, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<PathBuf>,
    /// The targets of the base window, if it is an interleave set.
    #[serde(default, skip_serializing_if = "Vec::is_empty", alias = "lanes")]
    pub(crate) targets: Vec<PathBuf>,
    /// The other exports, each with its guest's socket.
    pub(crate) guests: Vec<Value>,
    pub(crate) disks: Vec<Value>,
    pub(crate) api: PathBuf,
    /// The socket for guests of the export at the root.
    pub(crate) ctl: Option<PathBuf>,
    pub(crate) tcp: Option<std::net::SocketAddr>,
    pub(crate) tensors: usize,
    pub(crate) view_count: usize,
    pub(crate) skipped: Vec<Value>,
}

/// A window and where it can be mapped.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WindowFile {
    pub(crate) path: Option<PathBuf>,
    pub(crate) bytes: u64,
}

/// The worker's end. From now on standard input is empty: threads with a file table of their own
/// keep the standard streams, and programs inherit them, and the end of the line must not wait for
/// either.
pub(crate) fn line_of_worker() -> io::Result<UnixStream> {
    let line = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(line.into())
}

/// Who sends: a message is more than one write.
static SENDING: Mutex<()> = Mutex::new(());

/// Sends a message on the line.
pub(crate) fn send(
    to: &UnixStream,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let _one_by_one = SENDING.lock().unwrap_or_else(PoisonError::into_inner);
    send_until(to, message, descriptors, None)
}

/// Sends a message to somebody else, who has until `deadline` to take it. Nobody who sends on the
/// line waits for that.
pub(crate) fn send_by(
    to: &UnixStream,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    send_until(to, message, descriptors, Some(deadline))
}

fn send_until(
    to: &UnixStream,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!("{} descriptors are too many", descriptors.len())));
    }
    to.set_write_timeout(left(deadline)?)?;
    // Whoever died is noticed where its messages are read.
    let sent = sendmsg(to.as_fd(), &[IoSlice::new(&length)], &mut control, SendFlags::NOSIGNAL)?;
    for part in [&length[sent..], &text] {
        let mut rest = part;
        while !rest.is_empty() {
            to.set_write_timeout(left(deadline)?)?;
            // A timeout with nothing taken is an error, and with something a part.
            match (&mut &*to).write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => rest = &rest[taken..],
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
    }
    Ok(())
}

/// The time that is left, for a socket's timeout.
fn left(deadline: Option<Instant>) -> io::Result<Option<Duration>> {
    let Some(deadline) = deadline else { return Ok(None) };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
}

/// The next message and its descriptors, or `None` if the other side is gone.
pub(crate) fn receive<M: DeserializeOwned>(from: &UnixStream) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    receive_until(from, None)
}

/// The same of somebody who has until `deadline` to say it.
pub(crate) fn receive_by<M: DeserializeOwned>(
    from: &UnixStream,
    deadline: Instant,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    receive_until(from, Some(deadline))
}

fn receive_until<M: DeserializeOwned>(
    from: &UnixStream,
    deadline: Option<Instant>,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        from.set_read_timeout(left(deadline)?)?;
        let mut buffers = [IoSliceMut::new(&mut length)];
        match recvmsg(from.as_fd(), &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            // Died with something unread.
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => break received?.bytes,
        }
    };
    if received == 0 {
        return Ok(None);
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if !read_whole(from, &mut length[received..], deadline)? {
        return Ok(None);
    }
    let bytes = usize::try_from(u32::from_le_bytes(length)).map_err(io::Error::other)?;
    if bytes > MAX_BYTES {
        return Err(io::Error::other(format!("a message of {bytes} bytes, more than {MAX_BYTES}")));
    }
    let mut text = vec![0; bytes];
    if !read_whole(from, &mut text, deadline)? {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&text)?, descriptors)))
}

/// Fills `bytes`: whether they came. A message that breaks off is a death, too.
fn read_whole(mut from: &UnixStream, bytes: &mut [u8], deadline: Option<Instant>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < bytes.len() {
        from.set_read_timeout(left(deadline)?)?;
        match from.read(&mut bytes[filled..]) {
            Ok(0) => return Ok(false),
            Ok(taken) => filled += taken,
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) if why.kind() == io::ErrorKind::ConnectionReset => return Ok(false),
            Err(why) => return Err(why),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_with_their_descriptors_and_so_does_the_end() {
        let (here, there) = UnixStream::pair().unwrap();
        let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        (&second).write_all(b"second").unwrap();
        let skipped = vec!["x".repeat(300 << 10)];
        let sender = std::thread::spawn(move || {
            send(&here, &skipped, &[first.as_fd(), second.as_fd()]).unwrap();
            send(&here, &Word::Stopped, &[]).unwrap();
        });
        let (skipped, descriptors): (Vec<String>, _) = receive(&there).unwrap().unwrap();
        assert_eq!((skipped[0].len(), descriptors.len()), (300 << 10, 2));
        let second = std::fs::File::from(descriptors.into_iter().nth(1).unwrap());
        let mut found = [0; 6];
        std::os::unix::fs::FileExt::read_exact_at(&second, &mut found, 0).unwrap();
        assert_eq!(&found, b"second");
        assert!(matches!(receive(&there).unwrap(), Some((Word::Stopped, none)) if none.is_empty()));
        sender.join().unwrap();
        assert!(receive::<Word>(&there).unwrap().is_none());
    }
}
