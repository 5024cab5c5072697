//! Workers that die: nobody who maps or reads the windows notices more than a pause.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, PosixFadviseAdvice, fcntl, posix_fadvise};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, TENSOR, Window, eventually, expected, lamina, noise, request, within};

/// The worker of a holder, as soon as there is one that is not dead.
pub(crate) fn worker(holder: u32) -> i32 {
    let started = Instant::now();
    loop {
        let tasks = std::fs::read_dir(format!("/proc/{holder}/task")).unwrap();
        let children =
            tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).ok());
        let children = children.collect::<Vec<_>>().join(" ");
        let lives = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
        };
        if let Some(pid) = children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(lives) {
            return pid;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "no worker is started");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Descriptors that a process has open.
pub(crate) fn descriptors(process: i32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

pub(crate) fn kill_worker(run: &Run) {
    // One that dies by itself meanwhile is as good.
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker(run.child.id())), Signal::SIGKILL);
}

pub(crate) fn deaths(rig: &Rig) -> u64 {
    rig.ask("GET", "/stats", &Value::Null)["device"]["worker_deaths"].as_u64().unwrap()
}

/// Drops what the page cache holds of a file, but what is dirty or mapped.
fn forget(window: &Window) {
    posix_fadvise(window.file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

/// Fails where the bytes differ, without printing them all.
fn same(what: &str, found: &[u8], wanted: &[u8]) {
    let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    assert_eq!((found.len(), differs), (wanted.len(), None), "{what}");
}

#[test]
fn killing_workers_again_and_again_changes_no_byte_and_fails_no_access() {
    within(120, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let tail = (TENSOR as u64).next_multiple_of(1 << 20);
        let done = AtomicBool::new(false);
        let (longest, passes) = thread::scope(|scope| {
            // Stores of its own in memory that no tensor covers, through a mapping and by `pwrite`.
            let writer = scope.spawn(|| {
                let mut window = rig.base();
                let mut model = vec![0; 4 << 20];
                let mut round = 0_u64;
                while !done.load(Ordering::Relaxed) {
                    round += 1;
                    let bytes = noise(round, 9000);
                    let at = usize::try_from(round * 7919 % (model.len() as u64 - 9000)).unwrap();
                    model[at..at + bytes.len()].copy_from_slice(&bytes);
                    if round.is_multiple_of(3) {
                        window.file.write_all_at(&bytes, tail + at as u64).unwrap();
                    } else {
                        window.store(tail + at as u64, &bytes);
                    }
                    if round.is_multiple_of(16) {
                        window.sync();
                        forget(&window);
                        same("read back", &window.read(tail, model.len()), &model);
                    }
                }
                window.sync();
                forget(&window);
                same("read back at the end", &window.read(tail, model.len()), &model);
            });
            // Loads of the tensor and of its view, from the device each time.
            let reader = scope.spawn(|| {
                let (base, views) = (rig.base(), rig.views());
                let shown = expected("e8m3", &rig.bytes);
                let (mut longest, mut passes) = (Duration::ZERO, 0);
                while passes == 0 || !done.load(Ordering::Relaxed) {
                    forget(&base);
                    forget(&views);
                    for at in (0..TENSOR / 2).step_by(64 << 10) {
                        let started = Instant::now();
                        same("the tensor", &base.read(at as u64, 4096), &rig.bytes[at..at + 4096]);
                        let place = view.offset + at as u64;
                        same("the view", &views.read(place, 4096), &shown[at..at + 4096]);
                        longest = longest.max(started.elapsed());
                    }
                    passes += 1;
                }
                (longest, passes)
            });
            for round in 0..25_u64 {
                thread::sleep(Duration::from_millis(20 + round * 13 % 90));
                kill_worker(&rig.run);
            }
            done.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            reader.join().unwrap()
        });
        let deaths = deaths(&rig);
        println!("{deaths} deaths, {passes} passes of the reader, whose longest two reads took {longest:?}");
        assert!(deaths >= 20 && passes > 0, "{deaths} deaths, {passes} passes");
        rig.flush(0, 32 << 20);
        same("the tensor at the end", &rig.base().load(0, TENSOR), &rig.bytes);
    });
}

#[test]
fn stores_that_no_worker_has_seen_yet_survive_its_death() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let (mut base, views) = (rig.base(), rig.views());
        let old = views.load(view.offset, 4096);
        let bytes = noise(3, 8192);
        base.store(0, &bytes);
        kill_worker(&rig.run);
        eventually("a new worker", || rig.try_ask_quietly("/stats"));
        // The view's page was in the cache before; the new worker has the kernel forget it, and
        // computes it from the stores.
        rig.flush(0, 8192);
        let mut all = rig.bytes.clone();
        all[..8192].copy_from_slice(&bytes);
        let found = views.load(view.offset, 4096);
        assert!(found != old);
        same("the view", &found, &expected("e8m3", &all)[..4096]);
    });
}

