//! The device as CXL memory.
//!
//! ```text
//! pcie.0 ─ pxb-cxl (host bridge) ┬ cxl-rp ─ cxl-type3 mem0: the base window
//!                                └ cxl-rp ─ cxl-type3 mem1: the views window
//! ```
//!
//! * Both devices share one fixed memory window (CFMW), as large as the two together. Neither is interleaved, so QEMU maps
//!   them into the guest directly.
//! * Guests tell the devices apart by serial number ([`BASE_SERIAL`], [`VIEWS_SERIAL`]); the kernel's `memN` numbers follow the
//!   order of probing and may swap.
//! * Sizes are multiples of 256 MiB, as QEMU and the CXL decoders demand.

use std::path::{Path, PathBuf};

use super::attach::Part;
use super::{TopologyError, check_file, escape};
use crate::version::{OLDEST, Version};

/// Serial number of the device that holds the base window: "Lamina", then 0.
pub const BASE_SERIAL: u64 = 0x4c61_6d69_6e61_0000;
/// Serial number of the device that holds the views window: "Lamina", then 1.
pub const VIEWS_SERIAL: u64 = 0x4c61_6d69_6e61_0001;
/// Sizes of CXL devices are multiples of this many bytes.
pub const GRANULE: u64 = 256 << 20;

/// The two windows, as files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cxl {
    /// The file that holds the base window: the device's, or any other of the size.
    pub base: PathBuf,
    /// Bytes of the base window, a multiple of 256 MiB.
    pub base_bytes: u64,
    /// The file that holds the views window.
    pub views: PathBuf,
    /// Bytes of the views window, a multiple of 256 MiB.
    pub views_bytes: u64,
}

impl Part for Cxl {
    fn check(&self) -> Result<(), TopologyError> {
        check_window("base", &self.base, self.base_bytes)?;
        check_window("views", &self.views, self.views_bytes)
    }

    fn mapped_bytes(&self) -> u64 {
        self.base_bytes.saturating_add(self.views_bytes)
    }

    fn maps_mount(&self) -> bool {
        true
    }

    fn oldest_qemu(&self) -> Version {
        OLDEST
    }

    fn machine(&self) -> String {
        let window = self.mapped_bytes() >> 20;
        format!(",cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size={window}M")
    }

    fn devices(&self, _: Version, option: &mut dyn FnMut(&str, String)) {
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
    }
}

fn check_window(window: &'static str, path: &Path, bytes: u64) -> Result<(), TopologyError> {
    // Half of the address space: no file is longer, and sums of two cannot overflow.
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) || bytes > i64::MAX as u64 {
        return Err(TopologyError::Size { window, bytes });
    }
    check_file(window, path, bytes)
}
