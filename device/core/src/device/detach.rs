//! Giving up a base: a derived tensor becomes one that is stored by itself (decision 26).
//!
//! The rules:
//! * It is marked as leaving meanwhile, as by a removal: stores are coded by themselves, and
//!   nothing is derived from it. Its words, its views and what is derived from it stay.
//! * The tables are told when no block is a difference any more. So whenever the process dies, it
//!   has its base, or needs none.

use std::{ops::ControlFlow, sync::Arc};

use super::{Device, DeviceError, device_image::Change, tables::InTheWay};
use crate::{
    tensor::{Tensor, TensorInfo},
    window::Map,
};

impl Device {
    /// Codes a tensor by itself, so that it has no base. One that has none stays as it is.
    /// `progress` is told of the bytes that are done, and may stop it.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is none of this name; [`DeviceError::Store`] or
    /// [`DeviceError::Quota`] if there is no room; [`DeviceError::Stopped`]. Then it has its base,
    /// and less that is stored as differences.
    pub fn detach_tensor(
        &self,
        name: &str,
        progress: impl Fn(u64) -> ControlFlow<()>,
    ) -> Result<TensorInfo, DeviceError> {
        let find = |map: &Map| Ok(map.listed_tensor(name)?.clone());
        self.in_turn(find, InTheWay::Awaited, |tensor| {
            if tensor.lineage.base().is_some() {
                {
                    let _alone = self.alone();
                    tensor.transition.set_leaving(true);
                }
                // Every store that may have made a difference is done.
                let detached =
                    self.uncode_differences(tensor, progress).and_then(|()| self.give_up_base(tensor));
                self.stay(tensor);
                detached?;
            }
            Ok(tensor.told())
        })
    }

    /// Has a tensor without differences have no base.
    fn give_up_base(&self, tensor: &Arc<Tensor>) -> Result<(), DeviceError> {
        let map = self.alone();
        tensor.lineage.set_detached(true);
        if let Err(why) = self.keep(&map, Change::made(std::slice::from_ref(tensor))) {
            tensor.lineage.set_detached(false);
            return Err(why);
        }
        tensor.leave_base();
        Ok(())
    }
}
