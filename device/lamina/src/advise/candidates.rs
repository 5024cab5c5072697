//! Maps that are tried as wholes on the text that they are chosen by, of which the best is given.
//!
//! The rules:
//! * What parts do need not add up: what each cuts off shrinks its weights, and all of them
//!   together shrink what the model says more, or less, than the sum. So a second choice is made
//!   with each precision's divergences scaled by what all parts at that precision come to.
//! * The best uniform precision within the budget is tried too, so that no map is given that is
//!   worse on this text than one needs no map for.

use std::fmt;

use serde::Serialize;

use super::choose::{Ladder, Step, TooSmall, choose, spent};

/// How a map was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum How {
    /// As if what parts do added up.
    AddedUp,
    /// With what all parts at one precision come to.
    Scaled,
    /// All parts have one precision.
    Uniform,
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AddedUp => "a mixture, as if what parts do added up",
            Self::Scaled => "a mixture, scaled by what all parts at one precision do",
            Self::Uniform => "the best uniform precision within the budget",
        })
    }
}

/// A map: a step for each part.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) found: How,
    pub(crate) steps: Vec<Step>,
    /// How far the model's answers move with it.
    pub(crate) divergence: f64,
}

/// The maps to try under a budget, each as far as `moved` says it moves the answers. All ladders
/// have the same precisions in the same order.
///
/// # Errors
/// [`TooSmall`].
pub(crate) fn candidates(
    ladders: &[Ladder],
    budget: f64,
    moved: impl Fn(&[Step]) -> f64,
) -> Result<Vec<Candidate>, TooSmall> {
    let precisions = ladders.first().map_or(0, |ladder| ladder.steps.len());
    let uniform = |at: usize| -> Vec<Step> { ladders.iter().map(|ladder| ladder.steps[at]).collect() };
    let all: Vec<f64> = (0..precisions).map(|at| moved(&uniform(at))).collect();
    let mut found = Vec::new();
    let added_up = choose(ladders, budget)?;
    let scaled = choose(&scaled(ladders, &all), budget)?;
    for (how, steps) in [(How::AddedUp, added_up), (How::Scaled, scaled)] {
        found.push(Candidate { found: how, divergence: moved(&steps), steps });
    }
    let weights: u64 = ladders.iter().map(|ladder| ladder.weights).sum();
    #[expect(clippy::cast_precision_loss, reason = "bits of a model: far below 2^53")]
    let fits = |at: &usize| spent(ladders, &uniform(*at)) as f64 <= budget * weights as f64;
    let least = (0..precisions).filter(fits).min_by(|one, other| all[*one].total_cmp(&all[*other]));
    if let Some(at) = least {
        found.push(Candidate { found: How::Uniform, steps: uniform(at), divergence: all[at] });
    }
    Ok(found)
}

/// The one that moves the answers least; of equal ones the first.
///
/// # Panics
/// If there is none.
pub(crate) fn best(candidates: &[Candidate]) -> &Candidate {
    let best = candidates.iter().min_by(|one, other| one.divergence.total_cmp(&other.divergence));
    best.expect("two mixtures at least")
}

/// The ladders with the divergences of each precision scaled, so that they add up to what `all`
/// parts at it come to.
fn scaled(ladders: &[Ladder], all: &[f64]) -> Vec<Ladder> {
    let sum = |at: usize| ladders.iter().map(|ladder| ladder.steps[at].divergence).sum::<f64>();
    let factors: Vec<f64> =
        all.iter().enumerate().map(|(at, is)| if sum(at) > 0.0 { is / sum(at) } else { 1.0 }).collect();
    let step = |(step, factor): (&Step, &f64)| Step { divergence: step.divergence * factor, ..*step };
    ladders
        .iter()
        .map(|ladder| Ladder {
            weights: ladder.weights,
            steps: ladder.steps.iter().zip(&factors).map(step).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ladder(weights: u64, divergences: &[f64]) -> Ladder {
        let bits = [8, 10, 12, 16];
        let steps = divergences.iter().zip(bits).enumerate();
        let step = |(precision, (divergence, bits)): (usize, (&f64, u32))| Step {
            precision,
            bits,
            divergence: *divergence,
        };
        Ladder { weights, steps: steps.map(step).collect() }
    }

    #[test]
    fn where_no_mixture_is_better_the_uniform_precision_is_given() {
        let ladders = [ladder(1, &[9.0, 4.0, 2.0, 0.0]), ladder(1, &[3.0, 1.0, 0.5, 0.0])];
        // All at 10 bits come to nothing, as if their errors met.
        let moved = |steps: &[Step]| if steps.iter().all(|step| step.bits == 10) { 0.1 } else { 1.0 };
        let found = candidates(&ladders, 10.5, moved).unwrap();
        let best = best(&found);
        assert!(found.iter().any(|candidate| candidate.found == How::Uniform));
        assert!(best.divergence < 0.2 && best.steps.iter().all(|step| step.bits == 10));
        assert!(candidates(&ladders, 7.0, moved).is_err());
    }

    #[test]
    fn what_all_parts_come_to_scales_what_each_does() {
        let ladders = [ladder(1, &[9.0, 4.0, 2.0, 0.0]), ladder(1, &[3.0, 0.0, 0.0, 0.0])];
        let found = scaled(&ladders, &[6.0, 8.0, 1.0, 0.0]);
        let divergences =
            |at: usize| -> Vec<f64> { found[at].steps.iter().map(|step| step.divergence).collect() };
        assert_eq!((divergences(0), divergences(1)), (vec![4.5, 8.0, 1.0, 0.0], vec![1.5, 0.0, 0.0, 0.0]));
    }

    proptest! {
        #[test]
        fn what_is_given_keeps_the_budget_and_is_no_worse_than_any_uniform_precision_that_does(
            parts in prop::collection::vec((1_u64..9, prop::collection::vec(0.0_f64..9.0, 3)), 1..6),
            budget in 8.0_f64..17.0,
            seed in any::<u64>(),
        ) {
            let ladders: Vec<_> = parts
                .iter()
                .map(|(weights, steps)| ladder(*weights, &[&steps[..], &[0.0]].concat()))
                .collect();
            // Whatever parts come to together.
            let moved = |steps: &[Step]| {
                let mixed = steps.iter().fold(seed, |hash, step| {
                    (hash ^ u64::from(step.bits)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
                });
                f64::from(u16::try_from(mixed >> 48).unwrap())
            };
            let found = candidates(&ladders, budget, moved).unwrap();
            let best = best(&found);
            let weights: u64 = ladders.iter().map(|ladder| ladder.weights).sum();
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let bits = spent(&ladders, &best.steps) as f64 / weights as f64;
            prop_assert!(bits <= budget);
            prop_assert_eq!(best.divergence.to_bits(), moved(&best.steps).to_bits());
            for (at, bits) in [8.0, 10.0, 12.0, 16.0].into_iter().enumerate() {
                let uniform: Vec<_> = ladders.iter().map(|ladder| ladder.steps[at]).collect();
                prop_assert!(bits > budget || best.divergence <= moved(&uniform));
            }
        }
    }
}
