//! What the page cache has of a file, written to the disk again.
//!
//! When a write to the disk fails, the kernel takes the page for written: the sync that finds out
//! fails, a later one leaves the page out and succeeds. What was to be written is in the page cache
//! and nowhere else, until its room is needed. The rules:
//! * Only what is cached is written. The rest is what the disk says, and to load it would take the
//!   room of what matters.
//! * It is written past the cache. Where a write failed, ext4 leaves the extent an unwritten one
//!   and takes the cached page for one of a written extent: through the cache it would reach the
//!   disk and read as zeros after the next mount.
//! * Who writes past the cache has it drop what it has there, in folios of up to 2 MiB. So all of a
//!   [piece](PIECE_BYTES) is read before any of it is written, and goes back into the cache if it
//!   cannot be.
//! * btrfs calls a hole what it has room for and did not write yet, whatever is cached of it. So
//!   cached pages of holes are looked at too, and those of zeros are passed over, as they are what
//!   a hole reads as.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    sync::Arc,
};

use vm_memory::{FileOffset, mmap::MmapRegionBuilder};

use super::memory::data_of;

/// Bytes of a file of which it is asked at once what is cached.
const ASKED_BYTES: u64 = 1 << 30;
/// Bytes that are read before any of them is written: no folio is longer, and each begins at a
/// multiple of its length.
const PIECE_BYTES: u64 = 2 << 20;
/// Where in memory bytes have to be that are written past the cache.
const ALIGN: usize = 4096;

/// Writes what the page cache has of `file` over itself: how many bytes. Nobody else writes to it
/// meanwhile. It is on the disk after the next sync.
///
/// # Errors
/// What the system says: then some of it may not be written, and all that was cached still is.
pub(super) fn write_again(file: &Arc<File>) -> io::Result<u64> {
    // What failed since anybody synced is told to the first sync of this descriptor, and has the
    // first write past the cache go through it. It is of before: all that is cached is written now.
    if let Err(why) = file.sync_data() {
        tracing::debug!("writes to the image failed before: {why}");
    }
    let page = rustix::param::page_size() as u64;
    // What is written past the cache ends with a sector; an image may be longer than it needs.
    let end = file.metadata()?.len().next_multiple_of(page);
    file.set_len(end)?;
    let (direct, data) = (past_cache(file)?, data_of(&**file, 0..end)?);
    let length = length(&(0..PIECE_BYTES));
    let mut buffer = vec![0; length + ALIGN];
    let begin = buffer.as_ptr().align_offset(ALIGN);
    let buffer = &mut buffer[begin..begin + length];
    let place = |run: &Range<u64>| {
        let start = length_to(run.start % PIECE_BYTES);
        start..start + self::length(run)
    };
    let is_data = |run: &Range<u64>| {
        let next = data.partition_point(|range| range.end <= run.start);
        data.get(next).is_some_and(|range| range.start < run.end)
    };
    let mut written = 0;
    let mut at = 0;
    while at < end {
        let asked = at..end.min(at + ASKED_BYTES);
        at = asked.end;
        let runs = cached(file, asked, page)?;
        for piece in runs.chunk_by(|one, other| one.start / PIECE_BYTES == other.start / PIECE_BYTES) {
            for run in piece {
                file.read_exact_at(&mut buffer[place(run)], run.start)?;
            }
            let is_wanted =
                |run: &&Range<u64>| is_data(run) || buffer[place(run)].iter().any(|byte| *byte != 0);
            for run in piece.iter().filter(is_wanted) {
                if let Err(why) = direct.write_all_at(&buffer[place(run)], run.start) {
                    // Nothing of the piece need be cached any more.
                    for run in piece.iter().filter(is_wanted) {
                        file.write_all_at(&buffer[place(run)], run.start)?;
                    }
                    return Err(why);
                }
                written += run.end - run.start;
                #[cfg(any(test, feature = "testing"))]
                super::failpoints::current().wrote(run.clone());
            }
        }
    }
    Ok(written)
}

/// `file`, as it is written past the cache if its file system can do that.
fn past_cache(file: &Arc<File>) -> io::Result<Arc<File>> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    match OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path) {
        Ok(direct) => Ok(Arc::new(direct)),
        Err(why) if why.raw_os_error() == Some(libc::EINVAL) => Ok(Arc::clone(file)),
        Err(why) => Err(why),
    }
}

