//! What a decoder job tells.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::{Add, Sub},
};

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_HORIZONTAL_ONLY};
use indicatif::BinaryBytes;
use lamina_guest::{DecodePlan, DecodeRun, Event, Task};
use lamina_llama::{Cached, Policy, Slot, Weight, policy::FULL};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{BLOCK, Expected};
use crate::{
    figures::{percent, ratio, shown},
    judge::hex,
};

/// What the report calls a text that was written.
const WRITE: &str = "write";
/// The same of one that was judged.
const JUDGE: &str = "judge";

/// Everything a decoder job found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DecodeReport {
    /// What the model is called. Every figure is measured, with this model.
    #[serde(default)]
    pub model: String,
    /// Tokens of the text that was written, those of its prompt included.
    pub tokens: usize,
    /// The text.
    pub text: String,
    /// SHA-256 of the text.
    pub text_sha256: String,
    /// Whether it is, token for token and logit for logit, what a run in ordinary memory wrote.
    pub identical_to_reference: bool,
    /// Perplexity of the given text by the view that weights were read in, the KV cache in full.
    pub perplexity: BTreeMap<String, f64>,
    /// The same by the policy that the KV cache was read under, weights in full.
    pub policy_perplexity: BTreeMap<String, f64>,
    /// Of the text that was written: bytes of its K and V over the bytes that the device stores for
    /// them.
    pub kv_ratio: Option<f64>,
    /// Stored bytes that the device fetched for the text that was written, weights and KV cache.
    pub stored_bytes_fetched: u64,
    /// Bytes that a plain device would have fetched.
    pub plain_bytes_fetched: u64,
    /// Bytes that a generically compressing device would have fetched.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Bytes of index entries that the device fetched besides.
    #[serde(default)]
    pub index_bytes_fetched: u64,
    /// Tokens of a page of the KV cache.
    pub page_tokens: usize,
    /// Tokens from one flush of it to the next.
    pub flush_every: usize,
    /// Whether each step loaded anew from the device.
    pub evicted_each_step: bool,
    /// Tokens of a judged text that went through the model together, in one step.
    #[serde(default)]
    pub batch: usize,
    /// Why K and V of the judged text were not saved, if they should have been.
    #[serde(default)]
    pub unsaved: Option<String>,
    /// Every run, the text that was written first.
    pub runs: Vec<RunReport>,
}

/// One text, written or judged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunReport {
    /// `write` or `judge`.
    pub task: String,
    /// The view that weights were read in.
    pub weights: String,
    /// How the KV cache was read.
    pub policy: String,
    /// Tokens of the text.
    pub tokens: usize,
    /// Steps: tokens that went through the model.
    pub steps: u64,
    /// Perplexity of a text that was judged.
    pub perplexity: Option<f64>,
    /// Whether every token and every logit is the reference's; null if they were not compared.
    pub identical_to_reference: Option<bool>,
    /// What was moved for the weights.
    pub weights_moved: Moved,
    /// What was moved for reading the KV cache.
    pub kv_moved: Moved,
    /// What the guest's stores had to read first.
    #[serde(default)]
    pub for_writes: Moved,
    /// Bytes of K and V over the bytes that the device stores for them at the end.
    pub kv_ratio: Option<f64>,
    /// The same for K and for V of each layer.
    #[serde(default)]
    pub kv_layers: Vec<LayerRatio>,
    /// Bytes of K and V that the guest stored.
    pub kv_stored_by_guest: u64,
    /// Bytes that the device keeps them in, whole granules.
    pub kv_stored_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Blocks that the device coded.
    pub blocks_written: u64,
    /// Bytes that it stored for them, whole granules.
    pub stored_bytes_written: u64,
    /// Time it took in the guest.
    pub seconds: f64,
}

/// Bytes of a layer's K and V over the bytes that the device stores for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerRatio {
    /// The layer, from 0.
    pub layer: usize,
    /// Of K.
    pub key: Option<f64>,
    /// Of V.
    pub value: Option<f64>,
}

