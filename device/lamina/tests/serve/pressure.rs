//! A store that is full: stores through a mapping wait for room, nothing else does, and nothing
//! that is stored is harmed.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, Window, expected, lamina, noise, within};
use crate::deaths::{deaths, kill_worker};

pub(crate) const PAGE: u64 = 4096;
/// Longer than any test takes: what waits is let through by something else.
///
/// While anything waits, no mapping of the window may go: the kernel would write everything back
/// and wait, with this process's memory locked.
pub(crate) const LONG: &str = "100";
/// Bytes of the tensor at DPA 0.
const TENSOR: usize = 64 << 10;

/// A device whose store has been filled up with noise by `write`, page by page.
struct Full {
    rig: Rig,
    base: Window,
    /// Pages that hold something.
    pages: u64,
}

fn page(at: u64) -> Vec<u8> {
    noise(at + 1, 4096)
}

/// Bytes of several pages.
pub(crate) fn pages(range: std::ops::Range<u64>) -> Vec<u8> {
    range.flat_map(page).collect()
}

/// Waits until `holds`, as long as a loaded machine may take.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "did not come about: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes as the device has them, whatever the page cache holds.
pub(crate) fn direct(path: &Path, at: u64, length: usize) -> Vec<u8> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let mut bytes = vec![0; length + 4096];
    let start = bytes.as_ptr().align_offset(4096);
    file.read_exact_at(&mut bytes[start..start + length], at).unwrap();
    bytes[start..start + length].to_vec()
}

/// Has the kernel begin to write a range back, and waits for nothing.
pub(crate) fn begin_write_back(window: &Window, at: u64, length: u64) {
    let (at, length) = (i64::try_from(at).unwrap(), i64::try_from(length).unwrap());
    // SAFETY: takes no pointers.
    let begun =
        unsafe { libc::sync_file_range(window.file.as_raw_fd(), at, length, libc::SYNC_FILE_RANGE_WRITE) };
    assert_eq!(begun, 0);
}

impl Full {
    fn new(full_wait: &str) -> Self {
        let place = Place::new();
        let bytes = noise(7, TENSOR);
        let model = place.checkpoint("t", &bytes);
        let sizes = ["--capacity", "32M", "--views-capacity", "64M", "--store-capacity", "4M"];
        let mut command = place.serve(&sizes);
        command.args(["--model", &model, "--views", "e8m3", "--full-wait", full_wait]);
        let rig = Rig { run: Run::start(&mut command), place, bytes };
        let base = rig.base();
        let mut pages = TENSOR as u64 / PAGE;
        let refused = loop {
            match base.file_write_error(pages * PAGE, &page(pages)) {
                None => pages += 1,
                Some(why) => break why,
            }
        };
        assert_eq!(refused, libc::ENOSPC, "a write is refused at once");
        Self { rig, base, pages }
    }

    fn write_backs(&self) -> Value {
        self.rig.ask("GET", "/stats", &Value::Null)["write_backs"].clone()
    }

    /// Stores pages through the mapping, and waits until their write-back waits for room.
    fn store_and_wait(&mut self, range: std::ops::Range<u64>) {
        self.base.store(range.start * PAGE, &pages(range.clone()));
        begin_write_back(&self.base, range.start * PAGE, (range.end - range.start) * PAGE);
        until("a write-back waits", || self.write_backs()["waiting"].as_u64() > Some(0));
    }

    fn discard(&self, range: std::ops::Range<u64>) {
        let length = (range.end - range.start) * PAGE;
        self.rig.ask("POST", "/discard", &json!({ "offset": range.start * PAGE, "length": length }));
    }

    /// Whether the device has these pages.
    fn holds(&self, range: std::ops::Range<u64>) {
        let length = usize::try_from((range.end - range.start) * PAGE).unwrap();
        let found = direct(&self.rig.base_path(), range.start * PAGE, length);
        assert!(found == pages(range.clone()), "pages {range:?}");
    }

