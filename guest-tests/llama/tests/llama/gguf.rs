//! Models in GGUF files, and GPT-2's vocabularies.

use crate::{
    common::Bytes,
    tiny::{self, Tiny},
};
use lamina_llama::{
    Config, Decoder, Element, PlainCache, Sampler, Tokenizer, TokenizerError, Viewed, Vocabulary, Weight,
    gguf::{Model, name_of},
    judge,
    weights::Part,
    write,
};
use proptest::prelude::*;

fn tokenizer(model: &Model<'_>) -> Tokenizer {
    Tokenizer::parse(&serde_json::to_vec(model.vocabulary()).unwrap(), model.config().vocab_size).unwrap()
}

#[test]
fn a_model_is_what_the_file_says_in_bf16() {
    let file = tiny::gguf();
    let model = Model::read(&file).unwrap();
    let wanted = Config {
        dim: 64,
        hidden_dim: 96,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        vocab_size: 3 + 256 + 6,
        seq_len: 128,
        rope_theta: 100_000.0,
        norm_eps: 1e-5,
        experts: None,
    };
    assert_eq!((model.config(), model.name()), (wanted, "a tiny model of noise"));
    let numbers = |weight: Weight| -> Vec<f32> {
        let bytes = model.bf16(weight).unwrap();
        let (rows, columns) = weight.shape(&wanted);
        assert_eq!(bytes.len(), 2 * rows * columns);
        let mut out = vec![0.0; rows * columns];
        Element::of("full").unwrap().read(&bytes, 0, &mut out);
        out
    };
    for weight in Weight::all(&wanted) {
        let numbers = numbers(weight);
        // Matrices by steps of 1/32, the embedding by 1/128 and gains by what bf16 leaves of 1/512.
        let (step, least, greatest) = match weight {
            Weight::Embedding => (128.0, -1.0, 1.0),
            Weight::Norm | Weight::Layer(_, Part::AttentionNorm | Part::FfnNorm) => (512.0, 0.75, 1.25),
            Weight::Layer(..) | Weight::Expert(..) => (32.0, -0.25, 0.21875),
        };
        let fits = |x: &f32| (x * step).fract() == 0.0 && (least..=greatest).contains(x);
        assert!(numbers.iter().all(fits), "{weight:?}");
        assert!(numbers.iter().any(|x| x.to_bits() != numbers[0].to_bits()));
    }
}

#[test]
fn an_experts_tensor_is_none_of_a_file() {
    let file = tiny::gguf();
    let model = Model::read(&file).unwrap();
    let weight = Weight::Expert(1, 3, Part::W2);
    let why = model.bf16(weight).unwrap_err().to_string();
    assert_eq!(why, "the file has no tensor layers.1.feed_forward.experts.3.w2.weight");
    assert!(!model.is_bf16(weight) && name_of(weight).is_err());
    assert_eq!(name_of(Weight::Layer(1, Part::W2)).unwrap(), "blk.1.ffn_down.weight");
}

/// All of it together: a text is what it is whatever the number of tokens at a time.
#[test]
fn a_model_of_a_file_writes_and_judges() {
    let file = tiny::gguf();
    let model = Model::read(&file).unwrap();
    let (config, tokenizer) = (model.config(), tokenizer(&model));
    let bytes = Bytes(Weight::all(&config).into_iter().map(|weight| model.bf16(weight).unwrap()).collect());
    let weights = Viewed::new(config, &bytes, Element::of("full").unwrap());
    let text = tokenizer.encode("the bell of the all-a-ther, 123 times");
    let judged = |batch| {
        let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
        let judged = judge(&mut decoder, &weights, &mut cache, &text, batch).unwrap();
        assert_eq!(decoder.position(), text.len() - 1);
        judged
    };
    let one = judged(1);
    assert_eq!(one.predicted, text.len() - 1);
    for batch in [2, 5, 1000] {
        assert_eq!(judged(batch), one);
    }
    let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
    let mut sampler = Sampler::new(0.5, 1);
    let written =
        write(&mut decoder, &weights, &mut cache, &text, 40, tokenizer.ends(), &mut sampler).unwrap();
    assert!(written.tokens.starts_with(&text) && !written.tokens.contains(&2));
}

