//! `lamina reproduce` as a person or a script runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn lamina(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_lamina");
    Command::new(program).arg("reproduce").args(arguments).env("LAMINA_ROOT", root()).output().unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = lamina(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {output:?}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// Every table and figure of both papers that is told, by its name in addresses.
const SECTIONS: [&str; 27] = [
    "trace-table-i",
    "trace-table-ii",
    "trace-table-iii",
    "trace-table-iv",
    "trace-table-v",
    "trace-fig-12",
    "trace-fig-13",
    "trace-fig-14",
    "trace-fig-15",
    "trace-fig-16",
    "trace-fig-17",
    "trace-fig-18",
    "trace-fig-19",
    "trace-fig-20",
    "trace-fig-21",
    "trace-fig-22",
    "trace-fig-23",
    "cxl-ndp-fig-1",
    "cxl-ndp-fig-3",
    "cxl-ndp-fig-4",
    "cxl-ndp-fig-10",
    "cxl-ndp-fig-11",
    "cxl-ndp-fig-12",
    "cxl-ndp-fig-13",
    "cxl-ndp-fig-20",
    "cxl-ndp-table-iii",
    "cxl-ndp-table-v",
];

/// The report of a run that never was, of the form of one.
fn decode_report(folder: &Path) -> PathBuf {
    let moved = json!({ "stored_bytes_fetched": 75, "plain_bytes_fetched": 100 });
    let run = |weights: &str, policy: &str| {
        json!({
            "task": "judge", "weights": weights, "policy": policy, "tokens": 256,
            "weights_moved": moved, "kv_moved": moved
        })
    };
    let report = json!({ "decode": {
        "model": "a <model>",
        "perplexity": { "full": 10.0, "e8m3": 11.0 },
        "policy_perplexity": { "full": 10.0, "window:64": 15.0, "top:5=full": 14.0, "quest:5=full": 12.5 },
        "kv_ratio": 1.4, "identical_to_reference": true, "page_tokens": 16,
        "runs": [run("full", "full"), run("e8m3", "full"), run("full", "window:64")],
    } });
    let path = folder.join("decode.json");
    fs::write(&path, report.to_string()).unwrap();
    path
}

/// The report of llama.cpp that never was.
fn llama_report(folder: &Path, cache: &str) -> PathBuf {
    let report = json!({
        "program": "llama.cpp (of a test)", "model": "b <model>", "text": "t.txt", "tokens": 256,
        "perplexity": { "full": 10.5, "e8m3": 11.5 }, "tokens_per_second": { "full": 50.0 }, "cache": cache,
    });
    let path = folder.join("llama.json");
    fs::write(&path, report.to_string()).unwrap();
    path
}

fn section<'b>(book: &'b Value, id: &str) -> &'b Value {
    book["sections"].as_array().unwrap().iter().find(|section| section["id"] == id).unwrap()
}

fn row<'s>(section: &'s Value, what: &str) -> &'s Value {
    let mut rows = section["rows"].as_array().unwrap().iter();
    let found = rows.find(|row| row["what"].as_str().unwrap().starts_with(what));
    found.unwrap_or_else(|| panic!("no row {what}: {section:#}"))
}

