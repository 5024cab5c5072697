//! The image: one sparse file that holds all that a device must not forget.
//!
//! It is a file on disk (`--image`), or memory that the holder keeps while workers come and go. The
//! rules:
//!
//! * The first page is the *superblock*: what the device is. Everything else lies where that says,
//!   in this order, each part at a multiple of 2 MiB: the tables of tensors and views, the
//!   counters, the journal, staged KV windows, the comparison with GComp, the plane index, the
//!   segments. A part that was never written is a hole, and takes no room.
//! * The superblock is written once, last, when the image is made. A file whose superblock does not
//!   check is no image.
//! * One process at a time has an image open; a lock on the file says so.
//! * Every change is made so that after a `kill -9` between any two stores the image is whole: see
//!   [`journal`](super::journal) for the index and [`tables`](super::tables) for tensors and views.
//!   What holds segments is not written down: it is what the index's entries name.
//! * After a crash of the host itself, an image on a disk is what it was at the last
//!   [checkpoint](super::checkpoint). What that takes is in the unused pages behind the superblock
//!   and behind the segments. An image of a version before gets it when it is opened, and its
//!   superblock says so afterwards, so that programs of that version refuse it.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    statfs::{BTRFS_SUPER_MAGIC, TMPFS_MAGIC, fstatfs},
};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use serde::{Deserialize, Serialize};

use super::{
    StoreError,
    checkpoint::{HEAD_END, Head},
    counters,
    entry::{ENTRY_BYTES, Version},
    fiemap,
    geometry::chunks_in,
    host_memory::HostMemory,
    journal,
    ledger::{Ledger, LedgerPlace, PARTS, Worker},
    memory::{Memory, UNIT_BYTES},
    tables,
};
use crate::mode::Mode;
use lamina_codec::{BLOCK_BYTES, Codec, kv};

/// What an image begins with; the number of its version follows.
const MAGIC: &[u8; 7] = b"LAMINA\x00";
/// Bytes of the superblock.
const SUPERBLOCK_BYTES: usize = 4096;
/// Where the superblock's second copy is, if there are checkpoints: the first one is written over
/// when they are made room for.
const SECOND_SUPERBLOCK: u64 = 4096;
/// Parts begin at multiples of this.
const ALIGN: u64 = 2 << 20;
/// How long a process that has the image may take to let it go.
const LETTING_GO: Duration = Duration::from_millis(500);
/// How often a file is opened that others put another in the place of each time: more often than
/// anybody does, so that it is a file system whose numbers of files say nothing.
const MAX_OPENED: u32 = 16;
/// Bytes of a place for a staged KV window: a page for its header, one for the block that is being
/// written, and the window.
pub const STAGE_BYTES: usize = (2 + kv::MAX_BLOCKS) * BLOCK_BYTES;

/// What a device is, as its image says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Superblock {
    /// Bytes of the base window.
    pub base_bytes: u64,
    /// Bytes of the views window.
    pub views_bytes: u64,
    /// Bytes of bundles that the store may hold.
    pub store_bytes: u64,
    /// Which device.
    pub mode: Mode,
    /// The codec of tensors that name none.
    pub codec: Codec,
    /// KV windows that may be open.
    pub open_windows: u64,
    /// The partitions of a device that is divided.
    pub partitions: Vec<PartitionConfig>,
    /// Whether the image has checkpoints.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub checkpoints: bool,
    /// The version of the stored format, which stands before all this.
    #[serde(skip)]
    pub version: Version,
}

/// A part of a device for one guest, or for several to share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionConfig {
    /// Its name: 1 to 32 lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// Bytes of its base window, a multiple of 4096.
    pub base_bytes: u64,
    /// Bytes of its views window, a multiple of 2 MiB and more than the directory's 2 MiB.
    pub views_bytes: u64,
    /// Bytes that its blocks may be charged in the store, if there is a bound.
    pub quota_bytes: Option<u64>,
}

