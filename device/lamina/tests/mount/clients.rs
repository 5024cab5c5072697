//! Client commands of a device that is mounted: they need not be told which, if it is the only one.

use std::fs;

use lamina_reference::Format;
use serde_json::Value;

use crate::common::{Place, floats, safetensors};

fn model(seed: u64) -> Vec<u8> {
    safetensors(&[("w", "BF16", vec![9000], floats(Format::Bf16, seed, 9000))])
}

#[test]
fn the_only_device_that_is_mounted_need_not_be_named() {
    let place = Place::new();
    let (base, mut tuned) = (model(1), model(1));
    *tuned.last_mut().unwrap() ^= 1;
    let base_path = place.write("base.safetensors", &base);
    let nobody = place.lamina(&["tensors"]);
    let said = String::from_utf8(nobody.stderr).unwrap();
    assert!(nobody.status.code() == Some(3) && said.contains("`lamina ls` shows what is mounted"), "{said}");
    let tuned_path = place.write("tuned.safetensors", &tuned);
    let mounted = place.mount(&[&base_path, &tuned_path, "--base", "tuned=base"]);
    // What is said of the base is done as it is said.
    let refused = place.refused(&["rm", "base"]);
    let command = refused.split('`').find(|part| part.starts_with("lamina tensor detach")).unwrap();
    place.said(&command.split(' ').skip(1).collect::<Vec<_>>());
    place.said(&["rm", "base"]);
    assert!(place.read("tuned/tuned.safetensors") == tuned);
    for words in [&["stats"][..], &["views"], &["events"], &["poison", "list"], &["top", "--once"]] {
        place.said(words);
    }
    // Of two each is named.
    let other = place.text("other");
    place.said(&["mount", &base_path, &other]);
    let refused = place.refused(&["tensors"]);
    place.said(&["umount", &other]);
    assert!(refused.contains("say which device: --api "), "{refused}");
    assert!(refused.contains(mounted["api"].as_str().unwrap()) && refused.contains(&other), "{refused}");
    place.said(&["tensors"]);
    // A variable that is not set names none.
    let empty = place.refused(&["discard", "tuned/w", "--api", ""]);
    assert!(empty.contains("it is empty; leave --api out"), "{empty}");
}

#[test]
fn the_commands_of_the_document_on_operation_run() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operation.md");
    let document = fs::read_to_string(document).unwrap();
    let (_, section) = document.split_once("## Tensors and views while it runs\n\n").unwrap();
    let place = Place::new();
    place.mount(&["--capacity", "1G"]);
    let commands: Vec<_> = section.lines().map_while(|line| line.strip_prefix("    lamina ")).collect();
    assert!(commands.len() > 5, "{commands:?}");
    for command in commands {
        place.said(&command.split(' ').collect::<Vec<_>>());
    }
}

#[test]
fn tensors_are_as_they_were_asked_for() {
    let place = Place::new();
    place.mount(&["--capacity", "256M"]);
    let add = |words: &[&str]| -> Value {
        serde_json::from_str(&place.said(&[&["tensor", "add", "--json"], words].concat())).unwrap()
    };
    let lossy = ["--length", "1M", "--format", "bf16", "--kv", "64,128,lossy=packkv:0.1"];
    assert_eq!(add(&[&["kv"], &lossy[..]].concat())["layout"]["kind"], "lossy_kv");
    let twice = [&["tensor", "add", "twice"], &lossy[..], &["--lossy", "packkv:0.2"]].concat();
    assert!(place.refused(&twice).contains("its loss is said twice"));
    // Of an odd number of elements half a byte is left.
    for more in [&[][..], &["--length", "8"]] {
        let name = format!("odd{}", more.len());
        let odd = add(&[&[name.as_str(), "--shape", "3x5", "--format", "int4"], more].concat());
        assert_eq!((&odd["elements"], &odd["length"]), (&15.into(), &8.into()), "{odd}");
    }
    let words = ["tensor", "add", "wrong", "--shape", "3x5", "--format", "int4", "--length", "9"];
    assert!(place.refused(&words).contains("15 elements of int4 in 9 bytes"));
}

#[test]
fn a_mount_that_cannot_be_says_why_and_ends_with_the_status_of_that() {
    let place = Place::new();
    let path = place.write("w.safetensors", &model(1));
    let status = |words: &[&str], part: &str| {
        let output = place.lamina(words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(part), "{part}: {said}");
        assert!(!said.contains("another run"), "{said}");
        output.status.code()
    };
    let without = format!("say where to mount {path}: `lamina mount {path} DIR`");
    assert_eq!(status(&["mount", &path], &without), Some(1));
    let directory = place.text("directory");
    fs::create_dir(&directory).unwrap();
    fs::copy(&path, place.path("directory/w.safetensors")).unwrap();
    assert_eq!(status(&["mount", &directory], "DIR"), Some(1));
    // No folder can be made there.
    let nowhere = "cannot use the mount point /proc/nowhere: No such file or directory";
    assert_eq!(status(&["mount", &path, "/proc/nowhere"], nowhere), Some(5));
    place.mount(&[&path]);
    assert_eq!(status(&["mount", &place.text("m")], "is mounted already"), Some(1));
    assert_eq!(status(&["discard", "nope"], "no tensor is called \"nope\""), Some(4));
}
