//! Which pages of a mapping this process has reached.
//!
//! A process's first store to a page of a shared mapping is a fault, which the kernel takes for
//! that page alone; its first load maps all of the 64 KiB around that the file has. And a page that
//! the file has not is made sooner by a write to the file than by a fault. So where bytes are
//! stored that nobody wants any more, holes are written as zeros and one word is loaded first.
//!
//! A pool's file is as long as the pool, and has pages only where something was stored. A fault for
//! one that a full file system has not ends the process. So a file has its file system keep room
//! for pages before they are stored to: once for each 64 KiB, for little more than is stored.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use rustix::fs::{FallocateFlags, fallocate, fstatfs};
use rustix::io::retry_on_intr;

use super::{Map, MemError};

/// Bytes whose pages a load maps with its own.
const AROUND: u64 = 64 << 10;
const PAGE: u64 = 4096;
static ZEROS: [u8; AROUND as usize] = [0; AROUND as usize];

/// A file whose pages a file system of this host has.
#[derive(Debug)]
pub(super) struct Backing {
    file: File,
    /// Its pages are memory and nothing else: a tmpfs's.
    is_in_memory: bool,
}

impl Backing {
    /// Of a file. A device has all of its memory, though its name may be in a tmpfs; in a mount of
    /// FUSE whoever serves it answers for room.
    pub(super) fn of(file: &File) -> io::Result<Option<Self>> {
        const TMPFS: i64 = 0x0102_1994;
        const FUSE: i64 = 0x6573_5546;
        let kind = fstatfs(file).map(|found| found.f_type);
        if kind == Ok(FUSE) || !file.metadata()?.is_file() {
            return Ok(None);
        }
        Ok(Some(Self { file: file.try_clone()?, is_in_memory: kind == Ok(TMPFS) }))
    }

    /// Has room for a range's pages.
    fn reserve(&self, range: &Range<u64>) -> Result<(), MemError> {
        let bytes = range.end - range.start;
        let wanted = || fallocate(&self.file, FallocateFlags::KEEP_SIZE, range.start, bytes);
        match retry_on_intr(wanted) {
            Err(why @ (rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT)) => {
                Err(MemError::Room { bytes, cause: why.into() })
            }
            // Others are of file systems that cannot say.
            _ => Ok(()),
        }
    }
}

/// Which 64 KiB of a mapping were reached, and of which there is room for the pages.
#[derive(Debug)]
pub(super) struct Reached {
    bits: Box<[AtomicU64]>,
    reserved: Box<[AtomicU64]>,
}

fn bit(around: u64) -> (usize, u64) {
    ((around / 64) as usize, 1 << (around % 64))
}

/// The parts of a range that lie in 64 KiB each.
pub(super) fn parts(at: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let end = at + length;
    (at / AROUND..end.div_ceil(AROUND))
        .map(move |around| at.max(around * AROUND)..end.min((around + 1) * AROUND))
}

