//! Tensors as compressed bit-planes: bytes in, bytes out.
//!
//! ```
//! use lamina_codec::{BLOCK_BYTES, Codec, Decoder, Encoder};
//! use lamina_codec::{block::{Bundle, MAX_BUNDLE}, format::Format, view::View};
//!
//! let words = [0x3f; BLOCK_BYTES]; // 2048 numbers in bf16
//! let mut bundle = Bundle::new();
//! Encoder::new().block(Format::Bf16, Codec::Tree, &words, &mut bundle);
//! let stored = bundle.stored.clone().unwrap(); // what and where; none for a block of zeros
//! let mut fetched = [0; MAX_BUNDLE];
//! let view = View::parse(Format::Bf16, "e8m3").unwrap(); // or "full", "fp8_e4m3fn", ...
//! stored.runs(view.mask(), |run| fetched[run.clone()].copy_from_slice(&bundle.bytes()[run]));
//! let mut back = [0; BLOCK_BYTES];
//! Decoder::new().block(&stored, view.mask(), &fetched, &mut back).unwrap();
//! ```
//!
//! This is the codec complex of TRACE (III-B and III-D), without any device: no I/O, no threads.
//! `examples/` splits and joins a block, codes a tensor, renders a view and codes a KV window.
//!
//! * [`plane`] splits words into planes, and joins them.
//! * [`block`] turns a whole block into one *bundle* of bytes and a description of it, and any
//!   subset of its planes back.
//! * [`kv`] transposes windows of a KV cache before that; [`view`] renders what comes back.
//! * [`packkv`] codes KV caches with loss, where that was asked for.
//! * [`scaled`] puts elements and the scales of their blocks together.
//!
//! The rules:
//! * Each plane is stored as the cheapest of: constant (no bytes), the codec's output, raw; the
//!   plane tree codes exponent planes jointly. A block whose every stored plane is raw is a
//!   *bypass*.
//! * A codec's output is never longer than its input; what does not shrink is stored raw.
//! * Decoding never trusts the stored bytes: damage is an error, never a panic or a read out of
//!   bounds.
//! * Contexts ([`Encoder`], [`Decoder`]) are passed, so coding a block allocates nothing, and are
//!   without memory: the same words in the same format by the same codec give the same stored
//!   bytes.

pub mod block;
mod bounds;
mod check;
mod context;
mod crc;
mod error;
pub mod format;
pub mod head;
mod kernel;
pub mod kv;
mod lines;
mod lz4;
pub mod packkv;
pub mod plane;
pub mod scaled;
mod signs;
mod survey;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
mod tree;
pub mod view;
mod workspace;
mod zstd;

/// What benchmarks and fuzz targets of this workspace look at, with no promise to anybody else.
#[doc(hidden)]
pub mod internals {
    pub use crate::{
        check::check, head::mend, packkv::dense, plane::Kernel as PlaneKernel, tree::Kernel as TreeKernel,
    };
}

use std::{fmt, str::FromStr};

pub use self::context::{Decoder, Encoder};

/// Bytes of a logical block: one page, the unit that is split into planes, coded and indexed (TRACE
/// III-A).
pub const BLOCK_BYTES: usize = 4096;

/// The words of one block: its bytes as the host sees them.
pub type BlockWords = [u8; BLOCK_BYTES];

/// How the planes of a block are compressed. LZ4 and ZSTD are what commodity controllers have; the
/// plane tree knows floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// LZ4 block format.
    Lz4 = 0,
    /// ZSTD level 3, frames without magic number, checksum and content size.
    Zstd = 1,
    /// Exponent planes jointly as a [`tree`], the others mostly raw; what is not planes as LZ4.
    #[default]
    Tree = 2,
}

/// A name that is no codec's.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("no codec is called {name:?}; codecs are lz4, zstd and tree")]
pub struct UnknownCodec {
    /// The name.
    pub name: String,
}

/// Stored bytes that do not decode.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{codec} bytes do not decode to {expected} bytes: {why}")]
pub struct Undecodable {
    /// The codec that was asked.
    pub codec: Codec,
    /// Bytes it should have given.
    pub expected: usize,
    /// What it said.
    pub why: String,
}

impl Codec {
    /// Every codec, `ALL[c as usize] == c`.
    pub const ALL: [Self; 3] = [Self::Lz4, Self::Zstd, Self::Tree];

    /// The name used everywhere.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Tree => "tree",
        }
    }

    /// The codec that single planes and words are compressed by.
    #[must_use]
    pub(crate) const fn bytewise(self) -> Self {
        match self {
            Self::Lz4 | Self::Tree => Self::Lz4,
            Self::Zstd => Self::Zstd,
        }
    }

    /// What a generically compressing device codes blocks by where this one codes by `self`: the
    /// codec of single planes and words, with its level.
    pub const fn generic_name(self) -> &'static str {
        match self {
            Self::Lz4 | Self::Tree => "lz4",
            Self::Zstd => zstd::NAME,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Codec {
    type Err = UnknownCodec;

    fn from_str(name: &str) -> Result<Self, UnknownCodec> {
        Self::ALL.into_iter().find(|c| c.name() == name).ok_or_else(|| UnknownCodec { name: name.to_owned() })
    }
}

impl serde::Serialize for Codec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Codec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
pub(crate) mod tests;
