//! Four processes of the host and two guests on one pool in a device's base window, which are
//! killed, or stopped for a while: ten minutes of it, and the guests booted, with `LAMINA_LONG`;
//! else some seconds, and the guests' program on the host.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lamina_guest::{Event, Plan, SoakPlan};
use lamina_pool::local::Processes;
use lamina_pool::{Geometry, Pool, PoolError, local, soak};
use lamina_run::daemon::{Ready, SharedDaemon};
use lamina_run::visit::Visit;
use rustix::process::{Pid, Signal, kill_process};

const WORKER: &str = "LAMINA_SOAK_WORKER";
const WORKERS: usize = 4;
/// The guests' numbers, which are claimed for them; the processes have those below.
const GUESTS: [u32; 2] = [6, 7];
/// A guest that would have less time than this is not booted any more.
const MIN_GUEST_TIME: Duration = Duration::from_secs(90);

/// What a process of the host does until it is killed. It is a test that does nothing unless it is
/// one.
#[test]
fn worker() {
    let Some(path) = std::env::var_os(WORKER) else { return };
    soak::work(Path::new(&path)).unwrap();
}

fn start(path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "soak::worker", "--nocapture"])
        .env(WORKER, path)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended just now.
        let _ = kill_process(pid, signal);
    }
}

/// One guest's number, and what became of those that had it.
#[derive(Default)]
struct GuestSlot {
    /// The process while it has reported and not ended; zero otherwise.
    works: AtomicU32,
    booted: AtomicU32,
    killed: AtomicU32,
    stopped: AtomicU32,
    /// Turns and what they did, of guests that ended or died: as they told last.
    told: Mutex<Vec<Event>>,
    problems: Mutex<Vec<String>>,
}

/// Takes a guest's number. What a thread starts just now has what the guest before had open, its
/// lock too, until it is a program of its own.
fn claim(base: &Path, node: u32) -> Processes {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let file = std::fs::File::options().read(true).write(true).open(base).unwrap();
        match Processes::claim(file, 8, Some(node)) {
            Err(PoolError::Node { .. }) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            claimed => return claimed.unwrap(),
        }
    }
}

/// Has guests of a number come one after the other until the end.
fn run_guests(
    slot: &GuestSlot,
    node: u32,
    base: &Path,
    device: &Ready,
    end: Instant,
    long: bool,
    logs: &Path,
) {
    let least = if long { MIN_GUEST_TIME } else { Duration::from_secs(2) };
    while Instant::now() + least < end {
        let number = slot.booted.fetch_add(1, Ordering::Relaxed);
        let left = end - Instant::now();
        // Its own clock begins when it is up.
        let seconds = if long { left.as_secs().saturating_sub(45).max(20) } else { left.as_secs().max(1) };
        let plan = SoakPlan { node, seed: u64::from(node) << 32 | u64::from(number), seconds };
        let visit = Visit {
            plan: Plan { views: Some(Vec::new()), read_base: false, soak: Some(plan), ..Plan::default() },
            files: Vec::new(),
            limit: left + Duration::from_secs(180),
            console: logs.join(format!("console-{node}-{number}.log")),
            // One alone makes no atomic steps under emulation.
            cpus: 2,
        };
        // Until its process has ended the number is taken, and then it is known to be dead.
        let claim = claim(base, node);
        let (mut pid, mut last) = (0, None);
        let own = AtomicU32::new(0);
        let begun = |begun_as: u32| own.store(begun_as, Ordering::Relaxed);
        let told = |event: Event, _: Duration| {
            pid = own.load(Ordering::Relaxed);
            match event {
                Event::Soaked { .. } => {
                    slot.works.store(pid, Ordering::Relaxed);
                    last = Some(event);
                }
                Event::Problem { step, message } => {
                    slot.problems.lock().unwrap().push(format!("guest {node}, {step}: {message}"));
                }
                _ => {}
            }
            Ok(())
        };
        let killed = slot.killed.load(Ordering::Relaxed);
        let made = if long {
            visit.make_told(device, begun, told)
        } else {
            visit.make_on_host_told(device, begun, told)
        };
        slot.works.store(0, Ordering::Relaxed);
        drop(claim);
        slot.told.lock().unwrap().extend(last);
        if let Err(why) = made
            && slot.killed.load(Ordering::Relaxed) == killed
        {
            slot.problems.lock().unwrap().push(format!("guest {node}: {why:#}"));
            return;
        }
    }
}

