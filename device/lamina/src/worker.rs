//! The worker: does the work of a device that a [holder](crate::holder) holds, until it is told to
//! stop, dies, or the holder dies.
//!
//! A stop comes in this order, so that no peer keeps what was stored from reaching the image:
//!
//! 1. Nothing new is begun, and nobody is waited for: the sockets take nobody more, who tells QEMUs
//!    of poison is told to end, and so are a snapshot that is being saved and the disks, which
//!    leave what they do after the piece they are at and do not give it back.
//! 2. The disks' requests that are at a piece have [`QUIET`] for it, since they may need the mount.
//! 3. The mount is settled: every dirty page is written back, for as long as that goes on.
//! 4. Open KV windows are coded, and the image is brought to the disk.
//! 5. Only now those are waited for who deal with peers, until [`QUIET`] is over. Who has not ended
//!    by then ends with the process, as do all other threads.
//!
//! Before each of these steps, as pages are written back, and as long as step 4 takes, the holder
//! is told that stopping goes on.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lamina_device::device::{Device, DeviceConfig, Partition, Watcher};
use lamina_device::files::{self, Apart};
use lamina_device::load::{self, Decision, LoadError, LoadOptions, Loaded, Progress};
use lamina_serve::qmp::{PoisonReporter, Reported};
use lamina_serve::{
    Additions, Api, Channels, Control, DiskServer, ExportOptions, GuestPort, Mount, MountOptions, OurMount,
    Place, abort_connection,
};
use lamina_store::Worker;
use lamina_store::host_memory::HostMemory;
use lamina_store::image::Image;
use lamina_store::mode::Mode;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::against::bases_of;
use crate::args::{DeviceArgs, PartitionArgs};
#[cfg(debug_assertions)]
use crate::failpoints;
use crate::life::{self, Order, Ready, WindowFile, Word};
use crate::log;
use crate::meter::Meter;
use crate::modelled::{self, Live, Recordings};
use crate::out;
use crate::partition_table::{Load, Plan};

/// What a worker ends with after a panic.
const PANICKED: i32 = 101;
/// What lists of processes call it: at most 15 bytes.
const COMM: &str = "lamina-worker";
/// How often it is noted what was counted, if that has changed.
const NOTE_EVERY: Duration = Duration::from_millis(250);
/// How long after a sync that failed another is tried.
const SYNC_AGAIN: Duration = Duration::from_secs(10);
/// How long a worker that dies waits for its log to be written: its guests wait meanwhile.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How long those may take, when a device stops, who wait for a peer.
const QUIET: Duration = Duration::from_secs(3);
/// How often the holder is told that stopping goes on.
const PACE: Duration = Duration::from_secs(1);
/// How often a snapshot that waits for its reader looks whether the device is to stop.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The rest of a worker's life: never returns.
pub(crate) fn work(args: &DeviceArgs, partition_table: &PartitionArgs) -> ! {
    // For all threads, which inherit it: they answer for the mount, or hold locks that who answers
    // needs. Memory that they ask for must not wait for pages that they are to write back.
    if let Err(why) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("memory may wait for the mount: {why}");
    }
    // It was started by the number of a descriptor, which says nothing to who lists processes.
    if let Err(why) = std::fs::write("/proc/self/comm", COMM) {
        tracing::debug!("this process has no name of its own: {why}");
    }
    let status = match run(args, partition_table) {
        Ok(()) => 0,
        Err(why) => {
            tracing::error!("{}", out::reason(&why));
            1
        }
    };
    log::flush(log::TIMEOUT);
    // Threads that wait for the mount are not waited for.
    std::process::exit(status);
}

/// Who models hardware, if that is asked for.
fn watcher(args: &DeviceArgs, mode: Mode) -> Result<Option<Arc<dyn Watcher>>> {
    let Some(profile) = &args.model_dram else { return Ok(None) };
    Ok(Some(Live::start(mode, profile)?))
}

