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

mod stored;

use std::cell::RefCell;

pub use self::stored::most_bytes;
pub use self::stored::{Joint, MOST_CHECKS, Stored, StoredPlane, StoredPlanes};
use self::stored::{is_joint, trailing_check};
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
const TRAILING_CHECK: u16 = 2;
/// Bytes of the longest bundle: a raw fp32 block with its checks.
pub const MAX_BUNDLE: usize = BLOCK_BYTES + MAX_PLANES * TRAILING_CHECK as usize;

thread_local! {
    /// Where coded planes are decoded to.
    static DECODED: RefCell<PlaneBlock> = const { RefCell::new([0; BLOCK_BYTES]) };
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
        let mut stored = StoredPlanes { head, ..StoredPlanes::zeros(format, codec.bytewise()) };
        for (index, plane) in split.chunks_exact(format.plane_bytes()).enumerate() {
            if codec == Codec::Tree && index == 1 {
                stored.joint = self.append_tree(format, words);
            }
            if stored.is_joint(index) {
                continue;
            }
            if let Some(ones) = constant(plane) {
                stored.ones |= u32::from(ones) << index;
                continue;
            }
            let promising = codec != Codec::Tree || is_joint(format, index) || is_promising(plane);
            stored.lengths[index] = self.append(codec, plane, promising);
            self.length += usize::from(trailing_check(format));
        }
        let mut spans = [Span::default(); MAX_PLANES];
        stored.find(u32::MAX, |index, span| spans[index] = span);
        let spans = &spans[..format.planes()];
        if trailing_check(format) == 0 {
            check::checks(&self.bytes, spans, &mut stored.checks[..format.planes()]);
        } else {
            let mut checks = [0; MAX_PLANES];
            check::checks(&self.bytes, spans, &mut checks[..format.planes()]);
            for (span, check) in spans.iter().zip(checks).filter(|(span, _)| span.length > 0) {
                self.bytes[span.range().end..][..2].copy_from_slice(&check.to_le_bytes());
            }
        }
        self.stored = Some(Stored::Planes(stored));
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

    /// Appends a plane as the codec gives it, if it is `promising` and gets shorter, or else as it is: the bytes it takes.
    fn append(&mut self, codec: Codec, plane: &[u8], promising: bool) -> u16 {
        let out = &mut self.bytes[self.length..];
        let coded = if promising { codec.compress(plane, out) } else { None };
        let length = coded.unwrap_or_else(|| {
            out[..plane.len()].copy_from_slice(plane);
            plane.len()
        });
        self.length += length;
        u16::try_from(length).expect("at most a plane")
    }
}

impl Default for Bundle {
    fn default() -> Self {
        Self::new()
    }
}

impl Stored {
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
            Self::Planes(planes) => {
                DECODED.with_borrow_mut(|space| planes.decode(mask, bundle, words, space))
            }
        }
    }
}

impl StoredPlanes {
    /// [`Stored::decode_headed`]; coded planes are decoded to `space`.
    fn decode<'a>(
        &self,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
        space: &mut PlaneBlock,
    ) -> Result<Option<head::Found<'a>>, BlockError> {
        let (count, raw) = (self.format.planes(), self.format.plane_bytes());
        let mut space = space.chunks_exact_mut(raw);
        let mut out = || space.next().expect("room for every plane");
        let mut wanted = self.wanted(mask);
        let mut found: Planes<'_> = [&plane::ZEROS; MAX_PLANES];
        let mut head = None;
        if self.head.length > 0 {
            let read = head::read(self.head.length, bundle)?;
            if !read.signs.is_empty() && wanted & 1 == 1 {
                let out = out();
                signs::decode(self.format, read.signs, out)?;
                found[count - 1] = out;
                wanted ^= 1;
            }
            head = Some(read);
        }
        // Raw and constant planes are joined from where they lie.
        let mut spans = [Span::default(); MAX_PLANES];
        let mut coded = 0_u32;
        let stream = self.find(wanted, |index, span| {
            spans[index] = span;
            if usize::from(span.length) == raw {
                found[count - 1 - index] = &bundle[span.range()];
            } else if span.length > 0 {
                coded |= 1 << index;
            } else if self.ones & wanted & 1 << index != 0 {
                found[count - 1 - index] = &plane::ONES;
            }
        });
        self.verify(wanted, bundle, &spans[..count])?;
        while coded != 0 {
            let index = coded.trailing_zeros() as usize;
            coded &= coded - 1;
            let out = out();
            self.codec.decompress(&bundle[spans[index].range()], out)?;
            found[count - 1 - index] = out;
        }
        if self.wants_stream(mask) {
            self.joint.decode(self.format, &bundle[stream.range().start..], mask, &found, words)?;
        } else {
            plane::join(self.format, &found, words);
        }
        Ok(head)
    }

    /// Compares what is stored of the planes in `wanted` with their checks.
    fn verify(&self, wanted: u32, bundle: &[u8; MAX_BUNDLE], spans: &[Span]) -> Result<(), BlockError> {
        let mut behind = [0; MAX_PLANES];
        let checks = if trailing_check(self.format) == 0 {
            &self.checks[..spans.len()]
        } else {
            for (check, span) in behind.iter_mut().zip(spans).filter(|(_, span)| span.length > 0) {
                let end = span.range().end;
                *check = u16::from_le_bytes([bundle[end], bundle[end + 1]]);
            }
            &behind
        };
        let differ = check::differ(bundle, spans, checks) & wanted;
        if differ == 0 {
            return Ok(());
        }
        let index = differ.trailing_zeros() as usize;
        let computed = check::check(&bundle[spans[index].range()]);
        Err(BlockError::PlaneCheck { plane: spans.len() - 1 - index, computed, stored: checks[index] })
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

/// What every bit of a plane is, if that is one thing.
fn constant(plane: &[u8]) -> Option<bool> {
    let ones = plane[0] == 0xff;
    let same = (plane[0] == 0 || ones) && plane.iter().all(|byte| *byte == plane[0]);
    same.then_some(ones)
}