#[test]
fn a_vocabulary_joins_pairs_by_rank_and_keeps_special_tokens_apart() {
    let file = tiny::gguf();
    let model = Model::read(&file).unwrap();
    let tokenizer = tokenizer(&model);
    let byte = |byte: u8| 3 + usize::from(byte);
    let pair = |index: usize| 3 + 256 + index;
    assert_eq!(tokenizer.ends(), [2]);
    assert!(tokenizer.encode("").is_empty());
    assert_eq!(tokenizer.encode("the the"), [pair(1), pair(2)]);
    // " the" and " a" are two words, so the pair that would join them never does.
    assert_eq!(tokenizer.encode(" the a"), [pair(2), pair(3)]);
    assert_eq!(tokenizer.encode("lll"), [pair(4), byte(b'l')]);
    assert_eq!(
        tokenizer.encode("<|im_start|>ü<|im_end|><|im"),
        [&[1, byte(0xc3), byte(0xbc), 2][..], &b"<|im".map(byte)].concat()
    );
    assert_eq!(tokenizer.decode(&[1, pair(2), byte(0xff), 2, 9999]), " the\u{fffd}");
    let begun = Vocabulary { begin: Some(1), ..model.vocabulary().clone() };
    let begun = Tokenizer::parse(&serde_json::to_vec(&begun).unwrap(), 265).unwrap();
    assert_eq!(begun.encode("a"), [1, byte(b'a')]);
    let mut lacking = Vocabulary { unknown: Some(0), ..model.vocabulary().clone() };
    lacking.tokens[byte(4)] = "instead".to_owned();
    let lacking = Tokenizer::parse(&serde_json::to_vec(&lacking).unwrap(), 265).unwrap();
    assert_eq!(lacking.encode("a\u{4}"), [byte(b'a'), 0]);
}

#[test]
fn broken_vocabularies_are_refused() {
    let file = tiny::gguf();
    let good = Model::read(&file).unwrap().vocabulary().clone();
    let why = |change: &dyn Fn(&mut Vocabulary), count| {
        let mut bad = good.clone();
        change(&mut bad);
        Tokenizer::parse(&serde_json::to_vec(&bad).unwrap(), count).unwrap_err()
    };
    assert_eq!(why(&|_| (), 264), TokenizerError::Count { found: 265, wanted: 264 });
    assert_eq!(why(&|bad| bad.tokens[3] = "xyz".into(), 265), TokenizerError::NoByte { byte: 0 });
    let pair = |pair: &str| TokenizerError::Pair { rank: 6, pair: pair.into() };
    for bad in ["q q", "he", "he q", ""] {
        assert_eq!(why(&|file| file.pairs.push(bad.into()), 265), pair(bad));
    }
    assert_eq!(why(&|bad| bad.ends.push(265), 265), TokenizerError::NoToken { token: 265, count: 265 });
    let long = |bad: &mut Vocabulary| bad.tokens[264] = "x".repeat(5000);
    assert_eq!(why(&long, 265), TokenizerError::Length { token: 264, length: 5000 });
    let json = Tokenizer::parse(b"{\"tokens\":3}", 3).unwrap_err();
    assert!(matches!(json, TokenizerError::Json { .. }), "{json}");
}

