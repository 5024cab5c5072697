//! `lamina advise`: what it says of its map is so of the file that the map makes.

use std::{
    convert::Infallible,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use lamina_llama::{
    Config, Decoder, Element, Experts, Memory, PlainCache, Tokenizer, Viewed, Weight, judge, mixture,
};
use lamina_reference::Format;
use serde_json::Value;

use crate::common::{Place, bundled, header, reference, tensor};

/// Tokens to choose by, and to check by.
const TOKENS: [usize; 2] = [12, 40];

fn of_models(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-tests/models").join(name).display().to_string()
}

/// The words of a command with these, and what else it needs.
fn advise(place: &Place, model: &Path, words: &[&str]) -> Vec<String> {
    let [choose, check] = TOKENS.map(|count| count.to_string());
    let needed = [
        ("--text", of_models("story.txt")),
        ("--tokenizer", of_models("tok512.bin")),
        ("--out", place.text("map.toml")),
        ("--text-tokens", choose),
        ("--check-tokens", check),
    ];
    let needed = needed.into_iter().filter(|(option, _)| !words.contains(option));
    let needed = needed.flat_map(|(option, value)| [option.to_owned(), value]);
    let command = ["advise".to_owned(), model.display().to_string()];
    command.into_iter().chain(needed).chain(words.iter().copied().map(str::to_owned)).collect()
}

fn advice(place: &Place, model: &Path, words: &[&str]) -> Value {
    let words = advise(place, model, words);
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    serde_json::from_str(&place.said(&words)).unwrap()
}

/// A file's tensors, in the decoder's order.
struct Tensors(Vec<Vec<u8>>);

impl Memory for Tensors {
    type Error = Infallible;

    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Infallible> {
        into.copy_from_slice(&self.0[index][offset..offset + into.len()]);
        Ok(())
    }
}

/// The perplexity that the decoder comes to with the tensors of a file, one token after the other.
fn perplexity(file: &[u8]) -> f64 {
    let config = Config::from_json(header(file).0["__metadata__"]["config"].as_str().unwrap()).unwrap();
    let tensors = Weight::all(&config).into_iter().map(|weight| tensor(file, &weight.name()).to_vec());
    let weights = Viewed::new(config, Tensors(tensors.collect()), Element::of("full").unwrap());
    let tokenizer = Tokenizer::parse(&fs::read(of_models("tok512.bin")).unwrap(), config.vocab_size).unwrap();
    let tokens = tokenizer.encode(&fs::read_to_string(of_models("story.txt")).unwrap());
    let text = &tokens[TOKENS[0]..TOKENS[0] + TOKENS[1]];
    let Ok(judged) = judge(&mut Decoder::new(config), &weights, &mut PlainCache::new(&config), text, 1);
    judged.perplexity().unwrap()
}

/// A file with each part of the advice at its precision, as the reference has it; the bits of all
/// weights and the weights; and how many parts have each of `precisions`, full among them.
fn mapped(full: &[u8], advice: &Value, precisions: &[(&str, f64)]) -> (Vec<u8>, f64, f64, Vec<usize>) {
    let mut wanted = full.to_vec();
    let (mut spent, mut weights, mut seen) = (0.0, 0.0, vec![0; precisions.len()]);
    for part in advice["parts"].as_array().unwrap() {
        let (name, precision) = (part["tensor"].as_str().unwrap(), part["precision"].as_str().unwrap());
        let whole = tensor(full, name);
        let at = whole.as_ptr().addr() - full.as_ptr().addr();
        let shape = header(full).0[name]["shape"].clone();
        let row = 2 * usize::try_from(shape[1].as_u64().unwrap()).unwrap();
        let rows = match &part["rows"] {
            Value::Array(rows) => {
                [&rows[0], &rows[1]].map(|row| usize::try_from(row.as_u64().unwrap()).unwrap())
            }
            _ => [0, whole.len() / row],
        };
        assert_eq!(part["weights"].as_u64().unwrap(), ((rows[1] - rows[0]) * row / 2) as u64);
        let index = precisions.iter().position(|(name, _)| *name == precision).unwrap();
        seen[index] += 1;
        let own = part["weights"].as_f64().unwrap();
        (spent, weights) = (spent + precisions[index].1 * own, weights + own);
        let viewed = match precision {
            "full" => whole.to_vec(),
            spelling => reference(Format::Bf16, spelling, whole).unwrap(),
        };
        let range = rows[0] * row..rows[1] * row;
        wanted[at + range.start..at + range.end].copy_from_slice(&viewed[range]);
    }
    (wanted, spent, weights, seen)
}

/// What the advice says of all of the model at a precision.
fn told<'a>(advice: &'a Value, name: &str) -> &'a Value {
    let found = advice["precisions"].as_array().unwrap().iter().find(|row| row["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is judged"))
}

