//! Telling guests of poison: through the monitors (QMP) of their QEMUs, as a CXL device tells its
//! host.
//!
//! * For each poisoning, QEMU's memory device is given the block's DPA in its poison list
//!   (`cxl-inject-poison`) and a general media event record of an uncorrectable error
//!   (`cxl-inject-general-media-event`), which interrupts the guest: its kernel reads the log and
//!   traces `cxl_general_media`.
//! * A guest is told of its own partition, by DPAs of its own.
//! * QEMU may not listen yet, or end, or never be there: the reporter connects until it can, as
//!   long as there is poison to tell of. What a QEMU was told it is not told twice, on another
//!   connection or by the next process either, but what was being told when a process died; another
//!   QEMU at the same place is told of everything that is poisoned then, and of what was lost since
//!   the one before it was told. QEMUs are told apart by their processes, as far as those can be
//!   seen from here.
//! * What is told are losses, in order, also of blocks that were written before the reporter
//!   looked; so a guest hears of each, but of one whose block was written in the tenth of a second
//!   before the process died. Should a QEMU not take them until as many were mended as the device
//!   [logs](lamina_device::device::Device::poisonings), the oldest are not told, which is a
//!   warning.
//! * QEMU's list keeps what was told: it has no command for poison that a write cleared. At most
//!   256 entries fit it; the event is sent all the same.
//! * A monitor is not trusted ([`monitor`]): what it says is bounded, and a reporter that is to
//!   stop ends within [`monitor::LAST_ANSWER`] whatever it does.

mod monitor;

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lamina_abi::Interleave;
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::monitor::{Monitor, Stop};
use lamina_device::device::Partition;
use lamina_device::device::poison::{Cause, Poisoned};

/// The object of QEMU's device that holds the base window, or its first target:
/// `-device cxl-type3,id=mem0`; the other targets follow.
const BASE_DEVICE: &str = "/machine/peripheral/mem";
/// How often it is looked whether there is anything to tell.
const PAUSE: Duration = Duration::from_millis(100);
/// Blocks that are remembered as told to one QEMU; the next process tells of others again.
const MAX_REPORTED: usize = 4096;

/// What a QEMU was told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reported {
    /// Its process.
    qemu: i32,
    /// The DPAs of blocks that were poisoned.
    blocks: BTreeSet<u64>,
}

impl Reported {
    /// Adds what was told after it.
    pub fn add(&mut self, more: Self) {
        if self.qemu != more.qemu {
            *self = more;
            return;
        }
        let room = MAX_REPORTED.saturating_sub(self.blocks.len());
        self.blocks.extend(more.blocks.into_iter().take(room));
    }
}

/// Tells one QEMU, and whichever comes after it, of a partition's poison, until it is dropped.
#[derive(Debug)]
pub struct PoisonReporter {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl PoisonReporter {
    /// Tells the QEMU that listens at the monitor socket `socket` and has `partition` as its base
    /// window. `before` is what processes before this one told; `note` is given what is told now.
    ///
    /// # Errors
    ///
    /// When a thread cannot be made.
    pub fn start(
        partition: Partition,
        socket: &Path,
        before: Reported,
        mut note: impl FnMut(Reported) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::<Stop>::default();
        let stopped = Arc::clone(&stop);
        let mut teller = Teller {
            partition,
            socket: socket.to_owned(),
            before,
            monitor: None,
            qemu: None,
            reported: 0,
            before_it: 0,
        };
        let run = move || {
            let mut failed = None;
            while stopped.get().is_none() {
                thread::sleep(PAUSE);
                let why = teller.look(&stopped, &mut note).err();
                let foreign = why.as_ref().is_some_and(|why| why.kind() == io::ErrorKind::PermissionDenied);
                let why = why.map(|why| why.to_string());
                if failed != why {
                    if let Some(why) = &why {
                        let socket = teller.socket.display();
                        if foreign {
                            tracing::warn!(%socket, "QEMU is not told of poison: {why}");
                        } else {
                            tracing::debug!(%socket, "QEMU is not told of poison yet: {why}");
                        }
                    }
                    failed = why;
                }
            }
        };
        let thread = Some(thread::Builder::new().name("qmp".to_owned()).spawn(run)?);
        Ok(Self { stop, thread })
    }

