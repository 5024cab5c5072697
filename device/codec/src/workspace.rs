//! The buffers and the libraries' states that one block is coded and decoded in.

use crate::{BLOCK_BYTES, Codec, Undecodable, lz4, plane::PlaneBlock, tree, zstd};

/// Planes that begin at a cache line, as vectors want them to.
#[repr(align(64))]
pub(crate) struct Aligned(pub PlaneBlock);

impl Default for Aligned {
    fn default() -> Self {
        Self([0; BLOCK_BYTES])
    }
}

/// What one block is coded in.
#[derive(Default)]
pub(crate) struct BlockEncoder {
    /// Where words are split to.
    pub split: Box<Aligned>,
    pub tree: tree::Workspace,
    pub bytes: Compressors,
}

/// The states of the codecs of bytes.
#[derive(Default)]
pub(crate) struct Compressors {
    lz4: lz4::Compressor,
    zstd: zstd::Compressor,
}

impl Compressors {
    pub(crate) fn compress(&mut self, codec: Codec, input: &[u8], out: &mut [u8]) -> Option<usize> {
        match codec {
            Codec::Lz4 | Codec::Tree => self.lz4.compress(input, out),
            Codec::Zstd => self.zstd.compress(input, out),
        }
    }

    /// Whether a block is kept as it is because it is taken for noise. Who chose ZSTD has time.
    pub(crate) fn is_noise(&mut self, codec: Codec, block: &[u8; BLOCK_BYTES]) -> bool {
        match codec {
            Codec::Lz4 | Codec::Tree => self.lz4.is_noise(block),
            Codec::Zstd => false,
        }
    }
}

/// What one block is decoded in.
#[derive(Default)]
pub(crate) struct BlockDecoder {
    /// Where coded planes are decoded to.
    pub planes: Box<Aligned>,
    pub tree: tree::Decoder,
    pub bytes: Decompressors,
}

/// The states of the codecs of bytes.
#[derive(Default)]
pub(crate) struct Decompressors {
    zstd: zstd::Decompressor,
}

impl Decompressors {
    /// Decompresses `stored` to exactly fill `out`.
    pub(crate) fn decompress(
        &mut self,
        codec: Codec,
        stored: &[u8],
        out: &mut [u8],
    ) -> Result<(), Undecodable> {
        let got = match codec {
            Codec::Lz4 | Codec::Tree => lz4::decompress(stored, out),
            Codec::Zstd => self.zstd.decompress(stored, out),
        };
        let expected = out.len();
        match got {
            Ok(length) if length == expected => Ok(()),
            Ok(length) => Err(Undecodable { codec, expected, why: format!("they give {length}") }),
            Err(why) => Err(Undecodable { codec, expected, why }),
        }
    }
}
