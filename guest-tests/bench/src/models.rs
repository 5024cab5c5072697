//! Models as files: reading one at a precision beside the same view of the window, and loading one
//! beside copying it to a tmpfs.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use lamina_run::{
    daemon::{Daemon, Serve},
    programs,
};
use serde_json::Value;

use crate::{median, mount::read_cold, rate, table, tile};

/// The views that are read.
const VIEWS: [&str; 3] = ["e8m3", "e8m1+g2", "fp8_e4m3fn"];
/// What the served model is called.
const NAME: &str = "tile";

/// What is measured.
#[derive(Clone, Debug)]
pub struct Models {
    /// The checkpoints whose values the model has.
    pub models: Vec<PathBuf>,
    /// Bytes of the model.
    pub bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// KiB the host reads when a page is missing.
    pub read_ahead_kb: u32,
}

/// Seconds of something, and of its peer.
#[derive(Default)]
struct Both {
    own: Vec<f64>,
    peer: Vec<f64>,
}

impl Models {
    /// Measures, and returns the table.
    ///
    /// # Errors
    /// When the device does not start, or something cannot be read or loaded.
    pub fn run(&self) -> Result<Table> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join(format!("{NAME}.safetensors"));
        tile::write(&self.models, self.bytes, &model)?;
        let serve = Serve {
            models: vec![model.clone()],
            views: VIEWS.map(str::to_owned).to_vec(),
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: "tree".to_owned(),
            capacity: Some((3 * self.bytes).next_multiple_of(256 << 20).to_string()),
            read_ahead_kb: self.read_ahead_kb,
            devices: None,
        };
        let device = Daemon::start(&serve)?;
        let files = device.ready.base.path.parent().context("the window lies in no folder")?;
        let files = files.join("models").join(NAME);
        let tmpfs = tempfile::tempdir_in("/dev/shm").context("there is no tmpfs at /dev/shm")?;
        let mut reads = VIEWS.map(|_| Both::default());
        let mut loads = Both::default();
        for _ in 0..self.rounds {
            let stats = device.stats()?;
            for (view, both) in VIEWS.iter().zip(&mut reads) {
                let (offset, length) = place(&stats, view)?;
                both.peer.push(read_cold(&device.ready.views.path, offset, length)?);
                let file = files.join(format!("{NAME}@{view}.safetensors"));
                both.own.push(read_cold(&file, 0, file.metadata()?.len())?);
            }
            loads.peer.push(timed(Command::new("cp").arg(&model).arg(tmpfs.path()))?);
            loads.own.push(timed(&mut lamina(&["load", "--as", "again"], &device.ready.api, &model)?)?);
            timed(&mut lamina(&["rm", "again"], &device.ready.api, Path::new(""))?)?;
        }
        device.stop()?;
        let mut out = table(&["what", "GB/s", "of its peer", "peer", "GB/s"]);
        for (view, both) in VIEWS.iter().zip(reads) {
            // A byte an element is half of what the model has.
            let bytes = if view.starts_with("fp8") { self.bytes / 2 } else { self.bytes };
            row(&mut out, format!("reading {NAME}@{view}"), bytes, both, "the view in the window");
        }
        row(&mut out, "lamina load".to_owned(), self.bytes, loads, "cp to a tmpfs");
        Ok(out)
    }
}

fn row(out: &mut Table, what: String, bytes: u64, Both { own, peer }: Both, of: &str) {
    let (own, peer) = (median(own), median(peer));
    let gbs = |seconds| format!("{:.2}", rate(bytes, seconds));
    out.add_row([what, gbs(own), format!("{:.2}", peer / own), of.to_owned(), gbs(peer)]);
}

/// Where a view of the model lies in the views window, and its bytes.
fn place(stats: &Value, view: &str) -> Result<(u64, u64)> {
    let views = stats["views"].as_array().map_or(&[][..], Vec::as_slice);
    let found = views.iter().find(|found| found["view"] == view);
    let place = found.and_then(|found| Some((found["offset"].as_u64()?, found["length"].as_u64()?)));
    place.with_context(|| format!("the view {view} has no place"))
}

/// A command of the program to the device that answers at `api`, about `path` unless that is empty.
fn lamina(words: &[&str], api: &Path, path: &Path) -> Result<Command> {
    let mut command = Command::new(programs::lamina()?);
    command.args(words).arg("--api").arg(api).arg("--json");
    if !path.as_os_str().is_empty() {
        command.arg(path);
    }
    Ok(command)
}

/// Seconds that a command takes.
fn timed(command: &mut Command) -> Result<f64> {
    let begun = Instant::now();
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let seconds = begun.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {said}");
    Ok(seconds)
}
