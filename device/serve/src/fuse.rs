//! The mount: from a device and a directory to files that can be mapped, an export for each guest
//! or host.
//!
//! Mounting makes these threads: `threads` workers (see `fuse_workers`) and two late answerers; for
//! the models an invalidator; for each export two invalidators and two or three flushers (see
//! [`super::coherence`]), more while these wait, and one that tries write-backs again for which
//! there was no room (see [`super::write_backs`]), with an interleave set one of each kind more for
//! each target; and for a host's one that makes room in its cache. Unmounting brings dirty pages to
//! the device, aborts the connection, so that nobody sleeps on it any more, and joins them all. A
//! process that still maps a window then gets SIGBUS on a page it has not loaded yet; that is what
//! pulling a memory device does.
//!
//! The process that serves a mount must not map its files. The kernel writes dirty pages back and
//! waits for them in `munmap`, with the process's address space locked, and a worker that needs
//! memory then waits for that lock. Reading and writing the files is fine outside of workers. (The
//! flushers' own mapping for `msync` is never stored to, and is unmapped after the connection was
//! aborted.)
//!
//! Two properties of the mount belong to its backing-device information (BDI): `read_ahead_kb`, how
//! much is read when one byte is missing, is bounded when the kernel asks for it first, and needs
//! root in sysfs only to be more than the kernel's 128; `strict_limit` 0 with `max_ratio` 100,
//! without which dirtying pages is throttled to a fraction of the memory's speed, needs root. Who
//! is not goes without.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lamina_device::device::{Device, Partition};
use lamina_files::Files;

use super::ServeError;
use super::cold_pages::ColdPages;
use super::control::Control;
use super::export::{Export, ExportOptions, Place};
use super::export_file::ExportFile;
use super::files::FOLDER;
use super::flusher::WriteBackWith;
use super::fuse_fs::Shown;
use super::fuse_workers::{Workers, ask_again, invalidate};
use super::held_mount::{Channels, HeldMount, usual_threads};
use super::models::Models;
use super::mount_point::{self, MountPoint};
use super::own_mount::{self, own_table};
use super::pools::Pools;
use super::settled_files::{SETTLE, settle_files};
use super::tree::Tree;

/// Threads that sleep in write-backs for view reads and flushes of a device's only export; one does
/// where there are several exports.
const FLUSHERS: usize = 2;
/// Threads that answer view reads after writing back.
const LATE_ANSWERERS: usize = 2;

/// How to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Worker threads.
    pub threads: usize,
    /// KiB read at once when a page is missing, the BDI's `read_ahead_kb`. 4 reads exactly the page
    /// that was touched, so that counters are exact; more is faster for sequential reads.
    pub read_ahead_kb: u32,
    /// How dirty pages are made to reach the device.
    pub write_back_with: WriteBackWith,
    /// How long a write-back may wait for room in the device before what it stores is given up.
    pub full_wait: Duration,
    /// Bytes that the folder `files` may take of the base window; what the device has of files is
    /// shown with 0, too.
    pub files: u64,
    /// Bytes of the mount's files that the page cache may hold; no bound if none are given.
    pub cache_bytes: Option<u64>,
    /// Whether what is written to files waits in the page cache, as what is stored through a
    /// mapping does: until it is synced or closed, or the kernel likes. A device without room says
    /// so then. They are a mount of their own in `files`; see [`Mount::serve_files`].
    pub write_cache: bool,
    /// The API's socket, which the root's attribute `user.lamina.api` names for those who have only
    /// the directory.
    pub api: Option<PathBuf>,
}

/// How long a write-back waits for room unless told otherwise.
pub const FULL_WAIT: Duration = Duration::from_secs(10);

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            threads: usual_threads(),
            read_ahead_kb: 4,
            write_back_with: WriteBackWith::Auto,
            full_wait: FULL_WAIT,
            files: 0,
            cache_bytes: None,
            write_cache: false,
            api: None,
        }
    }
}

