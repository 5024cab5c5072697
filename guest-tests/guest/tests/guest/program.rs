//! The program on windows in ordinary files, with a device in this process that answers flushes.

use std::{fs::File, os::unix::fs::FileExt};

use lamina_abi::{Directory, Layout, TensorEntry, VIEW_ALIGN, ViewEntry};
use lamina_guest::{AttachBench, Event, Measure, Phase, Plan, WarmBench, WritePlan, rotate};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::common::Files;

const WINDOW: u64 = 16 << 20;
const ELEMENTS: u64 = 50_001;

struct Device {
    files: Files,
}

impl Device {
    /// Tensors `a` and `b` (16-bit elements), each with the views `full` and `e8m0` (here: every
    /// low byte cleared).
    fn new() -> Self {
        let device = Self { files: Files::new() };
        let mut directory =
            Directory { generation: 3, base_bytes: WINDOW, views_bytes: WINDOW, ..Directory::default() };
        for (index, name) in (0_u32..).zip(["a", "b"]) {
            let length = 2 * ELEMENTS;
            let dpa = u64::from(index) * length.next_multiple_of(4096);
            directory.tensors.push(TensorEntry {
                name: name.into(),
                shape: ELEMENTS.to_string(),
                format: "bf16".into(),
                dpa,
                length,
                elements: ELEMENTS,
                layout: Layout::Weight,
                lossy: false,
            });
            let bytes: Vec<u8> =
                (0..length).map(|at| ((at + dpa).wrapping_mul(0x9e37_79b9) >> 11).to_le_bytes()[0]).collect();
            device.files.file("base").write_all_at(&bytes, dpa).unwrap();
            for (slot, spelling) in (1_u64..).zip(["full", "e8m0"]) {
                let offset = (u64::from(index) * 2 + slot) * VIEW_ALIGN;
                directory.views.push(ViewEntry {
                    tensor: index,
                    spelling: spelling.into(),
                    offset,
                    length,
                    elements: ELEMENTS,
                    bits: 16,
                    scale_exp: 0,
                });
            }
        }
        device.files.publish(&directory);
        device.show(&directory);
        device.serve(directory);
        device
    }

    /// Makes the views what the base window says, as a flush does.
    fn show(&self, directory: &Directory) {
        show(&self.files.file("base"), &self.files.file("views"), directory);
    }

    fn serve(&self, directory: Directory) {
        let (base, views) = (self.files.file("base"), self.files.file("views"));
        self.files.serve(move |request| match request["op"].as_str() {
            Some("flush") => {
                show(&base, &views, &directory);
                json!({ "ok": true })
            }
            Some("evict") => json!({ "ok": true }),
            // A connection finds its own replies by asking for what does not exist.
            _ => json!({ "ok": false, "error": format!("no request: {request}") }),
        });
    }

    fn tensor(&self, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(2 * ELEMENTS).unwrap()];
        let dpa = if name == "a" { 0 } else { (2 * ELEMENTS).next_multiple_of(4096) };
        self.files.file("base").read_exact_at(&mut bytes, dpa).unwrap();
        bytes
    }

    fn good(&self, plan: &Plan) -> Vec<Event> {
        let (output, events) = self.files.run(&serde_json::to_string(plan).unwrap());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(events.last(), Some(&Event::Done { ok: true, errors: vec![] }));
        events
    }
}

