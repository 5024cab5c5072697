//! The plane index entry: 64 bytes that say where a block is and how each of its planes is stored (TRACE III-D).
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | bits 0..40 segment (in granules), 40..42 kind (0 zeros, 1 planes, 2 words, 3 planes with a plane tree), 42..45 format, 45..48 codec, 48..60 bytes of the head, 60 whether exponents are differences, rest zero |
//! | 8..10 | epoch: rewrites of the block, modulo 2^16 |
//! | 10..14 | CRC-32C of the 64 bytes with zeros here |
//! | 14..64 | *planes*: a length code per plane, most significant plane first, then (formats of up to 16 planes) a 16-bit check per plane |
//! | 14..20 | *words*: stored bytes (u16), CRC-32C of them (u32) |
//! | 14..20 | *planes with a plane tree*: bytes of its stream (u16, not 0), CRC-32C of them (u32) |
//! | 20..64 | … length codes and checks as for *planes*, of the planes that the tree does not hold |
//!
//! A length code is 0 for a plane of zeros, the plane's length for raw, that length + 1 for a plane of ones, else the coded bytes; it takes just
//! the bits its largest value needs: 8 for fp32, 9 for 16-bit, 10 for 8-bit formats, 11 for int4. An entry of 64 zero bytes is a
//! block of zeros that was never written.

use std::ops::Range;

use super::fields::{Fields, WORDS, ones_code};
use lamina_codec::{
    BLOCK_BYTES, Codec,
    block::{Joint, Stored, StoredPlanes, most_bytes},
    format::Format,
    head::{Head, MAX_HEAD},
    tree,
};

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 64;

/// The entry of a poisoned block.
pub const POISON: [u8; ENTRY_BYTES] = [0xff; ENTRY_BYTES];

/// An entry that does not check, in the place of one that named what is not its block's. Unlike
/// [`POISON`] it says nothing of how the block was stored.
pub(super) const DAMAGED: [u8; ENTRY_BYTES] = {
    let mut bytes = POISON;
    bytes[0] = 0;
    bytes
};

const EPOCH: Range<usize> = 8..10;
const CHECK: Range<usize> = 10..14;
/// Where it is in the second word.
const CHECK_SHIFT: usize = 8 * (CHECK.start - 8);
const DETAIL: usize = 14;
/// Where the planes beside a plane tree are described.
const TREE_DETAIL: usize = 20;

/// What the index knows of one block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Rewrites of the block, modulo 2^16.
    pub epoch: u16,
    /// Where it is, or `None` for a block of zeros.
    pub place: Option<Place>,
}

/// Where and how a block is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The first granule of its segment.
    pub segment: u64,
    /// How the bundle there is made.
    pub stored: Stored,
}

/// Why 64 bytes are no entry.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Damaged {
    /// The block is poisoned.
    #[error("it is poisoned")]
    Poison,
    /// The checksum does not match.
    #[error("CRC-32C {computed:#010x}, stored was {stored:#010x}")]
    Check {
        /// What the bytes give.
        computed: u32,
        /// What was stored.
        stored: u32,
    },
    /// A field has a value that no writer gives it.
    #[error("{field} is {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

