//! `lamina boot`: a guest with a device attached, for a person or a script, and what several guests
//! have in common with one.
//!
//! The guest goes before the device: QEMU has ended, or is killed, before the mount is taken away
//! under it.

use std::env;
use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use lamina_abi::Interleave;
use lamina_qemu::launch::{self, Prepared};
use lamina_qemu::{Accel, Attach, AttachKind, BootConfig, BootError, GuestFile, Source};
use lamina_serve::private_dir::check_socket_dir;
use lamina_serve::{Place, PrivateDir, peer};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::args::{ApiAt, Boot, DeviceArgs, DiskArg, PartitionArgs};
use crate::client;
use crate::holder::{Holder, StopSwitch, oom};
use crate::life::{self, WindowFile};
use crate::modelled::{LineRecorder, LinesWanted};
use crate::out::{self, print_line};
use crate::shmem;
use crate::signals::Ending;
use crate::way::{Files, Way};

/// The folder with the guest's static programs, which `./x` sets.
const GUEST_PROGRAMS: &str = "LAMINA_GUEST_PROGRAMS";
/// How long what does not heed signals has for its end when one comes.
const LEAVE: Duration = Duration::from_secs(2);
/// Where the script goes in the guest.
const SCRIPT: &str = "/run.sh";

/// What takes the lines of a guest's console.
pub(crate) type Console = Box<dyn FnMut(&str) + Send>;

/// A guest that is ready to be booted.
pub(crate) struct Ready {
    /// What it is called where there are several.
    pub(crate) name: Option<String>,
    pub(crate) prepared: Prepared,
    /// Where the lines of its console go; a guest with a shell has the terminal.
    pub(crate) console: Console,
}

/// Boots a guest and waits for its end: the exit status of its script.
pub(crate) async fn boot(mut args: Boot) -> Result<ExitCode> {
    let mut signals = Signals::watch()?;
    check(&args)?;
    let files = signals.or_leave(programs(&args)).await?;
    let (stop, print_command) = (StopSwitch::default(), args.print_command);
    // It is the last to go, whatever happens from here on.
    let mut device = signals.or_stop(&stop, Served::of(&args, &stop)).await?;
    let (lines, qmp) = (line_recorder(&mut args, &device.way)?, device.qmp.take());
    let prepared = signals.or_leave(prepare(args, &device.way, files, qmp)).await?;
    let status = if print_command {
        print_line!("{}", prepared.command.to_shell())?;
        None
    } else {
        if lines.is_some() {
            ensure!(prepared.qemu.has_plugins()?, "this QEMU takes no plug-ins, which --record-lines needs");
        }
        let recording = match lines {
            Some(lines) => Some(lines.begin().await?),
            None => None,
        };
        let console = Box::new(out::console(String::new()));
        let ran = run(vec![Ready { name: None, prepared, console }], signals).await;
        // Why a guest did not run says more than that nothing was recorded of it.
        let recorded = match recording {
            Some(recording) => recording.end().await,
            None => Ok(()),
        };
        let status = ran?.remove(0);
        recorded?;
        status
    };
    let Served { way, holder, folder, qmp: _ } = device;
    drop(way);
    // Unmounting sleeps.
    let stopped = move || {
        let stopped = holder.map_or(Ok(()), Holder::stop);
        drop(folder);
        stopped
    };
    tokio::task::spawn_blocking(stopped).await??;
    Ok(exit_code(status))
}

/// Refuses options that do not go together.
fn check(args: &Boot) -> Result<()> {
    let Boot { attach, device, disks, mailbox, base, views_file, shmem, .. } = args;
    ensure!(disks.is_empty() || *attach == AttachKind::VhostUser, "--disk goes with --attach vhost-user");
    ensure!(
        mailbox.is_none() || *attach == AttachKind::Ivshmem && base.is_some(),
        "--mailbox goes with --attach ivshmem, --base and --views-file"
    );
    ensure!(
        base.is_none() || *attach != AttachKind::VhostUser,
        "--attach vhost-user takes sockets, --disk, not the windows' files"
    );
    ensure!(shmem.is_none() || *attach == AttachKind::Shmem, "--shmem goes with --attach shmem");
    if let Some((base, views)) = base.as_ref().zip(views_file.as_ref()) {
        ensure!(
            !is_one_file(base, views),
            "--base and --views-file are one file, {}: name both windows",
            base.display()
        );
    }
    let set = device.several.interleave;
    ensure!(set.is_none() || *attach == AttachKind::Cxl, "--interleave goes with --attach cxl");
    // QEMU connects to whoever listens there, so nobody else may.
    let sockets = args.ctl.iter().chain(disks).chain(mailbox).chain(shmem);
    sockets.into_iter().try_for_each(|socket| check_socket_dir(socket))?;
    Ok(())
}

