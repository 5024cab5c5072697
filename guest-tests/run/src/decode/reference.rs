//! What the guest must come to: the same runs with weights and cache in ordinary memory.
//!
//! Weights are the views that the reference makes of the model file. A cache that is read in full
//! is the plain one, which knows neither pages nor flushes; under another policy its views are the
//! reference's too, of what was flushed and nothing else.

use std::{convert::Infallible, ops::Range, path::Path};

use anyhow::{Context, Result};
use lamina_guest::{DecodePlan, DecodeRun, Task};
use lamina_llama::{
    Cached, Config, Decoder, Element, Judged, KvCache, KvMemory, Memory, PagedCache, PlainCache, Policy,
    Sampler, Slot, Source, Tokenizer, Viewed, Weight, Written, judge, policy::packings, write,
};
use lamina_reference::{Format, view_bytes};
use safetensors::{Dtype, tensor::TensorView};

use crate::judge::Judge;

/// The relative scale of a packing that says none.
const USUAL_SCALE: f32 = 0.1;

/// What a run must come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The tokens.
    pub tokens: Vec<usize>,
    /// SHA-256 of all logits.
    pub logits_sha256: String,
    /// Whether every logit is finite.
    pub are_finite: bool,
    /// Why K and V were not saved, if they should have been.
    pub unsaved: Option<String>,
}

/// What `run` of `plan` must come to. Of a run with everything in full, its K and V go into the
/// file `save`.
///
/// # Errors
/// When a model file cannot be read, or a view is none.
pub(crate) fn expected(
    judge: &Judge,
    plan: &DecodePlan,
    tokenizer: &Tokenizer,
    run: &DecodeRun,
    save: Option<&Path>,
) -> Result<Expected> {
    let tensors =
        Weight::all(&plan.config).into_iter().map(|weight| judge.bytes(&weight.name(), &run.weights, 0));
    let tensors = Tensors(tensors.collect::<Result<_>>()?);
    let weights = Viewed::new(plan.config, tensors, Element::of(&run.weights)?);
    let policy: Policy = run.policy.parse()?;
    if policy == Policy::full() {
        let mut cache = PlainCache::new(&plan.config);
        let expected = perform(plan, tokenizer, &run.task, &weights, &mut cache);
        let saved = save.map(|path| {
            save_kv(path, &cache, &plan.config)
                .with_context(|| format!("cannot write K and V to {}", path.display()))
        });
        let unsaved = saved.and_then(Result::err).map(|why| format!("{why:#}"));
        return Ok(Expected { unsaved, ..expected });
    }
    let mut memory = Arrays::new(&plan.config, policy.views())?;
    if let Policy::Packed(packing) = &policy {
        let [k, v] = packings(packing);
        let scale = |of: &str| scale_of(of).with_context(|| format!("the scale of {of}"));
        memory.packed = Some([scale(&k)?, scale(&v)?]);
    }
    let mut cache = PagedCache::new(memory, plan.config, policy, plan.page_tokens, plan.flush_every)?;
    Ok(perform(plan, tokenizer, &run.task, &weights, &mut cache))
}

/// Writes K and V of each layer, tokens by channels in bf16, under the names of the bundled cache.
fn save_kv(path: &Path, cache: &PlainCache, config: &Config) -> Result<()> {
    let tokens = cache.tokens();
    let tensor = |slot: Slot| {
        let side = if slot.cached == Cached::Key { "k" } else { "v" };
        let name = format!("layers.{}.seq.0.{side}", slot.layer);
        (name, vec![tokens, config.kv_dim()], cache.rows(slot, 0..tokens))
    };
    let tensors: Vec<_> = Slot::all(config).into_iter().map(tensor).collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::BF16, shape.clone(), bytes)?)));
    Ok(safetensors::serialize_to_file(views.collect::<Result<Vec<_>>>()?, None, path)?)
}

