//! The ways to attach the device to a guest, and what each has to say for itself.
//!
//! A new way is a file with an implementation of [`Part`], and a line in each of the three lists
//! here.

use std::str::FromStr;

use super::{Cxl, Ivshmem, Shmem, TopologyError, VhostUser, Virtiofs};
use crate::version::Version;

/// How the guest sees the device.
#[derive(Clone, Debug)]
pub enum Attach {
    /// As CXL memory.
    Cxl(Cxl),
    /// As disks.
    VhostUser(VhostUser),
    /// As shared memory of PCI devices.
    Ivshmem(Ivshmem),
    /// As shared memory of a virtio device, mapped on request.
    Shmem(Shmem),
    /// As a file system.
    Virtiofs(Virtiofs),
}

/// The name of a way to attach the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachKind {
    /// `cxl`: two CXL memory devices.
    #[default]
    Cxl,
    /// `vhost-user`: virtio disks.
    VhostUser,
    /// `ivshmem`: shared memory of PCI devices.
    Ivshmem,
    /// `shmem`: shared memory of a virtio device, mapped on request.
    Shmem,
    /// `virtiofs`: the mount, as a file system of the guest.
    Virtiofs,
}

/// What a way to attach the device brings to a guest.
pub(super) trait Part {
    /// Checks what can be checked before QEMU starts.
    fn check(&self) -> Result<(), TopologyError>;

    /// Bytes that the guest's kernel manages as memory, beside its RAM.
    fn mapped_bytes(&self) -> u64;

    /// Whether QEMU maps files of the device's mount, and must not ask for huge pages of them.
    fn maps_mount(&self) -> bool;

    /// The oldest QEMU that will do.
    fn oldest_qemu(&self) -> Version;

    /// More of the option `-machine`, each with a comma before it.
    fn machine(&self) -> String {
        String::new()
    }

    /// The kind of the guest's RAM, the first part of an option `-object`.
    fn ram(&self) -> &'static str {
        "memory-backend-ram"
    }

    /// Adds the options for the device.
    fn devices(&self, qemu: Version, option: &mut dyn FnMut(&str, String));
}

impl Attach {
    pub(super) fn part(&self) -> &dyn Part {
        match self {
            Self::Cxl(cxl) => cxl,
            Self::VhostUser(vhost_user) => vhost_user,
            Self::Ivshmem(ivshmem) => ivshmem,
            Self::Shmem(shmem) => shmem,
            Self::Virtiofs(virtiofs) => virtiofs,
        }
    }

    /// Bytes that the guest's kernel manages as memory, beside its RAM.
    pub fn mapped_bytes(&self) -> u64 {
        self.part().mapped_bytes()
    }

    /// Whether QEMU maps files of the device's mount, and must not ask for huge pages of them.
    pub fn maps_mount(&self) -> bool {
        self.part().maps_mount()
    }

    /// The oldest QEMU that will do.
    pub fn oldest_qemu(&self) -> Version {
        self.part().oldest_qemu()
    }
}

impl AttachKind {
    const ALL: [(&str, Self); 5] = [
        ("cxl", Self::Cxl),
        ("vhost-user", Self::VhostUser),
        ("ivshmem", Self::Ivshmem),
        ("shmem", Self::Shmem),
        ("virtiofs", Self::Virtiofs),
    ];

    /// The name, as it is written on the command line.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

impl std::fmt::Display for AttachKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AttachKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        let known = || Self::ALL.map(|(name, _)| name).join(", ");
        found
            .map(|(_, kind)| *kind)
            .ok_or_else(|| format!("{name:?} is no way to attach; known are {}", known()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_has_a_name_that_is_understood() {
        for (name, kind) in AttachKind::ALL {
            assert_eq!(name.parse(), Ok(kind));
            assert_eq!(kind.to_string(), name);
        }
        assert!(
            "scsi".parse::<AttachKind>().unwrap_err().contains("cxl, vhost-user, ivshmem, shmem, virtiofs")
        );
    }
}
