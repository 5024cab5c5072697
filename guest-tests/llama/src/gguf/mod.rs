//! A Llama model in a GGUF file: its shape, its vocabulary, and its tensors as bf16.
//!
//! What is read: files of little-endian machines, versions 2 and 3, of the architecture `llama`
//! with one matrix for embedding and classifier and a vocabulary as GPT-2 has it. A model with a
//! tensor, or a key of its architecture, that the decoder does not know is refused, as it would not
//! be that model. The file has rows of Wq and Wk in the order in which the decoder rotates pairs:
//! neighbours.

mod blocks;
mod header;

pub use blocks::{Blocks, UnreadableType};
pub use header::{Header, HeaderError, Stored, Value};

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    config::{Config, ConfigError},
    element::to_bf16,
    tokenizer::Vocabulary,
    weights::{Part, Weight},
};

/// Most tokens of a sequence, whatever the file says: the KV cache has room for all of them.
pub const MAX_TOKENS: usize = 1024;
/// What keys of the architecture begin with.
const ARCHITECTURE: &str = "llama.";
/// Keys of the architecture that say nothing of what is computed.
const REMARKS: [&str; 3] =
    ["tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"];
/// How the file marks tokens that are no text: control tokens, and those a user has added.
const NO_TEXT: [u64; 2] = [3, 4];

/// A model.
#[derive(Debug)]
pub struct Model<'a> {
    config: Config,
    name: String,
    vocabulary: Vocabulary,
    tensors: BTreeMap<String, Stored<'a>>,
}

/// Why a file is no such model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No GGUF file.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A shape that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor of a type that is not read.
    #[error("tensor {tensor}: {why}")]
    Type {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        why: UnreadableType,
    },
    /// Metadata that is missing, or of another type.
    #[error("the metadata has no {key} that is {what}")]
    Missing {
        /// Its name.
        key: String,
        /// What it should be.
        what: &'static str,
    },
    /// Metadata that asks for what the decoder does not do.
    #[error("{key} is {value}; the decoder knows {known}")]
    Unknown {
        /// Its name.
        key: String,
        /// What it says.
        value: String,
        /// What would do.
        known: String,
    },
    /// Types of more or fewer tokens than there are.
    #[error("tokenizer.ggml.token_type has {found} entries; there are {wanted} tokens")]
    TokenTypes {
        /// Entries.
        found: usize,
        /// Tokens.
        wanted: usize,
    },
    /// A tensor that is missing.
    #[error("the file has no tensor {name}")]
    NoTensor {
        /// Its name.
        name: String,
    },
    /// A tensor that is not of the model's shape.
    #[error("tensor {name} has the shape {found:?}; the model's wants {wanted:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its dimensions, the outermost first.
        found: Vec<u64>,
        /// Those that it should have.
        wanted: Vec<u64>,
    },
    /// Metadata of which the decoder knows nothing.
    #[error("the metadata has {key}, which the decoder does not know")]
    UnknownKey {
        /// Its name.
        key: String,
    },
    /// A tensor of which the decoder knows nothing.
    #[error("the file has a tensor {name}, which the decoder does not use")]
    Unused {
        /// Its name.
        name: String,
    },
}

