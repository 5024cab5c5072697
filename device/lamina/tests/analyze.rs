//! `lamina analyze` as a person or a script runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn lamina(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lamina")).arg("analyze").args(arguments).output().unwrap()
}

/// What it prints when it works.
fn printed(arguments: &[&str]) -> String {
    let output = lamina(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What it says when it does not.
fn refused(arguments: &[&str]) -> String {
    let output = lamina(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {output:?}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

fn bundled(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-tests/models").join(name);
    path.to_str().unwrap().to_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_script_gets_json_of_the_promised_shape() {
    let (weights, kv) = (bundled("stories260K-bf16.safetensors"), bundled("stories260K-kv-bf16.safetensors"));
    let report: Value = serde_json::from_str(&printed(&[&weights, &kv, "--json"])).unwrap();
    let tensors = report["tensors"].as_array().unwrap();
    assert!(tensors.len() > 100, "{}", tensors.len());
    for tensor in tensors {
        assert!(tensor["name"].is_string() && tensor["elements"].is_u64(), "{tensor}");
        assert_eq!(tensor["format"], "bf16");
        assert!(tensor["entropy_limit"].as_f64().unwrap() > 1.0, "{tensor}");
        let codecs = tensor["codecs"].as_object().unwrap();
        assert!(codecs.contains_key("lz4") && codecs.contains_key("zstd"), "{tensor}");
        for codec in codecs.values() {
            assert!(codec["ratio"].as_f64().unwrap() > 0.0, "{tensor}");
            assert_eq!(codec["plane_ratios"].as_array().unwrap().len(), 16, "{tensor}");
        }
        for name in ["lz4", "zstd"] {
            assert!(tensor["word_major"][name].as_f64().unwrap() > 0.0, "{tensor}");
        }
    }
    let total = &report["total"];
    let ratio = |name: &str| total["codecs"][name]["ratio"].as_f64().unwrap();
    // What planes are for: more than words give, from the same codec.
    let of = |file: &str| tensors.iter().filter(|t| t["file"].as_str().unwrap().ends_with(file)).count();
    assert!(of("stories260K-bf16.safetensors") > 0 && of("stories260K-kv-bf16.safetensors") > 0);
    assert!(ratio("zstd") > ratio("lz4") && ratio("lz4") > total["word_major"]["lz4"].as_f64().unwrap());
}

#[test]
fn a_person_gets_tables_and_a_drawing() {
    let directory = tempfile::tempdir().unwrap();
    let plot = directory.path().join("planes.svg");
    let kv = bundled("stories260K-kv-bf16.safetensors");
    let tables = printed(&[&kv, "--codec", "zstd", "--kv", "32", "--plot", text(&plot)]);
    for word in [
        "layers.0.seq.0.k",
        "bf16 kv",
        "total",
        "Planes of bf16",
        "rounded to int4",
        "KV layer by layer",
        "exponent differences",
    ] {
        assert!(tables.contains(word), "{word}: {tables}");
    }
    assert!(!tables.contains(" lz4 \n") && !tables.contains('\u{1b}'));
    let svg = fs::read_to_string(&plot).unwrap();
    assert!(svg.starts_with("<svg ") && svg.contains("bf16 as stored · zstd") && !svg.contains("· lz4"));
}

#[test]
fn real_caches_reach_the_ratios_that_were_promised() {
    let kv = bundled("stories260K-kv-bf16.safetensors");
    let report: Value = serde_json::from_str(&printed(&[&kv, "--kv", "32", "--json"])).unwrap();
    let tensors = report["tensors"].as_array().unwrap();
    let mean = |codec: &str| report["kv"]["geometric_mean"][codec].as_f64().unwrap();
    assert!(mean("lz4") >= 1.38 && mean("zstd") >= 1.40, "{} {}", mean("lz4"), mean("zstd"));
    assert!(mean("lz4") > 1.2 * report["kv"]["word_major_geometric_mean"]["lz4"].as_f64().unwrap());
    // Every layer has its K and its V, and of K none is below what the best codec promised.
    let layers = report["kv"]["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 2 * 5);
    for layer in layers.iter().filter(|layer| layer["side"] == "k") {
        assert!(layer["ratios"]["tree"].as_f64().unwrap() >= 1.5, "{layer}");
    }
    let side = |tensor: &Value, side: char| tensor["name"].as_str().unwrap().ends_with(side);
    let ratios = tensors.iter().filter(|tensor| side(tensor, 'k'));
    let ratios: Vec<_> = ratios.map(|tensor| tensor["codecs"]["tree"]["ratio"].as_f64().unwrap()).collect();
    let k = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>()
        / f64::from(u32::try_from(ratios.len()).unwrap()))
    .exp();
    assert!(k >= 1.55, "{k}");
    // Layer 0's V depends on the token alone, so its rows repeat.
    let repeated = |tensor: &Value| tensor["codecs"]["tree"]["windows"]["repeated_rows"].as_u64().unwrap();
    let first = tensors.iter().filter(|tensor| tensor["name"].as_str().unwrap().starts_with("layers.0."));
    assert!(first.filter(|tensor| side(tensor, 'v')).all(|v| repeated(v) > 50));
}

#[test]
fn the_table_of_layers_has_each_ratio_under_its_codec() {
    let kv = bundled("stories260K-kv-bf16.safetensors");
    let report: Value = serde_json::from_str(&printed(&[&kv, "--kv", "32", "--json"])).unwrap();
    let tables = printed(&[&kv, "--kv", "32"]);
    let layers = &tables[tables.find("KV layer by layer").unwrap()..];
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let mut lines = layers.lines().skip(1).map(words);
    let head = lines.next().unwrap();
    let first = lines.find(|line| line.first().is_some_and(|word| word == "0")).unwrap();
    assert_eq!(head[4..7], ["lz4", "zstd", "tree"]);
    // The bytes are two words: a number and its unit.
    for (codec, printed) in head[4..7].iter().zip(&first[5..]) {
        let ratio = report["kv"]["layers"][0]["ratios"][codec].as_f64().unwrap();
        assert_eq!(printed, &format!("{ratio:.3}"), "{codec}");
    }
}

#[test]
fn what_cannot_work_is_refused_before_the_work() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| -> PathBuf { directory.path().join(name) };
    fs::write(place("broken"), "not a checkpoint").unwrap();
    fs::write(place("opaque"), {
        let header = r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2, 3]].concat()
    })
    .unwrap();
    let model = bundled("stories260K-bf16.safetensors");
    let (broken, opaque) = (place("broken"), place("opaque"));
    let (missing, nowhere) = (place("missing"), place("no/such/plot.svg"));
    let cases: [(&[&str], &str); 11] = [
        (&[], "FILE"),
        (&[text(&missing)], "missing"),
        (&[&model, text(&broken)], "broken"),
        (&[text(directory.path())], "not a regular file"),
        (&[&model, "--codec", "gzip"], "gzip"),
        (&[&model, "--kv", "0"], "CHANNELS,WINDOW"),
        (&[&model, "--kv", "7"], "7 channels"),
        (&[&model, "--plot", text(&nowhere)], "no directory"),
        (&[text(&opaque), "--plot", text(&opaque)], "write over"),
        (&[&model, "--base", text(&opaque), "--plot", text(&opaque)], "write over"),
        (&[text(&opaque), "--plot", text(&missing)], "bit-planes"),
    ];
    for (arguments, word) in cases {
        let refused = refused(arguments);
        assert!(refused.contains(word), "{arguments:?}: {refused}");
    }
    assert!(!missing.exists() && fs::read(&opaque).unwrap().ends_with(&[1, 2, 3]));
}

#[test]
fn a_name_cannot_command_the_terminal() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let header = r#"{"a\u001b[2Jb":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2, 3]].concat();
    fs::write(file.path(), bytes).unwrap();
    let tables = printed(&[text(file.path())]);
    assert!(!tables.contains('\u{1b}') && tables.contains("[2Jb"), "{tables}");
}

#[test]
fn packkv_is_told_beside_kivi_as_the_paper_counts_and_whole() {
    let kv = bundled("stories260K-kv-bf16.safetensors");
    let arguments = [kv.as_str(), "--codec", "zstd", "--kv", "32", "--packkv"];
    let tables = printed(&arguments);
    for word in ["PackKV, lossy", "greedy", "median", "KIVI", "4 and 3 bits", "root mean square"] {
        assert!(tables.contains(word), "{word}: {tables}");
    }
    let report: Value = serde_json::from_str(&printed(&[&arguments[..], &["--json"]].concat())).unwrap();
    let packkv = &report["packkv"];
    let ways = packkv["ways"].as_array().unwrap();
    assert_eq!(ways.len(), 9);
    let ratio = |way: &Value, what: &str| way[what].as_f64().unwrap();
    for way in ways {
        assert!(ratio(way, "k_paper") > ratio(way, "k_counted"), "{way}");
        assert!(ratio(way, "v_paper") > ratio(way, "v_counted"), "{way}");
    }
    // What the paper finds: orders that are looked for take less, V more so than K.
    let of = |repack: &str, pack: u64, what: &str| {
        let way = ways.iter().find(|way| way["repack"] == repack && way["pack"] == pack).unwrap();
        ratio(way, what)
    };
    for pack in [4, 8, 16] {
        assert!(of("greedy", pack, "v_paper") > of("none", pack, "v_paper"));
    }
    assert!(packkv["k"]["error"].as_f64().unwrap() < packkv["v"]["error"].as_f64().unwrap());
    for (bad, word) in
        [("--packkv=0.1", "K,V"), ("--packkv=0.001,0.2", "0.01 to 1"), ("--packkv=x,1", "number")]
    {
        assert!(refused(&[&kv, "--kv", "32", bad]).contains(word), "{bad}");
    }
    assert!(refused(&[&kv, "--packkv"]).contains("--kv"));
}

#[test]
fn a_layout_with_loss_is_told_exactly_and_packed() {
    let kv = bundled("stories260K-kv-bf16.safetensors");
    let report = |layout: &str, more: &[&str]| -> Value {
        let words = [&[kv.as_str(), "--codec", "zstd", "--json", "--kv", layout], more].concat();
        serde_json::from_str(&printed(&words)).unwrap()
    };
    let lossy = report("32,64,lossy=packkv:0.2", &[]);
    assert_eq!(lossy, report("32,64", &["--packkv=0.2,0.2"]));
    assert_eq!(lossy["packkv"]["k"]["scale"], 0.2);
}

/// The bundled weights as a fine-tune would leave them: made here, as no pair of models is at hand.
/// One element in `every` is `ulps` steps of bf16 from where it was, and one tensor in four is
/// frozen.
fn perturbed(every: usize, ulps: u16, folder: &Path) -> PathBuf {
    let mut bytes = fs::read(bundled("stories260K-bf16.safetensors")).unwrap();
    let header = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
    let parsed: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let mut tensors: Vec<_> = parsed.as_object().unwrap().values().collect();
    tensors.retain(|tensor| tensor["data_offsets"].is_array());
    for tensor in tensors.iter().enumerate().filter(|(number, _)| number % 4 != 0).map(|(_, tensor)| tensor) {
        let at = |end: usize| usize::try_from(tensor["data_offsets"][end].as_u64().unwrap()).unwrap();
        let own = &mut bytes[8 + header..][at(0)..at(1)];
        for element in own.as_chunks_mut::<2>().0.iter_mut().step_by(every) {
            *element = u16::from_le_bytes(*element).wrapping_add(ulps).to_le_bytes();
        }
    }
    let path = folder.join(format!("every-{every}-by-{ulps}.safetensors"));
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_fine_tune_takes_a_part_of_what_it_takes_alone() {
    let folder = tempfile::tempdir().unwrap();
    let base = bundled("stories260K-bf16.safetensors");
    let report = |tuned: &Path| -> Value {
        let printed = printed(&[text(tuned), "--base", &base, "--codec", "tree", "--json"]);
        serde_json::from_str::<Value>(&printed).unwrap()["derived"].take()
    };
    let ratios = |every, ulps| {
        let report = report(&perturbed(every, ulps, folder.path()));
        let number = |of: &str| report["total"][of].as_f64().unwrap_or(f64::INFINITY);
        assert!(report["apart"].as_array().unwrap().is_empty());
        assert!(number("equal") > 0.0 && number("differences") >= number("equal"));
        eprintln!(
            "one weight in {every} by {ulps}: {} alone, {} derived",
            number("alone_ratio"),
            number("derived_ratio")
        );
        (number("alone_ratio"), number("derived_ratio"))
    };
    let mut before = f64::INFINITY;
    for (every, ulps) in [(64, 1), (8, 1), (1, 1), (1, 3)] {
        let (alone, derived) = ratios(every, ulps);
        assert!(
            derived > 1.3 * alone && derived < before,
            "{derived} is not {alone}, nor less than {before}"
        );
        before = derived;
    }
    // Its own base, and one that has nothing in common.
    let same = report(Path::new(&base));
    assert_eq!(same["total"]["derived_bytes"], 0);
    assert_eq!(same["total"]["derived_ratio"], Value::Null);
    let kv = bundled("stories260K-kv-bf16.safetensors");
    let table = printed(&[&kv, "--base", &base, "--codec", "tree"]);
    assert!(table.contains("are none of the base's by name, dtype and shape"), "{table}");
    let none = folder.path().join("none");
    assert!(refused(&[&kv, "--base", text(&none)]).contains("none"));
}
