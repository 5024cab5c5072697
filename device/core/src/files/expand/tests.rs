//! Files at bf16 of small models made here: of GPT-OSS's kind (experts of `…_blocks` and
//! `…_scales`), NVFP4, MXFP6 and MXFP8. Every byte is held against the reference.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use lamina_reference::{Format as Slow, Scales, expanded};

use super::*;
use crate::device::DeviceConfig;
use crate::files::{FileLayout, Loading, Model, ModelPlan, Precision, load};
use crate::load::tests::checkpoint;
use lamina_codec::testing::bytes;

mod converted;

pub(in crate::files) type Tensor<'a> = (&'a str, &'a str, &'a [u64], Vec<u8>);

/// A device that holds a model of these tensors.
pub(in crate::files) fn held(tensors: &[Tensor<'_>]) -> (Device, Model) {
    loaded(tensors, &Loading::default()).unwrap()
}

/// The same, loaded so.
pub(in crate::files) fn loaded(
    tensors: &[Tensor<'_>],
    loading: &Loading,
) -> Result<(Device, Model), FilesError> {
    let device = Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    std::fs::copy(checkpoint(tensors).0.path(), &path).unwrap();
    let plan = ModelPlan::open(&path, "m")?;
    let (model, _) = load(&device, &plan, loading, |_| ControlFlow::Continue(()))?;
    Ok((device, model))
}

pub(in crate::files) fn at(device: &Device, model: &Model, precision: &str) -> FileLayout {
    let precision = Precision::parse(precision, &BTreeMap::new()).unwrap();
    FileLayout::at(device, model, &model.manifest.files[0], &precision, &Arc::default()).unwrap()
}

pub(in crate::files) fn whole(device: &Device, layout: &FileLayout) -> Vec<u8> {
    let mut bytes = vec![0xa5; usize::try_from(layout.bytes()).unwrap()];
    layout.read(device, 0, &mut bytes).unwrap();
    bytes
}

/// The tensors of a file's bytes, as the `safetensors` crate reads them: dtype, shape, bytes.
pub(in crate::files) fn tensors(file: &[u8]) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let read = safetensors::SafeTensors::deserialize(file).unwrap();
    let of = |view: &safetensors::tensor::TensorView<'_>| {
        (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec())
    };
    read.tensors().iter().map(|(name, view)| (name.clone(), of(view))).collect()
}

/// Rows and columns of matrices exchanged, of elements of two bytes.
fn exchanged(values: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let values = values.as_chunks::<2>().0;
    let matrices = values.chunks(rows * columns);
    let of = |matrix: &[[u8; 2]]| -> Vec<u8> {
        let places = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
        places.flat_map(|place| matrix[place]).collect()
    };
    matrices.flat_map(of).collect()
}

/// Scales of which few are alike, NaN and the ends among them.
fn scales(count: usize) -> Vec<u8> {
    (0..count).map(|at| [127, 120, 0, 255, 254, 1, 130, 253][at * 7 % 11 % 8]).collect()
}