    /// Everything but the last pages that were filled, and the tensor.
    fn untouched(&self) -> std::ops::Range<u64> {
        TENSOR as u64 / PAGE..self.pages - 128
    }
}

#[test]
fn a_store_that_finds_no_room_waits_for_it_and_nothing_else_does() {
    within(120, || {
        let mut full = Full::new(LONG);
        let mut other = full.rig.base();
        let stored = full.pages + 100..full.pages + 108;
        full.store_and_wait(stored.clone());
        thread::scope(|scope| {
            let full = &full;
            let (offset, length) = (stored.start * PAGE, 8 * PAGE);
            let flushed = scope.spawn(move || full.rig.flush(offset, length));
            // What waits is loaded from the page cache, everything else from the device.
            assert!(full.base.load(offset, 8 * 4096) == pages(stored.clone()));
            full.holds(full.untouched());
            assert!(full.rig.views().load(full.rig_view(), TENSOR) == expected("e8m3", &full.rig.bytes));
            // Stores in place of others, their flushes, and the views over them.
            other.store(0, &noise(8, TENSOR));
            full.rig.flush(0, TENSOR as u64);
            assert!(full.rig.views().load(full.rig_view(), TENSOR) == expected("e8m3", &noise(8, TENSOR)));
            assert!(!flushed.is_finished(), "the flush of what waits waits");
            let events = full.rig.ask("GET", "/events", &Value::Null);
            let kinds: Vec<_> =
                events.as_array().unwrap().iter().map(|event| event["kind"].as_str()).collect();
            assert_eq!(
                kinds[..4],
                [Some("store_above"), Some("store_above"), Some("store_above"), Some("no_room")]
            );
            assert_eq!(full.write_backs()["refused"], 0);
            full.discard(full.pages - 64..full.pages);
            flushed.join().unwrap();
        });
        let counted = full.write_backs();
        assert_eq!((&counted["waiting"], &counted["waiting_bytes"]), (&json!(0), &json!(0)));
        assert_eq!((&counted["refused"], counted["waited"].as_u64() > Some(0)), (&json!(0), true));
        full.holds(stored);
        full.holds(full.untouched());
    });
}

#[test]
fn a_store_that_finds_no_room_in_time_is_refused_and_told() {
    within(120, || {
        let mut full = Full::new("1");
        let stored = full.pages + 100..full.pages + 108;
        full.base.store(stored.start * PAGE, &pages(stored.clone()));
        let range = json!({ "offset": stored.start * PAGE, "length": 8 * PAGE });
        let (status, why) = full.rig.try_ask("POST", "/flush", &range);
        assert!(status == 500 && why["error"].as_str().unwrap().contains("No space left"), "{status} {why}");
        let counted = full.write_backs();
        assert_eq!(
            (&counted["waiting"], counted["refused"].as_u64() > Some(0)),
            (&json!(0), true),
            "{counted}"
        );
        let api = full.rig.place.text("run/api.sock");
        let said = |words: &[&str]| {
            let done = lamina(words).args(["--api", &api]).output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            String::from_utf8(done.stdout).unwrap()
        };
        let events = said(&["events"]);
        let lost = format!("were stored at DPA {:#x} are lost", stored.start * PAGE);
        assert!(events.contains("stores_lost") && events.contains(&lost), "{events}");
        let stats = said(&["stats"]);
        assert!(stats.lines().any(|line| line.starts_with("write-backs: ") && line.contains("refused")));
        let (_, metrics) = metrics(&full.rig);
        assert!(
            metrics.contains("lamina_write_backs_waiting 0")
                && metrics.contains("lamina_write_backs_refused_total")
        );
        full.holds(full.untouched());
        // Room is made by name and by range, and then what was lost can be stored.
        said(&["discard", "t"]);
        assert!(full.base.load(0, TENSOR).iter().all(|byte| *byte == 0));
        said(&["discard", &format!("{:#x}", (full.pages - 64) * PAGE), "256K"]);
        full.base.store(stored.start * PAGE, &pages(stored.clone()));
        full.rig.flush(stored.start * PAGE, 8 * PAGE);
        full.holds(stored);
        full.holds(full.untouched());
    });
}

