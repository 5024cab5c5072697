//! What a model says of a text, and how far what it says moves with the precision of its weights.

use lamina_llama::{Decoder, Element, PlainCache, Route, Viewed, judge};

use super::subject::{Mixed, Subject};

/// Tokens that go through the model together: few enough that what they come to stays in the
/// caches.
const BATCH: usize = 64;

/// The logarithms of what a model thinks of each token that may follow, for each token of a text.
pub(crate) struct Answers {
    /// By token, then by what may follow.
    logarithms: Vec<f32>,
    vocabulary: usize,
    /// Which experts its tokens used.
    pub(crate) routes: Vec<Route>,
}

impl Answers {
    /// The answers of `model` to `text`.
    pub(crate) fn of(subject: &Subject, model: Mixed<'_>, text: &[usize]) -> Self {
        let weights = Viewed::new(subject.config, model, in_full());
        let (mut decoder, mut cache) = (Decoder::new(subject.config), PlainCache::new(&subject.config));
        let vocabulary = subject.config.vocab_size;
        let (mut logarithms, mut routes) = (Vec::with_capacity(text.len() * vocabulary), Vec::new());
        for tokens in text.chunks(BATCH) {
            let Ok(logits) = decoder.steps(&weights, &mut cache, tokens);
            for logits in logits.chunks_exact(vocabulary) {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
                #[expect(clippy::cast_possible_truncation, reason = "as exact as the logits")]
                let offset = sum.ln() as f32 + largest;
                logarithms.extend(logits.iter().map(|logit| logit - offset));
            }
            routes.extend_from_slice(decoder.routes());
        }
        Self { logarithms, vocabulary, routes }
    }

    /// The mean over the text of the Kullback-Leibler divergence of `other` from this, in nats.
    #[expect(clippy::cast_precision_loss, reason = "a text has at most 2^20 tokens")]
    pub(crate) fn divergence(&self, other: &Self) -> f64 {
        let tokens = self.logarithms.len() / self.vocabulary;
        let pairs = self.logarithms.iter().zip(&other.logarithms);
        let each = pairs.map(|(own, other)| f64::from(own.exp()) * f64::from(own - other));
        let mean = each.sum::<f64>() / tokens.max(1) as f64;
        // Below zero by rounding alone. Answers that are no numbers are as far as can be.
        if mean.is_nan() { f64::INFINITY } else { mean.max(0.0) }
    }

    /// Tokens that used this expert of this layer.
    pub(crate) fn routed(&self, (layer, expert): (usize, usize)) -> usize {
        self.routes.iter().filter(|route| (route.layer, route.expert) == (layer, expert)).count()
    }

    /// Whether all of them are numbers.
    pub(crate) fn are_finite(&self) -> bool {
        self.logarithms.iter().all(|logarithm| logarithm.is_finite())
    }
}

/// The perplexity of a text of two tokens or more.
pub(crate) fn perplexity(subject: &Subject, model: Mixed<'_>, text: &[usize]) -> Option<f64> {
    let weights = Viewed::new(subject.config, model, in_full());
    let (mut decoder, mut cache) = (Decoder::new(subject.config), PlainCache::new(&subject.config));
    let Ok(judged) = judge(&mut decoder, &weights, &mut cache, text, BATCH);
    judged.perplexity()
}

/// Masked views keep the container of bf16.
fn in_full() -> Element {
    Element::of("full").expect("a view of every bf16 tensor")
}
