//! What modelling costs: observing the lines of an emulated guest, recording a device at work, and
//! replaying.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table;
use lamina_model::{
    replay::{Options, Subject, compare},
    trace::{BLOCK_BYTES, Block, Header, Item, Reader, Request, Seen, View, Writer},
};
use lamina_qemu::{lines::idle_args, recipe};
use lamina_run::{
    daemon::{Daemon, Serve},
    programs,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::{median, mount::read_cold, rate, table, tile};

/// What is measured.
#[derive(Clone, Debug)]
pub struct ModelBench {
    /// The checkpoints whose values are read.
    pub models: Vec<PathBuf>,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Rounds, of which the median counts.
    pub rounds: usize,
}

/// MiB that the guest hashes beside.
const HASHED_MIB: u32 = 32;
/// Bytes of the device of the trace that is replayed.
const DEVICE_BYTES: u64 = 1 << 30;
/// Requests of it.
const REQUESTS: u64 = 1 << 20;

impl ModelBench {
    /// A guest's work without the recorder of lines, with one that records nothing, and with
    /// `--record-lines`, by turns.
    ///
    /// # Errors
    /// When a guest does not boot.
    pub fn lines(&self) -> Result<Table> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, self.bytes, &model)?;
        let idle = ["--".to_owned()].into_iter().chain(idle_args(&recipe::cache()?)?).collect();
        let mut seconds = [const { [const { Vec::new() }; 3] }; 2];
        let mut lost = 0;
        for round in 0..self.rounds {
            let trace = folder.path().join(format!("lines-{round}"));
            let record = vec!["--record-lines".to_owned(), trace.display().to_string()];
            for (way, args) in [&Vec::new(), &idle, &record].into_iter().enumerate() {
                let took = guest(&model, folder.path(), args)?;
                for (seconds, took) in seconds.iter_mut().zip(took) {
                    seconds[way].push(took);
                }
            }
            lost += lost_lines(&trace)?;
        }
        let mut out = table(&[
            "work of an emulated guest",
            "s",
            "each load told, nothing done",
            "of it",
            "lines observed",
            "of it",
            "lost in both",
        ]);
        let names = ["loads of 8 bytes, 64 MiB of the base window", "SHA-256 of 32 MiB of its own memory"];
        for (name, seconds) in names.into_iter().zip(seconds) {
            let [without, idle, with] = seconds.map(median);
            let [of_idle, of_with] = [idle, with].map(|seconds| format!("{:.2}", seconds / without));
            let [without, idle, with] = [without, idle, with].map(|seconds| format!("{seconds:.3}"));
            out.add_row([name.to_owned(), without, idle, of_idle, with, of_with, lost.to_string()]);
        }
        Ok(out)
    }

    /// Cold reads of a mount with and without `lamina trace record`, by turns.
    ///
    /// # Errors
    /// When the device does not start, or a read or a recording fails.
    pub fn recorded(&self) -> Result<Table> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, self.bytes, &model)?;
        let device = Daemon::start(&Serve {
            models: vec![model],
            views: vec!["full".to_owned()],
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: "tree".to_owned(),
            capacity: None,
            read_ahead_kb: 128,
            devices: None,
        })?;
        let (mut without, mut with, mut lost) = (Vec::new(), Vec::new(), 0);
        for round in 0..self.rounds {
            let read = || read_cold(&device.ready.base.path, 0, self.bytes);
            without.push(read()?);
            let recorder = record(&device, &folder.path().join(format!("trace-{round}")))?;
            with.push(read()?);
            lost += ended(recorder)?;
        }
        device.stop()?;
        let (without, with) = (median(without), median(with));
        let gbs = |seconds: f64| format!("{:.3}", rate(self.bytes, seconds));
        let mut out = table(&["cold reads of a mount", "GB/s", "of it", "requests lost"]);
        out.add_row(["alone".to_owned(), gbs(without), "1.00".to_owned(), "–".to_owned()]);
        out.add_row(["recorded".to_owned(), gbs(with), format!("{:.2}", without / with), lost.to_string()]);
        Ok(out)
    }

    /// Requests a second of one thread, by design, without and with DRAM's timing, and the bursts
    /// that took: one request at random is a block's bundle under `trace`, some 49 lines.
    ///
    /// # Errors
    /// When the model refuses its own trace.
    pub fn replayed(&self) -> Result<Table> {
        let mut out = table(&[
            "replay, millions a second",
            "requests, bytes and link",
            "requests, and DRAM",
            "bursts, and DRAM",
        ]);
        for (name, random, said) in [
            ("lines in order", false, false),
            ("lines at random", true, false),
            ("lines at random of blocks that the trace describes", true, true),
        ] {
            let trace = lines(random, said)?;
            for design in ["plain", "trace"] {
                let [(bytes, _), (timed, bursts)] =
                    [self.replay(&trace, design, false)?, self.replay(&trace, design, true)?];
                let millions = |count: u64, seconds: f64| format!("{:.2}", 1e3 * rate(count, seconds));
                out.add_row([
                    format!("{name}, {design}"),
                    millions(REQUESTS, bytes),
                    millions(REQUESTS, timed),
                    millions(bursts, timed),
                ]);
            }
        }
        Ok(out)
    }

    /// The seconds of a replay, and the bursts of DRAM that were timed.
    fn replay(&self, trace: &[u8], design: &str, timed: bool) -> Result<(f64, u64)> {
        let mut options = Options::usual()?;
        if !timed {
            options.dram = None;
        }
        let subject = Subject::named(design)?;
        let (mut seconds, mut bursts) = (Vec::new(), 0);
        for _ in 0..self.rounds {
            let begun = Instant::now();
            let done = compare(&mut Reader::new(trace)?, &[subject], &options)?;
            seconds.push(begun.elapsed().as_secs_f64());
            let outcome = &done.designs[0];
            ensure!(outcome.requests == REQUESTS, "{design} left requests out");
            bursts = outcome.dram.as_ref().map_or(0, |dram| dram.commands.reads + dram.commands.writes);
        }
        Ok((median(seconds), bursts))
    }
}

