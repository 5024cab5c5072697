//! The holder: owns what must outlive the process that does the work, and starts that process again when it dies.
//!
//! * It owns the mount and every descriptor of /dev/fuse, the image (the store's memory), and the listening sockets. It never opens the device and never
//!   touches the mount's files, so there is little in it that could fail.
//! * The worker is this same program, told by an environment variable. It gets copies of the descriptors over its [life line](crate::life).
//! * When the worker dies, for whatever reason, another one is started at once: the device is as the image says, the kernel gives the
//!   requests again that were in flight, and a guest has waited for a moment. A worker that follows several quick deaths survives panics in handlers,
//!   so that a request which kills each worker is answered with an error in the end. After [`MOST_DEATHS`] workers that died by themselves before they answered, the holder gives up.
//! * Stopping: the worker brings everything to the image and ends, then the mount goes.

use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lamina::serve::{HeldMount, MountOptions, MountPoint, Shows, claim, claim_tcp, fuse::fuse_present};
use lamina::store::image::Image;

use crate::args::{DeviceArgs, DiskArg};
use crate::division::{DivisionArgs, Plan};
use crate::life::{self, Answer, Ask, Order, Ready, WORKER, Word};

/// Deaths within this time are quick.
const QUICK: Duration = Duration::from_secs(10);
/// Deaths of their own within that time after which panics in handlers are survived.
const CAREFUL_DEATHS: usize = 2;
/// Workers that died by themselves, one after another, before they answered: then the holder gives up.
const MOST_DEATHS: usize = 8;
/// What is waited after a worker that never answered.
const BREATH: Duration = Duration::from_millis(100);
/// How long a worker may take to stop.
const STOP: Duration = Duration::from_secs(30);
/// The holder's socket in the run directory.
const SOCKET: &str = "holder.sock";
/// How long who connects to it may take to ask.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the worker of an upgrade may take to become ready.
const UPGRADE: Duration = Duration::from_secs(60);

/// A device that is being held. Dropped, it is taken away at once; [`Holder::stop`] brings everything to the image first.
pub(crate) struct Holder {
    /// What can be told of the device.
    pub(crate) ready: Ready,
    state: Arc<State>,
    supervisor: Option<thread::JoinHandle<Result<()>>>,
    _socket: Listening,
}

/// What must outlive workers.
struct Held {
    image: Image,
    image_path: PathBuf,
    mount: Option<(HeldMount, usize)>,
    api: Listening,
    /// One for each pair of files.
    ctl: Vec<Listening>,
    tcp: Option<std::net::TcpListener>,
    disks: Vec<(Listening, Shows)>,
    /// Where QEMU is told of poison.
    qmp: Option<PathBuf>,
}

/// A listening socket, whose file goes with it.
struct Listening {
    listener: UnixListener,
    path: PathBuf,
}

/// What the supervisor shares.
#[derive(Default)]
struct State {
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    /// The worker's life line.
    line: Option<UnixStream>,
    pid: Option<u32>,
    stopping: bool,
    /// The program of the next worker; this one if not given.
    program: Option<PathBuf>,
    trial: Trial,
    ready: Option<Ready>,
    /// Workers that became ready.
    started: u64,
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
    Running(Option<PathBuf>),
    /// A worker of it died before it answered, or never did.
    Failed,
}

