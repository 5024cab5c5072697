//! Views of single elements, spelled out by hand.

use Format::{Bf16, E8m0, Fp4E2m1, Fp6E2m3, Fp6E3m2, Fp8E4m3fn, Fp8E5m2, Fp16, Fp32, Int4, Int8, Opaque};
use lamina_reference::{Format, planes, view_bytes};

/// The view's code of the one element with the code `x`.
fn of(format: Format, spelling: &str, x: u32) -> u32 {
    let bytes = &x.to_le_bytes()[..(format.bits() as usize).div_ceil(8)];
    let view =
        view_bytes(format, spelling, bytes, 1).unwrap_or_else(|why| panic!("{format} {spelling}: {why}"));
    let mut code = [0; 4];
    code[..view.len()].copy_from_slice(&view);
    u32::from_le_bytes(code)
}

fn check(format: Format, spelling: &str, expected: &[(u32, u32)]) {
    for &(x, code) in expected {
        let found = of(format, spelling, x);
        assert_eq!(found, code, "{spelling} of {format} {x:#x} is {found:#x}, not {code:#x}");
    }
}

#[test]
fn truncation_keeps_planes_and_never_looks_at_values() {
    check(
        Bf16,
        "e8m3",
        &[
            (0x3fff, 0x3ff0), // 1.99 towards zero
            (0xbfff, 0xbff0), // and from below
            (0x0001, 0x0000), // the least denormal is gone
            (0x8001, 0x8000), // leaving its sign
            (0x8000, 0x8000), // −0
            (0x7f80, 0x7f80), // infinity
            (0xff80, 0xff80), // −infinity
            (0x7fc0, 0x7fc0), // quiet NaN
            (0x7f81, 0x7f80), // a NaN with low bits only becomes infinity
        ],
    );
    // The top exponent bits stay, the mantissa moves nowhere.
    check(Bf16, "e3m1", &[(0x7fff, 0x7040), (0xffff, 0xf040), (0x0fff, 0x0040)]);
    check(Bf16, "e0m0", &[(0x7fff, 0x0000), (0xffff, 0x8000)]);
    check(Fp32, "e8m1", &[(0x7fff_ffff, 0x7fc0_0000), (0x3fbf_ffff, 0x3f80_0000)]);
    check(Fp16, "e2m10", &[(0xffff, 0xe3ff)]);
    check(Fp8E4m3fn, "e4m0", &[(0x7f, 0x78), (0xff, 0xf8)]);
    check(Fp8E5m2, "e1m2", &[(0x7f, 0x43)]);
}

#[test]
fn rounding_goes_to_the_nearest_and_ties_go_to_even() {
    // Two guards are all that e8m5 leaves out: 1.0 + n/128.
    check(
        Bf16,
        "e8m5+g2",
        &[
            (0x3f80, 0x3f80), // exact
            (0x3f81, 0x3f80), // a quarter below
            (0x3f82, 0x3f80), // tie, 0 is even
            (0x3f83, 0x3f84), // three quarters
            (0x3f86, 0x3f88), // tie, 1 is odd
            (0xbf82, 0xbf80), // the sign plays no part
            (0xbf86, 0xbf88),
        ],
    );
}

#[test]
fn guards_that_are_not_fetched_count_as_zero() {
    // 1.5 of a step of e8m3 and one unit: with one guard a tie to even, with all four more than a
    // tie.
    check(Bf16, "e8m3+g1", &[(0x3f89, 0x3f80), (0x3f98, 0x3fa0)]);
    check(Bf16, "e8m3+g4", &[(0x3f89, 0x3f90), (0x3f98, 0x3fa0)]);
    // More guards than there are mantissa bits are all of them.
    check(Bf16, "e8m3+g100", &[(0x3f89, 0x3f90)]);
    check(Bf16, "e8m3+g4294967295", &[(0x3f89, 0x3f90)]);
    check(Bf16, "e8m7+g1", &[(0x3f89, 0x3f89)]);
}

