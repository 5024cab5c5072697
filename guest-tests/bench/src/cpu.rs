//! Processor time of processes, which other work on the machine lengthens far less than it does the
//! time on the clock.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use rustix::param::clock_ticks_per_second;

use crate::processes::children;

/// What the process `pid` and its descendants that run have used so far. One that is no more has
/// used nothing.
pub(super) fn used(pid: u32) -> Duration {
    let of_children: Duration = children(pid).into_iter().map(used).sum();
    own(pid).unwrap_or_default() + of_children
}

/// What the process itself has used, user and system.
fn own(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in parentheses, whatever that is.
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let mut ticks = 0;
    for field in fields.split_whitespace().skip(11).take(2) {
        ticks += field.parse::<u64>()?;
    }
    Ok(Duration::from_secs(1) * u32::try_from(ticks)? / u32::try_from(clock_ticks_per_second())?)
}
