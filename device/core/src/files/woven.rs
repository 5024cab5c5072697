//! A tensor of quantised blocks that lies on the device in [strands](crate::model::Strand), shown
//! as its file has it.

use std::sync::Arc;

use super::FilesError;
use super::manifest::StrandOf;
use crate::device::{Device, DeviceError, TensorView};

/// Strands, ready to be woven: a view of each, and its bytes of a block.
pub(super) struct Woven {
    strands: Vec<(Arc<TensorView>, u64)>,
    block: u64,
}

impl Woven {
    /// The tensor of `bytes` that these strands make.
    ///
    /// # Errors
    ///
    /// When one of them is no more; a line where they do not make such a tensor.
    pub(super) fn new(
        device: &Device,
        strands: &[StrandOf],
        bytes: u64,
    ) -> Result<Result<Self, String>, FilesError> {
        let mut block = 0_u64;
        let mut views = Vec::with_capacity(strands.len());
        for StrandOf { tensor, width } in strands {
            views.push((Arc::new(device.view_of(tensor, "full")?), *width));
            block = block.saturating_add(*width);
        }
        let blocks = bytes.checked_div(block).unwrap_or(0);
        let fits = |(view, width): &(Arc<TensorView>, u64)| {
            *width > 0 && blocks.checked_mul(*width) == Some(view.bytes())
        };
        if blocks.checked_mul(block) != Some(bytes) || !views.iter().all(fits) {
            let names: Vec<_> = strands.iter().map(|strand| strand.tensor.as_str()).collect();
            return Ok(Err(format!("{} do not make a tensor of {bytes} bytes", names.join(", "))));
        }
        Ok(Ok(Self { strands: views, block }))
    }

    /// Fills `out` with the tensor's bytes from `from` on.
    ///
    /// # Errors
    ///
    /// As [`Device::read_view_of`].
    pub(super) fn read(&self, device: &Device, from: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let end = from + out.len() as u64;
        let blocks = from / self.block..end.div_ceil(self.block);
        let (block, inside) = (size(self.block), size(from % self.block));
        let mut skip = 0;
        let mut strand = Vec::new();
        for (view, bytes) in &self.strands {
            let width = size(*bytes);
            strand.resize(size(blocks.end - blocks.start) * width, 0);
            device.read_view_of(view, blocks.start * bytes, &mut strand)?;
            for (number, own) in strand.chunks_exact(width).enumerate() {
                // Where it would be if `out` began with its first block.
                let begin = number * block + skip;
                let (lost, at) = (inside.saturating_sub(begin).min(width), begin.saturating_sub(inside));
                let own = &own[lost..];
                let fits = own.len().min(out.len().saturating_sub(at));
                if fits > 0 {
                    out[at..at + fits].copy_from_slice(&own[..fits]);
                }
            }
            skip += width;
        }
        Ok(())
    }

    /// The views of its strands.
    pub(super) fn views(&self) -> impl Iterator<Item = &Arc<TensorView>> {
        self.strands.iter().map(|(view, _)| view)
    }
}
