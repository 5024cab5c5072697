//! What a checkpoint format is to the device: a file each beside this one, listed in [`ALL`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::safetensors::Header;
use super::{ModelError, ModelTensor, gguf, npy, safetensors};
use lamina_codec::format::Format;

/// The formats. The first that knows a file's beginning reads it; safetensors has no mark, and
/// comes last.
pub(crate) const ALL: [&dyn Checkpoint; 3] = [&gguf::Gguf, &npy::Npy, &safetensors::Safetensors];

/// Bytes of a file's beginning that tell its format.
pub(crate) const MARK_BYTES: usize = 8;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A safetensors file.
    Safetensors,
    /// A GGUF file.
    Gguf,
    /// A `.npy` file.
    Npy,
    /// Anything else: bytes that are passed through.
    Other,
}

/// Bytes by position: a file on a disk, or one that the device holds.
pub trait ReadAt {
    /// Fills `out` from `offset` on.
    ///
    /// # Errors
    ///
    /// What the system says; `UnexpectedEof` if so many are not there.
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, out, offset)
    }
}

/// A checkpoint format.
pub(crate) trait Checkpoint: Sync {
    /// Which it is.
    fn kind(&self) -> FileKind;

    /// Whether a file that begins so is one.
    fn begins(&self, start: &[u8]) -> bool;

    /// Reads and checks the header of `file`, which is `bytes` long; `path` is for errors.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    fn read(&self, path: &Path, file: &dyn ReadAt, bytes: u64) -> Result<Header, ModelError>;

    /// Whether a file of this format can say that the tensor has `target`'s format.
    fn can_say(&self, tensor: &ModelTensor, target: Format) -> bool;

    /// The beginning of a file of the same tensors, of which those with a target have that format.
    /// `raw` is the header as the file has it; `notes` are told where the format has a place for
    /// them.
    ///
    /// # Errors
    ///
    /// When the header is not what [`Self::read`] takes.
    fn rewrite(
        &self,
        path: &Path,
        raw: &[u8],
        tensors: &[ModelTensor],
        targets: &[Option<Format>],
        notes: &[(&str, String)],
    ) -> Result<Rewritten, ModelError>;
}

/// A header that was written anew.
pub(crate) struct Rewritten {
    /// Everything before the first tensor.
    pub(crate) header: Vec<u8>,
    /// The tensors, by index, in the order of their bytes, and where each begins in the file. Bytes
    /// between them are zeros.
    pub(crate) order: Vec<(usize, u64)>,
    /// The file's bytes.
    pub(crate) bytes: u64,
}

/// The format of a kind of files; none of those that are passed through.
pub(crate) fn of_kind(kind: FileKind) -> Option<&'static dyn Checkpoint> {
    ALL.into_iter().find(|format| format.kind() == kind)
}

/// The format of a file that begins so.
pub(crate) fn of_beginning(start: &[u8]) -> &'static dyn Checkpoint {
    let known = ALL.into_iter().find(|format| format.begins(start));
    known.unwrap_or(&safetensors::Safetensors)
}

/// Bytes of a tensor in a format.
pub(crate) fn bytes_in(tensor: &ModelTensor, format: Format) -> Option<u64> {
    format.bytes_for(elements(&tensor.shape)?)
}

/// The elements of a shape, if they are a number; a dimension of 0 makes it 0 whatever the others
/// are.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1, |elements: u64, &dimension| elements.checked_mul(dimension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dimension_of_0_makes_a_shape_empty_wherever_it_is() {
        let large = 1 << 40;
        for shape in [[large, large, 0], [0, large, large], [large, 0, large]] {
            assert_eq!(elements(&shape), Some(0));
            let tensor = ModelTensor {
                name: String::new(),
                dtype: "F32".to_owned(),
                shape: shape.to_vec(),
                format: "fp32",
                offset: 0,
                length: 0,
                rearranged: None,
            };
            assert_eq!(bytes_in(&tensor, Format::Bf16), Some(0));
        }
        assert_eq!((elements(&[]), elements(&[3, 5]), elements(&[large, large])), (Some(1), Some(15), None));
    }
}