#[test]
fn an_exponent_is_rounded_to_what_its_kept_bits_count_in() {
    check(
        Bf16,
        "e4m3+d2",
        &[
            (0x3f80, 0x4000), // 1: the field 0111_1111 is nearer to 1000_0000 than to 0111_0000
            (0x3c5f, 0x4050), // 0111_1000: a tie, and 1000 is even; the mantissa is cut
            (0x3800, 0x3800), // what is a multiple stays
            (0x3a00, 0x3800), // 0111_0100: a quarter
            (0x0001, 0x0000), // denormals have none
            (0x0070, 0x0070),
            (0x0400, 0x0000), // 0000_1000: a tie, and zero is even
            (0x8600, 0x8800), // 0000_1100: three quarters, and the sign plays no part
            (0x7f7f, 0x7870), // the largest number: above 1111_0000 there is none
            (0x7f80, 0x7800), // infinity, as truncation leaves it
            (0x7fc0, 0x7840),
        ],
    );
    // One guard is a tie or nothing.
    check(Bf16, "e4m3+d1", &[(0x3f80, 0x4000), (0x3780, 0x3000), (0x3b80, 0x3800)]);
    // All of it is fetched, so the mantissa may be rounded as well, into the exponent first.
    check(Bf16, "e6m3+d2+g4", &[(0x3fff, 0x4000), (0x3f7f, 0x4000), (0x3e7f, 0x3e00), (0x7f7f, 0x7e00)]);
    check(Bf16, "e6m3+d2", &[(0x3fff, 0x4070), (0x3e7f, 0x3e70)]);
    // No exponent kept is none shown, whatever is fetched.
    check(Bf16, "e0m1+d2", &[(0x7fff, 0x0040), (0xbf80, 0x8000)]);
    check(Fp6E3m2, "e1m2+d2", &[(0x1f, 0x13), (0x0d, 0x11), (0x09, 0x01), (0xff, 0x33)]);
    check(Fp8E4m3fn, "e3m3+d1:packed", &[(0x38, 0b010_0000), (0x7f, 0b011_1111)]);
    check(Bf16, "e4m3+d0", &[(0x3f80, 0x3800)]);
}

#[test]
fn no_guards_are_truncation() {
    check(Bf16, "e8m3+g0", &[(0x3fff, 0x3ff0), (0x7f81, 0x7f80)]);
    check(Bf16, "e3m1+g0", &[(0x7fff, 0x7040)]);
}

#[test]
fn a_carry_runs_into_the_exponent_and_into_infinity() {
    check(
        Bf16,
        "e8m3+g4",
        &[
            (0x3fff, 0x4000), // 1.99 becomes 2
            (0xbfff, 0xc000),
            (0x007f, 0x0080), // the largest denormal becomes the least normal number
            (0x7f7f, 0x7f80), // the largest finite number becomes infinity
            (0xff7f, 0xff80),
        ],
    );
    check(Fp16, "e5m2+g8", &[(0x7bff, 0x7c00), (0x7b7f, 0x7b00), (0x7b80, 0x7c00)]);
    check(
        Fp32,
        "e8m7+g16",
        &[(0x7f7f_ffff, 0x7f80_0000), (0x3f80_8000, 0x3f80_0000), (0x3f80_8001, 0x3f81_0000)],
    );
}

#[test]
fn denormals_round_like_the_others_and_zeros_keep_their_sign() {
    check(
        Bf16,
        "e8m3+g4",
        &[
            (0x0000, 0x0000),
            (0x8000, 0x8000),
            (0x0008, 0x0000), // tie to zero
            (0x0009, 0x0010),
            (0x8008, 0x8000),
            (0x8018, 0x8020), // tie to the even one above
        ],
    );
}

#[test]
fn without_mantissa_bits_ties_go_to_the_even_exponent() {
    // 1.5 lies between the exponent fields 127 and 128, 3 between 128 and 129.
    check(Bf16, "e8m0+g7", &[(0x3fc0, 0x4000), (0x4040, 0x4000), (0x4041, 0x4080), (0x3fbf, 0x3f80)]);
}

#[test]
fn elements_with_all_exponent_bits_are_truncated_not_rounded() {
    check(
        Bf16,
        "e8m3+g4",
        &[(0x7f80, 0x7f80), (0xff80, 0xff80), (0x7fff, 0x7ff0), (0x7f8f, 0x7f80), (0xff9f, 0xff90)],
    );
    // Also where such an element is finite: 0x7b is 352, between 320 and 384 of e4m2.
    check(Fp8E4m3fn, "e4m2+g1", &[(0x7b, 0x7a), (0x7f, 0x7e), (0x77, 0x78), (0x75, 0x74), (0x73, 0x74)]);
    check(Fp8E5m2, "e5m1+g1", &[(0x7f, 0x7e), (0x7d, 0x7c), (0x7b, 0x7c)]);
}