#[test]
fn a_file_that_is_no_such_model_is_refused_by_what_is_wrong() {
    let refused = |says: &str, change: &dyn Fn(&mut Tiny)| {
        let mut bad = Tiny::default();
        change(&mut bad);
        let why = Model::read(&bad.file()).unwrap_err().to_string();
        assert!(why.contains(says), "{says}: {why}");
    };
    let set = |key: &'static str, value: Vec<u8>| move |bad: &mut Tiny| bad.set(key, value.clone());
    refused(
        "architecture is mamba; the decoder knows llama",
        &set("general.architecture", tiny::text("mamba")),
    );
    refused("no general.architecture that is a text", &|bad| bad.drop_key("general.architecture"));
    refused("rope.scaling.type is yarn", &set("llama.rope.scaling.type", tiny::text("yarn")));
    refused("tokenizer.ggml.pre is qwen2", &set("tokenizer.ggml.pre", tiny::text("qwen2")));
    refused("no llama.block_count that is a whole number", &set("llama.block_count", tiny::text("2")));
    refused("n_heads is 0", &set("llama.attention.head_count", tiny::number(0)));
    refused(
        "dimension_count is 8; the decoder knows 16",
        &set("llama.rope.dimension_count", tiny::number(8)),
    );
    refused("no tensor blk.2.attn_norm.weight", &set("llama.block_count", tiny::number(3)));
    refused("no tensor blk.1.ffn_up.weight", &|bad| bad.drop_tensor("blk.1.ffn_up.weight"));
    refused("a tensor output.weight, which", &|bad| bad.add("output.weight", &[64, 265], 8));
    refused("output_norm.weight has the shape [128]; the model's wants [64]", &|bad| {
        bad.add("output_norm.weight", &[128], 0);
    });
    // As many elements, and not at the same places.
    refused("blk.0.ffn_up.weight has the shape [64, 96]; the model's wants [96, 64]", &|bad| {
        bad.add("blk.0.ffn_up.weight", &[96, 64], 3);
    });
    refused("type 12 of GGUF is not read", &|bad| bad.add("output_norm.weight", &[256], 12));
    refused("output_norm.weight cannot have this shape: [63]", &|bad| {
        bad.add("output_norm.weight", &[63], 8);
    });
    refused("cannot have this shape", &|bad| bad.add("x", &[u64::MAX, u64::MAX], 0));
    // Whole blocks in all, and none in a row.
    refused("cannot have this shape: [16, 2]", &|bad| bad.add("x", &[16, 2], 8));
    // No elements, whichever dimension says so.
    for shape in [[1 << 63, 1 << 63, 0], [0, 1 << 63, 1 << 63]] {
        refused("a tensor x, which", &|bad| bad.add("x", &shape, 0));
    }
}

#[test]
fn a_model_that_the_decoder_would_compute_otherwise_is_refused_by_the_key() {
    let refused = |key: &str, value: Vec<u8>, says: &str| {
        let mut bad = Tiny::default();
        bad.set(key, value);
        let why = Model::read(&bad.file()).unwrap_err().to_string();
        assert_eq!(why, says);
    };
    let unknown = |key: &str, value: Vec<u8>, says: &str| refused(key, value, &format!("{key} is {says}"));
    unknown("llama.rope.scaling.factor", tiny::float(8.0), "8; the decoder knows 1");
    unknown("llama.rope.scale_linear", tiny::number(2), "2; the decoder knows 1");
    unknown("llama.logit_scale", tiny::float(0.25), "0.25; the decoder knows 1");
    unknown("llama.attention.sliding_window", tiny::number(64), "64; the decoder knows 0, or 128 and more");
    unknown("llama.attention.key_length", tiny::number(32), "32; the decoder knows 16, the size of a head");
    unknown("llama.attention.value_length", tiny::number(8), "8; the decoder knows 16, the size of a head");
    unknown("llama.expert_count", tiny::number(8), "8; the decoder knows 0");
    unknown("llama.expert_used_count", tiny::number(2), "2; the decoder knows 0");
    let words = "264; the decoder knows 265, the tokens of the vocabulary";
    unknown("llama.vocab_size", tiny::number(264), words);
    let other = "the metadata has llama.embedding_scale, which the decoder does not know";
    refused("llama.embedding_scale", tiny::float(12.0), other);

    // A default stands for what is not said, not for what is said in another way.
    let mistyped = |key: &str, value: Vec<u8>, what: &str| {
        refused(key, value, &format!("the metadata has no {key} that is {what}"));
    };
    let list = tiny::list(4, [2_u32, 2].map(|heads| heads.to_le_bytes().to_vec()));
    mistyped("llama.attention.head_count_kv", list, "a whole number");
    mistyped("llama.attention.head_count_kv", tiny::text("2"), "a whole number");
    mistyped("llama.rope.freq_base", tiny::text("10000"), "a number");
    mistyped("llama.rope.dimension_count", tiny::float(16.0), "a whole number");
    mistyped("llama.rope.scaling.type", tiny::number(0), "a text");
    mistyped("llama.block_count", tiny::negative(-2), "a whole number");
    mistyped("general.name", tiny::number(1), "a text");
    mistyped("tokenizer.ggml.add_bos_token", tiny::text("false"), "a truth value");
    mistyped("tokenizer.ggml.eos_token_id", tiny::text("2"), "a whole number");
    refused(
        "llama.rope.freq_base",
        tiny::negative(-1),
        "the model's rope_theta is -1; it is a number above 0",
    );
    let wide = "the model's norm_eps is inf; it is a number above 0";
    refused("llama.attention.layer_norm_rms_epsilon", tiny::double(1e300), wide);
}

