//! Models that are removed while parts of the window where they lie are said to be of a class, and
//! its pages are read, stored into and written back: everybody comes to an end, with one thread
//! that answers the mount, too.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use rustix::fs::{Advice, XattrFlags, fadvise, setxattr};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::common::{BASE, BOTH, Rig, Run, noise};
use crate::pressure::PAGE;

const ROUNDS: u64 = 12;
/// Bytes of the model's only tensor: some steps of a discard.
const BYTES: usize = 8 << 20;
/// How long a test may take: more than ten times what it takes.
const MAX_TIME: Duration = Duration::from_secs(90);

/// Does `test`, and kills the run if that does not come to an end: then it does, for nothing that
/// waits for the kernel can be killed itself.
fn killed_when_stalled(run: &Run, test: impl FnOnce()) {
    let (done, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if ended.recv_timeout(MAX_TIME) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("not over after {} s: a deadlock", MAX_TIME.as_secs());
                run.signal(Signal::SIGKILL);
            }
        });
        // Dropped however the test ends.
        let _done = done;
        test();
    });
}

/// Where the tensor of the model `m` lies.
fn place_of_model(rig: &Rig) -> u64 {
    let tensors = rig.ask("GET", "/tensors", &Value::Null);
    let found = tensors.as_array().unwrap().iter().find(|tensor| tensor["name"] == "m/w");
    found.unwrap()["dpa"].as_u64().unwrap()
}

fn remove_models_while_parts_are_said(threads: &str, write_back_with: &str) {
    let rig = Rig::prepared(|_, command| {
        command.args(["--threads", threads, "--write-back-with", write_back_with]);
    });
    let model = rig.place.checkpoint("w", &noise(3, BYTES));
    let said =
        |text: &str| setxattr(rig.base_path(), "user.lamina.class", text.as_bytes(), XattrFlags::empty());
    let (answered, busy) = (AtomicU64::new(0), AtomicU64::new(0));
    killed_when_stalled(&rig.run, || {
        for round in 0..ROUNDS {
            rig.ask("POST", "/models", &json!({ "path": model, "name": "m" }));
            let dpa = place_of_model(&rig);
            let view = rig.view_of("m/w", "e8m3");
            let (over, begun) = (AtomicBool::new(false), AtomicU64::new(0));
            let goes_on = || !over.load(Ordering::Relaxed);
            let pages = BYTES as u64 / PAGE;
            thread::scope(|scope| {
                for setter in 0..3 {
                    let (said, begun, answered, busy) = (&said, &begun, &answered, &busy);
                    scope.spawn(move || {
                        let from = dpa + setter * (1 << 20);
                        while goes_on() {
                            match said(&format!("{from}+{} bf16", 4 << 20)) {
                                Ok(()) | Err(Errno::EXIST) => answered.fetch_add(1, Ordering::Relaxed),
                                Err(Errno::BUSY) => busy.fetch_add(1, Ordering::Relaxed),
                                Err(why) => panic!("{why}"),
                            };
                            begun.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                scope.spawn(|| {
                    let mut base = rig.base();
                    for at in (0..).map(|step: u64| step * 37 % pages * PAGE).take_while(|_| goes_on()) {
                        base.store(dpa + at + 8, &at.to_le_bytes());
                    }
                });
                scope.spawn(|| {
                    let base = rig.base();
                    for step in (0..).take_while(|_| goes_on()) {
                        base.load(dpa + step * 53 % pages * PAGE, 8);
                    }
                });
                // Pages that the device knows to have given are read again, when what is dirty
                // under them is written back.
                for reader in 0..3 {
                    let (rig, goes_on) = (&rig, &goes_on);
                    scope.spawn(move || {
                        let views = rig.views();
                        for step in (reader..).take_while(|_| goes_on()) {
                            fadvise(&views.file, 0, None, Advice::DontNeed).unwrap();
                            views.read(view.offset + step * 53 % pages * PAGE, 8);
                        }
                    });
                }
                while begun.load(Ordering::Relaxed) < 20 {
                    thread::yield_now();
                }
                let removed = rig.try_ask("DELETE", "/models/m", &Value::Null);
                over.store(true, Ordering::Relaxed);
                assert_eq!(removed.0, 204, "round {round}: {}", removed.1);
            });
            said(&format!("0+{BASE}")).unwrap();
            rig.ask("POST", "/discard", &json!({ "offset": dpa, "length": BYTES }));
            assert_eq!(rig.base().load(dpa, 3 * 4096), vec![0; 3 * 4096]);
        }
    });
    eprintln!("{answered:?} parts were said, {busy:?} in the way of a removal");
}

#[test]
fn a_model_is_removed_while_the_only_thread_of_the_mount_is_told_of_parts_there() {
    for write_back_with in BOTH {
        remove_models_while_parts_are_said("1", write_back_with);
    }
}

#[test]
fn a_model_is_removed_while_parts_there_are_said_to_be_of_a_class() {
    for write_back_with in BOTH {
        remove_models_while_parts_are_said("4", write_back_with);
    }
}
