//! The cache in pages, over memory whose views are the reference's and show only what was flushed.

use std::ops::Range;

use crate::common::Noise;
use lamina_llama::{
    Config, Decoder, Element, History, KvCache, KvMemory, PagedCache, PlainCache, Policy, Slot, Source, judge,
};
use lamina_reference::{Format, view_bytes};
use proptest::prelude::*;

/// Tensors in vectors, and beside them their views as of the last flush.
struct Arrays {
    base: Vec<Vec<u8>>,
    views: Vec<String>,
    shown: Vec<Vec<Vec<u8>>>,
    flushes: Vec<Range<usize>>,
    steps: Vec<usize>,
}

#[derive(Debug, PartialEq)]
struct PastEnd;

impl Arrays {
    fn new(config: &Config, policy: &Policy) -> Self {
        let empty = vec![vec![0; 2 * config.kv_dim() * config.seq_len]; 2 * config.n_layers];
        let mut arrays = Self {
            base: empty,
            views: policy.views(),
            shown: Vec::new(),
            flushes: Vec::new(),
            steps: Vec::new(),
        };
        arrays.show();
        arrays
    }

    fn show(&mut self) {
        let of = |tensor: &Vec<u8>, view: &String| {
            view_bytes(Format::Bf16, view, tensor, tensor.len() as u64 / 2).unwrap()
        };
        self.shown =
            self.views.iter().map(|view| self.base.iter().map(|tensor| of(tensor, view)).collect()).collect();
    }
}

impl KvMemory for &mut Arrays {
    type Error = PastEnd;

