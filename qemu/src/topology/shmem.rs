//! The device as a virtio device whose shared-memory region holds windows that the guest has mapped
//! on request (vhost-user), for guests with the driver in `driver-shim/kernel`.
//!
//! ```text
//! pcie.0 ─ vhost-user-test-device-pci shmem: BAR 4 is the region ─ socket ─ lamina serve --vhost-user-shmem
//! ```
//!
//! * QEMU maps what the device's server hands it, files of the mount among them, so it must not ask
//!   for huge pages of them.
//! * The server reads the queue in the guest's RAM, so that RAM is shared memory (a memfd).
//! * QEMU does not connect again to a server that went away.

use std::path::PathBuf;

use super::attach::Part;
use super::{TopologyError, check_socket, escape};
use crate::version::Version;

/// The first QEMU that has shared-memory regions over vhost-user and that this is tested with.
pub const OLDEST_QEMU: Version = Version { major: 11, minor: 1, patch: 0 };
/// The virtio device type: ioMemory.
const VIRTIO_ID: u32 = 6;
/// Bytes of the device's configuration space.
const CONFIG_BYTES: u32 = 32;

/// The socket that serves the region and the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shmem {
    /// The socket.
    pub socket: PathBuf,
}

impl Part for Shmem {
    fn check(&self) -> Result<(), TopologyError> {
        check_socket("shared memory", &self.socket)
    }

    fn mapped_bytes(&self) -> u64 {
        0
    }

    fn maps_mount(&self) -> bool {
        true
    }

    fn oldest_qemu(&self) -> Version {
        OLDEST_QEMU
    }

    fn ram(&self) -> &'static str {
        "memory-backend-memfd,share=on"
    }

    fn devices(&self, _: Version, option: &mut dyn FnMut(&str, String)) {
        option("-chardev", format!("socket,id=shmem,path={}", escape(&self.socket)));
        option(
            "-device",
            format!(
                "vhost-user-test-device-pci,id=lamina,bus=pcie.0,chardev=shmem,virtio-id={VIRTIO_ID},num_vqs=1,vq_size=64,config_size={CONFIG_BYTES}"
            ),
        );
    }
}
