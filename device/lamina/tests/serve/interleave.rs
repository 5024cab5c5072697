//! Interleave sets over the mount, promise 6 of `lamina_serve::coherence`, and what is counted of
//! several devices.
//!
//! What a page shows that nobody holds is read with `O_DIRECT`: what else the kernel reads ahead,
//! and so holds, is its own affair.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use lamina_abi::Interleave;
use memmap2::MmapMut;
use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, Window, expected, lamina, noise, within};
use crate::deaths::kill_worker;
use crate::pressure::{begin_write_back, until};

/// Bytes of the tensor `t`, at DPA 0: not a whole number of elements of a stripe.
const TENSOR: usize = (256 << 10) + 6;
/// The same and what follows it, up to a whole stripe.
const REGION: usize = 272 << 10;

/// A device that is an interleave set, with the tensor `t` in it.
fn rig(set: &str, more: &[&str]) -> Rig {
    let place = Place::new();
    let mut bytes = noise(7, TENSOR);
    let model = place.checkpoint("t", &bytes);
    let sizes = ["--capacity", "32M", "--views-capacity", "64M", "--interleave", set];
    let run = Run::start(place.serve(&sizes).args(["--model", &model, "--views", ""]).args(more));
    bytes.resize(REGION, 0);
    Rig { run, place, bytes }
}

fn set_of(text: &str) -> Interleave {
    text.parse().unwrap()
}

fn path(rig: &Rig, target: u32) -> PathBuf {
    rig.place.path(&format!("mount/target{target}"))
}

fn target(rig: &Rig, target: u32) -> Window {
    Window::open(&path(rig, target))
}

/// The first bytes of a target as they should be.
fn dealt(set: Interleave, target: u32, region: &[u8]) -> Vec<u8> {
    let granules = region.chunks(usize::try_from(set.granule()).unwrap());
    granules.skip(target as usize).step_by(set.ways() as usize).flatten().copied().collect()
}

/// The region as its targets show it, loaded or read by whatever `read` does with a target and a
/// length.
fn gathered(set: Interleave, mut read: impl FnMut(u32, usize) -> Vec<u8>) -> Vec<u8> {
    let targets: Vec<_> = (0..set.ways()).map(|target| read(target, REGION / set.ways() as usize)).collect();
    let place = |at: u64| (set.target_of(at), set.before(set.target_of(at), at));
    let byte = |at| {
        let (target, at) = place(at);
        targets[target as usize][usize::try_from(at).unwrap()]
    };
    (0..REGION as u64).map(byte).collect()
}

/// Reads past the page cache.
fn direct(path: &Path, at: u64, length: usize) -> Vec<u8> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let mut bytes = MmapMut::map_anon(length).unwrap();
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes.to_vec()
}

/// Stores into the region through the targets that have the bytes.
fn store_by_targets(rig: &Rig, set: Interleave, at: usize, bytes: &[u8]) {
    let range = at as u64..(at + bytes.len()) as u64;
    for number in 0..set.ways() {
        let mut window = target(rig, number);
        for piece in set.pieces(number, set.target_range(number, &range)) {
            let inside = |at: u64| usize::try_from(at - range.start).unwrap();
            window.store(set.before(number, piece.start), &bytes[inside(piece.start)..inside(piece.end)]);
        }
    }
}

fn same(what: &str, found: &[u8], wanted: &[u8]) {
    let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    assert_eq!((found.len(), differs), (wanted.len(), None), "{what}");
}

