//! Checkpoints: what a file of weights holds, and its bytes by position. Safetensors, [GGUF](gguf)
//! and [`.npy`](npy) are read, each by a file beside this one.
//!
//! A safetensors file is 8 bytes of header length, little-endian, a JSON header, and the tensors'
//! bytes. The rules:
//!
//! * A file is believed only where it can be checked: header within the file and at most
//!   [`MAX_HEADER_BYTES`], names unique and at most [`MAX_NAME_BYTES`], each tensor's range as long
//!   as its shape and dtype say, the ranges covering all bytes behind the header once, in order,
//!   without holes.
//! * The file is never held in memory, whatever its size, nor mapped: a file that shrinks while it
//!   is read is an error of that read, not a SIGBUS.
//! * A dtype that is none of the device's formats is `opaque`: bytes, in 4 KiB blocks, with a
//!   `full` view only.
//!
//! | dtype | format |
//! |---|---|
//! | `F32`, `F16`, `BF16` | `fp32`, `fp16`, `bf16` |
//! | `F8_E4M3`, `F8_E5M2` | `fp8_e4m3fn`, `fp8_e5m2` |
//! | `I8` | `int8` |
//! | `F4`, `F8_E8M0` | `fp4_e2m1`, `e8m0` |
//! | `U8`, `I32` that are part of a [block-scaled](scaled) tensor | what it has there |
//! | everything else: `BOOL`, `U8` to `U64`, `I16` to `I64`, `F64`, `C64`, the `F6`, the `FNUZ` | `opaque` |
//!
//! safetensors' `F8_E4M3` is the format without infinities (`fn`). The `FNUZ` formats (other
//! biases) have no planes that the device's views could name. `F6_E2M3` and `F6_E3M2` lie four in
//! three bytes, of which a block has no whole number; who loads or analyses a file has them in a
//! byte each ([`ModelFile::spread`]).

pub(crate) mod checkpoint;
mod error;
mod gguf;
mod npy;
mod regular;
mod safetensors;
pub(crate) mod scaled;
pub(crate) mod sixes;
mod strands;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use checkpoint::{FileKind, ReadAt};
pub use error::ModelError;
pub use gguf::GgufError;
pub use npy::NpyError;
pub(crate) use regular::open_regular;
pub use safetensors::{MAX_HEADER_BYTES, MAX_NAME_BYTES};
pub use scaled::Scheme;
pub use strands::{Rearranged, Strand};

/// A checkpoint, opened, its header read and checked.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    file: File,
    tensors: Vec<ModelTensor>,
    metadata: BTreeMap<String, String>,
    header_digest: u128,
    kind: FileKind,
    remarks: Vec<String>,
    opened: fs::Metadata,
}

/// One tensor of a [`ModelFile`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelTensor {
    /// Its name, unique in the file; any characters, at most [`MAX_NAME_BYTES`].
    pub name: String,
    /// The dtype as the file names it, for example `BF16`.
    pub dtype: String,
    /// The dimensions, outermost first; none for a scalar, and any may be 0.
    pub shape: Vec<u64>,
    /// The name of the device's format, for example `bf16`; `opaque` for a dtype that it has no
    /// format for.
    pub format: &'static str,
    /// Where its bytes begin, in bytes from the start of the file.
    pub offset: u64,
    /// Its bytes.
    pub length: u64,
    /// How it comes from the bytes that begin there, if it is not just those.
    pub rearranged: Option<Rearranged>,
}