#[test]
fn a_model_of_gpt_oss_kind_is_shown_at_bf16() {
    // Three experts of 40 rows and 7 · 32 columns, longer than a block of the device.
    let (experts, rows, groups) = (3, 40, 7);
    let blocks = bytes(5, experts * rows * groups * 16);
    let powers = scales(experts * rows * groups);
    let other = bytes(2, 64);
    let sinks = bytes(7, 10 * 16);
    let shape = [experts as u64, rows as u64, groups as u64, 16];
    let (device, model) = held(&[
        ("mlp.experts.up_blocks", "U8", &shape, blocks.clone()),
        ("mlp.experts.up_scales", "U8", &shape[..3], powers.clone()),
        ("norm", "BF16", &[32], other.clone()),
        ("flat_blocks", "U8", &[5, 2, 16], sinks.clone()),
        ("flat_scales", "U8", &[5, 2], scales(10)),
    ]);
    let formats: BTreeMap<_, _> =
        device.tensors().into_iter().map(|tensor| (tensor.name, tensor.format)).collect();
    assert_eq!(formats["m/mlp.experts.up_blocks"], Format::Fp4E2m1);
    assert_eq!(formats["m/mlp.experts.up_scales"], Format::E8m0);

    let count = (experts * rows * groups * MX_BLOCK) as u64;
    let slow = |elements: &[u8], count, scales: &[u8]| {
        expanded(Slow::Fp4E2m1, elements, count, MX_BLOCK as u64, Scales::Powers(scales))
    };
    let layout = at(&device, &model, "bf16");
    // Two are put together, the norm stays as it is.
    assert_eq!(layout.shown(), (2, 1));
    let file = whole(&device, &layout);
    let read = tensors(&file);
    assert_eq!(read.keys().collect::<Vec<_>>(), ["flat", "mlp.experts.up", "norm"]);
    let columns = groups * MX_BLOCK;
    let want = exchanged(&slow(&blocks, count, &powers), rows, columns);
    assert!(read["mlp.experts.up"] == ("BF16".to_owned(), vec![experts, columns, rows], want));
    assert!(read["flat"] == ("BF16".to_owned(), vec![5, 64], slow(&sinks, 320, &scales(10))));
    assert_eq!(read["norm"], ("BF16".to_owned(), vec![32], other));

    // Any part is that part of the whole, odd bytes too.
    for (from, length) in (0..file.len()).step_by(997).zip((1..5000).step_by(373).cycle()) {
        let length = length.min(file.len() - from);
        let mut part = vec![0xa5; length];
        layout.read(&device, from as u64, &mut part).unwrap();
        assert!(part == file[from..from + length], "{length} bytes at {from}");
    }
    // What is stored are the parts, of 4.25 bits for 16 of the result, and header and last blocks.
    let stored = layout.stored(&device).unwrap();
    assert!(stored > 0 && stored < layout.bytes() * 6 / 16, "{stored} of {}", layout.bytes());
    assert!(layout.traffic().bytes > 0 && layout.charged() > 0);
    // As it was loaded it is the file, in its parts.
    let full = FileLayout::new(&device, &model, &model.manifest.files[0]).unwrap();
    assert_eq!(tensors(&whole(&device, &full))["mlp.experts.up_blocks"].2, blocks);
}

#[test]
fn what_is_stored_later_is_shown() {
    let shape = [2, 4, 1, 16];
    let tensors =
        [("x_blocks", "U8", &shape[..], vec![0x22; 128]), ("x_scales", "U8", &shape[..3], vec![127; 8])];
    let (device, model) = held(&tensors);
    let layout = at(&device, &model, "bf16");
    let before = whole(&device, &layout);
    let (dpa, _) = device.place_of("m/x_scales").unwrap();
    device.write_base(dpa, &[128]).unwrap();
    let after = whole(&device, &layout);
    assert_ne!(before, after);
    assert_eq!(&after[after.len() - 2..], &0x3f80_u16.to_le_bytes());
}

#[test]
fn nvfp4_and_mxfp8_are_shown_at_bf16() {
    let (rows, groups) = (9, 37);
    let elements = bytes(5, rows * groups * 8);
    let codes: Vec<u8> = (0..rows * groups).map(|at| u8::try_from(at * 5 % 256).unwrap()).collect();
    let (factor, other) = (0.003_f32, bytes(10, 4 * 64));
    let (device, model) = held(&[
        ("a.weight", "U8", &[9, 37 * 8], elements.clone()),
        ("a.weight_scale", "F8_E4M3", &[9, 37], codes.clone()),
        ("a.weight_scale_2", "F32", &[], factor.to_le_bytes().to_vec()),
        ("a.input_scale", "F32", &[], 1.0_f32.to_le_bytes().to_vec()),
        ("b.weight", "F8_E5M2", &[4, 64], other.clone()),
        ("b.weight_scale", "F8_E8M0", &[4, 2], scales(8)),
    ]);
    let read = tensors(&whole(&device, &at(&device, &model, "bf16")));
    assert_eq!(read.keys().collect::<Vec<_>>(), ["a.input_scale", "a.weight", "b.weight"]);
    let count = (rows * groups * NV_BLOCK) as u64;
    let want = expanded(Slow::Fp4E2m1, &elements, count, NV_BLOCK as u64, Scales::Fp8(&codes, factor));
    assert!(read["a.weight"] == ("BF16".to_owned(), vec![rows, groups * NV_BLOCK], want));
    let want = expanded(Slow::Fp8E5m2, &other, 256, MX_BLOCK as u64, Scales::Powers(&scales(8)));
    assert!(read["b.weight"] == ("BF16".to_owned(), vec![4, 64], want));
}