#[test]
fn the_file_that_the_map_makes_is_what_was_judged() {
    let place = Place::new();
    let words = ["--budget", "11.3", "--views", "e8m1,e8m3+g2", "--by-head", "--json"];
    let advice = advice(&place, bundled(), &words);
    let bits = advice["bits"].as_f64().unwrap();
    assert!((10.0..=11.3).contains(&bits), "{bits}");
    assert_eq!(advice["uniform"], "e8m1");
    // What is given is the best of what was tried as a whole.
    let tried = advice["candidates"].as_array().unwrap();
    let of = |candidate: &Value| candidate["divergence"].as_f64().unwrap();
    let given = tried.iter().find(|candidate| candidate["found"] == advice["found"]).unwrap();
    assert_eq!(tried.len(), 3);
    assert!(tried.iter().all(|candidate| of(given) <= of(candidate)), "{tried:?}");

    place.mount(&["--map", &format!("small={}", place.text("map.toml")), bundled().to_str().unwrap()]);
    let full = fs::read(bundled()).unwrap();
    let shown = place.read("stories260K-bf16@small.safetensors");
    let precisions = [("e8m1", 10.0), ("e8m3+g2", 14.0), ("full", 16.0)];
    let (wanted, spent, weights, seen) = mapped(&full, &advice, &precisions);
    assert!(seen.iter().all(|count| *count > 0), "all precisions are used: {seen:?}");
    assert!((spent / weights - bits).abs() < 1e-9);
    assert!(shown == wanted);

    let said = |name: &str| told(&advice, name)["perplexity"].as_f64().unwrap().to_bits();
    assert_eq!(said("the map"), perplexity(&shown).to_bits());
    assert_eq!(said("full"), perplexity(&full).to_bits());
    let uniform = place.read("stories260K-bf16@e8m1.safetensors");
    // Gains stay in full under advice, and not in the file at one precision.
    assert!(uniform != shown);
    let fetched = |name: &str| told(&advice, name)["fetched_bytes"].as_u64().unwrap();
    assert!(fetched("e8m1") < fetched("the map") && fetched("the map") < fetched("full"));
    assert!(advice["experts"].is_null());
}

