//! Codecs of single blocks: planes and words as the device stores them, and `memcpy`.

use std::{hint::black_box, ops::Range};

use anyhow::Result;
use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE, Stored},
    format::Format,
    plane::{self, PlaneBlock, PlaneMask},
};

use super::{
    kept::{Kept, Slot},
    ours::{BATCH, Coder},
};

/// What is done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is copied.
    Copy,
    /// It is split into planes, and these are joined: nothing is coded or checked.
    Transpose,
    /// It is coded as planes.
    Planes(Codec),
    /// It is coded as words.
    Words(Codec),
}

/// Blocks in one way; each is a unit.
pub struct Blocks<'a> {
    way: Way,
    format: Format,
    words: &'a [BlockWords],
    encoder: Encoder,
    decoder: Decoder,
    bundle: Bundle,
    kept: Kept,
    /// Planes that are not coded, of each block.
    planes: Vec<PlaneBlock>,
    out: Vec<BlockWords>,
}

impl<'a> Blocks<'a> {
    /// Codes `blocks`.
    pub fn new(way: Way, format: Format, blocks: &'a [BlockWords]) -> Self {
        let (bundle, out) = (Bundle::new(), vec![[0; BLOCK_BYTES]; BATCH]);
        let (encoder, decoder, kept) = (Encoder::new(), Decoder::new(), Kept::default());
        let planes = Vec::new();
        let mut new = Self { way, format, words: blocks, encoder, decoder, bundle, kept, planes, out };
        match way {
            Way::Copy => {}
            Way::Transpose => {
                new.planes = vec![[0; BLOCK_BYTES]; blocks.len()];
                for (planes, block) in new.planes.iter_mut().zip(blocks) {
                    plane::split(format, block, planes);
                }
            }
            Way::Planes(_) | Way::Words(_) => {
                for block in blocks {
                    new.code(block);
                    new.kept.push(&new.bundle);
                }
            }
        }
        new
    }

    fn code(&mut self, block: &BlockWords) {
        match self.way {
            Way::Copy | Way::Transpose => {}
            Way::Planes(codec) => self.encoder.block(self.format, codec, block, &mut self.bundle),
            Way::Words(codec) => self.encoder.words(codec, block, &mut self.bundle),
        }
    }
}

/// Decodes a bundle, or fills with the zeros that are none.
fn decode(
    decoder: &mut Decoder,
    format: Format,
    stored: Option<&Stored>,
    bytes: &[u8; MAX_BUNDLE],
    out: &mut BlockWords,
) -> Result<()> {
    match stored {
        None => out.fill(0),
        Some(stored) => decoder.block(stored, PlaneMask::all(format), bytes, out)?,
    }
    Ok(())
}

impl Coder for Blocks<'_> {
    fn encode(&mut self, units: Range<usize>) {
        let words = self.words;
        if self.way == Way::Copy {
            for (block, out) in words[units].iter().zip(&mut self.out) {
                black_box(out).copy_from_slice(block);
            }
            return;
        }
        if self.way == Way::Transpose {
            for (block, out) in words[units].iter().zip(&mut self.out) {
                plane::split(self.format, block, black_box(out));
            }
            return;
        }
        for block in &words[units] {
            self.code(black_box(block));
            black_box(self.bundle.bytes());
        }
    }

    fn decode(&mut self, units: Range<usize>) -> Result<()> {
        for (index, out) in units.zip(&mut self.out) {
            let out = black_box(out);
            if self.way == Way::Copy {
                out.copy_from_slice(&self.words[index]);
            } else if self.way == Way::Transpose {
                plane::join_block(self.format, PlaneMask::all(self.format), &self.planes[index], out);
            } else {
                let Slot { stored, bytes } = self.kept.slot(index);
                decode(&mut self.decoder, self.format, stored.as_ref(), bytes, out)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, unit: usize) -> Result<()> {
        let out = black_box(&mut self.out[0]);
        if self.way == Way::Copy {
            out.copy_from_slice(&self.words[unit]);
            return Ok(());
        }
        if self.way == Way::Transpose {
            plane::join_block(self.format, PlaneMask::all(self.format), &self.planes[unit], out);
            return Ok(());
        }
        let mut bytes = [0; MAX_BUNDLE];
        let stored = self.kept.fetch(unit, &mut bytes);
        decode(&mut self.decoder, self.format, stored, &bytes, out)
    }

    fn out(&mut self, place: usize) -> &mut [u8] {
        &mut self.out[place]
    }

    fn stored_bytes(&self) -> usize {
        match self.way {
            Way::Copy | Way::Transpose => size_of_val(self.words),
            Way::Planes(_) | Way::Words(_) => self.kept.stored_bytes(),
        }
    }

    #[cfg(test)]
    fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }
}