#[test]
fn a_report_has_every_table_and_figure_and_needs_no_network() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new/report");
    let decode = decode_report(folder.path());
    let llama = llama_report(folder.path(), "stories260K-kv-bf16.safetensors");
    let given = ["--decode", decode.to_str().unwrap(), "--llama", llama.to_str().unwrap()];
    let words = [&given[..], &["--out", out.to_str().unwrap(), "--json"]].concat();
    let output = lamina(&words);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("reproduce: coding the weights: "), "progress: {said}");
    let book: Value = serde_json::from_slice(&output.stdout).unwrap();
    let on_disk: Value = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(book, on_disk);
    let ids: Vec<_> = book["sections"].as_array().unwrap().iter().map(|section| &section["id"]).collect();
    assert_eq!(ids, SECTIONS);

    // What is fitted to what is printed is that, to its two places.
    for figure in ["trace-fig-12", "trace-fig-13", "trace-fig-14"] {
        let rows = section(&book, figure)["rows"].as_array().unwrap();
        let printed = rows.iter().filter(|row| row["what"].as_str().unwrap().ends_with("as printed"));
        let printed = printed.filter(|row| row["unit"] == "tok/s");
        let mut count = 0;
        for row in printed {
            let (paper, ours) = (row["paper"].as_f64().unwrap(), row["ours"].as_f64().unwrap());
            assert!((paper - ours).abs() < 0.006 && row["how"] == "fitted", "{row}");
            count += 1;
        }
        assert!(count > 5, "{figure}");
    }
    // A number that the paper prints once counts once, however many of ours are beside it.
    for (figure, rows, printed) in [
        ("trace-fig-12", 22, 11),
        ("trace-fig-13", 17, 10),
        ("trace-fig-14", 17, 10),
        ("cxl-ndp-fig-10", 3, 2),
    ] {
        let beside = section(&book, figure)["rows"].as_array().unwrap();
        let beside: Vec<_> = beside.iter().filter(|row| !row["paper"].is_null()).collect();
        let counted = beside.iter().filter(|row| row["again"] == false).count();
        assert_eq!((beside.len(), counted), (rows, printed), "{figure}");
    }
    // What is measured is of the bundled files, and can be wrong.
    let coded = row(section(&book, "trace-table-iv"), "bf16, zstd: Llama 3.1 8B");
    assert_eq!((&coded["paper"], &coded["how"]), (&json!(1.34), &json!("measured")));
    assert!((1.2..1.6).contains(&coded["ours"].as_f64().unwrap()), "{coded}");
    let words = row(section(&book, "trace-fig-15"), "words (gcomp), zstd");
    let trace = row(section(&book, "trace-fig-15"), "trace, zstd");
    assert!(trace["ours"].as_f64() > words["ours"].as_f64(), "{words} {trace}");
    assert_eq!(row(section(&book, "trace-table-v"), "trace: area")["how"], "quoted");
    let quest = row(section(&book, "trace-table-ii"), "Quest: 5 pages in bf16; here quest:5=full");
    assert_eq!((&quest["paper"], &quest["ours"]), (&json!(12.49), &json!(12.5)));
    assert_eq!(row(section(&book, "cxl-ndp-fig-4"), "OPT-13B")["how"], "not-obtainable");
    // A fifth of evenly spread scores each is at 16, 12, 8 and 4 bits and skipped.
    let experts = section(&book, "cxl-ndp-fig-3");
    assert_eq!(row(experts, "LLaMA-MoE-3.5B")["how"], "not-obtainable");
    assert_eq!(row(experts, "thresholds on scores")["ours"], json!(8.0));
    assert!((0.0..50.0).contains(&row(experts, "the same: energy")["ours"].as_f64().unwrap()), "{experts}");
    // llama.cpp's numbers stand beside the decoder's, by its name.
    let precisions = section(&book, "cxl-ndp-fig-4");
    for (what, ours) in [
        ("weights as e8m3, 12 planes fetched", 11.0),
        ("weights as e8m3, 12 planes fetched, by llama.cpp", 11.5),
        ("weights as full, 16 planes fetched, by llama.cpp", 10.5),
    ] {
        let rows = precisions["rows"].as_array().unwrap();
        let found = rows.iter().find(|row| row["what"] == what).unwrap_or_else(|| panic!("no row {what}"));
        assert_eq!((&found["ours"], &found["how"]), (&json!(ours), &json!("measured")));
    }
    assert!(precisions["source"].as_str().unwrap().contains("llama.cpp (of a test) on b <model>"));
    assert_eq!(row(section(&book, "trace-table-ii"), "full KV cache, by llama.cpp")["ours"], json!(10.5));
    let cached = section(&book, "trace-fig-15")["source"].as_str().unwrap();
    assert!(cached.contains("llama.cpp (of a test) keeps of 256 tokens of t.txt"), "{cached}");
    for section in book["sections"].as_array().unwrap() {
        assert!(!section["source"].as_str().unwrap().is_empty() && section["rows"].is_array());
        for row in section["rows"].as_array().unwrap() {
            let known = ["measured", "modelled", "fitted"].contains(&row["how"].as_str().unwrap());
            assert_eq!(known, !row["ours"].is_null(), "{row}");
        }
    }

    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for id in SECTIONS {
        assert!(page.contains(&format!("<section id=\"{id}\">")), "{id}");
    }
    assert!(page.contains("a &lt;model&gt;") && !page.contains("<model>"));
    for outside in ["http:", "https:", "src=", "url(", "@import", "<script", "<link", "NaN"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.matches("<svg").count() > 20);
}

/// What a row has in the papers and here, and how it was had.
fn said<'b>(book: &'b Value, id: &str, what: &str) -> (Option<f64>, Option<f64>, &'b str) {
    let row = row(section(book, id), what);
    (row["paper"].as_f64(), row["ours"].as_f64(), row["how"].as_str().unwrap())
}

fn close(ours: Option<f64>, other: f64) -> bool {
    ours.is_some_and(|ours| (ours - other).abs() < 0.06)
}

