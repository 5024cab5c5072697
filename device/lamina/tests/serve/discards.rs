//! Discards while pages are stored into and written back: each page goes at one moment, newer
//! stores stay, older ones do not come back, and what a discard does not reach is as it was.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::{BOTH, Rig, Window, noise, within};
use crate::pressure::{PAGE, begin_write_back, direct};

/// The pages that are stored into, outside the tensor.
const FIRST: u64 = 4096;
const PAGES: u64 = 512;
const ROUNDS: u64 = 60;

/// A way of discarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Requested,
    Punched,
}

fn punch(file: &File, at: u64, length: u64) -> std::io::Result<()> {
    let (at, length) = (i64::try_from(at).unwrap(), i64::try_from(length).unwrap());
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes no pointers.
    let punched = unsafe { libc::fallocate(file.as_raw_fd(), mode, at, length) };
    if punched == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn discard(rig: &Rig, how: How, file: &File, at: u64, length: u64) {
    match how {
        How::Requested => drop(rig.ask("POST", "/discard", &json!({ "offset": at, "length": length }))),
        How::Punched => punch(file, at, length).unwrap(),
    }
}

fn word(window: &Window, page: u64, word: u64) -> u64 {
    u64::from_ne_bytes(window.load(page * PAGE + word * 8, 8).try_into().unwrap())
}

/// What the threads of a test agree on: the round, and who is through with it.
#[derive(Default)]
struct Rounds {
    begun: AtomicU64,
    /// The last round whose discard has returned.
    ended: AtomicU64,
    through: AtomicU64,
    over: AtomicBool,
}

impl Rounds {
    /// Waits for something that another thread does; not if the test failed.
    fn until(&self, mut holds: impl FnMut() -> bool) -> bool {
        let began = Instant::now();
        while !holds() {
            if self.over.load(Ordering::SeqCst) {
                return false;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "nothing goes on");
            std::hint::spin_loop();
        }
        true
    }
}

/// Ends the others when a thread ends, however it does.
struct Ends<'a>(&'a Rounds);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.over.store(true, Ordering::SeqCst);
        }
    }
}

