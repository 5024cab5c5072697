//! The bytes that are coded: whole blocks of a file's tensors of one format.
//!
//! A block never spans two tensors, as in the device; what a tensor has behind its last whole block is left out. Of more than
//! [`MOST`] blocks, runs of [`RUN`] blocks are taken from all over the file.

use anyhow::{Result, bail};
use lamina::{
    BLOCK_BYTES, BlockWords,
    format::Format,
    model::{ModelFile, ModelTensor},
};

/// Blocks of a table at most: 16 MiB.
pub const MOST: u64 = 4096;
/// Blocks that stay together: 256 KiB, the largest chunk of ZipNN.
pub const RUN: u64 = 64;

/// Blocks of one format from one file.
pub struct Pool {
    /// The file's name.
    pub file: String,
    /// The format.
    pub format: Format,
    /// The blocks.
    pub blocks: Vec<BlockWords>,
    /// Bytes of all whole blocks of the format in the file.
    pub of_bytes: u64,
}

/// The formats of which a file has whole blocks, that with the most bytes first; `opaque` is none.
pub fn formats(model: &ModelFile) -> Vec<Format> {
    let count = |format| tensors(model, format).map(|(_, blocks)| blocks).sum::<u64>();
    let mut formats: Vec<_> =
        Format::ALL.into_iter().filter(|format| *format != Format::Opaque && count(*format) > 0).collect();
    formats.sort_by_key(|format| std::cmp::Reverse(count(*format)));
    formats
}

impl Pool {
    /// Reads the blocks of `format` in `model`.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(model: &ModelFile, format: Format) -> Result<Self> {
        Self::read_most(model, format, MOST)
    }

    /// At most `most` blocks, but one run.
    fn read_most(model: &ModelFile, format: Format, most: u64) -> Result<Self> {
        let total = tensors(model, format).map(|(_, blocks)| blocks).sum::<u64>();
        let runs: Vec<_> = if total <= most {
            vec![(0, total)]
        } else {
            let count = (most / RUN).max(1);
            (0..count).map(|run| (run * total / count, RUN.min(total))).collect()
        };
        let mut blocks = Vec::new();
        for (start, count) in runs {
            for index in start..start + count {
                blocks.push(block(model, format, index)?);
            }
        }
        let name = model.path().file_name().unwrap_or(model.path().as_os_str());
        let file = name.to_string_lossy().into_owned();
        Ok(Self { file, format, blocks, of_bytes: total * BLOCK_BYTES as u64 })
    }

    /// Bytes of the blocks.
    pub fn bytes(&self) -> u64 {
        (self.blocks.len() * BLOCK_BYTES) as u64
    }
}

/// The tensors of a format, with the whole blocks of each.
fn tensors(model: &ModelFile, format: Format) -> impl Iterator<Item = (&ModelTensor, u64)> {
    let of_format = model.tensors().iter().filter(move |tensor| tensor.format == format.name());
    of_format.map(|tensor| (tensor, tensor.length / BLOCK_BYTES as u64))
}

/// Whole block number `index` of a format.
fn block(model: &ModelFile, format: Format, mut index: u64) -> Result<BlockWords> {
    for (tensor, blocks) in tensors(model, format) {
        if index < blocks {
            let mut words = [0; BLOCK_BYTES];
            model.read(tensor, index * BLOCK_BYTES as u64, &mut words)?;
            return Ok(words);
        }
        index -= blocks;
    }
    bail!("{} has no such block of {format}", model.path().display())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::bench::codec::tests::write_model;

    /// Blocks whose first two bytes are their number, and `tail` bytes more.
    fn numbered(from: u16, count: u16, tail: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (from..from + count)
            .flat_map(|number| {
                let mut block = [1; BLOCK_BYTES];
                block[..2].copy_from_slice(&number.to_le_bytes());
                block
            })
            .collect();
        bytes.resize(bytes.len() + tail, 0xee);
        bytes
    }

    fn numbers(pool: &Pool) -> Vec<u16> {
        pool.blocks.iter().map(|block| u16::from_le_bytes([block[0], block[1]])).collect()
    }

    fn model(folder: &Path) -> ModelFile {
        let path = folder.join("some.safetensors");
        let tensors = [
            ("a", "BF16", numbered(0, 3, 2)),
            ("b", "F16", numbered(100, 2, 4094)),
            ("c", "BF16", numbered(0, 0, 4094)),
            ("d", "BF16", numbered(3, 400, 0)),
            ("e", "U8", numbered(7, 1, 0)),
            ("f", "F32", numbered(0, 0, 4)),
        ];
        write_model(&path, &tensors);
        ModelFile::open(&path).unwrap()
    }

    #[test]
    fn whole_blocks_of_a_format_are_taken_in_order_and_never_across_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path());
        assert_eq!(
            formats(&model),
            [Format::Bf16, Format::Fp16],
            "opaque has no planes, fp32 no whole block"
        );
        let pool = Pool::read(&model, Format::Bf16).unwrap();
        assert_eq!(numbers(&pool), (0..403).collect::<Vec<_>>());
        assert_eq!((pool.bytes(), pool.of_bytes), (403 * 4096, 403 * 4096));
        assert_eq!(pool.file, "some.safetensors");
        assert_eq!(numbers(&Pool::read(&model, Format::Fp16).unwrap()), [100, 101]);
    }

    #[test]
    fn of_too_many_blocks_runs_from_all_over_the_file_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path());
        let pool = Pool::read_most(&model, Format::Bf16, 2 * RUN).unwrap();
        let wanted: Vec<_> = (0..64).chain(201..265).collect();
        assert_eq!(numbers(&pool), wanted);
        assert_eq!((pool.bytes(), pool.of_bytes), (128 * 4096, 403 * 4096));
    }
}
