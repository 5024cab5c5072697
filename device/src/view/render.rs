//! A view's bytes from words in which only its planes are set.

use super::{Kind, View};
use crate::{BlockWords, format::Format};

impl View {
    /// Appends the view's bytes of elements `from..to` of a block to `out`.
    ///
    /// `words` have every plane outside [`View::mask`] zero. `from` and `to` are multiples of eight, so that the bytes of
    /// one range end where those of the next begin, whatever the view's bits.
    pub fn render(&self, words: &BlockWords, from: usize, to: usize, out: &mut Vec<u8>) {
        debug_assert!(from.is_multiple_of(8) && to.is_multiple_of(8) && from <= to);
        let width = self.format().bits() as usize;
        let words = &words[from * width / 8..to * width / 8];
        let mut stream = Stream { out, bits: self.bits(), held: 0, count: 0 };
        match self.kind() {
            Kind::Full | Kind::Top { guard: 0, packed: false, .. } => stream.out.extend_from_slice(words),
            Kind::Top { exponent, mantissa, guard, packed } => {
                let top = Top::new(self.format(), exponent, mantissa, guard);
                if packed {
                    each(self.format(), words, |bits| stream.push(top.pack(top.round(bits))));
                } else {
                    each(self.format(), words, |bits| stream.push(top.round(bits)));
                }
            }
            Kind::Converted { .. } => {
                let converter = self.converter.as_ref().expect("converted views have one");
                each(self.format(), words, |bits| stream.push(converter.apply(bits)));
            }
            Kind::Integer { bits } => {
                each(self.format(), words, |element| stream.push(element >> (8 - bits)));
            }
        }
    }
}

/// Rounding at, and packing of, the upper bits of the fields.
struct Top {
    format: Format,
    exponent: u32,
    mantissa: u32,
    /// Mantissa bits below the kept ones that were fetched to round by.
    guard: u32,
}

impl Top {
    fn new(format: Format, exponent: u32, mantissa: u32, guard: u32) -> Self {
        Self { format, exponent, mantissa, guard: guard.min(format.mantissa_bits() - mantissa) }
    }

    /// `bits` rounded to nearest even at the last kept mantissa bit; all-ones exponents are truncated.
    fn round(&self, bits: u32) -> u32 {
        let dropped = self.format.mantissa_bits() - self.mantissa;
        if self.guard == 0 || dropped == 0 {
            return bits;
        }
        let sign = bits & 1 << (self.format.bits() - 1);
        let magnitude = bits ^ sign;
        let kept = magnitude >> dropped << dropped;
        let all_ones = (1 << self.format.exponent_bits()) - 1;
        if magnitude >> self.format.mantissa_bits() == all_ones {
            return sign | kept;
        }
        let (rest, half, odd) = (magnitude - kept, 1 << (dropped - 1), kept >> dropped & 1);
        let up = u32::from(rest > half || (rest == half && odd == 1));
        sign | (kept + (up << dropped))
    }

    /// Sign, kept exponent bits and kept mantissa bits side by side.
    fn pack(&self, bits: u32) -> u32 {
        let (e, m) = (self.format.exponent_bits(), self.format.mantissa_bits());
        let sign = bits >> (e + m) & 1;
        let exponent = bits >> (m + e - self.exponent) & ((1 << self.exponent) - 1);
        let mantissa = bits >> (m - self.mantissa) & ((1 << self.mantissa) - 1);
        sign << (self.exponent + self.mantissa) | exponent << self.mantissa | mantissa
    }
}

/// Calls `each` with the bits of every element in `words`.
fn each(format: Format, words: &[u8], mut each: impl FnMut(u32)) {
    match format.bits() {
        32 => words.chunks_exact(4).for_each(|w| each(u32::from_le_bytes(w.try_into().expect("four bytes")))),
        16 => words.chunks_exact(2).for_each(|w| each(u16::from_le_bytes([w[0], w[1]]).into())),
        8 => words.iter().for_each(|word| each((*word).into())),
        _ => words.iter().for_each(|pair| {
            each((pair & 15).into());
            each((pair >> 4).into());
        }),
    }
}

/// A little-endian bit stream: element `i` in bits `[i·N, (i+1)·N)`.
struct Stream<'a> {
    out: &'a mut Vec<u8>,
    bits: u32,
    held: u64,
    count: u32,
}

impl Stream<'_> {
    fn push(&mut self, element: u32) {
        self.held |= u64::from(element) << self.count;
        self.count += self.bits;
        while self.count >= 8 {
            self.out.push(self.held.to_le_bytes()[0]);
            self.held >>= 8;
            self.count -= 8;
        }
    }
}
