//! Telling a guest of poison: through QEMU's monitor (QMP), as a CXL device tells its host.
//!
//! * For each poisoning, QEMU's memory device is given the block's DPA in its poison list (`cxl-inject-poison`) and a general media event record of an
//!   uncorrectable error (`cxl-inject-general-media-event`), which interrupts the guest: its kernel reads the log and traces `cxl_general_media`.
//! * QEMU may not listen yet, or be started again: the reporter connects until it can. What it has told is not told twice on one connection to the next.
//! * QEMU's list keeps what was told: it has no command for poison that a write cleared. At most 256 entries fit it; the event is sent all the same.

use std::io::{self, BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lamina_abi::Interleave;
use serde_json::{Value, json};

use crate::device::Device;
use crate::device::poison::Poisoned;

/// The object of QEMU's device that holds the base window, or its first lane: `-device cxl-type3,id=mem0`; the other lanes follow.
const BASE_DEVICE: &str = "/machine/peripheral/mem";
/// How often it is looked whether there is anything to tell.
const PAUSE: Duration = Duration::from_millis(100);
/// How long QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Tells one QEMU of a device's poison, until it is dropped.
#[derive(Debug)]
pub struct PoisonReporter {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PoisonReporter {
    /// Tells QEMU at the monitor socket `socket` of every poisoning after number `told`.
    ///
    /// # Errors
    ///
    /// When a thread cannot be made.
    pub fn start(device: Arc<Device>, socket: &Path, told: u64) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, socket) = (Arc::clone(&stop), socket.to_owned());
        let run = move || report(&device, &socket, told, &stopped);
        let thread = Some(thread::Builder::new().name("qmp".to_owned()).spawn(run)?);
        Ok(Self { stop, thread })
    }
}

impl Drop for PoisonReporter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
    }
}

fn report(device: &Device, socket: &Path, mut told: u64, stop: &AtomicBool) {
    let mut monitor = None;
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(PAUSE);
        if device.poison_events() <= told {
            continue;
        }
        let mut news = device.poison();
        news.retain(|poisoned| poisoned.event > told);
        news.sort_by_key(|poisoned| poisoned.event);
        let said = news.iter().try_for_each(|poisoned| {
            let monitor = match &mut monitor {
                Some(monitor) => monitor,
                none => none.insert(Monitor::connect(socket)?),
            };
            monitor.tell(poisoned, device.set())?;
            told = poisoned.event;
            Ok::<_, io::Error>(())
        });
        if let Err(why) = said {
            tracing::debug!(socket = %socket.display(), "QEMU is not told of poison yet: {why}");
            monitor = None;
        }
    }
}

/// A connection to QEMU's monitor.
struct Monitor {
    reading: BufReader<UnixStream>,
    writing: UnixStream,
}

impl Monitor {
    fn connect(socket: &Path) -> io::Result<Self> {
        let writing = UnixStream::connect(socket)?;
        writing.set_read_timeout(Some(PATIENCE))?;
        writing.set_write_timeout(Some(PATIENCE))?;
        let mut monitor = Self { reading: BufReader::new(writing.try_clone()?), writing };
        let greeting = monitor.line()?;
        if greeting.get("QMP").is_none() {
            return Err(io::Error::other(format!("no QMP greeting: {greeting}")));
        }
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

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

    /// Executes a command. That QEMU refuses is logged: it may have the entry already, or no more room for one.
    fn execute(&mut self, command: &str, arguments: &Value) -> io::Result<()> {
        writeln!(self.writing, "{}", json!({ "execute": command, "arguments": arguments }))?;
        loop {
            let answer = self.line()?;
            if let Some(refusal) = answer.get("error") {
                tracing::warn!(command, "QEMU refuses: {}", refusal["desc"].as_str().unwrap_or_default());
                return Ok(());
            }
            if answer.get("return").is_some() {
                return Ok(());
            }
        }
    }

    fn line(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.reading.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// The numbers of QEMU's devices that hold a range of the base window, each with what it holds.
fn parts(range: Range<u64>, set: Option<Interleave>) -> Vec<(u32, Range<u64>)> {
    let Some(set) = set else { return vec![(0, range)] };
    let parts = (0..set.ways()).map(|lane| (lane, set.lane_range(lane, &range)));
    parts.filter(|(_, part)| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::device::DeviceConfig;

    /// Answers as QEMU does: the commands of one connection, until `count` came.
    fn qemu(listener: &UnixListener, count: usize) -> Vec<Value> {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        writeln!(stream, "{}", json!({ "QMP": { "version": {}, "capabilities": [] } })).unwrap();
        let mut commands = Vec::new();
        while commands.len() < count {
            let Some(Ok(line)) = lines.next() else { break };
            let command: Value = serde_json::from_str(&line).unwrap();
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

    #[test]
    fn each_poisoning_is_told_once_also_to_a_qemu_that_comes_late_or_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 4 << 20)).unwrap());
        device.inject_poison(0, 4096).unwrap();
        device.inject_poison(8192, 4096).unwrap();
        // What was told by another process is not told again.
        let reporter = PoisonReporter::start(Arc::clone(&device), &socket, 1).unwrap();
        thread::sleep(PAUSE * 3);
        let listener = UnixListener::bind(&socket).unwrap();
        let starts = |commands: &[Value]| -> Vec<(String, Value)> {
            let name = |command: &Value| command["execute"].as_str().unwrap().to_owned();
            let place = |command: &Value| {
                let arguments = &command["arguments"];
                if arguments["start"].is_null() {
                    arguments["dpa"].clone()
                } else {
                    arguments["start"].clone()
                }
            };
            commands.iter().map(|command| (name(command), place(command))).collect()
        };
        let pair = |dpa: u64| {
            [("cxl-inject-poison", dpa), ("cxl-inject-general-media-event", dpa)]
                .map(|(name, dpa)| (name.to_owned(), json!(dpa)))
        };
        assert_eq!(starts(&qemu(&listener, 3)[1..]), pair(8192));
        device.inject_poison(4096, 4096).unwrap();
        assert_eq!(starts(&qemu(&listener, 3)[1..]), pair(4096));
        drop(reporter);
    }
}
