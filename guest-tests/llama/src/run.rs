//! Texts: written token by token, and judged token by token.
//!
//! Both tell a digest of every logit on the way, so that two runs that agree in it agree in
//! everything the model said, not only in the tokens that came of it.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use crate::{cache::KvCache, forward::Decoder, sampler::Sampler, weights::Weights};

/// A text that a model wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The prompt, and what followed. The token that ended the text is not among them.
    pub tokens: Vec<usize>,
    /// SHA-256 of all logits, in hexadecimal.
    pub logits_sha256: String,
    /// Whether every logit is finite.
    pub are_finite: bool,
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
    /// Whether every logit is finite.
    pub are_finite: bool,
}

impl Judged {
    /// e to the mean surprise; none where nothing was predicted.
    #[expect(clippy::cast_precision_loss, reason = "a sequence has at most 2^20 tokens")]
    pub fn perplexity(&self) -> Option<f64> {
        (self.predicted > 0).then(|| libm::exp(self.surprise / self.predicted as f64))
    }
}

/// Goes on behind the tokens that `decoder` has taken, which `prompt` begins with, until there are
/// `limit` tokens or as many as the model can take, or the model chooses one of `ends`.
///
/// # Errors
/// When weights or cache cannot be read.
pub fn write<W, C>(
    decoder: &mut Decoder,
    weights: &W,
    cache: &mut C,
    prompt: &[usize],
    limit: usize,
    ends: &[usize],
    sampler: &mut Sampler,
) -> Result<Written, W::Error>
where
    W: Weights,
    C: KvCache<Error = W::Error>,
{
    let limit = limit.min(decoder.config().seq_len);
    let mut tokens = prompt[..prompt.len().min(limit)].to_vec();
    let mut digest = LogitsDigest::default();
    let mut next = decoder.position();
    while next < tokens.len() && tokens.len() < limit {
        let logits = decoder.step(weights, cache, tokens[next])?;
        digest.add(logits);
        next += 1;
        if next == tokens.len() {
            let token = sampler.choose(logits);
            if ends.contains(&token) {
                break;
            }
            tokens.push(token);
        }
    }
    let (logits_sha256, are_finite) = digest.finish();
    Ok(Written { tokens, logits_sha256, are_finite })
}

/// Reads `text`, at most as much of it as the model can take, and says how well each token was
/// foreseen. `batch` tokens, at least 1, go through the model together where the cache has room for
/// them; that changes nothing but what is loaded, and how often.
///
/// # Errors
/// When weights or cache cannot be read.
pub fn judge<W, C>(
    decoder: &mut Decoder,
    weights: &W,
    cache: &mut C,
    text: &[usize],
    batch: usize,
) -> Result<Judged, W::Error>
where
    W: Weights,
    C: KvCache<Error = W::Error>,
{
    let steps = text.len().saturating_sub(1).min(decoder.config().seq_len);
    let mut digest = LogitsDigest::default();
    let mut surprise = 0.0;
    let mut done = 0;
    while done < steps {
        let count = batch.clamp(1, cache.room().max(1)).min(steps - done);
        let logits = decoder.steps(weights, cache, &text[done..done + count])?;
        digest.add(logits);
        let of_tokens = logits.chunks_exact(logits.len() / count);
        for (logits, next) in of_tokens.zip(&text[done + 1..]) {
            surprise += surprise_of(logits, *next);
        }
        done += count;
    }
    let (logits_sha256, are_finite) = digest.finish();
    Ok(Judged { predicted: steps, surprise, logits_sha256, are_finite })
}

/// −ln of the probability that `logits` give `token`.
fn surprise_of(logits: &[f32], token: usize) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum = logits.iter().fold(0.0, |sum, logit| sum + libm::exp(f64::from(logit - largest)));
    libm::log(sum) - f64::from(logits[token] - largest)
}

/// Logits that are digested at once.
const LOGITS: usize = 1024;

/// A digest of logits.
#[derive(Default)]
struct LogitsDigest {
    sha256: Sha256,
    /// Whether one was NaN or infinite.
    overflown: bool,
}

impl LogitsDigest {
    fn add(&mut self, logits: &[f32]) {
        let mut bytes = Vec::with_capacity(4 * LOGITS);
        for logits in logits.chunks(LOGITS) {
            bytes.clear();
            bytes.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
            self.sha256.update(&bytes);
            self.overflown |= !logits.iter().all(|logit| logit.is_finite());
        }
    }

    /// In hexadecimal, and whether every logit was finite.
    fn finish(self) -> (String, bool) {
        let text = self.sha256.finalize().iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}"); // a String takes anything
            text
        });
        (text, !self.overflown)
    }
}
