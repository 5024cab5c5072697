//! Address space that costs memory only where it was written, reached by checked, volatile copies.
//!
//! It is private to the process, or a part of an [image](super::image) that outlives it. A part of
//! an image is given room before it is written ([`Memory::ensure`]): a store to a page that the
//! disk has no room for would be a SIGBUS, not an error. A load from a hole would be one too, where
//! the file is in memory (tmpfs) and that is full, so what is not known to have room is read by
//! `pread`. The parts that grow with what is stored ask first whether the
//! [host's memory](super::host_memory) allows it, if they are in memory.

use std::{
    fs::File,
    hint::black_box,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, fallocate},
    unistd::{Whence, lseek},
};
use vm_memory::{FileOffset, VolatileMemory, mmap::MmapRegion, mmap::MmapRegionBuilder};

use super::{
    StoreError, fiemap,
    host_memory::{For, HostMemory},
    image, ledger,
};

/// Room in an image is made and given back in units of this many bytes.
pub const UNIT_BYTES: usize = 64 << 10;
static ZEROS: [u8; UNIT_BYTES] = [0; UNIT_BYTES];

/// Bytes of a line of the processor's caches.
const LINE: usize = 64;

/// Memory of a fixed length, zero until written.
#[derive(Debug)]
pub struct Memory {
    region: MmapRegion,
    part: Option<Box<Part>>,
    /// Units that may hold anything but zeros, a bit each.
    touched: MmapRegion,
}

/// Where in an image the memory is.
#[derive(Debug)]
struct Part {
    what: &'static str,
    file: Arc<File>,
    offset: u64,
    /// Units that are known to have room, a bit each: those that had it when the part was mapped,
    /// and those that were given some since.
    ensured: MmapRegion,
    /// The memory that growth is asked of, if it is.
    host: Option<Arc<HostMemory>>,
    #[cfg(any(test, feature = "testing"))]
    failpoints: super::failpoints::Failpoints,
}

/// Where the bits of a part's units are: which have room, then which may hold anything.
#[derive(Clone, Debug)]
pub(super) struct BitsAt {
    /// The file they are in, and where.
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    /// Whether they say what there is.
    pub(super) known: bool,
    /// Where in the file that is said, by a word that is 1.
    pub(super) known_at: u64,
}

impl Memory {
    /// Reserves `bytes` of address space of this process.
    ///
    /// # Errors
    /// [`StoreError`] if there is not so much of it.
    pub fn reserve(what: &'static str, bytes: u64) -> Result<Self, StoreError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let region = map(what, bytes, flags, None)?;
        let touched = bits(what, &region)?;
        Ok(Self { region, part: None, touched })
    }

    /// Maps `bytes` of an image from `offset` on. Growth is asked of `host`.
    pub(super) fn part(
        what: &'static str,
        file: &Arc<File>,
        offset: u64,
        bytes: u64,
        host: Option<Arc<HostMemory>>,
    ) -> Result<Self, StoreError> {
        Self::part_with_bits(what, file, offset, bytes, host, None)
    }

