//! Every view against the reference, which shares no code with it.

use proptest::prelude::*;

use super::*;
use crate::{
    BLOCK_BYTES, BlockWords, plane,
    testing::{spelling, words},
};

fn reference(format: Format) -> lamina_reference::Format {
    format.name().parse().unwrap()
}

/// The words of `full` in which only the view's planes are set.
fn masked(view: &View, full: &BlockWords) -> BlockWords {
    let mut words = [0; BLOCK_BYTES];
    if view.format() == Format::Opaque {
        return *full;
    }
    let mut planes = [0; BLOCK_BYTES];
    plane::split(view.format(), full, &mut planes);
    plane::join(view.format(), &plane::select(view.format(), view.mask(), &planes), &mut words);
    words
}

/// Blocks in which NaN, infinities, denormals, zeros of both signs and ties are common.
fn special_words() -> impl Strategy<Value = Box<BlockWords>> {
    let byte = prop_oneof![
        2 => any::<u8>(),
        1 => prop::sample::select(vec![0x00, 0x01, 0x7f, 0x80, 0xff, 0x7c, 0xfc, 0x40, 0xc0, 0x78, 0xf8]),
    ];
    prop::collection::vec(byte, BLOCK_BYTES).prop_map(|bytes| bytes.try_into().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_view_is_what_the_reference_says(
        format in prop::sample::select(Format::ALL.to_vec()), spelling in spelling(),
        full in prop_oneof![words(), special_words()],
        cut in (0_usize..64, 0_usize..=64),
    ) {
        let elements = format.block_elements();
        let want = lamina_reference::view_bytes(reference(format), &spelling, &full[..], elements);
        let view = View::parse(format, &spelling);
        prop_assert_eq!(view.is_ok(), want.is_ok(), "{} of {}: {:?} / {:?}", spelling, format, view, want);
        let (Ok(view), Ok(want)) = (view, want) else { return Ok(()) };
        let planes: Vec<u32> = (0..32).rev().filter(|plane| view.mask().has(*plane as usize)).collect();
        prop_assert_eq!(planes, lamina_reference::planes(reference(format), &spelling).unwrap(), "{}", spelling);

        let words = masked(&view, &full);
        let elements = usize::try_from(elements).unwrap();
        let mut got = Vec::new();
        view.render(&mut words.clone(), 0, elements, &mut got);
        prop_assert_eq!(view.bytes_for(elements as u64), Some(got.len() as u64));
        prop_assert!(got == want, "{} of {}", spelling, format);

        // Any part of it, at multiples of eight elements, is that part of the whole.
        let (from, to) = (cut.0.min(cut.1) * elements / 64, cut.0.max(cut.1) * elements / 64);
        let mut part = Vec::new();
        view.render(&mut words.clone(), from, to, &mut part);
        let bits = view.bits() as usize;
        prop_assert_eq!(&part[..], &got[from * bits / 8..to * bits / 8]);
    }

    #[test]
    fn a_view_reads_its_own_spelling(format in prop::sample::select(Format::ALL.to_vec()), spelling in spelling()) {
        if let Ok(view) = View::parse(format, &spelling) {
            prop_assert_eq!(View::parse(format, &view.to_string()).unwrap().kind(), view.kind());
        }
    }
}

#[test]
fn every_16_bit_pattern_converts_as_the_reference_says() {
    for format in [Format::Bf16, Format::Fp16] {
        for spelling in
            ["fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fn+g7@-4", "fp8_e5m2+g0@3", "fp6_e3m2", "fp4_e2m1+g5@-2"]
        {
            let view = View::parse(format, spelling).unwrap();
            for block in 0..32_u16 {
                let mut full = [0; BLOCK_BYTES];
                for (element, word) in full.chunks_exact_mut(2).zip(0..2048) {
                    element.copy_from_slice(&(block * 2048 + word).to_le_bytes());
                }
                let want = lamina_reference::view_bytes(reference(format), spelling, &full, 2048).unwrap();
                let mut got = Vec::new();
                view.render(&mut masked(&view, &full), 0, 2048, &mut got);
                assert_eq!(got, want, "{spelling} of {format}");
            }
        }
    }
}

/// The views of `format` whose exponents are rounded: every X and dE, some Y and dM.
fn rounding_exponents(format: Format) -> Vec<String> {
    let all = format.exponent_bits();
    let kept = (0..all).flat_map(|exponent| [(exponent, 1), (exponent, 2)]);
    kept.filter(|(exponent, guard)| exponent + guard <= all)
        .flat_map(|(exponent, guard)| {
            let mantissas = [0, 1, 3, format.mantissa_bits()].into_iter();
            mantissas.filter(|mantissa| *mantissa <= format.mantissa_bits()).flat_map(move |mantissa| {
                let plain = format!("e{exponent}m{mantissa}+d{guard}");
                let rounded = (exponent + guard == all).then(|| format!("{plain}+g2"));
                [format!("{plain}:packed"), plain].into_iter().chain(rounded)
            })
        })
        .collect()
}

#[test]
fn every_pattern_of_up_to_16_bits_has_its_exponent_rounded_as_the_reference_says() {
    let short = [
        Format::Fp8E4m3fn,
        Format::Fp8E5m2,
        Format::Fp6E3m2,
        Format::Fp6E2m3,
        Format::Fp4E2m1,
        Format::Bf16,
        Format::Fp16,
    ];
    for format in short {
        let elements = format.block_elements();
        for spelling in rounding_exponents(format) {
            let view = View::parse(format, &spelling).unwrap();
            assert_eq!(view.to_string(), spelling);
            let planes: Vec<u32> = (0..32).rev().filter(|plane| view.mask().has(*plane as usize)).collect();
            assert_eq!(planes, lamina_reference::planes(reference(format), &spelling).unwrap());
            // Of eight bits and fewer the first block has every byte that there is.
            for block in 0..if format.bits() == 16 { 32_u16 } else { 1 } {
                let mut full = [0; BLOCK_BYTES];
                for (element, word) in full.chunks_exact_mut(2).zip(0..2048_u16) {
                    element.copy_from_slice(&(block * 2048 + word).to_le_bytes());
                }
                let want =
                    lamina_reference::view_bytes(reference(format), &spelling, &full, elements).unwrap();
                let mut got = Vec::new();
                view.render(&mut masked(&view, &full), 0, elements.try_into().unwrap(), &mut got);
                assert!(got == want, "{spelling} of {format}");
            }
        }
    }
}

#[test]
fn every_fp8_and_fp6_becomes_a_smaller_float_as_the_reference_says() {
    // Of an fp6 every byte too, with anything above the sign.
    let full: BlockWords = std::array::from_fn(|at| at.to_le_bytes()[0]);
    let smaller = ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3"];
    for (format, targets) in [
        (Format::Fp8E4m3fn, &smaller[..]),
        (Format::Fp8E5m2, &smaller),
        (Format::Fp6E3m2, &smaller[..1]),
        (Format::Fp6E2m3, &smaller[..1]),
    ] {
        for target in targets {
            for rest in ["", "+g0", "+g1@6", "@4", "@-3", "+g3@64", "@-64"] {
                let spelling = format!("{target}{rest}");
                let view = View::parse(format, &spelling).unwrap();
                let want = lamina_reference::view_bytes(reference(format), &spelling, &full, 4096).unwrap();
                let mut got = Vec::new();
                view.render(&mut masked(&view, &full), 0, 4096, &mut got);
                assert_eq!(got, want, "{spelling} of {format}");
            }
        }
    }
}

#[test]
fn what_a_format_cannot_give_is_refused_by_name() {
    let refusal = |format, spelling| View::parse(format, spelling).unwrap_err().to_string();
    assert_eq!(refusal(Format::Bf16, "e9m3"), "e9m3: bf16 has 8 exponent bits, not 9");
    assert_eq!(refusal(Format::Fp16, "e5m11"), "e5m11: fp16 has 10 mantissa bits, not 11");
    assert_eq!(
        refusal(Format::Bf16, "e4m3+g2"),
        "e4m3+g2: rounding with guard planes needs all 8 exponent planes of bf16, not 4"
    );
    assert_eq!(
        refusal(Format::Bf16, "e4m3+d2+g2"),
        "e4m3+d2+g2: rounding with guard planes needs all 8 exponent planes of bf16, not 6"
    );
    assert_eq!(refusal(Format::Bf16, "e7m3+d2"), "e7m3+d2: bf16 has 8 exponent bits, not 9");
    assert!(refusal(Format::Bf16, "e4m3+d3").ends_with("exponent's guard planes is at most 2"));
    assert!(refusal(Format::E8m0, "e4m0+d1").contains("not a view of e8m0"));
    for none in ["e4m3+d", "e4m3+g1+d1", "e4m3+d01", "e4m3+d1+d1", "e4m3:packed+d1", "fp8_e5m2+d1"] {
        assert!(refusal(Format::Bf16, none).contains("no view is spelled"), "{none}");
    }
    assert_eq!(refusal(Format::Bf16, "bf16"), "bf16: not a view of bf16, it is one of fp32, fp16");
    assert_eq!(refusal(Format::Int4, "int4"), "int4: not a view of int4, it is one of int8");
    assert_eq!(refusal(Format::Bf16, "int2"), "int2: not a view of bf16, it is one of int8, int4");
    let refused = refusal(Format::E8m0, "e8m0");
    assert!(refused.starts_with("e8m0: not a view of e8m0, it is one of fp32"), "{refused}");
    // The scales lie elsewhere.
    let refused = refusal(Format::Fp4E2m1, "bf16");
    assert!(refused.contains("only with the scale of its block") && refused.contains("@bf16"), "{refused}");
    assert!(refusal(Format::Fp6E3m2, "fp6_e2m3").contains("only with the scale of its block"));
    assert!(refusal(Format::Fp8E5m2, "bf16").ends_with("it is one of fp32, fp16"));
    assert!(refusal(Format::Bf16, "e8m3 ").contains("no view is spelled"));
    assert!(refusal(Format::Fp32, "fp8_e4m3fn@65").contains("at most 64"));
}
