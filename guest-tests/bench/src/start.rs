//! How long an empty device takes to start, and how much memory, by its capacity.

use std::{fs, time::Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use lamina_run::daemon::{Daemon, Serve};

use crate::{median, table};

const CAPACITIES: [&str; 3] = ["256M", "4G", "64G"];

/// Measures `rounds` starts of each capacity, and returns the table.
///
/// # Errors
/// When a device does not start.
pub fn run(rounds: usize) -> Result<Table> {
    let mut out = table(&["capacity", "ready after ms", "resident MiB"]);
    for capacity in CAPACITIES {
        let (mut seconds, mut resident) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let serve = Serve {
                models: Vec::new(),
                views: vec!["full".to_owned()],
                kv: Vec::new(),
                mode: "trace".to_owned(),
                codec: "lz4".to_owned(),
                capacity: Some(capacity.to_owned()),
                read_ahead_kb: 4,
                devices: None,
            };
            let begun = Instant::now();
            let device = Daemon::start(&serve)?;
            seconds.push(begun.elapsed().as_secs_f64());
            resident.push(resident_mib(device.pid())?);
            device.stop()?;
        }
        let (seconds, resident) = (median(seconds), median(resident));
        out.add_row([capacity.to_owned(), format!("{:.0}", seconds * 1e3), format!("{resident:.1}")]);
    }
    Ok(out)
}

fn resident_mib(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no VmRSS")?.parse()?;
    Ok(kib / 1024.0)
}
