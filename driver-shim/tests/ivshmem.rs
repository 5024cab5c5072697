//! Windows and mailboxes in PCI devices, against a kernel and a device of plain files.

mod common;

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, symlink},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use common::{WINDOW, Windows};
use lamina_abi::mailbox::*;
use lamina_shim::{Ctl, CtlError, Error, Lamina, OpenOptions, UpOptions, sysfs::Tree, up};
use serde_json::json;

/// A PCI device in the folder of `windows`, whose BAR 2 is a link to this file, and whose registers
/// are memory.
fn device(windows: &Windows, address: &str, identity: &str, bar: &str) -> PathBuf {
    let folder = windows.dir.path().join("sys/bus/pci/devices").join(address);
    fs::create_dir_all(&folder).unwrap();
    let (vendor, device) = identity.split_once(':').unwrap();
    fs::write(folder.join("vendor"), format!("0x{vendor}\n")).unwrap();
    fs::write(folder.join("device"), format!("0x{device}\n")).unwrap();
    fs::write(folder.join("enable"), "0\n").unwrap();
    fs::write(folder.join("resource0"), [0; 256]).unwrap();
    symlink(windows.path(bar), folder.join("resource2")).unwrap();
    folder
}

fn mailbox(windows: &Windows) -> PathBuf {
    let memory = windows.file("mailbox");
    memory.set_len(MAILBOX_BYTES).unwrap();
    memory.write_all_at(&MAILBOX_MAGIC, 0).unwrap();
    memory.write_all_at(&MAILBOX_VERSION.to_le_bytes(), VERSION_AT).unwrap();
    device(windows, "0000:00:12.0", "1af4:1110", "mailbox")
}

fn both(windows: &Windows) {
    device(windows, "0000:00:02.0", "1af4:1041", "views");
    device(windows, "0000:00:10.0", "1af4:1110", "base");
    device(windows, "0000:00:11.0", "1af4:1110", "views");
}

fn options(windows: &Windows) -> OpenOptions {
    OpenOptions { base: None, views: None, ctl: None, ..windows.options() }
}

/// What a device does with its mailbox until it is dropped: answers with what `answer` makes of the
/// request's text.
struct Device(Arc<AtomicBool>);

impl Device {
    fn start(folder: &Path, answer: impl Fn(&str) -> String + Send + 'static) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let open = |name| File::options().read(true).write(true).open(folder.join(name)).unwrap();
        let (memory, registers, ended) = (open("resource2"), open("resource0"), Arc::clone(&over));
        let field = move |memory: &File, at| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, at).unwrap();
            u64::from_le_bytes(bytes)
        };
        thread::spawn(move || {
            let mut last = String::new();
            while !ended.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_micros(100));
                let mut rung = [0; 4];
                registers.read_exact_at(&mut rung, DOORBELL_AT).unwrap();
                let number = field(&memory, REQUEST_NUMBER_AT);
                if u32::from_le_bytes(rung) != RING || number == field(&memory, ANSWER_NUMBER_AT) {
                    continue;
                }
                registers.write_all_at(&[0; 4], DOORBELL_AT).unwrap();
                let length = field(&memory, REQUEST_LENGTH_AT);
                let mut from = 0;
                if length == 0 {
                    from = usize::try_from(field(&memory, REQUEST_FROM_AT)).unwrap();
                } else {
                    let mut text = vec![0; usize::try_from(length).unwrap()];
                    memory.read_exact_at(&mut text, REQUEST_AT).unwrap();
                    last = answer(std::str::from_utf8(&text).unwrap());
                }
                let piece = &last.as_bytes()[from..];
                let piece = &piece[..piece.len().min(usize::try_from(ANSWER_BYTES).unwrap())];
                memory.write_all_at(piece, ANSWER_AT).unwrap();
                for (at, value) in [
                    (ANSWER_LENGTH_AT, piece.len() as u64),
                    (ANSWER_TOTAL_AT, last.len() as u64),
                    (ANSWER_NUMBER_AT, number),
                ] {
                    memory.write_all_at(&value.to_le_bytes(), at).unwrap();
                }
            }
        });
        Self(over)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn windows_are_told_apart_by_what_they_hold() {
    let windows = Windows::new();
    both(&windows);
    mailbox(&windows);
    let attached = up(&windows.options().tree, &UpOptions::default()).unwrap();
    assert_eq!(attached.base.memdev, "0000:00:10.0");
    assert_eq!(attached.views.memdev, "0000:00:11.0");
    assert!(attached.base.bytes == WINDOW && attached.base.node.ends_with("0000:00:10.0/resource2"));
    assert!(!attached.base.created && attached.base.r#use.is_none());
    let enabled = windows.dir.path().join("sys/bus/pci/devices/0000:00:10.0/enable");
    assert_eq!(fs::read_to_string(enabled).unwrap().trim(), "1");
    let lamina = Lamina::open(&options(&windows)).unwrap();
    for (tensor, view) in [("w", "base"), ("w", "e8m3:packed"), ("kv", "full")] {
        let span = lamina.span(tensor, view).unwrap();
        let mut bytes = vec![0; span.len()];
        span.load(0, &mut bytes).unwrap();
        assert!(bytes == windows.expected(tensor, view), "{tensor} {view}");
    }
}

#[test]
fn what_is_no_window_is_said() {
    let windows = Windows::new();
    let tree = windows.options().tree;
    let quick = UpOptions { wait: Duration::from_millis(50), ..UpOptions::default() };
    assert!(matches!(up(&tree, &quick), Err(Error::Memdevs { .. })), "there is nothing");
    device(&windows, "0000:00:10.0", "1af4:1110", "base");
    assert!(matches!(up(&tree, &quick), Err(Error::Directory { .. })), "a base alone");
    device(&windows, "0000:00:0f.0", "1af4:1110", "views");
    let missing = up(&tree, &quick).unwrap_err().to_string();
    assert!(missing.contains("0000:00:0f.0") && missing.contains("base"), "the base comes first: {missing}");
    let ram = up(&tree, &UpOptions { system_ram: true, ..quick }).unwrap_err().to_string();
    assert!(ram.contains("system RAM"), "{ram}");
}

#[test]
fn requests_go_through_the_mailbox() {
    let windows = Windows::new();
    both(&windows);
    let folder = mailbox(&windows);
    let long = "x".repeat(3_000_000);
    let reported = json!({ "ok": true, "stats": long }).to_string();
    let _device = Device::start(&folder, move |request| {
        let request: serde_json::Value = serde_json::from_str(request).unwrap();
        if request == json!({ "op": "flush", "offset": 1, "length": 2 }) {
            r#"{"ok":true}"#.into()
        } else if request == json!({ "op": "stats" }) {
            reported.clone()
        } else {
            r#"{"ok":false,"error":"no such thing"}"#.into()
        }
    });
    let lamina = Lamina::open(&options(&windows)).unwrap();
    for _ in 0..3 {
        lamina.flush(Some((1, 2))).unwrap();
    }
    let mut ctl = lamina.ctl().unwrap();
    assert_eq!(ctl.stats().unwrap()["stats"], long);
    let refused = ctl.create_view("w", "e9m9").unwrap_err();
    assert_eq!(refused.to_string(), "the device refused \"view\": no such thing");
    let large = ctl.create_view(&"y".repeat(70_000), "full").unwrap_err();
    assert!(large.to_string().contains("65536"), "{large}");
    drop(ctl);
    // Several at once take turns.
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| Ctl::open(&folder).unwrap().flush(Some((1, 2))).unwrap());
        }
    });
}