impl Holder {
    /// Makes a device and waits until it answers; `None` if it was told to stop meanwhile. `mount` and `disks` are where it is to be found.
    ///
    /// # Errors
    /// What is in the way, before a worker is started where that can be told, or what the worker says.
    pub(crate) fn start(
        args: &DeviceArgs,
        division: &DivisionArgs,
        mount: Option<PathBuf>,
        disks: Vec<DiskArg>,
        stop: &StopSwitch,
    ) -> Result<Option<Self>> {
        let Opened { image, path: image_path, new, plan } = Opened::new(args, division)?;
        make_private_dir(&args.run_dir)?;
        let mut held = Held {
            image,
            image_path,
            api: Listening::at(&args.run_dir.join("api.sock"))?,
            ctl: plan.sockets(&args.run_dir).map(|socket| Listening::at(&socket)).collect::<Result<_>>()?,
            tcp: args.tcp.map(claim_tcp).transpose()?,
            mount: None,
            disks: listen_for(disks)?,
            qmp: args.qmp.clone(),
        };
        if mount.is_some() {
            fuse_present()?;
        }
        let point = mount.map(|mount| MountPoint::prepare(&mount)).transpose()?;
        let socket = Listening::at(&args.run_dir.join(SOCKET))?;
        let state = Arc::clone(&stop.0);
        let mut worker = Worker::start(&held, &state, true, 0, false)?;
        let failed = match worker.word()? {
            Some(Word::Loaded) => None,
            Some(Word::Stopped) => return Ok(None),
            Some(Word::Failed(why)) => Some(why),
            Some(Word::Ready(_) | Word::Saved(_)) => {
                Some("the worker answers before it was told to".to_owned())
            }
            None => {
                return Err(held.abandon(new, &format!("the worker died while it loaded: {}", worker.end())));
            }
        };
        if let Some(why) = failed {
            worker.end();
            return Err(held.abandon(new, &why));
        }
        let threads = args.threads.unwrap_or(MountOptions::default().threads);
        held.mount =
            point.map(|point| HeldMount::new(point, threads)).transpose()?.map(|mount| (mount, threads));
        worker.serve(&held)?;
        let ready = match worker.word()? {
            Some(Word::Ready(ready)) => *ready,
            Some(Word::Stopped) => return Ok(None),
            Some(Word::Failed(why)) => bail!(why),
            _ => bail!("the worker died before it answered: {}", worker.end()),
        };
        let ready = told(ready, &worker);
        state.became_ready(&ready);
        let answering = socket.listener.try_clone()?;
        answering.set_nonblocking(false)?;
        let asked = Arc::clone(&state);
        // It ends with the process; its socket goes with the device.
        thread::Builder::new().name("holder".into()).spawn(move || answer(&answering, &asked))?;
        let supervisor = {
            let state = Arc::clone(&state);
            thread::Builder::new()
                .name("supervisor".into())
                .spawn(move || supervise(&held, worker, &state))?
        };
        Ok(Some(Self { ready, state, supervisor: Some(supervisor), _socket: socket }))
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
            tracing::error!("{why:#}");
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
            thread::sleep(STOP);
            if let Some(pid) = state.lock().pid {
                tracing::warn!("the worker does not stop, and is killed");
                kill(pid);
            }
        });
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

    /// Has the worker write a snapshot to the one file in `file`.
    ///
    /// # Errors
    /// What the worker says, or that it died.
    fn save(&self, file: &[OwnedFd]) -> Result<u64> {
        let [file] = file else { bail!("a snapshot goes to one file") };
        let (saving, saved) = mpsc::channel();
        {
            let mut now = self.lock();
            now.saving = Some(saving);
            let line = now.line.as_ref().context("there is no worker at the moment")?;
            life::send(line, &Order::Save, &[file.as_fd()])?;
        }
        let died = "the worker died; the snapshot is not whole, and may be taken again";
        saved.recv().context(died)?.map_err(|why| anyhow!(why))
    }

    /// Has the worker be replaced by one of `program`, or of the program that this one was started from, and waits until that answers.
    ///
    /// # Errors
    /// If it does not; then the worker before it is started again.
    fn upgrade(&self, program: Option<PathBuf>) -> Result<Ready> {
        let program = match program {
            Some(program) => program,
            None => current_program()?,
        };
        let check = Command::new(&program).arg("--version").output();
        let check = check.with_context(|| format!("{} cannot be run", program.display()))?;
        if !check.status.success() || !check.stdout.starts_with(b"lamina ") {
            bail!("{} is no lamina: `--version` ended with {}", program.display(), check.status);
        }
        let before = {
            let mut now = self.lock();
            let pid = now.pid.context("there is no worker at the moment")?;
            now.trial = Trial::Running(now.program.replace(program.clone()));
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
                    bail!(
                        "a worker of {} died before it answered; the program before goes on",
                        program.display()
                    );
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

/// A worker process.
struct Worker {
    child: Child,
    line: UnixStream,
}

impl Worker {
    fn start(held: &Held, state: &State, first: bool, deaths: u64, careful: bool) -> Result<Self> {
        let (line, theirs) = UnixStream::pair()?;
        let program = state.lock().program.clone().unwrap_or_else(|| "/proc/self/exe".into());
        let child = Command::new(program)
            .arg0("lamina-worker")
            .args(crate::topology::words())
            .env(WORKER, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // What a terminal sends to the job is the holder's to hear.
            .process_group(0)
            .spawn()
            .context("cannot start the worker")?;
        let worker = Self { child, line };
        let image = held.image_path.clone();
        let ctl = held.ctl.iter().map(|socket| socket.path.clone()).collect();
        let order = Order::Open { image, first, deaths, careful, ctl, tcp: held.tcp.is_some() };
        let mut descriptors = vec![held.image.file().as_fd(), held.api.listener.as_fd()];
        descriptors.extend(held.ctl.iter().map(|socket| socket.listener.as_fd()));
        descriptors.extend(held.tcp.as_ref().map(AsFd::as_fd));
        worker.order(&order, &descriptors)?;
        // Only now may somebody else tell it to stop.
        let mut now = state.lock();
        (now.pid, now.line) = (Some(worker.child.id()), Some(worker.line.try_clone()?));
        if now.stopping {
            worker.order(&Order::Stop, &[])?;
        }
        drop(now);
        Ok(worker)
    }

    /// Tells it to answer.
    fn serve(&self, held: &Held) -> Result<()> {
        let mut descriptors = Vec::new();
        let mount = held.mount.as_ref().map(|(mount, threads)| {
            descriptors.extend(mount.channels().requests.iter().map(AsFd::as_fd));
            descriptors.push(mount.channels().notices.as_fd());
            (mount.path().to_owned(), *threads)
        });
        descriptors.extend(held.disks.iter().map(|(socket, _)| socket.listener.as_fd()));
        let disks = held.disks.iter().map(|(socket, shows)| (socket.path.clone(), shows.clone())).collect();
        let qmp = held.qmp.clone();
        self.order(&Order::Serve { mount, qmp, disks }, &descriptors)
    }

    fn order(&self, order: &Order, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        match life::send(&self.line, order, descriptors) {
            // Its death is noticed where its words are read.
            Err(why)
                if matches!(
                    why.kind(),
                    std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
                ) =>
            {
                Ok(())
            }
            sent => sent.context("the worker cannot be told what to do"),
        }
    }

    /// What it says next, or `None` if it is dead: then nothing of it touches the image any more.
    fn word(&mut self) -> Result<Option<Word>> {
        Ok(life::receive(&self.line)
            .context("the worker says nothing that can be understood")?
            .map(|(word, _)| word))
    }

    /// Makes sure that it is dead, and says how that came.
    fn end(self) -> End {
        let Self { mut child, line: _ } = self;
        kill(child.id());
        for _ in 0..20 {
            match child.try_wait() {
                Ok(Some(status)) => return End(Some(status)),
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                Err(why) => {
                    tracing::debug!("how the worker ended is not known: {why}");
                    return End(None);
                }
            }
        }
        // A thread that waits for the mount dies when somebody answers it; nothing else of the process is left.
        thread::spawn(move || child.wait());
        End(None)
    }
}

/// How a worker ended, if that is known yet.
struct End(Option<ExitStatus>);

impl End {
    /// Whether it died by itself, rather than by a `kill -9` of somebody's or for lack of memory.
    fn is_its_own(&self) -> bool {
        self.0.is_some_and(|status| status.signal() != Some(rustix::process::Signal::KILL.as_raw()))
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(status) => status.fmt(f),
            None => f.write_str("a thread of it still waits for the mount"),
        }
    }
}

fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        // It may be gone by itself.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Starts workers until the device is stopped or given up.
fn supervise(held: &Held, mut worker: Worker, state: &State) -> Result<()> {
    let mut deaths = Vec::new();
    let mut count = 0;
    let mut fruitless = 0;
    loop {
        let mut stopped = false;
        loop {
            let word = match worker.word() {
                Ok(Some(word)) => word,
                Ok(None) => break,
                Err(why) => {
                    // A program that cannot be understood is as good as dead.
                    tracing::error!("{why:#}");
                    break;
                }
            };
            match word {
                Word::Loaded => {}
                Word::Ready(ready) => {
                    fruitless = 0;
                    let ready = told(*ready, &worker);
                    tracing::info!(worker = ready.worker, deaths = count, "a new worker answers");
                    state.became_ready(&ready);
                }
                Word::Saved(saved) => {
                    if let Some(saving) = state.lock().saving.take() {
                        // Who asked may have gone.
                        let _ = saving.send(saved);
                    }
                }
                Word::Stopped => stopped = true,
                Word::Failed(why) => tracing::error!("the worker cannot go on: {why}"),
            }
        }
        {
            let mut now = state.lock();
            (now.line, now.pid, now.saving) = (None, None, None);
            if now.stopping {
                drop(now);
                let how = worker.end();
                return if stopped {
                    Ok(())
                } else {
                    Err(anyhow!("the worker ended before everything was kept: {how}"))
                };
            }
        }
        count += 1;
        let end = worker.end();
        tracing::warn!(deaths = count, "the worker died, starting another: {end}");
        if end.is_its_own() && !state.fall_back() {
            let now = Instant::now();
            deaths.push(now);
            deaths.retain(|death| now - *death <= QUICK);
            fruitless += 1;
        }
        worker = loop {
            if fruitless >= MOST_DEATHS {
                return Err(anyhow!("{fruitless} workers died before they answered; the device is given up"));
            }
            if fruitless > 1 {
                thread::sleep(BREATH);
            }
            let careful = deaths.len() >= CAREFUL_DEATHS;
            let started = Worker::start(held, state, false, count, careful);
            match started.and_then(|worker| worker.serve(held).map(|()| worker)) {
                Ok(worker) => break worker,
                Err(why) => {
                    tracing::error!("{why:#}");
                    fruitless += usize::from(!state.fall_back());
                }
            }
        };
    }
}

/// Answers on the holder's socket, as long as the process lives.
fn answer(socket: &UnixListener, state: &State) {
    for asker in socket.incoming() {
        let asked = asker.and_then(|asker| {
            asker.set_read_timeout(Some(PATIENCE))?;
            Ok(life::receive(&asker)?.map(|(ask, descriptors)| (asker, ask, descriptors)))
        });
        let (asker, answer) = match asked {
            Ok(Some((asker, Ask::Upgrade(program), _))) => {
                let upgraded = state.upgrade(program).map(Box::new).map_err(|why| format!("{why:#}"));
                (asker, Answer::Upgraded(upgraded))
            }
            Ok(Some((asker, Ask::Save, file))) => {
                (asker, Answer::Saved(state.save(&file).map_err(|why| format!("{why:#}"))))
            }
            Ok(None) => continue,
            Err(why) => {
                tracing::debug!("the holder is asked nothing it understands: {why}");
                continue;
            }
        };
        if let Err(why) = life::send(&asker, &answer, &[]) {
            tracing::debug!("who asked does not listen: {why}");
        }
    }
}

/// Asks the holder that listens in `run_dir`.
fn ask(run_dir: &Path, ask: &Ask, descriptors: &[BorrowedFd<'_>]) -> Result<Answer> {
    let path = run_dir.join(SOCKET);
    let socket = UnixStream::connect(&path).with_context(|| {
        format!("no device is held at {}: is `lamina serve` running, with this --run-dir?", path.display())
    })?;
    life::send(&socket, ask, descriptors)?;
    let (answer, _) = life::receive(&socket)?.context("the holder is gone")?;
    Ok(answer)
}

/// Has the holder that listens in `run_dir` replace its worker.
///
/// # Errors
/// If there is none, or what it says.
pub(crate) fn upgrade(run_dir: &Path, program: Option<&Path>) -> Result<Ready> {
    let program = program.map(std::path::absolute).transpose()?;
    match ask(run_dir, &Ask::Upgrade(program), &[])? {
        Answer::Upgraded(ready) => Ok(*ready.map_err(|why| anyhow!(why))?),
        Answer::Saved(_) => bail!("the holder answers something else"),
    }
}

/// Has the device that is held in `run_dir` write a snapshot to `file`: its bytes of data.
///
/// # Errors
/// If there is none, or what it says.
pub(crate) fn save(run_dir: &Path, file: &fs::File) -> Result<u64> {
    match ask(run_dir, &Ask::Save, &[file.as_fd()])? {
        Answer::Saved(saved) => saved.map_err(|why| anyhow!(why)),
        Answer::Upgraded(_) => bail!("the holder answers something else"),
    }
}

/// What a worker tells, with what only the holder knows.
fn told(ready: Ready, worker: &Worker) -> Ready {
    Ready { pid: std::process::id(), worker: worker.child.id(), ..ready }
}

/// The program that this process was started from, as it is now in the file system.
fn current_program() -> Result<PathBuf> {
    let program = fs::read_link("/proc/self/exe").context("cannot tell which program this is")?;
    // What was replaced is still known by its old name.
    let text = program.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or_else(|| program.clone(), PathBuf::from))
}

impl Held {
    /// Takes away a new image that never became a device: the error.
    fn abandon(&self, new: bool, why: &str) -> anyhow::Error {
        if new {
            let _ = fs::remove_file(&self.image_path);
        }
        anyhow!("{why}")
    }
}

impl Listening {
    fn at(path: &Path) -> Result<Self> {
        Ok(Self { listener: claim(path)?, path: path.to_owned() })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Err(why) = fs::remove_file(&self.path) {
            tracing::debug!("socket file stays: {why}");
        }
    }
}

fn listen_for(disks: Vec<DiskArg>) -> Result<Vec<(Listening, Shows)>> {
    let mut all = Vec::new();
    for disk in disks {
        match disk {
            DiskArg::Both(directory) => {
                make_private_dir(&directory)?;
                all.push((directory.join("base.sock"), Shows::Base));
                all.push((directory.join("views.sock"), Shows::Views));
            }
            DiskArg::One(socket, shows) => all.push((socket, shows)),
        }
    }
    all.into_iter().map(|(socket, shows)| Ok((Listening::at(&socket)?, shows))).collect()
}

/// Makes a directory for sockets, for this user alone.
fn make_private_dir(path: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| {
        format!("cannot make the directory {} for the sockets; name another", path.display())
    })
}

/// The image that is asked for.
struct Opened {
    image: Image,
    path: PathBuf,
    /// Whether it is a new file.
    new: bool,
    plan: Plan,
}

impl Opened {
    fn new(args: &DeviceArgs, division: &DivisionArgs) -> Result<Self> {
        if let Some(path) = &args.image
            && let Some(image) = Image::open(path)?
        {
            let plan = Plan::new(division, args, Some((image.superblock(), path)))?;
            return Ok(Self { image, path: path.clone(), new: false, plan });
        }
        let plan = Plan::new(division, args, None)?;
        let mut config = plan.config(&args.load_options())?;
        (config.mode, config.codec) = (args.mode, args.codec);
        (config.open_windows, config.store_bytes) = (args.open_windows, args.store_capacity);
        config.interleaving = args.several.interleaving();
        config.check()?;
        let (image, path) = match &args.image {
            Some(path) => {
                if args.mode == lamina::mode::Mode::Plain {
                    bail!(
                        "--image does not go with --mode plain, which changes blocks in place: a kill could leave one half written"
                    );
                }
                (Image::create(path, config.superblock())?, path.clone())
            }
            None => (Image::in_memory(config.superblock())?, PathBuf::from("memory")),
        };
        Ok(Self { image, path, new: args.image.is_some(), plan })
    }
}