/// An open image.
#[derive(Clone, Debug)]
pub struct Image {
    file: Arc<File>,
    superblock: Superblock,
    layout: Layout,
    host: Option<Arc<HostMemory>>,
    /// What is told before the image is changed, if it has checkpoints.
    head: Option<Arc<Head>>,
    /// Whether it gets checkpoints if it has none: a crash of the host leaves nothing of what is in
    /// memory.
    durable: bool,
    /// Memory for the ledger of an image on a disk, if there is some.
    beside: Option<(Arc<File>, Arc<HostMemory>)>,
    /// Where the ledger is, if there is one.
    ledger: Option<LedgerPlace>,
}

/// Why a file cannot be the image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The system refuses.
    #[error("cannot use the image {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process has it.
    #[error("the image {} is in use by another process", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// Its entries could not name all of its store.
    #[error("a store of {bytes} bytes is more than the {most} that an image can have; see --store-capacity")]
    Store {
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that there may be.
        most: u64,
    },
    /// It is something else, or damaged at its root.
    #[error("{} is no device image that this program can use: {why}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

/// Where the parts are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Layout {
    tables: Range<u64>,
    counters: Range<u64>,
    journal: Range<u64>,
    staging: Range<u64>,
    gcomp: Range<u64>,
    index: Range<u64>,
    segments: Range<u64>,
    /// Of the checkpoints: their tables, and their indexes.
    texts: [Range<u64>; 2],
    copies: [Range<u64>; 2],
}

impl Layout {
    /// `None` if the parts pass what a file can hold.
    fn of(superblock: &Superblock) -> Option<Self> {
        let blocks = superblock.base_bytes / BLOCK_BYTES as u64;
        let mut at = ALIGN;
        let mut part = |bytes: u64| {
            let start = at;
            at = start.checked_add(bytes)?.checked_next_multiple_of(ALIGN)?;
            (at <= i64::MAX.unsigned_abs()).then_some(start..start + bytes)
        };
        let flat = superblock.mode == Mode::Plain;
        let index = if flat { 0 } else { blocks.checked_mul(ENTRY_BYTES as u64)? };
        Some(Self {
            tables: part(tables::BYTES)?,
            counters: part(counters::BYTES)?,
            journal: part(journal::BYTES)?,
            staging: part(superblock.open_windows.checked_mul(STAGE_BYTES as u64)?)?,
            gcomp: part(blocks)?,
            index: part(index)?,
            segments: part(if flat { superblock.base_bytes } else { superblock.store_bytes })?,
            texts: [part(tables::PLACE_BYTES as u64)?, part(tables::PLACE_BYTES as u64)?],
            copies: [part(index)?, part(index)?],
        })
    }

    /// Bytes of an image with or without checkpoints.
    fn bytes(&self, checkpoints: bool) -> u64 {
        if checkpoints { self.copies[1].end } else { self.segments.end }
    }
}

