//! The paper's savings beside ours.
//!
//! The paper prints no mix of precisions. So two things are said of each of its numbers: what it
//! would be if all weights had the average bits, and, where it is about experts, at how many bits
//! ours saves as much.

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
    /// Bits of a weight on average; the paper's where it says them, else those at which ours is as
    /// much.
    pub bits: f64,
    /// What ours is at these bits.
    pub ours: f64,
    /// Picojoules of a weight by words and by planes in the paper, where it says them.
    pub paper_pj: Option<[f64; 2]>,
    /// The same of ours.
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
const SPREAD: &str = "the paper's words cost less at fewer bits, so part of its weights are not fetched at all; it does not \
    print which. Here the part that its own two energies imply is fetched, at the bits that keep the average";
const TIME: &str = "the mix as for energy; reads of both ways are bound by the bus, so time goes as bits do";
const SPREAD_TIME: &str = "the weights and the mix as for Fig. 21's energy. Rows of planes go over four channels whole, so planes that are no \
    multiple of four leave channels waiting; the paper does not say how its rows are spread";
const NARROW: &str = "not reached at half the bits: four planes are four rows, so a channel reads one bank, whose reads follow \
    by tCCD_L, and words alternate between bank groups, by tCCD_S. The paper does not say how its rows are spread";

/// Figure, what, base bits, saved in the paper.
const EXPERTS: [(&str, &str, u32, f64, bool); 10] = [
    ("Fig. 18", "Llama 3.1 8B bf16, energy", 16, 0.278, false),
    ("Fig. 18", "Llama 3.1 70B bf16, energy", 16, 0.259, false),
    ("Fig. 18", "Mixtral 8x7B bf16, energy", 16, 0.299, false),
    ("Fig. 18", "LLaMA-MoE 3.5B bf16, energy", 16, 0.272, false),
    ("Fig. 18", "Mixtral 8x7B fp8, energy", 8, 0.196, false),
    ("Fig. 18", "Mixtral 8x7B int4, energy", 4, 0.179, false),
    ("Fig. 19", "Mixtral 8x7B bf16, 705.90 to 495.06 ms", 16, 0.300, true),
    ("Fig. 19", "Llama 3.1 70B bf16, 910.58 to 674.73 ms", 16, 0.259, true),
    ("Fig. 19", "Llama 3.1 70B fp8, 348.65 to 293.27 ms", 8, 0.159, true),
    ("Fig. 19", "Llama 3.1 70B int4, 251.03 to 214.11 ms", 4, 0.147, true),
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

/// All of them.
///
/// # Errors
/// The module is of no use.
pub fn beside(profile: &Profile) -> Result<Vec<Beside>, ModelError> {
    let mut all = Vec::new();
    for (figure, what, base, paper, time) in EXPERTS {
        let half = |part: f64| Mix(vec![(base, 1.0 - part), (base / 2, part)]);
        let saved = |fetched: &Fetched| if time { fetched.time_saved } else { fetched.energy_saved };
        // What is saved grows with the part of all chunks that have half the bits, from what all
        // planes save, which is little and may be less than nothing.
        let [none, all_half] = [half(0.0), half(1.0)].map(|mix| fetched(profile, base, EXPERT, &mix));
        let (none, all_half) = (saved(&none?), saved(&all_half?));
        let reached = all_half > paper;
        let mix = half(if reached { ((paper - none) / (all_half - none)).clamp(0.0, 1.0) } else { 1.0 });
        let fetched = fetched(profile, base, EXPERT, &mix)?;
        let reason = match (reached, time) {
            (false, _) => NARROW,
            (true, true) => TIME,
            (true, false) => FITTED,
        };
        let bits = rounded(fetched.bits, 2);
        all.push(Beside::new(figure, what, [paper, saved(&fetched), bits], (mix, fetched), reason));
    }
    let mut later = Vec::new();
    for (what, chunk, bits, energy, paper_pj, time) in OPT {
        // Words cost as much as is fetched of them, planes as many bits as are wanted.
        let part = (bits / 16.0 / (1.0 - energy)).min(1.0);
        let mix = spread(bits, part);
        let fetched = fetched(profile, 16, chunk, &mix)?;
        let numbers = [energy, fetched.energy_saved, bits];
        let beside = Beside::new("Fig. 21", what, numbers, (mix.clone(), fetched), SPREAD);
        all.push(Beside { paper_pj, ..beside });
        let numbers = [time, fetched.time_saved, bits];
        later.push(Beside::new("CXL-NDP Fig. 20", what, numbers, (mix, fetched), SPREAD_TIME));
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
        Self { figure, what, paper, bits, ours, paper_pj: None, ours_pj, mix, fetched, reason }
    }
}

/// A mix of so many bits on average, of which `part` is fetched, at two neighbouring precisions.
fn spread(bits: f64, part: f64) -> Mix {
    let each = (bits / part).min(16.0);
    let low = (0..=15_u32).rev().find(|low| f64::from(*low) <= each).unwrap_or(0);
    let above = (each - f64::from(low)) * part;
    Mix(vec![(0, 1.0 - part), (low, part - above), (low + 1, above)])
}
