//! The same file at other precisions: every byte by the independent reference.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

use lamina_reference::Format;
use memmap2::Mmap;

use crate::common::{Place, bundled, floats, gguf, header, noise, reference, safetensors, tensor};

/// What a dtype is to the reference.
fn format_of(dtype: &str) -> Option<Format> {
    match dtype {
        "F32" => Some(Format::Fp32),
        "F16" => Some(Format::Fp16),
        "BF16" => Some(Format::Bf16),
        _ => None,
    }
}

/// Holds a safetensors file at a precision against the reference, tensor by tensor: how many are
/// shown so.
fn held_against(full: &[u8], shown: &[u8], spelling: &str) -> usize {
    let ((of_full, _), (of_shown, start)) = (header(full), header(shown));
    let (full_map, shown_map) = (of_full.as_object().unwrap(), of_shown.as_object().unwrap());
    assert!(full_map.keys().eq(shown_map.keys()) || shown_map.len() >= full_map.len(), "{spelling}");
    let (mut given, mut data) = (0, 0);
    for (name, entry) in full_map.iter().filter(|(name, _)| *name != "__metadata__") {
        let (was, is) = (tensor(full, name), tensor(shown, name));
        data += is.len();
        assert_eq!(entry["shape"], of_shown[name]["shape"], "{name}@{spelling}");
        let dtype = entry["dtype"].as_str().unwrap();
        // One without elements has nothing to show, and stays.
        let format = format_of(dtype).filter(|_| !was.is_empty());
        let expected = format.and_then(|format| reference(format, spelling, was));
        let wanted_dtype = match (&expected, spelling) {
            (Some(_), spelling) if spelling.starts_with("bf16") => "BF16",
            (Some(_), spelling) if spelling.starts_with("fp8_e4m3fn") => "F8_E4M3",
            (Some(_), spelling) if spelling.starts_with("fp8_e5m2") => "F8_E5M2",
            _ => dtype,
        };
        assert_eq!(of_shown[name]["dtype"], wanted_dtype, "{name}@{spelling}");
        given += usize::from(expected.is_some());
        assert!(is == expected.as_deref().unwrap_or(was), "{name}@{spelling}");
    }
    assert_eq!(start + data, shown.len(), "{spelling}: data without holes to the last byte");
    given
}

