//! Making a decoder job ready: what it asks of the device, and what it refuses.

#[expect(dead_code, reason = "its own tests use the rest of it")]
#[path = "../../llama/tests/llama/tiny.rs"]
mod tiny;

use std::path::Path;

use lamina_reference::Format;
use lamina_run::{
    bundled, bundled_file,
    daemon::Serve,
    decode::{Compared, Decode, gguf::convert},
    judge::Judge,
};

fn serve(models: &[usize]) -> Serve {
    let bundled = bundled().expect("start the tests through ./x test");
    Serve {
        models: models.iter().map(|&index| bundled[index].clone()).collect(),
        views: Vec::new(),
        kv: Vec::new(),
        mode: "trace".to_owned(),
        codec: "lz4".to_owned(),
        capacity: None,
        read_ahead_kb: 4,
        devices: None,
    }
}

fn decode() -> Decode {
    Decode {
        views: vec!["full".to_owned(), "e8m3".to_owned(), "e8m3".to_owned()],
        policies: ["full", "top:2", "top:1=full,*=e8m0", "top:2=full"]
            .map(|policy| policy.parse().unwrap())
            .to_vec(),
        prompt: String::new(),
        tokens: 100,
        temperature: 0.0,
        seed: 0,
        text: Some(bundled_file("story.txt").unwrap()),
        text_tokens: None,
        compared: Compared::All,
        tokenizer: bundled_file("tok512.bin").unwrap(),
        flush_every: 16,
        page_tokens: None,
        window_tokens: None,
        batch: 1,
        keep_cache: false,
        save_kv: None,
    }
}

/// Its own cache, of the text that is judged: what `lamina analyze` reads, a row for each token
/// that went through the model, whatever the other runs are.
#[test]
fn k_and_v_of_the_judged_text_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv.safetensors");
    let job = Decode {
        views: Vec::new(),
        policies: Vec::new(),
        text_tokens: Some(40),
        tokens: 20,
        save_kv: Some(path.clone()),
        ..decode()
    };
    let mut serve = serve(&[0]);
    let prepared = job.prepare(&mut serve).unwrap();
    let expected = prepared.expected(&job, &Judge::new(&serve.models).unwrap());
    assert!(expected.into_iter().all(|run| run.unwrap().is_ok()));
    let saved = Judge::new(std::slice::from_ref(&path)).unwrap();
    assert_eq!(prepared.model, "stories260K-bf16");
    let config = prepared.plan.config;
    assert_eq!(saved.names().count(), 2 * config.n_layers);
    for name in saved.names() {
        assert_eq!(saved.shape(name).unwrap(), (Format::Bf16, 39 * config.kv_dim() as u64), "{name}");
    }
    // V of the first token of the first layer is a number for each channel, and none is the same
    // everywhere.
    let bytes = saved.full("layers.0.seq.0.v", 0).unwrap();
    assert!(bytes.chunks(2).any(|word| word != &bytes[..2]));

    // A file that cannot be written changes nothing of what is expected.
    let nowhere = Decode { save_kv: Some(folder.path().join("no/such/folder")), ..job };
    let expected = prepared.expected(&nowhere, &Judge::new(&serve.models).unwrap());
    let unsaved: Vec<_> = expected.into_iter().filter_map(|run| run.unwrap().unwrap().unsaved).collect();
    assert!(matches!(&*unsaved, [why] if why.contains("no/such/folder")), "{unsaved:?}");
}

