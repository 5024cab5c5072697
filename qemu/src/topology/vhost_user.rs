//! The device as virtio disks that it serves itself (vhost-user-blk), for guests and QEMUs without
//! CXL.
//!
//! ```text
//! pcie.0 ─ vhost-user-blk-pci disk0 … ─ socket ─ lamina serve --vhost-user
//! ```
//!
//! * The device reads and writes the guest's RAM itself, so that RAM is shared memory (a memfd).
//! * Guests tell the disks apart by their serial numbers, which the device gives, not QEMU.
//! * QEMU connects again when the device goes away, and the guest's requests wait meanwhile.

use std::path::PathBuf;

use super::attach::Part;
use super::{TopologyError, check_socket, escape, reconnect};
use crate::version::Version;

/// The first QEMU that Lamina's disks are tested with.
pub const OLDEST_QEMU: Version = Version { major: 7, minor: 2, patch: 0 };
/// Disks that have room on the machine's root bus, beside everything else.
pub const MAX_DISKS: usize = 24;
/// Milliseconds between QEMU's attempts to reach a device that went away.
const RECONNECT_MS: u32 = 100;
/// Entries of a queue. A request of 1 MiB takes up to 258 without indirect descriptors.
const QUEUE_SIZE: u32 = 512;

/// Disks, each by the socket that serves it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostUser {
    /// The sockets, in the order of the guest's disks.
    pub disks: Vec<PathBuf>,
    /// Queues of each disk; as many as processors is best.
    pub queues: u16,
}

impl Part for VhostUser {
    fn check(&self) -> Result<(), TopologyError> {
        if !(1..=MAX_DISKS).contains(&self.disks.len()) {
            return Err(TopologyError::Disks { disks: self.disks.len() });
        }
        self.disks.iter().enumerate().try_for_each(|(n, path)| check_socket(&format!("disk {n}"), path))
    }

    fn mapped_bytes(&self) -> u64 {
        0
    }

    fn maps_mount(&self) -> bool {
        false
    }

    fn oldest_qemu(&self) -> Version {
        OLDEST_QEMU
    }

    fn ram(&self) -> &'static str {
        "memory-backend-memfd,share=on"
    }

    fn devices(&self, qemu: Version, option: &mut dyn FnMut(&str, String)) {
        for (n, path) in self.disks.iter().enumerate() {
            let (reconnect, queues) = (reconnect(qemu, RECONNECT_MS), self.queues.max(1));
            option("-chardev", format!("socket,id=disk{n},{reconnect},path={}", escape(path)));
            option(
                "-device",
                format!(
                    "vhost-user-blk-pci,id=blk{n},bus=pcie.0,chardev=disk{n},num-queues={queues},queue-size={QUEUE_SIZE}"
                ),
            );
        }
    }
}
