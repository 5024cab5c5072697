//! What coding blocks of one format came to, summed up.

use super::limit;
use crate::codec::Codec;
use crate::codec::block::{Bundle, MAX_BUNDLE, MAX_PLANES, Stored};
use crate::format::Format;
use crate::layout::Layout;
use crate::plane::PlaneMask;
use crate::{BLOCK_BYTES, BlockWords};

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
}

impl Tally {
    pub(super) fn new(format: Format, codecs: &[Codec]) -> Self {
        let coded =
            codecs.iter().map(|&codec| Coded { codec, stored_bytes: 0, planes: [0.0; MAX_PLANES] }).collect();
        Self { format, elements: 0, logical_bytes: 0, limit_bits: 0.0, coded }
    }

    /// Codes `bytes`, which begin a block.
    pub(super) fn code(&mut self, layout: Layout, bytes: &[u8]) {
        let mut bundle = Bundle::new();
        self.logical_bytes += bytes.len() as u64;
        self.elements += self.format.elements_in(bytes.len() as u64);
        for block in blocks(bytes) {
            self.limit_bits += limit::bits(self.format, block.used());
            for coded in &mut self.coded {
                bundle.encode(self.format, coded.codec, &block.words);
                if let Some(stored) = &bundle.stored {
                    coded.stored_bytes += bundle.bytes().len() as u64;
                    charge(self.format, stored, &mut coded.planes);
                }
            }
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
        }
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
