//! A queue: takes requests in order, has them done, gives them back in that order, and tells the guest when it wants to know.
//!
//! * A queue has a thread and a buffer of its own.
//! * Kicks are switched off while there is work, and after switching them on again the queue looks once more (`EVENT_IDX` or not).
//! * A ring whose indices make no sense is left alone until the next kick; nothing loops over it.

use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::MmapMut;
use vhost_user_backend::VringT;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::serve::vhost_connections::{Memory, Ring};

use super::disk::Disk;
use super::request::Request;

/// Bytes of a queue's buffer: what is decoded at once stays in the processor's second-level cache.
const BUFFER: usize = 256 << 10;

/// What a queue keeps between kicks.
#[derive(Default)]
pub(super) struct Queue {
    /// Page-aligned, made when it is needed first: most queues of most guests are never used.
    buffer: Option<MmapMut>,
    /// Whether the guest was told of what a former device, or connection, may have given back without telling.
    told: bool,
}

impl Queue {
    /// The ring was taken away, or is a new one.
    pub(super) fn restart(&mut self) {
        self.told = false;
    }

    /// Does everything that is in the ring, unless `stopping`.
    pub(super) fn drain(
        &mut self,
        ring: &Ring,
        memory: &GuestMemoryAtomic<Memory>,
        disk: &Disk,
        stopping: &AtomicBool,
    ) {
        let result = self.try_drain(ring, memory, disk, stopping);
        if let Err(why) = result {
            tracing::debug!("a disk's queue is left alone until it is kicked again: {why}");
        }
    }

    fn try_drain(
        &mut self,
        ring: &Ring,
        memory: &GuestMemoryAtomic<Memory>,
        disk: &Disk,
        stopping: &AtomicBool,
    ) -> Result<(), virtio_queue::Error> {
        if !self.told {
            tell(ring);
            self.told = true;
        }
        loop {
            ring.disable_notification()?;
            loop {
                // Guest memory stays mapped for as long as this request takes, whatever the other side changes meanwhile.
                let memory = memory.memory();
                let chain = {
                    let mut state = ring.get_mut();
                    if stopping.load(Ordering::SeqCst) || !state.get_queue().ready() || !state.is_enabled() {
                        return Ok(());
                    }
                    let mut available = state.get_queue_mut().iter(memory.clone())?;
                    available.next()
                };
                let Some(chain) = chain else { break };
                let head = chain.head_index();
                let written = match Request::parse(&memory, chain) {
                    Ok(request) => self.serve(request, disk),
                    Err(why) => {
                        tracing::debug!("a disk's request is given back undone: {why}");
                        0
                    }
                };
                ring.add_used(head, written)?;
                if ring.needs_notification()? {
                    tell(ring);
                }
            }
            if !ring.enable_notification()? {
                return Ok(());
            }
        }
    }

    fn serve(&mut self, request: Request<'_>, disk: &Disk) -> u32 {
        if self.buffer.is_none() {
            self.buffer = MmapMut::map_anon(BUFFER).ok();
        }
        match &mut self.buffer {
            Some(buffer) => request.serve(disk, buffer),
            None => request.fail(),
        }
    }
}

fn tell(ring: &Ring) {
    if let Err(why) = ring.signal_used_queue() {
        tracing::debug!("a guest could not be told: {why}");
    }
}
