//! Figures against a slow recomputation, and what becomes of tensors without elements or with zeros
//! only.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use super::*;
use crate::load::{PIECE, tests::checkpoint};
use lamina_codec::block::{Bundle, Stored};
use lamina_codec::format::Format;
use lamina_codec::{BLOCK_BYTES, Encoder};

/// Weights as they are found: sums of noise, bf16.
fn weights(elements: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(state.to_le_bytes()[3]) / 255.0 - 0.5 + f32::from(state.to_le_bytes()[2]) / 65025.0
    };
    (0..elements).flat_map(|_| ((next() + next() + next()) * 0.05).to_le_bytes()[2..].to_vec()).collect()
}

fn analyzed(model: &ModelFile, options: &AnalyzeOptions) -> Value {
    let report = analyze(std::slice::from_ref(model), options, |_| ControlFlow::Continue(())).unwrap();
    serde_json::to_value(report).unwrap()
}

fn close(got: &Value, want: f64, what: &str) {
    let got = got.as_f64().unwrap_or_else(|| panic!("{what}: {got}"));
    // Figures are rounded to six decimals.
    assert!((got - want).abs() <= 2e-6 * want.abs().max(1.0), "{what}: {got}, expected {want}");
}

#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn float(count: usize) -> f64 {
    count as f64
}

/// Blocks of a tensor's bytes, the last one filled up.
fn blocks(bytes: &[u8]) -> impl Iterator<Item = lamina_codec::BlockWords> {
    bytes.chunks(BLOCK_BYTES).map(|chunk| {
        let mut words = [0; BLOCK_BYTES];
        words[..chunk.len()].copy_from_slice(chunk);
        words
    })
}

#[test]
fn the_figures_are_what_coding_block_by_block_gives() {
    // Longer than a piece, and not a whole number of blocks.
    let bytes = weights(700_001);
    let (_file, model) = checkpoint(&[("w", "BF16", &[700_001], bytes.clone())]);
    let codecs = vec![Codec::Zstd, Codec::Lz4];
    let report = analyzed(&model, &AnalyzeOptions { codecs: codecs.clone(), kv: None });
    let tensor = &report["tensors"][0];
    assert_eq!(tensor["codecs"].as_object().unwrap().len(), 2);
    for codec in codecs {
        let (mut stored, mut word_major, mut planes) = (0, 0, [0; 16]);
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        for words in blocks(&bytes) {
            encoder.block(Format::Bf16, codec, &words, &mut bundle);
            stored += bundle.bytes().len();
            let Some(Stored::Planes(found)) = &bundle.stored else { panic!("planes") };
            planes.iter_mut().zip(found.lengths).for_each(|(sum, length)| *sum += usize::from(length));
            encoder.words(codec, &words, &mut bundle);
            word_major += bundle.bytes().len();
        }
        let got = &tensor["codecs"][codec.name()];
        close(&got["ratio"], float(bytes.len()) / float(stored), "ratio");
        close(&got["savings"], 1.0 - float(stored) / float(bytes.len()), "savings");
        close(&got["savings_vs_bf16"], 1.0 - float(stored) / float(bytes.len()), "savings");
        assert_eq!(got["plane_ratios"].as_array().unwrap().len(), 16);
        for (index, plane) in planes.into_iter().enumerate() {
            let got = &got["plane_ratios"][index];
            if plane == 0 {
                assert_eq!(got, &Value::Null, "plane {index}");
            } else {
                close(got, 700_001.0 / 8.0 / float(plane), "plane");
            }
        }
        close(&tensor["word_major"][codec.name()], float(bytes.len()) / float(word_major), "words");
        assert_eq!(report["total"]["codecs"][codec.name()]["ratio"], got["ratio"]);
        assert_eq!(report["total"]["formats"][0]["codecs"][codec.name()], *got);
    }

    let mut bits = 0.0;
    for chunk in bytes.chunks(BLOCK_BYTES) {
        let exponents: Vec<u16> =
            chunk.chunks(2).map(|word| u16::from_le_bytes([word[0], word[1]]) >> 7 & 0xff).collect();
        for exponent in &exponents {
            let same = exponents.iter().filter(|other| *other == exponent).count();
            bits += 8.0 - (float(same) / float(exponents.len())).log2();
        }
    }
    close(&tensor["entropy_limit"], float(bytes.len()) * 8.0 / bits, "limit");
    assert_eq!(report["total"]["entropy_limit"], tensor["entropy_limit"]);
    let best = tensor["codecs"]["zstd"]["ratio"].as_f64().unwrap();
    close(&tensor["codecs"]["zstd"]["of_limit"], best / (float(bytes.len()) * 8.0 / bits), "distance");
}

