//! What is recorded of a device is what it did: a replay moves the bytes that the device counted.

use lamina_device::device::DeviceConfig;
use lamina_device::layout::Layout;
use lamina_device::tensor::TensorSpec;
use lamina_model::replay::{Comparison, Options, SUBJECTS, compare};
use lamina_model::trace::{Item, Reader};
use lamina_store::mode::Mode;
use tokio::sync::mpsc::channel;

use super::*;

/// Bytes of each tensor.
const TENSOR: usize = 256 << 10;

/// Numbers whose exponents code well, whose signs and mantissas do not, and some zeros.
fn content(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40).to_le_bytes()[0]
    };
    let pair =
        |n: usize, low: u8, high: u8| if n / 4096 % 9 == 4 { [0; 2] } else { [low, 0x3c ^ (high % 5)] };
    (0..TENSOR / 2).flat_map(|n| pair(n, byte(), byte())).collect()
}

struct Rig {
    device: Arc<Device>,
    recordings: Recordings,
    recorded: tokio::sync::mpsc::Receiver<Bytes>,
}

impl Rig {
    /// A device with a tensor of each format at hand, and two of KV, recorded from the first byte.
    fn new(mode: Mode) -> Self {
        Self::with(mode, Codec::Zstd)
    }

    /// The same, one of whose tensors has this codec.
    fn with(mode: Mode, odd: Codec) -> Self {
        let config = DeviceConfig { mode, observe: true, ..DeviceConfig::new(4 << 20, 128 << 20) };
        let rig = Self {
            device: Arc::new(Device::new(config).unwrap()),
            recordings: Recordings::default(),
            recorded: channel(1).1,
        };
        let kv = Layout::Kv("64,128".parse().unwrap());
        let tensors = [
            ("bf16", Format::Bf16, Layout::Weight, Codec::Tree),
            ("lz4", Format::Bf16, Layout::Weight, Codec::Lz4),
            ("fp32", Format::Fp32, Layout::Weight, Codec::Tree),
            ("fp16", Format::Fp16, Layout::Weight, odd),
            ("int8", Format::Int8, Layout::Weight, Codec::Tree),
            ("int4", Format::Int4, Layout::Weight, Codec::Tree),
            ("kv", Format::Bf16, kv, Codec::Tree),
            ("kv32", Format::Fp32, kv, Codec::Tree),
        ];
        for ((number, seed), (name, format, layout, codec)) in (0..).zip(1..).zip(tensors) {
            let at = number * TENSOR as u64;
            let spec = TensorSpec {
                name: name.to_owned(),
                dpa: Some(at),
                length: TENSOR as u64,
                elements: None,
                shape: Vec::new(),
                format,
                layout,
                codec: Some(codec),
                base: None,
            };
            rig.device.create_tensor(spec).unwrap();
            // One of them is stored while it is recorded.
            if name != "fp16" {
                rig.device.write_base(at, &content(seed)).unwrap();
            }
        }
        rig.device.flush(0, 4 << 20).unwrap();
        rig
    }

    fn begin(&mut self) {
        let (to, recorded) = channel(1 << 12);
        self.recordings.begin(&self.device, to).unwrap();
        self.recorded = recorded;
    }

    fn end(&mut self) -> Vec<u8> {
        assert!(self.recordings.stop());
        let mut trace = Vec::new();
        while let Some(piece) = self.recorded.blocking_recv() {
            trace.extend_from_slice(&piece);
        }
        trace
    }

    /// What the device counted of this field, of everything that was asked.
    fn counted(&self, field: &str) -> u64 {
        let stats = serde_json::to_value(self.device.stats()).unwrap();
        let of = |what: &str| stats.pointer(&format!("{what}/{field}")).unwrap().as_u64().unwrap();
        of("/requests/base") + of("/requests/views") + of("/reads_for_writes")
    }
}

fn replayed(trace: &[u8]) -> Comparison {
    let options = Options { dram: None, ..Options::usual().unwrap() };
    compare(&mut Reader::new(trace).unwrap(), &SUBJECTS, &options).unwrap()
}

/// Reads whole, in pages and in odd parts.
fn read(device: &Device, at: u64, length: u64, views: bool) {
    let mut out = vec![0; usize::try_from(length).unwrap()];
    let mut load = |from: u64, to: u64| {
        let out = &mut out[usize::try_from(from).unwrap()..usize::try_from(to).unwrap()];
        if views { device.read_views(at + from, out) } else { device.read_base(at + from, out) }.unwrap();
    };
    load(0, length);
    (0..length / 4096).for_each(|page| load(page * 4096, (page + 1) * 4096));
    (0..20).for_each(|n| load(n * 1021, n * 1021 + 1 + n * 77));
}

