//! What a model of a server must know of an LLM, and where it is read from.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ModelError;
use crate::number::within;
use crate::text::printable;

/// An LLM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Its name.
    pub name: String,
    /// Layers with a KV cache.
    pub layers: f64,
    /// Elements that a token adds to the KV cache of a layer: twice heads times dimension, or the
    /// latent vector of MLA.
    pub kv_elements: f64,
    /// Bits of such an element.
    #[serde(default = "sixteen")]
    pub kv_bits: f64,
    /// All parameters.
    pub parameters: f64,
    /// Parameters that a token reads; all, unless given.
    pub active_parameters: Option<f64>,
    /// Bits of a parameter as the host stores it.
    #[serde(default = "sixteen")]
    pub weight_bits: f64,
    /// Where these numbers come from.
    #[serde(default)]
    pub source: String,
}

fn sixteen() -> f64 {
    16.0
}

/// A preset: name, layers, KV elements a layer, parameters, active parameters, bits of a weight,
/// source.
type Preset = (&'static str, f64, f64, f64, f64, f64, &'static str);

/// LLMs known by name.
pub const PRESETS: [Preset; 10] = [
    ("gpt-oss-120b", 36.0, 1024.0, 120e9, 5.1e9, 16.0, "TRACE IV-B; sliding windows not counted, as there"),
    ("gpt-oss-120b-mxfp4", 36.0, 1024.0, 120e9, 5.1e9, 4.0, "TRACE IV-B, 60 GB of weights"),
    ("llama-3.1-8b", 32.0, 2048.0, 8.03e9, 8.03e9, 16.0, "The Llama 3 Herd of Models, Table 3"),
    ("llama-3.1-70b", 80.0, 2048.0, 70.6e9, 70.6e9, 16.0, "The Llama 3 Herd of Models, Table 3"),
    ("llama-3.1-405b", 126.0, 2048.0, 405.8e9, 405.8e9, 16.0, "The Llama 3 Herd of Models, Table 3"),
    ("mixtral-8x7b", 32.0, 2048.0, 46.7e9, 12.9e9, 16.0, "Mixtral of Experts, Table 1"),
    ("opt-30b", 48.0, 14_336.0, 30e9, 30e9, 16.0, "OPT, Table 1"),
    ("deepseek-v3", 61.0, 576.0, 671e9, 37e9, 8.0, "DeepSeek-V3, section 4.2; MLA: 512 and 64 elements"),
    ("qwen3-32b", 64.0, 2048.0, 32.8e9, 32.8e9, 16.0, "Qwen3, Table 1"),
    ("smollm2-135m", 30.0, 384.0, 134.5e6, 134.5e6, 16.0, "SmolLM2, config.json"),
];

impl Shape {
    /// The preset of that name, in whatever case.
    pub fn preset(name: &str) -> Option<Self> {
        let (name, layers, kv_elements, parameters, active, weight_bits, source) =
            PRESETS.into_iter().find(|preset| preset.0.eq_ignore_ascii_case(name))?;
        Some(Self {
            name: name.to_owned(),
            layers,
            kv_elements,
            kv_bits: 16.0,
            parameters,
            active_parameters: Some(active),
            weight_bits,
            source: source.to_owned(),
        })
    }

    /// A shape written down as TOML, or a `config.json` of Hugging Face: what begins with a brace
    /// or is in a file of that ending. `weight_bits`, if given, are taken whatever the file says.
    ///
    /// # Errors
    /// What is missing or absurd, by its name and the file's.
    pub fn parse(name: &str, text: &str, weight_bits: Option<f64>) -> Result<Self, ModelError> {
        let form = |why: &str| ModelError::form(name, why);
        let has_ending =
            Path::new(name).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        let is_json = has_ending || text.trim_start().starts_with('{');
        let shape = if is_json {
            let config: Value = serde_json::from_str(text).map_err(|why| form(&why.to_string()))?;
            if !config.is_object() {
                return Err(form("it must be an object, as the config.json of a model is"));
            }
            from_config(name, &config, weight_bits)
        } else {
            let shape: Self = toml::from_str(text).map_err(|why| form(&why.to_string()))?;
            Ok(Self { weight_bits: weight_bits.unwrap_or(shape.weight_bits), ..shape })
        };
        let shape = shape.map(|shape| Self {
            name: printable(&shape.name),
            source: printable(&shape.source),
            ..shape
        });
        let checked = shape.and_then(|shape| shape.check().map(|()| shape));
        checked.map_err(|why| why.within_file(name))
    }

