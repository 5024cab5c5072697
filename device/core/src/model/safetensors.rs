//! Reading, checking and writing anew a safetensors header.
//!
//! The `safetensors` crate knows the dtypes and what a tensor's entry looks like. Its own check of
//! a whole header wants the whole file in memory, lets a later tensor replace an earlier one of the
//! same name, and says which rule was broken but not by which numbers; so the entries are gathered
//! and checked here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorInfo;
use lamina_codec::format::Format;
use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use twox_hash::xxhash3_128::Hasher;

use super::checkpoint::{Checkpoint, FileKind, ReadAt, Rewritten, bytes_in, elements};
use super::{ModelError, ModelTensor, scaled};

/// The longest header that is read, in bytes: the bound that the format's authors set.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The longest name of a tensor, in bytes.
pub const MAX_NAME_BYTES: usize = 4096;

/// Bytes of the header's length, before the header.
const LENGTH_BYTES: u64 = 8;
/// The key that is no tensor.
pub(super) const METADATA: &str = "__metadata__";
/// Dimensions that an error shows.
const SHOWN_DIMENSIONS: usize = 16;
/// Characters of an overlong name that an error shows.
const SHOWN_CHARACTERS: usize = 64;

/// What a header says, checked.
pub(crate) struct Header {
    /// In the order of their bytes, offsets counted from the start of the file.
    pub(crate) tensors: Vec<ModelTensor>,
    /// The texts under `__metadata__`.
    pub(crate) metadata: BTreeMap<String, String>,
    /// XXH3-128 of the header's bytes.
    pub(crate) digest: u128,
    /// Where the first tensor may begin.
    pub(crate) data_start: u64,
    /// What looks like a block-scaled tensor and is none.
    pub(crate) remarks: Vec<String>,
}

/// The format.
pub(crate) struct Safetensors;

impl Checkpoint for Safetensors {
    fn kind(&self) -> FileKind {
        FileKind::Safetensors
    }

    fn begins(&self, _: &[u8]) -> bool {
        false
    }

    fn read(&self, path: &Path, file: &dyn ReadAt, bytes: u64) -> Result<Header, ModelError> {
        read(path, file, bytes)
    }

    fn can_say(&self, _: &ModelTensor, target: Format) -> bool {
        dtype_of(target).is_some()
    }

    /// Tensors with wider elements come first, so that each is aligned.
    fn rewrite(
        &self,
        path: &Path,
        raw: &[u8],
        tensors: &[ModelTensor],
        targets: &[Option<Format>],
        notes: &[(&str, String)],
    ) -> Result<Rewritten, ModelError> {
        let wrong = |source| ModelError::Header { path: path.into(), source };
        let text = raw.get(8..).unwrap_or_default();
        let Entries { mut metadata, .. } = serde_json::from_slice(text).map_err(wrong)?;
        metadata.extend(notes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        let widths: Vec<_> =
            tensors.iter().zip(targets).map(|(tensor, target)| width(tensor, *target)).collect();
        let mut order: Vec<_> = (0..tensors.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(widths[*index]));
        let mut header = serde_json::Map::new();
        header.insert(METADATA.to_owned(), serde_json::to_value(metadata).map_err(wrong)?);
        let (mut at, mut begins) = (0_u64, Vec::with_capacity(order.len()));
        for index in order {
            let tensor = &tensors[index];
            let dtype = targets[index].and_then(dtype_of).unwrap_or(&tensor.dtype);
            let length = targets[index].map_or(Some(tensor.length), |target| bytes_in(tensor, target));
            let end = length.and_then(|length| at.checked_add(length)).ok_or_else(|| ModelError::Shape {
                path: path.into(),
                tensor: tensor.name.clone(),
                shape: tensor.shape.iter().take(SHOWN_DIMENSIONS).copied().collect(),
            })?;
            let entry =
                serde_json::json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end] });
            header.insert(tensor.name.clone(), entry);
            begins.push((index, at));
            at = end;
        }
        let mut text = serde_json::to_vec(&header).map_err(wrong)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        let start = header.len() as u64;
        let order = begins.into_iter().map(|(index, begin)| (index, start + begin)).collect();
        Ok(Rewritten { header, order, bytes: start.saturating_add(at) })
    }
}

/// Bits of an element.
fn width(tensor: &ModelTensor, target: Option<Format>) -> u64 {
    let elements = tensor.shape.iter().fold(1_u64, |product, &n| product.saturating_mul(n));
    match target {
        Some(format) => format.bits().into(),
        None => tensor.length.saturating_mul(8) / elements.max(1),
    }
}

/// What a header calls a format that views convert to.
fn dtype_of(format: Format) -> Option<&'static str> {
    match format {
        Format::Bf16 => Some("BF16"),
        Format::Fp8E4m3fn => Some("F8_E4M3"),
        Format::Fp8E5m2 => Some("F8_E5M2"),
        _ => None,
    }
}

