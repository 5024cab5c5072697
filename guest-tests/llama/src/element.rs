//! Elements of a view of a bf16 tensor, as numbers.
//!
//! | view | an element is |
//! |---|---|
//! | `full`, `eXmY`, `eXmY+dN`, `eXmY+gN` | two bytes, the upper half of an `f32` |
//! | all but the first `:packed` | 1 + X + Y bits in a stream whose lowest bit comes first: sign, then exponent, then mantissa bits |
//! | `fp8_e4m3fn`, `fp8_e5m2`, `+gN`, `@S` | a byte, the value divided by 2^S |

/// Reads the elements of one view.
#[derive(Clone, Debug, PartialEq)]
pub struct Element {
    kind: Kind,
    bits: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Bf16,
    Packed {
        exponent: usize,
        mantissa: usize,
    },
    /// The value of each code.
    Table(Box<[f32; 256]>),
}

/// A view that no bf16 tensor has, or none whose elements are numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "weights and KV caches in bf16 cannot be read through the view {view:?}: use full, eXmY (X up to 8, Y up to 7, +dN, +gN, :packed), fp8_e4m3fn or fp8_e5m2"
)]
pub struct UnreadableView {
    /// Its spelling.
    pub view: String,
}

impl Element {
    /// The elements of the view with this spelling.
    ///
    /// # Errors
    /// [`UnreadableView`].
    pub fn of(view: &str) -> Result<Self, UnreadableView> {
        parse(view).ok_or_else(|| UnreadableView { view: view.to_owned() })
    }

    /// Bits that an element takes.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// The bytes that hold `count` elements from element `first` on, as offset and length.
    pub fn extent(&self, first: usize, count: usize) -> (usize, usize) {
        let start = first * self.bits / 8;
        (start, ((first + count) * self.bits).div_ceil(8) - start)
    }

    /// The numbers from element `first` on; `bytes` are those of [`Self::extent`].
    pub fn read(&self, bytes: &[u8], first: usize, out: &mut [f32]) {
        match &self.kind {
            Kind::Bf16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = from_bf16(u16::from_le_bytes([bytes[0], bytes[1]]));
                }
            }
            Kind::Table(table) => {
                for (out, &code) in out.iter_mut().zip(bytes) {
                    *out = table[usize::from(code)];
                }
            }
            Kind::Packed { exponent, mantissa } => {
                let start = first * self.bits % 8;
                for (index, out) in out.iter_mut().enumerate() {
                    let code = bits(bytes, start + index * self.bits, self.bits);
                    let sign = code >> (exponent + mantissa);
                    let number = code & ((1 << (exponent + mantissa)) - 1);
                    let (exponent_field, mantissa_field) =
                        (number >> mantissa, number & ((1 << mantissa) - 1));
                    let word =
                        sign << 15 | exponent_field << (15 - exponent) | mantissa_field << (7 - mantissa);
                    *out = f32::from_bits(word << 16);
                }
            }
        }
    }
}

/// `count` bits from bit `from` of `bytes` on, the lowest first.
fn bits(bytes: &[u8], from: usize, count: usize) -> u32 {
    (0..count).fold(0, |number, index| {
        let at = from + index;
        number | u32::from(bytes[at / 8] >> (at % 8) & 1) << index
    })
}

/// The value of a bf16.
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bf16 nearest to `value`, ties to even; a NaN becomes the quiet one of its sign.
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let upper = u16::try_from(bits >> 16).expect("sixteen bits");
    if value.is_nan() {
        return upper & 0x8000 | 0x7fc0;
    }
    let (below, half) = (bits & 0xffff, 0x8000);
    let up = below > half || (below == half && upper & 1 == 1);
    // The carry may run into the exponent, up to infinity.
    upper + u16::from(up)
}

fn parse(view: &str) -> Option<Element> {
    if view == "full" {
        return Some(Element { kind: Kind::Bf16, bits: 16 });
    }
    for (name, exponent, mantissa) in [("fp8_e4m3fn", 4, 3), ("fp8_e5m2", 5, 2)] {
        if let Some(rest) = view.strip_prefix(name) {
            let (guards, scale) = rest.split_once('@').unwrap_or((rest, "0"));
            is_guard(guards).then_some(())?;
            let scale = scale.parse().ok().filter(|scale| (-64..=64).contains(scale))?;
            return Some(Element { kind: Kind::Table(fp8(exponent, mantissa, scale)), bits: 8 });
        }
    }
    let (kept, packed) = view.strip_suffix(":packed").map_or((view, false), |kept| (kept, true));
    let (exponent, rest) = kept.strip_prefix('e')?.split_once('m')?;
    let (mantissa, guards) = rest.find('+').map_or((rest, ""), |at| rest.split_at(at));
    let guards = guards.strip_prefix("+d1").or(guards.strip_prefix("+d2")).unwrap_or(guards);
    is_guard(guards).then_some(())?;
    let exponent = exponent.parse().ok().filter(|bits| *bits <= 8)?;
    let mantissa = mantissa.parse().ok().filter(|bits| *bits <= 7)?;
    Some(if packed {
        Element { kind: Kind::Packed { exponent, mantissa }, bits: 1 + exponent + mantissa }
    } else {
        Element { kind: Kind::Bf16, bits: 16 }
    })
}

/// Whether this is nothing or `+gN`.
fn is_guard(text: &str) -> bool {
    text.is_empty() || text.strip_prefix("+g").is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The value of each code of an 8-bit float times 2^`scale`. With four exponent bits there is no
/// infinity, and only all ones is NaN; with five it is as in IEEE 754.
fn fp8(exponent_bits: u32, mantissa_bits: u32, scale: i32) -> Box<[f32; 256]> {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let (all_exponent, all_mantissa) = ((1 << exponent_bits) - 1, (1 << mantissa_bits) - 1);
    let value = |code: u8| {
        let exponent = code >> mantissa_bits & all_exponent;
        let mantissa = code & all_mantissa;
        let leading = u8::from(exponent > 0) << mantissa_bits;
        let shift = i32::from(exponent.max(1)) - bias - mantissa_bits.cast_signed();
        let magnitude = match (exponent == all_exponent, exponent_bits) {
            (true, 4) if mantissa == all_mantissa => f32::NAN,
            (true, 5) if mantissa > 0 => f32::NAN,
            (true, 5) => f32::INFINITY,
            _ => libm::scalbnf(f32::from(leading | mantissa), shift + scale),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    };
    let mut table = Box::new([0.0; 256]);
    for (code, slot) in (0..=u8::MAX).zip(table.iter_mut()) {
        *slot = value(code);
    }
    table
}
