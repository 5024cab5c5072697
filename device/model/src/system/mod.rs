//! The paper's model of one accelerator and a CXL device: tokens a second against context
//! (TRACE, section IV-B, Figs. 12 to 14).
//!
//! A decoded token reads weights and a part of the KV cache. What fits into HBM costs nothing. The
//! rest comes through the device's DRAM and the link, and the slower of them is the bound.
//!
//! The paper prints none of these formulas: they are recovered from its figures. Its words count
//! writes of KV as well, and take hits by capacity. The figures have no writes, and subtract HBM's
//! bytes from those that a step reads.
//!
//! A step decodes one token of each sequence. It reads the KV of all of them, and the weights of
//! one token. Tokens a second are of one sequence: of all there are `batch` times as many.
//!
//! Two ways of accounting, because the printed figures need the first and hardware the second:
//! * [`Accounting::AsPrinted`] divides all KV by its ratio *before* HBM is subtracted, so KV in HBM
//!   is compressed as well, and takes the link to carry what the DRAM gives.
//! * [`Accounting::DeviceOnly`] compresses only what the device holds. The link carries words.

mod measured;
mod paper;
mod plot;
mod shape;

use std::ops::RangeInclusive;

use serde::Serialize;

pub use self::measured::from_json;
pub use self::paper::{ALPHAS, CEILING, Check, checks};
pub use self::plot::{svg, terminal};
pub use self::shape::{PRESETS, Shape};
use crate::ModelError;
use crate::number::{ceil, float, rounded, shown, within};

/// Where compression counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accounting {
    /// As the paper's figures were made.
    AsPrinted,
    /// In the device and nowhere else.
    DeviceOnly,
}

/// The accelerator, the device and the load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Server {
    /// Bytes of HBM that weights and KV may use.
    pub hbm_bytes: f64,
    /// The part of it for weights; the rest is for KV.
    pub alpha: f64,
    /// Bytes a second of the link in one direction.
    pub link_rate: f64,
    /// Bytes a second of the device's DRAM.
    pub ddr_rate: f64,
    /// Sequences decoded at once.
    pub batch: f64,
    /// The part of the context that a step reads.
    pub read_fraction: f64,
    /// Tokens a second that compute and HBM allow; none if that is not known.
    pub ceiling: Option<f64>,
    /// Bytes that one device holds.
    pub device_bytes: f64,
    /// Price of a gigabyte of the device's DRAM; 1 makes costs relative to plain memory.
    pub dram_price: f64,
}

impl Default for Server {
    /// The paper's (TRACE, IV-B). Its 16 and 0.2 are one reading of the product 3.2 that its
    /// figures need. A device of 256 GB is CXL-NDP's (section IV-A there).
    fn default() -> Self {
        Self {
            hbm_bytes: 76e9,
            alpha: 0.8,
            link_rate: 512e9,
            ddr_rate: 256e9,
            batch: 16.0,
            read_fraction: 0.2,
            ceiling: None,
            device_bytes: 256e9,
            dram_price: 1.0,
        }
    }
}

impl Server {
    /// Refuses what is of no use.
    ///
    /// # Errors
    /// The field that is.
    pub fn check(&self) -> Result<(), ModelError> {
        gigabytes("hbm", self.hbm_bytes / GB)?;
        within("alpha", self.alpha, 0.0..=1.0)?;
        gigabytes("link", self.link_rate / GB)?;
        gigabytes("ddr", self.ddr_rate / GB)?;
        within("batch", self.batch, 1.0..=1e6)?;
        within("f-rd", self.read_fraction, 1e-6..=1.0)?;
        gigabytes("device", self.device_bytes / GB)?;
        within("dram-price", self.dram_price, 0.0..=1e9)?;
        if let Some(ceiling) = self.ceiling {
            within("ceiling", ceiling, 1e-6..=1e9)?;
        }
        Ok(())
    }
}

const GB: f64 = 1e9;

