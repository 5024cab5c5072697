//! `files/` beside a tmpfs, by fio: sequential and random reads and writes, and what `fsync` takes,
//! where writes go through and where they wait in the page cache (`--write-cache`).
//!
//! A tmpfs has no process between: what `files/` is held against is another file system of FUSE,
//! such as libfuse's `passthrough_hp` that shows a tmpfs. Debian has its source only, so who wants
//! to compare names the folder.

use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use lamina_run::programs;
use serde::Deserialize;

use crate::{median, table};

/// Bytes that requests of 4 KiB move at most: the rest would only take longer.
const SMALL_BYTES: u64 = 32 << 20;
/// Writes of 4 KiB that are each followed by an `fsync`.
const SYNCED_BYTES: u64 = 1000 * 4096;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Files {
    /// Bytes of the file.
    pub bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// A folder of another file system.
    pub beside: Option<PathBuf>,
}

/// One measurement.
struct Access {
    name: &'static str,
    /// What fio calls it.
    pattern: &'static str,
    block: u64,
    synced: bool,
}

/// Writes first: what they leave is read.
const ACCESSES: [Access; 9] = [
    Access::of("sequential writes of 1 MiB", "write", 1 << 20),
    Access::of("random writes of 1 MiB", "randwrite", 1 << 20),
    Access::of("sequential writes of 4 KiB", "write", 4096),
    Access::of("random writes of 4 KiB", "randwrite", 4096),
    Access::of("sequential reads of 1 MiB", "read", 1 << 20),
    Access::of("random reads of 1 MiB", "randread", 1 << 20),
    Access::of("sequential reads of 4 KiB", "read", 4096),
    Access::of("random reads of 4 KiB", "randread", 4096),
    Access { synced: true, ..Access::of("writes of 4 KiB, an fsync after each", "write", 4096) },
];

/// What fio says, of which this is a part.
#[derive(Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    read: Moved,
    write: Moved,
}

#[derive(Deserialize)]
struct Moved {
    bw_bytes: f64,
}

impl Access {
    const fn of(name: &'static str, pattern: &'static str, block: u64) -> Self {
        Self { name, pattern, block, synced: false }
    }

    /// Bytes a second with a file of so many bytes. fio drops it from the page cache before.
    fn speed(&self, path: &Path, bytes: u64) -> Result<f64> {
        let moved = match self.block {
            _ if self.synced => SYNCED_BYTES.min(bytes),
            4096 => SMALL_BYTES.min(bytes),
            _ => bytes,
        };
        let mut fio = Command::new("fio");
        fio.args(["--name=files", "--ioengine=psync", "--output-format=json", "--fallocate=none"]);
        fio.arg("--filename").arg(path).arg(format!("--rw={}", self.pattern));
        fio.arg(format!("--bs={}", self.block)).arg(format!("--size={bytes}"));
        fio.arg(format!("--io_size={moved}")).arg(format!("--fsync={}", u8::from(self.synced)));
        let said = run(&mut fio)?;
        let json = said.find('{').map_or("", |at| &said[at..]);
        let report: Report = serde_json::from_str(json).context("fio does not say what it measured")?;
        let job = report.jobs.first().context("fio measured nothing")?;
        let speed = job.read.bw_bytes + job.write.bw_bytes;
        ensure!(speed > 0.0, "fio moved nothing");
        Ok(speed)
    }
}

/// A device that `lamina mount` mounted. Dropping it unmounts.
struct Mounted {
    folder: PathBuf,
}

impl Mounted {
    fn new(folder: PathBuf, bytes: u64, more: &[&str]) -> Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&folder)?;
        fs::DirBuilder::new().mode(0o700).create(folder.join("run"))?;
        let mounted = Self { folder };
        let mut mount = mounted.lamina("mount")?;
        mount.arg(format!("--capacity={}", 8 * bytes)).arg(format!("--files={}", 4 * bytes)).args(more);
        run(mount.arg(mounted.place()))?;
        Ok(mounted)
    }

    fn lamina(&self, command: &str) -> Result<Command> {
        let mut lamina = Command::new(programs::lamina()?);
        lamina.arg(command).env("XDG_RUNTIME_DIR", self.folder.join("run"));
        Ok(lamina)
    }

    fn place(&self) -> PathBuf {
        self.folder.join("m")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let ended = self.lamina("umount").and_then(|mut umount| run(umount.arg(self.place())));
        if let Err(why) = ended {
            eprintln!("bench: {why:#}");
        }
    }
}

impl Files {
    /// Measures, and returns the table.
    ///
    /// # Errors
    /// When fio is not there, the device does not start, or a file cannot be read or written.
    pub fn run(&self) -> Result<Table> {
        ensure!(
            Command::new("fio").arg("--version").output().is_ok(),
            "fio is missing: install Debian's package fio"
        );
        let folder = tempfile::tempdir()?;
        let tmpfs = tempfile::tempdir_in("/dev/shm").context("there is no tmpfs at /dev/shm")?;
        let through = Mounted::new(folder.path().join("through"), self.bytes, &[])?;
        let waiting = Mounted::new(folder.path().join("waiting"), self.bytes, &["--write-cache"])?;
        let files = |device: &Mounted| device.place().join("files");
        let mut places = vec![files(&through), files(&waiting), tmpfs.path().to_owned()];
        places.extend(self.beside.clone());
        let mut speeds = vec![vec![Vec::new(); places.len()]; ACCESSES.len()];
        for _ in 0..self.rounds {
            for (access, speeds) in ACCESSES.iter().zip(&mut speeds) {
                // By turns, so that what else the machine does slows all.
                for (place, speeds) in places.iter().zip(speeds) {
                    speeds.push(access.speed(&place.join("lamina-bench"), self.bytes)?);
                }
            }
            for place in &places {
                fs::remove_file(place.join("lamina-bench"))?;
            }
        }
        let mut head = vec!["what", "files/ MB/s", "--write-cache MB/s", "tmpfs MB/s", "of tmpfs"];
        if self.beside.is_some() {
            head.extend(["beside MB/s", "of beside"]);
        }
        let mut out = table(&head);
        for (access, speeds) in ACCESSES.iter().zip(speeds) {
            let medians: Vec<_> = speeds.into_iter().map(median).collect();
            let speed = |speed: f64| format!("{:.1}", speed / 1e6);
            let (ours, others) = medians.split_at(2);
            let mut row = vec![access.name.to_owned(), speed(ours[0]), speed(ours[1])];
            for other in others {
                row.extend([speed(*other), format!("{:.2}, {:.2}", ours[0] / other, ours[1] / other)]);
            }
            out.add_row(row);
        }
        Ok(out)
    }
}

/// Runs a command that has to succeed: what it says.
fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {said}");
    Ok(String::from_utf8(output.stdout)?)
}
