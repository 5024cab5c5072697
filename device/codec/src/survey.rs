//! What can be seen of a block's planes before they are coded: which are constant, and which are
//! noise, that no codec makes shorter.
//!
//! Signs and mantissas are noise, and trying to code noise costs more than all else of a block. The
//! rules:
//!
//! * Beside a plane tree, which takes the planes that have most to gain, a plane is noise if ones
//!   and zeros are a quarter or more each, and few of its words are the one before.
//! * Otherwise it is noise if ones are as many as zeros, within an eighth, and so are the bits that
//!   differ from the one 1, 2, 3, 4, 8, 16, 32, 64 or 128 places behind, round the word or the
//!   plane. LZ4 gains only by four equal bytes and ZSTD's tables cost it more than so little skew
//!   gains, so neither makes such a plane shorter unless what repeats in it is further apart.
//! * Kernels are this source, compiled for what the processor has.

#![expect(clippy::inline_always, reason = "only inlined code takes on its caller's processor features")]

use crate::kernel::kernels;

/// Planes one behind the other: bit `i` is the plane at `i`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Survey {
    /// Every bit is the same.
    pub constant: u32,
    /// Every bit is one.
    pub ones: u32,
    /// Noise, not constant.
    pub noise: u32,
}

impl Survey {
    /// Notes what is seen of the plane at `index`, which has `ones`.
    #[inline(always)]
    fn note(&mut self, index: usize, bits: usize, ones: usize, noise: bool) {
        let bit = 1 << index;
        if ones == 0 || ones == bits {
            self.constant |= bit;
            self.ones |= if ones > 0 { bit } else { 0 };
        } else if noise {
            self.noise |= bit;
        }
    }

    /// Adds what is seen of the planes from the one at `index` on.
    pub(super) fn add(&mut self, index: usize, others: Self) {
        self.constant |= others.constant << index;
        self.ones |= others.ones << index;
        self.noise |= others.noise << index;
    }
}

kernels! {
    /// What the processor has.
    enum Kernel {
        Portable,
        Avx2: ["avx2", "popcnt"],
        Avx512: ["avx2", "popcnt", "avx512f", "avx512bw", "avx512vl", "avx512vpopcntdq"],
    }
}

impl Kernel {
    fn survey(self, planes: &[u8], plane_bytes: usize, beside_tree: bool) -> Survey {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            Self::Portable => survey_here(planes, plane_bytes, beside_tree),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::survey_avx2(planes, plane_bytes, beside_tree) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::survey_avx512(planes, plane_bytes, beside_tree) },
        }
    }
}

/// Looks at planes of `plane_bytes` each, one of the formats' lengths, at most 32 of them. Others
/// of their block may be coded by a tree: these are `beside_tree`.
pub(super) fn survey(planes: &[u8], plane_bytes: usize, beside_tree: bool) -> Survey {
    Kernel::best().survey(planes, plane_bytes, beside_tree)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Survey, survey_here};

    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn survey_avx2(planes: &[u8], plane_bytes: usize, beside_tree: bool) -> Survey {
        survey_here(planes, plane_bytes, beside_tree)
    }

    #[target_feature(enable = "avx2,popcnt,avx512f,avx512bw,avx512vl,avx512vpopcntdq")]
    pub(super) fn survey_avx512(planes: &[u8], plane_bytes: usize, beside_tree: bool) -> Survey {
        survey_here(planes, plane_bytes, beside_tree)
    }
}

#[inline(always)]
fn survey_here(planes: &[u8], plane_bytes: usize, beside_tree: bool) -> Survey {
    match plane_bytes {
        128 => survey_of::<128>(planes, beside_tree),
        256 => survey_of::<256>(planes, beside_tree),
        512 => survey_of::<512>(planes, beside_tree),
        _ => survey_of::<1024>(planes, beside_tree),
    }
}

#[inline(always)]
fn survey_of<const BYTES: usize>(planes: &[u8], beside_tree: bool) -> Survey {
    let mut survey = Survey::default();
    for (index, plane) in planes.as_chunks::<BYTES>().0.iter().enumerate() {
        let words = plane.as_chunks().0;
        let ones = sum(words, u64::count_ones);
        let noise = if beside_tree {
            is_even_beside_tree(ones, pairs(words, 1, |a, b| u32::from(a == b)), BYTES)
        } else {
            is_even(ones, BYTES * 8) && is_noise(words)
        };
        survey.note(index, BYTES * 8, ones, noise);
    }
    survey
}

/// Whether ones and zeros of a plane are a quarter or more each, and not many of its words the one
/// before.
#[inline(always)]
fn is_even_beside_tree(ones: usize, repeats: usize, plane_bytes: usize) -> bool {
    (2 * plane_bytes..=6 * plane_bytes).contains(&ones) && repeats <= plane_bytes / 64
}