#[test]
fn what_waits_goes_on_waiting_when_the_worker_dies() {
    within(120, || {
        let mut full = Full::new(LONG);
        let stored = full.pages + 100..full.pages + 108;
        full.store_and_wait(stored.clone());
        kill_worker(&full.rig.run);
        until("another worker has it wait", || {
            full.rig.try_ask_quietly("/stats")
                && deaths(&full.rig) == 1
                && full.write_backs()["waiting"].as_u64() > Some(0)
        });
        assert!(full.base.load(stored.start * PAGE, 8 * 4096) == pages(stored.clone()));
        full.discard(full.pages - 64..full.pages);
        full.base.sync();
        assert_eq!((&full.write_backs()["waiting"], &full.write_backs()["refused"]), (&json!(0), &json!(0)));
        full.holds(stored);
        full.holds(full.untouched());
    });
}

#[test]
fn a_discard_of_what_waits_needs_no_room() {
    within(120, || {
        let mut full = Full::new(LONG);
        let stored = full.pages + 100..full.pages + 108;
        full.store_and_wait(stored.clone());
        full.discard(stored.clone());
        assert!(full.base.load(stored.start * PAGE, 8 * 4096).iter().all(|byte| *byte == 0));
        until("nothing waits", || full.write_backs()["waiting"] == 0);
        // Dirty pages that nobody has tried to write back yet are dropped as well, but what is
        // beside them is not.
        full.base.store(3 * PAGE, &page(5));
        full.base.store(stored.start * PAGE, &pages(stored.clone()));
        full.rig.ask("POST", "/discard", &json!({ "offset": stored.start * PAGE, "length": 8 * PAGE }));
        assert!(full.base.load(stored.start * PAGE, 8 * 4096).iter().all(|byte| *byte == 0));
        full.rig.flush(0, 32 << 20);
        assert_eq!(full.write_backs()["refused"], 0);
        assert!(direct(&full.rig.base_path(), 3 * PAGE, 4096) == page(5));
        let found = direct(&full.rig.base_path(), stored.start * PAGE, 8 * 4096);
        assert!(found.iter().all(|byte| *byte == 0));
        full.holds(full.untouched());
    });
}

#[test]
fn stopping_ends_what_waits() {
    within(120, || {
        let mut full = Full::new(LONG);
        full.store_and_wait(full.pages + 100..full.pages + 108);
        let Full { rig, base, .. } = full;
        rig.run.signal(nix::sys::signal::Signal::SIGTERM);
        assert!(rig.run.end().success());
        drop(base);
    });
}

#[test]
fn a_quota_that_is_used_up_has_its_guest_wait_and_no_other() {
    within(120, || {
        let place = Place::new();
        let parts = ["--guest", "small=4M,views=8M,quota=64K", "--guest", "other=4M,views=8M"];
        let run = Run::start(place.serve(&parts).args(["--views", "", "--full-wait", LONG]));
        let rig = Rig { run, place, bytes: Vec::new() };
        let path = |name: &str| rig.place.path(&format!("mount/guests/{name}/base"));
        let (mut small, mut other) = (Window::open(&path("small")), Window::open(&path("other")));
        small.store(0, &pages(0..16));
        rig.flush(0, 16 * PAGE);
        small.store(1 << 20, &pages(16..20));
        begin_write_back(&small, 1 << 20, 4 * PAGE);
        let waiting = || rig.ask("GET", "/stats", &Value::Null)["write_backs"]["waiting"].as_u64();
        until("the guest's store waits", || waiting() > Some(0));
        other.store(0, &pages(0..64));
        rig.flush(4 << 20, 64 * PAGE);
        assert!(direct(&path("other"), 0, 64 * 4096) == pages(0..64));
        assert!(small.load(1 << 20, 4 * 4096) == pages(16..20) && waiting() > Some(0));
        rig.ask("POST", "/discard", &json!({ "offset": 0, "length": 4 * PAGE }));
        rig.flush(0, 4 << 20);
        assert!(direct(&path("small"), 1 << 20, 4 * 4096) == pages(16..20));
        assert!(direct(&path("small"), 4 * PAGE, 12 * 4096) == pages(4..16));
        assert_eq!(rig.ask("GET", "/stats", &Value::Null)["write_backs"]["refused"], 0);
    });
}

