//! What is refused, and that the refusal names the view, the format and the bound.

use Format::{Bf16, Fp6E2m3, Fp6E3m2, Fp8E4m3fn, Fp8E5m2, Fp16, Fp32, Int4, Int8, Opaque};
use lamina_reference::{Format, Refused, planes, view_bytes};

/// The refusal of `spelling`, which both functions give alike.
fn refused(format: Format, spelling: &str) -> Refused {
    let by_bytes = view_bytes(format, spelling, &[], 0).expect_err(&format!("{spelling} of {format}"));
    assert_eq!(planes(format, spelling).expect_err(spelling), by_bytes);
    by_bytes
}

#[test]
fn more_bits_than_the_format_has_are_refused_with_the_bound() {
    for (format, spelling, message) in [
        (Bf16, "e9m3", "e9m3: bf16 has 8 exponent bits"),
        (Bf16, "e8m8", "e8m8: bf16 has 7 mantissa bits"),
        (Bf16, "e8m8+g2:packed", "e8m8+g2:packed: bf16 has 7 mantissa bits"),
        (Fp32, "e8m24", "e8m24: fp32 has 23 mantissa bits"),
        (Fp16, "e6m0", "e6m0: fp16 has 5 exponent bits"),
        (Fp16, "e5m11", "e5m11: fp16 has 10 mantissa bits"),
        (Fp8E4m3fn, "e5m2", "e5m2: fp8_e4m3fn has 4 exponent bits"),
        (Fp8E5m2, "e4m3", "e4m3: fp8_e5m2 has 2 mantissa bits"),
        (Bf16, "e4294967295m0", "e4294967295m0: bf16 has 8 exponent bits"),
    ] {
        assert_eq!(refused(format, spelling).to_string(), message);
    }
}

#[test]
fn rounding_without_the_whole_exponent_is_refused() {
    assert_eq!(refused(Bf16, "e7m3+g1").to_string(), "e7m3+g1: rounding needs all 8 exponent bits of bf16");
    assert_eq!(
        refused(Bf16, "e4m3+d2+g1").to_string(),
        "e4m3+d2+g1: rounding needs all 8 exponent bits of bf16"
    );
    assert_eq!(refused(Bf16, "e7m3+d2").to_string(), "e7m3+d2: bf16 has 8 exponent bits");
    assert_eq!(refused(Bf16, "e4m3+d3").to_string(), "e4m3+d3: an exponent has at most 2 guards");
    assert_eq!(
        refused(Fp16, "e4m3+g2:packed").to_string(),
        "e4m3+g2:packed: rounding needs all 5 exponent bits of fp16"
    );
}

#[test]
fn what_is_no_float_has_no_exponent_to_keep() {
    for format in [Int8, Int4, Opaque] {
        assert_eq!(refused(format, "e4m3").to_string(), format!("e4m3: {format} has no exponent"));
        assert_eq!(
            refused(format, "e0m0:packed").to_string(),
            format!("e0m0:packed: {format} has no exponent")
        );
    }
}

#[test]
fn conversions_are_refused_from_other_formats() {
    assert_eq!(
        refused(Bf16, "bf16").to_string(),
        "bf16: bf16 cannot be converted so; this view is made from fp32 or fp16"
    );
    assert_eq!(
        refused(Fp8E5m2, "fp8_e4m3fn+g1@2").to_string(),
        "fp8_e4m3fn+g1@2: fp8_e5m2 cannot be converted so; this view is made from fp32, fp16 or bf16"
    );
    for (view, giving) in [
        ("bf16", &[Fp32, Fp16][..]),
        ("fp8_e4m3fn", &[Fp32, Fp16, Bf16]),
        ("fp8_e5m2", &[Fp32, Fp16, Bf16]),
        ("fp6_e2m3@6", &[Fp32, Fp16, Bf16, Fp8E4m3fn, Fp8E5m2]),
        ("fp4_e2m1", &[Fp32, Fp16, Bf16, Fp8E4m3fn, Fp8E5m2, Fp6E3m2, Fp6E2m3]),
        ("int4", &[Int8]),
        ("int2", &[Int8, Int4]),
    ] {
        for format in Format::ALL {
            if giving.contains(&format) {
                assert!(planes(format, view).is_ok(), "{view} of {format}");
            } else {
                assert!(matches!(refused(format, view), Refused::Conversion { .. }), "{view} of {format}");
            }
        }
    }
}

