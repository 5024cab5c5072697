//! The mounted file system: a root directory with two regular files, `base` and `views`.
//!
//! What each request may do:
//!
//! * Both files have exactly their window's size for ever. Truncating or growing them is refused with EPERM, names cannot
//!   be made or removed (EROFS, by the kernel's answer to a missing handler: ENOSYS).
//! * A read past the end gives nothing; a write that passes the end is refused whole with EFBIG, for a part of it would
//!   make the kernel believe that the file had grown.
//! * `write` to `views` is refused with EROFS and counted. A page that the kernel writes back (`FUSE_WRITE_CACHE`) is
//!   accepted, counted and dropped: refusing it would only leave an error for an innocent `fsync`.
//! * Punching holes drops base bytes; other kinds of `fallocate` are EOPNOTSUPP.
//! * No handler sleeps on anything that another FUSE request answers, and none invalidates: it only queues.

use std::ffi::CStr;
use std::io;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuse_backend_rs::abi::fuse_abi::{stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, FsOptions, OpenOptions, ROOT_ID, SetattrValid, ZeroCopyReader,
    ZeroCopyWriter,
};
use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

use crate::device::Device;

use super::coherence::Coherence;
use super::served_pages::PAGE_BYTES;

/// Inode of `base`.
pub(super) const BASE_INODE: u64 = 2;
/// Inode of `views`.
pub(super) const VIEWS_INODE: u64 = 3;
/// Nothing changes behind the kernel's back but page contents, which are invalidated by name.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// `FOPEN_NOFLUSH`, which fuse-backend-rs has no name for: closing a descriptor writes nothing back. Without it every
/// `close` would wait for dirty pages, and a killed server's own descriptor would wait for the killed server.
const NOFLUSH: u32 = 1 << 5;

/// The two windows of a device as a file system.
pub(super) struct WindowFs {
    device: Arc<Device>,
    coherence: Arc<Coherence>,
    owner: (u32, u32),
    mounted: i64,
}

/// One of the two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Window {
    Base,
    Views,
}

impl WindowFs {
    pub(super) fn new(device: Arc<Device>, coherence: Arc<Coherence>) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let owner = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        Self { device, coherence, owner, mounted: i64::try_from(since).unwrap_or(0) }
    }

    fn bytes(&self, window: Window) -> u64 {
        match window {
            Window::Base => self.device.base_bytes(),
            Window::Views => self.device.views_bytes(),
        }
    }

    fn attributes(&self, inode: u64) -> io::Result<stat64> {
        // An entry's default has zeroed attributes, which spares an `unsafe` here.
        let mut attributes = Entry::default().attr;
        attributes.st_ino = inode;
        (attributes.st_uid, attributes.st_gid) = self.owner;
        (attributes.st_atime, attributes.st_mtime, attributes.st_ctime) =
            (self.mounted, self.mounted, self.mounted);
        attributes.st_blksize = 4096;
        attributes.st_nlink = 1;
        if inode == ROOT_ID {
            attributes.st_mode = libc::S_IFDIR | 0o700;
            attributes.st_nlink = 2;
        } else {
            let bytes = self.bytes(window(inode)?);
            attributes.st_mode = libc::S_IFREG | 0o600;
            attributes.st_size = i64::try_from(bytes).map_err(|_| errno(libc::EOVERFLOW))?;
            attributes.st_blocks = attributes.st_size / 512;
        }
        Ok(attributes)
    }

    fn entry(&self, inode: u64) -> io::Result<Entry> {
        let attr = self.attributes(inode)?;
        Ok(Entry { inode, attr, attr_timeout: FOREVER, entry_timeout: FOREVER, ..Entry::default() })
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn window(inode: u64) -> io::Result<Window> {
    match inode {
        BASE_INODE => Ok(Window::Base),
        VIEWS_INODE => Ok(Window::Views),
        ROOT_ID => Err(errno(libc::EISDIR)),
        _ => Err(errno(libc::ESTALE)),
    }
}

/// One request's bytes between a window and the buffer it arrived in or leaves in, without a copy between.
struct Transfer<'a> {
    fs: &'a WindowFs,
    window: Window,
}

/// The whole of a request's buffer.
fn bytes_of(slice: FileVolatileSlice<'_>) -> &mut [u8] {
    // SAFETY: the slice covers part of the one buffer that the worker of this request owns and lent to the server for the
    // time of the request; nobody else reads or writes it meanwhile, and it is initialised memory.
    unsafe { slice::from_raw_parts_mut(slice.as_ptr(), slice.len()) }
}

impl FileReadWriteVolatile for Transfer<'_> {
    fn read_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let out = bytes_of(slice);
        let read = match self.window {
            Window::Base => self.fs.device.read_base(offset, out),
            Window::Views => self.fs.device.read_views(offset, out),
        };
        read.map_err(|why| failed("read", self.window, offset, slice.len(), &why))?;
        Ok(slice.len())
    }

    fn write_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let written = self.fs.device.write_base(offset, bytes_of(slice));
        written.map_err(|why| failed("write", self.window, offset, slice.len(), &why))?;
        Ok(slice.len())
    }

    fn read_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(errno(libc::ESPIPE))
    }

    fn write_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(errno(libc::ESPIPE))
    }
}

fn failed(what: &str, window: Window, offset: u64, bytes: usize, why: &dyn std::error::Error) -> io::Error {
    tracing::error!(?window, offset, bytes, "{what} failed: {why}");
    errno(libc::EIO)
}