fn perform(
    plan: &DecodePlan,
    tokenizer: &Tokenizer,
    task: &Task,
    weights: &Viewed<Tensors>,
    cache: &mut impl KvCache<Error = Infallible>,
) -> Expected {
    let mut decoder = Decoder::new(plan.config);
    match task {
        Task::Write { prompt, tokens, temperature, seed } => {
            let mut sampler = Sampler::new(*temperature, *seed);
            let prompt = tokenizer.encode(prompt);
            let Ok(written) =
                write(&mut decoder, weights, cache, &prompt, *tokens, tokenizer.ends(), &mut sampler);
            let Written { tokens, logits_sha256, are_finite } = written;
            Expected { tokens, logits_sha256, are_finite, unsaved: None }
        }
        Task::Judge { text, tokens: count } => {
            let mut tokens = tokenizer.encode(text);
            tokens.truncate(count.unwrap_or(usize::MAX));
            let Ok(judged) = judge(&mut decoder, weights, cache, &tokens, plan.batch);
            let Judged { logits_sha256, are_finite, .. } = judged;
            Expected { tokens, logits_sha256, are_finite, unsaved: None }
        }
    }
}

/// The weights in one view.
struct Tensors(Vec<Vec<u8>>);

impl Memory for Tensors {
    type Error = Infallible;

    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Infallible> {
        into.copy_from_slice(&self.0[index][offset..offset + into.len()]);
        Ok(())
    }
}

/// The relative scale of `packkv[:SCALE[,…]]`.
fn scale_of(packing: &str) -> Result<f32> {
    let numbers = packing.strip_prefix("packkv").and_then(|rest| rest.strip_prefix(':'));
    let Some(numbers) = numbers else { return Ok(USUAL_SCALE) };
    Ok(numbers.split(',').next().unwrap_or_default().parse()?)
}

/// A cache's tensors, and their views as of the last flush.
struct Arrays {
    channels: usize,
    /// The relative scales of K and V, if full windows are packed with loss.
    packed: Option<[f32; 2]>,
    base: Vec<Vec<u8>>,
    views: Vec<String>,
    /// By view, then by tensor.
    shown: Vec<Vec<Vec<u8>>>,
}

impl Arrays {
    fn new(config: &Config, views: Vec<String>) -> Result<Self> {
        for view in &views {
            lamina_reference::planes(Format::Bf16, view).context("the policy's view")?;
        }
        let base = vec![vec![0; 2 * config.kv_dim() * config.seq_len]; Slot::all(config).len()];
        let mut arrays = Self { channels: config.kv_dim(), packed: None, base, views, shown: Vec::new() };
        arrays.show();
        Ok(arrays)
    }

    fn show(&mut self) {
        let of = |tensor: &Vec<u8>, view: &str| {
            view_bytes(Format::Bf16, view, tensor, tensor.len() as u64 / 2).expect("the view is one of bf16")
        };
        // K and V of a layer follow each other.
        let held = |(index, tensor): (usize, &Vec<u8>)| {
            let packed =
                |scales: [f32; 2]| lamina_reference::packed_windows(tensor, self.channels, scales[index % 2]);
            self.packed.map_or_else(|| tensor.clone(), packed)
        };
        let held: Vec<_> = self.base.iter().enumerate().map(held).collect();
        let all = |view: &String| held.iter().map(|tensor| of(tensor, view)).collect();
        self.shown = self.views.iter().map(all).collect();
    }
}

impl KvMemory for Arrays {
    type Error = Infallible;

    fn store(&mut self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), Infallible> {
        self.base[slot.index()][offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn load(&mut self, slot: Slot, source: Source, offset: usize, into: &mut [u8]) -> Result<(), Infallible> {
        let from = match source {
            Source::Base => &self.base,
            Source::View(view) => &self.shown[view],
        };
        into.copy_from_slice(&from[slot.index()][offset..offset + into.len()]);
        Ok(())
    }

    fn flush(&mut self, _: Range<usize>) -> Result<(), Infallible> {
        self.show();
        Ok(())
    }

    fn end_step(&mut self, _: usize) -> Result<(), Infallible> {
        Ok(())
    }
}
