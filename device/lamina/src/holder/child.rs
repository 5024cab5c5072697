//! A worker process: starting it, telling it, hearing it, and finding out that it died, and how.
//!
//! * A worker is dead when its [life line](crate::life) ends: from then on none of its threads
//!   touches the image. The kernel closes the line when the last thread that shares the worker's
//!   descriptors is gone; but a thread may wait for the mount, which only the next worker answers,
//!   on its way to that. So a worker is dead as well when each thread that is left is exiting, for
//!   such a thread runs no code of ours any more.
//! * How it died is known from `/proc` before there is a wait status, which needs all of its
//!   threads to be gone.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lamina_serve::{Channels, HeldMount};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::held::Held;
use super::{State, Trial, oom};
use crate::life::{self, Order, Ready, WORKER, Word};

/// The program of this process, wherever its file is.
const OWN: &str = "/proc/self/exe";
/// How often a worker that says nothing is looked at.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Milliseconds that a worker which is exiting has for it before its status is taken as it is.
const EXITING: u32 = 20;
/// Milliseconds that one that was killed has before it begins to exit.
const DYING: u32 = 1000;
/// The kernel's flag of a thread that is exiting, in `stat`.
const PF_EXITING: u32 = 4;

/// The workers before one.
#[derive(Clone, Copy, Default)]
pub(super) struct Before {
    /// Those that ended.
    pub(super) workers: u64,
    /// Those of them that an upgrade ended.
    pub(super) replaced: u64,
}

impl Before {
    /// Those that ended though nobody asked for it.
    pub(super) fn died(self) -> u64 {
        self.workers - self.replaced
    }
}

/// A worker process.
pub(super) struct Worker {
    child: Child,
    line: UnixStream,
}