#[test]
fn processes_and_guests_that_are_killed_leave_a_pool_that_holds() {
    let long = std::env::var_os("LAMINA_LONG").is_some();
    let logs = tempfile::tempdir().unwrap();
    let device = SharedDaemon::start(&["--views", "", "--guest", "all=256M"]).unwrap();
    let export = device.export_of("all").unwrap();
    let base: PathBuf = export.base.path.clone();
    local::create(&base, &Geometry { nodes: 8, stripes: 4, groups: 8, chunks: 40, chunk_bytes: 16 << 10 })
        .unwrap();
    let end = Instant::now() + Duration::from_secs(if long { 600 } else { 12 });
    let slots: [GuestSlot; 2] = Default::default();
    let (mut killed, mut stopped) = (0_u32, 0_u32);
    thread::scope(|scope| {
        let running = slots.iter().zip(GUESTS).map(|(slot, node)| {
            let (base, export, logs) = (&base, &export, logs.path());
            scope.spawn(move || run_guests(slot, node, base, export, end, long, logs))
        });
        let running: Vec<_> = running.collect();
        let mut workers: Vec<Child> = (0..WORKERS).map(|_| start(&base)).collect();
        // A guest works for so long before something becomes of it.
        let pace = Duration::from_secs(if long { 45 } else { 2 });
        let mut due = Instant::now() + pace;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(u64::from(60 + killed * 37 % 90)));
            let which = (killed % 4) as usize;
            if killed.is_multiple_of(3) {
                // One that is stopped is waited for, whatever it holds, and goes on where it was.
                let pid = workers[(which + 1) % WORKERS].id();
                signal(pid, Signal::STOP);
                thread::sleep(Duration::from_millis(u64::from(killed * 53 % 200)));
                signal(pid, Signal::CONT);
                stopped += 1;
            }
            workers[which].kill().unwrap();
            // One that failed by itself has said why.
            assert_ne!(workers[which].wait().unwrap().code(), Some(101), "a worker failed");
            workers[which] = start(&base);
            killed += 1;
            if Instant::now() < due {
                continue;
            }
            due = Instant::now() + pace;
            for (slot, other) in slots.iter().zip([0, 1]) {
                let pid = slot.works.load(Ordering::Relaxed);
                if pid == 0 {
                    continue;
                }
                // One is stopped while the other is killed, by turns.
                let turn = slot.stopped.load(Ordering::Relaxed) + slot.killed.load(Ordering::Relaxed);
                if (turn + other).is_multiple_of(2) {
                    signal(pid, Signal::STOP);
                    thread::sleep(Duration::from_millis(if long { 3000 } else { 300 }));
                    signal(pid, Signal::CONT);
                    slot.stopped.fetch_add(1, Ordering::Relaxed);
                } else if Instant::now() + 2 * MIN_GUEST_TIME < end || !long {
                    slot.killed.fetch_add(1, Ordering::Relaxed);
                    slot.works.store(0, Ordering::Relaxed);
                    signal(pid, Signal::KILL);
                }
            }
        }
        for worker in &mut workers {
            worker.kill().unwrap();
            assert_ne!(worker.wait().unwrap().code(), Some(101), "a worker failed");
        }
        // Guests recover nobody: whoever died last is, by this one.
        let last = Pool::open(&base).unwrap();
        while running.iter().any(|guest| !guest.is_finished()) {
            last.serve().unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        last.leave().unwrap();
    });
    eprintln!("of {WORKERS} processes {killed} were killed, {stopped} stopped for a while");
    let mut problems = Vec::new();
    for (slot, node) in slots.iter().zip(GUESTS) {
        let count = |counter: &AtomicU32| counter.load(Ordering::Relaxed);
        let told = slot.told.lock().unwrap();
        let [booted, killed, stopped] = [&slot.booted, &slot.killed, &slot.stopped].map(count);
        eprintln!("guest {node}: booted {booted} times, killed {killed}, stopped {stopped}; told {told:?}");
        problems.extend(slot.problems.lock().unwrap().iter().cloned());
        let stored: u64 =
            told.iter().map(|event| if let Event::Soaked { stored, .. } = event { *stored } else { 0 }).sum();
        assert!(stored > 0 && booted > 0, "guest {node} did nothing: {problems:?}");
    }
    assert!(problems.is_empty(), "{problems:#?}");
    soak::settle(Pool::open(&base).unwrap(), || Pool::open(&base)).unwrap();
    assert!(killed > 5);
    device.stop().unwrap();
}
