//! Stopping beside peers that hold on: monitors, disks, askers and API clients that never come to
//! an end; and while workers die. A stop is clean all the same, and what was stored before it is
//! there after it.
//!
//! Each stores into the mount and leaves the pages dirty, so that they are lost if the stop does
//! not come to settle them.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vm_memory::{Bytes, GuestAddress};

use crate::common::{Place, Run, Window, answer, eventually, lamina, noise, request, within};
use crate::deaths::worker;
use crate::disk_driver::{DATA, Driver, IN, Part};

/// A stop by the holder's `kill -9` comes after 30 s, and is no success.
const STOP: Duration = Duration::from_secs(25);
/// Where the store goes that must not be lost.
const STORED_AT: u64 = 5 << 20;

/// A device on an image, beside which somebody holds on.
struct Device {
    run: Run,
    place: Place,
    base: Window,
    bytes: Vec<u8>,
}

impl Device {
    fn start(change: impl FnOnce(&Place, &mut Command)) -> Self {
        let place = Place::new();
        let mut command = place.serve(&["--views-capacity", "64M", "--image", &place.text("image")]);
        change(&place, &mut command);
        let run = Run::start(&mut command);
        let base = Window::open(&place.path("mount/base"));
        Self { run, place, base, bytes: noise(3, 100_000) }
    }

    fn small(change: impl FnOnce(&Place, &mut Command)) -> Self {
        Self::start(|place, command| change(place, command.args(["--capacity", "32M"])))
    }

    fn poison(&self) {
        let stream = UnixStream::connect(self.place.path("run/api.sock")).unwrap();
        let block = json!({ "offset": 0, "length": 4096 }).to_string();
        assert_eq!(answer(stream, &request("POST", "/poison/inject", &block)).0, 200);
    }

    /// Stores, and leaves the pages dirty.
    fn store(&mut self) {
        self.base.store(STORED_AT, &self.bytes);
    }

    /// Stores, stops the device, and looks what is there afterwards.
    fn stop(mut self) {
        self.store();
        self.stop_now();
    }

    /// Stops the device, and looks whether what was stored is there afterwards.
    fn stop_now(self) {
        self.stop_by(Signal::SIGTERM);
    }

    fn stop_by(self, signal: Signal) {
        let begun = Instant::now();
        self.run.signal(signal);
        let Self { run, place, base, bytes } = self;
        let status = run.end();
        let took = begun.elapsed();
        assert!(status.success(), "{status} after {took:?}");
        assert!(took < STOP, "{took:?}");
        drop(base);
        let again = Run::start(&mut place.serve(&["--image", &place.text("image")]));
        let found = Window::open(&place.path("mount/base")).read(STORED_AT, bytes.len());
        assert!(found == bytes, "stores are lost");
        drop(again);
    }
}

/// Has a program begin with a signal heeded or ignored, however the tests were started.
pub(crate) fn begin_with(command: &mut Command, signal: Signal, handler: SigHandler) {
    // SAFETY: between fork and exec one system call is made, and no memory is allocated. No handler
    // of this process is lost: the process is another one.
    unsafe { command.pre_exec(move || Ok(nix::sys::signal::signal(signal, handler).map(drop)?)) };
}

#[test]
fn a_terminal_that_is_closed_stops_a_device() {
    within(120, || {
        let mut device = Device::small(|_, command| begin_with(command, Signal::SIGHUP, SigHandler::SigDfl));
        device.store();
        device.stop_by(Signal::SIGHUP);
    });
}

#[test]
fn a_device_that_is_to_outlive_its_terminal_does() {
    within(120, || {
        let device = Device::small(|_, command| begin_with(command, Signal::SIGHUP, SigHandler::SigIgn));
        let status = std::fs::read_to_string(format!("/proc/{}/status", device.run.child.id())).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        assert_eq!(ignored >> (Signal::SIGHUP as i32 - 1) & 1, 1, "{status}");
        device.run.signal(Signal::SIGHUP);
        device.poison();
        device.stop();
    });
}

/// The largest memory of the device's worker, in KiB, without what it shares.
fn anonymous_kib(run: &Run) -> u64 {
    let worker = worker(run.child.id());
    let status = std::fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A monitor at `socket` that does `hold` with each who connects, and counts what that tells.
fn monitor(
    socket: &Path,
    hold: impl Fn(UnixStream, &AtomicU64) + Send + Sync + 'static,
) -> (Arc<AtomicU64>, Arc<AtomicBool>) {
    let listener = UnixListener::bind(socket).unwrap();
    let (reported, connected) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, came, hold) = (Arc::clone(&reported), Arc::clone(&connected), Arc::new(hold));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (hold, count) = (Arc::clone(&hold), Arc::clone(&count));
            came.store(true, Ordering::Relaxed);
            thread::spawn(move || hold(stream.unwrap(), &count));
        }
    });
    (reported, connected)
}