    /// Refuses what is of no use.
    ///
    /// # Errors
    /// The field that is.
    pub fn check(&self) -> Result<(), ModelError> {
        within("layers", self.layers, 1.0..=MAX_LAYERS)?;
        within("kv_elements", self.kv_elements, 1.0..=1e7)?;
        within("kv_bits", self.kv_bits, 1.0..=64.0)?;
        within("parameters", self.parameters, 1.0..=1e15)?;
        within("active_parameters", self.active(), 1.0..=self.parameters)?;
        within("weight_bits", self.weight_bits, 1.0..=64.0)?;
        Ok(())
    }

    /// Parameters that a token reads.
    pub fn active(&self) -> f64 {
        self.active_parameters.unwrap_or(self.parameters)
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> f64 {
        self.parameters * self.weight_bits / 8.0
    }

    /// Bytes of weights that a token reads.
    pub fn active_bytes(&self) -> f64 {
        self.active() * self.weight_bits / 8.0
    }

    /// Bytes that a token adds to the KV cache.
    pub fn kv_bytes(&self) -> f64 {
        self.layers * self.kv_elements * self.kv_bits / 8.0
    }
}

const MAX_LAYERS: f64 = 1e4;

/// Numbers of a `config.json`, by name: of its text model, if it has one of its own, and of all.
struct Config<'c> {
    text: &'c Value,
    whole: &'c Value,
}

impl Config<'_> {
    fn get(&self, names: &[&str]) -> Result<Option<f64>, ModelError> {
        self.get_to(names, 1e8)
    }

    /// The first of these numbers, which is `most` at most.
    fn get_to(&self, names: &[&str], most: f64) -> Result<Option<f64>, ModelError> {
        let Some((name, value)) =
            names.iter().find_map(|name| Some((name, self.text.get(name).filter(|value| !value.is_null())?)))
        else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).map(f64::from);
        let number = number.filter(|number| (1.0..=most).contains(number));
        let must = || format!("a whole number from 1 to {most}");
        number.map(Some).ok_or_else(|| ModelError::field(name, value, &must()))
    }

    /// What is said of the text model, or else of the whole, of which it is a part.
    fn said(&self, name: &str) -> Option<&Value> {
        [self.text, self.whole].into_iter().find_map(|of| of.get(name).filter(|value| !value.is_null()))
    }

    fn need(&self, names: &[&str]) -> Result<f64, ModelError> {
        self.get(names)?.ok_or_else(|| ModelError::missing(names[0]))
    }

    fn or(&self, names: &[&str], otherwise: f64) -> Result<f64, ModelError> {
        Ok(self.get(names)?.unwrap_or(otherwise))
    }
}