/// In each round a discard takes every page once; whoever sees that a page is gone stores into it
/// at once, and has it for good, and so has the device.
fn stores_after_a_page_went_stay(how: How, write_back_with: &str) {
    let rig = Rig::new(write_back_with);
    let rounds = Rounds::default();
    let writers = 2_u64;
    let mut first = rig.base();
    for page in FIRST..FIRST + PAGES {
        first.store(page * PAGE, &u64::MAX.to_ne_bytes());
    }
    thread::scope(|scope| {
        for writer in 0..writers {
            let (rounds, mut base) = (&rounds, rig.base());
            scope.spawn(move || {
                let _ends = Ends(rounds);
                let pages: Vec<_> = (FIRST..FIRST + PAGES).filter(|page| page % writers == writer).collect();
                for round in 1..=ROUNDS {
                    if !rounds.until(|| rounds.begun.load(Ordering::SeqCst) >= round) {
                        return;
                    }
                    let mut gone = vec![false; pages.len()];
                    let mut again = true;
                    while again || gone.contains(&false) {
                        // Once more when the discard is over, and then no page may be missing.
                        let ended = rounds.ended.load(Ordering::SeqCst) >= round;
                        again = !ended;
                        for (page, gone) in pages.iter().zip(&mut gone) {
                            let found = word(&base, *page, 0);
                            if *gone && found == 0 && how == How::Punched {
                                // The kernel goes over a hole again until it finds nothing there,
                                // and takes pages that came meanwhile.
                                base.store(page * PAGE, &round.to_ne_bytes());
                                again = true;
                            } else if *gone {
                                assert_eq!(
                                    found, round,
                                    "{how:?}: page {page} lost a newer store in round {round}"
                                );
                            } else if found == 0 {
                                base.store(page * PAGE, &round.to_ne_bytes());
                                *gone = true;
                            } else {
                                assert!(!ended, "{how:?}: page {page} is not discarded in round {round}");
                            }
                        }
                        if rounds.over.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                    rounds.through.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // Who has everything written back all the time.
        let (rounds, base) = (&rounds, rig.base());
        let syncing = scope.spawn(move || {
            while !rounds.over.load(Ordering::SeqCst) {
                begin_write_back(&base, FIRST * PAGE, PAGES * PAGE);
            }
        });
        let _ends = Ends(rounds);
        let file = File::options().read(true).write(true).open(rig.base_path()).unwrap();
        for round in 1..=ROUNDS {
            rounds.begun.store(round, Ordering::SeqCst);
            discard(&rig, how, &file, FIRST * PAGE, PAGES * PAGE);
            rounds.ended.store(round, Ordering::SeqCst);
            if !rounds.until(|| rounds.through.load(Ordering::SeqCst) == round * writers) {
                break;
            }
            rig.flush(FIRST * PAGE, PAGES * PAGE);
            let stored = direct(&rig.base_path(), FIRST * PAGE, usize::try_from(PAGES * PAGE).unwrap());
            for (page, bytes) in stored.chunks_exact(usize::try_from(PAGE).unwrap()).enumerate() {
                let mut expected = vec![0; bytes.len()];
                expected[..8].copy_from_slice(&round.to_ne_bytes());
                assert!(
                    bytes == expected,
                    "{how:?}: the device has something else of page {page} in round {round}"
                );
            }
        }
        rounds.over.store(true, Ordering::SeqCst);
        syncing.join().unwrap();
    });
    drop(first);
}

#[test]
fn stores_after_a_page_was_discarded_stay() {
    for write_back_with in BOTH {
        within(300, move || stores_after_a_page_went_stay(How::Requested, write_back_with));
    }
}

#[test]
fn stores_after_a_page_was_punched_stay() {
    for write_back_with in BOTH {
        within(300, move || stores_after_a_page_went_stay(How::Punched, write_back_with));
    }
}

/// Stores into a page all the time do not bring back what the rest of it held.
fn nothing_comes_back(how: How) {
    let rig = Rig::new("auto");
    let rounds = Rounds::default();
    let failed = Mutex::new(());
    let mut base = rig.base();
    thread::scope(|scope| {
        let (rounds, mut storing) = (&rounds, rig.base());
        scope.spawn(move || {
            for count in 1_u64.. {
                for page in FIRST..FIRST + 16 {
                    storing.store(page * PAGE + 8, &count.to_ne_bytes());
                }
                if rounds.over.load(Ordering::SeqCst) {
                    return;
                }
            }
        });
        let syncing = rig.base();
        scope.spawn(move || {
            while !rounds.over.load(Ordering::SeqCst) {
                begin_write_back(&syncing, FIRST * PAGE, 16 * PAGE);
            }
        });
        let _ends = Ends(rounds);
        let _failed = failed.lock();
        let file = File::options().read(true).write(true).open(rig.base_path()).unwrap();
        for round in 0..200 {
            for page in FIRST..FIRST + 16 {
                base.store(page * PAGE + 16, &noise(round, 4080));
            }
            discard(&rig, how, &file, FIRST * PAGE, 16 * PAGE);
            for page in FIRST..FIRST + 16 {
                let found = base.load(page * PAGE + 16, 4080);
                if found.iter().any(|byte| *byte != 0) {
                    rounds.over.store(true, Ordering::SeqCst);
                    panic!("{how:?}: what page {page} held came back in round {round}");
                }
            }
        }
        rounds.over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn what_was_discarded_does_not_come_back_with_stores_beside_it() {
    within(300, || nothing_comes_back(How::Requested));
}

#[test]
fn what_was_punched_does_not_come_back_with_stores_beside_it() {
    within(300, || nothing_comes_back(How::Punched));
}

#[test]
fn a_discard_that_fails_takes_nothing_of_what_it_did_not_reach() {
    within(60, || {
        let rig = Arc::new(Rig::new("auto"));
        let mut base = rig.base();
        let at = |page: u64| (FIRST + page) * PAGE;
        let bytes = noise(1, 16 * 4096);
        base.store(at(0), &bytes);
        rig.flush(at(0), 16 * PAGE);
        // Of a damaged block no part can be dropped.
        rig.ask("POST", "/poison/inject", &json!({ "offset": at(0), "length": 1 }));
        let newer = noise(2, 15 * 4096);
        base.store(at(1), &newer);
        let length = 15 * PAGE;
        let (status, body) =
            rig.try_ask("POST", "/discard", &json!({ "offset": at(0) + 100, "length": length }));
        assert!(status >= 400, "{body}");
        let why = body["error"].as_str().unwrap();
        assert!(why.contains("the first 0 were dropped"), "{why}");
        let kept = |base: &Window, what: &str| {
            assert!(base.load(at(1), newer.len()) == newer, "{what}");
            rig.flush(at(1), 15 * PAGE);
            assert!(direct(&rig.base_path(), at(1), newer.len()) == newer, "{what}");
        };
        kept(&base, "after a discard");
        base.store(at(1), &newer);
        assert!(punch(&base.file, at(0) + 100, length).is_err());
        kept(&base, "after a hole that failed");

        // At its end, it has dropped what it says, and that shows.
        let end = at(16);
        rig.ask("POST", "/poison/clear", &json!({ "offset": at(0), "length": 1 }));
        rig.ask("POST", "/poison/inject", &json!({ "offset": end, "length": 1 }));
        for how in ["discard", "punch"] {
            base.store(at(0), &bytes);
            base.store(end + PAGE, b"behind it");
            if how == "discard" {
                let requested = json!({ "offset": at(0), "length": 16 * PAGE + 100 });
                let (_, body) = rig.try_ask("POST", "/discard", &requested);
                let why = body["error"].as_str().unwrap();
                assert!(why.contains("the first 65536 were dropped"), "{why}");
            } else {
                assert!(punch(&base.file, at(0), 16 * PAGE + 100).is_err());
            }
            let began = Instant::now();
            // The kernel is told a moment later.
            while base.load(at(0), bytes.len()).iter().any(|byte| *byte != 0) {
                assert!(how == "punch" && began.elapsed() < Duration::from_secs(30), "{how}");
            }
            assert!(direct(&rig.base_path(), at(0), bytes.len()).iter().all(|byte| *byte == 0), "{how}");
            assert_eq!(base.load(end + PAGE, 9), b"behind it", "{how}");
        }
    });
}
