//! Windows of a KV cache, coded and decoded as the device does it.
//!
//! The rules:
//! * Windows follow each other as they do in the tensors, each coded in the way that takes least.
//!   To find that way is in the time.
//! * Whoever wants any byte of a window has all of its blocks decoded.

use std::{hint::black_box, ops::Range};

use anyhow::Result;
use lamina_codec::{
    BlockWords, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE},
    kv::WindowDecoder,
    plane::PlaneMask,
};

use super::{
    kept::{Kept, Slot},
    ours::{BATCH, Coder},
    pool::{Cache, Window},
};

/// A window where its blocks lie.
struct Placed {
    window: Window,
    /// Of all blocks, its own.
    blocks: Range<usize>,
}

/// Windows by one codec; each is a unit.
pub struct Windows<'a> {
    codec: Codec,
    encoder: Encoder,
    decoder: Decoder,
    cache: &'a Cache,
    blocks: &'a [BlockWords],
    placed: Vec<Placed>,
    bundles: Vec<Bundle>,
    kept: Kept,
    out: Vec<Vec<u8>>,
}

impl<'a> Windows<'a> {
    /// Codes the windows of `cache`, whose blocks `blocks` are.
    pub fn new(codec: Codec, cache: &'a Cache, blocks: &'a [BlockWords]) -> Self {
        let mut new = Self {
            codec,
            encoder: Encoder::new(),
            decoder: Decoder::new(),
            cache,
            blocks,
            placed: Vec::new(),
            bundles: Vec::new(),
            kept: Kept::default(),
            // A window is a block at least.
            out: vec![Vec::new(); BATCH],
        };
        let mut end = 0;
        for &window in &cache.windows {
            let blocks = end..end + window.blocks;
            end = blocks.end;
            new.placed.push(Placed { window, blocks });
            new.code(new.placed.len() - 1);
            new.bundles.iter().for_each(|bundle| new.kept.push(bundle));
        }
        new
    }

    /// Codes a window in the way that takes least.
    fn code(&mut self, unit: usize) {
        let Placed { window, blocks } = &self.placed[unit];
        let bytes = black_box(self.blocks[blocks.clone()].as_flattened());
        let shape = &self.cache.shape;
        self.encoder.window(shape, window.before, self.codec, bytes, None, &mut self.bundles);
        black_box(&self.bundles);
    }
}

fn decoder<'a>(
    decoder: &'a mut Decoder,
    cache: &'a Cache,
    window: &Window,
    out: &'a mut Vec<u8>,
) -> WindowDecoder<'a> {
    WindowDecoder::new(
        decoder,
        &cache.shape,
        window.before,
        window.blocks,
        PlaneMask::all(cache.shape.format()),
        out,
    )
}

impl Coder for Windows<'_> {
    fn encode(&mut self, units: Range<usize>) {
        for unit in units {
            self.code(unit);
        }
    }

    fn decode(&mut self, units: Range<usize>) -> Result<()> {
        for (place, unit) in units.enumerate() {
            let out = black_box(&mut self.out[place]);
            let mut decoder = decoder(&mut self.decoder, self.cache, &self.placed[unit].window, out);
            for (block, index) in self.placed[unit].blocks.clone().enumerate() {
                let Slot { stored: Some(stored), bytes } = self.kept.slot(index) else { continue };
                decoder.add(block, stored, decoder.wanted(stored), bytes)?;
            }
            decoder.finish();
        }
        Ok(())
    }

    fn read(&mut self, unit: usize) -> Result<()> {
        let mut decoder =
            decoder(&mut self.decoder, self.cache, &self.placed[unit].window, black_box(&mut self.out[0]));
        let mut bytes = [0; MAX_BUNDLE];
        for (block, index) in self.placed[unit].blocks.clone().enumerate() {
            let Some(stored) = self.kept.fetch(index, &mut bytes) else { continue };
            decoder.add(block, stored, decoder.wanted(stored), &bytes)?;
        }
        decoder.finish();
        Ok(())
    }

    fn out(&mut self, place: usize) -> &mut [u8] {
        &mut self.out[place]
    }

    fn stored_bytes(&self) -> usize {
        self.kept.stored_bytes()
    }

    #[cfg(test)]
    fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }
}
