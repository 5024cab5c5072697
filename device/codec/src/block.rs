//! A block as a bundle of stored planes, and back.
//!
//! The rules:
//! * The planes of a bundle follow each other without gaps, most significant first, so that a
//!   view's planes are one run or two (sign and exponent; upper mantissa).
//! * Each plane has a 16-bit [`check`](super::check) over its stored bytes. Formats of up to 16
//!   planes keep it in the index entry; fp32, whose 32 planes would not fit there, keeps it as two
//!   bytes behind the plane's stored bytes. A constant plane stores neither bytes nor check: the
//!   entry's own checksum covers it.
//! * The plane tree's stream stands in the bundle where the first of its planes would: below the
//!   sign. Its length and CRC-32C are in the entry. Who wants any of its planes fetches all of it.
//! * A block of a transformed window has a [`head`] before its planes, which every reader fetches.
//!   The sign plane may be in it.
//! * *Words* blocks (opaque memory, and everything in the `gcomp` mode) are one run of bytes, coded
//!   or raw, with a CRC-32C.
//! * A block of zeros is no block at all. A *difference* of zeros, of a block that is equal to
//!   another one, is coded like any other, so that it is told from a block of zeros.

mod bf16;
mod header;
mod stored;

pub use crate::{error::BlockError, tree::joint_bytes};

pub use self::stored::most_bytes;
use self::stored::trailing_check;
pub use self::stored::{Joint, MAX_CHECKS, Parts, Stored, StoredPlane, StoredPlanes};
use super::{
    Codec,
    check::{self, Span},
    crc::crc32c,
    head::{self, Details, Head, MAX_HEAD},
    signs,
    survey::{Survey, survey},
    tree::{self, Whole},
    workspace::{Aligned, BlockDecoder, BlockEncoder, Compressors},
};
use crate::{
    BLOCK_BYTES, BlockWords,
    format::Format,
    plane::{self, PlaneMask, Planes},
};

/// Planes of the widest format.
pub const MAX_PLANES: usize = 32;
/// Bytes of a check behind a plane of fp32.
const TRAILING_CHECK: u16 = 2;
/// Bytes of the longest bundle: a raw fp32 block with its checks.
pub const MAX_BUNDLE: usize = BLOCK_BYTES + MAX_PLANES * TRAILING_CHECK as usize;

/// A coded block: what to store, and its description.
pub struct Bundle {
    /// The description, or `None` for a block of zeros.
    pub stored: Option<Stored>,
    /// Whether it gives not the block's words, but these XOR the words of another block.
    pub difference: bool,
    bytes: [u8; MAX_BUNDLE + MAX_HEAD],
    /// Where in `bytes` it begins.
    start: usize,
    length: usize,
}

impl Bundle {
    /// An empty bundle, to be filled again and again.
    pub const fn new() -> Self {
        Self { stored: None, difference: false, bytes: [0; MAX_BUNDLE + MAX_HEAD], start: 0, length: 0 }
    }

