//! A block of bf16 of a transformed window, coded by a plane tree, as
//! [`Bundle::encode_with_header`] does it where the mantissas are noise: stream and planes are
//! written to where they belong at once, and the head before them when its length is known. So a
//! bundle need not begin where its bytes do. Back again, where everything lies need not be looked
//! for.

use super::{Bundle, MAX_BUNDLE, MAX_HEAD, MAX_PLANES, Stored, StoredPlanes};
use crate::{
    BlockWords, Codec,
    crc::crc32c,
    format::Format,
    head::{self, Details, Found, Head},
    plane::{self, PlaneMask},
    signs,
    tree::{self, Whole},
    workspace::BlockEncoder,
};

const FORMAT: Format = Format::Bf16;
/// Bytes of a plane.
const RAW: usize = FORMAT.plane_bytes();
/// The first plane below the stream's.
const LOWER: usize = 1 + tree::joint_planes(FORMAT);
const LOWER_PLANES: usize = FORMAT.planes() - LOWER;
/// The sign among the planes that a tree leaves.
const SIGN: u8 = 1;
/// The sign among all planes.
const SIGNS: u32 = 1 << (FORMAT.planes() - 1);

impl Bundle {
    /// Codes `words` of bf16 by a plane tree, with `details` in the head.
    pub(super) fn encode_bf16_with_header(
        &mut self,
        encoder: &mut BlockEncoder,
        words: &BlockWords,
        details: &Details<'_>,
    ) {
        let out = &mut self.bytes[MAX_HEAD..];
        let mut whole = Whole::default();
        tree::Kernel::best().encode_bf16(words, &mut encoder.tree, out, &mut whole);
        // Without a stream its length is zero.
        let Whole { length, ref checks, noise } = whole;
        let end = MAX_HEAD + RAW + length + LOWER_PLANES * RAW;
        let (front, rest) = self.bytes.split_at_mut(MAX_HEAD);
        let (sign_plane, behind) = rest.split_at(RAW);
        // Signs that are all the same take nothing.
        let same = matches!(sign_plane[0], 0 | u8::MAX) && sign_plane[1..] == sign_plane[..RAW - 1];
        let mut at_once = length > 0 && noise | SIGN == u8::MAX && !same;
        let mut signs = 0;
        if at_once {
            signs = signs::Kernel::best()
                .encode(FORMAT, sign_plane, RAW, &mut front[head::signs_at()..])
                .unwrap_or(0);
            at_once = signs > 0 || noise & SIGN > 0;
        }
        if !at_once {
            let mut stream = [0; tree::joint_bytes(FORMAT)];
            let stream = &mut stream[..length];
            stream.copy_from_slice(&behind[..length]);
            self.start = 0;
            return self.encode_planes(encoder, FORMAT, Codec::Tree, words, Some(details), Some(stream));
        }
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

/// Signs that begin at a cache line, as vectors want them to.
#[repr(align(64))]
struct Signs([u8; RAW]);

impl StoredPlanes {
    /// Whether it is a block with a head, a stream, and planes that are as they are or in the head,
    /// and `mask` has planes of the stream.
    #[inline]
    pub(super) fn is_bf16_with_header(&self, mask: PlaneMask) -> bool {
        let has_both = self.format == FORMAT && self.head.length > 0 && self.wants_stream(mask);
        // In vectors: to call for a comparison would take longer.
        let pairs = self.lengths[1..].iter().zip(&LENGTHS[1..]);
        let differ = pairs.fold(0, |differ, (length, lower)| differ | (length ^ lower));
        has_both
            && differ == 0
            && (self.lengths[0] == 0 && self.ones == 0 || usize::from(self.lengths[0]) == RAW)
    }

    /// Decodes the planes in `mask` of such a block, and its head: whether nothing is damaged. What
    /// it is, is found plane by plane.
    pub(super) fn decode_bf16_with_header<'a>(
        &self,
        decoder: &mut tree::Decoder,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &mut BlockWords,
        found_head: &mut Option<Found<'a>>,
    ) -> bool {
        let Ok(head) = head::read(self.head.length, bundle) else { return false };
        *found_head = Some(head);
        let stream = self.stream().range();
        let (lower, _) = bundle[stream.end..].as_chunks::<RAW>();
        let mut space = Signs([0; RAW]);
        // Signs in the head are all that counts of them, and have no check. Without any, and
        // without a plane, they are zeros.
        let in_head = !head.signs.is_empty();
        let zeros = plane::ZEROS.first_chunk().expect("long enough for every format");
        let signs: &[u8; RAW] = if mask.0 & SIGNS == 0 {
            zeros
        } else if in_head {
            let coded = &bundle[head::signs_at()..];
            if signs::Kernel::best().decode(FORMAT, coded, head.signs.len(), &mut space.0).is_err() {
                return false;
            }
            &space.0
        } else if self.lengths[0] > 0 {
            bundle[usize::from(self.head.length)..].first_chunk().expect("a bundle is longer")
        } else {
            zeros
        };
        let mut planes = [signs; 8];
        for (plane, lower) in planes[..LOWER_PLANES].iter_mut().rev().zip(lower) {
            *plane = lower;
        }
        let all = mask.covers(PlaneMask::all(FORMAT));
        if !all {
            for bit in (0..LOWER_PLANES).filter(|bit| mask.0 >> bit & 1 == 0) {
                planes[bit] = zeros;
            }
        }
        let [wanted, ..] = (mask.0 >> LOWER_PLANES).to_le_bytes();
        let (from, length) = (&bundle[stream.start..], stream.len());
        let mut block = tree::Bf16 { stream: from, length, wanted, planes, words, checks: [0; 8] };
        if tree::Kernel::best().decode_bf16(&mut block, decoder).is_err() {
            return false;
        }
        let (found, stored) = (&block.checks, &self.checks);
        let lower = LOWER..FORMAT.planes();
        let right = if all {
            (in_head || found[0] == stored[0]) && found[1..] == stored[lower]
        } else {
            // What is not wanted is zeros, whose check is zero.
            let check = |index: usize| {
                if mask.0 >> (FORMAT.planes() - 1 - index) & 1 == 1 { stored[index] } else { 0 }
            };
            (in_head || found[0] == check(0))
                && found[1..].iter().zip(lower).all(|(found, index)| *found == check(index))
        };
        right && crc32c(&from[..length]) == self.joint.check
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        BLOCK_BYTES, check,
        workspace::{BlockDecoder, BlockEncoder},
    };

    /// Elements of a few exponents and of mantissas that are noise; of 16 channels, of which one in
    /// `lean` has one sign only.
    fn block(seed: u64, lean: usize) -> BlockWords {
        let mut state = seed;
        let mut words = [0; BLOCK_BYTES];
        for (at, word) in words.as_chunks_mut().0.iter_mut().enumerate() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let [few, sign, mantissa, ..] = state.to_be_bytes();
            let sign = if (at / 128).is_multiple_of(lean) { 0 } else { u16::from(sign & 0x80) << 8 };
            let exponent = 0x70 + u16::from(few & few >> 4 & 7);
            *word = (sign | exponent << 7 | u16::from(mantissa & 0x7f)).to_le_bytes();
        }
        words
    }

