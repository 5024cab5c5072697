//! The holder's own socket: what may be asked of a device that is held, whichever worker does its
//! work.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lamina_qemu::bounded;
use lamina_serve::peer;

use super::{State, Trial, child::kill, program::Program};
use crate::life::{self, Answer, Ask, Order, Ready};
use crate::out;
use crate::status::{NoDevice, Refused};

/// The socket in the run directory.
pub(super) const SOCKET: &str = "holder.sock";
/// How long who connects to it may take to ask, and to take the answer, whatever comes between.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long the program of an upgrade may take to say which one it is.
const CHECK: Duration = Duration::from_secs(20);
/// How long the worker of an upgrade may take to become ready.
const UPGRADE: Duration = Duration::from_secs(60);

impl State {
    /// Has the worker write a snapshot to the one file in `file`.
    ///
    /// # Errors
    /// What the worker says, or that it died.
    fn save(&self, file: &[OwnedFd]) -> Result<u64> {
        let [file] = file else { bail!("a snapshot goes to one file") };
        let (saving, saved) = mpsc::channel();
        {
            let mut now = self.lock();
            if now.saving.is_some() {
                bail!("another snapshot is being saved");
            }
            now.saving = Some(saving);
            let line = now.line.as_ref().context("there is no worker at the moment");
            let sent = line.and_then(|line| Ok(life::send(line, &Order::Save, &[file.as_fd()])?));
            if sent.is_err() {
                now.saving = None;
            }
            sent?;
        }
        let died = "the worker died; the snapshot is not whole, and may be taken again";
        saved.recv().context(died)?.map_err(|why| anyhow!(why))
    }

    /// Has the worker be replaced by one of `program`, or of the program that this one was started
    /// from, and waits until that answers.
    ///
    /// # Errors
    /// If it does not; then the worker before it is started again. One upgrade is made at a time.
    fn upgrade(&self, program: Option<PathBuf>) -> Result<Ready> {
        if self.upgrading.swap(true, Ordering::AcqRel) {
            bail!("another upgrade is being made");
        }
        let upgraded = self.upgrade_alone(program);
        self.upgrading.store(false, Ordering::Release);
        upgraded
    }

