//! Traces: what was asked of a device, and how its blocks are stored.
//!
//! A file is a header of 32 bytes and chunks. Numbers are little-endian; `varint` is LEB128.
//!
//! | header | |
//! |---|---|
//! | 0 | `LAMTRACE` |
//! | 8 | version, 16 bits: 1 |
//! | 10 | what an address is, 8 bits: 0 requests that reached a device, 1 lines that a processor asked for |
//! | 11 | zeros, 5 bytes |
//! | 16 | bytes of the device, 64 bits |
//! | 24 | CRC-32C of the 24 bytes before it |
//! | 28 | zeros, 4 bytes |
//!
//! A chunk is a tag of one byte, three zeros, the number of its records, the bytes of its payload and
//! a CRC-32C of these 12 bytes and of the payload, 32 bits each; then the payload.
//!
//! | tag | record |
//! |---|---|
//! | `V` | a view: length of its name and the name, bits of an element, bits that the link carries of it, mask of its planes (the most significant plane is bit 0) |
//! | `B` | a block: number less that of the one before, kind (0 coded, 1 zeros, 2 bypassed), bits of an element, stored bytes of each plane, bytes as words by lz4 and by zstd |
//! | `R` | a request: view and twice that and whether it is a write, guest, nanoseconds since the one before, address less the end of the one before (zigzag), bytes |
//! | `E` | none. Two varints say how many requests and blocks came before. The last chunk |
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

use serde::Serialize;

pub use self::read::{Item, Reader};
pub use self::write::Writer;

/// The version that is written and read.
pub const VERSION: u16 = 1;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes that one request may ask for.
pub const MAX_REQUEST: u64 = 1 << 30;
/// Bytes that a device may have.
pub const MAX_DEVICE: u64 = 1 << 50;
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

/// How a block is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Block {
    /// Its state.
    pub kind: BlockKind,
    /// Stored bytes of each plane, most significant first.
    pub planes: Vec<u16>,
    /// Bytes that it takes as words by lz4.
    pub lz4: u16,
    /// The same by zstd.
    pub zstd: u16,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockKind {
    /// Some planes are coded.
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
}

/// Blocks by their numbers.
pub type Blocks = HashMap<u64, Block, BuildHasherDefault<NumberHasher>>;

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