/// What reads moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes that the guest loaded.
    pub loaded_bytes: u64,
    /// Planes that the device selected.
    pub planes_fetched: u64,
    /// Stored bytes that it fetched.
    pub stored_bytes_fetched: u64,
    /// Bytes that a plain device would have fetched.
    pub plain_bytes_fetched: u64,
    /// Bytes that a generically compressing device would have fetched.
    pub gcomp_bytes_fetched: Option<u64>,
    /// Bytes of index entries that the device fetched besides.
    #[serde(default)]
    pub index_bytes_fetched: u64,
    /// Bytes that the buffers of open KV windows gave, which no device fetches.
    #[serde(default)]
    pub staged_bytes: u64,
}

impl Moved {
    /// Of one entry of the device's counters.
    fn of(counters: &Value) -> Result<Self> {
        let count = |name: &str| {
            counters[name].as_u64().with_context(|| format!("{name} in the device's counters is no number"))
        };
        Ok(Self {
            loaded_bytes: 0,
            planes_fetched: count("planes_fetched")?,
            stored_bytes_fetched: count("stored_bytes_fetched")?,
            plain_bytes_fetched: count("plain_bytes_fetched")?,
            gcomp_bytes_fetched: counters["gcomp_bytes_fetched"].as_u64(),
            index_bytes_fetched: count("index_bytes_fetched")?,
            staged_bytes: count("staged_bytes")?,
        })
    }

    /// What was fetched, index entries too, of what a plain device would have.
    fn with_index(self) -> String {
        percent(self.stored_bytes_fetched.saturating_add(self.index_bytes_fetched), self.plain_bytes_fetched)
    }

    fn with(self, other: Self, count: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            loaded_bytes: count(self.loaded_bytes, other.loaded_bytes),
            planes_fetched: count(self.planes_fetched, other.planes_fetched),
            stored_bytes_fetched: count(self.stored_bytes_fetched, other.stored_bytes_fetched),
            plain_bytes_fetched: count(self.plain_bytes_fetched, other.plain_bytes_fetched),
            gcomp_bytes_fetched: self
                .gcomp_bytes_fetched
                .zip(other.gcomp_bytes_fetched)
                .map(|(a, b)| count(a, b)),
            index_bytes_fetched: count(self.index_bytes_fetched, other.index_bytes_fetched),
            staged_bytes: count(self.staged_bytes, other.staged_bytes),
        }
    }
}

impl Add for Moved {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, u64::saturating_add)
    }
}

impl Sub for Moved {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, u64::saturating_sub)
    }
}

/// What the guest told of one run.
#[derive(Clone, Debug)]
pub struct Reported(Box<Event>);

impl Reported {
    /// Keeps the event if it is a run's.
    pub fn of(event: Event) -> Option<Self> {
        matches!(event, Event::Decoded { .. }).then(|| Self(Box::new(event)))
    }
}

