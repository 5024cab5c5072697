//! Chunks that are written down: their bits, or the scores that thresholds make bits of.

use super::{Chunk, MAX_SAMPLE, PART, Work, check_base};
use crate::ModelError;
use crate::number::{float, within};

/// Weights of all chunks together: a thousand models.
const MAX_WEIGHTS: u64 = 1 << 50;

/// Refuses a number of weights that no model has.
///
/// # Errors
/// The number and its bounds.
pub fn check_weights(weights: f64) -> Result<(), ModelError> {
    within("weights", weights, 1.0..=float(MAX_WEIGHTS)).map(|_| ())
}

/// Chunks written down, a line each: weights and bits, of `base` at the most.
///
/// # Errors
/// The line and its field.
pub fn parse_map(text: &str, base: u32) -> Result<Vec<Chunk>, ModelError> {
    lines(text, base, "bits", |field, bits| {
        let bits = bits.parse::<u64>().map_err(|_| ModelError::field(field, bits, "a whole number"))?;
        Ok(u32::try_from(bits).unwrap_or(u32::MAX))
    })
}

/// Chunks and a router's scores of them, a line each: weights and a score from 0 to 1.
///
/// # Errors
/// The line and its field.
pub fn parse_scores(text: &str, base: u32, thresholds: &Thresholds) -> Result<Vec<Chunk>, ModelError> {
    lines(text, base, "score", |field, score| {
        let score = score.parse().map_err(|_| ModelError::field(field, score, "a number from 0 to 1"))?;
        within(field, score, 0.0..=1.0).map(|score| thresholds.bits(score))
    })
}

/// Lines of weights and something that gives bits; behind `#` is a comment.
fn lines(
    text: &str,
    base: u32,
    second: &str,
    bits: impl Fn(&str, &str) -> Result<u32, ModelError>,
) -> Result<Vec<Chunk>, ModelError> {
    let mut chunks = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let mut fields = line.split([' ', '\t', ',']).filter(|field| !field.is_empty());
        let mut next = |name: &str| {
            let field = format!("{name} of line {number}");
            fields.next().ok_or_else(|| ModelError::missing(&field)).map(|text| (field, text))
        };
        let (field, weights) = next("weights")?;
        let weights = weights.parse().map_err(|_| ModelError::field(&field, weights, "a whole number"))?;
        within(&field, float(weights), 1.0..=float(MAX_WEIGHTS))?;
        let (field, second) = next(second)?;
        let bits = bits(&field, second)?;
        within(&format!("bits of line {number}"), f64::from(bits), 0.0..=f64::from(base))?;
        // As of a number that is written with a comma.
        if let Some(more) = fields.next() {
            return Err(ModelError::field(&format!("end of line {number}"), more, "nothing more"));
        }
        chunks.push(Chunk { weights, bits });
    }
    if chunks.is_empty() {
        return Err(ModelError::missing(&format!("a line of weights and {second}")));
    }
    Ok(chunks)
}

/// Which scores give how many bits: above a score its bits, at or below the least none.
#[derive(Clone, Debug, PartialEq)]
pub struct Thresholds(Vec<(f64, u32)>);

impl Default for Thresholds {
    /// `MoDE`'s with precisions (CXL-NDP, II-C): bf16, fp12, fp8, fp4, or the chunk is skipped. The
    /// paper gives them as an example, and of its Router 1, which caps a block's precision; of
    /// Router 2, which chooses an expert's, it prints none.
    fn default() -> Self {
        Self(vec![(0.8, 16), (0.6, 12), (0.4, 8), (0.2, 4)])
    }
}

impl Thresholds {
    /// `0.8:16,0.6:12,0.4:8,0.2:4`, the highest first.
    ///
    /// # Errors
    /// It is not written so, or a score is not below the one before it.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let wrong = || {
            let must = "SCORE:BITS,…, the highest first, for example 0.8:16,0.6:12,0.4:8,0.2:4";
            ModelError::field("thresholds", text, must)
        };
        let mut all: Vec<(f64, u32)> = Vec::new();
        for part in text.split(',') {
            let (score, bits) = part.split_once(':').ok_or_else(wrong)?;
            let score: f64 = score.trim().parse().map_err(|_| wrong())?;
            let is_lower = all.last().is_none_or(|(before, _)| score < *before);
            if !(0.0..=1.0).contains(&score) || !is_lower {
                return Err(wrong());
            }
            all.push((score, bits.trim().parse().map_err(|_| wrong())?));
        }
        Ok(Self(all))
    }

    /// The bits of a chunk with this score.
    pub fn bits(&self, score: f64) -> u32 {
        self.0.iter().find(|(above, _)| score > *above).map_or(0, |(_, bits)| *bits)
    }
}

impl Work {
    /// A sample of chunks of any size, of about [`MAX_SAMPLE`] weights at the most.
    ///
    /// A large chunk counts as parts, each of which fills its rows, so that being parts costs
    /// nothing. Of parts that follow each other one is taken, which is the same one in each run.
    ///
    /// # Errors
    /// A field that is of no use.
    pub fn of(base: u32, chunks: &[Chunk]) -> Result<Self, ModelError> {
        check_base(base)?;
        for chunk in chunks {
            within("weights of a chunk", float(chunk.weights), 1.0..=float(MAX_WEIGHTS))?;
            within("bits of a chunk", f64::from(chunk.bits), 0.0..=f64::from(base))?;
        }
        let weights = chunks.iter().map(|chunk| chunk.weights).fold(0_u64, u64::saturating_add);
        within("weights of all chunks", float(weights), 0.0..=float(MAX_WEIGHTS))?;
        let every = weights.div_ceil(MAX_SAMPLE).max(1);
        let (mut before, mut stratum, mut sample) = (0, 0, Vec::new());
        for chunk in chunks {
            let parts = chunk.weights.div_ceil(PART);
            loop {
                // Which of a stratum is taken goes with no pattern of the chunks.
                let next = stratum * every + spread(stratum) % every;
                if next >= before + parts {
                    break;
                }
                let weights = PART.min(chunk.weights - (next - before) * PART);
                sample.push(Chunk { weights, bits: chunk.bits });
                stratum += 1;
            }
            before += parts;
        }
        let work = Self { base, chunks: sample };
        work.check()?;
        Ok(work)
    }
}

/// A number that looks like any.
fn spread(number: u64) -> u64 {
    let mixed = (number ^ number >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (mixed ^ mixed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53) >> 20
}
