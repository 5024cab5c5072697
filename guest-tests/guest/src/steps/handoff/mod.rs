//! One side of a handoff, see [`crate::handoff`].
//!
//! Who prefills makes the pool and waits until the other side is there, so that this one may hold
//! lines from before. Then it computes the prompt, stores each whole block of its KV cache by the
//! key of the tokens up to its end, and does a node's duty until the other is done.

mod memory;

use std::{
    convert::Infallible,
    fs,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use lamina_llama::{
    Config, Decoder, Element, History, KvCache, PlainCache, Sampler, Slot, Tokenizer, Viewed, policy::FULL,
    write,
};
use lamina_pool::hosts::Hosts;
use lamina_pool::{Chain, Geometry, Key, Pool, PoolError};
use lamina_shim::{Error, Lamina};

use self::memory::{Device, Region};
use super::decode::WeightMemory;
use crate::{Event, HandoffPlan, Omit, Report, Side, report::console};

/// How long the other side may take for its part.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// How long a node may be silent: a guest that is emulated computes for seconds between two turns.
const SILENCE: Duration = Duration::from_secs(120);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Objects by which the sides tell each other how far they are.
const LISTENS: &str = "the other side listens";
const STORED: &str = "the prompt is stored";
const DONE: &str = "the text is written";

pub(super) fn run(lamina: &Lamina, plan: &HandoffPlan, report: &mut Report) -> anyhow::Result<()> {
    let config = plan.config.checked()?;
    let path = &plan.tokenizer;
    let vocabulary = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let tokenizer = Tokenizer::parse(&vocabulary, config.vocab_size)
        .with_context(|| format!("{} does not fit the model", path.display()))?;
    let element = Element::of(FULL)?;
    let weights = Viewed::new(config, WeightMemory::open(lamina, &config, FULL, &element)?, element);
    let device = Device::open(lamina)?;
    let region = Arc::new(Region::open(lamina, &device, plan)?);
    let begun = Instant::now();
    let pool = attach(plan, &region, device, begun)?;
    let prompt = tokenizer.encode(&plan.prompt);
    let mut side =
        Handoff { plan, config, pool: &pool, weights: &weights, keys: keys(plan, &config, &prompt) };
    let (blocks, waited, tokens, caught) = match plan.side {
        Side::Prefill => side.prefill(&prompt, begun)?,
        Side::Decode => side.decode(&region, &prompt, &tokenizer, begun)?,
    };
    let text = tokenizer.decode(&tokens);
    console(&format!("handoff: {blocks} blocks, {} tokens: {text}", tokens.len()));
    report.send(&Event::Handoff {
        side: plan.side,
        blocks,
        block_bytes: side.block_bytes() as u64,
        waited,
        seconds: begun.elapsed().as_secs_f64(),
        tokens,
        text,
        caught,
        calls: region.calls(),
    });
    pool.leave()?;
    Ok(())
}

/// Attaches as the plan's host, to a pool that who prefills makes.
fn attach(plan: &HandoffPlan, region: &Arc<Region>, device: Device, begun: Instant) -> anyhow::Result<Pool> {
    let position = plan.hosts.iter().position(|name| *name == plan.own);
    let node = u32::try_from(position.context("the plan's own host is none of its hosts")?)?;
    if plan.side == Side::Prefill {
        let nodes = u32::try_from(plan.hosts.len())?;
        Pool::create(region.clone(), &Geometry::fitting_for(plan.pool.1, nodes))?;
    }
    let host = Arc::new(Hosts::new(plan.hosts.clone(), SILENCE, device));
    loop {
        match Pool::attach(region.clone(), host.clone(), node) {
            Err(PoolError::NoPool(_)) if begun.elapsed() < MAX_WAIT => thread::sleep(PAUSE),
            attached => return Ok(attached?),
        }
    }
}

/// The keys of all blocks of a prompt but what has its last token, which is computed in any case.
fn keys(plan: &HandoffPlan, config: &Config, prompt: &[usize]) -> Vec<Key> {
    let mut chain = Chain::new(&format!("{config:?}, blocks of {} tokens, bf16", plan.block_tokens));
    let blocks = prompt[..prompt.len().saturating_sub(1)].chunks_exact(plan.block_tokens.max(1));
    // A vocabulary has no more than 2^32.
    let number = |token: &usize| u32::try_from(*token).unwrap_or(u32::MAX);
    blocks.map(|block| chain.next(&block.iter().map(number).collect::<Vec<_>>())).collect()
}

/// What came of a side: blocks, seconds waited, the text's tokens, and what was caught.
type Came = (usize, f64, Vec<usize>, Option<String>);

struct Handoff<'h, 'w> {
    plan: &'h HandoffPlan,
    config: Config,
    pool: &'h Pool,
    weights: &'h Viewed<WeightMemory<'w>>,
    keys: Vec<Key>,
}

impl Handoff<'_, '_> {
    /// Bytes of a tensor of the cache in a block.
    fn piece_bytes(&self) -> usize {
        2 * self.config.kv_dim() * self.plan.block_tokens
    }

    fn block_bytes(&self) -> usize {
        self.piece_bytes() * Slot::all(&self.config).len()
    }

    fn prefill(&mut self, prompt: &[usize], begun: Instant) -> anyhow::Result<Came> {
        self.wait(LISTENS, begun)?;
        let waited = begun.elapsed().as_secs_f64();
        let (mut decoder, mut cache) = (Decoder::new(self.config), Own(PlainCache::new(&self.config)));
        for (number, key) in self.keys.iter().enumerate() {
            let tokens = number * self.plan.block_tokens..(number + 1) * self.plan.block_tokens;
            for token in &prompt[tokens.clone()] {
                decoder.step(self.weights, &mut cache, *token)?;
                self.pool.serve()?;
            }
            let pieces: Vec<_> =
                Slot::all(&self.config).into_iter().map(|slot| cache.0.rows(slot, tokens.clone())).collect();
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            ensure!(self.pool.store(*key, &pieces)?, "block {number} was there before it was computed");
        }
        self.pool.put(STORED, b"")?;
        self.wait(DONE, begun)?;
        Ok((self.keys.len(), waited, Vec::new(), None))
    }

    fn decode(
        &mut self,
        region: &Region,
        prompt: &[usize],
        tokenizer: &Tokenizer,
        begun: Instant,
    ) -> anyhow::Result<Came> {
        if self.plan.omit == Some(Omit::PayloadInvalidate) {
            region.hold_all()?;
        }
        self.pool.put(LISTENS, b"")?;
        self.wait(STORED, begun)?;
        let waited = begun.elapsed().as_secs_f64();
        let found = self.pool.prefix(&self.keys)?;
        let mut cache = Own(PlainCache::new(&self.config));
        let (mut whole, mut caught) = (0, None);
        for key in &self.keys[..found] {
            let mut block = vec![0; self.block_bytes()];
            match self.pool.read_into(key, &mut [&mut block]) {
                Ok(true) => {}
                Ok(false) => bail!("block {whole} was found, and is gone"),
                Err(why) => {
                    caught = Some(format!("block {whole}: {why}"));
                    break;
                }
            }
            for (slot, rows) in Slot::all(&self.config).into_iter().zip(block.chunks(self.piece_bytes())) {
                cache.0.extend(slot, rows);
            }
            whole += 1;
        }
        let mut decoder = Decoder::resume(self.config, whole * self.plan.block_tokens);
        let mut sampler = Sampler::new(0.0, 0);
        let (ends, limit) = (tokenizer.ends(), self.plan.tokens);
        let written = write(&mut decoder, self.weights, &mut cache, prompt, limit, ends, &mut sampler)?;
        self.pool.put(DONE, b"")?;
        Ok((whole, waited, written.tokens, caught))
    }

    /// Does a node's duty until there is an object of this name.
    fn wait(&self, name: &str, begun: Instant) -> anyhow::Result<()> {
        while self.pool.get(name)?.is_none() {
            ensure!(begun.elapsed() < MAX_WAIT, "waited {} s for: {name}", MAX_WAIT.as_secs());
            self.pool.serve()?;
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// A cache in the guest's own memory, which cannot fail.
struct Own(PlainCache);

impl KvCache for Own {
    type Error = Error;

    fn append(&mut self, layer: usize, key: &[f32], value: &[f32]) -> Result<(), Error> {
        self.0.append(layer, key, value).or_else(never)
    }

    fn read(&mut self, layer: usize, query: &[f32], history: &mut History) -> Result<(), Error> {
        self.0.read(layer, query, history).or_else(never)
    }

    fn end_token(&mut self) -> Result<(), Error> {
        self.0.end_token().or_else(never)
    }
}

fn never(no: Infallible) -> Result<(), Error> {
    match no {}
}