    /// The bytes to store.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.length]
    }

    /// See [`Encoder::block`](crate::Encoder::block).
    pub(crate) fn encode(
        &mut self,
        encoder: &mut BlockEncoder,
        format: Format,
        codec: Codec,
        words: &BlockWords,
    ) {
        if is_zero(words) {
            return self.clear();
        }
        self.begin();
        if format == Format::Opaque {
            if encoder.bytes.is_noise(codec, words) {
                return self.keep(codec, words);
            }
            return self.encode_any_words(encoder, codec, words);
        }
        if format == Format::Bf16 && codec == Codec::Tree {
            return self.encode_bf16(encoder, words);
        }
        self.encode_planes(encoder, format, codec, words, None, None);
    }

    /// See [`Encoder::difference`](crate::Encoder::difference).
    pub(crate) fn encode_difference(
        &mut self,
        encoder: &mut BlockEncoder,
        format: Format,
        codec: Codec,
        words: &BlockWords,
    ) {
        match format {
            Format::Opaque => self.encode_any_words(encoder, codec, words),
            _ if is_zero(words) => {
                self.clear();
                self.stored = Some(Stored::Planes(StoredPlanes::zeros(format, codec.bytewise())));
            }
            _ => self.encode(encoder, format, codec, words),
        }
        self.difference = true;
    }

    /// Begins another block.
    const fn begin(&mut self) {
        (self.difference, self.start) = (false, 0);
    }

    /// Codes `words`, a block of a transformed KV window, with `details` in its head. Zeros are
    /// coded too, as the head may say more.
    ///
    /// # Panics
    /// If the format has no planes, or the details with a plane of signs pass [`MAX_HEAD`].
    pub(crate) fn encode_with_header(
        &mut self,
        encoder: &mut BlockEncoder,
        format: Format,
        codec: Codec,
        words: &BlockWords,
        details: &Details<'_>,
    ) {
        self.begin();
        if format == Format::Bf16 && codec == Codec::Tree {
            return self.encode_bf16_with_header(encoder, words, details);
        }
        self.encode_planes(encoder, format, codec, words, Some(details), None);
    }

    /// Makes it a piece of a KV window that was coded with loss.
    ///
    /// # Panics
    /// If the piece is longer than a block.
    pub fn put_packed(&mut self, piece: &[u8]) {
        assert!(piece.len() <= BLOCK_BYTES, "a piece of {} bytes", piece.len());
        self.bytes[..piece.len()].copy_from_slice(piece);
        (self.start, self.length) = (0, piece.len());
        let length = u16::try_from(piece.len()).expect("at most a block");
        self.stored = Some(Stored::Packed { length, check: crc32c(piece) });
    }

    /// Makes it the bundle of a block of zeros.
    pub fn clear(&mut self) {
        self.begin();
        (self.stored, self.length) = (None, 0);
    }

    /// Whether it can be stored. A head may make it longer than any bundle may be.
    pub(crate) fn fits(&self) -> bool {
        self.length <= most_bytes(self.stored.as_ref().map_or(0, Stored::head_bytes))
    }

    fn encode_planes(
        &mut self,
        encoder: &mut BlockEncoder,
        format: Format,
        codec: Codec,
        words: &BlockWords,
        details: Option<&Details<'_>>,
        stream: Option<&[u8]>,
    ) {
        plane::split(format, words, &mut encoder.split.0);
        self.encode_split(encoder, format, codec, words, details, stream);
    }

    /// Codes `words` of bf16 by a plane tree. What is beside it mostly is noise, and then
    /// everything is where it belongs at once.
    fn encode_bf16(&mut self, encoder: &mut BlockEncoder, words: &BlockWords) {
        const FORMAT: Format = Format::Bf16;
        const RAW: usize = FORMAT.plane_bytes();
        let out = &mut self.bytes;
        let mut whole = Whole::default();
        tree::Kernel::best().encode_bf16(words, &mut encoder.tree, out, &mut whole);
        let Whole { length, ref checks, noise: u8::MAX } = whole else {
            let mut stream = [0; tree::joint_bytes(FORMAT)];
            let stream = &mut stream[..whole.length];
            stream.copy_from_slice(&out[RAW..][..stream.len()]);
            return self.encode_planes(encoder, FORMAT, Codec::Tree, words, None, Some(stream));
        };
        let lower = 1 + tree::joint_planes(FORMAT)..FORMAT.planes();
        let mut stored = StoredPlanes::zeros(FORMAT, Codec::Tree.bytewise());
        self.length = RAW;
        stored.joint = self.joint(length);
        self.length += lower.len() * RAW;
        for planes in [0..1, lower.clone()] {
            stored.lengths[planes].fill(u16::try_from(RAW).expect("at most 1024"));
        }
        stored.checks[0] = checks[0];
        stored.checks[lower].copy_from_slice(&checks[1..]);
        self.stored = Some(Stored::Planes(stored));
    }

    /// Codes `words`, whose planes are in the encoder, and `stream` is the plane tree's, empty for
    /// none, if that was made.
    fn encode_split(
        &mut self,
        encoder: &mut BlockEncoder,
        format: Format,
        codec: Codec,
        words: &BlockWords,
        details: Option<&Details<'_>>,
        stream: Option<&[u8]>,
    ) {
        let BlockEncoder { split, tree, bytes } = encoder;
        let Aligned(split) = &**split;
        let (count, raw) = (format.planes(), format.plane_bytes());
        let with_tree = codec == Codec::Tree;
        // With a tree, what it takes need not be looked at.
        let mut seen = survey(if with_tree { &split[..raw] } else { split }, raw, with_tree);
        let mut head = Head::default();
        if let Some(details) = details {
            let mut signs = 0;
            if with_tree && seen.constant & 1 == 0 {
                let out = &mut self.bytes[head::signs_at()..];
                signs = signs::Kernel::best().encode(format, &split[..raw], raw, out).unwrap_or(0);
            }
            if signs > 0 {
                // Nothing is left of the plane.
                seen = Survey { constant: 1, ..Survey::default() };
            }
            head = Head { length: head::write(signs, details, &mut self.bytes), delta: details.delta };
        }
        self.length = head.length.into();
        let mut stored = StoredPlanes { head, ..StoredPlanes::zeros(format, codec.bytewise()) };
        let trailing = usize::from(trailing_check(format));
        let mut index = 0;
        while index < count {
            if with_tree && index == 1 {
                stored.joint = match stream {
                    Some(stream) => {
                        self.bytes[self.length..][..stream.len()].copy_from_slice(stream);
                        self.joint(stream.len())
                    }
                    None => self.append_tree(tree, format, words),
                };
                if stored.joint.length > 0 {
                    index += tree::joint_planes(format);
                }
                if index == count {
                    break;
                }
                seen.add(index, survey(&split[index * raw..], raw, true));
            }
            let noise = (seen.noise >> index).trailing_ones() as usize;
            if noise > 0 {
                // Planes that stay next to each other are copied together.
                let one_by_one = trailing > 0 || with_tree && index == 0;
                let planes = if one_by_one { 1 } else { noise };
                let from = &split[index * raw..][..planes * raw];
                self.bytes[self.length..][..from.len()].copy_from_slice(from);
                stored.lengths[index..index + planes].fill(u16::try_from(raw).expect("at most 1024"));
                self.length += from.len() + trailing;
                index += planes;
                continue;
            }
            if seen.constant >> index & 1 == 1 {
                stored.ones |= seen.ones & 1 << index;
            } else {
                stored.lengths[index] = self.append(bytes, codec, &split[index * raw..][..raw]);
                self.length += trailing;
            }
            index += 1;
        }
        self.finish(stored);
    }

    /// Adds the checks of planes that are in place.
    fn finish(&mut self, mut stored: StoredPlanes) {
        let count = stored.format.planes();
        let mut spans = [Span::default(); MAX_PLANES];
        stored.find(u32::MAX, |index, span| spans[index] = span);
        let spans = &spans[..count];
        if trailing_check(stored.format) == 0 {
            check::checks(&self.bytes, spans, &mut stored.checks[..count]);
        } else {
            let mut checks = [0; MAX_PLANES];
            check::checks(&self.bytes, spans, &mut checks[..count]);
            for (span, check) in spans.iter().zip(checks).filter(|(span, _)| span.length > 0) {
                self.bytes[span.range().end..][..2].copy_from_slice(&check.to_le_bytes());
            }
        }
        self.stored = Some(Stored::Planes(stored));
    }

    /// Appends the plane tree of a block's joint planes, if that makes them shorter.
    fn append_tree(&mut self, tree: &mut tree::Workspace, format: Format, words: &BlockWords) -> Joint {
        let length = tree::Kernel::best().encode_block(format, words, tree, &mut self.bytes[self.length..]);
        self.joint(length.unwrap_or(0))
    }

    /// Appends the plane tree's stream that is behind the end, of `length` bytes.
    fn joint(&mut self, length: usize) -> Joint {
        if length == 0 {
            return Joint::default();
        }
        let check = crc32c(&self.bytes[self.length..][..length]);
        self.length += length;
        Joint { length: u16::try_from(length).expect("shorter than a block"), check }
    }

    /// See [`Encoder::words`](crate::Encoder::words).
    pub(crate) fn encode_words(&mut self, encoder: &mut BlockEncoder, codec: Codec, words: &BlockWords) {
        if is_zero(words) {
            return self.clear();
        }
        self.encode_any_words(encoder, codec, words);
    }

    /// The same, of zeros too.
    fn encode_any_words(&mut self, encoder: &mut BlockEncoder, codec: Codec, words: &BlockWords) {
        self.begin();
        match encoder.bytes.compress(codec, words, &mut self.bytes) {
            Some(length) => self.hold_words(codec, length),
            None => self.keep(codec, words),
        }
    }

    /// Holds `words` as they are.
    fn keep(&mut self, codec: Codec, words: &BlockWords) {
        self.bytes[..BLOCK_BYTES].copy_from_slice(words);
        self.hold_words(codec, BLOCK_BYTES);
    }

    /// Says that `length` bytes are what is stored of a block word-major.
    fn hold_words(&mut self, codec: Codec, length: usize) {
        self.length = length;
        let length = u16::try_from(length).expect("at most a block");
        self.stored = Some(Stored::Words { codec: codec.bytewise(), length, check: crc32c(self.bytes()) });
    }

    /// Appends a plane as the codec gives it, if it gets shorter, or else as it is: the bytes it
    /// takes.
    fn append(&mut self, compressors: &mut Compressors, codec: Codec, plane: &[u8]) -> u16 {
        let out = &mut self.bytes[self.length..];
        let length = compressors.compress(codec, plane, out).unwrap_or_else(|| {
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
    /// As [`Decoder::block`](crate::Decoder::block); puts the head in `head` if there is one, and
    /// leaves that as it was if not. It is not in the result, which is copied on its way, and does
    /// not count if there is an error.
    #[inline]
    pub(crate) fn decode<'a>(
        &self,
        decoder: &mut BlockDecoder,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
        head: &mut Option<head::Found<'a>>,
    ) -> Result<(), BlockError> {
        match self {
            Self::Packed { .. } => {
                Err(BlockError::Window { what: "a piece of a lossy window stands for nothing by itself" })
            }
            Self::Words { codec, length, check } => {
                let bytes = checked_bytes(*length, *check, bundle)?;
                if bytes.len() == BLOCK_BYTES {
                    words.copy_from_slice(bytes);
                    return Ok(());
                }
                Ok(decoder.bytes.decompress(*codec, bytes, words)?)
            }
            Self::Planes(planes) if planes.is_bf16_beside_noise(mask) => {
                planes.decode_bf16(&mut decoder.tree, mask, bundle, words)
            }
            Self::Planes(planes) => planes.decode(decoder, mask, bundle, words, head),
        }
    }
}

impl StoredPlanes {
    /// [`Stored::decode`].
    #[inline]
    fn decode<'a>(
        &self,
        decoder: &mut BlockDecoder,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
        head: &mut Option<head::Found<'a>>,
    ) -> Result<(), BlockError> {
        if self.is_bf16_with_header(mask)
            && self.decode_bf16_with_header(&mut decoder.tree, mask, bundle, words, head)
        {
            return Ok(());
        }
        if self.is_block() {
            return self.decode_block(mask, bundle, words);
        }
        *head = self.decode_planes(decoder, mask, bundle, words)?;
        Ok(())
    }

    /// As [`Self::decode`] of a block whose planes are as they are, and where they are in a
    /// [`PlaneBlock`].
    #[inline(never)]
    fn decode_block(
        &self,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<(), BlockError> {
        let wanted = self.wanted(mask);
        let mut spans = [Span::default(); MAX_PLANES];
        self.find(wanted, |index, span| spans[index] = span);
        self.verify(wanted, bundle, &spans[..self.format.planes()])?;
        let planes = bundle.first_chunk().expect("a bundle has room for a block");
        plane::join_block(self.format, mask, planes, words);
        Ok(())
    }

    /// As [`Self::decode`], plane by plane.
    fn decode_planes<'a>(
        &self,
        decoder: &mut BlockDecoder,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<Option<head::Found<'a>>, BlockError> {
        let BlockDecoder { planes: space, tree, bytes } = decoder;
        let mut wanted = self.wanted(mask);
        let (count, raw) = (self.format.planes(), self.format.plane_bytes());
        let mut space = &mut space.0[..];
        let mut found: Planes<'_> = [&plane::ZEROS; MAX_PLANES];
        let mut head = None;
        if self.head.length > 0 {
            let read = head::read(self.head.length, bundle)?;
            if !read.signs.is_empty() && wanted & 1 == 1 {
                let (out, rest) = space.split_at_mut(raw);
                space = rest;
                signs::Kernel::best().decode(
                    self.format,
                    &bundle[head::signs_at()..],
                    read.signs.len(),
                    out,
                )?;
                found[count - 1] = out;
                wanted ^= 1;
            }
            head = Some(read);
        }
        // Raw and constant planes are joined from where they lie.
        let mut spans = [Span::default(); MAX_PLANES];
        let mut coded = 0_u32;
        self.find(wanted, |index, span| {
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
            let Span { start, length } = spans[index];
            let (out, rest) = space.split_at_mut(raw);
            space = rest;
            bytes.decompress(self.codec, &bundle[start.into()..][..length.into()], out)?;
            found[count - 1 - index] = out;
        }
        if self.wants_stream(mask) {
            let stream = &bundle[self.stream().range().start..];
            self.joint.decode(tree, self.format, stream, mask, &found, words)?;
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
        decoder: &mut tree::Decoder,
        format: Format,
        bundle: &[u8],
        mask: PlaneMask,
        planes: &Planes<'_>,
        words: &mut BlockWords,
    ) -> Result<(), BlockError> {
        self.check(bundle)?;
        Ok(tree::Kernel::best().decode_block(
            format,
            bundle,
            self.length.into(),
            mask,
            planes,
            words,
            decoder,
        )?)
    }

    /// Compares the stream at the front of `bundle` with its checksum.
    fn check(self, bundle: &[u8]) -> Result<(), BlockError> {
        let computed = crc32c(&bundle[..usize::from(self.length)]);
        if computed != self.check {
            return Err(BlockError::TreeCheck { computed, stored: self.check });
        }
        Ok(())
    }
}

impl Stored {
    /// The piece of a KV window that is coded with loss, if it is one.
    ///
    /// # Errors
    /// [`BlockError::WordsCheck`] if `bundle` is damaged.
    pub fn packed_piece<'b>(&self, bundle: &'b [u8; MAX_BUNDLE]) -> Result<Option<&'b [u8]>, BlockError> {
        match self {
            Self::Packed { length, check } => checked_bytes(*length, *check, bundle).map(Some),
            _ => Ok(None),
        }
    }
}

/// The first bytes of a bundle, which have this check.
fn checked_bytes(length: u16, check: u32, bundle: &[u8; MAX_BUNDLE]) -> Result<&[u8], BlockError> {
    let bytes = &bundle[..usize::from(length).min(BLOCK_BYTES)];
    let computed = crc32c(bytes);
    if computed == check { Ok(bytes) } else { Err(BlockError::WordsCheck { computed, stored: check }) }
}

/// Whether every byte is zero, of a block or of a part of one.
pub fn is_zero(bytes: &[u8]) -> bool {
    // By lines, which the compiler makes vectors of: byte by byte it would not.
    let (lines, rest) = bytes.as_chunks::<64>();
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |any, byte| any | byte) == 0;
    lines.iter().all(|line| is_zero(line)) && is_zero(rest)
}
