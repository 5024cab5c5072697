//! What is put together at bf16, at fp8.

use std::sync::Arc;

use super::{Together, WIDTH, inside};
use crate::device::{Device, DeviceError, TensorView};
use lamina_codec::format::Format;
use lamina_codec::view::View;
use lamina_codec::{BLOCK_BYTES, BlockWords, plane};

/// Elements that are converted at once.
const AT_ONCE: usize = BLOCK_BYTES / 2;

/// A tensor that is put together at bf16, and a view of bf16 whose elements are bytes.
pub(in crate::files) struct Converted {
    whole: Arc<dyn Together>,
    view: View,
}

impl Converted {
    /// `whole` as `view` shows what is bf16.
    pub(in crate::files) fn new(whole: Arc<dyn Together>, view: View) -> Self {
        Self { whole, view }
    }
}

impl Together for Converted {
    fn bytes(&self) -> u64 {
        self.whole.bytes() / WIDTH
    }

    fn views(&self) -> [Option<&Arc<TensorView>>; 4] {
        self.whole.views()
    }

    fn read(&self, device: &Device, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let mut values = vec![0; out.len() * inside(WIDTH)];
        self.whole.read(device, at * WIDTH, &mut values)?;
        let (mut words, mut shown): (BlockWords, _) = ([0; BLOCK_BYTES], [0; AT_ONCE]);
        for (values, out) in values.chunks(BLOCK_BYTES).zip(out.chunks_mut(AT_ONCE)) {
            words[..values.len()].copy_from_slice(values);
            plane::clear_outside(Format::Bf16, self.view.mask(), &mut words);
            // A view gives eight elements or a multiple of them.
            self.view.render_to(&mut words, 0, &mut shown[..out.len().next_multiple_of(8)]);
            out.copy_from_slice(&shown[..out.len()]);
        }
        Ok(())
    }
}
