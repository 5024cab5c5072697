//! A queue: takes requests in order, has them done, gives them back in that order, and tells the
//! guest when it wants to know.
//!
//! * A queue has a thread and a workspace of its own.
//! * Each interrupt costs the guest time. So it is told of several reads at once: of half of those
//!   that were in the ring together, but of [`MAX_UNTOLD`] at most. By then it makes new ones while
//!   the other half is done. Whatever may have to wait for somebody is done with nothing untold.
//! * Kicks are switched off while there is work, and after switching them on again the queue looks
//!   once more (`EVENT_IDX` or not).
//! * A ring whose indices make no sense is left alone until the next kick; nothing loops over it.

use std::sync::atomic::{AtomicBool, Ordering};

use vhost_user_backend::VringT;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};

use crate::vhost_connections::{Memory, Ring};

use super::disk::Disk;
use super::request::Request;
use super::workspace::Workspace;

/// Reads that may be done before the guest is told of the first.
const MAX_UNTOLD: u16 = 8;

/// What a queue keeps between kicks.
#[derive(Default)]
pub(crate) struct Queue {
    /// Made when it is needed first: most queues of most guests are never used.
    workspace: Option<Workspace>,
    /// Whether the guest was told of what a former device, or connection, may have given back
    /// without telling.
    reported: bool,
    /// Requests given back since the guest was told.
    untold: u16,
    /// How many of those there may be without telling.
    bearable: u16,
}

