//! `--model` on an `--image` that holds tensors already: what is kept, refused and replaced.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::common::{Place, Run, Window, answer, eventually, lamina, noise, request, within};

const LENGTH: usize = 100_000;

/// A device in an image, and checkpoints for it.
struct Images(Place);

impl Images {
    fn new() -> Self {
        Self(Place::new())
    }

    /// A checkpoint of the tensor `w`, in a file of this name.
    fn checkpoint(&self, file: &str, bytes: &[u8]) -> String {
        let made = self.0.checkpoint("w", bytes);
        fs::rename(made, self.0.path(file)).unwrap();
        self.0.text(file)
    }

    fn command(&self, more: &[&str]) -> std::process::Command {
        let mut command = self.0.serve(&["--capacity", "256M", "--image", &self.0.text("image")]);
        command.args(more);
        command
    }

    fn serve(&self, more: &[&str]) -> Run {
        Run::start(&mut self.command(more))
    }

    /// Serves and stops: what the tensor held.
    fn serves(&self, more: &[&str]) -> Vec<u8> {
        let run = self.serve(more);
        let held = self.tensor();
        self.stop(run);
        held
    }

    fn stop(&self, run: Run) {
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
        Place::let_go(&self.0.path("image"));
    }

    /// Where the tensor is, and its bytes.
    fn place_of(&self) -> (u64, usize) {
        let output = lamina(&["tensors", "--json", "--api", &self.0.text("run/api.sock")]).output().unwrap();
        let tensors: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(tensors.as_array().unwrap().len(), 1, "{tensors}");
        let number = |field: &str| tensors[0][field].as_u64().unwrap();
        (number("dpa"), usize::try_from(number("length")).unwrap())
    }

    fn base(&self) -> Window {
        Window::open(&self.0.path("mount/base"))
    }

    fn tensor(&self) -> Vec<u8> {
        let (dpa, length) = self.place_of();
        self.base().load(dpa, length)
    }

    fn refused(&self, more: &[&str]) -> String {
        let output = self.command(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.stdout.is_empty() && !said.contains("panicked"), "{said}");
        Place::let_go(&self.0.path("image"));
        said
    }
}

#[test]
fn an_image_keeps_its_checkpoint_and_what_was_stored_into_it_until_it_is_replaced_on_purpose() {
    within(120, || {
        let images = Images::new();
        let (bytes, others) = (noise(1, LENGTH), noise(2, LENGTH));
        let (a, b) = (images.checkpoint("a", &bytes), images.checkpoint("b", &others));
        let run = images.serve(&["--model", &a]);
        images.base().store(images.place_of().0 + 10, b"a guest's");
        images.stop(run);
        let mut stored = bytes.clone();
        stored[10..19].copy_from_slice(b"a guest's");

        let copy = images.0.text("copy");
        fs::copy(&a, &copy).unwrap();
        for same in [&a, &copy] {
            assert!(images.serves(&["--model", same]) == stored, "{same}");
        }
        let why = images.refused(&["--model", &b]);
        assert!(why.contains(&b) && why.contains(&copy) && why.contains("--replace"), "{why}");
        assert!(images.serves(&["--model", &a]) == stored);

        // The same path, with another tensor's bytes.
        fs::copy(&b, &copy).unwrap();
        let why = images.refused(&["--model", &copy]);
        assert!(why.contains("--replace"), "{why}");
        assert!(images.serves(&[]) == stored);

        assert!(images.serves(&["--model", &b, "--replace"]) == others);
        let why = images.refused(&["--model", &a]);
        assert!(why.contains(&a) && why.contains(&b), "{why}");
        assert!(images.serves(&["--model", &b]) == others);
        assert!(images.serves(&["--model", &a, "--replace"]) == bytes);
    });
}

