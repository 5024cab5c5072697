//! Reads and writes of the windows beside the mount, for servers that have no page cache of the host above them.
//!
//! What they may rely on is part of the contract in [`super::coherence`]; without a mount there is nobody else, and everything goes to
//! the device. All of these sleep while dirty pages of the mount are written back, so they are for threads of their own.

use std::ops::Range;

use crate::device::{Device, DeviceError};

use super::control::{Control, ControlError};

impl Control {
    /// Fills `out` from `offset` of the base window on.
    ///
    /// # Errors
    ///
    /// When the range passes the window's end, what is stored is damaged, or dirty pages cannot be written back.
    pub(super) fn read_base(&self, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        self.settle_base(offset, out.len() as u64)?;
        Ok(self.device.read_base(offset, out)?)
    }

    /// Fills `out` from `offset` of the views window on.
    ///
    /// # Errors
    ///
    /// As [`Self::read_base`].
    pub(super) fn read_views(&self, offset: u64, out: &mut [u8]) -> Result<(), ControlError> {
        for (pair, part) in self.pairs_under(&(offset..offset.saturating_add(out.len() as u64))) {
            pair.coherence().settle_under_views(part.start, part.end - part.start)?;
        }
        Ok(self.device.read_views(offset, out)?)
    }

    /// Stores `data` from `offset` of the base window on, and drops what the host's page cache held of it and of the views over it.
    ///
    /// # Errors
    ///
    /// As [`Self::read_base`], and when the store is full.
    pub(super) fn write_base(&self, offset: u64, data: &[u8]) -> Result<(), ControlError> {
        let range = offset..offset.saturating_add(data.len() as u64);
        self.change_base(&range, |device| device.write_base(offset, data))
    }

    /// Has `change` change bytes of a range of the base window in the device, and drops what the host's page cache held of them and of the views over them.
    pub(super) fn change_base(
        &self,
        range: &Range<u64>,
        change: impl FnOnce(&Device) -> Result<(), DeviceError>,
    ) -> Result<(), ControlError> {
        self.settle_base(range.start, range.end - range.start)?;
        let changed = change(&self.device);
        // One that failed may have changed the first blocks.
        for (pair, part) in self.pairs_over(range) {
            pair.coherence().written_beside(part.start, part.end - part.start)?;
        }
        Ok(changed?)
    }

    /// Brings dirty base pages of all pairs to the device.
    fn settle_base(&self, offset: u64, length: u64) -> Result<(), ControlError> {
        for (pair, part) in self.pairs_over(&(offset..offset.saturating_add(length))) {
            pair.coherence().settle_range(part.start, part.end - part.start)?;
        }
        Ok(())
    }
}
