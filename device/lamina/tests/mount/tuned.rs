//! Models and tensors that are stored as differences to others, through every door.

use std::fs::File;
use std::os::unix::fs::FileExt;

use lamina_reference::Format;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::common::{Place, floats, noise, reference, safetensors, tensor};
use crate::life::worker_of;

const ELEMENTS: usize = 40_000;

/// Weights: what is noise below the exponent, and few exponents.
fn weights(seed: u64) -> Vec<u8> {
    let mut bytes = noise(seed, 2 * ELEMENTS);
    bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|[_, upper]| *upper = *upper & 0x80 | 0x3c | *upper & 1);
    bytes
}

/// The same, of which every eleventh is one step away.
fn moved(weights: &[u8]) -> Vec<u8> {
    let mut moved = weights.to_vec();
    moved.as_chunks_mut::<2>().0.iter_mut().step_by(11).for_each(|[lower, _]| *lower ^= 1);
    moved
}

/// A model, and one that was made of it.
fn pair() -> (Vec<u8>, Vec<u8>) {
    let shape = || vec![ELEMENTS as u64];
    let (near, frozen) = (weights(1), weights(2));
    let (singles, halves) = (floats(Format::Fp32, 3, 3001), floats(Format::Fp16, 4, 5003));
    let mut other_singles = singles.clone();
    other_singles[7] ^= 0x80;
    let base = safetensors(&[
        ("near", "BF16", shape(), near.clone()),
        ("frozen", "BF16", shape(), frozen.clone()),
        ("singles", "F32", vec![3001], singles),
        ("halves", "F16", vec![5003], halves.clone()),
        ("grown", "BF16", vec![100, 10], noise(5, 2000)),
        ("other", "BF16", vec![1000], noise(6, 2000)),
    ]);
    let tuned = safetensors(&[
        ("frozen", "BF16", shape(), frozen),
        ("near", "BF16", shape(), moved(&near)),
        ("singles", "F32", vec![3001], other_singles),
        ("halves", "F16", vec![5003], halves),
        ("grown", "BF16", vec![110, 10], noise(5, 2200)),
        ("other", "F16", vec![1000], noise(6, 2000)),
        ("new", "BF16", vec![1000], noise(7, 2000)),
    ]);
    (base, tuned)
}

#[test]
fn a_fine_tune_is_right_at_every_precision_and_stored_in_a_part() {
    let place = Place::new();
    let (base, tuned) = pair();
    let image = place.text("image");
    let mounted = place.mount(&["--image", &image, &place.write("base.safetensors", &base)]);
    let path = place.write("tuned.safetensors", &tuned);
    for refused in [["load", &path, "--base", "nobody"], ["load", &path, "--base", "tuned"]] {
        assert!(place.refused(&refused).contains(refused[3]));
    }
    let said = place.said(&["load", &path, "--base", "base"]);
    for apart in [
        "grown is no difference to base's: the base's is 100x10, this one 110x10",
        "other is no difference to base's: that has 1000 elements of bf16, this 1000 of fp16",
        "new is no difference to base's: the base has no tensor of this name",
    ] {
        assert!(said.contains(apart), "{said}");
    }
    assert!(!said.contains("near is") && !said.contains("frozen is"), "{said}");
    let right = || {
        assert!(place.read("base/base.safetensors") == base);
        assert!(place.read("tuned/tuned.safetensors") == tuned);
        for (view, dtype) in [("e8m3", Format::Bf16), ("e8m5+g2", Format::Bf16), ("e5m4", Format::Fp16)] {
            let found = place.read(&format!("tuned@{view}.safetensors"));
            for name in if dtype == Format::Bf16 { &["near", "frozen", "new"][..] } else { &["halves"] } {
                let wanted = reference(dtype, view, tensor(&tuned, name)).unwrap();
                assert!(tensor(&found, name) == wanted, "{name} at {view}");
            }
        }
    };
    right();
    let models = || -> Value { serde_json::from_str(&place.said(&["ls", "--json"])).unwrap() };
    let of = |models: &Value, name: &str| {
        models[0]["models"].as_array().unwrap().iter().find(|is| is["name"] == name).unwrap().clone()
    };
    let (listed, own) = (of(&models(), "tuned"), of(&models(), "base"));
    assert_eq!((&listed["base"], &own["base"]), (&"base".into(), &Value::Null));
    let stored = |model: &Value| model["stored"].as_u64().unwrap();
    assert!(2 * stored(&listed) < stored(&own), "{} of {}", stored(&listed), stored(&own));
    assert_eq!(place.attribute("tuned/tuned.safetensors", "base").as_deref(), Some("base"));
    assert_eq!(place.attribute("base/base.safetensors", "base"), None);
    assert!(
        place.said(&["ls"]).lines().any(|line| line.contains("tuned.safetensors") && line.contains(" base "))
    );

    // The base stays, whole, and who would have to go first is named.
    let refused = place.refused(&["rm", "base"]);
    assert!(refused.contains("base is the base of tuned, and cannot be removed"), "{refused}");
    assert!(refused.contains("`lamina tensor detach --model tuned`"), "{refused}");
    right();
    kill(worker_of(mounted["pid"].as_u64().unwrap()).unwrap(), Signal::SIGKILL).unwrap();
    right();
    place.said(&["umount", &place.text("m")]);
    place.mount(&["--image", &image, &place.text("base.safetensors")]);
    right();
    assert!(place.refused(&["rm", "base"]).contains("is the base of"));
    place.said(&["rm", "tuned"]);
    assert!(place.read("base/base.safetensors") == base);
    place.said(&["rm", "base"]);
    let nothing = safetensors(&[("x", "BF16", vec![1], vec![1, 2])]);
    place.said(&["load", &place.text("base.safetensors")]);
    let refused = place.refused(&["load", &place.write("x.safetensors", &nothing), "--base", "base"]);
    assert!(refused.contains("no tensor of x has the name, the format and the shape"), "{refused}");
}