#[test]
fn rounded_values_are_the_views_bytes_and_grouped_integers() {
    let elements = 3 * 4096 + 5;
    let bytes = weights(elements);
    let (_file, model) = checkpoint(&[("w", "BF16", &[elements as u64], bytes.clone())]);
    let report = analyzed(&model, &AnalyzeOptions { codecs: vec![Codec::Zstd], kv: None });
    let rounded = &report["tensors"][0]["rounded"];

    let values: Vec<f32> = bytes.chunks(2).map(|word| f32::from_le_bytes([0, 0, word[0], word[1]])).collect();
    let largest = values.iter().fold(0_f32, |most, value| most.max(value.abs()));
    let scale = rounded["fp8_scale_exp"].as_i64().unwrap();
    let divided = f64::from(largest) / 2_f64.powi(i32::try_from(scale).unwrap());
    assert!(divided <= 448.0 && divided * 2.0 > 448.0, "{largest} at {scale}");
    let fp8 = lamina_reference::view_bytes(
        lamina_reference::Format::Bf16,
        &format!("fp8_e4m3fn@{scale}"),
        &bytes,
        elements as u64,
    )
    .unwrap();
    let nibbles: Vec<u8> = values
        .chunks(rounding::GROUP)
        .flat_map(|group| {
            let most = group.iter().fold(0_f32, |most, value| most.max(value.abs()));
            // The nearest of all fifteen levels, the even one of two.
            group.iter().map(move |value| {
                let distance =
                    |level: i8| (f64::from(*value) - f64::from(level) * f64::from(most / 7.0)).abs();
                let nearest = (-7..=7_i8).min_by(|a, b| {
                    distance(*a).total_cmp(&distance(*b)).then((a % 2).abs().cmp(&(b % 2).abs()))
                });
                nearest.unwrap().cast_unsigned() & 15
            })
        })
        .collect();
    let int4: Vec<u8> =
        nibbles.chunks(2).map(|pair| pair.get(1).copied().unwrap_or(0) << 4 | pair[0]).collect();
    for (name, format, bytes) in [("fp8", Format::Fp8E4m3fn, fp8), ("int4", Format::Int4, int4)] {
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        let stored: usize = blocks(&bytes)
            .map(|words| {
                encoder.block(format, Codec::Zstd, &words, &mut bundle);
                bundle.bytes().len()
            })
            .sum();
        let got = &rounded[name]["codecs"]["zstd"];
        assert_eq!(rounded[name]["elements"], elements, "{name}");
        assert_eq!(got["stored_bytes"], stored, "{name}");
        close(&got["ratio"], float(bytes.len()) / float(stored), name);
        close(&got["savings_vs_bf16"], 1.0 - float(stored) / float(2 * elements), name);
        assert_eq!(report["total"]["rounded"][name], rounded[name]);
    }
}

