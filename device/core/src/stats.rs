//! What the device counts, and how it reports it.
//!
//! The rules:
//! * A figure is [declared](crate::counters) once. Everything that shows it is made from that.
//! * Counters are exact and only rise; gauges follow what is stored now. Nothing here is modelled
//!   but the index cache, rates of several devices ([`members`]), and what a watcher tells
//!   ([`ModelledReport`]).
//! * One access is a request that reaches the device: a page that a page cache fills, of 4 KiB or
//!   with what it reads ahead, and no load of 64 bytes. Requests are counted by size ([`Fills`]).
//! * `plain_bytes` is what a device without compression or planes moves for the same request: the
//!   lines of 64 bytes that hold the requested elements' words. `gcomp_bytes` is what the paper's
//!   GComp moves: every compressed 4 KiB block that the request touches, whole, by the generic
//!   codec of the block's tensor ([`Codec::generic_name`]: LZ4 where planes are coded by the tree),
//!   measured when the block was written.
//! * `stored_bytes` are whole granules of 64 bytes, as DRAM would move and keep them.
//! * How long requests take is measured where they are counted: by this worker process, for whole
//!   requests, with nothing that an attachment does before or after.
//! * What the buffer of an open KV window answers is fetched by none of the three devices: it is
//!   counted apart (`staged`), and nothing is charged for it. What was decoded for an earlier read,
//!   and is given now for the first time, was fetched whole then: its stored bytes were counted
//!   there, and plain's and GComp's are here.
//! * What a store has to read first is counted apart (`for_writes`), as it would be by each device:
//!   the lines of 64 bytes that it fills in part by a plain one, the blocks that it fills in part
//!   by GComp, those or the whole KV window by this one. A buffered block is read once, however
//!   often it is written then, again by all three.
//! * The *index cache* is a direct-mapped model of the paper's on-chip cache of index entries; its
//!   hits and misses are exact for that model. A miss reads an entry of 64 bytes, and each entry
//!   that changes is written through. GComp is given an index of as large entries and as large a
//!   cache; a plain device has none.
//! * Blocks that are coded anew or moved for the device's own sake are *maintenance*, which no
//!   request is charged for.

mod device;
mod holdings;
pub(crate) mod members;
mod modelled;
mod report;
mod sections;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use self::device::{
    BlocksReport, DeviceReport, IndexReport, KvWindowsReport, MaintenanceReport, RequestsReport,
    WriteBacksReport, WritesReport,
};
pub(crate) use self::device::{Stats, Subject, WindowsNow};
use self::holdings::Held;
pub(crate) use self::holdings::Holdings;
pub use self::holdings::PlaneReport;
pub use self::members::{InterleaveReport, Interleaving, MemberReport, USUAL_BANDWIDTH};
pub use self::modelled::ModelledReport;
pub use self::report::{FormerWindows, StatsReport, TensorReport, ViewReport};
pub use self::sections::SECTIONS;
pub(crate) use crate::counters::{Fills, Gauge, Latency, Tally, Traffic};
pub use crate::counters::{FillsReport, LatencyReport, TrafficReport};
pub use crate::partition_table::{PartitionReport, PartitionRequests, PartitionWrites};

/// A direct-mapped cache of index entries: which blocks' entries an on-chip SRAM of this many would
/// hold.
#[derive(Debug)]
pub(crate) struct IndexCache {
    /// By block number modulo their count: the block whose entry is held, plus one.
    tags: Vec<AtomicU64>,
}

impl IndexCache {
    pub(crate) fn new(entries: usize) -> Self {
        Self { tags: (0..entries.max(1)).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Whether the entry of `block` was held; it is afterwards.
    pub(crate) fn touch(&self, block: u64) -> bool {
        let tag = &self.tags[usize::try_from(block % self.tags.len() as u64).expect("less than the count")];
        // A swap waits for all stores before it, and most entries are held.
        tag.load(Relaxed) == block + 1 || tag.swap(block + 1, Relaxed) == block + 1
    }
}
