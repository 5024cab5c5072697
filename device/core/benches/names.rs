//! What 100 000 tensors cost: to make them at once, to list them, to make and remove one more
//! beside them, to find whose a block is, and to open an image that has them.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use lamina_codec::format::Format;
use lamina_device::device::{Device, DeviceConfig, TensorSpec};
use lamina_store::image::Image;

/// Tensors.
const COUNT: u64 = 100_000;
/// Bytes of each: blocks are shared out, and chunks too.
const LENGTH: u64 = 3 * 4096;

fn spec(name: String, length: u64) -> TensorSpec {
    TensorSpec::new(name, None, length, Format::Bf16)
}

fn specs() -> Vec<TensorSpec> {
    let name = |at| format!("model.layers.{}.mlp.experts.{}.down_proj.weight", at / 1000, at % 1000);
    (0..COUNT).map(|at| spec(name(at), LENGTH)).collect()
}

fn config() -> DeviceConfig {
    DeviceConfig::new(2 * COUNT * LENGTH, 64 << 20)
}

fn names(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("names");
    group.sample_size(10);
    group.bench_function("create 100000 at once, in an image", |bencher| {
        bencher.iter_batched(
            || {
                let image = Image::in_memory(config().superblock()).expect("memory");
                (Device::open(image, &config()).expect("an image"), specs())
            },
            |(device, specs)| {
                device.create_tensors(specs).expect("room");
                device
            },
            criterion::BatchSize::PerIteration,
        );
    });
    let image = Image::in_memory(config().superblock()).expect("memory");
    let device = Device::open(image.clone(), &config()).expect("an image");
    device.create_tensors(specs()).expect("room");
    group.bench_function("list 100000", |bencher| bencher.iter(|| black_box(device.tensors()).len()));
    let mut at = 0;
    group.bench_function("read a block of one of 100000, never written", |bencher| {
        let mut out = [0; 4096];
        bencher.iter(|| {
            at = (at + 7_919 * 4096) % (COUNT * LENGTH);
            device.read_base(at, &mut out).expect("inside");
        });
    });
    group.bench_function("create and remove one beside 100000", |bencher| {
        bencher.iter(|| {
            device.create_tensor(spec("one more".to_owned(), 5 * 4096)).expect("room");
            device.remove_tensor("one more").expect("it is there");
        });
    });
    drop(device);
    group.bench_function("open an image of 100000", |bencher| {
        bencher.iter(|| Device::open(image.clone(), &config()).expect("an image"));
    });
    group.finish();
}

criterion_group!(benches, names);
criterion_main!(benches);