impl ModelFile {
    /// Opens the file at `path` and reads its header.
    ///
    /// # Errors
    ///
    /// [`ModelError`] if there is no regular, readable file at `path`, or if it is no safetensors
    /// file as the module's rules have it.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let failed = |source| ModelError::Open { path: path.into(), source };
        let (file, opened) = Self::regular(path)?;
        let mut start = [0; checkpoint::MARK_BYTES];
        let length = start.len().min(usize::try_from(opened.len()).unwrap_or(usize::MAX));
        FileExt::read_exact_at(&file, &mut start[..length], 0).map_err(failed)?;
        let format = checkpoint::of_beginning(&start[..length]);
        let header = format.read(path, &file, opened.len())?;
        let safetensors::Header { tensors, metadata, digest, remarks, .. } = header;
        let (path, kind) = (path.into(), format.kind());
        Ok(Self { path, file, tensors, metadata, header_digest: digest, kind, remarks, opened })
    }

    /// Opens any file as bytes: one opaque tensor called `name`, or none if it is empty.
    ///
    /// # Errors
    ///
    /// [`ModelError`] if there is no regular, readable file at `path`.
    pub fn open_as_bytes(path: &Path, name: &str) -> Result<Self, ModelError> {
        let (file, opened) = Self::regular(path)?;
        let length = opened.len();
        let tensor = ModelTensor {
            name: name.to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![length],
            format: "opaque",
            offset: 0,
            length,
            rearranged: None,
        };
        let tensors = if length == 0 { Vec::new() } else { vec![tensor] };
        let kind = FileKind::Other;
        Ok(Self {
            path: path.into(),
            file,
            tensors,
            metadata: BTreeMap::new(),
            header_digest: 0,
            kind,
            remarks: Vec::new(),
            opened,
        })
    }

    fn regular(path: &Path) -> Result<(File, fs::Metadata), ModelError> {
        let opened = open_regular(path).map_err(|source| ModelError::Open { path: path.into(), source })?;
        opened.ok_or_else(|| ModelError::NotAFile { path: path.into() })
    }

    /// What kind of file it is.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// What looks like a [block-scaled](scaled) tensor and is none: a line each.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Fills `out` from byte `offset` of the file on, whatever is there.
    ///
    /// # Errors
    ///
    /// [`ModelError::ReadHeader`] if so many bytes are not there, or the system cannot read them.
    pub fn read_raw(&self, offset: u64, out: &mut [u8]) -> Result<(), ModelError> {
        let header = out.len() as u64;
        let failed = |source| ModelError::ReadHeader { path: self.path.clone(), header, source };
        FileExt::read_exact_at(&self.file, out, offset).map_err(failed)
    }

    /// What the system said of the file before its header was read.
    pub fn opened(&self) -> &fs::Metadata {
        &self.opened
    }

    /// What the system says of the file now.
    ///
    /// # Errors
    ///
    /// [`ModelError::Open`] if it says nothing.
    pub fn now(&self) -> Result<fs::Metadata, ModelError> {
        self.file.metadata().map_err(|source| ModelError::Open { path: self.path.clone(), source })
    }

    /// XXH3-128 of the header's bytes.
    pub fn header_digest(&self) -> u128 {
        self.header_digest
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors, in the order of their bytes in the file.
    pub fn tensors(&self) -> &[ModelTensor] {
        &self.tensors
    }

    /// The texts under `__metadata__` in the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Fills `out` with the bytes of `tensor`, one of [`Self::tensors`], from byte `at` of it on.
    ///
    /// # Errors
    ///
    /// [`ModelError::PastTensor`] if that many bytes are not there, [`ModelError::Shrunk`] if the
    /// file has lost them since it was opened, [`ModelError::Read`] if the system cannot read them.
    /// `out` is then undefined.
    pub fn read(&self, tensor: &ModelTensor, at: u64, out: &mut [u8]) -> Result<(), ModelError> {
        let wanted = out.len() as u64;
        if at.checked_add(wanted).is_none_or(|end| end > tensor.length) {
            return Err(ModelError::PastTensor {
                path: self.path.clone(),
                tensor: tensor.name.clone(),
                at,
                wanted,
                length: tensor.length,
            });
        }
        let offset = tensor.offset + at;
        let (end, read) = match tensor.rearranged {
            Some(how) => (
                tensor.offset.saturating_add(how.reach(at + wanted)),
                how.read(&self.file, tensor.offset, at, out),
            ),
            None => (offset + wanted, FileExt::read_exact_at(&self.file, out, offset)),
        };
        read.map_err(|source| {
            let (path, tensor) = (self.path.clone(), tensor.name.clone());
            if source.kind() == io::ErrorKind::UnexpectedEof {
                ModelError::Shrunk { path, tensor, end }
            } else {
                ModelError::Read { path, tensor, offset, wanted, source }
            }
        })
    }
}
