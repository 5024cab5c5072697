//! The contract of `lamina_serve::host_cache`, promise by promise, with the kernel's page caches in
//! between.

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::{Value, json};

use crate::common::{Guest, Place, Run, Window, expected, noise, within};
use crate::deaths::kill_worker;

/// Bytes of the region.
pub(crate) const SHARED: usize = 8 << 20;

/// Hosts `h0`, `h1` and so on that share a region.
pub(crate) struct Rig {
    pub(crate) run: Run,
    pub(crate) place: Place,
}

/// One of them.
pub(crate) struct Host {
    pub(crate) base: Window,
    pub(crate) views: Window,
    pub(crate) ctl: Guest,
}

impl Rig {
    pub(crate) fn new(hosts: usize, more: &[&str]) -> Self {
        let place = Place::new();
        let hosts = hosts.to_string();
        let sizes = ["--capacity", "8M", "--views-capacity", "16M", "--views", "full", "--hosts", &hosts];
        let run = Run::start(place.serve(&sizes).args(more));
        Self { run, place }
    }

    pub(crate) fn path(&self, host: usize, window: &str) -> PathBuf {
        PathBuf::from(self.run.ready["guests"][host][window]["path"].as_str().unwrap())
    }

    pub(crate) fn host(&self, host: usize) -> Host {
        Host {
            base: Window::open(&self.path(host, "base")),
            views: Window::open(&self.path(host, "views")),
            ctl: Guest::connect(self.run.ready["guests"][host]["ctl"].as_str().unwrap()),
        }
    }

    /// What a host's cache tells.
    pub(crate) fn reported(&self, host: &mut Host) -> Value {
        assert!(self.place.path("mount/hosts").is_dir());
        host.ctl.ask(&json!({ "op": "stats" }))["stats"]["host"].clone()
    }
}

impl Host {
    fn ask(&mut self, op: &str, at: usize, length: usize) {
        let answer = self.ctl.ask(&json!({ "op": op, "offset": at, "length": length }));
        assert_eq!(answer, json!({ "ok": true }), "{op}");
    }

    pub(crate) fn flush(&mut self, at: usize, length: usize) {
        self.ask("flush", at, length);
    }

    pub(crate) fn invalidate(&mut self, at: usize, length: usize) {
        self.ask("invalidate", at, length);
    }

    pub(crate) fn load(&self, at: usize, length: usize) -> Vec<u8> {
        self.base.load(at as u64, length)
    }

    pub(crate) fn store(&mut self, at: usize, bytes: &[u8]) {
        self.base.store(at as u64, bytes);
    }
}

#[test]
fn each_host_has_its_own_files_of_one_region() {
    within(60, || {
        let rig = Rig::new(3, &[]);
        for host in 0..3 {
            let export = &rig.run.ready["guests"][host];
            assert_eq!((&export["kind"], &export["name"]), (&json!("host"), &json!(format!("h{host}"))));
            assert_eq!(export["base"]["bytes"], SHARED);
            assert!(rig.path(host, "views").ends_with(format!("mount/hosts/h{host}/views")));
        }
        assert!(!rig.place.path("mount/base").exists(), "no other page cache shows it");
    });
}

#[test]
fn a_store_shows_at_another_host_after_a_flush_here_and_an_invalidation_there_and_never_before() {
    within(60, || {
        let rig = Rig::new(2, &[]);
        let (mut one, mut other) = (rig.host(0), rig.host(1));
        assert_eq!(other.load(0, 3 * 4096), vec![0; 3 * 4096]);
        for round in 1..=20 {
            let before = other.load(0, 3 * 4096);
            let message = noise(round, 3 * 4096);
            one.store(0, &message);
            assert!(one.load(0, 3 * 4096) == message, "its own stores, at once");
            // The kernel writes back when it likes. That is no flush.
            one.base.sync();
            other.invalidate(0, 3 * 4096);
            assert!(other.load(0, 3 * 4096) == before, "round {round}: not flushed");
            one.flush(0, 3 * 4096);
            assert!(other.load(0, 3 * 4096) == before, "round {round}: not invalidated");
            other.invalidate(4096, 1);
            let mixed = [&before[..4096], &message[4096..8192], &before[8192..]].concat();
            assert!(other.load(0, 3 * 4096) == mixed, "round {round}: one page invalidated");
            other.invalidate(0, 3 * 4096);
            assert!(other.load(0, 3 * 4096) == message, "round {round}");
        }
        let reported = rig.reported(&mut other);
        assert_eq!(
            (&reported["lines_merged"], &reported["pages_unknown"]),
            (&json!(0), &json!(0)),
            "{reported}"
        );
        assert_eq!(rig.reported(&mut one)["lines_merged"], 20 * 3 * 64);
    });
}