#[test]
fn a_request_that_was_left_behind_is_not_answered_to_the_next() {
    let windows = Windows::new();
    let folder = mailbox(&windows);
    let memory = windows.file("mailbox");
    memory.write_all_at(br#"{"op":"left"}"#, REQUEST_AT).unwrap();
    memory.write_all_at(&13_u64.to_le_bytes(), REQUEST_LENGTH_AT).unwrap();
    memory.write_all_at(&u64::MAX.to_le_bytes(), REQUEST_NUMBER_AT).unwrap();
    let _device = Device::start(&folder, |request| json!({ "ok": true, "to": request }).to_string());
    let reply = Ctl::find(&Tree::at(windows.dir.path(), None)).unwrap().stats().unwrap();
    assert_eq!(reply["to"], r#"{"op":"stats"}"#);
}

#[test]
fn a_device_that_is_silent_or_lies_is_given_up_on() {
    let windows = Windows::new();
    let folder = mailbox(&windows);
    let mut ctl = Ctl::open(&folder).unwrap();
    ctl.set_timeout(Duration::from_millis(50));
    assert!(matches!(ctl.flush(None), Err(CtlError::Timeout { .. })));
    assert!(ctl.failed());
    drop(ctl);
    let memory = windows.file("mailbox");
    for (length, total) in
        [(9, 8), (ANSWER_BYTES + 1, ANSWER_BYTES + 2), (u64::MAX, u64::MAX), (0, 5), (1, u64::MAX)]
    {
        // Every request is answered before it is made.
        let next = |number: u64| memory.write_all_at(&number.to_le_bytes(), ANSWER_NUMBER_AT).unwrap();
        memory.write_all_at(&length.to_le_bytes(), ANSWER_LENGTH_AT).unwrap();
        memory.write_all_at(&total.to_le_bytes(), ANSWER_TOTAL_AT).unwrap();
        memory.write_all_at(&0_u64.to_le_bytes(), REQUEST_NUMBER_AT).unwrap();
        next(0);
        let answering = File::options().write(true).open(windows.path("mailbox")).unwrap();
        let answer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            answering.write_all_at(&1_u64.to_le_bytes(), ANSWER_NUMBER_AT).unwrap();
        });
        let mut ctl = Ctl::open(&folder).unwrap();
        ctl.set_timeout(Duration::from_secs(20));
        let error = ctl.flush(None).unwrap_err();
        assert!(
            matches!(error, CtlError::Io { .. } | CtlError::TooLong { .. }),
            "{length} of {total}: {error}"
        );
        answer.join().unwrap();
    }
    memory.write_all_at(b"something", 0).unwrap();
    let error = Ctl::open(&folder).unwrap_err().to_string();
    assert!(error.contains("no mailbox"), "{error}");
}