/// Elements of six bits, one in a byte, out of a stream of bits of which the lowest are first.
fn spread(packed: &[u8]) -> Vec<u8> {
    crate::model::sixes::tests::slow(packed)
}

#[test]
fn mxfp6_is_shown_at_bf16_and_in_its_parts() {
    // Longer than a block of the device, and every code with every odd scale.
    let (rows, groups) = (37, 7);
    let count = rows * groups;
    let [one, other] = [bytes(11, count * 24), bytes(12, 24 * 8)];
    let (device, model) = held(&[
        ("a.weight", "F6_E2M3", &[37, 7 * 32], one.clone()),
        ("a.weight_scale", "U8", &[37, 7], scales(count)),
        ("b.weight", "F6_E3M2", &[2, 2, 64], other.clone()),
        ("b.weight_scale", "F8_E8M0", &[2, 2, 2], scales(8)),
        ("c.weight", "F6_E3M2", &[4, 6], vec![0x5a; 18]),
        ("c.weight_scale", "F8_E8M0", &[4], scales(4)),
        ("d.weight", "U8", &[1, 24], vec![3; 24]),
        ("d.weight_scale", "U8", &[1, 1], vec![127]),
    ]);
    let formats: BTreeMap<_, _> =
        device.tensors().into_iter().map(|tensor| (tensor.name, tensor.format)).collect();
    assert_eq!(formats["m/a.weight"], Format::Fp6E2m3);
    assert_eq!(formats["m/a.weight_scale"], Format::E8m0);
    // What does not say of which format its elements are is bytes, and so are its scales.
    assert_eq!((formats["m/d.weight"], formats["m/d.weight_scale"]), (Format::Opaque, Format::Opaque));
    let slow = |format, packed: &[u8], scales: &[u8]| {
        let elements = spread(packed);
        expanded(format, &elements, elements.len() as u64, MX_BLOCK as u64, Scales::Powers(scales))
    };
    let layout = at(&device, &model, "bf16");
    let file = whole(&device, &layout);
    let read = tensors(&file);
    let names = ["a.weight", "b.weight", "c.weight", "c.weight_scale", "d.weight", "d.weight_scale"];
    assert_eq!(read.keys().collect::<Vec<_>>(), names);
    let want = slow(Slow::Fp6E2m3, &one, &scales(count));
    assert!(read["a.weight"] == ("BF16".to_owned(), vec![rows, groups * MX_BLOCK], want));
    let want = slow(Slow::Fp6E3m2, &other, &scales(8));
    assert!(read["b.weight"] == ("BF16".to_owned(), vec![2, 2, 64], want));
    assert_eq!(read["c.weight"], ("F6_E3M2".to_owned(), vec![4, 6], vec![0x5a; 18]));
    assert_eq!(read["d.weight"], ("U8".to_owned(), vec![1, 24], vec![3; 24]));
    for (from, length) in (0..file.len()).step_by(997).zip((1..5000).step_by(373).cycle()) {
        let length = length.min(file.len() - from);
        let mut part = vec![0xa5; length];
        layout.read(&device, from as u64, &mut part).unwrap();
        assert!(part == file[from..from + length], "{length} bytes at {from}");
    }
    // As it was loaded, and with its elements cut, it is packed beside its scales.
    let full = FileLayout::new(&device, &model, &model.manifest.files[0]).unwrap();
    assert!(tensors(&whole(&device, &full))["a.weight"].2 == one);
    let cut = tensors(&whole(&device, &at(&device, &model, "e2m1")));
    assert_eq!(cut["a.weight"].0, "F6_E2M3");
    let shown = lamina_reference::view_bytes(Slow::Fp6E2m3, "e2m1", &spread(&one), count as u64 * 32);
    assert!(spread(&cut["a.weight"].2) == shown.unwrap());
    assert!(cut["a.weight_scale"].2 == scales(count));
}

