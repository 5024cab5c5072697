//! Views of tensors that have no place in the views window: what files show of a tensor.
//!
//! They are not listed, no image keeps them, and each counts what is read through it.

use std::{ops::Range, sync::Arc};

use super::{Device, DeviceError, Window, coding::FetchError, scratch::Request};
use crate::{
    tensor::TensorError,
    window::{Alias, ViewInfo},
};
use lamina_codec::{
    block::{MAX_BUNDLE, Stored},
    format::Format,
    plane::PlaneMask,
    view::View,
};

/// A view of a tensor, wherever it is shown.
pub struct TensorView {
    alias: Alias,
}

impl TensorView {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.alias.info.length
    }

    /// The tensor's format.
    pub fn format(&self) -> Format {
        self.alias.view.format()
    }

    /// What it shows.
    pub fn view(&self) -> &View {
        &self.alias.view
    }

    /// What is told of it; its offset says nothing.
    pub fn info(&self) -> &ViewInfo {
        &self.alias.info
    }

    /// Bytes that were given to readers of it, and stored bytes that were fetched for that.
    pub fn read_and_fetched(&self) -> (u64, u64) {
        (self.alias.traffic.bytes.get(), self.alias.traffic.stored.get())
    }

    /// The number of its tensor, unlike that of any other since the device was opened.
    pub(crate) fn tensor_number(&self) -> u64 {
        self.alias.tensor.number
    }

    /// Bytes that its tensor is charged in the store.
    pub fn charged(&self) -> u64 {
        self.alias.tensor.stored.get()
    }

    /// Where its tensor begins in the base window, and that one's bytes.
    pub fn base(&self) -> (u64, u64) {
        (self.alias.tensor.info.dpa, self.alias.tensor.info.length)
    }
}

impl Device {
    /// A view of a tensor, without a place in the views window. It is of the tensor that has the
    /// name now.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none, [`DeviceError::View`] if its format cannot give
    /// the view.
    pub fn view_of(&self, tensor: &str, spelling: &str) -> Result<TensorView, DeviceError> {
        let tensor = Arc::clone(self.map().tensor(tensor)?);
        let named = |why| DeviceError::View { tensor: tensor.info.name.clone(), why };
        let view = View::parse(tensor.info.format, spelling).map_err(named)?;
        let length = view.bytes_for(tensor.info.elements);
        let length = length.ok_or(DeviceError::PastWindow {
            window: Window::Views,
            offset: 0,
            length: u64::MAX,
            size: self.views_bytes(),
        })?;
        Ok(TensorView { alias: Alias::new((tensor, 0), view, (0, length), Arc::default()) })
    }

    /// Fills `out` with bytes of a view from `at` on.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`], [`DeviceError::Tensor`] if the tensor is no more; as
    /// [`Device::read_base`].
    pub fn read_view_of(&self, view: &TensorView, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let (length, size) = (out.len() as u64, view.bytes());
        let Some(end) = at.checked_add(length).filter(|end| *end <= size) else {
            return Err(DeviceError::PastWindow { window: Window::Views, offset: at, length, size });
        };
        let mut request = Request::new(&self.blocks.pool);
        loop {
            let map = self.map();
            if !map.has(&view.alias.tensor) {
                let name = view.alias.tensor.info.name.clone();
                return Err(TensorError::Unknown { name }.into());
            }
            if out.is_empty() {
                return Ok(());
            }
            match self.read_alias(&map, &view.alias, &(at..end), out, &mut request) {
                Ok(()) => return Ok(()),
                // The map has changed meanwhile.
                Err(FetchError::Stale) => {}
                Err(FetchError::Failed(why) | FetchError::Damaged { why, .. }) => return Err(why),
            }
        }
    }

    /// Bytes that are stored of what `range` of a view shows: those that reading it once fetches,
    /// of bases too.
    ///
    /// # Errors
    /// [`DeviceError::Store`] where the index is damaged.
    pub fn stored_of(&self, view: &TensorView, range: Range<u64>) -> Result<u64, DeviceError> {
        let range = range.start..range.end.min(view.bytes());
        let Some(under) = view.alias.base_under(range) else { return Ok(0) };
        let Some(store) = self.coded_store() else { return Ok(under.end - under.start) };
        let (mask, format) = (view.alias.view.mask(), view.format());
        let mut bundle = Box::new([0; MAX_BUNDLE]);
        let (mut at, end) = (lamina_store::blocks(under.start), lamina_store::blocks(under.end));
        let mut bytes = 0;
        while let Some(touched) = store.touched(at..end) {
            at = touched.end;
            for block in touched {
                let select = |stored: &Stored| {
                    if super::blocks::fits(stored, format) { mask } else { PlaneMask(u32::MAX) }
                };
                let (mut tensor, mut block) = (&view.alias.tensor, block);
                loop {
                    let fetched = store.fetch(block, select, &mut bundle)?;
                    bytes += fetched.bytes;
                    let is_difference = fetched.entry.place.is_some_and(|place| place.difference);
                    let Some(base) = tensor.lineage.base().filter(|_| is_difference) else { break };
                    (tensor, block) = (base, block - tensor.blocks().start + base.blocks().start);
                }
            }
        }
        Ok(bytes)
    }

    /// A number that is another one after bytes of the base window were changed.
    pub fn changes(&self) -> u64 {
        let stats = &self.accounts.stats;
        let changes = [&stats.base_writes, &stats.blocks_written, &stats.discarded_blocks];
        changes.into_iter().fold(0, |sum, counter| sum.wrapping_add(counter.get()))
    }

    /// Where a tensor begins in the base window, and its bytes, whether it is listed or not.
    pub fn place_of(&self, tensor: &str) -> Option<(u64, u64)> {
        let map = self.map();
        let info = &map.tensor(tensor).ok()?.info;
        Some((info.dpa, info.length))
    }

    /// The names of the tensors that no list names, by DPA.
    pub fn hidden_tensors(&self) -> Vec<String> {
        let map = self.map();
        let hidden = map.tensors().filter(|tensor| tensor.is_hidden());
        hidden.map(|tensor| tensor.info.name.clone()).collect()
    }
}