/// A mount that is answered.
#[derive(Clone)]
struct Answered {
    workers: Arc<Workers>,
    /// What the invalidators' descriptors are copies of.
    notices: Arc<File>,
}

impl Answered {
    fn invalidate(&self, inode: u64, range: &Range<u64>) {
        invalidate(&self.workers, self.notices.as_raw_fd(), inode, range);
    }
}

/// A mounted device. Dropping one that was [made here](Mount::new) unmounts.
pub struct Mount {
    /// The mount, if this process holds it.
    held: Option<HeldMount>,
    path: PathBuf,
    minor: String,
    whole: Answered,
    /// The mount of the files, if they have one of their own.
    of_files: Option<Answered>,
    tree: Arc<Tree>,
    /// Why there is no folder of files, if there are some.
    no_files: Option<String>,
    pools: Arc<Pools>,
    /// Who bounds the page cache, if it is bounded.
    cold_pages: Option<Arc<ColdPages>>,
    threads: Vec<JoinHandle<()>>,
}

impl Mount {
    /// Mounts all of `device` at `point`, which is not divided, or its first partition.
    ///
    /// # Errors
    ///
    /// When FUSE is missing, or a thread or the mount cannot be made; each names what to do.
    pub fn new(device: &Arc<Device>, point: MountPoint, options: &MountOptions) -> Result<Self, ServeError> {
        let held = HeldMount::new(point, options.threads)?;
        let channels = held.channels().try_clone().map_err(ServeError::Threads)?;
        let path = held.path().to_owned();
        let partition = Partition::first(Arc::clone(device));
        let whole = [ExportOptions { place: Place::Root, partition, cache_bytes: None, revoked_mark: None }];
        Self::build(&whole, Some(held), path, channels, options, false)
    }

    /// Answers, with these exports, a mount at `path` that another process holds, through
    /// `channels`. If somebody `answered` it before, the kernel is asked for the requests that were
    /// in flight when that ended, and to forget the views that were given, and all that hosts were:
    /// which of it is stale, nobody knows any more. All partitions are of one device, and no two
    /// exports have one place.
    ///
    /// # Errors
    ///
    /// When a thread cannot be made.
    pub fn serve(
        exports: &[ExportOptions],
        path: &Path,
        channels: Channels,
        options: &MountOptions,
        answered: bool,
    ) -> Result<Self, ServeError> {
        Self::build(exports, None, path.to_owned(), channels, options, answered)
    }

    fn build(
        exports: &[ExportOptions],
        held: Option<HeldMount>,
        path: PathBuf,
        channels: Channels,
        options: &MountOptions,
        answered: bool,
    ) -> Result<Self, ServeError> {
        let Channels { requests, notices } = channels;
        let export = |export| Arc::new(Export::new(export, &path, options.full_wait));
        let models = whole(exports).map(|device| Arc::new(Models::open(device)));
        let device = whole(exports);
        if device.is_none() && options.files > 0 {
            return Err(ServeError::FilesOfAll);
        }
        let files = device.map(|device| Files::open(device, options.files, !answered)).transpose();
        let (files, no_files) = match files {
            Ok(files) => (files.flatten(), None),
            // Who looked into it may have it open.
            Err(source) if options.files > 0 && !answered => return Err(ServeError::Files { source }),
            Err(why) => {
                tracing::error!("the mount has no folder of files: {why}");
                (None, Some(why.to_string()))
            }
        };
        let tree = Tree::new(exports.iter().map(export).collect()).with_models(models);
        // Who holds the mount as well has none for the files.
        let write_cache = options.write_cache && held.is_none();
        let tree = tree.with_files(files.map(|files| Arc::new(files.with_write_cache(write_cache))));
        let tree = Arc::new(tree.with_api(options.api.clone()));
        let shown = if write_cache { Shown::ButFiles } else { Shown::All };
        let (workers, late_queue) = Workers::new((Arc::clone(&tree), shown), requests, options.read_ahead_kb);
        let notices = Arc::new(notices);
        tree.models().inspect(|models| models.begin_dropping());
        let (minor, pools) = (String::new(), Arc::new(Pools::new()));
        let cold_pages = options.cache_bytes.map(|bytes| Arc::new(ColdPages::new(bytes)));
        // From here on dropping the mount undoes everything.
        let mut mount = Self {
            held,
            path,
            minor,
            whole: Answered { workers, notices },
            of_files: None,
            tree,
            no_files,
            pools,
            cold_pages,
            threads: Vec::new(),
        };
        if mount.held.is_none() {
            // Nobody waits for its threads, and some have a file table of their own, in which the
            // descriptors of these are not open or others are: none may be the last to hold them.
            // They end with the process, which answers one such mount.
            std::mem::forget((mount.whole.clone(), Arc::clone(&mount.tree)));
        }
        if answered {
            ask_again(&mount.whole.workers, mount.whole.notices.as_raw_fd());
            for export in mount.tree.exports() {
                export.coherence().forgotten();
            }
        }
        mount.start(options, late_queue)?;
        Ok(mount)
    }

