//! A block as a bundle of stored planes, and back.
//!
//! The rules:
//! * The planes of a bundle follow each other without gaps, most significant first, so that a view's planes are one run
//!   or two (sign and exponent; upper mantissa).
//! * Each plane has a 16-bit check over its stored bytes. Formats of up to 16 planes keep it in the index entry; fp32, whose
//!   32 planes would not fit there, keeps it as two bytes behind the plane's stored bytes. A constant plane stores
//!   neither bytes nor check: the entry's own checksum covers it.
//! * The plane tree's stream stands in the bundle where the first of its planes would: below the sign. Its length and CRC-32C are in the entry.
//!   Who wants any of its planes fetches all of it.
//! * A block of a transformed window has a [`head`] before its planes, which every reader fetches. The sign plane may be in it.
//! * *Words* blocks (opaque memory, and everything in the `gcomp` mode) are one run of bytes, coded or raw, with a CRC-32C.
//! * A block of zeros is no block at all.

use super::{
    Codec, Undecodable,
    head::{self, Details, Head, MAX_HEAD},
    signs, tree,
};
use crate::{
    BLOCK_BYTES, BlockWords,
    format::Format,
    plane::{self, PlaneBlock, PlaneMask, Planes},
};

/// Planes of the widest format.
pub const MAX_PLANES: usize = 32;
/// Bytes of a check behind a plane of fp32.
const TRAILING_CHECK: usize = 2;
/// Bytes of the longest bundle: a raw fp32 block with its checks.
pub const MAX_BUNDLE: usize = BLOCK_BYTES + MAX_PLANES * TRAILING_CHECK;

/// How one plane is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredPlane {
    /// Every bit is zero: nothing stored.
    Zeros,
    /// Every bit is one: nothing stored.
    Ones,
    /// The plane's own bytes.
    Raw,
    /// This many bytes of the block's codec.
    Coded(u16),
    /// One of those in the block's [`Joint`] stream, which has no bytes of its own.
    Joint,
}

/// The plane tree's stream of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Joint {
    /// Bytes; 0 is no stream.
    pub length: u16,
    /// CRC-32C of them.
    pub check: u32,
}

/// How a block is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Bit-planes, described from the most significant on, with their checks where those are not in the bundle.
    Planes {
        /// The block's format, which need not be its tensor's of today.
        format: Format,
        /// The codec of its singly coded planes.
        codec: Codec,
        /// The head before them.
        head: Head,
        /// The stream of its jointly coded planes.
        joint: Joint,
        /// Plane `p` of the format's `n` is at `n − 1 − p`.
        planes: [StoredPlane; MAX_PLANES],
        /// The checks, in the same order; zero where they are in the bundle.
        checks: [u16; MAX_PLANES],
    },
    /// Words, coded if `length` is less than a block.
    Words {
        /// The codec, if coded.
        codec: Codec,
        /// Stored bytes.
        length: u16,
        /// CRC-32C of the stored bytes.
        check: u32,
    },
}

/// A coded block: what to store, and its description.
pub struct Bundle {
    /// The description, or `None` for a block of zeros.
    pub stored: Option<Stored>,
    bytes: [u8; MAX_BUNDLE + MAX_HEAD],
    length: usize,
}