/// The papers' numbers that do not follow of the others, or that ours speak against.
#[test]
fn what_the_papers_say_against_themselves_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let output = lamina(&["--out", folder.path().to_str().unwrap(), "--json"]);
    assert!(output.status.success(), "{output:?}");
    let book: Value = serde_json::from_slice(&output.stdout).unwrap();
    let told = |id: &str, text: &str| {
        let section = section(&book, id);
        assert!(section.to_string().contains(text), "{text}: {section:#}");
    };
    // By hand: 32 layers of 2 · 8 · 128 values of two bytes, 4096 tokens, beside 8.03e9 weights.
    let (paper, ours, how) = said(&book, "cxl-ndp-fig-1", "KV of all at 4k");
    assert!(paper == Some(90.0) && close(ours, 3.2) && how == "modelled");
    assert!(close(said(&book, "cxl-ndp-fig-1", "context at which").1, 1.10));
    assert!(!section(&book, "cxl-ndp-fig-1").to_string().contains("no numbers"));

    let (paper, ours, how) = said(&book, "trace-fig-12", "trace over plain at 128k, as printed");
    assert!(paper == Some(4.24) && close(ours, 4.24) && how == "fitted");
    let (paper, ours, how) = said(&book, "trace-fig-12", "trace over plain at 128k, device only");
    assert!(paper == Some(4.24) && close(ours, 1.88) && how == "modelled");
    told("trace-fig-12", "192k (the paper's 196k)");
    let (paper, ours, _) = said(&book, "trace-fig-13", "trace over gcomp at 128k, device only");
    assert!(paper == Some(3.6) && close(ours, 1.27));
    let target = "longest context at 40 tokens a second as printed: plain and gcomp";
    assert_eq!(said(&book, "trace-fig-13", target), (Some(64.0), Some(0.0), "modelled"));
    for figure in ["trace-fig-13", "trace-fig-14"] {
        told(figure, "1.33 (Fig. 15) and 1.259 (Table I: 20.6 %)");
    }

    // The time of Mixtral is that of the mix of its energy; what is worked out is marked.
    assert_eq!(said(&book, "trace-fig-18", "Mixtral 8x7B bf16").2, "fitted");
    assert_eq!(said(&book, "trace-fig-19", "Mixtral 8x7B bf16, 705.90").2, "modelled");
    assert_eq!(said(&book, "trace-fig-19", "Llama 3.1 70B fp8, 348.65").2, "fitted");
    assert_eq!(said(&book, "trace-fig-19", "Mixtral 8x7B bf16, by words").0, Some(705.9));
    for section in book["sections"].as_array().unwrap() {
        for row in section["rows"].as_array().unwrap() {
            let worked_out = ["fp8, 348.65", "int4, 251.03", "over full"];
            let what = row["what"].as_str().unwrap();
            assert_eq!(row["derived"], worked_out.iter().any(|text| what.contains(text)), "{row}");
        }
    }
    // Heads are a third of the weights, and save more than the others.
    let (paper, ours, _) = said(&book, "trace-fig-20", "most that planes save of heads and neurons together");
    assert!(paper == Some(40.3) && ours.is_some_and(|ours| (30.0..32.0).contains(&ours)), "{ours:?}");
    told("trace-fig-20", "by construction");
    told("trace-fig-21", "by construction");
    told("trace-fig-21", "a ninth of a row");
    told("trace-fig-22", "they are 88");
    // A burst is compared with a burst, and no codec is in it.
    for (bits, paper, ours) in [(5, 295.0, 299.583_333), (10, 640.0, 566.25)] {
        let what = format!("{bits} bits: DRAM burst, planes as they are, one channel");
        assert_eq!(said(&book, "cxl-ndp-fig-11", &what), (Some(paper), Some(ours), "modelled"));
    }
    assert_eq!(said(&book, "cxl-ndp-fig-11", "5 bits, lz4: total"), (Some(398.0), None, "not-obtainable"));
    assert_eq!(said(&book, "trace-table-iv", "fp8, zstd: Llama 3.1 8B, saved of fp8").0, Some(8.3));
    told("trace-table-iv", "the tree takes about 1 KiB");
    let window = "a window of 128 channels and 256 tokens";
    assert_eq!(said(&book, "cxl-ndp-table-iii", window), (Some(140.0), Some(144.0), "measured"));
    told("cxl-ndp-fig-3", "Router 2");
}

