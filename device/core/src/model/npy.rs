//! `.npy` files: one array behind a Python literal that describes it.
//!
//! Little-endian floats of 4 and 2 bytes and signed bytes have the device's formats; everything
//! else is `opaque`.

use std::path::Path;

use lamina_codec::format::Format;
use twox_hash::xxhash3_128::Hasher;

use super::checkpoint::{Checkpoint, FileKind, ReadAt, Rewritten};
use super::safetensors::Header;
use super::{ModelError, ModelTensor};

/// What a file begins with.
const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest description that is read.
const MAX_DESCRIPTION: u64 = 1 << 20;

/// Why a file is no `.npy` file that can be loaded.
#[derive(Debug, thiserror::Error)]
pub enum NpyError {
    /// A version that is not read.
    #[error("version {0} of .npy is not read, 1 to 3 are")]
    Version(u8),
    /// A description longer than the file or the bound.
    #[error("the description would end at byte {end}, past the bound of {bound}")]
    Past {
        /// Where it would end.
        end: u64,
        /// The file's bytes, or the bound.
        bound: u64,
    },
    /// A description without what it needs.
    #[error("the description {description:?} has no {what} that can be read")]
    Description {
        /// Its beginning.
        description: String,
        /// `shape`, for example.
        what: &'static str,
    },
    /// Data of another length than described.
    #[error("{elements} elements of {item} bytes are described, but {bytes} bytes follow")]
    Length {
        /// Elements.
        elements: u64,
        /// Bytes of each.
        item: u64,
        /// Bytes behind the description.
        bytes: u64,
    },
}

/// The format.
pub(crate) struct Npy;

impl Checkpoint for Npy {
    fn kind(&self) -> FileKind {
        FileKind::Npy
    }

    fn begins(&self, start: &[u8]) -> bool {
        start.starts_with(MAGIC)
    }

    fn read(&self, path: &Path, file: &dyn ReadAt, bytes: u64) -> Result<Header, ModelError> {
        let failed = |why| ModelError::Npy { path: path.into(), why };
        let read_at = |out: &mut [u8], offset| {
            let header = out.len() as u64;
            let refused = |source| ModelError::ReadHeader { path: path.into(), header, source };
            file.read_exact_at(out, offset).map_err(refused)
        };
        let mut start = [0; 12];
        let least = bytes.min(12);
        read_at(&mut start[..usize::try_from(least).unwrap_or(12)], 0)?;
        let (length, text_at) = match start[6] {
            1 => (u64::from(u16::from_le_bytes([start[8], start[9]])), 10),
            2 | 3 => (u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]])), 12),
            version => return Err(failed(NpyError::Version(version))),
        };
        let (data_start, bound) = (text_at + length, bytes.min(MAX_DESCRIPTION));
        if data_start > bound {
            return Err(failed(NpyError::Past { end: data_start, bound }));
        }
        let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
        read_at(&mut text, text_at)?;
        let digest = Hasher::oneshot(&text);
        let text = String::from_utf8_lossy(&text);
        let missing = |what| {
            let description = text.chars().take(80).collect();
            failed(NpyError::Description { description, what })
        };
        let mut shape = shape(&text).ok_or_else(|| missing("shape"))?;
        // The first index runs fastest then.
        if value(&text, "fortran_order").ok_or_else(|| missing("fortran_order"))?.starts_with("True") {
            shape.reverse();
        }
        let described = value(&text, "descr").ok_or_else(|| missing("descr"))?;
        let dtype = quoted(described).unwrap_or("structured").to_owned();
        let elements = shape.iter().try_fold(1_u64, |product, &n| product.checked_mul(n));
        let elements = elements.ok_or_else(|| missing("shape"))?;
        let left = bytes - data_start;
        if let Some(item) = item_bytes(&dtype)
            && elements.checked_mul(item) != Some(left)
        {
            return Err(failed(NpyError::Length { elements, item, bytes: left }));
        }
        let format = match dtype.as_str() {
            "<f4" => "fp32",
            "<f2" => "fp16",
            "|i1" => "int8",
            _ => "opaque",
        };
        let name = path.file_stem().map_or_else(|| "array".into(), |stem| stem.to_string_lossy());
        let tensor = ModelTensor {
            name: name.into_owned(),
            dtype,
            shape,
            format,
            offset: data_start,
            length: left,
            rearranged: None,
        };
        let (tensors, metadata) = (vec![tensor], std::collections::BTreeMap::new());
        Ok(Header { tensors, metadata, digest, data_start, remarks: Vec::new() })
    }

    /// The format has no name for the formats that views convert to.
    fn can_say(&self, _: &ModelTensor, _: Format) -> bool {
        false
    }

    fn rewrite(
        &self,
        _: &Path,
        raw: &[u8],
        tensors: &[ModelTensor],
        _: &[Option<Format>],
        _: &[(&str, String)],
    ) -> Result<Rewritten, ModelError> {
        let end = raw.len() as u64;
        let bytes = tensors.iter().fold(end, |sum, tensor| sum.saturating_add(tensor.length));
        Ok(Rewritten { header: raw.to_vec(), order: vec![(0, end)], bytes })
    }
}

/// What stands behind a key.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let behind = ["'", "\""].into_iter().find_map(|quote| {
        let key = format!("{quote}{key}{quote}");
        text.find(&key).map(|at| &text[at + key.len()..])
    })?;
    Some(behind.trim_start().strip_prefix(':')?.trim_start())
}

/// A text in quotes.
fn quoted(value: &str) -> Option<&str> {
    let quote = value.chars().next().filter(|c| *c == '\'' || *c == '"')?;
    value[1..].split_once(quote).map(|(text, _)| text)
}

fn shape(text: &str) -> Option<Vec<u64>> {
    let (inside, _) = value(text, "shape")?.strip_prefix('(')?.split_once(')')?;
    let parts = inside.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| part.parse().ok()).collect()
}

/// Bytes of an element, of dtypes that say so.
fn item_bytes(dtype: &str) -> Option<u64> {
    let mut letters = dtype.chars();
    let (order, kind) = (letters.next()?, letters.next()?);
    let count: u64 = letters.as_str().parse().ok()?;
    match (order, kind) {
        ('<' | '>' | '|' | '=', 'b' | 'i' | 'u' | 'f' | 'c' | 'V' | 'S') => Some(count),
        ('<' | '>' | '|' | '=', 'U') => count.checked_mul(4),
        _ => None,
    }
}