    fn store(&mut self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), PastEnd> {
        let place = self.base[slot.index()].get_mut(offset..offset + bytes.len()).ok_or(PastEnd)?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    fn load(&mut self, slot: Slot, source: Source, offset: usize, into: &mut [u8]) -> Result<(), PastEnd> {
        let from = match source {
            Source::Base => &self.base,
            Source::View(view) => &self.shown[view],
        };
        into.copy_from_slice(from[slot.index()].get(offset..offset + into.len()).ok_or(PastEnd)?);
        Ok(())
    }

    fn flush(&mut self, tokens: Range<usize>) -> Result<(), PastEnd> {
        self.flushes.push(tokens);
        self.show();
        Ok(())
    }

    fn end_step(&mut self, flushed: usize) -> Result<(), PastEnd> {
        self.steps.push(flushed);
        Ok(())
    }
}

fn config() -> Config {
    Config {
        dim: 12,
        hidden_dim: 10,
        n_layers: 2,
        n_heads: 3,
        n_kv_heads: 1,
        vocab_size: 9,
        seq_len: 40,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        experts: None,
    }
}

fn policy(text: &str) -> Policy {
    text.parse().unwrap()
}

fn bits(history: &History) -> (Vec<u32>, Vec<u32>) {
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect();
    (bits(&history.keys), bits(&history.values))
}

proptest! {
    /// Whatever the pages and the schedule, with everything in full a run is the plain one to the
    /// bit.
    #[test]
    fn in_full_nothing_differs_from_ordinary_memory(
        seed: u64,
        page_tokens in 1_usize..20,
        flush_every in 1_usize..20,
        length in 1_usize..40,
    ) {
        let config = config();
        let model = Noise(seed).model(&config);
        for text in ["full", "top:*=e8m7:packed", "window:40", "top:40"] {
            let policy = policy(text);
            let mut arrays = Arrays::new(&config, &policy);
            let mut paged = PagedCache::new(&mut arrays, config, policy, page_tokens, flush_every).unwrap();
            let mut plain = PlainCache::new(&config);
            let (mut with, mut without) = (Decoder::new(config), Decoder::new(config));
            for token in 0..length {
                let logits = with.step(&Never(&model), &mut paged, token % 9).unwrap().to_vec();
                let plain = without.step(&model, &mut plain, token % 9).unwrap();
                prop_assert_eq!(logits.as_slice(), plain);
            }
            prop_assert_eq!(paged.tokens(), length);
            paged.finish().unwrap();
            let moved = paged.moved();
            prop_assert_eq!(moved.stored, (length * 2 * 2 * 4 * 2) as u64);
            prop_assert_eq!(moved.flushes, length.div_ceil(flush_every) as u64);
            drop(paged);
            // Each token was flushed once, in order.
            prop_assert_eq!(arrays.flushes.iter().cloned().flatten().collect::<Vec<_>>(), (0..length).collect::<Vec<_>>());
            prop_assert_eq!(arrays.steps, (1..=length).map(|n| n / flush_every * flush_every).collect::<Vec<_>>());
        }
    }

    /// Several tokens at a time are what one after the other is, whatever the policy and the
    /// schedule.
    #[test]
    fn a_batch_is_its_tokens_one_after_the_other(
        seed: u64,
        page_tokens in 1_usize..9,
        flush_every in 1_usize..12,
        batch in 2_usize..9,
        length in 2_usize..40,
        text in prop::sample::select(vec![
            "full", "window:7", "top:2", "quest:1", "quest:1=full,2=fp8_e4m3fn,*=e8m0", "top:1=e8m3,*=fp8_e5m2@-2",
        ]),
    ) {
        let (config, policy) = (config(), policy(text));
        let model = Noise(seed).model(&config);
        let tokens: Vec<usize> = (0..length).map(|token| token * token % 9).collect();
        let judged = |batch| {
            let mut arrays = Arrays::new(&config, &policy);
            let mut cache = PagedCache::new(&mut arrays, config, policy.clone(), page_tokens, flush_every).unwrap();
            let judged = judge(&mut Decoder::new(config), &Never(&model), &mut cache, &tokens, batch).unwrap();
            let moved = cache.moved();
            drop(cache);
            (judged, moved.stored, moved.from_views, moved.flushes, arrays.base, arrays.flushes)
        };
        prop_assert_eq!(judged(batch), judged(1));
    }

    /// A history is, row by row, what the policy's selection says: the view of it, or the row
    /// itself.
    #[test]
    fn a_history_is_made_of_what_the_policy_selects(
        seed: u64,
        page_tokens in 1_usize..9,
        flush_every in 1_usize..9,
        length in 1_usize..40,
        text in prop::sample::select(vec![
            "full", "window:7", "window:1", "top:2", "top:1=full,2=fp8_e4m3fn,1=e8m0:packed", "top:1=e8m3,*=fp8_e5m2@-2", "top:*=e8m0",
        ]),
    ) {
        let (config, policy, mut noise) = (config(), policy(text), Noise(seed));
        let mut arrays = Arrays::new(&config, &policy);
        let mut cache = PagedCache::new(&mut arrays, config, policy.clone(), page_tokens, flush_every).unwrap();
        let mut rows = Vec::new();
        let mut row = || (0..4).map(|_| lamina_llama::element::from_bf16(lamina_llama::element::to_bf16(noise.next()))).collect::<Vec<f32>>();
        for token in 0..length {
            let (key, value) = (row(), row());
            for layer in 0..2 {
                cache.append(layer, &key, &value).unwrap();
            }
            rows.push((key, value));
            let query = [row(), row(), row()].concat();
            let mut history = History::default();
            cache.read(1, &query, &mut history).unwrap();

            let flushed = token / flush_every * flush_every;
            let keys = |page: &[(Vec<f32>, Vec<f32>)]| page.iter().map(|(key, _)| key.clone()).collect();
            let pages: Vec<Vec<Vec<f32>>> = rows[..flushed].chunks_exact(page_tokens).map(keys).collect();
            let scores = if policy.ranks(pages.len()) { slow_scores(&config, &query, &pages) } else { Vec::new() };
            let selected = policy.select(token + 1, flushed, page_tokens, &scores);
            let mut want = History::default();
            let views = policy.views();
            let mut take = |tokens: Range<usize>, view: &str| {
                for (key, value) in &rows[tokens] {
                    for (row, out) in [(key, &mut want.keys), (value, &mut want.values)] {
                        let bytes: Vec<u8> = row.iter().flat_map(|x| [x.to_bits().to_be_bytes()[1], x.to_bits().to_be_bytes()[0]]).collect();
                        let bytes = view_bytes(Format::Bf16, view, &bytes, 4).unwrap();
                        let mut numbers = [0.0; 4];
                        Element::of(view).unwrap().read(&bytes, 0, &mut numbers);
                        out.extend(numbers);
                    }
                }
            };
            for (tokens, view) in selected {
                take(tokens, &views[view]);
            }
            take(flushed..token + 1, "full");
            prop_assert_eq!(bits(&history), bits(&want), "{} tokens of {}", token, text);
            cache.end_token().unwrap();
        }
    }
}

/// Scores as [`lamina_llama::bounds`] explains them, written out.
fn slow_scores(config: &Config, query: &[f32], pages: &[Vec<Vec<f32>>]) -> Vec<f32> {
    let mut scores = vec![0.0; pages.len()];
    for head in 0..config.n_heads {
        let mut shares = Vec::new();
        for page in pages {
            let mut bound = 0.0_f32;
            for channel in 0..4 {
                let least = page.iter().map(|key| key[channel]).fold(f32::INFINITY, f32::min);
                let greatest = page.iter().map(|key| key[channel]).fold(f32::NEG_INFINITY, f32::max);
                let q = query[4 * head + channel];
                bound += (q * least).max(q * greatest);
            }
            shares.push(bound / 2.0);
        }
        let largest = shares.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = shares.iter().map(|share| libm::expf(share - largest)).collect();
        let sum = weights.iter().fold(0.0, |sum, weight| sum + weight);
        for (score, weight) in scores.iter_mut().zip(&weights) {
            *score += weight / sum;
        }
    }
    scores
}

/// By `quest` each head looks at pages of its own, and a page is loaded once for all that look at
/// it.
#[test]
fn each_head_looks_at_the_pages_that_are_best_for_it() {
    let config = Config { n_layers: 1, ..config() };
    let policy = policy("quest:1=full,1=e8m0");
    let mut arrays = Arrays::new(&config, &policy);
    let mut cache = PagedCache::new(&mut arrays, config, policy, 2, 8).unwrap();
    // Four pages of two tokens; page p has its keys in channel p.
    for token in 0..8_u8 {
        let mut key = [0.0; 4];
        key[usize::from(token / 2)] = 1.5;
        cache.append(0, &key, &[f32::from(token); 4]).unwrap();
        cache.end_token().unwrap();
    }
    cache.append(0, &[0.0; 4], &[9.0; 4]).unwrap();
    // The first head wants pages 2 and 1, the second 1 and 2, the third 3 and 2.
    let query = [[0.0, 1.0, 2.0, 0.0], [0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 1.0, 2.0]].concat();
    let mut history = History::default();
    cache.read(0, &query, &mut history).unwrap();
    // Page 1 in full and coarse, page 2 in both, page 3 in full: two rows each, and the newest.
    let values: Vec<f32> = history.values.chunks(4).map(|row| row[0]).collect();
    assert_eq!(values, [2.0, 3.0, 2.0, 2.0, 4.0, 5.0, 4.0, 4.0, 6.0, 7.0, 9.0]);
    assert_eq!(history.heads, [[2..4, 4..6, 10..11], [0..2, 6..8, 10..11], [6..8, 8..10, 10..11]]);
    assert_eq!(cache.moved().from_views, 2 * 10 * 8);
}

/// The model's weights beside a cache that can fail.
struct Never<'a>(&'a crate::common::Rows);

