//! Pools in a region that hosts share without coherence: Lamina's `--host`. Each host is a node,
//! and the device is asked to take away the access of one that is taken for dead.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::PoolError;
use crate::host::Host;
use crate::layout::Geometry;
use crate::local;
use crate::mem::{CxlMem, Hosted, Map, Revoke, Socket};
use crate::pool::Pool;

const MAX_WAIT: u64 = 120_000;
/// Turns of a wait between which nobody sleeps: each is requests to the device already.
const QUICK_TURNS: u32 = 16;

/// The hosts of a region, of which one is this.
pub struct Hosts<R = Socket> {
    names: Vec<String>,
    device: R,
    timeout: u64,
    began: Instant,
}

impl<R: Revoke> Hosts<R> {
    /// Hosts in the order of their nodes' numbers, who are taken for dead when they do not count on
    /// for `timeout`. `device` is asked to revoke.
    pub fn new(names: Vec<String>, timeout: Duration, device: R) -> Self {
        let timeout = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        Self { names, device, timeout, began: Instant::now() }
    }
}

impl<R: Revoke> Host for Hosts<R> {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn relax(&self, turns: u32) {
        if turns > QUICK_TURNS {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn timeout(&self) -> u64 {
        self.timeout
    }

    fn max_wait(&self) -> u64 {
        MAX_WAIT.max(self.timeout.saturating_mul(8))
    }

    fn name(&self, node: u32) -> String {
        self.names.get(node as usize).cloned().unwrap_or_default()
    }

    fn is_gone(&self, _: u32, _: u32) -> bool {
        // Only the device can tell, and only of whom it revoked.
        false
    }

    fn revoke(&self, node: u32, _: u32) -> bool {
        self.names.get(node as usize).is_some_and(|name| self.device.revoke(name).is_ok())
    }
}

/// The region as a host has it: its `base`, and its control port.
///
/// # Errors
/// [`PoolError::File`], [`PoolError::Mem`].
pub fn memory(base: &Path, ctl: &Path) -> Result<Arc<dyn CxlMem>, PoolError> {
    let map = Map::new(&local::open_file(base)?, base, None)?;
    Ok(Arc::new(Hosted::new(map, Socket::connect(ctl)?)))
}

/// Makes a pool in a region, to which no host may be attached.
///
/// # Errors
/// [`PoolError::Held`], [`PoolError::File`], [`PoolError::Geometry`], [`PoolError::Mem`].
pub fn create(base: &Path, ctl: &Path, geometry: &Geometry) -> Result<(), PoolError> {
    local::check_holds_no_other(base)?;
    Pool::create(memory(base, ctl)?, geometry)
}

/// Attaches to the pool in a region as the host `own` of `names`, by its files.
///
/// # Errors
/// [`PoolError::Node`] if it is none of them; [`PoolError::File`], [`PoolError::NoPool`],
/// [`PoolError::Revoked`].
pub fn open(
    base: &Path,
    ctl: &Path,
    names: &[String],
    own: &str,
    timeout: Duration,
) -> Result<Pool, PoolError> {
    let Some(node) = names.iter().position(|name| name == own) else {
        let why = format!("{own} is none of the hosts {}", names.join(", "));
        return Err(PoolError::Node { node: u32::MAX, why });
    };
    let hosts = Hosts::new(names.to_vec(), timeout, Socket::connect(ctl)?);
    // A device has sixteen hosts at most.
    Pool::attach(memory(base, ctl)?, Arc::new(hosts), node as u32)
}
