//! The image: one sparse file that holds all that a device must not forget.
//!
//! It is a file on disk (`--image`), or memory that the holder keeps while workers come and go. The rules:
//!
//! * The first page is the *superblock*: what the device is. Everything else lies where that says, in this order, each part at
//!   a multiple of 2 MiB: the tables of tensors and views, the counters, the journal, staged KV windows, the comparison with GComp, the plane
//!   index, the segments. A part that was never written is a hole, and takes no room.
//! * The superblock is written once, last, when the image is made. A file whose superblock does not check is no image.
//! * One process at a time has an image open; a lock on the file says so.
//! * Every change is made so that after a `kill -9` between any two stores the image is whole: see
//!   [`journal`](super::journal) for the index and [`tables`](super::tables) for tensors and views. What holds segments is not
//!   written down: it is what the index's entries name.
//! * A crash of the host itself may lose or tear what was written since the last [`sync`](super::Store::sync); then checks
//!   find the blocks.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    statfs::{TMPFS_MAGIC, fstatfs},
};
use serde::{Deserialize, Serialize};

use super::{
    StoreError, counters, entry::ENTRY_BYTES, host_memory::HostMemory, journal, memory::Memory, tables,
};
use crate::{BLOCK_BYTES, codec::Codec, device::PartitionConfig, kv, mode::Mode};

/// What an image begins with.
const MAGIC: &[u8; 8] = b"LAMINA\x00\x01";
/// Bytes of the superblock.
const SUPERBLOCK_BYTES: usize = 4096;
/// Parts begin at multiples of this.
const ALIGN: u64 = 2 << 20;
/// How long a process that has the image may take to let it go.
const LETTING_GO: Duration = Duration::from_millis(500);
/// Bytes of a place for a staged KV window: a page for its header, one for the block that is being written, and the window.
pub(crate) const STAGE_BYTES: usize = (2 + kv::MOST_BLOCKS) * BLOCK_BYTES;

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
}

/// An open image.
#[derive(Clone, Debug)]
pub struct Image {
    file: Arc<File>,
    superblock: Superblock,
    layout: Layout,
    host: Option<Arc<HostMemory>>,
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
    /// It is something else, or damaged at its root.
    #[error("{} is not a device image of this version: {why}", path.display())]
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
        Some(Self {
            tables: part(tables::BYTES)?,
            counters: part(counters::BYTES)?,
            journal: part(journal::BYTES)?,
            staging: part(superblock.open_windows.checked_mul(STAGE_BYTES as u64)?)?,
            gcomp: part(blocks)?,
            index: part(if flat { 0 } else { blocks.checked_mul(ENTRY_BYTES as u64)? })?,
            segments: part(if flat { superblock.base_bytes } else { superblock.store_bytes })?,
        })
    }
}

