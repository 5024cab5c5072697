//! Traces: what was asked of a device, and how its blocks are stored.
//!
//! A file is a header of 32 bytes and chunks. Numbers are little-endian; `varint` is LEB128.
//!
//! | header | |
//! |---|---|
//! | 0 | `LAMTRACE` |
//! | 8 | version, 16 bits: 3; 1 and 2 are read, too |
//! | 10 | what an address is, 8 bits: 0 requests that reached a device, 1 lines that a processor asked for |
//! | 11 | zeros, 5 bytes |
//! | 16 | bytes of the device, 64 bits |
//! | 24 | CRC-32C of the 24 bytes before it |
//! | 28 | zeros, 4 bytes |
//!
//! A chunk is a tag of one byte, three zeros, the number of its records, the bytes of its payload
//! and a CRC-32C of these 12 bytes and of the payload, 32 bits each; then the payload.
//!
//! | tag | record |
//! |---|---|
//! | `V` | a view: length of its name and the name, bits of an element, bits that the link carries of it, mask of its planes (the most significant plane is bit 0) |
//! | `B` | a block: number less that of the one before, kind (0 coded, 1 zeros, 2 bypassed), one more than the first line of its segment or 0 if nobody knows that, bytes of the head, bytes of the stream and planes in it, number of planes, stored bytes of each plane, one more than its bytes as words by lz4 and by zstd or 0 if nobody knows them |
//! | `W` | a block's bytes as words, all else of it as it was said: number and bytes as in `B` |
//! | `R` | a request: 32 times its view and bits (0 a write, 1 asked for, 2 fetched, 3 fetched by itself, 4 reads are told; none of 1 to 3 if nobody knows), guest, nanoseconds since the one before, address less the end of the one before (zigzag), bytes |
//! | `L` | requests that were lost here: how many |
//! | `E` | none. Two varints say how many requests and how many records of blocks (`B` and `W`) came before. The last chunk |
//!
//! In version 2 there is no `W`, bytes as words are themselves (of 0 nobody knows), and a request
//! has 16 times its view and no bit 4. In version 1 a block has no segment, head and stream, and a
//! request has twice its view and one bit.
//!
//! All fields of records are varints. Differences begin at 0 in each chunk, so a chunk can be read
//! alone; a chunk of requests begins with the time that its first follows, as a varint.
//!
//! Addresses are of the base window, whatever the view: a view says which planes of those bytes are
//! fetched and how much of them the link carries. A block that is said twice is stored anew there.

mod read;
#[cfg(test)]
mod tests;
pub mod text;
mod write;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use serde::Serialize;

pub use self::read::{Item, Reader};
pub use self::write::Writer;
use crate::ModelError;

/// The version that is written.
pub const VERSION: u16 = 3;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes that one request may ask for.
pub const MAX_REQUEST: u64 = 1 << 30;
/// Bytes that a device may have.
pub const MAX_DEVICE: u64 = 1 << 50;
/// Nanoseconds that a trace may take, more than two years: in cycles of any module they are far
/// from what 64 bits count.
pub const MAX_TIME_NS: u64 = 1 << 56;
/// Planes that a block may have.
pub const MAX_PLANES: u32 = 64;
/// Views that a trace may name.
pub const MAX_VIEWS: usize = 1 << 16;

const MAGIC: &[u8; 8] = b"LAMTRACE";
const HEADER: usize = 32;
const CHUNK_HEADER: usize = 16;
/// Bytes of a payload: a reader keeps one.
const MAX_PAYLOAD: usize = 1 << 24;

/// What addresses were seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Seen {
    /// Requests that reached a device: pages and read-ahead.
    Requests,
    /// Lines that a processor asked for.
    Lines,
}

/// What a trace says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Header {
    /// What addresses were seen.
    pub seen: Seen,
    /// Bytes of the device.
    pub device_bytes: u64,
}

impl Header {
    /// Refuses a device that no trace is of.
    ///
    /// # Errors
    /// Its bytes and their bounds.
    pub fn check(&self) -> Result<(), ModelError> {
        if (BLOCK_BYTES..=MAX_DEVICE).contains(&self.device_bytes) {
            return Ok(());
        }
        let must = format!("from {BLOCK_BYTES} to {MAX_DEVICE} bytes");
        Err(ModelError::field("device bytes", &self.device_bytes, &must))
    }
}

/// A view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct View {
    /// Its spelling.
    pub name: String,
    /// Bits of an element.
    pub bits: u32,
    /// Bits that the link carries of it.
    pub link_bits: u32,
    /// Planes that are fetched; the most significant is bit 0.
    pub planes: u64,
}

