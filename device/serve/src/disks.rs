//! Disks that are being served, as they are told.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a disk shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shows {
    /// The base window; it can be written.
    Base,
    /// The views window, each view a partition.
    Views,
    /// One view, from offset 0 on; made if there is none.
    View {
        /// The tensor.
        tensor: String,
        /// The view's spelling.
        view: String,
    },
}

/// A disk, as it is told.
#[derive(Clone, Debug, Serialize)]
pub struct DiskInfo {
    /// The serial number that the guest reads: `/dev/disk/by-id/virtio-` and this, where there is
    /// udev.
    pub serial: String,
    /// The socket it is served on.
    pub socket: PathBuf,
    /// What it shows.
    pub shows: Shows,
    /// Whose partition of the device it shows that of, if that is a guest's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// Whether the one view that it shows is gone, so that it refuses everything.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gone: bool,
    /// Its bytes.
    pub bytes: u64,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Whether somebody is connected.
    pub connected: bool,
    /// The partitions, of the views disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<Partition>,
}

/// A partition of the views disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Partition {
    /// Its number: the 3 of `/dev/vdb3`.
    pub number: usize,
    /// Its name in the table.
    pub name: String,
    /// The tensor; empty for the directory.
    pub tensor: String,
    /// The view's spelling; empty for the directory.
    pub view: String,
    /// Where it begins on the disk, in bytes.
    pub offset: u64,
    /// Bytes of the view, without what fills its last page.
    pub length: u64,
}

/// A disk that is being served.
pub(crate) trait ServedDisk: Send + Sync {
    /// What can be told of it.
    fn info(&self) -> DiskInfo;
}
