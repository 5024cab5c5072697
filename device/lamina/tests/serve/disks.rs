//! Disks: what they show, what they refuse, what a hostile guest can do (nothing), and that a
//! server can go and come back.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lamina_device::device::{Device, DeviceConfig};
use lamina_serve::{Control, DiskServer, Shows};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::Value;
use vm_memory::{Bytes, GuestAddress};

use crate::common::{
    Place, Run, TENSOR, Window, answer, eventually, expected, lamina, noise, request, within,
};
use crate::deaths::{descriptors, worker};
use crate::disk_driver::{
    DATA, DISCARD, Driver, FLUSH, GET_ID, IN, IOERR, MEMORY, OK, OUT, Part, QUEUE_SIZE, UNSUPP, UNTOUCHED,
    WRITE_ZEROES,
};

const BASE: u64 = 32 << 20;
const VIEWS: u64 = 64 << 20;
const MARGIN: u64 = 2 << 20;

/// A device with a tensor, served as disks.
struct Rig {
    run: Run,
    place: Place,
    bytes: Vec<u8>,
}

fn serve(place: &Place, model: &str, mount: bool, more: &[&str]) -> Run {
    let (run, disks) = (place.text("run"), place.text("disks"));
    let mut command =
        lamina(&["serve", "--json", "--run-dir", &run, "--vhost-user", &disks, "--model", model]);
    command.args(["--capacity", "32M", "--views-capacity", "64M", "--views", "full,e8m3,e8m3:packed"]);
    if mount {
        command.args(["--mount", &place.text("mount")]);
    }
    Run::start(command.args(more))
}

impl Rig {
    fn new(mount: bool, more: &[&str]) -> Self {
        let place = Place::new();
        let bytes = noise(11, TENSOR);
        let model = place.checkpoint("t", &bytes);
        Self { run: serve(&place, &model, mount, more), place, bytes }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.place.path(&format!("disks/{name}.sock"))
    }

    fn driver(&self, name: &str) -> Driver {
        Driver::connect(&self.socket(name))
    }