#[test]
fn counters_tensors_and_views_outlive_workers() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        rig.views().load(view.offset, 4 * 4096);
        let reported = |rig: &Rig| {
            let stats = rig.ask("GET", "/stats", &Value::Null);
            (
                stats["requests"].clone(),
                stats["writes"].clone(),
                stats["views"].clone(),
                stats["blocks"].clone(),
            )
        };
        let before = reported(&rig);
        kill_worker(&rig.run);
        eventually("a new worker", || rig.try_ask_quietly("/stats"));
        assert_eq!(reported(&rig), before);
        assert_eq!(deaths(&rig), 1);
    });
}

#[test]
fn an_upgrade_replaces_the_worker_and_refuses_what_is_no_lamina() {
    within(60, || {
        let rig = Rig::new("auto");
        let old = worker(rig.run.child.id());
        let run = rig.place.text("run");
        let done = lamina(&["upgrade", "--json", "--run-dir", &run]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let new = worker(rig.run.child.id());
        assert_ne!(new, old);
        let ready: Value = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!((&ready["ready"], &ready["worker"]), (&json!(true), &json!(new)));
        same("the tensor", &rig.base().load(0, TENSOR), &rig.bytes);
        assert_eq!(deaths(&rig), 0, "nobody died");
        let refused = lamina(&["upgrade", "/bin/true", "--run-dir", &run]).output().unwrap();
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && why.contains("/bin/true is no lamina"), "{why}");
        // One that says it is a lamina, and dies at work.
        let impostor = rig.place.path("impostor");
        // Written by another process: what this one has open, one that another test starts has open
        // too for a moment, and then it cannot be run.
        let script = "#!/bin/sh\n[ \"$1\" = --version ] && echo lamina 9.9.9\n";
        let write = "printf %s \"$1\" >\"$0\" && chmod 700 \"$0\"";
        let written = Command::new("sh").args(["-c", write]).arg(&impostor).arg(script).status().unwrap();
        assert!(written.success());
        let failed = lamina(&["upgrade", impostor.to_str().unwrap(), "--run-dir", &run]).output().unwrap();
        let why = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && why.contains("the program before goes on"), "{why}");
        forget(&rig.base());
        same("the tensor", &rig.base().read(0, TENSOR), &rig.bytes);
        let nobody = lamina(&["upgrade", "--run-dir", "/nonexistent"]).output().unwrap();
        assert!(String::from_utf8_lossy(&nobody.stderr).contains("--run-dir"));
    });
}

