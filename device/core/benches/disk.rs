//! What a disk's read of 1 MiB costs in the device, without queues and guests: of the base window
//! and of views, by each codec.
//!
//! Throughput is of the bytes that are given. The tensor is larger than the processor's caches, so
//! stored bytes come from memory, as they do when a guest reads a disk from end to end; `memcpy`
//! reads as many bytes of an array as large.

use std::{hint::black_box, path::Path};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lamina_codec::{Codec, format::Format};
use lamina_device::{
    device::{Device, DeviceConfig, TensorSpec},
    layout::Layout,
    model::ModelFile,
};

/// Bytes of the tensor.
const TENSOR: usize = 96 << 20;
/// Bytes of a request.
const REQUEST: usize = 1 << 20;
const VIEWS: [&str; 4] = ["full", "e8m3", "fp8_e4m3fn", "e8m3:packed"];

/// The bundled model's weights, over and over.
fn weights() -> Vec<u8> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-tests/models/stories260K-bf16.safetensors");
    let model = ModelFile::open(&path).expect("the bundled model");
    let mut once = Vec::new();
    for tensor in model.tensors() {
        let start = once.len();
        once.resize(start + usize::try_from(tensor.length).expect("a small model"), 0);
        model.read(tensor, 0, &mut once[start..]).expect("the bundled model");
    }
    once.into_iter().cycle().take(TENSOR).collect()
}

/// The offsets of requests that read `bytes` from end to end, over and over.
fn offsets(bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes / REQUEST as u64).map(|request| request * REQUEST as u64).cycle()
}

fn read(criterion: &mut Criterion) {
    let weights = weights();
    let mut group = criterion.benchmark_group("disk/read");
    group.throughput(Throughput::Bytes(REQUEST as u64)).sample_size(20);
    let mut out = vec![0; REQUEST];
    let mut at = (0..TENSOR / REQUEST).map(|request| request * REQUEST).cycle();
    group.bench_function("memcpy", |bench| {
        bench.iter(|| {
            let from = at.next().expect("no end");
            out.copy_from_slice(black_box(&weights[from..from + REQUEST]));
        });
    });
    for codec in [Codec::Tree, Codec::Lz4] {
        let device = Device::new(DeviceConfig { codec, ..DeviceConfig::new(256 << 20, 512 << 20) });
        let device = device.expect("an empty device");
        let spec = TensorSpec {
            name: "w".to_owned(),
            dpa: Some(0),
            length: TENSOR as u64,
            elements: None,
            shape: Vec::new(),
            format: Format::Bf16,
            layout: Layout::Weight,
            codec: None,
            base: None,
        };
        device.create_tensor(spec).expect("it fits");
        device.write_base(0, &weights).expect("it fits");
        let mut base = offsets(TENSOR as u64);
        group.bench_function(format!("base/{codec}"), |bench| {
            bench.iter(|| device.read_base(base.next().expect("no end"), &mut out).expect("inside"));
        });
        for view in VIEWS {
            let view = device.create_view("w", view).expect("views of bf16");
            let mut within = offsets(view.length);
            group.bench_function(format!("{}/{codec}", view.view), |bench| {
                bench.iter(|| {
                    let at = view.offset + within.next().expect("no end");
                    device.read_views(at, &mut out).expect("inside");
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, read);
criterion_main!(benches);