#[test]
fn logits_that_are_no_numbers_are_known_for_what_they_are() {
    let mut model = std::fs::read(&bundled().unwrap()[0]).unwrap();
    let data = 8 + usize::try_from(u64::from_le_bytes(model[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&model[8..data]).unwrap();
    let norm = header["norm.weight"]["data_offsets"][0].as_u64().unwrap();
    let norm = data + usize::try_from(norm).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let few =
        || Decode { policies: Vec::new(), views: Vec::new(), tokens: 5, text_tokens: Some(5), ..decode() };
    for (bits, finite) in [(0x3f80_u16, true), (0x7fc0, false), (0x7f80, false)] {
        model[norm..norm + 2].copy_from_slice(&bits.to_le_bytes());
        std::fs::write(&path, &model).unwrap();
        let mut serve = Serve { models: vec![path.clone()], ..serve(&[]) };
        let prepared = few().prepare(&mut serve).unwrap();
        let expected = prepared.expected(&few(), &Judge::new(&serve.models).unwrap());
        assert!(expected.into_iter().all(|run| run.unwrap().unwrap().are_finite == finite), "{bits:#x}");
    }
}

#[test]
fn a_job_brings_an_empty_cache_its_views_and_its_layout() {
    let mut serve = serve(&[1, 0]);
    let prepared = decode().prepare(&mut serve).unwrap();
    assert_eq!(serve.views, ["full", "e8m3", "e8m0"]);
    // 64 rows of 32 channels fill a block.
    assert_eq!(serve.kv, ["sequence.*=32,64"]);
    assert_eq!(prepared.plan.page_tokens, 64);
    assert!(prepared.plan.evict);
    let judge = Judge::new(&serve.models[2..]).unwrap();
    let names: Vec<&str> = judge.names().collect();
    assert_eq!(names.len(), 10);
    for name in names {
        assert_eq!(judge.shape(name).unwrap(), (Format::Bf16, 512 * 32));
        assert!(judge.full(name, 0).unwrap().iter().all(|byte| *byte == 0));
    }
    // Nothing is done twice: written in full; judged in full, with other weights, under other
    // policies.
    let runs: Vec<(&str, &str)> =
        prepared.plan.runs.iter().map(|run| (run.weights.as_str(), run.policy.as_str())).collect();
    assert_eq!(
        runs,
        [
            ("full", "full"),
            ("full", "full"),
            ("e8m3", "full"),
            ("full", "top:2=full"),
            ("full", "top:1=full,*=e8m0")
        ]
    );
    assert_ne!(prepared.plan.runs[0].task, prepared.plan.runs[1].task);
}

#[test]
fn k_and_v_are_packed_by_their_own_scales() {
    let mut serve = serve(&[0]);
    let policies = ["packkv:0.05", "packkv:0.1,0.2,median"].map(|policy| policy.parse().unwrap()).to_vec();
    let prepared = Decode { policies, ..decode() }.prepare(&mut serve).unwrap();
    let [one, other] = ["packkv:0.05", "packkv:0.1,0.2,median"].map(|policy| &prepared.plan.packed[policy]);
    assert_eq!(
        serve.kv[1..],
        [
            format!("{one}.*=32,64,lossy=packkv:0.05"),
            format!("{other}.*.k=32,64,lossy=packkv:0.1,median"),
            format!("{other}.*.v=32,64,lossy=packkv:0.2,median"),
        ]
    );
}

#[test]
fn a_window_is_no_smaller_than_a_block_and_no_larger_than_the_device_takes() {
    for (page_tokens, window) in [(8, 64), (64, 64), (100, 100), (512, 256)] {
        let mut serve = serve(&[0]);
        let prepared = Decode { page_tokens: Some(page_tokens), ..decode() }.prepare(&mut serve).unwrap();
        assert_eq!(serve.kv, [format!("sequence.*=32,{window}")]);
        assert_eq!(prepared.plan.page_tokens, page_tokens);
    }
}

#[test]
fn a_window_that_is_given_is_no_smaller_than_a_block() {
    for (given, window) in [(8, 64), (100, 100), (256, 256)] {
        let mut serve = serve(&[0]);
        Decode { window_tokens: Some(given), ..decode() }.prepare(&mut serve).unwrap();
        assert_eq!(serve.kv, [format!("sequence.*=32,{window}")]);
    }
}

#[test]
fn what_is_wrong_with_a_vocabulary_is_told_of_the_file_that_it_is_in() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, tiny::gguf()).unwrap();
    convert(&path).unwrap();
    let mut bad = tiny::Tiny::default();
    let pair = [&3_u64.to_le_bytes()[..], b"q q"].concat();
    bad.set("tokenizer.ggml.merges", tiny::list(8, [pair]));
    std::fs::write(&path, bad.file()).unwrap();
    let Err(why) = convert(&path) else { panic!("it is refused") };
    let (why, path) = (format!("{why:#}"), path.display());
    assert_eq!(
        why,
        format!(
            "the vocabulary of {path} is none: pair 0 of the vocabulary, \"q q\", is not two of its tokens that make a third"
        )
    );
}

