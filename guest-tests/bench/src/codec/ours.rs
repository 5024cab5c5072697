//! The codecs of this program: the device's, word-major lz4 and zstd, and `memcpy`.
//!
//! The rules:
//! * A codec works on *units*, what it decodes at once: blocks ([`Blocks`]) or, of a KV cache,
//!   windows too ([`Windows`]).
//! * Units are coded and decoded in batches of [`BATCH`] blocks, or of one unit that is larger,
//!   each worked on once before it is timed, so that it is in the second-level cache. `memcpy`
//!   copies such batches of blocks.
//! * The time of all blocks is the sum of the batches' medians: a batch is mostly over before
//!   another process has its turn on the processor, all blocks together are not.
//! * Decoding is from bundles as they lie, to different places; reading one unit is as the device
//!   does it: each bundle is copied out of the store, where bundles follow each other, and decoded.
//!   Units are read in no order, and only whole ones: a tensor's last window may be shorter.
//! * A block of zeros has no bundle, and is decoded by filling.

use std::{
    hint::black_box,
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use lamina_codec::{BLOCK_BYTES, BlockWords, Codec};

use super::{
    Timed,
    blocks::{Blocks, Way},
    pool::Pool,
    windows::Windows,
};
use crate::median;

/// Blocks worked on at a time.
pub const BATCH: usize = 32;

/// A codec that holds some units coded, and decodes them to places of its own.
pub trait Coder {
    /// Codes these units again.
    fn encode(&mut self, units: Range<usize>);

    /// Decodes these units, a batch at most, to the places from the first on.
    ///
    /// # Errors
    /// When one does not decode.
    fn decode(&mut self, units: Range<usize>) -> Result<()>;

    /// Reads a unit from the store, to the first place.
    ///
    /// # Errors
    /// When it does not decode.
    fn read(&mut self, unit: usize) -> Result<()>;

    /// A place.
    fn out(&mut self, place: usize) -> &mut [u8];

    /// Bytes that all units take.
    fn stored_bytes(&self) -> usize;

    /// What is kept, to be damaged.
    #[cfg(test)]
    fn kept(&mut self) -> &mut super::kept::Kept;
}

/// A codec and what was measured of it.
struct Contender<'a> {
    name: String,
    coder: Box<dyn Coder + 'a>,
    /// The blocks of each unit.
    units: Vec<Range<usize>>,
    /// The units of each batch.
    batches: Vec<Range<usize>>,
    /// The units of the largest size, in the order in which they are read.
    order: Vec<usize>,
    samples: Vec<BatchSamples>,
}

/// Seconds of a batch, a sample a round.
#[derive(Default)]
struct BatchSamples {
    encode: Vec<f64>,
    decode: Vec<f64>,
    /// Of the batch's part of the order, not of its units.
    read: Vec<f64>,
}

/// The row of planes alone, of small floats.
pub const SPLIT_JOIN: &str = "split, join";

/// All codecs of this program on some blocks.
pub struct Ours<'a> {
    blocks: &'a [BlockWords],
    /// `memcpy` is the first.
    contenders: Vec<Contender<'a>>,
    /// Copying all blocks at once.
    whole: Vec<f64>,
    whole_out: Vec<BlockWords>,
}

impl<'a> Ours<'a> {
    /// Codes the blocks of `pool`, and checks that they are given back.
    ///
    /// # Errors
    /// When there are no blocks, or one is not given back.
    pub fn new(pool: &'a Pool) -> Result<Self> {
        let Pool { format, cache, blocks, .. } = pool;
        if blocks.is_empty() {
            bail!("there are no blocks of {format} to code");
        }
        let single = |name: String, way| {
            let coder = Box::new(Blocks::new(way, *format, blocks));
            Contender::new(name, coder, std::iter::repeat_n(1, blocks.len()))
        };
        let mut contenders = vec![single("memcpy".to_owned(), Way::Copy)];
        if format.is_float() && format.bits() <= 8 {
            contenders.push(single(SPLIT_JOIN.to_owned(), Way::Transpose));
        }
        contenders.extend(Codec::ALL.map(|codec| single(format!("lamina {codec}"), Way::Planes(codec))));
        if let Some(cache) = cache {
            contenders.extend(Codec::ALL.map(|codec| {
                let coder = Box::new(Windows::new(codec, cache, blocks));
                let sizes = cache.windows.iter().map(|window| window.blocks);
                Contender::new(format!("lamina {codec}, kv"), coder, sizes)
            }));
        }
        contenders.extend(
            [(Codec::Lz4, "words lz4"), (Codec::Zstd, "words zstd-3")]
                .map(|(codec, name)| single(name.to_owned(), Way::Words(codec))),
        );
        for contender in &mut contenders {
            contender.check(blocks)?;
        }
        let whole_out = vec![[0; BLOCK_BYTES]; blocks.len()];
        Ok(Self { blocks, contenders, whole: Vec::new(), whole_out })
    }