#[test]
fn mxfp6_becomes_mxfp4_in_a_view_of_its_elements() {
    let packed = bytes(13, 24 * 64);
    let (device, _) = held(&[
        ("a.weight", "F6_E2M3", &[64, 32], packed.clone()),
        ("a.weight_scale", "U8", &[64, 1], scales(64)),
    ]);
    let view = device.view_of("m/a.weight", "fp4_e2m1").unwrap();
    let mut shown = vec![0; 64 * 16];
    device.read_view_of(&view, 0, &mut shown).unwrap();
    let want = lamina_reference::view_bytes(Slow::Fp6E2m3, "fp4_e2m1", &spread(&packed), 64 * 32);
    assert!(shown == want.unwrap());
}

#[test]
fn what_cannot_be_put_together_stays_in_its_parts() {
    let blocks = bytes(5, 96);
    let (device, model) = held(&[
        ("x_blocks", "U8", &[2, 3, 16], blocks.clone()),
        ("x_scales", "U8", &[2, 2], vec![127; 4]),
        ("y_blocks", "U8", &[1, 1, 16], vec![0x22; 16]),
        ("y_scales", "U8", &[1, 1], vec![127]),
        ("z", "F32", &[1], vec![0; 4]),
    ]);
    let formats: Vec<_> =
        device.tensors().into_iter().filter(|tensor| tensor.name.starts_with("m/x")).collect();
    assert!(formats.iter().all(|tensor| tensor.format == Format::Opaque));
    let read = tensors(&whole(&device, &at(&device, &model, "bf16")));
    assert_eq!(read.keys().collect::<Vec<_>>(), ["x_blocks", "x_scales", "y", "z"]);
    assert_eq!(read["x_blocks"], ("U8".to_owned(), vec![2, 3, 16], blocks));
    assert_eq!(read["z"].0, "BF16");
}

#[test]
fn a_view_at_bf16_may_be_asked_for_where_there_are_such() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let plan = |tensors: &[Tensor<'_>], path: &Path| {
        std::fs::copy(checkpoint(tensors).0.path(), path).unwrap();
        ModelPlan::open(path, "m").unwrap()
    };
    let views = |plan: &ModelPlan, view: &str| {
        plan.check(&[view.to_owned()], &BTreeMap::new()).map_err(|why| why.to_string())
    };
    let shape = [1, 1, 16];
    let scaled = [("y_blocks", "U8", &shape[..], vec![0x22; 16]), ("y_scales", "U8", &shape[..2], vec![127])];
    let both = plan(&scaled, &path);
    assert_eq!(views(&both, "bf16"), Ok(()));
    assert_eq!(views(&both, "fp8_e5m2"), Ok(()));
    assert!(views(&both, "e8m1").is_err());
    let why = views(&plan(&scaled[..1], &path), "bf16").unwrap_err();
    assert!(why.contains("no tensor of it can be shown as bf16"), "{why}");
}

/// Integers of four bits of a tensor of words, one by one.
fn nibbles(words: &[u8]) -> Vec<u8> {
    words.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
}

/// The bf16 nearest to a number that a binary32 holds.
fn bf16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    u16::try_from(nearest).unwrap().to_le_bytes()
}

