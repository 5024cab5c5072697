//! A queue: takes requests in order, has them done, gives them back in that order, and tells the guest when it wants to know.
//!
//! * A queue has a thread and a workspace of its own.
//! * Kicks are switched off while there is work, and after switching them on again the queue looks once more (`EVENT_IDX` or not).
//! * A ring whose indices make no sense is left alone until the next kick; nothing loops over it.

use std::sync::atomic::{AtomicBool, Ordering};

use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use super::disk::Disk;
use super::request::{Memory, Request};
use super::workspace::Workspace;

/// A ring, as vhost-user gives it.
pub(crate) type Ring = VringMutex<GuestMemoryAtomic<Memory>>;

/// What a queue keeps between kicks.
#[derive(Default)]
pub(crate) struct Queue {
    /// Made when it is needed first: most queues of most guests are never used.
    workspace: Option<Workspace>,
    /// Whether the guest was told of what a former device, or connection, may have given back without telling.
    told: bool,
}

impl Queue {
    /// The ring was taken away, or is a new one.
    pub(super) fn restart(&mut self) {
        self.told = false;
    }

    /// Does everything that is in the ring, unless `stopping`.
    pub(crate) fn drain(
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
        if self.workspace.is_none() {
            self.workspace = Workspace::new().ok();
        }
        match &mut self.workspace {
            Some(workspace) => request.serve(disk, workspace),
            None => request.fail(),
        }
    }
}

fn tell(ring: &Ring) {
    if let Err(why) = ring.signal_used_queue() {
        tracing::debug!("a guest could not be told: {why}");
    }
}
