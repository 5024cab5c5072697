//! `lamina boot`: a guest with a device attached, for a person or a script.
//!
//! The guest goes before the device: QEMU has ended, or is killed, before the mount is taken away under it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, atomic::AtomicBool};

use anyhow::{Context, Result};
use lamina_qemu::{BootConfig, Guest, GuestFile, Source, launch};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::Boot;
use crate::serve::{self, Served};

/// The folder with the guest's static programs, which `./x` sets.
const GUEST_PROGRAMS: &str = "LAMINA_GUEST_PROGRAMS";
/// Where the script goes in the guest.
const SCRIPT: &str = "/run.sh";

/// Boots a guest and waits for its end: the exit status of its script.
pub(crate) async fn boot(args: Boot) -> Result<ExitCode> {
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    let files = programs(&args)?;
    let Boot { device, mount, base, views_file, ctl, .. } = args;
    // Whatever serves the windows lives until the guest has ended.
    let (windows, served, folder) = if let (Some(base), Some(views)) = (base, views_file) {
        (Windows { base, views, ctl }, None, None)
    } else {
        let folder = tempfile::Builder::new().prefix("lamina-boot-").tempdir()?;
        let mount = mount.unwrap_or_else(|| folder.path().join("mount"));
        let served = serve::start(device, mount, Arc::new(AtomicBool::new(false))).await?;
        (Windows::of(&served), Some(served), Some(folder))
    };
    let mut config =
        BootConfig::new(&windows.base, bytes(&windows.base)?, &windows.views, bytes(&windows.views)?);
    config.ctl_socket = windows.ctl;
    config.programs = files;
    config.interactive = args.script.is_none();
    config.run = args.script.is_some().then(|| SCRIPT.to_owned());
    config.memory_mib = args.memory.unwrap_or(config.memory_mib);
    (config.cpus, config.accel, config.huge_pages, config.extra_args) =
        (args.cpus, args.accel, args.huge_pages, args.qemu);
    let print_command = args.print_command;
    let prepared = tokio::task::spawn_blocking(move || launch::prepare(&config)).await??;
    if print_command {
        println!("{}", prepared.command.to_shell());
    }
    let status = if print_command {
        None
    } else {
        let guest = Arc::new(prepared.spawn(|line| println!("{line}"))?);
        let waiting = Arc::clone(&guest);
        let mut ended = tokio::task::spawn_blocking(move || Guest::wait(&waiting, None));
        let outcome = tokio::select! {
            outcome = &mut ended => outcome?,
            _ = interrupted.recv() => { guest.kill(); ended.await? }
            _ = terminated.recv() => { guest.kill(); ended.await? }
        };
        outcome?.status
    };
    // Unmounting sleeps.
    tokio::task::spawn_blocking(move || drop((served, folder))).await?;
    Ok(status.and_then(|status| u8::try_from(status).ok()).map_or(ExitCode::SUCCESS, ExitCode::from))
}

/// The files that a device shows.
struct Windows {
    base: PathBuf,
    views: PathBuf,
    ctl: Option<PathBuf>,
}

impl Windows {
    fn of(served: &Served) -> Self {
        let (base, views) = (served.mount.base_path(), served.mount.views_path());
        Self { base, views, ctl: Some(served.guests.path().into()) }
    }
}

fn bytes(window: &Path) -> Result<u64> {
    let metadata =
        window.metadata().with_context(|| format!("cannot use the window {}", window.display()))?;
    Ok(metadata.len())
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
        anyhow::ensure!(host.is_file(), "{} is not a file that could be put into the guest", host.display());
        files.push(GuestFile { path: guest.clone(), source: Source::Host(host.clone()), mode: 0o755 });
    }
    Ok(files)
}
