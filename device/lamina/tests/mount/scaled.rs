//! Block-scaled checkpoints, mounted: a model of GPT-OSS's kind, made here, for there is no real
//! one at hand. Whoever reads it at bf16 gets what the reference makes of its parts.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use lamina_reference::{Format, Scales, expanded};
use memmap2::Mmap;
use serde_json::{Value, json};

use crate::common::{Place, Tensor, floats, header, noise, safetensors, tensor};
use crate::served::Served;

/// Experts, rows and groups of 32 of each row.
const EXPERTS: usize = 4;
const ROWS: usize = 96;
const GROUPS: usize = 11;

/// A model of one layer: two tensors of experts, and what is not quantised beside them.
fn gpt_oss() -> Vec<u8> {
    let shape = |last: &[usize]| -> Vec<u64> {
        [EXPERTS, ROWS, GROUPS].iter().chain(last).map(|n| *n as u64).collect()
    };
    let blocks = EXPERTS * ROWS * GROUPS;
    // As of weights, with what no checkpoint should have among them: 2^−127, 2^127 and NaN.
    let scales: Vec<u8> = noise(2, blocks).iter().map(|byte| 118 + byte % 7).collect();
    let mut odd = scales.clone();
    odd.iter_mut()
        .step_by(53)
        .zip([0, 254, 255, 1].into_iter().cycle())
        .for_each(|(scale, odd)| *scale = odd);
    let experts = |name: &'static str, blocks: &'static str, seed, scales: Vec<u8>| -> [Tensor<'static>; 2] {
        let elements = noise(seed, EXPERTS * ROWS * GROUPS * 16);
        [(blocks, "U8", shape(&[16]), elements), (name, "U8", shape(&[]), scales)]
    };
    let [up, up_scales] = experts("mlp.experts.up_scales", "mlp.experts.up_blocks", 1, scales);
    let [down, down_scales] = experts("mlp.experts.down_scales", "mlp.experts.down_blocks", 3, odd);
    let bias = ("mlp.experts.up_bias", "BF16", vec![4, 96], floats(Format::Bf16, 4, 384));
    let norm = ("norm.weight", "BF16", vec![352], floats(Format::Bf16, 5, 352));
    safetensors(&[bias, down, down_scales, up, up_scales, norm])
}

/// An expert tensor at bf16, rows and columns exchanged, by the reference.
fn reference(file: &[u8], name: &str) -> Vec<u8> {
    let blocks = tensor(file, &format!("{name}_blocks"));
    let scales = tensor(file, &format!("{name}_scales"));
    let rows = expanded(Format::Fp4E2m1, blocks, blocks.len() as u64 * 2, 32, Scales::Powers(scales));
    let (values, columns) = (rows.as_chunks::<2>().0, 32 * GROUPS);
    let at = |expert: usize, column: usize, row: usize| values[(expert * ROWS + row) * columns + column];
    let places = (0..EXPERTS).flat_map(|expert| (0..columns).map(move |column| (expert, column)));
    places.flat_map(|(expert, column)| (0..ROWS).flat_map(move |row| at(expert, column, row))).collect()
}

#[test]
fn a_model_of_gpt_oss_kind_is_read_at_bf16_by_who_knows_nothing_of_blocks() {
    let place = Place::new();
    let full = gpt_oss();
    let made = place.mount(&[&place.write("gpt-oss.safetensors", &full)]);
    assert!(place.read("gpt-oss/gpt-oss.safetensors") == full);
    let api = made["api"].as_str().unwrap();
    let tensors: Value = serde_json::from_str(&place.said(&["tensors", "--json", "--api", api])).unwrap();
    let format = |name: &str| {
        let mut found = tensors.as_array().unwrap().iter();
        found.find(|tensor| tensor["name"] == format!("gpt-oss/{name}")).unwrap()["format"].clone()
    };
    assert_eq!(format("mlp.experts.up_blocks"), "fp4_e2m1");
    assert_eq!(format("mlp.experts.up_scales"), "e8m0");

    let path = "gpt-oss@bf16.safetensors";
    let shown = place.read(path);
    let (head, _) = header(&shown);
    for name in ["mlp.experts.up", "mlp.experts.down"] {
        assert_eq!(head[name]["dtype"], "BF16");
        assert_eq!(head[name]["shape"], json!([EXPERTS, 32 * GROUPS, ROWS]));
        assert!(tensor(&shown, name) == reference(&full, name), "{name}");
        assert!(head.get(format!("{name}_blocks")).is_none() && head.get(format!("{name}_scales")).is_none());
    }
    for name in ["mlp.experts.up_bias", "norm.weight"] {
        assert!(tensor(&shown, name) == tensor(&full, name), "{name}");
    }
    assert_eq!(head["__metadata__"]["lamina.view"], "bf16");
    // Nothing of it is stored: it is fetched from elements and scales, 4.25 bits of 16.
    let stored: usize = place.attribute(path, "stored").unwrap().parse().unwrap();
    assert!(stored > 0 && stored < shown.len() / 3, "{stored} of {}", shown.len());

    let file = File::open(place.model(path)).unwrap();
    // SAFETY: the file is read-only, and nobody removes its model.
    let mapped = unsafe { Mmap::map(&file).unwrap() };
    assert!(mapped[..] == shown[..]);
    for (at, length) in [(0, 1), (shown.len() / 2 + 1, 4097), (shown.len() / 3, 70_001), (shown.len() - 5, 5)]
    {
        let mut part = vec![0; length.min(shown.len() - at)];
        file.read_exact_at(&mut part, at as u64).unwrap();
        assert!(part == shown[at..at + part.len()], "{length} bytes at {at}");
    }

    // What is stored into a scale is seen by who opens the file then.
    let scales = tensors.as_array().unwrap().iter();
    let scales = scales.clone().find(|tensor| tensor["name"] == "gpt-oss/mlp.experts.up_scales").unwrap();
    let base = fs::OpenOptions::new().write(true).open(place.path("m/base")).unwrap();
    base.write_all_at(&[127], scales["dpa"].as_u64().unwrap()).unwrap();
    let now = place.read(path);
    let mut changed = full.clone();
    let (head, start) = header(&full);
    let at = head["mlp.experts.up_scales"]["data_offsets"][0].as_u64().unwrap();
    changed[start + usize::try_from(at).unwrap()] = 127;
    assert!(tensor(&now, "mlp.experts.up") == reference(&changed, "mlp.experts.up"));
    // A window's view depends on its own block.
    let refused = place.refused(&["view", "add", "--api", api, "gpt-oss/mlp.experts.up_blocks", "bf16"]);
    assert!(refused.contains("only with the scale of its block"), "{refused}");
}

