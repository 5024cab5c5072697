//! The program decodes on windows in ordinary files, with a device in this process that shows what
//! was flushed.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
};

use lamina_abi::{Directory, Layout, TensorEntry, VIEW_ALIGN, ViewEntry};
use lamina_guest::{DecodePlan, DecodeRun, Event, Plan, Task};
use lamina_llama::{
    Config, Decoder, Element, Memory, PlainCache, Sampler, Slot, Tokenizer, Viewed, Weight, judge, write,
};
use serde_json::{Value, json};

use crate::common::Files;

const WINDOW: u64 = 128 << 20;
const CONFIG: Config = Config {
    dim: 8,
    hidden_dim: 12,
    n_layers: 2,
    n_heads: 4,
    n_kv_heads: 2,
    vocab_size: 300,
    seq_len: 96,
    rope_theta: 10_000.0,
    norm_eps: 1e-5,
    experts: None,
};

/// A tensor's bytes in bf16.
type Named = (String, Vec<u8>);

/// A device with a model of noise and an empty cache, every tensor with the view `full`.
struct Device {
    files: Files,
    weights: Vec<Named>,
    /// Requests at the control port, without the ones that find a connection's own replies.
    requested: Arc<Mutex<Vec<Value>>>,
}

impl Device {
    /// A device on which `missing` is not to be found.
    fn new(missing: &str) -> Self {
        let mut noise = 1_u64;
        let mut element = || {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // From 1/4 to just below 2, of either sign.
            let bits = noise >> 40;
            let exponent = 0x3e80 + (bits & 0x100 | bits & 0x80);
            u16::try_from(exponent | bits & 0x7f | (bits & 0x1000) << 3).unwrap().to_le_bytes()
        };
        let mut weights: Vec<Named> = Vec::new();
        for weight in Weight::all(&CONFIG) {
            let (rows, columns) = weight.shape(&CONFIG);
            weights.push((weight.name(), (0..rows * columns).flat_map(|_| element()).collect()));
        }
        let row_bytes = 2 * CONFIG.kv_dim() * CONFIG.seq_len;
        let cache = Slot::all(&CONFIG).into_iter().map(|slot| (slot.name("kv"), vec![7; row_bytes]));
        let tensors: Vec<Named> =
            weights.iter().cloned().chain(cache).filter(|(name, _)| name != missing).collect();

        let device = Self { files: Files::new(), weights, requested: Arc::default() };
        let mut directory =
            Directory { generation: 1, base_bytes: WINDOW, views_bytes: WINDOW, ..Directory::default() };
        let mut dpa = 0;
        for (index, (name, bytes)) in (0_u32..).zip(&tensors) {
            let length = bytes.len() as u64;
            let elements = length / 2;
            device.files.file("base").write_all_at(bytes, dpa).unwrap();
            directory.tensors.push(TensorEntry {
                name: name.clone(),
                shape: elements.to_string(),
                format: "bf16".into(),
                dpa,
                length,
                elements,
                layout: Layout::Weight,
                lossy: false,
            });
            directory.views.push(ViewEntry {
                tensor: index,
                spelling: "full".into(),
                offset: u64::from(index + 1) * VIEW_ALIGN,
                length,
                elements,
                bits: 16,
                scale_exp: 0,
            });
            dpa += length.next_multiple_of(4096);
        }
        device.files.publish(&directory);
        std::fs::write(device.files.path("tokenizer"), vocabulary()).unwrap();
        show(&device.files.file("base"), &device.files.file("views"), &directory, 0..WINDOW);
        device.serve(directory);
        device
    }

    fn serve(&self, directory: Directory) {
        let (base, views) = (self.files.file("base"), self.files.file("views"));
        let requested = Arc::clone(&self.requested);
        self.files.serve(move |request| {
            let reply = match request["op"].as_str().unwrap() {
                "flush" => {
                    let start = request["offset"].as_u64().unwrap();
                    let end = start + request["length"].as_u64().unwrap();
                    show(&base, &views, &directory, start..end);
                    json!({ "ok": true })
                }
                "evict" => json!({ "ok": true }),
                "stats" => json!({ "ok": true, "stats": { "asked": requested.lock().unwrap().len() } }),
                other => json!({ "ok": false, "error": format!("no request: {other}") }),
            };
            if reply["ok"] == true {
                requested.lock().unwrap().push(request);
            }
            reply
        });
    }

    fn run(&self, decode: DecodePlan) -> Vec<Event> {
        let plan =
            Plan { views: Some(Vec::new()), read_base: false, decode: Some(decode), ..Plan::default() };
        let (output, events) = self.files.run(&serde_json::to_string(&plan).unwrap());
        let Some(Event::Done { ok, .. }) = events.last() else { panic!("{events:?}") };
        assert_eq!(output.status.success(), *ok, "{}", String::from_utf8_lossy(&output.stderr));
        events
    }

