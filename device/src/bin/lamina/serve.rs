//! `lamina serve`: from the command line to a device that answers, and back down again.
//!
//! The order: claim the sockets and the mount point and read the checkpoints' headers, so that what cannot work is refused
//! before minutes of loading; load, with the API already answering; mount; say so. A signal ends it at any time, and
//! nothing of it stays behind: guests' port and API close before the mount goes, and the mount before the device.

use std::fs;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use lamina::device::{Device, DeviceConfig};
use lamina::load::{self, KvRule, LoadError, LoadOptions, Loaded};
use lamina::model::ModelFile;
use lamina::serve::vhost_user::DiskInfo;
use lamina::serve::{
    Api, Control, DiskServer, GuestPort, Mount, MountOptions, MountPoint, ServeError, Shows,
    fuse::fuse_present,
};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{DeviceArgs, DiskArg, Serve};
use crate::meter::Meter;

/// QEMU's CXL windows are multiples of this.
const CXL_MULTIPLE: u64 = 256 << 20;

/// Serves until a signal comes.
pub(crate) async fn serve(args: Serve) -> Result<()> {
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = Arc::new(AtomicBool::new(false));
    let json = args.json;
    let mut started = std::pin::pin!(start(args.device, args.mount, args.vhost_user, Arc::clone(&stop)));
    let started = loop {
        tokio::select! {
            started = &mut started => break started,
            _ = interrupted.recv() => stop.store(true, Ordering::Relaxed),
            _ = terminated.recv() => stop.store(true, Ordering::Relaxed),
        }
    };
    let served = match started {
        Err(why) if why.downcast_ref::<LoadError>().is_some_and(|why| matches!(why, LoadError::Stopped)) => {
            return Ok(());
        }
        started => started?,
    };
    if !stop.load(Ordering::Relaxed) {
        served.say_ready(json)?;
        tokio::select! { _ = interrupted.recv() => {}, _ = terminated.recv() => {} }
    }
    tracing::info!("stopping");
    // Unmounting sleeps.
    tokio::task::spawn_blocking(move || drop(served)).await?;
    Ok(())
}

/// A device that is being served. Dropped from top to bottom.
pub(crate) struct Served {
    pub(crate) guests: GuestPort,
    api: Api,
    pub(crate) disks: Vec<DiskServer>,
    pub(crate) mount: Option<Mount>,
    pub(crate) device: Arc<Device>,
    loaded: Loaded,
}

/// Starts a device and serves it on `mount` and as `disks`; `stop` ends the loading.
pub(crate) async fn start(
    args: DeviceArgs,
    mount: Option<PathBuf>,
    disks: Vec<DiskArg>,
    stop: Arc<AtomicBool>,
) -> Result<Served> {
    if mount.is_some() {
        fuse_present()?;
    }
    let models = args.models.iter().map(|path| ModelFile::open(path)).collect::<Result<Vec<_>, _>>()?;
    let options = LoadOptions {
        views: args.views.into_iter().filter(|view| !view.is_empty()).collect(),
        kv: [args.kv, KvRule::by_name().to_vec()].concat(),
        formats: args.format,
        partition: None,
    };
    let base_needed = models.iter().map(load::base_needed).sum::<u64>();
    let views_needed = models.iter().map(|model| load::views_needed(model, &options)).sum::<u64>()
        + lamina_abi::DIRECTORY_BYTES;
    let fitting = |bytes: u64| bytes.max(1).next_multiple_of(CXL_MULTIPLE);
    let base_bytes = args.capacity.unwrap_or(fitting(base_needed));
    let views_bytes = args.views_capacity.unwrap_or(fitting(views_needed.max(base_bytes)));
    let mut config = DeviceConfig::new(base_bytes, views_bytes);
    (config.mode, config.codec) = (args.mode, args.codec);
    config.open_windows = args.open_windows;
    let device = Arc::new(Device::new(config)?);

    make_private_dir(&args.run_dir)?;
    let control = Control::new(Arc::clone(&device));
    let api = Api::serve(control.clone(), &args.run_dir.join("api.sock"), args.tcp).await?;
    let guests = GuestPort::serve(control.clone(), &args.run_dir.join("ctl.sock"))?;

    let mut mounting = MountOptions {
        read_ahead_kb: args.read_ahead_kb,
        launder_with: args.launder_with,
        ..MountOptions::default()
    };
    mounting.threads = args.threads.unwrap_or(mounting.threads);
    let loading = Arc::clone(&device);
    let (mount, loaded) = tokio::task::spawn_blocking(move || -> Result<_> {
        let point = mount.map(|mount| MountPoint::prepare(&mount)).transpose()?;
        let loaded = load_all(&loading, &models, &options, &stop)?;
        Ok((point.map(|point| Mount::new(loading, point, &mounting)).transpose()?, loaded))
    })
    .await??;
    if let Some(mount) = &mount {
        control.mounted(mount.coherence());
    }
    let disks = tokio::task::spawn_blocking(move || serve_disks(&control, disks)).await??;
    Ok(Served { guests, api, disks, mount, device, loaded })
}