impl Image {
    /// Opens the image at `path`, or `None` if there is no such file or it is empty.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(path: &Path) -> Result<Option<Self>, ImageError> {
        match open_locked(path, OpenOptions::new().read(true).write(true)) {
            Ok(file) => Self::from_file(file, path),
            Err(ImageError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// The image in a file that is open already, at `path` or of that name; `None` if it is empty.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn from_file(file: File, path: &Path) -> Result<Option<Self>, ImageError> {
        let failed = |source| ImageError::File { path: path.into(), source };
        let foreign = |why: String| ImageError::Foreign { path: path.into(), why };
        lock(&file, path)?;
        let length = file.metadata().map_err(failed)?.len();
        if length == 0 {
            return Ok(None);
        }
        let mut page = [0; SUPERBLOCK_BYTES];
        file.read_exact_at(&mut page, 0)
            .map_err(|why| foreign(format!("its superblock cannot be read: {why}")))?;
        let superblock = decode(&page).or_else(|why| {
            // Only an image with checkpoints has a second one, and it may be the first one's
            // writing that a crash cut short.
            let second = file.read_exact_at(&mut page, SECOND_SUPERBLOCK).is_ok().then(|| decode(&page).ok());
            second.flatten().filter(|superblock| superblock.checkpoints).ok_or(why)
        });
        let superblock = superblock.map_err(foreign)?;
        let layout = Layout::of(&superblock).ok_or_else(|| foreign("its parts pass any file".into()))?;
        let least = layout.bytes(superblock.checkpoints);
        if length < least {
            return Err(foreign(format!("it has {length} bytes, its device takes {least}")));
        }
        Ok(Some(Self::new(file, superblock, layout)))
    }

    fn new(file: File, superblock: Superblock, layout: Layout) -> Self {
        let file = Arc::new(file);
        let durable = superblock.mode != Mode::Plain && !is_in_memory(&file);
        Self { file, superblock, layout, host: None, head: None, durable, beside: None, ledger: None }
    }

    /// Makes an image at `path`, where there is none.
    ///
    /// # Errors
    /// [`ImageError`], and then there is no image, and no file where there was none.
    pub fn create(path: &Path, superblock: Superblock) -> Result<Self, ImageError> {
        let is_new = !path.exists();
        let file = made_locked(path)?;
        Self::fill(file, path, superblock).inspect_err(|_| {
            if is_new {
                // What is left is empty, and no image either.
                let _ = fs::remove_file(path);
            }
        })
    }

    /// Makes an image that is memory, as long as somebody has its descriptor.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn in_memory(superblock: Superblock) -> Result<Self, ImageError> {
        let path = Path::new("memory");
        let file = memfd_create("lamina-image", MFdFlags::MFD_CLOEXEC)
            .map_err(|why| ImageError::File { path: path.into(), source: why.into() })?;
        Self::fill(file.into(), path, superblock)
    }

    pub(super) fn fill(file: File, path: &Path, superblock: Superblock) -> Result<Self, ImageError> {
        let failed = |source| ImageError::File { path: path.into(), source };
        let found = file.metadata().map_err(failed)?.len();
        if found > 0 {
            let why = format!("it holds {found} bytes already");
            return Err(ImageError::Foreign { path: path.into(), why });
        }
        let most = superblock.version.max_store_bytes();
        if superblock.mode != Mode::Plain && superblock.store_bytes > most {
            return Err(ImageError::Store { bytes: superblock.store_bytes, most });
        }
        let layout = Layout::of(&superblock).ok_or_else(|| failed(io::ErrorKind::FileTooLarge.into()))?;
        keep_in_place(&file);
        file.set_len(layout.segments.end).map_err(failed)?;
        let written = file.write_all_at(&encode(&superblock), 0).and_then(|()| file.sync_all());
        written.map_err(|source| {
            // An empty file is no image and can become one.
            let _ = file.set_len(0);
            failed(source)
        })?;
        Ok(Self::new(file, superblock, layout))
    }

    /// What the device is.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Has what grows with what is stored ask `host` first. For images that are
    /// [in memory](Self::is_in_memory).
    #[must_use]
    pub fn within(self, host: HostMemory) -> Self {
        Self { host: Some(Arc::new(host)), ..self }
    }

    /// The memory that is asked.
    pub fn host_memory(&self) -> Option<&HostMemory> {
        self.host.as_deref()
    }

