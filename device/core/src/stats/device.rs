//! What is counted of a whole device.

use lamina_codec::{BLOCK_BYTES, Codec, kv::Coding};
use lamina_store::mode::Mode;

use super::{
    Fills, FillsReport, Held, InterleaveReport, Latency, ModelledReport, Tally, Traffic, TrafficReport,
};
use crate::{
    counters,
    counters::{
        Compared, Counter,
        Slot::{First, Later},
        entries_bytes, ratio,
    },
    partition_table::PartitionTable,
    window::Map,
};

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
    /// All, and those for lack of space.
    pub(crate) syncs: (u64, u64),
    pub(crate) uptime_seconds: f64,
    pub(crate) compared: Compared,
    pub(crate) map: &'a Map,
    pub(crate) partition_table: &'a PartitionTable,
    pub(crate) interleave: Option<InterleaveReport>,
    pub(crate) modelled: Vec<ModelledReport>,
    pub(crate) index_cache_entries: usize,
    pub(crate) windows: WindowsNow,
    /// Poisoned blocks, and poisonings.
    pub(crate) poison: (u64, u64),
}

/// What KV windows take of the device's memory besides the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowsNow {
    pub(crate) open: u64,
    pub(crate) max_open: u64,
    pub(crate) staged_bytes: u64,
    pub(crate) decoded_bytes: u64,
}