/// The report of `plan`, and everything that was wrong.
///
/// # Errors
/// When the guest's counters are not the device's.
pub fn report(
    model: &str,
    plan: &DecodePlan,
    reported: &[Reported],
    expected: &[Option<Result<Expected>>],
) -> Result<(Option<DecodeReport>, Vec<String>)> {
    let mut problems = Vec::new();
    let mut runs = Vec::new();
    let (mut text, mut unsaved) = (None, None);
    for (index, (run, expected)) in plan.runs.iter().zip(expected).enumerate() {
        let what = format!("decoding with weights {} and policy {}", run.weights, run.policy);
        let this = reported
            .iter()
            .find(|reported| matches!(&*reported.0, Event::Decoded { number, .. } if *number == index + 1));
        let Some(Reported(event)) = this else {
            problems.push(format!("{what} was not done"));
            continue;
        };
        let Event::Decoded { tokens, logits_sha256, text: found, perplexity, .. } = &**event else {
            continue;
        };
        let identical = match expected {
            None => None,
            Some(Ok(expected)) if expected.tokens != *tokens => {
                let at = expected.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
                problems.push(format!("{what} gave other tokens than ordinary memory, from token {at} on"));
                Some(false)
            }
            Some(Ok(expected)) if expected.logits_sha256 != *logits_sha256 => {
                problems.push(format!("{what} gave the tokens of ordinary memory by other logits"));
                Some(false)
            }
            Some(Ok(_)) => Some(true),
            Some(Err(why)) => {
                problems.push(format!("{what}: the reference fails: {why:#}"));
                Some(false)
            }
        };
        let compared = expected.as_ref().and_then(|expected| expected.as_ref().ok());
        unsaved = unsaved.or_else(|| compared?.unsaved.clone());
        // What is not a number is compared like any other bits, and is null in an event.
        let is_judged = matches!(run.task, Task::Judge { .. });
        // The first token is not predicted.
        let has_perplexity = !is_judged || tokens.len() < 2 || perplexity.is_some_and(f64::is_finite);
        if compared.is_some_and(|expected| !expected.are_finite) {
            problems.push(format!("{what} gave logits that are NaN or infinite"));
        } else if !has_perplexity && identical == Some(true) {
            problems.push(format!("{what} gave a perplexity too large for a number"));
        } else if !has_perplexity {
            problems.push(format!("{what} gave logits that are NaN or infinite, or too large a perplexity"));
        }
        if !is_judged {
            text = Some((found.clone(), runs.len()));
        }
        runs.push(run_report(plan, run, event, identical).with_context(|| what)?);
    }
    let Some((text, written)) = text else { return Ok((None, problems)) };
    let written: &RunReport = &runs[written];
    let moved = written.weights_moved + written.kv_moved;
    let full = Policy::full().to_string();
    let judged = |chosen: &dyn Fn(&RunReport) -> Option<String>| {
        runs.iter().filter_map(|run| Some((chosen(run)?, run.perplexity?))).collect()
    };
    let report = DecodeReport {
        tokens: written.tokens,
        text_sha256: hex(&Sha256::digest(&text)),
        text,
        model: model.to_owned(),
        identical_to_reference: written.identical_to_reference == Some(true),
        perplexity: judged(&|run| (run.policy == full).then(|| run.weights.clone())),
        policy_perplexity: judged(&|run| (run.weights == FULL).then(|| run.policy.clone())),
        kv_ratio: written.kv_ratio,
        stored_bytes_fetched: moved.stored_bytes_fetched,
        plain_bytes_fetched: moved.plain_bytes_fetched,
        gcomp_bytes_fetched: moved.gcomp_bytes_fetched,
        index_bytes_fetched: moved.index_bytes_fetched,
        page_tokens: plan.page_tokens,
        flush_every: plan.flush_every,
        evicted_each_step: plan.evict,
        batch: plan.batch,
        unsaved,
        runs,
    };
    Ok((Some(report), problems))
}

fn run_report(
    plan: &DecodePlan,
    run: &DecodeRun,
    event: &Event,
    identical: Option<bool>,
) -> Result<RunReport> {
    let Event::Decoded {
        tokens,
        perplexity,
        weight_bytes,
        kv_view_bytes,
        kv_base_bytes,
        kv_stored_bytes: kv_stored_by_guest,
        flushes,
        seconds,
        before,
        after,
        ..
    } = event
    else {
        anyhow::bail!("another event");
    };
    let config = &plan.config;
    let weights: BTreeSet<String> = Weight::all(config).into_iter().map(Weight::name).collect();
    let cache: BTreeSet<String> =
        Slot::all(config).into_iter().map(|slot| slot.name(plan.cache_of(run))).collect();
    let moved = |tensors: &BTreeSet<String>, loaded_bytes| -> Result<Moved> {
        let moved = fetched(after, tensors)? - fetched(before, tensors)?;
        Ok(Moved { loaded_bytes, ..moved })
    };
    // A plain device keeps the whole of a tensor; only the blocks that rows are in are the cache's
    // doing.
    let blocks = (kv_stored_by_guest / cache.len() as u64).next_multiple_of(BLOCK as u64);
    let mut stored = BTreeMap::new();
    for tensor in entries(after, "tensors", "name", &cache)? {
        let bytes = tensor["stored_bytes"].as_u64().context("stored_bytes is no number")?;
        stored.insert(tensor["name"].as_str().unwrap_or_default(), bytes.min(blocks));
    }
    let kv_stored_bytes = stored.values().sum();
    let of_slot = |layer, cached| {
        let name = Slot { layer, cached }.name(plan.cache_of(run));
        quotient(kv_stored_by_guest / cache.len() as u64, *stored.get(name.as_str())?)
    };
    let of_layer =
        |layer| LayerRatio { layer, key: of_slot(layer, Cached::Key), value: of_slot(layer, Cached::Value) };
    let writes = |name: &str| {
        let count = |stats: &Value| stats["writes"][name].as_u64();
        count(after)
            .zip(count(before))
            .map(|(after, before)| after.saturating_sub(before))
            .context("writes are no numbers")
    };
    let row_bytes = 2 * config.kv_dim() as u64;
    Ok(RunReport {
        task: if matches!(run.task, Task::Write { .. }) { WRITE } else { JUDGE }.to_owned(),
        weights: run.weights.clone(),
        policy: run.policy.clone(),
        tokens: tokens.len(),
        steps: kv_stored_by_guest / (row_bytes * cache.len() as u64),
        perplexity: *perplexity,
        identical_to_reference: identical,
        weights_moved: moved(&weights, *weight_bytes)?,
        kv_moved: moved(&cache, kv_view_bytes + kv_base_bytes)?,
        for_writes: Moved::of(&after["reads_for_writes"])? - Moved::of(&before["reads_for_writes"])?,
        kv_ratio: quotient(*kv_stored_by_guest, kv_stored_bytes),
        kv_layers: (0..config.n_layers).map(of_layer).collect(),
        kv_stored_by_guest: *kv_stored_by_guest,
        kv_stored_bytes,
        flushes: *flushes,
        blocks_written: writes("blocks_written")?,
        stored_bytes_written: writes("stored_bytes_written")?,
        seconds: *seconds,
    })
}

