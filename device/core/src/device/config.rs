//! What a device is made of.

use std::sync::Arc;

use lamina_abi::DIRECTORY_BYTES;

use super::{DeviceError, PartitionConfig, Watcher};
use crate::stats::Interleaving;
use lamina_codec::{BLOCK_BYTES, Codec};
use lamina_store::{Worker, entry::Version, image::Superblock, mode::Mode};

/// What a device is made of.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Bytes of the base window, a multiple of 4096.
    pub base_bytes: u64,
    /// Bytes of the views window, a multiple of 4096 and more than the directory's 2 MiB.
    pub views_bytes: u64,
    /// Bytes of bundles the store may hold; enough for incompressible data in the whole base window
    /// if not given.
    pub store_bytes: Option<u64>,
    /// Which device.
    pub mode: Mode,
    /// The codec of tensors that name none, and of opaque memory.
    pub codec: Codec,
    /// Entries of the modelled on-chip index cache.
    pub index_cache_entries: usize,
    /// Whether to observe what other devices would have moved and stored: see
    /// [`stats`](crate::stats). It costs about as much as storing does.
    pub observe: bool,
    /// KV windows that may be open for writing at once, from one to [`MAX_OPEN_WINDOWS`]; each
    /// takes as much memory as its tokens.
    pub open_windows: usize,
    /// Whether counters begin at zero when an image is opened, rather than where the last process
    /// left them.
    pub first_process: bool,
    /// Which this process is of those that serve the device one after another, if the next one is
    /// to find what this one counted.
    pub worker: Option<Worker>,
    /// Bytes of decoded KV windows and blocks that may be kept for the next read.
    pub decoded_bytes: usize,
    /// The partitions that the windows are divided into, in order; an undivided device if empty.
    pub partitions: Vec<PartitionConfig>,
    /// The devices that the base window is interleaved over, if it is more than one.
    pub interleaving: Option<Interleaving>,
    /// Who models what hardware would do, if anybody does.
    pub watcher: Option<Arc<dyn Watcher>>,
}

/// Most KV windows that may be open for writing at once.
pub const MAX_OPEN_WINDOWS: usize = 4096;

impl DeviceConfig {
    /// A device of these windows, everything else as usual.
    pub fn new(base_bytes: u64, views_bytes: u64) -> Self {
        Self {
            base_bytes,
            views_bytes,
            store_bytes: None,
            mode: Mode::default(),
            codec: Codec::default(),
            index_cache_entries: 32_768, // 2 MiB of SRAM
            observe: true,
            open_windows: 64,
            first_process: true,
            worker: None,
            decoded_bytes: 16 << 20,
            partitions: Vec::new(),
            interleaving: None,
            watcher: None,
        }
    }

    /// Bytes of bundles the store may hold.
    pub(super) fn store_bytes(&self) -> u64 {
        // Segments of one length share chunks: twice the capacity is room for any mix of lengths.
        // It is address space only.
        let usual =
            || self.base_bytes.saturating_mul(2).max(16 << 20).min(Version::default().max_store_bytes());
        self.store_bytes.unwrap_or_else(usual)
    }

    /// What an image says of such a device.
    pub fn superblock(&self) -> Superblock {
        Superblock {
            base_bytes: self.base_bytes,
            views_bytes: self.views_bytes,
            store_bytes: self.store_bytes(),
            mode: self.mode,
            codec: self.codec,
            // Each partition has room for one at least.
            open_windows: self.open_windows.max(self.partitions.len()).max(1) as u64,
            partitions: self.partitions.clone(),
            // It gets them when it is opened.
            checkpoints: false,
            version: Version::default(),
        }
    }

    /// Checks the sizes of the windows and the partitions.
    ///
    /// # Errors
    /// [`DeviceError::Size`], [`DeviceError::OpenWindows`], and partitions that cannot be.
    pub fn check(&self) -> Result<(), DeviceError> {
        let block = BLOCK_BYTES as u64;
        for (what, bytes) in [("a base window", self.base_bytes), ("a views window", self.views_bytes)] {
            if bytes == 0 || bytes % block != 0 || bytes > 1 << 46 {
                let rule = "windows are multiples of 4096 bytes, from 4096 bytes to 64 TiB";
                return Err(DeviceError::Size { what, bytes, rule });
            }
        }
        if self.views_bytes <= DIRECTORY_BYTES {
            let rule = "it holds the directory of 2 MiB and the views behind it";
            return Err(DeviceError::Size { what: "a views window", bytes: self.views_bytes, rule });
        }
        if let Some(Interleaving { interleave, .. }) = self.interleaving {
            if interleave.is_set() && !self.base_bytes.is_multiple_of(interleave.stripe()) {
                let rule = "that of an interleave set is a multiple of the granule times the ways";
                return Err(DeviceError::Size { what: "a base window", bytes: self.base_bytes, rule });
            }
            if interleave.is_set() && !self.partitions.is_empty() {
                let rule = "that of an interleave set is not divided";
                return Err(DeviceError::Size { what: "a base window", bytes: self.base_bytes, rule });
            }
        }
        if self.open_windows > MAX_OPEN_WINDOWS {
            return Err(DeviceError::OpenWindows { windows: self.open_windows as u64, least: 1 });
        }
        self.partition_table().map(drop)
    }

    /// A device divided into these partitions, its windows as large as theirs together, everything
    /// else as usual.
    pub fn divided(partitions: Vec<PartitionConfig>) -> Self {
        // A sum that does not fit is refused when the device is made.
        let sum =
            |bytes: fn(&PartitionConfig) -> u64| partitions.iter().map(bytes).fold(0, u64::saturating_add);
        let config = Self::new(sum(|partition| partition.base_bytes), sum(|partition| partition.views_bytes));
        Self { partitions, ..config }
    }
}