/// A file system of a bounded size, where this user may mount one.
struct SmallDisk(Place);

impl SmallDisk {
    fn new(size: &str) -> Option<Self> {
        let place = Place::new();
        let options = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs", &place.text("")]).output();
        mounted.is_ok_and(|mount| mount.status.success()).then(|| Self(place))
    }

    fn image(&self) -> String {
        self.0.text("image")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(self.0.path("")).status();
        if !thread::panicking() {
            assert!(done.unwrap().success());
        }
    }
}

#[test]
fn a_disk_that_is_full_from_the_beginning_is_refused_and_keeps_no_image() {
    within(120, || {
        for size in ["4k", "64k", "512k"] {
            let Some(disk) = SmallDisk::new(size) else {
                return lamina_skipped::test("nothing can be mounted here");
            };
            let place = Place::new();
            let output = place.serve(&["--capacity", "32M", "--image", &disk.image()]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains("No space left"), "{size}: {said}");
            assert!(!Path::new(&disk.image()).exists(), "{size}: {said}");
        }
    });
}

#[test]
fn a_disk_that_fills_up_has_stores_wait_and_kills_nobody() {
    within(120, || {
        let Some(disk) = SmallDisk::new("12M") else {
            return lamina_skipped::test("nothing can be mounted here");
        };
        let place = Place::new();
        let sizes = ["--capacity", "64M", "--views-capacity", "64M", "--views", "", "--full-wait", LONG];
        let run = Run::start(place.serve(&sizes).args(["--image", &disk.image()]));
        let rig = Rig { run, place, bytes: Vec::new() };
        let mut base = rig.base();
        // Where nothing else needs room on the disk, a page at a time is stored until it is full.
        let mut filled = 0;
        while base.file_write_error(filled * PAGE, &page(filled)).is_none() {
            filled += 1;
        }
        assert!(filled > 256, "{filled}");
        let waiting = || rig.ask("GET", "/stats", &Value::Null)["write_backs"]["waiting"].as_u64();
        let at = (48 << 20) / PAGE;
        base.store(at * PAGE, &pages(at..at + 64));
        begin_write_back(&base, at * PAGE, 64 * PAGE);
        until("the store waits for the disk", || waiting() > Some(0));
        // All of the window, most of which was never written: a hole on this disk has no room
        // either.
        assert!(direct(&rig.base_path(), 0, usize::try_from(filled * PAGE).unwrap()) == pages(0..filled));
        let hole = 32 << 20..48 << 20;
        assert!(direct(&rig.base_path(), hole.start, 16 << 20).iter().all(|byte| *byte == 0));
        assert_eq!(deaths(&rig), 0);
        rig.ask("POST", "/discard", &json!({ "offset": 0, "length": filled * PAGE }));
        rig.flush(at * PAGE, 64 * PAGE);
        assert!(direct(&rig.base_path(), at * PAGE, 64 * 4096) == pages(at..at + 64));
        assert_eq!((waiting(), deaths(&rig)), (Some(0), 0));
        drop((base, rig));
    });
}

/// The metrics' status and text.
pub(crate) fn metrics(rig: &Rig) -> (u16, String) {
    let stream = std::os::unix::net::UnixStream::connect(rig.place.path("run/api.sock")).unwrap();
    let (status, _, text) = crate::common::answer(stream, &crate::common::request("GET", "/metrics", ""));
    (status, text)
}

impl Full {
    /// Where the tensor's view is.
    fn rig_view(&self) -> u64 {
        self.rig.view("e8m3").offset
    }
}
