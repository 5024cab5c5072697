//! The bundled model does what it is known to do.

use crate::common::{Checkpoint, stories};
use lamina_llama::{BOS, Decoder, Element, KvCache as _, PlainCache, Sampler, Viewed, judge, write};

/// What llama2.c documents for this model (`doc/stories260K.md`), greedily: the first 200 tokens
/// and a little more. That run has its weights in float32; rounding them and the cache to bfloat16
/// changes nothing so far in.
const KNOWN: &str = r#"Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"#;

#[test]
fn the_greedy_story_is_the_one_that_is_known() {
    let (config, bytes, tokenizer) = stories();
    let weights = Viewed::new(config, &bytes, Element::of("full").unwrap());
    let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
    let story =
        write(&mut decoder, &weights, &mut cache, &[BOS], 220, tokenizer.ends(), &mut Sampler::new(0.0, 0))
            .unwrap();
    assert_eq!(story.tokens.len(), 220);
    let text = tokenizer.decode(&story.tokens);
    assert!(text.starts_with(KNOWN), "{text}");
    // A step reads every weight, and the embedding's row of the token once more.
    assert_eq!(weights.loaded(), 219 * (bytes.0.iter().map(Vec::len).sum::<usize>() as u64 + 128));
}

/// The bundled KV cache was computed by another program from the float32 weights. Its first
/// sequence is greedy; which tokens it has is told by V in layer 0, which depends on the token
/// alone.
#[test]
fn keys_and_values_are_those_that_another_program_computed() {
    let (config, bytes, tokenizer) = stories();
    let known = Checkpoint::bundled("stories260K-kv-bf16.safetensors");
    let rows = |layer: usize, cached: &str| {
        let numbers = known.numbers(&format!("layers.{layer}.seq.0.{cached}"));
        numbers.chunks_exact(config.kv_dim()).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let run = |tokens: &[usize]| {
        let weights = Viewed::new(config, &bytes, Element::of("full").unwrap());
        let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
        for &token in tokens {
            decoder.step(&weights, &mut cache, token).unwrap();
        }
        (0..config.n_layers)
            .map(|layer| {
                let mut history = lamina_llama::History::default();
                cache.read(layer, &[], &mut history).unwrap();
                history
            })
            .collect::<Vec<_>>()
    };
    let value_of: Vec<Vec<f32>> =
        (0..config.vocab_size).map(|token| run(&[token])[0].values.clone()).collect();
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
    let nearest = |row: &Vec<f32>| {
        (0..config.vocab_size)
            .min_by(|a, b| distance(row, &value_of[*a]).total_cmp(&distance(row, &value_of[*b])))
            .unwrap()
    };
    let tokens: Vec<usize> = rows(0, "v").iter().take(300).map(nearest).collect();
    assert!(tokenizer.decode(&tokens).starts_with(KNOWN));
    assert!(crate::common::count(tokens.iter()).len() > 60, "a text has many tokens");

    let ours = run(&tokens);
    for (layer, history) in ours.iter().enumerate() {
        for (cached, ours) in [("k", &history.keys), ("v", &history.values)] {
            let known = rows(layer, cached)[..300].concat();
            let relative = (distance(ours, &known) / distance(&known, &vec![0.0; known.len()])).sqrt();
            // Rounding the weights to bfloat16 is all that differs.
            assert!(relative < 0.015, "layer {layer} {cached}: {relative}");
        }
    }
}

/// The two figures are those of a numpy program of some sixty lines that shares nothing with this
/// one.
#[test]
fn a_text_surprises_as_much_as_another_program_says_and_more_when_the_weights_are_coarser() {
    let (config, bytes, tokenizer) = stories();
    let text = tokenizer.encode(include_str!("../../../models/story.txt"));
    assert_eq!(text.len(), 428);
    let perplexity = |view: &str| {
        let coarse = bytes.0.iter().map(|tensor| {
            lamina_reference::view_bytes(
                lamina_reference::Format::Bf16,
                view,
                tensor,
                tensor.len() as u64 / 2,
            )
            .unwrap()
        });
        let coarse = crate::common::Bytes(coarse.collect());
        let weights = Viewed::new(config, &coarse, Element::of(view).unwrap());
        let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
        let judged = judge(&mut decoder, &weights, &mut cache, &text, 7).unwrap();
        assert_eq!(judged.predicted, text.len() - 1);
        judged.perplexity().unwrap()
    };
    let [full, e8m3, e8m1] = ["full", "e8m3", "e8m1"].map(perplexity);
    assert!((full - 2.820_592).abs() < 2e-4, "{full}");
    assert!((e8m3 - 2.991_986).abs() < 2e-4, "{e8m3}");
    assert!(e8m1 > 2.0 * e8m3, "{e8m1}");
}

#[test]
fn what_is_drawn_is_decided_by_the_seed_and_ends_where_the_model_says() {
    let (config, bytes, tokenizer) = stories();
    let story = |seed, limit| {
        let weights = Viewed::new(config, &bytes, Element::of("full").unwrap());
        let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
        let prompt = tokenizer.encode("Tom had a dog");
        let mut sampler = Sampler::new(0.8, seed);
        let story = write(&mut decoder, &weights, &mut cache, &prompt, limit, tokenizer.ends(), &mut sampler)
            .unwrap();
        assert!(story.tokens.starts_with(&prompt[..prompt.len().min(limit)]));
        assert!(!story.tokens[1..].contains(&BOS));
        story
    };
    assert_eq!(story(3, 60), story(3, 60));
    assert_ne!(story(3, 60).tokens, story(4, 60).tokens);
    assert_eq!(story(3, 2).tokens.len(), 2);
    // More than the model can take is not asked of it.
    assert!(story(3, 10_000).tokens.len() <= config.seq_len);
}
