//! What is attached to the guest.
//!
//! ```text
//! pcie.0 ─ the device, by one of the attachments [`Attach`]
//! pcie.0 ─ virtio-serial: org.lamina.ctl, org.lamina.report
//! ```
//!
//! * Each way to attach the device is a file of its own: what it needs of the machine and of QEMU,
//!   its options, what it checks.
//! * A core dump of QEMU leaves guest memory out: writing it would read every window whole.
//! * The guest's own RAM is a NUMA node, so that a memory window becomes another.

mod attach;
pub mod cxl;
pub mod ivshmem;
pub mod shmem;
pub mod vhost_user;
pub mod virtiofs;

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

pub use self::attach::{Attach, AttachKind};
pub use self::cxl::{Cxl, Targets};
pub use self::ivshmem::Ivshmem;
pub use self::shmem::Shmem;
pub use self::vhost_user::VhostUser;
pub use self::virtiofs::Virtiofs;
use crate::version::Version;

/// Name of the virtio-serial port that carries the device's API.
pub const CONTROL_PORT: &str = "org.lamina.ctl";
/// Name of the virtio-serial port that a guest program reports on.
pub const REPORT_PORT: &str = "org.lamina.report";
/// The least RAM that the guest boots in, in MiB.
pub const MIN_MEMORY_MIB: u64 = 256;
/// The most virtual processors a guest may have.
pub const MAX_CPUS: u32 = 255;
/// The longest path of a Unix socket, in bytes.
const SOCKET_PATH_BYTES: usize = 107;

/// The other end of the report port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// What the guest writes goes to this file, which is made or emptied first.
    File(PathBuf),
    /// A Unix socket that listens here; QEMU connects, again and again if need be.
    Socket(PathBuf),
}

/// The device, memory, processors and ports of a guest.
#[derive(Clone, Debug)]
pub struct Topology {
    /// How the guest sees the device.
    pub attach: Attach,
    /// The guest's RAM in MiB; [`Topology::memory_for`] says how much is enough.
    pub memory_mib: u64,
    /// Virtual processors.
    pub cpus: u32,
    /// The Unix socket that serves the control port.
    pub control: Option<PathBuf>,
    /// The other end of the report port.
    pub report: Option<Port>,
}

/// Why a guest cannot be laid out like this.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// A window's size does not suit CXL.
    #[error(
        "the {window} window has {bytes} bytes; a CXL device needs a multiple of {} (256 MiB) above zero",
        cxl::GRANULE
    )]
    Size {
        /// `base` or `views`.
        window: &'static str,
        /// The size asked for.
        bytes: u64,
    },
    /// A base window that cannot be this interleave set.
    #[error(
        "the base window has {bytes} bytes and {targets} targets; the interleave set {set} needs {} targets, and a multiple of {} (256 MiB for each)",
        set.ways(),
        cxl::GRANULE * u64::from(set.ways())
    )]
    Set {
        /// The set.
        set: lamina_abi::Interleave,
        /// Bytes of the base window.
        bytes: u64,
        /// Its targets.
        targets: usize,
    },
    /// A window's size does not suit a PCI BAR.
    #[error(
        "the {window} window has {bytes} bytes; as shared memory of a PCI device it needs a power of two from {} (1 MiB) on",
        ivshmem::MIN_BYTES
    )]
    NoPowerOfTwo {
        /// `base` or `views`.
        window: &'static str,
        /// The size asked for.
        bytes: u64,
    },
    /// A memory file cannot be used.
    #[error("the {window} window's memory file {} cannot be used: {error}", path.display())]
    File {
        /// `base` or `views`.
        window: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A memory file is shorter than its window. QEMU would lengthen it.
    #[error("the {window} window's memory file {} has {found} bytes, the window {bytes}", path.display())]
    Short {
        /// `base` or `views`.
        window: &'static str,
        /// The file.
        path: PathBuf,
        /// Bytes the file has.
        found: u64,
        /// Bytes of the window.
        bytes: u64,
    },
    /// Too little RAM.
    #[error("{mib} MiB of RAM is too little for a guest with these windows; give it {least} MiB or more")]
    Memory {
        /// The RAM asked for, in MiB.
        mib: u64,
        /// The least that will do, in MiB.
        least: u64,
    },
    /// No or too many processors.
    #[error("a guest has 1 to {MAX_CPUS} processors, not {cpus}")]
    Cpus {
        /// The number asked for.
        cpus: u32,
    },
    /// No or too many disks.
    #[error("the device is attached by 1 to {} disks, not {disks}", vhost_user::MAX_DISKS)]
    Disks {
        /// The number asked for.
        disks: usize,
    },
    /// A socket is missing or something else.
    #[error("the {what} needs a listening Unix socket at {}, but {why}", path.display())]
    Socket {
        /// The port or disk.
        what: String,
        /// The path.
        path: PathBuf,
        /// What is there instead.
        why: String,
    },
}

