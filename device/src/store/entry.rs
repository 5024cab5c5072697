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

use bitvec::{field::BitField, order::Lsb0, view::BitView};

use crate::{
    BLOCK_BYTES,
    codec::{
        Codec,
        block::{Joint, MAX_PLANES, Stored, StoredPlane, is_joint, most_bytes},
        head::{Head, MAX_HEAD},
        tree,
    },
    format::Format,
};

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 64;

const EPOCH: std::ops::Range<usize> = 8..10;
const CHECK: std::ops::Range<usize> = 10..14;
const DETAIL: usize = 14;
/// Where the planes beside a plane tree are described.
const TREE_DETAIL: usize = 20;
/// Formats with more planes keep their checks in the bundle.
const MOST_CHECKS: usize = 16;

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
        let mut bytes = [0; ENTRY_BYTES];
        bytes[EPOCH].copy_from_slice(&self.epoch.to_le_bytes());
        if let Some(Place { segment, stored }) = &self.place {
            let head = match stored {
                Stored::Planes { format, codec, head: Head { length, delta }, joint, planes, checks } => {
                    let width = length_bits(*format);
                    let (kind, detail) = if joint.length > 0 {
                        bytes[DETAIL..DETAIL + 2].copy_from_slice(&joint.length.to_le_bytes());
                        bytes[DETAIL + 2..TREE_DETAIL].copy_from_slice(&joint.check.to_le_bytes());
                        (3, &mut bytes[TREE_DETAIL..])
                    } else {
                        (1, &mut bytes[DETAIL..])
                    };
                    let detail = detail.view_bits_mut::<Lsb0>();
                    let single = || single(*format, kind == 3);
                    for (index, field) in single().zip(detail.chunks_exact_mut(width)) {
                        field.store_le(length_code(*format, planes[index]));
                    }
                    if format.planes() <= MOST_CHECKS {
                        let fields = detail[single().count() * width..].chunks_exact_mut(16);
                        single().zip(fields).for_each(|(index, field)| field.store_le(checks[index]));
                    }
                    head(kind, *format, *codec) | u64::from(*length) << 48 | u64::from(*delta) << 60
                }
                Stored::Words { codec, length, check } => {
                    bytes[DETAIL..DETAIL + 2].copy_from_slice(&length.to_le_bytes());
                    bytes[DETAIL + 2..DETAIL + 6].copy_from_slice(&check.to_le_bytes());
                    head(2, Format::Opaque, *codec)
                }
            };
            assert!(*segment < 1 << 40, "segments are numbered in 40 bits");
            bytes[..8].copy_from_slice(&(head | segment).to_le_bytes());
        }
        if bytes != [0; ENTRY_BYTES] {
            let check = checksum(&bytes);
            bytes[CHECK].copy_from_slice(&check.to_le_bytes());
        }
        bytes
    }

    /// The entry in 64 bytes.
    ///
    /// # Errors
    /// [`Damaged`].
    pub fn decode(bytes: &[u8; ENTRY_BYTES]) -> Result<Self, Damaged> {
        if *bytes == [0; ENTRY_BYTES] {
            return Ok(Self::default());
        }
        let computed = checksum(bytes);
        let stored = u32::from_le_bytes(bytes[CHECK].try_into().expect("four bytes"));
        if computed != stored {
            return Err(Damaged::Check { computed, stored });
        }
        let head = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        let epoch = u16::from_le_bytes(bytes[EPOCH].try_into().expect("two bytes"));
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
        let stored = match kind {
            0 => return Ok(Self { epoch, place: None }),
            1 => planes(format, codec, planes_head, Joint::default(), &bytes[DETAIL..])?,
            3 => {
                let length = u16::from_le_bytes([bytes[DETAIL], bytes[DETAIL + 1]]);
                if length == 0 || usize::from(length) > tree::joint_bytes(format) {
                    return Err(Damaged::Field { field: "length of plane tree", value: length.into() });
                }
                let check = bytes[DETAIL + 2..TREE_DETAIL].try_into().expect("four bytes");
                let joint = Joint { length, check: u32::from_le_bytes(check) };
                planes(format, codec, planes_head, joint, &bytes[TREE_DETAIL..])?
            }
            2 => {
                let length = u16::from_le_bytes([bytes[DETAIL], bytes[DETAIL + 1]]);
                if usize::from(length) > BLOCK_BYTES {
                    return Err(Damaged::Field { field: "length of words", value: length.into() });
                }
                let check = bytes[DETAIL + 2..DETAIL + 6].try_into().expect("four bytes");
                Stored::Words { codec, length, check: u32::from_le_bytes(check) }
            }
            _ => return Err(Damaged::Field { field: "kind", value: kind }),
        };
        Ok(Self { epoch, place: Some(Place { segment: head & ((1 << 40) - 1), stored }) })
    }

    /// Bytes the block is charged in the store.
    pub fn charged(&self) -> u64 {
        self.place.as_ref().map_or(0, |place| super::charged(place.stored.bytes()))
    }
}

