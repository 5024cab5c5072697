//! From mount to umount: models that come and go, deaths of the worker, images.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lamina_reference::Format;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{Place, bundled, floats, noise, reference, safetensors, tensor};

#[test]
fn models_are_loaded_listed_and_removed_and_umount_leaves_nothing() {
    let place = Place::new();
    let one = safetensors(&[("w", "BF16", vec![9000], floats(Format::Bf16, 1, 9000))]);
    let other = safetensors(&[("w", "BF16", vec![9000], floats(Format::Bf16, 2, 9000))]);
    place.mount(&[&place.write("w.safetensors", &one)]);
    let said = place.said(&[
        "load",
        "--as",
        "other",
        "--in",
        &place.text("m"),
        &place.write("w2.safetensors", &other),
    ]);
    assert!(said.contains("models/other"), "{said}");
    assert!(place.read("w/w.safetensors") == one && place.read("other/w2.safetensors") == other);
    assert!(place.read("other/w2@e8m1.safetensors").len() == other.len());
    let listed: Value = serde_json::from_str(&place.said(&["ls", "--json"])).unwrap();
    assert_eq!(listed[0]["models"].as_array().unwrap().len(), 2);
    let files = &listed[0]["models"][0]["files"][0];
    assert_eq!((&files["path"], &files["bytes"]), (&"w2.safetensors".into(), &other.len().into()));
    assert_eq!(files["views"][1]["view"], "e8m1");
    assert!(place.said(&["ls", &place.text("m")]).contains("w2.safetensors"));
    let open = File::open(place.model("other/w2.safetensors")).unwrap();
    place.said(&["rm", "other"]);
    let gone = Instant::now();
    while place.model("other/w2.safetensors").exists() {
        assert!(gone.elapsed() < Duration::from_secs(10));
    }
    // Who has it open is told, and never sees another model's bytes.
    place.said(&["load", "--as", "other", &place.text("w.safetensors")]);
    let mut bytes = vec![0; 100];
    assert_eq!(open.read_exact_at(&mut bytes, 0).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    assert!(place.read("other/w.safetensors") == one);
    drop(open);
    place.said(&["umount", &place.text("m")]);
    assert!(!place.path("m").exists());
    assert!(place.refused(&["umount", &place.text("m")]).contains("nothing that `lamina mount` started"));
    assert_eq!(place.said(&["ls", "--json"]).trim(), "[]");
}

/// The process that does the work of a holder.
pub(crate) fn worker_of(holder: u64) -> Option<Pid> {
    fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let (state, parent) = (fields.next()?, fields.next()?);
        (state != "Z" && parent.parse() == Ok(holder)).then(|| Pid::from_raw(pid))
    })
}

#[test]
fn readers_of_a_precision_notice_nothing_of_a_workers_death() {
    let place = Place::new();
    let bytes = floats(Format::Bf16, 1, 2 << 20);
    let file = safetensors(&[("w", "BF16", vec![2 << 20], bytes.clone())]);
    let made = place.mount(&[&place.write("w.safetensors", &file)]);
    let expected = reference(Format::Bf16, "e8m3", &bytes).unwrap();
    let start = (file.len() - expected.len()) as u64;
    let open = File::open(place.model("w/w@e8m3.safetensors")).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut rounds, mut part) = (0_u32, vec![0; 1 << 20]);
            while !stop.load(Ordering::Relaxed) {
                for at in (0..expected.len()).step_by(part.len()) {
                    open.read_exact_at(&mut part, start + at as u64).unwrap();
                    assert!(part == expected[at..at + part.len()], "at {at}");
                }
                // Past the page cache, to the device.
                rustix::fs::fadvise(&open, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                rounds += 1;
            }
            rounds
        });
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(200));
            if let Some(worker) = worker_of(made["pid"].as_u64().unwrap()) {
                kill(worker, Signal::SIGKILL).unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    // What was asked for before is found by its name, too.
    assert!(tensor(&place.read("w/w@e8m3.safetensors"), "w") == expected);
    assert!(place.read("w/w.safetensors") == file);
}

#[test]
fn an_image_keeps_the_models_it_was_given() {
    let place = Place::new();
    let image = place.text("image");
    place.mount(&["--image", &image, "--views", "e8m3", bundled().to_str().unwrap()]);
    let shown = place.read("stories260K-bf16/stories260K-bf16@e8m3.safetensors");
    place.said(&["umount", &place.text("m")]);
    place.mount(&["--image", &image]);
    assert!(place.read("stories260K-bf16/stories260K-bf16.safetensors") == fs::read(bundled()).unwrap());
    assert!(place.read("stories260K-bf16/stories260K-bf16@e8m3.safetensors") == shown);
    place.said(&["rm", "stories260K-bf16"]);
    place.said(&["umount", &place.text("m")]);
    place.mount(&[
        "--image",
        &image,
        &place.write("w.safetensors", &safetensors(&[("w", "U8", vec![9], noise(1, 9))])),
    ]);
    assert_eq!(fs::read_dir(place.path("m/models")).unwrap().count(), 1);
}

#[test]
fn a_store_into_the_window_is_seen_by_who_opens_the_file_then() {
    let place = Place::new();
    let file = safetensors(&[("w", "U8", vec![8192], noise(1, 8192))]);
    let made = place.mount(&[&place.write("w.safetensors", &file)]);
    assert!(place.read("w/w.safetensors") == file);
    let api = made["api"].as_str().unwrap();
    let tensors: Value = serde_json::from_str(&place.said(&["tensors", "--json", "--api", api])).unwrap();
    let dpa = tensors[0]["dpa"].as_u64().unwrap();
    let base = fs::OpenOptions::new().write(true).open(place.path("m/base")).unwrap();
    base.write_all_at(b"changed", dpa).unwrap();
    let now = place.read("w/w.safetensors");
    assert_eq!(&tensor(&now, "w")[..7], b"changed");
    assert!(now[now.len() - 8000..] == file[file.len() - 8000..]);
}
