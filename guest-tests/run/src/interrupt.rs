//! Ctrl-C during a job, or a terminal that is closed: what runs for the job is ended, so that it
//! fails, and what it made goes with it.

use std::fs;
use std::io;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The status of a program that was interrupted, as a shell tells it.
pub const INTERRUPTED: u8 = 130;
/// How often what runs is told to end: a job may just have started something.
const AGAIN: Duration = Duration::from_millis(200);

/// From now on the first SIGINT, SIGTERM or SIGHUP ends the processes that this one has started,
/// and says so in what this returns. The second one ends this process at once. A SIGHUP that is
/// ignored stays so: that is what `nohup` is for.
///
/// # Errors
/// No handler or no thread can be had.
pub fn heed() -> io::Result<Arc<AtomicBool>> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    if !is_ignored(SIGHUP) {
        signals.add_signal(SIGHUP)?;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    let said = Arc::clone(&interrupted);
    thread::Builder::new().name("signals".into()).spawn(move || {
        for _ in signals.forever() {
            if said.swap(true, Ordering::Relaxed) || thread::Builder::new().spawn(end_children).is_err() {
                exit(i32::from(INTERRUPTED));
            }
        }
    })?;
    Ok(interrupted)
}

/// Whether this process ignores a signal, as the kernel lists that.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn end_children() {
    loop {
        for child in children() {
            // It may have ended by itself.
            let _ = kill_process(child, Signal::TERM);
        }
        thread::sleep(AGAIN);
    }
}

/// The processes that this one has started and not waited for.
fn children() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    // Threads come and go.
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let numbers =
        |list: String| list.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<_>>();
    lists.flat_map(numbers).filter_map(Pid::from_raw).collect()
}