/// Whether `ones` of so many bits are half of them, within an eighth of that.
#[inline(always)]
fn is_even(ones: usize, bits: usize) -> bool {
    (bits / 16 * 7..=bits / 16 * 9).contains(&ones)
}

#[inline(always)]
fn is_noise(words: &[[u8; 8]]) -> bool {
    let bits = 64 * words.len();
    let differ = |places: u32| sum(words, |word| (word ^ word.rotate_right(places)).count_ones());
    let further = |words_apart: usize| {
        is_even(pairs(words, words_apart, |a, b| (a ^ b).count_ones()), bits - 64 * words_apart)
    };
    [1, 2, 3, 4, 8, 16, 32].into_iter().all(|places| is_even(differ(places), bits))
        && further(1)
        && further(2)
}

#[inline(always)]
fn sum(words: &[[u8; 8]], of: impl Fn(u64) -> u32) -> usize {
    words.iter().map(|word| of(u64::from_le_bytes(*word))).sum::<u32>() as usize
}

#[inline(always)]
fn pairs(words: &[[u8; 8]], apart: usize, of: impl Fn(u64, u64) -> u32) -> usize {
    let pairs = words.iter().zip(&words[apart..]);
    pairs.map(|(a, b)| of(u64::from_le_bytes(*a), u64::from_le_bytes(*b))).sum::<u32>() as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{BLOCK_BYTES, Codec, Encoder, testing::words};

    /// Bit by bit.
    fn slowly(plane: &[u8], beside_tree: bool) -> (bool, bool, bool) {
        let bit = |at: usize| plane[at / 8] >> (at % 8) & 1;
        let bits = plane.len() * 8;
        let ones = (0..bits).filter(|at| bit(*at) == 1).count();
        let constant = ones == 0 || ones == bits;
        let within = |count: usize, of: usize, low: usize, parts: usize| {
            parts * count >= low * of && parts * count <= (parts - low) * of
        };
        let noise = if beside_tree {
            let repeats = (8..plane.len()).step_by(8).filter(|at| plane[*at..*at + 8] == plane[*at - 8..*at]);
            within(ones, bits, 1, 4) && repeats.count() <= plane.len() / 64
        } else {
            let round = |places| {
                let behind = |at: usize| at / 64 * 64 + (at % 64 + places) % 64;
                let differ = (0..bits).filter(|at| bit(*at) != bit(behind(*at))).count();
                within(differ, bits, 7, 16)
            };
            let further = |places| {
                let differ = (0..bits - places).filter(|at| bit(*at) != bit(at + places)).count();
                within(differ, bits - places, 7, 16)
            };
            within(ones, bits, 7, 16)
                && [1, 2, 3, 4, 8, 16, 32].into_iter().all(round)
                && further(64)
                && further(128)
        };
        (constant, ones == bits, noise && !constant)
    }

    proptest! {
        #[test]
        fn every_kernel_sees_what_the_rules_say(words in words(), shift in 0_u32..4, beside_tree in any::<bool>()) {
            let plane_bytes = 128_usize << shift;
            for kernel in Kernel::available() {
                let survey = kernel.survey(&words[..], plane_bytes, beside_tree);
                for (index, plane) in words.chunks_exact(plane_bytes).enumerate() {
                    let got = [survey.constant, survey.ones, survey.noise].map(|planes| planes >> index & 1 == 1);
                    let (constant, ones, noise) = slowly(plane, beside_tree);
                    prop_assert_eq!(got, [constant, ones, noise], "{:?} {}", kernel, index);
                }
            }
        }
    }

    #[test]
    fn no_codec_shortens_noise() {
        let (mut state, mut block) = (1_u64, [0; BLOCK_BYTES]);
        for plane_bytes in [128, 256, 512, 1024] {
            for _ in 0..20 {
                for word in block.as_chunks_mut::<8>().0 {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    *word = (state ^ state >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
                }
                let survey = survey(&block, plane_bytes, false);
                let planes = block.chunks_exact(plane_bytes).enumerate();
                for (_, plane) in planes.filter(|(index, _)| survey.noise >> index & 1 == 1) {
                    for codec in Codec::ALL {
                        assert_eq!(
                            Encoder::new().bytes(codec, plane, &mut [0; BLOCK_BYTES]),
                            None,
                            "{codec}"
                        );
                    }
                }
                assert!(survey.noise.count_ones() as usize > BLOCK_BYTES / plane_bytes / 2, "{plane_bytes}");
            }
        }
    }
}
