//! A guest's side of a disk, small enough to misbehave: its memory, one queue, and the monitor's
//! end of vhost-user.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;
pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;
/// A status byte that nobody has written.
pub(crate) const UNTOUCHED: u8 = 0xee;

pub(crate) const QUEUE_SIZE: u16 = 256;
pub(crate) const MEMORY: u64 = 16 << 20;
/// Where the monitor says that guest memory lies in its own address space.
const MONITOR: u64 = 0x7000_0000_0000;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x6000;
const USED: u64 = 0x8000;
/// Where data begins.
pub(crate) const DATA: u64 = 0x1_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) at: u64,
    pub(crate) length: u32,
    /// Whether the device writes it.
    pub(crate) write: bool,
}

/// A guest with a disk.
pub(crate) struct Driver {
    frontend: Frontend,
    pub(crate) memory: GuestMemoryMmap<()>,
    file: File,
    kick: EventFd,
    call: EventFd,
    /// Requests made available, ever.
    made: u16,
    /// Requests taken back, ever.
    taken: u16,
    /// The next free descriptor.
    descriptor: u16,
}

impl Driver {
    /// A new guest, connected to the disk at `socket`.
    pub(crate) fn connect(socket: &Path) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(MEMORY).unwrap();
        Self::with_memory(socket, file)
    }

    pub(crate) fn with_memory(socket: &Path, file: File) -> Self {
        let length = usize::try_from(MEMORY).unwrap();
        let range = (GuestAddress(0), length, Some(FileOffset::new(file.try_clone().unwrap(), 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let frontend = Frontend::connect(socket, 8).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let (kick, call) = (event(), event());
        Self { frontend, memory, file, kick, call, made: 0, taken: 0, descriptor: 0 }.started()
    }

    /// The same guest after its disk's server went away: what QEMU does when the socket answers
    /// again.
    pub(crate) fn reconnect(mut self, socket: &Path) -> Self {
        self.frontend = Frontend::connect(socket, 8).unwrap();
        self.started()
    }

    /// A guest of a device with shared memory and one queue, which asks its monitor back at the
    /// other end of `channel`.
    pub(crate) fn with_channel(socket: &Path, channel: &impl AsRawFd) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(MEMORY).unwrap();
        let length = usize::try_from(MEMORY).unwrap();
        let range = (GuestAddress(0), length, Some(FileOffset::new(file.try_clone().unwrap(), 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let mut frontend = Frontend::connect(socket, 1).unwrap();
        let features = frontend.get_features().unwrap();
        frontend.set_owner().unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::SHMEM | VhostUserProtocolFeatures::BACKEND_REQ));
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_features(features).unwrap();
        frontend.set_backend_request_fd(channel).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let (kick, call) = (event(), event());
        let mut driver = Self { frontend, memory, file, kick, call, made: 0, taken: 0, descriptor: 0 };
        driver.try_start().unwrap();
        driver
    }

    /// Bytes of the only region of shared memory.
    pub(crate) fn region_bytes(&mut self) -> u64 {
        let config = self.frontend.get_shmem_config().unwrap();
        assert_eq!(config.nregions, 1);
        config.memory_sizes[0]
    }

    /// Gives the device the guest's memory anew, with a file at `at` in addition.
    pub(crate) fn also(&self, at: u64, bytes: u64, file: &File) {
        let region = |guest_phys_addr, memory_size, file: &File| VhostUserMemoryRegionInfo {
            guest_phys_addr,
            memory_size,
            userspace_addr: MONITOR + guest_phys_addr,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region(0, MEMORY, &self.file), region(at, bytes, file)]).unwrap();
    }

    fn started(mut self) -> Self {
        let features = self.frontend.get_features().unwrap();
        assert_eq!(features >> 28 & 0b10111, 0b10111, "indirect, EVENT_IDX, protocol features, version 1");
        self.frontend.set_owner().unwrap();
        let protocol = self.frontend.get_protocol_features().unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ));
        self.frontend.set_protocol_features(protocol).unwrap();
        assert_eq!(self.frontend.get_queue_num().unwrap(), 8);
        self.frontend.set_features(features).unwrap();
        self.try_start().unwrap();
        self
    }

    /// Gives the memory and starts the ring where the used index says.
    fn try_start(&mut self) -> Result<(), vhost::Error> {
        self.try_start_at(self.used_index())
    }

    fn try_start_at(&mut self, base: u16) -> Result<(), vhost::Error> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY,
            userspace_addr: MONITOR,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region])?;
        self.frontend.set_vring_num(0, QUEUE_SIZE)?;
        let ring = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: MONITOR + DESCRIPTORS,
            used_ring_addr: MONITOR + USED,
            avail_ring_addr: MONITOR + AVAILABLE,
            log_addr: None,
        };
        self.frontend.set_vring_addr(0, &ring)?;
        self.frontend.set_vring_base(0, base)?;
        self.frontend.set_vring_call(0, &self.call)?;
        self.frontend.set_vring_kick(0, &self.kick)?;
        self.frontend.set_vring_enable(0, true)
    }

    /// Whether the disk refuses this guest's memory.
    pub(crate) fn is_refused(socket: &Path, memory: File) -> bool {
        let frontend = Frontend::connect(socket, 8).unwrap();
        let features = frontend.get_features().unwrap();
        frontend.set_owner().unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let unused = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 65536)]).unwrap();
        let (kick, call) = (event(), event());
        let mut driver =
            Self { frontend, memory: unused, file: memory, kick, call, made: 0, taken: 0, descriptor: 0 };
        let protocol = driver.frontend.get_protocol_features().unwrap();
        driver.frontend.set_protocol_features(protocol).unwrap();
        driver.frontend.set_features(features).unwrap();
        // Not every message is answered; the last one is.
        driver.try_start().is_err() || driver.frontend.get_vring_base(0).is_err()
    }

    /// A part of the configuration space.
    pub(crate) fn config(&mut self, offset: u32, length: usize) -> Vec<u8> {
        let length = u32::try_from(length).unwrap();
        let space = vec![0; length as usize];
        self.frontend.get_config(offset, length, VhostUserConfigFlags::WRITABLE, &space).unwrap().1
    }

    /// Stops the ring and returns where it stands.
    pub(crate) fn stop(&mut self) -> u32 {
        self.frontend.get_vring_base(0).unwrap()
    }

    /// Stops the ring and has it go on where it stands, as a monitor does that pauses its guest.
    pub(crate) fn pause(&mut self) {
        let at = self.stop();
        self.try_start_at(u16::try_from(at).unwrap()).unwrap();
    }

    /// Stops the ring, overwrites the guest's memory with `byte`, and starts a ring anew there, as
    /// a guest does that was reset.
    pub(crate) fn restart(&mut self, byte: u8) {
        self.stop();
        let whole = vec![byte; usize::try_from(MEMORY - DATA).unwrap()];
        self.memory.write_slice(&whole, GuestAddress(DATA)).unwrap();
        self.memory.write_slice(&vec![0; usize::try_from(DATA).unwrap()], GuestAddress(0)).unwrap();
        (self.made, self.taken, self.descriptor) = (0, 0, 0);
        let _ = self.call.read();
        self.try_start().unwrap();
    }

    /// Whether the device asks for no kicks, because it looks at the ring.
    pub(crate) fn is_looked_at(&self) -> bool {
        self.memory.load::<u16>(GuestAddress(USED), Ordering::Acquire).unwrap() == 1
    }

    /// Gives the file of the guest's memory this length. What is behind may not be touched any
    /// more, here neither.
    pub(crate) fn resize(&self, bytes: u64) {
        self.file.set_len(bytes).unwrap();
    }

    /// The index behind the last request given back.
    pub(crate) fn used_index(&self) -> u16 {
        self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap()
    }

    /// Makes a chain of these descriptors available, directly or through an indirect table, without
    /// a kick.
    pub(crate) fn submit(&mut self, parts: &[Part], indirect: Option<u64>) -> u16 {
        let head = self.descriptor;
        let flags = |n: usize, part: &Part| {
            (if part.write { WRITE } else { 0 }) | (if n + 1 < parts.len() { NEXT } else { 0 })
        };
        if let Some(table) = indirect {
            for (n, part) in parts.iter().enumerate() {
                self.describe(table, n, part.at, part.length, flags(n, part), u16::try_from(n + 1).unwrap());
            }
            let length = u32::try_from(parts.len() * 16).unwrap();
            self.describe(DESCRIPTORS, head.into(), table, length, INDIRECT, 0);
            self.descriptor = (head + 1) % QUEUE_SIZE;
        } else {
            for (n, part) in parts.iter().enumerate() {
                let this = (usize::from(head) + n) % usize::from(QUEUE_SIZE);
                let next = u16::try_from((this + 1) % usize::from(QUEUE_SIZE)).unwrap();
                self.describe(DESCRIPTORS, this, part.at, part.length, flags(n, part), next);
            }
            self.descriptor =
                u16::try_from((usize::from(head) + parts.len()) % usize::from(QUEUE_SIZE)).unwrap();
        }
        self.make_available(head);
        head
    }

    /// Writes a descriptor.
    pub(crate) fn describe(&self, table: u64, n: usize, at: u64, length: u32, flags: u16, next: u16) {
        let place = GuestAddress(table + 16 * n as u64);
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&at.to_le_bytes());
        raw[8..12].copy_from_slice(&length.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&raw, place).unwrap();
    }

    pub(crate) fn make_available(&mut self, head: u16) {
        let slot = AVAILABLE + 4 + 2 * u64::from(self.made % QUEUE_SIZE);
        self.memory.write_obj(head.to_le(), GuestAddress(slot)).unwrap();
        self.made = self.made.wrapping_add(1);
        // An interrupt is wanted for the next request given back.
        let event = AVAILABLE + 4 + 2 * u64::from(QUEUE_SIZE);
        self.memory.write_obj(self.taken.to_le(), GuestAddress(event)).unwrap();
        self.set_available(self.made);
    }

    /// Claims that so many requests were made available.
    pub(crate) fn set_available(&self, index: u16) {
        self.memory.store(index.to_le(), GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
    }

    /// Requests made available so far.
    pub(crate) fn made(&self) -> u16 {
        self.made
    }

    pub(crate) fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Takes the next request back: its head and the bytes written, as soon as the guest is told of
    /// it.
    pub(crate) fn take(&mut self) -> (u32, u32) {
        let begun = Instant::now();
        while self.used_index() == self.taken {
            assert!(begun.elapsed() < Duration::from_secs(20), "a request is not given back");
            let event = AVAILABLE + 4 + 2 * u64::from(QUEUE_SIZE);
            self.memory.write_obj(self.taken.to_le(), GuestAddress(event)).unwrap();
            fence(Ordering::SeqCst);
            if self.used_index() != self.taken {
                break;
            }
            let borrowed = Borrowed(&self.call);
            let mut call = [PollFd::new(borrowed.as_fd(), PollFlags::POLLIN)];
            let reported = poll(&mut call, PollTimeout::from(10_000_u16)).unwrap();
            assert!(reported == 1, "the guest is not told within 10 s");
            let _ = self.call.read();
        }
        let entry: [u8; 8] =
            self.memory.read_obj(GuestAddress(USED + 4 + 8 * u64::from(self.taken % QUEUE_SIZE))).unwrap();
        self.taken = self.taken.wrapping_add(1);
        let number = |part: &[u8]| u32::from_le_bytes(part.try_into().unwrap());
        (number(&entry[..4]), number(&entry[4..]))
    }

    /// Writes a request's header.
    pub(crate) fn header(&self, at: u64, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.write_slice(&header, GuestAddress(at)).unwrap();
    }

    /// Makes a request the usual way and takes its answer: the status and the bytes that the device
    /// wrote.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> (u8, Vec<u8>) {
        self.cut_request(kind, sector, out, room, &[], false)
    }

    /// The same with all that is read and all that is written, header and status included, cut at
    /// these places.
    pub(crate) fn cut_request(
        &mut self,
        kind: u32,
        sector: u64,
        out: &[u8],
        room: usize,
        cuts: &[usize],
        indirect: bool,
    ) -> (u8, Vec<u8>) {
        self.header(DATA, kind, sector);
        self.memory.write_slice(out, GuestAddress(DATA + 16)).unwrap();
        let back = (DATA + 16 + out.len() as u64).next_multiple_of(4096) + 8;
        self.memory.write_slice(&vec![UNTOUCHED; room + 1], GuestAddress(back)).unwrap();
        let mut parts = pieces(DATA, 16 + out.len(), cuts, false);
        parts.extend(pieces(back, room + 1, cuts, true));
        let table = (back + room as u64 + 1).next_multiple_of(16);
        let head = self.submit(&parts, indirect.then_some(table));
        self.kick();
        let (given, length) = self.take();
        assert_eq!(given, u32::from(head));
        assert!(length as usize <= room + 1 && length > 0);
        let mut answer = vec![0; room + 1];
        self.memory.read_slice(&mut answer, GuestAddress(back)).unwrap();
        let status = answer.pop().unwrap();
        (status, answer)
    }

    pub(crate) fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let (status, bytes) = self.request(IN, offset / 512, &[], length);
        assert_eq!(status, OK);
        bytes
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        assert_eq!(self.request(OUT, offset / 512, bytes, 0).0, OK);
    }
}

/// An event's descriptor, borrowed.
struct Borrowed<'e>(&'e EventFd);

impl AsFd for Borrowed<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open for as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}

/// Descriptors of `length` bytes at `at`, cut at those of `cuts` that fall inside.
fn pieces(at: u64, length: usize, cuts: &[usize], write: bool) -> Vec<Part> {
    let mut edges: Vec<usize> = cuts.iter().copied().filter(|cut| (1..length).contains(cut)).collect();
    edges.extend([0, length]);
    edges.sort_unstable();
    edges.dedup();
    let part = |pair: &[usize]| Part {
        at: at + pair[0] as u64,
        length: u32::try_from(pair[1] - pair[0]).unwrap(),
        write,
    };
    edges.windows(2).map(part).collect()
}