#[test]
fn hosts_that_store_into_different_lines_of_one_page_lose_nothing() {
    within(60, || {
        let rig = Rig::new(3, &[]);
        let mut hosts: Vec<Host> = (0..3).map(|host| rig.host(host)).collect();
        let lines = |host: usize| (0..64).filter(move |line| line % 3 == host);
        // All hold the pages, so that each writes back the others' lines as they were.
        for host in &hosts {
            host.load(0, 2 * 4096);
        }
        for (number, host) in hosts.iter_mut().enumerate() {
            for line in lines(number) {
                for page in 0..2 {
                    host.store(page * 4096 + line * 64, &noise((number * 2 + page) as u64 + 1, 64));
                }
            }
        }
        thread::scope(|scope| {
            for host in &mut hosts {
                scope.spawn(|| host.flush(0, 2 * 4096));
            }
        });
        let mut expected = vec![0; 2 * 4096];
        for number in 0..3 {
            for line in lines(number) {
                for page in 0..2 {
                    let at = page * 4096 + line * 64;
                    expected[at..at + 64].copy_from_slice(&noise((number * 2 + page) as u64 + 1, 64));
                }
            }
        }
        for host in &mut hosts {
            host.invalidate(0, 2 * 4096);
            assert!(host.load(0, 2 * 4096) == expected);
        }
    });
}

#[test]
fn views_show_what_was_flushed_and_stay_until_they_are_invalidated() {
    within(60, || {
        let place = Place::new();
        let bytes = noise(9, 40_000);
        let model = place.checkpoint("t", &bytes);
        let rig = Rig::new(2, &["--model", &model]);
        let (mut one, mut other) = (rig.host(0), rig.host(1));
        let view = one.ctl.ask(&json!({ "op": "view", "tensor": "t", "spelling": "e8m3" }))["view"]["offset"]
            .clone();
        let view = view.as_u64().unwrap();
        let shown = |host: &Host| host.views.load(view, bytes.len());
        // The directory is never stale, whoever changed it.
        let directory = lamina_abi::decode(&other.views.load(0, 2 << 20)).unwrap();
        assert_eq!(directory.view("t", "e8m3").unwrap().offset, view);
        let new = noise(10, 40_000);
        one.store(0, &new);
        assert!(shown(&one) == expected("e8m3", &bytes), "fresh, and its own stores not flushed");
        assert!(shown(&other) == expected("e8m3", &bytes));
        one.flush(0, bytes.len());
        assert!(shown(&one) == expected("e8m3", &new));
        assert!(shown(&other) == expected("e8m3", &bytes), "held");
        other.invalidate(0, bytes.len());
        assert!(shown(&other) == expected("e8m3", &new));
    });
}

#[test]
fn a_cache_smaller_than_what_is_touched_keeps_every_store() {
    within(120, || {
        let rig = Rig::new(2, &["--host-cache", "64K"]);
        let (mut one, mut other) = (rig.host(0), rig.host(1));
        let pages = 1 << 8;
        // Both hosts go through a megabyte, a line of each page, in different orders, at the same
        // time, twice.
        thread::scope(|scope| {
            for (number, host) in [&mut one, &mut other].into_iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..2_u64 {
                        for step in 0..pages {
                            let page = (step * (2 * number + 5) + number * 31) % pages;
                            host.store(page * 4096 + number * 64, &noise(page as u64 + round * 999, 64));
                        }
                    }
                });
            }
        });
        for host in [&mut one, &mut other] {
            let reported = rig.reported(host);
            assert!(reported["pages_evicted"].as_u64().unwrap() > 0, "{reported}");
            assert_eq!(reported["pages_unknown"], 0, "{reported}");
            // As many as were on their way when there was no room left may come on top.
            assert!(reported["held_bytes"].as_u64().unwrap() <= (64 << 10) + (64 << 12), "{reported}");
            host.flush(0, SHARED);
        }
        for host in [&mut one, &mut other] {
            host.invalidate(0, SHARED);
            for page in 0..pages {
                let line = noise(page as u64 + 999, 64);
                let found = host.load(page * 4096, 192);
                assert!(found == [line.clone(), line, vec![0; 64]].concat(), "page {page}");
            }
        }
    });
}

