//! Who was in a job: the guest and the device, as its report says it.

use serde::{Deserialize, Serialize};

/// The guest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct GuestReport {
    /// Its kernel's release.
    pub kernel: String,
    /// QEMU's version; empty if the guest's program ran on the host.
    pub qemu: String,
    /// `kvm` or `tcg`; empty on the host.
    pub accel: String,
    /// How the windows are attached.
    pub attach: String,
    /// From the start of QEMU until both windows were mapped and the directory read.
    pub boot_seconds: f64,
}

/// The device after the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceReport {
    /// `trace`, `gcomp` or `plain`.
    pub mode: String,
    /// The codec.
    pub codec: String,
    /// What `gcomp` compresses blocks by, if no tensor's codec says otherwise.
    #[serde(default)]
    pub gcomp_codec: Option<String>,
    /// The base window.
    pub capacity_bytes: u64,
    /// Tensors, and other memory that holds data.
    pub logical_bytes: u64,
    /// What that is charged in the store.
    pub stored_bytes: u64,
    /// What its index entries take.
    pub index_bytes: u64,
    /// What of it was written, to `stored_bytes`.
    pub ratio: Option<f64>,
}
