//! The shape of a model.
//!
//! The names are those of llama2.c. A shape is checked before anything is sized by it: every number
//! is at least 1 and at most [`MAX_FIELD`], heads divide what they share, and a head's channels
//! come in pairs for the rotary embedding.

use serde::{Deserialize, Serialize};

use crate::experts::Experts;

/// The largest number a shape may have.
pub const MAX_FIELD: usize = 1 << 20;
/// The base of the rotary embedding's angles where the shape does not say.
pub const ROPE_THETA: f32 = 10_000.0;
/// What is added to a mean square where the shape does not say.
pub const NORM_EPS: f32 = 1e-5;

/// The shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Channels of the residual stream.
    pub dim: usize,
    /// Channels inside a feed-forward block.
    pub hidden_dim: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Heads of K and V, each shared by `n_heads / n_kv_heads` query heads.
    pub n_kv_heads: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Most tokens of a sequence.
    pub seq_len: usize,
    /// The base of the rotary embedding's angles.
    #[serde(default = "rope_theta")]
    pub rope_theta: f32,
    /// What is added to a mean square before its root is taken.
    #[serde(default = "norm_eps")]
    pub norm_eps: f32,
    /// The experts of each feed-forward block; none where it is one block for all tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

fn rope_theta() -> f32 {
    ROPE_THETA
}

fn norm_eps() -> f32 {
    NORM_EPS
}

/// Why this is no shape.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or fields are missing.
    #[error("the model's shape is not what llama2.c writes: {0}")]
    Json(#[from] serde_json::Error),
    /// A number out of bounds.
    #[error("the model's {field} is {value}; it is 1 to {MAX_FIELD}")]
    Bound {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
    },
    /// A number that is none, or not above zero.
    #[error("the model's {field} is {value}; it is a number above 0")]
    Number {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f32,
    },
    /// More experts a token than there are.
    #[error("a token uses {used} experts of {count}")]
    Experts {
        /// Experts that a token uses.
        used: usize,
        /// Experts of a layer.
        count: usize,
    },
    /// A number that another should divide.
    #[error("the model's {field} of {value} is no multiple of {of}, {divisor}")]
    Multiple {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// What should divide it.
        of: &'static str,
        /// That number.
        divisor: usize,
    },
}

impl Config {
    /// The shape in a JSON object.
    ///
    /// # Errors
    /// When it is none, or its numbers do not fit together.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        serde_json::from_str::<Self>(text)?.checked()
    }

    /// This shape, if its numbers fit together.
    ///
    /// # Errors
    /// [`ConfigError::Bound`], [`ConfigError::Experts`], [`ConfigError::Number`],
    /// [`ConfigError::Multiple`].
    pub fn checked(self) -> Result<Self, ConfigError> {
        let fields = [
            ("dim", self.dim),
            ("hidden_dim", self.hidden_dim),
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("vocab_size", self.vocab_size),
            ("seq_len", self.seq_len),
        ];
        let of_experts = self.experts.map(|Experts { count, used }| {
            // All of them are listed, of all layers.
            let all = count.saturating_mul(self.n_layers);
            [("experts.count", count), ("experts.used", used), ("experts of all layers", all)]
        });
        let mut fields = fields.into_iter().chain(of_experts.into_iter().flatten());
        if let Some((field, value)) = fields.find(|(_, value)| !(1..=MAX_FIELD).contains(value)) {
            return Err(ConfigError::Bound { field, value });
        }
        if let Some(Experts { used, count }) = self.experts.filter(|experts| experts.used > experts.count) {
            return Err(ConfigError::Experts { used, count });
        }
        for (field, value) in [("rope_theta", self.rope_theta), ("norm_eps", self.norm_eps)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(ConfigError::Number { field, value });
            }
        }
        let multiple = |field, value: usize, of, divisor| {
            if value.is_multiple_of(divisor) {
                Ok(())
            } else {
                Err(ConfigError::Multiple { field, value, of, divisor })
            }
        };
        multiple("dim", self.dim, "n_heads", self.n_heads)?;
        multiple("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)?;
        multiple("head size", self.head_size(), "a pair", 2)?;
        Ok(self)
    }

    /// Channels of a head.
    pub fn head_size(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Channels of a token's K, and of its V, in a layer.
    pub fn kv_dim(&self) -> usize {
        self.head_size() * self.n_kv_heads
    }

    /// The head of K and V that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.n_heads / self.n_kv_heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"dim":64,"hidden_dim":172,"n_layers":5,"n_heads":8,"n_kv_heads":4,"vocab_size":512,"seq_len":512}"#;

    #[test]
    fn a_shape_is_read_and_derived_from() {
        let config = Config::from_json(GOOD).unwrap();
        assert_eq!((config.head_size(), config.kv_dim()), (8, 32));
        assert_eq!((config.rope_theta, config.norm_eps), (ROPE_THETA, NORM_EPS));
        let other = GOOD.replace('}', ",\"rope_theta\":100000.0}");
        assert_eq!(Config::from_json(&other).unwrap().rope_theta.to_bits(), 100_000.0_f32.to_bits());
        assert_eq!([0, 1, 2, 7].map(|head| config.kv_head(head)), [0, 0, 1, 3]);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        for (from, to, says) in [
            ("\"dim\":64", "\"dim\":0", "dim is 0"),
            ("\"dim\":64", "\"dim\":60", "dim of 60 is no multiple of n_heads, 8"),
            ("\"dim\":64", "\"dim\":24", "head size of 3 is no multiple of a pair, 2"),
            ("\"n_kv_heads\":4", "\"n_kv_heads\":3", "n_heads of 8 is no multiple of n_kv_heads, 3"),
            ("\"seq_len\":512", "\"seq_len\":1048577", "seq_len is 1048577; it is 1 to 1048576"),
            ("\"seq_len\":512", "\"seq_len\":-1", "not what llama2.c writes"),
            (",\"seq_len\":512", "", "missing field `seq_len`"),
            ("}", ",\"norm_eps\":0.0}", "norm_eps is 0; it is a number above 0"),
            ("}", ",\"rope_theta\":-1.0}", "rope_theta is -1"),
            ("}", ",\"experts\":{\"count\":4,\"used\":5}}", "a token uses 5 experts of 4"),
            ("}", ",\"experts\":{\"count\":0,\"used\":0}}", "experts.count is 0"),
            ("}", ",\"experts\":{\"count\":209716,\"used\":1}}", "experts of all layers is 1048580"),
        ] {
            let text = GOOD.replace(from, to);
            assert_ne!(text, GOOD);
            let why = Config::from_json(&text).unwrap_err().to_string();
            assert!(why.contains(says), "{text}: {why}");
        }
    }
}
