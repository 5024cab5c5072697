//! What is told of a partition: the same words as for a device, for what is its own.

use serde::Serialize;

use super::{TensorReport, TrafficReport, ViewReport};

/// One partition of a divided device. Its guest is told only this.
#[derive(Clone, Debug, Serialize)]
pub struct PartitionReport {
    /// Its name.
    pub name: String,
    /// Where its base window begins on the device; 0 where its guest is told.
    pub dpa: u64,
    /// Bytes of its base window.
    pub capacity_bytes: u64,
    /// Bytes of its views window.
    pub views_capacity_bytes: u64,
    /// Bytes that its blocks may be charged; null without a bound.
    pub quota_bytes: Option<u64>,
    /// What its blocks are charged in the store.
    pub stored_bytes: u64,
    /// Writes of blocks or KV windows that the quota refused.
    pub quota_refusals: u64,
    /// Requests by window.
    pub requests: PartitionRequests,
    /// What writes did.
    pub writes: PartitionWrites,
    /// Its tensors, by DPA, where its guest is told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorReport>,
    /// Its views, by offset, where its guest is told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub views: Vec<ViewReport>,
}

/// Requests of a partition by window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PartitionRequests {
    /// Reads of its base window.
    pub base: TrafficReport,
    /// Reads of its views.
    pub views: TrafficReport,
    /// Reads of its directory.
    pub directory_reads: u64,
    /// Stores into its views window, which have no effect.
    pub refused_view_stores: u64,
    /// Their bytes.
    pub refused_view_bytes: u64,
}

/// What writes to a partition did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PartitionWrites {
    /// Write requests: write-backs of dirty pages and direct writes.
    pub base_writes: u64,
    /// Their bytes.
    pub base_written_bytes: u64,
    /// Blocks coded.
    pub blocks_written: u64,
}
