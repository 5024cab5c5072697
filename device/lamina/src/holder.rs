//! The holder: owns what must outlive the process that does the work, and starts that process again
//! when it dies.
//!
//! * It owns the mount and every descriptor of /dev/fuse, the image (the store's memory) and its
//!   ledger, and the listening sockets. It never opens the device and never touches the mount's
//!   files, so there is little in it that could fail.
//! * The worker is this same program, told by an environment variable. It gets copies of the
//!   descriptors over its [life line](crate::life).
//! * When the worker dies, for whatever reason, another one is started at once: the device is as
//!   the image says, the kernel gives the requests again that were in flight, and a guest has
//!   waited for a moment. A worker that follows several quick deaths survives panics in handlers,
//!   so that a request which kills each worker is answered with an error in the end. After
//!   [`MAX_DEATHS`] workers that died by themselves before they answered, the holder gives up.
//! * A worker that [Linux ended for lack of memory](oom) is followed by another, too, but not
//!   without a breath.
//! * Stopping: the worker brings everything to the image and ends (its [order](crate::worker)),
//!   then the mount goes. A worker is killed that does not end and for [`STOP`] does not say that
//!   it goes on, so however much it has to write back it may take the time for that. If one dies
//!   over it, the next goes on: what is dirty waits in the page cache as long as the mount is
//!   there. One that says that it failed has the last word, for a sync that is made again may
//!   succeed without what the first one lost.

mod asking;
mod child;
mod held;
pub(crate) mod oom;
mod program;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lamina_serve::{HeldMount, MountOptions, MountPoint, PrivateDir, claim_tcp, fuse_present, qmp::Reported};

pub(crate) use self::asking::{is_held, save, stop, upgrade};
use self::{
    asking::{SOCKET, answer},
    child::{Before, Worker, kill},
    held::{Held, Listening, Opened, ledger_of, listen_for},
    program::Program,
};
use crate::args::{DeviceArgs, DiskArg, PartitionArgs};
use crate::life::{self, Order, Ready, Word};
use crate::out;

/// Deaths within this time are quick.
const QUICK: Duration = Duration::from_secs(10);
/// Deaths of their own within that time after which panics in handlers are survived.
const CAREFUL_DEATHS: usize = 2;
/// Workers that died by themselves, one after another, before they answered, or in whatever way
/// while the device was being stopped: then the holder gives up.
const MAX_DEATHS: usize = 8;
/// What is waited after a worker that never answered.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
/// How long a worker that is to stop may say nothing.
const STOP: Duration = Duration::from_secs(30);
/// Workers that were killed for that: then the holder gives up.
const MAX_SILENT: usize = 2;

/// A device that is being held. Dropped, it is taken away at once; [`Holder::stop`] brings
/// everything to the image first.
pub(crate) struct Holder {
    /// What can be told of the device.
    pub(crate) ready: Ready,
    state: Arc<State>,
    supervisor: Option<thread::JoinHandle<Result<()>>>,
    _socket: Listening,
}

/// What the supervisor shares.
#[derive(Default)]
struct State {
    now: Mutex<Now>,
    /// Whether an upgrade is being made.
    upgrading: AtomicBool,
}

#[derive(Default)]
struct Now {
    /// The worker's life line.
    line: Option<UnixStream>,
    pid: Option<u32>,
    stopping: bool,
    /// When the worker said last that it goes on with stopping, or was started.
    heard: Option<Instant>,
    /// Workers that were killed because they did not stop.
    silent: usize,
    /// Whether no worker is to be started any more.
    over: bool,
    /// The program of the next worker; this one if not given.
    program: Option<Program>,
    trial: Trial,
    /// The last worker that did not die: an upgrade ended it.
    replaced: Option<u32>,
    ready: Option<Ready>,
    /// Workers that became ready.
    started: u64,
    /// What guests were told of poison, by the monitor socket.
    reported: BTreeMap<PathBuf, Reported>,
    /// The mount of the files, if they have one of their own.
    files: Option<HeldMount>,
    /// Whether the worker was told to answer.
    serves: bool,
    /// Who waits for a snapshot.
    saving: Option<mpsc::Sender<Result<u64, String>>>,
}

/// How it stands with a program that is to replace the one before.
#[derive(Default)]
enum Trial {
    /// There is none.
    #[default]
    Over,
    /// None of its workers has answered yet; this is the program before.
    Running(Option<Program>),
    /// A worker of it died before it answered, or never did.
    Failed,
}

