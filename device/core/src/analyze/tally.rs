//! What coding blocks of one format came to, summed up.

use super::limit;
use crate::layout::Layout;
use lamina_codec::block::{Bundle, MAX_BUNDLE, MAX_PLANES, Stored};
use lamina_codec::format::Format;
use lamina_codec::kv::{Coding, Shape};
use lamina_codec::plane::PlaneMask;
use lamina_codec::{BLOCK_BYTES, BlockWords};
use lamina_codec::{Codec, Encoder};

/// The sums of one format.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    pub(super) format: Format,
    pub(super) elements: u64,
    /// Bytes before coding.
    pub(super) logical_bytes: u64,
    /// What they take at least: see [`limit::bits`].
    pub(super) limit_bits: f64,
    /// One for each codec asked for, in that order.
    pub(super) coded: Vec<Coded>,
}

/// The sums of one codec.
#[derive(Clone, Debug)]
pub(super) struct Coded {
    pub(super) codec: Codec,
    /// Bytes of the bundles.
    pub(super) stored_bytes: u64,
    /// Bytes charged to each plane, by its number.
    pub(super) planes: [f64; MAX_PLANES],
    /// What became of the windows of KV caches.
    pub(super) windows: Windows,
}

/// How windows were coded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Windows {
    /// Windows by [`Coding`].
    pub(super) coded: [u64; Coding::ALL.len()],
    /// Rows left out because they repeat.
    pub(super) repeated_rows: u64,
}

impl Windows {
    pub(super) fn add(&mut self, other: &Self) {
        self.coded.iter_mut().zip(other.coded).for_each(|(sum, windows)| *sum += windows);
        self.repeated_rows += other.repeated_rows;
    }
}

impl Tally {
    pub(super) fn new(format: Format, codecs: &[Codec]) -> Self {
        let coded = codecs.iter().map(|&codec| Coded {
            codec,
            stored_bytes: 0,
            planes: [0.0; MAX_PLANES],
            windows: Windows::default(),
        });
        let coded = coded.collect();
        Self { format, elements: 0, logical_bytes: 0, limit_bits: 0.0, coded }
    }

    /// Codes `bytes`, which begin `before` bytes behind the tensor's beginning, a window's if it is
    /// a KV cache.
    pub(super) fn code(&mut self, layout: Layout, before: u64, bytes: &[u8]) {
        self.logical_bytes += bytes.len() as u64;
        self.elements += self.format.elements_in(bytes.len() as u64);
        blocks(bytes).for_each(|block| self.limit_bits += limit::bits(self.format, block.used()));
        if let Some(shape) = windows(self.format, layout) {
            return self.code_windows(&shape, before / BLOCK_BYTES as u64, bytes);
        }
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        for block in blocks(bytes) {
            for coded in &mut self.coded {
                encoder.block(self.format, coded.codec, &block.words, &mut bundle);
                coded.add_block(self.format, &bundle);
            }
        }
    }

    fn code_windows(&mut self, shape: &Shape, mut before: u64, bytes: &[u8]) {
        let (mut encoder, mut window, mut bundles) = (Encoder::new(), Vec::new(), Vec::new());
        for part in bytes.chunks(shape.blocks() * BLOCK_BYTES) {
            window.clear();
            window.extend_from_slice(part);
            window.resize(part.len().next_multiple_of(BLOCK_BYTES), 0);
            for coded in &mut self.coded {
                let how = encoder.window(shape, before, coded.codec, &window, None, &mut bundles);
                coded.windows.coded[how.coding as usize] += 1;
                coded.windows.repeated_rows += how.repeated_rows as u64;
                for bundle in &bundles {
                    coded.add_block(self.format, bundle);
                }
            }
            before += shape.blocks() as u64;
        }
    }

    /// Adds the sums of `other`, of the same format and codecs.
    pub(super) fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.logical_bytes += other.logical_bytes;
        self.limit_bits += other.limit_bits;
        for (coded, other) in self.coded.iter_mut().zip(&other.coded) {
            coded.stored_bytes += other.stored_bytes;
            coded.planes.iter_mut().zip(other.planes).for_each(|(sum, bytes)| *sum += bytes);
            coded.windows.add(&other.windows);
        }
    }
}

impl Coded {
    fn add_block(&mut self, format: Format, bundle: &Bundle) {
        if let Some(stored) = &bundle.stored {
            self.stored_bytes += bundle.bytes().len() as u64;
            charge(format, stored, &mut self.planes);
        }
    }
}

/// The windows that a tensor of this format and layout has.
pub(super) fn windows(format: Format, layout: Layout) -> Option<Shape> {
    match layout {
        Layout::Weight => None,
        // A layout that cannot be was refused before.
        Layout::Kv(layout) => Shape::new(format, &layout).ok().flatten(),
    }
}

/// A block filled up with zeros.
pub(super) struct Block {
    pub(super) words: BlockWords,
    length: usize,
}

impl Block {
    fn used(&self) -> &[u8] {
        &self.words[..self.length]
    }
}

/// The blocks that `bytes` fill.
pub(super) fn blocks(bytes: &[u8]) -> impl Iterator<Item = Block> {
    bytes.chunks(BLOCK_BYTES).map(|chunk| {
        let mut words = [0; BLOCK_BYTES];
        words[..chunk.len()].copy_from_slice(chunk);
        Block { words, length: chunk.len() }
    })
}

/// Charges each byte of a bundle in equal parts to the planes that cannot be read without it.
fn charge(format: Format, stored: &Stored, planes: &mut [f64; MAX_PLANES]) {
    let mut readers = [0_u8; MAX_BUNDLE];
    let count = format.planes();
    for plane in 0..count {
        stored.runs(PlaneMask(1 << plane), |run| readers[run].iter_mut().for_each(|count| *count += 1));
    }
    for (plane, sum) in planes[..count].iter_mut().enumerate() {
        stored.runs(PlaneMask(1 << plane), |run| {
            // Neighbouring bytes mostly have the same readers.
            for same in readers[run].chunk_by(|a, b| a == b) {
                *sum += f64::from(u16::try_from(same.len()).expect("within a bundle")) / f64::from(same[0]);
            }
        });
    }
}
