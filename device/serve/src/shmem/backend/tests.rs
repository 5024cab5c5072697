//! A ring that is stopped while its request is under way, step by step.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use tokio::runtime::Runtime;
use vm_memory::{Bytes as _, GuestAddress};

use super::super::WindowFile;
use super::*;

const BYTES: usize = 1 << 20;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const REQUEST: u64 = 0x4000;
const BACK: [u64; 2] = [0x8000, 0xc000];
const SIZE: u16 = 64;
const ANSWER: &[u8] = b"{\"ok\":true}";

/// A guest's memory and its ring, with the device's guest port played by the test.
struct Guest {
    backend: Arc<Backend>,
    memory: Arc<Memory>,
    ring: Ring,
    port: UnixListener,
    _folder: tempfile::TempDir,
    _runtime: Runtime,
}

impl Guest {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let path = folder.path().join("guest.sock");
        let port = UnixListener::bind(&path).unwrap();
        let window = WindowFile { path: folder.path().join("window"), bytes: 4096 };
        let shown = Shown {
            windows: [window.clone(), window],
            identities: [(0, 0); 2],
            port: path,
            runtime: runtime.handle().clone(),
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES as u64).unwrap();
        let range = (GuestAddress(0), BYTES, Some(FileOffset::new(file, 0)));
        let memory = Memory::from_ranges_with_files([range]).unwrap();
        let ring = Ring::new(GuestMemoryAtomic::new(memory.clone()), SIZE).unwrap();
        let (backend, memory) = (Arc::new(Backend::new(Arc::new(shown))), Arc::new(memory));
        *lock(&backend.memory) = Arc::clone(&memory);
        Self { backend, memory, ring, port, _folder: folder, _runtime: runtime }
    }

    /// Starts the ring where so many requests were made and given back, as a monitor does.
    fn start(&self, taken: u16) {
        self.ring.set_queue_size(SIZE);
        self.ring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).unwrap();
        self.ring.set_queue_next_used(self.used());
        self.ring.set_queue_next_avail(taken);
        self.ring.set_queue_ready(true);
        self.ring.set_enabled(true);
    }

    /// What is done for `GET_VRING_BASE`: where the ring stands.
    fn stop(&self) -> u16 {
        self.ring.set_queue_ready(false);
        self.backend.stop_vring(0).unwrap();
        self.ring.queue_next_avail()
    }

    fn set_index(&self, ring: u64, index: u16) {
        self.memory.write_obj(index.to_le(), GuestAddress(ring + 2)).unwrap();
    }

    fn used(&self) -> u16 {
        u16::from_le(self.memory.read_obj(GuestAddress(USED + 2)).unwrap())
    }

    /// Makes the request number `index`, whose answer goes to `back`.
    fn submit(&self, index: u16, op: u32, text: &[u8], back: u64) {
        let request = [&op.to_le_bytes()[..], &[0; 28], text].concat();
        self.memory.write_slice(&request, GuestAddress(REQUEST)).unwrap();
        let length = u32::try_from(request.len()).unwrap();
        for (n, (at, length, flags)) in [(REQUEST, length, 1_u16), (back, 64, 2)].into_iter().enumerate() {
            let entry = DESCRIPTORS + 16 * n as u64;
            self.memory.write_obj(at.to_le(), GuestAddress(entry)).unwrap();
            self.memory.write_obj(length.to_le(), GuestAddress(entry + 8)).unwrap();
            self.memory.write_obj(flags.to_le(), GuestAddress(entry + 12)).unwrap();
            self.memory.write_obj(1_u16.to_le(), GuestAddress(entry + 14)).unwrap();
        }
        let slot = AVAILABLE + 4 + 2 * u64::from(index % SIZE);
        self.memory.write_obj(0_u16, GuestAddress(slot)).unwrap();
        self.set_index(AVAILABLE, index.wrapping_add(1));
    }

    /// The status, and as much of the text as [`ANSWER`] has.
    fn answer(&self, back: u64) -> (u32, Vec<u8>) {
        let mut text = vec![0; ANSWER.len()];
        self.memory.read_slice(&mut text, GuestAddress(back + 16)).unwrap();
        (u32::from_le(self.memory.read_obj(GuestAddress(back)).unwrap()), text)
    }

    /// Makes a request at a ring that stands at `index`, and lets `meanwhile` happen while the
    /// device has it and has not answered.
    fn asks(&self, index: u16, meanwhile: impl FnOnce()) {
        self.set_index(AVAILABLE, index);
        self.set_index(USED, index);
        self.start(index);
        self.submit(index, ASK, br#"{"op":"stats"}"#, BACK[0]);
        thread::scope(|scope| {
            let drained = scope.spawn(|| self.backend.drain(&self.ring));
            let mut device = self.asked();
            meanwhile();
            device.write_all(&[ANSWER, b"\n"].concat()).unwrap();
            drained.join().unwrap().unwrap();
        });
    }

    /// The device's connection, once it is asked.
    fn asked(&self) -> UnixStream {
        let (device, _) = self.port.accept().unwrap();
        BufReader::new(&device).read_until(b'\n', &mut Vec::new()).unwrap();
        device
    }
}

/// Where the first request of a guest is, and the one whose successor is number 0 again.
const INDICES: [u16; 2] = [0, u16::MAX];

#[test]
fn an_answer_that_comes_while_the_guest_is_paused_is_given_when_it_goes_on() {
    for index in INDICES {
        let guest = Guest::new();
        let mut stood = 0;
        guest.asks(index, || stood = guest.stop());
        assert_eq!((stood, guest.used()), (index.wrapping_add(1), index), "nothing is written to it");
        guest.start(stood);
        guest.backend.drain(&guest.ring).unwrap();
        assert_eq!(guest.used(), stood, "the request made at {index} is lost");
        assert_eq!(guest.answer(BACK[0]), (OK, ANSWER.to_vec()));
        // It is given once.
        guest.backend.drain(&guest.ring).unwrap();
        assert_eq!(guest.used(), stood);
    }
}

#[test]
fn an_answer_that_comes_after_a_pause_is_given_at_once() {
    for index in INDICES {
        let guest = Guest::new();
        guest.asks(index, || guest.start(guest.stop()));
        assert_eq!(guest.used(), index.wrapping_add(1), "the request made at {index} is lost");
        assert_eq!(guest.answer(BACK[0]), (OK, ANSWER.to_vec()));
    }
}

#[test]
fn a_ring_that_was_reset_gets_no_answer_of_before_whenever_that_comes() {
    for (index, early) in INDICES.into_iter().flat_map(|index| [(index, false), (index, true)]) {
        let guest = Guest::new();
        let reset = || {
            guest.set_index(AVAILABLE, 0);
            guest.set_index(USED, 0);
            guest.submit(0, 77, b"", BACK[1]);
            guest.start(0);
        };
        guest.asks(index, || {
            guest.stop();
            if early {
                reset();
            }
        });
        if !early {
            reset();
        }
        guest.backend.drain(&guest.ring).unwrap();
        let what = format!("asked at {index}, reset before the answer: {early}");
        assert_eq!(guest.used(), 1, "{what}");
        assert_eq!(guest.answer(BACK[1]).0, UNKNOWN, "{what}");
        assert_eq!(guest.answer(BACK[0]), (0, vec![0; ANSWER.len()]), "{what}");
    }
}
