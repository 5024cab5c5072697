//! Devices that `lamina serve` serves: models are loaded, listed and removed by the mount's
//! directory and by the API.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use lamina_reference::Format;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{Place, floats, reference, safetensors, tensor};

/// A device that is served, until it is dropped.
pub(crate) struct Served {
    process: Child,
    pub(crate) ready: Value,
}

impl Served {
    /// `lamina serve` with these words, mounted on `served`, with its sockets in `sockets`.
    pub(crate) fn new(place: &Place, words: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lamina"));
        command.args(["serve", "--json", "--mount", &place.text("served")]);
        command.args(["--run-dir", &place.text("sockets")]).args(words);
        command.env("XDG_RUNTIME_DIR", place.path("run")).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { process, ready: serde_json::from_str(&line).unwrap() }
    }

    pub(crate) fn stop(&mut self) {
        kill(Pid::from_raw(i32::try_from(self.process.id()).unwrap()), Signal::SIGTERM).unwrap();
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Ok(None) = self.process.try_wait() {
            self.stop();
        }
    }
}

#[test]
fn models_come_and_go_by_the_directory_and_by_the_api_of_a_served_device() {
    let place = Place::new();
    let file = safetensors(&[("w", "BF16", vec![9000], floats(Format::Bf16, 1, 9000))]);
    let path = place.write("w.safetensors", &file);
    let served = Served::new(&place, &["--capacity", "32M", "--tcp", "127.0.0.1:0"]);
    let (mount, socket) = (place.text("served"), place.text("sockets/api.sock"));
    let address = served.ready["tcp"].as_str().unwrap();
    let json = |words: &[&str]| serde_json::from_str::<Value>(&place.said(words)).unwrap();

    let loaded = json(&["load", "--json", "--in", &mount, &path]);
    assert_eq!((&loaded["name"], &loaded["bytes"]), (&"w".into(), &file.len().into()));
    // Anything in the mount says which device it is.
    let said = place.said(&["load", "--as", "two", "--in", &place.text("served/models/w"), &path]);
    assert!(said.starts_with(&format!("{mount}/models/two: ")), "{said}");
    json(&["load", "--json", "--as", "three", "--api", &socket, &path]);
    let said = place.said(&["load", "--as", "four", "--api", address, &path]);
    assert!(said.starts_with(&format!("{mount}/models/four: ")), "{said}");
    for name in ["w", "two", "three", "four"] {
        let shown = std::fs::read(place.path("served/models").join(name).join("w.safetensors"));
        assert!(shown.unwrap() == file, "{name}");
    }
    for words in [["ls", "--json", &mount].as_slice(), &["ls", "--json", "--api", address]] {
        let listed = json(words);
        let names = listed[0]["models"].as_array().unwrap().iter().map(|model| &model["name"]);
        assert_eq!(names.collect::<Vec<_>>(), ["four", "three", "two", "w"]);
        assert_eq!(listed[0]["mounted"], mount.as_str());
    }
    assert_eq!(json(&["rm", "--json", "--in", &mount, "two"])["removed"], "two");
    place.said(&["rm", "--api", &socket, "three"]);
    assert_eq!(json(&["rm", "--json", "--api", &format!("http://{address}/"), "four"])["removed"], "four");
    assert_eq!(std::fs::read_dir(place.path("served/models")).unwrap().count(), 1);

    // What cannot be reached is told with what to do.
    let refused = |words: &[&str], said: &str| {
        let why = place.refused(words);
        assert!(why.contains(said), "{words:?}: {why}");
    };
    refused(&["load", &path], "`lamina mount MODEL… DIR` does that");
    refused(&["load", "--in", &place.text("run"), &path], "no device is mounted on");
    refused(&["ls", &place.text("nothing")], "`lamina ls` lists those that are");
    refused(&["rm", "--api", &place.text("no.sock"), "w"], "is `lamina serve` running");
    refused(&["rm", "--api", "127.0.0.1:1", "w"], "is `lamina serve --tcp 127.0.0.1:1` running?");
    refused(&["rm", "--api", "192.0.2.1:80", "w"], "loopback only");
    refused(&["umount", &mount], "is not from `lamina mount`");
    refused(&["load", "--api", &socket, "--in", &mount, &path], "cannot be used with");
}