#[test]
fn the_bundled_model_is_there_to_the_bit_and_right_at_every_precision() {
    let place = Place::new();
    let full = fs::read(bundled()).unwrap();
    place.mount(&["--views", "full,e8m3,fp8_e4m3fn", bundled().to_str().unwrap()]);
    let folder = "stories260K-bf16/stories260K-bf16";
    assert!(place.read(&format!("{folder}.safetensors")) == full);
    let of = fs::metadata(place.model(&format!("{folder}.safetensors"))).unwrap();
    let source = fs::metadata(bundled()).unwrap();
    assert_eq!((of.len(), of.mtime(), of.mtime_nsec()), (source.len(), source.mtime(), source.mtime_nsec()));
    for spelling in ["e8m3", "e8m0", "e8m3+g2", "e6m3+d2+g2", "fp8_e4m3fn", "fp8_e4m3fn+g4@-3", "fp8_e5m2+g5"]
    {
        let path = format!("{folder}@{spelling}.safetensors");
        let shown = place.read(&path);
        assert_eq!(fs::metadata(place.model(&path)).unwrap().len(), shown.len() as u64);
        assert!(held_against(&full, &shown, spelling) > 10, "{spelling}");
        if !spelling.starts_with("fp8") {
            // The header is the same to the byte.
            let start = header(&full).1;
            assert!(shown.len() == full.len() && shown[..start] == full[..start], "{spelling}");
        }
        assert_eq!(place.attribute(&path, "view").as_deref(), Some(spelling));
        // The same file by the model's folder, and by its name alone.
        assert!(place.read(&format!("stories260K-bf16@{spelling}/stories260K-bf16.safetensors")) == shown);
        assert!(place.read(&format!("stories260K-bf16@{spelling}.safetensors")) == shown);
    }
    let scaled = place.read(&format!("{folder}@fp8_e4m3fn+g4@-3.safetensors"));
    let notes = &header(&scaled).0["__metadata__"];
    assert_eq!(notes["lamina.view"], "fp8_e4m3fn+g4@-3");
    assert_eq!(notes["lamina.scale_exp"], "-3");
    let listed = |path: &str| {
        let entries = fs::read_dir(place.model(path)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    };
    let names = listed("stories260K-bf16");
    // What was configured and what was asked for.
    assert!(names.contains(&"stories260K-bf16@e8m3.safetensors".to_owned()), "{names:?}");
    assert_eq!(names.len(), 8, "{names:?}");
    assert_eq!(listed(""), ["stories260K-bf16"]);
    // Fewer planes are fetched than the file has, and they are counted for the view.
    let number = |path: &str, name| place.attribute(path, name).unwrap().parse::<u64>().unwrap();
    let (view, whole) = (format!("{folder}@e8m0.safetensors"), format!("{folder}.safetensors"));
    assert!(number(&view, "stored") * 2 < number(&whole, "stored"));
    assert!(number(&view, "read") >= number(&whole, "read") / 2 && number(&view, "fetched") > 0);
    assert!(number(&view, "fetched") < number(&whole, "fetched"));
    assert!(place.attribute(&whole, "ratio").unwrap().parse::<f64>().unwrap() > 1.2);
}

#[test]
fn values_of_every_kind_are_the_references_by_reads_and_by_mappings() {
    let place = Place::new();
    let full = safetensors(&[
        ("half", "F16", vec![3, 333], floats(Format::Fp16, 1, 999)),
        ("brain", "BF16", vec![70_001], floats(Format::Bf16, 2, 70_001)),
        ("ids", "I32", vec![5], noise(3, 20)),
        ("single", "F32", vec![11, 909], floats(Format::Fp32, 4, 9999)),
        ("none", "BF16", vec![0, 4], Vec::new()),
        ("scalar", "F32", vec![], floats(Format::Fp32, 5, 1)),
        ("bytes", "U8", vec![3], noise(6, 3)),
        ("sixes", "F6_E3M2", vec![5, 4], noise(7, 15)),
    ]);
    place.mount(&[&place.write("mixed.safetensors", &full)]);
    for (spelling, given) in [
        ("e5m3", 4),
        ("e8m3", 3),
        ("e8m3+g2", 3),
        ("e4m3+d1", 4),
        ("e4m3+d2", 3),
        ("e6m3+d2+g3", 3),
        ("e5m2+g3", 1),
        ("e8m20", 2),
        ("bf16", 3),
        ("fp8_e4m3fn", 4),
        ("fp8_e5m2+g5@2", 4),
    ] {
        let path = format!("mixed/mixed@{spelling}.safetensors");
        let shown = place.read(&path);
        assert_eq!(held_against(&full, &shown, spelling), given, "{spelling}");
        assert!(place.attribute(&path, "kept").is_some(), "{spelling}");
        let file = File::open(place.model(&path)).unwrap();
        // SAFETY: the file is read-only, and nobody removes its model.
        let mapped = unsafe { Mmap::map(&file).unwrap() };
        assert!(mapped[..] == shown[..], "{spelling}");
        for (at, length) in [(0, 1), (7, 9), (shown.len() / 2 + 1, 4097), (shown.len() - 5, 5)] {
            let mut part = vec![0; length.min(shown.len() - at)];
            file.read_exact_at(&mut part, at as u64).unwrap();
            assert!(part == shown[at..at + part.len()], "{spelling} from {at}");
        }
        let mut past = [0];
        assert_eq!(file.read_at(&mut past, shown.len() as u64).unwrap(), 0);
    }
    for none in ["e9m3", "int4", "e8m3:packed", "full", "e8m3+g2 ", "", "@", "fp16"] {
        assert!(!place.model(&format!("mixed/mixed@{none}.safetensors")).exists(), "{none}");
    }
}

#[test]
fn a_gguf_file_keeps_its_blocks_and_gives_its_floats() {
    let place = Place::new();
    let (single, half, brain) =
        (floats(Format::Fp32, 1, 96 * 3), floats(Format::Fp16, 2, 64), floats(Format::Bf16, 3, 32 * 5));
    let norm = floats(Format::Fp32, 4, 33);
    let (q8, q4k, new) = (noise(5, 34 * 4), noise(6, 144 * 2), noise(7, 128));
    let tensors = [
        ("blk.0.single", 0, vec![96, 3], single.clone()),
        ("blk.0.norm", 0, vec![33], norm.clone()),
        ("blk.0.q8", 8, vec![32, 4], q8.clone()),
        ("blk.0.half", 1, vec![32, 2], half.clone()),
        ("blk.0.q4k", 12, vec![256, 2], q4k.clone()),
        ("blk.0.brain", 30, vec![32, 5], brain.clone()),
        // A type of later days.
        ("blk.0.new", 4321, vec![7], new.clone()),
    ];
    let full = gguf(&tensors);
    place.mount(&[&place.write("tiny.gguf", &full)]);
    assert!(place.read("tiny/tiny.gguf") == full);
    // Masked in place.
    let of = |spelling: &str| {
        tensors.clone().map(|(name, kind, shape, bytes)| {
            let format = match kind {
                0 => Some(Format::Fp32),
                1 => Some(Format::Fp16),
                30 => Some(Format::Bf16),
                _ => None,
            };
            let shown = format.and_then(|format| reference(format, spelling, &bytes));
            (name, kind, shape, shown.unwrap_or(bytes))
        })
    };
    for spelling in ["e8m3", "e8m3+g2", "e5m1", "e4m3+d2"] {
        assert!(place.read(&format!("tiny/tiny@{spelling}.gguf")) == gguf(&of(spelling)), "{spelling}");
    }
    // A tensor of single or half precision with rows becomes bf16; vectors stay, as llama.cpp wants
    // them.
    let mut converted = tensors.clone();
    converted[0] = ("blk.0.single", 30, vec![96, 3], reference(Format::Fp32, "bf16", &single).unwrap());
    converted[3] = ("blk.0.half", 30, vec![32, 2], reference(Format::Fp16, "bf16", &half).unwrap());
    let shown = place.read("tiny/tiny@bf16.gguf");
    assert!(shown == gguf(&converted), "{} {}", shown.len(), gguf(&converted).len());
    assert_eq!(place.attribute("tiny/tiny@bf16.gguf", "kept").as_deref(), Some("5 of 7 tensors are full"));
    // GGUF has no fp8.
    assert!(!place.model("tiny/tiny@fp8_e4m3fn.gguf").exists());
}

#[test]
fn quantised_blocks_lie_apart_and_are_read_as_the_file_has_them() {
    let place = Place::new();
    // Scales as models have them, and quants of which nothing is saved.
    let blocks = |seed: u64, count: usize, scales: usize, quants: usize| {
        let (scale, quant) = (noise(seed, 2 * count * scales), noise(seed + 1, count * quants));
        let mut bytes = Vec::new();
        for block in 0..count {
            for scale in scale[2 * block * scales..][..2 * scales].chunks(2) {
                bytes.extend([scale[0], 0x20 | scale[1] & 3]);
            }
            bytes.extend(&quant[block * quants..][..quants]);
        }
        bytes
    };
    let tensors = [
        ("q4_0", 2, vec![32, 4097], blocks(1, 4097, 1, 16)),
        ("q4_1", 3, vec![32, 9001], blocks(3, 9001, 2, 16)),
        ("norm", 0, vec![33], floats(Format::Fp32, 4, 33)),
        ("q5_0", 6, vec![32, 1], blocks(5, 1, 1, 20)),
        ("q5_1", 7, vec![32, 2050], blocks(7, 2050, 2, 20)),
        ("q8_0", 8, vec![64, 3333], blocks(9, 6666, 1, 32)),
        // What a strand of the first would be called.
        ("q4_0.d", 8, vec![32, 2], blocks(11, 2, 1, 32)),
    ];
    let full = gguf(&tensors);
    place.mount(&[&place.write("blocks.gguf", &full)]);
    assert!(place.read("blocks/blocks.gguf") == full);
    let file = fs::File::open(place.model("blocks/blocks.gguf")).unwrap();
    let mut state = 1_usize;
    for length in [1, 2, 19, 20, 21, 33, 4095, 70_000] {
        for _ in 0..20 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 20) % (full.len() - length);
            let mut out = vec![0; length];
            file.read_exact_at(&mut out, at as u64).unwrap();
            assert!(out == full[at..at + length], "{length} bytes at {at}");
        }
    }
    let ratio: f64 = place.attribute("blocks/blocks.gguf", "ratio").unwrap().parse().unwrap();
    assert!(ratio > 1.015, "scales are coded as numbers: {ratio}");
    assert_eq!(
        place.attribute("blocks/blocks@e8m3.gguf", "kept").as_deref(),
        Some("6 of 7 tensors are full")
    );
    place.said(&["rm", "--in", &place.text("m"), "blocks"]);
    assert!(!place.model("blocks").exists());
}