/// The entries of a list in the counters that belong to one of `tensors`.
fn entries<'a>(
    stats: &'a Value,
    list: &str,
    key: &'a str,
    tensors: &'a BTreeSet<String>,
) -> Result<impl Iterator<Item = &'a Value>> {
    let all = stats[list].as_array().with_context(|| format!("the device's counters have no {list}"))?;
    Ok(all.iter().filter(move |entry| entry[key].as_str().is_some_and(|name| tensors.contains(name))))
}

/// What reads of these tensors have moved since the device started, in any view and through the
/// base window.
fn fetched(stats: &Value, tensors: &BTreeSet<String>) -> Result<Moved> {
    let views = entries(stats, "views", "tensor", tensors)?;
    let base = entries(stats, "tensors", "name", tensors)?.map(|tensor| &tensor["base"]);
    let none = Moved { gcomp_bytes_fetched: Some(0), ..Moved::default() };
    views.chain(base).try_fold(none, |sum, counters| Ok(sum + Moved::of(counters)?))
}

#[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at; exact to 2^53 bytes")]
fn quotient(whole: u64, part: u64) -> Option<f64> {
    (part > 0).then(|| whole as f64 / part as f64)
}

impl DecodeReport {
    /// The tables for a person.
    pub fn to_text(&self) -> String {
        let verdict = if self.identical_to_reference { "identical to" } else { "NOT what came of" };
        let kept = if self.evicted_each_step {
            "each step loads anew from the device"
        } else {
            "the host keeps what it has fetched"
        };
        [
            format!(
                "decode  {}, measured: {} tokens, {verdict} the run in ordinary memory; K and V stored at ratio {}",
                shown(&self.model),
                self.tokens,
                ratio(self.kv_ratio)
            ),
            format!(
                "        pages of {} tokens, flushed every {}; {kept}; {} tokens of a judged text at a time",
                self.page_tokens, self.flush_every, self.batch
            ),
            self.text.lines().map(|line| format!("        | {}", shown(line))).collect::<Vec<_>>().join("\n"),
            self.table().to_string(),
            self.layers(),
        ]
        .join("\n")
    }

