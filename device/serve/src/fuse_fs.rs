//! The mounted file system: exports, `base` and `views`, and the targets of `base` if there are
//! any, in the folders that [`super::export`] gives them.
//!
//! What each request may do:
//!
//! * All files have exactly their window's or target's size for ever, as a disk has. To give one
//!   another size is refused with EPERM. To open one with `O_TRUNC` changes nothing, neither the
//!   size nor a byte nor a dirty page: the kernel asks for size 0 by itself then, and keeps the
//!   size that the answer says. (That needs `FUSE_ATOMIC_O_TRUNC` to be off; with it the kernel
//!   drops its pages unasked.) `truncate` of a path to 0 cannot be told from that; `ftruncate` can,
//!   and is refused.
//! * Names cannot be made, removed or changed, but for those under `files/`: EROFS, which programs
//!   have words for. Modes and owners are what they are: to set them anew to the same is no change,
//!   to set others is EPERM. Times are the mount's; to set them is accepted and forgotten, so that
//!   no copy is ever believed to be newer than a store.
//! * A read past the end gives nothing. A write that passes it is done as far as the end, as a disk
//!   does, and one that begins there is refused with ENOSPC.
//! * `write` to `views` is refused with EROFS and counted; so is a page that the kernel writes back
//!   (`FUSE_WRITE_CACHE`): `msync` and `fsync` then say that a store did not come to be.
//! * `SEEK_HOLE` and `SEEK_DATA` show what of `base` holds nothing: see [`super::coherence`].
//!   `base` counts as many blocks as it takes in the store, and `statfs` has the store's room.
//! * Punching holes drops base bytes; other kinds of `fallocate`, and any on a target, are
//!   EOPNOTSUPP.
//! * Bytes that the device has no room for are refused with ENOSPC. Write-backs of coherent base
//!   files and of targets, which may wait for room, are not served here but by
//!   [`super::write_backs`].
//! * What lies under `models/` is read-only: EROFS. See [`super::models`].
//! * What lies under `files/` is a file system of its own: see [`super::files`].
//! * A host's base file is read and written through the host's cache ([`super::host_cache`]). What
//!   would pass by its page cache is refused: `O_DIRECT` with EINVAL, holes with EOPNOTSUPP.
//! * No handler sleeps on anything that another FUSE request answers, and none invalidates: it only
//!   queues.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuse_backend_rs::abi::fuse_abi::{CreateIn, stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, ZeroCopyReader, ZeroCopyWriter,
};
use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

use lamina_device::device::DeviceError;
use lamina_device::device::poison::PATTERN;
use lamina_files::{Files, PART};

use super::export::Export;
use super::export_file::ExportFile;
use super::files::{self, FILES, FileTransfer};
use super::held_bytes::{HOLDS, held};
use super::models::{self, MODELS, Models};
use super::request_buffer::bytes_of;
use super::served_pages::PAGE_BYTES;
use super::tree::{ROOT, Tree};
use super::window_parts;

/// Nothing changes behind the kernel's back but page contents, which are invalidated by name.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long the kernel may say what a file takes without asking.
const ATTRIBUTES: Duration = Duration::from_secs(1);
/// Bytes of the blocks that `stat` counts.
const STAT_BLOCK: u64 = 512;
/// `FOPEN_NOFLUSH`, which fuse-backend-rs has no name for: closing a descriptor writes nothing
/// back. Without it every `close` would wait for dirty pages, and a killed server's own descriptor
/// would wait for the killed server.
const NOFLUSH: u32 = 1 << 5;

/// The attribute of the root that names the API's socket.
const API: &CStr = c"user.lamina.api";

/// What of the tree a connection to the kernel shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// All of it.
    All,
    /// All but what is in `files/`: there another connection is mounted.
    ButFiles,
    /// What is in `files/`, as its root.
    Files,
}

/// The windows of a device as a file system.
pub(super) struct WindowFs {
    tree: Arc<Tree>,
    shown: Shown,
    owner: (u32, u32),
    mounted: i64,
}

/// A file that a request is about.
#[derive(Clone, Copy)]
struct Opened<'a> {
    export: &'a Arc<Export>,
    which: ExportFile,
}

