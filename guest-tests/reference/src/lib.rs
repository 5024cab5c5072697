//! What every view is, written down slowly and obviously. The device is judged by this crate, so it
//! shares no code with it and depends on no other crate of the workspace.
//!
//! # The rules
//!
//! A tensor is its bytes: elements in address order, each little-endian; `int4` elements two to a
//! byte, low nibble first, and so `fp4_e2m1`. The lowest `M` bits of a float are its mantissa,
//! above it lie the `E` exponent bits, above them the sign. In all but the two fp6, whose six bits
//! lie in a byte each, the sign is the uppermost bit. A view is named by its spelling:
//!
//! | spelling | of | an element of the view |
//! |---|---|---|
//! | `full` | everything | the element as it is |
//! | `eXmY` | floats | sign, top X exponent and top Y mantissa bits; the others zero; never looks at values |
//! | `eXmY+gD` | floats, X = E | rounded to Y mantissa bits from the top min(Y + D, M), as below |
//! | `eXmY+dD` | floats, X + D ≤ E | the exponent rounded to X bits from the top X + D, as below |
//! | `eXmY+dD+gF` | floats, X + D = E | the former of the latter |
//! | `…:packed` | any of these | the 1 + X + Y kept bits, element i in bits [iN, (i+1)N) of the stream |
//! | `bf16` | fp32, fp16 | converted, as below |
//! | `fp8_e4m3fn`, `fp8_e5m2` | fp32, fp16, bf16 | converted, as below |
//! | `fp6_e3m2`, `fp6_e2m3`, `fp4_e2m1` | fp32, fp16, bf16, fp8 | converted, as below |
//! | `int4` | int8 | x >> 4, two to a byte, low bits first |
//! | `int2` | int8, int4 | x >> 6, or x >> 2 of int4, four to a byte, low bits first |
//!
//! **Rounding** (`+gD`, D ≥ 1; `+g0` is the same as no suffix). Mantissa bits below the top min(Y +
//! D, M) count as zero. Exponent and mantissa, read as one whole number, are rounded to the nearest
//! multiple of 2^(M−Y); of two equally near the one whose lowest kept bit is zero wins (at Y = 0
//! that is the exponent's lowest bit). So a carry runs into the exponent and may reach infinity. An
//! element whose exponent is all ones is truncated instead, in every format, also in `fp8_e4m3fn`
//! where such an element may be finite. The sign stays.
//!
//! **Rounding an exponent** (`+dD`, D 1 or 2; `+d0` is the same as no suffix). Exponent bits below
//! the top X + D count as zero. The exponent's field, as a whole number by itself, becomes the
//! nearest multiple of 2^(E−X); of two equally near the even one. Where that would be 2^E it is
//! the multiple before. Sign and mantissa stay what they are without; with `+gF` besides, the
//! element is rounded by `+gF` first.
//!
//! **Packing.** Bit k of the stream is bit k mod 8 of byte k div 8; an element's sign is its
//! uppermost bit; the last byte's unused bits are zero.
//!
//! **Conversion** to a target with `Mt` mantissa bits. `+gN` gives the guard count g (2 unless
//! given) and, for all targets but bf16, `@S` behind it a decimal exponent S in −64..=64 (0 unless
//! given). With t the element whose mantissa bits below the top min(Mt + g, M) are taken as zero,
//! the result is the target's finite value nearest to t / 2^S (exactly divided), ties to the even
//! code; so whatever lies beyond the largest finite value, infinity included, becomes that value
//! with its sign, and −0 stays −0. NaN becomes the target's quiet NaN, its sign kept, or the
//! largest value with its sign where the target has no NaN. Truncation is literal: a NaN whose
//! fetched mantissa bits are all zero is an infinity by then. These are the bytes of `np.clip(t /
//! 2**S, -max, max).astype(target)` with `ml_dtypes`, in single precision; see `golden/`.
//!
//! **Spelling** is strict: lower case, numbers without leading zeros or signs (S alone may have a
//! minus, `-0` not), nothing before, between or behind.
//!
//! **Expansion** ([`expanded`]) is no view of one tensor: it takes elements and scales together.
//!
//! **Packed windows** ([`packed_windows`]) are what is left of a tensor that somebody wants lossy.
//!
//! **Planes.** Plane i is bit i of every element. A view fetches the planes its rule reads and no
//! others; `full` reads all. Nothing is kept in planes for `opaque`.