    /// Measures all of them in turn, round by round, until `time` is over, one round at least.
    ///
    /// # Errors
    /// When a block does not decode.
    pub fn measure(&mut self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            for contender in &mut self.contenders {
                contender.round()?;
            }
            self.whole.push(seconds(|| {
                self.whole_out.copy_from_slice(black_box(self.blocks));
                black_box(&mut self.whole_out);
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
        let bytes = size_of_val(self.blocks) as u64;
        let mut timed: Vec<_> = self.contenders.iter().map(Contender::timed).collect();
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

impl<'a> Contender<'a> {
    /// A codec of units of so many blocks.
    fn new(name: String, coder: Box<dyn Coder + 'a>, sizes: impl Iterator<Item = usize>) -> Self {
        let (mut units, mut batches) = (Vec::<Range<usize>>::new(), Vec::<Range<usize>>::new());
        let mut end = 0;
        for (unit, size) in sizes.enumerate() {
            units.push(end..end + size);
            end += size;
            match batches.last_mut() {
                Some(batch) if end - units[batch.start].start <= BATCH => batch.end = unit + 1,
                _ => batches.push(unit..unit + 1),
            }
        }
        let largest = units.iter().map(Range::len).max();
        let mut order: Vec<_> = (0..units.len()).filter(|unit| Some(units[*unit].len()) == largest).collect();
        // A hash, so that neither the processor nor a neighbour's cache line knows what comes next.
        order.sort_by_key(|unit| (*unit as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut samples = Vec::new();
        samples.resize_with(batches.len(), BatchSamples::default);
        Self { name, coder, units, batches, order, samples }
    }

    /// Decodes and reads every unit, and compares it with its part of `blocks`.
    fn check(&mut self, blocks: &[BlockWords]) -> Result<()> {
        for (unit, of) in self.units.iter().enumerate() {
            let wanted = blocks[of.clone()].as_flattened();
            for read in [false, true] {
                self.coder.out(0).fill(0xa5);
                if read { self.coder.read(unit) } else { self.coder.decode(unit..unit + 1) }?;
                if self.coder.out(0) != wanted {
                    bail!("{} does not give blocks {} to {} back", self.name, of.start, of.end - 1);
                }
            }
        }
        Ok(())
    }

    fn timed(&self) -> Timed {
        let sum = |of: fn(&BatchSamples) -> &Vec<f64>| {
            self.samples.iter().map(|samples| median(of(samples).clone())).sum::<f64>()
        };
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^52 units")]
        let read = sum(|samples| &samples.read) / self.order.len() as f64;
        let largest = self.order.first().map_or(0, |unit| self.units[*unit].len());
        Timed {
            codec: self.name.clone(),
            stored_bytes: self.coder.stored_bytes() as u64,
            unit_bytes: (largest * BLOCK_BYTES) as u64,
            encode: vec![sum(|samples| &samples.encode)],
            decode: vec![sum(|samples| &samples.decode)],
            read: vec![read],
        }
    }

    /// Codes and decodes every unit once, and reads every whole one.
    fn round(&mut self) -> Result<()> {
        let Self { coder, order, .. } = self;
        for (batch, samples) in self.batches.iter().zip(&mut self.samples) {
            // Brings what coding these units needs into the cache.
            coder.encode(batch.clone());
            let encode = seconds(|| {
                coder.encode(batch.clone());
                Ok(())
            })?;
            coder.decode(batch.clone())?;
            let decode = seconds(|| coder.decode(batch.clone()))?;
            // Of the last batches fewer may be whole, or none.
            let part = batch.start.min(order.len())..batch.end.min(order.len());
            let read = seconds(|| order[part].iter().try_for_each(|unit| coder.read(*unit)))?;
            samples.encode.push(encode);
            samples.decode.push(decode);
            samples.read.push(read);
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

#[cfg(test)]
mod tests {
    use lamina_codec::{
        Encoder,
        block::{Bundle, Stored},
        format::Format,
        kv::{KvLayout, Shape},
    };

    use super::*;
    use crate::codec::pool::{Cache, Window};

    fn pool(blocks: Vec<BlockWords>, cache: Option<Cache>) -> Pool {
        let (file, scales) = ("some".to_owned(), Vec::new());
        Pool { file, format: Format::Bf16, cache, blocks, scales, of_bytes: 0 }
    }

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
                // Noise has NaN, infinities and denormals in it; weights have small exponents, the
                // smaller the rarer.
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
        let pool = pool(blocks(), None);
        let blocks = &pool.blocks;
        let mut ours = Ours::new(&pool).unwrap();
        ours.measure(Duration::ZERO).unwrap();
        ours.measure(Duration::ZERO).unwrap();
        let bytes = (blocks.len() * BLOCK_BYTES) as u64;
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        let mut stored = |planes: bool, codec| {
            let length = |block| {
                if planes {
                    encoder.block(Format::Bf16, codec, block, &mut bundle);
                } else {
                    encoder.words(codec, block, &mut bundle);
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
            // Codes that a thread keeps from block to block make a little difference to what a
            // plane tree takes.
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
        let coder = Box::new(Blocks::new(Way::Copy, Format::Bf16, &blocks));
        let mut contender = Contender::new("x".to_owned(), coder, blocks.iter().map(|_| 1));
        for (samples, base) in contender.samples.iter_mut().zip([1.0, 10.0, 100.0]) {
            samples.encode = vec![base, 9999.0, 2.0 * base];
            samples.decode = vec![3.0 * base; 2];
            samples.read = vec![66.0 * base];
        }
        let timed = contender.timed();
        assert_eq!((timed.encode, timed.decode, timed.read), (vec![222.0], vec![333.0], vec![111.0]));
        // Of two units that are whole and one that is not, the two are read.
        let coder = Box::new(Blocks::new(Way::Copy, Format::Bf16, &blocks));
        let mut contender = Contender::new("x".to_owned(), coder, [2, 2, 1].into_iter());
        contender.samples[0] = BatchSamples { encode: vec![1.0], decode: vec![1.0], read: vec![12.0] };
        let timed = contender.timed();
        assert_eq!((timed.read, timed.unit_bytes), (vec![6.0], 2 * 4096));
    }

    #[test]
    fn a_codec_that_gives_other_bytes_back_is_found_out() {
        let pool = pool(blocks(), None);
        let mut ours = Ours::new(&pool).unwrap();
        let coder = &mut ours.contenders[1].coder;
        coder.kept().damage(2, false);
        assert!(coder.decode(2..3).is_err());
        assert!(coder.read(2).is_ok(), "it reads from the packed store");
        assert_eq!(coder.out(0), pool.blocks[2]);
        coder.kept().damage(2, true);
        assert!(coder.read(2).is_err());
        assert!(ours.measure(Duration::ZERO).is_err());
    }

    #[test]
    fn blocks_are_read_in_another_order_each_of_them_once() {
        let pool = pool(blocks(), None);
        let order = &Ours::new(&pool).unwrap().contenders[0].order;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..pool.blocks.len()).collect::<Vec<_>>());
        assert!(order.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() < order.len() / 4);
    }

    #[test]
    fn no_blocks_are_refused() {
        assert!(Ours::new(&pool(Vec::new(), None)).is_err());
    }

    /// So many windows, of which the last one is a block short, of rows whose channels are unlike
    /// each other.
    fn cache(channels: u32, tokens: u32, count: usize) -> Pool {
        let layout = KvLayout::rows(channels, tokens);
        let shape = Shape::new(Format::Bf16, &layout).unwrap().unwrap();
        let mut blocks = vec![[0; BLOCK_BYTES]; shape.blocks() * count - 1];
        let (elements, channels) = (blocks.as_flattened_mut().as_chunks_mut::<2>().0, channels as usize);
        for (index, element) in elements.iter_mut().enumerate() {
            // Each channel has an exponent of its own, of which some values are one below.
            let noise = index.wrapping_mul(0x9e37_79b1) >> 7;
            let exponent = 0x71 + (index % channels * 7) % 16 - usize::from(noise % 8 == 0);
            *element = u16::try_from(exponent << 7 | noise >> 3 & 0x7f).unwrap().to_le_bytes();
        }
        let window = |number| {
            let before = number * shape.blocks();
            Window { before: before as u64, blocks: shape.blocks().min(blocks.len() - before) }
        };
        let windows = (0..count).map(window).collect();
        pool(blocks, Some(Cache { side: "k", layout, shape, windows }))
    }

    #[test]
    fn windows_have_rows_of_their_own_and_take_what_the_device_makes_of_them() {
        let pool = cache(33, 186, 20);
        let mut ours = Ours::new(&pool).unwrap();
        ours.measure(Duration::ZERO).unwrap();
        let timed = ours.timed();
        let names: Vec<_> = timed.iter().map(|timed| timed.codec.as_str()).collect();
        let wanted = [
            "memcpy",
            "memcpy, all at once",
            "lamina lz4",
            "lamina zstd",
            "lamina tree",
            "lamina lz4, kv",
            "lamina zstd, kv",
            "lamina tree, kv",
            "words lz4",
            "words zstd-3",
        ];
        assert_eq!(names, wanted);
        let Cache { shape, windows, .. } = pool.cache.as_ref().unwrap();
        for (codec, place) in Codec::ALL.into_iter().zip(5..) {
            let (mut bundles, mut stored) = (Vec::new(), 0);
            for window in windows {
                let before = usize::try_from(window.before).unwrap();
                let bytes = pool.blocks[before..][..window.blocks].as_flattened();
                Encoder::new().window(shape, window.before, codec, bytes, None, &mut bundles);
                stored += bundles.iter().map(|bundle| bundle.bytes().len() as u64).sum::<u64>();
            }
            let Timed { stored_bytes, unit_bytes, .. } = timed[place];
            assert_eq!(stored_bytes, stored, "{codec}");
            assert!(stored_bytes < timed[place - 3].stored_bytes, "{codec}: windows take less than blocks");
            assert_eq!(unit_bytes, 3 * 4096);
        }
        let contender = &ours.contenders[4];
        assert_eq!(contender.batches, [0..10, 10..20], "as many windows as fit");
        assert_eq!(contender.units.last(), Some(&(57..59)));
        let mut read = contender.order.clone();
        read.sort_unstable();
        assert_eq!(read, (0..19).collect::<Vec<_>>(), "the last window is a block short");
        assert_eq!(contender.samples.iter().map(|samples| samples.read.len()).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn a_window_larger_than_a_batch_is_one_by_itself() {
        let pool = cache(400, 256, 2);
        let mut ours = Ours::new(&pool).unwrap();
        ours.measure(Duration::ZERO).unwrap();
        let contender = &ours.contenders[4];
        assert_eq!(contender.units, [0..50, 50..99]);
        assert_eq!(contender.batches, [0..1, 1..2]);
    }

    #[test]
    fn a_window_that_is_damaged_is_found_out() {
        let pool = cache(33, 124, 4);
        let mut ours = Ours::new(&pool).unwrap();
        for contender in &mut ours.contenders[4..7] {
            let coder = &mut contender.coder;
            coder.kept().damage(3, false);
            assert!(coder.decode(0..1).is_ok() && coder.decode(0..2).is_err());
            assert!(coder.read(1).is_ok(), "it reads from the packed store");
            assert_eq!(coder.out(0), pool.blocks[2..4].as_flattened());
            coder.kept().damage(3, true);
            assert!(coder.read(1).is_err());
        }
        assert!(ours.measure(Duration::ZERO).is_err());
    }
}
