//! The coherence contract of `lamina_serve::coherence`, promise by promise, for both ways of
//! writing back.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::{BASE, BOTH, Rig, TENSOR, eventually, expected, noise, within};

/// How often a store into the views window was refused.
fn refused_stores(rig: &Rig) -> u64 {
    rig.requests()["refused_view_stores"].as_u64().unwrap()
}

#[test]
fn same_window_reads_are_always_current() {
    within(60, || {
        let rig = Rig::new("auto");
        let (mut one, other) = (rig.base(), rig.base());
        for round in 0..200_u64 {
            let at = round * 4099 % TENSOR as u64;
            let bytes = round.to_le_bytes();
            if round % 2 == 0 {
                one.store(at, &bytes);
            } else {
                one.file.write_all_at(&bytes, at).unwrap();
            }
            assert_eq!(other.load(at, 8), bytes);
            assert_eq!(other.read(at, 8), bytes);
        }
    });
}

#[test]
fn a_fresh_view_page_shows_stores_that_nobody_flushed() {
    for with in BOTH {
        within(60, move || {
            let mut rig = Rig::new(with);
            let view = rig.view("e8m3");
            let (mut base, views) = (rig.base(), rig.views());
            for page in 0..50 {
                let at = page * 4096 + 40;
                let bytes = noise(page as u64 + 1, 16);
                base.store(at as u64, &bytes);
                rig.bytes[at..at + 16].copy_from_slice(&bytes);
                let shown = views.load(view.offset + at as u64, 16);
                assert_eq!(shown, expected("e8m3", &bytes), "page {page} {with}");
            }
            assert!(views.load(view.offset, TENSOR) == rig.expected("e8m3"));
        });
    }
}

#[test]
fn a_cached_view_page_shows_stores_after_a_flush() {
    for with in BOTH {
        within(60, move || {
            let mut rig = Rig::new(with);
            let (full, packed) = (rig.view("full"), rig.view("e8m2:packed"));
            let (mut base, views) = (rig.base(), rig.views());
            for round in 0..20_u64 {
                assert!(views.load(full.offset, TENSOR) == rig.bytes, "round {round} {with}");
                let packed_bytes = rig.expected("e8m2:packed");
                assert!(
                    views.load(packed.offset, packed_bytes.len()) == packed_bytes,
                    "round {round} {with}"
                );
                let at = usize::try_from(round).unwrap() * 200_003 % (TENSOR - 9000);
                let bytes = noise(round + 99, 9000);
                base.store(at as u64, &bytes);
                rig.bytes[at..at + 9000].copy_from_slice(&bytes);
                rig.flush(at as u64, 9000);
            }
            assert!(views.load(full.offset, TENSOR) == rig.bytes);
        });
    }
}

#[test]
fn stores_that_reach_the_device_without_a_flush_show_a_moment_later() {
    within(60, || {
        let mut rig = Rig::new("auto");
        let view = rig.view("full");
        let (mut base, views) = (rig.base(), rig.views());
        assert!(views.load(view.offset, TENSOR) == rig.bytes);
        base.file.write_all_at(b"written", 5000).unwrap();
        rig.bytes[5000..5007].copy_from_slice(b"written");
        eventually("a write shows", || views.load(view.offset, TENSOR) == rig.bytes);
        base.store(9000, b"stored");
        rig.bytes[9000..9006].copy_from_slice(b"stored");
        base.sync();
        eventually("a store synced shows", || views.load(view.offset, TENSOR) == rig.bytes);
    });
}

#[test]
fn a_store_into_a_view_is_counted_dropped_and_hurts_nothing() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let expected = rig.expected("e8m3");
        let (base, mut views) = (rig.base(), rig.views());
        assert!(views.load(view.offset, expected.len()) == expected);
        let directory = views.load(0, 4096);
        for at in [0, view.offset + 10, view.offset + view.length - 3, view.offset + view.length + (1 << 20)]
        {
            views.store(at, b"junk");
        }
        let said = views.try_sync().unwrap_err();
        assert_eq!(said.raw_os_error(), Some(libc::EROFS), "who stored is told");
        views.sync();
        assert_eq!(
            rig.views().file.sync_all().map_err(|why| why.raw_os_error()),
            Ok(()),
            "and nobody who came later"
        );
        eventually("the junk is gone", || {
            views.load(view.offset, expected.len()) == expected && views.load(0, 4096) == directory
        });
        let before = refused_stores(&rig);
        assert!(before >= 4, "{before}");
        assert!(rig.requests()["refused_view_bytes"].as_u64().unwrap() >= 4 * 4096);
        assert!(base.load(0, TENSOR) == rig.bytes);

        let refused = views.file.write_at(b"junk", view.offset).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        eventually("the refused bytes are gone", || views.load(view.offset, expected.len()) == expected);
        assert!(refused_stores(&rig) > before);
    });
}

#[test]
fn after_a_flush_nobody_sees_a_store_into_a_view() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let mut views = rig.views();
        let expected = rig.expected("e8m3");
        views.store(view.offset + 10, b"junk");
        assert_eq!(views.load(view.offset + 10, 4), b"junk", "it is in the page cache");
        rig.flush(0, 1);
        assert!(views.load(view.offset, expected.len()) == expected);
        assert_eq!(refused_stores(&rig), 1);
        // That a store was refused is no failure of the next flush, nor of one that meets a store
        // which the kernel is writing back.
        for round in 0..20 {
            views.store(view.offset + round * 4096, b"junk");
            let (file, at) = (views.file.as_raw_fd(), i64::try_from(view.offset + round * 4096).unwrap());
            // SAFETY: takes no pointers.
            let begun = unsafe { libc::sync_file_range(file, at, 4096, libc::SYNC_FILE_RANGE_WRITE) };
            assert_eq!(begun, 0);
            views.store(view.offset + round * 4096, b"more");
            rig.flush(0, 1);
            assert!(views.load(view.offset, expected.len()) == expected, "round {round}");
        }
    });
}