/// Refuses a path that is no text: the worker and everybody who asks is told it in JSON.
#[expect(clippy::unnecessary_debug_formatting, reason = "what is no text is only told by its escapes")]
fn is_text(option: &str, path: &Path) -> Result<()> {
    let path = std::path::absolute(path).with_context(|| format!("{option} {}", path.display()))?;
    ensure!(path.to_str().is_some(), "{option} {path:?}: the path is not in UTF-8; choose another");
    Ok(())
}

impl Holder {
    /// Makes a device and waits until it answers; `None` if it was told to stop meanwhile. `mount`
    /// and `disks` are where it is to be found.
    ///
    /// # Errors
    /// What is in the way, before a worker is started where that can be told, or what the worker
    /// says.
    pub(crate) fn start(
        args: &DeviceArgs,
        partition_table: &PartitionArgs,
        mount: Option<PathBuf>,
        disks: Vec<DiskArg>,
        stop: &StopSwitch,
    ) -> Result<Option<Self>> {
        let started = Self::try_start(args, partition_table, mount, disks, stop);
        if !matches!(started, Ok(Some(_))) {
            stop.0.lock().over = true;
        }
        started
    }

    fn try_start(
        args: &DeviceArgs,
        partition_table: &PartitionArgs,
        mount: Option<PathBuf>,
        disks: Vec<DiskArg>,
        stop: &StopSwitch,
    ) -> Result<Option<Self>> {
        oom::spare();
        for (option, path) in [
            ("--mount", mount.as_ref()),
            ("--image", args.image.as_ref()),
            ("--run-dir", Some(&args.run_dir)),
        ] {
            path.map_or(Ok(()), |path| is_text(option, path))?;
        }
        let Opened { image, path: image_path, mut new, plan } = Opened::new(args, partition_table)?;
        PrivateDir::make(&args.run_dir)?;
        let mut held = Held {
            ledger: ledger_of(&image),
            image,
            image_path,
            api: Listening::at(&args.run_dir.join("api.sock"))?,
            ctl: plan.sockets(&args.run_dir).map(|socket| Listening::at(&socket)).collect::<Result<_>>()?,
            tcp: args.tcp.map(claim_tcp).transpose()?,
            mount: None,
            disks: listen_for(disks, &plan.disks)?,
        };
        if mount.is_some() {
            fuse_present()?;
        }
        if args.folder.write_cache && !rustix::process::geteuid().is_root() {
            bail!(
                "--write-cache needs root: files/ is a mount in the mount then, and Linux lets fusermount3 into nobody's"
            );
        }
        if args.folder.write_cache && args.cache_bytes.is_some() {
            bail!(
                "--write-cache does not go with --cache-bytes: who bounds the page cache would hear in their place that what programs wrote finds no room"
            );
        }
        let point = mount.map(|mount| MountPoint::prepare(&mount)).transpose()?;
        let socket = Listening::at(&args.run_dir.join(SOCKET))?;
        // The folder is this device's. Hosts of one that was here before are gone, whatever was
        // revoked.
        for mark in plan.revoked_marks(&args.run_dir) {
            match fs::remove_file(&mark) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => {
                    return Err(why).with_context(|| mark.display().to_string());
                }
                _ => {}
            }
        }
        let state = Arc::clone(&stop.0);
        let worker = Worker::start(&held, &state, Before::default(), false)?;
        let failed = match worker.word()? {
            Some(Word::Loaded) => None,
            Some(Word::Stopped) => {
                // The next run goes on with it.
                new.keep();
                return Ok(None);
            }
            Some(Word::Failed(why)) => Some(why),
            Some(Word::Ready(_) | Word::Reported(..) | Word::Saved(_) | Word::Stopping) => {
                Some("the worker answers before it was told to".to_owned())
            }
            None => bail!("the worker died while it loaded: {}", worker.end()),
        };
        if let Some(why) = failed {
            worker.end();
            bail!(why);
        }
        let threads = args.threads.unwrap_or(MountOptions::default().threads);
        held.mount =
            point.map(|point| HeldMount::new(point, threads)).transpose()?.map(|mount| (mount, threads));
        worker.serve(&held, &state)?;
        let ready = loop {
            match worker.word()? {
                Some(Word::Ready(ready)) => break *ready,
                Some(Word::Reported(socket, reported)) => state.note_reported(socket, reported),
                Some(Word::Stopping) => state.lock().heard = Some(Instant::now()),
                Some(Word::Stopped) => {
                    new.keep();
                    return Ok(None);
                }
                Some(Word::Failed(why)) => bail!(why),
                _ => bail!("the worker died before it answered: {}", worker.end()),
            }
        };
        let ready = worker.reported(ready);
        new.keep();
        state.became_ready(&ready);
        let answering = socket.listener.try_clone()?;
        answering.set_nonblocking(false)?;
        let requested = Arc::clone(&state);
        // It ends with the process; its socket goes with the device.
        thread::Builder::new().name("holder".into()).spawn(move || answer(&answering, &requested))?;
        let supervisor = {
            let state = Arc::clone(&state);
            thread::Builder::new().name("supervisor".into()).spawn(move || {
                let ended = supervise(&held, worker, &state);
                state.lock().over = true;
                drop(held);
                // It goes after what it lies in.
                let files = state.lock().files.take();
                drop(files);
                ended
            })?
        };
        let holder = Self { ready, state, supervisor: Some(supervisor), _socket: socket };
        if args.folder.write_cache {
            holder.mount_files(threads)?;
        }
        Ok(Some(holder))
    }

    /// Mounts the files in their folder. Whoever answers the mount is asked for that, so it has to
    /// be supervised by now: if it dies, the next one answers.
    fn mount_files(&self, threads: usize) -> Result<()> {
        let Some(folder) = self.ready.files.clone() else {
            tracing::warn!("--write-cache changes nothing: there is no folder of files");
            return Ok(());
        };
        let files = HeldMount::within(folder, threads)?;
        let mut now = self.state.lock();
        if now.stopping {
            // The worker may have ended what it has by now, and who drops what is kept, too.
            return Ok(());
        }
        let line = now.line.as_ref().filter(|_| now.serves);
        // A worker that is only being started is told with all the rest.
        let told = line.map_or(Ok(()), |line| child::serve_files(line, &files, false));
        now.files = Some(files);
        told
    }

    /// Brings everything to the image and takes the device away.
    ///
    /// # Errors
    /// If the device had to be given up before, or stores may be lost.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.state.stop();
        self.wait()
    }

    /// Waits for the end, which comes when somebody stops the device or it has to be given up.
    ///
    /// # Errors
    /// As [`Holder::stop`].
    pub(crate) fn wait(&mut self) -> Result<()> {
        let Some(supervisor) = self.supervisor.take() else { return Ok(()) };
        supervisor.join().map_err(|_| anyhow!("the supervisor panicked"))?
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.state.stop();
        if let Err(why) = self.wait() {
            tracing::error!("{}", out::reason(&why));
        }
    }
}

