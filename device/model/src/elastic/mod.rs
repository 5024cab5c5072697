//! Elastic precision: weights fetched by planes against weights fetched by words (TRACE, IV-D,
//! Figs. 17 to 21).
//!
//! * A chunk is what has one precision: an expert, a head, a neuron. Of a chunk of no bits nothing
//!   is fetched by either.
//! * By words, a chunk's containers are read whole, and chunks follow each other. By planes, the
//!   most significant planes are read, from rows in which one plane of many blocks of the chunk
//!   lies: a chunk begins at rows of its own (TRACE, IV-D: "aligned to TRACE's plane stripes").
//!   Nothing is compressed, as there.
//! * A sample of chunks is read by the DRAM model as fast as registers permit, in an order that is
//!   the same in each run. A weight's energy and time are the sample's.
//! * Of a mix each kind of chunk is read by itself, and its costs count by its part. A sample of
//!   all kinds would round each part to whole chunks.

mod given;
mod paper;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use self::given::{Thresholds, check_weights, parse_map, parse_scores};
pub use self::paper::{Beside, beside};
use crate::ModelError;
use crate::dram::{Access, Dram, Energy, Place, Profile};
use crate::number::{float, rounded, within};

/// A chunk: its weights and the bits of each that are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Chunk {
    /// Weights.
    pub weights: u64,
    /// Bits.
    pub bits: u32,
}

/// Bits and the part of all chunks that has them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mix(pub Vec<(u32, f64)>);

impl Mix {
    /// `16:0.5,8:0.25,0:0.25`.
    ///
    /// # Errors
    /// It is not written so, or its parts are not one together.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let wrong = || ModelError::field("mix", text, "BITS:PART,…, for example 16:0.5,8:0.5");
        let parts = text.split(',').map(|part| {
            let (bits, part) = part.split_once(':').ok_or_else(wrong)?;
            Ok((bits.trim().parse().map_err(|_| wrong())?, part.trim().parse().map_err(|_| wrong())?))
        });
        let mix = Self(parts.collect::<Result<_, _>>()?);
        mix.check(64)?;
        Ok(mix)
    }

    fn check(&self, base: u32) -> Result<(), ModelError> {
        for (bits, part) in &self.0 {
            within("bits of a mix", f64::from(*bits), 0.0..=f64::from(base))?;
            within("part of a mix", *part, 0.0..=1.0)?;
        }
        within("sum of a mix", self.0.iter().map(|(_, part)| part).sum(), 0.999..=1.001)?;
        Ok(())
    }

    /// Bits of a weight, on average.
    pub fn bits(&self) -> f64 {
        self.0.iter().map(|(bits, part)| f64::from(*bits) * part).sum()
    }
}

/// What is read.
#[derive(Clone, Debug, Serialize)]
pub struct Work {
    /// Bits of a weight as it is stored: 4, 8, 16 or 32.
    pub base: u32,
    /// The chunks.
    #[serde(skip)]
    pub chunks: Vec<Chunk>,
}

/// Weights that a sample has at the most: 32 MiB of bf16.
const MAX_SAMPLE: u64 = 1 << 24;
/// Chunks of a kind that are read: at the least, and at the most.
const MIN_CHUNKS: u64 = 5;
const MAX_CHUNKS: u64 = 1 << 20;
/// Weights that fill a row of each of their planes: a part of a chunk that is sampled. What is
/// saved does not change beyond.
const PART: u64 = 1 << 16;
/// Weights of a chunk above which a part of it is read for it.
const LARGE: u64 = 16 * PART;

impl Work {
    fn check(&self) -> Result<(), ModelError> {
        check_base(self.base)?;
        if self.chunks.is_empty() {
            return Err(ModelError::missing("chunks"));
        }
        for chunk in &self.chunks {
            within("weights of a chunk", float(chunk.weights), 1.0..=float(MAX_SAMPLE))?;
            within("bits of a chunk", f64::from(chunk.bits), 0.0..=f64::from(self.base))?;
        }
        let all = self.chunks.iter().fold(0_u64, |all, chunk| all.saturating_add(chunk.weights));
        within("weights of all chunks", float(all), 1.0..=float(2 * MAX_SAMPLE))?;
        Ok(())
    }

    fn weights(&self) -> f64 {
        float(self.chunks.iter().map(|chunk| chunk.weights).sum())
    }
}

fn check_base(base: u32) -> Result<(), ModelError> {
    if matches!(base, 4 | 8 | 16 | 32) {
        return Ok(());
    }
    Err(ModelError::field("base", &base, "4, 8, 16 or 32 bits"))
}

/// What a weight costs by one way of fetching.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Bits moved.
    pub bits: f64,
    /// Picojoules of reads.
    pub read_pj: f64,
    /// Picojoules of activations.
    pub activate_pj: f64,
    /// Picoseconds.
    pub time_ps: f64,
}

impl Cost {
    /// Picojoules of both.
    pub fn pj(&self) -> f64 {
        self.read_pj + self.activate_pj
    }

    /// Adds what a part of all weights costs, of which each costs this.
    fn add(&mut self, part: f64, cost: &Self) {
        self.bits += part * cost.bits;
        self.read_pj += part * cost.read_pj;
        self.activate_pj += part * cost.activate_pj;
        self.time_ps += part * cost.time_ps;
    }
}

/// Both ways of fetching the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fetched {
    /// Bits wanted of a weight, on average.
    pub bits: f64,
    /// By words.
    pub words: Cost,
    /// By planes.
    pub planes: Cost,
    /// The part of energy that planes save; negative if they cost more.
    pub energy_saved: f64,
    /// The part of time that planes save.
    pub time_saved: f64,
}

