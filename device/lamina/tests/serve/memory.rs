//! A host whose memory runs out: a store that lies in it waits, is refused, and goes on, and no
//! process is ended for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use lamina_store::host_memory::Linux;
use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, Window, lamina, within};
use crate::deaths::deaths;
use crate::pressure::{LONG, PAGE, begin_write_back, direct, pages, until};

/// Bytes that the devices here keep free.
const RESERVE: u64 = 64 << 20;
/// Pages whose entries are beside each other in the index, where it grows.
const UNIT: u64 = 1024;
/// Where pages are stored that are to find no room. The page before it holds something, and so the
/// index has room for it.
const FAR: u64 = 10 * UNIT + 1;

/// A device on a host that has as much memory left as a file says.
struct Host {
    rig: Rig,
    base: Window,
    /// Pages from the beginning on that hold something.
    filled: u64,
}

impl Host {
    fn new(full_wait: &str) -> Self {
        let place = Place::new();
        fs::write(place.path("left"), "8589934592").unwrap();
        let sizes =
            ["--capacity", "64M", "--views-capacity", "64M", "--views", "", "--memory-reserve", "64M"];
        let mut command = place.serve(&sizes);
        command.args(["--full-wait", full_wait]).env("LAMINA_MEMORY_LEFT", place.path("left"));
        let run = Run::start(&mut command);
        let rig = Rig { run, place, bytes: Vec::new() };
        let base = rig.base();
        // The index is there from now on, so that only segments find no room.
        for page in (0..4).map(|unit| unit * UNIT).chain([FAR - 1]) {
            assert_eq!(base.file_write_error(page * PAGE, &pages(page..page + 1)), None);
        }
        Self { rig, base, filled: 0 }
    }

    /// Has so much be left, and looks.
    fn leave(&self, bytes: u64) {
        fs::write(self.rig.place.path("left"), bytes.to_string()).unwrap();
        let device = &self.rig.ask("GET", "/stats", &Value::Null)["device"];
        assert_eq!(device["host_memory_left_bytes"], bytes);
        assert_eq!(device["memory_reserve_bytes"], RESERVE);
    }

    /// Stores pages, one behind the other, until they are refused.
    fn fill(&mut self) {
        let refused = loop {
            match self.base.file_write_error(self.filled * PAGE, &pages(self.filled..self.filled + 1)) {
                None => self.filled += 1,
                Some(why) => break why,
            }
        };
        assert_eq!(refused, libc::ENOSPC);
    }

    fn write_backs(&self) -> Value {
        self.rig.ask("GET", "/stats", &Value::Null)["write_backs"].clone()
    }

    fn events(&self) -> Vec<(String, String)> {
        let events = self.rig.ask("GET", "/events", &Value::Null);
        let text = |event: &Value, field: &str| event[field].as_str().unwrap().to_owned();
        events.as_array().unwrap().iter().map(|event| (text(event, "kind"), text(event, "text"))).collect()
    }

    /// Stores pages through the mapping, and waits until their write-back waits for room.
    fn store_and_wait(&mut self, range: std::ops::Range<u64>) {
        self.base.store(range.start * PAGE, &pages(range.clone()));
        begin_write_back(&self.base, range.start * PAGE, (range.end - range.start) * PAGE);
        until("a write-back waits", || self.write_backs()["waiting"].as_u64() > Some(0));
    }

    fn holds(&self, range: std::ops::Range<u64>) {
        let length = usize::try_from((range.end - range.start) * PAGE).unwrap();
        let found = direct(&self.rig.base_path(), range.start * PAGE, length);
        assert!(found == pages(range.clone()), "pages {range:?}");
    }
}