/// What stops a device, at any time from its start on.
#[derive(Clone, Default)]
pub(crate) struct StopSwitch(Arc<State>);

impl StopSwitch {
    /// Has the device end.
    pub(crate) fn stop(&self) {
        self.0.stop();
    }
}

impl State {
    fn lock(&self) -> std::sync::MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(self: &Arc<Self>) {
        let mut now = self.lock();
        if std::mem::replace(&mut now.stopping, true) {
            return;
        }
        if let Some(line) = &now.line {
            // One that is dying is noticed by the supervisor.
            let _ = life::send(line, &Order::Stop, &[]);
        }
        drop(now);
        let state = Arc::clone(self);
        thread::spawn(move || {
            let (mut from, silence) = (Instant::now(), longest_silence());
            loop {
                thread::sleep(silence.saturating_sub(from.elapsed()));
                let mut now = state.lock();
                if now.over {
                    return;
                }
                from = now.heard.filter(|heard| *heard > from).unwrap_or(from);
                if from.elapsed() < silence {
                    continue;
                }
                from = Instant::now();
                if let Some(pid) = now.pid {
                    tracing::warn!("the worker does not stop, and is killed");
                    now.silent += 1;
                    kill(pid);
                }
            }
        });
    }

    /// Keeps what a guest was told of poison.
    fn note_reported(&self, socket: PathBuf, reported: Reported) {
        self.lock().reported.entry(socket).or_default().add(reported);
    }

    fn became_ready(&self, ready: &Ready) {
        let mut now = self.lock();
        now.ready = Some(ready.clone());
        now.started += 1;
        if matches!(now.trial, Trial::Running(_)) {
            now.trial = Trial::Over;
        }
    }

