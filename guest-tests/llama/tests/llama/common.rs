//! What several tests need: models in plain vectors.

use std::{collections::HashMap, convert::Infallible, path::PathBuf};

use lamina_llama::{Config, Memory, Tokenizer, Weight, Weights};

/// Weights as rows of numbers, nothing in between.
#[derive(Clone)]
pub(crate) struct Rows {
    pub(crate) config: Config,
    pub(crate) tensors: Vec<Vec<Vec<f32>>>,
}

impl Weights for Rows {
    type Error = Infallible;

    fn read(&self, weight: Weight, first: usize, out: &mut [f32]) -> Result<(), Infallible> {
        let rows = &self.tensors[weight.index(&self.config)];
        for (row, out) in rows[first / rows[0].len()..].iter().zip(out.chunks_exact_mut(rows[0].len())) {
            out.copy_from_slice(row);
        }
        Ok(())
    }
}

/// A model's tensors as bytes.
pub(crate) struct Bytes(pub(crate) Vec<Vec<u8>>);

impl Memory for &Bytes {
    type Error = Infallible;

    fn load(&self, index: usize, offset: usize, into: &mut [u8]) -> Result<(), Infallible> {
        into.copy_from_slice(&self.0[index][offset..offset + into.len()]);
        Ok(())
    }
}

/// A safetensors file whose tensors are all bf16.
pub(crate) struct Checkpoint {
    header: serde_json::Value,
    data: Vec<u8>,
}

pub(crate) fn bundled(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models").join(name);
    std::fs::read(path).unwrap()
}

impl Checkpoint {
    pub(crate) fn bundled(name: &str) -> Self {
        Self::of(&bundled(name))
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        let header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        Self { header, data: bytes[8 + length..].to_vec() }
    }

    pub(crate) fn tensor(&self, name: &str) -> &[u8] {
        let offset = |end| {
            let offset = self.header[name]["data_offsets"][end].as_u64();
            usize::try_from(offset.unwrap_or_else(|| panic!("no tensor {name}"))).unwrap()
        };
        assert_eq!(self.header[name]["dtype"], "BF16");
        &self.data[offset(0)..offset(1)]
    }

    pub(crate) fn numbers(&self, name: &str) -> Vec<f32> {
        let pairs = self.tensor(name).chunks_exact(2);
        pairs.map(|pair| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16)).collect()
    }

    pub(crate) fn config(&self) -> Config {
        Config::from_json(self.header["__metadata__"]["config"].as_str().unwrap()).unwrap()
    }
}

/// The bundled model: shape, tensors, tokenizer.
pub(crate) fn stories() -> (Config, Bytes, Tokenizer) {
    model(&Checkpoint::bundled("stories260K-bf16.safetensors"))
}

/// A model with the bundled vocabulary: shape, tensors, tokenizer.
pub(crate) fn model(checkpoint: &Checkpoint) -> (Config, Bytes, Tokenizer) {
    let config = checkpoint.config();
    let tensors = Weight::all(&config).into_iter().map(|weight| {
        let (rows, columns) = weight.shape(&config);
        let bytes = checkpoint.tensor(&weight.name()).to_vec();
        assert_eq!(bytes.len(), 2 * rows * columns);
        bytes
    });
    let bytes = Bytes(tensors.collect());
    (config, bytes, Tokenizer::parse(&bundled("tok512.bin"), config.vocab_size).unwrap())
}

/// Numbers from −1 to 1 that a seed decides.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = i16::from_ne_bytes([(self.0 >> 48).to_le_bytes()[0], (self.0 >> 56).to_le_bytes()[0]]);
        f32::from(bits) / 32768.0
    }

    pub(crate) fn model(&mut self, config: &Config) -> Rows {
        let tensor = |weight: Weight| {
            let (rows, columns) = weight.shape(config);
            (0..rows).map(|_| (0..columns).map(|_| self.next()).collect()).collect()
        };
        Rows { config: *config, tensors: Weight::all(config).into_iter().map(tensor).collect() }
    }
}

/// Counts how often each thing occurs.
pub(crate) fn count<T: std::hash::Hash + Eq>(things: impl IntoIterator<Item = T>) -> HashMap<T, usize> {
    let mut counts = HashMap::new();
    for thing in things {
        *counts.entry(thing).or_default() += 1;
    }
    counts
}
