//! `lamina boot`: a guest with a device attached, for a person or a script.
//!
//! The guest goes before the device: QEMU has ended, or is killed, before the mount is taken away under it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use lamina::serve::IvshmemServer;
use lamina_abi::Interleave;
use lamina_qemu::{
    Accel, Attach, AttachKind, BootConfig, Cxl, Guest, GuestFile, Ivshmem, Lanes, Shmem, Source, VhostUser,
    launch,
};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{Boot, DeviceArgs, DiskArg};
use crate::client;
use crate::division::DivisionArgs;
use crate::holder::{Holder, StopSwitch, oom};
use crate::life::WindowFile;
use crate::shmem;

/// The folder with the guest's static programs, which `./x` sets.
const GUEST_PROGRAMS: &str = "LAMINA_GUEST_PROGRAMS";
/// Where the script goes in the guest.
const SCRIPT: &str = "/run.sh";

/// Boots a guest and waits for its end: the exit status of its script.
pub(crate) async fn boot(args: Boot) -> Result<ExitCode> {
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    let mut files = programs(&args)?;
    let Boot {
        attach,
        mut device,
        mount,
        mut base,
        mut views_file,
        disks,
        mailbox,
        mut ctl,
        guest,
        shmem,
        ..
    } = args;
    ensure!(disks.is_empty() || attach == AttachKind::VhostUser, "--disk goes with --attach vhost-user");
    if let Some(name) = guest {
        ensure!(attach == AttachKind::Cxl, "--guest goes with --attach cxl");
        let seat = seat(&device.run_dir.join("api.sock"), &name).await?;
        let path = |value: &Value| value.as_str().map(PathBuf::from);
        (base, views_file, ctl) =
            (path(&seat["base"]["path"]), path(&seat["views"]["path"]), path(&seat["ctl"]));
    }
    ensure!(
        mailbox.is_none() || attach == AttachKind::Ivshmem && base.is_some(),
        "--mailbox goes with --attach ivshmem, --base and --views-file"
    );
    ensure!(shmem.is_none() || attach == AttachKind::Shmem, "--shmem goes with --attach shmem");
    if attach == AttachKind::Shmem {
        files.push(tokio::task::spawn_blocking(shmem::driver).await??);
    }
    let set = device.several.interleave;
    ensure!(set.is_none() || attach == AttachKind::Cxl, "--interleave goes with --attach cxl");
    device.powers_of_two = attach == AttachKind::Ivshmem;
    let (mut qmp, mut server, mut region) = (None, None, None);
    // Whatever serves the device lives until the guest has ended.
    let (attach, ctl, served, folder) = 'way: {
        match (attach, base.zip(views_file)) {
            (AttachKind::Cxl, Some((base, views))) => (windows(base, views, set)?, ctl, None, None),
            (AttachKind::Ivshmem, Some((base, views))) => {
                let folder = tempfile::Builder::new().prefix("lamina-boot-").tempdir()?;
                if let (None, Some(ctl)) = (&mailbox, &ctl) {
                    server = Some(IvshmemServer::serve(&folder.path().join("mailbox.sock"), ctl)?);
                }
                let mailbox = mailbox.or_else(|| server.as_ref().map(|server| server.path().to_owned()));
                (shared(base, views, mailbox)?, None, None, Some(folder))
            }
            (AttachKind::Shmem, _) if shmem.is_some() => {
                (Attach::Shmem(Shmem { socket: shmem.unwrap_or_default() }), None, None, None)
            }
            (AttachKind::Shmem, Some((base, views))) => {
                let folder = tempfile::Builder::new().prefix("lamina-boot-").tempdir()?;
                let socket = folder.path().join("shmem.sock");
                let window = |path: PathBuf| {
                    Ok::<_, anyhow::Error>(WindowFile { bytes: bytes(&path)?, path: Some(path) })
                };
                region =
                    Some(shmem::serve(&socket, Some(&window(base)?), Some(&window(views)?), ctl.as_deref())?);
                (Attach::Shmem(Shmem { socket }), None, None, Some(folder))
            }
            (AttachKind::VhostUser, _) if !disks.is_empty() => {
                (Attach::VhostUser(VhostUser { disks, queues: queues(args.cpus) }), ctl, None, None)
            }
            (AttachKind::VhostUser, _) => {
                let folder = tempfile::Builder::new().prefix("lamina-boot-").tempdir()?;
                let both = vec![DiskArg::Both(folder.path().join("disks"))];
                let served = start(device, mount, both).await?;
                let socket = |disk: &serde_json::Value| disk["socket"].as_str().map(PathBuf::from);
                let disks = served.ready.disks.iter().filter_map(socket).collect();
                let attach = Attach::VhostUser(VhostUser { disks, queues: queues(args.cpus) });
                (attach, served.ready.ctl.clone(), Some(served), Some(folder))
            }
            (AttachKind::Cxl | AttachKind::Ivshmem | AttachKind::Shmem, None) => {
                let folder = tempfile::Builder::new().prefix("lamina-boot-").tempdir()?;
                let mount = mount.unwrap_or_else(|| folder.path().join("mount"));
                let monitor = folder.path().join("qmp.sock");
                let device = DeviceArgs { qmp: device.qmp.or_else(|| Some(monitor.clone())), ..device };
                // Only CXL has media errors.
                qmp = device.qmp.clone().filter(|socket| attach == AttachKind::Cxl && *socket == monitor);
                let served = start(device, Some(mount), Vec::new()).await?;
                if attach == AttachKind::Shmem {
                    let socket = folder.path().join("shmem.sock");
                    region = Some(shmem::serve_ready(&socket, &served.ready)?);
                    break 'way (Attach::Shmem(Shmem { socket }), None, Some(served), Some(folder));
                }
                let path = |window: &Option<WindowFile>| window.as_ref()?.path.clone();
                let mounted = path(&served.ready.base).zip(path(&served.ready.views));
                let (base, views) = mounted.context(
                "the image is divided among guests: serve it with `lamina serve`, then boot each with --guest",
            )?;
                let ctl = served.ready.ctl.clone();
                let (attach, ctl) = if let (AttachKind::Ivshmem, Some(ctl)) = (attach, &ctl) {
                    let started = IvshmemServer::serve(&folder.path().join("mailbox.sock"), ctl)?;
                    let attach = shared(base, views, Some(started.path().to_owned()))?;
                    server = Some(started);
                    (attach, None)
                } else {
                    (windows(base, views, set)?, ctl)
                };
                (attach, ctl, Some(served), Some(folder))
            }
        }
    };
    let mut config = BootConfig::attached(attach);
    config.ctl_socket = ctl;
    config.qmp = qmp;
    config.programs = files;
    config.extras = args.extras;
    config.interactive = args.script.is_none();
    config.run = args.script.is_some().then(|| SCRIPT.to_owned());
    config.memory_mib = args.memory.unwrap_or(config.memory_mib);
    // A guest's access to an interleave set is QEMU's to do, and KVM cannot hand every instruction on.
    let accel = args.accel.or(set.map(|_| Accel::Tcg));
    (config.cpus, config.accel, config.huge_pages, config.extra_args) =
        (args.cpus, accel, args.huge_pages, args.qemu);
    let print_command = args.print_command;
    let prepared = tokio::task::spawn_blocking(move || launch::prepare(&config)).await??;
    if print_command {
        println!("{}", prepared.command.to_shell());
    }
    let status = if print_command {
        None
    } else {
        let guest = Arc::new(prepared.spawn(|line| println!("{line}"))?);
        guest.pid().into_iter().for_each(oom::put_back);
        let waiting = Arc::clone(&guest);
        let mut ended = tokio::task::spawn_blocking(move || Guest::wait(&waiting, None));
        let outcome = tokio::select! {
            outcome = &mut ended => outcome?,
            _ = interrupted.recv() => { guest.kill(); ended.await? }
            _ = terminated.recv() => { guest.kill(); ended.await? }
        };
        outcome?.status
    };
    drop(server);
    // Unmounting sleeps.
    let stopped = move || {
        drop(region);
        let stopped = served.map_or(Ok(()), Holder::stop);
        drop(folder);
        stopped
    };
    tokio::task::spawn_blocking(stopped).await??;
    Ok(status.and_then(|status| u8::try_from(status).ok()).map_or(ExitCode::SUCCESS, ExitCode::from))
}