/// The shape of a Hugging Face `config.json`. Parameters are counted from its dimensions. Norms,
/// biases, routers and tables of positions are left out: under a hundredth of GPT-2's 124 million,
/// and less the larger a model is.
fn from_config(name: &str, config: &Value, bits: Option<f64>) -> Result<Shape, ModelError> {
    let text = match config.get("text_config") {
        None | Some(Value::Null) => config,
        Some(text) if text.is_object() => text,
        Some(other) => return Err(ModelError::field("text_config", other, "an object")),
    };
    let config = Config { text, whole: config };
    let (family, source) = family(&config);
    refuse_unmodelled(&config)?;
    let names = ["num_hidden_layers", "n_layer"];
    let layers = config.get_to(&names, MAX_LAYERS)?.ok_or_else(|| ModelError::missing(names[0]))?;
    let hidden = config.need(&["hidden_size", "n_embd"])?;
    let heads = config.need(&["num_attention_heads", "n_head"])?;
    let vocabulary = config.need(&["vocab_size"])?;
    let inner = config.or(&["intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"], 4.0 * hidden)?;
    let latent = config.get(&["kv_lora_rank"])?;
    let (kv_elements, attention) = if let Some(latent) = latent {
        let rope = config.need(&["qk_rope_head_dim"])?;
        let nope = config.need(&["qk_nope_head_dim"])?;
        let value = config.need(&["v_head_dim"])?;
        let query = match config.get(&["q_lora_rank"])? {
            Some(rank) => rank * (hidden + heads * (nope + rope)),
            None => hidden * heads * (nope + rope),
        };
        let key = hidden * (latent + rope) + latent * heads * (nope + value);
        (latent + rope, query + key + heads * value * hidden)
    } else {
        let kv_heads = kv_heads(&config, &family, heads)?;
        let dimension = if let Some(dimension) = config.get(&["head_dim"])? {
            dimension
        } else {
            divides("num_attention_heads", heads, "hidden_size", hidden, ", as there is no head_dim")?;
            hidden / heads
        };
        (2.0 * kv_heads * dimension, hidden * dimension * (2.0 * heads + 2.0 * kv_heads))
    };
    let matrix = family.matrices * hidden;
    let names = ["num_local_experts", "n_routed_experts", "num_experts"];
    let (all, active) = match config.get(&names)? {
        None => (layers * matrix * inner, layers * matrix * inner),
        Some(experts) => {
            let used = config.need(&["num_experts_per_tok", "experts_per_token"])?;
            within("num_experts_per_tok", used, 1.0..=experts)?;
            let expert = config.or(&["moe_intermediate_size"], inner)?;
            let shared = shared_inner(&config, &family, expert)?;
            // The first layers may be dense, and then all but every so many.
            let first = zero_or(&config, "first_k_dense_replace")?.min(layers);
            let every = config.or(&["decoder_sparse_step", "interleave_moe_layer_step"], 1.0)?;
            let sparse = ((layers - first) / every).floor();
            let dense = (layers - sparse) * config.or(&["intermediate_size_mlp"], inner)?;
            let of = |experts: f64| matrix * (sparse * (expert * experts + shared) + dense);
            (of(experts), of(used))
        }
    };
    let name_of_tied = "tie_word_embeddings";
    let tied = switch(name_of_tied, config.said(name_of_tied))?.unwrap_or(family.tied);
    let embedding = vocabulary * hidden;
    let rest = layers * attention + embedding * if tied { 1.0 } else { 2.0 };
    // Of the input embedding a token reads one row.
    let read = layers * attention + embedding;
    Ok(Shape {
        name: name.to_owned(),
        layers,
        kv_elements,
        kv_bits: 16.0,
        parameters: all + rest,
        active_parameters: Some(active + read),
        weight_bits: bits.map_or_else(|| weight_bits(&config), Ok)?,
        source,
    })
}

/// What the models of a `model_type` have unless their `config.json` says otherwise.
#[derive(Clone, Copy)]
struct Family {
    model_type: &'static str,
    /// Matrices of a feed-forward network: three with a gate, two without.
    matrices: f64,
    /// Whether the output embedding is the input's.
    tied: bool,
    /// Whether all heads share one of KV.
    multi_query: bool,
    /// Whether each layer of experts has one more that every token reads, as large as they are.
    shares_expert: bool,
}

const fn gated(model_type: &'static str, tied: bool) -> Family {
    Family { model_type, matrices: 3.0, tied, multi_query: false, shares_expert: false }
}

const fn plain(model_type: &'static str, tied: bool) -> Family {
    Family { matrices: 2.0, ..gated(model_type, tied) }
}

