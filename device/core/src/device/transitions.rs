//! Coding anew what a tensor that comes or goes covers. The map is held for one unit at a time.

use std::{ops::ControlFlow, sync::Arc};

use super::{
    Device, DeviceError,
    charge::Charge,
    coding::{Region, is_current, owner},
};
use crate::{tensor::Tensor, window::Map};
use lamina_codec::{BLOCK_BYTES, kv::Shape};

/// Blocks between two words of how far a tensor is.
const BLOCKS_A_STEP: u64 = 256;

impl Device {
    /// Codes the windows of a tensor that is being made, where they hold data, and tells how far
    /// that came.
    pub(super) fn code_windows(
        &self,
        tensor: &Arc<Tensor>,
        shape: &Shape,
        reached: &mut u64,
    ) -> Result<(), DeviceError> {
        let blocks = tensor.blocks();
        while let Some(touched) = self.blocks.touched((*reached).max(blocks.start)..blocks.end) {
            *reached = behind(tensor, shape, touched.start);
            let map = self.map.read();
            if !is_current(&map, tensor, touched.start) {
                return Ok(());
            }
            Region::of(self, Some(tensor)).coding().recode(touched.start)?;
        }
        Ok(())
    }

    /// Codes the windows of a tensor that is leaving block by block, so that its blocks can be read
    /// without it. What is lost stays poisoned.
    pub(super) fn uncode_windows(&self, tensor: &Arc<Tensor>, shape: &Shape) -> Result<(), DeviceError> {
        let blocks = tensor.blocks();
        let release = |block| {
            let _map = self.map.read();
            Region::of(self, Some(tensor)).coding().release(block)
        };
        // An open one may hold what the store has nothing of yet.
        self.windows.open_in(blocks.clone()).into_iter().try_for_each(release)?;
        let mut at = blocks.start;
        while let Some(touched) = self.blocks.touched(at..blocks.end) {
            at = behind(tensor, shape, touched.start);
            release(touched.start)?;
        }
        Ok(())
    }

    /// Codes what a tensor that is leaving has as differences by itself, so that its blocks can be
    /// read without it. `progress` is told of the bytes behind it, and may stop it.
    pub(super) fn uncode_differences(
        &self,
        tensor: &Arc<Tensor>,
        progress: impl Fn(u64) -> ControlFlow<()>,
    ) -> Result<(), DeviceError> {
        let blocks = tensor.blocks();
        let told =
            |at: u64| match progress(((at - blocks.start) * BLOCK_BYTES as u64).min(tensor.info.length)) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(DeviceError::Stopped { tensor: tensor.info.name.clone() }),
            };
        let mut at = blocks.start;
        while let Some(touched) = self.blocks.touched(at..blocks.end) {
            at = touched.end;
            for block in touched {
                let map = self.map.read();
                Region::of(self, Some(tensor)).coding().release(block)?;
                drop(map);
                if (block - blocks.start).is_multiple_of(BLOCKS_A_STEP) {
                    told(block)?;
                }
            }
        }
        told(blocks.end)
    }

    /// Whether any window of a tensor is open.
    pub(super) fn has_open_windows(&self, tensor: &Tensor) -> bool {
        self.windows.has_open(tensor)
    }

    /// Codes `block` anew as its owner's blocks are coded, if it holds data and is not part of a KV
    /// window. The caller holds `map`, and so who owns the block.
    pub(super) fn recode(&self, map: &Map, block: u64) -> Result<(), DeviceError> {
        let region = Region::of(self, owner(map, block));
        if region.is_windowed() { Ok(()) } else { region.coding().recode(block) }
    }

    /// What `block` is charged now.
    pub(super) fn charged(&self, block: u64) -> Charge {
        self.blocks.charged(block)
    }

    /// Recovers the windows that have entries that do not check, so that all that is lost with
    /// these is listed.
    pub(super) fn recover_windows(&self) -> Result<(), DeviceError> {
        let Some(store) = self.coded_store() else { return Ok(()) };
        let map = self.map.read();
        let mut behind = 0;
        for block in store.losses().listed_in(0..u64::MAX) {
            if block >= behind {
                behind = Region::of(self, owner(&map, block)).coding().recover(block)?;
            }
        }
        Ok(())
    }
}

/// The first block behind the window of `tensor` that holds `block`.
fn behind(tensor: &Tensor, shape: &Shape, block: u64) -> u64 {
    let (begin, size) = (tensor.info.dpa / BLOCK_BYTES as u64, shape.blocks() as u64);
    (begin + ((block - begin) / size + 1) * size).min(tensor.blocks().end)
}
