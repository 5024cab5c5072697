//! Disks in a guest: the device's beside `qemu-storage-daemon`'s export of a plain file of the same
//! bytes, by fio.
//!
//! All disks belong to one guest, which reads them in turn, so that they share everything but what
//! serves them. Reads go around the guest's page cache; the plain file is in the host's. Beside
//! rates, the processor time that they cost is told: where host, server and guest have few
//! processors, that is what bounds them.

use std::fmt::Write as _;
use std::{
    fs::OpenOptions,
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, OnceLock, mpsc},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table;
use lamina_qemu::{Attach, BootConfig, GuestFile, VhostUser, boot, find::Install, recipe};
use lamina_run::disks::Disks;
use serde::Serialize;

use crate::{cpu, median, table, tile};

/// How long the guest may take.
const LIMIT: Duration = Duration::from_secs(900);
/// How long the daemon may take to listen.
const TIMEOUT: Duration = Duration::from_secs(10);
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
    /// The device's mode.
    pub mode: String,
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
    /// The device's mode.
    pub mode: String,
    /// The device's codec.
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
    /// Milliseconds of processor time that the disk's server took for a GiB of them.
    pub server_ms_per_gib: f64,
    /// Those that QEMU took, with all of the guest and its fio.
    pub guest_ms_per_gib: f64,
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
        let (views, mode, codec) = (VIEWS.join(","), &self.mode, &self.codec);
        let disks = Disks::start(&["--model", model, "--views", &views, "--mode", mode, "--codec", codec])?;
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
        let (sender, lines) = mpsc::channel();
        let processes = [plain.child.id(), disks.pid()];
        let qemu = Arc::new(OnceLock::new());
        let on_line = {
            let qemu = Arc::clone(&qemu);
            move |line: &str| {
                let qemu = qemu.get().map_or(Duration::ZERO, |pid| cpu::used(*pid));
                let used = Used { servers: processes.map(cpu::used), qemu };
                sender.send(Line { text: line.to_owned(), used }).unwrap_or_default();
            }
        };
        let guest = boot(&config, on_line)?;
        guest.pid().map_or(Ok(()), |pid| qemu.set(pid)).expect("it is set once");
        let outcome = guest.wait(Some(LIMIT))?;
        let lines = Lines(lines.try_iter().collect());
        ensure!(outcome.status == Some(0), "the guest failed:\n{}", lines.text());
        let (accel, qemu) = (guest.prepared().accel.to_string(), guest.prepared().qemu.version.to_string());
        drop(guest);
        drop(plain);
        disks.stop()?;

        let mut rows: Vec<VhostRow> = Vec::new();
        let mut per_element = Vec::new();
        for (n, (disk, _, bytes)) in targets.into_iter().enumerate() {
            let (sequential, random) =
                (lines.results(n, "seq", self.rounds)?, lines.results(n, "rand", self.rounds)?);
            let [server, guest] = lines.used(n, &sequential);
            let sequential = median(sequential.iter().map(|result| result.rate * 1024.0).collect());
            let random = median(random.iter().map(|result| result.requests).collect());
            let (plain_sequential, plain_random) =
                rows.first().map_or((sequential, random), |plain| (plain.sequential, plain.random));
            per_element.push(sequential / length(bytes));
            rows.push(VhostRow {
                disk,
                sequential,
                sequential_of_plain: sequential / plain_sequential,
                server_ms_per_gib: server,
                guest_ms_per_gib: guest,
                random,
                random_of_plain: random / plain_random,
                elements_of_full: (n >= 2).then(|| per_element[n] / per_element[2]),
            });
        }
        let (mode, codec) = (self.mode.clone(), self.codec.clone());
        Ok(VhostReport { accel, qemu, mode, codec, bytes: self.bytes, rows })
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
                        "echo begin\n\
                         out=$(fio --name=x --filename={device} --readonly --direct=1 --ioengine=libaio {how} --size={} \
                         --time_based --runtime={seconds} --output-format=terse --terse-version=3) || {{ echo \"$out\"; exit 1; }}\n\
                         echo \"result {kind} {n} $(echo \"$out\" | cut -d';' -f6,7,8)\" {tell}\n",
                        bytes / 4096 * 4096,
                    );
                }
            }
        }
        script
    }
}

/// Processor time that was used so far.
#[derive(Clone, Copy)]
struct Used {
    /// By who serves the plain file, and by the device.
    servers: [Duration; 2],
    qemu: Duration,
}

/// A line of the guest's console, and what was used when it came.
struct Line {
    text: String,
    used: Used,
}

struct Lines(Vec<Line>);

/// What one run of fio told.
struct Run {
    kib: f64,
    /// KiB a second.
    rate: f64,
    /// Requests a second.
    requests: f64,
    /// Where in the lines it was told; the one before says that it began.
    line: usize,
}

impl Lines {
    fn text(&self) -> String {
        self.0.iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join("\n")
    }

    /// The runs of this kind on disk `disk`, of which there are so many.
    fn results(&self, disk: usize, kind: &str, rounds: usize) -> Result<Vec<Run>> {
        let name = format!("result {kind} {disk} ");
        let reported = self.0.iter().enumerate().filter_map(|(line, reported)| {
            let numbers: Vec<f64> = reported
                .text
                .strip_prefix(&name)?
                .split(';')
                .filter_map(|number| number.parse().ok())
                .collect();
            let &[kib, rate, requests] = numbers.as_slice() else { return None };
            Some(Run { kib, rate, requests, line })
        });
        let reported: Vec<Run> = reported.collect();
        if reported.len() != rounds {
            let found = reported.len();
            bail!("{found} of {rounds} rounds of {kind} on disk {disk} were told:\n{}", self.text());
        }
        Ok(reported)
    }

    /// Milliseconds of processor time for a GiB, of the server and of QEMU: medians of `runs` on
    /// disk `disk`.
    fn used(&self, disk: usize, runs: &[Run]) -> [f64; 2] {
        let server = usize::from(disk > 0);
        let each = runs.iter().map(|run| {
            let lines = [run.line.saturating_sub(1), run.line].map(|line| self.0[line].used);
            let [begin, end] = lines.map(|used| [used.servers[server], used.qemu]);
            [0, 1].map(|of| (end[of].saturating_sub(begin[of])).as_secs_f64() * 1e3 * 1_048_576.0 / run.kib)
        });
        let each: Vec<_> = each.collect();
        [0, 1].map(|of| median(each.iter().map(|run| run[of]).collect()))
    }
}

impl VhostReport {
    /// The table for a person.
    pub fn to_table(&self) -> Table {
        let mut out = table(&[
            "disk",
            "1 MiB sequential GB/s",
            "of plain",
            "server ms/GiB",
            "guest ms/GiB",
            "4 KiB random /s",
            "of plain",
            "elements/s of full",
        ]);
        for row in &self.rows {
            out.add_row([
                row.disk.clone(),
                format!("{:.3}", row.sequential / 1e9),
                format!("{:.2}", row.sequential_of_plain),
                format!("{:.0}", row.server_ms_per_gib),
                format!("{:.0}", row.guest_ms_per_gib),
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
            ensure!(begun.elapsed() < TIMEOUT, "qemu-storage-daemon does not listen");
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