    fn start(
        &mut self,
        options: &MountOptions,
        late_queue: std::sync::mpsc::Receiver<super::fuse_workers::Late>,
    ) -> Result<(), ServeError> {
        self.answer("fuse", &self.whole.clone())?;
        let late_queue = Arc::new(Mutex::new(late_queue));
        for index in 0..LATE_ANSWERERS {
            let (workers, queue) = (Arc::clone(&self.whole.workers), Arc::clone(&late_queue));
            self.spawn(format!("fuse-late-{index}"), move || workers.answer_late(&queue))?;
        }
        let failed = |source| ServeError::MountPoint { path: self.path.clone(), source };
        self.minor = mount_point::minor_of(&self.path).map_err(failed)?;
        let exports = self.tree.exports().to_vec();
        let flushers = if exports.len() == 1 { FLUSHERS } else { 1 };
        for export in &exports {
            self.start_export(export, flushers, options.write_back_with)?;
        }
        if let Some(models) = self.tree.models().cloned() {
            let whole = self.whole.clone();
            self.spawn("fuse-inval-m".into(), move || {
                own_table_for_notices(&whole);
                models.drop_until_ended(|inode| whole.invalidate(inode, &(0..0)));
            })?;
        }
        if let Some(cold) = self.cold_pages.clone() {
            let (whole, tree, path) = (self.whole.clone(), Arc::clone(&self.tree), self.path.clone());
            self.spawn("cold-pages".into(), move || {
                let number = whole.notices.as_raw_fd();
                cold.keep_until_closed(&tree, &path, number, |inode, range| whole.invalidate(inode, range));
            })?;
        }
        let (pools, path, files) = (Arc::clone(&self.pools), self.path.clone(), self.tree.files().cloned());
        self.spawn("pools".into(), move || pools.watch_until_closed(&path, &exports, files.as_deref()))?;
        tune(&self.minor, options);
        Ok(())
    }

    /// Answers the mount of the files, which another process holds, through `channels`; its
    /// connection has the number `minor`. If somebody `answered` it before, the kernel is asked for
    /// the requests that were in flight when that ended.
    ///
    /// # Errors
    ///
    /// When a thread cannot be made.
    pub fn serve_files(
        &mut self,
        channels: Channels,
        minor: Option<&str>,
        options: &MountOptions,
        answered: bool,
    ) -> Result<(), ServeError> {
        let Channels { requests, notices } = channels;
        let shown = (Arc::clone(&self.tree), Shown::Files);
        // Nothing is set aside of what asks for files.
        let (workers, _) = Workers::new(shown, requests, options.read_ahead_kb);
        let files = Answered { workers, notices: Arc::new(notices) };
        if answered {
            ask_again(&files.workers, files.notices.as_raw_fd());
        }
        self.answer("files", &files)?;
        self.of_files = Some(files);
        if let Some(minor) = minor {
            tune(minor, options);
        }
        Ok(())
    }

