//! Mixtures of experts: feed-forward blocks of which each token uses a few.
//!
//! The rules:
//! * A router, one row an expert, gives each token a logit for each expert. The token uses those
//!   with the largest; of equal ones the first. NaN is above all numbers, so that what is wrong is
//!   seen.
//! * What these give is added up, each times its share: the softmax of the logits of those that are
//!   used, as Mixtral has it. It is added in the order of the experts' numbers.
//! * Of an expert that no token uses nothing is read.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::math::softmax;

/// How many experts a feed-forward block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Those that a token uses.
    pub used: usize,
}

/// That a token used an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// The layer.
    pub layer: usize,
    /// The token's place in the sequence.
    pub position: usize,
    /// The expert.
    pub expert: usize,
    /// Its share of what the block gives, 0 to 1.
    pub share: f32,
}

/// The experts that a token with these logits uses, each with its share, by their numbers.
pub(crate) fn chosen(logits: &[f32], used: usize) -> Vec<(usize, f32)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Stable, so that of equal ones the first comes first.
    order.sort_by(|one, other| {
        let (one, other) = (logits[*one], logits[*other]);
        let of_numbers = other.partial_cmp(&one).unwrap_or(Ordering::Equal);
        other.is_nan().cmp(&one.is_nan()).then(of_numbers)
    });
    order.truncate(used);
    order.sort_unstable();
    let mut shares: Vec<f32> = order.iter().map(|expert| logits[*expert]).collect();
    softmax(&mut shares);
    order.into_iter().zip(shares).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_uses_the_experts_with_the_largest_logits() {
        let experts = |logits: &[f32], used| -> Vec<usize> {
            chosen(logits, used).into_iter().map(|(expert, _)| expert).collect()
        };
        assert_eq!(experts(&[0.5, 2.0, -1.0, 1.0], 2), [1, 3]);
        assert_eq!(experts(&[-0.0, 0.0, 1.0, 0.0], 2), [0, 2]);
        assert_eq!(experts(&[1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(experts(&[1.0, -f32::NAN, f32::INFINITY], 1), [1]);
        assert_eq!(experts(&[3.0, 1.0], 2), [0, 1]);
    }

    #[test]
    fn shares_are_a_softmax_of_those_that_are_used() {
        let logits = [0.0, 3.0_f32.ln(), -50.0];
        let found = chosen(&logits, 2);
        assert!((found[0].1 - 0.25).abs() < 1e-6 && (found[1].1 - 0.75).abs() < 1e-6, "{found:?}");
        assert_eq!(chosen(&logits, 1), [(1, 1.0)]);
    }
}
