//! Guests that share a mount's page cache with processes of their host, and a pool with these.
//!
//! The memory is coherent, and a lock is a compare-and-exchange, as among processes. But a guest
//! has no locks on the host's file, by which processes know who is dead. So somebody on the host
//! claims the guest's number ([`crate::local::Processes::claim`]) before it is booted, and gives it
//! up when its QEMU has ended, no sooner. A guest knows of nobody that he is dead, and never
//! manages; one process at least is attached, or nobody is recovered.
//!
//! Under QEMU's own emulation (TCG) a guest needs two processors: for one alone QEMU makes no
//! atomic steps of the guest's.

use std::time::{Duration, Instant};

use crate::host::Host;

const TIMEOUT: u64 = 2_000;
/// An emulated guest, or whom it waits for, may be stopped or wait for the host's processors.
const MAX_WAIT: u64 = 300_000;

/// A guest.
#[derive(Debug)]
pub struct Guest {
    name: String,
    began: Instant,
}

impl Guest {
    /// A guest of this name.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), began: Instant::now() }
    }
}

impl Host for Guest {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn relax(&self, turns: u32) {
        match turns {
            0..32 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
    }

    fn timeout(&self) -> u64 {
        TIMEOUT
    }

    fn max_wait(&self) -> u64 {
        MAX_WAIT
    }

    fn name(&self, _: u32) -> String {
        self.name.clone()
    }

    fn may_manage(&self) -> bool {
        false
    }

    fn is_gone(&self, _: u32, _: u32) -> bool {
        false
    }

    fn revoke(&self, _: u32, _: u32) -> bool {
        false
    }
}
