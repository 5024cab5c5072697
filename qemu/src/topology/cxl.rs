//! The device as CXL memory.
//!
//! ```text
//! pcie.0 ─ pxb-cxl (host bridge) ┬ cxl-rp ─ cxl-type3 mem0: the base window
//!                                └ cxl-rp ─ cxl-type3 mem1: the views window
//! ```
//!
//! * All devices share one fixed memory window (CFMW), as large as they are together. A window that
//!   is one device is mapped into the guest directly.
//! * An interleave set has a device for each target in the place of the base's one, `mem0` and so
//!   on, and the views behind them. The decoders of the host bridge and the devices interleave, as
//!   the guest's kernel programs them; QEMU hands each access to such a region on by itself.
//! * Guests tell the devices apart by serial number ([`BASE_SERIAL`], [`VIEWS_SERIAL`], those of
//!   targets: [`Interleave::serial`]); the kernel's `memN` numbers follow the order of probing and
//!   may swap.
//! * Sizes of devices are multiples of 256 MiB, as QEMU and the CXL decoders demand.

use std::path::{Path, PathBuf};

use lamina_abi::Interleave;

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
    /// The targets of the base window, if it is an interleave set; the guest then has these in its
    /// place.
    pub targets: Option<Targets>,
}

/// The targets of an interleave set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets {
    /// The set.
    pub set: Interleave,
    /// The file of each target, in order.
    pub files: Vec<PathBuf>,
}

impl Part for Cxl {
    fn check(&self) -> Result<(), TopologyError> {
        if let Some(Targets { set, files }) = &self.targets {
            let ways = u64::from(set.ways());
            if files.len() as u64 != ways || !self.base_bytes.is_multiple_of(GRANULE * ways) {
                let (bytes, targets) = (self.base_bytes, files.len());
                return Err(TopologyError::Set { set: *set, bytes, targets });
            }
            for file in files {
                check_window("interleave target", file, self.base_bytes / ways)?;
            }
        } else {
            check_window("base", &self.base, self.base_bytes)?;
        }
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
        let base = match &self.targets {
            None => vec![("base".to_owned(), &self.base, self.base_bytes, BASE_SERIAL)],
            Some(Targets { set, files }) => {
                let bytes = self.base_bytes / u64::from(set.ways());
                let target = |(target, file)| (format!("target{target}"), file, bytes, set.serial(target));
                (0..).zip(files).map(target).collect()
            }
        };
        let views = ("views".to_owned(), &self.views, self.views_bytes, VIEWS_SERIAL);
        for (n, (id, path, bytes, serial)) in base.into_iter().chain([views]).enumerate() {
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
