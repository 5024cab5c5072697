//! A GGUF file with a model of noise, of `SmolLM2`'s architecture and kinds of tensors.

/// The file.
pub(crate) fn gguf() -> Vec<u8> {
    Tiny::default().file()
}

/// What the file says.
pub(crate) struct Tiny {
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32)>,
    /// Where a tensor is said to begin, if not where it does.
    begins: Vec<(String, u64)>,
}

/// Layers, channels, those inside a feed-forward block, heads, heads of K and V.
pub(crate) const SHAPE: [u32; 5] = [2, 64, 96, 4, 2];
/// Pairs of the vocabulary.
pub(crate) const PAIRS: [&str; 6] = ["h e", "t he", "Ġ the", "Ġ a", "l l", "Ġthe Ġa"];
/// Tokens that are no text.
pub(crate) const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

impl Default for Tiny {
    fn default() -> Self {
        let [layers, dim, hidden, heads, kv_heads] = SHAPE;
        let mut tiny = Self { values: Vec::new(), tensors: Vec::new(), begins: Vec::new() };
        tiny.set("general.architecture", text("llama"));
        tiny.set("general.name", text("a tiny model of noise"));
        for (key, value) in [
            ("block_count", layers),
            ("embedding_length", dim),
            ("feed_forward_length", hidden),
            ("attention.head_count", heads),
            ("attention.head_count_kv", kv_heads),
            ("context_length", 128),
            ("rope.dimension_count", dim / heads),
        ] {
            tiny.set(&format!("llama.{key}"), number(value));
        }
        tiny.set("llama.rope.freq_base", float(100_000.0));
        tiny.set("llama.attention.layer_norm_rms_epsilon", float(1e-5));
        tiny.set("tokenizer.ggml.model", text("gpt2"));
        tiny.set("tokenizer.ggml.pre", text("smollm"));
        let bytes = (0..=u8::MAX).map(|byte| character(byte).to_string());
        let joined = PAIRS.iter().map(|pair| pair.replace(' ', ""));
        let tokens: Vec<String> =
            SPECIAL.iter().map(ToString::to_string).chain(bytes).chain(joined).collect();
        let kinds = (0..tokens.len()).map(|token| if token < SPECIAL.len() { 3_u32 } else { 1 });
        tiny.set("tokenizer.ggml.token_type", list(5, kinds.map(|kind| kind.to_le_bytes().to_vec())));
        tiny.set("tokenizer.ggml.tokens", list(8, tokens.iter().map(|token| spelled(token))));
        tiny.set("tokenizer.ggml.merges", list(8, PAIRS.iter().map(|pair| spelled(pair))));
        tiny.set("tokenizer.ggml.add_bos_token", [&7_u32.to_le_bytes()[..], &[0]].concat());
        tiny.set("tokenizer.ggml.bos_token_id", number(1));
        tiny.set("tokenizer.ggml.eos_token_id", number(2));

        let (dim, hidden, kv_dim) = (u64::from(dim), u64::from(hidden), u64::from(dim / heads * kv_heads));
        tiny.add("token_embd.weight", &[dim, tokens.len() as u64], Q8_0);
        for layer in 0..layers {
            for (part, shape) in [
                ("attn_norm", &[dim][..]),
                ("ffn_norm", &[dim]),
                ("attn_q", &[dim, dim]),
                ("attn_k", &[dim, kv_dim]),
                ("attn_v", &[dim, kv_dim]),
                ("attn_output", &[dim, dim]),
                ("ffn_gate", &[dim, hidden]),
                ("ffn_up", &[dim, hidden]),
                ("ffn_down", &[hidden, dim]),
            ] {
                let kind = if shape.len() == 1 { F32 } else { Q4_1 };
                tiny.add(&format!("blk.{layer}.{part}.weight"), shape, kind);
            }
        }
        tiny.add("output_norm.weight", &[dim], F32);
        tiny
    }
}

const F32: u32 = 0;
const Q4_1: u32 = 3;
const Q8_0: u32 = 8;