fn run(args: &DeviceArgs, partition_table: &PartitionArgs) -> Result<()> {
    let line = life::line_of_worker()?;
    let stop = Arc::new(AtomicBool::new(false));
    let mounts = Arc::new(Mutex::new(Mounts::default()));
    let orders = listen(line.try_clone()?, Arc::clone(&stop), Arc::clone(&mounts))?;
    let Some((Order::Open { image, first, deaths, replaced, careful, ctl, tcp, ledger }, descriptors)) =
        orders.recv().ok()
    else {
        bail!("a worker is started by `lamina serve`");
    };
    let counted = watch_panics(careful);
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().context("the holder gives too few descriptors");
    let path = image;
    let image = Image::from_file(File::from(next()?), &path)?.context("the image is empty")?;
    if let Some(why) = first.then(|| image.loses_room()).flatten() {
        tracing::warn!(
            "room that is made in the image {} may be taken by others: {why}. If that file system fills up, the device may be given up: keep some room free on it",
            path.display()
        );
    }
    let reserve = if image.is_in_memory() { args.memory_reserve } else { Some(0) };
    let image = image.within(HostMemory::of_this_host(reserve));
    let plan = Plan::new(partition_table, args, Some((image.superblock(), &path)))?;
    ensure!(plan.sockets(&args.run_dir).eq(ctl.iter().cloned()), "the holder has sockets for other guests");
    let api = next()?.into();
    let ports = ctl.into_iter().map(|path| Ok((path, next()?.into()))).collect::<Result<Vec<_>>>()?;
    let tcp = if tcp { Some(next()?.into()) } else { None };
    let image = if ledger {
        image.beside(next()?.into(), HostMemory::of_this_host(args.memory_reserve))
    } else {
        image
    };
    let runtime = Unawaited(Some(tokio::runtime::Builder::new_multi_thread().enable_all().build()?));
    let _inside = runtime.0.as_ref().map(tokio::runtime::Runtime::enter);
    let interleaving = args.several.interleaving();
    let observe = args.observe;
    let config = DeviceConfig {
        first_process: first,
        // A ledger that is wrong would end each worker: after some deaths one counts for itself.
        worker: holder().filter(|_| !careful).map(|holder| Worker { holder, number: deaths }),
        interleaving,
        observe,
        watcher: watcher(args, image.superblock().mode)?,
        ..DeviceConfig::new(0, 0)
    };
    let device = Arc::new(Device::open(image, &config)?);
    device.set_worker_deaths(deaths.saturating_sub(replaced));
    let _ = counted.set(Arc::clone(&device));
    sync_regularly(&device, args.sync_seconds)?;
    note_regularly(&device)?;
    let exports = plan.exports(&device, &args.run_dir)?;
    let planner = Some(modelled::planner()?.into());
    let additions = Additions { recorder: Some(Arc::new(Recordings::default())), planner };
    let control = Control::new(Arc::clone(&device)).with_sockets_in(&args.run_dir).with(additions);
    let adopt = || -> Result<_> {
        let api = Api::adopt(control.clone(), api, &args.run_dir.join("api.sock"), tcp)?;
        let guests = exports.iter().zip(ports).map(|(export, (path, listener))| {
            let control = control.of_export(export.partition.clone(), export.place.clone());
            GuestPort::adopt(control, listener, &path)
        });
        Ok(Answering { api, guests: guests.collect::<Result<_, _>>()? })
    };
    let mut adopt = Some(adopt);
    let mut answering = None;
    let loaded = if first {
        // Who waits for a large checkpoint may look at the counters.
        answering = adopt.take().map(|adopt| adopt()).transpose()?;
        let loaded = load_all(&device, args, &plan, &stop);
        let loaded = match loaded {
            Err(why) if matches!(why.downcast_ref(), Some(LoadError::Stopped)) => {
                return Ok(life::send(&line, &Word::Stopped, &[])?);
            }
            Err(why) => {
                return Ok(life::send(&line, &Word::Failed(out::reason(&why)), &[])?);
            }
            Ok(loaded) => loaded,
        };
        life::send(&line, &Word::Loaded, &[])?;
        loaded
    } else {
        Loaded::default()
    };
    // What waits in the page cache since a worker died is brought to the device all the same: a
    // later worker that is to stop answers first.
    let mut stopping = false;
    let order = loop {
        match orders.recv() {
            Ok((Order::Stop, _)) if !first => stopping = true,
            order => break order,
        }
    };
    let (served, reporters, paced, mut files_follow) = match order {
        Ok((Order::Serve { mount, reported, paced, qmp, disks, files }, descriptors)) => {
            let others: Vec<_> = args.qmp.iter().cloned().chain(qmp).collect();
            let reporters = reporters(plan.monitors(&args.run_dir, &others, &device)?, reported, &line)?;
            let whole = mount.as_ref().and_then(|(path, _)| OurMount::at(path));
            mounts.lock().unwrap_or_else(PoisonError::into_inner).whole = whole;
            let served = Served::new(args, &exports, &control, mount, disks, descriptors, !first);
            (served, reporters, paced, files)
        }
        _ => return Ok(life::send(&line, &Word::Stopped, &[])?),
    };
    let mut served = match served {
        Ok(served) => served,
        Err(why) => return Ok(life::send(&line, &Word::Failed(out::reason(&why)), &[])?),
    };
    // A flush that is asked of a later worker finds the mount.
    let answering = match adopt {
        Some(adopt) => Some(adopt()?),
        None => answering,
    };
    let answering = answering.context("nobody answers the sockets")?;
    let ready = served.ready(&device, &control, &answering, &exports, &loaded)?;
    life::send(&line, &Word::Ready(Box::new(ready)), &[])?;
    while (!stopping || files_follow)
        && let Ok((order, descriptors)) = orders.recv()
    {
        match order {
            // Whoever reads it may take its time, and orders are heard meanwhile.
            Order::Save => {
                let (device, control, stop) = (Arc::clone(&device), control.clone(), Arc::clone(&stop));
                let line = line.try_clone()?;
                let run = move || {
                    let saved = save(&device, &control, descriptors, &stop);
                    // A holder that is gone takes this process with it.
                    let _ = life::send(&line, &Word::Saved(saved), &[]);
                };
                thread::Builder::new().name("snapshot".into()).spawn(run)?;
            }
            Order::ServeFiles { minor, answered } => {
                mounts.lock().unwrap_or_else(PoisonError::into_inner).files.clone_from(&minor);
                served.serve_files(args, descriptors, minor.as_deref(), answered)?;
                files_follow = false;
            }
            Order::Stop => stopping = true,
            Order::Open { .. } | Order::Serve { .. } => {}
        }
    }
    tracing::info!("stopping");
    reporters.iter().for_each(PoisonReporter::stop);
    drop(answering);
    let goes_on = || {
        if paced {
            // A holder that is gone takes this process with it.
            let _ = life::send(&line, &Word::Stopping, &[]);
        }
    };
    control.stop_detaching();
    if let Err(why) = served.end(&device, &goes_on) {
        return Ok(life::send(&line, &Word::Failed(out::reason(&why)), &[])?);
    }
    let deadline = Instant::now() + QUIET;
    for reporter in reporters {
        reporter.end_by(deadline);
    }
    Ok(life::send(&line, &Word::Stopped, &[])?)
}

