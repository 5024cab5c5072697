//! The statistics as they are told: one snapshot, the same for JSON, OpenMetrics and the page.

use serde::Serialize;

use super::{Counter, Fills, InterleaveReport, MAX_PLANES, PartitionReport, Stats, Traffic, slot};
use crate::{
    division::Division,
    layout::Layout,
    window::{Map, ViewInfo},
};
use lamina_codec::{BLOCK_BYTES, Codec, format::Format, kv::Coding};
use lamina_store::{entry::ENTRY_BYTES, mode::Mode};

/// Everything a device says of itself.
#[derive(Clone, Debug, Serialize)]
pub struct StatsReport {
    /// The device.
    pub device: DeviceReport,
    /// Requests by window.
    pub requests: RequestsReport,
    /// What stores had to read first: those of parts of blocks (their `bytes`), and index entries
    /// for all.
    pub reads_for_writes: TrafficReport,
    /// What writes did.
    pub writes: WritesReport,
    /// What the device did for its own sake.
    pub maintenance: MaintenanceReport,
    /// Write-backs for which there is no room.
    pub write_backs: WriteBacksReport,
    /// The plane index and the modelled cache of it.
    pub index: IndexReport,
    /// Windows of KV tensors.
    pub windows: WindowsReport,
    /// Blocks that hold data.
    pub blocks: BlocksReport,
    /// Stored bytes by format, plane and codec; only planes that store anything.
    pub planes: Vec<PlaneReport>,
    /// Each tensor, by DPA.
    pub tensors: Vec<TensorReport>,
    /// Each view, by offset.
    pub views: Vec<ViewReport>,
    /// Each partition, by DPA; none if the device is not divided.
    pub partitions: Vec<PartitionReport>,
    /// The devices that the base window is interleaved over; null if it is one device's.
    pub interleave: Option<InterleaveReport>,
}

/// The device: sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Its mode.
    pub mode: Mode,
    /// The codec of tensors that name none.
    pub codec: Codec,
    /// What `gcomp` compresses blocks by that no tensor covers; null if that was not measured.
    pub gcomp_codec: Option<&'static str>,
    /// The base window.
    pub capacity_bytes: u64,
    /// The views window.
    pub views_capacity_bytes: u64,
    /// Tensors, and blocks outside them that hold data.
    pub logical_bytes: u64,
    /// Blocks of either that hold data: what was written, not all of it zeros, and neither
    /// discarded nor only declared.
    pub written_bytes: u64,
    /// What they are charged in the store, the index not counted.
    pub stored_bytes: u64,
    /// Their index entries.
    pub index_bytes: u64,
    /// `written_bytes / stored_bytes`; null while nothing is stored, 1 of a plain device.
    pub ratio: Option<f64>,
    /// Bundles the store can hold.
    pub store_capacity_bytes: u64,
    /// What is left of the host's memory, or of what a control group allows; null if the device does not look.
    pub host_memory_left_bytes: Option<u64>,
    /// What of that a store in memory leaves free: below it, writes find no room; 0 if nothing is.
    pub memory_reserve_bytes: u64,
    /// Worker processes that died and were replaced while this device ran.
    pub worker_deaths: u64,
    /// Panics of workers: each was the end of one, or of a request that was answered with EIO.
    pub panics: u64,
    /// Checkpoints that the process that serves made on the image's disk.
    pub syncs: u64,
    /// Those of them that were made because a write found no room beside what is held for the last
    /// one.
    pub syncs_for_room: u64,
    /// Since the device started.
    pub uptime_seconds: f64,
}

/// Requests by window.
#[derive(Clone, Debug, Serialize)]
pub struct RequestsReport {
    /// Reads of the base window.
    pub base: TrafficReport,
    /// Reads of views.
    pub views: TrafficReport,
    /// Requests for the base window by size: pages filled, alone or with what was read ahead.
    pub base_fills: Vec<FillsReport>,
    /// Those for the views window.
    pub view_fills: Vec<FillsReport>,
    /// Reads of the directory.
    pub directory_reads: u64,
    /// Stores into the views window, which have no effect.
    pub refused_view_stores: u64,
    /// Their bytes.
    pub refused_view_bytes: u64,
    /// Reads that met damaged stored bytes.
    pub damaged_reads: u64,
    /// Blocks that are poisoned now.
    pub poisoned_blocks: u64,
    /// Poisonings of blocks so far.
    pub poison_events: u64,
}

