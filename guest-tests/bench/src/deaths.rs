//! How long a reader of the mount waits when a worker is killed, by how much is stored, in memory
//! and in an image on a disk.
//!
//! A reader loads 4 KiB after 4 KiB with `O_DIRECT`, so that each load is a request, and workers
//! are killed under it; what counts is the longest load around each kill. Every load is held to
//! what it gave before the first kill.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use lamina_codec::BLOCK_BYTES;
use lamina_run::daemon::{Daemon, Serve, worker};
use lamina_store::host_memory::HostMemory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FsWord, OFlags, statfs, statvfs};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::{median, table, tile};

/// Blocks that are loaded in turn.
const BLOCKS: u64 = 64;
/// Bytes of a block.
const BLOCK: u64 = BLOCK_BYTES as u64;
/// How long a new worker may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long each worker is left alone.
const CALM: Duration = Duration::from_millis(300);
/// Folders for temporary files, of which the first may be in memory.
const FOLDERS: [&str; 2] = ["/tmp", "/var/tmp"];
/// What the kernel calls a file system in memory.
const TMPFS: FsWord = 0x0102_1994;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Deaths {
    /// The checkpoints whose values are stored.
    pub models: Vec<PathBuf>,
    /// Where how many bytes are stored, for each row.
    pub rows: Vec<(Lies, u64)>,
    /// Kills of each.
    pub kills: usize,
}

/// Where a device lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// In memory.
    InMemory,
    /// In an image on a disk.
    OnDisk,
}

impl fmt::Display for Lies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InMemory => "in memory",
            Self::OnDisk => "on a disk",
        })
    }
}

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// A row for each size.
    pub table: Table,
    /// What there was no room for, a line each.
    pub skipped: String,
}

impl Deaths {
    /// Measures, and returns the table.
    ///
    /// # Errors
    /// When a device does not start, a load fails or differs, or no new worker comes.
    pub fn run(&self, doing: impl Fn(&str)) -> Result<Measured> {
        let mut table = table(&["stored data", "GiB", "blocks", "longest load ms", "most ms"]);
        let mut skipped = String::new();
        for &(lies, bytes) in &self.rows {
            let gib = format!("{:.2}", gib(bytes));
            let folder = match room(lies, bytes)? {
                Ok(folder) => folder,
                Err(why) => {
                    let line = format!("skipped: {gib} GiB {lies}: {why}");
                    doing(&line);
                    skipped.extend([&line, "\n"]);
                    continue;
                }
            };
            doing(&format!("loading {gib} GiB {lies}"));
            let mut waits = self.waits(&folder, lies, bytes, |kill| {
                doing(&format!("{gib} GiB {lies}: kill {kill} of {}", self.kills));
            })?;
            waits.sort_by(f64::total_cmp);
            let most = waits.last().copied().unwrap_or_default();
            let row = [lies.to_string(), gib, (bytes / BLOCK).to_string(), ms(median(waits)), ms(most)];
            table.add_row(row);
        }
        Ok(Measured { table, skipped })
    }

    /// Seconds of the longest load around each kill.
    fn waits(&self, folder: &Path, lies: Lies, bytes: u64, doing: impl Fn(usize)) -> Result<Vec<f64>> {
        let folder = tempfile::tempdir_in(folder)?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, bytes, &model)?;
        let image = folder.path().join("image").display().to_string();
        let more: &[&str] = match lies {
            Lies::InMemory => &[],
            Lies::OnDisk => &["--image", &image],
        };
        let serve = Serve {
            models: vec![model.clone()],
            views: vec!["full".to_owned()],
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: "tree".to_owned(),
            capacity: None,
            read_ahead_kb: 4,
            devices: None,
        };
        let device = Daemon::start_with(&serve, more)?;
        // Only the device's memory counts from here on.
        fs::remove_file(model)?;
        let base = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECT.bits().cast_signed())
            .open(&device.ready.base.path)?;
        let reader = Reader::new(base, bytes)?;
        let waits = thread::scope(|scope| {
            let reading = scope.spawn(|| reader.read());
            let waits = (1..=self.kills).map(|kill| {
                doing(kill);
                reader.wait_of(|| kill_worker(device.pid()))
            });
            let waits = waits.collect();
            reader.stop.store(true, Ordering::Relaxed);
            let read = reading.join().map_err(|_| anyhow::anyhow!("the reader panicked"))?;
            read.and(waits)
        })?;
        let deaths = device.stats()?["device"]["worker_deaths"].as_u64();
        ensure!(deaths == Some(self.kills as u64), "{} kills were {deaths:?} deaths", self.kills);
        device.stop()?;
        Ok(waits)
    }
}

