//! Views without a place in the views window: rendered where somebody asks for their bytes.
//!
//! No directory and no list names them, and an image keeps nothing of them. Their reads are counted
//! with all reads of views. One lasts as long as its tensor is there with the same length.

use std::sync::Arc;

use super::{Device, DeviceError, Window, coding::FetchError, scratch::Request};
use crate::{
    tensor::TensorError,
    window::{Alias, Counted, ViewInfo},
};
use lamina_codec::view::View;

/// A view without a place in the views window.
pub struct UnlistedView {
    alias: Alias,
}

impl UnlistedView {
    /// What it shows; its offset means nothing.
    pub fn info(&self) -> &ViewInfo {
        &self.alias.info
    }
}

impl Device {
    /// A view of a tensor that has no place in the views window. Nothing is changed or stored.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is no such tensor, [`DeviceError::View`] if its format
    /// cannot give the view, [`DeviceError::NoRoomForView`] if 64 bits do not hold its length.
    pub fn unlisted_view(&self, tensor: &str, spelling: &str) -> Result<UnlistedView, DeviceError> {
        let tensor = Arc::clone(self.map().listed_tensor(tensor)?);
        let view = View::parse(tensor.info.format, spelling)
            .map_err(|why| DeviceError::View { tensor: tensor.info.name.clone(), why })?;
        let length = view.bytes_for(tensor.info.elements).ok_or_else(|| DeviceError::NoRoomForView {
            tensor: tensor.info.name.clone(),
            view: view.to_string(),
            length: u64::MAX,
            largest: 0,
        })?;
        let number = tensor.number;
        let alias = Alias::new((tensor, number), view, (0, length), Arc::<Counted>::default());
        Ok(UnlistedView { alias })
    }

    /// Fills `out` from byte `offset` of a view on.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`] past its end; [`DeviceError::Tensor`] if its tensor is no more,
    /// or has another length; as [`Device::read_views`].
    pub fn read_unlisted(&self, view: &UnlistedView, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let (alias, length, size) = (&view.alias, out.len() as u64, view.alias.info.length);
        let end = offset.checked_add(length).filter(|end| *end <= size);
        let end = end.ok_or(DeviceError::PastWindow { window: Window::Views, offset, length, size })?;
        if length == 0 {
            return Ok(());
        }
        let mut request = Request::new(&self.blocks.pool);
        loop {
            if !self.map().has(&alias.tensor) {
                return Err(TensorError::Unknown { name: alias.info.tensor.clone() }.into());
            }
            match self.read_alias(alias, &(offset..end), out, &mut request) {
                Ok(()) => return Ok(()),
                Err(FetchError::Stale) => {}
                Err(FetchError::Failed(why) | FetchError::Damaged { why, .. }) => return Err(why),
            }
        }
    }
}