    /// Starts the threads that answer a mount.
    fn answer(&mut self, name: &str, mount: &Answered) -> Result<(), ServeError> {
        for channel in 0..mount.workers.channels.len() {
            let workers = Arc::clone(&mount.workers);
            self.spawn(format!("{name}-{channel}"), move || workers.work(channel))?;
        }
        Ok(())
    }

    /// Starts what keeps an export coherent.
    fn start_export(
        &mut self,
        export: &Arc<Export>,
        flushers: usize,
        with: WriteBackWith,
    ) -> Result<(), ServeError> {
        for which in export.files() {
            let (whole, invalidated) = (self.whole.clone(), Arc::clone(export));
            let inode = self.tree.inode_of(export, which).unwrap_or_default();
            self.spawn(format!("fuse-inval-{inode}"), move || {
                own_table_for_notices(&whole);
                invalidated
                    .coherence()
                    .invalidate_until_closed(which, |range| whole.invalidate(inode, range));
            })?;
        }
        let failed = |source| ServeError::MountPoint { path: self.path.clone(), source };
        let paths = [export.base_path(), export.views_path()].into_iter().chain(export.target_paths());
        let files = own_mount::open(paths.collect()).map_err(failed)?;
        export.coherence().start_flushing(files, flushers, with).map_err(ServeError::Threads)?;
        if let Some(cache) = export.cache().cloned() {
            let inode = self.tree.inode_of(export, ExportFile::Base).unwrap_or_default();
            let export = Arc::clone(export);
            self.spawn(format!("host-room-{inode}"), move || {
                cache.make_room_until_closed(|ranges| {
                    export.coherence().drop_pages(ranges, false).unwrap_or_else(|why| {
                        tracing::warn!("a host's cache cannot make room: {why}");
                        0
                    })
                });
            })?;
            return Ok(());
        }
        for which in export.files().filter(|which| *which != ExportFile::Views) {
            let (workers, export) = (Arc::clone(&self.whole.workers), Arc::clone(export));
            let inode = self.tree.inode_of(&export, which).unwrap_or_default();
            self.spawn(format!("fuse-room-{inode}"), move || {
                export
                    .coherence()
                    .retry_until_closed(which, |asker, answer| workers.written_back(asker, answer));
            })?;
        }
        Ok(())
    }

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<(), ServeError> {
        self.threads.push(thread::Builder::new().name(name).spawn(run).map_err(ServeError::Threads)?);
        Ok(())
    }

    /// The mounted directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The base window's file, of the export at the root.
    pub fn base_path(&self) -> PathBuf {
        self.path.join("base")
    }

    /// The views window's file, of the export at the root.
    pub fn views_path(&self) -> PathBuf {
        self.path.join("views")
    }

    /// The models, if the mount has a folder of them: of a device that is not divided, and
    /// coherent.
    pub fn models(&self) -> Option<&Arc<Models>> {
        self.tree.models()
    }

    /// The files, if the mount has a folder of them.
    pub fn files(&self) -> Option<&Arc<Files>> {
        self.tree.files()
    }

    /// Where the files are, if the mount has a folder of them.
    pub fn files_path(&self) -> Option<PathBuf> {
        self.tree.files().map(|_| self.path.join(FOLDER))
    }

    /// Why the mount has no folder of files although the device has some.
    pub fn no_files(&self) -> Option<&str> {
        self.no_files.as_deref()
    }

    /// Has `control` tell what there is on the mount.
    pub fn tell(&self, control: &Control) {
        control.mounted(self.exports());
        if let Some(models) = self.models() {
            control.shows(models);
        }
        if let Some(files) = self.files() {
            control.has_files(files, &self.path.join(FOLDER));
        }
        if let Some(why) = self.no_files() {
            control.has_no_files(why);
        }
        control.has_pools(&self.pools);
        if let Some(cold) = &self.cold_pages {
            control.is_bounded_by(cold);
        }
    }

