//! What the device counts, and how it tells.
//!
//! The rules:
//! * Counters are exact and only rise; gauges follow what is stored now. Nothing here is modelled but the index cache, and bandwidths of several devices ([`members`]).
//! * One access is a request that reaches the device: a page that a page cache fills, of 4 KiB or
//!   with what it reads ahead, and no load of 64 bytes. Requests are counted by size ([`Fills`]).
//! * `plain_bytes` is what a device without compression or planes moves for the same request: the
//!   lines of 64 bytes that hold the requested elements' words. `gcomp_bytes` is what the paper's
//!   GComp moves: every compressed 4 KiB block that the request touches, whole, by the generic
//!   codec of the block's tensor ([`Codec::generic_name`]: LZ4 where planes are coded by the tree),
//!   measured when the block was written (absent if the device was told not to).
//! * `stored_bytes` are whole granules of 64 bytes, as DRAM would move and keep them.
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

mod holdings;
pub(crate) mod members;
mod partition;
pub(crate) mod report;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(crate) use self::holdings::Holdings;
pub use self::members::{InterleaveReport, Interleaving, MemberReport, USUAL_BANDWIDTH};
pub use self::partition::{PartitionReport, PartitionRequests, PartitionWrites};
pub use self::report::{
    BlocksReport, DeviceReport, FillsReport, IndexReport, MaintenanceReport, PlaneReport, RequestsReport,
    StatsReport, TensorReport, TrafficReport, ViewReport, WindowsReport, WriteBacksReport, WritesReport,
};
pub use crate::counters::{Counter, Gauge, Tally, Traffic};
use lamina_codec::{Codec, block::MAX_PLANES, format::Format, kv::Coding};

/// Requests by size.
#[derive(Debug, Default)]
pub(crate) struct Fills([Counter; Self::BOUNDS.len() + 1]);

impl Fills {
    /// The longest requests of each size, but the last, in bytes.
    pub(crate) const BOUNDS: [u64; 6] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];

    /// Counts a request for `bytes`.
    pub(crate) fn count(&self, bytes: u64) {
        if bytes > 0 {
            self.0[Self::BOUNDS.partition_point(|bound| *bound < bytes)].add(1);
        }
    }

    /// How many there were of each size.
    pub(crate) fn counts(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(Counter::get)
    }
}

/// Kinds of stored plane, as the plane gauges tell them apart.
const PLANE_KINDS: usize = 1 + Codec::ALL.len();

