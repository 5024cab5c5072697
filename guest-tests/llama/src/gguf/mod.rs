//! A Llama model in a GGUF file: its shape, its vocabulary, and its tensors as bf16.
//!
//! What is read: files of little-endian machines, versions 2 and 3, of the architecture `llama`
//! with one matrix for embedding and classifier and a vocabulary as GPT-2 has it. A model with a
//! tensor that the decoder does not use is refused, as it would not be that model. The file has
//! rows of Wq and Wk in the order in which the decoder rotates pairs: neighbours.

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
    /// A tensor that is missing.
    #[error("the file has no tensor {name}")]
    NoTensor {
        /// Its name.
        name: String,
    },
    /// A tensor that is not of the model's shape.
    #[error("tensor {name} has {found} elements; the model's shape wants {wanted}")]
    Shape {
        /// The tensor.
        name: String,
        /// Elements that it has.
        found: usize,
        /// Elements that it should have.
        wanted: usize,
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
        if let Some(scaling) = values.0.get("llama.rope.scaling.type").and_then(Value::text)
            && scaling != "none"
        {
            let (key, known) = ("llama.rope.scaling.type".to_owned(), "none".to_owned());
            return Err(ModelError::Unknown { key, value: scaling.to_owned(), known });
        }
        let number = |key: &str| values.number(&format!("llama.{key}"));
        let vocabulary = vocabulary(values)?;
        let heads = number("attention.head_count")?;
        let config = Config {
            dim: number("embedding_length")?,
            hidden_dim: number("feed_forward_length")?,
            n_layers: number("block_count")?,
            n_heads: heads,
            n_kv_heads: number("attention.head_count_kv").unwrap_or(heads),
            vocab_size: vocabulary.tokens.len(),
            seq_len: number("context_length")?.min(MAX_TOKENS),
            rope_theta: values.float("llama.rope.freq_base").unwrap_or(crate::config::ROPE_THETA),
            norm_eps: values.float("llama.attention.layer_norm_rms_epsilon")?,
            experts: None,
        };
        let config = config.checked()?;
        if let Ok(rotated) = number("rope.dimension_count")
            && rotated != config.head_size()
        {
            let key = "llama.rope.dimension_count".to_owned();
            let known = format!("{}, the size of a head", config.head_size());
            return Err(ModelError::Unknown { key, value: rotated.to_string(), known });
        }
        let name = values.0.get("general.name").and_then(Value::text).unwrap_or("a model without a name");
        let mut unused: BTreeSet<&String> = tensors.keys().collect();
        for weight in Weight::all(&config) {
            let name = name_of(weight)?;
            let tensor = tensors.get(&name).ok_or_else(|| ModelError::NoTensor { name: name.clone() })?;
            let (rows, columns) = weight.shape(&config);
            let (found, wanted) = (tensor.elements, rows * columns);
            if found != wanted {
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
        let missing = || ModelError::Missing { key: key.to_owned(), what };
        self.0.get(key).and_then(as_it).ok_or_else(missing)
    }

    fn number(self, key: &str) -> Result<usize, ModelError> {
        self.get(key, "a whole number", |value| usize::try_from(value.number()?).ok())
    }

    fn float(self, key: &str) -> Result<f32, ModelError> {
        self.get(key, "a number", Value::float)
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

fn vocabulary(values: Values<'_>) -> Result<Vocabulary, ModelError> {
    values.is("tokenizer.ggml.model", &["gpt2"])?;
    // Of those that llama.cpp knows, the ones that cut each digit off.
    values.is("tokenizer.ggml.pre", &["smollm", "starcoder", "refact", "command-r", "codeshell"])?;
    let kinds = values.get("tokenizer.ggml.token_type", "a list", Value::list)?;
    let no_text = |value: &Value| value.number().is_some_and(|kind| NO_TEXT.contains(&kind));
    let special = kinds.iter().enumerate().filter(|(_, kind)| no_text(kind)).map(|(token, _)| token);
    let begins = values.0.get("tokenizer.ggml.add_bos_token").and_then(Value::number) == Some(1);
    let begin = values.number("tokenizer.ggml.bos_token_id");
    let token = |key: &str| values.number(&format!("tokenizer.ggml.{key}_token_id")).ok();
    Ok(Vocabulary {
        tokens: values.texts("tokenizer.ggml.tokens")?,
        pairs: values.texts("tokenizer.ggml.merges")?,
        special: special.collect(),
        unknown: token("unknown"),
        begin: if begins { Some(begin?) } else { None },
        ends: ["eos", "eot"].into_iter().filter_map(token).collect(),
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