    /// The ratios of each layer's K and V, of the longest text that was read in full.
    fn layers(&self) -> String {
        let full = |run: &&RunReport| run.weights == FULL && run.policy == Policy::full().to_string();
        let Some(run) = self.runs.iter().filter(full).max_by_key(|run| run.steps) else {
            return String::new();
        };
        let mut table = Table::new();
        table.load_style(UTF8_HORIZONTAL_ONLY);
        table.set_header(["layer", "K stored at ratio", "V stored at ratio"]);
        table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        for of in &run.kv_layers {
            table.add_row([of.layer.to_string(), ratio(of.key), ratio(of.value)]);
        }
        format!("K and V of {} tokens as stored:\n{table}", run.steps)
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_HORIZONTAL_ONLY);
        table.set_header([
            "text",
            "weights",
            "KV policy",
            "right",
            "perplexity",
            "weights fetched",
            "of plain",
            "with index",
            "KV fetched",
            "of plain",
            "with index",
            "KV staged",
            "for writes",
            "s",
        ]);
        table.column_iter_mut().skip(4).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        for run in &self.runs {
            let (weights, kv) = (run.weights_moved, run.kv_moved);
            table.add_row([
                run.task.clone(),
                run.weights.clone(),
                run.policy.clone(),
                match run.identical_to_reference {
                    Some(true) => "yes",
                    Some(false) => "NO",
                    None => "–",
                }
                .to_owned(),
                match run.perplexity {
                    Some(perplexity) => format!("{perplexity:.3}"),
                    None if run.task == JUDGE => "no number".to_owned(),
                    None => "–".to_owned(),
                },
                BinaryBytes(weights.stored_bytes_fetched).to_string(),
                percent(weights.stored_bytes_fetched, weights.plain_bytes_fetched),
                weights.with_index(),
                BinaryBytes(kv.stored_bytes_fetched).to_string(),
                percent(kv.stored_bytes_fetched, kv.plain_bytes_fetched),
                kv.with_index(),
                BinaryBytes(kv.staged_bytes).to_string(),
                BinaryBytes(run.for_writes.stored_bytes_fetched).to_string(),
                format!("{:.1}", run.seconds),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamina_llama::Config;
    use serde_json::json;

    fn plan() -> DecodePlan {
        let config = Config {
            dim: 4,
            hidden_dim: 4,
            n_layers: 1,
            n_heads: 2,
            n_kv_heads: 1,
            vocab_size: 9,
            seq_len: 8,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            experts: None,
        };
        let run = |task, weights: &str, policy: &str| DecodeRun {
            task,
            weights: weights.to_owned(),
            policy: policy.to_owned(),
        };
        let judging = || Task::Judge { text: "text".to_owned(), tokens: None };
        let writing = Task::Write { prompt: String::new(), tokens: 3, temperature: 0.0, seed: 0 };
        DecodePlan {
            config,
            tokenizer: "/t".into(),
            cache: "kv".to_owned(),
            packed: BTreeMap::new(),
            page_tokens: 2,
            flush_every: 2,
            evict: true,
            batch: 1,
            runs: vec![
                run(writing, "full", "full"),
                run(judging(), "full", "full"),
                run(judging(), "e8m0", "full"),
                run(judging(), "full", "window:2"),
            ],
        }
    }

    /// Counters in which reads of each tensor have moved `scale` times what is written here.
    fn stats(scale: u64) -> Value {
        let traffic = |stored: u64, plain: u64| {
            json!({
                "planes_fetched": scale, "stored_bytes_fetched": stored * scale, "plain_bytes_fetched": plain * scale,
                "gcomp_bytes_fetched": plain * scale, "index_bytes_fetched": 2 * stored * scale,
                "staged_bytes": 3 * plain * scale,
            })
        };
        let with = |mut entry: Value, key: &str, name: &str| {
            entry[key] = json!(name);
            entry
        };
        json!({
            "writes": { "blocks_written": 10 * scale, "stored_bytes_written": 640 * scale },
            "reads_for_writes": traffic(17, 19),
            "views": [
                with(traffic(64, 128), "tensor", "norm.weight"),
                with(traffic(1, 1), "tensor", "somebody's"),
                with(traffic(192, 256), "tensor", "kv.layers.0.k"),
            ],
            "tensors": [
                { "name": "norm.weight", "stored_bytes": 999, "base": traffic(0, 0) },
                { "name": "kv.layers.0.k", "stored_bytes": 4, "base": traffic(64, 64) },
                { "name": "kv.layers.0.v", "stored_bytes": 6, "base": traffic(0, 0) },
            ],
        })
    }

    fn reported(number: usize, perplexity: Option<f64>) -> Reported {
        let event = Event::Decoded {
            number,
            tokens: vec![1, 5, 6],
            text: "five six".to_owned(),
            perplexity,
            logits_sha256: "aa".to_owned(),
            weight_bytes: 500,
            kv_view_bytes: 20,
            kv_base_bytes: 3,
            kv_stored_bytes: 16,
            flushes: 1,
            seconds: 0.5,
            before: stats(2),
            after: stats(5),
        };
        Reported::of(event).unwrap()
    }

    fn all() -> Vec<Reported> {
        vec![reported(1, None), reported(2, Some(3.0)), reported(3, Some(9.0)), reported(4, Some(4.0))]
    }

    fn expected() -> Vec<Option<Result<Expected>>> {
        (0..4).map(|_| Some(Ok(of_tokens([1, 5, 6], "aa")))).collect()
    }

    fn of_tokens(tokens: [usize; 3], logits: &str) -> Expected {
        let (tokens, logits_sha256) = (tokens.to_vec(), logits.to_owned());
        Expected { tokens, logits_sha256, are_finite: true, unsaved: None }
    }

    #[test]
    fn what_moved_is_the_difference_of_the_counters_of_the_tensors_concerned() {
        let (report, problems) = report("a model", &plan(), &all(), &expected()).unwrap();
        assert_eq!(problems, Vec::<String>::new());
        let report = report.unwrap();
        assert!(report.identical_to_reference);
        let run = &report.runs[0];
        assert_eq!(
            run.weights_moved,
            Moved {
                loaded_bytes: 500,
                planes_fetched: 3 + 3,
                stored_bytes_fetched: 3 * 64,
                plain_bytes_fetched: 3 * 128,
                gcomp_bytes_fetched: Some(3 * 128),
                index_bytes_fetched: 3 * 2 * 64,
                staged_bytes: 3 * 3 * 128,
            }
        );
        let writes = run.for_writes;
        assert_eq!((writes.stored_bytes_fetched, writes.plain_bytes_fetched), (3 * 17, 3 * 19));
        assert_eq!(report.index_bytes_fetched, 3 * 2 * (64 + 192 + 64));
        assert_eq!((run.kv_moved.loaded_bytes, run.kv_moved.stored_bytes_fetched), (23, 3 * (192 + 64)));
        assert_eq!((run.blocks_written, run.stored_bytes_written, run.flushes), (30, 3 * 640, 1));
        // 16 bytes are two rows of K and two of V, of two bf16 each.
        assert_eq!((run.steps, run.kv_stored_bytes, run.kv_ratio), (2, 10, Some(1.6)));
        let (key, value) = (Some(8.0 / 4.0), Some(8.0 / 6.0));
        assert_eq!(run.kv_layers, [LayerRatio { layer: 0, key, value }]);
        assert_eq!(report.stored_bytes_fetched, 3 * (64 + 192 + 64));
        assert_eq!(report.plain_bytes_fetched, 3 * (128 + 256 + 64));
        let figures = |figures: &[(&str, f64)]| {
            figures.iter().map(|(name, figure)| ((*name).to_owned(), *figure)).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(report.perplexity, figures(&[("full", 3.0), ("e8m0", 9.0)]));
        assert_eq!(report.policy_perplexity, figures(&[("full", 3.0), ("window:2", 4.0)]));
        assert_eq!(report.text, "five six");
        let text = report.to_text();
        // Three times 64 stored bytes, and twice as many of index entries, of 128.
        assert!(text.contains("50.0 %") && text.contains("150.0 %"), "{text}");
        assert!(
            text.contains("identical to") && text.contains("window:2") && text.contains("| five six"),
            "{text}"
        );
    }

    #[test]
    fn whatever_differs_or_is_missing_is_a_problem() {
        let mut differing = expected();
        differing[0] = Some(Ok(of_tokens([1, 5, 7], "aa")));
        differing[1] = Some(Ok(of_tokens([1, 5, 6], "bb")));
        differing[2] = Some(Err(anyhow::anyhow!("no such file")));
        let (reported, problems) = report("a model", &plan(), &all()[..3], &differing).unwrap();
        let reported = reported.unwrap();
        assert!(
            !reported.identical_to_reference
                && reported.runs.iter().all(|run| run.identical_to_reference == Some(false))
        );
        assert!(reported.to_text().contains("NOT what came of"));
        for (problem, says) in problems.iter().zip([
            "from token 2 on",
            "by other logits",
            "the reference fails: no such file",
            "window:2 was not done",
        ]) {
            assert!(problem.contains(says), "{says}: {problem}");
        }
        assert_eq!(problems.len(), 4);
        let (reported, problems) = report("a model", &plan(), &[], &expected()).unwrap();
        assert!(reported.is_none() && problems.len() == 4);
    }

    #[test]
    fn logits_that_are_no_numbers_are_a_problem_however_equal_they_are() {
        let nan = "gave logits that are NaN or infinite";
        let or_large = "gave logits that are NaN or infinite, or too large a perplexity";
        let large = "gave a perplexity too large for a number";
        // In an event NaN is null; what is not compared is told by that alone.
        let mut reports = all();
        (reports[2], reports[3]) = (reported(3, None), reported(4, Some(f64::INFINITY)));
        let mut uncompared = expected();
        uncompared[2] = None;
        let (found, problems) = report("a model", &plan(), &reports, &uncompared).unwrap();
        // Where it is compared, its logits are known to be finite.
        let wanted = [("e8m0", "full", or_large), ("full", "window:2", large)]
            .map(|(view, policy, why)| format!("decoding with weights {view} and policy {policy} {why}"));
        assert_eq!(problems, wanted);
        assert!(found.unwrap().to_text().contains("no number"));
        // A text that is written has no perplexity.
        let mut overflown = expected();
        if let Some(Ok(first)) = &mut overflown[0] {
            first.are_finite = false;
        }
        let (_, problems) = report("a model", &plan(), &all(), &overflown).unwrap();
        assert_eq!(problems, [format!("decoding with weights full and policy full {nan}")]);
    }

    #[test]
    fn a_text_of_one_token_has_no_perplexity_and_that_is_no_problem() {
        let mut reports = all();
        let mut one = expected();
        for (report, expected) in reports.iter_mut().zip(&mut one).skip(1) {
            let Event::Decoded { tokens, perplexity, .. } = &mut *report.0 else { unreachable!() };
            (*tokens, *perplexity) = (vec![1], None);
            expected.as_mut().unwrap().as_mut().unwrap().tokens = vec![1];
        }
        let (found, problems) = report("a model", &plan(), &reports, &one).unwrap();
        assert_eq!(problems, Vec::<String>::new());
        assert!(found.unwrap().perplexity.is_empty());
    }

    #[test]
    fn a_file_that_could_not_be_written_is_told_as_that() {
        let mut unsaved = expected();
        if let Some(Ok(judged)) = &mut unsaved[1] {
            judged.unsaved = Some("cannot write K and V to /full: No space left".to_owned());
        }
        let (found, problems) = report("a model", &plan(), &all(), &unsaved).unwrap();
        assert_eq!(problems, Vec::<String>::new());
        let found = found.unwrap();
        assert!(found.runs.iter().all(|run| run.identical_to_reference == Some(true)));
        assert_eq!(found.unsaved.as_deref(), Some("cannot write K and V to /full: No space left"));
    }

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        let (found, _) = report("red \u{1b}[31m", &plan(), &all(), &expected()).unwrap();
        let found = DecodeReport { text: "one\ttwo\u{7}\nthree".to_owned(), ..found.unwrap() };
        let text = found.to_text();
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        assert!(text.contains("red \\u{1b}[31m, measured"), "{text}");
        assert!(text.contains("| one\\ttwo\\u{7}\n        | three"), "{text}");
    }

    #[test]
    fn counters_without_a_figure_are_an_error_that_names_it() {
        for (list, field) in [
            ("views", "plain_bytes_fetched"),
            ("views", "index_bytes_fetched"),
            ("writes", "blocks_written"),
            ("tensors", "stored_bytes"),
        ] {
            let mut broken = reported(1, None);
            let Event::Decoded { after, .. } = &mut *broken.0 else { unreachable!() };
            let text = after.to_string().replace(&format!("\"{field}\""), "\"other\"");
            *after = serde_json::from_str(&text).unwrap();
            let why = report("a model", &plan(), &[broken], &expected()).unwrap_err();
            let why = format!("{why:#}");
            assert!(why.contains("weights full and policy full"), "{why}");
            assert!(why.contains(field) || why.contains(list), "{field}: {why}");
        }
    }
}
