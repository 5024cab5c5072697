//! Blocks of bf16 whose planes are coded each by itself, those of the lower bytes not at all: mantissas are noise, and so is the lowest bit of exponents, in most blocks.
//!
//! The rules:
//!
//! * The upper bytes' planes are gone through once: where one lies, its check and what it is. The others are checked as they are joined.
//! * Planes that are not wanted are zeros, whose check is zero.
//! * If anything is damaged, the block is decoded as others are, which tells what it is.

use super::{MAX_BUNDLE, StoredPlanes};
use crate::{BlockWords, context::BlockDecoder, format::Format, kernel::kernels, plane::PlaneMask};

/// Bytes of a plane.
const RAW: usize = Format::Bf16.plane_bytes();
/// Planes of each of an element's bytes.
const HALF: usize = Format::Bf16.planes() / 2;

kernels! {
    /// A way to decode such blocks.
    enum Kernel {
        /// As others.
        Portable,
        /// AVX-512, by which planes are joined and checked.
        Avx512: ["avx512f", "avx512bw", "avx512vbmi", "bmi2", "gfni"],
    }
}

impl StoredPlanes {
    /// Whether it is such a block.
    #[inline]
    pub(super) fn is_bf16_apart(&self) -> bool {
        self.format == Format::Bf16
            && self.head.length == 0
            && self.joint.length == 0
            && self.lengths[HALF..2 * HALF] == [256; HALF]
    }

    /// Decodes the planes in `mask` of such a block: whether it could.
    pub(super) fn decode_bf16_apart(
        &self,
        decoder: &mut BlockDecoder,
        mask: PlaneMask,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
    ) -> bool {
        match Kernel::best() {
            Kernel::Portable => false,
            // SAFETY: the processor has the kernel's features, or it were not the best one.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => unsafe {
                avx512::decode(self, self.wanted(mask), bundle, words, decoder).is_some()
            },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::_mm512_setzero_si512;

    use super::{BlockDecoder, HALF, MAX_BUNDLE, RAW, StoredPlanes};
    use crate::{
        BlockWords,
        check::gfni::{Sums, fold, sums_of_four, sums_of_less},
        plane::{self, avx512::joined_16},
    };

    /// A plane, line by line.
    type Plane = [[u8; 64]; 4];

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,bmi2,gfni")]
    pub(super) fn decode(
        stored: &StoredPlanes,
        wanted: u32,
        bundle: &[u8; MAX_BUNDLE],
        words: &mut BlockWords,
        decoder: &mut BlockDecoder,
    ) -> Option<()> {
        let (zeros, ones) = (lines(&plane::ZEROS)?, lines(&plane::ONES)?);
        // From the sign's on, as they are stored.
        let mut planes = [zeros; 2 * HALF];
        let mut sums = [_mm512_setzero_si512(); HALF];
        let mut space = &mut decoder.planes.0[..];
        let mut rest = &bundle[..];
        for index in 0..HALF {
            let (from, length) = (rest, usize::from(stored.lengths[index]));
            rest = from.get(length..)?;
            if wanted >> index & 1 == 0 {
                continue;
            }
            if length == RAW {
                planes[index] = lines(from)?;
                sums[index] = sums_of_four(planes[index]);
            } else if length > 0 {
                sums[index] = sums_of_less(&from[..length]);
                decoder.bytes.decompress_plane(stored.codec, from, length, space, RAW).ok()?;
                let (plane, behind) = space.split_at_mut(RAW);
                planes[index] = lines(plane)?;
                space = behind;
            } else if stored.ones >> index & 1 == 1 {
                planes[index] = ones;
            }
        }
        let lower: &[Plane; HALF] = rest.as_chunks().0.as_chunks().0.first_chunk()?;
        for (at, plane) in lower.iter().enumerate() {
            planes[HALF + at] = if wanted >> (HALF + at) & 1 == 1 { plane } else { zeros };
        }
        planes.reverse();
        let mut lower = Sums::new();
        for (row, words) in words.as_chunks_mut().0.iter_mut().enumerate() {
            lower.add(row, &joined_16(&planes, row, words));
        }
        let mut checks = stored.checks;
        for (index, check) in checks.iter_mut().enumerate() {
            *check = if wanted >> index & 1 == 1 { *check } else { 0 };
        }
        let [upper, lower] = [fold(&sums), lower.checks_joined()];
        (checks.as_chunks().0 == [upper, lower]).then_some(())
    }

    /// The first lines.
    fn lines(bytes: &[u8]) -> Option<&Plane> {
        bytes.as_chunks().0.first_chunk()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        BLOCK_BYTES, Codec, Encoder,
        block::{Bundle, Stored},
    };

    /// Lower bytes of noise; upper bytes of a few values that repeat, some places and bits changed.
    fn words() -> impl Strategy<Value = BlockWords> {
        let piece = prop::collection::vec(any::<u8>(), 1..70);
        let changes = prop::collection::vec((0..BLOCK_BYTES / 2, any::<u8>()), 0..60);
        (any::<u32>(), piece, any::<u8>(), any::<u8>(), changes).prop_map(
            |(mut state, piece, some, always, changes)| {
                let mut words = [0; BLOCK_BYTES];
                for (word, upper) in words.as_chunks_mut::<2>().0.iter_mut().zip(piece.iter().cycle()) {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *word = [state.to_be_bytes()[0], upper & some | always];
                }
                for (at, bits) in changes {
                    words[2 * at + 1] ^= bits;
                }
                words
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn such_blocks_are_decoded_as_others(
            words in words(), zstd: bool, mask: u16, whole: bool,
            damage in prop::option::of((any::<prop::sample::Index>(), 1_u8..)),
        ) {
            let mut bundle = Bundle::new();
            let codec = if zstd { Codec::Zstd } else { Codec::Lz4 };
            Encoder::new().block(Format::Bf16, codec, &words, &mut bundle);
            let Some(Stored::Planes(stored)) = &bundle.stored else { panic!("planes") };
            prop_assert!(stored.is_bf16_apart());
            let mut bytes = [0xa5; MAX_BUNDLE];
            bytes[..bundle.bytes().len()].copy_from_slice(bundle.bytes());
            if let Some((at, bits)) = damage {
                bytes[at.index(bundle.bytes().len())] ^= bits;
            }
            let mask = PlaneMask(if whole { 0xffff } else { mask.into() });
            let (mut got, mut want) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
            let mut decoder = BlockDecoder::default();
            let told = stored.decode_planes(&mut decoder, mask, &bytes, &mut want);
            let could = stored.decode_bf16_apart(&mut decoder, mask, &bytes, &mut got);
            prop_assert_eq!(could, told.is_ok() && Kernel::best() != Kernel::Portable);
            prop_assert!(!could || got == want);
            prop_assert!(told.is_err() || !whole || damage.is_some() || want == words);
            prop_assert!(damage.is_none() || !whole || told.is_err());
        }
    }
}