#[test]
fn scales_beyond_64_are_refused() {
    for scale in ["65", "-65", "2147483647", "-2147483647"] {
        assert_eq!(
            refused(Bf16, &format!("fp8_e5m2@{scale}")).to_string(),
            format!("fp8_e5m2@{scale}: the scale exponent of a view of bf16 is at least -64 and at most 64")
        );
    }
    for scale in ["64", "-64", "0"] {
        assert!(planes(Bf16, &format!("fp8_e5m2@{scale}")).is_ok());
    }
}

#[test]
fn spelling_is_strict() {
    for spelling in [
        "",
        " ",
        "full ",
        " full",
        "Full",
        "fulll",
        "full:packed",
        "full+g0",
        "full@0",
        "int4:packed",
        "int2:packed",
        "int8",
        "int4+g1",
        "bf16:packed",
        "bf16+g2:packed",
        "fp8_e5m2:packed",
        "fp8_e5m2@1:packed",
        "bf16@0",
        "bf16+g2@1",
        "bf16+g",
        "bf16+2",
        "bf16+g02",
        "bf16 ",
        "fp16",
        "fp32",
        "fp8_e4m3",
        "fp8_e5m2@1+g2",
        "fp8_e5m2@",
        "fp8_e5m2@-",
        "fp8_e5m2@-0",
        "fp8_e5m2@+1",
        "fp8_e5m2@01",
        "fp8_e5m2@1 ",
        "fp8_e5m2@--1",
        "fp8_e5m2@99999999999999999999",
        "e",
        "m",
        "em",
        "e8",
        "e8m",
        "em3",
        "e08m3",
        "e8m03",
        "e00m0",
        "e+8m3",
        "e8m-3",
        "e8m3+",
        "e8m3+g",
        "e8m3+g02",
        "e8m3+g-1",
        "e8m3+g2+g2",
        "e4m3+d",
        "e4m3+d01",
        "e4m3+d1+d1",
        "e4m3+g1+d1",
        "e4m3:packed+d1",
        "fp8_e5m2+d1",
        "e8m3:packed+g2",
        "e8m3:packed:packed",
        "e8m3:Packed",
        "e8m3:pack",
        "e8m3:",
        "e8m3@1",
        "e8m3 ",
        " e8m3",
        "E8m3",
        "e8M3",
        "e8m3\0",
        "e8m3\n",
        "e8m3x",
        "e99999999999999999999m0",
        "e8m99999999999999999999",
        "e٣m3",
        "e8m3+g٣",
        "é",
        "\u{1f980}",
    ] {
        for format in Format::ALL {
            let why = refused(format, spelling);
            assert_eq!(why, Refused::Spelling { view: spelling.into() });
            assert!(why.to_string().contains(&format!("{spelling:?} is no view")), "{why}");
        }
    }
}

#[test]
fn bytes_that_are_not_the_elements_are_refused() {
    let length = |format, bytes: &[u8], elements| {
        view_bytes(format, "full", bytes, elements).map_err(|why| why.to_string())
    };
    assert_eq!(length(Bf16, &[0; 5], 2), Err("2 elements of bf16 fill 4 bytes, but there are 5".into()));
    assert_eq!(length(Bf16, &[0; 3], 2), Err("2 elements of bf16 fill 4 bytes, but there are 3".into()));
    assert_eq!(length(Fp32, &[0; 3], 1), Err("1 elements of fp32 fill 4 bytes, but there are 3".into()));
    assert_eq!(length(Int4, &[0; 2], 5), Err("5 elements of int4 fill 3 bytes, but there are 2".into()));
    assert_eq!(length(Int4, &[0; 3], 5), Ok(vec![0; 3]));
    assert_eq!(length(Opaque, &[0; 3], 4), Err("4 elements of opaque fill 4 bytes, but there are 3".into()));
    assert_eq!(
        length(Fp32, &[], u64::MAX),
        Err("18446744073709551615 elements of fp32 fill 73786976294838206460 bytes, but there are 0".into())
    );
}

#[test]
fn format_names_are_their_own_and_no_others() {
    for format in Format::ALL {
        assert_eq!(format.to_string().parse(), Ok(format));
        if format.exponent_bits() > 0 {
            let used = 1 + format.exponent_bits() + format.mantissa_bits();
            assert_eq!(used, if format.name().starts_with("fp6") { 6 } else { format.bits() });
        }
    }
    assert_eq!(
        "FP32".parse::<Format>().expect_err("strict").to_string(),
        "\"FP32\" is no format; there are fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2, int8, int4, fp4_e2m1, fp6_e3m2, \
         fp6_e2m3, e8m0 and opaque"
    );
    assert!("".parse::<Format>().is_err());
}
