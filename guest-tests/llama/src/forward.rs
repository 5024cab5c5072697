//! Tokens through the model: one, or several of which all are known.
//!
//! Several go layer by layer, so that each weight is read once for all of them. Every number is the
//! one that comes of one token after the other.

use std::{slice, thread};

use crate::{
    cache::{History, KvCache},
    config::Config,
    experts::{Experts, Route, chosen},
    math::{dot, number, products, rms_norm, rotate, rotation, softmax, swiglu},
    weights::{Part, Weight, Weights},
};

/// Multiplications for which another thread is worth its start.
const PER_THREAD: usize = 1 << 18;
/// Numbers of a matrix that are read at once: what the first-level cache holds.
const PIECE: usize = 8192;

/// A model at work: its shape, and what the last tokens came to.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: Config,
    threads: usize,
    position: usize,
    history: History,
    scores: Vec<f32>,
    logits: Vec<f32>,
    routes: Vec<Route>,
}

impl Decoder {
    /// A model at the beginning of a sequence, which works with as many threads as there are
    /// processors. Their number changes nothing but the time.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            threads: thread::available_parallelism().map_or(1, usize::from),
            position: 0,
            history: History::default(),
            scores: Vec::new(),
            logits: Vec::new(),
            routes: Vec::new(),
        }
    }

    /// The same in the middle of a sequence, of whose first `position` tokens the cache has K and
    /// V.
    pub fn resume(config: Config, position: usize) -> Self {
        Self { position, ..Self::new(config) }
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tokens taken so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Which experts the tokens that were taken last used: layer by layer, expert by expert, token
    /// by token. None where there are no experts.
    pub fn routes(&self) -> &[Route] {
        &self.routes
    }

    /// Takes the next token of the sequence, at most `vocab_size - 1`, and gives a logit for each
    /// token that may follow.
    ///
    /// # Errors
    /// When weights or cache cannot be read.
    pub fn step<W, C>(&mut self, weights: &W, cache: &mut C, token: usize) -> Result<&[f32], W::Error>
    where
        W: Weights,
        C: KvCache<Error = W::Error>,
    {
        self.steps(weights, cache, &[token])
    }

    /// Takes the next tokens of the sequence, no more than the cache has room for, and gives the
    /// logits of each, one token's behind the other's.
    ///
    /// # Errors
    /// When weights or cache cannot be read.
    pub fn steps<W, C>(&mut self, weights: &W, cache: &mut C, tokens: &[usize]) -> Result<&[f32], W::Error>
    where
        W: Weights,
        C: KvCache<Error = W::Error>,
    {
        let config = self.config;
        let Config { dim, hidden_dim, n_layers, norm_eps, .. } = config;
        let (kv_dim, size, count) = (self.config.kv_dim(), self.config.head_size(), tokens.len());
        let positions = self.position..self.position + count;
        let rotations: Vec<_> =
            positions.map(|position| rotation(self.config.rope_theta, size, position)).collect();
        let mut x = vec![0.0; count * dim];
        for (token, x) in tokens.iter().zip(x.chunks_exact_mut(dim)) {
            weights.read(Weight::Embedding, token * dim, x)?;
        }
        let norm = |gain: Weight, x: &[f32]| -> Result<Vec<f32>, W::Error> {
            let (mut row, mut normed) = (vec![0.0; dim], vec![0.0; x.len()]);
            weights.read(gain, 0, &mut row)?;
            for (x, normed) in x.chunks_exact(dim).zip(normed.chunks_exact_mut(dim)) {
                rms_norm(x, &row, norm_eps, normed);
            }
            Ok(normed)
        };
        let threads = self.threads;
        let matrix = |matrix: Weight, x: &[f32], rows: usize| {
            multiply(weights, matrix, x, rows, x.len() / matrix.shape(&config).1, threads)
        };
        let feed_forward = |part: &dyn Fn(Part) -> Weight, x: &[f32]| -> Result<Vec<f32>, W::Error> {
            let mut gate = matrix(part(Part::W1), x, hidden_dim)?;
            swiglu(&mut gate, &matrix(part(Part::W3), x, hidden_dim)?);
            matrix(part(Part::W2), &gate, dim)
        };
        self.routes.clear();
        for layer in 0..n_layers {
            let part = |part| Weight::Layer(layer, part);
            let normed = norm(part(Part::AttentionNorm), &x)?;
            let mut query = matrix(part(Part::Wq), &normed, dim)?;
            let mut key = matrix(part(Part::Wk), &normed, kv_dim)?;
            let value = matrix(part(Part::Wv), &normed, kv_dim)?;
            let mut attended = vec![0.0; count * dim];
            for (index, rotation) in rotations.iter().enumerate() {
                let (wide, narrow) = (index * dim..(index + 1) * dim, index * kv_dim..(index + 1) * kv_dim);
                rotate(&mut query[wide.clone()], rotation);
                rotate(&mut key[narrow.clone()], rotation);
                cache.append(layer, &key[narrow.clone()], &value[narrow])?;
                self.history.clear();
                cache.read(layer, &query[wide.clone()], &mut self.history)?;
                self.attend(&query[wide.clone()], &mut attended[wide]);
            }
            add(&mut x, &matrix(part(Part::Wo), &attended, dim)?);

            let normed = norm(part(Part::FfnNorm), &x)?;
            let Some(experts) = config.experts else {
                add(&mut x, &feed_forward(&part, &normed)?);
                continue;
            };
            let logits = matrix(part(Part::Router), &normed, experts.count)?;
            let mut mixed = vec![0.0; count * dim];
            for (expert, tokens) in by_expert(&logits, experts).into_iter().enumerate() {
                let own: Vec<f32> = tokens
                    .iter()
                    .flat_map(|(index, _)| &normed[index * dim..(index + 1) * dim])
                    .copied()
                    .collect();
                if own.is_empty() {
                    continue;
                }
                let given = feed_forward(&|part| Weight::Expert(layer, expert, part), &own)?;
                for ((index, share), given) in tokens.iter().zip(given.chunks_exact(dim)) {
                    for (mixed, given) in mixed[index * dim..].iter_mut().zip(given) {
                        *mixed += share * given;
                    }
                    let position = self.position + index;
                    self.routes.push(Route { layer, position, expert, share: *share });
                }
            }
            add(&mut x, &mixed);
        }
        for _ in tokens {
            cache.end_token()?;
        }
        self.logits = matrix(Weight::Embedding, &norm(Weight::Norm, &x)?, self.config.vocab_size)?;
        self.position += count;
        Ok(&self.logits)
    }

    /// What each query head makes of the values it attends to, heads one after the other.
    fn attend(&mut self, query: &[f32], out: &mut [f32]) {
        let (size, kv_dim) = (self.config.head_size(), self.config.kv_dim());
        let scale = number(size).sqrt();
        let History { keys, values, heads } = &self.history;
        let all = 0..keys.len() / kv_dim;
        for (head, (query, out)) in query.chunks_exact(size).zip(out.chunks_exact_mut(size)).enumerate() {
            let rows = heads.get(head).map_or(slice::from_ref(&all), Vec::as_slice);
            let start = self.config.kv_head(head) * size;
            let part = |row: usize| row * kv_dim + start..row * kv_dim + start + size;
            let each = || rows.iter().cloned().flatten();
            self.scores.clear();
            self.scores.extend(each().map(|row| dot(query, &keys[part(row)]) / scale));
            softmax(&mut self.scores);
            for (weight, row) in self.scores.iter().zip(each()) {
                for (out, value) in out.iter_mut().zip(&values[part(row)]) {
                    *out += weight * value;
                }
            }
        }
    }
}

