//! What can be wrong with a checkpoint. Names of tensors come from the file, so they are shown
//! escaped.

use std::io;
use std::path::PathBuf;

use super::{GgufError, MAX_HEADER_BYTES, MAX_NAME_BYTES, NpyError};

/// Why a checkpoint cannot be loaded. Offsets in the variants about ranges count from the end of
/// the header, as the file's own do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is missing or may not be read.
    #[error("{}: cannot open: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A directory, a pipe, a device.
    #[error("{}: not a regular file; give the path of a .safetensors, .gguf or .npy file", path.display())]
    NotAFile {
        /// What was to be opened.
        path: PathBuf,
    },
    /// What is wrong with a GGUF file.
    #[error("{}: {why}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: GgufError,
    },
    /// What is wrong with a `.npy` file.
    #[error("{}: {why}", path.display())]
    Npy {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: NpyError,
    },
    /// No room for the header's length.
    #[error("{}: {bytes} bytes are no safetensors file, which begins with 8 bytes of header length", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
    /// An index, or other JSON.
    #[error(
        "{}: this is JSON and no checkpoint; of a model in several files give these, not their index",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
    },
    /// A header that no checkpoint needs.
    #[error(
        "{}: the header would have {header} bytes, more than the {MAX_HEADER_BYTES} allowed; is it a safetensors file?",
        path.display()
    )]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// The header's bytes as the file has it.
        header: u64,
    },
    /// A header longer than the file.
    #[error(
        "{}: the header would end at byte {end}, but the file has only {bytes}; it is cut short or no safetensors file",
        path.display()
    )]
    HeaderPastEnd {
        /// The file.
        path: PathBuf,
        /// Where the header would end.
        end: u64,
        /// The file's bytes.
        bytes: u64,
    },
    /// The file's header could not be read.
    #[error("{}: cannot read the header's {header} bytes: {source}", path.display())]
    ReadHeader {
        /// The file.
        path: PathBuf,
        /// The header's bytes.
        header: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// A header that is not the JSON it should be.
    #[error("{}: the header is not what safetensors wants: {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where in the header.
        source: serde_json::Error,
    },
    /// A name too long for a directory.
    #[error(
        "{}: the name of tensor {start:?}… has {bytes} bytes, more than the {MAX_NAME_BYTES} allowed",
        path.display()
    )]
    NameTooLong {
        /// The file.
        path: PathBuf,
        /// The name's beginning.
        start: String,
        /// The name's bytes.
        bytes: usize,
    },
    /// Two tensors of one name.
    #[error("{}: there are two tensors {tensor:?}", path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// Their name.
        tensor: String,
    },
    /// A range that ends before it begins.
    #[error("{}: tensor {tensor:?} begins at byte {begin}, behind its end at {end}", path.display())]
    Backwards {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where it ends.
        end: u64,
    },
    /// A range past the end of the file.
    #[error(
        "{}: tensor {tensor:?} ends at byte {end} behind the header, but only {data} bytes are there; the file is \
         cut short or its header lies",
        path.display()
    )]
    PastEnd {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it ends.
        end: u64,
        /// The bytes behind the header.
        data: u64,
    },
    /// Bytes that two tensors claim.
    #[error("{}: tensor {tensor:?} begins at byte {begin}, inside {other:?}, which ends at {end}", path.display())]
    Overlap {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// The tensor before it.
        other: String,
        /// Where that ends.
        end: u64,
    },
    /// Bytes that no tensor claims.
    #[error("{}: bytes {begin} to {end} behind the header belong to no tensor", path.display())]
    Hole {
        /// The file.
        path: PathBuf,
        /// Where they begin.
        begin: u64,
        /// Where they end.
        end: u64,
    },
    /// A shape whose size is no number.
    #[error("{}: tensor {tensor:?} has the shape {shape:?}, whose elements are too many to count", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape, the first few dimensions.
        shape: Vec<u64>,
    },
    /// A shape and dtype that do not fill the range.
    #[error(
        "{}: tensor {tensor:?} has {length} bytes, but {elements} elements of {dtype} are {bits} bits",
        path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The bytes of its range.
        length: u64,
        /// The elements of its shape.
        elements: u64,
        /// Its dtype.
        dtype: String,
        /// The bits that they fill.
        bits: u128,
    },
    /// A read past a tensor's end.
    #[error("{}: {wanted} bytes from byte {at} on go past the {length} bytes of tensor {tensor:?}", path.display())]
    PastTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first byte wanted.
        at: u64,
        /// The bytes wanted.
        wanted: u64,
        /// The tensor's bytes.
        length: u64,
    },
    /// The file has become shorter since it was opened.
    #[error("{}: the file was cut short after it was opened: tensor {tensor:?} needs its bytes up to {end}", path.display())]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The byte of the file, from its start, up to which it was to be read.
        end: u64,
    },
    /// A read of the system failed.
    #[error("{}: cannot read {wanted} bytes of tensor {tensor:?} at byte {offset}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The byte of the file, from its start.
        offset: u64,
        /// The bytes wanted.
        wanted: u64,
        /// The system's reason.
        source: io::Error,
    },
}