    /// As [`Self::part`]; if `at` is given, what is known of its units is there for the next
    /// process.
    pub(super) fn part_with_bits(
        what: &'static str,
        file: &Arc<File>,
        offset: u64,
        bytes: u64,
        host: Option<Arc<HostMemory>>,
        at: Option<BitsAt>,
    ) -> Result<Self, StoreError> {
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let region = map(what, bytes, flags, Some(FileOffset::from_arc(Arc::clone(file), offset)))?;
        let (ensured, touched) = match &at {
            None => (bits(what, &region)?, bits(what, &region)?),
            Some(BitsAt { file, offset, .. }) => {
                let bytes = ledger::bits_bytes(bytes);
                let bits = |at| map(what, bytes, flags, Some(FileOffset::from_arc(Arc::clone(file), at)));
                (bits(*offset)?, bits(offset + bytes)?)
            }
        };
        let part = Part {
            what,
            file: Arc::clone(file),
            offset,
            ensured,
            host,
            #[cfg(any(test, feature = "testing"))]
            failpoints: super::failpoints::current(),
        };
        let memory = Self { region, part: Some(Box::new(part)), touched };
        if at.as_ref().is_some_and(|at| at.known) {
            return Ok(memory);
        }
        // Once for all: to ask of each unit whether it has a hole is to look for the next hole,
        // which may be gigabytes away.
        let data = memory.data().map_err(|source| StoreError::Reserve { what, bytes, source })?;
        if let Some(part) = &memory.part {
            let whole = |range: Range<usize>| range.start.div_ceil(UNIT_BYTES)..range.end / UNIT_BYTES;
            for unit in data.iter().cloned().flat_map(whole) {
                let (word, bit) = bit_of(&part.ensured, unit);
                word.fetch_or(bit, Relaxed);
            }
        }
        for range in data {
            memory.touch(range);
        }
        if let Some(at) = at {
            at.file
                .write_all_at(&1_u64.to_le_bytes(), at.known_at)
                .map_err(|source| StoreError::NoRoom { what, source })?;
        }
        Ok(memory)
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        self.region.size()
    }

