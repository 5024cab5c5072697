//! `--cache-bytes`: how much of the mount's files is in the page cache, and that they stay right.

#![allow(clippy::cast_possible_truncation, reason = "offsets of tests are small")]

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Place, Run, Window, noise, within};

const LIMIT: u64 = 8 << 20;
const PAGE: u64 = 4096;

/// Bytes of a file that the page cache holds, as the kernel says.
fn held(file: &File) -> u64 {
    let (range, mut found) = ([0_u64; 2], [0_u64; 5]);
    // SAFETY: cachestat of a whole file; both pointers are to as many words as the kernel's
    // structures have.
    let result = unsafe { libc::syscall(451, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    assert_eq!(result, 0, "cachestat: {}", std::io::Error::last_os_error());
    (found[0] + found[2]) * PAGE
}

/// Waits until no more than may be is held of some files.
fn until_bounded(files: &[&File]) {
    let began = Instant::now();
    loop {
        let all: u64 = files.iter().map(|file| held(file)).sum();
        if all <= LIMIT {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{all} bytes are held, of {LIMIT} that may be");
        thread::sleep(Duration::from_millis(50));
    }
}

fn report(place: &Place) -> Value {
    place.try_ask("GET", "/stats", &Value::Null).1["page_cache"].clone()
}

#[test]
fn no_more_is_kept_decoded_than_may_be_and_all_of_it_stays_right() {
    within(300, || {
        let place = Place::new();
        let sizes = ["--capacity", "128M", "--views-capacity", "16M", "--views", "", "--files", "48M"];
        let _run = Run::start(place.serve(&sizes).args(["--cache-bytes", "8M"]));
        let (base_path, in_files) = (place.path("mount/base"), place.path("mount/files/large"));
        // Half is written and half is stored through a mapping that stays, in two kinds of files.
        let content = noise(3, 24 << 20);
        fs::write(&in_files, &content).unwrap();
        let mut files = Window::open(&in_files);
        let mut base = Window::open(&base_path);
        let from = 64 << 20;
        base.file.write_all_at(&content[..12 << 20], from).unwrap();
        for at in (12 << 20..24 << 20).step_by(1 << 20) {
            base.store(from + at, &content[at as usize..at as usize + (1 << 20)]);
        }
        until_bounded(&[&base.file, &files.file]);
        // All of it, twice, and what is loaded again is dropped again.
        for _ in 0..2 {
            for at in (0..24 << 20).step_by(1 << 20) {
                let wanted = &content[at as usize..at as usize + (1 << 20)];
                assert!(base.load(from + at, 1 << 20) == wanted && files.load(at, 1 << 20) == wanted, "{at}");
            }
            until_bounded(&[&base.file, &files.file]);
        }
        let seen = report(&place);
        assert_eq!(seen["limit_bytes"], LIMIT);
        assert!(seen["held_bytes"].as_u64() <= Some(LIMIT), "{seen}");
        assert!(seen["dropped_bytes"].as_u64() > Some(64 << 20), "{seen}");
        // Stores through mappings, again and again, while pages go and come.
        let stop = AtomicBool::new(false);
        let rounds = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let bytes = OpenOptions::new().read(true).open(&base_path).unwrap();
                let mut page = vec![0; 1 << 20];
                while !stop.load(Ordering::Relaxed) {
                    for at in (0..24 << 20).step_by(1 << 20) {
                        bytes.read_exact_at(&mut page, from + at).unwrap();
                    }
                }
            });
            let until = Instant::now() + Duration::from_secs(6);
            while Instant::now() < until {
                let round = rounds.fetch_add(1, Ordering::Relaxed) + 1;
                for page in (0..24 << 20).step_by(64 << 10) {
                    let before = base.load(from + page, 8);
                    let wanted = if round == 1 {
                        &content[page as usize..page as usize + 8]
                    } else {
                        &(round - 1).to_le_bytes()
                    };
                    assert_eq!(before, wanted, "round {round}, {page:#x}");
                    base.store(from + page, &round.to_le_bytes());
                    files.store(page, &round.to_le_bytes());
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let rounds = rounds.into_inner();
        assert!(rounds > 1, "{rounds}");
        until_bounded(&[&base.file, &files.file]);
        let mut wanted = content.clone();
        for page in (0..wanted.len()).step_by(64 << 10) {
            wanted[page..page + 8].copy_from_slice(&rounds.to_le_bytes());
        }
        for at in (0..24 << 20).step_by(1 << 20) {
            let wanted = &wanted[at as usize..at as usize + (1 << 20)];
            assert!(base.load(from + at, 1 << 20) == wanted && files.load(at, 1 << 20) == wanted, "{at}");
        }
        // What was removed is not kept open by who looks.
        drop(files);
        fs::remove_file(&in_files).unwrap();
    });
}

#[test]
fn without_a_bound_nothing_is_dropped() {
    within(120, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "64M"]));
        let base = Window::open(&place.path("mount/base"));
        // A system short of memory may drop pages by itself, but hardly every time.
        let stays = (0..5).any(|_| {
            base.file.write_all_at(&noise(4, 16 << 20), 0).unwrap();
            thread::sleep(Duration::from_millis(500));
            held(&base.file) >= 16 << 20
        });
        assert!(stays, "{} bytes are held", held(&base.file));
        assert_eq!(report(&place), Value::Null);
    });
}
