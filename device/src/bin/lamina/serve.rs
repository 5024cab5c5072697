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
use lamina::device::Device;
use lamina::load::{self, KvRule, LoadError, LoadOptions, Loaded};
use lamina::model::ModelFile;
use lamina::serve::{
    Api, Control, GuestPort, Mount, MountOptions, MountPoint, PairOptions, Place, Seat, fuse::fuse_present,
    pair::FileReport,
};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{DeviceArgs, Serve};
use crate::division::{DivisionArgs, Plan};
use crate::meter::Meter;

/// Serves until a signal comes.
pub(crate) async fn serve(args: Serve) -> Result<()> {
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = Arc::new(AtomicBool::new(false));
    let json = args.json;
    let mut started = std::pin::pin!(start(args.device, args.division, args.mount, Arc::clone(&stop)));
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
    /// One for each pair of files.
    pub(crate) guests: Vec<GuestPort>,
    api: Api,
    pub(crate) mount: Mount,
    pub(crate) device: Arc<Device>,
    control: Control,
    loaded: Loaded,
}

/// Starts a device and serves it on `mount`; `stop` ends the loading.
pub(crate) async fn start(
    args: DeviceArgs,
    division: DivisionArgs,
    mount: PathBuf,
    stop: Arc<AtomicBool>,
) -> Result<Served> {
    fuse_present()?;
    let options = LoadOptions {
        views: args.views.into_iter().filter(|view| !view.is_empty()).collect(),
        kv: [args.kv, KvRule::by_name().to_vec()].concat(),
        formats: args.format,
        partition: None,
    };
    let plan = Plan::new(division, &args.models, &options, args.capacity, args.views_capacity)?;
    let mut config = plan.config.clone();
    (config.mode, config.codec) = (args.mode, args.codec);
    config.open_windows = args.open_windows;
    let device = Arc::new(Device::new(config)?);

    make_run_dir(&args.run_dir)?;
    let control = Control::new(Arc::clone(&device)).with_sockets_in(&args.run_dir);
    let api = Api::serve(control.clone(), &args.run_dir.join("api.sock"), args.tcp).await?;
    let pairs = plan.pairs(&device)?;
    let port = |pair: &PairOptions| {
        let control = control.of_pair(pair.partition.clone(), pair.place.clone());
        GuestPort::serve(control, &args.run_dir.join(pair.place.socket()))
    };
    let guests = pairs.iter().map(port).collect::<Result<Vec<_>, _>>()?;

    let mut mounting = MountOptions {
        read_ahead_kb: args.read_ahead_kb,
        launder_with: args.launder_with,
        ..MountOptions::default()
    };
    mounting.threads = args.threads.unwrap_or(mounting.threads);
    let loading = Arc::clone(&device);
    let (mount, loaded) = tokio::task::spawn_blocking(move || -> Result<_> {
        let point = MountPoint::prepare(&mount)?;
        let loaded = load_all(&loading, &plan.loads, &stop)?;
        Ok((Mount::of_pairs(&pairs, point, &mounting)?, loaded))
    })
    .await??;
    control.mounted(mount.pairs());
    Ok(Served { guests, api, mount, device, control, loaded })
}

/// Makes the directory for the sockets, for this user alone.
fn make_run_dir(path: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| {
        format!("cannot make the directory {} for the sockets; name another --run-dir", path.display())
    })
}

fn load_all(device: &Device, loads: &[(ModelFile, LoadOptions)], stop: &AtomicBool) -> Result<Loaded> {
    let mut all = Loaded::default();
    let meter = Meter::new("loaded");
    for (model, options) in loads {
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
        let Self { api, device, control, loaded, .. } = self;
        let (root, guests): (Vec<Seat>, Vec<Seat>) =
            control.seats().into_iter().partition(|seat| seat.pair.place == Place::Root);
        let root = root.first();
        let mut out = io::stdout().lock();
        if json {
            let line = json!({
                "ready": true,
                "pid": std::process::id(),
                "mode": device.mode(),
                "codec": device.codec(),
                "base": root.map(|seat| &seat.pair.base),
                "views": root.map(|seat| &seat.pair.views),
                "api": api.socket(),
                "ctl": root.map(|seat| &seat.ctl),
                "tcp": api.address(),
                "guests": guests,
                "tensors": loaded.tensors.len(),
                "view_count": loaded.views.len(),
                "skipped": loaded.skipped,
            });
            writeln!(out, "{line}")?;
            return Ok(out.flush()?);
        }
        for skipped in &loaded.skipped {
            eprintln!("skipped: {} of {}: {}", skipped.view, skipped.tensor, skipped.why);
        }
        for seat in &guests {
            let name = seat.pair.place.name();
            writeln!(out, "{name}: {}, guest {}", windows(seat), seat.ctl.display())?;
        }
        let tcp = api.address().map_or_else(String::new, |address| format!(", http://{address}/"));
        let ready = root.map(|seat| format!("{}, ", windows(seat))).unwrap_or_default();
        let guests = root.map(|seat| format!(", guests {}", seat.ctl.display())).unwrap_or_default();
        writeln!(
            out,
            "ready: {ready}{} tensors, {} views; API {}{tcp}{guests}",
            loaded.tensors.len(),
            loaded.views.len(),
            api.socket().display(),
        )?;
        Ok(out.flush()?)
    }
}

/// A pair's files and their sizes.
fn windows(seat: &Seat) -> String {
    let file = |file: &FileReport| format!("{} ({})", file.path.display(), BinaryBytes(file.bytes));
    format!("{} and {}", file(&seat.pair.base), file(&seat.pair.views))
}
