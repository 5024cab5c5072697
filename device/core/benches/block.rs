//! What one 4 KiB block costs: the transpose and the planes' checks by each kernel, coding and
//! decoding by each codec, the index entry.
//!
//! Throughput is of uncompressed data; `memcpy` is the same blocks copied. Blocks are the bundled
//! model's weights.

use std::{hint::black_box, path::Path};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE, Stored},
    format::Format,
    internals::{CheckKernel, PlaneKernel, Planes, Span, TreeDecoder, TreeKernel, TreeWorkspace, ZEROS},
    plane::{self, PlaneMask},
    view::View,
};
use lamina_device::model::ModelFile;
use lamina_store::entry::{Entry, Place, Version};

/// Blocks worked on in turn: together they stay in the second-level cache.
const BLOCKS: usize = 32;

fn blocks() -> Vec<BlockWords> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-tests/models/stories260K-bf16.safetensors");
    let model = ModelFile::open(&path).expect("the bundled model");
    let mut bytes = Vec::new();
    for tensor in model.tensors() {
        let start = bytes.len();
        bytes.resize(start + usize::try_from(tensor.length).expect("a small model"), 0);
        model.read(tensor, 0, &mut bytes[start..]).expect("the bundled model");
    }
    bytes.chunks_exact(BLOCK_BYTES).take(BLOCKS).map(|block| block.try_into().expect("a block")).collect()
}

/// A block that begins at a cache line, so that what is compared does not depend on where an
/// allocation happens to begin.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Aligned([u8; BLOCK_BYTES]);

fn transpose(criterion: &mut Criterion) {
    let blocks: Vec<_> = blocks().into_iter().map(Aligned).collect();
    let mut group = criterion.benchmark_group("transpose");
    group.throughput(Throughput::Bytes((BLOCKS * BLOCK_BYTES) as u64));
    let mut out = vec![Aligned([0; BLOCK_BYTES]); BLOCKS];
    group.bench_function("memcpy", |bench| {
        bench.iter(|| {
            for (out, block) in black_box(&mut out).iter_mut().zip(&blocks) {
                out.0.copy_from_slice(&block.0);
            }
        });
    });
    for format in [Format::Bf16, Format::Fp32, Format::Fp8E4m3fn, Format::Int8, Format::Int4, Format::Fp4E2m1]
    {
        for kernel in PlaneKernel::available() {
            group.bench_function(format!("split/{format}/{kernel:?}"), |bench| {
                bench.iter(|| {
                    for (out, block) in black_box(&mut out).iter_mut().zip(&blocks) {
                        kernel.split(format, &block.0, &mut out.0);
                    }
                });
            });
            let mut planes = blocks.clone();
            for (planes, block) in planes.iter_mut().zip(&blocks) {
                kernel.split(format, &block.0, &mut planes.0);
            }
            let all = PlaneMask::all(format);
            // The sign, and of floats the exponent and some of the mantissa.
            let half = PlaneMask(all.0 >> (format.planes() / 2) << (format.planes() / 2));
            for (name, mask) in [("join_block", all), ("join_block_half", half)] {
                group.bench_function(format!("{name}/{format}/{kernel:?}"), |bench| {
                    bench.iter(|| {
                        for (out, planes) in black_box(&mut out).iter_mut().zip(&planes) {
                            kernel.join_block(format, mask, &planes.0, &mut out.0);
                        }
                    });
                });
            }
            let planes: Vec<_> = planes.iter().map(|block| plane::select(format, all, &block.0)).collect();
            group.bench_function(format!("join/{format}/{kernel:?}"), |bench| {
                bench.iter(|| {
                    for (out, planes) in black_box(&mut out).iter_mut().zip(&planes) {
                        kernel.join(format, planes, &mut out.0);
                    }
                });
            });
        }
    }
    group.finish();
}

fn check(criterion: &mut Criterion) {
    let blocks = blocks();
    let mut group = criterion.benchmark_group("check");
    group.throughput(Throughput::Bytes((BLOCKS * BLOCK_BYTES) as u64));
    for format in [Format::Bf16, Format::Fp32] {
        let length = u16::try_from(format.plane_bytes()).expect("at most 1024");
        let planes: Vec<_> = (0..4096 / length).map(|n| Span { start: n * length, length }).collect();
        let mut checks = vec![0; planes.len()];
        for kernel in CheckKernel::available() {
            group.bench_function(format!("{format}/{kernel:?}"), |bench| {
                bench.iter(|| {
                    for block in &blocks {
                        kernel.checks(block, &planes, black_box(&mut checks));
                    }
                });
            });
        }
    }
    group.finish();
}

