//! Which tensors may be coded against which, as the map has it.

use std::sync::Arc;

use super::{Device, DeviceError, tables::Checked};
use crate::{
    tensor::{self, NoBase, Tensor, TensorError, TensorSpec},
    window::Map,
};
use lamina_store::{Store, entry::Version, mode::Mode};

impl Device {
    /// What a tensor is to be coded against, if that can be.
    pub(super) fn base_of(&self, map: &Map, checked: &Checked) -> Result<Option<Arc<Tensor>>, TensorError> {
        let Checked { info, partition, .. } = checked;
        let Some(name) = &info.base else { return Ok(None) };
        let refused = |why| TensorError::Base { name: info.name.clone(), base: name.clone(), why };
        self.holds_differences().map_err(refused)?;
        let base = map.listed_tensor(name).map_err(|_| refused(NoBase::Unknown))?;
        if base.is_leaving() {
            return Err(refused(NoBase::Leaving));
        }
        match tensor::refused_base(info, *partition, base) {
            None => Ok(Some(base.clone())),
            Some(why) => Err(refused(why)),
        }
    }

    /// That a tensor could be coded against the base that `spec` names.
    ///
    /// # Errors
    /// [`TensorError::Base`], and what is wrong with the rest.
    pub fn may_derive(&self, spec: &TensorSpec) -> Result<(), TensorError> {
        self.base_of(&self.map(), &self.check(spec.clone())?).map(drop)
    }

    /// That it can have tensors that are coded against others.
    ///
    /// # Errors
    /// Why not.
    pub fn holds_differences(&self) -> Result<(), NoBase> {
        let version = self.coded_store().map(Store::version).unwrap_or_default();
        may_have(self.config.mode, version)
    }

    /// That no tensor is coded against the one of this name, or there is none.
    ///
    /// # Errors
    /// [`TensorError::IsBase`].
    pub fn is_no_base(&self, name: &str) -> Result<(), DeviceError> {
        let map = self.map();
        let found = map.tensor(name).ok();
        Ok(found.map_or(Ok(()), |tensor| is_no_base(tensor))?)
    }
}

/// That a device of this mode, whose entries are of this version, stores differences.
pub(super) const fn may_have(mode: Mode, version: Version) -> Result<(), NoBase> {
    match mode {
        Mode::Plain | Mode::GComp => Err(NoBase::Mode { mode }),
        Mode::Trace if version.has_differences() => Ok(()),
        Mode::Trace => Err(NoBase::Version),
    }
}

/// That no tensor is coded against this one.
pub(super) fn is_no_base(tensor: &Tensor) -> Result<(), TensorError> {
    if !tensor.lineage.is_base() {
        return Ok(());
    }
    let (name, derived) = (tensor.info.name.clone(), tensor.lineage.names());
    Err(TensorError::IsBase { name, derived })
}