#[test]
fn an_array_of_numpy_is_masked() {
    let place = Place::new();
    let bytes = floats(Format::Fp16, 1, 6 * 7);
    let mut text = "{'descr': '<f2', 'fortran_order': False, 'shape': (6, 7), }".to_owned();
    text.push_str(&" ".repeat(117 - text.len()));
    text.push('\n');
    let file = |bytes: &[u8]| [b"\x93NUMPY\x01\x00v\x00", text.as_bytes(), bytes].concat();
    place.mount(&[&place.write("a.npy", &file(&bytes))]);
    assert!(place.read("a/a.npy") == file(&bytes));
    assert!(place.read("a/a@e5m2.npy") == file(&reference(Format::Fp16, "e5m2", &bytes).unwrap()));
    assert!(!place.model("a/a@fp8_e4m3fn.npy").exists() && !place.model("a/a@e8m3.npy").exists());
}

#[test]
fn a_map_gives_precisions_by_tensor_rows_and_expert() {
    let place = Place::new();
    let tensor_of = |seed| floats(Format::Bf16, seed, 8 * 100);
    let full = safetensors(&[
        ("embed", "BF16", vec![8, 100], tensor_of(1)),
        ("experts.0.up", "BF16", vec![8, 100], tensor_of(2)),
        ("experts.1.up", "BF16", vec![8, 100], tensor_of(3)),
        ("stacked", "BF16", vec![4, 2, 100], tensor_of(4)),
        ("rest", "BF16", vec![800], tensor_of(5)),
    ]);
    let map = r#"
        [[tensor]]
        name = "embed"
        rows = "2..5"
        view = "e8m1"
        [[tensor]]
        name = "embed"
        rows = "0..4"
        view = "e8m3"
        [[tensor]]
        name = "experts.*"
        experts = [1]
        view = "e8m2"
        [[tensor]]
        name = "stacked"
        experts = [0, 3]
        view = "e8m2"
    "#;
    let map = place.write("small.toml", map.as_bytes());
    place.mount(&["--map", &format!("small={map}"), &place.write("moe.safetensors", &full)]);
    let shown = place.read("moe/moe@small.safetensors");
    let start = header(&full).1;
    assert!(shown.len() == full.len() && shown[..start] == full[..start]);
    let rows = |name: &str, parts: &[(usize, Option<&str>)]| {
        let (mut expected, mut at) = (Vec::new(), 0);
        for (rows, view) in parts {
            let part = &tensor(&full, name)[at..at + rows * 200];
            match view {
                Some(view) => expected.extend(reference(Format::Bf16, view, part).unwrap()),
                None => expected.extend_from_slice(part),
            }
            at += rows * 200;
        }
        assert!(tensor(&shown, name) == expected, "{name}");
    };
    rows("embed", &[(2, Some("e8m3")), (3, Some("e8m1")), (3, None)]);
    rows("experts.0.up", &[(8, None)]);
    rows("experts.1.up", &[(8, Some("e8m2"))]);
    rows("stacked", &[(2, Some("e8m2")), (4, None), (2, Some("e8m2"))]);
    rows("rest", &[(8, None)]);
}
