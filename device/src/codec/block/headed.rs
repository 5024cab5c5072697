//! A block of bf16 of a transformed window, coded by a plane tree, as [`Bundle::encode_headed`] does it where the mantissas are noise: stream and planes are written to where they
//! belong at once, and the head before them when its length is known. So a bundle need not begin where its bytes do. Back again, where everything lies need not be looked for.

use super::{BlockError, Bundle, MAX_BUNDLE, MAX_HEAD, MAX_PLANES, Stored, StoredPlanes, with_kept};
use crate::{
    BlockWords,
    codec::{
        Codec,
        check::{self, Span},
        head::{self, Details, Found, Head},
        signs,
        tree::{self, Whole},
    },
    format::Format,
    plane::PlaneBlock,
};

const FORMAT: Format = Format::Bf16;
/// Bytes of a plane.
const RAW: usize = FORMAT.plane_bytes();
/// The first plane below the stream's.
const LOWER: usize = 1 + tree::joint_planes(FORMAT);
const LOWER_PLANES: usize = FORMAT.planes() - LOWER;
/// The sign among the planes that a tree leaves.
const SIGN: u8 = 1;

impl Bundle {
    /// Codes `words` of bf16 by a plane tree, with `details` in the head.
    pub(super) fn encode_bf16_headed(&mut self, words: &BlockWords, details: Details<'_>) {
        let out = &mut self.bytes[MAX_HEAD..];
        let whole = with_kept(self.effort, |kept| tree::encode_bf16(words, kept, out));
        let length = whole.map_or(0, |whole| whole.length);
        let end = MAX_HEAD + RAW + length + LOWER_PLANES * RAW;
        let (front, rest) = self.bytes.split_at_mut(MAX_HEAD);
        let (sign_plane, behind) = rest.split_at(RAW);
        let whole = whole.filter(|whole| whole.noise | SIGN == u8::MAX);
        let mut signs = 0;
        if whole.is_some() {
            signs = signs::encode(FORMAT, sign_plane, RAW, &mut front[head::signs_at()..]).unwrap_or(0);
        }
        let whole = whole.filter(|whole| signs > 0 || whole.noise & SIGN > 0);
        let Some(Whole { checks, .. }) = whole else {
            let mut stream = [0; tree::joint_bytes(FORMAT)];
            let stream = &mut stream[..length];
            stream.copy_from_slice(&behind[..length]);
            self.start = 0;
            return self.encode_planes(FORMAT, Codec::Tree, words, Some(details), Some(stream));
        };
        let head = Head { length: head::write(signs, details, front), delta: details.delta };
        let head_bytes = usize::from(head.length);
        // With the signs in the head, nothing is left of their plane.
        let planes_at = if signs > 0 { MAX_HEAD + RAW } else { MAX_HEAD };
        self.start = planes_at - head_bytes;
        self.bytes.copy_within(..head_bytes, self.start);

        let mut stored = StoredPlanes { head, ..StoredPlanes::zeros(FORMAT, Codec::Tree.bytewise()) };
        self.length = MAX_HEAD + RAW;
        stored.joint = self.joint(length);
        self.length = end - self.start;
        let plane_bytes = u16::try_from(RAW).expect("at most 1024");
        stored.lengths[LOWER..FORMAT.planes()].fill(plane_bytes);
        stored.checks[LOWER..FORMAT.planes()].copy_from_slice(&checks[1..]);
        if signs == 0 {
            (stored.lengths[0], stored.checks[0]) = (plane_bytes, checks[0]);
        }
        self.stored = Some(Stored::Planes(stored));
    }
}

/// Bytes of the planes of such a block, with signs in the head.
const LENGTHS: [u16; MAX_PLANES] = {
    let mut lengths = [0; MAX_PLANES];
    let mut index = LOWER;
    while index < FORMAT.planes() {
        lengths[index] = 256;
        index += 1;
    }
    lengths
};
/// The same, with signs as they are.
const LENGTHS_WITH_SIGNS: [u16; MAX_PLANES] = {
    let mut lengths = LENGTHS;
    lengths[0] = 256;
    lengths
};

impl StoredPlanes {
    /// Whether it is a block with a head, a stream, and planes that are as they are or in the head.
    pub(super) fn is_headed_bf16(&self) -> bool {
        let headed = self.format == FORMAT && self.head.length > 0 && self.joint.length > 0;
        headed && (self.lengths == LENGTHS && self.ones == 0 || self.lengths == LENGTHS_WITH_SIGNS)
    }

    /// Decodes all planes of such a block; signs are decoded to `space`.
    pub(super) fn decode_bf16_headed<'a>(
        &self,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
        space: &mut PlaneBlock,
    ) -> Result<Found<'a>, BlockError> {
        let head = head::read(self.head.length, bundle)?;
        let stream = self.stream().range();
        let (lower, _) = bundle[stream.end..].as_chunks::<RAW>();
        let space = &mut space[..RAW];
        // Signs in the head are all that counts of them. Without any, and without a plane, they are zeros.
        let in_head = !head.signs.is_empty();
        let signs: &[u8] = if in_head {
            signs::decode(FORMAT, &bundle[head::signs_at()..], head.signs.len(), space)?;
            space
        } else if self.lengths[0] > 0 {
            &bundle[usize::from(self.head.length)..][..RAW]
        } else {
            space.fill(0);
            space
        };
        let length = LENGTHS[LOWER];
        // The sign's, and of the others the most significant one first.
        let mut spans =
            [Span { start: self.head.length, length: if in_head { 0 } else { self.lengths[0] } }; 8];
        let mut checks = [if in_head { 0 } else { self.checks[0] }; 8];
        let mut planes = [signs; 8];
        let mut start = self.stream().start + self.joint.length;
        for index in 0..LOWER_PLANES {
            spans[1 + index] = Span { start, length };
            checks[1 + index] = self.checks[LOWER + index];
            planes[LOWER_PLANES - 1 - index] = &lower[index];
            start += length;
        }
        let differ = check::differ(bundle, &spans, &checks);
        if differ != 0 {
            let index = differ.trailing_zeros() as usize;
            let computed = check::check(&bundle[spans[index].range()]);
            let plane = if index == 0 { FORMAT.planes() - 1 } else { LOWER_PLANES - index };
            return Err(BlockError::PlaneCheck { plane, computed, stored: checks[index] });
        }
        self.joint.check(&bundle[stream.start..])?;
        tree::decode_bf16(&bundle[stream.start..], stream.len(), &planes, words)?;
        Ok(head)
    }
}
