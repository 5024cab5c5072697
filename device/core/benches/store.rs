//! What a store costs in the device: requests of 1 MiB and of 4 KiB, of bf16 weights, a KV cache,
//! compressible and incompressible bytes, with and without observers, in the modes `trace` and
//! `plain`. Every request stores what is there already from the second round on.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lamina_codec::{format::Format, kv::KvLayout, testing::bytes};
use lamina_device::{
    device::{Device, DeviceConfig, TensorSpec},
    layout::Layout,
};
use lamina_store::mode::Mode;

const MIB: usize = 1 << 20;
const LENGTH: u64 = 8 << 20;

/// A mebibyte of each kind.
fn contents() -> [(&'static str, Option<Layout>, Vec<u8>); 4] {
    let noise = bytes(5, MIB);
    let floats = |width: usize| -> Vec<u8> {
        let rows = noise.chunks_exact(2).enumerate();
        rows.flat_map(|(at, pair)| [pair[0], 0x3c + pair[1] % 4 + u8::try_from(at % width % 3).unwrap_or(0)])
            .collect()
    };
    let text = noise.iter().map(|byte| b"the device stores what is there "[usize::from(byte % 32)]);
    let kv = Layout::Kv(KvLayout::rows(512, 64));
    [
        ("bf16", Some(Layout::Weight), floats(1)),
        ("kv", Some(kv), floats(512)),
        ("compressible", None, text.collect()),
        ("incompressible", None, noise.clone()),
    ]
}

fn device(mode: Mode, observe: bool, layout: Option<Layout>) -> Device {
    let device = Device::new(DeviceConfig { mode, observe, ..DeviceConfig::new(64 << 20, 8 << 20) });
    let device = device.expect("a device of 64 MiB");
    if let Some(layout) = layout {
        let spec = TensorSpec {
            name: "t".to_owned(),
            dpa: Some(0),
            length: LENGTH,
            elements: None,
            shape: Vec::new(),
            format: Format::Bf16,
            layout,
            codec: None,
            base: None,
        };
        device.create_tensor(spec).expect("a tensor at 0");
    }
    device
}

fn store(criterion: &mut Criterion) {
    for (name, layout, data) in contents() {
        let mut group = criterion.benchmark_group(format!("store/{name}"));
        for (mode, observe) in [(Mode::Trace, false), (Mode::Trace, true), (Mode::Plain, false)] {
            for size in [MIB, 4096] {
                let device = device(mode, observe, layout);
                group.throughput(Throughput::Bytes(size as u64));
                let what = format!("{}{}", mode.name(), if observe { "+observers" } else { "" });
                let mut at = 0;
                group.bench_function(BenchmarkId::new(what, size), |bench| {
                    bench.iter(|| {
                        let inside = usize::try_from(at % MIB as u64).expect("less than a mebibyte");
                        device.write_base(at, black_box(&data[inside..inside + size])).expect("room");
                        at = (at + size as u64) % LENGTH;
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2)).warm_up_time(std::time::Duration::from_millis(300));
    targets = store
}
criterion_main!(benches);