#[test]
fn a_store_waits_for_memory_and_goes_on_when_some_is_free_or_something_is_discarded() {
    within(120, || {
        let mut host = Host::new(LONG);
        for per_cent in [390, 190, 120, 100] {
            host.leave(RESERVE / 100 * per_cent);
        }
        host.leave(RESERVE);
        host.fill();
        assert!(host.filled > 64, "{}", host.filled);
        let reported = host.events();
        let kinds: Vec<_> = reported.iter().map(|(kind, _)| kind.as_str()).collect();
        assert_eq!(kinds, ["memory_below", "memory_below", "memory_below", "no_room"], "{reported:?}");
        assert!(
            reported[3].1.contains(&format!("of the host's memory {RESERVE} bytes are left")),
            "{reported:?}"
        );
        host.store_and_wait(FAR..FAR + 8);
        // What waits is loaded from the page cache, everything else from the device; and what is
        // stored can be stored again.
        assert!(host.base.load(FAR * PAGE, 8 * 4096) == pages(FAR..FAR + 8));
        host.holds(0..host.filled);
        let again = pages(3..64 + 3);
        host.base.store(0, &again);
        host.rig.flush(0, 64 * PAGE);
        assert!(direct(&host.rig.base_path(), 0, 64 * 4096) == again);
        host.leave(RESERVE * 100);
        until("nothing waits", || host.write_backs()["waiting"] == 0);
        host.holds(FAR - 1..FAR + 8);
        // Nothing is left at all; what a discard frees can be taken.
        host.leave(0);
        host.fill();
        host.store_and_wait(FAR + 8..FAR + 16);
        host.rig.ask("POST", "/discard", &json!({ "offset": 0, "length": 64 * PAGE }));
        host.rig.flush(FAR * PAGE, 16 * PAGE);
        host.holds(FAR - 1..FAR + 16);
        host.holds(64..host.filled);
        let counted = host.write_backs();
        assert_eq!((&counted["waiting"], &counted["refused"]), (&json!(0), &json!(0)), "{counted}");
        assert_eq!(deaths(&host.rig), 0);
    });
}

#[test]
fn a_store_that_finds_no_memory_in_time_is_refused_and_told() {
    within(120, || {
        let mut host = Host::new("1");
        host.leave(RESERVE);
        host.fill();
        host.base.store(FAR * PAGE, &pages(FAR..FAR + 8));
        let range = json!({ "offset": FAR * PAGE, "length": 8 * PAGE });
        let (status, why) = host.rig.try_ask("POST", "/flush", &range);
        assert!(status == 500 && why["error"].as_str().unwrap().contains("No space left"), "{status} {why}");
        assert!(host.write_backs()["refused"].as_u64() > Some(0));
        let (kind, text) = host.events().pop().unwrap();
        let lost = format!("were stored at DPA {:#x} are lost", FAR * PAGE);
        assert!(
            kind == "stores_lost" && text.contains(&lost) && text.contains("the host's memory"),
            "{text}"
        );
        let api = host.rig.place.text("run/api.sock");
        let said = lamina(&["stats", "--api", &api]).output().unwrap().stdout;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("host memory left 64.00 MiB, memory reserve 64.00 MiB"), "{said}");
        let metrics = crate::pressure::metrics(&host.rig).1;
        for line in ["lamina_host_memory_left_bytes 67108864\n", "lamina_memory_reserve_bytes 67108864\n"] {
            assert!(metrics.contains(line), "{metrics}");
        }
        host.leave(RESERVE * 100);
        host.base.store(FAR * PAGE, &pages(FAR..FAR + 8));
        host.rig.flush(FAR * PAGE, 8 * PAGE);
        host.holds(FAR - 1..FAR + 8);
        host.holds(0..host.filled);
    });
}

#[test]
fn a_reserve_that_leaves_nothing_is_refused_and_one_that_leaves_less_than_there_is_stores_nothing() {
    within(120, || {
        let place = Place::new();
        let output = place.serve(&["--capacity", "32M", "--memory-reserve", "1000T"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("nothing would be left to store in"), "{said}");
        let Some(total) = Linux::at(Path::new("/")).total() else {
            return lamina_skipped::part("this host does not say how much memory it has");
        };
        // Some of all memory is always in use.
        let reserve = (total - 1).to_string();
        let command = &mut place.serve(&["--capacity", "32M", "--memory-reserve", &reserve]);
        let rig = Rig { run: Run::start(command), place, bytes: Vec::new() };
        let base = rig.base();
        assert_eq!(base.file_write_error(0, &pages(0..1)), Some(libc::ENOSPC));
        assert!(base.load(0, 4096).iter().all(|byte| *byte == 0));
        rig.ask("POST", "/discard", &json!({ "offset": 0, "length": 32 << 20 }));
    });
}

/// A memory control group of a bounded size, where this user may make one.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Result<Self, String> {
        let one = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = if one.join("memory.limit_in_bytes").exists() {
            (one, "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let name = format!("lamina-test-{}-{bytes}", std::process::id());
        let group = Self(parent.join(name));
        let failed = |why: std::io::Error| format!("{}: {why}", group.0.display());
        fs::create_dir(&group.0).map_err(failed)?;
        // Version 2 makes the file only where the parent gives its groups memory to limit.
        fs::write(group.0.join(limit), bytes.to_string()).map_err(failed)?;
        // A host that swaps would put off what is tested. The files are there as version and kernel
        // have it.
        for (file, none) in [("memory.swap.max", "0"), ("memory.swappiness", "0")] {
            let _ = fs::write(group.0.join(file), none);
        }
        let tried = group.run(&Command::new("true")).stderr(Stdio::null()).status();
        let joined = tried.is_ok_and(|status| status.success());
        if joined { Ok(group) } else { Err(format!("{}: no process can join it", group.0.display())) }
    }

    /// Puts a process that runs into the group.
    fn take(&self, process: &Value) {
        fs::write(self.0.join("cgroup.procs"), process.to_string()).unwrap();
    }

    /// The command, in this group.
    fn run(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            inside.env(name, value.unwrap_or_default());
        }
        inside
    }

    /// Processes of the group that were ended for lack of memory.
    fn ended(&self) -> u64 {
        let files = ["memory.oom_control", "memory.events"];
        let text = files.iter().find_map(|file| fs::read_to_string(self.0.join(file)).ok()).unwrap();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Processes that have ended leave it a moment later.
        let gone = (0..6000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            !self.0.exists() || fs::remove_dir(&self.0).is_ok()
        });
        assert!(gone || thread::panicking(), "{} stays", self.0.display());
    }
}

