//! The decoder by the mount, without a guest: a model of noise in a GGUF file, always; with
//! `LAMINA_LONG` SmolLM2-135M in a guest, if `./x` has fetched it.

use std::{path::PathBuf, time::Duration};

use lamina_run::{
    bundled_file,
    daemon::Serve,
    decode::{
        Compared, Decode,
        gguf::{Converted, PLACE, convert},
    },
    job::{Job, On},
};

#[expect(dead_code, reason = "its own tests use the rest of it")]
#[path = "../../../llama/tests/llama/tiny.rs"]
mod tiny;

fn job(model: &Converted, on: On, folder: &tempfile::TempDir) -> Job {
    Job {
        serve: Serve {
            models: vec![model.checkpoint.clone()],
            views: Vec::new(),
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: "tree".to_owned(),
            capacity: None,
            devices: None,
            read_ahead_kb: 4,
        },
        on,
        views: false,
        decode: None,
        ram: None,
        write: None,
        hostile: false,
        limit: Duration::from_secs(3000),
        console: folder.path().join("console.log"),
    }
}

fn decode(model: &Converted) -> Decode {
    Decode {
        views: Vec::new(),
        policies: Vec::new(),
        prompt: "the bell".to_owned(),
        tokens: 64,
        temperature: 0.0,
        seed: 0,
        text: None,
        text_tokens: None,
        compared: Compared::All,
        tokenizer: model.tokenizer.clone(),
        flush_every: 16,
        page_tokens: Some(16),
        window_tokens: None,
        batch: 16,
        keep_cache: true,
        save_kv: None,
    }
}

#[test]
fn a_model_in_a_gguf_file_says_by_the_mount_what_it_says_in_ordinary_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, tiny::gguf()).unwrap();
    let model = convert(&path).unwrap();
    let policies = ["full", "window:20", "top:1", "quest:1", "quest:1=full,1=e8m3+g2,*=fp8_e5m2"];
    let decode = Decode {
        views: ["full", "e8m3", "e8m1:packed", "fp8_e4m3fn+g4"].map(str::to_owned).to_vec(),
        policies: policies.iter().map(|policy| policy.parse().unwrap()).collect(),
        text: Some(bundled_file("story.txt").unwrap()),
        text_tokens: Some(100),
        temperature: 1.0,
        flush_every: 8,
        page_tokens: Some(8),
        batch: 5,
        keep_cache: false,
        ..decode(&model)
    };
    let job = Job { decode: Some(decode), ..job(&model, On::Host, &folder) };
    let report = job.run(|_| {}).unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.guest.qemu.is_empty() && report.to_text().contains("no guest"));
    let decode = report.decode.unwrap();
    assert_eq!(decode.model, "a tiny model of noise");
    assert_eq!(decode.runs.len(), 1 + 4 + 4);
    assert!(decode.runs.iter().all(|run| run.identical_to_reference == Some(true)));
    let run =
        |policy: &str| decode.runs.iter().find(|run| run.task == "judge" && run.policy == policy).unwrap();
    let full = run("full");
    assert_eq!((full.steps, full.tokens, full.kv_layers.len()), (99, 100, 2));
    assert!(full.kv_layers.iter().all(|layer| layer.key.is_some() && layer.value.is_some()));
    // One page is less than all, and one for each head more than one for all.
    let loaded = |policy| run(policy).kv_moved.loaded_bytes;
    assert!(loaded("top:1=full") < loaded("quest:1=full") && loaded("quest:1=full") < loaded("full"));
}

#[test]
fn smollm2_in_a_guest_says_what_it_says_in_ordinary_memory() {
    if std::env::var_os("LAMINA_LONG").is_none() {
        return lamina_skipped::test("SmolLM2-135M in a guest takes minutes; ./x test --long runs it");
    }
    let Some(path) = std::env::var_os(PLACE).map(PathBuf::from) else {
        return lamina_skipped::test(
            "SmolLM2-135M is not in the cache: ./x run --workload decode --model smollm2 fetches it",
        );
    };
    let folder = tempfile::tempdir().unwrap();
    let model = convert(&path).unwrap();
    let decode = Decode { prompt: "The capital of France is".to_owned(), ..decode(&model) };
    let job = Job { decode: Some(decode), ..job(&model, On::Guest, &folder) };
    let report = job.run(|_| {}).unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    let decode = report.decode.unwrap();
    assert!(decode.identical_to_reference);
    assert!(decode.text.contains("Paris"), "{}", decode.text);
}