    #[test]
    fn it_is_the_bundle_that_is_made_plane_by_plane() {
        // Signs as they are, in the head, and constant, which is not made at once.
        for (seed, lean, at_once) in
            (0..60).flat_map(|seed| [(seed, 17, true), (seed, 2, true), (seed, 1, false)])
        {
            let words = block(seed, lean);
            let details = Details { delta: true, repeats: false, bytes: b"sixteen of them." };
            let mut encoder = BlockEncoder::default();
            let [mut bundle, mut slow] = [(); 2].map(|()| Bundle::new());
            bundle.encode_with_header(&mut encoder, FORMAT, Codec::Tree, &words, &details);
            slow.encode_planes(&mut encoder, FORMAT, Codec::Tree, &words, Some(&details), None);
            assert_eq!(bundle.start > 0, at_once);
            assert!(bundle.bytes() == slow.bytes(), "{seed} {lean}");
            assert_eq!(bundle.stored, slow.stored);

            let stored = bundle.stored.clone().unwrap();
            let mut fetched = [0xa5; MAX_BUNDLE];
            let length = bundle.bytes().len();
            fetched[..length].copy_from_slice(bundle.bytes());
            let mut back = [0; BLOCK_BYTES];
            let all = PlaneMask::all(FORMAT);
            let mut head = None;
            let mut decoder = BlockDecoder::default();
            stored.decode(&mut decoder, all, &fetched, &mut back, &mut head).unwrap();
            assert!(back == words && head.unwrap().details == details.bytes);
            for at in (0..length).step_by(if seed == 0 { 1 } else { 97 }) {
                fetched[at] ^= 1 << (at % 8);
                let told = stored.decode(&mut decoder, all, &fetched, &mut back, &mut None);
                assert!(told.is_err(), "byte {at} of {length}");
                fetched[at] ^= 1 << (at % 8);
            }
            // What it held does not count.
            bundle.encode(&mut encoder, FORMAT, Codec::Tree, &words);
            slow = Bundle::new();
            slow.encode(&mut encoder, FORMAT, Codec::Tree, &words);
            assert!(bundle.bytes() == slow.bytes() && bundle.stored == slow.stored);
        }
    }

