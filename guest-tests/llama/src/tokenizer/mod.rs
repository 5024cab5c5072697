//! Text to tokens and back.
//!
//! | file | vocabulary |
//! |---|---|
//! | llama2.c's `tokenizer.bin` | pieces with scores, see [`scores`] |
//! | JSON that [`Vocabulary`] describes | pairs of pieces by rank, as GPT-2 has them, see [`pairs`] |

mod pairs;
mod scores;
mod split;

pub use pairs::Vocabulary;
pub use scores::{BOS, EOS};

use pairs::Pairs;
use scores::{SPECIAL, Scores};

/// Bytes that a token may have.
const MAX_TOKEN_BYTES: usize = 4096;

/// A vocabulary.
#[derive(Clone, Debug)]
pub struct Tokenizer(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Scores(Scores),
    Pairs(Pairs),
}

/// Why a file is no vocabulary.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TokenizerError {
    /// It ends too soon.
    #[error("the vocabulary ends inside token {token}, at byte {at} of {bytes}")]
    CutOff {
        /// The token.
        token: usize,
        /// Where the missing bytes should begin.
        at: usize,
        /// The file's bytes.
        bytes: usize,
    },
    /// A length that cannot be.
    #[error("token {token} of the vocabulary has {length} bytes; a token has 1 to {MAX_TOKEN_BYTES}")]
    Length {
        /// The token.
        token: usize,
        /// What it says.
        length: i32,
    },
    /// Another number of tokens than the model has.
    #[error("the vocabulary has {found} tokens, the model {wanted}; both are at least {SPECIAL}")]
    Count {
        /// Tokens in the file.
        found: usize,
        /// Tokens of the model.
        wanted: usize,
    },
    /// No JSON, or not of this shape.
    #[error("the vocabulary is not what is written here of a GGUF file's: {why}")]
    Json {
        /// What is wrong.
        why: String,
    },
    /// No token for a byte.
    #[error("the vocabulary has no token for byte {byte:#04x}, and none for what is unknown")]
    NoByte {
        /// The byte.
        byte: u8,
    },
    /// A pair that makes no token, or of no tokens.
    #[error("pair {rank} of the vocabulary, {pair:?}, is not two of its tokens that make a third")]
    Pair {
        /// Its place.
        rank: usize,
        /// The pair.
        pair: String,
    },
    /// A special token that is none.
    #[error("the vocabulary names token {token}; it has {count}")]
    NoToken {
        /// The token.
        token: usize,
        /// Tokens that there are.
        count: usize,
    },
}

impl Tokenizer {
    /// The vocabulary in `file`, of a model with `vocab_size` tokens.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn parse(file: &[u8], vocab_size: usize) -> Result<Self, TokenizerError> {
        // As llama2.c's first number, this were a token longer than any.
        Ok(Self(if file.starts_with(b"{\"") {
            Kind::Pairs(Pairs::parse(file, vocab_size)?)
        } else {
            Kind::Scores(Scores::parse(file, vocab_size)?)
        }))
    }

    /// The tokens of `text`, with the one that begins a text where the model wants it.
    pub fn encode(&self, text: &str) -> Vec<usize> {
        match &self.0 {
            Kind::Scores(scores) => scores.encode(text),
            Kind::Pairs(pairs) => pairs.encode(text),
        }
    }

    /// The text of `tokens`, without the special ones.
    pub fn decode(&self, tokens: &[usize]) -> String {
        match &self.0 {
            Kind::Scores(scores) => scores.decode(tokens),
            Kind::Pairs(pairs) => pairs.decode(tokens),
        }
    }

    /// The tokens with which a text ends.
    pub fn ends(&self) -> &[usize] {
        match &self.0 {
            Kind::Scores(_) => &[BOS, EOS],
            Kind::Pairs(pairs) => pairs.ends(),
        }
    }
}
