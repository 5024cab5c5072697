//! The choice of the next token: the likeliest, or one drawn by a seed.

use crate::math::softmax;

/// Chooses tokens. The same seed chooses the same tokens of the same logits, everywhere.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f32,
    state: u64,
}

impl Sampler {
    /// Draws from what the logits say at `temperature`; at 0 it takes the likeliest, and of equally
    /// likely ones the first.
    pub fn new(temperature: f32, seed: u64) -> Self {
        // The generator below never leaves zero.
        Self { temperature, state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 }
    }

    /// The next token.
    pub fn choose(&mut self, logits: &[f32]) -> usize {
        if self.temperature <= 0.0 {
            let better = |best: usize, next: usize| if logits[next] > logits[best] { next } else { best };
            return (0..logits.len()).reduce(better).unwrap_or(0);
        }
        let mut weights: Vec<f32> = logits.iter().map(|logit| logit / self.temperature).collect();
        softmax(&mut weights);
        let mut left = self.unit();
        for (token, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // What rounding left over.
        logits.len().saturating_sub(1)
    }

    /// A number from 0 to below 1, by xorshift64*.
    fn unit(&mut self) -> f32 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let bits = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        f32::from_bits(0x3f80_0000 | u32::try_from(bits >> 1).expect("23 bits")) - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_is_the_first_of_equals() {
        let mut sampler = Sampler::new(0.0, 1);
        assert_eq!(sampler.choose(&[0.5, 2.0, -1.0, 2.0]), 1);
        assert_eq!(sampler.choose(&[f32::NEG_INFINITY, -3.0]), 1);
    }

    #[test]
    fn draws_follow_the_seed_and_the_weights() {
        // Weights 1 : 3, exactly.
        let logits = [0.0, 3.0_f32.ln()];
        let draws = |seed| {
            let mut sampler = Sampler::new(1.0, seed);
            (0..4000).map(|_| sampler.choose(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        let ones = draws(7).iter().sum::<usize>();
        assert!((2850..=3150).contains(&ones), "{ones} of 4000 at three quarters");
        // Colder, the likelier wins more often.
        let mut cold = Sampler::new(0.25, 7);
        assert!((0..1000).map(|_| cold.choose(&logits)).sum::<usize>() > 960);
    }
}