fn code(criterion: &mut Criterion) {
    let blocks = blocks();
    let mut group = criterion.benchmark_group("block");
    group.throughput(Throughput::Bytes((BLOCKS * BLOCK_BYTES) as u64));
    for codec in Codec::ALL {
        let (mut encoder, mut decoder, mut bundle) = (Encoder::new(), Decoder::new(), Bundle::new());
        group.bench_function(format!("encode/bf16/{codec}"), |bench| {
            bench.iter(|| {
                for block in &blocks {
                    encoder.block(Format::Bf16, codec, black_box(block), &mut bundle);
                }
            });
        });
        let stored: Vec<(Stored, [u8; MAX_BUNDLE])> = blocks
            .iter()
            .map(|block| {
                encoder.block(Format::Bf16, codec, block, &mut bundle);
                let mut bytes = [0; MAX_BUNDLE];
                bytes[..bundle.bytes().len()].copy_from_slice(bundle.bytes());
                (bundle.stored.clone().expect("no block of zeros"), bytes)
            })
            .collect();
        let mut words = [0; BLOCK_BYTES];
        for spelling in ["full", "e8m3"] {
            let mask = View::parse(Format::Bf16, spelling).expect("a view of bf16").mask();
            group.bench_function(format!("decode/bf16/{codec}/{spelling}"), |bench| {
                bench.iter(|| {
                    for (stored, bytes) in &stored {
                        decoder.block(stored, mask, bytes, black_box(&mut words)).expect("intact");
                    }
                });
            });
        }
        let entries: Vec<_> = stored
            .iter()
            .map(|(stored, _)| Place { segment: 7, stored: stored.clone(), lossy: false, difference: false })
            .map(|place| Entry { epoch: 1, place: Some(place) })
            .collect();
        group.bench_function(format!("entry/encode/{codec}"), |bench| {
            bench.iter(|| {
                for entry in &entries {
                    black_box(entry.encode(Version::Two));
                }
            });
        });
        let bytes: Vec<_> = entries.iter().map(|entry| entry.encode(Version::Two)).collect();
        group.bench_function(format!("entry/decode/{codec}"), |bench| {
            bench.iter(|| {
                for bytes in &bytes {
                    black_box(Entry::decode(Version::Two, bytes).expect("intact"));
                }
            });
        });
    }
    group.finish();
}

/// The blocks' elements in `format`: fp8 by the view of that name, integers scaled to the largest
/// element.
fn converted(format: Format, blocks: &[BlockWords]) -> Vec<BlockWords> {
    if format == Format::Bf16 {
        return blocks.to_vec();
    }
    let mut bytes = Vec::new();
    if let Ok(view) = View::parse(Format::Bf16, format.name()) {
        for block in blocks {
            view.render(&mut block.clone(), 0, 2048, &mut bytes);
        }
    } else {
        let floats: Vec<f32> = blocks
            .iter()
            .flat_map(|block| block.as_chunks().0)
            .map(|word| f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16))
            .collect();
        let largest = floats.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
        #[expect(clippy::cast_possible_truncation, reason = "scaled to the format's range")]
        let scaled = |x: &f32, range: f32| (x / largest * range).round() as i8;
        match format {
            Format::Int8 => bytes.extend(floats.iter().map(|x| scaled(x, 127.0).cast_unsigned())),
            Format::Int4 => bytes.extend(floats.as_chunks::<2>().0.iter().map(|[low, high]| {
                scaled(low, 7.0).cast_unsigned() & 15 | scaled(high, 7.0).cast_unsigned() << 4
            })),
            _ => bytes.extend(floats.iter().flat_map(|x| x.to_bits().to_le_bytes())),
        }
    }
    bytes.as_chunks().0.to_vec()
}

/// The plane tree's stream alone, by each kernel.
fn tree(criterion: &mut Criterion) {
    let blocks = blocks();
    let mut group = criterion.benchmark_group("tree");
    for format in [Format::Bf16, Format::Fp32, Format::Fp8E4m3fn, Format::Int8, Format::Int4] {
        let blocks = converted(format, &blocks);
        group.throughput(Throughput::Bytes((blocks.len() * BLOCK_BYTES) as u64));
        for kernel in TreeKernel::available() {
            let (mut workspace, mut out) = (TreeWorkspace::new(), [0; MAX_BUNDLE]);
            group.bench_function(format!("encode/{format}/{kernel:?}"), |bench| {
                bench.iter(|| {
                    for block in &blocks {
                        black_box(kernel.encode_block(format, block, &mut workspace, &mut out));
                    }
                });
            });
            let planes: Planes<'_> = [&ZEROS; 32];
            let mut decoder = TreeDecoder::default();
            let streams: Vec<_> = blocks
                .iter()
                .filter_map(|block| {
                    Some((kernel.encode_block(format, block, &mut workspace, &mut out)?, out))
                })
                .collect();
            let mut words = [0; BLOCK_BYTES];
            group.bench_function(format!("decode/{format}/{kernel:?}"), |bench| {
                bench.iter(|| {
                    for (length, stream) in &streams {
                        kernel
                            .decode_block(
                                format,
                                stream,
                                *length,
                                PlaneMask::all(format),
                                &planes,
                                &mut words,
                                &mut decoder,
                            )
                            .expect("intact");
                    }
                });
            });
        }
    }
    group.finish();
}

fn views(criterion: &mut Criterion) {
    let blocks = blocks();
    let mut group = criterion.benchmark_group("render");
    group.throughput(Throughput::Bytes((BLOCKS * BLOCK_BYTES) as u64));
    for spelling in ["full", "e8m3", "e8m3+g2", "e8m3+g2:packed", "fp8_e4m3fn", "fp8_e5m2"] {
        let view = View::parse(Format::Bf16, spelling).expect("a view of bf16");
        let mut out = Vec::with_capacity(2 * BLOCK_BYTES);
        group.bench_function(spelling, |bench| {
            bench.iter(|| {
                for block in &blocks {
                    out.clear();
                    view.render(&mut block.clone(), 0, 2048, black_box(&mut out));
                }
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_millis(600)).warm_up_time(std::time::Duration::from_millis(200));
    targets = transpose, check, code, tree, views
}
criterion_main!(benches);