impl Reached {
    /// None of so many bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let none = || (0..bytes.div_ceil(AROUND).div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { bits: none(), reserved: none() }
    }

    /// Has room for a range of `map` that is stored to next.
    ///
    /// # Errors
    /// [`MemError::End`]; [`MemError::Room`].
    pub(super) fn reserve(&self, map: &Map, at: u64, length: u64) -> Result<(), MemError> {
        map.at(at, usize::try_from(length).unwrap_or(usize::MAX))?;
        let Some(backing) = map.backing() else { return Ok(()) };
        for around in at / AROUND..(at + length).div_ceil(AROUND) {
            let (word, bit) = bit(around);
            if self.reserved[word].load(Ordering::Relaxed) & bit != 0 {
                continue;
            }
            let whole = around * AROUND..((around + 1) * AROUND).min(map.bytes());
            if backing.reserve(&whole).is_ok() {
                self.reserved[word].fetch_or(bit, Ordering::Relaxed);
                continue;
            }
            // There may still be room for what is wanted of it.
            let part = whole.start.max(at) / PAGE * PAGE..whole.end.min((at + length).next_multiple_of(PAGE));
            backing.reserve(&part)?;
        }
        Ok(())
    }

    /// Reaches a range of `map` that is overwritten next, all of it.
    ///
    /// # Errors
    /// [`MemError::End`]; [`MemError::Room`] if the file's holes cannot be filled.
    pub(super) fn reach(&self, map: &Map, at: u64, length: u64) -> Result<(), MemError> {
        map.at(at, usize::try_from(length).unwrap_or(usize::MAX))?;
        for around in at / AROUND..(at + length).div_ceil(AROUND) {
            let (word, bit) = bit(around);
            if self.bits[word].load(Ordering::Relaxed) & bit != 0 {
                continue;
            }
            let whole = around * AROUND..(around + 1) * AROUND;
            let part = whole.start.max(at)..whole.end.min(at + length);
            if let Some(backing) = map.backing().filter(|backing| backing.is_in_memory) {
                fill(&backing.file, part.start.next_multiple_of(PAGE)..part.end / PAGE * PAGE)?;
            }
            black_box(map.word(part.start / 8 * 8)?.load(Ordering::Relaxed));
            if part == whole {
                self.bits[word].fetch_or(bit, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

/// Writes zeros to pages of a file, if it has none of them.
fn fill(file: &File, pages: Range<u64>) -> Result<(), MemError> {
    let (Ok(start), Some(bytes)) = (i64::try_from(pages.start), pages.end.checked_sub(pages.start)) else {
        return Ok(());
    };
    let is_hole = match lseek(file, start, Whence::SeekData) {
        Ok(data) => u64::try_from(data).is_ok_and(|data| data >= pages.end),
        Err(why) => why == Errno::ENXIO,
    };
    if !is_hole || bytes == 0 {
        return Ok(());
    }
    file.write_all_at(&ZEROS[..bytes as usize], pages.start).map_err(|cause| MemError::Room { bytes, cause })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;
    use crate::mem::{CxlMem, Mapped};

    #[test]
    fn bytes_beside_what_is_stored_stay_wherever_it_begins_and_ends() {
        let places = [Path::new("/dev/shm").to_owned(), std::env::temp_dir()];
        for folder in places.into_iter().filter(|folder| folder.is_dir()) {
            let file = tempfile::tempfile_in(&folder).unwrap();
            let bytes = 6 * AROUND;
            file.set_len(bytes).unwrap();
            let mut want = vec![0; bytes as usize];
            let map = Mapped::new(Map::new(&file, Path::new("a file"), None).unwrap());
            let ranges = [
                (0, AROUND),
                (3 * AROUND - 100, 200),
                (2 * AROUND - 5000, 2 * AROUND),
                (4 * AROUND + 1, AROUND - 2),
                (5 * AROUND + PAGE, PAGE),
                (AROUND / 2, 3 * AROUND),
                (bytes - 1, 1),
            ];
            for (number, (at, length)) in ranges.into_iter().enumerate() {
                let stored = vec![number as u8 + 1; length as usize];
                map.ntstore(at, &stored).unwrap();
                want[at as usize..][..length as usize].copy_from_slice(&stored);
                let mut found = vec![0xaa; bytes as usize];
                file.read_exact_at(&mut found, 0).unwrap();
                assert!(found == want, "{}: {length} bytes at {at}", folder.display());
            }
        }
    }

    #[test]
    fn only_holes_are_filled_and_what_cannot_be_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * AROUND).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 < AROUND);
        fill(&file, 0..AROUND).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 >= AROUND);
        file.write_all_at(b"held", AROUND + 5000).unwrap();
        fill(&file, AROUND..2 * AROUND).unwrap();
        let mut found = [0; 4];
        file.read_exact_at(&mut found, AROUND + 5000).unwrap();
        assert_eq!(&found, b"held");
        let only_read = File::open("/proc/self/exe").unwrap();
        let end = only_read.metadata().unwrap().len().next_multiple_of(PAGE);
        let why = fill(&only_read, end..end + PAGE).unwrap_err().to_string();
        assert!(why.starts_with("there is no room for 4096 bytes"), "{why}");
    }

    /// To find what lies behind a hole the kernel walks all pages that there is only room for: were
    /// these all of a large object's, each of its parts would have it walk them again.
    #[test]
    fn there_is_room_for_no_more_than_is_reached_next() {
        let file = File::from(memfd_create("a pool", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(64 * AROUND).unwrap();
        let map = Mapped::new(Map::new(&file, Path::new("a file"), None).unwrap());
        // There may be room, and no hole is filled.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        let why = map.ntstore(AROUND / 2, &vec![7; 60 * AROUND as usize]).unwrap_err();
        assert!(matches!(why, MemError::Room { .. }), "{why}");
        // One page, where the kernel has all of them large.
        let has = file.metadata().unwrap().blocks() * 512;
        assert!((1..=32 * AROUND).contains(&has), "{has}");
        let parts: Vec<_> = parts(AROUND / 2, 2 * AROUND).collect();
        assert_eq!(parts, [AROUND / 2..AROUND, AROUND..2 * AROUND, 2 * AROUND..5 * AROUND / 2]);
    }

    #[test]
    fn a_device_is_no_file_in_memory_wherever_its_name_is() {
        assert!(Backing::of(&File::open("/dev/null").unwrap()).unwrap().is_none());
        if Path::new("/dev/shm").is_dir() {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            assert!(Backing::of(&file).unwrap().is_some_and(|backing| backing.is_in_memory));
        }
    }

    #[test]
    fn a_file_has_pages_for_what_is_stored_and_little_more() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(100 * AROUND).unwrap();
        let map = Mapped::new(Map::new(&file, Path::new("a file"), None).unwrap());
        map.ntstore(10 * AROUND - 8, &[7; 16]).unwrap();
        let has = file.metadata().unwrap().blocks() * 512;
        // A file system that cannot keep room has two pages.
        assert!(has <= 2 * AROUND + 16 * PAGE, "{has}");
        map.ntstore(100 * AROUND - 8, &[7; 8]).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 100 * AROUND);
    }
}
