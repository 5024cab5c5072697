//! What is taken for a block-scaled tensor, and what is said of what is none.

use super::*;

fn tensor(name: &str, dtype: &str, shape: &[u64]) -> ModelTensor {
    let bits = match dtype {
        "F32" | "I32" => 32,
        "F16" | "BF16" => 16,
        "F6_E2M3" | "F6_E3M2" => 6,
        _ => 8,
    };
    let length = shape.iter().product::<u64>() * bits / 8;
    let (name, dtype) = (name.to_owned(), dtype.to_owned());
    ModelTensor { name, dtype, shape: shape.to_vec(), format: "opaque", offset: 0, length, rearranged: None }
}

fn of(tensors: &[(&str, &str, &[u64])]) -> Vec<ModelTensor> {
    tensors.iter().map(|(name, dtype, shape)| tensor(name, dtype, shape)).collect()
}

/// What is found, as scheme, name and shape of the whole.
fn found(tensors: &[(&str, &str, &[u64])]) -> Vec<(Scheme, Option<Whole>)> {
    let (found, remarks) = find(&of(tensors));
    assert_eq!(remarks, Vec::<String>::new());
    found.into_iter().map(|scaled| (scaled.scheme, scaled.whole)).collect()
}

fn whole(name: &str, shape: &[u64], exchanged: bool) -> Whole {
    Whole { name: name.to_owned(), shape: shape.to_vec(), exchanged }
}

#[test]
fn schemes_are_known_by_name_dtype_and_shape() {
    assert_eq!(
        found(&[("e.up_blocks", "U8", &[4, 6, 3, 16]), ("e.up_scales", "U8", &[4, 6, 3])]),
        [(Scheme::Mxfp4, Some(whole("e.up", &[4, 96, 6], true)))]
    );
    assert_eq!(
        found(&[("x_scales", "F8_E8M0", &[6, 3]), ("x_blocks", "U8", &[6, 3, 16])]),
        [(Scheme::Mxfp4, Some(whole("x", &[6, 96], false)))]
    );
    let nvfp4: [(&str, &str, &[u64]); 4] = [
        ("l.weight", "U8", &[6, 24]),
        ("l.weight_scale", "F8_E4M3", &[6, 3]),
        ("l.weight_scale_2", "F32", &[]),
        ("l.input_scale", "F32", &[]),
    ];
    assert_eq!(found(&nvfp4), [(Scheme::Nvfp4, Some(whole("l.weight", &[6, 48], false)))]);
    assert_eq!(
        found(&[("l.weight", "F8_E4M3", &[6, 96]), ("l.weight_scale", "U8", &[6, 3])]),
        [(Scheme::Mxfp8, Some(whole("l.weight", &[6, 96], false)))]
    );
    for dtype in ["F6_E2M3", "F6_E3M2"] {
        assert_eq!(
            found(&[("l.weight", dtype, &[2, 6, 96]), ("l.weight_scale", "U8", &[2, 6, 3])]),
            [(Scheme::Mxfp6, Some(whole("l.weight", &[2, 6, 96], false)))]
        );
    }
    assert_eq!(
        found(&[("l.weight", "U8", &[6, 48]), ("l.weight_scale", "F8_E8M0", &[6, 3])]),
        [(Scheme::Mxfp4, Some(whole("l.weight", &[6, 96], false)))]
    );
    let integers = |columns, rows| {
        found(&[
            ("l.qweight", "I32", &[rows, columns]),
            ("l.qzeros", "I32", &[2, 4]),
            ("l.scales", "F16", &[2, 32]),
            ("l.g_idx", "I32", &[64]),
        ])
    };
    let is = || Some(whole("l.weight", &[32, 64], false));
    assert_eq!(integers(32, 8), [(Scheme::Gptq, is())]);
    assert_eq!(integers(4, 64), [(Scheme::Awq, is())]);
    // Where there is a weight already, it is shown and the integers are too.
    let beside = [
        ("l.qweight", "I32", &[8, 32][..]),
        ("l.qzeros", "I32", &[2, 4]),
        ("l.scales", "F16", &[2, 32]),
        ("l.weight", "BF16", &[32, 64]),
    ];
    assert_eq!(found(&beside), [(Scheme::Gptq, None)]);
}

