//! The forward pass against a slow one that is written as the papers have it: the whole sequence at
//! once, in double precision.

use crate::common::{Noise, Rows};
use lamina_llama::{
    Config, Decoder, Experts, History, KvCache, PlainCache, Route, Weight, element, weights::Part,
};
use proptest::prelude::*;

type Matrix = Vec<Vec<f64>>;

/// A count as a number.
fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap())
}

fn times(matrix: &[Vec<f32>], x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
}

fn norm(epsilon: f64, gain: &[Vec<f32>], x: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / number(x.len());
    x.iter().zip(&gain[0]).map(|(x, gain)| x / (mean + epsilon).sqrt() * f64::from(*gain)).collect()
}

/// Rotates pairs as complex numbers: (a + bi) · e^(iθ).
fn rope(x: &mut [f64], base: f64, head_size: usize, position: usize) {
    for (channel, pair) in x.chunks_exact_mut(2).enumerate() {
        let within = (2 * channel) % head_size;
        let theta = number(position) * base.powf(-number(within) / number(head_size));
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * theta.cos() - b * theta.sin();
        pair[1] = a * theta.sin() + b * theta.cos();
    }
}

/// How far single precision may lead from double in these models, beside the largest number of its
/// kind. Of a million of them none led as far, some led past a tenth of it: their norms may divide
/// by numbers near zero.
const SINGLE: f64 = 1e-3;

fn largest<'a>(x: impl IntoIterator<Item = &'a f64>) -> f64 {
    x.into_iter().fold(1.0, |most, x| most.max(x.abs()))
}

/// What a cache kept of `x`, each number one of the bf16 nearest to it. What lies halfway between
/// two of them is rounded to either by a hair's breadth, so a pass that rounded anew would not tell
/// a mistake from chance.
fn kept(x: &[f64], kept: &[f32]) -> Result<Vec<f64>, TestCaseError> {
    let slack = SINGLE * largest(x);
    let number = |(x, kept): (&f64, &f32)| {
        // Eight significant bits, half of the last one.
        let half = if *x == 0.0 { 0.0 } else { 2.0_f64.powf(x.abs().log2().floor() - 8.0) };
        prop_assert_eq!(kept.to_bits() & 0xffff, 0);
        prop_assert!((f64::from(*kept) - x).abs() <= half + slack, "{kept} was kept of {x}");
        Ok(f64::from(*kept))
    };
    x.iter().zip(kept).map(number).collect()
}