mod element;
mod expand;
mod format;
mod packed;
mod refused;
mod spelling;
mod stream;

pub use expand::{Scales, expanded};
pub use format::{Format, UnknownFormat};
pub use packed::packed_windows;
pub use refused::Refused;

use spelling::View;

/// The bytes of the view `spelling` of a tensor whose full bytes are `full`, or why the format
/// cannot give it.
///
/// `elements` counts elements of `format`; one of [`Format::Opaque`] is a byte.
///
/// # Errors
///
/// [`Refused`] if the spelling is none, if `format` cannot give the view, or if `full` is not
/// `elements` long.
pub fn view_bytes(format: Format, spelling: &str, full: &[u8], elements: u64) -> Result<Vec<u8>, Refused> {
    let view = spelling::parse(format, spelling)?;
    let wanted = (u128::from(elements) * u128::from(format.bits())).div_ceil(8);
    if wanted != full.len() as u128 {
        return Err(Refused::Length { format, elements, wanted, found: full.len() });
    }
    let bits = format.bits();
    let each = |element_bits: u32, of: &dyn Fn(u32) -> u32| {
        let mut out = stream::Writer::new();
        // What an element becomes depends on its bits alone: where they are few, it is found once.
        let mut known = vec![None; if bits <= 16 { 1 << bits } else { 0 }];
        for i in 0..elements {
            let x = stream::read(full, i, bits);
            let became = match known.get_mut(x as usize) {
                Some(known) => *known.get_or_insert_with(|| of(x)),
                None => of(x),
            };
            out.push(became, element_bits);
        }
        out.finish()
    };
    Ok(match view {
        View::Full => full.to_vec(),
        View::Top { exponent, exponent_guards, mantissa, guards, packed } => {
            let top = |x| {
                let whole = element::top(format, exponent + exponent_guards, mantissa, guards, x);
                element::round_exponent(format, exponent, whole)
            };
            if packed {
                each(1 + exponent + mantissa, &|x| element::pack(format, exponent, mantissa, top(x)))
            } else {
                each(bits, &top)
            }
        }
        View::Converted { target, guards, scale } => {
            let finite = element::finite_values(target);
            each(target.bits(), &|x| element::convert(format, target, &finite, guards, scale, x))
        }
        View::HighBits { kept } => each(kept, &|x| x >> (bits - kept)),
    })
}

/// Which planes (bit numbers of an element, most significant first) a device must fetch for the
/// view.
///
/// # Errors
///
/// [`Refused`] if the spelling is none or `format` cannot give the view.
pub fn planes(format: Format, spelling: &str) -> Result<Vec<u32>, Refused> {
    let view = spelling::parse(format, spelling)?;
    let (bits, mantissa_bits) = (format.bits(), format.mantissa_bits());
    // Sign, the top `exponent` exponent bits and the top `mantissa` mantissa bits.
    let float = |exponent: u32, mantissa: u32| {
        let sign = mantissa_bits + format.exponent_bits();
        let mut planes = vec![sign];
        planes.extend((mantissa_bits..sign).rev().take(exponent as usize));
        planes.extend((0..mantissa_bits).rev().take(mantissa as usize));
        planes
    };
    Ok(match view {
        View::Full if format == Format::Opaque => Vec::new(),
        View::Full => (0..bits).rev().collect(),
        View::Top { exponent, exponent_guards, mantissa, guards, .. } => {
            float(exponent + exponent_guards, mantissa.saturating_add(guards))
        }
        View::Converted { target, guards, .. } => {
            float(format.exponent_bits(), target.mantissa_bits().saturating_add(guards))
        }
        View::HighBits { kept } => (bits - kept..bits).rev().collect(),
    })
}