#[test]
fn no_two_are_put_together_under_one_name() {
    let integers: [(&str, &str, &[u64]); 3] =
        [("l.qweight", "I32", &[4, 16]), ("l.scales", "F16", &[1, 16]), ("l.qzeros", "I32", &[1, 2])];
    let blocks: [(&str, &str, &[u64]); 2] =
        [("l.weight_blocks", "U8", &[6, 3, 16]), ("l.weight_scales", "U8", &[6, 3])];
    let (gptq, mxfp4) = (whole("l.weight", &[16, 32], false), whole("l.weight", &[6, 96], false));
    assert_eq!(
        found(&[&integers[..], &blocks].concat()),
        [(Scheme::Gptq, Some(gptq)), (Scheme::Mxfp4, None)]
    );
    assert_eq!(
        found(&[&blocks[..], &integers].concat()),
        [(Scheme::Mxfp4, Some(mxfp4)), (Scheme::Gptq, None)]
    );
    let named: [(&str, &str, &[u64]); 2] =
        [("__metadata___blocks", "U8", &[6, 3, 16]), ("__metadata___scales", "U8", &[6, 3])];
    assert_eq!(found(&named), [(Scheme::Mxfp4, None)], "what a header says besides");
}

#[test]
fn elements_and_scales_get_their_formats() {
    let mut tensors = of(&[
        ("x_blocks", "U8", &[6, 3, 16]),
        ("x_scales", "U8", &[6, 3]),
        ("l.qweight", "I32", &[8, 32]),
        ("l.qzeros", "I32", &[2, 4]),
        ("l.scales", "F16", &[2, 32]),
        ("other", "U8", &[7]),
        ("m.weight", "F6_E3M2", &[6, 96]),
        ("m.weight_scale", "U8", &[6, 3]),
    ]);
    assert_eq!(mark(&mut tensors), Vec::<String>::new());
    let formats: Vec<_> = tensors.iter().map(|tensor| tensor.format).collect();
    // Those of six bits are fp6 once they have a byte each.
    assert_eq!(formats, ["fp4_e2m1", "e8m0", "int4", "int4", "opaque", "opaque", "opaque", "e8m0"]);
}

#[test]
fn what_is_of_other_schemes_is_nobodys_business() {
    for tensors in [
        &[("attention_blocks", "BF16", &[4, 16][..])][..],
        &[("lora_scales", "F32", &[4])],
        &[("l.weight", "F8_E4M3", &[8, 64]), ("l.weight_scale", "F32", &[])],
        &[("l.weight", "F8_E4M3", &[8, 64]), ("l.weight_scale", "BF16", &[8, 1])],
        &[("l.weight", "I8", &[8, 64]), ("l.weight_scale", "BF16", &[8])],
        &[("l.qweight", "U8", &[8, 64])],
        &[("x_blocks", "U8", &[0, 3, 16]), ("x_scales", "U8", &[0, 3])],
    ] {
        assert_eq!(found(tensors), []);
    }
}

