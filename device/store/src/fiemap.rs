//! Which blocks of a disk a file has (FIEMAP). `lseek` tells of data, and that is another thing: a
//! range that was given room and never written has blocks and no data, and one that was copied by
//! `cp` on XFS has data and shares its blocks with the other file.

use std::{io, ops::Range, os::fd::AsFd};

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// Extents that are asked for at once.
const EXTENTS: usize = 64;
/// `FS_IOC_FIEMAP`, whose number counts no extents in.
const FIEMAP: Opcode = opcode::read_write::<Header>(b'f', 11);

/// Behind this extent there is none.
const LAST: u32 = 0x1;
/// Flags of what a store through a mapping may need other blocks for: where they are is not known
/// (or not decided yet), they are compressed, they hold the ends of several files, or several files
/// have them.
const UNKNOWN: u32 = 0x2;
const ENCODED: u32 = 0x8;
const NOT_ALIGNED: u32 = 0x100;
const SHARED: u32 = 0x2000;

/// `struct fiemap` of `<linux/fiemap.h>`, without the extents behind it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    start: u64,
    length: u64,
    flags: u32,
    /// How many extents the kernel gave.
    mapped: u32,
    /// How many there is space for.
    count: u32,
    reserved: u32,
}

/// `struct fiemap_extent`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Extent {
    start: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

#[repr(C)]
struct Request {
    header: Header,
    extents: [Extent; EXTENTS],
}

const _: () = assert!(size_of::<Header>() == 32 && size_of::<Extent>() == 56);
const _: () = assert!(size_of::<Request>() == 32 + EXTENTS * 56);

impl Extent {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.length)
    }

    /// Whether a store needs no other blocks than these.
    fn is_written_in_place(&self) -> bool {
        self.flags & (UNKNOWN | ENCODED | NOT_ALIGNED | SHARED) == 0
    }
}

/// Whether all of `range` has blocks that are written in place.
///
/// # Errors
/// What the system says; a file system need not know.
pub(super) fn has_blocks(file: &impl AsFd, range: Range<u64>) -> io::Result<bool> {
    let mut at = range.start;
    each_extent(file, range.clone(), |extent| {
        let follows = extent.start <= at && extent.is_written_in_place();
        if follows {
            at = extent.end();
        }
        follows
    })?;
    Ok(at >= range.end)
}

/// Whether another file has any of the blocks of this one.
///
/// # Errors
/// As [`has_blocks`].
pub(super) fn shares_blocks(file: &impl AsFd) -> io::Result<bool> {
    let mut shares = false;
    each_extent(file, 0..i64::MAX.unsigned_abs(), |extent| {
        shares = extent.flags & SHARED != 0;
        !shares
    })?;
    Ok(shares)
}

/// Gives the extents in `range` to `goes_on`, in their order, until it says no more. The first may
/// begin before it, and the last end behind it.
fn each_extent(
    file: &impl AsFd,
    range: Range<u64>,
    mut goes_on: impl FnMut(&Extent) -> bool,
) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let count = u32::try_from(EXTENTS).expect("a few");
        let header = Header { start: at, length: range.end - at, flags: 0, mapped: 0, count, reserved: 0 };
        let mut request = Request { header, extents: [Extent::default(); EXTENTS] };
        // SAFETY: the kernel reads and writes a `struct fiemap` and at most `count` extents behind
        // it, all of which is in `request`, is plain numbers and outlives the call. A file that
        // does not know the number answers ENOTTY or EOPNOTSUPP: no other request has it.
        unsafe { ioctl(file, Updater::<FIEMAP, Request>::new(&mut request)) }?;
        let mapped = usize::try_from(request.header.mapped).unwrap_or(EXTENTS).min(EXTENTS);
        let extents = &request.extents[..mapped];
        if !extents.iter().all(&mut goes_on) {
            return Ok(());
        }
        match extents.last() {
            Some(last) if last.flags & LAST == 0 && last.end() > at => at = last.end(),
            _ => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use nix::fcntl::{FallocateFlags, fallocate};

    use super::*;

    #[test]
    fn the_request_has_the_number_that_c_gives_it() {
        assert_eq!(FIEMAP, 0xc020_660b);
    }

    #[test]
    fn what_was_given_room_has_blocks_written_or_not() {
        const UNIT: u64 = 64 << 10;
        let file = tempfile::tempfile().unwrap();
        file.set_len(512 * UNIT).unwrap();
        match has_blocks(&file, 0..UNIT) {
            Ok(has) => assert!(!has),
            Err(why) => return lamina_skipped::test(format!("this file system does not say: {why}")),
        }
        let room = |flags, at: u64| {
            fallocate(&file, flags, at.cast_signed(), UNIT.cast_signed()).unwrap();
        };
        // More extents than are asked for at once: every other unit has its room, and one more.
        (0..512).step_by(2).chain([301]).for_each(|unit| {
            room(FallocateFlags::FALLOC_FL_KEEP_SIZE, unit * UNIT);
        });
        file.write_all_at(&[1; 100], 300 * UNIT + 5000).unwrap();
        file.sync_all().unwrap();
        let has = |range: Range<u64>| has_blocks(&file, range).unwrap();
        assert!((0..512).all(|unit| has(unit * UNIT..(unit + 1) * UNIT) == (unit % 2 == 0 || unit == 301)));
        assert!(has(300 * UNIT..303 * UNIT) && has(300 * UNIT + 100..303 * UNIT - 100));
        assert!(!has(300 * UNIT..303 * UNIT + 1) && !has(300 * UNIT - 1..303 * UNIT));
        room(FallocateFlags::FALLOC_FL_KEEP_SIZE | FallocateFlags::FALLOC_FL_PUNCH_HOLE, 301 * UNIT);
        assert!(has(300 * UNIT..301 * UNIT) && !has(300 * UNIT..303 * UNIT));
        let mut found = 0;
        each_extent(&file, 0..512 * UNIT, |_| {
            found += 1;
            true
        })
        .unwrap();
        assert!(found >= 256 && !shares_blocks(&file).unwrap(), "{found}");
    }

    #[test]
    fn blocks_that_others_have_are_not_written_in_place() {
        for (flags, is) in
            [(0, true), (LAST, true), (0x800 | 0x1000, true), (SHARED | LAST, false), (UNKNOWN | 0x4, false)]
        {
            assert_eq!(Extent { flags, ..Extent::default() }.is_written_in_place(), is, "{flags:#x}");
        }
    }

    #[test]
    fn a_file_in_memory_does_not_say() {
        let file = nix::sys::memfd::memfd_create("none", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        assert!(has_blocks(&file, 0..1).is_err() && shares_blocks(&file).is_err());
    }
}
