//! How segments lie in chunks, which the store's segments, its ledger and its image agree on.

use super::{GRANULE_BYTES, memory::UNIT_BYTES};
use lamina_codec::block::MAX_BUNDLE;

/// Granules of a chunk: 64 KiB.
pub const CHUNK_GRANULES: usize = 1024;
/// Granules of the longest segment.
pub(super) const MAX_GRANULES: usize = MAX_BUNDLE.div_ceil(GRANULE_BYTES);

// Chunks are given room, and give it back, one by one.
const _: () = assert!(CHUNK_GRANULES * GRANULE_BYTES == UNIT_BYTES);

/// Chunks of a store with `bytes` of segments.
pub(super) fn chunks_in(bytes: u64) -> usize {
    usize::try_from(bytes / UNIT_BYTES as u64).expect("the reservation succeeded")
}
