//! `files/` beside libfuse's own example of a file system on a tmpfs, and the tmpfs itself:
//! sequential and random reads and writes.
//!
//! The example is `passthrough_ll`, which Debian's `libfuse3-dev` has the source of. It is compiled
//! where that and a C compiler are there, else its columns are empty and a line says why.

use std::{
    fs::{self, File},
    io::Read,
    os::{fd::AsFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use lamina_run::programs;
use rustix::fs::{Advice, fadvise};

use crate::{median, rate, table, tile};

/// Where Debian has the example.
const EXAMPLE: &str = "/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c";
/// Bytes that requests of 4 KiB move at most: the rest would only take longer.
const SMALL_BYTES: u64 = 32 << 20;
/// How long a mount may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Files {
    /// The checkpoints whose values the file has.
    pub models: Vec<PathBuf>,
    /// Bytes of the file.
    pub bytes: u64,
    /// Rounds.
    pub rounds: usize,
}

/// One measurement.
#[derive(Clone, Copy)]
struct Access {
    writes: bool,
    random: bool,
    block: u64,
}

impl Access {
    /// Writes first: what they leave is read.
    fn all() -> Vec<Self> {
        let each = |writes| {
            [(1 << 20, false), (1 << 20, true), (4096, false), (4096, true)].map(|(block, random)| Self {
                writes,
                random,
                block,
            })
        };
        [true, false].into_iter().flat_map(each).collect()
    }

    fn name(self) -> String {
        let block = if self.block == 4096 { "4 KiB" } else { "1 MiB" };
        let order = if self.random { "random" } else { "sequential" };
        format!("{order} {} of {block}", if self.writes { "writes" } else { "reads" })
    }

    /// Bytes that it moves.
    fn bytes(self, file: u64) -> u64 {
        if self.block == 4096 { file.min(SMALL_BYTES) } else { file / self.block * self.block }
    }

    /// Where each request begins.
    fn offsets(self, file: u64) -> Vec<u64> {
        let mut offsets: Vec<_> = (0..self.bytes(file) / self.block).map(|at| at * self.block).collect();
        if self.random {
            let places = file / self.block;
            let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
            for offset in &mut offsets {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                *offset = seed % places * self.block;
            }
        }
        offsets
    }

    /// Seconds that it takes with a file of `data`.
    fn seconds(self, path: &Path, data: &[u8]) -> Result<f64> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let offsets = self.offsets(data.len() as u64);
        if !self.writes {
            file.sync_all()?;
            fadvise(file.as_fd(), 0, None, Advice::DontNeed)?;
        }
        let mut buffer = vec![0; usize::try_from(self.block)?];
        let begun = Instant::now();
        for offset in offsets {
            let at = usize::try_from(offset)?;
            if self.writes {
                file.write_all_at(&data[at..at + buffer.len()], offset)?;
            } else {
                file.read_exact_at(&mut buffer, offset)?;
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        if !self.writes {
            let last = self.offsets(data.len() as u64).pop().unwrap_or(0);
            let at = usize::try_from(last)?;
            ensure!(
                buffer == data[at..at + buffer.len()],
                "{} does not hold what was written",
                path.display()
            );
        }
        Ok(seconds)
    }
}

/// libfuse's example, mounted. Dropping it unmounts.
struct Example {
    mount: PathBuf,
}

impl Example {
    /// Compiles it and mounts it on `mount`, showing `source`. Why not, if it cannot be had.
    fn mount(folder: &Path, source: &Path, mount: PathBuf) -> Result<Self> {
        ensure!(Path::new(EXAMPLE).exists(), "{EXAMPLE} is missing: install libfuse3-dev");
        let flags = Command::new("pkg-config").args(["fuse3", "--cflags", "--libs"]).output();
        let flags = flags.context("pkg-config is missing: install it")?.stdout;
        let flags = String::from_utf8(flags)?;
        let program = folder.join("passthrough_ll");
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-D_FILE_OFFSET_BITS=64", EXAMPLE, "-o"]).arg(&program);
        run(cc.args(flags.split_ascii_whitespace()))?;
        fs::create_dir(&mount)?;
        let mut source_option = std::ffi::OsString::from("source=");
        source_option.push(source);
        source_option.push(",cache=auto");
        run(Command::new(&program).arg("-o").arg(source_option).arg(&mount))?;
        let (mounted, before) = (Self { mount }, Instant::now());
        while !mounted.mount.join("sentinel").exists() {
            ensure!(before.elapsed() < PATIENCE, "passthrough_ll does not answer");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(mounted)
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        if let Err(why) = run(Command::new("fusermount3").arg("-u").arg(&self.mount)) {
            eprintln!("bench: {why:#}");
        }
    }
}

/// A device that `lamina mount` mounted. Dropping it unmounts.
struct Mounted {
    mount: PathBuf,
}

impl Mounted {
    fn new(mount: PathBuf, bytes: u64) -> Result<Self> {
        let limit = (4 * bytes).to_string();
        run(Command::new(programs::lamina()?).args(["mount", "--files", &limit]).arg(&mount))?;
        Ok(Self { mount })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let umount =
            programs::lamina().and_then(|lamina| run(Command::new(lamina).arg("umount").arg(&self.mount)));
        if let Err(why) = umount {
            eprintln!("bench: {why:#}");
        }
    }
}

impl Files {
    /// Measures, and returns the table and why a peer is missing.
    ///
    /// # Errors
    /// When the device does not start, or a file cannot be read or written.
    pub fn run(&self) -> Result<(Table, Option<String>)> {
        let folder = tempfile::tempdir()?;
        let tmpfs = tempfile::tempdir_in("/dev/shm").context("there is no tmpfs at /dev/shm")?;
        let checkpoint = tmpfs.path().join("checkpoint");
        tile::write(&self.models, self.bytes, &checkpoint)?;
        let mut data = Vec::new();
        File::open(&checkpoint)?.take(self.bytes).read_to_end(&mut data)?;
        fs::remove_file(&checkpoint)?;
        let source = tmpfs.path().join("source");
        fs::create_dir(&source)?;
        File::create(source.join("sentinel"))?;
        let device = Mounted::new(folder.path().join("m"), self.bytes)?;
        let own = device.mount.join("files/bf16");
        fs::create_dir(&own)?;
        rustix::fs::setxattr(&own, "user.lamina.format", b"bf16", rustix::fs::XattrFlags::empty())?;
        let example = Example::mount(folder.path(), &source, folder.path().join("example"));
        let why = example.as_ref().err().map(|why| format!("{why:#}"));
        let example = example.ok();
        let mut places = vec![own, tmpfs.path().to_owned()];
        places.extend(example.as_ref().map(|example| example.mount.clone()));
        let accesses = Access::all();
        let mut seconds = vec![vec![Vec::new(); places.len()]; accesses.len()];
        for round in 0..self.rounds {
            for (access, seconds) in accesses.iter().zip(&mut seconds) {
                for (place, seconds) in places.iter().zip(seconds) {
                    seconds.push(access.seconds(&place.join(format!("file{round}")), &data)?);
                }
            }
            for place in &places {
                fs::remove_file(place.join(format!("file{round}")))?;
            }
        }
        let mut out =
            table(&["what", "files/ MB/s", "of passthrough_ll", "passthrough_ll MB/s", "tmpfs MB/s"]);
        for (access, seconds) in accesses.into_iter().zip(seconds) {
            let medians: Vec<_> = seconds.into_iter().map(median).collect();
            let speed =
                |seconds: f64| format!("{:.0}", 1000.0 * rate(access.bytes(data.len() as u64), seconds));
            let (own, tmpfs, peer) = (medians[0], medians[1], medians.get(2).copied());
            out.add_row([
                access.name(),
                speed(own),
                peer.map_or_else(|| "-".to_owned(), |peer| format!("{:.2}", peer / own)),
                peer.map_or_else(|| "-".to_owned(), speed),
                speed(tmpfs),
            ]);
        }
        Ok((out, why))
    }
}

/// Runs a command that has to succeed.
fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {said}");
    Ok(())
}