#[test]
fn what_is_stored_by_targets_is_read_by_base_and_views_and_the_other_way_round() {
    for (text, with) in [("2x256", "auto"), ("4x4K", "auto"), ("2x8K", "msync")] {
        within(120, move || {
            let mut rig = rig(text, &["--write-back-with", with]);
            let set = set_of(text);
            let (full, packed) = (rig.view("full"), rig.view("e8m2:packed"));
            let (mut base, views) = (rig.base(), rig.views());
            let ready = rig.run.ready["targets"].as_array().unwrap();
            assert_eq!((ready.len(), ready[1].as_str()), (set.ways() as usize, path(&rig, 1).to_str()));
            let check = |rig: &Rig, base: &Window| {
                for number in 0..set.ways() {
                    let wanted = dealt(set, number, &rig.bytes);
                    same(
                        &format!("{text} target {number}"),
                        &target(rig, number).load(0, wanted.len()),
                        &wanted,
                    );
                }
                same("base", &base.load(0, REGION), &rig.bytes);
                same("full", &views.load(full.offset, TENSOR), &rig.bytes[..TENSOR]);
                let wanted = expected("e8m2:packed", &rig.bytes[..TENSOR]);
                same("packed", &views.load(packed.offset, wanted.len()), &wanted);
            };
            check(&rig, &base);
            for round in 0..6_u64 {
                // Everything is in all page caches now. Small and large, at any place, over
                // stripes.
                let length = [9, 700, 20_000][usize::try_from(round % 3).unwrap()];
                let at = usize::try_from(round).unwrap() * 41_003 % (REGION - length);
                let bytes = noise(round + 50, length);
                if round < 3 {
                    store_by_targets(&rig, set, at, &bytes);
                } else {
                    base.store(at as u64, &bytes);
                }
                rig.bytes[at..at + length].copy_from_slice(&bytes);
                rig.flush(at as u64, length as u64);
                check(&rig, &base);
            }
            // By `write` instead of stores.
            target(&rig, 1).file.write_all_at(&noise(90, 5000), 12_288 + 100).unwrap();
            for (place, byte) in set.pieces(1, 12_388..17_388).flatten().zip(noise(90, 5000)) {
                rig.bytes[usize::try_from(place).unwrap()] = byte;
            }
            base.file.write_all_at(&noise(91, 6000), 100_000).unwrap();
            rig.bytes[100_000..106_000].copy_from_slice(&noise(91, 6000));
            rig.flush(0, REGION as u64);
            check(&rig, &base);
        });
    }
}

#[test]
fn what_nobody_holds_includes_stores_that_nobody_flushed() {
    for with in ["auto", "msync"] {
        within(60, move || {
            let mut rig = rig("2x256", &["--write-back-with", with]);
            let set = set_of("2x256");
            let full = rig.view("full");
            for round in 0..8_usize {
                let at = round * 24_576 + 333;
                let bytes = noise(round as u64 + 1, 1000);
                let mut base = rig.base();
                if round % 2 == 0 {
                    store_by_targets(&rig, set, at, &bytes);
                } else {
                    base.store(at as u64, &bytes);
                }
                rig.bytes[at..at + 1000].copy_from_slice(&bytes);
                let page = at / 4096 * 4096;
                let wanted = &rig.bytes[page..page + 8192];
                if round % 2 == 0 {
                    same("base", &direct(&rig.base_path(), page as u64, 8192), wanted);
                } else {
                    for number in 0..2 {
                        let found = direct(&path(&rig, number), page as u64 / 2, 4096);
                        same("target", &found, &dealt(set, number, wanted));
                    }
                }
                let views = rig.place.path("mount/views");
                same("view", &direct(&views, full.offset + page as u64, 8192), wanted);
            }
        });
    }
}

#[test]
fn each_device_of_a_set_is_counted_and_a_block_is_fetched_once_for_all() {
    within(60, || {
        let rig = rig("4x1K", &["--device-bandwidth", "10"]);
        let set = set_of("4x1K");
        let stats = || rig.ask("GET", "/stats", &Value::Null);
        let sum = |stats: &Value, key: &str| {
            let devices = stats["interleave"]["devices"].as_array().unwrap();
            devices.iter().map(|device| device[key].as_u64().unwrap()).sum::<u64>()
        };
        let before = stats();
        assert_eq!(before["interleave"]["by"], "hardware");
        assert_eq!(sum(&before, "written_bytes"), TENSOR as u64, "it was loaded");
        assert_eq!(sum(&before, "stored_bytes_written"), before["writes"]["stored_bytes_written"]);
        for page in (0..REGION as u64).step_by(4096) {
            direct(&rig.base_path(), page, 4096);
        }
        let whole = stats();
        let found = gathered(set, |number, length| {
            let pages = (0..length as u64).step_by(4096);
            pages.flat_map(|page| direct(&path(&rig, number), page, 4096)).collect()
        });
        same("gathered", &found, &rig.bytes);
        let targets = stats();
        let fetched = |from: &Value, to: &Value| {
            let count = |stats: &Value| stats["requests"]["base"]["stored_bytes_fetched"].as_u64().unwrap();
            assert_eq!(sum(to, "stored_bytes_fetched"), count(to), "all that is fetched is some device's");
            count(to) - count(from)
        };
        // The targets were read one after the other: more than a cache of decoded blocks keeps
        // would be fetched again.
        assert_eq!(fetched(&before, &whole), fetched(&whole, &targets));
        for device in targets["interleave"]["devices"].as_array().unwrap() {
            // Noise is stored as it is, so all have the same to do, and the model says so.
            assert_eq!(device["plain_bytes_fetched"], 2 * REGION / 4, "{device}");
            assert!(device["modelled_gbs"].as_f64().unwrap() > 9.9, "{device}");
        }
        assert_eq!(targets["interleave"]["modelled_device_gbs"], 10.0);
        assert!(targets["interleave"]["imbalance"].as_f64().unwrap() < 1.01);
    });
}