impl Opened<'_> {
    fn bytes(self) -> u64 {
        self.export.bytes_of(self.which)
    }

    /// Bytes that the file takes.
    fn taken(self) -> u64 {
        if self.which != ExportFile::Base {
            return self.bytes();
        }
        // Of a file without a block, tar reads nothing; and stores may wait in the page cache.
        self.export.partition().stored_bytes().max(PAGE_BYTES)
    }

    /// Whether its pages are written back, and so must not be read or written while some are
    /// discarded.
    fn holds_off_discards(self) -> bool {
        self.which != ExportFile::Views && self.export.cache().is_none()
    }

    /// Refuses what would pass by a host's page cache.
    fn cached(self, flags: u32) -> io::Result<()> {
        let direct = flags & libc::O_DIRECT.unsigned_abs() != 0;
        let held = self.which == ExportFile::Base && self.export.cache().is_some();
        if direct && held { Err(errno(libc::EINVAL)) } else { Ok(()) }
    }
}

impl WindowFs {
    pub(super) fn new(tree: Arc<Tree>, shown: Shown) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let owner = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        Self { tree, shown, owner, mounted: i64::try_from(since).unwrap_or(0) }
    }

    fn opened(&self, inode: u64) -> io::Result<Opened<'_>> {
        match self.tree.file(inode) {
            Some((export, which)) => Ok(Opened { export, which }),
            None if self.tree.parent(inode).is_some() => Err(errno(libc::EISDIR)),
            None => Err(errno(libc::ESTALE)),
        }
    }

    /// The models, if an inode is one of theirs.
    fn models(&self, inode: u64) -> io::Result<Option<&Models>> {
        if !models::is_ours(inode) {
            return Ok(None);
        }
        self.tree.models().map(|models| Some(models.as_ref())).ok_or_else(|| errno(libc::ESTALE))
    }

    /// The files, and the inode of theirs, if it is one.
    fn files(&self, inode: u64) -> io::Result<Option<(&Files, u64)>> {
        let own = match self.shown {
            Shown::Files if inode == ROOT => files::own(FILES),
            // Where the other is mounted is an empty folder to this one.
            Shown::ButFiles if inode == FILES => None,
            _ => files::own(inode),
        };
        let Some(own) = own else { return Ok(None) };
        self.tree.files().map(|files| Some((files.as_ref(), own))).ok_or_else(|| errno(libc::ESTALE))
    }

    /// The files and a folder of theirs. Names in any other folder cannot be changed.
    fn folder_of_files(&self, parent: u64) -> io::Result<(&Files, u64)> {
        self.files(parent)?.ok_or_else(|| errno(libc::EROFS))
    }

    /// Makes something in a folder of the files.
    fn make(&self, ctx: &Context, parent: u64, name: &CStr, what: (u32, u32, &[u8])) -> io::Result<Entry> {
        let (files, folder) = self.folder_of_files(parent)?;
        self.entry(files::make(files, files::caller(ctx.uid, ctx.gid), folder, name, what)?)
    }

    fn attributes_of_model(&self, models: &Models, inode: u64) -> io::Result<stat64> {
        let found = models.attributes(inode)?;
        let mut attributes = Entry::default().attr;
        attributes.st_ino = inode;
        (attributes.st_uid, attributes.st_gid) = self.owner;
        let (seconds, nanoseconds) = if inode == MODELS { (self.mounted, 0) } else { found.modified };
        (attributes.st_atime, attributes.st_mtime, attributes.st_ctime) = (seconds, seconds, seconds);
        (attributes.st_atime_nsec, attributes.st_mtime_nsec, attributes.st_ctime_nsec) =
            (nanoseconds, nanoseconds, nanoseconds);
        attributes.st_blksize = 4096;
        (attributes.st_mode, attributes.st_nlink) =
            if found.is_folder { (libc::S_IFDIR | 0o555, 2) } else { (libc::S_IFREG | 0o444, 1) };
        attributes.st_size = i64::try_from(found.bytes).map_err(|_| errno(libc::EOVERFLOW))?;
        attributes.st_blocks = i64::try_from(found.taken.div_ceil(STAT_BLOCK)).unwrap_or(i64::MAX);
        Ok(attributes)
    }

    fn attributes(&self, inode: u64) -> io::Result<stat64> {
        if let Some((files, inode)) = self.files(inode)? {
            return files::attributes(files, inode);
        }
        if let Some(models) = self.models(inode)? {
            return self.attributes_of_model(models, inode);
        }
        // An entry's default has zeroed attributes, which spares an `unsafe` here.
        let mut attributes = Entry::default().attr;
        attributes.st_ino = inode;
        (attributes.st_uid, attributes.st_gid) = self.owner;
        (attributes.st_atime, attributes.st_mtime, attributes.st_ctime) =
            (self.mounted, self.mounted, self.mounted);
        attributes.st_blksize = 4096;
        attributes.st_nlink = 1;
        if inode == FILES || self.tree.parent(inode).is_some() && self.tree.file(inode).is_none() {
            attributes.st_mode = libc::S_IFDIR | 0o700;
            attributes.st_nlink = 2;
        } else {
            let opened = self.opened(inode)?;
            attributes.st_mode = libc::S_IFREG | 0o600;
            attributes.st_size = i64::try_from(opened.bytes()).map_err(|_| errno(libc::EOVERFLOW))?;
            attributes.st_blocks = i64::try_from(opened.taken().div_ceil(STAT_BLOCK)).unwrap_or(i64::MAX);
        }
        Ok(attributes)
    }

    /// What the kernel is told of an inode that it holds from then on, once more.
    fn entry(&self, inode: u64) -> io::Result<Entry> {
        let attr = self.attributes(inode)?;
        if let Some((files, own)) = self.files(inode)? {
            files.looked_up(own).map_err(|why| files::said(&why))?;
        }
        // Models come and go.
        let entry_timeout = if models::is_ours(inode) { ATTRIBUTES } else { FOREVER };
        Ok(Entry { inode, attr, attr_timeout: ATTRIBUTES, entry_timeout, ..Entry::default() })
    }
}

