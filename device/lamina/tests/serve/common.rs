//! What the tests share: a device served by a process of its own, and bytes seen through mappings.
//!
//! The process that serves a mount must not map its files (see `lamina_serve::fuse`), and these
//! tests do map them.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::ptr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use lamina_codec::format::Format;
use lamina_device::device::TensorSpec;
use memmap2::MmapMut;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const BASE: u64 = 32 << 20;
pub(crate) const VIEWS: u64 = 64 << 20;
/// Bytes of the tensor `t`, bf16, at DPA 0: not a whole number of pages.
pub(crate) const TENSOR: usize = (4 << 20) + 6;
/// The ways of writing back.
pub(crate) const BOTH: [&str; 2] = ["auto", "msync"];

pub(crate) fn lamina(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lamina"));
    command.args(arguments).env("RUST_LOG", "info,fuse_backend_rs=off");
    command
}

/// A directory with everything that a run needs.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Waits until no process has this image: who is killed lets it go a moment later.
    pub(crate) fn let_go(image: &Path) {
        eventually("an image that nobody has", || File::open(image).unwrap().try_lock().is_ok());
    }

    pub(crate) fn serve(&self, more: &[&str]) -> Command {
        let (mount, run) = (self.text("mount"), self.text("run"));
        let mut command = lamina(&["serve", "--json", "--observe", "--mount", &mount, "--run-dir", &run]);
        command.args(more);
        command
    }

    /// A checkpoint of one bf16 tensor.
    pub(crate) fn checkpoint(&self, name: &str, bytes: &[u8]) -> String {
        let mut header = json!({});
        header[name] =
            json!({ "dtype": "BF16", "shape": [bytes.len() / 2], "data_offsets": [0, bytes.len()] });
        let header = header.to_string();
        let mut file = File::create(self.path("model")).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.write_all(bytes).unwrap();
        self.text("model")
    }

    /// What the API of a device here answers.
    pub(crate) fn try_ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let stream = UnixStream::connect(self.path("run/api.sock")).unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, _, answer) = answer(stream, &request(method, path, &body));
        (status, serde_json::from_str(&answer).unwrap_or(Value::Null))
    }
}

/// A run that is ready, killed when dropped.
pub(crate) struct Run {
    pub(crate) child: Child,
    pub(crate) ready: Value,
}

impl Run {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::start_logging(command, Stdio::piped())
    }

    pub(crate) fn start_logging(command: &mut Command, log: Stdio) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Ok(ready) = serde_json::from_str(&line) else {
            let output = child.wait_with_output().unwrap();
            panic!("not ready: {line}{}", String::from_utf8_lossy(&output.stderr));
        };
        Self { child, ready }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Waits for the end, for a bounded time.
    pub(crate) fn end(mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "it does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn log(&mut self) -> String {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // Gently first, so that a test leaves no mount behind; a run that hangs is killed.
        self.signal(Signal::SIGTERM);
        for _ in 0..500 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        // It may end meanwhile.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A device with a tensor, mounted by another process.
pub(crate) struct Rig {
    // Before the place: the run ends before its directory goes.
    pub(crate) run: Run,
    pub(crate) place: Place,
    /// What the tensor holds, kept by the test.
    pub(crate) bytes: Vec<u8>,
}

/// A view's place in the views window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ViewPlace {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Rig {
    pub(crate) fn new(write_back_with: &str) -> Self {
        Self::prepared(|_, command| {
            command.args(["--write-back-with", write_back_with]);
        })
    }

    /// One whose command was changed.
    pub(crate) fn prepared(change: impl FnOnce(&Place, &mut Command)) -> Self {
        Self::prepared_logging(change, Stdio::piped())
    }

    pub(crate) fn prepared_logging(change: impl FnOnce(&Place, &mut Command), log: Stdio) -> Self {
        let place = Place::new();
        let bytes = noise(7, TENSOR);
        let model = place.checkpoint("t", &bytes);
        let sizes = ["--capacity", "32M", "--views-capacity", "64M"];
        let mut command = place.serve(&sizes);
        change(&place, command.args(["--model", &model, "--views", ""]));
        let run = Run::start_logging(&mut command, log);
        Self { run, place, bytes }
    }

    pub(crate) fn base_path(&self) -> PathBuf {
        self.place.path("mount/base")
    }

    pub(crate) fn base(&self) -> Window {
        Window::open(&self.base_path())
    }

    pub(crate) fn views(&self) -> Window {
        Window::open(&self.place.path("mount/views"))
    }

    pub(crate) fn view(&self, spelling: &str) -> ViewPlace {
        self.view_of("t", spelling)
    }

    pub(crate) fn view_of(&self, tensor: &str, spelling: &str) -> ViewPlace {
        let made = self.ask("POST", "/views", &json!({ "tensor": tensor, "spelling": spelling }));
        ViewPlace { offset: made["offset"].as_u64().unwrap(), length: made["length"].as_u64().unwrap() }
    }

    /// What a view shows, by the reference.
    pub(crate) fn expected(&self, spelling: &str) -> Vec<u8> {
        expected(spelling, &self.bytes)
    }

    pub(crate) fn flush(&self, offset: u64, length: u64) {
        self.ask("POST", "/flush", &json!({ "offset": offset, "length": length }));
    }

    pub(crate) fn requests(&self) -> Value {
        self.ask("GET", "/stats", &Value::Null)["requests"].clone()
    }

    /// Asks the API for something that it does.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let (status, body) = self.try_ask(method, path, body);
        assert!((200..300).contains(&status), "{method} {path}: {status} {body}");
        body
    }

    /// Whether the API answers.
    pub(crate) fn try_ask_quietly(&self, path: &str) -> bool {
        let Ok(mut stream) = UnixStream::connect(self.place.path("run/api.sock")) else { return false };
        let mut answer = String::new();
        let requested = stream.write_all(request("GET", path, "").as_bytes());
        requested.is_ok() && stream.read_to_string(&mut answer).is_ok() && answer.starts_with("HTTP/1.1 200")
    }

    pub(crate) fn try_ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        self.place.try_ask(method, path, body)
    }
}

