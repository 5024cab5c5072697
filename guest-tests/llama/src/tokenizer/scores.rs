//! As llama2.c does it: byte pair encoding over a vocabulary with scores.
//!
//! The file: the length of the longest token (i32, unused here), then for each token its score
//! (f32), its length (i32) and its bytes, all little-endian. Tokens 0, 1 and 2 are the unknown one,
//! the beginning and the end; tokens 3 to 258 stand for single bytes.

use std::collections::HashMap;

use super::{MAX_TOKEN_BYTES, TokenizerError};

/// The token that begins a text. A model that writes it has come to the text's end.
pub const BOS: usize = 1;
/// The token that ends a text.
pub const EOS: usize = 2;
/// The token of byte 0; those of the other bytes follow.
const BYTES: usize = 3;
/// Tokens that are no text.
pub(super) const SPECIAL: usize = BYTES + 256;

/// A vocabulary with scores.
#[derive(Clone, Debug)]
pub(super) struct Scores {
    tokens: Vec<Vec<u8>>,
    ranks: Vec<f32>,
    /// The tokens that are text, by their bytes.
    by_bytes: HashMap<Vec<u8>, usize>,
}

impl Scores {
    /// The vocabulary in `file`, of a model with `vocab_size` tokens.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub(super) fn parse(file: &[u8], vocab_size: usize) -> Result<Self, TokenizerError> {
        let mut at = 4;
        let (mut tokens, mut scores) = (Vec::new(), Vec::new());
        while at < file.len() {
            let token = tokens.len();
            let mut take = |count: usize| {
                let cut = TokenizerError::CutOff { token, at, bytes: file.len() };
                let bytes = file.get(at..at.saturating_add(count)).ok_or(cut)?;
                at += count;
                Ok(bytes)
            };
            let word = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).expect("four bytes were taken");
            scores.push(f32::from_le_bytes(word(take(4)?)));
            let length = i32::from_le_bytes(word(take(4)?));
            let bytes = usize::try_from(length).ok().filter(|count| (1..=MAX_TOKEN_BYTES).contains(count));
            tokens.push(take(bytes.ok_or(TokenizerError::Length { token, length })?)?.to_vec());
        }
        if tokens.len() != vocab_size || vocab_size < SPECIAL {
            return Err(TokenizerError::Count { found: tokens.len(), wanted: vocab_size });
        }
        let text = tokens.iter().enumerate().skip(SPECIAL);
        let by_bytes = text.map(|(token, bytes)| (bytes.clone(), token)).collect();
        Ok(Self { tokens, ranks: scores, by_bytes })
    }

    /// The tokens of `text`, [`BOS`] first. Text begins with a space, as the model has learnt it.
    pub(super) fn encode(&self, text: &str) -> Vec<usize> {
        let mut tokens = vec![BOS];
        let spaced = if text.is_empty() { String::new() } else { format!(" {text}") };
        for character in spaced.chars() {
            let mut buffer = [0; 4];
            let bytes = character.encode_utf8(&mut buffer).as_bytes();
            match self.by_bytes.get(bytes) {
                Some(&token) => tokens.push(token),
                None => tokens.extend(bytes.iter().map(|&byte| BYTES + usize::from(byte))),
            }
        }
        // Of all pairs that make a token, the one with the best score is joined first, and of
        // equals the leftmost.
        while let Some((at, token)) = self.best_pair(&tokens) {
            tokens.splice(at..at + 2, [token]);
        }
        tokens
    }

    fn best_pair(&self, tokens: &[usize]) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        for (at, pair) in tokens.windows(2).enumerate() {
            if pair.iter().any(|&token| token < SPECIAL) {
                continue;
            }
            let joined = [self.tokens[pair[0]].as_slice(), &self.tokens[pair[1]]].concat();
            if let Some(&token) = self.by_bytes.get(&joined)
                && best.is_none_or(|(_, other)| self.ranks[token] > self.ranks[other])
            {
                best = Some((at, token));
            }
        }
        best
    }

    /// The text of `tokens`, without the special ones and the space that begins a text.
    pub(super) fn decode(&self, tokens: &[usize]) -> String {
        let mut bytes = Vec::new();
        let mut previous = None;
        for &token in tokens {
            match token {
                BYTES..SPECIAL => bytes.push(u8::try_from(token - BYTES).expect("256 of them")),
                SPECIAL.. => {
                    let piece = self.tokens.get(token).map_or(&[][..], Vec::as_slice);
                    let first = previous.is_none_or(|previous| previous == BOS);
                    bytes.extend_from_slice(piece.strip_prefix(b" ").filter(|_| first).unwrap_or(piece));
                }
                0..BYTES => {}
            }
            previous = Some(token);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