    /// The exports, in the order they were asked for.
    pub fn exports(&self) -> &[Arc<Export>] {
        self.tree.exports()
    }

    /// Requests that made a handler panic; each was answered with EIO.
    pub fn panics(&self) -> u64 {
        let panics = |mount: &Answered| mount.workers.panics.load(Ordering::Relaxed);
        panics(&self.whole) + self.of_files.as_ref().map_or(0, panics)
    }
}

impl Mount {
    /// Brings every store to the device, for as long as that goes on: `goes_on` is told each `pace`
    /// in which something was written back.
    ///
    /// # Errors
    ///
    /// When stores into files or a base window may be lost that no list has.
    pub fn settle(&self, pace: Duration, goes_on: &dyn Fn()) -> io::Result<()> {
        let mut settled = Ok(());
        if let Some(files) = self.tree.files() {
            let files = settle_files(files, &self.path.join(FOLDER), SETTLE, pace, goes_on);
            settled = files.map_err(|why| io::Error::new(why.kind(), format!("of files/: {why}")));
        }
        for export in self.tree.exports() {
            if let Err(why) = export.coherence().settle(SETTLE, pace, goes_on) {
                tracing::error!(base = %export.base_path().display(), "stores may be lost: {why}");
                settled = settled.and(Err(why));
            }
        }
        settled
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(why) = self.settle(SETTLE, &|| ()) {
            tracing::error!("stores may be lost: {why}");
        }
        let held = self.held.take();
        let joins = held.is_some();
        drop(held);
        drop(self.whole.workers.late.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take());
        for export in self.tree.exports() {
            export.coherence().close();
        }
        self.tree.models().inspect(|models| models.end_dropping());
        self.pools.close();
        if let Some(cold) = &self.cold_pages {
            cold.close();
        }
        // Only a connection that is gone lets its workers go.
        for thread in self.threads.drain(..).filter(|_| joins) {
            // Handlers' panics are caught and counted; a thread that died otherwise was logged by
            // the panic hook.
            let _ = thread.join();
        }
    }
}

/// Gives an invalidator's thread a file table of its own. The kernel has it wait for requests that
/// a killed process answers no more; who waits for the process's descriptors to be gone must not
/// wait for that.
fn own_table_for_notices(mount: &Answered) {
    if let Err(why) = own_table(mount.notices.as_raw_fd()) {
        tracing::warn!("the invalidator keeps the shared file table: {why}");
    }
}

/// Sets the properties of the BDI of a mount.
fn tune(minor: &str, options: &MountOptions) {
    let bdi = format!("/sys/class/bdi/0:{minor}");
    let wanted = [
        ("read_ahead_kb", options.read_ahead_kb, "reads of that size"),
        ("strict_limit", 0, "stores at full speed"),
        ("max_ratio", 100, "stores at full speed"),
    ];
    for (name, value, what) in wanted {
        let (file, value) = (format!("{bdi}/{name}"), value.to_string());
        if fs::read_to_string(&file).is_ok_and(|is| is.trim() == value) {
            continue;
        }
        match fs::write(&file, &value) {
            Ok(()) => {}
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                tracing::info!("{file} stays as it is: {what} need it to be {value}, and that needs root");
            }
            Err(why) => {
                tracing::warn!("{file} stays as it is ({why}): {what} need it to be {value}");
            }
        }
    }
}

/// The device, if one of these exports is everybody's and shows all of it.
fn whole(exports: &[ExportOptions]) -> Option<Arc<Device>> {
    let is_whole = |export: &&ExportOptions| {
        export.place == Place::Root && export.cache_bytes.is_none() && export.partition.name().is_empty()
    };
    exports.iter().find(is_whole).map(|export| Arc::clone(export.partition.device()))
}