/// Whether two paths lead to one file.
fn is_one_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

/// What records the guest's lines, if that is asked for, with QEMU's options for it among the
/// others.
fn line_recorder(args: &mut Boot, way: &Way) -> Result<Option<LineRecorder>> {
    let Some(out) = args.record_lines.clone() else { return Ok(None) };
    let base_bytes = match &way.attach {
        Attach::Cxl(cxl) if cxl.targets.is_none() => cxl.base_bytes,
        Attach::Ivshmem(ivshmem) => ivshmem.base_bytes,
        _ => bail!("--record-lines goes with --attach cxl, without --interleave, and with ivshmem"),
    };
    ensure!(args.accel != Some(Accel::Kvm), "--record-lines goes with --accel tcg: KVM tells of no loads");
    args.accel = Some(Accel::Tcg);
    let cache = usize::try_from(args.lines_cache)?;
    let api = ApiAt::in_dir(&args.device.run_dir);
    let lines = LineRecorder::new(LinesWanted { out, api, base_bytes, cpus: args.cpus, cache })?;
    args.qemu.splice(0..0, lines.args());
    Ok(Some(lines))
}

/// A device, and the way of a guest to it. They go in this order: a folder that went before its
/// device would take what is mounted in it along.
struct Served {
    way: Way,
    /// It, if it was started for this guest.
    holder: Option<Holder>,
    /// Where QEMU's monitor is to listen, for the device.
    qmp: Option<PathBuf>,
    /// Holds its mount and sockets.
    folder: Option<Folder>,
}

/// A folder for a mount and for disks' sockets, removed at the end with the folders of both.
/// Nothing is removed that is in a mount, or that somebody else put there.
struct Folder(PathBuf);

impl Folder {
    const MOUNT: &str = "mount";
    const DISKS: &str = "disks";

    fn new() -> Result<Self> {
        Ok(Self(tempfile::Builder::new().prefix("lamina-boot-").tempdir()?.keep()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for folder in [self.0.join(Self::MOUNT), self.0.join(Self::DISKS), self.0.clone()] {
            if let Err(why) = std::fs::remove_dir(&folder)
                && why.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!("the folder {} stays: {why}", folder.display());
            }
        }
    }
}

impl Served {
    /// The device that is asked for: one that is being served, or one that is started, which `stop`
    /// ends.
    async fn of(args: &Boot, stop: &StopSwitch) -> Result<Self> {
        let (kind, cpus, set) = (args.attach, args.cpus, args.device.several.interleave);
        let elsewhere = |way| Self { way, holder: None, qmp: None, folder: None };
        // Only CXL has media errors. Who names a monitor has QEMU listen there.
        let tells = kind == AttachKind::Cxl && args.device.qmp.is_empty();
        let monitor = |place: &Place| tells.then(|| args.device.run_dir.join(place.monitor()));
        let ctl = args.ctl.clone();
        if let Some(name) = &args.guest {
            let way = export_of(&ApiAt::in_dir(&args.device.run_dir), name, kind, cpus).await?;
            // QEMU makes its monitor's socket there.
            PrivateDir::open(&args.device.run_dir)?;
            let qmp = monitor(&Place::Guest(name.clone()));
            if !args.print_command {
                qmp.iter().try_for_each(|socket| check_monitor(name, socket))?;
            }
            return Ok(Self { qmp, ..elsewhere(way) });
        }
        if let Some(socket) = &args.shmem {
            return Ok(elsewhere(Way::region(socket.clone())));
        }
        if !args.disks.is_empty() {
            return Ok(elsewhere(Way::disks(args.disks.clone(), ctl, cpus)));
        }
        if let Some((base, views)) = args.base.clone().zip(args.views_file.clone())
            && kind != AttachKind::VhostUser
        {
            return Ok(elsewhere(Way::files(kind, Files { base, views, ctl, set }, args.mailbox.clone())?));
        }
        let folder = Folder::new()?;
        let mut device = args.device.clone();
        device.powers_of_two = kind == AttachKind::Ivshmem;
        if kind == AttachKind::VhostUser {
            let both = vec![DiskArg::Both(folder.0.join(Folder::DISKS))];
            let holder = start(device, PartitionArgs::default(), args.mount.clone(), both, stop).await?;
            let ready = &holder.ready;
            let way = Way::disks(sockets(&ready.disks, None), ready.ctl.clone(), cpus);
            return Ok(Self { way, holder: Some(holder), qmp: None, folder: Some(folder) });
        }
        let mount = args.mount.clone().unwrap_or_else(|| folder.0.join(Folder::MOUNT));
        let holder = start(device, PartitionArgs::default(), Some(mount), Vec::new(), stop).await?;
        let files = whole(&holder.ready, set).context(
            "the image is divided among guests: serve it with `lamina serve`, then boot each with --guest",
        )?;
        let way = Way::files(kind, files, None)?;
        Ok(Self { way, holder: Some(holder), qmp: monitor(&Place::Root), folder: Some(folder) })
    }
}

/// Refuses to boot a guest that is booted: its QEMU would lose its monitor's socket to the next.
fn check_monitor(name: &str, socket: &Path) -> Result<()> {
    match peer::connect(socket) {
        Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(()),
        _ => bail!("{name} is booted already: somebody listens on {}, its QEMU's monitor", socket.display()),
    }
}

/// The files at the root of a mount.
pub(crate) fn whole(ready: &life::Ready, set: Option<Interleave>) -> Option<Files> {
    let path = |window: &Option<WindowFile>| window.as_ref()?.path.clone();
    let (base, views) = path(&ready.base).zip(path(&ready.views))?;
    Some(Files { base, views, ctl: ready.ctl.clone(), set })
}

/// Prepares the boot that is asked for, on `way`.
pub(crate) async fn prepare(
    args: Boot,
    way: &Way,
    files: Vec<GuestFile>,
    qmp: Option<PathBuf>,
) -> Result<Prepared> {
    let mut config = BootConfig::attached(way.attach.clone());
    config.ctl_socket.clone_from(&way.ctl);
    config.qmp = qmp;
    config.programs = files;
    (config.extras, config.python) = (args.extras, args.python);
    config.interactive = args.script.is_none();
    config.run = args.script.is_some().then(|| SCRIPT.to_owned());
    config.memory_mib = args.memory.unwrap_or(config.memory_mib);
    // A guest's access to an interleave set is QEMU's to do, and KVM cannot hand every instruction
    // on.
    let emulated = matches!(&way.attach, Attach::Cxl(cxl) if cxl.targets.is_some());
    let accel = args.accel.or(emulated.then_some(Accel::Tcg));
    (config.cpus, config.accel, config.huge_pages, config.extra_args) =
        (args.cpus, accel, args.huge_pages, args.qemu);
    Ok(tokio::task::spawn_blocking(move || launch::prepare(&config)).await??)
}

/// The signals that end guests.
pub(crate) struct Signals(Ending);

impl Signals {
    /// From now on these signals do not end this process.
    pub(crate) fn watch() -> Result<Self> {
        Ok(Self(Ending::watch()?))
    }

