//! Keys of 128 bits: of an object by its name, of a prefix's block by the chain of its tokens.

use std::fmt;

use sha2::{Digest, Sha256};

/// What an object or a block is found by. It is compared whole.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub [u8; 16]);

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

fn digest(parts: &[&[u8]]) -> Key {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    let mut key = [0; 16];
    key.copy_from_slice(&hash.finalize()[..16]);
    Key(key)
}

impl Key {
    /// The key of a named object.
    pub fn of_name(name: &str) -> Self {
        digest(&[b"object\0", name.as_bytes()])
    }

    /// What places it in the table.
    pub(crate) fn place(&self) -> u64 {
        u128::from_le_bytes(self.0) as u64
    }

    /// What its tag holds of it: 48 bits that do not place it.
    pub(crate) fn short(&self) -> u64 {
        (u128::from_le_bytes(self.0) >> 80) as u64
    }
}

/// The chain of a prefix's blocks: each key says all tokens up to its block's end.
#[derive(Clone, Copy, Debug)]
pub struct Chain(Key);

impl Chain {
    /// The chain of one model and one layout of its cache. What differs in anything that makes a
    /// block unusable must differ here.
    pub fn new(model: &str) -> Self {
        Self(digest(&[b"chain\0", model.as_bytes()]))
    }

    /// The key of the next block.
    pub fn next(&mut self, tokens: &[u32]) -> Key {
        let mut hash = Sha256::new();
        hash.update(b"block\0");
        hash.update(self.0.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        self.0.0.copy_from_slice(&hash.finalize()[..16]);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocks_key_says_all_that_came_before() {
        let keys = |model: &str, blocks: &[[u32; 2]]| {
            let mut chain = Chain::new(model);
            blocks.iter().map(|tokens| chain.next(tokens)).collect::<Vec<_>>()
        };
        let one = keys("a", &[[1, 2], [3, 4], [5, 6]]);
        let other = keys("a", &[[1, 2], [3, 5], [5, 6]]);
        assert_eq!(one[0], other[0]);
        assert_ne!(one[1], other[1]);
        assert_ne!(one[2], other[2], "the same tokens after others");
        assert_ne!(one[0], keys("b", &[[1, 2]])[0]);
        assert_ne!(Key::of_name("a"), Key::of_name("b"));
    }
}