/// The length of a value, if it was asked for by no room at all; ERANGE if there is too little.
fn fitting(value: &[u8], room: u32) -> io::Result<Option<u32>> {
    let length = u32::try_from(value.len()).map_err(|_| errno(libc::E2BIG))?;
    match room {
        0 => Ok(Some(length)),
        room if room < length => Err(errno(libc::ERANGE)),
        _ => Ok(None),
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// One request's bytes between a window and the buffer it arrived in or leaves in, without a copy
/// between.
struct Transfer<'a>(Opened<'a>);

impl FileReadWriteVolatile for Transfer<'_> {
    fn read_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let out = bytes_of(slice);
        let Opened { export, which } = self.0;
        let read = match (which, export.cache()) {
            (ExportFile::Base, None) => export.partition().read_base(offset, out),
            (ExportFile::Base, Some(cache)) => cache.read(offset, out),
            (ExportFile::Views, Some(cache)) if cache.is_poison() => {
                out.fill(PATTERN);
                Ok(())
            }
            (ExportFile::Views, _) => export.partition().read_views(offset, out),
            (ExportFile::Target(target), _) => export.partition().device().read_target(target, offset, out),
        };
        read.map_err(|why| failed("read", self.0, offset, slice.len(), &why))?;
        Ok(slice.len())
    }

    fn write_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let Opened { export, which } = self.0;
        let written = match (which, export.cache()) {
            (ExportFile::Target(target), _) => {
                export.partition().device().write_target(target, offset, bytes_of(slice))
            }
            (_, None) => {
                let mut done = 0;
                match export.partition().write_back(offset, bytes_of(slice), &mut done) {
                    // The kernel asks for the rest, and is told then.
                    Err(_) if done > 0 => return Ok(done),
                    written => written,
                }
            }
            (_, Some(cache)) => cache.write(offset, bytes_of(slice)),
        };
        written.map_err(|why| failed("write", self.0, offset, slice.len(), &why))?;
        Ok(slice.len())
    }

    fn read_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(errno(libc::ESPIPE))
    }

    fn write_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(errno(libc::ESPIPE))
    }
}

/// As [`Transfer`], out of a model's file.
struct ModelTransfer<'a>(&'a Models, u64);

impl FileReadWriteVolatile for ModelTransfer<'_> {
    fn read_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        self.0.read(self.1, offset, bytes_of(slice))?;
        Ok(slice.len())
    }

    fn write_at_volatile(&mut self, _: FileVolatileSlice<'_>, _: u64) -> io::Result<usize> {
        Err(errno(libc::EROFS))
    }

    fn read_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(errno(libc::ESPIPE))
    }

    fn write_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(errno(libc::ESPIPE))
    }
}

fn failed(what: &str, opened: Opened<'_>, offset: u64, bytes: usize, why: &DeviceError) -> io::Error {
    let Opened { export, which } = opened;
    if why.is_no_room() {
        tracing::debug!(place = ?export.place(), ?which, offset, bytes, "{what} refused: {why}");
        return errno(libc::ENOSPC);
    }
    tracing::error!(place = ?export.place(), ?which, offset, bytes, "{what} failed: {why}");
    errno(libc::EIO)
}