impl lamina_llama::Weights for Never<'_> {
    type Error = PastEnd;

    fn read(&self, weight: lamina_llama::Weight, first: usize, out: &mut [f32]) -> Result<(), PastEnd> {
        self.0.read(weight, first, out).map_err(|never| match never {})
    }
}

#[test]
fn a_token_too_many_is_the_memorys_error() {
    let config = config();
    let mut arrays = Arrays::new(&config, &Policy::full());
    let mut cache = PagedCache::new(&mut arrays, config, Policy::full(), 8, 4).unwrap();
    for _ in 0..config.seq_len {
        for layer in 0..2 {
            cache.append(layer, &[1.0; 4], &[2.0; 4]).unwrap();
        }
        cache.end_token().unwrap();
    }
    for layer in 0..2 {
        cache.append(layer, &[1.0; 4], &[2.0; 4]).unwrap();
    }
    assert_eq!(cache.end_token(), Err(PastEnd));
}

#[test]
fn fewer_pages_and_coarser_views_load_fewer_bytes() {
    let config = config();
    let loaded = |text: &str| {
        let policy = policy(text);
        let mut arrays = Arrays::new(&config, &policy);
        let mut cache = PagedCache::new(&mut arrays, config, policy, 4, 4).unwrap();
        for token in 0..32_u16 {
            let x = f32::from(token);
            cache.append(0, &[x, -x, 1.0, 2.0], &[0.5; 4]).unwrap();
            cache.append(1, &[x; 4], &[0.5; 4]).unwrap();
            let mut history = History::default();
            cache.read(0, &[1.0; 12], &mut history).unwrap();
            cache.end_token().unwrap();
        }
        cache.moved().from_views
    };
    let full = loaded("full");
    // Of K and V, eight bytes a row; 0 + 4 + … + 28 flushed tokens, each four times.
    assert_eq!(full, 2 * 8 * 4 * (4 + 8 + 12 + 16 + 20 + 24 + 28));
    assert_eq!(loaded("top:*=fp8_e4m3fn"), full / 2);
    assert_eq!(loaded("top:*=e8m3:packed"), full * 12 / 16);
    assert_eq!(loaded("top:2"), 2 * 8 * 4 * (4 + 8 * 6));
    assert_eq!(
        loaded("top:2=full,*=fp8_e4m3fn"),
        2 * 8 * 4 * (4 + 8 * 6) + 2 * 4 * 4 * (4 + 8 + 12 + 16 + 20)
    );
    // The last 8 tokens, of which the newest 1 to 4 are not flushed yet.
    assert_eq!(loaded("window:8"), 2 * 8 * (4 * 4 + 6 * (7 + 6 + 5 + 4)));
}
