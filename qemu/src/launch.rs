//! Starting a guest, following it, and ending it.
//!
//! * A thread of its own starts QEMU and stays until QEMU has ended. The kernel kills QEMU when
//!   that thread dies (`PR_SET_PDEATHSIG`), and only the end of the whole process can make it die
//!   first: no QEMU is left behind.
//! * Dropping a [`Guest`] kills its QEMU and waits for its end. Signals go through a pidfd, never
//!   to a reused number.
//! * The outcome is known once QEMU has ended *and* everything it printed has been read.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};

use crate::accel::Accel;
use crate::command::{CommandError, CommandLine};
use crate::config::BootConfig;
use crate::console::{Lines, Marker};
use crate::find::{FindError, Qemu};
use crate::image::{self, GuestImage, ImageError};
use crate::initramfs::{self, InitramfsError};
use crate::madv::{self, FilterError};
use crate::recipe::{self, RecipeError};
use crate::topology::TopologyError;

/// Why a guest did not boot, or did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The guest cannot be laid out as asked.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// There is no QEMU.
    #[error(transparent)]
    Find(#[from] FindError),
    /// There is no guest image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The initramfs cannot be made.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// There is no folder for the filter.
    #[error(transparent)]
    Cache(#[from] RecipeError),
    /// The filter cannot be preloaded.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// There is no command line for what was asked.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The folder for this boot's files cannot be made.
    #[error("cannot make the folder {} for the guest's initramfs: {error}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: std::io::Error,
    },
    /// QEMU did not start.
    #[error("cannot start {}: {error}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// QEMU ended with an error.
    #[error("QEMU ended with {status}; its last messages:\n{stderr}\nand the guest's:\n{console}")]
    Qemu {
        /// How it ended.
        status: ExitStatus,
        /// The end of its stderr.
        stderr: String,
        /// The end of the guest's console.
        console: String,
    },
    /// The guest took too long and was killed.
    #[error(
        "the guest did not end within {seconds:.0} s and was killed; its last messages:\n{console}\nand QEMU's:\n{stderr}"
    )]
    Timeout {
        /// The limit.
        seconds: f64,
        /// The end of the guest's console.
        console: String,
        /// The end of QEMU's stderr.
        stderr: String,
    },
    /// The guest powered off without its program having ended: its kernel panicked, or `/init`
    /// failed.
    #[error("the guest powered off before its program ended; its last messages:\n{console}")]
    Unfinished {
        /// The end of the guest's console.
        console: String,
    },
}

/// How a guest ran to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The exit status of the guest's program; `None` if it had none, or a person ended it.
    pub status: Option<i32>,
    /// Seconds from the start of QEMU to the start of the program, if the console was watched.
    pub boot_seconds: Option<f64>,
    /// Seconds from the start of QEMU to its end.
    pub seconds: f64,
}

/// A boot made ready: the initramfs is written, QEMU is found, nothing runs.
#[derive(Debug)]
pub struct Prepared {
    /// The command that starts QEMU.
    pub command: CommandLine,
    /// The QEMU it starts.
    pub qemu: Qemu,
    /// The image it boots.
    pub image: GuestImage,
    /// How it runs the guest.
    pub accel: Accel,
    interactive: bool,
    has_program: bool,
    console_log: PathBuf,
    /// Holds the initramfs; removed with the guest.
    _folder: Option<tempfile::TempDir>,
}

/// Checks what is asked for, finds or builds QEMU and the guest image, and writes this boot's
/// initramfs.
///
/// # Errors
/// The first thing that stands in the way.
pub fn prepare(config: &BootConfig) -> Result<Prepared, BootError> {
    config.topology().check()?;
    let oldest = config.attach.oldest_qemu();
    let qemu = match &config.qemu {
        Some(path) => Qemu::probe(path, oldest).map_err(FindError::Given)?,
        None => Qemu::find(oldest, config.build_tools)?,
    };
    let image = GuestImage::find()?;
    let accel = config.accel.unwrap_or_else(Accel::detect);
    let (path, folder) = if let Some(path) = &config.run_folder {
        std::fs::create_dir_all(path).map_err(|error| BootError::Folder { path: path.clone(), error })?;
        (path.clone(), None)
    } else {
        let folder = tempfile::Builder::new().prefix("lamina-boot-").tempdir();
        let folder = folder.map_err(|error| BootError::Folder { path: std::env::temp_dir(), error })?;
        (folder.path().to_owned(), Some(folder))
    };
    let initramfs = path.join("initramfs.img");
    let console_log = path.join("console.log");
    let filtered = config.attach.maps_mount() && !config.huge_pages;
    let filter = if filtered { Some(madv::install(&recipe::cache()?)?) } else { None };
    let command =
        CommandLine::new(config, &qemu, accel, &image, &initramfs, filter.as_deref(), &console_log)?;
    let extras = if config.extras { Some(image::extras()?) } else { None };
    let workloads = if config.workloads { Some(image::workloads()?) } else { None };
    let python = if config.python { Some(image::python()?) } else { None };
    let archives = std::iter::once(&image.initramfs).chain(&extras).chain(&workloads).chain(&python);
    let archives: Vec<&Path> = archives.map(PathBuf::as_path).collect();
    initramfs::assemble(&archives, &config.programs, &initramfs)?;
    let (interactive, has_program) = (config.interactive, config.run.is_some());
    Ok(Prepared { command, qemu, image, accel, interactive, has_program, console_log, _folder: folder })
}