#[test]
fn a_replay_moves_the_bytes_that_the_device_counted() {
    let mut rig = Rig::new(Mode::Trace);
    let names = [
        ("bf16", "e8m3"),
        ("bf16", "e8m0"),
        ("bf16", "e8m3+g2:packed"),
        ("bf16", "fp8_e4m3fn"),
        ("lz4", "e5m2"),
        ("fp32", "bf16"),
        ("fp32", "e8m7"),
        ("fp16", "e5m4"),
        ("int8", "int4"),
        ("int4", "int2"),
        ("kv", "e8m2"),
        ("kv", "full"),
        ("kv32", "e8m5:packed"),
    ];
    let views = names.map(|(tensor, view)| rig.device.create_view(tensor, view).unwrap());
    let before = [rig.counted("stored_bytes_fetched"), rig.counted("plain_bytes_fetched")];
    let stats = rig.device.stats();
    let (written, misses) = (stats.writes.stored_bytes_written, stats.index.bytes_fetched.unwrap());
    rig.begin();
    let device = &rig.device;
    device.write_base(3 * TENSOR as u64, &content(99)).unwrap();
    for view in &views {
        read(device, view.offset, view.length, true);
    }
    read(device, 0, 4 << 20, false);
    // Parts of blocks, of weights and of KV windows, which are read first. Of the latter whole
    // lines: a window is told when it is coded, and then nobody knows which bytes were stored.
    for (at, length) in
        [(100, 5000), (5 * TENSOR as u64 + 4000, 5000), (6 * TENSOR as u64 + 64_000, 4992), (3 << 20, 77)]
    {
        device.write_base(at, &content(7)[..length]).unwrap();
    }
    device.flush(0, 4 << 20).unwrap();
    read(device, views[10].offset, 32 << 10, true);
    let trace = rig.end();
    let comparison = replayed(&trace);
    assert_eq!(comparison.lost, 0);
    let of = |name: &str| comparison.designs.iter().find(|design| design.subject.name == name).unwrap();
    let (plain, own) = (of("plain"), of("trace"));
    assert_eq!(own.read_bytes, rig.counted("stored_bytes_fetched") - before[0]);
    assert_eq!(plain.read_bytes, rig.counted("plain_bytes_fetched") - before[1]);
    let stats = rig.device.stats();
    assert_eq!(own.written_bytes, stats.writes.stored_bytes_written - written);
    // A cache that begins empty misses entries that the device's had.
    let fetched = stats.index.bytes_fetched.unwrap() - misses;
    assert!(own.index_misses * 64 >= fetched && own.index_misses <= 1024, "{own:?} {fetched}");
    // All layouts are known to a device of planes, and words by the codec of each tensor.
    assert_eq!((own.assumed, plain.assumed), (0, 0));
    for name in ["gcomp-lz4", "gcomp-zstd"] {
        assert!(of(name).measured > 0 && of(name).assumed > 0, "{:?}", of(name));
    }
    let said: Vec<_> = own.link.iter().map(|link| link.view.as_str()).collect();
    for (_, view) in names {
        let view = view.trim_end_matches("+g2");
        assert!(said.contains(&view), "{view}: {said:?}");
    }
}

#[test]
fn a_recorded_gcomp_device_moves_what_it_counted_too() {
    let mut rig = Rig::new(Mode::GComp);
    let before = rig.counted("stored_bytes_fetched");
    rig.begin();
    read(&rig.device, TENSOR as u64, TENSOR as u64, false);
    let trace = rig.end();
    let comparison = replayed(&trace);
    let lz4 = &comparison.designs[2];
    assert_eq!(lz4.subject.name, "gcomp-lz4");
    assert_eq!((lz4.read_bytes, lz4.assumed), (rig.counted("stored_bytes_fetched") - before, 0));
}

