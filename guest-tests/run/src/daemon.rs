//! The device, started as a user would start it: `lamina serve` in a process of its own.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::programs;

/// How long a device may take to unmount and end once it is told to.
const STOP: Duration = Duration::from_secs(20);

/// What to serve.
#[derive(Clone, Debug)]
pub struct Serve {
    /// The checkpoints.
    pub models: Vec<PathBuf>,
    /// Spellings of the views.
    pub views: Vec<String>,
    /// Tensors that are KV caches, as `lamina serve --kv` takes them.
    pub kv: Vec<String>,
    /// The device: `trace`, `gcomp` or `plain`.
    pub mode: String,
    /// The codec, `lz4`, `zstd` or `tree`.
    pub codec: String,
    /// Bytes of the base window, as the command line takes them; fitting if not given.
    pub capacity: Option<String>,
    /// KiB read when a page is missing.
    pub read_ahead_kb: u32,
    /// Devices that the base window is counted as, if they are several.
    pub devices: Option<u32>,
}

/// A served device. Dropping it stops it.
pub struct Daemon {
    process: Process,
    /// What it said when it was ready.
    pub ready: Ready,
    _folder: tempfile::TempDir,
}

/// A `lamina serve` that runs. Dropping it stops it.
pub(crate) struct Process {
    child: Child,
}

/// The ready line of `lamina serve --json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Ready {
    /// The process that holds the device; the one that does the work is its child.
    pub pid: u32,
    /// The base window.
    pub base: Window,
    /// The views window.
    pub views: Window,
    /// The API's socket.
    pub api: PathBuf,
    /// The API's address on loopback.
    pub tcp: std::net::SocketAddr,
    /// The socket of the guest's control port.
    pub ctl: PathBuf,
    /// Views that were asked for and not made.
    pub skipped: Vec<Skipped>,
}

/// A view that was asked for and not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// The tensor.
    pub tensor: String,
    /// The view's spelling.
    pub view: String,
    /// Why not.
    pub why: String,
}

/// The same of a device that several guests or hosts have.
#[derive(Clone, Debug, Deserialize)]
pub struct SharedReady {
    /// The process that holds the device.
    pub pid: u32,
    /// The API's socket.
    pub api: PathBuf,
    /// The API's address on loopback.
    pub tcp: std::net::SocketAddr,
    /// What each of them has.
    pub guests: Vec<GuestExport>,
}

/// What one guest or host has.
#[derive(Clone, Debug, Deserialize)]
pub struct GuestExport {
    /// Its name.
    pub name: String,
    /// Its base window.
    pub base: Window,
    /// Its views window.
    pub views: Window,
    /// The socket of its control port.
    pub ctl: PathBuf,
}

/// A window as a file.
#[derive(Clone, Debug, Deserialize)]
pub struct Window {
    /// The file.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
}

impl Daemon {
    /// Starts a device, waits until it is ready, and passes its own progress on to stderr.
    ///
    /// # Errors
    /// When it does not start or ends instead; it has said why on stderr.
    pub fn start(serve: &Serve) -> Result<Self> {
        Self::start_with(serve, &[])
    }

    /// As [`Daemon::start`], with all observers: what other devices would have moved is counted
    /// too.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn start_observed(serve: &Serve) -> Result<Self> {
        Self::start_with(serve, &["--observe"])
    }

    /// As [`Daemon::start`], with more options of `lamina serve`.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn start_with(serve: &Serve, more: &[&str]) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("lamina-run-").tempdir().context("no temporary folder")?;
        let mut command = Command::new(programs::lamina()?);
        command.args(["serve", "--json", "--mode", &serve.mode, "--codec", &serve.codec]);
        command.arg("--mount").arg(folder.path().join("mount"));
        command.arg("--run-dir").arg(folder.path().join("run"));
        command.args(["--views", &serve.views.join(","), "--tcp", "127.0.0.1:0"]);
        command.args(["--read-ahead-kb", &serve.read_ahead_kb.to_string()]);
        if let Some(capacity) = &serve.capacity {
            command.args(["--capacity", capacity]);
        }
        if let Some(devices) = serve.devices {
            command.args(["--devices", &devices.to_string()]);
        }
        for rule in &serve.kv {
            command.arg("--kv").arg(rule);
        }
        for model in &serve.models {
            command.arg("--model").arg(model);
        }
        command.args(more);
        let (process, ready) = Process::start(command)?;
        Ok(Self { process, ready, _folder: folder })
    }

    /// The counters, now.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn stats(&self) -> Result<Value> {
        let output = self.ask(&["stats", "--json"])?;
        serde_json::from_slice(&output).context("the device's counters are no JSON")
    }

    /// Runs a client command against this device and returns what it printed.
    ///
    /// # Errors
    /// When it fails; the error carries what it said.
    pub fn ask(&self, args: &[&str]) -> Result<Vec<u8>> {
        ask(&self.ready.api, args)
    }

    /// The folder the windows are mounted on.
    pub fn mount(&self) -> &Path {
        self.ready.base.path.parent().unwrap_or(Path::new("/"))
    }

    /// The device's process.
    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Stops the device and waits until its mount is gone.
    ///
    /// # Errors
    /// When it had ended already, or ends with an error.
    pub fn stop(self) -> Result<()> {
        self.process.stop()
    }
}

