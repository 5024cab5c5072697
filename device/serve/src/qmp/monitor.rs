//! A connection to a monitor (QMP), whose other side may be anything.
//!
//! * It is [this user's or root's](crate::peer), or there is no connection.
//! * A line has at most [`MAX_LINE`] bytes; a longer one ends the connection.
//! * A command, with all the events that come before its answer, has [`TIMEOUT`]; and no step
//!   waits for longer than [`TICK`] without looking whether it is to stop.
//! * Once it is to stop, there is [`LAST_ANSWER`] for all that is still to be said. What QEMU
//!   answers by then was told, and is not told again by the next process.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::peer;

/// Bytes a line may have. QEMU's greeting has some 300, its events and the answers to our commands
/// fewer.
const MAX_LINE: usize = 64 << 10;
/// How long a command may take, and how long the greeting.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer may still take once it is to stop.
pub(super) const LAST_ANSWER: Duration = Duration::from_secs(1);
/// How often a wait looks whether it is to stop.
const TICK: Duration = Duration::from_millis(20);

/// A connection to QEMU's monitor.
pub(super) struct Monitor {
    stream: UnixStream,
    /// What was read and is not a whole line yet, behind lines that were not looked at.
    pending: Vec<u8>,
    /// Bytes at the front of `pending` in which there is no end of a line.
    searched: usize,
    /// QEMU's process.
    qemu: i32,
    stop: Arc<Stop>,
}

/// When it was told to stop, if it was.
pub(super) type Stop = OnceLock<Instant>;

/// Until when something is waited for.
struct Wait {
    deadline: Instant,
    stop: Arc<Stop>,
}

impl Wait {
    fn new(stop: &Arc<Stop>) -> Self {
        Self { deadline: Instant::now() + TIMEOUT, stop: Arc::clone(stop) }
    }

    /// The time of the next step, if there is any left.
    fn step(&self) -> io::Result<Timespec> {
        let last = self.stop.get().map(|stopped| *stopped + LAST_ANSWER);
        let deadline = last.map_or(self.deadline, |last| last.min(self.deadline));
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let kind = if last.is_some() { io::ErrorKind::Interrupted } else { io::ErrorKind::TimedOut };
            return Err(io::Error::new(kind, "the monitor does not answer in time"));
        }
        Timespec::try_from(left.min(TICK)).map_err(io::Error::other)
    }
}

