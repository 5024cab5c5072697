//! A guest's visit to a device: boots it with a plan, and follows its events to the last. Its
//! program can make the visit on the host, too.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use lamina_guest::{Event, Plan};
use lamina_qemu::{BootConfig, Guest, GuestFile, Outcome, Port, Source};

use crate::{daemon::Ready, on_host::OnHost, programs};

/// How long after the guest's end its last events may still be on their way.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How a visit is made.
#[derive(Clone, Debug)]
pub struct Visit {
    /// What the guest does.
    pub plan: Plan,
    /// What it needs for that besides its programs.
    pub files: Vec<GuestFile>,
    /// How long it may take in all.
    pub limit: Duration,
    /// Where the guest's console is logged.
    pub console: PathBuf,
    /// The guest's processors.
    pub cpus: u32,
}

/// What is known of a visit besides its events.
#[derive(Clone, Debug)]
pub struct Visited {
    /// QEMU's version; empty on the host.
    pub qemu: String,
    /// `kvm` or `tcg`; empty on the host.
    pub accel: String,
    /// How it ended.
    pub outcome: Outcome,
}

impl Visit {
    /// Boots a guest on the windows of `device` and hands each of its events to `on_event`, in
    /// order, with the time since QEMU's start.
    ///
    /// # Errors
    /// When the guest does not boot, does not end in time, or ends without its last event. An error
    /// of `on_event` ends the guest.
    pub fn make(
        &self,
        device: &Ready,
        on_event: impl FnMut(Event, Duration) -> Result<()>,
    ) -> Result<Visited> {
        self.make_in(Self::config(device), on_event)
    }

    /// As [`Visit::make`], but the guest's program runs on the host, on the mount itself.
    ///
    /// # Errors
    /// As [`Visit::make`].
    pub fn make_on_host(
        &self,
        device: &Ready,
        on_event: impl FnMut(Event, Duration) -> Result<()>,
    ) -> Result<Visited> {
        self.make_on_host_told(device, |_| (), on_event)
    }

    /// As [`Visit::make_on_host`]; `begun` is told the program's number.
    ///
    /// # Errors
    /// As [`Visit::make`].
    pub fn make_on_host_told(
        &self,
        device: &Ready,
        begun_as: impl FnOnce(u32),
        mut on_event: impl FnMut(Event, Duration) -> Result<()>,
    ) -> Result<Visited> {
        let folder = tempfile::Builder::new().prefix("lamina-host-").tempdir()?;
        let here = |path: &Path| folder.path().join(path.strip_prefix("/").unwrap_or(path));
        for file in &self.files {
            let path = here(Path::new(&file.path));
            match &file.source {
                Source::Bytes(bytes) => fs::write(path, bytes)?,
                Source::Host(host) => fs::copy(host, path).map(drop)?,
            }
        }
        let mut plan = self.plan.clone();
        if let Some(decode) = &mut plan.decode {
            decode.tokenizer = here(&decode.tokenizer);
        }
        if let Some(handoff) = &mut plan.handoff {
            handoff.tokenizer = here(&handoff.tokenizer);
        }
        let (path, report) = (folder.path().join("plan.json"), folder.path().join("report.sock"));
        fs::write(&path, serde_json::to_vec(&plan)?)?;
        let listener =
            UnixListener::bind(&report).with_context(|| format!("cannot listen on {}", report.display()))?;
        if let Some(folder) = self.console.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        let console = fs::File::create(&self.console)
            .with_context(|| format!("cannot write {}", self.console.display()))?;
        let mut command = Command::new(programs::guest("lamina-guest")?);
        command.arg(&path).arg("--report").arg(&report).stdin(Stdio::null());
        command.env("LAMINA_BASE", &device.base.path).env("LAMINA_VIEWS", &device.views.path);
        command.env("LAMINA_CTL", &device.ctl).stdout(console.try_clone()?).stderr(console);
        let begun = Instant::now();
        let program = OnHost::start(command)?;
        begun_as(program.pid());
        let (ended, done) =
            follow(&listener, &program, self.limit, |event| on_event(event, begun.elapsed()))?;
        let outcome =
            ended.with_context(|| format!("what the program said is in {}", self.console.display()))?;
        if !done {
            bail!("the program ended without its last event; what it said is in {}", self.console.display());
        }
        Ok(Visited { qemu: String::new(), accel: String::new(), outcome })
    }

    /// As [`Visit::make`], of a guest to which the device is attached as `config` says.
    ///
    /// # Errors
    /// As [`Visit::make`].
    pub fn make_in(
        &self,
        config: BootConfig,
        on_event: impl FnMut(Event, Duration) -> Result<()>,
    ) -> Result<Visited> {
        self.make_in_told(config, |_| (), on_event)
    }