/// Runs of pages of `page` bytes in `range`, which begins with a piece, that are cached; each is of
/// one piece.
fn cached(file: &Arc<File>, range: Range<u64>, page: u64) -> io::Result<Vec<Range<u64>>> {
    let region = MmapRegionBuilder::<()>::new(length(&range))
        .with_mmap_prot(libc::PROT_READ)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
        .with_file_offset(FileOffset::from_arc(Arc::clone(file), range.start))
        .build()
        .map_err(io::Error::other)?;
    let mut is_cached = vec![0_u8; length_to((range.end - range.start).div_ceil(page))];
    // SAFETY: the region stays mapped for as long as this runs, and there is a byte for each of its
    // pages, of which none is accessed.
    if unsafe { libc::mincore(region.as_ptr().cast(), region.size(), is_cached.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut runs: Vec<Range<u64>> = Vec::new();
    let starts = (range.start..range.end).step_by(length_to(page));
    for (start, _) in starts.zip(is_cached).filter(|(_, is)| is & 1 != 0) {
        let end = range.end.min(start + page);
        match runs.last_mut() {
            Some(run) if run.end == start && start % PIECE_BYTES != 0 => run.end = end,
            _ => runs.push(start..end),
        }
    }
    Ok(runs)
}

fn length(range: &Range<u64>) -> usize {
    length_to(range.end - range.start)
}

fn length_to(bytes: u64) -> usize {
    usize::try_from(bytes).expect("no more than is asked at once")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::memory::Memory;

    /// Runs a program: what it says, if it succeeds.
    fn run(program: &str, arguments: &[&str]) -> Option<String> {
        let done = Command::new(program).args(arguments).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
    }

    /// A file system on a disk that is a file in memory, which can be full.
    struct Disk {
        folder: tempfile::TempDir,
        device: String,
    }

    impl Disk {
        /// None if this may not be done here.
        fn new(file_system: &str, mib: u32) -> Option<Self> {
            let mut disk = Self { folder: tempfile::tempdir().unwrap(), device: String::new() };
            let [memory, file, mounted] = ["memory", "memory/disk", "mounted"].map(|name| disk.path(name));
            std::fs::create_dir(&memory).unwrap();
            std::fs::create_dir(&mounted).unwrap();
            run("mount", &["-t", "tmpfs", "-o", &format!("size={mib}M"), "tmpfs", &memory])?;
            File::create(&file).unwrap().set_len(u64::from(mib) << 20).unwrap();
            disk.device = run("losetup", &["-f", "--show", &file])?;
            run(&format!("mkfs.{file_system}"), &["-q", &disk.device])?;
            run("mount", &[&disk.device, &mounted])?;
            Some(disk)
        }

        fn path(&self, name: &str) -> String {
            self.folder.path().join(name).to_str().unwrap().to_owned()
        }
    }

    impl Drop for Disk {
        fn drop(&mut self) {
            run("umount", &[&self.path("mounted")]);
            run("losetup", &["-d", &self.device]);
            run("umount", &[&self.path("memory")]);
        }
    }

    #[test]
    fn what_is_cached_of_a_file_is_written_and_nothing_of_it_changes() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(8 << 20).unwrap();
        let parts = [(0, 4096), (1 << 20, 100 << 10), ((2 << 20) - 4096, 8192), ((8 << 20) - 4096, 4096)];
        for (seed, (at, length)) in (1..).zip(parts) {
            file.write_all_at(&lamina_codec::testing::bytes(5 * seed, length), at).unwrap();
        }
        let all = |file: &File| {
            let mut all = vec![0; 8 << 20];
            file.read_exact_at(&mut all, 0).unwrap();
            all
        };
        let before = all(&file);
        // To read holes may have cached pages of them.
        let written = write_again(&file).unwrap();
        assert!((116 << 10..8 << 20).contains(&written), "{written}");
        assert!(all(&file) == before);
    }

    /// To make a file system takes root and its tools.
    #[test]
    fn a_disk_that_was_full_has_afterwards_what_its_sync_left_out() {
        if std::env::var_os("LAMINA_LONG").is_none() {
            return lamina_skipped::test("it mounts file systems: LAMINA_LONG");
        }
        for (file_system, mib) in [("ext4", 96), ("xfs", 400), ("btrfs", 400)] {
            let Some(disk) = Disk::new(file_system, mib) else {
                lamina_skipped::part(format_args!("{file_system} cannot be made here"));
                continue;
            };
            let path = disk.path("mounted/file");
            let open = || {
                Arc::new(
                    File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap(),
                )
            };
            let file = open();
            let bytes = 40 << 20;
            crate::image::keep_in_place(&file);
            file.set_len(bytes as u64).unwrap();
            let memory = Memory::part("file", &file, 0, bytes as u64, None).unwrap();
            memory.ensure(0..bytes).unwrap();
            file.sync_all().unwrap();
            run("sync", &[]).unwrap();
            let ballast = disk.path("memory/ballast");
            let full = std::fs::write(&ballast, vec![1; usize::try_from(mib).unwrap() << 20]);
            assert!(full.is_err(), "{file_system}");
            let data = lamina_codec::testing::bytes(5, 16 << 20);
            memory.write(0, &data);
            assert!(file.sync_data().is_err(), "{file_system}");
            // What fails now is told to whoever opens the file next.
            memory.write(data.len(), &data);
            // SAFETY: it only begins to write what an open file has.
            unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
            std::thread::sleep(std::time::Duration::from_millis(500));
            drop((memory, file));
            std::fs::remove_file(&ballast).unwrap();
            // As the next process finds it.
            let file = open();
            write_again(&file).unwrap();
            file.sync_data().unwrap();
            drop(file);
            run("umount", &[&disk.path("mounted")]).unwrap();
            run("mount", &[&disk.device, &disk.path("mounted")]).unwrap();
            let found = std::fs::read(&path).unwrap();
            let (first, rest) = found.split_at(data.len());
            let (second, rest) = rest.split_at(data.len());
            assert!(first == data && second == data, "{file_system}");
            assert!(rest.iter().all(|byte| *byte == 0), "{file_system}");
        }
    }
}
