//! Codecs of single blocks: planes and words as the device stores them, and `memcpy`.

use std::{hint::black_box, ops::Range};

use anyhow::Result;
use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec,
    block::{Bundle, MAX_BUNDLE, Stored},
    format::Format,
    plane::PlaneMask,
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
    bundle: Bundle,
    kept: Kept,
    out: Vec<BlockWords>,
}

impl<'a> Blocks<'a> {
    /// Codes `blocks`.
    pub fn new(way: Way, format: Format, blocks: &'a [BlockWords]) -> Self {
        let (bundle, out) = (Bundle::new(), vec![[0; BLOCK_BYTES]; BATCH]);
        let mut new = Self { way, format, words: blocks, bundle, kept: Kept::default(), out };
        if way != Way::Copy {
            for block in blocks {
                new.code(block);
                new.kept.push(&new.bundle);
            }
        }
        new
    }

    fn code(&mut self, block: &BlockWords) {
        match self.way {
            Way::Copy => {}
            Way::Planes(codec) => self.bundle.encode(self.format, codec, block),
            Way::Words(codec) => self.bundle.encode_words(codec, block),
        }
    }
}

/// Decodes a bundle, or fills with the zeros that are none.
fn decode(
    format: Format,
    stored: Option<&Stored>,
    bytes: &[u8; MAX_BUNDLE],
    out: &mut BlockWords,
) -> Result<()> {
    match stored {
        None => out.fill(0),
        Some(stored) => stored.decode(PlaneMask::all(format), bytes, out)?,
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
            } else {
                let Slot { stored, bytes } = self.kept.slot(index);
                decode(self.format, stored.as_ref(), bytes, out)?;
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
        let mut bytes = [0; MAX_BUNDLE];
        let stored = self.kept.fetch(unit, &mut bytes);
        decode(self.format, stored, &bytes, out)
    }

    fn out(&mut self, place: usize) -> &mut [u8] {
        &mut self.out[place]
    }

    fn stored_bytes(&self) -> usize {
        if self.way == Way::Copy { size_of_val(self.words) } else { self.kept.stored_bytes() }
    }

    #[cfg(test)]
    fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }
}