/// Families whose parameters are counted right, with the defaults of their classes in Hugging
/// Face's transformers. The first is what others are taken for.
const FAMILIES: [Family; 42] = [
    gated("llama", false),
    Family { shares_expert: true, ..gated("llama4", false) },
    Family { shares_expert: true, ..gated("llama4_text", false) },
    gated("mistral", false),
    gated("mistral3", false),
    gated("mixtral", false),
    gated("qwen2", false),
    gated("qwen2_moe", false),
    gated("qwen3", false),
    gated("qwen3_moe", false),
    gated("deepseek_v2", false),
    gated("deepseek_v3", false),
    gated("kimi_k2", false),
    gated("glm4", false),
    gated("glm4_moe", false),
    gated("gpt_oss", false),
    gated("gemma", true),
    gated("gemma2", true),
    gated("gemma3", true),
    gated("gemma3_text", true),
    gated("cohere", true),
    gated("cohere2", true),
    gated("granite", false),
    gated("granitemoe", false),
    gated("olmo", false),
    gated("olmo2", false),
    gated("olmoe", false),
    gated("phi3", false),
    gated("phimoe", false),
    gated("smollm3", true),
    gated("stablelm", false),
    plain("bloom", true),
    Family { multi_query: true, ..plain("falcon", true) },
    plain("gpt2", true),
    Family { multi_query: true, ..plain("gpt_bigcode", true) },
    plain("gpt_neox", false),
    plain("gptj", false),
    plain("opt", true),
    plain("phi", false),
    plain("starcoder2", true),
    // Falcon's own names for itself, before it was in there.
    plain("RefinedWeb", true),
    plain("RefinedWebModel", true),
];

/// The family of a model, and what is to be said of where its numbers come from.
fn family(config: &Config<'_>) -> (Family, String) {
    let model_type = config.said("model_type").and_then(Value::as_str);
    let known = FAMILIES.into_iter().find(|family| Some(family.model_type) == model_type);
    let why = match (known, model_type) {
        (Some(family), _) => return (family, "counted from a config.json".to_owned()),
        (None, Some(other)) => format!("its model_type {other:?} is not known"),
        (None, None) => "it has no model_type".to_owned(),
    };
    (FAMILIES[0], format!("counted from a config.json as if it were a Llama's: {why}; check its parameters"))
}

/// Names that change what is counted in ways that are not modelled, and the most of each that
/// changes nothing.
const UNMODELLED: [(&str, u64); 14] = [
    // Layers without a KV cache, or with that of another.
    ("attn_layer_period", 1),
    ("full_attention_interval", 1),
    ("attn_layer_indices", 0),
    ("hybrid_override_pattern", 0),
    ("block_types", 0),
    ("linear_attn_config", 0),
    ("num_kv_shared_layers", 0),
    ("cross_attention_layers", 0),
    // Layers of several sizes.
    ("block_configs", 0),
    // Layers with experts, or experts by other names.
    ("expert_layer_period", 1),
    ("moe_layer_freq", 1),
    ("mlp_only_layers", 0),
    ("moe_num_experts", 1),
    ("is_encoder_decoder", 0),
];

/// Refuses a model of which more would have to be known than is modelled.
fn refuse_unmodelled(config: &Config<'_>) -> Result<(), ModelError> {
    const INSTEAD: &str = "what it says is not modelled; write a TOML file with layers, kv_elements, parameters and active_parameters";
    // Sliding windows are taken for whole contexts.
    const ATTENTION: [&str; 4] = ["attention", "full_attention", "sliding_attention", "chunked_attention"];
    let is_none = |value: &Value, most| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64().is_some_and(|number| number <= most),
        Value::Array(values) => values.is_empty(),
        _ => false,
    };
    for (name, most) in UNMODELLED {
        if let Some(value) = config.text.get(name).filter(|value| !is_none(value, most)) {
            // Lists of layers are long.
            let value = if value.is_number() { value.to_string() } else { "given".to_owned() };
            let must = if most > 0 { format!("{most} at most") } else { "absent".to_owned() };
            return Err(ModelError::field(name, &value, &format!("{must}: {INSTEAD}")));
        }
    }
    let types = match config.text.get("layer_types") {
        None | Some(Value::Null) => None,
        Some(Value::Array(types)) => Some(types),
        Some(other) => return Err(ModelError::field("layer_types", other, "a list")),
    };
    let other = types.into_iter().flatten().find(|of| !of.as_str().is_some_and(|of| ATTENTION.contains(&of)));
    let must = || format!("of {}: {INSTEAD}", ATTENTION.join(", "));
    other.map_or(Ok(()), |other| Err(ModelError::field("layer_types", other, &must())))
}