/// Why a bundle does not give its planes back.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BlockError {
    /// A plane's bytes do not match their check.
    #[error("plane {plane} has check {computed:#06x}, stored was {stored:#06x}")]
    PlaneCheck {
        /// The plane.
        plane: usize,
        /// What the bytes give.
        computed: u16,
        /// What was stored.
        stored: u16,
    },
    /// The words do not match their checksum.
    #[error("the block's words have CRC-32C {computed:#010x}, stored was {stored:#010x}")]
    WordsCheck {
        /// What the bytes give.
        computed: u32,
        /// What was stored.
        stored: u32,
    },
    /// The plane tree's stream does not match its checksum.
    #[error("the plane tree has CRC-32C {computed:#010x}, stored was {stored:#010x}")]
    TreeCheck {
        /// What the bytes give.
        computed: u32,
        /// What was stored.
        stored: u32,
    },
    /// The head's bytes do not match their check.
    #[error("the head has check {computed:#06x}, stored was {stored:#06x}")]
    HeadCheck {
        /// What the bytes give.
        computed: u16,
        /// What was stored.
        stored: u16,
    },
    /// A head that matches its check says what no head says.
    #[error("the head's {what} is {value}")]
    Head {
        /// What.
        what: &'static str,
        /// Its value.
        value: usize,
    },
    /// A block of a transformed window that does not fit the others or the window's shape.
    #[error("the block does not fit its window: {what}")]
    Window {
        /// What does not fit.
        what: &'static str,
    },
    /// A stream of signs that matches its check does not decode.
    #[error("the signs do not decode: {0}")]
    Signs(#[from] signs::Malformed),
    /// Bytes that match their check do not decode.
    #[error(transparent)]
    Undecodable(#[from] Undecodable),
    /// A stream that matches its check is no plane tree.
    #[error("the plane tree does not decode: {0}")]
    Tree(#[from] tree::Malformed),
}

impl Bundle {
    /// An empty bundle, to be filled again and again.
    pub const fn new() -> Self {
        Self { stored: None, bytes: [0; MAX_BUNDLE + MAX_HEAD], length: 0 }
    }

    /// The bytes to store.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Codes `words` as planes of `format` (as words if it is `opaque`).
    pub fn encode(&mut self, format: Format, codec: Codec, words: &BlockWords) {
        if format == Format::Opaque {
            return self.encode_words(codec, words);
        }
        if is_zero(words) {
            return self.clear();
        }
        self.encode_planes(format, codec, words, None);
    }

    /// Codes `words`, a block of a transformed window, with `details` in its head. Zeros are coded too, as the head may say more.
    ///
    /// # Panics
    /// If the format has no planes, or the details with a plane of signs pass [`MAX_HEAD`].
    pub fn encode_headed(&mut self, format: Format, codec: Codec, words: &BlockWords, details: Details<'_>) {
        self.encode_planes(format, codec, words, Some(details));
    }

    /// Makes it the bundle of a block of zeros.
    pub fn clear(&mut self) {
        (self.stored, self.length) = (None, 0);
    }

    /// Whether it can be stored. A head may make it longer than any bundle may be.
    pub fn fits(&self) -> bool {
        self.length <= most_bytes(self.stored.as_ref().map_or(0, Stored::head_bytes))
    }

    fn encode_planes(
        &mut self,
        format: Format,
        codec: Codec,
        words: &BlockWords,
        details: Option<Details<'_>>,
    ) {
        let mut split = [0; BLOCK_BYTES];
        plane::split(format, words, &mut split);
        let mut head = Head::default();
        if let Some(details) = details {
            let sign = &mut split[..format.plane_bytes()];
            let mut signs = 0;
            if codec == Codec::Tree && constant(sign).is_none() {
                let out = &mut self.bytes[head::signs_at()..];
                signs = signs::encode(format, sign, format.plane_bytes(), out).unwrap_or(0);
            }
            if signs > 0 {
                sign.fill(0);
            }
            head = Head { length: head::write(signs, details, &mut self.bytes), delta: details.delta };
        }
        self.length = head.length.into();
        let mut planes = [StoredPlane::Zeros; MAX_PLANES];
        let mut checks = [0; MAX_PLANES];
        let mut joint = Joint::default();
        for (index, plane) in split.chunks_exact(format.plane_bytes()).enumerate() {
            if codec == Codec::Tree && index == 1 {
                joint = self.append_tree(format, &split[format.plane_bytes()..][..tree::joint_bytes(format)]);
            }
            if joint.length > 0 && is_joint(format, index) {
                planes[index] = StoredPlane::Joint;
                continue;
            }
            let promising = codec != Codec::Tree || is_joint(format, index) || is_promising(plane);
            planes[index] = self.append(codec, plane, promising);
            let start = self.length - planes[index].bytes(format);
            if start == self.length {
                continue;
            }
            let check = check16(&self.bytes[start..self.length]);
            if trailing_check(format) == 0 {
                checks[index] = check;
            } else {
                self.bytes[self.length..self.length + TRAILING_CHECK].copy_from_slice(&check.to_le_bytes());
                self.length += TRAILING_CHECK;
            }
        }
        self.stored = Some(Stored::Planes { format, codec: codec.bytewise(), head, joint, planes, checks });
    }

    /// Appends the plane tree of a block's joint planes, if that makes them shorter.
    fn append_tree(&mut self, format: Format, planes: &[u8]) -> Joint {
        let Some(length) = tree::encode(format, planes, &mut self.bytes[self.length..]) else {
            return Joint::default();
        };
        let check = crc32c::crc32c(&self.bytes[self.length..self.length + length]);
        self.length += length;
        Joint { length: u16::try_from(length).expect("shorter than a block"), check }
    }

    /// Codes `words` word-major: opaque memory, and the paper's `gcomp` baseline.
    pub fn encode_words(&mut self, codec: Codec, words: &BlockWords) {
        if is_zero(words) {
            return self.clear();
        }
        self.length = codec.compress(words, &mut self.bytes).unwrap_or_else(|| {
            self.bytes[..BLOCK_BYTES].copy_from_slice(words);
            BLOCK_BYTES
        });
        let length = u16::try_from(self.length).expect("at most a block");
        self.stored =
            Some(Stored::Words { codec: codec.bytewise(), length, check: crc32c::crc32c(self.bytes()) });
    }

    fn append(&mut self, codec: Codec, plane: &[u8], promising: bool) -> StoredPlane {
        if let Some(constant) = constant(plane) {
            return constant;
        }
        if promising && let Some(length) = codec.compress(plane, &mut self.bytes[self.length..]) {
            self.length += length;
            return StoredPlane::Coded(u16::try_from(length).expect("shorter than a block"));
        }
        self.bytes[self.length..self.length + plane.len()].copy_from_slice(plane);
        self.length += plane.len();
        StoredPlane::Raw
    }
}

impl Default for Bundle {
    fn default() -> Self {
        Self::new()
    }
}

impl StoredPlane {
    /// Bytes of the plane in its bundle, its check not counted.
    pub fn bytes(self, format: Format) -> usize {
        match self {
            Self::Zeros | Self::Ones | Self::Joint => 0,
            Self::Raw => format.plane_bytes(),
            Self::Coded(length) => length.into(),
        }
    }

    /// Bytes of the plane in its bundle with its check.
    fn extent(self, format: Format) -> usize {
        match self.bytes(format) {
            0 => 0,
            bytes => bytes + trailing_check(format),
        }
    }
}

impl Stored {
    /// Bytes of the bundle.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Planes { format, head, joint, planes, .. } => {
                usize::from(head.length)
                    + usize::from(joint.length)
                    + planes.iter().map(|plane| plane.extent(*format)).sum::<usize>()
            }
            Self::Words { length, .. } => (*length).into(),
        }
    }

    /// Bytes of its head.
    pub fn head_bytes(&self) -> usize {
        match self {
            Self::Planes { head, .. } => head.length.into(),
            Self::Words { .. } => 0,
        }
    }

    /// Whether no codec helped: every stored plane is raw, or the words are.
    pub fn is_bypass(&self) -> bool {
        match self {
            Self::Planes { head, planes, .. } => {
                head.length == 0
                    && !planes.iter().any(|plane| matches!(plane, StoredPlane::Coded(_) | StoredPlane::Joint))
            }
            Self::Words { length, .. } => usize::from(*length) == BLOCK_BYTES,
        }
    }

    /// The runs of bundle bytes that hold the planes in `mask`, in order, neighbours joined. Words are one run whatever the mask.
    pub fn runs(&self, mask: PlaneMask, mut each: impl FnMut(std::ops::Range<usize>)) {
        match self {
            Self::Words { length, .. } => each(0..(*length).into()),
            Self::Planes { format, head, joint, planes, .. } => {
                let count = format.planes();
                let wants_tree = wants_tree(*format, *joint, mask);
                let mut at = usize::from(head.length);
                let mut open = (at > 0).then_some(0);
                for (index, plane) in planes[..count].iter().enumerate() {
                    let (end, wanted) = match plane {
                        StoredPlane::Joint if index > 1 => continue,
                        StoredPlane::Joint => (at + usize::from(joint.length), wants_tree),
                        plane => (at + plane.extent(*format), mask.has(count - 1 - index)),
                    };
                    if wanted {
                        open.get_or_insert(at);
                    } else if end > at
                        && let Some(start) = open.take()
                        && start < at
                    {
                        each(start..at);
                    }
                    at = end;
                }
                if let Some(start) = open
                    && start < at
                {
                    each(start..at);
                }
            }
        }
    }

    /// The words that the planes in `mask` give, all other planes zero. `bundle` holds the bytes of [`Stored::runs`] at their
    /// places; nothing else in it is looked at. Words blocks give every bit.
    ///
    /// # Errors
    /// [`BlockError`] when bytes that were looked at are damaged.
    pub fn decode(
        &self,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<(), BlockError> {
        match self {
            Self::Words { codec, length, check } => {
                let bytes = &bundle[..usize::from(*length).min(BLOCK_BYTES)];
                let computed = crc32c::crc32c(bytes);
                if computed != *check {
                    return Err(BlockError::WordsCheck { computed, stored: *check });
                }
                if bytes.len() == BLOCK_BYTES {
                    words.copy_from_slice(bytes);
                    return Ok(());
                }
                Ok(codec.decompress(bytes, words)?)
            }
            Self::Planes { format, codec, head, joint, planes, checks } => {
                // Raw and constant planes are joined from where they lie; only coded ones are decoded to here.
                let mut decoded: PlaneBlock = [0; BLOCK_BYTES];
                let mut free = &mut decoded[..];
                let mut found: Planes<'_> = [&plane::ZEROS; MAX_PLANES];
                let count = format.planes();
                let mut at = usize::from(head.length);
                let mut signs_found = false;
                if at > 0 {
                    let head = head::read(head.length, bundle)?;
                    signs_found = !head.signs.is_empty();
                    if signs_found && mask.has(count - 1) {
                        let out;
                        (out, free) = free.split_at_mut(format.plane_bytes());
                        signs::decode(*format, head.signs, out)?;
                        found[count - 1] = out;
                    }
                }
                for (index, stored) in planes[..count].iter().enumerate() {
                    let start = at;
                    let plane = count - 1 - index;
                    if *stored == StoredPlane::Joint {
                        if index > 1 {
                            continue; // found with the first one
                        }
                        at += usize::from(joint.length);
                        if wants_tree(*format, *joint, mask) {
                            let out;
                            (out, free) = free.split_at_mut(tree::joint_bytes(*format));
                            joint.decode(*format, &bundle[start..], out)?;
                            let lower = out.chunks_exact(format.plane_bytes()).enumerate();
                            lower
                                .filter(|(below, _)| mask.has(plane - below))
                                .for_each(|(below, bytes)| found[plane - below] = bytes);
                        }
                        continue;
                    }
                    at += stored.extent(*format);
                    if !mask.has(plane) || (index == 0 && signs_found) {
                        continue;
                    }
                    let bytes = &bundle[start..start + stored.bytes(*format)];
                    if !bytes.is_empty() {
                        let stored = match trailing_check(*format) {
                            0 => checks[index],
                            _ => u16::from_le_bytes(
                                bundle[at - TRAILING_CHECK..at].try_into().expect("two bytes"),
                            ),
                        };
                        let computed = check16(bytes);
                        if computed != stored {
                            return Err(BlockError::PlaneCheck { plane, computed, stored });
                        }
                    }
                    found[plane] = match stored {
                        StoredPlane::Zeros | StoredPlane::Joint => &plane::ZEROS,
                        StoredPlane::Ones => &plane::ONES,
                        StoredPlane::Raw => bytes,
                        StoredPlane::Coded(_) => {
                            let (out, rest) = free.split_at_mut(format.plane_bytes());
                            free = rest;
                            codec.decompress(bytes, out)?;
                            out
                        }
                    };
                }
                plane::join(*format, &found, words);
                Ok(())
            }
        }
    }
}