#[test]
fn what_is_no_regular_file_is_refused_by_its_path_wherever_it_is_given() {
    let null = || Path::new("/dev/null").to_owned();
    let says = "cannot read /dev/null: it is no regular file";
    let text = Decode { text: Some(null()), ..decode() }.prepare(&mut serve(&[0])).err();
    let tokenizer = Decode { tokenizer: null(), ..decode() }.prepare(&mut serve(&[0])).err();
    let checkpoint = Judge::new(&[null()]).err();
    for refused in [text, tokenizer, checkpoint, convert(&null()).err()] {
        let why = format!("{:#}", refused.unwrap());
        assert!(why.ends_with(says), "{why}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let (empty, latin, short) = (put("empty", b""), put("latin", b"caf\xe9"), put("short", &[0; 30]));
    let refused = |models: &[usize], job: Decode, says: &str| {
        let Err(why) = job.prepare(&mut serve(models)) else { panic!("{says}: not refused") };
        let why = format!("{why:#}");
        assert!(why.contains(says), "{says}: {why}");
    };
    refused(&[1], decode(), "no model is a decoder");
    refused(&[0], Decode { tokens: 513, ..decode() }, "513 tokens: the model takes 2 to 512");
    refused(&[0], Decode { tokens: 1, ..decode() }, "1 tokens");
    let prompt = "a dog ".repeat(50);
    refused(&[0], Decode { prompt, ..decode() }, "tokens, of 100 at most: there is nothing to write");
    refused(&[0], Decode { flush_every: 0, ..decode() }, "a flush of 0 tokens: the model takes 1 to 512");
    refused(&[0], Decode { page_tokens: Some(513), ..decode() }, "a page of 513 tokens");
    refused(&[0], Decode { text: Some(Path::new("/nowhere").into()), ..decode() }, "cannot read /nowhere");
    let save_kv = Some(Path::new("kv").into());
    refused(&[0], Decode { text: None, save_kv, ..decode() }, "no text is judged");
    let save_kv = Some(folder.path().join("no/such/kv"));
    refused(&[0], Decode { save_kv, ..decode() }, "no/such/kv");
    for tokens in [0, 257, 100_000] {
        let says = format!("a KV window of {tokens} tokens: the device takes 1 to 256");
        refused(&[0], Decode { window_tokens: Some(tokens), ..decode() }, &says);
    }
    refused(&[0], Decode { text: Some(empty), ..decode() }, "nothing to judge");
    refused(&[0], Decode { text: Some(latin), ..decode() }, "no text in UTF-8");
    for tokens in [0, 1] {
        let says = format!("{tokens} tokens of the text: the first is not predicted");
        refused(&[0], Decode { text_tokens: Some(tokens), ..decode() }, &says);
    }
    refused(&[0], Decode { tokenizer: short, ..decode() }, "does not fit the model");
    refused(&[0], Decode { views: vec!["int4".to_owned()], ..decode() }, "through the view \"int4\"");
    let unrounded = "top:1=e5m3+g2".parse().unwrap();
    refused(&[0], Decode { policies: vec![unrounded], ..decode() }, "e5m3+g2");

    // A model that lacks a tensor its shape wants, and one whose tensor is of another shape.
    let model = std::fs::read(&bundled().unwrap()[0]).unwrap();
    let changed = |from: &str, to: &str, says: &str| {
        assert_eq!(from.len(), to.len());
        let at = model.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
        let mut bytes = model.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let mut serve = Serve { models: vec![put("model", &bytes)], ..serve(&[]) };
        let Err(why) = decode().prepare(&mut serve) else { panic!("{says}: not refused") };
        assert!(format!("{why:#}").contains(says), "{says}: {why:#}");
    };
    changed(
        "layers.3.attention.wq.weight",
        "layers.3.attention.xx.weight",
        "no model has a tensor \"layers.3.attention.wq.weight\"",
    );
    changed(
        "\\\"hidden_dim\\\": 172",
        "\\\"hidden_dim\\\": 171",
        "has the shape [172, 64]; the model's wants [171, 64]",
    );
    changed("\\\"n_heads\\\": 8", "\\\"n_heads\\\": 0", "the model's n_heads is 0");
}