#[test]
fn in_a_group_of_little_memory_stores_are_refused_and_no_process_is_ended() {
    within(240, || {
        let group = match Group::new(128 << 20) {
            Ok(group) => group,
            Err(why) => return lamina_skipped::test(format!("no memory group can be made here: {why}")),
        };
        let place = Place::new();
        let sizes = ["--capacity", "256M", "--views-capacity", "64M", "--views", "", "--full-wait", "1"];
        let run = Run::start(&mut group.run(&place.serve(&sizes)));
        let rig = Rig { run, place, bytes: Vec::new() };
        let mut base = rig.base();
        let part = (4 << 20) / PAGE;
        let mut stored = 0;
        while stored < 64 {
            let range = stored * part..(stored + 1) * part;
            base.store(range.start * PAGE, &pages(range));
            if base.try_sync().is_err() {
                break;
            }
            stored += 1;
        }
        let stats = rig.ask("GET", "/stats", &Value::Null);
        assert!((4..32).contains(&stored), "{stored} parts: {stats}");
        assert!(stats["write_backs"]["refused"].as_u64() > Some(0), "{stats}");
        let left = stats["device"]["host_memory_left_bytes"].as_u64().unwrap();
        assert!(left < 128 << 20, "{left}");
        let has = |parts: std::ops::Range<u64>| {
            for part_number in parts {
                let range = part_number * part..(part_number + 1) * part;
                let length = usize::try_from(part * PAGE).unwrap();
                let found = direct(&rig.base_path(), range.start * PAGE, length);
                assert!(found == pages(range.clone()), "pages {range:?}");
            }
        };
        has(0..stored);
        rig.ask("POST", "/discard", &json!({ "offset": 0, "length": stored / 2 * part * PAGE }));
        let range = 60 * part..61 * part;
        base.store(range.start * PAGE, &pages(range));
        base.sync();
        has(stored / 2..stored);
        has(60..61);
        assert_eq!((group.ended(), deaths(&rig)), (0, 0));
        drop((base, rig));
    });
}

#[test]
fn a_worker_that_linux_ends_for_lack_of_memory_is_followed_by_another() {
    within(240, || {
        let group = match Group::new(24 << 20) {
            Ok(group) => group,
            Err(why) => return lamina_skipped::test(format!("no memory group can be made here: {why}")),
        };
        let place = Place::new();
        let sizes = ["--capacity", "64M", "--views-capacity", "64M", "--views", "", "--memory-reserve", "0"];
        let rig = Rig { run: Run::start(&mut place.serve(&sizes)), place, bytes: Vec::new() };
        // The group has no other process to end, and the next worker is not in it.
        group.take(&rig.run.ready["worker"]);
        let mut base = rig.base();
        let all = 0..(48 << 20) / PAGE;
        for first in all.clone().step_by(256) {
            base.store(first * PAGE, &pages(first..first + 256));
            base.sync();
        }
        assert_eq!((group.ended(), deaths(&rig)), (1, 1));
        assert!(direct(&rig.base_path(), 0, 48 << 20) == pages(all));
        assert_eq!(rig.ask("GET", "/stats", &Value::Null)["write_backs"]["refused"], 0);
        drop((base, rig));
    });
}

#[test]
fn a_holder_may_be_spared_when_memory_runs_out_and_its_workers_are_not() {
    within(120, || {
        let rig = Rig::prepared(|_, _| {});
        let score = |process: &str| fs::read_to_string(format!("/proc/{process}/oom_score_adj")).unwrap();
        let ready = &rig.run.ready;
        assert_eq!(score(&ready["worker"].to_string()), score("self"));
        let holder = score(&ready["pid"].to_string());
        // Not every user may ask for it.
        assert!(holder == score("self") || holder.trim() == "-1000", "{holder}");
    });
}