/// Bytes of so many gigabytes of `hbm` or a `device`, or those a second of `link` or `ddr`.
///
/// # Errors
/// They are out of its bounds, which are said in the unit that is asked for.
pub fn gigabytes(field: &str, value: f64) -> Result<f64, ModelError> {
    let (unit, bounds) = match field {
        "hbm" => ("GB", 0.0..=1e6),
        "device" => ("GB", 1e-3..=1e9),
        _ => ("GB/s", 1e-3..=1e6),
    };
    if bounds.contains(&value) {
        return Ok(value * GB);
    }
    let must = format!("from {} to {} {unit}", bounds.start(), bounds.end());
    Err(ModelError::field(field, &format!("{} {unit}", shown(value)), &must))
}

/// What a design makes of bytes: bytes before over bytes after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratios {
    /// The design.
    pub design: &'static str,
    /// Of KV.
    pub kv: f64,
    /// Of weights.
    pub weights: f64,
    /// Where they come from.
    pub source: String,
}

/// What a ratio may be.
const RATIOS: RangeInclusive<f64> = 0.5..=4096.0;

/// Names of the designs, in the order of all reports.
pub const DESIGNS: [&str; 3] = ["plain", "gcomp", "trace"];

impl Ratios {
    fn new(design: &'static str, [kv, weights]: [f64; 2], source: &str) -> Self {
        Self { design, kv, weights, source: source.to_owned() }
    }

    fn plain() -> Self {
        Self::new("plain", [1.0, 1.0], "stores words")
    }

    /// The ratios that reproduce the printed figures.
    pub fn printed() -> [Self; 3] {
        let source = "recovered from TRACE, Figs. 12 to 14";
        [Self::plain(), Self::new("gcomp", [1.0, 1.1], source), Self::new("trace", [2.0, 1.25], source)]
    }

    /// The ratios that the paper measured, for weights of so many bits: of bf16, FP8 or INT4. It
    /// measured none of `gcomp` for weights of 8 bits or fewer.
    pub fn paper(weight_bits: f64) -> [Self; 3] {
        const NONE: &str = "weights taken to be 1: the paper has none of 8 bits or fewer";
        let (gcomp, of_gcomp, trace, of_trace) = match weight_bits {
            bits if bits > 8.0 => (1.259, "weights of Table I", 1.34, "BF16"),
            bits if bits > 5.0 => (1.0, NONE, 1.09, "FP8"),
            _ => (1.0, NONE, 1.01, "INT4"),
        };
        [
            Self::plain(),
            Self::new(
                "gcomp",
                [1.33, gcomp],
                &format!("TRACE, KV of Fig. 15 (Table I has 1.07), {of_gcomp}; ZSTD, Llama 3.1 8B, BookSum"),
            ),
            Self::new(
                "trace",
                [1.88, trace],
                &format!(
                    "TRACE, KV of Fig. 15, weights of Table IV's {of_trace}; ZSTD, Llama 3.1 8B, BookSum"
                ),
            ),
        ]
    }

    /// Refuses what is of no use.
    ///
    /// # Errors
    /// The field that is.
    pub fn check(&self) -> Result<(), ModelError> {
        within(&format!("{} kv ratio", self.design), self.kv, RATIOS)?;
        within(&format!("{} weights ratio", self.design), self.weights, RATIOS)?;
        Ok(())
    }
}

/// What bounds the tokens a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Nothing that is modelled: all that a step reads is in HBM. The device may hold what it does
    /// not read.
    Unbound,
    /// The given ceiling.
    Ceiling,
    /// The device's DRAM.
    Ddr,
    /// The link.
    Link,
}

/// One context length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Tokens.
    pub context: u64,
    /// Bytes that the device's DRAM gives for a step, of weights.
    pub weight_bytes: f64,
    /// The same of KV, all sequences together.
    pub kv_bytes: f64,
    /// Bytes on the link for a step.
    pub link_bytes: f64,
    /// Tokens a second of one sequence; null if nothing that is modelled bounds them.
    pub tokens_per_second: Option<f64>,
    /// What bounds them.
    pub bound: Bound,
    /// Devices needed to hold what does not fit into HBM.
    pub devices: u64,
}

