//! A model's tensors: their names and shapes, and reading them row by row.
//!
//! A forward pass asks for rows whenever it needs them and keeps none, so every step reads every
//! weight from wherever the weights are. Several threads ask at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{config::Config, element::Element};

/// The tensors of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The gain before attention.
    AttentionNorm,
    /// Queries.
    Wq,
    /// Keys.
    Wk,
    /// Values.
    Wv,
    /// What attention gives back.
    Wo,
    /// The gain before the feed-forward block.
    FfnNorm,
    /// Its gate.
    W1,
    /// What it gives back.
    W2,
    /// Its input.
    W3,
}

impl Part {
    /// All of them, in the order a step reads them.
    pub const ALL: [Self; 9] = [
        Self::AttentionNorm,
        Self::Wq,
        Self::Wk,
        Self::Wv,
        Self::Wo,
        Self::FfnNorm,
        Self::W1,
        Self::W3,
        Self::W2,
    ];
}

/// One tensor of a model. The embedding is the classifier too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// A row for each token.
    Embedding,
    /// A tensor of a layer.
    Layer(usize, Part),
    /// The gain before the classifier.
    Norm,
}

impl Weight {
    /// The tensors of a model, at the places that [`Self::index`] gives.
    pub fn all(config: &Config) -> Vec<Self> {
        let layers = (0..config.n_layers).flat_map(|layer| Part::ALL.map(|part| Self::Layer(layer, part)));
        [Self::Embedding, Self::Norm].into_iter().chain(layers).collect()
    }

    /// The tensor's place in [`Self::all`].
    pub fn index(self) -> usize {
        match self {
            Self::Embedding => 0,
            Self::Norm => 1,
            Self::Layer(layer, part) => {
                let place = Part::ALL.iter().position(|other| *other == part).expect("every part is listed");
                2 + layer * Part::ALL.len() + place
            }
        }
    }

    /// The tensor's name in a checkpoint.
    pub fn name(self) -> String {
        let (layer, part) = match self {
            Self::Embedding => return "tok_embeddings.weight".to_owned(),
            Self::Norm => return "norm.weight".to_owned(),
            Self::Layer(layer, part) => (layer, part),
        };
        let part = match part {
            Part::AttentionNorm => "attention_norm",
            Part::Wq => "attention.wq",
            Part::Wk => "attention.wk",
            Part::Wv => "attention.wv",
            Part::Wo => "attention.wo",
            Part::FfnNorm => "ffn_norm",
            Part::W1 => "feed_forward.w1",
            Part::W2 => "feed_forward.w2",
            Part::W3 => "feed_forward.w3",
        };
        format!("layers.{layer}.{part}.weight")
    }

    /// Whether its rows are those of heads, one head's behind the other's.
    pub fn has_heads(self) -> bool {
        matches!(self, Self::Layer(_, Part::Wq | Part::Wk | Part::Wv))
    }

    /// Rows and columns; a gain is one row.
    pub fn shape(self, config: &Config) -> (usize, usize) {
        let Config { dim, hidden_dim, .. } = *config;
        match self {
            Self::Embedding => (config.vocab_size, dim),
            Self::Norm | Self::Layer(_, Part::AttentionNorm | Part::FfnNorm) => (1, dim),
            Self::Layer(_, Part::Wq | Part::Wo) => (dim, dim),
            Self::Layer(_, Part::Wk | Part::Wv) => (config.kv_dim(), dim),
            Self::Layer(_, Part::W1 | Part::W3) => (hidden_dim, dim),
            Self::Layer(_, Part::W2) => (dim, hidden_dim),
        }
    }
}

/// Where weights are read from.
pub trait Weights: Sync {
    /// What can go wrong.
    type Error: Send;

    /// Reads elements of a tensor, its rows one after the other, from element `first` on.
    ///
    /// # Errors
    /// When the memory cannot be read.
    fn read(&self, weight: Weight, first: usize, out: &mut [f32]) -> Result<(), Self::Error>;
}

/// Bytes of a model's tensors in one view.
pub trait Memory: Sync {
    /// What can go wrong.
    type Error: Send;

    /// Loads bytes of the tensor at place `index` of [`Weight::all`].
    ///
    /// # Errors
    /// When they are not there.
    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Self::Error>;
}

/// Weights that are bytes in memory, seen through one view.
#[derive(Debug)]
pub struct Viewed<M> {
    memory: M,
    element: Element,
    loaded: AtomicU64,
}

impl<M> Viewed<M> {
    /// Weights whose bytes `memory` holds in the view that `element` reads.
    pub fn new(memory: M, element: Element) -> Self {
        Self { memory, element, loaded: AtomicU64::new(0) }
    }

    /// Bytes loaded so far.
    pub fn loaded(&self) -> u64 {
        self.loaded.load(Ordering::Relaxed)
    }
}

impl<M: Memory> Weights for Viewed<M> {
    type Error = M::Error;

    fn read(&self, weight: Weight, first: usize, out: &mut [f32]) -> Result<(), M::Error> {
        let (offset, length) = self.element.extent(first, out.len());
        let mut bytes = vec![0; length];
        self.memory.load(weight.index(), offset, &mut bytes)?;
        self.loaded.fetch_add(length as u64, Ordering::Relaxed);
        self.element.read(&bytes, first, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_has_its_place_and_its_own_name() {
        let config = Config {
            dim: 8,
            hidden_dim: 6,
            n_layers: 3,
            n_heads: 4,
            n_kv_heads: 2,
            vocab_size: 5,
            seq_len: 9,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
        };
        let all = Weight::all(&config);
        assert_eq!(all.len(), 2 + 3 * 9);
        for (place, weight) in all.iter().enumerate() {
            assert_eq!(weight.index(), place);
            assert_eq!(all.iter().filter(|other| other.name() == weight.name()).count(), 1);
        }
        assert_eq!(Weight::Layer(2, Part::Wk).shape(&config), (4, 8));
        assert_eq!(Weight::Layer(0, Part::W2).shape(&config), (8, 6));
    }
}