impl Monitor {
    /// Connects to the QEMU that listens at `socket`, and is greeted.
    pub(super) fn connect(socket: &Path, stop: &Arc<Stop>) -> io::Result<Self> {
        let stream = peer::connect(socket)?;
        stream.set_nonblocking(true)?;
        // Who began to listen; 0 of a process that cannot be seen from here.
        let qemu = getsockopt(&stream, PeerCredentials)?.pid();
        let mut monitor = Self { stream, pending: Vec::new(), searched: 0, qemu, stop: Arc::clone(stop) };
        let greeting = monitor.line(&Wait::new(stop))?;
        if greeting.get("QMP").is_none() {
            return Err(io::Error::other(format!("no QMP greeting: {:.200}", greeting.to_string())));
        }
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// QEMU's process.
    pub(super) fn qemu(&self) -> i32 {
        self.qemu
    }

    /// Whether QEMU is gone.
    pub(super) fn hung_up(&self) -> bool {
        let mut it = [PollFd::new(&self.stream, PollFlags::empty())];
        poll(&mut it, Some(&Timespec::default())).is_ok_and(|found| found > 0)
    }

    /// Executes a command. That QEMU refuses is logged: it may have the entry already, or no more
    /// room for one.
    pub(super) fn execute(&mut self, command: &str, arguments: &Value) -> io::Result<()> {
        let wait = Wait::new(&self.stop);
        // At once: QEMU reads as it comes.
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.write_all(line.as_bytes(), &wait)?;
        loop {
            let answer = self.line(&wait)?;
            if let Some(refusal) = answer.get("error") {
                let why = refusal["desc"].as_str().unwrap_or_default();
                tracing::warn!(command, "QEMU refuses: {why:.1000}");
                return Ok(());
            }
            if answer.get("return").is_some() {
                return Ok(());
            }
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], wait: &Wait) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => bytes = &bytes[taken..],
                Err(why) => self.ready(&why, PollFlags::OUT, wait)?,
            }
        }
        Ok(())
    }

    /// The next line that is said.
    fn line(&mut self, wait: &Wait) -> io::Result<Value> {
        // One who always has something to say is stopped as well.
        wait.step()?;
        let mut some = [0; 4096];
        loop {
            let unsearched = &self.pending[self.searched..];
            if let Some(end) = unsearched.iter().position(|&byte| byte == b'\n') {
                let rest = self.pending.split_off(self.searched + end + 1);
                let line = std::mem::replace(&mut self.pending, rest);
                self.searched = 0;
                return Ok(serde_json::from_slice(&line)?);
            }
            self.searched = self.pending.len();
            if self.searched > MAX_LINE {
                let why = format!("the monitor says a line of more than {MAX_LINE} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            match self.stream.read(&mut some) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(taken) => self.pending.extend_from_slice(&some[..taken]),
                Err(why) => self.ready(&why, PollFlags::IN, wait)?,
            }
        }
    }

    /// Waits a step for what could not be done at once.
    fn ready(&self, why: &io::Error, event: PollFlags, wait: &Wait) -> io::Result<()> {
        match why.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => {
                let step = wait.step()?;
                match poll(&mut [PollFd::new(&self.stream, event)], Some(&step)) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
                    Err(why) => Err(why.into()),
                }
            }
            kind => Err(io::Error::new(kind, why.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    const GREETING: &[u8] = b"{\"QMP\":{}}\n";

    /// What becomes of a connection to a monitor that does this.
    fn outcome(
        stop: &Arc<Stop>,
        monitor: impl FnOnce(UnixStream) + Send + 'static,
    ) -> (io::Result<()>, Duration) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || monitor(listener.accept().unwrap().0));
        let begun = Instant::now();
        let outcome = Monitor::connect(&socket, stop).map(drop);
        (outcome, begun.elapsed())
    }

    #[test]
    fn a_line_without_an_end_is_read_to_its_bound_only() {
        let (counted, count) = std::sync::mpsc::channel();
        let (outcome, _) = outcome(&Arc::default(), move |mut stream| {
            let mut sent = 0;
            while let Ok(taken) = stream.write(&[b'x'; 4096]) {
                sent += taken;
            }
            counted.send(sent).unwrap();
        });
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData);
        // What was sent beyond it is what the socket holds.
        assert!(count.recv().unwrap() < MAX_LINE + (1 << 20));
    }

    #[test]
    fn a_line_may_come_in_pieces_and_with_others() {
        let (outcome, _) = outcome(&Arc::default(), |mut stream| {
            for byte in GREETING {
                stream.write_all(&[*byte]).unwrap();
            }
            let events = b"{\"event\":\"A\"}\n{\"event\":\"B\"}\n".repeat(500);
            stream.write_all(&events).unwrap();
            stream.write_all(b"{\"return\":{}}\n").unwrap();
            // It reads until then.
            let _ = stream.read(&mut [0; 1]);
        });
        outcome.unwrap();
    }

    #[test]
    fn waiting_for_silence_and_for_endless_events_ends_soon_after_the_stop() {
        for talks in [false, true] {
            let stop = Arc::<Stop>::default();
            let stopper = Arc::clone(&stop);
            let (outcome, took) = outcome(&stop, move |mut stream| {
                let _ = stream.write_all(GREETING);
                stopper.set(Instant::now()).unwrap();
                while talks && stream.write_all(b"{\"event\":\"RESUME\"}\n").is_ok() {}
                while !talks && stream.read(&mut [0; 64]).is_ok_and(|taken| taken > 0) {}
            });
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::Interrupted);
            assert!(took < TIMEOUT, "{took:?}");
        }
    }

    #[test]
    fn events_do_not_put_off_the_end_of_patience() {
        // As if it had begun long ago.
        let wait = Wait { deadline: Instant::now(), stop: Arc::default() };
        let (stream, mut theirs) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        theirs.write_all(b"{\"event\":\"RESUME\"}\n").unwrap();
        let mut monitor = Monitor { stream, pending: Vec::new(), searched: 0, qemu: 0, stop: Arc::default() };
        assert_eq!(monitor.line(&wait).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
