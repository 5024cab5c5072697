//! From mount to umount: models that come and go, deaths of the worker, images.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lamina_reference::Format;
use nix::sys::signal::{self, SigHandler, Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{Place, bundled, floats, gguf, noise, reference, safetensors, tensor};

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
    let ended: Value = serde_json::from_str(&place.said(&["umount", "--json", &place.text("m")])).unwrap();
    assert_eq!(ended["unmounted"], *place.text("m"));
    assert!(!place.path("m").exists());
    assert!(place.refused(&["umount", &place.text("m")]).contains("nothing that `lamina mount` started"));
    assert_eq!(place.said(&["ls", "--json"]).trim(), "[]");
}

/// Waits until something holds, for a bounded time.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} never comes");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The directories of devices that are mounted, or were.
fn run_dirs(place: &Place) -> Vec<PathBuf> {
    let all = fs::read_dir(place.path("run/lamina/mounts")).into_iter().flatten();
    all.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_mount_is_taken_down_wherever_its_sockets_are_and_says_how_when_they_are_gone() {
    let place = Place::new();
    let m = place.text("m");
    place.mount(&["--capacity", "16M"]);
    let why = place.refused(&["umount", &place.text("m/models")]);
    assert!(why.contains("nothing that `lamina mount` started is mounted on"), "{why}");
    // As cron has it, or whoever comes by `su`.
    let mut command = place.command(&["umount", &m]);
    let output = command.env("XDG_RUNTIME_DIR", place.path("elsewhere")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(!place.path("m").exists() && run_dirs(&place).is_empty());

    let pid = place.mount(&["--capacity", "16M"])["pid"].as_i64().unwrap();
    fs::remove_dir_all(place.path("run/lamina")).unwrap();
    let output = place.lamina(&["umount", &m]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains(&format!("`kill {pid}` ends it")), "{said}");
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGTERM).unwrap();
    eventually("the end of the mount", || !place.path("m").exists());
}

#[test]
fn a_mount_whose_device_was_killed_whole_is_taken_down() {
    let place = Place::new();
    let m = place.text("m");
    let holder = place.mount(&["--capacity", "16M"])["pid"].as_u64().unwrap();
    let worker = worker_of(holder).unwrap();
    // As a control group that has no memory left ends: neither sees the other's death, of which it
    // would start another or take the mount away.
    let tell = |signal| kill(Pid::from_raw(holder.try_into().unwrap()), signal).unwrap();
    tell(Signal::SIGSTOP);
    kill(worker, Signal::SIGKILL).unwrap();
    tell(Signal::SIGKILL);
    // The kernel ends the connection with the last thread, or one waits for the mount to answer it.
    let is_gone = |pid: &u64| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z ") || stat.contains(") X "))
    };
    eventually("their end", || [holder, worker.as_raw().unsigned_abs().into()].iter().all(is_gone));
    let why = place.refused(&["ls", &m]);
    assert!(why.contains("was killed") && why.contains(&format!("`lamina umount {m}`")), "{why}");
    place.said(&["umount", &m]);
    assert_eq!(fs::read_dir(&m).unwrap().count(), 0);
    assert!(run_dirs(&place).is_empty());
    assert!(place.refused(&["umount", &m]).contains("nothing that `lamina mount` started"));
}

#[test]
fn a_log_that_is_cut_goes_on_from_its_beginning() {
    let place = Place::new();
    let holder = place.mount(&["--capacity", "16M"])["pid"].as_u64().unwrap();
    let log = run_dirs(&place).remove(0).join("log");
    let a_worker_dies = || {
        eventually("a worker", || worker_of(holder).is_some());
        let _ = kill(worker_of(holder).unwrap(), Signal::SIGKILL);
        eventually("a line", || fs::read_to_string(&log).unwrap().contains("a new worker answers"));
    };
    a_worker_dies();
    File::options().write(true).truncate(true).open(&log).unwrap();
    a_worker_dies();
    assert!(!fs::read(&log).unwrap().contains(&0));
}

#[test]
fn a_mount_that_fails_leaves_no_directory() {
    let place = Place::new();
    let (image, m) = (place.text("image"), place.text("m"));
    let file = |seed| safetensors(&[("w", "U8", vec![9], noise(seed, 9))]);
    let why = place.refused(&["mount", "--image", &place.write("broken", b"no image"), &m]);
    assert!(why.contains("the device did not start") && why.contains("broken"), "{why}");
    assert_eq!(run_dirs(&place), Vec::<PathBuf>::new());
    place.mount(&["--image", &image, &place.write("w.safetensors", &file(1))]);
    place.said(&["umount", &m]);
    let why = place.refused(&["mount", "--image", &image, &place.write("other/w.safetensors", &file(2)), &m]);
    assert!(why.contains("the image holds a model \"w\" already"), "{why}");
    assert_eq!(run_dirs(&place), Vec::<PathBuf>::new());
}

