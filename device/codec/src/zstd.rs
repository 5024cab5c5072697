//! ZSTD with the least frame there is: no magic number, no checksum, no content size. Contexts are kept in the thread.

use std::cell::RefCell;

use zstd::{
    bulk::{Compressor, Decompressor},
    zstd_safe::{CParameter, DParameter, FrameFormat},
};

const LEVEL: i32 = 3;
/// The codec and its level.
pub(super) const NAME: &str = "zstd-3";

thread_local! {
    static COMPRESSOR: RefCell<Compressor<'static>> = RefCell::new(compressor());
    static DECOMPRESSOR: RefCell<Decompressor<'static>> = RefCell::new(decompressor());
}

fn compressor() -> Compressor<'static> {
    let mut compressor = Compressor::new(LEVEL).expect("a zstd context: out of memory otherwise");
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

fn decompressor() -> Decompressor<'static> {
    let mut decompressor = Decompressor::new().expect("a zstd context: out of memory otherwise");
    decompressor
        .set_parameter(DParameter::Format(FrameFormat::Magicless))
        .expect("the bundled zstd knows this parameter");
    decompressor
}

pub(super) fn compress(input: &[u8], out: &mut [u8]) -> Option<usize> {
    assert!(out.len() >= input.len());
    let limit = input.len().checked_sub(1)?;
    // What does not fit in one byte less than the input is an error here, and stored raw by the caller.
    COMPRESSOR.with_borrow_mut(|context| context.compress_to_buffer(input, &mut out[..limit]).ok())
}

pub(super) fn decompress(stored: &[u8], out: &mut [u8]) -> Result<usize, String> {
    DECOMPRESSOR
        .with_borrow_mut(|context| context.decompress_to_buffer(stored, out))
        .map_err(|e| e.to_string())
}