#[test]
fn a_discard_takes_what_targets_hold_and_a_dead_worker_loses_nothing_of_it() {
    within(60, || {
        let mut rig = rig("2x256", &[]);
        let set = set_of("2x256");
        store_by_targets(&rig, set, 8192, &noise(1, 16_384));
        rig.ask("POST", "/discard", &json!({ "offset": 12_288, "length": 8192 }));
        rig.bytes[8192..24_576].copy_from_slice(&noise(1, 16_384));
        rig.bytes[12_288..20_480].fill(0);
        let found = gathered(set, |number, length| target(&rig, number).load(0, length));
        same("after a discard", &found, &rig.bytes);
        // Dirty in one target, clean in the other and in base, when nobody knows any more who holds
        // what.
        rig.base().load(0, REGION);
        let mut zero = target(&rig, 0);
        zero.store(40_960, &noise(2, 4096));
        for (place, byte) in set.pieces(0, 40_960..45_056).flatten().zip(noise(2, 4096)) {
            rig.bytes[usize::try_from(place).unwrap()] = byte;
        }
        kill_worker(&rig.run);
        let found = gathered(set, |number, length| target(&rig, number).load(0, length));
        same("after a death", &found, &rig.bytes);
        while !rig.try_ask_quietly("/stats") {
            thread::yield_now();
        }
        rig.flush(0, REGION as u64);
        same("base after a death", &rig.base().load(0, REGION), &rig.bytes);
        // A hole through a target, and a size, are nobody's to make.
        let flags = nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE
            | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
        assert_eq!(nix::fcntl::fallocate(&zero.file, flags, 0, 4096), Err(nix::errno::Errno::EOPNOTSUPP));
        assert!(zero.file.set_len(4096).is_err());
        assert_eq!(zero.file.metadata().unwrap().len(), 16 << 20);
        assert_eq!(zero.file_write_error(16 << 20, b"xx"), Some(libc::ENOSPC));
    });
}

#[test]
fn stores_by_targets_and_base_and_reads_of_all_never_lock_each_other_out() {
    within(120, || {
        let mut rig = rig("2x256", &[]);
        let set = set_of("2x256");
        let full = rig.view("full");
        let half = 128 << 10;
        thread::scope(|scope| {
            let rig = &rig;
            // Each writer has pages of its own, whichever way they are seen.
            for number in 0..2 {
                scope.spawn(move || {
                    let mut window = target(rig, number);
                    for round in 0..300_u64 {
                        let at = round * 7 % 16 * 4096;
                        window.store(at, &noise(at + u64::from(number), 4096));
                    }
                });
            }
            scope.spawn(move || {
                let mut base = rig.base();
                for round in 0..300_u64 {
                    let at = half + round * 7 % 32 * 4096;
                    base.store(at, &noise(at, 4096));
                }
            });
            scope.spawn(move || {
                for round in 0..40 {
                    rig.flush(round * 4096, 64 << 10);
                }
            });
            for reader in 0..2_u64 {
                scope.spawn(move || {
                    for round in 0..200 {
                        let at = (round * 13 + reader) % 64 * 4096;
                        rig.views().load(full.offset + at, 64);
                        rig.base().load(at, 64);
                        target(rig, u32::try_from(round % 2).unwrap()).load(at / 2, 64);
                        direct(&rig.base_path(), at, 4096);
                    }
                });
            }
        });
        rig.flush(0, REGION as u64);
        for number in 0..2 {
            for at in (0..64 << 10).step_by(4096) {
                let pieces = set.pieces(number, at..at + 4096).flatten();
                for (place, byte) in pieces.zip(noise(at + u64::from(number), 4096)) {
                    rig.bytes[usize::try_from(place).unwrap()] = byte;
                }
            }
        }
        for at in (half..2 * half).step_by(4096) {
            let place = usize::try_from(at).unwrap();
            rig.bytes[place..place + 4096].copy_from_slice(&noise(at, 4096));
        }
        same("base", &rig.base().load(0, REGION), &rig.bytes);
        same("view", &rig.views().load(full.offset, TENSOR), &rig.bytes[..TENSOR]);
        same("targets", &gathered(set, |number, length| target(&rig, number).load(0, length)), &rig.bytes);
        rig.run.signal(nix::sys::signal::Signal::SIGTERM);
        let log = rig.run.log();
        assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
    });
}

