//! The control port: requests to the device that loads and stores cannot express.
//!
//! The port is a virtio-serial port (`org.lamina.ctl`) in a guest; a Unix socket works the same,
//! and so does the mailbox of a guest that sees the device as shared memory of PCI devices, where
//! numbers tell whose a reply is, or the driver's file of a virtio device. Each way goes one JSON
//! object a line. Every reply carries `"ok"`, and `"error"` when that is false.
//!
//! Rules:
//!
//! * A virtio port is one program's at a time. So hold it for a request and no longer; opening
//!   waits a while for others.
//! * Every request has a deadline, every reply a bound on its length.
//! * A reply to a program that was killed while it waited must not be taken for the reply to this
//!   one: a flush would seem done before it was. The port keeps such replies, and they have no
//!   names. So a new connection first asks for an operation that does not exist, with a name that
//!   only it knows; the device refuses it by name, and the next reply is the connection's own.
//!   After a failure the connection is not used again.
//! * The device's worker may die and be replaced: then the host's end of the port goes and comes
//!   back. The request that was under way is made again, for up to [`OPEN_TIMEOUT`] after it went.
//!   One that may not be done twice says then that it is made again.
//! * `flush` is the fence of the coherence contract: stores made through the base window before it
//!   are in every view read after it. Stores of this CPU need no flush instruction first: a virtual
//!   machine's memory is coherent with its host. On hardware with write-back host caches over
//!   CXL.mem, the device would snoop or the caller would write its lines back (`clwb`) before
//!   asking.
//! * Where several hosts share a region without coherence (`lamina serve --host`), nobody sees this
//!   host's stores before its `flush` of them, and it sees nobody's in what it has loaded before,
//!   until it asks for `invalidate`. Elsewhere `invalidate` has nothing to do, so a program that is
//!   right for hosts is right everywhere.

use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, Read, Write},
    mem,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, OpenOptionsExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::OFlags,
};
use serde_json::{Value, json};

use crate::{
    ivshmem,
    mailbox::{Mailbox, MailboxError},
    shmem::{self, Shared},
    sysfs::{Tree, wait},
};

/// The virtio port that the device listens on.
pub const CTL_PORT: &str = "org.lamina.ctl";
/// Bytes a reply may have.
pub const MAX_REPLY: usize = 16 << 20;
/// How long a request may take unless another time is set. A flush of many dirty pages is the
/// slowest.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// How long opening waits for another program to be done with the port.
pub const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a request is made of somebody who goes over it: it may be what ends the device.
const MAX_TRIES: usize = 8;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// There is no such port.
    #[error(
        "no control port {port:?} (looked in /dev/virtio-ports and /sys/class/virtio-ports) and no mailbox: give QEMU \
         `-device virtio-serial -device virtserialport,chardev=…,name={port}`, load virtio_console, or set LAMINA_CTL"
    )]
    NoPort {
        /// The port's name.
        port: String,
    },
    /// The port could not be opened.
    #[error("cannot open the control port {path}: {cause}{}", busy(cause))]
    Open {
        /// The port.
        path: PathBuf,
        /// The kernel's error.
        cause: io::Error,
    },
    /// Reading or writing failed.
    #[error("the control port {path} failed: {cause}")]
    Io {
        /// The port.
        path: PathBuf,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The other side is gone.
    #[error("nobody answers at the control port {path}: is the device (`lamina`) still running?")]
    Closed {
        /// The port.
        path: PathBuf,
    },
    /// The deadline passed.
    #[error(
        "the control port {path} did not answer within {seconds:.1} s; is the device (`lamina`) running?"
    )]
    Timeout {
        /// The port.
        path: PathBuf,
        /// The time given, or that its driver took.
        seconds: f64,
    },
    /// A reply without end.
    #[error("the reply at {path} has more than {bound} bytes without a line end")]
    TooLong {
        /// The port.
        path: PathBuf,
        /// The bound.
        bound: usize,
    },
    /// A reply that is not a JSON object with `ok`.
    #[error("the reply at {path} is no JSON object with \"ok\": {reply}")]
    Reply {
        /// The port.
        path: PathBuf,
        /// Its first bytes.
        reply: String,
    },
    /// The device said no.
    #[error("the device refused {op:?}: {error}")]
    Refused {
        /// The request's `op`.
        op: String,
        /// The device's words.
        error: String,
    },
}

