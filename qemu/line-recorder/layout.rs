// What the recorder and who reads it agree on: a file that both map, of words of 64 bits.
//
// A header of a page, then a part for each processor: a page of counters, a ring, and the modelled
// cache. A ring is groups of eight words: when its first record was made, then up to seven records.
// A word of 0 is none: such a group was left when its reader had come by.
//
// Both sides include this file: the recorder is a library without the standard library.

/// The first word.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"LAMLINES");
/// The second word: changes with this file.
pub(crate) const VERSION: u64 = 4;
/// Bytes of a page, the unit of the file's parts.
pub(crate) const PAGE: usize = 4096;
/// Address ranges that may be watched.
pub(crate) const MAX_RANGES: usize = 16;
/// Ways of a set of the modelled cache: their lines are one line of the host's cache.
pub(crate) const WAYS: usize = 8;
/// Words of a group: one line of the host's cache.
pub(crate) const GROUP: usize = 8;

/// Words of the header.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 1;
    pub(crate) const PROCESSORS: usize = 2;
    /// Words of a ring, a power of two from [`GROUP`](super::GROUP) on.
    pub(crate) const WORDS: usize = 3;
    /// Sets of a processor's cache, a power of two; 0 without one.
    pub(crate) const SETS: usize = 4;
    /// How many ranges are watched. Written after them.
    pub(crate) const RANGES: usize = 5;
    /// 1 once the recorder is loaded.
    pub(crate) const LOADED: usize = 6;
    pub(crate) const TICKS_A_SECOND: usize = 7;
    pub(crate) const FIRST_TICK: usize = 8;
    /// How often other ranges were watched. Written after [`RANGES`].
    pub(crate) const CHANGES: usize = 9;
    /// Begin and end of each range.
    pub(crate) const FIRST_RANGE: usize = 16;
}

/// Words of a processor's page of counters. Each side's words have a line of their own.
pub(crate) mod counter {
    /// Words of the ring that were written, by the recorder.
    pub(crate) const HEAD: usize = 0;
    /// Records that found no room, by the recorder.
    pub(crate) const LOST: usize = 1;
    /// Words of the ring that were read, by the reader.
    pub(crate) const TAIL: usize = 8;
}

/// Bit of a record that says that it is a write. Below are [`RECORD`], [`SIZE_SHIFT`] and the
/// address.
pub(crate) const WRITE: u64 = 1 << 63;
/// The bit that each record has.
pub(crate) const RECORD: u64 = 1 << 62;
/// Where the binary logarithm of the record's bytes is, four bits of it.
pub(crate) const SIZE_SHIFT: u32 = 56;
/// Bits of an address.
pub(crate) const ADDRESS: u64 = (1 << SIZE_SHIFT) - 1;
/// The bit of a line in the cache that says that it was written. The rest is where it ends, so that
/// no line is 0.
pub(crate) const DIRTY: u64 = 1;

/// Bytes of a processor's part.
pub(crate) const fn part_bytes(words: usize, sets: usize) -> usize {
    PAGE + words * 8 + (sets * WAYS * 8).next_multiple_of(PAGE)
}

/// Where the cache of a part begins, in words.
pub(crate) const fn cache_word(words: usize) -> usize {
    PAGE / 8 + words
}