    fn upgrade_alone(&self, program: Option<PathBuf>) -> Result<Ready> {
        let program = match program {
            Some(program) => program,
            None => current_program()?,
        };
        let name = program.display().to_string();
        let program = Program::open(program).with_context(|| format!("{name} cannot be run"))?;
        let check = bounded::output(Command::new(program.started_by()).arg("--version"), CHECK);
        let check = check.with_context(|| format!("{name} cannot be run"))?;
        if !check.status.success() || !check.stdout.starts_with(b"lamina ") {
            bail!("{name} is no lamina: `--version` ended with {}", check.status);
        }
        let before = {
            let mut now = self.lock();
            if now.stopping {
                bail!("the device is being stopped");
            }
            let pid = now.pid.context("there is no worker at the moment")?;
            now.trial = Trial::Running(now.program.replace(program));
            now.replaced = Some(pid);
            kill(pid);
            now.started
        };
        let begun = Instant::now();
        loop {
            let now = self.lock();
            let ready = now.ready.clone().filter(|_| now.started > before);
            let (stopping, pid) = (now.stopping, now.pid);
            match (&now.trial, ready) {
                (Trial::Over, Some(ready)) => return Ok(ready),
                (Trial::Failed, Some(_)) => {
                    bail!("a worker of {name} died before it answered; the program before goes on");
                }
                _ => drop(now),
            }
            if stopping {
                bail!("the device is being stopped");
            }
            if begun.elapsed() > UPGRADE
                && self.fall_back()
                && let Some(pid) = pid
            {
                kill(pid);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Answers on the holder's socket, as long as the process lives.
pub(super) fn answer(socket: &UnixListener, state: &Arc<State>) {
    for asker in socket.incoming() {
        let requested = asker.and_then(|asker| {
            let deadline = Instant::now() + TIMEOUT;
            Ok(life::receive_by(&asker, deadline)?.map(|(ask, descriptors)| (asker, ask, descriptors)))
        });
        match requested {
            Ok(Some((asker, Ask::Stop, _))) => {
                state.stop();
                reply(&asker, &Answer::Stopping);
            }
            // These take as long as a program, and as whoever reads the file.
            Ok(Some((asker, Ask::Upgrade(program), _))) => apart(asker, state, |state| {
                Answer::Upgraded(state.upgrade(program).map(Box::new).map_err(|why| out::reason(&why)))
            }),
            Ok(Some((asker, Ask::Save, file))) => apart(asker, state, move |state| {
                Answer::Saved(state.save(&file).map_err(|why| out::reason(&why)))
            }),
            Ok(None) => {}
            Err(why) => tracing::debug!("the holder is asked nothing it understands: {why}"),
        }
    }
}

/// Answers one asker while others are heard.
fn apart(asker: UnixStream, state: &Arc<State>, answer: impl FnOnce(&State) -> Answer + Send + 'static) {
    let state = Arc::clone(state);
    let answering = move || reply(&asker, &answer(&state));
    if let Err(why) = thread::Builder::new().name("asked".into()).spawn(answering) {
        tracing::error!("the holder cannot do what it is asked for: {why}");
    }
}

fn reply(asker: &UnixStream, answer: &Answer) {
    if let Err(why) = life::send_by(asker, answer, &[], Instant::now() + TIMEOUT) {
        tracing::debug!("who asked does not listen: {why}");
    }
}

/// Asks the holder that listens in `run_dir`.
fn ask(run_dir: &Path, ask: &Ask, descriptors: &[BorrowedFd<'_>]) -> Result<Answer> {
    let path = run_dir.join(SOCKET);
    let socket = peer::connect(&path).with_context(|| {
        let at = path.display();
        NoDevice(format!("no device is held at {at}: is `lamina serve` running, with this --run-dir?"))
    })?;
    life::send(&socket, ask, descriptors)?;
    let (answer, _) = life::receive(&socket)?.with_context(|| NoDevice("the holder is gone".to_owned()))?;
    Ok(answer)
}

/// Has the holder that listens in `run_dir` replace its worker.
///
/// # Errors
/// If there is none, or what it says.
pub(crate) fn upgrade(run_dir: &Path, program: Option<&Path>) -> Result<Ready> {
    let program = program.map(std::path::absolute).transpose()?;
    match ask(run_dir, &Ask::Upgrade(program), &[])? {
        Answer::Upgraded(ready) => Ok(*ready.map_err(Refused)?),
        Answer::Saved(_) | Answer::Stopping => bail!("the holder answers something else"),
    }
}

/// Has the device that is held in `run_dir` write a snapshot to `file`: its bytes of data.
///
/// # Errors
/// If there is none, or what it says.
pub(crate) fn save(run_dir: &Path, file: &fs::File) -> Result<u64> {
    match ask(run_dir, &Ask::Save, &[file.as_fd()])? {
        Answer::Saved(saved) => Ok(saved.map_err(Refused)?),
        Answer::Upgraded(_) | Answer::Stopping => bail!("the holder answers something else"),
    }
}

/// Whether a device is held in `run_dir`.
pub(crate) fn is_held(run_dir: &Path) -> bool {
    peer::connect(&run_dir.join(SOCKET)).is_ok()
}

/// Has the device that is held in `run_dir` bring everything to its image and end, and waits for
/// that.
///
/// # Errors
/// If there is none, or it does not understand.
pub(crate) fn stop(run_dir: &Path) -> Result<()> {
    match ask(run_dir, &Ask::Stop, &[])? {
        Answer::Stopping => {}
        Answer::Upgraded(_) | Answer::Saved(_) => bail!("the holder answers something else"),
    }
    // Its socket goes last.
    while is_held(run_dir) {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The program that this process was started from, as it is now in the file system.
fn current_program() -> Result<PathBuf> {
    let program = fs::read_link("/proc/self/exe").context("cannot tell which program this is")?;
    // What was replaced is still known by its old name.
    let text = program.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or_else(|| program.clone(), PathBuf::from))
}