/// A runtime whose end waits for no task: what one does may wait for the mount.
struct Unawaited(Option<tokio::runtime::Runtime>);

impl Drop for Unawaited {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Who tells guests of poison.
fn reporters(
    monitors: Vec<(PathBuf, Partition)>,
    reported: Option<BTreeMap<PathBuf, Reported>>,
    line: &UnixStream,
) -> Result<Vec<PoisonReporter>> {
    let (listens, mut reported) = (reported.is_some(), reported.unwrap_or_default());
    let start = |(socket, partition): (PathBuf, Partition)| {
        let (line, place) = (line.try_clone()?, socket.clone());
        let note = move |reported| {
            if listens {
                // A holder that is gone takes this process with it.
                let _ = life::send(&line, &Word::Reported(place.clone(), reported), &[]);
            }
        };
        Ok(PoisonReporter::start(partition, &socket, reported.remove(&socket).unwrap_or_default(), note)?)
    };
    monitors.into_iter().map(start).collect()
}

/// Has the image brought to the disk every so many seconds, or only when much is held for the last
/// time if that is 0. It ends with the process.
fn sync_regularly(device: &Arc<Device>, seconds: u32) -> Result<()> {
    let device = Arc::clone(device);
    let every = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    let sync = move || {
        loop {
            device.wait_to_sync(every);
            if device.sync().is_err() {
                // The device says so itself. It goes on without.
                thread::sleep(SYNC_AGAIN);
            }
        }
    };
    thread::Builder::new().name("sync".into()).spawn(sync)?;
    Ok(())
}

/// A number that no other holder has since the host was started: when it was started, and which
/// process it is.
fn holder() -> Option<u64> {
    let process = rustix::process::getppid()?.as_raw_nonzero().get().unsigned_abs();
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name is in parentheses and may contain anything. The fields after it begin with the
    // third.
    let mut fields = stat.rsplit_once(") ")?.1.split_ascii_whitespace();
    let started: u64 = fields.nth(22 - 3)?.parse().ok()?;
    Some(started << 22 | u64::from(process))
}

/// Notes now and then what the next worker need not count again.
fn note_regularly(device: &Arc<Device>) -> Result<()> {
    let device = Arc::clone(device);
    let note = move || {
        loop {
            thread::sleep(NOTE_EVERY);
            device.note_accounts();
        }
    };
    thread::Builder::new().name("accounts".into()).spawn(note)?;
    Ok(())
}

/// Writes a snapshot of everything that was stored by now to a file, unless the device is to
/// `stop`: its bytes of data.
fn save(
    device: &Device,
    control: &Control,
    descriptors: Vec<OwnedFd>,
    stop: &AtomicBool,
) -> Result<u64, String> {
    let [file] = <[_; 1]>::try_from(descriptors).map_err(|_| "a snapshot goes to one file".to_owned())?;
    let file = SnapshotFile::new(file.into(), stop).map_err(|why| why.to_string())?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    control.flush_all().map_err(|why| why.to_string())?;
    let saved = device.save(&mut file).and_then(|bytes| {
        file.flush()?;
        file.get_ref().sync()?;
        Ok(bytes)
    });
    saved.map_err(|why| why.to_string())
}

/// Where a snapshot goes: written in pieces, between which it is looked whether the device is to
/// stop. A pipe is waited for only as long as it is not.
struct SnapshotFile<'s> {
    file: File,
    is_regular: bool,
    stop: &'s AtomicBool,
}