impl<'a> Model<'a> {
    /// The model in `file`.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn read(file: &'a [u8]) -> Result<Self, ModelError> {
        let Header { values, tensors } = Header::read(file)?;
        let values = Values(&values);
        values.is("general.architecture", &["llama"])?;
        let vocabulary = vocabulary(values)?;
        let mut keys = Keys::new(values);
        let heads = keys.number("attention.head_count")?;
        let config = Config {
            dim: keys.number("embedding_length")?,
            hidden_dim: keys.number("feed_forward_length")?,
            n_layers: keys.number("block_count")?,
            n_heads: heads,
            n_kv_heads: keys.optional_number("attention.head_count_kv")?.unwrap_or(heads),
            vocab_size: vocabulary.tokens.len(),
            seq_len: keys.number("context_length")?.min(MAX_TOKENS),
            rope_theta: keys.optional_float("rope.freq_base")?.unwrap_or(crate::config::ROPE_THETA),
            norm_eps: keys.float("attention.layer_norm_rms_epsilon")?,
            experts: None,
        };
        let config = config.checked()?;
        keys.say_what_is_done(&config)?;
        let name = values.optional("general.name", "a text", Value::text)?;
        let name = name.unwrap_or("a model without a name");
        let mut unused: BTreeSet<&String> = tensors.keys().collect();
        for weight in Weight::all(&config) {
            let name = name_of(weight)?;
            let tensor = tensors.get(&name).ok_or_else(|| ModelError::NoTensor { name: name.clone() })?;
            if !weight.fits(&config, &tensor.dimensions) {
                let (found, wanted) = (tensor.dimensions.clone(), weight.dimensions(&config));
                return Err(ModelError::Shape { name, found, wanted });
            }
            unused.remove(&name);
        }
        if let Some(name) = unused.pop_first() {
            return Err(ModelError::Unused { name: name.clone() });
        }
        Ok(Self { config, name: name.to_owned(), vocabulary, tensors })
    }

    /// Its shape.
    pub fn config(&self) -> Config {
        self.config
    }

    /// What it calls itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its vocabulary.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Whether the file has a tensor as bf16.
    pub fn is_bf16(&self, weight: Weight) -> bool {
        let tensor = name_of(weight).ok().and_then(|name| self.tensors.get(&name));
        tensor.is_some_and(|tensor| Blocks::of(tensor.kind).is_ok_and(Blocks::is_bf16))
    }

    /// A tensor, each element as the bf16 nearest to it.
    ///
    /// # Errors
    /// When the file has none, or its type is not read.
    pub fn bf16(&self, weight: Weight) -> Result<Vec<u8>, ModelError> {
        let name = name_of(weight)?;
        let tensor = self.tensors.get(&name).ok_or_else(|| ModelError::NoTensor { name: name.clone() })?;
        let blocks = Blocks::of(tensor.kind).map_err(|why| ModelError::Type { tensor: name, why })?;
        let mut bytes = Vec::with_capacity(2 * tensor.elements);
        blocks.read(tensor.bytes, |x| bytes.extend_from_slice(&to_bf16(x).to_le_bytes()));
        Ok(bytes)
    }
}

/// What an error calls a number.
const WHOLE: &str = "a whole number";
/// The same of one that may have a fraction.
const FLOAT: &str = "a number";

fn whole(value: &Value) -> Option<usize> {
    usize::try_from(value.number()?).ok()
}

/// The metadata.
#[derive(Clone, Copy)]
struct Values<'a>(&'a BTreeMap<String, Value>);

impl<'a> Values<'a> {
    fn get<T>(
        self,
        key: &str,
        what: &'static str,
        as_it: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T, ModelError> {
        self.optional(key, what, as_it)?.ok_or_else(|| ModelError::Missing { key: key.to_owned(), what })
    }

    /// What `key` says, if it is there: a value of another type is no default's.
    fn optional<T>(
        self,
        key: &str,
        what: &'static str,
        as_it: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let missing = || ModelError::Missing { key: key.to_owned(), what };
        self.0.get(key).map(|value| as_it(value).ok_or_else(missing)).transpose()
    }

    fn number(self, key: &str) -> Result<usize, ModelError> {
        self.get(key, WHOLE, whole)
    }

    fn is(self, key: &str, known: &[&str]) -> Result<(), ModelError> {
        let value = self.get(key, "a text", Value::text)?;
        if known.contains(&value) {
            return Ok(());
        }
        let known = known.join(" and ");
        Err(ModelError::Unknown { key: key.to_owned(), value: value.to_owned(), known })
    }

    fn texts(self, key: &str) -> Result<Vec<String>, ModelError> {
        self.get(key, "a list of texts", |value| {
            value.list()?.iter().map(|value| value.text().map(str::to_owned)).collect()
        })
    }
}

/// The keys of the architecture.
struct Keys<'a> {
    values: Values<'a>,
    /// Those that nobody has asked for.
    unused: BTreeSet<&'a str>,
}

impl<'a> Keys<'a> {
    fn new(values: Values<'a>) -> Self {
        let unused = values.0.keys().filter_map(|key| key.strip_prefix(ARCHITECTURE)).collect();
        Self { values, unused }
    }

    /// The whole of a key, which is asked for.
    fn used(&mut self, key: &str) -> String {
        self.unused.remove(key);
        format!("{ARCHITECTURE}{key}")
    }

    fn number(&mut self, key: &str) -> Result<usize, ModelError> {
        self.values.number(&self.used(key))
    }

    fn float(&mut self, key: &str) -> Result<f32, ModelError> {
        self.values.get(&self.used(key), FLOAT, Value::float)
    }

    fn optional_number(&mut self, key: &str) -> Result<Option<usize>, ModelError> {
        self.values.optional(&self.used(key), WHOLE, whole)
    }

    fn optional_float(&mut self, key: &str) -> Result<Option<f32>, ModelError> {
        self.values.optional(&self.used(key), FLOAT, Value::float)
    }