    /// Copies out. Panics past the end.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        if let Some(part) = self.part.as_ref().filter(|part| !part.has_room(at..at + out.len())) {
            assert!(at + out.len() <= self.region.size(), "inside the part");
            return part.read(at, out);
        }
        self.region.get_slice(at, out.len()).expect("inside the reservation").copy_to(out);
    }

    /// Copies in. Panics past the end, and needs [`Memory::ensure`] before.
    pub fn write(&self, at: usize, data: &[u8]) {
        #[cfg(any(test, feature = "testing"))]
        let data = self.part.as_ref().map_or(data, |part| part.failpoints.written(data));
        self.touch(at..at + data.len());
        self.region.get_slice(at, data.len()).expect("inside the reservation").copy_from(data);
        #[cfg(any(test, feature = "testing"))]
        if let Some(part) = &self.part {
            part.failpoints.fire();
        }
    }

    /// As [`Memory::write`], for whole pages, many of which may be there for the first time: of an
    /// image the system takes them as a file, so it clears none of them and no page faults.
    pub fn write_pages(&self, at: usize, data: &[u8]) {
        if let Some(part) = &self.part {
            assert!(at + data.len() <= self.region.size(), "inside the part");
            self.touch(at..at + data.len());
            if part.file.write_all_at(data, part.offset + at as u64).is_ok() {
                #[cfg(any(test, feature = "testing"))]
                part.failpoints.fire();
                return;
            }
            // What a disk has no way to take as a file, it may take through the mapping.
        }
        self.write(at, data);
    }

    /// The number at `at`, a multiple of 8. Panics past the end.
    pub(super) fn number(&self, at: usize) -> &AtomicU64 {
        self.region.get_atomic_ref(at).expect("inside the reservation, and aligned")
    }

    /// The little-endian number at `at`, a multiple of 8, if it can be had by a load that makes no
    /// page.
    pub(super) fn glance(&self, at: usize) -> Option<u64> {
        if self.part.as_ref().is_some_and(|part| !part.has_room(at..at + 8)) {
            return None;
        }
        self.region.get_atomic_ref::<AtomicU64>(at).ok().map(|number| u64::from_le(number.load(Relaxed)))
    }

    /// Prefetches `bytes` from `at` on: a hint, never an error. Makes no page.
    pub(super) fn prefetch(&self, at: usize, bytes: usize) {
        let Ok(slice) = self.region.get_slice(at, bytes) else { return };
        let start = slice.ptr_guard();
        (0..bytes).step_by(LINE).for_each(|line| prefetch_line(start.as_ptr().wrapping_add(line)));
    }

    /// Makes sure that `range` can be written.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`] when the file system is full, [`StoreError::HostMemory`] when the
    /// host's memory is.
    pub fn ensure(&self, range: Range<usize>) -> Result<(), StoreError> {
        self.ensure_by(range, For::More, Part::give_room)
    }

    /// As [`Self::ensure`], of units that hold nothing that anybody wants, by what they are for.
    pub(super) fn ensure_anew(&self, range: Range<usize>, wanted: For) -> Result<(), StoreError> {
        self.ensure_by(range, wanted, |part, unit| {
            if part.host.is_none() {
                return part.give_room(unit);
            }
            part.clear(unit)?;
            // Maps all that the file has of the 64 KiB around, which a store does not.
            black_box(self.number(unit * UNIT_BYTES).load(Relaxed));
            Ok(())
        })
    }

    fn ensure_by(
        &self,
        range: Range<usize>,
        wanted: For,
        room: impl Fn(&Part, usize) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let Some(part) = &self.part else { return Ok(()) };
        for unit in range.start / UNIT_BYTES..range.end.div_ceil(UNIT_BYTES) {
            let (word, bit) = bit_of(&part.ensured, unit);
            if word.load(Relaxed) & bit == 0 {
                if let Some(host) = &part.host {
                    host.take(UNIT_BYTES as u64, part.what, wanted)?;
                }
                room(part, unit).map_err(|source| StoreError::NoRoom { what: part.what, source })?;
                word.fetch_or(bit, Relaxed);
            }
        }
        Ok(())
    }

    /// Gives the room of unit `unit` back; it reads as zeros then. Nobody else uses it meanwhile.
    pub(super) fn release(&self, unit: usize) {
        let Some(part) = &self.part else { return };
        let (word, bit) = bit_of(&part.ensured, unit);
        word.fetch_and(!bit, Relaxed);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        if let Err(why) = part.allocate(unit, hole) {
            tracing::debug!(what = part.what, unit, "room is not given back: {why}");
        }
    }

    /// Whether it is not known that there is room for all of `range`: then it takes some to write
    /// there.
    pub(super) fn may_be_hole(&self, range: Range<usize>) -> bool {
        self.part.as_ref().is_some_and(|part| !part.has_room(range))
    }

    fn touch(&self, range: Range<usize>) {
        for unit in range.start / UNIT_BYTES..range.end.div_ceil(UNIT_BYTES) {
            let (word, bit) = bit_of(&self.touched, unit);
            if word.load(Relaxed) & bit == 0 {
                word.fetch_or(bit, Relaxed);
            }
        }
    }

    /// The first bytes of `range` that may be anything but zeros, a unit at most. What was never
    /// written costs a step for each 4 MiB of it.
    pub fn touched(&self, range: Range<usize>) -> Option<Range<usize>> {
        let (mut unit, end) = (range.start / UNIT_BYTES, range.end.div_ceil(UNIT_BYTES));
        while unit < end {
            let (word, bit) = bit_of(&self.touched, unit);
            // The bits of this unit and those behind it in its word.
            let set = word.load(Relaxed) & !(bit - 1);
            if set == 0 {
                unit = (unit / 64 + 1) * 64;
                continue;
            }
            unit = unit / 64 * 64 + set.trailing_zeros() as usize;
            let found = unit * UNIT_BYTES..(unit + 1) * UNIT_BYTES;
            let found = found.start.max(range.start)..found.end.min(range.end);
            return Some(found).filter(|found| !found.is_empty());
        }
        None
    }

    /// As [`Self::populated`], by units, and without a look at the file.
    pub(super) fn all_touched(&self) -> impl Iterator<Item = Range<usize>> {
        let (mut at, end) = (0, self.region.size());
        std::iter::from_fn(move || {
            let found = self.touched(at..end)?;
            at = found.end;
            Some(found)
        })
    }

    /// The first place from `at` on that may hold anything but zeros, or the end.
    pub(super) fn hole_end(&self, at: usize) -> usize {
        let Some(part) = &self.part else { return at };
        // Where there is room for sure, only the bytes tell: a file system need not know of what
        // was stored through a mapping.
        let units = at / UNIT_BYTES..self.region.size().div_ceil(UNIT_BYTES);
        let unknown = units.end - units.start;
        let empty = units.take_while(|unit| {
            let (word, bit) = bit_of(&part.ensured, *unit);
            word.load(Relaxed) & bit == 0
        });
        let units = empty.count();
        if units == 0 {
            return at;
        }
        let end = if units == unknown { self.region.size() } else { (at / UNIT_BYTES + units) * UNIT_BYTES };
        match lseek(part.file.as_fd(), signed(part.offset + at as u64), Whence::SeekData) {
            Ok(found) => {
                let found = u64::try_from(found).unwrap_or(0).saturating_sub(part.offset);
                usize::try_from(found).unwrap_or(at).clamp(at, end)
            }
            Err(Errno::ENXIO) => end,
            Err(_) => at,
        }
    }

    /// The ranges that may hold anything but zeros.
    pub fn populated(&self) -> Vec<Range<usize>> {
        self.data().unwrap_or_else(|why| {
            tracing::warn!("where a part of the image holds something is not known: {why}");
            std::iter::once(0..self.region.size()).collect()
        })
    }

    /// The ranges that the file has something of; none of memory that has no file.
    fn data(&self) -> io::Result<Vec<Range<usize>>> {
        let Some(part) = &self.part else { return Ok(Vec::new()) };
        let (begin, end) = (part.offset, part.offset + self.region.size() as u64);
        let place = |at: u64| usize::try_from(at - begin).expect("inside the part");
        let found = data_of(&*part.file, begin..end)?.into_iter();
        Ok(found.map(|range| place(range.start)..place(range.end)).collect())
    }
}