    /// Waits for the next: why a boot ends.
    async fn next(&mut self) -> anyhow::Error {
        anyhow!("the boot was ended by {}", self.0.next().await)
    }

    /// What comes of `work`, which is left alone if a signal comes and it does not end soon.
    pub(crate) async fn or_leave<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::pin!(work);
        tokio::select! {
            done = &mut work => done,
            ended = self.next() => {
                // Soon enough, what it made is taken away again.
                drop(tokio::time::timeout(LEAVE, work).await);
                Err(ended)
            }
        }
    }

    /// What comes of `work`, which `stop` ends if a signal comes. At the next one it is left alone:
    /// a device that does not answer heeds nothing.
    pub(crate) async fn or_stop<T>(
        &mut self,
        stop: &StopSwitch,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::pin!(work);
        tokio::select! {
            done = &mut work => done,
            ended = self.next() => {
                stop.stop();
                tokio::select! {
                    done = work => drop(done),
                    _ = self.next() => {}
                }
                Err(ended)
            }
        }
    }
}

/// Runs guests at once, to the end of each: the statuses of their scripts. A signal ends them all,
/// and so does one of them that fails.
pub(crate) async fn run(guests: Vec<Ready>, mut signals: Signals) -> Result<Vec<Option<i32>>> {
    let (mut running, mut ends) = (Vec::new(), JoinSet::new());
    let mut statuses = vec![None; guests.len()];
    let mut failed = None;
    for (index, Ready { name, prepared, console }) in guests.into_iter().enumerate() {
        let named = move |why: BootError| match &name {
            Some(name) => anyhow::Error::from(why).context(format!("guest {name}")),
            None => why.into(),
        };
        match prepared.spawn(console) {
            Ok(guest) => {
                guest.pid().into_iter().for_each(oom::put_back);
                let guest = Arc::new(guest);
                running.push(Arc::clone(&guest));
                ends.spawn_blocking(move || (index, guest.wait(None).map_err(named)));
            }
            Err(why) => {
                failed = Some(named(why));
                break;
            }
        }
    }
    let end_all = || running.iter().for_each(|guest| guest.kill());
    if failed.is_some() {
        end_all();
    }
    loop {
        let end = tokio::select! {
            end = ends.join_next() => end,
            ended = signals.next() => {
                failed.get_or_insert(ended);
                end_all();
                continue
            }
        };
        // What ends of the others after one that failed does so because of that.
        let why = match end {
            None => break,
            Some(Ok((index, Ok(outcome)))) => {
                statuses[index] = outcome.status;
                continue;
            }
            Some(Ok((_, Err(why)))) => why,
            Some(Err(why)) => why.into(),
        };
        failed.get_or_insert(why);
        end_all();
    }
    failed.map_or(Ok(statuses), Err)
}

