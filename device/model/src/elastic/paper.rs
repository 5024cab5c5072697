//! The paper's savings beside ours.
//!
//! The paper prints no mix of precisions. Of experts a mix is fitted to the energy that the paper
//! saves, and then gives the time; where it prints no energy, to the time. Of heads and neurons the
//! paper's saving says which part of the weights is fetched.

use serde::Serialize;

use super::{Fetched, Mix, PART, fetch_mix};
use crate::ModelError;
use crate::dram::Profile;
use crate::number::rounded;

/// A number of the paper and what there is beside it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Beside {
    /// The figure.
    pub figure: &'static str,
    /// Of what.
    pub what: &'static str,
    /// The part of energy, or time, that planes save in the paper.
    pub paper: f64,
    /// Whether the paper prints no such part, and it is worked out from its milliseconds.
    pub derived: bool,
    /// Whether a constant of ours was taken from `paper`, so that ours is no prediction of it.
    pub fitted: bool,
    /// Bits of a weight on average; the paper's where it says them, else those at which ours is as
    /// much.
    pub bits: f64,
    /// What ours is at these bits.
    pub ours: f64,
    /// Picojoules of a weight by words and by planes in the paper, where it says them.
    pub paper_pj: Option<[f64; 2]>,
    /// Milliseconds of a load by words and by planes in the paper, where it says them.
    pub paper_ms: Option<[f64; 2]>,
    /// Picojoules of ours.
    pub ours_pj: [f64; 2],
    /// The mix of precisions that ours is of.
    pub mix: Mix,
    /// All that ours costs.
    pub fetched: Fetched,
    /// Why they differ.
    pub reason: &'static str,
}

/// Weights of a chunk: of an expert many, of a head and of a neuron of OPT-30B (TRACE, IV-D).
const EXPERT: u64 = 1 << 21;
const HEAD: u64 = 3_700_000;
const NEURON: u64 = 7_200;

const FITTED: &str =
    "the paper prints no mix: half precision for a part of the chunks, chosen so that ours saves as much";
const TIME: &str = "the mix that Fig. 18's energy needs, so nothing is fitted to the time";
const FITTED_TIME: &str = "fitted to the time, because the paper prints no energy of this model. Four planes are one bank a channel, \
    so half the bits take more than half the time";
const NARROW: &str = "not reached at half the bits: four planes are four rows, so a channel reads one bank, whose reads follow \
    by tCCD_L, and words alternate between bank groups, by tCCD_S. The paper does not say how its rows are spread";
const HEADS: &str = "the paper's words cost less at fewer bits, so part of its weights are not fetched at all; it does not \
    print which. Here the part is taken that its saving implies, at the bits that keep the average. What heads save \
    agrees by construction; ours is what activations add";
const NEURONS: &str = "the paper prints no energies of neurons, so the part that is fetched is what its saving implies, as of heads. \
    A neuron's 7 200 weights fill a ninth of a row of each plane, and each plane opens a row of its own: activations \
    take a part of what planes save. The paper does not say how its neurons share rows";
const HEADS_TIME: &str = "the weights and the mix as for Fig. 21's energy. Rows of planes go over four channels whole, so planes that are no \
    multiple of four leave channels waiting; the paper does not say how its rows are spread";
const NEURONS_TIME: &str = "the weights and the mix as for Fig. 21's energy. Beside what holds of heads, a row gives fifteen lines of a plane \
    before the next is opened";

/// What, base bits, energy saved in the paper (TRACE, Fig. 18).
const ENERGY: [(&str, u32, f64); 6] = [
    ("Llama 3.1 8B bf16, energy", 16, 0.278),
    (LLAMA_70B, 16, 0.259),
    (MIXTRAL, 16, 0.299),
    ("LLaMA-MoE 3.5B bf16, energy", 16, 0.272),
    ("Mixtral 8x7B fp8, energy", 8, 0.196),
    ("Mixtral 8x7B int4, energy", 4, 0.179),
];
const MIXTRAL: &str = "Mixtral 8x7B bf16, energy";
const LLAMA_70B: &str = "Llama 3.1 70B bf16, energy";

/// What, base bits, milliseconds by words and by planes in the paper (TRACE, Fig. 19), the part
/// saved where it prints that, and whose energy the mix is fitted to.
type Load = (&'static str, u32, [f64; 2], Option<f64>, Option<&'static str>);

const LOADS: [Load; 4] = [
    ("Mixtral 8x7B bf16, 705.90 to 495.06 ms", 16, [705.90, 495.06], Some(0.300), Some(MIXTRAL)),
    ("Llama 3.1 70B bf16, 910.58 to 674.73 ms", 16, [910.58, 674.73], Some(0.259), Some(LLAMA_70B)),
    ("Llama 3.1 70B fp8, 348.65 to 293.27 ms", 8, [348.65, 293.27], None, None),
    ("Llama 3.1 70B int4, 251.03 to 214.11 ms", 4, [251.03, 214.11], None, None),
];

