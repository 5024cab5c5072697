//! Prefill here, decode there: one host computes a prompt's KV cache, another goes on with it,
//! through a pool in the region that both share without coherence (seeds/002).
//!
//! The text must be that of a single run in ordinary memory, token for token, whatever is left out:
//! a block that is not what was stored is caught by its check, and computed instead.

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context, Result, ensure};
use indicatif::{BinaryBytes, HumanCount};
use lamina_guest::{Calls, DecodePlan, DecodeRun, Event, HandoffPlan, Omit, Plan, Side, Task};
use lamina_llama::{Config, Policy, Tokenizer, policy::FULL};
use lamina_qemu::GuestFile;
use serde::Serialize;

use crate::{
    daemon::{Ready, SharedDaemon},
    decode::{TOKENIZER, expected, has_weights},
    figures::shown,
    files::{MAX_VOCABULARY_BYTES, read},
    job::{On, Step},
    judge::Judge,
    visit::Visit,
};

/// The hosts, by their sides.
const HOSTS: [(&str, Side); 2] = [("one", Side::Prefill), ("two", Side::Decode)];
/// Bytes of the pool.
const POOL: u64 = 32 << 20;
/// What windows of CXL memory are multiples of.
const WINDOW: u64 = 256 << 20;

/// What to do.
#[derive(Clone, Debug)]
pub struct Handoff {
    /// The model, a checkpoint in bf16 that says its shape.
    pub model: PathBuf,
    /// Its vocabulary, a file.
    pub tokenizer: PathBuf,
    /// How the text begins.
    pub prompt: String,
    /// Tokens it has at most.
    pub tokens: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// A call that is left out.
    pub omit: Option<Omit>,
    /// Who does it.
    pub on: On,
    /// How long it may take.
    pub limit: Duration,
    /// Where the guests' consoles are logged.
    pub consoles: PathBuf,
}

