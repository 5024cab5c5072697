//! Fuzz targets for models as files: checkpoints with block-scaled tensors, names of precisions,
//! and maps.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use super::{MAX_MESSAGE, memory_file};
use lamina_codec::format::Format;
use lamina_codec::plane::PlaneMask;
use lamina_codec::view::View;
use lamina_device::device::{Device, DeviceConfig};
use lamina_device::files::{
    FileLayout, FilesError, Loading, Model, ModelPlan, Precision, PrecisionMap, load,
};
use lamina_device::model::ModelFile;

/// Most bytes of a checkpoint's tensors.
const MAX_DATA: u64 = 64 << 10;
/// The checkpoint whose precisions are asked for.
const HEADER: &str = r#"{"l.experts.1.w":{"dtype":"BF16","shape":[6,5],"data_offsets":[0,60]},
"e":{"dtype":"F16","shape":[3,4,2],"data_offsets":[60,108]},"s":{"dtype":"F32","shape":[],"data_offsets":[108,112]},
"i":{"dtype":"I8","shape":[7],"data_offsets":[112,119]},"q":{"dtype":"F8_E4M3","shape":[4,3],"data_offsets":[119,131]}}"#;

/// Loads a checkpoint, and reads it as it is and at precisions at which block-scaled tensors are
/// put together: a byte of flags (1: load it once more, a little changed, as differences to
/// itself), a byte with the length of `config.json`, that, then the header's text. The tensors have
/// the bytes that it says.
pub fn models(data: &[u8]) {
    let Some((&[flags, config], data)) = data.split_first_chunk() else { return };
    let (config, header) = data.split_at(usize::from(config).min(data.len()));
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("m.safetensors");
    if !config.is_empty() {
        fs::write(folder.path().join("config.json"), config).expect("room for a file");
    }
    let contents = checkpoint(header);
    fs::write(&file, &contents).expect("room for a file");
    let device = device();
    let Some(model) = loaded(&device, folder.path(), "m", &Loading::default()) else {
        assert!(device.tensors().is_empty(), "a model that was refused left tensors");
        return;
    };
    let read_back = |model: &Model, want: &[u8]| {
        let shown = model.manifest.files.iter().find(|file| file.path == "m.safetensors");
        let layout = FileLayout::new(&device, model, shown.expect("it was loaded")).expect("it is held");
        assert!(whole(&device, &layout) == want, "the file changed");
    };
    read_back(&model, &contents);
    for name in ["bf16", "fp8_e4m3fn+g4@-3", "fp8_e5m2", "e2m1+d1"] {
        let precision = Precision::parse(name, &BTreeMap::new()).expect("a precision");
        at(&device, &model, &precision);
    }
    if flags & 1 == 1 {
        let mut changed = contents.clone();
        let data = 8 + header.len();
        changed[data..].iter_mut().step_by(97).for_each(|byte| *byte ^= 0x41);
        fs::write(&file, &changed).expect("room for a file");
        let loading = Loading { base: Some("m".to_owned()), ..Loading::default() };
        if let Some(tuned) = loaded(&device, folder.path(), "n", &loading) {
            read_back(&tuned, &changed);
        }
        read_back(&model, &contents);
    }
}

/// Asks a model for a precision: a line with its name, then a map of precisions, which is called
/// `map`, as the API takes it or as a file of TOML.
pub fn precisions(data: &[u8]) {
    let (name, map) = data.split_at(data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len()));
    let Ok(name) = std::str::from_utf8(name) else { return };
    for format in Format::ALL {
        match View::parse(format, name) {
            Ok(view) => {
                let again = View::parse(format, &view.to_string()).expect("a view has a name");
                assert_eq!((again.kind(), again.mask()), (view.kind(), view.mask()));
                let all = if format == Format::Opaque { view.mask() } else { PlaneMask::all(format) };
                assert_eq!(view.mask().0 & !all.0, 0, "planes that {format} has not");
            }
            Err(why) => assert!(why.to_string().len() < MAX_MESSAGE, "an endless message"),
        }
    }
    let mut loading = Loading::default();
    if let Ok(map) = serde_json::from_slice::<PrecisionMap>(map) {
        loading.maps.insert("map".to_owned(), map);
    } else if let Some(map) = of_toml(map) {
        loading.maps.insert("map".to_owned(), map);
    }
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("m.safetensors");
    fs::write(&file, checkpoint(HEADER.as_bytes())).expect("room for a file");
    let device = device();
    let Some(model) = loaded(&device, &file, "m", &loading) else { return };
    let maps = &model.manifest.maps;
    if let Some(precision) = Precision::parse(name, maps) {
        assert_eq!(Precision::parse(&precision.to_string(), maps).as_ref(), Some(&precision));
        at(&device, &model, &precision);
    }
    let Some(map) = maps.get("map") else { return };
    let Some((shown, header)) = at(&device, &model, &Precision::Map("map".to_owned())) else { return };
    for tensor in header.tensors() {
        // Each row is as one of the rules has it, or full.
        let spellings = map.rules.iter().map(|rule| rule.view.as_str()).chain(["full"]);
        let views = spellings.filter_map(|spelling| {
            let view = device.view_of(&format!("m/{}", tensor.name), spelling).ok()?;
            let mut bytes = vec![0; usize::try_from(view.bytes()).expect("it is small")];
            device.read_view_of(&view, 0, &mut bytes).expect("it is held");
            (view.bytes() == tensor.length).then_some(bytes)
        });
        let views: Vec<_> = views.collect();
        let size = |bytes: u64| usize::try_from(bytes).expect("it is small");
        let row = size(tensor.length / tensor.shape.first().copied().unwrap_or(1));
        let (begin, end) = (size(tensor.offset), size(tensor.offset + tensor.length));
        for (number, bytes) in shown[begin..end].chunks(row).enumerate() {
            let is = |view: &Vec<u8>| view[number * row..][..row] == *bytes;
            assert!(views.iter().any(is), "row {number} of {}", tensor.name);
        }
    }
}