#[test]
fn empty_and_zero_tensors_have_no_ratio_and_opaque_ones_no_planes() {
    let (_file, model) = checkpoint(&[
        ("bytes", "U8", &[5000], vec![7; 5000]),
        ("none", "F32", &[0, 3], Vec::new()),
        ("scalar", "F16", &[], vec![0, 0x3c]),
        ("zeros", "BF16", &[64, 64], vec![0; 8192]),
    ]);
    let report = analyzed(&model, &AnalyzeOptions::default());
    let tensors = report["tensors"].as_array().unwrap();
    let named = |name: &str| tensors.iter().find(|tensor| tensor["name"] == name).unwrap();
    for codec in Codec::ALL.map(Codec::name) {
        for name in ["none", "zeros"] {
            assert_eq!(named(name)["codecs"][codec]["ratio"], Value::Null, "{name}");
            assert_eq!(named(name)["codecs"][codec]["stored_bytes"], 0, "{name}");
        }
        assert_eq!(named("bytes")["codecs"][codec]["plane_ratios"], json!([]));
        assert!(named("bytes")["codecs"][codec]["ratio"].as_f64().unwrap() > 10.0);
        assert!(report["total"]["codecs"][codec]["ratio"].as_f64().unwrap() > 10.0);
    }
    assert_eq!(named("bytes")["entropy_limit"], Value::Null);
    assert_eq!(named("none")["elements"], 0);
    assert_eq!((&named("scalar")["elements"], &named("scalar")["format"]), (&json!(1), &json!("fp16")));
    assert_eq!(named("zeros")["planes"][1], "e7");
    assert!(named("bytes").get("rounded").is_none() && named("zeros").get("rounded").is_some());
    // Empty tensors make no row of their own.
    let formats: Vec<_> = report["total"]["formats"].as_array().unwrap().iter().map(|f| &f["name"]).collect();
    assert_eq!(formats, ["opaque", "fp16", "bf16"]);

    let (_file, empty) = checkpoint(&[]);
    let report = analyzed(&empty, &AnalyzeOptions::default());
    assert_eq!((&report["tensors"], &report["total"]["codecs"]["lz4"]["ratio"]), (&json!([]), &Value::Null));
}

#[test]
fn kv_marks_the_tensors_of_that_shape_and_needs_one() {
    let (_file, model) = checkpoint(&[
        ("k", "BF16", &[64, 32], weights(2048)),
        ("w", "BF16", &[32, 64], weights(2048)),
        ("x", "BF16", &[2, 32, 32], weights(2048)),
    ]);
    let kv =
        |channels| AnalyzeOptions { kv: Some(KvLayout::rows(channels, 16)), ..AnalyzeOptions::default() };
    let report = analyzed(&model, &kv(32));
    let layouts: Vec<_> = report["tensors"].as_array().unwrap().iter().map(|t| &t["layout"]).collect();
    assert_eq!(
        layouts,
        [
            &json!({ "kind": "kv", "channels": 32, "window": 16 }),
            &json!({ "kind": "weight" }),
            &json!({ "kind": "weight" })
        ]
    );
    let refused = analyze(&[model], &kv(33), |_| ControlFlow::Continue(())).unwrap_err();
    assert!(refused.to_string().contains("33"), "{refused}");
}

