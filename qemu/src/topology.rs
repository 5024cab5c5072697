//! What is attached to the guest.
//!
//! ```text
//! pcie.0 ─ pxb-cxl (host bridge) ┬ cxl-rp ─ cxl-type3 mem0: the base window
//!                                └ cxl-rp ─ cxl-type3 mem1: the views window
//! pcie.0 ─ virtio-serial: org.lamina.ctl, org.lamina.report
//! ```
//!
//! * Both devices share one fixed memory window (CFMW), as large as the two together. Neither is interleaved, so QEMU maps
//!   them into the guest directly.
//! * Guests tell the devices apart by serial number ([`BASE_SERIAL`], [`VIEWS_SERIAL`]); the kernel's `memN` numbers follow the
//!   order of probing and may swap.
//! * Sizes are multiples of 256 MiB, as QEMU and the CXL decoders demand.
//! * A core dump of QEMU leaves guest memory out: writing it would read both windows whole.
//! * The guest's own RAM is a NUMA node, so that the CXL window becomes another.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Serial number of the device that holds the base window: "Lamina", then 0.
pub const BASE_SERIAL: u64 = 0x4c61_6d69_6e61_0000;
/// Serial number of the device that holds the views window: "Lamina", then 1.
pub const VIEWS_SERIAL: u64 = 0x4c61_6d69_6e61_0001;
/// Sizes of CXL devices are multiples of this many bytes.
pub const GRANULE: u64 = 256 << 20;
/// Name of the virtio-serial port that carries the device's API.
pub const CONTROL_PORT: &str = "org.lamina.ctl";
/// Name of the virtio-serial port that a guest program reports on.
pub const REPORT_PORT: &str = "org.lamina.report";
/// The least RAM that the guest boots in, in MiB.
pub const LEAST_MEMORY_MIB: u64 = 256;
/// The most virtual processors a guest may have.
pub const MOST_CPUS: u32 = 255;
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

/// The memory, processors and ports of a guest.
#[derive(Clone, Debug)]
pub struct Topology {
    /// The file that holds the base window.
    pub base: PathBuf,
    /// Bytes of the base window.
    pub base_bytes: u64,
    /// The file that holds the views window.
    pub views: PathBuf,
    /// Bytes of the views window.
    pub views_bytes: u64,
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
        "the {window} window has {bytes} bytes; a CXL device needs a multiple of {GRANULE} (256 MiB) above zero"
    )]
    Size {
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
    #[error("a guest has 1 to {MOST_CPUS} processors, not {cpus}")]
    Cpus {
        /// The number asked for.
        cpus: u32,
    },
    /// A port's socket is missing or something else.
    #[error("the {port} port needs a listening Unix socket at {}, but {why}", path.display())]
    Socket {
        /// The port's name.
        port: &'static str,
        /// The path.
        path: PathBuf,
        /// What is there instead.
        why: String,
    },
}

impl Topology {
    /// RAM in MiB that is enough for a small program in a guest with windows of so many bytes together: the kernel keeps
    /// 64 bytes for each page it maps, 1/64 of the windows.
    pub fn memory_for(windows_bytes: u64) -> u64 {
        512 + (windows_bytes >> 20).div_ceil(64)
    }

    /// Checks sizes, files, sockets and counts.
    ///
    /// # Errors
    /// The first thing that is wrong, with its bound.
    pub fn check(&self) -> Result<(), TopologyError> {
        check_window("base", &self.base, self.base_bytes)?;
        check_window("views", &self.views, self.views_bytes)?;
        let least =
            LEAST_MEMORY_MIB + Self::memory_for(self.base_bytes + self.views_bytes) - Self::memory_for(0);
        if self.memory_mib < least {
            return Err(TopologyError::Memory { mib: self.memory_mib, least });
        }
        if !(1..=MOST_CPUS).contains(&self.cpus) {
            return Err(TopologyError::Cpus { cpus: self.cpus });
        }
        if let Some(path) = &self.control {
            check_socket(CONTROL_PORT, path)?;
        }
        if let Some(Port::Socket(path)) = &self.report {
            check_socket(REPORT_PORT, path)?;
        }
        Ok(())
    }

    /// The options for QEMU.
    pub fn args(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut option = |name: &str, value: String| args.extend([name.to_owned(), value]);
        let window = (self.base_bytes + self.views_bytes) >> 20;
        option(
            "-machine",
            format!("q35,dump-guest-core=off,cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size={window}M"),
        );
        option("-m", format!("{}M", self.memory_mib));
        option("-smp", self.cpus.to_string());
        option("-object", format!("memory-backend-ram,id=ram,size={}M", self.memory_mib));
        option("-numa", format!("node,memdev=ram,cpus=0-{}", self.cpus - 1));
        option("-device", "pxb-cxl,id=cxl.1,bus=pcie.0,bus_nr=12".into());
        let devices = [
            ("base", &self.base, self.base_bytes, BASE_SERIAL),
            ("views", &self.views, self.views_bytes, VIEWS_SERIAL),
        ];
        for (n, (id, path, bytes, serial)) in devices.into_iter().enumerate() {
            let (size, path) = (bytes >> 20, escape(path));
            option("-object", format!("memory-backend-file,id={id},share=on,size={size}M,mem-path={path}"));
            option("-device", format!("cxl-rp,id=rp{n},bus=cxl.1,port={n},chassis=0,slot={}", n + 2));
            option("-device", format!("cxl-type3,id=mem{n},bus=rp{n},volatile-memdev={id},sn={serial:#x}"));
        }
        if self.control.is_some() || self.report.is_some() {
            option("-device", "virtio-serial-pci,id=ports,bus=pcie.0".into());
        }
        let socket = |id: &str, path: &Path| {
            format!("socket,id={id},server=off,reconnect-ms=500,path={}", escape(path))
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

/// A path as the value of a QEMU option, where a comma is written twice.
pub(crate) fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

fn check_window(window: &'static str, path: &Path, bytes: u64) -> Result<(), TopologyError> {
    // Half of the address space: no file is longer, and sums of two cannot overflow.
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) || bytes > i64::MAX as u64 {
        return Err(TopologyError::Size { window, bytes });
    }
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

fn check_socket(port: &'static str, path: &Path) -> Result<(), TopologyError> {
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
    Err(TopologyError::Socket { port, path: path.to_owned(), why })
}

#[cfg(test)]
mod tests;
