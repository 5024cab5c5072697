//! The virtio device whose shared memory holds windows on request: its configuration space, its
//! requests, and what its driver's file takes.
//!
//! `driver-shim/kernel/protocol.h` and `lamina_uapi.h` say the same in C, and `docs/shmem.md` says
//! what it means. Numbers are little-endian.

/// The virtio device type: ioMemory, which the standard names and leaves undefined.
pub const VIRTIO_ID: u32 = 6;
/// What the configuration space begins with.
pub const MAGIC: [u8; 8] = *b"LAMINASM";
/// The version behind it, as eight bytes.
pub const VERSION: u64 = 1;
/// Bytes of the configuration space: magic, version, bytes of the base window, bytes of the views
/// window.
pub const CONFIG_BYTES: u32 = 32;
/// The shared-memory region with the mappings.
pub const REGION: u8 = 0;
/// What offsets, lengths and places of mappings are multiples of.
pub const PAGE: u64 = 4096;

/// Bytes of a request, without its text: operation and window (four each), offset, length, place
/// (eight each).
pub const REQUEST_BYTES: usize = 32;
/// Bytes of a response, without its text: status, zeros (four each), length of the whole answer
/// (eight).
pub const RESPONSE_BYTES: usize = 16;
/// Bytes of text that a request may have.
pub const TEXT_BYTES: usize = 64 << 10;

/// Forgets all mappings.
pub const RESET: u32 = 1;
/// Maps a range of a window at a place of the region.
pub const MAP: u32 = 2;
/// Takes a mapping away.
pub const UNMAP: u32 = 3;
/// Makes stores to a range of the base window visible in views; length 0 is all from the offset on.
pub const FLUSH: u32 = 4;
/// Asks the guest port a line, the text, without its end.
pub const ASK: u32 = 5;
/// More of the last answer, from the offset on.
pub const MORE: u32 = 6;

/// The base window.
pub const BASE: u32 = 0;
/// The views window; the device ignores stores to it.
pub const VIEWS: u32 = 1;
/// It was done.
pub const OK: u32 = 0;
/// It is no request.
pub const MALFORMED: u32 = 1;
/// A range passes the end of a window or of the region.
pub const RANGE: u32 = 2;
/// Something is mapped there.
pub const OVERLAP: u32 = 3;
/// No more mappings can be had.
pub const FULL: u32 = 4;
/// No such operation or mapping.
pub const UNKNOWN: u32 = 5;
/// The device or the host could not.
pub const FAILED: u32 = 6;