/// For each expert the tokens that use it, each with the expert's share, of the logits of all
/// tokens.
fn by_expert(logits: &[f32], experts: Experts) -> Vec<Vec<(usize, f32)>> {
    let mut tokens = vec![Vec::new(); experts.count];
    for (index, logits) in logits.chunks_exact(experts.count).enumerate() {
        for (expert, share) in chosen(logits, experts.used) {
            tokens[expert].push((index, share));
        }
    }
    tokens
}

/// `matrix`, of so many rows, times each of the `count` columns in `x`: columns one after the
/// other.
fn multiply<W: Weights>(
    weights: &W,
    matrix: Weight,
    x: &[f32],
    rows: usize,
    count: usize,
    threads: usize,
) -> Result<Vec<f32>, W::Error> {
    let length = x.len() / count.max(1);
    let threads = threads.min(rows * x.len() / PER_THREAD).max(1);
    let share = rows.div_ceil(threads);
    // Row by row, so that each thread fills a part of its own.
    let mut by_row = vec![0.0; rows * count];
    let work = |first: usize, out: &mut [f32]| -> Result<(), W::Error> {
        let at_once = (PIECE / length.max(1)).next_multiple_of(2).max(2);
        let mut piece = Vec::new();
        for (index, out) in out.chunks_mut(at_once * count).enumerate() {
            piece.resize(out.len() / count * length, 0.0);
            weights.read(matrix, (first + index * at_once) * length, &mut piece)?;
            products(&piece, x, length, out);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let mut parts = by_row.chunks_mut((share * count).max(1)).enumerate();
        let first = parts.next();
        let others: Vec<_> = parts
            .map(|(index, out)| {
                let work = &work;
                scope.spawn(move || work(index * share, out))
            })
            .collect();
        let done = first.map_or(Ok(()), |(_, out)| work(0, out));
        others.into_iter().fold(done, |done, other| match other.join() {
            Ok(other) => done.and(other),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    if count == 1 {
        return Ok(by_row);
    }
    let mut out = vec![0.0; rows * count];
    for (column, out) in out.chunks_exact_mut(rows).enumerate() {
        for (out, row) in out.iter_mut().zip(by_row.chunks_exact(count)) {
            *out = row[column];
        }
    }
    Ok(out)
}

fn add(x: &mut [f32], other: &[f32]) {
    for (x, other) in x.iter_mut().zip(other) {
        *x += other;
    }
}