#[test]
fn a_program_that_was_upgraded_to_goes_on_when_its_file_is_gone_or_another() {
    within(60, || {
        let rig = Rig::new("auto");
        let (run, newer) = (rig.place.text("run"), rig.place.text("newer"));
        let shell = |script: &str| {
            let done =
                Command::new("sh").args(["-c", script, &newer]).arg(env!("CARGO_BIN_EXE_lamina")).status();
            assert!(done.unwrap().success(), "{script}");
        };
        shell("cp \"$1\" \"$0\"");
        let done = lamina(&["upgrade", &newer, "--run-dir", &run]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let goes_on = |died: u64| {
            kill_worker(&rig.run);
            eventually("a new worker", || deaths(&rig) == died);
            forget(&rig.base());
            same("the tensor", &rig.base().read(0, TENSOR), &rig.bytes);
        };
        shell("rm \"$0\"");
        goes_on(1);
        shell("printf '#!/bin/sh\\nexit 1\\n' >\"$0\" && chmod 700 \"$0\"");
        goes_on(2);
        // A script is not kept: the program that the device began with is.
        shell("printf '#!/bin/sh\\nexec \"%s\" \"$@\"\\n' \"$1\" >\"$0\"");
        let done = lamina(&["upgrade", &newer, "--run-dir", &run]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        goes_on(3);
        shell("rm \"$0\"");
        goes_on(4);
        let name = std::fs::read_to_string(format!("/proc/{}/comm", worker(rig.run.child.id())));
        assert_eq!(name.unwrap(), "lamina-worker\n");
    });
}

#[test]
fn a_snapshot_has_its_name_when_it_is_whole() {
    within(60, || {
        let rig = Rig::new("auto");
        let (run, file) = (rig.place.text("run"), rig.place.path("snapshot"));
        let name = file.to_str().unwrap();
        let worker = nix::unistd::Pid::from_raw(worker(rig.run.child.id()));
        nix::sys::signal::kill(worker, Signal::SIGSTOP).unwrap();
        let mut saving = lamina(&["snapshot", "save", name, "--run-dir", &run]).spawn().unwrap();
        let opened = format!("/proc/{}/fd", saving.id());
        let is_part = |entry: std::io::Result<std::fs::DirEntry>| {
            let target = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
            let target = target.to_string_lossy().into_owned();
            target.ends_with(" (deleted)") || target.contains("snapshot.part-")
        };
        eventually("its file", || std::fs::read_dir(&opened).unwrap().any(is_part));
        assert!(!file.exists());
        let pid = nix::unistd::Pid::from_raw(saving.id().cast_signed());
        nix::sys::signal::kill(pid, Signal::SIGTERM).unwrap();
        assert!(!saving.wait().unwrap().success());
        nix::sys::signal::kill(worker, Signal::SIGCONT).unwrap();
        assert!(!file.exists());
        // The device has come to the end of what nobody wants any more.
        eventually("another", || {
            lamina(&["snapshot", "save", name, "--run-dir", &run]).output().unwrap().status.success()
        });
        let again = lamina(&["snapshot", "save", name, "--run-dir", &run]).output().unwrap();
        let why = String::from_utf8_lossy(&again.stderr).into_owned();
        assert!(!again.status.success() && why.contains("File exists"), "{why}");
    });
}

#[test]
fn the_next_worker_of_an_image_in_a_file_looks_at_no_entries_but_those_that_changed() {
    within(120, || {
        let log = tempfile::NamedTempFile::new().unwrap();
        let change = |place: &Place, command: &mut Command| {
            let image = place.text("image");
            command.args(["--image", &image, "--sync-seconds", "1"]).env("RUST_LOG", "debug");
        };
        let rig = Rig::prepared_logging(change, log.reopen().unwrap().into());
        let tail = (TENSOR as u64).next_multiple_of(1 << 20);
        let mut model = vec![0; 4 << 20];
        let mut window = rig.base();
        for round in 0..6 {
            let bytes = noise(round, 1 << 20);
            let at = usize::try_from(round % 4).unwrap() << 20;
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            window.store(tail + at as u64, &bytes);
            window.sync();
            // Once a second there is a checkpoint, before or after.
            thread::sleep(Duration::from_millis(400));
            let before = deaths(&rig);
            if round == 2 {
                upgraded(&rig);
            } else {
                kill_worker(&rig.run);
                eventually("a new worker", || rig.try_ask_quietly("/stats") && deaths(&rig) > before);
            }
            forget(&window);
            same("stored", &window.read(tail, model.len()), &model);
        }
        same("the tensor", &rig.base().read(0, TENSOR), &rig.bytes);
        let said = std::fs::read_to_string(log.path()).unwrap();
        let times = |what: &str| said.matches(what).count();
        // On a tmpfs there is no such image, and the ledger lies in it.
        assert_eq!((times("all entries were looked at"), times("what was noted was read")), (1, 6), "{said}");
    });
}

#[test]
fn an_image_holds_everything_after_a_clean_stop_and_after_a_kill_of_everything() {
    within(120, || {
        let place = Place::new();
        let bytes = noise(7, TENSOR);
        let model = place.checkpoint("t", &bytes);
        let image = place.text("image");
        let serve = |more: &[&str]| {
            let arguments =
                ["--capacity", "32M", "--views-capacity", "64M", "--image", &image, "--model", &model];
            Run::start(place.serve(&arguments).args(["--views", "e8m3"]).args(more))
        };
        let base = || Window::open(&place.path("mount/base"));
        let tail = 16_u64 << 20;
        let run = serve(&[]);
        base().store(tail, b"stored and stopped");
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());

        let run = serve(&[]);
        assert_eq!((&run.ready["tensors"], &run.ready["view_count"]), (&json!(1), &json!(1)));
        let mut window = base();
        same("the tensor", &window.load(0, TENSOR), &bytes);
        assert_eq!(window.load(tail, 18), b"stored and stopped");
        window.store(tail, b"flushed and killed");
        window.sync();
        // Holder and worker at once.
        let worker = worker(run.child.id());
        run.signal(Signal::SIGKILL);
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), Signal::SIGKILL);
        drop((window, run));
        Place::let_go(Path::new(&image));

        let run = serve(&[]);
        same("the tensor", &base().load(0, TENSOR), &bytes);
        assert_eq!(base().load(tail, 18), b"flushed and killed");
        // Somebody else cannot have it meanwhile, and it does not change its size.
        let other = Place::new();
        let refused = other.serve(&["--image", &image]).output().unwrap();
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(why.contains("in use by another process"), "{why}");
        drop(run);
        let refused = other.serve(&["--image", &image, "--capacity", "64M"]).output().unwrap();
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(why.contains("keeps its size"), "{why}");
    });
}