impl<'s> SnapshotFile<'s> {
    fn new(file: File, stop: &'s AtomicBool) -> io::Result<Self> {
        let is_regular = file.metadata()?.is_file();
        Ok(Self { file, is_regular, stop })
    }

    fn sync(&self) -> io::Result<()> {
        if self.is_regular { self.file.sync_all() } else { Ok(()) }
    }
}

impl Write for SnapshotFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("the device is being stopped"));
            }
            if self.is_regular {
                return self.file.write(&bytes[..bytes.len().min(1 << 20)]);
            }
            // So much a pipe takes without waiting once it takes anything.
            match poll(&mut [PollFd::new(&self.file, PollFlags::OUT)], Some(&LOOK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return self.file.write(&bytes[..bytes.len().min(libc::PIPE_BUF)]),
                Err(why) => return Err(why.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is mounted.
#[derive(Default)]
struct Mounts {
    whole: Option<OurMount>,
    /// The number of the connection of the files, if they have one of their own.
    files: Option<String>,
}

/// Reads orders; when the holder is gone, so are this process and the mount, and nobody is left
/// asleep on one that nobody answers.
fn listen(
    line: UnixStream,
    stop: Arc<AtomicBool>,
    mounts: Arc<Mutex<Mounts>>,
) -> Result<mpsc::Receiver<(Order, Vec<OwnedFd>)>> {
    let (sender, orders) = mpsc::channel();
    let read = move || {
        while let Ok(Some((order, descriptors))) = life::receive(&line) {
            if matches!(order, Order::Stop) {
                stop.store(true, Ordering::Relaxed);
            }
            if sender.send((order, descriptors)).is_err() {
                // It is over; the process ends by itself.
                return;
            }
        }
        tracing::error!("the holder is gone");
        let Mounts { whole, files } = &*mounts.lock().unwrap_or_else(PoisonError::into_inner);
        abort_connection(files.as_deref());
        if let Some(mount) = whole {
            mount.take_away();
        }
        log::flush(LAST_WORDS);
        std::process::exit(1);
    };
    thread::Builder::new().name("life".into()).spawn(read)?;
    Ok(orders)
}

/// Has every panic be logged and counted, by the device that is given afterwards. If it is not to
/// be survived, it ends the process: what that was about to do is begun anew by the next worker, on
/// what the image holds.
fn watch_panics(survive: bool) -> Arc<OnceLock<Arc<Device>>> {
    let device = Arc::new(OnceLock::<Arc<Device>>::new());
    let counted = Arc::clone(&device);
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(device) = counted.get() {
            device.count_panic();
        }
        log::panicked(panic);
        if !survive {
            log::flush(LAST_WORDS);
            std::process::exit(PANICKED);
        }
    }));
    device
}

