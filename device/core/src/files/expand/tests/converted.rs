//! Files at fp8: what the reference makes of each tensor's bf16.

use lamina_reference::view_bytes;
use proptest::prelude::*;

use super::*;

/// A model with a tensor of each scheme, of `rows` rows, and what is of none.
fn all_schemes(seed: u64, rows: usize) -> Vec<Tensor<'static>> {
    let shape =
        |shape: &[usize]| -> &'static [u64] { shape.iter().map(|n| *n as u64).collect::<Vec<_>>().leak() };
    let outputs = 8 * rows;
    // fp16 from 2^-9 to 1.
    let scales: Vec<u8> =
        bytes(seed.wrapping_add(1), 3 * outputs).iter().flat_map(|byte| [*byte, 0x18 + byte % 36]).collect();
    let factor = 0.003_f32.to_le_bytes().to_vec();
    vec![
        ("experts_blocks", "U8", shape(&[2, rows, 3, 16]), bytes(seed.wrapping_add(2), 2 * rows * 48)),
        ("experts_scales", "U8", shape(&[2, rows, 3]), super::scales(2 * rows * 3)),
        ("mx.weight", "U8", shape(&[rows, 80]), bytes(seed.wrapping_add(3), rows * 80)),
        ("mx.weight_scale", "F8_E8M0", shape(&[rows, 5]), super::scales(rows * 5)),
        ("nv.weight", "U8", shape(&[rows, 24]), bytes(seed.wrapping_add(4), rows * 24)),
        ("nv.weight_scale", "F8_E4M3", shape(&[rows, 3]), bytes(seed.wrapping_add(5), rows * 3)),
        ("nv.weight_scale_2", "F32", &[], factor),
        ("mx6.weight", "F6_E3M2", shape(&[rows, 64]), bytes(seed.wrapping_add(12), rows * 48)),
        ("mx6.weight_scale", "U8", shape(&[rows, 2]), super::scales(rows * 2)),
        ("mx8.weight", "F8_E4M3", shape(&[rows, 64]), bytes(seed.wrapping_add(6), rows * 64)),
        ("mx8.weight_scale", "F8_E8M0", shape(&[rows, 2]), super::scales(rows * 2)),
        ("gptq.qweight", "I32", shape(&[5, outputs]), bytes(seed.wrapping_add(7), 20 * outputs)),
        ("gptq.qzeros", "I32", shape(&[3, rows]), bytes(seed.wrapping_add(8), 12 * rows)),
        ("gptq.scales", "F16", shape(&[3, outputs]), scales.clone()),
        ("awq.qweight", "I32", shape(&[40, rows]), bytes(seed.wrapping_add(9), 160 * rows)),
        ("awq.qzeros", "I32", shape(&[3, rows]), bytes(seed.wrapping_add(10), 12 * rows)),
        ("awq.scales", "F16", shape(&[3, outputs]), scales),
        ("norm", "BF16", shape(&[rows]), bytes(seed.wrapping_add(11), 2 * rows)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn all_that_is_put_together_is_shown_at_fp8(
        seed: u64,
        rows in 2_usize..40,
        is_e4m3 in any::<bool>(),
        guard in 0_u32..4,
        scale in -9_i32..9,
        (from, length) in (any::<prop::sample::Index>(), 1_usize..5000),
    ) {
        let (device, model) = held(&all_schemes(seed, rows));
        let format = if is_e4m3 { "fp8_e4m3fn" } else { "fp8_e5m2" };
        let spelling = format!("{format}+g{guard}@{scale}");
        let layout = at(&device, &model, &spelling);
        let file = whole(&device, &layout);
        let (shown, wide) = (tensors(&file), tensors(&whole(&device, &at(&device, &model, "bf16"))));
        let sixes = super::spread(&bytes(seed.wrapping_add(12), rows * 48));
        let scales = super::scales(rows * 2);
        let want = expanded(Slow::Fp6E3m2, &sixes, rows as u64 * 64, MX_BLOCK as u64, Scales::Powers(&scales));
        prop_assert!(wide["mx6.weight"].2 == want);
        let names: Vec<_> = shown.keys().map(String::as_str).collect();
        prop_assert_eq!(
            names,
            [
                "awq.weight", "experts", "gptq.weight", "mx.weight", "mx6.weight", "mx8.weight", "mx8.weight_scale", "norm",
                "nv.weight"
            ]
        );
        // Elements of MXFP8 are fp8 already: they stay what they are, beside their scales.
        prop_assert_eq!(layout.shown(), (7, 2));
        for (name, (dtype, shape, bytes)) in &shown {
            if name.starts_with("mx8") {
                let expected = if name.ends_with("scale") { "F8_E8M0" } else { "F8_E4M3" };
                prop_assert_eq!(dtype, expected);
                continue;
            }
            prop_assert_eq!(dtype, if is_e4m3 { "F8_E4M3" } else { "F8_E5M2" });
            let (_, wide_shape, bf16) = &wide[name];
            prop_assert_eq!(shape, wide_shape);
            let want = view_bytes(Slow::Bf16, &spelling, bf16, bf16.len() as u64 / 2).unwrap();
            prop_assert!(*bytes == want, "{name} at {spelling}");
        }
        // Any part is that part of the whole.
        let from = from.index(file.len());
        let mut part = vec![0xa5; length.min(file.len() - from)];
        layout.read(&device, from as u64, &mut part).unwrap();
        prop_assert!(part == file[from..from + part.len()]);
    }
}

#[test]
fn a_value_beyond_fp8_is_its_largest_and_what_is_none_is_nan() {
    // 6 times 2^120, 6 times NaN, 6 and its scale of 2^-7, −0.5.
    let elements = [vec![0x77; 16], vec![0x77; 16], vec![0x97; 16]].concat();
    let (device, model) =
        held(&[("x_blocks", "U8", &[1, 3, 16], elements), ("x_scales", "U8", &[1, 3], vec![247, 255, 120])]);
    let shown = &tensors(&whole(&device, &at(&device, &model, "fp8_e4m3fn+g0")))["x"];
    assert_eq!((shown.0.as_str(), &shown.1[..]), ("F8_E4M3", &[1, 96][..]));
    assert!(shown.2[..32].iter().all(|code| *code == 0x7e));
    assert!(shown.2[32..64].iter().all(|code| *code == 0x7f));
    // 6 · 2^−7 is 1.5 · 2^−5; −0.5 · 2^−7 is 2^−8, a subnormal of fp8.
    assert!(shown.2[64..].as_chunks::<2>().0.iter().all(|pair| *pair == [0x14, 0x82]));
}

#[test]
fn integers_whose_groups_take_much_to_put_together_stay_in_their_parts() {
    // As many groups as inputs: small as it is stored, and a factor for each of 16 rows of each.
    const INPUTS: u64 = 1 << 17;
    let model = |groups: u64| -> Vec<Tensor<'static>> {
        let count = usize::try_from(groups * 16).unwrap();
        let scales = vec![0x3c; 2 * count];
        vec![
            (
                "l.qweight",
                "I32",
                vec![INPUTS / 8, 16].leak(),
                vec![0x12; usize::try_from(INPUTS).unwrap() * 8],
            ),
            ("l.qzeros", "I32", vec![groups, 2].leak(), vec![0x34; count / 2]),
            ("l.scales", "F16", vec![groups, 16].leak(), scales),
            ("norm", "F32", &[2], vec![0; 8]),
        ]
    };
    for (groups, is_whole) in [(INPUTS, false), (INPUTS / 32, true)] {
        let (device, model) = held(&model(groups));
        for view in ["bf16", "fp8_e4m3fn"] {
            let shown = tensors(&whole(&device, &at(&device, &model, view)));
            assert_eq!(shown.contains_key("l.weight"), is_whole, "{groups} groups at {view}");
            assert_eq!(shown.contains_key("l.qweight"), !is_whole, "{groups} groups at {view}");
        }
    }
}
