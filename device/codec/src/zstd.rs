//! ZSTD with the least frame there is: no magic number, no checksum, no content size.

use zstd::{
    bulk,
    zstd_safe::{CParameter, DParameter, FrameFormat},
};

const LEVEL: i32 = 3;
/// The codec and its level.
pub(super) const NAME: &str = "zstd-3";

/// A compression context, made when it is first used: it takes megabytes.
#[derive(Default)]
pub(super) struct Compressor(Option<bulk::Compressor<'static>>);

impl Compressor {
    pub(super) fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Option<usize> {
        assert!(out.len() >= input.len());
        let limit = input.len().checked_sub(1)?;
        // What does not fit in one byte less than the input is an error here, and stored raw by the
        // caller.
        self.0.get_or_insert_with(compressor).compress_to_buffer(input, &mut out[..limit]).ok()
    }
}

/// A decompression context, made when it is first used.
#[derive(Default)]
pub(super) struct Decompressor(Option<bulk::Decompressor<'static>>);

impl Decompressor {
    pub(super) fn decompress(&mut self, stored: &[u8], out: &mut [u8]) -> Result<usize, String> {
        let context = self.0.get_or_insert_with(decompressor);
        context.decompress_to_buffer(stored, out).map_err(|error| error.to_string())
    }
}

fn compressor() -> bulk::Compressor<'static> {
    let mut compressor = bulk::Compressor::new(LEVEL).expect("a zstd context: out of memory otherwise");
    for parameter in [
        CParameter::Format(FrameFormat::Magicless),
        CParameter::ContentSizeFlag(false),
        CParameter::ChecksumFlag(false),
        CParameter::DictIdFlag(false),
    ] {
        compressor.set_parameter(parameter).expect("the bundled zstd knows these parameters");
    }
    compressor
}

fn decompressor() -> bulk::Decompressor<'static> {
    let mut decompressor = bulk::Decompressor::new().expect("a zstd context: out of memory otherwise");
    decompressor
        .set_parameter(DParameter::Format(FrameFormat::Magicless))
        .expect("the bundled zstd knows this parameter");
    decompressor
}
