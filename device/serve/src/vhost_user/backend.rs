//! One connection: what the monitor at its other end may set, and the queues' threads.
//!
//! * Each queue has a thread. `GET_VRING_BASE` waits for the request that a queue is doing, the end
//!   of a connection for the piece of it, and only for a time.
//! * Guest memory that is a file of our own mounts is refused: a process that serves a mount must
//!   not touch it through a mapping.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::VhostUserBackend;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};

use crate::own_mount::device_of;
use crate::vhost_connections::{ExitEvents, Memory, Ring};

use super::config::{self, QUEUE_SIZE, QUEUES};
use super::disk::Disk;
use super::queue::Queue;

/// A disk and one connection to it.
pub(super) struct Backend {
    disk: Arc<Disk>,
    memory: GuestMemoryAtomic<Memory>,
    queues: Vec<Mutex<Queue>>,
    stopping: AtomicBool,
    exit_events: ExitEvents,
}

impl Backend {
    pub(super) fn new(disk: Arc<Disk>, memory: GuestMemoryAtomic<Memory>) -> Self {
        let queues = (0..QUEUES).map(|_| Mutex::default()).collect();
        let exit_events = ExitEvents::default();
        Self { disk, memory, queues, stopping: AtomicBool::new(false), exit_events }
    }

    /// Has each queue begin no more requests, nor pieces of one.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// Waits until no queue does anything any more after [`Self::stop`], but no longer than until
    /// `deadline`: whether that came about. A panic left nothing half done: a queue is a buffer and
    /// a flag.
    pub(super) fn is_quiet_by(&self, deadline: Instant) -> bool {
        self.queues.iter().all(|queue| queue.try_lock_until(deadline).is_some())
    }
}

impl VhostUserBackend for Backend {
    type Bitmap = ();
    type Vring = Ring;

    fn num_queues(&self) -> usize {
        QUEUES.into()
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE.into()
    }

    fn features(&self) -> u64 {
        config::features(self.disk.read_only())
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    // The rings know; nothing here depends on it.
    fn set_event_idx(&self, _: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        config::part(&config::space(&self.disk), offset, size)
    }

    fn set_config(&self, _: u32, _: &[u8]) -> io::Result<()> {
        // The one field that could be written is not offered.
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn update_memory(&self, memory: GuestMemoryAtomic<Memory>) -> io::Result<()> {
        let ours = self.disk.mount_numbers()?;
        let on_mount = memory.memory().iter().any(|region| {
            let device = region.file_offset().and_then(|file| device_of(file.file()).ok());
            device.is_some_and(|device| ours.contains(&device))
        });
        if on_mount {
            let why = "the guest's memory includes this device's own windows or files; attach them or the disks, not both";
            tracing::error!("a disk's connection is refused: {why}");
            return Err(io::Error::other(why));
        }
        Ok(())
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        (0..QUEUES).map(|queue| 1 << queue).collect()
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        self.exit_events.add()
    }

    fn stop_vring(&self, index: u32) -> io::Result<()> {
        if let Some(queue) = usize::try_from(index).ok().and_then(|index| self.queues.get(index)) {
            queue.lock().restart();
        }
        Ok(())
    }

    fn handle_event(&self, event: u16, _: EventSet, rings: &[Ring], thread: usize) -> io::Result<()> {
        // An error would end the queue's thread.
        if let (0, Some(ring), Some(queue)) = (event, rings.first(), self.queues.get(thread)) {
            queue.lock().drain(ring, &self.memory, &self.disk, &self.stopping);
        }
        Ok(())
    }
}
