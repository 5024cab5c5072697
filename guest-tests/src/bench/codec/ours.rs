//! The codecs of this program: the device's, word-major lz4 and zstd, and `memcpy`.
//!
//! The rules:
//! * Blocks are coded and decoded in batches of [`BATCH`], each worked on once before it is timed, so that it is in the second-level
//!   cache. `memcpy` copies the same batches.
//! * The time of all blocks is the sum of the batches' medians: a batch is mostly over before another process has its turn on the
//!   processor, all blocks together are not.
//! * Decoding is from bundles as they lie, to different places; reading one block is as the device does it: the bundle is copied out of the
//!   store, where bundles follow each other, and decoded. Blocks are read in no order.
//! * A block of zeros has no bundle, and is decoded by filling.

use std::{
    hint::black_box,
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use lamina::{
    BLOCK_BYTES, BlockWords,
    codec::{
        Codec,
        block::{Bundle, MAX_BUNDLE, Stored},
    },
    format::Format,
    plane::PlaneMask,
};

use super::Timed;
use crate::bench::median;

/// Blocks worked on at a time.
pub const BATCH: usize = 32;

/// What is done with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It is copied.
    Copy,
    /// It is coded as planes.
    Planes(Codec),
    /// It is coded as words.
    Words(Codec),
}

/// A coded block.
struct Slot {
    stored: Option<Stored>,
    bytes: [u8; MAX_BUNDLE],
}

/// A codec that holds all blocks.
struct Contender {
    way: Way,
    bundle: Bundle,
    slots: Vec<Slot>,
    /// All bundles without gaps, and where each one lies.
    packed: Vec<u8>,
    places: Vec<Range<usize>>,
    name: String,
    samples: Vec<BatchSamples>,
}

/// Seconds of a batch, a sample a round.
#[derive(Default)]
struct BatchSamples {
    encode: Vec<f64>,
    decode: Vec<f64>,
    /// Of the batch's part of the order, not of its blocks.
    read: Vec<f64>,
}

/// All codecs of this program on some blocks.
pub struct Ours<'a> {
    format: Format,
    blocks: &'a [BlockWords],
    /// The order in which single blocks are read.
    order: Vec<usize>,
    out: Vec<BlockWords>,
    /// `memcpy` is the first.
    contenders: Vec<Contender>,
    /// Copying all blocks at once.
    whole: Vec<f64>,
    whole_out: Vec<BlockWords>,
}