counters! {
    /// Counters and gauges of a whole device.
    pub(crate) struct Stats for Subject<'_> {
        pub(crate) base: Traffic, at First(0), Later(0);
        pub(crate) views: Traffic, at First(7), Later(4);
        /// What stores had to read first.
        pub(crate) for_writes: Traffic, at Later(8), Later(15);
        /// What was read to code blocks anew.
        pub(crate) for_maintenance: Traffic, at Later(19), Later(26);
        /// Requests for the base window by size.
        pub(crate) base_fills: Fills, at Later(30), Later(30);
        /// Those for views.
        pub(crate) view_fills: Fills, at Later(37), Later(37);
        /// How long reads of the base window took.
        pub(crate) base_read_times: Latency;
        /// Those of the views window.
        pub(crate) view_read_times: Latency;
        /// How long stores took.
        pub(crate) base_write_times: Latency;
        /// Index entries that changed.
        pub(crate) index_written: Counter, at Later(44), Later(44);
        /// Those that a generically compressing device would have changed.
        pub(crate) gcomp_index_written: Counter, at Later(47), Later(47);
        /// Bytes that blocks outside tensors are charged.
        pub(crate) opaque_stored: crate::counters::Gauge;
        /// What stored blocks hold.
        pub(super) held: Held;
    }

    /// The device: sizes in bytes.
    pub struct DeviceReport by device {
        reported {
            /// Its mode.
            mode: Mode = |_, given| given.mode;
            /// The codec of tensors that name none.
            codec: Codec = |_, given| given.codec;
            /// What `gcomp` compresses blocks by that no tensor covers; null if that was not
            /// measured.
            gcomp_codec: Option<&'static str> =
                |_, given| given.compared.0.then(|| given.codec.generic_name());
        }
        counted {
            /// Panics of workers: each was the end of one, or of a request that was answered with
            /// EIO.
            panics: Counter at First(36) => panics "panics" Count;
        }
        computed {
            /// Bytes of a window: base.
            capacity_bytes: u64 = Gauge "window" {window = "base"} Bytes, |_, given| given.base_bytes;
            /// Bytes of the views window.
            views_capacity_bytes: u64 = Gauge "window" {window = "views"} Bytes,
                |_, given| given.views_bytes;
            /// Bytes of tensors, and of blocks outside them that hold data.
            logical_bytes: u64 = Gauge "logical" Bytes,
                |it, given| given.tensor_bytes() + it.opaque_blocks.get() * BLOCK_BYTES as u64;
            /// Bytes of blocks of either that hold data: what was written, not all of it zeros, and
            /// neither discarded nor only declared.
            written_bytes: u64 = Gauge "data" Bytes, |it, _| it.written_bytes();
            /// What these are charged in the store, the index not counted.
            stored_bytes: u64 = Gauge "stored" Bytes, |it, given| it.stored_bytes(given);
            /// Bytes of their index entries.
            index_bytes: u64 = Gauge "index" Bytes, |it, given| match given.mode {
                Mode::Plain => 0,
                Mode::GComp | Mode::Trace => it.blocks(given) * lamina_store::entry::ENTRY_BYTES as u64,
            };
            /// Bytes written over bytes stored: null while nothing is stored, 1 of a plain device.
            ratio: Option<f64> = Gauge "ratio" Ratio, |it, given| {
                let stored = it.stored_bytes(given);
                // A plain device has space for what is only declared, whatever its coding.
                let written = if given.mode == Mode::Plain { stored } else { it.written_bytes() };
                ratio(written, stored)
            };
            /// Bytes that the store can hold, its reserve included.
            store_capacity_bytes: u64 = Gauge "store_capacity" Bytes, |_, given| given.store_capacity;
            /// Bytes left of the host's memory, or of what a control group allows; null if the
            /// device does not look.
            host_memory_left_bytes: Option<u64> = Gauge "host_memory_left" Bytes,
                |_, given| given.host_memory.0;
            /// Bytes of these that a store in memory leaves free: below it, writes find no space; 0
            /// if nothing is.
            memory_reserve_bytes: u64 = Gauge "memory_reserve" Bytes, |_, given| given.host_memory.1;
            /// Worker processes that died and were replaced while this device ran.
            worker_deaths: u64 = Counter "worker_deaths" Count, |_, given| given.worker_deaths;
            /// Checkpoints that this worker process made on the image's disk.
            syncs: u64 = Counter "syncs" Count, |_, given| given.syncs.0;
            /// Checkpoints made because a write found no space beside what is held for the last
            /// one.
            syncs_for_room: u64 = Counter "syncs_for_room" Count, |_, given| given.syncs.1;
            /// Seconds since the worker began.
            uptime_seconds: f64 = Gauge "uptime" Seconds, |_, given| given.uptime_seconds;
        }
    }

    /// Requests by window.
    pub struct RequestsReport by requests {
        reported {
            /// Reads of the base window.
            base: TrafficReport = |it, given| it.base.report(&given.compared);
            /// Reads of views.
            views: TrafficReport = |it, given| it.views.report(&given.compared);
            /// Requests for the base window by size: pages filled, alone or with what was read
            /// ahead.
            base_fills: Vec<FillsReport> = |it, _| it.base_fills.report();
            /// Those for the views window.
            view_fills: Vec<FillsReport> = |it, _| it.view_fills.report();
        }
        counted {
            /// Reads of the directory.
            directory_reads: Counter at First(17) => directory_reads "directory_reads" Count;
            /// Stores into the views window, which have no effect.
            refused_view_stores: Counter at First(26) => refused_view_stores "refused_view_stores" Count;
            /// Bytes of stores into the views window.
            refused_view_bytes: Counter at First(27) => refused_view_bytes "refused_view_store" Bytes;
            /// Reads that met damaged stored bytes.
            damaged_reads: Counter at First(28) => damaged_reads "damaged_reads" Count;
            /// Blocks read that are stored as differences to a base: each fetched the base's too.
            differences_read: Counter at Later(53) => differences_read "differences_read" Count;
            /// Stored bytes of bases fetched to read or code differences; those of reads are among
            /// the bytes fetched for them.
            base_bytes_fetched: Counter at Later(54) => base_bytes_fetched "base_fetched" Bytes;
        }
        computed {
            /// Blocks that are poisoned now.
            poisoned_blocks: u64 = Gauge "poisoned_blocks" Count, |_, given| given.poison.0;
            /// Poisonings of blocks so far.
            poison_events: u64 = Counter "poison_events" Count, |_, given| given.poison.1;
        }
    }

    /// What writes did.
    pub struct WritesReport by writes {
        counted {
            /// Write requests: write-backs of dirty pages and direct writes.
            base_writes: Counter at First(18) => base_writes "base_writes" Count;
            /// Bytes of write-backs and direct writes.
            base_written_bytes: Counter at First(19) => base_written_bytes "base_written" Bytes;
            /// Blocks coded: those that were stored into, and the others of their KV windows.
            blocks_written: Counter at First(20) => blocks_written "written_blocks" Count;
            /// Blocks of zeros among the blocks coded.
            zero_blocks_written: Counter at First(21) => zero_blocks_written "written_zero_blocks" Count;
            /// Blocks among the blocks coded that no codec made smaller.
            bypass_blocks_written: Counter at First(22) =>
                bypass_blocks_written "written_bypass_blocks" Count;
            /// Bytes stored for the blocks coded, in whole granules.
            stored_bytes_written: Counter at First(23) => stored_bytes_written "stored_written" Bytes;
            /// Blocks discarded.
            discarded_blocks: Counter at First(25) => discarded_blocks "discarded_blocks" Count;
        }
        compared {
            /// Bytes a generically compressing device would have stored, for blocks that were
            /// stored into.
            gcomp_bytes_written: Counter at First(24) => gcomp_bytes_written "gcomp_written" Bytes;
        }
    }

    /// What the device moved for its own sake, which no request is charged for.
    #[derive(Copy)]
    pub struct MaintenanceReport by maintenance {
        counted {
            /// Blocks coded anew because a tensor was made over them or removed.
            recoded_blocks: Counter at Later(48) => recoded_blocks "recoded_blocks" Count;
            /// Bytes stored for blocks coded anew, in whole granules.
            recoded_bytes: Counter at Later(49) => stored_bytes_written "recoding_stored" Bytes;
            /// Blocks whose stored bytes were moved together, to free space.
            moved_blocks: Counter at Later(50) => moved_blocks "moved_blocks" Count;
            /// Bytes moved together, each fetched and stored once.
            moved_bytes: Counter at Later(51) => moved_bytes "moved" Bytes;
        }
        computed {
            /// Stored bytes fetched for blocks coded anew.
            stored_bytes_fetched: u64 = Counter "recoding_fetched" Bytes,
                |it, _| it.for_maintenance.stored.get();
            /// Bytes of index entries fetched for blocks coded anew.
            index_bytes_fetched: Option<u64> = Counter "recoding_index_fetched" Bytes,
                |it, given| given.compared.some(entries_bytes(&it.for_maintenance.index_misses));
        }
    }

    /// Write-backs of the mount's pages for which there is no space: back-pressure.
    #[derive(Copy)]
    pub struct WriteBacksReport by write_backs {
        counted {
            /// Write-backs that wait for space.
            write_backs_waiting: Gauge => waiting "write_backs_waiting" Count;
            /// Bytes of write-backs that wait for space.
            write_backs_waiting_bytes: Gauge => waiting_bytes "write_backs_waiting" Bytes;
            /// Write-backs that had to wait for space, whatever became of them.
            write_backs_waited: Counter at First(37) => waited "write_backs_waited" Count;
            /// Write-backs that were refused in the end: stores that are lost.
            write_backs_refused: Counter at First(38) => refused "write_backs_refused" Count;
            /// Bytes of write-backs that were refused.
            write_backs_refused_bytes: Counter at First(39) =>
                refused_bytes "write_backs_refused" Bytes;
        }
    }

    /// The plane index and the modelled cache of it.
    #[derive(Copy)]
    pub struct IndexReport by index {
        compared {
            /// Index entries looked for, by reads, writes and maintenance, that the modelled cache
            /// held.
            index_hits: Counter at First(29) => hits "index_cache_hits" Count;
            /// Index entries that it did not hold: one more read of 64 bytes each.
            index_misses: Counter at First(30) => misses "index_cache_misses" Count;
            /// Hits of a generically compressing device, with as large entries and as large a
            /// cache.
            gcomp_index_hits: Counter at Later(45) => gcomp_hits "gcomp_index_cache_hits" Count;
            /// Misses of a generically compressing device.
            gcomp_index_misses: Counter at Later(46) => gcomp_misses "gcomp_index_cache_misses" Count;
        }
        computed {
            /// Entries of the modelled on-chip cache (direct-mapped).
            cache_entries: Option<u64> = Gauge "index_cache_entries" Count,
                |_, given| given.compared.some(given.index_cache_entries as u64);
            /// Bytes of index entries fetched.
            bytes_fetched: Option<u64> = Counter "index_fetched" Bytes,
                |it, given| given.compared.some(entries_bytes(&it.index_misses));
            /// Bytes of index entries that changed, 64 each.
            bytes_written: u64 = Counter "index_written" Bytes, |it, _| entries_bytes(&it.index_written);
            /// Bytes of index entries that a generically compressing device would have fetched.
            gcomp_bytes_fetched: Option<u64> = Counter "gcomp_index_fetched" Bytes,
                |it, given| given.compared.some(entries_bytes(&it.gcomp_index_misses));
            /// Bytes of its index entries that would have changed.
            gcomp_bytes_written: Option<u64> = Counter "gcomp_index_written" Bytes,
                |it, given| given.compared.some(entries_bytes(&it.gcomp_index_written));
        }
    }

    /// KV windows: what is staged and decoded now, and what was done.
    #[derive(Copy)]
    pub struct KvWindowsReport by kv_windows {
        counted {
            /// KV windows opened for writing.
            windows_opened: Counter at First(31) => opened "windows_opened" Count;
            /// KV windows closed because another had to be opened, which a writer waited for.
            windows_forced: Counter at First(32) => back_pressure "windows_back_pressure" Count;
            /// KV windows coded block by block in address order.
            windows_coded_plain: Counter at First(14) => coded_plain "windows_coded_plain" Count;
            /// KV windows coded channel by channel.
            windows_coded_channels: Counter at First(15) => coded_channels "windows_coded_channels" Count;
            /// KV windows coded channel by channel with exponents as differences.
            windows_coded_deltas: Counter at First(16) => coded_deltas "windows_coded_deltas" Count;
            /// KV windows packed with loss, of tensors that are lossy.
            windows_packed: Counter at Later(52) => packed "windows_packed" Count;
            /// Rows that KV windows left out because they repeat.
            repeated_rows: Counter at First(33) => repeated_rows "windows_repeated_rows" Count;
            /// KV windows decoded for reads.
            windows_decoded: Counter at First(34) => decoded "windows_decoded" Count;
            /// Reads of a block that found its KV window decoded, and fetched nothing.
            windows_reused: Counter at First(35) => reused "windows_reused" Count;
        }
        computed {
            /// KV windows open for writing.
            open: u64 = Gauge "open_windows" Count, |_, given| given.windows.open;
            /// KV windows that may be open for writing.
            max_open: u64 = Gauge "most_open_windows" Count, |_, given| given.windows.max_open;
            /// Bytes staged in open KV windows: the paper's `S_buf` of each, and what rounds it up
            /// to blocks.
            staged_bytes: u64 = Gauge "windows_staged" Bytes, |_, given| given.windows.staged_bytes;
            /// Bytes held decoded for the next read.
            decoded_bytes: u64 = Gauge "windows_decoded_kept" Bytes, |_, given| given.windows.decoded_bytes;
        }
    }

    /// Blocks that hold data now.
    pub struct BlocksReport by blocks_held {
        counted {
            /// Blocks that hold data.
            live_blocks: Gauge => live "live_blocks" Count;
            /// Blocks outside tensors that hold data.
            opaque_blocks: Gauge => opaque "opaque_blocks" Count;
        }
        computed {
            /// Blocks that no codec made smaller.
            bypass: u64 = Gauge "bypass_blocks" Count, |it, _| it.held.bypass_blocks();
            /// Exact bytes of the headers of blocks of KV windows.
            heads_bytes: u64 = Gauge "heads_stored" Bytes, |it, _| it.held.heads();
            /// Exact bytes of word-major blocks: stored raw.
            words_raw_bytes: u64 = Gauge "words_stored" {codec = "raw"} Bytes, |it, _| it.held.words(None);
            /// Exact bytes of word-major blocks stored as LZ4.
            words_lz4_bytes: u64 = Gauge "words_stored" {codec = "lz4"} Bytes,
                |it, _| it.held.words(Some(Codec::Lz4));
            /// Exact bytes of word-major blocks stored as ZSTD.
            words_zstd_bytes: u64 = Gauge "words_stored" {codec = "zstd"} Bytes,
                |it, _| it.held.words(Some(Codec::Zstd));
        }
    }
}

