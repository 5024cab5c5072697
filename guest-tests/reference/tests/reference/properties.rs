//! What holds between views, and between views and plain arithmetic, whatever the bytes are.

use lamina_reference::{Format, planes, view_bytes};
use proptest::prelude::*;

const FLOATS: [Format; 5] = [Format::Fp32, Format::Fp16, Format::Bf16, Format::Fp8E4m3fn, Format::Fp8E5m2];
/// Those that fp8 views are made from.
const CONVERTIBLE: [Format; 3] = [Format::Fp32, Format::Fp16, Format::Bf16];

/// One of `formats`, an X and a Y that it has, and a tensor of up to 40 elements.
fn tensor_of(formats: &'static [Format]) -> impl Strategy<Value = (Format, u32, u32, Vec<u8>)> {
    proptest::sample::select(formats).prop_flat_map(|format| {
        let bytes = format.bits() as usize / 8;
        let elements = proptest::collection::vec(proptest::collection::vec(any::<u8>(), bytes), 0..40);
        (
            Just(format),
            0..=format.exponent_bits(),
            0..=format.mantissa_bits(),
            elements.prop_map(|e| e.concat()),
        )
    })
}

/// [`tensor_of`] any float format.
fn tensor() -> impl Strategy<Value = (Format, u32, u32, Vec<u8>)> {
    tensor_of(&FLOATS)
}

fn view(format: Format, spelling: &str, full: &[u8]) -> Vec<u8> {
    let elements = full.len() as u64 * 8 / u64::from(format.bits());
    view_bytes(format, spelling, full, elements).unwrap_or_else(|why| panic!("{format}: {why}"))
}

/// The elements of a float tensor's bytes.
fn codes(format: Format, bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks_exact(format.bits() as usize / 8)
        .map(|element| {
            let mut code = [0; 4];
            code[..element.len()].copy_from_slice(element);
            u32::from_le_bytes(code)
        })
        .collect()
}

/// The elements as numbers, by the hardware or by widening to a type that the hardware knows.
fn number(format: Format, code: u32) -> f64 {
    let single = |bits: u32| f64::from(f32::from_bits(bits));
    match format {
        Format::Fp32 => single(code),
        Format::Bf16 => single(code << 16),
        // Moved up to single precision's fields and scaled by the difference of the two biases;
        // infinity and NaN would need more and are not asked for.
        Format::Fp16 => single((code & 0x8000) << 16 | (code & 0x7fff) << 13) * 2f64.powi(127 - 15),
        Format::Fp8E5m2 => single((code & 0x80) << 24 | (code & 0x7f) << 21) * 2f64.powi(127 - 15),
        Format::Fp8E4m3fn => single((code & 0x80) << 24 | (code & 0x7f) << 20) * 2f64.powi(127 - 7),
        _ => unreachable!("only floats are asked for"),
    }
}

/// Whether every exponent bit is set: infinity and NaN, or just large in `fp8_e4m3fn`.
fn all_exponent(format: Format, code: u32) -> bool {
    let exponent = ((1 << format.exponent_bits()) - 1) << format.mantissa_bits();
    code & exponent == exponent
}

