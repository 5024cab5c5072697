//! Address space that costs memory only where it was written, reached by checked, volatile copies.

use vm_memory::{VolatileMemory, mmap::MmapRegion, mmap::MmapRegionBuilder};

use super::StoreError;

/// Anonymous memory of a fixed length, zero until written.
pub(crate) struct Memory {
    region: MmapRegion,
}

impl Memory {
    /// Reserves `bytes` of address space.
    pub(crate) fn reserve(what: &'static str, bytes: u64) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Reserve { what, bytes, source };
        let size = usize::try_from(bytes.max(1)).map_err(|e| fail(std::io::Error::other(e)))?;
        let region = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
            .build()
            .map_err(|e| fail(std::io::Error::other(e)))?;
        Ok(Self { region })
    }

    /// Copies out. Panics past the end.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) {
        self.region.get_slice(at, out.len()).expect("inside the reservation").copy_to(out);
    }

    /// Copies in. Panics past the end.
    pub(crate) fn write(&self, at: usize, data: &[u8]) {
        self.region.get_slice(at, data.len()).expect("inside the reservation").copy_from(data);
    }
}
