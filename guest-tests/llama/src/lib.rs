//! Inference of small Llama-architecture models, in plain Rust, over memory that a trait stands
//! for.
//!
//! A guest runs this with its weights and its KV cache on the device; the host runs it in ordinary
//! memory and compares. The rules that make the two agree to the bit:
//!
//! * Everything is `f32`. The order of every sum is written down, so no compiler may choose one,
//!   and nothing is fused. How many threads work, and how many tokens go through the model at a
//!   time, changes no bit.
//! * `exp`, `sin`, `cos`, `pow` and `log` come from the `libm` crate, not from the system.
//! * Weights are bf16 tensors read through a view; an element's value is what [`Element`] says,
//!   exactly.
//! * K (after the rotary embedding) and V are rounded to bf16, to nearest even, when they are
//!   cached. Attention reads what the cache gives back, oldest token first, the newest included.
//!
//! | module | what |
//! |---|---|
//! | [`config`], [`weights`], [`element`] | a model's shape, its tensors, and their elements in any view |
//! | [`gguf`] | a model in a GGUF file, as tensors of bf16 |
//! | [`tokenizer`], [`sampler`] | text to tokens and back, and the choice of the next one |
//! | [`experts`], [`mixture`] | feed-forward blocks of experts; such a model, made of one that has none |
//! | [`forward`], [`run`] | one token through the model; texts written and texts judged |
//! | [`cache`], [`paged`], [`policy`], [`bounds`] | the KV cache: in ordinary memory, or in pages that are read as a policy says |

pub mod bounds;
pub mod cache;
pub mod config;
pub mod element;
pub mod experts;
pub mod forward;
pub mod gguf;
mod math;
pub mod mixture;
pub mod paged;
pub mod policy;
pub mod run;
pub mod sampler;
pub mod tokenizer;
pub mod weights;

pub use cache::{History, KvCache, PlainCache};
pub use config::{Config, ConfigError};
pub use element::{Element, UnreadableView};
pub use experts::{Experts, Route};
pub use forward::Decoder;
pub use paged::{Cached, KvMemory, Moved, PagedCache, Slot, Source};
pub use policy::{Policy, PolicyError};
pub use run::{Judged, Written, judge, write};
pub use sampler::Sampler;
pub use tokenizer::{BOS, Tokenizer, TokenizerError, Vocabulary};
pub use weights::{Memory, Viewed, Weight, Weights};
