//! Reads and writes of the windows beside the mount, for servers that have no page cache of the
//! host above them.
//!
//! What they may rely on is part of the contract in [`super::coherence`]; without a mount there is
//! nobody else, and everything goes to the device. All of these sleep while dirty pages of the
//! mount are written back, so they are for threads of their own.
//!
//! They are of what the control is of: of the whole device, where a range may lie in several
//! partitions, each with a page cache of its own, or of a partition, in its own offsets. Hosts'
//! caches are left alone.

use std::ops::Range;

use lamina_device::device::{Device, DeviceError};

use super::control::{Control, ControlError};
use super::ranges::{common, inside};
use super::{Coherence, Export};

impl Control {
    /// Fills `out` from `offset` of the base window on.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, what is stored is damaged, or dirty pages cannot be
    /// written back.
    pub(super) fn read_base(&self, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        let range = self.range(offset, Some(out.len() as u64))?;
        for (coherence, part) in self.coherent_over_base(&range) {
            coherence.settle_range(part.start, part.end - part.start)?;
        }
        Ok(self.device.read_base(range.start, out)?)
    }

    /// Fills `out` from `offset` of the views window on.
    ///
    /// # Errors
    ///
    /// As [`Self::read_base`].
    pub(super) fn read_views(&self, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        let range = self.views_range(offset, out.len() as u64)?;
        for export in self.coherent() {
            if let Some(part) = common(&export.partition().views_window(), &range) {
                export.coherence().settle_under_views(part.start, part.end - part.start)?;
            }
        }
        Ok(self.device.read_views(range.start, out)?)
    }

    /// Stores `data` from `offset` of the base window on, and drops what the host's page cache held
    /// of it and of the views over it.
    ///
    /// # Errors
    ///
    /// As [`Self::read_base`], and when the store is full.
    pub(super) fn write_base(&self, offset: u64, data: &[u8]) -> Result<(), ControlError> {
        let range = self.range(offset, Some(data.len() as u64))?;
        self.change_base(&range, |device| device.write_base(range.start, data))
    }

    /// Has `change` change bytes of a range of the device's base window, and drops what the host's
    /// page cache held of them and of the views over them.
    pub(super) fn change_base(
        &self,
        range: &Range<u64>,
        change: impl FnOnce(&Device) -> Result<(), DeviceError>,
    ) -> Result<(), ControlError> {
        let caches = self.coherent_over_base(range);
        for (coherence, part) in &caches {
            coherence.settle_range(part.start, part.end - part.start)?;
        }
        let changed = change(&self.device);
        // One that failed may have changed the first blocks.
        for (coherence, part) in &caches {
            coherence.written_beside(part.start, part.end - part.start)?;
        }
        Ok(changed?)
    }

    /// The exports whose page caches are kept coherent with the device.
    fn coherent(&self) -> impl Iterator<Item = &Export> {
        self.exports().into_iter().map(AsRef::as_ref).filter(|export: &&Export| export.cache().is_none())
    }

    /// What keeps those coherent that show some of a range of the device's base window, each with
    /// what it shows of it, in its own offsets.
    fn coherent_over_base(&self, range: &Range<u64>) -> Vec<(&Coherence, Range<u64>)> {
        let part = |export: &'_ Export| inside(export.partition(), range);
        self.coherent().filter_map(|export| Some((export.coherence(), part(export)?))).collect()
    }
}