impl Tiny {
    /// Says `value` of `key`, whatever it said before.
    pub(crate) fn set(&mut self, key: &str, value: Vec<u8>) {
        self.drop_key(key);
        self.values.push((key.to_owned(), value));
    }

    /// Says all of `key` and of the tensor `name` once more.
    pub(crate) fn repeat(&mut self, key: &str, name: &str) {
        let (values, tensors) = (self.values.clone(), self.tensors.clone());
        self.values.extend(values.into_iter().filter(|(other, _)| other == key));
        self.tensors.extend(tensors.into_iter().filter(|(other, ..)| other == name));
    }

    /// Says that the tensor `name` begins at byte `at`.
    pub(crate) fn place(&mut self, name: &str, at: u64) {
        self.begins.push((name.to_owned(), at));
    }

    /// Says nothing of `key`.
    pub(crate) fn drop_key(&mut self, key: &str) {
        self.values.retain(|(other, _)| other != key);
    }

    /// Has a tensor of this shape, innermost dimension first, and only this one of its name.
    pub(crate) fn add(&mut self, name: &str, shape: &[u64], kind: u32) {
        self.drop_tensor(name);
        self.tensors.push((name.to_owned(), shape.to_vec(), kind));
    }

    /// Has no tensor of this name.
    pub(crate) fn drop_tensor(&mut self, name: &str) {
        self.tensors.retain(|(other, ..)| other != name);
    }

    pub(crate) fn file(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            file.extend(spelled(key));
            file.extend(value);
        }
        let (mut data, mut state) = (Vec::new(), 1_u64);
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state.to_be_bytes()[0]
        };
        for (name, shape, kind) in &self.tensors {
            file.extend(spelled(name));
            file.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
            file.extend(shape.iter().flat_map(|n| n.to_le_bytes()));
            file.extend(kind.to_le_bytes());
            let said = self.begins.iter().find(|(other, _)| other == name).map(|(_, at)| *at);
            file.extend(said.unwrap_or(data.len() as u64).to_le_bytes());
            // A shape that cannot be has no bytes.
            let elements = shape.iter().try_fold(1, |all: u64, next| all.checked_mul(*next)).unwrap_or(0);
            for _ in 0..elements.div_ceil(32) {
                match *kind {
                    // From 3/4 to 5/4.
                    F32 => (0..32).for_each(|_| {
                        data.extend((0.75 + f32::from(noise()) / 512.0).to_le_bytes());
                    }),
                    // 1/32 · q − 1/4.
                    Q4_1 => {
                        data.extend([0x00, 0x28, 0x00, 0xb4]);
                        data.extend((0..16).map(|_| noise()));
                    }
                    // 1/128 · q.
                    _ => {
                        data.extend([0x00, 0x20]);
                        data.extend((0..32).map(|_| noise()));
                    }
                }
            }
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }
}

/// The character that stands for a byte, written out another way than the decoder has it.
fn character(byte: u8) -> char {
    let code = match byte {
        0..=32 => 256 + u32::from(byte),
        127..=160 => 256 + 33 + u32::from(byte - 127),
        173 => 256 + 33 + 34,
        _ => u32::from(byte),
    };
    char::from_u32(code).unwrap()
}

fn spelled(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    [&8_u32.to_le_bytes()[..], &spelled(text)].concat()
}

pub(crate) fn number(number: u32) -> Vec<u8> {
    [4_u32.to_le_bytes(), number.to_le_bytes()].concat()
}

pub(crate) fn float(number: f32) -> Vec<u8> {
    [6_u32.to_le_bytes(), number.to_le_bytes()].concat()
}

pub(crate) fn double(number: f64) -> Vec<u8> {
    [&12_u32.to_le_bytes()[..], &number.to_le_bytes()].concat()
}

pub(crate) fn negative(number: i32) -> Vec<u8> {
    [5_u32.to_le_bytes(), number.to_le_bytes()].concat()
}

pub(crate) fn list(kind: u32, values: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut list = [9_u32.to_le_bytes(), kind.to_le_bytes()].concat();
    let values: Vec<_> = values.into_iter().collect();
    list.extend((values.len() as u64).to_le_bytes());
    list.extend(values.concat());
    list
}
