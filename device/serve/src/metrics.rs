//! The counters as OpenMetrics text, made from one snapshot of them at each scrape.
//!
//! Names begin with `lamina_`; bytes are in names that end in `_bytes`, counters in `_total`. What belongs to a window, a
//! tensor, a view or a plane is one metric with labels. A number the device was told not to measure is left out.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use lamina_device::stats::{InterleaveReport, MemberReport, PartitionReport, StatsReport, TrafficReport};

use super::control::ServedStats;
use super::host_cache::HostReport;

/// The content type of the text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// The report as OpenMetrics text, `# EOF` included.
pub(super) fn text(report: &ServedStats) -> String {
    let mut registry = Registry::with_prefix("lamina");
    registry.register_collector(Box::new(Snapshot(report.clone())));
    let mut out = String::new();
    // A `String` takes everything: an error could only come from a metric, and numbers have none.
    if let Err(why) = text::encode(&mut out, &registry) {
        tracing::error!("metrics could not be encoded: {why}");
    }
    out
}

#[derive(Debug)]
struct Snapshot(ServedStats);

/// Writes metrics one after the other.
struct Sheet<'a>(DescriptorEncoder<'a>);

impl Sheet<'_> {
    /// A metric without labels.
    fn one(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        metric: &impl EncodeMetric,
    ) -> fmt::Result {
        metric.encode(self.0.encode_descriptor(name, help, unit, metric.metric_type())?)
    }

    /// A metric of this kind, with a value for each of some labels.
    fn family<M: EncodeMetric>(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: impl IntoIterator<Item = (Labels, M)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        rows.into_iter().try_for_each(|(labels, metric)| metric.encode(family.encode_family(&labels)?))
    }

    fn counters(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let rows = rows.into_iter().map(|(labels, value)| (labels, ConstCounter::new(value)));
        self.family(MetricType::Counter, name, help, unit, rows)
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let rows = rows.into_iter().map(|(labels, value)| (labels, ConstGauge::new(value)));
        self.family(MetricType::Gauge, name, help, unit, rows)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.one(name, help, None, &ConstCounter::new(value))
    }

    fn byte_counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.one(name, help, Some(&Unit::Bytes), &ConstCounter::new(value))
    }

    fn gauge(&mut self, name: &str, help: &str, unit: Option<&Unit>, value: u64) -> fmt::Result {
        self.one(name, help, unit, &ConstGauge::new(value))
    }

    /// What reads moved, as eleven counters that share their labels.
    fn traffic(&mut self, prefix: &str, whose: &str, rows: &[(Labels, TrafficReport)]) -> fmt::Result {
        type Field = fn(&TrafficReport) -> Option<u64>;
        let bytes = Some(&Unit::Bytes);
        let fields: [(&str, &str, Option<&Unit>, Field); 11] = [
            ("reads", "Read requests", None, |traffic| Some(traffic.reads)),
            ("read", "Bytes given to the host", bytes, |traffic| Some(traffic.bytes)),
            ("read_blocks", "Blocks looked at", None, |traffic| Some(traffic.blocks)),
            ("fetched_planes", "Planes fetched", None, |traffic| Some(traffic.planes_fetched)),
            ("stored_fetched", "Stored bytes fetched", bytes, |traffic| Some(traffic.stored_bytes_fetched)),
            ("plain_fetched", "Bytes a plain device would have fetched", bytes, |traffic| {
                Some(traffic.plain_bytes_fetched)
            }),
            (
                "gcomp_fetched",
                "Bytes a generically compressing device would have fetched",
                bytes,
                |traffic| traffic.gcomp_bytes_fetched,
            ),
            ("index_fetched", "Bytes of index entries fetched besides", bytes, |traffic| {
                Some(traffic.index_bytes_fetched)
            }),
            (
                "gcomp_index_fetched",
                "Bytes of index entries a generically compressing device would have fetched besides",
                bytes,
                |traffic| traffic.gcomp_index_bytes_fetched,
            ),
            ("staged_blocks", "Blocks that the buffers of open KV windows answered", None, |traffic| {
                Some(traffic.staged_blocks)
            }),
            ("staged", "Bytes of the lines that they gave, which no device fetches", bytes, |traffic| {
                Some(traffic.staged_bytes)
            }),
        ];
        for (name, help, unit, field) in fields {
            let mut rows = rows
                .iter()
                .filter_map(|(labels, traffic)| Some((labels.clone(), field(traffic)?)))
                .peekable();
            if rows.peek().is_some() {
                self.counters(&format!("{prefix}{name}"), &format!("{help}, {whose}"), unit, rows)?;
            }
        }
        Ok(())
    }
}