    /// Whether it is memory that has no name in a file system.
    pub fn is_anonymous(&self) -> bool {
        self.is_in_memory() && self.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0)
    }

    /// Whether its bytes are in the host's memory, and nowhere else.
    pub fn is_in_memory(&self) -> bool {
        is_in_memory(&self.file)
    }

    /// Where the parts are: the superblock's page, then the others in their order, those of
    /// checkpoints last, with the pages before the parts before them.
    pub fn parts(&self) -> [Range<u64>; 13] {
        let Layout { tables, counters, journal, staging, gcomp, index, segments, texts, copies } =
            self.layout.clone();
        let ([text, other_text], [copy, other_copy]) = (texts, copies);
        let (superblock, head) = (0..SUPERBLOCK_BYTES as u64, SUPERBLOCK_BYTES as u64..HEAD_END);
        let stored = [superblock, tables, counters, journal, staging, gcomp, index, segments];
        let mut parts = [const { 0..0 }; 13];
        for (part, is) in
            parts.iter_mut().zip(stored.into_iter().chain([head, text, other_text, copy, other_copy]))
        {
            *part = is;
        }
        parts
    }

    /// Bytes of an image without checkpoints: what a snapshot of any image has.
    pub(super) fn plain_bytes(&self) -> u64 {
        self.layout.bytes(false)
    }

    /// The superblock of an image without checkpoints.
    pub(super) fn plain_superblock(&self) -> [u8; SUPERBLOCK_BYTES] {
        encode(&Superblock { checkpoints: false, ..self.superblock.clone() })
    }

    /// Whether it is to get checkpoints, and has none.
    pub(super) fn lacks_checkpoints(&self) -> bool {
        self.durable && !self.superblock.checkpoints
    }

    /// Memory for the ledger of an image that is on a disk: a file for [`Self::beside`].
    ///
    /// # Errors
    /// What the system says.
    pub fn new_ledger() -> io::Result<File> {
        let ledger = memfd_create("lamina-ledger", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        // Cut short and made long again, it would say that nothing is in use.
        fcntl(&ledger, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK))?;
        Ok(ledger.into())
    }

    /// With its ledger in `ledger`, which each worker of a holder is given, and which grows as
    /// `host` allows.
    #[must_use]
    pub fn beside(self, ledger: File, host: HostMemory) -> Self {
        Self { beside: Some((Arc::new(ledger), Arc::new(host))), ..self }
    }

    /// The file of [`Self::beside`].
    pub(super) fn beside_file(&self) -> Option<&Arc<File>> {
        self.beside.as_ref().map(|(file, _)| file)
    }

    /// With a ledger, if there is memory for it and this is a worker, who finds there what the one
    /// before noted. Else with none, even if a device that opened `self` has one: a ledger has one
    /// writer. It is settled by now.
    #[must_use]
    pub fn with_ledger(mut self, worker: Option<Worker>) -> Self {
        self.ledger = None;
        let Some(worker) = worker.filter(|_| self.superblock.mode != Mode::Plain) else { return self };
        let (file, host, start) = match &self.beside {
            // Without checkpoints nobody hears that the disk failed.
            Some(_) if self.head.as_ref().is_none_or(|head| head.has_failed()) => return self,
            Some((file, host)) => (file, Some(Arc::clone(host)), 0),
            None if self.is_in_memory() => {
                (&self.file, None, self.layout.bytes(true).next_multiple_of(ALIGN))
            }
            None => return self,
        };
        let Layout { gcomp, index, segments, copies: [copy, other], .. } = &self.layout;
        let parts: [_; PARTS] = [gcomp, index, segments, copy, other].map(|part| part.end - part.start);
        let sizes = (self.superblock.base_bytes / BLOCK_BYTES as u64, chunks_in(self.superblock.store_bytes));
        match LedgerPlace::open((file, start), host, sizes, &parts, worker) {
            Ok(ledger) => Self { ledger: Some(ledger), ..self },
            Err(why) => {
                tracing::warn!("what is stored will be counted anew when a worker dies: {why}");
                self
            }
        }
    }

    /// Its ledger, if it can be mapped.
    ///
    /// # Errors
    /// If it cannot, and the next worker cannot be told that it does not count.
    pub(super) fn ledger(&self) -> Result<Option<Ledger>, StoreError> {
        let Some(place) = &self.ledger else { return Ok(None) };
        place.ledger().map(Some).or_else(|why| {
            tracing::warn!("what is stored will be counted anew when a worker dies: {why}");
            place.give_up().map_err(|source| StoreError::NoRoom { what: "ledger", source })?;
            Ok(None)
        })
    }

    /// As if it were on a disk, for tests and fuzzing.
    #[must_use]
    pub fn on_disk(self) -> Self {
        Self { durable: true, ..self }
    }

    /// Makes the file as long as one with checkpoints is.
    pub(super) fn lengthen(&self) -> io::Result<()> {
        let bytes = self.layout.bytes(true);
        if self.file.metadata()?.len() < bytes { self.file.set_len(bytes) } else { Ok(()) }
    }

    /// Undoes [`Self::lengthen`], and gives back what there is behind the superblock: an image
    /// without checkpoints has nothing in either place. Neither is mapped.
    pub(super) fn shorten(&self) -> io::Result<()> {
        self.file.set_len(self.layout.bytes(false))?;
        let (behind, end) = (SUPERBLOCK_BYTES as u64, UNIT_BYTES as u64);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&*self.file, hole, behind.cast_signed(), (end - behind).cast_signed())?)
    }

    /// Has the superblock say that there are checkpoints, of which one is on the disk.
    pub(super) fn says_checkpoints(&self) -> io::Result<()> {
        let page = encode(&Superblock { checkpoints: true, ..self.superblock.clone() });
        for at in [SECOND_SUPERBLOCK, 0] {
            self.file.write_all_at(&page, at)?;
            self.file.sync_data()?;
        }
        Ok(())
    }

    /// Has `head` be told before anything changes.
    pub(super) fn with_head(self, head: Option<Arc<Head>>) -> Self {
        Self { head, ..self }
    }

    /// What is told before anything changes, if the image has checkpoints.
    pub fn head(&self) -> Option<Arc<Head>> {
        self.head.clone()
    }

    /// The first pages.
    pub(super) fn head_pages(&self) -> Result<Memory, StoreError> {
        self.map("head", &(0..HEAD_END))
    }

    /// The tables of both checkpoints.
    pub(super) fn texts(&self) -> Result<[Memory; 2], StoreError> {
        let [one, other] = &self.layout.texts;
        Ok([self.map("checkpoints of the tables", one)?, self.map("checkpoints of the tables", other)?])
    }

    /// The plane indexes of both checkpoints.
    pub(super) fn copies(&self) -> Result<[Memory; 2], StoreError> {
        let [one, other] = &self.layout.copies;
        let map = |range, number| self.map_growing("checkpoints of the plane index", range, number, None);
        Ok([map(one, 3)?, map(other, 4)?])
    }

    pub(super) fn shared_file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// The file, to be handed to another process.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Why room that was made in the file may be gone when it is written, if the file system does
    /// not keep it: then a store that finds none is no error but the end of the process.
    pub fn loses_room(&self) -> Option<&'static str> {
        // What does not say shares none: a tmpfs, or a file system from elsewhere.
        why_elsewhere(&self.file, fiemap::shares_blocks(&*self.file).unwrap_or(false))
    }

    /// Bytes that the file takes on disk or in memory.
    ///
    /// # Errors
    /// What the system says.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    pub(super) fn tables(&self) -> Result<Memory, StoreError> {
        self.map("tables of tensors and views", &self.layout.tables)
    }

    pub(super) fn counters(&self) -> Result<Memory, StoreError> {
        self.map("counters", &self.layout.counters)
    }

    pub(super) fn journal(&self) -> Result<Memory, StoreError> {
        self.map("journal", &self.layout.journal)
    }

    /// The places of staged KV windows, [`STAGE_BYTES`] each.
    ///
    /// # Errors
    /// [`StoreError`] if they cannot be mapped.
    pub fn staging(&self) -> Result<Memory, StoreError> {
        self.map("staging buffer", &self.layout.staging)
    }

    /// A length for each block: what a generically compressing device would have stored.
    ///
    /// # Errors
    /// [`StoreError`] if they cannot be mapped.
    pub fn gcomp(&self) -> Result<Memory, StoreError> {
        self.map_growing("comparison with gcomp", &self.layout.gcomp, 0, self.host.clone())
    }

    pub(super) fn index(&self) -> Result<Memory, StoreError> {
        self.map_growing("plane index", &self.layout.index, 1, self.host.clone())
    }

    /// The segments, or the words of a plain device.
    ///
    /// # Errors
    /// [`StoreError`] if they cannot be mapped.
    pub fn segments(&self) -> Result<Memory, StoreError> {
        self.map_growing("segment store", &self.layout.segments, 2, self.host.clone())
    }

    fn map(&self, what: &'static str, range: &Range<u64>) -> Result<Memory, StoreError> {
        Memory::part(what, &self.file, range.start, range.end - range.start, None)
    }

    /// Maps part `number` of those that grow.
    fn map_growing(
        &self,
        what: &'static str,
        range: &Range<u64>,
        number: usize,
        host: Option<Arc<HostMemory>>,
    ) -> Result<Memory, StoreError> {
        let bits = self.ledger.as_ref().map(|ledger| ledger.bits(number));
        let bytes = range.end - range.start;
        Memory::part_with_bits(what, &self.file, range.start, bytes, host, bits)
    }
}

