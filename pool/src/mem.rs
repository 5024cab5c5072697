//! Memory that several nodes share, as a program must use it that knows nothing of coherence.
//!
//! Stores reach others by [`CxlMem::flush`] and [`CxlMem::fence`], loads see others' stores after
//! [`CxlMem::invalidate`] and [`CxlMem::fence`]. Every access is by a checked offset: contents are
//! never trusted, and never lead outside.
//!
//! | implementation | for |
//! |---|---|
//! | [`Mapped`] | processes and guests that share a page cache: coherent |
//! | [`Hardware`] | a devdax of real CXL memory: `clwb`, `clflushopt`, fences |
//! | [`Hosted`] | Lamina's hosts that are not coherent: its control port flushes and invalidates |
//! | [`Simulated`] | tests: private lines for each node, seeded eviction, write-back and prefetch |

mod crc;
mod hardware;
mod hosted;
mod mapped;
mod part;
mod reached;
mod simulated;

use std::io;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

pub use crc::Crc;
pub(crate) use crc::PIECE;
pub use hardware::{Hardware, Instructions, Processor};
pub use hosted::{Hosted, Port, Revoke, Socket};
pub use mapped::{Map, Mapped, length};
pub use part::Part;
pub use simulated::{Killed, LeftOut, Node, Simulated, Site};

/// Bytes of a line, the unit that moves between a node and the memory.
pub const LINE: u64 = 64;

/// What a call site asks for: in the simulated memory each can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// Write lines back.
    Flush,
    /// The fence after stores.
    Fence,
    /// Drop lines.
    Invalidate,
    /// The fence between dropping lines and loading them.
    InvalidateFence,
}

/// Why an access failed.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// A range that passes the end.
    #[error("bytes {at} + {length} pass the end of the memory, which has {bytes} bytes")]
    End {
        /// Start of the range.
        at: u64,
        /// Its length.
        length: u64,
        /// Bytes of the memory.
        bytes: u64,
    },
    /// A word that is not at a multiple of eight.
    #[error("a word lies at {at}, which is no multiple of 8")]
    Unaligned {
        /// Where.
        at: u64,
    },
    /// The memory cannot be had.
    #[error("cannot map {what}: {cause}")]
    Map {
        /// The file.
        what: String,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The file system has no room for pages of the memory's file.
    #[error("there is no room for {bytes} bytes of the memory's file: {cause}")]
    Room {
        /// Bytes that were wanted.
        bytes: u64,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The processor has not the instructions.
    #[error("this processor has no {0}: it cannot use memory that is not coherent")]
    Instructions(&'static str),
    /// The device took this host's access away.
    #[error(
        "the device has revoked this host's access: when the host is started anew, `lamina pool fence --undo` gives it back"
    )]
    Revoked,
    /// The control port failed.
    #[error("the control port refused {request}: {why}")]
    Port {
        /// The request.
        request: String,
        /// Its answer, or the kernel's error.
        why: String,
    },
}

/// Memory that nodes share.
pub trait CxlMem: Send + Sync {
    /// Its length in bytes.
    fn bytes(&self) -> u64;

    /// Whether each node's stores are seen by all others without a flush. Then flushes and
    /// invalidations do nothing, and [`CxlMem::compare_exchange`] works.
    fn coherent(&self) -> bool;

    /// Loads bytes. Aligned words of eight are loaded whole.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError>;

    /// Stores bytes. Aligned words of eight are stored whole.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError>;

    /// Stores bytes past the caches; a fence brings them to the memory.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError>;

    /// [`CxlMem::load`], which adds the bytes to a check.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn load_checked(&self, at: u64, into: &mut [u8], crc: &mut Crc) -> Result<(), MemError> {
        inside(at, into.len() as u64, self.bytes())?;
        for (place, piece) in (at..).step_by(PIECE).zip(into.chunks_mut(PIECE)) {
            self.load(place, piece)?;
            crc.update(piece);
        }
        Ok(())
    }

    /// [`CxlMem::ntstore`], which adds the bytes to a check.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn ntstore_checked(&self, at: u64, from: &[u8], crc: &mut Crc) -> Result<(), MemError> {
        inside(at, from.len() as u64, self.bytes())?;
        for (place, piece) in (at..).step_by(PIECE).zip(from.chunks(PIECE)) {
            crc.update(piece);
            self.ntstore(place, piece)?;
        }
        Ok(())
    }

    /// Writes the lines of a range back, by the next fence.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn flush(&self, at: u64, length: u64) -> Result<(), MemError>;

    /// Drops the lines of a range, by the next fence. A line with stores is written back.
    ///
    /// # Errors
    /// [`MemError::End`].
    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError>;

    /// Completes what came before: stores, flushes and invalidations, also before younger loads.
    ///
    /// # Errors
    /// [`MemError::Port`], where flushes are requests.
    fn fence(&self) -> Result<(), MemError>;

    /// Replaces the word at `at` if it is `old`, in one step. `None` where the memory has no such
    /// step.
    ///
    /// # Errors
    /// [`MemError::End`], [`MemError::Unaligned`].
    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> Result<Option<bool>, MemError> {
        let _ = (at, old, new);
        Ok(None)
    }

    /// Whether `call` of the range, made at `site`, is to be done. Tests leave calls out.
    fn wants(&self, site: &'static Location<'static>, call: Call, at: u64, length: u64) -> bool {
        let _ = (site, call, at, length);
        true
    }
}