#[test]
fn what_changes_nothing_of_a_checkpoint_that_is_there_is_told() {
    within(60, || {
        let images = Images::new();
        let a = images.checkpoint("a", &noise(1, LENGTH));
        images.stop(images.serve(&["--model", &a]));
        let words = ["--model", &a, "--model", &a, "--views", "full,e8m3", "--kv", "nobody=32"];
        let mut run = images.serve(&words);
        run.signal(Signal::SIGTERM);
        let log = run.log();
        assert!(run.end().success());
        for told in ["is named twice", "as --views e8m3 says", "--kv for nobody: no tensor"] {
            assert!(log.contains(told), "{told}: {log}");
        }
        let mut run = images.serve(&["--model", &a]);
        run.signal(Signal::SIGTERM);
        let log = run.log();
        assert!(run.end().success());
        assert!(log.contains("holds") && !log.contains(" says"), "{log}");
        for (option, other, is) in [
            ("--mode", "gcomp", "it is trace"),
            ("--codec", "zstd", "it has tree"),
            ("--open-windows", "7", "it has 64"),
            ("--store-capacity", "1G", "it has 536870912 bytes"),
        ] {
            let why = images.refused(&[option, other]);
            assert!(why.contains(option) && why.contains(is), "{why}");
        }
    });
}

#[test]
fn a_guests_part_keeps_its_checkpoint_too() {
    within(60, || {
        let place = Place::new();
        let (a, b) = (place.text("a"), place.text("b"));
        for (file, seed) in [(&a, 1), (&b, 2)] {
            fs::rename(place.checkpoint("w", &noise(seed, LENGTH)), file).unwrap();
        }
        let serve = |model: &str| {
            let guest = format!("bob=256M,model={model}");
            place.serve(&["--image", &place.text("image"), "--guest", &guest])
        };
        let run = Run::start(&mut serve(&a));
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
        Place::let_go(&place.path("image"));
        let why = String::from_utf8(serve(&b).output().unwrap().stderr).unwrap();
        assert!(why.contains("bob/w") && why.contains(&a) && why.contains(&b), "{why}");
        Place::let_go(&place.path("image"));
        let replaced = Run::start(serve(&b).arg("--replace"));
        let base = Window::open(&place.path("mount/guests/bob/base"));
        assert!(base.load(0, LENGTH) == noise(2, LENGTH));
        drop((base, replaced));
    });
}

#[test]
fn a_checkpoint_whose_loading_was_killed_is_not_served() {
    within(240, || {
        // On a quick machine a small one may be there whole before the kill comes.
        let interrupted = [32, 64, 128, 256].into_iter().any(killed_while_loading);
        assert!(interrupted, "256 MiB were loaded before a kill came");
    });
}

/// Kills a device while it loads so many mebibytes: whether they were not all there yet, and then
/// another checkpoint takes their place unasked.
fn killed_while_loading(megabytes: usize) -> bool {
    let images = Images::new();
    images.stop(images.serve(&["--codec", "zstd"]));
    let (large, small) =
        (images.checkpoint("a", &noise(1, megabytes << 20)), images.checkpoint("b", &noise(2, LENGTH)));
    let mut loading = images.command(&["--model", &large]);
    let mut child = loading.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("a tensor that is being loaded", || loads(&images.0.path("run/api.sock")));
    child.kill().unwrap();
    child.wait().unwrap();
    Place::let_go(&images.0.path("image"));
    let next = images.command(&["--model", &small]).stdout(Stdio::piped()).spawn();
    let mut next = Run { child: next.unwrap(), ready: Value::Null };
    let mut line = String::new();
    BufReader::new(next.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line.is_empty() {
        return false;
    }
    assert!(images.tensor() == noise(2, LENGTH));
    images.stop(next);
    // It is there from then on.
    assert!(images.serves(&["--model", &small]) == noise(2, LENGTH));
    true
}

/// Whether a device that may not be there yet has a tensor.
fn loads(api: &Path) -> bool {
    let Ok(stream) = UnixStream::connect(api) else { return false };
    let (status, _, body) = answer(stream, &request("GET", "/tensors", ""));
    status == 200 && body != "[]"
}
