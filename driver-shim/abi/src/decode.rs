//! Reading a directory: every offset and count in it is checked before it is used.

use crate::{
    DIRECTORY_BYTES, Directory, DirectoryError, HEADER_BYTES, Layout, MAGIC, MIN_TENSOR_RECORD_BYTES,
    TensorEntry, VERSION, VIEW_RECORD_BYTES, ViewEntry,
};

/// The directory in `bytes`, which begin with its header and may be longer than it.
///
/// # Errors
/// Any of [`DirectoryError`] but `Full`. [`DirectoryError::Checksum`] is worth one more try with
/// fresh bytes.
pub fn decode(bytes: &[u8]) -> Result<Directory, DirectoryError> {
    if bytes.len() < MAGIC.len() || bytes[..MAGIC.len()] != MAGIC {
        return Err(DirectoryError::Magic { found: bytes[..bytes.len().min(MAGIC.len())].to_vec() });
    }
    let limit = bytes.len().min(usize::try_from(DIRECTORY_BYTES).unwrap_or(usize::MAX));
    if limit < HEADER_BYTES {
        return Err(bound("bytes at hand", limit as u64, HEADER_BYTES as u64));
    }
    let version = u32_at(bytes, 8);
    if version != VERSION {
        return Err(DirectoryError::Version { found: version });
    }
    let used = index("used_bytes", u64_at(bytes, 24), limit)?;
    if used < HEADER_BYTES {
        return Err(bound("used_bytes", used as u64, HEADER_BYTES as u64));
    }
    let bytes = &bytes[..used];
    let stored = u32_at(bytes, 12);
    let mut computed = crc32c::crc32c(&bytes[..12]);
    computed = crc32c::crc32c_append(computed, &[0; 4]);
    computed = crc32c::crc32c_append(computed, &bytes[16..]);
    if computed != stored {
        return Err(DirectoryError::Checksum { computed, stored });
    }

    let mut text = Text { bytes, left: bytes.len() };
    let tensors = records(bytes, "tensors", 48, 64, MIN_TENSOR_RECORD_BYTES)?
        .map(|record| tensor(&mut text, record))
        .collect::<Result<Vec<_>, _>>()?;
    let count = tensors.len();
    let views = records(bytes, "views", 56, 72, VIEW_RECORD_BYTES)?
        .map(|record| view(&mut text, record, count))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Directory {
        generation: u64_at(bytes, 16),
        base_bytes: u64_at(bytes, 32),
        views_bytes: u64_at(bytes, 40),
        tensors,
        views,
        is_incomplete: u32_at(bytes, 88) & 1 != 0,
    })
}

fn tensor(text: &mut Text<'_>, record: &[u8]) -> Result<TensorEntry, DirectoryError> {
    let layout = match u32_at(record, 48) {
        0 => Layout::Weight,
        1 => {
            let channels = u32_at(record, 52);
            // What the record does not have, or says with zero.
            let field = |at: usize, usual| match record.get(at..at + 4) {
                Some(bytes) if bytes != [0; 4] => u32_at(record, at),
                _ => usual,
            };
            Layout::Kv {
                channels,
                window: u32_at(record, 56),
                stride: field(60, channels),
                groups: field(64, 1),
                paged_tokens: field(68, 1),
            }
        }
        other => return Err(bound("layout", other.into(), 1)),
    };
    Ok(TensorEntry {
        dpa: u64_at(record, 0),
        length: u64_at(record, 8),
        elements: u64_at(record, 16),
        name: text.of(record, 24, "tensor name")?,
        shape: text.of(record, 32, "tensor shape")?,
        format: text.of(record, 40, "tensor format")?,
        layout,
        lossy: record.get(72).is_some_and(|flags| flags & 1 != 0),
    })
}

fn view(text: &mut Text<'_>, record: &[u8], tensors: usize) -> Result<ViewEntry, DirectoryError> {
    let tensor = u32_at(record, 32);
    if tensor as usize >= tensors {
        return Err(bound("view's tensor", tensor.into(), tensors as u64));
    }
    Ok(ViewEntry {
        offset: u64_at(record, 0),
        length: u64_at(record, 8),
        elements: u64_at(record, 16),
        spelling: text.of(record, 24, "view spelling")?,
        tensor,
        bits: u32_at(record, 36),
        scale_exp: i32::from_le_bytes(array(record, 40)),
    })
}

/// The records of one kind: count and record size at `header` in the header, their offset at `at`.
fn records<'a>(
    bytes: &'a [u8],
    field: &'static str,
    header: usize,
    at: usize,
    least: usize,
) -> Result<impl Iterator<Item = &'a [u8]>, DirectoryError> {
    let count = u32_at(bytes, header) as usize;
    let size = u32_at(bytes, header + 4) as usize;
    if size < least {
        return Err(bound(field, size as u64, least as u64));
    }
    let start = index(field, u64_at(bytes, at), bytes.len())?;
    let end = count
        .checked_mul(size)
        .and_then(|length| start.checked_add(length))
        .filter(|end| *end <= bytes.len())
        .ok_or_else(|| bound(field, count as u64, bytes.len() as u64))?;
    Ok(bytes[start..end].chunks_exact(size))
}

/// The text of a directory's records, which may share it, but have no more together than the
/// directory has bytes: a small one does not become gigabytes.
struct Text<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl Text<'_> {
    fn of(&mut self, record: &[u8], at: usize, field: &'static str) -> Result<String, DirectoryError> {
        let Self { bytes, left } = self;
        let start = u32_at(record, at) as usize;
        let length = u32_at(record, at + 4) as usize;
        let slice = start
            .checked_add(length)
            .and_then(|end| bytes.get(start..end))
            .ok_or_else(|| bound(field, start as u64 + length as u64, bytes.len() as u64))?;
        *left = left.checked_sub(length).ok_or_else(|| {
            bound("text of all records", (bytes.len() - *left + length) as u64, bytes.len() as u64)
        })?;
        std::str::from_utf8(slice).map(str::to_owned).map_err(|_| DirectoryError::Text { field })
    }
}

fn bound(field: &'static str, value: u64, bound: u64) -> DirectoryError {
    DirectoryError::Bound { field, value, bound }
}

fn index(field: &'static str, value: u64, limit: usize) -> Result<usize, DirectoryError> {
    usize::try_from(value).ok().filter(|v| *v <= limit).ok_or_else(|| bound(field, value, limit as u64))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a slice of N bytes")
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}