#[test]
fn packed_elements_lie_one_behind_the_other_sign_uppermost() {
    // e2m1 of bf16: four bits, s e e m. 0xe000 has sign and the top two exponent bits, 0x0040 the
    // top mantissa bit.
    let full: Vec<u8> = [0xe000u16, 0x0040, 0x8040].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(view_bytes(Bf16, "e2m1:packed", &full, 3).expect("a view"), [0x1e, 0x09]);
    // e8m2 of bf16: eleven bits, 1.5 = 0 01111111 10; −1.25 = 1 01111111 01.
    let full: Vec<u8> = [0x3fc0u16, 0xbfa0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let stream = (0b101_1111_1101 << 11) | 0b001_1111_1110_u32;
    assert_eq!(view_bytes(Bf16, "e8m2:packed", &full, 2).expect("a view"), stream.to_le_bytes()[..3]);
    // Rounded first, packed then: 1.99 becomes 2, whose exponent field is 128.
    check(Bf16, "e8m3+g4:packed", &[(0x3fff, 0b100_0000_0000)]);
    check(Bf16, "e0m0:packed", &[(0x8000, 1), (0x7fff, 0)]);
    check(Fp32, "e8m23:packed", &[(0xdead_beef, 0xdead_beef)]);
    assert_eq!(view_bytes(Bf16, "e0m0:packed", &[0xff; 18], 9).expect("a view"), [0xff, 0x01]);
}

#[test]
fn conversion_rounds_to_nearest_even_from_the_fetched_planes() {
    // Two guards: 1 + 1/16 is a tie of e4m3, and what is below the guards is not seen.
    check(
        Bf16,
        "fp8_e4m3fn",
        &[(0x3f80, 0x38), (0x3f88, 0x38), (0x3f89, 0x38), (0x3f8c, 0x39), (0x3f98, 0x3a)],
    );
    check(Bf16, "fp8_e4m3fn+g4", &[(0x3f88, 0x38), (0x3f89, 0x39), (0xbf89, 0xb9)]);
    check(Bf16, "fp8_e4m3fn+g0", &[(0x3f8f, 0x38)]);
    check(
        Fp32,
        "bf16",
        &[(0x3f80_8000, 0x3f80), (0x3f80_c000, 0x3f81), (0x3f80_8001, 0x3f80), (0x3f81_8000, 0x3f82)],
    );
    check(Fp32, "bf16+g16", &[(0x3f80_8001, 0x3f81)]);
    check(Fp16, "fp8_e5m2", &[(0x3c00, 0x3c), (0x3c80, 0x3c), (0x3cc0, 0x3d), (0x3d80, 0x3e)]);
}

#[test]
fn conversion_saturates_infinities_too() {
    check(
        Bf16,
        "fp8_e4m3fn",
        &[(0x43e0, 0x7e), (0x43e8, 0x7e), (0x43f0, 0x7e), (0x7f80, 0x7e), (0xff80, 0xfe), (0x7f7f, 0x7e)],
    );
    check(Bf16, "fp8_e5m2", &[(0x4760, 0x7b), (0x4770, 0x7b), (0x7f80, 0x7b), (0xff80, 0xfb)]);
    check(Fp16, "fp8_e5m2", &[(0x7bff, 0x7b), (0x7c00, 0x7b), (0xfc00, 0xfb)]);
    check(Fp32, "bf16", &[(0x7f7f_ffff, 0x7f7f), (0x7f80_0000, 0x7f7f), (0xff80_0000, 0xff7f)]);
}

#[test]
fn conversion_keeps_nan_its_sign_and_that_of_zero() {
    check(Bf16, "fp8_e4m3fn", &[(0x7fc0, 0x7f), (0xffc0, 0xff), (0x0000, 0x00), (0x8000, 0x80)]);
    check(Bf16, "fp8_e5m2", &[(0x7fc0, 0x7e), (0xffff, 0xfe), (0x8000, 0x80)]);
    check(Fp32, "bf16", &[(0x7fff_ffff, 0x7fc0), (0xffa0_0000, 0xffc0), (0x8000_0000, 0x8000)]);
    // A NaN whose fetched bits are all zero is an infinity by then, and that saturates.
    check(Bf16, "fp8_e5m2", &[(0x7f87, 0x7b)]);
    check(Bf16, "fp8_e5m2+g5", &[(0x7f87, 0x7e)]);
}

#[test]
fn conversion_rounds_into_denormals_and_down_to_signed_zero() {
    // e4m3fn's least is 2^−9 (bf16 0x3b00); half of it ties to zero, more does not.
    check(
        Bf16,
        "fp8_e4m3fn+g4",
        &[(0x3b00, 0x01), (0x3a80, 0x00), (0xba80, 0x80), (0x3a81, 0x01), (0x3b40, 0x02)],
    );
    check(Bf16, "fp8_e4m3fn", &[(0x0001, 0x00), (0x8001, 0x80)]);
    // The largest denormal and the least normal, 2^−6.
    check(Bf16, "fp8_e4m3fn", &[(0x3c60, 0x07), (0x3c80, 0x08), (0x3c78, 0x08)]);
    check(
        Fp32,
        "bf16",
        &[(0x0001_0000, 0x0001), (0x0000_8000, 0x0000), (0x0000_bfff, 0x0000), (0x0000_c000, 0x0001)],
    );
    check(Fp32, "bf16+g16", &[(0x0000_bfff, 0x0001)]);
    check(Fp16, "fp8_e5m2", &[(0x0100, 0x01), (0x0080, 0x00), (0x0180, 0x02), (0x0001, 0x00)]);
}

#[test]
fn an_fp8_or_fp6_becomes_a_smaller_float_with_the_scale_of_its_block() {
    // 448 is 7 · 2^6, beyond 6: the largest. 256 is 4, 320 is 5, a tie, to 4. 2^6 is 1.
    check(
        Fp8E4m3fn,
        "fp4_e2m1@6",
        &[(0x7e, 7), (0x78, 6), (0x7a, 6), (0x7b, 7), (0x68, 2), (0xe8, 10), (0x00, 0), (0x80, 8)],
    );
    // 16 is 0.25, a tie, to 0; NaN is the largest of all.
    check(Fp8E4m3fn, "fp4_e2m1@6", &[(0x58, 0), (0x59, 1), (0x7f, 7), (0xff, 15)]);
    // 28 is the largest: 448 is it. The last mantissa bit is gone, ties to even.
    check(Fp8E4m3fn, "fp6_e3m2@4", &[(0x7e, 0x1f), (0x78, 0x1c), (0x79, 0x1c), (0x7b, 0x1e), (0xf8, 0x3c)]);
    check(Fp8E5m2, "fp6_e2m3", &[(0x7c, 0x1f), (0xfc, 0x3f), (0x7e, 0x1f), (0x3c, 0x08), (0xbd, 0x2a)]);
    // Without guards it is cut.
    check(Fp8E4m3fn, "fp4_e2m1+g0@6", &[(0x7b, 6)]);
    // MXFP6's: 28, 16, 1, 1.25 and −1.25 by 4, and what lies above a sign is nothing.
    check(Fp6E3m2, "fp4_e2m1@2", &[(0x1f, 7), (0x1c, 6), (0x0c, 0), (0x0d, 1), (0x2d, 9), (0xdc, 6)]);
    // 7.5 is beyond the largest; 1.25 is a tie; 1.875 is rounded up, or cut before it is rounded.
    check(Fp6E2m3, "fp4_e2m1", &[(0x1f, 7), (0x08, 2), (0x0a, 2), (0x0f, 4), (0x2f, 12)]);
    check(Fp6E2m3, "fp4_e2m1+g0", &[(0x0f, 3)]);
    assert_eq!(view_bytes(Fp8E4m3fn, "fp4_e2m1", &[0x38, 0xb8, 0x40], 3).expect("a view"), [0xa2, 4]);
}

#[test]
fn a_scale_divides_exactly_before_the_one_rounding() {
    check(Bf16, "fp8_e4m3fn@1", &[(0x4000, 0x38), (0x3f80, 0x30)]);
    check(Bf16, "fp8_e4m3fn@-1", &[(0x3f80, 0x40)]);
    check(Bf16, "fp8_e4m3fn+g4@3", &[(0x4480, 0x70)]);
    check(Bf16, "fp8_e4m3fn@64", &[(0x5f80, 0x38), (0x7f80, 0x7e), (0x7fc0, 0x7f)]);
    check(Bf16, "fp8_e4m3fn@-64", &[(0x1f80, 0x38), (0x3f80, 0x7e)]);
    check(Fp16, "fp8_e5m2+g10@-12", &[(0x0001, 0x0c), (0x0003, 0x12)]);
    // Exactly a tie and one fp16 step above it, after a partition table that fp16 could not
    // represent.
    check(Fp16, "fp8_e5m2+g10@2", &[(0x0200, 0x00), (0x0201, 0x01), (0x01ff, 0x00)]);
}

#[test]
fn integer_views_are_arithmetic_shifts() {
    let full: Vec<u8> = [127i8, -128, -1, 16, -17].iter().map(|x| x.cast_unsigned()).collect();
    // 7, −8, −1, 1, −2
    assert_eq!(view_bytes(Int8, "int4", &full, 5).expect("a view"), [0x87, 0x1f, 0x0e]);
    // 1, −2, −1, 0, −1
    assert_eq!(view_bytes(Int8, "int2", &full, 5).expect("a view"), [0b00_11_10_01, 0b11]);
    // 7, −8, −1, 1, −5 of int4: 1, −2, −1, 0, −2
    assert_eq!(view_bytes(Int4, "int2", &[0x87, 0x1f, 0x0b], 5).expect("a view"), [0b00_11_10_01, 0b10]);
}

#[test]
fn small_floats_have_their_fields_in_the_lowest_bits() {
    check(Fp4E2m1, "e2m0", &[(0xf, 0xe), (0x7, 0x6), (0x1, 0x0), (0x9, 0x8)]);
    // 0.5 and 1.5 lie half way: to the even exponents 0 and 2. 3 too, to 2; 6 is not rounded.
    check(Fp4E2m1, "e2m0+g1", &[(0x1, 0x0), (0x3, 0x4), (0x5, 0x4), (0x7, 0x6), (0xb, 0xc), (0x9, 0x8)]);
    check(Fp4E2m1, "e1m1:packed", &[(0xf, 0b111), (0x5, 0b011), (0x3, 0b001)]);
    // What is above the sign is no view's but of full.
    check(Fp6E3m2, "e3m2", &[(0xff, 0x3f), (0xc0, 0x00)]);
    check(Fp6E3m2, "full", &[(0xff, 0xff)]);
    check(Fp6E3m2, "e3m2:packed", &[(0xff, 0x3f), (0x15, 0x15)]);
    check(Fp6E3m2, "e3m1+g1", &[(0x01, 0x00), (0x03, 0x04), (0x3b, 0x3c), (0x1f, 0x1e)]);
    check(Fp6E2m3, "e1m1", &[(0x3f, 0x34), (0x1b, 0x10)]);
    let planes_of = |format, spelling| planes(format, spelling).expect("a view");
    assert_eq!(planes_of(Fp6E3m2, "e2m1"), [5, 4, 3, 1]);
    assert_eq!(planes_of(Fp6E2m3, "e2m3"), [5, 4, 3, 2, 1, 0]);
    assert_eq!(planes_of(Fp4E2m1, "e2m0"), [3, 2, 1]);
    assert_eq!(planes_of(Int4, "int2"), [3, 2]);
    assert_eq!(planes_of(E8m0, "full"), [7, 6, 5, 4, 3, 2, 1, 0]);
}

#[test]
fn full_is_the_bytes_of_every_format() {
    let bytes: Vec<u8> = (0..24).collect();
    for format in Format::ALL {
        let elements = 24 * 8 / u64::from(format.bits());
        assert_eq!(view_bytes(format, "full", &bytes, elements).expect("a view"), bytes, "{format}");
        assert_eq!(view_bytes(format, "full", &[], 0).expect("a view"), [], "{format}");
    }
    assert_eq!(view_bytes(Int4, "full", &[0x21, 0xf3], 3).expect("a view"), [0x21, 0xf3]);
}

#[test]
fn planes_are_those_that_the_rule_reads() {
    let expect = |format, spelling, expected: &[u32]| {
        assert_eq!(planes(format, spelling).expect("a view"), expected, "{spelling} of {format}");
    };
    expect(Bf16, "full", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    expect(Bf16, "e8m3", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4]);
    expect(Bf16, "e8m3:packed", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4]);
    expect(Bf16, "e4m3+d2", &[15, 14, 13, 12, 11, 10, 9, 6, 5, 4]);
    expect(Bf16, "e7m3+d1+g2", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2]);
    expect(Bf16, "e8m3+g2", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2]);
    expect(Bf16, "e2m1", &[15, 14, 13, 6]);
    expect(Bf16, "e0m0", &[15]);
    expect(Bf16, "e0m2", &[15, 6, 5]);
    expect(Bf16, "e8m6+g4294967295", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    expect(Bf16, "fp8_e4m3fn", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2]);
    expect(Bf16, "fp8_e4m3fn@-3", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2]);
    expect(Bf16, "fp8_e5m2+g0", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5]);
    expect(Fp16, "fp8_e4m3fn+g4294967295", &[15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
    expect(Fp32, "bf16", &(14..32).rev().collect::<Vec<_>>());
    expect(Fp8E4m3fn, "e4m1", &[7, 6, 5, 4, 3, 2]);
    expect(Int8, "full", &[7, 6, 5, 4, 3, 2, 1, 0]);
    expect(Int8, "int4", &[7, 6, 5, 4]);
    expect(Int8, "int2", &[7, 6]);
    expect(Int4, "full", &[3, 2, 1, 0]);
    expect(Opaque, "full", &[]);
}
