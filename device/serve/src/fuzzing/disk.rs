//! Fuzz target for a disk's ring: whatever a guest may have put into its memory.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use vhost_user_backend::VringT as _;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryAtomic};

use super::peers::works;
use super::small;
use crate::Control;
use crate::vhost_connections::{Memory, Ring};
use crate::vhost_user::config::QUEUE_SIZE;
use crate::vhost_user::queue::Queue;
use crate::vhost_user::{Disk, Shows};

/// Bytes of each of the two regions of the guest's memory.
const REGION: usize = 64 << 10;
/// How long a ring may be worked at. One whose requests write new ones into it never ends by
/// itself: its guest keeps its own queue busy, as by kicks.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A kick of a ring: what the disk shows, log2 of the ring's size, flags (1: event indices), the
/// index of the next request, where descriptors, available and used ring are (in units of 256
/// bytes), then the guest's memory from 0 on. The queue comes to an end and nothing outside of the
/// disk changes.
pub fn disk(data: &[u8]) {
    let Some((&[shows, size, flags, next, descriptors, available, used], contents)) =
        data.split_first_chunk()
    else {
        return;
    };
    let device = Arc::new(small());
    let view = || Shows::View { tensor: "w".to_owned(), view: "e8m3".to_owned() };
    let shows = match shows % 3 {
        0 => Shows::Base,
        1 => Shows::Views,
        _ => view(),
    };
    let disk = Disk::new(Control::new(Arc::clone(&device)), shows, Path::new("/socket")).expect("a disk");
    let regions = [(GuestAddress(0), REGION), (GuestAddress(1 << 20), REGION)];
    let memory = GuestMemoryAtomic::new(Memory::from_ranges(&regions).expect("memory"));
    memory.memory().write_slice(&contents[..contents.len().min(REGION)], GuestAddress(0)).expect("it fits");
    let ring = Ring::new(memory.clone(), QUEUE_SIZE).expect("a ring");
    ring.set_queue_size(1 << (size % 11));
    let place = |at: u8| u64::from(at) << 8;
    ring.set_queue_info(place(descriptors), place(available), place(used)).expect("aligned places");
    ring.set_queue_next_avail(next.into());
    ring.set_queue_event_idx(flags & 1 == 1);
    ring.set_queue_ready(true);
    ring.set_enabled(true);

    let (done, waits) = channel::<()>();
    let stopping = AtomicBool::new(false);
    thread::scope(|scope| {
        let (queue_stops, waits) = (&stopping, waits);
        scope.spawn(move || {
            // Either somebody is patient no longer, or `done` is gone.
            let _ = waits.recv_timeout(TIMEOUT);
            queue_stops.store(true, Ordering::SeqCst);
        });
        Queue::default().drain(&ring, &memory, &disk, &stopping);
        drop(done);
    });
    assert_eq!(disk.panics(), 0, "a handler panicked");
    works(&device);
}