/// Boots a guest. Each line of its console goes to `on_line`, unless the console is interactive.
///
/// # Errors
/// When something stands in the way of starting QEMU. What happens later is told by
/// [`Guest::wait`].
pub fn boot(config: &BootConfig, on_line: impl FnMut(&str) + Send + 'static) -> Result<Guest, BootError> {
    prepare(config)?.spawn(on_line)
}

impl Prepared {
    /// Starts QEMU.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn spawn(self, on_line: impl FnMut(&str) + Send + 'static) -> Result<Guest, BootError> {
        tracing::debug!("starting {}", self.command.to_shell());
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.args).envs(self.command.env.iter().map(|(name, value)| (name, value)));
        command.stderr(Stdio::piped());
        if !self.interactive {
            // What a terminal sends to the job is not for it: QEMU ends by SIGHUP even where that
            // is ignored, as under `nohup`.
            command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        }
        let parent = getpid();
        // SAFETY: between fork and exec only two system calls are made and no memory is allocated.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the line above: then no signal will come.
                if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
            });
        }
        let terminal = if self.interactive { Terminal::keep() } else { None };
        let shared = Arc::new(Shared::default());
        let (started, start) = mpsc::sync_channel(1);
        let begun = Instant::now();
        let supervisor = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let ended = supervise(command, &shared, begun, on_line, &started);
                // Before anybody hears of the end.
                drop(terminal);
                if let Some(status) = ended {
                    shared.end(status, begun);
                }
            })
        };
        let failed = |error| BootError::Start { program: self.command.program.clone(), error };
        let pidfd = match start.recv() {
            Ok(started) => started.map_err(failed)?,
            Err(_) => return Err(failed(std::io::Error::other("the thread that starts it ended"))),
        };
        Ok(Guest { prepared: self, shared, begun, pidfd, supervisor: Some(supervisor) })
    }
}

/// A running guest. Dropping it ends it.
#[derive(Debug)]
pub struct Guest {
    prepared: Prepared,
    shared: Arc<Shared>,
    begun: Instant,
    pidfd: OwnedFd,
    supervisor: Option<JoinHandle<()>>,
}

impl Guest {
    /// What was started: the command, QEMU's version, the image, the accelerator.
    pub fn prepared(&self) -> &Prepared {
        &self.prepared
    }

    /// Seconds from the start of QEMU to the start of the guest's program, once that has started.
    pub fn boot_seconds(&self) -> Option<f64> {
        self.shared.lock().boot_seconds
    }

    /// Whether QEMU still runs.
    pub fn is_running(&self) -> bool {
        self.shared.lock().ended.is_none()
    }

    /// The number of QEMU's process.
    pub fn pid(&self) -> Option<u32> {
        self.shared.lock().pid
    }

