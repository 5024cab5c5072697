//! Decoding with weights and KV cache on the device.
//!
//! Nothing of either is kept in the guest: weights are loaded row by row where the forward pass
//! needs them, K and V are stored to the base window and loaded back from views, by loads and
//! stores alone. The control port is asked only for what those cannot say: a flush when one is due,
//! the counters before and after, and, where the plan wants it, that the host's page cache forgets
//! what the step has read.

mod memory;

use std::{fs, time::Instant};

use anyhow::{Context, ensure};
use lamina_llama::{
    Config, Decoder, Element, KvCache, PagedCache, Policy, Sampler, Tokenizer, Viewed, Weights, judge, write,
};
use lamina_shim::{Error, Lamina};

use self::memory::CacheMemory;
pub(super) use self::memory::WeightMemory;
use crate::{DecodePlan, DecodeRun, Event, Report, Task, report::console};

pub(super) fn run(lamina: &Lamina, plan: &DecodePlan, report: &mut Report) -> anyhow::Result<()> {
    let config = plan.config.checked()?;
    let path = &plan.tokenizer;
    let vocabulary = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let tokenizer = Tokenizer::parse(&vocabulary, config.vocab_size)
        .with_context(|| format!("{} does not fit the model", path.display()))?;
    let of = plan.runs.len();
    for (index, run) in plan.runs.iter().enumerate() {
        let number = index + 1;
        report.send(&Event::DecodeBegin { number, of });
        let decoded = one(lamina, plan, config, &tokenizer, run, number)
            .with_context(|| format!("run {number}, weights {}, policy {}", run.weights, run.policy))?;
        report.send(&decoded);
    }
    Ok(())
}

fn one(
    lamina: &Lamina,
    plan: &DecodePlan,
    config: Config,
    tokenizer: &Tokenizer,
    run: &DecodeRun,
    number: usize,
) -> anyhow::Result<Event> {
    let element = Element::of(&run.weights)?;
    let policy: Policy = run.policy.parse()?;
    let weights = WeightMemory::open(lamina, &config, &run.weights, &element)?;
    let mut memory = CacheMemory::open(lamina, &config, plan.cache_of(run), &policy)?;
    memory.clear()?;
    // Whatever an earlier run has left in the host's page cache, this one begins without.
    let places = weights.places().to_vec();
    memory.evict(&places)?;
    if plan.evict {
        memory.evict_each_step(places);
    }
    let before = memory.stats()?;
    let weights = Viewed::new(config, weights, element);
    let mut cache = PagedCache::new(memory, config, policy, plan.page_tokens, plan.flush_every)?;
    let start = Instant::now();
    let mut reported = perform(plan, &weights, &mut cache, tokenizer, &run.task)?;
    cache.finish()?;
    let seconds = start.elapsed().as_secs_f64();
    let moved = cache.moved();
    let after = cache.into_memory().stats()?;
    ensure!(moved.stored > 0, "nothing was decoded: the text has no token to predict");
    let text = tokenizer.decode(&reported.tokens);
    console(&match reported.perplexity {
        Some(perplexity) => format!("run {number}: perplexity {perplexity:.4} in {seconds:.1} s"),
        None => format!("run {number}: {} tokens in {seconds:.1} s: {text}", reported.tokens.len()),
    });
    Ok(Event::Decoded {
        number,
        tokens: std::mem::take(&mut reported.tokens),
        text,
        perplexity: reported.perplexity,
        logits_sha256: reported.logits_sha256,
        weight_bytes: weights.loaded(),
        kv_view_bytes: moved.from_views,
        kv_base_bytes: moved.from_base,
        kv_stored_bytes: moved.stored,
        flushes: moved.flushes,
        seconds,
        before,
        after,
    })
}

/// What came of a task.
struct Reported {
    tokens: Vec<usize>,
    perplexity: Option<f64>,
    logits_sha256: String,
}

fn perform(
    plan: &DecodePlan,
    weights: &impl Weights<Error = Error>,
    cache: &mut impl KvCache<Error = Error>,
    tokenizer: &Tokenizer,
    task: &Task,
) -> Result<Reported, Error> {
    let mut decoder = Decoder::new(plan.config);
    match task {
        Task::Write { prompt, tokens, temperature, seed } => {
            let mut sampler = Sampler::new(*temperature, *seed);
            let prompt = tokenizer.encode(prompt);
            let written =
                write(&mut decoder, weights, cache, &prompt, *tokens, tokenizer.ends(), &mut sampler)?;
            let (tokens, logits_sha256) = (written.tokens, written.logits_sha256);
            Ok(Reported { tokens, perplexity: None, logits_sha256 })
        }
        Task::Judge { text, tokens: count } => {
            let mut tokens = tokenizer.encode(text);
            tokens.truncate(count.unwrap_or(usize::MAX));
            let judged = judge(&mut decoder, weights, cache, &tokens, plan.batch)?;
            Ok(Reported { tokens, perplexity: judged.perplexity(), logits_sha256: judged.logits_sha256 })
        }
    }
}
