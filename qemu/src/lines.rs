//! Which lines of the windows an emulated guest touches: the reading side of the plug-in
//! `line-recorder/recorder.rs`.
//!
//! * The plug-in and this share a file: a ring of records for each processor of the guest. The
//!   plug-in never waits; what finds no room is counted.
//! * Between the guest and the rings lies a *modelled* cache, a part for each processor,
//!   write-back, of eight ways, least recently used first out. Without it every load and store is a
//!   record. The parts are not coherent with each other, and hold lines of the windows alone.
//! * Not seen: what an emulated device reads and writes by itself, instructions that drop lines
//!   from caches, and the second page of a load or store over two.
//! * QEMU has to emulate the guest (TCG), and to have plug-ins of version 7: 11.1 has.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::carried;
use crate::topology::escape;

#[path = "../line-recorder/layout.rs"]
mod layout;

use self::layout::{
    ADDRESS, DIRTY, GROUP, MAGIC, MAX_RANGES, PAGE, RECORD, SIZE_SHIFT, VERSION, WAYS, WRITE, cache_word,
    counter, header, part_bytes,
};

const RECORDER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libline_recorder.so"));
/// Words of a ring: 16 MiB, seven of eight for records.
const WORDS: usize = 1 << 21;
/// Bytes of a line.
const LINE: usize = 64;
/// The smallest cache of a processor that can be modelled, in bytes, and the largest.
pub const CACHES: (usize, usize) = (WAYS * LINE, 64 << 20);

/// Why lines cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum LinesError {
    /// A file cannot be made or mapped.
    #[error("cannot make {} for lines: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// No cache of that size is modelled.
    #[error("a processor's cache of {bytes} bytes cannot be modelled: 0 for none, or a power of two from {} to {}", CACHES.0, CACHES.1)]
    Cache {
        /// The bytes asked for.
        bytes: usize,
    },
}

/// Puts the recorder into the cache, and gives the options that have QEMU load it and record
/// nothing: it returns at once from each call. Measurements tell QEMU's own part by it.
///
/// # Errors
/// The file cannot be made.
pub fn idle_args(cache: &Path) -> Result<[String; 2], LinesError> {
    let recorder = put(cache)?;
    Ok(["-plugin".to_owned(), format!("file={},idle=on", escape(&recorder))])
}

/// Puts the recorder into the cache, and gives its path.
fn put(cache: &Path) -> Result<PathBuf, LinesError> {
    let path = carried::place(cache, "line-recorder", RECORDER);
    match carried::write(&path, RECORDER) {
        Ok(()) => Ok(path),
        Err(error) => Err(LinesError::File { path, error }),
    }
}

/// Makes a file this long, with its place on the disk. Of a file with holes, a store to one when
/// the disk is full is a SIGBUS to whoever has it mapped.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        // Not every file system can.
        Err(Errno::OPNOTSUPP) => file.set_len(bytes),
        reserved => Ok(reserved?),
    }
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Nanoseconds since the recorder was loaded. The clock was read for one line in seven; those
    /// between are spread evenly.
    pub time_ns: u64,
    /// Where, in the guest's physical memory: of a line with a cache, of an access without one.
    pub address: u64,
    /// Its bytes: 64, or without a cache those of the access.
    pub bytes: u64,
    /// Whether it is written.
    pub write: bool,
    /// By which of the guest's processors.
    pub processor: u32,
}

/// The file that a guest's recorder writes to.
#[derive(Debug)]
pub struct Lines {
    map: MmapRaw,
    recorder: PathBuf,
    path: PathBuf,
    processors: usize,
    sets: usize,
}

impl Lines {
    /// Makes the file for a guest with so many processors in `folder`, and puts the recorder into
    /// the cache. Each processor has a modelled cache of `cache_bytes`, or none if they are 0.
    ///
    /// # Errors
    /// A file cannot be made or finds no room on the disk, or no such cache is modelled.
    pub fn new(folder: &Path, cache: &Path, processors: u32, cache_bytes: usize) -> Result<Self, LinesError> {
        let fits = (CACHES.0..=CACHES.1).contains(&cache_bytes) && cache_bytes.is_power_of_two();
        if cache_bytes > 0 && !fits {
            return Err(LinesError::Cache { bytes: cache_bytes });
        }
        let recorder = put(cache)?;
        let (processors, sets) = (processors as usize, cache_bytes / (WAYS * LINE));
        let path = folder.join("lines");
        let map = || {
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
            reserve(&file, (PAGE + processors * part_bytes(WORDS, sets)) as u64)?;
            MmapRaw::map_raw(&file)
        };
        let map = map().map_err(|error| LinesError::File { path: path.clone(), error })?;
        let lines = Self { map, recorder, path, processors, sets };
        for (word, value) in [
            (header::MAGIC, MAGIC),
            (header::VERSION, VERSION),
            (header::PROCESSORS, processors as u64),
            (header::WORDS, WORDS as u64),
            (header::SETS, sets as u64),
        ] {
            lines.word(word).store(value, Ordering::Relaxed);
        }
        Ok(lines)
    }