#[test]
fn progress_counts_both_passes_and_may_stop_them() {
    let (_file, model) = checkpoint(&[
        ("w", "BF16", &[PIECE], weights(usize::try_from(PIECE).unwrap())),
        ("i", "I8", &[100], vec![1; 100]),
    ]);
    let models = [model];
    let most = AtomicU64::new(0);
    let total = 4 * PIECE + 100;
    analyze(&models, &AnalyzeOptions::default(), |progress| {
        assert_eq!(progress.total, total);
        most.fetch_max(progress.bytes, Ordering::Relaxed);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(most.into_inner(), total);
    let stopped = analyze(&models, &AnalyzeOptions::default(), |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(AnalyzeError::Stopped)));
}

#[test]
fn a_file_cut_short_meanwhile_is_an_error_that_names_it() {
    let (file, model) = checkpoint(&[("w", "BF16", &[4096], weights(4096))]);
    file.as_file().set_len(4096).unwrap();
    let cut = analyze(&[model], &AnalyzeOptions::default(), |_| ControlFlow::Continue(())).unwrap_err();
    assert!(cut.to_string().contains("cut short") && cut.to_string().contains("\"w\""), "{cut}");
}

#[test]
fn the_drawing_has_a_bar_for_each_plane_and_codec() {
    let (_file, model) = checkpoint(&[
        ("w", "BF16", &[4096], weights(4096)),
        ("i", "I8", &[100], vec![1; 100]),
        ("bytes", "U8", &[5], vec![7; 5]),
    ]);
    let report = analyze(&[model], &AnalyzeOptions::default(), |_| ControlFlow::Continue(())).unwrap();
    let svg = plot::svg(&report, "a<b>&\u{1}c").unwrap();
    // bf16, int8, and the roundings to fp8 and int4.
    assert_eq!(svg.matches("<title>").count(), (16 + 8 + 8 + 4) * Codec::ALL.len());
    assert!(svg.contains("a&lt;b&gt;&amp;c") && svg.ends_with("</svg>\n"));
    let (_file, opaque) = checkpoint(&[("bytes", "U8", &[5], vec![7; 5])]);
    let report = analyze(&[opaque], &AnalyzeOptions::default(), |_| ControlFlow::Continue(())).unwrap();
    assert!(plot::svg(&report, "x").is_none());
}

#[test]
fn caches_are_coded_by_windows_as_the_device_codes_them() {
    // Longer than a piece, with a window that divides neither pieces nor the tensor.
    let (rows, channels) = (6000_u32, 96_u32);
    let bytes: Vec<u8> = weights((rows * channels) as usize)
        .chunks(2)
        .enumerate()
        .flat_map(|(at, value)| {
            // Each channel has a size and a side of its own; some rows repeat.
            let channel = u8::try_from(at % 96).unwrap();
            let value = if at / 96 % 16 == 15 { [0x11, 0x3d] } else { [value[0], value[1]] };
            [value[0], (value[1] & 0x7f).wrapping_sub(channel % 5) | channel << 7]
        })
        .collect();
    let layout = KvLayout::rows(channels, 77);
    let shape = vec![u64::from(rows), u64::from(channels)];
    let (_file, model) = checkpoint(&[
        ("layers.0.k", "BF16", &shape, bytes.clone()),
        ("layers.0.v", "BF16", &shape, bytes.clone()),
        ("layers.1.v", "BF16", &shape, weights((rows * channels) as usize)),
    ]);
    let report = analyzed(&model, &AnalyzeOptions { kv: Some(layout), ..AnalyzeOptions::default() });
    let windows = Shape::new(Format::Bf16, &layout).unwrap().unwrap();
    let padded = [&bytes[..], &vec![0; bytes.len().next_multiple_of(BLOCK_BYTES) - bytes.len()]].concat();
    for codec in Codec::ALL {
        let (mut stored, mut ways, mut repeated, mut before) = (0, [0_u64; 3], 0, 0);
        let mut bundles = Vec::new();
        for window in padded.chunks(windows.blocks() * BLOCK_BYTES) {
            let coded = Encoder::new().window(&windows, before, codec, window, None, &mut bundles);
            ways[coded.coding as usize] += 1;
            repeated += coded.repeated_rows;
            stored += bundles.iter().map(|bundle| bundle.bytes().len()).sum::<usize>();
            before += windows.blocks() as u64;
        }
        assert!(repeated > 300 && ways[0] == 0, "{ways:?} {repeated}");
        for tensor in 0..2 {
            let got = &report["tensors"][tensor]["codecs"][codec.name()];
            close(&got["ratio"], float(bytes.len()) / float(stored), codec.name());
            assert_eq!(
                got["windows"],
                json!({ "plain": ways[0], "channels": ways[1], "deltas": ways[2], "repeated_rows": repeated })
            );
        }
        let kv = &report["kv"];
        close(&kv["layers"][0]["ratios"][codec.name()], float(bytes.len()) / float(stored), "layer");
        let ratios: Vec<_> = (0..3)
            .map(|at| report["tensors"][at]["codecs"][codec.name()]["ratio"].as_f64().unwrap())
            .collect();
        close(&kv["geometric_mean"][codec.name()], ratios.iter().product::<f64>().cbrt(), "mean");
    }
    let places: Vec<_> =
        report["kv"]["layers"].as_array().unwrap().iter().map(|l| (&l["layer"], &l["side"])).collect();
    assert_eq!(places, [(&json!(0), &json!("k")), (&json!(0), &json!("v")), (&json!(1), &json!("v"))]);
    // The drawing has a bar for each layer and side, and for each codec and for words.
    let svg = plot::svg(
        &analyze(&[model], &AnalyzeOptions { kv: Some(layout), ..AnalyzeOptions::default() }, |_| {
            ControlFlow::Continue(())
        })
        .unwrap(),
        "x",
    )
    .unwrap();
    assert_eq!(svg.matches("<title>layer ").count(), 3 * (Codec::ALL.len() + 2));
}

#[test]
fn six_bits_are_coded_with_a_byte_each_and_held_against_the_bytes_of_the_file() {
    // Longer than a piece, and not a whole number of blocks.
    let values = 3 * 512 * 1024 + 32 * 5;
    let packed = lamina_codec::testing::bytes(5, values / 4 * 3);
    let shape = [values as u64 / 32, 32];
    let (_file, model) = checkpoint(&[
        ("l.weight", "F6_E2M3", &shape, packed.clone()),
        ("l.weight_scale", "U8", &[shape[0], 1], vec![120; values / 32]),
    ]);
    let report = analyzed(&model.spread(), &AnalyzeOptions { codecs: vec![Codec::Tree], kv: None });
    let tensor = &report["tensors"][0];
    assert_eq!((&tensor["format"], &tensor["elements"]), (&json!("fp6_e2m3"), &json!(values)));
    assert_eq!(tensor["planes"], json!(["z7", "z6", "s", "e1", "e0", "m2", "m1", "m0"]));
    let (mut stored, mut words) = (0, 0);
    let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
    for block in blocks(&crate::model::sixes::tests::slow(&packed)) {
        encoder.block(Format::Fp6E2m3, Codec::Tree, &block, &mut bundle);
        stored += bundle.bytes().len();
    }
    for block in blocks(&packed) {
        encoder.words(Codec::Lz4, &block, &mut bundle);
        words += bundle.bytes().len();
    }
    close(&tensor["codecs"]["tree"]["ratio"], float(packed.len()) / float(stored), "ratio");
    close(&tensor["word_major"]["lz4"], float(packed.len()) / float(words), "word-major");
    assert_eq!(tensor["logical_bytes"], json!(packed.len()));
    let [scaled] = report["scaled"].as_array().unwrap().as_slice() else { panic!("{report}") };
    assert_eq!((&scaled["scheme"], &scaled["values"]), (&json!("mxfp6"), &json!(values)));
    assert_eq!((&scaled["element_bytes"], &scaled["bits"]), (&json!(packed.len()), &json!(6.25)));
}

#[test]
fn block_scaled_tensors_are_summed_up_with_all_their_parts() {
    let elements = lamina_codec::testing::bytes(5, 40_960);
    let (_file, model) = checkpoint(&[
        ("x_blocks", "U8", &[40, 64, 16], elements.clone()),
        ("x_scales", "U8", &[40, 64], vec![120; 2560]),
        ("y_scales", "U8", &[4], vec![120; 4]),
    ]);
    let report = analyzed(&model, &AnalyzeOptions { codecs: vec![Codec::Tree], kv: None });
    let formats: Vec<_> =
        report["tensors"].as_array().unwrap().iter().map(|tensor| tensor["format"].clone()).collect();
    assert_eq!(formats, ["fp4_e2m1", "e8m0", "opaque"]);
    let [scaled] = report["scaled"].as_array().unwrap().as_slice() else { panic!("{report}") };
    assert_eq!((&scaled["scheme"], &scaled["tensors"]), (&json!("mxfp4"), &json!(1)));
    assert_eq!(
        (&scaled["values"], &scaled["element_bytes"], &scaled["scale_bytes"]),
        (&json!(81_920), &json!(40_960), &json!(2560))
    );
    close(&scaled["bits"], 4.25, "bits before coding");
    let stored = |at: usize| report["tensors"][at]["codecs"]["tree"]["stored_bytes"].as_f64().unwrap();
    close(&scaled["codecs"]["tree"], 8.0 * (stored(0) + stored(1)) / 81_920.0, "bits stored");
    let remark = report["remarks"][0].as_str().unwrap();
    assert!(remark.ends_with(": y_scales: scales without y_blocks: kept as U8"), "{remark}");
    let planes = |format: usize| report["total"]["formats"][format]["planes"].clone();
    assert_eq!(planes(1), json!(["s", "e1", "e0", "m0"]));
    assert_eq!(planes(2), json!(["e7", "e6", "e5", "e4", "e3", "e2", "e1", "e0"]));
}
