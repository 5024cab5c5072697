//! The decoder job: a language model whose weights and KV cache are on the device.
//!
//! The guest, or the same program on the host, writes a text with everything in full, then judges a
//! given text with weights in each view, and with the KV cache read under each policy. `reference`
//! does the same in ordinary memory, and every logit must be the same; [`report`] tells what the
//! device moved for it.
//!
//! The cache is a checkpoint of zeros, loaded like any other: for each layer a K and a V tensor
//! with a row for each token the model can take.

pub mod gguf;
mod reference;
pub mod report;

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use lamina_guest::{DecodePlan, DecodeRun, Task};
use lamina_llama::{
    Config, Element, Policy, Slot, Tokenizer, Weight,
    policy::{FULL, packings},
};
use lamina_qemu::GuestFile;
use lamina_reference::Format;
use serde_json::json;

use crate::{
    daemon::Serve,
    files::{self, MAX_TEXT_BYTES, MAX_VOCABULARY_BYTES, can_be_made, read},
    judge::Judge,
};

pub(crate) use reference::expected;

pub use reference::Expected;

/// What the cache's tensors are named after.
const CACHE: &str = "sequence";
/// The same of those that are packed with loss, with a number behind.
const PACKED: &str = "packed";
/// Tokens that are packed together.
const PACKED_TOKENS: usize = 64;
/// Where the guest has the vocabulary.
pub(crate) const TOKENIZER: &str = "/tokenizer.bin";
/// Bytes that the device codes, and the host fetches, as a whole.
const BLOCK: usize = 4096;
/// Most tokens that a KV window may have.
const MAX_WINDOW: usize = 256;

/// What to decode.
#[derive(Clone, Debug)]
pub struct Decode {
    /// The views that weights are read in.
    pub views: Vec<String>,
    /// How the KV cache is read.
    pub policies: Vec<Policy>,
    /// How the text that is written begins.
    pub prompt: String,
    /// Tokens it has at most.
    pub tokens: usize,
    /// How freely tokens are chosen; 0 takes the likeliest.
    pub temperature: f32,
    /// Decides what is chosen.
    pub seed: u64,
    /// The text that is judged, a file, if one is to be.
    pub text: Option<PathBuf>,
    /// Tokens of it that are judged; all that the model can take if not given.
    pub text_tokens: Option<usize>,
    /// What is held against a run in ordinary memory.
    pub compared: Compared,
    /// The vocabulary, a file.
    pub tokenizer: PathBuf,
    /// Tokens from one flush of the cache to the next.
    pub flush_every: usize,
    /// Tokens of a page of the cache; as many as one block of the device holds if not given.
    pub page_tokens: Option<usize>,
    /// Tokens of a KV window; those of a page if not given, and no fewer than fill a block.
    pub window_tokens: Option<usize>,
    /// Tokens of the judged text that go through the model together.
    pub batch: usize,
    /// Whether the host may keep from step to step what it has fetched.
    pub keep_cache: bool,
    /// A new file for the K and V of the text that is judged with everything in full.
    pub save_kv: Option<PathBuf>,
}

/// What is held against a run in ordinary memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// Every text, in every view and under every policy.
    All,
    /// The texts with everything in full: what a larger model takes otherwise is minutes.
    InFull,
}

/// A decoder job made ready.
pub struct Prepared {
    /// What the guest does.
    pub plan: DecodePlan,
    /// What it needs for it.
    pub files: Vec<GuestFile>,
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// What the model is called.
    pub model: String,
    /// Holds the cache's checkpoint.
    _folder: tempfile::TempDir,
}

impl Prepared {
    /// What each run must come to, where it is compared.
    pub fn expected(&self, decode: &Decode, judge: &Judge) -> Vec<Option<Result<Expected>>> {
        let full = Policy::full().to_string();
        let compared = |run: &&DecodeRun| match decode.compared {
            Compared::All => true,
            Compared::InFull => run.weights == FULL && run.policy == full,
        };
        let of = |run: &DecodeRun| {
            let judged = matches!(run.task, Task::Judge { .. }) && run.weights == FULL && run.policy == full;
            let save = decode.save_kv.as_deref().filter(|_| judged);
            compared(&run).then(|| expected(judge, &self.plan, &self.tokenizer, run, save))
        };
        self.plan.runs.iter().map(of).collect()
    }
}

