//! Blocks that are coded each by itself, in address order: weights, and memory that no tensor owns.

use std::ops::Range;

use super::{
    DeviceError,
    blocks::{BlockService, MAX_BATCH},
    coding::{Class, Coding, FetchError, ReadFrom, Wanted},
    locate,
    scratch::Request,
};
use crate::tensor::Tensor;
use lamina_codec::{BLOCK_BYTES, BlockWords, Codec, format::Format};
use lamina_store::cause::Why;

/// Blocks of one owner.
pub(super) struct Blockwise<'d> {
    blocks: &'d BlockService,
    owner: Option<&'d Tensor>,
    class: Class<'d>,
}

impl<'d> Blockwise<'d> {
    /// Blocks that no tensor owns.
    pub(super) fn opaque(blocks: &'d BlockService, codec: Codec) -> Self {
        Self {
            blocks,
            owner: None,
            class: Class { format: Format::Opaque, codec, base: None, by_itself: true },
        }
    }

    /// Blocks of a tensor, which are of this class.
    pub(super) fn new(blocks: &'d BlockService, tensor: &'d Tensor, class: Class<'d>) -> Self {
        Self { blocks, owner: Some(tensor), class }
    }
}

impl Coding for Blockwise<'_> {
    fn needs_owner(&self) -> bool {
        false
    }

    fn read(
        &self,
        wanted: &Wanted<'_>,
        words: &mut BlockWords,
        request: &mut Request<'_>,
    ) -> Result<ReadFrom, FetchError> {
        match self.blocks.read(self.class, wanted, words, request)? {
            ReadFrom::Difference => Err(self.blocks.without_base(wanted.block)),
            from => Ok(from),
        }
    }

    fn write(&self, at: u64, data: &[u8], done: &mut usize) -> Result<(), DeviceError> {
        let (block, inside) = locate(at);
        let whole = data.as_chunks().0;
        if inside == 0 && whole.len() > 1 {
            let whole = &whole[..whole.len().min(MAX_BATCH)];
            return self.blocks.write_all(self.owner, self.class, block, whole, done);
        }
        let length = (BLOCK_BYTES - inside).min(data.len());
        self.write_pieces(block, &[(inside, &data[..length])], done)
    }

    fn write_pieces(
        &self,
        block: u64,
        pieces: &[(usize, &[u8])],
        done: &mut usize,
    ) -> Result<(), DeviceError> {
        self.blocks.write(self.owner, self.class, block, pieces)?;
        *done += pieces.iter().map(|(_, data)| data.len()).sum::<usize>();
        Ok(())
    }

    fn discard(&self, range: Range<u64>, done: &mut u64) -> Result<(), DeviceError> {
        let (block, inside) = locate(range.start);
        let length = (BLOCK_BYTES - inside) as u64;
        let length = length.min(range.end - range.start);
        // What never held anything takes no room to forget.
        if !self.blocks.store().is_some_and(|store| store.is_hole(block)) {
            let zeros = [0; BLOCK_BYTES];
            let zeros = &zeros[..usize::try_from(length).expect("at most a block")];
            self.blocks.write(self.owner, self.class, block, &[(inside, zeros)])?;
        }
        *done += length;
        Ok(())
    }

    /// Nothing is staged.
    fn close(&self, _: u64) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn recode(&self, block: u64) -> Result<(), DeviceError> {
        self.blocks.recode(self.owner, self.class, block)
    }

    /// A block by itself says how it is coded.
    fn release(&self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    /// It alone is lost.
    fn recover(&self, block: u64) -> Result<u64, DeviceError> {
        Ok(block + 1)
    }

    fn poison(&self, blocks: Range<u64>, why: &Why) -> Result<u64, DeviceError> {
        self.blocks.lose(self.owner, blocks.start, why, |_| true)?;
        Ok(blocks.start + 1)
    }

    fn clear_poison(&self, blocks: Range<u64>) -> Result<u64, DeviceError> {
        self.blocks.clear_poison(self.owner, self.class, blocks.start)?;
        Ok(blocks.start + 1)
    }
}
