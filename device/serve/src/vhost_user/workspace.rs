//! What a queue reads and writes through: a buffer in slices, which several threads fill.
//!
//! * A read of more than a slice is cut at slices, and each is decoded by a thread of its own; the
//!   queue's thread does the first.
//! * Slices of all queues share their threads, one fewer than slices, since a queue's thread would
//!   only wait. Without threads a queue does all slices itself.
//! * Guest memory is not `Send` and stays with the queue's thread, which copies the slices there in
//!   order.

use std::io;
use std::sync::LazyLock;
use std::thread;

use memmap2::MmapMut;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::control::ControlError;

use super::disk::Disk;

/// Bytes of a slice: what is decoded at once stays in the processor's second-level cache.
const SLICE: usize = 256 << 10;
/// Most slices: the copy to the guest is one thread's, and more decoders would wait for it.
const MAX_LANES: usize = 4;

/// As many as half of the processors: the guest wants the others, and with two a second decoder
/// would take its time from it.
static SLICES: LazyLock<usize> = LazyLock::new(|| {
    thread::available_parallelism().map_or(1, usize::from).div_euclid(2).clamp(1, MAX_LANES)
});

/// The threads of all queues.
static READERS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let threads = SLICES.checked_sub(1).filter(|threads| *threads > 0)?;
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|n| format!("disk-reader-{n}"));
    pool.build().inspect_err(|why| tracing::warn!("disks are read by their queues alone: {why}")).ok()
});

/// A queue's buffer.
pub(super) struct Workspace {
    /// Page-aligned.
    buffer: MmapMut,
}

impl Workspace {
    /// One with room for every slice; memory is taken as it is used.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { buffer: MmapMut::map_anon(SLICE * *SLICES)? })
    }

    /// Bytes it has room for.
    pub(super) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// The first `length` bytes of it, at most [`Self::len`].
    pub(super) fn front(&mut self, length: usize) -> &mut [u8] {
        &mut self.buffer[..length]
    }

    /// `length` bytes of `disk` from `offset` on, which are inside it; at most [`Self::len`].
    pub(super) fn read(&mut self, disk: &Disk, offset: u64, length: usize) -> Result<&[u8], ControlError> {
        let read = self.front(length);
        match &*READERS {
            Some(readers) if length > SLICE => {
                let mut slices = (offset..).step_by(SLICE).zip(read.chunks_mut(SLICE));
                let mut outcomes = [const { Ok(()) }; MAX_LANES];
                let (mine, theirs) = outcomes.split_first_mut().expect("MAX_LANES is not 0");
                readers.in_place_scope(|scope| {
                    let first = slices.next();
                    for ((at, slice), outcome) in slices.zip(theirs) {
                        scope.spawn(move |_| *outcome = disk.read(at, slice));
                    }
                    if let Some((at, slice)) = first {
                        *mine = disk.read(at, slice);
                    }
                });
                outcomes.into_iter().collect::<Result<(), _>>()?;
            }
            _ => disk.read(offset, read)?,
        }
        Ok(read)
    }
}
