//! Ctrl-C during a job, or a terminal that is closed: what runs for the job is ended, so that it
//! fails, and what it made goes with it.

use std::fs;
use std::io;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lamina_qemu::signals::is_ignored;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The status of a program that was interrupted, as a shell tells it.
pub const INTERRUPTED: u8 = 130;
/// How often what runs is told to end: a job may just have started something.
const AGAIN: Duration = Duration::from_millis(200);

/// From now on the first SIGINT, SIGTERM or SIGHUP ends the processes that this one has started,
/// and says so in what this returns. The second one ends this process at once, unless it is SIGHUP:
/// for a terminal that is closed, the shell sends that and then the kernel. A SIGHUP that is
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
        for signal in signals.forever() {
            if signal == SIGHUP && said.load(Ordering::Relaxed) {
                continue;
            }
            if said.swap(true, Ordering::Relaxed) || thread::Builder::new().spawn(end_children).is_err() {
                exit(i32::from(INTERRUPTED));
            }
        }
    })?;
    Ok(interrupted)
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

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use rustix::process::getpid;

    use super::*;

    #[test]
    fn a_terminal_that_is_closed_counts_once() {
        const CHILD: &str = "LAMINA_RUN_TEST_HANGUP";
        if env::var_os(CHILD).is_some() {
            let heeded = heed().unwrap();
            kill_process(getpid(), Signal::HUP).unwrap();
            while !heeded.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            kill_process(getpid(), Signal::HUP).unwrap();
            // Long enough for one that counts to be seen.
            thread::sleep(Duration::from_millis(500));
            println!("<still here>");
            kill_process(getpid(), Signal::TERM).unwrap();
            thread::sleep(Duration::from_secs(60));
            exit(0);
        }
        // Who starts the tests may have it ignored.
        let output = Command::new("env")
            .arg("--default-signal=HUP")
            .arg(env::current_exe().unwrap())
            .args(["--exact", "interrupt::tests::a_terminal_that_is_closed_counts_once", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("<still here>"), "{output:?}");
        assert_eq!(output.status.code(), Some(INTERRUPTED.into()), "{output:?}");
    }
}