/// The logits at every position, causal attention over the whole matrix, with each layer's K and V
/// as `caches` kept them, and the experts that `routes` says were used.
fn slow<'m>(
    config: &Config,
    model: &'m Rows,
    tokens: &[usize],
    caches: &[History],
    routes: &[Route],
) -> Result<Matrix, TestCaseError> {
    let tensor = |weight: Weight| -> &'m [Vec<f32>] { &model.tensors[weight.index(config)] };
    let size = config.head_size();
    let (base, epsilon) = (f64::from(config.rope_theta), f64::from(config.norm_eps));
    let norm = |gain: &[Vec<f32>], x: &[f64]| norm(epsilon, gain, x);
    let embed = |token: &usize| tensor(Weight::Embedding)[*token].iter().map(|x| f64::from(*x)).collect();
    let mut stream: Matrix = tokens.iter().map(embed).collect();
    for (layer, cache) in caches.iter().enumerate() {
        let part = |part| tensor(Weight::Layer(layer, part));
        let normed: Matrix = stream.iter().map(|x| norm(part(Part::AttentionNorm), x)).collect();
        let project = |matrix: Part| normed.iter().map(|x| times(part(matrix), x)).collect::<Matrix>();
        let (mut q, mut k, mut v) = (project(Part::Wq), project(Part::Wk), project(Part::Wv));
        for position in 0..tokens.len() {
            rope(&mut q[position], base, size, position);
            rope(&mut k[position], base, size, position);
            let row = position * config.kv_dim()..(position + 1) * config.kv_dim();
            k[position] = kept(&k[position], &cache.keys[row.clone()])?;
            v[position] = kept(&v[position], &cache.values[row])?;
        }
        for position in 0..tokens.len() {
            let mut attended = Vec::new();
            for head in 0..config.n_heads {
                let kv = head * config.n_kv_heads / config.n_heads;
                let product = |other: usize| -> f64 {
                    (0..size).map(|c| q[position][head * size + c] * k[other][kv * size + c]).sum()
                };
                let weights: Vec<f64> =
                    (0..=position).map(|other| (product(other) / number(size).sqrt()).exp()).collect();
                let sum: f64 = weights.iter().sum();
                attended.extend((0..size).map(|c| {
                    (0..=position).map(|other| weights[other] / sum * v[other][kv * size + c]).sum::<f64>()
                }));
            }
            for (x, y) in stream[position].iter_mut().zip(times(part(Part::Wo), &attended)) {
                *x += y;
            }
            let normed = norm(part(Part::FfnNorm), &stream[position]);
            let block = |part: &dyn Fn(Part) -> &'m [Vec<f32>]| -> Vec<f64> {
                let (gate, up) = (times(part(Part::W1), &normed), times(part(Part::W3), &normed));
                let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                times(part(Part::W2), &inner)
            };
            let given = match config.experts {
                None => block(&part),
                Some(Experts { count, .. }) => {
                    let logits = times(part(Part::Router), &normed);
                    let here =
                        routes.iter().filter(|route| (route.layer, route.position) == (layer, position));
                    let used: Vec<usize> = here.map(|route| route.expert).collect();
                    let least = used.iter().map(|expert| logits[*expert]).fold(f64::INFINITY, f64::min);
                    // Which of two that are nearly equal is used is single precision's choice.
                    let slack = SINGLE * largest(&logits);
                    for expert in (0..count).filter(|expert| !used.contains(expert)) {
                        prop_assert!(logits[expert] <= least + slack, "{expert} of {logits:?}, not {used:?}");
                    }
                    let sum: f64 = used.iter().map(|expert| (logits[*expert] - least).exp()).sum();
                    let mut mixed = vec![0.0; config.dim];
                    for expert in used {
                        let own = block(&|part| tensor(Weight::Expert(layer, expert, part)));
                        let share = (logits[expert] - least).exp() / sum;
                        mixed.iter_mut().zip(own).for_each(|(mixed, own)| *mixed += share * own);
                    }
                    mixed
                }
            };
            for (x, y) in stream[position].iter_mut().zip(given) {
                *x += y;
            }
        }
    }
    Ok(stream.iter().map(|x| times(tensor(Weight::Embedding), &norm(tensor(Weight::Norm), x))).collect())
}

fn shapes() -> impl Strategy<Value = Config> {
    let experts = prop::option::of((1_usize..5, 1_usize..5));
    (1_usize..4, 1_usize..3, 1_usize..4, 1_usize..4, 1_usize..20, any::<bool>(), experts).prop_map(
        |(pairs, kv_heads, shared, n_layers, hidden_dim, other, experts)| Config {
            dim: 2 * pairs * kv_heads * shared,
            hidden_dim,
            n_layers,
            n_heads: kv_heads * shared,
            n_kv_heads: kv_heads,
            vocab_size: 11,
            seq_len: 16,
            rope_theta: if other { 500.0 } else { 10_000.0 },
            norm_eps: if other { 1e-2 } else { 1e-5 },
            experts: experts.map(|(count, used)| Experts { count, used: used.min(count) }),
        },
    )
}