impl Decode {
    /// Makes the job ready for the first model of `serve` that says its shape, and adds to `serve`
    /// what it needs: the KV cache and the views.
    ///
    /// # Errors
    /// When no model is a decoder, or the options do not fit it.
    pub fn prepare(&self, serve: &mut Serve) -> Result<Prepared> {
        let judge = Judge::new(&serve.models)?;
        let shape = judge.note("config").context(
            "no model is a decoder: --workload decode wants a checkpoint in bf16 with Llama's tensor names and its shape, as \
             llama2.c writes it, as `config` in the metadata",
        )?;
        let config = Config::from_json(shape)?;
        has_weights(&judge, &config)?;
        let vocabulary = read(&self.tokenizer, MAX_VOCABULARY_BYTES)?;
        let tokenizer = Tokenizer::parse(&vocabulary, config.vocab_size)
            .with_context(|| format!("{} does not fit the model", self.tokenizer.display()))?;
        let text = self.text.as_ref().map(|path| read_text(path, &tokenizer)).transpose()?;
        let judged = self.text_tokens.filter(|_| text.is_some());
        ensure!(
            judged.is_none_or(|tokens| tokens >= 2),
            "{} tokens of the text: the first is not predicted, so judging wants 2 or more",
            judged.unwrap_or_default()
        );
        ensure!(
            self.save_kv.is_none() || text.is_some(),
            "no text is judged, so there is no K and V to save: give one with --text"
        );
        self.save_kv.as_deref().map_or(Ok(()), can_be_made)?;
        let room = config.seq_len;
        ensure!((2..=room).contains(&self.tokens), "{} tokens: the model takes 2 to {room}", self.tokens);
        let prompt = tokenizer.encode(&self.prompt).len();
        ensure!(prompt > 0, "a text of this model needs a beginning: give it one with --prompt");
        ensure!(
            prompt < self.tokens,
            "the prompt alone has {prompt} tokens, of {} at most: there is nothing to write",
            self.tokens
        );
        if let Some(tokens) = self.window_tokens {
            ensure!(
                (1..=MAX_WINDOW).contains(&tokens),
                "a KV window of {tokens} tokens: the device takes 1 to {MAX_WINDOW}"
            );
        }
        let row_bytes = 2 * config.kv_dim();
        let page_tokens = self.page_tokens.unwrap_or((BLOCK / row_bytes).max(1));
        for (name, tokens) in [("page", page_tokens), ("flush", self.flush_every), ("batch", self.batch)] {
            ensure!((1..=room).contains(&tokens), "a {name} of {tokens} tokens: the model takes 1 to {room}");
        }

        let folder = tempfile::Builder::new().prefix("lamina-decode-").tempdir()?;
        let mut add_cache = |name: &str, layouts: [String; 2]| {
            let cache = folder.path().join(format!("{name}.safetensors"));
            write_cache(&cache, name, &config).context("cannot write the empty KV cache")?;
            serve.models.push(cache);
            if layouts[0] == layouts[1] {
                serve.kv.push(format!("{name}.*={}", layouts[0]));
            } else {
                let sides = ["k", "v"].iter().zip(layouts);
                serve.kv.extend(sides.map(|(side, layout)| format!("{name}.*.{side}={layout}")));
            }
            Ok::<_, anyhow::Error>(())
        };
        // Windows that are pages, so that reading a page decodes no other; but no smaller than a
        // block.
        let window = self.window_tokens.unwrap_or(page_tokens).max(BLOCK / row_bytes).clamp(1, MAX_WINDOW);
        if let Some(asked) = self.window_tokens.filter(|tokens| *tokens != window) {
            tracing::warn!(
                "a KV window of {asked} tokens does not fill a block of {BLOCK} bytes: it has {window}"
            );
        }
        let exact = format!("{},{window}", config.kv_dim());
        add_cache(CACHE, [exact.clone(), exact])?;
        let mut packed = BTreeMap::new();
        for policy in &self.policies {
            let Policy::Packed(packing) = policy else { continue };
            let name = format!("{PACKED}{}", packed.len() + 1);
            let window = (1..=MAX_WINDOW).find(|tokens| {
                tokens.is_multiple_of(PACKED_TOKENS) && (tokens * row_bytes).is_multiple_of(BLOCK)
            });
            let window = window.with_context(|| {
                format!(
                    "{policy}: rows of {row_bytes} bytes fill no windows of whole {PACKED_TOKENS} tokens and blocks"
                )
            })?;
            if packed.insert(policy.to_string(), name.clone()).is_none() {
                let of = |packing| format!("{},{window},lossy={packing}", config.kv_dim());
                add_cache(&name, packings(packing).map(of))?;
            }
        }
        let policies = self.policies.iter().flat_map(Policy::views);
        for view in [FULL.to_owned()].into_iter().chain(self.views.iter().cloned()).chain(policies) {
            Element::of(&view)?;
            lamina_reference::planes(Format::Bf16, &view)?;
            if !serve.views.contains(&view) {
                serve.views.push(view);
            }
        }
        let plan = DecodePlan {
            config,
            tokenizer: TOKENIZER.into(),
            cache: CACHE.to_owned(),
            packed,
            page_tokens,
            flush_every: self.flush_every,
            evict: !self.keep_cache,
            batch: self.batch,
            runs: self.runs(text),
        };
        let files = vec![GuestFile::data(TOKENIZER, vocabulary)];
        let caches = 1 + plan.packed.len();
        // A checkpoint that says nothing of itself goes by its file's name, if it came alone.
        let file = || match &serve.models[..] {
            [model, _cache, ..] if serve.models.len() == 1 + caches => {
                Some(model.file_stem()?.to_string_lossy().into_owned())
            }
            _ => None,
        };
        let model = judge.note("name").map(str::to_owned).or_else(file);
        let model = model.unwrap_or_else(|| "the model".to_owned());
        Ok(Prepared { plan, files, tokenizer, model, _folder: folder })
    }

