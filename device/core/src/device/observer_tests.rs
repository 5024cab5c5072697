//! Observers change nothing but what is told of them.

use serde_json::Value;

use super::*;
use crate::{layout::Layout, stats::Interleaving};
use lamina_codec::{format::Format, kv::KvLayout, testing::bytes};

const BLOCK: usize = BLOCK_BYTES;

/// A device with weights, a KV tensor and memory of nobody, to which the same is stored.
fn device(mode: Mode, observe: bool) -> Device {
    let interleaving = Some(Interleaving { interleave: "2x4K".parse().unwrap(), bandwidth: 10.0 });
    let config = DeviceConfig { mode, observe, interleaving, ..DeviceConfig::new(1 << 20, 8 << 20) };
    let device = Device::new(config).unwrap();
    let kv = Layout::Kv(KvLayout::rows(64, 128));
    for (name, dpa, layout) in [("weights", 0, Layout::Weight), ("kv", 256 << 10, kv)] {
        device
            .create_tensor(TensorSpec {
                name: name.to_owned(),
                dpa: Some(dpa),
                length: 128 << 10,
                elements: None,
                shape: Vec::new(),
                format: Format::Bf16,
                layout,
                codec: None,
                base: None,
            })
            .unwrap();
    }
    let view = device.create_view("weights", "e8m3").unwrap();
    for (seed, (at, length)) in
        (1..).zip([(0_u64, 100 * BLOCK), (5000, 300), (256 << 10, 9 * BLOCK), (700 << 10, 40 * BLOCK)])
    {
        let data: Vec<u8> =
            bytes(seed, length).chunks(2).flat_map(|pair| [pair[0], 0x3c + pair[1] % 4]).collect();
        device.write_base(at, &data).unwrap();
    }
    device.flush(0, 1 << 20).unwrap();
    let (mut base, mut shown) = (vec![0; 1 << 20], vec![0; 64 << 10]);
    device.read_base(0, &mut base).unwrap();
    device.read_views(view.offset, &mut shown).unwrap();
    device.read_target(1, 0, &mut base[..8 * BLOCK]).unwrap();
    device
}

/// Asserts that `off` tells what `on` tells or nothing, and adds the names of what it does not
/// tell.
fn compare(on: &Value, off: &Value, name: &str, absent: &mut Vec<String>) {
    match (on, off) {
        (Value::Null, Value::Null) => {}
        (_, Value::Null) => absent.push(name.to_owned()),
        (Value::Object(on), Value::Object(off)) => {
            // Times are of each by itself.
            let times = ["uptime_seconds", "latency"];
            for (field, on) in on.iter().filter(|(field, _)| !times.contains(&field.as_str())) {
                compare(on, off.get(field).unwrap_or(&Value::Null), &format!("{name}/{field}"), absent);
            }
        }
        (Value::Array(on), Value::Array(off)) => {
            assert_eq!(on.len(), off.len(), "{name}");
            on.iter().zip(off).for_each(|(on, off)| compare(on, off, name, absent));
        }
        _ => assert_eq!(on, off, "{name}"),
    }
}

#[test]
fn a_device_without_observers_stores_and_tells_the_same_but_for_what_they_count() {
    for mode in [Mode::Trace, Mode::GComp, Mode::Plain] {
        let [on, off] = [true, false].map(|observe| device(mode, observe));
        let mut shown = [(); 2].map(|()| vec![0; 1 << 20]);
        on.read_base(0, &mut shown[0]).unwrap();
        off.read_base(0, &mut shown[1]).unwrap();
        assert!(shown[0] == shown[1]);
        let stored = |device: &Device, block| device.coded_store().map(|store| store.entry(block).unwrap());
        assert!((0..256).all(|block| stored(&on, block) == stored(&off, block)), "{mode}");
        let [on, off] = [on, off].map(|device| serde_json::to_value(device.stats()).unwrap());
        let mut absent = Vec::new();
        compare(&on, &off, "", &mut absent);
        for name in [
            "/device/gcomp_codec",
            "/requests/base/plain_bytes_fetched",
            "/requests/views/gcomp_bytes_fetched",
            "/requests/base/of_plain",
            "/tensors/base/plain_bytes_fetched",
            "/index/gcomp_hits",
            "/writes/gcomp_bytes_written",
            "/interleave",
        ] {
            let known = on.pointer(name).is_none_or(|reported| !reported.is_null());
            assert_eq!(absent.iter().any(|absent| absent == name), known, "{name}: {absent:?}");
        }
        // Nothing else is left out.
        let others = |name: &&String| {
            !["gcomp", "plain", "index", "interleave"].iter().any(|what| name.contains(what))
        };
        assert_eq!(absent.iter().filter(others).collect::<Vec<_>>(), Vec::<&String>::new());
    }
}
