//! The statistics as they are reported: one snapshot, from which JSON, OpenMetrics and the page are
//! made.

use serde::Serialize;

use super::{
    BlocksReport, DeviceReport, IndexReport, InterleaveReport, KvWindowsReport, LatencyReport,
    MaintenanceReport, ModelledReport, PartitionReport, PlaneReport, RequestsReport, Stats, TrafficReport,
    WriteBacksReport, WritesReport, device::Subject,
};
use crate::{counters::ratio, figures, layout::Layout, tensor::Tensor, window::ViewInfo};
use lamina_codec::{BLOCK_BYTES, Codec, format::Format};
use lamina_store::mode::Mode;

/// Everything a device reports of itself.
#[derive(Clone, Debug, Serialize)]
pub struct StatsReport {
    /// The device.
    pub device: DeviceReport,
    /// Requests by window.
    pub requests: RequestsReport,
    /// How long requests took, by window.
    pub latency: Vec<LatencyReport>,
    /// What stores had to read first: those of parts of blocks (their `bytes`), and index entries
    /// for all.
    pub reads_for_writes: TrafficReport,
    /// What writes did.
    pub writes: WritesReport,
    /// What the device did for its own sake.
    pub maintenance: MaintenanceReport,
    /// Write-backs for which there is no space.
    pub write_backs: WriteBacksReport,
    /// The plane index and the modelled cache of it.
    pub index: IndexReport,
    /// Windows of KV tensors.
    pub kv_windows: KvWindowsReport,
    /// The same by the names it had before.
    pub windows: FormerWindows,
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
    /// What hardware would have done, modelled; empty if nobody models it.
    pub modelled: Vec<ModelledReport>,
}

/// Names of the version before, which scripts hold; the next version is without them.
#[derive(Clone, Debug, Serialize)]
pub struct FormerWindows {
    #[serde(flatten)]
    now: KvWindowsReport,
    most_open: u64,
}

figures! {
    /// One tensor.
    pub struct TensorReport {
        reported {
            /// Its name.
            name: String;
            /// Its format.
            format: Format;
            /// Its layout.
            layout: Layout;
            /// Its codec.
            codec: Codec;
            /// What `gcomp` compresses its blocks by; null if that was not measured.
            gcomp_codec: Option<&'static str>;
            /// Its shape.
            shape: Vec<u64>;
            /// Its elements.
            elements: u64;
            /// Its place in the base window.
            dpa: u64;
            /// The tensor that its blocks may be stored as differences to.
            base_tensor: Option<String>;
            /// Reads through the base window.
            base: TrafficReport;
        }
        figures {
            /// Bytes of a tensor.
            logical_bytes: u64 = Gauge "logical" Bytes;
            /// Bytes of its blocks that hold data: what was written, not all of it zeros.
            written_bytes: u64 = Gauge "data" Bytes;
            /// Bytes that its blocks are charged in the store.
            stored_bytes: u64 = Gauge "stored" Bytes;
            /// Logical bytes over stored bytes; null while nothing is stored.
            ratio: Option<f64> = Gauge "ratio" Ratio;
        }
    }
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

impl TensorReport {
    fn new(tensor: &Tensor, given: &Subject<'_>) -> Self {
        let info = &tensor.info;
        let stored_bytes = match given.mode {
            Mode::Plain => info.length.next_multiple_of(BLOCK_BYTES as u64),
            Mode::GComp | Mode::Trace => tensor.stored.get(),
        };
        Self {
            name: info.name.clone(),
            format: info.format,
            layout: info.layout,
            codec: info.codec,
            gcomp_codec: given.compared.0.then(|| info.codec.generic_name()),
            shape: info.shape.clone(),
            elements: info.elements,
            dpa: info.dpa,
            base_tensor: tensor.base_name(),
            base: tensor.traffic.report(&given.compared),
            logical_bytes: info.length,
            written_bytes: tensor.live.get() * BLOCK_BYTES as u64,
            stored_bytes,
            ratio: ratio(info.length, stored_bytes),
        }
    }
}

impl Stats {
    pub(crate) fn report(&self, given: &Subject<'_>) -> StatsReport {
        let compared = &given.compared;
        let kv_windows = self.kv_windows(given);
        let tensors = given.map.listed();
        let views = given
            .map
            .aliases()
            .map(|alias| ViewReport { info: alias.info.clone(), traffic: alias.traffic.report(compared) });
        let partitions = given.partition_table.partitions.iter().filter(|_| given.partition_table.divided);
        StatsReport {
            device: self.device(given),
            requests: self.requests(given),
            latency: vec![
                self.base_read_times.report("base", "read"),
                self.view_read_times.report("views", "read"),
                self.base_write_times.report("base", "write"),
            ],
            reads_for_writes: self.for_writes.report(compared),
            writes: self.writes(given),
            maintenance: self.maintenance(given),
            write_backs: self.write_backs(given),
            index: self.index(given),
            kv_windows,
            windows: FormerWindows { now: kv_windows, most_open: kv_windows.max_open },
            blocks: self.blocks_held(given),
            planes: self.held.planes(),
            tensors: tensors.map(|tensor| TensorReport::new(tensor, given)).collect(),
            views: views.collect(),
            partitions: partitions.map(|partition| partition.report(compared)).collect(),
            interleave: given.interleave.clone(),
            modelled: given.modelled.clone(),
        }
    }
}
