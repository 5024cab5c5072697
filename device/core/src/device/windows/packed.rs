//! Windows of a lossy tensor: packed once they are full.
//!
//! The rules:
//! * A window that is not full is coded as that of any other KV tensor, and exact. Full is said by
//!   its bytes alone, so it is the same after a crash, and for the next worker.
//! * What a full window is packed to is cut in as many pieces as it has blocks, none of them empty:
//!   a block that holds data has a bundle. Each piece has its own check and the flag that says it
//!   is lossy. All pieces are stored before the first is published, as with any window.
//! * Packing depends on the bytes of the window alone, and packing what came back gives the same
//!   values: see [`lamina_codec::packkv`]. So a window may be opened, closed, released and coded
//!   anew as any other, and nothing drifts.
//! * If one piece is lost, all of the window is.
//! * A window with blocks that are lost is not packed, nor is one whose tensor leaves: its blocks
//!   have to stand alone. They hold what the window showed.

use lamina_codec::{
    block::{BlockError, MAX_BUNDLE, Stored},
    kv::{KvError, Shape},
    packkv::PackKvError,
    plane::{self, PlaneMask},
};

use super::{KvStaging, KvWindow, Span};
use crate::{
    device::{Device, DeviceError},
    tensor::TensorError,
};

/// The pieces of a packed window, in order, as they are fetched.
#[derive(Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    count: usize,
}

impl Pieces {
    /// Adds what is stored of the next block, if that is a piece: whether it is.
    pub(super) fn add(&mut self, stored: &Stored, bundle: &[u8; MAX_BUNDLE]) -> Result<bool, BlockError> {
        let Some(piece) = stored.packed_piece(bundle)? else { return Ok(false) };
        self.bytes.extend(piece);
        self.count += 1;
        Ok(true)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The planes in `mask` of the window of so many blocks, all others zero, in the place of what
    /// is in `out`.
    pub(super) fn decode(
        &self,
        shape: &Shape,
        blocks: usize,
        mask: PlaneMask,
        out: &mut [u8],
    ) -> Result<(), BlockError> {
        let wrong = |what| BlockError::Window { what };
        if self.count != blocks {
            return Err(wrong("some of its blocks are pieces of a packed one"));
        }
        let packer =
            shape.packer().ok_or(wrong("pieces of a packed window, in a tensor that is not lossy"))?;
        packer.decode(&self.bytes, out).map_err(|why: PackKvError| {
            tracing::debug!("a packed window does not decode: {why}");
            wrong("its pieces are no packed window")
        })?;
        if mask != PlaneMask::all(shape.format()) {
            for words in out.as_chunks_mut().0 {
                plane::clear_outside(shape.format(), mask, words);
            }
        }
        Ok(())
    }
}

impl KvStaging {
    /// Whether anything that is stored of a window is a piece of a packed one.
    pub(super) fn has_pieces(&self, span: &Span) -> bool {
        let mut entries = span.numbers().filter_map(|block| self.store().entry(block).ok());
        entries.any(|entry| entry.place.is_some_and(|place| place.stored.is_lossy()))
    }

    /// The stored bytes of a window, if it is packed. What is staged of it is coded first.
    fn packed(&self, window: &KvWindow<'_>) -> Result<Option<Vec<u8>>, DeviceError> {
        self.close(window)?;
        let _lock = self.stripe(&window.span).lock();
        let (mut pieces, mut bundle) = (Pieces::default(), [0; MAX_BUNDLE]);
        // A store may have opened it again since; then this is what it was.
        for block in window.span.numbers() {
            let fetched = self.store().fetch(block, |_| PlaneMask(u32::MAX), &mut bundle)?;
            let Some(place) = fetched.entry.place else { return Ok(None) };
            if !pieces.add(&place.stored, &bundle).map_err(|why| DeviceError::Damaged { block, why })? {
                return Ok(None);
            }
        }
        Ok(Some(pieces.bytes))
    }
}

impl Device {
    /// What is stored of window number `window` of a lossy tensor, for who computes with it as it
    /// is ([`lamina_codec::packkv::PackedWindow`]). None if the window is exact: it is not full, or
    /// would be no shorter. What is staged of it is coded first.
    ///
    /// # Errors
    /// [`DeviceError::Tensor`] if there is no such tensor, if it is not lossy or has not so many
    /// windows; [`DeviceError::Store`], [`DeviceError::Damaged`].
    pub fn packed_window(&self, tensor: &str, window: u64) -> Result<Option<Vec<u8>>, DeviceError> {
        let map = self.map.read();
        let tensor = map.listed_tensor(tensor)?;
        let refused = |why: String| {
            let name = tensor.info.name.clone();
            DeviceError::Tensor(TensorError::Kv { name, why: KvError::Lossy { why } })
        };
        let shape = tensor.windows.as_ref().filter(|shape| shape.packer().is_some());
        let shape = shape.ok_or_else(|| refused("it was not asked for".to_owned()))?;
        let blocks = tensor.blocks();
        let count = (blocks.end - blocks.start).div_ceil(shape.blocks() as u64);
        if window >= count {
            return Err(refused(format!("there are {count} windows, and none has the number {window}")));
        }
        self.windows.packed(&KvWindow::of(tensor, shape, blocks.start + window * shape.blocks() as u64))
    }
}