impl<'a> Ours<'a> {
    /// Codes `blocks`, and checks that they are given back.
    ///
    /// # Errors
    /// When there are no blocks, or one is not given back.
    pub fn new(format: Format, blocks: &'a [BlockWords]) -> Result<Self> {
        if blocks.is_empty() {
            bail!("there are no blocks of {format} to code");
        }
        let mut order: Vec<_> = (0..blocks.len()).collect();
        // A hash, so that neither the processor nor a neighbour's cache line knows what comes next.
        order.sort_by_key(|index| (*index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut ways = vec![("memcpy".to_owned(), Way::Copy)];
        ways.extend(Codec::ALL.map(|codec| (format!("lamina {codec}"), Way::Planes(codec))));
        ways.extend(
            [(Codec::Lz4, "words lz4"), (Codec::Zstd, "words zstd-3")]
                .map(|(codec, name)| (name.to_owned(), Way::Words(codec))),
        );
        let contenders: Vec<_> =
            ways.into_iter().map(|(name, way)| Contender::new(name, way, format, blocks)).collect();
        let mut out = vec![[0; BLOCK_BYTES]; BATCH];
        for contender in &contenders {
            for (index, block) in blocks.iter().enumerate() {
                out[0].fill(0xa5);
                contender.decode(format, blocks, index, &mut out[0])?;
                out[1].fill(0xa5);
                contender.read(format, blocks, index, &mut out[1])?;
                if out[0] != *block || out[1] != *block {
                    bail!("{} does not give block {index} of {format} back", contender.name);
                }
            }
        }
        let whole_out = vec![[0; BLOCK_BYTES]; blocks.len()];
        Ok(Self { format, blocks, order, out, contenders, whole: Vec::new(), whole_out })
    }

    /// Measures all of them in turn, round by round, until `time` is over, one round at least.
    ///
    /// # Errors
    /// When a block does not decode.
    pub fn measure(&mut self, time: Duration) -> Result<()> {
        let Self { format, blocks, order, out, contenders, whole, whole_out } = self;
        let begun = Instant::now();
        loop {
            for contender in &mut *contenders {
                contender.round(*format, blocks, order, out)?;
            }
            whole.push(seconds(|| {
                whole_out.copy_from_slice(black_box(blocks));
                black_box(&mut *whole_out);
                Ok(())
            })?);
            if begun.elapsed() >= time {
                return Ok(());
            }
        }
    }

    /// What was measured of all of them; the first is `memcpy` in the second-level cache.
    ///
    /// # Panics
    /// If nothing was.
    pub fn timed(&self) -> Vec<Timed> {
        let bytes = std::mem::size_of_val(self.blocks) as u64;
        let mut timed: Vec<_> =
            self.contenders.iter().map(|contender| contender.timed(self.blocks)).collect();
        let whole = Timed {
            codec: "memcpy, all at once".to_owned(),
            stored_bytes: bytes,
            unit_bytes: bytes,
            encode: self.whole.clone(),
            decode: self.whole.clone(),
            read: self.whole.clone(),
        };
        timed.insert(1, whole);
        timed
    }
}

impl Contender {
    fn new(name: String, way: Way, format: Format, blocks: &[BlockWords]) -> Self {
        let mut new = Self {
            way,
            bundle: Bundle::new(),
            slots: Vec::new(),
            packed: Vec::new(),
            places: Vec::new(),
            name,
            samples: Vec::new(),
        };
        new.samples.resize_with(blocks.len().div_ceil(BATCH), BatchSamples::default);
        for block in blocks {
            if way == Way::Copy {
                break;
            }
            new.encode(format, block);
            let (mut bytes, length) = ([0; MAX_BUNDLE], new.length());
            bytes[..length].copy_from_slice(&new.bundle.bytes()[..length]);
            new.slots.push(Slot { stored: new.bundle.stored.clone(), bytes });
            let start = new.packed.len();
            new.packed.extend_from_slice(&bytes[..length]);
            new.places.push(start..start + length);
        }
        new
    }

    fn timed(&self, blocks: &[BlockWords]) -> Timed {
        let sum = |of: fn(&BatchSamples) -> &Vec<f64>| {
            self.samples.iter().map(|samples| median(of(samples).clone())).sum::<f64>()
        };
        let stored_bytes =
            if self.way == Way::Copy { std::mem::size_of_val(blocks) } else { self.packed.len() } as u64;
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^52 blocks")]
        let read = sum(|samples| &samples.read) / blocks.len() as f64;
        Timed {
            codec: self.name.clone(),
            stored_bytes,
            unit_bytes: BLOCK_BYTES as u64,
            encode: vec![sum(|samples| &samples.encode)],
            decode: vec![sum(|samples| &samples.decode)],
            read: vec![read],
        }
    }

    /// Bytes of the bundle that was coded last.
    fn length(&self) -> usize {
        if self.bundle.stored.is_some() { self.bundle.bytes().len() } else { 0 }
    }

    fn encode(&mut self, format: Format, block: &BlockWords) {
        match self.way {
            Way::Copy => {}
            Way::Planes(codec) => self.bundle.encode(format, codec, block),
            Way::Words(codec) => self.bundle.encode_words(codec, block),
        }
    }

    fn decode(
        &self,
        format: Format,
        blocks: &[BlockWords],
        index: usize,
        out: &mut BlockWords,
    ) -> Result<()> {
        match self.slots.get(index) {
            None => out.copy_from_slice(&blocks[index]),
            Some(Slot { stored: None, .. }) => out.fill(0),
            Some(Slot { stored: Some(stored), bytes }) => {
                stored.decode(PlaneMask::all(format), bytes, out)?;
            }
        }
        Ok(())
    }

    fn read(&self, format: Format, blocks: &[BlockWords], index: usize, out: &mut BlockWords) -> Result<()> {
        let Some(Slot { stored: Some(stored), .. }) = self.slots.get(index) else {
            return self.decode(format, blocks, index, out);
        };
        let bundle = &self.packed[self.places[index].clone()];
        let mut bytes = [0; MAX_BUNDLE];
        bytes[..bundle.len()].copy_from_slice(bundle);
        Ok(stored.decode(PlaneMask::all(format), &bytes, out)?)
    }

    /// Codes, decodes and reads every block once.
    fn round(
        &mut self,
        format: Format,
        blocks: &[BlockWords],
        order: &[usize],
        out: &mut [BlockWords],
    ) -> Result<()> {
        for number in 0..self.samples.len() {
            let batch = number * BATCH..((number + 1) * BATCH).min(blocks.len());
            let encode = warm_seconds(|| self.encode_batch(format, blocks, batch.clone(), out))?;
            let decode = warm_seconds(|| {
                for (index, out) in batch.clone().zip(&mut *out) {
                    self.decode(format, blocks, index, black_box(out))?;
                }
                Ok(())
            })?;
            let read = seconds(|| {
                for &index in &order[batch.clone()] {
                    self.read(format, blocks, index, black_box(&mut out[0]))?;
                }
                Ok(())
            })?;
            let samples = &mut self.samples[number];
            samples.encode.push(encode);
            samples.decode.push(decode);
            samples.read.push(read);
        }
        Ok(())
    }

    fn encode_batch(
        &mut self,
        format: Format,
        blocks: &[BlockWords],
        batch: Range<usize>,
        out: &mut [BlockWords],
    ) -> Result<()> {
        for (index, out) in batch.zip(out) {
            if self.way == Way::Copy {
                self.decode(format, blocks, index, black_box(out))?;
            } else {
                self.encode(format, black_box(&blocks[index]));
                black_box(self.bundle.bytes());
            }
        }
        Ok(())
    }
}

/// How long `work` takes.
fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64())
}