/// A whole HTTP request.
pub(crate) fn request(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

/// Sends a request and takes status, head (in lower case) and body of the answer.
pub(crate) fn answer(mut stream: impl Read + Write, request: &str) -> (u16, String, String) {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, head.to_lowercase(), body.to_owned())
}

/// Whether something is mounted there.
pub(crate) fn mounted(path: &Path) -> bool {
    let (table, path) = (fs::read("/proc/self/mountinfo").unwrap(), path.as_os_str().as_bytes());
    table.windows(path.len()).any(|part| part == path)
}

pub(crate) fn spec(name: &str, dpa: u64, length: usize) -> TensorSpec {
    TensorSpec {
        name: name.to_owned(),
        dpa: Some(dpa),
        length: length as u64,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout: lamina_device::layout::Layout::Weight,
        codec: None,
        base: None,
    }
}

/// A view of bf16 bytes, by the reference.
pub(crate) fn expected(spelling: &str, bytes: &[u8]) -> Vec<u8> {
    lamina_reference::view_bytes(lamina_reference::Format::Bf16, spelling, bytes, bytes.len() as u64 / 2)
        .unwrap()
}

/// A window's file, opened for reading and writing and mapped shared.
pub(crate) struct Window {
    pub(crate) file: File,
    map: MmapMut,
}

impl Window {
    pub(crate) fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        // SAFETY: other threads and the kernel may change the memory; it is only touched by
        // volatile loads and stores, below.
        let map = unsafe { MmapMut::map_mut(&file) }.unwrap();
        Self { file, map }
    }

    /// Loads bytes through the mapping, in words where it can: tests are not optimized, and load
    /// much.
    pub(crate) fn load(&self, at: u64, length: usize) -> Vec<u8> {
        let at = usize::try_from(at).unwrap();
        let mut bytes = Vec::with_capacity(length);
        // SAFETY: any eight bytes are a number.
        let (head, words, tail) = unsafe { self.map[at..at + length].align_to::<u64>() };
        // SAFETY: inside the mapping, by the slice above.
        let byte = |byte: &u8| unsafe { ptr::from_ref(byte).read_volatile() };
        bytes.extend(head.iter().map(byte));
        for word in words {
            // SAFETY: as above.
            bytes.extend_from_slice(&unsafe { ptr::from_ref(word).read_volatile() }.to_ne_bytes());
        }
        bytes.extend(tail.iter().map(byte));
        bytes
    }

    /// Stores bytes through the mapping.
    pub(crate) fn store(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).unwrap();
        let part = &mut self.map[at..at + bytes.len()];
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: inside the mapping, by the slice above.
            unsafe { part.as_mut_ptr().add(i).write_volatile(*byte) };
        }
    }

    /// Writes back the stores to the mapping.
    pub(crate) fn sync(&self) {
        self.try_sync().unwrap();
    }

    pub(crate) fn try_sync(&self) -> std::io::Result<()> {
        self.map.flush()
    }

    /// The error number of a write by `pwrite`, if it fails.
    pub(crate) fn file_write_error(&self, at: u64, bytes: &[u8]) -> Option<i32> {
        self.file.write_all_at(bytes, at).err()?.raw_os_error()
    }

    /// Reads bytes by `pread`.
    pub(crate) fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }
}

/// A guest's end of a control socket, as QEMU makes it.
pub(crate) struct Guest(BufReader<UnixStream>);

impl Guest {
    pub(crate) fn connect(socket: &str) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(BufReader::new(stream))
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    pub(crate) fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    pub(crate) fn ask(&mut self, request: &Value) -> Value {
        self.send(format!("{request}\n").as_bytes());
        self.receive()
    }

    pub(crate) fn refused(&mut self, line: &[u8]) -> String {
        self.send(line);
        let answer = self.receive();
        assert_eq!(answer["ok"], false);
        answer["error"].as_str().unwrap().to_owned()
    }
}

/// Bytes without a pattern.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length.next_multiple_of(8));
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Runs a test that must come to an end by itself.
pub(crate) fn within(seconds: u64, test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    // Under the test's own name, by which it says that it is skipped.
    let name = thread::current().name().unwrap_or_default().to_owned();
    let run = thread::Builder::new().name(name).spawn(move || {
        test();
        drop(done);
    });
    let run = run.expect("a thread can be started");
    match ended.recv_timeout(Duration::from_secs(seconds)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("not over after {seconds} s: a deadlock"),
        _ => run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// Waits until `holds`, for a bounded time.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(60) {
        if holds() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("did not come about within 60 s: {what}");
}
