//! A prompt's KV cache that one host computes and another goes on with, through a pool in the
//! region that both share without coherence.

use std::path::PathBuf;

use lamina_llama::Config;
use serde::{Deserialize, Serialize};

/// One side of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandoffPlan {
    /// Which side.
    pub side: Side,
    /// The hosts of the region, in the order of the pool's nodes.
    pub hosts: Vec<String>,
    /// The one that this is.
    pub own: String,
    /// Where the pool lies in the base window: offset and bytes.
    pub pool: (u64, u64),
    /// The model's shape. Its tensors are on the device, as in [`crate::DecodePlan`].
    pub config: Config,
    /// The vocabulary, a file in the guest.
    pub tokenizer: PathBuf,
    /// How the text begins.
    pub prompt: String,
    /// Tokens it has at most.
    pub tokens: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// What this side leaves out.
    pub omit: Option<Omit>,
}

/// A side of a handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Makes the pool, computes the prompt and stores its blocks.
    Prefill,
    /// Finds the prompt's blocks and goes on behind them.
    Decode,
}

/// A call that is left out, each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Omit {
    /// The flush of a block's bytes, by who stored them.
    PayloadFlush,
    /// The invalidation of a block's bytes, by who reads them and holds what was there before.
    PayloadInvalidate,
}

impl Omit {
    /// Both.
    pub const ALL: [Self; 2] = [Self::PayloadFlush, Self::PayloadInvalidate];

    /// The side that would have to make the call.
    pub fn side(self) -> Side {
        match self {
            Self::PayloadFlush => Side::Prefill,
            Self::PayloadInvalidate => Side::Decode,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::PayloadFlush => "payload-flush",
            Self::PayloadInvalidate => "payload-invalidate",
        }
    }
}

/// Calls of a side, as its memory counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// Flushes.
    pub flushes: u64,
    /// Invalidations.
    pub invalidations: u64,
    /// Fences.
    pub fences: u64,
}