    fn plan(&self, runs: &[(Task, &str)]) -> DecodePlan {
        let run = |(task, policy): &(Task, &str)| DecodeRun {
            task: task.clone(),
            weights: "full".to_owned(),
            policy: (*policy).to_owned(),
        };
        DecodePlan {
            config: CONFIG,
            tokenizer: self.files.path("tokenizer"),
            cache: "kv".to_owned(),
            packed: BTreeMap::new(),
            page_tokens: 8,
            flush_every: 6,
            evict: true,
            batch: 1,
            runs: runs.iter().map(run).collect(),
        }
    }

    fn problems(&self, decode: DecodePlan) -> Vec<String> {
        match self.run(decode).pop() {
            Some(Event::Done { errors, .. }) => errors,
            other => panic!("{other:?}"),
        }
    }
}

/// A vocabulary of bytes and a few made-up pieces.
fn vocabulary() -> Vec<u8> {
    let mut file = 4_i32.to_le_bytes().to_vec();
    for token in 0..CONFIG.vocab_size {
        let piece = format!("<{token}>");
        file.extend(0_f32.to_le_bytes());
        file.extend(i32::try_from(piece.len()).unwrap().to_le_bytes());
        file.extend(piece.as_bytes());
    }
    file
}

fn show(base: &File, views: &File, directory: &Directory, range: std::ops::Range<u64>) {
    for view in &directory.views {
        let tensor = &directory.tensors[view.tensor as usize];
        if range.contains(&tensor.dpa) {
            let mut bytes = vec![0; usize::try_from(tensor.length).unwrap()];
            base.read_exact_at(&mut bytes, tensor.dpa).unwrap();
            views.write_all_at(&bytes, view.offset).unwrap();
        }
    }
}

/// The weights in ordinary memory.
struct Bytes<'a>(&'a [Named]);

impl Memory for Bytes<'_> {
    type Error = std::convert::Infallible;

    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Self::Error> {
        into.copy_from_slice(&self.0[index].1[offset..offset + into.len()]);
        Ok(())
    }
}

fn writing(tokens: usize) -> Task {
    Task::Write { prompt: "go".to_owned(), tokens, temperature: 0.9, seed: 5 }
}

fn judging() -> Task {
    Task::Judge { text: "a text of some length, for judging".to_owned(), tokens: None }
}

fn decoded(events: &[Event]) -> Vec<&Event> {
    events.iter().filter(|event| matches!(event, Event::Decoded { .. })).collect()
}

#[test]
fn texts_are_what_ordinary_memory_makes_them() {
    let device = Device::new("");
    // The second run finds the cache full of the first one's keys.
    let events =
        device.run(device.plan(&[(writing(90), "full"), (judging(), "full"), (judging(), "window:96")]));
    assert_eq!(events.last(), Some(&Event::Done { ok: true, errors: vec![] }));
    let decoded = decoded(&events);
    assert_eq!(decoded.len(), 3);

    let tokenizer = Tokenizer::parse(&vocabulary(), CONFIG.vocab_size).unwrap();
    let weights = Viewed::new(CONFIG, Bytes(&device.weights), Element::of("full").unwrap());
    let mut cache = PlainCache::new(&CONFIG);
    let prompt = tokenizer.encode("go");
    let mut sampler = Sampler::new(0.9, 5);
    let mut decoder = Decoder::new(CONFIG);
    let written =
        write(&mut decoder, &weights, &mut cache, &prompt, 90, tokenizer.ends(), &mut sampler).unwrap();
    let steps = decoder.position() as u64;
    assert!(steps > 60, "noise seldom ends a text: {steps}");
    let Event::Decoded { tokens, text, logits_sha256, weight_bytes, kv_stored_bytes, flushes, .. } =
        decoded[0]
    else {
        unreachable!()
    };
    assert_eq!((tokens, logits_sha256), (&written.tokens, &written.logits_sha256));
    assert_eq!(*text, tokenizer.decode(tokens));
    assert_eq!(*weight_bytes, weights.loaded());
    assert_eq!(*kv_stored_bytes, steps * 4 * 8);
    assert_eq!(*flushes, steps.div_ceil(6));

    let text = tokenizer.encode("a text of some length, for judging");
    let mut cache = PlainCache::new(&CONFIG);
    let judged = judge(&mut Decoder::new(CONFIG), &weights, &mut cache, &text, 1).unwrap();
    for event in &decoded[1..] {
        let Event::Decoded { perplexity, logits_sha256, kv_view_bytes, .. } = event else { unreachable!() };
        assert_eq!(*logits_sha256, judged.logits_sha256);
        let (found, wanted) = (perplexity.unwrap(), judged.perplexity().unwrap());
        assert!((found - wanted).abs() <= wanted * 1e-12, "{found} {wanted}");
        assert!(*kv_view_bytes > 0);
    }
    // All of it is in the device, behind it what was cleared.
    let mut rows = vec![0; 2 * CONFIG.kv_dim() * CONFIG.seq_len];
    let directory = lamina_abi::decode(&std::fs::read(device.files.path("views")).unwrap()).unwrap();
    let value = directory.tensor("kv.layers.1.v").unwrap();
    device.files.file("base").read_exact_at(&mut rows, value.dpa).unwrap();
    let end = 8 * (text.len() - 1);
    assert!(rows[..end].chunks(8).all(|row| row.iter().any(|byte| *byte != 0)));
    assert!(rows[end..].iter().all(|byte| *byte == 0));
}