/// Boots a guest that loads the tensor and hashes, with these arguments more: the seconds of each.
fn guest(model: &Path, folder: &Path, args: &[String]) -> Result<[f64; 2]> {
    let script = folder.join("work.sh");
    let now = "cut -d' ' -f1 /proc/uptime";
    let text = format!(
        "lamina-shim up && sleep 1 && lamina-loads {} base --rounds 7 || exit 1\n\
         dd if=/dev/zero of=/zeros bs=1M count={HASHED_MIB} 2>/dev/null\n\
         for n in 1 2 3; do a=$({now}); sha256sum /zeros >/dev/null; echo hashed $a $({now}); done\n",
        tile::TENSOR
    );
    std::fs::write(&script, text)?;
    let loads = programs::guest("lamina-loads")?;
    let mut command = Command::new(programs::lamina()?);
    command.args(["boot", "--accel", "tcg", "--put", &format!("{}=/bin/lamina-loads", loads.display())]);
    command.arg("--model").arg(model).arg("--run-dir").arg(folder.join("run"));
    command.arg("--script").arg(&script).args(args);
    let output = command.output().context("cannot start lamina")?;
    if !output.status.success() {
        bail!("lamina boot: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let (mut loaded, mut hashed) = (Vec::new(), Vec::new());
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
        match words.first() {
            // `loads 0: BYTES bytes in SECONDS s`
            Some(&"loads") => {
                let (bytes, seconds) = number(2).zip(number(5)).context("what lamina-loads prints")?;
                loaded.push(seconds / bytes * f64::from(64 << 20));
            }
            Some(&"hashed") => {
                let (begun, ended) = number(1).zip(number(2)).context("what the script prints")?;
                hashed.push(ended - begun);
            }
            _ => {}
        }
    }
    ensure!(!loaded.is_empty() && !hashed.is_empty(), "the guest did not do its work");
    Ok([median(loaded), median(hashed)])
}

/// The lines that a trace says were lost.
fn lost_lines(trace: &Path) -> Result<u64> {
    let mut reader = Reader::new(BufReader::new(File::open(trace)?))?;
    let mut lost = 0;
    while let Some(item) = reader.next_item()? {
        if let Item::Lost(more) = item {
            lost += more;
        }
    }
    Ok(lost)
}

/// Begins to record a device.
fn record(device: &Daemon, out: &Path) -> Result<Child> {
    let mut command = Command::new(programs::lamina()?);
    command.args(["trace", "record", "--json"]).arg(out).arg("--api").arg(&device.ready.api);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut log = BufReader::new(child.stderr.take().context("no stderr")?);
    let mut line = String::new();
    log.read_line(&mut line)?;
    ensure!(line.contains("recording"), "lamina trace record: {line}");
    child.stderr = Some(log.into_inner());
    Ok(child)
}

/// Ends a recording: how many requests it lost.
fn ended(child: Child) -> Result<u64> {
    kill_process(Pid::from_child(&child), Signal::INT)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "lamina trace record: {}", String::from_utf8_lossy(&output.stderr));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    said["lost"].as_u64().context("a recording says what it lost")
}

/// A trace of reads of a line each. If `said`, it begins with how each block of the device is
/// stored: a head, a stream of eight planes and seven planes as they are.
fn lines(random: bool, said: bool) -> Result<Vec<u8>> {
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Lines, device_bytes: DEVICE_BYTES })?;
    writer.view(&View::full(16))?;
    if said {
        let mut planes = vec![256; 16];
        planes[..9].fill(0);
        for number in 0..DEVICE_BYTES / BLOCK_BYTES {
            let block = Block {
                segment: Some(50 * number),
                head: 320,
                stream: u16::try_from(720 + number % 320)?,
                joint: 8,
                planes: planes.as_slice().into(),
                ..Block::default()
            };
            writer.block(number, &block)?;
        }
    }
    let mut state = 1_u64;
    for number in 0..REQUESTS {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let line = if random { (state >> 33) % (DEVICE_BYTES / 64) } else { number };
        writer.request(&Request {
            time_ns: number,
            address: 64 * line,
            length: 64,
            view: 0,
            guest: 0,
            write: false,
            served: None,
        })?;
    }
    Ok(writer.finish()?)
}
