//! The folder `files/` of the mount: a file system on the device, see [`lamina_files`].
//!
//! * Inodes are those of the file system with bit 61, which neither the windows' nor the models'
//!   have.
//! * The kernel asks for permissions itself. It keeps names for as long as it likes: nobody changes
//!   them but through it.
//! * Pages stay in the page cache. Only this mount stores into files, so they are right; whoever
//!   stores into `base` where files lie does to them what a store into a mounted disk does.
//! * A write-back for which there is no room is refused at once, and `fsync` says so.
//! * A handler may wait for the disk that the image is on, and never for another request.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;

use fuse_backend_rs::abi::fuse_abi::{stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{DirEntry, Entry, OpenOptions, SetattrValid};
use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

use lamina_device::counters::{Place, Scope, Section};
use lamina_device::device::Space;
use lamina_device::figures;
use lamina_files::{Caller, FileError, Files, MAX_NAME, Meta, New, Rename, Wanted, Way, When};

use super::request_buffer::bytes_of;
use super::served_pages::PAGE_BYTES;

figures! {
    /// What is told of the files.
    pub struct FilesReport {
        figures {
            /// Files, folders and whatever else has a name, and the folder of all.
            inodes: u64 = Gauge "inodes" Count;
            /// Bytes of address that they take for what they hold.
            taken_bytes: u64 = Gauge "taken" Bytes;
            /// Bytes of address that they may take.
            limit_bytes: u64 = Gauge "limit" Bytes;
            /// Bytes that were read of them, since the worker began.
            read_bytes: u64 = Counter "read" Bytes;
            /// Bytes that were written to them, since the worker began.
            written_bytes: u64 = Counter "written" Bytes;
            /// Records of names, extents and attributes, since the worker began.
            records: u64 = Counter "records" Count;
        }
    }
}

/// The figures of files.
pub(super) const SECTION: Section = Section {
    title: "files",
    scope: Scope::Device,
    places: &[Place::at("/files")],
    labels: &[],
    prefix: "files_",
    of: "",
    figures: FilesReport::FIGURES,
};

impl FilesReport {
    /// What is told of these.
    pub(super) fn of(files: &Files) -> Self {
        let (count, limit_bytes) = (files.count(), files.extent().limit);
        Self {
            inodes: count.inodes,
            taken_bytes: count.taken,
            limit_bytes,
            read_bytes: count.read,
            written_bytes: count.written,
            records: count.records,
        }
    }
}

/// What the folder is called.
pub(super) const FOLDER: &str = "files";
/// The folder itself.
pub(super) const FILES: u64 = BIT | lamina_files::ROOT;
const BIT: u64 = 1 << 61;
/// Bytes of the blocks that `stat` counts.
const STAT_BLOCK: u64 = 512;
/// Names that are given to the kernel at once.
const CHILDREN: usize = 256;
/// Bytes of the log that a name takes, or more: how many inodes there may be follows from that.
const NAME_BYTES: u64 = 4096;
/// Of a write: what lets the file run as somebody else has to go (`FUSE_WRITE_KILL_SUIDGID`).
pub(super) const KILL_PRIVILEGES: u32 = 1 << 2;

thread_local! {
    /// The request that this thread answers.
    static REQUEST: Cell<u64> = const { Cell::new(0) };
}

/// Says which request this thread answers from now on: the server's handlers are not told.
pub(super) fn answering(request: u64) {
    REQUEST.set(request);
}

/// Who asks, as the kernel says.
pub(super) fn caller(uid: u32, gid: u32) -> Caller {
    Caller { uid, gid, request: REQUEST.get() }
}

/// The inode of the file system that a number of the mount's stands for.
pub(super) fn own(inode: u64) -> Option<u64> {
    (inode & BIT != 0 && inode & (BIT << 1) == 0).then_some(inode & !BIT)
}

/// The number of the mount's that stands for an inode of the file system.
pub(super) fn inode_of(own: u64) -> u64 {
    BIT | own
}

/// What the kernel is told of an error.
pub(super) fn said(why: &FileError) -> io::Error {
    let number = why.errno();
    if number == libc::EIO {
        tracing::error!("a request for files/ failed: {why}");
    }
    io::Error::from_raw_os_error(number)
}

pub(super) fn attributes(files: &Files, inode: u64) -> io::Result<stat64> {
    let meta = files.meta(inode).map_err(|why| said(&why))?;
    as_stat(files, inode, &meta)
}

fn as_stat(files: &Files, inode: u64, meta: &Meta) -> io::Result<stat64> {
    // An entry's default has zeroed attributes, which spares an `unsafe` here.
    let mut stat = Entry::default().attr;
    stat.st_ino = BIT | inode;
    (stat.st_mode, stat.st_uid, stat.st_gid) = (meta.mode, meta.uid, meta.gid);
    stat.st_nlink = meta.links.into();
    stat.st_rdev = meta.device.into();
    stat.st_size = i64::try_from(meta.size).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
    stat.st_blksize = 4096;
    let [accessed, modified, changed] = meta.times;
    (stat.st_atime, stat.st_atime_nsec) = (accessed.0, accessed.1.into());
    (stat.st_mtime, stat.st_mtime_nsec) = (modified.0, modified.1.into());
    (stat.st_ctime, stat.st_ctime_nsec) = (changed.0, changed.1.into());
    if meta.is_file() {
        let taken = files.taken(inode).map_err(|why| said(&why))?;
        // Of a file without a block, some programs read nothing.
        let taken = if files.may_hold_more() { taken.max(PAGE_BYTES) } else { taken };
        stat.st_blocks = i64::try_from(taken / STAT_BLOCK).unwrap_or(i64::MAX);
    }
    Ok(stat)
}

/// Says otherwise of an inode.
pub(super) fn set(files: &Files, inode: u64, to: &stat64, valid: SetattrValid) -> io::Result<stat64> {
    let time = |set, now, seconds: i64, nanoseconds: i64| {
        if valid.contains(now) {
            Some(When::Now)
        } else {
            valid.contains(set).then(|| When::At((seconds, u32::try_from(nanoseconds).unwrap_or(0))))
        }
    };
    let size = u64::try_from(to.st_size).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let wanted = Wanted {
        mode: valid.contains(SetattrValid::MODE).then_some(to.st_mode),
        uid: valid.contains(SetattrValid::UID).then_some(to.st_uid),
        gid: valid.contains(SetattrValid::GID).then_some(to.st_gid),
        size: valid.contains(SetattrValid::SIZE).then_some(size),
        accessed: time(SetattrValid::ATIME, SetattrValid::ATIME_NOW, to.st_atime, to.st_atime_nsec),
        modified: time(SetattrValid::MTIME, SetattrValid::MTIME_NOW, to.st_mtime, to.st_mtime_nsec),
        drops_privileges: valid.contains(SetattrValid::KILL_SUIDGID),
    };
    let meta = files.set(inode, &wanted).map_err(|why| said(&why))?;
    as_stat(files, inode, &meta)
}

/// Makes something in a folder: its inode.
pub(super) fn make(
    files: &Files,
    caller: Caller,
    folder: u64,
    name: &CStr,
    (mode, device, target): (u32, u32, &[u8]),
) -> io::Result<u64> {
    let new = New { mode, device, target };
    files.make(caller, folder, name.to_bytes(), &new).map(|inode| BIT | inode).map_err(|why| said(&why))
}

/// The inode of a name in a folder.
pub(super) fn find(files: &Files, folder: u64, name: &CStr) -> io::Result<u64> {
    files.find(folder, name.to_bytes()).map(|inode| BIT | inode).map_err(|why| said(&why))
}

pub(super) fn rename(
    files: &Files,
    caller: Caller,
    (from, old): (u64, &CStr),
    (to, new): (u64, &CStr),
    flags: u32,
) -> io::Result<()> {
    let how = match flags {
        0 => Rename::Replace,
        libc::RENAME_NOREPLACE => Rename::Keep,
        libc::RENAME_EXCHANGE => Rename::Exchange,
        _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
    };
    let renamed = files.rename(caller, (from, old.to_bytes()), (to, new.to_bytes()), how);
    renamed.map_err(|why| said(&why))
}

/// Opens a file: what the kernel is told with that.
pub(super) fn open(files: &Files, inode: u64, flags: u32, others: OpenOptions) -> io::Result<OpenOptions> {
    let writable = flags & libc::O_ACCMODE.unsigned_abs() != libc::O_RDONLY.unsigned_abs();
    files.opened(inode, writable).map_err(|why| said(&why))?;
    Ok(others)
}

/// Holes, and addresses beforehand, as `fallocate` asks for them.
pub(super) fn allocate(files: &Files, inode: u64, mode: u32, offset: u64, length: u64) -> io::Result<()> {
    let keep = libc::FALLOC_FL_KEEP_SIZE.unsigned_abs();
    let punch = libc::FALLOC_FL_PUNCH_HOLE.unsigned_abs();
    let zero = libc::FALLOC_FL_ZERO_RANGE.unsigned_abs();
    let range =
        offset..offset.checked_add(length).ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))?;
    let done = match mode & !keep {
        0 => files.allocate(inode, &range, mode & keep == 0),
        kind if kind == punch && mode & keep != 0 => files.punch(inode, &range),
        kind if kind == zero => {
            files.punch(inode, &range).and_then(|()| files.allocate(inode, &range, mode & keep == 0))
        }
        _ => return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    };
    done.map_err(|why| said(&why))
}

