//! Which precision each part of a model gets under a budget of bits.
//!
//! Each part has a ladder: for each precision its bits a weight, and by how much the model's
//! answers move when this part alone has it. The sum over all parts is minimised, as if what
//! several parts do added up. Of each ladder only the lower convex hull can be in the best choice
//! where bits may be spent in fractions; its steps are taken in the order of what they give for a
//! bit.

/// A precision of a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    /// Its place in the list of precisions.
    pub(crate) precision: usize,
    /// Bits a weight.
    pub(crate) bits: u32,
    /// How far the model's answers move with it.
    pub(crate) divergence: f64,
}

/// A part: so many weights, and its ladder, which has a step at least.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ladder {
    /// Weights.
    pub(crate) weights: u64,
    /// Its precisions, in any order.
    pub(crate) steps: Vec<Step>,
}

/// A budget that no choice can keep.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error(
    "a budget of {budget} bits a weight: with the coarsest precisions it is {least:.2}; add a coarser one with --views"
)]
pub(crate) struct TooSmall {
    budget: f64,
    least: f64,
}

/// The precision of each part, the mean of whose bits is at most `budget`.
///
/// # Errors
/// [`TooSmall`].
pub(crate) fn choose(ladders: &[Ladder], budget: f64) -> Result<Vec<Step>, TooSmall> {
    let hulls: Vec<Vec<Step>> = ladders.iter().map(|ladder| hull(&ladder.steps)).collect();
    let weights: u64 = ladders.iter().map(|ladder| ladder.weights).sum();
    let mut chosen: Vec<Step> = hulls.iter().map(|hull| hull[0]).collect();
    let mut spent = spent(ladders, &chosen);
    let room = budget * float(weights);
    if float(spent) > room {
        return Err(TooSmall { budget, least: float(spent) / float(weights) });
    }
    // What a step up of a part's hull gives for a bit, and which part's it is.
    let mut steps: Vec<(f64, usize, Step)> = Vec::new();
    for (part, hull) in hulls.iter().enumerate() {
        for pair in hull.windows(2) {
            let bits = u64::from(pair[1].bits - pair[0].bits) * ladders[part].weights;
            steps.push(((pair[0].divergence - pair[1].divergence) / float(bits), part, pair[1]));
        }
    }
    // Stable: steps of one part stay in order, for a hull's gains fall.
    steps.sort_by(|one, other| other.0.total_cmp(&one.0));
    let mut ended = vec![false; ladders.len()];
    for (_, part, step) in steps {
        let more = u64::from(step.bits - chosen[part].bits) * ladders[part].weights;
        // A part whose next step is too large gets none behind it, others may still fit.
        ended[part] |= float(spent + more) > room;
        if !ended[part] {
            spent += more;
            chosen[part] = step;
        }
    }
    Ok(chosen)
}

/// Bits of all weights.
pub(crate) fn spent(ladders: &[Ladder], chosen: &[Step]) -> u64 {
    ladders.iter().zip(chosen).map(|(ladder, step)| u64::from(step.bits) * ladder.weights).sum()
}

/// The lower convex hull of a ladder, coarsest first: each step costs bits and gives something, and
/// gives less for a bit than the step before.
fn hull(steps: &[Step]) -> Vec<Step> {
    let mut sorted: Vec<_> = steps.iter().copied().filter(|step| step.divergence.is_finite()).collect();
    sorted.sort_by(|a, b| a.bits.cmp(&b.bits).then(a.divergence.total_cmp(&b.divergence)));
    let mut hull: Vec<Step> = Vec::new();
    for step in sorted {
        if hull.last().is_some_and(|last| last.bits == step.bits || last.divergence <= step.divergence) {
            continue;
        }
        while let [.., before, last] = hull[..]
            && slope(before, step) >= slope(before, last)
        {
            hull.pop();
        }
        hull.push(step);
    }
    hull
}

/// What a bit gives from one step to another.
fn slope(from: Step, to: Step) -> f64 {
    (from.divergence - to.divergence) / f64::from(to.bits - from.bits)
}

#[expect(clippy::cast_precision_loss, reason = "bits of a model: far below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ladder(weights: u64, steps: &[(u32, f64)]) -> Ladder {
        let steps = steps.iter().enumerate();
        let steps = steps.map(|(precision, &(bits, divergence))| Step { precision, bits, divergence });
        Ladder { weights, steps: steps.collect() }
    }

    fn divergence(chosen: &[Step]) -> f64 {
        chosen.iter().map(|step| step.divergence).sum()
    }

    /// The least divergence of all choices that cost at most so many bits.
    fn best(ladders: &[Ladder], bits: u64) -> f64 {
        let mut all = vec![(0, 0.0)];
        for ladder in ladders {
            let each = |&(cost, sum): &(u64, f64)| {
                let steps = ladder.steps.iter();
                steps.map(move |step| (cost + u64::from(step.bits) * ladder.weights, sum + step.divergence))
            };
            all = all.iter().flat_map(each).collect();
        }
        all.iter().filter(|(cost, _)| *cost <= bits).map(|(_, sum)| *sum).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn bits_go_where_they_give_most() {
        let ladders = [ladder(10, &[(8, 4.0), (16, 0.0)]), ladder(10, &[(8, 1.0), (16, 0.0)])];
        let chosen = choose(&ladders, 12.0).unwrap();
        assert_eq!([chosen[0].bits, chosen[1].bits], [16, 8]);
        assert_eq!(choose(&ladders, 7.5), Err(TooSmall { budget: 7.5, least: 8.0 }));
        // A step that moves answers further than a coarser one is never taken.
        let ladders = [ladder(1, &[(8, 1.0), (9, 2.0), (10, 0.5)])];
        assert_eq!([9.0, 10.0].map(|budget| choose(&ladders, budget).unwrap()[0].bits), [8, 10]);
    }

    proptest! {
        #[test]
        fn no_choice_that_costs_as_much_is_better(
            parts in proptest::collection::vec((1_u64..9, proptest::collection::vec((1_u32..17, 0_u32..1000), 1..5)), 1..5),
            budget in 0.0_f64..18.0,
        ) {
            let ladders: Vec<_> = parts
                .iter()
                .map(|(weights, steps)| {
                    let steps: Vec<_> = steps.iter().map(|&(bits, far)| (bits, f64::from(far))).collect();
                    ladder(*weights, &steps)
                })
                .collect();
            let weights: u64 = ladders.iter().map(|ladder| ladder.weights).sum();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
            let best = best(&ladders, (budget * float(weights)).floor() as u64);
            match choose(&ladders, budget) {
                Ok(chosen) => {
                    prop_assert!(float(spent(&ladders, &chosen)) <= budget * float(weights));
                    // Steps are not cut, so the largest may be missing.
                    let gains = |ladder: &Ladder| {
                        let hull = hull(&ladder.steps);
                        hull.windows(2).map(|pair| pair[0].divergence - pair[1].divergence).fold(0.0, f64::max)
                    };
                    let largest = ladders.iter().map(gains).fold(0.0, f64::max);
                    prop_assert!(divergence(&chosen) <= best + largest + 1e-9, "{} of {best}", divergence(&chosen));
                }
                Err(why) => prop_assert!(why.least > budget && best.is_infinite()),
            }
        }
    }
}
