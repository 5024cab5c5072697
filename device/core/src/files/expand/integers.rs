//! GPTQ's and AWQ's 4-bit integers put together, at bf16.
//!
//! A row of the result is a column of what is stored, so matrices are read whole, as those of
//! experts are, and those read last are held.

use std::sync::Arc;

use super::matrices::{Matrices, Matrix};
use super::{MAX_MATRIX, Together, WIDTH, copy_to, inside};
use crate::device::{Device, DeviceError, TensorView};
use crate::files::FilesError;
use crate::model::Scheme;
use crate::model::scaled::Whole;
use lamina_codec::format::Format;
use lamina_codec::scaled::integers::{Integers, Packed, Parts};

/// Rows that are put together at once.
const ROWS: u64 = 16;
/// Bytes that are worked in for these, at most, at every read. A matrix of 65 536 inputs in groups
/// of 32 takes 3.25 MiB.
const MAX_WORK: usize = 16 << 20;

/// 4-bit integers of the device with their scales and zeros, ready to be read.
pub(in crate::files) struct ExpandedIntegers {
    /// Elements, scales, zeros and the groups of inputs.
    parts: [Arc<TensorView>; 3],
    groups: Option<Arc<TensorView>>,
    integers: Integers,
    /// Bytes of elements, scales and zeros.
    bytes: [usize; 3],
    matrices: Arc<Matrices>,
}

impl ExpandedIntegers {
    /// The tensor that `parts` are, by name: elements, scales, zeros, and the groups of inputs.
    /// Scales have this format, and so much is added to zeros.
    ///
    /// # Errors
    ///
    /// When one of them is no more; a line where it cannot be shown so.
    pub(in crate::files) fn new(
        device: &Device,
        scheme: Scheme,
        whole: &Whole,
        (scale, more): (Format, u8),
        parts: [Option<&str>; 4],
        matrices: &Arc<Matrices>,
    ) -> Result<Result<Self, String>, FilesError> {
        let name = &whole.name;
        let [Some(elements), Some(scales), Some(zeros), groups] = parts else {
            return Ok(Err(format!("{name}: a part of it has no elements")));
        };
        if !matches!(scale, Format::Fp16 | Format::Bf16 | Format::Fp32) {
            return Ok(Err(format!("{name}: scales of {scale} are not shown as bf16")));
        }
        let full = |name: &str| Ok::<_, FilesError>(Arc::new(device.view_of(name, "full")?));
        let (parts, groups) = ([full(elements)?, full(scales)?, full(zeros)?], groups.map(full).transpose()?);
        let wrong = || format!("{name}: its parts on the device have other lengths");
        let &[outputs, inputs] = &whole.shape[..] else { return Ok(Err(wrong())) };
        let width = u64::from(scale.bits()) / 8;
        let row = outputs.checked_mul(width).filter(|row| *row > 0);
        let Some(count) = row.map(|row| parts[1].bytes() / row) else { return Ok(Err(wrong())) };
        let packed = if scheme == Scheme::Gptq { Packed::Inputs } else { Packed::Outputs };
        let (inputs, outputs, count) = (inside(inputs), inside(outputs), inside(count));
        let integers = Integers { packed, inputs, outputs, groups: count, scale, more };
        let Some([elements, scales, zeros, indices]) = integers.bytes() else { return Ok(Err(wrong())) };
        let bytes = [elements, scales, zeros];
        if parts.iter().zip(bytes).any(|(part, bytes)| part.bytes() != bytes as u64)
            || groups.as_ref().is_some_and(|groups| groups.bytes() != indices as u64)
        {
            return Ok(Err(wrong()));
        }
        if groups.is_none() && integers.group_inputs().is_none() {
            return Ok(Err(format!("{name}: of which inputs its {count} groups are nothing says")));
        }
        let all = (elements + scales + zeros + indices) as u64;
        if all > MAX_MATRIX {
            let most = MAX_MATRIX >> 20;
            return Ok(Err(format!("{name}: {all} bytes of integers; that is done up to {most} MiB")));
        }
        let work = integers.work(inside(ROWS).min(outputs)).unwrap_or(usize::MAX);
        if work > MAX_WORK {
            let most = MAX_WORK >> 20;
            return Ok(Err(format!(
                "{name}: {count} groups of {inputs} inputs take {work} bytes to put {ROWS} rows together; that is done up to {most} MiB"
            )));
        }
        Ok(Ok(Self { parts, groups, integers, bytes, matrices: Arc::clone(matrices) }))
    }

    /// Elements; then scales, zeros and groups, one behind the other.
    fn matrix(&self, device: &Device) -> Result<Arc<Matrix>, DeviceError> {
        let which = (self.parts[0].tensor_number(), 0);
        let all = self.parts.iter().chain(&self.groups).map(|part| part.bytes()).sum();
        self.matrices.get(which, all, device.changes(), || {
            let mut elements = vec![0; self.bytes[0]];
            device.read_view_of(&self.parts[0], 0, &mut elements)?;
            let mut scales = Vec::new();
            for part in self.parts[1..].iter().chain(&self.groups) {
                let from = scales.len();
                scales.resize(from + inside(part.bytes()), 0);
                device.read_view_of(part, 0, &mut scales[from..])?;
            }
            Ok(Matrix { elements, scales })
        })
    }
}

impl Together for ExpandedIntegers {
    fn bytes(&self) -> u64 {
        (self.integers.inputs * self.integers.outputs) as u64 * WIDTH
    }

    fn views(&self) -> [Option<&Arc<TensorView>>; 4] {
        let [elements, scales, zeros] = &self.parts;
        [Some(elements), Some(scales), Some(zeros), self.groups.as_ref()]
    }

    fn read(&self, device: &Device, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let matrix = self.matrix(device)?;
        let (scales, rest) = matrix.scales.split_at(self.bytes[1]);
        let (zeros, groups) = rest.split_at(self.bytes[2]);
        let groups = self.groups.as_ref().map(|_| groups);
        let parts = Parts { elements: &matrix.elements, scales, zeros, groups };
        let row = self.integers.inputs as u64 * WIDTH;
        let end = at + out.len() as u64;
        let mut values = Vec::new();
        let mut rows = at / row..at / row;
        while rows.end * row < end {
            rows = rows.end..(rows.end + ROWS).min(end.div_ceil(row));
            values.resize(inside((rows.end - rows.start) * row), 0);
            self.integers.to_bf16(&parts, inside(rows.start)..inside(rows.end), &mut values);
            copy_to(out, at, &values, rows.start * row);
        }
        Ok(())
    }
}
