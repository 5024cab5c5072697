//! As GPT-2 does it: byte pair encoding by the ranks of pairs.
//!
//! A text is cut at special tokens, what is between them into words ([`super::split`]), and a word
//! into bytes. Of all neighbours that make a pair, the one of the lowest rank is joined first, and
//! of equals the leftmost. Tokens are spelled in characters that stand for bytes: a printable one
//! of Latin-1 for itself, the others for U+0100 and up, in order.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{MAX_TOKEN_BYTES, TokenizerError, split::words};

/// The file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vocabulary {
    /// The tokens as they are spelled.
    pub tokens: Vec<String>,
    /// Pairs of tokens with a space between, the lowest rank first.
    pub pairs: Vec<String>,
    /// Tokens that are no text.
    pub special: Vec<usize>,
    /// The token that begins every text, if one does.
    pub begin: Option<usize>,
    /// The token of bytes that have none of their own, if there are such.
    pub unknown: Option<usize>,
    /// Tokens with which a text ends.
    pub ends: Vec<usize>,
}

/// A vocabulary with ranks.
#[derive(Clone, Debug)]
pub(super) struct Pairs {
    tokens: Vec<Vec<u8>>,
    bytes: Vec<usize>,
    /// Rank and result of a pair.
    joins: HashMap<(usize, usize), (usize, usize)>,
    /// Special tokens as they are spelled, the longest first.
    special: Vec<(String, usize)>,
    begin: Option<usize>,
    ends: Vec<usize>,
}

impl Pairs {
    pub(super) fn parse(file: &[u8], vocab_size: usize) -> Result<Self, TokenizerError> {
        let file: Vocabulary =
            serde_json::from_slice(file).map_err(|why| TokenizerError::Json { why: why.to_string() })?;
        let count = file.tokens.len();
        if count != vocab_size {
            return Err(TokenizerError::Count { found: count, wanted: vocab_size });
        }
        for &token in file.special.iter().chain(&file.begin).chain(&file.unknown).chain(&file.ends) {
            if token >= count {
                return Err(TokenizerError::NoToken { token, count });
            }
        }
        let mut special: Vec<_> =
            file.special.iter().map(|&token| (file.tokens[token].clone(), token)).collect();
        special.retain(|(text, _)| !text.is_empty());
        special.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));

        let of_char: HashMap<char, u8> = characters().into_iter().zip(0..=u8::MAX).collect();
        let no_text: HashSet<usize> = file.special.iter().copied().collect();
        let mut tokens = Vec::with_capacity(count);
        let mut by_bytes = HashMap::with_capacity(count);
        for (token, text) in file.tokens.iter().enumerate() {
            if text.len() > MAX_TOKEN_BYTES {
                let length = i32::try_from(text.len()).unwrap_or(i32::MAX);
                return Err(TokenizerError::Length { token, length });
            }
            let bytes: Option<Vec<u8>> = text.chars().map(|c| of_char.get(&c).copied()).collect();
            let bytes = bytes.filter(|_| !no_text.contains(&token)).unwrap_or_default();
            if !bytes.is_empty() {
                by_bytes.entry(bytes.clone()).or_insert(token);
            }
            tokens.push(bytes);
        }
        let mut bytes = vec![0; 256];
        for (byte, place) in (0..=u8::MAX).zip(&mut bytes) {
            let token = by_bytes.get([byte].as_slice()).copied().or(file.unknown);
            *place = token.ok_or(TokenizerError::NoByte { byte })?;
        }
        let mut joins = HashMap::with_capacity(file.pairs.len());
        for (rank, pair) in file.pairs.iter().enumerate() {
            let token = |text: &str| {
                let bytes: Vec<u8> = text.chars().map(|c| of_char.get(&c).copied()).collect::<Option<_>>()?;
                by_bytes.get(&bytes).copied()
            };
            let joined = || {
                let (first, second) = pair.split_once(' ')?;
                Some(((token(first)?, token(second)?), token(&format!("{first}{second}"))?))
            };
            let (pair, token) = joined().ok_or_else(|| TokenizerError::Pair { rank, pair: pair.clone() })?;
            joins.entry(pair).or_insert((rank, token));
        }
        Ok(Self { tokens, bytes, joins, special, begin: file.begin, ends: file.ends })
    }

    pub(super) fn ends(&self) -> &[usize] {
        &self.ends
    }

    pub(super) fn encode(&self, text: &str) -> Vec<usize> {
        let mut tokens: Vec<usize> = self.begin.into_iter().collect();
        let mut left = text;
        while !left.is_empty() {
            let found =
                self.special.iter().filter_map(|(text, token)| Some((left.find(text)?, text, *token)));
            // The first of them, and there the longest.
            let found = found.min_by_key(|(at, text, _)| (*at, std::cmp::Reverse(text.len())));
            let (plain, rest, token) = match found {
                Some((at, text, token)) => (&left[..at], &left[at + text.len()..], Some(token)),
                None => (left, "", None),
            };
            for word in words(plain) {
                self.word(word, &mut tokens);
            }
            tokens.extend(token);
            left = rest;
        }
        tokens
    }

    fn word(&self, word: &str, out: &mut Vec<usize>) {
        let mut tokens: Vec<usize> = word.bytes().map(|byte| self.bytes[usize::from(byte)]).collect();
        loop {
            let pairs = tokens.windows(2).enumerate();
            let ranked = pairs.filter_map(|(at, pair)| {
                self.joins.get(&(pair[0], pair[1])).map(|(rank, token)| (*rank, at, *token))
            });
            let Some((_, at, token)) = ranked.min() else { break };
            tokens.splice(at..at + 2, [token]);
        }
        out.extend(tokens);
    }

    pub(super) fn decode(&self, tokens: &[usize]) -> String {
        let bytes = tokens.iter().filter_map(|&token| self.tokens.get(token)).flatten();
        String::from_utf8_lossy(&bytes.copied().collect::<Vec<_>>()).into_owned()
    }
}

/// The character that stands for each byte.
pub(super) fn characters() -> Vec<char> {
    let mut others = (0x100..).filter_map(char::from_u32);
    let stands = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => others.next().expect("there are more characters than bytes"),
    };
    (0..=u8::MAX).map(stands).collect()
}