/// What a side did.
#[derive(Clone, Debug, Serialize)]
pub struct SideReport {
    /// Its host.
    pub host: &'static str,
    /// Which side.
    pub side: Side,
    /// Blocks stored, or found and whole.
    pub blocks: usize,
    /// Bytes of each.
    pub block_bytes: u64,
    /// Seconds until the other's part was there.
    pub waited_seconds: f64,
    /// Seconds in all.
    pub seconds: f64,
    /// Calls on the region's memory.
    pub calls: Calls,
    /// The device's counters of the host.
    pub host_counters: serde_json::Value,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffReport {
    /// The model.
    pub model: String,
    /// QEMU and how it ran; empty on the host.
    pub qemu: String,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// What was left out.
    pub omitted: Option<Omit>,
    /// What was found to be wrong with the first block that was.
    pub caught: Option<String>,
    /// The sides.
    pub sides: Vec<SideReport>,
    /// Tokens of the text.
    pub tokens: usize,
    /// The text.
    pub text: String,
    /// Whether it is that of a single run, token for token.
    pub same_text: bool,
    /// What was not as it must be.
    pub problems: Vec<String>,
}

impl Handoff {
    /// Does it.
    ///
    /// # Errors
    /// When the options do not fit the model, or device or guests do not do their part.
    pub fn run(&self, mut step: impl FnMut(Step<'_>)) -> Result<HandoffReport> {
        let judge = Judge::new(std::slice::from_ref(&self.model))?;
        let shape = judge.note("config").context("the model does not say its shape: see ./x run --help")?;
        let config = Config::from_json(shape)?;
        has_weights(&judge, &config)?;
        let vocabulary = read(&self.tokenizer, MAX_VOCABULARY_BYTES)?;
        let tokenizer = Tokenizer::parse(&vocabulary, config.vocab_size)
            .with_context(|| format!("{} does not fit the model", self.tokenizer.display()))?;
        let prompt_tokens = tokenizer.encode(&self.prompt).len();
        ensure!(self.block_tokens > 0, "a block of 0 tokens");
        ensure!(
            prompt_tokens > self.block_tokens,
            "the prompt has {prompt_tokens} tokens: no whole block of {} to hand over; give a longer --prompt",
            self.block_tokens
        );
        ensure!(
            (prompt_tokens + 1..=config.seq_len).contains(&self.tokens),
            "{} tokens: with this prompt the model takes {} to {}",
            self.tokens,
            prompt_tokens + 1,
            config.seq_len
        );
        let length = std::fs::metadata(&self.model)?.len();
        // Tensors begin at blocks.
        let start = (length + 4096 * judge.names().count() as u64).next_multiple_of(2 << 20);
        let pool = (start, POOL);
        step(Step::Doing("starting the device and loading the tensors"));
        let device = self.serve((start + POOL).next_multiple_of(WINDOW))?;
        step(Step::Doing(match self.on {
            On::Guest => "booting two guests",
            On::Host => "starting the guests' program twice on the host",
        }));
        let plan = |(own, side): (&str, Side)| HandoffPlan {
            side,
            hosts: HOSTS.map(|(name, _)| name.to_owned()).to_vec(),
            own: own.to_owned(),
            pool,
            config,
            tokenizer: TOKENIZER.into(),
            prompt: self.prompt.clone(),
            tokens: self.tokens,
            block_tokens: self.block_tokens,
            omit: self.omit.filter(|omit| omit.side() == side),
        };
        let visited = std::thread::scope(|scope| {
            HOSTS
                .map(|host| {
                    let (plan, vocabulary, device) = (plan(host), vocabulary.clone(), &device);
                    scope.spawn(move || self.visit(host.0, plan, vocabulary, &device.export_of(host.0)?))
                })
                .map(|side| side.join().map_err(|_| anyhow::anyhow!("a side failed"))?)
        });
        step(Step::Doing("comparing with a single run in ordinary memory"));
        let stats = device.stats()?;
        device.stop()?;
        let wanted = self.single(&judge, config, &tokenizer)?;
        let mut report = HandoffReport {
            model: judge.note("name").unwrap_or("the model").to_owned(),
            qemu: String::new(),
            block_tokens: self.block_tokens,
            prompt_tokens,
            omitted: self.omit,
            caught: None,
            sides: Vec::new(),
            tokens: 0,
            text: String::new(),
            same_text: false,
            problems: Vec::new(),
        };
        for ((host, _), visited) in HOSTS.into_iter().zip(visited) {
            let (qemu, events) = visited?;
            report.qemu = qemu;
            for event in events {
                report.take(host, event, &wanted, &stats);
            }
        }
        report.judge((prompt_tokens - 1) / self.block_tokens);
        Ok(report)
    }

    fn serve(&self, capacity: u64) -> Result<SharedDaemon> {
        let [capacity, views] = [capacity, WINDOW.max(capacity)].map(|bytes| bytes.to_string());
        let model = self.model.to_str().context("the model's path is no text")?;
        let mut options =
            vec!["--capacity", &capacity, "--views-capacity", &views, "--model", model, "--views", FULL];
        options.extend(HOSTS.iter().flat_map(|(name, _)| ["--host", name]));
        SharedDaemon::start(&options)
    }

    /// One side's visit: how it was made, and its events.
    fn visit(
        &self,
        host: &str,
        plan: HandoffPlan,
        vocabulary: Vec<u8>,
        export: &Ready,
    ) -> Result<(String, Vec<Event>)> {
        let visit = Visit {
            plan: Plan { views: Some(Vec::new()), read_base: false, handoff: Some(plan), ..Plan::default() },
            files: vec![GuestFile::data(TOKENIZER, vocabulary)],
            limit: self.limit,
            console: self.consoles.join(format!("console-{host}.log")),
            cpus: 1,
        };
        let mut events = Vec::new();
        let mut keep = |event, _| {
            events.push(event);
            Ok(())
        };
        let visited = match self.on {
            On::Guest => visit.make(export, &mut keep)?,
            On::Host => visit.make_on_host(export, &mut keep)?,
        };
        let qemu = if visited.qemu.is_empty() {
            String::new()
        } else {
            format!("QEMU {} ({})", visited.qemu, visited.accel)
        };
        Ok((qemu, events))
    }

    /// The tokens of a single run.
    fn single(&self, judge: &Judge, config: Config, tokenizer: &Tokenizer) -> Result<Vec<usize>> {
        let plan = DecodePlan {
            config,
            tokenizer: TOKENIZER.into(),
            cache: String::new(),
            packed: BTreeMap::new(),
            page_tokens: 1,
            flush_every: 1,
            evict: false,
            batch: 1,
            runs: Vec::new(),
        };
        let task =
            Task::Write { prompt: self.prompt.clone(), tokens: self.tokens, temperature: 0.0, seed: 0 };
        let run = DecodeRun { task, weights: FULL.to_owned(), policy: Policy::full().to_string() };
        Ok(expected(judge, &plan, tokenizer, &run, None)?.tokens)
    }
}

impl HandoffReport {
    fn take(&mut self, host: &'static str, event: Event, wanted: &[usize], stats: &serde_json::Value) {
        match event {
            Event::Handoff { side, blocks, block_bytes, waited, seconds, tokens, text, caught, calls } => {
                let hosts = stats["hosts"].as_array().into_iter().flatten();
                let mut hosts = hosts.filter(|counters| counters["name"] == host);
                self.sides.push(SideReport {
                    host,
                    side,
                    blocks,
                    block_bytes,
                    waited_seconds: waited,
                    seconds,
                    calls,
                    host_counters: hosts.next().cloned().unwrap_or_default(),
                });
                if side == Side::Decode {
                    self.same_text = tokens == wanted;
                    (self.tokens, self.text, self.caught) = (tokens.len(), text, caught);
                }
            }
            Event::Problem { step, message } => self.problems.push(format!("{host}, {step}: {message}")),
            _ => {}
        }
    }