#[test]
fn stores_through_the_window_go_where_they_belong() {
    let place = Place::new();
    let mounted = place.mount(&["--capacity", "256M"]);
    let api = mounted["api"].as_str().unwrap();
    let length = (2 * ELEMENTS).to_string();
    let add = |name: &str, base: &[&str]| -> u64 {
        let words = ["tensor", "add", name, "--length", &length, "--format", "bf16", "--json", "--api", api];
        let made: Value = serde_json::from_str(&place.said(&[&words[..], base].concat())).unwrap();
        made["dpa"].as_u64().unwrap()
    };
    let base = add("base", &[]);
    let tuned = add("tuned", &["--base", "base"]);
    let window = File::options().read(true).write(true).open(place.path("m/base")).unwrap();
    let (of_base, of_tuned) = (weights(1), moved(&weights(1)));
    window.write_all_at(&of_base, base).unwrap();
    window.write_all_at(&of_tuned, tuned).unwrap();
    let flushed = || {
        place.said(&["flush", "--api", api]);
        rustix::fs::fadvise(&window, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    };
    flushed();
    let read = |at: u64| {
        let mut bytes = vec![0; 2 * ELEMENTS];
        window.read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    let stored = || {
        let stats: Value = serde_json::from_str(&place.said(&["stats", "--json", "--api", api])).unwrap();
        let tensors = stats["tensors"].as_array().unwrap();
        let tuned = tensors.iter().find(|is| is["name"] == "tuned").unwrap();
        assert_eq!(tuned["base_tensor"], "base");
        (tuned["stored_bytes"].as_u64().unwrap(), stats["requests"]["differences_read"].as_u64().unwrap())
    };
    assert!(read(base) == of_base && read(tuned) == of_tuned);
    let (small, differences) = stored();
    assert!(small < ELEMENTS as u64 && differences > 0, "{small} bytes, {differences} differences");
    assert!(
        place
            .said(&["tensors", "--api", api])
            .lines()
            .any(|line| line.contains("tuned") && line.contains(" base "))
    );
    // A store into the base, and one into a part of what is derived.
    let noise = noise(9, 8192);
    window.write_all_at(&noise, base + 4096).unwrap();
    window.write_all_at(&noise[..100], tuned + 20_000).unwrap();
    flushed();
    let (mut of_base, mut of_tuned) = (of_base, of_tuned);
    of_base[4096..12_288].copy_from_slice(&noise);
    of_tuned[20_000..20_100].copy_from_slice(&noise[..100]);
    assert!(read(base) == of_base && read(tuned) == of_tuned);
    assert!(stored().0 > small);
    let refused = place.refused(&["tensor", "rm", "base", "--api", api]);
    assert!(refused.contains("base is the base of tuned: detach or remove what is derived"), "{refused}");
    assert!(
        place
            .refused(&["tensor", "resize", "tuned", "--length", "4096", "--api", api])
            .contains("cannot be resized")
    );
    let detached = place.said(&["tensor", "detach", "tuned", "--json", "--api", api]);
    let detached: Value = serde_json::from_str(&detached).unwrap();
    assert_eq!((&detached[0]["name"], &detached[0]["base"]), (&"tuned".into(), &Value::Null));
    assert!(read(base) == of_base && read(tuned) == of_tuned);
    assert!(place.refused(&["tensor", "detach", "nobody", "--api", api]).contains("nobody"));
    place.said(&["tensor", "resize", "tuned", "--length", "4096", "--api", api]);
    place.said(&["tensor", "rm", "tuned", "--api", api]);
    assert!(read(base) == of_base && read(tuned) == of_tuned);
    place.said(&["tensor", "rm", "base", "--api", api]);
}

#[test]
fn a_model_is_mounted_against_another_and_detached_so_that_that_may_go() {
    let place = Place::new();
    let (base, tuned) = pair();
    let (image, of_base) = (place.text("image"), place.write("base.safetensors", &base));
    let of_tuned = place.write("tuned.safetensors", &tuned);
    let refused = place.refused(&["mount", &of_base, "--base", "tuned=base", &place.text("m")]);
    assert!(refused.contains("no model to mount is called tuned"), "{refused}");
    place.refused(&["mount", &of_base, &of_tuned, "--base", "tuned", &place.text("m")]);
    // What cannot be is refused, and nothing is left behind.
    let refused = place.refused(&["mount", &of_base, &of_tuned, "--base", "base=tuned", &place.text("m")]);
    assert!(
        refused.contains("no model of this device is called tuned") || refused.contains("tuned"),
        "{refused}"
    );
    assert!(!place.model("").exists());
    let mounted = place.mount(&["--image", &image, &of_base, &of_tuned, "--base", "tuned=base"]);
    let of = |models: &Value| {
        let found = models.as_array().unwrap().iter().find(|is| is["name"] == "tuned").unwrap();
        (found["base"].clone(), found["stored"].as_u64().unwrap())
    };
    let (is, small) = of(&mounted["models"]);
    assert_eq!(is, "base");
    let right = || assert!(place.read("tuned/tuned.safetensors") == tuned);
    right();
    let before = place.read("tuned@e8m3.safetensors");
    assert!(place.refused(&["rm", "base"]).contains("tensor detach --model tuned"));
    let api = mounted["api"].as_str().unwrap();
    assert!(place.refused(&["tensor", "detach", "--model", "nobody", "--api", api]).contains("nobody"));
    let said = place.said(&["tensor", "detach", "--model", "tuned", "--api", api]);
    assert!(said.contains("tuned/near") && !said.contains("grown"), "{said}");
    let models: Value = serde_json::from_str(&place.said(&["ls", "--json"])).unwrap();
    let (is, large) = of(&models[0]["models"]);
    assert!(is.is_null() && large > small, "{is} {large} {small}");
    assert_eq!(place.attribute("tuned/tuned.safetensors", "base"), None);
    place.said(&["rm", "base"]);
    right();
    assert!(place.read("tuned@e8m3.safetensors") == before);
    place.said(&["umount", &place.text("m")]);
    place.mount(&["--image", &image]);
    right();
}

#[test]
fn a_served_checkpoint_is_stored_against_the_one_before_it() {
    let place = Place::new();
    let (base, tuned) = pair();
    let (of_base, of_tuned) =
        (place.write("base.safetensors", &base), place.write("tuned.safetensors", &tuned));
    let (image, mount) = (place.text("image"), place.text("m"));
    let serve = |models: &[&str], bases: &[&str]| {
        let models = models.iter().flat_map(|model| ["--model", *model]);
        let bases = bases.iter().flat_map(|base| ["--model-base", *base]);
        let words = ["--image", &image, "--mount", &mount, "--run-dir", "run", "--json"];
        place.serve(&words.into_iter().chain(models).chain(bases).collect::<Vec<_>>())
    };
    let api = || place.text("run/api.sock");
    assert!(serve(&[&of_tuned, &of_base], &["tuned=base"]).unwrap_err().contains("no --model before"));
    for _ in 0..2 {
        let served = serve(&[&of_base, &of_tuned], &["tuned=base"]).unwrap();
        let stats: Value = serde_json::from_str(&place.said(&["stats", "--json", "--api", &api()])).unwrap();
        let tensors = stats["tensors"].as_array().unwrap();
        let of = |name: &str| tensors.iter().find(|is| is["name"] == name).unwrap();
        assert_eq!(
            (&of("tuned/near")["base_tensor"], &of("near")["base_tensor"]),
            (&"near".into(), &Value::Null)
        );
        assert_eq!(of("tuned/grown")["base_tensor"], Value::Null);
        assert!(
            2 * of("tuned/near")["stored_bytes"].as_u64().unwrap()
                < of("near")["stored_bytes"].as_u64().unwrap()
        );
        assert!(
            place.read("tuned/tuned.safetensors") == tuned && place.read("base/base.safetensors") == base
        );
        assert_eq!(place.attribute("tuned/tuned.safetensors", "base").as_deref(), Some("base"));
        drop(served);
    }
}