/// Has a file system that writes elsewhere what is written over keep this one in its place, if it
/// can: that is for files that are empty.
pub(super) fn keep_in_place(file: &File) {
    let on_btrfs = fstatfs(file).is_ok_and(|is| is.filesystem_type() == BTRFS_SUPER_MAGIC);
    if on_btrfs
        && let Ok(flags) = ioctl_getflags(file)
        && let Err(why) = ioctl_setflags(file, flags | IFlags::NOCOW)
    {
        tracing::debug!("the image is written over elsewhere: {why}");
    }
}

/// Whether the file system writes a file over where it is, if no other file has its blocks.
pub(super) fn writes_in_place(file: &File) -> bool {
    why_elsewhere(file, false).is_none()
}

fn why_elsewhere(file: &File, shares_blocks: bool) -> Option<&'static str> {
    let flags = ioctl_getflags(file).unwrap_or(IFlags::empty());
    fstatfs(file).ok().and_then(|is| loses_room(is.filesystem_type().0, flags, shares_blocks))
}

#[expect(clippy::unnecessary_cast, reason = "the type of the numbers depends on the C library")]
fn loses_room(file_system: i64, flags: IFlags, shares_blocks: bool) -> Option<&'static str> {
    const ZFS: i64 = 0x2fc1_2fc1;
    const BCACHEFS: i64 = 0xca45_1a4e;
    match file_system {
        btrfs if btrfs == BTRFS_SUPER_MAGIC.0 as i64 && !flags.contains(IFlags::NOCOW) => Some(
            "it is on btrfs, and not of those that are written in place (`chattr +C` on an empty file or its directory)",
        ),
        ZFS => Some("it is on ZFS"),
        BCACHEFS => Some("it is on bcachefs"),
        _ if shares_blocks => Some(
            "it shares blocks with a copy of it, and each store into one needs another (copy by `lamina snapshot save` or `cp --reflink=never`)",
        ),
        _ => None,
    }
}

