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
    /// Which experts a token uses: a row for each.
    Router,
}

impl Part {
    /// Those of every layer, in the order a step reads them.
    const SHARED: [Self; 6] = [Self::AttentionNorm, Self::Wq, Self::Wk, Self::Wv, Self::Wo, Self::FfnNorm];
    /// Those of a feed-forward block, and of an expert.
    pub const FEED_FORWARD: [Self; 3] = [Self::W1, Self::W3, Self::W2];
}

/// One tensor of a model. The embedding is the classifier too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// A row for each token.
    Embedding,
    /// A tensor of a layer.
    Layer(usize, Part),
    /// A tensor of an expert of a layer: layer, expert, which of [`Part::FEED_FORWARD`].
    Expert(usize, usize, Part),
    /// The gain before the classifier.
    Norm,
}

impl Weight {
    /// The tensors of a model, at the places that [`Self::index`] gives.
    pub fn all(config: &Config) -> Vec<Self> {
        let mut all = vec![Self::Embedding, Self::Norm];
        for layer in 0..config.n_layers {
            all.extend(Part::SHARED.map(|part| Self::Layer(layer, part)));
            let Some(experts) = config.experts else {
                all.extend(Part::FEED_FORWARD.map(|part| Self::Layer(layer, part)));
                continue;
            };
            all.push(Self::Layer(layer, Part::Router));
            for expert in 0..experts.count {
                all.extend(Part::FEED_FORWARD.map(|part| Self::Expert(layer, expert, part)));
            }
        }
        all
    }

    /// The tensor's place in [`Self::all`].
    pub fn index(self, config: &Config) -> usize {
        let (shared, own) = (Part::SHARED.len(), Part::FEED_FORWARD.len());
        let each = shared + config.experts.map_or(own, |experts| 1 + own * experts.count);
        let place = |part| Part::FEED_FORWARD.iter().position(|other| *other == part).unwrap_or(0);
        match self {
            Self::Embedding => 0,
            Self::Norm => 1,
            Self::Layer(layer, part) => {
                let of_shared = Part::SHARED.iter().position(|other| *other == part);
                // The router lies where a block without experts begins.
                2 + layer * each + of_shared.unwrap_or_else(|| shared + place(part))
            }
            Self::Expert(layer, expert, part) => 2 + layer * each + shared + 1 + own * expert + place(part),
        }
    }

    /// The tensor's name in a checkpoint.
    pub fn name(self) -> String {
        let (layer, part) = match self {
            Self::Embedding => return "tok_embeddings.weight".to_owned(),
            Self::Norm => return "norm.weight".to_owned(),
            Self::Layer(layer, part) => (layer, part),
            Self::Expert(layer, expert, part) => {
                let part = match part {
                    Part::W1 => "w1",
                    Part::W2 => "w2",
                    _ => "w3",
                };
                return format!("layers.{layer}.feed_forward.experts.{expert}.{part}.weight");
            }
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
            Part::Router => "feed_forward.gate",
        };
        format!("layers.{layer}.{part}.weight")
    }

    /// Whether its rows are those of heads, one head's behind the other's.
    pub fn has_heads(self) -> bool {
        matches!(self, Self::Layer(_, Part::Wq | Part::Wk | Part::Wv))
    }

    /// Whether it is a gain, which has one row.
    pub fn is_gain(self) -> bool {
        matches!(self, Self::Norm | Self::Layer(_, Part::AttentionNorm | Part::FfnNorm))
    }

    /// The expert whose tensor it is, with its layer.
    pub fn expert(self) -> Option<(usize, usize)> {
        match self {
            Self::Expert(layer, expert, _) => Some((layer, expert)),
            _ => None,
        }
    }

    /// Its dimensions in a checkpoint, the outermost first; a gain has one.
    pub fn dimensions(self, config: &Config) -> Vec<u64> {
        let (rows, columns) = self.shape(config);
        if self.is_gain() { vec![columns as u64] } else { vec![rows as u64, columns as u64] }
    }