fn busy(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::ResourceBusy => " (another program in this guest holds it)",
        _ => "",
    }
}

/// A tensor to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name, unique in this guest's partition of the device.
    pub name: String,
    /// Its bytes.
    pub length: u64,
    /// The format of its elements, for example `bf16`.
    pub format: String,
    /// Where it begins in the base window; where it fits if not given.
    pub dpa: Option<u64>,
    /// Its shape, outermost dimension first; one dimension if empty.
    pub shape: Vec<u64>,
    /// Channels of a row and tokens of a window, if it is a KV cache.
    pub kv: Option<(u32, u32)>,
    /// Its full windows are coded with loss, as PackKV has it: `packkv` and what follows it, as
    /// `lamina tensor add --lossy` is told. Only of a KV cache.
    pub lossy: Option<String>,
    /// The codec of its planes; the device's if not given.
    pub codec: Option<String>,
    /// A tensor of this guest's partition that its blocks may be stored as differences to.
    pub base: Option<String>,
}

impl NewTensor {
    fn json(&self) -> Value {
        let Self { name, length, format, dpa, shape, kv, lossy, codec, base } = self;
        let layout = match (kv, lossy) {
            (None, None) => json!({ "kind": "weight" }),
            (Some((channels, window)), None) => {
                json!({ "kind": "kv", "channels": channels, "window": window })
            }
            // Without channels the device says that these are missing.
            (Some((channels, window)), Some(lossy)) => {
                json!({ "kind": "lossy_kv", "channels": channels, "window": window, "lossy": lossy })
            }
            (None, Some(lossy)) => json!({ "kind": "lossy_kv", "lossy": lossy }),
        };
        json!({
            "name": name,
            "length": length,
            "format": format,
            "dpa": dpa,
            "shape": shape,
            "layout": layout,
            "codec": codec,
            "base": base,
        })
    }
}

/// A connection to the device.
#[derive(Debug)]
pub struct Ctl {
    path: PathBuf,
    stream: File,
    /// Where that is no stream.
    other: Option<Other>,
    is_socket: bool,
    timeout: Duration,
    /// How long the device may be gone.
    patience: Duration,
    /// What was read behind the last line.
    pending: Vec<u8>,
    /// Whether the next reply is to this connection's next request.
    in_step: bool,
    failed: bool,
}

/// What answers a whole request at once.
#[derive(Debug)]
enum Other {
    /// A mailbox, by its folder.
    Mailbox(Mailbox),
    /// A driver's file.
    Driver(Shared),
}