/// Counters and gauges of a whole device.
#[derive(Debug)]
pub struct Stats {
    pub(crate) base: Traffic,
    pub(crate) views: Traffic,
    /// What stores had to read first.
    pub(crate) for_writes: Traffic,
    /// Requests for the base window by size.
    pub(crate) base_fills: Fills,
    /// Those for views.
    pub(crate) view_fills: Fills,
    pub(crate) directory_reads: Counter,
    pub(crate) base_writes: Counter,
    pub(crate) base_written_bytes: Counter,
    pub(crate) blocks_written: Counter,
    pub(crate) zero_blocks_written: Counter,
    pub(crate) bypass_blocks_written: Counter,
    pub(crate) stored_bytes_written: Counter,
    pub(crate) gcomp_bytes_written: Counter,
    pub(crate) discarded_blocks: Counter,
    pub(crate) refused_view_stores: Counter,
    pub(crate) refused_view_bytes: Counter,
    pub(crate) damaged_reads: Counter,
    pub(crate) index_hits: Counter,
    pub(crate) index_misses: Counter,
    /// Index entries that changed.
    pub(crate) index_written: Counter,
    /// What GComp's cache of index entries would have held, and what not.
    pub(crate) gcomp_index_hits: Counter,
    pub(crate) gcomp_index_misses: Counter,
    /// Index entries that it would have changed.
    pub(crate) gcomp_index_written: Counter,
    /// What was read to code blocks anew.
    pub(crate) for_maintenance: Traffic,
    /// Blocks coded anew, and bytes stored for them.
    pub(crate) recoded_blocks: Counter,
    pub(crate) recoded_bytes: Counter,
    /// Blocks whose segments were moved together, and their bytes.
    pub(crate) moved_blocks: Counter,
    pub(crate) moved_bytes: Counter,
    /// KV windows opened for writing.
    pub(crate) windows_opened: Counter,
    /// Of these, those closed to make room for another: back-pressure.
    pub(crate) windows_forced: Counter,
    /// Windows coded, by [`Coding`].
    pub(crate) windows_coded: [Counter; Coding::ALL.len()],
    /// Rows that they left out.
    pub(crate) repeated_rows: Counter,
    /// Windows decoded for reads.
    pub(crate) windows_decoded: Counter,
    /// Reads of blocks that found their window decoded.
    pub(crate) windows_reused: Counter,
    /// Panics of workers.
    pub(crate) panics: Counter,
    /// Write-backs that found no room at first.
    pub(crate) write_backs_waited: Counter,
    /// Write-backs that were refused in the end: stores that are lost.
    pub(crate) write_backs_refused: Counter,
    /// Their bytes.
    pub(crate) write_backs_refused_bytes: Counter,
    /// Write-backs that wait for room.
    pub(crate) write_backs_waiting: Gauge,
    /// Their bytes.
    pub(crate) write_backs_waiting_bytes: Gauge,
    /// Exact bytes of the heads of transformed blocks.
    pub(crate) heads: Gauge,
    /// Blocks that hold data, tensors' and others.
    pub(crate) live_blocks: Gauge,
    /// Of these, those no tensor covers.
    pub(crate) opaque_blocks: Gauge,
    /// Of the live ones, those no codec made smaller.
    pub(crate) bypass_blocks: Gauge,
    /// Bytes that opaque blocks are charged.
    pub(crate) opaque_stored: Gauge,
    /// Exact bytes of words blocks: raw, then by codec.
    words: [Gauge; PLANE_KINDS],
    /// Exact bytes of planes by format and plane: raw, then by codec.
    planes: Vec<[Gauge; PLANE_KINDS]>,
    /// Constant planes by format and plane.
    constant: Vec<Gauge>,
}

impl Stats {
    pub(crate) fn new() -> Self {
        let slots = Format::ALL.len() * MAX_PLANES;
        Self {
            base: Traffic::default(),
            views: Traffic::default(),
            for_writes: Traffic::default(),
            base_fills: Fills::default(),
            view_fills: Fills::default(),
            directory_reads: Counter::default(),
            base_writes: Counter::default(),
            base_written_bytes: Counter::default(),
            blocks_written: Counter::default(),
            zero_blocks_written: Counter::default(),
            bypass_blocks_written: Counter::default(),
            stored_bytes_written: Counter::default(),
            gcomp_bytes_written: Counter::default(),
            discarded_blocks: Counter::default(),
            refused_view_stores: Counter::default(),
            refused_view_bytes: Counter::default(),
            damaged_reads: Counter::default(),
            index_hits: Counter::default(),
            index_misses: Counter::default(),
            index_written: Counter::default(),
            gcomp_index_hits: Counter::default(),
            gcomp_index_misses: Counter::default(),
            gcomp_index_written: Counter::default(),
            for_maintenance: Traffic::default(),
            recoded_blocks: Counter::default(),
            recoded_bytes: Counter::default(),
            moved_blocks: Counter::default(),
            moved_bytes: Counter::default(),
            windows_opened: Counter::default(),
            windows_forced: Counter::default(),
            windows_coded: Default::default(),
            repeated_rows: Counter::default(),
            windows_decoded: Counter::default(),
            windows_reused: Counter::default(),
            panics: Counter::default(),
            write_backs_waited: Counter::default(),
            write_backs_refused: Counter::default(),
            write_backs_refused_bytes: Counter::default(),
            write_backs_waiting: Gauge::default(),
            write_backs_waiting_bytes: Gauge::default(),
            heads: Gauge::default(),
            live_blocks: Gauge::default(),
            opaque_blocks: Gauge::default(),
            bypass_blocks: Gauge::default(),
            opaque_stored: Gauge::default(),
            words: Default::default(),
            planes: (0..slots).map(|_| Default::default()).collect(),
            constant: (0..slots).map(|_| Gauge::default()).collect(),
        }
    }

