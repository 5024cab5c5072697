//! Windows of a KV cache, coded and decoded as the device does it.
//!
//! The rules:
//! * Windows follow each other as they do in the tensors, each coded in the way that takes least. Which way that is, is asked now and then, and
//!   that is in the time: a batch is brought into the cache by coding it in the ways that are known, so that asking takes its turn in what is timed.
//! * Whoever wants any byte of a window has all of its blocks decoded.

use std::{hint::black_box, ops::Range};

use anyhow::Result;
use lamina_codec::{
    BlockWords, Codec,
    block::{Bundle, MAX_BUNDLE},
    kv::{self, Coding, WindowDecoder},
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
    /// How it was coded.
    coding: Coding,
}

/// Windows by one codec; each is a unit.
pub struct Windows<'a> {
    codec: Codec,
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
            new.placed.push(Placed { window, blocks, coding: Coding::Plain });
            let last = new.placed.len() - 1;
            new.placed[last].coding = new.code(last, None);
            new.bundles.iter().for_each(|bundle| new.kept.push(bundle));
        }
        new
    }

    /// Codes a window as `coding` says, or as is best: how that was.
    fn code(&mut self, unit: usize, coding: Option<Coding>) -> Coding {
        let Placed { window, blocks, .. } = &self.placed[unit];
        let bytes = black_box(self.blocks[blocks.clone()].as_flattened());
        let shape = &self.cache.shape;
        let coded = kv::encode(shape, window.before, self.codec, bytes, coding, &mut self.bundles);
        black_box(&self.bundles);
        coded.coding
    }
}

fn decoder<'a>(cache: &'a Cache, window: &Window, out: &'a mut Vec<u8>) -> WindowDecoder<'a> {
    WindowDecoder::new(&cache.shape, window.before, window.blocks, PlaneMask::all(cache.shape.format()), out)
}

impl Coder for Windows<'_> {
    fn warm_up(&mut self, units: Range<usize>) {
        for unit in units {
            self.code(unit, Some(self.placed[unit].coding));
        }
    }

    fn encode(&mut self, units: Range<usize>) {
        for unit in units {
            self.code(unit, None);
        }
    }

    fn decode(&mut self, units: Range<usize>) -> Result<()> {
        for (place, unit) in units.enumerate() {
            let out = black_box(&mut self.out[place]);
            let mut decoder = decoder(self.cache, &self.placed[unit].window, out);
            for (block, index) in self.placed[unit].blocks.clone().enumerate() {
                let Slot { stored: Some(stored), bytes } = self.kept.slot(index) else { continue };
                decoder.add(block, stored, decoder.wanted(stored), bytes)?;
            }
            decoder.finish();
        }
        Ok(())
    }

    fn read(&mut self, unit: usize) -> Result<()> {
        let mut decoder = decoder(self.cache, &self.placed[unit].window, black_box(&mut self.out[0]));
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