impl Ctl {
    /// Opens the port at `path`, a character device, a Unix socket, the folder in sysfs of a PCI
    /// device with a mailbox, or a driver's file. While another program has it, this waits up to
    /// [`OPEN_TIMEOUT`].
    ///
    /// # Errors
    /// [`CtlError::Open`].
    pub fn open(path: &Path) -> Result<Self, CtlError> {
        let wrap = |cause| CtlError::Open { path: path.into(), cause };
        let kind = fs::metadata(path).map_err(wrap)?.file_type();
        if let Some(what) = no_port(kind) {
            // A request would be written over what is in it.
            let why = format!("it is a {what}, not a port or a socket");
            return Err(wrap(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        let other = if kind.is_dir() {
            Some(Other::Mailbox(Mailbox::open(path, OPEN_TIMEOUT).map_err(wrap)?))
        } else if shmem::is_node(path) {
            Some(Other::Driver(Shared::open(path).map_err(wrap)?))
        } else {
            None
        };
        let stream = match &other {
            Some(_) => File::open(path),
            None => open(path, kind.is_socket()),
        };
        Ok(Self {
            path: path.into(),
            stream: stream.map_err(wrap)?,
            other,
            is_socket: kind.is_socket(),
            timeout: TIMEOUT,
            patience: OPEN_TIMEOUT,
            pending: Vec::new(),
            in_step: false,
            failed: false,
        })
    }

    /// Opens the port named [`CTL_PORT`], or else the driver's file, or the mailbox.
    ///
    /// # Errors
    /// [`CtlError::NoPort`], [`CtlError::Open`].
    pub fn find(tree: &Tree) -> Result<Self, CtlError> {
        let found = port(tree, CTL_PORT).or_else(|| shmem::node(tree)).or_else(|| ivshmem::mailbox(tree));
        Self::open(&found.ok_or_else(|| CtlError::NoPort { port: CTL_PORT.into() })?)
    }

    /// Sets how long a request may take. A driver's file has its own time, 150 s, and no other.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sets how long the device may be gone.
    #[doc(hidden)]
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Whether a request failed in a way that leaves the connection out of step; open another one.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Makes every base store of before visible to every view read after, for a range of the base
    /// window in bytes, or for all of it.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn flush(&mut self, range: Option<(u64, u64)>) -> Result<Value, CtlError> {
        self.over("flush", range)
    }

    /// Drops what this host holds of a range of the base window in bytes, or of all of it, and of
    /// views over it: the next loads read the device. What this host stored into the pages that the
    /// range touches is written back first.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn invalidate(&mut self, range: Option<(u64, u64)>) -> Result<Value, CtlError> {
        self.over("invalidate", range)
    }

    fn over(&mut self, op: &str, range: Option<(u64, u64)>) -> Result<Value, CtlError> {
        self.request(&match range {
            Some((offset, length)) => json!({ "op": op, "offset": offset, "length": length }),
            None => json!({ "op": op }),
        })
    }

    /// Makes a view of a tensor; the directory shows it afterwards.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn create_view(&mut self, tensor: &str, spelling: &str) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "view", "tensor": tensor, "spelling": spelling }))
    }