impl FileSystem for WindowFs {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, _: FsOptions) -> io::Result<FsOptions> {
        // No WRITEBACK_CACHE: `write` goes through, only stores through mappings are written back later.
        Ok(FsOptions::ASYNC_READ
            | FsOptions::ASYNC_DIO
            | FsOptions::BIG_WRITES
            | FsOptions::MAX_PAGES
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::EXPLICIT_INVAL_DATA)
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        match (parent, name.to_bytes()) {
            (ROOT_ID, b"base") => self.entry(BASE_INODE),
            (ROOT_ID, b"views") => self.entry(VIEWS_INODE),
            _ => Err(errno(libc::ENOENT)),
        }
    }

    fn getattr(&self, _: &Context, inode: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((self.attributes(inode)?, FOREVER))
    }

    fn setattr(
        &self,
        _: &Context,
        inode: u64,
        wanted: stat64,
        _: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        let now = self.attributes(inode)?;
        let resized = valid.contains(SetattrValid::SIZE) && wanted.st_size != now.st_size;
        if resized || valid.intersects(SetattrValid::MODE | SetattrValid::UID | SetattrValid::GID) {
            return Err(errno(libc::EPERM));
        }
        Ok((now, FOREVER))
    }

    fn open(
        &self,
        _: &Context,
        inode: u64,
        _: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        window(inode)?;
        // SAFETY: the set is a plain number to the kernel, and every kernel that does not know a bit ignores it.
        let no_flush = unsafe { OpenOptions::from_bits_unchecked(NOFLUSH) };
        Ok((None, OpenOptions::KEEP_CACHE | no_flush, None))
    }

    fn read(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        out: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        let window = window(inode)?;
        let left = self.bytes(window).saturating_sub(offset);
        let count = u64::from(size).min(left);
        if window == Window::Views {
            self.coherence.serving_views(offset, count);
        }
        let count = usize::try_from(count).map_err(|_| errno(libc::EINVAL))?;
        if count == 0 {
            return Ok(0);
        }
        out.write_from(&mut Transfer { fs: self, window }, count, offset)
    }

    fn write(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        data: &mut dyn ZeroCopyReader,
        size: u32,
        offset: u64,
        _: Option<u64>,
        written_back: bool,
        _: u32,
        _: u32,
    ) -> io::Result<usize> {
        let window = window(inode)?;
        let bytes = u64::from(size);
        let count = usize::try_from(size).map_err(|_| errno(libc::EINVAL))?;
        if window == Window::Views {
            self.device.count_refused_view_store(bytes);
            // Either way the bytes are in the page cache by now: the kernel copies first and asks then.
            self.coherence.views_soiled(offset, bytes);
            tracing::debug!(offset, bytes, written_back, "a store to the views window was dropped");
            return if written_back { Ok(count) } else { Err(errno(libc::EROFS)) };
        }
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes(window)) {
            return Err(errno(libc::EFBIG));
        }
        data.read_exact_to(&mut Transfer { fs: self, window }, count, offset)?;
        self.coherence.base_changed(offset, bytes);
        Ok(count)
    }

    fn flush(&self, _: &Context, _: u64, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn release(
        &self,
        _: &Context,
        _: u64,
        _: u32,
        _: u64,
        _: bool,
        _: bool,
        _: Option<u64>,
    ) -> io::Result<()> {
        Ok(())
    }

    fn releasedir(&self, _: &Context, _: u64, _: u32, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn fallocate(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        if window(inode)? == Window::Views {
            return Err(errno(libc::EROFS));
        }
        // The kernel's flags are positive by definition; libc types them as signed.
        let hole = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE).unsigned_abs();
        if mode != hole {
            return Err(errno(libc::EOPNOTSUPP));
        }
        let end = offset.saturating_add(length).min(self.device.base_bytes());
        if offset < end {
            let dropped = self.device.discard(offset, end - offset);
            dropped.map_err(|why| failed("discard", Window::Base, offset, 0, &why))?;
            self.coherence.base_changed(offset, end - offset);
        }
        Ok(())
    }

    fn lseek(&self, _: &Context, inode: u64, _: u64, offset: u64, whence: u32) -> io::Result<u64> {
        let bytes = self.bytes(window(inode)?);
        if offset >= bytes {
            return Err(errno(libc::ENXIO));
        }
        match i32::try_from(whence) {
            Ok(libc::SEEK_DATA) => Ok(offset),
            Ok(libc::SEEK_HOLE) => Ok(bytes),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    fn statfs(&self, _: &Context, _: u64) -> io::Result<statvfs64> {
        // SAFETY: a structure of plain numbers, for which zero is a value.
        let mut stat: statvfs64 = unsafe { std::mem::zeroed() };
        (stat.f_bsize, stat.f_frsize, stat.f_namemax) = (PAGE_BYTES, PAGE_BYTES, 255);
        stat.f_blocks = (self.device.base_bytes() + self.device.views_bytes()) / PAGE_BYTES;
        stat.f_files = 3;
        Ok(stat)
    }

    fn readdir(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        _: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        if inode != ROOT_ID {
            return Err(errno(libc::ENOTDIR));
        }
        let (directory, file) = (u32::from(libc::DT_DIR), u32::from(libc::DT_REG));
        let entries: [(u64, u32, &[u8]); 4] = [
            (ROOT_ID, directory, b"."),
            (ROOT_ID, directory, b".."),
            (BASE_INODE, file, b"base"),
            (VIEWS_INODE, file, b"views"),
        ];
        for (place, (ino, type_, name)) in (1_u64..).zip(entries) {
            // `add` takes nothing more when the answer is full; the kernel then asks again from there.
            if place > offset && add(DirEntry { ino, offset: place, type_, name })? == 0 {
                break;
            }
        }
        Ok(())
    }
}
