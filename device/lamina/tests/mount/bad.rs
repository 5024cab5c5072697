//! What cannot be loaded: told by name, and nothing of it stays.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use lamina_reference::Format;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::common::{Place, floats, gguf, noise, safetensors};
use crate::files::sharded;

fn good() -> Vec<u8> {
    safetensors(&[("w", "BF16", vec![500], floats(Format::Bf16, 1, 500))])
}

#[test]
fn nothing_is_mounted_for_a_model_that_cannot_be_loaded() {
    let place = Place::new();
    let mount = place.text("m");
    let refused = |file: &str, bytes: &[u8], said: &str| {
        let why = place.refused(&["mount", &place.write(file, bytes), &mount]);
        assert!(why.contains(file) && why.contains(said), "{file}: {why}");
        assert!(!place.path("m").exists(), "{file}");
    };
    let whole = good();
    refused("cut.safetensors", &whole[..whole.len() - 1], "cut short");
    refused("no.safetensors", &[0xff; 64], "header");
    refused("short.safetensors", b"abc", "3 bytes");
    let tiny = gguf(&[("t", 0, vec![8], noise(1, 32)), ("u", 8, vec![32, 2], noise(2, 68))]);
    refused("cut.gguf", &tiny[..tiny.len() - 100], "u");
    refused("head.gguf", &tiny[..120], "cut short or its header lies");
    let mut lying = tiny.clone();
    lying[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    refused("lying.gguf", &lying, "18446744073709551615 tensors");
    lying = tiny.clone();
    lying[4] = 9;
    refused("later.gguf", &lying, "version 9");
    refused("rows.gguf", &gguf(&[("r", 8, vec![33], noise(1, 34))]), "whole blocks of 32");
    refused("data.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4'}", "has no shape");
    assert!(place.refused(&["mount", &place.text("missing.gguf"), &mount]).contains("missing.gguf"));
    assert!(place.refused(&["mount", &place.write("w.safetensors", &whole)]).contains("mount"));
    let view = place.refused(&["mount", "--views", "e8m3:packed", &place.text("w.safetensors"), &mount]);
    assert!(view.contains("e8m3:packed") && !place.path("m").exists(), "{view}");
    let blocks = place.write("q.gguf", &gguf(&[("blk.0", 8, vec![32, 2], noise(2, 68))]));
    for view in ["e8m3", "bf16", "fp8_e4m3fn"] {
        let why = place.refused(&["mount", "--views", view, &blocks, &mount]);
        let said = format!("no tensor of it can be shown as {view}: its first, \"blk.0\", is Q8_0");
        assert!(why.contains(&said) && !place.path("m").exists(), "{why}");
    }
    let image = place.text("image");
    place.refused(&["mount", "--views", "bf16", "--image", &image, &blocks, &mount]);
    assert!(!place.path("image").exists(), "its sizes would be those of what is mounted next");
    let map = place.write("m.toml", b"[[tensor]]\nname = \"x*\"\nview = \"e8m3\"\n");
    let map =
        place.refused(&["mount", "--map", &format!("small={map}"), &place.text("w.safetensors"), &mount]);
    assert!(map.contains("small") && map.contains("matches none of the 1 tensors"), "{map}");
    let all = place.write("all.toml", b"[[tensor]]\nname = \"*\"\nview = \"e8m3\"\n");
    for name in ["full", "int4", "e8m3", "e8m3:packed", "bf16", "a/b"] {
        let map = format!("{name}={all}");
        let why = place.refused(&["mount", "--map", &map, &place.text("w.safetensors"), &mount]);
        assert!(why.contains("a name that is no view's") && !place.path("m").exists(), "{name}: {why}");
    }
}

#[test]
fn shards_that_do_not_fit_their_index_are_refused() {
    let place = Place::new();
    let mount = place.text("m");
    let index = |map: Value| {
        let text = json!({ "weight_map": map }).to_string();
        place.write("Llama/model.safetensors.index.json", text.as_bytes());
        place.refused(&["mount", &place.text("Llama"), &mount])
    };
    sharded(&place, "Llama");
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let why = index(json!({ "a": one, "b": "model-00003.safetensors" }));
    assert!(why.contains("\"model-00003.safetensors\" is missing"), "{why}");
    let why = index(json!({ "a": one, "b": one }));
    assert!(why.contains("tensor \"b\" is not in shard"), "{why}");
    for leaves in ["../w.safetensors", "/etc/passwd", "..", "a\u{0}b", "a\nb"] {
        let why = index(json!({ "a": one, "b": leaves }));
        assert!(why.contains("names nothing in this directory"), "{leaves:?}: {why}");
    }
    fs::copy(place.path("Llama").join(one), place.path("Llama").join(two)).unwrap();
    let why = index(json!({ "a": one, "b": two }));
    assert!(why.contains("tensor \"a\" is in shard"), "{why}");
    place.write("Llama/model.safetensors.index.json", b"[]");
    let why = place.refused(&["mount", &place.text("Llama"), &mount]);
    assert!(why.contains("no index of shards"), "{why}");
    place.write("empty/readme.txt", b"nothing");
    assert!(place.refused(&["mount", &place.text("empty"), &mount]).contains("there is no .safetensors"));
}

#[test]
fn what_a_folder_has_that_cannot_be_shown_is_left_out_and_told() {
    let place = Place::new();
    place.write("Llama/w.safetensors", &good());
    place.write("Llama/a\nb.txt", b"text");
    place.write("Llama/config.json", b"{}");
    std::os::unix::fs::symlink("nothing", place.path("Llama/tokenizer.json")).unwrap();
    place.mount(&[]);
    let said = place.said(&["load", &place.text("Llama")]);
    let lines: Vec<_> = said.lines().skip(1).collect();
    let nowhere = "it is a link that leads nowhere: No such file or directory (os error 2)";
    let told = [
        "  a\\nb.txt is left out: its name has control characters".to_owned(),
        format!("  tokenizer.json is left out: {nowhere}"),
    ];
    assert_eq!(lines, told);
    let loaded = place.said(&["load", "--json", "--as", "n", &place.text("Llama")]);
    let loaded: Value = serde_json::from_str(&loaded).unwrap();
    assert_eq!(loaded["left_out"][1], json!({ "file": "tokenizer.json", "why": nowhere }));
    assert_eq!(fs::read_dir(place.model("Llama")).unwrap().count(), 2);
    assert!(place.read("Llama/w.safetensors") == good());
}

#[test]
fn what_a_running_device_cannot_load_leaves_nothing() {
    let place = Place::new();
    let made = place.mount(&[&place.write("w.safetensors", &good())]);
    let tensors = || {
        let api = made["api"].as_str().unwrap();
        place.said(&["tensors", "--json", "--api", api])
    };
    let before = tensors();
    // A name that no tensor may have comes to light when it is made.
    let bad = safetensors(&[
        ("first", "BF16", vec![5000], floats(Format::Bf16, 2, 5000)),
        ("sec\u{1}ond", "BF16", vec![50], floats(Format::Bf16, 3, 50)),
    ]);
    let why = place.refused(&["load", &place.write("bad.safetensors", &bad)]);
    assert!(why.contains("sec\\u{1}ond"), "{why}");
    assert!(tensors() == before && !place.model("bad").exists());
    let own = safetensors(&[(".lamina/manifest", "BF16", vec![50], floats(Format::Bf16, 3, 50))]);
    assert!(place.refused(&["load", &place.write("own.safetensors", &own)]).contains("the device's own"));
    for name in ["", "..", "a/b", "a@b", "a\nb"] {
        let why = place.refused(&["load", "--as", name, &place.text("w.safetensors")]);
        assert!(why.contains("cannot name a model"), "{name:?}: {why}");
    }
    let why = place.refused(&["load", &place.text("w.safetensors")]);
    assert!(why.contains("there is a model \"w\" already"), "{why}");
    assert!(place.refused(&["rm", "other"]).contains("there is no model \"other\""));
    assert_eq!(tensors(), before);
    // The same again, under a name that is free.
    place.write("bad.safetensors", &good());
    place.said(&["load", &place.text("bad.safetensors")]);
    assert!(place.read("bad/bad.safetensors") == good());
}

#[test]
fn a_path_that_is_no_text_is_refused_by_name_and_does_not_matter_beside() {
    let place = Place::new();
    let bad = place.path("").join(OsStr::from_bytes(b"bad\xffdir"));
    for option in ["--mount", "--image", "--run-dir"] {
        let mut command = place.command(&["serve", "--capacity", "16M"]);
        for (other, name) in [("--mount", "m"), ("--run-dir", "sockets")] {
            if other != option {
                command.arg(other).arg(place.path(name));
            }
        }
        let output = command.arg(option).arg(&bad).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{said}");
        assert!(said.contains(&format!("{option} {bad:?}: the path is not in UTF-8")), "{said}");
        assert!(!bad.exists() && !place.path("m").exists() && !place.path("sockets").exists(), "{said}");
    }

    let apart = ["--mount", "true"];
    if !Command::new("unshare").args(apart).status().is_ok_and(|status| status.success()) {
        return lamina_skipped::part("no namespace of mounts can be made here");
    }
    fs::create_dir(&bad).unwrap();
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs none \"$1\" && shift && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(&bad).arg(env!("CARGO_BIN_EXE_lamina"));
    command.args(["serve", "--json", "--capacity", "16M", "--mount", &place.text("m")]);
    command.args(["--run-dir", &place.text("sockets")]).stdout(Stdio::piped());
    let (mut device, mut line) = (command.spawn().unwrap(), String::new());
    BufReader::new(device.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(ready["ready"], true);
    kill(Pid::from_raw(device.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert!(device.wait().unwrap().success());
}
