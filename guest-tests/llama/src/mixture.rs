//! A mixture of experts, **made** of a model that has none, for want of a trained one that is
//! small.
//!
//! Each expert is the dense block with its weights off by up to an eighth of themselves, and the
//! routers are noise: so the mixture says about what the dense model says, and which expert a token
//! uses means nothing. What it is good for is that bytes of experts are moved, or not, as in a
//! model that was trained. Everything follows from the dense model.
//!
//! `cargo run --locked --release -p lamina-llama --example mixture -- DENSE OUT` makes one of four
//! experts, of which a token uses two.

use serde_json::{Value, json};

use crate::{
    config::{Config, ConfigError},
    element::{from_bf16, to_bf16},
    experts::Experts,
    weights::{Part, Weight},
};

/// How far a weight of an expert is from the dense one's, at most, beside it.
const DEVIATION: f32 = 0.125;
/// The largest weight of a router: logits of a token differ by about one then.
const ROUTER: f32 = 0.25;

/// Why no mixture can be made of a file.
#[derive(Debug, thiserror::Error)]
pub enum MixtureError {
    /// No safetensors file.
    #[error("it is no safetensors file: {0}")]
    File(String),
    /// No shape, or one that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A model of experts.
    #[error("it is a mixture of {0} experts already")]
    Mixture(usize),
    /// A tensor that is missing, or has other bytes than bf16 of its shape.
    #[error("its tensor {name} has not the {wanted} bytes of bf16 that the model's shape wants")]
    Tensor {
        /// The tensor.
        name: String,
        /// What it should have.
        wanted: usize,
    },
}

/// The mixture of a safetensors file of bf16 with llama2.c's names, as such a file. Its metadata
/// says `"made": "mixture"`.
///
/// # Errors
/// [`MixtureError`].
pub fn of_safetensors(dense: &[u8], experts: Experts) -> Result<Vec<u8>, MixtureError> {
    let wrong = |why: &str| MixtureError::File(why.to_owned());
    let (length, rest) = dense.split_first_chunk().ok_or_else(|| wrong("it has no length"))?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let (header, data) = rest.split_at_checked(length).ok_or_else(|| wrong("its header is cut off"))?;
    let header: Value = serde_json::from_slice(header).map_err(|why| MixtureError::File(why.to_string()))?;
    let shape = header["__metadata__"]["config"].as_str().ok_or_else(|| wrong("it has no `config`"))?;
    let config = Config::from_json(shape)?;
    if let Some(Experts { count, .. }) = config.experts {
        return Err(MixtureError::Mixture(count));
    }
    let mixture = Config { experts: Some(experts), ..config }.checked()?;
    let of_dense = |weight: Weight| {
        let (rows, columns) = weight.shape(&config);
        let (name, wanted) = (weight.name(), 2 * rows * columns);
        let offset =
            |end| header[&name]["data_offsets"][end].as_u64().and_then(|at| usize::try_from(at).ok());
        let bytes = offset(0).zip(offset(1)).and_then(|(from, to)| data.get(from..to));
        let bytes = bytes.filter(|bytes| bytes.len() == wanted && header[&name]["dtype"] == "BF16");
        bytes.ok_or(MixtureError::Tensor { name, wanted })
    };

    let shape = serde_json::to_string(&mixture).map_err(ConfigError::from)?;
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "config": shape, "made": "mixture" }));
    let mut data = Vec::new();
    for weight in Weight::all(&mixture) {
        let begin = data.len();
        data.extend(tensor(&mixture, weight, of_dense)?);
        let (rows, columns) = weight.shape(&mixture);
        let shape = if weight.is_gain() { vec![columns] } else { vec![rows, columns] };
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, data.len()] });
        entries.insert(weight.name(), entry);
    }
    let mut header = Value::Object(entries).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    Ok([&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat())
}

/// A tensor of the mixture, bf16 in little-endian order.
fn tensor<'d>(
    mixture: &Config,
    weight: Weight,
    dense: impl Fn(Weight) -> Result<&'d [u8], MixtureError>,
) -> Result<Vec<u8>, MixtureError> {
    let mut noise = Noise::of(mixture, weight);
    let bytes = |x: f32| to_bf16(x).to_le_bytes();
    match weight {
        Weight::Layer(_, Part::Router) => {
            let (rows, columns) = weight.shape(mixture);
            Ok((0..rows * columns).flat_map(|_| bytes(ROUTER * noise.next())).collect())
        }
        Weight::Expert(layer, _, part) => {
            let words = dense(Weight::Layer(layer, part))?.as_chunks::<2>().0.iter();
            let numbers = words.map(|word| from_bf16(u16::from_le_bytes(*word)));
            Ok(numbers.flat_map(|x| bytes(x * (1.0 + DEVIATION * noise.next()))).collect())
        }
        shared => Ok(dense(shared)?.to_vec()),
    }
}

/// Numbers from −1 to below 1, by xorshift64*, which a tensor's place decides.
struct Noise(u64);

impl Noise {
    fn of(config: &Config, weight: Weight) -> Self {
        let mut noise = Self((weight.index(config) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // What places that are near have in common is gone after some steps.
        for _ in 0..8 {
            noise.next();
        }
        noise
    }

    fn next(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let [.., low, high] = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
        f32::from(i16::from_le_bytes([low, high])) / 32768.0
    }
}
