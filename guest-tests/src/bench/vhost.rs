//! Disks in a guest: the device's beside `qemu-storage-daemon`'s export of a plain file of the same bytes, by fio.
//!
//! All disks belong to one guest, which reads them in turn, so that they share everything but what serves them. Reads go around the guest's
//! page cache; the plain file is in the host's.

use std::fmt::Write as _;
use std::{
    fs::OpenOptions,
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table;
use lamina_qemu::{Attach, BootConfig, GuestFile, VhostUser, boot, find::Install, recipe};
use serde::Serialize;

use super::{median, table, tile};
use crate::disks::Disks;

/// How long the guest may take.
const LIMIT: Duration = Duration::from_secs(900);
/// How long the daemon may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);
/// Views read besides the base disk.
const VIEWS: [&str; 4] = ["full", "e8m3", "fp8_e4m3fn", "e8m3:packed"];
/// The kinds of reads, as fio takes them.
const KINDS: [(&str, &str); 2] =
    [("seq", "--rw=read --bs=1M --iodepth=4"), ("rand", "--rw=randread --bs=4k --iodepth=16 --norandommap")];

/// What is read.
#[derive(Clone, Debug)]
pub struct Vhost {
    /// The checkpoints whose values are read.
    pub models: Vec<PathBuf>,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// Seconds of each measurement.
    pub seconds: u32,
    /// The device's codec.
    pub codec: String,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct VhostReport {
    /// `kvm` or `tcg`.
    pub accel: String,
    /// QEMU's version.
    pub qemu: String,
    /// The codec of the device.
    pub codec: String,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Each disk; the plain one first.
    pub rows: Vec<VhostRow>,
}

/// Medians of one disk.
#[derive(Clone, Debug, Serialize)]
pub struct VhostRow {
    /// What it shows.
    pub disk: String,
    /// Bytes a second of sequential reads of 1 MiB.
    pub sequential: f64,
    /// That, of the plain file's.
    pub sequential_of_plain: f64,
    /// Random reads of 4 KiB a second.
    pub random: f64,
    /// That, of the plain file's.
    pub random_of_plain: f64,
    /// Elements a second of sequential reads, of those of `full`.
    pub elements_of_full: Option<f64>,
}

impl Vhost {
    /// Measures.
    ///
    /// # Errors
    /// When a disk is not served, or the guest does not do its work.
    pub fn run(&self) -> Result<VhostReport> {
        ensure!(self.rounds > 0 && self.seconds > 0, "no rounds and no seconds measure nothing");
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, self.bytes, &model)?;
        let model = model.to_str().context("the temporary folder's path is not UTF-8")?;
        let disks = Disks::start(&["--model", model, "--views", &VIEWS.join(","), "--codec", &self.codec])?;
        let plain = Plain::start(Path::new(model), self.bytes, folder.path())?;

        let mut sockets = disks.sockets();
        sockets.push(plain.socket.clone());
        let mut targets = vec![("plain file".to_owned(), "/dev/vdc".to_owned(), self.bytes)];
        targets.push(("base".to_owned(), "/dev/vda".to_owned(), self.bytes));
        for view in VIEWS {
            let partition = disks.partition(tile::TENSOR, view)?;
            targets.push((view.to_owned(), format!("/dev/vdb{}", partition.number), partition.length));
        }
        let mut config = BootConfig::attached(Attach::VhostUser(VhostUser { disks: sockets, queues: 2 }));
        config.programs = vec![GuestFile::script("/run.sh", self.script(&targets))];
        config.run = Some("/run.sh".to_owned());
        config.extras = true;
        let (sender, lines) = std::sync::mpsc::channel();
        let guest = boot(&config, move |line| sender.send(line.to_owned()).unwrap_or_default())?;
        let outcome = guest.wait(Some(LIMIT))?;
        let lines: Vec<String> = lines.try_iter().collect();
        ensure!(outcome.status == Some(0), "the guest failed:\n{}", lines.join("\n"));
        let (accel, qemu) = (guest.prepared().accel.to_string(), guest.prepared().qemu.version.to_string());
        drop(guest);
        drop(plain);
        disks.stop()?;

        let rates = |disk: usize, kind: &str, field: usize| -> Result<f64> {
            let name = format!("result {kind} {disk} ");
            let found =
                lines.iter().filter_map(|line| line.strip_prefix(&name)?.split(';').nth(field)?.parse().ok());
            let found: Vec<f64> = found.collect();
            if found.len() != self.rounds {
                bail!(
                    "{} of {} rounds of {kind} on disk {disk} were told:\n{}",
                    found.len(),
                    self.rounds,
                    lines.join("\n")
                );
            }
            Ok(median(found))
        };
        let mut rows: Vec<VhostRow> = Vec::new();
        let mut per_element = Vec::new();
        for (n, (disk, _, bytes)) in targets.into_iter().enumerate() {
            let (sequential, random) = (rates(n, "seq", 0)? * 1024.0, rates(n, "rand", 1)?);
            let (plain_sequential, plain_random) =
                rows.first().map_or((sequential, random), |plain| (plain.sequential, plain.random));
            per_element.push(sequential / length(bytes));
            let (sequential_of_plain, random_of_plain) =
                (sequential / plain_sequential, random / plain_random);
            let elements_of_full = (n >= 2).then(|| per_element[n] / per_element[2]);
            rows.push(VhostRow {
                disk,
                sequential,
                sequential_of_plain,
                random,
                random_of_plain,
                elements_of_full,
            });
        }
        Ok(VhostReport { accel, qemu, codec: self.codec.clone(), bytes: self.bytes, rows })
    }

    /// What the guest runs: rounds of every kind on every disk in turn.
    fn script(&self, targets: &[(String, String, u64)]) -> String {
        let mut script = "#!/bin/sh\n".to_owned();
        for round in 0..=self.rounds {
            for (n, (_, device, bytes)) in targets.iter().enumerate() {
                for (kind, how) in KINDS {
                    // The first round only warms up.
                    let (seconds, tell) = if round == 0 { (1, ">/dev/null") } else { (self.seconds, "") };
                    let _ = write!(
                        script,
                        "out=$(fio --name=x --filename={device} --readonly --direct=1 --ioengine=libaio {how} --size={} \
                         --time_based --runtime={seconds} --output-format=terse --terse-version=3) || {{ echo \"$out\"; exit 1; }}\n\
                         echo \"result {kind} {n} $(echo \"$out\" | cut -d';' -f7,8)\" {tell}\n",
                        bytes / 4096 * 4096,
                    );
                }
            }
        }
        script
    }
}

impl VhostReport {
    /// The table for a person.
    pub fn to_table(&self) -> Table {
        let mut out = table(&[
            "disk",
            "1 MiB sequential GB/s",
            "of plain",
            "4 KiB random /s",
            "of plain",
            "elements/s of full",
        ]);
        for row in &self.rows {
            out.add_row([
                row.disk.clone(),
                format!("{:.3}", row.sequential / 1e9),
                format!("{:.2}", row.sequential_of_plain),
                format!("{:.0}", row.random),
                format!("{:.2}", row.random_of_plain),
                row.elements_of_full.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            ]);
        }
        out
    }
}

#[expect(clippy::cast_precision_loss, reason = "a length to divide a rate by")]
fn length(bytes: u64) -> f64 {
    bytes as f64
}

/// A plain file of the tensor's bytes, exported by `qemu-storage-daemon`. Dropping it ends it.
struct Plain {
    child: Child,
    socket: PathBuf,
}

impl Plain {
    /// Exports the last `bytes` of `model`, which are the tensor's.
    fn start(model: &Path, bytes: u64, folder: &Path) -> Result<Self> {
        let (file, socket) = (folder.join("plain.img"), folder.join("plain.sock"));
        let mut from = std::fs::File::open(model)?;
        let skipped =
            from.metadata()?.len().checked_sub(bytes).context("the model is shorter than its tensor")?;
        let to = OpenOptions::new().write(true).create_new(true).open(&file)?;
        let mut buffer = vec![0; 1 << 20];
        std::io::Seek::seek(&mut from, std::io::SeekFrom::Start(skipped))?;
        let mut at = 0;
        loop {
            let got = from.read(&mut buffer)?;
            if got == 0 {
                break;
            }
            to.write_all_at(&buffer[..got], at)?;
            at += got as u64;
        }
        let mut command = storage_daemon()?;
        command
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=plain,read-only=on,filename={}", file.display()));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name=plain,num-queues=8,addr.type=unix,addr.path={}",
            socket.display()
        ));
        let child = command.stdin(Stdio::null()).spawn().context("cannot start qemu-storage-daemon")?;
        let mut plain = Self { child, socket };
        let begun = Instant::now();
        while !plain.socket.exists() {
            if let Some(status) = plain.child.try_wait()? {
                bail!("qemu-storage-daemon ended with {status}; it says why above");
            }
            ensure!(begun.elapsed() < PATIENCE, "qemu-storage-daemon does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(plain)
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The tools root's `qemu-storage-daemon`, through the root's own loader.
fn storage_daemon() -> Result<Command> {
    let root = recipe::run("tools")?;
    let (loader, args) = Install::Root(root.clone()).command(None);
    let mut command = Command::new(loader);
    // The library path; what follows in the list is QEMU itself.
    command.args(args.iter().take(2)).arg(root.join("usr/bin/qemu-storage-daemon"));
    Ok(command)
}