/// A folder where so many bytes can be stored, or why they cannot.
fn room(lies: Lies, bytes: u64) -> Result<Result<PathBuf, String>> {
    let folders = FOLDERS.map(PathBuf::from).into_iter();
    let mut on_disks = folders.filter(|folder| statfs(folder).is_ok_and(|is| is.f_type != TMPFS));
    let Some(folder) = on_disks.next() else {
        return Ok(Err(format!("there is no folder on a disk of {}", FOLDERS.join(" and "))));
    };
    // The checkpoint, and the image: what is stored is smaller, and has an index.
    let (files, most) = match lies {
        Lies::InMemory => (bytes, bytes + bytes / 16),
        Lies::OnDisk => (2 * bytes + bytes / 8, 0),
    };
    let disk = statvfs(&folder)?;
    let free = disk.f_bavail * disk.f_frsize;
    if free < files {
        return Ok(Err(format!("it takes {:.2} GiB of the disk, {:.2} are free", gib(files), gib(free))));
    }
    let memory = HostMemory::of_this_host(None);
    let left = memory.left().unwrap_or(u64::MAX).saturating_sub(memory.reserve());
    if left < most {
        return Ok(Err(format!("it takes {:.2} GiB of memory, {:.2} are free", gib(most), gib(left))));
    }
    Ok(Ok(folder))
}

/// Loads blocks until it is stopped.
struct Reader {
    base: File,
    /// Where the blocks are, and what they hold.
    blocks: Vec<(u64, Aligned)>,
    seen: Mutex<Seen>,
    stop: AtomicBool,
}

/// What the reader tells of its loads.
struct Seen {
    /// How long the longest took.
    longest: Duration,
    /// When the last that has ended began.
    last: Instant,
}

/// A block's bytes as `O_DIRECT` wants them.
#[derive(Clone, PartialEq, Eq)]
#[repr(align(4096))]
struct Aligned([u8; BLOCK_BYTES]);

impl Reader {
    fn new(base: File, bytes: u64) -> Result<Self> {
        let step = (bytes / BLOCKS / BLOCK).max(1) * BLOCK;
        let mut blocks = Vec::new();
        for at in (0..bytes / BLOCK * BLOCK).step_by(usize::try_from(step)?) {
            let mut block = Aligned([0; BLOCK_BYTES]);
            base.read_exact_at(&mut block.0, at)?;
            blocks.push((at, block));
        }
        let seen = Mutex::new(Seen { longest: Duration::ZERO, last: Instant::now() });
        Ok(Self { base, blocks, seen, stop: AtomicBool::new(false) })
    }

    fn read(&self) -> Result<()> {
        let mut found = Aligned([0; BLOCK_BYTES]);
        for (at, block) in self.blocks.iter().cycle() {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let begun = Instant::now();
            self.base.read_exact_at(&mut found.0, *at).with_context(|| format!("the load at {at}"))?;
            let took = begun.elapsed();
            ensure!(found == *block, "the load at {at} differs");
            let mut seen = self.seen();
            (seen.longest, seen.last) = (took.max(seen.longest), begun);
        }
        Ok(())
    }

    /// Seconds of the longest load from a death on.
    fn wait_of(&self, death: impl FnOnce() -> Result<()>) -> Result<f64> {
        thread::sleep(CALM);
        self.seen().longest = Duration::ZERO;
        death()?;
        let calm = Instant::now() + CALM;
        // A load that began this late waited for nobody, and those before it have ended.
        while self.seen().last < calm {
            ensure!(calm.elapsed() < TIMEOUT, "no load ends {} s after a kill", TIMEOUT.as_secs());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(self.seen().longest.as_secs_f64())
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kills the worker of a holder, and waits until it has ended: what it may still answer is no load
/// from a death on.
fn kill_worker(holder: u32) -> Result<()> {
    let pid = worker(holder).context("the device has no worker")?;
    let worker = pidfd_open(pid, PidfdFlags::empty()).context("the worker has ended by itself")?;
    pidfd_send_signal(&worker, Signal::KILL).context("the worker cannot be killed")?;
    let wait = Timespec::try_from(TIMEOUT)?;
    let ended = poll(&mut [PollFd::new(&worker, PollFlags::IN)], Some(&wait))?;
    ensure!(ended == 1, "worker {pid:?} was killed and goes on for {} s", TIMEOUT.as_secs());
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a size to be looked at")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn ms(seconds: f64) -> String {
    format!("{:.0}", seconds * 1e3)
}