#[test]
fn a_snapshot_of_a_running_device_is_another_device() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut base = rig.base();
        base.store(20 << 20, b"not flushed yet");
        let (run, file, image) =
            (rig.place.text("run"), rig.place.text("snapshot"), rig.place.text("restored"));
        let done = |words: &[&str]| -> Value {
            let done = lamina(words).arg("--json").output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            serde_json::from_slice(&done.stdout).unwrap()
        };
        let saved = done(&["snapshot", "save", &file, "--run-dir", &run]);
        assert!(saved["snapshot"] == *file && saved["bytes"].as_u64().unwrap() > 0, "{saved}");
        let again = lamina(&["snapshot", "save", &file, "--run-dir", &run]).output().unwrap();
        assert!(!again.status.success(), "it overwrites nothing");
        base.store(20 << 20, b"after the save.");
        let restored = done(&["snapshot", "restore", &file, &image]);
        assert_eq!(restored, json!({ "snapshot": file, "image": image }));
        let upgraded = done(&["image", "upgrade", &image]);
        assert!(upgraded["image"] == *image && upgraded["before"] == upgraded["version"], "{upgraded}");
        let other = Place::new();
        let run = Run::start(&mut other.serve(&["--image", &image]));
        let restored = Window::open(&other.path("mount/base"));
        same("the tensor", &restored.load(0, TENSOR), &rig.bytes);
        assert_eq!(restored.load(20 << 20, 15), b"not flushed yet");
        drop((restored, run));
    });
}

/// A device of which a request panics while the file says where.
fn faulty() -> (Rig, std::path::PathBuf) {
    let rig = Rig::prepared(|place, command| {
        command.env("LAMINA_FAULT", place.path("fault"));
    });
    let fault = rig.place.path("fault");
    (rig, fault)
}

/// Deaths and panics so far.
fn losses(rig: &Rig) -> (u64, u64) {
    let device = rig.ask("GET", "/stats", &Value::Null)["device"].clone();
    (device["worker_deaths"].as_u64().unwrap(), device["panics"].as_u64().unwrap())
}