/// Loads the checkpoints that the image does not hold already, if all of them may be.
fn load_all(device: &Device, args: &DeviceArgs, plan: &Plan, stop: &AtomicBool) -> Result<Loaded> {
    let unfinished = load::drop_unfinished(device)?;
    let against = bases_of(&plan.loads, &args.bases)?;
    let open = |(load, base): (&Load, &Option<usize>)| {
        let within = base.map(|_| format!("{}/", files::name_of(&load.path)));
        let options = LoadOptions { partition: load.partition.clone(), within, ..args.load_options() };
        Ok((load::open(&load.path, &options, Some(device))?, options))
    };
    let mut loads = plan.loads.iter().zip(&against).map(open).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = loads.iter().flat_map(|(model, _)| model.tensors()).collect();
    for rule in load::unmatched(&args.requested(), &tensors) {
        tracing::warn!("{rule}: no tensor that is to be loaded is called so");
    }
    let reported = |meter: &Meter, progress: Progress<'_>| {
        meter.show(&progress);
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let meter = Meter::new("compared");
    let decisions = load::decide(device, &loads, |progress| reported(&meter, progress))?;
    meter.finish();
    for path in unfinished {
        tracing::warn!(
            "{path} was not loaded whole before: what there was of it is removed; --model loads it anew"
        );
    }
    let mut all = Loaded::default();
    let meter = Meter::new("loaded");
    for (number, decision) in decisions.into_iter().enumerate() {
        let base =
            against[number].map(|base| (files::name_of(&plan.loads[base].path), loads[base].1.clone()));
        let (model, options) = &mut loads[number];
        let path = model.path().display();
        if let (Some((name, base)), Decision::Load { .. }) = (&base, &decision) {
            let (bases, apart) = files::checkpoint_bases(device, model, options, base);
            for Apart { tensor, why } in apart {
                tracing::warn!("{path}: {tensor} is no difference to {name}'s: {why}");
            }
            options.bases = bases;
        }
        match &decision {
            Decision::Load { replacing, .. } if !replacing.is_empty() => {
                tracing::warn!("--replace: {} tensors are removed, and loaded from {path}", replacing.len());
            }
            Decision::Load { .. } => {}
            Decision::Keep { source: None } => tracing::info!("{path} is named twice; it is loaded once"),
            Decision::Keep { .. } | Decision::Adopt { .. } => {
                tracing::info!("the image holds {path} already; it is not loaded again");
                let (partition, within) = (options.partition.clone(), options.within.clone());
                let requested = LoadOptions { partition, within, ..args.requested() };
                let unheeded = Vec::from_iter(load::unheeded(device, model, &requested));
                if !unheeded.is_empty() {
                    tracing::warn!(
                        "the image holds {path} as it was loaded, and not all of its tensors are as {} says: `lamina view add` makes \
                         views, --replace loads it again",
                        unheeded.join(", ")
                    );
                }
            }
        }
        let loaded =
            load::carry_out(device, model, options, decision, |progress| reported(&meter, progress))?;
        all.tensors.extend(loaded.tensors);
        all.views.extend(loaded.views);
        all.skipped.extend(loaded.skipped);
        // A device that is divided has no folder of models.
        if options.partition.is_none()
            && let name = files::name_of(model.path())
            && let base = base.as_ref().map(|(name, _)| name.as_str())
            && let Err(why) = files::keep_checkpoint(device, model, options, &name, base)
        {
            tracing::warn!("{path} is not shown under models/: {why}");
        }
    }
    meter.finish();
    Ok(all)
}

