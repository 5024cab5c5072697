//! A KV cache over memory whose views show what was stored only once it was flushed.
//!
//! * A token's K and V are stored when its step is over, each as one row of bf16 at the end of its
//!   layer's tensor. Until then attention has them from the step itself, so that nothing is read of
//!   what was stored a moment before.
//! * Every `flush_every` tokens, what was stored since the last time is flushed.
//! * Flushed tokens are read through views, in pages, as the [`Policy`] says. The others are read
//!   back from where they were stored, in full.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use crate::{
    bounds::{self, Bounds},
    cache::{History, KvCache},
    config::Config,
    element::{Element, UnreadableView, from_bf16, to_bf16},
    policy::{FULL, Policy},
};

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// K.
    Key,
    /// V.
    Value,
}

/// One tensor of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The layer.
    pub layer: usize,
    /// K or V.
    pub cached: Cached,
}

impl Slot {
    /// The tensors of a cache, at the places that [`Self::index`] gives.
    pub fn all(config: &Config) -> Vec<Self> {
        let both = |layer| [Cached::Key, Cached::Value].map(|cached| Self { layer, cached });
        (0..config.n_layers).flat_map(both).collect()
    }

    /// The tensor's place in [`Self::all`].
    pub fn index(self) -> usize {
        2 * self.layer + usize::from(self.cached == Cached::Value)
    }

    /// The tensor's name among those that begin with `prefix`.
    pub fn name(self, prefix: &str) -> String {
        let Self { layer, cached } = self;
        format!("{prefix}.layers.{layer}.{}", if cached == Cached::Key { "k" } else { "v" })
    }
}

/// Where bytes of a tensor are loaded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Where they were stored.
    Base,
    /// The policy's view of this index.
    View(usize),
}

/// The memory of a cache.
pub trait KvMemory {
    /// What can go wrong.
    type Error;

    /// Stores bytes of a tensor.
    ///
    /// # Errors
    /// When there is no room, or the memory fails.
    fn store(&mut self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Loads bytes of a tensor or of a view of it.
    ///
    /// # Errors
    /// When they are not there, or the memory fails.
    fn load(&mut self, slot: Slot, source: Source, offset: usize, into: &mut [u8])
    -> Result<(), Self::Error>;

    /// Makes what was stored of these tokens visible in all views.
    ///
    /// # Errors
    /// When the memory fails.
    fn flush(&mut self, tokens: Range<usize>) -> Result<(), Self::Error>;

    /// Says that a step is over; the first `flushed` tokens are flushed.
    ///
    /// # Errors
    /// When the memory fails.
    fn end_step(&mut self, flushed: usize) -> Result<(), Self::Error>;
}

/// What a cache has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes stored.
    pub stored: u64,
    /// Bytes loaded from where they were stored.
    pub from_base: u64,
    /// Bytes loaded through views.
    pub from_views: u64,
    /// Flushes.
    pub flushes: u64,
}

/// A cache in pages.
#[derive(Debug)]
pub struct PagedCache<M> {
    memory: M,
    config: Config,
    policy: Policy,
    elements: Vec<Element>,
    base: Element,
    page_tokens: usize,
    flush_every: usize,
    /// Tokens stored.
    tokens: usize,
    flushed: usize,
    /// K and V of the tokens whose step is not over, by layer.
    newest: Vec<History>,
    /// The key ranges of each layer's pages, the newest token left out.
    bounds: Vec<Vec<Bounds>>,
    moved: Moved,
    bytes: Vec<u8>,
}

impl<M: KvMemory> PagedCache<M> {
    /// An empty cache in `memory`. Pages have `page_tokens` tokens, and every `flush_every` tokens
    /// there is a flush; both are at least 1.
    ///
    /// # Errors
    /// When a view of the policy cannot be read.
    pub fn new(
        memory: M,
        config: Config,
        policy: Policy,
        page_tokens: usize,
        flush_every: usize,
    ) -> Result<Self, UnreadableView> {
        Ok(Self {
            elements: policy.views().iter().map(|view| Element::of(view)).collect::<Result<_, _>>()?,
            base: Element::of(FULL)?,
            memory,
            config,
            policy,
            page_tokens: page_tokens.max(1),
            flush_every: flush_every.max(1),
            tokens: 0,
            flushed: 0,
            newest: vec![History::default(); config.n_layers],
            bounds: vec![Vec::new(); config.n_layers],
            moved: Moved::default(),
            bytes: Vec::new(),
        })
    }

    /// What it has moved.
    pub fn moved(&self) -> Moved {
        self.moved
    }

    /// Tokens in it.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The memory again.
    pub fn into_memory(self) -> M {
        self.memory
    }

    /// Flushes what is not flushed yet.
    ///
    /// # Errors
    /// When the memory fails.
    pub fn finish(&mut self) -> Result<(), M::Error> {
        if self.flushed < self.tokens {
            self.memory.flush(self.flushed..self.tokens)?;
            self.moved.flushes += 1;
            self.flushed = self.tokens;
        }
        Ok(())
    }