    /// Ends the guest at once, as if its power failed. Does not wait.
    pub fn kill(&self) {
        // The only error is that the process has ended already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits until the guest has powered off; `None` waits without limit. When the limit is
    /// reached, the guest is killed.
    ///
    /// # Errors
    /// When QEMU fails, the limit is reached, or the guest powers off before its program has ended.
    /// The error carries the last lines of the guest's console and of QEMU's stderr.
    pub fn wait(&self, limit: Option<Duration>) -> Result<Outcome, BootError> {
        let state = self.shared.lock();
        let running = |state: &mut State| state.ended.is_none();
        let state = match limit {
            None => self.shared.changed.wait_while(state, running).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let left = limit.saturating_sub(self.begun.elapsed());
                let waited = self.shared.changed.wait_timeout_while(state, left, running);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        let (console, stderr) = (state.console.tail(), state.stderr.tail());
        let Some((status, seconds)) = state.ended else {
            self.kill();
            return Err(BootError::Timeout {
                seconds: limit.unwrap_or_default().as_secs_f64(),
                console,
                stderr,
            });
        };
        if !status.success() {
            return Err(BootError::Qemu { status, stderr, console });
        }
        let mut program = state.exit;
        if self.prepared.interactive {
            let log = std::fs::read(&self.prepared.console_log).unwrap_or_default();
            program =
                String::from_utf8_lossy(&log).lines().rev().find_map(|line| match Marker::parse(line) {
                    Some(Marker::Exit(status)) => Some(status),
                    _ => None,
                });
        } else if self.prepared.has_program && program.is_none() {
            return Err(BootError::Unfinished { console });
        }
        Ok(Outcome { status: program, boot_seconds: state.boot_seconds, seconds })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
        if let Some(supervisor) = self.supervisor.take() {
            // A panic in it came from the caller's `on_line` and was printed there.
            let _ = supervisor.join();
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    console: Lines,
    stderr: Lines,
    pid: Option<u32>,
    boot_seconds: Option<f64>,
    exit: Option<i32>,
    ended: Option<(ExitStatus, f64)>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of the state is complete in itself, so a panic elsewhere leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, status: ExitStatus, begun: Instant) {
        self.lock().ended = Some((status, begun.elapsed().as_secs_f64()));
        self.changed.notify_all();
    }
}

/// Starts QEMU, follows its output, and waits for its end, if it was started.
fn supervise(
    mut command: Command,
    shared: &Shared,
    begun: Instant,
    mut on_line: impl FnMut(&str) + Send,
    started: &mpsc::SyncSender<std::io::Result<OwnedFd>>,
) -> Option<ExitStatus> {
    let mut child = match start(&mut command) {
        Ok((child, pidfd)) => {
            shared.lock().pid = Some(child.id());
            let _ = started.send(Ok(pidfd));
            child
        }
        Err(error) => {
            let _ = started.send(Err(error));
            return None;
        }
    };
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let console = scope.spawn(|| {
            follow(
                stdout,
                shared,
                |state| &mut state.console,
                |line| {
                    match Marker::parse(line) {
                        Some(Marker::Ready) => {
                            shared.lock().boot_seconds.get_or_insert(begun.elapsed().as_secs_f64());
                        }
                        Some(Marker::Exit(status)) => shared.lock().exit = Some(status),
                        None => {}
                    }
                    on_line(line);
                },
            );
        });
        scope.spawn(|| {
            follow(stderr, shared, |state| &mut state.stderr, |line| tracing::debug!("qemu: {line}"));
        });
        if console.join().is_err() {
            // The caller's `on_line` panicked: nobody follows the guest any more.
            let _ = child.kill();
        }
    });
    // Its pipes are closed, or there were none to follow.
    // Waiting for one's own child fails only if somebody else reaped it; then it has ended, in a
    // way unknown: a failure.
    Some(child.wait().unwrap_or_else(|_| ExitStatus::from_raw(0xff00)))
}

/// How the terminal at standard input was; it is so again when this is dropped. A QEMU that has it
/// makes it raw, and puts it back only if it ends by itself.
struct Terminal(libc::termios);

impl Terminal {
    /// `None` if there is no terminal.
    fn keep() -> Option<Self> {
        let mut found = std::mem::MaybeUninit::uninit();
        // SAFETY: it is filled where that succeeds.
        unsafe { (libc::tcgetattr(0, found.as_mut_ptr()) == 0).then(|| Self(found.assume_init())) }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // SAFETY: it was filled.
        if unsafe { libc::tcsetattr(0, libc::TCSANOW, &raw const self.0) } != 0 {
            tracing::warn!("the terminal stays as it is: {}", std::io::Error::last_os_error());
        }
    }
}

fn start(command: &mut Command) -> std::io::Result<(Child, OwnedFd)> {
    let mut child = command.spawn()?;
    let pidfd = Pid::from_raw(i32::try_from(child.id()).unwrap_or_default())
        .ok_or(rustix::io::Errno::SRCH)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
    match pidfd {
        Ok(pidfd) => Ok((child, pidfd)),
        Err(error) => {
            child.kill()?;
            child.wait()?;
            Err(error.into())
        }
    }
}

/// Reads a pipe to its end, line by line.
fn follow(
    pipe: Option<impl Read>,
    shared: &Shared,
    lines: impl Fn(&mut State) -> &mut Lines,
    mut on_line: impl FnMut(&str),
) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = [0; 4096];
    let mut complete = Vec::new();
    loop {
        let count = match pipe.read(&mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => 0,
        };
        let mut state = shared.lock();
        let collect = |line: &str| complete.push(line.to_owned());
        if count == 0 {
            lines(&mut state).end(collect);
        } else {
            lines(&mut state).push(&buffer[..count], collect);
        }
        drop(state);
        // Not under the lock: the caller may ask the guest something.
        complete.drain(..).for_each(|line| on_line(&line));
        if count == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
