//! The device as shared memory of PCI devices (ivshmem), for guests and QEMUs without CXL.
//!
//! ```text
//! pcie.0 ┬ 10.0 ivshmem-plain: BAR 2 is the base window
//!        ├ 11.0 ivshmem-plain: BAR 2 is the views window
//!        └ 12.0 ivshmem-doorbell: BAR 2 is the mailbox, BAR 0 rings; its server is a socket of the device
//! ```
//!
//! * All three have the PCI identity 1af4:1110. Guests tell them by what the memory begins with
//!   (the directory, the mailbox's magic); the base is in the slot before the views.
//! * The windows are files, mapped by QEMU, so that reads and writes are loads and stores. The
//!   mailbox is a memory of the server's, which hands it to QEMU.
//! * The size of a BAR is a power of two, so the windows' sizes are.

use std::path::{Path, PathBuf};

use super::attach::Part;
use super::{TopologyError, check_file, check_socket, escape};
use crate::version::Version;

/// The first QEMU that knows all the options used here.
pub const OLDEST_QEMU: Version = Version { major: 7, minor: 2, patch: 0 };
/// The PCI slot of the base window; the views and the mailbox follow.
pub const BASE_SLOT: u32 = 0x10;
/// The least size of a window.
pub const MIN_BYTES: u64 = 1 << 20;

/// The two windows, as files, and the socket of the mailbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ivshmem {
    /// The file that holds the base window: the device's, or any other of the size.
    pub base: PathBuf,
    /// Bytes of the base window, a power of two.
    pub base_bytes: u64,
    /// The file that holds the views window.
    pub views: PathBuf,
    /// Bytes of the views window, a power of two.
    pub views_bytes: u64,
    /// The socket of the ivshmem server that has the mailbox; without it the guest has none.
    pub mailbox: Option<PathBuf>,
}

impl Part for Ivshmem {
    fn check(&self) -> Result<(), TopologyError> {
        check_window("base", &self.base, self.base_bytes)?;
        check_window("views", &self.views, self.views_bytes)?;
        self.mailbox.as_deref().map_or(Ok(()), |socket| check_socket("mailbox", socket))
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

    fn devices(&self, _: Version, option: &mut dyn FnMut(&str, String)) {
        let windows = [("base", &self.base, self.base_bytes), ("views", &self.views, self.views_bytes)];
        let mut slot = BASE_SLOT;
        for (id, path, bytes) in windows {
            let (size, path) = (bytes >> 20, escape(path));
            option("-object", format!("memory-backend-file,id={id},share=on,size={size}M,mem-path={path}"));
            option("-device", format!("ivshmem-plain,id=shmem-{id},bus=pcie.0,addr={slot:#x},memdev={id}"));
            slot += 1;
        }
        if let Some(socket) = &self.mailbox {
            option("-chardev", format!("socket,id=mailbox,path={}", escape(socket)));
            option(
                "-device",
                format!(
                    "ivshmem-doorbell,id=shmem-mailbox,bus=pcie.0,addr={slot:#x},chardev=mailbox,vectors=1"
                ),
            );
        }
    }
}

fn check_window(window: &'static str, path: &Path, bytes: u64) -> Result<(), TopologyError> {
    check_bytes(window, bytes)?;
    check_file(window, path, bytes)
}

/// Whether a `window` of so many bytes can be shared memory of a PCI device.
///
/// # Errors
/// [`TopologyError::NoPowerOfTwo`].
pub fn check_bytes(window: &'static str, bytes: u64) -> Result<(), TopologyError> {
    // Half of the address space: no file is longer.
    if !bytes.is_power_of_two() || bytes < MIN_BYTES || bytes > i64::MAX as u64 {
        return Err(TopologyError::NoPowerOfTwo { window, bytes });
    }
    Ok(())
}
