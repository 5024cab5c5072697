//! What every view must hold: the reference applied to the model file, sharing no code with the
//! device.

use std::{
    collections::BTreeMap,
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use lamina_reference::Format;
use safetensors::{Dtype, tensor::Metadata};
use sha2::{Digest, Sha256};

use crate::files::open_regular;

/// The tensors of some checkpoints.
pub struct Judge {
    tensors: BTreeMap<String, Tensor>,
    notes: BTreeMap<String, String>,
}

struct Tensor {
    path: PathBuf,
    offset: u64,
    /// Bytes in the file.
    length: usize,
    format: Format,
    elements: u64,
    /// The outermost dimension first.
    dimensions: Vec<u64>,
    /// Whether elements have six bits in the file, the first in the lowest, and a byte each on the
    /// device.
    is_packed: bool,
}

impl Judge {
    /// Reads the headers of `models`.
    ///
    /// # Errors
    /// When one is no safetensors file.
    pub fn new(models: &[PathBuf]) -> Result<Self> {
        let mut judge = Self { tensors: BTreeMap::new(), notes: BTreeMap::new() };
        for path in models {
            judge
                .read_header(path)
                .with_context(|| format!("cannot read the tensors of {}", path.display()))?;
        }
        Ok(judge)
    }

    /// The text that the first checkpoint with such a text has under this name in its metadata.
    pub fn note(&self, name: &str) -> Option<&str> {
        self.notes.get(name).map(String::as_str)
    }

    /// The format and the elements of a tensor.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn shape(&self, tensor: &str) -> Result<(Format, u64)> {
        let tensor = self.tensor(tensor)?;
        Ok((tensor.format, tensor.elements))
    }

    /// The dimensions of a tensor as its file has them, the outermost first.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn dimensions(&self, tensor: &str) -> Result<&[u64]> {
        Ok(&self.tensor(tensor)?.dimensions)
    }

    /// The names of all tensors that have elements, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().filter(|(_, tensor)| tensor.length > 0).map(|(name, _)| name.as_str())
    }

    /// The tensor's bytes, its elements rotated by `rotation` (element i becomes element i +
    /// rotation).
    ///
    /// # Errors
    /// When there is no such tensor or its file cannot be read.
    pub fn full(&self, tensor: &str, rotation: u64) -> Result<Vec<u8>> {
        let tensor = self.tensor(tensor)?;
        let mut bytes = vec![0; tensor.length];
        open_regular(&tensor.path)?.read_exact_at(&mut bytes, tensor.offset)?;
        if tensor.is_packed {
            let bit = |at: usize| bytes[at / 8] >> (at % 8) & 1;
            bytes = (0..bytes.len() * 8 / 6).map(|at| (0..6).map(|k| bit(at * 6 + k) << k).sum()).collect();
        }
        let element = tensor.format.bits().div_ceil(8) as usize;
        if !bytes.is_empty() {
            let by =
                usize::try_from(rotation)?.checked_mul(element).context("rotated by more than there is")?;
            let length = bytes.len();
            bytes.rotate_left(by % length);
        }
        Ok(bytes)
    }

    /// What `view` of `tensor` must hold; `base` is the tensor itself.
    ///
    /// # Errors
    /// As [`Judge::full`], and when the format cannot give the view.
    pub fn bytes(&self, tensor: &str, view: &str, rotation: u64) -> Result<Vec<u8>> {
        let full = self.full(tensor, rotation)?;
        let Tensor { format, elements, .. } = *self.tensor(tensor)?;
        Ok(if view == "base" { full } else { lamina_reference::view_bytes(format, view, &full, elements)? })
    }

    /// SHA-256 of [`Judge::bytes`].
    ///
    /// # Errors
    /// As [`Judge::bytes`].
    pub fn sha256(&self, tensor: &str, view: &str, rotation: u64) -> Result<String> {
        Ok(hex(&Sha256::digest(self.bytes(tensor, view, rotation)?)))
    }

    fn read_header(&mut self, path: &Path) -> Result<()> {
        let mut file = open_regular(path)?;
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        let mut header = Vec::new();
        if file.take(header_bytes).read_to_end(&mut header)? as u64 != header_bytes {
            bail!("its header of {header_bytes} bytes is cut off");
        }
        let metadata: Metadata = serde_json::from_slice(&header)?;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let length = end - start;
            let format = match info.dtype {
                Dtype::F32 => Format::Fp32,
                Dtype::F16 => Format::Fp16,
                Dtype::BF16 => Format::Bf16,
                Dtype::F8_E4M3 => Format::Fp8E4m3fn,
                Dtype::F8_E5M2 => Format::Fp8E5m2,
                Dtype::I8 => Format::Int8,
                Dtype::F6_E2M3 => Format::Fp6E2m3,
                Dtype::F6_E3M2 => Format::Fp6E3m2,
                _ => Format::Opaque,
            };
            let is_packed = matches!(format, Format::Fp6E2m3 | Format::Fp6E3m2);
            let bits = if is_packed { 6 } else { u64::from(format.bits()) };
            let elements = length as u64 * 8 / bits;
            let offset = 8 + header_bytes + start as u64;
            let dimensions = info.shape.iter().map(|dimension| *dimension as u64).collect();
            let path = path.to_owned();
            let tensor = Tensor { path, offset, length, format, elements, dimensions, is_packed };
            self.tensors.insert(name, tensor);
        }
        for (name, text) in metadata.metadata().iter().flatten() {
            self.notes.entry(name.clone()).or_insert_with(|| text.clone());
        }
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).with_context(|| format!("no model has a tensor {name:?}"))
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a String takes anything
        text
    })
}