impl FileSystem for WindowFs {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, _: FsOptions) -> io::Result<FsOptions> {
        // Without WRITEBACK_CACHE `write` goes through, and only stores through mappings are
        // written back later.
        let write_cache =
            if self.shown == Shown::Files { FsOptions::WRITEBACK_CACHE } else { FsOptions::empty() };
        Ok(FsOptions::ASYNC_READ
            | FsOptions::ASYNC_DIO
            | FsOptions::BIG_WRITES
            | FsOptions::MAX_PAGES
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::EXPLICIT_INVAL_DATA
            // So that the kernel need not ask for an attribute before each `write`.
            | FsOptions::HANDLE_KILLPRIV_V2
            | write_cache)
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        if let Some((files, folder)) = self.files(parent)? {
            return self.entry(files::find(files, folder, name)?);
        }
        let Ok(name) = name.to_str() else { return Err(errno(libc::ENOENT)) };
        if parent == ROOT && name == files::FOLDER && self.tree.files().is_some() {
            return self.entry(FILES);
        }
        if let Some(models) = self.models(parent)? {
            return self.entry(models.find(parent, name)?);
        }
        if parent == ROOT && name == models::FOLDER && self.tree.models().is_some() {
            return self.entry(MODELS);
        }
        self.entry(self.tree.find(parent, name).ok_or_else(|| errno(libc::ENOENT))?)
    }

    fn forget(&self, _: &Context, inode: u64, count: u64) {
        if let Ok(Some((files, inode))) = self.files(inode)
            && let Err(why) = files.forgotten(inode, count)
        {
            tracing::warn!("a file that was removed takes room still: {why}");
        }
    }

    fn batch_forget(&self, ctx: &Context, requests: Vec<(u64, u64)>) {
        for (inode, count) in requests {
            self.forget(ctx, inode, count);
        }
    }

    fn getattr(&self, _: &Context, inode: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((self.attributes(inode)?, ATTRIBUTES))
    }

    fn setattr(
        &self,
        _: &Context,
        inode: u64,
        wanted: stat64,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        if let Some((files, inode)) = self.files(inode)? {
            return Ok((files::set(files, inode, &wanted, valid)?, ATTRIBUTES));
        }
        let now = self.attributes(inode)?;
        let times = SetattrValid::ATIME | SetattrValid::MTIME | SetattrValid::SIZE;
        if models::is_ours(inode) && valid.intersects(times) {
            return Err(errno(libc::EROFS));
        }
        // Without a handle: the kernel's own request, for O_TRUNC.
        let opening = handle.is_none() && wanted.st_size == 0;
        let views = self.tree.file(inode).is_some_and(|(_, which)| which == ExportFile::Views);
        if valid.contains(SetattrValid::SIZE) && views && wanted.st_size != now.st_size {
            return Err(errno(libc::EROFS));
        }
        let changes = [
            valid.contains(SetattrValid::SIZE) && wanted.st_size != now.st_size && !opening,
            valid.contains(SetattrValid::MODE) && (wanted.st_mode ^ now.st_mode) & 0o7777 != 0,
            valid.contains(SetattrValid::UID) && wanted.st_uid != now.st_uid,
            valid.contains(SetattrValid::GID) && wanted.st_gid != now.st_gid,
        ];
        if changes.contains(&true) {
            return Err(errno(if models::is_ours(inode) { libc::EROFS } else { libc::EPERM }));
        }
        Ok((now, ATTRIBUTES))
    }

    fn readlink(&self, _: &Context, inode: u64) -> io::Result<Vec<u8>> {
        let (files, inode) = self.files(inode)?.ok_or_else(|| errno(libc::EINVAL))?;
        files.target(inode).map_err(|why| files::said(&why))
    }

    fn create(
        &self,
        ctx: &Context,
        parent: u64,
        name: &CStr,
        args: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        let made = self.make(ctx, parent, name, (libc::S_IFREG | args.mode & 0o7777, 0, b""));
        let entry = match made {
            // The kernel makes what it has not seen. If it is there by now, only O_EXCL minds.
            Err(why)
                if why.raw_os_error() == Some(libc::EEXIST)
                    && args.flags & libc::O_EXCL.unsigned_abs() == 0 =>
            {
                let (files, folder) = self.folder_of_files(parent)?;
                self.entry(files::find(files, folder, name)?)?
            }
            made => made?,
        };
        let opened = self.open(ctx, entry.inode, args.flags, args.fuse_flags);
        // Of what it cannot open, the kernel is not told.
        let opened = opened.inspect_err(|_| self.forget(ctx, entry.inode, 1));
        let (handle, options, passthrough) = opened?;
        Ok((entry, handle, options, passthrough))
    }

    fn mknod(
        &self,
        ctx: &Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        device: u32,
        _: u32,
    ) -> io::Result<Entry> {
        self.make(ctx, parent, name, (mode, device, b""))
    }

    fn mkdir(&self, ctx: &Context, parent: u64, name: &CStr, mode: u32, _: u32) -> io::Result<Entry> {
        self.make(ctx, parent, name, (libc::S_IFDIR | mode & 0o7777, 0, b""))
    }

    fn symlink(&self, ctx: &Context, target: &CStr, parent: u64, name: &CStr) -> io::Result<Entry> {
        self.make(ctx, parent, name, (libc::S_IFLNK | 0o777, 0, target.to_bytes()))
    }

    fn link(&self, ctx: &Context, inode: u64, parent: u64, name: &CStr) -> io::Result<Entry> {
        let (files, folder) = self.folder_of_files(parent)?;
        let own = files::own(inode).ok_or_else(|| errno(libc::EXDEV))?;
        let linked = files.link(files::caller(ctx.uid, ctx.gid), own, folder, name.to_bytes());
        linked.map_err(|why| files::said(&why))?;
        self.entry(inode)
    }

    fn unlink(&self, ctx: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        let (files, folder) = self.folder_of_files(parent)?;
        let removed = files.remove(files::caller(ctx.uid, ctx.gid), folder, name.to_bytes(), false);
        removed.map_err(|why| files::said(&why))
    }

    fn rmdir(&self, ctx: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        let (files, folder) = self.folder_of_files(parent)?;
        let removed = files.remove(files::caller(ctx.uid, ctx.gid), folder, name.to_bytes(), true);
        removed.map_err(|why| files::said(&why))
    }

    fn rename(
        &self,
        ctx: &Context,
        from: u64,
        old: &CStr,
        to: u64,
        new: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let (files, source) = self.folder_of_files(from)?;
        let (_, goal) = self.folder_of_files(to)?;
        files::rename(files, files::caller(ctx.uid, ctx.gid), (source, old), (goal, new), flags)
    }

    fn open(
        &self,
        _: &Context,
        inode: u64,
        flags: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        if let Some(models) = self.models(inode)? {
            if flags & (libc::O_ACCMODE | libc::O_TRUNC).unsigned_abs() != libc::O_RDONLY.unsigned_abs() {
                return Err(errno(libc::EROFS));
            }
            let kept = models.open_file(inode)?;
            return Ok((None, if kept { OpenOptions::KEEP_CACHE } else { OpenOptions::empty() }, None));
        }
        // SAFETY: the set is a plain number to the kernel, and every kernel that does not know a
        // bit ignores it.
        let no_flush = unsafe { OpenOptions::from_bits_unchecked(NOFLUSH) };
        let options = OpenOptions::KEEP_CACHE | no_flush;
        if let Some((files, inode)) = self.files(inode)? {
            // What was written and finds no room is told when the file is closed at the latest.
            let options = if self.shown == Shown::Files { OpenOptions::KEEP_CACHE } else { options };
            return Ok((None, files::open(files, inode, flags, options)?, None));
        }
        self.opened(inode)?.cached(flags)?;
        Ok((None, options, None))
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
        flags: u32,
    ) -> io::Result<usize> {
        if let Some(models) = self.models(inode)? {
            let left = models.bytes(inode)?.saturating_sub(offset);
            let count = usize::try_from(u64::from(size).min(left)).map_err(|_| errno(libc::EINVAL))?;
            return if count == 0 {
                Ok(0)
            } else {
                out.write_from(&mut ModelTransfer(models, inode), count, offset)
            };
        }
        if let Some((files, inode)) = self.files(inode)? {
            let count = usize::try_from(size).map_err(|_| errno(libc::EINVAL))?;
            let mut transfer = FileTransfer { files, inode, way: files::way(flags, false) };
            return out.write_from(&mut transfer, count, offset);
        }
        let opened = self.opened(inode)?;
        opened.cached(flags)?;
        let left = opened.bytes().saturating_sub(offset);
        let count = u64::from(size).min(left);
        opened.export.coherence().serving(opened.which, offset, count);
        let count = usize::try_from(count).map_err(|_| errno(libc::EINVAL))?;
        if count == 0 {
            return Ok(0);
        }
        let _reading = opened
            .holds_off_discards()
            .then(|| opened.export.coherence().reading(opened.which, offset, count as u64));
        out.write_from(&mut Transfer(opened), count, offset)
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
        flags: u32,
        fuse_flags: u32,
    ) -> io::Result<usize> {
        if models::is_ours(inode) {
            return Err(errno(libc::EROFS));
        }
        if let Some((files, inode)) = self.files(inode)? {
            if fuse_flags & files::KILL_PRIVILEGES != 0 {
                files.drop_privileges(inode).map_err(|why| files::said(&why))?;
            }
            let count = usize::try_from(size).map_err(|_| errno(libc::EINVAL))?;
            let mut transfer = FileTransfer { files, inode, way: files::way(flags, written_back) };
            return data.read_to(&mut transfer, count, offset);
        }
        let opened = self.opened(inode)?;
        opened.cached(flags)?;
        let bytes = u64::from(size);
        if opened.which == ExportFile::Views {
            opened.export.partition().count_refused_view_store(bytes);
            // Either way the bytes are in the page cache by now: the kernel copies first and asks
            // then.
            opened.export.coherence().views_soiled(offset, bytes);
            tracing::debug!(offset, bytes, written_back, "a store to the views window was dropped");
            return Err(errno(libc::EROFS));
        }
        // The kernel then takes no more for written, and asks for the rest.
        let bytes = bytes.min(opened.bytes().saturating_sub(offset));
        if bytes == 0 && size > 0 {
            return Err(errno(libc::ENOSPC));
        }
        let count = usize::try_from(bytes).map_err(|_| errno(libc::EINVAL))?;
        if opened.export.cache().is_none() {
            // What was written stays in the page cache.
            opened.export.coherence().serving(opened.which, offset, bytes);
        }
        let writing = opened
            .holds_off_discards()
            .then(|| opened.export.coherence().writing(opened.which, offset, bytes));
        let mut done = 0;
        let failed = loop {
            match data.read_to(&mut Transfer(opened), count - done, offset + done as u64) {
                Ok(0) if count > done => break Some(io::ErrorKind::WriteZero.into()),
                Ok(stored) => done += stored,
                Err(why) => break Some(why),
            }
            if done == count {
                break None;
            }
        };
        drop(writing);
        if opened.export.cache().is_none() && done > 0 {
            opened.export.coherence().changed(opened.which, offset, done as u64);
        }
        match failed {
            // Of what is written back the kernel hears an error, and not how much was stored.
            Some(why) if done == 0 || written_back => Err(why),
            _ => Ok(done),
        }
    }

    fn flush(&self, _: &Context, _: u64, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn fsync(&self, _: &Context, inode: u64, _: bool, _: u64) -> io::Result<()> {
        // Of a window the kernel has written back what there was.
        let Some((files, inode)) = self.files(inode)? else { return Ok(()) };
        files.sync(inode).map_err(|why| files::said(&why))
    }

    fn fsyncdir(&self, ctx: &Context, inode: u64, only_data: bool, handle: u64) -> io::Result<()> {
        self.fsync(ctx, inode, only_data, handle)
    }

    fn release(
        &self,
        _: &Context,
        inode: u64,
        _: u32,
        _: u64,
        _: bool,
        _: bool,
        _: Option<u64>,
    ) -> io::Result<()> {
        if let Some((files, inode)) = self.files(inode)? {
            files.closed(inode).map_err(|why| files::said(&why))?;
        }
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
        if models::is_ours(inode) {
            return Err(errno(libc::EROFS));
        }
        if let Some((files, inode)) = self.files(inode)? {
            return files::allocate(files, inode, mode, offset, length);
        }
        let opened = self.opened(inode)?;
        if opened.which == ExportFile::Views {
            return Err(errno(libc::EROFS));
        }
        // The kernel's flags are positive by definition; libc types them as signed.
        let hole = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE).unsigned_abs();
        if mode != hole || opened.which != ExportFile::Base || opened.export.cache().is_some() {
            return Err(errno(libc::EOPNOTSUPP));
        }
        let end = offset.saturating_add(length).min(opened.bytes());
        if offset < end {
            let dropped = opened.export.coherence().punch(offset..end);
            dropped.map_err(|why| failed("discard", opened, offset, 0, &why))?;
        }
        Ok(())
    }

    fn lseek(&self, _: &Context, inode: u64, _: u64, offset: u64, whence: u32) -> io::Result<u64> {
        if let Some(models) = self.models(inode)? {
            let bytes = models.bytes(inode)?;
            return match i32::try_from(whence) {
                _ if offset >= bytes => Err(errno(libc::ENXIO)),
                Ok(libc::SEEK_DATA) => Ok(offset),
                Ok(libc::SEEK_HOLE) => Ok(bytes),
                _ => Err(errno(libc::EINVAL)),
            };
        }
        if let Some((files, inode)) = self.files(inode)? {
            if self.shown == Shown::Files {
                // The kernel then says itself where data is: everywhere. Here it is not known yet.
                return Err(errno(libc::ENOSYS));
            }
            return files::seek(files, inode, offset, whence);
        }
        let Opened { export, which } = self.opened(inode)?;
        let bytes = export.bytes_of(which);
        if offset >= bytes {
            return Err(errno(libc::ENXIO));
        }
        let found = match (i32::try_from(whence), which) {
            (Ok(libc::SEEK_DATA), ExportFile::Base) => export.coherence().next_data(offset),
            (Ok(libc::SEEK_HOLE), ExportFile::Base) => return Ok(export.coherence().next_hole(offset)),
            (Ok(libc::SEEK_DATA), _) => offset,
            (Ok(libc::SEEK_HOLE), _) => return Ok(bytes),
            _ => return Err(errno(libc::EINVAL)),
        };
        if found < bytes { Ok(found) } else { Err(errno(libc::ENXIO)) }
    }

    fn getxattr(&self, _: &Context, inode: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        let value = match (self.models(inode)?, self.files(inode)?) {
            (Some(models), _) => models.attribute(inode, name.to_str().unwrap_or_default())?,
            (_, Some((files, inode))) => {
                files.attribute(inode, name.to_bytes()).map_err(|why| files::said(&why))?
            }
            // Not ENOSYS, after which the kernel would ask no more.
            _ if name == HOLDS => {
                let base = self.tree.file(inode).filter(|(_, which)| *which == ExportFile::Base);
                let held = base.and_then(|(export, _)| held(&self.tree, export.partition()));
                held.ok_or_else(|| errno(libc::ENODATA))?.into_bytes()
            }
            _ => {
                let api = self.tree.api().filter(|_| inode == ROOT && name == API);
                api.ok_or_else(|| errno(libc::ENODATA))?.as_os_str().as_encoded_bytes().to_vec()
            }
        };
        Ok(match fitting(&value, size)? {
            Some(count) => GetxattrReply::Count(count),
            None => GetxattrReply::Value(value),
        })
    }

    fn listxattr(&self, _: &Context, inode: u64, size: u32) -> io::Result<ListxattrReply> {
        let names = match (self.models(inode)?, self.files(inode)?) {
            (Some(models), _) => models.attribute_names(inode),
            (_, Some((files, inode))) => files.attribute_names(inode).map_err(|why| files::said(&why))?,
            _ if inode == ROOT && self.tree.api().is_some() => API.to_bytes_with_nul().to_vec(),
            _ => Vec::new(),
        };
        Ok(match fitting(&names, size)? {
            Some(count) => ListxattrReply::Count(count),
            None => ListxattrReply::Names(names),
        })
    }

    fn setxattr(&self, ctx: &Context, inode: u64, name: &CStr, value: &[u8], flags: u32) -> io::Result<()> {
        if let Some((files, inode)) = self.files(inode)? {
            return files::set_attribute(files, files::caller(ctx.uid, ctx.gid), inode, name, value, flags);
        }
        if let Some((export, ExportFile::Base)) = self.tree.file(inode)
            && name.to_bytes() == PART
            && export.cache().is_none()
        {
            return window_parts::set_class(export, self.tree.exports(), value);
        }
        Err(errno(if models::is_ours(inode) { libc::EROFS } else { libc::EOPNOTSUPP }))
    }

    fn removexattr(&self, ctx: &Context, inode: u64, name: &CStr) -> io::Result<()> {
        if let Some((files, inode)) = self.files(inode)? {
            let caller = files::caller(ctx.uid, ctx.gid);
            return files.remove_attribute(caller, inode, name.to_bytes()).map_err(|why| files::said(&why));
        }
        Err(errno(if models::is_ours(inode) { libc::EROFS } else { libc::EOPNOTSUPP }))
    }

    fn statfs(&self, _: &Context, inode: u64) -> io::Result<statvfs64> {
        // SAFETY: a structure of plain numbers, for which zero is a value.
        let mut stat: statvfs64 = unsafe { std::mem::zeroed() };
        (stat.f_bsize, stat.f_frsize, stat.f_namemax) = (PAGE_BYTES, PAGE_BYTES, 255);
        // Of a folder, the device; all partitions are of one.
        let space = match (self.tree.file(inode), self.tree.exports().first()) {
            (Some((export, _)), _) => export.partition().space(),
            (None, Some(export)) => export.partition().device().space(),
            (None, None) => return Err(errno(libc::ESTALE)),
        };
        stat.f_blocks = space.bytes / PAGE_BYTES;
        stat.f_bfree = space.free / PAGE_BYTES;
        stat.f_bavail = space.available / PAGE_BYTES;
        stat.f_files = self.tree.len();
        if let Some((files, _)) = self.files(inode)? {
            files::room(files, space, &mut stat);
        }
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
        if let Some((files, inode)) = self.files(inode)? {
            return files::list(files, (inode, ROOT), offset, add);
        }
        let (directory, file) = (u32::from(libc::DT_DIR), u32::from(libc::DT_REG));
        let kind = |is_folder| if is_folder { directory } else { file };
        let (parent, mut of_models) = match self.models(inode)? {
            Some(models) => (models.parent(inode, ROOT)?, models.children(inode)?),
            None if inode == FILES => (ROOT, Vec::new()),
            None => (self.tree.parent(inode).ok_or_else(|| errno(libc::ESTALE))?, Vec::new()),
        };
        if self.tree.file(inode).is_some() {
            return Err(errno(libc::ENOTDIR));
        }
        if inode == ROOT && self.tree.models().is_some() {
            of_models.push(models::Child { inode: MODELS, is_folder: true, name: models::FOLDER.to_owned() });
        }
        if inode == ROOT && self.tree.files().is_some() {
            let name = files::FOLDER.to_owned();
            of_models.push(models::Child { inode: FILES, is_folder: true, name });
        }
        let children = self
            .tree
            .children(inode)
            .map(|child| (child.inode, kind(child.is_folder), child.name.as_bytes()));
        let of_models = of_models.iter();
        let of_models = of_models.map(|child| (child.inode, kind(child.is_folder), child.name.as_bytes()));
        let children = children.chain(of_models);
        let dots = [(inode, directory, b".".as_slice()), (parent, directory, b"..")];
        let is_stable = !models::is_ours(inode);
        for (place, (ino, type_, name)) in (1_u64..).zip(dots.into_iter().chain(children)) {
            // What is in a model's folder may be more by the next call: it goes by inode.
            let place = if is_stable || place <= 2 { place } else { ino };
            // `add` takes nothing more when the answer is full; the kernel then asks again from
            // there.
            if place > offset && add(DirEntry { ino, offset: place, type_, name })? == 0 {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use lamina_codec::testing::bytes as noise;
    use lamina_device::device::{Device, DeviceConfig};

    use super::*;
    use crate::fuse::{Mount, MountOptions};
    use crate::held_mount::fuse_present;
    use crate::mount_point::MountPoint;

    #[test]
    fn a_write_that_finds_no_room_has_stored_what_it_says_and_no_byte_more() {
        const BASE: usize = 16 << 20;
        const PIECE: usize = 128 << 10;
        if let Err(why) = fuse_present() {
            return lamina_skipped::test(why);
        }
        let folder = tempfile::tempdir().unwrap();
        let config = DeviceConfig { store_bytes: Some(6 << 20), ..DeviceConfig::new(BASE as u64, 8 << 20) };
        let device = Arc::new(Device::new(config).unwrap());
        let point = MountPoint::prepare(&folder.path().join("mount")).unwrap();
        let mount = Mount::new(&device, point, &MountOptions::default()).unwrap();
        let base = File::options().read(true).write(true).open(mount.base_path()).unwrap();
        base.write_all_at(&vec![7; BASE], 0).unwrap();
        let mut refused = 0;
        for at in (0..BASE).step_by(PIECE) {
            let data = noise(at as u64 + 1, PIECE);
            let stored = match base.write_at(&data, at as u64) {
                Ok(stored) => stored,
                Err(why) => {
                    assert_eq!(why.raw_os_error(), Some(libc::ENOSPC));
                    refused += 1;
                    0
                }
            };
            let mut found = vec![0; PIECE];
            device.read_base(at as u64, &mut found).unwrap();
            assert!(found[..stored] == data[..stored], "at {at}");
            assert!(found[stored..].iter().all(|byte| *byte == 7), "{stored} bytes at {at}");
        }
        assert!(refused > 0);
    }
}
