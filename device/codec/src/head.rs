//! The head of a bundle: what a block of a transformed window needs besides its planes.
//!
//! A head stands before the planes of its bundle and is fetched with any of them. Its length is in
//! the index entry; there is none where a block is kept in address order. It has four parts:
//!
//! 1. Two bytes: bits 0..12 the length of the [signs](super::signs), 0 if the sign plane is kept as
//!    the others are; bit 15 whether the details name repeated rows; the others zero.
//! 2. The signs.
//! 3. The details, which are the transform's business: see [`crate::kv`].
//! 4. A check over the bytes before it: their CRC-32C, upper half XOR lower half.

use super::{crc::crc32c, error::BlockError};

/// Bytes of the first part.
const FIRST: usize = 2;
/// Bytes of the check.
const CHECK: usize = 2;
/// The most bytes of a head.
pub const MAX_HEAD: usize = 1536;

const SIGNS: u16 = 0x0fff;
const REPEATS: u16 = 0x8000;

/// What the index says of a block's head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Its bytes; 0 is no head, and a block in address order.
    pub length: u16,
    /// Whether the exponents are differences from bases that its details give.
    pub delta: bool,
}

/// The details of a head to be written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Details<'a> {
    /// Whether the exponents are differences.
    pub delta: bool,
    /// Whether the details name repeated rows.
    pub repeats: bool,
    /// The details.
    pub bytes: &'a [u8],
}

/// A head that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found<'a> {
    /// The stream of the signs, if there is one.
    pub signs: &'a [u8],
    /// Whether the details name repeated rows.
    pub repeats: bool,
    /// The details.
    pub details: &'a [u8],
}

/// Puts a head together at the front of `out`, where its `signs` bytes of signs are already at
/// their place, behind [`signs_at`]: its length.
pub(super) fn write(signs: usize, details: &Details<'_>, out: &mut [u8]) -> u16 {
    let first =
        u16::try_from(signs).expect("shorter than a plane") | if details.repeats { REPEATS } else { 0 };
    out[..FIRST].copy_from_slice(&first.to_le_bytes());
    let end = FIRST + signs + details.bytes.len();
    out[FIRST + signs..end].copy_from_slice(details.bytes);
    let check = folded(crc32c(&out[..end]));
    out[end..end + CHECK].copy_from_slice(&check.to_le_bytes());
    u16::try_from(end + CHECK).expect("at most MAX_HEAD")
}

/// Where the signs begin in a head.
pub(super) const fn signs_at() -> usize {
    FIRST
}

/// Bytes of a head with no signs and so many bytes of details.
pub(super) const fn length(details: usize) -> usize {
    FIRST + details + CHECK
}

/// The head of `length` bytes at the front of `bundle`.
///
/// # Errors
/// [`BlockError::HeadCheck`], [`BlockError::Head`].
#[inline]
pub(crate) fn read(length: u16, bundle: &[u8]) -> Result<Found<'_>, BlockError> {
    let length = usize::from(length);
    let Some((bytes, check)) = bundle[..length].split_last_chunk::<CHECK>().filter(|(b, _)| b.len() >= FIRST)
    else {
        return Err(BlockError::Head { what: "length", value: length });
    };
    let (computed, stored) = (folded(crc32c(bytes)), u16::from_le_bytes(*check));
    if computed != stored {
        return Err(BlockError::HeadCheck { computed, stored });
    }
    let first = u16::from_le_bytes([bytes[0], bytes[1]]);
    let signs = usize::from(first & SIGNS);
    if first & !(SIGNS | REPEATS) != 0 {
        return Err(BlockError::Head { what: "first part", value: first.into() });
    }
    match bytes[FIRST..].split_at_checked(signs) {
        Some((signs, details)) => Ok(Found { signs, repeats: first & REPEATS != 0, details }),
        None => Err(BlockError::Head { what: "length of signs", value: signs }),
    }
}

/// Makes the check of a head right, for fuzzing.
pub fn mend(head: &mut [u8]) {
    if let Some((bytes, check)) = head.split_last_chunk_mut::<CHECK>() {
        *check = folded(crc32c(bytes)).to_le_bytes();
    }
}

/// A CRC-32C folded to 16 bits.
#[expect(clippy::cast_possible_truncation, reason = "folding keeps the lower half on purpose")]
const fn folded(crc: u32) -> u16 {
    (crc ^ crc >> 16) as u16
}