/// What has no number says why, and is not called measured.
#[test]
fn rows_without_a_number_are_not_called_measured() {
    let folder = tempfile::tempdir().unwrap();
    let report = json!({ "decode": {
        "model": "a model", "perplexity": {}, "policy_perplexity": { "full": 10.0 }, "kv_ratio": null,
        "identical_to_reference": true, "page_tokens": 16, "runs": [],
    } });
    let decode = folder.path().join("decode.json");
    fs::write(&decode, report.to_string()).unwrap();
    // A tensor of 1024 halves, no bf16 among them.
    let head = json!({ "t": { "dtype": "F16", "shape": [32, 32], "data_offsets": [0, 2048] } }).to_string();
    let length = u64::try_from(head.len()).unwrap();
    let values = (0..1024_u16).flat_map(|number| (0x3c00 + number).to_le_bytes());
    let model = folder.path().join("f16.safetensors");
    let file: Vec<u8> = length.to_le_bytes().into_iter().chain(head.into_bytes()).chain(values).collect();
    fs::write(&model, file).unwrap();
    let out = folder.path().join("out");
    let [decode, model, out] = [&decode, &model, &out].map(|path| path.to_str().unwrap());
    let output = lamina(&["--decode", decode, "--model", model, "--out", out, "--json"]);
    assert!(output.status.success(), "{output:?}");
    let book: Value = serde_json::from_slice(&output.stdout).unwrap();
    for section in book["sections"].as_array().unwrap() {
        for row in section["rows"].as_array().unwrap() {
            assert!(
                !row["ours"].is_null() || !["measured", "modelled"].contains(&row["how"].as_str().unwrap())
            );
        }
    }
    assert_eq!(said(&book, "trace-table-ii", "sliding window of 64 tokens").2, "not-run");
    let source = section(&book, "trace-table-ii")["source"].as_str().unwrap();
    assert!(source.contains("no policy that is as these: sliding window of 64 tokens;"), "{source}");
    assert!(!source.contains(" 0 tokens"), "{source}");
    assert_eq!(said(&book, "trace-table-iv", "bf16, zstd: Llama 3.1 8B").2, "not-run");
    let source = section(&book, "trace-table-iv")["source"].as_str().unwrap();
    assert!(source.contains("No tensor of them is bf16"), "{source}");
}

#[test]
fn without_a_model_to_run_it_says_what_was_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let kv = root().join("guest-tests/models/stories260K-kv-bf16.safetensors");
    let output = lamina(&["--cache", kv.to_str().unwrap(), "--out", out]);
    assert!(output.status.success(), "{output:?}");
    let list = String::from_utf8_lossy(&output.stdout);
    assert!(list.contains("CXL-NDP  Table V") && list.contains("numbers quoted here"), "{list}");
    assert!(list.contains("TRACE    Fig. 12     0 of 11 11 fitted  "), "{list}");
    let book: Value = serde_json::from_slice(&fs::read(folder.path().join("report.json")).unwrap()).unwrap();
    assert_eq!(row(section(&book, "trace-table-ii"), "full KV cache")["how"], "not-run");
    let source = section(&book, "cxl-ndp-fig-4")["source"].as_str().unwrap();
    assert!(source.contains("llama.cpp was not run") && source.contains("--fetch-llama"), "{source}");
    assert_eq!(row(section(&book, "trace-table-iv"), "bf16, zstd")["how"], "not-run");
    assert_eq!(row(section(&book, "trace-fig-15"), "trace, zstd")["how"], "measured");
}

#[test]
fn what_cannot_be_is_refused_by_its_name_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "no model").unwrap();
    let text = text.to_str().unwrap();
    assert!(
        refused(&["--model", "/nonexistent.safetensors", "--out", out]).contains("/nonexistent.safetensors")
    );
    assert!(refused(&["--model", text, "--out", out]).contains(text));
    assert!(refused(&["--decode", text, "--out", out]).contains("is no report"));
    assert!(refused(&["--llama", text, "--out", out]).contains("precisions.py"));
    assert!(refused(&["--dram", "ddr9", "--out", out]).contains("dram is ddr9"));
    let weights = root().join("guest-tests/models/stories260K-bf16.safetensors");
    let weights = weights.to_str().unwrap();
    assert!(refused(&["--cache", weights, "--out", out]).contains("--kv CHANNELS"));
    assert!(refused(&["--kv", "32", "--out", out]).contains("--cache"));
    assert!(refused(&["--out", text]).contains(text));
    // Before anything is read.
    let taken = folder.path().join("taken/report.html");
    fs::create_dir_all(&taken).unwrap();
    let into = taken.parent().unwrap().to_str().unwrap();
    let why = refused(&["--model", "/nonexistent.safetensors", "--out", into]);
    assert!(why.contains("report.html: it is a directory"), "{why}");
    assert!(!Path::new(out).join("report.html").exists());
    // The decoder's report may lie where the page is to go.
    let decoded = folder.path().join("report.json");
    fs::rename(decode_report(folder.path()), &decoded).unwrap();
    let before = fs::read(&decoded).unwrap();
    let why = refused(&["--decode", decoded.to_str().unwrap(), "--out", folder.path().to_str().unwrap()]);
    assert!(why.contains("would write over"), "{why}");
    assert_eq!(fs::read(&decoded).unwrap(), before);
}