    /// Goes back to the program before one that is being tried: whether one was.
    fn fall_back(&self) -> bool {
        let mut now = self.lock();
        match std::mem::replace(&mut now.trial, Trial::Failed) {
            Trial::Running(before) => {
                now.program = before;
                true
            }
            other => {
                now.trial = other;
                false
            }
        }
    }
}

/// [`STOP`], or what a test wants.
fn longest_silence() -> Duration {
    #[cfg(debug_assertions)]
    if let Some(wanted) = crate::failpoints::stop() {
        return wanted;
    }
    STOP
}

/// Starts workers until the device is stopped or given up.
fn supervise(held: &Held, mut worker: Worker, state: &State) -> Result<()> {
    let mut deaths = Vec::new();
    let mut before = Before::default();
    let mut fruitless = 0;
    // Deaths while the device was being stopped.
    let mut unfinished = 0;
    let mut oom = oom::Deaths::new();
    loop {
        let (mut stopped, mut stops, mut failed) = (false, false, None);
        loop {
            let word = match worker.word() {
                Ok(Some(word)) => word,
                Ok(None) => break,
                Err(why) => {
                    // A program that cannot be understood is as good as dead.
                    tracing::error!("{}", out::reason(&why));
                    break;
                }
            };
            match word {
                Word::Loaded => {}
                Word::Ready(ready) => {
                    fruitless = 0;
                    let ready = worker.reported(*ready);
                    tracing::info!(worker = ready.worker, deaths = before.died(), "a new worker answers");
                    state.became_ready(&ready);
                }
                Word::Reported(socket, reported) => state.note_reported(socket, reported),
                Word::Saved(saved) => {
                    if let Some(saving) = state.lock().saving.take() {
                        // Who asked may have gone.
                        let _ = saving.send(saved);
                    }
                }
                Word::Stopping => {
                    stops = true;
                    state.lock().heard = Some(Instant::now());
                }
                Word::Stopped => stopped = true,
                Word::Failed(why) => {
                    tracing::error!("the worker cannot go on: {why}");
                    failed = Some(why);
                }
            }
        }
        let (stopping, silent, replaced) = {
            let mut now = state.lock();
            let replaced = now.replaced.take().is_some_and(|pid| now.pid == Some(pid));
            (now.line, now.pid, now.saving, now.serves) = (None, None, None, false);
            (now.stopping, now.silent, replaced)
        };
        before.workers += 1;
        before.replaced += u64::from(replaced);
        let end = worker.end();
        if stopping {
            if stopped {
                return Ok(());
            }
            if let Some(why) = failed.filter(|_| stops) {
                return Err(anyhow!("not everything was kept: {why}"));
            }
            unfinished += 1;
            if unfinished >= MAX_DEATHS || silent >= MAX_SILENT {
                return Err(anyhow!("the worker ended before everything was kept: {end}"));
            }
        }
        if replaced {
            tracing::info!("the worker was ended for an upgrade, starting another");
        } else {
            tracing::warn!(deaths = before.died(), "the worker died, starting another: {end}");
        }
        if let Some(wait) = oom.died().filter(|_| !end.is_its_own()) {
            tracing::warn!(?wait, "Linux ends processes for lack of memory");
            thread::sleep(wait);
        }
        let now = Instant::now();
        deaths.retain(|death| now - *death <= QUICK);
        // A program that is being tried and does not stop, either, is not given the last word.
        let fell_back = (stopping || end.is_its_own()) && state.fall_back();
        if end.is_its_own() && !fell_back {
            deaths.push(now);
            fruitless += 1;
        }
        worker = loop {
            if fruitless >= MAX_DEATHS {
                return Err(anyhow!("{fruitless} workers died before they answered; the device is given up"));
            }
            if fruitless > 1 {
                thread::sleep(RESTART_PAUSE);
            }
            let careful = deaths.len() >= CAREFUL_DEATHS;
            let started = Worker::start(held, state, before, careful).and_then(|worker| {
                match worker.serve(held, state) {
                    Ok(()) => Ok(worker),
                    Err(why) => {
                        worker.end();
                        Err(why)
                    }
                }
            });
            match started {
                Ok(worker) => break worker,
                Err(why) if child::lacks_memory(&why) => {
                    tracing::warn!("{}", out::reason(&why));
                    thread::sleep(oom.none_started());
                    fruitless += usize::from(state.lock().stopping);
                }
                Err(why) => {
                    tracing::error!("{}", out::reason(&why));
                    fruitless += usize::from(!state.fall_back());
                }
            }
        };
    }
}
