//! Programs that are asked something, and may never answer.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

/// What a program prints, and how it ends. If it does not end within `limit`, it is killed, with
/// whatever it started; if who asks ends before, so does it.
///
/// # Errors
/// What the system says, or that it took too long.
pub fn output(command: &mut Command, limit: Duration) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0);
    // SAFETY: between fork and exec one system call is made and no memory is allocated.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
    let child = command.spawn()?;
    let group = Pid::from_child(&child);
    let (done, ended) = mpsc::channel();
    // Who does not wait any more has killed it.
    thread::Builder::new().name("asked".into()).spawn(move || done.send(child.wait_with_output()))?;
    ended.recv_timeout(limit).unwrap_or_else(|_| {
        // It may end in this moment.
        let _ = kill_process_group(group, Signal::KILL);
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("it does not end within {limit:?}")))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_program_that_ends_is_heard_and_one_that_does_not_is_killed_with_what_it_started() {
        let shell = |script: &str, limit| output(Command::new("sh").args(["-c", script]), limit);
        let said = shell("echo said; echo more >&2; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!(
            (said.stdout, said.stderr, said.status.code()),
            (b"said\n".into(), b"more\n".into(), Some(3))
        );
        let begun = Instant::now();
        let late = shell("sleep 600; true", Duration::from_millis(200)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        // What the shell started has its output open, too.
        let late = shell("sleep 600 & exit 0", Duration::from_millis(200)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