/// Serves disks, and makes the directories for their sockets.
fn serve_disks(control: &Control, disks: Vec<DiskArg>) -> Result<Vec<DiskServer>> {
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
    let served = all.into_iter().map(|(socket, shows)| DiskServer::bind(control, shows, &socket));
    Ok(served.collect::<Result<_, ServeError>>()?)
}

/// Makes a directory for sockets, for this user alone.
fn make_private_dir(path: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| {
        format!("cannot make the directory {} for the sockets; name another", path.display())
    })
}

fn load_all(
    device: &Device,
    models: &[ModelFile],
    options: &LoadOptions,
    stop: &AtomicBool,
) -> Result<Loaded> {
    let mut all = Loaded::default();
    let meter = Meter::new("loaded");
    for model in models {
        let loaded = load::load_model(device, model, options, |progress| {
            meter.show(&progress);
            if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        all.tensors.extend(loaded.tensors);
        all.views.extend(loaded.views);
        all.skipped.extend(loaded.skipped);
    }
    meter.finish();
    Ok(all)
}

impl Served {
    /// Prints the one line that says that everything can be used.
    fn say_ready(&self, json: bool) -> Result<()> {
        let Self { guests, api, disks, mount, device, loaded, .. } = self;
        let mounted = mount.as_ref().map(|mount| (mount.base_path(), mount.views_path()));
        let disks: Vec<_> = disks.iter().map(DiskServer::info).collect();
        let mut out = io::stdout().lock();
        if json {
            let line = json!({
                "ready": true,
                "pid": std::process::id(),
                "mode": device.mode(),
                "codec": device.codec(),
                "base": { "path": mounted.as_ref().map(|(base, _)| base), "bytes": device.base_bytes() },
                "views": { "path": mounted.as_ref().map(|(_, views)| views), "bytes": device.views_bytes() },
                "disks": disks,
                "api": api.socket(),
                "ctl": guests.path(),
                "tcp": api.address(),
                "tensors": loaded.tensors.len(),
                "view_count": loaded.views.len(),
                "skipped": loaded.skipped,
            });
            writeln!(out, "{line}")?;
        } else {
            for skipped in &loaded.skipped {
                eprintln!("skipped: {} of {}: {}", skipped.view, skipped.tensor, skipped.why);
            }
            let tcp = api.address().map_or_else(String::new, |address| format!(", http://{address}/"));
            let (base, views) = (BinaryBytes(device.base_bytes()), BinaryBytes(device.views_bytes()));
            let mut places = Vec::new();
            if let Some((base_path, views_path)) = &mounted {
                places.push(format!(
                    "{} ({base}) and {} ({views})",
                    base_path.display(),
                    views_path.display()
                ));
            }
            let disk = |disk: &DiskInfo| format!("disk {} on {}", disk.serial, disk.socket.display());
            places.extend(disks.iter().map(disk));
            writeln!(
                out,
                "ready: {}; {} tensors, {} views; API {}{tcp}, guests {}",
                places.join(", "),
                loaded.tensors.len(),
                loaded.views.len(),
                api.socket().display(),
                guests.path().display(),
            )?;
        }
        Ok(out.flush()?)
    }
}