const GREETING: &[u8] = b"{\"QMP\":{\"version\":{},\"capabilities\":[]}}\n";

#[test]
fn a_monitor_whose_line_never_ends_is_cut_off_and_holds_up_no_stop() {
    const BOUND_KIB: u64 = 32 << 10;
    within(120, || {
        let device = Device::small(|_, _| {});
        let before = anonymous_kib(&device.run);
        let (sent, _) = monitor(&device.place.path("run/qmp.sock"), |mut stream, sent| {
            let text = vec![b'x'; 1 << 20];
            while let Ok(taken) = stream.write(&text) {
                sent.fetch_add(taken as u64, Ordering::Relaxed);
            }
        });
        device.poison();
        // Who keeps the line takes far more than this in that time.
        eventually("a monitor that is heard", || sent.load(Ordering::Relaxed) > 0);
        let mut most = 0;
        for _ in 0..20 {
            most = most.max(anonymous_kib(&device.run));
            thread::sleep(Duration::from_millis(50));
        }
        assert!(most < before + BOUND_KIB, "a line took {before} to {most} KiB");
        device.stop();
    });
}

#[test]
fn a_monitor_that_tells_of_events_without_end_holds_up_no_stop() {
    within(120, || {
        let device = Device::small(|_, _| {});
        let (reported, _) = monitor(&device.place.path("run/qmp.sock"), |mut stream, reported| {
            let _ = stream.write_all(GREETING);
            while stream.write_all(b"{\"event\":\"RESUME\"}\n").is_ok() {
                reported.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
        });
        device.poison();
        eventually("events", || reported.load(Ordering::Relaxed) > 10);
        device.stop();
    });
}

#[test]
fn a_monitor_that_never_answers_or_takes_nothing_holds_up_no_stop() {
    within(240, || {
        for greets in [false, true] {
            let device = Device::small(|_, _| {});
            let (_, connected) = monitor(&device.place.path("run/qmp.sock"), move |mut stream, _| {
                if greets {
                    let _ = stream.write_all(GREETING);
                }
                thread::sleep(Duration::from_secs(300));
                drop(stream);
            });
            device.poison();
            eventually("a connection", || connected.load(Ordering::Relaxed));
            device.stop();
        }
    });
}

#[test]
fn a_monitor_that_takes_no_connection_holds_up_no_stop() {
    within(120, || {
        let device = Device::small(|_, _| {});
        let socket = device.place.path("run/qmp.sock");
        // Room for one who is not taken.
        let listener =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None);
        let listener = listener.unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _first = UnixStream::connect(&socket).unwrap();
        device.poison();
        thread::sleep(Duration::from_millis(500));
        device.stop();
    });
}

#[test]
fn a_monitor_that_goes_midway_holds_up_no_stop() {
    within(120, || {
        let device = Device::small(|_, _| {});
        let (gone, _) = monitor(&device.place.path("run/qmp.sock"), |mut stream, gone| {
            let _ = stream.write_all(GREETING);
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(b"{\"ret");
            gone.fetch_add(1, Ordering::Relaxed);
        });
        device.poison();
        eventually("a monitor that is tried again", || gone.load(Ordering::Relaxed) > 1);
        device.stop();
    });
}

#[test]
fn a_chain_that_spans_the_disk_is_left_undone_by_a_stop() {
    // As many bytes as a chain may have, which take a good second to read.
    const COUNT: usize = 250;
    const EACH: u32 = 12 << 20;
    within(180, || {
        let capacity = (COUNT as u64 * u64::from(EACH)).to_string();
        let mut device = Device::start(|place, command| {
            let disks = place.text("disks");
            command.args(["--capacity", &capacity, "--store-capacity", "256M", "--vhost-user", &disks]);
        });
        let mut driver = Driver::connect(&device.place.path("disks/base.sock"));
        driver.header(DATA, IN, 0);
        let place = DATA + (1 << 20);
        let mut parts = vec![Part { at: DATA, length: 16, write: false }];
        parts.extend((0..COUNT).map(|_| Part { at: place, length: EACH, write: true }));
        parts.push(Part { at: DATA + 64, length: 1, write: true });
        driver.submit(&parts, Some(DATA + 4096));
        driver.memory.write_obj(0xab_u8, GuestAddress(place)).unwrap();
        device.store();
        driver.kick();
        eventually("the first bytes", || driver.memory.read_obj::<u8>(GuestAddress(place)).unwrap() == 0);
        device.stop_now();
        // It is not given back: another server of the disk does it anew.
        assert_eq!(driver.used_index(), 0);
    });
}

