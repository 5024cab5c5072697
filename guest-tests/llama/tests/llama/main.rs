//! Inference, from its smallest part to a known story.

mod common;
mod forward;
mod paged;
mod stories;
mod tokenizer;
mod views;
