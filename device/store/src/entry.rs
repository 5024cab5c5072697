//! The plane index entry: 64 bytes that say where a block is and how each of its planes is stored
//! (TRACE III-D).
//!
//! Version 2 of the format:
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | bits 0..36 segment (in granules), 36..44 format, 44..52 codec, 52..63 bytes of the header, 63 whether exponents are differences |
//! | 8 | epoch: rewrites of the block, modulo 2^8 |
//! | 9 | bits 0..2 kind (0 zeros, 1 planes, 2 words, 3 planes with a plane tree), 2 whether there is a side array, 3 whether the block is lossy, 4 whether it is the difference to another block, rest zero |
//! | 10..14 | CRC-32C of the 64 bytes with zeros here |
//! | 14..64 | *planes*: a length code per plane, most significant plane first, then (formats of up to 16 planes) a 16-bit check per plane |
//! | 14..20 | *words*, and a piece of a KV window that is coded with loss: stored bytes (u16), CRC-32C of them (u32) |
//! | 14..20 | *planes with a plane tree*: bytes of its stream (u16, not 0), CRC-32C of them (u32) |
//! | 20..64 | … length codes and checks as for *planes*, of the planes that the tree does not hold |
//! | 63 | of a format of more than 16 planes, whose checks are not here: the upper byte of the epoch |
//!
//! Version 1 has another prefix: bits 0..40 segment, 40..42 kind, 42..45 format, 45..48 codec,
//! 48..60 bytes of the header, 60 whether exponents are differences; bytes 8..10 epoch, modulo
//! 2^16. All else is the same.
//!
//! A length code is 0 for a plane of zeros, the plane's length for raw, that length + 1 for a plane
//! of ones, else the coded bytes; it takes just the bits its largest value needs: 8 for fp32, 9 for
//! 16-bit, 10 for 8-bit formats, 11 for those of 4 bits. An entry of 64 zero bytes is a block of
//! zeros that was never written.

use std::ops::Range;

use super::{
    GRANULE_BYTES,
    fields::{Fields, WORDS, ones_code},
};
use lamina_codec::{
    BLOCK_BYTES, Codec,
    block::{Joint, MAX_CHECKS, Stored, StoredPlanes, joint_bytes, most_bytes},
    format::Format,
    head::{Head as PlanesHead, MAX_HEAD},
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

/// Where the check is, in every version.
const CHECK: Range<usize> = 10..14;
/// Where it is in the second word.
const CHECK_SHIFT: usize = 8 * (CHECK.start - 8);
const DETAIL: usize = 14;
/// Where the planes beside a plane tree are described.
const TREE_DETAIL: usize = 20;

/// The byte of a second half of the epoch, where there is one.
const EPOCH_HIGH: usize = 63;

/// The codec of kind 2 that says a piece of a KV window that is coded with loss.
const PACKED: u64 = Codec::ALL.len() as u64;

/// Bits of a format's number in entries of version 1.
const FORMAT_BITS_OF_ONE: u32 = 3;

/// A version of the stored format. Entries of one image are all of the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// Formats and codecs in three bits.
    One = 1,
    /// Formats and codecs in eight bits, flags for side arrays, lossy blocks and differences.
    #[default]
    Two = 2,
}

impl Version {
    /// The version of this number, if this program knows it.
    pub const fn of(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            _ => None,
        }
    }

    /// Bits in which an entry numbers segments.
    const fn segment_bits(self) -> u32 {
        match self {
            Self::One => 40,
            Self::Two => 36,
        }
    }

    /// Bytes of bundles that entries can name.
    pub const fn max_store_bytes(self) -> u64 {
        (GRANULE_BYTES as u64) << self.segment_bits()
    }

    /// Whether its entries can say that a block is lossy.
    pub const fn has_lossy(self) -> bool {
        matches!(self, Self::Two)
    }

    /// Whether its entries have a number for the format: of version 1 the first eight do.
    pub const fn holds(self, format: Format) -> bool {
        matches!(self, Self::Two) || (format as u8) < 1 << FORMAT_BITS_OF_ONE
    }

    /// Whether its entries can say that a block is a difference.
    pub const fn has_differences(self) -> bool {
        matches!(self, Self::Two)
    }

    /// The segment that is named by an entry whose first word is `word`.
    pub(super) const fn segment(self, word: u64) -> u64 {
        word & ((1 << self.segment_bits()) - 1)
    }
}

/// What the index knows of one block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Rewrites of the block, modulo 2^16, or 2^8: see [`Entry::next`].
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
    /// Whether it gives other values than the host stored, as its region's coding may. Only
    /// version 2 can say so.
    pub lossy: bool,
    /// Whether it gives the block's words XOR those of the same block of its tensor's base. Only
    /// version 2 can say so.
    pub difference: bool,
}