#[test]
fn a_mount_that_another_is_at_work_on_is_refused_and_left_to_it() {
    let place = Place::new();
    let m = place.text("m");
    place.mount(&["--capacity", "16M"]);
    let run_dir = run_dirs(&place).remove(0);
    place.said(&["umount", &m]);
    fs::create_dir(&run_dir).unwrap();
    fs::set_permissions(&run_dir, Permissions::from_mode(0o700)).unwrap();
    let other = File::open(&run_dir).unwrap();
    other.lock().unwrap();
    let why = place.refused(&["mount", "--capacity", "16M", &m]);
    assert!(why.contains("another `lamina mount`") && why.contains(&m), "{why}");
    assert!(fs::read_dir(&run_dir).unwrap().next().is_none(), "it is the other's");
    drop(other);
    place.mount(&["--capacity", "16M"]);
    // One that is about to be mounted while this one ends keeps the directory, too.
    let other = File::open(&run_dir).unwrap();
    other.lock().unwrap();
    place.said(&["umount", &m]);
    assert!(run_dir.exists());
}

#[test]
fn a_mount_that_fails_leaves_a_log_that_is_longer_than_what_is_shown() {
    let place = Place::new();
    // A name of many lines, which the reason has in it.
    let m = place.text("m\n1\n2\n3\n4\n5\n6");
    place.write("m\n1\n2\n3\n4\n5\n6/file", b"in the way");
    let why = place.refused(&["mount", "--capacity", "16M", &m]);
    let log = run_dirs(&place).remove(0).join("log");
    assert!(why.contains(&format!("its whole log is {}", log.display())), "{why}");
    let log = fs::read_to_string(log).unwrap();
    assert!(!why.contains("the mount point") && log.contains("the mount point"), "{log}");
}

/// A model that takes a while to load.
fn large(place: &Place) -> String {
    const MIB: usize = 1 << 20;
    let file = safetensors(&[("w", "BF16", vec![128 * MIB as u64], noise(1, MIB).repeat(256))]);
    place.write("large.safetensors", &file)
}

/// A command that loads, in a process group of its own, once that is under way, and the worker that
/// does it, which is stopped so that it does not come to its end meanwhile.
fn loading(place: &Place, words: &[&str], holder: impl Fn(&Child) -> u64) -> (Child, Pid) {
    let mut command = place.command(words);
    // SAFETY: between fork and exec one system call is made, and no memory is allocated. No handler
    // of this process is lost: the process is another one.
    unsafe { command.pre_exec(|| Ok(signal::signal(Signal::SIGHUP, SigHandler::SigDfl).map(drop)?)) };
    let mut child = command.process_group(0).stderr(Stdio::piped()).spawn().unwrap();
    while !is_loading(place) {
        assert!(child.try_wait().unwrap().is_none(), "it is large enough to be seen");
    }
    let worker = worker_of(holder(&child)).unwrap();
    kill(worker, Signal::SIGSTOP).unwrap();
    (child, worker)
}

fn is_loading(place: &Place) -> bool {
    let listed: Value = serde_json::from_str(&place.said(&["ls", "--json"])).unwrap();
    listed.as_array().unwrap().iter().any(|device| !device["loading"].is_null())
}

