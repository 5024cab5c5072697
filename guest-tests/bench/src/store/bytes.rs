//! What is stored.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};
use lamina_run::judge::Judge;
use memmap2::MmapMut;

use super::{Data, SHIFT};

/// Bytes of one kind, a block more than a store takes. They lie in pages of their own, as
/// `O_DIRECT` wants it.
pub(super) struct Source(MmapMut);

impl Source {
    /// `length` bytes of `data`: real ones over and over, or made of counters.
    pub(super) fn new(data: Data, models: &[PathBuf], cache: &Path, length: usize) -> Result<Self> {
        let mut bytes = MmapMut::map_anon(length + SHIFT)?;
        match data {
            Data::Bf16 => repeat(&values(models)?, &mut bytes)?,
            Data::Kv => repeat(&values(&[cache.to_owned()])?, &mut bytes)?,
            Data::Compressible => text(&mut bytes),
            Data::Incompressible => noise(&mut bytes),
        }
        Ok(Self(bytes))
    }

    /// What is stored into a hole.
    pub(super) fn first(&self) -> &[u8] {
        &self.0[..self.0.len() - SHIFT]
    }

    /// What is stored over it.
    pub(super) fn rewrite(&self) -> &[u8] {
        &self.0[SHIFT..]
    }
}

/// The bytes of all tensors.
fn values(models: &[PathBuf]) -> Result<Vec<u8>> {
    let judge = Judge::new(models)?;
    let mut bytes = Vec::new();
    for name in judge.names() {
        bytes.extend(judge.full(name, 0)?);
    }
    Ok(bytes)
}

fn repeat(once: &[u8], out: &mut [u8]) -> Result<()> {
    ensure!(!once.is_empty(), "the files have no values");
    for piece in out.chunks_mut(once.len()) {
        piece.copy_from_slice(&once[..piece.len()]);
    }
    Ok(())
}

/// A counter's numbers without pattern (splitmix64).
fn numbers() -> impl Iterator<Item = u64> {
    (1_u64..).map(|count| {
        let mut mixed = count.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}

fn noise(out: &mut [u8]) {
    for (piece, number) in out.chunks_mut(8).zip(numbers()) {
        piece.copy_from_slice(&number.to_le_bytes()[..piece.len()]);
    }
}

/// Lines as a server's log has them: words that come again and numbers that do not.
fn text(out: &mut [u8]) {
    const LEVELS: [&str; 4] = ["INFO", "INFO", "DEBUG", "WARN"];
    const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"];
    let mut left = out;
    for (second, number) in (0..).zip(numbers()) {
        let pick = |from: u32| usize::from((number >> from).to_le_bytes()[0] % 4);
        let line = format!(
            "{} {} worker={} request={} path={} took_us={} status=200\n",
            1_760_000_000_u64 + second,
            LEVELS[pick(0)],
            number % 16,
            number >> 32,
            PATHS[pick(8)],
            number >> 16 & 0xffff,
        );
        // What does not fit is left out.
        if left.write_all(line.as_bytes()).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rewrite_changes_every_block_and_noise_does_not_come_again() {
        for data in [Data::Compressible, Data::Incompressible] {
            let source = Source::new(data, &[], Path::new(""), 16 * SHIFT).unwrap();
            let (first, rewrite) = (source.first(), source.rewrite());
            assert_eq!((first.len(), rewrite.len()), (16 * SHIFT, 16 * SHIFT));
            let same = first.chunks(SHIFT).zip(rewrite.chunks(SHIFT)).filter(|(one, other)| one == other);
            assert_eq!(same.count(), 0, "{data:?}");
        }
        let first = Source::new(Data::Compressible, &[], Path::new(""), SHIFT).unwrap();
        assert!(
            first.first().iter().all(u8::is_ascii) && first.first().ends_with(&[first.first()[SHIFT - 1]])
        );
    }

    #[test]
    fn values_that_are_not_there_are_an_error() {
        assert!(repeat(&[], &mut [0; 8]).is_err());
        let mut out = [0; 5];
        repeat(&[1, 2], &mut out).unwrap();
        assert_eq!(out, [1, 2, 1, 2, 1]);
    }
}
