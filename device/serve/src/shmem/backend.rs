//! One connection: what QEMU may set, the control queue, and what its requests do.
//!
//! * Requests are done one after the other, by the queue's thread. QEMU's messages are another
//!   thread's, and take nothing that a request holds for long.
//! * QEMU's table of memory has eight entries, of which each mapping takes one: more are refused
//!   here, because QEMU would map them and then lose the table.
//! * A window's file is opened for stores whatever the mapping is for: QEMU 11.1 maps it so, and
//!   has the guest's stores to views reach the device, which ignores them.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lamina_abi::shmem::{
    ASK, BASE, CONFIG_BYTES, FAILED, FLUSH, FULL, MAGIC, MALFORMED, MAP, MORE, OK, OVERLAP, RANGE, REGION,
    RESET, UNKNOWN, UNMAP, VERSION, VIEWS,
};
use rustix::fs::{AtFlags, FileType, StatxFlags, makedev, statx};
use serde_json::{Value, json};
use vhost::vhost_user::message::{
    VhostUserMMap, VhostUserMMapFlags, VhostUserProtocolFeatures, VhostUserShMemConfig,
};
use vhost::vhost_user::{Backend as Channel, VhostUserFrontendReqHandler};
use vhost_user_backend::{VhostUserBackend, VringState, VringT};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    FileOffset, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};

use super::Shown;
use super::mappings::{Mappings, Wrong};
use super::request::{Answer, Requested, parse, reply};
use crate::relay;
use crate::vhost_connections::{ExitEvents, Memory, Ring};

/// Entries the queue may have.
const QUEUE_SIZE: usize = 256;
/// Entries of QEMU's table of memory, as long as no more are negotiated.
const TABLE: usize = 8;

const RING_F_INDIRECT_DESC: u64 = 1 << 28;
const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

/// Why a ring is left alone.
#[derive(Debug, thiserror::Error)]
enum Left {
    #[error(transparent)]
    Ring(#[from] virtio_queue::Error),
    #[error("a file of the guest's memory is shorter than what was said of it")]
    Short,
}

/// A chain of descriptors in the guest's memory.
type Chain = virtio_queue::DescriptorChain<Arc<Memory>>;

/// How a ring was when a chain was taken of it.
#[derive(Clone, Copy)]
struct Taken {
    /// How often it had been taken away.
    stops: u64,
    /// Where the next chain is.
    next: u16,
    /// Where the next one given back goes.
    used: u16,
}

/// A request that is done and has to be given back.
struct Done {
    chain: Chain,
    taken: Taken,
    /// From where on the guest port's answer is given, or a status. None if it was no request.
    result: Option<Result<Option<u64>, u32>>,
}

/// A connection.
pub(super) struct Backend {
    shown: Arc<Shown>,
    /// The guest's memory without what is mapped from windows.
    memory: Mutex<Arc<Memory>>,
    /// Where mappings are asked of QEMU.
    channel: Mutex<Option<Channel>>,
    state: Mutex<State>,
    stopping: AtomicBool,
    /// How often the ring was taken away.
    stops: AtomicU64,
    exit_events: ExitEvents,
}

/// What requests leave behind.
#[derive(Default)]
struct State {
    mappings: Mappings,
    /// The last answer of the guest port.
    answer: Vec<u8>,
    /// What was done while the guest was paused. It is given back before anything else is done, so
    /// `answer` is still its own then.
    kept: Option<Done>,
}

impl State {
    /// The answer from there on; no answer if there is no such place.
    fn piece(&self, from: Option<u64>) -> Answer<'_> {
        let Some(from) = from else { return Answer::default() };
        let piece = usize::try_from(from).ok().and_then(|from| self.answer.get(from..));
        Answer { status: OK, total: self.answer.len() as u64, piece: piece.unwrap_or_default() }
    }
}

impl Backend {
    pub(super) fn new(shown: Arc<Shown>) -> Self {
        Self {
            shown,
            memory: Mutex::new(Arc::new(Memory::new())),
            channel: Mutex::default(),
            state: Mutex::default(),
            stopping: AtomicBool::new(false),
            stops: AtomicU64::new(0),
            exit_events: ExitEvents::default(),
        }
    }