/// Reads the header of the file at `path`, open as `file` and `bytes` long.
fn read(path: &Path, file: &dyn ReadAt, bytes: u64) -> Result<Header, ModelError> {
    if bytes < LENGTH_BYTES {
        return Err(ModelError::TooShort { path: path.into(), bytes });
    }
    let read_at = |out: &mut [u8], offset| {
        let header = out.len() as u64;
        let failed = |source| ModelError::ReadHeader { path: path.into(), header, source };
        file.read_exact_at(out, offset).map_err(failed)
    };
    let mut start = [0; 8];
    read_at(&mut start, 0)?;
    let length = u64::from_le_bytes(start);
    if length > MAX_HEADER_BYTES && start[0] == b'{' {
        return Err(ModelError::Json { path: path.into() });
    }
    if length > MAX_HEADER_BYTES {
        return Err(ModelError::HeaderTooLong { path: path.into(), header: length });
    }
    let data_start = LENGTH_BYTES + length;
    if data_start > bytes {
        return Err(ModelError::HeaderPastEnd { path: path.into(), end: data_start, bytes });
    }
    let mut text = vec![0; usize::try_from(length).expect("at most MAX_HEADER_BYTES")];
    read_at(&mut text, LENGTH_BYTES)?;
    let entries: Entries =
        serde_json::from_slice(&text).map_err(|source| ModelError::Header { path: path.into(), source })?;
    let digest = Hasher::oneshot(&text);
    drop(text);
    let mut tensors = check(path, entries.tensors, data_start, bytes - data_start)?;
    let remarks = scaled::mark(&mut tensors);
    Ok(Header { tensors, metadata: entries.metadata, digest, data_start, remarks })
}

/// What a header says, unchecked: every entry, in its order.
#[derive(Default)]
struct Entries {
    tensors: Vec<(String, TensorInfo)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with an entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Entries::default();
                while let Some(name) = map.next_key::<String>()? {
                    let within = |error| A::Error::custom(format!("{:?}: {error}", beginning(&name)));
                    if name == METADATA {
                        let texts = map.next_value::<Option<BTreeMap<String, String>>>().map_err(within)?;
                        entries.metadata.extend(texts.unwrap_or_default());
                    } else {
                        let info = map.next_value::<TensorInfo>().map_err(within)?;
                        entries.tensors.push((name, info));
                    }
                }
                Ok(entries)
            }
        }

        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// The tensors by position, if they are what the module's rules want of a file with `data` bytes
/// behind the header, which ends at `data_start`.
fn check(
    path: &Path,
    mut entries: Vec<(String, TensorInfo)>,
    data_start: u64,
    data: u64,
) -> Result<Vec<ModelTensor>, ModelError> {
    names_are_good(path, &entries)?;
    entries.sort_by_key(|(_, info)| info.data_offsets);

    let mut tensors: Vec<ModelTensor> = Vec::with_capacity(entries.len());
    let mut covered = 0;
    for (name, info) in entries {
        let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let path = path.to_path_buf();
        if end < begin {
            return Err(ModelError::Backwards { path, tensor: name, begin, end });
        }
        if end > data {
            return Err(ModelError::PastEnd { path, tensor: name, end, data });
        }
        if begin < covered {
            let other = tensors.pop().map(|tensor| tensor.name).unwrap_or_default();
            return Err(ModelError::Overlap { path, tensor: name, begin, other, end: covered });
        }
        if begin > covered {
            return Err(ModelError::Hole { path, begin: covered, end: begin });
        }
        covered = end;

        let shape: Vec<u64> = info.shape.iter().map(|&dimension| dimension as u64).collect();
        let Some(elements) = elements(&shape) else {
            let shape = shape.into_iter().take(SHOWN_DIMENSIONS).collect();
            return Err(ModelError::Shape { path, tensor: name, shape });
        };
        let (dtype, length) = (info.dtype.to_string(), end - begin);
        let bits = u128::from(elements) * info.dtype.bitsize() as u128;
        if bits != u128::from(length) * 8 {
            return Err(ModelError::Length { path, tensor: name, length, elements, dtype, bits });
        }
        let format = format_of(info.dtype);
        tensors.push(ModelTensor {
            name,
            dtype,
            shape,
            format,
            offset: data_start + begin,
            length,
            rearranged: None,
        });
    }
    if covered < data {
        return Err(ModelError::Hole { path: path.into(), begin: covered, end: data });
    }
    Ok(tensors)
}

/// Whether no name is too long and none is there twice.
fn names_are_good(path: &Path, entries: &[(String, TensorInfo)]) -> Result<(), ModelError> {
    let mut seen = BTreeSet::new();
    for (name, _) in entries {
        if name.len() > MAX_NAME_BYTES {
            return Err(ModelError::NameTooLong {
                path: path.into(),
                start: beginning(name),
                bytes: name.len(),
            });
        }
        if !seen.insert(name) {
            return Err(ModelError::Duplicate { path: path.into(), tensor: name.clone() });
        }
    }
    Ok(())
}

/// As much of a name as an error shows.
fn beginning(name: &str) -> String {
    if name.len() > MAX_NAME_BYTES { name.chars().take(SHOWN_CHARACTERS).collect() } else { name.to_owned() }
}

/// The device's format for a dtype; the module documentation has the table.
fn format_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "fp32",
        Dtype::F16 => "fp16",
        Dtype::BF16 => "bf16",
        Dtype::F8_E4M3 => "fp8_e4m3fn",
        Dtype::F8_E5M2 => "fp8_e5m2",
        Dtype::I8 => "int8",
        Dtype::F4 => "fp4_e2m1",
        Dtype::F8_E8M0 => "e8m0",
        _ => "opaque",
    }
}