impl Subject<'_> {
    pub(crate) fn compared(&self) -> Compared {
        self.compared
    }

    fn tensor_bytes(&self) -> u64 {
        self.map.tensors().map(|tensor| tensor.info.length).sum()
    }
}

impl Stats {
    fn written_bytes(&self) -> u64 {
        self.live_blocks.get() * BLOCK_BYTES as u64
    }

    /// Blocks of tensors, and those outside them that hold data.
    fn blocks(&self, given: &Subject<'_>) -> u64 {
        let tensors = given.map.tensors().map(|tensor| tensor.info.length.div_ceil(BLOCK_BYTES as u64));
        tensors.sum::<u64>() + self.opaque_blocks.get()
    }

    fn stored_bytes(&self, given: &Subject<'_>) -> u64 {
        match given.mode {
            Mode::Plain => self.blocks(given) * BLOCK_BYTES as u64,
            Mode::GComp | Mode::Trace => {
                let tensors = given.map.tensors().map(|tensor| tensor.stored.get());
                tensors.sum::<u64>() + self.opaque_stored.get()
            }
        }
    }

    /// KV windows coded so, or packed.
    pub(crate) fn windows_coded(&self, coding: Option<Coding>) -> &Counter {
        match coding {
            Some(Coding::Plain) => &self.windows_coded_plain,
            Some(Coding::Channels) => &self.windows_coded_channels,
            Some(Coding::Deltas) => &self.windows_coded_deltas,
            None => &self.windows_packed,
        }
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