/// The next data or hole, as `lseek` asks for them.
pub(super) fn seek(files: &Files, inode: u64, offset: u64, whence: u32) -> io::Result<u64> {
    let data = match i32::try_from(whence) {
        Ok(libc::SEEK_DATA) => true,
        Ok(libc::SEEK_HOLE) => false,
        _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
    };
    files.seek(inode, offset, data).map_err(|why| said(&why))
}

/// Sets an extended attribute.
pub(super) fn set_attribute(
    files: &Files,
    caller: Caller,
    inode: u64,
    name: &CStr,
    value: &[u8],
    flags: u32,
) -> io::Result<()> {
    let there = match i32::try_from(flags) {
        Ok(libc::XATTR_CREATE) => Some(false),
        Ok(libc::XATTR_REPLACE) => Some(true),
        _ => None,
    };
    files.set_attribute(caller, inode, name.to_bytes(), value, there).map_err(|why| said(&why))
}

/// Fills in how much room there is: in the store and among addresses, whichever is less.
pub(super) fn room(files: &Files, space: Space, stat: &mut statvfs64) {
    let extent = files.extent();
    stat.f_blocks = space.bytes.min(extent.limit) / PAGE_BYTES;
    stat.f_bfree = space.free.min(extent.free) / PAGE_BYTES;
    stat.f_bavail = space.available.min(extent.free) / PAGE_BYTES;
    stat.f_files = extent.inodes + extent.limit / NAME_BYTES;
    stat.f_ffree = extent.limit / NAME_BYTES;
    stat.f_favail = stat.f_ffree;
    stat.f_namemax = MAX_NAME as u64;
}

