//! What the guest decodes: texts to write and to judge with a model whose weights and KV cache are
//! on the device.
//!
//! The host runs the same plan in ordinary memory, so whatever decides a result is here and nowhere
//! else.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lamina_llama::Config;
use serde::{Deserialize, Serialize};

/// Texts to write and to judge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodePlan {
    /// The model's shape. Its tensors are on the device, in bf16, under the names that
    /// `lamina_llama::Weight` gives them.
    pub config: Config,
    /// The vocabulary, a file in the guest.
    pub tokenizer: PathBuf,
    /// The tensors of the KV cache are on the device as `CACHE.layers.L.k` and `.v`, a row of bf16
    /// for each of `seq_len` tokens.
    pub cache: String,
    /// The caches of policies that have one of their own, because the device packs it with loss: by
    /// the policy, what stands for CACHE.
    #[serde(default)]
    pub packed: BTreeMap<String, String>,
    /// Tokens of a page of the cache.
    pub page_tokens: usize,
    /// Tokens from one flush of the cache to the next.
    pub flush_every: usize,
    /// Whether each step loads from the device anew, as from behind a cache that is smaller than
    /// the model; else the host keeps what it can.
    pub evict: bool,
    /// Tokens of a text that is judged that go through the model together, at least 1: weights are
    /// loaded once for them, and a step is over when all have gone.
    pub batch: usize,
    /// What to do, one after the other, each with an empty KV cache.
    pub runs: Vec<DecodeRun>,
}

impl DecodePlan {
    /// What the tensors of a run's KV cache are named after.
    pub fn cache_of(&self, run: &DecodeRun) -> &str {
        self.packed.get(&run.policy).unwrap_or(&self.cache)
    }
}

/// One text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeRun {
    /// What to do.
    pub task: Task,
    /// The view that weights are read in.
    pub weights: String,
    /// How the KV cache is read, as `lamina_llama::Policy` spells it.
    pub policy: String,
}

/// What to do with a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Task {
    /// Continue it.
    Write {
        /// How it begins.
        prompt: String,
        /// Tokens to stop at.
        tokens: usize,
        /// How freely to choose; 0 takes the likeliest token.
        temperature: f32,
        /// Decides the choices.
        seed: u64,
    },
    /// Say how well it is foreseen.
    Judge {
        /// The text.
        text: String,
        /// Its first tokens that are judged; all that the model can take if not given.
        tokens: Option<usize>,
    },
}