    /// Whether everything was as it must be, with `blocks` to hand over.
    fn judge(&mut self, blocks: usize) {
        let found = |side: Side| self.sides.iter().find(|one| one.side == side).map(|one| one.blocks);
        let [stored, taken] = [Side::Prefill, Side::Decode].map(found);
        if stored != Some(blocks) {
            self.problems.push(format!("{stored:?} blocks were stored, not {blocks}"));
        }
        match (self.omitted, &self.caught) {
            (None, Some(caught)) => self.problems.push(format!("nothing was left out, and {caught}")),
            (Some(omitted), None) => {
                self.problems.push(format!("{} was left out, and nobody noticed", omitted.name()));
            }
            (None, None) if taken != stored => {
                self.problems.push(format!("{taken:?} of {blocks} blocks were found"));
            }
            _ => {}
        }
        if !self.same_text {
            self.problems.push("the text is not that of a single run".to_owned());
        }
    }

    /// Whether nothing was wrong: of a run that leaves a call out, that it was caught.
    pub fn good(&self) -> bool {
        self.problems.is_empty()
    }

    /// The report for a person.
    pub fn to_text(&self) -> String {
        let by = if self.qemu.is_empty() {
            "two processes".to_owned()
        } else {
            format!("two guests in {}", self.qemu)
        };
        let model = shown(&self.model);
        let mut text = format!("handoff {model}, {by}, hosts of one region without coherence\n");
        for side in &self.sides {
            let SideReport { host, blocks, block_bytes, waited_seconds, seconds, calls, .. } = side;
            let done = match side.side {
                Side::Prefill => "stored",
                Side::Decode => "found",
            };
            let _ = writeln!(
                text,
                "{host:<7} {done} {blocks} blocks of {} tokens, {} each; {seconds:.1} s, of which {waited_seconds:.1} s waiting; {} flushes, {} invalidations, {} fences",
                self.block_tokens,
                BinaryBytes(*block_bytes),
                HumanCount(calls.flushes),
                HumanCount(calls.invalidations),
                HumanCount(calls.fences),
            );
        }
        if let Some(omitted) = self.omitted {
            let caught = self.caught.as_deref().unwrap_or("nothing");
            let _ = writeln!(text, "omitted {}, by {}; caught: {caught}", omitted.name(), host_of(omitted));
        }
        let same = if self.same_text { "as of a single run" } else { "NOT as of a single run" };
        let _ = writeln!(
            text,
            "text    {} tokens, {} of them the prompt, {same}:",
            self.tokens, self.prompt_tokens
        );
        let lines: Vec<_> = self.text.split('\n').map(shown).collect();
        let _ = write!(text, "        {}", lines.join("\n        "));
        for problem in &self.problems {
            let _ = write!(text, "\nproblem {problem}");
        }
        text
    }
}

/// The host that leaves a call out.
fn host_of(omitted: Omit) -> &'static str {
    HOSTS.iter().find(|(_, side)| *side == omitted.side()).map_or("", |(name, _)| name)
}