#[test]
fn clients_that_never_take_their_answers_hold_up_no_stop() {
    within(120, || {
        let device = Device::small(|_, _| {});
        let requested = request("GET", "/metrics", "").replace("Connection: close\r\n", "").repeat(2000);
        let deaf: Vec<_> = (0..20)
            .map(|_| {
                let stream = UnixStream::connect(device.place.path("run/api.sock")).unwrap();
                stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
                let mut left = requested.as_bytes();
                while let Ok(taken) = (&stream).write(left) {
                    left = &left[taken..];
                    if left.is_empty() {
                        break;
                    }
                }
                stream
            })
            .collect();
        device.stop();
        drop(deaf);
    });
}

/// Sends a message to the holder, as `lamina` does.
fn tell_holder(place: &Place, text: &str, with: &[std::os::fd::BorrowedFd<'_>]) -> UnixStream {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let stream = UnixStream::connect(place.path("run/holder.sock")).unwrap();
    let length = u32::try_from(text.len()).unwrap().to_le_bytes();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(with.is_empty() || control.push(SendAncillaryMessage::ScmRights(with)));
    let head = [std::io::IoSlice::new(&length)];
    assert_eq!(sendmsg(&stream, &head, &mut control, SendFlags::empty()), Ok(4));
    (&stream).write_all(text.as_bytes()).unwrap();
    stream
}

#[test]
fn an_asker_that_takes_its_answer_bit_by_bit_holds_up_no_stop() {
    within(120, || {
        let device = Device::small(|_, _| {});
        // It is refused by its name, which is more than a socket takes that nobody reads.
        let name = json!({ "Upgrade": "x".repeat(8 << 20) }).to_string();
        let mut asker = tell_holder(&device.place, &name, &[]);
        let mut head = [0; 4];
        asker.read_exact(&mut head).unwrap();
        thread::spawn(move || {
            // As much as makes room for a little more each time.
            let mut some = vec![0; 64 << 10];
            while asker.read(&mut some).is_ok_and(|taken| taken > 0) {
                thread::sleep(Duration::from_secs(1));
            }
        });
        device.stop();
    });
}

#[test]
fn a_snapshot_into_a_pipe_that_nobody_reads_holds_up_no_stop() {
    within(120, || {
        let mut device = Device::small(|_, _| {});
        device.base.store(0, &noise(9, 4 << 20));
        // So that the pages are there when they are stored to anew.
        device.store();
        device.bytes = noise(4, device.bytes.len());
        let (reading, writing) = std::io::pipe().unwrap();
        let mut asker = tell_holder(&device.place, "\"Save\"", &[writing.as_fd()]);
        drop(writing);
        // It has begun when there is something to read.
        let mut ready = [rustix::event::PollFd::new(&reading, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        let begun = rustix::event::poll(&mut ready, Some(&timeout)).unwrap();
        if begun == 0 {
            asker.set_nonblocking(true).unwrap();
            let mut said = vec![0; 4096];
            let said =
                asker.read(&mut said).map(|bytes| String::from_utf8_lossy(&said[..bytes]).into_owned());
            panic!("no snapshot is begun: {said:?}");
        }
        device.stop();
        drop((asker, reading));
    });
}

/// Stops a device whose worker sleeps, so that nothing of what is dirty is kept yet, does
/// `meanwhile` with that worker, and looks whether all is there afterwards: what the device said.
fn stopped_while(meanwhile: impl FnOnce(&Run, &Place, Pid)) -> String {
    let mut device = Device::small(|_, _| {});
    device.bytes = noise(5, 20 << 20);
    // The store below loads no page then.
    device.store();
    device.base.sync();
    device.bytes = noise(6, 20 << 20);
    let sleeper = Pid::from_raw(worker(device.run.child.id()));
    kill(sleeper, Signal::SIGSTOP).unwrap();
    device.store();
    device.run.signal(Signal::SIGTERM);
    thread::sleep(Duration::from_millis(500));
    meanwhile(&device.run, &device.place, sleeper);
    let Device { mut run, place, base, bytes } = device;
    let said = run.log();
    let status = run.end();
    assert!(status.success(), "{status}: {said}");
    drop(base);
    let again = Run::start(&mut place.serve(&["--image", &place.text("image")]));
    let found = Window::open(&place.path("mount/base")).read(STORED_AT, bytes.len());
    let differs = |at: &usize| found[*at..].iter().take(4096).ne(bytes[*at..].iter().take(4096));
    let lost = (0..bytes.len()).step_by(4096).filter(differs).count();
    assert_eq!(lost, 0, "pages are lost: {said}");
    drop(again);
    said
}

#[test]
fn workers_that_die_while_they_stop_are_followed_by_others_that_lose_no_store() {
    within(120, || {
        let said = stopped_while(|run, _, mut dying| {
            for _ in 0..3 {
                kill(dying, Signal::SIGKILL).unwrap();
                let before = dying;
                eventually("another worker", || {
                    dying = Pid::from_raw(worker(run.child.id()));
                    dying != before
                });
            }
        });
        assert_eq!(said.matches("the worker died, starting another").count(), 3, "{said}");
    });
}

#[test]
fn an_upgrade_of_a_device_that_is_being_stopped_is_refused_and_loses_no_store() {
    within(120, || {
        let said = stopped_while(|_, place, sleeper| {
            let refused = lamina(&["upgrade", "--run-dir", &place.text("run")]).output().unwrap();
            let why = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && why.contains("is being stopped"), "{why}");
            kill(sleeper, Signal::SIGCONT).unwrap();
        });
        assert!(!said.contains("the worker died"), "{said}");
    });
}

#[test]
fn a_last_sync_takes_longer_than_a_worker_may_say_nothing_and_loses_no_store() {
    within(120, || {
        let slow = [("LAMINA_FAULT_SYNC", "14000"), ("LAMINA_FAULT_STOP", "7000")];
        let device = Device::small(|_, command| {
            command.envs(slow);
        });
        device.stop();
    });
}

#[test]
fn an_upgrade_to_a_program_that_never_says_what_it_is_holds_up_no_stop() {
    within(120, || {
        let mut device = Device::small(|_, _| {});
        let sleeper = device.place.text("sleeper");
        // As in the tests of deaths, another process writes it.
        let write = "printf '#!/bin/sh\\nexec sleep 60\\n' >\"$0\" && chmod 700 \"$0\"";
        assert!(Command::new("sh").args(["-c", write, &sleeper]).status().unwrap().success());
        let upgrade = json!({ "Upgrade": sleeper }).to_string();
        let first = tell_holder(&device.place, &upgrade, &[]);
        let mut head = [0; 4];
        thread::sleep(Duration::from_millis(500));
        let mut second = tell_holder(&device.place, &upgrade, &[]);
        second.read_exact(&mut head).unwrap();
        let mut said = vec![0; u32::from_le_bytes(head) as usize];
        second.read_exact(&mut said).unwrap();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.contains("another upgrade is being made"), "{said}");
        device.store();
        let begun = Instant::now();
        let mut stop = tell_holder(&device.place, "\"Stop\"", &[]);
        stop.read_exact(&mut head).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        device.stop_now();
        drop(first);
    });
}

#[test]
fn a_stop_during_an_upgrade_to_a_program_that_hangs_loses_no_store() {
    within(120, || {
        let mut device = Device::small(|_, command| {
            command.env("LAMINA_FAULT_STOP", "6000");
        });
        // Its pages are there, so that no store waits for who answers.
        device.store();
        device.base.sync();
        device.bytes = noise(6, 100_000);
        let hangs = device.place.text("hangs");
        let text = "#!/bin/sh\n[ \"$1\" = --version ] && echo lamina 0 && exit\nexec sleep 60\n";
        // As in the tests of deaths, another process writes it.
        let write = "printf %s \"$1\" >\"$0\" && chmod 700 \"$0\"";
        assert!(Command::new("sh").args(["-c", write, &hangs, text]).status().unwrap().success());
        let before = worker(device.run.child.id());
        let upgrade = tell_holder(&device.place, &json!({ "Upgrade": hangs }).to_string(), &[]);
        eventually("the end of the worker before", || !Path::new(&format!("/proc/{before}")).exists());
        thread::sleep(Duration::from_millis(500));
        device.stop();
        drop(upgrade);
    });
}

#[test]
fn a_client_that_connects_where_nobody_takes_connections_is_told() {
    within(60, || {
        let place = Place::new();
        let socket = place.path("s");
        let listener =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None)
                .unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _first = UnixStream::connect(&socket).unwrap();
        let said = lamina(&["stats", "--api", socket.to_str().unwrap()]).output().unwrap();
        assert!(!said.status.success());
    });
}