impl Sheet<'_> {
    /// What is counted of each partition.
    fn partitions(&mut self, partitions: &[PartitionReport]) -> fmt::Result {
        type Window = fn(&PartitionReport) -> TrafficReport;
        if partitions.is_empty() {
            return Ok(());
        }
        let rows = |field: fn(&PartitionReport) -> u64| {
            let label = |partition: &PartitionReport| vec![("partition", partition.name.clone())];
            partitions.iter().map(|partition| (label(partition), field(partition))).collect::<Vec<_>>()
        };
        let bytes = Some(&Unit::Bytes);
        self.gauges("partition", "Bytes of a partition's base window", bytes, rows(|p| p.capacity_bytes))?;
        self.gauges("partition_stored", "What its blocks are charged", bytes, rows(|p| p.stored_bytes))?;
        let label = |partition: &PartitionReport| vec![("partition", partition.name.clone())];
        let quotas =
            partitions.iter().filter_map(|partition| Some((label(partition), partition.quota_bytes?)));
        let quotas: Vec<_> = quotas.collect();
        if !quotas.is_empty() {
            self.gauges("partition_quota", "What its blocks may be charged", bytes, quotas)?;
        }
        self.counters(
            "partition_quota_refusals",
            "Writes that its quota refused",
            None,
            rows(|p| p.quota_refusals),
        )?;
        self.counters(
            "partition_base_writes",
            "Write-backs and direct writes",
            None,
            rows(|p| p.writes.base_writes),
        )?;
        self.counters(
            "partition_base_written",
            "Bytes of write-backs and direct writes",
            bytes,
            rows(|p| p.writes.base_written_bytes),
        )?;
        let windows: [(&str, Window); 2] =
            [("base", |partition| partition.requests.base), ("views", |partition| partition.requests.views)];
        let traffic: Vec<_> = partitions
            .iter()
            .flat_map(|partition| {
                windows.map(|(window, traffic)| {
                    let mut labels = label(partition);
                    labels.push(("window", window.to_owned()));
                    (labels, traffic(partition))
                })
            })
            .collect();
        self.traffic("partition_", "of a partition", &traffic)
    }
}

impl Sheet<'_> {
    /// What is counted of each device that the region is interleaved over, and modelled of them.
    fn interleave(&mut self, told: Option<&InterleaveReport>) -> fmt::Result {
        type Field = fn(&MemberReport) -> u64;
        let Some(told) = told else { return Ok(()) };
        let label = |member: &MemberReport| vec![("device", member.device.to_string())];
        let bytes = Some(&Unit::Bytes);
        let counters: [(&str, &str, Option<&Unit>, Field); 6] = [
            ("reads", "Read requests for which a device was asked", None, |d| d.reads),
            ("plain_fetched", "Bytes it would have fetched for them if it were plain", bytes, |d| {
                d.plain_bytes_fetched
            }),
            ("stored_fetched", "Stored bytes it fetched", bytes, |d| d.stored_bytes_fetched),
            ("writes", "Write requests for which it was asked", None, |d| d.writes),
            ("written", "Bytes of those", bytes, |d| d.written_bytes),
            ("stored_written", "Bytes it stored for them", bytes, |d| d.stored_bytes_written),
        ];
        for (name, help, unit, field) in counters {
            let rows = told.devices.iter().map(|member| (label(member), field(member)));
            self.counters(&format!("interleaved_{name}"), help, unit, rows)?;
        }
        let figures = [
            ("interleave_imbalance", "Bytes moved by the busiest device over the mean", told.imbalance),
            (
                "modelled_device_gigabytes_per_second",
                "Modelled: what each device is taken to move",
                Some(told.modelled_device_gbs),
            ),
            (
                "modelled_region_gigabytes_per_second",
                "Modelled: plain bytes while the busiest device moves that",
                told.modelled_region_gbs,
            ),
        ];
        for (name, help, figure) in figures {
            let Some(figure) = figure else { continue };
            self.one(name, help, None, &ConstGauge::new(figure))?;
        }
        if told.devices.iter().any(|member| member.modelled_gbs.is_some()) {
            let help = "Modelled: what a device moves while the busiest moves all it can";
            let name = "modelled_interleaved_gigabytes_per_second";
            let rows = told.devices.iter().map(|member| {
                let figure = ConstGauge::new(member.modelled_gbs.unwrap_or(0.0));
                (label(member), figure)
            });
            self.family(MetricType::Gauge, name, help, None, rows)?;
        }
        Ok(())
    }
}