    /// One text written in full, then the given one judged: with weights in each view, and with the
    /// cache under each policy.
    fn runs(&self, text: Option<String>) -> Vec<DecodeRun> {
        let full = Policy::full().to_string();
        let run =
            |task, weights: &str, policy: String| DecodeRun { task, weights: weights.to_owned(), policy };
        let Self { prompt, tokens, temperature, seed, .. } = self;
        let write =
            Task::Write { prompt: prompt.clone(), tokens: *tokens, temperature: *temperature, seed: *seed };
        let mut runs = vec![run(write, FULL, full.clone())];
        let Some(text) = text else { return runs };
        let judge = Task::Judge { text, tokens: self.text_tokens };
        let mut add = |weights: &str, policy: &str| {
            let next = run(judge.clone(), weights, policy.to_owned());
            if !runs.contains(&next) {
                runs.push(next);
            }
        };
        // What the others are compared with.
        add(FULL, &full);
        for view in &self.views {
            add(view, &full);
        }
        for policy in &self.policies {
            add(FULL, &policy.to_string());
        }
        runs
    }
}

/// The text that is judged.
fn read_text(path: &Path, tokenizer: &Tokenizer) -> Result<String> {
    let text = files::read_text(path, MAX_TEXT_BYTES)?;
    ensure!(tokenizer.encode(&text).len() > 1, "{} is empty: there is nothing to judge", path.display());
    Ok(text)
}

/// Whether the models have all tensors of this shape, in bf16.
pub(crate) fn has_weights(judge: &Judge, config: &Config) -> Result<()> {
    for weight in Weight::all(config) {
        let name = weight.name();
        let (format, _) = judge.shape(&name)?;
        ensure!(format == Format::Bf16, "{name} is {format}; --workload decode reads weights in bf16");
        let found = judge.dimensions(&name)?;
        ensure!(
            weight.fits(config, found),
            "{name} has the shape {found:?}; the model's wants {:?}",
            weight.dimensions(config)
        );
    }
    Ok(())
}

/// Writes a checkpoint of zeros: K and V of every layer, a row for each token that the model can
/// take.
fn write_cache(path: &Path, name: &str, config: &Config) -> Result<()> {
    let bytes = 2 * config.kv_dim() * config.seq_len;
    let mut header = serde_json::Map::new();
    for slot in Slot::all(config) {
        let start = slot.index() * bytes;
        let entry = json!({ "dtype": "BF16", "shape": [config.seq_len, config.kv_dim()], "data_offsets": [start, start + bytes] });
        header.insert(slot.name(name), entry);
    }
    let header = serde_json::to_vec(&header)?;
    let mut file = fs::File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    // A file's end that was never written reads as zeros.
    let data = bytes as u64 * Slot::all(config).len() as u64;
    Ok(file.set_len(8 + header.len() as u64 + data)?)
}