    /// Has it end soon, without waiting for that.
    pub fn stop(&self) {
        // Again changes nothing.
        let _ = self.stop.set(Instant::now());
    }

    /// Has it end, and waits for that until `deadline`. One that has not ended by then is left
    /// alone, and ends with the process.
    pub fn end_by(mut self, deadline: Instant) {
        self.stop();
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            if Instant::now() >= deadline {
                tracing::warn!("who tells QEMU of poison does not end, and is left");
                return;
            }
            thread::sleep(PAUSE / 10);
        }
        // A panic was logged by the panic hook.
        let _ = thread.join();
    }
}

impl Drop for PoisonReporter {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Tells whichever QEMU listens at one place.
struct Teller {
    partition: Partition,
    socket: PathBuf,
    /// What processes before this one told.
    before: Reported,
    monitor: Option<Monitor>,
    /// The process that was told last.
    qemu: Option<i32>,
    /// The last event that it was told of, or was to be told of.
    reported: u64,
    /// The last event that the process before it was told of. What was lost until then and is
    /// poisoned no more never was this one's.
    before_it: u64,
}

impl Teller {
    /// Tells what is new to the QEMU that is there now, as long as it is not to stop.
    fn look(&mut self, stop: &Arc<Stop>, note: &mut impl FnMut(Reported)) -> io::Result<()> {
        let device = self.partition.device();
        let event = device.poison_events();
        if event == 0 {
            return Ok(());
        }
        if self.monitor.as_ref().is_some_and(Monitor::hung_up) {
            self.monitor = None;
        }
        let monitor = match &mut self.monitor {
            Some(monitor) => monitor,
            none => none.insert(Monitor::connect(&self.socket, stop)?),
        };
        let qemu = monitor.qemu();
        if self.qemu.replace(qemu) != Some(qemu) {
            self.before_it = self.before_it.max(std::mem::take(&mut self.reported));
        }
        if self.reported == event {
            return Ok(());
        }
        let (mut news, missed) = self.partition.poisonings(self.reported.max(self.before_it));
        if self.reported < self.before_it {
            let still = self.partition.poison();
            news.extend(still.into_iter().filter(|poisoned| poisoned.event <= self.before_it));
        }
        // Numbers of events are a process's own: what was found poisoned when it began may be what
        // was told before.
        let old = |poisoned: &Poisoned| {
            poisoned.cause == Cause::Found
                && self.before.qemu == qemu
                && self.before.blocks.contains(&poisoned.dpa)
        };
        news.retain(|poisoned| poisoned.event > self.reported && !old(poisoned));
        news.sort_by_key(|poisoned| poisoned.event);
        let said = news.iter().try_for_each(|poisoned| {
            if stop.get().is_some() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            monitor.tell(poisoned, device.set())?;
            self.reported = poisoned.event;
            note(Reported { qemu, blocks: [poisoned.dpa].into() });
            Ok(())
        });
        match said {
            Ok(()) => {
                self.reported = self.reported.max(event);
                if missed > 0 {
                    let socket = self.socket.display();
                    tracing::warn!(%socket, "QEMU was not told of {missed} blocks that were poisoned and written long ago");
                }
            }
            Err(_) => self.monitor = None,
        }
        said
    }
}

impl Monitor {
    /// Tells of one block: each device that has a part of it.
    fn tell(&mut self, poisoned: &Poisoned, set: Option<Interleave>) -> io::Result<()> {
        for (number, range) in parts(poisoned.dpa..poisoned.dpa + poisoned.length, set) {
            let (device, dpa) = (format!("{BASE_DEVICE}{number}"), range.start);
            let list = json!({ "path": device, "start": dpa, "length": range.end - dpa });
            self.execute("cxl-inject-poison", &list)?;
            // An uncorrectable media error, met by a read of the host.
            let record = json!({
                "path": device, "log": "failure", "flags": 1, "dpa": dpa, "descriptor": 1, "type": 0,
                "sub-type": 0, "transaction-type": 1,
            });
            self.execute("cxl-inject-general-media-event", &record)?;
        }
        Ok(())
    }
}

/// The numbers of QEMU's devices that hold a range of the base window, each with what it holds.
fn parts(range: Range<u64>, set: Option<Interleave>) -> Vec<(u32, Range<u64>)> {
    let Some(set) = set else { return vec![(0, range)] };
    let parts = (0..set.ways()).map(|target| (target, set.target_range(target, &range)));
    parts.filter(|(_, part)| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use serde_json::Value;

    use super::*;
    use lamina_device::device::{Device, DeviceConfig, PartitionConfig};
    use lamina_store::image::Image;

    /// A connection to QEMU's side that has been greeted, and the commands that come.
    fn connected(listener: &UnixListener) -> (UnixStream, impl Iterator<Item = Value>) {
        let (mut stream, _) = listener.accept().unwrap();
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        writeln!(stream, "{}", json!({ "QMP": { "version": {}, "capabilities": [] } })).unwrap();
        (stream, lines.map_while(Result::ok).map(|line| serde_json::from_str(&line).unwrap()))
    }

    /// Answers as QEMU does: the commands of one connection, until `count` came.
    fn qemu(listener: &UnixListener, count: usize) -> Vec<Value> {
        let (mut stream, lines) = connected(listener);
        let mut commands = Vec::new();
        for command in lines.take(count) {
            writeln!(stream, "{}", json!({ "event": "RESUME" })).unwrap();
            let refused = command["arguments"]["start"] == 8192;
            let answer =
                if refused { json!({ "error": { "desc": "overlap" } }) } else { json!({ "return": {} }) };
            writeln!(stream, "{answer}").unwrap();
            commands.push(command);
        }
        commands
    }

    #[test]
    fn each_device_of_a_set_is_told_its_part() {
        let parts = |set: &str| parts(8192..12288, set.parse().ok());
        assert_eq!(parts(""), [(0, 8192..12288)]);
        assert_eq!(parts("2x256"), [(0, 4096..6144), (1, 4096..6144)]);
        assert_eq!(parts("4x4K"), [(2, 0..4096)]);
        assert_eq!(parts("4x2K"), [(0, 2048..4096), (1, 2048..4096)]);
    }

    /// What is told, in pairs of commands: the DPAs.
    fn reported(commands: &[Value]) -> Vec<u64> {
        let (capabilities, pairs) = commands.split_first().unwrap();
        assert_eq!(capabilities["execute"], "qmp_capabilities");
        let dpa = |pair: &[Value]| {
            let [list, event] = pair else { panic!("half a pair: {pair:?}") };
            let names = ["cxl-inject-poison", "cxl-inject-general-media-event"];
            assert_eq!([&list["execute"], &event["execute"]], names);
            assert_eq!(list["arguments"]["start"], event["arguments"]["dpa"]);
            list["arguments"]["start"].as_u64().unwrap()
        };
        pairs.chunks(2).map(dpa).collect()
    }

    /// A reporter for the whole of `device`, and what it notes.
    fn reporter(
        device: &Arc<Device>,
        socket: &Path,
        before: Reported,
    ) -> (PoisonReporter, std::sync::mpsc::Receiver<Reported>) {
        let (noted, notes) = std::sync::mpsc::channel();
        let note = move |reported| noted.send(reported).unwrap();
        let partition = Partition::first(Arc::clone(device));
        (PoisonReporter::start(partition, socket, before, note).unwrap(), notes)
    }

    #[test]
    fn each_poisoning_is_told_once_also_to_a_qemu_that_comes_late_or_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 4 << 20)).unwrap());
        device.inject_poison(0, 4096).unwrap();
        device.inject_poison(8192, 4096).unwrap();
        let (reporter, notes) = reporter(&device, &socket, Reported::default());
        thread::sleep(PAUSE * 3);
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(reported(&qemu(&listener, 5)), [0, 8192]);
        let mut all = Reported::default();
        notes.iter().take(2).for_each(|reported| all.add(reported));
        assert_eq!(all, Reported { qemu: std::process::id().cast_signed(), blocks: [0, 8192].into() });
        device.inject_poison(4096, 4096).unwrap();
        assert_eq!(reported(&qemu(&listener, 3)), [4096]);
        drop((listener, reporter));
    }

    #[test]
    fn another_qemu_is_told_of_everything_and_the_next_process_tells_only_what_is_new() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let open = || {
            let config = DeviceConfig::new(1 << 20, 4 << 20);
            let image = match Image::open(&image).unwrap() {
                Some(image) => image,
                None => Image::create(&image, config.superblock()).unwrap(),
            };
            Arc::new(Device::open(image, &config).unwrap())
        };
        let device = open();
        device.inject_poison(0, 8192).unwrap();
        drop(device);
        // Found poisoned, of which one block was told of before.
        let device = open();
        device.inject_poison(8192, 4096).unwrap();
        let this = std::process::id().cast_signed();
        for (before, expected) in [(this, vec![4096, 8192]), (this + 1, vec![0, 4096, 8192])] {
            let socket = folder.path().join(format!("qmp-{before}"));
            let listener = UnixListener::bind(&socket).unwrap();
            let before = Reported { qemu: before, blocks: [0, 8192].into() };
            let (_reporter, _notes) = reporter(&device, &socket, before);
            assert_eq!(reported(&qemu(&listener, 1 + 2 * expected.len())), expected);
            drop(listener);
        }
    }

    #[test]
    fn a_guest_is_told_of_its_own_partition() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let part = |name: &str| PartitionConfig {
            name: name.to_owned(),
            base_bytes: 1 << 20,
            views_bytes: 4 << 20,
            quota_bytes: None,
        };
        let config = DeviceConfig::divided(vec![part("a"), part("b")]);
        let device = Arc::new(Device::new(config).unwrap());
        device.inject_poison(4096, 4096).unwrap();
        device.inject_poison((1 << 20) + 8192 * 2, 4096).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let partition = Partition::named(&device, "b").unwrap();
        let reporter = PoisonReporter::start(partition, &socket, Reported::default(), |_| ()).unwrap();
        assert_eq!(reported(&qemu(&listener, 3)), [8192 * 2]);
        drop((listener, reporter));
    }

    #[test]
    fn a_loss_is_told_that_was_mended_before_anybody_looked() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 4 << 20)).unwrap());
        let lose = |block: u64| {
            device.inject_poison(block * 4096, 4096).unwrap();
            device.write_base(block * 4096, &[1; 4096]).unwrap();
        };
        lose(5);
        device.inject_poison(7 * 4096, 4096).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let (reporter, _notes) = reporter(&device, &socket, Reported::default());
        assert_eq!(reported(&qemu(&listener, 5)), [5 * 4096, 7 * 4096]);
        // Another connection to the same process.
        lose(6);
        assert_eq!(reported(&qemu(&listener, 3)), [6 * 4096]);
        assert_eq!(device.poison().len(), 1);
        drop((listener, reporter));
    }

    #[test]
    fn a_reporter_that_is_to_stop_tells_of_no_further_block() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 4 << 20)).unwrap());
        device.inject_poison(0, 8192).unwrap();
        let (reporter, notes) = reporter(&device, &socket, Reported::default());
        let (mut qemu, commands) = connected(&listener);
        let mut reported_of = Vec::new();
        for command in commands {
            // While it waits for the answer that ends the first block.
            if command["execute"] == "cxl-inject-general-media-event" {
                reporter.stop();
            }
            writeln!(qemu, "{}", json!({ "return": {} })).unwrap();
            reported_of.push(command);
        }
        assert_eq!(reported(&reported_of), [0]);
        drop(reporter);
        let blocks: Vec<_> = notes.iter().map(|reported| reported.blocks).collect();
        assert_eq!(blocks, [[0].into()]);
    }

    #[test]
    fn what_was_told_is_remembered_of_one_qemu_up_to_a_bound() {
        let mut all = Reported::default();
        let reported = |qemu, blocks: &[u64]| Reported { qemu, blocks: blocks.iter().copied().collect() };
        for block in 0..=MAX_REPORTED as u64 {
            all.add(reported(7, &[block]));
        }
        assert_eq!(all.blocks.len(), MAX_REPORTED);
        all.add(reported(8, &[4096]));
        assert_eq!(all, reported(8, &[4096]));
    }
}