    /// As [`Visit::make`]; `begun_as` is told QEMU's number.
    ///
    /// # Errors
    /// As [`Visit::make`].
    pub fn make_told(
        &self,
        device: &Ready,
        begun_as: impl FnOnce(u32),
        on_event: impl FnMut(Event, Duration) -> Result<()>,
    ) -> Result<Visited> {
        self.make_in_told(Self::config(device), begun_as, on_event)
    }

    fn config(device: &Ready) -> BootConfig {
        let mut config =
            BootConfig::new(&device.base.path, device.base.bytes, &device.views.path, device.views.bytes);
        config.ctl_socket = Some(device.ctl.clone());
        config
    }

    fn make_in_told(
        &self,
        mut config: BootConfig,
        begun_as: impl FnOnce(u32),
        mut on_event: impl FnMut(Event, Duration) -> Result<()>,
    ) -> Result<Visited> {
        let folder = tempfile::Builder::new().prefix("lamina-guest-").tempdir()?;
        let report = folder.path().join("report.sock");
        let listener =
            UnixListener::bind(&report).with_context(|| format!("cannot listen on {}", report.display()))?;
        config.report = Some(Port::Socket(report));
        config.cpus = self.cpus;
        config.run_folder = Some(folder.path().join("boot"));
        config.programs = vec![
            GuestFile::program("/bin/lamina-guest", programs::guest("lamina-guest")?),
            GuestFile::program("/bin/lamina-shim", programs::guest("lamina-shim")?),
            GuestFile::data("/plan.json", serde_json::to_vec(&self.plan)?),
        ];
        config.programs.extend(self.files.iter().cloned());
        config.run = Some("/bin/lamina-guest".to_owned());

        let mut log = Log::new(&self.console)?;
        // Looking for QEMU and the image may build them, which is no part of booting.
        let prepared = lamina_qemu::launch::prepare(&config)?;
        let (qemu, accel) = (prepared.qemu.version.to_string(), prepared.accel.to_string());
        let begun = Instant::now();
        let guest = prepared.spawn(move |line| log.line(line))?;
        if let Some(pid) = guest.pid() {
            begun_as(pid);
        }
        let (ended, done) = follow(&listener, &guest, self.limit, |event| on_event(event, begun.elapsed()))?;
        let outcome =
            ended.with_context(|| format!("the guest's console is in {}", self.console.display()))?;
        if !done {
            bail!("the guest ended without its last event; its console is in {}", self.console.display());
        }
        Ok(Visited { qemu, accel, outcome })
    }
}

/// What visits a device.
trait Visitor: Sync {
    /// Waits for its end, and ends it when it takes longer than `limit`.
    fn wait(&self, limit: Duration) -> Result<Outcome>;

    /// Ends it at once.
    fn kill(&self);
}

impl Visitor for Guest {
    fn wait(&self, limit: Duration) -> Result<Outcome> {
        Ok(self.wait(Some(limit))?)
    }

    fn kill(&self) {
        self.kill();
    }
}

impl Visitor for OnHost {
    fn wait(&self, limit: Duration) -> Result<Outcome> {
        self.wait(limit)
    }

    fn kill(&self) {
        self.kill();
    }
}

/// Passes events on until the guest has ended: how, and whether the last event came.
fn follow(
    listener: &UnixListener,
    guest: &impl Visitor,
    limit: Duration,
    mut on_event: impl FnMut(Event) -> Result<()>,
) -> Result<(Result<Outcome>, bool)> {
    let (send, lines) = mpsc::channel::<String>();
    std::thread::scope(|scope| {
        let reader = listener.try_clone()?;
        // Not of the scope: it may wait for a connection that never comes.
        std::thread::spawn(move || {
            let Ok((stream, _)) = reader.accept() else { return };
            for line in BufReader::new(stream).lines().map_while(std::result::Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let waiter = scope.spawn(|| guest.wait(limit));
        let mut done = false;
        let mut take = |line: String| -> Result<()> {
            let event: Event =
                serde_json::from_str(&line).with_context(|| format!("the guest reports {line:?}"))?;
            done |= matches!(event, Event::Done { .. });
            on_event(event)
        };
        let mut followed = Ok(());
        while followed.is_ok() && !waiter.is_finished() {
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => followed = take(line),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        if followed.is_err() {
            guest.kill();
        }
        let ended =
            waiter.join().map_err(|_| anyhow::anyhow!("the thread that waits for the guest failed"))?;
        followed?;
        while let Ok(line) = lines.recv_timeout(LAST_WORDS) {
            take(line)?;
        }
        Ok((ended, done))
    })
}

/// The guest's console in a file.
struct Log {
    file: std::fs::File,
    path: PathBuf,
}

impl Log {
    fn new(path: &Path) -> Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        let file = std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { file, path: path.to_owned() })
    }

    fn line(&mut self, line: &str) {
        use std::io::Write;
        if let Err(why) = writeln!(self.file, "{line}") {
            tracing::warn!("{}: {why}", self.path.display());
        }
    }
}