fn planes(format: Format, codec: Codec, head: Head, joint: Joint, detail: &[u8]) -> Result<Stored, Damaged> {
    let count = format.planes();
    if count == 0 {
        return Err(Damaged::Field { field: "format of planes", value: format as u64 });
    }
    let width = length_bits(format);
    let detail = detail.view_bits::<Lsb0>();
    let mut planes = [StoredPlane::Zeros; MAX_PLANES];
    if joint.length > 0 {
        planes[1..=tree::joint_planes(format)].fill(StoredPlane::Joint);
    }
    let mut checks = [0; MAX_PLANES];
    let single = || single(format, joint.length > 0);
    for (index, field) in single().zip(detail.chunks_exact(width)) {
        let code: u16 = field.load_le();
        planes[index] = match usize::from(code) {
            0 => StoredPlane::Zeros,
            length if length < format.plane_bytes() => StoredPlane::Coded(code),
            length if length == format.plane_bytes() => StoredPlane::Raw,
            length if length == format.plane_bytes() + 1 => StoredPlane::Ones,
            _ => return Err(Damaged::Field { field: "length code", value: code.into() }),
        };
    }
    if count <= MOST_CHECKS {
        let fields = detail[single().count() * width..].chunks_exact(16);
        single().zip(fields).for_each(|(index, field)| checks[index] = field.load_le());
    }
    let stored = Stored::Planes { format, codec, head, joint, planes, checks };
    let bytes = stored.bytes();
    if bytes > most_bytes(head.length.into()) {
        return Err(Damaged::Field { field: "length of bundle", value: bytes as u64 });
    }
    Ok(stored)
}

/// The planes described one by one, counted from the most significant on.
fn single(format: Format, tree: bool) -> impl Iterator<Item = usize> {
    (0..format.planes()).filter(move |index| !(tree && is_joint(format, *index)))
}

fn head(kind: u64, format: Format, codec: Codec) -> u64 {
    kind << 40 | (format as u64) << 42 | (codec as u64) << 45
}

/// Bits of a length code: enough for the plane's length + 1.
const fn length_bits(format: Format) -> usize {
    (format.plane_bytes() + 1).ilog2() as usize + 1
}

fn length_code(format: Format, plane: StoredPlane) -> u16 {
    let raw = u16::try_from(format.plane_bytes()).expect("at most 1024");
    match plane {
        StoredPlane::Zeros | StoredPlane::Joint => 0,
        StoredPlane::Coded(length) => length,
        StoredPlane::Raw => raw,
        StoredPlane::Ones => raw + 1,
    }
}

/// CRC-32C of an entry, its own place counted as zeros.
fn checksum(bytes: &[u8; ENTRY_BYTES]) -> u32 {
    let mut bytes = *bytes;
    bytes[CHECK].fill(0);
    crc32c::crc32c(&bytes)
}