/// `x` rounded to `mantissa` bits behind the leading one, or to the same step as the least normal
/// number if it is less; ties to even, by adding and subtracting a number whose last place is the
/// step.
fn round(format: Format, mantissa: u32, x: f64) -> f64 {
    let bias = (1 << (format.exponent_bits() - 1)) - 1;
    let least = 2f64.powi(1 - bias);
    let leading = f64::from_bits(x.abs().max(least).to_bits() & (0x7ff << 52));
    let magic = leading * 2f64.powi(52 - mantissa.cast_signed());
    ((x.abs() + magic) - magic).copysign(x)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_exponent_and_mantissa_bits_are_the_full_view((format, _, _, full) in tensor(), guards in 0u32..5) {
        let (e, m) = (format.exponent_bits(), format.mantissa_bits());
        prop_assert_eq!(&view(format, "full", &full), &full);
        prop_assert_eq!(&view(format, &format!("e{e}m{m}"), &full), &full);
        prop_assert_eq!(&view(format, &format!("e{e}m{m}+g{guards}"), &full), &full);
        // Packed to all its bits, an element is itself.
        prop_assert_eq!(&view(format, &format!("e{e}m{m}:packed"), &full), &full);
    }

    #[test]
    fn a_packed_view_unpacks_to_the_view_in_the_container((format, x, y, full) in tensor(), guards in 0u32..12) {
        let (e, m) = (format.exponent_bits(), format.mantissa_bits());
        let spelling = match e - x {
            0 => format!("e{x}m{y}+g{guards}"),
            d @ 1..=2 => format!("e{x}m{y}+d{d}+g{guards}"),
            _ => format!("e{x}m{y}+d{}", guards % 3),
        };
        let wide = codes(format, &view(format, &spelling, &full));
        let packed = view(format, &format!("{spelling}:packed"), &full);
        let bits = 1 + x + y;
        prop_assert_eq!(packed.len(), (wide.len() * bits as usize).div_ceil(8));
        // The stream as one string of bits, first bit first.
        let stream: String = packed.iter().map(|byte| format!("{byte:08b}").chars().rev().collect::<String>()).collect();
        for (i, element) in wide.iter().enumerate() {
            let first_is_lowest = &stream[i * bits as usize..][..bits as usize];
            let code = u32::from_str_radix(&first_is_lowest.chars().rev().collect::<String>(), 2).expect("bits");
            let (sign, exponent, mantissa) = (code >> (x + y), (code >> y) & ((1 << x) - 1), code & ((1 << y) - 1));
            let unpacked = sign << (e + m) | exponent << (m + e - x) | mantissa << (m - y);
            prop_assert_eq!(unpacked, *element, "element {} of {} of {}", i, &spelling, format);
        }
        prop_assert!(!stream[wide.len() * bits as usize..].contains('1'), "the tail is not zero");
    }

    #[test]
    fn truncation_is_a_mask_and_the_planes_are_that_mask((format, x, y, full) in tensor()) {
        let spelling = format!("e{x}m{y}");
        let mask: u32 = planes(format, &spelling).expect("a view").iter().map(|plane| 1 << plane).sum();
        let expected: Vec<u32> = codes(format, &full).iter().map(|code| code & mask).collect();
        prop_assert_eq!(codes(format, &view(format, &spelling, &full)), expected);
        prop_assert_eq!(mask.count_ones(), 1 + x + y);
    }

    #[test]
    fn a_view_does_not_depend_on_planes_it_does_not_fetch(
        (format, x, y, full) in tensor(), guards in 0u32..30, scale in -64i32..=64, flips in any::<u64>(),
    ) {
        let e = format.exponent_bits();
        let mut spellings = vec![format!("e{x}m{y}"), format!("e{e}m{y}+g{guards}:packed")];
        for some_have in [
            format!("bf16+g{guards}"), format!("fp8_e4m3fn+g{guards}@{scale}"), format!("fp8_e5m2@{scale}"),
            format!("e{x}m{y}+d1"), format!("e{x}m{y}+d2"), format!("e{}m{y}+d2+g{guards}", e - 2),
        ] {
            if planes(format, &some_have).is_ok() {
                spellings.push(some_have);
            }
        }
        for spelling in spellings {
            let fetched: u32 = planes(format, &spelling).expect("a view").iter().map(|plane| 1 << plane).sum();
            let mut noise = flips | 1;
            let others: Vec<u8> = codes(format, &full)
                .iter()
                .flat_map(|code| {
                    noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let noise = (noise >> 32).to_le_bytes();
                    let noise = u32::from_le_bytes([noise[0], noise[1], noise[2], noise[3]]);
                    (code ^ (noise & !fetched)).to_le_bytes().into_iter().take(format.bits() as usize / 8)
                })
                .collect();
            prop_assert_eq!(view(format, &spelling, &others), view(format, &spelling, &full), "{} of {}", spelling, format);
        }
    }

    #[test]
    fn rounding_is_that_of_plain_arithmetic((format, _, y, full) in tensor(), guards in 1u32..30) {
        // Without mantissa bits ties go to the even exponent, which arithmetic knows nothing of.
        prop_assume!(y > 0);
        let (e, m) = (format.exponent_bits(), format.mantissa_bits());
        let fetched = codes(format, &view(format, &format!("e{e}m{}", (y + guards).min(m)), &full));
        let rounded = codes(format, &view(format, &format!("e{e}m{y}+g{guards}"), &full));
        for ((code, fetched), rounded) in codes(format, &full).into_iter().zip(fetched).zip(rounded) {
            if all_exponent(format, code) {
                prop_assert_eq!(rounded, code >> (m - y) << (m - y));
            } else {
                let expected = round(format, y, number(format, fetched));
                // An exponent of all ones is now infinity, or 256 in fp8_e4m3fn: the next power of
                // two, either way.
                let bias = (1 << (e - 1)) - 1;
                let found = if all_exponent(format, rounded) {
                    let sign = if rounded >> (e + m) == 0 { 1.0 } else { -1.0 };
                    2f64.powi((1 << e) - 1 - bias) * sign
                } else {
                    number(format, rounded)
                };
                prop_assert_eq!(found.to_bits(), expected.to_bits(), "{:#x} to {:#x}: {} not {}", code, rounded, found, expected);
            }
        }
    }

    #[test]
    fn a_conversion_of_all_planes_is_that_of_plain_arithmetic(
        (format, _, _, full) in tensor_of(&CONVERTIBLE), scale in -20i32..=20, e4m3 in any::<bool>(),
    ) {
        let (target, largest) = if e4m3 { (Format::Fp8E4m3fn, 448.0) } else { (Format::Fp8E5m2, 57344.0) };
        let converted = view(format, &format!("{target}+g23@{scale}"), &full);
        for (code, converted) in codes(format, &full).into_iter().zip(converted) {
            if !all_exponent(format, code) {
                let expected = round(target, target.mantissa_bits(), number(format, code) / 2f64.powi(scale)).clamp(-largest, largest);
                // The one finite range of e4m3fn with an all-ones exponent is plain arithmetic too.
                prop_assert_eq!(number(target, converted.into()).to_bits(), expected.to_bits(), "{:#x} to {:#x}", code, converted);
            }
        }
    }

    #[test]
    fn a_conversion_is_that_of_the_truncated_tensor((format, _, _, full) in tensor_of(&CONVERTIBLE), guards in 0u32..12, scale in -64i32..=64) {
        for target in [Format::Bf16, Format::Fp8E4m3fn, Format::Fp8E5m2] {
            let at = if target == Format::Bf16 { String::new() } else { format!("@{scale}") };
            let spelling = format!("{target}+g{guards}{at}");
            let Ok(fetched) = planes(format, &spelling) else { continue };
            let y = (target.mantissa_bits() + guards).min(format.mantissa_bits());
            let truncating = format!("e{}m{y}", format.exponent_bits());
            prop_assert_eq!(&fetched, &planes(format, &truncating).expect("a view"));
            let truncated = view(format, &truncating, &full);
            prop_assert_eq!(view(format, &spelling, &full), view(format, &format!("{target}+g23{at}"), &truncated));
        }
    }

    #[test]
    fn integer_views_are_arithmetic_shifts_back_and_forth(full in proptest::collection::vec(any::<u8>(), 0..20)) {
        let nibbles = view(Format::Int8, "int4", &full);
        let pairs = view(Format::Int8, "int2", &full);
        prop_assert_eq!((nibbles.len(), pairs.len()), (full.len().div_ceil(2), full.len().div_ceil(4)));
        for (i, x) in full.iter().map(|x| x.cast_signed()).enumerate() {
            // Moved to the top of a byte and shifted down again, a field of bits extends its sign.
            let nibble = (nibbles[i / 2] << (4 - 4 * (i % 2))).cast_signed() >> 4;
            let pair = (pairs[i / 4] << (6 - 2 * (i % 4))).cast_signed() >> 6;
            prop_assert_eq!((nibble, pair), (x >> 4, x >> 6));
        }
        // The upper half of the upper half.
        if full.len().is_multiple_of(2) {
            prop_assert_eq!(view(Format::Int4, "int2", &nibbles), pairs);
        }
    }

    #[test]
    fn no_spelling_makes_either_function_panic(spelling in "(full|e|m|bf16|fp8_e4m3fn|fp8_e5m2|int4|int2|:packed|\\+g|@|-|[0-9]{1,3}|\\PC){0,8}") {
        for format in Format::ALL {
            let full = [0xa5; 8];
            let elements = 64 / u64::from(format.bits());
            let by_bytes = view_bytes(format, &spelling, &full, elements).map(|_| ());
            prop_assert_eq!(planes(format, &spelling).map(|_| ()), by_bytes);
        }
    }
}
