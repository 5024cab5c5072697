//! Elements of every view, against the bytes that the reference makes.

use lamina_llama::Element;
use lamina_reference::{Format, view_bytes};
use proptest::prelude::*;

/// Every bf16.
fn every() -> Vec<u8> {
    (0..=u16::MAX).flat_map(u16::to_le_bytes).collect()
}

fn read(view: &str, bytes: &[u8], first: usize, count: usize) -> Vec<f32> {
    let element = Element::of(view).unwrap();
    let (offset, length) = element.extent(first, count);
    let mut out = vec![0.0; count];
    element.read(&bytes[offset..offset + length], first, &mut out);
    out
}

/// So that NaNs compare, too.
fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn views_in_the_tensors_container_are_the_upper_halves_of_numbers() {
    for view in ["full", "e8m7", "e8m3", "e8m3+g2", "e4m3+d2", "e6m3+d2+g2", "e8m0", "e5m0", "e0m0", "e0m4"] {
        let bytes = view_bytes(Format::Bf16, view, &every(), 65536).unwrap();
        let want: Vec<u32> =
            bytes.chunks_exact(2).map(|pair| u32::from_be_bytes([pair[1], pair[0], 0, 0])).collect();
        assert_eq!(bits(&read(view, &bytes, 0, 65536)), want, "{view}");
    }
}

#[test]
fn packed_views_hold_the_same_numbers() {
    for view in
        ["e8m7", "e8m3+g2", "e8m3", "e4m3+d2", "e6m3+d2+g2", "e8m0", "e5m0", "e4m3", "e0m0", "e0m4", "e1m0"]
    {
        let loose = view_bytes(Format::Bf16, view, &every(), 65536).unwrap();
        let packed_view = format!("{view}:packed");
        let packed = view_bytes(Format::Bf16, &packed_view, &every(), 65536).unwrap();
        assert!(packed.len() <= loose.len());
        assert_eq!(
            bits(&read(&packed_view, &packed, 0, 65536)),
            bits(&read(view, &loose, 0, 65536)),
            "{view}"
        );
    }
}

#[test]
fn each_code_of_eight_bits_stands_for_the_number_that_becomes_it() {
    // (view, what its codes are multiplied by, NaN codes, infinite codes)
    for (view, factor, nans, infinities) in [
        ("fp8_e4m3fn", 1.0_f32, 2, 0),
        ("fp8_e4m3fn+g4@-3", 0.125, 2, 0),
        ("fp8_e5m2", 1.0, 6, 2),
        ("fp8_e5m2@5", 32.0, 6, 2),
    ] {
        let codes: Vec<u8> = (0..=u8::MAX).collect();
        let values = read(view, &codes, 0, 256);
        let unscaled = view.split(['+', '@']).next().unwrap();
        let plain = read(unscaled, &codes, 0, 256);
        assert_eq!(values.iter().filter(|x| x.is_nan()).count(), nans);
        assert_eq!(values.iter().filter(|x| x.is_infinite()).count(), infinities);
        for (code, (value, plain)) in codes.iter().zip(values.iter().zip(&plain)) {
            if value.is_nan() || value.is_infinite() {
                continue;
            }
            assert_eq!(value.to_bits(), (plain * factor).to_bits());
            assert_eq!(value.to_bits() & 0xffff, 0, "a bf16 holds every such number");
            let bf16 = value.to_bits().to_be_bytes();
            let back = view_bytes(Format::Bf16, view, &[bf16[1], bf16[0]], 1).unwrap();
            assert_eq!(back, [*code], "{view} {value}");
        }
    }
}

#[test]
fn views_that_cannot_be_read_are_refused_by_name() {
    for view in [
        "",
        "base",
        "int4",
        "bf16",
        "e9m3",
        "e8m8",
        "e8",
        "m3",
        "e8m3+g",
        "e8m3+gx",
        "e8m3:",
        "fp8_e4m3fn@65",
        "fp8_e4m3",
        "fp8_e5m2:packed",
    ] {
        let why = Element::of(view).unwrap_err();
        assert_eq!(why.view, view);
        assert!(why.to_string().contains(&format!("{view:?}")));
    }
}

proptest! {
    /// Rows need not begin at a byte.
    #[test]
    fn any_part_of_a_view_can_be_read(
        words in prop::collection::vec(any::<u16>(), 1..200),
        view in prop::sample::select(vec!["full", "e8m3:packed", "e8m0:packed", "e5m2:packed", "e0m0:packed", "fp8_e5m2"]),
        cut: (prop::sample::Index, prop::sample::Index),
    ) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let view_bytes = view_bytes(Format::Bf16, view, &bytes, words.len() as u64).unwrap();
        let all = bits(&read(view, &view_bytes, 0, words.len()));
        let first = cut.0.index(words.len());
        let count = cut.1.index(words.len() - first + 1);
        prop_assert_eq!(bits(&read(view, &view_bytes, first, count)), &all[first..first + count]);
    }
}