impl Joint {
    /// The planes of the stream at the front of `bundle`.
    fn decode(self, format: Format, bundle: &[u8], planes: &mut [u8]) -> Result<(), BlockError> {
        let length = self.length.into();
        let computed = crc32c::crc32c(&bundle[..length]);
        if computed != self.check {
            return Err(BlockError::TreeCheck { computed, stored: self.check });
        }
        Ok(tree::decode(format, bundle, length, planes)?)
    }
}

/// Whether plane number `index`, counted from the most significant on, is one that the plane tree codes.
pub const fn is_joint(format: Format, index: usize) -> bool {
    0 < index && index <= tree::joint_planes(format)
}

/// Whether `mask` has planes that are in the block's stream.
fn wants_tree(format: Format, joint: Joint, mask: PlaneMask) -> bool {
    joint.length > 0
        && (0..format.planes()).any(|index| is_joint(format, index) && mask.has(format.planes() - 1 - index))
}

/// Bytes that a bundle with a head of `head` bytes may have: behind it, a plane tree may want room to be read.
pub const fn most_bytes(head: usize) -> usize {
    if head > 0 { MAX_BUNDLE - tree::SLACK } else { MAX_BUNDLE }
}

/// Bytes of check that follow each stored plane of this format.
const fn trailing_check(format: Format) -> usize {
    if format.planes() > 16 { TRAILING_CHECK } else { 0 }
}

