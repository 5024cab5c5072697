//! Warm reads in a guest: the device's base window against an ordinary memory file under the same
//! QEMU.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use comfy_table::Table;
use lamina_guest::{Event, Plan, WarmBench};
use lamina_run::{
    daemon::{Daemon, Ready, Serve, Window},
    visit::Visit,
};

use crate::{median, table, tile};

/// What is read.
#[derive(Clone, Debug)]
pub struct Warm {
    /// The checkpoints whose values are read.
    pub models: Vec<PathBuf>,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Boots of each kind.
    pub boots: usize,
    /// Reads in each boot.
    pub reads: u32,
}

impl Warm {
    /// Measures, and returns the table.
    ///
    /// # Errors
    /// When a device or a guest does not start.
    pub fn run(&self) -> Result<Table> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, self.bytes, &model)?;
        let device = Daemon::start(&Serve {
            models: vec![model],
            views: vec!["full".to_owned()],
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: "lz4".to_owned(),
            capacity: None,
            read_ahead_kb: 128,
            devices: None,
        })?;
        let ordinary = Ready {
            base: copy(&device.ready.base, folder.path(), self.bytes)?,
            views: copy(&device.ready.views, folder.path(), lamina_abi::DIRECTORY_BYTES)?,
            ..device.ready.clone()
        };
        let (mut lamina, mut file) = (Vec::new(), Vec::new());
        for _ in 0..self.boots {
            for (ready, rates) in [(&device.ready, &mut lamina), (&ordinary, &mut file)] {
                rates.extend(self.boot(ready, folder.path())?);
            }
        }
        device.stop()?;
        let (lamina, file) = (median(lamina), median(file));
        let mut out = table(&["base window", "GB/s", "of the memory file"]);
        out.add_row(["ordinary memory file".to_owned(), format!("{:.3}", file / 1e9), "1.00".to_owned()]);
        out.add_row(["lamina".to_owned(), format!("{:.3}", lamina / 1e9), format!("{:.3}", lamina / file)]);
        Ok(out)
    }

    /// The rates that one guest sees.
    fn boot(&self, ready: &Ready, folder: &Path) -> Result<Vec<f64>> {
        let plan = Plan {
            tensors: Some(Vec::new()),
            read_base: false,
            warm_bench: Some(WarmBench { tensor: tile::TENSOR.to_owned(), repeats: self.reads }),
            ..Plan::default()
        };
        let visit = Visit {
            plan,
            files: Vec::new(),
            limit: Duration::from_secs(300),
            console: folder.join("console.log"),
            cpus: 2,
        };
        let mut rates = Vec::new();
        visit.make(ready, |event, _| {
            match event {
                Event::WarmRead { bytes_per_second, .. } => rates.push(bytes_per_second),
                Event::Problem { step, message } => bail!("guest, {step}: {message}"),
                _ => {}
            }
            Ok(())
        })?;
        Ok(rates)
    }
}

/// An ordinary file of the window's size with its first `bytes` in it.
fn copy(window: &Window, folder: &Path, bytes: u64) -> Result<Window> {
    let name = window.path.file_name().context("a window has a name")?;
    let path = folder.join(name);
    let from = File::open(&window.path)?;
    let to = OpenOptions::new().write(true).create_new(true).open(&path)?;
    to.set_len(window.bytes)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < bytes {
        let got = from.read_at(&mut buffer, at)?;
        if got == 0 {
            break;
        }
        to.write_all_at(&buffer[..got], at)?;
        at += got as u64;
    }
    Ok(Window { path, bytes: window.bytes })
}