/// The pair of files of the guest or host `name`.
async fn seat(api: &Path, name: &str) -> Result<Value> {
    let seats = client::seats(api).await?;
    let known: Vec<_> = seats.iter().filter_map(|seat| seat["name"].as_str()).collect();
    let known = known.join(", ");
    let found = seats.into_iter().find(|seat| seat["name"] == name);
    found.with_context(|| format!("the device has no guest or host {name:?}; it has: {known}"))
}

/// Two files as CXL memory. Those of an interleave set lie beside the base.
fn windows(base: PathBuf, views: PathBuf, set: Option<Interleave>) -> Result<Attach> {
    let (base_bytes, views_bytes) = (bytes(&base)?, bytes(&views)?);
    let lanes = set.map(|set| {
        let lane = |lane| base.with_file_name(format!("lane{lane}"));
        Lanes { set, files: (0..set.ways()).map(lane).collect() }
    });
    Ok(Attach::Cxl(Cxl { base, base_bytes, views, views_bytes, lanes }))
}

/// Two files as shared memory, with a mailbox if there is one.
fn shared(base: PathBuf, views: PathBuf, mailbox: Option<PathBuf>) -> Result<Attach> {
    let (base_bytes, views_bytes) = (bytes(&base)?, bytes(&views)?);
    Ok(Attach::Ivshmem(Ivshmem { base, base_bytes, views, views_bytes, mailbox }))
}

/// Queues of a disk: one for each processor, as far as that helps.
fn queues(cpus: u32) -> u16 {
    u16::try_from(cpus.clamp(1, 8)).expect("at most 8")
}

fn bytes(window: &Path) -> Result<u64> {
    let metadata =
        window.metadata().with_context(|| format!("cannot use the window {}", window.display()))?;
    Ok(metadata.len())
}

/// Starts a device.
async fn start(device: DeviceArgs, mount: Option<PathBuf>, disks: Vec<DiskArg>) -> Result<Holder> {
    let started =
        move || Holder::start(&device, &DivisionArgs::default(), mount, disks, &StopSwitch::default());
    tokio::task::spawn_blocking(started).await??.context("the device was stopped while it started")
}

/// What goes into the guest: the shim if it is at hand, the script, and what was asked for.
fn programs(args: &Boot) -> Result<Vec<GuestFile>> {
    let mut files = Vec::new();
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
    for (host, guest) in &args.files {
        ensure!(host.is_file(), "{} is not a file that could be put into the guest", host.display());
        files.push(GuestFile { path: guest.clone(), source: Source::Host(host.clone()), mode: 0o755 });
    }
    Ok(files)
}