fn upgraded(rig: &Rig) {
    let done = lamina(&["upgrade", "--run-dir", &rig.place.text("run")]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Ends a run whose workers all died of panics, but for one that an upgrade ended.
fn died_of_panics(mut rig: Rig, panics: usize) {
    rig.run.signal(Signal::SIGTERM);
    let log = rig.run.log();
    let deaths: Vec<_> = log.lines().filter(|line| line.contains("the worker died")).collect();
    let own = deaths.iter().filter(|line| line.contains("exit status: 101")).count();
    assert_eq!((own, deaths.len()), (panics, panics), "{log}");
}

#[test]
fn a_load_that_kills_each_worker_fails_in_the_end_and_nothing_else_does() {
    within(180, || {
        let (rig, fault) = faulty();
        let base = rig.base();
        std::fs::write(&fault, "read 8192").unwrap();
        let failed = base.file.read_at(&mut [0; 4096], 8192).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(nix::libc::EIO));
        let (deaths, panics) = losses(&rig);
        // The kernel asks again what failed in a batch.
        assert!(deaths >= 2 && panics > deaths, "{deaths} deaths, {panics} panics");
        same("before it", &base.read(0, 4096), &rig.bytes[..4096]);
        same("after it", &base.read(1 << 20, 64 << 10), &rig.bytes[1 << 20..][..64 << 10]);
        assert!(base.file.read_at(&mut [0; 4096], 8192).is_err());
        assert_eq!(losses(&rig).0, deaths, "it is survived");
        std::fs::remove_file(&fault).unwrap();
        upgraded(&rig);
        assert!(losses(&rig).1 > panics);
        same("everything", &base.read(0, TENSOR), &rig.bytes);
        died_of_panics(rig, usize::try_from(deaths).unwrap());
    });
}

#[test]
fn a_write_back_that_kills_each_worker_fails_while_a_thread_of_it_waits_for_that_very_write() {
    within(180, || {
        let (rig, fault) = faulty();
        let mut base = rig.base();
        let at = 20_u64 << 20;
        std::fs::write(&fault, format!("write {at}")).unwrap();
        base.store(at, b"lost");
        base.store(at + 8192, b"kept");
        // The worker that is asked to flush waits for its own write-back when it panics.
        let mut requested = UnixStream::connect(rig.place.path("run/api.sock")).unwrap();
        let range = json!({ "offset": at, "length": 4096 }).to_string();
        requested.write_all(request("POST", "/flush", &range).as_bytes()).unwrap();
        let mut answer = String::new();
        // The connection ends with the worker, in whatever way.
        let _ = requested.read_to_string(&mut answer);
        assert_eq!(answer, "");
        assert_eq!(base.try_sync().unwrap_err().raw_os_error(), Some(nix::libc::EIO));
        let (deaths, panics) = losses(&rig);
        assert!(deaths >= 2 && panics > deaths, "{deaths} deaths, {panics} panics");
        std::fs::remove_file(&fault).unwrap();
        base.store(at, b"anew");
        base.sync();
        upgraded(&rig);
        forget(&base);
        assert_eq!((&base.read(at, 4)[..], &base.read(at + 8192, 4)[..]), (&b"anew"[..], &b"kept"[..]));
        same("the tensor", &base.read(0, TENSOR), &rig.bytes);
        died_of_panics(rig, usize::try_from(deaths).unwrap());
    });
}

#[test]
fn a_log_that_nobody_reads_stops_neither_holder_nor_workers() {
    within(180, || {
        let (reader, mut writer) = std::io::pipe().unwrap();
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        while writer.write(&[b'x'; 4096]).is_ok() {}
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        let place = Place::new();
        let bytes = noise(7, TENSOR);
        let model = place.checkpoint("t", &bytes);
        let mut command = place.serve(&["--capacity", "32M", "--views-capacity", "64M", "--model", &model]);
        let run = Run::start_logging(command.env("RUST_LOG", "trace"), Stdio::from(writer));
        // The command keeps an end of its own.
        drop(command);
        let rig = Rig { run, place, bytes };
        let base = rig.base();
        for round in 1..=4 {
            kill_worker(&rig.run);
            forget(&base);
            same("the tensor", &base.read(0, TENSOR), &rig.bytes);
            eventually("a new worker", || rig.try_ask_quietly("/stats"));
            assert_eq!(deaths(&rig), round);
        }
        upgraded(&rig);
        drop(base);
        let Rig { run, place, .. } = rig;
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
        drop((reader, place));
    });
}

#[test]
fn threads_that_wait_for_the_mount_keep_nothing_open_that_others_wait_for() {
    within(120, || {
        let rig = Rig::new("auto");
        eventually("file tables of their own", || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", worker(rig.run.child.id()))).unwrap();
            let tasks = tasks.map(|task| task.unwrap().path());
            let waits = |comm: &str| comm.starts_with("flusher") || comm.starts_with("fuse-inval");
            let tasks: Vec<_> = tasks
                .filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|c| waits(&c)))
                .collect();
            // Two flushers of base, one of views, and an invalidator of each window and of models.
            tasks.len() == 6
                && tasks.iter().all(|task| {
                    let open = std::fs::read_dir(task.join("fd")).unwrap();
                    let open: Vec<_> =
                        open.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok()).collect();
                    // The standard streams and one file. The life line is a socket.
                    open.len() == 4 && open.iter().all(|file| !file.to_string_lossy().starts_with("socket:"))
                })
        });
    });
}