    /// Removes a view of a tensor; its place reads as zeros until another comes there.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn remove_view(&mut self, tensor: &str, spelling: &str) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "remove_view", "tensor": tensor, "spelling": spelling }))
    }

    /// Makes tensors, all of them or none; the directory shows them afterwards, as far as it has
    /// room.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn create_tensors(&mut self, tensors: &[NewTensor]) -> Result<Value, CtlError> {
        let tensors: Vec<Value> = tensors.iter().map(NewTensor::json).collect();
        self.request(&json!({ "op": "create_tensors", "tensors": tensors }))
    }

    /// Makes a tensor longer or shorter where it is, in bytes.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn resize_tensor(&mut self, name: &str, length: u64) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "resize_tensor", "name": name, "length": length }))
    }

    /// Stores a tensor that has a base by itself, so that it needs none. If that takes longer than
    /// a request may, it goes on, and who asks again waits for it.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn detach_tensor(&mut self, name: &str) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "detach_tensor", "name": name }))
    }

    /// Removes a tensor and its views. Its bytes stay, as bytes of nobody.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn remove_tensor(&mut self, name: &str) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "remove_tensor", "name": name }))
    }

    /// At most `most` tensors from a DPA on (and those that share the last one's), by DPA: for
    /// those that a directory has no room for.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn tensors(&mut self, from: u64, most: usize) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "tensors", "from": from, "most": most }))
    }

    /// At most `most` views from an offset of the views window on, likewise.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn views(&mut self, from: u64, most: usize) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "views", "from": from, "most": most }))
    }

    /// The device's counters.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn stats(&mut self) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "stats" }))
    }

    /// Drops ranges (offset, length) of the views window from the host's page cache: loads of them
    /// go to the device again.
    ///
    /// # Errors
    /// Any of [`CtlError`].
    pub fn evict(&mut self, ranges: &[(u64, u64)]) -> Result<Value, CtlError> {
        self.request(&json!({ "op": "evict", "ranges": ranges }))
    }

    /// Sends `request` and returns the reply, which has `"ok": true`.
    ///
    /// # Errors
    /// Any of [`CtlError`]; after all but `Refused` the connection is spent.
    pub fn request(&mut self, request: &Value) -> Result<Value, CtlError> {
        if self.failed {
            return Err(CtlError::Closed { path: self.path.clone() });
        }
        let reply = self.exchange_again(request);
        self.failed = reply.is_err();
        let reply = reply?;
        match reply.get("ok").and_then(Value::as_bool) {
            Some(true) => Ok(reply),
            Some(false) => Err(CtlError::Refused {
                op: request.get("op").and_then(Value::as_str).unwrap_or_default().to_owned(),
                error: reply
                    .get("error")
                    .and_then(Value::as_str)
                    .unwrap_or("the device gave no reason")
                    .to_owned(),
            }),
            None => {
                self.failed = true;
                Err(self.no_reply(reply.to_string().as_bytes()))
            }
        }
    }

    /// Exchanges a request for its reply, once more if the other side went meanwhile and comes
    /// back.
    fn exchange_again(&mut self, request: &Value) -> Result<Value, CtlError> {
        let deadline = Instant::now() + self.timeout;
        let (mut gone_since, mut tries) = (None, 0);
        let mut request = request.clone();
        loop {
            let mut sent = false;
            let gone = match self.exchange(&request, deadline, &mut sent) {
                Err(gone @ CtlError::Closed { .. }) => gone,
                done => return done,
            };
            // From when it went, however long the request had lasted by then.
            let now = Instant::now();
            let since = if sent { *gone_since.insert(now) } else { *gone_since.get_or_insert(now) };
            tries += usize::from(sent);
            if tries >= MAX_TRIES || since.elapsed() > self.patience || now > deadline {
                return Err(gone);
            }
            thread::sleep(Duration::from_millis(20));
            self.in_step = false;
            self.pending.clear();
            // It may have been done before its answer was lost, if the other side had it at all.
            if sent
                && matches!(request["op"].as_str(), Some("create_tensors" | "remove_tensor" | "remove_view"))
            {
                request["again"] = true.into();
            }
            // A port that was opened before stays open; it is the other end that comes back.
            if self.is_socket {
                match open(&self.path, true) {
                    Ok(stream) => self.stream = stream,
                    Err(why) => tracing::debug!("the device does not listen yet: {why}"),
                }
            }
        }
    }

    /// Exchanges a request for its reply. `sent` becomes whether the other side may have it.
    fn exchange(&mut self, request: &Value, deadline: Instant, sent: &mut bool) -> Result<Value, CtlError> {
        if let Some(other) = &self.other {
            let request = request.to_string();
            let answer = match other {
                Other::Mailbox(mailbox) => mailbox.exchange(&request, MAX_REPLY, deadline),
                Other::Driver(shared) => shared.exchange(&request, MAX_REPLY),
            };
            let late =
                |after: Duration| CtlError::Timeout { path: self.path.clone(), seconds: after.as_secs_f64() };
            let line = answer.map_err(|error| match error {
                MailboxError::Late => late(self.timeout),
                MailboxError::DriverLate(after) => late(after),
                MailboxError::TooLong(bound) => CtlError::TooLong { path: self.path.clone(), bound },
                MailboxError::Broken(why) => {
                    CtlError::Io { path: self.path.clone(), cause: io::Error::other(why) }
                }
            })?;
            return serde_json::from_slice(&line).map_err(|_| self.no_reply(&line));
        }
        if !self.in_step || !self.pending.is_empty() {
            self.fall_into_step(deadline)?;
        }
        *sent = true;
        self.send(&format!("{request}\n"), deadline)?;
        let line = self.line(deadline)?;
        serde_json::from_slice(&line).map_err(|_| self.no_reply(&line))
    }

    /// Throws away what the device still says to an earlier program: everything before its refusal
    /// of an operation that nobody else can have asked for.
    fn fall_into_step(&mut self, deadline: Instant) -> Result<(), CtlError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let op = format!("sync-{}-{now}", process::id());
        // The line end before it finishes what a killed program may have left unfinished.
        self.send(&format!("\n{}\n", json!({ "op": op })), deadline)?;
        loop {
            let line = self.line(deadline)?;
            if line.windows(op.len()).any(|part| part == op.as_bytes()) {
                self.in_step = true;
                return Ok(());
            }
            tracing::debug!(reply = %String::from_utf8_lossy(&line), "this was for an earlier program");
        }
    }

    fn send(&mut self, text: &str, deadline: Instant) -> Result<(), CtlError> {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(0) => return Err(CtlError::Closed { path: self.path.clone() }),
                Ok(count) => rest = &rest[count..],
                Err(error) => self.pause(error, PollFlags::OUT, deadline)?,
            }
        }
        Ok(())
    }

    /// The next line, without its end.
    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>, CtlError> {
        let mut searched = 0;
        let mut chunk = vec![0; 64 << 10];
        loop {
            if let Some(end) = self.pending[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.pending.split_off(searched + end + 1);
                let mut line = mem::replace(&mut self.pending, rest);
                line.pop();
                return Ok(line);
            }
            searched = self.pending.len();
            if searched > MAX_REPLY {
                return Err(CtlError::TooLong { path: self.path.clone(), bound: MAX_REPLY });
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(CtlError::Closed { path: self.path.clone() }),
                Ok(count) => self.pending.extend_from_slice(&chunk[..count]),
                Err(error) => self.pause(error, PollFlags::IN, deadline)?,
            }
        }
    }

    /// After `error`: waits until the port is ready, or says why it will not be.
    fn pause(&self, error: io::Error, ready: PollFlags, deadline: Instant) -> Result<(), CtlError> {
        match error.kind() {
            io::ErrorKind::WouldBlock => {}
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                return Err(CtlError::Closed { path: self.path.clone() });
            }
            _ => return Err(CtlError::Io { path: self.path.clone(), cause: error }),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let late = || CtlError::Timeout { path: self.path.clone(), seconds: self.timeout.as_secs_f64() };
        if left.is_zero() {
            return Err(late());
        }
        let mut fds = [PollFd::from_borrowed_fd(self.stream.as_fd(), ready)];
        match poll(&mut fds, Some(&Timespec::try_from(left).map_err(|_| late())?)) {
            Ok(0) => Err(late()),
            // A hang-up with bytes still to read is read first; the read then ends.
            Ok(_) if fds[0].revents().contains(PollFlags::HUP) && !fds[0].revents().contains(ready) => {
                Err(CtlError::Closed { path: self.path.clone() })
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(CtlError::Io { path: self.path.clone(), cause: error.into() }),
        }
    }

    pub(crate) fn no_reply(&self, reply: &[u8]) -> CtlError {
        let reply = String::from_utf8_lossy(&reply[..reply.len().min(200)]).into_owned();
        CtlError::Reply { path: self.path.clone(), reply }
    }
}