/// The status that a script's becomes.
pub(crate) fn exit_code(status: Option<i32>) -> ExitCode {
    status.and_then(|status| u8::try_from(status).ok()).map_or(ExitCode::SUCCESS, ExitCode::from)
}

/// The way to what the guest or host `name` has of the device that answers at `api`.
async fn export_of(api: &ApiAt, name: &str, kind: AttachKind, cpus: u32) -> Result<Way> {
    let exports = client::exports(api).await?;
    let known: Vec<_> = exports.iter().filter_map(|export| export["name"].as_str()).collect();
    let known = known.join(", ");
    let export = exports.iter().find(|export| export["name"] == name);
    let export =
        export.with_context(|| format!("the device has no guest or host {name:?}; it has: {known}"))?;
    let disks = if kind == AttachKind::VhostUser { client::disk_list(api).await? } else { Vec::new() };
    way_to(export, &disks, kind, cpus)
}

/// The way to an export, as a device reports it, of whose disks these are all.
pub(crate) fn way_to(export: &Value, disks: &[Value], kind: AttachKind, cpus: u32) -> Result<Way> {
    let path = |value: &Value| value.as_str().map(PathBuf::from);
    let ctl = path(&export["ctl"]);
    if kind == AttachKind::VhostUser {
        let name = export["name"].as_str().unwrap_or_default();
        let sockets = sockets(disks, Some(name));
        ensure!(!sockets.is_empty(), "{name} has no disks: serve them with --guest {name}=BYTES,disks=DIR");
        return Ok(Way::disks(sockets, ctl, cpus));
    }
    let (base, views) = path(&export["base"]["path"])
        .zip(path(&export["views"]["path"]))
        .context("the device tells of no files")?;
    Way::files(kind, Files { base, views, ctl, set: None }, None)
}

/// The sockets of disks, as a device tells of them, that show a guest's partition, or everything.
pub(crate) fn sockets(disks: &[Value], guest: Option<&str>) -> Vec<PathBuf> {
    let theirs = disks.iter().filter(|disk| disk["guest"].as_str() == guest);
    theirs.filter_map(|disk| disk["socket"].as_str().map(PathBuf::from)).collect()
}

/// Starts a device, which `stop` ends.
pub(crate) async fn start(
    device: DeviceArgs,
    partition_table: PartitionArgs,
    mount: Option<PathBuf>,
    disks: Vec<DiskArg>,
    stop: &StopSwitch,
) -> Result<Holder> {
    let stop = stop.clone();
    let started = move || Holder::start(&device, &partition_table, mount, disks, &stop);
    tokio::task::spawn_blocking(started).await??.context("the device was stopped while it started")
}

/// What goes into the guest: the driver if it needs one, the shim if it is at hand, the script, and
/// what was asked for.
pub(crate) async fn programs(args: &Boot) -> Result<Vec<GuestFile>> {
    let mut files = Vec::new();
    if args.attach == AttachKind::Shmem {
        files.push(tokio::task::spawn_blocking(shmem::driver).await??);
    }
    let shim = env::var_os(GUEST_PROGRAMS).map(|folder| Path::new(&folder).join("lamina-shim"));
    if let Some(path) = shim.filter(|path| path.is_file()) {
        files.push(GuestFile::program("/bin/lamina-shim", path));
    } else {
        tracing::warn!(
            "{GUEST_PROGRAMS} names no folder with lamina-shim: the guest goes without; ./x boot brings it"
        );
    }
    if let Some(script) = &args.script {
        let text = std::fs::read_to_string(script)
            .with_context(|| format!("cannot read the script {}", script.display()))?;
        files.push(GuestFile::script(SCRIPT, text));
    }
    for (host, guest) in &args.put {
        ensure!(host.is_file(), "{} is not a file that could be put into the guest", host.display());
        files.push(GuestFile { path: guest.clone(), source: Source::Host(host.clone()), mode: 0o755 });
    }
    Ok(files)
}
