//! One token through the model.

use crate::{
    cache::{History, KvCache},
    config::Config,
    math::{dot, number, rms_norm, rotate, rotation, softmax, swiglu},
    weights::{Part, Weight, Weights},
};

/// A model at work: its shape, and room for one token.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: Config,
    position: usize,
    row: Vec<f32>,
    history: History,
    scores: Vec<f32>,
    logits: Vec<f32>,
}

impl Decoder {
    /// A model at the beginning of a sequence.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            position: 0,
            row: Vec::new(),
            history: History::default(),
            scores: Vec::new(),
            logits: vec![0.0; config.vocab_size],
        }
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tokens taken so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Takes the next token of the sequence, at most `vocab_size - 1`, and gives a logit for each
    /// token that may follow.
    ///
    /// # Errors
    /// When weights or cache cannot be read.
    pub fn step<W, C>(&mut self, weights: &mut W, cache: &mut C, token: usize) -> Result<&[f32], W::Error>
    where
        W: Weights,
        C: KvCache<Error = W::Error>,
    {
        let Config { dim, hidden_dim, n_layers, .. } = self.config;
        let rotation = rotation(self.config.head_size(), self.position);
        let mut x = vec![0.0; dim];
        let mut normed = vec![0.0; dim];
        weights.row(Weight::Embedding, token, &mut x)?;
        for layer in 0..n_layers {
            let part = |part| Weight::Layer(layer, part);
            self.norm(weights, part(Part::AttentionNorm), &x, &mut normed)?;
            let (mut query, mut key) = (vec![0.0; dim], vec![0.0; self.config.kv_dim()]);
            let mut value = key.clone();
            self.matrix(weights, part(Part::Wq), &normed, &mut query)?;
            self.matrix(weights, part(Part::Wk), &normed, &mut key)?;
            self.matrix(weights, part(Part::Wv), &normed, &mut value)?;
            rotate(&mut query, &rotation);
            rotate(&mut key, &rotation);
            cache.append(layer, &key, &value)?;
            self.history.clear();
            cache.read(layer, &query, &mut self.history)?;
            let attended = self.attend(&query);
            let mut out = vec![0.0; dim];
            self.matrix(weights, part(Part::Wo), &attended, &mut out)?;
            add(&mut x, &out);

            self.norm(weights, part(Part::FfnNorm), &x, &mut normed)?;
            let (mut gate, mut up) = (vec![0.0; hidden_dim], vec![0.0; hidden_dim]);
            self.matrix(weights, part(Part::W1), &normed, &mut gate)?;
            self.matrix(weights, part(Part::W3), &normed, &mut up)?;
            swiglu(&mut gate, &up);
            self.matrix(weights, part(Part::W2), &gate, &mut out)?;
            add(&mut x, &out);
        }
        cache.end_token()?;
        self.norm(weights, Weight::Norm, &x, &mut normed)?;
        let mut logits = std::mem::take(&mut self.logits);
        let classified = self.matrix(weights, Weight::Embedding, &normed, &mut logits);
        self.logits = logits;
        classified?;
        self.position += 1;
        Ok(&self.logits)
    }

    fn norm<W: Weights>(
        &mut self,
        weights: &mut W,
        gain: Weight,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), W::Error> {
        self.row.resize(x.len(), 0.0);
        weights.row(gain, 0, &mut self.row)?;
        rms_norm(x, &self.row, out);
        Ok(())
    }

    /// `out` = `matrix` · `x`, a row at a time.
    fn matrix<W: Weights>(
        &mut self,
        weights: &mut W,
        matrix: Weight,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), W::Error> {
        self.row.resize(x.len(), 0.0);
        for (row, out) in out.iter_mut().enumerate() {
            weights.row(matrix, row, &mut self.row)?;
            *out = dot(&self.row, x);
        }
        Ok(())
    }

    /// What each query head makes of the values it attends to, heads one after the other.
    fn attend(&mut self, query: &[f32]) -> Vec<f32> {
        let (size, kv_dim) = (self.config.head_size(), self.config.kv_dim());
        let scale = number(size).sqrt();
        let mut out = vec![0.0; query.len()];
        for (head, (query, out)) in query.chunks_exact(size).zip(out.chunks_exact_mut(size)).enumerate() {
            let start = self.config.kv_head(head) * size;
            let head = start..start + size;
            let keys = self.history.keys.chunks_exact(kv_dim);
            self.scores.clear();
            self.scores.extend(keys.map(|key| dot(query, &key[head.clone()]) / scale));
            softmax(&mut self.scores);
            for (weight, value) in self.scores.iter().zip(self.history.values.chunks_exact(kv_dim)) {
                for (out, value) in out.iter_mut().zip(&value[head.clone()]) {
                    *out += weight * value;
                }
            }
        }
        out
    }
}

fn add(x: &mut [f32], other: &[f32]) {
    for (x, other) in x.iter_mut().zip(other) {
        *x += other;
    }
}
