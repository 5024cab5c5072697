//! Cold sequential reads of a tensor from the mount, each device against the plain one.

use std::{
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use comfy_table::Table;
use lamina_run::daemon::{Daemon, Serve};
use rustix::fs::{Advice, fadvise};

use crate::{median, rate, table, tile};

/// What is read.
#[derive(Clone, Debug)]
pub struct Mount {
    /// The checkpoints whose values are read.
    pub models: Vec<PathBuf>,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// KiB the host reads when a page is missing.
    pub read_ahead_kb: u32,
}

/// The devices compared; the last is the one the others are held against.
const DEVICES: [(&str, &str); 5] =
    [("trace", "lz4"), ("trace", "tree"), ("trace", "zstd"), ("gcomp", "lz4"), ("plain", "lz4")];
/// Views read besides the base window.
const VIEWS: [&str; 3] = ["full", "e8m3", "fp8_e4m3fn"];

impl Mount {
    /// Measures, and returns the table.
    ///
    /// # Errors
    /// When a device does not start or a read fails.
    pub fn run(&self) -> Result<Table> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, self.bytes, &model)?;
        let mut devices = Vec::new();
        for (mode, codec) in DEVICES {
            let serve = Serve {
                models: vec![model.clone()],
                views: VIEWS.map(str::to_owned).to_vec(),
                kv: Vec::new(),
                mode: mode.to_owned(),
                codec: codec.to_owned(),
                capacity: None,
                read_ahead_kb: self.read_ahead_kb,
                devices: None,
            };
            devices.push(Daemon::start(&serve)?);
        }
        let mut seconds = vec![[const { Vec::new() }; 1 + VIEWS.len()]; DEVICES.len()];
        for _ in 0..self.rounds {
            for (device, seconds) in devices.iter().zip(&mut seconds) {
                let stats = device.stats()?;
                seconds[0].push(read_cold(&device.ready.base.path, 0, self.bytes)?);
                for (view, seconds) in VIEWS.iter().zip(&mut seconds[1..]) {
                    let entry =
                        stats["views"].as_array().and_then(|views| views.iter().find(|v| v["view"] == *view));
                    let entry = entry.with_context(|| format!("no view {view}"))?;
                    let (Some(offset), Some(length)) = (entry["offset"].as_u64(), entry["length"].as_u64())
                    else {
                        bail!("the view {view} has no place");
                    };
                    seconds.push(read_cold(&device.ready.views.path, offset, length)?);
                }
            }
        }
        let mut out = table(&["device", "base GB/s", "of plain", "full", "e8m3", "fp8_e4m3fn"]);
        let medians: Vec<Vec<f64>> =
            seconds.into_iter().map(|rows| rows.into_iter().map(median).collect()).collect();
        let plain = medians[DEVICES.len() - 1][0];
        for ((mode, codec), medians) in DEVICES.iter().zip(&medians) {
            let name = if *mode == "plain" { (*mode).to_owned() } else { format!("{mode} {codec}") };
            let gbs = |at: usize| format!("{:.2}", rate(self.bytes, medians[at]));
            out.add_row([name, gbs(0), format!("{:.2}", plain / medians[0]), gbs(1), gbs(2), gbs(3)]);
        }
        devices.into_iter().try_for_each(Daemon::stop)?;
        Ok(out)
    }
}

/// Seconds that reading `length` bytes from `offset` of `path` on takes when none of them is in the
/// page cache.
pub(crate) fn read_cold(path: &Path, offset: u64, length: u64) -> Result<f64> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    fadvise(file.as_fd(), 0, None, Advice::DontNeed)?;
    let mut buffer = vec![0; 1 << 20];
    let (mut at, end) = (offset, offset + length);
    let begun = Instant::now();
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let got = file.read_at(&mut buffer[..want], at)?;
        if got == 0 {
            bail!("{} ends at {at}", path.display());
        }
        at += got as u64;
    }
    Ok(begun.elapsed().as_secs_f64())
}