    /// Begins no more requests. One that is under way may wait for QEMU, which may wait for this
    /// server: its answer is not waited for.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// Does everything that is in the ring.
    fn drain(&self, ring: &Ring) -> Result<(), Left> {
        while self.set_kicks(ring, false)? {
            while let Some(done) = self.done(ring)? {
                if !self.give_back(ring, done)? {
                    return Ok(());
                }
            }
            if !self.set_kicks(ring, true)? {
                break;
            }
        }
        Ok(())
    }

    /// What was done while the guest was paused, or else the next request, which is done now.
    fn done(&self, ring: &Ring) -> Result<Option<Done>, Left> {
        let mut state = lock(&self.state);
        if let Some(done) = state.kept.take() {
            return Ok(Some(done));
        }
        let Some((chain, taken)) = self.next(ring)? else { return Ok(None) };
        let result = match parse(chain.memory(), chain.clone()) {
            // A panic is logged by its hook; the guest gets an error like any other.
            Ok(requested) => {
                let performed = catch_unwind(AssertUnwindSafe(|| self.perform(&mut state, &requested)));
                Some(performed.unwrap_or(Err(FAILED)))
            }
            Err(why) => {
                tracing::debug!("a request is given back undone: {why}");
                None
            }
        };
        Ok(Some(Done { chain, taken, result }))
    }

    /// Gives a request back, or keeps it for a ring that is stopped: a monitor starts a ring with a
    /// kick, which has it looked at again. Returns whether the ring may have more.
    fn give_back(&self, ring: &Ring, done: Done) -> Result<bool, Left> {
        let mut state = lock(&self.state);
        let tell = {
            // Who takes the ring away waits for this lock, and so for the answer's copy, but never
            // for what was asked.
            let mut ring = ring.get_mut();
            if !ring.get_queue().ready() {
                state.kept = Some(done);
                return Ok(false);
            }
            if !self.is_still(ring.get_queue(), done.taken) {
                // It was set up anew: its memory is something else by now, and the head another
                // request's.
                return Ok(true);
            }
            let memory = done.chain.memory();
            check_length(memory)?;
            let written = match done.result {
                Some(Ok(from)) => reply(memory, done.chain.clone(), &state.piece(from)),
                Some(Err(status)) => {
                    reply(memory, done.chain.clone(), &Answer { status, ..Answer::default() })
                }
                None => 0,
            };
            ring.get_queue_mut().add_used(memory, done.chain.head_index(), written)?;
            ring.get_queue_mut().needs_notification(memory)?
        };
        if tell && let Err(why) = ring.signal_used_queue() {
            tracing::debug!("a guest could not be told: {why}");
        }
        Ok(true)
    }

    /// The guest's memory, as long as it is all there.
    fn memory(&self) -> Result<Arc<Memory>, Left> {
        let memory = Arc::clone(&lock(&self.memory));
        check_length(&memory)?;
        Ok(memory)
    }

    /// Whether requests are taken from a ring, and anything is written to it.
    fn is_on(&self, state: &VringState<GuestMemoryAtomic<Memory>>) -> bool {
        !self.stopping.load(Ordering::SeqCst) && state.get_queue().ready() && state.is_enabled()
    }

    /// Asks the guest for kicks or for none: whether the ring is to be looked at once more.
    fn set_kicks(&self, ring: &Ring, wanted: bool) -> Result<bool, Left> {
        let memory = self.memory()?;
        let mut state = ring.get_mut();
        if !self.is_on(&state) {
            return Ok(false);
        }
        let queue = state.get_queue_mut();
        if wanted {
            Ok(queue.enable_notification(&*memory)?)
        } else {
            queue.disable_notification(&*memory)?;
            Ok(true)
        }
    }

    /// Whether a ring is the one that a chain was taken of, which may have been paused since: then
    /// it stands where it stood, as nobody else takes anything of it. One that was reset has given
    /// back as much as it has taken, which is nothing.
    fn is_still(&self, queue: &Queue, taken: Taken) -> bool {
        let is_resumed = (queue.next_avail(), queue.next_used()) == (taken.next, taken.used);
        self.stops.load(Ordering::SeqCst) == taken.stops || is_resumed
    }

