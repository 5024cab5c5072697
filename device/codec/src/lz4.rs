//! LZ4: of planes by [`short`] and [`Kernel`], of what is longer through `lz4_flex`.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod short;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};

use crate::{BLOCK_BYTES, kernel::kernels};

/// The library's hash table, which it clears for each input, and an output buffer for its worst case.
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

/// Bytes behind a stream and behind a plane that let [`decompress_plane`] copy more than is asked for.
const SLACK: usize = 32;

kernels! {
    /// A way to decompress planes.
    enum Kernel {
        /// By the library.
        Portable,
        /// By registers of 16 bytes.
        Avx2: ["avx2"],
    }
}

impl Kernel {
    /// [`decompress_plane`] by this kernel, which must be available.
    fn decompress_plane(
        self,
        stored: &[u8],
        length: usize,
        out: &mut [u8],
        plane: usize,
    ) -> Result<usize, String> {
        assert!(self.is_available(), "{self:?} needs another processor");
        let whole = match self {
            Self::Portable => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                stored.len() >= length + SLACK
                    && out.len() >= plane + SLACK
                    // SAFETY: the processor has AVX2, as was asserted above.
                    && unsafe { avx2::decompress(stored, length, out, plane) }
            }
        };
        // What is wrong with a stream, the library tells.
        if whole { Ok(plane) } else { decompress(&stored[..length], &mut out[..plane]) }
    }
}

/// Decompresses the first `length` bytes of `stored` to the first `plane` bytes of `out`, as [`decompress`] does. With [`SLACK`] bytes behind both it is quicker; what is behind the plane is lost.
pub(super) fn decompress_plane(
    stored: &[u8],
    length: usize,
    out: &mut [u8],
    plane: usize,
) -> Result<usize, String> {
    Kernel::best().decompress_plane(stored, length, out, plane)
}

#[cfg(test)]
mod tests;