/// Signals the group of a command, has a worker go on that was stopped, and waits for the command's
/// end: what it says.
fn interrupted(child: Child, signal: Signal, worker: Option<Pid>) -> String {
    killpg(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
    if let Some(worker) = worker {
        std::thread::sleep(Duration::from_millis(100));
        kill(worker, Signal::SIGCONT).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_mount_that_is_interrupted_leaves_nothing() {
    let place = Place::new();
    let (large, mount) = (large(&place), place.text("m"));
    let words = ["mount", &large, &mount];
    let nothing_stays = || {
        assert_eq!(place.said(&["ls", "--json"]).trim(), "[]");
        assert!(!place.path("m").exists());
        assert_eq!(run_dirs(&place), Vec::<PathBuf>::new());
    };
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // The device is the command's child.
        let holder = |child: &Child| u64::try_from(worker_of(child.id().into()).unwrap().as_raw()).unwrap();
        let (child, worker) = loading(&place, &words, holder);
        let said = interrupted(child, signal, Some(worker));
        assert!(said.contains("interrupted; nothing is mounted"), "{said}");
        nothing_stays();
    }
    // While it starts, too, and of its image. What runs in the background may ignore SIGINT.
    let image = place.text("image");
    for delay in [0, 10, 20, 40, 80] {
        let mut command = place.command(&[&words[..], &["--image", &image]].concat());
        let child = command.process_group(0).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        interrupted(child, Signal::SIGTERM, None);
        nothing_stays();
        assert!(!Path::new(&image).exists());
    }
}

#[test]
fn a_load_ends_with_who_asked_for_it() {
    let place = Place::new();
    let small = safetensors(&[("w", "BF16", vec![9000], floats(Format::Bf16, 1, 9000))]);
    let small_path = place.write("w.safetensors", &small);
    let mounted = place.mount(&[&small_path]);
    let words = ["load", "--as", "other", "--in", &place.text("m"), &large(&place)];
    let (child, worker) = loading(&place, &words, |_| mounted["pid"].as_u64().unwrap());
    interrupted(child, Signal::SIGTERM, Some(worker));
    let ended = Instant::now();
    while is_loading(&place) {
        assert!(ended.elapsed() < Duration::from_secs(10));
    }
    let listed: Value = serde_json::from_str(&place.said(&["ls", "--json"])).unwrap();
    assert_eq!(listed[0]["models"].as_array().unwrap().len(), 1, "{listed}");
    place.said(&["load", "--as", "other", "--in", &place.text("m"), &small_path]);
    assert!(place.read("other/w.safetensors") == small && place.read("w/w.safetensors") == small);
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
fn what_is_mounted_on_an_image_again_is_what_it_holds_or_is_refused() {
    let place = Place::new();
    let (image, m) = (place.text("image"), place.text("m"));
    let file = |seed, count: usize| safetensors(&[("w", "BF16", vec![count as u64], noise(seed, 2 * count))]);
    let first = file(1, 4096);
    let a = place.write("a/w.safetensors", &first);
    let again = |model: &str| {
        place.mount(&["--image", &image, model]);
        assert!(place.read("w/w.safetensors") == first, "{model}");
        place.said(&["umount", &m]);
    };
    let refused = |model: &str, more: &[&str]| {
        let why = place.refused(&[&["mount", "--image", &image, model, &m][..], more].concat());
        assert!(why.contains("the image holds a model \"w\" already"), "{why}");
        assert!(!place.path("m/models").exists() && place.path("image").exists(), "{why}");
        why
    };
    again(&a);
    again(&a);
    again(&place.write("copy/w.safetensors", &first));
    for (name, other) in [("same/w.safetensors", file(2, 4096)), ("long/w.safetensors", file(1, 8192))] {
        let other = place.write(name, &other);
        let why = refused(&other, &[]);
        assert!(why.contains(&other) && why.contains(&place.text("copy/w.safetensors")), "{why}");
    }
    let gguf = place.write("w.gguf", &gguf(&[("w", 0, vec![8], noise(1, 32))]));
    assert!(refused(&gguf, &[]).contains("w.gguf is not of it"));
    let map = place.write("m.toml", b"[[tensor]]\nname = \"w\"\nview = \"e8m3\"\n");
    assert!(refused(&a, &["--map", &format!("small={map}")]).contains("this map small"));
    assert!(refused(&a, &["--views", "full,e8m3"]).contains("e8m3 is not among the views"));
    assert!(refused(&a, &["--base", "w=x"]).contains("the difference to x"));
    again(&a);

    // What it was loaded with may be said again, of each file of a directory too.
    place.write("dir/w.safetensors", &first);
    place.write("dir/config.json", b"{}");
    place.write("dir/empty.txt", b"");
    let (dir, map) = (place.text("dir"), format!("small={map}"));
    let as_loaded = ["--image", &image, "--views", "full,e8m3", "--map", &map, &dir];
    for _ in 0..2 {
        place.mount(&as_loaded);
        assert!(place.read("dir/w.safetensors") == first && place.read("dir/config.json") == b"{}");
        place.said(&["umount", &m]);
    }
    place.write("dir/config.json", b"[]");
    let why = place.refused(&[&["mount"][..], &as_loaded, &[&m]].concat());
    assert!(why.contains("config.json is not") && why.contains("as that was loaded"), "{why}");
    fs::remove_file(place.path("dir/config.json")).unwrap();
    let why = place.refused(&[&["mount"][..], &as_loaded, &[&m]].concat());
    assert!(why.contains("it has config.json, which is not among the files"), "{why}");
}

#[test]
fn what_folders_show_from_the_beginning_is_listed_before_anybody_looks() {
    let place = Place::new();
    let map = place.write("m.toml", b"[[tensor]]\nname = \"*\"\nview = \"e8m2\"\n");
    let file = safetensors(&[("w", "BF16", vec![4096], noise(1, 8192))]);
    place.write("dir/deep/w.safetensors", &file);
    place.mount(&["--views", "e8m3", "--map", &format!("small={map}"), &place.text("dir")]);
    let listed: Value = serde_json::from_str(&place.said(&["ls", "--json"])).unwrap();
    let views = listed[0]["models"][0]["files"][0]["views"].as_array().unwrap();
    let views: Vec<_> = views.iter().map(|view| view["view"].as_str().unwrap()).collect();
    assert_eq!(views, ["full", "e8m3", "small"], "{listed}");
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

#[test]
fn an_image_without_room_for_files_is_mounted_without_unless_they_were_asked_for() {
    let place = Place::new();
    let (image, m) = (place.text("image"), place.text("m"));
    place.mount(&["--image", &image, "--capacity", "16M"]);
    assert!(!place.path("m/files").exists(), "a capacity leaves no room for files");
    let base = File::options().write(true).open(place.path("m/base")).unwrap();
    base.write_all_at(&noise(3, 16 << 20), 0).unwrap();
    drop(base);
    place.said(&["umount", &m]);

    let why = place.refused(&["mount", "--image", &image, "--files", "64M", &m]);
    assert!(why.contains("nothing is stored, for the log of names"), "{why}");
    assert!(why.contains("--files 0 does without"), "{why}");
    let output = place.lamina(&["mount", "--image", &image, &m]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("has no files/"), "{said}");
    assert!(place.path("m/models").exists() && !place.path("m/files").exists());
}

#[test]
fn a_damaged_log_of_files_is_said_and_not_cleared_and_can_be_given_up() {
    let place = Place::new();
    let (image, m) = (place.text("image"), place.text("m"));
    let with = ["--image", &image, "--capacity", "16M", "--files", "4M"];
    let mounted = place.mount(&with);
    fs::write(place.path("m/files/a"), b"here").unwrap();
    assert!(place.said(&["ls"]).contains("/m/files: 1 files and folders"), "{}", place.said(&["ls"]));
    let api = mounted["api"].as_str().unwrap();
    let run = |words: &[&str]| place.lamina(&[words, &["--api", api]].concat());
    // What is served is not given up by accident.
    let output = run(&["discard", "0", "4096"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("remove files there"), "{said}");
    // While it is served, what it said is known, and it is written anew.
    assert!(run(&["poison", "inject", "4096"]).status.success());
    assert!(run(&["poison", "clear", "4096"]).status.success());
    place.said(&["umount", &m]);
    place.mount(&["--image", &image]);
    assert_eq!(fs::read(place.path("m/files/a")).unwrap(), b"here");

    // Wherever it is now.
    for at in ["4096", "1052672"] {
        assert!(run(&["poison", "inject", at]).status.success());
    }
    place.said(&["umount", &m]);
    let why = place.refused(&["mount", "--image", &image, "--files", "4M", &m]);
    assert!(why.contains("is damaged") && why.contains("--files 0 does without"), "{why}");
    place.mount(&["--image", &image]);
    assert!(place.said(&["ls"]).contains("/m/files is not shown: the log of the files cannot be used"));
    let listed: Value = serde_json::from_str(&place.said(&["ls", "--json"])).unwrap();
    assert!(listed[0]["no_files"].as_str().unwrap().contains("is damaged"), "{listed}");
    let mut given_up = 0;
    for at in ["4096", "1052672"] {
        let output = run(&["poison", "clear", at]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("every name after it"), "{said}");
        // As it says.
        let (_, command) = said.split_once("`lamina discard ").unwrap();
        let (range, _) = command.split_once('`').unwrap();
        let (dpa, bytes) = range.split_once(' ').unwrap();
        assert!(run(&["discard", dpa, bytes]).status.success());
        given_up += 1;
    }
    assert_eq!(given_up, 2);
    place.said(&["umount", &m]);
    place.mount(&["--image", &image]);
    assert_eq!(fs::read_dir(place.path("m/files")).unwrap().count(), 0);
    fs::write(place.path("m/files/b"), b"new").unwrap();
}
