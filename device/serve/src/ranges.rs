//! Ranges of the windows: what of one lies in another, and where.

use std::ops::Range;

use lamina_codec::BLOCK_BYTES;
use lamina_device::device::Partition;
use lamina_device::window::ViewInfo;

use super::ServeError;

/// What a partition has of `range` of the device's base window, in its own offsets. An empty range
/// lies where it begins.
pub(super) fn inside(partition: &Partition, range: &Range<u64>) -> Option<Range<u64>> {
    common(&partition.base(), range)
}

/// The part of `range` that lies in `window`, in offsets of that. An empty range lies where it
/// begins.
pub(super) fn common(window: &Range<u64>, range: &Range<u64>) -> Option<Range<u64>> {
    let (start, end) = (range.start.max(window.start), range.end.min(window.end));
    (start < end || (start == end && range.is_empty())).then(|| start - window.start..end - window.start)
}

/// What lies `offset` behind the beginning of `window`, if all of its `length` bytes are inside.
pub(super) fn within(window: &Range<u64>, offset: u64, length: u64) -> Result<Range<u64>, ServeError> {
    let bytes = window.end - window.start;
    match offset.checked_add(length) {
        Some(end) if end <= bytes => Ok(window.start + offset..window.start + end),
        _ => Err(ServeError::PastEnd { offset, length, window: bytes }),
    }
}

/// The blocks that a base range touches, as a range of bytes.
pub(super) fn whole_blocks(offset: u64, length: u64) -> Range<u64> {
    let block = BLOCK_BYTES as u64;
    let end = offset.saturating_add(length);
    offset / block * block..end.checked_next_multiple_of(block).unwrap_or(u64::MAX)
}

/// A view's place in the views window.
pub(super) fn place(view: &ViewInfo) -> Range<u64> {
    view.offset..view.offset + view.length
}