/// Where in `range` a file has something.
///
/// # Errors
/// What the system says: then nobody knows, and nothing is no answer.
pub(super) fn data_of(file: &impl AsFd, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    data_by(|at, what| lseek(file.as_fd(), signed(at), what), range)
}

/// [`data_of`] a file that is looked through so. What lies behind the range is never looked
/// through: gigabytes may be stored there, of which each page takes time.
fn data_by(
    mut seek: impl FnMut(u64, Whence) -> nix::Result<i64>,
    range: Range<u64>,
) -> io::Result<Vec<Range<u64>>> {
    let (mut at, mut found) = (range.start, Vec::new());
    while at < range.end {
        let start = match seek(at, Whence::SeekData) {
            Ok(start) => start.unsigned_abs(),
            // There is none behind.
            Err(Errno::ENXIO) => break,
            Err(why) => return Err(why.into()),
        };
        if start >= range.end {
            break;
        }
        let hole = seek(start, Whence::SeekHole)?.unsigned_abs();
        found.push(start..hole.min(range.end));
        at = hole;
    }
    Ok(found)
}

impl Part {
    /// Whether all of a range is known to have room.
    fn has_room(&self, range: Range<usize>) -> bool {
        (range.start / UNIT_BYTES..range.end.div_ceil(UNIT_BYTES)).all(|unit| {
            let (word, bit) = bit_of(&self.ensured, unit);
            word.load(Relaxed) & bit != 0
        })
    }

    /// Copies out of the file, which makes no pages.
    fn read(&self, at: usize, out: &mut [u8]) {
        let read = self.file.read_exact_at(out, self.offset + at as u64);
        // The file is as long as its parts; a disk that cannot read is what a mapping would die of.
        read.unwrap_or_else(|why| panic!("the {} cannot be read at {at:#x}: {why}", self.what));
    }

    /// Where in the file a unit is.
    fn at(&self, unit: usize) -> u64 {
        self.offset + (unit * UNIT_BYTES) as u64
    }

