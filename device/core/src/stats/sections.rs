//! Where the device's figures are in what `/stats` answers.

use super::{
    BlocksReport, DeviceReport, FillsReport, IndexReport, InterleaveReport, KvWindowsReport, LatencyReport,
    MaintenanceReport, MemberReport, ModelledReport, PartitionReport, PartitionRequests, PartitionWrites,
    PlaneReport, RequestsReport, TensorReport, TrafficReport, WriteBacksReport, WritesReport,
};
use crate::counters::{
    Figure, Place,
    Scope::{Design, Device, Member, Partition, Plane, Tensor, View, Window},
    Section,
};

/// Figures of the whole device, in one object.
const fn of_device(title: &'static str, places: &'static [Place], figures: &'static [Figure]) -> Section {
    Section { title, scope: Device, places, labels: &[], prefix: "", of: "", figures }
}

const TENSOR: &[(&str, &str)] = &[("tensor", "name")];
const PARTITION: &[(&str, &str)] = &[("partition", "name")];

/// All of a device's figures.
pub const SECTIONS: &[Section] = &[
    of_device("device", &[Place::at("/device")], DeviceReport::FIGURES),
    Section {
        title: "read",
        scope: Window,
        places: &[
            Place::at("/requests/base").label("window", "base"),
            Place::at("/requests/views").label("window", "views"),
        ],
        labels: &[],
        prefix: "window_",
        of: ", by window",
        figures: TrafficReport::FIGURES,
    },
    Section {
        title: "read for writes",
        scope: Device,
        places: &[Place::at("/reads_for_writes").label("window", "base")],
        labels: &[],
        prefix: "for_writes_",
        of: ", that stores needed first",
        figures: TrafficReport::FIGURES,
    },
    Section {
        title: "fills",
        scope: Window,
        places: &[
            Place::list("/requests/base_fills").label("window", "base"),
            Place::list("/requests/view_fills").label("window", "views"),
        ],
        labels: &[("up_to_bytes", "up_to_bytes")],
        prefix: "",
        of: "",
        figures: FillsReport::FIGURES,
    },
    Section {
        title: "latency",
        scope: Window,
        places: &[Place::list("/latency")],
        labels: &[("window", "window"), ("request", "request")],
        prefix: "",
        of: "",
        figures: LatencyReport::FIGURES,
    },
    of_device("requests", &[Place::at("/requests")], RequestsReport::FIGURES),
    of_device("writes", &[Place::at("/writes")], WritesReport::FIGURES),
    of_device("maintenance", &[Place::at("/maintenance")], MaintenanceReport::FIGURES),
    of_device("write-backs", &[Place::at("/write_backs")], WriteBacksReport::FIGURES),
    of_device("index", &[Place::at("/index")], IndexReport::FIGURES),
    of_device("KV windows", &[Place::at("/kv_windows")], KvWindowsReport::FIGURES),
    of_device("blocks", &[Place::at("/blocks")], BlocksReport::FIGURES),
    Section {
        title: "planes",
        scope: Plane,
        places: &[Place::list("/planes")],
        labels: &[("format", "format"), ("plane", "plane")],
        prefix: "",
        of: "",
        figures: PlaneReport::FIGURES,
    },
    Section {
        title: "tensors",
        scope: Tensor,
        places: &[Place::list("/tensors")],
        labels: &[("tensor", "name"), ("format", "format")],
        prefix: "tensor_",
        of: "",
        figures: TensorReport::FIGURES,
    },
    Section {
        title: "tensors read",
        scope: Tensor,
        places: &[Place::list("/tensors").each("/base")],
        labels: TENSOR,
        prefix: "tensor_",
        of: ", of a tensor through the base window",
        figures: TrafficReport::FIGURES,
    },
    Section {
        title: "views read",
        scope: View,
        places: &[Place::list("/views")],
        labels: &[("tensor", "tensor"), ("view", "view")],
        prefix: "view_",
        of: ", of a view",
        figures: TrafficReport::FIGURES,
    },
    Section {
        title: "partitions",
        scope: Partition,
        places: &[Place::list("/partitions")],
        labels: PARTITION,
        prefix: "partition",
        of: "",
        figures: PartitionReport::FIGURES,
    },
    Section {
        title: "partitions' requests",
        scope: Partition,
        places: &[Place::list("/partitions").each("/requests")],
        labels: PARTITION,
        prefix: "partition_",
        of: ", of a partition",
        figures: PartitionRequests::FIGURES,
    },
    Section {
        title: "partitions' writes",
        scope: Partition,
        places: &[Place::list("/partitions").each("/writes")],
        labels: PARTITION,
        prefix: "partition_",
        of: ", of a partition",
        figures: PartitionWrites::FIGURES,
    },
    Section {
        title: "partitions read",
        scope: Partition,
        places: &[
            Place::list("/partitions").each("/requests/base").label("window", "base"),
            Place::list("/partitions").each("/requests/views").label("window", "views"),
        ],
        labels: PARTITION,
        prefix: "partition_",
        of: ", of a partition",
        figures: TrafficReport::FIGURES,
    },
    of_device("interleaved", &[Place::at("/interleave")], InterleaveReport::FIGURES),
    Section {
        title: "devices",
        scope: Member,
        places: &[Place::list("/interleave/devices")],
        labels: &[("device", "device")],
        prefix: "",
        of: "",
        figures: MemberReport::FIGURES,
    },
    Section {
        title: "modelled",
        scope: Design,
        places: &[Place::list("/modelled")],
        labels: &[("design", "design")],
        prefix: "",
        of: "",
        figures: ModelledReport::FIGURES,
    },
];