/// What reads moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TrafficReport {
    /// Requests.
    pub reads: u64,
    /// Bytes given to the host.
    pub bytes: u64,
    /// Blocks looked at.
    pub blocks: u64,
    /// Planes selected in blocks that hold data (0 for words blocks).
    pub planes_fetched: u64,
    /// Stored bytes fetched, whole granules.
    pub stored_bytes_fetched: u64,
    /// Bytes a plain device would have fetched.
    pub plain_bytes_fetched: u64,
    /// Bytes a generically compressing device would have fetched; null if that was not measured.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Bytes of index entries fetched besides, 64 each: what the modelled cache did not hold.
    pub index_bytes_fetched: u64,
    /// Those that a generically compressing device would have fetched; null if that was not
    /// measured.
    pub gcomp_index_bytes_fetched: Option<u64>,
    /// Blocks that the buffer of an open KV window answered. Nothing of these is fetched, by any of
    /// the three.
    pub staged_blocks: u64,
    /// Bytes of the lines of 64 bytes that they gave.
    pub staged_bytes: u64,
    /// `stored_bytes_fetched / plain_bytes_fetched`; null while a plain device would have fetched
    /// nothing.
    pub of_plain: Option<f64>,
    /// The same with `index_bytes_fetched`.
    pub of_plain_with_index: Option<f64>,
}

/// Requests of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FillsReport {
    /// The longest of them, in bytes; each is longer than the size before. Null for what is longer
    /// than all sizes.
    pub up_to_bytes: Option<u64>,
    /// How many there were.
    pub fills: u64,
}

/// What the device moved for its own sake, which no request is charged for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MaintenanceReport {
    /// Blocks coded anew because a tensor was made over them or removed.
    pub recoded_blocks: u64,
    /// Stored bytes fetched for that.
    pub stored_bytes_fetched: u64,
    /// Index entries fetched for that, in bytes.
    pub index_bytes_fetched: u64,
    /// Bytes stored for them, whole granules.
    pub stored_bytes_written: u64,
    /// Blocks whose stored bytes were moved together, to free room.
    pub moved_blocks: u64,
    /// Those bytes, each fetched and stored once.
    pub moved_bytes: u64,
}

/// What writes did.
#[derive(Clone, Debug, Serialize)]
pub struct WritesReport {
    /// Write requests: write-backs of dirty pages and direct writes.
    pub base_writes: u64,
    /// Their bytes.
    pub base_written_bytes: u64,
    /// Blocks coded: those that were stored into, and the others of their KV windows.
    pub blocks_written: u64,
    /// Of these, blocks of zeros.
    pub zero_blocks_written: u64,
    /// Of these, blocks that no codec made smaller.
    pub bypass_blocks_written: u64,
    /// Bytes stored for them, whole granules.
    pub stored_bytes_written: u64,
    /// Bytes a generically compressing device would have stored, for blocks that were stored into;
    /// null if that was not measured.
    pub gcomp_bytes_written: Option<u64>,
    /// Blocks discarded.
    pub discarded_blocks: u64,
}

/// Write-backs of the mount's pages for which there is no room: back-pressure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WriteBacksReport {
    /// Those that wait now.
    pub waiting: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Those that had to wait, whatever became of them.
    pub waited: u64,
    /// Those that were refused in the end: stores that are lost.
    pub refused: u64,
    /// Their bytes.
    pub refused_bytes: u64,
}

/// The plane index and the modelled cache of it.
#[derive(Clone, Debug, Serialize)]
pub struct IndexReport {
    /// Entries of the modelled on-chip cache (direct-mapped).
    pub cache_entries: u64,
    /// Entries looked for, by reads, writes and maintenance, that were in it.
    pub hits: u64,
    /// Those that were not: one more read of 64 bytes each.
    pub misses: u64,
    /// Bytes of these reads.
    pub bytes_fetched: u64,
    /// Bytes of entries that changed, 64 each.
    pub bytes_written: u64,
    /// The same of a generically compressing device, whose index is taken to have as large entries
    /// and as large a cache; null if that was not measured.
    pub gcomp_hits: Option<u64>,
    /// Its misses.
    pub gcomp_misses: Option<u64>,
    /// Bytes of these.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Bytes of its entries that changed.
    pub gcomp_bytes_written: Option<u64>,
}

