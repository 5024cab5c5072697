//! Packing: the kept bits of each element side by side, a little-endian bit stream (`:packed`,
//! `int4`, `int2`).
//!
//! The kept bits of an element, closed up in their order, are its packed form: sign uppermost, then
//! exponent, then mantissa. That is one bit extraction a machine word, whatever the format; of
//! elements of up to 16 bits AVX-512 does a register at a time ([`avx512`]).
//!
//! A stream is made where it goes. Nothing is written behind its end.

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::{format::Format, kernel::kernels, plane::PlaneMask};

kernels! {
    /// A way to extract bits.
    enum Kernel {
        /// Plain Rust.
        Portable,
        /// The instruction `pext`.
        Bmi2: ["bmi2"],
        /// AVX-512 with VBMI, where elements have up to 16 bits.
        Avx512: ["bmi2", "avx512f", "avx512bw", "avx512vbmi"],
    }
}

/// Puts the bits in `keep` of each element in `words` into `out`, which holds just those. The
/// elements are a multiple of eight, so the bytes come out whole.
pub(super) fn pack(format: Format, keep: PlaneMask, words: &[u8], out: &mut [u8]) {
    debug_assert_eq!(out.len() * format.bits() as usize, words.len() * keep.count() as usize);
    if keep.0 != 0 {
        Kernel::best().pack(replicate(format, keep), words, out);
    }
}

impl Kernel {
    /// Packs the bits in `keep` of every four bytes of `words`.
    fn pack(self, keep: u32, words: &[u8], stream: &mut [u8]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            Self::Portable => pack_with(extract, keep, words, stream),
            // SAFETY: the processor has BMI2, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { pack_bmi2(keep, words, stream) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe {
                match half(keep) {
                    Some(half) => avx512::pack(half, words, stream),
                    None => pack_bmi2(keep, words, stream),
                }
            },
        }
    }
}

/// The mask of one element in every element of four bytes.
fn replicate(format: Format, keep: PlaneMask) -> u32 {
    match format.bits() {
        32 => keep.0,
        16 => keep.0 * 0x0001_0001,
        8 => keep.0 * 0x0101_0101,
        _ => keep.0 * 0x1111_1111,
    }
}

/// The mask of two bytes, if the upper two of the four have the same one.
#[cfg(target_arch = "x86_64")]
fn half(keep: u32) -> Option<u16> {
    u16::try_from(keep & 0xffff).ok().filter(|half| u32::from(*half) == keep >> 16)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi2")]
fn pack_bmi2(keep: u32, words: &[u8], stream: &mut [u8]) {
    pack_with(|word, keep| std::arch::x86_64::_pext_u64(word, keep), keep, words, stream);
}

#[expect(
    clippy::inline_always,
    reason = "it must become part of the loop that is compiled for each processor"
)]
#[inline(always)]
fn pack_with(extract: impl Fn(u64, u64) -> u64, keep: u32, words: &[u8], stream: &mut [u8]) {
    let keep = u64::from(keep) << 32 | u64::from(keep);
    let count = keep.count_ones();
    let (mut held, mut bits, mut at) = (0_u64, 0, 0);
    let mut append = |word: u64| {
        let kept = extract(word, keep);
        // `held` has fewer than 64 bits; what does not fit beside them is held next.
        held |= kept << bits;
        bits += count;
        if bits >= 64 {
            put(held, stream, at);
            at += 8;
            bits -= 64;
            held = if bits == 0 { 0 } else { kept >> (count - bits) };
        }
    };
    let (whole, rest) = words.as_chunks();
    for word in whole {
        append(u64::from_le_bytes(*word));
    }
    if !rest.is_empty() {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        append(u64::from_le_bytes(word));
    }
    put(held, stream, at);
}

/// Puts of `word` at `at` what is of the stream.
fn put(word: u64, stream: &mut [u8], at: usize) {
    let stream = stream.get_mut(at..).unwrap_or_default();
    let length = stream.len().min(8);
    stream[..length].copy_from_slice(&word.to_le_bytes()[..length]);
}

/// What the instruction `pext` does, by runs of the mask.
fn extract(word: u64, mut keep: u64) -> u64 {
    let (mut out, mut at) = (0, 0);
    while keep != 0 {
        let skip = keep.trailing_zeros();
        let run = (keep >> skip).trailing_ones();
        let ones = if run == 64 { u64::MAX } else { (1 << run) - 1 };
        out |= (word >> skip & ones) << at;
        at += run;
        keep &= !(ones << skip);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One bit at a time.
    fn slow(format: Format, keep: PlaneMask, words: &[u8]) -> Vec<u8> {
        let width = format.bits() as usize;
        let bits =
            (0..words.len() * 8).filter(|at| keep.has(at % width)).map(|at| words[at / 8] >> (at % 8) & 1);
        let bits: Vec<u8> = bits.collect();
        bits.chunks(8).map(|byte| byte.iter().enumerate().fold(0, |sum, (at, bit)| sum | bit << at)).collect()
    }

    proptest! {
        #[test]
        fn packing_closes_up_the_kept_bits(
            format in prop::sample::select(Format::ALL.to_vec()), keep in any::<u32>(), shape in 0..4_u32,
            noise in prop::collection::vec(any::<u8>(), 1..40), groups in 0_usize..40,
        ) {
            // Noise, sparse, dense and the upper bits.
            let shaped = match shape {
                0 => keep,
                1 => keep & keep >> 7 & keep << 3,
                2 => keep | keep >> 5 | keep << 9,
                _ => u32::MAX << (keep % 32) >> (32 - format.bits()),
            };
            let all = if format == Format::Opaque { 0xff } else { PlaneMask::all(format).0 };
            let keep = PlaneMask(shaped & all);
            // Eight elements have as many bytes as one has bits.
            let words: Vec<u8> = noise.into_iter().cycle().take(groups * format.bits() as usize).collect();
            let want = slow(format, keep, &words);
            let mut out = vec![0; want.len()];
            pack(format, keep, &words, &mut out);
            prop_assert_eq!(&out, &want);
            for kernel in Kernel::available().into_iter().filter(|_| keep.0 != 0) {
                let mut stream = vec![0xa5; want.len() + 64];
                kernel.pack(replicate(format, keep), &words, &mut stream[..want.len()]);
                prop_assert_eq!(&stream[..want.len()], &want[..]);
                prop_assert!(stream[want.len()..].iter().all(|byte| *byte == 0xa5));
            }
        }
    }
}