    /// Whether all keys that are left say what the decoder does anyway.
    fn say_what_is_done(mut self, config: &Config) -> Result<(), ModelError> {
        let unknown = |key: &str, value: String, known: String| {
            Err(ModelError::Unknown { key: format!("{ARCHITECTURE}{key}"), value, known })
        };
        let scaling = self.values.optional(&self.used("rope.scaling.type"), "a text", Value::text)?;
        if let Some(scaling) = scaling.filter(|scaling| *scaling != "none") {
            return unknown("rope.scaling.type", scaling.to_owned(), "none".to_owned());
        }
        let (size, words) = (config.head_size(), config.vocab_size);
        let (head, no_experts) = ((size, format!("{size}, the size of a head")), (0, "0".to_owned()));
        for (key, (done, known)) in [
            ("rope.dimension_count", head.clone()),
            ("attention.key_length", head.clone()),
            ("attention.value_length", head),
            ("vocab_size", (words, format!("{words}, the tokens of the vocabulary"))),
            ("expert_count", no_experts.clone()),
            ("expert_used_count", no_experts),
        ] {
            if let Some(value) = self.optional_number(key)?.filter(|value| *value != done) {
                return unknown(key, value.to_string(), known);
            }
        }
        // 0 is none, and no sequence is longer than the largest.
        if let Some(window) = self.optional_number("attention.sliding_window")?
            && (1..config.seq_len).contains(&window)
        {
            let known = format!("0, or {} and more", config.seq_len);
            return unknown("attention.sliding_window", window.to_string(), known);
        }
        for key in ["rope.scaling.factor", "rope.scale_linear", "logit_scale"] {
            let other = |value: &f32| value.to_bits() != 1.0_f32.to_bits();
            if let Some(value) = self.optional_float(key)?.filter(other) {
                return unknown(key, value.to_string(), "1".to_owned());
            }
        }
        let left = self.unused.iter().find(|key| !REMARKS.contains(key));
        left.map_or(Ok(()), |key| Err(ModelError::UnknownKey { key: format!("{ARCHITECTURE}{key}") }))
    }
}

fn vocabulary(values: Values<'_>) -> Result<Vocabulary, ModelError> {
    values.is("tokenizer.ggml.model", &["gpt2"])?;
    // Of those that llama.cpp knows, the ones that cut each digit off.
    values.is("tokenizer.ggml.pre", &["smollm", "starcoder", "refact", "command-r", "codeshell"])?;
    let tokens = values.texts("tokenizer.ggml.tokens")?;
    let kinds = values.get("tokenizer.ggml.token_type", "a list of whole numbers", |value| {
        value.list()?.iter().map(Value::number).collect::<Option<Vec<_>>>()
    })?;
    if kinds.len() != tokens.len() {
        return Err(ModelError::TokenTypes { found: kinds.len(), wanted: tokens.len() });
    }
    let special = kinds.iter().enumerate().filter(|(_, kind)| NO_TEXT.contains(kind));
    let begins = values.optional("tokenizer.ggml.add_bos_token", "a truth value", Value::number)?;
    let token = |key: &str| values.optional(&format!("tokenizer.ggml.{key}_token_id"), WHOLE, whole);
    Ok(Vocabulary {
        tokens,
        pairs: values.texts("tokenizer.ggml.merges")?,
        special: special.map(|(token, _)| token).collect(),
        unknown: token("unknown")?,
        begin: if begins == Some(1) { Some(values.number("tokenizer.ggml.bos_token_id")?) } else { None },
        ends: [token("eos")?, token("eot")?].into_iter().flatten().collect(),
    })
}

/// A tensor's name in a GGUF file.
///
/// # Errors
/// [`ModelError::NoTensor`] of an expert's: the experts of a layer are one tensor there, which the
/// decoder does not read.
pub fn name_of(weight: Weight) -> Result<String, ModelError> {
    let (layer, part) = match weight {
        Weight::Embedding => return Ok("token_embd.weight".to_owned()),
        Weight::Norm => return Ok("output_norm.weight".to_owned()),
        Weight::Layer(layer, part) => (layer, part),
        Weight::Expert(..) => return Err(ModelError::NoTensor { name: weight.name() }),
    };
    let part = match part {
        Part::AttentionNorm => "attn_norm",
        Part::Wq => "attn_q",
        Part::Wk => "attn_k",
        Part::Wv => "attn_v",
        Part::Wo => "attn_output",
        Part::FfnNorm => "ffn_norm",
        Part::W1 => "ffn_gate",
        Part::W2 => "ffn_down",
        Part::W3 => "ffn_up",
        Part::Router => "ffn_gate_inp",
    };
    Ok(format!("blk.{layer}.{part}.weight"))
}
