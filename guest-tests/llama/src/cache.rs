//! The KV cache as a forward pass sees it, and the plainest one: ordinary memory.

use std::{convert::Infallible, ops::Range};

use crate::{
    config::Config,
    element::{from_bf16, to_bf16},
    paged::{Cached, Slot},
};

/// What attention reads in one layer: a row of K and of V for each token it looks at, oldest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Rows of K, one after the other.
    pub keys: Vec<f32>,
    /// Rows of V, as many.
    pub values: Vec<f32>,
    /// The rows that each query head looks at, oldest token first. Where there are none, every head
    /// looks at every row.
    pub heads: Vec<Vec<Range<usize>>>,
}

impl History {
    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.values.clear();
        self.heads.clear();
    }
}

/// Keeps the K and V of a sequence.
pub trait KvCache {
    /// What can go wrong.
    type Error;

    /// Appends the next token's K (already rotated) and V in `layer`. Every layer gets every token,
    /// in order; a layer may get [`Self::room`] of them before the next one gets the first.
    ///
    /// # Errors
    /// When the memory fails or is full.
    fn append(&mut self, layer: usize, key: &[f32], value: &[f32]) -> Result<(), Self::Error>;

    /// Reads what `query` attends to in `layer`, the token appended last included. `history` is
    /// empty.
    ///
    /// # Errors
    /// When the memory fails.
    fn read(&mut self, layer: usize, query: &[f32], history: &mut History) -> Result<(), Self::Error>;

    /// Says that all layers have got one more token.
    ///
    /// # Errors
    /// When the memory fails.
    fn end_token(&mut self) -> Result<(), Self::Error>;

    /// Tokens, at least 1, that may go through the model together and be read as if they went one
    /// after the other.
    fn room(&self) -> usize {
        usize::MAX
    }
}

/// A cache in ordinary memory that gives everything back, rounded to bf16 as every cache here.
#[derive(Clone, Debug)]
pub struct PlainCache {
    layers: Vec<History>,
    /// Elements of a row.
    row: usize,
}

impl PlainCache {
    /// An empty cache.
    pub fn new(config: &Config) -> Self {
        Self { layers: vec![History::default(); config.n_layers], row: config.kv_dim() }
    }

    /// The rows of so many tokens in a tensor of the cache, bf16 in little-endian order.
    ///
    /// # Panics
    /// When the cache has not so many.
    pub fn rows(&self, slot: Slot, tokens: Range<usize>) -> Vec<u8> {
        let layer = &self.layers[slot.layer];
        let all = if slot.cached == Cached::Key { &layer.keys } else { &layer.values };
        let rows = &all[tokens.start * self.row..tokens.end * self.row];
        rows.iter().flat_map(|x| to_bf16(*x).to_le_bytes()).collect()
    }

    /// Appends rows to a tensor of the cache, as [`Self::rows`] gives them.
    pub fn extend(&mut self, slot: Slot, rows: &[u8]) {
        let layer = &mut self.layers[slot.layer];
        let all = if slot.cached == Cached::Key { &mut layer.keys } else { &mut layer.values };
        all.extend(rows.as_chunks::<2>().0.iter().map(|x| from_bf16(u16::from_le_bytes(*x))));
    }

    /// Tokens that all layers have.
    pub fn tokens(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.values.len() / self.row)
    }
}

impl KvCache for PlainCache {
    type Error = Infallible;

    fn append(&mut self, layer: usize, key: &[f32], value: &[f32]) -> Result<(), Infallible> {
        let round = |x: &f32| from_bf16(to_bf16(*x));
        self.layers[layer].keys.extend(key.iter().map(round));
        self.layers[layer].values.extend(value.iter().map(round));
        Ok(())
    }

    fn read(&mut self, layer: usize, _: &[f32], history: &mut History) -> Result<(), Infallible> {
        history.clone_from(&self.layers[layer]);
        Ok(())
    }

    fn end_token(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}