impl Entry {
    /// The 64 bytes.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut words = [0; WORDS];
        words[1] = u64::from(self.epoch);
        if let Some(Place { segment, stored }) = &self.place {
            let head = match stored {
                Stored::Planes(planes) if planes.joint.length > 0 => {
                    put_length(&mut words, planes.joint.length, planes.joint.check);
                    words = Fields { words, at: 8 * TREE_DETAIL }.put(planes);
                    head(3, planes.format, planes.codec) | planes_head(planes.head)
                }
                Stored::Planes(planes) => {
                    words = Fields { words, at: 8 * DETAIL }.put(planes);
                    head(1, planes.format, planes.codec) | planes_head(planes.head)
                }
                Stored::Words { codec, length, check } => {
                    put_length(&mut words, *length, *check);
                    head(2, Format::Opaque, *codec)
                }
            };
            assert!(*segment < 1 << 40, "segments are numbered in 40 bits");
            words[0] = head | segment;
        }
        if self.epoch > 0 || self.place.is_some() {
            words[1] |= u64::from(checksum(&words)) << CHECK_SHIFT;
        }
        to_bytes(&words)
    }

    /// The entry in 64 bytes.
    ///
    /// # Errors
    /// [`Damaged`].
    pub fn decode(bytes: &[u8; ENTRY_BYTES]) -> Result<Self, Damaged> {
        let mut words = [0; WORDS];
        let (mut any, mut all) = (0, u64::MAX);
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
            (any, all) = (any | *word, all & *word);
        }
        // As in POISON.
        if all == u64::MAX {
            return Err(Damaged::Poison);
        }
        if any == 0 {
            return Ok(Self::default());
        }
        let computed = checksum(&words);
        let stored = u32::from_le_bytes(bytes[CHECK].try_into().expect("four bytes"));
        if computed != stored {
            return Err(Damaged::Check { computed, stored });
        }
        let epoch = u16::from_le_bytes(bytes[EPOCH].try_into().expect("two bytes"));
        let head = words[0];
        let (kind, format, codec, rest) = (head >> 40 & 3, head >> 42 & 7, head >> 45 & 7, head >> 48);
        let planes_head =
            Head { length: u16::try_from(rest & 0xfff).expect("12 bits"), delta: rest >> 12 & 1 == 1 };
        // Words and zeros have no head, and an exponent is a difference only from what a head says.
        let headless =
            planes_head.length == 0 && (planes_head.delta || rest != 0) || matches!(kind, 0 | 2) && rest != 0;
        if headless || rest >> 13 != 0 || usize::from(planes_head.length) > MAX_HEAD {
            return Err(Damaged::Field { field: "head or reserved bits", value: rest });
        }
        let format = Format::ALL[usize::try_from(format).expect("three bits")];
        let codec = *usize::try_from(codec)
            .ok()
            .and_then(|codec| Codec::ALL.get(codec))
            .ok_or(Damaged::Field { field: "codec", value: codec })?;
        let length = u16::from_le_bytes([bytes[DETAIL], bytes[DETAIL + 1]]);
        let check = u32::from_le_bytes(bytes[DETAIL + 2..TREE_DETAIL].try_into().expect("four bytes"));
        let segment = segment_of(head);
        let placed = |stored| Self { epoch, place: Some(Place { segment, stored }) };
        let (joint, at) = match kind {
            0 => return Ok(Self { epoch, place: None }),
            1 => (Joint::default(), 8 * DETAIL),
            2 if usize::from(length) > BLOCK_BYTES => {
                return Err(Damaged::Field { field: "length of words", value: length.into() });
            }
            2 => return Ok(placed(Stored::Words { codec, length, check })),
            3 if length == 0 || usize::from(length) > tree::joint_bytes(format) => {
                return Err(Damaged::Field { field: "length of plane tree", value: length.into() });
            }
            _ => (Joint { length, check }, 8 * TREE_DETAIL),
        };
        if format.planes() == 0 {
            return Err(Damaged::Field { field: "format of planes", value: format as u64 });
        }
        let mut entry = placed(Stored::Planes(StoredPlanes {
            head: planes_head,
            joint,
            ..StoredPlanes::zeros(format, codec)
        }));
        if let Some(Place { stored: Stored::Planes(planes), .. }) = &mut entry.place {
            let largest = Fields { words, at }.take(planes);
            if largest > ones_code(format) {
                return Err(Damaged::Field { field: "length code", value: largest.into() });
            }
            // Without a head they are never more: no length is more than a plane's.
            if planes.head.length > 0 && planes.bytes() > most_bytes(planes.head.length.into()) {
                return Err(Damaged::Field { field: "length of bundle", value: planes.bytes() as u64 });
            }
        }
        Ok(entry)
    }

    /// Bytes the block is charged in the store.
    pub fn charged(&self) -> u64 {
        self.place.as_ref().map_or(0, |place| super::charged(place.stored.bytes()))
    }
}

/// The segment that is named by an entry whose first word is `word`.
pub(super) fn segment_of(word: u64) -> u64 {
    word & ((1 << 40) - 1)
}

/// Puts length and checksum of bytes where the detail begins.
fn put_length(words: &mut [u64], length: u16, check: u32) {
    words[1] |= u64::from(length) << 48;
    words[2] |= u64::from(check);
}

fn planes_head(Head { length, delta }: Head) -> u64 {
    u64::from(length) << 48 | u64::from(delta) << 60
}

fn head(kind: u64, format: Format, codec: Codec) -> u64 {
    kind << 40 | (format as u64) << 42 | (codec as u64) << 45
}

/// CRC-32C of an entry, its own place counted as zeros.
fn checksum(words: &[u64; WORDS]) -> u32 {
    let mut words = *words;
    words[1] &= !(u64::from(u32::MAX) << CHECK_SHIFT);
    crc32c::crc32c(&to_bytes(&words))
}

fn to_bytes(words: &[u64; WORDS]) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}
