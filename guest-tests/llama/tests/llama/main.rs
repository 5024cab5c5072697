//! Inference, from its smallest part to a known story.

mod common;
mod forward;
mod gguf;
mod mixture;
mod paged;
mod stories;
mod tiny;
mod tokenizer;
mod views;
