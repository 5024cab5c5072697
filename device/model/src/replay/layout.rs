//! Which lines of a block are moved for the planes that are wanted.
//!
//! They are given in runs. A replay that only counts takes a run's length, one with DRAM its lines.

use std::ops::Range;

use crate::trace::{BLOCK_BYTES, Block};

/// Lines of 64 bytes of which some are within a range.
pub(super) fn lines(start: u64, end: u64) -> Range<u64> {
    start / 64..end.div_ceil(64)
}

/// The planes that a block's stream holds: the most significant is bit 0.
fn joint_planes(block: &Block) -> u64 {
    1_u64.checked_shl(block.joint.into()).unwrap_or(0).wrapping_sub(1) << 1
}

/// Lines of a block's bundle, counted from its first. Parts that follow each other are one run, and
/// no line is in two.
pub(super) fn bundle(block: &Block, wanted: u64, mut take: impl FnMut(Range<u64>)) {
    let (mut offset, mut run) = (0, 0..0);
    let mut part = |length: u16, is_wanted: bool| {
        let start = offset;
        offset += u64::from(length);
        if length == 0 || !is_wanted {
            return;
        }
        let touched = lines(start, offset);
        if touched.start > run.end {
            take(std::mem::replace(&mut run, touched));
        } else {
            run.end = touched.end;
        }
    };
    part(block.head, true);
    let joint = joint_planes(block);
    for (plane, length) in block.planes.iter().enumerate() {
        if plane == 1 {
            part(block.stream, wanted & joint != 0);
        }
        part(*length, wanted >> plane & 1 == 1);
    }
    take(run);
}

/// Lines of a block whose planes lie in rows of their own, of `columns` lines. A plane's place is a
/// part of a row as long as the plane is before it is coded.
pub(super) fn rows(block: &Block, number: u64, wanted: u64, columns: u64, mut take: impl FnMut(Range<u64>)) {
    let planes = block.planes.len() as u64;
    let place = (BLOCK_BYTES / planes.max(1)).div_ceil(64).clamp(1, columns);
    let in_row = (columns / place).max(1);
    let (row, column) = (number / in_row * planes, number % in_row * place);
    let joint = joint_planes(block);
    // A stream lies in the rows of its planes, which are fetched together.
    let share = block.stream.div_ceil(u16::from(block.joint).max(1));
    for (plane, length) in (0..).zip(&*block.planes) {
        let is_joint = joint >> plane & 1 == 1;
        let is_wanted = if is_joint { wanted & joint != 0 } else { wanted >> plane & 1 == 1 };
        // The head lies before the first plane.
        let (length, most) = match plane {
            0 => (length + block.head, columns),
            _ if is_joint => (length + share, place),
            _ => (*length, place),
        };
        if length > 0 && (is_wanted || plane == 0 && block.head > 0) {
            let first = (row + plane) * columns + column;
            take(first..first + u64::from(length).div_ceil(64).min(most));
        }
    }
}