/// The worker of the process that holds a device, if it has one that lives.
pub fn worker(holder: u32) -> Option<Pid> {
    let tasks = fs::read_dir(format!("/proc/{holder}/task")).ok()?;
    // Threads come and go.
    let children = tasks.flatten().flat_map(|task| fs::read_to_string(task.path().join("children")));
    let children = children.collect::<Vec<_>>().join(" ");
    // A worker that has ended has no words any more, and another child has others.
    let lives = |pid: &&str| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.starts_with(b"lamina-worker\0"))
    };
    Pid::from_raw(children.split_whitespace().find(lives)?.parse().ok()?)
}

/// Runs a client command against the device whose API is at `api` and returns what it printed.
pub(crate) fn ask(api: &Path, args: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new(programs::lamina()?);
    let output = command.args(args).arg("--api").arg(api).output().context("cannot start lamina")?;
    if !output.status.success() {
        bail!("lamina {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// A device that several guests or hosts have. Dropping it stops it.
pub struct SharedDaemon {
    process: Process,
    /// What it said when it was ready.
    pub ready: SharedReady,
    _folder: tempfile::TempDir,
}

impl SharedDaemon {
    /// Starts a device with these options of `lamina serve` and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start or ends instead; it has said why on stderr.
    pub fn start(args: &[&str]) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("lamina-run-").tempdir().context("no temporary folder")?;
        let mut command = Command::new(programs::lamina()?);
        command.args(["serve", "--json", "--tcp", "127.0.0.1:0"]).args(args);
        command.arg("--mount").arg(folder.path().join("mount"));
        command.arg("--run-dir").arg(folder.path().join("run"));
        let (process, ready) = Process::start(command)?;
        Ok(Self { process, ready, _folder: folder })
    }

    /// What the guest or host `name` has, as if it were alone.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn export_of(&self, name: &str) -> Result<Ready> {
        let export = self.ready.guests.iter().find(|export| export.name == name);
        let GuestExport { base, views, ctl, .. } =
            export.with_context(|| format!("no guest {name}"))?.clone();
        let SharedReady { pid, api, tcp, .. } = self.ready.clone();
        Ok(Ready { pid, base, views, api, tcp, ctl, skipped: Vec::new() })
    }

    /// The counters, now.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn stats(&self) -> Result<Value> {
        serde_json::from_slice(&ask(&self.ready.api, &["stats", "--json"])?)
            .context("the device's counters are no JSON")
    }

    /// Stops the device and waits until its mount is gone.
    ///
    /// # Errors
    /// When it had ended already, or ends with an error.
    pub fn stop(self) -> Result<()> {
        self.process.stop()
    }
}

impl Process {
    /// Starts `lamina serve --json` and returns what it says when it is ready. Its own progress
    /// goes to stderr.
    pub(crate) fn start<R: DeserializeOwned>(mut command: Command) -> Result<(Self, R)> {
        let parent = getpid();
        // SAFETY: between fork and exec only two system calls are made and no memory is allocated.
        unsafe {
            command.pre_exec(move || {
                // Whoever kills the job does not leave its device and mount behind.
                set_parent_process_death_signal(Some(Signal::TERM))?;
                if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
            });
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut process = Self { child: child.context("cannot start lamina")? };
        let mut line = String::new();
        let stdout = process.child.stdout.take().context("lamina's output is not connected")?;
        BufReader::new(stdout).read_line(&mut line).context("lamina's ready line cannot be read")?;
        if line.is_empty() {
            let status = process.child.wait().context("lamina cannot be waited for")?;
            bail!("the device did not start ({status}); it says why above");
        }
        let ready =
            serde_json::from_str(&line).with_context(|| format!("lamina's ready line is {line:?}"))?;
        Ok((process, ready))
    }

    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it at once.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the device had ended on its own: {status}");
        }
        let status = self.end()?;
        if !status.success() {
            bail!("the device ended with {status}");
        }
        Ok(())
    }

    fn end(&mut self) -> Result<std::process::ExitStatus> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .context("the device cannot be told to end")?;
        let begun = Instant::now();
        while begun.elapsed() < STOP {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.child.kill()?;
        self.child.wait()?;
        bail!("the device did not end within {} s and was killed", STOP.as_secs())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None))
            && let Err(why) = self.end()
        {
            tracing::warn!("{why:#}");
        }
    }
}
