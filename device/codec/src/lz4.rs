//! LZ4: planes are compressed by [`short`], all else is done by `lz4_flex`.

mod short;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::BLOCK_BYTES;

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
        if input.len() <= short::MOST {
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
}

/// Decompresses `stored` to `out`, and says how many bytes it gave.
pub(super) fn decompress(stored: &[u8], out: &mut [u8]) -> Result<usize, String> {
    decompress_into(stored, out).map_err(|error| error.to_string())
}
