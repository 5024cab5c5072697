//! The walk of a store: whose a range is, and how its owner codes it.
//!
//! A store holds the map while it codes, so that charges and counters agree with it, for a bounded
//! part of a request at a time.

use std::{ops::Range, sync::Arc, time::Instant};

use super::{
    Device, DeviceError, Window,
    coding::{Region, owner},
};
use crate::{tensor::Tensor, window::Map};
use lamina_codec::BLOCK_BYTES;

impl Device {
    /// Stores `data` from `offset` of the base window on.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`] before anything is written; [`DeviceError::Store`] when the
    /// store is full and [`DeviceError::Damaged`] when part of a damaged block is written, after
    /// the blocks before it were.
    pub fn write_base(&self, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        self.inside(Window::Base, offset, data.len() as u64)?;
        let written = self.write_pieces(offset, data, &mut 0);
        self.events.note(&written, self.look());
        written
    }

    /// Stores `data` at `at` of `tensor`, as long as it is there as it was made: false as soon as
    /// it was removed or resized, when its place may be another's.
    ///
    /// # Errors
    /// As [`Device::write_base`].
    pub(crate) fn write_tensor(
        &self,
        tensor: &Arc<Tensor>,
        at: u64,
        data: &[u8],
    ) -> Result<bool, DeviceError> {
        let offset = tensor.info.dpa + at;
        self.inside(Window::Base, offset, data.len() as u64)?;
        let written = self.write_while(offset, data, &mut 0, |map| map.has(tensor));
        self.events.note(&written, self.look());
        written
    }

    /// Stores what is left of `data` when the first `done` bytes of it are stored, and moves
    /// `done`.
    pub(super) fn write_pieces(&self, offset: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        self.write_while(offset, data, done, |_| true).map(drop)
    }

    /// The same while `may` says so of the map that each step holds: whether that was to the end.
    fn write_while(
        &self,
        offset: u64,
        data: &[u8],
        done: &mut usize,
        may: impl Fn(&Map) -> bool,
    ) -> Result<bool, DeviceError> {
        let begun = Instant::now();
        while *done < data.len() {
            let at = offset + *done as u64;
            let map = self.map.read();
            if !may(&map) {
                return Ok(false);
            }
            // Of one owner, who lies in one partition; nobody's memory may reach into the next.
            let end = map.owner_end(at).min(self.accounts.partition_table.of_base(at).base.end);
            let end = usize::try_from(end - offset).map_or(data.len(), |end| end.min(data.len()));
            Region::of(self, map.tensor_at(at)).coding().write(at, &data[*done..end], done)?;
        }
        let range = offset..offset + data.len() as u64;
        self.accounts.stats.base_writes.add(1);
        self.accounts.stats.base_written_bytes.add(data.len() as u64);
        self.accounts.stats.base_write_times.count(begun);
        self.accounts.observers.wrote(&range);
        if let Some(partition) = self.accounts.counted_partition(offset) {
            partition.base_writes.add(1);
            partition.base_written_bytes.add(data.len() as u64);
        }
        Ok(true)
    }

    /// Forgets what this base range holds: it reads as zeros and whole blocks of it store nothing.
    /// What never held anything takes no room to forget.
    ///
    /// # Errors
    /// As [`Device::write_base`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        self.discard_step(offset, length, u64::MAX, &mut 0)
    }

    /// As [`Device::discard`], but ends when at least `step` bytes are forgotten: a KV window that
    /// the range has whole is forgotten whole, as its parts could take room. `done` is how many
    /// bytes from `offset` on were forgotten, also if there was an error.
    ///
    /// # Errors
    /// As [`Device::discard`].
    pub fn discard_step(
        &self,
        offset: u64,
        length: u64,
        step: u64,
        done: &mut u64,
    ) -> Result<(), DeviceError> {
        let range = self.inside(Window::Base, offset, length)?;
        let discarded = self.discard_pieces(&range, step, done);
        self.look();
        discarded
    }

    fn discard_pieces(&self, range: &Range<u64>, step: u64, done: &mut u64) -> Result<(), DeviceError> {
        while *done < step.min(range.end - range.start) {
            let at = range.start + *done;
            let before = *done;
            let map = self.map.read();
            let region = Region::of(self, map.tensor_at(at));
            let discarded = region.coding().discard(at..range.end, done);
            let end = at + (*done - before);
            let whole = (end / BLOCK_BYTES as u64).saturating_sub(at.div_ceil(BLOCK_BYTES as u64));
            self.accounts.stats.discarded_blocks.add(whole);
            discarded?;
        }
        Ok(())
    }

    /// Codes what was written to this base range and is staged in open KV windows: the part of the
    /// coherence fence that is the device's.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`]; [`DeviceError::Store`] when the store is full, and then what
    /// was written stays staged.
    pub fn flush(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.inside(Window::Base, offset, length)?;
        for first in self.windows.open_over(&range) {
            let map = self.map.read();
            Region::of(self, owner(&map, first)).coding().close(first)?;
        }
        Ok(())
    }
}