/// What an entry says before its detail.
struct Prefix {
    segment: u64,
    kind: u64,
    format: u64,
    codec: u64,
    planes: PlanesHead,
    lossy: bool,
    difference: bool,
    side_array: bool,
    /// Bits that have no meaning.
    reserved: u64,
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

impl Prefix {
    /// That of zeros.
    const NONE: Self = Self {
        segment: 0,
        kind: 0,
        format: 0,
        codec: 0,
        planes: PlanesHead { length: 0, delta: false },
        lossy: false,
        difference: false,
        side_array: false,
        reserved: 0,
    };

    fn put(&self, version: Version, words: &mut [u64; WORDS]) {
        let Self { segment, kind, format, codec, planes, lossy, difference, .. } = *self;
        assert!(segment < 1 << version.segment_bits(), "the store is no larger than segments are numbered");
        let (length, delta) = (u64::from(planes.length), u64::from(planes.delta));
        match version {
            Version::One => {
                assert!(format < 1 << FORMAT_BITS_OF_ONE, "no tensor has a format that the version lacks");
                assert!(!difference, "no tensor has a base where entries cannot say so");
                words[0] = segment | kind << 40 | format << 42 | codec << 45 | length << 48 | delta << 60;
            }
            Version::Two => {
                words[0] = segment | format << 36 | codec << 44 | length << 52 | delta << 63;
                words[1] |= kind << 8 | u64::from(lossy) << 11 | u64::from(difference) << 12;
            }
        }
    }

    fn take(version: Version, words: &[u64; WORDS]) -> Self {
        let [word, flags, ..] = *words;
        let bits = |word: u64, at: u32, count: u32| word >> at & ((1 << count) - 1);
        let planes = |length: u64, delta: u64| PlanesHead {
            length: u16::try_from(length).expect("12 bits at most"),
            delta: delta == 1,
        };
        let segment = version.segment(word);
        match version {
            Version::One => Self {
                segment,
                kind: bits(word, 40, 2),
                format: bits(word, 42, FORMAT_BITS_OF_ONE),
                codec: bits(word, 45, 3),
                planes: planes(bits(word, 48, 12), bits(word, 60, 1)),
                lossy: false,
                difference: false,
                side_array: false,
                reserved: bits(word, 61, 3),
            },
            Version::Two => Self {
                segment,
                kind: bits(flags, 8, 2),
                format: bits(word, 36, 8),
                codec: bits(word, 44, 8),
                planes: planes(bits(word, 52, 11), bits(word, 63, 1)),
                lossy: bits(flags, 11, 1) == 1,
                difference: bits(flags, 12, 1) == 1,
                side_array: bits(flags, 10, 1) == 1,
                reserved: bits(flags, 13, 3),
            },
        }
    }

    /// Whether fields contradict each other, or have values that no writer gives them.
    fn check(&self, version: Version) -> Result<(), Damaged> {
        let field = |field, value| Err(Damaged::Field { field, value });
        let PlanesHead { length, delta } = self.planes;
        if self.reserved != 0 {
            return field("reserved bits", self.reserved);
        }
        // None of the formats of this version has block scales.
        if self.side_array {
            return field("side array of a format without", self.format);
        }
        // An exponent is a difference only from what a header says; words and zeros have none.
        let headless = matches!(self.kind, 0 | 2);
        if usize::from(length) > MAX_HEAD || delta && length == 0 || headless && length > 0 {
            return field("header", length.into());
        }
        let Self { segment, kind, format, codec, lossy, difference, .. } = *self;
        // Blocks of KV windows have headers, and no base.
        if difference && length > 0 {
            return field("header of a difference", length.into());
        }
        let of_words = matches!(kind, 0 | 2) && format != 0;
        let of_zeros = kind == 0 && (segment != 0 || codec != 0 || lossy || difference);
        if version == Version::Two && (of_words || of_zeros) {
            return field("field that this kind has not", kind);
        }
        Ok(())
    }
}

impl Entry {
    /// The entry that follows when the block is stored at `place`.
    ///
    /// Its epoch and its checks together tell it from the one before. So the epoch is long where
    /// the checks are not in the entry: of version 2 it has 16 bits for formats of more than 16
    /// planes, and 8 for all others.
    #[must_use]
    pub fn next(&self, version: Version, place: Option<Place>) -> Self {
        Self { epoch: self.epoch.wrapping_add(1), place }.fitting(version)
    }

    /// The entry as this version has it, which an entry of another may say more than.
    #[must_use]
    pub(super) fn fitting(mut self, version: Version) -> Self {
        if version == Version::Two && !self.place.as_ref().is_some_and(Place::has_long_epoch) {
            self.epoch &= 0xff;
        }
        self
    }