fn is_in_memory(file: &File) -> bool {
    fstatfs(file).is_ok_and(|is| is.filesystem_type() == TMPFS_MAGIC)
}

/// Takes the file for this process; it is let go when the descriptor is closed for the last time,
/// which for a process that was killed a moment ago may still be to come.
fn lock(file: &File, path: &Path) -> Result<(), ImageError> {
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if begun.elapsed() < LETTING_GO => thread::sleep(LETTING_GO / 50),
            Err(TryLockError::WouldBlock) => return Err(ImageError::Busy { path: path.into() }),
            Err(TryLockError::Error(source)) => return Err(ImageError::File { path: path.into(), source }),
        }
    }
}

/// Opens the file at `path`, which is made if there is none, for this process alone.
pub(super) fn made_locked(path: &Path) -> Result<File, ImageError> {
    open_locked(path, OpenOptions::new().read(true).write(true).create(true).truncate(false))
}

/// Opens the file at `path` for this process alone. Who had it may have removed it, or given its
/// name to another file, or it another name, just before it let it go: then what was opened is not
/// what the name stands for, and is opened anew.
fn open_locked(path: &Path, how: &OpenOptions) -> Result<File, ImageError> {
    let failed = |source| ImageError::File { path: path.into(), source };
    let mut left = MAX_OPENED;
    loop {
        let file = how.open(path).map_err(failed)?;
        lock(&file, path)?;
        let opened = file.metadata().map_err(failed)?;
        let is_named = match fs::metadata(path) {
            Ok(named) => (named.dev(), named.ino()) == (opened.dev(), opened.ino()),
            Err(why) if why.kind() == io::ErrorKind::NotFound => false,
            Err(why) => return Err(failed(why)),
        };
        left -= 1;
        if is_named || left == 0 {
            return Ok(file);
        }
    }
}