/// Who answers the sockets.
struct Answering {
    api: Api,
    /// One for each export.
    guests: Vec<GuestPort>,
}

/// What is answered.
struct Served {
    mount: Option<Mount>,
    disks: Vec<DiskServer>,
}

fn mount_options(args: &DeviceArgs, threads: usize) -> MountOptions {
    MountOptions {
        threads,
        read_ahead_kb: args.read_ahead_kb,
        write_back_with: args.write_back_with,
        full_wait: Duration::from_secs(args.full_wait.into()),
        files: args.folder.files,
        cache_bytes: args.cache_bytes,
        write_cache: args.folder.write_cache,
        api: std::path::absolute(args.run_dir.join("api.sock")).ok(),
    }
}

/// Does `work`, and tells `goes_on` at once and each [`PACE`] that it takes.
fn paced<T>(goes_on: &(dyn Fn() + Sync), work: impl FnOnce() -> T) -> T {
    let (done, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let tells = move || {
            while ended.recv_timeout(PACE) == Err(mpsc::RecvTimeoutError::Timeout) {
                goes_on();
            }
        };
        goes_on();
        if let Err(why) = thread::Builder::new().name("paces".into()).spawn_scoped(scope, tells) {
            tracing::warn!("the holder does not hear that the last sync goes on: {why}");
        }
        let worked = work();
        drop(done);
        worked
    })
}

