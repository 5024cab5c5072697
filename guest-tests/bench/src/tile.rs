//! A large checkpoint made of the bundled tensors: real values, as many as a benchmark wants.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use lamina_run::judge::Judge;
use serde_json::{Map, Value, json};

/// The name of the one tensor of [`write()`].
pub const TENSOR: &str = "tile";

/// Writes a checkpoint of one bf16 tensor of `bytes` to `path`: the bytes of all tensors in
/// `models`, over and over.
///
/// # Errors
/// When a file cannot be read or written.
pub fn write(models: &[PathBuf], bytes: u64, path: &Path) -> Result<()> {
    let judge = Judge::new(models)?;
    let mut pool = Vec::new();
    for name in judge.names() {
        pool.extend(judge.full(name, 0)?);
    }
    let (file, _) = begin(path, &[(TENSOR, &[bytes / 2])])?;
    let mut out = BufWriter::new(file);
    let mut left = bytes / 2 * 2;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(usize::MAX).min(pool.len());
        out.write_all(&pool[..piece])?;
        left -= piece as u64;
    }
    out.flush().with_context(|| format!("cannot write {}: is the disk full?", path.display()))
}

/// Writes a checkpoint of bf16 tensors with these names and shapes to `path`, all of zeros.
///
/// # Errors
/// When the file cannot be written.
pub fn write_empty(path: &Path, tensors: &[(&str, &[u64])]) -> Result<()> {
    let (file, bytes) = begin(path, tensors)?;
    let header = file.metadata()?.len();
    // A hole takes no room.
    file.set_len(header + bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// A file that has the head of such a checkpoint, and how many bytes belong behind it.
fn begin(path: &Path, tensors: &[(&str, &[u64])]) -> Result<(File, u64)> {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        end += 2 * shape.iter().product::<u64>();
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] });
        header.insert((*name).to_owned(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    Ok((file, end))
}