impl Sheet<'_> {
    /// What is counted of each host's cache.
    fn hosts(&mut self, hosts: &[HostReport]) -> fmt::Result {
        type Field = fn(&HostReport) -> u64;
        if hosts.is_empty() {
            return Ok(());
        }
        let rows = |field: Field| {
            hosts.iter().map(|host| (vec![("host", host.name.clone())], field(host))).collect::<Vec<_>>()
        };
        let bytes = Some(&Unit::Bytes);
        self.gauges("host_cache", "Bytes of pages that a host may hold", bytes, rows(|h| h.cache_bytes))?;
        self.gauges("host_held", "Bytes of pages that it holds", bytes, rows(|h| h.held_bytes))?;
        let counters: [(&str, &str, Field); 6] = [
            ("host_given_pages", "Pages that it was given", |h| h.pages_given),
            ("host_written_pages", "Pages that its page cache wrote back", |h| h.pages_written),
            ("host_merged_lines", "Lines of 64 bytes merged into the device", |h| h.lines_merged),
            ("host_evicted_pages", "Pages dropped to make room", |h| h.pages_evicted),
            ("host_invalidated_pages", "Pages dropped because it asked", |h| h.pages_invalidated),
            ("host_unknown_pages", "Pages written that it did not hold", |h| h.pages_unknown),
        ];
        for (name, help, field) in counters {
            self.counters(name, help, None, rows(field))?;
        }
        Ok(())
    }
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut sheet = Sheet(encoder);
        let StatsReport {
            device,
            requests,
            reads_for_writes,
            writes,
            maintenance,
            write_backs,
            index,
            windows: kv,
            blocks,
            planes,
            tensors,
            views,
            partitions,
            interleave,
        } = &self.0.device;
        let bytes = Some(&Unit::Bytes);

        let mut kind = vec![("mode", device.mode.to_string()), ("codec", device.codec.to_string())];
        kind.extend(device.gcomp_codec.map(|codec| ("gcomp_codec", codec.to_owned())));
        let info = Info::new(kind);
        sheet.one("device", "What kind of device", None, &info)?;
        let windows = [("base", device.capacity_bytes), ("views", device.views_capacity_bytes)];
        let windows = windows.map(|(window, bytes)| (vec![("window", window.to_owned())], bytes));
        sheet.gauges("window", "Bytes of a window", bytes, windows)?;
        sheet.gauge(
            "logical",
            "Tensors, and blocks outside them that hold data",
            bytes,
            device.logical_bytes,
        )?;
        sheet.gauge(
            "data",
            "Blocks that hold data: what the ratio of what is stored is of",
            bytes,
            device.written_bytes,
        )?;
        sheet.gauge(
            "stored",
            "What they are charged in the store, the index not counted",
            bytes,
            device.stored_bytes,
        )?;
        sheet.gauge("index", "Their index entries", bytes, device.index_bytes)?;
        sheet.gauge("store_capacity", "What the store can hold", bytes, device.store_capacity_bytes)?;
        if let Some(left) = device.host_memory_left_bytes {
            sheet.gauge("host_memory_left", "What is left of the host's memory", bytes, left)?;
        }
        sheet.gauge(
            "memory_reserve",
            "What of it a store in memory leaves free",
            bytes,
            device.memory_reserve_bytes,
        )?;
        let uptime = ConstGauge::new(device.uptime_seconds);
        sheet.one("uptime", "Since the device started", Some(&Unit::Seconds), &uptime)?;

        sheet.counter("worker_deaths", "Processes that served and were replaced", device.worker_deaths)?;
        sheet.counter("panics", "Panics of processes that served", device.panics)?;
        sheet.counter("syncs", "Checkpoints that this process made on the image's disk", device.syncs)?;
        sheet.counter(
            "syncs_for_room",
            "Checkpoints made because a write found no room",
            device.syncs_for_room,
        )?;

        let traffic = [("base", requests.base), ("views", requests.views)];
        let traffic = traffic.map(|(window, traffic)| (vec![("window", window.to_owned())], traffic));
        sheet.traffic("window_", "by window", &traffic)?;
        let fills = [("base", &requests.base_fills), ("views", &requests.view_fills)];
        let fills = fills.into_iter().flat_map(|(window, sizes)| {
            sizes.iter().map(move |size| {
                let up_to = size.up_to_bytes.map_or_else(|| "+Inf".to_owned(), |bytes| bytes.to_string());
                (vec![("window", window.to_owned()), ("up_to_bytes", up_to)], size.fills)
            })
        });
        let help = "Requests by size, each longer than the size before: pages filled, alone or with what was read ahead";
        sheet.counters("fills", help, None, fills)?;
        let traffic = [(vec![("window", "base".to_owned())], *reads_for_writes)];
        sheet.traffic("for_writes_", "that stores needed first", &traffic)?;
        sheet.counter("directory_reads", "Reads of the directory", requests.directory_reads)?;
        sheet.counter("refused_view_stores", "Stores into the views window", requests.refused_view_stores)?;
        sheet.byte_counter(
            "refused_view_store",
            "Bytes of stores into the views window",
            requests.refused_view_bytes,
        )?;
        sheet.counter("damaged_reads", "Reads that met damaged stored bytes", requests.damaged_reads)?;
        sheet.counter("poison_events", "Poisonings of blocks", requests.poison_events)?;
        sheet.gauge("poisoned_blocks", "Blocks that are poisoned", None, requests.poisoned_blocks)?;

        sheet.counter("base_writes", "Write-backs and direct writes", writes.base_writes)?;
        sheet.byte_counter(
            "base_written",
            "Bytes of write-backs and direct writes",
            writes.base_written_bytes,
        )?;
        sheet.counter("written_blocks", "Blocks coded", writes.blocks_written)?;
        sheet.counter("written_zero_blocks", "Blocks of zeros among them", writes.zero_blocks_written)?;
        sheet.counter(
            "written_bypass_blocks",
            "Blocks among them that no codec made smaller",
            writes.bypass_blocks_written,
        )?;
        sheet.byte_counter("stored_written", "Bytes stored for them", writes.stored_bytes_written)?;
        if let Some(written) = writes.gcomp_bytes_written {
            sheet.byte_counter(
                "gcomp_written",
                "Bytes a generically compressing device would have stored",
                written,
            )?;
        }
        sheet.counter("discarded_blocks", "Blocks discarded", writes.discarded_blocks)?;

        sheet.gauge("write_backs_waiting", "Write-backs that wait for room", None, write_backs.waiting)?;
        sheet.gauge("write_backs_waiting", "Bytes of those", bytes, write_backs.waiting_bytes)?;
        sheet.counter("write_backs_waited", "Write-backs that had to wait for room", write_backs.waited)?;
        sheet.counter(
            "write_backs_refused",
            "Write-backs that found none: stores that are lost",
            write_backs.refused,
        )?;
        sheet.byte_counter("write_backs_refused", "Bytes of those", write_backs.refused_bytes)?;

        sheet.gauge(
            "index_cache_entries",
            "Entries of the modelled index cache",
            None,
            index.cache_entries,
        )?;
        sheet.counter("index_cache_hits", "Index entries looked for that were in it", index.hits)?;
        sheet.counter("index_cache_misses", "Index entries looked for that were not", index.misses)?;
        sheet.byte_counter("index_fetched", "Bytes of those that were not", index.bytes_fetched)?;
        sheet.byte_counter("index_written", "Bytes of index entries that changed", index.bytes_written)?;
        let gcomp = [
            ("gcomp_index_cache_hits", "Hits of a generic device's index cache", None, index.gcomp_hits),
            ("gcomp_index_cache_misses", "Its misses", None, index.gcomp_misses),
            ("gcomp_index_fetched", "Bytes of these", bytes, index.gcomp_bytes_fetched),
            ("gcomp_index_written", "Bytes of its entries that changed", bytes, index.gcomp_bytes_written),
        ];
        for (name, help, unit, value) in gcomp {
            let Some(value) = value else { continue };
            sheet.one(name, help, unit, &ConstCounter::new(value))?;
        }

        sheet.counter("recoded_blocks", "Blocks coded anew for a tensor", maintenance.recoded_blocks)?;
        sheet.byte_counter(
            "recoding_fetched",
            "Stored bytes fetched for that",
            maintenance.stored_bytes_fetched,
        )?;
        sheet.byte_counter(
            "recoding_index_fetched",
            "Bytes of index entries fetched for that",
            maintenance.index_bytes_fetched,
        )?;
        sheet.byte_counter("recoding_stored", "Bytes stored for that", maintenance.stored_bytes_written)?;
        sheet.counter("moved_blocks", "Blocks moved together to free room", maintenance.moved_blocks)?;
        sheet.byte_counter("moved", "Bytes of those, each fetched and stored", maintenance.moved_bytes)?;

        sheet.gauge("open_windows", "KV windows open for writing", None, kv.now.open)?;
        sheet.gauge("most_open_windows", "Most that may be open", None, kv.now.most_open)?;
        sheet.gauge("windows_staged", "Bytes staged in open KV windows", bytes, kv.now.staged_bytes)?;
        sheet.gauge("windows_decoded_kept", "Bytes kept decoded", bytes, kv.now.decoded_bytes)?;
        sheet.counter("windows_opened", "KV windows opened for writing", kv.opened)?;
        sheet.counter(
            "windows_back_pressure",
            "KV windows closed because another had to be opened",
            kv.back_pressure,
        )?;
        sheet.counter("windows_coded_plain", "KV windows coded in address order", kv.coded_plain)?;
        sheet.counter("windows_coded_channels", "KV windows coded by channel", kv.coded_channels)?;
        sheet.counter(
            "windows_coded_deltas",
            "KV windows coded by channel, exponents as differences",
            kv.coded_deltas,
        )?;
        sheet.counter("windows_repeated_rows", "Rows that KV windows left out", kv.repeated_rows)?;
        sheet.counter("windows_decoded", "KV windows decoded for reads", kv.decoded)?;
        sheet.counter("windows_reused", "Reads that found their KV window decoded", kv.reused)?;

        sheet.gauge("live_blocks", "Blocks that hold data", None, blocks.live)?;
        sheet.gauge("opaque_blocks", "Blocks outside tensors that hold data", None, blocks.opaque)?;
        sheet.gauge("bypass_blocks", "Blocks that no codec made smaller", None, blocks.bypass)?;
        sheet.gauge("heads_stored", "Exact bytes of the heads of KV blocks", bytes, blocks.heads_bytes)?;
        let words = [
            ("raw", blocks.words_raw_bytes),
            ("lz4", blocks.words_lz4_bytes),
            ("zstd", blocks.words_zstd_bytes),
        ];
        let words = words.map(|(codec, bytes)| (vec![("codec", codec.to_owned())], bytes));
        sheet.gauges("words_stored", "Exact bytes of word-major blocks", bytes, words)?;
        if !planes.is_empty() {
            let label = |plane: &lamina_device::stats::PlaneReport| {
                vec![("format", plane.format.to_string()), ("plane", plane.plane.to_string())]
            };
            let stored = planes.iter().flat_map(|plane| {
                [
                    ("raw", plane.raw_bytes),
                    ("lz4", plane.lz4_bytes),
                    ("zstd", plane.zstd_bytes),
                    ("tree", plane.tree_bytes),
                ]
                .map(|(codec, bytes)| {
                    let mut labels = label(plane);
                    labels.push(("codec", codec.to_owned()));
                    (labels, bytes)
                })
            });
            sheet.gauges("plane_stored", "Exact bytes of a plane over all blocks", bytes, stored)?;
            let constant = planes.iter().map(|plane| (label(plane), plane.constant));
            sheet.gauges("plane_constant_blocks", "Blocks in which a plane is constant", None, constant)?;
        }
        if !tensors.is_empty() {
            let label = |tensor: &lamina_device::stats::TensorReport| {
                vec![("tensor", tensor.name.clone()), ("format", tensor.format.to_string())]
            };
            let logical = tensors.iter().map(|tensor| (label(tensor), tensor.logical_bytes));
            sheet.gauges("tensor_logical", "Bytes of a tensor", bytes, logical)?;
            let stored = tensors.iter().map(|tensor| (label(tensor), tensor.stored_bytes));
            sheet.gauges("tensor_stored", "What a tensor's blocks are charged", bytes, stored)?;
            let traffic: Vec<_> =
                tensors.iter().map(|tensor| (vec![("tensor", tensor.name.clone())], tensor.base)).collect();
            sheet.traffic("tensor_", "of a tensor through the base window", &traffic)?;
        }
        let label = |view: &lamina_device::window::ViewInfo| {
            vec![("tensor", view.tensor.clone()), ("view", view.view.clone())]
        };
        let traffic: Vec<_> = views.iter().map(|view| (label(&view.info), view.traffic)).collect();
        sheet.traffic("view_", "of a view", &traffic)?;
        sheet.partitions(partitions)?;
        sheet.interleave(interleave.as_ref())?;
        sheet.hosts(&self.0.hosts)
    }
}