/// A number as fp16: small whole numbers and their sixteenths.
fn fp16(sixteenths: u16) -> [u8; 2] {
    let value = f32::from(sixteenths) / 16.0;
    let bits = value.to_bits();
    let half = if sixteenths == 0 { 0 } else { ((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff) };
    u16::try_from(half).unwrap().to_le_bytes()
}

#[test]
fn gptq_and_awq_are_shown_at_bf16() {
    const INPUTS: usize = 40;
    const OUTPUTS: usize = 24;
    const GROUPS: usize = 3;
    let (elements, zeros) = (bytes(1, INPUTS * OUTPUTS / 2), bytes(2, GROUPS * OUTPUTS / 2));
    let steps: Vec<u16> = bytes(3, GROUPS * OUTPUTS).into_iter().map(u16::from).collect();
    let scales: Vec<u8> = steps.iter().flat_map(|step| fp16(*step)).collect();
    // Inputs in an order of their own, as `desc_act` leaves them.
    let indices: Vec<usize> = (0..INPUTS).map(|input| input * 7 % GROUPS).collect();
    let g_idx: Vec<u8> =
        indices.iter().flat_map(|group| i32::try_from(*group).unwrap().to_le_bytes()).collect();
    let bias = bytes(4, 2 * OUTPUTS);
    let (own, own_zeros) = (nibbles(&elements), nibbles(&zeros));
    let wanted = |is_awq: bool, group: &dyn Fn(usize) -> usize, more: u8| -> Vec<u8> {
        // Where of eight outputs each is in a word.
        let order = if is_awq { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] };
        let place = |output: usize| output / 8 * 8 + order[output % 8];
        let mut all = Vec::new();
        for output in 0..OUTPUTS {
            for input in 0..INPUTS {
                let q = if is_awq {
                    own[input * OUTPUTS + place(output)]
                } else {
                    own[(input / 8 * OUTPUTS + output) * 8 + input % 8]
                };
                let zero = own_zeros[group(input) * OUTPUTS + place(output)] + more;
                let scale = f32::from(steps[group(input) * OUTPUTS + output]) / 16.0;
                all.extend(bf16(scale * (f32::from(q) - f32::from(zero))));
            }
        }
        all
    };
    let model = |is_awq: bool, with_index: bool| -> Vec<Tensor<'_>> {
        let shape: &[u64] = if is_awq { &[40, 3] } else { &[5, 24] };
        let mut tensors: Vec<Tensor<'_>> = vec![
            ("l.qweight", "I32", shape, elements.clone()),
            ("l.qzeros", "I32", &[3, 3], zeros.clone()),
            ("l.scales", "F16", &[3, 24], scales.clone()),
            ("l.bias", "F16", &[24], bias.clone()),
        ];
        if with_index {
            tensors.push(("l.g_idx", "I32", &[40], g_idx.clone()));
        }
        tensors
    };
    // Two groups of 16 inputs and one of 8.
    let follow = |input: usize| input / 16;
    let by_index = |input: usize| indices[input];
    let shown = |device: &Device, model: &Model| {
        let layout = at(device, model, "bf16");
        let file = whole(device, &layout);
        let found = tensors(&file);
        let names: Vec<_> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["l.bias", "l.weight"]);
        let (dtype, shape, bytes) = found["l.weight"].clone();
        assert_eq!((dtype.as_str(), &shape[..]), ("BF16", &[OUTPUTS, INPUTS][..]));
        // In pieces that begin and end anywhere.
        let mut pieces = vec![0; file.len()];
        for (number, piece) in pieces.chunks_mut(77).enumerate() {
            layout.read(device, number as u64 * 77, piece).unwrap();
        }
        assert!(pieces == file);
        bytes
    };
    let (device, gptq) = held(&model(false, true));
    assert!(shown(&device, &gptq) == wanted(false, &by_index, 1));
    let (device, gptq) = held(&model(false, false));
    assert!(shown(&device, &gptq) == wanted(false, &follow, 1));
    // What is stored later is shown.
    let (dpa, _) = device.place_of("m/l.qweight").unwrap();
    device.write_base(dpa, &[!elements[0]]).unwrap();
    let changed = shown(&device, &gptq);
    assert!(changed != wanted(false, &follow, 1) && changed[4..] == wanted(false, &follow, 1)[4..]);
    let (device, awq) = held(&model(true, false));
    assert!(shown(&device, &awq) == wanted(true, &follow, 0));
    // The second format says so in its configuration, in either file.
    for (name, text) in [
        ("quantize_config.json", r#"{"bits":4,"checkpoint_format":"gptq_v2"}"#),
        ("config.json", r#"{"quantization_config":{"quant_method":"gptq","checkpoint_format":"gptq_v2"}}"#),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(checkpoint(&model(false, true)).0.path(), folder.path().join("m.safetensors")).unwrap();
        std::fs::write(folder.path().join(name), text).unwrap();
        let device = Device::new(DeviceConfig::new(64 << 20, 64 << 20)).unwrap();
        let plan = ModelPlan::open(folder.path(), "m").unwrap();
        let (model, _) = load(&device, &plan, &Loading::default(), |_| ControlFlow::Continue(())).unwrap();
        let file = model.manifest.files.iter().find(|file| file.path == "m.safetensors").unwrap();
        let precision = Precision::parse("bf16", &BTreeMap::new()).unwrap();
        let layout = FileLayout::at(&device, &model, file, &precision, &Arc::default()).unwrap();
        let found = tensors(&whole(&device, &layout));
        assert!(found["l.weight"].2 == wanted(false, &by_index, 0), "{name}");
    }
}