#[test]
fn a_store_by_a_target_that_finds_no_room_waits_for_it_and_nothing_else_does() {
    within(120, || {
        let rig = rig("2x256", &["--store-capacity", "4M", "--full-wait", "100"]);
        let (base, mut zero) = (rig.base(), target(&rig, 0));
        let mut filled = REGION as u64;
        while base.file_write_error(filled, &noise(filled, 4096)).is_none() {
            filled += 4096;
        }
        // Behind what is filled, in pages that nothing else is stored to.
        let (at, stored) = (filled / 2 + (64 << 10), noise(1, 8 * 4096));
        zero.store(at, &stored);
        begin_write_back(&zero, at, stored.len() as u64);
        let write_backs = || rig.ask("GET", "/stats", &Value::Null)["write_backs"].clone();
        until("a write-back waits", || write_backs()["waiting"].as_u64() > Some(0));
        thread::scope(|scope| {
            let (rig, length) = (&rig, 2 * stored.len() as u64);
            let flushed = scope.spawn(move || rig.flush(2 * at, length));
            assert!(zero.load(at, stored.len()) == stored, "the page cache has it");
            same("base", &direct(&rig.base_path(), 0, REGION), &rig.bytes);
            same("target 1", &target(rig, 1).load(0, 4096), &dealt(set_of("2x256"), 1, &rig.bytes[..8192]));
            rig.flush(0, TENSOR as u64);
            assert!(!flushed.is_finished(), "the flush of what waits waits");
            assert_eq!(write_backs()["refused"], 0);
            rig.ask("POST", "/discard", &json!({ "offset": filled - (256 << 10), "length": 256 << 10 }));
            flushed.join().unwrap();
        });
        assert_eq!((&write_backs()["waiting"], &write_backs()["refused"]), (&json!(0), &json!(0)));
        same("stored", &direct(&path(&rig, 0), at, stored.len()), &stored);
        let region = base.load(2 * at, 2 * stored.len());
        same("by base", &dealt(set_of("2x256"), 0, &region), &stored);
    });
}

#[test]
fn chunks_are_counted_at_the_device_that_has_them() {
    within(60, || {
        let place = Place::new();
        let bytes = noise(3, 6 << 20);
        let model = place.checkpoint("t", &bytes);
        let sizes = ["--capacity", "32M", "--views-capacity", "64M", "--devices", "3"];
        let run = Run::start(place.serve(&sizes).args(["--model", &model, "--views", "full"]));
        let rig = Rig { run, place, bytes };
        assert!(rig.run.ready["targets"].is_null() && !path(&rig, 0).exists());
        // Of device 1 two pages and of device 2 one, and a page of the view on each side of their
        // edge.
        let chunk = 2 << 20;
        direct(&rig.base_path(), chunk, 4096);
        direct(&rig.base_path(), 2 * chunk - 4096, 8192);
        let full = rig.view("full");
        direct(&rig.place.path("mount/views"), full.offset + 2 * chunk - 4096, 8192);
        kill_worker(&rig.run);
        while !rig.try_ask_quietly("/stats") {
            thread::yield_now();
        }
        let stats = rig.ask("GET", "/stats", &Value::Null);
        let reported = &stats["interleave"];
        assert_eq!((&reported["by"], &reported["ways"]), (&json!("software"), &json!(3)));
        let of = |key: &str| -> Vec<u64> {
            reported["devices"]
                .as_array()
                .unwrap()
                .iter()
                .map(|device| device[key].as_u64().unwrap())
                .collect()
        };
        assert_eq!(of("reads"), [0, 3, 2]);
        assert_eq!(of("plain_bytes_fetched"), [0, 3 * 4096, 2 * 4096]);
        assert_eq!(of("written_bytes"), [2 << 20; 3]);
        let fetched = &stats["requests"];
        let all = ["base", "views"].map(|window| fetched[window]["stored_bytes_fetched"].as_u64().unwrap());
        assert_eq!(of("stored_bytes_fetched").iter().sum::<u64>(), all.iter().sum::<u64>());
        assert_eq!(reported["modelled_device_gbs"], 22.5);

        let api = rig.place.text("run/api.sock");
        let text = lamina(&["stats", "--api", &api]).output().unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        assert!(
            text.contains("ways 3, granule 2.00 MiB") && text.contains("modelled device 22.500 GB/s"),
            "{text}"
        );
        let metrics = std::os::unix::net::UnixStream::connect(&api).unwrap();
        let (_, _, metrics) = crate::common::answer(metrics, &crate::common::request("GET", "/metrics", ""));
        assert!(metrics.contains("lamina_interleaved_reads_total{device=\"1\"} 3"), "{metrics}");
        assert!(metrics.contains("lamina_modelled_device_gigabytes_per_second 22.5"), "{metrics}");
    });
}