/// How long `work` takes the second time.
fn warm_seconds(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    seconds(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of zeros, of one value, of noise, and of numbers like weights.
    fn blocks() -> Vec<BlockWords> {
        let mut noise = 1_u32;
        let mut random = move || {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let [_, _, low, high] = noise.to_le_bytes();
            u16::from_le_bytes([low, high])
        };
        let mut blocks = vec![[0; BLOCK_BYTES], [0xff; BLOCK_BYTES]];
        for kind in 0..2 * BATCH {
            let mut block = [0; BLOCK_BYTES];
            for element in block.as_chunks_mut::<2>().0 {
                // Noise has NaN, infinities and denormals in it; weights have small exponents, the smaller the rarer.
                let weight =
                    (random() & 0x807f) | (0x3d80 - (u16::try_from(random().trailing_zeros()).unwrap() << 7));
                *element = if kind == 0 { random() } else { weight }.to_le_bytes();
            }
            blocks.push(block);
        }
        blocks
    }

    #[test]
    fn every_codec_has_a_sample_a_round_and_the_bytes_of_its_bundles() {
        let blocks = blocks();
        let mut ours = Ours::new(Format::Bf16, &blocks).unwrap();
        ours.measure(Duration::ZERO).unwrap();
        ours.measure(Duration::ZERO).unwrap();
        let bytes = (blocks.len() * BLOCK_BYTES) as u64;
        let mut bundle = Bundle::new();
        let mut stored = |planes: bool, codec| {
            let length = |block| {
                if planes {
                    bundle.encode(Format::Bf16, codec, block);
                } else {
                    bundle.encode_words(codec, block);
                }
                bundle.stored.as_ref().map_or(0, Stored::bytes) as u64
            };
            blocks.iter().map(length).sum::<u64>()
        };
        let wanted = [
            ("memcpy", bytes),
            ("memcpy, all at once", bytes),
            ("lamina lz4", stored(true, Codec::Lz4)),
            ("lamina zstd", stored(true, Codec::Zstd)),
            ("lamina tree", stored(true, Codec::Tree)),
            ("words lz4", stored(false, Codec::Lz4)),
            ("words zstd-3", stored(false, Codec::Zstd)),
        ];
        let timed = ours.timed();
        for (timed, (name, bytes)) in timed.iter().zip(wanted) {
            assert_eq!(timed.codec, name);
            // Codes that a thread keeps from block to block make a little difference to what a plane tree takes.
            let slack = if name == "lamina tree" { bytes / 200 } else { 0 };
            assert!(timed.stored_bytes.abs_diff(bytes) <= slack, "{name}: {} of {bytes}", timed.stored_bytes);
        }
        assert_eq!(timed.len(), wanted.len());
        assert!(wanted[4].1 < wanted[2].1 && wanted[2].1 < bytes, "{wanted:?}");
        for timed in &timed {
            let unit = if timed.codec == "memcpy, all at once" { bytes } else { 4096 };
            assert_eq!(timed.unit_bytes, unit, "{}", timed.codec);
        }
        assert_eq!(ours.whole.len(), 2);
        for contender in &ours.contenders {
            assert_eq!(contender.samples.len(), 3, "two whole batches and two blocks");
            for BatchSamples { encode, decode, read } in &contender.samples {
                assert_eq!([encode.len(), decode.len(), read.len()], [2; 3], "{}", contender.name);
            }
        }
    }

    #[test]
    fn the_time_of_all_blocks_is_the_sum_of_the_batches_medians() {
        let blocks = blocks();
        let mut contender = Contender::new("x".to_owned(), Way::Copy, Format::Bf16, &blocks);
        for (samples, base) in contender.samples.iter_mut().zip([1.0, 10.0, 100.0]) {
            samples.encode = vec![base, 9999.0, 2.0 * base];
            samples.decode = vec![3.0 * base; 2];
            samples.read = vec![66.0 * base];
        }
        let timed = contender.timed(&blocks);
        assert_eq!((timed.encode, timed.decode, timed.read), (vec![222.0], vec![333.0], vec![111.0]));
    }

    #[test]
    fn a_codec_that_gives_other_bytes_back_is_found_out() {
        let blocks = blocks();
        let mut ours = Ours::new(Format::Bf16, &blocks).unwrap();
        let contender = &mut ours.contenders[1];
        let mut out = [0; BLOCK_BYTES];
        contender.slots[2].bytes[7] ^= 1;
        assert!(contender.decode(Format::Bf16, &blocks, 2, &mut out).is_err());
        assert!(contender.read(Format::Bf16, &blocks, 2, &mut out).is_ok(), "it reads from the packed store");
        assert_eq!(out, blocks[2]);
        contender.packed[contender.places[2].start] ^= 1;
        assert!(contender.read(Format::Bf16, &blocks, 2, &mut out).is_err());
        assert!(ours.measure(Duration::ZERO).is_err());
    }

    #[test]
    fn blocks_are_read_in_another_order_each_of_them_once() {
        let blocks = blocks();
        let order = Ours::new(Format::Bf16, &blocks).unwrap().order;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..blocks.len()).collect::<Vec<_>>());
        assert!(order.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() < blocks.len() / 4);
    }

    #[test]
    fn no_blocks_are_refused() {
        assert!(Ours::new(Format::Bf16, &[]).is_err());
    }
}