/// CRC-32C folded to 16 bits.
#[expect(clippy::cast_possible_truncation, reason = "folding keeps the lower half on purpose")]
pub(super) fn check16(bytes: &[u8]) -> u16 {
    let crc = crc32c::crc32c(bytes);
    (crc ^ crc >> 16) as u16
}

/// Whether every byte of a block is zero.
pub fn is_zero(words: &BlockWords) -> bool {
    words.iter().all(|byte| *byte == 0)
}

/// Whether a general codec has a chance with a plane: few ones, few zeros, or words like their neighbours. Signs and
/// mantissas of trained weights are noise, and trying costs more than all else of a block.
fn is_promising(plane: &[u8]) -> bool {
    let words = plane.as_chunks::<8>().0;
    let ones: u32 = words.iter().map(|word| u64::from_le_bytes(*word).count_ones()).sum();
    let repeats = words.windows(2).filter(|pair| pair[0] == pair[1]).count();
    let bits = plane.len() * 8;
    !(bits / 4..=bits - bits / 4).contains(&(ones as usize)) || repeats > words.len() / 8
}

fn constant(plane: &[u8]) -> Option<StoredPlane> {
    match plane[0] {
        0 if plane.iter().all(|byte| *byte == 0) => Some(StoredPlane::Zeros),
        0xff if plane.iter().all(|byte| *byte == 0xff) => Some(StoredPlane::Ones),
        _ => None,
    }
}