    fn ask(&self, path: &str) -> Value {
        let stream = std::os::unix::net::UnixStream::connect(self.place.path("run/api.sock")).unwrap();
        let (status, _, body) = answer(stream, &request("GET", path, ""));
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Where a view begins on the views disk, and its bytes.
    fn view(&self, spelling: &str) -> (u64, usize) {
        let disks = self.ask("/disks");
        let partitions = disks[1]["partitions"].as_array().unwrap();
        let found = partitions.iter().find(|partition| partition["view"] == spelling).unwrap();
        let number = |name: &str| found[name].as_u64().unwrap();
        (number("offset"), usize::try_from(number("length")).unwrap())
    }
}

/// Reads any range of a disk, in requests of at most 1 MiB.
fn read_all(driver: &mut Driver, offset: u64, length: usize) -> Vec<u8> {
    let whole = length.next_multiple_of(512);
    let mut bytes = Vec::new();
    while bytes.len() < whole {
        let part = (whole - bytes.len()).min(1 << 20);
        bytes.extend(driver.read(offset + bytes.len() as u64, part));
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn a_driver_is_told_what_the_disks_are() {
    within(60, || {
        let rig = Rig::new(false, &[]);
        let disks = &rig.run.ready["disks"];
        assert_eq!(
            (disks[0]["serial"].as_str(), disks[1]["serial"].as_str()),
            (Some("lamina-base"), Some("lamina-views"))
        );
        assert_eq!(
            (&disks[0]["read_only"], &disks[1]["read_only"]),
            (&Value::Bool(false), &Value::Bool(true))
        );
        assert!(rig.run.ready["base"]["path"].is_null());
        for (name, bytes) in [("base", BASE), ("views", VIEWS + 2 * MARGIN)] {
            let mut driver = rig.driver(name);
            assert_eq!(driver.config(0, 8), (bytes / 512).to_le_bytes());
            assert_eq!(driver.config(34, 2), 8_u16.to_le_bytes());
            let (status, serial) = driver.request(GET_ID, 0, &[], 20);
            assert_eq!(
                (status, String::from_utf8(serial).unwrap()),
                (OK, format!("{:\0<20}", format!("lamina-{name}")))
            );
        }
    });
}

#[test]
fn the_disks_show_base_and_views_byte_for_byte() {
    within(120, || {
        let single = Place::new();
        let socket = single.text("packed.sock");
        let rig = Rig::new(false, &["--vhost-user", &format!("{socket}=t,e8m3:packed")]);
        let mut base = rig.driver("base");
        assert!(read_all(&mut base, 0, TENSOR) == rig.bytes);
        assert_eq!(base.read(BASE - 4096, 4096), [0; 4096]);
        let mut views = rig.driver("views");
        for spelling in ["full", "e8m3", "e8m3:packed"] {
            let (offset, length) = rig.view(spelling);
            let want = expected(spelling, &rig.bytes);
            assert_eq!(length, want.len());
            assert!(read_all(&mut views, offset, length) == want, "{spelling}");
        }
        // The same view as a disk of its own, from offset 0 on, with zeros behind its end.
        let want = expected("e8m3:packed", &rig.bytes);
        let mut packed = Driver::connect(&single.path("packed.sock"));
        let whole = want.len().next_multiple_of(4096);
        assert_eq!(packed.config(0, 8), (whole as u64 / 512).to_le_bytes());
        let shown = read_all(&mut packed, 0, whole);
        assert!(shown[..want.len()] == want && shown[want.len()..].iter().all(|&byte| byte == 0));
        // The table on the views disk says the same as the API.
        let table = read_all(&mut views, 0, 1 << 20);
        assert_eq!(table[512..520], *b"EFI PART");
        let entry = &table[1024 + 2 * 128..1024 + 3 * 128];
        let (offset, _) = rig.view("e8m3");
        assert_eq!(entry[32..40], (offset / 512).to_le_bytes());
        let twin = read_all(&mut views, VIEWS + 2 * MARGIN - 512, 512);
        assert_eq!(twin[..8], *b"EFI PART");
    });
}

#[test]
fn requests_may_be_cut_into_descriptors_in_any_way() {
    within(120, || {
        let rig = Rig::new(false, &[]);
        let driver = std::cell::RefCell::new((rig.driver("base"), rig.bytes.clone()));
        let strategy = (
            prop::collection::vec(1_usize..70_000, 0..12),
            0_u64..8000,
            1_usize..130,
            any::<bool>(),
            any::<bool>(),
            any::<u64>(),
        );
        let mut runner = TestRunner::new(ProptestConfig {
            cases: 150,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let test =
            |(cuts, sector, sectors, indirect, write, seed): (Vec<usize>, u64, usize, bool, bool, u64)| {
                let (driver, bytes) = &mut *driver.borrow_mut();
                let (from, length) = (usize::try_from(sector).unwrap() * 512, sectors * 512);
                if write {
                    let data = noise(seed, length);
                    prop_assert_eq!(driver.cut_request(OUT, sector, &data, 0, &cuts, indirect).0, OK);
                    bytes[from..from + length].copy_from_slice(&data);
                }
                let (status, read) = driver.cut_request(IN, sector, &[], length, &cuts, indirect);
                prop_assert_eq!(status, OK);
                prop_assert!(read == bytes[from..from + length]);
                Ok(())
            };
        runner.run(&strategy, test).unwrap();
    });
}

#[test]
fn writes_flushes_and_discards_reach_the_device_and_the_views() {
    within(120, || {
        let mut rig = Rig::new(false, &[]);
        let (mut base, mut views) = (rig.driver("base"), rig.driver("views"));
        let data = noise(5, 64 << 10);
        base.write(8192, &data);
        rig.bytes[8192..8192 + data.len()].copy_from_slice(&data);
        assert_eq!(base.request(FLUSH, 0, &[], 0).0, OK);
        let (offset, length) = rig.view("e8m3");
        assert!(read_all(&mut views, offset, length) == expected("e8m3", &rig.bytes));
        // Opaque memory behind the tensor: written, then freed by a discard, and again by
        // write-zeroes.
        let at = 16 << 20;
        for kind in [DISCARD, WRITE_ZEROES] {
            let live = || rig.ask("/stats")["device"]["logical_bytes"].as_u64().unwrap();
            let before = live();
            base.write(at, &noise(9, 1 << 20));
            assert_eq!(live(), before + (1 << 20));
            let mut ranges = Vec::new();
            for (sector, sectors) in [(at / 512, 1024_u32), (at / 512 + 1024, 1024)] {
                ranges.extend(u64::to_le_bytes(sector));
                ranges.extend(sectors.to_le_bytes());
                ranges.extend(0_u32.to_le_bytes());
            }
            assert_eq!(base.request(kind, 0, &ranges, 0).0, OK);
            assert_eq!(live(), before);
            assert!(base.read(at, 1 << 20).iter().all(|&byte| byte == 0));
        }
    });
}

#[test]
fn what_a_disk_does_not_do_is_refused_and_changes_nothing() {
    within(120, || {
        let rig = Rig::new(false, &[]);
        let mut base = rig.driver("base");
        let range = |sector: u64, sectors: u32, flags: u32| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        let end = BASE / 512;
        let refused: [(u32, u64, Vec<u8>, usize, u8); 15] = [
            (IN, end, vec![], 512, IOERR),
            (IN, end - 1, vec![], 1024, IOERR),
            (IN, u64::MAX, vec![], 512, IOERR),
            (IN, u64::MAX / 512, vec![], 512, IOERR),
            (IN, 0, vec![], 511, IOERR),
            (OUT, end, vec![1; 512], 0, IOERR),
            (OUT, 0, vec![1; 700], 0, IOERR),
            (GET_ID, 0, vec![], 19, IOERR),
            (DISCARD, 0, range(end, 8, 0), 0, IOERR),
            (DISCARD, 0, range(0, (1 << 21) + 1, 0), 0, IOERR),
            (DISCARD, 0, range(0, 8, 1), 0, UNSUPP),
            (DISCARD, 0, vec![0; 15], 0, IOERR),
            (WRITE_ZEROES, 0, range(0, 8, 2), 0, UNSUPP),
            (WRITE_ZEROES, 0, [range(0, 8, 0), range(u64::MAX, 8, 0)].concat(), 0, IOERR),
            (99, 0, vec![], 512, UNSUPP),
        ];
        for (kind, sector, out, room, status) in refused {
            let (found, bytes) = base.request(kind, sector, &out, room);
            assert_eq!(found, status, "{kind} {sector} {}", out.len());
            assert!(bytes.iter().all(|&byte| byte == UNTOUCHED));
        }
        assert_eq!(base.request(DISCARD, 0, &range(0, 8, 0).repeat(17), 0).0, IOERR);
        assert!(read_all(&mut base, 0, TENSOR) == rig.bytes);
        let mut views = rig.driver("views");
        assert_eq!(views.request(OUT, 4096, &[1; 512], 0).0, IOERR);
        assert_eq!(views.request(DISCARD, 0, &range(0, 8, 0), 0).0, UNSUPP);
        assert_eq!(views.request(FLUSH, 0, &[], 0).0, OK);
    });
}

#[test]
fn a_hostile_guest_hurts_nobody_but_itself() {
    within(120, || {
        let rig = Rig::new(false, &[]);
        let mut base = rig.driver("base");
        let header = Part { at: DATA, length: 16, write: false };
        let status = Part { at: DATA + 64, length: 1, write: true };
        let data = |at: u64, length: u32| Part { at, length, write: true };
        base.header(DATA, IN, 0);
        let chains: [&[Part]; 9] = [
            // No status, no header, too short a header, the data outside of memory or wrapping
            // around it.
            &[header],
            &[status],
            &[Part { length: 15, ..header }, status],
            &[header, data(MEMORY - 256, 512), status],
            &[header, data(u64::MAX - 100, 512), status],
            &[header, data(1 << 60, 512), status],
            &[Part { at: MEMORY, ..header }, status],
            &[header, data(DATA + 4096, u32::MAX), data(DATA + 4096, u32::MAX), status],
            &[header, Part { at: u64::MAX, ..status }],
        ];
        for parts in chains {
            let head = base.submit(parts, None);
            base.kick();
            assert_eq!(base.take().0, u32::from(head));
            let head = base.submit(parts, Some(DATA + 0x8000));
            base.kick();
            assert_eq!(base.take().0, u32::from(head));
        }
        // A chain that bites its own tail, and one that goes on outside of the table.
        let first = base.submit(&[header], None);
        base.describe(0x1000, first.into(), DATA, 16, 1, first);
        base.kick();
        base.take();
        let first = base.submit(&[header], None);
        base.describe(0x1000, first.into(), DATA, 16, 1, 60_000);
        base.kick();
        base.take();
        // An indirect table of half a descriptor, one in an indirect table, one outside of memory.
        for (at, length) in [(DATA, 8), (DATA, 24), (u64::MAX - 15, 16), (MEMORY, 4096)] {
            let first = base.submit(&[header], None);
            base.describe(0x1000, first.into(), at, length, 4, 0);
            base.kick();
            base.take();
        }
        base.describe(DATA + 0x8000, 0, DATA + 0x8000, 16, 4, 0);
        let first = base.submit(&[header], None);
        base.describe(0x1000, first.into(), DATA + 0x8000, 16, 4, 0);
        base.kick();
        base.take();
        assert!(
            read_all(&mut base, 0, 1 << 20) == rig.bytes[..1 << 20],
            "good requests are answered as before"
        );

        // A head outside of the table cannot be given back; an index that claims more than the ring
        // holds is left alone.
        let mut lost = rig.driver("views");
        lost.make_available(QUEUE_SIZE + 5);
        lost.kick();
        lost.set_available(lost.made().wrapping_add(30_000));
        lost.kick();
        assert!(read_all(&mut base, 0, 1 << 20) == rig.bytes[..1 << 20]);
        // Its connection can still be ended, and the disk has a next user.
        lost.stop();
        drop(lost);
        let (offset, length) = rig.view("full");
        assert!(read_all(&mut rig.driver("views"), offset, length) == rig.bytes);
    });
}

#[test]
fn a_server_that_is_killed_and_started_again_goes_on_where_it_was() {
    within(120, || {
        let mut rig = Rig::new(false, &[]);
        let mut base = rig.driver("base");
        assert!(base.read(0, 4096) == rig.bytes[..4096]);
        for round in 0..3_u64 {
            // It sees none of these before it dies in the first round; later it may have done any
            // part of them.
            if round == 0 {
                rig.run.signal(Signal::SIGSTOP);
            }
            let places: Vec<u64> = (0..40).map(|n| DATA + n * 0x1_1000).collect();
            for (n, &place) in (0_u64..).zip(&places) {
                base.header(place, IN, (round * 40 + n) * 64);
                base.memory.write_obj(UNTOUCHED, GuestAddress(place + 0x10ff0)).unwrap();
                let parts = [
                    Part { at: place, length: 16, write: false },
                    Part { at: place + 512, length: 32 << 10, write: true },
                    Part { at: place + 0x10ff0, length: 1, write: true },
                ];
                base.submit(&parts, None);
            }
            base.kick();
            thread::sleep(Duration::from_millis(round));
            rig.run.signal(Signal::SIGKILL);
            let _ = rig.run.child.wait();
            let model = rig.place.text("model");
            rig.run = serve(&rig.place, &model, false, &[]);
            base = base.reconnect(&rig.socket("base"));
            for (n, &place) in (0_usize..).zip(&places) {
                base.take();
                let status: u8 = base.memory.read_obj(GuestAddress(place + 0x10ff0)).unwrap();
                assert_eq!(status, OK, "round {round}, request {n}");
                let mut bytes = vec![0; 32 << 10];
                base.memory.read_slice(&mut bytes, GuestAddress(place + 512)).unwrap();
                let from = (usize::try_from(round).unwrap() * 40 + n) * (32 << 10);
                assert!(bytes == rig.bytes[from..from + (32 << 10)], "round {round}, request {n}");
            }
            assert_eq!(base.used_index(), base.made(), "each request was given back once");
        }
    });
}

#[test]
fn a_worker_that_dies_while_a_guest_writes_loses_no_write() {
    within(120, || {
        let rig = Rig::new(false, &[]);
        let mut base = rig.driver("base");
        let mut written = Vec::new();
        for round in 0..4_u64 {
            let places: Vec<u64> = (0..20).map(|n| DATA + n * 0x1_1000).collect();
            for (n, &place) in (0_u64..).zip(&places) {
                let data = noise(round * 20 + n, 64 << 10);
                base.header(place, OUT, (round * 20 + n) * 128);
                base.memory.write_slice(&data, GuestAddress(place + 512)).unwrap();
                base.memory.write_obj(UNTOUCHED, GuestAddress(place + 0x10ff0)).unwrap();
                written.extend(data);
                let parts = [
                    Part { at: place, length: 16, write: false },
                    Part { at: place + 512, length: 64 << 10, write: false },
                    Part { at: place + 0x10ff0, length: 1, write: true },
                ];
                base.submit(&parts, None);
            }
            base.kick();
            thread::sleep(Duration::from_micros(700 * round));
            // It may be gone already, and another one in its place.
            let _ = kill(Pid::from_raw(worker(rig.run.child.id())), Signal::SIGKILL);
            base = base.reconnect(&rig.socket("base"));
            for (n, &place) in places.iter().enumerate() {
                base.take();
                let status: u8 = base.memory.read_obj(GuestAddress(place + 0x10ff0)).unwrap();
                assert_eq!(status, OK, "round {round}, request {n}");
            }
            assert_eq!(base.used_index(), base.made());
            assert!(read_all(&mut base, 0, written.len()) == written, "round {round}");
        }
    });
}

#[test]
fn a_socket_that_somebody_else_keeps_open_outlives_its_server() {
    within(60, || {
        let place = Place::new();
        let path = place.path("kept.sock");
        let kept = UnixListener::bind(&path).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap());
        let bytes = noise(21, 1 << 20);
        device.write_base(0, &bytes).unwrap();
        let control = Control::new(device);
        let adopt = || DiskServer::adopt(&control, Shows::Base, kept.try_clone().unwrap(), &path).unwrap();
        let mut server = adopt();
        let mut driver = Driver::connect(&path);
        for round in 0..5_u64 {
            assert!(driver.read(0, 1 << 20) == bytes);
            let head = {
                // In the ring while the server goes: done by the old one or by the new one, once.
                driver.header(DATA, IN, round);
                let answer = Part { at: DATA + 0x1000, length: 513, write: true };
                let head = driver.submit(&[Part { at: DATA, length: 16, write: false }, answer], None);
                driver.kick();
                head
            };
            drop(server);
            assert!(path.exists());
            server = adopt();
            driver = driver.reconnect(&path);
            assert_eq!(driver.take(), (u32::from(head), 513));
            assert_eq!(driver.used_index(), driver.made());
        }
        assert_eq!(control.disks().len(), 1);
        drop(server);
    });
}

#[test]
fn a_stopped_server_finishes_what_it_is_doing_and_leaves_no_sockets() {
    within(60, || {
        let rig = Rig::new(false, &[]);
        let mut base = rig.driver("base");
        base.write(0, &noise(3, 4096));
        assert_eq!(rig.ask("/disks")[0]["connected"], true);
        rig.run.signal(Signal::SIGTERM);
        let Rig { run, place, .. } = rig;
        assert!(run.end().success());
        assert_eq!(std::fs::read_dir(place.path("disks")).unwrap().count(), 0);
    });
}

#[test]
fn disks_and_the_mount_see_each_others_stores() {
    within(120, || {
        let rig = Rig::new(true, &[]);
        let (mut disk, mut disk_views) = (rig.driver("base"), rig.driver("views"));
        let mut mounted = Window::open(&rig.place.path("mount/base"));
        let views = Window::open(&rig.place.path("mount/views"));
        let (place, length) = rig.view("e8m3");
        let offset = place - MARGIN;
        let mut bytes = rig.bytes.clone();
        for round in 0..4_u64 {
            // Both files' pages are in the host's page cache now.
            assert!(mounted.load(0, 64 << 10) == bytes[..64 << 10]);
            assert!(views.load(offset, length)[..64 << 10] == expected("e8m3", &bytes)[..64 << 10]);
            // A write to the disk is seen through the mount, in base and in views, without a flush.
            let data = noise(100 + round, 12_288);
            disk.write(4096, &data);
            bytes[4096..4096 + data.len()].copy_from_slice(&data);
            assert!(mounted.load(0, 64 << 10) == bytes[..64 << 10], "round {round}");
            assert!(views.load(offset, 64 << 10) == expected("e8m3", &bytes)[..64 << 10], "round {round}");
            // A store through the mount is seen by the disks, and what the same page holds besides
            // is not lost.
            let data = noise(200 + round, 100);
            mounted.store(20_000, &data);
            bytes[20_000..20_100].copy_from_slice(&data);
            assert!(disk.read(16_384, 4096) == bytes[16_384..20_480], "round {round}");
            assert!(read_all(&mut disk_views, place, 64 << 10) == expected("e8m3", &bytes)[..64 << 10]);
            mounted.store(50_000, &data);
            bytes[50_000..50_100].copy_from_slice(&data);
            let half = noise(300 + round, 512);
            disk.write(49_152, &half);
            bytes[49_152..49_664].copy_from_slice(&half);
            assert!(mounted.load(0, 64 << 10) == bytes[..64 << 10], "round {round}");
        }
        // A discard is seen too.
        let range = [&8_u64.to_le_bytes()[..], &16_u32.to_le_bytes(), &0_u32.to_le_bytes()].concat();
        assert_eq!(disk.request(DISCARD, 0, &range, 0).0, OK);
        bytes[4096..12_288].fill(0);
        assert!(mounted.load(0, 64 << 10) == bytes[..64 << 10]);
        assert_eq!(disk.request(FLUSH, 0, &[], 0).0, OK);
        assert!(views.load(offset, 64 << 10) == expected("e8m3", &bytes)[..64 << 10]);
    });
}

#[test]
fn a_guest_whose_memory_is_the_device_itself_is_refused() {
    within(60, || {
        let rig = Rig::new(true, &[]);
        let window = File::options().read(true).write(true).open(rig.place.path("mount/base")).unwrap();
        assert!(Driver::is_refused(&rig.socket("base"), window));
        assert!(rig.driver("base").read(0, 4096) == rig.bytes[..4096]);
    });
}

#[test]
fn a_guest_whose_memory_is_a_file_of_the_devices_is_refused_too() {
    within(60, || {
        for more in [&["--files", "8M"][..], &["--files", "8M", "--write-cache"]] {
            let rig = Rig::new(true, more);
            let path = rig.place.path("mount/files/memory");
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            file.set_len(1 << 20).unwrap();
            assert!(Driver::is_refused(&rig.socket("base"), file), "{more:?}");
            assert!(rig.driver("base").read(0, 4096) == rig.bytes[..4096]);
        }
    });
}

#[test]
fn connections_to_a_disk_leave_nothing_open() {
    within(60, || {
        let rig = Rig::new(false, &[]);
        let worker = worker(rig.run.child.id());
        drop(rig.driver("base"));
        eventually("an unconnected disk", || rig.ask("/disks")[0]["connected"] == false);
        let before = descriptors(worker);
        for _ in 0..50 {
            rig.driver("base");
        }
        eventually("closed connections", || descriptors(worker) <= before);
        assert!(rig.driver("base").read(0, 4096) == rig.bytes[..4096]);
    });
}

#[test]
fn a_start_that_fails_behind_the_mount_says_why_and_no_more() {
    within(180, || {
        for _ in 0..30 {
            let place = Place::new();
            let (mount, run, socket) = (place.text("mount"), place.text("run"), place.text("v.sock"));
            let mut command = lamina(&["serve", "--capacity", "32M", "--run-dir", &run, "--mount", &mount]);
            command.args(["--vhost-user", &format!("{socket}=nobody,full")]).env("RUST_LOG", "off");
            let output = command.stdin(Stdio::null()).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && said.contains("nobody"), "{said}");
            assert!(!said.contains("abort"), "{said}");
        }
    });
}

#[test]
fn sockets_in_use_and_views_that_cannot_be_are_refused_by_name() {
    let place = Place::new();
    let failed = |what: &str| {
        let output =
            lamina(&["serve", "--capacity", "256M", "--run-dir", &place.text("run"), "--vhost-user", what])
                .stdin(Stdio::null())
                .output()
                .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let busy = place.path("busy.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&busy).unwrap();
    assert!(failed(&format!("{}=base", busy.display())).contains("busy.sock"));
    let said = failed(&format!("{}=nobody,full", place.text("v.sock")));
    assert!(said.contains("nobody") && said.contains("v.sock"), "{said}");
    let output = lamina(&["serve"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("--mount"));
}