    /// The counters that images kept first, in the order in which they do. What is added goes to
    /// [`Self::later_counters`].
    pub(crate) fn counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        let single = [
            &mut self.directory_reads,
            &mut self.base_writes,
            &mut self.base_written_bytes,
            &mut self.blocks_written,
            &mut self.zero_blocks_written,
            &mut self.bypass_blocks_written,
            &mut self.stored_bytes_written,
            &mut self.gcomp_bytes_written,
            &mut self.discarded_blocks,
            &mut self.refused_view_stores,
            &mut self.refused_view_bytes,
            &mut self.damaged_reads,
            &mut self.index_hits,
            &mut self.index_misses,
            &mut self.windows_opened,
            &mut self.windows_forced,
            &mut self.repeated_rows,
            &mut self.windows_decoded,
            &mut self.windows_reused,
            &mut self.panics,
            &mut self.write_backs_waited,
            &mut self.write_backs_refused,
            &mut self.write_backs_refused_bytes,
        ];
        let traffic = self.base.counters().into_iter().chain(self.views.counters());
        traffic.chain(&mut self.windows_coded).chain(single)
    }

    /// Those that came later, which images keep behind all others: what is added is added at the
    /// end.
    pub(crate) fn later_counters(&mut self) -> impl Iterator<Item = &mut Counter> {
        let windows = [&mut self.base, &mut self.views].into_iter().flat_map(Traffic::later_counters);
        let fills = [&mut self.base_fills, &mut self.view_fills].into_iter().flat_map(|fills| &mut fills.0);
        let single = [
            &mut self.index_written,
            &mut self.gcomp_index_hits,
            &mut self.gcomp_index_misses,
            &mut self.gcomp_index_written,
            &mut self.recoded_blocks,
            &mut self.recoded_bytes,
            &mut self.moved_blocks,
            &mut self.moved_bytes,
        ];
        let own = [&mut self.for_writes, &mut self.for_maintenance].into_iter().flat_map(|traffic| {
            let Traffic {
                reads,
                bytes,
                blocks,
                planes,
                stored,
                plain,
                gcomp,
                index_misses,
                gcomp_index_misses,
                staged_blocks,
                staged,
            } = traffic;
            [reads, bytes, blocks, planes, stored, plain, gcomp].into_iter().chain([
                index_misses,
                gcomp_index_misses,
                staged_blocks,
                staged,
            ])
        });
        windows.chain(own).chain(fills).chain(single)
    }

    /// Counts at the index what was looked for there.
    pub(crate) fn count_index(&self, tally: &Tally) {
        let all = [
            (&self.index_hits, tally.index_hits),
            (&self.index_misses, tally.index_misses),
            (&self.gcomp_index_hits, tally.gcomp_index_hits),
            (&self.gcomp_index_misses, tally.gcomp_index_misses),
        ];
        all.into_iter().filter(|(_, count)| *count > 0).for_each(|(counter, count)| counter.add(count));
    }

    /// Counts what a store had to read first: `reads` of blocks or KV windows, because of stores of
    /// `bytes`.
    pub(crate) fn count_for_write(&self, reads: u64, bytes: u64, tally: &Tally) {
        self.for_writes.add(reads, bytes, tally);
        self.count_index(tally);
    }

    /// Counts what was read to code blocks anew.
    pub(crate) fn count_for_maintenance(&self, reads: u64, tally: &Tally) {
        self.for_maintenance.add(reads, 0, tally);
        self.count_index(tally);
    }
}

fn slot(format: Format, plane: usize) -> usize {
    format as usize * MAX_PLANES + plane
}

/// A direct-mapped cache of index entries: which blocks' entries an on-chip SRAM of this many entries would hold.
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
