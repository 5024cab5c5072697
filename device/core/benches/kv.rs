//! What a window of a KV cache costs: the transpose by each kernel, coding and decoding by each
//! codec.
//!
//! Throughput is of uncompressed data; `memcpy` is the same windows copied. Windows are 128 tokens
//! of the bundled model's K, and for the transpose also wider ones of its bytes.

use std::{hint::black_box, path::Path};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lamina_codec::{
    BLOCK_BYTES, Codec, Decoder, Encoder,
    block::{MAX_BUNDLE, Stored},
    format::Format,
    internals::KvKernel,
    kv::{Coding, KvLayout, Shape, WindowDecoder},
    view::View,
};
use lamina_device::model::ModelFile;

const CHANNELS: u32 = 32;
/// Windows worked on in turn: together they stay in the second-level cache.
const WINDOWS: usize = 16;

/// The K of all layers and sequences, one behind the other.
fn keys() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../guest-tests/models/stories260K-kv-bf16.safetensors");
    let model = ModelFile::open(&path).expect("the bundled cache");
    let mut bytes = Vec::new();
    for tensor in model.tensors().iter().filter(|tensor| tensor.name.ends_with('k')) {
        let start = bytes.len();
        bytes.resize(start + usize::try_from(tensor.length).expect("a small cache"), 0);
        model.read(tensor, 0, &mut bytes[start..]).expect("the bundled cache");
    }
    bytes
}

fn transpose(criterion: &mut Criterion) {
    let keys = keys();
    let mut group = criterion.benchmark_group("kv/transpose");
    for channels in [CHANNELS, 384, 33] {
        let shape =
            Shape::new(Format::Bf16, &KvLayout::rows(channels, 128)).expect("a layout").expect("windows");
        let window = &keys[..shape.blocks() * BLOCK_BYTES];
        let order = shape.order(0, shape.blocks());
        let mut out = vec![0; window.len()];
        group.throughput(Throughput::Bytes(window.len() as u64));
        group.bench_function(format!("memcpy/{channels}"), |bench| {
            bench.iter(|| black_box(&mut out).copy_from_slice(black_box(window)));
        });
        for kernel in KvKernel::available() {
            group.bench_function(format!("channel_major/{channels}/{kernel:?}"), |bench| {
                bench.iter(|| kernel.channel_major(&order, None, black_box(window), &mut out));
            });
            group.bench_function(format!("token_major/{channels}/{kernel:?}"), |bench| {
                bench.iter(|| kernel.token_major(&order, None, black_box(window), &mut out));
            });
        }
    }
    group.finish();
}

fn code(criterion: &mut Criterion) {
    let keys = keys();
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(CHANNELS, 128)).expect("a layout").expect("windows");
    let windows: Vec<&[u8]> = keys.chunks_exact(shape.blocks() * BLOCK_BYTES).take(WINDOWS).collect();
    let mut group = criterion.benchmark_group("kv/window");
    group.throughput(Throughput::Bytes((windows.len() * windows[0].len()) as u64));
    for codec in Codec::ALL {
        let (mut encoder, mut decoder, mut bundles) = (Encoder::new(), Decoder::new(), Vec::new());
        for (name, way) in [("plain", Some(Coding::Plain)), ("deltas", Some(Coding::Deltas)), ("best", None)]
        {
            group.bench_function(format!("encode/{codec}/{name}"), |bench| {
                bench.iter(|| {
                    for window in &windows {
                        encoder.window(&shape, 0, codec, black_box(window), way, &mut bundles);
                    }
                });
            });
        }
        let stored: Vec<Vec<(Stored, [u8; MAX_BUNDLE])>> = windows
            .iter()
            .map(|window| {
                encoder.window(&shape, 0, codec, window, None, &mut bundles);
                let bundle = |bundle: &lamina_codec::block::Bundle| {
                    let mut bytes = [0; MAX_BUNDLE];
                    bytes[..bundle.bytes().len()].copy_from_slice(bundle.bytes());
                    (bundle.stored.clone().expect("no block of zeros"), bytes)
                };
                bundles.iter().map(bundle).collect()
            })
            .collect();
        let mut out = Vec::new();
        for spelling in ["full", "e8m3"] {
            let mask = View::parse(Format::Bf16, spelling).expect("a view of bf16").mask();
            group.bench_function(format!("decode/{codec}/{spelling}"), |bench| {
                bench.iter(|| {
                    for blocks in &stored {
                        let out = black_box(&mut out);
                        let mut decoder =
                            WindowDecoder::new(&mut decoder, &shape, 0, blocks.len(), mask, out);
                        for (block, (stored, bytes)) in blocks.iter().enumerate() {
                            let wanted = decoder.wanted(stored);
                            decoder.add(block, stored, wanted, bytes).expect("intact");
                        }
                        decoder.finish();
                    }
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_millis(600)).warm_up_time(std::time::Duration::from_millis(200));
    targets = transpose, code
}
criterion_main!(benches);