/// What, weights of a chunk, bits, energy saved (TRACE, Fig. 21), picojoules by words and planes
/// there, time saved (CXL-NDP, Fig. 20).
type Opt = (&'static str, u64, f64, f64, Option<[f64; 2]>, f64);

const OPT: [Opt; 6] = [
    ("OPT 30B heads", HEAD, 1.6, 0.305, Some([49.6, 34.5]), 0.362),
    ("OPT 30B heads", HEAD, 4.8, 0.404, Some([118.9, 70.8]), 0.406),
    ("OPT 30B heads", HEAD, 8.0, 0.409, Some([238.9, 141.2]), 0.421),
    ("OPT 30B neurons", NEURON, 1.6, 0.194, None, 0.248),
    ("OPT 30B neurons", NEURON, 4.8, 0.203, None, 0.279),
    ("OPT 30B neurons", NEURON, 8.0, 0.339, None, 0.384),
];

/// Weights of each kind that are sampled, of experts and heads by parts.
const SAMPLE: u64 = 1 << 18;

fn fetched(profile: &Profile, base: u32, chunk: u64, mix: &Mix) -> Result<Fetched, ModelError> {
    fetch_mix(profile, base, mix, chunk.min(PART), SAMPLE)
}

/// The mix of whole and half precision that saves `paper`, by `saved`; all at half if none does.
/// Whether one does, too.
fn fitted_mix(
    profile: &Profile,
    base: u32,
    paper: f64,
    saved: fn(&Fetched) -> f64,
) -> Result<(Mix, bool), ModelError> {
    let half = |part: f64| Mix(vec![(base, 1.0 - part), (base / 2, part)]);
    // What is saved grows with the part of all chunks that have half the bits, from what all planes
    // save, which is little and may be less than nothing.
    let none = saved(&fetched(profile, base, EXPERT, &half(0.0))?);
    let all_half = saved(&fetched(profile, base, EXPERT, &half(1.0))?);
    let reached = all_half > paper;
    let part = if reached { ((paper - none) / (all_half - none)).clamp(0.0, 1.0) } else { 1.0 };
    Ok((half(part), reached))
}

/// All of them.
///
/// # Errors
/// The module is of no use.
pub fn beside(profile: &Profile) -> Result<Vec<Beside>, ModelError> {
    let (energy, time) = (|of: &Fetched| of.energy_saved, |of: &Fetched| of.time_saved);
    let mut all: Vec<Beside> = Vec::new();
    for (what, base, paper) in ENERGY {
        let (mix, fitted) = fitted_mix(profile, base, paper, energy)?;
        let of = fetched(profile, base, EXPERT, &mix)?;
        let numbers = [paper, of.energy_saved, rounded(of.bits, 2)];
        let reason = if fitted { FITTED } else { NARROW };
        all.push(Beside { fitted, ..Beside::new("Fig. 18", what, numbers, (mix, of), reason) });
    }
    for (what, base, ms, printed, as_of) in LOADS {
        let paper = printed.unwrap_or(1.0 - ms[1] / ms[0]);
        let mix_of = as_of.and_then(|as_of| all.iter().find(|beside| beside.what == as_of));
        let (mix, fitted, reason) = match mix_of {
            Some(beside) => (beside.mix.clone(), false, TIME),
            None => match fitted_mix(profile, base, paper, time)? {
                (mix, true) => (mix, true, FITTED_TIME),
                (mix, false) => (mix, false, NARROW),
            },
        };
        let of = fetched(profile, base, EXPERT, &mix)?;
        let numbers = [paper, of.time_saved, rounded(of.bits, 2)];
        let beside = Beside::new("Fig. 19", what, numbers, (mix, of), reason);
        all.push(Beside { fitted, derived: printed.is_none(), paper_ms: Some(ms), ..beside });
    }
    let mut later = Vec::new();
    for (what, chunk, bits, energy, paper_pj, time) in OPT {
        // Words cost as much as is fetched of them, planes as many bits as are wanted.
        let part = (bits / 16.0 / (1.0 - energy)).min(1.0);
        let mix = spread(bits, part);
        let fetched = fetched(profile, 16, chunk, &mix)?;
        let numbers = [energy, fetched.energy_saved, bits];
        let (reason, late) = if chunk == HEAD { (HEADS, HEADS_TIME) } else { (NEURONS, NEURONS_TIME) };
        let beside = Beside::new("Fig. 21", what, numbers, (mix.clone(), fetched), reason);
        all.push(Beside { paper_pj, fitted: true, ..beside });
        let numbers = [time, fetched.time_saved, bits];
        later.push(Beside::new("CXL-NDP Fig. 20", what, numbers, (mix, fetched), late));
    }
    all.append(&mut later);
    Ok(all)
}

impl Beside {
    fn new(
        figure: &'static str,
        what: &'static str,
        [paper, ours, bits]: [f64; 3],
        (mix, fetched): (Mix, Fetched),
        reason: &'static str,
    ) -> Self {
        let ours_pj = [fetched.words.pj(), fetched.planes.pj()];
        Self {
            figure,
            what,
            paper,
            derived: false,
            fitted: false,
            bits,
            ours,
            paper_pj: None,
            paper_ms: None,
            ours_pj,
            mix,
            fetched,
            reason,
        }
    }
}

/// A mix of so many bits on average, of which `part` is fetched, at two neighbouring precisions.
fn spread(bits: f64, part: f64) -> Mix {
    let each = (bits / part).min(16.0);
    let low = (0..=15_u32).rev().find(|low| f64::from(*low) <= each).unwrap_or(0);
    let above = (each - f64::from(low)) * part;
    Mix(vec![(0, 1.0 - part), (low, part - above), (low + 1, above)])
}