#[test]
fn write_goes_to_the_hosts_cache_and_what_would_pass_it_by_is_refused() {
    within(60, || {
        let rig = Rig::new(2, &[]);
        let (mut one, other) = (rig.host(0), rig.host(1));
        one.base.file.write_all_at(b"written", 5000).unwrap();
        one.base.file.write_all_at(&noise(1, 8192), 8192).unwrap();
        assert_eq!(one.load(5000, 7), b"written");
        assert_eq!(other.load(5000, 7), [0; 7]);
        one.flush(0, SHARED);
        assert_eq!(rig.host(1).load(8192, 64), noise(1, 64), "never held before");
        let path = rig.path(0, "base");
        let direct = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
        assert_eq!(direct.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let flags = nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE
            | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let punched = nix::fcntl::fallocate(&one.base.file, flags, 0, 4096);
        assert_eq!(punched, Err(nix::errno::Errno::EOPNOTSUPP));
    });
}

#[test]
fn readers_writers_flushes_and_invalidations_never_lock_each_other_out() {
    within(120, || {
        let rig = Rig::new(2, &["--host-cache", "128K"]);
        let stop = AtomicBool::new(false);
        let pages = 128;
        thread::scope(|scope| {
            for number in 0..2 {
                let (rig, stop) = (&rig, &stop);
                scope.spawn(move || {
                    let mut host = rig.host(number);
                    for round in 0..2000_usize {
                        let page = round * 7 % pages;
                        host.store(page * 4096 + number * 64, &noise((page + number) as u64, 64));
                    }
                    host.flush(0, SHARED);
                    stop.store(true, Ordering::Relaxed);
                });
                scope.spawn(move || {
                    let mut host = rig.host(number);
                    let mut round = 0;
                    while !stop.load(Ordering::Relaxed) {
                        round += 1;
                        host.invalidate(round * 4096 % (pages * 4096), 16 << 10);
                        host.flush(round * 8192 % (pages * 4096), 64 << 10);
                        host.load(round * 333 % pages * 4096, 4096);
                    }
                });
            }
        });
        let mut host = rig.host(0);
        rig.host(0).flush(0, SHARED);
        rig.host(1).flush(0, SHARED);
        host.invalidate(0, SHARED);
        for page in 0..pages {
            let line = |number: usize| noise((page + number) as u64, 64);
            assert!(host.load(page * 4096, 128) == [line(0), line(1)].concat(), "page {page}");
        }
        assert_eq!(rig.reported(&mut host)["pages_unknown"], 0);
    });
}

#[test]
fn a_host_keeps_what_its_page_cache_holds_when_the_worker_dies() {
    within(60, || {
        let rig = Rig::new(2, &[]);
        let (mut one, mut other) = (rig.host(0), rig.host(1));
        one.store(0, &noise(1, 4096));
        one.flush(0, 4096);
        other.invalidate(0, 4096);
        assert!(other.load(0, 4096) == noise(1, 4096));
        one.store(8192, b"not flushed");
        kill_worker(&rig.run);
        // The sockets are answered by another worker.
        (one.ctl, other.ctl) = (rig.host(0).ctl, rig.host(1).ctl);
        assert_eq!(one.load(8192, 11), b"not flushed");
        assert_eq!(other.load(8192, 11), [0; 11]);
        one.flush(8192, 11);
        other.invalidate(8192, 11);
        assert_eq!(other.load(8192, 11), b"not flushed");
        assert!(one.load(0, 4096) == noise(1, 4096));
    });
}

#[test]
fn a_clean_end_with_stores_that_nobody_flushed_warns_of_nothing() {
    within(60, || {
        let mut rig = Rig::new(1, &[]);
        let mut host = rig.host(0);
        host.store(0, b"kept to the end");
        drop(host);
        rig.run.signal(nix::sys::signal::Signal::SIGTERM);
        let log = rig.run.log();
        assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    });
}
