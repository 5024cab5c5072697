//! LZ4: planes are compressed by [`short`], all else is done by `lz4_flex`.

mod short;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::BLOCK_BYTES;

/// What is coded of a block to tell whether it is noise: the beginnings of its halves, so that a
/// half that repeats the other is seen.
const SAMPLES: usize = 2;
const SAMPLE_BYTES: usize = 512;
/// The part of the samples that coding must save.
const MIN_SAVED: usize = 16;

/// The library's hash table, which it clears for each input, and an output buffer for its worst
/// case.
pub(super) struct Compressor {
    table: CompressTable,
    scratch: Vec<u8>,
}

impl Default for Compressor {
    fn default() -> Self {
        Self { table: CompressTable::small(), scratch: vec![0; get_maximum_output_size(BLOCK_BYTES)] }
    }
}

impl Compressor {
    pub(super) fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        assert!(input.len() <= BLOCK_BYTES && out.len() >= input.len());
        if input.len() <= short::MAX_INPUT {
            return short::compress(input, out);
        }
        let Self { table, scratch } = self;
        let length = compress_into_with_table(input, scratch, table)
            .expect("the scratch holds the worst case of a block");
        (length < input.len()).then(|| {
            out[..length].copy_from_slice(&scratch[..length]);
            length
        })
    }

    /// Whether a block is taken for noise, in which so little repeats that to look for it takes
    /// longer than what it saves is worth: compressed data, quantised weights.
    pub(super) fn is_noise(&mut self, block: &[u8; BLOCK_BYTES]) -> bool {
        let mut samples = [0; SAMPLES * SAMPLE_BYTES];
        let halves = block.chunks_exact(BLOCK_BYTES / SAMPLES);
        for (sample, half) in samples.chunks_exact_mut(SAMPLE_BYTES).zip(halves) {
            sample.copy_from_slice(&half[..SAMPLE_BYTES]);
        }
        let Self { table, scratch } = self;
        let length = compress_into_with_table(&samples, scratch, table)
            .expect("the scratch holds the worst case of a block");
        length > samples.len() - samples.len() / MIN_SAVED
    }
}

/// Decompresses `stored` to `out`, and says how many bytes it gave.
pub(super) fn decompress(stored: &[u8], out: &mut [u8]) -> Result<usize, String> {
    decompress_into(stored, out).map_err(|error| error.to_string())
}
