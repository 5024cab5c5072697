//! Windows mapped on request, from the side of a QEMU and its guest.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lamina_abi::shmem::{
    ASK, BASE, CONFIG_BYTES, FAILED, FLUSH, FULL, MAGIC, MALFORMED, MAP, MORE, OK, OVERLAP, RANGE, RESET,
    UNKNOWN, UNMAP, VIEWS,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserMMap;
use vhost::vhost_user::{Error, Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontendReqHandlerMut};
use vm_memory::{Bytes, GuestAddress};

use crate::common::{BASE as BASE_BYTES, Rig, VIEWS as VIEWS_BYTES, eventually, within};
use crate::deaths::{descriptors, kill_worker, worker};
use crate::disk_driver::{DATA, Driver, MEMORY, Part};

const PAGE: u64 = 4096;
/// Where answers go.
const BACK: u64 = DATA + (1 << 20);

/// What a QEMU notes of mappings: inode of the file, offset in it, place, length.
#[derive(Default)]
struct Noted {
    mapped: BTreeSet<(u64, u64, u64, u64)>,
    refuse: bool,
}

impl VhostUserFrontendReqHandlerMut for Noted {
    fn shmem_map(&mut self, requested: &VhostUserMMap, file: &dyn AsRawFd) -> HandlerResult<u64> {
        if self.refuse {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        assert_eq!(requested.shmid, 0);
        // SAFETY: the descriptor came with the request, and is open as long as that is handled.
        let file = unsafe { BorrowedFd::borrow_raw(file.as_raw_fd()) };
        let inode = File::from(file.try_clone_to_owned()?).metadata()?.ino();
        assert!(self.mapped.insert((inode, requested.fd_offset, requested.shm_offset, requested.len)));
        Ok(0)
    }

    fn shmem_unmap(&mut self, requested: &VhostUserMMap) -> HandlerResult<u64> {
        let (at, length) = (requested.shm_offset, requested.len);
        let found = self.mapped.iter().find(|(_, _, place, bytes)| (*place, *bytes) == (at, length)).copied();
        self.mapped.remove(&found.ok_or(io::ErrorKind::NotFound)?);
        Ok(0)
    }
}

/// A device, and a guest of it.
struct Guest {
    rig: Rig,
    noted: Arc<Mutex<Noted>>,
    driver: Driver,
}

impl Guest {
    fn new() -> Self {
        Self::with(&[])
    }

    fn with(more: &[&str]) -> Self {
        let rig = Rig::prepared(|place, command| {
            command.arg("--vhost-user-shmem").arg(place.path("shmem.sock")).args(more);
        });
        let noted = Arc::new(Mutex::new(Noted::default()));
        let mut channel = FrontendReqHandler::new(Arc::clone(&noted)).unwrap();
        channel.set_reply_ack_flag(true);
        let ours = channel.get_tx_raw_fd();
        // SAFETY: the channel is open until the thread below has it.
        let ours = unsafe { BorrowedFd::borrow_raw(ours) }.try_clone_to_owned().unwrap();
        // Ends with the connection; a refusal is answered and told here too.
        thread::spawn(
            move || while matches!(channel.handle_request(), Ok(_) | Err(Error::ReqHandlerError(_))) {},
        );
        let driver = Driver::with_channel(&rig.place.path("shmem.sock"), &ours);
        Self { rig, noted, driver }
    }

    /// Makes a request and returns the status, the answer's length and its piece.
    fn ask(&mut self, op: u32, window: u32, numbers: [u64; 3], text: &[u8]) -> (u32, u64, Vec<u8>) {
        let mut request = [op.to_le_bytes(), window.to_le_bytes()].concat();
        request.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        request.extend(text);
        self.driver.memory.write_slice(&request, GuestAddress(DATA)).unwrap();
        let length = u32::try_from(request.len()).unwrap();
        let written = self.exchange(DATA, length, 16 + (64 << 10));
        let mut answer = vec![0; written as usize];
        self.driver.memory.read_slice(&mut answer, GuestAddress(BACK)).unwrap();
        let total = u64::from_le_bytes(answer[8..16].try_into().unwrap());
        (u32::from_le_bytes(answer[..4].try_into().unwrap()), total, answer.split_off(16))
    }

    /// A request of `length` bytes at `at`, and so much room for its answer: the bytes written.
    fn exchange(&mut self, at: u64, length: u32, room: u32) -> u32 {
        let parts = [Part { at, length, write: false }, Part { at: BACK, length: room, write: true }];
        let head = self.driver.submit(&parts, None);
        self.driver.kick();
        let (given, written) = self.driver.take();
        assert_eq!(given, u32::from(head));
        written
    }