    /// The 64 bytes.
    pub fn encode(&self, version: Version) -> [u8; ENTRY_BYTES] {
        let mut words = [0; WORDS];
        let [low, high] = self.epoch.to_le_bytes();
        words[1] = match version {
            Version::One => u64::from(self.epoch),
            Version::Two => u64::from(low),
        };
        if let Some(place) = &self.place {
            let Place { segment, stored, lossy, difference } = place;
            let prefix = |kind, format: Format, codec: Codec, planes| Prefix {
                segment: *segment,
                kind,
                format: format as u64,
                codec: codec as u64,
                planes,
                lossy: *lossy,
                difference: *difference,
                ..Prefix::NONE
            };
            let prefix = match stored {
                Stored::Planes(planes) if planes.joint.length > 0 => {
                    put_length(&mut words, planes.joint.length, planes.joint.check);
                    words = Fields { words, at: 8 * TREE_DETAIL }.put(planes);
                    prefix(3, planes.format, planes.codec, planes.head)
                }
                Stored::Planes(planes) => {
                    words = Fields { words, at: 8 * DETAIL }.put(planes);
                    prefix(1, planes.format, planes.codec, planes.head)
                }
                Stored::Words { codec, length, check } => {
                    put_length(&mut words, *length, *check);
                    prefix(2, Format::Opaque, *codec, PlanesHead::default())
                }
                Stored::Packed { length, check } => {
                    put_length(&mut words, *length, *check);
                    Prefix { segment: *segment, kind: 2, codec: PACKED, lossy: *lossy, ..Prefix::NONE }
                }
            };
            prefix.put(version, &mut words);
            if version == Version::Two && place.has_long_epoch() {
                words[EPOCH_HIGH / 8] |= u64::from(high) << (8 * (EPOCH_HIGH % 8));
            }
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
    pub fn decode(version: Version, bytes: &[u8; ENTRY_BYTES]) -> Result<Self, Damaged> {
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
        let prefix = Prefix::take(version, &words);
        prefix.check(version)?;
        let mut epoch = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version == Version::Two {
            epoch &= 0xff;
        }
        let known = |all: usize, at: u64| usize::try_from(at).ok().filter(|at| *at < all);
        let format = known(Format::ALL.len(), prefix.format).map(|at| Format::ALL[at]);
        let format = format.ok_or(Damaged::Field { field: "format", value: prefix.format })?;
        let is_packed = prefix.kind == 2 && prefix.codec == PACKED && prefix.lossy;
        let codec = known(Codec::ALL.len(), prefix.codec).map(|at| Codec::ALL[at]);
        let codec = codec.or(is_packed.then(Codec::default));
        let codec = codec.ok_or(Damaged::Field { field: "codec", value: prefix.codec })?;
        let length = u16::from_le_bytes([bytes[DETAIL], bytes[DETAIL + 1]]);
        let check = u32::from_le_bytes(bytes[DETAIL + 2..TREE_DETAIL].try_into().expect("four bytes"));
        let placed = |epoch, stored| {
            let Prefix { segment, lossy, difference, .. } = prefix;
            Self { epoch, place: Some(Place { segment, stored, lossy, difference }) }
        };
        let (joint, at) = match prefix.kind {
            0 => return Ok(Self { epoch, place: None }),
            1 => (Joint::default(), 8 * DETAIL),
            2 if usize::from(length) > BLOCK_BYTES => {
                return Err(Damaged::Field { field: "length of words", value: length.into() });
            }
            2 if is_packed => return Ok(placed(epoch, Stored::Packed { length, check })),
            2 => return Ok(placed(epoch, Stored::Words { codec, length, check })),
            3 if length == 0 || usize::from(length) > joint_bytes(format) => {
                return Err(Damaged::Field { field: "length of plane tree", value: length.into() });
            }
            _ => (Joint { length, check }, 8 * TREE_DETAIL),
        };
        if format.planes() == 0 {
            return Err(Damaged::Field { field: "format of planes", value: format as u64 });
        }
        if version == Version::Two && has_long_epoch(format) {
            epoch |= u16::from(bytes[EPOCH_HIGH]) << 8;
        }
        let planes = StoredPlanes { head: prefix.planes, joint, ..StoredPlanes::zeros(format, codec) };
        let mut entry = placed(epoch, Stored::Planes(planes));
        if let Some(Place { stored: Stored::Planes(planes), .. }) = &mut entry.place {
            let largest = Fields { words, at }.take(planes);
            if largest > ones_code(format) {
                return Err(Damaged::Field { field: "length code", value: largest.into() });
            }
            // Without a header they are never more: no length is more than a plane's.
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

impl Place {
    /// What is stored so at `segment`.
    pub const fn new(segment: u64, stored: Stored) -> Self {
        let lossy = stored.is_lossy();
        Self { segment, stored, lossy, difference: false }
    }

    /// Whether no codec helped. A block that is equal to its tensor's base stores nothing, and is
    /// none.
    pub fn is_bypass(&self) -> bool {
        self.stored.is_bypass() && !(self.difference && self.stored.bytes() == 0)
    }

    /// Whether an entry of version 2 has all 16 bits of the epoch: its checks are elsewhere.
    const fn has_long_epoch(&self) -> bool {
        match &self.stored {
            Stored::Planes(planes) => has_long_epoch(planes.format),
            Stored::Words { .. } | Stored::Packed { .. } => false,
        }
    }
}

const fn has_long_epoch(format: Format) -> bool {
    format.planes() > MAX_CHECKS
}

/// Puts length and checksum of bytes where the detail begins.
fn put_length(words: &mut [u64], length: u16, check: u32) {
    words[1] |= u64::from(length) << 48;
    words[2] |= u64::from(check);
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
