//! A model's tensors: their names and shapes, and reading them row by row.
//!
//! A forward pass asks for a row whenever it needs one and keeps none, so every step reads every
//! weight from wherever the weights are.

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
pub trait Weights {
    /// What can go wrong.
    type Error;

    /// Reads row `row` of a tensor; `out` is as long as the row.
    ///
    /// # Errors
    /// When the memory cannot be read.
    fn row(&mut self, weight: Weight, row: usize, out: &mut [f32]) -> Result<(), Self::Error>;
}

/// Bytes of a model's tensors in one view.
pub trait Memory {
    /// What can go wrong.
    type Error;

    /// Loads bytes of the tensor at place `index` of [`Weight::all`].
    ///
    /// # Errors
    /// When they are not there.
    fn load(&mut self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Self::Error>;
}

/// Weights that are bytes in memory, seen through one view.
#[derive(Debug)]
pub struct Viewed<M> {
    memory: M,
    element: Element,
    buffer: Vec<u8>,
    loaded: u64,
}

impl<M> Viewed<M> {
    /// Weights whose bytes `memory` holds in the view that `element` reads.
    pub fn new(memory: M, element: Element) -> Self {
        Self { memory, element, buffer: Vec::new(), loaded: 0 }
    }

    /// Bytes loaded so far.
    pub fn loaded(&self) -> u64 {
        self.loaded
    }
}

impl<M: Memory> Weights for Viewed<M> {
    type Error = M::Error;

    fn row(&mut self, weight: Weight, row: usize, out: &mut [f32]) -> Result<(), M::Error> {
        let first = row * out.len();
        let (offset, length) = self.element.extent(first, out.len());
        self.buffer.resize(length, 0);
        self.memory.load(weight.index(), offset, &mut self.buffer)?;
        self.loaded += length as u64;
        self.element.read(&self.buffer, first, out);
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