impl Worker {
    pub(super) fn start(held: &Held, state: &State, before: Before, careful: bool) -> Result<Self> {
        let (line, theirs) = UnixStream::pair()?;
        let (program, is_tried) = {
            let now = state.lock();
            (now.program.clone(), !matches!(now.trial, Trial::Running(_)))
        };
        let spawn = |by: &Path| {
            let theirs = theirs.try_clone()?;
            let mut command = Command::new(by);
            command.arg0("lamina-worker").args(crate::topology::words()).env(WORKER, "1");
            // What a terminal sends to the job is the holder's to hear.
            command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).process_group(0).spawn()
        };
        let child = match &program {
            None => spawn(Path::new(OWN)).context("cannot start a worker"),
            Some(program) => spawn(&program.started_by())
                .or_else(|why| {
                    // A script is there by its path alone.
                    if !(program.is_script() && is_tried && why.kind() == ErrorKind::NotFound) {
                        return Err(why);
                    }
                    let path = program.path().display();
                    tracing::error!("{path} is gone: the program that the device began with goes on");
                    spawn(Path::new(OWN))
                })
                .with_context(|| format!("cannot start a worker of {}", program.path().display())),
        }?;
        // It has the worker's end alone: only so is its death heard.
        drop(theirs);
        oom::put_back(child.id());
        let worker = Self { child, line };
        // One that is not told all must not go on beside the next one.
        match worker.open(held, state, before, careful) {
            Ok(()) => Ok(worker),
            Err(why) => {
                worker.end();
                Err(why)
            }
        }
    }

    /// Tells it to open the image.
    fn open(&self, held: &Held, state: &State, before: Before, careful: bool) -> Result<()> {
        let image = held.image_path.clone();
        let ctl = held.ctl.iter().map(|socket| socket.path.clone()).collect();
        let (tcp, ledger) = (held.tcp.is_some(), held.ledger.is_some());
        let Before { workers: deaths, replaced } = before;
        let first = deaths == 0;
        let order = Order::Open { image, first, deaths, replaced, careful, ctl, tcp, ledger };
        let mut descriptors = vec![held.image.file().as_fd(), held.api.listener.as_fd()];
        descriptors.extend(held.ctl.iter().map(|socket| socket.listener.as_fd()));
        descriptors.extend(held.tcp.as_ref().map(AsFd::as_fd));
        descriptors.extend(held.ledger.as_ref().map(AsFd::as_fd));
        self.order(&order, &descriptors)?;
        // Only now may somebody else tell it to stop.
        let mut now = state.lock();
        (now.pid, now.line) = (Some(self.child.id()), Some(self.line.try_clone()?));
        now.heard = Some(Instant::now());
        if now.stopping { self.order(&Order::Stop, &[]) } else { Ok(()) }
    }

    /// Tells it to answer.
    pub(super) fn serve(&self, held: &Held, state: &State) -> Result<()> {
        let mut descriptors = Vec::new();
        let mount = held.mount.as_ref().map(|(mount, threads)| {
            descriptors.extend(mount.channels().requests.iter().map(AsFd::as_fd));
            descriptors.push(mount.channels().notices.as_fd());
            (mount.path().to_owned(), *threads)
        });
        descriptors.extend(held.disks.iter().map(|(socket, _)| socket.listener.as_fd()));
        let disks = held.disks.iter().map(|(_, disk)| disk.clone()).collect();
        let mut now = state.lock();
        let reported = Some(now.reported.clone());
        let files = now.files.is_some();
        self.order(&Order::Serve { mount, reported, paced: true, qmp: None, disks, files }, &descriptors)?;
        now.serves = true;
        now.files.as_ref().map_or(Ok(()), |files| serve_files(&self.line, files, true))
    }

    fn order(&self, order: &Order, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        tell(&self.line, order, descriptors)
    }

    /// What it says next, or `None` if it is dead: then nothing of it touches the image any more.
    pub(super) fn word(&self) -> Result<Option<Word>> {
        loop {
            let heard = poll(&mut [PollFd::new(&self.line, PollFlags::IN)], Some(&LOOK));
            match heard {
                Ok(0) if exits(self.child.id()) => return Ok(None),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(why) => return Err(why).context("the worker cannot be heard"),
            }
        }
        Ok(life::receive(&self.line)
            .context("the worker says nothing that can be understood")?
            .map(|(word, _)| word))
    }

    /// What it tells, with what only the holder knows.
    pub(super) fn reported(&self, ready: Ready) -> Ready {
        Ready { pid: std::process::id(), worker: self.child.id(), ..ready }
    }

    /// Makes sure that it is dead, and says how that came.
    pub(super) fn end(self) -> End {
        let Self { mut child, line: _ } = self;
        let pid = child.id();
        let lived = Task::of(pid).is_some_and(|task| !task.is_exiting());
        kill(pid);
        let mut exiting = 0;
        for _ in 0..DYING {
            match child.try_wait() {
                Ok(Some(status)) => return End { status: Some(status), lived },
                Ok(None) => {}
                Err(why) => {
                    tracing::debug!("how the worker ended is not known: {why}");
                    return End { status: None, lived };
                }
            }
            if let Some(task) = Task::of(pid).filter(Task::is_exiting) {
                exiting += 1;
                if task.is_gone() || exiting > EXITING {
                    // A thread that waits for the mount dies when somebody answers it; nothing else
                    // of the process is left.
                    thread::spawn(move || child.wait());
                    return End { status: Some(ExitStatus::from_raw(task.exit_code)), lived };
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
        thread::spawn(move || child.wait());
        End { status: None, lived }
    }
}

/// Tells a worker to answer the mount of the files, too.
pub(super) fn serve_files(line: &UnixStream, files: &HeldMount, answered: bool) -> Result<()> {
    let Channels { requests, notices } = files.channels();
    let descriptors: Vec<_> = requests.iter().chain([notices]).map(AsFd::as_fd).collect();
    tell(line, &Order::ServeFiles { minor: files.minor().map(str::to_owned), answered }, &descriptors)
}

fn tell(line: &UnixStream, order: &Order, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    match life::send(line, order, descriptors) {
        // Its death is noticed where its words are read.
        Err(why) if matches!(why.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => Ok(()),
        sent => sent.context("the worker cannot be told what to do"),
    }
}

/// How a worker ended.
pub(super) struct End {
    /// If that is known.
    status: Option<ExitStatus>,
    /// Whether it had to be killed: it did not behave as a worker does.
    lived: bool,
}

impl End {
    /// Whether it died by its own fault, rather than by a `kill -9` of somebody's or for lack of
    /// memory.
    pub(super) fn is_its_own(&self) -> bool {
        let killed = rustix::process::Signal::KILL.as_raw();
        self.lived || self.status.is_some_and(|status| status.signal() != Some(killed))
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) => status.fmt(f),
            None => f.write_str("how is not known"),
        }
    }
}

/// Whether a worker cannot be started because there is no memory for it.
pub(super) fn lacks_memory(why: &anyhow::Error) -> bool {
    why.downcast_ref::<std::io::Error>().is_some_and(|why| why.kind() == std::io::ErrorKind::OutOfMemory)
}

/// Kills a process.
pub(super) fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        // It may be gone by itself.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Whether every thread of a process is exiting.
fn exits(pid: u32) -> bool {
    // The first thread goes with all others, and is the cheapest to look at.
    if !Task::of(pid).is_some_and(|task| task.is_exiting()) {
        return false;
    }
    let Ok(mut tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    tasks.all(|task| {
        let stat = task.and_then(|task| fs::read_to_string(task.path().join("stat")));
        // One that is gone meanwhile was exiting.
        stat.map_or(true, |stat| Task::parse(&stat).is_some_and(|task| task.is_exiting()))
    })
}

/// What `stat` in `/proc` says of a thread, or of a process by its first one.
#[derive(Debug, PartialEq, Eq)]
struct Task {
    state: char,
    flags: u32,
    exit_code: i32,
}

impl Task {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name is in parentheses and may contain anything. The fields after it begin with the
        // third.
        let mut fields = stat.rsplit_once(") ")?.1.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let flags = fields.nth(9 - 4)?.parse().ok()?;
        let exit_code = fields.nth(52 - 10)?.parse().ok()?;
        Some(Self { state, flags, exit_code })
    }

    /// Whether it is a zombie, or less.
    fn is_gone(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    fn is_exiting(&self) -> bool {
        self.is_gone() || self.flags & PF_EXITING != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that is a shell, with the holder's end of its life line.
    fn worker(script: &str) -> Worker {
        let (line, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new("sh");
        let child = command.args(["-c", script]).stdin(Stdio::from(OwnedFd::from(theirs))).spawn().unwrap();
        Worker { child, line }
    }

    #[test]
    fn a_death_is_noticed_and_told_from_a_kill() {
        let own = worker("exit 7");
        assert!(own.word().unwrap().is_none());
        let end = own.end();
        assert!(end.is_its_own() && end.status.unwrap().code() == Some(7), "{end}");
        let killed = worker("kill -KILL $$");
        assert!(killed.word().unwrap().is_none());
        let end = killed.end();
        assert!(!end.is_its_own(), "{end}");
        // It closes its line and lives on.
        let odd = worker("exec sleep 1000 </dev/null");
        assert!(odd.word().unwrap().is_none());
        let end = odd.end();
        assert!(end.is_its_own() && end.status.unwrap().signal() == Some(9), "{end}");
    }

    #[test]
    fn a_worker_whose_line_somebody_else_keeps_is_dead_when_its_threads_are() {
        let (line, theirs) = UnixStream::pair().unwrap();
        let kept = theirs.try_clone().unwrap();
        let mut command = Command::new("sh");
        let child = command.args(["-c", "exit 7"]).stdin(Stdio::from(OwnedFd::from(theirs))).spawn().unwrap();
        let worker = Worker { child, line };
        assert!(worker.word().unwrap().is_none());
        assert_eq!(worker.end().status.unwrap().code(), Some(7));
        drop(kept);
    }

    #[test]
    fn a_start_that_lacks_memory_is_told_from_others() {
        let failed =
            |number| anyhow::Error::from(std::io::Error::from_raw_os_error(number)).context("cannot start");
        assert!(lacks_memory(&failed(libc::ENOMEM)));
        assert!(!lacks_memory(&failed(libc::ENOENT)) && !lacks_memory(&anyhow::anyhow!("no memory")));
    }

    #[test]
    fn what_proc_says_of_a_thread_is_understood() {
        let rest = (10..52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = format!("42 (a) b (c)) D 1 2 3 4 5 4194564 {rest} 25856\n");
        let task = Task::parse(&stat).unwrap();
        assert_eq!(task, Task { state: 'D', flags: 4_194_564, exit_code: 25856 });
        assert!(task.is_exiting() && !task.is_gone());
        assert_eq!(ExitStatus::from_raw(task.exit_code).code(), Some(101));
        assert!(!Task::of(std::process::id()).unwrap().is_exiting());
    }
}