/// Windows of KV tensors: what is staged and decoded now, and what was done.
#[derive(Clone, Debug, Serialize)]
pub struct WindowsReport {
    /// What there is now.
    #[serde(flatten)]
    pub now: WindowsNow,
    /// Windows opened for writing.
    pub opened: u64,
    /// Windows closed because another had to be opened, which a writer waited for: back-pressure.
    pub back_pressure: u64,
    /// Windows coded block by block in address order.
    pub coded_plain: u64,
    /// Windows coded channel by channel.
    pub coded_channels: u64,
    /// Windows coded channel by channel with exponents as differences.
    pub coded_deltas: u64,
    /// Rows that they left out because they repeat.
    pub repeated_rows: u64,
    /// Windows decoded for reads.
    pub decoded: u64,
    /// Reads of a block that found its window decoded, and fetched nothing.
    pub reused: u64,
}

/// What windows take of the device's memory besides the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WindowsNow {
    /// Windows open for writing.
    pub open: u64,
    /// Most that may be.
    pub most_open: u64,
    /// Bytes staged in them: the paper's `S_buf` of each, and what rounds it up to blocks.
    pub staged_bytes: u64,
    /// Bytes kept decoded for the next read.
    pub decoded_bytes: u64,
}

/// Blocks that hold data now.
#[derive(Clone, Debug, Serialize)]
pub struct BlocksReport {
    /// All of them.
    pub live: u64,
    /// Those outside tensors.
    pub opaque: u64,
    /// Those that no codec made smaller.
    pub bypass: u64,
    /// Exact bytes of the heads of blocks of KV windows.
    pub heads_bytes: u64,
    /// Exact bytes of word-major blocks stored raw.
    pub words_raw_bytes: u64,
    /// Exact bytes of word-major blocks stored as LZ4.
    pub words_lz4_bytes: u64,
    /// Exact bytes of word-major blocks stored as ZSTD.
    pub words_zstd_bytes: u64,
}

/// One plane of one format, over all blocks.
#[derive(Clone, Debug, Serialize)]
pub struct PlaneReport {
    /// The format.
    pub format: Format,
    /// The plane: bit of the element.
    pub plane: u32,
    /// Blocks in which it is constant and stores nothing.
    pub constant: u64,
    /// Exact bytes stored raw.
    pub raw_bytes: u64,
    /// Exact bytes stored as LZ4.
    pub lz4_bytes: u64,
    /// Exact bytes stored as ZSTD.
    pub zstd_bytes: u64,
    /// Exact bytes of plane trees, all counted with the highest plane that they hold.
    pub tree_bytes: u64,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// Its layout.
    pub layout: Layout,
    /// Its codec.
    pub codec: Codec,
    /// What `gcomp` compresses its blocks by; null if that was not measured.
    pub gcomp_codec: Option<&'static str>,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its elements.
    pub elements: u64,
    /// Its place in the base window.
    pub dpa: u64,
    /// Its length.
    pub logical_bytes: u64,
    /// What its blocks are charged.
    pub stored_bytes: u64,
    /// `logical_bytes / stored_bytes`; null while nothing is stored.
    pub ratio: Option<f64>,
    /// Reads through the base window.
    pub base: TrafficReport,
}

/// One view.
#[derive(Clone, Debug, Serialize)]
pub struct ViewReport {
    /// The view and its place.
    #[serde(flatten)]
    pub info: ViewInfo,
    /// Reads of it.
    #[serde(flatten)]
    pub traffic: TrafficReport,
}

impl Traffic {
    pub(crate) fn report(&self, gcomp: bool) -> TrafficReport {
        let (stored, plain) = (self.stored.get(), self.plain.get());
        let index = entries_bytes(&self.index_misses);
        TrafficReport {
            reads: self.reads.get(),
            bytes: self.bytes.get(),
            blocks: self.blocks.get(),
            planes_fetched: self.planes.get(),
            stored_bytes_fetched: stored,
            plain_bytes_fetched: plain,
            gcomp_bytes_fetched: gcomp.then(|| self.gcomp.get()),
            index_bytes_fetched: index,
            gcomp_index_bytes_fetched: gcomp.then(|| entries_bytes(&self.gcomp_index_misses)),
            staged_blocks: self.staged_blocks.get(),
            staged_bytes: self.staged.get(),
            of_plain: ratio(stored, plain),
            of_plain_with_index: ratio(stored + index, plain),
        }
    }
}

impl Fills {
    fn report(&self) -> Vec<FillsReport> {
        let sizes = Self::BOUNDS.into_iter().map(Some).chain([None]);
        sizes.zip(self.counts()).map(|(up_to_bytes, fills)| FillsReport { up_to_bytes, fills }).collect()
    }
}