#[test]
fn what_is_made_and_removed_at_run_time_shows_in_the_directory_at_once() {
    within(60, || {
        let rig = Rig::new("auto");
        let (mut base, views) = (rig.base(), rig.views());
        let directory = || lamina_abi::decode(&views.load(0, 2 << 20)).unwrap();
        assert_eq!((directory().tensors.len(), directory().views.len()), (1, 0));

        // Stored, and still in the page cache when the tensor and its view are made.
        let bytes = noise(3, 10_000);
        base.store(8 << 20, &bytes);
        let tensor = json!({ "name": "late", "dpa": 8 << 20, "length": 10_000, "format": "bf16" });
        rig.ask("POST", "/tensors", &tensor);
        assert!(directory().tensor("late").is_some());
        let view = rig.view_of("late", "e8m3");
        assert_eq!(directory().view("late", "e8m3").map(|view| view.offset), Some(view.offset));
        assert_eq!(views.load(view.offset, 10_000), expected("e8m3", &bytes));

        rig.ask("DELETE", "/tensors/late", &Value::Null);
        assert!(directory().tensor("late").is_none() && directory().views.is_empty());
        assert_eq!(views.load(view.offset, 10_000), vec![0; 10_000]);
        assert_eq!(base.load(8 << 20, 10_000), bytes);
    });
}

#[test]
fn a_flush_past_the_end_is_refused_with_the_bound() {
    within(60, || {
        let rig = Rig::new("auto");
        rig.ask("POST", "/flush", &Value::Null);
        rig.flush(4096, 1);
        for (offset, length) in [(BASE, 1), (0, BASE + 1), (u64::MAX, 2)] {
            let range = json!({ "offset": offset, "length": length });
            let (status, why) = rig.try_ask("POST", "/flush", &range);
            assert_eq!(status, 422, "{range}");
            assert!(why["error"].as_str().unwrap().contains("33554432 bytes"), "{why}");
        }
    });
}

/// Readers of views, writers of base and flushes on the same pages; at the end everything equals
/// the reference.
#[test]
fn readers_of_views_and_writers_of_base_never_lock_each_other_out() {
    for with in BOTH {
        within(120, move || {
            let mut rig = Rig::new(with);
            let spellings = ["full", "e8m3", "e8m3+g2:packed"];
            let views: Vec<_> = spellings.iter().map(|spelling| rig.view(spelling)).collect();
            let stop = AtomicBool::new(false);
            let reads = AtomicU64::new(0);
            let flushes = AtomicU64::new(0);
            let pages = TENSOR / 4096;
            thread::scope(|scope| {
                for reader in 0..6_u64 {
                    let (rig, views, stop, reads) = (&rig, &views, &stop, &reads);
                    scope.spawn(move || {
                        let window = rig.views();
                        let mut state = reader * 77 + 1;
                        while !stop.load(Ordering::Relaxed) {
                            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                            let view = &views[usize::try_from(state >> 40).unwrap() % views.len()];
                            let at = (state >> 20) % (view.length - 4096);
                            window.load(view.offset + at, 64);
                            if reader % 2 == 0 {
                                window.read(view.offset + at / 4096 * 4096, 4096);
                            }
                            reads.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                for writer in 0..2 {
                    let (rig, stop) = (&rig, &stop);
                    scope.spawn(move || {
                        let mut base = rig.base();
                        let mut round = 0_usize;
                        while !stop.load(Ordering::Relaxed) {
                            // The writers' pages are disjoint, what they store is a function of the
                            // page.
                            let page = (round * 7 + writer) % pages / 2 * 2 + writer;
                            let page = page.min(pages - 2 + writer);
                            base.store(page as u64 * 4096, &noise(page as u64 + 1000, 4096));
                            round += 1;
                        }
                    });
                }
                let (rig, stop, flushes) = (&rig, &stop, &flushes);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        rig.flush(0, TENSOR as u64);
                        flushes.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_millis(10));
                    }
                });
                thread::sleep(Duration::from_secs(4));
                stop.store(true, Ordering::Relaxed);
            });
            rig.flush(0, TENSOR as u64);
            rig.bytes = rig.base().load(0, TENSOR);
            let window = rig.views();
            for (spelling, view) in spellings.iter().zip(&views) {
                let expected = rig.expected(spelling);
                assert!(window.load(view.offset, expected.len()) == expected, "{spelling} {with}");
            }
            let changed = (0..pages)
                .filter(|&page| rig.bytes[page * 4096..(page + 1) * 4096] == noise(page as u64 + 1000, 4096));
            assert!(changed.count() > pages / 2, "the writers got through");
            assert!(reads.load(Ordering::Relaxed) > 100 && flushes.load(Ordering::Relaxed) > 3);
            rig.run.signal(nix::sys::signal::Signal::SIGTERM);
            let log = rig.run.log();
            assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
        });
    }
}