#[test]
fn an_expert_that_few_tokens_use_gets_fewer_bits_than_one_that_many_use() {
    let place = Place::new();
    let dense = fs::read(bundled()).unwrap();
    let full = mixture::of_safetensors(&dense, Experts { count: 4, used: 2 }).unwrap();
    let model = place.write("mixture.safetensors", &full);
    let routes = place.text("routes.csv");
    let words = ["--budget", "11", "--views", "e8m1,e8m2,e8m3", "--routes", &routes, "--json"];
    let advice = advice(&place, Path::new(&model), &words);

    // The trace has every token, and the advice counts what it says.
    let trace = fs::read_to_string(&routes).unwrap();
    let lines: Vec<Vec<&str>> = trace.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines[0], ["token", "layer", "expert", "share"]);
    let layers = 5;
    assert_eq!(lines.len() - 1, TOKENS[0] * layers * 2);
    let experts = advice["experts"].as_array().unwrap();
    assert_eq!(experts.len(), layers * 4);
    for expert in experts {
        let own = [expert["layer"].to_string(), expert["expert"].to_string()];
        let count = lines[1..].iter().filter(|line| line[1..3] == own).count();
        assert_eq!(expert["routed"], count);
    }

    // Of each layer the one that was used least, and the one that was used most.
    let bits = |expert: &Value| expert["bits"].as_f64().unwrap();
    let (mut rare, mut common) = (0.0, 0.0);
    for layer in experts.chunks(4) {
        let routed = |expert: &&Value| expert["routed"].as_u64().unwrap();
        let (least, most) =
            (layer.iter().min_by_key(routed).unwrap(), layer.iter().max_by_key(routed).unwrap());
        assert!(routed(&least) < routed(&most));
        (rare, common) = (rare + bits(least), common + bits(most));
    }
    assert!(rare < common, "{rare} of {common}");
    // What no token uses says nothing, so it gets least.
    let unused: Vec<_> = experts.iter().filter(|expert| expert["routed"] == 0).collect();
    assert!(unused.iter().all(|expert| (bits(expert) - 10.0).abs() < 1e-9), "{unused:?}");

    place.mount(&["--map", &format!("small={}", place.text("map.toml")), &model]);
    let shown = place.read("mixture@small.safetensors");
    let precisions = [("e8m1", 10.0), ("e8m2", 11.0), ("e8m3", 12.0), ("full", 16.0)];
    let (wanted, spent, weights, _) = mapped(&full, &advice, &precisions);
    assert!(shown == wanted);
    assert!((spent / weights - advice["bits"].as_f64().unwrap()).abs() < 1e-9 && spent <= 11.0 * weights);
    let said = told(&advice, "the map")["perplexity"].as_f64().unwrap();
    assert_eq!(said.to_bits(), perplexity(&shown).to_bits());
}

#[test]
fn a_map_goes_where_a_link_leads_and_stays_as_private_as_it_was() {
    let place = Place::new();
    let kept = place.write("kept.toml", b"# of before\n");
    fs::set_permissions(&kept, Permissions::from_mode(0o600)).unwrap();
    symlink(&kept, place.path("map.toml")).unwrap();
    advice(&place, bundled(), &["--budget", "12", "--json"]);
    assert!(place.path("map.toml").is_symlink());
    assert!(fs::read_to_string(&kept).unwrap().contains("[[tensor]]"));
    assert_eq!(fs::metadata(&kept).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn what_no_advice_can_be_given_on_is_refused_with_what_to_do() {
    let place = Place::new();
    for (words, says) in [
        (&["--budget", "8"][..], "with the coarsest precisions it is 10.00; add a coarser one with --views"),
        (&["--budget", "0"], "it is 1 to 16"),
        (&["--budget", "NaN"], "it is 1 to 16"),
        (&["--budget", "11", "--views", "fp8_e4m3fn"], "give views that mask"),
        (&["--budget", "11", "--views", "e9m1"], "e9m1"),
        (&["--budget", "11", "--check-tokens", "100000"], "the model takes 2 to 512"),
        (&["--budget", "11", "--text", "/dev/null"], "has 1 tokens"),
        (
            &["--budget", "11", "--out", "/nowhere/map.toml"],
            "cannot write /nowhere/map.toml: there is no directory",
        ),
        (&["--budget", "11", "--routes", "/nowhere/routes"], "has no experts"),
    ] {
        let words = advise(&place, bundled(), words);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let said = place.refused(&words);
        assert!(said.contains(says), "{words:?}: {said}");
    }
    let other =
        place.write("other.safetensors", &crate::common::safetensors(&[("w", "BF16", vec![4], vec![0; 8])]));
    let text = of_models("story.txt");
    let common = ["--text", text.as_str(), "--budget", "11"];
    let said =
        place.refused(&[&["advise", other.as_str(), "--tokenizer", text.as_str()][..], &common].concat());
    assert!(said.contains("its metadata has no `config`"), "{said}");
    let said = place.refused(&[&["advise", other.as_str()][..], &common].concat());
    assert!(said.contains("has no vocabulary: give one with --tokenizer"), "{said}");
    let said = place.refused(&[&["advise", other.as_str(), "--out", other.as_str()][..], &common].concat());
    assert!(said.contains("would write over") && said.contains("name another file"), "{said}");
}