impl View {
    /// All planes of elements of so many bits.
    pub fn full(bits: u32) -> Self {
        let planes = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
        Self { name: "full".to_owned(), bits, link_bits: bits, planes }
    }
}

/// How a block is stored. Its bundle is the head, the first plane, the stream and the other planes,
/// in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Its state.
    pub kind: BlockKind,
    /// Where its bundle lies in the store, in lines of 64 bytes; none if nobody knows.
    pub segment: Option<u64>,
    /// Bytes that are fetched with any of its planes; all of them where there are no planes.
    pub head: u16,
    /// Bytes of the stream that holds several planes.
    pub stream: u16,
    /// How many: the second plane and those that follow it.
    pub joint: u8,
    /// Stored bytes of each plane, most significant first; 0 of those in the stream. Blocks with
    /// the same may share them.
    pub planes: Arc<[u16]>,
    /// What it takes as words.
    pub words: WordBytes,
}

/// Bytes that a block takes as words, compressed whole; none if nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WordBytes {
    /// By lz4.
    pub lz4: Option<u16>,
    /// By zstd.
    pub zstd: Option<u16>,
}

impl Block {
    /// Whether anybody knows how its bundle is made.
    pub fn has_layout(&self) -> bool {
        self.head > 0 || !self.planes.is_empty()
    }

    /// Bytes of its bundle.
    pub fn bytes(&self) -> u64 {
        let planes: u64 = self.planes.iter().map(|plane| u64::from(*plane)).sum();
        planes + u64::from(self.head) + u64::from(self.stream)
    }
}

/// The state of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockKind {
    /// Some planes are coded.
    #[default]
    Coded,
    /// It is all zeros, and nothing is stored.
    Zeros,
    /// No codec made it smaller.
    Bypassed,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    /// Nanoseconds since the trace began.
    pub time_ns: u64,
    /// Where, in the base window.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Its view, by number.
    pub view: u32,
    /// Whose it is.
    pub guest: u32,
    /// Whether it stores.
    pub write: bool,
    /// How it was served, if that was recorded.
    pub served: Option<Served>,
}

/// How a device that was recorded served a request. A replay does the same; where nobody knows, its
/// own buffer decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "bits of a record, each told by itself")]
pub struct Served {
    /// Whether somebody asked for these bytes. Others are moved because of some of their KV window,
    /// or because a part of their block is stored.
    pub asked: bool,
    /// Whether its blocks were fetched, or coded if it is a write. Else their words were at hand.
    pub fetched: bool,
    /// The same of a device that codes each block by itself.
    pub by_itself: bool,
    /// Whether what such a device reads to store a part of a block is told as a request before it.
    pub reads_told: bool,
}

/// Blocks of a page of [`Blocks`]: few, because a trace may say blocks far from each other.
const PAGE: usize = 8;

/// Blocks by their numbers, in pages: a replay at random looks up millions a second, and what it
/// waits for is memory. The table of pages stays in a processor's cache, one of blocks does not.
#[derive(Default)]
pub struct Blocks(HashMap<u64, Box<[Option<Block>; PAGE]>, BuildHasherDefault<NumberHasher>>);

impl Blocks {
    /// The block of that number, if anything was said of it.
    #[inline]
    pub fn get(&self, number: u64) -> Option<&Block> {
        let (page, at) = place(number);
        self.0.get(&page).and_then(|page| page[at].as_ref())
    }

    /// Brings what is said of a block into the processor's cache.
    #[inline]
    pub fn look_up(&self, number: u64) {
        std::hint::black_box(self.get(number).map(|block| block.kind));
    }

    /// Says anew how a block is stored.
    pub fn insert(&mut self, number: u64, block: Block) {
        *self.slot(number) = Some(block);
    }

    /// Says anew what a block takes as words. All else that was said of it stays.
    pub fn set_words(&mut self, number: u64, words: WordBytes) {
        self.slot(number).get_or_insert_default().words = words;
    }

    fn slot(&mut self, number: u64) -> &mut Option<Block> {
        let (page, at) = place(number);
        &mut self.0.entry(page).or_insert_with(|| Box::new([const { None }; PAGE]))[at]
    }
}

/// The page of a block, and its place there.
fn place(number: u64) -> (u64, usize) {
    (number / PAGE as u64, usize::try_from(number % PAGE as u64).unwrap_or(0))
}

/// A hash of one number: blocks are looked up millions of times a second.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn finish(&self) -> u64 {
        // The table looks at the uppermost and the lowest bits.
        self.0 ^ (self.0 >> 32)
    }
}

fn zigzag(difference: i64) -> u64 {
    (difference << 1 ^ difference >> 63).cast_unsigned()
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}
