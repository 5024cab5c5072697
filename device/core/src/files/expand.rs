//! A block-scaled tensor put together, at bf16 or fp8: what a file shows of it in place of its
//! parts.
//!
//! Bytes are computed when they are read. In the order of the elements that takes the elements and
//! scales under them. At fp8 the bf16 of each element is converted, as the view of a bf16 tensor
//! converts it. Of experts whose last two dimensions are exchanged a row of the result has an
//! element of every row of an expert: so one expert's elements are read whole, as they are stored,
//! and those read last are held for those who read on.

mod converted;
mod integers;
mod matrices;

use std::ops::Range;
use std::sync::Arc;

pub(super) use self::converted::Converted;
pub(super) use self::integers::ExpandedIntegers;
pub use self::matrices::Matrices;
use self::matrices::Matrix;
use super::FilesError;
use crate::device::{Device, DeviceError, TensorView};
use crate::model::scaled::{ScaledTensor, Scheme, Whole};
use lamina_codec::format::Format;
use lamina_codec::scaled::{MX_BLOCK, NV_BLOCK, Scaled};
use lamina_codec::view::Kind;

/// The most bytes of a matrix that is held: elements and scales.
const MAX_MATRIX: u64 = 64 << 20;
/// Blocks of elements that are worked on at once.
const AT_ONCE: u64 = 256;
/// Bytes of an element of the result.
const WIDTH: u64 = 2;

/// Whether a view shows block-scaled tensors of a scheme put together. Elements of MXFP8 are fp8
/// already, and at fp8 they stay beside their scales.
pub(super) fn expands(kind: Kind, scheme: Scheme) -> bool {
    match kind {
        Kind::Converted { target: Format::Bf16, .. } => true,
        Kind::Converted { target: Format::Fp8E4m3fn | Format::Fp8E5m2, .. } => scheme != Scheme::Mxfp8,
        _ => false,
    }
}

/// A tensor of several parts that a file shows as one.
pub(super) trait Together: Send + Sync {
    fn bytes(&self) -> u64;

    /// The views of its parts, by which it is counted what is read.
    fn views(&self) -> [Option<&Arc<TensorView>>; 4];

    /// Fills `out` from byte `at` on, which does not pass the end.
    ///
    /// # Errors
    ///
    /// As [`Device::read_view_of`].
    fn read(&self, device: &Device, at: u64, out: &mut [u8]) -> Result<(), DeviceError>;
}

/// A block-scaled tensor of the device, ready to be read.
pub(super) struct Expanded {
    elements: Arc<TensorView>,
    scales: Arc<TensorView>,
    scaled: Scaling,
    /// Elements that share a scale, and their bytes.
    block: u64,
    block_bytes: u64,
    bytes: u64,
    exchanged: Option<Exchanged>,
}

/// How elements are scaled.
enum Scaling {
    /// By the scales alone.
    Own(Scaled),
    /// By this factor as well. It is read when it is wanted, as the elements are.
    Factor(Arc<TensorView>),
}

/// Matrices whose rows are the result's columns.
struct Exchanged {
    /// Rows of one as it is stored, columns of the result.
    rows: u64,
    /// Columns of one as it is stored, rows of the result.
    columns: u64,
    matrices: Arc<Matrices>,
}

impl Expanded {
    /// The tensor that `parts` are, by name: elements, scales, and a factor of all.
    ///
    /// # Errors
    ///
    /// When one of them is no more; a line where it cannot be shown so.
    pub(super) fn new(
        device: &Device,
        tensor: &ScaledTensor,
        whole: &Whole,
        format: Format,
        parts: [Option<&str>; 3],
        matrices: &Arc<Matrices>,
    ) -> Result<Result<Self, String>, FilesError> {
        let [Some(elements), Some(scales), third] = parts else {
            return Ok(Err(format!("{}: a part of it has no elements", whole.name)));
        };
        let full = |name: &str| Ok::<_, FilesError>(Arc::new(device.view_of(name, "full")?));
        let (elements, scales) = (full(elements)?, full(scales)?);
        let own = |format| Scaling::Own(Scaled::mx(format));
        let (scaled, block, block_bytes) = match (tensor.scheme, third) {
            (Scheme::Mxfp4, _) => (own(Format::Fp4E2m1), MX_BLOCK as u64, MX_BLOCK as u64 / 2),
            // On the device elements of six bits have a byte each too.
            (Scheme::Mxfp6 | Scheme::Mxfp8, _) => (own(format), MX_BLOCK as u64, MX_BLOCK as u64),
            (Scheme::Nvfp4, Some(all)) => (Scaling::Factor(full(all)?), NV_BLOCK as u64, NV_BLOCK as u64 / 2),
            (scheme, _) => return Ok(Err(format!("{}: {scheme} is not shown as bf16", whole.name))),
        };
        let wrong = || format!("{}: its parts on the device have other lengths", whole.name);
        let count = whole.shape.iter().try_fold(1_u64, |product, &n| product.checked_mul(n));
        let Some(bytes) = count.and_then(|count| count.checked_mul(WIDTH)) else { return Ok(Err(wrong())) };
        let blocks = scales.bytes();
        if blocks.checked_mul(block_bytes) != Some(elements.bytes())
            || blocks.checked_mul(block * WIDTH) != Some(bytes)
        {
            return Ok(Err(wrong()));
        }
        let exchanged = match (whole.exchanged, &whole.shape[..]) {
            (true, &[experts, columns, rows]) => {
                let matrix = (elements.bytes() + scales.bytes()) / experts.max(1);
                if matrix > MAX_MATRIX {
                    let most = MAX_MATRIX >> 20;
                    return Ok(Err(format!(
                        "{}: rows and columns are exchanged in matrices of {matrix} bytes; that is done up to {most} MiB",
                        whole.name
                    )));
                }
                Some(Exchanged { rows, columns, matrices: Arc::clone(matrices) })
            }
            _ => None,
        };
        Ok(Ok(Self { elements, scales, scaled, block, block_bytes, bytes, exchanged }))
    }