    /// Whether a tensor of these dimensions, the outermost first, has its shape. A dimension of 1
    /// in front changes no element's place.
    pub fn fits(self, config: &Config, dimensions: &[u64]) -> bool {
        fn inner(dimensions: &[u64]) -> &[u64] {
            &dimensions[dimensions.iter().take_while(|dimension| **dimension == 1).count()..]
        }
        inner(dimensions) == inner(&self.dimensions(config))
    }

    /// Rows and columns; a gain is one row.
    pub fn shape(self, config: &Config) -> (usize, usize) {
        let Config { dim, hidden_dim, .. } = *config;
        match self {
            Self::Embedding => (config.vocab_size, dim),
            Self::Norm | Self::Layer(_, Part::AttentionNorm | Part::FfnNorm) => (1, dim),
            Self::Layer(_, Part::Wq | Part::Wo) => (dim, dim),
            Self::Layer(_, Part::Wk | Part::Wv) => (config.kv_dim(), dim),
            Self::Layer(_, Part::W2) | Self::Expert(_, _, Part::W2) => (dim, hidden_dim),
            Self::Layer(_, Part::Router) => (config.experts.map_or(0, |experts| experts.count), dim),
            Self::Layer(_, Part::W1 | Part::W3) | Self::Expert(..) => (hidden_dim, dim),
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
    config: Config,
    memory: M,
    element: Element,
    loaded: AtomicU64,
}

impl<M> Viewed<M> {
    /// Weights of a model of this shape, whose bytes `memory` holds in the view that `element`
    /// reads.
    pub fn new(config: Config, memory: M, element: Element) -> Self {
        Self { config, memory, element, loaded: AtomicU64::new(0) }
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
        self.memory.load(weight.index(&self.config), offset, &mut bytes)?;
        self.loaded.fetch_add(length as u64, Ordering::Relaxed);
        self.element.read(&bytes, first, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::Experts;

    fn config(hidden_dim: usize, n_layers: usize) -> Config {
        Config {
            dim: 8,
            hidden_dim,
            n_layers,
            n_heads: 4,
            n_kv_heads: 2,
            vocab_size: 5,
            seq_len: 9,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            experts: None,
        }
    }

    #[test]
    fn every_tensor_has_its_place_and_its_own_name() {
        let config = config(6, 3);
        let of_experts = Config { experts: Some(Experts { count: 4, used: 2 }), ..config };
        for (config, count) in [(config, 2 + 3 * 9), (of_experts, 2 + 3 * (6 + 1 + 4 * 3))] {
            let all = Weight::all(&config);
            assert_eq!(all.len(), count);
            for (place, weight) in all.iter().enumerate() {
                assert_eq!(weight.index(&config), place);
                assert_eq!(all.iter().filter(|other| other.name() == weight.name()).count(), 1);
                assert_eq!(weight.is_gain(), weight.name().contains("norm"));
            }
        }
        let last = Weight::Expert(2, 3, Part::W2);
        assert_eq!(last.name(), "layers.2.feed_forward.experts.3.w2.weight");
        assert_eq!((last.shape(&of_experts), last.expert()), ((8, 6), Some((2, 3))));
        assert_eq!(Weight::Layer(0, Part::Router).shape(&of_experts), (4, 8));
        assert_eq!(Weight::Layer(2, Part::Wk).shape(&config), (4, 8));
        assert_eq!(Weight::Layer(0, Part::W2).shape(&config), (8, 6));
    }

    #[test]
    fn a_shape_fits_whatever_ones_are_in_front_and_not_the_other_way_round() {
        let config = config(1, 1);
        for (weight, fitting, other) in [
            (Weight::Embedding, &[&[5, 8][..], &[1, 5, 8]][..], &[&[8, 5][..], &[40], &[5, 8, 1], &[]][..]),
            (Weight::Norm, &[&[8], &[1, 8]], &[&[8, 1], &[1], &[2, 4]]),
            (Weight::Layer(0, Part::W1), &[&[1, 8], &[8]], &[&[8, 1]]),
            (Weight::Layer(0, Part::W2), &[&[8, 1]], &[&[1, 8], &[8]]),
        ] {
            assert!(fitting.iter().all(|dimensions| weight.fits(&config, dimensions)), "{weight:?}");
            assert!(!other.iter().any(|dimensions| weight.fits(&config, dimensions)), "{weight:?}");
        }
    }
}