    /// The next chain, and how the ring was then.
    fn next(&self, ring: &Ring) -> Result<Option<(Chain, Taken)>, Left> {
        let memory = self.memory()?;
        let mut state = ring.get_mut();
        if !self.is_on(&state) {
            return Ok(None);
        }
        let chain = state.get_queue_mut().iter(memory)?.next();
        let queue = state.get_queue();
        let stops = self.stops.load(Ordering::SeqCst);
        let taken = Taken { stops, next: queue.next_avail(), used: queue.next_used() };
        Ok(chain.map(|chain| (chain, taken)))
    }

    /// Does what is asked: from where on the guest port's answer is given, if it is.
    fn perform(&self, state: &mut State, requested: &Requested) -> Result<Option<u64>, u32> {
        if !requested.text.is_empty() && requested.op != ASK {
            return Err(MALFORMED);
        }
        match requested.op {
            RESET => {
                for (at, length, writable) in state.mappings.take() {
                    // QEMU has forgotten it already if the guest's machine was reset.
                    if let Err(why) = self.unmap(at, length, writable) {
                        tracing::debug!("QEMU knows no mapping at {at:#x}: {why}");
                    }
                }
            }
            MAP => self.map(state, requested)?,
            UNMAP => {
                let writable = state.mappings.find(requested.at, requested.length).map_err(status)?;
                self.unmap(requested.at, requested.length, writable).map_err(refused)?;
                state.mappings.gone(requested.at);
            }
            FLUSH => {
                let bytes = self.shown.windows[0].bytes;
                let rest = bytes.checked_sub(requested.offset).ok_or(RANGE)?;
                let length = if requested.length == 0 { rest } else { requested.length };
                if length > rest {
                    return Err(RANGE);
                }
                let line = json!({ "op": "flush", "offset": requested.offset, "length": length });
                let answer = self.relay(line.to_string().into_bytes());
                let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
                if answer["ok"] != true {
                    tracing::warn!("a guest's flush failed: {answer}");
                    return Err(FAILED);
                }
            }
            ASK => {
                if requested.text.contains(&b'\n') || requested.text.trim_ascii().is_empty() {
                    return Err(MALFORMED);
                }
                state.answer = self.relay(requested.text.clone());
                return Ok(Some(0));
            }
            MORE => return Ok(Some(requested.offset)),
            _ => return Err(UNKNOWN),
        }
        Ok(None)
    }

    fn relay(&self, line: Vec<u8>) -> Vec<u8> {
        self.shown.runtime.block_on(relay::answer(&self.shown.port, line))
    }

    fn map(&self, state: &mut State, requested: &Requested) -> Result<(), u32> {
        let (window, writable) = match requested.window {
            BASE => (&self.shown.windows[0], true),
            VIEWS => (&self.shown.windows[1], false),
            _ => return Err(MALFORMED),
        };
        let room = TABLE.saturating_sub(lock(&self.memory).num_regions());
        let range = (requested.offset, requested.length);
        let region = self.shown.region_bytes();
        state.mappings.check(range, window.bytes, requested.at, region, room).map_err(status)?;
        let file = File::options().read(true).write(true).open(&window.path).map_err(refused)?;
        let mut message = message(requested.at, requested.length, writable);
        message.fd_offset = requested.offset;
        self.channel()?.shmem_map(&message, &file).map_err(refused)?;
        state.mappings.made(requested.at, requested.length, writable);
        Ok(())
    }

    fn unmap(&self, at: u64, length: u64, writable: bool) -> io::Result<()> {
        let channel = self.channel().map_err(|_| io::Error::other("there is no channel to QEMU"))?;
        channel.shmem_unmap(&message(at, length, writable)).map(drop)
    }

    fn channel(&self) -> Result<Channel, u32> {
        lock(&self.channel).clone().ok_or(FAILED)
    }

    /// Whether a file is a window's, or on one of these `mounts`. Looks at nothing that a mount
    /// would have to be asked for.
    fn is_ours(&self, file: &File, mounts: &[u64]) -> bool {
        let found = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        // What cannot be told is not touched either.
        found.map_or(true, |found| {
            let number = makedev(found.stx_dev_major, found.stx_dev_minor);
            mounts.contains(&number) || self.shown.identities.contains(&(number, found.stx_ino))
        })
    }
}