proptest! {
    #[test]
    fn every_logit_is_what_the_slow_pass_says(
        config in shapes(),
        seed: u64,
        tokens in prop::collection::vec(0_usize..11, 1..12),
    ) {
        let config = config.checked().unwrap();
        let model = Noise(seed).model(&config);
        let (mut decoder, mut cache) = (Decoder::new(config), PlainCache::new(&config));
        let (mut logits, mut routes) = (Matrix::new(), Vec::new());
        for token in &tokens {
            let step = decoder.step(&model, &mut cache, *token).unwrap();
            logits.push(step.iter().map(|logit| f64::from(*logit)).collect());
            routes.extend_from_slice(decoder.routes());
        }
        let used = config.experts.map_or(0, |experts| experts.used);
        prop_assert_eq!(routes.len(), tokens.len() * config.n_layers * used);
        // Tokens that go through together use the same experts, and say the same to the bit.
        let (mut together, mut other_cache) = (Decoder::new(config), PlainCache::new(&config));
        let said = together.steps(&model, &mut other_cache, &tokens).unwrap();
        prop_assert!(said.iter().map(|logit| f64::from(*logit)).eq(logits.iter().flatten().copied()));
        let by_place = |routes: &[Route]| {
            let mut routes = routes.to_vec();
            routes.sort_by_key(|route| (route.layer, route.position, route.expert));
            routes
        };
        prop_assert_eq!(by_place(together.routes()), by_place(&routes));
        let mut caches = vec![History::default(); config.n_layers];
        for (layer, history) in caches.iter_mut().enumerate() {
            cache.read(layer, &[], history).unwrap();
            prop_assert_eq!(history.keys.len(), tokens.len() * config.kv_dim());
            prop_assert_eq!(history.values.len(), tokens.len() * config.kv_dim());
        }
        let want = slow(&config, &model, &tokens, &caches, &routes)?;
        for (position, (logits, want)) in logits.iter().zip(&want).enumerate() {
            prop_assert_eq!(logits.len(), 11);
            for (logit, want_logit) in logits.iter().zip(want) {
                let far = (logit - want_logit).abs();
                prop_assert!(far <= SINGLE * largest(want), "{logit} {want_logit} at {position}");
            }
        }
        prop_assert_eq!(decoder.position(), tokens.len());
    }

    #[test]
    fn numbers_round_to_the_nearest_bf16(bits: u32) {
        let x = f32::from_bits(bits);
        let rounded = element::from_bf16(element::to_bf16(x));
        if x.is_nan() {
            prop_assert!(rounded.is_nan() && rounded.is_sign_negative() == x.is_sign_negative());
        } else if x.is_infinite() {
            prop_assert_eq!(rounded.to_bits(), x.to_bits());
        } else {
            // No neighbour is nearer; of two equally near the even one was taken.
            let code = element::to_bf16(x);
            let infinity = f64::from(f32::from_bits(0x7f00_0000)) * 2.0;
            let value = |code: u16| {
                let value = f64::from(element::from_bf16(code));
                if value.is_infinite() { infinity.copysign(value) } else { value }
            };
            let distance = |code: u16| (value(code) - f64::from(x)).abs();
            for other in [code.wrapping_sub(1), code.wrapping_add(1)] {
                let same_sign = (other ^ code) & 0x8000 == 0;
                if same_sign && !element::from_bf16(other).is_nan() {
                    prop_assert!(distance(code) <= distance(other));
                    prop_assert!(distance(code) < distance(other) || code & 1 == 0);
                }
            }
        }
    }
}

#[test]
fn special_numbers_round_as_they_should() {
    for (from, to) in [
        (0x0000_0000, 0x0000),
        (0x8000_0000, 0x8000),
        (0x3f80_8000, 0x3f80),
        (0x3f81_8000, 0x3f82),
        (0x3f80_8001, 0x3f81),
        (0x0000_8000, 0x0000),
        (0x0000_8001, 0x0001),
        (0x7f7f_8000, 0x7f80),
        (0xff80_0000, 0xff80),
        (0x7f80_0001, 0x7fc0),
        (0xffff_ffff, 0xffc0),
    ] {
        assert_eq!(element::to_bf16(f32::from_bits(from)), to, "{from:#010x}");
    }
}
