//! Blocks of bf16 that are a plane tree's stream and, beside it, planes as they are, which most
//! are: where everything lies need not be looked for, and planes are checked as they are joined.
//! Planes that are not wanted are zeros, whose check is zero.
//!
//! Damage is found as elsewhere: the first plane that is damaged is told, then the stream.

use super::{BlockError, MAX_BUNDLE, MAX_CHECKS, MAX_PLANES, StoredPlanes};
use crate::{
    BlockWords,
    check::Span,
    crc::crc32c,
    format::Format,
    plane::{self, PlaneMask},
    tree,
};

const RAW: usize = Format::Bf16.plane_bytes();
/// Planes below the stream's.
const LOWER: usize = Format::Bf16.planes() - 1 - tree::joint_planes(Format::Bf16);

impl StoredPlanes {
    /// Whether it is such a block, and `mask` has planes of the stream.
    #[inline]
    pub(super) fn is_bf16_beside_noise(&self, mask: PlaneMask) -> bool {
        const LENGTHS: [u16; MAX_PLANES] = {
            let mut lengths = [0; MAX_PLANES];
            lengths[0] = 256;
            let mut plane = 0;
            while plane < LOWER {
                lengths[Format::Bf16.planes() - 1 - plane] = 256;
                plane += 1;
            }
            lengths
        };
        self.format == Format::Bf16
            && self.head.length == 0
            && self.wants_stream(mask)
            && self.lengths == LENGTHS
    }

    /// What is decoded of such a block.
    #[inline]
    fn bf16<'a>(
        &self,
        mask: PlaneMask,
        bundle: &'a [u8; MAX_BUNDLE],
        words: &'a mut BlockWords,
    ) -> tree::Bf16<'a> {
        let length = usize::from(self.joint.length);
        let (sign, behind) = bundle.split_first_chunk().expect("a bundle is longer");
        let lower: &[[u8; RAW]; LOWER] =
            behind[length..].as_chunks().0.first_chunk().expect("a bundle is longer");
        let mut planes = [sign; 8];
        for (plane, lower) in planes.iter_mut().zip(lower.iter().rev()) {
            *plane = lower;
        }
        if !mask.covers(PlaneMask::all(Format::Bf16)) {
            let zeros = plane::ZEROS.first_chunk().expect("long enough for every format");
            for (at, plane) in planes.iter_mut().enumerate() {
                let bit = if at < LOWER { at } else { Format::Bf16.planes() - 1 };
                *plane = if mask.0 >> bit & 1 == 1 { plane } else { zeros };
            }
        }
        let [wanted, ..] = (mask.0 >> LOWER).to_le_bytes();
        tree::Bf16 { stream: behind, length, wanted, planes, words, checks: [0; 8] }
    }

    /// The checks of the planes in `mask`, the most significant first; of the others zeros, which
    /// is theirs.
    #[inline]
    fn bf16_checks(&self, mask: PlaneMask) -> [u16; 8] {
        let mut checks = [self.checks[0]; 8];
        checks[1..].copy_from_slice(&self.checks[MAX_CHECKS - LOWER..]);
        if !mask.covers(PlaneMask::all(Format::Bf16)) {
            for (at, check) in checks.iter_mut().enumerate() {
                let bit = if at == 0 { Format::Bf16.planes() - 1 } else { LOWER - at };
                *check = if mask.0 >> bit & 1 == 1 { *check } else { 0 };
            }
        }
        checks
    }

    /// Decodes such a block.
    pub(super) fn decode_bf16(
        &self,
        decoder: &mut tree::Decoder,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> Result<(), BlockError> {
        let mut block = self.bf16(mask, bundle, words);
        let decoded = tree::Kernel::best().decode_bf16(&mut block, decoder);
        let stream = &block.stream[..block.length];
        if decoded.is_ok() && block.checks == self.bf16_checks(mask) && crc32c(stream) == self.joint.check {
            return Ok(());
        }
        self.damage_of_bf16(mask, bundle, decoded)
    }

    /// What is damaged.
    #[cold]
    fn damage_of_bf16(
        &self,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        decoded: Result<(), tree::Malformed>,
    ) -> Result<(), BlockError> {
        let wanted = self.wanted(mask);
        let mut spans = [Span::default(); MAX_PLANES];
        self.find(wanted, |index, span| spans[index] = span);
        self.verify(wanted, bundle, &spans[..self.format.planes()])?;
        self.joint.check(&bundle[RAW..])?;
        Ok(decoded?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        BLOCK_BYTES, Codec, Encoder,
        block::{Bundle, Stored},
        testing::words,
        workspace::BlockDecoder,
    };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn damage_is_told_as_of_other_blocks(
            words in words(), mask in any::<u16>(), whole in any::<bool>(), in_the_stream in any::<bool>(),
            damage in prop::option::of((any::<prop::sample::Index>(), 1_u8..)), mended in any::<bool>(),
        ) {
            let mut bundle = Bundle::new();
            Encoder::new().block(Format::Bf16, Codec::Tree, &words, &mut bundle);
            let Some(Stored::Planes(mut stored)) = bundle.stored.clone() else { return Ok(()) };
            let mask = PlaneMask(if whole { 0xffff } else { mask.into() });
            if !stored.is_bf16_beside_noise(mask) {
                return Ok(());
            }
            let mut bytes = [0xa5; MAX_BUNDLE];
            bytes[..bundle.bytes().len()].copy_from_slice(bundle.bytes());
            let stream = stored.stream().range();
            if let Some((at, bits)) = damage {
                let within = if in_the_stream { stream.clone() } else { 0..bundle.bytes().len() };
                bytes[within.start + at.index(within.len())] ^= bits;
                if mended {
                    stored.joint.check = crc32c(&bytes[stream]);
                }
            }
            let (mut got, mut want) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
            let mut decoder = BlockDecoder::default();
            let as_others = stored.decode_planes(&mut decoder, mask, &bytes, &mut want).map(drop);
            let told = stored.decode_bf16(&mut decoder.tree, mask, &bytes, &mut got);
            prop_assert_eq!(&told, &as_others);
            if told.is_ok() {
                prop_assert!(got == want);
            }
        }
    }
}