impl Queue {
    /// The ring was taken away, or is a new one.
    pub(super) fn restart(&mut self) {
        self.reported = false;
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
        let reported = self.tell_all(ring);
        if let Err(why) = result.and(reported) {
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
        if !self.reported {
            tell(ring);
            self.reported = true;
        }
        let may_wait = disk.may_wait();
        loop {
            ring.disable_notification()?;
            loop {
                // Guest memory stays mapped for as long as this request takes, whatever the other
                // side changes meanwhile.
                let memory = memory.memory();
                let (chain, waiting) = {
                    let mut state = ring.get_mut();
                    if stopping.load(Ordering::SeqCst) || !state.get_queue().ready() || !state.is_enabled() {
                        return Ok(());
                    }
                    let queue = state.get_queue_mut();
                    let chain = queue.iter(memory.clone())?.next();
                    let made = queue.avail_idx(&*memory, Ordering::Relaxed)?;
                    (chain, made.0.wrapping_sub(queue.next_avail()))
                };
                let Some(chain) = chain else { break };
                if self.untold == 0 {
                    self.bearable = (waiting / 2).min(MAX_UNTOLD - 1);
                }
                let head = chain.head_index();
                let done = match Request::parse(&memory, chain) {
                    Ok(request) => {
                        if may_wait || !request.is_read() {
                            self.tell_all(ring)?;
                            self.bearable = 0;
                        }
                        self.serve(request, disk, stopping)
                    }
                    Err(why) => {
                        tracing::debug!("a disk's request is given back undone: {why}");
                        Some(0)
                    }
                };
                let Some(written) = done else {
                    // It was not taken: whoever serves the disk next does it.
                    let mut state = ring.get_mut();
                    let next = state.get_queue().next_avail();
                    state.get_queue_mut().set_next_avail(next.wrapping_sub(1));
                    return Ok(());
                };
                ring.add_used(head, written)?;
                self.untold += 1;
                if self.untold > self.bearable {
                    self.tell_all(ring)?;
                }
            }
            self.tell_all(ring)?;
            if !ring.enable_notification()? {
                return Ok(());
            }
        }
    }

    /// Tells the guest of what was given back since it was told, if it wants to know.
    fn tell_all(&mut self, ring: &Ring) -> Result<(), virtio_queue::Error> {
        if self.untold > 0 {
            self.untold = 0;
            if ring.needs_notification()? {
                tell(ring);
            }
        }
        Ok(())
    }

    fn serve(&mut self, request: Request<'_>, disk: &Disk, stopping: &AtomicBool) -> Option<u32> {
        if self.workspace.is_none() {
            self.workspace = Workspace::new().ok();
        }
        match &mut self.workspace {
            Some(workspace) => request.serve(disk, workspace, stopping),
            None => Some(request.fail()),
        }
    }
}

fn tell(ring: &Ring) {
    if let Err(why) = ring.signal_used_queue() {
        tracing::debug!("a guest could not be told: {why}");
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::Arc;

    use rustix::event::{EventfdFlags, eventfd};
    use vm_memory::{Bytes as _, GuestAddress};

    use super::*;
    use crate::control::Control;
    use crate::vhost_user::Shows;
    use lamina_device::device::{Device, DeviceConfig};

    const DESCRIPTORS: u64 = 0x1000;
    const AVAILABLE: u64 = 0x4000;
    const USED: u64 = 0x5000;
    const READ: u32 = 0;
    const FLUSH: u32 = 4;

    /// How often a guest that always wants to know is told of these requests, which it made
    /// together.
    fn tells(kinds: &[u32]) -> u64 {
        let device = Device::new(DeviceConfig::new(256 << 10, 16 << 20)).unwrap();
        let disk = Disk::new(Control::new(Arc::new(device)), Shows::Base, Path::new("/socket")).unwrap();
        let memory = GuestMemoryAtomic::new(Memory::from_ranges(&[(GuestAddress(0), 64 << 10)]).unwrap());
        let guest = memory.memory();
        for (n, kind) in (0_u16..).zip(kinds) {
            let header = 0x8000 + 16 * u64::from(n);
            guest.write_obj(kind.to_le(), GuestAddress(header)).unwrap();
            let first = 3 * n;
            // Header, data and status; flags 1: another one follows, 2: the device writes.
            for (at, (place, length, flags)) in
                (first..).zip([(header, 16_u32, 1_u16), (0xa000, 512, 3), (0xb000, 1, 2)])
            {
                let entry = DESCRIPTORS + 16 * u64::from(at);
                guest.write_obj(place.to_le(), GuestAddress(entry)).unwrap();
                guest.write_obj(length.to_le(), GuestAddress(entry + 8)).unwrap();
                guest.write_obj(flags.to_le(), GuestAddress(entry + 12)).unwrap();
                guest.write_obj((at + 1).to_le(), GuestAddress(entry + 14)).unwrap();
            }
            guest.write_obj(first.to_le(), GuestAddress(AVAILABLE + 4 + 2 * u64::from(n))).unwrap();
        }
        let made = u16::try_from(kinds.len()).unwrap();
        guest.write_obj(made.to_le(), GuestAddress(AVAILABLE + 2)).unwrap();
        let ring = Ring::new(memory.clone(), 256).unwrap();
        ring.set_queue_size(256);
        ring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).unwrap();
        ring.set_queue_ready(true);
        ring.set_enabled(true);
        let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        ring.set_call(Some(File::from(call.try_clone().unwrap())));
        let mut queue = Queue { reported: true, ..Queue::default() };
        queue.drain(&ring, &memory, &disk, &AtomicBool::new(false));
        let used: u16 = guest.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!(u16::from_le(used), made, "everything is given back");
        let mut count = [0; 8];
        std::io::Read::read_exact(&mut File::from(call), &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn a_guest_is_told_of_several_reads_at_once() {
        assert_eq!(tells(&[READ]), 1);
        // Of half of those that are there, each time.
        assert_eq!(tells(&[READ; 2]), 2);
        assert_eq!(tells(&[READ; 8]), 4);
        // And of so many at most.
        assert_eq!(tells(&[READ; 64]), (64 - 16) / u64::from(MAX_UNTOLD) + tells(&[READ; 16]));
    }

    #[test]
    fn nothing_is_untold_while_something_waits() {
        assert_eq!(tells(&[READ, FLUSH, READ, READ, READ]), 4);
    }
}
