//! Elements taken apart: the bits that are coded jointly as a byte an element, its *value*, and the
//! others, its *rest*, as one to three.
//!
//! With `j` joint planes above `l` lower ones, an element is, from the top: sign, value (`j` bits),
//! lower bits (`l`). Its rest is the sign above the lower bits: bit `l` and bits `l − 1..0`. What
//! has no sign, or has it further down, has its uppermost bit in the sign's place.
//! Integers are folded on the way, and unfolded back. Every kernel is this source, compiled for
//! what the processor has.

#![expect(
    clippy::inline_always,
    clippy::cast_possible_truncation,
    reason = "only inlined code takes on its caller's processor features; fields are cut to their bits on purpose"
)]

use super::{
    Kernel, MAX_ELEMENTS, joint_planes,
    lines::Lines,
    whole::{BESIDE, PLANE},
};
use crate::{
    BlockWords,
    format::Format,
    plane::{self, Planes},
};

/// Bytes of rest an element has at most.
const MAX_REST: usize = 3;

/// Planes below the joint ones.
const fn lower_planes(format: Format) -> usize {
    format.planes() - 1 - joint_planes(format)
}

/// Scratch for one block's values and rests.
pub(super) struct Fields {
    values: Lines<u8>,
    rest: [Lines<u8>; MAX_REST],
}

impl Fields {
    /// Scratch for a block of any format.
    pub(super) fn new() -> Self {
        let bytes = || Lines::new(MAX_ELEMENTS);
        Self { values: bytes(), rest: [bytes(), bytes(), bytes()] }
    }

    /// As many values as a block of `format` has.
    pub(super) fn values(&mut self, format: Format) -> &mut [u8] {
        &mut self.values[..8 * format.plane_bytes()]
    }

    /// Scratch for the values and the rests of a block of bf16, and for the planes of these.
    pub(super) fn of_bf16(&mut self) -> (&mut [u8], &mut [u8], &mut [[u8; PLANE]; BESIDE]) {
        let elements = 8 * PLANE;
        let [rests, planes, _] = &mut self.rest;
        let planes =
            planes.as_chunks_mut().0.first_chunk_mut().expect("more elements than bits beside a value");
        (&mut self.values[..elements], &mut rests[..elements], planes)
    }

    /// Joins the planes beside the values.
    pub(super) fn rest(&mut self, format: Format, planes: &Planes<'_>) {
        let lower = lower_planes(format);
        let plane_of = |bit: usize| match bit {
            bit if bit < lower => planes[bit],
            bit if bit == lower => planes[bit + joint_planes(format)],
            _ => &plane::ZEROS[..],
        };
        for (byte, rest) in self.rest.iter_mut().take(lower / 8 + 1).enumerate() {
            let planes = std::array::from_fn(|bit| plane_of(8 * byte + bit));
            plane::join_bytes(&planes, &mut rest[..8 * format.plane_bytes()]);
        }
    }
}

