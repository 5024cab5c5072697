//! Texts: written token by token, and judged token by token.
//!
//! Both tell a digest of every logit on the way, so that two runs that agree in it agree in
//! everything the model said, not only in the tokens that came of it.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use crate::{
    cache::KvCache,
    forward::Decoder,
    sampler::Sampler,
    tokenizer::{BOS, EOS},
    weights::Weights,
};

/// A text that a model wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The prompt, and what followed. The token that ended the text is not among them.
    pub tokens: Vec<usize>,
    /// SHA-256 of all logits, in hexadecimal.
    pub logits_sha256: String,
}

/// What a model thinks of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Tokens that were predicted: all but the first.
    pub predicted: usize,
    /// The sum of −ln p of each.
    pub surprise: f64,
    /// SHA-256 of all logits, in hexadecimal.
    pub logits_sha256: String,
}

impl Judged {
    /// e to the mean surprise; none where nothing was predicted.
    #[expect(clippy::cast_precision_loss, reason = "a sequence has at most 2^20 tokens")]
    pub fn perplexity(&self) -> Option<f64> {
        (self.predicted > 0).then(|| libm::exp(self.surprise / self.predicted as f64))
    }
}

/// Continues `prompt` until there are `limit` tokens or as many as the model can take, or the text
/// ends.
///
/// # Errors
/// When weights or cache cannot be read.
pub fn write<W, C>(
    decoder: &mut Decoder,
    weights: &mut W,
    cache: &mut C,
    prompt: &[usize],
    limit: usize,
    sampler: &mut Sampler,
) -> Result<Written, W::Error>
where
    W: Weights,
    C: KvCache<Error = W::Error>,
{
    let limit = limit.min(decoder.config().seq_len);
    let mut tokens = prompt[..prompt.len().min(limit)].to_vec();
    let mut digest = LogitsDigest::default();
    let mut next = 0;
    while next < tokens.len() && tokens.len() < limit {
        let logits = decoder.step(weights, cache, tokens[next])?;
        digest.add(logits);
        next += 1;
        if next == tokens.len() {
            let token = sampler.choose(logits);
            if token == BOS || token == EOS {
                break;
            }
            tokens.push(token);
        }
    }
    Ok(Written { tokens, logits_sha256: digest.finish() })
}

/// Reads `text`, at most as much of it as the model can take, and says how well each token was
/// foreseen.
///
/// # Errors
/// When weights or cache cannot be read.
pub fn judge<W, C>(
    decoder: &mut Decoder,
    weights: &mut W,
    cache: &mut C,
    text: &[usize],
) -> Result<Judged, W::Error>
where
    W: Weights,
    C: KvCache<Error = W::Error>,
{
    let steps = text.len().saturating_sub(1).min(decoder.config().seq_len);
    let mut digest = LogitsDigest::default();
    let mut surprise = 0.0;
    for step in 0..steps {
        let logits = decoder.step(weights, cache, text[step])?;
        digest.add(logits);
        surprise += surprise_of(logits, text[step + 1]);
    }
    Ok(Judged { predicted: steps, surprise, logits_sha256: digest.finish() })
}

/// −ln of the probability that `logits` give `token`.
fn surprise_of(logits: &[f32], token: usize) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum = logits.iter().fold(0.0, |sum, logit| sum + libm::exp(f64::from(logit - largest)));
    libm::log(sum) - f64::from(logits[token] - largest)
}

/// A digest of logits.
#[derive(Default)]
struct LogitsDigest(Sha256);

impl LogitsDigest {
    fn add(&mut self, logits: &[f32]) {
        for logit in logits {
            self.0.update(logit.to_le_bytes());
        }
    }

    fn finish(self) -> String {
        self.0.finalize().iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}"); // a String takes anything
            text
        })
    }
}