impl Topology {
    /// RAM in MiB that is enough for a small program in a guest with windows of so many bytes
    /// together: the kernel keeps 64 bytes for each page it maps, 1/64 of the windows.
    pub fn memory_for(windows_bytes: u64) -> u64 {
        512 + (windows_bytes >> 20).div_ceil(64)
    }

    /// Checks sizes, files, sockets and counts.
    ///
    /// # Errors
    /// The first thing that is wrong, with its bound.
    pub fn check(&self) -> Result<(), TopologyError> {
        let part = self.attach.part();
        part.check()?;
        let least = MIN_MEMORY_MIB + Self::memory_for(part.mapped_bytes()) - Self::memory_for(0);
        if self.memory_mib < least {
            return Err(TopologyError::Memory { mib: self.memory_mib, least });
        }
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(TopologyError::Cpus { cpus: self.cpus });
        }
        if let Some(path) = &self.control {
            check_socket(&format!("{CONTROL_PORT} port"), path)?;
        }
        if let Some(Port::Socket(path)) = &self.report {
            check_socket(&format!("{REPORT_PORT} port"), path)?;
        }
        Ok(())
    }

    /// The options for a QEMU of this version.
    pub fn args(&self, qemu: Version) -> Vec<String> {
        let mut args = Vec::new();
        let mut option = |name: &str, value: String| args.extend([name.to_owned(), value]);
        let part = self.attach.part();
        option("-machine", format!("q35,dump-guest-core=off{}", part.machine()));
        option("-m", format!("{}M", self.memory_mib));
        option("-smp", self.cpus.to_string());
        option("-object", format!("{},id=ram,size={}M", part.ram(), self.memory_mib));
        option("-numa", format!("node,memdev=ram,cpus=0-{}", self.cpus - 1));
        part.devices(qemu, &mut option);
        if self.control.is_some() || self.report.is_some() {
            option("-device", "virtio-serial-pci,id=ports,bus=pcie.0".into());
        }
        let socket = |id: &str, path: &Path| {
            format!("socket,id={id},server=off,{},path={}", reconnect(qemu, 100), escape(path))
        };
        if let Some(path) = &self.control {
            option("-chardev", socket("control", path));
            option("-device", format!("virtserialport,bus=ports.0,nr=1,chardev=control,name={CONTROL_PORT}"));
        }
        if let Some(port) = &self.report {
            option(
                "-chardev",
                match port {
                    Port::File(path) => format!("file,id=report,path={}", escape(path)),
                    Port::Socket(path) => socket("report", path),
                },
            );
            option("-device", format!("virtserialport,bus=ports.0,nr=2,chardev=report,name={REPORT_PORT}"));
        }
        args
    }
}

/// The option of a socket that QEMU connects to again after so many milliseconds, or seconds where
/// it knows no other.
fn reconnect(qemu: Version, milliseconds: u32) -> String {
    if qemu >= (Version { major: 9, minor: 2, patch: 0 }) {
        format!("reconnect-ms={milliseconds}")
    } else {
        format!("reconnect={}", milliseconds.div_ceil(1000))
    }
}

/// A path as the value of a QEMU option, where a comma is written twice.
pub(crate) fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Checks the file that holds a window.
fn check_file(window: &'static str, path: &Path, bytes: u64) -> Result<(), TopologyError> {
    let file = |error| TopologyError::File { window, path: path.to_owned(), error };
    let metadata = std::fs::metadata(path).map_err(file)?;
    if path.to_str().is_none() {
        return Err(file(std::io::Error::other("its path is not UTF-8")));
    }
    if !metadata.is_file() {
        return Err(file(std::io::Error::other("it is no regular file")));
    }
    std::fs::OpenOptions::new().read(true).write(true).open(path).map_err(file)?;
    if metadata.len() < bytes {
        return Err(TopologyError::Short { window, path: path.to_owned(), found: metadata.len(), bytes });
    }
    Ok(())
}

/// Checks that something may listen at `path`.
fn check_socket(what: &str, path: &Path) -> Result<(), TopologyError> {
    let length = path.as_os_str().len();
    let why = if length > SOCKET_PATH_BYTES {
        format!("the path has {length} bytes, at most {SOCKET_PATH_BYTES} fit")
    } else {
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.file_type().is_socket() => return Ok(()),
            Ok(_) => "that is no socket".into(),
            Err(error) => error.to_string(),
        }
    };
    Err(TopologyError::Socket { what: what.to_owned(), path: path.to_owned(), why })
}

#[cfg(test)]
mod tests;