#[test]
fn keys_that_say_what_the_decoder_does_change_nothing() {
    let file = tiny::gguf();
    let wanted = Model::read(&file).unwrap().config();
    for (key, value) in [
        ("llama.rope.scaling.type", tiny::text("none")),
        ("llama.rope.scaling.factor", tiny::float(1.0)),
        ("llama.attention.sliding_window", tiny::number(0)),
        ("llama.attention.sliding_window", tiny::number(4096)),
        ("llama.attention.key_length", tiny::number(16)),
        ("llama.expert_count", tiny::number(0)),
        ("llama.vocab_size", tiny::number(265)),
        ("llama.tensor_data_layout", tiny::text("Meta AI original pth")),
        ("llama.attention.layer_norm_rms_epsilon", tiny::double(1e-5)),
        ("llama.rope.freq_base", tiny::double(100_000.0)),
        ("llama.rope.freq_base", tiny::number(100_000)),
        ("general.alignment", tiny::number(32)),
    ] {
        let mut good = Tiny::default();
        good.set(key, value);
        assert_eq!(Model::read(&good.file()).unwrap().config(), wanted, "{key}");
    }
    let mut good = Tiny::default();
    good.set("llama.rope.freq_base", tiny::number(500_000));
    let theta = Model::read(&good.file()).unwrap().config().rope_theta;
    assert_eq!(theta.to_bits(), 500_000.0_f32.to_bits());
}

#[test]
fn a_file_that_contradicts_itself_is_refused_by_name() {
    let refused = |says: &str, change: &dyn Fn(&mut Tiny)| {
        let mut bad = Tiny::default();
        change(&mut bad);
        assert_eq!(Model::read(&bad.file()).unwrap_err().to_string(), says);
    };
    refused("the file has output_norm.weight twice", &|bad| bad.repeat("", "output_norm.weight"));
    refused("the file has llama.block_count twice", &|bad| bad.repeat("llama.block_count", ""));
    let unaligned = "tensor blk.0.attn_norm.weight begins at byte 33 of the tensors, no multiple of 32";
    refused(unaligned, &|bad| bad.place("blk.0.attn_norm.weight", 33));
    refused("tensors blk.0.attn_norm.weight and token_embd.weight overlap", &|bad| {
        bad.place("blk.0.attn_norm.weight", 32);
    });
    // One without a byte shares none.
    refused("the file has a tensor empty.weight, which the decoder does not use", &|bad| {
        bad.add("empty.weight", &[0, 2], 0);
        bad.place("empty.weight", 32);
    });
    let alignment = |value: Vec<u8>, says: &str| {
        refused(&format!("general.alignment is {says}; it is a power of two"), &|bad| {
            bad.set("general.alignment", value.clone());
        });
    };
    alignment(tiny::number(0), "0");
    alignment(tiny::number(3), "3");
    alignment(tiny::text("32"), "\"32\"");
    let kinds = |count: usize| tiny::list(5, vec![1_u32.to_le_bytes().to_vec(); count]);
    for count in [0, 264] {
        let says = format!("tokenizer.ggml.token_type has {count} entries; there are 265 tokens");
        refused(&says, &|bad| bad.set("tokenizer.ggml.token_type", kinds(count)));
    }
    refused("the metadata has no tokenizer.ggml.token_type that is a list of whole numbers", &|bad| {
        let floats = tiny::list(6, vec![1_f32.to_le_bytes().to_vec(); 265]);
        bad.set("tokenizer.ggml.token_type", floats);
    });
}

proptest! {
    #[test]
    fn every_text_comes_back(text in any::<String>()) {
        let file = tiny::gguf();
        let tokenizer = tokenizer(&Model::read(&file).unwrap());
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text)), text);
    }

    #[test]
    fn no_bytes_break_the_reader(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end: prop::sample::Index,
        cut: bool,
    ) {
        let mut file = tiny::gguf();
        for (at, byte) in changes {
            // Most of what can be wrong stands at the beginning.
            let at = at.index(4096.min(file.len()));
            file[at] = byte;
        }
        file.truncate(if cut { end.index(file.len()) } else { file.len() });
        if let Ok(model) = Model::read(&file) {
            for weight in Weight::all(&model.config()) {
                let _ = model.bf16(weight);
            }
        }
    }
}
