//! A mapping of a file that all nodes see alike: one host's processes, or guests that share the
//! mount's page cache.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use nix::sys::stat::{major, minor};

use super::reached::{Backing, Reached, parts};
use super::{Crc, CxlMem, MemError, inside};

/// Ranges up to this go word by word, so that no word of a record is torn.
const WORDS: usize = 1024;

/// Bytes of a file, or of a devdax, whose file does not tell.
///
/// # Errors
/// The kernel's.
pub fn length(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if !metadata.file_type().is_char_device() {
        return Ok(metadata.len());
    }
    let device = metadata.rdev();
    let size = format!("/sys/dev/char/{}:{}/size", major(device), minor(device));
    fs::read_to_string(size)?.trim().parse().map_err(io::Error::other)
}

/// A mapping with checked accesses, which the implementations share.
#[derive(Debug)]
pub struct Map {
    map: MmapRaw,
    /// The file, if it has a file system of this host for itself.
    file: Option<Backing>,
}

impl Map {
    /// Maps the first `bytes` of `file`, all of it if none are given.
    ///
    /// # Errors
    /// [`MemError::Map`].
    pub fn new(file: &File, what: &Path, bytes: Option<u64>) -> Result<Self, MemError> {
        let fail = |cause| MemError::Map { what: what.display().to_string(), cause };
        let bytes = bytes.map_or_else(|| length(file), Ok).map_err(fail)?;
        let mut options = MmapOptions::new();
        options.len(usize::try_from(bytes).map_err(|why| fail(io::Error::other(why)))?);
        let map = options.map_raw(file).map_err(fail)?;
        Ok(Self { map, file: Backing::of(file).map_err(fail)? })
    }

    pub(super) fn backing(&self) -> Option<&Backing> {
        self.file.as_ref()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// The address of a range that lies inside.
    pub(crate) fn at(&self, at: u64, length: usize) -> Result<*mut u8, MemError> {
        inside(at, length as u64, self.bytes())?;
        // SAFETY: `at + length` is at most the mapping's length.
        Ok(unsafe { self.map.as_mut_ptr().add(at as usize) })
    }

    pub(crate) fn word(&self, at: u64) -> Result<&AtomicU64, MemError> {
        if !at.is_multiple_of(8) {
            return Err(MemError::Unaligned { at });
        }
        let word = self.at(at, 8)?;
        // SAFETY: eight bytes of the mapping, which lives as long as `self` and begins at a page.
        // All accesses of words are atomic.
        Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
    }

    pub(crate) fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        let from = self.at(at, into.len())?;
        if into.len() <= WORDS && at.is_multiple_of(8) && into.len().is_multiple_of(8) {
            for (index, word) in into.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                // SAFETY: a word of the range, which begins at a multiple of eight as the mapping
                // does. All accesses of words are atomic.
                let held = unsafe { AtomicU64::from_ptr(from.add(8 * index).cast()) };
                *word = held.load(Ordering::Relaxed).to_le_bytes();
            }
            return Ok(());
        }
        // SAFETY: both ranges are valid and apart: `into` is Rust's, the mapping never is. Others
        // may store meanwhile; what was torn is found by the record's check.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    pub(crate) fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        let into = self.at(at, from.len())?;
        if from.len() <= WORDS && at.is_multiple_of(8) && from.len().is_multiple_of(8) {
            for (index, word) in from.as_chunks::<8>().0.iter().enumerate() {
                // SAFETY: as for loads.
                let held = unsafe { AtomicU64::from_ptr(into.add(8 * index).cast()) };
                held.store(u64::from_le_bytes(*word), Ordering::Release);
            }
            return Ok(());
        }
        // SAFETY: as for loads.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }
}

/// Coherent memory: a shared mapping.
#[derive(Debug)]
pub struct Mapped {
    map: Map,
    reached: Reached,
}

impl Mapped {
    /// Memory behind a mapping.
    pub fn new(map: Map) -> Self {
        Self { reached: Reached::new(map.bytes()), map }
    }

    /// The address of a range, valid while this lives. The bytes change under the reader's hands:
    /// make no Rust reference of it.
    ///
    /// # Errors
    /// [`MemError::End`].
    pub fn address(&self, at: u64, length: usize) -> Result<*mut u8, MemError> {
        self.map.at(at, length)
    }

    /// Has room for a range that is stored to next, and reaches it if that is worth it. A part at a
    /// time: reaching one has the kernel walk all pages behind it that there is only room for.
    fn reach(&self, at: u64, length: usize) -> Result<(), MemError> {
        self.map.at(at, length)?;
        for part in parts(at, length as u64) {
            let bytes = part.end - part.start;
            self.reached.reserve(&self.map, part.start, bytes)?;
            if length > WORDS {
                self.reached.reach(&self.map, part.start, bytes)?;
            }
        }
        Ok(())
    }
}

impl CxlMem for Mapped {
    fn bytes(&self) -> u64 {
        self.map.bytes()
    }

    fn coherent(&self) -> bool {
        true
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.map.load(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.map.store(at, from)
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.reach(at, from.len())?;
        self.map.store(at, from)
    }

    fn load_checked(&self, at: u64, into: &mut [u8], crc: &mut Crc) -> Result<(), MemError> {
        let from = self.map.at(at, into.len())?;
        // SAFETY: the range was checked, and is not `into`, which is Rust's.
        unsafe { crc.load(from, into) };
        Ok(())
    }

    fn ntstore_checked(&self, at: u64, from: &[u8], crc: &mut Crc) -> Result<(), MemError> {
        self.reach(at, from.len())?;
        let into = self.map.at(at, from.len())?;
        // SAFETY: the range was checked, and is not `from`, which is Rust's.
        unsafe { crc.store(from, into) };
        Ok(())
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        inside(at, length, self.bytes())
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        inside(at, length, self.bytes())
    }

    fn fence(&self) -> Result<(), MemError> {
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> Result<Option<bool>, MemError> {
        let word = self.map.word(at)?;
        Ok(Some(word.compare_exchange(old, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()))
    }
}