    /// A stored block and its bundle in the store, something else behind it.
    fn stored(words: &BlockWords, details: Details<'_>) -> (StoredPlanes, [u8; MAX_BUNDLE], usize) {
        let mut bundle = Bundle::new();
        bundle.encode_with_header(&mut BlockEncoder::default(), FORMAT, Codec::Tree, words, &details);
        let Some(Stored::Planes(stored)) = bundle.stored.clone() else {
            panic!("a block with a head has planes")
        };
        let mut fetched = [0xa5; MAX_BUNDLE];
        let length = bundle.bytes().len();
        fetched[..length].copy_from_slice(bundle.bytes());
        (stored, fetched, length)
    }

    /// Makes the checks of everything that is stored right.
    fn mend(stored: &mut StoredPlanes, bundle: &mut [u8; MAX_BUNDLE]) {
        head::mend(&mut bundle[..stored.head.length.into()]);
        stored.joint.check = crc32c(&bundle[stored.stream().range()]);
        let mut checks = stored.checks;
        stored.find(u32::MAX, |index, span| checks[index] = check::check(&bundle[span.range()]));
        stored.checks = checks;
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn damage_is_told_as_plane_by_plane(
            seed in any::<u64>(), lean in 2_usize..18, mask in any::<u16>(), whole in any::<bool>(), repeats in any::<bool>(),
            damage in prop::option::of((0..3, any::<prop::sample::Index>(), 1_u8..)), mended in any::<bool>(),
        ) {
            let words = block(seed, lean);
            let (mut stored, mut bundle, length) = stored(&words, Details { delta: true, repeats, bytes: b"details" });
            let mask = PlaneMask(if whole { u16::MAX } else { mask }.into());
            prop_assert_eq!(stored.is_bf16_with_header(mask), mask.0 & 0x7f80 != 0);
            if let Some((part, at, bits)) = damage {
                // What is rather short would hardly be hit.
                let within = match part {
                    0 => 0..usize::from(stored.head.length),
                    1 => stored.stream().range(),
                    _ => 0..length,
                };
                bundle[within.start + at.index(within.len())] ^= bits;
                if mended {
                    mend(&mut stored, &mut bundle);
                }
            }
            let [mut got, mut want] = [[0; BLOCK_BYTES]; 2];
            let mut head = None;
            let mut decoder = BlockDecoder::default();
            let told = stored.decode(&mut decoder, mask, &bundle, &mut got, &mut head);
            let plane_by_plane = stored.decode_planes(&mut decoder, mask, &bundle, &mut want);
            let is_damaged = told.is_err();
            prop_assert_eq!(told.map(|()| head), plane_by_plane);
            prop_assert!(is_damaged || got == want);
            if damage.is_none() {
                prop_assert!(!is_damaged);
                let at_once = stored.decode_bf16_with_header(&mut decoder.tree, mask, &bundle, &mut got, &mut head);
                prop_assert!(at_once && got == want);
            }
        }
    }
}