/// Gives what is in a folder, behind a place, to `add`, until that takes no more.
pub(super) fn list(
    files: &Files,
    (inode, outside): (u64, u64),
    offset: u64,
    add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
) -> io::Result<()> {
    let meta = files.meta(inode).map_err(|why| said(&why))?;
    let parent = if inode == lamina_files::ROOT { outside } else { BIT | meta.parent };
    let folder = u32::from(libc::DT_DIR);
    for (place, ino, name) in [(1, BIT | inode, b".".as_slice()), (2, parent, b"..")] {
        if place > offset && add(DirEntry { ino, offset: place, type_: folder, name })? == 0 {
            return Ok(());
        }
    }
    let mut behind = offset;
    loop {
        let children = files.children(inode, behind, CHILDREN).map_err(|why| said(&why))?;
        let last = children.len() < CHILDREN;
        for child in children {
            // As the kernel makes one of the other.
            let type_ = (child.mode & libc::S_IFMT) >> 12;
            let (ino, name) = (BIT | child.inode, child.name.as_slice());
            if add(DirEntry { ino, offset: child.place, type_, name })? == 0 {
                return Ok(());
            }
            behind = child.place;
        }
        if last {
            return Ok(());
        }
    }
}

/// By which way a request's bytes come or go, of a file that was opened with `flags`.
pub(super) fn way(flags: u32, written_back: bool) -> Way {
    match flags & libc::O_DIRECT.unsigned_abs() {
        _ if written_back => Way::WrittenBack,
        0 => Way::Cached,
        _ => Way::Direct,
    }
}

/// One request's bytes between a file and the buffer that they arrive in or leave in.
pub(super) struct FileTransfer<'a> {
    pub(super) files: &'a Files,
    pub(super) inode: u64,
    pub(super) way: Way,
}

impl FileReadWriteVolatile for FileTransfer<'_> {
    fn read_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let out = bytes_of(slice);
        self.files.read(self.inode, offset, out, self.way != Way::Direct).map_err(|why| said(&why))
    }

    fn write_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let data = bytes_of(slice);
        self.files.write(self.inode, offset, data, self.way).map_err(|why| said(&why))
    }

    fn read_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(libc::ESPIPE))
    }

    fn write_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(libc::ESPIPE))
    }
}