impl Served {
    fn new(
        args: &DeviceArgs,
        exports: &[ExportOptions],
        control: &Control,
        mount: Option<(PathBuf, usize)>,
        disks: Vec<life::Disk>,
        descriptors: Vec<OwnedFd>,
        answered: bool,
    ) -> Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().context("the holder gives too few descriptors");
        let mount = match mount {
            Some((path, threads)) => {
                let requests = (0..threads).map(|_| Ok(File::from(next()?))).collect::<Result<_>>()?;
                let channels = Channels { requests, notices: next()?.into() };
                let mount = Mount::serve(exports, &path, channels, &mount_options(args, threads), answered)?;
                mount.tell(control);
                Some(mount)
            }
            None => None,
        };
        let disks = disks.into_iter().map(|disk| {
            let whose =
                |name: &String| exports.iter().find(|export| export.place == Place::Guest(name.clone()));
            let control = match &disk.guest {
                Some(name) => {
                    let export = whose(name).with_context(|| format!("no guest is called {name}"))?;
                    control.of_export(export.partition.clone(), export.place.clone())
                }
                None => control.clone(),
            };
            Ok(DiskServer::adopt(&control, disk.shows, next()?.into(), &disk.socket)?)
        });
        Ok(Self { disks: disks.collect::<Result<_>>()?, mount })
    }

    /// Answers the mount of the files, too.
    fn serve_files(
        &mut self,
        args: &DeviceArgs,
        descriptors: Vec<OwnedFd>,
        minor: Option<&str>,
        answered: bool,
    ) -> Result<()> {
        let mut requests: Vec<_> = descriptors.into_iter().map(File::from).collect();
        let notices = requests.pop().context("the holder gives too few descriptors")?;
        let mount = self.mount.as_mut().context("the holder has no mount that the files lie in")?;
        let options = mount_options(args, requests.len());
        Ok(mount.serve_files(Channels { requests, notices }, minor, &options, answered)?)
    }

    fn ready(
        &self,
        device: &Device,
        control: &Control,
        answering: &Answering,
        exports: &[ExportOptions],
        loaded: &Loaded,
    ) -> Result<Ready> {
        let Answering { api, guests } = answering;
        let window =
            |of: fn(&Mount) -> PathBuf, bytes| WindowFile { path: self.mount.as_ref().map(of), bytes };
        let root = exports.iter().zip(guests).find(|(export, _)| export.place == Place::Root);
        let partition = root.map(|(export, _)| &export.partition);
        let targets = self.mount.iter().flat_map(Mount::exports).flat_map(|export| export.target_paths());
        let guests = control.served_exports().into_iter().filter(|served| served.export.place != Place::Root);
        Ok(Ready {
            is: true,
            pid: std::process::id(),
            worker: std::process::id(),
            mode: device.mode().to_string(),
            codec: device.codec().to_string(),
            base: partition.map(|partition| window(Mount::base_path, partition.base_bytes())),
            views: partition.map(|partition| window(Mount::views_path, partition.views_bytes())),
            files: self.mount.as_ref().and_then(Mount::files_path),
            targets: targets.collect(),
            guests: guests.map(serde_json::to_value).collect::<Result<_, _>>()?,
            disks: self
                .disks
                .iter()
                .map(|disk| serde_json::to_value(disk.info()))
                .collect::<Result<_, _>>()?,
            api: api.socket().into(),
            ctl: root.map(|(_, port)| port.path().into()),
            tcp: api.address(),
            tensors: device.tensors().len(),
            view_count: device.views().len(),
            skipped: loaded.skipped.iter().map(serde_json::to_value).collect::<Result<_, _>>()?,
        })
    }

    /// Brings every store to the image. `goes_on` is told as it does.
    fn end(mut self, device: &Device, goes_on: &(dyn Fn() + Sync)) -> Result<()> {
        if let Some(models) = self.mount.as_ref().and_then(Mount::models) {
            models.stop();
        }
        self.disks.iter_mut().for_each(DiskServer::stop);
        let deadline = Instant::now() + QUIET;
        self.disks.iter().for_each(|disk| disk.close_by(deadline));
        goes_on();
        let settled = self.mount.as_ref().map_or(Ok(()), |mount| mount.settle(PACE, goes_on));
        // A disk takes its time, and nothing tells how far it is.
        let synced = paced(goes_on, || {
            if let Err(why) = device.flush(0, device.base_bytes()) {
                // What is staged stays staged in the image.
                tracing::warn!("not everything could be coded: {why}");
            }
            #[cfg(debug_assertions)]
            failpoints::sync();
            device.sync_last().context("the image cannot be brought to the disk")
        });
        // Their threads end with the process.
        std::mem::forget(self);
        synced.and(settled.context("stores may be lost"))
    }
}