#[test]
fn mxfp6_is_the_same_mounted_served_and_analysed() {
    let place = Place::new();
    let elements = noise(1, 24 * 300);
    let scales: Vec<u8> = noise(2, 300).iter().map(|byte| 118 + byte % 7).collect();
    let full = safetensors(&[
        ("l.weight", "F6_E2M3", vec![100, 96], elements.clone()),
        ("l.weight_scale", "F8_E8M0", vec![100, 3], scales.clone()),
        ("p.weight", "U8", vec![1, 24], noise(3, 24)),
        ("p.weight_scale", "U8", vec![1, 1], vec![127]),
    ]);
    let path = place.write("six.safetensors", &full);
    let bit = |at: usize| elements[at / 8] >> (at % 8) & 1;
    let spread: Vec<u8> = (0..9600).map(|at| (0..6).map(|k| bit(at * 6 + k) << k).sum()).collect();
    let want = expanded(Format::Fp6E2m3, &spread, 9600, 32, Scales::Powers(&scales));
    let holds = |models: &Path| {
        assert!(fs::read(models.join("six/six.safetensors")).unwrap() == full);
        let shown = fs::read(models.join("six@bf16.safetensors")).unwrap();
        assert!(tensor(&shown, "l.weight") == want);
        assert_eq!(header(&shown).0["l.weight"]["dtype"], "BF16");
        assert!(header(&shown).0.get("l.weight_scale").is_none());
    };
    place.mount(&[&path]);
    holds(&place.path("m/models"));
    let served = Served::new(&place, &["--model", &path, "--views", "e2m1"]);
    holds(&place.path("served/models"));
    let socket = place.text("sockets/api.sock");
    let said = place.said(&["tensors", "--json", "--api", &socket]);
    let listed: Value = serde_json::from_str(&said).unwrap();
    let listed = listed.as_array().unwrap().iter().find(|tensor| tensor["name"] == "l.weight").unwrap();
    assert_eq!((&listed["format"], &listed["length"]), (&json!("fp6_e2m3"), &json!(9600)));
    let mut base = vec![0; 9600];
    let file = File::open(place.path("served/base")).unwrap();
    file.read_exact_at(&mut base, listed["dpa"].as_u64().unwrap()).unwrap();
    assert!(base == spread);
    drop(served);

    let said = place.said(&["analyze", "--json", "--codec", "tree", &path]);
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["tensors"][0]["format"], "fp6_e2m3");
    assert_eq!(
        (&report["scaled"][0]["scheme"], &report["scaled"][0]["bits"]),
        (&json!("mxfp6"), &json!(6.25))
    );
    let remark = report["remarks"][0].as_str().unwrap();
    assert!(remark.ends_with("U8 does not say whether F6_E2M3 or F6_E3M2: kept as U8"), "{remark}");
}

#[test]
fn what_only_looks_block_scaled_is_loaded_as_bytes() {
    let place = Place::new();
    let tensors: [Tensor<'_>; 4] = [
        ("a_blocks", "U8", vec![4, 3, 16], noise(1, 192)),
        ("a_scales", "U8", vec![4, 2], noise(2, 8)),
        ("b_scales", "U8", vec![9], noise(3, 9)),
        ("w", "F32", vec![5], floats(Format::Fp32, 4, 5)),
    ];
    let full = safetensors(&tensors);
    place.write("odd/model.safetensors", &full);
    place.write("odd/config.json", br#"{"quantization_config": {"quant_method": "mxfp4"}}"#);
    place.mount(&[&place.text("odd")]);
    assert!(place.read("odd/model.safetensors") == full);
    let shown = place.read("odd/model@bf16.safetensors");
    assert!(
        tensor(&shown, "a_blocks") == &tensors[0].3[..] && tensor(&shown, "b_scales") == &tensors[2].3[..]
    );
    let (head, _) = header(&shown);
    assert_eq!((&head["a_blocks"]["dtype"], &head["w"]["dtype"]), (&json!("U8"), &json!("BF16")));
    let said = place.said(&["analyze", &place.text("odd/model.safetensors")]);
    assert!(
        said.contains("a_blocks: [4, 3, 16] are not 16 bytes for each of a_scales [4, 2]: kept as U8"),
        "{said}"
    );
    assert!(said.contains("b_scales: scales without b_blocks: kept as U8"), "{said}");
}
