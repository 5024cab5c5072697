//! The base window as the guest's memory, and as a disk it swaps to: what is asked, and what is
//! told of it.

use serde::{Deserialize, Serialize};

/// What to do with the base window as a NUMA node, by the kernel's own tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RamPlan {
    /// Processes whose memory is bound to the node, one after the other. What they leave must be
    /// zeroed by the kernel (`init_on_free=1`), so that what the device holds more after one has
    /// begun is that one's.
    pub processes: Vec<ProcessPlan>,
    /// Bytes of a process in the guest's own RAM, half of which the kernel is to demote to the
    /// node.
    pub demote_bytes: u64,
    /// Bytes of a process on the node that DAMON watches, and that reads the first `hot_bytes` of
    /// them all the time.
    pub watched_bytes: u64,
    /// Bytes of it that are hot.
    pub hot_bytes: u64,
}

/// A process whose memory is measured when it says that it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessPlan {
    /// Its name, for the report.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What it is told first.
    pub input: String,
    /// The line it says when it is ready; without one, it is when it waits for somebody to take its
    /// output.
    pub ready: Option<String>,
    /// A line it is told then, if it is to check what it has, and what it must answer.
    pub check: Option<(String, String)>,
}

/// Swapping to a disk of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapPlan {
    /// The disk's serial number.
    pub serial: String,
    /// Bytes of the process that swaps.
    pub bytes: u64,
    /// Bytes of them that it may have in RAM.
    pub limit_bytes: u64,
}

/// A memory tier of the kernel's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tier {
    /// Its number; a smaller one is faster.
    pub tier: u32,
    /// The nodes in it, as the kernel lists them.
    pub nodes: String,
}

/// What DAMON found of a process that is hot in one part and cold in the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Heat {
    /// Bytes that are read all the time.
    pub hot_bytes: u64,
    /// Of these, bytes in regions that DAMON saw accessed.
    pub hot_found: u64,
    /// Bytes that nobody touches.
    pub cold_bytes: u64,
    /// Of these, bytes in regions that DAMON saw not accessed.
    pub cold_found: u64,
    /// DAMON's regions of the whole process.
    pub regions: usize,
    /// Time until they were told apart, or until it was given up.
    pub seconds: f64,
}

impl Heat {
    /// Whether DAMON tells the parts apart, for three quarters of each and more.
    pub fn told_apart(&self) -> bool {
        let most = |found, bytes| found >= bytes / 4 * 3;
        most(self.hot_found, self.hot_bytes) && most(self.cold_found, self.cold_bytes)
    }
}