#[test]
fn the_device_is_asked_to_flush_on_schedule_and_the_host_to_forget_each_step() {
    let device = Device::new("");
    let steps = device.plan(&[(judging(), "full")]);
    for evict in [true, false] {
        device.requested.lock().unwrap().clear();
        let events = device.run(DecodePlan { evict, ..steps.clone() });
        let Event::Decoded { tokens, flushes, before, after, .. } = decoded(&events)[0] else {
            unreachable!()
        };
        let steps = tokens.len() - 1;
        let requested = device.requested.lock().unwrap();
        let ops: Vec<&str> = requested.iter().map(|request| request["op"].as_str().unwrap()).collect();
        // The cache is emptied first, and the host made to forget what an earlier run has left.
        assert_eq!(ops[..3], ["flush", "evict", "stats"]);
        assert_eq!(*ops.last().unwrap(), "stats");
        let count = |op| ops.iter().filter(|other| **other == op).count();
        assert_eq!(count("flush") - 1, usize::try_from(*flushes).unwrap());
        assert_eq!(count("evict") - 1, if evict { steps } else { 0 });
        assert_eq!(*flushes, steps.div_ceil(6) as u64);
        assert!(before["asked"].as_u64() < after["asked"].as_u64());
        if evict {
            let last = requested.iter().rfind(|request| request["op"] == "evict").unwrap();
            // No page of the cache is full yet: only weights are forgotten.
            assert_eq!(last["ranges"].as_array().unwrap().len(), Weight::all(&CONFIG).len());
        }
    }
}

#[test]
fn what_cannot_be_decoded_is_a_problem_that_says_why() {
    let device = Device::new("layers.1.feed_forward.w2.weight");
    let plan = device.plan(&[(writing(9), "full")]);
    let config = Config { n_layers: 1, ..CONFIG };
    let with = |change: &dyn Fn(&mut DecodePlan)| {
        let mut plan = DecodePlan { config, ..plan.clone() };
        change(&mut plan);
        let problems = device.problems(plan);
        assert_eq!(problems.len(), 1, "{problems:?}");
        problems[0].clone()
    };
    for (says, change) in [
        (
            "no tensor named \"layers.1.feed_forward.w2.weight\"",
            &(|plan: &mut DecodePlan| plan.config = CONFIG) as &dyn Fn(&mut DecodePlan),
        ),
        ("no tensor named \"cache.layers.0.k\"", &|plan| plan.cache = "cache".to_owned()),
        ("base of kv.layers.0.k has 768 bytes; the model needs 776", &|plan| plan.config.seq_len = 97),
        ("has no view \"e8m3\"", &|plan| plan.runs[0].weights = "e8m3".to_owned()),
        ("has no view \"e8m0\"", &|plan| plan.runs[0].policy = "top:1=full,*=e8m0".to_owned()),
        ("cannot be read through the view \"int4\"", &|plan| plan.runs[0].weights = "int4".to_owned()),
        ("\"all\" is no policy", &|plan| plan.runs[0].policy = "all".to_owned()),
        ("the model's n_heads is 0", &|plan| plan.config.n_heads = 0),
        ("300 tokens, the model 301", &|plan| plan.config.vocab_size = 301),
        ("cannot read /nowhere", &|plan| plan.tokenizer = "/nowhere".into()),
        ("nothing was decoded", &|plan| {
            plan.runs[0].task = Task::Judge { text: String::new(), tokens: None }
        }),
    ] {
        let problem = with(change);
        assert!(problem.starts_with("decode: ") && problem.contains(says), "{says}: {problem}");
    }
}
