//! Types of tensors in GGUF files: numbers, or blocks of small ones that share a scale.
//!
//! | type | elements of a block | an element is |
//! |---|---|---|
//! | F32, F16, BF16 | 1 | itself |
//! | `Q8_0` | 32 | scale · i8 |
//! | `Q4_0`, `Q5_0` | 32 | scale · (q − 8), scale · (q − 16) |
//! | `Q4_1`, `Q5_1` | 32 | scale · q + least |
//!
//! Scales and least numbers are F16; of a block of four or five bits, the first half of the
//! elements is in the lower halves of the bytes.

use crate::element::from_bf16;

/// Elements of a quantised block.
const BLOCK: usize = 32;

/// How a type is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    kind: Kind,
    elements: usize,
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    F32,
    F16,
    Bf16,
    Q8,
    /// Bits of an element, and whether a block has a least number.
    Small {
        bits: usize,
        least: bool,
    },
}

/// A type that is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("type {kind} of GGUF is not read; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are")]
pub struct UnreadableType {
    /// Its number.
    pub kind: u32,
}

impl Blocks {
    /// The type of this number.
    ///
    /// # Errors
    /// [`UnreadableType`].
    pub fn of(kind: u32) -> Result<Self, UnreadableType> {
        let small = |bits, least| Kind::Small { bits, least };
        let (kind, elements, bytes) = match kind {
            0 => (Kind::F32, 1, 4),
            1 => (Kind::F16, 1, 2),
            2 => (small(4, false), BLOCK, 18),
            3 => (small(4, true), BLOCK, 20),
            6 => (small(5, false), BLOCK, 22),
            7 => (small(5, true), BLOCK, 24),
            8 => (Kind::Q8, BLOCK, 34),
            30 => (Kind::Bf16, 1, 2),
            kind => return Err(UnreadableType { kind }),
        };
        Ok(Self { kind, elements, bytes })
    }

    /// Whether elements are bf16.
    pub fn is_bf16(self) -> bool {
        self.kind == Kind::Bf16
    }

    /// Bytes of so many elements, if they are whole blocks.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        let whole = elements.is_multiple_of(self.elements);
        (elements / self.elements).checked_mul(self.bytes).filter(|_| whole)
    }

    /// Hands the elements in `bytes`, whole blocks, to `each`, in order.
    pub fn read(self, bytes: &[u8], mut each: impl FnMut(f32)) {
        for block in bytes.chunks_exact(self.bytes) {
            match self.kind {
                Kind::F32 => each(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                Kind::F16 => each(half(block)),
                Kind::Bf16 => each(from_bf16(u16::from_le_bytes([block[0], block[1]]))),
                Kind::Q8 => {
                    let scale = half(block);
                    block[2..].iter().for_each(|&q| each(scale * f32::from(q.cast_signed())));
                }
                Kind::Small { bits, least } => small(block, bits, least, &mut each),
            }
        }
    }
}

/// The elements of a block of four or five bits each.
fn small(block: &[u8], bits: usize, least: bool, each: &mut impl FnMut(f32)) {
    let (scale, rest) = (half(block), &block[2..]);
    let (least, rest) = if least { (Some(half(rest)), &rest[2..]) } else { (None, rest) };
    let (fifth, lower) = if bits == 5 { rest.split_at(4) } else { rest.split_at(0) };
    for index in 0..BLOCK {
        let byte = lower[index % (BLOCK / 2)];
        let four = if index < BLOCK / 2 { byte & 0xf } else { byte >> 4 };
        let fifth = fifth.get(index / 8).map_or(0, |byte| byte >> (index % 8) & 1);
        let q = f32::from(four | fifth << 4);
        each(match least {
            Some(least) => scale * q + least,
            None => scale * (q - if bits == 5 { 16.0 } else { 8.0 }),
        });
    }
}

/// The F16 at the beginning of `bytes`.
fn half(bytes: &[u8]) -> f32 {
    let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
    let (exponent, mantissa) = (i32::from(bits >> 10 & 0x1f), bits & 0x3ff);
    let magnitude = match exponent {
        0 => libm::scalbnf(f32::from(mantissa), -24),
        31 if mantissa > 0 => f32::NAN,
        31 => f32::INFINITY,
        _ => libm::scalbnf(f32::from(mantissa | 0x400), exponent - 25),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: u32, bytes: &[u8]) -> Vec<f32> {
        let mut out = Vec::new();
        Blocks::of(kind).unwrap().read(bytes, |x| out.push(x));
        out
    }

    #[test]
    fn halves_are_the_numbers_they_stand_for() {
        for (bits, value) in [
            (0x3c00_u16, 1.0),
            (0xc000, -2.0),
            (0x0001, 5.960_464_5e-8),
            (0x03ff, 6.097_555e-5),
            (0x7bff, 65504.0),
            (0x7c00, f32::INFINITY),
        ] {
            assert_eq!(read(1, &bits.to_le_bytes()), [value]);
        }
        assert!(read(1, &0x7e00_u16.to_le_bytes())[0].is_nan());
    }

    #[test]
    fn blocks_have_their_halves_in_halves_of_bytes() {
        // Scale 2, least 0.5 where there is one.
        let (scale, least) = (0x4000_u16.to_le_bytes(), 0x3800_u16.to_le_bytes());
        let lower: Vec<u8> = (0..16).map(|q| q | (15 - q) << 4).collect();
        let q: Vec<f32> = (0..16_u8).chain((0..16).rev()).map(f32::from).collect();
        let of = |f: &dyn Fn(f32) -> f32| q.iter().map(|q| f(*q)).collect::<Vec<_>>();
        assert_eq!(read(2, &[&scale[..], &lower].concat()), of(&|q| 2.0 * (q - 8.0)));
        assert_eq!(read(3, &[&scale[..], &least, &lower].concat()), of(&|q| 2.0 * q + 0.5));
        // The fifth bit of the elements from 8 on.
        let fifth = [0, 0xff, 0xff, 0xff];
        let five = |f: &dyn Fn(f32) -> f32| {
            let with = |(index, q): (usize, &f32)| f(q + if index < 8 { 0.0 } else { 16.0 });
            q.iter().enumerate().map(with).collect::<Vec<_>>()
        };
        assert_eq!(read(6, &[&scale[..], &fifth, &lower].concat()), five(&|q| 2.0 * (q - 16.0)));
        assert_eq!(read(7, &[&scale[..], &least, &fifth, &lower].concat()), five(&|q| 2.0 * q + 0.5));
        let bytes: Vec<u8> = (0..32).map(|q: i8| (q - 16).cast_unsigned()).collect();
        let want: Vec<f32> = (0..32_i8).map(|q| 2.0 * f32::from(q - 16)).collect();
        assert_eq!(read(8, &[&scale[..], &bytes].concat()), want);
    }

    #[test]
    fn sizes_are_those_of_whole_blocks() {
        assert_eq!(Blocks::of(3).unwrap().bytes(64), Some(40));
        assert_eq!(Blocks::of(3).unwrap().bytes(65), None);
        assert_eq!(Blocks::of(0).unwrap().bytes(usize::MAX), None);
        assert_eq!(Blocks::of(12), Err(UnreadableType { kind: 12 }));
    }
}
