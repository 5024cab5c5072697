//! Messages from one guest to another through a region that both map: what is asked, and what a
//! message holds.
//!
//! Each exchange has its own place in the base window, of whole pages: the flag's, the answer's,
//! then the message's. Before the first message all of it is zeros.
//!
//! 1. The consumer reads the whole message, so that it holds these pages, and answers 1.
//! 2. For each round from 1 on, the producer waits for the answer `round`, stores the message of
//!    the round, flushes it, stores the flag `round`, and flushes that.
//! 3. The consumer waits for the flag, invalidates the message, reads it, says what it saw, and
//!    answers `round` + 1.
//!
//! Who waits invalidates what it waits for before each look. Nothing here takes the time: a party
//! that leaves out its flush or its invalidation is wrong in every round.

use serde::{Deserialize, Serialize};

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;

/// One side of an exchange.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessagePlan {
    /// Its name, for the report.
    pub name: String,
    /// Which side.
    pub role: Role,
    /// Where it lies in the base window, a multiple of 4096.
    pub offset: u64,
    /// Pages of a message.
    pub pages: u64,
    /// Messages.
    pub rounds: u64,
    /// Whether the producer flushes what it stored, as it must.
    pub flush: bool,
    /// Whether the consumer invalidates what it is about to read, as it must.
    pub invalidate: bool,
}

/// A side of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Stores messages.
    Producer,
    /// Reads them.
    Consumer,
}

impl MessagePlan {
    /// Bytes of a message.
    pub fn bytes(&self) -> u64 {
        self.pages.saturating_mul(PAGE)
    }

    /// Bytes of the whole exchange.
    pub fn span(&self) -> u64 {
        self.bytes().saturating_add(2 * PAGE)
    }
}

/// The message of a round; zeros for round 0, which is what there was before. Every line of it
/// differs from that of any other round.
pub(crate) fn message(round: u64, bytes: u64) -> Vec<u8> {
    let word =
        |at: u64| if round == 0 { 0 } else { (round << 40 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 };
    (0..bytes / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// The round whose message these bytes are, up to `last`; none if they are of several, or of none.
pub(crate) fn round_of(bytes: &[u8], last: u64) -> Option<u64> {
    (0..=last).rev().find(|round| message(*round, bytes.len() as u64) == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_known_by_every_line_of_it() {
        let bytes = 3 * PAGE;
        let all: Vec<_> = (0..5).map(|round| message(round, bytes)).collect();
        for (round, message) in all.iter().enumerate() {
            assert_eq!(message.len() as u64, bytes);
            assert_eq!(round_of(message, 4), Some(round as u64));
            for other in all.iter().filter(|other| *other != message) {
                assert!(message.chunks(64).zip(other.chunks(64)).all(|(line, other)| line != other));
            }
        }
        let mut torn = all[3].clone();
        torn[4096..4160].copy_from_slice(&all[2][4096..4160]);
        assert_eq!((round_of(&torn, 4), round_of(&all[4], 3)), (None, None));
    }
}