/// Checks that a range lies inside `bytes`.
pub(crate) fn inside(at: u64, length: u64, bytes: u64) -> Result<(), MemError> {
    match at.checked_add(length) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(MemError::End { at, length, bytes }),
    }
}

/// The lines that a range touches, as their first bytes.
pub(crate) fn lines(at: u64, length: u64) -> impl Iterator<Item = u64> {
    let first = at / LINE * LINE;
    let end = if length == 0 { first } else { at + length };
    (first..end).step_by(LINE as usize)
}

/// A memory with the two steps that all protocols here are made of.
pub(crate) struct Lines {
    mem: Arc<dyn CxlMem>,
    coherent: bool,
}

impl Lines {
    pub(crate) fn new(mem: Arc<dyn CxlMem>) -> Self {
        let coherent = mem.coherent();
        Self { mem, coherent }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.mem.bytes()
    }

    pub(crate) fn coherent(&self) -> bool {
        self.coherent
    }

    pub(crate) fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.mem.load(at, into)
    }

    pub(crate) fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.mem.store(at, from)
    }

    pub(crate) fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.mem.ntstore(at, from)
    }

    pub(crate) fn load_checked(&self, at: u64, into: &mut [u8], crc: &mut Crc) -> Result<(), MemError> {
        self.mem.load_checked(at, into, crc)
    }

    pub(crate) fn ntstore_checked(&self, at: u64, from: &[u8], crc: &mut Crc) -> Result<(), MemError> {
        self.mem.ntstore_checked(at, from, crc)
    }

    pub(crate) fn word(&self, at: u64) -> Result<u64, MemError> {
        let mut bytes = [0; 8];
        self.mem.load(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn set(&self, at: u64, word: u64) -> Result<(), MemError> {
        self.mem.store(at, &word.to_le_bytes())
    }

    pub(crate) fn compare_exchange(&self, at: u64, old: u64, new: u64) -> Result<Option<bool>, MemError> {
        self.mem.compare_exchange(at, old, new)
    }

    /// Brings stores to a range to the memory, before stores that follow. Where nodes' caches are
    /// not coherent, also before loads.
    #[track_caller]
    pub(crate) fn publish(&self, at: u64, length: u64) -> Result<(), MemError> {
        if self.coherent {
            fence(Ordering::Release);
            return Ok(());
        }
        self.flush(at, length)?;
        self.fence()
    }

    /// Completes what was published before the loads that follow: of two nodes that each tell
    /// something and then look, one sees what the other told.
    pub(crate) fn told(&self) -> Result<(), MemError> {
        if self.coherent { self.mem.fence() } else { Ok(()) }
    }

    /// Begins to bring stores to a range to the memory; a later fence completes it.
    #[track_caller]
    pub(crate) fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        if !self.coherent && self.mem.wants(Location::caller(), Call::Flush, at, length) {
            self.mem.flush(at, length)?;
        }
        Ok(())
    }

    /// Completes stores and flushes before anything that follows, also loads.
    #[track_caller]
    pub(crate) fn fence(&self) -> Result<(), MemError> {
        if self.mem.wants(Location::caller(), Call::Fence, 0, 0) {
            self.mem.fence()?;
        }
        Ok(())
    }

    /// Has the loads that follow see what the memory holds of a range.
    #[track_caller]
    pub(crate) fn consume(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.invalidate(at, length)?;
        self.settle()
    }

    /// Begins to drop the lines of a range; [`Lines::settle`] completes it.
    #[track_caller]
    pub(crate) fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        if !self.coherent && self.mem.wants(Location::caller(), Call::Invalidate, at, length) {
            self.mem.invalidate(at, length)?;
        }
        Ok(())
    }

    /// Completes invalidations before the loads that follow.
    #[track_caller]
    pub(crate) fn settle(&self) -> Result<(), MemError> {
        if self.coherent {
            fence(Ordering::Acquire);
        } else if self.mem.wants(Location::caller(), Call::InvalidateFence, 0, 0) {
            self.mem.fence()?;
        }
        Ok(())
    }

    /// Loads a word as the memory holds it.
    #[track_caller]
    pub(crate) fn fresh(&self, at: u64) -> Result<u64, MemError> {
        self.consume(at, 8)?;
        self.word(at)
    }

    /// Stores a word and brings it to the memory.
    #[track_caller]
    pub(crate) fn post(&self, at: u64, word: u64) -> Result<(), MemError> {
        self.set(at, word)?;
        self.publish(at, 8)
    }
}
