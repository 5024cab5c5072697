//! Packing: the kept bits of each element side by side, a little-endian bit stream (`:packed`, `int4`, `int2`).
//!
//! The kept bits of an element, closed up in their order, are its packed form: sign uppermost, then exponent, then
//! mantissa. That is one bit extraction a machine word, whatever the format.

use crate::{format::Format, plane::PlaneMask};

/// Appends the bits in `keep` of each element in `words` to `out`. The elements are a multiple of eight, so the bytes come out whole.
pub(super) fn pack(format: Format, keep: PlaneMask, words: &[u8], out: &mut Vec<u8>) {
    let elements = words.len() * 8 / format.bits() as usize;
    let bytes = elements * keep.count() as usize / 8;
    let start = out.len();
    // The last store may reach past the stream's end.
    out.resize(start + bytes + 8, 0);
    let stream = &mut out[start..];
    let keep = replicate(format, keep);
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("bmi2") {
        // SAFETY: the processor has BMI2.
        unsafe { pack_bmi2(keep, words, stream) };
        out.truncate(start + bytes);
        return;
    }
    pack_with(extract, keep, words, stream);
    out.truncate(start + bytes);
}

/// The mask of one element in every element of a machine word.
fn replicate(format: Format, keep: PlaneMask) -> u64 {
    let keep = u64::from(keep.0);
    match format.bits() {
        32 => keep << 32 | keep,
        16 => keep * 0x0001_0001_0001_0001,
        8 => keep * 0x0101_0101_0101_0101,
        _ => keep * 0x1111_1111_1111_1111,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi2")]
fn pack_bmi2(keep: u64, words: &[u8], stream: &mut [u8]) {
    pack_with(|word, keep| std::arch::x86_64::_pext_u64(word, keep), keep, words, stream);
}

#[expect(
    clippy::inline_always,
    reason = "it must become part of the loop that is compiled for each processor"
)]
#[inline(always)]
fn pack_with(extract: impl Fn(u64, u64) -> u64, keep: u64, words: &[u8], stream: &mut [u8]) {
    let count = keep.count_ones() as usize;
    let (mut held, mut bits, mut at) = (0_u64, 0_usize, 0);
    for word in words.chunks(8) {
        let mut bytes = [0; 8];
        bytes[..word.len()].copy_from_slice(word);
        let kept = extract(u64::from_le_bytes(bytes), keep);
        // `held` has fewer than 8 bits; what does not fit beside them goes to the next byte.
        let wide = u128::from(kept) << bits | u128::from(held);
        let total = bits + count;
        stream[at..at + 8].copy_from_slice(&wide.to_le_bytes()[..8]);
        at += total / 8;
        held = if total >= 64 { wide.to_le_bytes()[8].into() } else { stream[at].into() };
        bits = total % 8;
    }
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
            format in prop::sample::select(Format::ALL.to_vec()), keep in any::<u32>(),
            words in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let keep = PlaneMask(keep & PlaneMask::all(if format == Format::Opaque { Format::Int8 } else { format }).0);
            let group = format.bits() as usize;
            let words: Vec<u8> = words.into_iter().cycle().take(group * 12).collect();
            let words = if words.is_empty() { vec![0; group] } else { words };
            let mut out = vec![7];
            pack(format, keep, &words, &mut out);
            prop_assert_eq!(&out[1..], &slow(format, keep, &words)[..]);
            let mut stream = vec![0; out.len() + 8];
            pack_with(extract, replicate(format, keep), &words, &mut stream);
            prop_assert_eq!(&stream[..out.len() - 1], &out[1..]);
        }
    }
}
