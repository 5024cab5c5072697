//! The codec complex: planes to stored bytes and back (TRACE III-B and III-D).
//!
//! The rules:
//! * [`block`] turns a whole block into one *bundle* of bytes and a description of it, and any subset of the planes back.
//! * Each plane is kept as the cheapest of: constant (nothing stored), the codec's output, raw; the plane [`tree`] codes exponent planes jointly. A block whose every stored
//!   plane is raw is a *bypass*.
//! * A codec's output is never longer than its input; what does not shrink is stored raw.
//! * Decoding never trusts the stored bytes: damage is an error, never a panic or a read out of bounds.
//! * Codec contexts live in the thread, so coding a block allocates nothing.

pub mod block;
pub mod check;
mod crc;
mod form;
pub mod head;
mod lz4;
pub mod signs;
mod survey;
pub mod tree;
mod zstd;

use std::{fmt, str::FromStr};

pub use self::form::{FIELDS, Form};

/// How the planes of a block are compressed. LZ4 and ZSTD are what commodity controllers have; the plane tree knows floats.
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
    pub const fn bytewise(self) -> Self {
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

    /// Compresses `input` by the [bytewise](Self::bytewise) codec into the front of `out`, if that makes it shorter: the bytes it takes.
    ///
    /// # Panics
    /// If `input` is longer than a block or `out` shorter than `input`.
    pub fn compress(self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        match self {
            Self::Lz4 | Self::Tree => lz4::compress(input, out),
            Self::Zstd => zstd::compress(input, out),
        }
    }

    /// Decompresses `stored` to exactly fill `out`.
    ///
    /// # Errors
    /// [`Undecodable`] when the bytes are damaged or give another length.
    pub fn decompress(self, stored: &[u8], out: &mut [u8]) -> Result<(), Undecodable> {
        let got = match self {
            Self::Lz4 | Self::Tree => lz4::decompress(stored, out),
            Self::Zstd => zstd::decompress(stored, out),
        };
        self.judge(got, out.len())
    }

    /// Decompresses the first `length` bytes of `stored` to exactly fill the first `plane` bytes of `out`. Bytes behind them are lost, and there had better be some, as behind the
    /// stream: LZ4 is copied by whole registers then.
    ///
    /// # Errors
    /// [`Undecodable`] when the bytes are damaged or give another length.
    ///
    /// # Panics
    /// If there are fewer bytes.
    pub fn decompress_plane(
        self,
        stored: &[u8],
        length: usize,
        out: &mut [u8],
        plane: usize,
    ) -> Result<(), Undecodable> {
        let got = match self {
            Self::Lz4 | Self::Tree => lz4::decompress_plane(stored, length, out, plane),
            Self::Zstd => zstd::decompress(&stored[..length], &mut out[..plane]),
        };
        self.judge(got, plane)
    }

    /// Whether what was decompressed is as long as expected.
    fn judge(self, got: Result<usize, String>, expected: usize) -> Result<(), Undecodable> {
        match got {
            Ok(length) if length == expected => Ok(()),
            Ok(length) => Err(Undecodable { codec: self, expected, why: format!("they give {length}") }),
            Err(why) => Err(Undecodable { codec: self, expected, why }),
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