/// Checks that no region's file was cut since it was mapped: to touch what is missing is a SIGBUS,
/// which ends the process that holds the device. The library touches a ring without this when it is
/// set up. One that is cut between this and the touch still
/// does; only a monitor of this user can, and none whose memory is sealed (QEMU's memfd is).
fn check_length(memory: &Memory) -> Result<(), Left> {
    let is_whole = |file: &FileOffset, bytes: u64| {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        statx(file.file(), "", flags, StatxFlags::TYPE | StatxFlags::SIZE).is_ok_and(|found| {
            // What is no regular file says nothing of its length.
            FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile
                || file.start().checked_add(bytes).is_some_and(|end| end <= found.stx_size)
        })
    };
    let all =
        |region: &GuestRegionMmap<()>| region.file_offset().is_some_and(|file| is_whole(file, region.len()));
    if memory.iter().all(all) { Ok(()) } else { Err(Left::Short) }
}

/// Everything but where the bytes come from.
fn message(at: u64, length: u64, writable: bool) -> VhostUserMMap {
    let flags = if writable { VhostUserMMapFlags::WRITABLE } else { VhostUserMMapFlags::default() };
    VhostUserMMap {
        shmid: REGION,
        shm_offset: at,
        len: length,
        flags: flags.bits(),
        ..VhostUserMMap::default()
    }
}

fn status(wrong: Wrong) -> u32 {
    match wrong {
        Wrong::Malformed => MALFORMED,
        Wrong::Range => RANGE,
        Wrong::Overlap => OVERLAP,
        Wrong::Full => FULL,
        Wrong::Unknown => UNKNOWN,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "called by map_err")]
fn refused(why: io::Error) -> u32 {
    tracing::warn!("a mapping cannot be changed: {why}");
    FAILED
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // None is left half done by a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VhostUserBackend for Backend {
    type Bitmap = ();
    type Vring = Ring;

    fn num_queues(&self) -> usize {
        1
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        RING_F_INDIRECT_DESC | VHOST_USER_F_PROTOCOL_FEATURES | F_VERSION_1
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::SHMEM
    }

    fn set_event_idx(&self, _: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut space = MAGIC.to_vec();
        let [base, views] = &self.shown.windows;
        for number in [VERSION, base.bytes, views.bytes] {
            space.extend(number.to_le_bytes());
        }
        debug_assert_eq!(space.len(), CONFIG_BYTES as usize);
        let range = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
        let range = range.and_then(|(offset, size)| Some(offset..offset.checked_add(size)?));
        range.and_then(|range| space.get(range)).map(<[u8]>::to_vec).unwrap_or_default()
    }

    fn set_config(&self, _: u32, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        Ok(VhostUserShMemConfig::new(1, &[self.shown.region_bytes()]))
    }

    fn set_backend_req_fd(&self, channel: Channel) {
        *lock(&self.channel) = Some(channel);
    }

    fn update_memory(&self, memory: GuestMemoryAtomic<Memory>) -> io::Result<()> {
        let whole = memory.memory();
        let mounts = self.shown.mount_numbers()?;
        let windows = whole.iter().filter(|region| {
            // The guest's own memory is a file too, or this server could not have it.
            region.file_offset().is_none_or(|file| self.is_ours(file.file(), &mounts))
        });
        let mut own = Memory::clone(&whole);
        for region in windows {
            (own, _) = own.remove_region(region.start_addr(), region.len()).map_err(io::Error::other)?;
        }
        tracing::debug!(all = whole.num_regions(), own = own.num_regions(), "the guest's memory");
        *lock(&self.memory) = Arc::new(own.clone());
        // The library reads a ring's index where the monitor says that it lies.
        memory.lock().unwrap_or_else(PoisonError::into_inner).replace(own);
        Ok(())
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        self.exit_events.add()
    }

    fn stop_vring(&self, _: u32) -> io::Result<()> {
        self.stops.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn handle_event(&self, event: u16, _: EventSet, rings: &[Ring], _: usize) -> io::Result<()> {
        // An error would end the queue's thread.
        if let (0, Some(ring)) = (event, rings.first())
            && let Err(why) = self.drain(ring)
        {
            tracing::debug!("a control queue is left alone until it is kicked again: {why}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
