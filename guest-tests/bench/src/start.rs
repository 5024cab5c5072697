//! How long an empty device takes to start, and how much memory, by its capacity.

use std::time::Instant;

use anyhow::Result;
use comfy_table::Table;
use lamina_run::daemon::{Daemon, Serve};

use crate::{median, processes::memory, table};

const CAPACITIES: [&str; 3] = ["256M", "4G", "64G"];

/// Measures `rounds` starts of each capacity, and returns the table.
///
/// # Errors
/// When a device does not start.
pub fn run(rounds: usize) -> Result<Table> {
    let mut out = table(&["capacity", "ready after ms", "memory MiB"]);
    for capacity in CAPACITIES {
        let (mut seconds, mut memories) = (Vec::new(), Vec::new());
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
            memories.push(mib(device.pid())?);
            device.stop()?;
        }
        let (seconds, memory) = (median(seconds), median(memories));
        out.add_row([capacity.to_owned(), format!("{:.0}", seconds * 1e3), format!("{memory:.1}")]);
    }
    Ok(out)
}

/// Of the holder and its worker.
#[expect(clippy::cast_precision_loss, reason = "a size to be looked at")]
fn mib(device: u32) -> Result<f64> {
    Ok(memory(device)? as f64 / f64::from(1 << 20))
}