    fn map(&mut self, window: u32, offset: u64, length: u64, at: u64) -> u32 {
        self.ask(MAP, window, [offset, length, at], b"").0
    }

    fn mapped(&self) -> Vec<(u64, u64, u64, u64)> {
        self.noted.lock().unwrap().mapped.iter().copied().collect()
    }

    fn inode(&self, name: &str) -> u64 {
        self.rig.place.path(&format!("mount/{name}")).metadata().unwrap().ino()
    }
}

#[test]
fn what_a_guest_asks_for_is_mapped_from_the_mounts_files_and_the_rest_refused() {
    within(120, || {
        let mut guest = Guest::new();
        let space = guest.driver.config(0, CONFIG_BYTES as usize);
        let sizes: Vec<u8> =
            [1, BASE_BYTES, VIEWS_BYTES].iter().flat_map(|number| number.to_le_bytes()).collect();
        assert_eq!(space, [&MAGIC[..], &sizes].concat());
        let region = guest.driver.region_bytes();
        assert_eq!(region, 256 << 20);

        let (base, views) = (guest.inode("base"), guest.inode("views"));
        assert_eq!(guest.map(BASE, 0, BASE_BYTES, 0), OK);
        assert_eq!(guest.map(VIEWS, 2 << 20, PAGE, region - PAGE), OK);
        let both = [(base, 0, 0, BASE_BYTES), (views, 2 << 20, region - PAGE, PAGE)];
        assert_eq!(BTreeSet::from_iter(guest.mapped()), BTreeSet::from(both));
        for (window, offset, length, at, status) in [
            (2, 0, PAGE, BASE_BYTES, MALFORMED),
            (BASE, 0, 0, BASE_BYTES, MALFORMED),
            (BASE, 8, PAGE, BASE_BYTES, MALFORMED),
            (BASE, 0, PAGE, BASE_BYTES + 8, MALFORMED),
            (BASE, BASE_BYTES, PAGE, BASE_BYTES, RANGE),
            (BASE, PAGE, u64::MAX - PAGE + 1, BASE_BYTES, RANGE),
            (BASE, 0, PAGE, region, RANGE),
            (BASE, 0, PAGE, u64::MAX - PAGE + 1, RANGE),
            (BASE, 0, 2 * PAGE, BASE_BYTES - PAGE, OVERLAP),
            (VIEWS, 0, PAGE, region - PAGE, OVERLAP),
        ] {
            assert_eq!(
                guest.map(window, offset, length, at),
                status,
                "{window} {offset:#x} {length:#x} {at:#x}"
            );
        }
        for (length, at) in [(PAGE, 0), (BASE_BYTES, PAGE), (0, 0), (PAGE, u64::MAX)] {
            assert_eq!(guest.ask(UNMAP, 0, [0, length, at], b"").0, UNKNOWN);
        }
        assert_eq!(guest.ask(MAP, BASE, [0, PAGE, BASE_BYTES], b"text").0, MALFORMED);
        assert_eq!(guest.ask(77, 0, [0; 3], b"").0, UNKNOWN);
        assert_eq!(BTreeSet::from_iter(guest.mapped()), BTreeSet::from(both));

        // The guest's own memory takes one of the eight places that QEMU has.
        for n in 0..5 {
            assert_eq!(guest.map(BASE, 0, PAGE, BASE_BYTES + n * PAGE), OK);
        }
        assert_eq!(guest.map(BASE, 0, PAGE, BASE_BYTES + 5 * PAGE), FULL);
        assert_eq!(guest.ask(UNMAP, 0, [0, PAGE, region - PAGE], b"").0, OK);
        guest.noted.lock().unwrap().refuse = true;
        assert_eq!(guest.map(BASE, 0, PAGE, region - PAGE), FAILED);
        guest.noted.lock().unwrap().refuse = false;
        assert_eq!(guest.map(BASE, 0, PAGE, region - PAGE), OK);
        assert_eq!(guest.ask(RESET, 0, [0; 3], b"").0, OK);
        assert_eq!(guest.mapped(), []);
        assert_eq!(guest.map(VIEWS, 0, VIEWS_BYTES, PAGE), OK);
    });
}

#[test]
fn nothing_is_read_through_what_is_mapped_and_nonsense_comes_back() {
    within(120, || {
        let mut guest = Guest::new();
        let base = File::options().read(true).write(true).open(guest.rig.place.path("mount/base")).unwrap();
        guest.driver.also(MEMORY, BASE_BYTES, &base);
        // The window is guest memory now, and still no place for a request, or an answer.
        assert_eq!(guest.exchange(MEMORY, 32, 16), 0);
        assert_eq!(guest.exchange(MEMORY - 16, 32, 16), 0);
        for (length, room) in [(31, 16), (0, 16), (32, 15), (32, 0), (32 + (64 << 10) + 1, 16)] {
            assert_eq!(guest.exchange(DATA, length, room), 0, "{length} {room}");
        }
        assert_eq!(guest.exchange(1 << 40, 32, 16), 0);
        assert_eq!(guest.map(BASE, 0, PAGE, 0), OK);
        guest.rig.run.signal(Signal::SIGTERM);
        assert!(guest.rig.run.end().success());
        assert!(!guest.rig.place.path("shmem.sock").exists());
    });
}

#[test]
fn lines_and_flushes_reach_the_device_whichever_worker_it_has() {
    within(120, || {
        let mut guest = Guest::new();
        let view = guest.rig.view("full");
        let (status, total, text) = guest.ask(ASK, 0, [0; 3], br#"{"op":"views"}"#);
        assert_eq!((status, total), (OK, text.len() as u64));
        let views: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(views["views"][0]["offset"], view.offset);
        let (status, again, rest) = guest.ask(MORE, 0, [10, 0, 0], b"");
        assert_eq!((status, again, &rest[..]), (OK, total, &text[10..]));
        for from in [total + 1, u64::MAX] {
            assert_eq!(guest.ask(MORE, 0, [from, 0, 0], b""), (OK, total, Vec::new()));
        }
        for line in [&b""[..], b" ", b"{}\n{}"] {
            assert_eq!(guest.ask(ASK, 0, [0; 3], line).0, MALFORMED);
        }

        let base = File::options().write(true).open(guest.rig.place.path("mount/base")).unwrap();
        let shown = File::open(guest.rig.place.path("mount/views")).unwrap();
        let mut read = vec![0; guest.rig.bytes.len()];
        for (round, range) in [[0, 0], [4096, 4096], [0, BASE_BYTES]].into_iter().enumerate() {
            shown.read_exact_at(&mut read, view.offset).unwrap();
            assert!(read == guest.rig.bytes);
            let text = format!("round {round}");
            base.write_all_at(text.as_bytes(), 5000).unwrap();
            guest.rig.bytes[5000..5000 + text.len()].copy_from_slice(text.as_bytes());
            assert_eq!(guest.ask(FLUSH, 0, [range[0], range[1], 0], b"").0, OK);
            shown.read_exact_at(&mut read, view.offset).unwrap();
            assert!(read == guest.rig.bytes, "{text}");
            kill_worker(&guest.rig.run);
        }
        for range in [[BASE_BYTES + 1, 0], [0, BASE_BYTES + 1], [u64::MAX, 1], [1, u64::MAX]] {
            assert_eq!(guest.ask(FLUSH, 0, [range[0], range[1], 0], b"").0, RANGE);
        }
        assert_eq!(guest.map(BASE, 0, PAGE, 0), OK);
    });
}

#[test]
fn nothing_is_read_through_a_file_of_the_devices_either() {
    within(60, || {
        for more in [&["--files", "8M"][..], &["--files", "8M", "--write-cache"]] {
            let mut guest = Guest::with(more);
            let path = guest.rig.place.path("mount/files/memory");
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            file.set_len(1 << 20).unwrap();
            guest.driver.also(MEMORY, 1 << 20, &file);
            assert_eq!(guest.exchange(MEMORY, 32, 16), 0, "{more:?}");
            assert_eq!(guest.ask(77, 0, [0; 3], b"").0, UNKNOWN);
        }
    });
}

#[test]
fn a_guest_whose_memory_is_cut_short_is_left_alone_and_the_device_lives() {
    within(60, || {
        let mut guest = Guest::new();
        assert_eq!(guest.ask(77, 0, [0; 3], b"").0, UNKNOWN);
        let parts = [
            Part { at: DATA, length: 32, write: false },
            Part { at: MEMORY - PAGE, length: 16, write: true },
        ];
        let head = guest.driver.submit(&parts, None);
        guest.driver.resize(MEMORY - PAGE);
        guest.driver.kick();
        thread::sleep(Duration::from_millis(300));
        assert_eq!(guest.driver.used_index(), 1);
        // As soon as it is whole again, it is served.
        guest.driver.resize(MEMORY);
        guest.driver.kick();
        assert_eq!(guest.driver.take(), (u32::from(head), 16));
        guest.driver.submit(&parts, None);
        guest.driver.resize(0);
        guest.driver.kick();
        thread::sleep(Duration::from_millis(300));
        assert_eq!(guest.rig.ask("GET", "/tensors", &Value::Null).as_array().unwrap().len(), 1);
        assert!(guest.rig.base().load(0, 4096) == guest.rig.bytes[..4096]);
    });
}

#[test]
fn a_guest_that_was_reset_gets_nothing_of_what_it_asked_before() {
    within(60, || {
        let (Guest { rig: _rig, mut driver, .. }, _, worker) = waits_for_an_answer();
        // It waits for no worker.
        driver.restart(0xee);
        driver
            .memory
            .write_slice(&[&77_u32.to_le_bytes()[..], &[0; 28]].concat(), GuestAddress(DATA))
            .unwrap();
        let back = BACK + (1 << 20);
        let parts = [Part { at: DATA, length: 32, write: false }, Part { at: back, length: 16, write: true }];
        let head = driver.submit(&parts, None);
        driver.kick();
        kill(worker, Signal::SIGCONT).unwrap();
        assert_eq!(driver.take(), (u32::from(head), 16));
        let status: u32 = driver.memory.read_obj(GuestAddress(back)).unwrap();
        assert_eq!(u32::from_le(status), UNKNOWN);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(driver.used_index(), 1);
        let mut old = vec![0; 64 << 10];
        driver.memory.read_slice(&mut old, GuestAddress(BACK)).unwrap();
        assert!(old.iter().all(|byte| *byte == 0xee), "an old answer is written over new memory");
    });
}

/// A guest that asks while no worker answers: the request's head, and the worker to go on.
fn waits_for_an_answer() -> (Guest, u16, Pid) {
    let mut guest = Guest::new();
    let ask = [&ASK.to_le_bytes()[..], &[0; 28], br#"{"op":"stats"}"#].concat();
    let driver = &mut guest.driver;
    driver.memory.write_slice(&ask, GuestAddress(DATA)).unwrap();
    let worker = Pid::from_raw(worker(guest.rig.run.child.id()));
    kill(worker, Signal::SIGSTOP).unwrap();
    let length = u32::try_from(ask.len()).unwrap();
    let parts =
        [Part { at: DATA, length, write: false }, Part { at: BACK, length: 16 + (64 << 10), write: true }];
    let head = driver.submit(&parts, None);
    driver.kick();
    eventually("a request taken", || driver.is_looked_at());
    thread::sleep(Duration::from_millis(100));
    (guest, head, worker)
}

#[test]
fn a_guest_that_was_paused_gets_what_it_asked_before() {
    within(60, || {
        let (Guest { rig: _rig, mut driver, .. }, head, worker) = waits_for_an_answer();
        driver.pause();
        kill(worker, Signal::SIGCONT).unwrap();
        let (given_back, bytes) = driver.take();
        assert!(given_back == u32::from(head) && bytes > 16, "{given_back}, {bytes}");
        let status: u32 = driver.memory.read_obj(GuestAddress(BACK)).unwrap();
        assert_eq!(u32::from_le(status), OK);
    });
}

#[test]
fn a_guest_that_waits_for_another_to_go_is_told_of_in_the_log() {
    within(60, || {
        let mut guest = Guest::new();
        assert_eq!(guest.ask(77, 0, [0; 3], b"").0, UNKNOWN);
        let socket = guest.rig.place.path("shmem.sock");
        let mut log = BufReader::new(guest.rig.run.child.stderr.take().unwrap()).lines();
        let waits = thread::spawn({
            let socket = socket.clone();
            move || Frontend::connect(&socket, 1).unwrap().get_features().unwrap()
        });
        let said = log.find(|line| line.as_ref().is_ok_and(|line| line.contains("another connection waits")));
        let said = said.expect("a line of the log").unwrap();
        assert!(said.contains("shmem.sock"), "{said}");
        // The log is read to its end: nobody may wait for its reader.
        thread::spawn(move || log.for_each(drop));
        drop(guest.driver);
        assert_ne!(waits.join().unwrap(), 0);
    });
}

#[test]
fn connections_leave_nothing_open() {
    within(60, || {
        let Guest { rig, driver, .. } = Guest::new();
        drop(driver);
        let holder = i32::try_from(rig.run.child.id()).unwrap();
        let socket = rig.place.path("shmem.sock");
        // One after the other: who is answered is the only one.
        let connect = || Frontend::connect(&socket, 1).unwrap().get_features().unwrap();
        connect();
        thread::sleep(Duration::from_millis(500));
        let before = descriptors(holder);
        for _ in 0..50 {
            connect();
        }
        eventually("closed connections", || descriptors(holder) <= before);
    });
}