    /// The options that have QEMU load the recorder.
    pub fn args(&self) -> [String; 2] {
        let (recorder, ring) = (escape(&self.recorder), escape(&self.path));
        ["-plugin".to_owned(), format!("file={recorder},ring={ring}")]
    }

    /// Has these ranges of the guest's physical memory watched from now on, at most 16.
    pub fn watch(&self, ranges: &[Range<u64>]) {
        let ranges = &ranges[..ranges.len().min(MAX_RANGES)];
        // None while they change.
        self.word(header::RANGES).store(0, Ordering::Release);
        for (number, range) in ranges.iter().enumerate() {
            let at = header::FIRST_RANGE + 2 * number;
            self.word(at).store(range.start, Ordering::Relaxed);
            self.word(at + 1).store(range.end, Ordering::Relaxed);
        }
        self.word(header::RANGES).store(ranges.len() as u64, Ordering::Release);
        // What the recorder knows of pages it knows of the ranges before.
        self.word(header::CHANGES).fetch_add(1, Ordering::Release);
    }

    /// Whether QEMU has loaded the recorder.
    pub fn is_loaded(&self) -> bool {
        self.word(header::LOADED).load(Ordering::Acquire) == 1
    }

    /// Records that found no room.
    pub fn lost(&self) -> u64 {
        let parts = 0..self.processors;
        parts.map(|processor| self.of(processor, counter::LOST).load(Ordering::Relaxed)).sum()
    }

    /// Takes what was recorded since it was taken last, in the order of time. Of two processors,
    /// what happened within microseconds of this may come with the next call.
    ///
    /// Gives whether a ring was so full that the next call should not wait.
    pub fn take(&self, into: &mut Vec<Line>) -> bool {
        let (begin, mut most) = (into.len(), 0);
        for (number, processor) in (0..).zip(0..self.processors) {
            let head = self.of(processor, counter::HEAD).load(Ordering::Acquire);
            let tail = self.of(processor, counter::TAIL);
            let from = tail.load(Ordering::Relaxed);
            // What the other side says is held against the ring.
            let from = from.max(head.saturating_sub(WORDS as u64)).min(head);
            most = most.max(head - from);
            let word = |at: u64| {
                let slot = usize::try_from(at % WORDS as u64).unwrap_or(0);
                self.of(processor, PAGE / 8 + slot).load(Ordering::Relaxed)
            };
            let mut group = from - from % GROUP as u64;
            while group < head {
                let next = group.saturating_add(GROUP as u64);
                let first_ns = self.time_ns(word(group));
                // How long a group took nobody knows until another begins.
                let ended_ns = if next < head { self.time_ns(word(next)) } else { first_ns };
                let each_ns = ended_ns.saturating_sub(first_ns) / (GROUP as u64 - 1);
                for at in from.max(group + 1)..head.min(next) {
                    let record = word(at);
                    if record & RECORD == 0 {
                        break;
                    }
                    into.push(Line {
                        time_ns: first_ns + each_ns * (at - group - 1),
                        address: record & ADDRESS,
                        bytes: 1 << (record >> SIZE_SHIFT & 15),
                        write: record & WRITE != 0,
                        processor: number,
                    });
                }
                group = next;
            }
            tail.store(head, Ordering::Release);
        }
        into[begin..].sort_by_key(|line| line.time_ns);
        most > WORDS as u64 / 8
    }

    /// Nanoseconds since the recorder was loaded.
    fn time_ns(&self, tick: u64) -> u64 {
        let rate = self.word(header::TICKS_A_SECOND).load(Ordering::Relaxed).max(1);
        let first = self.word(header::FIRST_TICK).load(Ordering::Relaxed);
        let since = u128::from(tick.saturating_sub(first)) * 1_000_000_000 / u128::from(rate);
        u64::try_from(since).unwrap_or(u64::MAX)
    }

    /// The lines that the modelled caches still hold written: what they would write back one day.
    /// Of a guest that has ended.
    pub fn unwritten(&self) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        for (number, processor) in (0..).zip(0..self.processors) {
            let words = cache_word(WORDS)..cache_word(WORDS) + self.sets * WAYS;
            let held = words.map(|word| self.of(processor, word).load(Ordering::Relaxed));
            let dirty = held.filter(|held| held & DIRTY != 0);
            found.extend(dirty.map(|held| (number, (held & !DIRTY).saturating_sub(LINE as u64))));
        }
        found
    }

    /// A word of a processor's part.
    fn of(&self, processor: usize, word: usize) -> &AtomicU64 {
        self.word((PAGE + processor * part_bytes(WORDS, self.sets)) / 8 + word)
    }

    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins at a page")]
    fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.map.len() / 8, "word {word} is not in the file");
        // SAFETY: it is within the mapping, which lives as long as `self`, and aligned, for the
        // mapping begins at a page. Whoever else has the file uses atomics on it, too, and nobody
        // shortens it: it lies in a folder of this boot's own.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }
}

#[cfg(test)]
mod tests;