/// One design on one server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Design {
    /// Its ratios.
    #[serde(flatten)]
    pub ratios: Ratios,
    /// Tokens from which a step reads KV from the device, which may hold some that it does not read
    /// before; null if it reads none in 2^30 tokens.
    pub spills_at: Option<u64>,
    /// Tokens from which it is faster than `plain` by a hundredth; null if it never is.
    pub faster_than_plain_from: Option<u64>,
    /// The most tokens at which it gives the target; null if it gives it nowhere.
    pub longest_at_target: Option<u64>,
    /// Price of a gigabyte of words in the device, at the last context.
    pub price_per_gb: f64,
    /// By context.
    pub points: Vec<Point>,
}

/// What a model of a server says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Always `modelled`.
    pub label: &'static str,
    /// The model's source.
    pub source: &'static str,
    /// How compression was accounted for.
    pub accounting: Accounting,
    /// The LLM.
    pub shape: Shape,
    /// The server.
    pub server: Server,
    /// Tokens a second that a planner asks for, if any.
    pub target: Option<f64>,
    /// Each design.
    pub designs: Vec<Design>,
}

/// Contexts are looked at up to here.
const MAX_CONTEXT: u64 = 1 << 30;

/// What is modelled.
#[derive(Clone, Debug)]
pub struct System {
    /// The LLM.
    pub shape: Shape,
    /// The server.
    pub server: Server,
    /// How compression is accounted for.
    pub accounting: Accounting,
}

impl System {
    /// Bytes of weights that a token reads from the device, as words.
    fn weight_words(&self) -> f64 {
        let total = self.shape.weight_bytes();
        let spilled = (total - self.server.alpha * self.server.hbm_bytes).max(0.0);
        self.shape.active_bytes() * spilled / total
    }

    /// Bytes of KV that a step reads, all sequences together.
    fn kv_read(&self, context: u64) -> f64 {
        self.server.batch * self.server.read_fraction * self.shape.kv_bytes() * float(context)
    }

    fn kv_hbm(&self) -> f64 {
        (1.0 - self.server.alpha) * self.server.hbm_bytes
    }

    /// Bytes of KV that a step reads from the device: as its DRAM gives them, and as the link
    /// carries them.
    fn kv_bytes(&self, ratios: &Ratios, context: u64) -> (f64, f64) {
        match self.accounting {
            Accounting::AsPrinted => {
                let bytes = (self.kv_read(context) / ratios.kv - self.kv_hbm()).max(0.0);
                (bytes, bytes)
            }
            Accounting::DeviceOnly => {
                let words = (self.kv_read(context) - self.kv_hbm()).max(0.0);
                (words / ratios.kv, words)
            }
        }
    }

    /// One context length under one design.
    pub fn point(&self, ratios: &Ratios, context: u64) -> Point {
        let words = self.weight_words();
        let weight_bytes = words / ratios.weights;
        let (kv_bytes, kv_link) = self.kv_bytes(ratios, context);
        let link_bytes = kv_link
            + match self.accounting {
                Accounting::AsPrinted => weight_bytes,
                Accounting::DeviceOnly => words,
            };
        let rate = |rate: f64, bytes: f64| if bytes > 0.0 { rate / bytes } else { f64::INFINITY };
        let ceiling = self.server.ceiling.unwrap_or(f64::INFINITY);
        let bounds = [
            (Bound::Ddr, rate(self.server.ddr_rate, weight_bytes + kv_bytes)),
            (Bound::Link, rate(self.server.link_rate, link_bytes)),
            (Bound::Ceiling, ceiling),
        ];
        let (bound, least) =
            bounds.into_iter().fold((Bound::Unbound, f64::INFINITY), |a, b| if b.1 < a.1 { b } else { a });
        Point {
            context,
            weight_bytes,
            kv_bytes,
            link_bytes,
            tokens_per_second: least.is_finite().then_some(least),
            bound,
            devices: ceil(self.held(ratios, context).1 / self.server.device_bytes),
        }
    }