/// What a switch says, if it is there.
fn switch(name: &str, value: Option<&Value>) -> Result<Option<bool>, ModelError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(is_on)) => Ok(Some(*is_on)),
        Some(other) => Err(ModelError::field(name, other, "true or false")),
    }
}

/// Heads of KV. A Falcon of the older architecture has one, whatever else it says.
fn kv_heads(config: &Config<'_>, family: &Family, heads: f64) -> Result<f64, ModelError> {
    let is = |name, otherwise| Ok(switch(name, config.text.get(name))?.unwrap_or(otherwise));
    let names = ["num_key_value_heads", "num_kv_heads", "n_head_kv"];
    if is("multi_query", family.multi_query)? && !is("new_decoder_architecture", false)? {
        return Ok(1.0);
    }
    let kv_heads = config.or(&names, heads)?;
    let name = names.into_iter().find(|name| config.text.get(name).is_some()).unwrap_or(names[0]);
    divides(name, kv_heads, "num_attention_heads", heads, "")?;
    Ok(kv_heads)
}

/// The inner dimension of what every token reads in a layer of experts, of `expert` each. A config
/// without that leaves it out or says 0.
fn shared_inner(config: &Config<'_>, family: &Family, expert: f64) -> Result<f64, ModelError> {
    let experts = zero_or(config, "n_shared_experts")? + if family.shares_expert { 1.0 } else { 0.0 };
    Ok(expert * experts + zero_or(config, "shared_expert_intermediate_size")?)
}

/// Refuses a number of parts into which a whole cannot be divided.
fn divides(field: &str, parts: f64, whole: &str, of: f64, why: &str) -> Result<(), ModelError> {
    if of % parts == 0.0 {
        return Ok(());
    }
    Err(ModelError::field(field, &parts, &format!("a divisor of {whole}, {of}{why}")))
}

fn zero_or(config: &Config<'_>, name: &str) -> Result<f64, ModelError> {
    match config.text.get(name).and_then(Value::as_u64) {
        Some(0) => Ok(0.0),
        _ => config.or(&[name], 0.0),
    }
}

fn weight_bits(config: &Config<'_>) -> Result<f64, ModelError> {
    if let Some(quantised) = config.said("quantization_config") {
        if let Some(bits) = quantised.get("bits").filter(|bits| !bits.is_null()) {
            let must = || ModelError::field("quantization_config.bits", bits, "a number");
            let bits = bits.as_f64().ok_or_else(must)?;
            return within("quantization_config.bits", bits, 1.0..=64.0);
        }
        let method = quantised.get("quant_method").and_then(Value::as_str);
        let is = |name: &str| {
            let is_on = switch(&format!("quantization_config.{name}"), quantised.get(name))?;
            Ok::<_, ModelError>(is_on == Some(true))
        };
        return match method {
            Some("fp8" | "fbgemm_fp8") => Ok(8.0),
            Some("mxfp4") => Ok(4.25),
            Some("bitsandbytes") if is("load_in_4bit")? => Ok(4.0),
            Some("bitsandbytes") if is("load_in_8bit")? => Ok(8.0),
            Some(other) => {
                let must = "fp8, fbgemm_fp8, mxfp4 or bitsandbytes, or have bits beside it; --weight-bits says them, too";
                Err(ModelError::field("quantization_config.quant_method", other, must))
            }
            None => Err(ModelError::missing("quantization_config.bits")),
        };
    }
    let names = ["torch_dtype", "dtype"];
    let Some(value) = names.iter().find_map(|name| config.said(name)) else { return Ok(16.0) };
    match value.as_str() {
        Some("float32" | "fp32") => Ok(32.0),
        Some("bfloat16" | "float16" | "bf16" | "fp16") => Ok(16.0),
        Some(name) if name.starts_with("float8") => Ok(8.0),
        _ => Err(ModelError::field("torch_dtype", value, "float32, bfloat16, float16 or float8")),
    }
}
