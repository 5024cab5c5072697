//! A block as a bundle of stored planes, and back.
//!
//! The rules:
//! * The planes of a bundle follow each other without gaps, most significant first, so that a view's planes are one run
//!   or two (sign and exponent; upper mantissa).
//! * Each plane has a 16-bit [`check`](super::check) over its stored bytes. Formats of up to 16 planes keep it in the index entry; fp32, whose
//!   32 planes would not fit there, keeps it as two bytes behind the plane's stored bytes. A constant plane stores
//!   neither bytes nor check: the entry's own checksum covers it.
//! * The plane tree's stream stands in the bundle where the first of its planes would: below the sign. Its length and CRC-32C are in the entry.
//!   Who wants any of its planes fetches all of it.
//! * A block of a transformed window has a [`head`] before its planes, which every reader fetches. The sign plane may be in it.
//! * *Words* blocks (opaque memory, and everything in the `gcomp` mode) are one run of bytes, coded or raw, with a CRC-32C.
//! * A block of zeros is no block at all.

use super::{
    Codec, Undecodable,
    check::{self, Span},
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
        let mut spans = [Span::default(); MAX_PLANES];
        let mut joint = Joint::default();
        for (index, plane) in split.chunks_exact(format.plane_bytes()).enumerate() {
            if codec == Codec::Tree && index == 1 {
                joint = self.append_tree(format, words);
            }
            if joint.length > 0 && is_joint(format, index) {
                planes[index] = StoredPlane::Joint;
                continue;
            }
            let promising = codec != Codec::Tree || is_joint(format, index) || is_promising(plane);
            let start = self.length;
            planes[index] = self.append(codec, plane, promising);
            spans[index] = span(start, self.length);
            if self.length > start {
                self.length += trailing_check(format);
            }
        }
        let count = format.planes();
        let mut checks = [0; MAX_PLANES];
        check::checks(&self.bytes, &spans[..count], &mut checks[..count]);
        if trailing_check(format) > 0 {
            for (span, check) in spans.iter().zip(&mut checks).filter(|(span, _)| span.length > 0) {
                self.bytes[span.range().end..][..TRAILING_CHECK].copy_from_slice(&check.to_le_bytes());
                *check = 0;
            }
        }
        self.stored = Some(Stored::Planes { format, codec: codec.bytewise(), head, joint, planes, checks });
    }

    /// Appends the plane tree of a block's joint planes, if that makes them shorter.
    fn append_tree(&mut self, format: Format, words: &BlockWords) -> Joint {
        let Some(length) = tree::encode(format, words, &mut self.bytes[self.length..]) else {
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
        self.decode_headed(mask, bundle, words).map(drop)
    }

    /// As [`Self::decode`]; gives the head too, if there is one.
    ///
    /// # Errors
    /// [`BlockError`] when bytes that were looked at are damaged.
    pub fn decode_headed<'a>(
        &self,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<Option<head::Found<'a>>, BlockError> {
        match self {
            Self::Words { codec, length, check } => {
                let bytes = &bundle[..usize::from(*length).min(BLOCK_BYTES)];
                let computed = crc32c::crc32c(bytes);
                if computed != *check {
                    return Err(BlockError::WordsCheck { computed, stored: *check });
                }
                if bytes.len() == BLOCK_BYTES {
                    words.copy_from_slice(bytes);
                    return Ok(None);
                }
                codec.decompress(bytes, words)?;
                Ok(None)
            }
            Self::Planes { format, codec, head, joint, planes, checks } => {
                let count = format.planes();
                // Where the wanted planes are, in the entry's order, and their checks; the others are empty.
                let mut spans = [Span::default(); MAX_PLANES];
                let mut wanted = [0; MAX_PLANES];
                let (mut at, mut stream) = (usize::from(head.length), None);
                for (index, plane) in planes[..count].iter().enumerate() {
                    if *plane == StoredPlane::Joint {
                        if index == 1 {
                            stream = Some(at);
                            at += usize::from(joint.length);
                        }
                        continue;
                    }
                    let (start, end) = (at, at + plane.bytes(*format));
                    at += plane.extent(*format);
                    if end > start && mask.has(count - 1 - index) {
                        spans[index] = span(start, end);
                        wanted[index] = match trailing_check(*format) {
                            0 => checks[index],
                            _ => u16::from_le_bytes([bundle[end], bundle[end + 1]]),
                        };
                    }
                }
                verify(bundle, &spans[..count], &wanted[..count])?;
                // Raw and constant planes are joined from where they lie; only coded ones are decoded to here.
                let mut decoded: PlaneBlock = [0; BLOCK_BYTES];
                let mut free = &mut decoded[..];
                let mut found: Planes<'_> = [&plane::ZEROS; MAX_PLANES];
                let mut beside_head = mask;
                let head = (head.length > 0).then(|| head::read(head.length, bundle)).transpose()?;
                if let Some(head) = &head
                    && !head.signs.is_empty()
                    && mask.has(count - 1)
                {
                    let out;
                    (out, free) = free.split_at_mut(format.plane_bytes());
                    signs::decode(*format, head.signs, out)?;
                    found[count - 1] = out;
                    beside_head.0 &= !(1 << (count - 1));
                }
                for (index, kind) in planes[..count].iter().enumerate() {
                    let plane = count - 1 - index;
                    match kind {
                        _ if !beside_head.has(plane) => {}
                        StoredPlane::Zeros | StoredPlane::Joint => {}
                        StoredPlane::Ones => found[plane] = &plane::ONES,
                        StoredPlane::Raw => found[plane] = &bundle[spans[index].range()],
                        StoredPlane::Coded(_) => {
                            let (out, rest) = free.split_at_mut(format.plane_bytes());
                            free = rest;
                            codec.decompress(&bundle[spans[index].range()], out)?;
                            found[plane] = out;
                        }
                    }
                }
                match stream {
                    Some(start) if wants_tree(*format, *joint, mask) => {
                        joint.decode(*format, &bundle[start..], mask, &found, words)?;
                    }
                    _ => plane::join(*format, &found, words),
                }
                Ok(head)
            }
        }
    }
}

impl Joint {
    /// Words of the stream at the front of `bundle` and the planes beside it.
    fn decode(
        self,
        format: Format,
        bundle: &[u8],
        mask: PlaneMask,
        planes: &Planes<'_>,
        words: &mut BlockWords,
    ) -> Result<(), BlockError> {
        let length = self.length.into();
        let computed = crc32c::crc32c(&bundle[..length]);
        if computed != self.check {
            return Err(BlockError::TreeCheck { computed, stored: self.check });
        }
        Ok(tree::decode(format, bundle, length, mask, planes, words)?)
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

/// Compares planes, counted from the most significant on, with their checks.
fn verify(bundle: &[u8], planes: &[Span], wanted: &[u16]) -> Result<(), BlockError> {
    let mut computed = [0; MAX_PLANES];
    let computed = &mut computed[..planes.len()];
    check::checks(bundle, planes, computed);
    match computed.iter().zip(wanted).position(|(computed, stored)| computed != stored) {
        None => Ok(()),
        Some(index) => Err(BlockError::PlaneCheck {
            plane: planes.len() - 1 - index,
            computed: computed[index],
            stored: wanted[index],
        }),
    }
}

/// The bytes of a bundle from `start` to `end`.
fn span(start: usize, end: usize) -> Span {
    let place = |at| u16::try_from(at).expect("within a bundle");
    Span { start: place(start), length: place(end - start) }
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