/// Whatever the device is: reads of all and of parts, stores of all and of parts, windows that are
/// staged, and blocks that are zeros as differences to a base and not as words.
#[test]
fn a_replay_of_gcomp_moves_what_the_observers_counted() {
    for mode in [Mode::Trace, Mode::GComp, Mode::Plain] {
        let mut rig = Rig::with(mode, Codec::Tree);
        let derived = 9 * TENSOR as u64;
        if mode == Mode::Trace {
            let spec = TensorSpec {
                name: "derived".to_owned(),
                dpa: Some(derived),
                length: TENSOR as u64,
                elements: None,
                shape: Vec::new(),
                format: Format::Bf16,
                layout: Layout::Weight,
                codec: None,
                base: Some("bf16".to_owned()),
            };
            rig.device.create_tensor(spec).unwrap();
        }
        let counted = |rig: &Rig| {
            let stats = serde_json::to_value(rig.device.stats()).unwrap();
            let written = stats.pointer("/writes/gcomp_bytes_written").unwrap().as_u64().unwrap();
            [rig.counted("gcomp_bytes_fetched"), written]
        };
        let before = counted(&rig);
        rig.begin();
        let device = &rig.device;
        device.write_base(derived, &content(1)).unwrap();
        read(device, 0, 4 << 20, false);
        for (seed, (at, length)) in
            (40..).zip([(100, 5000), (5 * TENSOR + 4000, 9000), (6 * TENSOR + 64_000, 3000), (3 << 20, 77)])
        {
            device.write_base(at as u64, &content(seed)[..length]).unwrap();
            device.write_base(at as u64 + 9000, &content(seed)[..length]).unwrap();
        }
        device.flush(0, 4 << 20).unwrap();
        device.discard(derived + 8192, 70_000).unwrap();
        read(device, 0, 4 << 20, false);
        let after = counted(&rig);
        let comparison = replayed(&rig.end());
        let lz4 = &comparison.designs[2];
        assert_eq!((lz4.subject.name, lz4.assumed, comparison.lost), ("gcomp-lz4", 0, 0), "{mode}");
        let moved = [lz4.read_bytes, lz4.written_bytes];
        assert_eq!(moved, [after[0] - before[0], after[1] - before[1]], "{mode}");
        assert!(moved.iter().all(|bytes| *bytes > 0) && lz4.measured > 1024, "{lz4:?}");
    }
}

#[test]
fn one_records_at_a_time_and_nothing_is_told_before_or_after() {
    let mut rig = Rig::new(Mode::Trace);
    assert!(!rig.recordings.stop());
    rig.begin();
    let refused = rig.recordings.begin(&rig.device, channel(1).0).unwrap_err();
    assert!(refused.contains("one at a time"), "{refused}");
    rig.device.read_base(0, &mut [0; 4096]).unwrap();
    let trace = rig.end();
    assert!(!rig.recordings.stop());
    rig.device.read_base(0, &mut [0; 8192]).unwrap();
    let mut reader = Reader::new(&trace[..]).unwrap();
    let mut requests = 0;
    while let Some(item) = reader.next_item().unwrap() {
        requests += u64::from(matches!(item, Item::Request(_)));
    }
    assert_eq!(requests, 1);
    // Whoever takes the trace may go without a word.
    rig.begin();
    rig.recorded = channel(1).1;
    for _ in 0..100 {
        if rig.recordings.begin(&rig.device, channel(1).0).is_ok() {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
    panic!("the recording goes on, and nobody takes it");
}

/// A trace that nobody takes costs events and nothing else, and says how many.
#[test]
fn what_comes_too_fast_is_lost_and_said() {
    let mut rig = Rig::new(Mode::Trace);
    let (to, recorded) = channel(2);
    rig.recordings.begin(&rig.device, to).unwrap();
    rig.recorded = recorded;
    let mut out = vec![0; 4 << 20];
    let rounds = 300;
    let begun = Instant::now();
    for _ in 0..rounds {
        rig.device.read_base(0, &mut out).unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let trace = rig.end();
    let comparison = replayed(&trace);
    let told = comparison.designs[0].requests;
    assert!(comparison.lost > 0 && told > 0, "{} {told}", comparison.lost);
    // What was lost is what is not there: each of 1024 blocks, each time.
    let windows: u64 = rounds * 1024;
    assert!(told + comparison.lost >= windows, "{told} + {}", comparison.lost);
}

/// Who takes nothing any more keeps no recording from its end.
#[test]
fn a_recording_that_nobody_takes_ends_when_it_is_told_to() {
    let mut rig = Rig::new(Mode::Trace);
    let (to, recorded) = channel(2);
    rig.recordings.begin(&rig.device, to).unwrap();
    rig.recorded = recorded;
    let mut out = vec![0; 4 << 20];
    let rounds = 64;
    for _ in 0..rounds {
        rig.device.read_base(0, &mut out).unwrap();
    }
    assert!(rig.recordings.stop());
    let begun = Instant::now();
    // Another one may begin: this one has ended, and nothing of it was taken.
    let (to, _recorded) = channel(2);
    while rig.recordings.begin(&rig.device, to.clone()).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the recording does not end");
        thread::sleep(Duration::from_millis(20));
    }
    assert!(rig.recordings.stop());
    // What waited is a whole trace that counts the rest as lost.
    let mut trace = Vec::new();
    while let Some(piece) = rig.recorded.blocking_recv() {
        trace.extend_from_slice(&piece);
    }
    let comparison = replayed(&trace);
    let told = comparison.designs[0].requests;
    assert!(told > 0 && comparison.lost > 0, "{told} and {}", comparison.lost);
    let blocks: u64 = rounds * 1024;
    assert!(told + comparison.lost >= blocks, "{told} + {}", comparison.lost);
}