    /// Bytes that do not fit into HBM: as words and as the device stores them.
    ///
    /// What is read in a step and what is held are different: all of the KV is held.
    fn held(&self, ratios: &Ratios, context: u64) -> (f64, f64) {
        let weights = (self.shape.weight_bytes() - self.server.alpha * self.server.hbm_bytes).max(0.0);
        let kv = self.server.batch * self.shape.kv_bytes() * float(context);
        let kv = (kv - self.kv_hbm()).max(0.0);
        (weights + kv, weights / ratios.weights + kv / ratios.kv)
    }

    fn rate(&self, ratios: &Ratios, context: u64) -> f64 {
        self.point(ratios, context).tokens_per_second.unwrap_or(f64::INFINITY)
    }

    /// What there is to say of all designs at these contexts.
    ///
    /// # Errors
    /// A field of the server or of the ratios that is of no use.
    pub fn report(
        &self,
        ratios: &[Ratios],
        contexts: &[u64],
        target: Option<f64>,
    ) -> Result<Report, ModelError> {
        self.server.check()?;
        ratios.iter().try_for_each(Ratios::check)?;
        if contexts.is_empty() {
            return Err(ModelError::missing("context"));
        }
        if let Some(wrong) = contexts.iter().find(|context| !(1..=MAX_CONTEXT).contains(*context)) {
            return Err(ModelError::field("context", wrong, &format!("from 1 to {MAX_CONTEXT} tokens")));
        }
        if let Some(target) = target {
            within("target", target, 1e-9..=1e9)?;
        }
        let plain = Ratios::plain();
        let designs = ratios.iter().map(|ratios| self.design(ratios, &plain, contexts, target)).collect();
        Ok(Report {
            label: "modelled",
            source: "recovered from TRACE, Figs. 12 to 14: traffic over bandwidth, no queues, no latency",
            accounting: self.accounting,
            shape: self.shape.clone(),
            server: self.server.clone(),
            target,
            designs,
        })
    }

    fn design(&self, ratios: &Ratios, plain: &Ratios, contexts: &[u64], target: Option<f64>) -> Design {
        let last = contexts.last().copied().unwrap_or(1);
        let (words, stored) = self.held(ratios, last);
        let per_word = if words > 0.0 { stored / words } else { 1.0 };
        // The rate never grows with the context, but what compression gains may come and go:
        // weights alone gain until KV outweighs them.
        let first = |holds: &dyn Fn(u64) -> bool| first(1..MAX_CONTEXT + 1, holds);
        Design {
            spills_at: first(&|context| self.kv_bytes(ratios, context).0 > 0.0),
            faster_than_plain_from: first_seen(&|context| {
                self.rate(ratios, context) > 1.01 * self.rate(plain, context)
            }),
            longest_at_target: target.and_then(|target| {
                match first(&|context| self.rate(ratios, context) < target) {
                    None => Some(MAX_CONTEXT),
                    Some(below) => (below > 1).then(|| below - 1),
                }
            }),
            price_per_gb: rounded(self.server.dram_price * per_word, 6),
            points: contexts.iter().map(|context| self.point(ratios, *context)).collect(),
            ratios: ratios.clone(),
        }
    }
}

/// The first of `range` for which `holds`, which once it holds holds for all behind it.
fn first(range: std::ops::Range<u64>, holds: &dyn Fn(u64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    (low < range.end).then_some(low)
}

/// The first context for which `holds`, which may not hold for all behind it. It is looked for at
/// steps of an eighth.
fn first_seen(holds: &dyn Fn(u64) -> bool) -> Option<u64> {
    let (mut below, mut at) = (0, 1);
    while !holds(at) {
        if at >= MAX_CONTEXT {
            return None;
        }
        below = at;
        at = (at + (at / 8).max(1)).min(MAX_CONTEXT);
    }
    first(below + 1..at + 1, holds)
}

#[cfg(test)]
mod tests;
