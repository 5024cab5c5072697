//! Blocks of tensors that are coded against a base, or that are one (decision 26).
//!
//! The rules:
//! * A block is stored as the difference to its base's where that takes fewer granules, else by
//!   itself. A tensor that is leaving stores by themselves alone.
//! * Before a block changes, each block that is a difference to it is coded by itself. So whenever
//!   the process dies, what is a difference is one to the words that are there.
//! * What is a difference to a block that is lost is lost too: it is found so when it is read, or
//!   when the base's block is stored anew.

use std::{ops::Range, sync::Arc};

use parking_lot::RwLockWriteGuard;

use super::{
    DeviceError,
    against::{self, Against},
    blocks::{BlockService, MAX_BATCH},
    blockwise::Blockwise,
    coding::{Class, Coding, FetchError, ReadFrom, Wanted},
    locate,
    scratch::Request,
};
use crate::tensor::{Derived, Tensor};
use lamina_codec::{BLOCK_BYTES, BlockWords};
use lamina_store::cause::Why;

/// How often a block is coded by itself that stays a difference.
const MAX_TRIES: usize = 8;

/// Blocks of a tensor that has a base, or is one.
pub(super) struct Kindred<'d> {
    blocks: &'d BlockService,
    tensor: &'d Arc<Tensor>,
}

impl<'d> Kindred<'d> {
    pub(super) fn new(blocks: &'d BlockService, tensor: &'d Arc<Tensor>) -> Self {
        Self { blocks, tensor }
    }

    /// Does `what` by the class of the tensor's blocks, and counts what that fetched of bases.
    fn coding<T>(
        &self,
        by_itself: bool,
        what: impl FnOnce(Blockwise<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let against = Against::of(self.blocks, self.tensor);
        let by_itself = by_itself || self.tensor.is_leaving();
        let class = Class { base: against.as_ref(), by_itself, ..Class::of(&self.tensor.info) };
        let done = what(Blockwise::new(self.blocks, self.tensor, class));
        self.count(against.as_ref());
        done
    }

    /// Counts what was fetched of bases to code blocks.
    fn count(&self, against: Option<&Against<'_>>) {
        if let Some(against) = against {
            let stats = &self.blocks.accounts.stats;
            let moved = against.moved();
            stats.base_bytes_fetched.add(moved.stored);
            stats.count_for_write(0, 0, &moved);
        }
    }

    /// Codes what is a difference to one of `blocks` by itself, and keeps such from being made
    /// until what this gives is dropped.
    fn let_go(&self, blocks: Range<u64>) -> Result<Option<RwLockWriteGuard<'d, Derived>>, DeviceError> {
        let Some(derived) = self.tensor.lineage.derived_mut() else { return Ok(None) };
        let own = self.tensor.blocks();
        for tensor in derived.iter().filter_map(std::sync::Weak::upgrade) {
            let first = tensor.blocks().start;
            let mut theirs = blocks.clone().map(|block| block - own.start + first);
            let coded = theirs.try_for_each(|block| {
                // One that is lost while its segment moves is found lost the next time.
                for _ in 0..MAX_TRIES {
                    if self.blocks.difference_at(block).is_none() {
                        return Ok(());
                    }
                    let against = Against::of_locked(self.blocks, &tensor);
                    let class = Class { base: against.as_ref(), by_itself: true, ..Class::of(&tensor.info) };
                    let coded = self.blocks.recode(Some(&tensor), class, block);
                    self.count(against.as_ref());
                    coded?;
                }
                if self.blocks.difference_at(block).is_none() {
                    return Ok(());
                }
                let why = "it stays a difference to what is stored over, and cannot be marked as lost";
                Err(DeviceError::BaseLost { block, why: why.to_owned() })
            });
            coded?;
        }
        Ok(Some(derived))
    }
}

impl Coding for Kindred<'_> {
    /// A difference is one to its owner's base.
    fn needs_owner(&self) -> bool {
        self.tensor.lineage.base().is_some()
    }

    fn read(
        &self,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<ReadFrom, FetchError> {
        let _against = Against::of(self.blocks, self.tensor);
        against::read(self.blocks, self.tensor, wanted, words, request)
    }

    fn write(&self, at: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        let (block, inside) = locate(at);
        let whole = if inside == 0 { data.len() / BLOCK_BYTES } else { 0 };
        let count = whole.clamp(1, MAX_BATCH) as u64;
        let _held = self.let_go(block..block + count)?;
        self.coding(false, |blocks| blocks.write(at, data, done))
    }

    fn write_pieces(
        &self,
        block: u64,
        pieces: &[(usize, &[u8])],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        let _held = self.let_go(block..block + 1)?;
        self.coding(false, |blocks| blocks.write_pieces(block, pieces, done))
    }

    fn discard(&self, range: Range<u64>, done: &mut u64) -> Result<(), DeviceError> {
        let block = locate(range.start).0;
        let _held = self.let_go(block..block + 1)?;
        self.coding(false, |blocks| blocks.discard(range, done))
    }

    /// Nothing is staged.
    fn close(&self, _: u64) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn recode(&self, block: u64) -> Result<(), DeviceError> {
        self.coding(false, |blocks| blocks.recode(block))
    }

    /// By itself, as all that is read without an owner.
    fn release(&self, block: u64) -> Result<(), DeviceError> {
        if self.blocks.difference_at(block).is_none() {
            return Ok(());
        }
        self.coding(true, |blocks| blocks.recode(block))
    }

    /// It alone is lost. What is a difference to it is found to be when that is read.
    fn recover(&self, block: u64) -> Result<u64, DeviceError> {
        Ok(block + 1)
    }

    fn poison(&self, blocks: Range<u64>, why: &Why) -> Result<u64, DeviceError> {
        let _held = self.let_go(blocks.start..blocks.start + 1)?;
        self.coding(false, |coding| coding.poison(blocks, why))
    }

    fn clear_poison(&self, blocks: Range<u64>) -> Result<u64, DeviceError> {
        let _held = self.let_go(blocks.start..blocks.start + 1)?;
        self.coding(false, |coding| coding.clear_poison(blocks))
    }
}