impl Image {
    /// Opens the image at `path`, or `None` if there is no such file or it is empty.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(path: &Path) -> Result<Option<Self>, ImageError> {
        match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => Self::from_file(file, path),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ImageError::File { path: path.into(), source }),
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
        let superblock = decode(&page).map_err(foreign)?;
        let layout = Layout::of(&superblock).ok_or_else(|| foreign("its parts pass any file".into()))?;
        if length < layout.segments.end {
            return Err(foreign(format!("it has {length} bytes, its device takes {}", layout.segments.end)));
        }
        Ok(Some(Self { file: Arc::new(file), superblock, layout, host: None }))
    }

    /// Makes an image at `path`, where there is none.
    ///
    /// # Errors
    /// [`ImageError`], and then there is no image, and no file where there was none.
    pub fn create(path: &Path, superblock: Superblock) -> Result<Self, ImageError> {
        let is_new = !path.exists();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|source| ImageError::File { path: path.into(), source })?;
        lock(&file, path)?;
        Self::fill(file, path, superblock).inspect_err(|_| {
            if is_new {
                // What is left is empty, and no image either.
                let _ = std::fs::remove_file(path);
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

    fn fill(file: File, path: &Path, superblock: Superblock) -> Result<Self, ImageError> {
        let failed = |source| ImageError::File { path: path.into(), source };
        let found = file.metadata().map_err(failed)?.len();
        if found > 0 {
            let why = format!("it holds {found} bytes already");
            return Err(ImageError::Foreign { path: path.into(), why });
        }
        let layout = Layout::of(&superblock).ok_or_else(|| failed(io::ErrorKind::FileTooLarge.into()))?;
        file.set_len(layout.segments.end).map_err(failed)?;
        let written = file.write_all_at(&encode(&superblock), 0).and_then(|()| file.sync_all());
        written.map_err(|source| {
            // An empty file is no image and can become one.
            let _ = file.set_len(0);
            failed(source)
        })?;
        Ok(Self { file: Arc::new(file), superblock, layout, host: None })
    }

    /// What the device is.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Has what grows with what is stored ask `host` first. For images that are [in memory](Self::is_in_memory).
    #[must_use]
    pub fn within(self, host: HostMemory) -> Self {
        Self { host: Some(Arc::new(host)), ..self }
    }

    /// The memory that is asked.
    pub fn host_memory(&self) -> Option<&HostMemory> {
        self.host.as_deref()
    }

    /// Whether its bytes are in the host's memory, and nowhere else.
    pub fn is_in_memory(&self) -> bool {
        fstatfs(&*self.file).is_ok_and(|is| is.filesystem_type() == TMPFS_MAGIC)
    }

    /// Where the parts are: the superblock's page, then the others in their order.
    pub(crate) fn parts(&self) -> [Range<u64>; 8] {
        let Layout { tables, counters, journal, staging, gcomp, index, segments } = self.layout.clone();
        [0..SUPERBLOCK_BYTES as u64, tables, counters, journal, staging, gcomp, index, segments]
    }

    /// The file, to be handed to another process.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes that the file takes on disk or in memory.
    ///
    /// # Errors
    /// What the system says.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
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

    pub(crate) fn staging(&self) -> Result<Memory, StoreError> {
        self.map("staging buffer", &self.layout.staging)
    }

    pub(crate) fn gcomp(&self) -> Result<Memory, StoreError> {
        self.map_growing("comparison with gcomp", &self.layout.gcomp)
    }

    pub(super) fn index(&self) -> Result<Memory, StoreError> {
        self.map_growing("plane index", &self.layout.index)
    }

    /// The segments, or the words of a plain device.
    pub(crate) fn segments(&self) -> Result<Memory, StoreError> {
        self.map_growing("segment store", &self.layout.segments)
    }

    fn map(&self, what: &'static str, range: &Range<u64>) -> Result<Memory, StoreError> {
        Memory::part(what, &self.file, range.start, range.end - range.start, None)
    }

    fn map_growing(&self, what: &'static str, range: &Range<u64>) -> Result<Memory, StoreError> {
        Memory::part(what, &self.file, range.start, range.end - range.start, self.host.clone())
    }
}

/// Takes the file for this process; it is let go when the descriptor is closed for the last time, which for a process that was killed a moment ago may still be to come.
pub(super) fn lock(file: &File, path: &Path) -> Result<(), ImageError> {
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

/// Magic, CRC-32C of what follows, its length, and the superblock as JSON.
fn encode(superblock: &Superblock) -> [u8; SUPERBLOCK_BYTES] {
    let mut page = [0; SUPERBLOCK_BYTES];
    let text = serde_json::to_vec(superblock).expect("plain numbers and names");
    page[..8].copy_from_slice(MAGIC);
    page[12..16].copy_from_slice(&u32::try_from(text.len()).expect("a few numbers").to_le_bytes());
    page[16..16 + text.len()].copy_from_slice(&text);
    let check = crc32c::crc32c(&page[12..]);
    page[8..12].copy_from_slice(&check.to_le_bytes());
    page
}

fn decode(page: &[u8; SUPERBLOCK_BYTES]) -> Result<Superblock, String> {
    if !page.starts_with(MAGIC) {
        return Err("it does not begin as one".into());
    }
    let stored = u32::from_le_bytes([page[8], page[9], page[10], page[11]]);
    let computed = crc32c::crc32c(&page[12..]);
    if stored != computed {
        return Err(format!("its superblock has CRC-32C {computed:#010x}, stored was {stored:#010x}"));
    }
    let length = u32::from_le_bytes([page[12], page[13], page[14], page[15]]);
    let text = usize::try_from(length).ok().and_then(|length| page.get(16..16 + length));
    let text = text.ok_or_else(|| format!("its superblock has {length} bytes"))?;
    serde_json::from_slice(text).map_err(|why| format!("its superblock says nothing: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        Superblock {
            base_bytes: 1 << 20,
            views_bytes: 4 << 20,
            store_bytes: 2 << 20,
            mode: Mode::Trace,
            codec: Codec::Tree,
            open_windows: 4,
            partitions: Vec::new(),
        }
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