/// Bytes of so many index entries.
fn entries_bytes(entries: &Counter) -> u64 {
    entries.get() * ENTRY_BYTES as u64
}

/// What a report needs besides the counters.
pub(crate) struct Subject<'a> {
    pub(crate) mode: Mode,
    pub(crate) codec: Codec,
    pub(crate) base_bytes: u64,
    pub(crate) views_bytes: u64,
    pub(crate) store_capacity: u64,
    /// What is left, and the reserve.
    pub(crate) host_memory: (Option<u64>, u64),
    pub(crate) worker_deaths: u64,
    /// All, and those for lack of room.
    pub(crate) syncs: (u64, u64),
    pub(crate) uptime_seconds: f64,
    pub(crate) observed: bool,
    pub(crate) map: &'a Map,
    pub(crate) division: &'a Division,
    pub(crate) interleave: Option<InterleaveReport>,
    pub(crate) index_cache_entries: usize,
    pub(crate) windows: WindowsNow,
    /// Poisoned blocks, and poisonings.
    pub(crate) poison: (u64, u64),
}

impl Stats {
    pub(crate) fn report(&self, subject: &Subject<'_>) -> StatsReport {
        let gcomp = subject.observed;
        let block = BLOCK_BYTES as u64;
        let tensor_bytes: u64 = subject.map.tensors().map(|tensor| tensor.info.length).sum();
        let tensor_blocks: u64 = subject.map.tensors().map(|tensor| tensor.info.length.div_ceil(block)).sum();
        let opaque = self.opaque_blocks.get();
        let (stored_bytes, index_bytes) = match subject.mode {
            Mode::Plain => ((tensor_blocks + opaque) * block, 0),
            Mode::GComp | Mode::Trace => (
                self.opaque_stored.get() + subject.map.tensors().map(|t| t.stored.get()).sum::<u64>(),
                (tensor_blocks + opaque) * ENTRY_BYTES as u64,
            ),
        };
        let logical_bytes = tensor_bytes + opaque * block;
        let written_bytes = self.live_blocks.get() * block;
        StatsReport {
            device: DeviceReport {
                mode: subject.mode,
                codec: subject.codec,
                gcomp_codec: gcomp.then(|| subject.codec.generic_name()),
                capacity_bytes: subject.base_bytes,
                views_capacity_bytes: subject.views_bytes,
                logical_bytes,
                written_bytes,
                stored_bytes,
                index_bytes,
                // A plain device keeps room for what is only declared, which is no matter of how it
                // codes.
                ratio: match subject.mode {
                    Mode::Plain => ratio(stored_bytes, stored_bytes),
                    Mode::GComp | Mode::Trace => ratio(written_bytes, stored_bytes),
                },
                store_capacity_bytes: subject.store_capacity,
                host_memory_left_bytes: subject.host_memory.0,
                memory_reserve_bytes: subject.host_memory.1,
                worker_deaths: subject.worker_deaths,
                panics: self.panics.get(),
                syncs: subject.syncs.0,
                syncs_for_room: subject.syncs.1,
                uptime_seconds: subject.uptime_seconds,
            },
            requests: RequestsReport {
                base: self.base.report(gcomp),
                views: self.views.report(gcomp),
                base_fills: self.base_fills.report(),
                view_fills: self.view_fills.report(),
                directory_reads: self.directory_reads.get(),
                refused_view_stores: self.refused_view_stores.get(),
                refused_view_bytes: self.refused_view_bytes.get(),
                damaged_reads: self.damaged_reads.get(),
                poisoned_blocks: subject.poison.0,
                poison_events: subject.poison.1,
            },
            reads_for_writes: self.for_writes.report(gcomp),
            maintenance: MaintenanceReport {
                recoded_blocks: self.recoded_blocks.get(),
                stored_bytes_fetched: self.for_maintenance.stored.get(),
                index_bytes_fetched: entries_bytes(&self.for_maintenance.index_misses),
                stored_bytes_written: self.recoded_bytes.get(),
                moved_blocks: self.moved_blocks.get(),
                moved_bytes: self.moved_bytes.get(),
            },
            writes: WritesReport {
                base_writes: self.base_writes.get(),
                base_written_bytes: self.base_written_bytes.get(),
                blocks_written: self.blocks_written.get(),
                zero_blocks_written: self.zero_blocks_written.get(),
                bypass_blocks_written: self.bypass_blocks_written.get(),
                stored_bytes_written: self.stored_bytes_written.get(),
                gcomp_bytes_written: gcomp.then(|| self.gcomp_bytes_written.get()),
                discarded_blocks: self.discarded_blocks.get(),
            },
            write_backs: WriteBacksReport {
                waiting: self.write_backs_waiting.get(),
                waiting_bytes: self.write_backs_waiting_bytes.get(),
                waited: self.write_backs_waited.get(),
                refused: self.write_backs_refused.get(),
                refused_bytes: self.write_backs_refused_bytes.get(),
            },
            index: IndexReport {
                cache_entries: subject.index_cache_entries as u64,
                hits: self.index_hits.get(),
                misses: self.index_misses.get(),
                bytes_fetched: entries_bytes(&self.index_misses),
                bytes_written: entries_bytes(&self.index_written),
                gcomp_hits: gcomp.then(|| self.gcomp_index_hits.get()),
                gcomp_misses: gcomp.then(|| self.gcomp_index_misses.get()),
                gcomp_bytes_fetched: gcomp.then(|| entries_bytes(&self.gcomp_index_misses)),
                gcomp_bytes_written: gcomp.then(|| entries_bytes(&self.gcomp_index_written)),
            },
            windows: WindowsReport {
                now: subject.windows,
                opened: self.windows_opened.get(),
                back_pressure: self.windows_forced.get(),
                coded_plain: self.windows_coded[Coding::Plain as usize].get(),
                coded_channels: self.windows_coded[Coding::Channels as usize].get(),
                coded_deltas: self.windows_coded[Coding::Deltas as usize].get(),
                repeated_rows: self.repeated_rows.get(),
                decoded: self.windows_decoded.get(),
                reused: self.windows_reused.get(),
            },
            blocks: BlocksReport {
                live: self.live_blocks.get(),
                opaque,
                bypass: self.bypass_blocks.get(),
                heads_bytes: self.heads.get(),
                words_raw_bytes: self.words[0].get(),
                words_lz4_bytes: self.words[1 + Codec::Lz4 as usize].get(),
                words_zstd_bytes: self.words[1 + Codec::Zstd as usize].get(),
            },
            planes: self.plane_reports(),
            tensors: subject
                .map
                .listed()
                .map(|tensor| {
                    let info = &tensor.info;
                    let stored_bytes = match subject.mode {
                        Mode::Plain => info.length.next_multiple_of(block),
                        Mode::GComp | Mode::Trace => tensor.stored.get(),
                    };
                    TensorReport {
                        name: info.name.clone(),
                        format: info.format,
                        layout: info.layout,
                        codec: info.codec,
                        gcomp_codec: gcomp.then(|| info.codec.generic_name()),
                        shape: info.shape.clone(),
                        elements: info.elements,
                        dpa: info.dpa,
                        logical_bytes: info.length,
                        stored_bytes,
                        ratio: ratio(info.length, stored_bytes),
                        base: tensor.traffic.report(gcomp),
                    }
                })
                .collect(),
            views: subject
                .map
                .aliases()
                .map(|alias| ViewReport { info: alias.info.clone(), traffic: alias.traffic.report(gcomp) })
                .collect(),
            partitions: subject
                .division
                .parts
                .iter()
                .filter(|_| subject.division.divided)
                .map(|part| part.report(gcomp))
                .collect(),
            interleave: subject.interleave.clone(),
        }
    }

    fn plane_reports(&self) -> Vec<PlaneReport> {
        let all = Format::ALL
            .into_iter()
            .flat_map(|format| (0..MAX_PLANES).rev().map(move |plane| (format, plane)));
        all.filter_map(|(format, plane)| {
            let slot = slot(format, plane);
            let [raw, lz4, zstd, tree] = self.planes[slot].each_ref().map(super::Gauge::get);
            let constant = self.constant[slot].get();
            (constant + raw + lz4 + zstd + tree > 0).then(|| PlaneReport {
                format,
                plane: u32::try_from(plane).expect("at most 31"),
                constant,
                raw_bytes: raw,
                lz4_bytes: lz4,
                zstd_bytes: zstd,
                tree_bytes: tree,
            })
        })
        .collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at; exact to 2^53 bytes")]
fn ratio(logical: u64, stored: u64) -> Option<f64> {
    (stored > 0).then(|| logical as f64 / stored as f64)
}