#[test]
fn what_does_not_fit_is_said_in_a_line_and_kept() {
    for (tensors, said) in [
        (&[("x_scales", "U8", &[6, 3][..])][..], "x_scales: scales without x_blocks: kept as U8"),
        (
            &[("x_blocks", "U8", &[6, 3, 16])],
            "x_blocks: blocks without x_scales in the same file: kept as U8",
        ),
        (
            &[("x_blocks", "U8", &[6, 3, 16]), ("x_scales", "U8", &[6, 4])],
            "x_blocks: [6, 3, 16] are not 16 bytes for each of x_scales [6, 4]: kept as U8",
        ),
        (
            &[("x_blocks", "U8", &[288]), ("x_scales", "U8", &[18])],
            "x_blocks: [288] are not 16 bytes for each of x_scales [18]: kept as U8",
        ),
        (
            &[("x_blocks", "BF16", &[6, 3, 16]), ("x_scales", "U8", &[6, 3])],
            "x_blocks: BF16 with x_scales U8 are not U8 and U8: kept as they are",
        ),
        (
            &[("x", "BF16", &[1]), ("x_blocks", "U8", &[6, 3, 16]), ("x_scales", "U8", &[6, 3])],
            "x_blocks: there is a tensor x already: kept as U8",
        ),
        (
            &[("l.weight_scale", "F8_E4M3", &[6, 3])],
            "l.weight_scale: scales without l.weight: kept as F8_E4M3",
        ),
        (&[("l.weight_scale_2", "F32", &[])], "l.weight_scale_2: scales without l.weight: kept as F32"),
        (
            &[("l.weight", "U8", &[6, 24]), ("l.weight_scale", "F8_E4M3", &[6, 3])],
            "l.weight: NVFP4 without l.weight_scale_2 in the same file: kept as U8",
        ),
        (
            &[
                ("l.weight", "U8", &[6, 24]),
                ("l.weight_scale", "F8_E4M3", &[6, 3]),
                ("l.weight_scale_2", "F32", &[6]),
            ],
            "l.weight_scale_2: F32 [6] is no factor of all: kept as U8",
        ),
        (
            &[("l.weight", "U8", &[6, 24]), ("l.weight_scale", "BF16", &[6, 3])],
            "l.weight: U8 with l.weight_scale BF16 are not U8 and F8_E4M3, U8 or F8_E8M0: kept as they are",
        ),
        (
            &[("l.weight", "F8_E4M3", &[6, 64]), ("l.weight_scale", "U8", &[6, 3])],
            "l.weight: [6, 64] are not 32 elements for each of l.weight_scale [6, 3]: kept as F8_E4M3",
        ),
        (
            &[("l.weight", "F6_E2M3", &[6, 64]), ("l.weight_scale", "U8", &[6, 3])],
            "l.weight: [6, 64] are not 32 elements for each of l.weight_scale [6, 3]: kept as F6_E2M3",
        ),
        (
            &[("l.weight", "F6_E3M2", &[6, 96]), ("l.weight_scale", "F32", &[6, 3])],
            "l.weight: F6_E3M2 with l.weight_scale F32 are not F6_E2M3 or F6_E3M2 and U8 or F8_E8M0: kept as they are",
        ),
        (
            &[("l.weight", "U8", &[6, 72]), ("l.weight_scale", "U8", &[6, 3])],
            "l.weight: [6, 72] are 24 bytes for each of l.weight_scale [6, 3], as packed MXFP6 is, but U8 does not say \
             whether F6_E2M3 or F6_E3M2: kept as U8",
        ),
        (
            &[("l.weight_scale", "F8_E8M0", &[6, 3])],
            "l.weight_scale: scales without l.weight: kept as F8_E8M0",
        ),
        (
            &[
                ("l.qweight", "I32", &[8, 32]),
                ("l.qzeros", "I32", &[2, 4]),
                ("l.scales", "F16", &[2, 32]),
                ("l.g_idx", "I32", &[63]),
            ],
            "l.g_idx: I32 [63] are no groups of 64 inputs: l.qweight is kept as I32",
        ),
        (&[("l.qweight", "I32", &[8, 32])], "l.qweight: integers without l.scales: kept as I32"),
        (&[("l.qzeros", "I32", &[8, 32])], "l.qzeros: scales without l.qweight: kept as I32"),
        (
            // Eight bits each, whatever a configuration says.
            &[("l.qweight", "I32", &[16, 32]), ("l.qzeros", "I32", &[2, 8]), ("l.scales", "F16", &[2, 32])],
            "l.qweight: [16, 32] with scales [2, 32] and zeros [2, 8] are no 4-bit integers: kept as I32",
        ),
    ] {
        let (found, remarks) = find(&of(tensors));
        assert_eq!((found, remarks), (Vec::new(), vec![said.to_owned()]));
    }
}
