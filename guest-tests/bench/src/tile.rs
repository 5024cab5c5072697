//! A large checkpoint made of the bundled tensors: real values, as many as a benchmark wants.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use lamina_run::judge::Judge;
use serde_json::json;

/// The name of the one tensor.
pub const TENSOR: &str = "tile";

/// Writes a checkpoint of one bf16 tensor of `bytes` to `path`: the bytes of all tensors in `models`, over and over.
///
/// # Errors
/// When a file cannot be read or written.
pub fn write(models: &[PathBuf], bytes: u64, path: &Path) -> Result<()> {
    let judge = Judge::new(models)?;
    let mut pool = Vec::new();
    for name in judge.names() {
        pool.extend(judge.full(name, 0)?);
    }
    let header =
        json!({ TENSOR: { "dtype": "BF16", "shape": [bytes / 2], "data_offsets": [0, bytes / 2 * 2] } });
    let header = header.to_string();
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut out = BufWriter::new(file);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    let mut left = bytes / 2 * 2;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(usize::MAX).min(pool.len());
        out.write_all(&pool[..piece])?;
        left -= piece as u64;
    }
    out.flush().with_context(|| format!("cannot write {}: is the disk full?", path.display()))
}