    /// Stores the oldest token that is not stored.
    fn store(&mut self) -> Result<(), M::Error> {
        let channels = self.config.kv_dim();
        for slot in Slot::all(&self.config) {
            let History { keys, values, .. } = &self.newest[slot.layer];
            let rows = if slot.cached == Cached::Key { keys } else { values };
            self.bytes.clear();
            self.bytes.extend(rows[..channels].iter().flat_map(|x| to_bf16(*x).to_le_bytes()));
            self.memory.store(slot, self.tokens * self.bytes.len(), &self.bytes)?;
            self.moved.stored += self.bytes.len() as u64;
        }
        let page = self.tokens / self.page_tokens;
        for (bounds, newest) in self.bounds.iter_mut().zip(&mut self.newest) {
            if bounds.len() == page {
                bounds.push(Bounds::empty(channels));
            }
            bounds[page].include(&newest.keys[..channels]);
            newest.keys.drain(..channels);
            newest.values.drain(..channels);
        }
        self.tokens += 1;
        Ok(())
    }

    /// Appends the rows of `tokens` to `out`.
    fn load(
        &mut self,
        slot: Slot,
        source: Source,
        tokens: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), M::Error> {
        let channels = self.config.kv_dim();
        let (element, loaded) = match source {
            Source::Base => (&self.base, &mut self.moved.from_base),
            Source::View(view) => (&self.elements[view], &mut self.moved.from_views),
        };
        let (first, count) = (tokens.start * channels, tokens.len() * channels);
        let (offset, length) = element.extent(first, count);
        self.bytes.resize(length, 0);
        self.memory.load(slot, source, offset, &mut self.bytes)?;
        *loaded += length as u64;
        let start = out.len();
        out.resize(start + count, 0.0);
        element.read(&self.bytes, first, &mut out[start..]);
        Ok(())
    }

    /// What is read of the flushed tokens of `layer`: for each query head, or once for all.
    fn select(&self, layer: usize, query: &[f32]) -> Vec<Selected> {
        let filled = self.flushed / self.page_tokens;
        let scores = match (self.policy.ranks(filled), self.policy.by_head()) {
            (false, _) => vec![Vec::new()],
            (true, false) => vec![bounds::scores(&self.config, query, &self.bounds[layer][..filled])],
            (true, true) => bounds::by_head(&self.config, query, &self.bounds[layer][..filled]),
        };
        let tokens = self.tokens + self.newest[layer].keys.len() / self.config.kv_dim();
        let select = |scores: &Vec<f32>| self.policy.select(tokens, self.flushed, self.page_tokens, scores);
        scores.iter().map(select).collect()
    }

    /// What several heads read, each part once, oldest tokens first; and which rows of that, one
    /// part behind the other, each head looks at.
    fn unite(&self, heads: &[Selected]) -> (Selected, Vec<Vec<Range<usize>>>) {
        let page = |(tokens, view): &(Range<usize>, usize)| {
            let (view, end) = (*view, tokens.end);
            let starts = tokens.clone().step_by(self.page_tokens);
            starts.map(move |start| (start, view, end.min(start + self.page_tokens))).collect::<Vec<_>>()
        };
        let of_head = |selected: &Selected| selected.iter().flat_map(page).collect::<Vec<_>>();
        let heads: Vec<_> = heads.iter().map(of_head).collect();
        let all: BTreeSet<_> = heads.iter().flatten().copied().collect();
        let mut rows = BTreeMap::new();
        let mut row = 0;
        for part @ (start, _, end) in &all {
            rows.insert(*part, row..row + end - start);
            row += end - start;
        }
        let of_head = |parts: Vec<_>| parts.iter().map(|part| rows[part].clone()).collect();
        let united = all.into_iter().map(|(start, view, end)| (start..end, view)).collect();
        (united, heads.into_iter().map(of_head).collect())
    }
}

/// Ranges of tokens, oldest first, each with the index of the view it is read in.
type Selected = Vec<(Range<usize>, usize)>;

impl<M: KvMemory> KvCache for PagedCache<M> {
    type Error = M::Error;

    fn append(&mut self, layer: usize, key: &[f32], value: &[f32]) -> Result<(), M::Error> {
        let round = |x: &f32| from_bf16(to_bf16(*x));
        let newest = &mut self.newest[layer];
        newest.keys.extend(key.iter().map(round));
        newest.values.extend(value.iter().map(round));
        Ok(())
    }

    fn read(&mut self, layer: usize, query: &[f32], history: &mut History) -> Result<(), M::Error> {
        let mut heads = self.select(layer, query);
        let selected = if heads.len() > 1 {
            let (united, rows) = self.unite(&heads);
            history.heads = rows;
            united
        } else {
            heads.pop().unwrap_or_default()
        };
        let stored = self.flushed..self.tokens;
        let before: usize = selected.iter().map(|(tokens, _)| tokens.len()).sum();
        for (cached, out) in [(Cached::Key, &mut history.keys), (Cached::Value, &mut history.values)] {
            let slot = Slot { layer, cached };
            for (tokens, view) in &selected {
                self.load(slot, Source::View(*view), tokens.clone(), out)?;
            }
            if !stored.is_empty() {
                self.load(slot, Source::Base, stored.clone(), out)?;
            }
        }
        history.keys.extend(&self.newest[layer].keys);
        history.values.extend(&self.newest[layer].values);
        let all = history.keys.len() / self.config.kv_dim();
        for rows in &mut history.heads {
            rows.push(before..all);
        }
        Ok(())
    }

    fn end_token(&mut self) -> Result<(), M::Error> {
        self.store()?;
        if self.tokens.is_multiple_of(self.flush_every) {
            self.finish()?;
        }
        self.memory.end_step(self.flushed)
    }

    /// Up to the next flush: behind it, tokens are read otherwise.
    fn room(&self) -> usize {
        self.flush_every - self.tokens % self.flush_every
    }
}