/// The map that a file of TOML has, if it is one and has a rule. Whoever reads it hands it to the
/// API, which must take it for the same.
fn of_toml(map: &[u8]) -> Option<PrecisionMap> {
    let text = std::str::from_utf8(map).ok()?;
    let read = text.parse::<PrecisionMap>().inspect_err(|why| {
        // It shows the line that it is about.
        let bound = MAX_MESSAGE + 2 * text.len();
        assert!(why.to_string().len() < bound, "an endless message");
    });
    let map = read.ok().filter(|map| !map.rules.is_empty())?;
    let sent = serde_json::to_vec(&map).expect("a map is JSON");
    assert_eq!(serde_json::from_slice::<PrecisionMap>(&sent).expect("the API takes it"), map);
    Some(map)
}

/// A safetensors file with this header, and as many bytes as it says, if they are not too many.
fn checkpoint(header: &[u8]) -> Vec<u8> {
    let said: serde_json::Value = serde_json::from_slice(header).unwrap_or_default();
    let ends =
        said.as_object().into_iter().flatten().filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64());
    let length = ends.filter(|end| *end <= MAX_DATA).max().unwrap_or(0);
    let bytes = (0..length).map(|at| (at.wrapping_mul(at).wrapping_mul(0x9e37_79b9) >> 11).to_le_bytes()[0]);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.extend(bytes);
    file
}

fn device() -> Device {
    Device::new(DeviceConfig::new(4 << 20, 16 << 20)).expect("memory for a device")
}

/// The model at `path`, unless it is refused.
fn loaded(device: &Device, path: &Path, name: &str, loading: &Loading) -> Option<Model> {
    let load = || -> Result<Model, FilesError> {
        let plan = ModelPlan::open(path, name)?;
        Ok(load(device, &plan, loading, |_| ControlFlow::Continue(()))?.0)
    };
    load().inspect_err(|why| assert!(why.to_string().len() < MAX_MESSAGE, "an endless message")).ok()
}

/// The model's checkpoint at a precision, if it has it, and its header; any part of it is that part
/// of the whole.
fn at(device: &Device, model: &Model, precision: &Precision) -> Option<(Vec<u8>, ModelFile)> {
    let file = model.manifest.files.iter().find(|file| file.path == "m.safetensors")?;
    let layout = FileLayout::at(device, model, file, precision, &Arc::default())
        .inspect_err(|why| assert!(why.to_string().len() < MAX_MESSAGE, "an endless message"))
        .ok()?;
    let bytes = whole(device, &layout);
    for (from, length) in [(bytes.len() / 3, 101), (bytes.len() / 2 + 1, 4097), (bytes.len() - 1, 1)] {
        let mut part = vec![0; length.min(bytes.len().saturating_sub(from))];
        layout.read(device, from as u64, &mut part).expect("it is within the file");
        assert!(part == bytes[from.min(bytes.len())..][..part.len()], "{} bytes at {from}", part.len());
    }
    let mut file = memory_file();
    file.write_all(&bytes).expect("memory for a file");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some((bytes, ModelFile::open(path.as_ref()).expect("a file at a precision is a checkpoint")))
}

fn whole(device: &Device, layout: &FileLayout) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(layout.bytes()).expect("it fits")];
    layout.read(device, 0, &mut bytes).expect("it is held");
    bytes
}