impl Fetched {
    fn new(bits: f64, words: Cost, planes: Cost) -> Self {
        let saved =
            |words: f64, planes: f64| if words > 0.0 { rounded(1.0 - planes / words, 6) } else { 0.0 };
        let energy_saved = saved(words.pj(), planes.pj());
        Self { bits, words, planes, energy_saved, time_saved: saved(words.time_ps, planes.time_ps) }
    }
}

/// Reads weights both ways.
///
/// # Errors
/// A field of the work or the module that is of no use.
pub fn fetch(profile: &Profile, work: &Work) -> Result<Fetched, ModelError> {
    work.check()?;
    let wanted: f64 = work.chunks.iter().map(|chunk| float(chunk.weights) * f64::from(chunk.bits)).sum();
    Ok(Fetched::new(wanted / work.weights(), by_words(profile, work)?, by_planes(profile, work)?))
}

/// Reads weights of a mix both ways, in chunks of so many, about `sample` weights of each kind.
///
/// # Errors
/// A field or the module that is of no use.
pub fn fetch_mix(
    profile: &Profile,
    base: u32,
    mix: &Mix,
    weights: u64,
    sample: u64,
) -> Result<Fetched, ModelError> {
    check_base(base)?;
    mix.check(base)?;
    within("chunk", float(weights), 1.0..=float(MAX_SAMPLE))?;
    within("sample", float(sample), 1.0..=float(MAX_SAMPLE))?;
    let weights = if weights > LARGE { PART } else { weights };
    let count = (sample / weights).clamp(MIN_CHUNKS, MAX_CHUNKS);
    let of_kind = |bits, count| {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        Work { base, chunks: vec![Chunk { weights, bits }; count] }
    };
    // By words a chunk is read whole, however few of its bits are wanted.
    let whole = by_words(profile, &of_kind(base, count))?;
    let (mut words, mut planes) = (Cost::default(), Cost::default());
    for (bits, part) in mix.0.iter().filter(|(bits, part)| *bits > 0 && *part > 0.0) {
        words.add(*part, &whole);
        // About as many lines of few planes as of all: refreshes, and what beginning and end take,
        // are then the same part of each.
        let count = (count * u64::from(base / bits)).min(MAX_CHUNKS);
        planes.add(*part, &by_planes(profile, &of_kind(*bits, count))?);
    }
    Ok(Fetched::new(mix.bits(), words, planes))
}

fn by_words(profile: &Profile, work: &Work) -> Result<Cost, ModelError> {
    read(profile, work, words, |_, base| 512 / base)
}

fn by_planes(profile: &Profile, work: &Work) -> Result<Cost, ModelError> {
    // A chunk has rows of its own.
    read(profile, work, planes, |profile, base| {
        let (place, in_row) = rows(profile, base);
        place * in_row * 512
    })
}

/// Gives a chunk's lines, of which the first weight is number `first`, to `take`.
type Lines = fn(&Profile, u32, u64, &Chunk, &mut dyn FnMut(Place));

/// Reads all chunks; each begins at a multiple of what `aligned` gives, in weights.
fn read(
    profile: &Profile,
    work: &Work,
    lines: Lines,
    aligned: fn(&Profile, u64) -> u64,
) -> Result<Cost, ModelError> {
    let mut dram = Dram::new(profile, 64)?;
    let (mut first, mut done) = (0, Vec::new());
    let aligned = aligned(profile, u64::from(work.base));
    for chunk in &work.chunks {
        if chunk.bits > 0 {
            lines(profile, work.base, first, chunk, &mut |place| {
                dram.push(&Access { at: 0, place, write: false, tag: 0 });
            });
            dram.take_done(&mut done);
            done.clear();
        }
        first = (first + chunk.weights).next_multiple_of(aligned);
    }
    let outcome = dram.finish()?;
    let energy = Energy::new(profile, &outcome.counts, outcome.cycles);
    let weights = work.weights();
    Ok(Cost {
        bits: float(outcome.counts.reads * 512) / weights,
        read_pj: energy.read_pj / weights,
        activate_pj: energy.activate_pj / weights,
        time_ps: profile.ns(outcome.cycles) * 1000.0 / weights,
    })
}

fn words(profile: &Profile, base: u32, first: u64, chunk: &Chunk, take: &mut dyn FnMut(Place)) {
    let base = u64::from(base);
    let lines = first * base / 512..((first + chunk.weights) * base).div_ceil(512);
    lines.for_each(|line| take(profile.geometry.by_line(line)));
}

/// Lines of a plane of a block of 4 KiB, and blocks that share a row.
fn rows(profile: &Profile, base: u64) -> (u64, u64) {
    let columns = u64::from(profile.geometry.columns);
    let place = (4096 / base).div_ceil(64).clamp(1, columns);
    (place, (columns / place).max(1))
}

/// A row holds one plane of as many blocks as it has room for. Block after block, so that the
/// planes of one come from as many banks.
fn planes(profile: &Profile, base: u32, first: u64, chunk: &Chunk, take: &mut dyn FnMut(Place)) {
    let (base, columns) = (u64::from(base), u64::from(profile.geometry.columns));
    let in_block = 4096 * 8 / base;
    let (place, in_row) = rows(profile, base);
    for block in first / in_block..(first + chunk.weights).div_ceil(in_block) {
        // A chunk's last block may not be full.
        let held = (first + chunk.weights - block * in_block).min(in_block);
        for plane in 0..u64::from(chunk.bits) {
            let row = (block / in_row * base + plane) * columns;
            let start = row + block % in_row * place;
            (0..held.div_ceil(512).min(place)).for_each(|line| take(profile.geometry.by_row(start + line)));
        }
    }
}