fn show(base: &File, views: &File, directory: &Directory) {
    for view in &directory.views {
        let tensor = &directory.tensors[view.tensor as usize];
        let mut bytes = vec![0; usize::try_from(tensor.length).unwrap()];
        base.read_exact_at(&mut bytes, tensor.dpa).unwrap();
        if view.spelling == "e8m0" {
            bytes.iter_mut().step_by(2).for_each(|byte| *byte = 0);
        }
        views.write_all_at(&bytes, view.offset).unwrap();
    }
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn truncated(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().enumerate().map(|(at, byte)| if at % 2 == 0 { 0 } else { *byte }).collect()
}

/// (tensor, view, hash) of every view event of a pass.
fn views(events: &[Event], wanted: Phase) -> Vec<(String, String, String)> {
    let view = |event: &Event| match event {
        Event::View { phase, tensor, view, sha256, elements, bytes, .. } if *phase == wanted => {
            assert_eq!((*elements, *bytes), (ELEMENTS, 2 * ELEMENTS));
            Some((tensor.clone(), view.clone(), sha256.clone()))
        }
        _ => None,
    };
    events.iter().filter_map(view).collect()
}

#[test]
fn every_view_is_hashed_as_it_was_loaded() {
    let device = Device::new();
    let events = device.good(&Plan::default());
    assert!(matches!(&events[0], Event::Started { kernel, .. } if !kernel.is_empty()));
    let Event::Up { base, generation, tensors, view_count, attached, .. } = &events[1] else {
        panic!("{:?}", events[1]);
    };
    assert_eq!((base.bytes, *generation, *tensors, *view_count), (WINDOW, 3, 2, 4));
    assert_eq!(*attached, None);
    let mut expected = Vec::new();
    for name in ["a", "b"] {
        let bytes = device.tensor(name);
        for (view, bytes) in [("base", bytes.clone()), ("full", bytes.clone()), ("e8m0", truncated(&bytes))] {
            expected.push((name.to_owned(), view.to_owned(), hex(&bytes)));
        }
    }
    assert_eq!(views(&events, Phase::Loaded), expected);
    let begun = events.iter().filter(|event| matches!(event, Event::ViewBegin { of: 6, .. })).count();
    assert_eq!(begun, 6);
}

#[test]
fn a_plan_chooses_tensors_and_views() {
    let device = Device::new();
    let plan = Plan {
        views: Some(vec!["e8m0".into(), "int4".into()]),
        tensors: Some(vec!["b".into()]),
        read_base: false,
        ..Plan::default()
    };
    let read = views(&device.good(&plan), Phase::Loaded);
    assert_eq!(read, [("b".to_owned(), "e8m0".to_owned(), hex(&truncated(&device.tensor("b"))))]);
}

#[test]
fn a_written_tensor_is_its_rotation_in_every_view() {
    let device = Device::new();
    let (a, b) = (device.tensor("a"), device.tensor("b"));
    let plan = Plan { write: Some(WritePlan { tensor: "b".into(), seed: 12_345 }), ..Plan::default() };
    let events = device.good(&plan);
    let (new, k) = rotate(&b, ELEMENTS, 12_345);
    assert_eq!(k, 12_346);
    assert!(new != b && device.tensor("b") == new && device.tensor("a") == a);
    let written = events.iter().find_map(|event| match event {
        Event::Written { tensor, rotation, bytes, sha256, .. } => {
            Some((tensor.clone(), *rotation, *bytes, sha256.clone()))
        }
        _ => None,
    });
    assert_eq!(written, Some(("b".into(), k, 2 * ELEMENTS, hex(&new))));
    let expected = [("base", hex(&new)), ("full", hex(&new)), ("e8m0", hex(&truncated(&new)))];
    let expected: Vec<_> =
        expected.into_iter().map(|(view, hash)| ("b".to_owned(), view.to_owned(), hash)).collect();
    assert_eq!(views(&events, Phase::Written), expected);
}

#[test]
fn misbehaviour_is_reported_and_hurts_nothing() {
    let device = Device::new();
    let (a, b) = (device.tensor("a"), device.tensor("b"));
    let events = device.good(&Plan { hostile: true, ..Plan::default() });
    let stored = events.iter().find_map(|event| match event {
        Event::HostileStore { tensor, view, bytes, before, seen, after_flush, base_unchanged, .. } => {
            Some((tensor.as_str(), view.as_str(), *bytes, *seen, before == after_flush, *base_unchanged))
        }
        _ => None,
    });
    assert_eq!(stored, Some(("a", "full", 4096, true, true, true)));
    assert_eq!(events.iter().filter(|event| matches!(event, Event::PastEnd { .. })).count(), 5);
    assert!(device.tensor("a") == a && device.tensor("b") == b);
}

#[test]
fn warm_reads_are_measured() {
    let device = Device::new();
    let plan = Plan {
        views: Some(vec![]),
        read_base: false,
        warm_bench: Some(WarmBench { tensor: "a".into(), repeats: 3 }),
        ..Plan::default()
    };
    let rates: Vec<f64> = device
        .good(&plan)
        .iter()
        .filter_map(|event| match event {
            Event::WarmRead { bytes, seconds, bytes_per_second, .. } => {
                assert!(*bytes > ELEMENTS && bytes % 8 == 0 && *seconds >= 0.1);
                Some(*bytes_per_second)
            }
            _ => None,
        })
        .collect();
    assert_eq!(rates.len(), 3);
    assert!(rates.iter().all(|rate| *rate > 1e6), "{rates:?}");
}

#[test]
fn a_way_in_is_measured_in_every_round_and_loads_what_was_stored() {
    let device = Device::new();
    let bench = AttachBench { tensor: "a".into(), rounds: 2, limit_ms: 60_000, disks: None };
    let plan =
        Plan { views: Some(vec![]), read_base: false, attach_bench: Some(bench.clone()), ..Plan::default() };
    let before = device.tensor("a");
    let events = device.good(&plan);
    let whole = 2 * ELEMENTS / 8 * 8;
    for what in
        [Measure::Ordinary, Measure::Stored, Measure::Cold, Measure::Warm, Measure::Base, Measure::Flush]
    {
        let rounds = events.iter().filter_map(|event| match event {
            Event::Measured { what: found, round, bytes, seconds } if *found == what => {
                assert!(*seconds > 0.0, "{what:?}");
                assert_eq!(bytes % whole, 0, "{what:?}");
                assert_eq!(*bytes == 0, what == Measure::Flush);
                Some(*round)
            }
            _ => None,
        });
        assert_eq!(rounds.collect::<Vec<_>>(), [0, 1], "{what:?}");
    }
    // Each round, the first one uncounted, moved the words by a block.
    let mut moved = before;
    let words = usize::try_from(whole).unwrap();
    moved[..words].rotate_left(3 * 4096);
    assert!(device.tensor("a") == moved);

    let lost = AttachBench { tensor: "nope".into(), ..bench };
    let plan = Plan { attach_bench: Some(lost), ..plan };
    let (output, events) = device.files.run(&serde_json::to_string(&plan).unwrap());
    let Some(Event::Done { ok: false, errors }) = events.last() else { panic!("{events:?}") };
    assert!(output.status.code() == Some(1) && errors[0].contains("nope"), "{errors:?}");
}

#[test]
fn every_failing_step_is_in_the_last_event() {
    let device = Device::new();
    // A view that differs from its tensor.
    device.files.file("views").write_all_at(b"damage", VIEW_ALIGN).unwrap();
    let (output, events) = device.files.run(
        r#"{"write":{"tensor":"nope","seed":1},"warm_bench":{"tensor":"missing","repeats":1},"views":["full"]}"#,
    );
    assert_eq!(output.status.code(), Some(1));
    let Some(Event::Done { ok: false, errors }) = events.last() else { panic!("{events:?}") };
    assert_eq!(errors.len(), 3, "{errors:?}");
    for (error, says) in
        errors.iter().zip(["read: a: base has", "write: no tensor named \"nope\"", "missing"])
    {
        assert!(error.contains(says), "{says}: {error}");
    }
    assert_eq!(views(&events, Phase::Loaded).len(), 4, "the other steps ran");
}

#[test]
fn without_a_device_or_a_plan_the_end_still_comes() {
    let device = Device::new();
    std::fs::remove_file(device.files.path("views")).unwrap();
    for (plan, says) in
        [("{}", "cannot open the window"), ("{\"view\":[]}", "unknown field"), ("{", "no plan")]
    {
        let (output, events) = device.files.run(plan);
        assert_eq!(output.status.code(), Some(1));
        let Some(Event::Done { ok: false, errors }) = events.last() else { panic!("{events:?}") };
        assert!(errors.len() == 1 && errors[0].contains(says), "{says}: {errors:?}");
    }
}

#[test]
fn the_views_window_is_not_written_by_reading() {
    let device = Device::new();
    let before = std::fs::read(device.files.path("views")).unwrap();
    device.good(&Plan::default());
    assert!(std::fs::read(device.files.path("views")).unwrap() == before);
}