#[test]
fn a_device_without_a_mount_or_divided_says_why_it_shows_no_models() {
    let place = Place::new();
    let path = place.write("w.safetensors", &safetensors(&[("w", "U8", vec![9], vec![7; 9])]));
    let divided = Served::new(&place, &["--guest", "a=32M"]);
    let why = place.refused(&["load", "--in", &place.text("served"), &path]);
    assert!(why.contains("divided among guests") && why.contains("lamina mount"), "{why}");
    drop(divided);
    let why = place.refused(&[
        "serve",
        "--mount",
        &place.text("served"),
        "--run-dir",
        &place.text("sockets"),
        "--guest",
        "a=32M",
        "--files",
        "8M",
    ]);
    assert!(why.contains("--files is for a device that is served as a whole"), "{why}");
}

#[test]
fn checkpoints_of_a_served_device_are_shown_as_models_and_nothing_of_that_is_in_the_window() {
    let place = Place::new();
    let bytes = floats(Format::Bf16, 1, 9000);
    let file = safetensors(&[("w", "BF16", vec![9000], bytes.clone()), ("e", "BF16", vec![0], vec![])]);
    let path = place.write("w.safetensors", &file);
    let other = safetensors(&[("x", "F32", vec![700], floats(Format::Fp32, 2, 700))]);
    let other = place.write("other/w.safetensors", &other);
    let image = place.text("image");
    let read = |name: &str| std::fs::read(place.path("served/models").join(name));
    let models = || {
        let mut names: Vec<_> = std::fs::read_dir(place.path("served/models")).unwrap().collect();
        names.sort_by_key(|entry| entry.as_ref().unwrap().file_name());
        names.into_iter().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let e8m3 = reference(Format::Bf16, "e8m3", &bytes).unwrap();
    let with = ["--image", &image, "--views", "full,e8m3"];
    let mut served = Served::new(
        &place,
        &[&with[..], &["--capacity", "64K", "--model", &path, "--model", &other]].concat(),
    );
    // Two that are called the same, a directory that lists what `--views` says, and a window that
    // has room for the tensors only.
    assert_eq!(models(), ["w", "w-2"]);
    assert!(read("w/w.safetensors").unwrap() == file);
    let listed = std::fs::read_dir(place.path("served/models/w")).unwrap();
    assert_eq!(listed.count(), 2);
    assert!(tensor(&read("w/w@e8m3.safetensors").unwrap(), "w") == e8m3);
    assert!(tensor(&read("w-2/w@bf16.safetensors").unwrap(), "x").len() == 1400);
    let stats = place.said(&["stats", "--json", "--api", &place.text("sockets/api.sock")]);
    let stats: Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats["tensors"].as_array().unwrap().len(), 2);
    let mount = place.text("served");
    let why = place.refused(&["load", "--in", &mount, &path]);
    assert!(why.contains("there is a model \"w\" already"), "{why}");
    // By a worker that was not there when they were loaded.
    kill(crate::life::worker_of(served.process.id().into()).unwrap(), Signal::SIGKILL).unwrap();
    assert!(read("w/w.safetensors").unwrap() == file);
    assert!(tensor(&read("w@e8m3.safetensors").unwrap(), "w") == e8m3);
    served.stop();
    // An image knows them without being told.
    let mut served = Served::new(&place, &with);
    assert_eq!(models(), ["w", "w-2"]);
    assert!(read("w/w.safetensors").unwrap() == file);
    place.said(&["rm", "--in", &mount, "w"]);
    assert_eq!(models(), ["w-2"]);
    served.stop();
    let mut served = Served::new(&place, &[&with[..], &["--model", &path]].concat());
    assert_eq!(models(), ["w", "w-2"]);
    assert!(read("w/w.safetensors").unwrap() == file);
    // One that lost a tensor is one no more.
    place.said(&["tensor", "rm", "x", "--api", &place.text("sockets/api.sock")]);
    served.stop();
    let _served = Served::new(&place, &with);
    assert_eq!(models(), ["w"]);
}