    /// In the order of the elements.
    fn read_rows(
        &self,
        device: &Device,
        scaled: &Scaled,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        let block = self.block * WIDTH;
        let end = at + out.len() as u64;
        let mut values = Vec::new();
        let mut blocks = at / block..at / block;
        while blocks.end * block < end {
            blocks = blocks.end..(blocks.end + AT_ONCE).min(end.div_ceil(block));
            let Matrix { elements, scales } = self.read_parts(device, &blocks)?;
            values.resize(scales.len() * inside(block), 0);
            scaled.to_bf16(&elements, &scales, &mut values);
            copy_to(out, at, &values, blocks.start * block);
        }
        Ok(())
    }

    /// The elements and scales of blocks.
    fn read_parts(&self, device: &Device, blocks: &Range<u64>) -> Result<Matrix, DeviceError> {
        let count = blocks.end - blocks.start;
        let mut elements = vec![0; inside(count * self.block_bytes)];
        let mut scales = vec![0; inside(count)];
        device.read_view_of(&self.elements, blocks.start * self.block_bytes, &mut elements)?;
        device.read_view_of(&self.scales, blocks.start, &mut scales)?;
        Ok(Matrix { elements, scales })
    }

    /// Rows of the result, each a column of what is stored.
    fn read_columns(
        &self,
        device: &Device,
        scaled: &Scaled,
        exchanged: &Exchanged,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        let Exchanged { rows, columns, .. } = *exchanged;
        let row_bytes = rows * WIDTH;
        let end = at + out.len() as u64;
        let mut begin = at;
        while begin < end {
            let number = begin / row_bytes / columns;
            let first = number * columns;
            let matrix = self.matrix(device, exchanged, number)?;
            let stop = end.min((first + columns) * row_bytes);
            let wanted = begin / row_bytes..stop.div_ceil(row_bytes);
            let inner = wanted.start - first..wanted.end - first;
            let values = self.columns_of(scaled, &matrix, exchanged, &inner);
            copy_to(out, at, &values, wanted.start * row_bytes);
            begin = stop;
        }
        Ok(())
    }

    /// These columns of a matrix, as rows.
    fn columns_of(
        &self,
        scaled: &Scaled,
        matrix: &Matrix,
        exchanged: &Exchanged,
        columns: &Range<u64>,
    ) -> Vec<u8> {
        let per_row = exchanged.columns / self.block;
        let blocks = columns.start / self.block..columns.end.div_ceil(self.block);
        let bytes = inside(self.block_bytes);
        let mut row_values = vec![0; inside((blocks.end - blocks.start) * self.block * WIDTH)];
        let rows = inside(exchanged.rows);
        let mut values = vec![[0; 2]; inside(columns.end - columns.start) * rows];
        for row in 0..rows {
            let before = row * inside(per_row);
            let blocks = before + inside(blocks.start)..before + inside(blocks.end);
            let elements = &matrix.elements[blocks.start * bytes..blocks.end * bytes];
            scaled.to_bf16(elements, &matrix.scales[blocks], &mut row_values);
            let wanted = row_values.as_chunks().0.iter().skip(inside(columns.start % self.block));
            for (column, value) in values.chunks_exact_mut(rows).zip(wanted) {
                column[row] = *value;
            }
        }
        values.into_flattened()
    }

    /// A matrix, from what is held or the device.
    fn matrix(
        &self,
        device: &Device,
        exchanged: &Exchanged,
        number: u64,
    ) -> Result<Arc<Matrix>, DeviceError> {
        let blocks = exchanged.rows * (exchanged.columns / self.block);
        let which = (self.elements.tensor_number(), number);
        exchanged.matrices.get(which, blocks * (self.block_bytes + 1), device.changes(), || {
            self.read_parts(device, &(number * blocks..(number + 1) * blocks))
        })
    }
}

impl Together for Expanded {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn views(&self) -> [Option<&Arc<TensorView>>; 4] {
        [Some(&self.elements), Some(&self.scales), None, None]
    }

    fn read(&self, device: &Device, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let factor;
        let scaled = match &self.scaled {
            Scaling::Own(scaled) => scaled,
            Scaling::Factor(all) => {
                let mut bytes = [0; 4];
                device.read_view_of(all, 0, &mut bytes)?;
                factor = Scaled::nvfp4(f32::from_le_bytes(bytes));
                &factor
            }
        };
        match &self.exchanged {
            None => self.read_rows(device, scaled, at, out),
            Some(exchanged) => self.read_columns(device, scaled, exchanged, at, out),
        }
    }
}

/// Copies what `out`, which begins at `at`, has of `bytes`, which begin at `begin`.
fn copy_to(out: &mut [u8], at: u64, bytes: &[u8], begin: u64) {
    let shown = begin.max(at)..(begin + bytes.len() as u64).min(at + out.len() as u64);
    let from = &bytes[inside(shown.start - begin)..inside(shown.end - begin)];
    out[inside(shown.start - at)..inside(shown.end - at)].copy_from_slice(from);
}

fn inside(at: u64) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}

#[cfg(test)]
pub(super) mod tests;