    /// Writes zeros to a unit. The pages that memory makes so can be mapped together; those that it
    /// was only asked for are cleared by a fault each.
    fn clear(&self, unit: usize) -> std::io::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        self.failpoints.allocated(FallocateFlags::FALLOC_FL_KEEP_SIZE)?;
        self.file.write_all_at(&ZEROS, self.at(unit))
    }

    /// Gives room to a unit, if it has not got it: what has some and is not known to is what was
    /// given some and not written, or not all of it, before the part was mapped.
    fn give_room(&self, unit: usize) -> std::io::Result<()> {
        self.allocate(unit, FallocateFlags::FALLOC_FL_KEEP_SIZE).or_else(|why| {
            // XFS wants as many free blocks as there may be to allocate before it looks.
            let is_full = matches!(why.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
            if is_full && self.has_blocks(unit) { Ok(()) } else { Err(why) }
        })
    }

    /// Whether a unit has blocks on a disk, as far as the file goes, and a store needs no others.
    fn has_blocks(&self, unit: usize) -> bool {
        let Ok(file) = self.file.metadata() else { return false };
        let range = self.at(unit)..file.len().min(self.at(unit) + UNIT_BYTES as u64);
        image::writes_in_place(&self.file) && fiemap::has_blocks(&*self.file, range).unwrap_or(false)
    }

    fn allocate(&self, unit: usize, flags: FallocateFlags) -> std::io::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        self.failpoints.allocated(flags)?;
        let at = self.at(unit);
        Ok(fallocate(self.file.as_fd(), flags, signed(at), signed(UNIT_BYTES as u64))?)
    }
}

/// Has the processor bring a line into its caches.
fn prefetch_line(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is no access: it neither faults nor races, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// A bit for each unit of `region`, none of them set.
fn bits(what: &'static str, region: &MmapRegion) -> Result<MmapRegion, StoreError> {
    let words = region.size().div_ceil(UNIT_BYTES).div_ceil(64) as u64;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    map(what, words * 8, private, None)
}

/// Where a unit's bit is: a word, and the bit in it.
fn bit_of(units: &MmapRegion, unit: usize) -> (&AtomicU64, u64) {
    let word = units.get_atomic_ref(unit / 64 * 8).expect("inside the part, and aligned");
    (word, 1 << (unit % 64))
}

fn map(
    what: &'static str,
    bytes: u64,
    flags: i32,
    file: Option<FileOffset>,
) -> Result<MmapRegion, StoreError> {
    let fail = |source| StoreError::Reserve { what, bytes, source };
    let size = usize::try_from(bytes.max(1)).map_err(|e| fail(std::io::Error::other(e)))?;
    let builder = MmapRegionBuilder::new(size)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags);
    let builder = if let Some(file) = file { builder.with_file_offset(file) } else { builder };
    builder.build().map_err(|e| fail(std::io::Error::other(e)))
}

fn signed(at: u64) -> i64 {
    i64::try_from(at).expect("an image's size is checked")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_file_holds_something_is_found_or_not_known() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 << 20).unwrap();
        assert_eq!(data_of(&file, 0..4 << 20).unwrap(), []);
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        file.write_all_at(&[1; 4096], 3 << 20).unwrap();
        let (one, other) = (1 << 20..(1 << 20) + 4096, 3 << 20..(3 << 20) + 4096);
        assert_eq!(data_of(&file, 0..4 << 20).unwrap(), [one.clone(), other]);
        let rest = std::iter::once(one.start + 512..one.end).collect::<Vec<_>>();
        assert_eq!(data_of(&file, (1 << 20) + 512..3 << 20).unwrap(), rest);
        // Where what is behind ends is not asked: a worker that takes over would wait for it.
        let mut asked = Vec::new();
        let before = (1 << 20) + 4096..2 << 20;
        let looked = data_by(
            |at, what| {
                asked.push(at);
                lseek(&file, signed(at), what)
            },
            before.clone(),
        );
        assert_eq!((looked.unwrap(), asked), (Vec::new(), vec![before.start]));
        // What cannot be asked, here because it is no file, is not empty for that.
        let (pipe, _end) = io::pipe().unwrap();
        let why = data_of(&pipe, 0..4 << 20).unwrap_err();
        assert_eq!(why.raw_os_error(), Some(libc::ESPIPE));
    }
}