/// Magic, CRC-32C of what follows, its length, and the superblock as JSON.
fn encode(superblock: &Superblock) -> [u8; SUPERBLOCK_BYTES] {
    let mut page = [0; SUPERBLOCK_BYTES];
    let text = serde_json::to_vec(superblock).expect("plain numbers and names");
    page[..7].copy_from_slice(MAGIC);
    page[7] = superblock.version as u8;
    page[12..16].copy_from_slice(&u32::try_from(text.len()).expect("a few numbers").to_le_bytes());
    page[16..16 + text.len()].copy_from_slice(&text);
    let check = crc32c::crc32c(&page[12..]);
    page[8..12].copy_from_slice(&check.to_le_bytes());
    page
}

/// The version of this number, or why there is none.
pub(super) fn known_version(number: u8) -> Result<Version, String> {
    let newest = Version::default() as u8;
    Version::of(number).ok_or_else(|| match number {
        0 => "it says that it is of version 0, which never was".to_owned(),
        _ => format!(
            "it is of version {number}, and this program knows versions up to {newest}: use a newer one"
        ),
    })
}

fn decode(page: &[u8; SUPERBLOCK_BYTES]) -> Result<Superblock, String> {
    if !page.starts_with(MAGIC) {
        return Err("it does not begin as one".into());
    }
    let version = known_version(page[7])?;
    let stored = u32::from_le_bytes([page[8], page[9], page[10], page[11]]);
    let computed = crc32c::crc32c(&page[12..]);
    if stored != computed {
        return Err(format!("its superblock has CRC-32C {computed:#010x}, stored was {stored:#010x}"));
    }
    let length = u32::from_le_bytes([page[12], page[13], page[14], page[15]]);
    let text = usize::try_from(length).ok().and_then(|length| page.get(16..16 + length));
    let text = text.ok_or_else(|| format!("its superblock has {length} bytes"))?;
    let superblock: Superblock =
        serde_json::from_slice(text).map_err(|why| format!("its superblock says nothing: {why}"))?;
    let superblock = Superblock { version, ..superblock };
    let (bytes, most) = (superblock.store_bytes, version.max_store_bytes());
    if version > Version::One && superblock.mode != Mode::Plain && bytes > most {
        return Err(format!("its store has {bytes} bytes, and entries can name {most}"));
    }
    Ok(superblock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger;

    fn superblock() -> Superblock {
        Superblock {
            base_bytes: 1 << 20,
            views_bytes: 4 << 20,
            store_bytes: 2 << 20,
            mode: Mode::Trace,
            codec: Codec::Tree,
            open_windows: 4,
            partitions: Vec::new(),
            checkpoints: false,
            version: Version::default(),
        }
    }

    #[test]
    fn a_reader_of_the_document_finds_every_part() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format.md");
        let document = std::fs::read_to_string(path).unwrap();
        // The number behind `name (` in the list of parts, in bytes.
        let (_, parts) = document.split_once("in this order: ").unwrap();
        let bytes = |name: &str| -> u64 {
            let (_, said) = parts.split_once(&format!("{name} (")).expect(name);
            said.split(' ').next().unwrap().parse().expect(name)
        };
        let superblock = superblock();
        let blocks = superblock.base_bytes / 4096;
        let lengths = [
            2 * (32 << 20), // tables
            8 << 20,        // counters
            bytes("journal"),
            superblock.open_windows * bytes("staged KV windows"),
            blocks,
            bytes("plane index") * blocks,
            superblock.store_bytes,
        ];
        let mut at = 2 << 20;
        let found = lengths.map(|length| {
            let part = at..at + length;
            at = part.end.next_multiple_of(2 << 20);
            part
        });
        let Layout { tables, counters, journal, staging, gcomp, index, segments, .. } =
            Layout::of(&superblock).unwrap();
        assert_eq!(found, [tables, counters, journal, staging, gcomp, index, segments]);
    }

    #[test]
    fn memory_for_a_ledger_is_never_cut_short_and_keeps_that_a_sync_failed() {
        let ledger = Image::new_ledger().unwrap();
        assert!(!ledger::has_failed(&ledger));
        ledger.set_len(8192).unwrap();
        assert!(!ledger::has_failed(&ledger));
        ledger::note_failure(&ledger).unwrap();
        ledger.set_len(1 << 20).unwrap();
        assert!(ledger.set_len(4096).is_err());
        assert!(ledger::has_failed(&ledger));
    }

    #[test]
    fn an_image_is_found_as_it_was_made_and_by_one_process_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        assert!(Image::open(&path).unwrap().is_none());
        let image = Image::create(&path, superblock()).unwrap();
        assert!(matches!(Image::open(&path), Err(ImageError::Busy { .. })));
        drop(image);
        assert_eq!(*Image::open(&path).unwrap().unwrap().superblock(), superblock());
        let again = Image::create(&path, superblock()).unwrap_err().to_string();
        assert!(again.contains("bytes already"), "{again}");
    }

    #[test]
    fn who_waited_for_an_image_has_the_one_of_that_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, new) = (folder.path().join("image"), folder.path().join("new"));
        let image = Image::create(&path, superblock()).unwrap();
        let waits = || Image::open(&path).unwrap().map(|image| image.superblock().base_bytes);
        let found = thread::scope(|scope| {
            let found = scope.spawn(waits);
            // Time to open the old one.
            thread::sleep(LETTING_GO / 5);
            // As an upgrade does.
            drop(Image::create(&new, Superblock { base_bytes: 2 << 20, ..superblock() }).unwrap());
            fs::rename(&new, &path).unwrap();
            drop(image);
            found.join().unwrap()
        });
        assert_eq!(found, Some(2 << 20));
        let image = Image::open(&path).unwrap();
        let found = thread::scope(|scope| {
            let found = scope.spawn(waits);
            thread::sleep(LETTING_GO / 5);
            fs::remove_file(&path).unwrap();
            drop(image);
            found.join().unwrap()
        });
        assert_eq!(found, None);
    }

    #[test]
    fn file_systems_that_do_not_keep_room_are_known() {
        let btrfs = 0x9123_683e;
        assert!(loses_room(btrfs, IFlags::empty(), true).unwrap().contains("chattr"));
        assert_eq!(loses_room(btrfs, IFlags::NOCOW | IFlags::NOATIME, false), None);
        assert!(loses_room(btrfs, IFlags::NOCOW, true).unwrap().contains("shares blocks"));
        assert!(loses_room(0x2fc1_2fc1, IFlags::NOCOW, false).is_some());
        // ext4, xfs, tmpfs.
        for keeps in [0xef53, 0x5846_5342, 0x0102_1994] {
            assert_eq!(loses_room(keeps, IFlags::empty(), false), None);
            assert!(loses_room(keeps, IFlags::empty(), true).unwrap().contains("cp --reflink=never"));
        }
    }

    #[test]
    fn what_is_no_image_is_refused_and_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        drop(Image::create(&path, superblock()).unwrap());
        let whole = std::fs::read(&path).unwrap();
        let said = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let said = Image::open(&path).unwrap_err().to_string();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
            said
        };
        let newer = [&whole[..7], &[3], &whole[8..]].concat();
        assert!(said(&newer).contains("version 3, and this program knows versions up to 2"));
        assert!(said(b"precious").contains("cannot be read"));
        assert!(said(&[7; 8192]).contains("does not begin"));
        assert!(said(&whole[..whole.len() - 1]).contains("takes"));
        for bit in 8 * 8..8 * 200 {
            let mut damaged = whole[..SUPERBLOCK_BYTES].to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(said(&damaged).contains("CRC-32C"), "bit {bit}");
        }
    }
}