impl Kernel {
    /// Takes the values out of a block of words, by this kernel, which must be available.
    pub(super) fn take(self, format: Format, words: &BlockWords, values: &mut [u8]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            Self::Portable => take_here(format, words, values),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { x86::take_avx2(format, words, values) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::take_avx512(format, words, values) },
        }
    }

    /// Takes a block of bf16 apart to values and rests, by this kernel, which must be available.
    pub(super) fn take_bf16(self, words: &BlockWords, values: &mut [u8], rests: &mut [u8]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { x86::take_bf16_avx2(words, values, rests) },
            _ => take_bf16_here(words, values, rests),
        }
    }

    /// Puts values and rests together, by this kernel, which must be available.
    pub(super) fn put(self, format: Format, fields: &Fields, wanted: u8, words: &mut BlockWords) {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            Self::Portable => put_here(format, fields, wanted, words),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { x86::put_avx2(format, fields, wanted, words) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::put_avx512(format, fields, wanted, words) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BlockWords, Fields, Format, put_here, take_bf16_here, take_here};

    #[target_feature(enable = "avx2")]
    pub(super) fn take_avx2(format: Format, words: &BlockWords, values: &mut [u8]) {
        take_here(format, words, values);
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn take_avx512(format: Format, words: &BlockWords, values: &mut [u8]) {
        take_here(format, words, values);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn take_bf16_avx2(words: &BlockWords, values: &mut [u8], rests: &mut [u8]) {
        take_bf16_here(words, values, rests);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn put_avx2(format: Format, fields: &Fields, wanted: u8, words: &mut BlockWords) {
        put_here(format, fields, wanted, words);
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn put_avx512(format: Format, fields: &Fields, wanted: u8, words: &mut BlockWords) {
        put_here(format, fields, wanted, words);
    }
}

/// Folds an int8, or unfolds it: see [`plane`].
#[inline(always)]
const fn fold_byte(x: u8) -> u8 {
    x ^ (x.cast_signed() >> 7).cast_unsigned() & 0x7f
}

/// Folds two int4, or unfolds them.
#[inline(always)]
const fn fold_nibbles(x: u8) -> u8 {
    let signs = x >> 3 & 0x11;
    x ^ (signs | signs << 1 | signs << 2)
}

#[inline(always)]
fn take_here(format: Format, words: &BlockWords, values: &mut [u8]) {
    match format {
        Format::Fp32 => {
            for (word, value) in words.as_chunks().0.iter().zip(values) {
                *value = (u32::from_le_bytes(*word) >> 23) as u8;
            }
        }
        Format::Bf16 => {
            for (word, value) in words.as_chunks().0.iter().zip(values) {
                *value = (u16::from_le_bytes(*word) >> 7) as u8;
            }
        }
        Format::Fp16 => {
            for (word, value) in words.as_chunks().0.iter().zip(values) {
                *value = (u16::from_le_bytes(*word) >> 10 & 31) as u8;
            }
        }
        Format::Fp8E4m3fn | Format::Fp6E2m3 => {
            words.iter().zip(values).for_each(|(word, value)| *value = word >> 3 & 15);
        }
        Format::E8m0 => words.iter().zip(values).for_each(|(word, value)| *value = word & 0x7f),
        Format::Int8 => {
            words.iter().zip(values).for_each(|(word, value)| *value = fold_byte(*word) >> 3 & 15);
        }
        Format::Fp8E5m2 | Format::Fp6E3m2 => {
            words.iter().zip(values).for_each(|(word, value)| *value = word >> 2 & 31);
        }
        Format::Fp4E2m1 => {
            for (word, pair) in words.iter().zip(values.as_chunks_mut().0) {
                let word = u16::from(*word);
                *pair = ((word >> 1 | word << 3) & 0x0303).to_le_bytes();
            }
        }
        Format::Int4 => {
            for (word, pair) in words.iter().zip(values.as_chunks_mut().0) {
                let word = u16::from(fold_nibbles(*word));
                *pair = ((word | word << 4) & 0x0707).to_le_bytes();
            }
        }
        Format::Opaque => unreachable!("opaque blocks have no planes"),
    }
}

#[inline(always)]
fn take_bf16_here(words: &BlockWords, values: &mut [u8], rests: &mut [u8]) {
    for ((word, value), rest) in words.as_chunks().0.iter().zip(values).zip(rests) {
        let word = u16::from_le_bytes(*word);
        *value = (word >> 7) as u8;
        *rest = (word >> 8 & 0x80 | word & 0x7f) as u8;
    }
}

#[inline(always)]
fn put_here(format: Format, fields: &Fields, wanted: u8, words: &mut BlockWords) {
    let values = fields.values.iter();
    let [low, middle, high] = fields.rest.each_ref().map(|rest| &rest[..]);
    match format {
        Format::Fp32 => {
            let rests = low.iter().zip(middle).zip(high);
            for ((word, value), ((low, middle), high)) in
                words.as_chunks_mut().0.iter_mut().zip(values).zip(rests)
            {
                let lower = u32::from(*low) | u32::from(*middle) << 8 | u32::from(*high & 0x7f) << 16;
                let value = u32::from(*value & wanted) << 23;
                *word = (u32::from(*high & 0x80) << 24 | value | lower).to_le_bytes();
            }
        }
        Format::Bf16 => {
            for ((word, value), rest) in words.as_chunks_mut().0.iter_mut().zip(values).zip(low) {
                let (value, rest) = (u16::from(*value & wanted), u16::from(*rest));
                *word = ((rest & 0x80) << 8 | value << 7 | rest & 0x7f).to_le_bytes();
            }
        }
        Format::Fp16 => {
            let rests = low.iter().zip(middle);
            for ((word, value), (low, high)) in words.as_chunks_mut().0.iter_mut().zip(values).zip(rests) {
                let (value, high) = (u16::from(*value & wanted), u16::from(*high));
                *word = ((high & 4) << 13 | value << 10 | (high & 3) << 8 | u16::from(*low)).to_le_bytes();
            }
        }
        Format::Fp8E4m3fn | Format::Fp6E2m3 => {
            for ((word, value), rest) in words.iter_mut().zip(values).zip(low) {
                *word = (rest & 8) << 4 | (value & wanted) << 3 | rest & 7;
            }
        }
        Format::Int8 => {
            for ((word, value), rest) in words.iter_mut().zip(values).zip(low) {
                *word = fold_byte((rest & 8) << 4 | (value & wanted) << 3 | rest & 7);
            }
        }
        Format::E8m0 => {
            for ((word, value), rest) in words.iter_mut().zip(values).zip(low) {
                *word = (rest & 1) << 7 | value & wanted;
            }
        }
        Format::Fp4E2m1 => {
            let wanted = u16::from(wanted) * 0x0101;
            let pairs = fields.values.as_chunks().0.iter().zip(low.as_chunks().0);
            for (word, (values, rest)) in words.iter_mut().zip(pairs) {
                let rest = u16::from_le_bytes(*rest);
                let value = u16::from_le_bytes(*values) & wanted;
                let pair = (rest & 0x0202) << 2 | value << 1 | rest & 0x0101;
                *word = (pair | pair >> 4) as u8;
            }
        }
        Format::Fp8E5m2 | Format::Fp6E3m2 => {
            for ((word, value), rest) in words.iter_mut().zip(values).zip(low) {
                *word = (rest & 4) << 5 | (value & wanted) << 2 | rest & 3;
            }
        }
        Format::Int4 => {
            let wanted = u16::from(wanted) * 0x0101;
            let pairs = fields.values.as_chunks().0.iter().zip(low.as_chunks().0);
            for (word, (values, rest)) in words.iter_mut().zip(pairs) {
                let pair = u16::from_le_bytes(*values) & wanted | u16::from_le_bytes(*rest) << 3;
                *word = fold_nibbles((pair | pair >> 4) as u8);
            }
        }
        Format::Opaque => unreachable!("opaque blocks have no planes"),
    }
}