/// What a file of this kind is, if it cannot be a control port.
fn no_port(kind: FileType) -> Option<&'static str> {
    let kinds = [
        (kind.is_file(), "regular file"),
        (kind.is_block_device(), "block device"),
        (kind.is_fifo(), "pipe"),
    ];
    kinds.into_iter().find_map(|(is, what)| is.then_some(what))
}

/// Opens a port or connects to a socket, without blocking afterwards. While another program has the
/// port, this waits up to [`OPEN_TIMEOUT`].
fn open(path: &Path, is_socket: bool) -> io::Result<File> {
    if is_socket {
        let stream = UnixStream::connect(path)?;
        check_peer(&stream)?;
        stream.set_nonblocking(true)?;
        return Ok(File::from(OwnedFd::from(stream)));
    }
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let open = || match OpenOptions::new().read(true).write(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => None,
        done => Some(done),
    };
    wait(OPEN_TIMEOUT, open).unwrap_or_else(|| Err(io::ErrorKind::ResourceBusy.into()))
}

/// Checks that a socket is this user's or root's, by who began to listen: a path alone says nothing
/// about that.
fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let (theirs, own) = (rustix::net::sockopt::socket_peercred(stream)?.uid, rustix::process::geteuid());
    if theirs.is_root() || theirs == own {
        return Ok(());
    }
    let (theirs, own) = (theirs.as_raw(), own.as_raw());
    let why = format!(
        "user {theirs} listens there, and this is user {own}, who trusts the sockets of that user and of root only"
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// The device node of the virtio port called `name`: the link that udev makes, or found through
/// sysfs without udev.
pub fn port(tree: &Tree, name: &str) -> Option<PathBuf> {
    let link = tree.dev(format!("virtio-ports/{name}"));
    if link.exists() {
        return Some(link);
    }
    let class = "class/virtio-ports";
    tree.list(class)
        .into_iter()
        .find(|port| tree.read(format!("{class}/{port}/name")).is_ok_and(|found| found == name))
        .map(|port| tree.dev(port))
        .filter(|node| node.exists())
}
